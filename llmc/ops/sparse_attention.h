/*
Attention of DeepSeek V4: one head of keys that all query heads share and that are values as well; a window of them,
entries behind it that stand for several tokens each (entry_windows.h), and a sink for each head, which takes a share of
every softmax and gives nothing.
    q, out (N, H*d), kv (rows of keys, d), entries (rows of entries, d)   sinks (H) float   max, inv (N, H) float, kept
    places   position n sees the keys t[n] - window + 1 .. t[n] of its document, those of them that exist...
    chosen   ...then NULL: all entries that ended; else (N, topk): of these rows of entries, ascending, -1 behind the
             last. A list is read up to its first -1. w NULL: the layer has no entries
    score = (q . key) * scale    max = the largest of sink and scores    e = exp(score - max)
    inv = 1 / (sum over keys of e + exp(sink - max))    att = e * inv    out = sum over keys of att * key
A sink of -Inf is none: what is seen has all of the softmax.
In generation places and w point into caches; a row of them has the bits that one pass over the whole text gives.
Backward, in training alone; everything is written, also for keys that nobody sees. `out` is read by tensor cores alone
(flash_sparse.h), in whose sums D is dout . out:
    datt = dout . key    D = sum over keys of att * datt    ds = att * (datt - D) * scale
    dq   = sum over keys of ds * key                                              (N, H*d)
    dkey = (sum over h, n of ds * q) + (sum over h, n of att * dout)              dkv (rows, d), dentries (n_entries, d)
    dsinks = sum over n of -(exp(sink - max) * inv) * D                           (H) float; NULL: nobody asks
sparse_attention_mass: the sum over heads of att of each entry on a list, 0 behind the last: what teaches an indexer.
sparse_most_channels: d that there is room for on this device; a CPU has for all.
Where ranks have some of the heads each (--tp), the sums over heads go on from those of heads before. With goes_on mass
does, and backward comes in steps:
    sparse_backward_begin  with the arguments of backward; sums over heads begin at 0
    sparse_backward_sums   the four of them, where heads before may write theirs: by_q and by_dout of kv, of entries
                           (fast CUDA builds may have both sums in by_q: they are added in the end)
    sparse_backward_keys   sums of some of the keys, and of some of the entries, go on through these heads
    sparse_backward_end    of all keys and entries, whose sums are whole: dkv, dentries, dsinks
Cost:   4*d flops for each head, position and key it sees, backward 10*d, mass 2*d. Beside the tensors backward keeps
        att and ds of all positions, 8 bytes for each of their keys, of as many heads at a time as SPARSE_KEPT allows,
        and of lists the positions of each entry (inverse_lists.h), 8 bytes for each entry on them. Heads that are not
        kept all at once are computed again by each sparse_backward_keys.
        C, window 128, one thread, AVX-512, gcc 12, AMD EPYC (Zen 5), its own time, the smallest of 2 or more on a
        busy machine, GFLOP/s forward and backward; a product of 1024^3 (gemm.h) reached 238 beside it:
            N 512, H 8, d 64     HCA, r 128: 106, 118    CSA, r 4, topk 64: 98, 97    the same, all entries: 109, 118
            N 4096, H 8, d 64    HCA, r 128: 100, 79     CSA, r 4, topk 64: 93, 66
            N 2048, H 8, d 512   CSA, r 4, topk 512: 140, 92
            N 512, H 64, d 512   CSA, r 4, topk 64: 207, 119: 0.05 s and 0.23 s
        Not measured with more threads, nor on a GPU yet.
Order:  sums over keys take those of the window, then the entries, each ascending; scores and datt chain over channels;
        the sum of e chains over keys, then the sink; dkey are two chains, over heads and in each over positions, then
        their sum. Products by madd.
Source: DeepSeek-AI 2025, arXiv:2512.02556; sinks: Xiao et al. 2023, arXiv:2309.17453; doc/deepseek_v4.md
*/
#ifndef LLMC_SPARSE_ATTENTION_H
#define LLMC_SPARSE_ATTENTION_H
#include "../core/device.h"  // Device, device_workspace, ceil_div, thread_number
#include "../core/fmath.h"   // fm_exp
#include "../core/madd.h"    // madd
#include "inverse_lists.h"   // inverse_lists
#include "sparse_shape.h"    // SparseShape, Places, EntryWindows

#ifndef SPARSE_KEPT
#define SPARSE_KEPT ((size_t)512 << 20)  // bytes of weights that backward keeps, or those of 16 heads. Tests have less
#endif

// in steps: keys of the window, or entries, first .. end - 1; one of the sums over heads, (n, d)
typedef struct { int first, end; } SparsePart;
typedef struct {
    float* rows;
    int n;
} SparseSums;
enum { SPARSE_CHAINS = 4 };

#include "sparse_attention_kernels.h"  // CUDA: the op's functions
#include "sparse_strips.h"             // the fast C: strips of positions and heads, and products of a few rows

// ---- plain C: read this first; it defines every bit ----

// what position n sees: which keys, in their order; at least window + the entries of a position
typedef struct {
    int n_keys;
    const float** key;  // (n_keys) d channels each
    int* row;           // (n_keys) of kv, or below it of entries: n_rows + row
    float *att, *ds;    // (n_keys) of one head
} SparseKeysRef_;

static inline SparseKeysRef_ sparse_keys_ref_(const SparseShape* s, const Places* places, const EntryWindows* w,
                                              const int* chosen) {
    int most = 1;
    SparseKeysRef_ x;
    for (int n = 0; n < s->N; n++) {
        const int n_keys = sparse_window_keys(s, places, n) + sparse_entries(s, places, w, chosen, n);
        most = n_keys > most ? n_keys : most;
    }
    x.n_keys = 0;
    x.key = (const float**)malloc_check(sizeof(float*) * most, "keys of a position");
    x.row = (int*)malloc_check(sizeof(int) * most, "keys of a position");
    x.att = (float*)malloc_check(sizeof(float) * 2 * most, "keys of a position");
    x.ds = x.att + most;
    return x;
}

static inline void sparse_keys_ref_free_(SparseKeysRef_* x) { free((void*)x->key), free(x->row), free(x->att); }

