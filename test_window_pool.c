/*
Promises of llmc/ops/window_pool.h, which follow from the table (llmc/test/op.h), and others: of generation, and of
llmc/ops/entry_windows.h, which says where windows lie. Fast builds for GPUs keep tolerances.
*/
#include "llmc/ops/window_pool.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

enum { V, G, APE, POOL, TOKEN, NUMBER, PLACE, BEHIND, DPOOL, DV, DG, DAPE };

// dims: B rows of T positions, R tokens of an entry, D channels of it, C of a token, W entries, N positions, E: a
// document has about so many positions, or 0: all of a row
static EntryWindows windows_of(float* const* a, const int* d) {
    const EntryWindows w = {d['R'], d['C'] > d['D'], d['W'], (const int*)a[TOKEN], (const int*)a[NUMBER], NULL};
    return w;
}

static Places places_of(float* const* a, const int* d) {
    const Places places = {d['N'], (const int*)a[PLACE], NULL, (const int*)a[BEHIND]};
    return places;
}

static void forward_ref(float* const* a, const int* d) {
    const EntryWindows w = windows_of(a, d);
    window_pool_forward_ref(a[POOL], a[V], a[G], a[APE], &w, d['D']);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const EntryWindows w = windows_of(a, d);
    window_pool_forward(x[POOL], x[V], x[G], a[APE], &w, d['D'], dev);
}

static void backward_ref(float* const* a, const int* d) {
    const EntryWindows w = windows_of(a, d);
    const Places places = places_of(a, d);
    window_pool_backward_ref(a[DV], a[DG], a[DAPE], a[DPOOL], a[V], a[G], a[APE], a[POOL], &w, &places, d['N'], d['D']);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const EntryWindows w = windows_of(a, d);
    const Places places = places_of(a, d);
    window_pool_backward(x[DV], x[DG], a[DAPE], x[DPOOL], x[V], x[G], a[APE], x[POOL], &w, &places, d['N'], d['D'],
                         dev);
}

// ---- batches ----

typedef struct {
    Segments segments;
    int *t, *first_key, *behind, *is_last, *token, *number, *first_entry;
} Batch;

// of inputs (B, T), where -2 begins a document, what a piece of them has; inputs NULL: rows are documents
static Batch piece_of(const int* inputs, const BatchPiece* piece, int r) {
    const size_t N = (size_t)(piece->B * piece->n), W = (size_t)(piece->B * (piece->n / r));
    Batch x;
    segments_init(&x.segments, piece->B, piece->T);
    if (inputs) { x.segments.document_start = -2; }
    segments_find(&x.segments, inputs, piece->B, piece->T);
    x.t = (int*)new_array(N, sizeof(int)), x.first_key = (int*)new_array(N, sizeof(int));
    x.is_last = (int*)new_array(N, sizeof(int));
    x.behind = (int*)new_array(N, sizeof(int)), x.first_entry = (int*)new_array(N, sizeof(int));
    x.token = (int*)new_array(W, sizeof(int)), x.number = (int*)new_array(W, sizeof(int));
    places_of_batch(x.t, x.first_key, x.behind, x.is_last, &x.segments, piece);
    entry_windows_of_batch(x.token, x.number, x.first_entry, r, &x.segments, piece);
    return x;
}

static Batch batch_of(const int* inputs, int B, int T, int r) {
    const BatchPiece whole = batch_whole(B, T);
    return piece_of(inputs, &whole, r);
}

static void batch_free(Batch* x) {
    free(x->segments.at), free(x->t), free(x->first_key), free(x->behind), free(x->is_last);
    free(x->token), free(x->number), free(x->first_entry);
}

static void fill(float* const* a, const int* d) {
    const int B = d['B'], T = d['T'], E = d['E'], N = d['N'];
    int* inputs = (int*)new_array((size_t)N, sizeof(int));
    uint64_t s = seeded_stream(5);
    for (int n = 0; n < N && E; n++) { inputs[n] = xorshift_u32(&s) % (uint32_t)E == 0 ? -2 : 0; }
    Batch x = batch_of(E ? inputs : NULL, B, T, d['R']);
    memcpy(a[PLACE], x.t, sizeof(int) * (size_t)N), memcpy(a[BEHIND], x.behind, sizeof(int) * (size_t)N);
    memcpy(a[TOKEN], x.token, sizeof(int) * (size_t)d['W']), memcpy(a[NUMBER], x.number, sizeof(int) * (size_t)d['W']);
    batch_free(&x);
    free(inputs);
}

