/*
Linear layers of experts: each of R rows goes through the weight of its expert, nothing is padded and none is dropped.
    out (R, OC)   inp (R, C)   weight (E, OC, C)   offsets (E+1) on the device: rows offsets[e]..offsets[e+1]-1 are
    expert e's, from offsets[0] = 0 to offsets[E] = R; an expert may have none
    inp_index, dout_index (R) or NULL: row s of the operand is row index[s] of what is passed, which is read where it
    lies, as the MoE's rows are those of their tokens; no two of these rows need be different
Backward, row s of expert e:
    dinp[s]    = dout[s] * weight[e]                          (R, C)       written; NULL: nobody asks for it
    dweight[e] = sum over the expert's rows of dout^T * inp   (E, OC, C)   float, written; zeros where there are no rows
A weight that does not learn may be bf16, fp8 or fp4 (core/stored.h): ..._forward_stored and
..._backward_input_stored have the bits of the same numbers as floats; on a GPU as X, a few experts at a time (widen.h).
grouped_product and grouped_gradient are what these are made of. Rows of their operands may be part of wider ones, so
many elements apart (out_row, x_row, dout_row); and with add 1 chains go on from what is in out.
Cost:   2*R*C*OC flops each. Every expert's weight is read, or written, once: with so few rows for each that this takes
        longer than the products, judge it in GB/s. In C: the parts of a block of gemm.h, so one parallel region has the
        panels of all experts as its tasks, and a large dweight, which nobody reads before the optimizer, is stored past
        the caches. On a GPU: blocks find their tile of rows in offsets, and no host waits for
        these. Fast builds, bf16, C and OC multiples of 8: tensor cores, tiles of 128 x 128, a product's last tile of
        rows computed whole. By ptxas of CUDA 13.0, without spills, registers of a thread on sm_80, sm_90: forward 215,
        218, backward_input 222, 224, backward_weight 222, 226: two blocks of four warps and 64 KiB on a multiprocessor.
        A warp issues 432, 409 and 563 instructions (make sass) beside 128 mma of about 6.4 cycles each.
        Hopper, make CUDA_ARCH=sm_90a: by wgmma, tiles of 128 x 256, and codes of fp8 as they are (grouped_hopper.h).
        In fast builds forward of at most 16 rows together is few_rows.h's: it reads the weights that these rows chose,
        each once. EXACT builds keep their tiles of 64 rows: a sum that is one chain is one thread's, and neighbouring
        threads would read different rows of the weight. Products with add 1 are on the CUDA cores in every build.
Error:  as matmul.h.
Order:  out chains over c, dinp over oc, dweight over the expert's rows, all ascending from 0. Tensor cores add 16 terms
        at a time, ascending; where tiles begin depends on offsets, but no sum does: the same rows give the same bits.
Source: Gale et al. 2023, "MegaBlocks", arXiv:2211.15841, for products without padding. Measured: dev/bench/grouped.c.
        Slower and faster kernels: dev/cuda/grouped_matmul.cu
*/
#ifndef LLMC_GROUPED_MATMUL_H
#define LLMC_GROUPED_MATMUL_H
#include "few_rows.h"       // in a fast CUDA build: few_rows_outputs
#include "gemm.h"           // GemmPart, GemmBlock, gemm_block_, Matrix, Device
#include "grouped_tiles.h"  // in a CUDA build: GroupedTile, grouped_find_tile, grouped_most_tiles, grouped_at
#include "tile.h"           // tile_load, tile_load_a, tile_store_rows
#include "widen.h"          // in a CUDA build: widen_experts, widen_at_once
#if defined(WGMMA) && !defined(EXACT)
#include "grouped_hopper.h"  // grouped_hopper_rows, grouped_hopper_weight
#ifndef GROUPED_HOPPER  // test_grouped_matmul.c: a variable, so that it has both kinds of kernels
#define GROUPED_HOPPER 1
#endif
#endif

// ---- plain C: read this first; it defines every bit ----

static inline const float* grouped_row_(const float* x, const int* index, size_t s, int width) {
    return x + (index ? (size_t)index[s] : s) * (size_t)width;
}

static inline void grouped_matmul_forward_ref(float* out, const float* inp, const int* inp_index, const float* weight,
                                              const int* offsets, int E, int C, int OC) {
    for (int e = 0; e < E; e++) {
        for (int s = offsets[e]; s < offsets[e + 1]; s++) {
            const float* x = grouped_row_(inp, inp_index, (size_t)s, C);
            for (int oc = 0; oc < OC; oc++) {
                const float* w = weight + ((size_t)e * (size_t)OC + (size_t)oc) * (size_t)C;
                float sum = 0.0f;
                for (int c = 0; c < C; c++) { sum = madd(x[c], w[c], sum); }
                out[(size_t)s * (size_t)OC + (size_t)oc] = sum;
            }
        }
    }
}

static inline void grouped_matmul_backward_input_ref(float* dinp, const float* dout, const int* dout_index,
                                                     const float* weight, const int* offsets, int E, int C, int OC) {
    for (int e = 0; dinp && e < E; e++) {
        const float* w = weight + (size_t)e * (size_t)OC * (size_t)C;
        for (int s = offsets[e]; s < offsets[e + 1]; s++) {
            const float* dy = grouped_row_(dout, dout_index, (size_t)s, OC);
            for (int c = 0; c < C; c++) {
                float sum = 0.0f;
                for (int oc = 0; oc < OC; oc++) { sum = madd(dy[oc], w[(size_t)oc * (size_t)C + (size_t)c], sum); }
                dinp[(size_t)s * (size_t)C + (size_t)c] = sum;
            }
        }
    }
}

