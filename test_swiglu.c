/*
Promises of llmc/ops/swiglu.h, which follow from the tables (llmc/test/op.h), and others: of weights, of the limit, of
what may lie in one place. Fast builds for GPUs keep tolerances.
*/
#include "llmc/ops/swiglu.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

// G is 2F; the limit is L / 2
static const int shapes[][OP_DIMS] = {  // R, F, G, L
    {1, 1, 2, 0}, {1, 7, 14, 3}, {7, 1, 2, 3}, {7, 33, 66, 0}, {33, 7, 14, 3}, {9, 64, 128, 3}, {3, 257, 514, 1},
    {17, 40, 80, 0}, {2, 264, 528, 3}, {1, 1030, 2060, 0},
#ifndef __CUDACC__  // vectors of VLANES rows, strips of channels
    {VLANES, VLANES, 2 * VLANES, 3}, {VLANES + 1, VLANES - 1, 2 * VLANES - 2, 3}, {35, 129, 258, 3},
    {2 * VLANES, 128, 256, 0}, {2 * VLANES + 3, 300, 600, 2}, {65, 127, 254, 3}, {5, 384, 768, 0},
#endif
    {0},
};

static float limit_of(const int* d) { return 0.5f * (float)d['L']; }

// ---- rows with weights ----

enum { GATE_UP, WEIGHT, DHIDDEN, DGATE_UP, WEIGHTED, DWEIGHT };

static void weighted_ref(float* const* a, const int* d) {
    swiglu_backward_ref(a[DGATE_UP], a[WEIGHTED], a[DWEIGHT], a[DHIDDEN], a[GATE_UP], a[WEIGHT], limit_of(d), d['R'],
                        d['F']);
}

OP_STORED(X)
static void weighted_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    swiglu_backward(x[DGATE_UP], x[WEIGHTED], a[DWEIGHT], x[DHIDDEN], x[GATE_UP], a[WEIGHT], limit_of(d), d['R'],
                    d['F'], dev);
}

// |gate|, |up| < 4, |dhidden|, |weight| < 1. The hardware's exponential is within (2 + 1.2 |x|) 2^-23, relative; then 4
// roundings of s, and s (1 + x (1 - s)) has them times 4
static const double SILU_APART = 4.0 * 12 * 0x1p-23, SLOPE_APART = 4.0 * 4.0 * 12 * 0x1p-23;

static double weighted_apart(const OpProblem* p, int array, size_t i) {
    const int F = p->d['F'];
    (void)i;
    switch (array) {
        case DGATE_UP: return 4.0 * SLOPE_APART;
        case WEIGHTED: return 4.0 * SILU_APART;
        case DWEIGHT: return F * 4.0 * SILU_APART + 2.0 * rounding_walk(F, 16.0 * F);
        default: return 0.0;
    }
}

