/*
What the kernels of latent attention share, those on CUDA cores (latent_attention_kernels.h) and those on tensor cores
(flash_latent.h): who sees whom, tile by tile, and rows of channels.
    rows     a tile of 32 * WORDS neighbours: positions, or, in backward, keys
    items    what the rows of a tile see: of positions keys, of keys the positions by which they are seen. Each has a
             bit for each row. With lists they are found once for all heads (latent_join_kernel); without, a row sees
             items that follow each other, and tiles step over gaps, as between the texts of a cache
A block goes over its items a chunk at a time:
    for (int k = latent_next(see, seen, 0); k < seen.end; k = latent_next(see, seen, k + KEYS)) { ... }
Cost:   with lists 4 (1 + WORDS) bytes for each number on them, and backward 4 more; a tile reads its lists once.
*/
#ifndef LLMC_LATENT_INPUTS_H
#define LLMC_LATENT_INPUTS_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // WARP, ALL_LANES, forgotten
#include "inverse_lists.h"   // inverse_lists, inverse_lists_find
#include "latent_shape.h"    // LatentShape, Places
#include "sparse_shape.h"    // sparse_list_length

// Rows, of N, see items
struct LatentSight {
    int N, of_keys;
    Places places;
    const int *lists, *offsets;  // list i: lists[offsets[i]] ..; offsets NULL: topk numbers at most. lists NULL: a row
    int topk;                    // sees items that follow each other
    int *items, *counts;         // of a tile, ascending: from where its first list begins
    unsigned* seen_by;           // (items, WORDS) bit i of a word: row i of 32
};

struct LatentRange {
    size_t begin, end;
};

// the place where the list of row i, which exists, begins
__device__ inline size_t latent_first(const LatentSight& see, int i) {
    return see.offsets ? (size_t)see.offsets[i] : (size_t)i * see.topk;
}
// places of the list of row i; of one that does not exist: none
__device__ inline LatentRange latent_list(const LatentSight& see, int i) {
    LatentRange range = {0, 0};
    if (i >= see.N) { return range; }
    range.begin = latent_first(see, i);
    range.end = see.offsets ? (size_t)see.offsets[i + 1]
                            : range.begin + (size_t)sparse_list_length(see.lists + range.begin, see.topk);
    return range;
}

// ---- lists of a tile become one ----

enum { LATENT_JOIN = WARP * WARP };  // numbers at a time, and threads: a warp has a list for each word

// of a warp: how far it is on its lists
template <int WORDS>
struct LatentLists_ {
    size_t at[WORDS], end[WORDS];
};

// the smallest number that is left on the lists of the block; next: one for each warp
template <int WORDS>
__device__ inline int latent_lowest_(int* next, const LatentSight& see, const LatentLists_<WORDS>& of) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int low = INT_MAX;
    for (int w = 0; w < WORDS; w++) { low = of.at[w] < of.end[w] ? min(low, see.lists[of.at[w]]) : low; }
    if (lane == 0) { next[warp] = low; }
    __syncthreads();
    low = next[lane];
    for (int step = WARP / 2; step > 0; step /= 2) { low = min(low, __shfl_xor_sync(ALL_LANES, low, step)); }
    return low;
}

// block is (LATENT_JOIN), grid (tiles). Bits in any order are the same
template <int WORDS>
__global__ void __launch_bounds__(LATENT_JOIN) latent_join_kernel(LatentSight see) {
    __shared__ unsigned words[LATENT_JOIN][WORDS];
    __shared__ int next[WARP], found[WARP];
    const int t = threadIdx.x, warp = t / WARP, lane = t % WARP, row = blockIdx.x * WARP * WORDS;
    const size_t first = latent_list(see, row).begin;
    size_t place = first;
    LatentLists_<WORDS> of;
    for (int w = 0; w < WORDS; w++) {
        const LatentRange list = latent_list(see, row + w * WARP + warp);
        of.at[w] = list.begin, of.end[w] = list.end;
    }
    for (int low; (low = latent_lowest_(next, see, of)) < INT_MAX;) {
        for (int w = 0; w < WORDS; w++) { words[t][w] = 0; }
        __syncthreads();
        for (int w = 0; w < WORDS; w++) {
            for (int n = WARP; n == WARP; of.at[w] += n) {
                const int item = of.at[w] + lane < of.end[w] ? see.lists[of.at[w] + lane] : INT_MAX;
                const int is_in = item - low < LATENT_JOIN;
                if (is_in) { atomicOr(&words[item - low][w], 1u << warp); }
                n = __popc(__ballot_sync(ALL_LANES, is_in));
            }
        }
        __syncthreads();
        unsigned any = 0;
        for (int w = 0; w < WORDS; w++) { any |= words[t][w]; }
        const unsigned votes = __ballot_sync(ALL_LANES, any != 0);
        if (lane == 0) { found[warp] = __popc(votes); }
        __syncthreads();
        size_t to = place + (size_t)__popc(votes & ((1u << lane) - 1));
        for (int w = 0; w < WARP; w++) {
            to += w < warp ? (size_t)found[w] : 0;
            place += (size_t)found[w];
        }
        if (any) {
            see.items[to] = low + t;
            for (int w = 0; w < WORDS; w++) { see.seen_by[to * WORDS + w] = words[t][w]; }
        }
    }
    if (t == 0) { see.counts[blockIdx.x] = (int)(place - first); }
}

