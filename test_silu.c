/*
Promises of llmc/ops/silu.h and llmc/ops/softplus.h, which follow from the tables (llmc/test/op.h), of softplus also on
every kind of float; both are frozen expressions. The gate has kernels, softplus has none.
*/
#include "llmc/ops/silu.h"
#include "llmc/ops/softplus.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

// every 4099th float (a prime): all exponents, both signs, subnormals, Inf and NaN, about a million numbers
static float* all_kinds(size_t* n) {
    *n = 0x100000000 / 4099 + 1;
    float* x = filled_array(*n, 0.0f);
    for (size_t i = 0; i < *n; i++) { x[i] = float_from_bits((uint32_t)(i * 4099)); }
    return x;
}

#ifndef __CUDACC__  // ---- softplus ----

enum { INP, OUT, DOUT, DINP };

static void softplus_ref(float* const* a, const int* d) { softplus_forward_ref(a[OUT], a[INP], (size_t)d['n']); }

static void softplus_fast(float* const* x, float* const* a, const int* d, const Device* dev) {
    softplus_forward(a[OUT], a[INP], (size_t)d['n'], dev);
}

static void softplus_slope_ref(float* const* a, const int* d) {
    softplus_backward_ref(a[DINP], a[DOUT], a[OUT], (size_t)d['n']);
}

static void softplus_slope(float* const* x, float* const* a, const int* d, const Device* dev) {
    softplus_backward(a[DINP], a[DOUT], a[OUT], (size_t)d['n'], dev);
}

static void softplus_double(double* const* a, const int* d) {
    for (int i = 0; i < d['n']; i++) { a[OUT][i] = log1p(exp(a[INP][i])); }
}

static double softplus_error(int array, const int* d) {
    (void)d;
    return array == OUT ? 0x1p-23 * 8.0 : 4 * 0x1p-24;  // softplus.h; 2^-23 of the slope below 1, and the product
}

static const int lengths[][OP_DIMS] = {{1}, {7}, {16}, {33}, {255}, {257}, {1009}, {4096}, {0}};

static const Op softplus = {
    .name = "softplus", .dims = "n",
    .arrays = {
        {INP, "inp", "n", GIVEN, 8.0f},
        {OUT, "out", "n", MADE, 0.0f, NULL, "inp"},
        {DOUT, "dout", "n", GIVEN, 1.0f},
        {DINP, "dinp", "n", GRADIENT, 0.0f, NULL, "dout"},
    },
    .shapes = lengths, .traits = ANYWHERE | ROWS,
    .forward_ref = softplus_ref, .forward = {softplus_fast},
    .backward_ref = softplus_slope_ref, .backward = {softplus_slope},
    .in_double = softplus_double, .error = softplus_error, .judged = {{257}},
};

static void test_all_kinds(Test* t) {
    size_t n;
    float* x = all_kinds(&n);
    const int shape[] = {(int)n};
    OpProblem p = op_problem(&softplus, shape, MANY_SPECIALS, 0);
    memcpy(p.a[INP], x, sizeof(float) * n);
    op_solve(&p);
    for (int i = 0; i < N_TEST_THREADS; i += 3) {
        Device dev = test_device(test_threads(i));
        op_check(t, &p, 0, &dev);
        op_check(t, &p, 1, &dev);
        device_free(&dev);
    }
    free(x);
    op_problem_free(&p);
}
#endif

// ---- the gate: z and dz are the right parts of rows of S and D floats; beside dz nothing may change ----

enum { Y, Z, GATED, DGATED, DY, DZ };

static void gate_ref(float* const* a, const int* d) {
    const int C = d['C'], S = d['S'];
    gate_forward_ref(a[GATED], a[Y], a[Z] + S - C, (size_t)S, d['N'], C);
}

OP_STORED(X)
static void gate_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    const int C = d['C'], S = d['S'];
    gate_forward(x[GATED], x[Y], x[Z] + S - C, (size_t)S, d['N'], C, dev);
}

static void gate_slope_ref(float* const* a, const int* d) {
    const int C = d['C'], S = d['S'], D = d['D'];
    gate_backward_ref(a[DY], a[DZ] + D - C, (size_t)D, a[DGATED], a[Y], a[Z] + S - C, (size_t)S, d['N'], C);
}

