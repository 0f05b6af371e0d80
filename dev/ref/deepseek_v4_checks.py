"""
What deepseek_v4.py promises before it writes golden files: config.json and names, every number of
deepseek_v4_numbers.py, finite differences, and in float32 what must hold to the bit. NumPy and the
standard library only, but for the last section.

    python dev/ref/deepseek_v4_checks.py        hold the model against transformers, in float64 and in float32
    python dev/ref/deepseek_v4_checks.py --probe-with ./train_deepseek_v4
                                                a trainer against the same numbers, without torch
                                                (deepseek_v4_program.py)

The first needs torch and transformers 5.23 or later; without them it says "skipped". The truth is DeepseekV4ForCausalLM in
float64, its own casts to float32 switched off; the error of a tensor is |x - truth| / |truth| in the L2 norm.
"""
import json
import math
import os
import sys
import tempfile
from dataclasses import replace

import numpy as np

import deepseek_v4 as v4
import deepseek_v4_numbers as spec
import exact
import experts
import hyper_connections as hyper
import sparse_attention as sparse
import trainer
from deepseek_v4 import backward, count, forward, numbers
from deepseek_v4_config import (CSA, HCA, SLIDING, config_json, fit, official_name, official_tensors, parameter_table,
                                read_config, tables_to_disk)
from exact import F4, F8
from moe_checks import close, same_bits


def wide(p):
    return {name: x.astype(F8) for name, x in p.items()}


def case(hf, B, T, spread=0.8, **changes):
    """A config, parameters, inputs and targets, of which some are not counted"""
    cfg = v4.draw_tables(replace(read_config(hf, "case", B, T), steps=1, **changes))
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=spread, vector_spread=0.6)
    inputs, targets = (x[0, 0] for x in trainer.draw_data(cfg))
    trainer.ignore_targets(targets)
    targets[0, 0] = targets[-1, -1] = 3
    return cfg, p, inputs, targets


# ---------------------------------------------------------------------------------------------------------------------
# config.json and names.
# ---------------------------------------------------------------------------------------------------------------------
NAMES = """
    model.embed_tokens.weight                                              embed.weight
    lm_head.weight                                                         head.weight
    model.norm.weight                                                      norm.weight
    model.hc_head.hc_scale                                                 hc_head_scale
    model.layers.3.input_layernorm.weight                                  layers.3.attn_norm.weight
    model.layers.3.post_attention_layernorm.weight                         layers.3.ffn_norm.weight
    model.layers.3.attn_hc.fn                                              layers.3.hc_attn_fn
    model.layers.3.ffn_hc.base                                             layers.3.hc_ffn_base
    model.layers.3.self_attn.q_a_proj.weight                               layers.3.attn.wq_a.weight
    model.layers.3.self_attn.q_a_norm.weight                               layers.3.attn.q_norm.weight
    model.layers.3.self_attn.q_b_proj.weight                               layers.3.attn.wq_b.weight
    model.layers.3.self_attn.kv_proj.weight                                layers.3.attn.wkv.weight
    model.layers.3.self_attn.kv_norm.weight                                layers.3.attn.kv_norm.weight
    model.layers.3.attn.norm.weight                                        layers.3.attn.kv_norm.weight
    model.layers.3.self_attn.o_a_proj.weight                               layers.3.attn.wo_a.weight
    model.layers.3.self_attn.o_b_proj.weight                               layers.3.attn.wo_b.weight
    model.layers.3.self_attn.sinks                                         layers.3.attn.attn_sink
    model.layers.3.self_attn.compressor.kv_proj.weight                     layers.3.attn.compressor.wkv.weight
    model.layers.3.self_attn.compressor.gate_proj.weight                   layers.3.attn.compressor.wgate.weight
    model.layers.3.self_attn.compressor.position_bias                      layers.3.attn.compressor.ape
    model.layers.3.self_attn.compressor.kv_norm.weight                     layers.3.attn.compressor.norm.weight
    model.layers.3.self_attn.compressor.indexer.q_b_proj.weight            layers.3.attn.indexer.wq_b.weight
    model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight layers.3.attn.indexer.weights_proj.weight
    model.layers.3.self_attn.compressor.indexer.weights_proj.weight        layers.3.attn.indexer.weights_proj.weight
    model.layers.3.self_attn.compressor.indexer.kv_proj.weight             layers.3.attn.indexer.compressor.wkv.weight
    model.layers.3.self_attn.compressor.indexer.gate_proj.weight           layers.3.attn.indexer.compressor.wgate.weight
    model.layers.3.self_attn.compressor.indexer.position_bias              layers.3.attn.indexer.compressor.ape
    model.layers.3.self_attn.compressor.indexer.kv_norm.weight             layers.3.attn.indexer.compressor.norm.weight
    model.layers.3.attn.indexer.compressor.norm.weight                     layers.3.attn.indexer.compressor.norm.weight
    model.layers.3.mlp.gate.e_score_correction_bias                        layers.3.ffn.gate.bias
    model.layers.3.mlp.gate.tid2eid                                        layers.3.ffn.gate.tid2eid
    model.layers.3.mlp.shared_experts.up_proj.weight                       layers.3.ffn.shared_experts.w3.weight
    mtp.0.attn.compressor.norm.weight                                      mtp.0.attn.compressor.norm.weight
"""


