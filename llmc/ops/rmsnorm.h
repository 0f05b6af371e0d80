/*
RMSNorm: out = inp * rstd * weight, rstd = 1/sqrt(mean(inp^2) + eps) over each row of C channels.
    inp, out (N, C)   weight (C)   rstd (N) float, kept for backward
On a GPU weight may be stored otherwise than the rows: a float gain of bf16 rows. NULL: there is none, as if it were 1.
rmsnorm_gain: gain = 1 + weight (C), float: of a zero-centred norm, whose weight starts at 0 and decays to 0 (Gemma,
Qwen3-Next). gain then is the weight of the norm, and its gradient is dweight: d gain / d weight is 1.
residual_rmsnorm_forward adds before it normalises: residual = left + right, out = rmsnorm(residual). residual may be
left or right. The norm of each head (Qwen3's q and k) is that of N = positions * heads rows of C = head size, one after
the other.
Backward, with xhat = inp * rstd and g = dout * weight (derived in doc/rmsnorm.md). NULL for either: nobody asks for it,
and nothing is done for it
    dinp    += rstd * (g - xhat * mean(g * xhat))   (N, C)  add 1: inp is the residual stream; add 0: as if dinp held
                                                            zeros, so -0 becomes 0, and what it held is not read
    dweight  = sum over n of dout * xhat            (C)     written, one call is one leaf
Cost:   memory bound. On a CPU forward moves 2*N*C floats, backward 6*N*C; on a GPU 2*N*C elements forward, 4*N*C with
        the residual sum, 4*N*C backward, 3*N*C with add 0: every array once. Judge it in GB/s: of rows of 128
        channels one thread of a busy AMD EPYC had 18 forward, and 18 and 23 of dinp written and added, where a copy
        had 32; two had 27, 28 and 37 where it had 40.
Error:  a chain of C squares, then 4 roundings: |rstd| error <= (C + 8) * 2^-25 |rstd|. bf16 rounds what is stored: 2^-8
        |out|, 2^-8 |dinp|; rstd and dweight are float.
Order:  row sums chain over c from 0, dweight chains over n from 0; in C lanes hold neighbouring rows for the first and
        neighbouring channels for the second. Fast kernels: 32 lanes and a tree for a row; each thread sums dweight over
        its rows, then those of a block are added in order, of short rows along a tree, then blocks in a fixed order;
        their number is that of the GPU's multiprocessors times a constant.
Source: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4
*/
#ifndef LLMC_RMSNORM_H
#define LLMC_RMSNORM_H
#include "../core/device.h"  // Device, device_workspace, ceil_div
#include "../core/kernel.h"  // load_floats, store_floats, row_madd, row_total, MaybeNull
#include "../core/mma.h"     // in a CUDA build: cp_async_commit, cp_async_wait
#include "residual.h"        // residual_forward
#include "row_ring.h"        // in a CUDA build: RowRing, row_ring_channel, row_ring_add_threads, row_ring_add_rows
#include <math.h>
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_load, v_load_columns, v_fill
#endif

// the gain of channel c
static inline float rmsnorm_weight_(const float* weight, int c) { return weight ? weight[c] : 1.0f; }

// ---- plain C: read this first; it defines every bit ----

static inline void rmsnorm_forward_ref(float* out, float* rstd, const float* inp, const float* weight, float eps, int N,
                                       int C) {
    for (int n = 0; n < N; n++) {
        const float* x = inp + (size_t)n * C;
        float sum = 0.0f;
        for (int c = 0; c < C; c++) { sum = madd(x[c], x[c], sum); }
        float s = 1.0f / sqrtf(sum / (float)C + eps);
        for (int c = 0; c < C; c++) { out[(size_t)n * C + c] = x[c] * s * rmsnorm_weight_(weight, c); }
        rstd[n] = s;
    }
}

static inline void residual_rmsnorm_forward_ref(float* residual, float* out, float* rstd, const float* left,
                                                const float* right, const float* weight, float eps, int N, int C) {
    residual_forward_ref(residual, left, right, (size_t)N * C);
    rmsnorm_forward_ref(out, rstd, residual, weight, eps, N, C);
}

static inline void rmsnorm_gain_ref(float* gain, const float* weight, int C) {
    for (int c = 0; c < C; c++) { gain[c] = 1.0f + weight[c]; }
}

