/*
Promises of llmc/ops/layernorm.h, which follow from the tables (llmc/test/op.h), and two of its own. Fast builds for
GPUs keep tolerances.
*/
#include "llmc/ops/layernorm.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

static const int shapes[][OP_DIMS] = {  // N, C
    {1, 1}, {1, 7}, {7, 1}, {7, 33}, {33, 7}, {8, 128}, {9, 264}, {2, 257}, {2, 769}, {35, 64}, {7, 264}, {11, 33},
    {33, 260},
#if defined __CUDACC__ && !defined EXACT
    {64, 128}, {33, 257}, {3, 264}, {19, 1600},  // more rows than blocks take at once
#elif defined __CUDACC__
    {3, 1600},
#else  // vectors of VLANES rows; kernels have one row in a warp
    {3, 1600}, {16, 16}, {64, 128}, {33, 257}, {65, 127}, {257, 33}, {31, 129}, {17, 769}, {35, 33}, {VLANES, VLANES},
    {VLANES + 1, VLANES - 1}, {2 * VLANES - 1, 3 * VLANES + 1},
#endif
    {2, 5640}, {1, 12296},  // rows of several packs in a lane; too long for one pass backward, or for shared memory
    {0},
};

#define EPS LAYERNORM_EPS

// ---- layernorm ----

enum { INP, WEIGHT, BIAS, OUT, MEAN, RSTD, DOUT, DINP, DWEIGHT, DBIAS };

