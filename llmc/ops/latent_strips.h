/*
latent_attention.h on a CPU: strips of positions, and products of a few rows with the keys of a head. Nothing here is of
use beside it.
*/
#ifndef LLMC_LATENT_STRIPS_H
#define LLMC_LATENT_STRIPS_H
#ifndef __CUDACC__
#include "entry_windows.h"  // Places
#include "gemm.h"           // gemm_pack_matrix_, gemm_panel_, TILE_M, TILE_N
#include "latent_shape.h"   // LatentShape, latent_keys, latent_key
#include <float.h>

// A strip of TILE_N positions at a time, in the lanes, with all keys that any of them sees; weights of those that a
// position does not see are 0. As in attention.h, a strip of weights (keys, TILE_N) is the packed operand of the next
// product. Keys of a strip are rows that follow each other, and are packed once for all strips of a head; where a strip
// sees less than a third of these, it has a packed copy of its own.

// keys of a head, packed: by_u for chains over channels, in tiles of TILE_M keys; by_i for chains over keys, in tiles
// of TILE_M channels. NULL: nobody asks for them
typedef struct {
    float *k_by_u, *v_by_u, *k_by_i, *k_rope_by_i, *v_by_i;
    int depth;  // keys
} LatentPacked_;

// which keys a strip has, the same for all heads
typedef struct {
    int n, first, n_keys;   // positions from `first` on; keys
    int low;                // the first of them; the others follow
    int* rows;              // (n_keys) of kv, ascending, where it has a packed copy of its own; or NULL
    uint64_t* seen;         // (n_keys) bit j: position j sees it
} LatentKeys_;

typedef struct {
    LatentKeys_ keys;       // of the strip at hand
    int is_packed;          // `all` is of the head at hand
    LatentPacked_ all, own; // of all keys; of the strip's
    float *q, *dout;        // of the strip, turned: (channels, TILE_N)
    float *att, *ds;        // (keys, TILE_N)
    float *turned, *part;   // packed weights, results on their way; rows of gradients that go on
    float *dk, *dv;         // of a head: (n_keys, dn + dr), (n_keys, dv)
} LatentStrip_;

// keys of a pass: rows 0 .. n_rows - 1 of kv
static inline int latent_rows_(const LatentShape* s, const Places* places) {
    int most = 0;
    for (int n = 0; n < s->N; n++) {
        const int end = places->first_key[n] + places->t[n] + 1;
        most = end > most ? end : most;
    }
    return most;
}

static inline size_t latent_round_(size_t n) { return (n + 63) / 64 * 64 + 64; }

// the next n floats of room from `base` on, of which *used are taken; base NULL: they are only counted
static inline float* latent_take_(float* base, size_t* used, size_t n) {
    float* at = base ? base + *used : NULL;
    *used += n;
    return at;
}

// back: backward asks for more than forward
static inline LatentPacked_ latent_packed_(float* base, size_t* used, size_t n, const LatentShape* s, int back) {
    const size_t V = latent_round_((size_t)s->dv);
    LatentPacked_ x;
    memset(&x, 0, sizeof x);
    x.k_by_u = latent_take_(base, used, n * latent_round_(latent_q_(s)));
    if (back) {
        x.v_by_u = latent_take_(base, used, n * V);
        x.k_by_i = latent_take_(base, used, n * latent_round_((size_t)s->dn));
        x.k_rope_by_i = latent_take_(base, used, n * latent_round_((size_t)s->dr));
    } else {
        x.v_by_i = latent_take_(base, used, n * V);
    }
    return x;
}

