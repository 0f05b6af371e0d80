/*
hyper_connections.h on a GPU. X float or bf16; EXACT builds have the plain loops' bits, in fast ones lanes keep sums of
their own and add them along a tree.
    forward    products: 8 positions a block, a warp has 3 rows of fn at a time; what follows from z: a warp a position,
               Sinkhorn in shared memory; y: a pack a thread
    expand     a pack of all streams a thread; backward a warp a position, which walks over its channels
    backward   da: a block a position, a warp for each X_j . dy, then one for Sinkhorn upside down; dX: 8 positions a
               block, a thread has a pack of channels; dfn: a thread has a channel and 24 rows, over a part of the
               positions in fast builds; parts are added ascending
Cost:  elements moved, for each of N D: forward and expand 2 hc + 1, expand's backward 3 hc + 2, backward 5 hc + 2.
       One pass over X would do forward with hc + 1. fn, float, comes from the cache for each block. No tensor cores:
       forward 2 (M + 1) flops for each number of X. By ptxas of CUDA 13.0 for sm_90 at most 128 registers, no spills.
       Not measured on a GPU yet.
*/
#ifndef LLMC_HYPER_KERNELS_H
#define LLMC_HYPER_KERNELS_H
#ifdef __CUDACC__
#include "../core/device.h"  // Device, device_workspace, ceil_div
#include "../core/kernel.h"  // load_floats, store_floats, row_madd, row_total, grid_first, grid_step, grid_blocks
#include "hyper_shape.h"     // HyperShape, hyper_numbers, hyper_part_, hyper_at_
#include "silu.h"            // sigmoid_one
#include <assert.h>

enum {
    HYPER_POSITIONS = 8,  // of a block
    HYPER_WARPS = 8,      // of a block of products, as many: each has the squares of one
    HYPER_OUTPUTS = 3,    // rows of fn of a warp at a time
    HYPER_MIX_WARPS = 4,  // positions of a block
    HYPER_DX_THREADS = 128,
    HYPER_DFN_THREADS = 128,
    HYPER_DFN_ROWS = 24,       // of a thread
    HYPER_DFN_POSITIONS = 32,  // whose factors are in shared memory at a time
    HYPER_BASE_WARPS = 3       // HYPER_MOST numbers; then a warp for each scale
};
static_assert(HYPER_BASE_WARPS * 32 >= HYPER_MOST, "a thread has a number");

// ---- forward ----

// Beyond a row one factor is -0, the other 0: that changes no sum. z, r of a block's positions; block is
// (WARP, HYPER_WARPS)
template <int W, typename X>
__global__ void __launch_bounds__(WARP * HYPER_WARPS)
hyper_products_kernel(float* z, float* r, const X* x, const float* fn, float eps, int N, int M, int n) {
    __shared__ float r_of[HYPER_POSITIONS];
    const int lane = threadIdx.x * W, warp = threadIdx.y, first = blockIdx.x * HYPER_POSITIONS;
    for (int m = warp * HYPER_OUTPUTS; m == warp * HYPER_OUTPUTS || m < M; m += HYPER_WARPS * HYPER_OUTPUTS) {
        float sum[HYPER_OUTPUTS][HYPER_POSITIONS] = {}, squares = 0.0f;
        for (int c = lane; c - lane < n; c += WARP * W) {
            Pack<float, W> w[HYPER_OUTPUTS];
            for (int o = 0; o < HYPER_OUTPUTS; o++) {
                for (int i = 0; i < W; i++) { w[o].x[i] = -0.0f; }
                if (c < n && m + o < M) { w[o] = load_floats<W>(fn + (size_t)(m + o) * n + c); }
            }
            for (int p = 0; p < HYPER_POSITIONS; p++) {
                Pack<float, W> u = {};
                if (c < n && first + p < N) { u = load_floats<W>(x + (size_t)(first + p) * n + c); }
                if (p == warp) { squares = row_madd(u.x, u.x, squares); }
                for (int o = 0; o < HYPER_OUTPUTS; o++) { sum[o][p] = row_madd(u.x, w[o].x, sum[o][p]); }
            }
        }
        if (m == warp * HYPER_OUTPUTS) {  // the first turn, which all warps have
            const float inverse = 1.0f / sqrtf(row_total(squares) / (float)n + eps);
            if (threadIdx.x == 0) { r_of[warp] = inverse; }
            if (threadIdx.x == 0 && first + warp < N) { r[first + warp] = inverse; }
            __syncthreads();
        }
        for (int o = 0; o < HYPER_OUTPUTS; o++) {
            for (int p = 0; p < HYPER_POSITIONS; p++) {
                const float total = row_total(sum[o][p]);
                if (threadIdx.x > 0 || m + o >= M || first + p >= N) { continue; }
                z[(size_t)(first + p) * M + m + o] = r_of[p] * total;
            }
        }
    }
}

