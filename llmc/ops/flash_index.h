/*
Scores of indexer.h in bf16 on tensor cores, which calls it where it can: 8, 16, 32 or a multiple of 64 heads, dI a
multiple of 8 up to 128, rows that begin at multiples of 16 bytes; otherwise its own kernel runs.
    A block of threads has 128 entries, 32 for each of four warps, and 64 positions, of which it takes 64 heads at a
    time: all heads of one or several positions, or some of one. Entries are rows of a product, heads its columns, so a
    lane has the same two columns of each eight heads: it adds what it has of a position's, and a quad the rest
    copies      cp.async: the next heads are under way while these are used
    visibility  leading positions that see none of the entries are skipped
Error:  products of bf16 are exact in float; sums along trees, within the rounding of float.
Cost:   2 * heads * dI flops for each position and entry it sees. 48 KiB of shared memory (dI 64) or 64 (128). Not
        measured on a GPU.
*/
#ifndef LLMC_FLASH_INDEX_H
#define LLMC_FLASH_INDEX_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // WARP, bf16, pack_fits, cudaCheck, ceil_div
#include "../core/madd.h"    // madd
#include "../core/mma.h"     // cp_async_commit, cp_async_wait
#include "entry_windows.h"   // ENTRIES_SEEN
#include "tile.h"            // tile_load, tile_add_product_transposed, tile_quad_sum
#include <assert.h>

enum { FLASH_INDEX_THREADS = 128, FLASH_INDEX_ENTRIES = 128, FLASH_INDEX_HEADS = 64, FLASH_INDEX_POSITIONS = 64 };

// what the kernel is given beside arrays
typedef struct {
    int heads, dI, topk;
    int n_first, N;  // N positions from n_first on
    int n_columns;   // of scores
    int all;         // positions that choose all they see need scores, too
    int r;
} FlashIndex;

static inline int flash_index_fits(const bf16* q, const bf16* k, int heads, int dI) {
    const int whole = heads == 8 || heads == 16 || heads == 32 || heads % FLASH_INDEX_HEADS == 0;
    return whole && dI <= 128 && pack_fits(q, dI) && pack_fits(k, dI);
}
static inline int flash_index_fits(const float*, const float*, int, int) { return 0; }

// what FLASH_INDEX_HEADS heads add to the scores of this warp's entries; a (heads of these, in shared memory). done(p)
// is called with scores of a position when it has all its heads: p counts positions from the row of the first head on
template <typename Done>
__device__ inline void flash_index_add_(float (&score)[2][2], const float (&sums)[2][8][4], const float* a, int row,
                                        int n_rows, int heads, Done done) {
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        const float* weight = a + 8 * n + threadIdx.x % 4 * 2;
        #pragma unroll
        for (int i = 0; i < 8; i++) {  // two blocks of entries, two rows of each, two heads
            const float x = sums[i / 4][n][i % 4];
            score[i / 4][i % 4 / 2] = madd(weight[i % 2], x < 0.0f ? 0.0f : x, score[i / 4][i % 4 / 2]);
        }
        if ((row + 8 * n + 8) % heads == 0 && row + 8 * n < n_rows) { done((row + 8 * n) / heads); }
    }
}