// ---- what a tile sees ----

// without lists: the items that row i sees
struct LatentSpan {
    int begin, end;
    __device__ bool has(int item) const { return begin <= item && item < end; }
};
__device__ inline LatentSpan latent_span(const LatentSight& see, int i) {
    const int row = min(i, see.N - 1);  // lanes stay together
    const int begin = see.of_keys ? row : see.places.first_key[row];
    const int end = see.of_keys ? see.places.behind[row] : begin + see.places.t[row] + 1;
    return {i == row ? begin : 0, i == row ? end : 0};
}

template <int WORDS>
struct LatentSeen {
    int row, end;  // its first row; of the places k of items
    __device__ int n_rows(const LatentSight& see) const { return min(WARP * WORDS, see.N - row); }  // that exist
    // of the row that is this lane's of word w
    __device__ LatentSpan span(const LatentSight& see, int w) const {
        return latent_span(see, row + w * WARP + forgotten(threadIdx.x % WARP));  // registers are short
    }
};

// tile `number`; all lanes of a warp make these calls
template <int WORDS>
__device__ inline LatentSeen<WORDS> latent_see(const LatentSight& see, int number) {
    LatentSeen<WORDS> x = {number * WARP * WORDS, see.lists ? see.counts[number] : 0};
    for (int w = 0; w < WORDS && !see.lists; w++) { x.end = max(x.end, x.span(see, w).end); }
    x.end = __reduce_max_sync(ALL_LANES, x.end);
    return x;
}

// the first place from k on with an item that a row sees, or x.end
template <int WORDS>
__device__ inline int latent_next(const LatentSight& see, const LatentSeen<WORDS>& x, int k) {
    int next = x.end;
    if (see.lists) { return k; }
    #pragma unroll
    for (int w = 0; w < WORDS; w++) {
        const LatentSpan span = x.span(see, w);
        next = k < span.end ? min(next, max(k, span.begin)) : next;
    }
    return __reduce_min_sync(ALL_LANES, next);
}

// in shared memory
template <int WORDS, int KEYS>
struct LatentChunk {
    int item[KEYS];  // each is one that exists
    alignas(8) unsigned seen_by[WORDS][KEYS];  // all 0: the chunk has no such item
};

template <int WORDS, int KEYS>
__device__ inline int latent_sees(const LatentChunk<WORDS, KEYS>& chunk, int row, int k) {
    return chunk.seen_by[row / WARP][k] >> row % WARP & 1;
}