def config_promises():
    a, b = (read_config(hf, "", 1, 1) for hf in (spec.TINY, spec.FORM_B))
    flash = read_config(spec.FLASH, "", 1, 1)
    there_and_back = []
    for run in v4.RUNS.values():
        cfg = run()[0]
        again = read_config(config_json(cfg), "", 1, 1)
        settings = {key: getattr(cfg, key) for key in (*trainer.Run.__dataclass_fields__, "tid2eid")}
        there_and_back.append(replace(again, **settings) == cfg)
    old = [line.split() for line in NAMES.strip().split("\n")]
    fused = official_tensors({"model.layers.0.mlp.experts.gate_up_proj": np.arange(24).reshape(2, 6, 2),
                                 "model.layers.0.mlp.experts.down_proj": np.arange(12).reshape(2, 2, 3)})
    return [
        ("config: both forms of the tiny model", a == b),
        ("config: kinds of layers of the published model", flash.of_kind(SLIDING) == (0, 1) and
         flash.of_kind(CSA) == tuple(range(2, 43, 2)) and flash.of_kind(HCA) == tuple(range(3, 42, 2)) and
         flash.hash_layers == (0, 1, 2) and (flash.csa_ratio, flash.hca_ratio, flash.rotary) == (4, 128, 64)),
        ("config: there and back", all(there_and_back)),
        ("names: the three families", all(official_name(name) == official for name, official in old)),
        ("names: fused experts are cut, w1 before w3",
         fused["layers.0.ffn.experts.1.w1.weight"].tolist() == [[12, 13], [14, 15], [16, 17]] and
         fused["layers.0.ffn.experts.1.w3.weight"].tolist() == [[18, 19], [20, 21], [22, 23]] and
         fused["layers.0.ffn.experts.1.w2.weight"].tolist() == [[6, 7, 8], [9, 10, 11]]),
    ]


def file_promises():
    kept = []
    for run in v4.RUNS.values():
        cfg, p, *_ = run()
        disk = {**trainer.to_disk(v4.MODEL, p, cfg), **tables_to_disk(cfg)}
        found, tensors = fit(replace(cfg, tid2eid=()), disk)
        again = trainer.from_disk(v4.MODEL, tensors, found)
        kept += [found == cfg] + [same_bits(again[name], x) for name, x in p.items()]
    return [("files: to disk and back", all(kept))]


# ---------------------------------------------------------------------------------------------------------------------
# Finite differences.
# ---------------------------------------------------------------------------------------------------------------------
def worst_slope(p, names, loss, g):
    """Gradients against differences of the loss along a random direction each, relative to |gradient| |direction|. Of
    two steps the better counts: a bound of SwiGLU or a choice may lie within one, rounding be felt in the other."""
    rng, worst = np.random.default_rng(4), (0.0, "")
    for key in names:
        direction = rng.normal(size=p[key].shape)
        size, errors = max(np.linalg.norm(g[key]), 1e-3) * np.linalg.norm(direction), []
        for h in (3e-6, 1e-7):
            ends = [loss({**p, key: p[key] + step * direction}) for step in (h, -h)]
            errors.append(abs((ends[0] - ends[1]) / (2 * h) - (g[key] * direction).sum()) / size)
            if errors[-1] < 1e-7:
                break
        worst = max(worst, (min(errors), key))
    return worst


SLOPES = {  # the model; B, T; where documents begin; settings
    "text": (v4.TEXT, 2, 17, None, {}),
    "text, documents": (v4.TEXT, 1, 23, [0] * 7 + [1] + [0] * 11 + [1] + [0] * 3, {}),
    "MTP, balance": (v4.MTP, 2, 13, None, {}),
    "MTP, documents, the indexer dense": (v4.MTP, 2, 13, [[0] * 6 + [1] + [0] * 6, [0, 1] + [0] * 11],
                                          {"indexer_train": "dense"}),
}


def slope_promises():
    out = []
    for name, (hf, B, T, starts, changes) in SLOPES.items():
        cfg, p, inputs, targets = case(hf, B, T, **changes)
        starts, p = None if starts is None else np.array(starts).reshape(B, T), wide(p)
        c = count(inputs, targets, cfg, starts)

        def loss(p):
            return numbers([forward(p, inputs, targets, cfg, starts)], c, cfg)["loss"]

        def index_loss(p):
            return numbers([forward(p, inputs, targets, cfg, starts)], c, cfg)["index_loss"].sum()
        g = backward(p, forward(p, inputs, targets, cfg, starts), inputs, targets, c, cfg, starts)
        index = [key for key in p if key.startswith("index_")]
        others = [key for key in p if key not in index and not key.endswith("selection_bias")]
        worst, key = worst_slope(p, others, loss, g)
        out.append((f"{name}: gradients agree with differences of the loss, {worst:.0e} ({key})", worst < 1e-6))
        if cfg.indexer_train == "off":
            out.append((f"{name}: the indexer has no gradient", not any(g[key].any() for key in index)))
        else:
            worst, key = worst_slope(p, index, index_loss, g)
            out.append((f"{name}: the indexer's with those of its loss, {worst:.0e} ({key})", worst < 1e-6))
    return out + sinkhorn_promises()


