/*
Attention of TILE_ROWS rows of a block against chunks of keys, on tensor cores (tile.h): scores whose channels eight
warps share, rows of them for a softmax, and sums of which each warp has an eighth of the channels. For flash_sparse.h,
whose rows are heads, and flash_latent.h, whose rows are positions.
    dots      sums of two halves of the channels, (TILE_ROWS, KEYS) floats each, in shared memory: a warp has 32 rows,
              32 keys and one half
    weights   a thread reads four columns of each 16 of one row, a quad the whole row; rounded they become a tile
    sums      (TILE_ROWS, W/8 channels) of each warp, as tile.h has them
A block has TILE_ROWS_THREADS threads, and all lanes of a warp make each call together.
*/
#ifndef LLMC_TILE_ROWS_H
#define LLMC_TILE_ROWS_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // WARP, bf16, pack_load, pack_store
#include "tile.h"            // tile_chunk, tile_set_pair, tile_add_product_transposed

enum { TILE_ROWS = 64, TILE_ROWS_THREADS = 256 };

// ---- scores ----

// Four columns stay together; which ones depends on the row, so that neither the sums of eight rows nor four columns of
// all rows meet in a bank
template <int KEYS>
__device__ inline float* tile_rows_dot_(float* dots, int row, int column) {
    return dots + row * KEYS + (column ^ ((row & 1) * 16 + (row & 2) * 4));
}

// dots = 32 rows from `row` on times 32 keys from `key` on; half of the channels, STEPS times 16 at once
template <int W, int KEYS, int STEPS = 4>
__device__ inline void tile_rows_dots(float* dots, bf16* x, int row, bf16* keys, int key, int half) {
    float sums[2][4][4];
    tile_set_zero(sums);
    tile_add_product_transposed<W, STEPS, W / 32>(sums, x, row, keys + key * W, half * (W / 32));
    const int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int i = 0; i < 16; i++) {  // two numbers of blocks of 16 rows, their halves, blocks of 8 columns
        const int m = i / 8, n = i / 2 % 4, of = i % 2 * 2;
        const int r = row + 16 * m + 4 * of + lane / 4;
        float2* to = (float2*)tile_rows_dot_<KEYS>(dots, r, key + 8 * n + lane % 4 * 2);
        *to = make_float2(sums[m][n][of], sums[m][n][of + 1]);
    }
}

// A row belongs to a quad: this lane's is tile_rows_row, and of it four columns of each 16, from 4 (lane % 4) on
__device__ inline int tile_rows_row() { return threadIdx.x / WARP * 8 + threadIdx.x % WARP / 4; }

template <int KEYS>
__device__ inline void tile_rows_read(float (&x)[KEYS / 16][4], float* dots) {
    #pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        const int row = tile_rows_row(), column = 16 * i + threadIdx.x % 4 * 4;
        const float4 one = *(const float4*)tile_rows_dot_<KEYS>(dots, row, column);
        const float4 two = *(const float4*)tile_rows_dot_<KEYS>(dots + TILE_ROWS * KEYS, row, column);
        x[i][0] = one.x + two.x, x[i][1] = one.y + two.y, x[i][2] = one.z + two.z, x[i][3] = one.w + two.w;
    }
}

// the weights of a quad's row, rounded: a tile of width 2 * KEYS that takes the place of dots' first half
template <int KEYS>
__device__ inline void tile_rows_write(float* dots, const float (&x)[KEYS / 16][4]) {
    const int row = tile_rows_row(), q = threadIdx.x % 4;
    __syncwarp();  // the quad has read its row
    #pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        bf16* to = tile_chunk<2 * KEYS>((bf16*)dots, row, 2 * i + q / 2) + q % 2 * 4;
        *(uint2*)to = make_uint2(tile_pair_(x[i][0], x[i][1]), tile_pair_(x[i][2], x[i][3]));
    }
}

// the number of column j of x[i]
__device__ inline int tile_rows_column(int i, int j) { return 16 * i + threadIdx.x % 4 * 4 + j; }

// ---- results: a warp has W/8 channels of all rows, or N*8 of them, where fewer warps share a tile ----

// sums (M*16, channels of this warp) go to memory, n_rows rows of C channels, `stride` apart, by way of the warp's
// channels of a tile, which no other warp uses any more
template <int W, int M, int N>
__device__ inline void tile_rows_store(bf16* x, size_t stride, int n_rows, int C, bf16* tile,
                                       const float (&sums)[M][N][4]) {
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP % (W / 8 / N) * N;
    __syncwarp();
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n++) {
            const float(&s)[4] = sums[m][n];
            tile_set_pair<W>(tile, 16 * m + lane / 4, first + n, s[0], s[1]);
            tile_set_pair<W>(tile, 16 * m + lane / 4 + 8, first + n, s[2], s[3]);
        }
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < M * 16 * N / WARP; i++) {
        const int row = (i * WARP + lane) / N, chunk = first + lane % N;
        if (row < n_rows && chunk * 8 < C) {
            pack_store(x + (size_t)row * stride + chunk * 8, pack_load<8>(tile_chunk<W>(tile, row, chunk)));
        }
    }
}

// rows of sums times their factors
template <int M, int N>
__device__ inline void tile_rows_scale(float (&sums)[M][N][4], const float* factors) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const float factor = factors[16 * m + 8 * half + threadIdx.x % WARP / 4];
            #pragma unroll
            for (int n = 0; n < N; n++) { sums[m][n][2 * half] *= factor, sums[m][n][2 * half + 1] *= factor; }
        }
    }
}
#endif  // __CUDACC__
#endif  // LLMC_TILE_ROWS_H
