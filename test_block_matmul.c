/*
Promises of llmc/ops/block_matmul.h, llmc/ops/block_lora.h and the groups of llmc/models/linear.h, which follow from two tables (llmc/test/op.h): a linear
layer in groups, and the adapter beside it. Then: each group is a linear layer of its own, with an adapter of its own;
the layer is one whose whole weight is block diagonal; with A and B merged into its weight it says the same.
*/
#include "llmc/models/linear.h"
#include "llmc/ops/block_lora.h"
#include "llmc/ops/block_matmul.h"
#include "llmc/ops/matmul.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

// ---- the layer ----

enum { INP, WEIGHT, OUT, DOUT, DINP, DWEIGHT };

static int inputs_of(const int* d) { return d['G'] * d['C']; }   // of all groups
static int outputs_of(const int* d) { return d['G'] * d['R']; }

static void forward_ref(float* const* a, const int* d) {
    block_matmul_forward_ref(a[OUT], a[INP], a[WEIGHT], d['N'], inputs_of(d), outputs_of(d), d['G']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    block_matmul_forward(x[OUT], x[INP], x[WEIGHT], d['N'], inputs_of(d), outputs_of(d), d['G'], dev);
}

static void backward_ref(float* const* a, const int* d) {
    block_matmul_backward_input_ref(a[DINP], a[DOUT], a[WEIGHT], d['N'], inputs_of(d), outputs_of(d), d['G']);
    block_matmul_backward_weight_ref(a[DWEIGHT], a[DOUT], a[INP], d['N'], inputs_of(d), outputs_of(d), d['G']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    block_matmul_backward_input(x[DINP], x[DOUT], x[WEIGHT], d['N'], inputs_of(d), outputs_of(d), d['G'], dev);
    block_matmul_backward_weight(a[DWEIGHT], x[DOUT], x[INP], d['N'], inputs_of(d), outputs_of(d), d['G'], dev);
}

static void in_double(double* const* a, const int* d) {
    const int C = d['C'], R = d['R'], OC = outputs_of(d);
    for (int i = 0; i < d['N'] * OC; i++) {
        const int n = i / OC, g = i % OC / R;
        a[OUT][i] = 0.0;
        for (int c = 0; c < C; c++) { a[OUT][i] += a[INP][(n * d['G'] + g) * C + c] * a[WEIGHT][i % OC * C + c]; }
    }
}

// terms of a chain
static int n_terms(int array, const int* d) { return array == OUT ? d['C'] : array == DINP ? d['R'] : d['N']; }

static double error(int array, const int* d) { return rounding_walk(2 * n_terms(array, d), n_terms(array, d)); }

// either order of a chain rounds n + 1 times; a tensor core may take a factor below 2^-126, beside one below 2^21, as 0
static double apart(const OpProblem* p, int array, size_t i) {
    const int n = n_terms(array, p->d) + 2;
    double off = 2.0 * n * 0x1p-24 * (double)p->sizes[array][i] + n * 0x1p-105;
#ifdef TF32
    off += (double)p->sizes[array][i] * 0x1p-10;  // either factor is off by 2^-11
#endif
    return off;
}

#ifdef __CUDACC__
enum { LONG = 70, MANY = 130 };
#else
enum { LONG = GEMM_LONG_K + GEMM_K + 3, MANY = 601 };  // packed, MANY * LONG fill two blocks
#endif

// N, G, inputs and outputs of a group
static const int shapes[][OP_DIMS] = {
    {1, 1, 1, 1}, {7, 1, 33, 5}, {7, 5, 1, 1}, {1, 3, 7, 33}, {33, 4, 7, 3}, {5, 2, 64, 32}, {16, 2, 72, 21},
    {16, 3, 40, 48}, {9, 3, 24, 16}, {40, 2, 136, 72}, {7, 16, 8, 8}, {130, 3, 16, 10}, {MANY, 2, 40, 3},
    {LONG, 2, 3, 5}, {MANY, 2, LONG, 1}, {3, 2, LONG, 5}, {6, 2, 5, LONG}, {12, 2, 3, MANY}, {0},
};

static const Op layer = {
    .name = "blocks", .dims = "NGCR",
    .arrays = {
        {INP, "inp", "NGC", GIVEN, 1.0f, "dweight"},
        {WEIGHT, "weight", "GRC", GIVEN, 1.0f, "dinp"},
        {OUT, "out", "NGR", MADE, 0.0f, ""},
        {DOUT, "dout", "NGR", GIVEN, 1.0f},
        {DINP, "dinp", "NGC", GRADIENT | ASKED},
        {DWEIGHT, "dweight", "GRC", GRADIENT | ASKED | FLOAT},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = forward_ref, .forward = OP_FAST(forward), .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{9, 3, 7, 4}, {4, 2, 5, 6}}, .apart = apart,
};

// ---- the adapter ----

enum { L_INP, L_A, L_B, L_OUT, L_DOUT, L_DINP, L_DA, L_DB };
static const float SCALE = 0.75f;

// d['p'] of 100 elements are left out
static LoraShape shape_of(const int* d) {
    const Dropout dropped = {(float)d['p'] / 100.0f, dropout_key(42, 7), (uint64_t)1 << 40};
    const LoraShape s = {d['N'], d['C'], outputs_of(d), d['r'], (size_t)outputs_of(d), SCALE, dropped, 3};
    return s;
}

static float* scratch_ref(const int* d) {
    return filled_array((size_t)(d['N'] * d['G']) * (size_t)(2 * d['r'] + d['C']), NAN);
}

static void lora_plain_forward(float* const* a, const int* d) {
    const LoraShape s = shape_of(d);
    float* scratch = scratch_ref(d);
    block_lora_forward_ref(a[L_OUT], a[L_INP], a[L_A], a[L_B], &s, d['G'], scratch);
    free(scratch);
}

static void lora_plain_backward(float* const* a, const int* d) {
    const LoraShape s = shape_of(d);
    float* scratch = scratch_ref(d);
    block_lora_backward_ref(a[L_DINP], a[L_DA], a[L_DB], a[L_DOUT], a[L_INP], a[L_A], a[L_B], &s, d['G'], scratch);
    free(scratch);
}

OP_STORED(X)
static void lora_fast_forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const LoraShape s = shape_of(d);
    X* scratch = op_scratch(x[L_INP], block_lora_scratch_elements(&s, d['G']), dev);
    block_lora_forward(x[L_OUT], x[L_INP], x[L_A], x[L_B], &s, d['G'], scratch, dev);
    device_drop(scratch);
}

OP_STORED(X)
static void lora_fast_backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const LoraShape s = shape_of(d);
    X* scratch = op_scratch(x[L_INP], block_lora_scratch_elements(&s, d['G']), dev);
    block_lora_backward(x[L_DINP], a[L_DA], a[L_DB], x[L_DOUT], x[L_INP], x[L_A], x[L_B], &s, d['G'], scratch, dev);
    device_drop(scratch);
}

