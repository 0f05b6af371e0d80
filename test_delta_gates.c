/*
Promises of llmc/ops/delta_gates.h, which follow from the table (llmc/test/op.h), and others of its own. Fast builds for
GPUs keep tolerances.
*/
#include "llmc/ops/delta_gates.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

enum { A, B, A_LOG, DT_BIAS, G, BETA, DG, DBETA, DA, DB, DA_LOG, DDT_BIAS };

static void forward_ref(float* const* a, const int* d) {
    delta_gates_forward_ref(a[G], a[BETA], a[A], a[B], a[A_LOG], a[DT_BIAS], d['N'], d['H']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    delta_gates_forward(a[G], a[BETA], x[A], x[B], x[A_LOG], x[DT_BIAS], d['N'], d['H'], dev);
}

static void backward_ref(float* const* a, const int* d) {
    delta_gates_backward_ref(a[DA], a[DB], a[DA_LOG], a[DDT_BIAS], a[DG], a[DBETA], a[A], a[G], a[BETA], a[A_LOG],
                             a[DT_BIAS], d['N'], d['H']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    delta_gates_backward(x[DA], x[DB], a[DA_LOG], a[DDT_BIAS], a[DG], a[DBETA], x[A], a[G], a[BETA], x[A_LOG],
                         x[DT_BIAS], d['N'], d['H'], dev);
}

static void in_double(double* const* a, const int* d) {
    for (int i = 0, H = d['H']; i < d['N'] * H; i++) {
        a[G][i] = -exp(a[A_LOG][i % H]) * log1p(exp(a[A][i] + a[DT_BIAS][i % H]));
        a[BETA][i] = 1.0 / (1.0 + exp(-a[B][i]));
    }
}

// |a|, |b| < 4, |A_log|, |dt_bias| < 1, |dg|, |dbeta| < 1: |a + dt_bias| < 5, |g| < e * 5.01, |da| < e
static const double MOST_G = 13.7, MOST_DA = 2.72;
static const double G_ERROR = 13.7 * (5 + 5) * 0x1p-24, DA_ERROR = 2.72 * (8 + 5) * 0x1p-24;

static double error(int array, const int* d) {
    const int N = d['N'];
    switch (array) {
        case G: return G_ERROR;
        case BETA: return 3 * 0x1p-24;      // below 1, three roundings
        case DA: return DA_ERROR;
        case DB: return 7 * 0x1p-24 / 4.0;  // 1/4 at most; beta with three roundings, three more
        case DA_LOG: return rounding_walk(N, MOST_G * N) + N * G_ERROR;
        case DDT_BIAS: return rounding_walk(N, MOST_DA * N) + N * DA_ERROR;
        default: return -1.0;
    }
}

static double apart(const OpProblem* p, int array, size_t i) {  // what fused products and sums by parts may do
    return 2.0 * error(array, p->d);
}

static const int shapes[][OP_DIMS] = {
    {1, 1}, {1, 7}, {7, 1}, {7, 33}, {33, 7}, {8, 32}, {40, 3}, {65, 48}, {2, 257},
#if defined __CUDACC__ && !defined EXACT
    {200, 33}, {1200, 2},  // several parts of the positions
#elif !defined __CUDACC__
    {129, 32}, {31, 64}, {64, 65}, {97, 130},
#endif
    {0},
};

static const Op delta_gates = {
    .name = "delta_gates", .dims = "NH",
    .arrays = {
        {A, "a", "NH", GIVEN, 4.0f},
        {B, "b", "NH", GIVEN, 4.0f},
        {A_LOG, "A_log", "H", GIVEN, 1.0f},
        {DT_BIAS, "dt_bias", "H", GIVEN, 1.0f},
        {G, "g", "NH", MADE | FLOAT, 0.0f, "dA_log"},
        {BETA, "beta", "NH", MADE | FLOAT},
        {DG, "dg", "NH", GIVEN | FLOAT, 1.0f},
        {DBETA, "dbeta", "NH", GIVEN | FLOAT, 1.0f},
        {DA, "da", "NH", GRADIENT, 0.0f, NULL, "a"},
        {DB, "db", "NH", GRADIENT, 0.0f, NULL, "b"},
        {DA_LOG, "dA_log", "H", GRADIENT | ASKED | FLOAT},
        {DDT_BIAS, "ddt_bias", "H", GRADIENT | ASKED | FLOAT},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{7, 33}, {65, 8}}, .apart = apart,
};

// one operation per line, as dev/ref/gated_delta.py has them
static void test_frozen(Test* t) {
    enum { N = 50, H = 5, SIZE = N * H };
    const int shape[] = {N, H};
    OpProblem p = op_problem(&delta_gates, shape, EASY, 0);
    float *g = filled_array(SIZE, NAN), *da = filled_array(SIZE, NAN), *db = filled_array(SIZE, NAN);
    float *dA_log = filled_array(H, 0.0f), *ddt_bias = filled_array(H, 0.0f);
    for (int i = 0; i < SIZE; i++) {
        const int h = i % H;
        const float x = p.a[A][i] + p.a[DT_BIAS][h], sp = fm_log1p(fm_exp(x)), decay = fm_exp(p.a[A_LOG][h]);
        const float product = decay * sp, dproduct = decay * p.a[DG][i], beta = p.a[BETA][i];
        const float slope = -fm_expm1(-sp), rest = 1.0f - beta, beta_slope = beta * rest;
        g[i] = -product;
        da[i] = -dproduct * slope;
        db[i] = p.a[DBETA][i] * beta_slope;
        dA_log[h] = madd(p.a[DG][i], g[i], dA_log[h]);
        ddt_bias[h] += da[i];
    }
    check_bits(t, "g", p.a[G], g, SIZE);
    check_bits(t, "da", p.a[DA], da, SIZE);
    check_bits(t, "db", p.a[DB], db, SIZE);
    check_bits(t, "dA_log", p.a[DA_LOG], dA_log, H);
    check_bits(t, "ddt_bias", p.a[DDT_BIAS], ddt_bias, H);
    free(g), free(da), free(db), free(dA_log), free(ddt_bias);
    op_problem_free(&p);
}

// exp(A_log) 1: an input of 30 fades by exp(-30), one of -200 not at all; b of 0 writes half of a value
static void test_obvious(Test* t) {
    const int shape[] = {2, 1};
    const float a[] = {30.0f, -200.0f}, b[] = {0.0f, 200.0f}, ones[] = {1.0f, 1.0f};
    OpProblem p = op_problem(&delta_gates, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[A], a, sizeof a), memcpy(p.a[B], b, sizeof b);
    memcpy(p.a[DG], ones, sizeof ones), memcpy(p.a[DBETA], ones, sizeof ones);
    p.a[A_LOG][0] = p.a[DT_BIAS][0] = 0.0f;
    op_answer(t, &p, &dev);
    const float want[] = {-30.0f, 0.0f, 0.5f, 1.0f, -1.0f, 0.0f, 0.25f, 0.0f, -30.0f, -1.0f};
    const float got[] = {p.a[G][0],  p.a[G][1],  p.a[BETA][0], p.a[BETA][1],   p.a[DA][0],
                         p.a[DA][1], p.a[DB][0], p.a[DB][1],   p.a[DA_LOG][0], p.a[DDT_BIAS][0]};
    for (int i = 0; i < 10; i++) { check(t, got[i] == want[i], "number %d: found %.9g", i, (double)got[i]); }
    device_free(&dev);
    op_problem_free(&p);
}

// no positions: sums of nothing are 0, and the rest is not touched
static void test_nothing(Test* t) {
    enum { H = 3 };
    Device dev = test_device(1);
    float *ones = filled_array(H, 1.0f), *sums = filled_array(2 * H, 7.0f), *none = NULL;
    float *heads = to_device(ones, H, &dev), *dsums = to_device(sums, 2 * H, &dev);
    delta_gates_forward(none, none, none, none, heads, heads, 0, H, &dev);
    delta_gates_backward(none, none, dsums, dsums + H, none, none, none, none, none, heads, heads, 0, H, &dev);
    from_device(sums, dsums, 2 * H, &dev);
    from_device(ones, heads, H, &dev);
    for (int i = 0; i < 2 * H; i++) { check(t, float_bits(sums[i]) == 0, "found %.9g", (double)sums[i]); }
    free(ones), free(sums);
    device_free(&dev);
}

int main(int argc, char** argv) {
    const Op* ops[] = {&delta_gates};
    const Promise promises[] = {
        {"frozen", "the plain loop rounds as the specification says, bit for bit", test_frozen},
        {"obvious", "an input of 30 fades by exp(-30), one of -200 by nothing; b = 0 writes a half", test_obvious},
        {"nothing", "N = 0: the sums are 0", test_nothing},
    };
    return op_main(argc, argv, ops, 1, promises, 3);
}