// element e of the softmax of A's rows
__device__ inline float hyper_softmax_(const float* A, int e, int hc) {
    const float* row = A + e / hc * hc;
    float largest = row[0], sum = 0.0f;
    for (int k = 1; k < hc; k++) { largest = row[k] > largest ? row[k] : largest; }
    for (int k = 0; k < hc; k++) { sum += fm_exp(row[k] - largest); }
    return fm_exp(A[e] - largest) / sum;
}

// what a step divides element e by
__device__ inline float hyper_divisor_(const float* P, int e, int by_row, int hc, float eps) {
    float sum = 0.0f;
    for (int k = 0; k < hc; k++) { sum += P[hyper_at_(by_row, by_row ? e / hc : e % hc, k, hc)]; }
    return sum + eps;
}

// next = P after one step, by the lanes of a warp
__device__ inline void hyper_step_(float* next, const float* P, int by_row, int hc, float eps) {
    for (int e = threadIdx.x; e < hc * hc; e += WARP) { next[e] = P[e] / hyper_divisor_(P, e, by_row, hc, eps); }
    __syncwarp();
}

// pre or, with comb, pre, post and comb of the position of this warp. Block is (WARP, HYPER_MIX_WARPS)
__global__ static void hyper_mix_kernel(float* pre, float* post, float* comb, const float* z, const float* base,
                                        const float* scale, int N, int M, int hc, int iters, float eps) {
    __shared__ float both[HYPER_MIX_WARPS][2 * HYPER_SQUARE];
    const size_t t = (size_t)blockIdx.x * HYPER_MIX_WARPS + threadIdx.y;
    if (t >= (size_t)N) { return; }  // a warp shares threadIdx.y
    float *P = both[threadIdx.y], *next = P + HYPER_SQUARE;
    for (int m = threadIdx.x; m < M; m += WARP) {
        const float a = z[t * M + m] * scale[hyper_part_(m, hc)] + base[m];
        if (m < hc) {
            pre[t * hc + m] = sigmoid_one(a) + eps;
        } else if (m < 2 * hc) {
            post[t * hc + m - hc] = 2.0f * sigmoid_one(a);
        } else {
            next[m - 2 * hc] = a;
        }
    }
    if (!comb) { return; }
    __syncwarp();
    for (int e = threadIdx.x; e < hc * hc; e += WARP) { P[e] = hyper_softmax_(next, e, hc) + eps; }
    __syncwarp();
    for (int step = 0; step < 2 * iters - 1; step++) {
        hyper_step_(next, P, step % 2, hc, eps);
        float* old = P;
        P = next, next = old;
    }
    for (int e = threadIdx.x; e < hc * hc; e += WARP) { comb[t * hc * hc + e] = P[e]; }
}

// n: N * D
template <int W, typename X>
__global__ void hyper_collapse_kernel(X* y, const X* x, const float* pre, size_t n, int hc, int D) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        const size_t t = i / D, d = i % D;
        Pack<float, W> sum = {};
        for (int j = 0; j < hc; j++) {
            const Pack<float, W> x_j = load_floats<W>(x + (t * hc + j) * D + d);
            const float factor = pre[t * hc + j];
            for (int k = 0; k < W; k++) { sum.x[k] = madd(factor, x_j.x[k], sum.x[k]); }
        }
        store_floats(y + i, sum);
    }
}

template <typename X>
static inline void hyper_collapse_forward(X* y, const X* x, const float* pre, const HyperShape* s, const Device* dev) {
    constexpr int W = pack_width<X>();
    const size_t n = (size_t)s->N * s->D;
    if (n == 0) { return; }
    if (s->D % W == 0 && pack_aligned(y, x)) {
        hyper_collapse_kernel<W><<<grid_blocks(n, W, dev), GRID_BLOCK, 0, dev->stream>>>(y, x, pre, n, s->hc, s->D);
    } else {
        hyper_collapse_kernel<1><<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(y, x, pre, n, s->hc, s->D);
    }
    cudaCheck(cudaGetLastError());
}

template <int W, typename X>
static inline void hyper_forward_launch_(X* y, float* r, float* z, float* pre, float* post, float* comb, const X* x,
                                         const float* fn, const float* base, const float* scale, const HyperShape* s,
                                         int M, const Device* dev) {
    const dim3 block(WARP, HYPER_WARPS), mix_block(WARP, HYPER_MIX_WARPS);
    const unsigned blocks = (unsigned)ceil_div(s->N, HYPER_POSITIONS);
    const unsigned mix_blocks = (unsigned)ceil_div(s->N, HYPER_MIX_WARPS);
    hyper_products_kernel<W><<<blocks, block, 0, dev->stream>>>(z, r, x, fn, s->eps_n, s->N, M, s->hc * s->D);
    hyper_mix_kernel<<<mix_blocks, mix_block, 0, dev->stream>>>(pre, post, comb, z, base, scale, s->N, M, s->hc,
                                                                s->iters, s->eps_h);
    cudaCheck(cudaGetLastError());
    hyper_collapse_forward(y, x, pre, s, dev);
}