static inline void sparse_see_ref_(SparseKeysRef_* x, const float* kv, const float* entries, const int* chosen, int n,
                                   const SparseShape* s, const Places* places, const EntryWindows* w) {
    const int n_window = sparse_window_keys(s, places, n), n_entries = sparse_entries(s, places, w, chosen, n);
    for (int i = 0; i < n_window; i++) {
        x->row[i] = sparse_first_key(s, places, n) + i;
        x->key[i] = kv + (size_t)x->row[i] * s->d;
    }
    for (int i = 0; i < n_entries; i++) {
        const int entry = sparse_entry(s, w, chosen, n, i);
        x->row[n_window + i] = sparse_rows(s) + entry;
        x->key[n_window + i] = entries + (size_t)entry * s->d;
    }
    x->n_keys = n_window + n_entries;
}

static inline float sparse_dot_ref_(const float* x, const float* y, int d) {
    float sum = 0.0f;
    for (int c = 0; c < d; c++) { sum = madd(x[c], y[c], sum); }
    return sum;
}

static inline void sparse_attention_forward_ref(float* out, float* max, float* inv, const float* q, const float* kv,
                                                const float* entries, const float* sinks, const int* chosen,
                                                const SparseShape* s, const Places* places, const EntryWindows* w) {
    SparseKeysRef_ see = sparse_keys_ref_(s, places, w, chosen);
    for (size_t i = 0; i < (size_t)s->N * s->H; i++) {  // head h of position n
        const int n = (int)(i / s->H), h = (int)(i % s->H);
        float top = sinks[h], total = 0.0f;
        sparse_see_ref_(&see, kv, entries, chosen, n, s, places, w);
        for (int k = 0; k < see.n_keys; k++) {
            see.att[k] = sparse_dot_ref_(q + i * s->d, see.key[k], s->d) * s->scale;
            top = see.att[k] > top ? see.att[k] : top;
        }
        for (int k = 0; k < see.n_keys; k++) {
            see.att[k] = fm_exp(see.att[k] - top);
            total += see.att[k];
        }
        max[i] = top;
        inv[i] = 1.0f / (total + fm_exp(sinks[h] - top));
        for (int c = 0; c < s->d; c++) {
            float sum = 0.0f;
            for (int k = 0; k < see.n_keys; k++) { sum = madd(see.att[k] * inv[i], see.key[k][c], sum); }
            out[i * s->d + c] = sum;
        }
    }
    sparse_keys_ref_free_(&see);
}

// head h of position n: dq is written; sums (rows of kv, then of entries; d) of ds * q and of att * dout go on.
// Returns D
static inline float sparse_attention_row_ref_(float* dq, float* by_q, float* by_dout, SparseKeysRef_* see,
                                              const float* dout, const float* q, float max, float inv,
                                              const SparseShape* s) {
    float D = 0.0f;
    for (int k = 0; k < see->n_keys; k++) {
        see->att[k] = fm_exp(sparse_dot_ref_(q, see->key[k], s->d) * s->scale - max) * inv;
        see->ds[k] = sparse_dot_ref_(dout, see->key[k], s->d);  // datt
        D = madd(see->att[k], see->ds[k], D);
    }
    for (int c = 0; c < s->d; c++) { dq[c] = 0.0f; }
    for (int k = 0; k < see->n_keys; k++) {
        const size_t row = (size_t)see->row[k] * s->d;
        see->ds[k] = see->att[k] * (see->ds[k] - D) * s->scale;
        for (int c = 0; c < s->d; c++) {
            dq[c] = madd(see->ds[k], see->key[k][c], dq[c]);
            by_q[row + c] = madd(see->ds[k], q[c], by_q[row + c]);
            by_dout[row + c] = madd(see->att[k], dout[c], by_dout[row + c]);
        }
    }
    return D;
}

// sums (2, rows + n_entries, d), of ds * q and of att * dout, go on from what heads before have written, or from 0
static inline void sparse_attention_backward_ref(float* dq, float* dkv, float* dentries, float* dsinks, float* sums,
                                                 const float* dout, const float* q, const float* kv,
                                                 const float* entries, const float* max, const float* inv,
                                                 const float* sinks, const int* chosen, int n_entries,
                                                 const SparseShape* s, const Places* places, const EntryWindows* w) {
    SparseKeysRef_ see = sparse_keys_ref_(s, places, w, chosen);
    const size_t n_kv = (size_t)sparse_rows(s) * s->d, n_sums = n_kv + (w ? (size_t)n_entries * s->d : 0);
    for (int h = 0; h < s->H; h++) {
        float dsink = 0.0f;
        for (int n = 0; n < s->N; n++) {
            const size_t i = (size_t)n * s->H + h, at = i * s->d;
            sparse_see_ref_(&see, kv, entries, chosen, n, s, places, w);
            const float D = sparse_attention_row_ref_(dq + at, sums, sums + n_sums, &see, dout + at, q + at, max[i],
                                                      inv[i], s);
            if (dsinks) { dsink = madd(-(fm_exp(sinks[h] - max[i]) * inv[i]), D, dsink); }
        }
        if (dsinks) { dsinks[h] = dsink; }
    }
    for (size_t i = 0; i < n_kv; i++) { dkv[i] = sums[i] + sums[n_sums + i]; }
    for (size_t i = n_kv; i < n_sums; i++) { dentries[i - n_kv] = sums[i] + sums[n_sums + i]; }
    sparse_keys_ref_free_(&see);
}

static inline void sparse_attention_mass_ref(float* mass, const float* q, const float* entries, const float* max,
                                             const float* inv, const int* chosen, int goes_on, const SparseShape* s) {
    for (size_t n = 0; n < (size_t)s->N; n++) {
        int k = 0;
        for (; k < s->topk && chosen[n * s->topk + k] >= 0; k++) {
            const float* entry = entries + (size_t)chosen[n * s->topk + k] * s->d;
            float sum = goes_on ? mass[n * s->topk + k] : 0.0f;
            for (size_t i = n * s->H; i < (n + 1) * s->H; i++) {
                sum += fm_exp(sparse_dot_ref_(q + i * s->d, entry, s->d) * s->scale - max[i]) * inv[i];
            }
            mass[n * s->topk + k] = sum;
        }
        for (; k < s->topk; k++) { mass[n * s->topk + k] = 0.0f; }
    }
}

