/*
LayerNorm: out = (inp - mean) * rstd * weight + bias, statistics over each row of C channels, rstd = 1/sqrt(var + eps).
    inp, out (N, C)   weight, bias (C)   mean, rstd (N) float, kept for backward   eps  LAYERNORM_EPS of GPT-2
residual_layernorm_forward adds before it normalises: residual = left + right, out = layernorm(residual). residual may
be left or right.
Backward, with xhat = (inp - mean) * rstd and g = weight * dout (derived in doc/layernorm.md). NULL for any of them:
nobody asks for it, and nothing is done for it
    dinp    += (g - mean(g) - xhat * mean(g * xhat)) * rstd    (N, C)  added: inp is the residual stream
    dweight  = sum over n of xhat * dout                       (C)     written, one call is one leaf
    dbias    = sum over n of dout                              (C)     written
    dright   = sum over n of dinp as it is then stored         (C)     written, by residual_layernorm_backward: the
               gradient of a bias that `right` of the residual sum ends with. Without dinp NULL too
Cost:   memory bound. On a CPU forward moves 2*N*C floats, backward 6*N*C; on a GPU 2*N*C elements forward, 4*N*C with
        the residual sum, 4*N*C backward: every array once. Judge it in GB/s. H200, 2026-11-28, in a bench, bf16,
        N 65536, C 768, a copy has 4.2 TB/s: residual forward 0.103 ms, 3.9 TB/s; backward with dright 0.100, 4.0 TB/s,
        and 0.004 for adding the parts of 132 blocks.
Error:  chains of C sums: |mean| error <= C * 2^-24 * mean(|inp|). bf16 rounds what is stored: 2^-8 |out|, 2^-8 |dinp|;
        statistics, dweight and dbias are float.
Order:  row sums chain over c from 0; dweight, dbias and dright chain over n from 0. In C lanes hold neighbouring rows
        for the first and neighbouring channels for the second. Fast kernels: 32 lanes and a tree for a row; each thread
        sums dweight, dbias and dright over its rows, then those of a block are added in order, then blocks in a fixed
        order; their number is that of the GPU's multiprocessors.
Source: Ba, Kiros & Hinton 2016, arXiv:1607.06450; doc/layernorm.md. Slower kernels: dev/cuda/layernorm.cu
*/
#ifndef LLMC_LAYERNORM_H
#define LLMC_LAYERNORM_H
#include "../core/device.h"  // Device, device_workspace, ceil_div
#include "../core/kernel.h"  // load_floats, store_floats, row_add, row_total, MaybeNull
#include "../core/mma.h"     // in a CUDA build: cp_async_commit, cp_async_wait
#include "residual.h"        // residual_forward
#include "row_ring.h"        // in a CUDA build: RowRing, row_ring_channel, row_ring_add_threads, row_ring_add_rows
#include <math.h>
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_load, v_load_columns, v_fill
#endif

#define LAYERNORM_EPS 1e-5f  // of GPT-2

// ---- plain C: read this first; it defines every bit ----

static inline void layernorm_forward_ref(float* out, float* mean, float* rstd, const float* inp, const float* weight,
                                         const float* bias, float eps, int N, int C) {
    for (int n = 0; n < N; n++) {
        const float* x = inp + (size_t)n * C;
        float sum = 0.0f, sum2 = 0.0f;
        for (int c = 0; c < C; c++) { sum += x[c]; }
        float m = sum / (float)C;
        for (int c = 0; c < C; c++) { sum2 = madd(x[c] - m, x[c] - m, sum2); }
        float s = 1.0f / sqrtf(sum2 / (float)C + eps);
        for (int c = 0; c < C; c++) { out[(size_t)n * C + c] = s * (x[c] - m) * weight[c] + bias[c]; }
        mean[n] = m;
        rstd[n] = s;
    }
}

static inline void residual_layernorm_forward_ref(float* residual, float* out, float* mean, float* rstd,
                                                  const float* left, const float* right, const float* weight,
                                                  const float* bias, float eps, int N, int C) {
    residual_forward_ref(residual, left, right, (size_t)N * C);
    layernorm_forward_ref(out, mean, rstd, residual, weight, bias, eps, N, C);
}

