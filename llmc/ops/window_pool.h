/*
Windows of tokens become entries: of each channel of an entry an average over the tokens of its window or, with overlap,
of two, weighed by a softmax over them (the compressor of DeepSeek V4, between its linear layers and its norm).
    v, g (tokens, C)   values and gates, C = d or with overlap 2d      ape (r, C) float   for each place in a window
    pool (rows of entries, d)
Slots of an entry are the tokens of its own window, which it reads in the last d of their channels; with overlap the r
tokens before them come first, read in the first d, if the document has them: token i of a window counts twice, in two
halves. Per channel, over the slots ascending:
    gate  = g + ape[its place in its window]
    alpha = e / total, e = exp(gate - the largest), total the sum of e. Is the largest Inf or -Inf, it is 0 instead; is
            the total 0, it is 1
    pool  = sum of alpha v
An entry without a token (-1) gets a row of zeros or, where entries go into a cache (slot), nothing.
Backward of a batch: `slot` is NULL, tokens are its positions, entries come in the order of their tokens, as
entry_windows_of_batch has them. dv, dg (n_tokens, C) are written, 0 where no entry reads; dv may be v, dg may be g:
    dv    = alpha dpool
    dg    = (alpha (v - pool)) dpool
    dape  = sum over positions of dg          (r, C) float, written: one call is one leaf. NULL: nobody asks for it
Cost:   @@COST@@
Error:  with |gate| < G a weight is within (8 G + slots) 2^-24 of itself, pool and dv likewise, and slots 2^-24 more for
        the chain; dg of |v| + |pool| times that. bf16 rounds what is stored: 2^-8; pool is rounded before dg reads it.
Order:  chains over slots from 0, of e by additions, of alpha v by fused products; dape a chain of additions over
        positions from 0. In C lanes hold channels, threads entries, or places for dape. Fast kernels have the
        hardware's exp, slots of an entry in up to 8 groups whose sums are added ascending, and dape, of dg as it is
        stored, in parts of the entries, which are added likewise.
Source: spec deepseek_v4.md 2.5, 4.4
*/
#ifndef LLMC_WINDOW_POOL_H
#define LLMC_WINDOW_POOL_H
#include "../core/device.h"  // Device, device_workspace, thread_number, ceil_div
#include "../core/fmath.h"   // fm_exp, FM_FUNCTION
#include "../core/kernel.h"  // load_floats, store_floats, kernel_exp, pack_aligned
#include "../core/madd.h"    // madd
#include "entry_windows.h"   // EntryWindows, Places

// The slots of an entry: begin..end-1, ascending
typedef struct {
    int begin, end;
    int first;  // token of slot 0, also where the document has none
} WindowSlots;

FM_FUNCTION WindowSlots window_pool_slots_(const EntryWindows* w, int entry) {
    const int before = w->overlap ? w->r : 0;
    const WindowSlots slots = {w->number[entry] > 0 ? 0 : before, before + w->r, w->token[entry] - before};
    return slots;
}

FM_FUNCTION int window_pool_channels_(const EntryWindows* w, int d) { return w->overlap ? 2 * d : d; }

// the first channel that a slot reads, in v and g and in the rows of ape
FM_FUNCTION int window_pool_half_(const EntryWindows* w, int slot, int d) { return w->overlap && slot >= w->r ? d : 0; }

FM_FUNCTION size_t window_pool_at_(const EntryWindows* w, const WindowSlots* slots, int slot, int d) {
    return (size_t)(slots->first + slot) * window_pool_channels_(w, d) + window_pool_half_(w, slot, d);
}

FM_FUNCTION size_t window_pool_ape_at_(const EntryWindows* w, int slot, int d) {
    return (size_t)(slot % w->r) * window_pool_channels_(w, d) + window_pool_half_(w, slot, d);
}

// what is subtracted from gates, of the largest of them
FM_FUNCTION float window_pool_least_(float largest) { return fabsf(largest) < INFINITY ? largest : 0.0f; }

FM_FUNCTION float window_pool_total_(float total) { return total == 0.0f ? 1.0f : total; }

