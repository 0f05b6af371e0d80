/*
Promises of llmc/ops/router.h, which follow from the table (llmc/test/op.h): scores, choices, weights, statistics and
gradients of every kind of router; and what is special to it: ties, NaN, given experts, the balance of biases.
*/
#include "llmc/ops/router.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

enum { LOGITS, BIAS, GIVEN_EXPERTS, EXPERTS, WEIGHTS, SCORES, LSE, STATISTICS, DWEIGHTS, DSTATISTICS, DLOGITS };

// bits of the last dim: what the router of a shape does
enum { RENORMALIZE = 1, WITH_BIAS = 2, IS_GIVEN = 4, SCALED = 8, BALANCED = 16, WITH_Z = 32 };
static const float BALANCE_WEIGHT = 0.375f, Z_WEIGHT = 0.0625f;

static RouterShape shape_of(const int* d) {
    const RouterShape s = {d['E'], d['k'], d['m'], d['b'] & RENORMALIZE, d['b'] & SCALED ? 2.5f : 1.0f, d['g'], d['t']};
    return s;
}

static float balance_of(const int* d) { return d['b'] & BALANCED ? BALANCE_WEIGHT : 0.0f; }
static float z_of(const int* d) { return d['b'] & WITH_Z ? Z_WEIGHT : 0.0f; }

// without softmax there is no lse: it is said to be 0
static float* lse_of(float* const* a, const int* d) { return d['m'] == ROUTER_SOFTMAX ? a[LSE] : NULL; }