// dinp of one row
static inline void layernorm_backward_row_ref(float* dinp, const float* dout, const float* inp, const float* weight,
                                              float mean, float rstd, int C) {
    float sum_g = 0.0f, sum_gx = 0.0f;
    for (int c = 0; c < C; c++) { sum_g += weight[c] * dout[c]; }
    for (int c = 0; c < C; c++) { sum_gx = madd(weight[c] * dout[c], (inp[c] - mean) * rstd, sum_gx); }
    float mean_g = sum_g / (float)C, mean_gx = sum_gx / (float)C;
    for (int c = 0; c < C; c++) { dinp[c] += (weight[c] * dout[c] - mean_g - (inp[c] - mean) * rstd * mean_gx) * rstd; }
}

static inline void residual_layernorm_backward_ref(float* dinp, float* dweight, float* dbias, float* dright,
                                                   const float* dout, const float* inp, const float* weight,
                                                   const float* mean, const float* rstd, int N, int C) {
    for (size_t n = 0; dinp && n < (size_t)N; n++) {
        layernorm_backward_row_ref(dinp + n * C, dout + n * C, inp + n * C, weight, mean[n], rstd[n], C);
    }
    for (int c = 0; dweight && c < C; c++) {
        dweight[c] = 0.0f;
        for (size_t n = 0; n < (size_t)N; n++) {
            dweight[c] = madd((inp[n * C + c] - mean[n]) * rstd[n], dout[n * C + c], dweight[c]);
        }
    }
    for (int c = 0; dbias && c < C; c++) {
        dbias[c] = 0.0f;
        for (size_t n = 0; n < (size_t)N; n++) { dbias[c] += dout[n * C + c]; }
    }
    for (int c = 0; dright && c < C; c++) {
        dright[c] = 0.0f;
        for (size_t n = 0; n < (size_t)N; n++) { dright[c] += dinp[n * C + c]; }
    }
}

static inline void layernorm_backward_ref(float* dinp, float* dweight, float* dbias, const float* dout,
                                          const float* inp, const float* weight, const float* mean, const float* rstd,
                                          int N, int C) {
    residual_layernorm_backward_ref(dinp, dweight, dbias, NULL, dout, inp, weight, mean, rstd, N, C);
}

#ifndef __CUDACC__  // ---- fast C: VLANES rows side by side ----

// VLANES values of one channel, one per row; beyond the last whole square they are gathered one by one
static inline vfloat layernorm_column_(const float* x, int C, int c) {
    vfloat column;
    for (int r = 0; r < VLANES; r++) { column[r] = x[(size_t)r * C + c]; }
    return column;
}

// mean and rstd of VLANES rows
static inline void layernorm_statistics_(float* mean, float* rstd, const float* x, float eps, int C) {
    vfloat sum = v_fill(0.0f), sum2 = v_fill(0.0f), columns[VLANES];
    int c_squares = C / VLANES * VLANES;
    for (int c = 0; c < c_squares; c += VLANES) {
        v_load_columns(columns, x + c, (size_t)C);
        for (int i = 0; i < VLANES; i++) { sum += columns[i]; }
    }
    for (int c = c_squares; c < C; c++) { sum += layernorm_column_(x, C, c); }
    vfloat m = sum / v_fill((float)C);
    for (int c = 0; c < c_squares; c += VLANES) {
        v_load_columns(columns, x + c, (size_t)C);
        for (int i = 0; i < VLANES; i++) { sum2 = v_madd(columns[i] - m, columns[i] - m, sum2); }
    }
    for (int c = c_squares; c < C; c++) {
        vfloat column = layernorm_column_(x, C, c);
        sum2 = v_madd(column - m, column - m, sum2);
    }
    for (int r = 0; r < VLANES; r++) {
        mean[r] = m[r];
        rstd[r] = 1.0f / sqrtf(sum2[r] / (float)C + eps);
    }
}

static inline void layernorm_forward(float* out, float* mean, float* rstd, const float* inp, const float* weight,
                                     const float* bias, float eps, int N, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const float* x = inp + (size_t)first * C;
        float* y = out + (size_t)first * C;
        if (first + VLANES > N) {
            layernorm_forward_ref(y, mean + first, rstd + first, x, weight, bias, eps, N - first, C);
            continue;
        }
        layernorm_statistics_(mean + first, rstd + first, x, eps, C);
        for (int n = first; n < first + VLANES; n++, x += C, y += C) {
            float m = mean[n], s = rstd[n];
            #pragma omp simd
            for (int c = 0; c < C; c++) { y[c] = s * (x[c] - m) * weight[c] + bias[c]; }
        }
    }
}

