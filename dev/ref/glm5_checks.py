"""
What glm5.py promises before it writes golden files: config.json and names, counts of the published models, finite
differences, and in float32 what must hold to the bit. NumPy and the standard library only.

    python dev/ref/glm5_checks.py        hold the model against transformers, in float64 and in float32 (glm5_truth.py)
    python dev/ref/glm5_checks.py --probe-with PROGRAM
                                         a program, with its own arguments and --from DIR --probe IN --probe-out OUT

Numbers such as "5.1" are sections of the specification that this project was written from, which is not in the
repository.
"""
import sys
from dataclasses import replace

import numpy as np

import exact
import experts
import fp8
import glm5
import latent_attention as latent
import ops
import sparse_attention as sparse
import trainer
from deepseek_v4_checks import chain, wide, worst_slope
from exact import F4, F8
from glm5 import backward, count, forward, numbers
from glm5_config import config_json, fit, parameter_table, read_config
from moe_checks import close, same_bits

A = {  # 5.1
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "float32", "vocab_size": 320,
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 52, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 44, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 2,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 5, "index_topk": 20, "index_head_dim": 28, "index_n_heads": 18,
    "index_topk_freq": 4, "index_skip_topk_offset": 2,
    "indexer_types": ["full", "full", "shared", "shared", "shared", "full", "shared"], "indexer_rope_interleave": True,
    "rope_interleave": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "mlp_bias": False, "initializer_range": 0.02, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "latent_norm_eps": 1e-6}
PUBLISHED = {  # GLM-5.2
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "num_hidden_layers": 78,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "head_dim": 192, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_topk_freq": 4,
    "index_skip_topk_offset": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
    "pad_token_id": 154820, "max_position_embeddings": 1048576}


def draw(cfg, shrink):
    """Parameters as 5.3 has them: scores and weights that differ. shrink: latents and keys of the indexer so small that
    the eps of their norms is felt"""
    rng, p = np.random.default_rng(0), {}
    for row in parameter_table(cfg):
        x = rng.normal(size=row.shape)
        if row.kind == "gain":
            x = 1 + 0.2 * x
        elif row.kind in ("bias", "selection"):
            x = (0.3 if row.kind == "bias" else 0.1) * x
        elif row.kind != "embedding":
            x = x / np.sqrt(row.shape[-1])
        p[row.name] = x.astype(F4)
    for prefix in ("", "mtp_") if shrink else ():
        for name, factor in (("q_a_proj", 10), ("index_wk", 50)):
            if prefix + name in p:
                p[prefix + name] = p[prefix + name] / F4(factor)
        if prefix + "kv_a_proj" in p:
            p[prefix + "kv_a_proj"][..., :cfg.kv_lora_rank, :] /= F4(10)
    return p


