"""
Muon in NumPy: the reference that llmc/ops/muon.h must equal bit for bit. NumPy and the standard library only.

Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; the polynomials, the decay and the size
of an update are those of DeepSeek-AI 2026, arXiv:2606.19348 (DeepSeek V4). Of a matrix p (rows, columns), with its
moment m and its gradient g, which clipping has scaled already:
    m = momentum m + g                  x = momentum m + g                          (Nesterov)
    x is divided by its Frobenius norm, if that is above 0
    ten times, on the smaller side (x transposed where it has more rows than columns):
        A = x x^T      P = (b A + c (A A)) + a 1      x = P x       first 8 times with FAST, then twice with SETTLED
    p = p - lr (size x + decay p)       size = 0.18 sqrt(max(rows, columns)): the root mean square of what is added
Experts (E, rows, columns) are so many matrices.

How a number comes about: float32, each + - * / rounded once; products of matrices are chains from 0 over the ascending
index, by fused multiply-add; the norm is exact.global_norm; size in float64, rounded once.

    python dev/ref/muon.py [--out DIR]   check the reference, then write muon.safetensors (default: dev/golden)

In the file, for each of three shapes NAME (wide, tall, experts): NAME.p0 before; NAME.g1, g2, g3 gradients; NAME.p1, p2,
p3 and NAME.m1, m2, m3 after so many updates. Its config has lr, momentum, weight_decay and grad_scale.
"""
import math

import numpy as np

import exact
from exact import F4, F8, chain_matmul

FAST, SETTLED = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
POLYNOMIALS = 8 * [FAST] + 2 * [SETTLED]
RMS = 0.18
SHAPES = {"wide": (5, 12), "tall": (12, 5), "experts": (3, 4, 6)}
SETTINGS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "grad_scale": 0.75}


def product(a, b):
    return chain_matmul(np.zeros((a.shape[0], b.shape[1]), a.dtype), a, b)


def norm(x):
    return exact.global_norm([x]) if x.dtype == F4 else np.sqrt(np.sum(x * x))


def direction(x):
    """The matrix with the singular vectors of x and singular values of about 1"""
    if x.shape[0] > x.shape[1]:
        return direction(x.T).T
    n = norm(x)
    x = x / (n if n > 0 else x.dtype.type(1))
    for coefficients in POLYNOMIALS:
        a, b, c = (x.dtype.type(number) for number in coefficients)
        gram = product(x, x.T)
        x = product((b * gram + c * product(gram, gram)) + a * np.eye(len(x), dtype=x.dtype), x)
    return x


def update(p, m, g, lr, momentum, weight_decay, grad_scale):
    """The new p and m"""
    if p.ndim == 3:
        pairs = [update(*matrices, lr, momentum, weight_decay, grad_scale) for matrices in zip(p, m, g)]
        return tuple(np.stack(x) for x in zip(*pairs))
    lr, momentum, weight_decay, grad_scale = (p.dtype.type(x) for x in (lr, momentum, weight_decay, grad_scale))
    g = g * grad_scale
    m = momentum * m + g
    x = direction(momentum * m + g)
    size = p.dtype.type(RMS * math.sqrt(max(p.shape)))
    return p - lr * (size * x + weight_decay * p), m


def polynomials(s):
    """What becomes of a singular value"""
    for a, b, c in POLYNOMIALS:
        s = a * s + b * s ** 3 + c * s ** 5
    return s


def draw(stream, shape, spread):
    return (stream.floats(math.prod(shape)).reshape(shape) - F4(0.5)) * F4(spread)


def golden_tensors():
    stream, out = exact.Xorshift(1337), {}
    for name, shape in SHAPES.items():
        p, m = draw(stream, shape, 0.5), np.zeros(shape, F4)
        out[f"{name}.p0"] = p
        for step in range(1, 4):
            g = draw(stream, shape, 2.0)
            p, m = update(p, m, g, **SETTINGS)
            out.update({f"{name}.g{step}": g, f"{name}.p{step}": p, f"{name}.m{step}": m})
    return out


def promises():
    x = draw(exact.Xorshift(7), (6, 17), 2.0)
    u, s, vt = np.linalg.svd(x.astype(F8), full_matrices=False)
    wanted = (u * polynomials(s / np.linalg.norm(s))) @ vt
    low, high = (f(polynomials(np.geomspace(3e-4, 1, 100001))) for f in (np.min, np.max))
    p = draw(exact.Xorshift(8), (6, 17), 1.0)
    moved, _ = update(p, np.zeros_like(p), x, 1.0, 0.95, 0.0, 1.0)
    return [
        ("the direction is that of the polynomials of the singular values, float64", np.allclose(
            direction(x.astype(F8)), wanted, rtol=0, atol=1e-12)),
        ("float32 within 1e-5 of it", np.abs(direction(x) - wanted).max() < 1e-5),
        ("of singular values above 3e-4 of the norm between 1 and 1.0006", 1 - 1e-12 < low and high < 1.0006),
        ("a transposed matrix has the transposed direction, bit for bit", np.array_equal(direction(x.T), direction(x).T)),
        ("its size does not depend on that of x", np.array_equal(direction(F4(2 ** 20) * x), direction(x))),
        ("an update has a root mean square of 0.18", abs(np.sqrt(np.mean((moved - p).astype(F8) ** 2)) - 0.18) < 1e-3),
        ("zeros stay zeros", not direction(np.zeros((3, 4), F4)).any()),
    ]


if __name__ == "__main__":
    raise SystemExit(exact.golden_main("Muon in NumPy; writes the golden file.", "muon", golden_tensors, SETTINGS, promises))
