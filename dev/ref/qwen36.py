"""
Qwen3.6 in NumPy (Hugging Face's qwen3_5_moe): the reference that the trainer must equal bit for bit. NumPy and the
standard library only.

Layers of two kinds on a residual stream, three of four with a gated delta rule (gated_delta.py), every fourth with
gated attention, each followed by a mixture of experts of which one, the shared one, sees every position. Behind the
last norm there may be a module that predicts the token after the next (MTP). Qwen Team 2025, "Qwen3-Next"; Yang et al.
2024, arXiv:2412.06464 (delta rule); Qiu et al. 2025, arXiv:2505.06708 (output gate); Gloeckle et al. 2024,
arXiv:2404.19737 and DeepSeek-AI 2024, arXiv:2412.19437 (MTP).

    python dev/ref/qwen36.py [--out DIR]   check the reference, then write the golden files (default: dev/golden)
    python dev/ref/qwen36.py --check       check only (qwen36_checks.py, which by itself compares with transformers)
    python dev/ref/qwen36.py --from DIR --probe IN --probe-out OUT
                                           logits, loss and gradients of one batch for a Hugging Face folder

The golden files have the layout that trainer.py describes. Activations, with H and KV heads of HS channels in full
layers, Hk and Hv heads of dk and dv channels in linear ones, R = N k rows of the experts, sorted by (expert, n, j);
what only some layers have is stacked over those, ascending:
    layers      norm1, norm1_rstd, residual2, norm2, norm2_rstd, router_logits, scores (B, T, E), experts (I32), weights
                (B, T, k), expert_gate_up (R, 2F), expert_hidden (R, F), expert_out (R, D), shared_logit (B, T, 1),
                shared_gate_up (B, T, 2Fs), shared_hidden, shared_out, moe, residual3; of the leaf counts (I32),
                mean_scores (E)
    linear      qkv (before the convolution), z, b, a, conv, unit_q, unit_k (after the l2norm, q scaled), q_r, k_r,
                delta_v, g, beta, o, o_rstd, o_norm (before the gate), gated, state (B, Hv, dk, dv) after the row
    full        q_proj (rows of a head: q, gate), k_proj, q_rstd, k_rstd, q and k (after RoPE), v, att_max, att_inv,
                attention (before the gate), gated_attention
    outside     encoded, norm, norm_rstd, logits, probs, losses; with MTP the same names behind mtp_, and mtp_joined
                (B, T, 2D), mtp_encoded (fc's output), mtp_embedding_rstd, mtp_hidden_rstd, mtp_next (I32)
Numbers of an update: loss, cross_entropy, balance, counts as in qwen.py; mtp_loss.

How a number comes about: as in qwen.py and gated_delta.py. Where more than one order would do:
    zero-centred norm   gain = 1 + w, rounded once; then rmsnorm. Of all norms but that of the delta rule's output
    gated norm          rmsnorm of rows (position, head), gain w; times silu(z)
    l2norm              x r, r = 1 / sqrt(sum of squares + 1e-6); q's times 1 / sqrt(dk)
    output gate         attention times sigmoid(gate); dgate = (dout * attention) * (s * (1 - s))
    dnorm1              linear: one chain over the outputs of in_proj_qkv, z, b, a; full: q_proj (as its rows lie), k, v
    shared expert       the last term of the chain over a position's experts, with the weight s = sigmoid of its gate;
                        in backward as an expert with that weight; dlogit = ds * (s * (1 - s)), ds = chain over f of
                        (dout Wd) * hidden
    dnorm2              chain over the router's outputs, on over the shared gate's one, on over the shared expert's gate
                        and up; rows of the position's experts are added to it, ascending
    mrope               pair i turns by (position on its axis) * frequency_i; of three axes pair i has height where i %
                        3 is 1 and i < 3 section[1], width where it is 2 and i < 3 section[2], else time
    MTP                 T positions as in the trunk. Next token of i: inputs[i + 1], of the last one inputs[i]; where an
                        image stands there, its row, whose gradient is the trunk's plus this one's. Target
                        of i: targets[i + 1]; not counted at the last position and where a document begins at i + 1 or
                        i + 2. fc is one chain over embedding's D inputs, then hidden's. mtp_loss is the mean over its
                        own counted targets; dloss = mtp_weight * (1 / count)
    loss                cross entropy + (mtp_weight * mtp_loss + the balance of the routers)
    final norm          its dout is what the head gives, then what MTP's norm gives is added
    head's gradient     one chain over the positions of the trunk, on over those of MTP
    embedding           (tied: those chains;) MTP's positions ascending are added, then the trunk's
"""
import json
import os
import sys
from collections import namedtuple
from dataclasses import dataclass, replace

import numpy as np

import exact
import trainer
from exact import F4, chain_dot, chain_matmul, chain_sum, madd, tree_sum
from gated_delta import (delta_backward, delta_forward, gates_backward, gates_forward, pieces, query_scale,
                         unit_backward, unit_forward)
from mamba import conv_backward, conv_forward, gate_backward
from ops import (attention_backward, attention_weights, back_through, classifier_backward, classifier_forward, combine,
                 embedding_backward, embedding_forward, expert_rows, linear_forward, over_keys, rmsnorm_backward,
                 rmsnorm_forward, rope, rope_backward, rope_frequencies, router_backward, router_forward, router_load, rows, share_heads,
                 sigmoid, silu, silu_slope, swiglu_backward, swiglu_forward, weight_gradient)
