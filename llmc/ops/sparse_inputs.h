/*
What the kernels of sparse attention share, those on CUDA cores (sparse_attention_kernels.h) and those on tensor cores
(flash_sparse.h): what they are given, what a position sees, and which positions see a key or an entry.
*/
#ifndef LLMC_SPARSE_INPUTS_H
#define LLMC_SPARSE_INPUTS_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // GRID_BLOCK, cudaCheck
#include "inverse_lists.h"   // inverse_lists
#include "sparse_shape.h"    // SparseShape, Places, EntryWindows

template <typename X>
struct SparseInputsOf {
    const X *q, *kv, *entries;
    const int* chosen;
    SparseShape s;
    Places places;
    EntryWindows w;
    int has_entries;
    __device__ const EntryWindows* windows() const { return has_entries ? &w : NULL; }
};

template <typename X>
static inline SparseInputsOf<X> sparse_inputs_(const X* q, const X* kv, const X* entries, const int* chosen,
                                               const SparseShape* s, const Places* places, const EntryWindows* w) {
    SparseInputsOf<X> x;
    x.q = q, x.kv = kv, x.entries = entries, x.chosen = w ? chosen : NULL;
    x.s = *s;
    if (places) { x.places = *places; }
    if (w) { x.w = *w; }
    x.has_entries = w != NULL;
    return x;
}

// what position n sees
struct SparseSeen {
    int n, n_window, first, n_keys;
};

template <typename X>
__device__ inline SparseSeen sparse_seen_(const SparseInputsOf<X>& in, int n) {
    SparseSeen see;
    see.n = n;
    see.n_window = sparse_window_keys(&in.s, &in.places, n);
    see.first = sparse_first_key(&in.s, &in.places, n);
    see.n_keys = see.n_window + sparse_entries(&in.s, &in.places, in.windows(), in.chosen, n);
    return see;
}

// where the k-th of its keys is, k < n_keys
template <typename X>
__device__ inline const X* sparse_key_(const SparseInputsOf<X>& in, const SparseSeen& see, int k) {
    if (k < see.n_window) { return in.kv + (size_t)(see.first + k) * in.s.d; }
    return in.entries + (size_t)sparse_entry(&in.s, in.windows(), in.chosen, see.n, k - see.n_window) * in.s.d;
}

// ---- backward: which positions see a key ----

// of the window, or entries where there are no lists
struct SparseIntervals {
    int *begin, *end;
};

// begin and end are 0 before. The first position of a document here sees keys that are no other's
__global__ void sparse_window_intervals_kernel(SparseIntervals of, SparseShape s, Places places) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= s.N) { return; }
    const int own = sparse_own_key(&places, n), end = places.behind[n];
    const int first = sparse_is_first(&places, n) ? sparse_first_key(&s, &places, n) : own;
    for (int u = first; u <= own; u++) {
        const int at = n + u - own;  // of the position whose key it is
        of.begin[u] = n, of.end[u] = end - at < s.window ? end : at + s.window;
    }
}

// ... and entries that ended before it
__global__ void sparse_entry_intervals_kernel(SparseIntervals of, SparseShape s, Places places, EntryWindows w) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= s.N) { return; }
    const int seen = ENTRIES_SEEN(places.t[n], w.r), ends = (places.t[n] + 1) % w.r == 0;
    for (int e = sparse_is_first(&places, n) ? 0 : seen - ends; e < seen; e++) {
        of.begin[w.first_entry[n] + e] = n, of.end[w.first_entry[n] + e] = places.behind[n];
    }
}

struct SparsePositions {
    SparseIntervals of_window, of_entries;
    int *offsets, *pairs;  // of lists (inverse_lists.h)
};

// ints that they take. n_pairs: N * topk, or 0 without lists
static inline size_t sparse_positions_room_(int rows, int n_entries, size_t n_pairs) {
    return 2 * (size_t)rows + 3 * (size_t)n_entries + 1 + n_pairs;
}

template <typename X>
static inline SparsePositions sparse_find_positions_(int* room, const SparseInputsOf<X>& in, int n_entries,
                                                     const Device* dev) {
    const unsigned blocks = (unsigned)ceil_div(in.s.N, GRID_BLOCK);
    const int rows = sparse_rows(&in.s);
    SparsePositions x;
    x.of_window.begin = room, room += rows;
    x.of_window.end = room, room += rows;
    x.of_entries.begin = room, room += n_entries;
    x.of_entries.end = room, room += n_entries;
    x.offsets = room, room += n_entries + 1;
    x.pairs = room;
    device_zero(x.of_window.begin, sizeof(int) * 2 * (size_t)rows, dev);
    sparse_window_intervals_kernel<<<blocks, GRID_BLOCK, 0, dev->stream>>>(x.of_window, in.s, in.places);
    if (in.chosen) {
        inverse_lists(x.offsets, NULL, x.pairs, NULL, in.chosen, in.s.N, in.s.topk, n_entries, dev);
    } else if (n_entries > 0) {
        device_zero(x.of_entries.begin, sizeof(int) * 2 * (size_t)n_entries, dev);
        sparse_entry_intervals_kernel<<<blocks, GRID_BLOCK, 0, dev->stream>>>(x.of_entries, in.s, in.places, in.w);
    }
    cudaCheck(cudaGetLastError());
    return x;
}
#endif  // __CUDACC__
#endif  // LLMC_SPARSE_INPUTS_H
