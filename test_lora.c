/*
Promises of llmc/ops/lora.h, which follow from two tables (llmc/test/op.h): one adapter, with and without dropout, whose
outputs are some columns of wider rows; and adapters of experts, whose rows are gathered and weighted. Then: a model
with A and B merged into its weight says the same, and what tables of one op cannot compare: gathered rows with copies,
experts with adapters of their own, weights with outputs that were multiplied by them.
*/
#include "llmc/ops/lora.h"
#include "llmc/ops/matmul.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

enum { INP, A, B, OUT, DOUT, DINP, DA, DB, OFFSETS, WEIGHT, INP_INDEX, DOUT_INDEX };
enum { GATHER_INP = 1, GATHER_DOUT = 2, WEIGHTED = 4, ALL_IN_LAST = 8, WEIGHT_GATHERED = 16 };  // d['k']
static const float SCALE = 0.75f;

// the last n_out of W columns; d['p'] of 100 elements are left out
static LoraShape shape_of(const int* d) {
    const Dropout dropped = {(float)d['p'] / 100.0f, dropout_key(42, 7), (uint64_t)1 << 40};
    const LoraShape s = {d['N'], d['C'], d['O'], d['r'], (size_t)d['W'], SCALE, dropped, 3, {0, 0, 0}};
    return s;
}

static int first_column(const int* d) { return d['W'] - d['O']; }

static LoraExperts experts_of(float* const* a, const int* d) {
    const LoraExperts x = {d['E'], (const int*)a[OFFSETS], d['k'] & GATHER_INP ? (const int*)a[INP_INDEX] : NULL,
                           d['k'] & GATHER_DOUT ? (const int*)a[DOUT_INDEX] : NULL,
                           d['k'] & WEIGHTED ? a[WEIGHT] : NULL,
                           d['k'] & WEIGHT_GATHERED ? (const int*)a[INP_INDEX] : NULL};
    return x;
}

// without E in the table there is one adapter
static int has_experts(const int* d) { return d['E'] > 0; }

// ---- calls, with scratch of NaN ----

static float* scratch_ref(const int* d) { return filled_array((size_t)d['N'] * (size_t)(2 * d['r'] + d['C']), NAN); }

static void forward_ref(float* const* a, const int* d) {
    const LoraShape s = shape_of(d);
    const LoraExperts experts = experts_of(a, d);
    float* scratch = scratch_ref(d);
    lora_forward_ref(a[OUT] + first_column(d), a[INP], a[A], a[B], &s, has_experts(d) ? &experts : NULL, scratch);
    free(scratch);
}

static void backward_ref(float* const* a, const int* d) {
    const LoraShape s = shape_of(d);
    const LoraExperts experts = experts_of(a, d);
    float* scratch = scratch_ref(d);
    lora_backward_ref(a[DINP], a[DA], a[DB], a[DOUT] + first_column(d), a[INP], a[A], a[B], &s,
                      has_experts(d) ? &experts : NULL, scratch);
    free(scratch);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const LoraShape s = shape_of(d);
    const LoraExperts experts = experts_of(a, d);
    X* scratch = op_scratch(x[INP], lora_scratch_elements(&s, 0), dev);
    lora_forward(x[OUT] + first_column(d), x[INP], x[A], x[B], &s, has_experts(d) ? &experts : NULL, scratch, dev);
    device_drop(scratch);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const LoraShape s = shape_of(d);
    const LoraExperts experts = experts_of(a, d);
    X* scratch = op_scratch(x[INP], lora_scratch_elements(&s, has_experts(d) && experts.weight), dev);
    lora_backward(x[DINP], a[DA], a[DB], x[DOUT] + first_column(d), x[INP], x[A], x[B], &s,
                  has_experts(d) ? &experts : NULL, scratch, dev);
    device_drop(scratch);
}

// ---- how far off ----

// the longest way of a term into array: chains, products with scale, 1 / (1 - p) and weight
static int n_roundings(int array, const int* d) {
    switch (array) {
        case OUT: return d['C'] + d['r'] + 3;
        case DINP: return d['O'] + d['r'] + 4;
        case DA: return d['O'] + d['N'] + 4;
        default: return d['C'] + d['N'] + 4;
    }
}