static inline void residual_layernorm_forward(float* residual, float* out, float* mean, float* rstd, const float* left,
                                              const float* right, const float* weight, const float* bias, float eps,
                                              int N, int C, const Device* dev) {
    residual_forward(residual, left, right, (size_t)N * C, dev);
    layernorm_forward(out, mean, rstd, residual, weight, bias, eps, N, C, dev);
}

// mean of g and of g * xhat for VLANES rows
static inline void layernorm_gradient_means_(float* mean_g, float* mean_gx, const float* d, const float* x,
                                             const float* weight, const float* mean, const float* rstd, int C) {
    vfloat m = v_load(mean), s = v_load(rstd), sum_g = v_fill(0.0f), sum_gx = v_fill(0.0f);
    vfloat x_columns[VLANES], d_columns[VLANES];
    int c_squares = C / VLANES * VLANES;
    for (int c = 0; c < c_squares; c += VLANES) {
        v_load_columns(x_columns, x + c, (size_t)C);
        v_load_columns(d_columns, d + c, (size_t)C);
        for (int i = 0; i < VLANES; i++) {
            vfloat g = v_fill(weight[c + i]) * d_columns[i];
            sum_g += g;
            sum_gx = v_madd(g, (x_columns[i] - m) * s, sum_gx);
        }
    }
    for (int c = c_squares; c < C; c++) {
        vfloat g = v_fill(weight[c]) * layernorm_column_(d, C, c);
        sum_g += g;
        sum_gx = v_madd(g, (layernorm_column_(x, C, c) - m) * s, sum_gx);
    }
    v_store(mean_g, sum_g / v_fill((float)C));
    v_store(mean_gx, sum_gx / v_fill((float)C));
}

// dinp of VLANES rows
static inline void layernorm_backward_rows_(float* dinp, const float* dout, const float* inp, const float* weight,
                                            const float* mean, const float* rstd, int C) {
    float mean_g[VLANES], mean_gx[VLANES];
    layernorm_gradient_means_(mean_g, mean_gx, dout, inp, weight, mean, rstd, C);
    for (int r = 0; r < VLANES; r++, dinp += C, dout += C, inp += C) {
        float m = mean[r], s = rstd[r], mg = mean_g[r], mgx = mean_gx[r];
        #pragma omp simd
        for (int c = 0; c < C; c++) { dinp[c] += (weight[c] * dout[c] - mg - (inp[c] - m) * s * mgx) * s; }
    }
}

// dweight and dbias of the channels first..last-1, rows ascending
static inline void layernorm_backward_channels_(float* dweight, float* dbias, const float* dout, const float* inp,
                                                const float* mean, const float* rstd, int N, int C, int first,
                                                int last) {
    for (int c = first; dweight && c < last; c++) { dweight[c] = 0.0f; }
    for (int c = first; dbias && c < last; c++) { dbias[c] = 0.0f; }
    for (int n = 0; n < N; n++) {
        const float* d = dout + (size_t)n * C;
        if (dweight) {
            const float* x = inp + (size_t)n * C;
            float m = mean[n], s = rstd[n];
            #pragma omp simd
            for (int c = first; c < last; c++) { dweight[c] = madd((x[c] - m) * s, d[c], dweight[c]); }
        }
        if (dbias) {
            #pragma omp simd
            for (int c = first; c < last; c++) { dbias[c] += d[c]; }
        }
    }
}

// dweight and dbias, channels over threads
static inline void layernorm_backward_parameters_(float* dweight, float* dbias, const float* dout, const float* inp,
                                                  const float* mean, const float* rstd, int N, int C) {
    const int width = 128;
    #pragma omp parallel for
    for (int first = 0; first < C; first += width) {
        layernorm_backward_channels_(dweight, dbias, dout, inp, mean, rstd, N, C, first,
                                     first + width < C ? first + width : C);
    }
}

// dinp, rows over threads
static inline void layernorm_backward_input_(float* dinp, const float* dout, const float* inp, const float* weight,
                                             const float* mean, const float* rstd, int N, int C) {
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        size_t row = (size_t)first * C;
        if (first + VLANES <= N) {
            layernorm_backward_rows_(dinp + row, dout + row, inp + row, weight, mean + first, rstd + first, C);
            continue;
        }
        for (int n = first; n < N; n++, row += C) {
            layernorm_backward_row_ref(dinp + row, dout + row, inp + row, weight, mean[n], rstd[n], C);
        }
    }
}