// The items from place k0 on, of which each lane has one: of the KEYS / (THREADS / WARP) of its warp
template <int WORDS>
struct LatentItem {
    int item;
    unsigned seen_by[WORDS];
};
template <int THREADS, int KEYS, int WORDS>
__device__ inline LatentItem<WORDS> latent_look(const LatentSight& see, const LatentSeen<WORDS>& x, int k0) {
    const int EACH = KEYS / (THREADS / WARP), lane = threadIdx.x % WARP;
    static_assert(KEYS % (THREADS / WARP) == 0 && EACH <= WARP, "latent_look: a lane has one item at most");
    LatentItem<WORDS> mine = {};
    k0 += (int)threadIdx.x / WARP * EACH;
    if (see.lists) {
        const int k = k0 + min(lane, EACH - 1);
        const size_t at = latent_first(see, x.row) + (size_t)max(min(k, x.end - 1), 0);
        if (x.end > 0) { mine.item = see.items[at]; }
        for (int w = 0; w < WORDS && k < x.end; w++) { mine.seen_by[w] = see.seen_by[at * WORDS + w]; }
        return mine;
    }
    unsigned any = 0;
    #pragma unroll
    for (int w = 0; w < WORDS; w++) {
        const LatentSpan span = x.span(see, w);
        if (w == 0) { mine.item = __shfl_sync(ALL_LANES, span.begin, 0); }  // one that exists
        #pragma unroll
        for (int i = 0; i < EACH; i++) {
            const unsigned by = __ballot_sync(ALL_LANES, span.has(k0 + i));
            mine.seen_by[w] = lane == i ? by : mine.seen_by[w];
        }
        any |= mine.seen_by[w];
    }
    mine.item = any ? k0 + lane : mine.item;
    return mine;
}

// ... become a chunk, which all threads of the block know a __syncthreads later
template <int THREADS, int WORDS, int KEYS>
__device__ inline void latent_keep(LatentChunk<WORDS, KEYS>& chunk, const LatentItem<WORDS>& mine) {
    const int EACH = KEYS / (THREADS / WARP), lane = threadIdx.x % WARP, k = threadIdx.x / WARP * EACH + lane;
    if (lane >= EACH) { return; }
    chunk.item[k] = mine.item;
    #pragma unroll
    for (int w = 0; w < WORDS; w++) { chunk.seen_by[w][k] = mine.seen_by[w]; }
}

template <int THREADS, int WORDS, int KEYS>
__device__ inline void latent_find(LatentChunk<WORDS, KEYS>& chunk, const LatentSight& see, const LatentSeen<WORDS>& x,
                                   int k0) {
    latent_keep<THREADS>(chunk, latent_look<THREADS, KEYS>(see, x, k0));
}

// ---- a number for each place of a list ----

// numbers (N, topk) behind the ends of the lists of a tile's rows become 0. All threads of the block, THREADS, make
// these calls; a warp has rows, and each of its lanes looks for what the others need of one of them
template <int THREADS, int WORDS>
__device__ inline void latent_clear_ends(float* numbers, const LatentSight& see, const LatentSeen<WORDS>& x) {
    const int EACH = WARP * WORDS / (THREADS / WARP), lane = threadIdx.x % WARP;
    const int first = x.row + (int)threadIdx.x / WARP * EACH;
    const size_t mine = latent_list(see, first + min(lane, EACH - 1)).end;
    for (int i = 0; i < EACH && first + i < see.N; i++) {
        const size_t begin = __shfl_sync(ALL_LANES, mine, i), end = (size_t)(first + i + 1) * see.topk;
        for (size_t k = begin + lane; k < end; k += WARP) { numbers[k] = 0.0f; }
    }
}

// use(place, row, k): where item k of a chunk is on the list of a row that sees it. What a row sees of a chunk has
// places that follow each other
template <int THREADS, int WORDS, int KEYS, typename Use>
__device__ inline void latent_each_seen(const LatentSight& see, const LatentSeen<WORDS>& x,
                                        const LatentChunk<WORDS, KEYS>& chunk, Use use) {
    const int EACH = WARP * WORDS / (THREADS / WARP), lane = threadIdx.x % WARP;
    const int first = (int)threadIdx.x / WARP * EACH, row = x.row + first + min(lane, EACH - 1);
    size_t mine = (size_t)row * see.topk;
    if (row < see.N) { mine += (size_t)inverse_lists_find(see.lists + mine, see.topk, chunk.item[0]); }
    for (int i = 0; i < EACH; i++) {
        size_t place = __shfl_sync(ALL_LANES, mine, i);
        for (int k = lane; k < KEYS; k += WARP) {
            const int sees = latent_sees(chunk, first + i, k);
            const unsigned all = __ballot_sync(ALL_LANES, sees);
            if (sees) { use(place + (size_t)__popc(all & ((1u << lane) - 1)), first + i, k); }
            place += (size_t)__popc(all);
        }
    }
}

// ---- rows of channels ----