static inline void grouped_matmul_backward_weight_ref(float* dweight, const float* dout, const int* dout_index,
                                                      const float* inp, const int* inp_index, const int* offsets,
                                                      int E, int C, int OC) {
    for (int e = 0; dweight && e < E; e++) {
        for (int oc = 0; oc < OC; oc++) {
            float* dw = dweight + ((size_t)e * (size_t)OC + (size_t)oc) * (size_t)C;
            for (int c = 0; c < C; c++) {
                float sum = 0.0f;
                for (int s = offsets[e]; s < offsets[e + 1]; s++) {
                    sum = madd(grouped_row_(dout, dout_index, (size_t)s, OC)[oc],
                               grouped_row_(inp, inp_index, (size_t)s, C)[c], sum);
                }
                dw[c] = sum;
            }
        }
    }
}

#ifndef __CUDACC__  // ---- fast C: the same chains, many outputs at a time ----

// the products of all experts, cut into parts, and these into blocks whose packed a has at most GEMM_A_FLOATS
typedef struct {
    GemmPart* part;
    GemmBlock* block;
    float *a_packed, *b_packed;
    int n_parts, n_blocks;
    size_t n_packed;  // floats of the last block
    int N;            // columns of every product
    size_t out_row;   // floats from one row of out to the next
    int add;          // 1: chains go on from what is in out
    int past;         // 1: out is stored past the caches
} GroupedPlan;

enum { GROUPED_PAST_FLOATS = 1 << 22 };  // more gradients than this are stored past the caches

// at most so many parts: of products with `rows` rows together and terms each, and of those with M rows each and terms
// together
static inline size_t grouped_parts_of_rows_(int E, int rows, int K) {
    return (size_t)(E + ceil_div(rows, gemm_block_rows_(INT_MAX, GEMM_LONG_K))) * (size_t)ceil_div(K, GEMM_LONG_K);
}
static inline size_t grouped_parts_of_terms_(int E, int M, int terms) {
    return (size_t)ceil_div(M, gemm_block_rows_(INT_MAX, GEMM_LONG_K)) * (size_t)(E + ceil_div(terms, GEMM_LONG_K));
}

static inline size_t grouped_bytes_(size_t n_parts, int n_threads) {
    return (GEMM_A_FLOATS + (size_t)n_threads * GEMM_K * TILE_N) * sizeof(float) +
           n_parts * (sizeof(GemmPart) + sizeof(GemmBlock));
}

// of whichever of the three products needs most
static inline size_t grouped_matmul_workspace_bytes(int E, int R, int C, int OC, int n_threads) {
    size_t n = grouped_parts_of_rows_(E, R, C > OC ? C : OC), n_weight = grouped_parts_of_terms_(E, OC, R);
    return grouped_bytes_(n > n_weight ? n : n_weight, n_threads);
}

static inline GroupedPlan grouped_plan_(size_t most_parts, int N, size_t out_row, int add, const Device* dev) {
    float* workspace = device_workspace(dev, grouped_bytes_(most_parts, dev->n_threads));
    GroupedPlan plan = {NULL, NULL, workspace, NULL, 0, 0, 0, N, out_row, add, 0};
    plan.b_packed = plan.a_packed + GEMM_A_FLOATS;
    plan.part = (GemmPart*)(plan.b_packed + (size_t)dev->n_threads * GEMM_K * TILE_N);
    plan.block = (GemmBlock*)(plan.part + most_parts);
    return plan;
}

// cut as gemm cuts it. A part that goes on with the chains of the one before begins a block
static inline void grouped_add_(GroupedPlan* plan, float* out, Matrix a, Matrix b, int M, int K) {
    const int block_rows = gemm_block_rows_(M, K);
    for (int m = 0; m < M; m += block_rows) {
        for (int k = 0; k < K || k == 0; k += GEMM_LONG_K) {
            float* o = out + (size_t)m * plan->out_row;
            GemmPart part = {o, k > 0 || plan->add ? o : NULL, plan->out_row, gemm_from_(a, m, k), gemm_from_(b, k, 0),
                             gemm_min_(block_rows, M - m), gemm_min_(GEMM_LONG_K, K - k), NULL, 0, 0, 0};
            size_t n_packed = gemm_part_floats_(part.M, part.K);
            if (plan->n_blocks == 0 || k > 0 || plan->n_packed + n_packed > GEMM_A_FLOATS) {
                GemmBlock block = {plan->part + plan->n_parts, 0, plan->N, plan->out_row, plan->past, 0, 0, 0};
                plan->block[plan->n_blocks++] = block;
                plan->n_packed = 0;
            }
            plan->part[plan->n_parts++] = part;
            plan->block[plan->n_blocks - 1].n_parts++;
            plan->n_packed += n_packed;
        }
    }
}

static inline void grouped_run_(const GroupedPlan* plan, const Device* dev) {
    for (int i = 0; i < plan->n_blocks; i++) { gemm_plan_block_(&plan->block[i], plan->a_packed, dev->n_threads); }
    #pragma omp parallel
    for (int i = 0; i < plan->n_blocks; i++) {
        if (i > 0) {
            #pragma omp barrier
        }
        gemm_block_(&plan->block[i], gemm_b_packed_(plan->b_packed), dev->n_threads);
    }
}

