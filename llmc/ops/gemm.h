/*
The one matrix product under every linear layer: out = start + a * b, each output a plain chain over k ascending.
    out (M, N)  rows out_stride apart
    a (M, K), b (K, N)  a Matrix says how its elements lie, so a transpose is free
    start: where each chain begins. NULL: at 0; a row of N floats with stride 0: at a bias; `out` itself: goes on
Order:  sum = madd(a[m][k], b[k][n], sum) for k = 0, 1, ... from start: each step rounds once, on a GPU too.
Cost:   2*M*N*K flops. In C: blocks of a and panels of b are copied into the order in which the inner loop reads them
        ("packed"), and a tile of outputs stays in registers while k runs: TILE_M * TILE_N chains side by side hide the
        latency of an addition, and lanes hold different n. A long k is cut into blocks; the next block goes on from the
        stored tile. Threads share a's packed block and take panels of b one by one; they meet twice per block, however
        long N is. While a thread multiplies, the part of b that it will pack next comes from memory. On a GPU: a block
        of threads computes a tile, sharing what it reads; each thread keeps 4 x 4 sums in registers, on the CUDA
        cores. gemm_cublas.h is what fast builds use where it can.
Source: Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication"; only their k loop is kept in
        order. Measured: dev/bench/gemm.c. Slower and faster kernels: dev/cuda/matmul.cu
*/
#ifndef LLMC_GEMM_H
#define LLMC_GEMM_H
#include "../core/device.h"  // Device, ceil_div
#include "../core/kernel.h"  // to_float, from_float, MaybeNull
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, VLANES, v_load, v_load_columns, v_store, v_fill, v_madd

// element (r, c) is data[r * row_stride + c * col_stride]; one of the strides is 1
typedef struct {
    const float* data;
    size_t row_stride, col_stride;
} Matrix;

static inline Matrix gemm_matrix(const float* data, size_t row_stride) { Matrix m = {data, row_stride, 1}; return m; }
static inline Matrix gemm_transposed(const float* data, size_t row_stride) {
    Matrix m = {data, 1, row_stride};
    return m;
}

// registers: 32 with AVX-512 hold 8 x 3 sums, 3 vectors of b and a few products; 16 elsewhere hold 6 x 2
enum {
    TILE_M = VLANES == 16 ? 8 : 6,
    TILE_V = VLANES == 16 ? 3 : 2,
    TILE_N = TILE_V * VLANES,
    GEMM_LINE = 16,          // floats of a cache line...
    GEMM_PREFETCH_K = 8,         // ...of which one is asked for ahead of time in so many steps of k
    GEMM_K = 768,            // longest k block of a panel of b (k, TILE_N), which should stay in the second cache
    GEMM_LONG_K = 4096,      // k block of a, packed for all threads together...
    GEMM_A_FLOATS = 1 << 21, // ...with as many rows as make this many floats
    GEMM_TASKS = 4,          // at least so many tasks a thread, for a fair share when one is held up...
    GEMM_PIECE = 8 * TILE_M  // ...cut at multiples of so many rows, for each task packs its panel of b anew
};

static inline int gemm_min_(int a, int b) { return a < b ? a : b; }

// ---- packing: `width` neighbours per k side by side, zeros where the matrix ends ----

// packed[k * width + w] = src[w * w_stride + k * k_stride] for w < n_valid, 0 up to width
static inline __attribute__((always_inline)) void gemm_pack_(float* packed, const float* src, size_t w_stride,
                                                             size_t k_stride, int width, int n_valid, int K) {
    if (n_valid < width) {
        for (int k = 0; k < K; k++) {
            for (int w = 0; w < width; w++) {
                packed[k * width + w] = w < n_valid ? src[w * w_stride + k * k_stride] : 0.0f;
            }
        }
        return;
    }
    if (w_stride == 1) {
        for (int k = 0; k < K; k++) { memcpy(packed + (size_t)k * width, src + k * k_stride, sizeof(float) * width); }
        return;
    }
    const int K_squares = width % VLANES == 0 ? K / VLANES * VLANES : 0;
    for (int w = 0; w < width; w += VLANES) {  // few rows at a time, each read to its end: memory is fastest so
        for (int k = 0; k < K_squares; k += VLANES) {  // squares of VLANES rows, turned in registers
            vfloat square[VLANES];
            v_load_columns(square, src + w * w_stride + k, w_stride);
            for (int i = 0; i < VLANES; i++) { v_store(packed + (k + i) * width + w, square[i]); }
        }
    }
    for (int k = K_squares; k < K; k++) {
        for (int w = 0; w < width; w++) { packed[k * width + w] = src[w * w_stride + k]; }
    }
}

