/*
Promises of llmc/ops/grid_embedding.h, which follow from the table (llmc/test/op.h), and of the taps of an image.
*/
#include "llmc/ops/grid_embedding.h"
#include "llmc/test/op_promises.h"  // Op, op_main

enum { TABLE, TAPS, WEIGHTS, FIRST, ENTRY, OUT, DOUT, DTABLE };

static int patches(const int* d) { return d['f'] * d['h'] * d['w']; }

// of an image of f x h x w patches in blocks of m x m; R rows of the table, Z = R + 1
static void fill(float* const* a, const int* d) {
    const int side = (int)lround(sqrt((double)d['R']));
    grid_taps((int*)a[TAPS], a[WEIGHTS], d['f'], d['h'], d['w'], d['m'], side);
    grid_entries((int*)a[FIRST], (int*)a[ENTRY], (int*)a[TAPS], patches(d), d['R']);
}

static void forward_ref(float* const* a, const int* d) {
    grid_embedding_forward_ref(a[OUT], a[TABLE], (int*)a[TAPS], a[WEIGHTS], patches(d), d['C']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    grid_embedding_forward(x[OUT], x[TABLE], (int*)a[TAPS], a[WEIGHTS], patches(d), d['C'], dev);
}

static void backward_ref(float* const* a, const int* d) {
    grid_embedding_backward_ref(a[DTABLE], a[DOUT], (int*)a[FIRST], (int*)a[ENTRY], a[WEIGHTS], d['R'], d['C']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    grid_embedding_backward(a[DTABLE], x[DOUT], (int*)a[FIRST], (int*)a[ENTRY], a[WEIGHTS], d['R'], d['C'], dev);
}

// the order is that of the plain loop in every build
static double apart(const OpProblem* p, int array, size_t i) {
    (void)p, (void)array, (void)i;
    return 0.0;
}

// q = 4, R, Z, C, f, h, w, m
static const int shapes[][OP_DIMS] = {
    {4, 16, 17, 1, 1, 2, 2, 2}, {4, 16, 17, 33, 1, 4, 6, 2}, {4, 9, 10, 7, 2, 6, 4, 2},
    {4, 25, 26, 129, 1, 1, 1, 1}, {4, 4, 5, 8, 2, 2, 7, 1},
    {4, 1, 2, 12, 1, 8, 10, 2}, {4, 16, 17, 65, 1, 6, 42, 2},
    {0},
};

static const Op grid = {
    .name = "grid_embedding", .dims = "qRZCfhwm",
    .arrays = {
        {TABLE, "table", "RC", GIVEN, 1.0f, ""},
        {.number = TAPS, .name = "taps", .extents = "fhwq", .role = GIVEN | INDEX, .needed = "", .below = 'R'},
        {WEIGHTS, "weights", "fhwq", GIVEN | FLOAT, 1.0f},
        {.number = FIRST, .name = "first", .extents = "Z", .role = GIVEN | INDEX, .needed = "dtable", .below = 'R'},
        {.number = ENTRY, .name = "entry", .extents = "fhwq", .role = GIVEN | INDEX, .needed = "dtable", .below = 'R'},
        {OUT, "out", "fhwC", MADE | ADDED, 1.0f, ""},
        {DOUT, "dout", "fhwC", GIVEN, 1.0f, "dtable"},
        {DTABLE, "dtable", "RC", GRADIENT | ASKED | FLOAT},
    },
    .shapes = shapes, .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward), .apart = apart,
};

// ---- taps ----

// a grid as large as the table reads it row by row; corners are corners, and weights add up to 1
static void test_taps(Test* t) {
    int taps[8 * 8 * GRID_TAPS];
    float weights[8 * 8 * GRID_TAPS];
    grid_taps(taps, weights, 1, 4, 4, 2, 4);
    const int blocks[16] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};  // 2 x 2, block by block
    for (int p = 0; p < 16; p++) {
        check(t, taps[GRID_TAPS * p] == blocks[p] && weights[GRID_TAPS * p] == 1.0f, "patch %d reads row %d", p,
              taps[GRID_TAPS * p]);
    }
    grid_taps(taps, weights, 1, 8, 6, 2, 5);
    for (int p = 0; p < 48; p++) {
        float sum = 0.0f;
        for (int i = 0; i < GRID_TAPS; i++) { sum += weights[GRID_TAPS * p + i]; }
        check(t, fabsf(sum - 1.0f) < 1e-6f, "patch %d: weights of %g", p, (double)sum);
    }
    check(t, taps[0] == 0 && weights[0] == 1.0f, "the first corner");
    check(t, taps[GRID_TAPS * 47] == 24 && weights[GRID_TAPS * 47] == 1.0f, "the last corner is row %d",
          taps[GRID_TAPS * 47]);
    grid_taps(taps, weights, 1, 1, 1, 1, 3);
    check(t, taps[0] == 0 && weights[0] == 1.0f, "one patch has the first row");
}

// 3 patches in a row on a table of 2 x 2 : the middle one is half of each
static void test_obvious(Test* t) {
    const float table[4] = {1, 3, 50, 60};
    float out[3] = {100, 100, 100}, weights[12], dtable[4];
    int taps[12], first[5], entry[12];
    grid_taps(taps, weights, 1, 1, 3, 1, 2);
    grid_entries(first, entry, taps, 3, 4);
    grid_embedding_forward_ref(out, table, taps, weights, 3, 1);
    check(t, out[0] == 101 && out[1] == 102 && out[2] == 103, "found %g %g %g", (double)out[0], (double)out[1],
          (double)out[2]);
    grid_embedding_backward_ref(dtable, out, first, entry, weights, 4, 1);
    check(t, dtable[0] == 101 + 51 && dtable[1] == 51 + 103 && dtable[2] == 0 && dtable[3] == 0, "gradients");
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"taps", "corner on corner, block by block; weights add up to 1", test_taps},
        {"obvious", "a patch in the middle has half of each neighbour", test_obvious},
    };
    const Op* const ops[] = {&grid};
    return op_main(argc, argv, ops, 1, promises, sizeof promises / sizeof promises[0]);
}