#ifndef __CUDACC__  // ---- fast C: strips over threads, then keys ----
enum {
    SPARSE_KEYS = 8 * TILE_M,  // whose gradients are a task
    SPARSE_ROWS = 256,         // positions whose q and dout, of one head, a task copies at a time: where they lie, rows
                               // are often a power of two apart, and most of them in the same few lines of a cache
    SPARSE_LISTED = 512,       // entries with lists whose gradients are a task, at most; at least an eighth of them...
    SPARSE_CHANNELS = 4 * VLANES,  // ...of so many channels: an entry's sums of q and of dout fill eight registers...
    SPARSE_LIST_ROWS = 64      // ...from so many positions at a time, whose rows should stay in the first cache; twice
                               // as many where an entry has few of them
};

typedef struct {
    int n_heads, positions;  // of a strip
    int n_window, n_entries; // keys of a position, at most
    int n_rows;              // of lanes
    size_t stride;           // of lanes
    size_t n_floats;         // scratch of a thread
} SparsePlan_;

// strips of n_heads of H heads. n_strips: q, and in backward dout; as many arrays of lanes
static inline SparsePlan_ sparse_plan_(const SparseInputs* x, int n_heads, int n_strips) {
    SparsePlan_ p = {n_heads, sparse_strip_positions(n_heads, x->s->H), 0, 0, 0,
                     sparse_strip_stride(n_heads, x->s->H), 0};
    for (int n = 0; n < x->s->N; n++) {
        const int n_window = sparse_window_keys(x->s, x->places, n);
        const int n_entries = x->chosen ? x->s->topk : sparse_entries(x->s, x->places, x->w, NULL, n);
        p.n_window = n_window > p.n_window ? n_window : p.n_window;
        p.n_entries = n_entries > p.n_entries ? n_entries : p.n_entries;
    }
    p.n_rows = p.n_window + p.positions + p.n_entries + TILE_M + VLANES;  // whole tiles, and whole squares to turn
    p.n_floats = p.stride * (size_t)n_strips * (size_t)(x->s->d + p.n_rows);
    return p;
}

// heads of a strip where `heads` of all heads are at hand: as many as there are lanes; fewer where threads are idle
static inline int sparse_strip_heads_(const SparseShape* s, int heads, const Device* dev) {
    int n = gemm_min_(heads, SPARSE_LANES);
    while (n > VLANES && (int64_t)s->N * ceil_div(heads, n) < dev->n_threads) { n = sparse_round_(n / 2); }
    return n;
}

// products of a strip with all that it sees
static inline void sparse_scores_(float* lanes, const float* turned, const SparseStrip* strip, const SparseInputs* x) {
    const int d = x->s->d;
    sparse_dots(lanes, strip->stride, x->kv + (size_t)strip->key * d, NULL, strip->n_keys, turned, strip->lanes, d);
    float* behind = lanes + (size_t)strip->n_keys * strip->stride;
    if (strip->n_entries) {
        sparse_dots(behind, strip->stride, x->entries + (size_t)strip->entry * d, NULL, strip->n_entries, turned,
                    strip->lanes, d);
    }
    for (int i = 0; i < strip->n && x->chosen; i++) {
        const SparseSeen seen = sparse_seen(x, strip, i);
        sparse_dots(behind + seen.lane, strip->stride, x->entries, x->chosen + (size_t)seen.n * x->s->topk,
                    seen.n_entries, turned + seen.lane, strip->n_heads, d);
    }
}

// out (n_heads, d) of a position = the sum over what it sees of its weights
static inline void sparse_gather_(float* out, const float* lanes, const SparseStrip* strip, const SparseSeen* seen,
                                  const SparseInputs* x) {
    const int* list = x->chosen ? x->chosen + (size_t)seen->n * x->s->topk : NULL;
    const size_t d = (size_t)x->s->d, window = (size_t)seen->window_row, behind = (size_t)seen->entry_row;
    SparseProduct p = {out, lanes + window * strip->stride + seen->lane, x->kv + (strip->key + window) * d, NULL, d,
                       strip->stride, d, strip->n_heads, x->s->d, seen->n_window, 0, 0, 0};
    sparse_product(&p);
    if (seen->n_entries == 0) { return; }
    p.a = lanes + behind * strip->stride + seen->lane;
    p.b = list ? x->entries : x->entries + (size_t)strip->entry * d;
    p.index = list, p.K = seen->n_entries, p.go_on = 1;
    sparse_product(&p);
}

// products of n neighbouring heads of a position, from their lane of the first row of lanes on, to weights. The
// compiler makes a loop of its own for whole vectors of heads
static inline __attribute__((always_inline)) void sparse_softmax_lanes_(float* lanes, float* max, float* inv,
                                                                        const float* sinks, int n, size_t stride,
                                                                        const SparseSeen* seen, float scale) {
    const int n_keys = seen->n_window + seen->n_entries;
    float top[VLANES], total[VLANES] = {0};
    for (int j = 0; j < n; j++) { top[j] = sinks[j]; }
    for (int k = 0; k < n_keys; k++) {
        float* w = lanes + sparse_row(seen, k) * stride;
        for (int j = 0; j < n; j++) {
            w[j] *= scale;
            top[j] = w[j] > top[j] ? w[j] : top[j];
        }
    }
    for (int k = 0; k < n_keys; k++) {
        float* w = lanes + sparse_row(seen, k) * stride;
        #pragma omp simd
        for (int j = 0; j < n; j++) {
            w[j] = fm_exp(w[j] - top[j]);
            total[j] += w[j];
        }
    }
    #pragma omp simd
    for (int j = 0; j < n; j++) {
        max[j] = top[j];
        inv[j] = total[j] = 1.0f / (total[j] + fm_exp(sinks[j] - top[j]));
    }
    for (int k = 0; k < n_keys; k++) {
        float* w = lanes + sparse_row(seen, k) * stride;
        for (int j = 0; j < n; j++) { w[j] *= total[j]; }
    }
}

// the same where max and inv are known
static inline __attribute__((always_inline)) void sparse_weights_lanes_(float* lanes, const float* max,
                                                                        const float* inv, int n, size_t stride,
                                                                        const SparseSeen* seen, float scale) {
    float top[VLANES], one[VLANES];
    for (int j = 0; j < n; j++) { top[j] = max[j], one[j] = inv[j]; }
    for (int k = 0; k < seen->n_window + seen->n_entries; k++) {
        float* w = lanes + sparse_row(seen, k) * stride;
        #pragma omp simd
        for (int j = 0; j < n; j++) { w[j] = fm_exp(w[j] * scale - top[j]) * one[j]; }
    }
}