// what an array's numbers are sums of: products of three numbers below 1, the first two of which are summed up, too
static double error(int array, const int* d) {
    const int into_rank = array == OUT || array == DB ? d['C'] : d['O'];
    const int out_of_rank = array == OUT || array == DINP ? d['r'] : d['N'];
    return rounding_walk(n_roundings(array, d), 1.0 + 2.0 * into_rank * out_of_rank);
}

// either order of a chain rounds n_roundings times. bf16: u or du is stored, then with its weight, and what dropout
// leaves
static double apart(const OpProblem* p, int array, size_t i) {
    const double size = (double)p->sizes[array][i], n = n_roundings(array, p->d) + 2;
    double off = 2.0 * n * 0x1p-24 * size + n * 0x1p-105 + (p->as_bf16 ? 3.0 * 0x1p-8 * size : 0.0);
#ifdef TF32
    off += size * 4.0 * 0x1p-11;  // each of four factors
#endif
    return off;
}

// ---- the tables ----

// 1 / (1 - p) where an element stays, else 0
static float* factors_of(const int* d) {
    const LoraShape s = shape_of(d);
    const size_t n = (size_t)(d['N'] * d['C']);
    float* factors = filled_array(n, 1.0f);
    if (s.dropout.p > 0.0f) { dropout_ref(factors, factors, &s.dropout, s.site, n); }
    return factors;
}

static void in_double(double* const* a, const int* d) {
    const int N = d['N'], C = d['C'], O = d['O'], r = d['r'], W = d['W'];
    float* factors = factors_of(d);
    for (int i = 0, e = 0; i < N * W; i++) {
        const int n = i / W, o = i % W - first_column(d);
        double sum = 0.0;
        while (has_experts(d) && n >= (int)a[OFFSETS][e + 1]) { e++; }
        for (int j = 0; j < r && o >= 0; j++) {
            double u = 0.0;
            for (int c = 0; c < C; c++) {
                u += (double)factors[n * C + c] * a[INP][n * C + c] * a[A][(e * r + j) * C + c];
            }
            sum += (double)SCALE * u * a[B][(e * O + o) * r + j];
        }
        a[OUT][i] = sum;
    }
    free(factors);
}

#ifdef __CUDACC__
enum { LONG = 140, MANY = 150 };
#else
enum { LONG = GEMM_LONG_K + GEMM_K + 3, MANY = 700 };
#endif

// N, C, n_out, r, out_row, dropout in percent
static const int one_shapes[][OP_DIMS] = {
    {1, 1, 1, 1, 1, 0}, {7, 33, 5, 3, 5, 0}, {7, 33, 5, 3, 11, 0}, {5, 8, 16, 8, 16, 0}, {33, 24, 40, 8, 80, 0},
    {9, 5, 7, 1, 20, 0}, {13, 17, 9, 19, 9, 0}, {4, 40, 24, 16, 24, 0}, {3, 19, 33, 2, 40, 0}, {1, 48, 8, 5, 16, 0},
    {70, 72, 136, 16, 272, 0}, {65, 130, 66, 7, 67, 0}, {LONG, 3, 2, 2, 3, 0}, {3, LONG, 2, 3, 3, 0},
    {2, 3, LONG, 2, LONG + 1, 0}, {MANY, 9, 10, 4, 20, 0}, {9, MANY, 3, 16, 3, 0}, {7, 5, MANY, 4, 2 * MANY, 0},
    {1, 1, 1, 1, 1, 50}, {7, 33, 5, 3, 11, 10}, {33, 24, 40, 8, 80, 30}, {6, 8, 24, 16, 24, 50}, {65, 67, 3, 4, 5, 5},
    {0},
};