// dinp of one row
static inline void rmsnorm_backward_row_ref(float* dinp, const float* dout, const float* inp, const float* weight,
                                            float rstd, int add, int C) {
    float sum = 0.0f;
    for (int c = 0; c < C; c++) { sum = madd(dout[c] * rmsnorm_weight_(weight, c), inp[c] * rstd, sum); }
    float mean = sum / (float)C;
    for (int c = 0; c < C; c++) {
        float before = add ? dinp[c] : 0.0f;
        dinp[c] = before + rstd * (dout[c] * rmsnorm_weight_(weight, c) - inp[c] * rstd * mean);
    }
}

static inline void rmsnorm_backward_ref(float* dinp, float* dweight, const float* dout, const float* inp,
                                        const float* weight, const float* rstd, int add, int N, int C) {
    for (size_t n = 0; dinp && n < (size_t)N; n++) {
        rmsnorm_backward_row_ref(dinp + n * C, dout + n * C, inp + n * C, weight, rstd[n], add, C);
    }
    for (int c = 0; dweight && c < C; c++) {
        dweight[c] = 0.0f;
        for (size_t n = 0; n < (size_t)N; n++) {
            dweight[c] = madd(dout[n * C + c] * inp[n * C + c], rstd[n], dweight[c]);
        }
    }
}

#ifndef __CUDACC__  // ---- fast C: the sums of VLANES rows side by side ----

// VLANES rows are read square by square, which no hardware foresees. So each square asks for as much of the rows behind
// them, in the order in which these lie: into the second cache, and beyond the last row it is no harm. Of short rows,
// the heads of q and k, that makes backward twice as fast

// rstd of VLANES rows. The channels beyond the last whole square follow one by one
static inline void rmsnorm_statistics_(float* rstd, const float* x, float eps, int C) {
    vfloat sum = v_fill(0.0f), columns[VLANES];
    int c_squares = C / VLANES * VLANES;
    for (int c = 0; c < c_squares; c += VLANES) {
        const float* next = x + (size_t)VLANES * (size_t)(C + c);
        for (int i = 0; i < VLANES; i++) { __builtin_prefetch(next + i * VLANES, 0, 2); }
        v_load_columns(columns, x + c, (size_t)C);
        for (int i = 0; i < VLANES; i++) { sum = v_madd(columns[i], columns[i], sum); }
    }
    for (int r = 0; r < VLANES; r++, x += C) {
        float row_sum = sum[r];
        for (int c = c_squares; c < C; c++) { row_sum = madd(x[c], x[c], row_sum); }
        rstd[r] = 1.0f / sqrtf(row_sum / (float)C + eps);
    }
}

static inline void rmsnorm_forward(float* out, float* rstd, const float* inp, const float* weight, float eps, int N,
                                   int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const float* x = inp + (size_t)first * C;
        float* y = out + (size_t)first * C;
        if (first + VLANES > N) {
            rmsnorm_forward_ref(y, rstd + first, x, weight, eps, N - first, C);
            continue;
        }
        rmsnorm_statistics_(rstd + first, x, eps, C);
        for (int n = first; n < first + VLANES; n++, x += C, y += C) {
            float s = rstd[n];
            #pragma omp simd
            for (int c = 0; c < C; c++) { y[c] = x[c] * s * rmsnorm_weight_(weight, c); }
        }
    }
}

static inline void residual_rmsnorm_forward(float* residual, float* out, float* rstd, const float* left,
                                            const float* right, const float* weight, float eps, int N, int C,
                                            const Device* dev) {
    residual_forward(residual, left, right, (size_t)N * C, dev);
    rmsnorm_forward(out, rstd, residual, weight, eps, N, C, dev);
}

// one row: to start threads would take longer
static inline void rmsnorm_gain(float* gain, const float* weight, int C, const Device* dev) {
    (void)dev;
    #pragma omp simd
    for (int c = 0; c < C; c++) { gain[c] = 1.0f + weight[c]; }
}

