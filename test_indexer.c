/*
Promises of llmc/ops/indexer.h and of llmc/ops/inverse_lists.h. Fast builds for GPUs keep tolerances.
*/
#include "llmc/ops/indexer.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

// ---- inverse lists ----

// N rows of up to topk entries, ascending; those of a row are drawn from the n_entries, or none
static int* drawn_lists(int N, int topk, int n_entries, uint64_t seed) {
    int* chosen = (int*)new_array((size_t)N * topk, sizeof(int));
    uint64_t s = seeded_stream(seed);
    for (int n = 0; n < N; n++) {
        const int wanted = (int)(xorshift_u32(&s) % (uint32_t)(topk + 1));
        int left = wanted < n_entries ? wanted : n_entries, j = 0;
        for (int e = 0; e < n_entries; e++) {
            if ((int)(xorshift_u32(&s) % (uint32_t)(n_entries - e)) < left) { chosen[n * topk + j++] = e, left--; }
        }
        for (; j < topk; j++) { chosen[n * topk + j] = -1; }
    }
    return chosen;
}

static void check_lists(Test* t, const int* chosen, int N, int topk, int n_entries, int n_threads, int asked) {
    const size_t most = (size_t)N * topk, n = (size_t)n_entries + 1 + 2 * most;
    int *want = (int*)new_array(n, sizeof(int)), *got = (int*)new_array(n, sizeof(int));
    for (size_t i = 0; i < n; i++) { want[i] = got[i] = -77; }
    Device dev = test_device(n_threads);
    const size_t room = inverse_lists_scratch(n_entries, &dev);
    int *on_device = ints_to_device(chosen, most, &dev), *lists = ints_to_device(got, n, &dev);
    int* scratch = (int*)device_alloc(sizeof(int) * room, "scratch");
    int *positions = lists + n_entries + 1, *pairs = positions + most;
    inverse_lists(lists, asked & 1 ? positions : NULL, asked & 2 ? pairs : NULL, scratch, on_device, N, topk, n_entries,
                  &dev);
    inverse_lists_ref(want, asked & 1 ? want + n_entries + 1 : NULL, asked & 2 ? want + n_entries + 1 + most : NULL,
                      chosen, N, topk, n_entries);
    device_download(got, lists, sizeof(int) * n, &dev);
    check(t, memcmp(got, want, sizeof(int) * n) == 0, "N %d, topk %d, %d entries, %d threads, asked %d", N, topk,
          n_entries, n_threads, asked);
    device_drop(on_device), device_drop(lists);
    device_release(scratch, sizeof(int) * room);
    device_free(&dev);
    free(want), free(got);
}