// ---- the table ----

static void in_double(double* const* a, const int* d) {
    const int D = d['D'], R = d['R'], C = d['C'], before = C > D ? R : 0;
    for (int i = 0; i < d['W'] * D; i++) {
        const int entry = i / D, c = i % D, token = (int)a[TOKEN][entry] - before;
        double total = 0.0, sum = 0.0;
        for (int s = a[NUMBER][entry] > 0.0 ? 0 : before; s < before + R && a[TOKEN][entry] >= 0.0; s++) {
            const int half = s < before ? c : C - D + c;
            const double e = exp(a[G][(token + s) * C + half] + a[APE][s % R * C + half]);
            total += e, sum += e * a[V][(token + s) * C + half];
        }
        a[POOL][i] = total > 0.0 ? sum / total : 0.0;
    }
}

// |v| < 2, |g| < 4, |ape| < 1, |dpool| < 1: gates below 5, two of them 10 apart at most. An exponential is within 5 + 5
// (two gates) + 10 (their difference) + 1 units of 2^-24 of itself, a total likewise and its chain, a weight both and 1
static double weight_error(const int* d) { return (43.0 + 2 * d['R']) * 0x1p-24; }
static double pool_error(const int* d) { return 2.0 * (weight_error(d) + 2 * d['R'] * 0x1p-24); }

static double error(int array, const int* d) {
    const double dgate = 4.0 * weight_error(d) + pool_error(d) + 12 * 0x1p-24;  // |v - pool| < 4
    switch (array) {
        case POOL: return pool_error(d);
        case DV: return weight_error(d) + 0x1p-24;
        case DG: return dgate;
        case DAPE: return rounding_walk(d['W'], 4.0 * d['W']) + d['W'] * dgate;
        default: return -1.0;
    }
}

// The hardware's exponential of 10 is within 30 units of 2^-24, sums have other orders. dape is the sum of rounded dg
static double apart(const OpProblem* p, int array, size_t i) {
    const double rounded = p->as_bf16 && array == DAPE ? 4.0 * 0x1p-9 * p->d['W'] : 0.0;
    return 2.0 * error(array, p->d) + (array == DAPE ? p->d['W'] : 1.0) * 4.0 * 60 * 0x1p-24 + rounded;
}

static const int shapes[][OP_DIMS] = {  // B, T, N, R, D, C, W, E
    {1, 1, 1, 1, 1, 1, 1, 0}, {1, 3, 3, 4, 5, 10, 0, 0}, {2, 7, 14, 1, 3, 6, 14, 3}, {2, 13, 26, 3, 7, 14, 8, 0},
    {3, 13, 39, 2, 5, 5, 18, 4}, {1, 41, 41, 4, 33, 66, 10, 17}, {2, 33, 66, 5, 16, 32, 12, 9},
    {2, 40, 80, 20, 8, 8, 4, 0}, {1, 140, 140, 64, 2, 4, 2, 0}, {1, 67, 67, 4, 64, 128, 16, 0},
    {1, 200, 200, 33, 34, 34, 6, 100}, {2, 9, 18, 3, 70, 140, 6, 5},
#if defined __CUDACC__ && !defined EXACT
    {1, 700, 700, 2, 9, 18, 350, 50}, {2, 256, 512, 4, 16, 32, 128, 0},  // several parts of the entries
#elif !defined __CUDACC__
    {1, 300, 300, 128, 80, 80, 2, 0}, {4, 64, 256, 4, 129, 258, 64, 11}, {1, 1300, 1300, 600, 17, 17, 2, 0},
    {1, 37, 37, 4, 530, 1060, 9, 0}, {2, 50, 100, 8, 300, 300, 12, 13},
#endif
    {0},
};