OP_STORED(X)
static void gate_slope(X* const* x, float* const* a, const int* d, const Device* dev) {
    const int C = d['C'], S = d['S'], D = d['D'];
    gate_backward(x[DY], x[DZ] + D - C, (size_t)D, x[DGATED], x[Y], x[Z] + S - C, (size_t)S, d['N'], C, dev);
}

static void gate_double(double* const* a, const int* d) {  // S is C
    for (int i = 0; i < d['N'] * d['C']; i++) { a[GATED][i] = a[Y][i] * a[Z][i] / (1.0 + exp(-a[Z][i])); }
}

static double gate_error(int array, const int* d) {
    (void)d;
    // 4 roundings of values below 8; the slope is within (4 + |z|) 2^-24 (silu.h), and two products
    return array == DZ ? (4 + 8 + 2) * 0x1p-24 : 4 * 0x1p-24 * 8.0;
}

static const int gate_shapes[][OP_DIMS] = {  // N, C, S, D
    {1, 1, 2, 2}, {1, 7, 15, 15}, {7, 1, 4, 4}, {7, 33, 66, 66}, {33, 7, 15, 15}, {3, 257, 516, 516}, {257, 16, 32, 32},
    {1, 1, 2, 1}, {1, 7, 15, 7}, {7, 1, 4, 1}, {7, 33, 66, 33}, {33, 7, 15, 7}, {3, 257, 516, 257}, {257, 16, 32, 16},
    // packs of kernels: rows of z or of dz alone that they do not divide, and rows longer than a block has threads
    {9, 24, 24, 24}, {9, 24, 28, 48}, {9, 24, 48, 28}, {1, 2064, 2064, 2064},
    {0},
};

// What fast kernels may be apart: |y|, |dgated| <= 1, |z| <= 8. The hardware's exponential is 2 + 1.2 |z| units of the
// last place off, its division 2, and three roundings follow: silu, below 8, is off by 16 of them, its slope with |z|
// more of s, and the result rounds once more
static double gate_apart(const OpProblem* p, int array, size_t i) {
    (void)p, (void)i;
    return array == DZ ? (16 + 8 * 16) * 0x1p-23 : 8 * 17 * 0x1p-23;
}

static const Op gate = {
    .name = "gate", .dims = "NCSD",
    .arrays = {
        {Y, "y", "NC", GIVEN, 1.0f},
        {Z, "z", "NS", GIVEN, 8.0f},
        {GATED, "gated", "NC", MADE, 0.0f, NULL, "y"},
        {DGATED, "dgated", "NC", GIVEN, 1.0f},
        {DY, "dy", "NC", GRADIENT, 0.0f, NULL, "dgated y"},
        {DZ, "dz", "ND", GRADIENT | PARTLY, 1.0f, NULL, "z"},
    },
    .shapes = gate_shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = gate_ref, .forward = OP_FAST(gate_fast), .backward_ref = gate_slope_ref,
    .backward = OP_FAST(gate_slope), .in_double = gate_double, .error = gate_error, .judged = {{16, 17, 17, 17}},
    .apart = gate_apart,
};

// ---- the expressions themselves ----

// silu.h's formulas, one operation per line
static void test_frozen(Test* t) {
    size_t n;
    float *x = all_kinds(&n), *got = filled_array(n, NAN), *want = filled_array(n, 77.0f);
    for (size_t i = 0; i < n; i++) {
        float below = 1.0f + fm_exp(-x[i]);
        want[i] = x[i] / below;
        got[i] = silu_one(x[i]);
    }
    check_bits(t, "silu", got, want, n);
    for (size_t i = 0; i < n; i++) {
        float below = 1.0f + fm_exp(-x[i]), s = 1.0f / below, rest = 1.0f - s;
        rest = x[i] * rest;
        rest = 1.0f + rest;
        want[i] = s * rest;
        got[i] = silu_slope_one(x[i]);
    }
    check_bits(t, "slope of silu", got, want, n);
    for (size_t i = 0; i < n; i++) {
        float e = fm_exp(x[i]);
        want[i] = x[i] > 20.0f ? x[i] : fm_log1p(e);
    }
    softplus_forward_ref(got, x, n);
    check_bits(t, "softplus", got, want, n);
    for (size_t i = 0; i < n; i++) {
        float less = fm_expm1(-x[i]);
        want[i] = -less;
        got[i] = softplus_slope_one(x[i]);
    }
    check_bits(t, "slope of softplus", got, want, n);
    free(x), free(got), free(want);
}