// post, comb NULL: the head
template <typename X>
static inline void hyper_forward_(X* y, float* r, float* z, float* pre, float* post, float* comb, const X* x,
                                  const float* fn, const float* base, const float* scale, const HyperShape* s, int M,
                                  const Device* dev) {
    constexpr int W = pack_width<X>();
    assert(s->hc >= 1 && s->hc <= HYPER_STREAMS && s->iters >= 1);
    if (s->N == 0) { return; }
    if (s->D % W == 0 && pack_aligned(y, x, fn)) {
        hyper_forward_launch_<W>(y, r, z, pre, post, comb, x, fn, base, scale, s, M, dev);
    } else {
        hyper_forward_launch_<1>(y, r, z, pre, post, comb, x, fn, base, scale, s, M, dev);
    }
}

template <typename X>
static inline void hyper_site_forward(X* y, float* r, float* z, float* pre, float* post, float* comb, const X* x,
                                      const float* fn, const float* base, const float* scale, const HyperShape* s,
                                      const Device* dev) {
    hyper_forward_(y, r, z, pre, post, comb, x, fn, base, scale, s, hyper_numbers(s), dev);
}

template <typename X>
static inline void hyper_head_forward(X* y, float* r, float* z, float* pre, const X* x, const float* fn,
                                      const float* base, const float* scale, const HyperShape* s, const Device* dev) {
    hyper_forward_(y, r, z, pre, (float*)NULL, (float*)NULL, x, fn, base, scale, s, s->hc, dev);
}

// ---- expand: MOST streams at most ----

// n: N * D
template <int W, int MOST, typename X>
__global__ void hyper_expand_kernel(X* out, const X* x, const X* f, const float* post, const float* comb, size_t n,
                                    int hc, int D) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        const size_t t = i / D, d = i % D;
        const Pack<float, W> f_d = load_floats<W>(f + i);
        Pack<float, W> sums[MOST];
        #pragma unroll
        for (int k = 0; k < MOST; k++) {
            const float factor = k < hc ? post[t * hc + k] : 0.0f;
            for (int c = 0; c < W; c++) { sums[k].x[c] = madd(factor, f_d.x[c], 0.0f); }
        }
        for (int j = 0; j < hc; j++) {
            const Pack<float, W> x_j = load_floats<W>(x + (t * hc + j) * D + d);
            #pragma unroll
            for (int k = 0; k < MOST; k++) {
                const float factor = k < hc ? comb[(t * hc + j) * hc + k] : 0.0f;
                for (int c = 0; c < W; c++) { sums[k].x[c] = madd(factor, x_j.x[c], sums[k].x[c]); }
            }
        }
        #pragma unroll
        for (int k = 0; k < MOST; k++) {
            if (k < hc) { store_floats(out + (t * hc + k) * D + d, sums[k]); }
        }
    }
}

template <typename X>
static inline void hyper_expand_forward(X* out, const X* x, const X* f, const float* post, const float* comb,
                                        const HyperShape* s, const Device* dev) {
    constexpr int W = pack_width<X>();
    const size_t n = (size_t)s->N * s->D;
    assert(s->hc >= 1 && s->hc <= HYPER_STREAMS);
    if (n == 0) { return; }
    if (s->hc > 4) {
        hyper_expand_kernel<1, HYPER_STREAMS>
            <<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(out, x, f, post, comb, n, s->hc, s->D);
    } else if (s->D % W == 0 && pack_aligned(out, x, f)) {
        hyper_expand_kernel<W, 4>
            <<<grid_blocks(n, W, dev), GRID_BLOCK, 0, dev->stream>>>(out, x, f, post, comb, n, s->hc, s->D);
    } else {
        hyper_expand_kernel<1, 4>
            <<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(out, x, f, post, comb, n, s->hc, s->D);
    }
    cudaCheck(cudaGetLastError());
}