// 1 / (1 - p) where an element stays, else 0
static float* factors_of(const int* d) {
    const LoraShape s = shape_of(d);
    const size_t n = (size_t)(d['N'] * inputs_of(d));
    float* factors = filled_array(n, 1.0f);
    if (s.dropout.p > 0.0f) { dropout_ref(factors, factors, &s.dropout, s.site, n); }
    return factors;
}

static void lora_in_double(double* const* a, const int* d) {
    const int C = d['C'], r = d['r'], OC = outputs_of(d);
    float* factors = factors_of(d);
    for (int i = 0; i < d['N'] * OC; i++) {
        const int row = (i / OC * d['G'] + i % OC / d['R']) * C;
        a[L_OUT][i] = 0.0;
        for (int j = 0; j < r; j++) {
            double u = 0.0;
            for (int c = 0; c < C; c++) { u += (double)factors[row + c] * a[L_INP][row + c] * a[L_A][j * C + c]; }
            a[L_OUT][i] += (double)SCALE * u * a[L_B][i % OC * r + j];
        }
    }
    free(factors);
}

// the longest way of a term into array: chains, products with scale and 1 / (1 - p)
static int lora_roundings(int array, const int* d) {
    switch (array) {
        case L_OUT: return d['C'] + d['r'] + 3;
        case L_DINP: return d['R'] + d['r'] + 4;
        case L_DA: return d['R'] + d['N'] * d['G'] + 4;
        default: return d['C'] + d['N'] + 4;
    }
}