def case(hf, B, T, shrink=False, **changes):
    """A config, parameters, inputs and targets, of which some are not counted"""
    cfg = replace(read_config(hf, "case", B, T), steps=1, **changes)
    inputs, targets = (x[0, 0] for x in trainer.draw_data(cfg))
    trainer.ignore_targets(targets)
    targets[0, 0] = targets[-1, -1] = 3
    if cfg.pad_token_id is not None:
        inputs[:, T // 2] = cfg.pad_token_id
    return cfg, draw(cfg, shrink), inputs, targets


# ---------------------------------------------------------------------------------------------------------------------
# config.json, names and counts.
# ---------------------------------------------------------------------------------------------------------------------
def size_of(cfg, outside=()):
    return sum(int(np.prod(row.shape, dtype=object)) for row in parameter_table(cfg) if row.kind not in outside)


def tensors_of(cfg):
    return sum(len(row.numbers) * len(row.parts) for row in parameter_table(cfg))


def config_promises():
    a, published = read_config(A, "", 1, 1), read_config(PUBLISHED, "", 1, 1)
    whole = replace(published, mtp=True)
    ruled = read_config({**A, "indexer_types": None}, "", 1, 1)
    pattern = read_config({**A, "indexer_types": None, "index_topk_pattern": "FFSSSFS"}, "", 1, 1)
    every = read_config({**A, "indexer_types": None, "index_topk_freq": 1}, "", 1, 1)
    there_and_back = []
    for cfg in [a, published, *(run()[0] for run in glm5.RUNS.values())]:
        settings = {key: getattr(cfg, key) for key in trainer.Run.__dataclass_fields__}
        there_and_back.append(replace(read_config(config_json(cfg), "", 1, 1), **settings) == cfg)
    one = {row.name: int(np.prod(row.shape[1:])) for row in parameter_table(published)}
    attention = sum(one[name] for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj", "kv_a_layernorm",
                                           "kv_b_proj", "o_proj"))
    indexer = sum(x for name, x in one.items() if name.startswith("index_"))
    experts_of = sum(x for name, x in one.items() if name.startswith(("router", "expert_", "shared_")))
    full = (0, 1, 2, *range(6, 75, 4))
    return [
        ("config: there and back", all(there_and_back)),
        ("config: full layers by list, by rule and by pattern, or all", a == ruled == pattern and
         a.full_layers == (0, 1, 5) and every.full_layers == tuple(range(7))),
        ("config: the published model has 21 full layers, the last three see what layer 74 has chosen",
         published.full_layers == full and len(full) == 21 and {published.source(l) for l in (75, 76, 77)} == {74}),
        ("counts: tensors and parameters of A", (tensors_of(a), size_of(a, ("selection",)), size_of(a)) ==
         (232, 841324, 841364)),
        ("counts: attention, indexer, experts of a layer", (attention, indexer, experts_of) ==
         (165022208, 9371904, 9702998016)),
        ("counts: the trunk, and with MTP, in all and on disk", (size_of(published, ("selection",)), size_of(published),
         size_of(whole), tensors_of(whole)) == (743377000704, 743377019904, 753329940480, 59585)),
    ]


def refused(changes):
    try:
        read_config({**A, **changes}, "path", 1, 1)
    except SystemExit as error:
        return str(error).startswith("path: expected") or "expected" in str(error)
    return False


def file_promises():
    kept = []
    for run in glm5.RUNS.values():
        cfg, p, *_ = run()
        for fused in (True, False):
            disk = trainer.to_disk(glm5.MODEL, p, replace(cfg, fused_experts=fused))
            found, tensors = fit(cfg, disk)
            again = trainer.from_disk(glm5.MODEL, tensors, found)
            kept += [found.fused_experts == fused] + [same_bits(again[name], x) for name, x in p.items()]
    wrong = [{"model_type": "x"}, {"indexer_types": ["shared"] + ["full"] * 6}, {"indexer_types": ["full"]},
             {"mlp_layer_types": ["moe"] * 7}, {"rope_parameters": {}}, {"rope_interleave": False},
             {"moe_layer_freq": 2}, {"tie_word_embeddings": True}, {"indexer_train": "on"}, {"q_lora_rank": None},
             {"num_key_value_heads": 1}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}]
    return [("files: to disk and back, experts apart and as one tensor", all(kept)),
            ("config: what is not computed is refused", all(map(refused, wrong)))]


# ---------------------------------------------------------------------------------------------------------------------
# Finite differences.
# ---------------------------------------------------------------------------------------------------------------------
PADLESS = {"pad_token_id": None}
SLOPES = {  # the model; B, T; where documents begin; settings
    "text": (glm5.TEXT, 2, 11, None, PADLESS),
    "text, documents": (glm5.TEXT, 1, 23, [0] * 7 + [1] + [0] * 11 + [1] + [0] * 3, PADLESS),
    "MTP, balance, the indexer": (glm5.MTP, 2, 9, None, {}),
    "MTP, documents, the indexer dense": (glm5.MTP, 2, 13, [[0] * 6 + [1] + [0] * 6, [0, 1] + [0] * 11],
                                          {"indexer_train": "dense"}),
    "the indexer, taught by one layer": (glm5.MTP, 2, 13, None, {"indexer_kl_target": "source_layer"}),
}