// a thread's scratch, of so many rows of keys; how many floats that is goes to *used
static inline LatentStrip_ latent_lay_(float* base, size_t* used, const LatentShape* s, int n_rows, int back) {
    const size_t n = latent_round_((size_t)n_rows), Q = latent_round_(latent_q_(s)), V = latent_round_((size_t)s->dv);
    const size_t widest = Q > V ? Q : V;
    LatentStrip_ x;
    memset(&x, 0, sizeof x);
    *used = 0;
    x.all = latent_packed_(base, used, n, s, back);
    x.own = latent_packed_(base, used, n, s, back);
    x.q = latent_take_(base, used, TILE_N * Q);
    x.att = latent_take_(base, used, n * TILE_N);
    x.ds = latent_take_(base, used, n * TILE_N);
    x.turned = latent_take_(base, used, n * TILE_N + widest * TILE_N);  // packed weights, then a panel
    if (!back) { return x; }
    x.dout = latent_take_(base, used, TILE_N * V);
    x.part = latent_take_(base, used, n * widest);
    x.dk = latent_take_(base, used, n * Q);
    x.dv = latent_take_(base, used, n * V);
    return x;
}

static inline size_t latent_floats_(const LatentShape* s, int n_rows, int back) {
    size_t n;
    latent_lay_(NULL, &n, s, n_rows, back);
    return n;
}

static inline LatentStrip_ latent_scratch_(float* base, const LatentShape* s, int n_rows, int back) {
    size_t n;
    return latent_lay_(base, &n, s, n_rows, back);
}

static inline size_t latent_row_(const LatentKeys_* k, int u) { return (size_t)(k->rows ? k->rows[u] : k->low + u); }

// rows low .. low + n - 1 of kv have all keys that a strip sees; low is a multiple of TILE_M
typedef struct {
    int low, n;
} LatentSpan_;

// of the strip of positions from `first` on
static inline LatentSpan_ latent_span_(int first, const int* chosen, const LatentShape* s, const Places* places) {
    int low = INT_MAX, high = -1;
    for (int n = first; n < gemm_min_(first + TILE_N, s->N); n++) {
        const int n_keys = latent_keys(s, places, chosen, (size_t)n);
        if (n_keys == 0) { continue; }
        const int from = (int)latent_key(s, places, chosen, (size_t)n, 0);
        const int to = (int)latent_key(s, places, chosen, (size_t)n, n_keys - 1);
        low = from < low ? from : low, high = to > high ? to : high;
    }
    const int begin = high < 0 ? 0 : low - low % TILE_M;
    const LatentSpan_ span = {begin, high + 1 - begin};
    return span;
}

// who sees which keys of its span. rows, seen: room for as many; seen is all 0
static inline LatentKeys_ latent_keys_(int first, LatentSpan_ span, int* rows, uint64_t* seen, const int* chosen,
                                       const LatentShape* s, const Places* places) {
    LatentKeys_ k = {gemm_min_(TILE_N, s->N - first), first, span.n, span.low, NULL, seen};
    int n_seen = 0;
    for (int j = 0; j < k.n; j++) {
        const size_t n = (size_t)(first + j);
        const int n_keys = latent_keys(s, places, chosen, n);
        for (int i = 0; i < n_keys; i++) {
            seen[(int)latent_key(s, places, chosen, n, i) - span.low] |= (uint64_t)1 << j;
        }
    }
    for (int u = 0; u < span.n; u++) { n_seen += seen[u] != 0; }
    if (n_seen >= span.n / 3) { return k; }
    k.rows = rows, k.n_keys = 0;
    for (int u = 0; u < span.n; u++) {
        const uint64_t by = seen[u];
        if (by) { rows[k.n_keys] = span.low + u, seen[k.n_keys++] = by; }
    }
    return k;
}

// of all strips, whose spans have n_rows rows together
static inline size_t latent_keys_floats_(const LatentShape* s, size_t n_rows) {
    const size_t n_strips = (size_t)ceil_div(s->N, TILE_N);
    return latent_round_(3 * n_rows + n_strips * sizeof(LatentKeys_) / sizeof(float));
}

static inline size_t latent_all_keys_floats_(const int* chosen, const LatentShape* s, const Places* places) {
    int64_t n_rows = 0;
    #pragma omp parallel for reduction(+ : n_rows)
    for (int first = 0; first < s->N; first += TILE_N) { n_rows += latent_span_(first, chosen, s, places).n; }
    return latent_keys_floats_(s, (size_t)n_rows);
}