// channels of row i of one head: those of `from`, then, of keys, those that turn
template <typename X>
struct LatentRowsOf {
    const X *from, *k_rope;
    int row, k_rope_row;  // strides: elements from one row to the next
    int n, n_from;         // channels, of `from`
    __device__ const X* channel(int c) const { return c < n_from ? from + c : k_rope + (c - n_from); }
    __device__ unsigned stride(int c) const { return (unsigned)(c < n_from ? row : k_rope_row); }
};

// of row i
__device__ inline size_t latent_offset(int i, unsigned stride) { return (size_t)(unsigned)i * stride; }

template <typename X>
struct LatentInputsOf {
    const X *q, *kv, *k_rope, *dout;
    const float *max, *inv, *D;  // D: on CUDA cores
    LatentShape s;
    __device__ LatentRowsOf<X> queries(int h) const {
        const int Q = s.dn + s.dr;
        const LatentRowsOf<X> x = {q + h * Q, NULL, s.H * Q, 0, Q, Q};
        return x;
    }
    __device__ LatentRowsOf<X> keys(int h) const {
        const int KV = s.dn + s.dv;
        const LatentRowsOf<X> x = {kv + h * KV, k_rope, s.H * KV, s.dr, s.dn + s.dr, s.dn};
        return x;
    }
    __device__ LatentRowsOf<X> values(int h) const {
        const int KV = s.dn + s.dv;
        const LatentRowsOf<X> x = {kv + h * KV + s.dn, NULL, s.H * KV, 0, s.dv, s.dv};
        return x;
    }
    __device__ LatentRowsOf<X> gradients(int h) const {
        const LatentRowsOf<X> x = {dout + h * s.dv, NULL, s.H * s.dv, 0, s.dv, s.dv};
        return x;
    }
};

// ---- scratch, on the host ----

static inline unsigned latent_tiles(int N, int words) { return (unsigned)ceil_div(N, WARP * words); }

// ints of scratch: what tiles of N positions with topk numbers each see, 0: no lists, or tiles of n_keys keys, of as
// many words or fewer
static inline size_t latent_sight_ints(int N, int n_keys, int topk, int words) {
    const size_t numbers = (size_t)latent_tiles(N, words) * WARP * words * topk;
    return latent_tiles(N > n_keys ? N : n_keys, 1) + (1 + (size_t)words) * numbers;
}

template <int WORDS>
static inline void latent_join_(const LatentSight& see, const Device* dev) {
    latent_join_kernel<WORDS><<<latent_tiles(see.N, WORDS), LATENT_JOIN, 0, dev->stream>>>(see);
    cudaCheck(cudaGetLastError());
}

// of positions
template <int WORDS>
static inline LatentSight latent_sight(int* room, const int* chosen, const LatentShape* s, const Places* places,
                                       const Device* dev) {
    const size_t n = (size_t)latent_tiles(s->N, WORDS) * WARP * WORDS * (chosen ? s->topk : 0);
    LatentSight see;
    see.N = s->N, see.of_keys = 0, see.places = *places, see.topk = s->topk;
    see.lists = chosen, see.offsets = NULL;
    see.items = room, see.seen_by = (unsigned*)(room + n), see.counts = room + (1 + WORDS) * n;
    if (chosen) { latent_join_<WORDS>(see, dev); }
    return see;
}

// ... of n_keys keys, in the same room; lists: n_keys + 1 + N * topk ints
template <int WORDS>
static inline LatentSight latent_turned(LatentSight see, int* lists, int n_keys, const Device* dev) {
    if (see.lists) { inverse_lists(lists, lists + n_keys + 1, NULL, NULL, see.lists, see.N, see.topk, n_keys, dev); }
    see.of_keys = 1, see.N = n_keys;
    if (see.lists) {
        see.offsets = lists, see.lists = lists + n_keys + 1;
        latent_join_<WORDS>(see, dev);
    }
    return see;
}

template <typename X>
static inline LatentInputsOf<X> latent_inputs(const X* q, const X* kv, const X* k_rope, const X* dout,
                                              const float* max, const float* inv, const float* D,
                                              const LatentShape* s) {
    LatentInputsOf<X> in;
    in.q = q, in.kv = kv, in.k_rope = k_rope, in.dout = dout, in.max = max, in.inv = inv, in.D = D, in.s = *s;
    return in;
}
#endif  // __CUDACC__
#endif  // LLMC_LATENT_INPUTS_H
