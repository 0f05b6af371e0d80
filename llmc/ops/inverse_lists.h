/*
Lists turned round: each of N positions has a list of entries; which positions have an entry in theirs? What a gradient
of an entry is summed over, without atomics.
    chosen (N, topk)       rows of entries, 0 .. n_entries - 1, each once, ascending; -1 behind the last one
    offsets (n_entries+1)  the list of entry e are places offsets[e] .. offsets[e + 1] - 1; offsets[n_entries]: of all
    positions (N * topk)   the positions n of an entry, ascending. Behind the last list nothing is written
    pairs (N * topk)       of each its n * topk + j, where chosen has the entry. NULL for either: nobody asks for it
    scratch                inverse_lists_scratch ints, on the device
Everything is on the device, and nothing waits for the host.
Cost:   C, N 4096, topk 128, 1024 entries, random: 1.9 ns for each of the 524,288, one thread, AMD EPYC (Zen 4), the
        smallest of 100 calls on a busy machine. CUDA: a block of threads reads what is chosen of its 32 entries, after
        a search of log2(topk) steps for every position; not measured on a GPU.
Order:  whole numbers, the same for any number of threads.
Source: counting sort: Seward 1954
*/
#ifndef LLMC_INVERSE_LISTS_H
#define LLMC_INVERSE_LISTS_H
#include "../core/device.h"  // Device, ceil_div, device_zero
#include "../core/kernel.h"  // WARP, ALL_LANES, grid_first, grid_step, grid_blocks
#ifdef __CUDACC__
#include "embedding.h"  // embedding_scan
#endif

// ---- plain C: read this first ----

static inline void inverse_lists_ref(int* offsets, int* positions, int* pairs, const int* chosen, int N, int topk,
                                     int n_entries) {
    int place = 0;
    for (int e = 0; e < n_entries; e++) {
        offsets[e] = place;
        for (int pair = 0; pair < N * topk; pair++) {
            if (chosen[pair] != e) { continue; }
            if (positions) { positions[place] = pair / topk; }
            if (pairs) { pairs[place] = pair; }
            place++;
        }
    }
    offsets[n_entries] = place;
}

static inline void inverse_lists_check_(int N, int topk, int n_entries) {
    if ((int64_t)N * topk > INT32_MAX || n_entries < 0) {
        fail_run("inverse lists: %d positions with %d entries each: expected below 2^31 in all", N, topk);
    }
}

#ifndef __CUDACC__  // ---- fast C: parts of the positions over threads ----

// how often each part has each entry, which becomes the places where the part begins
static inline size_t inverse_lists_scratch(int n_entries, const Device* dev) {
    return (size_t)dev->n_threads * (size_t)n_entries;
}

// counts of parts become places: all parts of an entry, then the next entry
static inline void inverse_lists_scan_(int* offsets, int* starts, int n_parts, int n_entries) {
    int place = 0;
    for (int e = 0; e < n_entries; e++) {
        offsets[e] = place;
        for (int part = 0; part < n_parts; part++) {
            const int count = starts[(size_t)part * n_entries + e];
            starts[(size_t)part * n_entries + e] = place;
            place += count;
        }
    }
    offsets[n_entries] = place;
}

static inline void inverse_lists(int* offsets, int* positions, int* pairs, int* scratch, const int* chosen, int N,
                                 int topk, int n_entries, const Device* dev) {
    const int n_parts = dev->n_threads;
    inverse_lists_check_(N, topk, n_entries);
    #pragma omp parallel for
    for (int part = 0; part < n_parts; part++) {
        const int first = (int)((int64_t)N * part / n_parts), last = (int)((int64_t)N * (part + 1) / n_parts);
        int* count = scratch + (size_t)part * n_entries;
        memset(count, 0, sizeof(int) * (size_t)n_entries);
        for (int n = first; n < last; n++) {
            const int* row = chosen + (size_t)n * topk;
            for (int j = 0; j < topk && row[j] >= 0; j++) { count[row[j]]++; }
        }
    }
    inverse_lists_scan_(offsets, scratch, n_parts, n_entries);
    #pragma omp parallel for
    for (int part = 0; part < n_parts; part++) {
        const int first = (int)((int64_t)N * part / n_parts), last = (int)((int64_t)N * (part + 1) / n_parts);
        int* begin = scratch + (size_t)part * n_entries;
        for (int n = first; n < last; n++) {
            const int* row = chosen + (size_t)n * topk;
            for (int j = 0; j < topk && row[j] >= 0; j++) {
                const int place = begin[row[j]]++;
                if (positions) { positions[place] = n; }
                if (pairs) { pairs[place] = n * topk + j; }
            }
        }
    }
}