static const Op window_pool = {
    .name = "window_pool", .dims = "BTNRDCWE",
    .arrays = {
        {V, "v", "NC", GIVEN, 2.0f},
        {G, "g", "NC", GIVEN, 4.0f},
        {APE, "ape", "RC", GIVEN | FLOAT, 1.0f},
        {POOL, "pool", "WD", MADE},
        {TOKEN, "token", "W", GIVEN | INDEX, 0.0f, NULL, NULL, 'N'},
        {NUMBER, "number", "W", GIVEN | INDEX, 0.0f, NULL, NULL, 'N'},
        {PLACE, "place", "N", GIVEN | INDEX, 0.0f, NULL, NULL, 'N'},
        {BEHIND, "behind", "N", GIVEN | INDEX, 0.0f, NULL, NULL, 'N'},
        {DPOOL, "dpool", "WD", GIVEN, 1.0f},
        {DV, "dv", "NC", GRADIENT, 0.0f, NULL, "v"},
        {DG, "dg", "NC", GRADIENT, 0.0f, NULL, "g"},
        {DAPE, "dape", "RC", GRADIENT | ASKED | FLOAT},
    },
    .shapes = shapes, .traits = ANYWHERE, .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error,
    .judged = {{2, 13, 26, 3, 3, 6, 8, 0}, {1, 23, 23, 4, 3, 3, 5, 9}, {2, 20, 40, 3, 2, 4, 12, 6}}, .apart = apart,
};

// ---- one operation per line, as dev/ref/sparse_attention.py has them: of all slots, also those without a token ----

typedef struct {
    float v, gate, e, alpha;
    int there, token, half, place;
} Slot;

// the slots of a channel of an entry; returns their number
static int frozen_slots(Slot* slots, const OpProblem* p, int entry, int c) {
    const int R = p->d['R'], C = p->d['C'], D = p->d['D'], before = C > D ? R : 0, n = before + R;
    const int *token = (const int*)p->a[TOKEN], *number = (const int*)p->a[NUMBER];
    float largest = -INFINITY, total = 0.0f;
    for (int s = 0; s < n; s++) {
        Slot x = {0};
        x.there = s < before ? number[entry] > 0 : token[entry] >= 0;
        x.token = token[entry] + s - before, x.half = s < before ? c : C - D + c, x.place = s % R;
        if (x.there) {
            x.v = p->a[V][x.token * C + x.half];
            x.gate = p->a[G][x.token * C + x.half] + p->a[APE][x.place * C + x.half];
            largest = x.gate > largest ? x.gate : largest;
        }
        slots[s] = x;
    }
    for (int s = 0; s < n; s++) {
        const float below = slots[s].gate - largest;
        slots[s].e = slots[s].there ? fm_exp(below) : 0.0f;
        total = total + slots[s].e;
    }
    for (int s = 0; s < n; s++) { slots[s].alpha = slots[s].e / (total == 0.0f ? 1.0f : total); }
    return n;
}

static void test_frozen(Test* t) {
    enum { B = 2, T = 29, N = B * T, MOST = 4 };
    for (int overlap = 0; overlap < 2; overlap++) {
        const int D = 5, C = D * (1 + overlap), R = 4, shape[] = {B, T, N, R, D, C, B * (T / R), 11};
        OpProblem p = op_problem(&window_pool, shape, EASY, 0);
        float *pool = filled_array((size_t)(p.d['W'] * D), 0.0f), *dape = filled_array((size_t)(R * C), 0.0f);
        float *dv = filled_array((size_t)(N * C), 0.0f), *dg = filled_array((size_t)(N * C), 0.0f);
        for (int i = 0; i < p.d['W'] * D; i++) {
            Slot slots[2 * MOST];
            const int n = frozen_slots(slots, &p, i / D, i % D);
            for (int s = 0; s < n; s++) { pool[i] = madd(slots[s].alpha, slots[s].v, pool[i]); }
            for (int s = 0; s < n; s++) {
                const int at = slots[s].token * C + slots[s].half;
                const float apart_from = slots[s].v - pool[i], weighed = slots[s].alpha * apart_from;
                if (slots[s].there) { dv[at] = slots[s].alpha * p.a[DPOOL][i]; }
                if (slots[s].there) { dg[at] = weighed * p.a[DPOOL][i]; }
            }
        }
        for (int n = 0; n < N; n++) {
            const int place = ((const int*)p.a[PLACE])[n] % R;
            for (int c = 0; c < C; c++) { dape[place * C + c] = dape[place * C + c] + dg[n * C + c]; }
        }
        check_bits(t, "pool", p.a[POOL], pool, (size_t)(p.d['W'] * D));
        check_bits(t, "dv", p.a[DV], dv, (size_t)(N * C));
        check_bits(t, "dg", p.a[DG], dg, (size_t)(N * C));
        check_bits(t, "dape", p.a[DAPE], dape, (size_t)(R * C));
        free(pool), free(dape), free(dv), free(dg);
        op_problem_free(&p);
    }
}

