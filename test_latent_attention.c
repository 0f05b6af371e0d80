/*
Promises of llmc/ops/latent_attention.h, which follow from the tables (llmc/test/op.h): documents of several lengths, lists of
every length. And with all keys on every list it is attention.h's. dev/simt runs the CUDA kernels.
*/
#if defined(SIMT) && !defined(EXACT)
#define WGMMA  // dev/simt models it
#endif
#if defined(WGMMA) && !defined(EXACT)
static int latent_hopper;  // 1 takes the kernels of flash_latent_hopper.h, 0 those of other cards
#define FLASH_LATENT_HOPPER latent_hopper
#endif
#include "llmc/ops/attention.h"
#include "llmc/ops/latent_attention.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

// N positions, H heads of Q channels of q, of which the last R turn, and W of kv, of which the last V are the value: Q - R = W - V;
// lists of K (0: none); P is 3, the rows of places: t, first_key, behind; M keys, the last N of which are the positions' (K 0: N)
enum { QS, KV, K_ROPE, CHOSEN, PLACES, OUT, MAX, INV, DOUT, DQ, DKV, DK_ROPE };

static LatentShape shape_of(const int* d) {
    const LatentShape s = {d['N'], d['H'], d['Q'] - d['R'], d['R'], d['V'], d['K'], 1.0f / sqrtf((float)d['Q'])};
    return s;
}
static Places places_of(float* const* a, const int* d) {
    const int* p = (const int*)a[PLACES];
    const Places places = {d['N'], p, p + d['N'], p + 2 * d['N']};
    return places;
}
#define THE_PROBLEM                              \
    const LatentShape s = shape_of(d);           \
    const Places places = places_of(a, d);       \
    const int* chosen = d['K'] > 0 ? (const int*)a[CHOSEN] : NULL

static void forward_ref(float* const* a, const int* d) {
    THE_PROBLEM;
    latent_attention_forward_ref(a[OUT], a[MAX], a[INV], a[QS], a[KV], a[K_ROPE], chosen, &s, &places);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    THE_PROBLEM;
    latent_attention_forward(x[OUT], a[MAX], a[INV], x[QS], x[KV], x[K_ROPE], chosen, &s, &places, dev);
}

static void backward_ref(float* const* a, const int* d) {
    THE_PROBLEM;
    latent_attention_backward_ref(a[DQ], a[DKV], a[DK_ROPE], a[DOUT], a[QS], a[KV], a[K_ROPE], a[MAX], a[INV], chosen,
                                  d['M'], &s, &places);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    THE_PROBLEM;
    latent_attention_backward(x[DQ], x[DKV], x[DK_ROPE], x[DOUT], x[OUT], x[QS], x[KV], x[K_ROPE], a[MAX], a[INV], chosen,
                              d['M'], &s, &places, dev);
}

// documents of N/2 + 1, 1, 3 positions, and the rest; the first one begins with the keys before
static void fill_places(int* places, const int* d) {
    const int N = d['N'], before = d['M'] - N, lengths[] = {N / 2 + 1, 1, 3, N};
    for (int first = 0, i = 0; first < N; i++) {
        const int length = lengths[i] < N - first ? lengths[i] : N - first, older = first == 0 ? before : 0;
        for (int t = 0; t < length; t++) {
            const int n = first + t;
            places[n] = older + t, places[N + n] = before + first - older, places[2 * N + n] = first + length;
        }
        first += length;
    }
}

// some of the keys that a position sees, at least one, ascending
static void fill_chosen(int* chosen, const int* places, const int* d) {
    uint64_t state = seeded_stream(9);
    for (int n = 0; n < d['N']; n++) {
        const int seen = places[n] + 1, one_in = 1 + seen / (d['K'] + 1);
        int length = 0;
        for (int u = 0; u < seen && length < d['K']; u++) {
            const int is_last = u + 1 == seen && length == 0;
            if (is_last || xorshift_u32(&state) % (uint32_t)(one_in + n % 3) == 0) {
                chosen[n * d['K'] + length++] = places[d['N'] + n] + u;
            }
        }
        while (length < d['K']) { chosen[n * d['K'] + length++] = -1; }
    }
}

