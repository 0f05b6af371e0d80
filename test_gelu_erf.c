/*
Promises of llmc/ops/gelu_erf.h, which follow from the table (llmc/test/op.h); its value and slope are frozen
expressions. Fast builds for GPUs keep the tolerances that the header states.
*/
#include "llmc/ops/gelu_erf.h"
#include "llmc/test/op_promises.h"  // Op, op_main

enum { INP, OUT, DOUT, DINP };

static void forward_ref(float* const* a, const int* d) { gelu_erf_forward_ref(a[OUT], a[INP], (size_t)d['n']); }
static void backward_ref(float* const* a, const int* d) {
    gelu_erf_backward_ref(a[DINP], a[INP], a[DOUT], (size_t)d['n']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    gelu_erf_forward(x[OUT], x[INP], (size_t)d['n'], dev);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    gelu_erf_backward(x[DINP], x[INP], x[DOUT], (size_t)d['n'], dev);
}

static void in_double(double* const* a, const int* d) {
    for (int i = 0; i < d['n']; i++) {
        const double x = a[INP][i];
        a[OUT][i] = 0.5 * x * (1.0 + erf(x / sqrt(2.0)));
    }
}

static double error(int array, const int* d) {
    (void)d;
    return array == OUT ? 4 * 0x1p-24 * 6.0 : 8 * 0x1p-24;  // |x| < 6
}

static double apart(const OpProblem* p, int array, size_t i) {
    double of = array == OUT ? 0x1p-20 * (1.0 + (double)fabsf(p->a[INP][i])) : 0x1p-18 * (double)fabsf(p->a[DOUT][i]);
    return of + 0x1p-126;  // the hardware may flush subnormals
}

static const int shapes[][OP_DIMS] = {{1}, {7}, {8}, {16}, {33}, {257}, {1009}, {4096}, {0}};

static const Op gelu = {
    .name = "gelu_erf", .dims = "n",
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

// one operation per line, as dev/ref/ops.py has them
static void test_frozen(Test* t) {
    for (int i = -600; i <= 600; i++) {
        const float x = (float)i / 64.0f, half = float_from_bits(0x3f3504f3), one = 1.0f;
        const float at = x * half, twice = one + fm_erf(at), value = (0.5f * x) * twice;
        float square = -0.5f * x;
        square = square * x;
        float density = fm_exp(square) * float_from_bits(0x3ecc422a);
        density = x * density;
        const float slope = 0.5f * twice + density;
        float found, back;
        gelu_erf_forward_ref(&found, &x, 1);
        gelu_erf_backward_ref(&back, &x, &one, 1);
        check(t, float_bits(found) == float_bits(value) && float_bits(back) == float_bits(slope), "at %g", (double)x);
    }
}

static void test_obvious(Test* t) {
    const float x[] = {0.0f, 20.0f, -20.0f, 1e30f, INFINITY}, want[] = {0.0f, 20.0f, -0.0f, 1e30f, INFINITY};
    float out[5], dinp[5], ones[] = {1, 1, 1, 1, 1};
    gelu_erf_forward_ref(out, x, 5);
    gelu_erf_backward_ref(dinp, x, ones, 5);
    for (int i = 0; i < 5; i++) { check(t, out[i] == want[i], "of %g: %g", (double)x[i], (double)out[i]); }
    check(t, dinp[0] == 0.5f && dinp[1] == 1.0f && dinp[2] == 0.0f && dinp[3] == 1.0f, "slopes");
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"frozen", "the plain loop rounds as it is written, bit for bit", test_frozen},
        {"obvious", "0 stays 0, large numbers stay or vanish", test_obvious},
    };
    const Op* const ops[] = {&gelu};
    return op_main(argc, argv, ops, 1, promises, sizeof promises / sizeof promises[0]);
}