def sinkhorn_promises():
    """All elements of the backward, at peaked matrices too"""
    rng, worst = np.random.default_rng(1), 0.0
    for hc, iters, size in ((2, 1, 1), (3, 4, 3), (4, 20, 6)):
        A, dP = rng.normal(size=(2, hc, hc)) * size, rng.normal(size=(2, hc, hc))
        found = hyper.sinkhorn_backward(dP, A, iters, 1e-6)
        for i in np.ndindex(A.shape):
            ends = []
            for h in (1e-5, -1e-5):
                moved = A.copy()
                moved[i] += h
                ends.append((hyper.sinkhorn_forward(moved, iters, 1e-6) * dP).sum())
            worst = max(worst, abs((ends[0] - ends[1]) / 2e-5 - found[i]))
    P = hyper.sinkhorn_forward(rng.normal(size=(5, 4, 4)), 20, 1e-6)
    return [(f"Sinkhorn: backward agrees with differences, {worst:.0e}", worst < 1e-9),
            ("Sinkhorn: rows and columns sum up to 1", np.abs(P.sum(1) - 1).max() < 2e-6 and
             np.abs(P.sum(2) - 1).max() < 1e-3)]


# ---------------------------------------------------------------------------------------------------------------------
# What holds to the bit.
# ---------------------------------------------------------------------------------------------------------------------
def packing_promises():
    """A packed row has the bits of its documents, and so have sums of gradients where one document is alone in having
    counted targets"""
    cfg, p, inputs, targets = case(v4.TEXT, 1, 31)
    starts, cuts = np.zeros((1, 31), int), [(0, 4), (4, 26), (26, 31)]
    starts[0, [4, 26]] = 1
    packed, kept = forward(p, inputs, targets, cfg, starts), []
    for first, end in cuts:
        at = slice(first, end)
        alone = forward(p, inputs[:, at], targets[:, at], replace(cfg, seq_len=end - first))
        kept += [same_bits(packed[name][:, at].copy(), alone[name]) for name in ("logits", "losses", "norm")]
    only, at = np.full_like(targets, -1), slice(4, 26)
    only[:, at] = targets[:, at]
    c = count(inputs, only, cfg)
    packed = backward(p, forward(p, inputs, only, cfg, starts), inputs, only, c, cfg, starts)
    alone = backward(p, forward(p, inputs[:, at], only[:, at], cfg), inputs[:, at], only[:, at], c, cfg)
    return [("documents: a packed row has their bits", all(kept)),
            ("documents: and those of one that has all targets, its gradients",
             all(np.array_equal(packed[name], x) for name, x in alone.items()))]


def causal_promises():
    """A later token changes nothing before it, with a window, entries and a choice; 13 and 15 of the traps"""
    cfg, p, inputs, targets = case(v4.TEXT, 1, 19)
    whole, kept = forward(p, inputs, targets, cfg), []
    for t in range(1, 19):
        other = inputs.copy()
        other[0, t:] = (other[0, t:] + 1) % cfg.vocab_size
        kept.append(same_bits(forward(p, other, targets, cfg)["logits"][:, :t].copy(), whole["logits"][:, :t].copy()))
    visible = sparse.Windows(None, (1, 19), 5).visible()[0]
    rule = [[(w + 1) * 5 - 1 <= t for w in range(3)] for t in range(19)]
    return [("causal: a later token changes nothing", all(kept)),
            ("entries: when they are seen", visible.tolist() == rule)]


def short_promises():
    """Rows without entries, and with no more of them than are chosen"""
    cfg, p, inputs, targets = case(v4.TEXT, 2, 2)
    g = backward(p, forward(p, inputs, targets, cfg), inputs, targets, count(inputs, targets, cfg), cfg)
    none = all(not x.any() for name, x in g.items() if name.startswith(("csa", "hca", "index")))
    kept = []
    for T, same in ((8, True), (9, False)):
        cfg, p, inputs, targets = case(v4.TEXT, 1, T)
        kept.append(same == same_bits(*(forward(p, inputs, targets, replace(cfg, indexer_train=how))["logits"]
                                        for how in ("off", "dense"))))
    return [("short rows: no entries, and gradients of 0", none),
            ("short rows: the indexer decides nothing until there are more entries than it chooses", all(kept))]


def chain(start, *factors):
    """start + sum of products, by one madd each; factors: of the first and of the second kind"""
    for x, y in zip(*factors):
        start = exact.madd(x, y, start)
    return F4(start)