// df and dX of a pack of channels of a position; its gradients d have been read, so dX may be where they were
template <int W, int MOST, typename X>
__device__ inline void hyper_expand_back_(X* df, X* dX, const Pack<float, W> (&d)[MOST], const float* post,
                                          const float* comb, int hc, int D) {
    Pack<float, W> sum = {};
    #pragma unroll
    for (int k = 0; k < MOST; k++) {
        if (k >= hc) { continue; }
        const float factor = post[k];
        for (int c = 0; c < W; c++) { sum.x[c] = madd(factor, d[k].x[c], sum.x[c]); }
    }
    store_floats(df, sum);
    for (int j = 0; j < hc; j++) {
        Pack<float, W> dx = {};
        #pragma unroll
        for (int k = 0; k < MOST; k++) {
            if (k >= hc) { continue; }
            const float factor = comb[j * hc + k];
            for (int c = 0; c < W; c++) { dx.x[c] = madd(factor, d[k].x[c], dx.x[c]); }
        }
        store_floats(dX + (size_t)j * D, dx);
    }
}

// block is (WARP, HYPER_MIX_WARPS): a warp has a position
template <int W, int MOST, typename X>
__global__ void hyper_expand_backward_kernel(X* df, X* dX, float* dpost, float* dcomb, const X* dout, const X* x,
                                             const X* f, const float* post, const float* comb, int N, int hc, int D) {
    const size_t t = (size_t)blockIdx.x * HYPER_MIX_WARPS + threadIdx.y;
    if (t >= (size_t)N) { return; }
    const int lane = threadIdx.x * W;
    float post_sums[MOST] = {}, comb_sums[MOST][MOST] = {};
    for (int c = lane; c - lane < D; c += WARP * W) {
        Pack<float, W> d[MOST], f_c = {};
        #pragma unroll
        for (int k = 0; k < MOST; k++) {
            for (int i = 0; i < W; i++) { d[k].x[i] = -0.0f; }  // beyond the row -0 * 0 leaves every sum as it is
            if (c < D && k < hc) { d[k] = load_floats<W>(dout + (t * hc + k) * D + c); }
        }
        if (c < D) { f_c = load_floats<W>(f + t * D + c); }
        #pragma unroll
        for (int k = 0; k < MOST; k++) { post_sums[k] = row_madd(d[k].x, f_c.x, post_sums[k]); }
        #pragma unroll
        for (int j = 0; j < MOST; j++) {
            Pack<float, W> x_j = {};
            if (j >= hc) { continue; }
            if (c < D) { x_j = load_floats<W>(x + (t * hc + j) * D + c); }
            #pragma unroll
            for (int k = 0; k < MOST; k++) { comb_sums[j][k] = row_madd(x_j.x, d[k].x, comb_sums[j][k]); }
        }
        if (c < D) {
            hyper_expand_back_<W, MOST>(df + t * D + c, dX + t * hc * D + c, d, post + t * hc, comb + t * hc * hc, hc,
                                        D);
        }
    }
    #pragma unroll
    for (int k = 0; k < MOST; k++) {
        const float sum = row_total(post_sums[k]);
        if (threadIdx.x == 0 && k < hc) { dpost[t * hc + k] = sum; }
        #pragma unroll
        for (int j = 0; j < MOST; j++) {
            const float dot = row_total(comb_sums[j][k]);
            if (threadIdx.x == 0 && k < hc && j < hc) { dcomb[(t * hc + j) * hc + k] = dot; }
        }
    }
}

template <typename X>
static inline void hyper_expand_backward(X* df, X* dX, float* dpost, float* dcomb, const X* dout, const X* x,
                                         const X* f, const float* post, const float* comb, const HyperShape* s,
                                         const Device* dev) {
    constexpr int W = pack_width<X>();
    const dim3 block(WARP, HYPER_MIX_WARPS);
    const unsigned blocks = (unsigned)ceil_div(s->N, HYPER_MIX_WARPS);
    assert(s->hc >= 1 && s->hc <= HYPER_STREAMS);
    if (s->N == 0) { return; }
    if (s->hc > 4) {
        hyper_expand_backward_kernel<1, HYPER_STREAMS>
            <<<blocks, block, 0, dev->stream>>>(df, dX, dpost, dcomb, dout, x, f, post, comb, s->N, s->hc, s->D);
    } else if (s->D % W == 0 && pack_aligned(df, dX, dout, x, f)) {
        hyper_expand_backward_kernel<W, 4>
            <<<blocks, block, 0, dev->stream>>>(df, dX, dpost, dcomb, dout, x, f, post, comb, s->N, s->hc, s->D);
    } else {
        hyper_expand_backward_kernel<1, 4>
            <<<blocks, block, 0, dev->stream>>>(df, dX, dpost, dcomb, dout, x, f, post, comb, s->N, s->hc, s->D);
    }
    cudaCheck(cudaGetLastError());
}

// ---- backward of a site or the head ----

// floats that a position needs in shared memory: P before each step and after the last, dP twice, the softmax
static inline size_t hyper_shared_(const HyperShape* s) { return (size_t)(2 * s->iters + 3) * s->hc * s->hc; }