static void forward_ref(float* const* a, const int* d) {
    const RouterShape s = shape_of(d);
    int* experts = (int*)a[EXPERTS];
    for (int n = 0; n < d['N']; n++) { a[LSE][n] = 0.0f; }
    router_forward_ref(experts, a[WEIGHTS], a[SCORES], lse_of(a, d), a[LOGITS], d['b'] & WITH_BIAS ? a[BIAS] : NULL,
                       d['b'] & IS_GIVEN ? (int*)a[GIVEN_EXPERTS] : NULL, &s, d['N']);
    router_statistics_ref(a[STATISTICS], experts, a[WEIGHTS], a[SCORES], lse_of(a, d), &s, d['N']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const RouterShape s = shape_of(d);
    int* experts = (int*)a[EXPERTS];
    if (d['m'] != ROUTER_SOFTMAX) { device_zero(a[LSE], sizeof(float) * (size_t)d['N'], dev); }
    router_forward(experts, a[WEIGHTS], a[SCORES], lse_of(a, d), a[LOGITS], d['b'] & WITH_BIAS ? a[BIAS] : NULL,
                   d['b'] & IS_GIVEN ? (int*)a[GIVEN_EXPERTS] : NULL, &s, d['N'], dev);
    router_statistics(a[STATISTICS], experts, a[WEIGHTS], a[SCORES], lse_of(a, d), &s, d['N'], dev);
}

// what is not needed is NULL
static void backward_ref(float* const* a, const int* d) {
    const RouterShape s = shape_of(d);
    router_backward_ref(a[DLOGITS], a[DWEIGHTS], (int*)a[EXPERTS], s.renormalize ? a[WEIGHTS] : NULL, a[SCORES],
                        z_of(d) != 0.0f ? a[LSE] : NULL, s.score == ROUTER_SQRT_SOFTPLUS ? a[LOGITS] : NULL,
                        balance_of(d) != 0.0f ? a[STATISTICS] : NULL, balance_of(d), z_of(d), &s, d['N']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const RouterShape s = shape_of(d);
    router_backward(a[DLOGITS], a[DWEIGHTS], (int*)a[EXPERTS], s.renormalize ? a[WEIGHTS] : NULL, a[SCORES],
                    z_of(d) != 0.0f ? a[LSE] : NULL, s.score == ROUTER_SQRT_SOFTPLUS ? a[LOGITS] : NULL,
                    balance_of(d) != 0.0f ? a[STATISTICS] : NULL, balance_of(d), z_of(d), &s, d['N'], dev);
}

// the bias is small beside the scores, so that both decide; the loss is made of weights, balance and z
static void fill(float* const* a, const int* d) {
    const int E = d['E'];
    memset(a[DSTATISTICS], 0, sizeof(float) * (size_t)d['S']);
    a[DSTATISTICS][2 * E + ROUTER_BALANCE] = balance_of(d);
    a[DSTATISTICS][2 * E + ROUTER_Z] = z_of(d);
}

// the experts are those that the plain loop chose, and counts are constants
static void row_in_double(double* const* a, const RouterShape* s, int n, double* share) {
    const int E = s->E, k = s->k;
    double *z = a[LOGITS] + n * E, *p = a[SCORES] + n * E, sum = 0.0, chosen = 0.0, all = 0.0;
    for (int e = 0; e < E; e++) { sum += exp(z[e]); }
    for (int e = 0; e < E; e++) {
        const double sigmoid = 1.0 / (1.0 + exp(-z[e]));
        p[e] = s->score == ROUTER_SOFTMAX ? exp(z[e]) / sum : s->score == ROUTER_SIGMOID ? sigmoid
                                                                                         : sqrt(log1p(exp(z[e])));
        all += p[e];
    }
    for (int e = 0; e < E; e++) { share[e] += p[e] / all; }
    for (int j = 0; j < k; j++) { chosen += p[(int)a[EXPERTS][n * k + j]]; }
    for (int j = 0; j < k; j++) {
        a[WEIGHTS][n * k + j] = p[(int)a[EXPERTS][n * k + j]] / (s->renormalize ? chosen : 1.0) * (double)s->factor;
    }
    a[LSE][n] = s->score == ROUTER_SOFTMAX ? log(sum) : 0.0;
}

static void in_double(double* const* a, const int* d) {
    const RouterShape s = shape_of(d);
    const int E = s.E, N = d['N'];
    double *statistics = a[STATISTICS], *totals = statistics + 2 * E;
    for (int i = 0; i < 2 * E + ROUTER_TOTALS; i++) { statistics[i] = 0.0; }
    for (int n = 0; n < N; n++) {
        row_in_double(a, &s, n, statistics + E);
        double top = 0.0;
        for (int j = 0; j < s.k; j++) {
            statistics[(int)a[EXPERTS][n * s.k + j]] += 1.0;
            top = fmax(top, a[WEIGHTS][n * s.k + j]);
        }
        totals[ROUTER_Z] += a[LSE][n] * a[LSE][n] / N;
        totals[ROUTER_TOP] += top / N;
        totals[ROUTER_SURE] += (top > 0.9 * (double)s.factor) / (double)N;
    }
    for (int e = 0; e < E; e++) {
        statistics[E + e] /= N;
        totals[ROUTER_BALANCE] += E * statistics[e] / (N * s.k) * statistics[E + e];
    }
}

static double error(int array, const int* d) {
    const double size = d['b'] & SCALED ? 2.5 : 1.0;  // of a weight; z and scores are below 3
    switch (array) {
        case EXPERTS: return -1.0;
        case WEIGHTS: return rounding_walk(d['E'] + 8, 2.0 * size);
        case SCORES: return rounding_walk(d['E'] + 4, 2.0);
        case LSE: return rounding_walk(d['E'] + 4, 4.0);
        case STATISTICS: return rounding_walk(d['N'] + d['E'], 16.0 * size);
        default: return rounding_walk(2 * d['E'] + 8, 8.0 * size);  // dp below 8; not renormalised, divided by sums > 1
    }
}

// what a number of the statistics is below; counts are exact
static double statistic_size(size_t i, size_t E) {
    const double totals[] = {4.0, 64.0, 2.5, 1.0};
    return i < E ? 0.0 : i < 2 * E ? 1.0 : totals[i - 2 * E];
}

// Fast kernels add along trees: n sums of sizes below 1 are off by n * 2^-24 at most, a lane's own n / 32 and the tree.
// The same functions, so experts are the same but for scores that a last place decides
static double apart(const OpProblem* p, int array, size_t i) {
    const double terms = p->d['E'] + p->d['k'] + 8.0, size = p->d['b'] & SCALED ? 2.5 : 1.0;
    switch (array) {
        case STATISTICS: return (terms + p->d['N']) * 0x1p-23 * statistic_size(i, (size_t)p->d['E']);
        case DLOGITS: return terms * 0x1p-23 * 16.0 * size;
        default: return terms * 0x1p-23 * 8.0 * size;
    }
}

// N, E, k, length of the statistics, score, groups, groups that stay, what it does
#define ROUTER(N, E, k, score, groups, top, does) {N, E, k, 2 * (E) + ROUTER_TOTALS, score, groups, top, does}
#define SOFT ROUTER_SOFTMAX
#define SIGM ROUTER_SIGMOID
#define ROOT ROUTER_SQRT_SOFTPLUS
enum { ALL_LOSSES = BALANCED | WITH_Z, DEEPSEEK = RENORMALIZE | WITH_BIAS | SCALED };
static const int shapes[][OP_DIMS] = {
    ROUTER(1, 1, 1, SOFT, 0, 0, RENORMALIZE), ROUTER(7, 1, 1, SIGM, 0, 0, BALANCED),
    ROUTER(1, 7, 2, SOFT, 1, 1, RENORMALIZE | ALL_LOSSES), ROUTER(33, 16, 4, SOFT, 0, 0, RENORMALIZE | BALANCED),
    ROUTER(17, 33, 5, SOFT, 0, 0, SCALED | ALL_LOSSES), ROUTER(5, 7, 7, SOFT, 0, 0, RENORMALIZE | WITH_Z),
    ROUTER(9, 5, 1, SOFT, 0, 0, ALL_LOSSES), ROUTER(31, 31, 3, SOFT, 0, 0, WITH_BIAS | RENORMALIZE),
    ROUTER(65, 8, 2, SOFT, 0, 0, RENORMALIZE), ROUTER(40, 12, 3, SOFT, 0, 0, IS_GIVEN | RENORMALIZE | BALANCED),
    ROUTER(19, 16, 3, SIGM, 4, 2, DEEPSEEK | BALANCED), ROUTER(23, 33, 8, SIGM, 1, 1, DEEPSEEK),
    ROUTER(16, 64, 6, SIGM, 8, 3, DEEPSEEK), ROUTER(8, 6, 4, SOFT, 3, 2, WITH_BIAS),
    ROUTER(6, 4, 4, SIGM, 2, 2, SCALED),
    ROUTER(21, 24, 6, ROOT, 0, 0, DEEPSEEK | BALANCED), ROUTER(13, 17, 4, ROOT, 0, 0, IS_GIVEN | RENORMALIZE | SCALED),
    ROUTER(130, 3, 2, SIGM, 0, 0, BALANCED), ROUTER(70, 66, 32, SOFT, 0, 0, ALL_LOSSES),
    ROUTER(3, 512, 16, SOFT, 0, 0, 0),
    ROUTER(2, 1024, 8, SIGM, 32, 4, DEEPSEEK), ROUTER(3, 1024, 8, SOFT, 0, 0, RENORMALIZE | ALL_LOSSES),
    ROUTER(100, 40, 8, SOFT, 0, 0, RENORMALIZE | ALL_LOSSES), ROUTER(150, 20, 2, ROOT, 10, 5, DEEPSEEK | BALANCED), {0},
};

static const Op router = {
    .name = "router", .dims = "NEkSmgtb",
    .arrays = {
        {LOGITS, "logits", "NE", GIVEN | FLOAT, 2.0f},
        {BIAS, "bias", "E", GIVEN | FLOAT, 0.2f},
        {GIVEN_EXPERTS, "given", "Nk", GIVEN | INDEX, 0.0f, NULL, NULL, 'E'},
        {EXPERTS, "experts", "Nk", MADE | INDEX, 0.0f, NULL, "given"},
        {WEIGHTS, "weights", "Nk", MADE | FLOAT},
        {SCORES, "scores", "NE", MADE | FLOAT},
        {LSE, "lse", "N", MADE | FLOAT},
        {STATISTICS, "statistics", "S", MADE | FLOAT},
        {DWEIGHTS, "dweights", "Nk", GIVEN | FLOAT, 1.0f},
        {DSTATISTICS, "dstatistics", "S", GIVEN | FLOAT, 1.0f},
        {DLOGITS, "dlogits", "NE", GRADIENT | FLOAT},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE, .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error,
    .judged = {ROUTER(9, 5, 2, SOFT, 0, 0, RENORMALIZE | ALL_LOSSES), ROUTER(9, 5, 2, SOFT, 0, 0, SCALED | ALL_LOSSES),
               ROUTER(7, 6, 3, SOFT, 0, 0, RENORMALIZE | WITH_BIAS | SCALED), ROUTER(9, 5, 1, SOFT, 0, 0, BALANCED),
               ROUTER(9, 8, 3, SIGM, 2, 1, DEEPSEEK | BALANCED), ROUTER(9, 8, 3, SIGM, 0, 0, BALANCED),
               ROUTER(9, 8, 3, ROOT, 0, 0, DEEPSEEK | BALANCED), ROUTER(9, 8, 3, ROOT, 0, 0, IS_GIVEN | RENORMALIZE),
               ROUTER(9, 4, 3, SOFT, 0, 0, IS_GIVEN | RENORMALIZE | WITH_Z),
               ROUTER(9, 4, 3, SIGM, 0, 0, IS_GIVEN | SCALED)},
    .apart = apart,
};

// ---- what can be done by hand ----

// the answers of the ops to these logits and gradients, in the arrays of the problem
static OpProblem answered(Test* t, const int* shape, const float* logits, const float* dweights, const int* given) {
    OpProblem p = op_problem(&router, shape, EASY, 0);
    Device dev = test_device(2);
    memcpy(p.a[LOGITS], logits, sizeof(float) * op_length(&p, LOGITS));
    memset(p.a[BIAS], 0, sizeof(float) * op_length(&p, BIAS));
    if (dweights) { memcpy(p.a[DWEIGHTS], dweights, sizeof(float) * op_length(&p, DWEIGHTS)); }
    if (given) { memcpy(p.a[GIVEN_EXPERTS], given, sizeof(int) * op_length(&p, GIVEN_EXPERTS)); }
    op_answer(t, &p, &dev);
    device_free(&dev);
    return p;
}

static void check_experts(Test* t, const char* what, const OpProblem* p, const int* want) {
    const int *got = (const int*)p->a[EXPERTS], n = (int)op_length(p, EXPERTS);
    for (int i = 0; i < n; i++) {
        check(t, got[i] == want[i], "%s: slot %d: found expert %d, expected %d", what, i, got[i], want[i]);
    }
}

// to six digits of numbers around 1
static void check_printed(Test* t, const char* what, const float* got, const double* want, size_t n) {
    check_close(t, what, got, want, n, 1e-6);
}

// two tokens, computed apart; `both` has the balance times 0.01
static void test_example(Test* t) {
    const int shape[] = ROUTER(2, 4, 2, SOFT, 0, 0, RENORMALIZE),
              with[] = ROUTER(2, 4, 2, SOFT, 0, 0, RENORMALIZE | BALANCED);
    const float logits[] = {0.5f, -1, 2, 1, 1, 0, -0.5f, 0.25f}, dweights[] = {0.3f, -0.2f, 0.1f, 0.4f};
    const double p[] = {0.135989, 0.030343, 0.609460, 0.224208, 0.484643, 0.178290, 0.108138, 0.228929},
                 weights[] = {0.731059, 0.268941, 0.679179, 0.320821}, counts[] = {1, 0, 1, 2},
                 means[] = {0.310316, 0.104317, 0.358799, 0.226568}, balance = 1.12225175, z = 4.5996466,
                 path[] = {0, 0, 0.098305967, -0.098305967, -0.065368498, 0, 0, 0.065368498},
                 both[] = {-0.000131817, -0.000181129, -0.000590764, 0.000903709,
                           -0.000122709, -0.000936592, -0.000027380, 0.001086681};
    const int experts[] = {2, 3, 0, 3};
    OpProblem r = answered(t, shape, logits, dweights, NULL), q = answered(t, with, logits, dweights, NULL);
    check_experts(t, "experts", &r, experts);
    check_printed(t, "p", r.a[SCORES], p, 8);
    check_printed(t, "weights", r.a[WEIGHTS], weights, 4);
    check_printed(t, "counts", r.a[STATISTICS], counts, 4);
    check_printed(t, "P", r.a[STATISTICS] + 4, means, 4);
    check_printed(t, "balance", r.a[STATISTICS] + 8 + ROUTER_BALANCE, &balance, 1);
    check_printed(t, "z", r.a[STATISTICS] + 8 + ROUTER_Z, &z, 1);
    check_printed(t, "path gradient", r.a[DLOGITS], path, 8);
    for (int i = 0; i < 8; i++) {
        double balanced = ((double)q.a[DLOGITS][i] - (double)r.a[DLOGITS][i]) * 0.01 / (double)BALANCE_WEIGHT;
        check(t, fabs(balanced - both[i]) < 1e-8, "balance gradient %d: found %.9f, expected %.9f", i, balanced,
              both[i]);
    }
    op_problem_free(&r), op_problem_free(&q);
}

// one token, computed apart, as Qwen3.6's router has it; and its other half: without renormalisation
static void test_known(Test* t) {
    const int shape[] = ROUTER(1, 4, 2, SOFT, 0, 0, RENORMALIZE), plain[] = ROUTER(1, 4, 2, SOFT, 0, 0, 0),
              experts[] = {0, 3};
    const float logits[] = {1, 0.2f, -0.5f, 0.8f}, dweights[] = {0.3f, -1.2f};
    const double weights[] = {0.549833997, 0.450166003}, dlogits[] = {0.371274859, 0, 0, -0.371274859};
    double p[4], want[4], sum = 0.0, dot = 0.0;
    for (int e = 0; e < 4; e++) { sum += p[e] = exp((double)logits[e]); }
    for (int e = 0; e < 4; e++) { p[e] /= sum; }
    dot = 0.3 * p[0] - 1.2 * p[3];
    for (int e = 0; e < 4; e++) { want[e] = p[e] * ((e == 0 ? 0.3 : e == 3 ? -1.2 : 0.0) - dot); }
    OpProblem r = answered(t, shape, logits, dweights, NULL), q = answered(t, plain, logits, dweights, NULL);
    check_experts(t, "experts", &r, experts);
    check_printed(t, "weights", r.a[WEIGHTS], weights, 2);
    check_printed(t, "dlogits", r.a[DLOGITS], dlogits, 4);
    check_printed(t, "dlogits, not renormalised", q.a[DLOGITS], want, 4);
    op_problem_free(&r), op_problem_free(&q);
}

static void check_choice(Test* t, const char* what, const int* shape, const float* logits, const int* want) {
    OpProblem p = answered(t, shape, logits, NULL, NULL);
    check_experts(t, what, &p, want);
    op_problem_free(&p);
}

static void test_ties(Test* t) {
    const int two[] = ROUTER(2, 5, 2, SOFT, 0, 0, 0), groups[] = ROUTER(2, 6, 2, SIGM, 3, 1, 0),
              four[] = ROUTER(1, 6, 4, SIGM, 3, 2, 0), alike[] = ROUTER(1, 100, 5, SIGM, 0, 0, 0);
    const float a[] = {1, 3, 3, 0, 3, 7, 7, 7, 7, 7}, b[] = {0, 1, 1, 0, 1, 0, 0, 5, 1, 1, 5, 0};
    const float c[] = {1, 1, 9, 0, 1, 1};
    const int want_two[] = {1, 2, 0, 1}, want_groups[] = {0, 1, 0, 1}, want_four[] = {0, 1, 2, 3},
              want_alike[] = {0, 1, 2, 3, 4};
    float same[100];
    for (int e = 0; e < 100; e++) { same[e] = 0.5f; }
    check_choice(t, "ties", two, a, want_two);
    check_choice(t, "groups of the same score", groups, b, want_groups);
    check_choice(t, "the second group is one of two", four, c, want_four);
    check_choice(t, "all alike", alike, same, want_alike);
}

static void test_specials(Test* t) {
    const int three[] = ROUTER(1, 5, 3, SIGM, 0, 0, 0), four[] = ROUTER(1, 5, 4, SIGM, 0, 0, 0),
              soft[] = ROUTER(3, 5, 3, SOFT, 0, 0, RENORMALIZE), groups[] = ROUTER(1, 6, 4, SIGM, 3, 2, 0);
    const float z[] = {NAN, 1, NAN, -INFINITY, 0}, bad[] = {0, NAN, 1, 2, 3, INFINITY, 0, 1, 2, 3, -INFINITY, -INFINITY,
                -INFINITY, -INFINITY, -INFINITY}, grouped[] = {NAN, 9, 0, 0, NAN, NAN};
    const int want_three[] = {1, 3, 4}, want_four[] = {0, 1, 3, 4}, want_soft[] = {0, 1, 2, 0, 1, 2, 0, 1, 2},
              want_groups[] = {0, 1, 2, 3};
    check_choice(t, "NaN comes last", three, z, want_three);
    check_choice(t, "NaN comes last, the first of two", four, z, want_four);
    check_choice(t, "nothing but NaN", soft, bad, want_soft);
    check_choice(t, "a group with a NaN is worth -Inf, as all of NaN is", groups, grouped, want_groups);
}

// whatever the logits: k different experts, ascending
static void test_valid(Test* t) {
    for (int i = 0; shapes[i][0]; i++) {
        OpProblem p = op_problem(&router, shapes[i], MANY_SPECIALS, 0);
        Device dev = test_device(2);
        op_answer(t, &p, &dev);
        const int *experts = (const int*)p.a[EXPERTS], k = p.d['k'];
        for (int j = 0; j < p.d['N'] * k && !(p.d['b'] & IS_GIVEN); j++) {
            int lowest = j % k == 0 ? 0 : experts[j - 1] + 1;
            check(t, experts[j] >= lowest && experts[j] < p.d['E'], "slot %d of %d: expert %d", j % k, k, experts[j]);
        }
        device_free(&dev);
        op_problem_free(&p);
    }
}

// an expert twice in a row is two slots: its gradients add up
static void test_twice(Test* t) {
    const int shape[] = ROUTER(1, 3, 3, SIGM, 0, 0, IS_GIVEN),
              norm[] = ROUTER(1, 3, 3, SIGM, 0, 0, IS_GIVEN | RENORMALIZE);
    const float logits[] = {0, 0, 0}, dweights[] = {1, 2, 4};
    const int given[] = {2, 0, 2};
    const float want[] = {0.5f, 0, 1.25f}, third = 1.0f / 3.0f;
    const double path[] = {-1.0 / 18.0, 0, 1.0 / 18.0};  // (dw - 7/3) / 1.5 / 4: 2, and 1 + 4 in two slots
    OpProblem p = answered(t, shape, logits, dweights, given), q = answered(t, norm, logits, dweights, given);
    check_experts(t, "given", &p, given);
    check(t, float_bits(p.a[DLOGITS][0]) == float_bits(want[0]) && p.a[DLOGITS][1] == 0.0f && p.a[DLOGITS][2] == 1.25f,
          "dlogits: found %g %g %g", (double)p.a[DLOGITS][0], (double)p.a[DLOGITS][1], (double)p.a[DLOGITS][2]);
    for (int j = 0; j < 3; j++) { check(t, q.a[WEIGHTS][j] == third, "weight %d: %.9g", j, (double)q.a[WEIGHTS][j]); }
    check_printed(t, "dlogits, renormalised", q.a[DLOGITS], path, 3);
    check(t, p.a[STATISTICS][0] == 1.0f && p.a[STATISTICS][2] == 2.0f, "counts are those of slots");
    op_problem_free(&p), op_problem_free(&q);
}

// far left sqrt(softplus) is 0, and its slope 0 / 0 as it is written: no gradient, not NaN
static void test_far_left(Test* t) {
    const int shape[] = ROUTER(1, 6, 3, ROOT, 0, 0, RENORMALIZE | BALANCED), experts[] = {0, 4, 5};
    const float logits[] = {-30, -200, -INFINITY, -95, 1, 40}, dweights[] = {1, 2, 3};
    OpProblem p = answered(t, shape, logits, dweights, NULL);
    check_experts(t, "experts", &p, experts);
    for (int e = 0; e < 6; e++) { check(t, isfinite(p.a[DLOGITS][e]), "dlogits %d: %g", e, (double)p.a[DLOGITS][e]); }
    check(t, p.a[DLOGITS][1] == 0.0f && p.a[DLOGITS][2] == 0.0f, "no gradient where the score is 0");
    float near = router_slope_one(-19.999f, router_score_one(-19.999f, ROOT), ROOT),
          far = router_slope_one(-20.001f, router_score_one(-20.001f, ROOT), ROOT);
    check(t, fabsf(far / near - 0.999f) < 1e-5f, "slope beside -20: %.9g and %.9g", (double)near, (double)far);
    op_problem_free(&p);
}

// the 1e-20 below renormalised weights: scores of 0 make weights of 0, and scores of its size smaller ones
static void test_tiny(Test* t) {
    const int shape[] = ROUTER(2, 2, 2, SIGM, 0, 0, RENORMALIZE), soft[] = ROUTER(1, 2, 2, SOFT, 0, 0, RENORMALIZE);
    const float logits[] = {-200, -200, -46, -46}, far[] = {0, -100};
    const double p = exp(-46.0), want[] = {0, 0, p / (2 * p + 1e-20), p / (2 * p + 1e-20)};
    OpProblem a = answered(t, shape, logits, NULL, NULL), b = answered(t, soft, far, NULL, NULL);
    check_printed(t, "weights", a.a[WEIGHTS], want, 4);
    check(t, b.a[WEIGHTS][0] == 1.0f, "softmax: %.9g", (double)b.a[WEIGHTS][0]);
    op_problem_free(&a), op_problem_free(&b);
}

// more rows than a piece of a fast kernel, and than a few: counts are whole, gradients of the balance add up to 0
static void test_many(Test* t) {
    const int shape[] = ROUTER(1500, 10, 3, SOFT, 0, 0, RENORMALIZE | ALL_LOSSES);
    OpProblem p = op_problem(&router, shape, EASY, 0);
    Device dev = test_device(3);
    op_check(t, &p, 0, &dev);
    op_check(t, &p, 1, &dev);
    float sum = 0.0f;
    for (int e = 0; e < 10; e++) { sum += p.a[STATISTICS][e]; }
    check(t, sum == 4500.0f, "counts add up to %g", (double)sum);
    device_free(&dev);
    op_problem_free(&p);
}

// ---- the statistics of several layers together ----

// in one plain sum each: counts are whole numbers, and a mean of them is rounded once
static void test_pool(Test* t) {
    enum { LAYERS = 3, E = 37, K = 2, N = 50, LENGTH = 2 * E + ROUTER_TOTALS };
    const RouterShape shape = {E, K, SOFT, 1, 1.0f, 0, 0};
    float statistics[LAYERS * LENGTH], expected[LENGTH], *found = filled_array(LENGTH, NAN), balance = 0.0f;
    uint64_t stream = seeded_stream(5);
    Device dev = test_device(2);
    for (int i = 0; i < LAYERS * LENGTH; i++) {
        const uint32_t u = xorshift_u32(&stream);
        statistics[i] = i % LENGTH < E ? (float)(u % 9) : (float)(u % 1000) / 1024.0f;
    }
    for (int i = 0; i < LENGTH; i++) {
        const float two = statistics[i] + statistics[LENGTH + i], three = two + statistics[2 * LENGTH + i];
        expected[i] = three / 3.0f;
    }
    for (int e = 0; e < E; e++) {
        const float share = expected[e] / (float)(N * K);
        balance = fmaf(share, expected[E + e], balance);
    }
    expected[2 * E + ROUTER_BALANCE] = (float)E * balance;
    float *device_statistics = to_device(statistics, LAYERS * LENGTH, &dev), *pooled = to_device(found, LENGTH, &dev);
    router_pool(pooled, device_statistics, LAYERS, &shape, N, &dev);
    from_device(found, pooled, LENGTH, &dev);
    if (FAST_KERNELS) {  // the compiler may fuse, and divides otherwise
        for (int i = 0; i < LENGTH; i++) {
            const double size = fmax(1.0, fabs((double)expected[i]));
            const double distance = fabs((double)found[i] - (double)expected[i]);
            check(t, distance < (E + 4) * 0x1p-23 * size, "[%d]: found %.9g, expected %.9g", i, (double)found[i],
                  (double)expected[i]);
        }
    } else {
        check_bits(t, "pooled", found, expected, LENGTH);
    }
    device_drop(device_statistics);
    device_free(&dev);
    free(found);
}

// ---- frozen: the expressions as they are specified, one operation per line ----

static void frozen_forward(const OpProblem* p, int n, float* scores, float* weights, float* lse) {
    const int E = p->d['E'], k = p->d['k'], *experts = (const int*)p->a[EXPERTS] + n * k;
    const float* z = p->a[LOGITS] + n * E;
    float largest = z[0], sum = 0.0f, chosen = 0.0f;
    for (int e = 1; e < E; e++) { largest = fmaxf(largest, z[e]); }
    for (int e = 0; e < E; e++) {
        const float less = z[e] - largest;
        scores[e] = fm_exp(less);
        sum = sum + scores[e];
    }
    for (int e = 0; e < E; e++) { scores[e] = scores[e] / sum; }
    for (int j = 0; j < k; j++) { chosen = chosen + scores[experts[j]]; }
    for (int j = 0; j < k; j++) {
        const float share = scores[experts[j]] / chosen;
        weights[j] = share * 2.5f;
    }
    const float log_sum = fm_log(sum);
    *lse = largest + log_sum;
}

static void frozen_backward(const OpProblem* p, int n, const float* scores, const float* weights, float lse,
                            const float* counts, float* dz) {
    const int N = p->d['N'], E = p->d['E'], k = p->d['k'], *experts = (const int*)p->a[EXPERTS] + n * k;
    const float* dw = p->a[DWEIGHTS] + n * k;
    float chosen = 0.0f, dot = 0.0f, all = 0.0f, z = 2.0f * Z_WEIGHT;
    for (int j = 0; j < k; j++) { chosen = chosen + scores[experts[j]]; }
    for (int j = 0; j < k; j++) {
        const float v = weights[j] / 2.5f;
        dot = fmaf(v, dw[j], dot);
    }
    for (int e = 0; e < E; e++) { dz[e] = 0.0f; }
    for (int j = 0; j < k; j++) {
        float d = dw[j] - dot;
        d = d / chosen;
        d = d * 2.5f;
        dz[experts[j]] = dz[experts[j]] + d;
    }
    for (int e = 0; e < E; e++) {
        const float f = counts[e] / (float)(N * k);
        float q = BALANCE_WEIGHT * (float)E;
        q = q * f;
        q = q / (float)N;
        dz[e] = dz[e] + q;
    }
    z = z / (float)N;
    z = z * lse;
    for (int e = 0; e < E; e++) { all = fmaf(scores[e], dz[e], all); }
    for (int e = 0; e < E; e++) {
        const float d = dz[e] - all, through = scores[e] * d;
        dz[e] = fmaf(z, scores[e], through);
    }
}

static void test_frozen(Test* t) {
    enum { N = 30, E = 13, K = 4 };
    const int shape[] = ROUTER(N, E, K, SOFT, 0, 0, RENORMALIZE | SCALED | ALL_LOSSES);
    OpProblem p = op_problem(&router, shape, EASY, 0);
    float scores[E], weights[K], lse, dz[E], counts[E] = {0}, means[E] = {0}, balance = 0.0f, z = 0.0f;
    for (int i = 0; i < N * K; i++) { counts[((int*)p.a[EXPERTS])[i]] += 1.0f; }
    for (int n = 0; n < N; n++) {
        frozen_forward(&p, n, scores, weights, &lse);
        frozen_backward(&p, n, scores, weights, lse, counts, dz);
        check_bits(t, "scores", p.a[SCORES] + n * E, scores, E);
        check_bits(t, "weights", p.a[WEIGHTS] + n * K, weights, K);
        check_bits(t, "lse", p.a[LSE] + n, &lse, 1);
        check_bits(t, "dlogits", p.a[DLOGITS] + n * E, dz, E);
        for (int e = 0; e < E; e++) { means[e] = means[e] + scores[e]; }
        z = fmaf(lse, lse, z);
    }
    for (int e = 0; e < E; e++) {
        const float f = counts[e] / (float)(N * K);
        means[e] = means[e] / (float)N;
        balance = fmaf(f, means[e], balance);
    }
    balance = (float)E * balance;
    z = z / (float)N;
    check_bits(t, "counts", p.a[STATISTICS], counts, E);
    check_bits(t, "P", p.a[STATISTICS] + E, means, E);
    check_bits(t, "balance", p.a[STATISTICS] + 2 * E + ROUTER_BALANCE, &balance, 1);
    check_bits(t, "z", p.a[STATISTICS] + 2 * E + ROUTER_Z, &z, 1);
    op_problem_free(&p);
}

// ---- on the host ----

static void test_bias(Test* t) {
    float bias[] = {0.5f, 0.25f, -0.5f, -0.25f};
    const float counts[] = {6, 2, 4, 4};  // mean 4
    const float want[] = {0.4375f, 0.3125f, -0.5f, -0.25f}, uneven[] = {1, 2, 0};
    router_bias_update(bias, counts, 0.0625f, 1, 4);
    check_bits(t, "bias", bias, want, 4);
    float three[] = {0, 0, 0};
    const float want_three[] = {0.0f, -0.25f, 0.25f};  // the first has the mean of 1
    router_bias_update(three, uneven, 0.25f, 1, 3);
    check_bits(t, "three biases", three, want_three, 3);
    const float skewed[] = {0, 0, 3};
    float moved[] = {0, 0, 0};
    router_bias_update(moved, skewed, 0.75f, 1, 3);
    const float want_moved[] = {0.5f, 0.5f, -1.0f};  // 0.75 0.75 -0.75 less their mean
    check_bits(t, "the mean is subtracted", moved, want_moved, 3);
}

static void test_load(Test* t) {
    const float even[] = {5, 5, 5, 5}, one[] = {0, 12, 0}, none[] = {0, 0};
    RouterLoad a = router_load(even, 4), b = router_load(one, 3), c = router_load(none, 2);
    check(t, a.busiest == 1.0f && a.dead == 0 && fabsf(a.entropy - 1.386294361f) < 1e-6f, "even: %g, %g, %d dead",
          (double)a.busiest, (double)a.entropy, a.dead);
    check(t, b.busiest == 3.0f && b.dead == 2 && b.entropy == 0.0f, "all to one: %g, %g, %d dead", (double)b.busiest,
          (double)b.entropy, b.dead);
    check(t, c.busiest == 0.0f && c.dead == 2 && c.entropy == 0.0f, "no rows");
}

static void checked(void* shape) { router_check((const RouterShape*)shape); }

static void test_refuse(Test* t) {
    RouterShape wrong[] = {{4, 5, SOFT, 1, 1.0f, 0, 0}, {4, 0, SOFT, 1, 1.0f, 0, 0}, {2000, 2, SOFT, 1, 1.0f, 0, 0},
                           {6, 2, SIGM, 1, 1.0f, 4, 2}, {4, 2, SIGM, 1, 1.0f, 4, 2}, {8, 5, SIGM, 1, 1.0f, 4, 2}};
    for (int i = 0; i < 6; i++) {
        check_exit(t, "a shape that cannot be", checked, &wrong[i], 1, i < 3 ? "experts: at most" : "groups are equal");
    }
}

int main(int argc, char** argv) {
    const Op* ops[] = {&router};
    const Promise promises[] = {
        {"refuse", "shapes that cannot be are refused", test_refuse},
        {"example", "two tokens computed apart: scores, choice, weights, statistics, gradients", test_example},
        {"known", "another example, with and without renormalisation", test_known},
        {"ties", "go to the lower index, of experts and of groups", test_ties},
        {"specials", "a NaN is chosen when nothing else is left, the lowest first", test_specials},
        {"valid", "whatever the logits, k different experts in ascending order", test_valid},
        {"twice", "an expert that is given twice in a row is two slots", test_twice},
        {"far left", "the slope of sqrt(softplus) is finite where the score is 0", test_far_left},
        {"tiny", "renormalised weights of scores around 1e-20 and of 0", test_tiny},
        {"many", "statistics and gradients of 1500 rows", test_many},
        {"pool", "the statistics of several layers together, against plain sums", test_pool},
        {"frozen", "the plain loops round as the specification says, bit for bit", test_frozen},
        {"bias", "moves by the rate towards balance, its mean stays 0", test_bias},
        {"load", "the busiest expert, the entropy and the dead ones of counts", test_load},
    };
    return op_main(argc, argv, ops, 1, promises, sizeof promises / sizeof *promises);
}