static void fill(float* const* a, const int* d) {
    fill_places((int*)a[PLACES], d);
    if (d['K'] > 0) { fill_chosen((int*)a[CHOSEN], (const int*)a[PLACES], d); }
}

static int is_seen(double* const* a, const int* d, int n, int u) {
    const int K = d['K'];
    if (K == 0) { return a[PLACES][d['N'] + u] == a[PLACES][d['N'] + n] && u <= n; }
    for (int k = 0; k < K; k++) {
        if ((int)a[CHOSEN][n * K + k] == u) { return 1; }
    }
    return 0;
}

static void in_double(double* const* a, const int* d) {
    const int H = d['H'], R = d['R'], A = d['Q'] - R, V = d['V'];
    for (int i = 0; i < d['N'] * H; i++) {
        const double* q = a[QS] + i * (A + R);
        double *out = a[OUT] + i * V, total = 0.0;
        for (int c = 0; c < V; c++) { out[c] = 0.0; }
        for (int u = 0; u < d['M']; u++) {
            const double* kv = a[KV] + (u * H + i % H) * (A + V);
            double dot = 0.0;
            if (!is_seen(a, d, i / H, u)) { continue; }
            for (int c = 0; c < A; c++) { dot += q[c] * kv[c]; }
            for (int c = 0; c < R; c++) { dot += q[A + c] * a[K_ROPE][u * R + c]; }
            const double e = exp(dot / sqrt((double)(A + R)));
            total += e;
            for (int c = 0; c < V; c++) { out[c] += e * kv[A + c]; }
        }
        for (int c = 0; c < V; c++) { out[c] /= total; }
    }
}

// all numbers are below 1: a score is off by rounding_walk(Q, Q) / sqrt(Q), and so is a weight, relatively; with its exponential, its
// total and the sum over keys
static double weight_error(const int* d) {
    const double n = d['Q'];
    return rounding_walk((int)n, n) / sqrt(n) + rounding_walk(2 * d['M'], 1.0) + 0x1p-22;
}

static double error(int array, const int* d) {
    const double n = d['Q'], V = d['V'], N = d['N'], one = weight_error(d);
    switch (array) {
        case OUT: return one;
        case DQ: return 4 * V / sqrt(n) * one;  // |datt - D| < 2 V, the scale, and a weight of 1 in all
        case DKV: return N * (4 * V / sqrt(n) + 1) * one / 4;
        case DK_ROPE: return d['H'] * N * (4 * V / sqrt(n) + 1) * one / 4;
        default: return -1.0;
    }
}

// other orders of sums, and exp of the hardware, which is off by 2^-21 of a score and of itself; |score| < sqrt(Q). On tensor cores
// weights are rounded to bf16
static double apart(const OpProblem* p, int array, size_t i) {
    const double Q = p->d['Q'], weights = 2.0 * weight_error(p->d) + 0x1p-19 * sqrt(Q);
    const double rounding = p->as_bf16 ? 0x1p-7 : 0.0;
    (void)i;
    switch (array) {
        case MAX: return rounding_walk((int)Q, Q) * 2.0 / sqrt(Q);
        case INV: return weights;
        default: return error(array, p->d) / weight_error(p->d) * (weights + rounding);
    }
}

// of kernels the last four are for tensor cores in bf16: several tiles of positions and chunks of keys, in both widths. Before them,
// the same on CUDA cores, and lists that are joined 1024 keys at a time
static const int shapes[][OP_DIMS] = {
    // N, H, Q, W, R, V, K, P, M
    {1, 1, 3, 2, 2, 1, 0, 3, 1},    {1, 2, 5, 5, 2, 2, 1, 3, 1},    {7, 3, 9, 13, 4, 8, 0, 3, 7},    {9, 8, 22, 18, 6, 2, 2, 3, 9},
    {33, 2, 17, 10, 10, 3, 4, 3, 33}, {20, 5, 35, 53, 2, 20, 0, 3, 20}, {50, 1, 29, 22, 12, 5, 7, 3, 50}, {24, 16, 16, 16, 8, 8, 24, 3, 24},
    {21, 3, 9, 13, 4, 8, 7, 3, 50}, {5, 2, 11, 19, 2, 10, 3, 3, 90},
    {75, 2, 11, 19, 2, 10, 0, 3, 75}, {90, 1, 76, 140, 6, 70, 40, 3, 90}, {1100, 1, 2, 2, 1, 1, 5, 3, 1100},
    {150, 2, 24, 24, 8, 8, 0, 3, 150}, {150, 1, 16, 24, 8, 16, 70, 3, 150}, {70, 1, 144, 264, 16, 136, 0, 3, 70}, {70, 2, 136, 144, 8, 16, 33, 3, 150},
#ifndef __CUDACC__
    {130, 4, 32, 41, 8, 17, 0, 3, 130}, {131, 3, 64, 112, 16, 64, 9, 3, 131}, {257, 2, 11, 45, 6, 40, 33, 3, 257}, {100, 7, 3, 4, 2, 3, 100, 3, 100},
#endif
    {0},
};