// da takes the place of dcomb's gradient in global memory: by the lanes of a warp. A (hc, hc) is in `softmax`
__device__ inline void hyper_sinkhorn_backward_(float* da, const float* dcomb, float* shared, int hc, int iters,
                                                float eps) {
    const int square = hc * hc, n_steps = 2 * iters - 1;
    float *steps = shared, *dP = shared + (size_t)2 * iters * square, *next = dP + square, *softmax = next + square;
    for (int e = threadIdx.x; e < square; e += WARP) { next[e] = hyper_softmax_(softmax, e, hc); }
    __syncwarp();
    for (int e = threadIdx.x; e < square; e += WARP) {
        softmax[e] = next[e], steps[e] = next[e] + eps, dP[e] = dcomb[e];
    }
    __syncwarp();
    for (int step = 0; step < n_steps; step++) {
        hyper_step_(steps + (size_t)(step + 1) * square, steps + (size_t)step * square, step % 2, hc, eps);
    }
    for (int step = n_steps - 1; step >= -1; step--) {  // the softmax comes last: rows, which are not divided
        const int by_row = step < 0 || step % 2;
        const float *before = steps + (size_t)step * square, *Y = step < 0 ? softmax : before + square;
        for (int e = threadIdx.x; e < square; e += WARP) {
            float dot = 0.0f;
            for (int k = 0; k < hc; k++) {
                const int at = hyper_at_(by_row, by_row ? e / hc : e % hc, k, hc);
                dot = madd(dP[at], Y[at], dot);
            }
            next[e] = step < 0 ? Y[e] * (dP[e] - dot) : (dP[e] - dot) / hyper_divisor_(before, e, by_row, hc, eps);
        }
        __syncwarp();
        float* old = dP;
        dP = next, next = old;
    }
    for (int e = threadIdx.x; e < square; e += WARP) { da[e] = dP[e]; }
}

// da (N, M), and t (N) as in hyper_dx_ref_. Block is (WARP, hc), a block has a position; dpost NULL: of the head
template <int W, typename X>
__global__ void hyper_da_kernel(float* da, float* t_of, const X* dy, const float* dpost, const float* dcomb, const X* x,
                                const float* r, const float* z, const float* post, const float* base,
                                const float* scale, int M, int hc, int D, int iters, float eps) {
    extern __shared__ float hyper_shared[];
    __shared__ float dpre[HYPER_STREAMS];
    const size_t t = blockIdx.x;
    const int lane = threadIdx.x * W, j = threadIdx.y, square = hc * hc;
    const X* x_j = x + (t * hc + j) * D;
    float sum = 0.0f;
    for (int c = lane; c - lane < D; c += WARP * W) {
        Pack<float, W> a, b = {};
        for (int i = 0; i < W; i++) { a.x[i] = -0.0f; }
        if (c < D) { a = load_floats<W>(x_j + c), b = load_floats<W>(dy + t * D + c); }
        sum = row_madd(a.x, b.x, sum);
    }
    sum = row_total(sum);
    if (threadIdx.x == 0) { dpre[j] = sum; }
    __syncthreads();
    if (j > 0) { return; }
    z += t * M, da += t * M;
    float* logits = hyper_shared + (size_t)(2 * iters + 2) * square;
    for (int m = threadIdx.x; m < M; m += WARP) {
        const float a = z[m] * scale[hyper_part_(m, hc)] + base[m];
        if (m < hc) {
            const float s = sigmoid_one(a);
            da[m] = dpre[m] * (s * (1.0f - s));
        } else if (m < 2 * hc) {
            da[m] = dpost[t * hc + m - hc] * (post[t * hc + m - hc] * (1.0f - sigmoid_one(a)));
        } else {
            logits[m - 2 * hc] = a;
        }
    }
    __syncwarp();
    if (dpost) { hyper_sinkhorn_backward_(da + 2 * hc, dcomb + t * square, hyper_shared, hc, iters, eps); }
    __syncwarp();
    float dot = 0.0f;
    for (int m = threadIdx.x; m - (int)threadIdx.x < M; m += WARP) {
        const float dz = m < M ? da[m] * scale[hyper_part_(m, hc)] : -0.0f;
        dot = row_madd(dz, m < M ? z[m] : 0.0f, dot);
    }
    dot = row_total(dot);
    if (threadIdx.x == 0) { t_of[t] = r[t] * r[t] / (float)(hc * D) * dot; }
}

