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
An entry without a token (-1) gets a row of zeros.
Backward of a batch: entries and tokens come in their order, as entry_windows_of_batch and tokens_of_batch have them.
dv, dg (n_tokens, C) are written, 0 where no entry reads; of tokens before this pass's own what no entry reads stays as
it is. dv may be v, dg may be g:
    dv    = alpha dpool
    dg    = (alpha (v - pool)) dpool
    dape  = sum over tokens of dg             (r, C) float, written: one call is one leaf. NULL: nobody asks for it
Cost:   an exponential for each element of g, in each direction: a hundredth of the linear layers before it. One thread
        of an AMD EPYC without AVX-512, busy, the smallest of 40 runs, ns for each element of v: forward 1.7, backward
        2.3, dape 0.1 (r 4, d 512 with overlap; r 128, d 512 likewise), where an exponential alone takes 1.3 and a copy
        0.24. Not measured on a GPU yet: there it is bound by memory, 2 tokens C elements forward, 4 backward, and 1
        for dape; gates are read three times, but twice from a cache.
Error:  where |gate| < G, a weight is within (8 G + slots + 3) 2^-24 of itself, pool within that and slots 2^-24 of the
        largest |v|, dv as a weight, dg within that of (|v| + |pool|) |dpool|. bf16 rounds what is stored: 2^-8.
Order:  chains over slots from 0, of e by additions, of alpha v by fused products; dape a chain of additions over
        tokens from 0. In C lanes hold channels, threads entries, places for dape. Fast kernels have the
        hardware's exp, slots of an entry in up to 8 groups whose sums are added ascending, and dape, of dg as it is
        stored, in parts of the entries, which are added likewise.
Source: DeepSeek-AI 2026, arXiv:2606.19348; doc/deepseek_v4.md "Entries"
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
    const int place = slot < w->r ? slot : slot - w->r;
    return (size_t)place * window_pool_channels_(w, d) + window_pool_half_(w, slot, d);
}

// what is subtracted from gates, of the largest of them
FM_FUNCTION float window_pool_least_(float largest) { return fabsf(largest) < INFINITY ? largest : 0.0f; }

FM_FUNCTION float window_pool_total_(float total) { return total == 0.0f ? 1.0f : total; }