// ---- the part of b that is packed next: its lines are asked for one by one while another is multiplied ----

typedef struct {
    const float* row;
    size_t row_stride;
    int n_rows;      // that are left
    int length, at;  // floats of a row, and which of them is next
    int n_lines;     // at a time; 0: nothing comes
} PanelPrefetch;

static inline void gemm_prefetch_(PanelPrefetch* p) {
    for (int i = 0; i < p->n_lines && p->n_rows > 0; i++) {
        __builtin_prefetch(p->row + p->at, 0, 2);  // to be read; into the second cache
        p->at += GEMM_LINE;
        if (p->at >= p->length) {
            p->at = 0;
            if (--p->n_rows > 0) { p->row += p->row_stride; }
        }
    }
}

// ---- the inner loop: TILE_M x TILE_N chains in registers ----

// the first V vectors of each row of a tile
static inline __attribute__((always_inline)) void gemm_vectors_(float* out, size_t out_stride, const float* start,
                                                                size_t start_stride, const float* a, const float* b,
                                                                int V, int K, PanelPrefetch* next) {
    vfloat sum[TILE_M][TILE_V];
    for (int m = 0; m < TILE_M; m++) {
        for (int v = 0; v < V; v++) { sum[m][v] = v_load(start + m * start_stride + v * VLANES); }
    }
    for (int left = K; left > 0; left -= GEMM_PREFETCH_K) {
        if (next) { gemm_prefetch_(next); }
        for (int k = gemm_min_(left, GEMM_PREFETCH_K); k > 0; k--) {
            vfloat bk[TILE_V];
            for (int v = 0; v < V; v++) { bk[v] = v_load(b + v * VLANES); }
            #pragma GCC unroll 8
            for (int m = 0; m < TILE_M; m++) {
                vfloat am = v_fill(a[m]);
                #pragma GCC unroll 4
                for (int v = 0; v < V; v++) { sum[m][v] = v_madd(am, bk[v], sum[m][v]); }
            }
            a += TILE_M;
            b += TILE_N;
        }
    }
    for (int m = 0; m < TILE_M; m++) {
        for (int v = 0; v < V; v++) { v_store(out + m * out_stride + v * VLANES, sum[m][v]); }
    }
}

// N columns of a tile. The compiler makes a loop of its own for each number of vectors
static inline void gemm_tile_(float* out, size_t out_stride, const float* start, size_t start_stride, const float* a,
                              const float* b, int N, int K, PanelPrefetch* next) {
    if (N > 2 * VLANES) {
        gemm_vectors_(out, out_stride, start, start_stride, a, b, TILE_V, K, next);
    } else if (N > VLANES) {
        gemm_vectors_(out, out_stride, start, start_stride, a, b, 2, K, next);
    } else {
        gemm_vectors_(out, out_stride, start, start_stride, a, b, 1, K, next);
    }
}

// a tile at the rim has fewer than TILE_M rows or ends inside a vector: it is computed whole in a buffer, the valid
// part copied
static inline void gemm_rim_tile_(float* out, size_t out_stride, const float* start, size_t start_stride,
                                  const float* a, const float* b, int M, int N, int K, PanelPrefetch* next) {
    float tile[TILE_M * TILE_N] = {0};
    for (int m = 0; m < M; m++) { memcpy(tile + m * TILE_N, start + m * start_stride, sizeof(float) * N); }
    gemm_tile_(tile, TILE_N, tile, TILE_N, a, b, N, K, next);
    for (int m = 0; m < M; m++) { memcpy(out + m * out_stride, tile + m * TILE_N, sizeof(float) * N); }
}

