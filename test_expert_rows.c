/*
Promises of llmc/ops/expert_rows.h: rows are a stable bijection whatever the experts; what follows from the tables
(llmc/test/op.h): the combination, the sum of gradients, and weights there and back.
*/
#include "llmc/ops/expert_rows.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

// rows in memory of the host; freed by host_free
static ExpertRows host_rows(int N, int k, int E) {
    const size_t n_rows = (size_t)N * k;
    ExpertRows r = {0, k, E, NULL, NULL, NULL, NULL, N};
    r.offsets = (int*)new_array((size_t)E + 1, sizeof(int)), r.token = (int*)new_array(n_rows, sizeof(int));
    r.slot = (int*)new_array(n_rows, sizeof(int)), r.pair = (int*)new_array(n_rows, sizeof(int));
    return r;
}

static void host_free(ExpertRows* r) { free(r->offsets), free(r->token), free(r->slot), free(r->pair); }

static ExpertRows found_on_host(const int* experts, const int* d) {
    ExpertRows r = host_rows(d['N'], d['k'], d['E']);
    expert_rows_find_ref(&r, experts, d['N']);
    return r;
}

static ExpertRows found(const int* experts, const int* d, const Device* dev) {
    ExpertRows r;
    expert_rows_init(&r, d['N'], d['k'], d['E']);
    expert_rows_find(&r, experts, d['N'], dev);
    return r;
}

// ---- combine ----

enum { EXPERTS, ROWS_, WEIGHTS, OUT };

static void combine_ref(float* const* a, const int* d) {
    ExpertRows r = found_on_host((int*)a[EXPERTS], d);
    expert_rows_combine_ref(a[OUT], a[ROWS_], a[WEIGHTS], &r, d['D']);
    host_free(&r);
}

OP_STORED(X)
static void combine(X* const* x, float* const* a, const int* d, const Device* dev) {
    ExpertRows r = found((int*)a[EXPERTS], d, dev);
    expert_rows_combine(x[OUT], x[ROWS_], a[WEIGHTS], &r, d['D'], dev);
    expert_rows_free(&r);
}

// the row of pair p has the pairs of lower experts and the earlier ones of its own before it
static void combine_double(double* const* a, const int* d) {
    const int R = d['N'] * d['k'], D = d['D'];
    for (int i = 0; i < d['N'] * D; i++) { a[OUT][i] = 0.0; }
    for (int p = 0; p < R; p++) {
        const double e = a[EXPERTS][p];
        int row = 0;
        for (int q = 0; q < R; q++) { row += a[EXPERTS][q] < e || (a[EXPERTS][q] == e && q < p); }
        for (int i = 0; i < D; i++) { a[OUT][p / d['k'] * D + i] += a[WEIGHTS][p] * a[ROWS_][row * D + i]; }
    }
}

static double combine_error(int array, const int* d) {
    (void)array;
    return rounding_walk(d['k'], 2.0 * d['k']);  // k roundings of sums below 2 k
}

static const int shapes[][OP_DIMS] = {  // N, k, D, E
    {1, 1, 1, 1}, {1, 7, 33, 7}, {7, 1, 8, 3}, {33, 2, 7, 4}, {31, 3, 64, 300}, {65, 4, 24, 2}, {9, 8, 257, 16},
    {128, 2, 16, 8}, {5, 16, 129, 1024}, {2, 2, 2056, 3}, {17, 6, 40, 1}, {300, 5, 3, 9}, {0},
};

// the order is one in every build, so kernels need no `apart`
static const Op combine_op = {
    .name = "combine", .dims = "NkDE",
    .arrays = {
        {EXPERTS, "experts", "Nk", GIVEN | INDEX, 0.0f, NULL, NULL, 'E'},
        {ROWS_, "rows", "NkD", GIVEN, 2.0f},
        {WEIGHTS, "weights", "Nk", GIVEN | FLOAT, 1.0f},
        {OUT, "out", "ND", MADE},
    },
    .shapes = shapes, .traits = ANYWHERE | SPECIAL_KERNELS,
    .forward_ref = combine_ref, .forward = OP_FAST(combine),
    .in_double = combine_double, .error = combine_error, .judged = {{7, 3, 5, 4}, {9, 2, 3, 1}},
};

