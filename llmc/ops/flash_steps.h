/*
What blocks of flash_attention.h, of flash_hopper.h and, in part, of split_attention.h, flash_sparse_hopper.h and
flash_latent_hopper.h do beside their products: who sees whom, which block computes what, weights of scores, and what
backward needs of each query. Sums are those of tile.h: a warp has M * 16 rows, and a quad of its lanes a row.
*/
#ifndef LLMC_FLASH_STEPS_H
#define LLMC_FLASH_STEPS_H
#include "attention_shape.h"  // AttentionShape
#ifdef __CUDACC__
#include "../core/kernel.h"  // WARP, Pack, bf16, kernel_exp2, LOG2_E
#include "../core/mma.h"     // cp_async_16_zfill
#include "flash_rows.h"      // FlashRow, FLASH_ROWS_THREADS, flash_row_D, flash_row
#include "tile.h"            // tile_quad_max

static const float FLASH_LN_2 = 0.693147181f;

// ---- who sees whom ----

struct FlashRange {
    int first, last;
    __device__ inline bool has(int i) const { return i >= first && i <= last; }
    __device__ inline bool has_all(int i, int n) const { return i >= first && i + n - 1 <= last; }
};

// keys that all queries t..t+n-1 see. For a query or a key that does not exist, whose row is not kept, the last one's
__device__ inline FlashRange flash_keys(const AttentionShape& s, int b, int t, int n) {
    return {attention_sees_from(&s, b, min(t + n, s.T) - 1), attention_last_key(&s, t)};
}
// queries that see all keys u..u+n-1
__device__ inline FlashRange flash_queries(const AttentionShape& s, int b, int u, int n) {
    return {attention_first_query(&s, u + n - 1), attention_seen_until(&s, b, min(u, s.keys - 1))};
}

// ---- who computes what ----

// Blocks begin in the order of their numbers, and those at work at a time should stream the same tensors, so that these
// come from the L2 (50 MiB of an H100 or H200, 40 of an A100) and not from memory. So heads go in groups that together
// stream FLASH_STREAM bytes, 64 heads of 64 channels at T 1024, and in a group tile after tile: whatever T is, a group
// has 512 or 1024 blocks of mma.sync, where some 264 are at work, and at least 128 by wgmma, of 132.
#ifndef FLASH_STREAM  // test_attention.c: fewer, so that its few heads are several groups
#define FLASH_STREAM (16 << 20)
#endif

typedef struct {
    int head, tile;
} FlashPlace;

// of block i of n_heads * n_tiles, `together` heads in a group; the last one has what is left
FM_FUNCTION FlashPlace flash_place(int i, int n_heads, int n_tiles, int together) {
    int first = i / (together * n_tiles) * together, n = n_heads - first < together ? n_heads - first : together;
    i -= first * n_tiles;
    FlashPlace place = {first + i % n, i / n};
    return place;
}

// how many of the n_heads heads stream FLASH_STREAM bytes, if one streams n_rows rows of two tensors
static inline int flash_together(int n_heads, int64_t n_rows, int HS) {
    int64_t n = FLASH_STREAM / (2 * (int64_t)sizeof(bf16) * n_rows * HS);
    return n < 1 ? 1 : n < n_heads ? (int)n : n_heads;
}

// this block's, in a grid (heads, tiles)
__device__ inline FlashPlace flash_my_place(int together) {
    return flash_place((int)(blockIdx.y * gridDim.x + blockIdx.x), (int)gridDim.x, (int)gridDim.y, together);
}

static inline dim3 flash_grid(int n_heads, int n_rows, int tile) {
    return dim3((unsigned)n_heads, (unsigned)ceil_div(n_rows, tile));
}

// ---- forward: weights of scores ----

// of a lane's row `half` what is not seen becomes `hidden`; u: the column where the warp's first begins
template <int N>
__device__ inline void flash_hide(float (&x)[N][4], int half, FlashRange seen, int u, float hidden) {
    // as columns n / 2 * 8 + n % 2
    const int at = u + threadIdx.x % WARP % 4 * 2, first = seen.first - at, last = seen.last - at;
    #pragma unroll
    for (int n = 0; n < 2 * N; n++) {
        float& y = x[n / 2][2 * half + n % 2];
        y = n / 2 * 8 + n % 2 >= first && n / 2 * 8 + n % 2 <= last ? y : hidden;
    }
}