// what an array's numbers are sums of: products of three numbers below 1, the first two of which are summed up, too
static double lora_error(int array, const int* d) {
    const int into_rank = array == L_OUT || array == L_DB ? d['C'] : d['R'];
    const int out_of_rank = array == L_OUT || array == L_DINP ? d['r'] : d['N'] * d['G'];
    return rounding_walk(lora_roundings(array, d), 1.0 + 2.0 * into_rank * out_of_rank);
}

// either order of a chain rounds lora_roundings times. bf16: u is stored, or du, twice, and what dropout leaves
static double lora_apart(const OpProblem* p, int array, size_t i) {
    const double size = (double)p->sizes[array][i], n = lora_roundings(array, p->d) + 2;
    double off = 2.0 * n * 0x1p-24 * size + n * 0x1p-105 + (p->as_bf16 ? 3.0 * 0x1p-8 * size : 0.0);
#ifdef TF32
    off += size * 4.0 * 0x1p-11;  // each of four factors
#endif
    return off;
}

// N, G, inputs and outputs of a group, r, dropout in percent
static const int lora_shapes[][OP_DIMS] = {
    {1, 1, 1, 1, 1, 0}, {7, 1, 33, 5, 3, 0}, {7, 3, 5, 4, 2, 0}, {5, 2, 8, 16, 8, 0}, {33, 4, 24, 40, 8, 0},
    {13, 5, 7, 9, 19, 0}, {3, 8, 40, 24, 16, 0}, {1, 3, 48, 8, 5, 0}, {70, 2, 72, 136, 16, 0}, {65, 3, 30, 66, 7, 0},
    {LONG, 2, 3, 2, 2, 0}, {3, 2, LONG, 2, 3, 0}, {2, 2, 3, LONG, 2, 0}, {MANY, 2, 9, 10, 4, 0},
    {1, 2, 1, 1, 1, 50}, {7, 3, 11, 5, 3, 10}, {33, 2, 24, 40, 8, 30}, {6, 4, 8, 24, 16, 50}, {0},
};

static const Op adapter = {
    .name = "adapter", .dims = "NGCRrp",
    .arrays = {
        {L_INP, "inp", "NGC", GIVEN, 1.0f, "dA dB"},
        {L_A, "A", "rC", GIVEN, 1.0f, "dinp dB"},
        {L_B, "B", "GRr", GIVEN, 1.0f, "dinp dA"},
        {L_OUT, "out", "NGR", MADE | ADDED, 1.0f, ""},
        {L_DOUT, "dout", "NGR", GIVEN, 1.0f},
        {L_DINP, "dinp", "NGC", GRADIENT | ADDED | ASKED, 1.0f},
        {L_DA, "dA", "rC", GRADIENT | ASKED | FLOAT},
        {L_DB, "dB", "GRr", GRADIENT | ASKED | FLOAT},
    },
    .shapes = lora_shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = lora_plain_forward, .forward = OP_FAST(lora_fast_forward),
    .backward_ref = lora_plain_backward, .backward = OP_FAST(lora_fast_backward),
    .in_double = lora_in_double, .error = lora_error, .judged = {{5, 3, 4, 4, 2, 0}, {4, 2, 5, 3, 3, 40}},
    .apart = lora_apart,
};

// ---- what the tables do not say ----

