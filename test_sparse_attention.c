/*
Promises of llmc/ops/sparse_attention.h, which follow from the tables (llmc/test/op.h), and others of its own: the
documents of a problem are of several lengths, with entries that nobody has, and lists of every length. Fast builds for
GPUs keep tolerances.
*/
#define SPARSE_KEPT ((size_t)1 << 14)  // bytes: backward takes some heads at a time
#if defined(SIMT) && !defined(EXACT)
#define WGMMA  // dev/simt models it
#endif
#if defined(WGMMA) && !defined(EXACT)
static int sparse_hopper;  // 1 takes the kernels of flash_sparse_hopper.h, 0 those of other cards
#define FLASH_SPARSE_HOPPER sparse_hopper
#endif
#include "llmc/ops/sparse_attention.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

// N positions, H heads, D channels, W entries, lists of K (0: none, all entries that ended), R tokens an entry, L the
// window; P is 4, the rows of places: t, first_key, behind, first_entry; M rows of keys, those more than N before these
enum { Q, KV, ENTRIES, SINKS, CHOSEN, PLACES, OUT, MAX, INV, DOUT, DQ, DKV, DENTRIES, DSINKS,
       BY_Q, BY_DOUT, ENTRIES_BY_Q, ENTRIES_BY_DOUT };

static SparseShape shape_of(const int* d) {
    const SparseShape s = {d['N'], d['H'], d['D'], d['L'], d['K'], 1.0f / sqrtf((float)d['D']), d['M']};
    return s;
}
static Places places_of(float* const* a, const int* d) {
    const int* p = (const int*)a[PLACES];
    const Places places = {d['N'], p, p + d['N'], p + 2 * d['N']};
    return places;
}
static EntryWindows windows_of(float* const* a, const int* d) {
    const EntryWindows w = {d['R'], 0, d['W'], NULL, NULL, (const int*)a[PLACES] + 3 * d['N']};
    return w;
}
#define THE_PROBLEM                                                                                     \
    const SparseShape s = shape_of(d);                                                                  \
    const Places places = places_of(a, d);                                                              \
    const EntryWindows windows = windows_of(a, d), *w = d['W'] > 0 ? &windows : NULL;                   \
    const int* chosen = d['K'] > 0 ? (const int*)a[CHOSEN] : NULL

static void forward_ref(float* const* a, const int* d) {
    THE_PROBLEM;
    sparse_attention_forward_ref(a[OUT], a[MAX], a[INV], a[Q], a[KV], a[ENTRIES], a[SINKS], chosen, &s, &places, w);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    THE_PROBLEM;
    sparse_attention_forward(x[OUT], a[MAX], a[INV], x[Q], x[KV], x[ENTRIES], a[SINKS], chosen, &s, &places, w, dev);
}

static void backward_ref(float* const* a, const int* d) {
    THE_PROBLEM;
    float* sums = filled_array(2 * (size_t)(d['M'] + d['W']) * d['D'], 0.0f);
    sparse_attention_backward_ref(a[DQ], a[DKV], a[DENTRIES], a[DSINKS], sums, a[DOUT], a[Q], a[KV], a[ENTRIES], a[MAX],
                                  a[INV], a[SINKS], chosen, d['W'], &s, &places, w);
    free(sums);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    THE_PROBLEM;
    sparse_attention_backward(x[DQ], x[DKV], x[DENTRIES], a[DSINKS], x[DOUT], x[OUT], x[Q], x[KV], x[ENTRIES], a[MAX],
                              a[INV], a[SINKS], chosen, d['W'], &s, &places, w, dev);
}

// heads behind others, whose sums are there: these go on
static void more_ref(float* const* a, const int* d) {
    THE_PROBLEM;
    const size_t of_keys = (size_t)d['M'] * d['D'], of_entries = (size_t)d['W'] * d['D'];
    float* sums = filled_array(2 * (of_keys + of_entries), 0.0f);
    for (int i = 0; i < 4; i++) {
        float* at = sums + (i % 2 ? of_keys + of_entries : 0) + (i < 2 ? 0 : of_keys);
        memcpy(at, a[BY_Q + i], sizeof(float) * (i < 2 ? of_keys : of_entries));
    }
    sparse_attention_backward_ref(a[DQ], a[DKV], a[DENTRIES], a[DSINKS], sums, a[DOUT], a[Q], a[KV], a[ENTRIES], a[MAX],
                                  a[INV], a[SINKS], chosen, d['W'], &s, &places, w);
    for (int i = 0; i < 4; i++) {
        const float* at = sums + (i % 2 ? of_keys + of_entries : 0) + (i < 2 ? 0 : of_keys);
        memcpy(a[BY_Q + i], at, sizeof(float) * (i < 2 ? of_keys : of_entries));
    }
    free(sums);
}

#ifdef __CUDACC__
#define BACKWARD SparseBackwardOf<X>
#else
#define BACKWARD SparseBackward
#endif

// keys and entries in three pieces
OP_STORED(X)
static void more(X* const* x, float* const* a, const int* d, const Device* dev) {
    THE_PROBLEM;
    const size_t width = sizeof(float) * (size_t)d['D'];
    SparseSums sums[SPARSE_CHAINS];
    BACKWARD b = sparse_backward_begin(x[DQ], x[DKV], x[DENTRIES], a[DSINKS], x[DOUT], x[OUT], x[Q], x[KV], x[ENTRIES],
                                       a[MAX], a[INV], a[SINKS], chosen, d['W'], &s, &places, w, dev);
    sparse_backward_sums(sums, &b);
    for (int i = 0; i < 4; i++) { device_copy(sums[i].rows, a[BY_Q + i], width * (size_t)sums[i].n, dev); }
    for (int i = 0; i < 3; i++) {
        const SparsePart keys = {d['M'] * i / 3, d['M'] * (i + 1) / 3};
        const SparsePart of_entries = {d['W'] * i / 3, d['W'] * (i + 1) / 3};
        sparse_backward_keys(&b, keys, of_entries, dev);
    }
    for (int i = 0; i < 4; i++) { device_copy(a[BY_Q + i], sums[i].rows, width * (size_t)sums[i].n, dev); }
    sparse_backward_end(&b, dev);
}

