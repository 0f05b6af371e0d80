/*
Promises of llmc/ops/latent_attention.h, which follow from the tables (llmc/test/op.h): documents of several lengths, lists of
every length. And with all keys on every list it is attention.h's.
*/
#include "llmc/ops/attention.h"
#include "llmc/ops/latent_attention.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

// N positions, H heads of Q channels of q, of which the last R turn, and W of kv, of which the last V are the value: Q - R = W - V;
// lists of K (0: none); P is 3, the rows of places: t, first_key, behind
enum { QS, KV, TURNING, CHOSEN, PLACES, OUT, MAX, INV, DOUT, DQ, DKV, DTURNING };

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
    latent_attention_forward_ref(a[OUT], a[MAX], a[INV], a[QS], a[KV], a[TURNING], chosen, &s, &places);
}

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    THE_PROBLEM;
    latent_attention_forward(x[OUT], a[MAX], a[INV], x[QS], x[KV], x[TURNING], chosen, &s, &places, dev);
}

static void backward_ref(float* const* a, const int* d) {
    THE_PROBLEM;
    latent_attention_backward_ref(a[DQ], a[DKV], a[DTURNING], a[DOUT], a[QS], a[KV], a[TURNING], a[MAX], a[INV], chosen, &s,
                                  &places);
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    THE_PROBLEM;
    latent_attention_backward(x[DQ], x[DKV], x[DTURNING], x[DOUT], x[QS], x[KV], x[TURNING], a[MAX], a[INV], chosen, &s, &places,
                              dev);
}

