/*
Promises of llmc/ops/grouped_matmul.h, which follow from two tables (llmc/test/op.h): rows as they lie, and rows that
are gathered; with many and few rows for an expert, and none. Then: gathered rows are those that a copy would have, and
what is in one expert's rows and weight reaches no other expert. The kernels of grouped_hopper.h keep the same promises.
*/
#if defined(SIMT) && !defined(EXACT)
#define WGMMA  // dev/simt models it
#endif
#if defined(WGMMA) && !defined(EXACT)
static int grouped_hopper;  // 1 takes the kernels of grouped_hopper.h, 0 those of other cards
#define GROUPED_HOPPER grouped_hopper
#endif
#include "llmc/ops/grouped_matmul.h"
#include "llmc/ops/matmul.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

enum { INP, WEIGHT, OFFSETS, OUT, DOUT, DINP, DWEIGHT, INP_INDEX, DOUT_INDEX };
enum { GATHER_INP = 1, GATHER_DOUT = 2 };           // d['g']: which operands are
enum { RANDOM, ALL_IN_LAST, ALL_IN_FIRST, STAIRS };  // d['p']: how many rows experts have

static const int* inp_index(float* const* a, const int* d) { return d['g'] & GATHER_INP ? (int*)a[INP_INDEX] : NULL; }
static const int* dout_index(float* const* a, const int* d) {
    return d['g'] & GATHER_DOUT ? (int*)a[DOUT_INDEX] : NULL;
}

static void forward_ref(float* const* a, const int* d) {
    grouped_matmul_forward_ref(a[OUT], a[INP], inp_index(a, d), a[WEIGHT], (int*)a[OFFSETS], d['E'], d['C'], d['O']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    grouped_matmul_forward(x[OUT], x[INP], inp_index(a, d), x[WEIGHT], (int*)a[OFFSETS], d['E'], d['R'], d['C'], d['O'],
                           dev);
}

static void backward_ref(float* const* a, const int* d) {
    const int* offsets = (int*)a[OFFSETS];
    grouped_matmul_backward_input_ref(a[DINP], a[DOUT], dout_index(a, d), a[WEIGHT], offsets, d['E'], d['C'], d['O']);
    grouped_matmul_backward_weight_ref(a[DWEIGHT], a[DOUT], dout_index(a, d), a[INP], inp_index(a, d), offsets, d['E'],
                                       d['C'], d['O']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const int* offsets = (int*)a[OFFSETS];
    grouped_matmul_backward_input(x[DINP], x[DOUT], dout_index(a, d), x[WEIGHT], offsets, d['E'], d['R'], d['C'],
                                  d['O'], dev);
    grouped_matmul_backward_weight(a[DWEIGHT], x[DOUT], dout_index(a, d), x[INP], inp_index(a, d), offsets, d['E'],
                                   d['R'], d['C'], d['O'], dev);
}

// rows of expert e, of `left` that no expert before it has
static int count_of(const int* d, int e, int left) {
    static const int stairs[] = {0, 1, 7, 127, 128, 129};
    const int last = e == d['E'] - 1;
    switch (d['p']) {
        case ALL_IN_LAST: return last ? left : 0;
        case ALL_IN_FIRST: return left;
        case STAIRS: return last || stairs[e % 6] > left ? left : stairs[e % 6];
        default: return last ? left : (int)(splitmix64(5, (uint64_t)e) % (uint64_t)(2 * (left / (d['E'] - e)) + 1));
    }
}

static void fill(float* const* a, const int* d) {
    int* offsets = (int*)a[OFFSETS];
    offsets[0] = 0;
    for (int e = 0; e < d['E']; e++) { offsets[e + 1] = offsets[e] + count_of(d, e, d['R'] - offsets[e]); }
}

static void in_double(double* const* a, const int* d) {
    const int C = d['C'], OC = d['O'];
    for (int e = 0; e < d['E']; e++) {
        for (int i = (int)a[OFFSETS][e] * OC; i < (int)a[OFFSETS][e + 1] * OC; i++) {
            double sum = 0.0;
            for (int c = 0; c < C; c++) { sum += a[INP][i / OC * C + c] * a[WEIGHT][(e * OC + i % OC) * C + c]; }
            a[OUT][i] = sum;
        }
    }
}

// terms of a chain, at most
static int n_terms(int array, const int* d) { return array == OUT ? d['C'] : array == DINP ? d['O'] : d['R']; }

static double error(int array, const int* d) { return rounding_walk(2 * n_terms(array, d), n_terms(array, d)); }

// either order of a chain rounds n + 1 times; a tensor core may take a factor below 2^-126, beside one below 2^21, as 0
static double apart(const OpProblem* p, int array, size_t i) {
    const int n = n_terms(array, p->d) + 2;
    return 2.0 * n * 0x1p-24 * (double)p->sizes[array][i] + n * 0x1p-105;
}

#ifdef __CUDACC__
enum { LONG_C = 70, LONG_R = 600, MANY = 130 };
#else
enum { LONG_C = GEMM_LONG_K + GEMM_K + 3, LONG_R = GEMM_LONG_K + 77, MANY = 601 };  // packed, MANY * LONG fill two blocks
#endif

// R, E, E + 1, C, OC, counts, gathered
static const int plain_shapes[][OP_DIMS] = {
    {1, 1, 2, 1, 1, RANDOM}, {7, 1, 2, 33, 5, RANDOM}, {5, 4, 5, 8, 8, ALL_IN_LAST}, {6, 3, 4, 5, 1, ALL_IN_FIRST},
    {9, 5, 6, 1, 7, RANDOM}, {33, 7, 8, 24, 40, RANDOM}, {400, 7, 8, 9, 10, STAIRS}, {130, 2, 3, 40, 72, RANDOM},
    {31, 64, 65, 3, 2, RANDOM}, {37, 13, 14, 16, 48, RANDOM}, {400, 7, 8, 72, 136, STAIRS}, {LONG_R, 2, 3, 3, 5, RANDOM},
    {8, 7, 8, 584, 24, RANDOM}, {16, 5, 6, 72, 21, RANDOM}, {12, 3, 4, 40, 33, ALL_IN_LAST}, {17, 4, 5, 16, 8, RANDOM},
    {21, 2, 3, LONG_C, 3, RANDOM}, {21, 3, 4, 3, LONG_C, ALL_IN_LAST},
    {MANY, 4, 5, LONG_C, 2, RANDOM}, {LONG_R, 3, 4, 2, MANY, RANDOM}, {0},
};

static const Op plain = {
    .name = "rows", .dims = "REFCOpg",
    .arrays = {
        {INP, "inp", "RC", GIVEN, 1.0f, "dweight"},
        {WEIGHT, "weight", "EOC", GIVEN, 1.0f, "dinp"},
        {.number = OFFSETS, .name = "offsets", .extents = "F", .role = GIVEN | INDEX, .below = 'R'},
        {OUT, "out", "RO", MADE, 0.0f, ""},
        {DOUT, "dout", "RO", GIVEN, 1.0f},
        {DINP, "dinp", "RC", GRADIENT | ASKED},
        {DWEIGHT, "dweight", "EOC", GRADIENT | ASKED | FLOAT},
    },
    .shapes = plain_shapes, .traits = ROWS | ANYWHERE | SPECIAL_KERNELS, .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward), .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{9, 5, 6, 7, 4, RANDOM}, {4, 3, 4, 5, 6, ALL_IN_LAST}},
    .apart = apart,
};

