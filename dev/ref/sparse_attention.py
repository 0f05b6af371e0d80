"""
Attention of DeepSeek V4: keys that are values as well and that all heads share, a sink for each head, entries that
stand for several tokens each, an indexer that chooses among them. The indexer is GLM-5's too, whose entries are the
tokens themselves (r = 1). NumPy and the standard library only.

DeepSeek-AI 2025, arXiv:2512.02556 (the indexer and its loss); sinks: Xiao et al. 2023, arXiv:2309.17453;
doc/deepseek_v4.md "Formula", "Entries", "What is added to the loss".

A batch of B rows of T positions; in a row documents follow one another, of which none sees another. An entry is made of
r tokens, a window that begins at a document's first token or r, 2r, ... behind it; a document's last tokens, if they
are fewer, have none. A row has W entries, as many as the row with the most; those too many are nobody's. With overlap
(CSA) an entry also has the window before it, if that is in the document: 2r slots, of which the first r read the first
half of a token's channels and the others the second half; without (HCA) r slots, which read all channels.

Compressor. v, g (B, T, C) are two linear layers of x; ape (r, C), norm (d); per channel over the slots, ascending:
    gate      g[token] + ape[its place in its window]
    alpha     e / total, e = exp(gate - the largest), total a chain from 0
    pool      a chain from 0 of alpha v
    entry     rmsnorm(pool) with the gain `norm`, then RoPE at the position of the window's first token
    backward  dv = alpha dpool, dgate = (alpha (v - pool)) dpool; dape: a chain over positions, dnorm over entries
Indexer. q (B, T, nI, dI), k (B, W, dI), weights a (B, T, nI):
    score     a chain over heads of a max(q k, 0), q k a chain over channels
    chosen    of the entries that a position sees (their last token is not after it) the topk of the largest scores; of
              two equal ones the lower; a NaN is less than all
Attention. q (B, H, T, d), keys (B, K, d), seen (B, T, K), sinks (H); sums over keys go over those that are seen,
ascending:
    score     (q key) / sqrt(d): a chain over channels, then times the scale
    max       of the scores and the sink        e = exp(score - max)
    total     a chain from 0 over keys of e, then + exp(sink - max)        inv = 1 / total        att = e inv
    out       a chain from 0 of att key
    backward  datt: chains over channels; D: a chain over keys of att datt; ds = (att (datt - D)) scale; dq: a chain
              over keys of ds key; of a key two chains from 0, over heads and in each over positions, of ds q and of att
              dout; dkey is their sum; dsink: a chain over positions (b, t) of -(exp(sink - max) inv) D, by madd
Loss of the indexer. The teacher p is the attention's att of the entries chosen, which is a constant, the student pi:
    p         the mass, a chain over heads, divided by the chain of that over the entries chosen. Is that sum 0, as it
              can be in float, the position has no loss
    pi        softmax of the scores over the entries chosen
    loss      of a position that sees an entry a chain of p (log p - ((score - max) - log total)), from 0; p 0: nothing
    backward  dscore = (pi - p) dloss; da = a chain over entries of dscore max(q k, 0); d = a dscore where q k > 0, else
              0; dq: a chain over entries of d k; dk: one chain over heads, in each over positions, of d q
"""
import numpy as np

import exact
from exact import chain_dot, chain_matmul, chain_sum, madd
from gated_delta import pieces
from ops import attention_scale, rmsnorm_backward, rmsnorm_forward, rope, rope_backward, turn_last


def norm_backward(dout, x, w, rstd):
    """ops.rmsnorm_backward, and dx is added to zeros"""
    dx, dw = rmsnorm_backward(dout, x, w, rstd)
    return np.zeros_like(dx) + dx, dw


