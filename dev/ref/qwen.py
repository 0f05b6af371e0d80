"""
Qwen2.5, Qwen3, Qwen3-MoE, Mistral and Llama in NumPy: the reference that train_qwen3 must equal bit for bit. NumPy and
the standard library only.

Yang et al. 2024, "Qwen2.5 Technical Report", arXiv:2412.15115, and 2025, "Qwen3 Technical Report", arXiv:2505.09388;
Jiang et al. 2023, "Mistral 7B", arXiv:2310.06825: RMSNorm, causal attention with RoPE and grouped heads, RMSNorm, and a
gated MLP (SwiGLU), in layers with experts a router that sends each position to k of E of them. A config.json decides on
the rest: biases of q, k and v (Qwen2.5), also of o, a norm of each head of q and k (Qwen3), windows (Mistral), whether
the head is tied. Adapters are lora.py's.

    python dev/ref/qwen.py [--out DIR]     check the reference, then write the golden files (default: dev/golden)
    python dev/ref/qwen.py --check         check only (qwen_checks.py, which by itself compares with transformers)
    python dev/ref/qwen.py --from DIR --probe IN --probe-out OUT
                                           logits, loss and gradients of one batch for a Hugging Face folder

The golden files have the layout that trainer.py describes, with the names of Hugging Face and tensors of their own for
each expert; __metadata__["config"] is a config.json with the settings of the run in it. Activations, R = N k rows of
the experts, sorted by (expert, n, j); what only some layers have is stacked over those, ascending:
    layers      norm1, norm1_rstd, q and k (after RoPE), v, att_max, att_inv (B, H, T), attention, residual2, norm2,
                norm2_rstd, residual3
                with norms of q and k: q_proj, k_proj (before them), q_rstd (B, T, H), k_rstd (B, T, KV)
                without experts: gate_up (B, T, 2F), hidden (B, T, F)
                with experts: router_logits, scores (B, T, E), experts (I32), weights (B, T, k), expert_gate_up (R, 2F),
                expert_hidden (R, F), expert_out (R, D), moe; of the leaf counts (I32), mean_scores (E)
    outside     encoded, norm, norm_rstd, logits, probs, losses (cross entropy)
Numbers of an update of a model with experts: cross_entropy; balance, the mean over leaves; counts (I32, layers with
experts, E), sums over leaves; loss = cross_entropy + (router_aux_loss_coef * k) * balance, where the config asks for
it.

How a number comes about: float32, each + - * / and sqrt rounded once, every sum a chain with ascending index, products
in it by fused multiply-add, functions correctly rounded (exact.py). With float64 parameters everything is computed in
float64. In shapes N = B*T positions, D hidden_size, H and KV heads of HS channels, F the width of an MLP or an expert.
Where more than one order would do:
    norm of a head   rows are (position, head), heads ascending within a position; so goes the sum of its dweight. dx is
                     added to zeros
    gate and up      one weight of 2F outputs, gate's first: dnorm2 is one chain over all of them
    dnorm1           one chain over the outputs of q, then of k, then of v
    experts' dnorm2  the chain over the router's outputs; rows of the position's experts are added to it, ascending
    a tied head      its gradient first; positions are added to it, ascending
    act_fp8          a product reads its inputs as fp8_rows.py rounds them; adapters and all gradients read what was there
    balance          of all layers with experts together: counts, as whole numbers, and mean scores are summed over
                     those layers, ascending, and divided by their number; of that router.h's balance. Its weight in
                     the gradient of each of them: ((router_aux_loss_coef * k) / layers) * (1 / leaves)
"""
import json
import os
import sys
from dataclasses import dataclass, replace

import numpy as np

import exact
import fp8_rows
import trainer
from exact import F4, chain_dot, chain_sum, tree_sum
from ops import (adapter_backward, adapter_forward, attention_backward, attention_weights, back_through,
                 classifier_backward, classifier_forward, combine, embedding_backward, embedding_forward, expert_rows,
                 linear_backward, linear_forward, merge_heads, over_keys, rmsnorm_backward, rmsnorm_forward, rope,
                 rope_backward, rope_tables, router_backward, router_balance, router_forward, router_load, rows,
                 share_heads, split_heads, swiglu_backward, swiglu_forward, weight_gradient)