// computed once with NumPy's float32, one operation at a time, exp, log1p and expm1 in double and rounded
static void test_known(Test* t) {
#ifdef SYSTEM_LIBM
    skip(t, "the parity build takes expf from the C library");
#else
    const uint32_t known[][5] = {  // x, silu, its slope, softplus, its slope from the output
        {0xc1480000, 0xb843621b, 0xb833c078, 0x367a174b, 0x367a172c},
        {0xc0400000, 0xbe11b139, 0xbdb46fec, 0x3d470387, 0x3d4241a1},
        {0xbfa39581, 0xbe8e92e7, 0x38d440c0, 0x3e7ba8c4, 0x3e5f1ec8},
        {0xbe800000, 0xbde02a67, 0x3ec0a915, 0x3f1370c4, 0x3ee02a67},
        {0x3dcccccd, 0x3d57080f, 0x3f0cc758, 0x3f3e90c8, 0x3f066509},
        {0x3f800000, 0x3f3b26a8, 0x3f6d7bd1, 0x3fa818f5, 0x3f3b26a7},
        {0x4089999a, 0x4087c20a, 0x3f858e55, 0x408a0802, 0x3f7c92ad},
        {0x419f3333, 0x419f3333, 0x3f800000, 0x419f3333, 0x3f800000},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        float x = float_from_bits(known[i][0]), y = softplus_one(x);
        float got[4] = {silu_one(x), silu_slope_one(x), y, softplus_slope_one(y)}, want[4];
        for (int j = 0; j < 4; j++) { want[j] = float_from_bits(known[i][1 + j]); }
        check_bits(t, "silu, slope, softplus, slope", got, want, 4);
    }
#endif
}

static void test_obvious(Test* t) {
    check(t, silu_one(0.0f) == 0.0f && silu_slope_one(0.0f) == 0.5f, "silu at 0 is 0, its slope 1/2");
    check(t, silu_one(100.0f) == 100.0f && silu_slope_one(100.0f) == 1.0f, "silu is x far right");
    check(t, float_bits(silu_one(-1e30f)) == 0x80000000 && silu_slope_one(-1e30f) == 0.0f, "silu is -0 far left");
    check(t, softplus_one(20.5f) == 20.5f && softplus_one(INFINITY) == INFINITY, "softplus is x far right");
    check(t, softplus_one(-INFINITY) == 0.0f, "softplus is 0 far left");
    check(t, isnan(softplus_one(NAN)) && isnan(silu_one(NAN)), "NaN stays NaN");
    check(t, softplus_slope_one(25.0f) == 1.0f && softplus_slope_one(0.0f) == 0.0f,
          "slope of softplus: 1 far right, 0 far left");
    float below = softplus_one(20.0f), above = softplus_one(float_from_bits(float_bits(20.0f) + 1));
    check(t, below == 20.0f && above > below, "softplus has no jump at 20: %.9g, %.9g", (double)below, (double)above);
}

int main(int argc, char** argv) {
    const Op* ops[] = {
        &gate,
#ifndef __CUDACC__
        &softplus,
#endif
    };
    const Promise promises[] = {
#ifndef __CUDACC__
        {"all kinds", "softplus equals the plain loops on every 4099th float, Inf and NaN among them", test_all_kinds},
#endif
        {"frozen", "the plain loops are the expressions of the specification, bit for bit", test_frozen},
        {"known", "eight values and slopes have the bits that NumPy gives", test_known},
        {"obvious", "what 0, far left, far right and NaN give; no jump at the threshold", test_obvious},
    };
    return op_main(argc, argv, ops, sizeof ops / sizeof *ops, promises, sizeof promises / sizeof *promises);
}