// R, E, E + 1, C, OC, counts, gathered, rows of inp and dout; where only one is gathered, that many as R
static const int gathered_shapes[][OP_DIMS] = {
    {1, 1, 2, 1, 1, RANDOM, 3, 1}, {14, 3, 4, 17, 5, RANDOM, 3, 7}, {8, 4, 5, 8, 8, RANDOM, 3, 30},
    {40, 5, 6, 1, 16, RANDOM, 3, 20}, {40, 5, 6, 16, 1, RANDOM, 3, 20}, {33, 7, 8, 24, 40, RANDOM, 1, 33},
    {33, 7, 8, 40, 24, RANDOM, 2, 33}, {400, 7, 8, 9, 10, STAIRS, 3, 200}, {130, 2, 3, 40, 72, RANDOM, 3, 65},
    {2, 16, 17, 64, 32, RANDOM, 3, 1}, {16, 9, 10, 136, 40, RANDOM, 3, 4},
    {400, 7, 8, 72, 136, STAIRS, 3, 100}, {52, 64, 65, 50, 98, RANDOM, 3, 13}, {0},
};

static const Op gathered = {
    .name = "gathered", .dims = "REFCOpgN",
    .arrays = {
        {INP, "inp", "NC", GIVEN, 1.0f, "dweight"},
        {WEIGHT, "weight", "EOC", GIVEN, 1.0f, "dinp"},
        {.number = OFFSETS, .name = "offsets", .extents = "F", .role = GIVEN | INDEX, .below = 'R'},
        {OUT, "out", "RO", MADE, 0.0f, ""},
        {DOUT, "dout", "NO", GIVEN, 1.0f},
        {DINP, "dinp", "RC", GRADIENT | ASKED},
        {DWEIGHT, "dweight", "EOC", GRADIENT | ASKED | FLOAT},
        {.number = INP_INDEX, .name = "inp_index", .extents = "R", .role = GIVEN | INDEX, .needed = "dweight",
         .below = 'N'},
        {.number = DOUT_INDEX, .name = "dout_index", .extents = "R", .role = GIVEN | INDEX, .below = 'N'},
    },
    .shapes = gathered_shapes, .traits = ANYWHERE | SPECIAL_KERNELS, .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward), .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .apart = apart,
};