// the rows of x, `row` floats apart, from row s of the operand on; transposed: they are columns
static inline Matrix grouped_rows_(const float* x, size_t row, const int* index, int s) {
    return index ? gemm_gathered(x, index + s, row) : gemm_matrix(x + (size_t)s * row, row);
}
static inline Matrix grouped_rows_transposed_(const float* x, size_t row, const int* index, int s) {
    const Matrix m = grouped_rows_(x, row, index, s);
    return gemm_floats_(m.data, 1, m.row_stride, NULL, m.row_index);
}

// the weight of the next expert, n elements further
static inline Matrix grouped_next_(Matrix weight, size_t n) {
    if (weight.is_stored) { weight.weight = stored_next(weight.weight); } else { weight.data += n; }
    return weight;
}

// out (R, N) = rows of x (R, K) * b of their expert. weight: b (K, N) of expert 0, one way or the other; the next has
// its K * N elements behind it
static inline void grouped_product(float* out, size_t out_row, int add, const float* x, size_t x_row, const int* index,
                                   Matrix weight, const int* offsets, int E, int R, int K, int N, const Device* dev) {
    GroupedPlan plan = grouped_plan_(grouped_parts_of_rows_(E, R, K), N, out_row, add, dev);
    for (int e = 0; e < E; e++, weight = grouped_next_(weight, (size_t)K * N)) {
        const int s = offsets[e];
        grouped_add_(&plan, out + (size_t)s * out_row, grouped_rows_(x, x_row, index, s), weight, offsets[e + 1] - s,
                     K);
    }
    grouped_run_(&plan, dev);
}

// are gradients of so many rows and columns stored past the caches?
static inline int grouped_is_past_(const float* dweight, size_t rows, int columns) {
    const int lines = (uintptr_t)dweight % (GEMM_LINE * sizeof(float)) == 0 && columns % GEMM_LINE == 0;
    return lines && TILE_N % GEMM_LINE == 0 && rows * (size_t)columns > GROUPED_PAST_FLOATS;
}

// dweight (E, OC, C) = sums over the rows of each expert of dout^T * inp
static inline void grouped_gradient(float* dweight, const float* dout, size_t dout_row, const int* dout_index,
                                    const float* inp, const int* inp_index, const int* offsets, int E, int R, int C,
                                    int OC, const Device* dev) {
    GroupedPlan plan = grouped_plan_(grouped_parts_of_terms_(E, OC, R), C, (size_t)C, 0, dev);
    plan.past = grouped_is_past_(dweight, (size_t)E * OC, C);
    for (int e = 0; e < E; e++) {
        const int s = offsets[e];
        grouped_add_(&plan, dweight + (size_t)e * OC * C, grouped_rows_transposed_(dout, dout_row, dout_index, s),
                     grouped_rows_(inp, (size_t)C, inp_index, s), OC, offsets[e + 1] - s);
    }
    grouped_run_(&plan, dev);
}

static inline void grouped_matmul_forward(float* out, const float* inp, const int* inp_index, const float* weight,
                                          const int* offsets, int E, int R, int C, int OC, const Device* dev) {
    grouped_product(out, OC, 0, inp, C, inp_index, gemm_transposed(weight, C), offsets, E, R, C, OC, dev);
}

// weight (E, OC, C): the first of them
static inline void grouped_matmul_forward_stored(float* out, const float* inp, const int* inp_index,
                                                 StoredMatrix weight, const int* offsets, int E, int R,
                                                 const Device* dev) {
    const int C = weight.columns, OC = weight.rows;
    grouped_product(out, OC, 0, inp, C, inp_index, gemm_stored_transposed(weight), offsets, E, R, C, OC, dev);
}

static inline void grouped_matmul_backward_input(float* dinp, const float* dout, const int* dout_index,
                                                 const float* weight, const int* offsets, int E, int R, int C, int OC,
                                                 const Device* dev) {
    if (!dinp) { return; }
    grouped_product(dinp, C, 0, dout, OC, dout_index, gemm_matrix(weight, C), offsets, E, R, OC, C, dev);
}

static inline void grouped_matmul_backward_input_stored(float* dinp, const float* dout, const int* dout_index,
                                                        StoredMatrix weight, const int* offsets, int E, int R,
                                                        const Device* dev) {
    const int C = weight.columns, OC = weight.rows;
    if (!dinp) { return; }
    grouped_product(dinp, C, 0, dout, OC, dout_index, gemm_stored(weight), offsets, E, R, OC, C, dev);
}

static inline void grouped_matmul_backward_weight(float* dweight, const float* dout, const int* dout_index,
                                                  const float* inp, const int* inp_index, const int* offsets,
                                                  int E, int R, int C, int OC, const Device* dev) {
    if (!dweight) { return; }
    grouped_gradient(dweight, dout, OC, dout_index, inp, inp_index, offsets, E, R, C, OC, dev);
}

#else  // ---- CUDA ----

// no product here needs any
static inline size_t grouped_matmul_workspace_bytes(int E, int R, int C, int OC, int n_threads) {
    (void)E, (void)R, (void)C, (void)OC, (void)n_threads;
    return 0;
}

// ---- any shape and type: the chains of the plain loop on CUDA cores, with the tiles of gemm.h ----