static inline void residual_layernorm_backward(float* dinp, float* dweight, float* dbias, float* dright,
                                               const float* dout, const float* inp, const float* weight,
                                               const float* mean, const float* rstd, int N, int C, const Device* dev) {
    (void)dev;
    if (dweight || dbias) { layernorm_backward_parameters_(dweight, dbias, dout, inp, mean, rstd, N, C); }
    if (dinp) { layernorm_backward_input_(dinp, dout, inp, weight, mean, rstd, N, C); }
    if (dright) { layernorm_backward_parameters_(NULL, dright, dinp, inp, mean, rstd, N, C); }
}

static inline void layernorm_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                                      const float* weight, const float* mean, const float* rstd, int N, int C,
                                      const Device* dev) {
    residual_layernorm_backward(dinp, dweight, dbias, NULL, dout, inp, weight, mean, rstd, N, C, dev);
}
#else  // ---- CUDA forward: one warp per row ----

enum { LAYERNORM_ROWS = 8 };           // rows of a block: blocks are (32, 8)
enum { LAYERNORM_SHARED = 48 << 10 };  // bytes of shared memory that a block may have without asking

// the sum over a row of x, or of (x - m)^2; a lane has the packs at c = lane * W, + 32 * W, ...
template <int W, int SQUARES, typename X>
__device__ inline float layernorm_sum_(const X* row, float m, int C) {
    int lane = threadIdx.x * W;
    float sum = 0.0f;
    for (int c = lane; c - lane < C; c += WARP * W) {
        Pack<float, W> x = {};
        if (c < C) {
            x = load_floats<W>(row + c);
            for (int i = 0; SQUARES && i < W; i++) { x.x[i] -= m; }
        }
        sum = SQUARES ? row_madd(x.x, x.x, sum) : row_add(sum, x.x);
    }
    return row_total(sum);
}

// With packs the row comes from memory once: each lane keeps its own packs in shared memory, and since no other lane
// looks at them, nobody waits. ADD: the row is left + right, rounded to X
template <int W, int ADD, typename X>
__global__ void layernorm_forward_kernel(X* residual, X* out, float* mean, float* rstd, const X* left, const X* right,
                                         const X* weight, const X* bias, float eps, int N, int C) {
    extern __shared__ float4 layernorm_kept[];
    int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x * W;
    if (n >= N) { return; }  // a warp shares threadIdx.y, so it leaves whole and shuffles stay legal
    size_t start = (size_t)n * C;
    X* kept = reinterpret_cast<X*>(layernorm_kept) + (size_t)threadIdx.y * C;
    const X* row = W > 1 ? kept : ADD ? residual + start : left + start;
    #pragma unroll 2
    for (int c = lane; c < C; c += WARP * W) {
        Pack<X, W> x = pack_load<W>(left + start + c);
        if (ADD) {
            Pack<X, W> added = pack_load<W>(right + start + c);
            for (int i = 0; i < W; i++) { x.x[i] = from_float<X>(to_float(x.x[i]) + to_float(added.x[i])); }
            pack_store(residual + start + c, x);
        }
        if (W > 1) { pack_store(kept + c, x); }
    }
    float m = layernorm_sum_<W, 0>(row, 0.0f, C) / (float)C;
    float s = 1.0f / sqrtf(layernorm_sum_<W, 1>(row, m, C) / (float)C + eps);
    for (int c = lane; c < C; c += WARP * W) {
        Pack<float, W> x = load_floats<W>(row + c), w = load_floats<W>(weight + c), b = load_floats<W>(bias + c);
        for (int i = 0; i < W; i++) { x.x[i] = s * (x.x[i] - m) * w.x[i] + b.x[i]; }
        store_floats(out + start + c, x);
    }
    if (threadIdx.x == 0) {
        mean[n] = m;
        rstd[n] = s;
    }
}

