"""
Activations rounded to fp8 in groups of 128, and their product with a weight in fp8, in NumPy: the law of
llmc/ops/fp8_rows.h, written from the formula. Nothing is shared with the C code: the nearest number is found in the sorted
list of all of them (fp8.py).

    python dev/ref/fp8_rows.py [--out DIR]     check the reference, then write fp8_rows.safetensors (default: dev/golden)

    s = the smallest power of two with max(largest magnitude of the group, 1e-4) <= 448 s
    rounded = nearest(inp / s) * s,  of two as near the one whose mantissa is even
    out[n][oc] = sum over c ascending of rounded[n][c] * weight[oc][c], fused; weight = e4m3 * scale of its block of 128 x 128

fp8_rows.safetensors: inp (N, C), rounded (N, C), codes (OC, C) as int32, scales (blocks of OC, blocks of C), out (N, OC).
"""

import numpy as np

import exact
from exact import F4, F8
from fp8 import BLOCK, NUMBERS, nearest

SIZES = {"N": 7, "C": 160, "OC": 130}


def group_scale(group):
    scale, largest = 2.0 ** -40, max(F8(np.abs(group).max()), F8(F4(1e-4)))
    while largest > 448 * scale:
        scale *= 2
    return scale


def round_rows(x):
    out = np.empty_like(x)
    for n in range(x.shape[0]):
        for c in range(0, x.shape[1], BLOCK):
            group = x[n, c:c + BLOCK].astype(F8)
            scale = group_scale(group)
            out[n, c:c + BLOCK] = np.copysign(NUMBERS[nearest(np.abs(group) / scale)] * scale, group)
    return out


def widen(codes, scales):
    signed = np.concatenate([NUMBERS, [np.nan], -NUMBERS, [np.nan]]).astype(F4)
    spread = scales.repeat(BLOCK, 0)[:codes.shape[0]].repeat(BLOCK, 1)[:, :codes.shape[1]]
    return signed[codes] * spread


def product(x, weight):
    out = np.zeros((x.shape[0], weight.shape[0]), F4)
    for c in range(x.shape[1]):
        out = exact.madd(x[:, None, c], weight[None, :, c], out)
    return out


def golden_tensors():
    stream = exact.Xorshift(1337)
    N, C, OC = SIZES["N"], SIZES["C"], SIZES["OC"]
    inp = (stream.floats(N * C).reshape(N, C) - F4(0.5)) * F4(8)
    inp *= F4(2) ** (np.arange(C) % 23 - 12).astype(F4)   # far apart inside a group
    inp[3, :BLOCK] *= F4(2 ** -30)                        # below 1e-4
    inp[4, BLOCK:2 * BLOCK] = 0
    inp[5, 0] = 448 * 2 ** 7                              # the largest is a number of e4m3
    codes = (stream.floats(OC * C).reshape(OC, C) * F4(256)).astype(np.int32)
    codes ^= codes & 127 == 127                           # no NaN
    blocks = -(-OC // BLOCK), -(-C // BLOCK)
    scales = F4(0.001) + stream.floats(blocks[0] * blocks[1]).reshape(blocks)
    rounded = round_rows(inp)
    return {"inp": inp, "rounded": rounded, "codes": codes, "scales": scales, "out": product(rounded, widen(codes, scales))}


def promises():
    x = golden_tensors()
    rounded = x["rounded"]
    exactly = rounded.astype(F8) @ widen(x["codes"], x["scales"]).astype(F8).T
    error = np.abs(rounded.astype(F8) - x["inp"])
    scales = np.array([[group_scale(row[c:c + BLOCK]) for c in range(0, SIZES["C"], BLOCK)] for row in x["inp"]])
    bound = np.maximum(np.abs(x["inp"]) / 16, scales.repeat(BLOCK, 1)[:, :SIZES["C"]] / 1024)
    return [
        ("rounding again changes nothing", np.array_equal(round_rows(rounded), rounded)),
        ("an error is 2^-4 of a number, or 2^-10 of its scale", (error <= bound).all()),
        ("out is the product within 1e-5", np.abs(x["out"] - exactly).max() <= 1e-5 * np.abs(exactly).max()),
        ("all magnitudes times 2^8 change the scale alone", np.array_equal(round_rows(x["inp"][6:] * F4(256)), rounded[6:] * F4(256))),
    ]


if __name__ == "__main__":
    raise SystemExit(exact.golden_main("Rows in fp8 in NumPy; writes the golden file.", "fp8_rows", golden_tensors, SIZES, promises))