static const Op latent_attention = {
    .name = "latent_attention", .dims = "NHQWRVKPM",
    .arrays = {
        {QS, "q", "NHQ", GIVEN, 1.0f},
        {KV, "kv", "MHW", GIVEN, 1.0f},
        {K_ROPE, "k_rope", "MR", GIVEN, 1.0f},
        {CHOSEN, "chosen", "NK", GIVEN | INDEX, 0.0f, NULL, NULL, 'M'},
        {PLACES, "places", "PN", GIVEN | INDEX, 0.0f, NULL, NULL, 'M'},
        {OUT, "out", "NHV", MADE},
        {MAX, "max", "NH", MADE | FLOAT},
        {INV, "inv", "NH", MADE | FLOAT},
        {DOUT, "dout", "NHV", GIVEN, 1.0f},
        {DQ, "dq", "NHQ", GRADIENT},
        {DKV, "dkv", "MHW", GRADIENT},
        {DK_ROPE, "dk_rope", "MR", GRADIENT},
    },
    .shapes = shapes, .traits = ANYWHERE,
    .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error,
    .judged = {{9, 2, 5, 6, 2, 3, 0, 3, 9}, {14, 3, 4, 7, 2, 5, 3, 3, 25}, {6, 1, 3, 3, 2, 2, 2, 3, 6}}, .apart = apart,
};

// ---- the sum over heads of the weights of a list; G 1: it goes on from another layer's ----

enum { M_Q, M_KV, M_K_ROPE, M_MAX, M_INV, M_CHOSEN, M_PLACES, M_BEFORE, M_MASS };

static void mass_ref(float* const* a, const int* d) {
    const LatentShape s = shape_of(d);
    memcpy(a[M_MASS], a[M_BEFORE], sizeof(float) * (size_t)d['N'] * d['K']);
    latent_attention_mass_ref(a[M_MASS], a[M_Q], a[M_KV], a[M_K_ROPE], a[M_MAX], a[M_INV], (const int*)a[M_CHOSEN], d['G'], &s);
}

OP_STORED(X)
static void mass(X* const* x, float* const* a, const int* d, const Device* dev) {
    const LatentShape s = shape_of(d);
    const int* p = (const int*)a[M_PLACES];
    const Places places = {d['N'], p, p + d['N'], p + 2 * d['N']};
    device_copy(a[M_MASS], a[M_BEFORE], sizeof(float) * (size_t)d['N'] * d['K'], dev);
    latent_attention_mass(a[M_MASS], x[M_Q], x[M_KV], x[M_K_ROPE], a[M_MAX], a[M_INV], (const int*)a[M_CHOSEN], d['G'], &s, &places,
                          dev);
}

static void mass_fill(float* const* a, const int* d) {
    fill_places((int*)a[M_PLACES], d);
    fill_chosen((int*)a[M_CHOSEN], (const int*)a[M_PLACES], d);
}

// |max|, |inv| < 1: a weight is below exp(sqrt(Q) + 1)
static double mass_apart(const OpProblem* p, int array, size_t i) {
    const double Q = p->d['Q'], H = p->d['H'], most = exp(sqrt(Q) + 1.0);
    (void)array, (void)i;
    return 2.0 * (H * most * (rounding_walk((int)Q, Q) / sqrt(Q) + 0x1p-22) + rounding_walk((int)H, H * most)) +
           H * most * 0x1p-19 * sqrt(Q);
}