// mean of g * xhat for VLANES rows
static inline void rmsnorm_gradient_means_(float* means, const float* d, const float* x, const float* weight,
                                           const float* rstd, int C) {
    vfloat s = v_load(rstd), sum = v_fill(0.0f), x_columns[VLANES], d_columns[VLANES];
    int c_squares = C / VLANES * VLANES;
    for (int c = 0; c < c_squares; c += VLANES) {
        const size_t next = (size_t)VLANES * (size_t)(C + c);
        for (int i = 0; i < VLANES; i++) { __builtin_prefetch(x + next + i * VLANES, 0, 2); }
        for (int i = 0; i < VLANES; i++) { __builtin_prefetch(d + next + i * VLANES, 0, 2); }
        v_load_columns(x_columns, x + c, (size_t)C);
        v_load_columns(d_columns, d + c, (size_t)C);
        for (int i = 0; i < VLANES; i++) {
            sum = v_madd(d_columns[i] * v_fill(rmsnorm_weight_(weight, c + i)), x_columns[i] * s, sum);
        }
    }
    for (int r = 0; r < VLANES; r++, x += C, d += C) {
        float row_sum = sum[r];
        for (int c = c_squares; c < C; c++) {
            row_sum = madd(d[c] * rmsnorm_weight_(weight, c), x[c] * rstd[r], row_sum);
        }
        means[r] = row_sum / (float)C;
    }
}

// dinp of VLANES rows
static inline void rmsnorm_backward_rows_(float* dinp, const float* dout, const float* inp, const float* weight,
                                          const float* rstd, int add, int C) {
    float means[VLANES];
    rmsnorm_gradient_means_(means, dout, inp, weight, rstd, C);
    for (int r = 0; r < VLANES; r++, dinp += C, dout += C, inp += C) {
        float s = rstd[r], mean = means[r];
        #pragma omp simd
        for (int c = 0; c < C; c++) {
            float before = add ? dinp[c] : 0.0f;
            dinp[c] = before + s * (dout[c] * rmsnorm_weight_(weight, c) - inp[c] * s * mean);
        }
    }
}

// dweight of the channels first..last-1, rows ascending
static inline void rmsnorm_backward_channels_(float* dweight, const float* dout, const float* inp, const float* rstd,
                                              int N, int C, int first, int last) {
    for (int c = first; c < last; c++) { dweight[c] = 0.0f; }
    for (int n = 0; n < N; n++) {
        const float* x = inp + (size_t)n * C;
        const float* d = dout + (size_t)n * C;
        float s = rstd[n];
        #pragma omp simd
        for (int c = first; c < last; c++) { dweight[c] = madd(d[c] * x[c], s, dweight[c]); }
    }
}

// dweight, channels over threads
static inline void rmsnorm_backward_weight_(float* dweight, const float* dout, const float* inp, const float* rstd,
                                            int N, int C) {
    const int width = 128;
    #pragma omp parallel for
    for (int first = 0; first < C; first += width) {
        rmsnorm_backward_channels_(dweight, dout, inp, rstd, N, C, first, first + width < C ? first + width : C);
    }
}

// dinp, rows over threads
static inline void rmsnorm_backward_input_(float* dinp, const float* dout, const float* inp, const float* weight,
                                           const float* rstd, int add, int N, int C) {
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        size_t row = (size_t)first * C;
        if (first + VLANES <= N) {
            rmsnorm_backward_rows_(dinp + row, dout + row, inp + row, weight, rstd + first, add, C);
            continue;
        }
        for (int n = first; n < N; n++, row += C) {
            rmsnorm_backward_row_ref(dinp + row, dout + row, inp + row, weight, rstd[n], add, C);
        }
    }
}

static inline void rmsnorm_backward(float* dinp, float* dweight, const float* dout, const float* inp,
                                    const float* weight, const float* rstd, int add, int N, int C,
                                    const Device* dev) {
    (void)dev;
    if (dweight) { rmsnorm_backward_weight_(dweight, dout, inp, rstd, N, C); }
    if (dinp) { rmsnorm_backward_input_(dinp, dout, inp, weight, rstd, add, N, C); }
}
#else  // ---- CUDA forward: one warp per row ----

enum { RMSNORM_ROWS = 8 };           // rows of a block: blocks are (32, 8)
enum { RMSNORM_SHARED = 48 << 10 };  // bytes of shared memory that a block may have without asking

// the gain of the channels c .. c+W-1
template <int W, typename G>
__device__ inline Pack<float, W> rmsnorm_weights_(const G* weight, int c) {
    if (weight) { return load_floats<W>(weight + c); }
    Pack<float, W> ones;
    for (int i = 0; i < W; i++) { ones.x[i] = 1.0f; }
    return ones;
}