// ---- add ----

enum { ADD_EXPERTS, DROWS, DM };

static void add_ref(float* const* a, const int* d) {
    ExpertRows r = found_on_host((int*)a[ADD_EXPERTS], d);
    expert_rows_add_ref(a[DM], a[DROWS], &r, d['D']);
    host_free(&r);
}

OP_STORED(X)
static void add(X* const* x, float* const* a, const int* d, const Device* dev) {
    ExpertRows r = found((int*)a[ADD_EXPERTS], d, dev);
    expert_rows_add(x[DM], x[DROWS], &r, d['D'], dev);
    expert_rows_free(&r);
}

static const Op add_op = {
    .name = "add", .dims = "NkDE",
    .arrays = {
        {ADD_EXPERTS, "experts", "Nk", GIVEN | INDEX, 0.0f, NULL, NULL, 'E'},
        {DROWS, "drows", "NkD", GIVEN, 1.0f},
        {DM, "dm", "ND", GRADIENT | ADDED, 1.0f},
    },
    .shapes = shapes, .traits = ANYWHERE | SPECIAL_KERNELS,
    .backward_ref = add_ref, .backward = OP_FAST(add),
};

// ---- copy ----

enum { COPY_EXPERTS, COPY_X, COPIES };

static void copy_ref(float* const* a, const int* d) {
    ExpertRows r = found_on_host((int*)a[COPY_EXPERTS], d);
    expert_rows_copy_ref(a[COPIES], a[COPY_X], &r, d['D']);
    host_free(&r);
}

OP_STORED(X)
static void copy(X* const* x, float* const* a, const int* d, const Device* dev) {
    ExpertRows r = found((int*)a[COPY_EXPERTS], d, dev);
    expert_rows_copy(x[COPIES], x[COPY_X], &r, d['D'], dev);
    expert_rows_free(&r);
}

static void copy_double(double* const* a, const int* d) {
    const int R = d['N'] * d['k'], D = d['D'];
    for (int p = 0; p < R; p++) {
        const double e = a[COPY_EXPERTS][p];
        int row = 0;
        for (int q = 0; q < R; q++) { row += a[COPY_EXPERTS][q] < e || (a[COPY_EXPERTS][q] == e && q < p); }
        for (int i = 0; i < D; i++) { a[COPIES][row * D + i] = a[COPY_X][p / d['k'] * D + i]; }
    }
}

static double copy_error(int array, const int* d) {
    (void)array, (void)d;
    return 0.0;
}

static const Op copy_op = {
    .name = "copy", .dims = "NkDE",
    .arrays = {
        {COPY_EXPERTS, "experts", "Nk", GIVEN | INDEX, 0.0f, NULL, NULL, 'E'},
        {COPY_X, "x", "ND", GIVEN, 1.0f},
        {COPIES, "rows", "NkD", MADE},
    },
    .shapes = shapes, .traits = ANYWHERE | SPECIAL_KERNELS,
    .forward_ref = copy_ref, .forward = OP_FAST(copy),
    .in_double = copy_double, .error = copy_error, .judged = {{7, 3, 5, 4}, {9, 2, 3, 1}},
};

// ---- weights there and back ----

enum { PAIR_EXPERTS, PAIR_WEIGHTS, ROW_WEIGHT, DROW_WEIGHT, DPAIR_WEIGHTS };

static void weights_ref(float* const* a, const int* d) {
    ExpertRows r = found_on_host((int*)a[PAIR_EXPERTS], d);
    expert_rows_weights_ref(a[ROW_WEIGHT], a[PAIR_WEIGHTS], &r);
    host_free(&r);
}

OP_STORED(X)
static void weights(X* const* x, float* const* a, const int* d, const Device* dev) {
    ExpertRows r = found((int*)a[PAIR_EXPERTS], d, dev);
    expert_rows_weights(a[ROW_WEIGHT], a[PAIR_WEIGHTS], &r, dev);
    expert_rows_free(&r);
}