// ---- what the tables do not say ----

// the plain loop of a gathered problem, and of one whose rows were copied, row by row, to where they are asked for
static void test_copied(Test* t) {
    const int shape[OP_DIMS] = {40, 5, 6, 7, 9, RANDOM, 3, 20}, C = 7, OC = 9, R = 40;
    OpProblem g = op_problem(&gathered, shape, HARD, 0), p = op_problem(&plain, shape, HARD, 0);
    for (int s = 0; s < R; s++) {
        const int n = ((int*)g.a[INP_INDEX])[s], m = ((int*)g.a[DOUT_INDEX])[s];
        memcpy(p.a[INP] + s * C, g.a[INP] + n * C, sizeof(float) * (size_t)C);
        memcpy(p.a[DOUT] + s * OC, g.a[DOUT] + m * OC, sizeof(float) * (size_t)OC);
    }
    op_solve(&p);
    check_bits(t, "out", g.a[OUT], p.a[OUT], op_length(&g, OUT));
    check_bits(t, "dinp", g.a[DINP], p.a[DINP], op_length(&g, DINP));
    check_bits(t, "dweight", g.a[DWEIGHT], p.a[DWEIGHT], op_length(&g, DWEIGHT));
    op_problem_free(&g), op_problem_free(&p);
}

// the plain loop of each expert is that of a linear layer of its rows
static void test_layers(Test* t) {
    const int shape[OP_DIMS] = {40, 5, 6, 7, 9, RANDOM}, C = 7, OC = 9;
    OpProblem p = op_problem(&plain, shape, HARD, 0);
    float *out = filled_array(op_length(&p, OUT), NAN), *dinp = filled_array(op_length(&p, DINP), NAN),
          *dweight = filled_array(op_length(&p, DWEIGHT), NAN);
    for (int e = 0; e < 5; e++) {
        const int s = ((int*)p.a[OFFSETS])[e], N = ((int*)p.a[OFFSETS])[e + 1] - s, w = e * OC * C;
        matmul_forward_ref(out + s * OC, p.a[INP] + s * C, p.a[WEIGHT] + w, NULL, N, C, OC);
        matmul_backward_input_ref(dinp + s * C, p.a[DOUT] + s * OC, p.a[WEIGHT] + w, 0, N, C, OC);
        matmul_backward_weight_ref(dweight + w, p.a[DOUT] + s * OC, p.a[INP] + s * C, 0, N, C, OC);
    }
    check_bits(t, "out", p.a[OUT], out, op_length(&p, OUT));
    check_bits(t, "dinp", p.a[DINP], dinp, op_length(&p, DINP));
    check_bits(t, "dweight", p.a[DWEIGHT], dweight, op_length(&p, DWEIGHT));
    free(out), free(dinp), free(dweight);
    op_problem_free(&p);
}

// all rows and the weight of expert `spoilt` are NaN: the answers to the others stay
static void check_apart(Test* t, const OpProblem* clean, const int* shape, int spoilt, const Device* dev) {
    OpProblem p = op_problem(clean->op, shape, EASY, clean->as_bf16);
    const int *offsets = (int*)p.a[OFFSETS], E = p.d['E'], C = p.d['C'], OC = p.d['O'];
    float nan = NAN;
    if (p.as_bf16) { op_store_bf16(&nan, 1); }
    for (int i = 0; i < OC * C; i++) { p.a[WEIGHT][spoilt * OC * C + i] = nan; }
    for (int i = offsets[spoilt] * C; i < offsets[spoilt + 1] * C; i++) { p.a[INP][i] = nan; }
    for (int i = offsets[spoilt] * OC; i < offsets[spoilt + 1] * OC; i++) { p.a[DOUT][i] = nan; }
    op_answer(t, &p, dev);
    for (int e = 0; e < E; e++) {
        const int s = offsets[e], N = offsets[e + 1] - s;
        if (e == spoilt) { continue; }
        check_bits(t, "out", p.a[OUT] + s * OC, clean->a[OUT] + s * OC, (size_t)(N * OC));
        check_bits(t, "dinp", p.a[DINP] + s * C, clean->a[DINP] + s * C, (size_t)(N * C));
        check_bits(t, "dweight", p.a[DWEIGHT] + e * OC * C, clean->a[DWEIGHT] + e * OC * C, (size_t)(OC * C));
    }
    op_problem_free(&p);
}