def plain_site(X, site, shape):
    """y, post, comb of one position, X (hc, D)"""
    (fn, base, scale), (hc, D), zero = site, X.shape, F4(0)
    u = X.reshape(-1)
    r = F4(1) / np.sqrt(chain(zero, u, u) / F4(hc * D) + F4(shape.eps_n))
    a = [F4(F4(r * chain(zero, u, row)) * scale[0 if i < hc else 1 if i < 2 * hc else 2]) + base[i]
         for i, row in enumerate(fn)]
    s = [F4(1) / (F4(1) + exact.exp(-x)) for x in a[:2 * hc]]
    P = np.array(a[2 * hc:], F4).reshape(hc, hc)
    for row in P:
        e, total = exact.exp(row - row.max()), zero
        for x in e:
            total = total + x
        row[:] = e / total + F4(shape.eps_h)
    for i in range(2 * shape.iters - 1):
        for line in P if i % 2 else P.T:
            total = zero
            for x in line:
                total = total + x
            line[:] = line / (total + F4(shape.eps_h))
    pre = [x + F4(shape.eps_h) for x in s[:hc]]
    return [chain(zero, pre, X[:, c]) for c in range(D)], [F4(2) * x for x in s[hc:]], P


def plain_attention(q, keys, sinks, dout):
    """out, dq (H, d) of one query and its keys; dkeys' two parts are sums over more of them"""
    out, dq, scale = np.zeros_like(q), np.zeros_like(q), F4(1) / np.sqrt(F4(q.shape[-1]))
    for h in range(len(q)):
        scores = [chain(F4(0), q[h], key) * scale for key in keys]
        largest, total = max(*scores, sinks[h]), F4(0)
        e = [exact.exp(score - largest) for score in scores]
        for x in e:
            total = total + x
        inverse = F4(1) / (total + exact.exp(sinks[h] - largest))
        att = [x * inverse for x in e]
        datt = [chain(F4(0), dout[h], key) for key in keys]
        D = chain(F4(0), att, datt)
        ds = [(x * (y - D)) * scale for x, y in zip(att, datt)]
        out[h], dq[h] = ([chain(F4(0), x, keys[:, i]) for i in range(q.shape[1])] for x in (att, ds))
    return out, dq


def order_promises():
    """Vectorised sums with masks against plain loops over what is there"""
    rng = np.random.default_rng(8)

    def draw(*shape):
        return rng.normal(size=shape).astype(F4)
    X, f, shape = draw(1, 2, 3, 5), draw(1, 2, 5), hyper.Shape(4, 1e-6, 1e-5)
    site = draw(15, 15), draw(15), draw(3)
    a = hyper.site_forward(X, site, shape)
    out, kept = hyper.expand(f, X, a["post"], a["comb"]), []
    for t in range(2):
        y, post, comb = plain_site(X[0, t], site, shape)
        kept += [np.array_equal(found[0, t], x) for found, x in ((a["y"], y), (a["post"], post), (a["comb"], comb))]
        kept += [out[0, t, k, c] == chain(F4(0), [post[k], *comb[:, k]], [f[0, t, c], *X[0, t, :, c]])
                 for k in range(3) for c in range(5)]
    q, dout, keys, sinks = draw(1, 2, 4, 6), draw(1, 2, 4, 6), draw(1, 7, 6), draw(2)
    seen = rng.random((1, 4, 7)) < 0.6
    seen[..., 2] = True
    found, att, largest, inverse = sparse.sink_forward(q, keys, seen, sinks)
    dq, dkeys, dsinks = sparse.sink_backward(dout, q, keys, att, sinks, largest, inverse)
    plain = [plain_attention(q[0, :, t], keys[0, seen[0, t]], sinks, dout[0, :, t]) for t in range(4)]
    kept_keys = [np.array_equal(found[0, :, t], x) and np.array_equal(dq[0, :, t], y) for t, (x, y) in enumerate(plain)]
    windows, v, g, ape, gain = sparse.Windows(None, (1, 7), 3), draw(1, 7, 4), draw(1, 7, 4), draw(3, 4), draw(2)
    tables = [np.cos(draw(1, 7, 1)), np.sin(draw(1, 7, 1))]
    _, pool, _ = sparse.compress_forward(v, g, ape, gain, 1e-6, windows, True, tables)
    kept_pools = []
    for w in range(2):
        slots = [(t, slice(0, 2) if t < 3 * w else slice(2, 4)) for t in range(max(3 * w - 3, 0), 3 * w + 3)]
        for c in range(2):
            gates = [(g[0, t] + ape[t % 3])[half][c] for t, half in slots]
            e, total = [exact.exp(x - max(gates)) for x in gates], F4(0)
            for x in e:
                total = total + x
            values = [v[0, t, half][c] for t, half in slots]
            kept_pools.append(pool[0, w, c] == chain(F4(0), [x / total for x in e], values))
    return [("order: a site and what it writes", all(kept)), ("order: attention", all(kept_keys)),
            ("order: entries", all(kept_pools))]