static const Op weighted = {
    .name = "weighted", .dims = "RFGL",
    .arrays = {
        {GATE_UP, "gate_up", "RG", GIVEN, 4.0f},
        {WEIGHT, "weight", "R", GIVEN | FLOAT, 1.0f},
        {DHIDDEN, "dhidden", "RF", GIVEN, 1.0f},
        {DGATE_UP, "dgate_up", "RG", GRADIENT, 0.0f, NULL, "gate_up"},
        {WEIGHTED, "weighted", "RF", GRADIENT | ASKED, 0.0f, NULL, "dhidden"},
        {DWEIGHT, "dweight", "R", GRADIENT | ASKED | FLOAT},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .backward_ref = weighted_ref, .backward = OP_FAST(weighted_fast), .apart = weighted_apart,
};

// ---- without: a dense MLP ----

enum { INP, HIDDEN, DOUT, DINP, AGAIN };

static void forward_ref(float* const* a, const int* d) {
    swiglu_forward_ref(a[HIDDEN], a[INP], limit_of(d), d['R'], d['F']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    swiglu_forward(x[HIDDEN], x[INP], limit_of(d), d['R'], d['F'], dev);
}

static void backward_ref(float* const* a, const int* d) {
    swiglu_backward_ref(a[DINP], a[AGAIN], NULL, a[DOUT], a[INP], NULL, limit_of(d), d['R'], d['F']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    swiglu_backward(x[DINP], x[AGAIN], (float*)NULL, x[DOUT], x[INP], (const float*)NULL, limit_of(d), d['R'], d['F'],
                    dev);
}

static void in_double(double* const* a, const int* d) {
    const double limit = d['L'] ? d['L'] / 2.0 : INFINITY;
    for (int r = 0, F = d['F']; r < d['R']; r++) {
        for (int f = 0; f < F; f++) {
            double gate = fmin(a[INP][2 * r * F + f], limit);
            double up = fmax(fmin(a[INP][2 * r * F + F + f], limit), -limit);
            a[HIDDEN][r * F + f] = gate / (1.0 + exp(-gate)) * up;
        }
    }
}

static double error(int array, const int* d) {
    (void)d;
    switch (array) {
        case HIDDEN: return 4 * 0x1p-24 * 16.0;  // silu's 3 roundings, and one
        case DINP: return (4 + 4 + 2) * 0x1p-24 * 4.0;  // slope: (4 + |gate|) 2^-24, and two products, |up| < 4
        default: return -1.0;
    }
}

static double apart(const OpProblem* p, int array, size_t i) {
    (void)p, (void)i;
    switch (array) {
        case HIDDEN: case AGAIN: return 4.0 * SILU_APART;
        case DINP: return 4.0 * SLOPE_APART;
        default: return 0.0;
    }
}

static const Op dense = {
    .name = "dense", .dims = "RFGL",
    .arrays = {
        {INP, "inp", "RG", GIVEN, 4.0f},
        {HIDDEN, "hidden", "RF", MADE},
        {DOUT, "dhidden", "RF", GIVEN, 1.0f},
        {DINP, "dinp", "RG", GRADIENT, 0.0f, NULL, "inp"},
        {AGAIN, "again", "RF", GRADIENT | ASKED, 0.0f, NULL, "dhidden"},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = forward_ref, .forward = OP_FAST(forward), .backward_ref = backward_ref,
    .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{7, 33, 66, 0}, {7, 33, 66, 3}}, .apart = apart,
};

// ---- what weights are: those of the specification, one operation per line ----

static void test_frozen(Test* t) {
    enum { R = 5, F = 37 };
    const int shape[] = {R, F, 2 * F, 3};
    OpProblem p = op_problem(&weighted, shape, EASY, 0);
    float *dgate_up = filled_array(R * 2 * F, NAN), *hidden = filled_array(R * F, NAN);
    float* dweight = filled_array(R, 0.0f);
    for (int r = 0; r < R; r++) {
        for (int f = 0; f < F; f++) {
            const float gate = p.a[GATE_UP][r * 2 * F + f], up = p.a[GATE_UP][r * 2 * F + F + f], w = p.a[WEIGHT][r];
            const float g = fminf(gate, 1.5f), u = fmaxf(fminf(up, 1.5f), -1.5f), dy = p.a[DHIDDEN][r * F + f];
            const float dh = w * dy, h = silu_one(g) * u;
            float product = dh * u;
            product = product * silu_slope_one(g);
            dgate_up[r * 2 * F + f] = gate <= 1.5f ? product : 0.0f;
            product = dh * silu_one(g);
            dgate_up[r * 2 * F + F + f] = up >= -1.5f && up <= 1.5f ? product : 0.0f;
            hidden[r * F + f] = w * h;
            dweight[r] = fmaf(dy, h, dweight[r]);
        }
    }
#ifdef SYSTEM_LIBM
    memcpy(dweight, p.a[DWEIGHT], sizeof(float) * R);  // products there round before they are added
#endif
    check_bits(t, "dgate_up", p.a[DGATE_UP], dgate_up, R * 2 * F);
    check_bits(t, "weighted", p.a[WEIGHTED], hidden, R * F);
    check_bits(t, "dweight", p.a[DWEIGHT], dweight, R);
    free(dgate_up), free(hidden), free(dweight);
    op_problem_free(&p);
}

// dweight is the derivative of sum t * weight * hidden: hidden of the forward, summed in double
static void test_weights(Test* t) {
    enum { R = 3, F = 300 };
    const int shape[] = {R, F, 2 * F, 0};
    OpProblem p = op_problem(&weighted, shape, EASY, 0), q = op_problem(&dense, shape, EASY, 0);
    double want[R] = {0.0};
    memcpy(q.a[INP], p.a[GATE_UP], sizeof(float) * R * 2 * F);
    op_solve(&q);
    for (int i = 0; i < R * F; i++) { want[i / F] += (double)p.a[DHIDDEN][i] * (double)q.a[HIDDEN][i]; }
    check_close(t, "dweight", p.a[DWEIGHT], want, R, rounding_walk(F, 30.0));  // the sums stay below 30
    op_problem_free(&p), op_problem_free(&q);
}

// ---- the limit, at it and beside it ----

static void test_limit(Test* t) {
    enum { F = 8, LIMIT = 2 };
    const float above = 2.0f + 0x1p-22f;
    const float gate_up[2 * F] = {2, above, INFINITY, -5, 1, 1, 1, 1,    // gate
                                  1, 1, 1, 1, 2, above, -2, -above};     // up
    const float dhidden[F] = {1, 1, 1, 1, 1, 1, 1, 1};
    float hidden[F], dgate_up[2 * F];
    swiglu_forward_ref(hidden, gate_up, LIMIT, 1, F);
    swiglu_backward_ref(dgate_up, NULL, NULL, dhidden, gate_up, NULL, LIMIT, 1, F);
    const float two = silu_one(2.0f), one = silu_one(1.0f), far = silu_one(-5.0f);
    const float want[F] = {two, two, two, far, one * 2, one * 2, one * -2, one * -2};
    const float want_dgate[4] = {silu_slope_one(2.0f), 0, 0, silu_slope_one(-5.0f)}, want_dup[4] = {one, 0, one, 0};
    check_bits(t, "hidden", hidden, want, F);
    check_bits(t, "dgate: 0 above the limit, not at it, nor below -limit", dgate_up, want_dgate, 4);
    check_bits(t, "dup: 0 above the limit and below -limit", dgate_up + F + 4, want_dup, 4);
    const float nans[2] = {NAN, 1.0f}, ups[2] = {1.0f, NAN};
    swiglu_forward_ref(hidden, nans, LIMIT, 1, 1);
    swiglu_forward_ref(hidden + 1, ups, LIMIT, 1, 1);
    check(t, isnan(hidden[0]) && isnan(hidden[1]), "a NaN stays one");
}

static int is_fused(void) {
#ifdef SYSTEM_LIBM
    return 0;
#else
    return !FAST_KERNELS;
#endif
}

// A fused product that is too small for any float rounds to -0, and a sum of nothing else is -0: lanes without channels
// keep it
static void test_underflow(Test* t) {
    const int shape[] = {1, 1, 2, 0};
    if (!is_fused()) {
        skip(t, "products round before they are added, or fast kernels add along trees");
        return;
    }
    OpProblem p = op_problem(&weighted, shape, EASY, 0);
    Device dev = test_device(1);
    p.a[GATE_UP][0] = 1.0f, p.a[GATE_UP][1] = 0x1p-100f, p.a[DHIDDEN][0] = -0x1p-100f;
    op_solve(&p);
    check(t, float_bits(p.a[DWEIGHT][0]) == 0x80000000u, "dweight: found %g, expected -0", (double)p.a[DWEIGHT][0]);
    op_check(t, &p, 1, &dev);
    device_free(&dev);
    op_problem_free(&p);
}

// dgate_up in the place of gate_up and weighted in that of dhidden, at once
static void test_places(Test* t) {
    enum { R = 19, F = 136 };
    const int shape[] = {R, F, 2 * F, 3};
    Device dev = test_device(3);
    OpProblem p = op_problem(&weighted, shape, EASY, 0);
    float *gate_up = to_device(p.a[GATE_UP], R * 2 * F, &dev), *dhidden = to_device(p.a[DHIDDEN], R * F, &dev);
    float *weight = to_device(p.a[WEIGHT], R, &dev), *dweight = to_device(p.a[DWEIGHT], R, &dev);
    float *got = filled_array(R * 2 * F, NAN), *hidden = filled_array(R * F, NAN), *sums = filled_array(R, NAN);
    op_answer(t, &p, &dev);
    swiglu_backward(gate_up, dhidden, dweight, dhidden, gate_up, weight, 1.5f, R, F, &dev);
    from_device(got, gate_up, R * 2 * F, &dev), from_device(hidden, dhidden, R * F, &dev);
    from_device(sums, dweight, R, &dev);
    check_bits(t, "dweight", sums, p.a[DWEIGHT], R);
    from_device(sums, weight, R, &dev);
    check_bits(t, "weight stays", sums, p.a[WEIGHT], R);
    check_bits(t, "dgate_up", got, p.a[DGATE_UP], R * 2 * F);
    check_bits(t, "weighted", hidden, p.a[WEIGHTED], R * F);
    free(got), free(hidden), free(sums);
    device_free(&dev);
    op_problem_free(&p);
}

int main(int argc, char** argv) {
    const Op* ops[] = {&dense, &weighted};
    const Promise promises[] = {
        {"frozen", "the plain loop rounds as the specification says, bit for bit", test_frozen},
        {"weights", "dweight is the sum of t * hidden, in double", test_weights},
        {"limit", "at the limit a gradient passes, beyond it none; the gate has no lower one", test_limit},
        {"underflow", "a sum whose products are too small for floats keeps its sign", test_underflow},
        {"places", "both outputs lie where the inputs were: the bits of outputs elsewhere", test_places},
    };
    return op_main(argc, argv, ops, 2, promises, 5);
}