// into room of so many floats
static inline const LatentKeys_* latent_all_keys_(float* room, const int* chosen, const LatentShape* s,
                                                  const Places* places) {
    const int n = (int)ceil_div(s->N, TILE_N);
    LatentKeys_* keys = (LatentKeys_*)room;
    uint64_t* seen = (uint64_t*)(keys + n);
    size_t n_rows = 0;
    #pragma omp parallel for
    for (int i = 0; i < n; i++) {
        const LatentSpan_ span = latent_span_(i * TILE_N, chosen, s, places);
        keys[i].low = span.low, keys[i].n_keys = span.n;
    }
    for (int i = 0; i < n; i++) {
        keys[i].seen = seen + n_rows;
        n_rows += (size_t)keys[i].n_keys;
    }
    #pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < n; i++) {
        const LatentSpan_ span = {keys[i].low, keys[i].n_keys};
        int* rows = (int*)(seen + n_rows) + (keys[i].seen - seen);
        memset(keys[i].seen, 0, sizeof(uint64_t) * (size_t)span.n);
        keys[i] = latent_keys_(i * TILE_N, span, rows, keys[i].seen, chosen, s, places);
    }
    return keys;
}

// of the lanes of w those of positions that do not see the key become `other`
static inline void latent_mask_(float* w, uint64_t seen, float other) {
    if (seen == ((uint64_t)1 << TILE_N) - 1) { return; }
    for (int v = 0; v < TILE_V; v++) {
        const uint32_t bits = (uint32_t)(seen >> (v * VLANES));
        for (int j = 0; j < VLANES; j++) { w[v * VLANES + j] = bits & 1u << j ? w[v * VLANES + j] : other; }
    }
}

// Are all n numbers of each row finite? Where one is not, 0 times it would reach who has not chosen it
static inline int latent_is_finite_(const float* from, size_t stride, const int* rows, int n_rows, int n) {
    uint32_t is_bad = 0;
    for (int r = 0; r < n_rows; r++) {
        const float* x = from + (size_t)(rows ? rows[r] : r) * stride;
        #pragma omp simd reduction(| : is_bad)
        for (int c = 0; c < n; c++) { is_bad |= !(fabsf(x[c]) <= FLT_MAX); }
    }
    return !is_bad;
}

// ... of the keys of a strip
static inline int latent_keys_are_finite_(const float* from, size_t stride, const LatentKeys_* k, int n) {
    return latent_is_finite_(k->rows ? from : from + (size_t)k->low * stride, stride, k->rows, k->n_keys, n);
}

// rows of kv of head h, channels from `at` on
static inline const float* latent_of_head_(const float* kv, int h, int at, const LatentShape* s) {
    return kv + (size_t)h * latent_kv_(s) + at;
}

// packed tiles of so many keys, in rows of kv or the first ones: `n` channels, then dr of what turns, if there is
// something
static inline void latent_pack_keys_(float* packed, const int* rows, int n_keys, const float* kv, int n,
                                     const float* k_rope, const LatentShape* s) {
    const size_t stride = (size_t)s->H * latent_kv_(s), depth = (size_t)(n + (k_rope ? s->dr : 0)), R = (size_t)s->dr;
    for (int u = 0; u < n_keys; u += TILE_M) {
        float* tile = packed + (size_t)u * depth;
        const int valid = gemm_min_(TILE_M, n_keys - u);
        gemm_pack_matrix_(tile, gemm_from_(gemm_gathered(kv, rows, stride), u, 0), TILE_M, valid, n);
        if (!k_rope) { continue; }
        gemm_pack_matrix_(tile + (size_t)n * TILE_M, gemm_from_(gemm_gathered(k_rope, rows, R), u, 0), TILE_M, valid,
                          s->dr);
    }
}