// columns first .. first + n of rows that are `row` wide
static float* columns_of(const float* x, int N, int row, int first, int n) {
    float* some = filled_array((size_t)(N * n), NAN);
    for (int i = 0; i < N; i++) { memcpy(some + i * n, x + i * row + first, sizeof(float) * (size_t)n); }
    return some;
}

static void check_columns(Test* t, const char* what, const float* got, const float* x, int N, int row, int first,
                          int n) {
    float* some = columns_of(x, N, row, first, n);
    check_bits(t, what, got, some, (size_t)(N * n));
    free(some);
}

// the plain loop of each group is that of a linear layer of its own
static void test_layers(Test* t) {
    enum { N = 11, G = 3, C = 7, R = 5 };
    const int shape[] = {N, G, C, R};
    OpProblem p = op_problem(&layer, shape, HARD, 0);
    for (int g = 0; g < G; g++) {
        float *inp = columns_of(p.a[INP], N, G * C, g * C, C), *dout = columns_of(p.a[DOUT], N, G * R, g * R, R);
        float *weight = p.a[WEIGHT] + g * R * C, out[N * R], dinp[N * C], dweight[R * C];
        matmul_forward_ref(out, inp, weight, NULL, N, C, R);
        matmul_backward_input_ref(dinp, dout, weight, 0, N, C, R);
        matmul_backward_weight_ref(dweight, dout, inp, 0, N, C, R);
        check_columns(t, "out", out, p.a[OUT], N, G * R, g * R, R);
        check_columns(t, "dinp", dinp, p.a[DINP], N, G * C, g * C, C);
        check_bits(t, "dweight", dweight, p.a[DWEIGHT] + g * R * C, R * C);
        free(inp), free(dout);
    }
    op_problem_free(&p);
}

// a whole weight, zeros but for the blocks, gives the same numbers: a product with 0 changes no sum
static void test_diagonal(Test* t) {
    enum { N = 6, G = 4, C = 3, R = 2 };
    const int shape[] = {N, G, C, R};
    OpProblem p = op_problem(&layer, shape, EASY, 0);
    float whole[G * R * G * C] = {0}, out[N * G * R];
    for (int i = 0; i < G * R * C; i++) { whole[i / C * G * C + i / C / R * C + i % C] = p.a[WEIGHT][i]; }
    matmul_forward_ref(out, p.a[INP], whole, NULL, N, G * C, G * R);
    for (int i = 0; i < N * G * R; i++) {
        check(t, out[i] == p.a[OUT][i], "[%d] found %g, expected %g", i, (double)p.a[OUT][i], (double)out[i]);
    }
    op_problem_free(&p);
}

// of each group what lora.h says of an adapter (A, B_g) of its own; dA, one chain, is the sum of theirs
static void test_adapters(Test* t) {
    enum { N = 11, G = 3, C = 7, R = 5, RANK = 4, SCRATCH = N * (2 * RANK + C) };
    const int shape[] = {N, G, C, R, RANK, 0};
    OpProblem p = op_problem(&adapter, shape, EASY, 0);
    float scratch[SCRATCH], dA[RANK * C], dB[R * RANK];
    double dA_sum[RANK * C] = {0};
    const LoraShape s = {N, C, R, RANK, R, SCALE, {0, 0, 0}, 0};
    for (int g = 0; g < G; g++) {
        float *inp = columns_of(p.a[L_INP], N, G * C, g * C, C), *dout = columns_of(p.a[L_DOUT], N, G * R, g * R, R);
        float *out = columns_of(p.before[L_OUT], N, G * R, g * R, R), *B = p.a[L_B] + g * R * RANK;
        float* dinp = columns_of(p.before[L_DINP], N, G * C, g * C, C);
        lora_forward_ref(out, inp, p.a[L_A], B, &s, NULL, scratch);
        lora_backward_ref(dinp, dA, dB, dout, inp, p.a[L_A], B, &s, NULL, scratch);
        check_columns(t, "out", out, p.a[L_OUT], N, G * R, g * R, R);
        check_columns(t, "dinp", dinp, p.a[L_DINP], N, G * C, g * C, C);
        check_bits(t, "dB", dB, p.a[L_DB] + g * R * RANK, R * RANK);
        for (int i = 0; i < RANK * C; i++) { dA_sum[i] += (double)dA[i]; }
        free(inp), free(dout), free(out), free(dinp);
    }
    check_close(t, "dA", p.a[L_DA], dA_sum, RANK * C, 2.0 * lora_error(L_DA, p.d));
    op_problem_free(&p);
}