// Two tokens of an entry. Gates that are equal with ape give the mean of two values; one far above the other its value.
// The second entry reads two tokens more, in their first channel; the token behind it nobody reads
static void test_obvious(Test* t) {
    const int shape[] = {1, 5, 5, 2, 1, 2, 2, 0};
    const float v[] = {9, 3, 9, 5, 7, 1, 7, 2, 9, 9}, g[] = {9, 1, 9, -1, 0, -300, 0, -300, 9, 9}, ape[] = {0, 0, 0, 2};
    const float want[] = {4, 9}, dv[] = {0.5f, 0.5f, 0.5f, 0.5f, 0, 0, 0, 0, 0, 0};
    OpProblem p = op_problem(&window_pool, shape, EASY, 0);
    Device dev = test_device(1);
    memcpy(p.a[V], v, sizeof v), memcpy(p.a[G], g, sizeof g), memcpy(p.a[APE], ape, sizeof ape);
    p.a[DPOOL][0] = p.a[DPOOL][1] = 1.0f;
    op_answer(t, &p, &dev);
    check(t, p.a[POOL][0] == want[0] && p.a[POOL][1] == want[1], "pool: found %.9g and %.9g, expected 4 and 9",
          (double)p.a[POOL][0], (double)p.a[POOL][1]);
    for (int i = 0; i < 10; i++) {
        check(t, p.a[DV][i] == dv[i], "dv[%d]: found %.9g, expected %.9g", i, (double)p.a[DV][i], (double)dv[i]);
    }
    const float dg[] = {0, -0.5f, 0, 0.5f};  // (v - pool) / 2; of the first half: v is pool
    for (int i = 0; i < 4; i++) {
        check(t, p.a[DG][i] == dg[i], "dg[%d]: found %.9g, expected %.9g", i, (double)p.a[DG][i], (double)dg[i]);
        check(t, p.a[DAPE][i] == dg[i], "dape[%d]: found %.9g, expected %.9g", i, (double)p.a[DAPE][i], (double)dg[i]);
    }
    device_free(&dev);
    op_problem_free(&p);
}

// ---- generation: entries are made when their last token comes, one, two or three tokens at a time ----

enum { GEN_T = 23, GEN_R = 3, GEN_D = 40, GEN_C = 2 * GEN_D, GEN_W = GEN_T / GEN_R };

// row i of `cache` is entry i of a text; those that end within the tokens first..last-1 join them
static void generate_entries(Test* t, float* cache, const float* v, const float* g, const float* ape, int first,
                             int last, const Device* dev) {
    const int from = first / GEN_R * GEN_R - GEN_R, begin = from > 0 ? from : 0;  // of the tokens that are at hand
    int token[4], number[4], n = 0;
    float* made = filled_array(4 * GEN_D, 77.0f);
    for (int i = 0; i < 4; i++) {
        const int entry = first / GEN_R + i, exists = entry < last / GEN_R;
        token[i] = exists ? entry * GEN_R - begin : -1, number[i] = exists ? entry : 0;
        n += exists;
    }
    int *d_token = ints_to_device(token, 4, dev), *d_number = ints_to_device(number, 4, dev);
    float* d_made = to_device(made, 4 * GEN_D, dev);
    const EntryWindows w = {GEN_R, 1, 4, d_token, d_number, NULL};
    window_pool_forward(d_made, v + begin * GEN_C, g + begin * GEN_C, ape, &w, GEN_D, dev);
    from_device(made, d_made, 4 * GEN_D, dev);
    memcpy(cache + first / GEN_R * GEN_D, made, sizeof(float) * n * GEN_D);
    for (int i = n * GEN_D; i < 4 * GEN_D; i++) { check(t, made[i] == 0.0f, "an entry without a token is not 0"); }
    device_drop(d_token), device_drop(d_number);
    free(made);
}

