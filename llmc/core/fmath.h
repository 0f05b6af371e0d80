/*
Correctly rounded float32 functions: for every input the float nearest to the exact value, ties to even. So the result
does not depend on compiler, vector width, threads or device, and a reference in any language can have the same bits.
    fm_exp fm_exp2 fm_expm1 fm_log fm_log2 fm_log1p fm_tanh fm_cosh fm_sinh fm_sin fm_cos fm_erf      float -> float
    fm_tanh_cosh(x, &t, &c)  both of one x (the GELU backward needs both), for less than two calls
    fm_powi(base, n)         base^n, n >= 0, in double, for bias corrections; here the order of operations is the law
Special inputs as in C's Annex F: NaN, infinities, signed zeros, overflow, subnormal inputs and results.
-DSYSTEM_LIBM puts the C library's functions behind the same names: the build that equals upstream llm.c.

Method: in double, reduce the argument to a short interval, evaluate a minimax polynomial (for erf a quotient of two)
        and convert to float; every * / + - rounds once. There is no branch and no table: the ends of the range are
        selects. So gcc and clang at -O3 turn `for (i...) y[i] = fm_exp(x[i]);` into SSE2, AVX2 or AVX-512 code; gcc
        needs -fno-trapping-math, none needs a pragma. nvcc compiles the same lines.
Error:  the double is within 6 * 2^-53 relative (tanh 15, expm1 and sinh 20, cosh 10: their polynomials are as short as
        the proof allows). A float has 29 bits less, so rounding it is right unless the exact value is that close to the
        middle between two floats: a few inputs of 2^32. The 25 where it would go wrong stand in calls of fm_step_,
        which moves the result by one unit in the last place.
Proof:  dev/fmath/prove.c compares all 2^32 inputs of each function with MPFR; dev/fmath/proof.txt is what it printed.
        test_fmath.c checks a sample and the hardest inputs in every build. Constants: dev/fmath/coefficients.py.
Needs:  rounding to nearest and -ffp-contract=off (nvcc --fmad=false). Where a compiler fuses multiply-adds by itself
        some last bits change, no more; fm_exp asks for them where the CPU has them, and is proven with and without
        (fm_mad_). Reassociation (-ffast-math) would cancel the additions that round to whole numbers: it is refused.
Cost:   ns per element in a loop, one thread, Intel Sapphire Rapids class at 3.6 GHz, gcc 12 (dev/fmath/bench.c);
        libm: one call of the C library's float function (glibc 2.36).
                 AVX-512   AVX2   SSE2   libm                   AVX-512   AVX2   SSE2   libm
            exp       0.45   0.71   2.05   1.61     tanh           0.84   1.12   2.19   8.20
            exp2      0.64   0.93   1.89   1.52     cosh           0.81   1.13   2.25   4.01
            expm1     0.73   1.09   2.23   6.03     tanh_cosh      1.18   1.60   3.24  11.9
            log       0.90   1.20   2.43   1.88     sinh           0.87   1.29   2.55   8.61
            log2      0.74   1.02   2.05   1.85     sin, cos       1.6    3.1    5.9    2.2
            log1p     1.08   1.64   3.30   4.85     erf            1.01   1.30   2.69   8.43
*/
#ifndef LLMC_FMATH_H
#define LLMC_FMATH_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define FM_FUNCTION static inline __host__ __device__
#else  // a loop that calls a function is not vectorised: 2 ns for an exponential instead of 0.5
#define FM_FUNCTION static inline __attribute__((always_inline))
#endif

// base^n, n >= 0, by squaring in double: for the factors 1 - beta^t of AdamW
FM_FUNCTION double fm_powi(double base, int n) {
    double power = 1.0;
    for (; n > 0; n >>= 1) {
        if (n & 1) { power *= base; }
        base *= base;
    }
    return power;
}

#ifdef SYSTEM_LIBM  // ---- the C library's functions: the build that equals upstream llm.c ----

