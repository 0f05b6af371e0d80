/*
Tiles of bf16 for kernels on tensor cores: from memory into shared memory, from there into the operands of mma.h,
products of one warp with them, and results back to memory. What the numbers mean is the kernel's affair
(flash_attention.h).
    tile      rows of W = 64, 128, 256 or 512 channels in shared memory, in an order of its own (tile_chunk); begins at
              a multiple of 128 bytes
    operand   what mma takes of 16 rows and 16 channels (a) or of 8 columns and 16 channels (b), in the registers of all
              lanes of a warp
    sums      (M*16, N*8) floats in the registers of a warp: sums[m][n][0..1] are columns 8n + 2 (lane % 4) and the next
              of row 16m + lane / 4, and sums[m][n][2..3] the same of the row 8 below. Four lanes, a quad, have a row
All 32 lanes of a warp make each call together, and tile_load all threads of a block.
Order:  tile_add_product and tile_add_product_transposed add 16 terms at a time, ascending; within the 16 mma has its
        own.
Cost:   ldmatrix meets no bank twice, and loads of two operands b share one. The more rows a warp has, M * 16, the more
        mma each operand b feeds.
*/
#ifndef LLMC_TILE_H
#define LLMC_TILE_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // WARP, ALL_LANES, bf16, pack_load, pack_store
#include "../core/mma.h"     // mma_m16n8k16, ldmatrix_x4, ldmatrix_x4_trans, cp_async_16_zfill

// ---- tiles in shared memory ----
// ldmatrix reads 16 bytes ("a chunk") of each of eight rows at once. Rows are 128 bytes or multiples of it, so the same
// chunk of eight rows would lie in the same four of the 32 banks, and the reads would queue up. Chunk c of row r
// therefore lies at c ^ (r & 7), and eight rows of any chunk are in eight different places.

template <int W>
__device__ inline bf16* tile_chunk(bf16* tile, int row, int chunk) { return tile + row * W + (chunk ^ (row & 7)) * 8; }

// ROWS rows of C channels, a multiple of 8 up to W, are on their way to a tile. What lies beyond the n_rows rows that
// exist, and beyond C, becomes 0; its address is made and not read. THREADS: threads of the block. A thread has the
// same chunk of every STEP-th row, so that a copy more costs it an addition and a comparison. UNROLLED: copies, all of
// them where a kernel has the registers
template <int ROWS, int W, int THREADS, int UNROLLED = ROWS * W / 8 / THREADS>
__device__ inline void tile_load(bf16* tile, const bf16* x, size_t stride, int n_rows, int C) {
    constexpr int CHUNKS = W / 8, STEP = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0, "tile_load: every thread has as many copies");
    int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    int n = chunk * 8 < C ? n_rows - row : 0;
    const bf16* from = x + row * stride + chunk * 8;
    #pragma unroll UNROLLED
    for (int j = 0; j < ROWS; j += STEP) {
        cp_async_16_zfill(tile_chunk<W>(tile, row + j, chunk), from, j < n ? 16 : 0);
        from += STEP * stride;
    }
}

// operand a: rows row..row+15, channels 16k..16k+15
template <int W>
__device__ inline void tile_load_a(unsigned (&a)[4], bf16* tile, int row, int k) {
    int lane = threadIdx.x % WARP;
    ldmatrix_x4(a, tile_chunk<W>(tile, row + lane % 16, 2 * k + lane / 16));
}