// scores (N, n_columns); grid (tiles of positions, tiles of entries). shared memory: entries, then two stages of heads
template <int W>
__global__ void __launch_bounds__(FLASH_INDEX_THREADS)
flash_index_kernel(float* scores, const bf16* q, const bf16* k, const float* a, FlashIndex s, const int* t,
                   const int* first_entry) {
    const int TILE = FLASH_INDEX_HEADS * W;
    extern __shared__ __align__(128) bf16 index_tiles[];
    __shared__ int seen[FLASH_INDEX_POSITIONS], first[FLASH_INDEX_POSITIONS];
    __shared__ float weights[2][FLASH_INDEX_HEADS];
    bf16 *k_tile = index_tiles, *q_tile = k_tile + FLASH_INDEX_ENTRIES * W;
    const int block = blockIdx.x * FLASH_INDEX_POSITIONS, e = blockIdx.y * FLASH_INDEX_ENTRIES;
    const int n_positions = min(FLASH_INDEX_POSITIONS, s.N - block), lane = threadIdx.x % WARP;
    const int entry = e + (int)threadIdx.x / WARP * 32;  // the first of this warp
    if ((int)threadIdx.x < n_positions) {
        const int n = s.n_first + block + (int)threadIdx.x, sees = ENTRIES_SEEN(t[n], s.r);
        assert(sees <= s.n_columns);
        seen[threadIdx.x] = s.all || sees > s.topk ? sees : 0;
        first[threadIdx.x] = first_entry[n];
    }
    __syncthreads();
    for (int begin = 0, end = 0; begin < n_positions; begin = end) {  // positions of one document
        int most = 0;
        for (; end < n_positions && first[end] == first[begin]; end++) { most = max(most, seen[end]); }
        if (most <= e) { continue; }
        const size_t entries = (size_t)(first[begin] + e) * s.dI;
        while (seen[begin] <= e) { begin++; }
        const size_t head = (size_t)(s.n_first + block + begin) * s.heads;
        const int n_rows = (end - begin) * s.heads;
        auto load_heads = [&](int row) {
            const int stage = row / FLASH_INDEX_HEADS % 2;
            tile_load<FLASH_INDEX_HEADS, W, FLASH_INDEX_THREADS>(q_tile + stage * TILE, q + (head + row) * s.dI,
                                                                 (size_t)s.dI, n_rows - row, s.dI);
            if (threadIdx.x < FLASH_INDEX_HEADS) {
                weights[stage][threadIdx.x] = row + (int)threadIdx.x < n_rows ? a[head + row + threadIdx.x] : 0.0f;
            }
            cp_async_commit();
        };
        float score[2][2] = {};
        auto done = [&](int p) {
            float* to = scores + (size_t)(block + begin + p) * s.n_columns;
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float sum = tile_quad_sum(score[i / 2][i % 2]);
                const int column = entry + i / 2 * 16 + i % 2 * 8 + lane / 4;
                if (lane % 4 == 0 && column < seen[begin + p]) { to[column] = sum; }
                score[i / 2][i % 2] = 0.0f;
            }
        };
        __syncthreads();  // the document before has been read
        tile_load<FLASH_INDEX_ENTRIES, W, FLASH_INDEX_THREADS>(k_tile, k + entries, (size_t)s.dI, most - e, s.dI);
        load_heads(0);
        for (int row = 0; row < n_rows; row += FLASH_INDEX_HEADS) {
            const int stage = row / FLASH_INDEX_HEADS % 2;
            cp_async_wait<0>();
            __syncthreads();  // these heads have arrived, and nobody uses those before any more
            if (row + FLASH_INDEX_HEADS < n_rows) { load_heads(row + FLASH_INDEX_HEADS); }
            float sums[2][8][4];
            tile_set_zero(sums);
            tile_add_product_transposed<W>(sums, k_tile, entry - e, q_tile + stage * TILE);
            flash_index_add_(score, sums, weights[stage], row, n_rows, s.heads, done);
        }
    }
}

template <int W>
static inline void flash_index_of_(float* scores, const bf16* q, const bf16* k, const float* a, const FlashIndex* s,
                                   const int* t, const int* first_entry, const Device* dev) {
    const int n_bytes = (int)sizeof(bf16) * W * (FLASH_INDEX_ENTRIES + 2 * FLASH_INDEX_HEADS);
    const dim3 grid((unsigned)ceil_div(s->N, FLASH_INDEX_POSITIONS),
                    (unsigned)ceil_div(s->n_columns, FLASH_INDEX_ENTRIES));
    cudaCheck(cudaFuncSetAttribute(flash_index_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    flash_index_kernel<W><<<grid, FLASH_INDEX_THREADS, n_bytes, dev->stream>>>(scores, q, k, a, *s, t, first_entry);
    cudaCheck(cudaGetLastError());
}

static inline void flash_index_scores(float* scores, const bf16* q, const bf16* k, const float* a, const FlashIndex* s,
                                      const int* t, const int* first_entry, const Device* dev) {
    if (s->dI <= 64) { flash_index_of_<64>(scores, q, k, a, s, t, first_entry, dev); }
    else { flash_index_of_<128>(scores, q, k, a, s, t, first_entry, dev); }
}
static inline void flash_index_scores(float*, const float*, const float*, const float*, const FlashIndex*, const int*,
                                      const int*, const Device*) {}
#endif  // __CUDACC__
#endif  // LLMC_FLASH_INDEX_H