// documents of N/2 + 1, 1, 3 positions, and the rest; behind the second one an entry that nobody has. Where there are
// keys before the positions, the first document has these and began two earlier
static void fill_places(int* places, const int* d) {
    const int N = d['N'], before = d['M'] - N, lengths[] = {N / 2 + 1, 1, 3, N};
    for (int first = 0, i = 0, entry = 0; first < N; i++) {
        const int length = lengths[i] < N - first ? lengths[i] : N - first;
        const int gone = i == 0 && before > 0 ? before + 2 : 0;
        for (int t = 0; t < length; t++) {
            places[first + t] = gone + t, places[N + first + t] = before + first - gone;
            places[2 * N + first + t] = first + length, places[3 * N + first + t] = entry;
        }
        entry += (d['R'] ? (gone + length) / d['R'] : 0) + (i == 1);
        first += length;
    }
}

// some of the entries that a position sees, ascending
static void fill_chosen(int* chosen, const int* places, const int* d) {
    uint64_t state = seeded_stream(9);
    for (int n = 0; n < d['N']; n++) {
        const int seen = (places[n] + 1) / d['R'], one_in = 1 + seen / (d['K'] + 1);
        int length = 0;
        for (int e = 0; e < seen && length < d['K']; e++) {
            if (xorshift_u32(&state) % (uint32_t)(one_in + n % 3) == 0) {
                chosen[n * d['K'] + length++] = places[3 * d['N'] + n] + e;
            }
        }
        while (length < d['K']) { chosen[n * d['K'] + length++] = -1; }
    }
}

static void fill(float* const* a, const int* d) {
    fill_places((int*)a[PLACES], d);
    if (d['K'] > 0) { fill_chosen((int*)a[CHOSEN], (const int*)a[PLACES], d); }
}

// from the contract, not by the functions of sparse_shape.h: the keys of position n, window first
static int keys_double(double** key, double* const* a, const int* d, int n) {
    const int N = d['N'], D = d['D'], t = (int)a[PLACES][n];
    int n_keys = 0;
    const int own = d['M'] - N + n, first = (int)a[PLACES][N + n];
    for (int u = 0; u <= own; u++) {
        if (u >= first && u > own - d['L']) { key[n_keys++] = a[KV] + u * D; }
    }
    for (int e = 0; d['W'] > 0 && d['K'] == 0 && e < (t + 1) / d['R']; e++) {
        key[n_keys++] = a[ENTRIES] + ((int)a[PLACES][3 * N + n] + e) * D;
    }
    for (int k = 0; k < d['K'] && a[CHOSEN][n * d['K'] + k] >= 0.0; k++) {
        key[n_keys++] = a[ENTRIES] + (int)a[CHOSEN][n * d['K'] + k] * D;
    }
    return n_keys;
}

static void in_double(double* const* a, const int* d) {
    const int H = d['H'], D = d['D'];
    double** key = (double**)new_array((size_t)(d['M'] + d['W'] + 1), sizeof(double*));
    for (int n = 0; n < d['N']; n++) {
        const int n_keys = keys_double(key, a, d, n);
        for (int h = 0; h < H; h++) {
            const double* q = a[Q] + (n * H + h) * D;
            double* out = a[OUT] + (n * H + h) * D;
            double total = exp(a[SINKS][h]);
            for (int c = 0; c < D; c++) { out[c] = 0.0; }
            for (int k = 0; k < n_keys; k++) {
                double dot = 0.0;
                for (int c = 0; c < D; c++) { dot += q[c] * key[k][c]; }
                const double e = exp(dot / sqrt((double)D));
                total += e;
                for (int c = 0; c < D; c++) { out[c] += e * key[k][c]; }
            }
            for (int c = 0; c < D; c++) { out[c] /= total; }
        }
    }
    free(key);
}

// |q|, |kv|, |entries| < 1, |dout| < 1. A score is a chain of D products below 1, scaled: off by rounding_walk(D, D) /
// sqrt(D), and so is a weight, relatively; with its exponential, its total and the sum over n_keys
static double weight_error(const int* d) {
    const double D = d['D'], n_keys = d['L'] + d['W'];
    return rounding_walk((int)D, D) / sqrt(D) + rounding_walk((int)(2 * n_keys), 1.0) + 0x1p-22;
}

static double error(int array, const int* d) {
    const double D = d['D'], N = d['N'], one = weight_error(d);
    switch (array) {
        case OUT: return one;                           // a mean of keys
        case DQ: return 4 * sqrt(D) * one;              // |datt - D| < 2 D, the scale, and a weight of 1 in all
        case DKV:
        case DENTRIES:
        case BY_Q:
        case BY_DOUT:
        case ENTRIES_BY_Q:
        case ENTRIES_BY_DOUT: return d['H'] * N * (4 * sqrt(D) + 1) * one / 4;  // of those weights that a key has
        case DSINKS: return N * D * one;                // a weight times D, which is below D
        default: return -1.0;
    }
}