FM_FUNCTION float fm_exp(float x) { return expf(x); }
FM_FUNCTION float fm_exp2(float x) { return exp2f(x); }
FM_FUNCTION float fm_expm1(float x) { return expm1f(x); }
FM_FUNCTION float fm_log(float x) { return logf(x); }
FM_FUNCTION float fm_log2(float x) { return log2f(x); }
FM_FUNCTION float fm_log1p(float x) { return log1pf(x); }
FM_FUNCTION float fm_tanh(float x) { return tanhf(x); }
FM_FUNCTION float fm_cosh(float x) { return coshf(x); }
FM_FUNCTION float fm_sinh(float x) { return sinhf(x); }
FM_FUNCTION float fm_sin(float x) { return sinf(x); }
FM_FUNCTION float fm_cos(float x) { return cosf(x); }
FM_FUNCTION float fm_erf(float x) { return erff(x); }
FM_FUNCTION void fm_tanh_cosh(float x, float* tanh_x, float* cosh_x) {
    *tanh_x = tanhf(x);
    *cosh_x = coshf(x);
}

#else  // ---- ours: correctly rounded ----

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__)
#error "fmath.h: -ffast-math and -fassociative-math cancel the additions that round; use -ffp-contract=fast alone"
#endif

FM_FUNCTION uint64_t fm_bits_(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

FM_FUNCTION double fm_double_(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

// y moved away from zero by `ulps` units in the last place. For the inputs where the double lies on the wrong side of
// the middle between two floats, or just on it, so that the tie goes to the even float. Comparisons give 1 or 0.
FM_FUNCTION float fm_step_(float y, int ulps) {
    uint32_t u;
    memcpy(&u, &y, sizeof u);
    u += (uint32_t)ulps;
    memcpy(&y, &u, sizeof y);
    return y;
}

// ---- exponentials ----
// Out of range (|x| beyond about 700) the scale is nonsense: the selects at the end of each function replace the
// result.

// x = k * unit * ln 2 + r with k whole and |r| <= unit * ln(2) / 2. Returns r; *scale = 2^k. unit: 1 or 1/2.
// Adding 1.5 * 2^52 rounds to a whole number and leaves it in the low bits; 1023 more make these an exponent field.
// ln 2 has two parts: the first has 42 bits, so that k times it is exact.
FM_FUNCTION double fm_reduce_(double x, double unit, double* scale) {
    double shifted = x * (0x1.71547652b82fep+0 / unit) + (0x1.8p52 + 1023.0);
    double k = shifted - (0x1.8p52 + 1023.0);
    *scale = fm_double_(fm_bits_(shifted) << 52);
    return (x - k * (0x1.62e42fefa3800p-1 * unit)) - k * (0x1.ef35793c76730p-45 * unit);
}

// a * b + c: in one rounding where the CPU has fused multiply-add, else in two
#if defined(__FMA__) && !defined(__CUDACC__)
FM_FUNCTION double fm_mad_(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
FM_FUNCTION double fm_mad_(double a, double b, double c) { return a * b + c; }
#endif

// e^x = 2^k e^r, e^r = 1 + r + r^2 q(r); even and odd powers side by side make a chain of half the length. The argument
// is reduced as fm_reduce_ does. Both ways of fm_mad_ are proven: the float comes out the same
FM_FUNCTION float fm_exp(float x) {
    double shifted = fm_mad_((double)x, 0x1.71547652b82fep+0, 0x1.8p52 + 1023.0), k = shifted - (0x1.8p52 + 1023.0);
    double s = fm_double_(fm_bits_(shifted) << 52);
    double r = fm_mad_(k, -0x1.ef35793c76730p-45, fm_mad_(k, -0x1.62e42fefa3800p-1, (double)x)), z = r * r;
    double q = 0x1.27079df7763a0p-22;
    q = fm_mad_(z, q, fm_mad_(0x1.72e9287ff9c4ap-19, r, 0x1.a01b7c7165b09p-16));
    q = fm_mad_(z, q, fm_mad_(0x1.a0198d4c9b60cp-13, r, 0x1.6c16c0c81aae8p-10));
    q = fm_mad_(z, q, fm_mad_(0x1.11111125b6ff4p-7, r, 0x1.5555555589159p-5));
    q = fm_mad_(z, q, fm_mad_(0x1.55555555507b6p-3, r, 0x1.ffffffffffed2p-2));
    float y = (float)(s * (1.0 + fm_mad_(z, q, r)));
    y = x > 89.0f ? INFINITY : y;
    return x < -104.0f ? 0.0f : y;
}

// 2^x = 2^k 2^r with k whole; 2^r = 1 + r q(r), |r| <= 1/2
FM_FUNCTION float fm_exp2(float x) {
    double shifted = (double)x + (0x1.8p52 + 1023.0);
    double r = (double)x - (shifted - (0x1.8p52 + 1023.0)), z = r * r;
    double q = 0x1.b671c4367d530p-24 + 0x1.e3a902ca8478ep-28 * r;
    q = (0x1.ffcb58b938be6p-17 + 0x1.62c147b977bb1p-20 * r) + z * q;
    q = (0x1.5d87fe9b94686p-10 + 0x1.4309126befb6ap-13 * r) + z * q;
    q = (0x1.c6b08d703e153p-5 + 0x1.3b2ab6fbd6d8cp-7 * r) + z * q;
    q = (0x1.62e42fefa3a12p-1 + 0x1.ebfbdff82c431p-3 * r) + z * q;
    float y = (float)(fm_double_(fm_bits_(shifted) << 52) * (1.0 + r * q));
    y = fm_step_(y, (x == 0x1.853a6ep-9f) + (x == -0x1.e7526ep-6f));
    y = x > 128.0f ? INFINITY : y;
    return x < -151.0f ? 0.0f : y;
}

// e^x - 1 = 2^k (e^r - 1) + (2^k - 1), with a relative error of e^r - 1 that holds down to r = 0, where k = 0
FM_FUNCTION float fm_expm1(float x) {
    double s, r = fm_reduce_(x, 1.0, &s), z = r * r;
    double q = 0x1.27dc6e4802545p-22;
    q = (0x1.a01a78eff3221p-16 + 0x1.72da4190860d6p-19 * r) + z * q;
    q = (0x1.6c16c135915aep-10 + 0x1.a0199bff3a21bp-13 * r) + z * q;
    q = (0x1.5555555564b21p-5 + 0x1.1111112134aa5p-7 * r) + z * q;
    q = (0x1.fffffffffffbfp-2 + 0x1.5555555552264p-3 * r) + z * q;
    float y = (float)(s * (r + z * q) + (s - 1.0));
    y = x == 0.0f ? x : y;
    y = x > 89.0f ? INFINITY : y;
    return x < -18.0f ? -1.0f : y;
}

// tanh x = (e^2x - 1) / (e^2x + 1) with e^2x = 2^k (1 + t) / (1 - t), where x = k ln(2) / 2 + r and t = tanh r
FM_FUNCTION float fm_tanh(float x) {
    double s, r = fm_reduce_(x, 0.5, &s), z = r * r, w = z * z;
    double q = -0x1.183d748e7458bp-7;
    q = (-0x1.ba1b506521753p-5 + 0x1.6624a2b87b819p-6 * z) + w * q;
    q = (-0x1.555555554c262p-2 + 0x1.111110ef2af62p-3 * z) + w * q;
    double t = r + (r * z) * q;
    double a = s + 1.0, b = s - 1.0;
    float y = (float)((t * a + b) / (t * b + a));
    y = x == 0.0f ? x : y;
    y = x > 10.0f ? 1.0f : y;
    return x < -10.0f ? -1.0f : y;
}

// 2 sinh x (returned) and 2 cosh x. From e^x = 2^k e^r: 2 cosh x = cosh(r) (2^k + 2^-k) + sinh(r) (2^k - 2^-k), and
// 2 sinh x has the two brackets exchanged
FM_FUNCTION double fm_sinh_cosh_(double x, double* cosh2) {
    double s, r = fm_reduce_(x, 1.0, &s), z = r * r;
    double c = 0x1.28affc78b7241p-22;
    c = 0x1.a01996e8e4cc2p-16 + z * c;
    c = 0x1.6c16c18587abcp-10 + z * c;
    c = 0x1.55555555500bbp-5 + z * c;
    c = 0x1.000000000000bp-1 + z * c;
    c = 1.0 + z * c;
    double h = 0x1.72da596f84fffp-19;
    h = 0x1.a0199be9b3652p-13 + z * h;
    h = 0x1.111111213a702p-7 + z * h;
    h = 0x1.5555555552249p-3 + z * h;
    h = r + (r * z) * h;
    double inverse = fm_double_(0x7fe0000000000000u - fm_bits_(s));  // 2^-k
    double a = s + inverse, b = s - inverse;
    *cosh2 = c * a + h * b;
    return h * a + c * b;
}

FM_FUNCTION float fm_cosh(float x) {
    double c;
    fm_sinh_cosh_(x, &c);
    float y = (float)(0.5 * c);
    return fabsf(x) > 90.0f ? INFINITY : y;
}

FM_FUNCTION float fm_sinh(float x) {
    double c;
    float y = (float)(0.5 * fm_sinh_cosh_(x, &c));
    y = fm_step_(y, -(fabsf(x) == 0x1.250bfep-11f));
    y = x == 0.0f ? x : y;
    y = x > 90.0f ? INFINITY : y;
    return x < -90.0f ? -INFINITY : y;
}

// the bits of fm_tanh and fm_cosh, from one evaluation
FM_FUNCTION void fm_tanh_cosh(float x, float* tanh_x, float* cosh_x) {
    double c, h = fm_sinh_cosh_(x, &c);
    float t = (float)(h / c), y = (float)(0.5 * c);
    *cosh_x = fabsf(x) > 90.0f ? INFINITY : y;
    t = x == 0.0f ? x : t;
    t = x > 10.0f ? 1.0f : t;
    *tanh_x = x < -10.0f ? -1.0f : t;
}

// ---- logarithms ----

// x = 2^e m with m in [sqrt(1/2), sqrt(2)), for finite x > 0: every float is a normal double. Returns e.
// The exponent field becomes the low bits of a double of value 2^52 + field.
FM_FUNCTION double fm_split_(double x, double* m) {
    const uint64_t one = 0x3ff0000000000000u, root_half = 0x3fe6a09e00000000u, mantissa = 0x000fffffffffffffu;
    uint64_t u = fm_bits_(x) + (one - root_half);
    *m = fm_double_((u & mantissa) + root_half);
    return fm_double_((u >> 52) | 0x4330000000000000u) - (0x1p52 + 1023.0);
}

// log(1 + f) = 2 atanh(t) = t (2 + t^2 q(t^2)), t = f / (2 + f), for 1 + f in [sqrt(1/2), sqrt(2)]
FM_FUNCTION double fm_log1p_(double f) {
    double t = f / (2.0 + f), z = t * t, w = z * z;
    double q = 0x1.732c3191eefc8p-3 + 0x1.58772aa320b8ap-3 * z;
    q = (0x1.24924178fc9bfp-2 + 0x1.c722778cc5a8ap-3 * z) + w * q;
    q = (0x1.5555555553972p-1 + 0x1.999999a290e9dp-2 * z) + w * q;
    return t * (2.0 + z * q);
}

// log x = e ln 2 + log m
FM_FUNCTION float fm_log(float x) {
    double m, e = fm_split_(x, &m);
    float y = (float)(e * 0x1.62e42fefa3800p-1 + (e * 0x1.ef35793c76730p-45 + fm_log1p_(m - 1.0)));
    y = fm_step_(y, (x == 0x1.bacb4ap+25f) + (x == 0x1.b121a6p+76f) + (x == 0x1.6351d8p+95f) - (x == 0x1.827a74p-7f) -
                        (x == 0x1.2f1fd6p+3f));
    y = x < INFINITY ? y : x;  // also where x is NaN
    y = x < 0.0f ? NAN : y;
    return x == 0.0f ? -INFINITY : y;
}

FM_FUNCTION float fm_log1p(float x) {
    double m, e = fm_split_(1.0 + (double)x, &m);
    double f = e == 0.0 ? (double)x : m - 1.0;  // 1 + x may round, x does not
    float y = (float)(e * 0x1.62e42fefa3800p-1 + (e * 0x1.ef35793c76730p-45 + fm_log1p_(f)));
    y = fm_step_(y, (x == -0x1.1d9188p-9f) + (x == 0x1.800006p-21f) + (x == 0x1.200036p-17f) + (x == 0x1.b121a6p+76f) +
                        (x == 0x1.6351d8p+95f) - (x == -0x1.7ffffap-21f) - (x == -0x1.1fffcap-17f) -
                        (x == 0x1.0f1fd6p+3f));
    y = x < INFINITY ? y : x;
    y = x < -1.0f ? NAN : y;
    y = x == -1.0f ? -INFINITY : y;
    return x == 0.0f ? x : y;
}

// log2 x = e + t q(t^2), t = (m - 1) / (m + 1)
FM_FUNCTION float fm_log2(float x) {
    double m, e = fm_split_(x, &m), t = (m - 1.0) / (m + 1.0), z = t * t, w = z * z;
    double q = 0x1.f18d7d1b30a96p-3;
    q = (0x1.484fafb9b3b2dp-2 + 0x1.0bb7579dc0898p-2 * z) + w * q;
    q = (0x1.2776c516b9854p-1 + 0x1.a617566798705p-2 * z) + w * q;
    q = (0x1.71547652b82ffp+1 + 0x1.ec709dc39c8fdp-1 * z) + w * q;
    float y = (float)(e + t * q);
    y = x < INFINITY ? y : x;
    y = x < 0.0f ? NAN : y;
    return x == 0.0f ? -INFINITY : y;
}

// ---- sine, cosine, error function ----

// x / pi + half = n + f with n whole, |f| < 0.51, for x >= 0. Returns f; *odd has its top bit set where n is odd.
// 1/pi comes in pieces of 26 bits, whose products with a float are exact, and a tail of 53 bits. Only n mod 2 matters,
// so c0..c3 start at bit 1, 27, 53 or 79 of 1/pi, behind the pieces that give a large x even numbers: every product
// stays below 2^51. Without its whole part their sum is exact when it is small, so f has a relative error near 2^-53
// always.
FM_FUNCTION double fm_reduce_pi_(double x, double half, uint64_t* odd) {
    const double whole = 0x1.8p52;  // adding it rounds to a whole number and leaves that in the low bits
    double c0 = x < 0x1p51    ? 0x1.45f3068000000p-2
                : x < 0x1p77  ? 0x1.7272208000000p-28
                : x < 0x1p103 ? 0x1.4a7f090000000p-55
                              : 0x1.abe8fa8000000p-80;
    double c1 = x < 0x1p51    ? 0x1.7272208000000p-28
                : x < 0x1p77  ? 0x1.4a7f090000000p-55
                : x < 0x1p103 ? 0x1.abe8fa8000000p-80
                              : 0x1.a6ee060000000p-108;
    double c2 = x < 0x1p51    ? 0x1.4a7f090000000p-55
                : x < 0x1p77  ? 0x1.abe8fa8000000p-80
                : x < 0x1p103 ? 0x1.a6ee060000000p-108
                              : 0x1.b629590000000p-133;
    double c3 = x < 0x1p51    ? 0x1.abe8fa9a6ee06p-80
                : x < 0x1p77  ? 0x1.a6ee06db14accp-108
                : x < 0x1p103 ? 0x1.b6295993c4390p-133
                              : 0x1.278872083fca2p-158;
    double p0 = x * c0 + half, p1 = x * c1, p2 = x * c2;
    double n0 = p0 + whole, n1 = p1 + whole;
    double f = (p0 - (n0 - whole)) + (p1 - (n1 - whole));
    double n2 = (f + p2) + whole;
    *odd = (fm_bits_(n0) + fm_bits_(n1) + fm_bits_(n2)) << 63;
    f = f - (n2 - whole);
    double sum = f + p2;
    return sum + (x * c3 + (p2 - (sum - f)));  // p2 - (sum - f): what the sum lost
}

// sin(pi f) for |f| < 0.51, negated where odd
FM_FUNCTION double fm_sinpi_(double f, uint64_t odd) {
    double z = f * f, w = z * z;
    double q = 0x1.9d18ef25d942ap-21;
    q = (0x1.e8f35e08d63cbp-12 - 0x1.6f79616fb6104p-16 * z) + w * q;
    q = (0x1.5078348514a4cp-4 - 0x1.e3074ddaff705p-8 * z) + w * q;
    q = (0x1.466bc6775aa6cp+1 - 0x1.32d2cce62749cp-1 * z) + w * q;
    q = 0x1.921fb54442d18p+1 + z * (-0x1.4abbce625be52p+2 + z * q);
    return fm_double_(fm_bits_(f * q) ^ odd);
}

FM_FUNCTION float fm_sin(float x) {
    uint64_t odd;
    float ax = fabsf(x);
    double f = fm_reduce_pi_(ax, 0.0, &odd);
    float y = (float)fm_sinpi_(f, odd);
    y = fm_step_(y, (ax == 0x1.95f654p+44f) + (ax == 0x1.524856p+80f));
    y = x < 0.0f ? -y : y;
    return x == 0.0f ? x : y;
}

FM_FUNCTION float fm_cos(float x) {
    uint64_t odd;
    float ax = fabsf(x);
    double f = fm_reduce_pi_(ax, 0.5, &odd);
    float y = (float)fm_sinpi_(f, odd);
    return fm_step_(y, (ax == 0x1.2b9622p+67f) - (ax == 0x1.3170fp+63f));
}

// erf x = x p(x^2) / q(x^2) up to 3.93, beyond which it rounds to 1
FM_FUNCTION float fm_erf(float x) {
    double z = (double)x * (double)x, w = z * z;
    double p = -0x1.706868e6eb747p-45;
    p = (0x1.352c00b4cb543p-30 - 0x1.e7f102d8a3f45p-39 * z) + w * p;
    p = (0x1.d60153becdbc4p-20 + 0x1.5931c79f18ca9p-25 * z) + w * p;
    p = (0x1.3875190c63effp-11 + 0x1.ce74816c1dea9p-16 * z) + w * p;
    p = (0x1.de39fd4c8442dp-5 + 0x1.35420e27bb807p-8 * z) + w * p;
    p = (0x1.20dd750429b6dp+0 + 0x1.7c71be83f1523p-3 * z) + w * p;
    double q = -0x1.fbc3c5989d2aap-41;
    q = (0x1.ef140e6575975p-28 + 0x1.5d997d5218947p-34 * z) + w * q;
    q = (0x1.eca96bff415c9p-18 + 0x1.335a206f248dfp-22 * z) + w * q;
    q = (0x1.d670380fb8047p-10 + 0x1.194204a764199p-13 * z) + w * q;
    q = (0x1.e2316bbea474ep-4 + 0x1.1dad19c5fc86bp-6 * z) + w * q;
    q = (1.0 + 0x1.fde9d004da076p-2 * z) + w * q;
    float y = (float)((double)x * (p / q));
    y = x > 3.93f ? 1.0f : y;
    return x < -3.93f ? -1.0f : y;
}

#endif  // SYSTEM_LIBM
#endif  // LLMC_FMATH_H