// merged: W + scale * B A, of the stored matrix
static void test_merged(Test* t) {
    enum { N = 7, G = 3, C = 9, R = 5, RANK = 2 };
    const int shape[] = {N, G, C, R, RANK, 0};
    OpProblem p = op_problem(&adapter, shape, EASY, 0);
    float *w = random_array(G * R * C, 1.0f, 1), *merged = copied_array(w, G * R * C), out[N * G * R], want[N * G * R];
    for (int i = 0; i < G * R * C; i++) {
        for (int j = 0; j < RANK; j++) { merged[i] += SCALE * p.a[L_B][i / C * RANK + j] * p.a[L_A][j * C + i % C]; }
    }
    const LoraShape s = shape_of(p.d);
    float* scratch = scratch_ref(p.d);
    block_matmul_forward_ref(want, p.a[L_INP], merged, N, G * C, G * R, G);
    block_matmul_forward_ref(out, p.a[L_INP], w, N, G * C, G * R, G);
    block_lora_forward_ref(out, p.a[L_INP], p.a[L_A], p.a[L_B], &s, G, scratch);
    const double most = rounding_walk(2 * C + 4 * RANK, C * (1.0 + 2.0 * RANK));
    for (int i = 0; i < N * G * R; i++) {
        const double off = fabs((double)out[i] - (double)want[i]);
        check(t, off <= most, "[%d] found %g, expected %g", i, (double)out[i], (double)want[i]);
    }
    free(w), free(merged), free(scratch);
    op_problem_free(&p);
}

// groups first .. first + n - 1 of a problem of the adapter, by the plain loop or, in exact builds, by the fast one
static void check_shared(Test* t, const OpProblem* p, int first, int n, int is_fast, const Device* dev) {
    const int *d = p->d, N = d['N'], C = d['C'], R = d['R'], r = d['r'], wide = d['G'] * C, outputs = d['G'] * R;
    LoraShape s = shape_of(d);
    s.all_groups = d['G'], s.own.first = first * C, s.n_out = n * R, s.out_row = (size_t)(n * R);
    float *inp = columns_of(p->a[L_INP], N, wide, first * C, n * C);
    float *dinp = columns_of(p->before[L_DINP], N, wide, first * C, n * C);
    float *dout = columns_of(p->a[L_DOUT], N, outputs, first * R, n * R);
    float *out = columns_of(p->before[L_OUT], N, outputs, first * R, n * R);
    float *B = p->a[L_B] + first * R * r, *dB = filled_array(n * R * r, NAN), *scratch = scratch_ref(d);
    if (is_fast) {
        float *inp_d = to_device(inp, N * n * C, dev), *dinp_d = to_device(dinp, N * n * C, dev);
        float *dout_d = to_device(dout, N * n * R, dev), *out_d = to_device(out, N * n * R, dev);
        float *A_d = to_device(p->a[L_A], r * C, dev), *B_d = to_device(B, n * R * r, dev);
        float *dB_d = to_device(dB, n * R * r, dev);
        float* room = op_scratch(inp, block_lora_scratch_elements(&s, n), dev);
        block_lora_forward(out_d, inp_d, A_d, B_d, &s, n, room, dev);
        block_lora_backward(dinp_d, NULL, dB_d, dout_d, inp_d, A_d, B_d, &s, n, room, dev);
        from_device(out, out_d, N * n * R, dev), from_device(dinp, dinp_d, N * n * C, dev);
        from_device(dB, dB_d, n * R * r, dev);
        device_drop(inp_d), device_drop(dout_d), device_drop(A_d), device_drop(B_d), device_drop(room);
    } else {
        block_lora_forward_ref(out, inp, p->a[L_A], B, &s, n, scratch);
        block_lora_backward_ref(dinp, NULL, dB, dout, inp, p->a[L_A], B, &s, n, scratch);
    }
    check_columns(t, "out", out, p->a[L_OUT], N, outputs, first * R, n * R);
    check_columns(t, "dinp", dinp, p->a[L_DINP], N, wide, first * C, n * C);
    check_bits(t, "dB", dB, p->a[L_DB] + first * R * r, n * R * r);
    free(inp), free(dinp), free(dout), free(out), free(dB), free(scratch);
}

