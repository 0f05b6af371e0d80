/*
Promises of llmc/ops/indexer.h and of llmc/ops/inverse_lists.h. Fast builds for GPUs keep tolerances.
*/
#include "llmc/ops/indexer.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

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
    {9, 7, 3, 9, 40, 3}, {2, 16, 8, 3, 50, 8}, {70, 2, 20, 9, 150, 2},
    {70, 16, 24, 9, 150, 2}, {5, 64, 72, 5, 140, 1}, {3, 128, 8, 2, 20, 1}, {9, 32, 64, 2, 40, 3},
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
    {2, 2, 130, 140, 150}, {2, 1, 776, 3, 4},  // 776: more shared memory than 48 KiB
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

// ---- numbers of dev/ref/sparse_attention.py ----

// i -> (i * step % 11 - 5) / divisor
static float* numbered(int n, int step, float divisor) {
    float* x = filled_array((size_t)n, 0.0f);
    for (int i = 0; i < n; i++) { x[i] = (float)(i * step % 11 - 5) / divisor; }
    return x;
}

static void test_reference(Test* t) {
    enum { N = 9, H = 2, D = 3, TOPK = 2, ENTRIES = 4 };
    const uint32_t losses[N] = {
        0x00000000, 0x00000000, 0x00000000, 0x3ae814ad, 0x3e911517, 0x39b6e262, 0x3dae4ceb, 0x39da1709, 0x3c9e9d0d};
    const uint32_t dk[ENTRIES * D] = {
        0x3d0704e5, 0xbddb5636, 0xbbb732ca, 0xbd6400fb, 0x3da2e97a, 0x3ce3b20a, 0x3ac8ccd8, 0x3bfb000e, 0xbb48ccd8,
        0x3b2faeb0, 0xba6a3e40, 0xbb9266e8};
    const uint32_t da[N * H] = {
        0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x3c543e92, 0x3c543e92, 0xbd680fd6,
        0xbd39a644, 0x3bc93d80, 0x3bc93d80, 0x3d01a4ea, 0x3ccf6e44, 0x3b83c2f8, 0x00000000, 0xbc7b003c, 0xbc1699d0};
    const uint32_t dq[N * H * D] = {
        0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000,
        0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000,
        0xbb8d7f0c, 0x00000000, 0x3b8d7f0c, 0xbc30decf, 0x00000000, 0x3c30decf, 0x3d8b3cb4, 0x3d8b3cb4, 0xbdf3aa3b,
        0x00000000, 0x00000000, 0x00000000, 0xbb493d80, 0x00000000, 0x3b493d80, 0x3ba7b340, 0x00000000, 0xbba7b340,
        0x3bcf6e44, 0xbccf6e44, 0x3c4f6e44, 0xbb4f6e44, 0x3c4f6e44, 0xbbcf6e44, 0xbb2faea0, 0xbb2faef0, 0xbb2fae90,
        0x00000000, 0x00000000, 0x00000000, 0x3c48ccd0, 0xbb9699a2, 0xbb969993, 0xbcc8ccd0, 0x3c1699a2, 0x3c169993};
    const int chosen[N * TOPK] = {-1, -1, 0, -1, 0, -1, 0, 1, 0, 1, 0, 2, 0, 1, 1, 3, 0, 2}, d[] = {N, H, D, TOPK};
    const IndexShape s = {d[0], d[1], d[2], d[3]};
    int found[N * TOPK], at[N], first[N] = {0};
    float *q = numbered(N * H * D, 7, 4), *k = numbered(ENTRIES * D, 5, 4), *a = numbered(N * H, 3, 8), row[N * TOPK];
    float mass[N * TOPK] = {0.0f}, got_losses[N], got_dk[ENTRIES * D], got_da[N * H], got_dq[N * H * D];
    for (int n = 0; n < N; n++) { at[n] = n; }
    for (int i = 0; i < N * TOPK; i++) {
        if (chosen[i] >= 0) { mass[i] = (float)((i / TOPK * ENTRIES + chosen[i]) * 4 % 7) / 8.0f; }
    }
    const Places places = places_of(at, N);
    const EntryWindows w = windows_of(first, 2);
    index_choose_ref(found, NULL, 0, q, k, a, &s, &places, &w, row);
    index_loss_forward_ref(got_losses, mass, chosen, q, k, a, &s, row);
    index_loss_backward_ref(got_dq, got_dk, got_da, 0.5f, mass, chosen, q, k, a, ENTRIES, &s, row);
    check(t, memcmp(found, chosen, sizeof found) == 0, "chosen");
    check_bits(t, "losses", got_losses, (const float*)(const void*)losses, N);
    check_bits(t, "dk", got_dk, (const float*)(const void*)dk, ENTRIES * D);
    check_bits(t, "da", got_da, (const float*)(const void*)da, N * H);
    check_bits(t, "dq", got_dq, (const float*)(const void*)dq, N * H * D);
    free(q), free(k), free(a);
}