// a long k is cut into blocks of about this length each: no short one is left over
static inline int gemm_k_block_(int K) {
    int n_blocks = K > 0 ? (int)ceil_div(K, GEMM_K) : 1;
    return K > 0 ? (int)ceil_div(K, n_blocks) : 1;
}

// one packed panel of b (K, TILE_N) against the packed rows m0..m1 of a
static inline void gemm_panel_(float* out, size_t out_stride, const float* start, size_t start_stride,
                               const float* a, const float* b, int m0, int m1, int N, int K, PanelPrefetch* next) {
    for (int m = m0; m < m1; m += TILE_M) {
        const float* a_tile = a + (size_t)m * K;
        float* o = out + m * out_stride;
        const float* s = start + m * start_stride;
        if (m + TILE_M <= m1 && N % VLANES == 0) {
            gemm_tile_(o, out_stride, s, start_stride, a_tile, b, N, K, next);
        } else {
            gemm_rim_tile_(o, out_stride, s, start_stride, a_tile, b, gemm_min_(TILE_M, m1 - m), N, K, next);
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
    return (n + GEMM_LINE - 1) / GEMM_LINE * GEMM_LINE;
}

static inline size_t gemm_workspace_bytes(int M, int K, int n_threads) {
    return sizeof(float) * (gemm_a_floats_(M, K) + (size_t)n_threads * GEMM_K * TILE_N);
}

// packed a: k blocks one after the other, in each the tiles of TILE_M rows
static inline void gemm_pack_a_(float* a_packed, Matrix a, int M, int K) {
    int n_tiles = (int)ceil_div(M, TILE_M), k_block = gemm_k_block_(K);
    #pragma omp for
    for (int tile = 0; tile < n_tiles; tile++) {
        int m = tile * TILE_M;
        for (int k = 0; k < K; k += k_block) {
            int n_k = gemm_min_(k_block, K - k);
            gemm_pack_(a_packed + (size_t)n_tiles * TILE_M * k + (size_t)m * n_k,
                       a.data + m * a.row_stride + k * a.col_stride, a.row_stride, a.col_stride, TILE_M,
                       gemm_min_(TILE_M, M - m), n_k);
        }
    }
}

// what a task reads of b: at most TILE_N of its columns, none of them past its end
typedef struct {
    Matrix b;
    int N;
} PanelSource;

static inline PanelSource gemm_columns_(Matrix b, int n, int N) {
    PanelSource p = {b, 0};
    if (n < N) {
        p.b.data += n * b.col_stride;
        p.N = gemm_min_(TILE_N, N - n);
    }
    return p;
}

// rows k..k + n_k of a panel, for whoever asks so many times
static inline PanelPrefetch gemm_prefetch_plan_(PanelSource p, int k, int n_k, int64_t n_calls) {
    const int rows_along_k = p.b.row_stride == 1;
    PanelPrefetch next = {p.b.data + k * p.b.row_stride, rows_along_k ? p.b.col_stride : p.b.row_stride,
                          rows_along_k ? p.N : n_k, rows_along_k ? n_k : p.N, 0, 0};
    if (p.N > 0) { next.n_lines = (int)ceil_div(next.n_rows * ceil_div(next.length, GEMM_LINE), n_calls); }
    return next;
}

// rows m0..m1 of one panel of out: its b is packed by the thread that needs it, so no thread waits for another
static inline void gemm_task_(float* out, size_t out_stride, const float* start, size_t start_stride,
                              const float* a_packed, float* b_packed, PanelSource panel, PanelSource next_panel,
                              int m0, int m1, int M, int K) {
    const size_t M_whole = (size_t)ceil_div(M, TILE_M) * TILE_M;
    const Matrix b = panel.b;
    const int k_block = gemm_k_block_(K);
    for (int k = 0; k < K || k == 0; k += k_block) {  // ascending: each block goes on where the last one stopped
        const int n_k = gemm_min_(k_block, K - k), next_k = k + n_k < K ? k + n_k : 0;
        const int64_t n_calls = ceil_div(m1 - m0, TILE_M) * ceil_div(n_k, GEMM_PREFETCH_K);
        PanelPrefetch next = gemm_prefetch_plan_(next_k > 0 ? panel : next_panel, next_k,
                                                 gemm_min_(k_block, K - next_k), n_calls > 0 ? n_calls : 1);
        gemm_pack_(b_packed, b.data + k * b.row_stride, b.col_stride, b.row_stride, TILE_N, panel.N, n_k);
        gemm_panel_(out, out_stride, k > 0 ? out : start, k > 0 ? out_stride : start_stride, a_packed + M_whole * k,
                    b_packed, m0, m1, panel.N, n_k, &next);
    }
}

// a block of rows and one long block of k, by the threads of the enclosing parallel region; tasks are panels, cut into
// pieces of rows where there are few of them
static inline void gemm_block_(float* out, size_t out_stride, const float* start, size_t start_stride, Matrix a,
                               Matrix b, int M, int N, int K, float* workspace, size_t a_floats, int n_threads) {
    static const float zeros[TILE_N] = {0};
    float *a_packed = workspace, *b_packed = workspace + a_floats + (size_t)thread_number() * GEMM_K * TILE_N;
    int n_panels = (int)ceil_div(N, TILE_N), pieces = (int)ceil_div(GEMM_TASKS * n_threads, n_panels);
    int rows = (int)ceil_div(M, (int64_t)pieces * GEMM_PIECE) * GEMM_PIECE, n_pieces = (int)ceil_div(M, rows);
    gemm_pack_a_(a_packed, a, M, K);
    #pragma omp for schedule(dynamic)
    for (int task = 0; task < n_panels * n_pieces; task++) {
        int n = task / n_pieces * TILE_N, m = task % n_pieces * rows;
        int next_n = (task + n_threads) / n_pieces * TILE_N;  // most likely: threads take turns
        gemm_task_(out + n, out_stride, start ? start + n : zeros, start ? start_stride : 0, a_packed, b_packed,
                   gemm_columns_(b, n, N), gemm_columns_(b, next_n, N), m, gemm_min_(m + rows, M), M, K);
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
            const float* from = k > 0 ? o : start ? start + m * start_stride : NULL;
            gemm_block_(o, out_stride, from, k > 0 ? out_stride : start_stride, a_block, b_block,
                        gemm_min_(block_rows, M - m), N, gemm_min_(GEMM_LONG_K, K - k), workspace, a_floats,
                        dev->n_threads);
        }
    }
}

#else  // ---- CUDA: the same chains, X and Out float or bf16 ----

// element (r, c) is data[r * row_stride + c * col_stride]; one of the strides is 1
template <typename X>
struct MatrixOf {
    const X* data;
    size_t row_stride, col_stride;
};
typedef MatrixOf<float> Matrix;

template <typename X>
static inline MatrixOf<X> gemm_matrix(const X* data, size_t row_stride) { return MatrixOf<X>{data, row_stride, 1}; }
template <typename X>
static inline MatrixOf<X> gemm_transposed(const X* data, size_t row_stride) { return MatrixOf<X>{data, 1, row_stride}; }

#ifndef CUBLAS_WORKSPACE
#define CUBLAS_WORKSPACE ((size_t)32 << 20)  // bytes: what NVIDIA advises for Hopper. dev/simt has less
#endif

// the workspace of fast builds, for gemm_cublas.h; the kernel here needs none
static inline size_t gemm_workspace_bytes(int M, int K, int n_threads) {
    (void)M, (void)K, (void)n_threads;
    return CUBLAS_WORKSPACE;
}

enum {
    GEMM_TILE = 64,  // a block of threads computes so many rows and columns of outputs...
    GEMM_SUMS = 4,   // ...and a thread so many
    GEMM_THREADS = GEMM_TILE / GEMM_SUMS * (GEMM_TILE / GEMM_SUMS),
    GEMM_TILE_K = 16,  // terms of every chain that are in shared memory at a time
    // floats from one k to the next: stores down a column meet few banks twice, packs stay aligned
    GEMM_TILE_ROW = GEMM_TILE + 4
};

// tile[k][w] = from[w * w_stride + k * k_stride]; neighbouring threads read neighbouring addresses. The zeros fill up
// rows and columns that are computed and thrown away; those in k are never read
template <typename X>
__device__ inline void gemm_load_(float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], const X* from, size_t w_stride,
                                  size_t k_stride, int n_valid, int n_k) {
    for (int i = threadIdx.x; i < GEMM_TILE_K * GEMM_TILE; i += GEMM_THREADS) {
        int k = k_stride == 1 ? i % GEMM_TILE_K : i / GEMM_TILE, w = k_stride == 1 ? i / GEMM_TILE_K : i % GEMM_TILE;
        tile[k][w] = w < n_valid && k < n_k ? to_float(from[w * w_stride + k * k_stride]) : 0.0f;
    }
}