static void test_shared(Test* t) {
    const int of[][6] = {{7, 3, 9, 5, 2, 30}, {6, 4, 8, 24, 16, 0}};
    Device dev = test_device(2);
    for (int i = 0; i < 4; i++) {
        OpProblem p = op_problem(&adapter, of[i / 2], EASY, 0);
        const int is_fast = i % 2 && !FAST_KERNELS, n = p.d['G'] / 2;
        check_shared(t, &p, 0, n, is_fast, &dev);
        check_shared(t, &p, n, p.d['G'] - n, is_fast, &dev);
        op_problem_free(&p);
    }
    device_free(&dev);
}

// no positions: gradients of parameters are +0, and nothing else is touched
static void test_nothing(Test* t) {
    enum { G = 2, C = 3, R = 4, RANK = 2, SIZE = G * R * C };
    const LoraShape s = {0, C, G * R, RANK, G * R, SCALE, {0, 0, 0}, 0};
    float* nan = filled_array(SIZE, NAN);
    Device dev = test_device(2);
    float *w = to_device(nan, SIZE, &dev), *dw = to_device(nan, SIZE, &dev), *dA = to_device(nan, RANK * C, &dev);
    float *dB = to_device(nan, G * R * RANK, &dev), *none = NULL;
    block_matmul_forward(none, none, w, 0, G * C, G * R, G, &dev);
    block_matmul_backward_input(w, none, w, 0, G * C, G * R, G, &dev);
    block_matmul_backward_weight(dw, none, none, 0, G * C, G * R, G, &dev);
    block_lora_forward(none, none, w, w, &s, G, none, &dev);
    block_lora_backward(w, dA, dB, none, none, w, w, &s, G, none, &dev);
    from_device(nan, dw, SIZE, &dev);
    for (int i = 0; i < SIZE; i++) { check(t, float_bits(nan[i]) == 0, "dweight[%d] is %g", i, (double)nan[i]); }
    from_device(nan, dA, RANK * C, &dev);
    for (int i = 0; i < RANK * C; i++) { check(t, float_bits(nan[i]) == 0, "dA[%d] is %g", i, (double)nan[i]); }
    from_device(nan, dB, G * R * RANK, &dev);
    for (int i = 0; i < G * R * RANK; i++) { check(t, float_bits(nan[i]) == 0, "dB[%d] is %g", i, (double)nan[i]); }
    device_drop(w);
    free(nan);
    device_free(&dev);
}