// ---- the choice, of whatever scores: those of fast kernels are not the plain loop's ----

// are those chosen that fewer than topk come before?
static void check_choice(Test* t, const OpProblem* p, const int* chosen, const float* scores) {
    const int N = p->d['N'], topk = p->d['K'], E = p->d['E'], r = p->d['R'];
    for (int n = 0; n < N; n++) {
        const int seen = ENTRIES_SEEN(((int*)p->a[T_])[n], r), first = ((int*)p->a[FIRST])[n];
        int j = 0, wrong = 0;
        for (int e = 0; e < seen; e++) {
            int before = 0;
            for (int i = 0; i < seen; i++) {
                const float x = scores[(size_t)n * E + i], y = scores[(size_t)n * E + e];
                const float rank_x = isnan(x) ? -INFINITY : x, rank_y = isnan(y) ? -INFINITY : y;
                before += rank_x > rank_y || (rank_x == rank_y && i < e);
            }
            if (before < topk) { wrong |= chosen[n * topk + j++] != first + e; }
        }
        for (; j < topk; j++) { wrong |= chosen[n * topk + j] != -1; }
        check(t, !wrong, "N %d, heads %d, topk %d: position %d of %d entries", N, p->d['H'], topk, n, seen);
    }
}

// what they sum is at most D for each head, times 1/2
static void check_scores(Test* t, const OpProblem* p, const float* scores) {
    const int H = p->d['H'], D = p->d['D'];
    const double allowed = 2.0 * (0.5 * H * rounding_walk(D, D) + rounding_walk(H, 0.5 * H * D));
    for (size_t i = 0; i < op_length(p, SCORES); i++) {
        const double apart = fabs((double)scores[i] - (double)p->a[SCORES][i]);
        check(t, apart <= allowed, "score %zu: %.3g apart, allowed %.3g", i, apart, allowed);
    }
}

static void check_choices(Test* t, const int* shape, int kind, int as_bf16, int whole) {
    OpProblem p = op_problem(&choose_op, shape, kind, as_bf16);
    OpRun r = op_run_of_(0, 0);
    Device dev = test_device(2);
    float *got[OP_ARRAYS] = {NULL}, *unscored[OP_ARRAYS] = {NULL};
    for (int i = 0; whole && i <= WEIGHT; i++) {  // halves, whose sums are exact: many scores are equal
        for (size_t j = 0; j < op_length(&p, i); j++) { p.a[i][j] = rintf(2.0f * p.a[i][j]) / 2.0f; }
    }
    op_run_(t, got, &p, &r, &dev);
    r.null = 1 << SCORES;
    op_run_(t, unscored, &p, &r, &dev);
    check_choice(t, &p, (int*)got[CHOSEN], got[SCORES]);
    check(t, memcmp(got[CHOSEN], unscored[CHOSEN], sizeof(int) * op_length(&p, CHOSEN)) == 0, "others without scores");
    if (kind == EASY && !whole) { check_scores(t, &p, got[SCORES]); }
    op_free_(got), op_free_(unscored);
    device_free(&dev);
    op_problem_free(&p);
}