static void test_generation(Test* t) {
    const int shape[] = {1, GEN_T, GEN_T, GEN_R, GEN_D, GEN_C, GEN_W, 0};
    for (int step = 1; step <= 3; step++) {
        OpProblem p = op_problem(&window_pool, shape, EASY, 0);
        Device dev = test_device(2);
        float* cache = filled_array(GEN_W * GEN_D, 77.0f);
        op_answer(t, &p, &dev);
        float *v = to_device(p.a[V], GEN_T * GEN_C, &dev), *g = to_device(p.a[G], GEN_T * GEN_C, &dev);
        float* ape = to_device(p.a[APE], GEN_R * GEN_C, &dev);
        for (int n = 0; n < GEN_T; n += step) {
            generate_entries(t, cache, v, g, ape, n, n + step < GEN_T ? n + step : GEN_T, &dev);
        }
        check_bits(t, "entries", cache, p.a[POOL], GEN_W * GEN_D);
        device_drop(v), device_drop(g), device_drop(ape);
        free(cache);
        device_free(&dev);
        op_problem_free(&p);
    }
}

// ---- where windows lie ----

static void check_ints(Test* t, const char* what, const int* got, const int* want, int n) {
    for (int i = 0; i < n; i++) { check(t, got[i] == want[i], "%s[%d]: %d, expected %d", what, i, got[i], want[i]); }
}

// written by dev/ref/sparse_attention.py, class Windows: four rows of documents of 4, 1, 7; 12; 2, 2, 2, 6; 1, 11
enum { ROWS_B = 4, ROWS_T = 12, ROWS_N = ROWS_B * ROWS_T };
static const int lengths[] = {4, 1, 7, 12, 2, 2, 2, 6, 1, 11, 0};
static const int known_t[ROWS_N] = {0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                                    0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 4, 5, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9,  10};
static const int known_first[ROWS_N] = {0,  0,  0,  0,  4,  5,  5,  5,  5,  5,  5,  5,  12, 12, 12, 12,
                                        12, 12, 12, 12, 12, 12, 12, 12, 24, 24, 26, 26, 28, 28, 30, 30,
                                        30, 30, 30, 30, 36, 37, 37, 37, 37, 37, 37, 37, 37, 37, 37, 37};
static const int known_behind[ROWS_N] = {4,  4,  4,  4,  5,  12, 12, 12, 12, 12, 12, 12, 24, 24, 24, 24,
                                         24, 24, 24, 24, 24, 24, 24, 24, 26, 26, 28, 28, 30, 30, 36, 36,
                                         36, 36, 36, 36, 37, 48, 48, 48, 48, 48, 48, 48, 48, 48, 48, 48};
static const struct {
    int r, W;
    int token[16], number[16], seen[ROWS_N];
} known[] = {
    {3, 16, {0, -1, 5, 8, 12, 15, 18, 21, -1, -1, 30, 33, -1, 37, 40, 43},
     {0, 0, 0, 1, 0, 1, 2, 3, 0, 0, 0, 1, 0, 0, 1, 2},
     {0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 2, 2, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4,
      0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3}},
    {5, 8, {-1, 5, 12, 17, -1, 30, 37, 42}, {0, 0, 0, 1, 0, 0, 0, 1},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2,
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2}},
    {13, 0, {0}, {0}, {0}},
};
// the inputs of these documents
static void known_inputs(int* inputs) {
    memset(inputs, 0, sizeof(int) * ROWS_N);
    for (int i = 0, n = 0; lengths[i]; n += lengths[i++]) { inputs[n] = -2; }
}