ROUTER = experts.Router(experts.SQRT_SOFTPLUS, 2, 1.5)


def choice_promises():
    """The indexer's choice and the router's"""
    scores = np.array([[[3, 1, 3, 2], [3, 1, 3, 2], [np.nan, 1, 1, 1], [-np.inf, 0, -0.0, 5]]], F4)
    visible = np.array([[[True, True, False, False], [True] * 4, [True, True, True, False], [True] * 4]])
    chosen = sparse.listed(sparse.choose(scores, visible, 2), 2)
    z = np.array([[0.1, 2, -30, 0.1], [25, -1, 0, 3]])
    s, taken, weights = experts.router_forward(z, ROUTER, np.array([0.5, 0, 9, 0.5]))
    best = np.take_along_axis(s, taken, 1)
    given = np.array([[1, 1], [3, 0]])
    _, same, doubled = experts.router_forward(z, ROUTER, None, given)
    softplus = np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))
    slope = (np.sqrt(np.logaddexp(0, z + 1e-6)) - np.sqrt(np.logaddexp(0, z - 1e-6))) / 2e-6
    return [
        ("indexer: the largest, the lower of equal ones, no NaN, -1 for none", chosen.tolist() ==
         [[[0, 1], [0, 2], [1, 2], [1, 3]]] and
         sparse.listed(visible & (np.arange(4) == 1), 2).tolist() == [[[1, -1]] * 4]),
        ("router: scores", close(s, np.sqrt(softplus), 1e-10)),
        ("router: slopes, also far below 0", close(experts.slope_of(z, s, ROUTER), slope, 1e-7)),
        ("router: the bias decides, ties go to the lower number, and weights do not know it",
         taken.tolist() == [[1, 2], [0, 2]] and close(weights, 1.5 * best / best.sum(1)[:, None], 1e-12)),
        ("router: a table keeps its order, an expert twice is two", same.tolist() == given.tolist() and
         close(doubled[0], [0.75, 0.75], 1e-12)),
    ]


def bias_promises():
    cfg, p, _, _ = v4.mtp_run()
    counts = np.array([[0] * 5, [4, 1, 3, 0, 2], [2, 2, 2, 2, 2]], np.int32)
    after = v4.level_biases(p, {"counts": counts}, cfg)
    moved = (after["selection_bias"] - p["selection_bias"]) / F4(cfg.bias_update_rate)
    return [("bias: up with less load than the mean, down with more", np.rint(moved).tolist() == [[-1, 1, -1, 1, 0]] and
             same_bits(after["mtp_selection_bias"], p["mtp_selection_bias"]))]


def balance_promises():
    """3.4's loss, and its gradient element by element"""
    rng = np.random.default_rng(2)
    z, given = rng.normal(size=(7, 5)), rng.integers(5, size=(7, 2))

    def loss(z):
        s = np.sqrt(np.logaddexp(0, z))
        share = s / s.sum(1)[:, None]
        f = 5 / (2 * 7) * np.bincount(given.reshape(-1), minlength=5)
        return 0.3 * (f * share.mean(0)).sum()
    s = np.sqrt(np.logaddexp(0, z))
    dz = experts.sequence_balance_backward(s, given, 0.3) * experts.slope_of(z, s, ROUTER)
    differences = np.zeros_like(z)
    for i in np.ndindex(z.shape):
        step = np.zeros_like(z)
        step[i] = 1e-6
        differences[i] = (loss(z + step) - loss(z - step)) / 2e-6
    return [("balance: as section 3.4 has it", close(0.3 * experts.sequence_balance(s, given), loss(z), 1e-13)),
            ("balance: its gradient", close(dz, differences, 1e-6, 1e-10))]