// Other orders of sums, and exp of the hardware, which is off by 2^-21 of a score and of itself; |score| < sqrt(D). On
// tensor cores weights are rounded to bf16, and so are what a position gives a key and out, of which D is made: "tensor
// cores" has closer bounds
static double apart(const OpProblem* p, int array, size_t i) {
    const double weights = 2.0 * weight_error(p->d) + 0x1p-19 * sqrt(p->d['D']);
    const double rounding = p->as_bf16 ? 0x1p-7 : 0.0;
    switch (array) {
        case MAX: return rounding_walk(p->d['D'], p->d['D']) * 2.0 / sqrt(p->d['D']);
        case INV: return weights;
        default: return error(array, p->d) / weight_error(p->d) * (weights + rounding);
    }
}

static const int shapes[][OP_DIMS] = {
    // N, H, D, W, K, R, L, P, M
    {1, 1, 1, 0, 0, 1, 1, 4, 1}, {1, 2, 3, 2, 0, 1, 4, 4, 1}, {7, 3, 5, 4, 0, 3, 2, 4, 7},
    {9, 8, 16, 6, 2, 2, 4, 4, 9}, {33, 2, 7, 10, 3, 4, 5, 4, 33}, {20, 5, 33, 0, 0, 1, 6, 4, 20},
    {33, 4, 15, 36, 0, 1, 9, 4, 33}, {40, 1, 17, 12, 5, 4, 64, 4, 40}, {24, 16, 9, 8, 8, 4, 1, 4, 24},
    {20, 18, 5, 12, 3, 2, 6, 4, 20}, {21, 3, 17, 11, 0, 3, 8, 4, 30}, {21, 2, 6, 11, 3, 3, 8, 4, 28},
#ifndef __CUDACC__
    {130, 8, 64, 34, 0, 4, 32, 4, 130}, {131, 8, 48, 36, 9, 4, 40, 4, 131}, {70, 66, 20, 10, 4, 8, 16, 4, 70},
    {257, 3, 32, 70, 0, 4, 24, 4, 257}, {90, 130, 16, 4, 0, 30, 33, 4, 90}, {60, 64, 32, 32, 17, 2, 10, 4, 60},
    {150, 2, 70, 155, 9, 1, 5, 4, 150}, {130, 8, 64, 43, 0, 4, 33, 4, 170},
    {600, 2, 16, 152, 0, 4, 290, 4, 600},  // positions in several parts; that of 150: lists in two tasks
#endif
    {0},
};

#define SPARSE_ARRAYS                                                \
    {Q, "q", "NHD", GIVEN, 1.0f},                                    \
    {KV, "kv", "MD", GIVEN, 1.0f},                                   \
    {ENTRIES, "entries", "WD", GIVEN, 1.0f},                         \
    {SINKS, "sinks", "H", GIVEN | FLOAT, 1.0f, "dsinks"},            \
    {CHOSEN, "chosen", "NK", GIVEN | INDEX, 0.0f, NULL, NULL, 'W'},  \
    {PLACES, "places", "PN", GIVEN | INDEX, 0.0f, NULL, NULL, 'N'},  \
    {OUT, "out", "NHD", MADE, 0.0f, "dsinks"},                       \
    {MAX, "max", "NH", MADE | FLOAT},                                \
    {INV, "inv", "NH", MADE | FLOAT},                                \
    {DOUT, "dout", "NHD", GIVEN, 1.0f},                              \
    {DQ, "dq", "NHD", GRADIENT},                                     \
    {DKV, "dkv", "MD", GRADIENT},                                    \
    {DENTRIES, "dentries", "WD", GRADIENT},                          \
    {DSINKS, "dsinks", "H", GRADIENT | ASKED | FLOAT}

static const Op sparse_attention = {
    .name = "sparse_attention", .dims = "NHDWKRLPM",
    .arrays = {
        SPARSE_ARRAYS,
    },
    .shapes = shapes, .traits = ANYWHERE,
    .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error,
    .judged = {{9, 2, 5, 6, 0, 2, 3, 4, 9}, {14, 3, 4, 8, 2, 2, 4, 4, 14}, {6, 1, 3, 0, 0, 1, 2, 4, 6},
               {9, 2, 4, 7, 0, 2, 4, 4, 13}}, .apart = apart,
};

static const Op more_heads = {
    .name = "more_heads", .dims = "NHDWKRLPM",
    .arrays = {
        SPARSE_ARRAYS,
        {BY_Q, "by_q", "MD", GRADIENT | ADDED | FLOAT, 1.0f},
        {BY_DOUT, "by_dout", "MD", GRADIENT | ADDED | FLOAT, 1.0f},
        {ENTRIES_BY_Q, "entries_by_q", "WD", GRADIENT | ADDED | FLOAT, 1.0f},
        {ENTRIES_BY_DOUT, "entries_by_dout", "WD", GRADIENT | ADDED | FLOAT, 1.0f},
    },
    .shapes = shapes + 8, .traits = ANYWHERE,
    .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = more_ref, .backward = OP_FAST(more), .apart = apart,
};

// ---- the sum over heads of the weights of a list; G 1: it goes on from heads before ----

enum { M_Q, M_ENTRIES, M_MAX, M_INV, M_CHOSEN, M_BEFORE, M_MASS };

static void mass_ref(float* const* a, const int* d) {
    const SparseShape s = {d['N'], d['H'], d['D'], 1, d['K'], 1.0f / sqrtf((float)d['D'])};
    memcpy(a[M_MASS], a[M_BEFORE], sizeof(float) * (size_t)d['N'] * d['K']);
    sparse_attention_mass_ref(a[M_MASS], a[M_Q], a[M_ENTRIES], a[M_MAX], a[M_INV], (const int*)a[M_CHOSEN], d['G'], &s);
}