static void test_windows(Test* t) {
    int inputs[ROWS_N];
    known_inputs(inputs);
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        Batch x = batch_of(inputs, ROWS_B, ROWS_T, known[k].r);
        check_ints(t, "t", x.t, known_t, ROWS_N);
        check_ints(t, "first_key", x.first_key, known_first, ROWS_N);
        check_ints(t, "behind", x.behind, known_behind, ROWS_N);
        for (int n = 0; n < ROWS_N; n++) { check(t, x.is_last[n] == (known_behind[n] == n + 1), "is_last %d", n); }
        check_ints(t, "token", x.token, known[k].token, known[k].W);
        check_ints(t, "number", x.number, known[k].number, known[k].W);
        for (int n = 0; n < ROWS_N; n++) {
            const int seen = ENTRIES_SEEN(x.t[n], known[k].r);
            check(t, seen == known[k].seen[n], "r %d: %d sees %d, expected %d", known[k].r, n, seen, known[k].seen[n]);
            for (int e = 0; e < seen; e++) {  // entries of a document are neighbours
                const int token = x.token[x.first_entry[n] + e], expected = x.first_key[n] + e * known[k].r;
                check(t, token == expected, "r %d: %d sees that of %d, expected %d", known[k].r, n, token, expected);
            }
        }
        batch_free(&x);
    }
}

// no documents: one segment of two rows
static void test_whole_rows(Test* t) {
    const int token[] = {0, 3, 7, 10}, number[] = {0, 1, 0, 1}, behind[] = {7, 14}, first_entry[] = {0, 2};
    Batch x = batch_of(NULL, 2, 7, 3);
    check_ints(t, "token", x.token, token, 4);
    check_ints(t, "number", x.number, number, 4);
    for (int n = 0; n < 14; n++) {
        check(t, x.t[n] == n % 7 && x.first_key[n] == n / 7 * 7 && x.behind[n] == behind[n / 7] &&
                     x.first_entry[n] == first_entry[n / 7],
              "position %d: t %d, first_key %d, behind %d, first_entry %d", n, x.t[n], x.first_key[n], x.behind[n],
              x.first_entry[n]);
    }
    batch_free(&x);
}

// position p of row b of a batch is token `at` of this piece
static int piece_token(const BatchPiece* x, int b, int p) { return b * (x->before + x->n) + x->before + p - x->begin; }

// what a piece of the known rows has is what all of them have there
static void check_piece(Test* t, const int* inputs, const Batch* whole, const BatchPiece* piece, int r) {
    const int n_tokens = batch_keys(piece), own = piece->n / r, row = piece->before + piece->n;
    int token_t[2 * ROWS_N], token_behind[2 * ROWS_N];
    Batch x = piece_of(inputs, piece, r);
    tokens_of_batch(token_t, token_behind, &x.segments, piece);
    for (int i = 0; i < n_tokens; i++) {
        const int b = i / row, p = i % row - piece->before + piece->begin;
        const int is_own = p >= piece->begin, at = b * ROWS_T + p, n = b * piece->n + p - piece->begin;
        check(t, token_t[i] == (p < 0 ? 0 : whole->t[at]), "token %d: t %d", i, token_t[i]);
        if (!is_own) {
            check(t, token_behind[i] == BATCH_FAR, "token %d: behind %d", i, token_behind[i]);
            continue;
        }
        const int end = whole->behind[at] - b * ROWS_T, last = piece->begin + piece->n, to = end < last ? end : last;
        check(t, x.t[n] == whole->t[at] && x.first_key[n] + x.t[n] == i && x.behind[n] == n + to - p &&
                     x.is_last[n] == whole->is_last[at] &&
                     token_behind[i] == i + to - p && x.first_entry[n] == whole->first_entry[at],
              "position %d: t %d, first_key %d, behind %d and %d, first_entry %d", n, x.t[n], x.first_key[n],
              x.behind[n], token_behind[i], x.first_entry[n]);
    }
    for (int i = 0; i < piece->B * own; i++) {
        const int b = i / own, at = b * (ROWS_T / r) + piece->begin / r + i % own, token = whole->token[at];
        const int expected = token < 0 ? -1 : piece_token(piece, b, token - b * ROWS_T);
        check(t, x.token[i] == expected && x.number[i] == whole->number[at], "entry %d: token %d, number %d", i,
              x.token[i], x.number[i]);
    }
    batch_free(&x);
}

