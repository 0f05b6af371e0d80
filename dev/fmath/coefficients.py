"""
The constants of llmc/core/fmath.h: minimax polynomials by the Remez exchange, bits of 1/pi and ln 2.
    python dev/fmath/coefficients.py                    prints every constant as a C literal, by function
    python dev/fmath/coefficients.py --check FILE       and checks that FILE (llmc/core/fmath.h) holds each of them
Needs mpmath. Deterministic: 240-bit arithmetic, coefficients rounded to double one by one.

The degrees are the smallest with which dev/fmath/prove.c finds no more misrounded inputs than with higher ones.
"""
import re
import sys

from mpmath import atanh, cos, cosh, erf, exp, expm1, floor, frexp, ldexp, log, lu_solve, matrix, mp, mpf, nint, pi
from mpmath import sin, sinh, sqrt, tanh

mp.prec = 240
TINY = mpf(2) ** -60  # stands for 0 where a formula divides by x
LN2 = log(mpf(2))
WIDER = mpf("1.0001")  # intervals, since a reduced argument may pass its bound by a rounding


def alternation(error, n):
    """indices of n extrema of the error curve with alternating signs"""
    extrema = []
    for i, e in enumerate(error):
        if extrema and (error[extrema[-1]] > 0) == (e > 0):
            if abs(e) > abs(error[extrema[-1]]):
                extrema[-1] = i
        else:
            extrema.append(i)
    while len(extrema) > n:  # drop the smaller end
        extrema.pop(0 if abs(error[extrema[0]]) < abs(error[extrema[-1]]) else -1)
    assert len(extrema) == n, f"{len(extrema)} extrema, expected {n}"
    return extrema


def chebyshev_grid(low, high, n=800):
    return [(low + high) / 2 - (high - low) / 2 * cos(pi * mpf(i) / n) for i in range(n + 1)]


def minimax(f, n, weight, low, high):
    """n coefficients c that minimise max |weight(x) (f(x) - sum c_i x^i)| over low..high, and that maximum"""
    x = [v for v in chebyshev_grid(low, high) if abs(v) > (high - low) / 2000]  # a weight may vanish at 0
    fx = [f(v) for v in x]
    w = [abs(weight(v)) for v in x]
    at = [round((len(x) - 1) * (i + 0.5) / (n + 1)) for i in range(n + 1)]
    for _ in range(20):
        a, b = matrix(n + 1, n + 1), matrix(n + 1, 1)
        for row, i in enumerate(at):
            for j in range(n):
                a[row, j] = w[i] * x[i] ** j
            a[row, n] = (-1) ** row
            b[row] = w[i] * fx[i]
        solution = lu_solve(a, b)
        c = [solution[j] for j in range(n)]
        error = [w[i] * (fx[i] - sum(c[j] * x[i] ** j for j in range(n))) for i in range(len(x))]
        at, worst = alternation(error, n + 1), max(abs(e) for e in error)
        if worst < abs(solution[n]) * mpf("1.001"):
            break
    return c, worst


def rational_minimax(f, n, m, low, high):
    """p (degree n) and q (degree m, q0 = 1) that minimise max |p(x) / q(x) / f(x) - 1| over low..high"""
    x = chebyshev_grid(low, high)
    fx = [f(v) for v in x]
    size = n + m + 2
    at = [round((len(x) - 1) * (i + 0.5) / size) for i in range(size)]
    q, level = [mpf(1)] + [mpf(0)] * m, mpf(0)
    for _ in range(20):
        for _ in range(8):  # p - f q (1 + sign * level) = 0 is bilinear in q and level: linearise and repeat
            a, b = matrix(size, size), matrix(size, 1)
            for row, i in enumerate(at):
                sign = (-1) ** row
                qx = sum(q[j] * x[i] ** j for j in range(m + 1))
                for j in range(n + 1):
                    a[row, j] = x[i] ** j / fx[i]
                for j in range(1, m + 1):
                    a[row, n + j] = -x[i] ** j * (1 + sign * level)
                a[row, size - 1] = -sign * qx
                b[row] = 1 + sign * level - sign * level * qx
            solution = lu_solve(a, b)
            p, q = [solution[j] for j in range(n + 1)], [mpf(1)] + [solution[n + j] for j in range(1, m + 1)]
            level = solution[size - 1]
        error = []
        for i in range(len(x)):
            px, qx = sum(p[j] * x[i] ** j for j in range(n + 1)), sum(q[j] * x[i] ** j for j in range(m + 1))
            error.append(px / qx / fx[i] - 1)
        at, worst = alternation(error, size), max(abs(e) for e in error)
        if worst < abs(level) * mpf("1.001"):
            break
    return p, q, worst


def rounded(v, n_bits=53):
    m, e = frexp(v)
    return ldexp(nint(ldexp(m, n_bits)), int(e) - n_bits)


def literal(v, n_bits=53):
    return float(rounded(v, n_bits)).hex()


