/*
Promises of llmc/ops/row_gate.h, which follow from the tables (llmc/test/op.h), and others of its own. Fast builds for
GPUs keep tolerances.
*/
#include "llmc/ops/row_gate.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

// ---- the gate ----

enum { LOGIT, S, DS, DLOGIT };

static void forward_ref(float* const* a, const int* d) { row_gate_forward_ref(a[S], a[LOGIT], d['N']); }

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    row_gate_forward(a[S], x[LOGIT], d['N'], dev);
}

static void backward_ref(float* const* a, const int* d) { row_gate_backward_ref(a[DLOGIT], a[DS], a[S], d['N']); }

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    row_gate_backward(x[DLOGIT], a[DS], a[S], d['N'], dev);
}

static void in_double(double* const* a, const int* d) {
    for (int n = 0; n < d['N']; n++) { a[S][n] = 1.0 / (1.0 + exp(-a[LOGIT][n])); }
}

static double error(int array, const int* d) {
    switch (array) {
        case S: return 3 * 0x1p-24;             // below 1, three roundings
        case DLOGIT: return 7 * 0x1p-24 / 4.0;  // |ds| < 1 times 1/4 at most; s with three roundings, three more
        default: return -1.0;
    }
}

static double apart(const OpProblem* p, int array, size_t i) {
    return array == S ? 3 * 0x1p-24 : 7 * 0x1p-24 / 4.0;  // what fused products may do
}

static const int gate_shapes[][OP_DIMS] = {{1}, {7}, {33}, {257}, {1030}, {0}};

static const Op row_gate = {
    .name = "row_gate", .dims = "N",
    .arrays = {
        {LOGIT, "logit", "N", GIVEN, 6.0f},
        {S, "s", "N", MADE | FLOAT},
        {DS, "ds", "N", GIVEN | FLOAT, 1.0f},
        {DLOGIT, "dlogit", "N", GRADIENT},
    },
    .shapes = gate_shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{257}}, .apart = apart,
};

// ---- the sum; one madd, so that fast kernels have its bits too ----

enum { Y, GATE, OUT };

static void add_ref(float* const* a, const int* d) { row_gate_add_ref(a[OUT], a[Y], a[GATE], d['N'], d['C']); }

OP_STORED(X)
static void add(X* const* x, float* const* a, const int* d, const Device* dev) {
    row_gate_add(x[OUT], x[Y], a[GATE], d['N'], d['C'], dev);
}

static const int shapes[][OP_DIMS] = {
    {1, 1}, {1, 7}, {7, 1}, {7, 33}, {33, 7}, {8, 128}, {9, 264}, {2, 257}, {35, 64}, {3, 2056}, {1, 4104}, {0},
};

static const Op row_sum = {
    .name = "add", .dims = "NC",
    .arrays = {
        {Y, "y", "NC", GIVEN, 2.0f},
        {GATE, "s", "N", GIVEN | FLOAT, 1.0f},
        {OUT, "out", "NC", MADE | ADDED, 2.0f},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE | SPECIAL_KERNELS,
    .forward_ref = add_ref, .forward = OP_FAST(add),
};

// ---- one operation per line, as dev/ref/qwen36.py has them ----

static void test_frozen(Test* t) {
    enum { N = 40, C = 33 };
    const int gate_shape[] = {N}, sum_shape[] = {N, C};
    OpProblem p = op_problem(&row_gate, gate_shape, EASY, 0), q = op_problem(&row_sum, sum_shape, EASY, 0);
    float *s = filled_array(N, NAN), *dlogit = filled_array(N, NAN), *out = filled_array(N * C, NAN);
    for (int n = 0; n < N; n++) {
        const float e = fm_exp(-p.a[LOGIT][n]), below = 1.0f + e;
        s[n] = 1.0f / below;
        const float rest = 1.0f - s[n], slope = s[n] * rest;
        dlogit[n] = p.a[DS][n] * slope;
    }
    for (int i = 0; i < N * C; i++) { out[i] = madd(q.a[GATE][i / C], q.a[Y][i], q.before[OUT][i]); }
    check_bits(t, "s", p.a[S], s, N);
    check_bits(t, "dlogit", p.a[DLOGIT], dlogit, N);
    check_bits(t, "out", q.a[OUT], out, N * C);
    free(s), free(dlogit), free(out);
    op_problem_free(&p), op_problem_free(&q);
}

static void test_obvious(Test* t) {
    const float logit[] = {0.0f, 200.0f, -200.0f}, ds[] = {8.0f, 8.0f, 8.0f};
    const float want_s[] = {0.5f, 1.0f, 0.0f}, want_dlogit[] = {2.0f, 0.0f, 0.0f};
    const int shape[] = {3};
    OpProblem p = op_problem(&row_gate, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[LOGIT], logit, sizeof logit), memcpy(p.a[DS], ds, sizeof ds);
    op_answer(t, &p, &dev);
    for (int n = 0; n < 3; n++) {
        check(t, p.a[S][n] == want_s[n], "s[%d]: found %.9g", n, (double)p.a[S][n]);
        check(t, p.a[DLOGIT][n] == want_dlogit[n], "dlogit[%d]: found %.9g", n, (double)p.a[DLOGIT][n]);
    }
    device_free(&dev);
    op_problem_free(&p);
}

// no positions: a rank may have none
static void test_nothing(Test* t) {
    float* none = NULL;
    Device dev = test_device(1);
    row_gate_forward(none, none, 0, &dev);
    row_gate_add(none, none, none, 0, 8, &dev);
    row_gate_backward(none, none, none, 0, &dev);
    device_free(&dev);
    check(t, 1, "of no positions nothing is touched");
}

int main(int argc, char** argv) {
    const Op* ops[] = {&row_gate, &row_sum};
    const Promise promises[] = {
        {"frozen", "the plain loop rounds as the specification says, bit for bit", test_frozen},
        {"obvious", "a logit of 0 gives one half, of 200 all, of -200 nothing", test_obvious},
        {"nothing", "N = 0: nothing is read, nothing is written", test_nothing},
    };
    return op_main(argc, argv, ops, 2, promises, 3);
}