#ifndef __CUDACC__
// a model's layer with its adapter is the two ops, one behind the other; dropout counts all inputs of a position
static void test_linear(Test* t) {
    enum { N = 6, G = 3, C = 5, R = 4, RANK = 2, FIRST = 100 };
    const int shape[] = {N, G, C, R}, lora_shape[] = {N, G, C, R, RANK, 40};
    OpProblem p = op_problem(&layer, shape, EASY, 0), q = op_problem(&adapter, lora_shape, EASY, 0);
    LoraShape s = shape_of(q.d);
    float out[N * G * R], dinp[N * G * C], dA[RANK * C], dB[G * R * RANK], dweight[G * R * C];
    float *got = filled_array(N * G * R, NAN), *dgot = filled_array(N * G * C, NAN), *scratch = scratch_ref(q.d);
    float dA_got[RANK * C], dB_got[G * R * RANK], *fast = filled_array(block_lora_scratch_elements(&s, G), NAN);
    Device dev = test_device(2);
    s.dropout.first = FIRST * G * C;
    block_matmul_forward_ref(out, p.a[INP], p.a[WEIGHT], N, G * C, G * R, G);
    block_lora_forward_ref(out, p.a[INP], q.a[L_A], q.a[L_B], &s, G, scratch);
    block_matmul_backward_input_ref(dinp, p.a[DOUT], p.a[WEIGHT], N, G * C, G * R, G);
    block_lora_backward_ref(dinp, dA, dB, p.a[DOUT], p.a[INP], q.a[L_A], q.a[L_B], &s, G, scratch);
    Linear w;
    memset(&w, 0, sizeof w);
    const StoredMatrix matrix = stored_matrix(p.a[WEIGHT], STORED_F32, G * R, C, G * R, NULL);
    w.weight = matrix, w.C = C, w.OC = G * R, w.n_adapters = 1, w.scratch = fast;
    w.adapter[0].shape = s, w.adapter[0].shape.N = 0, w.adapter[0].shape.dropout.first = FIRST * C;
    w.adapter[0].A = q.a[L_A], w.adapter[0].B = q.a[L_B];
    const LinearGradients d = {dweight, NULL, {dA_got, NULL}, {dB_got, NULL}};
    linear_blocks_forward(got, p.a[INP], w, G, N, &dev);
    linear_blocks_backward(dgot, p.a[DOUT], p.a[INP], w, d, G, N, &dev);
    check_bits(t, "out", got, out, N * G * R);
    check_bits(t, "dinp", dgot, dinp, N * G * C);
    check_bits(t, "dweight", dweight, p.a[DWEIGHT], G * R * C);
    check_bits(t, "dA", dA_got, dA, RANK * C);
    check_bits(t, "dB", dB_got, dB, G * R * RANK);
    free(got), free(dgot), free(scratch), free(fast);
    device_free(&dev);
    op_problem_free(&p), op_problem_free(&q);
}

// what a model sets aside for its adapters is enough for those of a layer in groups
static void test_scratch(Test* t) {
    enum { N = 7, G = 4, C = 6, R = 3, RANK = 5 };
    Tensor row = tensor("wo_a.weight", 0, 1, G * R, C, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    AdapterPlace place;
    Adapters x;
    Model m;
    memset(&place, 0, sizeof place), memset(&x, 0, sizeof x), memset(&m, 0, sizeof m);
    tensor_blocks(&row, G);
    place.n = G * R, place.rank = RANK, place.dropout = 0.1f;
    x.places = &place, x.n_places = 1, m.table[0] = row;
    const LoraShape s = {N, C, G * R, RANK, G * R, SCALE, {0.1f, 0, 0}, 0};
    const size_t set_aside = adapter_scratch_elements(&x, &m, N, 0), needed = block_lora_scratch_elements(&s, G);
    check(t, set_aside >= needed, "%zu elements are set aside, %zu needed", set_aside, needed);
}

// gradients of which there are too many for a cache, beginning at a cache line, with rims on both sides
static void test_past(Test* t) {
    enum { N = 9, C = 6 * TILE_N + GEMM_LINE, R = 17 * TILE_M + 5, G = GROUPED_PAST_FLOATS / (C * R) + 1 };
    const size_t n = (size_t)G * R * C;
    float *inp = hard_array(N * G * C, 1), *dout = hard_array(N * G * R, 2), *want = filled_array(n, NAN);
    block_matmul_backward_weight_ref(want, dout, inp, N, G * C, G * R, G);
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        float* got = (float*)device_alloc(sizeof(float) * n, "gradients");
        memset(got, 0xff, sizeof(float) * n);
        block_matmul_backward_weight(got, dout, inp, N, G * C, G * R, G, &dev);
        check_bits(t, "dweight", got, want, n);
        device_release(got, sizeof(float) * n);
        device_free(&dev);
    }
    free(inp), free(dout), free(want);
}