static void dweights_ref(float* const* a, const int* d) {
    ExpertRows r = found_on_host((int*)a[PAIR_EXPERTS], d);
    expert_rows_dweights_ref(a[DPAIR_WEIGHTS], a[DROW_WEIGHT], &r);
    host_free(&r);
}

OP_STORED(X)
static void dweights(X* const* x, float* const* a, const int* d, const Device* dev) {
    ExpertRows r = found((int*)a[PAIR_EXPERTS], d, dev);
    expert_rows_dweights(a[DPAIR_WEIGHTS], a[DROW_WEIGHT], &r, dev);
    expert_rows_free(&r);
}

static void weights_double(double* const* a, const int* d) {
    for (int p = 0, R = d['N'] * d['k']; p < R; p++) {
        const double e = a[PAIR_EXPERTS][p];
        int row = 0;
        for (int q = 0; q < R; q++) { row += a[PAIR_EXPERTS][q] < e || (a[PAIR_EXPERTS][q] == e && q < p); }
        a[ROW_WEIGHT][row] = a[PAIR_WEIGHTS][p];
    }
}

static double weights_error(int array, const int* d) {
    (void)d;
    return array == ROW_WEIGHT ? 0.0 : 1e-9;  // copies; finite differences have the rest
}

static const Op weights_op = {
    .name = "row weights", .dims = "NkDE",
    .arrays = {
        {PAIR_EXPERTS, "experts", "Nk", GIVEN | INDEX, 0.0f, NULL, NULL, 'E'},
        {PAIR_WEIGHTS, "weights", "Nk", GIVEN | FLOAT, 1.0f},
        {ROW_WEIGHT, "row_weight", "Nk", MADE | FLOAT},
        {DROW_WEIGHT, "drow_weight", "Nk", GIVEN | FLOAT, 1.0f},
        {DPAIR_WEIGHTS, "dweights", "Nk", GRADIENT | FLOAT},
    },
    .shapes = shapes, .traits = ANYWHERE | SPECIAL_KERNELS,
    .forward_ref = weights_ref, .forward = OP_FAST(weights),
    .backward_ref = dweights_ref, .backward = OP_FAST(dweights),
    .in_double = weights_double, .error = weights_error, .judged = {{7, 3, 1, 4}},
};

// ---- find ----

// what is on the device, in memory of the host
static ExpertRows downloaded(const ExpertRows* r, const Device* dev) {
    ExpertRows host = host_rows(r->N, r->k, r->E);
    const size_t n_bytes = sizeof(int) * (size_t)r->N * (size_t)r->k;
    device_download(host.offsets, r->offsets, sizeof(int) * ((size_t)r->E + 1), dev);
    device_download(host.token, r->token, n_bytes, dev);
    device_download(host.slot, r->slot, n_bytes, dev);
    device_download(host.pair, r->pair, n_bytes, dev);
    host.N = r->N;
    return host;
}

// every row is a pair's and the other way round; experts ascend, and within one pairs do
static void check_sorted(Test* t, const char* what, const ExpertRows* r, const int* experts) {
    const int R = r->N * r->k;
    check(t, r->offsets[0] == 0 && r->offsets[r->E] == R, "%s: offsets end with %d of %d", what, r->offsets[r->E], R);
    for (int e = 0; e < r->E; e++) {
        check(t, r->offsets[e] <= r->offsets[e + 1], "%s: offsets of expert %d", what, e);
        for (int row = r->offsets[e]; row < r->offsets[e + 1] && row < R; row++) {
            const int p = r->pair[row], inside = p >= 0 && p < R;
            if (!check(t, inside, "%s: row %d is pair %d", what, row, p)) { continue; }
            check(t, experts[p] == e && r->slot[p] == row && r->token[row] == p / r->k,
                  "%s: row %d of expert %d: pair %d of expert %d, its row %d, position %d", what, row, e, p, experts[p],
                  r->slot[p], r->token[row]);
            check(t, row == r->offsets[e] || r->pair[row - 1] < p, "%s: row %d is not in order", what, row);
        }
    }
}