# ---------------------------------------------------------------------------------------------------------------------
# Windows of r tokens.
# ---------------------------------------------------------------------------------------------------------------------
class Windows:
    """first (B, W): each window's first token; is_one (B, W): is there such a window? has_before: and one before it, of
    the same document? place (B, T): of a token in its window, also of those that have no entry"""

    def __init__(self, starts, shape, r):
        B, T = shape
        self.r, rows = r, []
        self.place, self.document = np.zeros(shape, int), np.zeros(shape, int)
        for b in range(B):
            rows.append([])
            for n, (begin, end) in enumerate(pieces(None if starts is None else starts[b], T)):
                self.place[b, begin:end] = np.arange(end - begin) % r
                self.document[b, begin:end] = n
                rows[b] += [(begin + i * r, i > 0) for i in range((end - begin) // r)]
        W = max(map(len, rows))
        self.first, self.is_one, self.has_before = (np.zeros((B, W), kind) for kind in (int, bool, bool))
        for b, row in enumerate(rows):
            for w, (first, has_before) in enumerate(row):
                self.first[b, w], self.is_one[b, w], self.has_before[b, w] = first, True, has_before

    def visible(self):
        """(B, T, W): has the window ended, in the document of this position?"""
        B, T = self.place.shape
        ended = self.first[:, None] + self.r - 1 <= np.arange(T)[:, None]
        document = np.take_along_axis(self.document, self.first, axis=1)
        return ended & (document[:, None] == self.document[:, :, None]) & self.is_one[:, None]

    def slots(self, overlap):
        """token (B, W, slots), 0 where there is none, and whether there is one"""
        of_slot = np.arange(-self.r if overlap else 0, self.r)
        there = np.where(of_slot < 0, self.has_before[..., None], self.is_one[..., None])
        return np.where(there, self.first[..., None] + of_slot, 0), there


def halves(x, overlap):
    """What the slots of the window before read of x, and what the others do"""
    return np.split(x, 2, axis=-1) if overlap else (x[..., :0], x)


def into_slots(x, windows, overlap):
    """(B, T, C) -> (B, W, slots, d): 0 where a slot has no token"""
    tokens, there = windows.slots(overlap)
    rows = np.arange(len(x))[:, None, None]
    before, own = halves(x, overlap)
    out = own[rows, tokens[..., -windows.r:]]
    if overlap:
        out = np.concatenate([before[rows, tokens[..., :windows.r]], out], axis=2)
    return np.where(there[..., None], out, x.dtype.type(0))


def out_of_slots(x, windows, overlap):
    """The inverse: (B, T, C), 0 of what no slot reads"""
    (B, T), d = windows.place.shape, x.shape[-1]
    out = np.zeros((B, T, 2 * d if overlap else d), x.dtype)
    tokens, there = windows.slots(overlap)
    for b, w, s in zip(*np.nonzero(there)):
        at = slice(0, d) if overlap and s < windows.r else slice(-d, None)
        out[b, tokens[b, w, s], at] = x[b, w, s]
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The compressor.
# ---------------------------------------------------------------------------------------------------------------------
def pool_weights(g, ape, windows, overlap):
    """alpha (B, W, slots, d), 0 where a slot has no token"""
    gate = into_slots(g + ape[windows.place], windows, overlap)
    there = windows.slots(overlap)[1][..., None]
    largest = np.max(np.where(there, gate, -np.inf), axis=2, keepdims=True, initial=-np.inf)
    largest = np.where(np.isfinite(largest), largest, gate.dtype.type(0)).astype(gate.dtype)
    e = np.where(there, exact.exp(np.where(there, gate - largest, gate.dtype.type(0))), gate.dtype.type(0))
    total = chain_sum(e, axis=2)[:, :, None]
    return e / np.where(total == 0, gate.dtype.type(1), total)


def compress_forward(v, g, ape, norm, eps, windows, overlap, tables):
    """entries, pool (B, W, d), rstd (B, W). tables (B, T, rd / 2): of all positions"""
    alpha = pool_weights(g, ape, windows, overlap)
    pool = chain_dot(alpha, into_slots(v, windows, overlap), axis=2)
    entries, rstd = rmsnorm_forward(pool, norm, eps)
    return turn_last(entries, entry_tables(tables, windows), rope), pool, rstd


def entry_tables(tables, windows):
    return [np.take_along_axis(x, windows.first[..., None], axis=1) for x in tables]


def compress_backward(dentries, v, g, ape, norm, pool, rstd, windows, overlap, tables):
    """dv, dg (B, T, C), dape, dnorm"""
    dnormed = turn_last(dentries, entry_tables(tables, windows), rope_backward)
    dpool, dnorm = norm_backward(dnormed, pool, norm, rstd)
    alpha, dpool = pool_weights(g, ape, windows, overlap), dpool[:, :, None]
    dgate = (alpha * (into_slots(v, windows, overlap) - pool[:, :, None])) * dpool
    dv, dg = (out_of_slots(x, windows, overlap) for x in (alpha * dpool, dgate))
    dape = np.zeros_like(ape)
    for place, d in zip(windows.place.reshape(-1), dg.reshape(-1, dg.shape[-1])):
        dape[place] = dape[place] + d
    return dv, dg, dape, dnorm


# ---------------------------------------------------------------------------------------------------------------------
# The indexer.
# ---------------------------------------------------------------------------------------------------------------------
def index_products(q, k):
    """(B, nI, T, W): q k"""
    q = q.swapaxes(1, 2)
    start = np.zeros((*q.shape[:3], k.shape[1]), q.dtype)
    return chain_matmul(start, q, k.swapaxes(1, 2)[:, None])


def index_forward(q, k, a):
    """scores (B, T, W)"""
    x = np.maximum(index_products(q, k), q.dtype.type(0))
    return chain_dot(a.swapaxes(1, 2)[..., None], x, axis=1)


def choose(scores, visible, topk):
    """(B, T, W): is the entry one of the topk that a position sees?"""
    value = np.where(visible & ~np.isnan(scores), scores, -np.inf)
    order = np.lexsort((-value, ~visible), axis=-1)  # stable
    rank = np.argsort(order, axis=-1, kind="stable")
    return visible & (rank < topk)


def listed(chosen, topk):
    """(B, T, min(topk, W)), I32: the chosen ones, ascending; -1: no more"""
    n = min(topk, chosen.shape[-1])
    order = np.argsort(~chosen, axis=-1, kind="stable")[..., :n]
    return np.where(np.arange(n) < chosen.sum(axis=-1)[..., None], order, -1).astype(np.int32)


def chosen_of(numbers, W):
    """The inverse of listed"""
    return (numbers[..., None] == np.arange(W)).any(axis=-2)


def index_scale(cfg, dtype):
    """What weights of heads are multiplied by"""
    return dtype.type(1) / np.sqrt(dtype.type(cfg.index_head_dim * cfg.index_n_heads))


def index_gradients(dscores, q, k, a):
    """dq, dk, da"""
    zero, products = q.dtype.type(0), index_products(q, k)
    da = chain_dot(dscores[:, None], np.maximum(products, zero)).swapaxes(1, 2)
    d = np.where(products > 0, a.swapaxes(1, 2)[..., None] * dscores[:, None], zero)
    dq = chain_matmul(np.zeros_like(q.swapaxes(1, 2)), d, k[:, None]).swapaxes(1, 2)
    dk = over_heads_and_queries(d, q.swapaxes(1, 2))
    return dq, dk, da


def over_heads_and_queries(weights, x):
    """(B, K, d): for each key one chain over heads, in each over queries, of weights[h][t] x[h][t]"""
    out = np.zeros((x.shape[0], weights.shape[-1], x.shape[-1]), x.dtype)
    for h in range(x.shape[1]):
        for t in range(x.shape[2]):
            out = madd(weights[:, h, t, :, None], x[:, h, t, None, :], out)
    return out


def mass_of(att, so_far=None):
    """(B, T, W) of att (B, H, T, W): how much all heads together look at each entry. so_far: of other layers, whose
    chains over heads go on"""
    return chain_sum(att if so_far is None else np.concatenate((so_far[:, None], att), axis=1), axis=1)


def gathered(x, numbers):
    """Of x (B, T, W) what stands at the numbers of listed; 0 where there are no more"""
    return np.where(numbers < 0, x.dtype.type(0), np.take_along_axis(x, np.maximum(numbers, 0), axis=-1))


def spread(x, numbers, W):
    """The inverse: (B, T, W), 0 where nothing is chosen"""
    out = np.zeros((*x.shape[:-1], W + 1), x.dtype)
    np.put_along_axis(out, np.where(numbers < 0, W, numbers), x, axis=-1)
    return out[..., :W]


def teacher_of(mass, chosen):
    """p (B, T, W); 0 where an entry is not chosen, or all of them weigh nothing"""
    zero = mass.dtype.type(0)
    mass = np.where(chosen, mass, zero)
    total = chain_sum(mass)[..., None]
    return np.where(total == 0, zero, mass / np.where(total == 0, mass.dtype.type(1), total))


def student_of(scores, chosen):
    """pi and its logarithm (B, T, W), 0 where an entry is not chosen"""
    zero, one = scores.dtype.type(0), scores.dtype.type(1)
    largest = np.max(np.where(chosen, scores, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
    largest = np.where(chosen.any(-1, keepdims=True), largest, zero).astype(scores.dtype)
    distance = np.where(chosen, scores - largest, zero)
    e = np.where(chosen, exact.exp(distance), zero)
    total = chain_sum(e)[..., None]
    total = np.where(total == 0, one, total)
    return e / total, np.where(chosen, distance - exact.log(total), zero)


def index_loss_forward(scores, mass, chosen):
    """(B, T): KL(p || pi); 0 where nothing is chosen"""
    zero, p = scores.dtype.type(0), teacher_of(mass, chosen)
    log_pi = student_of(scores, chosen)[1]
    difference = np.where(p > 0, exact.log(np.where(p > 0, p, scores.dtype.type(1))) - log_pi, zero)
    return chain_dot(p, difference)


def index_loss_backward(scores, mass, chosen, dloss):
    """dscores"""
    p = teacher_of(mass, chosen)
    taught = (p > 0).any(axis=-1, keepdims=True)
    return np.where(taught, (student_of(scores, chosen)[0] - p) * dloss, scores.dtype.type(0))


# ---------------------------------------------------------------------------------------------------------------------
# Attention.
# ---------------------------------------------------------------------------------------------------------------------
def window_seen(document, window):
    """(B, T, T): t sees the keys u <= t of its document, so many of them, itself included"""
    t, u = np.arange(document.shape[1])[:, None], np.arange(document.shape[1])
    return (u <= t) & (u > t - window) & (document[:, :, None] == document[:, None])


def sink_weights(q, keys, seen, sinks):
    """att (B, H, T, K), max and inv (B, H, T)"""
    zero, seen = q.dtype.type(0), seen[:, None]
    start = np.zeros((*q.shape[:3], keys.shape[1]), q.dtype)
    scores = chain_matmul(start, q, keys.swapaxes(1, 2)[:, None]) * attention_scale(q)
    sink = np.broadcast_to(sinks[:, None], q.shape[:3])
    largest = np.maximum(np.max(np.where(seen, scores, -np.inf), axis=-1).astype(q.dtype), sink)
    e = np.where(seen, exact.exp(np.where(seen, scores - largest[..., None], zero)), zero)
    inverse = q.dtype.type(1) / (chain_sum(e) + exact.exp(sink - largest))
    return e * inverse[..., None], largest, inverse


def sink_forward(q, keys, seen, sinks):
    """out (B, H, T, d), att, max, inv"""
    att, largest, inverse = sink_weights(q, keys, seen, sinks)
    return chain_matmul(np.zeros_like(q), att, keys[:, None]), att, largest, inverse


def sink_backward(dout, q, keys, att, sinks, largest, inverse):
    """dq (B, H, T, d), dkeys (B, K, d), dsinks (H)"""
    datt = chain_matmul(np.zeros_like(att), dout, keys.swapaxes(1, 2)[:, None])
    D = chain_dot(att, datt)
    ds = (att * (datt - D[..., None])) * attention_scale(q)
    dq = chain_matmul(np.zeros_like(q), ds, keys[:, None])
    dkeys = over_heads_and_queries(ds, q) + over_heads_and_queries(att, dout)
    sink = exact.exp(np.broadcast_to(sinks[:, None], largest.shape) - largest) * inverse
    by_head = [x.swapaxes(0, 1).reshape(len(sinks), -1) for x in (-sink, D)]
    return dq, dkeys, chain_dot(*by_head)