FM_FUNCTION float window_pool_dgate_(float alpha, float v, float pool, float dpool) {
    return alpha * (v - pool) * dpool;
}

// where the entry goes
FM_FUNCTION size_t window_pool_row_(const EntryWindows* w, int entry) {
    return (size_t)(w->slot ? w->slot[entry] : entry);
}

// May an entry read the first half of position n's channels, or the second, which without overlap are all? Two bits
FM_FUNCTION int window_pool_read_(const EntryWindows* w, const Places* places, int n) {
    const int t = places->t[n], n_entries = (places->behind[n] - (n - t)) / w->r, own = t / w->r;
    return (w->overlap && own + 1 < n_entries) + 2 * (own < n_entries);
}

// ---- plain C: read this first; it defines every bit ----

typedef struct {
    float largest, total;
} WindowSoftmax;

// of one channel; g and ape begin at it
static inline WindowSoftmax window_pool_softmax_ref(const float* g, const float* ape, const EntryWindows* w,
                                                    const WindowSlots* slots, int d) {
    WindowSoftmax x = {-INFINITY, 0.0f};
    for (int s = slots->begin; s < slots->end; s++) {
        const float gate = g[window_pool_at_(w, slots, s, d)] + ape[window_pool_ape_at_(w, s, d)];
        x.largest = gate > x.largest ? gate : x.largest;
    }
    x.largest = window_pool_least_(x.largest);
    for (int s = slots->begin; s < slots->end; s++) {
        const float gate = g[window_pool_at_(w, slots, s, d)] + ape[window_pool_ape_at_(w, s, d)];
        x.total += fm_exp(gate - x.largest);
    }
    x.total = window_pool_total_(x.total);
    return x;
}

static inline void window_pool_forward_ref(float* pool, const float* v, const float* g, const float* ape,
                                           const EntryWindows* w, int d) {
    for (int i = 0; i < w->W; i++) {
        if (w->token[i] < 0 && w->slot) { continue; }
        float* out = pool + window_pool_row_(w, i) * d;
        const WindowSlots slots = window_pool_slots_(w, i);
        for (int c = 0; c < d; c++) {
            out[c] = 0.0f;
            if (w->token[i] < 0) { continue; }
            const WindowSoftmax x = window_pool_softmax_ref(g + c, ape + c, w, &slots, d);
            for (int s = slots.begin; s < slots.end; s++) {
                const size_t at = window_pool_at_(w, &slots, s, d) + c;
                const float gate = g[at] + ape[window_pool_ape_at_(w, s, d) + c];
                out[c] = madd(fm_exp(gate - x.largest) / x.total, v[at], out[c]);
            }
        }
    }
}

// 0 where no entry reads
static inline void window_pool_zeros_ref(float* dv, float* dg, const EntryWindows* w, const Places* places, int n,
                                         int d) {
    const int C = window_pool_channels_(w, d), read = window_pool_read_(w, places, n);
    const int first = read & 1 ? d : 0, last = read & 2 ? C - d : C;
    for (size_t i = (size_t)n * C + first; i < (size_t)n * C + last; i++) { dv[i] = dg[i] = 0.0f; }
}

static inline void window_pool_backward_ref(float* dv, float* dg, float* dape, const float* dpool, const float* v,
                                            const float* g, const float* ape, const float* pool, const EntryWindows* w,
                                            const Places* places, int n_tokens, int d) {
    const size_t C = (size_t)window_pool_channels_(w, d);
    for (int i = 0; i < w->W; i++) {
        const WindowSlots slots = window_pool_slots_(w, i);
        for (int c = 0; c < d && w->token[i] >= 0; c++) {
            const size_t entry = (size_t)i * d + c;
            const WindowSoftmax x = window_pool_softmax_ref(g + c, ape + c, w, &slots, d);
            for (int s = slots.begin; s < slots.end; s++) {
                const size_t at = window_pool_at_(w, &slots, s, d) + c;
                const float gate = g[at] + ape[window_pool_ape_at_(w, s, d) + c], value = v[at];
                const float alpha = fm_exp(gate - x.largest) / x.total;
                dv[at] = alpha * dpool[entry];
                dg[at] = window_pool_dgate_(alpha, value, pool[entry], dpool[entry]);
            }
        }
    }
    for (int n = 0; n < n_tokens; n++) { window_pool_zeros_ref(dv, dg, w, places, n, d); }
    for (size_t i = 0; dape && i < w->r * C; i++) { dape[i] = 0.0f; }
    for (int n = 0; dape && n < n_tokens; n++) {
        float* sum = dape + places->t[n] % w->r * C;
        for (size_t c = 0; c < C; c++) { sum[c] += dg[n * C + c]; }
    }
}