static const Op one = {
    .name = "one", .dims = "NCOrWp",
    .arrays = {
        {INP, "inp", "NC", GIVEN, 1.0f, "dA dB"},
        {A, "A", "rC", GIVEN, 1.0f, "dinp dB"},
        {B, "B", "Or", GIVEN, 1.0f, "dinp dA"},
        {OUT, "out", "NW", MADE | ADDED, 1.0f, ""},
        {DOUT, "dout", "NW", GIVEN, 1.0f},
        {DINP, "dinp", "NC", GRADIENT | ADDED | ASKED, 1.0f},
        {DA, "dA", "rC", GRADIENT | ASKED | FLOAT},
        {DB, "dB", "Or", GRADIENT | ASKED | FLOAT},
    },
    .shapes = one_shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error,
    .judged = {{7, 5, 4, 3, 4, 0}, {4, 3, 5, 2, 9, 0}, {6, 7, 3, 4, 5, 40}}, .apart = apart,
};

// rows of expert e: few, many, none
static void fill(float* const* a, const int* d) {
    int* offsets = (int*)a[OFFSETS];
    offsets[0] = 0;
    for (int e = 0; e < d['E']; e++) {
        const int left = d['N'] - offsets[e], draw = (int)(splitmix64(9, (uint64_t)e) % (uint64_t)(left + 1));
        offsets[e + 1] = offsets[e] + (e + 1 == d['E'] ? left : d['k'] & ALL_IN_LAST ? 0 : draw / 2);
    }
}

// N, E, E + 1, C, n_out, r, out_row, kind
static const int expert_shapes[][OP_DIMS] = {
    {1, 1, 2, 1, 1, 1, 1, 0}, {9, 3, 4, 5, 7, 2, 7, 0}, {9, 3, 4, 5, 7, 2, 14, GATHER_INP},
    {12, 4, 5, 8, 16, 8, 16, ALL_IN_LAST}, {40, 5, 6, 24, 8, 8, 16, GATHER_INP}, {40, 5, 6, 16, 24, 16, 24, WEIGHTED},
    {33, 7, 8, 17, 9, 3, 9, GATHER_DOUT | WEIGHTED}, {33, 7, 8, 16, 24, 8, 24, GATHER_DOUT | WEIGHTED},
    {33, 7, 8, 16, 24, 8, 24, GATHER_INP | WEIGHTED | WEIGHT_GATHERED},
    {21, 2, 3, 33, 5, 19, 10, GATHER_INP | GATHER_DOUT | WEIGHTED}, {8, 16, 17, 40, 72, 4, 144, GATHER_INP},
    {140, 3, 4, 72, 136, 16, 136, GATHER_DOUT | WEIGHTED}, {140, 2, 3, 136, 72, 8, 144, GATHER_INP},
    {LONG, 2, 3, 3, 2, 2, 3, WEIGHTED}, {5, 3, 4, LONG, 2, 2, 3, WEIGHTED | GATHER_DOUT},
    {5, 2, 3, 3, LONG, 2, LONG, GATHER_INP}, {0},
};

static const Op experts = {
    .name = "experts", .dims = "NEFCOrWk",
    .arrays = {
        {INP, "inp", "NC", GIVEN, 1.0f, "dA dB"},
        {A, "A", "ErC", GIVEN, 1.0f, "dinp dB"},
        {B, "B", "EOr", GIVEN, 1.0f, "dinp dA"},
        {OUT, "out", "NW", MADE | ADDED, 1.0f, ""},
        {DOUT, "dout", "NW", GIVEN, 1.0f},
        {DINP, "dinp", "NC", GRADIENT | ADDED | ASKED, 1.0f},
        {DA, "dA", "ErC", GRADIENT | ASKED | FLOAT},
        {DB, "dB", "EOr", GRADIENT | ASKED | FLOAT},
        {.number = OFFSETS, .name = "offsets", .extents = "F", .role = GIVEN | INDEX, .below = 'N'},
        {WEIGHT, "weight", "N", GIVEN | FLOAT, 1.0f, "dA dB"},
        {.number = INP_INDEX, .name = "inp_index", .extents = "N", .role = GIVEN | INDEX, .needed = "dA dB",
         .below = 'N'},
        {.number = DOUT_INDEX, .name = "dout_index", .extents = "N", .role = GIVEN | INDEX, .below = 'N'},
    },
    .shapes = expert_shapes, .traits = ANYWHERE, .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {{9, 3, 4, 5, 4, 2, 8, 0}, {5, 4, 5, 3, 4, 3, 4, ALL_IN_LAST}},
    .apart = apart,
};