static void check_same(Test* t, const char* what, const ExpertRows* got, const ExpertRows* want) {
    const size_t n_bytes = sizeof(int) * (size_t)want->N * (size_t)want->k;
    check(t, memcmp(got->offsets, want->offsets, sizeof(int) * ((size_t)want->E + 1)) == 0, "%s: other offsets", what);
    check(t, memcmp(got->token, want->token, n_bytes) == 0, "%s: other tokens", what);
    check(t, memcmp(got->slot, want->slot, n_bytes) == 0, "%s: other slots", what);
    check(t, memcmp(got->pair, want->pair, n_bytes) == 0, "%s: other pairs", what);
}

// in a room for `most` positions that held others before
static void check_find(Test* t, const char* what, const int* experts, int N, int k, int E, int most) {
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        ExpertRows r, want = host_rows(N, k, E);
        int *on_device = ints_to_device(experts, (size_t)N * k, &dev), *zeros = (int*)new_array((size_t)most * k, 4),
            *zeros_on_device = ints_to_device(zeros, (size_t)most * k, &dev);
        expert_rows_init(&r, most, k, E);
        expert_rows_find(&r, zeros_on_device, most, &dev);
        expert_rows_find(&r, on_device, N, &dev);
        ExpertRows got = downloaded(&r, &dev);
        expert_rows_find_ref(&want, experts, N);
        check_same(t, what, &got, &want);
        check_sorted(t, what, &got, experts);
        host_free(&got), host_free(&want), free(zeros);
        expert_rows_free(&r);
        device_drop(on_device), device_drop(zeros_on_device);
        device_free(&dev);
    }
}

// k different experts of E, or any
static int* drawn_experts(int N, int k, int E, int different, uint64_t seed) {
    int* experts = (int*)new_array((size_t)N * k, sizeof(int));
    uint64_t s = seeded_stream(seed);
    for (int i = 0; i < N * k; i++) {
        for (int again = 1; again;) {
            experts[i] = (int)(xorshift_u32(&s) % (uint32_t)E);
            again = 0;
            for (int j = i / k * k; different && j < i; j++) { again |= experts[j] == experts[i]; }
        }
    }
    return experts;
}

static void test_random(Test* t) {
    const int cases[][3] = {{1, 1, 1}, {1, 1, 9}, {1, 4, 16}, {100, 2, 7}, {333, 3, 33}, {130, 8, 256}, {3000, 2, 8},
                            {64, 16, 512}, {700, 6, 1024}, {5000, 1, 5}, {1024, 1, 3}, {2500, 4, 11}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int N = cases[i][0], k = cases[i][1], E = cases[i][2];
        for (int different = 0; different < 2; different++) {
            int* experts = drawn_experts(N, k, E, different, i);
            check_find(t, different ? "different experts" : "any experts", experts, N, k, E, N + (int)i);
            free(experts);
        }
    }
}

static void test_extreme(Test* t) {
    enum { N = 700, K = 3, E = 8 };
    int experts[N * K];
    for (int p = 0; p < N * K; p++) { experts[p] = 2 * (p * 7 % 4) + 1; }
    check_find(t, "every second expert is empty", experts, N, K, E, N);
    for (int p = 0; p < N * K; p++) { experts[p] = 5; }
    check_find(t, "all to one, thrice each", experts, N, K, E, N);
    for (int p = 0; p < N * K; p++) { experts[p] = p / K == 456; }
    check_find(t, "one position elsewhere than all others", experts, N, K, E, N);
    for (int p = 0; p < N * K; p++) { experts[p] = p % K; }
    check_find(t, "k = E", experts, N, K, K, N);
    for (int p = 0; p < N * K; p++) { experts[p] = K - 1 - p % K; }
    check_find(t, "k = E, descending", experts, N, K, K, N);
    for (int p = 0; p < N * K; p++) { experts[p] = p / K * E / N; }
    check_find(t, "sorted already", experts, N, K, E, N);
    for (int p = 0; p < N * K; p++) { experts[p] = 0; }
    check_find(t, "one expert", experts, N, K, 1, N);
    check_find(t, "one position", experts, 1, K, E, 1);
}