#ifndef __CUDACC__  // ---- fast C: entries over threads, lanes are neighbouring channels ----

enum {
    WINDOW_POOL_ROOM = 8192,  // floats for the weights of some channels: half of the first cache
    WINDOW_POOL_LANES = 16,   // channels come in multiples of so many
    WINDOW_POOL_MOST = 512    // at most so many at a time
};

static inline int window_pool_smaller_(int a, int b) { return a < b ? a : b; }

// how many channels of an entry are averaged at a time
static inline int window_pool_width_(const EntryWindows* w, int d) {
    const int n_slots = w->overlap ? 2 * w->r : w->r, width = WINDOW_POOL_ROOM / n_slots;
    const int most = window_pool_smaller_(WINDOW_POOL_MOST, width < WINDOW_POOL_LANES ? WINDOW_POOL_LANES : width);
    const int lanes = WINDOW_POOL_LANES, all = (d + lanes - 1) / lanes * lanes;
    return window_pool_smaller_(most / lanes * lanes, all);
}

// weights of n channels: row s of e (slots, width) has slot s, before it is divided by total
static inline void window_pool_exponentials_(float* e, float* total, int width, const float* g, const float* ape,
                                             const EntryWindows* w, const WindowSlots* slots, int d, int n) {
    float largest[WINDOW_POOL_MOST];
    for (int c = 0; c < n; c++) { largest[c] = -INFINITY, total[c] = 0.0f; }
    for (int s = slots->begin; s < slots->end; s++) {
        const float *gate = g + window_pool_at_(w, slots, s, d), *of_place = ape + window_pool_ape_at_(w, s, d);
        float* row = e + (size_t)s * width;
        #pragma omp simd
        for (int c = 0; c < n; c++) {
            row[c] = gate[c] + of_place[c];
            largest[c] = row[c] > largest[c] ? row[c] : largest[c];
        }
    }
    #pragma omp simd
    for (int c = 0; c < n; c++) { largest[c] = window_pool_least_(largest[c]); }
    for (int s = slots->begin; s < slots->end; s++) {
        float* row = e + (size_t)s * width;
        #pragma omp simd
        for (int c = 0; c < n; c++) {
            row[c] = fm_exp(row[c] - largest[c]);
            total[c] += row[c];
        }
    }
    #pragma omp simd
    for (int c = 0; c < n; c++) { total[c] = window_pool_total_(total[c]); }
}

// n channels of an entry; v, g and ape begin at the first of them
static inline void window_pool_entry_(float* out, float* e, int width, const float* v, const float* g,
                                      const float* ape, const EntryWindows* w, const WindowSlots* slots, int d,
                                      int n) {
    float total[WINDOW_POOL_MOST];
    window_pool_exponentials_(e, total, width, g, ape, w, slots, d, n);
    for (int c = 0; c < n; c++) { out[c] = 0.0f; }
    for (int s = slots->begin; s < slots->end; s++) {
        const float *value = v + window_pool_at_(w, slots, s, d), *row = e + (size_t)s * width;
        #pragma omp simd
        for (int c = 0; c < n; c++) { out[c] = madd(row[c] / total[c], value[c], out[c]); }
    }
}

