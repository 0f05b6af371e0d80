/*
What the tensor core kernels of sparse attention share, those by mma.sync (flash_sparse.h) and those by wgmma
(flash_sparse_hopper.h): where the keys of a chunk are, and what a position gives its keys.
*/
#ifndef LLMC_FLASH_SPARSE_STEPS_H
#define LLMC_FLASH_SPARSE_STEPS_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // bf16
#include "sparse_inputs.h"   // SparseInputsOf, SparseSeen, sparse_key_

enum {
    FLASH_SPARSE_HEADS = 64,  // of a block
    FLASH_SPARSE_KEYS = 64    // of a chunk; in backward by mma.sync, with twice the products at a time, half of them
};

// ---- which keys ----

// where the keys of a chunk are; those beyond the last one are at an address that is never read
template <int KEYS>
struct FlashSparseChunk {
    const bf16* key[KEYS];
    int n;
};

// the keys k0.. of those; a __syncthreads later all threads know them
template <int KEYS>
__device__ inline void flash_sparse_find(FlashSparseChunk<KEYS>& chunk, const SparseInputsOf<bf16>& in,
                                         const SparseSeen& see, int k0) {
    const int k = k0 + (int)threadIdx.x;
    if (threadIdx.x < KEYS) { chunk.key[threadIdx.x] = k < see.n_keys ? sparse_key_(in, see, k) : in.q; }
    if (threadIdx.x == 0) { chunk.n = min(KEYS, see.n_keys - k0); }
}

// ---- backward ----

// what positions first..end-1 give what they see, of each tile of heads (positions, tiles, row, d): keys of the window,
// then entries
struct FlashSparseGiven {
    bf16* x;
    size_t row;
    int first, end, tiles;
};

__device__ inline bf16* flash_sparse_given_at(const FlashSparseGiven& given, int n, int tile, int k, int d) {
    return given.x + (((size_t)(n - given.first) * given.tiles + tile) * given.row + (size_t)k) * d;
}
#endif  // __CUDACC__
#endif  // LLMC_FLASH_SPARSE_STEPS_H