from trainer import Row


# ---------------------------------------------------------------------------------------------------------------------
# Config, from a config.json and back.
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config(trainer.Run):
    model_type: str                  # qwen2, qwen3, qwen3_moe, mistral or llama
    vocab_size: int                  # V
    hidden_size: int                 # D
    num_hidden_layers: int           # L
    num_attention_heads: int         # H
    num_key_value_heads: int         # KV
    head_dim: int                    # HS, even; H * HS need not be D
    intermediate_size: int           # F, of layers without experts
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool        # the embedding is the head's matrix, too
    max_position_embeddings: int
    windows: tuple                   # of each layer: how many keys a position sees, itself included; 0: all before it
    qkv_bias: bool                   # biases of q, k and v
    o_bias: bool                     # a bias of o
    qk_norm: bool                    # RMSNorm of each head of q and k before RoPE
    moe_layers: tuple = ()           # numbers of the layers with experts
    num_experts: int = 0             # E
    num_experts_per_tok: int = 0     # k
    moe_intermediate_size: int = 0   # F, of an expert
    norm_topk_prob: bool = False     # do the weights of a position sum up to 1?
    router_aux_loss_coef: float = 0  # of the balance in the loss; 0 where config.json does not ask for it
    fused_experts: bool = False      # on disk the experts of a layer are one tensor
    act_fp8: bool = False            # products round their inputs to fp8, but those of the router and of a tied head

    @property
    def dense_layers(self):
        return tuple(l for l in range(self.num_hidden_layers) if l not in self.moe_layers)


ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
                 "mistral": "MistralForCausalLM", "llama": "LlamaForCausalLM"}
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "intermediate_size", "max_position_embeddings")
NEEDED_BY_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")


def need(hf, path, keys):
    """These keys of a config.json and their values"""
    missing = [key for key in keys if hf.get(key) is None]
    if missing:
        raise SystemExit(f"{path}: expected a value of {', '.join(missing)}")
    return {key: hf[key] for key in keys}


def read_windows(hf, path, kind):
    L = hf["num_hidden_layers"]
    if kind == "mistral":
        return (hf.get("sliding_window", 4096) or 0,) * L
    if kind == "llama" or not hf.get("use_sliding_window"):
        return (0,) * L
    W = need(hf, path, ["sliding_window"])["sliding_window"]
    if kind == "qwen3_moe":
        return (W,) * L
    if hf.get("layer_types"):
        return tuple(W if attention == "sliding_attention" else 0 for attention in hf["layer_types"])
    return tuple(W if l >= need(hf, path, ["max_window_layers"])["max_window_layers"] else 0 for l in range(L))


def read_experts(hf, path):
    """What a Qwen3-MoE has beside"""
    E = hf.get("num_experts", hf.get("num_local_experts"))
    dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
    layers = tuple(l for l in range(hf["num_hidden_layers"]) if l not in dense and (l + 1) % step == 0)
    if not E or not layers:
        return {}
    balance = need(hf, path, ["router_aux_loss_coef"]) if hf.get("output_router_logits") else {}
    return {**need(hf, path, NEEDED_BY_EXPERTS), **balance, "num_experts": E, "moe_layers": layers,
            "norm_topk_prob": hf.get("norm_topk_prob", False)}


