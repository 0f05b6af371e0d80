"""
GLM-5, GLM-5.1 and GLM-5.2 in NumPy (Hugging Face's glm_moe_dsa): the reference that the trainer must equal bit for bit.
NumPy and the standard library only.

RMSNorm, attention whose keys and values are made of one short vector for each token (latent_attention.py), over those
that an indexer has chosen (sparse_attention.py); RMSNorm, in the first layers a gated MLP, then a mixture of experts of
which one, the shared one, sees every position (experts.py). Layers without an indexer see what the last one before them
has chosen (IndexShare). Behind the last norm there may be a module that predicts the token after the next (MTP).
DeepSeek-AI 2025, arXiv:2512.02556 (the choice and its loss); arXiv:2603.12201 (shared choices); 2024, arXiv:2412.19437
(MTP, balance).

    python dev/ref/glm5.py [--out DIR]     check the reference, then write the golden files (default: dev/golden)
    python dev/ref/glm5.py --check         check only (glm5_checks.py, which by itself compares with transformers)
    python dev/ref/glm5.py --from DIR --probe IN --probe-out OUT
                                           logits, loss and gradients of one batch for a Hugging Face folder

The golden files have the layout that trainer.py describes; MTP is one more layer on disk. Activations, with H heads of
dqk = dn + dr channels of q and k and dv of v, latents of rq and r channels, nI heads of dI channels of the indexer, n =
min(index_topk, T), R = N k rows of the experts, sorted by (expert, n, j); what only some layers have is stacked over
those, ascending:
    layers      norm1, norm1_rstd, q_low (B, T, rq: q_a_proj's output), q_low_rstd, q_low_norm, q (B, T, H dqk: after
                RoPE), kv_low (B, T, r + dr: kv_a_proj's output), kv_low_rstd, kv_low_norm (B, T, r), k_rope (B, T, dr:
                after RoPE), kv (B, T, H (dn + dv)), att_max, att_inv (B, H, T), attention (B, T, H dv), attention_out,
                residual2, norm2, norm2_rstd, residual3
    full        index_low (B, T, dI: index_wk's output), index_mean, index_rstd, index_k (B, T, dI), index_q (B, T, nI
                dI; both after RoPE), index_proj, index_weights (B, T, nI), index_scores (B, T, T: also those of keys
                that are not seen), index_chosen (I32, (B, T, n), positions in the row, ascending, -1: no more); where
                it is trained index_mass (B, T, n: of all layers that teach it), index_losses (B, T)
    dense       gate_up, hidden, mlp
    experts     router_logits, scores (B, T, E), experts (I32), weights (B, T, k), expert_gate_up (R, 2F), expert_hidden
                (R, F), expert_out (R, D), shared_gate_up, shared_hidden, shared_out, moe; of the leaf counts (I32)
    outside     encoded, norm, norm_rstd, logits, probs, losses; with MTP the same names behind mtp_, and mtp_joined (B,
                T, 2D), mtp_encoded (eh_proj's output), mtp_embedding_rstd, mtp_hidden_rstd, mtp_next (I32)
Numbers of an update: loss, cross_entropy; counts (I32, layers with experts, then MTP's); with MTP mtp_loss; with the
loss per sequence balance; where the indexer is trained index_loss (full layers, then MTP's), which is not in the loss:
no parameter has both.

How a number comes about: float32, each + - * / and sqrt rounded once, every sum a chain with ascending index, products
in it by fused multiply-add, functions correctly rounded (exact.py). With float64 parameters everything is computed in
float64. In shapes N = B*T positions, D hidden_size. Where more than one order would do:
    norms            rmsnorm, layernorm (ops.py), eps 1e-6 of the latter, which has the key of the indexer. In backward
                     their dx is added to zeros, that of norm1 and norm2 to the stream's gradient
    RoPE             of q and of the last dr outputs of kv_a_proj neighbours, among the last dr channels of a head; of
                     the indexer among the first dr, neighbours or (x[i], x[i + dr / 2]). Tables of ops.rope_tables.
                     Positions are those in the document
    attention        latent_attention.py, expanded
    indexer          sparse_attention.py with r = 1; its weights are index_proj times c, c = 1 / sqrt(dI nI). Its
                     gradients stop at norm1 and q_low_norm. Dense: all keys before are chosen, in all layers
    mass             of a list; of several layers one chain over the heads of all of them, ascending. dloss =
                     indexer_kl_coeff (1 / positions of the update). Of MTP's layer the last position of a document has
                     none, and is not counted: it does not know its next token
    dq_low_norm      a chain over q_b_proj's outputs              dkv_low_norm    a chain over kv_b_proj's
    dnorm1           one chain over the outputs of q_a_proj, on over those of kv_a_proj (r, then dr)
    dnorm2           of an MLP a chain over gate's outputs, on over up's; of experts as experts.py has it
    experts          experts.py, scores sigmoid(z). Balance: of all layers with experts, not MTP's; means over leaves,
                     summed over layers. Weight in the gradient: seq_balance_coef (1 / (rows of all leaves))
    MTP              positions, tokens and targets as in qwen36.py; eh_proj is one chain over the embedding's D inputs,
                     then the hidden's, which is `norm`. With mtp_detach nothing outside gets a gradient of its loss
    final norm       its dout is what the head gives, then what MTP's norm gives is added
    loss             cross entropy + (mtp_weight * mtp_loss + seq_balance_coef * balance); of which what is 0 is left
                     out
    head's gradient  one chain over the positions of the trunk, on over those of MTP
    embedding        MTP's positions ascending are added, then the trunk's; the row of pad_token_id is 0
"""
import sys
from collections import namedtuple
from dataclasses import replace