// products of a position to weights; max, inv (n_heads)
static inline void sparse_softmax_(float* lanes, float* max, float* inv, const float* sinks, const SparseStrip* strip,
                                   const SparseSeen* seen, float scale) {
    float* w = lanes + seen->lane;
    int h = 0;
    for (; h + VLANES <= strip->n_heads; h += VLANES) {
        sparse_softmax_lanes_(w + h, max + h, inv + h, sinks + h, VLANES, strip->stride, seen, scale);
    }
    if (h < strip->n_heads) {
        sparse_softmax_lanes_(w + h, max + h, inv + h, sinks + h, strip->n_heads - h, strip->stride, seen, scale);
    }
}

static inline void sparse_weights_(float* lanes, const float* max, const float* inv, const SparseStrip* strip,
                                   const SparseSeen* seen, float scale) {
    float* w = lanes + seen->lane;
    int h = 0;
    for (; h + VLANES <= strip->n_heads; h += VLANES) {
        sparse_weights_lanes_(w + h, max + h, inv + h, VLANES, strip->stride, seen, scale);
    }
    if (h < strip->n_heads) {
        sparse_weights_lanes_(w + h, max + h, inv + h, strip->n_heads - h, strip->stride, seen, scale);
    }
}

static inline void sparse_attention_forward(float* out, float* max, float* inv, const float* q, const float* kv,
                                            const float* entries, const float* sinks, const int* chosen,
                                            const SparseShape* s, const Places* places, const EntryWindows* w,
                                            const Device* dev) {
    const SparseInputs x = {s, places, w, w ? chosen : NULL, q, kv, entries};
    const SparsePlan_ p = sparse_plan_(&x, sparse_strip_heads_(s, s->H, dev), 1);
    const int n_parts = (int)ceil_div(s->H, p.n_heads), n_blocks = (int)ceil_div(s->N, p.positions);
    float* workspace = device_workspace(dev, sizeof(float) * p.n_floats * (size_t)dev->n_threads);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < n_blocks * n_parts; task++) {
        const int head = task % n_parts * p.n_heads, n_heads = gemm_min_(p.n_heads, s->H - head);
        const int end = gemm_min_((task / n_parts + 1) * p.positions, s->N);
        float *turned = workspace + (size_t)thread_number() * p.n_floats, *lanes = turned + p.stride * (size_t)s->d;
        for (int first = task / n_parts * p.positions, n; first < end; first += n) {
            const SparseStrip strip = sparse_strip(&x, first, end, head, n_heads);
            sparse_turn(turned, strip.stride, q + ((size_t)first * s->H + head) * s->d, strip.lanes, s->d);
            sparse_scores_(lanes, turned, &strip, &x);
            n = strip.n;
            for (int i = 0; i < n; i++) {
                const SparseSeen seen = sparse_seen(&x, &strip, i);
                const size_t row = (size_t)seen.n * s->H + head;
                sparse_softmax_(lanes, max + row, inv + row, sinks + head, &strip, &seen, s->scale);
                sparse_gather_(out + row * s->d, lanes, &strip, &seen, &x);
            }
        }
    }
}

static inline void sparse_attention_mass(float* mass, const float* q, const float* entries, const float* max,
                                         const float* inv, const int* chosen, int goes_on, const SparseShape* s,
                                         const EntryWindows* w, const Device* dev) {
    (void)w;
    const size_t stride = SPARSE_LANES, n_rows = (size_t)(s->topk + TILE_M), n_floats = stride * (s->d + n_rows);
    float* workspace = device_workspace(dev, sizeof(float) * n_floats * (size_t)dev->n_threads);
    #pragma omp parallel for schedule(dynamic, 4)
    for (int n = 0; n < s->N; n++) {
        const int* list = chosen + (size_t)n * s->topk;
        float *turned = workspace + (size_t)thread_number() * n_floats, *lanes = turned + stride * s->d;
        float* sums = mass + (size_t)n * s->topk;
        const int length = sparse_list_length(list, s->topk);
        for (int k = goes_on ? length : 0; k < s->topk; k++) { sums[k] = 0.0f; }
        for (int head = 0; head < s->H; head += SPARSE_LANES) {
            const int n_heads = gemm_min_(SPARSE_LANES, s->H - head);
            const size_t row = (size_t)n * s->H + head;
            const SparseStrip strip = {n, 1, head, n_heads, n_heads, stride, 0, 0, 0, 0};
            const SparseSeen seen = {n, 0, 0, 0, 0, length};
            sparse_turn(turned, stride, q + row * s->d, n_heads, s->d);
            sparse_dots(lanes, stride, entries, list, length, turned, n_heads, s->d);
            sparse_weights_(lanes, max + row, inv + row, &strip, &seen, s->scale);
            for (int k = 0; k < length; k++) {
                for (int h = 0; h < n_heads; h++) { sums[k] += lanes[k * stride + h]; }
            }
        }
    }
}

// ---- backward, of some heads at a time: strips write dq and keep att and ds, from which keys take what is theirs ----

typedef struct {
    SparseInputs x;
    SparsePlan_ plan;
    const float *dout, *max, *inv, *sinks;
    float *dq, *D, *dsinks;  // D (N, H)
    float *by_q, *by_dout;  // (rows + n_entries, d) in two parts each: sums of ds * q and of att * dout
    float *entries_by_q, *entries_by_dout;
    int at_once, first_head, n_heads;  // heads whose att and ds are kept; n_heads 0: none yet
    float *att, *ds;      // (n_heads, N, row): the keys of the window end at column n_window, where the entries begin
    size_t row;
    int *key_begin, *key_end;  // (rows) positions that see a key of the window
    int *begin, *end;     // (n_entries) ... an entry, where there are no lists
    int *offsets, *positions, *pairs;  // inverse_lists.h, where there are lists
    int listed, list_rows;             // of a task, at a time
    int n_entries;
    float* scratch;       // of all threads
} SparseBackward;