static void test_apart(Test* t) {
    const int shapes[][OP_DIMS] = {{33, 7, 8, 24, 40, RANDOM}, {11, 4, 5, 24, 40, RANDOM}};
    Device dev = test_device(2);
    for (int i = 0; i < 2 * (1 + FAST_KERNELS); i++) {
        OpProblem clean = op_problem(&plain, shapes[i % 2], EASY, i / 2);
        op_answer(t, &clean, &dev);
        for (int e = 0; e < clean.d['E']; e++) { check_apart(t, &clean, shapes[i % 2], e, &dev); }
        op_problem_free(&clean);
    }
    device_free(&dev);
}

// gradients of experts without rows are zeros, also where all rows are another's
static void test_no_rows(Test* t) {
    Device dev = test_device(3);
    for (int as_bf16 = 0; as_bf16 <= FAST_KERNELS; as_bf16++) {
        OpProblem p = op_problem(&plain, plain_shapes[2], EASY, as_bf16);
        op_answer(t, &p, &dev);
        for (int i = 0; i < 3 * 8 * 8; i++) {
            check(t, float_bits(p.a[DWEIGHT][i]) == 0, "expert %d: [%d] is %g", i / 64, i % 64,
                  (double)p.a[DWEIGHT][i]);
        }
        op_problem_free(&p);
    }
    device_free(&dev);
}

#ifndef __CUDACC__
// gradients of which there are too many for a cache, beginning at a cache line, with rims on both sides
static void test_past(Test* t) {
    enum { R = 95, C = 6 * TILE_N + GEMM_LINE, OC = 17 * TILE_M + 5, E = GROUPED_PAST_FLOATS / (C * OC) + 1 };
    const size_t n = (size_t)E * OC * C;
    float *inp = hard_array(R * C, 1), *dout = hard_array(R * OC, 2), *want = filled_array(n, NAN);
    int* offsets = (int*)new_array(E + 1, sizeof(int));
    for (int e = 0; e <= E; e++) { offsets[e] = e < 31 ? e * (e - 1) / 10 : R; }
    grouped_matmul_backward_weight_ref(want, dout, NULL, inp, NULL, offsets, E, C, OC);
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        float* got = (float*)device_alloc(sizeof(float) * n, "gradients");
        memset(got, 0xff, sizeof(float) * n);
        grouped_matmul_backward_weight(got, dout, NULL, inp, NULL, offsets, E, R, C, OC, &dev);
        check_bits(t, "dweight", got, want, n);
        device_release(got, sizeof(float) * n);
        device_free(&dev);
    }
    free(inp), free(dout), free(want), free(offsets);
}

// stored weights (E, OC, C) give the bits of the same numbers as floats; an expert has no rows, one has one
static void check_stored(Test* t, StoredMatrix first, int E, const int* offsets) {
    const int R = offsets[E], C = first.columns, OC = first.rows;
    float *weight = filled_array((size_t)E * OC * C, NAN), *inp = hard_array(R * C, 2), *dout = hard_array(R * OC, 3);
    StoredMatrix all = first;  // as one matrix below each other
    all.rows = E * OC;
    for (int i = 0; i < all.rows; i++) { stored_row(weight + (size_t)i * C, &all, i); }
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        float *want = filled_array(R * OC, NAN), *got = filled_array(R * OC, NAN);
        float *dwant = filled_array(R * C, NAN), *dgot = filled_array(R * C, NAN);
        grouped_matmul_forward(want, inp, NULL, weight, offsets, E, R, C, OC, &dev);
        grouped_matmul_forward_stored(got, inp, NULL, first, offsets, E, R, &dev);
        check_bits(t, "out", got, want, R * OC);
        grouped_matmul_backward_input(dwant, dout, NULL, weight, offsets, E, R, C, OC, &dev);
        grouped_matmul_backward_input_stored(dgot, dout, NULL, first, offsets, E, R, &dev);
        check_bits(t, "dinp", dgot, dwant, R * C);
        free(want), free(got), free(dwant), free(dgot);
        device_free(&dev);
    }
    free(weight), free(inp), free(dout);
}