// ranks that have a piece of each row: together they have all entries, each where its last token is
static void test_pieces(Test* t) {
    int inputs[ROWS_N];
    known_inputs(inputs);
    for (int r = 1; r <= 3; r++) {
        Batch whole = batch_of(inputs, ROWS_B, ROWS_T, r);
        for (int n = r; n < ROWS_T; n += r) {
            for (int begin = 0; begin < ROWS_T && ROWS_T % n == 0; begin += n) {
                const BatchPiece piece = {ROWS_B, ROWS_T, begin, n, 2 * r - 1};
                check_piece(t, inputs, &whole, &piece, r);
            }
        }
        batch_free(&whole);
    }
}

enum { P_B = 2, P_T = 24, P_N = P_B * P_T, P_R = 3, P_D = 5, P_W = P_T / P_R };

// the rows of tokens of a piece, of those of the batch; before its rows NAN
static float* piece_rows(const float* all, const BatchPiece* x, int C) {
    float* rows = filled_array((size_t)(batch_keys(x) * C), NAN);
    for (int b = 0; b < x->B; b++) {
        for (int p = x->begin - x->before; p < x->begin + x->n; p++) {
            if (p >= 0) { memcpy(rows + batch_key(x, b, p) * C, all + (b * x->T + p) * C, sizeof(float) * (size_t)C); }
        }
    }
    return rows;
}

// sums += what the rows of a piece have for positions of the batch
static void piece_add(float* sums, const float* rows, const BatchPiece* x, int C) {
    for (int b = 0; b < x->B; b++) {
        for (int p = x->begin - x->before; p < x->begin + x->n; p++) {
            for (int c = 0; c < C && p >= 0; c++) { sums[(b * x->T + p) * C + c] += rows[batch_key(x, b, p) * C + c]; }
        }
    }
}

// a piece's entries have the bits of the batch; dv, dg, dape go on with what its entries ask for
static void pool_piece(Test* t, const OpProblem* whole, const int* inputs, const BatchPiece* piece, float* sums[3],
                       const Device* dev) {
    const int C = whole->d['C'], own = piece->n / P_R, W = P_B * own, n_tokens = batch_keys(piece), n = n_tokens * C;
    Batch x = piece_of(inputs, piece, P_R);
    int token_t[2 * P_N], token_behind[2 * P_N];
    float *v = piece_rows(whole->a[V], piece, C), *g = piece_rows(whole->a[G], piece, C);
    float *pool = filled_array((size_t)(W * P_D), NAN), *dpool = filled_array((size_t)(W * P_D), NAN);
    float* none = filled_array((size_t)n, NAN);  // but where what no entry reads stays as it is
    const size_t n_row = sizeof(float) * (size_t)(own * P_D);
    tokens_of_batch(token_t, token_behind, &x.segments, piece);
    for (int b = 0; b < P_B; b++) {
        const int at = (b * P_W + piece->begin / P_R) * P_D;
        memcpy(dpool + b * own * P_D, whole->a[DPOOL] + at, n_row);
        float* halo = none + batch_key(piece, b, piece->begin - piece->before) * C;
        memset(halo, 0, sizeof(float) * (size_t)(piece->before * C));
    }
    int *d_token = ints_to_device(x.token, (size_t)W, dev), *d_number = ints_to_device(x.number, (size_t)W, dev);
    int* d_t = ints_to_device(token_t, (size_t)n_tokens, dev);
    int* d_far = ints_to_device(token_behind, (size_t)n_tokens, dev);
    const EntryWindows w = {P_R, C > P_D, W, d_token, d_number, NULL};
    const Places tokens = {n_tokens, d_t, NULL, d_far};
    float *d_v = to_device(v, (size_t)n, dev), *d_g = to_device(g, (size_t)n, dev);
    float *d_dv = to_device(none, (size_t)n, dev), *d_dg = to_device(none, (size_t)n, dev);
    float *d_pool = to_device(pool, (size_t)(W * P_D), dev), *d_dpool = to_device(dpool, (size_t)(W * P_D), dev);
    float *d_ape = to_device(whole->a[APE], (size_t)(P_R * C), dev);
    float *dape = filled_array((size_t)(P_R * C), NAN), *d_dape = to_device(dape, (size_t)(P_R * C), dev);
    window_pool_forward(d_pool, d_v, d_g, d_ape, &w, P_D, dev);
    window_pool_backward(d_dv, d_dg, d_dape, d_dpool, d_v, d_g, d_ape, d_pool, &w, &tokens, n_tokens, P_D, dev);
    from_device(pool, d_pool, (size_t)(W * P_D), dev), from_device(dape, d_dape, (size_t)(P_R * C), dev);
    from_device(v, d_dv, (size_t)n, dev), from_device(g, d_dg, (size_t)n, dev);
    for (int b = 0; b < P_B; b++) {
        const int at = (b * P_W + piece->begin / P_R) * P_D;
        check_bits(t, "pool", pool + b * own * P_D, whole->a[POOL] + at, (size_t)(own * P_D));
    }
    piece_add(sums[0], v, piece, C), piece_add(sums[1], g, piece, C);
    for (int i = 0; i < P_R * C; i++) { sums[2][i] += dape[i]; }
    device_drop(d_token), device_drop(d_number), device_drop(d_t), device_drop(d_far);
    device_drop(d_v), device_drop(d_g), device_drop(d_dpool), device_drop(d_ape);
    free(v), free(g), free(pool), free(dpool), free(none), free(dape);
    batch_free(&x);
}