// scores that are not seen become -Inf; t, u: query, of sequence b, and key of the warp's first row and column
template <int M, int N>
__device__ inline void flash_mask_scores(float (&scores)[M][N][4], const AttentionShape& s, int b, int t, int u) {
    int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            flash_hide(scores[m], half, flash_keys(s, b, t + 16 * m + lane / 4 + half * 8, 1), u, -INFINITY);
        }
    }
}

// scores become 2^(score * scale - max); this lane's part of sum shrinks to a larger maximum, and what was summed up
// with a smaller one has to: times shrink. The maximum begins at a number, not at -Inf, so no difference is Inf - Inf
template <int M, int N>
__device__ inline void flash_softmax_weights(float (&scores)[M][N][4], float (&shrink)[M][2],
                                             float (&max)[M][2], float (&sum)[M][2], float scale) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {  // the two rows of this lane
            float top = -INFINITY;
            #pragma unroll
            for (int n = 0; n < N; n++) { top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1])); }
            top = fmaxf(max[m][half], tile_quad_max(top) * scale);
            shrink[m][half] = kernel_exp2(max[m][half] - top);
            max[m][half] = top;
            sum[m][half] *= shrink[m][half];
            #pragma unroll
            for (int n = 0; n < 2 * N; n++) {
                float& p = scores[m][n / 2][2 * half + n % 2];
                p = kernel_exp2(p * scale - top);
                sum[m][half] += p;
            }
        }
    }
}

// rows of sums times what is theirs
template <int M, int N>
__device__ inline void flash_scale_rows(float (&sums)[M][N][4], const float (&factor)[M][2]) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < 4 * N; n++) { sums[m][n / 4][n % 4] *= factor[m][n % 4 / 2]; }
    }
}

// both at once
template <int W, int M, int N>
__device__ inline void flash_softmax_step(float (&scores)[M][N][4], float (&out)[M][W / 8][4], float (&max)[M][2],
                                          float (&sum)[M][2], float scale) {
    float shrink[M][2];
    flash_softmax_weights(scores, shrink, max, sum, scale);
    flash_scale_rows(out, shrink);
}

// ---- backward ----

// where the FlashRow of query t is: two make 16 bytes, so each head begins at an even place
__host__ __device__ inline size_t flash_row_stride(const AttentionShape* s) {
    return (size_t)(attention_queries(s) + 1) / 2 * 2;
}
__device__ inline size_t flash_at_row_(const AttentionShape& s, int b, int h, int t) {
    return ((size_t)b * s.NH + h) * flash_row_stride(&s) + (t - s.t0);
}

// those of N queries of head h from t on set out for shared memory; 0 for a query that does not exist: its q and dout
// are 0, and so is what it adds
template <int N>
__device__ inline void flash_load_rows(FlashRow* to, const FlashRow* rows, const AttentionShape& s, int b, int h,
                                       int t) {
    if (threadIdx.x >= N / 2) { return; }
    int n = 2 * threadIdx.x, n_exist = max(0, min(2, s.T - t - n));
    cp_async_16_zfill(to + n, rows + flash_at_row_(s, b, h, t) + n, n_exist * (int)sizeof(FlashRow));
}

// of this lane's two queries, those of rows row + lane / 4 and 8 below in a tile of n_queries from query t on
__device__ inline void flash_my_rows(FlashRow (&mine)[2], const FlashRow* rows, const AttentionShape& s, int b, int h,
                                     int t, int n_queries, int row) {
    for (int half = 0; half < 2; half++) {
        int n = row + 8 * half + threadIdx.x % WARP / 4;
        FlashRow none = {INFINITY, 0.0f};
        mine[half] = n < n_queries ? rows[flash_at_row_(s, b, h, t + n)] : none;
    }
}
#endif  // __CUDACC__
#endif  // LLMC_FLASH_STEPS_H
