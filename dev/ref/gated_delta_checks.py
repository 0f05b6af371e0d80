"""
What gated_delta.py promises: in float64 numbers that were computed apart, both laws and every size of chunk
alike, finite differences; in float32 how far the laws lie apart, and to the bit: packed rows, windows. NumPy and the
standard library only.

    python dev/ref/gated_delta_checks.py
"""
import numpy as np

import exact
import gated_delta
from exact import F4, F8
from gated_delta import (CHUNKS, STEPS, delta_backward, delta_forward, gates_backward, gates_forward, query_scale,
                         unit_backward, unit_forward)
from moe_checks import same_bits


def random_case(rng, B, T, Hk, Hv, dk, dv, dtype=F8, fading=2.0):
    """q, k, v, g, beta, state, dout, dstate"""
    q, k = (unit_forward(rng.normal(size=(B, T, Hk, dk)))[0] for _ in range(2))
    v, dout = rng.normal(size=(2, B, T, Hv, dv))
    g, beta = -fading * rng.random((B, T, Hv)) ** 2, rng.random((B, T, Hv))
    state, dstate = rng.normal(size=(2, B, Hv, dk, dv))
    return [x.astype(dtype) for x in (q * query_scale(dk, np.dtype(F8)), k, v, g, beta, state, dout, dstate)]


def everything(case, law, starts=None):
    """o, state after, and all gradients"""
    q, k, v, g, beta, state, dout, dstate = case
    return (*delta_forward(q, k, v, g, beta, state, starts, law),
            *delta_backward(dout, q, k, v, g, beta, state, starts, dstate, law))


def distance(found, truth):
    """The worst over tensors of the largest difference, relative to the tensor's largest number; or, where a tensor is
    next to nothing (dg where all is forgotten), to a thousandth of the largest of all"""
    least = 1e-3 * max(np.abs(y).max() for y in truth)
    return max(np.abs(x.astype(F8) - y).max() / max(np.abs(y).max(), least) for x, y in zip(found, truth))


def golden_promises():
    """Section 4.3's numbers: one head, three positions"""
    def rows_of(*x):
        return np.array(x, F8).reshape(1, 3, 1, -1)
    q, k = rows_of(.6, -.2, .1, .5, -.4, .3), rows_of(.8, .6, .6, -.8, 1, 0)
    v, dout = rows_of(1, -2, .5, 1.5, -1, .25), rows_of(1, 0, .5, -1, 2, 1)
    g, beta = rows_of(-.1, -.5, -.2)[..., 0], rows_of(.9, .5, .7)[..., 0]
    want = [
        rows_of(.324, -.648, .122433486, -.669866971, .253680850, -.336666694),
        np.array([[-.555894690, .071003800], [.104409913, -1.027550580]]).reshape(1, 1, 2, 2),
        rows_of(.720000, .540000, .716755, 1.318816, -1.040786, -.818731),
        rows_of(.815668, .316749, .000289, .133723, .833867, -.725695),
        rows_of(.502800, -.169892, -.340444, .042278, -.56, -.28),
        rows_of(0, .518584, -.319305)[..., 0], rows_of(.936204, -.213610, .945619)[..., 0]]
    out = []
    for name, law in (("steps", STEPS), ("chunks", CHUNKS)):
        found = (*delta_forward(q, k, v, g, beta, law=law), *delta_backward(dout, q, k, v, g, beta, law=law)[:5])
        out.append((f"{name}: numbers computed apart",
                    all(np.abs(x - y).max() < 6e-7 for x, y in zip(found, want)) and
                    all(np.abs(x - y).max() < 6e-10 for x, y in zip(found[:2], want)) and
                    abs((found[0] * dout).sum() - 1.225778720) < 6e-10))
    return out


def with_chunks_of(size, function):
    before, gated_delta.CHUNK = gated_delta.CHUNK, size
    try:
        return function()
    finally:
        gated_delta.CHUNK = before


def law_promises():
    """Extremes of g and beta, heads alike and shared, sizes of chunks, in float64; then how they round in float32"""
    rng, worst, apart = np.random.default_rng(1), 0.0, [0.0, 0.0, 0.0]
    for T, Hk, Hv, g, beta in ((1, 2, 2, None, None), (3, 1, 3, None, None), (65, 2, 4, None, None),
                               (70, 1, 2, 0.0, None), (70, 1, 2, -60.0, None), (70, 2, 2, None, 0.0),
                               (70, 2, 2, None, 1.0), (130, 1, 3, None, None)):
        case = random_case(rng, 2, T, Hk, Hv, 5, 7)
        for i, x in ((3, g), (4, beta)):
            case[i] = case[i] if x is None else np.full_like(case[i], x)
        starts = (rng.random((2, T)) < 0.05).astype(np.int32)
        for documents in (None, starts):
            truth = everything(case, STEPS, documents)
            for size in (1, 4, 7, 64):
                found = with_chunks_of(size, lambda: everything(case, CHUNKS, documents))
                worst = max(worst, distance(found, truth))
    for fading in (0.05, 0.5, 2.0, 8.0):
        case = random_case(rng, 1, 130, 2, 4, 16, 24, F4, fading)
        truth = everything([x.astype(F8) for x in case], STEPS)
        both = [everything(case, law) for law in (STEPS, CHUNKS)]
        found = [*(distance(x, truth) for x in both), distance(both[1], [x.astype(F8) for x in both[0]])]
        apart = [max(pair) for pair in zip(apart, found)]
    print(f"     chunks and steps, float64: {worst:.1e} apart; float32 from float64: steps {apart[0]:.1e}, "
          f"chunks {apart[1]:.1e}; from each other {apart[2]:.1e}")
    return [("chunks of 1, 4, 7 and 64 are the recurrence, and so are their gradients", worst < 2e-13),
            ("float32: both laws are near the truth, and each other", max(apart) < 1e-5)]