def golden_promises():
    """What the golden runs are said to have"""
    cfg, p, inputs, targets = v4.text_run()
    acts, (a, b, c, d) = forward(p, inputs[0, 0], targets[0, 0], cfg), range(4)
    blocks = acts["blocks"]
    gate, up = np.split(blocks[a]["expert_gate_up"], 2, axis=-1)
    dropped = [(blocks[l]["index_chosen"][:, -1] >= 0).sum(-1).max() < cfg.seq_len // cfg.csa_ratio for l in (b, d)]
    twice = (blocks[a]["experts"][..., 0] == blocks[a]["experts"][..., 1]).any()
    ties = (blocks[b]["scores"][..., 1] == blocks[b]["scores"][..., 2]).all()
    unused = any((x["counts"] == 0).any() for x in blocks)
    f = v4.frequencies(6, 100.0, None, np.dtype(F8)) / v4.frequencies(6, 100.0, cfg.yarn, np.dtype(F8))
    return [("golden: the limit is met on all three sides", (gate > cfg.swiglu_limit).any() and
             (up > cfg.swiglu_limit).any() and (up < -cfg.swiglu_limit).any()),
            ("golden: a frequency that stays, one between, one divided by the factor", close(f, [1, 1.6, 4], 1e-12)),
            ("golden: entries that are not chosen, tokens without one", all(dropped) and 0 not in (
                cfg.seq_len % cfg.csa_ratio, cfg.seq_len % cfg.hca_ratio)),
            ("golden: an expert twice, ties, an expert without rows", twice and ties and unused)]


def promises():
    return (config_promises() + file_promises() + spec.promises() + slope_promises() + packing_promises() +
            causal_promises() + short_promises() + order_promises() + choice_promises() + bias_promises() +
            balance_promises() + golden_promises())


# ---------------------------------------------------------------------------------------------------------------------
# transformers.
# ---------------------------------------------------------------------------------------------------------------------
class Truth:
    """DeepseekV4ForCausalLM in float64, without its casts to float32"""

    def __init__(self):
        import torch
        import hf_models
        from transformers import DeepseekV4ForCausalLM
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as parts
        self.torch, self.lifted, self.kind, self.parts = torch, hf_models.lifted, DeepseekV4ForCausalLM, parts
        torch.set_num_threads(1)

    def load(self, folder):
        """The model of a folder; every tensor must be found where it looks for it"""
        model, report = self.kind.from_pretrained(folder, dtype=self.torch.float32, attn_implementation="eager",
                                                  experts_implementation="eager", output_loading_info=True)
        wrong = [report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[key]]
        if wrong:
            raise SystemExit(f"{folder}: transformers does not find all tensors: {wrong}")
        return model.eval()

    def wide(self, model):
        """In float64, with frequencies of RoPE that were never rounded"""
        model = model.double()
        with self.lifted():
            for module in model.modules():
                if isinstance(module, self.parts.DeepseekV4RotaryEmbedding):
                    for name, x in type(module)(model.config).named_buffers():
                        setattr(module, name, x)
        return model

    def watch(self, model):
        """Where the routers and indexers of the next forward leave what they choose, by layer"""
        chosen = {}
        for l, layer in enumerate(model.model.layers):
            def router(module, inputs, out, l=l):
                chosen["experts", l] = np.sort(out[2].numpy(), axis=-1)

            def indexer(module, inputs, out, l=l):
                chosen["entries", l] = np.sort(out.numpy(), axis=-1)[..., ::-1]
            layer.mlp.gate.register_forward_hook(router)
            if hasattr(layer.self_attn.compressor, "indexer"):
                layer.self_attn.compressor.indexer.register_forward_hook(indexer)
        return chosen

    def cross_entropy(self, logits, targets):
        labels = self.torch.tensor(np.where(targets < 0, -100, targets)).long()
        return self.torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))

    def gradients(self, named):
        zeros, grads = self.torch.zeros_like, {}
        for name, x in named:
            grads[name] = (zeros(x) if x.grad is None else x.grad).numpy()
        return {"grad." + name: x for name, x in official_tensors(grads).items()}

    def probe(self, folder, inputs, targets):
        """logits, loss and gradients by official names, as arrays; and what was chosen"""
        model = self.wide(self.load(folder))
        chosen = self.watch(model)
        with self.lifted():
            logits = model(input_ids=self.torch.tensor(inputs).long(), use_cache=False).logits
        assert logits.dtype == self.torch.float64
        loss = self.cross_entropy(logits, targets)
        loss.backward()
        found = {"logits": logits.detach().numpy(), "loss": loss.detach().numpy().reshape(1)}
        return {**found, **self.gradients(model.named_parameters())}, chosen

    def mtp_probe(self, folder, cfg, p, inputs, targets):
        """The same of main loss + mtp_weight * MTP's, composed of transformers' parts as section 2.11 has it"""
        torch, parts, model = self.torch, self.parts, self.wide(self.load(folder))
        config, D, eps = model.config, cfg.hidden_size, cfg.rms_norm_eps
        config.layer_types = [*config.layer_types, SLIDING]
        config.mlp_layer_types = [*config.mlp_layer_types, "moe"]
        config.num_hidden_layers += 1
        layer = parts.DeepseekV4DecoderLayer(config, cfg.num_hidden_layers)
        head = parts.DeepseekV4HyperHead(config)
        modules = {"mtp.0": layer, "mtp.0.hc_head": head}
        modules.update({f"mtp.0.{name}": parts.DeepseekV4RMSNorm(D, eps=eps) for name in ("enorm", "hnorm", "norm")})
        modules.update({f"mtp.0.{name}": torch.nn.Linear(D, D, bias=False) for name in ("e_proj", "h_proj")})
        named, disk = [], trainer.to_disk(v4.MODEL, p, cfg)
        for prefix, module in modules.items():
            module.double().eval()
            for name, x in [*module.named_parameters(), *module.named_buffers()]:
                official = self.mtp_name(f"{prefix}.{name}")
                parts_of = {".gate_up_proj": ("w1", "w3"), ".down_proj": ("w2",)}.get(official[official.rfind("."):])
                if parts_of and ".experts." in official:
                    stem = official.rpartition(".")[0]
                    value = np.stack([np.concatenate([disk[f"{stem}.{e}.{w}.weight"] for w in parts_of])
                                      for e in range(cfg.n_routed_experts)])
                else:
                    value = disk[official]
                with torch.no_grad():
                    x.copy_(torch.tensor(value))
                if isinstance(x, torch.nn.Parameter):
                    named.append((official, x))
        end, tokens = {}, torch.tensor(inputs).long()
        model.model.hc_head.register_forward_pre_hook(lambda module, args: end.update(X=args[0]))
        with self.lifted():
            logits = model(input_ids=tokens, use_cache=False).logits
            e = modules["mtp.0.e_proj"](modules["mtp.0.enorm"](model.model.embed_tokens(tokens[:, 1:])))
            h = modules["mtp.0.h_proj"](modules["mtp.0.hnorm"](end["X"][:, :-1]))
            X, positions = e[:, :, None] + h, torch.arange(tokens.shape[1] - 1)[None]
            mask = parts.create_sliding_window_causal_mask(config=config, inputs_embeds=e, attention_mask=None,
                                                           cache=None, position_ids=positions)
            tables = {"main": model.model.rotary_emb(e, position_ids=positions, layer_type="main")}
            X = layer(X, position_embeddings=tables, position_ids=positions, attention_mask=mask,
                      input_ids=tokens[:, 1:], cache=None)
            after = model.lm_head(modules["mtp.0.norm"](head(X)))
        loss = self.cross_entropy(logits, targets) + cfg.mtp_weight * self.cross_entropy(after, targets[:, 1:])
        loss.backward()
        found = {"logits": logits.detach().numpy(), "loss": loss.detach().numpy().reshape(1)}
        return {**found, **self.gradients([*model.named_parameters(), *named])}

    @staticmethod
    def mtp_name(name):
        """The official one"""
        name = name.replace("mtp.0.hc_head.hc_", "mtp.0.hc_head_").replace("mtp.0.", "layers.0.")
        return official_name(name).replace("layers.0.", "mtp.0.")


