/*
Promises of llmc/ops/gelu.h, which follow from the table (llmc/test/op.h), also on every kind of float; its value and
slope are frozen expressions. Fast builds for GPUs keep the tolerances that llmc/ops/gelu.h derives.
*/
#include "llmc/ops/gelu.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

enum { INP, OUT, DOUT, DINP };

static void forward_ref(float* const* a, const int* d) { gelu_forward_ref(a[OUT], a[INP], (size_t)d['n']); }
static void backward_ref(float* const* a, const int* d) { gelu_backward_ref(a[DINP], a[INP], a[DOUT], (size_t)d['n']); }

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    gelu_forward(x[OUT], x[INP], (size_t)d['n'], dev);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    gelu_backward(x[DINP], x[INP], x[DOUT], (size_t)d['n'], dev);
}

// with the true sqrt(2 / pi)
static void in_double(double* const* a, const int* d) {
    for (int i = 0; i < d['n']; i++) {
        double x = a[INP][i];
        a[OUT][i] = 0.5 * x * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
    }
}

static double error(int array, const int* d) {
    (void)d;
    // |out| <= 6; u < 13 carries 6 roundings, damped by tanh' = sech^2 where u is large: together below 8 roundings of
    // 4. The slope is below 1.2; its second term x sech^2(u) u' is below 2, sech^2 carries twice u's relative error
    // times u
    return array == OUT ? 8 * 0x1p-24 * 4.0 : 32 * 0x1p-24;
}

// derived in llmc/ops/gelu.h; 2^-126: the hardware may flush subnormals
static double apart(const OpProblem* p, int array, size_t i) {
    double of = array == OUT ? 0x1p-20 * (1.0 + (double)fabsf(p->a[INP][i])) : 0x1p-18 * (double)fabsf(p->a[DOUT][i]);
    return of + 0x1p-126;
}

static const int shapes[][OP_DIMS] = {{1}, {7}, {8}, {16}, {33}, {257}, {1009}, {4096}, {0}};

static const Op gelu = {
    .name = "gelu", .dims = "n",
    .arrays = {
        {INP, "inp", "n", GIVEN, 6.0f},
        {OUT, "out", "n", MADE},
        {DOUT, "dout", "n", GIVEN, 1.0f},
        {DINP, "dinp", "n", GRADIENT, 0.0f, NULL, "dout"},
    },
    .shapes = shapes, .traits = ANYWHERE | ROWS,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{257}}, .apart = apart,
};

// ---- every kind of float ----

// every 4099th float (a prime): all exponents, both signs, subnormals, Inf and NaN, about a million numbers
static const int all_kinds_shape[] = {0x100000000 / 4099 + 1};

static OpProblem all_kinds(void) {
    OpProblem p = op_problem(&gelu, all_kinds_shape, HARD, 0);
    for (int i = 0; i < p.d['n']; i++) { p.a[INP][i] = float_from_bits((uint32_t)i * 4099); }
    // Inf times a slope near 0 is Inf or NaN, as the slope rounds
    if (!FAST_KERNELS) { sprinkle(p.a[DOUT], (size_t)p.d['n'], 100, 4); }
    op_solve(&p);
    return p;
}

static void test_all_kinds(Test* t) {
    OpProblem p = all_kinds();
    for (int i = 0; i < N_TEST_THREADS; i += 3) {
        Device dev = test_device(test_threads(i));
        op_check(t, &p, 0, &dev);
        op_check(t, &p, 1, &dev);
        device_free(&dev);
    }
    op_problem_free(&p);
}

// ---- the expressions themselves ----

// gelu.h's formulas, one operation per line
static float spelled_value(float x) {
    float cube = 0.044715f * x;
    cube = cube * x;
    cube = cube * x;
    float u = float_from_bits(0x3f4c4229) * (x + cube);
    float one_plus = 1.0f + fm_tanh(u), half_x = 0.5f * x;
    return half_x * one_plus;
}