// ds from datt, and D, of n neighbouring heads
static inline __attribute__((always_inline)) void sparse_dscores_lanes_(float* ds, float* D, const float* att, int n,
                                                                        size_t stride, const SparseSeen* seen,
                                                                        float scale) {
    const int n_keys = seen->n_window + seen->n_entries;
    float sum[VLANES] = {0};
    for (int k = 0; k < n_keys; k++) {
        const size_t at = sparse_row(seen, k) * stride;
        #pragma omp simd
        for (int j = 0; j < n; j++) { sum[j] = madd(att[at + j], ds[at + j], sum[j]); }
    }
    for (int k = 0; k < n_keys; k++) {
        const size_t at = sparse_row(seen, k) * stride;
        #pragma omp simd
        for (int j = 0; j < n; j++) { ds[at + j] = att[at + j] * (ds[at + j] - sum[j]) * scale; }
    }
    for (int j = 0; j < n; j++) { D[j] = sum[j]; }
}

static inline void sparse_dscores_(float* ds, float* D, const float* att, const SparseStrip* strip,
                                   const SparseSeen* seen, float scale) {
    const size_t lane = (size_t)seen->lane;
    int h = 0;
    for (; h + VLANES <= strip->n_heads; h += VLANES) {
        sparse_dscores_lanes_(ds + lane + h, D + h, att + lane + h, VLANES, strip->stride, seen, scale);
    }
    if (h < strip->n_heads) {
        sparse_dscores_lanes_(ds + lane + h, D + h, att + lane + h, strip->n_heads - h, strip->stride, seen, scale);
    }
}

// positions first..end, as many as make a strip
static inline void sparse_backward_strips_(const SparseBackward* b, int first, int end, int head, int n_heads) {
    const SparseInputs* x = &b->x;
    const int d = x->s->d;
    float* turned = b->scratch + (size_t)thread_number() * b->plan.n_floats;
    float *att = turned + b->plan.stride * d, *ds = att + b->plan.stride * b->plan.n_rows;
    while (first < end) {
        const SparseStrip strip = sparse_strip(x, first, end, head, n_heads);
        const size_t rows = (size_t)first * x->s->H + head;
        sparse_turn(turned, strip.stride, x->q + rows * d, strip.lanes, d);
        sparse_scores_(att, turned, &strip, x);
        sparse_turn(turned, strip.stride, b->dout + rows * d, strip.lanes, d);
        sparse_scores_(ds, turned, &strip, x);
        for (int i = 0; i < strip.n; i++) {
            const SparseSeen seen = sparse_seen(x, &strip, i);
            const size_t row = (size_t)seen.n * x->s->H + head;
            const size_t kept = ((size_t)(head - b->first_head) * x->s->N + seen.n) * b->row + b->plan.n_window;
            sparse_weights_(att, b->max + row, b->inv + row, &strip, &seen, x->s->scale);
            sparse_dscores_(ds, b->D + row, att, &strip, &seen, x->s->scale);
            sparse_gather_(b->dq + row * d, ds, &strip, &seen, x);
            for (int part = 0; part < 2; part++) {  // the entries write over what the window leaves behind its last
                const int from = part ? seen.entry_row : seen.window_row, n = part ? seen.n_entries : seen.n_window;
                const size_t at = kept - (part ? 0 : (size_t)n), step = (size_t)x->s->N * b->row;
                sparse_keep(b->att + at, step, att, &strip, &seen, from, n);
                sparse_keep(b->ds + at, step, ds, &strip, &seen, from, n);
            }
        }
        first += strip.n;
    }
}

// neighbouring keys of the window, or entries, that positions see
typedef struct {
    int n, is_entry, first;  // first: row
    int begin[TILE_M], end[TILE_M];
    int is_stairs, stair, stairs_down;
} SparseTile_;

static inline SparseTile_ sparse_tile_(const SparseBackward* b, int is_entry, int first, int n) {
    const SparseShape* s = b->x.s;
    SparseTile_ t;
    memset(&t, 0, sizeof t);
    t.n = n, t.is_entry = is_entry, t.first = first;
    for (int m = 0; m < n; m++) {
        const int u = first + m;
        t.begin[m] = is_entry ? b->begin[u] : b->key_begin[u];
        t.end[m] = is_entry ? b->end[u] : b->key_end[u];
    }
    t.stair = is_entry ? b->x.w->r : 1;
    t.stairs_down = n > 1 && t.end[1] > t.end[0];
    t.is_stairs = n == TILE_M && s->d % VLANES == 0;
    for (int m = 1; m < n; m++) {
        t.is_stairs &= t.begin[m] == t.begin[0] + m * t.stair;
        t.is_stairs &= t.end[m] == t.end[0] + (t.stairs_down ? m * t.stair : 0);
    }
    t.is_stairs &= n > 0 && t.begin[n - 1] < t.end[0];
    return t;
}

// the rows of q and dout of one head that a task has at hand: positions first..end
typedef struct {
    int h, first, end;
    const float *q, *dout;
    size_t step;
} SparseRows_;

// copies of n_channels of them from c on, into scratch: two times so many rows
static inline SparseRows_ sparse_rows_(const SparseBackward* b, int h, int first, int end, int c, int n_channels,
                                       float* scratch) {
    const size_t d = (size_t)b->x.s->d, step = (size_t)n_channels + GEMM_LINE;
    float* dout = scratch + (size_t)(end - first) * step;
    for (int n = first; n < end; n++) {
        const size_t from = ((size_t)n * b->x.s->H + b->first_head + h) * d + c, to = (size_t)(n - first) * step;
        memcpy(scratch + to, b->x.q + from, sizeof(float) * n_channels);
        memcpy(dout + to, b->dout + from, sizeof(float) * n_channels);
    }
    const SparseRows_ rows = {h, first, end, scratch, dout, step};
    return rows;
}

// what positions from..to, which see the keys m0..m1 of a tile, add to them; or, from the first stair on, to the whole
// tile
static inline void sparse_add_(const SparseBackward* b, const SparseTile_* t, const SparseRows_* rows, int is_stairs,
                               int from, int to, int m0, int m1) {
    const size_t d = (size_t)b->x.s->d, at = (size_t)(t->first + m0) * d;
    const size_t of_q = (size_t)(from - rows->first) * rows->step;
    const int before = t->is_entry ? b->x.w->first_entry[from] : sparse_own_key(b->x.places, from) + 1;
    const size_t column = (size_t)(b->plan.n_window + t->first + m0 - before);
    const size_t kept = ((size_t)rows->h * b->x.s->N + from) * b->row + column;
    SparseProduct p = {(t->is_entry ? b->entries_by_q : b->by_q) + at, b->ds + kept, rows->q + of_q, NULL, d,
                       b->row - (t->is_entry ? 0 : 1), rows->step, m1 - m0, b->x.s->d, to - from, 1, t->stair,
                       t->stairs_down};
    for (int part = 0; part < 2; part++) {
        if (is_stairs) { sparse_stairs(&p); } else { sparse_product(&p); }
        p.out = (t->is_entry ? b->entries_by_dout : b->by_dout) + at, p.a = b->att + kept, p.b = rows->dout + of_q;
    }
}

