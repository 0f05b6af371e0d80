"""
DeepSeek V4 in NumPy (Hugging Face's deepseek_v4): the reference that the trainer must equal bit for bit. NumPy and the
standard library only.

hc residual streams, mixed at both halves of a layer (hyper_connections.py). Attention over a window of keys that are
values as well, and in most layers also over entries that stand for several tokens (sparse_attention.py): all of them
where an entry has many (HCA), those that an indexer chooses where it has few (CSA). Then a mixture of experts of which
one, the shared one, sees every position; in the first layers the token decides on the others. Behind the last layer
there may be a module that predicts the token after the next (MTP). DeepSeek-AI 2026, arXiv:2606.19348 (the model),
2024, arXiv:2412.19437 (MTP, balance); doc/deepseek_v4.md.

    python dev/ref/deepseek_v4.py [--out DIR]   check the reference, then write the golden files (default: dev/golden)
    python dev/ref/deepseek_v4.py --check       check only (deepseek_v4_checks.py, which by itself compares with
                                                transformers)
    python dev/ref/deepseek_v4.py --from DIR --probe IN --probe-out OUT
                                                logits, loss and gradients of one batch for a folder with config.json
                                                and one file of floats, under any of the three families of names

The golden files have the layout that trainer.py describes, under the official names; param.layers.N.ffn.gate.tid2eid
(I32, (V, k)) are the tables of layers where the token decides. Activations, with M = (2 + hc) hc numbers of a site, H
heads of d channels, G groups of Ro outputs, W entries of a row, R = N k rows of the experts, sorted by (expert, n, j);
what only some layers have is stacked over those, ascending:
    layers      of the site hc_attn: hc_attn_r (B, T), hc_attn_z (B, T, M), hc_attn_pre, hc_attn_post (B, T, hc),
                hc_attn_comb (B, T, hc, hc), hc_attn_y (B, T, D); norm1, norm1_rstd, q_low (wq_a's output), q_low_rstd,
                q_low_norm, q_proj (wq_b's), q_rstd (B, T, H), q (after norm and RoPE), kv_proj, kv_rstd, kv (after
                RoPE), att_max, att_inv (B, H, T), attention (B, T, H d, turned back), out_low (B, T, G Ro),
                attention_out, streams1 (B, T, hc, D); of the site hc_ffn the same, norm2, norm2_rstd, router_logits,
                scores (B, T, E), experts (I32), weights (B, T, k), expert_gate_up (R, 2F), expert_hidden (R, F),
                expert_out (R, D), shared_gate_up, shared_hidden, shared_out, moe, streams2; of the leaf counts (I32)
    csa, hca    csa_v, csa_g (B, T, C: the compressor's layers, g without ape), csa_pool, csa_pool_rstd, csa_entries
                (after RoPE); hca_ the same
    csa         index_v, index_g, index_pool, index_pool_rstd, index_k (B, W, dI), index_q (B, T, nI dI, after RoPE),
                index_proj, index_weights (B, T, nI), index_scores (B, T, W: also those of entries that are not seen),
                index_chosen (I32, (B, T, min(topk, W)), ascending, -1: no more); index_losses (B, T) where it is
                trained
    outside     encoded, hc_head_r, hc_head_z, hc_head_pre, hc_head_y, norm, norm_rstd, logits, probs, losses; with MTP
                the same names behind mtp_, and mtp_embedding_norm, mtp_embedding_rstd, mtp_hidden_norm (B, T, hc, D),
                mtp_hidden_rstd, mtp_streams0, mtp_next (I32)
Numbers of an update: loss, cross_entropy; counts (I32, layers, then MTP's); with MTP mtp_loss; with the loss per
sequence balance; where the indexer is trained index_loss (layers with CSA), which is not in the loss: no parameter has
both.

How a number comes about: float32, each + - * / and sqrt rounded once, every sum a chain with ascending index, products
in it by fused multiply-add, functions correctly rounded (exact.py). With float64 parameters everything is computed in
float64. In shapes N = B*T positions, E experts, F their width. Where more than one order would do:
    streams          hyper_connections.py. Embedding: its gradient is a chain over the streams
    norms            rmsnorm (ops.py); that of each head of q has no gain. In backward their dx is added to zeros
    RoPE             neighbours among the last channels. Frequencies of windows as ops.rope_tables has them, f; with
                     YaRN s = 1 - ramp, f = (f / factor) (1 - s) + f s, the ramp (i - low) / (high - low), cut to 0..1;
                     low and high in double. Positions are those in the document
    attention        sparse_attention.py: keys are the window's, ascending, then entries, ascending. Turned back, then
                     group g's Ro outputs of its H/G heads, then wo_b
    indexer          its weights are index_proj times c, c = 1 / sqrt(dI nI). Its gradients stop at norm1 and q_low_norm
    dnorm1           one chain over the outputs of wq_a, wkv, the compressor's wkv, its wgate
    experts          experts.py, scores sqrt(softplus(z)); dnorm2 is its dx. Balance: of layers that have a bias, not
                     MTP's; means over leaves, summed over layers. Weight in the gradient: seq_balance_coef (1 / (rows
                     of all leaves))
    MTP              positions, tokens and targets as in qwen36.py; each stream's start is one chain over the
                     embedding's D inputs of e_proj, on over the stream's D of h_proj. dh_proj: chains over (position,
                     stream); what e_proj gets is a chain over the streams
    streams' end     their gradient is what the head's collapse gives, then MTP's is added
    loss             cross entropy + (mtp_weight * mtp_loss + seq_balance_coef * balance); of which what is 0 is left
                     out
    head's gradient  one chain over the positions of the trunk, on over those of MTP
    embedding        MTP's positions ascending are added, then the trunk's
"""
import math
import sys
from collections import namedtuple
from dataclasses import replace