import numpy as np

import exact
import experts
import latent_attention as latent
import sparse_attention as sparse
import trainer
from exact import chain_matmul, tree_sum
from glm5_config import fit, layer_of, metadata, mtp_layer, parameter_table, read_config
from ops import (back_through, classifier_backward, classifier_forward, embedding_backward, embedding_forward,
                 layernorm_backward, layernorm_forward, linear_forward, loss_gradient, merge_heads, rmsnorm_backward,
                 rmsnorm_forward, rope, rope_backward, rope_frequencies, rope_tables_at, rows, split_heads,
                 swiglu_backward, swiglu_forward, turn_first, turn_heads, turn_last, weight_gradient)
from qwen36 import mtp_batch
from sparse_attention import norm_backward

INDEX_NORM_EPS = 1e-6


class Where:
    """What all layers share of a batch: who sees whom where all keys are chosen (B, T, T), where the document goes on
    behind a position (B, T), tables of RoPE (B, T, dr / 2)"""

    def __init__(self, cfg, shape, dtype, starts, positions=None):
        self.starts, self.goes_on = starts, goes_on(starts, shape)
        self.visible = sparse.Windows(starts, shape, 1).visible()
        positions = sparse.Windows(starts, shape, shape[1]).place if positions is None else positions
        self.tables = rope_tables_at(positions, rope_frequencies(cfg.qk_rope_head_dim, cfg.rope_theta, dtype))


def goes_on(starts, shape):
    out = np.ones(shape, bool) if starts is None else np.roll(starts, -1, axis=1) == 0
    out[:, -1] = False
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The indexer of one layer: x is the normed input, which q_a_proj and kv_a_proj read too.
# ---------------------------------------------------------------------------------------------------------------------
def index_turn(x, n_heads, cfg, where, function=rope):
    def turn(x, tables, function):
        return turn_first(x, tables, function, cfg.indexer_rope_interleave)
    return turn_heads(x, n_heads, where.tables, function, turn)


def index_heads(a, cfg):
    return a["index_q"].reshape(*a["index_q"].shape[:2], cfg.index_n_heads, -1)


def indexer_forward(x, layer, cfg, a, where):
    """Adds index_chosen to the activations a"""
    a["index_low"] = layer.linear("index_wk", x)
    k, a["index_mean"], a["index_rstd"] = layernorm_forward(a["index_low"], layer.w["index_norm"],
                                                            layer.w["index_norm_bias"], INDEX_NORM_EPS)
    a["index_k"] = index_turn(k, 1, cfg, where)
    a["index_q"] = index_turn(layer.linear("index_wq_b", a["q_low_norm"]), cfg.index_n_heads, cfg, where)
    a["index_proj"] = layer.linear("index_proj", x)
    a["index_weights"] = a["index_proj"] * sparse.index_scale(cfg, x.dtype)
    a["index_scores"] = sparse.index_forward(index_heads(a, cfg), a["index_k"], a["index_weights"])
    dense = cfg.indexer_train == "dense"
    chosen = where.visible if dense else sparse.choose(a["index_scores"], where.visible, cfg.index_topk)
    a["index_chosen"] = sparse.listed(chosen, x.shape[1] if dense else cfg.index_topk)