static void test_obvious(Test* t) {
    const int experts[] = {2, 0, 0, 2, 1, 2}, offsets[] = {0, 2, 3, 6}, token[] = {0, 1, 2, 0, 1, 2},
              slot[] = {3, 0, 1, 4, 2, 5}, pair[] = {1, 2, 4, 0, 3, 5};
    Device dev = test_device(2);
    int* on_device = ints_to_device(experts, 6, &dev);
    ExpertRows r;
    expert_rows_init(&r, 3, 2, 3);
    expert_rows_find(&r, on_device, 3, &dev);
    ExpertRows got = downloaded(&r, &dev);
    check(t, memcmp(got.offsets, offsets, sizeof offsets) == 0, "offsets");
    check(t, memcmp(got.token, token, sizeof token) == 0, "token");
    check(t, memcmp(got.slot, slot, sizeof slot) == 0, "slot");
    check(t, memcmp(got.pair, pair, sizeof pair) == 0, "pair");
    host_free(&got), expert_rows_free(&r), device_drop(on_device), device_free(&dev);
}

// 1 + 2^24 rounds back to 2^24: the order of slots, not of rows
static void test_order(Test* t) {
    const int shape[] = {1, 3, 1, 3}, experts[] = {2, 1, 0};
    const float rows[] = {16777216, 1, 1}, ones[] = {1, 1, 1};  // slots 0, 1, 2 are rows 2, 1, 0
    OpProblem p = op_problem(&combine_op, shape, EASY, 0), q = op_problem(&add_op, shape, EASY, 0);
    Device dev = test_device(2);
    memcpy(p.a[EXPERTS], experts, sizeof experts), memcpy(q.a[ADD_EXPERTS], experts, sizeof experts);
    memcpy(p.a[ROWS_], rows, sizeof rows), memcpy(q.a[DROWS], rows, sizeof rows);
    memcpy(p.a[WEIGHTS], ones, sizeof ones), q.before[DM][0] = 0.0f;
    op_answer(t, &p, &dev), op_answer(t, &q, &dev);
    check(t, p.a[OUT][0] == 16777218.0f, "combine: found %.1f", (double)p.a[OUT][0]);
    check(t, q.a[DM][0] == 16777218.0f, "add: found %.1f", (double)q.a[DM][0]);
    device_free(&dev);
    op_problem_free(&p), op_problem_free(&q);
}

static void too_many(void* unused) {
    Device dev = test_device(1);
    ExpertRows r;
    (void)unused;
    expert_rows_init(&r, 3, 2, 4);
    expert_rows_find(&r, NULL, 4, &dev);
}

static void too_large(void* unused) {
    ExpertRows r;
    (void)unused;
    expert_rows_init(&r, 3, 2, EXPERT_ROWS_EXPERTS + 1);
}

static void test_refuse(Test* t) {
    check_exit(t, "more positions than there is room for", too_many, NULL, 1, "4 positions, there is room for 3");
    check_exit(t, "too many experts", too_large, NULL, 1, "expected 1 .. 1024 experts");
}

int main(int argc, char** argv) {
    const Op* ops[] = {&combine_op, &add_op, &copy_op, &weights_op};
    const Promise promises[] = {
        {"refuse", "what there is no room for is refused", test_refuse},
        {"obvious", "six rows that can be sorted by hand", test_obvious},
        {"random", "a stable bijection, the plain loop's, for every number of threads", test_random},
        {"extreme", "empty experts, all to one, k = E, one position, the same expert thrice", test_extreme},
        {"order", "slots are added in ascending order, not rows", test_order},
    };
    return op_main(argc, argv, ops, sizeof ops / sizeof *ops, promises, sizeof promises / sizeof *promises);
}