// a stored weight gives the bits of the same numbers as floats; a block's rows begin inside a block of scales
static void check_stored(Test* t, StoredMatrix stored, int N, int G) {
    const int Cg = stored.columns, C = G * Cg, OC = stored.rows;
    float *weight = filled_array(OC * Cg, NAN), *inp = hard_array(N * C, 2), *dout = hard_array(N * OC, 3);
    for (int i = 0; i < OC; i++) { stored_row(weight + i * Cg, &stored, i); }
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        float *want = filled_array(N * OC, NAN), *got = filled_array(N * OC, NAN);
        float *dwant = filled_array(N * C, NAN), *dgot = filled_array(N * C, NAN);
        block_matmul_forward(want, inp, weight, N, C, OC, G, &dev);
        block_matmul_forward_stored(got, inp, stored, N, G, &dev);
        check_bits(t, "out", got, want, N * OC);
        block_matmul_backward_input(dwant, dout, weight, N, C, OC, G, &dev);
        block_matmul_backward_input_stored(dgot, dout, stored, N, G, &dev);
        check_bits(t, "dinp", dgot, dwant, N * C);
        free(want), free(got), free(dwant), free(dgot);
        device_free(&dev);
    }
    free(weight), free(inp), free(dout);
}

static void test_stored(Test* t) {
    enum { G = 3, C = 170, R = 90, OC = G * R };
    float *x = hard_array(OC * C, 1), *scales = filled_array(3 * 2, NAN);
    uint16_t* halves = (uint16_t*)new_array(OC * C, sizeof *halves);
    uint8_t* bytes = (uint8_t*)new_array(OC * C, sizeof *bytes);
    for (int i = 0; i < OC * C; i++) { halves[i] = (uint16_t)(float_bits(x[i]) >> 16); }
    for (int i = 0; i < OC * C; i++) { x[i] = fminf(fmaxf(x[i], -5e4f), 5e4f); }
    for (int row = 0; row < OC; row += FP8_BLOCK) {
        const int n_rows = OC - row < FP8_BLOCK ? OC - row : FP8_BLOCK;
        fp8_quantize_rows(bytes + row * C, scales + row / FP8_BLOCK * 2, x + row * C, n_rows, C);
    }
    const StoredMatrix fp8 = stored_matrix(bytes, STORED_FP8, OC, C, OC, scales);
    for (int N = 5; N < 50; N += 35) {  // few rows, and more
        check_stored(t, stored_matrix(halves, STORED_BF16, OC, C, OC, NULL), N, G);
        check_stored(t, fp8, N, G);
    }
    free(x), free(scales), free(halves), free(bytes);
}
#endif

int main(int argc, char** argv) {
    const Op* ops[] = {&layer, &adapter};
    const Promise own[] = {
        {"layers", "the plain loop of a group is that of a linear layer", test_layers},
        {"diagonal", "a whole weight of zeros but for the blocks gives the same outputs", test_diagonal},
        {"adapters", "beside each group the adapter is that of lora.h; dA is the sum of theirs", test_adapters},
        {"merged", "the weight with A and B in it gives the same outputs", test_merged},
        {"shared", "groups of ranks that have some each: the bits of all, with dropout, too", test_shared},
        {"nothing", "N = 0: gradients of parameters are +0", test_nothing},
#ifndef __CUDACC__
        {"linear", "a model's layer with its adapter is the two ops, bit for bit", test_linear},
        {"scratch", "adapter_scratch_elements is enough for a layer in groups", test_scratch},
        {"stored", "a weight stored as bf16 or fp8 gives the bits of the same numbers as floats", test_stored},
        {"past", "many gradients, stored past the caches, have the plain loop's bits", test_past},
#endif
    };
    return op_main(argc, argv, ops, sizeof ops / sizeof *ops, own, sizeof own / sizeof *own);
}
