"""
Holds exact.madd against the C library's fmaf, bit by bit. NumPy and a C compiler.

    python dev/ref/check_madd.py                      two million triples, seconds: part of make test
    python dev/ref/check_madd.py --triples 100000000  half a minute

A fifth of the triples are random bits: every exponent, subnormals, infinities, NaN (any NaN equals any). The others are
made to be hard to round: c lies within a few last places of -a b, so that the sum is what the product's rounding leaves;
a b is a tie between two floats, and a small c decides; c is a b scaled; or the result is subnormal.
"""
import argparse
import ctypes
import os
import subprocess
import tempfile

import numpy as np

import exact
from exact import F4, F8

SOURCE = """
#include <math.h>
void fmaf_all(float* out, const float* a, const float* b, const float* c, long n) {
    for (long i = 0; i < n; i++) { out[i] = fmaf(a[i], b[i], c[i]); }
}
"""
CHUNK = 1 << 20


def load_fmaf(folder):
    """fmaf over arrays, as the compiler's machine has it."""
    source, library = os.path.join(folder, "fmaf.c"), os.path.join(folder, "fmaf.so")
    with open(source, "w") as file:
        file.write(SOURCE)
    subprocess.run([os.environ.get("CC", "gcc"), "-O2", "-ffp-contract=off", "-shared", "-fPIC", source, "-o", library, "-lm"],
                   check=True)
    function = ctypes.CDLL(library).fmaf_all
    pointer = np.ctypeslib.ndpointer(F4, flags="C_CONTIGUOUS")
    function.argtypes, function.restype = [pointer, pointer, pointer, pointer, ctypes.c_long], None
    return function


def random_floats(rng, n, low, high):
    """Any significand, either sign, exponents low .. high - 1."""
    x = np.ldexp(1 + rng.integers(0, 1 << 23, n) / 2.0 ** 23, rng.integers(low, high, n))
    return (x * rng.choice([-1.0, 1.0], n)).astype(F4)


def odd_numbers(rng, n, bits):
    """Of so many bits: the product of 12 and 13 of them has 25, often a tie between two floats."""
    return (rng.integers(1 << bits - 1, 1 << bits, n) | 1).astype(F4)


def triples(rng, n):
    """Five kinds in turn, n of each."""
    def bits():
        return rng.integers(0, 1 << 32, n, dtype=np.uint32).view(F4)
    yield bits(), bits(), bits()
    a, b = random_floats(rng, n, -30, 30), random_floats(rng, n, -30, 30)
    cancelling = (-(a.astype(F8) * b.astype(F8))).astype(F4).view(np.int32) + rng.integers(-3, 4, n, dtype=np.int32)
    yield a, b, cancelling.view(F4)
    yield odd_numbers(rng, n, 12), odd_numbers(rng, n, 13), random_floats(rng, n, -70, 0)
    a, b = random_floats(rng, n, -30, 30), random_floats(rng, n, -30, 30)
    yield a, b, np.ldexp((a.astype(F8) * b.astype(F8)).astype(F4), rng.integers(-50, 51, n)).astype(F4)
    a, b = random_floats(rng, n, -80, -55), random_floats(rng, n, -80, -55)
    yield a, b, np.ldexp(random_floats(rng, n, 0, 1), rng.integers(-150, -110, n)).astype(F4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--triples", type=int, default=2_000_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, done, wrong, plain = np.random.default_rng(options.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        fmaf_all = load_fmaf(folder)
        while done < options.triples:
            for a, b, c in triples(rng, min(CHUNK, max(1, options.triples // 5))):
                want = np.empty_like(a)
                fmaf_all(want, a, b, c, len(a))
                found, cast = exact.madd(a, b, c), (a.astype(F8) * b.astype(F8) + c.astype(F8)).astype(F4)
                differs = (found.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(found) & np.isnan(want))
                for i in np.flatnonzero(differs)[:3]:
                    print(f"madd({a[i].hex()}, {b[i].hex()}, {c[i].hex()}): found {found[i].hex()}, expected {want[i].hex()}")
                wrong, done = wrong + int(differs.sum()), done + len(a)
                plain += int(((cast != want) & ~np.isnan(want)).sum())
    print(f"{done} triples, {wrong} differ; a cast of the float64 sum would be wrong for {plain}")
    kept = [wrong == 0, plain > 0]  # the triples are hard enough to show a careless madd
    print(f"{sum(kept)} passed, {2 - sum(kept)} failed")
    return int(not all(kept))


if __name__ == "__main__":
    raise SystemExit(main())