// packed tiles of n channels over so many keys
static inline void latent_pack_channels_(float* packed, const int* rows, int n_keys, const float* from, size_t stride,
                                         int n) {
    for (int i = 0; i < n; i += TILE_M) {
        gemm_pack_matrix_(packed + (size_t)i * n_keys, gemm_gathered_transposed(from + i, rows, stride), TILE_M,
                          gemm_min_(TILE_M, n - i), n_keys);
    }
}

// rows NULL: the first n_keys
static inline void latent_pack_(LatentPacked_* x, const int* rows, int n_keys, const float* kv, const float* k_rope,
                                int h, const LatentShape* s) {
    const size_t stride = (size_t)s->H * latent_kv_(s);
    const float *key = latent_of_head_(kv, h, 0, s), *value = key + s->dn;
    x->depth = n_keys;
    latent_pack_keys_(x->k_by_u, rows, n_keys, key, s->dn, k_rope, s);
    if (x->v_by_u) { latent_pack_keys_(x->v_by_u, rows, n_keys, value, s->dv, NULL, s); }
    if (x->k_by_i) { latent_pack_channels_(x->k_by_i, rows, n_keys, key, stride, s->dn); }
    if (x->k_rope_by_i) { latent_pack_channels_(x->k_rope_by_i, rows, n_keys, k_rope, (size_t)s->dr, s->dr); }
    if (x->v_by_i) { latent_pack_channels_(x->v_by_i, rows, n_keys, value, stride, s->dv); }
}

// where the strip's keys of head h are packed; of tiles over keys a tile of channels is `depth` keys further
static inline LatentPacked_ latent_strip_packed_(LatentStrip_* x, const float* kv, const float* k_rope, int n_rows,
                                                 int h, const LatentShape* s) {
    if (x->keys.rows) {
        latent_pack_(&x->own, x->keys.rows, x->keys.n_keys, kv, k_rope, h, s);
        return x->own;
    }
    if (!x->is_packed) { latent_pack_(&x->all, NULL, n_rows, kv, k_rope, h, s); }
    x->is_packed = 1;
    LatentPacked_ from = x->all;
    const size_t first = (size_t)x->keys.low;  // a multiple of TILE_M
    from.k_by_u += first * latent_q_(s);
    if (from.v_by_u) { from.v_by_u += first * (size_t)s->dv; }
    if (from.k_by_i) { from.k_by_i += first * TILE_M; }
    if (from.k_rope_by_i) { from.k_rope_by_i += first * TILE_M; }
    if (from.v_by_i) { from.v_by_i += first * TILE_M; }
    return from;
}

// scores of head h, -Inf where a position does not see the key
static inline void latent_scores_(const LatentStrip_* x, const float* k_by_u, const float* q, int h,
                                  const LatentShape* s) {
    static const float zeros[TILE_N] = {0};
    const LatentKeys_* k = &x->keys;
    const size_t Q = latent_q_(s);
    gemm_pack_(x->q, q + ((size_t)k->first * s->H + h) * Q, s->H * Q, 1, TILE_N, k->n, (int)Q);
    gemm_panel_(x->att, TILE_N, zeros, 0, k_by_u, x->q, 0, k->n_keys, TILE_N, (int)Q, NULL);
    for (int u = 0; u < k->n_keys; u++) {
        float* w = x->att + (size_t)u * TILE_N;
        for (int j = 0; j < TILE_N; j++) { w[j] *= s->scale; }
        latent_mask_(w, k->seen[u], -INFINITY);
    }
}