// operand a of the transposed tile: rows row..row+15 are summed over, channels 16m..16m+15 become its rows
template <int W>
__device__ inline void tile_load_a_transposed(unsigned (&a)[4], bf16* tile, int row, int m) {
    int lane = threadIdx.x % WARP;
    ldmatrix_x4_trans(a, tile_chunk<W>(tile, row + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
}

// two operands b for products with the transposed tile: rows row..row+7 and row+8..row+15 become columns, channels
// 16k..16k+15 are summed over
template <int W>
__device__ inline void tile_load_b_transposed(unsigned (&b)[2][2], bf16* tile, int row, int k) {
    int lane = threadIdx.x % WARP;
    unsigned r[4];
    ldmatrix_x4(r, tile_chunk<W>(tile, row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// two operands b for products with the tile as it stands: rows row..row+15 are summed over, columns are the channels
// 16n..16n+7 and 16n+8..16n+15
template <int W>
__device__ inline void tile_load_b(unsigned (&b)[2][2], bf16* tile, int row, int n) {
    int lane = threadIdx.x % WARP;
    unsigned r[4];
    ldmatrix_x4_trans(r, tile_chunk<W>(tile, row + lane % 16, 2 * n + lane / 16));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// two numbers as one register holds them, the first in its lower half
__device__ inline unsigned tile_pair_(float low, float high) {
    return (unsigned)__bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16 |
           __bfloat16_as_ushort(__float2bfloat16_rn(low));
}

__device__ inline float tile_low_(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float tile_high_(unsigned pair) { return __uint_as_float(pair & 0xffff0000); }

// where this lane's two columns of sums[m][n] lie in a row of a tile: 8n + 2 (lane % 4) and the next
template <int W>
__device__ inline bf16* tile_pair_at(bf16* tile, int row, int n) {
    return tile_chunk<W>(tile, row, n) + threadIdx.x % 4 * 2;
}
template <int W>
__device__ inline void tile_set_pair(bf16* tile, int row, int n, float low, float high) {
    *(unsigned*)tile_pair_at<W>(tile, row, n) = tile_pair_(low, high);
}

// ---- products of a warp ----

// sums += x y, x: M*16 rows from row_x on and K*16 channels of a tile of width WX, y: K*16 rows of a tile and N*8 of
// its channels, from 8 * first on. TRANSPOSED: x is K*16 rows of a tile, and M*16 of its channels from row_x on
template <int WX, int W, int K, int TRANSPOSED, int M, int N>
__device__ inline void tile_add_product_of(float (&sums)[M][N][4], bf16* x, int row_x, bf16* y, int first) {
    #pragma unroll 2  // all at once would keep too many addresses in registers
    for (int k = 0; k < K; k++) {
        unsigned a[M][4], b[2][2];
        #pragma unroll
        for (int m = 0; m < M; m++) {
            if (TRANSPOSED) { tile_load_a_transposed<WX>(a[m], x, 16 * k, row_x / 16 + m); }
            else { tile_load_a<WX>(a[m], x, row_x + 16 * m, k); }
        }
        #pragma unroll
        for (int n = 0; n < N; n++) {
            if (n % 2 == 0) { tile_load_b<W>(b, y, 16 * k, (first + n) / 2); }
            #pragma unroll
            for (int m = 0; m < M; m++) { mma_m16n8k16(sums[m][n], a[m], b[n % 2], sums[m][n]); }
        }
    }
}

// sums += x y', x: M*16 rows of a tile from row_x on, y: N*8 rows of a tile; over K*16 channels from 16 * first on.
// STEPS of 16 channels are unrolled
template <int W, int STEPS = W / 16, int K = W / 16, int M, int N>
__device__ inline void tile_add_product_transposed(float (&sums)[M][N][4], bf16* x, int row_x, bf16* y, int first = 0) {
    #pragma unroll STEPS
    for (int k = 0; k < K; k++) {
        unsigned a[M][4], b[2][2];
        #pragma unroll
        for (int m = 0; m < M; m++) { tile_load_a<W>(a[m], x, row_x + 16 * m, first + k); }
        #pragma unroll
        for (int n = 0; n < N; n++) {
            if (n % 2 == 0) { tile_load_b_transposed<W>(b, y, 8 * n, first + k); }
            #pragma unroll
            for (int m = 0; m < M; m++) { mma_m16n8k16(sums[m][n], a[m], b[n % 2], sums[m][n]); }
        }
    }
}

// sums += p y, p[m][k]: operands a of columns 16k..16k+15, y: K*16 rows of a tile
template <int W, int M, int K>
__device__ inline void tile_add_product(float (&sums)[M][W / 8][4], const unsigned (&p)[M][K][4], bf16* y) {
    #pragma unroll
    for (int k = 0; k < K; k++) {
        unsigned b[2][2];
        #pragma unroll
        for (int n = 0; n < W / 8; n++) {
            if (n % 2 == 0) { tile_load_b<W>(b, y, 16 * k, n / 2); }
            #pragma unroll
            for (int m = 0; m < M; m++) { mma_m16n8k16(sums[m][n], p[m][k], b[n % 2], sums[m][n]); }
        }
    }
}

// sums, rounded, as operands a: a lane already holds the elements that mma wants from it
template <int M, int N>
__device__ inline void tile_to_operands(unsigned (&p)[M][N / 2][4], const float (&sums)[M][N][4]) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n++) {
            p[m][n / 2][n % 2 * 2] = tile_pair_(sums[m][n][0], sums[m][n][1]);
            p[m][n / 2][n % 2 * 2 + 1] = tile_pair_(sums[m][n][2], sums[m][n][3]);
        }
    }
}

template <int M, int N>
__device__ inline void tile_set_zero(float (&sums)[M][N][4]) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n++) { sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0.0f; }
    }
}

// rows row..row+16*M-1 of a tile, which this warp alone still uses, become the sums times factor[m][0] (upper 8 rows)
// and [1]. The W channels of the tile are 8 * first and those behind it of the sums
template <int W, int M, int N>
__device__ inline void tile_set_rows(bf16* tile, int row, const float (&sums)[M][N][4], const float (&factor)[M][2],
                                     int first = 0) {
    int lane = threadIdx.x % WARP;
    __syncwarp();
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < W / 8; n++) {
            const float(&s)[4] = sums[m][first + n];
            int r = row + 16 * m + lane / 4;
            tile_set_pair<W>(tile, r, n, s[0] * factor[m][0], s[1] * factor[m][0]);
            tile_set_pair<W>(tile, r + 8, n, s[2] * factor[m][1], s[3] * factor[m][1]);
        }
    }
}

// they go to memory, C channels of each of the n_rows rows of the tile that exist; a lane stores 16 bytes
template <int W, int M>
__device__ inline void tile_copy_rows(bf16* x, size_t stride, int n_rows, int C, bf16* tile, int row) {
    __syncwarp();
    for (int i = threadIdx.x % WARP; i < 16 * M * W / 8; i += WARP) {
        int r = row + i / (W / 8), chunk = i % (W / 8);
        bool exists = r < n_rows && chunk * 8 < C;
        if (exists) { pack_store(x + r * stride + chunk * 8, pack_load<8>(tile_chunk<W>(tile, r, chunk))); }
    }
}

// both: sums, rounded, to memory by way of rows of a tile
template <int W, int M, int N>
__device__ inline void tile_store_rows(bf16* x, size_t stride, int n_rows, int C, bf16* tile, int row,
                                       const float (&sums)[M][N][4], const float (&factor)[M][2], int first = 0) {
    tile_set_rows<W>(tile, row, sums, factor, first);
    tile_copy_rows<W, M>(x, stride, n_rows, C, tile, row);
}

// ---- the quad of a row: maximum and sum of what its four lanes have ----

__device__ inline float tile_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
__device__ inline float tile_quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
#endif  // __CUDACC__
#endif  // LLMC_TILE_H