def slope_promises():
    out = []
    for name, (hf, B, T, starts, changes) in SLOPES.items():
        cfg, p, inputs, targets = case(hf, B, T, **changes)
        starts, p = None if starts is None else np.array(starts).reshape(B, T), wide(p)
        c = count(inputs, targets, cfg, starts)

        def losses(p):
            return numbers([forward(p, inputs, targets, cfg, starts)], c, cfg)

        def loss(p):
            return losses(p)["loss"]

        def index_loss(p):
            return cfg.indexer_kl_coeff * losses(p)["index_loss"].sum()
        g = backward(p, forward(p, inputs, targets, cfg, starts), inputs, targets, c, cfg, starts)
        index = [key for key in p if "index_" in key]
        others = [key for key in p if key not in index and not key.endswith("selection_bias")]
        worst, key = worst_slope(p, others, loss, g)
        out.append((f"{name}: gradients agree with differences of the loss, {worst:.0e} ({key})", worst < 1e-6))
        if cfg.indexer_train == "off":
            out.append((f"{name}: the indexer has no gradient", not any(g[key].any() for key in index)))
        else:
            worst, key = worst_slope(p, index, index_loss, g)
            out.append((f"{name}: the indexer's with those of its loss, {worst:.0e} ({key})", worst < 1e-6))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# What holds to the bit.
# ---------------------------------------------------------------------------------------------------------------------
def packing_promises():
    """A packed row has the bits of its documents, and so have sums of gradients where one document is alone in having
    counted targets"""
    out = []
    for name, hf, how in (("text", glm5.TEXT, "off"), ("MTP", glm5.MTP, "off"), ("the indexer", glm5.MTP, "kl")):
        cfg, p, inputs, targets = case(hf, 1, 31, indexer_train=how, seq_balance_coef=0.0)
        starts, cuts = np.zeros((1, 31), int), [(0, 4), (4, 26), (26, 31)]
        starts[0, [4, 26]], targets[0, [3, 25]] = 1, -1  # no document guesses what another begins with
        packed, kept = forward(p, inputs, targets, cfg, starts), []
        for first, end in cuts:
            at = slice(first, end)
            alone = forward(p, inputs[:, at], targets[:, at], replace(cfg, seq_len=end - first))
            names = ["logits", "losses", "norm"] + ["mtp_losses"] * cfg.mtp + ["mtp_index_losses"] * (how == "kl")
            kept += [same_bits(packed[key][:, at].copy(), alone[key]) for key in names]
            kept += [same_bits(a["index_losses"][:, at].copy(), b["index_losses"])
                     for a, b in zip(packed["blocks"], alone["blocks"]) if "index_losses" in a]
        only, at = np.full_like(targets, -1), slice(4, 26)
        only[:, at] = targets[:, at]
        c = count(inputs, only, cfg, starts)
        whole = backward(p, forward(p, inputs, only, cfg, starts), inputs, only, c, cfg, starts)
        alone = backward(p, forward(p, inputs[:, at], only[:, at], cfg), inputs[:, at], only[:, at], c, cfg)
        out += [(f"documents, {name}: a packed row has their bits", all(kept)),
                (f"documents, {name}: and those of one that has all targets, its gradients",
                 all(np.array_equal(whole[key], x) for key, x in alone.items() if how == "off" or "index" not in key))]
    return out


def causal_promises():
    """A later token changes nothing before it; and positions that all move alike change next to nothing"""
    cfg, p, inputs, targets = case(glm5.TEXT, 1, 19)
    whole, kept = forward(p, inputs, targets, cfg), []
    for t in range(1, 19):
        other = inputs.copy()
        other[0, t:] = (other[0, t:] + 1) % cfg.vocab_size
        kept.append(same_bits(forward(p, other, targets, cfg)["logits"][:, :t].copy(), whole["logits"][:, :t].copy()))
    p = wide(p)
    ends = [forward(p, inputs, targets, cfg, None, np.arange(19)[None] + offset)["logits"] for offset in (0, 1000)]
    return [("causal: a later token changes nothing", all(kept)),
            ("positions: only how far apart they are counts", close(*ends, 1e-9, 1e-9))]