static const int mass_shapes[][OP_DIMS] = {
    // N, H, Q, W, R, V, K, P, M, G
    {1, 1, 3, 2, 2, 1, 1, 3, 1, 0},    {7, 3, 9, 13, 4, 8, 4, 3, 7, 1},     {33, 2, 17, 10, 10, 3, 4, 3, 33, 1},
    {75, 5, 11, 19, 2, 10, 40, 3, 75, 0}, {40, 1, 45, 50, 6, 11, 39, 3, 77, 1}, {150, 3, 24, 24, 8, 8, 70, 3, 150, 1}, {70, 2, 144, 136, 16, 8, 33, 3, 70, 0},
#ifndef __CUDACC__
    {131, 3, 64, 112, 16, 64, 9, 3, 131, 0}, {257, 2, 11, 45, 6, 40, 33, 3, 257, 1}, {100, 7, 3, 4, 2, 3, 100, 3, 100, 1},
#endif
    {0},
};

static const Op latent_mass = {
    .name = "latent_mass", .dims = "NHQWRVKPMG",
    .arrays = {
        {M_Q, "q", "NHQ", GIVEN, 1.0f},
        {M_KV, "kv", "MHW", GIVEN, 1.0f},
        {M_K_ROPE, "k_rope", "MR", GIVEN, 1.0f},
        {M_MAX, "max", "NH", GIVEN | FLOAT, 1.0f},
        {M_INV, "inv", "NH", GIVEN | FLOAT, 1.0f},
        {M_CHOSEN, "chosen", "NK", GIVEN | INDEX, 0.0f, NULL, NULL, 'M'},
        {M_PLACES, "places", "PN", GIVEN | INDEX, 0.0f, NULL, NULL, 'M'},
        {M_BEFORE, "before", "NK", GIVEN | FLOAT, 1.0f},
        {M_MASS, "mass", "NK", MADE | FLOAT},
    },
    .shapes = mass_shapes, .traits = ANYWHERE,
    .fill = mass_fill,
    .forward_ref = mass_ref, .forward = OP_FAST(mass), .apart = mass_apart,
};

// ---- beside the table ----

// with all keys on every list, or without lists: attention of one row, whose keys have their RoPE part in every head
static void test_attention(Test* t) {
    enum { N = 75, H = 3, A = 9, R = 6, V = A + R, Q = A + R, W = A + V };
    const AttentionShape whole = {1, N, 0, N, H, H, Q, 0, 1.0f / sqrtf((float)Q), H * Q, N * H * Q, H * Q, N * H * Q, H * Q, N * H * Q};
    const LatentShape s = {N, H, A, R, V, N, whole.scale};
    float *q = random_array(N * H * Q, 1.0f, 1), *kv = random_array(N * H * W, 1.0f, 2), *k_rope = random_array(N * R, 1.0f, 3);
    float *k = (float*)new_array(N * H * Q, sizeof(float)), *v = (float*)new_array(N * H * Q, sizeof(float));
    float *want = (float*)new_array(N * H * V, sizeof(float)), *found = (float*)new_array(N * H * V, sizeof(float));
    int *lists = (int*)new_array(N * N, sizeof(int)), *places = (int*)new_array(3 * N, sizeof(int));
    for (int n = 0; n < N; n++) {
        places[n] = n, places[N + n] = 0, places[2 * N + n] = N;
        for (int u = 0; u < N; u++) { lists[n * N + u] = u <= n ? u : -1; }
        for (int h = 0; h < H; h++) {
            const float* from = kv + (n * H + h) * W;
            memcpy(k + (n * H + h) * Q, from, sizeof(float) * A);
            memcpy(k + (n * H + h) * Q + A, k_rope + n * R, sizeof(float) * R);
            memcpy(v + (n * H + h) * Q, from + A, sizeof(float) * V);
        }
    }
    Device dev;
    device_init(&dev, 2);
    float *d_q = to_device(q, N * H * Q, &dev), *d_kv = to_device(kv, N * H * W, &dev), *d_k_rope = to_device(k_rope, N * R, &dev);
    float *d_k = to_device(k, N * H * Q, &dev), *d_v = to_device(v, N * H * Q, &dev), *out = to_device(want, N * H * V, &dev);
    float *max = to_device(want, N * H, &dev), *inv = to_device(want, N * H, &dev);
    int *d_lists = ints_to_device(lists, N * N, &dev), *d_places = ints_to_device(places, 3 * N, &dev);
    const Places p = {N, d_places, d_places + N, d_places + 2 * N};
    grouped_attention_forward(out, max, inv, d_q, d_k, d_v, &whole, &dev);
    device_download(want, out, sizeof(float) * N * H * V, &dev);
    for (int listed = 0; listed < 2; listed++) {
        latent_attention_forward(out, max, inv, d_q, d_kv, d_k_rope, listed ? d_lists : NULL, &s, &p, &dev);
        device_download(found, out, sizeof(float) * N * H * V, &dev);
        if (!FAST_KERNELS) { check_bits(t, listed ? "all keys on the lists" : "no lists", found, want, N * H * V); }
        for (int i = 0; i < N * H * V && FAST_KERNELS; i++) {  // a mean of numbers below 1, by two orders of sums
            check(t, fabsf(found[i] - want[i]) <= 1e-5f, "out %d: found %.9g, expected %.9g", i, (double)found[i], (double)want[i]);
        }
    }
    device_drop(d_q), device_drop(d_kv), device_drop(d_k_rope), device_drop(d_k), device_drop(d_v), device_drop(out);
    device_drop(max), device_drop(inv), device_drop(d_lists), device_drop(d_places);
    device_free(&dev);
    free(q), free(kv), free(k_rope), free(k), free(v), free(want), free(found), free(lists), free(places);
}