// tile[c][s] = column k + c of row row_of[s] of x, 0 for row -1. Neighbouring threads read neighbouring columns
template <typename X>
__device__ inline void grouped_load_rows_(float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], const X* x, size_t x_row,
                                          const int* row_of, int k, int K) {
    for (int i = threadIdx.x; i < GEMM_TILE_K * GEMM_TILE; i += GEMM_THREADS) {
        int s = i / GEMM_TILE_K, c = i % GEMM_TILE_K, row = row_of[s];
        tile[c][s] = row >= 0 && k + c < K ? to_float(x[(size_t)row * x_row + k + c]) : 0.0f;
    }
}

// tile[i][w] = column c + w, of C, of the operand's row s + i, for n_s rows
template <typename X>
__device__ inline void grouped_load_terms_(float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], const X* x, size_t x_row,
                                           const int* index, int s, int n_s, int c, int C) {
    for (int i = threadIdx.x; i < GEMM_TILE_K * GEMM_TILE; i += GEMM_THREADS) {
        int row = i / GEMM_TILE, w = i % GEMM_TILE, exists = row < n_s && c + w < C;
        tile[row][w] = exists ? to_float(x[grouped_at(index, s + row) * x_row + c + w]) : 0.0f;
    }
}

// the rows of a tile as its expert's operand has them, and -1 for those that do not exist
__device__ inline void grouped_find_rows_(int* row_of, int n, const int* index, GroupedTile rows) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        row_of[i] = i < rows.n_rows ? (int)grouped_at(index, rows.first + i) : -1;
    }
    __syncthreads();
}

// out (R, N) = rows of x (R, K) * b of their expert: b is the weight (N, K) turned (TURNED) or the weight (K, N). With
// add 1 chains go on from out, of which each element is read and written by one thread. grid: tiles of rows, and for
// each of them those of columns
template <int TURNED, typename X>
__global__ void __launch_bounds__(GEMM_THREADS, 3)
grouped_rows_kernel(X* out, size_t out_row, int add, const X* x, size_t x_row, const int* index, const X* weight,
                    const int* offsets, int E, int K, int N) {
    __shared__ alignas(16) float a_tile[GEMM_TILE_K][GEMM_TILE_ROW];
    __shared__ alignas(16) float b_tile[GEMM_TILE_K][GEMM_TILE_ROW];
    int n_columns = (N + GEMM_TILE - 1) / GEMM_TILE, n0 = blockIdx.x % n_columns * GEMM_TILE;
    __shared__ int row_of[GEMM_TILE];
    GroupedTile rows = grouped_find_tile(offsets, E, GEMM_TILE, blockIdx.x / n_columns);
    if (rows.n_rows == 0) { return; }
    grouped_find_rows_(row_of, GEMM_TILE, index, rows);
    const X* w = weight + (size_t)rows.expert * N * K + (TURNED ? (size_t)n0 * K : (size_t)n0);
    X* o = out + (size_t)rows.first * out_row + n0;
    int m = gemm_first_row_(), n = gemm_first_column_();
    float sum[GEMM_SUMS][GEMM_SUMS];
    for (int i = 0; i < GEMM_SUMS; i++) {
        for (int j = 0; j < GEMM_SUMS; j++) {
            int goes_on = add && m + i < rows.n_rows && n0 + n + j < N;
            sum[i][j] = goes_on ? to_float(o[(m + i) * out_row + n + j]) : 0.0f;
        }
    }
    auto load_a = [&](float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], int k, int n_k) {
        (void)n_k;
        grouped_load_rows_(tile, x, x_row, row_of, k, K);
    };
    auto load_b = [&](float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], int k, int n_k) {
        const X* from = w + (TURNED ? (size_t)k : (size_t)k * N);
        gemm_load_(tile, from, TURNED ? (size_t)K : 1, TURNED ? 1 : (size_t)N, N - n0, n_k);
    };
    gemm_terms_(sum, a_tile, b_tile, load_a, load_b, K);
    gemm_store_(o, out_row, sum, rows.n_rows, N - n0);
}

// dweight (E, OC, C). grid: experts, for each tiles of OC, and for each of these tiles of C
template <typename X>
__global__ void __launch_bounds__(GEMM_THREADS, 3)
grouped_weight_kernel(float* dweight, const X* dout, size_t dout_row, const int* dout_index, const X* inp,
                      const int* inp_index, const int* offsets, int C, int OC) {
    __shared__ alignas(16) float a_tile[GEMM_TILE_K][GEMM_TILE_ROW];
    __shared__ alignas(16) float b_tile[GEMM_TILE_K][GEMM_TILE_ROW];
    int n_columns = (C + GEMM_TILE - 1) / GEMM_TILE, n_rows = (OC + GEMM_TILE - 1) / GEMM_TILE;
    int c = blockIdx.x % n_columns * GEMM_TILE, oc = blockIdx.x / n_columns % n_rows * GEMM_TILE;
    int e = blockIdx.x / n_columns / n_rows, s = offsets[e], n_s = offsets[e + 1] - s;
    float sum[GEMM_SUMS][GEMM_SUMS] = {{0.0f}};
    auto load_a = [&](float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], int k, int n_k) {
        grouped_load_terms_(tile, dout, dout_row, dout_index, s + k, n_k, oc, OC);
    };
    auto load_b = [&](float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], int k, int n_k) {
        grouped_load_terms_(tile, inp, (size_t)C, inp_index, s + k, n_k, c, C);
    };
    gemm_terms_(sum, a_tile, b_tile, load_a, load_b, n_s);
    gemm_store_(dweight + ((size_t)e * OC + oc) * C + c, (size_t)C, sum, OC - oc, C - c);
}