static void test_choice(Test* t) {
    for (int i = 0; choose_shapes[i][0]; i++) {
        for (int as_bf16 = 0; as_bf16 <= FAST_KERNELS; as_bf16++) {
            check_choices(t, choose_shapes[i], EASY, as_bf16, 0);
            check_choices(t, choose_shapes[i], EASY, as_bf16, 1);
            check_choices(t, choose_shapes[i], MANY_SPECIALS, as_bf16, 0);
        }
    }
}

// ---- small ones ----

// one head of one channel, so that scores are 3, 1, 3, NaN, 2 and 0; the document's first entry is row 1
static void test_obvious(Test* t) {
    const float k[] = {9.0f, 3.0f, 1.0f, 3.0f, NAN, 2.0f, -5.0f}, one[] = {1.0f};
    const int at[] = {5}, first[] = {1}, want[6][6] = {{1, -1}, {1, 3}, {1, 3, 5}, {1, 2, 3, 5}, {1, 2, 3, 5, 6},
                                                       {1, 2, 3, 4, 5, 6}};
    Device dev = test_device(1);
    float *k_there = to_device(k, 7, &dev), *q_there = to_device(one, 1, &dev), *a_there = to_device(one, 1, &dev);
    int *at_there = ints_to_device(at, 1, &dev), *first_there = ints_to_device(first, 1, &dev);
    const Places places = places_of(at_there, 1);
    const EntryWindows w = windows_of(first_there, 1);
    for (int topk = 1; topk <= 6; topk++) {
        const IndexShape s = {1, 1, 1, topk};
        int got[6], *chosen = ints_to_device(want[0], (size_t)topk, &dev);
        index_choose(chosen, (float*)NULL, 6, q_there, k_there, a_there, &s, &places, &w, &dev);
        device_download(got, chosen, sizeof(int) * (size_t)topk, &dev);
        check(t, memcmp(got, want[topk - 1], sizeof(int) * (size_t)topk) == 0, "topk %d", topk);
        device_drop(chosen);
    }
    device_drop(k_there), device_drop(q_there), device_drop(a_there), device_drop(at_there), device_drop(first_there);
    device_free(&dev);
}

// two entries of equal scores, 2: the student has 1/2 of each, the teacher 3/4 and 1/4
static void test_obvious_loss(Test* t) {
    const float two[] = {2.0f, 2.0f}, mass[] = {3.0f, 1.0f}, one[] = {1.0f};
    const int chosen[] = {0, 1};
    const IndexShape s = {1, 1, 1, 2};
    const EntryWindows w = windows_of(NULL, 1);
    const Places places = places_of(NULL, 1);
    Device dev = test_device(1);
    float *q = to_device(one, 1, &dev), *k = to_device(two, 2, &dev), *a = to_device(one, 1, &dev);
    float got[5] = {NAN, NAN, NAN, NAN, NAN}, *m = to_device(mass, 2, &dev), *out = to_device(got, 5, &dev);
    int* lists = ints_to_device(chosen, 2, &dev);
    index_loss_forward(out, m, lists, q, k, a, &s, &w, &dev);
    index_loss_backward(out + 1, out + 2, out + 4, 4.0f, m, lists, q, k, a, 2, &s, &places, &w, &dev);
    device_download(got, out, sizeof got, &dev);
    // dscore: 4 (1/2 - 3/4) = -1 and 1; dq: their sum times 2, da too; dk: dscore times q
    const float want[] = {0.130812036f, 0.0f, -1.0f, 1.0f, 0.0f};
    for (int i = 0; i < 5; i++) {
        check(t, fabsf(got[i] - want[i]) < 1e-6f, "number %d: found %.9g", i, (double)got[i]);
    }
    device_drop(q), device_drop(k), device_drop(a), device_drop(m), device_drop(out), device_drop(lists);
    device_free(&dev);
}