// scores to weights; max, inv: of the strip's positions, H apart, written
static inline void latent_softmax_(const LatentStrip_* x, float* max, float* inv, int H) {
    const LatentKeys_* k = &x->keys;
    float top[TILE_N], sum[TILE_N] = {0};
    for (int j = 0; j < TILE_N; j++) { top[j] = -10000.0f; }
    for (int u = 0; u < k->n_keys; u++) {
        const float* w = x->att + (size_t)u * TILE_N;
        for (int j = 0; j < TILE_N; j++) { top[j] = w[j] > top[j] ? w[j] : top[j]; }
    }
    for (int u = 0; u < k->n_keys; u++) {
        float* w = x->att + (size_t)u * TILE_N;
        #pragma omp simd
        for (int j = 0; j < TILE_N; j++) { w[j] = fm_exp(w[j] - top[j]); }
        latent_mask_(w, k->seen[u], 0.0f);  // top may be no number
        for (int j = 0; j < TILE_N; j++) { sum[j] += w[j]; }
    }
    for (int j = 0; j < TILE_N; j++) { sum[j] = sum[j] == 0.0f ? 0.0f : 1.0f / sum[j]; }
    for (int u = 0; u < k->n_keys; u++) {
        float* w = x->att + (size_t)u * TILE_N;
        for (int j = 0; j < TILE_N; j++) { w[j] *= sum[j]; }
        latent_mask_(w, k->seen[u], 0.0f);
    }
    for (int j = 0; j < k->n; j++) { max[(size_t)j * H] = top[j], inv[(size_t)j * H] = sum[j]; }
}

// the same where max and inv are known
static inline void latent_weights_(const LatentStrip_* x, const float* max, const float* inv, int H) {
    const LatentKeys_* k = &x->keys;
    float top[TILE_N] = {0}, one[TILE_N] = {0};
    for (int j = 0; j < k->n; j++) { top[j] = max[(size_t)j * H], one[j] = inv[(size_t)j * H]; }
    for (int u = 0; u < k->n_keys; u++) {
        float* w = x->att + (size_t)u * TILE_N;
        #pragma omp simd
        for (int j = 0; j < TILE_N; j++) { w[j] = fm_exp(w[j] - top[j]) * one[j]; }
        latent_mask_(w, k->seen[u], 0.0f);
    }
}

// Weights of 0 change no sum but one: where products have underflowed to -0, 0 times what follows makes +0 of it. Sums
// that are 0 are therefore computed again without them, unless no weight of them is anything else: the chain over keys
// of position j and a channel, from +0; over positions of the strip's key u, from where it was
static inline float latent_channel_again_(const LatentStrip_* x, int j, const float* weights, const float* from,
                                          size_t stride) {
    float sum = 0.0f;
    for (int u = 0; u < x->keys.n_keys; u++) {
        if (!(x->keys.seen[u] >> j & 1)) { continue; }
        sum = madd(weights[(size_t)u * TILE_N + j], from[latent_row_(&x->keys, u) * stride], sum);
    }
    return sum;
}
static inline float latent_key_again_(const LatentStrip_* x, int u, float sum, const float* weights, const float* y,
                                      size_t y_stride) {
    for (int j = 0; j < x->keys.n; j++) {
        if (x->keys.seen[u] >> j & 1) { sum = madd(weights[(size_t)u * TILE_N + j], y[j * y_stride], sum); }
    }
    return sum;
}

static inline int latent_has_zero_(const float* x, int n) {
    int has = 0;
    #pragma omp simd reduction(| : has)
    for (int i = 0; i < n; i++) { has |= x[i] == 0.0f; }
    return has;
}