FM_FUNCTION float window_pool_dgate_(float alpha, float v, float pool, float dpool) {
    return alpha * (v - pool) * dpool;
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
        float* out = pool + (size_t)i * d;
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

#ifndef __CUDACC__  // ---- fast C: parts of entries over threads, neighbouring channels over lanes ----

enum {
    WINDOW_POOL_ROOM = 32768,  // floats for the weights of some channels: they stay in the second cache
    WINDOW_POOL_LANES = 16,    // channels come in multiples of so many
    WINDOW_POOL_MOST = 512     // at most so many at a time
};

static inline int window_pool_smaller_(int a, int b) { return a < b ? a : b; }

// how many channels of an entry are averaged at a time
static inline int window_pool_width_(const EntryWindows* w, int d) {
    const int n_slots = w->overlap ? 2 * w->r : w->r, width = WINDOW_POOL_ROOM / n_slots;
    const int most = window_pool_smaller_(WINDOW_POOL_MOST, width < WINDOW_POOL_LANES ? WINDOW_POOL_LANES : width);
    const int lanes = WINDOW_POOL_LANES, all = (d + lanes - 1) / lanes * lanes;
    return window_pool_smaller_(most / lanes * lanes, all);
}

// n floats are on their way from memory while others are computed; beyond the array it is no harm
static inline void window_pool_ask_(const float* x, int n) {
    for (int c = 0; c < n; c += 16) { __builtin_prefetch(x + c, 0, 2); }
}

// weights of n channels: row s of e (slots, width) has slot s, before it is divided by total. Meanwhile it asks for the
// values of the slots and the gates of the next entry: no hardware foresees where these lie
static inline void window_pool_exponentials_(float* e, float* total, int width, const float* v, const float* g,
                                             const float* ape, const EntryWindows* w, const WindowSlots* slots, int d,
                                             int n) {
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
        const size_t at = window_pool_at_(w, slots, s, d), next = at + (size_t)w->r * window_pool_channels_(w, d);
        float* row = e + (size_t)s * width;
        window_pool_ask_(v + at, n), window_pool_ask_(g + next, n);
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
    window_pool_exponentials_(e, total, width, v, g, ape, w, slots, d, n);
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
    window_pool_exponentials_(e, total, width, v, g, ape, w, slots, d, n);
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
    #pragma omp parallel for collapse(2)
    for (int i = 0; i < w->W; i++) {
        for (int c = 0; c < d; c += width) {
            const int n = window_pool_smaller_(width, d - c);
            const WindowSlots slots = window_pool_slots_(w, i);
                float *out = pool + (size_t)i * d + c, *e = window_pool_room_(workspace, w, width);
            if (w->token[i] < 0) {
                memset(out, 0, sizeof(float) * (size_t)n);
            } else {
                window_pool_entry_(out, e, width, v + c, g + c, ape + c, w, &slots, d, n);
            }
        }
    }
}

// parts of the channels of slots over threads: a place has a slot, or with overlap two, each with channels of its own
static inline void window_pool_dape_(float* dape, const float* dg, const EntryWindows* w, int d) {
    enum { PART = 256 };
    #pragma omp parallel for collapse(2)
    for (int slot = 0; slot < (w->overlap ? 2 * w->r : w->r); slot++) {
        for (int first = 0; first < d; first += PART) {
            const int n = window_pool_smaller_(PART, d - first);
            float* sum = dape + window_pool_ape_at_(w, slot, d) + first;
            for (int c = 0; c < n; c++) { sum[c] = 0.0f; }
            for (int i = 0; i < w->W; i++) {  // tokens that no entry reads would add 0
                const WindowSlots slots = window_pool_slots_(w, i);
                if (w->token[i] < 0 || slot < slots.begin) { continue; }
                const float* x = dg + window_pool_at_(w, &slots, slot, d) + first;
                for (int c = 0; c < n; c++) { sum[c] += x[c]; }
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
        #pragma omp for collapse(2) nowait  // neither reads what the other writes
        for (int i = 0; i < w->W; i++) {
            for (int c = 0; c < d; c += width) {
                const size_t at = (size_t)i * d + c;
                const WindowSlots slots = window_pool_slots_(w, i);
                if (w->token[i] < 0) { continue; }
                window_pool_entry_backward_(dv + c, dg + c, e, width, dpool + at, v + c, g + c, ape + c, pool + at, w,
                                            &slots, d, window_pool_smaller_(width, d - c));
            }
        }
        #pragma omp for
        for (int n = 0; n < n_tokens; n++) { window_pool_zeros_ref(dv, dg, w, places, n, d); }
    }
    if (dape) { window_pool_dape_(dape, dg, w, d); }
}
#else  // ---- CUDA: a block has an entry and some of its channels; threads (channels, groups of slots) ----

enum {
    WINDOW_POOL_THREADS = 256,  // of a block, with at most two channels each
    WINDOW_POOL_SHARED = 512,
    WINDOW_POOL_GROUPS = 8,     // of slots, at most
    WINDOW_POOL_OF_GROUP = 16,  // slots of a group, at least
#ifdef EXACT
    WINDOW_POOL_BATCH = 1  // slots that are read together; more would not fit in registers
#else
    WINDOW_POOL_BATCH = 4
#endif
};

// What a thread has: P channels of an entry from c on, and of its slots those of one group: every n_groups-th. EXACT
// builds have one group, so that sums are chains
template <int P>
struct WindowThread {
    int entry, c, inside, token;  // token < 0: no entry, for all threads of the block
    WindowSlots slots;
    float largest[P], total[P];
};

// of each of P values the largest or the sum over the groups, ascending, the same in all threads
template <int LARGEST, int P>
__device__ inline void window_pool_over_groups_(float (&x)[P], float* shared) {
    const int stride = blockDim.x * P;
    float* at = shared + threadIdx.x * P;
    if (blockDim.y == 1) { return; }
    __syncthreads();
    for (int k = 0; k < P; k++) { at[threadIdx.y * stride + k] = x[k]; }
    __syncthreads();
    for (int k = 0; k < P; k++) { x[k] = at[k]; }
    for (int y = 1; y < (int)blockDim.y; y++) {
        for (int k = 0; k < P; k++) {
            const float other = at[y * stride + k];
            x[k] = LARGEST ? (other > x[k] ? other : x[k]) : x[k] + other;
        }
    }
}

// gates of P channels in a slot
template <int P, typename X>
__device__ inline Pack<float, P> window_pool_gates_(const X* g, const float* ape, const EntryWindows& w,
                                                    const WindowThread<P>& x, int slot, int d) {
    Pack<float, P> gate = load_floats<P>(g + window_pool_at_(&w, &x.slots, slot, d) + x.c);
    const Pack<float, P> of_place = load_floats<P>(ape + window_pool_ape_at_(&w, slot, d) + x.c);
    for (int k = 0; k < P; k++) { gate.x[k] += of_place.x[k]; }
    return gate;
}

__device__ inline float window_pool_weight_(float gate, float largest, float total) {
#ifdef EXACT
    return fm_exp(gate - largest) / total;
#else
    return __fdividef(kernel_exp(gate - largest), total);
#endif
}

// this thread's part of the work, and what divides its exponentials. n_blocks: of an entry
template <int P, typename X>
__device__ inline WindowThread<P> window_pool_thread_(const X* g, const float* ape, const EntryWindows& w, int n_blocks,
                                                      int d, float* shared) {
    WindowThread<P> x;
    x.entry = blockIdx.x / n_blocks;
    x.c = (blockIdx.x % n_blocks * blockDim.x + threadIdx.x) * P;
    x.inside = x.c < d, x.token = w.token[x.entry];
    x.slots = window_pool_slots_(&w, x.entry);
    for (int k = 0; k < P; k++) { x.largest[k] = -INFINITY, x.total[k] = 0.0f; }
    if (x.token < 0) { return x; }
    #pragma unroll 4
    for (int s = x.slots.begin + threadIdx.y; x.inside && s < x.slots.end; s += blockDim.y) {
        const Pack<float, P> gate = window_pool_gates_<P>(g, ape, w, x, s, d);
        for (int k = 0; k < P; k++) { x.largest[k] = gate.x[k] > x.largest[k] ? gate.x[k] : x.largest[k]; }
    }
    window_pool_over_groups_<1>(x.largest, shared);
    for (int k = 0; k < P; k++) { x.largest[k] = window_pool_least_(x.largest[k]); }
    #pragma unroll 4
    for (int s = x.slots.begin + threadIdx.y; x.inside && s < x.slots.end; s += blockDim.y) {
        const Pack<float, P> gate = window_pool_gates_<P>(g, ape, w, x, s, d);
        for (int k = 0; k < P; k++) { x.total[k] += kernel_exp(gate.x[k] - x.largest[k]); }
    }
    window_pool_over_groups_<0>(x.total, shared);
    for (int k = 0; k < P; k++) { x.total[k] = window_pool_total_(x.total[k]); }
    return x;
}

template <int P, typename X>
__global__ void __launch_bounds__(WINDOW_POOL_THREADS, 6)  // left alone, ptxas takes 32 registers for sm_90 and spills
window_pool_forward_kernel(X* pool, const X* v, const X* g, const float* ape, EntryWindows w, int n_blocks, int d) {
    __shared__ float of_groups[WINDOW_POOL_SHARED];
    const WindowThread<P> x = window_pool_thread_<P>(g, ape, w, n_blocks, d, of_groups);
    Pack<float, P> sum = {};
    #pragma unroll 4
    for (int s = x.slots.begin + threadIdx.y; x.token >= 0 && x.inside && s < x.slots.end; s += blockDim.y) {
        const Pack<float, P> gate = window_pool_gates_<P>(g, ape, w, x, s, d);
        const Pack<float, P> value = load_floats<P>(v + window_pool_at_(&w, &x.slots, s, d) + x.c);
        for (int k = 0; k < P; k++) {
            sum.x[k] = madd(window_pool_weight_(gate.x[k], x.largest[k], x.total[k]), value.x[k], sum.x[k]);
        }
    }
    window_pool_over_groups_<0>(sum.x, of_groups);
    if (x.inside && threadIdx.y == 0) { store_floats(pool + (size_t)x.entry * d + x.c, sum); }
}

// Some slots are read before the first of them is written, so that their loads are under way together: for the compiler
// dv may be v
template <int P, typename X>
__global__ void __launch_bounds__(WINDOW_POOL_THREADS)
window_pool_backward_kernel(X* dv, X* dg, const X* dpool, const X* v, const X* g, const float* ape, const X* pool,
                            EntryWindows w, int n_blocks, int d) {
    __shared__ float of_groups[WINDOW_POOL_SHARED];
    const WindowThread<P> x = window_pool_thread_<P>(g, ape, w, n_blocks, d, of_groups);
    const size_t entry = (size_t)x.entry * d + x.c;
    if (x.token < 0 || !x.inside) { return; }
    const Pack<float, P> average = load_floats<P>(pool + entry), daverage = load_floats<P>(dpool + entry);
    for (int first = x.slots.begin + threadIdx.y; first < x.slots.end; first += WINDOW_POOL_BATCH * blockDim.y) {
        Pack<float, P> gate[WINDOW_POOL_BATCH], value[WINDOW_POOL_BATCH];
        for (int i = 0, s = first; i < WINDOW_POOL_BATCH; i++, s += blockDim.y) {
            if (s >= x.slots.end) { continue; }
            gate[i] = window_pool_gates_<P>(g, ape, w, x, s, d);
            value[i] = load_floats<P>(v + window_pool_at_(&w, &x.slots, s, d) + x.c);
        }
        for (int i = 0, s = first; i < WINDOW_POOL_BATCH; i++, s += blockDim.y) {
            if (s >= x.slots.end) { continue; }
            const size_t at = window_pool_at_(&w, &x.slots, s, d) + x.c;
            for (int k = 0; k < P; k++) {
                const float alpha = window_pool_weight_(gate[i].x[k], x.largest[k], x.total[k]);
                gate[i].x[k] = window_pool_dgate_(alpha, value[i].x[k], average.x[k], daverage.x[k]);
                value[i].x[k] = alpha * daverage.x[k];
            }
            store_floats(dv + at, value[i]), store_floats(dg + at, gate[i]);
        }
    }
}

// 0 where no entry reads; a block has a position
template <typename X>
__global__ void window_pool_zeros_kernel(X* dv, X* dg, EntryWindows w, Places places, int d) {
    const int n = blockIdx.x, C = window_pool_channels_(&w, d), read = window_pool_read_(&w, &places, n);
    const int first = read & 1 ? d : 0, last = read & 2 ? C - d : C;
    for (int c = first + threadIdx.x; c < last; c += blockDim.x) {
        dv[(size_t)n * C + c] = dg[(size_t)n * C + c] = from_float<X>(0.0f);
    }
}

// parts (gridDim.y, r, C): the sums over the entries W * y / gridDim.y .. of part y. A thread has a channel of a place:
// of the window itself, or of the one before it
template <typename X>
__global__ void window_pool_dape_kernel(float* parts, const X* dg, EntryWindows w, int d) {
    const int C = window_pool_channels_(&w, d), n = w.r * C, i = blockIdx.x * blockDim.x + threadIdx.x;
    const int before = w.overlap && i % C < d ? w.r : 0;
    const int first = (int)((int64_t)w.W * blockIdx.y / gridDim.y);
    const int last = (int)((int64_t)w.W * (blockIdx.y + 1) / gridDim.y);
    if (i >= n) { return; }
    float sum = 0.0f;
    #pragma unroll 4
    for (int entry = first; entry < last; entry++) {
        const int token = w.token[entry], has_one = token >= 0 && (before == 0 || w.number[entry] > 0);
        if (has_one) { sum += to_float(dg[(size_t)(token - before) * C + i]); }
    }
    parts[(size_t)blockIdx.y * n + i] = sum;
}

// dape (n): the sum of parts (n_parts, n), ascending
__global__ static void window_pool_parts_kernel(float* dape, const float* parts, int n_parts, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    float sum = parts[i];
    #pragma unroll 8
    for (int part = 1; part < n_parts; part++) { sum += parts[(size_t)part * n + i]; }
    dape[i] = sum;
}

static inline int window_pool_smaller_(int a, int b) { return a < b ? a : b; }

// threads of a block, and how many blocks an entry has
static inline dim3 window_pool_block_(const EntryWindows* w, int d, int P, int* n_blocks) {
#ifdef EXACT
    const int n_groups = 1;
    (void)w;
#else
    const int n_slots = w->overlap ? 2 * w->r : w->r;
    const int n_groups = window_pool_smaller_(WINDOW_POOL_GROUPS, (int)ceil_div(n_slots, WINDOW_POOL_OF_GROUP));
#endif
    const int most = WINDOW_POOL_THREADS / n_groups / WARP, needed = (int)ceil_div(d, P * WARP);
    const int threads = WARP * window_pool_smaller_(most, needed);
    *n_blocks = (int)ceil_div(d, P * threads);
    return dim3((unsigned)threads, (unsigned)n_groups);
}

template <int P, typename X>
static inline void window_pool_forward_launch_(X* pool, const X* v, const X* g, const float* ape, const EntryWindows* w,
                                               int d, const Device* dev) {
    int n_blocks;
    const dim3 block = window_pool_block_(w, d, P, &n_blocks);
    window_pool_forward_kernel<P><<<(unsigned)(w->W * n_blocks), block, 0, dev->stream>>>(pool, v, g, ape, *w, n_blocks,
                                                                                          d);
}

template <typename X>
static inline void window_pool_forward(X* pool, const X* v, const X* g, const float* ape, const EntryWindows* w, int d,
                                       const Device* dev) {
    if (w->W == 0) { return; }
    if (d % 2 == 0 && pack_aligned(pool, v, g, ape)) {
        window_pool_forward_launch_<2>(pool, v, g, ape, w, d, dev);
    } else {
        window_pool_forward_launch_<1>(pool, v, g, ape, w, d, dev);
    }
    cudaCheck(cudaGetLastError());
}

template <int P, typename X>
static inline void window_pool_backward_launch_(X* dv, X* dg, const X* dpool, const X* v, const X* g, const float* ape,
                                                const X* pool, const EntryWindows* w, int d, const Device* dev) {
    int n_blocks;
    const dim3 block = window_pool_block_(w, d, P, &n_blocks);
    window_pool_backward_kernel<P><<<(unsigned)(w->W * n_blocks), block, 0, dev->stream>>>(dv, dg, dpool, v, g, ape,
                                                                                           pool, *w, n_blocks, d);
}

// into how many parts the entries are cut: of as many threads as run at once, each with 8 entries or more
static inline int window_pool_n_parts_(int W, int n, const Device* dev) {
#ifdef EXACT
    (void)W, (void)n, (void)dev;
    return 1;  // a chain
#else
    const int at_once = dev->n_sms * 2048 / n, parts = window_pool_smaller_((int)ceil_div(W, 8), at_once);
    return parts > 1 ? parts : 1;
#endif
}

template <typename X>
static inline void window_pool_dape_(float* dape, const X* dg, const EntryWindows* w, int d, const Device* dev) {
    const int n = w->r * window_pool_channels_(w, d), n_parts = window_pool_n_parts_(w->W, n, dev);
    float* parts = n_parts > 1 ? device_workspace(dev, sizeof(float) * (size_t)n_parts * n) : dape;
    const dim3 grid((unsigned)ceil_div(n, GRID_BLOCK), (unsigned)n_parts);
    window_pool_dape_kernel<<<grid, GRID_BLOCK, 0, dev->stream>>>(parts, dg, *w, d);
    if (n_parts > 1) {
        window_pool_parts_kernel<<<grid.x, GRID_BLOCK, 0, dev->stream>>>(dape, parts, n_parts, n);
    }
}

template <typename X>
static inline void window_pool_backward(X* dv, X* dg, float* dape, const X* dpool, const X* v, const X* g,
                                        const float* ape, const X* pool, const EntryWindows* w, const Places* places,
                                        int n_tokens, int d, const Device* dev) {
    const int packs = d % 2 == 0 && pack_aligned(dv, dg, dpool, v, g, ape, pool);
    if (w->W > 0 && packs) {
        window_pool_backward_launch_<2>(dv, dg, dpool, v, g, ape, pool, w, d, dev);
    } else if (w->W > 0) {
        window_pool_backward_launch_<1>(dv, dg, dpool, v, g, ape, pool, w, d, dev);
    }
    if (n_tokens > 0) {
        window_pool_zeros_kernel<<<(unsigned)n_tokens, 128, 0, dev->stream>>>(dv, dg, *w, *places, d);
    }
    if (dape) { window_pool_dape_(dape, dg, w, d, dev); }
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_WINDOW_POOL_H