from qwen import balance_factor, balance_of, mean_load, need
from trainer import Row


# ---------------------------------------------------------------------------------------------------------------------
# Config, from a config.json and back.
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config(trainer.Run):
    vocab_size: int                        # V
    hidden_size: int                       # D
    num_hidden_layers: int                 # L
    num_attention_heads: int               # H
    num_key_value_heads: int               # KV
    head_dim: int                          # HS
    linear_num_key_heads: int              # Hk
    linear_num_value_heads: int            # Hv
    linear_key_head_dim: int               # dk
    linear_value_head_dim: int             # dv
    linear_conv_kernel_dim: int            # K
    num_experts: int                       # E
    num_experts_per_tok: int               # k
    moe_intermediate_size: int             # F
    shared_expert_intermediate_size: int   # Fs
    rms_norm_eps: float
    rope_theta: float
    rotary: int                            # channels of a head that turn
    sections: tuple                        # mrope_section
    tie_word_embeddings: bool
    max_position_embeddings: int
    linear: tuple                          # numbers of the layers with the delta rule
    full: tuple                            # and of those with attention
    router_aux_loss_coef: float = 0.0      # 0 where config.json does not ask for it
    mtp: bool = False                      # is the MTP module trained? config.json then has our key mtp_weight
    mtp_weight: float = 0.0                # of its loss
    fused_experts: bool = True             # on disk the experts of a layer are one tensor
    prefix: str = "model."                 # of names on disk; with vision model.language_model.

    @property
    def moe_layers(self):
        return tuple(range(self.num_hidden_layers))

    @property
    def channels(self):
        """Those of q, k and v in a linear layer"""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return keys, keys, self.linear_num_value_heads * self.linear_value_head_dim


NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
          "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
          "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
          "shared_expert_intermediate_size", "max_position_embeddings")


def read_config(hf, path, batch, seq_len):
    """The Config of a Hugging Face config.json, of text alone or with vision"""
    text = hf.get("text_config", hf)
    if text.get("model_type") not in ("qwen3_5_moe_text", "qwen3_5_moe"):
        raise SystemExit(f"{path}: expected a model_type of qwen3_5_moe_text, found {text.get('model_type')}")
    sizes, turn = need(text, path, NEEDED), text.get("rope_parameters") or {}
    settings = [text.get("hidden_act", "silu"), turn.get("rope_type", "default"), text.get("attention_bias", False)]
    if settings != ["silu", "default", False]:
        raise SystemExit(f"{path}: expected hidden_act silu, rope_type default, attention_bias false, found {settings}")
    L, interval = sizes["num_hidden_layers"], text.get("full_attention_interval", 4)
    pattern = ["linear_attention" if (l + 1) % interval else "full_attention" for l in range(L)]
    kinds = text.get("layer_types") or pattern
    factor = turn.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    balance = text.get("router_aux_loss_coef", 0.001)
    return Config(**sizes, rms_norm_eps=text.get("rms_norm_eps", 1e-6),
                  rope_theta=float(turn.get("rope_theta", text.get("rope_theta", 1e4))),
                  rotary=int(sizes["head_dim"] * factor), sections=tuple(turn.get("mrope_section", (11, 11, 10))),
                  tie_word_embeddings=hf.get("tie_word_embeddings", False),
                  linear=tuple(l for l in range(L) if kinds[l] == "linear_attention"),
                  full=tuple(l for l in range(L) if kinds[l] == "full_attention"),
                  router_aux_loss_coef=balance if text.get("output_router_logits") else 0,
                  mtp="mtp_weight" in text, mtp_weight=text.get("mtp_weight", 0.0), batch=batch, seq_len=seq_len)


def config_json(cfg):
    """The inverse of read_config, of text alone"""
    out = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_act": "silu",
           "attention_bias": False, "dtype": "float32"}
    out.update({key: getattr(cfg, key) for key in NEEDED})
    out["layer_types"] = ["linear_attention" if l in cfg.linear else "full_attention" for l in cfg.moe_layers]
    out["rope_parameters"] = {"rope_type": "default", "rope_theta": cfg.rope_theta, "mrope_interleaved": True,
                              "partial_rotary_factor": cfg.rotary / cfg.head_dim, "mrope_section": list(cfg.sections)}
    out.update({"rms_norm_eps": cfg.rms_norm_eps, "tie_word_embeddings": cfg.tie_word_embeddings,
                "router_aux_loss_coef": float(cfg.router_aux_loss_coef),
                "output_router_logits": cfg.router_aux_loss_coef > 0})
    if cfg.mtp:
        out.update({"mtp_num_hidden_layers": 1, "mtp_weight": cfg.mtp_weight})
    return out


def metadata(cfg):
    run = trainer.metadata(cfg)
    return {**config_json(cfg), **{key: run[key] for key in trainer.Run.__dataclass_fields__}}


