/*
Promises of llmc/ops/rmsnorm.h, which follow from the tables (llmc/test/op.h), and two of its own. Fast builds for
GPUs keep tolerances.
*/
#include "llmc/ops/rmsnorm.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

static const float EPS = 1e-5f;

enum { INP, WEIGHT, OUT, RSTD, DOUT, DINP, DWEIGHT };

static void forward_ref(float* const* a, const int* d) {
    rmsnorm_forward_ref(a[OUT], a[RSTD], a[INP], a[WEIGHT], EPS, d['N'], d['C']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    rmsnorm_forward(x[OUT], a[RSTD], x[INP], x[WEIGHT], EPS, d['N'], d['C'], dev);
}

static void backward_ref(float* const* a, const int* d) {
    rmsnorm_backward_ref(a[DINP], a[DWEIGHT], a[DOUT], a[INP], a[WEIGHT], a[RSTD], 1, d['N'], d['C']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    rmsnorm_backward(x[DINP], a[DWEIGHT], x[DOUT], x[INP], x[WEIGHT], a[RSTD], 1, d['N'], d['C'], dev);
}

// dinp written
static void written_ref(float* const* a, const int* d) {
    rmsnorm_backward_ref(a[DINP], a[DWEIGHT], a[DOUT], a[INP], a[WEIGHT], a[RSTD], 0, d['N'], d['C']);
}

OP_STORED(X)
static void written(X* const* x, float* const* a, const int* d, const Device* dev) {
    rmsnorm_backward(x[DINP], a[DWEIGHT], x[DOUT], x[INP], x[WEIGHT], a[RSTD], 0, d['N'], d['C'], dev);
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
    {1, 1}, {1, 7}, {7, 1}, {7, 33}, {33, 7}, {8, 128}, {9, 264}, {2, 257}, {2, 769}, {35, 64}, {7, 264}, {11, 33},
    {33, 260}, {13, 8}, {5, 256},  // several short rows in a warp
#if defined __CUDACC__ && !defined EXACT
    // more rows than blocks take at once; a row of one warp, of two, of three, and one that its threads cannot have
    {64, 128}, {33, 257}, {203, 64}, {150, 16}, {150, 264}, {83, 1600}, {3, 264}, {31, 2056}, {5, 8192},
#elif defined __CUDACC__
    {3, 1600},
#else  // vectors of VLANES rows; kernels have one row in a warp
    {16, 16}, {64, 128}, {65, 127}, {257, 33}, {33, 257}, {31, 129}, {17, 769}, {VLANES, VLANES},
    {VLANES + 1, VLANES - 1}, {2 * VLANES - 1, 3 * VLANES + 1}, {2 * VLANES + 3, 33}, {2 * VLANES + 3, 129}, {3, 1600},
    {2 * VLANES, 5641},
#endif
    {2, 5640}, {1, 12296},  // rows of several packs in a lane; too long for one pass backward, or for shared memory
    {0},
};

// What two orders of the sums may be apart. |inp| < 3 (a residual sum; 2 otherwise), |weight| < 1.5, |dout| < 1; the
// rows of these tests have rstd < 4. d rstd = rstd^3 / 2 * d mean; the squares add up to less than 9 C
static double rstd_tolerance(int C) { return 32.0 * 2.0 * rounding_walk(C, 9.0 * C) / C + rounding_walk(4, 4.0); }

// d out = inp * weight * d rstd, and 4 roundings of values below 16
static double out_tolerance(int C) { return 4.5 * rstd_tolerance(C) + rounding_walk(4, 16.0); }

// |xhat| < 12: the sum of g * xhat has terms below 18 and comes back times xhat, all times rstd
static double dinp_tolerance(int C) {
    return 4.0 * 2.0 * 12.0 * rounding_walk(C, 18.0 * C) / C + rounding_walk(8, 64.0);
}

static double dweight_tolerance(int N) { return 2.0 * rounding_walk(N, 12.0 * N) + rounding_walk(4 * N, 12.0); }

static double apart(const OpProblem* p, int array, size_t i) {
    const int N = p->d['N'], C = p->d['C'];
    (void)i;
    // a row of one channel may be nearly 0, and rstd 1 / sqrt(eps): every order is exact then
    const double large = C < 8 ? 1e5 : 1.0;
    switch (array) {
        case OUT: return large * out_tolerance(C);
        case RSTD: return large * rstd_tolerance(C);
        case DINP: return large * dinp_tolerance(C);
        case DWEIGHT: return large * dweight_tolerance(N);
        default: return 0.0;
    }
}

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
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{7, 33}, {7, 257}}, .apart = apart,
};

