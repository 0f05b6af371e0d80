"""
What qwen.py and lora.py check before they write golden files: config.json and the files, functions in float64 against
numbers computed elsewhere and against finite differences, in float32 what must hold to the bit. NumPy and the standard
library only, but for the last section.

    python dev/ref/qwen_checks.py          hold both against transformers and PEFT, in float64 and in float32

That needs torch, transformers and peft; what one of them is missing for is skipped, and it says so. The truth is the
model of transformers in float64, its own casts to float32 switched off; the error of a tensor is |x - truth| / |truth|
in the L2 norm.
"""
import contextlib
import copy
import importlib
import io
import math
import os
import sys
import tempfile
from dataclasses import replace

import numpy as np

import exact
import lora
import qwen
import trainer
from exact import F4, F8, tree_sum
from moe_checks import close, same_bits
from ops import (Adapter, adapter_backward, adapter_forward, attention_backward, attention_weights, back_through,
                 linear_forward, over_keys, router_backward, router_forward)
from qwen import backward, forward, numbers, parameter_table, read_config


# ---------------------------------------------------------------------------------------------------------------------
# config.json: published models, and what stands there in place of keys that are absent.
# ---------------------------------------------------------------------------------------------------------------------
def shape_of(kind, D, L, H, KV, F, V, **more):
    return {"model_type": kind, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H,
            "num_key_value_heads": KV, "intermediate_size": F, "vocab_size": V, "max_position_embeddings": 40, **more}


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
PUBLISHED = {  # config.json; parameters and tensors of its file
    "Qwen2.5-0.5B": (shape_of("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True), 494032768, 290),
    "Qwen3-0.6B": (shape_of("qwen3", 1024, 28, 16, 8, 3072, 151936, tie_word_embeddings=True), 596049920, 310),
    "Qwen3-8B": (shape_of("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128), 8190735360, 399),
    "Qwen3-30B-A3B": (shape_of("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, **EXPERTS), 30532122624,
                      18867),
    "Mistral-7B-v0.1": (shape_of("mistral", 4096, 32, 32, 8, 14336, 32000), 7241732096, 291),
}


def count_promises():
    out = []
    for name, (hf, n_parameters, n_tensors) in PUBLISHED.items():
        table = parameter_table(read_config(hf, name, 1, 1))
        on_disk = sum(len(row.numbers) * len(row.parts) for row in table)
        out.append((f"{name}: parameters and tensors",
                    (sum(math.prod(row.shape) for row in table), on_disk) == (n_parameters, n_tensors)))
    return out


def config_promises():
    tiny = shape_of("qwen2", 24, 3, 4, 2, 8, 11)
    moe = {**tiny, **EXPERTS, "model_type": "qwen3_moe"}
    sliding = {**tiny, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    by_layer = {**sliding, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}

    def read(hf, **changes):
        return read_config({**hf, **changes}, "tiny", 1, 1)

    def refuses(**changes):
        try:
            read(tiny, **changes)
            return False
        except SystemExit:
            return True
    runs = [run()[0] for run in qwen.RUNS.values()] + [lora.golden_run(*run)[0] for run in lora.RUNS.values()]
    return [
        ("config: head_dim absent", [read(tiny, model_type=kind).head_dim for kind in ("qwen2", "mistral", "llama")] +
         [read(moe).head_dim, read(tiny, model_type="qwen3").head_dim] == [6, 6, 6, 6, 128]),
        ("config: windows of Qwen2 and Qwen3",
         [read(x).windows for x in (tiny, {**tiny, "sliding_window": 5, "max_window_layers": 0}, sliding, by_layer)] ==
         [(0, 0, 0), (0, 0, 0), (0, 0, 5), (5, 0, 0)]),
        ("config: windows of Qwen3-MoE", read({**moe, **sliding, "model_type": "qwen3_moe"}).windows == (5, 5, 5)),
        ("config: windows of Mistral", [read(tiny, model_type="mistral", **x).windows[0] for x in
                                        ({}, {"sliding_window": None}, {"sliding_window": 9})] == [4096, 0, 9]),
        ("config: both spellings of RoPE, and its default", [read(tiny, **x).rope_theta for x in (
            {}, {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 6}})] == [1e4, 5e5, 6]),
        ("config: layers with experts", [read(moe, decoder_sparse_step=step, mlp_only_layers=dense).moe_layers
                                         for step, dense in ((1, []), (1, [1]), (2, None), (2, [1]))] ==
         [(0, 1, 2), (0, 2), (1,), ()]),
        ("config: weights of experts do not sum up to 1 unless it says so", not read(moe).norm_topk_prob),
        ("config: biases", [(x.qkv_bias, x.o_bias) for x in (
            read(tiny), read(tiny, model_type="qwen3"), read(tiny, model_type="qwen3", attention_bias=True))] ==
         [(True, False), (False, False), (True, True)]),
        ("config: scaled RoPE, other activations, sizes that are missing or do not fit are refused",
         all(refuses(**x) for x in ({"rope_scaling": {"type": "yarn"}}, {"rope_parameters": {"rope_type": "yarn"}},
                                    {"hidden_act": "gelu"}, {"vocab_size": None}, {"model_type": "gpt2"},
                                    {"head_dim": 5}, {"num_key_value_heads": 3}))),
        ("config: there and back",
         all(replace(read_config(qwen.config_json(cfg), "", 1, 1), **{key: getattr(cfg, key) for key in
             trainer.Run.__dataclass_fields__}) == cfg for cfg in runs)),
    ]


def file_promises():
    cfg, p, _, _ = qwen.moe_run()
    disk, tied, separate = trainer.to_disk(qwen.MODEL, p, cfg), replace(cfg, tie_word_embeddings=True), qwen.HEAD
    fused_cfg = replace(cfg, fused_experts=True)
    fused = trainer.to_disk(qwen.MODEL, p, fused_cfg)
    again = trainer.from_disk(qwen.MODEL, fused, qwen.fit(cfg, fused)[0])
    experts = "model.layers.2.mlp.experts."
    gate, up = np.split(p["expert_gate_up"][1, 3], 2)
    twice = {**disk, separate: disk[qwen.EMBEDDING].copy()}
    alone = {name: x for name, x in twice.items() if name != qwen.EMBEDDING}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        kept = [qwen.fit(tied, tensors)[0].tie_word_embeddings for tensors in (disk, twice, alone)]
    return [
        ("files: gate, up and down of an expert", all(
            np.array_equal(disk[f"{experts}3.{name}_proj.weight"], x)
            for name, x in (("gate", gate), ("up", up), ("down", p["expert_down"][1, 3])))),
        ("files: gate and up of a layer without experts", np.array_equal(p["gate_up"][0], np.concatenate(
            [disk[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]))),
        ("files: fused experts", fused[experts + "gate_up_proj"].shape == (5, 14, 18) and
         fused[experts + "down_proj"].shape == (5, 18, 7) and all(same_bits(again[name], x) for name, x in p.items())),
        ("files: another head is not tied, the same one is, and one alone", kept == [False, True, True] and
         said.getvalue().count("not tied") == 1),
        ("files: a head alone is the embedding", qwen.fit(tied, alone)[1][qwen.EMBEDDING] is twice[separate]),
        *((f"{name}: to disk and back", all(same_bits(x, p[key]) for key, x in trainer.from_disk(
            qwen.MODEL, trainer.to_disk(qwen.MODEL, p, cfg), cfg).items()))
          for name, (cfg, p, _, _) in ((name, run()) for name, run in qwen.RUNS.items())),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Operations that are new here: windows, weights that are not renormalised, the balance over all layers.
# ---------------------------------------------------------------------------------------------------------------------
def plain_attention(q, k, v, window):
    """As the formula has it, query by query"""
    out, T, HS = np.zeros_like(q), q.shape[0], q.shape[1]
    for t in range(T):
        seen = slice(max(0, t - window + 1), t + 1)
        e = np.exp(k[seen] @ q[t] / np.sqrt(HS))
        out[t] = (e / e.sum()) @ v[seen]
    return out


def window_promises():
    rng, kept, slopes = np.random.default_rng(8), [], []
    for T, window in ((1, 1), (16, 5), (7, 7), (7, 9), (9, 1)):
        q, k, v, dout = rng.normal(size=(4, 1, 1, T, 6))
        _, att, _, _ = attention_weights(q, k, window=window)
        kept.append(close(over_keys(att, v, window), plain_attention(q[0, 0], k[0, 0], v[0, 0], window), 1e-13, 1e-14))
        gradients, h = attention_backward(dout, q, k, v, att, window), 1e-6
        for x, dx in zip((q, k, v), gradients):
            direction = rng.normal(size=x.shape)
            x += h * direction
            up = (plain_attention(q[0, 0], k[0, 0], v[0, 0], window) * dout).sum()
            x -= 2 * h * direction
            down = (plain_attention(q[0, 0], k[0, 0], v[0, 0], window) * dout).sum()
            x += h * direction
            slopes.append(close((dx * direction).sum(), (up - down) / (2 * h), 1e-7, 1e-8))
    return [("attention with a window: the formula", all(kept)),
            ("attention with a window: its gradients", all(slopes))]


def unseen_promises():
    """What a query does not see is not even multiplied by 0: an infinity there changes no bit."""
    T, window, rng = 12, 4, np.random.default_rng(9)
    q, k, v, dout = rng.normal(size=(4, 1, 2, T, 6)).astype(F4)

    def run(position):
        inputs = [x.copy() for x in (q, k, v, dout)]
        for x in inputs:
            x[:, :, position] = np.inf
        with np.errstate(invalid="ignore"):
            _, att, _, _ = attention_weights(*inputs[:2], window=window)
            return over_keys(att, inputs[2], window), *attention_backward(inputs[3], *inputs[:3], att, window)
    none, first, last = run(slice(0, 0)), run(0), run(T - 1)
    far, near = np.s_[:, :, window:], np.s_[:, :, :T - window]
    return [("attention with a window: nothing of what is not seen",
             same_bits(none[0][far], first[0][far]) and same_bits(none[1][far], first[1][far]) and
             same_bits(none[2][near], last[2][near]) and same_bits(none[3][near], last[3][near]))]


def router_promises():
    z, dw = np.array([[1, 0.2, -0.5, 0.8]]), np.array([[0.3, -1.2]])
    p, _, experts, weights = router_forward(z, 2, True)
    slope = router_backward(dw, p, None, experts, weights, True, None, 0, 0)
    p, _, _, plain = router_forward(z, 2, False)
    chosen = np.zeros_like(z)
    chosen[0, experts[0]] = dw
    plain_slope = router_backward(dw, p, None, experts, plain, False, None, 0, 0)
    return [
        ("router: renormalised weights", close(weights, [0.549833997, 0.450166003], 0, 5e-10)),
        ("router: their gradient", close(slope, [0.371274859, 0, 0, -0.371274859], 0, 5e-10)),
        ("router: weights that are the scores", close(plain, np.exp(z[0, [0, 3]]) / np.exp(z).sum(), 1e-15)),
        ("router: their gradient reaches all experts",
         close(plain_slope, p * (chosen - (p * chosen).sum()), 1e-14) and plain_slope.all()),
    ]


def wide(p):
    return {name: x.astype(F8) for name, x in p.items()}


def balance_promises():
    """One formula over the rows of all layers, as transformers has it"""
    cfg, p, inputs, targets = qwen.moe_run()
    batch = inputs[0, 0], targets[0, 0]
    acts = forward(wide(p), *batch, cfg)
    blocks = [acts["blocks"][l] for l in cfg.moe_layers]
    scores = np.concatenate([a["scores"].reshape(-1, cfg.num_experts) for a in blocks])
    experts = np.concatenate([a["experts"].reshape(-1) for a in blocks])
    f = np.bincount(experts, minlength=cfg.num_experts) / len(scores)
    aux = cfg.router_aux_loss_coef * cfg.num_experts * (f * scores.mean(axis=0)).sum()
    found = numbers([acts], 5, cfg)
    unused = {**p, "router": np.zeros_like(p["router"])}
    top1 = replace(cfg, num_experts_per_tok=1, router_aux_loss_coef=0.0)
    g = backward(p, forward(p, *batch, top1), *batch, 5, top1)
    return [
        ("balance: that of all layers", close(found["loss"] - found["cross_entropy"], aux, 1e-13)),
        ("balance: 1 for equal scores",
         close(qwen.balance_of(forward(wide(unused), *batch, cfg), cfg), 1, 1e-14)),
        ("one expert, renormalised: nothing for the router to learn", not g["router"].any()),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The golden runs: to the bit in float32, and finite differences in float64.
# ---------------------------------------------------------------------------------------------------------------------
def slopes_agree(p, names, loss, g):
    """Gradients g of a loss against central differences; one random direction for each name"""
    rng, h, worst = np.random.default_rng(3), 1e-6, 0.0
    for name in names:
        direction = rng.normal(size=p[name].shape)
        slope = (loss({**p, name: p[name] + h * direction}) - loss({**p, name: p[name] - h * direction})) / (2 * h)
        size = np.linalg.norm(g[name]) * np.linalg.norm(direction)
        worst = max(worst, abs(slope - (g[name] * direction).sum()) / size)
    return worst < 1e-7


def slope_promises(name, run, **changes):
    cfg, p, inputs, targets = run()
    cfg, inputs, targets, rng = replace(cfg, **changes), inputs[0], targets[0], np.random.default_rng(3)
    p = {row.name: p[row.name].astype(F8) if np.shape(p.get(row.name)) == row.shape else
         0.5 * rng.normal(size=row.shape) for row in parameter_table(cfg)}
    if cfg.moe_layers:
        p["router"] = 2 * rng.normal(size=p["router"].shape)  # no ties
    count = int((targets >= 0).sum())

    def leaves(p):
        return [forward(p, *batch, cfg) for batch in zip(inputs, targets)]
    grads = [backward(p, acts, *batch, count, cfg) for acts, *batch in zip(leaves(p), inputs, targets)]
    g = {key: tree_sum([leaf[key] for leaf in grads]) for key in p}
    return [(f"{name}: gradients agree with differences of the loss",
             slopes_agree(p, p, lambda p: numbers(leaves(p), count, cfg)["loss"], g))]


def reach_promises():
    """In layers that all have a window a position does not see further than their windows together."""
    cfg, p, inputs, targets = qwen.window_run()
    cfg, inputs, targets = replace(cfg, windows=(3, 3, 2)), inputs[0, 0], targets[0, 0]
    reach, changed = 2 + 2 + 1, inputs.copy()
    changed[:, 0] = (changed[:, 0] + 1) % cfg.vocab_size
    a, b = (forward(p, x, targets, cfg)["logits"] for x in (inputs, changed))
    differs = [(a[:, t] != b[:, t]).any() for t in range(inputs.shape[1])]
    return [("windows: what a position sees through all layers", differs == [t <= reach for t in range(len(differs))])]


def run_promises(name, run):
    cfg, p, inputs, targets = run()
    batch = inputs[0, 0], targets[0, 0]
    acts = forward(p, *batch, cfg)
    earlier = forward(p, *(x[:, :-1] for x in batch), cfg)["logits"]
    double = forward(wide(p), *batch, cfg)["logits"]
    promises = [
        (f"{name}: a position does not see later ones", same_bits(earlier, acts["logits"][:, :-1].copy())),
        (f"{name}: a loss is 0 where the target is negative", np.array_equal(acts["losses"] == 0, batch[1] < 0)),
        (f"{name}: in float32 close to float64",
         np.linalg.norm(acts["logits"] - double) < 1e-5 * np.linalg.norm(double)),
    ]
    if cfg.moe_layers:
        g = backward(p, acts, *batch, batch[1].size, cfg)
        idle = [(i, e) for i, l in enumerate(cfg.moe_layers) for e in np.flatnonzero(acts["blocks"][l]["counts"] == 0)]
        promises.append((f"{name}: experts without rows, and only they, have no gradient",
                         idle and all(np.any(g[key][i, e]) == ((i, e) not in idle) for key in
                                      ("expert_gate_up", "expert_down") for i, e in np.ndindex(g[key].shape[:2]))))
    return promises


def promises():
    """What must hold before a golden file is written, as (promise, kept) pairs."""
    out = count_promises() + config_promises() + file_promises() + window_promises() + unseen_promises()
    out += router_promises() + balance_promises() + reach_promises()
    for name, run in qwen.RUNS.items():
        out += run_promises(name, run) + slope_promises(name, run)
    out += slope_promises("qwen_dense, tied, biases, windows", qwen.dense_run, tie_word_embeddings=True, qkv_bias=True,
                          o_bias=True, windows=(2, 5))
    for k in (1, 2, 5):
        out += slope_promises(f"qwen_moe, k {k}, scores as weights", qwen.moe_run, num_experts_per_tok=k,
                              norm_topk_prob=False, router_aux_loss_coef=0.3)
    return out + slope_promises("qwen_moe, experts everywhere, no balance", qwen.moe_run, moe_layers=(0, 1, 2),
                                router_aux_loss_coef=0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Adapters.
# ---------------------------------------------------------------------------------------------------------------------
def chain(start, a, b):
    """start + a . b, one fused multiply-add after the other"""
    for x, y in zip(a, b):
        start = exact.madd(x, y, start)
    return start


def order_promises():
    """Every number of a linear layer with an adapter, as the text of lora.py says, one element at a time"""
    rng, N, n_in, n_out, r, s = np.random.default_rng(6), 5, 7, 4, 3, F4(1.7)
    x, w, b, A, B, dy, weight = (rng.normal(size=shape).astype(F4) for shape in (
        (N, n_in), (n_out, n_in), n_out, (r, n_in), (n_out, r), (N, n_out), (N, 1)))
    a, zero = Adapter("", slice(0, n_out), A, B, 1.7), F4(0)
    u = [[s * chain(zero, x[n], A[j]) for j in range(r)] for n in range(N)]
    du = [[s * chain(zero, dy[n], B[:, j]) for j in range(r)] for n in range(N)]
    y = [[chain(chain(b[o], x[n], w[o]), u[n], B[o]) for o in range(n_out)] for n in range(N)]
    dx = [[chain(chain(zero, dy[n], w[:, i]), du[n], A[:, i]) for i in range(n_in)] for n in range(N)]
    dA = [[chain(zero, np.array(du)[:, j], weight[:, 0] * x[:, i]) for i in range(n_in)] for j in range(r)]
    dB = [[chain(zero, dy[:, o], weight[:, 0] * np.array(u)[:, j]) for j in range(r)] for o in range(n_out)]
    found = adapter_forward(linear_forward(x, w, b), x, a), *adapter_backward(
        back_through(np.zeros_like(x), dy, w), dy, x, a, None, weight)
    merged = lora.merged_weight(w, a)
    expected = [[w[o, i] + s * chain(zero, B[o], A[:, i]) for i in range(n_in)] for o in range(n_out)]
    return [(f"adapter: {name} in the order of the text", same_bits(one, np.array(other, F4)))
            for name, one, other in zip(("y", "dx", "dA", "dB", "W"), (*found, merged), (y, dx, dA, dB, expected))]


def expert_form_promises(cfg, base, places):
    """Two matrices for each expert and projection mean what they mean one by one."""
    place = next(place for place in places if place.row == "expert_gate_up")
    up = replace(lora.cut_places(place)[1], rank=2, scale=0.5)
    p = lora.draw_adapter(cfg, [up], 1.0)
    disk = trainer.to_disk(lora.model_of(base, [up], {}), p, cfg)
    A, B = (disk[f"{lora.PREFIX}model.layers.1.mlp.experts.3.up_proj.lora_{x}.weight"].astype(F8) for x in "AB")
    merged = lora.merge(cfg, wide(base), [up], wide(p))["expert_gate_up"][0, 3]
    gate, old = np.split(base["expert_gate_up"][0, 3].astype(F8), 2)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1}
    return [("adapter: one for each expert and projection",
             close(merged, np.concatenate([gate, old + 0.5 * B @ A]), 1e-13)),
            ("adapter: ... is found in a file", lora.places_of_file(cfg, config, disk) == [up])]


def layout_promises(cfg, places, p, disk):
    """PEFT's layout of experts, element by element; where gate_up_proj alone is its module's adapter"""
    key = lora.PREFIX + "model.layers.1.mlp.experts"
    adapter, = lora.adapters_of(places, p)["expert_gate_up", 1]
    A, B = adapter.A, adapter.B
    E, r, _ = A.shape
    file_A, file_B = (disk[f"{key}.base_layer.lora_{x}.weight"] for x in "AB")
    alone = lora.chosen_places(cfg, {"r": 3, "lora_alpha": 1, "target_parameters": ["experts.gate_up_proj"]})
    return [
        ("adapter: experts in a file", all(
            np.array_equal(file_A[e * r + j], A[e, j]) and np.array_equal(file_B[:, j * E + e], B[e, :, j])
            for e in range(E) for j in range(r))),
        ("adapter: gate_up_proj alone is not inside", [x.key for x in alone] == ["model.layers.1.mlp.experts"]),
    ]


def refusal_promises(cfg, disk):
    """What a reader of adapters must not pass over"""
    def refuses(tensors, **settings):
        try:
            lora.places_of_file(cfg, {**lora.LORA_MOE, **settings}, tensors)
            return False
        except SystemExit:
            return True
    head = {lora.PREFIX + f"lm_head.lora_{x}.weight": np.zeros((2, 2), F4) for x in "AB"}
    unpaired = {name: x for name, x in disk.items() if not name.endswith("0.self_attn.q_proj.lora_B.weight")}
    inert = {"megatron_core": "megatron.core", "loftq_config": {}, "peft_version": "0.21.2", "use_dora": False}
    return [
        ("adapter: inert settings are passed over", not refuses(disk, **inert)),
        ("adapter: other layers, an A without its B, DoRA, biases and other methods are refused",
         refuses({**disk, **head}) and refuses(unpaired) and
         all(refuses(disk, **x) for x in ({"use_dora": True}, {"bias": "all"}, {"peft_type": "IA3"},
                                          {"modules_to_save": ["lm_head"]}, {"fan_in_fan_out": True}))),
    ]


def choice_promises(cfg):
    def paths(**settings):
        chosen = lora.chosen_places(cfg, {"r": 2, "lora_alpha": 8, **settings})
        return [place.path.removeprefix("model.layers.") for place in chosen]
    attention = [f"{l}.self_attn.{x}_proj" for x in "qkvo" for l in (0, 1)]
    pattern = {"rank_pattern": {"layers.0.*": 4, "v_proj": 3}, "alpha_pattern": {"q_proj": 1}}
    chosen = lora.chosen_places(cfg, {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **pattern})
    both = lora.chosen_places(cfg, {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], **pattern})
    same = lora.chosen_places(cfg, {"r": 2, "lora_alpha": 8, "target_modules": ["gate_proj", "k_proj", "up_proj"]})
    rooted = lora.chosen_places(cfg, {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj"]})
    return [
        ("adapter: targets by their ends", paths(target_modules=["v_proj", "self_attn.k_proj", "roj"]) ==
         [f"{l}.self_attn.{x}_proj" for x in "kv" for l in (0, 1)]),
        ("adapter: targets by an expression", paths(target_modules=r".*\.0\.(self_attn\.q|mlp\.up)_proj") ==
         ["0.self_attn.q_proj", "0.mlp.up_proj"]),
        ("adapter: all-linear, without an MLP that PEFT takes for an expert",
         paths(target_modules="all-linear") == attention),
        ("adapter: the first pattern counts",
         [(x.rank, x.scale) for x in chosen] == [(4, 0.25), (2, 0.5), (4, 2), (3, 8 / 3)]),
        ("adapter: a tensor for each rank, by the first layer that has it, A before B",
         [(row.name[-1], row.shape[0], min(row.shape[1:])) for row in lora.adapter_table(cfg, both)] ==
         [("A", 1, 4), ("B", 1, 4), ("A", 1, 2), ("B", 1, 2)]),
        ("adapter: all layers of one rank are a tensor, those of gate stand before those of up",
         [(row.disk.split(".")[-3], row.name[-1], row.layers) for row in lora.adapter_table(cfg, same)] ==
         [(x, end, layers) for x, layers in (("k_proj", (0, 1)), ("gate_proj", (0,)), ("up_proj", (0,)))
          for end in "AB"]),
        ("adapter: rslora", rooted[0].scale == 4),
    ]


def adapter_run_promises(name, hf, settings, T):
    cfg, base, places, p, inputs, targets = lora.golden_run(hf, settings, T)
    cfg = replace(cfg, leaves=1)
    model, batch = lora.model_of(base, places, settings), (inputs[0, 0], targets[0, 0])
    disk = trainer.to_disk(model, p, cfg)
    back = trainer.from_disk(model, disk, cfg)
    start = {key: np.zeros_like(x) if key.endswith("lora_B") else x for key, x in p.items()}
    first = model.backward(start, model.forward(start, *batch, cfg), *batch, 5, cfg)
    wide_base, wide_p = wide(base), wide(p)
    wide_model = lora.model_of(wide_base, places, settings)
    acts, count = wide_model.forward(wide_p, *batch, cfg), int((batch[1] >= 0).sum())
    g = wide_model.backward(wide_p, acts, *batch, count, cfg)

    def loss(p):
        return numbers([wide_model.forward(p, *batch, cfg)], count, cfg)["loss"]
    return [
        (f"{name}: to disk and back", all(same_bits(np.ascontiguousarray(back[key]), x) for key, x in p.items())),
        (f"{name}: a file is found again", lora.places_of_file(cfg, settings, disk) == places),
        (f"{name}: with B = 0 the bits of the base",
         same_bits(logits_of(model, start, batch, cfg), forward(base, *batch, cfg)["logits"])),
        (f"{name}: with B = 0 only B has a gradient", all(first[key].any() == key.endswith("lora_B") for key in p)),
        (f"{name}: merged it computes the same", close(
            forward(lora.merge(cfg, wide_base, places, wide_p), *batch, cfg)["logits"], acts["logits"], 1e-11, 1e-12)),
        (f"{name}: gradients agree with differences of the loss", slopes_agree(wide_p, wide_p, loss, g)),
    ]


def lora_promises():
    """What must hold before the golden files of adapters are written."""
    cfg, base, places, p, _, _ = lora.golden_run(*lora.RUNS["qwen_lora_moe"])
    disk = trainer.to_disk(lora.model_of(base, places, lora.LORA_MOE), p, cfg)
    out = layout_promises(cfg, places, p, disk) + choice_promises(cfg) + expert_form_promises(cfg, base, places)
    out += refusal_promises(cfg, disk) + order_promises()
    for name, run in lora.RUNS.items():
        out += adapter_run_promises(name, *run)
    return out


def logits_of(model, p, batch, cfg):
    return model.forward(p, *batch, cfg)["logits"]


# ---------------------------------------------------------------------------------------------------------------------
# Against transformers and PEFT.
# ---------------------------------------------------------------------------------------------------------------------
SMALL = dict(vocab_size=37, hidden_size=24, intermediate_size=27, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4)
QWEN3 = dict(SMALL, model_type="qwen3", head_dim=10)
EXPERT = dict(QWEN3, model_type="qwen3_moe", num_experts=7, num_experts_per_tok=3, moe_intermediate_size=9,
              norm_topk_prob=True)
AUX = dict(output_router_logits=True, router_aux_loss_coef=0.3)
MODELS = {
    "Qwen2, tied": dict(SMALL, model_type="qwen2", tie_word_embeddings=True, rope_theta=1e6),
    "Qwen2, untied, a head for each of k and v": dict(SMALL, model_type="qwen2", num_key_value_heads=4),
    "Qwen2, window 5 from layer 1 on": dict(SMALL, model_type="qwen2", num_hidden_layers=3, use_sliding_window=True,
                                            sliding_window=5, max_window_layers=1, tie_word_embeddings=True),
    "Qwen3, tied": dict(QWEN3, tie_word_embeddings=True, rope_theta=1e6),
    "Qwen3, untied, one head of k and v, biases": dict(QWEN3, num_key_value_heads=1, attention_bias=True),
    "Qwen3, windows by layer": dict(QWEN3, use_sliding_window=True, sliding_window=3, num_hidden_layers=3,
                                    layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "Qwen3-MoE": EXPERT,
    "Qwen3-MoE, balance, fused": dict(EXPERT, **AUX),
    "Qwen3-MoE, scores as weights, balance": dict(EXPERT, norm_topk_prob=False, **AUX),
    "Qwen3-MoE, layer 0 without experts, balance": dict(EXPERT, mlp_only_layers=[0], num_hidden_layers=3, **AUX),
    "Qwen3-MoE, every second layer, window 5, tied": dict(EXPERT, decoder_sparse_step=2, num_hidden_layers=4,
                                                          use_sliding_window=True, sliding_window=5,
                                                          tie_word_embeddings=True, norm_topk_prob=False),
    "Qwen3-MoE, one of 7 experts, biases": dict(EXPERT, num_experts_per_tok=1, norm_topk_prob=False,
                                                attention_bias=True, **AUX),
    "Mistral, window 5": dict(SMALL, model_type="mistral", sliding_window=5),
    "Mistral, no window": dict(SMALL, model_type="mistral", sliding_window=None, head_dim=8),
    "Llama": dict(SMALL, model_type="llama", rope_theta=5e5),
    "the golden run without experts": qwen.DENSE,
    "the golden run with windows": qwen.WINDOW,
    "the golden run with experts": qwen.MOE,
}
LIMITS = {F8: (1e-9, 1e-9, 1e-9), F4: (1e-5, 1e-5, 1e-4)}  # of logits, loss, gradients


class Truth:
    """transformers and PEFT: their models in float64, without their casts to float32"""

    def __init__(self):
        import torch
        import transformers
        from transformers.utils import logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.manual_seed(1)
        self.torch, self.transformers = torch, transformers
        self.modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}")
                        for name in qwen.ARCHITECTURES]

    def load(self, folder):
        """The model of a folder; every tensor must be found where it looks for it."""
        model, report = self.transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.torch.float32, attn_implementation="eager", output_loading_info=True)
        wrong = [report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[key]]
        if wrong:
            raise SystemExit(f"{folder}: transformers does not find all tensors: {wrong}")
        if model.config.model_type == "qwen3_moe":
            model.set_experts_implementation("eager")
        return model.eval()

    @contextlib.contextmanager
    def in_double(self):
        from unittest import mock
        torch, softmax, histc = self.torch, self.torch.nn.functional.softmax, self.torch.histc

        def rms_norm(norm, x):
            return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))

        def rotary(module, x, position_ids):
            config = module.config
            HS = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            exponents = torch.arange(0, HS, 2, dtype=torch.float64) / HS
            angles = position_ids[..., None] / config.rope_parameters["rope_theta"] ** exponents
            return [turn(torch.cat((angles, angles), dim=-1)) for turn in (torch.cos, torch.sin)]
        with contextlib.ExitStack() as stack:
            def patch(owner, name, value):
                stack.enter_context(mock.patch.object(owner, name, value))
            patch(torch.Tensor, "float", lambda x: x)
            patch(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
            patch(torch, "histc", lambda x, **ranges: histc(x.to(torch.float32), **ranges).double())
            for module in self.modules:
                for name in dir(module):
                    if name.endswith(("RMSNorm", "RotaryEmbedding")):
                        patch(getattr(module, name), "forward", rms_norm if name.endswith("RMSNorm") else rotary)
            yield

    def probe(self, model, inputs, targets, tensors):
        """logits, loss and gradients; tensors(model): parameters by their names in our files"""
        model, torch = model.double(), self.torch
        model.zero_grad()
        labels = torch.from_numpy(np.where(targets < 0, -100, targets)).long()
        with self.in_double():
            out = model(input_ids=torch.from_numpy(inputs).long(), labels=labels, shift_labels=labels, use_cache=False)
        out.loss.backward()
        assert out.logits.dtype == torch.float64
        found = {"logits": out.logits, "loss": out.loss.reshape(1)}
        found.update({f"grad.{name}": x for name, x in tensors(model).items()})
        return {name: x.detach().numpy() for name, x in found.items()}


def gradients(model):
    """By their names on disk; the two tensors of a layer's experts have those of fused files."""
    return {name: p.grad for name, p in model.named_parameters()}


def adapter_gradients(model):
    return {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}


def our_probe(model, cfg, p, inputs, targets, dtype):
    """What trainer.write_probe writes, in float32 or float64"""
    p, count = {name: x.astype(dtype) for name, x in p.items()}, int((targets >= 0).sum())
    acts = model.forward(p, inputs, targets, cfg)
    g = trainer.to_disk(model, model.backward(p, acts, inputs, targets, count, cfg), cfg)
    return {"logits": acts["logits"], "loss": np.reshape(model.numbers([acts], count, cfg)["loss"], 1),
            **{f"grad.{name}": x for name, x in g.items()}}


def worst_errors(found, truth):
    """(logits, loss, gradients), of these the worst. A gradient that is 0 in truth is measured by all the others."""
    if found.keys() != truth.keys():
        raise SystemExit(f"names differ: {found.keys() ^ truth.keys()}")
    size = math.sqrt(sum((x * x).sum() for name, x in truth.items() if name.startswith("grad.")))
    worst = {"logits": 0.0, "loss": 0.0, "grad": 0.0}
    for name, x in truth.items():
        norm, kind = np.linalg.norm(x), name.partition(".")[0]
        error = np.linalg.norm(found[name].astype(F8).reshape(x.shape) - x) / (norm if norm > 1e-12 * size else size)
        worst[kind] = max(worst[kind], error)
    return tuple(worst.values())


def make_batch(V, T, seed):
    """inputs, targets (3, T): some targets are not counted"""
    rng = np.random.default_rng(seed)
    inputs, targets = rng.integers(V, size=(2, 3, T), dtype=np.int32)
    targets[rng.random((3, T)) < 0.2], targets[0, 0] = -100, V - 1
    return inputs, targets


def random_model(hf, T):
    cfg = read_config(hf, "case", 3, T)
    return cfg, trainer.draw_parameters(qwen.parameter_table(cfg), matrix_spread=1.0, vector_spread=0.5)


def in_memory(cfg):
    """As transformers has it in memory, where a layer's experts are one tensor"""
    return replace(cfg, fused_experts=bool(cfg.moe_layers))


class Worst:
    """Errors of many cases as promises: one for each kind of number and float"""

    def __init__(self, name):
        self.name, self.errors = name, {}

    def take(self, dtype, errors):
        before = self.errors.get(dtype, (0.0,) * 3)
        self.errors[dtype] = tuple(map(max, before, errors))

    def promises(self):
        return [(f"{self.name}: {kind} of {np.dtype(dtype)} within {error:.1e}", error <= limit)
                for dtype, errors in self.errors.items()
                for kind, error, limit in zip(("logits", "loss", "gradients"), errors, LIMITS[dtype])]


def model_promises(truth, name, hf):
    """Our folder read by transformers, theirs read by us, and all numbers, at several lengths"""
    worst, same = Worst(name), True
    for T in (1, 7, 16, 33):
        cfg, p = random_model(hf, T)
        inputs, targets = make_batch(cfg.vocab_size, T, T)
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = os.path.join(folder, "ours"), os.path.join(folder, "theirs")
            written = replace(cfg, fused_experts="fused" in name)
            qwen.save(ours, written, p)
            model = truth.load(ours)
            model.save_pretrained(theirs)
            again_cfg, again = qwen.load(theirs, 3, T)
            same &= again_cfg == written and all(same_bits(again[key], x) for key, x in p.items())
        expected = truth.probe(model, inputs, targets, gradients)
        for dtype in (F8, F4):
            worst.take(dtype, worst_errors(our_probe(qwen.MODEL, in_memory(cfg), p, inputs, targets, dtype), expected))
    return worst.promises() + [(f"{name}: files in both directions", same)]


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS = {  # the model, and settings of PEFT's LoraConfig
    "Qwen2, tied, a list, patterns": (MODELS["Qwen2, tied"], dict(
        target_modules=lora.ALL_SEVEN, r=4, lora_alpha=6, rank_pattern={"up_proj": 3, "layers.1.self_attn.q_proj": 7},
        alpha_pattern={"v_proj": 1, "layers.0.mlp.*": 9})),
    "Qwen3, an expression, rslora": (MODELS["Qwen3, tied"], dict(
        target_modules=r"model\.layers\.\d+\.(self_attn\.[qv]|mlp\.down)_proj", r=3, lora_alpha=4, use_rslora=True)),
    "Mistral, all-linear, window 5": (MODELS["Mistral, window 5"], dict(
        target_modules="all-linear", r=2, lora_alpha=3)),
    "Llama, one layer": (MODELS["Llama"], dict(target_modules=["o_proj", "up_proj"], layers_to_transform=[1], r=5,
                                               lora_alpha=5)),
    "Qwen3-MoE, both of the experts, attention": (MODELS["Qwen3-MoE, balance, fused"], dict(
        target_modules=["q_proj", "o_proj"], target_parameters=BOTH, r=3, lora_alpha=7)),
    "Qwen3-MoE, both, the other way round, patterns": (EXPERT, dict(
        target_modules=["k_proj"], target_parameters=BOTH[::-1], r=3, lora_alpha=7, use_rslora=True,
        rank_pattern={"mlp.experts.gate_up_proj": 5, "layers.1.mlp.experts.down_proj": 2},
        alpha_pattern={"experts.down_proj": 3})),
    "Qwen3-MoE, gate_up_proj alone": (EXPERT, dict(target_modules=["v_proj"], target_parameters=BOTH[:1], r=2,
                                                   lora_alpha=3)),
    "Qwen3-MoE, down_proj alone": (EXPERT, dict(target_modules=["v_proj"], target_parameters=BOTH[1:], r=2,
                                                lora_alpha=3)),
    "Qwen3-MoE, router": (MODELS["Qwen3-MoE, balance, fused"], dict(
        target_modules=["v_proj"], target_parameters=["mlp.gate.weight"], r=2, lora_alpha=3,
        rank_pattern={"mlp.gate.weight": 4})),
    "the golden run without experts": (lora.DENSE, lora.LORA_DENSE),
    "the golden run with experts": (lora.MOE, lora.LORA_MOE),
}


def adapter_promises(truth, name, hf, settings):
    """PEFT's adapter read by us and ours by PEFT; all numbers; the merged weights"""
    import peft
    worst, kept, merged, T = Worst(name), [], [], 16
    cfg, base = random_model(hf, T)
    inputs, targets = make_batch(cfg.vocab_size, T, 5)
    with tempfile.TemporaryDirectory() as parent:
        folder, theirs, ours = (os.path.join(parent, x) for x in ("base", "theirs", "ours"))
        qwen.save(folder, cfg, base)
        config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **copy.deepcopy(settings)})  # PEFT changes its patterns
        model = peft.get_peft_model(truth.load(folder), config)
        with truth.torch.no_grad():
            for p in filter(lambda p: p.requires_grad, model.parameters()):
                p.normal_(0.0, 0.3)
        model.save_pretrained(theirs)
        ours_model, places, p = lora.load(theirs, cfg, base)
        if settings["target_modules"] != "all-linear" and "layers_to_transform" not in settings:
            kept.append(lora.chosen_places(cfg, ours_model.metadata(cfg)["lora"]) == places)
        expected = truth.probe(model, inputs, targets, adapter_gradients)
        for dtype in (F8, F4):
            in_dtype = lora.model_of({key: x.astype(dtype) for key, x in base.items()}, places, {})
            worst.take(dtype, worst_errors(our_probe(in_dtype, cfg, p, inputs, targets, dtype), expected))
        lora.save(ours, ours_model, cfg, p)
        again = peft.PeftModel.from_pretrained(truth.load(folder), ours)
        state, had = (peft.get_peft_model_state_dict(x) for x in (again, model.float()))
        kept.append(state.keys() == had.keys() and all(truth.torch.equal(state[key], x) for key, x in had.items()))
        state = again.merge_and_unload().state_dict()
    ours = trainer.to_disk(qwen.MODEL, lora.merge(cfg, base, places, p), in_memory(cfg))
    for key, x in ours.items():
        merged.append((np.count_nonzero(state[key].numpy() != x), np.abs(state[key].numpy() - x).max()))
    n_other, largest = sum(n for n, _ in merged), max(difference for _, difference in merged)
    return worst.promises() + [
        (f"{name}: adapters in both directions, and the same targets", all(kept)),
        (f"{name}: merged weights, {n_other} elements differ, at most by {largest:.1e}",
         n_other == 0 if not cfg.moe_layers else largest < 1e-6)]


def old_adapter_promises(truth):
    """An adapter with two matrices for each expert and projection, as PEFT reads it"""
    import peft
    cfg, base = random_model(EXPERT, 7)
    inputs, targets = make_batch(cfg.vocab_size, 7, 5)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 3,
                "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    cut = [cut for place in lora.all_places(cfg) if place.n_experts for cut in lora.cut_places(place)]
    places = lora.with_ranks(lora.in_order(cfg, cut), settings)
    p = lora.draw_adapter(cfg, places, 1.0)
    with tempfile.TemporaryDirectory() as parent:
        folder, adapter = os.path.join(parent, "base"), os.path.join(parent, "adapter")
        qwen.save(folder, cfg, base)
        lora.save(adapter, lora.model_of(base, places, settings), cfg, p)
        kept = lora.load(adapter, cfg, base)[1] == places
        model = peft.PeftModel.from_pretrained(truth.load(folder), adapter, is_trainable=True)
        expected = truth.probe(model, inputs, targets, lambda model: {})["logits"]
    ours = lora.model_of(wide(base), places, settings)
    error = np.linalg.norm(logits_of(ours, wide(p), (inputs, targets), cfg) - expected) / np.linalg.norm(expected)
    return [(f"Qwen3-MoE, matrices of each expert: logits of float64 within {error:.1e}", error <= 1e-9 and kept)]


def compare():
    out = []
    try:
        truth = Truth()
        for name, hf in MODELS.items():
            out += model_promises(truth, name, hf)
        for name, (hf, settings) in ADAPTERS.items():
            out += adapter_promises(truth, name, hf, settings)
        out += old_adapter_promises(truth)
    except ImportError as error:
        print(f"skipped, with all that follows: {error}")
    return exact.report(out)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made here; nothing is downloaded
    sys.exit(compare())