// With packs the row comes from memory once: each lane keeps its own packs in shared memory, and since no other lane
// looks at them, nobody waits. ADD: the row is left + right, rounded to X
template <int W, int ADD, typename X, typename G>
__global__ void rmsnorm_forward_kernel(X* residual, X* out, float* rstd, const X* left, const X* right, const G* weight,
                                       float eps, int N, int C) {
    extern __shared__ float4 rmsnorm_kept[];
    int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x * W;
    if (n >= N) { return; }  // a warp shares threadIdx.y, so it leaves whole and shuffles stay legal
    size_t start = (size_t)n * C;
    X* kept = reinterpret_cast<X*>(rmsnorm_kept) + (size_t)threadIdx.y * C;
    const X* row = W > 1 ? kept : ADD ? residual + start : left + start;
    float sum = 0.0f;
    #pragma unroll 2
    for (int c = lane; c - lane < C; c += WARP * W) {
        Pack<float, W> squared = {};
        if (c < C) {
            Pack<X, W> x = pack_load<W>(left + start + c);
            if (ADD) {
                Pack<X, W> added = pack_load<W>(right + start + c);
                for (int i = 0; i < W; i++) { x.x[i] = from_float<X>(to_float(x.x[i]) + to_float(added.x[i])); }
                pack_store(residual + start + c, x);
            }
            if (W > 1) { pack_store(kept + c, x); }
            for (int i = 0; i < W; i++) { squared.x[i] = to_float(x.x[i]); }
        }
        sum = row_madd(squared.x, squared.x, sum);
    }
    float s = 1.0f / sqrtf(row_total(sum) / (float)C + eps);
    for (int c = lane; c < C; c += WARP * W) {
        Pack<float, W> x = load_floats<W>(row + c), w = rmsnorm_weights_<W>(weight, c);
        for (int i = 0; i < W; i++) { x.x[i] = x.x[i] * s * w.x[i]; }
        store_floats(out + start + c, x);
    }
    if (threadIdx.x == 0) { rstd[n] = s; }
}

// ADD 0: residual and right are not used
template <int ADD, typename X, typename G>
static inline void rmsnorm_forward_launch_(X* residual, X* out, float* rstd, const X* left, const X* right,
                                           const G* weight, float eps, int N, int C, const Device* dev) {
    constexpr int W = pack_width<X>();
    int row_bytes = C * (int)sizeof(X), rows = row_bytes > 0 ? RMSNORM_SHARED / row_bytes : 0;
    rows = rows < RMSNORM_ROWS ? rows : RMSNORM_ROWS;
    if (rows > 0 && C % W == 0 && pack_aligned(residual, out, left, right, weight)) {
        dim3 block(WARP, (unsigned)rows);
        rmsnorm_forward_kernel<W, ADD><<<(unsigned)ceil_div(N, rows), block, (size_t)rows * row_bytes, dev->stream>>>(
            residual, out, rstd, left, right, weight, eps, N, C);
    } else {
        dim3 block(WARP, RMSNORM_ROWS);
        rmsnorm_forward_kernel<1, ADD><<<(unsigned)ceil_div(N, RMSNORM_ROWS), block, 0, dev->stream>>>(
            residual, out, rstd, left, right, weight, eps, N, C);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X, typename G>
static inline void rmsnorm_forward(X* out, float* rstd, const X* inp, const G* weight, float eps, int N, int C,
                                   const Device* dev) {
    rmsnorm_forward_launch_<0>((X*)NULL, out, rstd, inp, (const X*)NULL, weight, eps, N, C, dev);
}

// NULL itself does not say what G is
template <typename X>
static inline void rmsnorm_forward(X* out, float* rstd, const X* inp, decltype(nullptr), float eps, int N, int C,
                                   const Device* dev) {
    rmsnorm_forward(out, rstd, inp, (const X*)NULL, eps, N, C, dev);
}

template <typename X, typename G>
static inline void residual_rmsnorm_forward(X* residual, X* out, float* rstd, const X* left, const X* right,
                                            const G* weight, float eps, int N, int C, const Device* dev) {
    rmsnorm_forward_launch_<1>(residual, out, rstd, left, right, weight, eps, N, C, dev);
}

template <typename X>
__global__ void rmsnorm_gain_kernel(float* gain, const X* weight, int C) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < C) { gain[c] = 1.0f + to_float(weight[c]); }
}

template <typename X>
static inline void rmsnorm_gain(float* gain, const X* weight, int C, const Device* dev) {
    if (C > 0) {
        rmsnorm_gain_kernel<<<(unsigned)ceil_div(C, GRID_BLOCK), GRID_BLOCK, 0, dev->stream>>>(gain, weight, C);
        cudaCheck(cudaGetLastError());
    }
}