def short_promises():
    """Rows with no more keys than are chosen: attention is attention.h's over all of them, whatever an indexer says"""
    cfg, p, inputs, targets = case(glm5.TEXT, 2, 5)
    acts = forward(p, inputs, targets, cfg)
    a = acts["blocks"][0]
    q, k, v = glm5.heads_of(a, cfg)
    _, att, largest, inverse = ops.attention_weights(q, k)
    out = exact.chain_matmul(np.zeros_like(v), att, v)
    kept = [same_bits(a[name], x) for name, x in (("att_max", largest), ("att_inv", inverse),
                                                  ("attention", ops.merge_heads(out)))]
    dout = np.random.default_rng(1).normal(size=k.shape).astype(F4)
    kept += [same_bits(*pair) for pair in zip(latent.chosen_backward(dout, q, k, k, att),
                                              ops.attention_backward(dout, q, k, k, att))]
    same = []
    for T in (5, 6):
        cfg, p, inputs, targets = case(glm5.TEXT, 1, T)
        same.append(same_bits(*(forward(p, inputs, targets, replace(cfg, indexer_train=how))["logits"]
                                for how in ("off", "dense"))))
    other = {key: -x if key.startswith("index") else x for key, x in p.items()}
    ends = [forward(x, inputs[:, :5], targets[:, :5], cfg)["logits"] for x in (p, other)]
    return [("short rows: the bits of attention over all keys", all(kept)),
            ("short rows: the indexer decides nothing until there are more keys than it chooses",
             same == [True, False] and same_bits(*ends))]


def plain_attention(q, k, v, dout, scale):
    """out, dq, ds, att of one head and query, and the keys on its list"""
    scores = [chain(F4(0), q, key) * scale for key in k]
    e, total = [exact.exp(score - max(F4(-10000), *scores)) for score in scores], F4(0)
    for x in e:
        total = total + x
    att = [x * (F4(1) / total) for x in e]
    datt = [chain(F4(0), dout, value) for value in v]
    D = chain(F4(0), att, datt)
    ds = [(x * (y - D)) * scale for x, y in zip(att, datt)]
    return ([chain(F4(0), att, v[:, i]) for i in range(v.shape[1])],
            [chain(F4(0), ds, k[:, i]) for i in range(k.shape[1])], ds, att)


def order_promises():
    """Vectorised sums with masks against plain loops over what is there"""
    rng = np.random.default_rng(8)

    def some(*shape):
        return rng.normal(size=shape).astype(F4)
    q, k, v, dout = some(1, 2, 6, 5), some(1, 2, 6, 5), some(1, 2, 6, 3), some(1, 2, 6, 3)
    seen = (rng.random((1, 6, 6)) < 0.6) | np.eye(6, dtype=bool)
    out, att, _, _ = latent.chosen_forward(q, k, v, seen)
    dq, dk, dv = latent.chosen_backward(dout, q, k, v, att)
    kept, scale = [], F4(1) / np.sqrt(F4(5))
    for h in range(2):
        own, values = np.zeros((6, 5), F4), np.zeros((6, 3), F4)
        for t in range(6):
            at = np.flatnonzero(seen[0, t])
            y, d, ds, weights = plain_attention(q[0, h, t], k[0, h, at], v[0, h, at], dout[0, h, t], scale)
            kept += [np.array_equal(out[0, h, t], y), np.array_equal(dq[0, h, t], d)]
            for u, s, weight in zip(at, ds, weights):
                own[u] = [exact.madd(s, x, z) for x, z in zip(q[0, h, t], own[u])]
                values[u] = [exact.madd(weight, x, z) for x, z in zip(dout[0, h, t], values[u])]
        kept += [np.array_equal(dk[0, h], own), np.array_equal(dv[0, h], values)]
    mass, numbers = some(1, 6, 6), sparse.listed(seen, 4)
    listed = sparse.gathered(mass, numbers)
    there = [[mass[0, t, u] if u >= 0 else 0 for u in numbers[0, t]] for t in range(6)]
    back = sparse.spread(listed, numbers, 6)
    return [("order: attention over lists", all(kept)),
            ("lists: there and back", np.array_equal(listed[0], np.array(there, F4)) and
             np.array_equal(back, np.where(sparse.chosen_of(numbers, 6), mass, F4(0))))]