static void test_stored(Test* t) {
    enum { E = 5, C = 170, OC = 258 };
    const int offsets[E + 1] = {0, 7, 7, 8, 11, 40};
    float *x = hard_array(E * OC * C, 1), *scales = filled_array(E * 4 * 2, NAN);
    uint16_t* halves = (uint16_t*)new_array(E * OC * C, sizeof *halves);
    uint8_t* bytes = (uint8_t*)new_array(E * OC * C, sizeof *bytes);
    for (int i = 0; i < E * OC * C; i++) { halves[i] = (uint16_t)(float_bits(x[i]) >> 16); }
    check_stored(t, stored_matrix(halves, STORED_BF16, OC, C, OC, NULL), E, offsets);
    for (int i = 0; i < E * OC * C; i++) { x[i] = fminf(fmaxf(x[i], -5e4f), 5e4f); }
    for (int i = 0; i < E * 4; i++) {  // gate and up, of 129 rows each: the last row has a block of its own
        const int row = i / 2 * (OC / 2) + i % 2 * FP8_BLOCK;
        fp8_quantize_rows(bytes + row * C, scales + 2 * i, x + row * C, i % 2 ? 1 : FP8_BLOCK, C);
    }
    const StoredMatrix fp8 = stored_matrix(bytes, STORED_FP8, OC, C, OC / 2, scales);
    check_stored(t, fp8, E, offsets);
    free(x), free(scales), free(halves), free(bytes);
}

// five experts of random codes, each with scales of its own
static void test_fp4(Test* t) {
    enum { E = 5, C = 160, OC = 258 };
    const int offsets[E + 1] = {0, 7, 7, 8, 11, 40};
    uint8_t* exponents = (uint8_t*)new_array(E * OC * C / 32, 1);
    uint8_t* bytes = (uint8_t*)new_array(E * OC * C / 2, 1);
    for (int i = 0; i < E * OC * C / 2; i++) { bytes[i] = (uint8_t)splitmix64(1, (uint64_t)i); }
    for (int i = 0; i < E * OC * C / 32; i++) { exponents[i] = (uint8_t)(110 + splitmix64(2, (uint64_t)i) % 20); }
    const StoredMatrix first = stored_matrix(bytes, STORED_FP4, OC, C, OC, exponents);
    check_stored(t, first, E, offsets);
    free(exponents), free(bytes);
}
#endif

// ---- the kernels of grouped_hopper.h ----

#if defined(__CUDACC__) && !defined(EXACT)
#ifdef WGMMA
// R, E, E + 1, C, OC, counts, gathered, rows of inp and dout: sums of no step, of one, of as many as are copied ahead,
// of more than there are stages; a last step of 8 terms; rows of one warpgroup, of two, of several tiles; columns of two
static const int hopper_shapes[][OP_DIMS] = {
    {1, 1, 2, 8, 8, RANDOM, 3, 1}, {17, 3, 4, 64, 8, ALL_IN_LAST, 3, 9}, {64, 2, 3, 72, 16, ALL_IN_FIRST, 0, 64},
    {65, 2, 3, 128, 264, RANDOM, 3, 20}, {400, 7, 8, 72, 136, STAIRS, 3, 100},
    {330, 2, 3, 328, 520, ALL_IN_FIRST, 1, 330}, {129, 9, 10, 264, 328, RANDOM, 2, 129}, {0},
};

static void test_hopper(Test* t) {
    Op op = gathered;
    Device dev = test_device(1);
    op.shapes = hopper_shapes;
    grouped_hopper = 1;
    for (int i = 0; hopper_shapes[i][0]; i++) {
        OpProblem p = op_problem(&op, hopper_shapes[i], EASY, 1);
        op_check(t, &p, 0, &dev), op_check(t, &p, 1, &dev);
        op_problem_free(&p);
    }
    device_free(&dev);
    test_apart(t), test_no_rows(t);
    grouped_hopper = 0;
}
#else
static void test_hopper(Test* t) { skip(t, "not built for sm_90a"); }
#endif

#ifdef SIMT
enum { WIDER_OUT = 24, WIDER_X = 16 };  // elements that rows are further apart than they need be

typedef struct {
    int turned, R, E, K, N;
    const int *offsets, *index;  // index: one of x, or NULL
} HopperProblem;