static Op rmsnorm_written(void) {
    static const OpFast fast = OP_FAST(written);
    Op op = rmsnorm;
    op.name = "written";
    op.arrays[DINP].role &= ~ADDED;
    op.backward_ref = written_ref;
    op.backward = fast;
    return op;
}

// ---- a float weight, also where rows are bf16 ----

OP_STORED(X)
static void forward_float_gain(X* const* x, float* const* a, const int* d, const Device* dev) {
    rmsnorm_forward(x[OUT], a[RSTD], x[INP], a[WEIGHT], EPS, d['N'], d['C'], dev);
}

OP_STORED(X)
static void backward_float_gain(X* const* x, float* const* a, const int* d, const Device* dev) {
    rmsnorm_backward(x[DINP], a[DWEIGHT], x[DOUT], x[INP], a[WEIGHT], a[RSTD], 1, d['N'], d['C'], dev);
}

static const int float_gain_shapes[][OP_DIMS] = {{7, 33}, {8, 128}, {9, 264}, {35, 64}, {2, 5640}, {1, 12296}, {0}};

static Op rmsnorm_float_gain(void) {
    static const OpFast fast_forward = OP_FAST(forward_float_gain), fast_backward = OP_FAST(backward_float_gain);
    Op op = rmsnorm;
    op.name = "float gain";
    op.arrays[WEIGHT].role |= FLOAT;
    op.shapes = float_gain_shapes;
    op.forward = fast_forward, op.backward = fast_backward;
    op.in_double = NULL;
    return op;
}

// ---- no weight: the gain is 1 ----

static void forward_plain_ref(float* const* a, const int* d) {
    rmsnorm_forward_ref(a[OUT], a[RSTD], a[INP], NULL, EPS, d['N'], d['C']);
}

OP_STORED(X)
static void forward_plain(X* const* x, float* const* a, const int* d, const Device* dev) {
    rmsnorm_forward(x[OUT], a[RSTD], x[INP], NULL, EPS, d['N'], d['C'], dev);
}

static void backward_plain_ref(float* const* a, const int* d) {
    rmsnorm_backward_ref(a[DINP], NULL, a[DOUT], a[INP], NULL, a[RSTD], 1, d['N'], d['C']);
}

OP_STORED(X)
static void backward_plain(X* const* x, float* const* a, const int* d, const Device* dev) {
    rmsnorm_backward(x[DINP], NULL, x[DOUT], x[INP], NULL, a[RSTD], 1, d['N'], d['C'], dev);
}

static void plain_in_double(double* const* a, const int* d) {
    for (int c = 0; c < d['C']; c++) { a[WEIGHT][c] = 1.0; }
    in_double(a, d);
}

// all but dweight, which comes last; the weight is there for the formula in double
static Op rmsnorm_plain(void) {
    static const OpFast fast_forward = OP_FAST(forward_plain), fast_backward = OP_FAST(backward_plain);
    Op op = rmsnorm;
    op.name = "no weight";
    op.arrays[INP].needed = op.arrays[RSTD].needed = op.arrays[DOUT].needed = "dinp";
    memset(&op.arrays[DWEIGHT], 0, sizeof op.arrays[DWEIGHT]);
    op.forward_ref = forward_plain_ref, op.backward_ref = backward_plain_ref;
    op.forward = fast_forward, op.backward = fast_backward;
    op.in_double = plain_in_double;
    return op;
}

// as a gain of ones, also of hard numbers
static void test_no_weight(Test* t) {
    enum { N = 37, C = 72, SIZE = N * C };
    const int shape[] = {N, C};
    const Op op = rmsnorm_plain();
    for (int kind = EASY; kind <= MANY_SPECIALS; kind++) {
        OpProblem ones = op_problem(&rmsnorm, shape, kind, 0), none = op_problem(&op, shape, kind, 0);
        Device dev = test_device(2);
        for (int c = 0; c < C; c++) { ones.a[WEIGHT][c] = 1.0f; }
        op_answer(t, &ones, &dev), op_answer(t, &none, &dev);
        check_bits(t, "out", none.a[OUT], ones.a[OUT], SIZE);
        check_bits(t, "rstd", none.a[RSTD], ones.a[RSTD], N);
        check_bits(t, "dinp", none.a[DINP], ones.a[DINP], SIZE);
        device_free(&dev);
        op_problem_free(&ones), op_problem_free(&none);
    }
}