def ours(cfg, p, inputs, targets):
    c = count(inputs, targets, cfg)
    acts = forward(p, inputs, targets, cfg)
    g = trainer.to_disk(v4.MODEL, backward(p, acts, inputs, targets, c, cfg), cfg)
    found = {"logits": acts["logits"], "loss": numbers([acts], c, cfg)["loss"].reshape(1)}
    return {**found, **{"grad." + name: x for name, x in g.items() if not name.endswith("gate.bias")}}, acts


def chosen_by_us(acts):
    out = {}
    for l, a in enumerate(acts["blocks"]):
        out["experts", l] = np.sort(a["experts"].reshape(-1, a["experts"].shape[-1]), axis=-1)
        if "index_chosen" in a:
            out["entries", l] = np.sort(a["index_chosen"], axis=-1)[..., ::-1]
    return out


def save(folder, cfg, p):
    from safetensors.numpy import save_file
    tensors = {**trainer.to_disk(v4.MODEL, p, replace(cfg, mtp=False)), **tables_to_disk(cfg)}
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config_json(replace(cfg, mtp=False)), file)
    tensors = {name: x.astype(np.int64) if x.dtype == np.int32 else x.copy() for name, x in tensors.items()}
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})


def read_back(folder, cfg):
    """Config and parameters of a folder that transformers wrote"""
    with open(os.path.join(folder, "config.json")) as file:
        found = read_config(json.load(file), folder, cfg.batch, cfg.seq_len)
    found, tensors = fit(found, exact.read_safetensors(os.path.join(folder, "model.safetensors")))
    return found, trainer.from_disk(v4.MODEL, tensors, found)


ODD = {**spec.TINY, "vocab_size": 37, "hidden_size": 22, "head_dim": 12, "q_lora_rank": 9, "num_attention_heads": 6,
       "o_groups": 3, "o_lora_rank": 5, "partial_rotary_factor": 0.5, "index_n_heads": 9, "index_head_dim": 10,
       "index_topk": 3, "moe_intermediate_size": 7, "n_routed_experts": 5, "num_experts_per_tok": 3,
       "swiglu_limit": 0.3, "routed_scaling_factor": 2.5, "hc_eps": 1e-4, "rms_norm_eps": 1e-5}


def some(layers, hashed, **changes):
    """ODD with these layers: S sliding, C CSA, H HCA"""
    kinds = {"S": SLIDING, "C": CSA, "H": HCA}
    hf = {**ODD, "num_hidden_layers": len(layers), "layer_types": [kinds[x] for x in layers], **changes,
          "mlp_layer_types": ["hash_moe" if l < hashed else "moe" for l in range(len(layers))]}
    part = {"partial_rotary_factor": hf["partial_rotary_factor"]}
    turn = {key: {**x, **part} for key, x in spec.TINY["rope_parameters"].items()}
    turn["compress"].update(changes.get("compress", {}))
    return {**hf, "rope_parameters": turn}