def read_config(hf, path, batch, seq_len):
    """The Config of a Hugging Face config.json. Where a key is absent, the value that transformers' class has."""
    kind, turn = hf.get("model_type"), hf.get("rope_parameters") or {}
    if kind not in ARCHITECTURES:
        raise SystemExit(f"{path}: expected a model_type of {', '.join(ARCHITECTURES)}, found {kind}")
    settings = [hf.get("hidden_act", "silu"), hf.get("rope_scaling"), turn.get("rope_type", "default"),
                hf.get("mlp_bias", False)]
    if settings != ["silu", None, "default", False]:
        raise SystemExit(f"{path}: expected hidden_act silu, rope_scaling null, rope_type default, mlp_bias false, "
                         f"found {settings}")
    sizes = need(hf, path, NEEDED)
    head_dim = hf.get("head_dim") or (128 if kind == "qwen3" else hf["hidden_size"] // hf["num_attention_heads"])
    if head_dim % 2 or hf["num_attention_heads"] % hf["num_key_value_heads"]:
        raise SystemExit(f"{path}: expected an even head_dim and equal groups of heads, found {head_dim} channels, "
                         f"{hf['num_attention_heads']} heads of q, {hf['num_key_value_heads']} of k and v")
    all_biases = kind not in ("qwen2", "mistral") and hf.get("attention_bias", False)
    return Config(**sizes, model_type=kind, head_dim=head_dim, rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
                  rope_theta=float(turn.get("rope_theta", hf.get("rope_theta", 1e4))),
                  tie_word_embeddings=hf.get("tie_word_embeddings", False), windows=read_windows(hf, path, kind),
                  qkv_bias=kind == "qwen2" or all_biases, o_bias=all_biases, qk_norm=kind in ("qwen3", "qwen3_moe"),
                  **(read_experts(hf, path) if kind == "qwen3_moe" else {}), batch=batch, seq_len=seq_len)


def config_json(cfg):
    """The inverse of read_config"""
    out = {"architectures": [ARCHITECTURES[cfg.model_type]], "model_type": cfg.model_type, "hidden_act": "silu",
           "dtype": "float32", "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta}}
    out.update({key: getattr(cfg, key) for key in NEEDED})
    out.update({key: getattr(cfg, key) for key in ("head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings")})
    W = max(cfg.windows)
    if cfg.model_type == "mistral":
        out["sliding_window"] = W or None
    elif cfg.model_type != "llama":
        out.update({"use_sliding_window": W > 0, "sliding_window": W or None})
    if cfg.model_type in ("qwen2", "qwen3"):
        out["layer_types"] = ["sliding_attention" if window else "full_attention" for window in cfg.windows]
    if cfg.model_type not in ("qwen2", "mistral"):
        out["attention_bias"] = cfg.o_bias
    if cfg.model_type == "qwen3_moe":
        out.update({key: getattr(cfg, key) for key in ("num_experts", "norm_topk_prob", *NEEDED_BY_EXPERTS)})
        out.update({"decoder_sparse_step": 1, "mlp_only_layers": list(cfg.dense_layers),
                    "router_aux_loss_coef": float(cfg.router_aux_loss_coef),
                    "output_router_logits": cfg.router_aux_loss_coef > 0})
    return out


def metadata(cfg):
    run = trainer.metadata(cfg)
    return {**config_json(cfg), **{key: run[key] for key in trainer.Run.__dataclass_fields__}}


# ---------------------------------------------------------------------------------------------------------------------
# The parameter table. Everything about a parameter is on its line.
# ---------------------------------------------------------------------------------------------------------------------
def parameter_table(cfg):
    """Kinds: embeddings and linear layers are decayed, gains, which start around 1, and biases are not. Order: the
    norm's. A weight has all rows that one product makes: gate's F and then up's."""
    V, D, F, FE, E, HS = (cfg.vocab_size, cfg.hidden_size, cfg.intermediate_size, cfg.moe_intermediate_size,
                          cfg.num_experts, cfg.head_dim)
    H, KV = cfg.num_attention_heads * HS, cfg.num_key_value_heads * HS
    every, dense, moe = tuple(range(cfg.num_hidden_layers)), cfg.dense_layers, cfg.moe_layers
    both = ("gate_proj.weight", "up_proj.weight")
    gates = ("gate_up_proj",) if cfg.fused_experts else tuple(f"{e}.{part}" for e in range(E) for part in both)
    downs = ("down_proj",) if cfg.fused_experts else tuple(f"{e}.down_proj.weight" for e in range(E))

    def row(name, layers, shape, kind, disk, parts=("",)):
        return Row(name, (len(layers), *shape), kind, "model.layers.{}." + disk, parts, layers)
    table = [
        Row("embed_tokens", (V, D), "embedding", "model.embed_tokens.weight"),
        row("input_layernorm",          every, (D,),           "gain",   "input_layernorm.weight"),
        row("q_proj",                   every, (H, D),         "linear", "self_attn.q_proj.weight"),
        row("q_proj_bias",              every, (H,),           "bias",   "self_attn.q_proj.bias"),
        row("k_proj",                   every, (KV, D),        "linear", "self_attn.k_proj.weight"),
        row("k_proj_bias",              every, (KV,),          "bias",   "self_attn.k_proj.bias"),
        row("v_proj",                   every, (KV, D),        "linear", "self_attn.v_proj.weight"),
        row("v_proj_bias",              every, (KV,),          "bias",   "self_attn.v_proj.bias"),
        row("q_norm",                   every, (HS,),          "gain",   "self_attn.q_norm.weight"),
        row("k_norm",                   every, (HS,),          "gain",   "self_attn.k_norm.weight"),
        row("o_proj",                   every, (D, H),         "linear", "self_attn.o_proj.weight"),
        row("o_proj_bias",              every, (D,),           "bias",   "self_attn.o_proj.bias"),
        row("post_attention_layernorm", every, (D,),           "gain",   "post_attention_layernorm.weight"),
        row("gate_up",                  dense, (2 * F, D),     "linear", "mlp.", both),
        row("down",                     dense, (D, F),         "linear", "mlp.down_proj.weight"),
        row("router",                   moe,   (E, D),         "linear", "mlp.gate.weight"),
        row("expert_gate_up",           moe,   (E, 2 * FE, D), "linear", "mlp.experts.", gates),
        row("expert_down",              moe,   (E, D, FE),     "linear", "mlp.experts.", downs),
        Row("norm",    (D,),   "gain",   "model.norm.weight"),
        Row("lm_head", (V, D), "linear", "lm_head.weight"),
    ]
    absent = [] if cfg.qkv_bias else ["q_proj_bias", "k_proj_bias", "v_proj_bias"]
    absent += [] if cfg.o_bias else ["o_proj_bias"]
    absent += [] if cfg.qk_norm else ["q_norm", "k_norm"]
    absent += ["lm_head"] if cfg.tie_word_embeddings else []
    return [row for row in table if row.name not in absent and row.shape[0] > 0]


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def fit(cfg, tensors):
    """Tied heads and fused experts are seen in the file: a tied head may stand there again or alone, and if it is
    another matrix, it is not tied."""
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if not cfg.tie_word_embeddings and head is None:
        raise SystemExit(f"{HEAD}: missing, and tie_word_embeddings is false")
    if cfg.tie_word_embeddings and embedding is None:
        tensors = {**tensors, EMBEDDING: head}
    elif cfg.tie_word_embeddings and head is not None and head.tobytes() != embedding.tobytes():
        print(f"{HEAD} is not {EMBEDDING}: not tied, as in transformers", file=sys.stderr)
        cfg = replace(cfg, tie_word_embeddings=False)
    return replace(cfg, fused_experts=any(name.endswith("experts.gate_up_proj") for name in tensors)), tensors


def load(folder, batch, seq_len):
    """Config and parameters of a Hugging Face folder"""
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        cfg = read_config(json.load(file), path, batch, seq_len)
    cfg, tensors = fit(cfg, exact.read_safetensors(os.path.join(folder, "model.safetensors")))
    return cfg, trainer.from_disk(MODEL, tensors, cfg)


def save(folder, cfg, p):
    """The inverse of load"""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config_json(cfg), file, indent=2)
    exact.write_safetensors(os.path.join(folder, "model.safetensors"), trainer.to_disk(MODEL, p, cfg), config_json(cfg))


# ---------------------------------------------------------------------------------------------------------------------
# One layer. Its linear layers may have adapters (lora.py): adapters[name, l] is a list of them by row of the table.
# ---------------------------------------------------------------------------------------------------------------------
def in_fp8(x):
    return fp8_rows.round_rows(rows(x)).reshape(x.shape)


class Layer:
    """The parameters w of layer l by name, adapters, and in backward the gradients g of both"""

    def __init__(self, p, cfg, l, adapters):
        self.w = {row.name: p[row.name][i] for row, i in trainer.layer_rows(parameter_table(cfg), l)}
        self.adapters = {name: adapters.get((name, l), ()) for name in self.w}
        self.window, self.act_fp8, self.g = cfg.windows[l], cfg.act_fp8, {}

    def linear(self, name, x, ranges=None):
        """x w^T + bias, then each adapter goes on with the chains of its outputs."""
        read = in_fp8(x) if self.act_fp8 and name != "router" else x
        out = linear_forward(read, self.w[name], self.w.get(name + "_bias"), ranges)
        for adapter in self.adapters[name]:
            out[..., adapter.outputs] = adapter_forward(out[..., adapter.outputs], x, adapter, ranges)
        return out

    def linear_backward(self, name, dout, x, dx=None, ranges=None, weight=None):
        """The gradient of x, in chains that begin at dx, or at 0. weight (R, 1): of a row in what comes after; dout and
        the gradient of x are without it."""
        self.g[name] = weight_gradient(dout, x if weight is None else weight * x, ranges)
        if name + "_bias" in self.w:
            self.g[name + "_bias"] = chain_sum(rows(dout), axis=0)
        dx = back_through(np.zeros_like(x) if dx is None else dx, dout, self.w[name], ranges)
        for a in self.adapters[name]:
            dx, self.g[a.name + ".lora_A"], self.g[a.name + ".lora_B"] = adapter_backward(
                dx, dout[..., a.outputs], x, a, ranges, weight)
        return dx


def heads_of(a, cfg):
    """q (B, H, T, HS), k and v (B, KV, T, HS) of a layer's activations"""
    H, KV = cfg.num_attention_heads, cfg.num_key_value_heads
    return split_heads(a["q"], H), split_heads(a["k"], KV), split_heads(a["v"], KV)


def turning_heads(cfg):
    return ("q", cfg.num_attention_heads), ("k", cfg.num_key_value_heads)


def attention_half(x, layer, cfg, a):
    """x' = x + attention(norm(x)); adds to the activations a"""
    w, eps = layer.w, cfg.rms_norm_eps
    a["norm1"], a["norm1_rstd"] = rmsnorm_forward(x, w["input_layernorm"], eps)
    tables = rope_tables(x.shape[1], cfg.head_dim, cfg.rope_theta, x.dtype)
    for name, n_heads in turning_heads(cfg):
        heads = split_heads(layer.linear(name + "_proj", a["norm1"]), n_heads)
        if cfg.qk_norm:
            a[name + "_proj"] = merge_heads(heads)
            heads, rstd = rmsnorm_forward(heads, w[name + "_norm"], eps)
            a[name + "_rstd"] = rstd.swapaxes(1, 2)
        a[name] = merge_heads(rope(heads, *tables))
    a["v"] = layer.linear("v_proj", a["norm1"])
    q, k, v = heads_of(a, cfg)
    _, att, a["att_max"], a["att_inv"] = attention_weights(q, k, window=layer.window)
    a["attention"] = merge_heads(over_keys(att, share_heads(v, q), layer.window))
    a["residual2"] = x + layer.linear("o_proj", a["attention"])


def head_norm_backward(dheads, layer, name, n_heads, a):
    """Of the norm of each head: rows (position, head); dx is added to zeros, since rmsnorm.h adds it"""
    def by_position(x):  # (B, T, n_heads * HS) -> (B, T, n_heads, HS)
        return x.reshape(*x.shape[:2], n_heads, -1)
    dx, layer.g[name + "_norm"] = rmsnorm_backward(by_position(merge_heads(dheads)), by_position(a[name + "_proj"]),
                                                   layer.w[name + "_norm"], a[name + "_rstd"])
    return (np.zeros_like(dx) + dx).reshape(a[name + "_proj"].shape)


def attention_half_backward(dout, x, layer, cfg, a):
    """The gradient of x; those of the parameters go into layer.g"""
    q, k, v = heads_of(a, cfg)
    _, att, _, _ = attention_weights(q, k, window=layer.window)
    datt = split_heads(layer.linear_backward("o_proj", dout, a["attention"]), cfg.num_attention_heads)
    *turned, dv = attention_backward(datt, q, k, v, att, layer.window)
    tables, dnorm1 = rope_tables(x.shape[1], cfg.head_dim, cfg.rope_theta, x.dtype), np.zeros_like(x)
    for (name, n_heads), d in zip(turning_heads(cfg), turned):
        d = rope_backward(d, *tables)
        d = head_norm_backward(d, layer, name, n_heads, a) if cfg.qk_norm else merge_heads(d)
        dnorm1 = layer.linear_backward(name + "_proj", d, a["norm1"], dnorm1)
    dnorm1 = layer.linear_backward("v_proj", merge_heads(dv), a["norm1"], dnorm1)
    dx, layer.g["input_layernorm"] = rmsnorm_backward(dnorm1, x, layer.w["input_layernorm"], a["norm1_rstd"])
    return dout + dx


def mlp_half(x, layer, cfg, a):
    """x'' = x' + MLP(norm(x')); adds to the activations a"""
    a["norm2"], a["norm2_rstd"] = rmsnorm_forward(x, layer.w["post_attention_layernorm"], cfg.rms_norm_eps)
    a["gate_up"] = layer.linear("gate_up", a["norm2"])
    a["hidden"] = swiglu_forward(a["gate_up"])
    a["residual3"] = x + layer.linear("down", a["hidden"])


def mlp_half_backward(dout, x, layer, a):
    dhidden = layer.linear_backward("down", dout, a["hidden"])
    dnorm2 = layer.linear_backward("gate_up", swiglu_backward(dhidden, a["gate_up"]), a["norm2"])
    dx, layer.g["post_attention_layernorm"] = rmsnorm_backward(dnorm2, x, layer.w["post_attention_layernorm"],
                                                               a["norm2_rstd"])
    return dout + dx


def expert_half(x, layer, cfg, a):
    """x'' = x' + MoE(norm(x')); adds to the activations a"""
    k, positions = cfg.num_experts_per_tok, x.shape[:2]
    a["norm2"], a["norm2_rstd"] = rmsnorm_forward(x, layer.w["post_attention_layernorm"], cfg.rms_norm_eps)
    a["router_logits"] = layer.linear("router", a["norm2"])
    p, _, experts, weights = router_forward(rows(a["router_logits"]), k, cfg.norm_topk_prob)
    a["scores"] = p.reshape(a["router_logits"].shape)
    a["experts"], a["weights"] = experts.reshape(*positions, k), weights.reshape(*positions, k)
    a["counts"], a["mean_scores"] = router_load(p, experts)
    pair, slot, ranges = expert_rows(experts, cfg.num_experts)
    a["expert_gate_up"] = layer.linear("expert_gate_up", rows(a["norm2"])[pair // k], ranges)
    a["expert_hidden"] = swiglu_forward(a["expert_gate_up"])
    a["expert_out"] = layer.linear("expert_down", a["expert_hidden"], ranges)
    a["moe"] = combine(a["expert_out"], slot, weights).reshape(x.shape)
    a["residual3"] = x + a["moe"]


def expert_half_backward(dout, x, layer, cfg, a, counts):
    """counts (E): means over the layers with experts; the balance pulls on each of them alike."""
    k, scalar = cfg.num_experts_per_tok, x.dtype.type
    norm2, experts, weights = rows(a["norm2"]), rows(a["experts"]), rows(a["weights"])
    pair, slot, ranges = expert_rows(experts, cfg.num_experts)
    token, weight = pair // k, weights.reshape(-1)[pair][:, None]
    dhidden = layer.linear_backward("expert_down", rows(dout)[token], a["expert_hidden"], None, ranges, weight)
    dweights = chain_dot(dhidden, a["expert_hidden"])[slot]
    dpre = swiglu_backward(weight * dhidden, a["expert_gate_up"])
    drows = layer.linear_backward("expert_gate_up", dpre, norm2[token], None, ranges)
    balance_weight = balance_factor(cfg, scalar) / scalar(len(cfg.moe_layers)) * (scalar(1) / scalar(cfg.leaves))
    dz = router_backward(dweights, rows(a["scores"]), None, experts, weights, cfg.norm_topk_prob, counts,
                         balance_weight, 0)
    dnorm2 = layer.linear_backward("router", dz, norm2)
    for j in range(k):
        dnorm2 = dnorm2 + drows[slot[:, j]]
    dx, layer.g["post_attention_layernorm"] = rmsnorm_backward(dnorm2.reshape(x.shape), x,
                                                               layer.w["post_attention_layernorm"], a["norm2_rstd"])
    return dout + dx


# ---------------------------------------------------------------------------------------------------------------------
# The balance of all layers with experts together, as transformers has it.
# ---------------------------------------------------------------------------------------------------------------------
def balance_factor(cfg, scalar):
    """What the balance counts in the loss. When all experts have the same load, ours is 1, that of transformers k."""
    return scalar(cfg.router_aux_loss_coef) * scalar(cfg.num_experts_per_tok)


def mean_load(acts):
    """Counts (E) and mean scores (E) of a leaf, means over the layers with experts"""
    blocks = [a for a in acts["blocks"] if "counts" in a]
    dtype = blocks[0]["mean_scores"].dtype
    n, counts = dtype.type(len(blocks)), sum(a["counts"] for a in blocks).astype(dtype)
    return counts / n, chain_sum(np.stack([a["mean_scores"] for a in blocks]), axis=0) / n


def balance_of(acts, cfg):
    shape = (acts["losses"].size, cfg.num_experts_per_tok)
    return router_balance(*mean_load(acts), shape)


# ---------------------------------------------------------------------------------------------------------------------
# The model. One micro-batch, forward and backward.
# ---------------------------------------------------------------------------------------------------------------------
def forward(p, inputs, targets, cfg, adapters={}):
    """Every activation of one micro-batch; those of the layers in acts["blocks"][l]."""
    acts, blocks = {}, []
    residual = acts["encoded"] = embedding_forward(p["embed_tokens"], None, inputs)
    for l in range(cfg.num_hidden_layers):
        layer, a = Layer(p, cfg, l, adapters), {}
        attention_half(residual, layer, cfg, a)
        half = expert_half if l in cfg.moe_layers else mlp_half
        half(a["residual2"], layer, cfg, a)
        residual = a["residual3"]
        blocks.append(a)
    acts["blocks"] = blocks
    acts["norm"], acts["norm_rstd"] = rmsnorm_forward(residual, p["norm"], cfg.rms_norm_eps)
    read = in_fp8(acts["norm"]) if cfg.act_fp8 and "lm_head" in p else acts["norm"]
    acts["logits"] = linear_forward(read, p.get("lm_head", p["embed_tokens"]))
    acts["probs"], acts["losses"] = classifier_forward(acts["logits"], targets, cfg.vocab_size, exact)
    return acts


def backward(p, acts, inputs, targets, count, cfg, adapters={}):
    """Gradients of the parameters and the adapters of one micro-batch: forward upside down. `count`: counted targets of
    the whole update."""
    g = {row.name: np.zeros_like(p[row.name]) for row in parameter_table(cfg)}
    head = "embed_tokens" if cfg.tie_word_embeddings else "lm_head"
    dlogits = classifier_backward(acts["probs"], targets, cfg.vocab_size, count)
    dnorm, g[head], _ = linear_backward(dlogits, acts["norm"], p[head])
    blocks = acts["blocks"]
    dx, g["norm"] = rmsnorm_backward(dnorm, blocks[-1]["residual3"], p["norm"], acts["norm_rstd"])
    dresidual = np.zeros_like(dx) + dx
    counts = mean_load(acts)[0] if cfg.moe_layers else None
    for l in reversed(range(cfg.num_hidden_layers)):
        layer, a = Layer(p, cfg, l, adapters), blocks[l]
        if l in cfg.moe_layers:
            dresidual = expert_half_backward(dresidual, a["residual2"], layer, cfg, a, counts)
        else:
            dresidual = mlp_half_backward(dresidual, a["residual2"], layer, a)
        residual = blocks[l - 1]["residual3"] if l > 0 else acts["encoded"]
        dresidual = attention_half_backward(dresidual, residual, layer, cfg, a)
        for row, i in trainer.layer_rows(parameter_table(cfg), l):
            g[row.name][i] = layer.g.pop(row.name)
        g.update(layer.g)  # of adapters
    embedding_backward(g["embed_tokens"], None, dresidual, inputs)
    return g


def numbers(acts, count, cfg):
    """What an update tells: its losses, and how the experts were loaded. acts: of the leaves"""
    if not cfg.moe_layers:
        return trainer.plain_numbers(acts, count, cfg)
    cross_entropy = trainer.loss_of([leaf["losses"] for leaf in acts], count)
    scalar = cross_entropy.dtype.type
    balance = tree_sum([balance_of(leaf, cfg) for leaf in acts]) / scalar(len(acts))
    counts = tree_sum([np.stack([leaf["blocks"][l]["counts"] for l in cfg.moe_layers]) for leaf in acts])
    factor = balance_factor(cfg, scalar)
    loss = cross_entropy + factor * balance if factor else cross_entropy
    return {"loss": loss, "cross_entropy": cross_entropy, "balance": balance, "counts": counts}


LOSSES = ("loss", "cross_entropy")  # the same in a model without experts
MODEL = trainer.Model(parameter_table, forward, backward, read_config, metadata, numbers=numbers, fit=fit,
                      losses=LOSSES)


# ---------------------------------------------------------------------------------------------------------------------
# The golden runs. Together they have biases, norms of heads, heads that are tied and not, one and two heads of k and v,
# windows in some layers, layers with and without experts, ties, experts without rows, the balance in the loss, targets
# that are not counted, sizes that divide nothing.
# ---------------------------------------------------------------------------------------------------------------------
DENSE = {"model_type": "qwen3", "vocab_size": 59, "hidden_size": 22, "head_dim": 10, "intermediate_size": 35,
         "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
         "rope_theta": 1e6, "tie_word_embeddings": False, "max_position_embeddings": 40}
WINDOW = {"model_type": "qwen2", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 33, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
          "tie_word_embeddings": True, "max_position_embeddings": 32, "use_sliding_window": True, "sliding_window": 3,
          "max_window_layers": 1}
MOE = {"model_type": "qwen3_moe", "vocab_size": 43, "hidden_size": 18, "head_dim": 8, "intermediate_size": 29,
       "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
       "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "max_position_embeddings": 16,
       "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 7, "norm_topk_prob": True,
       "mlp_only_layers": [1], "output_router_logits": True, "router_aux_loss_coef": 0.02}


def dense_run():
    cfg = replace(read_config(DENSE, "DENSE", 2, 9), leaves=2, lr=3e-3, schedule="cosine", warmup=3, final_lr=0.1,
                  beta2=0.95, clip=1.0)
    inputs, targets = trainer.draw_data(cfg)
    trainer.ignore_targets(targets)
    return cfg, trainer.draw_parameters(parameter_table(cfg), matrix_spread=0.8, vector_spread=0.5), inputs, targets


def window_run():
    cfg = replace(read_config(WINDOW, "WINDOW", 3, 8), lr=2e-3, schedule="wsd")
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=0.8, vector_spread=0.5)
    return cfg, p, *trainer.draw_data(cfg)


def moe_run():
    cfg = replace(read_config(MOE, "MOE", 2, 7), leaves=3, lr=2e-3, beta2=0.95, clip=0.5)
    p = trainer.draw_parameters(parameter_table(cfg), matrix_spread=1.0, vector_spread=0.5)
    p["router"][1, 1:] = p["router"][1, 1]  # ties: at the start nobody chooses the last expert
    inputs, targets = trainer.draw_data(cfg)
    trainer.ignore_targets(targets)
    targets[0, 0, 1] = -1  # a row without a counted target
    targets[4, 2] = -1     # a leaf without one
    return cfg, p, inputs, targets


RUNS = {"qwen_dense": dense_run, "qwen_window": window_run, "qwen_moe": moe_run}


def write_golden(folder):
    for name, run in RUNS.items():
        trainer.write_golden(folder, name, MODEL, *run())


if __name__ == "__main__":
    import qwen_checks
    sys.exit(trainer.main(MODEL, "Qwen2.5, Qwen3 and Mistral", qwen_checks.promises, write_golden,
                          ("--check", "check the reference and write nothing",
                           lambda: exact.report(qwen_checks.promises()))))