// In generation: the last two positions of texts of several lengths, whose keys lie in caches, in the first rows of each
// text's ROOM. What is behind them is never read
enum { TEXTS = 4, ROOM = 90 };

// `apart`: allowed, of a mean of values below 1
OP_STORED(X)
static void check_generation(Test* t, X* type, double apart, int with_lists, const Device* dev) {
    enum { N = 2 * TEXTS, H = 2, A = 8, R = 8, V = 16, Q = A + R, W = A + V, K = 40, CACHE = TEXTS * ROOM };
    static const int lengths[TEXTS] = {90, 2, 70, 33};
    const LatentShape s = {N, H, A, R, V, K, 1.0f / sqrtf((float)Q)};
    float *q = random_array(N * H * Q, 1.0f, 1), *kv = random_array(CACHE * H * W, 1.0f, 2), *k_rope = random_array(CACHE * R, 1.0f, 3);
    float *want = filled_array(N * H * V, NAN), *max = filled_array(N * H, NAN), *inv = filled_array(N * H, NAN);
    int places[2 * N], chosen[N * K];
    if (sizeof(X) < sizeof(float)) { op_store_bf16(q, N * H * Q), op_store_bf16(kv, CACHE * H * W), op_store_bf16(k_rope, CACHE * R); }
    for (int n = 0; n < N; n++) {
        const int text = n / 2, position = lengths[text] - 2 + n % 2, step = position / K + 1;
        places[n] = position, places[N + n] = text * ROOM;
        for (int k = 0; k < K; k++) { chosen[n * K + k] = k * step <= position ? text * ROOM + k * step : -1; }
    }
    for (int row = 0; row < CACHE; row++) {
        if (row % ROOM < lengths[row / ROOM]) { continue; }
        for (int c = 0; c < H * W; c++) { kv[row * H * W + c] = NAN; }
        for (int c = 0; c < R; c++) { k_rope[row * R + c] = NAN; }
    }
    const Places here = {N, places, places + N, NULL};
    latent_attention_forward_ref(want, max, inv, q, kv, k_rope, with_lists ? chosen : NULL, &s, &here);
    X *q_d = op_up_(type, q, N * H * Q, dev), *kv_d = op_up_(type, kv, CACHE * H * W, dev), *k_rope_d = op_up_(type, k_rope, CACHE * R, dev);
    X* out = op_up_(type, want, N * H * V, dev);
    float *max_d = to_device(max, N * H, dev), *inv_d = to_device(inv, N * H, dev);
    int *places_d = ints_to_device(places, 2 * N, dev), *chosen_d = ints_to_device(chosen, N * K, dev);
    const Places there = {N, places_d, places_d + N, NULL};
    float* found = filled_array(N * H * V, NAN);
    latent_attention_forward(out, max_d, inv_d, q_d, kv_d, k_rope_d, with_lists ? chosen_d : NULL, &s, &there, dev);
    op_down_(found, out, N * H * V, dev);
    if (apart == 0.0) { check_bits(t, "new positions", found, want, N * H * V); }
    for (int i = 0; i < N * H * V && apart > 0.0; i++) {
        check(t, fabs((double)found[i] - (double)want[i]) <= apart, "out %d: found %.9g, expected %.9g", i, (double)found[i], (double)want[i]);
    }
    device_drop(q_d), device_drop(kv_d), device_drop(k_rope_d), device_drop(max_d), device_drop(inv_d);
    device_drop(places_d), device_drop(chosen_d);
    free(q), free(kv), free(k_rope), free(want), free(max), free(inv), free(found);
}

