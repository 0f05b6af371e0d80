"""
Attention of GLM-5: keys and values of all heads are made of one short vector for each token (MLA), and a position sees
those of the tokens that an indexer has chosen (sparse_attention.py). NumPy and the standard library only.

DeepSeek-AI 2024, arXiv:2405.04434 (MLA), 2025, arXiv:2512.02556 (the choice).

H heads; of a head of q and k dn channels do not turn and dr do, dqk = dn + dr; of a head of v dv channels. c (B, T, r)
is a token's vector, k_rope (B, T, dr) its key that turns, which all heads share. W = kv_b (H (dn + dv), r) has a head's
dn rows U of k, then its dv rows V of v. kv = c W^T (B, T, H (dn + dv)).
Expanded, which is the law: a head's key is [U c, k_rope], its value V c. q, k (B, H, T, dqk), v (B, H, T, dv), seen
(B, T, T): what is on the list of a position. It is attention.h's with the keys on the list, ascending, in place of all
before; where a list has them all, it has the same bits:
    score     (q k) / sqrt(dqk): a chain over channels, then times the scale; max: of the scores and -10000
    att       e inv, e = exp(score - max), inv = 1 / (chain from 0 over keys of e)
    out       a chain from 0 over keys of att v
    backward  datt: chains over channels; D: a chain over keys of att datt; ds = (att (datt - D)) scale; dq: a chain
              over keys of ds k; dk, dv: of a head, chains over the positions that chose the key, ascending, of ds q and
              of att dout
    dkv       a head's dk without what turns, then its dv. dk_rope: the chain over heads of what their dk has of it
Absorbed, for generation: nobody makes keys and values, q goes to where c is. For each head
    p         the chain over dn of q U, (r)
    score     (a chain over r of p c, on over dr of q k_rope) / sqrt(dqk)
    att       as above
    z         a chain over keys of att c, (r)             out   a chain over r of V z
The same number by another order, so other bits: absorbed_bound says how far the two may be apart.
"""
import numpy as np

from exact import chain_dot, chain_matmul, chain_sum
from ops import attention_scale, merge_heads, seen_weights, split_heads

UNIT = 2.0 ** -24  # of rounding


def split_kv(x, H, dn):
    """Of each head (B, H, T, n): the first dn channels, and the others"""
    return np.split(split_heads(x, H), [dn], axis=-1)


def expand(kv, k_rope, H, dn):
    """k (B, H, T, dqk), v (B, H, T, dv)"""
    k, v = split_kv(kv, H, dn)
    turning = np.broadcast_to(k_rope[:, None], (*k.shape[:3], k_rope.shape[-1]))
    return np.concatenate([k, turning], axis=-1), v


def expand_backward(dk, dv, dn):
    """dkv (B, T, H (dn + dv)), dk_rope (B, T, dr)"""
    dk, turning = np.split(dk, [dn], axis=-1)
    return merge_heads(np.concatenate([dk, dv], axis=-1)), chain_sum(turning, axis=1)


def chosen_forward(q, k, v, seen):
    """out (B, H, T, dv), att (B, H, T, T), max, inv (B, H, T)"""
    _, att, largest, inverse = seen_weights(q, k, seen[:, None])
    return chain_matmul(np.zeros((*q.shape[:3], v.shape[-1]), q.dtype), att, v), att, largest, inverse


def chosen_backward(dout, q, k, v, att):
    """dq, dk, dv"""
    datt = chain_matmul(np.zeros_like(att), dout, v.swapaxes(2, 3))
    ds = (att * (datt - chain_dot(att, datt)[..., None])) * attention_scale(q)
    return (chain_matmul(np.zeros_like(q), ds, k), chain_matmul(np.zeros_like(k), ds.swapaxes(2, 3), q),
            chain_matmul(np.zeros_like(v), att.swapaxes(2, 3), dout))


def absorbed_forward(q, c, k_rope, kv_b, dn, seen):
    """out (B, H, Tq, dv) of q (B, H, Tq, dqk), seen (B, Tq, T)"""
    U, V = np.split(kv_b.reshape(q.shape[1], -1, kv_b.shape[-1]), [dn], axis=1)
    staying, turning = np.split(q, [dn], axis=-1)
    absorbed = chain_matmul(np.zeros((*q.shape[:3], U.shape[-1]), q.dtype), staying, U)
    queries, keys = np.concatenate([absorbed, turning], axis=-1), np.concatenate([c, k_rope], axis=-1)[:, None]
    _, att, _, _ = seen_weights(queries, keys, seen[:, None], scale=attention_scale(q))
    z = chain_matmul(np.zeros_like(absorbed), att, c[:, None])
    return chain_matmul(np.zeros((*q.shape[:3], V.shape[1]), q.dtype), z, V.swapaxes(1, 2))


def absorbed_bound(q, c, k_rope, kv_b, dn, seen):
    """How far both forms may be apart (B, H, Tq, dv), in float64; to first order in the unit of rounding u.

    A score of either form is within n u of M / sqrt(dqk), M = sum of |q| |U| |c| + |q| |k_rope|, where n counts the
    roundings of a product on its way: r + dqk + 1 expanded, dn + r + dr + 1 absorbed. So scores differ by s = (2 r +
    2 dqk + 2) u M / sqrt(dqk) at most, the largest of a position's keys; weights, each against itself, by 2 s and what
    the exponentials, their sum and its inverse round in both forms, 2 (|score - max| + n_keys + 4) u; and outputs, of
    A = sum of att |V| |c|, by that and 2 (n_keys + r) u."""
    q, c, k_rope, kv_b = (x.astype(np.float64) for x in (q, c, k_rope, kv_b))
    dqk, r, scale = q.shape[-1], c.shape[-1], attention_scale(q)
    kv = c @ kv_b.T
    k, v = expand(kv, k_rope, q.shape[1], dn)
    preatt, att, _, _ = seen_weights(q, k, seen[:, None])
    sizes, values = expand(np.abs(c) @ np.abs(kv_b).T, np.abs(k_rope), q.shape[1], dn)
    M = np.where(seen[:, None], np.abs(q) @ sizes.swapaxes(2, 3), 0).max(-1, keepdims=True)
    apart = (2 * r + 2 * dqk + 2) * UNIT * M * scale
    lowest = np.where(seen[:, None], preatt, np.inf).min(-1, keepdims=True)
    spread = np.where(seen[:, None], preatt, -np.inf).max(-1, keepdims=True) - lowest
    n_keys = seen.sum(-1)[:, None, :, None]
    relative = 2 * apart + 2 * (spread + n_keys + 4) * UNIT + 2 * (n_keys + r) * UNIT
    return (att @ values) * relative