def indexer_backward(x, layer, cfg, a, where, count):
    """Gradients of the indexer's parameters; count: positions that have a loss of it"""
    dloss = x.dtype.type(cfg.indexer_kl_coeff) * loss_gradient(x.dtype, max(count, 1))
    dscores = sparse.index_loss_backward(a["index_scores"], *taught(a), dloss)
    dq, dk, da = sparse.index_gradients(dscores, index_heads(a, cfg), a["index_k"], a["index_weights"])
    dq = index_turn(dq.reshape(a["index_q"].shape), cfg.index_n_heads, cfg, where, rope_backward)
    dk, layer.g["index_norm"], layer.g["index_norm_bias"] = layernorm_backward(
        index_turn(dk, 1, cfg, where, rope_backward), a["index_low"], layer.w["index_norm"], a["index_mean"],
        a["index_rstd"])
    layer.g["index_wq_b"] = weight_gradient(dq, a["q_low_norm"])
    layer.g["index_wk"] = weight_gradient(np.zeros_like(dk) + dk, x)
    layer.g["index_proj"] = weight_gradient(sparse.index_scale(cfg, x.dtype) * da, x)


def taught(a):
    """The mass and what is chosen (B, T, T) of a full layer"""
    T = a["index_scores"].shape[-1]
    return sparse.spread(a["index_mass"], a["index_chosen"], T), sparse.chosen_of(a["index_chosen"], T)


def teach(source, att, cfg, is_source):
    """Adds what a layer looks at to the mass of the one that has chosen for it"""
    if not is_source and cfg.indexer_kl_target != "group_average":
        return
    so_far = None if is_source else sparse.spread(source["index_mass"], source["index_chosen"], att.shape[-1])
    source["index_mass"] = sparse.gathered(sparse.mass_of(att, so_far), source["index_chosen"])


# ---------------------------------------------------------------------------------------------------------------------
# Attention of one layer. source: the activations of the layer that has chosen for it, its own where it is full
# ---------------------------------------------------------------------------------------------------------------------
def heads_of(a, cfg):
    """q, k (B, H, T, dqk), v (B, H, T, dv)"""
    H = cfg.num_attention_heads
    return split_heads(a["q"], H), *latent.expand(a["kv"], a["k_rope"], H, cfg.qk_nope_head_dim)


def attention_forward(x, layer, cfg, a, where, source):
    w, eps, H = layer.w, cfg.latent_norm_eps, cfg.num_attention_heads
    a["q_low"] = layer.linear("q_a_proj", x)
    a["q_low_norm"], a["q_low_rstd"] = rmsnorm_forward(a["q_low"], w["q_a_layernorm"], eps)
    a["q"] = turn_heads(layer.linear("q_b_proj", a["q_low_norm"]), H, where.tables, rope)
    a["kv_low"] = layer.linear("kv_a_proj", x)
    low, turning = np.split(a["kv_low"], [cfg.kv_lora_rank], axis=-1)
    a["kv_low_norm"], a["kv_low_rstd"] = rmsnorm_forward(low, w["kv_a_layernorm"], eps)
    a["k_rope"] = turn_last(turning, where.tables)
    a["kv"] = layer.linear("kv_b_proj", a["kv_low_norm"])
    if source is a:
        indexer_forward(x, layer, cfg, a, where)
    chosen = sparse.chosen_of(source["index_chosen"], x.shape[1])
    out, att, a["att_max"], a["att_inv"] = latent.chosen_forward(*heads_of(a, cfg), chosen)
    if cfg.indexer_train != "off":
        teach(source, att, cfg, source is a)
    a["attention"] = merge_heads(out)
    a["attention_out"] = layer.linear("o_proj", a["attention"])