// ADD 0: residual and right are not used
template <int ADD, typename X>
static inline void layernorm_forward_launch_(X* residual, X* out, float* mean, float* rstd, const X* left,
                                             const X* right, const X* weight, const X* bias, float eps, int N, int C,
                                             const Device* dev) {
    constexpr int W = pack_width<X>();
    int row_bytes = C * (int)sizeof(X), rows = row_bytes > 0 ? LAYERNORM_SHARED / row_bytes : 0;
    rows = rows < LAYERNORM_ROWS ? rows : LAYERNORM_ROWS;
    if (rows > 0 && C % W == 0 && pack_aligned(residual, out, left, right, weight, bias)) {
        dim3 block(WARP, (unsigned)rows);
        layernorm_forward_kernel<W, ADD><<<(unsigned)ceil_div(N, rows), block, (size_t)rows * row_bytes, dev->stream>>>(
            residual, out, mean, rstd, left, right, weight, bias, eps, N, C);
    } else {
        dim3 block(WARP, LAYERNORM_ROWS);
        layernorm_forward_kernel<1, ADD><<<(unsigned)ceil_div(N, LAYERNORM_ROWS), block, 0, dev->stream>>>(
            residual, out, mean, rstd, left, right, weight, bias, eps, N, C);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void layernorm_forward(X* out, float* mean, float* rstd, const X* inp, const X* weight, const X* bias,
                                     float eps, int N, int C, const Device* dev) {
    layernorm_forward_launch_<0>((X*)NULL, out, mean, rstd, inp, (const X*)NULL, weight, bias, eps, N, C, dev);
}

template <typename X>
static inline void residual_layernorm_forward(X* residual, X* out, float* mean, float* rstd, const X* left,
                                              const X* right, const X* weight, const X* bias, float eps, int N, int C,
                                              const Device* dev) {
    layernorm_forward_launch_<1>(residual, out, mean, rstd, left, right, weight, bias, eps, N, C, dev);
}

// ---- CUDA backward in two kernels that each build can run: dinp by rows, dweight and dbias by channels ----

// one warp per row
template <int W, typename X>
__global__ void layernorm_backward_rows_kernel(X* dinp, const X* dout, const X* inp, const X* weight, const float* mean,
                                               const float* rstd, int N, int C) {
    int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x * W;
    if (n >= N) { return; }
    size_t start = (size_t)n * C;
    float m = mean[n], s = rstd[n], sum_g = 0.0f, sum_gx = 0.0f;
    for (int c = lane; c - lane < C; c += WARP * W) {
        Pack<float, W> g, xhat = {};
        for (int i = 0; i < W; i++) { g.x[i] = -0.0f; }  // beyond the row: -0 * 0 leaves every sum as it is, also -0
        if (c < C) {
            Pack<float, W> x = load_floats<W>(inp + start + c), d = load_floats<W>(dout + start + c);
            Pack<float, W> w = load_floats<W>(weight + c);
            for (int i = 0; i < W; i++) {
                g.x[i] = w.x[i] * d.x[i];
                xhat.x[i] = (x.x[i] - m) * s;
            }
        }
        sum_g = row_add(sum_g, g.x);
        sum_gx = row_madd(g.x, xhat.x, sum_gx);
    }
    float mean_g = row_total(sum_g) / (float)C, mean_gx = row_total(sum_gx) / (float)C;
    for (int c = lane; c < C; c += WARP * W) {
        Pack<float, W> x = load_floats<W>(inp + start + c), d = load_floats<W>(dout + start + c);
        Pack<float, W> w = load_floats<W>(weight + c), y = load_floats<W>(dinp + start + c);
        for (int i = 0; i < W; i++) { y.x[i] += (w.x[i] * d.x[i] - mean_g - (x.x[i] - m) * s * mean_gx) * s; }
        store_floats(dinp + start + c, y);
    }
}

// parts (gridDim.y, 2, C): dweight and dbias, those that are asked for, of the rows N * b / gridDim.y .. of part b =
// blockIdx.y. One thread per channel. dright: as dbias, of dinp
template <typename X>
__global__ void layernorm_backward_channels_kernel(float* parts, int with_weight, int with_bias, const X* dout,
                                                   const X* inp, const float* mean, const float* rstd, int N, int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x, b = blockIdx.y;
    if (c >= C) { return; }
    int first = (int)((int64_t)N * b / gridDim.y), last = (int)((int64_t)N * (b + 1) / gridDim.y);
    float dweight = 0.0f, dbias = 0.0f;
    #pragma unroll 8
    for (int n = first; n < last; n++) {
        float d = to_float(dout[(size_t)n * C + c]);
        if (with_weight) { dweight = madd((to_float(inp[(size_t)n * C + c]) - mean[n]) * rstd[n], d, dweight); }
        if (with_bias) { dbias += d; }
    }
    if (with_weight) { parts[(size_t)b * 2 * C + c] = dweight; }
    if (with_bias) { parts[(size_t)b * 2 * C + C + c] = dbias; }
}

// what a part has of each channel; dright only in one pass
enum { LAYERNORM_DWEIGHT, LAYERNORM_DBIAS, LAYERNORM_DRIGHT };

// dweight, dbias and dright, any may be NULL, are the sums over b of parts (n_parts, n_kinds, C). A block (32, rows)
// has 32 columns of the n_kinds*C: row y of its threads, of which there are n_parts at most, adds the parts y, y +
// rows, ..., then the first row adds these sums. One part comes through as it is, also -0
__global__ static void layernorm_backward_parts_kernel(float* dweight, float* dbias, float* dright, const float* parts,
                                                       int n_parts, int n_kinds, int C) {
    __shared__ float sums[WARP][WARP];
    int j = blockIdx.x * WARP + threadIdx.x, kind = j / C;
    size_t part = (size_t)n_kinds * C;
    float* to = kind >= n_kinds ? NULL : kind == LAYERNORM_DWEIGHT ? dweight : kind == LAYERNORM_DBIAS ? dbias : dright;
    float sum = to ? parts[threadIdx.y * part + j] : 0.0f;
    #pragma unroll 8
    for (int b = threadIdx.y + blockDim.y; b < n_parts; b += blockDim.y) { sum += to ? parts[b * part + j] : 0.0f; }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || !to) { return; }
    for (int y = 1; y < (int)blockDim.y; y++) { sum += sums[y][threadIdx.x]; }
    to[j - kind * C] = sum;
}

// ---- CUDA backward in one pass, fast builds: a thread stays on its channels while its block walks down the rows ----
// Two rows of each thread are on their way to shared memory while it works on the one before them (row_ring.h): 74 KB
// of a multiprocessor. Where a row has one warp, as up to C = 768, there is no barrier at all.

enum { LAYERNORM_PACKS = 3 };  // of 8 channels, of a thread

// what a thread has of one row: inp, dout and dinp
enum { LAYERNORM_INP, LAYERNORM_DOUT, LAYERNORM_DINP, LAYERNORM_ARRAYS };

template <typename X>
using LayernormRing_ = RowRing<LAYERNORM_PACKS, LAYERNORM_ARRAYS, X>;

// Block (T, R) number b takes the rows b * R, ..., then those gridDim.x * R further, and leaves its sums over them in
// parts (blocks, 2 + RIGHT, C). T is a multiple of WARP. C is a multiple of 8, at most 24 T. INPUT: dinp is asked for;
// PARAMETERS: dweight, dbias or both, which have every load in common, so that one alone costs what both cost; RIGHT:
// dright, with both others
template <int INPUT, int PARAMETERS, int RIGHT, typename X>
__global__ void __launch_bounds__(ROW_RING_THREADS, 1)
layernorm_backward_kernel(X* dinp, float* parts, const X* dout, const X* inp, const X* weight, const float* mean,
                          const float* rstd, int N, int C) {
    const int W = ROW_RING_W, K = LAYERNORM_PACKS, STAGES = ROW_RING_STAGES, KINDS = 2 + RIGHT;
    __shared__ RowRingSums<2> of_warps[2];
    const int threads = blockDim.x * blockDim.y, step = gridDim.x * blockDim.y;
    const float per_channel = 1.0f / (float)C;
    float sums[KINDS][K][W] = {};
    Pack<X, W> w[K] = {};
    for (int k = 0; INPUT && k < K; k++) {
        if (row_ring_channel(k) < C) { w[k] = pack_load<W>(weight + row_ring_channel(k)); }
    }
    auto fetch = [&](int stage, int n) {
        LayernormRing_<X>::fetch(stage, LAYERNORM_INP, inp, n, N, C);
        LayernormRing_<X>::fetch(stage, LAYERNORM_DOUT, dout, n, N, C);
        if (INPUT) { LayernormRing_<X>::fetch(stage, LAYERNORM_DINP, dinp, n, N, C); }
        cp_async_commit();
    };
    int first = blockIdx.x * blockDim.y, n = first + threadIdx.y, stage = 0;
    for (int i = 0; i < STAGES - 1; i++) { fetch(i, n + i * step); }
    float m = n < N ? mean[n] : 0.0f, s = n < N ? rstd[n] : 0.0f;
    for (int turn = 0; first < N; first += step, n += step, turn ^= 1) {
        fetch((stage + STAGES - 1) % STAGES, n + (STAGES - 1) * step);
        const float next_m = n + step < N ? mean[n + step] : 0.0f, next_s = n + step < N ? rstd[n + step] : 0.0f;
        const Pack<X, W>* x_kept = LayernormRing_<X>::kept(stage, LAYERNORM_INP);
        const Pack<X, W>* d_kept = LayernormRing_<X>::kept(stage, LAYERNORM_DOUT);
        const Pack<X, W>* y_kept = LayernormRing_<X>::kept(stage, LAYERNORM_DINP);
        Pack<float, 2> row_sums = {};  // of g and of g * xhat
        cp_async_wait<STAGES - 1>();
        for (int k = 0; k < K; k++) {
            const Pack<float, W> x = load_floats<W>(x_kept[k * threads].x), d = load_floats<W>(d_kept[k * threads].x);
            for (int i = 0; i < W; i++) {
                const float xhat = (x.x[i] - m) * s, g = to_float(w[k].x[i]) * d.x[i];
                if (PARAMETERS) {
                    sums[LAYERNORM_DWEIGHT][k][i] = madd(xhat, d.x[i], sums[LAYERNORM_DWEIGHT][k][i]);
                    sums[LAYERNORM_DBIAS][k][i] += d.x[i];
                }
                row_sums.x[0] += g;
                row_sums.x[1] = madd(g, xhat, row_sums.x[1]);
            }
        }
        if (INPUT) { row_ring_add_threads(row_sums, of_warps[turn]); }
        const float mean_g = row_sums.x[0] * per_channel, mean_gx = row_sums.x[1] * per_channel;
        for (int k = 0; INPUT && k < K; k++) {
            const Pack<float, W> x = load_floats<W>(x_kept[k * threads].x), d = load_floats<W>(d_kept[k * threads].x);
            const Pack<float, W> y = load_floats<W>(y_kept[k * threads].x);
            const int c = row_ring_channel(k);
            Pack<X, W> out;
            for (int i = 0; i < W; i++) {
                const float g = to_float(w[k].x[i]) * d.x[i], xhat = (x.x[i] - m) * s;
                out.x[i] = from_float<X>(y.x[i] + (g - mean_g - xhat * mean_gx) * s);
                if (RIGHT) { sums[KINDS - 1][k][i] += to_float(out.x[i]); }
            }
            if (n < N && c < C) { pack_store(dinp + (size_t)n * C + c, out); }
        }
        m = next_m, s = next_s, stage = (stage + 1) % STAGES;
    }
    cp_async_wait<0>();
    if (PARAMETERS) { row_ring_add_rows(parts + (size_t)blockIdx.x * KINDS * C, sums, C); }
}

// rows that a block works on at a time; 0: not in one pass
template <typename X>
static inline int layernorm_rows_(int C, const Device* dev) {
    return LayernormRing_<X>::rows(C, dev);
}

// into how many parts the rows are cut for dweight and dbias alone
static inline int layernorm_parts_(int N, const Device* dev) {
#ifdef EXACT
    (void)N, (void)dev;
    return 1;  // a chain
#else
    return (int)(ceil_div(N, WARP) < dev->n_sms ? ceil_div(N, WARP) : dev->n_sms);
#endif
}

static inline void layernorm_add_parts_(float* dweight, float* dbias, float* dright, const float* parts, int n_parts,
                                        int n_kinds, int C, const Device* dev) {
    dim3 block(WARP, (unsigned)(n_parts < WARP ? n_parts : (int)WARP));
    layernorm_backward_parts_kernel<<<(unsigned)ceil_div(n_kinds * C, WARP), block, 0, dev->stream>>>(
        dweight, dbias, dright, parts, n_parts, n_kinds, C);
}

// dweight of xhat and dout, dbias of dout alone
template <typename X>
static inline void layernorm_backward_columns_(float* dweight, float* dbias, const X* dout, const X* inp,
                                               const float* mean, const float* rstd, int N, int C, const Device* dev) {
    int n_parts = layernorm_parts_(N, dev);
    float* parts = device_workspace(dev, sizeof(float) * 2 * (size_t)C * n_parts);
    dim3 channels((unsigned)ceil_div(C, WARP), (unsigned)n_parts);
    layernorm_backward_channels_kernel<<<channels, WARP, 0, dev->stream>>>(parts, dweight != NULL, dbias != NULL, dout,
                                                                           inp, mean, rstd, N, C);
    layernorm_add_parts_(dweight, dbias, NULL, parts, n_parts, 2, C, dev);
}

template <int W, typename X>
static inline void layernorm_backward_two_passes_(X* dinp, float* dweight, float* dbias, float* dright, const X* dout,
                                                  const X* inp, const X* weight, const float* mean, const float* rstd,
                                                  int N, int C, const Device* dev) {
    if (dinp) {
        dim3 block(WARP, LAYERNORM_ROWS);
        layernorm_backward_rows_kernel<W><<<(unsigned)ceil_div(N, LAYERNORM_ROWS), block, 0, dev->stream>>>(
            dinp, dout, inp, weight, mean, rstd, N, C);
    }
    if (dweight || dbias) { layernorm_backward_columns_(dweight, dbias, dout, inp, mean, rstd, N, C, dev); }
    if (dright) { layernorm_backward_columns_(NULL, dright, (const X*)dinp, inp, mean, rstd, N, C, dev); }
}

template <int INPUT, int PARAMETERS, int RIGHT, typename X>
static inline void layernorm_backward_launch_(X* dinp, float* parts, const X* dout, const X* inp, const X* weight,
                                              const float* mean, const float* rstd, int N, int C, int n_blocks,
                                              const Device* dev) {
    const dim3 block((unsigned)LayernormRing_<X>::threads(C), (unsigned)layernorm_rows_<X>(C, dev));
    const int n_bytes = LayernormRing_<X>::thread_bytes() * (int)(block.x * block.y);
    cudaCheck(cudaFuncSetAttribute(layernorm_backward_kernel<INPUT, PARAMETERS, RIGHT, X>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    layernorm_backward_kernel<INPUT, PARAMETERS, RIGHT>
        <<<n_blocks, block, n_bytes, dev->stream>>>(dinp, parts, dout, inp, weight, mean, rstd, N, C);
}

template <typename X>
static inline void layernorm_backward_one_pass_(X* dinp, float* dweight, float* dbias, float* dright, const X* dout,
                                                const X* inp, const X* weight, const float* mean, const float* rstd,
                                                int N, int C, const Device* dev) {
    int64_t needed = ceil_div(N, layernorm_rows_<X>(C, dev));
    int n_blocks = (int)(needed < dev->n_sms ? needed : dev->n_sms), n_kinds = dright ? 3 : 2;
    int sums = dweight || dbias || dright;
    float* parts = sums ? (float*)device_workspace(dev, sizeof(float) * n_kinds * (size_t)C * n_blocks) : NULL;
    if (dright) {
        layernorm_backward_launch_<1, 1, 1>(dinp, parts, dout, inp, weight, mean, rstd, N, C, n_blocks, dev);
    } else if (dinp && sums) {
        layernorm_backward_launch_<1, 1, 0>(dinp, parts, dout, inp, weight, mean, rstd, N, C, n_blocks, dev);
    } else if (dinp) {
        layernorm_backward_launch_<1, 0, 0>(dinp, parts, dout, inp, weight, mean, rstd, N, C, n_blocks, dev);
    } else if (sums) {
        layernorm_backward_launch_<0, 1, 0>(dinp, parts, dout, inp, weight, mean, rstd, N, C, n_blocks, dev);
    }
    if (sums) { layernorm_add_parts_(dweight, dbias, dright, parts, n_blocks, n_kinds, C, dev); }
}

template <typename X>
static inline void residual_layernorm_backward(typename MaybeNull<X>::type* dinp, float* dweight, float* dbias,
                                               float* dright, const X* dout, const X* inp, const X* weight,
                                               const float* mean, const float* rstd, int N, int C, const Device* dev) {
    constexpr int W = pack_width<X>();
    int packs = C % W == 0 && pack_aligned(dinp, dout, inp, weight), one_pass = packs;
#ifdef EXACT
    one_pass = 0;
#endif
    if (one_pass && layernorm_rows_<X>(C, dev) > 0) {
        layernorm_backward_one_pass_(dinp, dweight, dbias, dright, dout, inp, weight, mean, rstd, N, C, dev);
    } else if (packs) {
        layernorm_backward_two_passes_<W>(dinp, dweight, dbias, dright, dout, inp, weight, mean, rstd, N, C, dev);
    } else {
        layernorm_backward_two_passes_<1>(dinp, dweight, dbias, dright, dout, inp, weight, mean, rstd, N, C, dev);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void layernorm_backward(typename MaybeNull<X>::type* dinp, float* dweight, float* dbias, const X* dout,
                                      const X* inp, const X* weight, const float* mean, const float* rstd, int N, int C,
                                      const Device* dev) {
    residual_layernorm_backward(dinp, dweight, dbias, NULL, dout, inp, weight, mean, rstd, N, C, dev);
}
#endif
#endif  // LLMC_LAYERNORM_H
