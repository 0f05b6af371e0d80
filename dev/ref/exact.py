"""
The arithmetic that every reference script shares. NumPy and the standard library only.

It owns: correctly rounded float32 functions, sums in a fixed order, the leaf tree, the global gradient norm, AdamW,
learning rate schedules, the xorshift* generator, the FNV-1a hash, and the reading and writing of safetensors files.
It promises: the same bits on every machine and with every NumPy. Three habits give that:
  - arrays are float32 and every + - * / and sqrt is one NumPy operation on them, so each rounds once (IEEE 754); in a
    chain of products the product and the sum round once together (`madd`);
  - a sum is a Python loop over the summed index, vectorised over the outputs: np.sum, np.dot and their kin choose their
    own order, and it changes with the build;
  - exp, expm1, log, log1p, tanh, cosh, sin and cos are rounded correctly, so there is only one possible answer.

`python dev/ref/exact.py` checks the promises that have known answers.
"""
import argparse
import decimal
import json
import math
import os
from decimal import Decimal
from fractions import Fraction

import numpy as np

F4, F8 = np.float32, np.float64


# ---------------------------------------------------------------------------------------------------------------------
# Correctly rounded functions. float64 has 29 bits more than float32, so rounding a float64 result gives the right
# float32 unless the true value lies almost on a midpoint, the border between two float32 numbers. NumPy's float64
# functions are good to a few units of 2^-53; within 2^-40 of a midpoint (about one element in 2^15) we ask `decimal`,
# with 120 digits, on which side of it the value lies. No value of these functions is exactly a midpoint.
# ---------------------------------------------------------------------------------------------------------------------
DIGITS = decimal.Context(prec=120, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
CLOSE = 2.0 ** -40


def pi_digits():
    """Decimal pi by Machin's formula, 16 atan(1/5) - 4 atan(1/239)."""
    def atan_inverse(n):  # atan(1/n) = 1/n - 1/(3 n^3) + 1/(5 n^5) - ...
        power, total, k = Decimal(1) / n, Decimal(0), 0
        while power > Decimal(10) ** -DIGITS.prec:
            total += (power if k % 2 == 0 else -power) / (2 * k + 1)
            power, k = power / (n * n), k + 1
        return total
    with decimal.localcontext(DIGITS):
        return 16 * atan_inverse(5) - 4 * atan_inverse(239)


PI = pi_digits()


def taylor(x, term, k):
    """Sum of term, -term * x^2 / ((k+1)(k+2)), ...: sin x from (x, k = 1), cos x from (1, k = 0)."""
    total = Decimal(0)
    while abs(term) > Decimal(10) ** -DIGITS.prec:
        total += term
        term, k = -term * x * x / ((k + 1) * (k + 2)), k + 2
    return total


def decimal_sin(x):
    x = x % (2 * PI)  # |x| < 2^128 costs 39 of the 120 digits
    return taylor(x, x, 1)


def decimal_cos(x):
    return taylor(x % (2 * PI), Decimal(1), 0)


def decimal_tanh(x):
    e = (2 * x).exp()
    return (e - 1) / (e + 1)


def decimal_erf(x):
    """2 / sqrt(pi) times the sum of (-1)^k x^(2k+1) / (k! (2k+1))"""
    total, term, k = Decimal(0), x, 0
    while abs(term) > Decimal(10) ** -DIGITS.prec:
        total += term / (2 * k + 1)
        term, k = -term * x * x / (k + 1), k + 1
    return 2 * total / PI.sqrt()


def round_once(function, truth):
    """Make a correctly rounded float32 function of NumPy's float64 `function` and `truth`, the same on Decimals.

    A float64 array gets `function` itself: for checks of a formula in double precision."""
    def rounded(x):
        if np.asarray(x).dtype == F8:
            return function(x)
        shape, x = np.shape(x), np.asarray(x, F4).reshape(-1)
        with np.errstate(all="ignore"):
            y = function(x.astype(F8))
            nearest = y.astype(F4)
            result = nearest.copy()
            for side in (F4(-np.inf), F4(np.inf)):
                neighbour = np.nextafter(nearest, side)
                midpoint = (finite_double(nearest) + finite_double(neighbour)) / 2
                close = np.isfinite(y) & (np.abs(y - midpoint) <= CLOSE * np.abs(y))
                for i in np.flatnonzero(close):
                    with decimal.localcontext(DIGITS):
                        is_above = truth(Decimal(float(x[i]))) > Decimal(float(midpoint[i]))
                    pair = nearest[i], neighbour[i]
                    result[i] = max(pair) if is_above else min(pair)
        return result.reshape(shape)
    return rounded


def finite_double(x):
    """float32 to float64, with 2^128 for infinity: the number whose midpoint with the largest float32 is the border."""
    return np.where(np.isinf(x), np.copysign(2.0 ** 128, x), x.astype(F8))


exp = round_once(np.exp, lambda x: x.exp())
expm1 = round_once(np.expm1, lambda x: x.exp() - 1)
log = round_once(np.log, lambda x: x.ln())
log1p = round_once(np.log1p, lambda x: (1 + x).ln())
tanh = round_once(np.tanh, decimal_tanh)
cosh = round_once(np.cosh, lambda x: (x.exp() + (-x).exp()) / 2)
erf = round_once(np.vectorize(math.erf, otypes=[F8]), decimal_erf)
sin = round_once(np.sin, decimal_sin)
cos = round_once(np.cos, decimal_cos)


def power(base, x):
    """base^x for a float64 base above 0 and float32 exponents, rounded once"""
    return round_once(lambda x: np.power(base, x), lambda x: Decimal(base) ** x)(x)


# ---------------------------------------------------------------------------------------------------------------------
# Sums. A chain has one accumulator and an ascending index. A chain of products rounds once at each step, as `madd` does.
# ---------------------------------------------------------------------------------------------------------------------
FUSED = True  # False is karpathy/llm.c's law: madd rounds the product, too


def madd(a, b, c):
    """a * b + c of float32 numbers, rounded once: the fused multiply-add of IEEE 754, C's fmaf.

    The product is exact in float64. The sum is rounded to odd there: where it is inexact and its last bit is 0, it
    steps one unit towards what was lost (Boldo & Melquiond 2008), so that rounding it again to float32 is right.
    Float64 numbers get a * b + c: for checks of a formula in double precision."""
    a, b, c = np.asarray(a), np.asarray(b), np.asarray(c)
    if not FUSED or F8 in (a.dtype, b.dtype, c.dtype):
        return a * b + c
    with np.errstate(invalid="ignore", over="ignore"):
        product, c = a.astype(F8) * b.astype(F8), c.astype(F8)
        total = np.atleast_1d(product + c)
        back = total - product
        lost = (product - (total - back)) + (c - back)  # Knuth's TwoSum: exact
        steps = np.isfinite(total) & (lost != 0) & (total.view(np.int64) & 1 == 0)
        total[steps] = np.nextafter(total[steps], np.copysign(np.inf, lost[steps]))
        return total.astype(F4).reshape(np.shape(product + c))


def chain_sum(x, axis=-1):
    """Chain from 0 along one axis of x."""
    x = np.moveaxis(x, axis, 0)
    total = np.zeros(x.shape[1:], x.dtype)
    for term in x:
        total = total + term
    return total


def chain_dot(a, b, axis=-1):
    """Chain of products from 0 along one axis of a and b."""
    a, b = np.broadcast_arrays(a, b)
    a, b = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
    total = np.zeros(a.shape[1:], a.dtype)
    for x, y in zip(a, b):
        total = madd(x, y, total)
    return total


def chain_matmul(start, a, b):
    """start + a @ b, each element one chain from its start, k ascending. a (..., M, K), b (..., K, N)"""
    out = start.copy()
    for k in range(a.shape[-1]):
        out = madd(a[..., :, k, None], b[..., None, k, :], out)
    return out


def tree_sum(leaves):
    """Add micro-batches along the binary tree node(lo, size) = node(lo, size/2) + node(lo + size/2, size/2).

    An absent right child is skipped: ((0 + 1) + 2) for three leaves, ((0 + 1) + (2 + 3)) + 4 for five."""
    def node(lo, size):
        if size == 1:
            return leaves[lo]
        left, middle = node(lo, size // 2), lo + size // 2
        return left + node(middle, size // 2) if middle < len(leaves) else left
    return node(0, 1 << (len(leaves) - 1).bit_length())


# ---------------------------------------------------------------------------------------------------------------------
# The update: global norm, clip, AdamW, schedules.
# ---------------------------------------------------------------------------------------------------------------------
def sum_of_squares(gradients):
    """float64 sum of the squares of arrays of float32, each cut off to a whole number of units of 2^(2E - 62).

    E >= -126 is the smallest number with |g| < 2^E for every g. Whole numbers have no order: here high and low digits of
    31 bits are summed apart. If a g is not finite, neither is the sum."""
    flat = np.concatenate([np.zeros(1), *(g.reshape(-1) for g in gradients)]).astype(F8)
    if not np.all(np.isfinite(flat)):
        return np.sum(np.abs(flat))
    exponent = max(-126, int(np.frexp(np.max(np.abs(flat)))[1]))
    square = np.ldexp(flat, -exponent) ** 2 * 2.0 ** 31
    high = np.floor(square)
    low = np.floor((square - high) * 2.0 ** 31)
    units = (sum(map(int, high)) << 31) + sum(map(int, low))
    digits = units >> 62, units >> 31 & 0x7fffffff, units & 0x7fffffff
    return np.ldexp(F8(digits[0]) + (F8(digits[1]) * 2.0 ** -31 + F8(digits[2]) * 2.0 ** -62), 2 * exponent)


def global_norm(gradients):
    """float32 square root of the sum of squares of all tensors."""
    return F4(np.sqrt(sum_of_squares(gradients)))


def clip_scale(norm, clip):
    """The factor on every gradient; clip = 0 means no clipping."""
    return F4(clip) / norm if clip > 0 and norm > F4(clip) else F4(1)


def integer_power(base, n):
    """base^n in float64 by squaring."""
    result = 1.0
    while n:
        if n & 1:
            result *= base
        base *= base
        n >>= 1
    return result


def bias_corrections(beta1, beta2, t):
    """1 - beta^t for both moments, in float64, rounded once; t counts updates from 1."""
    return tuple(F4(1.0 - integer_power(float(F4(beta)), t)) for beta in (beta1, beta2))


def adamw(p, g, m, v, lr, beta1, beta2, eps, weight_decay, corrections):
    """One AdamW update (Loshchilov & Hutter 2019, arXiv:1711.05101) of one tensor; returns the new p, m, v."""
    lr, beta1, beta2, eps, weight_decay, one = (p.dtype.type(x) for x in (lr, beta1, beta2, eps, weight_decay, 1))
    correction1, correction2 = corrections
    m = beta1 * m + (one - beta1) * g
    v = beta2 * v + ((one - beta2) * g) * g
    p = p - lr * ((m / correction1) / (np.sqrt(v / correction2) + eps) + weight_decay * p)
    return p, m, v


def splitmix64(seed, i):
    """Number i of SplitMix64's stream that starts at seed, both of them integers or arrays of uint64."""
    u8 = np.uint64
    z = np.asarray(seed, u8) + (np.asarray(i, u8) + u8(1)) * u8(0x9E3779B97F4A7C15)
    z = (z ^ z >> u8(30)) * u8(0xBF58476D1CE4E5B9)
    z = (z ^ z >> u8(27)) * u8(0x94D049BB133111EB)
    return z ^ z >> u8(31)


def dropout(x, p, seed, step, site, first):
    """x without the elements that are left out at this site in this update; first: number of x's first element there."""
    if p == 0:
        return x
    p = F4(p)
    with np.errstate(over="ignore"):  # modulo 2^64
        key = splitmix64(splitmix64(splitmix64(seed, 1), step), site)
        bits = splitmix64(key, np.arange(first, first + x.size, dtype=np.uint64)) >> np.uint64(32)
    left_out = (bits < np.uint64(float(p) * 2.0**32)).reshape(x.shape)
    return np.where(left_out, F4(0), x * (F4(1) / (F4(1) - p)))


def ema_weight(decay, t):
    """What the parameters after update t (from 1) count in their average: (1 - decay) / (1 - decay^t), rounded once."""
    decay = float(F4(decay))
    return F4((1.0 - decay) / (1.0 - integer_power(decay, t)))


def ema(average, p, weight):
    """The average of the parameters after it has taken in p; 0 before the first."""
    return average + weight * (p - average)


def learning_rate(schedule, step, steps, peak, warmup, final):
    """float32 rate of update `step` (from 0): float64 throughout, rounded once. `final` is a fraction of peak; both are
    options, hence float32 numbers."""
    peak, final = float(F4(peak)), float(F4(final))
    low = peak * final
    if step < warmup:
        rate = peak * (step + 1) / warmup
    elif schedule == "constant":
        rate = peak
    elif schedule == "linear":
        rate = peak - (step - warmup) / (steps - warmup) * (peak - low)
    elif schedule == "cosine":
        angle = F4(math.pi * ((step - warmup) / (steps - warmup)))
        rate = low + 0.5 * (1.0 + float(cos(angle))) * (peak - low)
    elif schedule == "wsd":  # warm-up, stable, decay: the last fifth falls with a square root
        decay = math.floor(0.8 * steps)
        rate = peak if step < decay else low + (1.0 - math.sqrt((step - decay) / (steps - decay))) * (peak - low)
    else:
        raise ValueError(f"unknown schedule {schedule!r}")
    return F4(rate)


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers and hashes.
# ---------------------------------------------------------------------------------------------------------------------
MASK64 = (1 << 64) - 1


class Xorshift:
    """xorshift* (Vigna 2016, arXiv:1402.6246), 64 bits of state, 32 of output."""

    def __init__(self, state):
        self.state = state

    def u32(self):
        s = self.state
        s ^= s >> 12
        s ^= (s << 25) & MASK64
        s ^= s >> 27
        self.state = s
        return ((s * 0x2545F4914F6CDD1D) & MASK64) >> 32

    def floats(self, n):
        """n float32 in [0, 1)."""
        return np.array([(self.u32() >> 8) / 2.0 ** 24 for _ in range(n)], F4)


def fnv1a(*arrays):
    """64-bit FNV-1a over the bytes of the arrays, with the start value that llm.c's fingerprints use."""
    h = 1469598103934665603
    for array in arrays:
        for byte in array.tobytes():
            h = ((h ^ byte) * 1099511628211) & MASK64
    return h


# ---------------------------------------------------------------------------------------------------------------------
# safetensors: uint64 length of the header; the header, JSON filled up with spaces to a multiple of 8 bytes; the data of
# the tensors, one after the other. Written here by hand so that the same tensors always give the same bytes.
# ---------------------------------------------------------------------------------------------------------------------
DTYPES = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


def write_safetensors(path, tensors, config):
    """Write a dict of float32, int32 and int64 arrays, in its order; __metadata__["config"] holds `config` as JSON."""
    header, offset = {"__metadata__": {"config": json.dumps(config)}}, 0
    for name, array in tensors.items():
        dtype = next(key for key, value in DTYPES.items() if value == array.dtype)
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(array.tobytes())


def read_safetensors(path):
    """The float32, int32 and int64 tensors of a file as a dict of arrays."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


# ---------------------------------------------------------------------------------------------------------------------
# Self-check.
# ---------------------------------------------------------------------------------------------------------------------
# Inputs and results as bits, from a scan of all float32 numbers against MPFR: values within 2^-51 of a midpoint. The
# first eight are the inputs for which log, sin, cos, exp and cosh in glibc's float64, rounded once more, are wrong.
HARD_CASES = [
    (log, 0x3c413d3a, 0xc08e158f), (log, 0x41178feb, 0x400fe5e7), (log, 0x4c5d65a5, 0x418f034b),
    (log, 0x65d890d3, 0x4254d1f9), (log, 0x6f31a8ec, 0x42845a89), (sin, 0x46199998, 0xbeb1fa5d),
    (cos, 0x5f18b878, 0x3f7f14bb), (cos, 0x6115cb11, 0x3f78142f), (exp, 0xbbf0edf1, 0x3f7e1fe9),
    (exp, 0xc16912cd, 0x34fd331b), (cosh, 0x3a6f7750, 0x3f800004), (cosh, 0x3d609528, 0x3f803145),
    (expm1, 0x3dc252dd, 0x3dcbd76b), (expm1, 0xb675cbfc, 0xb675cbdf), (log1p, 0x35400003, 0x353fffff),
    (log1p, 0xb53ffffd, 0xb5400001), (log1p, 0x65d890d3, 0x4254d1f9),
]


def bits(x):
    return int(F4(x).view(np.uint32))


def from_bits(u):
    return np.array(u, np.uint32).view(F4)


def sum_of_squares_by_element(flat):
    """What sum_of_squares promises, one element at a time, in exact fractions."""
    exponent = -126
    while max(abs(float(g)) for g in flat) >= 2.0 ** exponent:
        exponent += 1
    unit = Fraction(2) ** (2 * exponent - 62)
    units = sum(Fraction(float(g)) ** 2 // unit for g in flat)
    return float(units * unit)


class Term(str):
    """A string whose sum shows the order of the additions."""

    def __add__(self, other):
        return Term(f"({self}+{other})")


def self_check():
    """Promises with known answers, as (promise, kept) pairs."""
    x = from_bits([0x3f800000, 0x33800000, 0x33800000])  # 1, 2^-24, 2^-24: in this order each small term is lost
    above_one = from_bits(0x3f800001)                    # 1 + 2^-23: what is left when the small terms meet first
    stream, floats = Xorshift(1337), Xorshift(1337).floats(4)
    noise = exp(F4(8) * Xorshift(1).floats(4096))  # of several sizes
    coarse = [round_once(lambda x, factor=factor: np.exp(x) * factor, lambda x: x.exp())
              for factor in (1 - 2.0 ** -45, 1 + 2.0 ** -45)]
    return [
        ("functions round hard cases correctly", all(bits(f(from_bits(x))) == y for f, x, y in HARD_CASES)),
        ("functions need not be good in float64 for it",
         all(bits(f(from_bits(x))) == y for f in coarse for g, x, y in HARD_CASES if g is exp)),
        ("exp is right on both sides of infinity",
         [bits(y) for y in exp(from_bits([0x42b17217, 0x42b17218]))] == [0x7f7fff84, 0x7f800000]),
        ("a chain adds in ascending order", chain_sum(x) == 1 and chain_sum(x[::-1]) == above_one),
        ("a matmul begins its chain at start", chain_matmul(x[None, :1], x[None, 1:], np.ones((2, 1), F4)) == 1),
        ("leaves add along the binary tree",
         [tree_sum([Term(i) for i in range(n)]) for n in (1, 3, 5)] == ["0", "((0+1)+2)", "(((0+1)+(2+3))+4)"]),
        ("the norm counts squares in whole units",
         all(abs(sum_of_squares([noise[n:]]) / sum_of_squares_by_element(noise[n:]) - 1) < 2.0 ** -51
             for n in range(0, len(noise), 500))),
        ("the norm has no order", sum_of_squares([noise[:100], noise[100:]]) == sum_of_squares([noise[::-1]])),
        ("xorshift* has its known stream",
         [stream.u32() for _ in range(4)] == [989205090, 818269915, 1335155955, 3876892996]),
        ("xorshift* has its known floats",
         np.array_equal(floats, np.array([0.230317235, 0.19051826, 0.310865164, 0.902659476], F4))),
        ("AdamW's corrections are those of beta^t",
         bias_corrections(0.5, 0.25, 3) == (F4(0.875), F4(1 - 0.25 ** 3))),
    ]


def report(promises):
    """Print the (promise, kept) pairs; return the exit status, 0 when all are kept."""
    for promise, kept in promises:
        print(f"{'ok  ' if kept else 'FAIL'} {promise}")
    failed = sum(not kept for _, kept in promises)
    print(f"{len(promises) - failed} passed, {failed} failed")
    return int(failed > 0)


def golden_main(about, name, tensors, metadata, promises):
    """What the reference of one golden file does when it is run: its promises, then NAME.safetensors. tensors, promises: functions."""
    parser = argparse.ArgumentParser(description=about)
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--out", metavar="DIR", default=os.path.join(here, "..", "golden"), help="for the golden file")
    folder = os.path.normpath(parser.parse_args().out)
    if report(self_check() + promises()):
        return 1
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name + ".safetensors")
    write_safetensors(path, tensors(), metadata)
    print(f"{path}  {os.path.getsize(path)} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(report(self_check()))
