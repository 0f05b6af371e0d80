/*
Promises of llmc/ops/head_gate.h, which follow from the tables (llmc/test/op.h), and others of its own. Fast builds for
GPUs keep tolerances.
*/
#include "llmc/ops/head_gate.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

static const int shapes[][OP_DIMS] = {  // N, H, S: the head size, P = 2 S
    {1, 1, 1, 2}, {1, 1, 7, 14}, {7, 1, 1, 2}, {3, 2, 33, 66}, {5, 3, 8, 16}, {2, 4, 64, 128}, {1, 2, 256, 512},
    {3, 1, 257, 514}, {33, 2, 5, 10},
#ifndef __CUDACC__
    {17, 3, 16, 32}, {2, 5, 127, 254}, {9, 2, 128, 256},
#else
    {1, 1, 2056, 4112},  // several packs for a thread
#endif
    {0},
};

// |attention| < 2, |gate| < 4, |dout| < 1. The hardware's exponential is within (2 + 1.2 |x|) 2^-23, relative; s, which
// is below 1, has three more roundings. s (1 - s) changes by less than s does
static const double SIGMOID_APART = 12 * 0x1p-23, SLOPE_APART = 13 * 0x1p-23;

// ---- split and gate, then gate and join: all of the op ----

enum { PROJ, ATTENTION, Q, OUT, DQ, DOUT, DATTENTION, DPROJ };