#else  // ---- CUDA: a block of threads has 32 neighbouring entries, and takes positions block by block ----

enum { INVERSE_WARPS = 16, INVERSE_BLOCK = INVERSE_WARPS * WARP };  // positions at a time, one for each thread

static inline size_t inverse_lists_scratch(int n_entries, const Device* dev) {
    (void)n_entries, (void)dev;
    return 0;
}

// counts (n_entries + 1), of which the last stays 0. Whole numbers: atomics in any order give the same
__global__ static void inverse_lists_count_kernel(int* counts, const int* chosen, size_t n) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) {
        if (chosen[i] >= 0) { atomicAdd(&counts[chosen[i]], 1); }
    }
}

// the first place of a row with an entry of `first` or more. As unsigned numbers rows ascend to their end: -1 is most
__device__ inline int inverse_lists_find(const int* row, int topk, int first) {
    int low = 0, high = topk;
    while (low < high) {
        const int middle = (low + high) / 2;
        if ((unsigned)row[middle] < (unsigned)first) { low = middle + 1; } else { high = middle; }
    }
    return low;
}

// which of the entries first .. first + 31 a row has, from place j on: bits
__device__ inline unsigned inverse_lists_word_(const int* row, int j, int topk, int first) {
    unsigned word = 0;
    for (; j < topk && (unsigned)row[j] < (unsigned)first + WARP; j++) { word |= 1u << (row[j] - first); }
    return word;
}

// this lane's bits become those of its number in all words of the warp: 32 x 32 bits are turned
__device__ inline unsigned inverse_lists_turn_(unsigned word) {
    unsigned turned = 0;
    for (int bit = 0; bit < WARP; bit++) {
        const unsigned votes = __ballot_sync(ALL_LANES, word >> bit & 1);
        if ((int)threadIdx.x % WARP == bit) { turned = votes; }
    }
    return turned;
}

// block is (INVERSE_BLOCK), grid (ceil(n_entries / 32)). Lane i of every warp writes the list of entry first + i
__global__ static void __launch_bounds__(INVERSE_BLOCK)
inverse_lists_place_kernel(int* positions, int* pairs, const int* offsets, const int* chosen, int N, int topk,
                           int n_entries) {
    __shared__ unsigned words[INVERSE_BLOCK], turned[INVERSE_WARPS][WARP];
    __shared__ int begins[INVERSE_BLOCK];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, first = blockIdx.x * WARP;
    int place = first + lane < n_entries ? offsets[first + lane] : 0;
    for (int block = 0; block < N; block += INVERSE_BLOCK) {
        const int n = block + (int)threadIdx.x;
        const int* row = chosen + (size_t)n * topk;
        const int begin = n < N ? inverse_lists_find(row, topk, first) : 0;
        const unsigned word = n < N ? inverse_lists_word_(row, begin, topk, first) : 0;
        unsigned mine = inverse_lists_turn_(word);
        __syncthreads();  // the block before has been read
        words[threadIdx.x] = word, begins[threadIdx.x] = begin, turned[warp][lane] = mine;
        __syncthreads();
        int at = place;
        for (int w = 0; w < INVERSE_WARPS; w++) {
            const int count = __popc(turned[w][lane]);
            at += w < warp ? count : 0;
            place += count;
        }
        for (; mine; mine &= mine - 1, at++) {
            const int i = warp * WARP + __ffs((int)mine) - 1;
            if (positions) { positions[at] = block + i; }
            if (pairs) {
                pairs[at] = (block + i) * topk + begins[i] + __popc(words[i] & ((1u << lane) - 1));
            }
        }
    }
}

static inline void inverse_lists(int* offsets, int* positions, int* pairs, int* scratch, const int* chosen, int N,
                                 int topk, int n_entries, const Device* dev) {
    const size_t n = (size_t)N * topk;
    const unsigned n_counts = (unsigned)n_entries + 1;
    (void)scratch;
    inverse_lists_check_(N, topk, n_entries);
    device_zero(offsets, sizeof(int) * n_counts, dev);
    if (n == 0 || n_entries == 0) { return; }
    inverse_lists_count_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(offsets, chosen, n);
    embedding_scan(offsets, (int)n_counts, dev);
    inverse_lists_place_kernel<<<(unsigned)ceil_div(n_entries, WARP), INVERSE_BLOCK, 0, dev->stream>>>(
        positions, pairs, offsets, chosen, N, topk, n_entries);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_INVERSE_LISTS_H
