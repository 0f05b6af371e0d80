"""
Mamba-1 with a choice of heads in NumPy: the model that mamba_hpn.py trains. NumPy and the standard library only.

Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv:2312.00752, as Hugging Face's
MambaForCausalLM computes it: layers of RMSNorm, in_proj, causal convolution, selective scan, gate and out_proj on a
residual stream. Heads, with f the normed stream:
    ce            logits = f times the embedding (tied) or lm_head, cross entropy
    hpn           (1 - cosine to the target's prototype)^2; Mettes, van der Pol, Snoek 2019, arXiv:1901.10514
    hpn-softmax   logits = hpn_scale * cosines to all prototypes, cross entropy
The heads on prototypes may have a projection: z = W_h f has proto_dim channels.

How a number comes about: float32, each + - * / and sqrt rounded once, every sum a chain with ascending index unless it
says otherwise, functions correctly rounded (exact.py). With float64 parameters everything is computed in float64.
Shapes: B rows, T positions, M hidden_size, E intermediate_size, NS state_size, K conv_kernel, R time_step_rank,
P = R + 2 NS columns of x_proj: dt, ssm_B, ssm_C.
"""
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

import exact
import trainer
from exact import F4, chain_dot, chain_matmul, chain_sum, madd
from ops import (classifier_backward, classifier_forward, embedding_backward, embedding_forward, linear_backward,
                 linear_forward, loss_gradient, rmsnorm_backward, rmsnorm_forward, rows, silu, silu_slope)
from trainer import Row