import numpy as np

import exact
import experts
import hyper_connections as hyper
import sparse_attention as sparse
import trainer
from deepseek_v4_config import (CSA, HCA, SLIDING, fit, metadata, mtp_layer, parameter_table, read_config,
                                tables_to_disk)
from exact import chain_matmul, chain_sum, tree_sum
from ops import (back_through, classifier_backward, classifier_forward, embedding_backward, embedding_forward,
                 linear_forward, loss_gradient, merge_heads, rmsnorm_forward, rope, rope_backward, rope_frequencies,
                 rope_tables_at, rows, split_heads, through, turn_heads, weight_gradient)
from qwen36 import Layer, mtp_batch
from sparse_attention import norm_backward


# ---------------------------------------------------------------------------------------------------------------------
# What all layers share of a batch: documents, windows, RoPE.
# ---------------------------------------------------------------------------------------------------------------------
def yarn_range(yarn, theta, n):
    """Pairs from which on, and up to which, frequencies are in between"""
    def pair(turns):
        return n * math.log(yarn.original / (2 * math.pi * turns)) / (2 * math.log(theta))
    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), n - 1)
    return low, high + 0.001 if low == high else high


def frequencies(n, theta, yarn, dtype):
    """(n / 2) of a head of which n channels turn"""
    one, zero = dtype.type(1), dtype.type(0)
    frequency = rope_frequencies(n, theta, dtype)
    if yarn is None:
        return frequency
    low, high = yarn_range(yarn, theta, n)
    ramp = (np.arange(n // 2).astype(dtype) - dtype.type(low)) / dtype.type(high - low)
    slow = one - np.minimum(np.maximum(ramp, zero), one)
    return (frequency / dtype.type(yarn.factor)) * (one - slow) + frequency * slow


class Where:
    """Of a batch: the tokens, windows of CSA and HCA, tables of RoPE (B, T, rd / 2) for each kind of layer"""

    def __init__(self, cfg, inputs, dtype, starts):
        self.inputs, self.starts = inputs, starts
        self.windows = {CSA: sparse.Windows(starts, inputs.shape, cfg.csa_ratio),
                        HCA: sparse.Windows(starts, inputs.shape, cfg.hca_ratio)}
        self.document = self.windows[CSA].document
        positions = sparse.Windows(starts, inputs.shape, inputs.shape[1]).place
        own = rope_tables_at(positions, frequencies(cfg.rotary, cfg.compress_rope_theta, cfg.yarn, dtype))
        self.turns = {SLIDING: rope_tables_at(positions, frequencies(cfg.rotary, cfg.rope_theta, None, dtype)),
                      CSA: own, HCA: own}
        self.local = sparse.window_seen(self.document, cfg.sliding_window)


# ---------------------------------------------------------------------------------------------------------------------
# Attention of one layer: x is the normed input, which all its linear layers read.
# ---------------------------------------------------------------------------------------------------------------------
SHORT = {CSA: "csa", HCA: "hca"}


def compressor_forward(name, x, layer, cfg, a, where, kind):
    """entries (B, W, channels)"""
    w = layer.w
    a[name + "_v"], a[name + "_g"] = layer.linear(name + "_wkv", x), layer.linear(name + "_wgate", x)
    entries, a[name + "_pool"], a[name + "_pool_rstd"] = sparse.compress_forward(
        a[name + "_v"], a[name + "_g"], w[name + "_ape"], w[name + "_norm"], cfg.rms_norm_eps, where.windows[kind],
        kind == CSA, where.turns[kind])
    return entries


def compressor_backward(name, dentries, layer, a, where, kind):
    """dv, dg"""
    w, g = layer.w, layer.g
    dv, dg, g[name + "_ape"], g[name + "_norm"] = sparse.compress_backward(
        dentries, a[name + "_v"], a[name + "_g"], w[name + "_ape"], w[name + "_norm"], a[name + "_pool"],
        a[name + "_pool_rstd"], where.windows[kind], kind == CSA, where.turns[kind])
    return dv, dg


def index_heads(a, cfg):
    return a["index_q"].reshape(*a["index_q"].shape[:2], cfg.index_n_heads, -1)


def indexer_forward(x, layer, cfg, a, where):
    """(B, T, W): which entries a position attends to"""
    a["index_k"] = compressor_forward("index", x, layer, cfg, a, where, CSA)
    a["index_q"] = turn_heads(layer.linear("index_wq_b", a["q_low_norm"]), cfg.index_n_heads, where.turns[CSA], rope)
    a["index_proj"] = layer.linear("index_proj", x)
    a["index_weights"] = a["index_proj"] * sparse.index_scale(cfg, x.dtype)
    a["index_scores"] = sparse.index_forward(index_heads(a, cfg), a["index_k"], a["index_weights"])
    visible = where.windows[CSA].visible()
    chosen = visible if cfg.indexer_train == "dense" else sparse.choose(a["index_scores"], visible, cfg.index_topk)
    a["index_chosen"] = sparse.listed(chosen, chosen.shape[-1] if cfg.indexer_train == "dense" else cfg.index_topk)
    return chosen


def indexer_backward(att, x, layer, cfg, a, where, count):
    """Gradients of the indexer's parameters; att (B, H, T, W): of all entries"""
    chosen = sparse.chosen_of(a["index_chosen"], att.shape[-1])
    dscores = sparse.index_loss_backward(a["index_scores"], sparse.mass_of(att), chosen,
                                         loss_gradient(x.dtype, max(count, 1)))
    dq, dk, da = sparse.index_gradients(dscores, index_heads(a, cfg), a["index_k"], a["index_weights"])
    dq = turn_heads(dq.reshape(a["index_q"].shape), cfg.index_n_heads, where.turns[CSA], rope_backward)
    dv, dg = compressor_backward("index", dk, layer, a, where, CSA)
    layer.g["index_wq_b"] = weight_gradient(dq, a["q_low_norm"])
    layer.g["index_proj"] = weight_gradient(sparse.index_scale(cfg, x.dtype) * da, x)
    layer.g["index_wkv"], layer.g["index_wgate"] = weight_gradient(dv, x), weight_gradient(dg, x)


def seen_keys(kind, a, where):
    """(B, T, T + W)"""
    if kind == SLIDING:
        return where.local
    entries = where.windows[kind].visible()
    if kind == CSA:
        entries = sparse.chosen_of(a["index_chosen"], entries.shape[-1])
    return np.concatenate([where.local, entries], axis=-1)


def all_keys(kind, a):
    return a["kv"] if kind == SLIDING else np.concatenate([a["kv"], a[SHORT[kind] + "_entries"]], axis=1)


def group_forward(o, wo_a, G):
    """(B, T, G * R): each group's rows of wo_a over its heads"""
    return np.concatenate([linear_forward(x, w) for x, w in zip(np.split(o, G, axis=-1), np.split(wo_a, G))], axis=-1)


def group_backward(dout, o, wo_a, G):
    """do, dwo_a"""
    parts = list(zip(np.split(dout, G, axis=-1), np.split(o, G, axis=-1), np.split(wo_a, G)))
    return (np.concatenate([back_through(np.zeros_like(x), d, w) for d, x, w in parts], axis=-1),
            np.concatenate([weight_gradient(d, x) for d, x, _ in parts]))


def attention_forward(x, layer, kind, cfg, a, where):
    w, eps, H, turns = layer.w, cfg.rms_norm_eps, cfg.num_attention_heads, where.turns[kind]
    a["q_low"] = layer.linear("wq_a", x)
    a["q_low_norm"], a["q_low_rstd"] = rmsnorm_forward(a["q_low"], w["q_norm"], eps)
    a["q_proj"] = layer.linear("wq_b", a["q_low_norm"])
    heads = a["q_proj"].reshape(*x.shape[:2], H, -1)
    q, a["q_rstd"] = rmsnorm_forward(heads, np.ones_like(w["kv_norm"]), eps)
    a["q"] = turn_heads(q.reshape(a["q_proj"].shape), H, turns, rope)
    a["kv_proj"] = layer.linear("wkv", x)
    kv, a["kv_rstd"] = rmsnorm_forward(a["kv_proj"], w["kv_norm"], eps)
    a["kv"] = turn_heads(kv, 1, turns, rope)
    if kind != SLIDING:
        name = SHORT[kind]
        a[name + "_entries"] = compressor_forward(name, x, layer, cfg, a, where, kind)
    if kind == CSA:
        chosen = indexer_forward(x, layer, cfg, a, where)
    out, att, a["att_max"], a["att_inv"] = sparse.sink_forward(split_heads(a["q"], H), all_keys(kind, a),
                                                               seen_keys(kind, a, where), w["attn_sink"])
    if kind == CSA and cfg.indexer_train != "off":
        a["index_losses"] = sparse.index_loss_forward(a["index_scores"], sparse.mass_of(att[..., x.shape[1]:]), chosen)
    a["attention"] = turn_heads(merge_heads(out), H, turns, rope_backward)
    a["out_low"] = group_forward(a["attention"], w["wo_a"], cfg.o_groups)
    a["attention_out"] = layer.linear("wo_b", a["out_low"])


def attention_backward(dout, x, layer, kind, cfg, a, where, count):
    """dx; count: positions that have a loss of the indexer"""
    w, g, H, T, turns = layer.w, layer.g, cfg.num_attention_heads, x.shape[1], where.turns[kind]
    dlow = layer.linear_backward("wo_b", dout, a["out_low"])
    do, g["wo_a"] = group_backward(dlow, a["attention"], w["wo_a"], cfg.o_groups)
    do = split_heads(turn_heads(do, H, turns, rope), H)
    q, keys = split_heads(a["q"], H), all_keys(kind, a)
    att, _, _ = sparse.sink_weights(q, keys, seen_keys(kind, a, where), w["attn_sink"])
    dq, dkeys, g["attn_sink"] = sparse.sink_backward(do, q, keys, att, w["attn_sink"], a["att_max"], a["att_inv"])
    dq = turn_heads(merge_heads(dq), H, turns, rope_backward).reshape(*x.shape[:2], H, -1)
    dq, _ = norm_backward(dq, a["q_proj"].reshape(dq.shape), np.ones_like(w["kv_norm"]), a["q_rstd"])
    dq_low = layer.linear_backward("wq_b", dq.reshape(a["q_proj"].shape), a["q_low_norm"])
    dq_low, g["q_norm"] = norm_backward(dq_low, a["q_low"], w["q_norm"], a["q_low_rstd"])
    dx = layer.linear_backward("wq_a", dq_low, x)
    dkv = turn_heads(dkeys[:, :T], 1, turns, rope_backward)
    dkv, g["kv_norm"] = norm_backward(dkv, a["kv_proj"], w["kv_norm"], a["kv_rstd"])
    dx = layer.linear_backward("wkv", dkv, x, dx)
    if kind != SLIDING:
        name = SHORT[kind]
        dv, dg = compressor_backward(name, dkeys[:, T:], layer, a, where, kind)
        dx = layer.linear_backward(name + "_wkv", dv, x, dx)
        dx = layer.linear_backward(name + "_wgate", dg, x, dx)
    if kind == CSA and cfg.indexer_train != "off":
        indexer_backward(att[..., T:], x, layer, cfg, a, where, count)
    return dx


# ---------------------------------------------------------------------------------------------------------------------
# One layer: two sites.
# ---------------------------------------------------------------------------------------------------------------------
def site_of(w, name):
    return tuple(w[f"{name}_{part}"] for part in ("fn", "base", "scale"))


def take_site(g, name, gradients):
    g.update({f"{name}_{part}": x for part, x in zip(("fn", "base", "scale"), gradients)})


def saved_of(a, name):
    prefix = name + "_"
    return {key[len(prefix):]: x for key, x in a.items() if key.startswith(prefix)}


def site_forward(X, name, norm, number, layer, cfg, a):
    """The normed input of a half"""
    a.update({f"{name}_{key}": x for key, x in hyper.site_forward(X, site_of(layer.w, name), cfg.hyper).items()})
    a[f"norm{number}"], a[f"norm{number}_rstd"] = rmsnorm_forward(a[name + "_y"], layer.w[norm], cfg.rms_norm_eps)
    return a[f"norm{number}"]


def site_backward(dX, dnorm, dpost, dcomb, X, name, norm, number, layer, cfg, a):
    """The gradient of the streams before a site"""
    dy, layer.g[norm] = norm_backward(dnorm, a[name + "_y"], layer.w[norm], a[f"norm{number}_rstd"])
    dX, g = hyper.site_backward(dX, dy, dpost, dcomb, X, saved_of(a, name), site_of(layer.w, name), cfg.hyper)
    take_site(layer.g, name, g)
    return dX


def block_forward(X, layer, kind, cfg, a, where, given):
    """The streams behind the layer; adds to the activations a"""
    x = site_forward(X, "hc_attn", "attn_norm", 1, layer, cfg, a)
    attention_forward(x, layer, kind, cfg, a, where)
    a["streams1"] = hyper.expand(a["attention_out"], X, a["hc_attn_post"], a["hc_attn_comb"])
    x = site_forward(a["streams1"], "hc_ffn", "ffn_norm", 2, layer, cfg, a)
    experts.moe_forward(x, layer, cfg, a, given)
    a["streams2"] = hyper.expand(a["moe"], a["streams1"], a["hc_ffn_post"], a["hc_ffn_comb"])
    return a["streams2"]


def block_backward(dX, X, layer, kind, cfg, a, where, has_balance, count):
    """The gradient of X; those of the parameters go into layer.g"""
    df, dX, dpost, dcomb = hyper.expand_backward(dX, a["moe"], a["streams1"], a["hc_ffn_post"], a["hc_ffn_comb"])
    dnorm = experts.moe_backward(df, a["norm2"], layer, cfg, a, has_balance)
    dX = site_backward(dX, dnorm, dpost, dcomb, a["streams1"], "hc_ffn", "ffn_norm", 2, layer, cfg, a)
    df, dX, dpost, dcomb = hyper.expand_backward(dX, a["attention_out"], X, a["hc_attn_post"], a["hc_attn_comb"])
    dnorm = attention_backward(df, a["norm1"], layer, kind, cfg, a, where, count)
    return site_backward(dX, dnorm, dpost, dcomb, X, "hc_attn", "attn_norm", 1, layer, cfg, a)


# ---------------------------------------------------------------------------------------------------------------------
# From streams to losses, for the trunk and for MTP (prefix mtp_).
# ---------------------------------------------------------------------------------------------------------------------
def head_forward(X, p, prefix, targets, cfg, a):
    site = site_of(p, prefix + "hc_head")
    a.update({f"hc_head_{key}": x for key, x in hyper.head_forward(X, site, cfg.hyper).items()})
    a["norm"], a["norm_rstd"] = rmsnorm_forward(a["hc_head_y"], p[prefix + "norm"], cfg.rms_norm_eps)
    a["logits"] = linear_forward(a["norm"], p["head"])
    a["probs"], a["losses"] = classifier_forward(a["logits"], targets, cfg.vocab_size, exact)


def head_backward(X, p, prefix, targets, count, weight, cfg, a, g):
    """dX; the head's gradient is added to what g has"""
    dlogits = classifier_backward(a["probs"], targets, cfg.vocab_size, max(count, 1), weight)
    g["head"] = chain_matmul(g["head"], rows(dlogits).T, rows(a["norm"]))
    dnorm = back_through(np.zeros_like(a["norm"]), dlogits, p["head"])
    dy, g[prefix + "norm"] = norm_backward(dnorm, a["hc_head_y"], p[prefix + "norm"], a["norm_rstd"])
    dX, site = hyper.head_backward(dy, X, saved_of(a, "hc_head"), site_of(p, prefix + "hc_head"))
    take_site(g, prefix + "hc_head", site)
    return dX


def mtp_forward(X, p, inputs, targets, cfg, where):
    a, eps = {}, cfg.rms_norm_eps
    a["next"], target = mtp_batch(inputs, targets, where.starts)
    a["embedding_norm"], a["embedding_rstd"] = rmsnorm_forward(p["embed"][a["next"]], p["mtp_enorm"], eps)
    a["hidden_norm"], a["hidden_rstd"] = rmsnorm_forward(X, p["mtp_hnorm"], eps)
    start = linear_forward(a["embedding_norm"], p["mtp_e_proj"])
    a["streams0"] = through(np.repeat(start[:, :, None], cfg.hc_mult, axis=2), a["hidden_norm"], p["mtp_h_proj"])
    X = block_forward(a["streams0"], mtp_layer(p), SLIDING, cfg, a, where, None)
    head_forward(X, p, "mtp_", target, cfg, a)
    return a


def mtp_backward(X, p, inputs, targets, count, cfg, where, a, g):
    """What is added to the gradient of X; the embedding's is added to g"""
    _, target = mtp_batch(inputs, targets, where.starts)
    dX = head_backward(a["streams2"], p, "mtp_", target, count, cfg.mtp_weight, cfg, a, g)
    layer = mtp_layer(p)
    dX = block_backward(dX, a["streams0"], layer, SLIDING, cfg, a, where, False, 0)
    g.update({"mtp_" + name: x for name, x in layer.g.items()})
    dstart = chain_sum(dX, axis=2)
    g["mtp_h_proj"] = weight_gradient(dX, a["hidden_norm"])
    g["mtp_e_proj"] = weight_gradient(dstart, a["embedding_norm"])
    de = back_through(np.zeros_like(dstart), dstart, p["mtp_e_proj"])
    de, g["mtp_enorm"] = norm_backward(de, p["embed"][a["next"]], p["mtp_enorm"], a["embedding_rstd"])
    embedding_backward(g["embed"], None, de, a["next"])
    dh = back_through(np.zeros_like(dX), dX, p["mtp_h_proj"])
    dX, g["mtp_hnorm"] = norm_backward(dh, X, p["mtp_hnorm"], a["hidden_rstd"])
    return dX


# ---------------------------------------------------------------------------------------------------------------------
# The model. One micro-batch, forward and backward.
# ---------------------------------------------------------------------------------------------------------------------
Counts = namedtuple("Counts", "main mtp index")  # of an update: counted targets, positions with a loss of the indexer


def count(inputs, targets, cfg, starts=None):
    """Of all leaves, (..., B, T)"""
    shape = (-1, targets.shape[-1])
    after = mtp_batch(inputs.reshape(shape), targets.reshape(shape), starts)[1]
    sees = sparse.Windows(starts, inputs.reshape(shape).shape, cfg.csa_ratio).visible().any(axis=-1)
    return Counts(int((targets >= 0).sum()), int((after >= 0).sum()), int(sees.sum()))


def layer_of(p, cfg, l):
    return Layer({row.name: p[row.name][i] for row, i in trainer.layer_rows(parameter_table(cfg), l)})


def streams_before(acts, cfg, l):
    if l > 0:
        return acts["blocks"][l - 1]["streams2"]
    return np.repeat(acts["encoded"][:, :, None], cfg.hc_mult, axis=2)


def forward(p, inputs, targets, cfg, starts=None):
    """Every activation of one micro-batch; those of the layers in acts["blocks"][l]. starts (B, T): 1 where a document
    begins."""
    acts = {"encoded": embedding_forward(p["embed"], None, inputs), "blocks": []}
    where = Where(cfg, inputs, p["embed"].dtype, starts)
    for l in range(cfg.num_hidden_layers):
        a, given = {}, None
        if l in cfg.hash_layers:
            given = np.array(cfg.tid2eid[cfg.hash_layers.index(l)])[inputs]
        block_forward(streams_before(acts, cfg, l), layer_of(p, cfg, l), cfg.kinds[l], cfg, a, where, given)
        acts["blocks"].append(a)
    X = streams_before(acts, cfg, cfg.num_hidden_layers)
    head_forward(X, p, "", targets, cfg, acts)
    if cfg.mtp:
        acts.update({"mtp_" + name: x for name, x in mtp_forward(X, p, inputs, targets, cfg, where).items()})
    return acts


def backward(p, acts, inputs, targets, count, cfg, starts=None):
    """Parameter gradients of one micro-batch: forward upside down"""
    g = {row.name: np.zeros_like(p[row.name]) for row in parameter_table(cfg)}
    where = Where(cfg, inputs, p["embed"].dtype, starts)
    X = streams_before(acts, cfg, cfg.num_hidden_layers)
    dX = head_backward(X, p, "", targets, count.main, None, cfg, acts, g)
    if cfg.mtp:
        dX = dX + mtp_backward(X, p, inputs, targets, count.mtp, cfg, where, saved_of(acts, "mtp"), g)
    for l in reversed(range(cfg.num_hidden_layers)):
        layer = layer_of(p, cfg, l)
        has_balance = cfg.seq_balance_coef > 0 and l in cfg.bias_layers
        dX = block_backward(dX, streams_before(acts, cfg, l), layer, cfg.kinds[l], cfg, acts["blocks"][l], where,
                            has_balance, count.index)
        for row, i in trainer.layer_rows(parameter_table(cfg), l):
            if row.name in layer.g:
                g[row.name][i] = layer.g[row.name]
    embedding_backward(g["embed"], None, chain_sum(dX, axis=2), inputs)
    return g


def numbers(acts, count, cfg):
    """What an update tells: its losses, and how the experts were loaded. acts: of the leaves"""
    cross_entropy = trainer.loss_of([leaf["losses"] for leaf in acts], count.main)
    scalar, out, more = cross_entropy.dtype.type, {}, []
    counts = [[a["counts"] for a in leaf["blocks"]] + ([leaf["mtp_counts"]] if cfg.mtp else []) for leaf in acts]
    if cfg.mtp:
        out["mtp_loss"] = trainer.loss_of([leaf["mtp_losses"] for leaf in acts], max(count.mtp, 1))
        more.append(scalar(cfg.mtp_weight) * out["mtp_loss"])
    if cfg.seq_balance_coef and cfg.bias_layers:
        out["balance"] = experts.balance_of_layers(acts, cfg.bias_layers)
        more.append(scalar(cfg.seq_balance_coef) * out["balance"])
    if cfg.indexer_train != "off" and cfg.of_kind(CSA):
        out["index_loss"] = np.stack([trainer.loss_of([leaf["blocks"][l]["index_losses"] for leaf in acts],
                                                      max(count.index, 1)) for l in cfg.of_kind(CSA)])
    return {"loss": trainer.total(cross_entropy, more), "cross_entropy": cross_entropy, "counts": tree_sum([np.stack(x) for x in counts]), **out}


def level_biases(p, numbers, cfg):
    """Of the layers that have a bias, and of MTP's"""
    counts, p = numbers["counts"], dict(p)
    if cfg.bias_update_rate and cfg.bias_layers:
        p["selection_bias"] = experts.level_biases(p["selection_bias"], counts[list(cfg.bias_layers)], cfg)
    if cfg.bias_update_rate and cfg.mtp:
        p["mtp_selection_bias"] = experts.level_biases(p["mtp_selection_bias"], counts[-1], cfg)
    return p


MODEL = trainer.Model(parameter_table, forward, backward, read_config, metadata, numbers=numbers,
                      after_update=level_biases, fit=fit, losses=("loss", "cross_entropy"),
                      other_losses=("mtp_loss", "index_loss"), count=count)


# ---------------------------------------------------------------------------------------------------------------------
# The golden runs. Together they have all kinds of layers, a window that is crossed, tokens behind the last entry, more
# entries than are chosen, tables with one expert twice, ties of the router, an expert without rows, gates and ups
# beyond the limit, YaRN and none, MTP, the indexer's loss, balance and its bias, targets that are not counted, sizes
# that divide nothing.
# ---------------------------------------------------------------------------------------------------------------------
TEXT = {"model_type": "deepseek_v4", "vocab_size": 23, "hidden_size": 10, "num_hidden_layers": 4,
        "layer_types": [SLIDING, CSA, HCA, CSA], "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {CSA: 3, HCA: 5}, "num_attention_heads": 4, "head_dim": 8, "qk_rope_head_dim": 6,
        "q_lora_rank": 5, "o_groups": 2, "o_lora_rank": 3, "sliding_window": 4, "index_n_heads": 3,
        "index_head_dim": 7, "index_topk": 2, "hc_mult": 3, "hc_sinkhorn_iters": 5, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 5, "routed_scaling_factor": 1.5, "swiglu_limit": 0.5,
        "max_position_embeddings": 64, "rope_theta": 1e4, "compress_rope_theta": 100.0,
        "rope_parameters": {"main": {"rope_type": "default", "rope_theta": 1e4},
                            "compress": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 8,
                                         "beta_slow": 1, "original_max_position_embeddings": 64}}}
MTP = {**TEXT, "vocab_size": 23, "hidden_size": 9, "num_hidden_layers": 2, "layer_types": [HCA, CSA],
       "mlp_layer_types": ["hash_moe", "moe"], "num_attention_heads": 2, "o_groups": 1, "hc_mult": 2, "hc_eps": 1e-5,
       "hc_sinkhorn_iters": 3, "n_routed_experts": 5, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5,
       "swiglu_limit": 1.0, "rope_parameters": None, "mtp_weight": 0.3, "indexer_train": "kl", "seq_balance_coef": 0.01,
       "bias_update_rate": 0.001}


def draw_tables(cfg):
    """tid2eid of each hash layer: k numbers for each token, some twice"""
    stream = exact.Xorshift(23)
    return replace(cfg, tid2eid=tuple(tuple(tuple(stream.u32() % cfg.n_routed_experts
                                                  for _ in range(cfg.num_experts_per_tok))
                                            for _ in range(cfg.vocab_size)) for _ in cfg.hash_layers))


def text_run():
    cfg = draw_tables(replace(read_config(TEXT, "TEXT", 2, 17), lr=3e-3, schedule="cosine", warmup=3, final_lr=0.1,
                              beta2=0.95, clip=1.0))
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=1.0, vector_spread=0.5)
    p["router"][1, 1:] = p["router"][1, 1]  # ties: at the start only the bias tells experts 1, 2 and 3 apart
    p["selection_bias"][0] = [0.125, -0.25, 0.25, -0.25]
    inputs, targets = trainer.draw_data(cfg)
    trainer.ignore_targets(targets)
    return cfg, p, inputs, targets


def mtp_run():
    cfg = draw_tables(replace(read_config(MTP, "MTP", 2, 13), leaves=2, lr=2e-3, schedule="wsd", clip=0.5))
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=1.0, vector_spread=0.5)
    inputs, targets = trainer.draw_data(cfg)
    trainer.ignore_targets(targets)
    targets[4, 1] = -1  # a leaf without a counted target
    return cfg, p, inputs, targets


RUNS = {"deepseek_v4_text": text_run, "deepseek_v4_mtp": mtp_run}


def write_golden(folder):
    for name, run in RUNS.items():
        cfg, *more = run()
        tensors = trainer.golden_tensors(MODEL, cfg, *more)
        tensors.update({"param." + name: x for name, x in tables_to_disk(cfg).items()})
        trainer.write_file(folder, name, tensors, metadata(cfg))


if __name__ == "__main__":
    import deepseek_v4_checks
    sys.exit(trainer.main(MODEL, "DeepSeek V4", deepseek_v4_checks.promises, write_golden,
                          ("--check", "check the reference and write nothing",
                           lambda: exact.report(deepseek_v4_checks.promises()))))