// each entry is one piece's, and so is a channel of a token's gradients: sums over pieces are exact, but for dape
static void test_pool_pieces(Test* t) {
    Device dev = test_device(2);
    for (int overlap = 0; overlap < 2; overlap++) {
        const int C = P_D * (1 + overlap), shape[] = {P_B, P_T, P_N, P_R, P_D, C, P_B * P_W, 7};
        OpProblem p = op_problem(&window_pool, shape, EASY, 0);
        int inputs[P_N];
        op_answer(t, &p, &dev);
        for (int n = 0; n < P_N; n++) { inputs[n] = ((const int*)p.a[PLACE])[n] == 0 ? -2 : 0; }
        float* sums[3] = {filled_array((size_t)(P_N * C), 0.0f), filled_array((size_t)(P_N * C), 0.0f),
                          filled_array((size_t)(P_R * C), 0.0f)};
        for (int begin = 0; begin < P_T; begin += 2 * P_R) {
            const BatchPiece piece = {P_B, P_T, begin, 2 * P_R, (1 + overlap) * P_R - 1};
            pool_piece(t, &p, inputs, &piece, sums, &dev);
        }
        for (int i = 0; i < P_N * C; i++) {
            check(t, sums[0][i] == p.a[DV][i] && sums[1][i] == p.a[DG][i], "dv, dg %d: found %g %g, expected %g %g",
                  i, (double)sums[0][i], (double)sums[1][i], (double)p.a[DV][i], (double)p.a[DG][i]);
        }
        for (int i = 0; i < P_R * C; i++) {
            check(t, fabsf(sums[2][i] - p.a[DAPE][i]) <= 1e-5f, "dape %d: found %g, expected %g", i, (double)sums[2][i],
                  (double)p.a[DAPE][i]);
        }
        free(sums[0]), free(sums[1]), free(sums[2]);
        op_problem_free(&p);
    }
    device_free(&dev);
}

int main(int argc, char** argv) {
    const Op* ops[] = {&window_pool};
    const Promise promises[] = {
        {"windows", "documents, tails, rows without entries: the tables of the NumPy reference", test_windows},
        {"pieces", "of ranks that share rows: the tables of whole rows, cut", test_pieces},
        {"pieces pooled", "what they make and give back is together that of the batch", test_pool_pieces},
        {"whole rows", "no documents: rows begin at position 0", test_whole_rows},
        {"frozen", "the plain loop rounds as the specification says, bit for bit", test_frozen},
        {"obvious", "equal gates give a mean, a large one its value; halves; what nobody reads is 0", test_obvious},
        {"generation", "entries as their last tokens come: the bits of the batch", test_generation},
    };
    return op_main(argc, argv, ops, 1, promises, 7);
}