// ---- CUDA backward in two kernels that each build can run: dinp by rows, dweight by channels ----

// one warp per row
template <int W, typename X, typename G>
__global__ void rmsnorm_backward_rows_kernel(X* dinp, const X* dout, const X* inp, const G* weight, const float* rstd,
                                             int add, int N, int C) {
    int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x * W;
    if (n >= N) { return; }
    size_t start = (size_t)n * C;
    float s = rstd[n], sum = 0.0f;
    for (int c = lane; c - lane < C; c += WARP * W) {
        Pack<float, W> g, xhat = {};
        for (int i = 0; i < W; i++) { g.x[i] = -0.0f; }  // beyond the row: -0 * 0 leaves every sum as it is, also -0
        if (c < C) {
            Pack<float, W> x = load_floats<W>(inp + start + c), d = load_floats<W>(dout + start + c);
            Pack<float, W> w = rmsnorm_weights_<W>(weight, c);
            for (int i = 0; i < W; i++) {
                g.x[i] = d.x[i] * w.x[i];
                xhat.x[i] = x.x[i] * s;
            }
        }
        sum = row_madd(g.x, xhat.x, sum);
    }
    float mean = row_total(sum) / (float)C;
    for (int c = lane; c < C; c += WARP * W) {
        Pack<float, W> x = load_floats<W>(inp + start + c), d = load_floats<W>(dout + start + c);
        Pack<float, W> w = rmsnorm_weights_<W>(weight, c), y = {};
        if (add) { y = load_floats<W>(dinp + start + c); }
        for (int i = 0; i < W; i++) { y.x[i] += s * (d.x[i] * w.x[i] - x.x[i] * s * mean); }
        store_floats(dinp + start + c, y);
    }
}

// parts (gridDim.y, C): dweight of the rows N * b / gridDim.y .. of part b = blockIdx.y. One thread per channel
template <typename X>
__global__ void rmsnorm_backward_channels_kernel(float* parts, const X* dout, const X* inp, const float* rstd, int N,
                                                 int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
    if (c >= C) { return; }
    int first = (int)((int64_t)N * b / gridDim.y), last = (int)((int64_t)N * (b + 1) / gridDim.y);
    float dweight = 0.0f;
    #pragma unroll 8
    for (int n = first; n < last; n++) {
        float d = to_float(dout[(size_t)n * C + c]), x = to_float(inp[(size_t)n * C + c]);
        dweight = madd(d * x, rstd[n], dweight);
    }
    parts[(size_t)b * C + c] = dweight;
}

// dweight is the sum over b of parts (n_parts, C). A block (32, rows) has 32 channels: row y of its threads adds the
// parts y, y + rows, ..., then the first row adds these sums
__global__ static void rmsnorm_backward_parts_kernel(float* dweight, const float* parts, int n_parts, int C) {
    __shared__ float sums[WARP][WARP];
    int c = blockIdx.x * WARP + threadIdx.x;
    float sum = 0.0f;
    #pragma unroll 8
    for (int b = threadIdx.y; b < n_parts; b += blockDim.y) { sum += c < C ? parts[(size_t)b * C + c] : 0.0f; }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) { return; }
    for (int y = 1; y < (int)blockDim.y; y++) { sum += sums[y][threadIdx.x]; }
    dweight[c] = sum;
}

// ---- CUDA backward in one pass, fast builds: a thread stays on its channels while its block walks down the rows ----
// Two rows of each thread are on their way to shared memory while it works on the one before them (row_ring.h): up to
// 98 KB of a multiprocessor. Where a row has one warp, as up to C = 1024, there is no barrier at all.

enum { RMSNORM_PACKS = 4 };  // of 8 channels, of a thread

// what a thread has of one row: inp, dout and, where it is added to, dinp
enum { RMSNORM_INP, RMSNORM_DOUT, RMSNORM_DINP, RMSNORM_ARRAYS };

template <typename X>
using RmsnormRing_ = RowRing<RMSNORM_PACKS, RMSNORM_ARRAYS, X>;

