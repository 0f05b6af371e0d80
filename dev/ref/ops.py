"""
Operations that more than one reference model uses, each forward with its backward. NumPy only.

x, dout and their kin are (B, T, channels); weights are (out, in). Every sum is a chain (exact.py). Arrays may be
float64 as well, then everything is computed in double precision: so formulas are checked, not bits.
"""
import math
from typing import NamedTuple

import numpy as np

import exact
from exact import F4, chain_dot, chain_matmul, chain_sum, madd


def rows(x):
    """(B, T, K) -> (N, K)"""
    return x.reshape(-1, x.shape[-1])


def embedding_forward(wte, wpe, inputs):
    """wpe None: a model without learned positions."""
    return wte[inputs] if wpe is None else wte[inputs] + wpe[:inputs.shape[1]]


def embedding_backward(dwte, dwpe, dout, inputs):
    """Adds to dwte and dwpe, positions n = b*T + t ascending."""
    B, T = inputs.shape
    for b in range(B):
        for t in range(T):
            dwte[inputs[b, t]] += dout[b, t]
            if dwpe is not None:
                dwpe[t] += dout[b, t]


def layernorm_forward(x, w, b, eps=1e-5):
    one, C, eps = (x.dtype.type(value) for value in (1, x.shape[-1], eps))
    mean = chain_sum(x) / C
    centred = x - mean[..., None]
    variance = chain_dot(centred, centred) / C
    rstd = one / np.sqrt(variance + eps)
    return (rstd[..., None] * centred) * w + b, mean, rstd


def layernorm_backward(dout, x, w, mean, rstd):
    """dx, dw, db. With norm = (x - mean) * rstd and g = w * dout: dx = (g - mean(g) - norm * mean(g * norm)) * rstd."""
    C, rstd = x.dtype.type(x.shape[-1]), rstd[..., None]
    norm = (x - mean[..., None]) * rstd
    g = w * dout
    mean_g = (chain_sum(g) / C)[..., None]
    mean_g_norm = (chain_dot(g, norm) / C)[..., None]
    dx = (((0 + g) - mean_g) - norm * mean_g_norm) * rstd
    return dx, chain_dot(rows(norm), rows(dout), axis=0), chain_sum(rows(dout), axis=0)


def rmsnorm_forward(x, w, eps):
    rstd = F4(1) / np.sqrt(chain_dot(x, x) / F4(x.shape[-1]) + x.dtype.type(eps))
    return (x * rstd[..., None]) * w, rstd


def rmsnorm_backward(dout, x, w, rstd):
    """dx, dw"""
    s = rstd[..., None]
    g = dout * w
    dot = chain_dot(g, x * s)[..., None]
    dx = s * (g - (x * s) * (dot / F4(x.shape[-1])))
    return dx, chain_dot(rows(dout * x), rows(s), axis=0)


def sigmoid(v):
    return F4(1) / (F4(1) + exact.exp(-v))


def silu(v):
    return v / (F4(1) + exact.exp(-v))


def silu_slope(v):
    s = sigmoid(v)
    return s * (F4(1) + v * (F4(1) - s))


def swiglu_inputs(gate_up, limit):
    """gate, at most limit, and up, between -limit and limit; limit 0: as they are"""
    gate, up = np.split(gate_up, 2, axis=-1)
    if not limit:
        return gate, up
    limit = gate_up.dtype.type(limit)
    return np.where(gate > limit, limit, gate), np.where(up > limit, limit, np.where(up < -limit, -limit, up))


def swiglu_forward(gate_up, limit=0):
    """silu(gate) * up, where a row is gate's F numbers, then up's"""
    gate, up = swiglu_inputs(gate_up, limit)
    return silu(gate) * up