OP_STORED(X)
static void mass(X* const* x, float* const* a, const int* d, const Device* dev) {
    const SparseShape s = {d['N'], d['H'], d['D'], 1, d['K'], 1.0f / sqrtf((float)d['D'])};
    const EntryWindows w = {1, 0, d['W'], NULL, NULL, NULL};
    device_copy(a[M_MASS], a[M_BEFORE], sizeof(float) * (size_t)d['N'] * d['K'], dev);
    sparse_attention_mass(a[M_MASS], x[M_Q], x[M_ENTRIES], a[M_MAX], a[M_INV], (const int*)a[M_CHOSEN], d['G'], &s,
                          &w, dev);
}

// lists of every length, ascending
static void mass_fill(float* const* a, const int* d) {
    int* chosen = (int*)a[M_CHOSEN];
    for (int n = 0; n < d['N']; n++) {
        for (int k = 0; k < d['K']; k++) {
            const int entry = n % 3 + k * (1 + n % 2);
            chosen[n * d['K'] + k] = k < n % (d['K'] + 1) && entry < d['W'] ? entry : -1;
        }
    }
}

static void mass_double(double* const* a, const int* d) {
    for (int i = 0; i < d['N'] * d['K']; i++) {
        const int n = i / d['K'], entry = (int)a[M_CHOSEN][i];
        a[M_MASS][i] = d['G'] && entry >= 0 ? a[M_BEFORE][i] : 0.0;
        for (int h = 0; entry >= 0 && h < d['H']; h++) {
            double dot = 0.0;
            for (int c = 0; c < d['D']; c++) {
                dot += a[M_Q][(n * d['H'] + h) * d['D'] + c] * a[M_ENTRIES][entry * d['D'] + c];
            }
            a[M_MASS][i] += exp(dot / sqrt((double)d['D']) - a[M_MAX][n * d['H'] + h]) * a[M_INV][n * d['H'] + h];
        }
    }
}

// |max|, |inv| < 1: a weight is below exp(sqrt(D) + 1)
static double mass_error(int array, const int* d) {
    const double most = exp(sqrt((double)d['D']) + 1.0), D = d['D'];
    return array != M_MASS ? -1.0
                           : d['H'] * most * (rounding_walk((int)D, D) / sqrt(D) + 0x1p-22) +
                                 rounding_walk(d['H'], d['H'] * most);
}

static double mass_apart(const OpProblem* p, int array, size_t i) {
    return 2.0 * mass_error(array, p->d) + p->d['H'] * exp(sqrt(p->d['D']) + 1.0) * 0x1p-19 * sqrt(p->d['D']);
}

static const int mass_shapes[][OP_DIMS] = {
    {1, 1, 1, 1, 1, 0},     {7, 3, 5, 9, 4, 1},      {9, 8, 16, 20, 7, 0}, {5, 66, 7, 30, 17, 1},
    {4, 40, 33, 50, 33, 0}, {3, 130, 4, 40, 16, 1}, {0},
};

static const Op sparse_mass = {
    .name = "mass", .dims = "NHDWKG",
    .arrays = {
        {M_Q, "q", "NHD", GIVEN, 1.0f},
        {M_ENTRIES, "entries", "WD", GIVEN, 1.0f},
        {M_MAX, "max", "NH", GIVEN | FLOAT, 1.0f},
        {M_INV, "inv", "NH", GIVEN | FLOAT, 1.0f},
        {M_CHOSEN, "chosen", "NK", GIVEN | INDEX, 0.0f, NULL, NULL, 'W'},
        {M_BEFORE, "before", "NK", GIVEN | FLOAT, 1.0f},
        {M_MASS, "mass", "NK", MADE | FLOAT},
    },
    .shapes = mass_shapes, .traits = ANYWHERE,
    .fill = mass_fill,
    .forward_ref = mass_ref, .forward = OP_FAST(mass),
    .in_double = mass_double, .error = mass_error, .judged = {{9, 3, 5, 9, 4, 0}, {5, 8, 16, 20, 7, 1}},
    .apart = mass_apart,
};

// ---- promises of its own ----

