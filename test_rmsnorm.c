/*
Promises of llmc/ops/rmsnorm.h, which follow from the table (llmc/test/op.h), and two of its own.
*/
#include "llmc/ops/rmsnorm.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

static const float EPS = 1e-5f;

enum { INP, WEIGHT, OUT, RSTD, DOUT, DINP, DWEIGHT };

static void forward_ref(float* const* a, const int* d) {
    rmsnorm_forward_ref(a[OUT], a[RSTD], a[INP], a[WEIGHT], EPS, d['N'], d['C']);
}

static void forward(float* const* x, float* const* a, const int* d, const Device* dev) {
    rmsnorm_forward(a[OUT], a[RSTD], a[INP], a[WEIGHT], EPS, d['N'], d['C'], dev);
}

static void backward_ref(float* const* a, const int* d) {
    rmsnorm_backward_ref(a[DINP], a[DWEIGHT], a[DOUT], a[INP], a[WEIGHT], a[RSTD], d['N'], d['C']);
}

static void backward(float* const* x, float* const* a, const int* d, const Device* dev) {
    rmsnorm_backward(a[DINP], a[DWEIGHT], a[DOUT], a[INP], a[WEIGHT], a[RSTD], d['N'], d['C'], dev);
}

static void in_double(double* const* a, const int* d) {
    for (int n = 0, C = d['C']; n < d['N']; n++) {
        double mean = 0.0, *x = a[INP] + n * C;
        for (int c = 0; c < C; c++) { mean += x[c] * x[c] / C; }
        for (int c = 0; c < C; c++) { a[OUT][n * C + c] = x[c] / sqrt(mean + 1e-5) * a[WEIGHT][c]; }
    }
}

static double error(int array, const int* d) {
    switch (array) {
        // |out| < 3; half the relative error of the sum of squares comes into rstd; 8 more roundings
        case OUT: return (rounding_walk(d['C'], 1.0) / 2.0 + rounding_walk(8, 1.0)) * 3.0;
        case RSTD: return -1.0;
        default: return rounding_walk(2 * d['C'], 4.0);  // gradients below 4, made of two chains of C terms
    }
}

static const int shapes[][OP_DIMS] = {
    {1, 1}, {1, 7}, {7, 1}, {7, 33}, {33, 7}, {16, 16}, {64, 128}, {65, 127}, {257, 33}, {33, 257}, {31, 129},
    {17, 769}, {VLANES, VLANES}, {VLANES + 1, VLANES - 1}, {2 * VLANES - 1, 3 * VLANES + 1}, {2 * VLANES + 3, 33},
    {2 * VLANES + 3, 129}, {3, 1600}, {2 * VLANES, 5641}, {0},
};

static const Op rmsnorm = {
    .name = "rmsnorm", .dims = "NC",
    .arrays = {
        {INP, "inp", "NC", GIVEN, 2.0f, "dinp dweight"},
        {WEIGHT, "weight", "C", GIVEN, 1.5f, "dinp"},
        {OUT, "out", "NC", MADE},
        {RSTD, "rstd", "N", MADE | FLOAT, 0.0f, "dinp dweight"},
        {DOUT, "dout", "NC", GIVEN, 1.0f, "dinp dweight"},
        {DINP, "dinp", "NC", GRADIENT | ADDED | ASKED, 1.0f},
        {DWEIGHT, "dweight", "C", GRADIENT | ASKED | FLOAT},
    },
    .shapes = shapes, .traits = ROWS,
    .forward_ref = forward_ref, .forward = {forward}, .backward_ref = backward_ref, .backward = {backward},
    .in_double = in_double, .error = error, .judged = {{7, 33}, {7, 257}},
};

