"""
Hyper-connections of DeepSeek V4: hc residual streams, which each half of a layer (a site) mixes with numbers that
depend on the position. NumPy and the standard library only.

Xie et al. 2025, arXiv:2512.24880 (mHC: the streams mix by a matrix that Sinkhorn's iterations make doubly stochastic);
Zhu et al. 2024, arXiv:2409.19606 (hyper-connections); doc/deepseek_v4.md "Formula".

X (B, T, hc, D), the streams; u (n) a position's streams one after the other, n = hc D; f (B, T, D), what the half of
the layer says of y (B, T, D), which it reads. Of a site fn (M, n), base (M), scale (3), M = (2 + hc) hc:
    r         1 / sqrt(mean of u^2 + eps_n)               one chain over all n
    z         r (fn u)                                    a chain over n, then times r
    a         z scale + base                              scale[0], [1], [2] for the first hc numbers, hc more, hc^2
              more
    pre       sigmoid(a) + eps_h       post = 2 sigmoid(a)      comb = sinkhorn(a as (hc, hc))
    y         sum over j of pre[j] X_j                    a chain from 0
    X'_k      post[k] f + sum over j of comb[j][k] X_j    one chain from 0, f first
Sinkhorn, of each (hc, hc) A[j][k]: e = exp(A - the row's largest), P = e / (sum of the row) + eps_h; then columns, and
iters - 1 times rows and columns, are divided by (their sum + eps_h). Sums are chains from 0, divisions by their result.

Backward. df, dX: chains from 0 over k of post[k] dX'_k, comb[j][k] dX'_k; dpost, dcomb, dpre: chains over channels. To
dX_j are added pre[j] dy, by madd, and then du. With s a sigmoid, zr the z above:
    da        pre: dpre (s (1 - s))    post: dpost (post (1 - s))    comb: Sinkhorn's
    Sinkhorn  steps upside down: dX = (dY - sum of dY Y) / q, Y and q of the step; then S (g - sum of g S), S the
              softmax. The sums are chains along the step's axis
    base      dbase: a chain over positions    dscale: one chain over positions, in each over the numbers of its part
    dz = da scale      dfn: chains over positions of (r dz) u
    du        r (fn^T dz) - u (((r r) / n) (sum of dz zr))      chains over M
The head has pre alone: fn (hc, n), base (hc), scale (1).
"""
import numpy as np

import exact
from exact import chain_dot, chain_sum, madd
from ops import back_through, linear_forward, rows, sigmoid, weight_gradient


def flat(X):
    """(B, T, hc, D) -> (B, T, hc * D)"""
    return X.reshape(*X.shape[:2], -1)


# ---------------------------------------------------------------------------------------------------------------------
# Sinkhorn. A (..., hc, hc)
# ---------------------------------------------------------------------------------------------------------------------
def sinkhorn_steps(A, iters, eps):
    """The softmax of the rows, and (axis, q, what the division gave) of each step"""
    eps = A.dtype.type(eps)
    e = exact.exp(A - A.max(axis=-1, keepdims=True))
    softmax = e / chain_sum(e)[..., None]
    P, steps = softmax + eps, []
    for i in range(2 * iters - 1):
        axis = -1 if i % 2 else -2
        q = np.expand_dims(chain_sum(P, axis) + eps, axis)
        P = P / q
        steps.append((axis, q, P))
    return softmax, steps


def sinkhorn_forward(A, iters, eps):
    return sinkhorn_steps(A, iters, eps)[1][-1][2]


def sinkhorn_backward(dP, A, iters, eps):
    softmax, steps = sinkhorn_steps(A, iters, eps)
    for axis, q, Y in reversed(steps):
        dP = (dP - np.expand_dims(chain_dot(dP, Y, axis), axis)) / q
    return softmax * (dP - chain_dot(dP, softmax)[..., None])


# ---------------------------------------------------------------------------------------------------------------------
# What a position's streams say of how they mix; site: fn, base, scale of a site or of the head.
# ---------------------------------------------------------------------------------------------------------------------
def parts(hc, site):
    """The numbers that each scale has"""
    ends = [0, hc, 2 * hc, 2 * hc + hc * hc][:len(site[2]) + 1]
    return [slice(*ends[i:i + 2]) for i in range(len(site[2]))]


def spread_scale(hc, site):
    """(M): the scale of each number"""
    return np.concatenate([np.full(part.stop - part.start, s) for part, s in zip(parts(hc, site), site[2])])


def mix_forward(X, site, eps_n):
    """z (B, T, M), r (B, T)"""
    u, scalar = flat(X), X.dtype.type
    r = scalar(1) / np.sqrt(chain_dot(u, u) / scalar(u.shape[-1]) + scalar(eps_n))
    return r[..., None] * linear_forward(u, site[0]), r