def attention_backward(dout, x, layer, cfg, a, where, source, count):
    """dx"""
    w, g, H, dn = layer.w, layer.g, cfg.num_attention_heads, cfg.qk_nope_head_dim
    do = split_heads(layer.linear_backward("o_proj", dout, a["attention"]), H)
    q, k, v = heads_of(a, cfg)
    _, att, _, _ = latent.chosen_forward(q, k, v, sparse.chosen_of(source["index_chosen"], x.shape[1]))
    dq, dk, dv = latent.chosen_backward(do, q, k, v, att)
    dq = turn_heads(merge_heads(dq), H, where.tables, rope_backward)
    dq_low = layer.linear_backward("q_b_proj", dq, a["q_low_norm"])
    dq_low, g["q_a_layernorm"] = norm_backward(dq_low, a["q_low"], w["q_a_layernorm"], a["q_low_rstd"])
    dx = layer.linear_backward("q_a_proj", dq_low, x)
    dkv, dturning = latent.expand_backward(dk, dv, dn)
    dlow = layer.linear_backward("kv_b_proj", dkv, a["kv_low_norm"])
    low = a["kv_low"][..., :cfg.kv_lora_rank]
    dlow, g["kv_a_layernorm"] = norm_backward(dlow, low, w["kv_a_layernorm"], a["kv_low_rstd"])
    dlow = np.concatenate([dlow, turn_last(dturning, where.tables, rope_backward)], axis=-1)
    dx = layer.linear_backward("kv_a_proj", dlow, x, dx)
    if source is a and cfg.indexer_train != "off":
        indexer_backward(x, layer, cfg, a, where, count)
    return dx


# ---------------------------------------------------------------------------------------------------------------------
# One layer.
# ---------------------------------------------------------------------------------------------------------------------
def mlp_forward(x, layer, a):
    a["gate_up"] = layer.linear("gate_up", x)
    a["hidden"] = swiglu_forward(a["gate_up"])
    a["mlp"] = layer.linear("down", a["hidden"])


def mlp_backward(dout, x, layer, a):
    """dx"""
    dhidden = layer.linear_backward("down", dout, a["hidden"])
    return layer.linear_backward("gate_up", swiglu_backward(dhidden, a["gate_up"]), x)


def block_forward(x, layer, cfg, a, where, source):
    """The stream behind the layer; adds to the activations a"""
    w, eps = layer.w, cfg.rms_norm_eps
    a["norm1"], a["norm1_rstd"] = rmsnorm_forward(x, w["input_layernorm"], eps)
    attention_forward(a["norm1"], layer, cfg, a, where, source)
    a["residual2"] = x + a["attention_out"]
    a["norm2"], a["norm2_rstd"] = rmsnorm_forward(a["residual2"], w["post_attention_layernorm"], eps)
    if "router" in w:
        experts.moe_forward(a["norm2"], layer, cfg, a)
        a["residual3"] = a["residual2"] + a["moe"]
    else:
        mlp_forward(a["norm2"], layer, a)
        a["residual3"] = a["residual2"] + a["mlp"]
    return a["residual3"]


def block_backward(dout, x, layer, cfg, a, where, source, has_balance, count):
    """The gradient of x; those of the parameters go into layer.g"""
    w, g = layer.w, layer.g
    if "router" in w:
        dnorm = experts.moe_backward(dout, a["norm2"], layer, cfg, a, has_balance)
    else:
        dnorm = mlp_backward(dout, a["norm2"], layer, a)
    d, g["post_attention_layernorm"] = rmsnorm_backward(dnorm, a["residual2"], w["post_attention_layernorm"],
                                                        a["norm2_rstd"])
    dout = dout + d
    dnorm = attention_backward(dout, a["norm1"], layer, cfg, a, where, source, count)
    d, g["input_layernorm"] = rmsnorm_backward(dnorm, x, w["input_layernorm"], a["norm1_rstd"])
    return dout + d


# ---------------------------------------------------------------------------------------------------------------------
# From the stream to losses, and the module that predicts the token after the next.
# ---------------------------------------------------------------------------------------------------------------------
def head_forward(x, p, norm, targets, cfg, a):
    a["norm"], a["norm_rstd"] = rmsnorm_forward(x, p[norm], cfg.rms_norm_eps)
    a["logits"] = linear_forward(a["norm"], p["lm_head"])
    a["probs"], a["losses"] = classifier_forward(a["logits"], targets, cfg.vocab_size, exact)