// documents of N/2 + 1, 1, 3 positions, and the rest
static void fill_places(int* places, const int* d) {
    const int N = d['N'], lengths[] = {N / 2 + 1, 1, 3, N};
    for (int first = 0, i = 0; first < N; i++) {
        const int length = lengths[i] < N - first ? lengths[i] : N - first;
        for (int t = 0; t < length; t++) {
            places[first + t] = t, places[N + first + t] = first, places[2 * N + first + t] = first + length;
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
        for (int u = 0; u < d['N']; u++) {
            const double* kv = a[KV] + (u * H + i % H) * (A + V);
            double dot = 0.0;
            if (!is_seen(a, d, i / H, u)) { continue; }
            for (int c = 0; c < A; c++) { dot += q[c] * kv[c]; }
            for (int c = 0; c < R; c++) { dot += q[A + c] * a[TURNING][u * R + c]; }
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
    return rounding_walk((int)n, n) / sqrt(n) + rounding_walk(2 * d['N'], 1.0) + 0x1p-22;
}

static double error(int array, const int* d) {
    const double n = d['Q'], V = d['V'], N = d['N'], one = weight_error(d);
    switch (array) {
        case OUT: return one;
        case DQ: return 4 * V / sqrt(n) * one;  // |datt - D| < 2 V, the scale, and a weight of 1 in all
        case DKV: return N * (4 * V / sqrt(n) + 1) * one / 4;
        case DTURNING: return d['H'] * N * (4 * V / sqrt(n) + 1) * one / 4;
        default: return -1.0;
    }
}

static const int shapes[][OP_DIMS] = {
    // N, H, Q, W, R, V, K, P
    {1, 1, 3, 2, 2, 1, 0, 3},    {1, 2, 5, 5, 2, 2, 1, 3},    {7, 3, 9, 13, 4, 8, 0, 3},    {9, 8, 22, 18, 6, 2, 2, 3},
    {33, 2, 17, 10, 10, 3, 4, 3}, {20, 5, 35, 53, 2, 20, 0, 3}, {50, 1, 29, 22, 12, 5, 7, 3}, {24, 16, 16, 16, 8, 8, 24, 3},
#ifndef __CUDACC__
    {130, 4, 32, 41, 8, 17, 0, 3}, {131, 3, 64, 112, 16, 64, 9, 3}, {257, 2, 11, 45, 6, 40, 33, 3}, {100, 7, 3, 4, 2, 3, 100, 3},
#endif
    {0},
};

static const Op latent_attention = {
    .name = "latent_attention", .dims = "NHQWRVKP",
    .arrays = {
        {QS, "q", "NHQ", GIVEN, 1.0f},
        {KV, "kv", "NHW", GIVEN, 1.0f},
        {TURNING, "turning", "NR", GIVEN, 1.0f},
        {CHOSEN, "chosen", "NK", GIVEN | INDEX, 0.0f, NULL, NULL, 'N'},
        {PLACES, "places", "PN", GIVEN | INDEX, 0.0f, NULL, NULL, 'N'},
        {OUT, "out", "NHV", MADE},
        {MAX, "max", "NH", MADE | FLOAT},
        {INV, "inv", "NH", MADE | FLOAT},
        {DOUT, "dout", "NHV", GIVEN, 1.0f},
        {DQ, "dq", "NHQ", GRADIENT},
        {DKV, "dkv", "NHW", GRADIENT},
        {DTURNING, "dturning", "NR", GRADIENT},
    },
    .shapes = shapes, .traits = ANYWHERE,
    .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
    .backward_ref = backward_ref, .backward = OP_FAST(backward),
    .in_double = in_double, .error = error,
    .judged = {{9, 2, 5, 6, 2, 3, 0, 3}, {14, 3, 4, 7, 2, 5, 3, 3}, {6, 1, 3, 3, 2, 2, 2, 3}},
};

// ---- beside the table ----

// with all keys on every list, or without lists: attention of one row, whose keys have their turning part in every head
static void test_attention(Test* t) {
    enum { N = 75, H = 3, A = 9, R = 6, V = A + R, Q = A + R, W = A + V };
    const AttentionShape whole = {1, N, 0, N, H, H, Q, 0, 1.0f / sqrtf((float)Q), H * Q, N * H * Q, H * Q, N * H * Q, H * Q, N * H * Q};
    const LatentShape s = {N, H, A, R, V, N, whole.scale};
    float *q = random_array(N * H * Q, 1.0f, 1), *kv = random_array(N * H * W, 1.0f, 2), *turning = random_array(N * R, 1.0f, 3);
    float *k = (float*)new_array(N * H * Q, sizeof(float)), *v = (float*)new_array(N * H * Q, sizeof(float));
    float *want = (float*)new_array(N * H * V, sizeof(float)), *out = (float*)new_array(N * H * V, sizeof(float));
    float *max = (float*)new_array(N * H, sizeof(float)), *inv = (float*)new_array(N * H, sizeof(float));
    int *lists = (int*)new_array(N * N, sizeof(int)), *places = (int*)new_array(3 * N, sizeof(int));
    const Places p = {N, places, places + N, places + 2 * N};
    Device dev;
    device_init(&dev, 2);
    for (int n = 0; n < N; n++) {
        places[n] = n, places[N + n] = 0, places[2 * N + n] = N;
        for (int u = 0; u < N; u++) { lists[n * N + u] = u <= n ? u : -1; }
        for (int h = 0; h < H; h++) {
            const float* from = kv + (n * H + h) * W;
            memcpy(k + (n * H + h) * Q, from, sizeof(float) * A);
            memcpy(k + (n * H + h) * Q + A, turning + n * R, sizeof(float) * R);
            memcpy(v + (n * H + h) * Q, from + A, sizeof(float) * V);
        }
    }
    grouped_attention_forward(want, max, inv, q, k, v, &whole, &dev);
    for (int listed = 0; listed < 2; listed++) {
        latent_attention_forward(out, max, inv, q, kv, turning, listed ? lists : NULL, &s, &p, &dev);
        check_bits(t, listed ? "all keys on the lists" : "no lists", out, want, N * H * V);
    }
    device_free(&dev);
    free(q), free(kv), free(turning), free(k), free(v), free(want), free(out), free(max), free(inv), free(lists), free(places);
}

// what teaches an indexer, of one layer and of a second one
static void test_mass(Test* t) {
    for (const int* d = shapes[0]; d[0]; d += OP_DIMS) {
        OpProblem p = op_problem(&latent_attention, d, 0, 0);
        const LatentShape s = shape_of(p.d);
        const Places places = places_of(p.a, p.d);
        const size_t n = (size_t)s.N * (size_t)s.topk;
        float* const* a = p.a;
        op_solve(&p);
        float *want = filled_array(n + 1, NAN), *found = filled_array(n + 1, NAN);
        for (int i = 0; i < 4 && s.topk > 0; i++) {
            Device dev;
            device_init(&dev, 1 + i / 2);
            latent_attention_mass_ref(want, a[QS], a[KV], a[TURNING], a[MAX], a[INV], (const int*)a[CHOSEN], i % 2, &s);
            latent_attention_mass(found, a[QS], a[KV], a[TURNING], a[MAX], a[INV], (const int*)a[CHOSEN], i % 2, &s, &places, &dev);
            check_bits(t, i % 2 ? "mass of two layers" : "mass", found, want, n);
            device_free(&dev);
        }
        free(want), free(found);
        op_problem_free(&p);
    }
}

int main(int argc, char** argv) {
    const Op* const ops[] = {&latent_attention};
    const Promise own[] = {
        {"attention", "with all keys on the lists, or none, it is attention.h's", test_attention},
        {"mass", "equals the plain loop, of one layer and added to another's", test_mass},
    };
    return op_main(argc, argv, ops, 1, own, sizeof own / sizeof own[0]);
}
