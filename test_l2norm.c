/*
Promises of llmc/ops/l2norm.h, which follow from the table (llmc/test/op.h), and one of its own.
*/
#include "llmc/ops/l2norm.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

static const float EPS = 1e-6f, SCALE = 0.25f;

enum { INP, OUT, RSTD, DOUT, DINP };

static void forward_ref(float* const* a, const int* d) {
    l2norm_forward_ref(a[OUT], a[RSTD], a[INP], SCALE, EPS, d['N'], d['C']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    l2norm_forward(x[OUT], a[RSTD], x[INP], SCALE, EPS, d['N'], d['C'], dev);
}

static void backward_ref(float* const* a, const int* d) {
    l2norm_backward_ref(a[DINP], a[DOUT], a[INP], a[RSTD], SCALE, d['N'], d['C']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    l2norm_backward(x[DINP], x[DOUT], x[INP], a[RSTD], SCALE, d['N'], d['C'], dev);
}

static void in_double(double* const* a, const int* d) {
    for (int n = 0, C = d['C']; n < d['N']; n++) {
        double sum = 0.0, *x = a[INP] + n * C;
        for (int c = 0; c < C; c++) { sum += x[c] * x[c]; }
        for (int c = 0; c < C; c++) { a[OUT][n * C + c] = x[c] / sqrt(sum + 1e-6) * 0.25; }
    }
}

static double error(int array, const int* d) {
    switch (array) {
        // |out| <= 1/4; half the relative error of the sum of squares comes into rstd; 6 more roundings
        case OUT: return (rounding_walk(d['C'], 1.0) / 2.0 + rounding_walk(6, 1.0)) / 4.0;
        case RSTD: return -1.0;
        default: return rounding_walk(2 * d['C'], 1.0);  // gradients below 1: |dy| < 1/4, rstd < 4
    }
}

static const int shapes[][OP_DIMS] = {
    {1, 1}, {1, 7}, {7, 1}, {7, 33}, {33, 7}, {8, 128}, {9, 264}, {2, 257}, {35, 64}, {5, 256},
#ifndef __CUDACC__  // vectors of VLANES rows; kernels have one row in a warp
    {16, 16}, {65, 127}, {31, 129}, {VLANES, VLANES}, {VLANES + 1, VLANES - 1}, {2 * VLANES - 1, 3 * VLANES + 1},
#endif
    {0},
};

// What two orders of the sums may be apart: |y| <= 1, so sums of squares differ by C roundings of themselves, and half
// of that comes into rstd; rows of one channel may be nearly 0, where rstd is 1 / sqrt(eps) = 1000
static double apart(const OpProblem* p, int array, size_t i) {
    const int C = p->d['C'];
    const double large = C < 8 ? 1000.0 : 4.0, turn = rounding_walk(2 * C, 1.0) + rounding_walk(6, 1.0);
    (void)i;
    switch (array) {
        case OUT: return turn;
        case RSTD: return large * turn;
        default: return large * 2.0 * turn;
    }
}

static const Op l2norm = {
    .name = "l2norm", .dims = "NC",
    .arrays = {
        {INP, "inp", "NC", GIVEN, 2.0f},
        {OUT, "out", "NC", MADE, 0.0f, NULL, "inp"},
        {RSTD, "rstd", "N", MADE | FLOAT},
        {DOUT, "dout", "NC", GIVEN, 1.0f},
        {DINP, "dinp", "NC", GRADIENT, 0.0f, NULL, "dout"},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{7, 33}, {7, 257}}, .apart = apart,
};

static void test_obvious(Test* t) {
    const int shape[] = {2, 4};
    const float inp[] = {0, 0, 0, 0, 300, -300, 300, -300}, dout[] = {1, 2, 3, 4, 1, -1, 1, -1};
    OpProblem p = op_problem(&l2norm, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[INP], inp, sizeof inp), memcpy(p.a[DOUT], dout, sizeof dout);
    op_answer(t, &p, &dev);
    const float *out = p.a[OUT], *rstd = p.a[RSTD], *dinp = p.a[DINP];
    check(t, rstd[0] == 1.0f / sqrtf(EPS), "a row of zeros: rstd is 1/sqrt(eps), found %.9g", (double)rstd[0]);
    for (int c = 0; c < 4; c++) {  // of a row along dout nothing of it is left: the length cannot change
        check(t, out[c] == 0.0f && fabsf(out[4 + c]) == 0.125f, "out[%d]: found %.9g, %.9g", c, (double)out[c],
              (double)out[4 + c]);
        check(t, dinp[c] == rstd[0] * (dout[c] * SCALE), "a row of zeros: found %.9g", (double)dinp[c]);
        check(t, dinp[4 + c] == 0.0f, "dinp along the row: found %.9g", (double)dinp[4 + c]);
    }
    device_free(&dev);
    op_problem_free(&p);
}

int main(int argc, char** argv) {
    const Op* ops[] = {&l2norm};
    const Promise promises[] = {
        {"obvious", "a row of zeros stays 0, +-300 becomes +-scale/2, and its gradient along the row is 0",
         test_obvious},
    };
    return op_main(argc, argv, ops, 1, promises, 1);
}