// Block (T, R) number b takes the rows b * R, ..., then those gridDim.x * R further, and leaves its sum over them in
// parts (blocks, C). INPUT: dinp is asked for; WEIGHT: dweight is
template <int INPUT, int WEIGHT, typename X, typename G>
__global__ void __launch_bounds__(ROW_RING_THREADS, 1)
rmsnorm_backward_kernel(X* dinp, float* parts, const X* dout, const X* inp, const G* weight, const float* rstd, int add,
                        int N, int C) {
    const int W = ROW_RING_W, K = RMSNORM_PACKS, STAGES = ROW_RING_STAGES;
    __shared__ RowRingSums<1> of_warps[2];
    const int threads = blockDim.x * blockDim.y, step = gridDim.x * blockDim.y;
    const float per_channel = 1.0f / (float)C;
    float dweight[1][K][W] = {};
    Pack<G, W> w[K] = {};
    for (int k = 0; INPUT && k < K; k++) {
        if (row_ring_channel(k) >= C) { continue; }
        const Pack<float, W> x = rmsnorm_weights_<W>(weight, row_ring_channel(k));
        for (int i = 0; i < W; i++) { w[k].x[i] = from_float<G>(x.x[i]); }
    }
    auto fetch = [&](int stage, int n) {
        RmsnormRing_<X>::fetch(stage, RMSNORM_INP, inp, n, N, C);
        RmsnormRing_<X>::fetch(stage, RMSNORM_DOUT, dout, n, N, C);
        if (INPUT && add) { RmsnormRing_<X>::fetch(stage, RMSNORM_DINP, dinp, n, N, C); }
        cp_async_commit();
    };
    int first = blockIdx.x * blockDim.y, n = first + threadIdx.y, stage = 0;
    for (int i = 0; i < STAGES - 1; i++) { fetch(i, n + i * step); }
    float s = n < N ? rstd[n] : 0.0f;
    for (int turn = 0; first < N; first += step, n += step, turn ^= 1) {
        fetch((stage + STAGES - 1) % STAGES, n + (STAGES - 1) * step);
        const float next_s = n + step < N ? rstd[n + step] : 0.0f;
        const Pack<X, W>* x_kept = RmsnormRing_<X>::kept(stage, RMSNORM_INP);
        const Pack<X, W>* d_kept = RmsnormRing_<X>::kept(stage, RMSNORM_DOUT);
        const Pack<X, W>* y_kept = RmsnormRing_<X>::kept(stage, RMSNORM_DINP);
        Pack<float, 1> row_sum = {};  // of g * xhat
        cp_async_wait<STAGES - 1>();
        for (int k = 0; k < K; k++) {
            const Pack<float, W> x = load_floats<W>(x_kept[k * threads].x), d = load_floats<W>(d_kept[k * threads].x);
            for (int i = 0; i < W; i++) {
                if (WEIGHT) { dweight[0][k][i] = madd(d.x[i] * x.x[i], s, dweight[0][k][i]); }
                row_sum.x[0] = madd(d.x[i] * to_float(w[k].x[i]), x.x[i] * s, row_sum.x[0]);
            }
        }
        if (INPUT) { row_ring_add_threads(row_sum, of_warps[turn]); }
        const float mean = row_sum.x[0] * per_channel;
        for (int k = 0; INPUT && k < K; k++) {
            const Pack<float, W> x = load_floats<W>(x_kept[k * threads].x), d = load_floats<W>(d_kept[k * threads].x);
            const int c = row_ring_channel(k);
            Pack<float, W> y = {};
            if (add) { y = load_floats<W>(y_kept[k * threads].x); }
            for (int i = 0; i < W; i++) { y.x[i] += s * (d.x[i] * to_float(w[k].x[i]) - x.x[i] * s * mean); }
            if (n < N && c < C) { store_floats(dinp + (size_t)n * C + c, y); }
        }
        s = next_s, stage = (stage + 1) % STAGES;
    }
    cp_async_wait<0>();
    if (WEIGHT) { row_ring_add_rows(parts + (size_t)blockIdx.x * C, dweight, C); }
}

// ---- ... short rows: those of heads, whose channels divide a warp ----

enum { RMSNORM_OWNED = 8 };     // channels of a thread
enum { RMSNORM_AT_ONCE = 22 };  // blocks, of a warp each, of a multiprocessor; so many can have 80 registers a thread
enum { RMSNORM_PAIR = 2 };      // rows that are loaded before any of them is used