// ---- the gain of a zero-centred norm ----

enum { CENTRED, GAIN };

static void gain_ref(float* const* a, const int* d) { rmsnorm_gain_ref(a[GAIN], a[CENTRED], d['C']); }

OP_STORED(X)
static void gain(X* const* x, float* const* a, const int* d, const Device* dev) {
    rmsnorm_gain(a[GAIN], x[CENTRED], d['C'], dev);
}

static void gain_in_double(double* const* a, const int* d) {
    for (int c = 0; c < d['C']; c++) { a[GAIN][c] = 1.0 + a[CENTRED][c]; }
}

static double gain_error(int array, const int* d) { return 0x1p-23; }  // one rounding of a number below 4

static const int gain_shapes[][OP_DIMS] = {{1}, {7}, {33}, {257}, {2048}, {0}};

static const Op zero_centred = {
    .name = "gain", .dims = "C",
    .arrays = {
        {CENTRED, "centred", "C", GIVEN, 1.5f},
        {GAIN, "gain", "C", MADE | FLOAT},
    },
    .shapes = gain_shapes, .traits = ANYWHERE | SPECIAL_KERNELS,
    .forward_ref = gain_ref, .forward = OP_FAST(gain),
    .in_double = gain_in_double, .error = gain_error, .judged = {{257}},
};

static void test_gain(Test* t) {
    enum { C = 5 };
    const float weight[C] = {0.0f, -0.0f, -1.0f, 0x1p-24f, 0x1.8p-23f}, want[C] = {1, 1, 0, 1, 1.0f + 0x1p-22f};
    const int shape[] = {C};
    OpProblem p = op_problem(&zero_centred, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[CENTRED], weight, sizeof weight);
    op_answer(t, &p, &dev);
    check_bits(t, "gain", p.a[GAIN], want, C);
    rmsnorm_gain(p.a[GAIN], p.a[CENTRED], 0, &dev);  // no channels: nothing is done
    device_free(&dev);
    op_problem_free(&p);
}

// ---- residual = left + right, and its rmsnorm ----

enum { LEFT, RIGHT, RESIDUAL, NORM_WEIGHT, NORM_OUT, NORM_RSTD };

static void residual_ref(float* const* a, const int* d) {
    residual_rmsnorm_forward_ref(a[RESIDUAL], a[NORM_OUT], a[NORM_RSTD], a[LEFT], a[RIGHT], a[NORM_WEIGHT], EPS, d['N'],
                                 d['C']);
}

// what is normalised is what was stored
static void residual_bf16_ref(float* const* a, const int* d) {
    residual_ref(a, d);
    op_store_bf16(a[RESIDUAL], (size_t)d['N'] * (size_t)d['C']);
    rmsnorm_forward_ref(a[NORM_OUT], a[NORM_RSTD], a[RESIDUAL], a[NORM_WEIGHT], EPS, d['N'], d['C']);
}

OP_STORED(X)
static void residual(X* const* x, float* const* a, const int* d, const Device* dev) {
    residual_rmsnorm_forward(x[RESIDUAL], x[NORM_OUT], a[NORM_RSTD], x[LEFT], x[RIGHT], x[NORM_WEIGHT], EPS, d['N'],
                             d['C'], dev);
}

static double residual_apart(const OpProblem* p, int array, size_t i) {
    switch (array) {
        case NORM_OUT: return apart(p, OUT, i);
        case NORM_RSTD: return apart(p, RSTD, i);
        default: return 0.0;  // one sum of two, in every build
    }
}