// ---- what the tables do not say ----

// merged: W + scale * B A
static void test_merged(Test* t) {
    const int shape[OP_DIMS] = {7, 33, 5, 3, 5, 0}, N = 7, C = 33, O = 5, r = 3;
    OpProblem p = op_problem(&one, shape, EASY, 0);
    float *w = random_array((size_t)(O * C), 1.0f, 1), *merged = copied_array(w, (size_t)(O * C));
    float *out = filled_array((size_t)(N * O), NAN), *want = copied_array(out, (size_t)(N * O));
    for (int i = 0; i < O * C; i++) {
        for (int j = 0; j < r; j++) { merged[i] += SCALE * p.a[B][i / C * r + j] * p.a[A][j * C + i % C]; }
    }
    const LoraShape s = shape_of(p.d);
    float* scratch = scratch_ref(p.d);
    matmul_forward_ref(want, p.a[INP], merged, NULL, N, C, O);
    matmul_forward_ref(out, p.a[INP], w, NULL, N, C, O);
    lora_forward_ref(out, p.a[INP], p.a[A], p.a[B], &s, NULL, scratch);
    const double most = rounding_walk(2 * C + 4 * r, C * (1.0 + 2.0 * r));
    for (int i = 0; i < N * O; i++) {
        const double off = fabs((double)out[i] - (double)want[i]);
        check(t, off <= most, "[%d] found %g, expected %g", i, (double)out[i], (double)want[i]);
    }
    free(w), free(merged), free(out), free(want), free(scratch);
    op_problem_free(&p);
}

// rows that are gathered, and the same rows copied to where they are asked for
static void test_copied(Test* t) {
    const int shape[OP_DIMS] = {40, 5, 6, 7, 9, 3, 12, GATHER_INP | GATHER_DOUT | WEIGHTED | WEIGHT_GATHERED},
              C = 7, W = 12, N = 40;
    const int plain_shape[OP_DIMS] = {40, 5, 6, 7, 9, 3, 12, WEIGHTED};
    OpProblem g = op_problem(&experts, shape, HARD, 0), p = op_problem(&experts, plain_shape, HARD, 0);
    for (int n = 0; n < N; n++) {
        memcpy(p.a[INP] + n * C, g.a[INP] + ((int*)g.a[INP_INDEX])[n] * C, sizeof(float) * (size_t)C);
        p.a[WEIGHT][n] = g.a[WEIGHT][((int*)g.a[INP_INDEX])[n]];
        memcpy(p.a[DOUT] + n * W, g.a[DOUT] + ((int*)g.a[DOUT_INDEX])[n] * W, sizeof(float) * (size_t)W);
    }
    op_solve(&p);
    for (int i = OUT; i <= DB; i++) {
        if (i != DOUT) { check_bits(t, experts.arrays[i].name, g.a[i], p.a[i], op_length(&g, i)); }
    }
    op_problem_free(&g), op_problem_free(&p);
}

// the plain loop of each expert is that of an adapter by itself; one without rows has gradients of +0
static void test_adapters(Test* t) {
    const int shape[OP_DIMS] = {40, 5, 6, 7, 9, 3, 12, 0}, C = 7, O = 9, r = 3, W = 12;
    OpProblem p = op_problem(&experts, shape, HARD, 0);
    float* got[OP_ARRAYS] = {NULL};
    int *offsets = (int*)p.a[OFFSETS], n_none = 0;
    offsets[3] = offsets[2];
    op_solve(&p);
    for (int i = OUT; i <= DB; i++) {
        got[i] = p.before[i] ? copied_array(p.before[i], op_length(&p, i)) : filled_array(op_length(&p, i), NAN);
    }
    for (int e = 0; e < 5; e++) {
        const int first = offsets[e], n = offsets[e + 1] - first, c = W - O;
        const LoraShape s = {n, C, O, r, (size_t)W, SCALE, {0, 0, 0}, 0, {0, 0, 0}};
        float *A_e = p.a[A] + e * r * C, *B_e = p.a[B] + e * O * r;
        float* scratch = filled_array((size_t)(n * 2 * r + 1), NAN);
        lora_forward_ref(got[OUT] + first * W + c, p.a[INP] + first * C, A_e, B_e, &s, NULL, scratch);
        lora_backward_ref(got[DINP] + first * C, got[DA] + e * r * C, got[DB] + e * O * r, p.a[DOUT] + first * W + c,
                          p.a[INP] + first * C, A_e, B_e, &s, NULL, scratch);
        for (int i = 0; n == 0 && i < r * C; i++) { n_none += float_bits(p.a[DA][e * r * C + i]) == 0; }
        for (int i = 0; n == 0 && i < O * r; i++) { n_none += float_bits(p.a[DB][e * O * r + i]) == 0; }
        free(scratch);
    }
    check(t, n_none > 0 && n_none % (r * (C + O)) == 0, "%d gradients of experts without rows are +0", n_none);
    for (int i = OUT; i <= DB; i++) {
        if (i != DOUT) { check_bits(t, experts.arrays[i].name, got[i], p.a[i], op_length(&p, i)); }
        free(got[i]);
    }
    op_problem_free(&p);
}