// ---- fast builds, bf16: tensor cores. Four warps compute 64 x 64 outputs each out of 128 x 128; cp.async fills one
//      pair of tiles while the other is multiplied. Rows that do not exist are zeros in a tile and are not stored ----

#ifndef EXACT
enum { GROUPED_TILE = 128, GROUPED_K = 64, GROUPED_THREADS = 128, GROUPED_PAIR = 2 * GROUPED_TILE * GROUPED_K };

// ROWS rows of x are on their way to a tile, from column c on: the one that `rows` in shared memory says for each, -1
// for zeros. C: columns of x
template <int ROWS, int W>
__device__ inline void grouped_tile_load_(bf16* tile, const bf16* x, size_t x_row, const int* rows, int c, int C) {
    const int AT_ONCE = GROUPED_THREADS / (W / 8);
    const int chunk = threadIdx.x % (W / 8), first = threadIdx.x / (W / 8), column = c + chunk * 8;
    #pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; i++) {
        int row = first + i * AT_ONCE, from = rows[row];
        bool exists = from >= 0 && column < C;
        cp_async_16_zfill(tile_chunk<W>(tile, row, chunk), exists ? x + (size_t)from * x_row + column : x,
                          exists ? 16 : 0);
    }
}

// A_TURNED: the tile of a has terms as rows, otherwise as columns. B_TURNED: that of b has terms as columns, otherwise
// as rows. m, n: this warp's first row and column of the 128 x 128
template <int A_TURNED, int B_TURNED>
__device__ inline void grouped_multiply_(float (&sums)[4][8][4], bf16* a_tile, bf16* b_tile, int m, int n) {
    #pragma unroll
    for (int k = 0; k < GROUPED_K / 16; k++) {
        unsigned a[4][4], b[2][2];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            if (A_TURNED) {
                tile_load_a_transposed<GROUPED_TILE>(a[i], a_tile, 16 * k, m / 16 + i);
            } else {
                tile_load_a<GROUPED_K>(a[i], a_tile, m + 16 * i, k);
            }
        }
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j % 2 == 0 && B_TURNED) { tile_load_b_transposed<GROUPED_K>(b, b_tile, n + 8 * j, k); }
            if (j % 2 == 0 && !B_TURNED) { tile_load_b<GROUPED_TILE>(b, b_tile, 16 * k, n / 16 + j / 2); }
            #pragma unroll
            for (int i = 0; i < 4; i++) { mma_m16n8k16(sums[i][j], a[i], b[j % 2], sums[i][j]); }
        }
    }
}

// the steps along the terms. load(step, a_tile, b_tile) starts the copies of one, and commits them
template <int A_TURNED, int B_TURNED, typename Load>
__device__ inline void grouped_sums_(float (&sums)[4][8][4], bf16* tiles, int n_steps, int m, int n, Load load) {
    tile_set_zero(sums);
    if (n_steps > 0) { load(0, tiles, tiles + GROUPED_PAIR / 2); }
    for (int step = 0; step < n_steps; step++) {
        bf16 *now = tiles + step % 2 * GROUPED_PAIR, *next = tiles + (step + 1) % 2 * GROUPED_PAIR;
        cp_async_wait<0>();
        __syncthreads();  // this step's tiles have arrived, and nobody uses the others any more
        if (step + 1 < n_steps) { load(step + 1, next, next + GROUPED_PAIR / 2); }
        grouped_multiply_<A_TURNED, B_TURNED>(sums, now, now + GROUPED_PAIR / 2, m, n);
    }
    __syncthreads();
}

// as grouped_rows_kernel, from 0. All its sizes are multiples of 8. shared memory: two pairs of tiles
template <int TURNED>
__global__ void __launch_bounds__(GROUPED_THREADS, 2)
grouped_rows_mma_kernel(bf16* out, size_t out_row, const bf16* x, size_t x_row, const int* index, const bf16* weight,
                        const int* offsets, int E, int K, int N) {
    extern __shared__ __align__(128) bf16 tiles[];
    __shared__ int row_of[GROUPED_TILE];
    int n_columns = (N + GROUPED_TILE - 1) / GROUPED_TILE, n0 = blockIdx.x % n_columns * GROUPED_TILE;
    int warp = threadIdx.x / WARP, m = warp / 2 * 64, n = warp % 2 * 64;
    GroupedTile rows = grouped_find_tile(offsets, E, GROUPED_TILE, blockIdx.x / n_columns);
    if (rows.n_rows == 0) { return; }
    const bf16* w = weight + (size_t)rows.expert * N * K;
    grouped_find_rows_(row_of, GROUPED_TILE, index, rows);
    auto load = [&](int step, bf16* a_tile, bf16* b_tile) {
        int k = step * GROUPED_K;
        grouped_tile_load_<GROUPED_TILE, GROUPED_K>(a_tile, x, x_row, row_of, k, K);
        if (TURNED) {
            tile_load<GROUPED_TILE, GROUPED_K, GROUPED_THREADS>(b_tile, w + (size_t)n0 * K + k, (size_t)K, N - n0,
                                                                K - k);
        } else {
            tile_load<GROUPED_K, GROUPED_TILE, GROUPED_THREADS>(b_tile, w + (size_t)k * N + n0, (size_t)N, K - k,
                                                                N - n0);
        }
        cp_async_commit();
    };
    float sums[4][8][4];
    const float one[4][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}};
    grouped_sums_<0, TURNED>(sums, tiles, (K + GROUPED_K - 1) / GROUPED_K, m, n, load);
    tile_store_rows<64>(out + (rows.first + m) * out_row + n0 + n, out_row, rows.n_rows - m, N - n0 - n,
                        tiles + warp * 64 * 64, 0, sums, one);
}