def absorbed_promises():
    """Both forms of attention, in float64 the same, in float32 within the bound"""
    worst, exactly, rope, n = 0.0, 0.0, 0.0, 0
    for seed, (H, T, dn, dr, dv, r) in enumerate(((3, 9, 5, 6, 8, 7), (2, 33, 24, 16, 32, 44), (1, 70, 1, 2, 1, 1))):
        rng = np.random.default_rng(seed)
        q, c, k_rope = rng.normal(size=(2, H, T, dn + dr)), rng.normal(size=(2, T, r)), rng.normal(size=(2, T, dr))
        kv_b = rng.normal(size=(H * (dn + dv), r)) / np.sqrt(r)
        seen = np.tril((rng.random((2, T, T)) < 0.5) | np.eye(T, dtype=bool))
        for dtype in (F8, F4):
            x = [y.astype(dtype) for y in (q, c, k_rope, kv_b)]
            kv = ops.linear_forward(x[1], x[3])
            out = latent.chosen_forward(x[0], *latent.expand(kv, x[2], H, dn), seen)[0]
            apart = np.abs(latent.absorbed_forward(*x, dn, seen).astype(F8) - out)
            if dtype == F8:
                exactly = max(exactly, apart.max())
                rope = latent.absorbed_forward(x[0], x[1], 0 * x[2], x[3], dn, seen) - out
                n += np.abs(rope).max() > 1e-2
            else:
                worst = max(worst, (apart / latent.absorbed_bound(*x, dn, seen)).max())
    return [(f"absorbed: what expanded attention says, {exactly:.0e}", exactly < 1e-13),
            (f"absorbed: in float32 at most {worst:.2f} of the bound", 0.001 < worst <= 1),
            ("absorbed: not without the channels that turn (trap 9)", n == 3)]


def choice_promises():
    """The router"""
    z = np.array([[0.1, 2, -30, 0.1, 0, 0], [25, -1, 0, 3, 3, -4], [0, 0, 0, 0, 0, 0]])
    plain, grouped = (experts.Router(experts.SIGMOID, 2, 2.5, *more) for more in ((), (True, 3, 1)))
    raw = experts.Router(experts.SIGMOID, 2, 2.5, False)
    s, taken, weights = experts.router_forward(z, plain, np.array([0.5, 0, 9, 0.5, 0, 0]))
    best = np.take_along_axis(s, taken, 1)
    below = np.array([-3, -3, -1, -1, -4, -4.0])
    nan = np.array([[np.nan, 1, 0, 0, -np.inf, -np.inf]])
    difference = (1 / (1 + np.exp(-z - 1e-6)) - 1 / (1 + np.exp(-z + 1e-6))) / 2e-6
    return [
        ("router: scores and slopes", close(s, 1 / (1 + np.exp(-z)), 1e-14) and
         close(experts.slope_of(z, s, plain), difference, 1e-6, 1e-9)),
        ("router: the bias decides, ties go to the lower number, and weights do not know it",
         taken.tolist() == [[0, 2]] * 3 and close(weights, 2.5 * best / best.sum(1)[:, None], 1e-12) and
         experts.router_forward(z, plain)[1].tolist() == [[0, 1], [0, 3], [0, 1]]),
        ("router: weights that are not renormalised", close(experts.router_forward(z, raw)[2], 2.5 * np.take_along_axis(
            s, experts.router_forward(z, raw)[1], 1), 1e-14)),
        ("router: groups by the sum of their two largest, also below 0",
         experts.router_forward(z, grouped)[1].tolist() == [[0, 1], [2, 3], [0, 1]] and
         experts.router_forward(z, grouped, below)[1].tolist() == [[2, 3]] * 3 and
         experts.choose(nan, grouped).tolist() == [[2, 3]] and experts.choose(nan, plain).tolist() == [[1, 2]]),
    ]