// the same keys are seen from position `from` on, up to where one begins or ends: returns that, sets who they are
static inline int sparse_segment_(const SparseTile_* t, int from, int* m0, int* m1) {
    int to = INT_MAX;
    *m0 = TILE_M, *m1 = 0;
    for (int m = 0; m < t->n; m++) {
        if (t->begin[m] > from && t->begin[m] < to) { to = t->begin[m]; }
        if (t->end[m] > from && t->end[m] < to) { to = t->end[m]; }
        if (t->begin[m] <= from && from < t->end[m]) { *m0 = gemm_min_(*m0, m), *m1 = m + 1; }
    }
    return to;
}

// one tile
static inline void sparse_add_tile_(const SparseBackward* b, const SparseTile_* t, const SparseRows_* rows) {
    int from = rows->first, to, m0, m1;
    const int last = TILE_M - 1, all = t->is_stairs ? gemm_min_(t->end[0], rows->end) - t->begin[last] : 0;
    if (all > 0 && t->begin[0] >= from && (!t->stairs_down || t->end[last] <= rows->end)) {
        sparse_add_(b, t, rows, 1, t->begin[0], t->begin[0] + all, 0, TILE_M);
        return;
    }
    for (; from < rows->end; from = to) {
        to = gemm_min_(sparse_segment_(t, from, &m0, &m1), rows->end);
        if (m0 < m1) { sparse_add_(b, t, rows, 0, from, to, m0, m1); }
    }
}

// keys first..end of the window, or entries
static inline void sparse_add_keys_(const SparseBackward* b, int is_entry, int first, int end) {
    SparseTile_ tile[SPARSE_KEYS / TILE_M];
    const int n = (int)ceil_div(end - first, TILE_M);
    int begin_n = INT_MAX, end_n = 0;  // positions that see any of them
    for (int i = 0; i < n; i++) {
        SparseTile_* t = &tile[i];
        *t = sparse_tile_(b, is_entry, first + i * TILE_M, gemm_min_(TILE_M, end - first - i * TILE_M));
        for (int m = 0; m < t->n; m++) {
            if (t->begin[m] < t->end[m]) { begin_n = gemm_min_(begin_n, t->begin[m]); }
            end_n = t->end[m] > end_n ? t->end[m] : end_n;
        }
    }
    float* scratch = b->scratch + (size_t)thread_number() * b->plan.n_floats;
    for (int h = 0; h < b->n_heads; h++) {
        for (int from = begin_n; from < end_n; from += SPARSE_ROWS) {
            const SparseRows_ rows = sparse_rows_(b, h, from, gemm_min_(from + SPARSE_ROWS, end_n), 0, b->x.s->d,
                                                  scratch);
            for (int i = 0; i < n; i++) { sparse_add_tile_(b, &tile[i], &rows); }
        }
    }
}

// where in its list an entry has positions, and where the weights of an entry and a position are kept
typedef struct {
    int begin, end;
    const int *position, *pair;
    const float *att, *ds;  // of position 0, of its first entry
    ptrdiff_t row;          // ... and the number of a pair: from one position to the next
} SparseListed_;

// sums += what these positions add to the entry: SPARSE_CHANNELS channels in registers
static inline void sparse_add_listed_(float* by_q, float* by_dout, const SparseListed_* l, const SparseRows_* rows) {
    enum { WIDE = SPARSE_CHANNELS / VLANES };
    vfloat of_q[WIDE], of_dout[WIDE];
    for (int i = 0; i < WIDE; i++) { of_q[i] = v_load(by_q + i * VLANES), of_dout[i] = v_load(by_dout + i * VLANES); }
    for (int k = l->begin; k < l->end; k++) {
        const int n = l->position[k];
        const ptrdiff_t at = n * l->row + l->pair[k];
        const size_t from = (size_t)(n - rows->first) * rows->step;
        const vfloat ds = v_fill(l->ds[at]), att = v_fill(l->att[at]);
        for (int i = 0; i < WIDE; i++) {
            of_q[i] = v_madd(ds, v_load(rows->q + from + i * VLANES), of_q[i]);
            of_dout[i] = v_madd(att, v_load(rows->dout + from + i * VLANES), of_dout[i]);
        }
    }
    for (int i = 0; i < WIDE; i++) { v_store(by_q + i * VLANES, of_q[i]), v_store(by_dout + i * VLANES, of_dout[i]); }
}

// the same of n_channels, fewer
static inline void sparse_add_listed_few_(float* by_q, float* by_dout, const SparseListed_* l, const SparseRows_* rows,
                                          int n_channels) {
    for (int k = l->begin; k < l->end; k++) {
        const int n = l->position[k];
        const ptrdiff_t at = n * l->row + l->pair[k];
        const size_t from = (size_t)(n - rows->first) * rows->step;
        for (int c = 0; c < n_channels; c++) {
            by_q[c] = madd(l->ds[at], rows->q[from + c], by_q[c]);
            by_dout[c] = madd(l->att[at], rows->dout[from + c], by_dout[c]);
        }
    }
}