// out and dweight, of rows of x as dout, by one kind of kernels
static void hopper_solve(const HopperProblem* p, int hopper, float* out, float* dweight) {
    const size_t out_row = (size_t)p->N + WIDER_OUT, x_row = (size_t)p->K + WIDER_X;
    const size_t n_x = p->R * x_row, n_out = p->R * out_row, n_inp = (size_t)p->R * p->N,
                 n_weight = (size_t)p->E * p->N * p->K;
    Device dev = test_device(1);
    float *x = hard_array(n_x, 1), *weight = hard_array(n_weight, 2), *inp = hard_array(n_inp, 3);
    OpBf16 *d_x = to_device_as<OpBf16>(x, n_x, &dev), *d_weight = to_device_as<OpBf16>(weight, n_weight, &dev),
           *d_inp = to_device_as<OpBf16>(inp, n_inp, &dev), *d_out = to_device_as<OpBf16>(out, n_out, &dev);
    float* d_dweight = to_device(dweight, n_weight, &dev);
    int *offsets = ints_to_device(p->offsets, p->E + 1, &dev),
        *index = p->index ? ints_to_device(p->index, p->R, &dev) : NULL;
    grouped_hopper = hopper;
    grouped_product(d_out, out_row, 0, d_x, x_row, index,
                    p->turned ? gemm_transposed(d_weight, p->K) : gemm_matrix(d_weight, p->N), offsets, p->E, p->R,
                    p->K, p->N, &dev);
    grouped_gradient(d_dweight, d_x, x_row, index, d_inp, (const int*)NULL, offsets, p->E, p->R, p->N, p->K, &dev);
    grouped_hopper = 0;
    from_device_as<OpBf16>(out, d_out, n_out, &dev);
    from_device(dweight, d_dweight, n_weight, &dev);
    device_drop(d_x), device_drop(d_weight), device_drop(d_inp), device_drop(offsets);
    if (index) { device_drop(index); }
    free(x), free(weight), free(inp);
    device_free(&dev);
}

static void test_hopper_bits(Test* t) {
    static const int ends[] = {0, 0, 1, 65, 65, 200, 210}, all[] = {0, 70}, gathered_rows[70] = {3, 3, 69, 5, 8};
    const HopperProblem problems[] = {
        {1, 210, 6, 136, 264, ends, NULL}, {0, 210, 6, 72, 520, ends, NULL}, {1, 70, 1, 456, 8, all, gathered_rows},
        {0, 70, 1, 8, 40, all, gathered_rows},
    };
    for (const HopperProblem& p : problems) {
        const size_t n_out = (size_t)p.R * (p.N + WIDER_OUT), n_weight = (size_t)p.E * p.N * p.K;
        float *out[2], *dweight[2];
        for (int i = 0; i < 2; i++) {
            out[i] = filled_array(n_out, 77.0f), dweight[i] = filled_array(n_weight, NAN);
            hopper_solve(&p, i, out[i], dweight[i]);
        }
        check_bits(t, "out", out[1], out[0], n_out);
        check_bits(t, "dweight", dweight[1], dweight[0], n_weight);
        for (int i = 0; i < 2; i++) { free(out[i]), free(dweight[i]); }
    }
}
#else
static void test_hopper_bits(Test* t) { skip(t, "only dev/simt adds the terms of both kinds in one order"); }
#endif
#endif

int main(int argc, char** argv) {
    const Op* ops[] = {&plain, &gathered};
    const Promise own[] = {
        {"copied", "gathered rows are those that a copy would have", test_copied},
        {"layers", "the plain loop of an expert is that of a linear layer", test_layers},
        {"apart", "NaN in all rows and the weight of an expert reaches no other expert", test_apart},
        {"no rows", "an expert without rows has gradients of +0", test_no_rows},
#if defined(__CUDACC__) && !defined(EXACT)
        {"hopper", "the kernels by wgmma: within the rounding of bf16, experts apart, gradients of +0", test_hopper},
        {"hopper bits", "in dev/simt they have the bits of the others, rows apart or gathered", test_hopper_bits},
#endif
#ifndef __CUDACC__
        {"stored", "weights stored as bf16 or fp8 give the bits of the same numbers as floats", test_stored},
        {"fp4", "... and as fp4", test_fp4},
        {"past", "many gradients, stored past the caches, have the plain loop's bits", test_past},
#endif
    };
    return op_main(argc, argv, ops, sizeof ops / sizeof *ops, own, sizeof own / sizeof *own);
}