def mtp_promises():
    """What its switch does; and that of the token that fills"""
    cfg, p, inputs, targets = case(glm5.MTP, 2, 9, seq_balance_coef=0.0)

    def gradients(cfg):
        c = count(inputs, targets, cfg)
        return backward(p, forward(p, inputs, targets, cfg), inputs, targets, c, cfg)
    joint, apart, without = gradients(cfg), gradients(replace(cfg, mtp_detach=True)), gradients(replace(cfg, mtp=False))
    padded = gradients(replace(cfg, pad_token_id=7))
    own = [key for key in joint if key.startswith("mtp_")]
    return [("MTP: detached, its loss reaches its parameters alone",
             all(same_bits(apart[key], joint[key]) for key in own) and
             all(np.array_equal(apart[key], x) for key, x in without.items()) and
             not np.array_equal(joint["norm"], without["norm"])),
            ("the token that fills: its row has no gradient, all else has its own",
             joint["embed_tokens"][7].any() and not padded["embed_tokens"][7].any() and
             all(np.array_equal(padded[key], x) for key, x in joint.items() if key != "embed_tokens") and
             np.array_equal(np.delete(padded["embed_tokens"], 7, 0), np.delete(joint["embed_tokens"], 7, 0)))]


def bias_promises():
    cfg, p, _, _ = glm5.mtp_run()
    counts = np.array([[0] * 6, [4, 1, 3, 0, 2, 2], [2, 2, 2, 2, 2, 2]], np.int32)
    after = glm5.level_biases(p, {"counts": counts}, cfg)
    moved = (after["selection_bias"] - p["selection_bias"]) / F4(cfg.bias_update_rate)
    return [("bias: up with less load than the mean, down with more", np.rint(moved).tolist() ==
             [[0] * 6, [-1, 1, -1, 1, 0, 0]] and same_bits(after["mtp_selection_bias"], p["mtp_selection_bias"]))]


def golden_promises():
    """What the golden runs are said to have"""
    cfg, p, inputs, targets = glm5.text_run()
    blocks = forward(p, inputs[0, 0], targets[0, 0], cfg)["blocks"]
    ties = (blocks[2]["scores"][..., 1] == blocks[2]["scores"][..., 3]).all()
    unused = any((a["counts"] == 0).any() for a in blocks if "counts" in a)
    differ = not np.array_equal(blocks[0]["index_chosen"], blocks[2]["index_chosen"])
    cfg, p, inputs, targets = glm5.mtp_run()
    acts = forward(p, inputs[0, 0], targets[0, 0], cfg)
    stays = experts.staying(acts["blocks"][0]["scores"].reshape(-1, 6) + p["selection_bias"][0], cfg.router)
    best = experts.largest(acts["blocks"][0]["scores"].reshape(-1, 6) + p["selection_bias"][0], 3)
    return [("golden: ties, an expert without rows, the token that fills, keys that are not chosen", ties and unused and
             differ and (inputs[0] == 3).any() and cfg.seq_len > cfg.index_topk),
            ("golden: groups that matter", not np.take_along_axis(stays, best, 1).all())]


def number_promises():
    """Numbers of FP8 as the specification writes them down (4.3), and RoPE's frequencies (2.2)"""
    decoded = [2.0 ** (max(e, 1) - 7) * ((e > 0) + m / 8) for e in range(16) for m in range(8)][:-1]
    f = ops.rope_frequencies(64, 8e6, np.dtype(F4))
    e = (2 * np.arange(32, dtype=F4)) / F4(64)
    return [("E4M3: the numbers of its bytes", decoded == fp8.NUMBERS.tolist()),
            ("RoPE: a power in double, rounded once, then its inverse",
             same_bits(f, F4(1) / np.power(8e6, e.astype(F8)).astype(F4)) and
             not same_bits(f, (1 / np.power(8e6, e.astype(F8))).astype(F4)))]


def promises():
    return (config_promises() + file_promises() + slope_promises() + packing_promises() + causal_promises() +
            short_promises() + order_promises() + absorbed_promises() + choice_promises() + mtp_promises() +
            bias_promises() + number_promises() + golden_promises())


if __name__ == "__main__":
    import glm5_truth
    sys.exit(glm5_truth.compare(sys.argv[2:] if sys.argv[1:2] == ["--probe-with"] else None))