def mix_backward(da, z, r, X, site):
    """du as (B, T, hc, D), and the gradients of fn, base, scale"""
    u, hc, n = flat(X), X.shape[2], X.dtype.type(X.shape[2] * X.shape[3])
    r = r[..., None]
    dscale = [chain_dot(da[..., part].reshape(-1), z[..., part].reshape(-1)) for part in parts(hc, site)]
    dz = da * spread_scale(hc, site)
    t = ((r * r) / n) * chain_dot(dz, z)[..., None]
    du = r * back_through(np.zeros_like(u), dz, site[0]) - u * t
    return du.reshape(X.shape), (weight_gradient(r * dz, u), chain_sum(rows(da), axis=0), np.stack(dscale))


def logits(z, hc, site):
    return z * spread_scale(hc, site) + site[1]


def square(a, hc):
    """The numbers of comb as (..., hc, hc)"""
    return a[..., 2 * hc:].reshape(*a.shape[:-1], hc, hc)


def collapse(pre, X):
    """(B, T, D): a chain over the streams"""
    y = np.zeros_like(X[:, :, 0])
    for j in range(X.shape[2]):
        y = madd(pre[..., j, None], X[:, :, j], y)
    return y


def collapse_backward(dX, dy, pre, X):
    """dX, to which is added what y gives, and dpre"""
    return madd(pre[..., None], dy[:, :, None], dX), chain_dot(X, dy[:, :, None])


def expand(f, X, post, comb):
    """X': of each stream one chain"""
    out = madd(post[..., None], f[:, :, None], np.zeros_like(X))
    for j in range(X.shape[2]):
        out = madd(comb[..., j, :, None], X[:, :, j, None], out)
    return out


def expand_backward(dX, f, X, post, comb):
    """df, dX, dpost, dcomb from the gradient dX of X'"""
    df, dbefore = np.zeros_like(f), np.zeros_like(X)
    for k in range(X.shape[2]):
        df = madd(post[..., k, None], dX[:, :, k], df)
        dbefore = madd(comb[..., :, k, None], dX[:, :, k, None], dbefore)
    return df, dbefore, chain_dot(dX, f[:, :, None]), chain_dot(X[:, :, :, None], dX[:, :, None])


class Shape:
    """iters, eps_h, eps_n of all sites of a model"""

    def __init__(self, iters, eps_h, eps_n):
        self.iters, self.eps_h, self.eps_n = iters, eps_h, eps_n


def site_forward(X, site, shape):
    """By name: z, r, pre, post (B, T, hc), comb (B, T, hc, hc) and y"""
    hc, scalar = X.shape[2], X.dtype.type
    z, r = mix_forward(X, site, shape.eps_n)
    a = logits(z, hc, site)
    pre = sigmoid(a[..., :hc]) + scalar(shape.eps_h)
    post = scalar(2) * sigmoid(a[..., hc:2 * hc])
    comb = sinkhorn_forward(square(a, hc), shape.iters, shape.eps_h)
    return {"r": r, "z": z, "pre": pre, "post": post, "comb": comb, "y": collapse(pre, X)}


def site_backward(dX, dy, dpost, dcomb, X, saved, site, shape):
    """The gradient of X, of which dX is what the other paths gave, and those of fn, base, scale"""
    hc, one = X.shape[2], X.dtype.type(1)
    dX, dpre = collapse_backward(dX, dy, saved["pre"], X)
    a = logits(saved["z"], hc, site)
    s_pre, s_post = sigmoid(a[..., :hc]), sigmoid(a[..., hc:2 * hc])
    dcomb = sinkhorn_backward(dcomb, square(a, hc), shape.iters, shape.eps_h)
    da = np.concatenate([dpre * (s_pre * (one - s_pre)), dpost * (saved["post"] * (one - s_post)),
                         dcomb.reshape(*dcomb.shape[:2], -1)], axis=-1)
    du, g = mix_backward(da, saved["z"], saved["r"], X, site)
    return dX + du, g


def head_forward(X, site, shape):
    """By name: z, r, pre and y"""
    z, r = mix_forward(X, site, shape.eps_n)
    pre = sigmoid(logits(z, X.shape[2], site)) + X.dtype.type(shape.eps_h)
    return {"r": r, "z": z, "pre": pre, "y": collapse(pre, X)}


def head_backward(dy, X, saved, site):
    """The gradient of X and those of fn, base, scale"""
    one = X.dtype.type(1)
    dX, dpre = collapse_backward(np.zeros_like(X), dy, saved["pre"], X)
    s = sigmoid(logits(saved["z"], X.shape[2], site))
    du, g = mix_backward(dpre * (s * (one - s)), saved["z"], saved["r"], X, site)
    return dX + du, g