// one operation per line, as dev/ref/sparse_attention.py has them: one document, no lists
static void test_frozen(Test* t) {
    enum { N = 12, H = 2, D = 5, R = 3, L = 4, W = N / R, KEYS = L + W };
    int places[4 * N];
    float *q = random_array(N * H * D, 1.0f, 1), *kv = random_array(N * D, 1.0f, 2);
    float *entries = random_array(W * D, 1.0f, 3), *dout = random_array(N * H * D, 1.0f, 4), sinks[H] = {0.5f, -1.0f};
    float out[N * H * D], max[N * H], inv[N * H], dq[N * H * D], dkv[N * D], dentries[W * D], dsinks[H];
    float sums[2 * (N + W) * D] = {0};
    float by_q[(N + W) * D] = {0}, by_dout[(N + W) * D] = {0}, scale = 1.0f / sqrtf((float)D);
    for (int n = 0; n < N; n++) { places[n] = n, places[N + n] = 0, places[2 * N + n] = N, places[3 * N + n] = 0; }
    const SparseShape s = {N, H, D, L, 0, scale};
    const Places where = {N, places, places + N, places + 2 * N};
    const EntryWindows w = {R, 0, W, NULL, NULL, places + 3 * N};
    sparse_attention_forward_ref(out, max, inv, q, kv, entries, sinks, NULL, &s, &where, &w);
    sparse_attention_backward_ref(dq, dkv, dentries, dsinks, sums, dout, q, kv, entries, max, inv, sinks, NULL, W, &s,
                                  &where, &w);
    for (int h = 0; h < H; h++) {
        float want_dsink = 0.0f;
        for (int n = 0; n < N; n++) {
            const int i = n * H + h;
            const float *q_i = q + i * D, *d_i = dout + i * D, *key[KEYS];
            float score[KEYS], datt[KEYS], att[KEYS], want[D] = {0}, want_dq[D] = {0}, top = -INFINITY, total = 0.0f;
            float delta = 0.0f;
            int row[KEYS], n_keys = 0;
            for (int u = n - L + 1; u <= n; u++) {
                if (u >= 0) { row[n_keys] = u, key[n_keys++] = kv + u * D; }
            }
            for (int e = 0; (e + 1) * R - 1 <= n; e++) { row[n_keys] = N + e, key[n_keys++] = entries + e * D; }
            for (int k = 0; k < n_keys; k++) {
                float dot = 0.0f;
                datt[k] = 0.0f;
                for (int c = 0; c < D; c++) { dot = madd(q_i[c], key[k][c], dot); }
                for (int c = 0; c < D; c++) { datt[k] = madd(d_i[c], key[k][c], datt[k]); }
                score[k] = dot * scale;
                top = score[k] > top ? score[k] : top;
            }
            top = sinks[h] > top ? sinks[h] : top;
            for (int k = 0; k < n_keys; k++) {
                const float distance = score[k] - top;
                att[k] = fm_exp(distance);
                total += att[k];
            }
            const float sink_distance = sinks[h] - top, sink = fm_exp(sink_distance);
            const float whole = total + sink, one = 1.0f / whole;
            for (int k = 0; k < n_keys; k++) {
                att[k] *= one;
                delta = madd(att[k], datt[k], delta);
                for (int c = 0; c < D; c++) { want[c] = madd(att[k], key[k][c], want[c]); }
            }
            for (int k = 0; k < n_keys; k++) {
                const float difference = datt[k] - delta, product = att[k] * difference, ds = product * scale;
                for (int c = 0; c < D; c++) {
                    want_dq[c] = madd(ds, key[k][c], want_dq[c]);
                    by_q[row[k] * D + c] = madd(ds, q_i[c], by_q[row[k] * D + c]);
                    by_dout[row[k] * D + c] = madd(att[k], d_i[c], by_dout[row[k] * D + c]);
                }
            }
            const float share = sink * one;
            want_dsink = madd(-share, delta, want_dsink);
            check_bits(t, "out", out + i * D, want, D);
            check_bits(t, "dq", dq + i * D, want_dq, D);
            check_bits(t, "max", max + i, &top, 1);
            check_bits(t, "inv", inv + i, &one, 1);
        }
        check_bits(t, "dsinks", dsinks + h, &want_dsink, 1);
    }
    for (int i = 0; i < (N + W) * D; i++) { by_q[i] += by_dout[i]; }
    check_bits(t, "dkv", dkv, by_q, N * D);
    check_bits(t, "dentries", dentries, by_q + N * D, W * D);
    free(q), free(kv), free(entries), free(dout);
}

// q 0 and sinks 0: all that is seen, and the sink, has the same weight. The fourth position sees two keys and an entry
// that stands for both of the first two, and has itself the list
static void test_obvious(Test* t) {
    const int shape[] = {4, 1, 1, 2, 0, 2, 2, 4, 4};
    OpProblem p = op_problem(&sparse_attention, shape, EASY, 0);
    Device dev = test_device(1);
    const float keys[] = {3.0f, 6.0f, 9.0f, 12.0f};
    int* places = (int*)p.a[PLACES];
    for (int n = 0; n < 4; n++) { places[n] = n, places[4 + n] = 0, places[8 + n] = 4, places[12 + n] = 0; }
    memset(p.a[Q], 0, sizeof(float) * 4), memcpy(p.a[KV], keys, sizeof keys);
    p.a[SINKS][0] = 0.0f, p.a[ENTRIES][0] = 30.0f, p.a[ENTRIES][1] = 60.0f;
    for (int n = 0; n < 4; n++) { p.a[DOUT][n] = n == 3 ? 5.0f : 0.0f; }
    op_answer(t, &p, &dev);
    // 3 / 2    (3 + 6 + 30) / 4    (6 + 9 + 30) / 4    (9 + 12 + 30 + 60) / 5
    const float want[] = {1.5f, 9.75f, 11.25f, 22.2f, 0.0f, 0.0f, 1.0f, 1.0f, 1.0f, 1.0f, -22.2f};
    const float got[] = {p.a[OUT][0], p.a[OUT][1], p.a[OUT][2],      p.a[OUT][3],      p.a[DKV][0],   p.a[DKV][1],
                         p.a[DKV][2], p.a[DKV][3], p.a[DENTRIES][0], p.a[DENTRIES][1], p.a[DSINKS][0]};
    for (int i = 0; i < 11; i++) {
        check(t, fabsf(got[i] - want[i]) <= 1e-5f, "number %d: found %.9g, expected %.9g", i, (double)got[i],
              (double)want[i]);
    }
    const float without_sink[] = {3.0f, 13.0f, 15.0f, 27.75f};
    p.a[SINKS][0] = -INFINITY;
    op_answer(t, &p, &dev);
    for (int n = 0; n < 4; n++) {
        check(t, fabsf(p.a[OUT][n] - without_sink[n]) <= 1e-5f, "without a sink, position %d: found %.9g, expected %.9g",
              n, (double)p.a[OUT][n], (double)without_sink[n]);
    }
    device_free(&dev);
    op_problem_free(&p);
}

// In generation a pass has some positions of several texts, whose keys and entries lie in caches, each text's apart.
// `whole` is one pass over two texts of T positions; the pass here has those from position `from` on
enum { TEXTS = 2, T = 21, ROOM = 30, G_H = 3, G_D = 20, G_R = 4, G_L = 6, G_K = 3, G_W = T / G_R };

