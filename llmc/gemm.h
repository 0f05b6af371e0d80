/*
The one matrix product under every linear layer: out = start + a * b, each output a plain chain over k ascending.
    out (M, N) rows out_stride apart        a (M, K), b (K, N): a Matrix says how its elements lie, so a transpose is free
    start: where each chain begins. NULL: at 0; a row of N floats with stride 0: at a bias; `out` itself: goes on from there
Order:  out[m][n] = ((start + a[m][0]*b[0][n]) + a[m][1]*b[1][n]) + ...: every product and every sum rounds to float.
Cost:   2*M*N*K flops. Blocks of a and b are copied once into the order in which the inner loop reads them ("packed"), and
        a tile of outputs stays in registers while k runs: TILE_M * TILE_N chains side by side hide the latency of an
        addition, and lanes hold different n. A long k is cut into blocks; the next block goes on from the stored tile.
Source: Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication"; only their k loop is kept in order.
        Measured: doc/matmul.md, dev/bench/gemm.c
*/
#ifndef LLMC_GEMM_H
#define LLMC_GEMM_H
#include "device.h"  // Device, ceil_div
#include "vec.h"     // vfloat, VLANES, v_load, v_store, v_fill, v_transpose

// element (r, c) is data[r * row_stride + c * col_stride]; one of the strides is 1
typedef struct {
    const float* data;
    size_t row_stride, col_stride;
} Matrix;

static inline Matrix matrix(const float* data, size_t row_stride) { Matrix m = {data, row_stride, 1}; return m; }
static inline Matrix transposed(const float* data, size_t row_stride) { Matrix m = {data, 1, row_stride}; return m; }

// registers: 32 with AVX-512 hold 8 x 3 sums, 3 columns of b and a few products; 16 elsewhere hold 4 x 2 or 6 x 2
enum {
    TILE_M = VLANES == 16 ? 8 : 6,
    TILE_V = VLANES == 16 ? 3 : 2,
    TILE_N = TILE_V * VLANES,
    GEMM_M = 128 * TILE_M,  // rows of a packed at once
    GEMM_N = 32 * TILE_N,   // columns of b packed at once
    GEMM_K = 384,           // longest k block: a panel of b (GEMM_K, TILE_N) should stay in the first or second cache
    GEMM_WORKSPACE_BYTES = 4 * GEMM_K * (GEMM_M + GEMM_N)
};

// ---- packing: `width` neighbours per k side by side, zeros where the matrix ends ----

// packed[k * width + w] = src[w * w_stride + k * k_stride] for w < n_valid, 0 up to width
static inline __attribute__((always_inline)) void gemm_pack_(float* packed, const float* src, size_t w_stride, size_t k_stride,
                                                             int width, int n_valid, int K) {
    if (n_valid < width) {
        for (int k = 0; k < K; k++) {
            for (int w = 0; w < width; w++) { packed[k * width + w] = w < n_valid ? src[w * w_stride + k * k_stride] : 0.0f; }
        }
        return;
    }
    if (w_stride == 1) {
        for (int k = 0; k < K; k++) { memcpy(packed + (size_t)k * width, src + k * k_stride, sizeof(float) * width); }
        return;
    }
    int k = 0;
    for (; width % VLANES == 0 && k + VLANES <= K; k += VLANES) {  // squares of VLANES rows, turned in registers
        for (int w = 0; w < width; w += VLANES) {
            vfloat square[VLANES];
            for (int i = 0; i < VLANES; i++) { square[i] = v_load(src + (w + i) * w_stride + k); }
            v_transpose(square);
            for (int i = 0; i < VLANES; i++) { v_store(packed + (k + i) * width + w, square[i]); }
        }
    }
    for (; k < K; k++) {
        for (int w = 0; w < width; w++) { packed[k * width + w] = src[w * w_stride + k]; }
    }
}

// ---- the inner loop: TILE_M x TILE_N chains in registers ----

static inline __attribute__((always_inline)) void gemm_tile_(float* out, size_t out_stride, const float* start, size_t start_stride,
                                                             const float* a, const float* b, int K) {
    vfloat sum[TILE_M][TILE_V];
    for (int m = 0; m < TILE_M; m++) {
        for (int v = 0; v < TILE_V; v++) { sum[m][v] = v_load(start + m * start_stride + v * VLANES); }
    }
    for (int k = 0; k < K; k++) {
        vfloat bk[TILE_V];
        for (int v = 0; v < TILE_V; v++) { bk[v] = v_load(b + v * VLANES); }
        #pragma GCC unroll 8
        for (int m = 0; m < TILE_M; m++) {
            vfloat am = v_fill(a[m]);
            #pragma GCC unroll 4
            for (int v = 0; v < TILE_V; v++) { sum[m][v] = sum[m][v] + am * bk[v]; }
        }
        a += TILE_M;
        b += TILE_N;
    }
    for (int m = 0; m < TILE_M; m++) {
        for (int v = 0; v < TILE_V; v++) { v_store(out + m * out_stride + v * VLANES, sum[m][v]); }
    }
}