// entries first..end, from the lists of their positions: n_channels from c on
static inline void sparse_add_lists_(const SparseBackward* b, int first, int end, int c, int n_channels) {
    const SparseShape* s = b->x.s;
    float* scratch = b->scratch + (size_t)thread_number() * b->plan.n_floats;
    int place[SPARSE_LISTED];  // of each entry: how far its list has been read
    for (int h = 0; h < b->n_heads; h++) {
        const size_t kept = (size_t)h * s->N * b->row + b->plan.n_window;
        SparseListed_ l = {0, 0, b->positions, b->pairs, b->att + kept, b->ds + kept, (ptrdiff_t)b->row - s->topk};
        for (int e = first; e < end; e++) { place[e - first] = b->offsets[e]; }
        for (int from = 0; from < s->N; from += b->list_rows) {
            const int to = gemm_min_(from + b->list_rows, s->N);
            const SparseRows_ rows = sparse_rows_(b, h, from, to, c, n_channels, scratch);
            for (int e = first; e < end; e++) {
                const size_t at = (size_t)e * s->d + c;
                l.begin = l.end = place[e - first];
                while (l.end < b->offsets[e + 1] && b->positions[l.end] < to) { l.end++; }
                place[e - first] = l.end;
                if (l.begin == l.end) { continue; }
                if (n_channels == SPARSE_CHANNELS) {
                    sparse_add_listed_(b->entries_by_q + at, b->entries_by_dout + at, &l, &rows);
                } else {
                    sparse_add_listed_few_(b->entries_by_q + at, b->entries_by_dout + at, &l, &rows, n_channels);
                }
            }
        }
    }
}

// lists of positions, and how they are cut: into a few tasks for each thread. p: room for all that
static inline void sparse_lists_(SparseBackward* b, int* p, size_t n_pairs, const Device* dev) {
    const SparseShape* s = b->x.s;
    const int n_channels = (int)ceil_div(s->d, SPARSE_CHANNELS), few = SPARSE_LISTED / 8;
    const int share = (int)ceil_div((int64_t)b->n_entries * n_channels, 2 * dev->n_threads);
    b->offsets = p, b->positions = b->offsets + b->n_entries + 1, b->pairs = b->positions + n_pairs;
    inverse_lists(b->offsets, b->positions, b->pairs, b->pairs + n_pairs, b->x.chosen, s->N, s->topk, b->n_entries,
                  dev);
    b->listed = share < few ? few : gemm_min_(share, SPARSE_LISTED);
    b->list_rows = 8 * (int64_t)b->offsets[b->n_entries] < (int64_t)s->N * b->n_entries ? 2 * SPARSE_LIST_ROWS
                                                                                       : SPARSE_LIST_ROWS;
}

// positions that see a key of the window: n is the first of its document here, whose later keys are theirs
static inline void sparse_key_intervals_(const SparseBackward* b, int n) {
    const SparseShape* s = b->x.s;
    const Places* p = b->x.places;
    const int own = sparse_own_key(p, n), end = p->behind[n];
    for (int u = sparse_first_key(s, p, n); u < own + end - n; u++) {
        const int at = n + u - own;  // of the position whose key it is
        b->key_begin[u] = at > n ? at : n;
        b->key_end[u] = end - at < s->window ? end : at + s->window;
    }
}

// ... and an entry, where there are no lists: those that ended before n, and the others as they end
static inline void sparse_entry_intervals_(const SparseBackward* b, int n) {
    const Places* p = b->x.places;
    const int r = b->x.w->r, first = b->x.w->first_entry[n], seen = ENTRIES_SEEN(p->t[n], r), end = p->behind[n];
    const int seen_last = ENTRIES_SEEN(p->t[end - 1], r);
    for (int e = 0; e < seen_last; e++) {
        b->begin[first + e] = e < seen ? n : n + (e + 1) * r - 1 - p->t[n];
        b->end[first + e] = end;
    }
}

static inline void sparse_intervals_(const SparseBackward* b) {
    for (int u = 0; u < sparse_rows(b->x.s); u++) { b->key_begin[u] = b->key_end[u] = 0; }
    for (int e = 0; e < b->n_entries; e++) { b->begin[e] = b->end[e] = 0; }
    for (int n = 0; n < b->x.s->N; n = b->x.places->behind[n]) {
        sparse_key_intervals_(b, n);
        if (b->x.w && !b->x.chosen) { sparse_entry_intervals_(b, n); }
    }
}

// att, ds, D and dq of as many heads as are kept, from `head` on
static inline void sparse_keep_heads_(SparseBackward* b, int head) {
    const SparseShape* s = b->x.s;
    if (b->n_heads > 0 && b->first_head == head) { return; }
    b->first_head = head, b->n_heads = gemm_min_(b->at_once, s->H - head);
    const int n_parts = (int)ceil_div(b->n_heads, b->plan.n_heads), P = b->plan.positions;
    const int n_strips = (int)ceil_div(s->N, P) * n_parts;
    #pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < n_strips; i++) {
        const int part = i % n_parts * b->plan.n_heads, n_heads = gemm_min_(b->plan.n_heads, b->n_heads - part);
        const int first = i / n_parts * P;
        sparse_backward_strips_(b, first, gemm_min_(first + P, s->N), head + part, n_heads);
    }
}

// what the heads that are kept add to these keys and entries
static inline void sparse_add_heads_(const SparseBackward* b, SparsePart keys, SparsePart entries) {
    const SparseShape* s = b->x.s;
    const int listed = b->x.chosen != NULL, n_channels = listed ? (int)ceil_div(s->d, SPARSE_CHANNELS) : 1;
    const int of_task = listed ? b->listed : SPARSE_KEYS;
    const int n_keys = (int)ceil_div(keys.end - keys.first, SPARSE_KEYS);
    const int n_entries = (int)ceil_div(entries.end - entries.first, of_task) * n_channels;
    #pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < n_entries + n_keys; i++) {
        const int key = keys.first + (i - n_entries) * SPARSE_KEYS;
        const int entry = entries.first + i / n_channels * of_task;
        const int c = i % n_channels * SPARSE_CHANNELS;
        if (i >= n_entries) {
            sparse_add_keys_(b, 0, key, gemm_min_(key + SPARSE_KEYS, keys.end));
        } else if (listed) {
            sparse_add_lists_(b, entry, gemm_min_(entry + of_task, entries.end), c,
                              gemm_min_(SPARSE_CHANNELS, s->d - c));
        } else {
            sparse_add_keys_(b, 1, entry, gemm_min_(entry + of_task, entries.end));
        }
    }
}