// no positions: gradients of entries are 0
static void test_nothing(Test* t) {
    const IndexShape s = {0, 2, 3, 4};
    const Places places = places_of(NULL, 0);
    const EntryWindows w = windows_of(NULL, 4);
    Device dev = test_device(2);
    float *seven = filled_array(6, 7.0f), *dk = to_device(seven, 6, &dev), *none = NULL;
    index_choose((int*)NULL, none, 5, none, none, none, &s, &places, &w, &dev);
    index_loss_forward(none, none, (const int*)NULL, none, none, none, &s, &w, &dev);
    index_loss_backward(none, dk, none, 1.0f, none, (const int*)NULL, none, none, none, 2, &s, &places, &w, &dev);
    from_device(seven, dk, 6, &dev);
    for (int i = 0; i < 6; i++) { check(t, float_bits(seven[i]) == 0, "dk: found %.9g", (double)seven[i]); }
    free(seven);
    device_free(&dev);
}

static void no_heads(void* unused) {
    const IndexShape s = {1, 0, 4, 2};
    (void)unused;
    index_check_(&s);
}

#ifndef __CUDACC__
static void too_few_columns(void* unused) {
    const float one[] = {1.0f, 1.0f, 1.0f};
    const int at[] = {2}, first[] = {0};
    int chosen[1];
    const IndexShape s = {1, 1, 1, 1};
    const Places places = places_of(at, 1);
    const EntryWindows w = windows_of(first, 1);
    Device dev = test_device(1);
    (void)unused;
    index_choose(chosen, NULL, 2, one, one, one, &s, &places, &w, &dev);
}
#endif

static void test_refuse(Test* t) {
#ifndef __CUDACC__
    check_exit(t, "two columns", too_few_columns, NULL, 1, "3 entries are seen: expected 2 at most");
#endif
    check_exit(t, "no heads", no_heads, NULL, 1, "expected 1 or more");
}

// two documents, of two positions and of one
static void test_forget(Test* t) {
    const int is_last[] = {0, 1, 1};
    Device dev = test_device(2);
    float *seven = filled_array(6, 7.0f), *mass = to_device(seven, 6, &dev);
    int* last = ints_to_device(is_last, 3, &dev);
    index_forget_last(mass, last, 3, 2, &dev);
    from_device(seven, mass, 6, &dev);
    for (int i = 0; i < 6; i++) { check(t, seven[i] == (i < 2 ? 7.0f : 0.0f), "mass %d: found %.9g", i, (double)seven[i]); }
    device_drop(last);
    free(seven);
    device_free(&dev);
}

int main(int argc, char** argv) {
    const Op* ops[] = {&loss_op, &choose_op};
    const Promise promises[] = {
        {"refuse", "shapes of nothing, and positions that see too much, are refused", test_refuse},
        {"lists obvious", "three lists that can be turned round by hand", test_obvious_lists},
        {"lists random", "the plain loop's, for every number of threads; NULL for what nobody asks for", test_lists},
        {"reference", "the numbers of dev/ref/sparse_attention.py, bit for bit", test_reference},
        {"choice", "chosen are the topk of the scores, with ties, Inf and NaN; the same where none are asked for",
         test_choice},
        {"obvious", "six entries, of which one scores NaN and two are equal: 1 to 6 are chosen", test_obvious},
        {"obvious loss", "a teacher of 3/4 and 1/4, a student of halves", test_obvious_loss},
        {"forget", "the last position of each document teaches nothing", test_forget},
        {"nothing", "N = 0: nothing is written but dk, which is 0", test_nothing},
    };
    return op_main(argc, argv, ops, FAST_KERNELS ? 1 : 2, promises, sizeof promises / sizeof *promises);
}
