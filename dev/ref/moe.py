"""
A mixture-of-experts transformer in NumPy: the reference that train_moe must equal bit for bit. NumPy and the standard
library only.

Jiang et al. 2024, "Mixtral of Experts", arXiv:2401.04088, with any number of key/value heads: RMSNorm, causal attention
with RoPE and grouped heads, RMSNorm, and a router that sends each position to k of E experts, gated MLPs (SwiGLU).

    python dev/ref/moe.py [--out DIR]     check the reference, then write the golden files (default: dev/golden)
    python dev/ref/moe.py --check         check only (moe_checks.py)
    python dev/ref/moe.py --from DIR --probe IN --probe-out OUT
                                          logits, loss, cross entropy and gradients of one batch for a Hugging Face
                                          folder

The golden files have the layout that trainer.py describes, with the names of Hugging Face's Mixtral; w1, w3 and w2 of
an expert are gate, up and down. RoPE turns channel i of a head with channel i + HS/2, as Hugging Face's files have
them. With k 1 an expert's weight is its score itself: renormalised it would always be 1. Activations, R = N k rows of
the experts, sorted by (expert, n, j):
    layers      norm1, norm1_rstd, q and k (after RoPE), v, att_max, att_inv (B, H, T), attention, residual2, norm2,
                norm2_rstd, router_logits, scores (B, T, E), lse (B, T), experts (I32), weights (B, T, k),
                expert_gate_up (R, 2F), expert_hidden (R, F), expert_out (R, D), moe, residual3; statistics of the leaf:
                balance, z, counts (E, I32)
    outside     encoded, norm, norm_rstd, logits, probs, losses (cross entropy)
Numbers of an update: cross_entropy; balance and z (L), means over leaves; counts (I32, L, E), sums over leaves; loss =
cross_entropy + (aux_alpha * sum of balance + z_lambda * sum of z), sums over layers, without those whose factor is 0.

How a number comes about: float32, each + - * / and sqrt rounded once, every sum a chain with ascending index, products
in it by fused multiply-add, functions correctly rounded (exact.py). With float64 parameters everything is computed in
float64. In shapes N = B*T positions, D hidden_size, H and KV heads of HS channels, E experts, k of them chosen, F their
width.
"""
import sys
from dataclasses import dataclass

import numpy as np

import exact
import trainer
from exact import F4, chain_dot, chain_matmul, chain_sum, tree_sum
from ops import (attention_backward, attention_weights, back_through, classifier_backward, classifier_forward, combine,
                 embedding_backward, embedding_forward, expert_rows, linear_backward, linear_forward, merge_heads,
                 over_keys, rmsnorm_backward, rmsnorm_forward, rope, rope_backward, rope_tables, router_backward,
                 router_balance, router_forward, router_load, rows, share_heads, split_heads, swiglu_backward,
                 swiglu_forward, weight_gradient)
from trainer import Row


# ---------------------------------------------------------------------------------------------------------------------
# Config and the parameter table. Everything about a parameter is on its line.
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config(trainer.Run):
    vocab_size: int                    # V
    hidden_size: int                   # D
    num_hidden_layers: int             # L
    num_attention_heads: int           # H
    num_key_value_heads: int           # KV
    head_dim: int                      # HS, even
    intermediate_size: int             # F
    num_local_experts: int             # E
    num_experts_per_tok: int           # k
    rms_norm_eps: float = 1e-6
    rope_base: float = 10000.0
    rope_alpha: float = 1.0            # NTK: the slowest pair turns so many times slower
    tie_word_embeddings: bool = False  # the embedding is the head's matrix, too
    max_position_embeddings: int = 32768
    balance: str = "loss"              # or bias, or none: how the experts' load is levelled
    aux_alpha: float = 0.0             # weight of the loss that levels it; counts with balance loss
    bias_rate: float = 1e-3            # step of the biases that level it; with balance bias
    z_lambda: float = 0.0              # weight of the z-loss

    @property
    def rope_theta(self):
        """The base of RoPE, scaled by alpha; one pair (HS 2) does not depend on it."""
        HS = self.head_dim
        return float(self.rope_base) * float(self.rope_alpha) ** (HS / (HS - 2)) if HS > 2 else float(self.rope_base)

    @property
    def aux_weight(self):
        return self.aux_alpha if self.balance == "loss" else 0.0