# ---------------------------------------------------------------------------------------------------------------------
# Config and the parameter table. Everything about a parameter is on its line.
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config(trainer.Run):
    vocab_size: int                   # V
    num_hidden_layers: int            # L
    hidden_size: int                  # M
    state_size: int                   # NS
    conv_kernel: int                  # K
    expand: int = 2                   # E = expand * M
    time_step_rank: int = 0           # R, 0: ceil(M / 16)
    layer_norm_epsilon: float = 1e-5
    use_bias: bool = False            # of in_proj and out_proj
    use_conv_bias: bool = True
    tie_word_embeddings: bool = True  # head ce: the embedding is its matrix
    layer: str = "mamba1"             # there is no other; config.json says it
    head: str = "ce"                  # or hpn, hpn-softmax
    proto: str = "fixed"              # or learn
    proto_dim: int = 0                # Dp, 0: M channels and no projection
    hpn_scale: float = 16.0

    @property
    def E(self):
        return self.expand * self.hidden_size

    @property
    def R(self):
        return self.time_step_rank or -(-self.hidden_size // 16)

    @property
    def P(self):
        return self.R + 2 * self.state_size

    @property
    def Dp(self):
        return self.proto_dim or self.hidden_size


def metadata(cfg):
    return {"model_type": "mamba", **trainer.metadata(cfg), "time_step_rank": cfg.R, "intermediate_size": cfg.E}


def parameter_table(cfg):
    """Kinds: embeddings and linear layers are decayed, the rest is not; a gain starts around 1. Order: the norm's."""
    V, M = cfg.vocab_size, cfg.hidden_size
    table = backbone_table(cfg)
    if cfg.head == "ce":
        table += [] if cfg.tie_word_embeddings else [Row("lm_head", (V, M), "linear", "lm_head.weight")]
    else:
        table += [Row("hpn_proj", (cfg.Dp, M), "linear", "hpn.proj.weight")] if cfg.proto_dim else []
        table += [Row("prototypes", (V, cfg.Dp), "prototypes", "hpn.prototypes")]
    return table


def backbone_table(cfg):
    L, M, E, NS, K, R, P = cfg.num_hidden_layers, cfg.hidden_size, cfg.E, cfg.state_size, cfg.conv_kernel, cfg.R, cfg.P
    layer = "backbone.layers.{}."
    mixer = layer + "mixer."
    table = [
        Row("embeddings",    (cfg.vocab_size, M), "embedding", "backbone.embeddings.weight"),
        Row("norm",          (L, M),              "gain",      layer + "norm.weight"),
        Row("in_proj",       (L, 2 * E, M),       "linear",    mixer + "in_proj.weight"),
        Row("in_proj_bias",  (L, 2 * E),          "bias",      mixer + "in_proj.bias"),
        Row("conv1d",        (L, E, K),           "linear",    mixer + "conv1d.weight"),  # on disk (E, 1, K)
        Row("conv1d_bias",   (L, E),              "bias",      mixer + "conv1d.bias"),
        Row("x_proj",        (L, P, E),           "linear",    mixer + "x_proj.weight"),
        Row("dt_proj",       (L, E, R),           "linear",    mixer + "dt_proj.weight"),
        Row("dt_proj_bias",  (L, E),              "dt_bias",   mixer + "dt_proj.bias"),
        Row("A_log",         (L, E, NS),          "A_log",     mixer + "A_log"),
        Row("D",             (L, E),              "gain",      mixer + "D"),
        Row("out_proj",      (L, M, E),           "linear",    mixer + "out_proj.weight"),
        Row("out_proj_bias", (L, M),              "bias",      mixer + "out_proj.bias"),
        Row("norm_f",        (M,),                "gain",      "backbone.norm_f.weight"),
    ]
    absent = [] if cfg.use_bias else ["in_proj_bias", "out_proj_bias"]
    absent += [] if cfg.use_conv_bias else ["conv1d_bias"]
    return [row for row in table if row.name not in absent]


def draw_parameters(cfg, matrix_spread, vector_spread):
    """Start values from one xorshift* stream, tensors in order: spread * (u - 1/2) around a centre for each kind."""
    stream, p = exact.Xorshift(1337), {}
    centres = {"gain": F4(1), "dt_bias": F4(-1.5), "A_log": exact.log(np.arange(1, cfg.state_size + 1, dtype=F4))}
    for row in parameter_table(cfg):
        spread = 1.0 if row.kind == "prototypes" else matrix_spread if row.is_decayed else vector_spread
        noise = (stream.floats(math.prod(row.shape)).reshape(row.shape) - F4(0.5)) * F4(spread)
        p[row.name] = centres.get(row.kind, F4(0)) + noise
    return p


def to_file(row, x, cfg):
    """One tensor as Hugging Face has it."""
    return x[:, None, :] if row.disk.endswith("conv1d.weight") else x


def from_file(row, x, cfg):
    return x[:, 0, :] if row.disk.endswith("conv1d.weight") else x


def layer_of(p, cfg, l):
    """The parameters of layer l by name; those that the layer does not have are None."""
    layer = {row.name: p[row.name][l] for row in parameter_table(cfg) if "{}" in row.disk}
    optional = {"in_proj_bias": None, "conv1d_bias": None, "out_proj_bias": None}
    return SimpleNamespace(**{**optional, **layer})


# ---------------------------------------------------------------------------------------------------------------------
# The operations, each forward with its backward.
# ---------------------------------------------------------------------------------------------------------------------
def softplus(q):
    return np.where(q > 20, q, exact.log1p(exact.exp(np.minimum(q, F4(20)))))


def softplus_backward(dout, out):
    """From the output: the slope is 1 - exp(-out)."""
    return dout * -exact.expm1(-out)


def gate_backward(dout, y, z):
    """dy, dz of y * silu(z)"""
    return dout * silu(z), (dout * y) * silu_slope(z)


def documents(starts, shape):
    """(B, T) number of the document of each position; 0 is the one that came in with the row."""
    return np.zeros(shape, int) if starts is None else np.cumsum(starts, axis=1)


def conv_taps(x, K, history, starts):
    """For each k: the input that tap k multiplies, (B, T, E), and whether it takes part, (B, T, 1). The row is preceded
    by its history (B, K-1, E), if there is one; a tap that lies before it or in another document is left out."""
    B, T, E = x.shape
    number = documents(starts, (B, T))
    front = np.zeros((B, K - 1, E), x.dtype) if history is None else history
    front_number = np.full((B, K - 1), -1 if history is None else 0)
    source, source_number = np.concatenate([front, x], axis=1), np.concatenate([front_number, number], axis=1)
    for k in range(K):
        yield k, source[:, k:k + T], (source_number[:, k:k + T] == number)[..., None]


def conv_forward(x, w, b, history=None, starts=None):
    """Chain from the bias, or from 0, over taps k; tap K-1 is the position itself. x (B, T, E), w (E, K)"""
    out = np.broadcast_to(x.dtype.type(0) if b is None else b, x.shape)
    for k, source, takes_part in conv_taps(x, w.shape[1], history, starts):
        out = np.where(takes_part, madd(w[:, k], source, out), out)
    return out


def conv_backward(dout, x, w, history=None, starts=None):
    """dx: chain over taps k; dw and db: chains over positions."""
    (B, T, E), K = x.shape, w.shape[1]
    dw = np.zeros_like(w)
    for k, source, takes_part in conv_taps(x, K, history, starts):
        dw[:, k] = chain_dot(rows(np.where(takes_part, dout, x.dtype.type(0))), rows(source), axis=0)
    number = documents(starts, (B, T))
    after = np.concatenate([dout, np.zeros((B, K - 1, E), x.dtype)], axis=1)
    after_number = np.concatenate([number, np.full((B, K - 1), -1)], axis=1)
    dx = np.zeros_like(x)
    for k in range(K):
        user = slice(K - 1 - k, K - 1 - k + T)  # the positions that used x[t] with tap k
        takes_part = (after_number[:, user] == number)[..., None]
        dx = np.where(takes_part, madd(w[:, k], after[:, user], dx), dx)
    return dx, dw, chain_sum(rows(dout), axis=0)


def scan_states(u, delta, A, ssm_B, state=None, starts=None):
    """Yields t, decay, h before and h after position t, each (B, E, NS): h = a h + (delta u) ssm_B.

    state: h before the row, None for 0. At the first position of a document h before is 0."""
    B, T, E = u.shape
    h = np.zeros((B, E, A.shape[1]), u.dtype) if state is None else state
    for t in range(T):
        before = h if starts is None else np.where(starts[:, t, None, None], u.dtype.type(0), h)
        a = exact.exp(delta[:, t, :, None] * A)
        h = madd(a, before, (delta[:, t] * u[:, t])[..., None] * ssm_B[:, t, None, :])
        yield t, a, before, h


def scan_forward(u, delta, A_log, ssm_B, ssm_C, D, state=None, starts=None):
    """y (B, T, E): chain from D u over n of ssm_C h. u, delta (B, T, E), A_log (E, NS), ssm_B, ssm_C (B, T, NS)"""
    y = D * u
    for t, _, _, h in scan_states(u, delta, -exact.exp(A_log), ssm_B, state, starts):
        for n in range(h.shape[2]):
            y[:, t] = madd(ssm_C[:, t, n, None], h[:, :, n], y[:, t])
    return y


def scan_backward(dy, u, delta, A_log, ssm_B, ssm_C, D, state=None, starts=None, dstate=None):
    """du, ddelta, dA_log, dssm_B, dssm_C, dD and the gradient of the state before the row.

    dstate: gradient of the state after the row, None for 0. dA and dD: in a row a chain over t descending, then over
    rows."""
    A = -exact.exp(A_log)
    du, ddelta, dssm_B, dssm_C = (np.zeros_like(x) for x in (u, delta, ssm_B, ssm_C))
    carried = np.zeros((len(u),) + A.shape, u.dtype) if dstate is None else dstate  # lambda of the specification
    dA, dD = np.zeros_like(carried), np.zeros_like(u[:, 0])
    for t, a, before, h in reversed(list(scan_states(u, delta, A, ssm_B, state, starts))):
        dy_t, u_t, delta_t = dy[:, t], u[:, t], delta[:, t]
        G = madd(dy_t[..., None], ssm_C[:, t, None, :], carried)
        carried = a * G
        W = carried * before
        if starts is not None:
            carried = np.where(starts[:, t, None, None], u.dtype.type(0), carried)
        S = chain_dot(G, ssm_B[:, t, None, :])
        du[:, t] = D * dy_t + delta_t * S
        ddelta[:, t] = u_t * S + chain_dot(A, W)
        dA = madd(delta_t[..., None], W, dA)
        dD = madd(dy_t, u_t, dD)
        dssm_B[:, t] = sum_channels(G, (delta_t * u_t)[..., None])
        dssm_C[:, t] = sum_channels(dy_t[..., None], h)
    return du, ddelta, chain_sum(dA, axis=0) * A, dssm_B, dssm_C, chain_sum(dD, axis=0), carried


def sum_channels(a, b):
    """The sum of a * b over channels, (B, E, NS) -> (B, NS), channels in groups of 64. In a group lane l = chain over
    channels l, l + 16, l + 32, l + 48; the 16 lanes are added as a tree, the groups as a chain."""
    a, b = np.broadcast_arrays(a, b)
    B, E, NS = a.shape
    padding = ((0, 0), (0, -E % 64), (0, 0))  # absent channels add zeros, which change no chain from 0
    a, b = (np.pad(x, padding).reshape(B, -1, 4, 16, NS) for x in (a, b))
    lanes = chain_dot(a, b, axis=2)
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    return chain_sum(lanes[:, :, 0], axis=1)


def unit_forward(x):
    """x / |x| and |x|, which is at least 1e-8; rows are the last axis"""
    norm = np.sqrt(chain_dot(x, x))
    norm = np.where(norm > x.dtype.type(1e-8), norm, x.dtype.type(1e-8))
    return x / norm[..., None], norm


def unit_backward(dunit, unit, norm):
    dot = chain_dot(dunit, unit)[..., None]
    return (dunit - unit * dot) / norm[..., None]


def hpn_forward(unit, prototypes, targets):
    """cosines to the own prototype and losses (B, T), 0 where the target is negative"""
    cosines = np.where(targets < 0, unit.dtype.type(0), chain_dot(unit, prototypes[np.maximum(targets, 0)]))
    off = F4(1) - cosines
    return cosines, np.where(targets < 0, unit.dtype.type(0), off * off)


def hpn_backward(cosines, unit, prototypes, targets, count):
    """dunit, and dprototypes: added in ascending position"""
    dcos = (F4(-2) * (F4(1) - cosines)) * loss_gradient(unit.dtype, count)
    counted = (targets >= 0)[..., None]
    dunit = np.where(counted, dcos[..., None] * prototypes[np.maximum(targets, 0)], unit.dtype.type(0))
    dprototypes = np.zeros_like(prototypes)
    for i in np.ndindex(targets.shape):
        if targets[i] >= 0:
            dprototypes[targets[i]] += dcos[i] * unit[i]
    return dunit, dprototypes


# ---------------------------------------------------------------------------------------------------------------------
# Layers. carry is (history, state) of a layer before the row, (None, None) for a fresh start.
# ---------------------------------------------------------------------------------------------------------------------
FRESH = (None, None)


def split_columns(p, cfg):
    """dt (B, T, R), ssm_B and ssm_C (B, T, NS): columns of x_proj's output"""
    return np.split(p, [cfg.R, cfg.R + cfg.state_size], axis=-1)


def ssm_forward(a, x, w, cfg, starts, carry):
    """Convolution, projections and scan, from x of in_proj to y; adds to the activations a."""
    history, state = carry
    a["conv"] = conv_forward(x, w.conv1d, w.conv1d_bias, history, starts)
    a["u"] = silu(a["conv"])
    a["dbc"] = linear_forward(a["u"], w.x_proj)
    dt, ssm_B, ssm_C = split_columns(a["dbc"], cfg)
    a["delta"] = softplus(linear_forward(dt, w.dt_proj, w.dt_proj_bias))
    a["y"] = scan_forward(a["u"], a["delta"], w.A_log, ssm_B, ssm_C, w.D, state, starts)


def ssm_backward(dy, a, x, w, cfg, starts, carry):
    """dx and the gradients of the parameters by name"""
    history, state = carry
    g = {}
    dt, ssm_B, ssm_C = split_columns(a["dbc"], cfg)
    du, ddelta, g["A_log"], dssm_B, dssm_C, g["D"], _ = scan_backward(dy, a["u"], a["delta"], w.A_log, ssm_B, ssm_C,
                                                                      w.D, state, starts)
    ddt, g["dt_proj"], g["dt_proj_bias"] = linear_backward(softplus_backward(ddelta, a["delta"]), dt, w.dt_proj)
    dp = np.concatenate([ddt, dssm_B, dssm_C], axis=-1)
    _, g["x_proj"], _ = linear_backward(dp, a["u"], w.x_proj)
    du = chain_matmul(du, dp, w.x_proj)  # goes on from the scan's
    dx, g["conv1d"], g["conv1d_bias"] = conv_backward(du * silu_slope(a["conv"]), x, w.conv1d, history, starts)
    return dx, g


def layer_forward(residual, w, cfg, starts, carry):
    """The activations of one layer; a["residual"] is the stream after it."""
    a = {}
    a["norm"], a["norm_rstd"] = rmsnorm_forward(residual, w.norm, cfg.layer_norm_epsilon)
    a["xz"] = linear_forward(a["norm"], w.in_proj, w.in_proj_bias)
    x, z = np.split(a["xz"], 2, axis=-1)
    ssm_forward(a, x, w, cfg, starts, carry)
    a["gated"] = a["y"] * silu(z)
    a["out"] = linear_forward(a["gated"], w.out_proj, w.out_proj_bias)
    a["residual"] = residual + a["out"]
    return a


def layer_backward(dresidual, a, residual, w, cfg, starts, carry):
    """The gradient of the stream before the layer, and the gradients of the parameters by name"""
    x, z = np.split(a["xz"], 2, axis=-1)
    dgated, dout_proj, dout_proj_bias = linear_backward(dresidual, a["gated"], w.out_proj)
    dy, dz = gate_backward(dgated, a["y"], z)
    dx, g = ssm_backward(dy, a, x, w, cfg, starts, carry)
    dxz = np.concatenate([dx, dz], axis=-1)
    dnorm, g["in_proj"], g["in_proj_bias"] = linear_backward(dxz, a["norm"], w.in_proj)
    dx, g["norm"] = rmsnorm_backward(dnorm, residual, w.norm, a["norm_rstd"])
    g.update({"out_proj": dout_proj, "out_proj_bias": dout_proj_bias})
    return dresidual + dx, g


def carry_after(p, acts, cfg, starts=None, carry=None):
    """(history, state) of each layer after a micro-batch. Inputs of earlier documents are 0 in the history, where the C
    leaves their taps out: the same number, but for the sign of a zero."""
    after = []
    for l in range(cfg.num_hidden_layers):
        w, a = layer_of(p, cfg, l), acts["blocks"][l]
        x = a["xz"][..., :cfg.E]  # what the convolution reads
        history, state = carry[l] if carry else FRESH
        number = documents(starts, x.shape[:2])
        x = np.where((number == number[:, -1:])[..., None], x, x.dtype.type(0))
        front = np.zeros((len(x), cfg.conv_kernel - 1, cfg.E), x.dtype) if history is None else history
        front = np.where((number[:, -1:] == 0)[..., None], front, x.dtype.type(0))
        _, ssm_B, _ = split_columns(a["dbc"], cfg)
        *_, (_, _, _, state) = scan_states(a["u"], a["delta"], -exact.exp(w.A_log), ssm_B, state, starts)
        after.append((np.concatenate([front, x], axis=1)[:, x.shape[1]:], state))
    return after


# ---------------------------------------------------------------------------------------------------------------------
# Heads: from the normed stream f to the losses, and back.
# ---------------------------------------------------------------------------------------------------------------------
def head_forward(p, f, targets, cfg):
    a = {}
    if cfg.head == "ce":
        a["logits"] = linear_forward(f, p.get("lm_head", p["embeddings"]))
    else:
        z = linear_forward(f, p["hpn_proj"]) if cfg.proto_dim else f
        a["z_unit"], _ = unit_forward(z)
        prototypes, _ = unit_forward(p["prototypes"])
        if cfg.head == "hpn":
            a["cosines"], a["losses"] = hpn_forward(a["z_unit"], prototypes, targets)
            return a
        a["logits"] = f.dtype.type(cfg.hpn_scale) * linear_forward(a["z_unit"], prototypes)
    a["probs"], a["losses"] = classifier_forward(a["logits"], targets, cfg.vocab_size, exact)
    return a


def head_backward(p, a, f, targets, count, cfg):
    """df, and the gradients of the head's parameters by name; that of fixed prototypes is 0"""
    if cfg.head == "ce":
        dlogits = classifier_backward(a["probs"], targets, cfg.vocab_size, count)
        name = "embeddings" if cfg.tie_word_embeddings else "lm_head"
        df, dw, _ = linear_backward(dlogits, f, p[name])
        return df, {name: dw}
    prototypes, norms = unit_forward(p["prototypes"])
    if cfg.head == "hpn":
        dunit, dprototypes = hpn_backward(a["cosines"], a["z_unit"], prototypes, targets, count)
    else:
        dlogits = classifier_backward(a["probs"], targets, cfg.vocab_size, count)
        dunit, dprototypes, _ = linear_backward(f.dtype.type(cfg.hpn_scale) * dlogits, a["z_unit"], prototypes)
    g = {"prototypes": np.zeros_like(dprototypes)}
    if cfg.proto == "learn":
        g["prototypes"] = unit_backward(dprototypes, prototypes, norms)
    z = linear_forward(f, p["hpn_proj"]) if cfg.proto_dim else f
    dz = unit_backward(dunit, *unit_forward(z))
    if not cfg.proto_dim:
        return dz, g
    df, g["hpn_proj"], _ = linear_backward(dz, f, p["hpn_proj"])
    return df, g


# ---------------------------------------------------------------------------------------------------------------------
# The model. One micro-batch, forward and backward. starts (B, T): where a document begins; carry: one pair per layer.
# ---------------------------------------------------------------------------------------------------------------------
def forward(p, inputs, targets, cfg, starts=None, carry=None):
    """Every activation of one micro-batch; those of the layers in acts["blocks"][l]."""
    acts, blocks = {}, []
    residual = acts["encoded"] = embedding_forward(p["embeddings"], None, inputs)
    for l in range(cfg.num_hidden_layers):
        blocks.append(layer_forward(residual, layer_of(p, cfg, l), cfg, starts, carry[l] if carry else FRESH))
        residual = blocks[-1]["residual"]
    acts["blocks"] = blocks
    acts["normf"], acts["normf_rstd"] = rmsnorm_forward(residual, p["norm_f"], cfg.layer_norm_epsilon)
    acts.update(head_forward(p, acts["normf"], targets, cfg))
    return acts


def backward(p, acts, inputs, targets, count, cfg, starts=None, carry=None):
    """Parameter gradients of one micro-batch: forward upside down. `count`: counted targets of the whole update."""
    g = {row.name: np.zeros_like(p[row.name]) for row in parameter_table(cfg)}
    blocks = acts["blocks"]
    df, head_gradients = head_backward(p, acts, acts["normf"], targets, count, cfg)
    g.update(head_gradients)
    residual = blocks[-1]["residual"]
    dx, g["norm_f"] = rmsnorm_backward(df, residual, p["norm_f"], acts["normf_rstd"])
    dresidual = np.zeros_like(dx) + dx
    for l in reversed(range(cfg.num_hidden_layers)):
        residual = blocks[l - 1]["residual"] if l > 0 else acts["encoded"]
        dresidual, layer_gradients = layer_backward(dresidual, blocks[l], residual, layer_of(p, cfg, l), cfg, starts,
                                                    carry[l] if carry else FRESH)
        for name, gradient in layer_gradients.items():
            if name in g:  # a bias that the model does not have is not there
                g[name][l] = gradient
    embedding_backward(g["embeddings"], None, dresidual, inputs)
    return g


def read_config(hf, path, batch, seq_len):
    """The Config of a Hugging Face config.json; our own keys (layer, head, ...) may stand in it."""
    if hf.get("hidden_act", "silu") != "silu":
        raise SystemExit(f"{path}: expected hidden_act silu, found {hf['hidden_act']}")
    known = {name: hf[name] for name in Config.__dataclass_fields__ if name in hf}
    known.update({"time_step_rank": 0 if hf.get("time_step_rank", "auto") == "auto" else hf["time_step_rank"],
                  "batch": batch, "seq_len": seq_len})
    return Config(**known)


MODEL = trainer.Model(parameter_table, forward, backward, read_config, metadata, to_file, from_file)