static void forward_ref(float* const* a, const int* d) {
    head_gate_split_ref(a[Q], a[PROJ], d['N'], d['H'], d['S']);
    head_gate_forward_ref(a[OUT], a[ATTENTION], a[PROJ], d['N'], d['H'], d['S']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    head_gate_split(x[Q], x[PROJ], d['N'], d['H'], d['S'], dev);
    head_gate_forward(x[OUT], x[ATTENTION], x[PROJ], d['N'], d['H'], d['S'], dev);
}

static void backward_ref(float* const* a, const int* d) {
    head_gate_backward_ref(a[DATTENTION], a[DPROJ], a[DOUT], a[ATTENTION], a[PROJ], d['N'], d['H'], d['S']);
    head_gate_join_ref(a[DPROJ], a[DQ], d['N'], d['H'], d['S']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    head_gate_backward(x[DATTENTION], x[DPROJ], x[DOUT], x[ATTENTION], x[PROJ], d['N'], d['H'], d['S'], dev);
    head_gate_join(x[DPROJ], x[DQ], d['N'], d['H'], d['S'], dev);
}

static void in_double(double* const* a, const int* d) {
    for (int r = 0, S = d['S']; r < d['N'] * d['H']; r++) {
        for (int c = 0; c < S; c++) {
            a[Q][r * S + c] = a[PROJ][2 * r * S + c];
            a[OUT][r * S + c] = a[ATTENTION][r * S + c] / (1.0 + exp(-a[PROJ][2 * r * S + S + c]));
        }
    }
}

static double error(int array, const int* d) {
    switch (array) {
        case Q: return 0x1p-50;                      // a copy
        case OUT: return 2.0 * 4 * 0x1p-24;          // s has 3 roundings, and |attention| < 2
        case DATTENTION: return 4 * 0x1p-24;         // |dout| < 1
        case DPROJ: return 2.0 * 7 * 0x1p-24 / 4.0;  // s (1 - s) <= 1/4 within 5 roundings of it; two products
        default: return -1.0;
    }
}

static double apart(const OpProblem* p, int array, size_t i) {
    switch (array) {
        case OUT: return 2.0 * SIGMOID_APART;
        case DATTENTION: return SIGMOID_APART;
        case DPROJ: return i / (size_t)p->d['S'] % 2 == 0 ? 0.0 : 2.0 * SLOPE_APART;  // queries are copies
        default: return 0.0;
    }
}

static const Op head_gate = {
    .name = "head_gate", .dims = "NHSP",
    .arrays = {
        {PROJ, "proj", "NHP", GIVEN, 4.0f},
        {ATTENTION, "attention", "NHS", GIVEN, 2.0f},
        {Q, "q", "NHS", MADE},
        {OUT, "out", "NHS", MADE, 0.0f, NULL, "attention"},
        {DQ, "dq", "NHS", GIVEN, 1.0f},
        {DOUT, "dout", "NHS", GIVEN, 1.0f},
        {DATTENTION, "dattention", "NHS", GRADIENT, 0.0f, NULL, "dout attention"},
        {DPROJ, "dproj", "NHP", GRADIENT, 0.0f, NULL, "proj"},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{3, 2, 33, 66}}, .apart = apart,
};

// ---- each half of dproj alone: the other stays ----

enum { GATES_PROJ, GATES_ATTENTION, GATES_DOUT, GATES_DATTENTION, GATES_DPROJ };

static void gates_ref(float* const* a, const int* d) {
    head_gate_backward_ref(a[GATES_DATTENTION], a[GATES_DPROJ], a[GATES_DOUT], a[GATES_ATTENTION], a[GATES_PROJ],
                           d['N'], d['H'], d['S']);
}

OP_STORED(X)
static void gates(X* const* x, float* const* a, const int* d, const Device* dev) {
    head_gate_backward(x[GATES_DATTENTION], x[GATES_DPROJ], x[GATES_DOUT], x[GATES_ATTENTION], x[GATES_PROJ], d['N'],
                       d['H'], d['S'], dev);
}

static double gates_apart(const OpProblem* p, int array, size_t i) {
    return apart(p, array == GATES_DPROJ ? DPROJ : DATTENTION, i);
}

static const Op gate_halves = {
    .name = "gates", .dims = "NHSP",
    .arrays = {
        {GATES_PROJ, "proj", "NHP", GIVEN, 4.0f},
        {GATES_ATTENTION, "attention", "NHS", GIVEN, 2.0f},
        {GATES_DOUT, "dout", "NHS", GIVEN, 1.0f},
        {GATES_DATTENTION, "dattention", "NHS", GRADIENT, 0.0f, NULL, "dout"},
        {GATES_DPROJ, "dproj", "NHP", GRADIENT | PARTLY, 1.0f, NULL, "proj"},
    },
    .shapes = shapes, .traits = ANYWHERE,
    .backward_ref = gates_ref, .backward = OP_FAST(gates), .apart = gates_apart,
};

enum { JOIN_DQ, JOIN_DPROJ };

static void join_ref(float* const* a, const int* d) {
    head_gate_join_ref(a[JOIN_DPROJ], a[JOIN_DQ], d['N'], d['H'], d['S']);
}

OP_STORED(X)
static void join(X* const* x, float* const* a, const int* d, const Device* dev) {
    head_gate_join(x[JOIN_DPROJ], x[JOIN_DQ], d['N'], d['H'], d['S'], dev);
}

static const Op query_halves = {
    .name = "queries", .dims = "NHSP",
    .arrays = {
        {JOIN_DQ, "dq", "NHS", GIVEN, 1.0f},
        {JOIN_DPROJ, "dproj", "NHP", GRADIENT | PARTLY, 1.0f},
    },
    .shapes = shapes, .traits = ANYWHERE | SPECIAL_KERNELS,
    .backward_ref = join_ref, .backward = OP_FAST(join),
};

// ---- one operation per line, as dev/ref/qwen36.py has them ----

static void test_frozen(Test* t) {
    enum { N = 5, H = 3, S = 33, SIZE = N * H * S };
    const int shape[] = {N, H, S, 2 * S};
    OpProblem p = op_problem(&head_gate, shape, EASY, 0);
    float *out = filled_array(SIZE, NAN), *datt = filled_array(SIZE, NAN), *dproj = filled_array(2 * SIZE, NAN);
    for (int i = 0; i < SIZE; i++) {
        const int query = i / S * 2 * S + i % S, gate = query + S;
        const float e = fm_exp(-p.a[PROJ][gate]), below = 1.0f + e, s = 1.0f / below, rest = 1.0f - s, slope = s * rest;
        const float product = p.a[DOUT][i] * p.a[ATTENTION][i];
        out[i] = p.a[ATTENTION][i] * s;
        datt[i] = p.a[DOUT][i] * s;
        dproj[query] = p.a[DQ][i];
        dproj[gate] = product * slope;
    }
    check_bits(t, "out", p.a[OUT], out, SIZE);
    check_bits(t, "dattention", p.a[DATTENTION], datt, SIZE);
    check_bits(t, "dproj", p.a[DPROJ], dproj, 2 * SIZE);
    free(out), free(datt), free(dproj);
    op_problem_free(&p);
}

static void test_obvious(Test* t) {
    const int shape[] = {1, 2, 2, 4};
    const float proj[] = {1, 2, 0, 100, 3, 4, -80, 0}, attention[] = {8, 8, 8, 8}, dout[] = {1, 1, 1, 2},
                dq[] = {5, 6, 7, 8};
    const float want_out[] = {4, 8, 0, 4}, want_datt[] = {0.5f, 1, 0, 1}, want_dproj[] = {5, 6, 2, 0, 7, 8, 0, 4};
    OpProblem p = op_problem(&head_gate, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[PROJ], proj, sizeof proj), memcpy(p.a[ATTENTION], attention, sizeof attention);
    memcpy(p.a[DOUT], dout, sizeof dout), memcpy(p.a[DQ], dq, sizeof dq);
    op_answer(t, &p, &dev);
    for (int i = 0; i < 4; i++) {  // the gate -80 leaves e^-80 of 8
        check(t, p.a[Q][i] == proj[i % 2 + i / 2 * 4], "q[%d]: found %.9g", i, (double)p.a[Q][i]);
        check(t, fabsf(p.a[OUT][i] - want_out[i]) < 1e-30f, "out[%d]: found %.9g", i, (double)p.a[OUT][i]);
        check(t, fabsf(p.a[DATTENTION][i] - want_datt[i]) < 1e-30f, "dattention[%d]: found %.9g", i,
              (double)p.a[DATTENTION][i]);
    }
    for (int i = 0; i < 8; i++) {
        check(t, fabsf(p.a[DPROJ][i] - want_dproj[i]) < 1e-30f, "dproj[%d]: found %.9g", i, (double)p.a[DPROJ][i]);
    }
    device_free(&dev);
    op_problem_free(&p);
}

// no positions: a rank may have none
static void test_nothing(Test* t) {
    float* none = NULL;
    Device dev = test_device(1);
    head_gate_split(none, none, 0, 2, 8, &dev);
    head_gate_forward(none, none, none, 0, 2, 8, &dev);
    head_gate_backward(none, none, none, none, none, 0, 2, 8, &dev);
    head_gate_join(none, none, 0, 2, 8, &dev);
    device_free(&dev);
    check(t, 1, "of no positions nothing is touched");
}

int main(int argc, char** argv) {
    const Op* ops[] = {&head_gate, &gate_halves, &query_halves};
    const Promise promises[] = {
        {"frozen", "the plain loop rounds as the specification says, bit for bit", test_frozen},
        {"obvious", "a gate of 0 halves, one of 100 opens, one of -80 closes", test_obvious},
        {"nothing", "N = 0: nothing is read, nothing is written", test_nothing},
    };
    return op_main(argc, argv, ops, 3, promises, 3);
}