// grid (packs of channels of a row, positions); block is (HYPER_DX_THREADS)
template <int W, typename X>
__global__ void __launch_bounds__(HYPER_DX_THREADS)
hyper_dx_kernel(X* dX, const X* dy, const X* x, const float* da, const float* t_of, const float* r, const float* pre,
                const float* fn, const float* scale, int add, int N, int M, int hc, int D) {
    __shared__ float dz[HYPER_MOST][HYPER_POSITIONS];
    const size_t n = (size_t)hc * D, i = ((size_t)blockIdx.x * HYPER_DX_THREADS + threadIdx.x) * W;
    const int first = blockIdx.y * HYPER_POSITIONS;
    for (int k = threadIdx.x; k < M * HYPER_POSITIONS; k += HYPER_DX_THREADS) {
        const int m = k % M, p = k / M;
        dz[m][p] = first + p < N ? da[(size_t)(first + p) * M + m] * scale[hyper_part_(m, hc)] : 0.0f;
    }
    __syncthreads();
    if (i >= n) { return; }
    float sum[HYPER_POSITIONS][W] = {};
    for (int m = 0; m < M; m++) {
        const Pack<float, W> f = load_floats<W>(fn + m * n + i);
        for (int p = 0; p < HYPER_POSITIONS; p++) {
            for (int k = 0; k < W; k++) { sum[p][k] = madd(dz[m][p], f.x[k], sum[p][k]); }
        }
    }
    const size_t j = i / D, d = i % D;
    for (int p = 0; p < HYPER_POSITIONS; p++) {
        const size_t t = (size_t)first + p;
        if (t >= (size_t)N) { return; }
        const Pack<float, W> u = load_floats<W>(x + t * n + i), dy_d = load_floats<W>(dy + t * D + d);
        const float pre_j = pre[t * hc + j], r_t = r[t], t_t = t_of[t];
        Pack<float, W> y = {};
        if (add) { y = load_floats<W>(dX + t * n + i); }
        for (int k = 0; k < W; k++) {
            y.x[k] = madd(pre_j, dy_d.x[k], y.x[k]) + (r_t * sum[p][k] - u.x[k] * t_t);
        }
        store_floats(dX + t * n + i, y);
    }
}

// parts (gridDim.z, M, n): dfn of the positions N * b / gridDim.z .. of part b. grid (channels, rows, parts), block is
// (HYPER_DFN_THREADS)
template <typename X>
__global__ void __launch_bounds__(HYPER_DFN_THREADS)
hyper_dfn_kernel(float* parts, const X* x, const float* da, const float* r, const float* scale, int N, int M, int hc,
                 int n) {
    __shared__ float left[HYPER_DFN_POSITIONS][HYPER_DFN_ROWS];
    const int i = blockIdx.x * HYPER_DFN_THREADS + threadIdx.x, m0 = blockIdx.y * HYPER_DFN_ROWS, b = blockIdx.z;
    const int begin = (int)((int64_t)N * b / gridDim.z), end = (int)((int64_t)N * (b + 1) / gridDim.z);
    float sum[HYPER_DFN_ROWS] = {};
    for (int t = begin; t < end; t += HYPER_DFN_POSITIONS) {
        const int n_t = end - t < HYPER_DFN_POSITIONS ? end - t : HYPER_DFN_POSITIONS;
        __syncthreads();  // the factors before these have been used
        for (int k = threadIdx.x; k < n_t * HYPER_DFN_ROWS; k += HYPER_DFN_THREADS) {
            const int m = m0 + k % HYPER_DFN_ROWS, p = t + k / HYPER_DFN_ROWS;
            const float dz = m < M ? da[(size_t)p * M + m] * scale[hyper_part_(m, hc)] : 0.0f;
            left[k / HYPER_DFN_ROWS][k % HYPER_DFN_ROWS] = r[p] * dz;
        }
        __syncthreads();
        #pragma unroll 4
        for (int p = 0; p < n_t; p++) {
            const float u = i < n ? to_float(x[(size_t)(t + p) * n + i]) : 0.0f;
            #pragma unroll
            for (int m = 0; m < HYPER_DFN_ROWS; m++) { sum[m] = madd(left[p][m], u, sum[m]); }
        }
    }
    #pragma unroll
    for (int m = 0; m < HYPER_DFN_ROWS; m++) {
        if (i < n && m0 + m < M) { parts[((size_t)b * M + m0 + m) * n + i] = sum[m]; }
    }
}