// weights that are powers of two round nothing: dA and dB are those of dout with its rows multiplied, dinp is as it was
static void test_weights(Test* t) {
    const int shape[OP_DIMS] = {21, 3, 4, 6, 5, 4, 5, WEIGHTED}, plain_shape[OP_DIMS] = {21, 3, 4, 6, 5, 4, 5, 0};
    OpProblem weighted = op_problem(&experts, shape, EASY, 0), p = op_problem(&experts, plain_shape, EASY, 0);
    float* dinp = copied_array(p.a[DINP], op_length(&p, DINP));
    for (int i = 0; i < 21 * 5; i++) {
        weighted.a[WEIGHT][i / 5] = ldexpf(1.0f, i / 5 % 7 - 3);
        p.a[DOUT][i] *= weighted.a[WEIGHT][i / 5];
    }
    op_solve(&weighted), op_solve(&p);
    check_bits(t, "dA", weighted.a[DA], p.a[DA], op_length(&p, DA));
    check_bits(t, "dB", weighted.a[DB], p.a[DB], op_length(&p, DB));
    check_bits(t, "dinp", weighted.a[DINP], dinp, op_length(&p, DINP));
    free(dinp);
    op_problem_free(&weighted), op_problem_free(&p);
}

// a rank that got no rows at all: nothing is read or written but the gradients, which are zeros
static void test_no_rows(Test* t) {
    enum { E = 3, C = 5, O = 4, R = 2 };
    const int none[E + 1] = {0};
    const LoraShape s = {0, C, O, R, O, SCALE, {0, 0, 0}, 0, {0, 0, 0}};
    float *nan = filled_array(E * (C + O) * R, NAN), *got_A = copied_array(nan, E * R * C),
          *got_B = copied_array(nan, E * O * R);
    Device dev = test_device(3);
    int* offsets = ints_to_device(none, E + 1, &dev);
    float *a = to_device(nan, E * R * C, &dev), *b = to_device(nan, E * O * R, &dev), *x = to_device(nan, 1, &dev);
    float *dA = to_device(nan, E * R * C, &dev), *dB = to_device(nan, E * O * R, &dev);
    const LoraExperts rows = {E, offsets, NULL, NULL, NULL, NULL};
    lora_forward(x, x, a, b, &s, &rows, x, &dev);
    lora_backward(x, dA, dB, x, x, a, b, &s, &rows, x, &dev);
    from_device(got_A, dA, E * R * C, &dev), from_device(got_B, dB, E * O * R, &dev);
    for (int i = 0; i < E * R * C; i++) { check(t, float_bits(got_A[i]) == 0, "dA[%d] is %g", i, (double)got_A[i]); }
    for (int i = 0; i < E * O * R; i++) { check(t, float_bits(got_B[i]) == 0, "dB[%d] is %g", i, (double)got_B[i]); }
    device_drop(offsets), device_drop(a), device_drop(b), device_drop(x);
    free(nan), free(got_A), free(got_B);
    device_free(&dev);
}