static void test_lists(Test* t) {
    const int cases[][3] = {{1, 1, 1},   {1, 7, 3},    {7, 1, 33},   {33, 7, 5},    {40, 33, 33}, {64, 5, 64},
                            {513, 4, 31}, {700, 9, 65}, {0, 3, 4},   {1030, 3, 100}, {5, 3, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int N = cases[i][0], topk = cases[i][1], n_entries = cases[i][2];
        int* chosen = drawn_lists(N, topk, n_entries, i);
        for (int asked = 0; asked < 4; asked++) {
            for (int j = 0; j < N_TEST_THREADS; j++) {
                check_lists(t, chosen, N, topk, n_entries, test_threads(j), asked);
            }
        }
        free(chosen);
    }
}

static void test_obvious_lists(Test* t) {
    const int chosen[] = {0, 2, -1, -1, 2, 3}, offsets[] = {0, 1, 1, 3, 4}, positions[] = {0, 0, 2, 2},
              pairs[] = {0, 1, 4, 5};
    int got[4 + 1 + 12];
    Device dev = test_device(2);
    int *on_device = ints_to_device(chosen, 6, &dev);
    int* lists = (int*)device_alloc(sizeof got, "lists");
    int* scratch = (int*)device_alloc(sizeof(int) * inverse_lists_scratch(4, &dev), "scratch");
    inverse_lists(lists, lists + 5, lists + 11, scratch, on_device, 3, 2, 4, &dev);
    device_download(got, lists, sizeof got, &dev);
    check(t, memcmp(got, offsets, sizeof offsets) == 0, "offsets");
    check(t, memcmp(got + 5, positions, sizeof positions) == 0, "positions");
    check(t, memcmp(got + 11, pairs, sizeof pairs) == 0, "pairs");
    device_drop(on_device);
    device_release(lists, sizeof got), device_release(scratch, sizeof(int) * inverse_lists_scratch(4, &dev));
    device_free(&dev);
}


// ---- which entries ----

enum { Q, K, WEIGHT, T_, FIRST, CHOSEN, SCORES };  // of the table of index_choose

// three documents: 3/5 of the N positions, three more, the rest; the last one goes on with a text that has all other
// entries of the E
static void fill_places(int* t, int* first, int N, int r, int E) {
    const int lengths[] = {3 * N / 5, N - 3 * N / 5 < 3 ? 0 : 3, N};
    int entry = 0, n = 0;
    for (int document = 0; document < 3; document++) {
        const int left = N - n, length = lengths[document] < left ? lengths[document] : left;
        const int before = document == 2 && (E - entry) * r > length ? (E - entry) * r - length : 0;
        for (int i = 0; i < length; i++, n++) { t[n] = before + i, first[n] = entry; }
        entry += length / r;
    }
}

static void choose_fill(float* const* a, const int* d) {
    fill_places((int*)a[T_], (int*)a[FIRST], d['N'], d['R'], d['E']);
}

static IndexShape shape_of(const int* d) {
    const IndexShape s = {d['N'], d['H'], d['D'], d['K']};
    return s;
}

static Places places_of(const int* t, int N) {
    Places p;
    memset(&p, 0, sizeof p);
    p.N = N, p.t = t;
    return p;
}

static EntryWindows windows_of(const int* first_entry, int r) {
    EntryWindows w;
    memset(&w, 0, sizeof w);
    w.r = r, w.first_entry = first_entry;
    return w;
}

static void choose_ref(float* const* a, const int* d) {
    const IndexShape s = shape_of(d);
    const Places places = places_of((int*)a[T_], d['N']);
    const EntryWindows w = windows_of((int*)a[FIRST], d['R']);
    float* row = filled_array((size_t)d['E'], 0.0f);
    index_choose_ref((int*)a[CHOSEN], a[SCORES], d['E'], a[Q], a[K], a[WEIGHT], &s, &places, &w, row);
    free(row);
}

OP_STORED(X)
static void choose(X* const* x, float* const* a, const int* d, const Device* dev) {
    const IndexShape s = shape_of(d);
    const Places places = places_of((int*)a[T_], d['N']);
    const EntryWindows w = windows_of((int*)a[FIRST], d['R']);
    index_choose((int*)a[CHOSEN], a[SCORES], d['E'], x[Q], x[K], a[WEIGHT], &s, &places, &w, dev);
}

// N, heads, dI, topk, entries, r
static const int choose_shapes[][OP_DIMS] = {
    {1, 1, 1, 1, 1, 1}, {7, 1, 7, 1, 7, 1}, {33, 3, 5, 2, 20, 2}, {20, 8, 16, 4, 70, 4}, {7, 2, 33, 40, 130, 4},
    {9, 7, 3, 9, 40, 3}, {2, 16, 8, 3, 50, 8},
#ifndef __CUDACC__
    {70, 8, 64, 16, 300, 4}, {40, 5, 130, 33, 1030, 4}, {129, 3, 17, 8, 129, 1},
#endif
    {0},
};

static const Op choose_op = {
    .name = "index_choose", .dims = "NHDKER",
    .arrays = {
        {Q, "q", "NHD", GIVEN, 1.0f},
        {K, "k", "ED", GIVEN, 1.0f},
        {WEIGHT, "a", "NH", GIVEN | FLOAT, 0.5f},
        {T_, "t", "N", GIVEN | INDEX, 0.0f, NULL, NULL, 'N'},
        {FIRST, "first", "N", GIVEN | INDEX, 0.0f, NULL, NULL, 'N'},
        {CHOSEN, "chosen", "NK", MADE | INDEX},
        {SCORES, "scores", "NE", MADE | PARTLY | FLOAT, 1.0f},
    },
    .shapes = choose_shapes, .traits = ROWS | ANYWHERE, .fill = choose_fill,
    .forward_ref = choose_ref, .forward = OP_FAST(choose),
};

// ---- the loss ----

enum { MASS = 3, LISTS, LOSSES, DLOSSES, DQ, DK, DA };
static const float DLOSS = 0.75f;

static void loss_fill(float* const* a, const int* d) {
    const int N = d['N'], topk = d['K'];
    int* lists = drawn_lists(N, topk, d['E'], (uint64_t)(N + topk));
    memcpy(a[LISTS], lists, sizeof(int) * (size_t)N * (size_t)topk);
    free(lists);
    for (int i = 0; i < N * topk; i++) {
        a[MASS][i] = i / topk % 7 == 3 || i % 5 == 2 ? 0.0f : fabsf(a[MASS][i]);
    }
    for (int n = 0; n < N; n++) { a[DLOSSES][n] = DLOSS; }
}

static void loss_forward_ref(float* const* a, const int* d) {
    const IndexShape s = shape_of(d);
    float* row = filled_array((size_t)d['K'], 0.0f);
    index_loss_forward_ref(a[LOSSES], a[MASS], (int*)a[LISTS], a[Q], a[K], a[WEIGHT], &s, row);
    free(row);
}

static void loss_backward_ref(float* const* a, const int* d) {
    const IndexShape s = shape_of(d);
    float* rows = filled_array((size_t)d['N'] * (size_t)d['K'], 0.0f);
    index_loss_backward_ref(a[DQ], a[DK], a[DA], DLOSS, a[MASS], (int*)a[LISTS], a[Q], a[K], a[WEIGHT], d['E'], &s,
                            rows);
    free(rows);
}

OP_STORED(X)
static void loss_forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const IndexShape s = shape_of(d);
    const EntryWindows w = windows_of(NULL, 4);
    index_loss_forward(a[LOSSES], a[MASS], (int*)a[LISTS], x[Q], x[K], a[WEIGHT], &s, &w, dev);
}