static float spelled_slope(float x) {
    float cube = 0.044715f * x;
    cube = cube * x;
    cube = cube * x;
    float k = float_from_bits(0x3f4c4229), u = k * (x + cube), th = fm_tanh(u), ch = fm_cosh(u);
    float square = ch * ch, sech2 = 1.0f / square, left = 1.0f + th;
    float inner = float_from_bits(0x3e095d4e) * x;
    inner = inner * x;
    inner = 1.0f + inner;
    float right = x * 0.5f;
    right = right * sech2;
    right = right * k;
    right = right * inner;
    left = 0.5f * left;
    return left + right;
}

static void test_frozen(Test* t) {
    OpProblem p = all_kinds();
    size_t n = (size_t)p.d['n'];
    float* want = filled_array(n, 77.0f);
    for (size_t i = 0; i < n; i++) { want[i] = spelled_value(p.a[INP][i]); }
    check_bits(t, "value", p.a[OUT], want, n);
    for (size_t i = 0; i < n; i++) { want[i] = p.a[DOUT][i] * spelled_slope(p.a[INP][i]); }
    check_bits(t, "slope", p.a[DINP], want, n);
    free(want);
    op_problem_free(&p);
}

// computed once with NumPy's float32, one operation at a time, tanh and cosh in double and rounded
static void test_known(Test* t) {
#ifdef SYSTEM_LIBM
    skip(t, "the parity build takes tanhf and coshf from the C library");
#else
    const uint32_t known[][3] = {  // x, value, slope
        {0xc0400000, 0xbb6e6200, 0xbc3dcb78}, {0xbfd9999a, 0xbd9b6e5c, 0xbded64a6},
        {0xbf000000, 0xbe1dfd26, 0x3e07d032}, {0x3dcccccd, 0x3d5d1d05, 0x3f145b8a},
        {0x3f666666, 0x3f3bf665, 0x3f870c71}, {0x3f800000, 0x3f57585c, 0x3f8a9e92},
        {0x40200000, 0x401f08dc, 0x3f84db99}, {0x4089999a, 0x4089997a, 0x3f8002b3},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        float x = float_from_bits(known[i][0]), one = 1.0f, value, slope;
        gelu_forward_ref(&value, &x, 1);
        gelu_backward_ref(&slope, &x, &one, 1);
        check(t, float_bits(value) == known[i][1], "value at %g: found %08x", (double)x, float_bits(value));
        check(t, float_bits(slope) == known[i][2], "slope at %g: found %08x", (double)x, float_bits(slope));
    }
#endif
}

static void test_obvious(Test* t) {
    const int shape[] = {7};
    const float x[] = {0.0f, -0.0f, 20.0f, -20.0f, 1e30f, -1e30f, INFINITY}, ones[] = {1, 1, 1, 1, 1, 1, 1};
    const float want[] = {0.0f, -0.0f, 20.0f, -0.0f, 1e30f, -0.0f, INFINITY}, want_slope[] = {0.5f, 0.5f, 1.0f, 0.0f};
    OpProblem p = op_problem(&gelu, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[INP], x, sizeof x), memcpy(p.a[DOUT], ones, sizeof ones);
    op_answer(t, &p, &dev);
    check_bits(t, "out", p.a[OUT], want, 7);
    for (int i = 0; i < 4; i++) {
        check(t, p.a[DINP][i] == want_slope[i], "slope at %g: found %.9g", (double)x[i], (double)p.a[DINP][i]);
    }
    float k = sqrtf((float)(2.0f / 3.14159265358979323846));
    check(t, float_bits(k) == 0x3f4c4229 && GELU_K == k, "k: found %08x", float_bits(GELU_K));
    device_free(&dev);
    op_problem_free(&p);
}

int main(int argc, char** argv) {
    const Op* ops[] = {&gelu};
    const Promise promises[] = {
        {"all kinds", "every 4099th float, Inf and NaN among them", test_all_kinds},
        {"frozen", "value and slope are the expressions of the specification, bit for bit", test_frozen},
        {"known", "eight values and slopes have the bits that NumPy gives", test_known},
        {"obvious", "0 at 0 and far left, x far right; slopes 1/2, 0 and 1", test_obvious},
    };
    return op_main(argc, argv, ops, 1, promises, 4);
}