static const Op residual_rmsnorm = {
    .name = "residual", .dims = "NC",
    .arrays = {
        {LEFT, "left", "NC", GIVEN, 2.0f},
        {RIGHT, "right", "NC", GIVEN, 1.0f},
        {RESIDUAL, "residual", "NC", MADE, 0.0f, NULL, "left right"},
        {NORM_WEIGHT, "norm_weight", "C", GIVEN, 1.5f},
        {NORM_OUT, "norm_out", "NC", MADE},
        {NORM_RSTD, "norm_rstd", "N", MADE | FLOAT},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = residual_ref, .forward_bf16_ref = residual_bf16_ref, .forward = OP_FAST(residual),
    .apart = residual_apart,
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
    const int shape[] = {2, 4};
    const float inp[] = {0, 0, 0, 0, 1000, -1000, 1000, -1000}, weight[] = {1, 2, 3, 4},
                dout[] = {1, 2, 3, 4, 1, 2, 3, 4};
    const float want_out[] = {0, 0, 0, 0, 1, -2, 3, -4}, want_dweight[] = {1, -2, 3, -4};
    OpProblem p = op_problem(&rmsnorm, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[INP], inp, sizeof inp), memcpy(p.a[WEIGHT], weight, sizeof weight), memcpy(p.a[DOUT], dout, sizeof dout);
    memset(p.before[DINP], 0, sizeof inp);
    op_answer(t, &p, &dev);
    const float *out = p.a[OUT], *rstd = p.a[RSTD], *dinp = p.a[DINP], *dweight = p.a[DWEIGHT];
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
    op_problem_free(&p);
}

static int is_fused(void) {
#ifdef SYSTEM_LIBM
    return 0;
#else
    return !FAST_KERNELS;
#endif
}

// A fused product that is too small for any float rounds to -0, and sums of nothing else are -0: dweight of the first
// channel, and that of g * xhat, by whose sign the second channel's -0 - xhat * mean is 0 or -0
static void test_underflow(Test* t) {
    const int shape[] = {1, 2};
    const float inp[] = {0x1p-49f, 4.0f}, dout[] = {-0x1p-100f, -0.0f}, weight[] = {1.0f, 1.0f}, dinp[] = {0.0f, -0.0f};
    if (!is_fused()) {
        skip(t, "products round before they are added, or fast kernels add along trees");
        return;
    }
    OpProblem p = op_problem(&rmsnorm, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[INP], inp, sizeof inp), memcpy(p.a[DOUT], dout, sizeof dout);
    memcpy(p.a[WEIGHT], weight, sizeof weight), memcpy(p.before[DINP], dinp, sizeof dinp);
    op_solve(&p);
    check(t, float_bits(p.a[DWEIGHT][0]) == 0x80000000u, "dweight: found %g, expected -0", (double)p.a[DWEIGHT][0]);
    check(t, float_bits(p.a[DINP][1]) == 0, "dinp: found %g, expected +0", (double)p.a[DINP][1]);
    op_check(t, &p, 1, &dev);
    device_free(&dev);
    op_problem_free(&p);
}

// what is written has the bits of what is added to zeros, also of hard numbers; and -0 has become 0
static void test_zeros(Test* t) {
    enum { N = 33, C = 136, SIZE = N * C };
    const int shape[] = {N, C};
    const Op op = rmsnorm_written();
    for (int kind = EASY; kind <= MANY_SPECIALS; kind++) {
        OpProblem added = op_problem(&rmsnorm, shape, kind, 0), alone = op_problem(&op, shape, kind, 0);
        Device dev = test_device(2);
        for (int c = 0; c < C; c++) {  // a row whose dx is -0
            added.a[DOUT][c] = alone.a[DOUT][c] = -0.0f;
            added.a[INP][c] = alone.a[INP][c] = added.a[WEIGHT][c] = alone.a[WEIGHT][c] = 1.0f;
        }
        memset(added.before[DINP], 0, sizeof(float) * SIZE);
        op_answer(t, &added, &dev), op_answer(t, &alone, &dev);
        check_bits(t, "dinp", alone.a[DINP], added.a[DINP], SIZE);
        check_bits(t, "dweight", alone.a[DWEIGHT], added.a[DWEIGHT], C);
        for (int c = 0; c < C; c++) { check(t, float_bits(alone.a[DINP][c]) == 0, "-0 is written at channel %d", c); }
        device_free(&dev);
        op_problem_free(&added), op_problem_free(&alone);
    }
}

int main(int argc, char** argv) {
    const Op op_written = rmsnorm_written(), op_float_gain = rmsnorm_float_gain(), op_plain = rmsnorm_plain();
    const Op* ops[] = {&rmsnorm, &op_written, &op_float_gain, &op_plain, &zero_centred, &residual_rmsnorm};
    const Promise promises[] = {
        {"frozen", "the plain loop rounds as the specification says, bit for bit", test_frozen},
        {"obvious", "a row of zeros stays 0, +-1000 becomes +-1 times the weight", test_obvious},
        {"underflow", "sums whose products are too small for floats keep their sign", test_underflow},
        {"zeros", "dinp that is written has the bits of zeros to which it is added", test_zeros},
        {"without", "no weight: the bits of a weight of ones", test_no_weight},
        {"gain of 0", "a weight of 0 gives 1, one of -1 gives 0, halves of the last place go to even", test_gain},
    };
    return op_main(argc, argv, ops, 6, promises, 6);
}