static inline void window_pool_entry_backward_(float* dv, float* dg, float* e, int width, const float* dpool,
                                               const float* v, const float* g, const float* ape, const float* pool,
                                               const EntryWindows* w, const WindowSlots* slots, int d, int n) {
    float total[WINDOW_POOL_MOST];
    window_pool_exponentials_(e, total, width, g, ape, w, slots, d, n);
    for (int s = slots->begin; s < slots->end; s++) {
        const size_t at = window_pool_at_(w, slots, s, d);
        const float *value = v + at, *row = e + (size_t)s * width;
        float *dvalue = dv + at, *dgate = dg + at;
        #pragma omp simd
        for (int c = 0; c < n; c++) {
            const float alpha = row[c] / total[c], x = value[c];
            dvalue[c] = alpha * dpool[c];
            dgate[c] = window_pool_dgate_(alpha, x, pool[c], dpool[c]);
        }
    }
}

// this thread's room for weights
static inline float* window_pool_room_(float* workspace, const EntryWindows* w, int width) {
    return workspace + (size_t)thread_number() * (size_t)(w->overlap ? 2 * w->r : w->r) * (size_t)width;
}

static inline float* window_pool_workspace_(const EntryWindows* w, int width, const Device* dev) {
    return (float*)device_workspace(dev, sizeof(float) * (w->overlap ? 2 : 1) * w->r * (size_t)width * dev->n_threads);
}

static inline void window_pool_forward(float* pool, const float* v, const float* g, const float* ape,
                                       const EntryWindows* w, int d, const Device* dev) {
    const int width = window_pool_width_(w, d);
    float* workspace = window_pool_workspace_(w, width, dev);
    #pragma omp parallel for
    for (int i = 0; i < w->W; i++) {
        if (w->token[i] < 0 && w->slot) { continue; }
        float *out = pool + window_pool_row_(w, i) * d, *e = window_pool_room_(workspace, w, width);
        const WindowSlots slots = window_pool_slots_(w, i);
        for (int c = 0; c < d && w->token[i] >= 0; c += width) {
            const int n = window_pool_smaller_(width, d - c);
            window_pool_entry_(out + c, e, width, v + c, g + c, ape + c, w, &slots, d, n);
        }
        if (w->token[i] < 0) { memset(out, 0, sizeof(float) * (size_t)d); }
    }
}

// places over threads, and parts of their channels
static inline void window_pool_dape_(float* dape, const float* dg, const EntryWindows* w, int d) {
    enum { PART = 256 };
    const int C = window_pool_channels_(w, d);
    #pragma omp parallel for collapse(2)
    for (int place = 0; place < w->r; place++) {
        for (int first = 0; first < C; first += PART) {
            const int n = window_pool_smaller_(PART, C - first);
            float* sum = dape + (size_t)place * C + first;
            for (int c = 0; c < n; c++) { sum[c] = 0.0f; }
            for (int i = 0; i < w->W; i++) {  // positions without an entry would add 0
                const float* x = dg + (size_t)(w->token[i] + place) * C + first;
                for (int c = 0; c < n && w->token[i] >= 0; c++) { sum[c] += x[c]; }
            }
        }
    }
}

static inline void window_pool_backward(float* dv, float* dg, float* dape, const float* dpool, const float* v,
                                        const float* g, const float* ape, const float* pool, const EntryWindows* w,
                                        const Places* places, int n_tokens, int d, const Device* dev) {
    const int width = window_pool_width_(w, d);
    float* workspace = window_pool_workspace_(w, width, dev);
    #pragma omp parallel
    {
        float* e = window_pool_room_(workspace, w, width);
        #pragma omp for nowait  // neither reads what the other writes
        for (int i = 0; i < w->W; i++) {
            const WindowSlots slots = window_pool_slots_(w, i);
            for (int c = 0; c < d && w->token[i] >= 0; c += width) {
                const size_t at = (size_t)i * d + c;
                const int n = window_pool_smaller_(width, d - c);
                window_pool_entry_backward_(dv + c, dg + c, e, width, dpool + at, v + c, g + c, ape + c, pool + at, w,
                                            &slots, d, n);
            }
        }
        #pragma omp for
        for (int n = 0; n < n_tokens; n++) { window_pool_zeros_ref(dv, dg, w, places, n, d); }
    }
    if (dape) { window_pool_dape_(dape, dg, w, d); }
}
#else  // ---- CUDA ----
#endif
#endif  // LLMC_WINDOW_POOL_H