def head_backward(p, targets, count, weight, cfg, a, g):
    """dnorm; the head's gradient is added to what g has, where it has one"""
    dlogits = classifier_backward(a["probs"], targets, cfg.vocab_size, max(count, 1), weight)
    if "lm_head" in g:
        g["lm_head"] = chain_matmul(g["lm_head"], rows(dlogits).T, rows(a["norm"]))
    return back_through(np.zeros_like(a["norm"]), dlogits, p["lm_head"])


def mtp_forward(p, hidden, inputs, targets, cfg, where):
    """Activations; hidden is the trunk's output behind its last norm"""
    a, eps = {}, cfg.rms_norm_eps
    a["next"], target = mtp_batch(inputs, targets, where.starts)
    e, a["embedding_rstd"] = rmsnorm_forward(p["embed_tokens"][a["next"]], p["mtp_enorm"], eps)
    h, a["hidden_rstd"] = rmsnorm_forward(hidden, p["mtp_hnorm"], eps)
    a["joined"] = np.concatenate([e, h], axis=-1)
    a["encoded"] = linear_forward(a["joined"], p["mtp_eh_proj"])
    block_forward(a["encoded"], mtp_layer(p), cfg, a, where, a)
    head_forward(a["residual3"], p, "mtp_norm", target, cfg, a)
    if cfg.indexer_train != "off":
        a["index_mass"] = np.where(where.goes_on[..., None], a["index_mass"], hidden.dtype.type(0))
        a["index_losses"] = sparse.index_loss_forward(a["index_scores"], *taught(a))
    return a


def mtp_backward(p, a, hidden, inputs, targets, count, cfg, where, g):
    """What is added to the gradient of hidden; gradients of parameters go into g, those of the head and the embedding
    are added to what is there."""
    _, target = mtp_batch(inputs, targets, where.starts)
    dnorm = head_backward(p, target, count.mtp, cfg.mtp_weight, cfg, a, {} if cfg.mtp_detach else g)
    dx, g["mtp_norm"] = norm_backward(dnorm, a["residual3"], p["mtp_norm"], a["norm_rstd"])
    layer = mtp_layer(p)
    dx = block_backward(dx, a["encoded"], layer, cfg, a, where, a, False, count.mtp_index)
    g.update({"mtp_" + name: x for name, x in layer.g.items()})
    g["mtp_eh_proj"] = weight_gradient(dx, a["joined"])
    de, dh = np.split(back_through(np.zeros_like(a["joined"]), dx, p["mtp_eh_proj"]), 2, axis=-1)
    de, g["mtp_enorm"] = norm_backward(de, p["embed_tokens"][a["next"]], p["mtp_enorm"], a["embedding_rstd"])
    dh, g["mtp_hnorm"] = norm_backward(dh, hidden, p["mtp_hnorm"], a["hidden_rstd"])
    if not cfg.mtp_detach:
        embedding_backward(g["embed_tokens"], None, de, a["next"])
    return np.zeros_like(dh) if cfg.mtp_detach else dh


# ---------------------------------------------------------------------------------------------------------------------
# The model. One micro-batch, forward and backward.
# ---------------------------------------------------------------------------------------------------------------------
Counts = namedtuple("Counts", "main mtp index mtp_index")  # of an update: targets, positions with a loss of an indexer