static void test_generation(Test* t) {
    for (int i = 0; i < 2 * N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i / 2));
        check_generation(t, (float*)NULL, FAST_KERNELS ? 1e-5 : 0.0, i % 2, &dev);
#if defined(__CUDACC__) && !defined(EXACT)
        check_generation(t, (OpBf16*)NULL, 0x1p-7, i % 2, &dev);  // weights and results are rounded
#endif
        device_free(&dev);
    }
}

#if defined(__CUDACC__) && !defined(EXACT)
// ---- tensor cores (flash_latent.h): each element within its bound, to first order, as the header has it ----

static const double ROUNDED = 0x1p-8;       // of bf16
static const double FLOAT_ERROR = 0x1p-15;  // relative: sums in float, exp of the hardware

// value += a * b, where a is off by a_error
static void add_bounded(double* value, double* error, double a, double a_error, double b) {
    *value += a * b;
    *error += (a_error + FLOAT_ERROR * fabs(a)) * fabs(b);
}

// channel c of the key of row u, head h, and its array
static size_t key_at(const int* d, int u, int h, int c, int* array) {
    const int A = d['Q'] - d['R'];
    *array = c < A ? KV : K_ROPE;
    return c < A ? ((size_t)u * d['H'] + h) * d['W'] + c : (size_t)u * d['R'] + (c - A);
}

// head h of position n: x and e, the bounds, of what the op writes
static void bounds_of_row(double* const* x, double* const* e, const int* d, int n, int h) {
    const int A = d['Q'] - d['R'], V = d['V'], M = d['M'], at = n * d['H'] + h;
    const double scale = 1.0 / sqrt((double)d['Q']), *q = x[QS] + at * d['Q'], *dout = x[DOUT] + at * V;
    double *att = (double*)new_array((size_t)M, sizeof(double)), total = 0.0, delta = 0.0, size = 0.0, delta_error = 0.0;
    int of;
    for (int u = 0; u < M; u++) {
        double dot = 0.0;
        if (!is_seen(x, d, n, u)) { continue; }
        for (int c = 0; c < d['Q']; c++) {
            const size_t i = key_at(d, u, h, c, &of);
            dot += q[c] * x[of][i];
        }
        total += att[u] = exp(dot * scale);
    }
    for (int u = 0; u < M; u++) {
        const double* value = x[KV] + (u * d['H'] + h) * d['W'] + A;
        att[u] = att[u] > 0.0 ? att[u] / total : 0.0;
        for (int c = 0; c < V && att[u] > 0.0; c++) {
            add_bounded(x[OUT] + at * V + c, e[OUT] + at * V + c, att[u], ROUNDED * att[u], value[c]);
            delta += att[u] * dout[c] * value[c], size += att[u] * fabs(dout[c] * value[c]);
        }
    }
    for (int c = 0; c < V; c++) { delta_error += ROUNDED * fabs(dout[c] * x[OUT][at * V + c]); }
    for (int u = 0; u < M; u++) {
        double datt = 0.0, sizes = size, *dkv = x[DKV] + (u * d['H'] + h) * d['W'], *dkv_error = e[DKV] + (u * d['H'] + h) * d['W'];
        const double* value = x[KV] + (u * d['H'] + h) * d['W'] + A;
        if (att[u] == 0.0) { continue; }
        for (int c = 0; c < V; c++) {
            datt += dout[c] * value[c], sizes += fabs(dout[c] * value[c]);
            add_bounded(dkv + A + c, dkv_error + A + c, att[u], ROUNDED * att[u], dout[c]);
        }
        const double ds = att[u] * (datt - delta) * scale;
        const double ds_error = ROUNDED * fabs(ds) + att[u] * scale * (delta_error + FLOAT_ERROR * sizes);
        for (int c = 0; c < d['Q']; c++) {
            const size_t i = key_at(d, u, h, c, &of);
            add_bounded(x[DQ] + at * d['Q'] + c, e[DQ] + at * d['Q'] + c, ds, ds_error, x[of][i]);
            add_bounded((of == KV ? x[DKV] : x[DK_ROPE]) + i, (of == KV ? e[DKV] : e[DK_ROPE]) + i, ds, ds_error, q[c]);
        }
    }
    free(att);
}