static void check_generation(Test* t, int from, int with_lists, const Device* dev) {
    enum { N = TEXTS * T, HD = G_H * G_D };
    const int n_new = TEXTS * (T - from);
    int whole[4 * N], places[4 * N], lists[N * G_K], chosen[N * G_K];
    float *q = random_array(N * HD, 2.0f, 1), *kv = random_array(N * G_D, 2.0f, 2), *new_q = filled_array(N * HD, 0.0f);
    float *entries = random_array(TEXTS * G_W * G_D, 2.0f, 3), *sinks = random_array(G_H, 1.0f, 4);
    float *cache = filled_array(TEXTS * ROOM * G_D, NAN), *entry_cache = filled_array(TEXTS * ROOM * G_D, NAN);
    for (int i = 0, j = 0; i < N; i++) {
        const int text = i / T, n = i % T, seen = (n + 1) / G_R;
        whole[i] = n, whole[N + i] = text * T, whole[2 * N + i] = text * T + T, whole[3 * N + i] = text * G_W;
        memcpy(cache + (text * ROOM + n) * G_D, kv + i * G_D, sizeof(float) * G_D);
        for (int k = 0; k < G_K; k++) { lists[i * G_K + k] = 2 * k < seen ? text * G_W + 2 * k : -1; }
        if (n < from) { continue; }
        places[j] = n, places[n_new + j] = text * ROOM, places[2 * n_new + j] = text * ROOM + 2;
        for (int k = 0; k < G_K; k++) { chosen[j * G_K + k] = 2 * k < seen ? text * ROOM + 2 + 2 * k : -1; }
        memcpy(new_q + j++ * HD, q + i * HD, sizeof(float) * HD);
    }
    for (int i = 0; i < TEXTS * G_W; i++) {
        memcpy(entry_cache + (i / G_W * ROOM + 2 + i % G_W) * G_D, entries + i * G_D, sizeof(float) * G_D);
    }
    float *out = filled_array(N * HD, NAN), *max = filled_array(N * G_H, NAN), *inv = filled_array(N * G_H, NAN);
    float *new_out = filled_array(N * HD, NAN);
    for (int pass = 0; pass < 2; pass++) {
        const int n_rows = pass ? n_new : N, n_kv = pass ? TEXTS * ROOM : N;
        const int n_entries = pass ? TEXTS * ROOM : TEXTS * G_W;
        const SparseShape s = {n_rows, G_H, G_D, G_L, G_K, 1.0f / sqrtf((float)G_D)};
        int* where = ints_to_device(pass ? places : whole, 4 * (size_t)n_rows, dev);
        int* list = ints_to_device(pass ? chosen : lists, (size_t)n_rows * G_K, dev);
        const Places p = {n_rows, where, where + n_rows, pass ? NULL : where + 2 * n_rows};
        const EntryWindows w = {G_R, 0, n_entries, NULL, NULL, where + (pass ? 2 : 3) * n_rows};
        float *q_d = to_device(pass ? new_q : q, (size_t)n_rows * HD, dev), *sinks_d = to_device(sinks, G_H, dev);
        float* kv_d = to_device(pass ? cache : kv, (size_t)n_kv * G_D, dev);
        float* entries_d = to_device(pass ? entry_cache : entries, (size_t)n_entries * G_D, dev);
        float *out_d = to_device(out, N * HD, dev), *max_d = to_device(max, N * G_H, dev);
        float* inv_d = to_device(inv, N * G_H, dev);
        sparse_attention_forward(out_d, max_d, inv_d, q_d, kv_d, entries_d, sinks_d, with_lists ? list : NULL, &s, &p,
                                 &w, dev);
        from_device(pass ? new_out : out, out_d, N * HD, dev);
        device_drop(q_d), device_drop(kv_d), device_drop(entries_d), device_drop(max_d), device_drop(inv_d);
        device_drop(where), device_drop(list), device_drop(sinks_d);
    }
    for (int i = 0, j = 0; i < N; i++) {
        if (i % T >= from) { check_bits(t, "a new position", new_out + j++ * HD, out + i * HD, HD); }
    }
    free(q), free(kv), free(entries), free(sinks), free(cache), free(entry_cache), free(new_q);
    free(out), free(max), free(inv), free(new_out);
}

static void test_generation(Test* t) {
    const int starts[] = {0, 1, 7, T - 1};
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        for (int j = 0; j < 8; j++) { check_generation(t, starts[j / 2], j % 2, &dev); }
        device_free(&dev);
    }
}

// keys, entries and positions of one document spoilt: the others keep every bit, forward and backward
static void test_documents(Test* t) {
    const int lists[] = {0, 3};
    Device dev = test_device(2);
    for (int i = 0; i < 2; i++) {
        const int shape[] = {25, 3, 10, 10, lists[i], 3, 4, 4, 25}, second = 25 / 2 + 1;  // where it begins
        OpProblem clean = op_problem(&sparse_attention, shape, EASY, 0);
        OpProblem spoilt = op_problem(&sparse_attention, shape, EASY, 0);
        for (int c = 0; c < second * 10; c++) { spoilt.a[KV][c] = NAN; }
        for (int c = 0; c < second / 3 * 10; c++) { spoilt.a[ENTRIES][c] = INFINITY; }
        for (int c = 0; c < second * 30; c++) { spoilt.a[Q][c] = spoilt.a[DOUT][c] = NAN; }
        op_answer(t, &clean, &dev), op_answer(t, &spoilt, &dev);
        const int first = second * 30, n = 25 * 30 - first;
        check_bits(t, "out", spoilt.a[OUT] + first, clean.a[OUT] + first, (size_t)n);
        check_bits(t, "dq", spoilt.a[DQ] + first, clean.a[DQ] + first, (size_t)n);
        check_bits(t, "dkv", spoilt.a[DKV] + first / 3, clean.a[DKV] + first / 3, (size_t)n / 3);
        check_bits(t, "dentries", spoilt.a[DENTRIES] + 40, clean.a[DENTRIES] + 40, 60);
        op_problem_free(&clean), op_problem_free(&spoilt);
    }
    device_free(&dev);
}