// A pair of rows has C / 8 lanes, and several pairs lie side by side. Block b takes the pairs b * side .., then those
// gridDim.x * side further, and leaves its sum over them in parts (blocks, C). INPUT: dinp is asked for; WEIGHT:
// dweight is
template <int INPUT, int WEIGHT, typename X, typename G>
__global__ void __launch_bounds__(WARP, RMSNORM_AT_ONCE)
rmsnorm_backward_short_kernel(X* dinp, float* parts, const X* dout, const X* inp, const G* weight, const float* rstd,
                              int add, int N, int C) {
    const int W = RMSNORM_OWNED, R = RMSNORM_PAIR;
    const int lanes = C / W, side = WARP / lanes, c = threadIdx.x % lanes * W, first = threadIdx.x / lanes * R;
    const float per_channel = 1.0f / (float)C;
    Pack<float, W> w = {}, dweight = {};
    if (INPUT) { w = rmsnorm_weights_<W>(weight, c); }
    for (int n = blockIdx.x * side * R + first; n - first < N; n += gridDim.x * side * R) {
        Pack<float, W> x[R] = {}, d[R] = {};
        float s[R] = {}, row_sums[R] = {};  // of g * xhat
        for (int r = 0; r < R; r++) {
            if (n + r >= N) { continue; }
            x[r] = load_floats<W>(inp + (size_t)(n + r) * C + c);
            d[r] = load_floats<W>(dout + (size_t)(n + r) * C + c);
        }
        for (int r = 0; r < R; r++) {
            if (n + r >= N) { continue; }
            s[r] = rstd[n + r];
            for (int i = 0; i < W; i++) {
                if (WEIGHT) { dweight.x[i] = madd(d[r].x[i] * x[r].x[i], s[r], dweight.x[i]); }
                x[r].x[i] *= s[r];
                d[r].x[i] *= w.x[i];
                row_sums[r] = madd(d[r].x[i], x[r].x[i], row_sums[r]);
            }
        }
        if (!INPUT) { continue; }
        for (int r = 0; r < R; r++) {
            for (int step = lanes / 2; step > 0; step /= 2) {
                row_sums[r] += __shfl_xor_sync(ALL_LANES, row_sums[r], step);
            }
        }
        for (int r = 0; r < R; r++) {
            if (n + r >= N) { continue; }
            float mean = row_sums[r] * per_channel;
            Pack<float, W> y = {};
            if (add) { y = load_floats<W>(dinp + (size_t)(n + r) * C + c); }
            for (int i = 0; i < W; i++) { y.x[i] += s[r] * (d[r].x[i] - x[r].x[i] * mean); }
            store_floats(dinp + (size_t)(n + r) * C + c, y);
        }
    }
    if (!WEIGHT) { return; }
    for (int step = lanes; step < WARP; step *= 2) {
        for (int i = 0; i < W; i++) { dweight.x[i] += __shfl_xor_sync(ALL_LANES, dweight.x[i], step); }
    }
    if (first == 0) { store_floats(parts + (size_t)blockIdx.x * C + c, dweight); }
}

// ---- launches ----

// do the channels of a row divide a warp?
static inline int rmsnorm_is_short_(int C) {
    int lanes = C / RMSNORM_OWNED;
    return C % RMSNORM_OWNED == 0 && lanes > 0 && lanes <= WARP && (lanes & (lanes - 1)) == 0;
}

// rows that a block of the ring works on at a time; 0: not in one pass
template <typename X>
static inline int rmsnorm_rows_(int C, const Device* dev) {
    return RmsnormRing_<X>::rows(C, dev);
}

// into how many parts the rows are cut: none has less than `rows`, and a multiprocessor has up to at_once
static inline int rmsnorm_parts_(int N, int rows, int at_once, const Device* dev) {
#ifdef EXACT
    (void)N, (void)rows, (void)at_once, (void)dev;
    return 1;  // a chain
#else
    int64_t most = (int64_t)dev->n_sms * at_once, needed = ceil_div(N, rows);
    return (int)(needed < most ? needed : most);
#endif
}

static inline void rmsnorm_add_parts_(float* dweight, const float* parts, int n_parts, int C, const Device* dev) {
    dim3 block(WARP, (unsigned)(n_parts < WARP ? n_parts : (int)WARP));
    rmsnorm_backward_parts_kernel<<<(unsigned)ceil_div(C, WARP), block, 0, dev->stream>>>(dweight, parts, n_parts, C);
}

static inline float* rmsnorm_parts_room_(int n_parts, int C, const Device* dev) {
    return (float*)device_workspace(dev, sizeof(float) * (size_t)C * n_parts);
}