// one more term of each of this thread's chains
__device__ inline void gemm_term_(float (&sum)[GEMM_SUMS][GEMM_SUMS], const float* a, const float* b) {
    for (int i = 0; i < GEMM_SUMS; i++) {
        for (int j = 0; j < GEMM_SUMS; j++) { sum[i][j] = madd(a[i], b[j], sum[i][j]); }
    }
}

// block is (GEMM_THREADS), three of them on a multiprocessor; grid (tiles of M, tiles of N). start may be out: each
// element is read and written by one thread
template <typename Out, typename X>
__global__ void __launch_bounds__(GEMM_THREADS, 3)
gemm_kernel(Out* out, size_t out_stride, const Out* start, size_t start_stride, MatrixOf<X> a, MatrixOf<X> b,
            int M, int N, int K) {
    __shared__ alignas(16) float a_tile[GEMM_TILE_K][GEMM_TILE_ROW];
    __shared__ alignas(16) float b_tile[GEMM_TILE_K][GEMM_TILE_ROW];
    int m0 = blockIdx.x * GEMM_TILE, n0 = blockIdx.y * GEMM_TILE;
    const int across = GEMM_TILE / GEMM_SUMS;  // threads beside each other
    // this thread's first output in the tile
    int m = threadIdx.x / across * GEMM_SUMS, n = threadIdx.x % across * GEMM_SUMS;
    float sum[GEMM_SUMS][GEMM_SUMS];
    for (int i = 0; i < GEMM_SUMS; i++) {
        for (int j = 0; j < GEMM_SUMS; j++) {
            int valid = start && m0 + m + i < M && n0 + n + j < N;
            sum[i][j] = valid ? to_float(start[(m0 + m + i) * start_stride + n0 + n + j]) : 0.0f;
        }
    }
    for (int k = 0; k < K; k += GEMM_TILE_K) {
        int n_k = K - k < GEMM_TILE_K ? K - k : GEMM_TILE_K;
        __syncthreads();  // the tile before this one has been used
        gemm_load_(a_tile, a.data + m0 * a.row_stride + k * a.col_stride, a.row_stride, a.col_stride, M - m0, n_k);
        gemm_load_(b_tile, b.data + k * b.row_stride + n0 * b.col_stride, b.col_stride, b.row_stride, N - n0, n_k);
        __syncthreads();
        if (n_k == GEMM_TILE_K) {
            #pragma unroll
            for (int i = 0; i < GEMM_TILE_K; i++) { gemm_term_(sum, &a_tile[i][m], &b_tile[i][n]); }
        } else {
            #pragma unroll 1
            for (int i = 0; i < n_k; i++) { gemm_term_(sum, &a_tile[i][m], &b_tile[i][n]); }
        }
    }
    for (int i = 0; i < GEMM_SUMS && m0 + m + i < M; i++) {
        Out* row = out + (m0 + m + i) * out_stride + n0 + n;
        for (int j = 0; j < GEMM_SUMS && n0 + n + j < N; j++) { row[j] = from_float<Out>(sum[i][j]); }
    }
}

template <typename Out, typename X>
static inline void gemm(Out* out, size_t out_stride, const typename MaybeNull<Out>::type* start, size_t start_stride,
                        MatrixOf<X> a, MatrixOf<X> b, int M, int N, int K, const Device* dev) {
    // only x has room for millions of positions
    dim3 grid((unsigned)ceil_div(M, GEMM_TILE), (unsigned)ceil_div(N, GEMM_TILE));
    gemm_kernel<<<grid, GEMM_THREADS, 0, dev->stream>>>(out, out_stride, start, start_stride, a, b, M, N, K);
    cudaCheck(cudaGetLastError());
}
#endif  // __CUDACC__
#endif  // LLMC_GEMM_H
