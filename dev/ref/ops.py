"""
Operations that more than one reference model uses, each forward with its backward. NumPy only.

x, dout and their kin are (B, T, channels); weights are (out, in). Every sum is a chain (exact.py). Arrays may be
float64 as well, then everything is computed in double precision: so formulas are checked, not bits.
"""
import numpy as np

from exact import chain_dot, chain_matmul, chain_sum


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


def layernorm_forward(x, w, b):
    one, C, eps = (x.dtype.type(value) for value in (1, x.shape[-1], 1e-5))
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


def linear_forward(x, w, b=None):
    """out[n][o] = chain from b[o], or from 0, over i of x[n][i] * w[o][i]"""
    start = np.broadcast_to(np.zeros(len(w), x.dtype) if b is None else b, x.shape[:-1] + (len(w),))
    return chain_matmul(start, x, w.T)


def linear_backward(dout, x, w):
    """dx: chains over o; dw and db: chains over n."""
    dx = chain_matmul(np.zeros_like(x), dout, w)
    dw = chain_matmul(np.zeros_like(w), rows(dout).T, rows(x))
    return dx, dw, chain_sum(rows(dout), axis=0)


def classifier_forward(logits, targets, V, laws):
    """probs (B, T, Vp), 0 in the padding; losses (B, T), 0 where the target is negative. laws has exp and log."""
    largest = np.max(logits[..., :V], axis=-1, initial=-10000)
    e = laws.exp(logits[..., :V] - largest[..., None])
    probs = np.zeros_like(logits)
    probs[..., :V] = e / chain_sum(e)[..., None]
    at_target = np.take_along_axis(probs, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return probs, np.where(targets < 0, logits.dtype.type(0), -laws.log(at_target))


def classifier_backward(probs, targets, V, count):
    """dlogits = (p - [j == target]) / count, with the division made once; 0 where the target is negative."""
    dloss = loss_gradient(probs.dtype, count)
    is_target = (np.arange(V) == targets[..., None]).astype(probs.dtype)
    dlogits = np.zeros_like(probs)
    dlogits[..., :V] = np.where(targets[..., None] < 0, probs.dtype.type(0), (probs[..., :V] - is_target) * dloss)
    return dlogits


def loss_gradient(dtype, count):
    """What every loss of a position is multiplied by: one over the counted targets of the whole update."""
    return dtype.type(1) / dtype.type(count)