// base (gridDim.x, base_row), scales (gridDim.x, scales_row): dbase and dscale of the positions N * b / gridDim.x ..;
// NULL: nobody asks. Block is (WARP, HYPER_BASE_WARPS + 3): a thread has a number, then a warp has a scale
__global__ static void hyper_few_kernel(float* base, int base_row, float* scales, int scales_row, const float* da,
                                        const float* z, int N, int M, int hc) {
    const int b = blockIdx.x, m = threadIdx.y * WARP + threadIdx.x, part = (int)threadIdx.y - HYPER_BASE_WARPS;
    const int begin = (int)((int64_t)N * b / gridDim.x), end = (int)((int64_t)N * (b + 1) / gridDim.x);
    if (part < 0) {
        if (!base || m >= M) { return; }
        float sum = 0.0f;
        #pragma unroll 8
        for (int t = begin; t < end; t++) { sum += da[(size_t)t * M + m]; }
        base[(size_t)b * base_row + m] = sum;
        return;
    }
    const int first = part * hc, last = part < 2 ? first + hc : M;
    if (!scales || first >= M) { return; }  // the head has one
    float sum = 0.0f;
    for (int t = begin; t < end; t++) {
        for (int k = first + threadIdx.x; k - (int)threadIdx.x < last; k += WARP) {
            const float d = k < last ? da[(size_t)t * M + k] : -0.0f;
            sum = row_madd(d, k < last ? z[(size_t)t * M + k] : 0.0f, sum);
        }
    }
    sum = row_total(sum);
    if (threadIdx.x == 0) { scales[(size_t)b * scales_row + part] = sum; }
}

// out (n): the sum of parts (n_parts, row), ascending
__global__ static void hyper_parts_kernel(float* out, const float* parts, int n_parts, size_t row, size_t n) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) {
        float sum = parts[i];
        #pragma unroll 4
        for (int b = 1; b < n_parts; b++) { sum += parts[(size_t)b * row + i]; }
        out[i] = sum;
    }
}

static inline void hyper_add_parts_(float* out, const float* parts, int n_parts, size_t row, size_t n,
                                    const Device* dev) {
    hyper_parts_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(out, parts, n_parts, row, n);
}

// into how many parts the positions are cut, where each makes so many blocks
static inline int hyper_n_parts_(int N, int64_t blocks, const Device* dev) {
#ifdef EXACT
    (void)N, (void)blocks, (void)dev;
    return 1;  // a chain
#else
    const int64_t most = ceil_div(N, HYPER_DFN_POSITIONS), wanted = ceil_div(4 * (int64_t)dev->n_sms, blocks);
    return (int)(most < 1 ? 1 : wanted < most ? wanted : most);
#endif
}

template <int W, typename X>
static inline void hyper_positions_launch_(X* dX, float* da, float* t_of, const X* dy, const float* dpost,
                                           const float* dcomb, const X* x, const float* r, const float* z,
                                           const float* pre, const float* post, const float* fn, const float* base,
                                           const float* scale, const HyperShape* s, int M, const Device* dev) {
    constexpr int W_dx = W < 4 ? W : 4;
    const int is_site = M > s->hc;
    const size_t n_shared = is_site ? sizeof(float) * hyper_shared_(s) : 0;
    const dim3 block(WARP, (unsigned)s->hc);
    const dim3 grid((unsigned)ceil_div((int64_t)s->hc * s->D, HYPER_DX_THREADS * W_dx),
                    (unsigned)ceil_div(s->N, HYPER_POSITIONS));
    hyper_da_kernel<W><<<(unsigned)s->N, block, n_shared, dev->stream>>>(
        da, t_of, dy, dpost, dcomb, x, r, z, post, base, scale, M, s->hc, s->D, s->iters, s->eps_h);
    hyper_dx_kernel<W_dx><<<grid, HYPER_DX_THREADS, 0, dev->stream>>>(dX, dy, x, da, t_of, r, pre, fn, scale,
                                                                      is_site, s->N, M, s->hc, s->D);
}