// a tile at the rim has fewer than TILE_M rows or TILE_N columns: it is computed whole in a buffer, the valid part copied
static inline void gemm_rim_tile_(float* out, size_t out_stride, const float* start, size_t start_stride,
                                  const float* a, const float* b, int M, int N, int K) {
    float tile[TILE_M * TILE_N] = {0};
    for (int m = 0; m < M; m++) { memcpy(tile + m * TILE_N, start + m * start_stride, sizeof(float) * N); }
    gemm_tile_(tile, TILE_N, tile, TILE_N, a, b, K);
    for (int m = 0; m < M; m++) { memcpy(out + m * out_stride, tile + m * TILE_N, sizeof(float) * N); }
}

static inline int gemm_min_(int a, int b) { return a < b ? a : b; }

// one packed panel of b (K, TILE_N) against the packed rows m0..m1 of a
static inline void gemm_panel_(float* out, size_t out_stride, const float* start, size_t start_stride,
                               const float* a, const float* b, int m0, int m1, int N, int K) {
    for (int m = m0; m < m1; m += TILE_M) {
        const float* a_tile = a + (size_t)m * K;
        float* o = out + m * out_stride;
        const float* s = start + m * start_stride;
        if (m + TILE_M <= m1 && N == TILE_N) {
            gemm_tile_(o, out_stride, s, start_stride, a_tile, b, K);
        } else {
            gemm_rim_tile_(o, out_stride, s, start_stride, a_tile, b, gemm_min_(TILE_M, m1 - m), N, K);
        }
    }
}

// one block of at most GEMM_M x GEMM_N x GEMM_K, by the threads of the enclosing parallel region: pack, then multiply
static inline void gemm_block_(float* out, size_t out_stride, const float* start, size_t start_stride, Matrix a, Matrix b,
                               int M, int N, int K, int a_is_packed, const Device* dev) {
    float* a_packed = dev->workspace;
    float* b_packed = dev->workspace + (size_t)GEMM_M * GEMM_K;
    int n_panels = (int)ceil_div(N, TILE_N);
    int rows_per_task = n_panels >= 4 * dev->n_threads ? M : 8 * TILE_M;
    int n_row_tasks = (int)ceil_div(M, rows_per_task);
    #pragma omp for nowait
    for (int m = 0; m < M; m += TILE_M) {
        if (a_is_packed) { continue; }
        gemm_pack_(a_packed + (size_t)m * K, a.data + m * a.row_stride, a.row_stride, a.col_stride, TILE_M,
                   gemm_min_(TILE_M, M - m), K);
    }
    #pragma omp for
    for (int n = 0; n < N; n += TILE_N) {
        gemm_pack_(b_packed + (size_t)n * K, b.data + n * b.col_stride, b.col_stride, b.row_stride, TILE_N,
                   gemm_min_(TILE_N, N - n), K);
    }
    #pragma omp for schedule(dynamic)
    for (int task = 0; task < n_panels * n_row_tasks; task++) {
        int n = task / n_row_tasks * TILE_N, m = task % n_row_tasks * rows_per_task;
        gemm_panel_(out + n, out_stride, start + n, start_stride, a_packed, b_packed + (size_t)n * K, m,
                    gemm_min_(m + rows_per_task, M), gemm_min_(TILE_N, N - n), K);
    }
}

static inline void gemm(float* out, size_t out_stride, const float* start, size_t start_stride, Matrix a, Matrix b,
                        int M, int N, int K, const Device* dev) {
    static const float zeros[GEMM_N] = {0};
    int n_blocks_k = K > 0 ? (int)ceil_div(K, GEMM_K) : 1;
    int step_k = (int)ceil_div(K, n_blocks_k);
    #pragma omp parallel
    for (int m = 0; m < M; m += GEMM_M) {
        for (int n = 0; n < N; n += GEMM_N) {
            for (int block_k = 0; block_k < n_blocks_k; block_k++) {  // ascending: each block goes on where the last stopped
                int k = block_k * step_k;
                float* o = out + m * out_stride + n;
                const float* s = block_k > 0 ? o : start ? start + m * start_stride + n : zeros;
                size_t s_stride = block_k > 0 ? out_stride : start ? start_stride : 0;
                Matrix a_block = {a.data + m * a.row_stride + k * a.col_stride, a.row_stride, a.col_stride};
                Matrix b_block = {b.data + k * b.row_stride + n * b.col_stride, b.row_stride, b.col_stride};
                gemm_block_(o, out_stride, s, s_stride, a_block, b_block, gemm_min_(GEMM_M, M - m), gemm_min_(GEMM_N, N - n),
                            gemm_min_(step_k, K - k), n > 0 && n_blocks_k == 1, dev);
            }
        }
    }
}
#endif  // LLMC_GEMM_H
