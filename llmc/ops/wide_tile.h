/*
Tiles for products of warpgroups (wgmma.h) on Hopper: from memory into shared memory, products with them, and results
back to memory; what tile.h is for products of a warp.
    wide tile  ROWS rows of W = 64, 128, 192 or 256 channels in shared memory: for each 64 channels ROWS rows of 128
               bytes in the order of tile.h, one behind the other; begins at a multiple of 1024 bytes. Whoever
               declares that has the assembler round up what any kernel of its program declares itself
    sums       (64, N*8) floats in the registers of a warpgroup: those of tile.h with M = 1; warp w of the four has rows
               16w..16w+15. Operands a in registers likewise, so tile_to_operands makes them of sums
All threads of a block make the calls that load, and wide_tile_arrived; all threads of a warpgroup make the others.
Products are under way when a call returns: wgmma_fence before them, wgmma_commit and wgmma_wait behind (wgmma.h).
Order:  16 terms at a time, ascending; within the 16 the hardware has its own.
Cost:   a product of 64 x N*8 x W takes N*8 * W / 32 cycles of a multiprocessor; a thread's copy is two instructions and
        a comparison.
*/
#ifndef LLMC_WIDE_TILE_H
#define LLMC_WIDE_TILE_H
#ifdef __CUDACC__
#include "../core/wgmma.h"  // wgmma_ss, wgmma_rs, smem_descriptor, smem_descriptor_at, fence_proxy_async
#include "tile.h"           // tile_store_rows, tile_to_operands, cp_async_16_zfill, cp_async_wait, stmatrix_x4_trans

// ---- warpgroups of a block ----

// this warp's: the compiler learns that all lanes have the same
__device__ inline int wide_tile_warpgroup() { return __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0); }

// Before a tile is used: all copies but those of the newest NEWER groups have arrived, for all threads and for tensor
// cores. And all threads are here: none uses what it has waited for any more
template <int NEWER = 0>
__device__ inline void wide_tile_arrived() {
    cp_async_wait<NEWER>();
    fence_proxy_async();
    __syncthreads();
}

// what threads i of two warpgroups have of the same 64 rows, from one to the other: no bank is met twice
template <int N>
__device__ inline void wide_tile_tell(float4* to, const float (&x)[1][N][4]) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        to[n * WARPGROUP + threadIdx.x % WARPGROUP] = make_float4(x[0][n][0], x[0][n][1], x[0][n][2], x[0][n][3]);
    }
}
template <int N>
__device__ inline void wide_tile_hear(float (&x)[1][N][4], const float4* from) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        const float4 y = from[n * WARPGROUP + threadIdx.x % WARPGROUP];
        x[0][n][0] = y.x, x[0][n][1] = y.y, x[0][n][2] = y.z, x[0][n][3] = y.w;
    }
}

// ---- from memory ----

// Rows of C channels on their way to tiles, one tile after the other. What is beyond the rows that exist, and beyond C,
// becomes 0; its address is made and not read. Of THREADS threads as many load as have equally many copies. A thread
// has the same chunk of every STEP-th row, a multiple of 8, so that all of them lie in the same place of their rows
template <int ROWS, int W, int THREADS>
struct WideRows {
    enum { LOADERS = ROWS % (THREADS / 8) == 0 ? THREADS : ROWS % 32 == 0 ? 256 : 128, STEP = LOADERS / 8 };
    static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "WideRows: loaders have as many copies, in one place of rows");
    size_t at;     // of this thread's first chunk of the tile, in its tensor
    int to, left;  // where it lies in a tile; rows that exist, from its own on
    int channels;  // of a row, from this thread's first chunk on

    // the first tile: n_rows rows exist from element `begin` of the tensor on
    __device__ inline WideRows(size_t begin, size_t stride, int n_rows, int C) {
        int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
        at = begin + row * stride + chunk * 8;
        to = row * 64 + (chunk ^ (row & 7)) * 8;  // as tile_chunk<64>
        channels = C - chunk * 8;
        left = channels > 0 ? n_rows - row : -ROWS;
    }

    // back: 1 for the rows of the tile before
    __device__ inline void load(bf16* tile, const bf16* x, size_t stride, int back = 0) const {
        if (threadIdx.x >= LOADERS) { return; }
        x += at - back * ROWS * stride;
        #pragma unroll
        for (int j = 0; j < ROWS; j += STEP) {
            bf16* y = tile + to + j * 64;
            bool exists = j < left + back * ROWS;
            cp_async_16_zfill(y, x + j * stride, exists ? 16 : 0);
            #pragma unroll
            for (int c = 64; c < W; c += 64) {
                cp_async_16_zfill(y + c * ROWS, x + j * stride + c, exists && c < channels ? 16 : 0);
            }
        }
    }

    __device__ inline void next(size_t stride) { at += ROWS * stride, left -= ROWS; }
};

// one tile alone
template <int ROWS, int W, int THREADS>
__device__ inline void wide_tile_load(bf16* tile, const bf16* x, size_t stride, int n_rows, int C) {
    WideRows<ROWS, W, THREADS>(0, stride, n_rows, C).load(tile, x, stride);
}