OP_STORED(X)
static void loss_backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const IndexShape s = shape_of(d);
    const Places places = places_of(NULL, d['N']);
    const EntryWindows w = windows_of(NULL, 4);
    index_loss_backward(x[DQ], x[DK], a[DA], DLOSS, a[MASS], (int*)a[LISTS], x[Q], x[K], a[WEIGHT], d['E'], &s, &places,
                        &w, dev);
}

static double score_in_double(double* const* a, const int* d, int n, int e) {
    const int H = d['H'], D = d['D'];
    double score = 0.0;
    for (int h = 0; h < H; h++) {
        double product = 0.0;
        for (int c = 0; c < D; c++) { product += a[Q][(n * H + h) * D + c] * a[K][e * D + c]; }
        score += a[WEIGHT][n * H + h] * fmax(product, 0.0);
    }
    return score;
}

static void loss_in_double(double* const* a, const int* d) {
    for (int n = 0; n < d['N']; n++) {
        const double* lists = a[LISTS] + n * d['K'];
        double mass = 0.0, total = 0.0;
        a[LOSSES][n] = 0.0;
        for (int j = 0; j < d['K'] && lists[j] >= 0.0; j++) {
            mass += a[MASS][n * d['K'] + j];
            total += exp(score_in_double(a, d, n, (int)lists[j]));
        }
        for (int j = 0; j < d['K'] && lists[j] >= 0.0; j++) {
            const double p = mass > 0.0 ? a[MASS][n * d['K'] + j] / mass : 0.0;
            if (p > 0.0) { a[LOSSES][n] += p * (log(p) - score_in_double(a, d, n, (int)lists[j]) + log(total)); }
        }
    }
}