// empty_from: positions from there on have empty lists, so that nobody sees their own keys; 0: none
static void check_tensor_cores(Test* t, const int* shape, int empty_from, const Device* dev) {
    static const int outputs[] = {OUT, DQ, DKV, DK_ROPE};
    OpProblem p = op_problem(&latent_attention, shape, EASY, 1);
    double *x[OP_ARRAYS] = {NULL}, *e[OP_ARRAYS] = {NULL};
    float* got[OP_ARRAYS] = {NULL};
    for (int i = empty_from * p.d['K']; empty_from > 0 && i < p.d['N'] * p.d['K']; i++) { ((int*)p.a[CHOSEN])[i] = -1; }
    op_solve(&p);
    for (int i = 0; i < p.n; i++) {
        const size_t n = op_length(&p, i);
        x[i] = op_is_(&p, i, GIVEN) ? double_array(p.a[i], n) : (double*)calloc(n + 1, sizeof(double));
        e[i] = (double*)calloc(n + 1, sizeof(double));
        for (size_t j = 0; op_is_(&p, i, INDEX) && j < n; j++) { x[i][j] = ((int*)p.a[i])[j]; }
    }
    for (int i = 0; i < p.d['N'] * p.d['H']; i++) { bounds_of_row(x, e, p.d, i / p.d['H'], i % p.d['H']); }
    for (int backward = 0; backward < 2; backward++) {
        const OpRun r = op_run_of_(backward, 0);
        op_run_(t, got, &p, &r, dev);
        for (int i = backward; i < (backward ? 4 : 1); i++) {
            for (size_t j = 0; j < op_length(&p, outputs[i]); j++) {
                const double want = x[outputs[i]][j], bound = e[outputs[i]][j] + ROUNDED * fabs(want);
                check(t, fabs((double)got[outputs[i]][j] - want) <= bound, "%s, N %d: [%zu] found %.9g, expected %.9g, allowed %.3g",
                      latent_attention.arrays[outputs[i]].name, shape[0], j, (double)got[outputs[i]][j], want, bound);
            }
        }
        op_free_(got);
    }
    for (int i = 0; i < p.n; i++) { free(x[i]), free(e[i]); }
    op_problem_free(&p);
}

static void check_mass(Test* t, const int* shape, const Device* dev) {
    OpProblem p = op_problem(&latent_mass, shape, EASY, 1);
    const int *d = p.d, N = d['N'], H = d['H'], Q = d['Q'], R = d['R'], A = Q - R, K = d['K'];
    float* got[OP_ARRAYS] = {NULL};
    const OpRun r = op_run_of_(0, 0);
    op_run_(t, got, &p, &r, dev);
    for (int i = 0; i < N * K; i++) {
        const int n = i / K, u = ((int*)p.a[M_CHOSEN])[i];
        double want = d['G'] && u >= 0 ? p.a[M_BEFORE][i] : 0.0, size = fabs(want);
        for (int h = 0; u >= 0 && h < H; h++) {
            const float *q = p.a[M_Q] + (n * H + h) * Q, *key = p.a[M_KV] + (u * H + h) * d['W'], *turns = p.a[M_K_ROPE] + u * R;
            double dot = 0.0;
            for (int c = 0; c < Q; c++) { dot += (double)q[c] * (c < A ? key[c] : turns[c - A]); }
            const double weight = exp(dot / sqrt((double)Q) - p.a[M_MAX][n * H + h]) * p.a[M_INV][n * H + h];
            want += weight, size += fabs(weight);
        }
        check(t, fabs(got[M_MASS][i] - want) <= FLOAT_ERROR * size, "mass, N %d, H %d, Q %d: [%d] found %.9g, expected %.9g", N, H, Q, i,
              (double)got[M_MASS][i], want);
    }
    op_free_(got);
    op_problem_free(&p);
}