static void forward_ref(float* const* a, const int* d) {
    layernorm_forward_ref(a[OUT], a[MEAN], a[RSTD], a[INP], a[WEIGHT], a[BIAS], EPS, d['N'], d['C']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    layernorm_forward(x[OUT], a[MEAN], a[RSTD], x[INP], x[WEIGHT], x[BIAS], EPS, d['N'], d['C'], dev);
}

static void backward_ref(float* const* a, const int* d) {
    layernorm_backward_ref(a[DINP], a[DWEIGHT], a[DBIAS], a[DOUT], a[INP], a[WEIGHT], a[MEAN], a[RSTD], d['N'], d['C']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    layernorm_backward(x[DINP], a[DWEIGHT], a[DBIAS], x[DOUT], x[INP], x[WEIGHT], a[MEAN], a[RSTD], d['N'], d['C'],
                       dev);
}

static void in_double(double* const* a, const int* d) {
    for (int n = 0, C = d['C']; n < d['N']; n++) {
        double mean = 0.0, var = 0.0, *x = a[INP] + n * C;
        for (int c = 0; c < C; c++) { mean += x[c] / C; }
        for (int c = 0; c < C; c++) { var += (x[c] - mean) * (x[c] - mean) / C; }
        for (int c = 0; c < C; c++) {
            a[OUT][n * C + c] = (x[c] - mean) / sqrt(var + 1e-5) * a[WEIGHT][c] + a[BIAS][c];
        }
    }
}

static double error(int array, const int* d) {
    const int C = d['C'];
    switch (array) {
        // |out| < 4; the mean is a chain of sums below C / 4 over C; half the variance's relative error comes into
        // rstd; 8 more roundings
        case OUT: return (rounding_walk(C, C / 4.0) / C + rounding_walk(C, 1.0) / 2.0 + rounding_walk(8, 1.0)) * 4.0;
        case MEAN: case RSTD: return -1.0;
        default: return rounding_walk(3 * C, 4.0);  // gradients below 4, made of three chains of C terms
    }
}

// What two orders of the sums may be apart. |inp| < 3 (a residual sum; 2 otherwise), |weight| < 1.5, |bias|, |dout| <
// 1; the rows of these tests have rstd < 3, or one channel, and then every order is exact
static double mean_tolerance(int C) { return 2.0 * rounding_walk(C, 3.0 * C) / C; }

// d rstd = rstd^3 / 2 * d var; the squares add up to less than 9 C
static double rstd_tolerance(int C) { return 13.5 * 2.0 * rounding_walk(C, 9.0 * C) / C + rounding_walk(4, 3.0); }

// d out = rstd * weight * d mean + (inp - mean) * weight * d rstd, and 8 roundings of values below 16
static double out_tolerance(int C) {
    return 4.5 * mean_tolerance(C) + 9.0 * rstd_tolerance(C) + rounding_walk(8, 16.0);
}

// |xhat| < 12: the sum of g has terms below 1.5, that of g * xhat below 18 and comes back times xhat; all times rstd
static double dinp_tolerance(int C) {
    return 3.0 * 2.0 * (rounding_walk(C, 1.5 * C) + 12.0 * rounding_walk(C, 18.0 * C)) / C + rounding_walk(8, 64.0);
}

static double dweight_tolerance(int N) { return 2.0 * rounding_walk(N, 12.0 * N) + rounding_walk(4 * N, 12.0); }
static double dbias_tolerance(int N) { return 2.0 * rounding_walk(N, 1.0 * N); }

static double apart(const OpProblem* p, int array, size_t i) {
    const int N = p->d['N'], C = p->d['C'];
    (void)i;
    switch (array) {
        case OUT: return out_tolerance(C);
        case MEAN: return mean_tolerance(C);
        case RSTD: return rstd_tolerance(C);
        case DINP: return dinp_tolerance(C);
        case DWEIGHT: return dweight_tolerance(N);
        case DBIAS: return dbias_tolerance(N);
        default: return 0.0;
    }
}

// fast kernels sum dbias with dweight
#define STATISTICS_FOR FAST_KERNELS ? "dinp dweight dbias" : "dinp dweight"

static const Op layernorm = {
    .name = "layernorm", .dims = "NC",
    .arrays = {
        {INP, "inp", "NC", GIVEN, 2.0f, STATISTICS_FOR},
        {WEIGHT, "weight", "C", GIVEN, 1.5f, "dinp"},
        {BIAS, "bias", "C", GIVEN, 1.0f, ""},
        {OUT, "out", "NC", MADE, 0.0f, ""},
        {MEAN, "mean", "N", MADE | FLOAT, 0.0f, STATISTICS_FOR},
        {RSTD, "rstd", "N", MADE | FLOAT, 0.0f, STATISTICS_FOR},
        {DOUT, "dout", "NC", GIVEN, 1.0f, "dinp dweight dbias"},
        {DINP, "dinp", "NC", GRADIENT | ADDED | ASKED, 1.0f},
        {DWEIGHT, "dweight", "C", GRADIENT | ASKED | FLOAT},
        {DBIAS, "dbias", "C", GRADIENT | ASKED | FLOAT},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{7, 33}, {7, 257}}, .apart = apart,
};

// ---- residual = left + right, and its layernorm ----

enum { LEFT, RIGHT, RESIDUAL, NORM_WEIGHT, NORM_BIAS, NORM_OUT, NORM_MEAN, NORM_RSTD };

static void residual_ref(float* const* a, const int* d) {
    residual_layernorm_forward_ref(a[RESIDUAL], a[NORM_OUT], a[NORM_MEAN], a[NORM_RSTD], a[LEFT], a[RIGHT],
                                   a[NORM_WEIGHT], a[NORM_BIAS], EPS, d['N'], d['C']);
}

// what is normalised is what was stored
static void residual_bf16_ref(float* const* a, const int* d) {
    residual_ref(a, d);
    op_store_bf16(a[RESIDUAL], (size_t)d['N'] * (size_t)d['C']);
    layernorm_forward_ref(a[NORM_OUT], a[NORM_MEAN], a[NORM_RSTD], a[RESIDUAL], a[NORM_WEIGHT], a[NORM_BIAS], EPS,
                          d['N'], d['C']);
}

OP_STORED(X)
static void residual(X* const* x, float* const* a, const int* d, const Device* dev) {
    residual_layernorm_forward(x[RESIDUAL], x[NORM_OUT], a[NORM_MEAN], a[NORM_RSTD], x[LEFT], x[RIGHT], x[NORM_WEIGHT],
                               x[NORM_BIAS], EPS, d['N'], d['C'], dev);
}

static double residual_apart(const OpProblem* p, int array, size_t i) {
    const int C = p->d['C'];
    switch (array) {
        case NORM_OUT: return out_tolerance(C);
        case NORM_MEAN: return mean_tolerance(C);
        case NORM_RSTD: return rstd_tolerance(C);
        default: return 0.0;  // one sum of two, in every build
    }
}

static const Op residual_layernorm = {
    .name = "residual", .dims = "NC",
    .arrays = {
        {LEFT, "left", "NC", GIVEN, 2.0f},
        {RIGHT, "right", "NC", GIVEN, 1.0f},
        {RESIDUAL, "residual", "NC", MADE, 0.0f, NULL, "left right"},
        {NORM_WEIGHT, "norm_weight", "C", GIVEN, 1.5f},
        {NORM_BIAS, "norm_bias", "C", GIVEN, 1.0f},
        {NORM_OUT, "norm_out", "NC", MADE},
        {NORM_MEAN, "norm_mean", "N", MADE | FLOAT},
        {NORM_RSTD, "norm_rstd", "N", MADE | FLOAT},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = residual_ref, .forward_bf16_ref = residual_bf16_ref, .forward = OP_FAST(residual),
    .apart = residual_apart,
};

// ---- backward with the gradient of a bias of what was added before ----

enum { R_INP, R_WEIGHT, R_BIAS, R_OUT, R_MEAN, R_RSTD, R_DOUT, R_DINP, R_DWEIGHT, R_DBIAS, R_DRIGHT };

static void right_forward_ref(float* const* a, const int* d) {
    layernorm_forward_ref(a[R_OUT], a[R_MEAN], a[R_RSTD], a[R_INP], a[R_WEIGHT], a[R_BIAS], EPS, d['N'], d['C']);
}

OP_STORED(X)
static void right_forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    layernorm_forward(x[R_OUT], a[R_MEAN], a[R_RSTD], x[R_INP], x[R_WEIGHT], x[R_BIAS], EPS, d['N'], d['C'], dev);
}

static void right_ref(float* const* a, const int* d) {
    residual_layernorm_backward_ref(a[R_DINP], a[R_DWEIGHT], a[R_DBIAS], a[R_DRIGHT], a[R_DOUT], a[R_INP], a[R_WEIGHT],
                                    a[R_MEAN], a[R_RSTD], d['N'], d['C']);
}

OP_STORED(X)
static void right(X* const* x, float* const* a, const int* d, const Device* dev) {
    residual_layernorm_backward(x[R_DINP], a[R_DWEIGHT], a[R_DBIAS], a[R_DRIGHT], x[R_DOUT], x[R_INP], x[R_WEIGHT],
                                a[R_MEAN], a[R_RSTD], d['N'], d['C'], dev);
}

static double right_apart(const OpProblem* p, int array, size_t i) {
    const int N = p->d['N'], C = p->d['C'];
    double all = 0.0, terms = 0.0;
    switch (array) {
        case R_OUT: return out_tolerance(C);
        case R_MEAN: return mean_tolerance(C);
        case R_RSTD: return rstd_tolerance(C);
        case R_DINP: return dinp_tolerance(C);
        case R_DWEIGHT: return dweight_tolerance(N);
        case R_DBIAS: return dbias_tolerance(N);
        case R_DRIGHT: break;
        default: return 0.0;
    }
    for (int n = 0; n < N; n++) {  // each term is as far off as dinp, and in bf16 rounded
        const double term = fabs((double)p->a[R_DINP][(size_t)n * (size_t)C + i]) + dinp_tolerance(C);
        all += term;
        terms += dinp_tolerance(C) + (p->as_bf16 ? 0x1p-8 * term : 0.0);
    }
    return terms + 2.0 * rounding_walk(N, all);
}

static const Op with_right = {
    .name = "right", .dims = "NC",
    .arrays = {
        {R_INP, "inp", "NC", GIVEN, 2.0f},
        {R_WEIGHT, "weight", "C", GIVEN, 1.5f},
        {R_BIAS, "bias", "C", GIVEN, 1.0f, ""},
        {R_OUT, "out", "NC", MADE, 0.0f, ""},
        {R_MEAN, "mean", "N", MADE | FLOAT},
        {R_RSTD, "rstd", "N", MADE | FLOAT},
        {R_DOUT, "dout", "NC", GIVEN, 1.0f},
        {R_DINP, "dinp", "NC", GRADIENT | ADDED, 1.0f},
        {R_DWEIGHT, "dweight", "C", GRADIENT | ASKED | FLOAT},
        {R_DBIAS, "dbias", "C", GRADIENT | ASKED | FLOAT},
        {R_DRIGHT, "dright", "C", GRADIENT | FLOAT},
    },
    .shapes = shapes, .traits = ANYWHERE,
    .forward_ref = right_forward_ref, .forward = OP_FAST(right_forward),
    .backward_ref = right_ref, .backward = OP_FAST(right), .apart = right_apart,
};

// ---- rows whose answer is obvious ----

static void test_obvious(Test* t) {
    const int shape[] = {2, 4};
    const float inp[] = {3, 3, 3, 3, 1000, -1000, 1000, -1000}, weight[] = {1, 2, 3, 4}, bias[] = {5, 6, 7, 8};
    const float want_out[] = {5, 6, 7, 8, 6, 4, 10, 4}, dout[] = {0, 0, 0, 0, 1, 2, 3, 4},
                want_dweight[] = {1, -2, 3, -4};
    OpProblem p = op_problem(&layernorm, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[INP], inp, sizeof inp), memcpy(p.a[WEIGHT], weight, sizeof weight), memcpy(p.a[BIAS], bias, sizeof bias);
    memcpy(p.a[DOUT], dout, sizeof dout);
    op_answer(t, &p, &dev);
    check_bits(t, "a constant row gives the bias", p.a[OUT], want_out, 4);
    check(t, p.a[MEAN][0] == 3.0f && p.a[RSTD][0] == 1.0f / sqrtf(1e-5f),
          "constant row: mean 3 and variance 0, found %.9g", (double)p.a[MEAN][0]);
    for (int c = 0; c < 4; c++) {  // +-1000: eps is far below the last place of 10^6, rstd is the float nearest 1/1000
        check(t, fabsf(p.a[OUT][4 + c] - want_out[4 + c]) < 1e-6f, "alternating row, channel %d: found %.9g", c,
              (double)p.a[OUT][4 + c]);
        check(t, fabsf(p.a[DWEIGHT][c] - want_dweight[c]) < 1e-6f, "dweight of channel %d: found %.9g", c,
              (double)p.a[DWEIGHT][c]);
        check(t, p.a[DINP][c] == p.before[DINP][c], "no gradient came into row 0, found %.9g", (double)p.a[DINP][c]);
    }
    check_bits(t, "dbias", p.a[DBIAS], dout + 4, 4);
    device_free(&dev);
    op_problem_free(&p);
}

// a bias that is minus the rounded product gives 0 unless a fused multiply-add keeps what was rounded off
static void test_rounding(Test* t) {
    const int shape[] = {1, 2};
    const float inp[] = {1.0f, -1.0f}, rstd = 1.0f / sqrtf(1.0f + 1e-5f), w = 1.0f + 0x1p-12f, weight[] = {w, w};
    const float product = rstd * w, bias[] = {-product, product};
    if (FAST_KERNELS) {
        skip(t, "fast builds for GPUs fuse");
        return;
    }
    OpProblem p = op_problem(&layernorm, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[INP], inp, sizeof inp), memcpy(p.a[WEIGHT], weight, sizeof weight), memcpy(p.a[BIAS], bias, sizeof bias);
    op_answer(t, &p, &dev);
    check(t, p.a[RSTD][0] == rstd, "rstd: found %.9g, expected %.9g", (double)p.a[RSTD][0], (double)rstd);
    check(t, p.a[OUT][0] == 0.0f && p.a[OUT][1] == 0.0f, "found %g and %g, expected 0", (double)p.a[OUT][0],
          (double)p.a[OUT][1]);
    device_free(&dev);
    op_problem_free(&p);
}

// A fused product that is too small for any float rounds to -0: dweight of the first channel is nothing else, and so is
// the sum of g * xhat
static void test_underflow(Test* t) {
#ifdef SYSTEM_LIBM
    skip(t, "products round before they are added");
#else
    const int shape[] = {1, 2};
    if (FAST_KERNELS) {
        skip(t, "fast kernels add along trees");
        return;
    }
    const float inp[] = {0x1p-40f, -0x1p-40f}, dout[] = {-0x1p-149f, 0.0f}, weight[] = {1.0f, 1.0f};
    OpProblem p = op_problem(&layernorm, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[INP], inp, sizeof inp), memcpy(p.a[DOUT], dout, sizeof dout), memcpy(p.a[WEIGHT], weight, sizeof weight);
    op_solve(&p);
    check(t, float_bits(p.a[DWEIGHT][0]) == 0x80000000u, "dweight: found %g, expected -0", (double)p.a[DWEIGHT][0]);
    op_check(t, &p, 1, &dev);
    device_free(&dev);
    op_problem_free(&p);
#endif
}

int main(int argc, char** argv) {
    const Op* ops[] = {&layernorm, &residual_layernorm, &with_right};
    const Promise promises[] = {
        {"obvious", "a constant row gives the bias, a row of +-1000 the weights", test_obvious},
        {"rounding", "a product that is no part of a chain rounds before it is added", test_rounding},
        {"underflow", "sums whose products are too small for floats keep their sign", test_underflow},
    };
    return op_main(argc, argv, ops, 3, promises, 3);
}