// dpost, dcomb, post NULL: the head
template <typename X>
static inline void hyper_backward_(X* dX, float* dfn, float* dbase, float* dscale, const X* dy, const float* dpost,
                                   const float* dcomb, const X* x, const float* r, const float* z, const float* pre,
                                   const float* post, const float* fn, const float* base, const float* scale,
                                   const HyperShape* s, int M, const Device* dev) {
    constexpr int W = pack_width<X>();
    const int N = s->N, n = s->hc * s->D, packs = s->D % W == 0 && pack_aligned(dX, dy, x, fn);
    dim3 grid((unsigned)ceil_div(n, HYPER_DFN_THREADS), (unsigned)ceil_div(M, HYPER_DFN_ROWS));
    const int n_parts = hyper_n_parts_(N, (int64_t)grid.x * grid.y, dev), n_few = hyper_n_parts_(N, 4, dev);
    const size_t n_da = (size_t)N * (M + 1), n_dfn = (size_t)M * n, few_row = M + 3;
    assert(s->hc >= 1 && s->hc <= HYPER_STREAMS && s->iters >= 1 && hyper_shared_(s) * sizeof(float) <= 48 << 10);
    float* da = device_workspace(dev, sizeof(float) * (n_da + n_dfn * n_parts + few_row * n_few));
    float *t_of = da + (size_t)N * M, *parts = da + n_da, *few = parts + n_dfn * n_parts;
    if (N > 0 && packs) {
        hyper_positions_launch_<W>(dX, da, t_of, dy, dpost, dcomb, x, r, z, pre, post, fn, base, scale, s, M, dev);
    } else if (N > 0) {
        hyper_positions_launch_<1>(dX, da, t_of, dy, dpost, dcomb, x, r, z, pre, post, fn, base, scale, s, M, dev);
    }
    if (dfn) {
        grid.z = (unsigned)n_parts;
        float* to = n_parts > 1 ? parts : dfn;
        hyper_dfn_kernel<<<grid, HYPER_DFN_THREADS, 0, dev->stream>>>(to, x, da, r, scale, N, M, s->hc, n);
        if (n_parts > 1) { hyper_add_parts_(dfn, parts, n_parts, n_dfn, n_dfn, dev); }
    }
    if (dbase || dscale) {
        const dim3 block(WARP, HYPER_BASE_WARPS + 3);
        float *bases = n_few > 1 && dbase ? few : dbase, *scales = n_few > 1 && dscale ? few + M : dscale;
        const int row = (int)few_row;
        hyper_few_kernel<<<(unsigned)n_few, block, 0, dev->stream>>>(bases, row, scales, row, da, z, N, M, s->hc);
        if (n_few > 1 && dbase) { hyper_add_parts_(dbase, few, n_few, few_row, (size_t)M, dev); }
        if (n_few > 1 && dscale) { hyper_add_parts_(dscale, few + M, n_few, few_row, M > s->hc ? 3 : 1, dev); }
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void hyper_site_backward(typename MaybeNull<X>::type* dX, float* dfn, float* dbase, float* dscale,
                                       const X* dy, const float* dpost, const float* dcomb, const X* x, const float* r,
                                       const float* z, const float* pre, const float* post, const float* fn,
                                       const float* base, const float* scale, const HyperShape* s,
                                       const Device* dev) {
    hyper_backward_(dX, dfn, dbase, dscale, dy, dpost, dcomb, x, r, z, pre, post, fn, base, scale, s, hyper_numbers(s),
                    dev);
}

template <typename X>
static inline void hyper_head_backward(typename MaybeNull<X>::type* dX, float* dfn, float* dbase, float* dscale,
                                       const X* dy, const X* x, const float* r, const float* z, const float* pre,
                                       const float* fn, const float* base, const float* scale, const HyperShape* s,
                                       const Device* dev) {
    hyper_backward_(dX, dfn, dbase, dscale, dy, (const float*)NULL, (const float*)NULL, x, r, z, pre,
                    (const float*)NULL, fn, base, scale, s, s->hc, dev);
}

// ---- spread: n elements of X, or of encoded ----

template <int W, typename X>
__global__ void hyper_spread_kernel(X* x, const X* encoded, size_t n, int hc, int D) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        pack_store(x + i, pack_load<W>(encoded + i / D / hc * D + i % D));
    }
}

template <int W, typename X>
__global__ void hyper_spread_backward_kernel(X* dencoded, const X* dX, size_t n, int hc, int D) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        Pack<float, W> sum = {};
        for (int j = 0; j < hc; j++) {
            const Pack<float, W> x = load_floats<W>(dX + (i / D * hc + j) * D + i % D);
            for (int k = 0; k < W; k++) { sum.x[k] += x.x[k]; }
        }
        store_floats(dencoded + i, sum);
    }
}

template <typename X>
static inline void hyper_spread_forward(X* x, const X* encoded, int N, int hc, int D, const Device* dev) {
    constexpr int W = pack_width<X>();
    const size_t n = (size_t)N * hc * D;
    if (n == 0) { return; }
    if (D % W == 0 && pack_aligned(x, encoded)) {
        hyper_spread_kernel<W><<<grid_blocks(n, W, dev), GRID_BLOCK, 0, dev->stream>>>(x, encoded, n, hc, D);
    } else {
        hyper_spread_kernel<1><<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(x, encoded, n, hc, D);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void hyper_spread_backward(X* dencoded, const X* dX, int N, int hc, int D, const Device* dev) {
    constexpr int W = pack_width<X>();
    const size_t n = (size_t)N * D;
    if (n == 0) { return; }
    if (D % W == 0 && pack_aligned(dencoded, dX)) {
        hyper_spread_backward_kernel<W><<<grid_blocks(n, W, dev), GRID_BLOCK, 0, dev->stream>>>(dencoded, dX, n, hc, D);
    } else {
        hyper_spread_backward_kernel<1><<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(dencoded, dX, n, hc, D);
    }
    cudaCheck(cudaGetLastError());
}
#endif  // __CUDACC__
#endif  // LLMC_HYPER_KERNELS_H