PLAIN = {"compress": {"rope_type": "default"}}
MIDDLE = {"compress": {"rope_theta": 100.0, "beta_fast": 8}}  # a frequency between the two
RATES = {"compress_rates": {CSA: 3, HCA: 7}}
VARIANTS = {  # the model; lengths in float64, and in float32
    "tiny": (spec.TINY, (1, 3, 5, 16, 17, 64, 70), (17, 70)),
    "tiny, MTP": ({**spec.TINY, "mtp_weight": 0.3}, (3, 9, 70), (33,)),
    "S": (some("SS", 1), (1, 7, 8, 9, 25), (25,)),
    "C": (some("CC", 1, **MIDDLE), (3, 4, 11, 12, 13, 15, 16, 17, 40), (17, 40)),
    "H": (some("HH", 1, **PLAIN), (15, 16, 17, 31, 32, 50), (33,)),
    "H H C H C, two streams": (some("HHCHC", 0, hc_mult=2, hc_sinkhorn_iters=7, **RATES, **MIDDLE), (6, 7, 20, 41),
                               (41,)),
    "C S C H, three streams, all by tables": (some("CSCH", 4, hc_mult=3, hc_sinkhorn_iters=3, **RATES), (8, 9, 33), ()),
    "S C H, one iteration, MTP": (some("SCH", 1, hc_mult=3, hc_sinkhorn_iters=1, compress_rates={CSA: 2, HCA: 8},
                                       mtp_weight=0.1, sliding_window=3, **MIDDLE), (2, 4, 8, 30), (30,)),
}
LIMITS = {F8: (1e-12, 1e-12, 1e-11), F4: (2e-5, 2e-6, 1e-4)}  # of logits, loss, gradients


def worst_errors(found, truth, dtype):
    """Of logits, loss, gradients. A gradient of float that is small by cancelling is measured by all of them."""
    assert found.keys() == truth.keys(), found.keys() ^ truth.keys()
    size = math.sqrt(sum((x * x).sum() for name, x in truth.items() if name.startswith("grad.")))
    floor, errors = size * (1e-2 if dtype == F4 else 1e-6), {"logits": (0.0, ""), "loss": (0.0, ""), "grad": (0.0, "")}
    for name, x in truth.items():
        kind = name.partition(".")[0]
        below = max(np.linalg.norm(x), floor) if kind == "grad" else np.linalg.norm(x)
        errors[kind] = max(errors[kind], (np.linalg.norm(found[name].astype(F8) - x) / below, name))
    return list(errors.values())


def compare():
    try:
        truth = Truth()
    except ImportError as error:
        print(f"skipped: {error}")
        return 0
    out = []
    for name, (hf, lengths, rounded) in VARIANTS.items():
        for T in sorted({*lengths, *rounded}):
            cfg, p, inputs, targets = case(hf, 2, T, 0.6)
            with tempfile.TemporaryDirectory() as folder:
                save(folder, cfg, p)
                if cfg.mtp:
                    expected, chosen = truth.mtp_probe(folder, cfg, p, inputs, targets), None
                else:
                    expected, chosen = truth.probe(folder, inputs, targets)
            for dtype in [F8] * (T in lengths) + [F4] * (T in rounded):
                found, acts = ours(cfg, {key: x.astype(dtype) for key, x in p.items()}, inputs, targets)
                errors = worst_errors(found, expected, dtype)
                same = chosen is None or all(np.array_equal(x, chosen[key]) for key, x in chosen_by_us(acts).items())
                good = same and all(e <= limit for (e, _), limit in zip(errors, LIMITS[dtype]))
                text = " ".join(f"{e:.0e}" for e, _ in errors) + ("" if good else f" {errors[2][1]} {same}")
                out.append((f"{name}, T {T}, {np.dtype(dtype)}: logits, loss, gradients within {text}", good))
    return exact.report(out + truth_files(truth))


def truth_files(truth):
    """What transformers writes, in both of its ways, is what we wrote"""
    out = []
    for name in ("tiny", "H H C H C, two streams"):
        cfg, p, *_ = case(VARIANTS[name][0], 2, 3)
        with tempfile.TemporaryDirectory() as folder:
            save(folder, cfg, p)
            model, kept = truth.load(folder), []
            for way in ({}, {"save_original_format": False}):
                theirs = os.path.join(folder, "theirs" + "".join(way))
                model.save_pretrained(theirs, **way)
                found, again = read_back(theirs, cfg)
                kept += [replace(found, steps=cfg.steps) == cfg] + [same_bits(again[key], x) for key, x in p.items()]
        out.append((f"{name}: files that transformers writes, in both of its ways", all(kept)))
    return out


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    if sys.argv[1:2] == ["--probe-with"]:
        import deepseek_v4_program
        sys.exit(exact.report(deepseek_v4_program.promises(sys.argv[2:])))
    sys.exit(compare())