// where a row of n channels begins; n 0: there is none, and its address is not read
struct WideRow {
    const bf16* x;
    int n;
    __device__ const bf16* channel(int c, int more) const { return x + c + more; }  // more: known to the compiler
};

// Rows that lie anywhere, row_of(i) row i, on their way to a tile, of W channels; zeros beyond the last channel. A
// thread, t, has the same 16 bytes of all 64 channels
template <int W, int ROWS, int THREADS, typename RowOf>
__device__ inline void wide_tile_gather(bf16* tile, RowOf row_of, int t = threadIdx.x) {
    const int STEP = THREADS / 8;
    static_assert(STEP % 8 == 0, "a thread's rows have its 16 bytes in one place");
    const int first = t / 8, channel = t % 8 * 8;
    tile = tile_chunk<64>(tile, first, t % 8);
    #pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        if (ROWS % STEP > 0 && first + i >= ROWS) { break; }
        const auto row = row_of(first + i);
        #pragma unroll
        for (int c = 0; c < W; c += 64) {
            cp_async_16_zfill(tile + i * 64 + c * ROWS, row.channel(channel, c), channel + c < row.n ? 16 : 0);
        }
    }
}

// ---- products of a warpgroup: sums =, or, with add 1, sums += ----

// sums = x y', x: 64 rows of a tile of ROWS, from row 64 * part on, y: a tile of N*8 rows
template <int W, int ROWS, int N>
__device__ inline void wide_tile_product_transposed(float (&sums)[1][N][4], const bf16* x, int part, const bf16* y,
                                                    int add = 0) {
    uint64_t a = smem_descriptor(x + part * 64 * 64), b = smem_descriptor(y);
    #pragma unroll
    for (int k = 0; k < W; k += 16) {
        int before = k / 64, n_bytes = k % 64 * 2;  // so many 64 channels
        wgmma_ss<0, 0>(sums, smem_descriptor_at(a, before * ROWS * 128 + n_bytes),
                       smem_descriptor_at(b, before * N * 8 * 128 + n_bytes), add || k > 0);
    }
}

// sums = p y, p[0][k]: operands a of columns 16k..16k+15, y: a tile of K*16 rows
template <int W, int K>
__device__ inline void wide_tile_product(float (&sums)[1][W / 8][4], const unsigned (&p)[1][K][4], const bf16* y,
                                         int add = 0) {
    uint64_t b = smem_descriptor(y, K * 16 * 128);
    #pragma unroll
    for (int k = 0; k < K; k++) { wgmma_rs<1>(sums, p[0][k], smem_descriptor_at(b, k * 16 * 128), add || k > 0); }
}

// sums = p y', y: a tile of N*8 rows
template <int K, int N>
__device__ inline void wide_tile_product_transposed(float (&sums)[1][N][4], const unsigned (&p)[1][K][4],
                                                    const bf16* y, int add = 0) {
    uint64_t b = smem_descriptor(y);
    #pragma unroll
    for (int k = 0; k < K; k++) {
        wgmma_rs<0>(sums, p[0][k], smem_descriptor_at(b, k / 4 * N * 8 * 128 + k % 4 * 32), add || k > 0);
    }
}

// ---- to memory ----

// tile_store_rows of the rows of this warp, by way of a tile of ROWS rows
template <int W, int ROWS>
__device__ inline void wide_tile_store_rows(bf16* x, size_t stride, int n_rows, int C, bf16* tile, int row,
                                            const float (&sums)[1][W / 8][4], const float (&factor)[1][2]) {
    #pragma unroll
    for (int c = 0; c < W; c += 64) {
        tile_store_rows<64>(x + c, stride, n_rows, C - c, tile + c * ROWS, row, sums, factor, c / 8);
    }
}

// Turned sums, 64 channels by N*8 rows of memory: this warp's 16 channels, of C, go to the rows that exist, by way of
// the same channels of a tile of N*8 rows, which this warp alone still uses
template <int N>
__device__ inline void wide_tile_store_turned(bf16* x, size_t stride, int n_rows, int C, bf16* tile,
                                              const float (&sums)[1][N][4]) {
    const int lane = threadIdx.x % WARP, row = lane / 16 * 8 + lane % 8;  // rows of the matrices of stmatrix
    const int chunk = threadIdx.x % WARPGROUP / WARP * 2 + lane / 8 % 2;
    bf16* mine = tile_chunk<64>(tile, row, chunk);
    unsigned p[1][N / 2][4];
    tile_to_operands(p, sums);
    __syncwarp();
    #pragma unroll
    for (int k = 0; k < N / 2; k++) { stmatrix_x4_trans(mine + k * 16 * 64, p[0][k]); }
    __syncwarp();
    x += row * stride + chunk * 8;
    #pragma unroll
    for (int k = 0; k < N / 2; k++) {
        const bool exists = row + 16 * k < n_rows && chunk * 8 < C;
        if (exists) { pack_store(x + k * 16 * stride, pack_load<8>(mine + k * 16 * 64)); }
    }
}
#endif  // __CUDACC__
#endif  // LLMC_WIDE_TILE_H