static void test_tensor_cores(Test* t) {
    const int of[][OP_DIMS] = {
        // N, H, Q, W, R, V, K, P, M: chunks and tiles, all keys and lists; as wide as it goes; more keys than positions
        {150, 2, 24, 24, 8, 8, 0, 3, 150}, {150, 1, 64, 80, 16, 32, 70, 3, 150}, {70, 1, 256, 448, 64, 256, 0, 3, 70},
        {70, 2, 136, 144, 8, 16, 33, 3, 150},
    };
    // ... G: one head; several tiles and chunks, from another layer's; as wide as it goes; two chunks of a block
    const int of_mass[][OP_DIMS] = {
        {70, 1, 24, 24, 8, 8, 33, 3, 70, 0},    {150, 3, 144, 136, 16, 8, 70, 3, 300, 1},
        {40, 2, 256, 448, 64, 256, 33, 3, 40, 0}, {20, 2, 24, 24, 8, 8, 600, 3, 1300, 1},
    };
    Device dev = test_device(1);
    for (int i = 0; i < 4; i++) { check_tensor_cores(t, of[i], 0, &dev); }
    for (int i = 0; i < 4; i++) { check_mass(t, of_mass[i], &dev); }
    device_free(&dev);
}

// ---- the kernels of flash_latent_hopper.h ----

#ifdef WGMMA
// several tiles of positions and keys, and chunks of both, in each width: lists, more keys than positions; channels that end
// within 64, all keys; as wide as GLM-5; tiles of positions that see nothing, and of keys that nobody sees
static const int hopper_shapes[][OP_DIMS] = {
    {300, 2, 192, 256, 64, 128, 120, 3, 350}, {200, 1, 136, 216, 24, 104, 0, 3, 200}, {200, 1, 256, 448, 64, 256, 90, 3, 200},
    {300, 1, 16, 24, 8, 16, 40, 3, 300},
};
static const int hopper_empty_from[] = {0, 0, 0, 128};

static void test_hopper(Test* t) {
    Device dev = test_device(1);  // whose workspace holds what the problem before left there
    latent_hopper = 1;
    test_tensor_cores(t);
    test_generation(t);
    for (int i = 0; i < 4; i++) { check_tensor_cores(t, hopper_shapes[i], hopper_empty_from[i], &dev); }
    latent_hopper = 0;
    device_free(&dev);
}
#else
static void test_hopper(Test* t) { skip(t, "not built for sm_90a"); }
#endif
#endif

#ifdef __CUDACC__
static void ask_too_much(void* device) {
    const Device* dev = (const Device*)device;
    latent_shared_bytes_(latent_most_channels(dev) + 1, dev);
}
#endif

// what a run asks before it begins is what kernels refuse
static void test_most(Test* t) {
    Device dev = test_device(1);
    const int most = latent_most_channels(&dev);
    check(t, most >= 3 * 512, "heads of %d channels at most", most);
#ifdef __CUDACC__
    check(t, latent_shared_bytes_(most, &dev) > 0, "%d channels are refused", most);
    check_exit(t, "a channel more", ask_too_much, &dev, 1, "need more shared memory than this GPU has");
#endif
    device_free(&dev);
}

int main(int argc, char** argv) {
    const Op* const ops[] = {&latent_attention, &latent_mass};
    const Promise own[] = {
        {"attention", "with all keys on the lists, or none, it is attention.h's", test_attention},
        {"generation", "new positions of several texts against their caches", test_generation},
        {"most", "heads that backward has no room for are known before it begins", test_most},
#if defined(__CUDACC__) && !defined(EXACT)
        {"tensor cores", "bf16: every element within its own bound", test_tensor_cores},
        {"Hopper", "the same of products of warpgroups", test_hopper},
#endif
    };
    return op_main(argc, argv, ops, 2, own, sizeof own / sizeof own[0]);
}