// |q|, |k| < 1 and |a| < 1/2: |q k| < D, |score| < H D / 2, and logarithms of p and pi are above -(H D + 30)
static double loss_error(int array, const int* d) {
    const int N = d['N'], H = d['H'], D = d['D'], topk = d['K'];
    const double product = rounding_walk(D, D), score = 0.5 * H * product + rounding_walk(H, 0.5 * H * D);
    const double dscore = (double)DLOSS * (4.0 * score + (topk + 10) * 0x1p-24);  // pi: e^(2 score), its sum, p
    switch (array) {
        case LOSSES: return 4.0 * score + (topk + 10) * (H * D + 30.0) * 0x1p-24;
        case DA: return topk * dscore * D + 2.0 * product + rounding_walk(topk, 2.0 * D);
        case DQ: return 0.5 * topk * dscore + rounding_walk(topk, 1.0);
        case DK: return 0.5 * N * H * dscore + rounding_walk(N * H, 0.5 * N * H);
        default: return -1.0;
    }
}

static double loss_apart(const OpProblem* p, int array, size_t i) { return 2.0 * loss_error(array, p->d); }

// N, heads, dI, topk, entries
static const int loss_shapes[][OP_DIMS] = {
    {1, 1, 1, 1, 1}, {7, 1, 7, 3, 5}, {20, 3, 33, 7, 33}, {9, 8, 16, 20, 30}, {3, 33, 8, 5, 9}, {33, 2, 5, 33, 33},
#ifndef __CUDACC__
    {130, 8, 64, 16, 70}, {40, 65, 130, 33, 50}, {1030, 2, 130, 3, 5}, {5, 16, 128, 300, 300},
#endif
    {0},
};

static const Op loss_op = {
    .name = "index_loss", .dims = "NHDKE",
    .arrays = {
        {Q, "q", "NHD", GIVEN, 1.0f},
        {K, "k", "ED", GIVEN, 1.0f},
        {WEIGHT, "a", "NH", GIVEN | FLOAT, 0.5f},
        {MASS, "mass", "NK", GIVEN | FLOAT, 1.0f},
        {LISTS, "chosen", "NK", GIVEN | INDEX, 0.0f, NULL, NULL, 'E'},
        {LOSSES, "losses", "N", MADE | FLOAT},
        {DLOSSES, "dlosses", "N", GIVEN | FLOAT},
        {DQ, "dq", "NHD", GRADIENT},
        {DK, "dk", "ED", GRADIENT},
        {DA, "da", "NH", GRADIENT | FLOAT},
    },
    .shapes = loss_shapes, .traits = ROWS | ANYWHERE, .fill = loss_fill,
    .forward_ref = loss_forward_ref, .forward = OP_FAST(loss_forward),
    .backward_ref = loss_backward_ref, .backward = OP_FAST(loss_backward),
    .in_double = loss_in_double, .error = loss_error, .judged = {{7, 3, 5, 4, 6}, {20, 8, 16, 9, 12}},
    .apart = loss_apart,
};

int main(int argc, char** argv) {
    const Op* ops[] = {&loss_op, &choose_op};
    const Promise promises[] = {
        {"lists obvious", "three lists that can be turned round by hand", test_obvious_lists},
        {"lists random", "the plain loop's, for every number of threads; NULL for what nobody asks for", test_lists},
    };
    return op_main(argc, argv, ops, FAST_KERNELS ? 1 : 2, promises, sizeof promises / sizeof *promises);
}