# ---------------------------------------------------------------------------------------------------------------------
# The parameter table. Everything about a parameter is on its line.
# ---------------------------------------------------------------------------------------------------------------------
def parameter_table(cfg):
    """Kinds: embeddings and linear layers, convolutions too, are decayed; gains start around 1, the rest around 0: a
    zero-centred norm's weight is what its gain is above 1."""
    V, D = cfg.vocab_size, cfg.hidden_size
    every, P = cfg.moe_layers, cfg.prefix
    linear, full = mixer_rows(cfg)
    moe = moe_rows(cfg)

    def of_layers(layers, lines):
        return [Row(name, (len(layers), *shape), kind, P + "layers.{}." + disk, parts, layers)
                for name, shape, kind, disk, parts in lines]
    table = [Row("embed_tokens", (V, D), "embedding", P + "embed_tokens.weight")]
    table += of_layers(every, moe[:1]) + of_layers(cfg.linear, linear) + of_layers(cfg.full, full)
    table += of_layers(every, moe[1:])
    table += [Row("norm", (D,), "zero", P + "norm.weight")]
    table += [] if cfg.tie_word_embeddings else [Row("lm_head", (V, D), "linear", "lm_head.weight")]
    if cfg.mtp:
        table += [Row("mtp_fc", (D, 2 * D), "linear", "mtp.fc.weight"),
                  Row("mtp_embedding_norm", (D,), "zero", "mtp.pre_fc_norm_embedding.weight"),
                  Row("mtp_hidden_norm", (D,), "zero", "mtp.pre_fc_norm_hidden.weight")]
        table += [Row("mtp_" + name, shape, kind, "mtp.layers.0." + disk, parts)
                  for name, shape, kind, disk, parts in moe[:1] + full + moe[1:]]
        table += [Row("mtp_norm", (D,), "zero", "mtp.norm.weight")]
    return [row for row in table if row.shape[0] > 0]


ONE = ("",)


def mixer_rows(cfg):
    """What linear layers have, and what full ones"""
    D, HS, H, KV = cfg.hidden_size, cfg.head_dim, cfg.num_attention_heads, cfg.num_key_value_heads
    Hv, dv, channels = cfg.linear_num_value_heads, cfg.linear_value_head_dim, sum(cfg.channels)
    K = cfg.linear_conv_kernel_dim
    linear = [
        ("in_proj_qkv", (channels, D), "linear", "linear_attn.in_proj_qkv.weight", ONE),
        ("in_proj_z",   (Hv * dv, D),  "linear", "linear_attn.in_proj_z.weight", ONE),
        ("in_proj_b",   (Hv, D),       "linear", "linear_attn.in_proj_b.weight", ONE),
        ("in_proj_a",   (Hv, D),       "linear", "linear_attn.in_proj_a.weight", ONE),
        ("conv1d",      (channels, K), "linear", "linear_attn.conv1d.weight", ONE),  # on disk (channels, 1, K)
        ("A_log",       (Hv,),         "zero",   "linear_attn.A_log", ONE),
        ("dt_bias",     (Hv,),         "gain",   "linear_attn.dt_bias", ONE),
        ("o_norm",      (dv,),         "gain",   "linear_attn.norm.weight", ONE),
        ("out_proj",    (D, Hv * dv),  "linear", "linear_attn.out_proj.weight", ONE),
    ]
    full = [
        ("q_proj", (2 * H * HS, D), "linear", "self_attn.q_proj.weight", ONE),  # rows of a head: q's HS, its gate's HS
        ("k_proj", (KV * HS, D),    "linear", "self_attn.k_proj.weight", ONE),
        ("v_proj", (KV * HS, D),    "linear", "self_attn.v_proj.weight", ONE),
        ("q_norm", (HS,),           "zero",   "self_attn.q_norm.weight", ONE),
        ("k_norm", (HS,),           "zero",   "self_attn.k_norm.weight", ONE),
        ("o_proj", (D, H * HS),     "linear", "self_attn.o_proj.weight", ONE),
    ]
    return linear, full


def moe_rows(cfg):
    """Both norms of a layer and its experts"""
    D, E, F, Fs = cfg.hidden_size, cfg.num_experts, cfg.moe_intermediate_size, cfg.shared_expert_intermediate_size
    both = ("gate_proj.weight", "up_proj.weight")
    gates = ("gate_up_proj",) if cfg.fused_experts else tuple(f"{e}.{part}" for e in range(E) for part in both)
    downs = ("down_proj",) if cfg.fused_experts else tuple(f"{e}.down_proj.weight" for e in range(E))
    return [
        ("input_layernorm",          (D,),          "zero",   "input_layernorm.weight", ONE),
        ("post_attention_layernorm", (D,),          "zero",   "post_attention_layernorm.weight", ONE),
        ("router",                   (E, D),        "linear", "mlp.gate.weight", ONE),
        ("expert_gate_up",           (E, 2 * F, D), "linear", "mlp.experts.", gates),
        ("expert_down",              (E, D, F),     "linear", "mlp.experts.", downs),
        ("shared_expert_gate",       (1, D),        "linear", "mlp.shared_expert_gate.weight", ONE),
        ("shared_gate_up",           (2 * Fs, D),   "linear", "mlp.shared_expert.", both),
        ("shared_down",              (D, Fs),       "linear", "mlp.shared_expert.down_proj.weight", ONE),
    ]


def to_file(row, x, cfg):
    return x[:, None, :] if row.disk.endswith("conv1d.weight") else x


def from_file(row, x, cfg):
    return x.reshape(x.shape[0], -1) if row.disk.endswith("conv1d.weight") else x


def fit(cfg, tensors):
    """What a file's names say: the prefix, and whether experts are fused"""
    prefix = "model.language_model." if any(x.startswith("model.language_model.") for x in tensors) else "model."
    fused = not any(".mlp.experts.0." in name for name in tensors)
    return replace(cfg, prefix=prefix, fused_experts=fused), tensors