def bits_between(v, first, last):
    """the bits of v with weights 2^-(first+1) .. 2^-last"""
    return (floor(ldexp(v, last)) - ldexp(floor(ldexp(v, first)), last - first)) * mpf(2) ** -last


def polynomials():
    """name -> (coefficients, error)"""
    root = lambda z: sqrt(max(z, TINY))  # z = r^2
    half = LN2 / 2 * WIDER
    out = {}
    # exp(r) = 1 + r + r^2 q(r), error relative to exp(r)
    out["exp"] = minimax(lambda r: (expm1(r) - r) / r**2, 9, lambda r: r**2 / exp(r), -half, half)
    # expm1(r) = r + r^2 q(r), error relative to expm1(r)
    out["expm1"] = minimax(lambda r: (expm1(r) - r) / r**2, 9, lambda r: r**2 / expm1(r), -half, half)
    # exp2(r) = 1 + r q(r), error relative to exp2(r)
    h = WIDER / 2
    out["exp2"] = minimax(lambda r: expm1(r * LN2) / r, 10, lambda r: r / exp(r * LN2), -h, h)
    # tanh(r) = r + r z q(z), |r| <= ln 2 / 4
    h = half / 2
    out["tanh"] = minimax(lambda z: (tanh(root(z)) / root(z) - 1) / max(z, TINY**2), 5,
                          lambda z: z * root(z) / tanh(root(z)), TINY, h * h)
    # cosh(r) = 1 + z q(z), sinh(r) = r + r z q(z), |r| <= ln 2 / 2
    out["cosh"] = minimax(lambda z: (cosh(root(z)) - 1) / z, 5, lambda z: z / cosh(root(z)), TINY, half * half)
    out["sinh"] = minimax(lambda z: (sinh(root(z)) / root(z) - 1) / z, 4,
                          lambda z: z * root(z) / sinh(root(z)), TINY, half * half)
    # log((1 + t) / (1 - t)) = 2 atanh(t) = t (2 + z q(z)), |t| <= (sqrt 2 - 1) / (sqrt 2 + 1)
    h = (sqrt(mpf(2)) - 1) / (sqrt(mpf(2)) + 1) * WIDER
    out["log"] = minimax(lambda z: (2 * atanh(root(z)) / root(z) - 2) / z, 6,
                         lambda z: z * root(z) / (2 * atanh(root(z))), TINY, h * h)
    # the same over ln 2: t q(z)
    out["log2"] = minimax(lambda z: 2 * atanh(root(z)) / root(z) / LN2, 7,
                          lambda z: LN2 * root(z) / (2 * atanh(root(z))), TINY, h * h)
    # sin(pi f) = f q(f^2), |f| <= 1/2
    h = WIDER / 2
    out["sin"] = minimax(lambda z: sin(pi * root(z)) / root(z), 9, lambda z: root(z) / sin(pi * root(z)), TINY, h * h)
    return out


def constants():
    """name -> (list of literals in the order of the polynomial, error or None)"""
    out = {name: ([literal(v) for v in c], worst) for name, (c, worst) in polynomials().items()}
    # erf(x) = x p(x^2) / q(x^2), 0 <= x <= 3.93: above, it rounds to 1
    end = (mpf("3.93") * WIDER) ** 2
    p, q, worst = rational_minimax(lambda z: erf(sqrt(z)) / sqrt(z), 10, 10, TINY, end)
    out["erf p"] = ([literal(v) for v in p], worst)
    out["erf q"] = ([literal(v) for v in q[1:]], worst)  # q0 = 1
    # ln 2 in two parts: the high one has 42 bits, so that k times it is exact for |k| < 2^11
    out["ln 2"] = ([literal(LN2, 42), literal(LN2 - rounded(LN2, 42))], None)
    out["1 / ln 2"] = ([literal(1 / LN2)], None)
    # 1/pi in chunks of 26 bits (times a float: exact), and four longer tails of 53 bits
    chunks = [bits_between(1 / pi, 1 + 26 * i, 27 + 26 * i) for i in range(6)]
    tails = [bits_between(1 / pi, 1 + 26 * i, 54 + 26 * i) for i in range(3, 7)]
    out["1 / pi"] = ([float(v).hex() for v in chunks + tails], None)
    return out


def main():
    missing = []
    header = open(sys.argv[2]).read() if len(sys.argv) == 3 and sys.argv[1] == "--check" else None
    held = {float.fromhex(v) for v in re.findall(r"0x[0-9a-f.]+p[+-]?[0-9]+", header or "")}
    for name, (literals, worst) in constants().items():
        print(name + ("" if worst is None else "  error 2^%.2f" % float(log(worst, 2))))
        for v in literals:
            print("   ", v)
            if header is not None and abs(float.fromhex(v)) not in held:
                missing.append(f"{name}: {v}")
    if missing:
        sys.exit("not in " + sys.argv[2] + ":\n" + "\n".join(missing))


if __name__ == "__main__":
    main()
