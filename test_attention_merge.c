/*
Promises of llmc/ops/attention_merge.h, which follow from the tables (llmc/test/op.h). What blocks give, merged, is what
all keys give: test_context.c.
*/
#include "llmc/ops/attention_merge.h"
#include "llmc/test/op_promises.h"  // Op, op_main

// ---- two blocks ----

enum { INP, INP_MAX, INP_INV, MORE, MORE_MAX, MORE_INV, OUT, MAX, INV };

// sums of exponentials from 1 on, of both, of one or of none of the blocks
static void fill(float* const* a, const int* d) {
    for (int i = 0; i < d['B'] * d['N'] * d['T']; i++) {
        a[INP_INV][i] = i % 5 == 3 ? 0.0f : 1.0f / (1.0f + (float)(i % 17));
        a[MORE_INV][i] = i % 7 == 4 ? 0.0f : 1.0f / (1.0f + (float)(i % 3));
    }
}

static void merge_ref(float* const* a, const int* d) {
    attention_merge_ref(a[OUT], a[MAX], a[INV], a[MORE], a[MORE_MAX], a[MORE_INV], d['B'], d['T'], d['N'], d['H']);
}

OP_STORED(X)
static void merge_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    attention_merge(x[OUT], a[MAX], a[INV], x[MORE], a[MORE_MAX], a[MORE_INV], d['B'], d['T'], d['N'], d['H'], dev);
}

static void merge_double(double* const* a, const int* d) {
    for (int row = 0; row < d['B'] * d['N'] * d['T']; row++) {
        const int t = row % d['T'], h = row / d['T'] % d['N'], b = row / d['T'] / d['N'];
        const size_t at = (size_t)(((b * d['T'] + t) * d['N'] + h) * d['H']);
        const double top = fmax(a[INP_MAX][row], a[MORE_MAX][row]);
        const double s = a[INP_INV][row] > 0.0 ? exp(a[INP_MAX][row] - top) / a[INP_INV][row] : 0.0;
        const double more = a[MORE_INV][row] > 0.0 ? exp(a[MORE_MAX][row] - top) / a[MORE_INV][row] : 0.0;
        const int none = s + more == 0.0;
        a[MAX][row] = none || more == 0.0 ? a[INP_MAX][row] : s == 0.0 ? a[MORE_MAX][row] : top;
        a[INV][row] = none ? 0.0 : s == 0.0 ? a[MORE_INV][row] : more == 0.0 ? a[INP_INV][row] : 1.0 / (s + more);
        for (size_t i = at; i < at + (size_t)d['H']; i++) {
            a[OUT][i] = none ? a[INP][i] : (a[INP][i] * s + a[MORE][i] * more) / (s + more);
        }
    }
}

// attention_merge.h: 10 roundings of |out| + |more| < 4; inv is at most 1
static double error(int array, const int* d) {
    return array == OUT ? 10 * 0x1p-24 * 4.0 : array == INV ? 0x1p-21 : 0.0;
}

// __expf of -4 .. 0 is off by 2^-21 of itself
static double apart(const OpProblem* p, int array, size_t i) {
    return array == MAX ? 0.0 : 4 * error(array, p->d);
}

static const int shapes[][OP_DIMS] = {  // B, T, N, H
    {1, 1, 1, 1}, {2, 3, 1, 4}, {1, 7, 3, 5}, {3, 5, 2, 33}, {2, 9, 4, 64}, {1, 33, 2, 70}, {2, 17, 5, 128}, {0},
};

static const Op merge = {
    .name = "merge", .dims = "BTNH",
    .arrays = {
        {INP, "inp", "BTNH", GIVEN, 2.0f},
        {INP_MAX, "inp_max", "BNT", GIVEN | FLOAT, 2.0f},
        {INP_INV, "inp_inv", "BNT", GIVEN | FLOAT, 1.0f},
        {MORE, "more", "BTNH", GIVEN, 2.0f},
        {MORE_MAX, "more_max", "BNT", GIVEN | FLOAT, 2.0f},
        {MORE_INV, "more_inv", "BNT", GIVEN | FLOAT, 1.0f},
        {OUT, "out", "BTNH", MADE | PARTLY, 0.0f, NULL, "inp"},
        {MAX, "max", "BNT", MADE | PARTLY | FLOAT, 0.0f, NULL, "inp_max"},
        {INV, "inv", "BNT", MADE | PARTLY | FLOAT, 0.0f, NULL, "inp_inv"},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE, .fill = fill,
    .forward_ref = merge_ref, .forward = OP_FAST(merge_fast),
    .in_double = merge_double, .error = error, .judged = {{2, 3, 1, 4}, {3, 5, 2, 33}}, .apart = apart,
};

// ---- D ----

enum { DOUT, Y, D };

static void products_ref(float* const* a, const int* d) {
    attention_products_ref(a[D], a[DOUT], a[Y], d['B'], d['T'], d['N'], d['H']);
}

OP_STORED(X)
static void products_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    attention_products(a[D], x[DOUT], x[Y], d['B'], d['T'], d['N'], d['H'], dev);
}

static void products_double(double* const* a, const int* d) {
    for (int row = 0; row < d['B'] * d['N'] * d['T']; row++) {
        const int t = row % d['T'], h = row / d['T'] % d['N'], b = row / d['T'] / d['N'];
        const size_t at = (size_t)(((b * d['T'] + t) * d['N'] + h) * d['H']);
        a[D][row] = 0.0;
        for (size_t i = at; i < at + (size_t)d['H']; i++) { a[D][row] += a[DOUT][i] * a[Y][i]; }
    }
}

static double products_error(int array, const int* d) { return d['H'] * d['H'] * 0x1p-24; }  // sums below H
static double products_apart(const OpProblem* p, int array, size_t i) { return 2 * products_error(array, p->d); }

static const Op products = {
    .name = "products", .dims = "BTNH",
    .arrays = {
        {DOUT, "dout", "BTNH", GIVEN, 1.0f},
        {Y, "y", "BTNH", GIVEN, 1.0f},
        {D, "D", "BNT", MADE | FLOAT},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = products_ref, .forward = OP_FAST(products_fast),
    .in_double = products_double, .error = products_error, .judged = {{2, 3, 1, 4}, {3, 5, 2, 33}},
    .apart = products_apart,
};

int main(int argc, char** argv) {
    const Op* ops[] = {&merge, &products};
    const Promise none[] = {{"", "", NULL}};
    return op_main(argc, argv, ops, 2, none, 0);
}