#if !defined(__CUDACC__) || defined(EXACT)
// columns first .. first + n - 1 of a whole (rows, C)
static float* columns_of(const float* whole, int rows, int C, int first, int n) {
    float* part = filled_array((size_t)(rows * n), NAN);
    for (int i = 0; i < rows; i++) {
        memcpy(part + i * n, whole + i * C + first, sizeof(float) * (size_t)n);
    }
    return part;
}

// dinp and dA of some columns: plain == 1 by the plain loop
static void check_columns(Test* t, OpProblem* p, const float* dinp, const LoraColumns own, int plain) {
    const int N = p->d['N'], C = p->d['C'], O = p->d['O'], r = p->d['r'], W = p->d['W'], n = own.n;
    LoraShape s = shape_of(p->d);
    s.own = own;
    float *got = columns_of(dinp, N, C, own.first, n), *want = columns_of(p->a[DINP], N, C, own.first, n);
    float* want_A = own.learns ? columns_of(p->a[DA], r, C, own.first, n) : copied_array(p->a[DA], (size_t)(r * C));
    float *nan = filled_array((size_t)(r * C), NAN), *got_A = copied_array(nan, (size_t)(r * C));
    const size_t n_A = (size_t)(r * (own.learns ? n : C)), n_scratch = (size_t)(N * (2 * r + C + 1) + 64);
    float* scratch = filled_array(n_scratch, NAN);
    if (plain) {
        lora_backward_ref(got, got_A, NULL, p->a[DOUT] + first_column(p->d), p->a[INP], p->a[A], p->a[B], &s, NULL,
                          scratch);
    } else {
        Device dev = test_device(3);
        float *x = to_device(p->a[INP], (size_t)(N * C), &dev), *dout = to_device(p->a[DOUT], (size_t)(N * W), &dev);
        float *a = to_device(p->a[A], (size_t)(r * C), &dev), *b = to_device(p->a[B], (size_t)(O * r), &dev);
        float *dx = to_device(got, (size_t)(N * n), &dev), *dA = to_device(nan, (size_t)(r * C), &dev);
        float* room = to_device(scratch, n_scratch, &dev);
        lora_backward(dx, dA, NULL, dout + first_column(p->d), x, a, b, &s, NULL, room, &dev);
        from_device(got, dx, (size_t)(N * n), &dev), from_device(got_A, dA, (size_t)(r * C), &dev);
        device_drop(x), device_drop(dout), device_drop(a), device_drop(b), device_drop(room);
        device_free(&dev);
    }
    check_bits(t, "dinp", got, want, (size_t)(N * n));
    check_bits(t, "dA", got_A, want_A, n_A);
    free(got), free(want), free(want_A), free(nan), free(got_A), free(scratch);
}

// what ranks of --tp compute of inputs' columns
static void test_columns(Test* t) {
    const int shapes[][OP_DIMS] = {{13, 40, 6, 5, 9, 0}, {13, 40, 6, 5, 9, 30}, {70, 72, 24, 8, 24, 20}};
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++) {
        OpProblem p = op_problem(&one, shapes[k], EASY, 0);
        op_solve(&p);
        for (int i = 0; i < 8; i++) {
            const LoraColumns own = {i / 4 == 0 ? 0 : i / 2 % 2 == 0 ? 8 : 19, i / 4 == 0 ? 16 : 21, i % 2};
            check_columns(t, &p, p.before[DINP], own, i / 2 % 2);
        }
        op_problem_free(&p);
    }
}
#endif

int main(int argc, char** argv) {
    const Op* ops[] = {&one, &experts};
    const Promise own[] = {
        {"merged", "the weight with A and B in it gives the same outputs", test_merged},
        {"copied", "gathered rows are those that a copy would have", test_copied},
        {"adapters", "the plain loop of an expert is that of an adapter by itself; without rows gradients are +0",
         test_adapters},
        {"weights", "a row's weight multiplies what it adds to dA and dB, not dinp", test_weights},
#if !defined(__CUDACC__) || defined(EXACT)
        {"columns", "dinp and dA of some columns alone are those of all", test_columns},
#endif
        {"no rows", "where no expert has a row all gradients of A and B are +0", test_no_rows},
    };
    return op_main(argc, argv, ops, sizeof ops / sizeof *ops, own, sizeof own / sizeof *own);
}