// as grouped_weight_kernel. C, OC and dout_row are multiples of 8. A step has GROUPED_K rows of the expert; which rows
// these are is fetched a step ahead. shared memory: two pairs of tiles
static __global__ void __launch_bounds__(GROUPED_THREADS, 2)
grouped_weight_mma_kernel(float* dweight, const bf16* dout, size_t dout_row, const int* dout_index, const bf16* inp,
                          const int* inp_index, const int* offsets, int C, int OC) {
    extern __shared__ __align__(128) bf16 tiles[];
    __shared__ int row_of[2][2][GROUPED_K];  // of every other step, of dout and inp
    int n_columns = (C + GROUPED_TILE - 1) / GROUPED_TILE, n_rows = (OC + GROUPED_TILE - 1) / GROUPED_TILE;
    int c = blockIdx.x % n_columns * GROUPED_TILE, oc = blockIdx.x / n_columns % n_rows * GROUPED_TILE;
    int e = blockIdx.x / n_columns / n_rows, first = offsets[e], end = offsets[e + 1];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, m = warp / 2 * 64, n = warp % 2 * 64;
    auto fetch_rows = [&](int step) {
        int i = threadIdx.x % GROUPED_K, of_inp = threadIdx.x / GROUPED_K, s = first + step * GROUPED_K + i;
        row_of[step % 2][of_inp][i] = s < end ? (int)grouped_at(of_inp ? inp_index : dout_index, s) : -1;
    };
    auto load = [&](int step, bf16* a_tile, bf16* b_tile) {
        grouped_tile_load_<GROUPED_K, GROUPED_TILE>(a_tile, dout, dout_row, row_of[step % 2][0], oc, OC);
        grouped_tile_load_<GROUPED_K, GROUPED_TILE>(b_tile, inp, (size_t)C, row_of[step % 2][1], c, C);
        cp_async_commit();
        fetch_rows(step + 1);
    };
    float sums[4][8][4];
    fetch_rows(0);
    __syncthreads();
    grouped_sums_<1, 0>(sums, tiles, (end - first + GROUPED_K - 1) / GROUPED_K, m, n, load);
    #pragma unroll
    for (int i = 0; i < 64; i++) {  // two neighbouring outputs of sums[i / 16][i / 2 % 8], upper or lower half
        int row = oc + m + 16 * (i / 16) + lane / 4 + i % 2 * 8, column = c + n + 8 * (i / 2 % 8) + lane % 4 * 2;
        const float* pair = &sums[i / 16][i / 2 % 8][i % 2 * 2];
        Pack<float, 2> stored = {{pair[0], pair[1]}};
        if (row < OC && column < C) { pack_store(dweight + ((size_t)e * OC + row) * C + column, stored); }
    }
}
static_assert(GROUPED_THREADS == GROUPED_TILE && GROUPED_THREADS == 2 * GROUPED_K, "a thread fetches one row's number");

// 1: done. 0: not for this shape or, the templates, not for this type
template <int TURNED>
static inline int grouped_rows_mma_(bf16* out, size_t out_row, const bf16* x, size_t x_row, const int* index,
                                    const bf16* weight, const int* offsets, int E, int R, int K, int N,
                                    const Device* dev) {
    if (!pack_fits(x, x_row) || !pack_fits(weight, K) || !pack_fits(weight, N) || !pack_fits(out, out_row)) {
        return 0;
    }
#ifdef WGMMA
    if (GROUPED_HOPPER) {
        grouped_hopper_rows<TURNED>(out, out_row, x, x_row, index, weight, offsets, E, R, K, N, dev);
        return 1;
    }
#endif
    const int n_bytes = 2 * GROUPED_PAIR * (int)sizeof(bf16);
    cudaCheck(cudaFuncSetAttribute(grouped_rows_mma_kernel<TURNED>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   n_bytes));
    unsigned grid = (unsigned)(grouped_most_tiles(E, R, GROUPED_TILE) * ceil_div(N, GROUPED_TILE));
    grouped_rows_mma_kernel<TURNED>
        <<<grid, GROUPED_THREADS, n_bytes, dev->stream>>>(out, out_row, x, x_row, index, weight, offsets, E, K, N);
    cudaCheck(cudaGetLastError());
    return 1;
}
template <int TURNED, typename X>
static inline int grouped_rows_mma_(X*, size_t, const X*, size_t, const int*, const X*, const int*, int, int, int, int,
                                    const Device*) {
    return 0;
}

