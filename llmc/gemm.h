/*
The one matrix product under every linear layer: out = start + a * b, each output a plain chain over k ascending.
    out (M, N) rows out_stride apart        a (M, K), b (K, N): a Matrix says how its elements lie, so a transpose is free
    start: where each chain begins. NULL: at 0; a row of N floats with stride 0: at a bias; `out` itself: goes on from there
Order:  out[m][n] = ((start + a[m][0]*b[0][n]) + a[m][1]*b[1][n]) + ...: every product and every sum rounds to float.
Cost:   2*M*N*K flops. Blocks of a and panels of b are copied into the order in which the inner loop reads them ("packed"),
        and a tile of outputs stays in registers while k runs: TILE_M * TILE_N chains side by side hide the latency of an
        addition, and lanes hold different n. A long k is cut into blocks; the next block goes on from the stored tile.
        Threads share a's packed block and take panels of b one by one; they meet twice per block, however long N is.
Source: Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication"; only their k loop is kept in order.
        Measured: dev/bench/gemm.c
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

// registers: 32 with AVX-512 hold 8 x 3 sums, 3 vectors of b and a few products; 16 elsewhere hold 6 x 2
enum {
    TILE_M = VLANES == 16 ? 8 : 6,
    TILE_V = VLANES == 16 ? 3 : 2,
    TILE_N = TILE_V * VLANES,
    GEMM_K = 384,            // k block of a panel of b (GEMM_K, TILE_N): it should stay in the first or second cache
    GEMM_LONG_K = 4096,      // k block of a, packed for all threads together...
    GEMM_A_FLOATS = 1 << 21, // ...with as many rows as make this many floats
    GEMM_TASKS = 4,          // at least so many tasks a thread, for a fair share when one is held up...
    GEMM_PIECE = 8 * TILE_M  // ...cut at multiples of so many rows, for each task packs its panel of b anew
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

// rows of a that are packed at once when k is this long
static inline int gemm_block_rows_(int M, int K) {
    int most = GEMM_A_FLOATS / gemm_min_(K > 0 ? K : 1, GEMM_LONG_K) / TILE_M * TILE_M;
    return gemm_min_(M, most);
}

// floats of a's packed block: whole tiles, and whole cache lines so that b's panels start on one
static inline size_t gemm_a_floats_(int M, int K) {
    size_t n = (size_t)ceil_div(gemm_block_rows_(M, K), TILE_M) * TILE_M * gemm_min_(K, GEMM_LONG_K);
    return (n + 15) / 16 * 16;
}

static inline size_t gemm_workspace_bytes(int M, int K, int n_threads) {
    return sizeof(float) * (gemm_a_floats_(M, K) + (size_t)n_threads * GEMM_K * TILE_N);
}

// packed a: k blocks one after the other, in each the tiles of TILE_M rows
static inline void gemm_pack_a_(float* a_packed, Matrix a, int M, int K) {
    int n_tiles = (int)ceil_div(M, TILE_M);
    #pragma omp for
    for (int tile = 0; tile < n_tiles; tile++) {
        int m = tile * TILE_M;
        for (int k = 0; k < K; k += GEMM_K) {
            int n_k = gemm_min_(GEMM_K, K - k);
            gemm_pack_(a_packed + (size_t)n_tiles * TILE_M * k + (size_t)m * n_k, a.data + m * a.row_stride + k * a.col_stride,
                       a.row_stride, a.col_stride, TILE_M, gemm_min_(TILE_M, M - m), n_k);
        }
    }
}

// rows m0..m1 of one panel of out: its b is packed by the thread that needs it, so no thread waits for another
static inline void gemm_task_(float* out, size_t out_stride, const float* start, size_t start_stride, const float* a_packed,
                              float* b_packed, Matrix b, int m0, int m1, int M, int N, int K) {
    size_t M_whole = (size_t)ceil_div(M, TILE_M) * TILE_M;
    for (int k = 0; k < K || k == 0; k += GEMM_K) {  // ascending: each block goes on where the last one stopped
        int n_k = gemm_min_(GEMM_K, K - k);
        gemm_pack_(b_packed, b.data + k * b.row_stride, b.col_stride, b.row_stride, TILE_N, N, n_k);
        gemm_panel_(out, out_stride, k > 0 ? out : start, k > 0 ? out_stride : start_stride, a_packed + M_whole * k, b_packed,
                    m0, m1, N, n_k);
    }
}

// a block of rows and one long block of k, by the threads of the enclosing parallel region; tasks are panels, cut into
// pieces of rows where there are few of them
static inline void gemm_block_(float* out, size_t out_stride, const float* start, size_t start_stride, Matrix a, Matrix b,
                               int M, int N, int K, float* workspace, size_t a_floats, int n_threads) {
    static const float zeros[TILE_N] = {0};
    float *a_packed = workspace, *b_packed = workspace + a_floats + (size_t)thread_number() * GEMM_K * TILE_N;
    int n_panels = (int)ceil_div(N, TILE_N), pieces = (int)ceil_div(GEMM_TASKS * n_threads, n_panels);
    int rows = (int)ceil_div(M, (int64_t)pieces * GEMM_PIECE) * GEMM_PIECE, n_pieces = (int)ceil_div(M, rows);
    gemm_pack_a_(a_packed, a, M, K);
    #pragma omp for schedule(dynamic)
    for (int task = 0; task < n_panels * n_pieces; task++) {
        int n = task / n_pieces * TILE_N, m = task % n_pieces * rows;
        Matrix b_panel = {b.data + n * b.col_stride, b.row_stride, b.col_stride};
        gemm_task_(out + n, out_stride, start ? start + n : zeros, start ? start_stride : 0, a_packed, b_packed, b_panel, m,
                   gemm_min_(m + rows, M), M, gemm_min_(TILE_N, N - n), K);
    }
}

static inline void gemm(float* out, size_t out_stride, const float* start, size_t start_stride, Matrix a, Matrix b,
                        int M, int N, int K, const Device* dev) {
    size_t a_floats = gemm_a_floats_(M, K);
    float* workspace = device_workspace(dev, gemm_workspace_bytes(M, K, dev->n_threads));
    int block_rows = gemm_block_rows_(M, K);
    #pragma omp parallel
    for (int m = 0; m < M; m += block_rows) {
        for (int k = 0; k < K || k == 0; k += GEMM_LONG_K) {
            float* o = out + m * out_stride;
            Matrix a_block = {a.data + m * a.row_stride + k * a.col_stride, a.row_stride, a.col_stride};
            Matrix b_block = {b.data + k * b.row_stride, b.row_stride, b.col_stride};
            gemm_block_(o, out_stride, k > 0 ? o : start ? start + m * start_stride : NULL, k > 0 ? out_stride : start_stride, a_block,
                        b_block, gemm_min_(block_rows, M - m), N, gemm_min_(GEMM_LONG_K, K - k), workspace, a_floats, dev->n_threads);
        }
    }
}
#endif  // LLMC_GEMM_H