#if defined(__CUDACC__) && !defined(EXACT)
// ---- tensor cores (flash_sparse.h): each element within its bound, to first order, as the header has it ----

static const double ROUNDED = 0x1p-8;       // of bf16
static const double FLOAT_ERROR = 0x1p-15;  // relative: sums in float, exp of the hardware

// value += a * b
static void add_bounded(double* value, double* error, double a, double a_error, double b) {
    *value += a * b;
    *error += (a_error + FLOAT_ERROR * fabs(a)) * fabs(b);
}

// head h of position n: x and e, the bounds, of what the op writes
static void bounds_of_row(double* const* x, double* const* e, double** key, int n_keys, const int* d, int n, int h) {
    const int D = d['D'], at = (n * d['H'] + h) * D;
    const double scale = 1.0 / sqrt((double)D), *q = x[Q] + at, *dout = x[DOUT] + at;
    double *att = (double*)new_array((size_t)n_keys, sizeof(double)), total = exp(x[SINKS][h]), delta = 0.0, size = 0.0;
    for (int k = 0; k < n_keys; k++) {
        double dot = 0.0;
        for (int c = 0; c < D; c++) { dot += q[c] * key[k][c]; }
        total += att[k] = exp(dot * scale);
    }
    const double sink = exp(x[SINKS][h]) / total;
    for (int k = 0; k < n_keys; k++) {
        att[k] /= total;
        for (int c = 0; c < D; c++) {
            add_bounded(x[OUT] + at + c, e[OUT] + at + c, att[k], ROUNDED * att[k], key[k][c]);
            delta += att[k] * dout[c] * key[k][c], size += att[k] * fabs(dout[c] * key[k][c]);
        }
    }
    double delta_error = FLOAT_ERROR * size;  // it is dout . out, and out is rounded
    for (int c = 0; c < D; c++) { delta_error += ROUNDED * fabs(dout[c] * x[OUT][at + c]); }
    x[DSINKS][h] -= sink * delta, e[DSINKS][h] += sink * (delta_error + FLOAT_ERROR * size);
    for (int k = 0; k < n_keys; k++) {
        const int of_window = key[k] >= x[KV] && key[k] < x[KV] + d['M'] * D, to = of_window ? DKV : DENTRIES;
        const ptrdiff_t row = key[k] - x[of_window ? KV : ENTRIES];
        double datt = 0.0, sizes = size;
        for (int c = 0; c < D; c++) { datt += dout[c] * key[k][c], sizes += fabs(dout[c] * key[k][c]); }
        const double ds = att[k] * (datt - delta) * scale;
        const double ds_error = att[k] * (FLOAT_ERROR * sizes + delta_error) * scale;
        for (int c = 0; c < D; c++) {
            add_bounded(x[DQ] + at + c, e[DQ] + at + c, ds, ROUNDED * fabs(ds) + ds_error, key[k][c]);
            add_bounded(x[to] + row + c, e[to] + row + c, ds, 2 * ROUNDED * fabs(ds) + ds_error, q[c]);
            add_bounded(x[to] + row + c, e[to] + row + c, att[k], 2 * ROUNDED * att[k], dout[c]);
        }
    }
    free(att);
}

// lists of entries that need not have ended, of many lengths: none, of one entry, all
static void fill_any_lists(int* chosen, const int* d) {
    const int K = d['K'], lengths[] = {K, 1, 0, K / 2, K - 1, 64};
    for (int i = 0; i < d['N'] * K; i++) {
        const int n = i / K, k = i % K;
        chosen[i] = k < lengths[n % 6] ? n % 3 + k + (k > 9) : -1;
    }
}

// the last head has no sink, and all its scores are so far below 0 that exp(-score) is beyond float
static void set_far_head(OpProblem* p) {
    const int D = p->d['D'], H = p->d['H'];
    float far = 1.0f;
    while (far < 128.0f * sqrtf((float)D)) { far *= 2.0f; }
    for (int u = 0; u < p->d['M']; u++) { p->a[KV][(u + 1) * D - 1] = 1.0f; }
    for (int e = 0; e < p->d['W']; e++) { p->a[ENTRIES][(e + 1) * D - 1] = 1.0f; }
    for (int n = 0; n < p->d['N']; n++) { p->a[Q][(n + 1) * H * D - 1] = -far; }
    p->a[SINKS][H - 1] = -INFINITY;
}