static inline int grouped_weight_mma_(float* dweight, const bf16* dout, size_t dout_row, const int* dout_index,
                                      const bf16* inp, const int* inp_index, const int* offsets, int E, int C, int OC,
                                      const Device* dev) {
    if (!pack_fits(dout, OC) || !pack_fits(dout, dout_row) || !pack_fits(inp, C) || !pack_aligned(dweight)) {
        return 0;
    }
#ifdef WGMMA
    if (GROUPED_HOPPER) {
        grouped_hopper_weight(dweight, dout, dout_row, dout_index, inp, inp_index, offsets, E, C, OC, dev);
        return 1;
    }
#endif
    const int n_bytes = 2 * GROUPED_PAIR * (int)sizeof(bf16);
    cudaCheck(cudaFuncSetAttribute(grouped_weight_mma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    unsigned grid = (unsigned)(E * ceil_div(OC, GROUPED_TILE) * ceil_div(C, GROUPED_TILE));
    grouped_weight_mma_kernel<<<grid, GROUPED_THREADS, n_bytes, dev->stream>>>(dweight, dout, dout_row, dout_index,
                                                                               inp, inp_index, offsets, C, OC);
    cudaCheck(cudaGetLastError());
    return 1;
}
template <typename X>
static inline int grouped_weight_mma_(float*, const X*, size_t, const int*, const X*, const int*, const int*, int, int,
                                      int, const Device*) {
    return 0;
}
#endif  // EXACT

// ---- fast builds, bf16, few rows: forward reads each chosen weight once (few_rows.h) ----

#ifndef EXACT
// as grouped_rows_kernel, weight (N, K)
template <int TILES, typename Weight>
__global__ void __launch_bounds__(FEW_THREADS, 2)
grouped_few_kernel(bf16* out, const bf16* x, const int* index, Weight weight, const int* offsets, int E, int K, int N) {
    int n_columns = (N + FEW_OUTPUTS - 1) / FEW_OUTPUTS, n0 = blockIdx.x % n_columns * FEW_OUTPUTS;
    GroupedTile rows = grouped_find_tile(offsets, E, 8 * TILES, blockIdx.x / n_columns);
    if (rows.n_rows == 0) { return; }
    auto row_of = [&](int s) { return grouped_at(index, rows.first + s); };
    few_rows_outputs<TILES>(out + (size_t)rows.first * N, x, row_of, weight.from((size_t)rows.expert * N),
                            (const bf16*)NULL, rows.n_rows, n0, K, N);
}

template <typename Weight>
static inline void grouped_few_launch_(bf16* out, const bf16* x, const int* index, Weight weight, const int* offsets,
                                       int E, int R, int K, int N, const Device* dev) {
    const int64_t n_columns = ceil_div(N, FEW_OUTPUTS);
    if (R <= 8) {
        unsigned grid = (unsigned)(grouped_most_tiles(E, R, 8) * n_columns);
        grouped_few_kernel<1><<<grid, FEW_THREADS, 0, dev->stream>>>(out, x, index, weight, offsets, E, K, N);
    } else {
        unsigned grid = (unsigned)(grouped_most_tiles(E, R, FEW_ROWS) * n_columns);
        grouped_few_kernel<2><<<grid, FEW_THREADS, 0, dev->stream>>>(out, x, index, weight, offsets, E, K, N);
    }
    cudaCheck(cudaGetLastError());
}

// 1: done. 0: not for these rows or, the templates of X, not for this type
static inline int grouped_few_(bf16* out, const bf16* x, const int* index, const bf16* weight, const int* offsets,
                               int E, int R, int K, int N, const Device* dev) {
    if (!few_rows_fit(x, weight, R, K)) { return 0; }
    grouped_few_launch_(out, x, index, FewHalves{weight, K}, offsets, E, R, K, N, dev);
    return 1;
}
template <typename X>
static inline int grouped_few_(X*, const X*, const int*, const X*, const int*, int, int, int, int, const Device*) {
    return 0;
}

static inline int grouped_few_codes_(bf16* out, const bf16* x, const int* index, const StoredMatrix* w,
                                     const int* offsets, int E, int R, const Device* dev) {
    if (!few_codes_fit(x, w, R) || R == 0) { return 0; }
    few_codes_launch(w, [=](auto codes) {
        grouped_few_launch_(out, x, index, codes, offsets, E, R, w->columns, w->rows, dev);
    });
    return 1;
}
template <typename X>
static inline int grouped_few_codes_(X*, const X*, const int*, const StoredMatrix*, const int*, int, int,
                                     const Device*) {
    return 0;
}
#endif

// ---- fast builds, bf16, Hopper: codes of fp8 are widened on their way into the tiles of a product ----

#ifndef EXACT
// as grouped_rows_mma_; weight: of all experts
template <int TURNED>
static inline int grouped_codes_(bf16* out, const bf16* x, const int* index, const StoredMatrix* weight,
                                 const int* offsets, int E, int R, const Device* dev) {
#ifdef WGMMA
    const int K = TURNED ? weight->columns : weight->rows, N = TURNED ? weight->rows : weight->columns;
    const int fits = pack_fits(x, K) && pack_fits(out, N) && grouped_hopper_reads_codes(weight);
    if (GROUPED_HOPPER && fits && R > 0) {
        grouped_hopper_rows<TURNED>(out, (size_t)N, x, (size_t)K, index, *weight, offsets, E, R, K, N, dev);
        return 1;
    }
#endif
    (void)out, (void)x, (void)index, (void)weight, (void)offsets, (void)E, (void)R, (void)dev;
    return 0;
}
template <int TURNED, typename X>
static inline int grouped_codes_(X*, const X*, const int*, const StoredMatrix*, const int*, int, int, const Device*) {
    return 0;
}
#endif

// ---- launches ----

template <int TURNED, typename X>
static inline void grouped_launch_rows_(X* out, size_t out_row, int add, const X* x, size_t x_row, const int* index,
                                        const X* weight, const int* offsets, int E, int R, int K, int N,
                                        const Device* dev) {
    if (R == 0) { return; }
#ifndef EXACT
    const int plain = !add && out_row == (size_t)N && x_row == (size_t)K;
    if (TURNED && plain && grouped_few_(out, x, index, weight, offsets, E, R, K, N, dev)) { return; }
    if (!add && grouped_rows_mma_<TURNED>(out, out_row, x, x_row, index, weight, offsets, E, R, K, N, dev)) { return; }
#endif
    unsigned grid = (unsigned)(grouped_most_tiles(E, R, GEMM_TILE) * ceil_div(N, GEMM_TILE));
    grouped_rows_kernel<TURNED>
        <<<grid, GEMM_THREADS, 0, dev->stream>>>(out, out_row, add, x, x_row, index, weight, offsets, E, K, N);
    cudaCheck(cudaGetLastError());
}

// out (R, N) = rows of x (R, K) * b of their expert. weight: b (K, N) of expert 0, one way or the other; the next has
// its K * N elements behind it
template <typename X>
static inline void grouped_product(X* out, size_t out_row, int add, const X* x, size_t x_row, const int* index,
                                   MatrixOf<X> weight, const int* offsets, int E, int R, int K, int N,
                                   const Device* dev) {
    if (weight.row_stride == 1) {
        grouped_launch_rows_<1>(out, out_row, add, x, x_row, index, weight.data, offsets, E, R, K, N, dev);
    } else {
        grouped_launch_rows_<0>(out, out_row, add, x, x_row, index, weight.data, offsets, E, R, K, N, dev);
    }
}

// dweight (E, OC, C) = sums over the rows of each expert of dout^T * inp
template <typename X>
static inline void grouped_gradient(float* dweight, const X* dout, size_t dout_row, const int* dout_index,
                                    const X* inp, const int* inp_index, const int* offsets, int E, int R, int C,
                                    int OC, const Device* dev) {
    (void)R;
#ifndef EXACT
    if (grouped_weight_mma_(dweight, dout, dout_row, dout_index, inp, inp_index, offsets, E, C, OC, dev)) { return; }
#endif
    unsigned grid = (unsigned)(E * ceil_div(OC, GEMM_TILE) * ceil_div(C, GEMM_TILE));
    grouped_weight_kernel<<<grid, GEMM_THREADS, 0, dev->stream>>>(dweight, dout, dout_row, dout_index, inp, inp_index,
                                                                  offsets, C, OC);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void grouped_matmul_forward(X* out, const X* inp, const int* inp_index, const X* weight,
                                          const int* offsets, int E, int R, int C, int OC, const Device* dev) {
    grouped_product(out, OC, 0, inp, C, inp_index, gemm_transposed(weight, C), offsets, E, R, C, OC, dev);
}

template <typename X>
static inline void grouped_matmul_backward_input(X* dinp, const X* dout, const int* dout_index, const X* weight,
                                                 const int* offsets, int E, int R, int C, int OC, const Device* dev) {
    if (!dinp) { return; }
    grouped_product(dinp, C, 0, dout, OC, dout_index, gemm_matrix(weight, C), offsets, E, R, OC, C, dev);
}

template <typename X>
static inline void grouped_matmul_backward_weight(float* dweight, const X* dout, const int* dout_index, const X* inp,
                                                  const int* inp_index, const int* offsets, int E, int R, int C, int OC,
                                                  const Device* dev) {
    if (!dweight) { return; }
    grouped_gradient(dweight, dout, OC, dout_index, inp, inp_index, offsets, E, R, C, OC, dev);
}

// weight (E, OC, C): the first of them. The rows of the experts that are wide together are a product of its own
template <typename X>
static inline void grouped_matmul_forward_stored(X* out, const X* inp, const int* inp_index, StoredMatrix weight,
                                                 const int* offsets, int E, int R, const Device* dev) {
    const int at_once = widen_at_once<X>(&weight, E);
#ifndef EXACT
    if (grouped_few_codes_(out, inp, inp_index, &weight, offsets, E, R, dev)) { return; }
    if (grouped_codes_<1>(out, inp, inp_index, &weight, offsets, E, R, dev)) { return; }
#endif
    for (int e = 0, n; e < E; e += n) {
        n = at_once < E - e ? at_once : E - e;
        grouped_matmul_forward(out, inp, inp_index, widen_experts<X>(&weight, e, n, offsets, dev), offsets + e,
                               n, R, weight.columns, weight.rows, dev);
    }
}

template <typename X>
static inline void grouped_matmul_backward_input_stored(X* dinp, const X* dout, const int* dout_index,
                                                        StoredMatrix weight, const int* offsets, int E, int R,
                                                        const Device* dev) {
    const int at_once = widen_at_once<X>(&weight, E);
#ifndef EXACT
    if (!dinp || grouped_codes_<0>(dinp, dout, dout_index, &weight, offsets, E, R, dev)) { return; }
#endif
    for (int e = 0, n; dinp && e < E; e += n) {
        n = at_once < E - e ? at_once : E - e;
        grouped_matmul_backward_input(dinp, dout, dout_index, widen_experts<X>(&weight, e, n, offsets, dev),
                                      offsets + e, n, R, weight.columns, weight.rows, dev);
    }
}
#endif  // __CUDACC__
#endif  // LLMC_GROUPED_MATMUL_H