def slopes(function, arrays, gradients, douts, rng, h=1e-6):
    """The worst error of gradients of the sum of outputs times douts against central differences"""
    worst = 0.0
    for i, gradient in enumerate(gradients):
        direction = rng.normal(size=arrays[i].shape)
        ends = [sum((x * d).sum() for x, d in zip(function(*[x + sign * h * direction if j == i else x
                                                             for j, x in enumerate(arrays)]), douts))
                for sign in (1, -1)]
        scale = np.linalg.norm(gradient) * np.linalg.norm(direction)
        worst = max(worst, abs((ends[0] - ends[1]) / (2 * h) - (gradient * direction).sum()) / scale)
    return worst


def slope_promises():
    rng, worst = np.random.default_rng(2), {}
    for T, Hk, Hv in ((6, 1, 2), (67, 2, 2)):
        *arrays, dout, dstate = random_case(rng, 2, T, Hk, Hv, 3, 4)
        starts = (rng.random((2, T)) < 0.1).astype(np.int32)
        for name, law in (("steps", STEPS), ("chunks", CHUNKS)):
            gradients = delta_backward(dout, *arrays, starts, dstate, law)
            error = slopes(lambda *x: delta_forward(*x, starts, law), arrays, gradients, (dout, dstate), rng)
            worst[name] = max(worst.get(name, 0.0), error)
    x, dout = rng.normal(size=(2, 2, 3, 2, 5))
    for scale in (None, query_scale(5, np.dtype(F8))):
        gradient = unit_backward(dout, x, unit_forward(x)[1], scale)
        worst["unit"] = max(worst.get("unit", 0), slopes(lambda x: [unit_forward(x, scale)[0]], [x], [gradient], [dout],
                                                         rng))
    arrays = [*rng.normal(size=(2, 2, 5, 3)) * 2, *rng.normal(size=(2, 3))]
    a, b, A_log, dt_bias = arrays
    dg, dbeta = rng.normal(size=(2, 2, 5, 3))
    g, beta = gates_forward(*arrays)
    gradients = gates_backward(dg, dbeta, a, g, beta, A_log, dt_bias)
    worst["gates"] = slopes(gates_forward, arrays, gradients, (dg, dbeta), rng)
    return [(f"{name}: gradients agree with finite differences", error < 1e-7) for name, error in worst.items()]


def bit_promises():
    """Packed rows are their documents, windows are the whole, generation goes on"""
    rng = np.random.default_rng(3)
    case = random_case(rng, 1, 150, 1, 2, 4, 6, F4)
    starts = np.zeros((1, 150), np.int32)
    starts[0, [5, 70, 149]] = 1
    q, k, v, g, beta, state, dout, dstate = case
    inputs, kept = (q, k, v, g, beta), []
    for law in (STEPS, CHUNKS):
        packed = delta_forward(*inputs, None, starts, law), delta_backward(dout, *inputs, None, starts, dstate, law)
        parts = []
        for first, end in ((0, 5), (5, 70), (70, 149), (149, 150)):
            own = [x[:, first:end] for x in inputs]
            last = dstate if end == 150 else None
            parts.append((delta_forward(*own, law=law), delta_backward(dout[:, first:end], *own, dstate=last, law=law)))
        kept += [same_bits(packed[0][0], np.concatenate([x[0][0] for x in parts], axis=1)),
                 same_bits(packed[0][1], parts[-1][0][1])]
        kept += [same_bits(x, np.concatenate([part[1][i] for part in parts], axis=1))
                 for i, x in enumerate(packed[1][:5])]
    whole, windows = delta_forward(*inputs, state), []
    whole_back = delta_backward(dout, *inputs, state, None, dstate)
    carried, cuts = [state], [slice(0, 64), slice(64, 128), slice(128, 150)]
    for at in cuts:
        out, after = delta_forward(*(x[:, at] for x in inputs), carried[-1])
        windows.append(out)
        carried.append(after)
    back, d = [], dstate
    for at, before in zip(reversed(cuts), carried[-2::-1]):
        *gradients, d = delta_backward(dout[:, at], *(x[:, at] for x in inputs), before, None, d)
        back.insert(0, gradients)
    joined = [np.concatenate(x, axis=1) for x in zip(*back)]
    return [
        ("a packed row has the bits of its documents", all(kept)),
        ("windows of 64 have the bits of the whole", same_bits(whole[0], np.concatenate(windows, axis=1)) and
         same_bits(whole[1], carried[-1]) and same_bits(d, whole_back[5]) and
         all(same_bits(x, y) for x, y in zip(joined, whole_back))),
    ]


def promises():
    return golden_promises() + law_promises() + slope_promises() + bit_promises()


if __name__ == "__main__":
    raise SystemExit(exact.report(promises()))