def metadata(cfg):
    return {"model_type": "mixtral", **trainer.metadata(cfg), "rope_theta": cfg.rope_theta}


def parameter_table(cfg):
    """Kinds: embeddings and linear layers are decayed, gains are not, they start around 1; rope: a linear layer whose
    outputs are rotated; selection: no gradient reaches it. Order: the norm's."""
    V, D, L, F, E = (cfg.vocab_size, cfg.hidden_size, cfg.num_hidden_layers, cfg.intermediate_size,
                     cfg.num_local_experts)
    H, KV = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    layer = "model.layers.{}."
    moe = layer + "block_sparse_moe."
    gates = tuple(f"{e}.{w}.weight" for e in range(E) for w in ("w1", "w3"))
    downs = tuple(f"{e}.w2.weight" for e in range(E))
    table = [
        Row("embed_tokens",             (V, D),           "embedding", "model.embed_tokens.weight"),
        Row("input_layernorm",          (L, D),           "gain",      layer + "input_layernorm.weight"),
        Row("q_proj",                   (L, H, D),        "linear",    layer + "self_attn.q_proj.weight"),
        Row("k_proj",                   (L, KV, D),       "linear",    layer + "self_attn.k_proj.weight"),
        Row("v_proj",                   (L, KV, D),       "linear",    layer + "self_attn.v_proj.weight"),
        Row("o_proj",                   (L, D, H),        "linear",    layer + "self_attn.o_proj.weight"),
        Row("post_attention_layernorm", (L, D),           "gain",      layer + "post_attention_layernorm.weight"),
        Row("router",                   (L, E, D),        "linear",    moe + "gate.weight"),
        Row("gate_up",                  (L, E, 2 * F, D), "linear",    moe + "experts.", gates),  # gate's F rows, up's
        Row("down",                     (L, E, D, F),     "linear",    moe + "experts.", downs),
        Row("norm",                     (D,),             "gain",      "model.norm.weight"),
        Row("lm_head",                  (V, D),           "linear",    "lm_head.weight"),
        Row("selection_bias",           (L, E),           "selection", moe + "gate.e_score_correction_bias"),
    ]
    absent = ["lm_head"] if cfg.tie_word_embeddings else []
    absent += [] if cfg.balance == "bias" else ["selection_bias"]
    return [row for row in table if row.name not in absent]


# ---------------------------------------------------------------------------------------------------------------------
# A router's statistics; the experts: m (N, D) is what they read, gate_up (E, 2F, D), down (E, D, F) are their weights.
# ---------------------------------------------------------------------------------------------------------------------
def router_statistics(p, lse, experts):
    """counts (E); balance, E times the sum of f P, 1 when all experts have the same load; z, the mean of lse^2"""
    counts, P = router_load(p, experts)
    return counts, router_balance(counts, P, experts.shape), chain_dot(lse, lse) / p.dtype.type(len(p))