template <int W, typename X, typename G>
static inline void rmsnorm_backward_two_passes_(X* dinp, float* dweight, const X* dout, const X* inp, const G* weight,
                                                const float* rstd, int add, int N, int C, const Device* dev) {
    if (dinp) {
        dim3 block(WARP, RMSNORM_ROWS);
        rmsnorm_backward_rows_kernel<W><<<(unsigned)ceil_div(N, RMSNORM_ROWS), block, 0, dev->stream>>>(
            dinp, dout, inp, weight, rstd, add, N, C);
    }
    if (dweight) {
        int n_parts = rmsnorm_parts_(N, WARP, 1, dev);
        // one part is dweight itself: adding it to 0 would lose the sign of -0, to which a tiny product rounds
        float* parts = n_parts > 1 ? rmsnorm_parts_room_(n_parts, C, dev) : dweight;
        dim3 channels((unsigned)ceil_div(C, WARP), (unsigned)n_parts);
        rmsnorm_backward_channels_kernel<<<channels, WARP, 0, dev->stream>>>(parts, dout, inp, rstd, N, C);
        if (n_parts > 1) { rmsnorm_add_parts_(dweight, parts, n_parts, C, dev); }
    }
}

template <int INPUT, int WEIGHT, typename X, typename G>
static inline void rmsnorm_backward_launch_(X* dinp, float* dweight, const X* dout, const X* inp, const G* weight,
                                            const float* rstd, int add, int N, int C, const Device* dev) {
    const int is_short = rmsnorm_is_short_(C), R = is_short ? WARP * RMSNORM_OWNED / C : rmsnorm_rows_<X>(C, dev);
    const int n_parts = rmsnorm_parts_(N, is_short ? R * RMSNORM_PAIR : R, is_short ? (int)RMSNORM_AT_ONCE : 1, dev);
    float* parts = WEIGHT ? rmsnorm_parts_room_(n_parts, C, dev) : NULL;
    if (is_short) {
        rmsnorm_backward_short_kernel<INPUT, WEIGHT>
            <<<n_parts, WARP, 0, dev->stream>>>(dinp, parts, dout, inp, weight, rstd, add, N, C);
    } else {
        const dim3 block((unsigned)RmsnormRing_<X>::threads(C), (unsigned)R);
        const int n_bytes = RmsnormRing_<X>::thread_bytes() * (int)(block.x * block.y);
        cudaCheck(cudaFuncSetAttribute(rmsnorm_backward_kernel<INPUT, WEIGHT, X, G>,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
        rmsnorm_backward_kernel<INPUT, WEIGHT>
            <<<n_parts, block, n_bytes, dev->stream>>>(dinp, parts, dout, inp, weight, rstd, add, N, C);
    }
    if (WEIGHT) { rmsnorm_add_parts_(dweight, parts, n_parts, C, dev); }
}

template <typename X, typename G>
static inline void rmsnorm_backward(typename MaybeNull<X>::type* dinp, float* dweight, const X* dout, const X* inp,
                                    const G* weight, const float* rstd, int add, int N, int C, const Device* dev) {
    constexpr int W = pack_width<X>();
    int packs = C % W == 0 && pack_aligned(dinp, dout, inp, weight), one_pass = packs;
#ifdef EXACT
    one_pass = 0;
#endif
    if (one_pass && (rmsnorm_is_short_(C) || rmsnorm_rows_<X>(C, dev) > 0)) {
        if (dinp && dweight) {
            rmsnorm_backward_launch_<1, 1>(dinp, dweight, dout, inp, weight, rstd, add, N, C, dev);
        } else if (dinp) {
            rmsnorm_backward_launch_<1, 0>(dinp, dweight, dout, inp, weight, rstd, add, N, C, dev);
        } else if (dweight) {
            rmsnorm_backward_launch_<0, 1>(dinp, dweight, dout, inp, weight, rstd, add, N, C, dev);
        }
    } else if (packs) {
        rmsnorm_backward_two_passes_<W>(dinp, dweight, dout, inp, weight, rstd, add, N, C, dev);
    } else {
        rmsnorm_backward_two_passes_<1>(dinp, dweight, dout, inp, weight, rstd, add, N, C, dev);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void rmsnorm_backward(typename MaybeNull<X>::type* dinp, float* dweight, const X* dout, const X* inp,
                                    decltype(nullptr), const float* rstd, int add, int N, int C, const Device* dev) {
    rmsnorm_backward(dinp, dweight, dout, inp, (const X*)NULL, rstd, add, N, C, dev);
}
#endif
#endif  // LLMC_RMSNORM_H