def count(inputs, targets, cfg, starts=None):
    """Of all leaves, (..., B, T)"""
    shape = (-1, targets.shape[-1])
    after = mtp_batch(inputs.reshape(shape), targets.reshape(shape), starts)[1]
    rows = (inputs.size // shape[1], shape[1])
    return Counts(int((targets >= 0).sum()), int((after >= 0).sum()), inputs.size, int(goes_on(starts, rows).sum()))


def stream_before(acts, l):
    return acts["blocks"][l - 1]["residual3"] if l > 0 else acts["encoded"]


def forward(p, inputs, targets, cfg, starts=None, positions=None):
    """Every activation of one micro-batch; those of the layers in acts["blocks"][l]. starts (B, T): 1 where a document
    begins. positions (B, T): others than those in the document"""
    acts = {"encoded": embedding_forward(p["embed_tokens"], None, inputs), "blocks": []}
    where, blocks = Where(cfg, inputs.shape, p["embed_tokens"].dtype, starts, positions), acts["blocks"]
    for l in range(cfg.num_hidden_layers):
        blocks.append({})
        block_forward(stream_before(acts, l), layer_of(p, cfg, l), cfg, blocks[l], where, blocks[cfg.source(l)])
    for l in cfg.full_layers if cfg.indexer_train != "off" else ():
        blocks[l]["index_losses"] = sparse.index_loss_forward(blocks[l]["index_scores"], *taught(blocks[l]))
    head_forward(stream_before(acts, cfg.num_hidden_layers), p, "norm", targets, cfg, acts)
    if cfg.mtp:
        a = mtp_forward(p, acts["norm"], inputs, targets, cfg, where)
        acts.update({"mtp_" + name: x for name, x in a.items()})
    return acts


def backward(p, acts, inputs, targets, count, cfg, starts=None, positions=None):
    """Parameter gradients of one micro-batch: forward upside down"""
    g = {row.name: np.zeros_like(p[row.name]) for row in parameter_table(cfg)}
    where, blocks = Where(cfg, inputs.shape, p["embed_tokens"].dtype, starts, positions), acts["blocks"]
    dnorm = head_backward(p, targets, count.main, None, cfg, acts, g)
    if cfg.mtp:
        a = {name[4:]: x for name, x in acts.items() if name.startswith("mtp_")}
        dnorm = dnorm + mtp_backward(p, a, acts["norm"], inputs, targets, count, cfg, where, g)
    dx, g["norm"] = norm_backward(dnorm, stream_before(acts, cfg.num_hidden_layers), p["norm"], acts["norm_rstd"])
    for l in reversed(range(cfg.num_hidden_layers)):
        layer, has_balance = layer_of(p, cfg, l), cfg.seq_balance_coef > 0
        dx = block_backward(dx, stream_before(acts, l), layer, cfg, blocks[l], where, blocks[cfg.source(l)],
                            has_balance, count.index)
        for row, i in trainer.layer_rows(parameter_table(cfg), l):
            if row.name in layer.g:
                g[row.name][i] = layer.g[row.name]
    embedding_backward(g["embed_tokens"], None, dx, inputs)
    if cfg.pad_token_id is not None:
        g["embed_tokens"][cfg.pad_token_id] = 0
    return g


def numbers(acts, count, cfg):
    """What an update tells: its losses, and how the experts were loaded. acts: of the leaves"""
    cross_entropy = trainer.loss_of([leaf["losses"] for leaf in acts], count.main)
    scalar, out, more = cross_entropy.dtype.type, {}, []
    if cfg.mtp:
        out["mtp_loss"] = trainer.loss_of([leaf["mtp_losses"] for leaf in acts], max(count.mtp, 1))
        more.append(scalar(cfg.mtp_weight) * out["mtp_loss"])
    if cfg.seq_balance_coef and cfg.moe_layers:
        out["balance"] = experts.balance_of_layers(acts, cfg.moe_layers)
        more.append(scalar(cfg.seq_balance_coef) * out["balance"])
    if cfg.indexer_train != "off":
        losses = list(zip(*[of_leaf(leaf, cfg, "index_losses") for leaf in acts]))
        counts = [count.index] * len(cfg.full_layers) + [max(count.mtp_index, 1)] * cfg.mtp
        out["index_loss"] = np.stack([trainer.loss_of(*pair) for pair in zip(losses, counts)])
    counts = [of_leaf(leaf, cfg, "counts") for leaf in acts]
    out["counts"] = tree_sum([np.stack(x) if x else np.zeros((0, cfg.n_routed_experts), np.int32) for x in counts])
    return {"loss": trainer.total(cross_entropy, more), "cross_entropy": cross_entropy, **out}


def of_leaf(leaf, cfg, name):
    """Of the layers that have it, then of MTP's"""
    return [a[name] for a in leaf["blocks"] if name in a] + ([leaf["mtp_" + name]] if cfg.mtp else [])


def choices(acts, cfg):
    """What indexers and routers choose, by the names of transformers' modules, MTP's last; (B, T, n)"""
    blocks, out = list(acts["blocks"]), {}
    if cfg.mtp:
        blocks.append({name[4:]: x for name, x in acts.items() if name.startswith("mtp_")})
    for l, a in enumerate(blocks):
        if "index_chosen" in a:
            out[f"model.layers.{l}.self_attn.indexer"] = a["index_chosen"]
        if "experts" in a:
            out[f"model.layers.{l}.mlp.gate"] = a["experts"].reshape(*acts["logits"].shape[:2], -1)
    return {name: x.astype(np.int32) for name, x in out.items()}


def level_biases(p, numbers, cfg):
    """Of the layers that have experts, and of MTP's"""
    counts, p = numbers["counts"], dict(p)
    if cfg.bias_update_rate and cfg.moe_layers:
        p["selection_bias"] = experts.level_biases(p["selection_bias"], counts[:len(cfg.moe_layers)], cfg)
    if cfg.bias_update_rate and cfg.mtp:
        p["mtp_selection_bias"] = experts.level_biases(p["mtp_selection_bias"], counts[-1], cfg)
    return p


MODEL = trainer.Model(parameter_table, forward, backward, read_config, metadata, numbers=numbers,
                      after_update=level_biases, fit=fit, losses=("loss", "cross_entropy"),
                      other_losses=("mtp_loss", "index_loss"), count=count, choices=choices)


# ---------------------------------------------------------------------------------------------------------------------
# The golden runs. Together they have layers with and without experts and indexers of their own, rows that have more
# keys than are chosen, both ways in which indexers turn, groups of experts and none, weights that are renormalised and
# not, one shared expert and two, biases, ties of the router, an expert without rows, a token that fills, MTP, the loss
# of indexers that several layers teach, balance and its bias, targets that are not counted, sizes that divide nothing.
# ---------------------------------------------------------------------------------------------------------------------
TEXT = {"model_type": "glm_moe_dsa", "vocab_size": 23, "hidden_size": 10, "num_hidden_layers": 3,
        "num_attention_heads": 3, "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6,
        "v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 11, "index_topk": 5, "intermediate_size": 13,
        "moe_intermediate_size": 5, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "norm_topk_prob": False, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"], "rope_parameters": {"rope_theta": 8e6},
        "latent_norm_eps": 1e-6, "pad_token_id": 3, "attention_bias": True, "max_position_embeddings": 64}
MTP = {**TEXT, "vocab_size": 19, "hidden_size": 9, "num_hidden_layers": 2, "num_attention_heads": 2, "v_head_dim": 7,
       "n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "n_shared_experts": 1,
       "norm_topk_prob": True, "mlp_layer_types": ["sparse", "sparse"], "indexer_types": ["full", "shared"],
       "indexer_rope_interleave": False, "rope_parameters": {"rope_theta": 100.0}, "latent_norm_eps": 1e-5,
       "pad_token_id": None, "attention_bias": False, "mtp_weight": 0.3, "indexer_train": "kl",
       "indexer_kl_coeff": 0.5, "seq_balance_coef": 0.01, "bias_update_rate": 0.001}


def text_run():
    cfg = replace(read_config(TEXT, "TEXT", 2, 11), lr=3e-3, schedule="cosine", warmup=3, final_lr=0.1, beta2=0.95,
                  clip=1.0)
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=1.0, vector_spread=0.5)
    p["router"][1, 1:] = p["router"][1, 1]  # ties: at the start only the bias tells experts 1, 2 and 3 apart
    p["selection_bias"][1] = [0.125, -0.25, 0.25, -0.25]
    inputs, targets = trainer.draw_data(cfg)
    trainer.ignore_targets(targets)
    return cfg, p, inputs, targets


def mtp_run():
    cfg = replace(read_config(MTP, "MTP", 2, 9), leaves=2, lr=2e-3, schedule="wsd", clip=0.5)
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=1.0, vector_spread=0.5)
    inputs, targets = trainer.draw_data(cfg)
    trainer.ignore_targets(targets)
    targets[4, 1] = -1  # a leaf without a counted target
    return cfg, p, inputs, targets


RUNS = {"glm5_text": text_run, "glm5_mtp": mtp_run}


def write_golden(folder):
    for name, run in RUNS.items():
        trainer.write_golden(folder, name, MODEL, *run())


if __name__ == "__main__":
    import glm5_checks
    sys.exit(trainer.main(MODEL, "GLM-5", glm5_checks.promises, write_golden,
                          ("--check", "check the reference and write nothing",
                           lambda: exact.report(glm5_checks.promises()))))