// both as they are specified (doc/exactness.md): chains of products are fused, the rest is one operation per line
static void frozen_row(const OpProblem* p, int n, float* out, float* rstd, float* dinp, float* dweight) {
    const int C = p->d['C'];
    const float *inp = p->a[INP] + n * C, *weight = p->a[WEIGHT], *dout = p->a[DOUT] + n * C;
    float squares = 0.0f, dot = 0.0f;
    for (int c = 0; c < C; c++) { squares = fmaf(inp[c], inp[c], squares); }
    const float mean = squares / (float)C, s = 1.0f / sqrtf(mean + EPS);
    for (int c = 0; c < C; c++) {
        const float xhat = inp[c] * s, g = dout[c] * weight[c], dx = dout[c] * inp[c];
        out[n * C + c] = xhat * weight[c];
        dot = fmaf(g, xhat, dot);
        dweight[c] = fmaf(dx, s, dweight[c]);
    }
    const float mean_gx = dot / (float)C;
    for (int c = 0; c < C; c++) {
        const float xhat = inp[c] * s, g = dout[c] * weight[c];
        float part = xhat * mean_gx;
        part = g - part;
        part = s * part;
        dinp[n * C + c] = p->before[DINP][n * C + c] + part;
    }
    rstd[n] = s;
}

static void test_frozen(Test* t) {
    enum { N = 40, C = 129 };
    const int shape[] = {N, C};
    OpProblem p = op_problem(&rmsnorm, shape, EASY, 0);
    float *out = filled_array(N * C, NAN), *rstd = filled_array(N, NAN), *dinp = filled_array(N * C, NAN),
          *dweight = filled_array(C, 0.0f);
    for (int n = 0; n < N; n++) { frozen_row(&p, n, out, rstd, dinp, dweight); }
    check_bits(t, "out", p.a[OUT], out, N * C);
    check_bits(t, "rstd", p.a[RSTD], rstd, N);
    check_bits(t, "dinp", p.a[DINP], dinp, N * C);
    check_bits(t, "dweight", p.a[DWEIGHT], dweight, C);
    free(out), free(rstd), free(dinp), free(dweight);
    op_problem_free(&p);
}

static void test_obvious(Test* t) {
    const float inp[] = {0, 0, 0, 0, 1000, -1000, 1000, -1000}, weight[] = {1, 2, 3, 4},
                dout[] = {1, 2, 3, 4, 1, 2, 3, 4};
    const float want_out[] = {0, 0, 0, 0, 1, -2, 3, -4}, want_dweight[] = {1, -2, 3, -4};
    float out[8], rstd[2], dinp[8] = {0}, dweight[4];
    Device dev = test_device(1);
    rmsnorm_forward(out, rstd, inp, weight, EPS, 2, 4, &dev);
    rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd, 2, 4, &dev);
    check(t, rstd[0] == 1.0f / sqrtf(EPS), "a row of zeros: rstd is 1/sqrt(eps), found %.9g", (double)rstd[0]);
    for (int c = 0; c < 8; c++) {  // +-1000: eps is far below the last place of 10^6, rstd is the float nearest 1/1000
        check(t, fabsf(out[c] - want_out[c]) < 1e-6f, "out[%d]: found %.9g", c, (double)out[c]);
    }
    for (int c = 0; c < 4; c++) {
        check(t, dinp[c] == rstd[0] * (dout[c] * weight[c]), "a row of zeros: dinp is g * rstd, found %.9g",
              (double)dinp[c]);
        check(t, fabsf(dweight[c] - want_dweight[c]) < 1e-6f, "dweight of channel %d: found %.9g", c,
              (double)dweight[c]);
    }
    device_free(&dev);
}

int main(int argc, char** argv) {
    const Op* ops[] = {&rmsnorm};
    const Promise promises[] = {
        {"frozen", "the plain loop rounds as the specification says, bit for bit", test_frozen},
        {"obvious", "a row of zeros stays 0, +-1000 becomes +-1 times the weight", test_obvious},
    };
    return op_main(argc, argv, ops, 1, promises, 2);
}