# ---------------------------------------------------------------------------------------------------------------------
# Zero-centred norms, and RoPE with positions on three axes.
# ---------------------------------------------------------------------------------------------------------------------
def zero_norm(x, w, eps):
    return rmsnorm_forward(x, x.dtype.type(1) + w, eps)


def zero_norm_backward(dout, x, w, rstd):
    return rmsnorm_backward(dout, x, x.dtype.type(1) + w, rstd)


def axes_of(cfg):
    """0, 1 or 2 for each pair: does it turn with time, height or width?"""
    i = np.arange(cfg.rotary // 2)
    height, width = (((i % 3 == axis) & (i < 3 * cfg.sections[axis])) for axis in (1, 2))
    return np.where(height, 1, np.where(width, 2, 0))


def text_positions(starts, shape):
    """(3, B, T): within the document, on all axes alike"""
    out = np.zeros(shape, int)
    for b in range(shape[0]):
        for first, end in pieces(None if starts is None else starts[b], shape[1]):
            out[b, first:end] = np.arange(end - first)
    return np.stack([out] * 3)


def mrope_tables(positions, cfg, dtype):
    """cos, sin (B, 1, T, rotary / 2) of positions (3, B, T); steps round as in ops.rope_tables"""
    frequency = rope_frequencies(cfg.rotary, cfg.rope_theta, dtype)
    angle = np.moveaxis(positions[axes_of(cfg)], 0, -1).astype(dtype) * frequency
    return exact.cos(angle)[:, None], exact.sin(angle)[:, None]


def turn(x, tables, function=rope):
    """RoPE of the first channels of x (B, T, heads, HS), as many as the tables turn"""
    n = 2 * tables[0].shape[-1]
    turned = function(x[..., :n].swapaxes(1, 2), *tables).swapaxes(1, 2)
    return np.concatenate([turned, x[..., n:]], axis=-1)


# ---------------------------------------------------------------------------------------------------------------------
# One layer.
# ---------------------------------------------------------------------------------------------------------------------
class Layer:
    """Parameters w by name, and in backward their gradients g"""

    def __init__(self, w):
        self.w, self.g = w, {}

    def linear(self, name, x, ranges=None):
        return linear_forward(x, self.w[name], self.w.get(name + "_bias"), ranges)

    def linear_backward(self, name, dout, x, dx=None, ranges=None, weight=None):
        """The gradient of x, in chains that begin at dx, or at 0. weight: of a row in what comes after; dout and the
        gradient of x are without it."""
        self.g[name] = weight_gradient(dout, x if weight is None else weight * x, ranges)
        if name + "_bias" in self.w:
            self.g[name + "_bias"] = chain_sum(rows(dout), axis=0)
        return back_through(np.zeros_like(x) if dx is None else dx, dout, self.w[name], ranges)


class Where:
    """What all layers share of a batch: documents, tables of RoPE"""

    def __init__(self, cfg, shape, dtype, starts, positions):
        self.starts, self.shape = starts, shape
        self.tables = mrope_tables(text_positions(starts, shape) if positions is None else positions, cfg, dtype)

    def segments(self):
        """(rows, positions) of which no position sees another: the whole batch, or documents one by one"""
        B, T = self.shape
        if self.starts is None:
            return [(slice(0, B), slice(0, T))]
        return [(slice(b, b + 1), slice(*piece)) for b in range(B) for piece in pieces(self.starts[b], T)]


def linear_half(x, layer, cfg, a, where):
    """x' = x + delta rule(norm(x)); adds to the activations a"""
    w, (B, T) = layer.w, x.shape[:2]
    a["norm1"], a["norm1_rstd"] = zero_norm(x, w["input_layernorm"], cfg.rms_norm_eps)
    for name in ("qkv", "z", "b", "a"):
        a[name] = layer.linear("in_proj_" + name, a["norm1"])
    a["conv"] = conv_forward(a["qkv"], w["conv1d"], None, None, where.starts)
    q, k, v = split_channels(silu(a["conv"]), cfg)
    a["unit_q"], a["q_r"] = unit_forward(q, query_scale(cfg.linear_key_head_dim, x.dtype))
    a["unit_k"], a["k_r"] = unit_forward(k)
    a["delta_v"] = v
    a["g"], a["beta"] = gates_forward(a["a"], a["b"], w["A_log"], w["dt_bias"])
    a["o"], a["state"] = delta_forward(a["unit_q"], a["unit_k"], v, a["g"], a["beta"], None, where.starts)
    a["o_norm"], a["o_rstd"] = rmsnorm_forward(a["o"], w["o_norm"], cfg.rms_norm_eps)
    a["gated"] = a["o_norm"].reshape(B, T, -1) * silu(a["z"])
    a["residual2"] = x + layer.linear("out_proj", a["gated"])


def split_channels(x, cfg):
    """q, k (B, T, Hk, dk), v (B, T, Hv, dv)"""
    keys, _, _ = cfg.channels
    q, k, v = np.split(x, [keys, 2 * keys], axis=-1)
    return (*(y.reshape(*x.shape[:2], cfg.linear_num_key_heads, -1) for y in (q, k)),
            v.reshape(*x.shape[:2], cfg.linear_num_value_heads, -1))


def linear_half_backward(dout, x, layer, cfg, a, where):
    """The gradient of x; those of the parameters go into layer.g"""
    w, g, flat = layer.w, layer.g, x.shape[:2] + (-1,)
    dgated = layer.linear_backward("out_proj", dout, a["gated"])
    dnormed, dz = gate_backward(dgated, a["o_norm"].reshape(flat), a["z"])
    do, g["o_norm"] = rmsnorm_backward(dnormed.reshape(a["o"].shape), a["o"], w["o_norm"], a["o_rstd"])
    dq, dk, dv, dg, dbeta, _ = delta_backward(np.zeros_like(do) + do, a["unit_q"], a["unit_k"], a["delta_v"], a["g"],
                                              a["beta"], None, where.starts)
    q, k, _ = split_channels(silu(a["conv"]), cfg)
    dq = unit_backward(dq, q, a["q_r"], query_scale(cfg.linear_key_head_dim, x.dtype))
    dk = unit_backward(dk, k, a["k_r"])
    da, db, g["A_log"], g["dt_bias"] = gates_backward(dg, dbeta, a["a"], a["g"], a["beta"], w["A_log"], w["dt_bias"])
    dconv = np.concatenate([y.reshape(flat) for y in (dq, dk, dv)], axis=-1) * silu_slope(a["conv"])
    dqkv, g["conv1d"], _ = conv_backward(dconv, a["qkv"], w["conv1d"], None, where.starts)
    dnorm1 = None
    for name, d in (("qkv", dqkv), ("z", dz), ("b", db), ("a", da)):
        dnorm1 = layer.linear_backward("in_proj_" + name, d, a["norm1"], dnorm1)
    dx, g["input_layernorm"] = zero_norm_backward(dnorm1, x, w["input_layernorm"], a["norm1_rstd"])
    return dout + dx


def split_gate(x, cfg):
    """q (B, T, H, HS) and its gate (B, T, H * HS) of q_proj's output"""
    B, T = x.shape[:2]
    x = x.reshape(B, T, cfg.num_attention_heads, 2, cfg.head_dim)
    return x[:, :, :, 0], x[:, :, :, 1].reshape(B, T, -1)


def heads_of(x, cfg):
    """(B, T, heads * HS) -> (B, T, heads, HS)"""
    return x.reshape(*x.shape[:2], -1, cfg.head_dim)


def full_half(x, layer, cfg, a, where):
    """x' = x + attention(norm(x)); adds to the activations a"""
    w, eps, (B, T), H = layer.w, cfg.rms_norm_eps, x.shape[:2], cfg.num_attention_heads
    a["norm1"], a["norm1_rstd"] = zero_norm(x, w["input_layernorm"], eps)
    for name in ("q_proj", "k_proj"):
        a[name] = layer.linear(name, a["norm1"])
    a["v"] = layer.linear("v_proj", a["norm1"])
    q, gate = split_gate(a["q_proj"], cfg)
    q, a["q_rstd"] = zero_norm(q, w["q_norm"], eps)
    k, a["k_rstd"] = zero_norm(heads_of(a["k_proj"], cfg), w["k_norm"], eps)
    a["q"], a["k"] = (turn(y, where.tables).reshape(B, T, -1) for y in (q, k))
    a["att_max"], a["att_inv"] = (np.zeros((B, H, T), x.dtype) for _ in range(2))
    a["attention"] = np.zeros_like(gate)
    for b, t in where.segments():
        q, k, v = segment_heads(a, cfg, b, t)
        _, att, a["att_max"][b, :, t], a["att_inv"][b, :, t] = attention_weights(q, k)
        out = over_keys(att, share_heads(v, q)).swapaxes(1, 2)
        a["attention"][b, t] = out.reshape(*out.shape[:2], -1)
    a["gated_attention"] = a["attention"] * sigmoid(gate)
    a["residual2"] = x + layer.linear("o_proj", a["gated_attention"])


def segment_heads(a, cfg, b, t):
    """q (B, H, T, HS), k and v (B, KV, T, HS) of a segment"""
    return [heads_of(a[name][b, t], cfg).swapaxes(1, 2) for name in "qkv"]


def full_half_backward(dout, x, layer, cfg, a, where):
    w, g, one = layer.w, layer.g, x.dtype.type(1)
    dgated = layer.linear_backward("o_proj", dout, a["gated_attention"])
    q_before, gate = split_gate(a["q_proj"], cfg)
    s = sigmoid(gate)
    dgate, datt = (dgated * a["attention"]) * (s * (one - s)), dgated * s
    dq, dk, dv = (np.zeros_like(a[name]) for name in "qkv")
    for b, t in where.segments():
        q, k, v = segment_heads(a, cfg, b, t)
        _, att, _, _ = attention_weights(q, k)
        gradients = attention_backward(heads_of(datt[b, t], cfg).swapaxes(1, 2), q, k, v, att)
        for whole, part in zip((dq, dk, dv), gradients):
            whole[b, t] = part.swapaxes(1, 2).reshape(whole[b, t].shape)
    dq, dk = (turn(heads_of(d, cfg), where.tables, rope_backward) for d in (dq, dk))
    dq, g["q_norm"] = zero_norm_backward(dq, q_before, w["q_norm"], a["q_rstd"])
    dk, g["k_norm"] = zero_norm_backward(dk, heads_of(a["k_proj"], cfg), w["k_norm"], a["k_rstd"])
    dq = np.stack([np.zeros_like(dq) + dq, heads_of(dgate, cfg)], axis=3)
    dnorm1 = layer.linear_backward("q_proj", dq.reshape(a["q_proj"].shape), a["norm1"])
    dnorm1 = layer.linear_backward("k_proj", (np.zeros_like(dk) + dk).reshape(a["k"].shape), a["norm1"], dnorm1)
    dnorm1 = layer.linear_backward("v_proj", dv, a["norm1"], dnorm1)
    dx, g["input_layernorm"] = zero_norm_backward(dnorm1, x, w["input_layernorm"], a["norm1_rstd"])
    return dout + dx


def expert_half(x, layer, cfg, a):
    """x'' = x' + experts(norm(x')); adds to the activations a"""
    k, positions = cfg.num_experts_per_tok, x.shape[:2]
    a["norm2"], a["norm2_rstd"] = zero_norm(x, layer.w["post_attention_layernorm"], cfg.rms_norm_eps)
    a["router_logits"] = layer.linear("router", a["norm2"])
    p, _, experts, weights = router_forward(rows(a["router_logits"]), k, True)
    a["scores"] = p.reshape(a["router_logits"].shape)
    a["experts"], a["weights"] = experts.reshape(*positions, k), weights.reshape(*positions, k)
    a["counts"], a["mean_scores"] = router_load(p, experts)
    pair, slot, ranges = expert_rows(experts, cfg.num_experts)
    a["expert_gate_up"] = layer.linear("expert_gate_up", rows(a["norm2"])[pair // k], ranges)
    a["expert_hidden"] = swiglu_forward(a["expert_gate_up"])
    a["expert_out"] = layer.linear("expert_down", a["expert_hidden"], ranges)
    a["shared_logit"] = layer.linear("shared_expert_gate", a["norm2"])
    a["shared_gate_up"] = layer.linear("shared_gate_up", a["norm2"])
    a["shared_hidden"] = swiglu_forward(a["shared_gate_up"])
    a["shared_out"] = layer.linear("shared_down", a["shared_hidden"])
    routed = combine(a["expert_out"], slot, weights).reshape(x.shape)
    a["moe"] = madd(sigmoid(a["shared_logit"]), a["shared_out"], routed)
    a["residual3"] = x + a["moe"]


def expert_half_backward(dout, x, layer, cfg, a, counts):
    """counts (E): means over the layers; None: this router has no balance in the loss"""
    k, scalar = cfg.num_experts_per_tok, x.dtype.type
    norm2, experts, weights = rows(a["norm2"]), rows(a["experts"]), rows(a["weights"])
    pair, slot, ranges = expert_rows(experts, cfg.num_experts)
    token, weight = pair // k, weights.reshape(-1)[pair][:, None]
    dhidden = layer.linear_backward("expert_down", rows(dout)[token], a["expert_hidden"], None, ranges, weight)
    dweights = chain_dot(dhidden, a["expert_hidden"])[slot]
    dpre = swiglu_backward(weight * dhidden, a["expert_gate_up"])
    drows = layer.linear_backward("expert_gate_up", dpre, norm2[token], None, ranges)
    balance_weight = 0
    if counts is not None:
        balance_weight = balance_factor(cfg, scalar) / scalar(cfg.num_hidden_layers) * (scalar(1) / scalar(cfg.leaves))
    dz = router_backward(dweights, rows(a["scores"]), None, experts, weights, True, counts, balance_weight, 0)
    dnorm2 = layer.linear_backward("router", dz, norm2)
    s = sigmoid(a["shared_logit"])
    dhidden = layer.linear_backward("shared_down", dout, a["shared_hidden"], None, None, s)
    ds = chain_dot(dhidden, a["shared_hidden"])[..., None]
    dnorm2 = layer.linear_backward("shared_expert_gate", rows(ds * (s * (scalar(1) - s))), norm2, dnorm2)
    dpre = swiglu_backward(s * dhidden, a["shared_gate_up"])
    dnorm2 = layer.linear_backward("shared_gate_up", rows(dpre), norm2, dnorm2)
    for j in range(k):
        dnorm2 = dnorm2 + drows[slot[:, j]]
    dx, layer.g["post_attention_layernorm"] = zero_norm_backward(
        dnorm2.reshape(x.shape), x, layer.w["post_attention_layernorm"], a["norm2_rstd"])
    return dout + dx


# ---------------------------------------------------------------------------------------------------------------------
# The module that predicts the token after the next.
# ---------------------------------------------------------------------------------------------------------------------
def mtp_batch(inputs, targets, starts):
    """The next token of each position, and its target, the token after that"""
    T = inputs.shape[1]
    next_token = next_of(inputs)
    target = np.concatenate([targets[:, 1:], np.full_like(targets[:, :1], -1)], axis=1)
    if starts is not None:
        for ahead in (1, 2):
            begins = np.zeros(inputs.shape, bool)
            begins[:, :max(T - ahead, 0)] = starts[:, ahead:] != 0
            target = np.where(begins, -1, target)
    return next_token, np.where(target < 0, -1, target).astype(np.int32)


def mtp_layer(p):
    """The parameters of its layer, under the names that layers of the trunk have"""
    own = ("mtp_fc", "mtp_embedding_norm", "mtp_hidden_norm", "mtp_norm")
    return Layer({name[4:]: x for name, x in p.items() if name.startswith("mtp_") and name not in own})


def next_of(x):
    """What stands at the next position (B, T, ...); of the last one its own"""
    return np.concatenate([x[:, 1:], x[:, -1:]], axis=1)


def mtp_forward(p, hidden, encoded, inputs, targets, cfg, where):
    """Activations; hidden is the trunk's output behind its last norm, encoded what its first layer reads"""
    a, eps = {}, cfg.rms_norm_eps
    a["next"], target = mtp_batch(inputs, targets, where.starts)
    e, a["embedding_rstd"] = zero_norm(next_of(encoded), p["mtp_embedding_norm"], eps)
    h, a["hidden_rstd"] = zero_norm(hidden, p["mtp_hidden_norm"], eps)
    a["joined"] = np.concatenate([e, h], axis=-1)
    a["encoded"] = linear_forward(a["joined"], p["mtp_fc"])
    layer = mtp_layer(p)
    full_half(a["encoded"], layer, cfg, a, where)
    expert_half(a["residual2"], layer, cfg, a)
    a["norm"], a["norm_rstd"] = zero_norm(a["residual3"], p["mtp_norm"], eps)
    a["logits"] = linear_forward(a["norm"], p.get("lm_head", p["embed_tokens"]))
    a["probs"], a["losses"] = classifier_forward(a["logits"], target, cfg.vocab_size, exact)
    return a


def mtp_backward(p, g, a, hidden, encoded, inputs, targets, count, cfg, where, is_text):
    """What is added to the gradients of hidden and of encoded; gradients of parameters go into g, those of the head and
    the embedding are added to what is there."""
    D, head = cfg.hidden_size, "embed_tokens" if cfg.tie_word_embeddings else "lm_head"
    next_token, target = mtp_batch(inputs, targets, where.starts)
    dlogits = classifier_backward(a["probs"], target, cfg.vocab_size, max(count, 1), cfg.mtp_weight)
    g[head] = chain_matmul(g[head], rows(dlogits).T, rows(a["norm"]))
    dnorm = back_through(np.zeros_like(a["norm"]), dlogits, p[head])
    dx, g["mtp_norm"] = zero_norm_backward(dnorm, a["residual3"], p["mtp_norm"], a["norm_rstd"])
    layer = mtp_layer(p)
    dx = expert_half_backward(np.zeros_like(dx) + dx, a["residual2"], layer, cfg, a, None)
    dx = full_half_backward(dx, a["encoded"], layer, cfg, a, where)
    g.update({"mtp_" + name: x for name, x in layer.g.items()})
    g["mtp_fc"] = weight_gradient(dx, a["joined"])
    de, dh = np.split(back_through(np.zeros_like(a["joined"]), dx, p["mtp_fc"]), [D], axis=-1)
    de, g["mtp_embedding_norm"] = zero_norm_backward(de, next_of(encoded), p["mtp_embedding_norm"], a["embedding_rstd"])
    de, own = np.zeros_like(de) + de, next_of(is_text)
    embedding_backward(g["embed_tokens"], None, de[own][None], next_token[own][None])
    dh, g["mtp_hidden_norm"] = zero_norm_backward(dh, hidden, p["mtp_hidden_norm"], a["hidden_rstd"])
    return dh, np.concatenate([np.zeros_like(de[:, :1]), de[:, :-1]], axis=1)


# ---------------------------------------------------------------------------------------------------------------------
# The model. One micro-batch, forward and backward.
# ---------------------------------------------------------------------------------------------------------------------
Counts = namedtuple("Counts", "main mtp")  # counted targets of an update


def count(inputs, targets, cfg, starts=None):
    """Of all leaves, (..., B, T)"""
    shape = (-1, targets.shape[-1])
    after = mtp_batch(inputs.reshape(shape), targets.reshape(shape), starts)[1]
    return Counts(int((targets >= 0).sum()), int((after >= 0).sum()))


def forward(p, inputs, targets, cfg, starts=None, positions=None, encoded=None):
    """Every activation of one micro-batch; those of the layers in acts["blocks"][l]. starts (B, T): 1 where a document
    begins. positions (3, B, T) and encoded, what the first layer reads, where there are images."""
    acts, blocks = {}, []
    where = Where(cfg, inputs.shape, p["embed_tokens"].dtype, starts, positions)
    residual = acts["encoded"] = embedding_forward(p["embed_tokens"], None, inputs) if encoded is None else encoded
    for l in range(cfg.num_hidden_layers):
        layer, a = Layer({row.name: p[row.name][i] for row, i in trainer.layer_rows(parameter_table(cfg), l)}), {}
        half = linear_half if l in cfg.linear else full_half
        half(residual, layer, cfg, a, where)
        expert_half(a["residual2"], layer, cfg, a)
        residual = a["residual3"]
        blocks.append(a)
    acts["blocks"] = blocks
    acts["norm"], acts["norm_rstd"] = zero_norm(residual, p["norm"], cfg.rms_norm_eps)
    acts["logits"] = linear_forward(acts["norm"], p.get("lm_head", p["embed_tokens"]))
    acts["probs"], acts["losses"] = classifier_forward(acts["logits"], targets, cfg.vocab_size, exact)
    if cfg.mtp:
        a = mtp_forward(p, acts["norm"], acts["encoded"], inputs, targets, cfg, where)
        acts.update({"mtp_" + name: x for name, x in a.items()})
    return acts


def backward(p, acts, inputs, targets, count, cfg, starts=None, positions=None, is_text=None):
    """Parameter gradients of one micro-batch: forward upside down. With is_text (B, T), where there are images, also
    the gradient of what the first layer read, as "encoded"; positions of images add nothing to the embedding."""
    g = {row.name: np.zeros_like(p[row.name]) for row in parameter_table(cfg)}
    where = Where(cfg, inputs.shape, p["embed_tokens"].dtype, starts, positions)
    has_images, is_text = is_text is not None, np.ones(inputs.shape, bool) if is_text is None else is_text
    head, blocks = "embed_tokens" if cfg.tie_word_embeddings else "lm_head", acts["blocks"]
    dlogits = classifier_backward(acts["probs"], targets, cfg.vocab_size, count.main)
    g[head] = weight_gradient(dlogits, acts["norm"])
    dnorm = back_through(np.zeros_like(acts["norm"]), dlogits, p[head])
    if cfg.mtp:
        a = {name[4:]: x for name, x in acts.items() if name.startswith("mtp_")}
        dhidden, dencoded = mtp_backward(p, g, a, acts["norm"], acts["encoded"], inputs, targets, count.mtp, cfg, where,
                                         is_text)
        dnorm = dnorm + dhidden
    dx, g["norm"] = zero_norm_backward(dnorm, blocks[-1]["residual3"], p["norm"], acts["norm_rstd"])
    dresidual = np.zeros_like(dx) + dx
    counts = mean_load(acts)[0] if cfg.router_aux_loss_coef else None
    for l in reversed(range(cfg.num_hidden_layers)):
        layer, a = Layer({row.name: p[row.name][i] for row, i in trainer.layer_rows(parameter_table(cfg), l)}), blocks[l]
        dresidual = expert_half_backward(dresidual, a["residual2"], layer, cfg, a, counts)
        half = linear_half_backward if l in cfg.linear else full_half_backward
        dresidual = half(dresidual, blocks[l - 1]["residual3"] if l > 0 else acts["encoded"], layer, cfg, a, where)
        for row, i in trainer.layer_rows(parameter_table(cfg), l):
            g[row.name][i] = layer.g[row.name]
    embedding_backward(g["embed_tokens"], None, dresidual[is_text][None], inputs[is_text][None])
    if has_images:
        g["encoded"] = dresidual + dencoded if cfg.mtp else dresidual
    return g


def numbers(acts, count, cfg):
    """What an update tells: its losses, and how the experts were loaded. acts: of the leaves"""
    cross_entropy = trainer.loss_of([leaf["losses"] for leaf in acts], count.main)
    scalar, out = cross_entropy.dtype.type, {}
    more = scalar(0)
    balance = tree_sum([balance_of(leaf, cfg) for leaf in acts]) / scalar(len(acts))
    counts = tree_sum([np.stack([a["counts"] for a in leaf["blocks"]]) for leaf in acts])
    if cfg.router_aux_loss_coef:
        more = balance_factor(cfg, scalar) * balance
    if cfg.mtp:
        out["mtp_loss"] = trainer.loss_of([leaf["mtp_losses"] for leaf in acts], max(count.mtp, 1))
        more = scalar(cfg.mtp_weight) * out["mtp_loss"] + more
    return {"loss": cross_entropy + more, "cross_entropy": cross_entropy, "balance": balance, "counts": counts, **out}


MODEL = trainer.Model(parameter_table, forward, backward, read_config, metadata, to_file, from_file, numbers=numbers,
                      fit=fit, losses=("loss", "cross_entropy"), other_losses=("mtp_loss",), count=count)


# ---------------------------------------------------------------------------------------------------------------------
# The golden runs. Together they have both kinds of layers, rows that cross the border of a chunk and end in the
# middle of one, heads shared by two and by three, tied and separate heads, ties of the router, an expert without
# rows, the balance in the loss, MTP, targets that are not counted, sizes that divide nothing.
# ---------------------------------------------------------------------------------------------------------------------
TEXT = {"model_type": "qwen3_5_moe_text", "vocab_size": 29, "hidden_size": 12, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 10, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 3, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 3,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 80,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.6,
                            "mrope_section": [1, 1, 1]}}
MTP = {**TEXT, "vocab_size": 37, "hidden_size": 14, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
       "num_attention_heads": 3, "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3,
       "num_experts": 5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "output_router_logits": True,
       "router_aux_loss_coef": 0.02, "mtp_weight": 0.3}


def text_run():
    cfg = replace(read_config(TEXT, "TEXT", 1, 67), lr=3e-3, schedule="cosine", warmup=3, final_lr=0.1, beta2=0.95,
                  clip=1.0)
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=1.0, vector_spread=0.5)
    p["router"][1, 1:] = p["router"][1, 1]  # ties: at the start nobody chooses the last expert
    inputs, targets = trainer.draw_data(cfg)
    trainer.ignore_targets(targets)
    return cfg, p, inputs, targets


def mtp_run():
    cfg = replace(read_config(MTP, "MTP", 2, 11), leaves=2, lr=2e-3, schedule="wsd", clip=0.5)
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=1.0, vector_spread=0.5)
    inputs, targets = trainer.draw_data(cfg)
    trainer.ignore_targets(targets)
    targets[4, 1] = -1  # a leaf without a counted target
    return cfg, p, inputs, targets


RUNS = {"qwen36_text": text_run, "qwen36_mtp": mtp_run}


def write_golden(folder):
    for name, run in RUNS.items():
        trainer.write_golden(folder, name, MODEL, *run())


if __name__ == "__main__":
    import qwen36_checks
    sys.exit(trainer.main(MODEL, "Qwen3.6", qwen36_checks.promises, write_golden,
                          ("--check", "check the reference and write nothing",
                           lambda: exact.report(qwen36_checks.promises()))))