// rows of out, out_stride apart: the sums over keys of weights * channels, from (rows of keys, n) and packed by_i
static inline void latent_gather_(float* out, size_t out_stride, const LatentStrip_* x, const float* weights,
                                  const float* by_i, int depth, const float* from, size_t stride, int n) {
    static const float zeros[TILE_N] = {0};
    float largest[TILE_N] = {0};
    for (int u = 0; u < x->keys.n_keys; u++) {
        const float* w = weights + (size_t)u * TILE_N;
        for (int j = 0; j < TILE_N; j++) { largest[j] = fabsf(w[j]) > largest[j] ? fabsf(w[j]) : largest[j]; }
    }
    for (int i = 0; i < n; i += TILE_M) {
        const int valid = gemm_min_(TILE_M, n - i);
        gemm_panel_(x->turned, TILE_N, zeros, 0, by_i + (size_t)i * depth, weights, 0, valid, TILE_N,
                    x->keys.n_keys, NULL);
        for (int j = 0; j < x->keys.n; j++) {
            for (int c = 0; c < valid; c++) { out[j * out_stride + i + c] = x->turned[(size_t)c * TILE_N + j]; }
        }
        if (!latent_has_zero_(x->turned, valid * TILE_N)) { continue; }
        for (int j = 0; j < x->keys.n; j++) {
            for (int c = 0; c < valid && largest[j] > 0.0f; c++) {
                float* sum = out + j * out_stride + i + c;
                if (*sum == 0.0f) { *sum = latent_channel_again_(x, j, weights, from + i + c, stride); }
            }
        }
    }
}

// ---- backward ----

// ds from datt, and D
static inline void latent_dscores_(const LatentStrip_* x, float scale) {
    const LatentKeys_* k = &x->keys;
    float D[TILE_N] = {0};
    for (int u = 0; u < k->n_keys; u++) {
        const float* w = x->att + (size_t)u * TILE_N;
        float* d = x->ds + (size_t)u * TILE_N;
        latent_mask_(d, k->seen[u], 0.0f);
        for (int j = 0; j < TILE_N; j++) { D[j] = madd(w[j], d[j], D[j]); }
    }
    for (int u = 0; u < k->n_keys; u++) {
        const float* w = x->att + (size_t)u * TILE_N;
        float* d = x->ds + (size_t)u * TILE_N;
        for (int j = 0; j < TILE_N; j++) { d[j] = w[j] * (d[j] - D[j]) * scale; }
        latent_mask_(d, k->seen[u], 0.0f);
    }
}

// rows of sums (N, width), those of the strip's keys, go on with weights * y, y (n, width) rows y_stride apart
static inline void latent_scatter_(float* sums, int width, const LatentStrip_* x, const float* weights, const float* y,
                                   size_t y_stride) {
    float* panel = x->turned + latent_round_((size_t)x->keys.n_keys) * TILE_N;
    for (int u = 0; u < x->keys.n_keys; u += TILE_M) {
        gemm_pack_(x->turned + (size_t)u * x->keys.n, weights + (size_t)u * TILE_N, TILE_N, 1, TILE_M,
                   gemm_min_(TILE_M, x->keys.n_keys - u), x->keys.n);
    }
    for (int u = 0; u < x->keys.n_keys; u++) {
        memcpy(x->part + (size_t)u * width, sums + latent_row_(&x->keys, u) * width, sizeof(float) * (size_t)width);
    }
    for (int i = 0; i < width; i += TILE_N) {
        const int valid = gemm_min_(TILE_N, width - i);
        gemm_pack_(panel, y + i, 1, y_stride, TILE_N, valid, x->keys.n);
        gemm_panel_(x->part + i, (size_t)width, x->part + i, (size_t)width, x->turned, panel, 0, x->keys.n_keys, valid,
                    x->keys.n, NULL);
    }
    for (int u = 0; u < x->keys.n_keys; u++) {
        float *to = sums + latent_row_(&x->keys, u) * width, largest = 0.0f;
        const float *from = x->part + (size_t)u * width, *w = weights + (size_t)u * TILE_N;
        if (!latent_has_zero_(from, width)) {
            memcpy(to, from, sizeof(float) * (size_t)width);
            continue;
        }
        for (int j = 0; j < x->keys.n; j++) { largest = fabsf(w[j]) > largest ? fabsf(w[j]) : largest; }
        for (int c = 0; c < width; c++) {
            const int may_differ = from[c] == 0.0f && (largest > 0.0f || signbit(to[c]));
            to[c] = may_differ ? latent_key_again_(x, u, to[c], weights, y + c, y_stride) : from[c];
        }
    }
}
#endif
#endif  // LLMC_LATENT_STRIPS_H