static void check_tensor_cores(Test* t, const int* shape, const Device* dev) {
    const int outputs[] = {OUT, DQ, DKV, DENTRIES, DSINKS};
    OpProblem p = op_problem(&sparse_attention, shape, EASY, 1);
    double *x[OP_ARRAYS] = {NULL}, *e[OP_ARRAYS] = {NULL};
    float* got[OP_ARRAYS] = {NULL};
    set_far_head(&p);
    if (shape[4] > 0) { fill_any_lists((int*)p.a[CHOSEN], p.d); }
    op_solve(&p);
    for (int i = 0; i < p.n; i++) {
        const size_t n = op_length(&p, i);
        x[i] = op_is_(&p, i, GIVEN) ? double_array(p.a[i], n) : (double*)calloc(n + 1, sizeof(double));
        e[i] = (double*)calloc(n + 1, sizeof(double));
        for (size_t j = 0; op_is_(&p, i, INDEX) && j < n; j++) { x[i][j] = ((int*)p.a[i])[j]; }
    }
    double** key = (double**)new_array((size_t)(p.d['M'] + p.d['W'] + 1), sizeof(double*));
    for (int n = 0; n < p.d['N']; n++) {
        const int n_keys = keys_double(key, x, p.d, n);
        for (int h = 0; h < p.d['H']; h++) { bounds_of_row(x, e, key, n_keys, p.d, n, h); }
    }
    for (int backward = 0; backward < 2; backward++) {
        const OpRun r = op_run_of_(backward, 0);
        op_run_(t, got, &p, &r, dev);
        for (int i = backward; i < (backward ? 5 : 1); i++) {
            const double stored = outputs[i] == DSINKS ? 0.0 : ROUNDED;
            for (size_t j = 0; j < op_length(&p, outputs[i]); j++) {
                const double want = x[outputs[i]][j], bound = e[outputs[i]][j] + stored * fabs(want);
                check(t, fabs((double)got[outputs[i]][j] - want) <= bound,
                      "%s, N %d, H %d, D %d: [%zu] found %.9g, expected %.9g, allowed %.3g",
                      sparse_attention.arrays[outputs[i]].name, shape[0], shape[1], shape[2], j,
                      (double)got[outputs[i]][j], want, bound);
            }
        }
        op_free_(got);
    }
    for (int i = 0; i < p.n; i++) { free(x[i]), free(e[i]); }
    free(key);
    op_problem_free(&p);
}

static void check_mass(Test* t, const int* shape, const Device* dev) {
    OpProblem p = op_problem(&sparse_mass, shape, EASY, 1);
    const int N = shape[0], H = shape[1], D = shape[2], K = shape[4], goes_on = shape[5];
    float* got[OP_ARRAYS] = {NULL};
    const OpRun r = op_run_of_(0, 0);
    fill_any_lists((int*)p.a[M_CHOSEN], p.d);
    op_run_(t, got, &p, &r, dev);
    for (int i = 0; i < N * K; i++) {
        const int n = i / K, entry = ((int*)p.a[M_CHOSEN])[i];
        double want = goes_on && entry >= 0 ? p.a[M_BEFORE][i] : 0.0, size = fabs(want);
        for (int h = 0; entry >= 0 && h < H; h++) {
            const float *q = p.a[M_Q] + (n * H + h) * D, *key = p.a[M_ENTRIES] + entry * D;
            double dot = 0.0;
            for (int c = 0; c < D; c++) { dot += (double)q[c] * key[c]; }
            const double weight = exp(dot / sqrt((double)D) - p.a[M_MAX][n * H + h]) * p.a[M_INV][n * H + h];
            want += weight, size += fabs(weight);
        }
        check(t, fabs(got[M_MASS][i] - want) <= FLOAT_ERROR * size,
              "mass, N %d, H %d, D %d: [%d] found %.9g, expected %.9g", N, H, D, i, (double)got[M_MASS][i], want);
    }
    op_free_(got);
    op_problem_free(&p);
}

static void test_tensor_cores(Test* t) {
    const int of[][OP_DIMS] = {
        // N, H, D, W, K, R, L, P, M: the widest; whole tiles; several chunks and two tiles of heads; no lists, slabs, a halo
        {2, 2, 512, 80, 70, 1, 2, 4, 2},   {3, 64, 128, 80, 66, 1, 3, 4, 3},
        {6, 70, 24, 160, 140, 1, 4, 4, 6}, {30, 3, 8, 72, 0, 1, 40, 4, 69},
    };
    // N, H, D, W, K, G: two tiles of heads and several chunks; not all channels; two whole chunks
    const int of_mass[][6] = {{4, 66, 512, 150, 140, 1}, {2, 3, 200, 80, 70, 0}, {6, 64, 128, 140, 128, 1}};
    Device dev = test_device(1);  // whose workspace holds what the problem before left there
    for (int i = 0; i < 4; i++) { check_tensor_cores(t, of[i], &dev); }
    for (int i = 0; i < 3; i++) { check_mass(t, of_mass[i], &dev); }
    device_free(&dev);
}

// ---- the kernels of flash_sparse_hopper.h ----

#ifdef WGMMA
// two tiles of heads, odd numbers of chunks, all channels; not all of them, a halo; as many keys as two chunks have
static const int hopper_shapes[][OP_DIMS] = {
    {2, 66, 512, 150, 140, 1, 3, 4, 2}, {4, 5, 328, 80, 62, 1, 37, 4, 40}, {2, 64, 120, 140, 127, 1, 3, 4, 2},
};

static void test_hopper(Test* t) {
    Device dev = test_device(1);
    sparse_hopper = 1;
    test_tensor_cores(t);
    for (int i = 0; i < 3; i++) { check_tensor_cores(t, hopper_shapes[i], &dev); }
    sparse_hopper = 0;
    device_free(&dev);
}
#else
static void test_hopper(Test* t) { skip(t, "not built for sm_90a"); }
#endif
#endif

int main(int argc, char** argv) {
    const Op* ops[] = {&sparse_attention, &more_heads, &sparse_mass};
    const Promise promises[] = {
        {"frozen", "the plain loop rounds as the specification says, bit for bit", test_frozen},
        {"obvious", "equal scores: the mean of what is seen, of which the sink has a share, if there is one", test_obvious},
        {"generation", "new positions against caches have the bits of one pass over the texts", test_generation},
        {"documents", "Inf and NaN in a document reach no other", test_documents},
#if defined(__CUDACC__) && !defined(EXACT)
        {"tensor cores", "bf16: every element within its own bound, of several chunks of keys", test_tensor_cores},
        {"Hopper", "the same of products of warpgroups", test_hopper},
#endif
    };
    return op_main(argc, argv, ops, 3, promises, sizeof promises / sizeof *promises);
}