def swiglu_backward(dhidden, gate_up, limit=0):
    """What lies beyond the limit gets 0, what is equal to it all."""
    gate, up = swiglu_inputs(gate_up, limit)
    d = np.concatenate([(dhidden * up) * silu_slope(gate), dhidden * silu(gate)], axis=-1)
    if not limit:
        return d
    before, limit = np.split(gate_up, 2, axis=-1), gate_up.dtype.type(limit)
    beyond = np.concatenate([before[0] > limit, (before[1] > limit) | (before[1] < -limit)], axis=-1)
    return np.where(beyond, gate_up.dtype.type(0), d)


def split_heads(x, n_heads):
    """(B, T, n_heads * HS) -> (B, n_heads, T, HS)"""
    B, T, C = x.shape
    return x.reshape(B, T, n_heads, C // n_heads).transpose(0, 2, 1, 3)


def merge_heads(x):
    """(B, NH, T, HS) -> (B, T, NH * HS)"""
    B, NH, T, HS = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, NH * HS)


def attention_scale(x):
    HS = x.dtype.type(x.shape[-1])
    return x.dtype.type(1) / np.sqrt(HS)


def share_heads(x, q):
    """(B, NKV, T, HS) -> (B, NH, T, HS): query head h reads head h // (NH / NKV) of x"""
    return np.repeat(x, q.shape[1] // x.shape[1], axis=1)


def attention_weights(q, k, laws=exact, window=0):
    """seen_weights of q (B, NH, T, HS), k (B, NKV, T, HS). t sees the keys u <= t; with a window, which is above 0,
    only so many of them, itself included."""
    t, u = np.arange(q.shape[2])[:, None], np.arange(q.shape[2])
    return seen_weights(q, share_heads(k, q), (u <= t) & (u > t - window if window else True), laws)


def seen_weights(q, k, seen, laws=exact, scale=None):
    """preatt, att (B, NH, T, K), rows t and columns u, 0 where t does not see u; the largest score and 1 / sum of
    exponentials (B, NH, T). q (B, NH, T, HS), k (B, NH, K, HS), seen (T, K) or with more axes before. scale: of the
    scores, where it is not attention_scale(q)"""
    zero, lowest = q.dtype.type(0), q.dtype.type(-10000)
    start = np.zeros((*q.shape[:3], k.shape[2]), q.dtype)
    scores = chain_matmul(start, q, k.swapaxes(2, 3)) * (attention_scale(q) if scale is None else scale)
    preatt = np.where(seen, scores, zero)
    largest = np.max(np.where(seen, preatt, lowest), axis=-1, initial=lowest)
    e = np.where(seen, laws.exp(np.where(seen, preatt - largest[..., None], zero)), zero)
    total = chain_sum(e)
    inverse = np.where(total == 0, zero, q.dtype.type(1) / total)
    return preatt, e * inverse[..., None], largest, inverse


def queries_of(u, window):
    """The queries that see key u"""
    return slice(u, u + window if window else None)


def keys_of(t, window):
    """The keys that query t sees"""
    return slice(max(0, t + 1 - window) if window else 0, t + 1)


def over_keys(weights, x, window=0):
    """(B, NH, T, HS): for each t a chain over the keys u that it sees of weights[t][u] * x[u]. x (B, NH, T, HS)"""
    out = np.zeros_like(x)
    for u in range(x.shape[2]):
        t = queries_of(u, window)
        out[:, :, t] = madd(weights[:, :, t, u, None], x[:, :, u, None, :], out[:, :, t])
    return out


def over_queries(weights, x, NKV, window=0):
    """(B, NKV, T, HS): for each u a chain over the query heads of the group and in each over the queries t that see it
    of weights[t][u] * x[t]. x (B, NH, T, HS)"""
    B, NH, T, HS = x.shape
    group, out = NH // NKV, np.zeros((B, NKV, T, HS), x.dtype)
    for h in range(group):  # h::group has one head of each group
        for t in range(T):
            u = keys_of(t, window)
            out[:, :, u] = madd(weights[:, h::group, t, u, None], x[:, h::group, t, None, :], out[:, :, u])
    return out


def attention_value_backward(dout, v, att, window=0):
    """datt: chains over i; dv: chains over t. What all laws of attention have in common."""
    datt = chain_matmul(np.zeros_like(att), dout, share_heads(v, dout).swapaxes(2, 3))
    return datt, over_queries(att, dout, v.shape[1], window)


def attention_backward(dout, q, k, v, att, window=0):
    """dq (B, NH, T, HS), dk and dv (B, NKV, T, HS): ds = att (datt - sum(att datt)) scale, dq = ds k, dk = ds^T q."""
    datt, dv = attention_value_backward(dout, v, att, window)
    D = np.zeros_like(att[..., 0])
    for u in range(q.shape[2]):
        t = queries_of(u, window)
        D[:, :, t] = madd(att[:, :, t, u], datt[:, :, t, u], D[:, :, t])
    ds = (att * (datt - D[..., None])) * attention_scale(q)
    return over_keys(ds, share_heads(k, q), window), over_queries(ds, q, k.shape[1], window), dv


def through(start, x, w, ranges=None):
    """start + x w^T: chains that begin at start and go over the inputs. With ranges, of experts: the rows ranges[e] of
    x (R, in) go through w[e] of w (E, out, in)."""
    if ranges is None:
        return chain_matmul(start, x, w.T)
    return np.concatenate([chain_matmul(start[r], x[r], w_e.T) for r, w_e in zip(ranges, w)])


def back_through(start, dout, w, ranges=None):
    """start + dout w: chains that begin at start and go over the outputs"""
    if ranges is None:
        return chain_matmul(start, dout, w)
    return np.concatenate([chain_matmul(start[r], dout[r], w_e) for r, w_e in zip(ranges, w)])


def weight_gradient(dout, x, ranges=None):
    """dout^T x: chains over the rows; an expert without rows gets zeros"""
    def of(dout, x):
        return chain_matmul(np.zeros((dout.shape[-1], x.shape[-1]), x.dtype), rows(dout).T, rows(x))
    return of(dout, x) if ranges is None else np.stack([of(dout[r], x[r]) for r in ranges])


def linear_forward(x, w, b=None, ranges=None):
    """out[n][o] = chain from b[o], or from 0, over i of x[n][i] * w[o][i]"""
    start = np.zeros(w.shape[-2], x.dtype) if b is None else b
    return through(np.broadcast_to(start, x.shape[:-1] + start.shape), x, w, ranges)


def linear_backward(dout, x, w):
    """dx: chains over o; dw and db: chains over n."""
    return back_through(np.zeros_like(x), dout, w), weight_gradient(dout, x), chain_sum(rows(dout), axis=0)


class Adapter(NamedTuple):
    """LoRA: what is added to outputs of a linear layer, scale * B A x. Of experts A (E, r, in) and B (E, out, r)."""
    name: str
    outputs: slice
    A: np.ndarray              # (r, in)
    B: np.ndarray              # (out, r)
    scale: float


def adapter_inside(x, a, ranges):
    """scale * A x: what B reads"""
    return x.dtype.type(a.scale) * linear_forward(x, a.A, None, ranges)


def adapter_forward(out, x, a, ranges=None):
    """out, and its chains go on over the ranks"""
    return through(out, adapter_inside(x, a, ranges), a.B, ranges)


def adapter_backward(dx, dout, x, a, ranges=None, weight=None):
    """dx, whose chains go on over the ranks, dA, dB. weight (R, 1): of a row in what comes after; dout and dx are
    without it, so it multiplies what is summed over the rows: x in dA, scale * A x in dB."""
    def weighted(x):
        return x if weight is None else weight * x
    inside = adapter_inside(x, a, ranges)
    dB = weight_gradient(dout, weighted(inside), ranges)
    dinside = x.dtype.type(a.scale) * back_through(np.zeros_like(inside), dout, a.B, ranges)
    return back_through(dx, dinside, a.A, ranges), weight_gradient(dinside, weighted(x), ranges), dB


def classifier_forward(logits, targets, V, laws):
    """probs (B, T, Vp), 0 in the padding; losses (B, T), 0 where the target is negative. laws has exp and log."""
    largest = np.max(logits[..., :V], axis=-1, initial=-10000)
    e = laws.exp(logits[..., :V] - largest[..., None])
    probs = np.zeros_like(logits)
    probs[..., :V] = e / chain_sum(e)[..., None]
    at_target = np.take_along_axis(probs, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return probs, np.where(targets < 0, logits.dtype.type(0), -laws.log(at_target))


def classifier_backward(probs, targets, V, count, weight=None):
    """dlogits = (p - [j == target]) / count, with the division made once; 0 where the target is negative. weight: of
    this loss in the sum of several"""
    dloss = loss_gradient(probs.dtype, count)
    dloss = dloss if weight is None else probs.dtype.type(weight) * dloss
    is_target = (np.arange(V) == targets[..., None]).astype(probs.dtype)
    dlogits = np.zeros_like(probs)
    dlogits[..., :V] = np.where(targets[..., None] < 0, probs.dtype.type(0), (probs[..., :V] - is_target) * dloss)
    return dlogits


def loss_gradient(dtype, count):
    """What every loss of a position is multiplied by: one over the counted targets of the whole update."""
    return dtype.type(1) / dtype.type(count)


# ---------------------------------------------------------------------------------------------------------------------
# RoPE. Su et al. 2021, arXiv:2104.09864: pair i of a head turns by the angle t * theta^(-2i/HS) at position t.
# ---------------------------------------------------------------------------------------------------------------------
def rope_frequencies(HS, theta, dtype):
    """(HS/2); every step from the exponent to the frequency rounds"""
    exponent = (2 * np.arange(HS // 2)).astype(dtype) / dtype.type(HS)
    return dtype.type(1) / exact.power(theta, exponent)


def rope_tables_at(positions, frequencies):
    """cos, sin (..., HS/2) of positions (...); angles round"""
    angle = positions.astype(frequencies.dtype)[..., None] * frequencies
    return exact.cos(angle), exact.sin(angle)


def rope_tables(T, HS, theta, dtype):
    """cos, sin (T, HS/2)"""
    return rope_tables_at(np.arange(T), rope_frequencies(HS, theta, dtype))


def rope(x, cos, sin):
    """Pairs (a, b), the halves of x (B, heads, T, HS), become (a cos - b sin, a sin + b cos)."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def rope_backward(dout, cos, sin):
    da, db = np.split(dout, 2, axis=-1)
    return np.concatenate([da * cos + db * sin, db * cos - da * sin], axis=-1)


def turn_neighbours(x, tables, function=rope):
    """RoPE, or its backward, of pairs (x[2i], x[2i + 1]); the tables have the axes of x before the last one, or 1"""
    turned = function(np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), *tables)
    return np.stack(np.split(turned, 2, axis=-1), axis=-1).reshape(x.shape)


def turn_last(x, tables, function=rope):
    """turn_neighbours of the last channels of x (..., HS), as many as the tables turn"""
    n = x.shape[-1] - 2 * tables[0].shape[-1]
    return np.concatenate([x[..., :n], turn_neighbours(x[..., n:], tables, function)], axis=-1)


def turn_first(x, tables, function=rope, neighbours=True):
    """The same of the first ones; or pairs are (x[i], x[i + half])"""
    n = 2 * tables[0].shape[-1]
    turned = turn_neighbours(x[..., :n], tables, function) if neighbours else function(x[..., :n], *tables)
    return np.concatenate([turned, x[..., n:]], axis=-1)


def turn_heads(x, n_heads, tables, function, turn=turn_last):
    """RoPE of heads side by side in x (B, T, n_heads * HS); tables (B, T, n)"""
    turned = turn(x.reshape(*x.shape[:2], n_heads, -1), [y[:, :, None] for y in tables], function)
    return turned.reshape(x.shape)


# ---------------------------------------------------------------------------------------------------------------------
# The router. z (N, E) are its logits; the k experts of a position stand in ascending order.
# ---------------------------------------------------------------------------------------------------------------------
def router_forward(z, k, renormalize, bias=None):
    """scores p (N, E), log of their denominator lse (N), experts and weights (N, k). The bias moves the choice only;
    ties go to the lower index. The weights are the chosen p, renormalised or not."""
    largest = z.max(axis=-1)
    x = exact.exp(z - largest[:, None])
    total = chain_sum(x)
    p = x / total[:, None]
    c = p if bias is None else p + bias
    c = np.where(np.isnan(c), -np.inf, c)
    experts = np.sort(np.argsort(-c, axis=-1, kind="stable")[:, :k], axis=-1)
    chosen = np.take_along_axis(p, experts, axis=-1)
    weights = chosen / chain_sum(chosen)[:, None] if renormalize else chosen
    return p, largest + exact.log(total), experts.astype(np.int32), weights


def router_load(p, experts):
    """counts (E), how many pairs go to each expert; P (E), the means of p"""
    N, E = p.shape
    counts = np.bincount(experts.reshape(-1), minlength=E).astype(np.int32)
    return counts, chain_sum(p, axis=0) / p.dtype.type(N)


def load_share(counts, shape, dtype):
    """f (E): the share of the N k pairs that goes to each expert. shape (N, k)"""
    return counts.astype(dtype) / dtype.type(math.prod(shape))


def router_balance(counts, P, shape):
    """E times the sum of f P: 1 when all experts have the same load"""
    return P.dtype.type(len(P)) * chain_dot(load_share(counts, shape, P.dtype), P)


def router_backward(dw, p, lse, experts, weights, renormalize, counts, balance_weight, z_weight):
    """dz (N, E): from the gradient of the weights, of balance_weight * balance and of z_weight * z. counts are
    constants, and may be means over several routers."""
    (N, E), scalar = p.shape, p.dtype.type
    if renormalize:
        total = chain_sum(np.take_along_axis(p, experts, axis=-1))
        dw = (dw - chain_dot(weights, dw)[:, None]) / total[:, None]
    dp = np.zeros_like(p)
    dp[np.arange(N)[:, None], experts] += dw
    if balance_weight:
        dp = dp + ((scalar(balance_weight) * scalar(E)) * load_share(counts, experts.shape, p.dtype)) / scalar(N)
    dz = p * (dp - chain_dot(p, dp)[:, None])
    if z_weight:
        dz = madd((((scalar(2) * scalar(z_weight)) / scalar(N)) * lse)[:, None], p, dz)
    return dz


# ---------------------------------------------------------------------------------------------------------------------
# Rows of experts: N positions go to k experts each; these N k pairs, sorted by expert, are the rows that they compute.
# ---------------------------------------------------------------------------------------------------------------------
def expert_rows(experts, E):
    """pair (R): n*k + j of each row, sorted by (expert, n, j); slot (N, k): the row of each pair; each expert's rows"""
    pair = np.argsort(experts.reshape(-1), kind="stable")
    slot = np.argsort(pair).reshape(experts.shape)
    ends = np.cumsum(np.bincount(experts.reshape(-1), minlength=E))
    return pair, slot, [slice(begin, end) for begin, end in zip([0, *ends], ends)]


def combine(out, slot, weights):
    """(N, D): for each position a chain over its experts of weight * output. slot, weights (N, k)"""
    total = np.zeros((len(slot), out.shape[-1]), out.dtype)
    for j in range(slot.shape[1]):
        total = madd(weights[:, j, None], out[slot[:, j]], total)
    return total