// dsinks (H), heads over threads: 16 of them are a cache line
static inline void sparse_dsinks_(float* dsinks, const float* D, const float* max, const float* inv, const float* sinks,
                                  const SparseShape* s) {
    enum { LINE = 16 };
    #pragma omp parallel for
    for (int head = 0; head < s->H; head += LINE) {
        const int n_heads = gemm_min_(LINE, s->H - head);
        float sum[LINE] = {0};
        for (size_t i = (size_t)head; i < (size_t)s->N * s->H; i += (size_t)s->H) {
            #pragma omp simd
            for (int h = 0; h < n_heads; h++) {
                sum[h] = madd(-(fm_exp(sinks[head + h] - max[i + h]) * inv[i + h]), D[i + h], sum[h]);
            }
        }
        memcpy(dsinks + head, sum, sizeof(float) * n_heads);
    }
}

// x += y
static inline void sparse_join_(float* x, const float* y, size_t n) {
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) { x[i] += y[i]; }
}

static inline int sparse_most_channels(const Device* dev) { return (void)dev, INT_MAX; }

static inline SparseBackward sparse_backward_begin(float* dq, float* dkv, float* dentries, float* dsinks,
                                                   const float* dout, const float* out, const float* q,
                                                   const float* kv, const float* entries, const float* max,
                                                   const float* inv, const float* sinks, const int* chosen,
                                                   int n_entries, const SparseShape* s, const Places* places,
                                                   const EntryWindows* w, const Device* dev) {
    SparseBackward b;
    (void)out;
    const SparseInputs x = {s, places, w, w ? chosen : NULL, q, kv, entries};
    memset(&b, 0, sizeof b);
    b.x = x;
    b.dout = dout, b.max = max, b.inv = inv, b.sinks = sinks, b.dq = dq, b.dsinks = dsinks;
    b.n_entries = w ? n_entries : 0;
    b.plan = sparse_plan_(&b.x, 1, 2);
    b.row = (size_t)sparse_round_(b.plan.n_window + b.plan.n_entries) + VLANES;
    const size_t of_head = 2 * (size_t)s->N * b.row, fit = SPARSE_KEPT / sizeof(float) / (of_head + 1);
    const int whole = fit < VLANES ? VLANES : (int)(fit / VLANES * VLANES);  // vectors of heads, one at least
    b.at_once = fit < (size_t)s->H ? gemm_min_(s->H, whole) : s->H;
    const int strip_heads = gemm_min_(b.at_once, SPARSE_LANES);
    b.plan = sparse_plan_(&b.x, strip_heads, 2);
    const size_t rows = (size_t)sparse_rows(s), n_kv = rows * s->d, n_of_entries = (size_t)b.n_entries * s->d;
    const size_t n_rows = 2 * SPARSE_ROWS * ((size_t)s->d + GEMM_LINE);  // more than those of lists
    if (b.plan.n_floats < n_rows) { b.plan.n_floats = n_rows; }
    const size_t n_D = (size_t)s->N * s->H, n_kept = (size_t)b.at_once * of_head;
    const size_t n_pairs = x.chosen ? (size_t)s->N * s->topk : 0, n_seen = 2 * (rows + b.n_entries);
    const size_t n_scan = inverse_lists_scratch(b.n_entries, dev);
    const size_t n_lists = x.chosen ? (size_t)b.n_entries + 1 + 2 * n_pairs + n_scan : 0;
    float* p = device_workspace(dev, sizeof(float) * (n_D + n_kept + n_kv + n_of_entries + n_seen + n_lists +
                                                      b.plan.n_floats * (size_t)dev->n_threads));
    b.D = p, p += n_D;
    b.att = p, p += n_kept / 2;
    b.ds = p, p += n_kept / 2;
    b.by_q = dkv, b.by_dout = p, p += n_kv;
    b.entries_by_q = dentries, b.entries_by_dout = p, p += n_of_entries;
    b.key_begin = (int*)p, b.key_end = b.key_begin + rows, b.begin = b.key_end + rows, b.end = b.begin + b.n_entries;
    p += n_seen;
    if (x.chosen) { sparse_lists_(&b, (int*)p, n_pairs, dev); }
    b.scratch = p + n_lists;
    device_zero(dkv, sizeof(float) * n_kv, dev);
    if (n_of_entries) { device_zero(dentries, sizeof(float) * n_of_entries, dev); }
    device_zero(b.by_dout, sizeof(float) * (n_kv + n_of_entries), dev);
    sparse_intervals_(&b);
    sparse_keep_heads_(&b, 0);
    return b;
}

static inline void sparse_backward_sums(SparseSums sums[SPARSE_CHAINS], const SparseBackward* b) {
    const int rows = sparse_rows(b->x.s);
    const SparseSums all[SPARSE_CHAINS] = {{b->by_q, rows}, {b->by_dout, rows},
                                           {b->entries_by_q, b->n_entries}, {b->entries_by_dout, b->n_entries}};
    memcpy(sums, all, sizeof all);
}

static inline void sparse_backward_keys(SparseBackward* b, SparsePart keys, SparsePart entries, const Device* dev) {
    (void)dev;
    for (int head = 0; head < b->x.s->H; head += b->at_once) {
        sparse_keep_heads_(b, head);
        sparse_add_heads_(b, keys, entries);
    }
}

static inline void sparse_backward_end(const SparseBackward* b, const Device* dev) {
    const SparseShape* s = b->x.s;
    (void)dev;
    sparse_join_(b->by_q, b->by_dout, (size_t)sparse_rows(s) * s->d);
    if (b->n_entries) { sparse_join_(b->entries_by_q, b->entries_by_dout, (size_t)b->n_entries * s->d); }
    if (b->dsinks) { sparse_dsinks_(b->dsinks, b->D, b->max, b->inv, b->sinks, s); }
}

static inline void sparse_attention_backward(float* dq, float* dkv, float* dentries, float* dsinks, const float* dout,
                                             const float* out, const float* q, const float* kv, const float* entries,
                                             const float* max, const float* inv, const float* sinks, const int* chosen,
                                             int n_entries, const SparseShape* s, const Places* places,
                                             const EntryWindows* w, const Device* dev) {
    SparseBackward b = sparse_backward_begin(dq, dkv, dentries, dsinks, dout, out, q, kv, entries, max, inv, sinks,
                                             chosen, n_entries, s, places, w, dev);
    const SparsePart keys = {0, sparse_rows(s)}, all = {0, w ? n_entries : 0};
    sparse_backward_keys(&b, keys, all, dev);
    sparse_backward_end(&b, dev);
}
#endif  // __CUDACC__
#endif  // LLMC_SPARSE_ATTENTION_H