def experts_forward(m, experts, weights, gate_up, down):
    """gate and up (R, 2F), silu(gate) * up (R, F), output of each row (R, D), and moe (N, D): for each position a chain
    over its experts of weight * output"""
    pair, slot, ranges = expert_rows(experts, len(down))
    x = m[pair // experts.shape[1]]
    pre = linear_forward(x, gate_up, ranges=ranges)
    hidden = swiglu_forward(pre)
    out = linear_forward(hidden, down, ranges=ranges)
    return pre, hidden, out, combine(out, slot, weights)


def experts_backward(dout, m, experts, weights, pre, hidden, gate_up, down):
    """dweights (N, k), dx (N, k, D): what each pair adds to dm, dgate_up, ddown. An expert without rows gets zeros."""
    pair, slot, ranges = expert_rows(experts, len(down))
    token, w = pair // experts.shape[1], weights.reshape(-1)[pair][:, None]
    x, dy = m[token], dout[token]
    t = back_through(np.zeros_like(hidden), dy, down, ranges)  # gradient of hidden, but for the weight
    dweights = chain_dot(t, hidden)
    dpre = swiglu_backward(w * t, pre)
    ddown = weight_gradient(dy, w * hidden, ranges)
    dgate_up = weight_gradient(dpre, x, ranges)
    dx = back_through(np.zeros_like(x), dpre, gate_up, ranges)
    return dweights[slot], dx[slot], dgate_up, ddown


# ---------------------------------------------------------------------------------------------------------------------
# The model. One micro-batch, forward and backward.
# ---------------------------------------------------------------------------------------------------------------------
def layer_of(p, cfg, l):
    """The parameters of layer l by name"""
    return {row.name: p[row.name][l] for row in parameter_table(cfg) if "{}" in row.disk}


def heads_of(a, cfg):
    """q (B, H, T, HS), k and v (B, KV, T, HS) of a layer's activations"""
    H, KV = cfg.num_attention_heads, cfg.num_key_value_heads
    return split_heads(a["q"], H), split_heads(a["k"], KV), split_heads(a["v"], KV)


def attention_half(x, w, cfg, a):
    """x' = x + attention(norm(x)); adds to the activations a"""
    a["norm1"], a["norm1_rstd"] = rmsnorm_forward(x, w["input_layernorm"], cfg.rms_norm_eps)
    tables = rope_tables(x.shape[1], cfg.head_dim, cfg.rope_theta, x.dtype)
    for name, heads in (("q", cfg.num_attention_heads), ("k", cfg.num_key_value_heads)):
        a[name] = merge_heads(rope(split_heads(linear_forward(a["norm1"], w[name + "_proj"]), heads), *tables))
    a["v"] = linear_forward(a["norm1"], w["v_proj"])
    q, k, v = heads_of(a, cfg)
    _, att, a["att_max"], a["att_inv"] = attention_weights(q, k)
    a["attention"] = merge_heads(over_keys(att, share_heads(v, q)))
    a["residual2"] = x + linear_forward(a["attention"], w["o_proj"])


def attention_half_backward(dout, x, w, cfg, a):
    """The gradient of x and those of the parameters by name"""
    g = {}
    datty, g["o_proj"], _ = linear_backward(dout, a["attention"], w["o_proj"])
    q, k, v = heads_of(a, cfg)
    _, att, _, _ = attention_weights(q, k)
    dq, dk, dv = attention_backward(split_heads(datty, cfg.num_attention_heads), q, k, v, att)
    tables = rope_tables(x.shape[1], cfg.head_dim, cfg.rope_theta, x.dtype)
    dln1 = np.zeros_like(x)
    for name, d in (("q_proj", rope_backward(dq, *tables)), ("k_proj", rope_backward(dk, *tables)), ("v_proj", dv)):
        _, g[name], _ = linear_backward(merge_heads(d), a["norm1"], w[name])
        dln1 = chain_matmul(dln1, merge_heads(d), w[name])  # one chain over the outputs of q, then of k, then of v
    dx, g["input_layernorm"] = rmsnorm_backward(dln1, x, w["input_layernorm"], a["norm1_rstd"])
    return dout + dx, g


def expert_half(x, w, cfg, a):
    """x'' = x' + MoE(norm(x')); adds to the activations a"""
    k = cfg.num_experts_per_tok
    a["norm2"], a["norm2_rstd"] = rmsnorm_forward(x, w["post_attention_layernorm"], cfg.rms_norm_eps)
    a["router_logits"] = linear_forward(a["norm2"], w["router"])
    p, lse, experts, weights = router_forward(rows(a["router_logits"]), k, k > 1, w.get("selection_bias"))
    a["scores"], a["lse"] = p.reshape(a["router_logits"].shape), lse.reshape(x.shape[:2])
    a["experts"], a["weights"] = experts.reshape(*x.shape[:2], k), weights.reshape(*x.shape[:2], k)
    a["counts"], a["balance"], a["z"] = router_statistics(p, lse, experts)
    a["expert_gate_up"], a["expert_hidden"], a["expert_out"], moe = experts_forward(rows(a["norm2"]), experts, weights,
                                                                                    w["gate_up"], w["down"])
    a["moe"] = moe.reshape(x.shape)
    a["residual3"] = x + a["moe"]


def expert_half_backward(dout, x, w, cfg, a):
    """The gradient of x' and those of the parameters by name"""
    g, share = {}, x.dtype.type(1) / x.dtype.type(cfg.leaves)
    m, experts, weights = rows(a["norm2"]), rows(a["experts"]), rows(a["weights"])
    dweights, dpairs, g["gate_up"], g["down"] = experts_backward(rows(dout), m, experts, weights, a["expert_gate_up"],
                                                                 a["expert_hidden"], w["gate_up"], w["down"])
    dz = router_backward(dweights, rows(a["scores"]), a["lse"].reshape(-1), experts, weights, experts.shape[1] > 1,
                         a["counts"], x.dtype.type(cfg.aux_weight) * share, x.dtype.type(cfg.z_lambda) * share)
    dm, g["router"], _ = linear_backward(dz, m, w["router"])
    for j in range(experts.shape[1]):
        dm = dm + dpairs[:, j]
    dx, g["post_attention_layernorm"] = rmsnorm_backward(dm.reshape(x.shape), x, w["post_attention_layernorm"],
                                                         a["norm2_rstd"])
    return dout + dx, g


def forward(p, inputs, targets, cfg):
    """Every activation of one micro-batch; those of the layers in acts["blocks"][l]."""
    acts, blocks = {}, []
    residual = acts["encoded"] = embedding_forward(p["embed_tokens"], None, inputs)
    for l in range(cfg.num_hidden_layers):
        w, a = layer_of(p, cfg, l), {}
        attention_half(residual, w, cfg, a)
        expert_half(a["residual2"], w, cfg, a)
        residual = a["residual3"]
        blocks.append(a)
    acts["blocks"] = blocks
    acts["norm"], acts["norm_rstd"] = rmsnorm_forward(residual, p["norm"], cfg.rms_norm_eps)
    acts["logits"] = linear_forward(acts["norm"], p.get("lm_head", p["embed_tokens"]))
    acts["probs"], acts["losses"] = classifier_forward(acts["logits"], targets, cfg.vocab_size, exact)
    return acts


def backward(p, acts, inputs, targets, count, cfg):
    """Parameter gradients of one micro-batch: forward upside down. `count`: counted targets of the whole update."""
    g = {row.name: np.zeros_like(p[row.name]) for row in parameter_table(cfg)}
    head = "embed_tokens" if cfg.tie_word_embeddings else "lm_head"
    dlogits = classifier_backward(acts["probs"], targets, cfg.vocab_size, count)
    dlnf, g[head], _ = linear_backward(dlogits, acts["norm"], p[head])
    blocks = acts["blocks"]
    dx, g["norm"] = rmsnorm_backward(dlnf, blocks[-1]["residual3"], p["norm"], acts["norm_rstd"])
    dresidual = np.zeros_like(dx) + dx
    for l in reversed(range(cfg.num_hidden_layers)):
        w, a = layer_of(p, cfg, l), blocks[l]
        dresidual, expert_gradients = expert_half_backward(dresidual, a["residual2"], w, cfg, a)
        residual = blocks[l - 1]["residual3"] if l > 0 else acts["encoded"]
        dresidual, attention_gradients = attention_half_backward(dresidual, residual, w, cfg, a)
        for name, gradient in {**expert_gradients, **attention_gradients}.items():
            g[name][l] = gradient
    embedding_backward(g["embed_tokens"], None, dresidual, inputs)
    return g


def numbers(acts, count, cfg):
    """What an update tells: its losses, and statistics of each layer. acts: of the leaves"""
    def over_leaves(name):  # (L), or (L, E)
        return tree_sum([np.stack([a[name] for a in leaf["blocks"]]) for leaf in acts])
    cross_entropy = trainer.loss_of([leaf["losses"] for leaf in acts], count)
    scalar = cross_entropy.dtype.type
    balance, z = over_leaves("balance") / scalar(len(acts)), over_leaves("z") / scalar(len(acts))
    routers = scalar(0)
    for weight, statistic in ((cfg.aux_weight, balance), (cfg.z_lambda, z)):
        routers = routers + scalar(weight) * chain_sum(statistic) if weight else routers
    return {"loss": cross_entropy + routers, "cross_entropy": cross_entropy, "balance": balance, "z": z, "counts": over_leaves("counts")}


def level_biases(p, numbers, cfg):
    """Balance bias: an expert with less load than the mean gets a step up, others down; the mean bias stays 0."""
    if cfg.balance != "bias":
        return p
    E, counts = F4(cfg.num_local_experts), numbers["counts"].astype(F4)
    moved = p["selection_bias"] + F4(cfg.bias_rate) * np.sign((chain_sum(counts) / E)[:, None] - counts)
    return {**p, "selection_bias": moved - (chain_sum(moved) / E)[:, None]}


def read_config(hf, path, batch, seq_len):
    """The Config of a Hugging Face config.json; our own keys (rope_alpha, balance, ...) may stand in it."""
    turn = hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta", 1e6)}
    settings = [hf.get("hidden_act", "silu"), hf.get("sliding_window"), turn.get("rope_type", "default")]
    if settings != ["silu", None, "default"]:
        raise SystemExit(f"{path}: expected hidden_act silu, sliding_window null, rope_type default, found {settings}")
    known = {name: hf[name] for name in Config.__dataclass_fields__ if hf.get(name) is not None}
    if "rope_base" not in known:  # rope_theta is scaled already, or not at all
        known.update({"rope_base": turn["rope_theta"], "rope_alpha": 1.0})
    known.setdefault("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    known.setdefault("rms_norm_eps", 1e-5)  # as transformers has it
    return Config(**{**known, "batch": batch, "seq_len": seq_len})


MODEL = trainer.Model(parameter_table, forward, backward, read_config, metadata, numbers=numbers,
                      after_update=level_biases, losses=("loss", "cross_entropy"))


# ---------------------------------------------------------------------------------------------------------------------
# The golden runs. Together they have all ways of balancing, the z-loss, tied and separate heads, one, some and all
# key/value heads, k 1 to 3, ties, experts without rows, scaled RoPE, targets that are not counted, sizes that divide
# nothing.
# ---------------------------------------------------------------------------------------------------------------------
BASE = Config(vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
              head_dim=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
              aux_alpha=0.01, batch=2, seq_len=8, leaves=2, lr=3e-3, schedule="cosine", warmup=3, final_lr=0.1,
              beta2=0.95, clip=1.0)
ODD = Config(vocab_size=53, hidden_size=20, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
             head_dim=10, intermediate_size=15, num_local_experts=5, num_experts_per_tok=3, rms_norm_eps=1e-3,
             rope_alpha=8.0, tie_word_embeddings=True, max_position_embeddings=7, aux_alpha=0.02, z_lambda=0.01,
             batch=3, seq_len=7, leaves=3, lr=2e-3, schedule="wsd", clip=0.5)
BIAS = Config(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
              head_dim=6, intermediate_size=33, num_local_experts=6, num_experts_per_tok=1, rope_base=500.0,
              max_position_embeddings=20, balance="bias", bias_rate=0.01, batch=2, seq_len=9, leaves=2, lr=2e-3)


def base_run():
    p = trainer.draw_parameters(parameter_table(BASE), matrix_spread=0.5, vector_spread=0.25)
    p["router"][1, 1:] = p["router"][1, 1]  # ties: at the start nobody chooses the last expert
    return BASE, p, *trainer.draw_data(BASE)


def odd_run():
    inputs, targets = trainer.draw_data(ODD)
    trainer.ignore_targets(targets)
    targets[0, 0, 1] = -1  # a row without a counted target
    targets[4, 2] = -1     # a leaf without one
    return ODD, trainer.draw_parameters(parameter_table(ODD), matrix_spread=1.0, vector_spread=0.5), inputs, targets


def bias_run():
    p = trainer.draw_parameters(parameter_table(BIAS), matrix_spread=1.0, vector_spread=0.25)
    return BIAS, p, *trainer.draw_data(BIAS)


RUNS = {"moe_base": base_run, "moe_odd": odd_run, "moe_bias": bias_run}


def write_golden(folder):
    for name, run in RUNS.items():
        trainer.write_golden(folder, name, MODEL, *run())


if __name__ == "__main__":
    import moe_checks
    sys.exit(trainer.main(MODEL, "A mixture of experts", moe_checks.promises, write_golden,
                          ("--check", "check the reference and write nothing",
                           lambda: exact.report(moe_checks.promises()))))
