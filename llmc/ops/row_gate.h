/*
A scalar gate for each position, as Qwen3.6's shared expert has it: what the expert says of position n comes to the
sum of the routed ones times s[n] = sigmoid(logit[n]).
    logit (N)   s (N) float   y, out (N, C)
    row_gate_forward    s = sigmoid(logit)
    row_gate_add        out += s * y, fused     out goes on from what it holds: the chain of expert_rows.h's combine
Backward: the gradient of y is s * dout, and ds[n] the sum over channels of dout * y; whoever knows y's linear layer
takes both from before it (swiglu.h's weight and dweight, with s as the weight), and then
    row_gate_backward   dlogit = ds * (s * (1 - s))     (N)  written; ds (N) float
Cost:   row_gate_add is memory bound, 3*N*C elements moved. Judge it in GB/s: one thread of an AMD EPYC had 38 where
        memcpy had 26, at (8192, 2048). Not measured on a GPU yet. The others have N elements.
Error:  s is within 3 * 2^-24 of itself, dlogit within 6 roundings of ds / 4. bf16 rounds what is stored, 2^-8.
Order:  element by element; in row_gate_add one madd. Fast kernels are the same; nvcc may fuse products of a sigmoid.
Source: Qwen Team 2024, Qwen1.5-MoE (the shared expert and its gate); doc/qwen36.md "What differs from other models"
*/
#ifndef LLMC_ROW_GATE_H
#define LLMC_ROW_GATE_H
#include "../core/device.h"  // Device, ceil_div
#include "../core/kernel.h"  // load_floats, store_floats, grid_first, grid_step, grid_blocks, pack_aligned
#include "../core/madd.h"    // madd
#include "silu.h"            // sigmoid_one

// ---- plain C: read this first; it defines every bit ----

static inline void row_gate_forward_ref(float* s, const float* logit, int N) {
    for (int n = 0; n < N; n++) { s[n] = sigmoid_one(logit[n]); }
}

static inline void row_gate_add_ref(float* out, const float* y, const float* s, int N, int C) {
    for (size_t n = 0; n < (size_t)N; n++) {
        for (int c = 0; c < C; c++) { out[n * C + c] = madd(s[n], y[n * C + c], out[n * C + c]); }
    }
}

static inline void row_gate_backward_ref(float* dlogit, const float* ds, const float* s, int N) {
    for (int n = 0; n < N; n++) { dlogit[n] = ds[n] * (s[n] * (1.0f - s[n])); }
}

#ifndef __CUDACC__  // ---- fast C ----

static inline void row_gate_forward(float* s, const float* logit, int N, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd
    for (int n = 0; n < N; n++) { s[n] = sigmoid_one(logit[n]); }
}

static inline void row_gate_add(float* out, const float* y, const float* s, int N, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *y_n = y + (size_t)n * C, s_n = s[n];
        float* out_n = out + (size_t)n * C;
        #pragma omp simd
        for (int c = 0; c < C; c++) { out_n[c] = madd(s_n, y_n[c], out_n[c]); }
    }
}

static inline void row_gate_backward(float* dlogit, const float* ds, const float* s, int N, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd
    for (int n = 0; n < N; n++) { dlogit[n] = ds[n] * (s[n] * (1.0f - s[n])); }
}
#else  // ---- CUDA: of N numbers one thread has each; of rows, as many threads walk over one as it has packs ----

template <typename X>
__global__ void row_gate_forward_kernel(float* s, const X* logit, int N) {
    for (size_t n = grid_first<1>(); n < (size_t)N; n += grid_step<1>()) { s[n] = sigmoid_one(to_float(logit[n])); }
}

template <typename X>
static inline void row_gate_forward(float* s, const X* logit, int N, const Device* dev) {
    if (N == 0) { return; }
    row_gate_forward_kernel<<<grid_blocks((size_t)N, 1, dev), GRID_BLOCK, 0, dev->stream>>>(s, logit, N);
    cudaCheck(cudaGetLastError());
}

// blocks (threads, rows): a row is walked over by the threads that share threadIdx.y
template <int W, typename X>
__global__ void row_gate_add_kernel(X* out, const X* y, const float* s, int N, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) { return; }
    const size_t row = (size_t)n * C;
    const float s_n = s[n];
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Pack<float, W> sum = load_floats<W>(out + row + c), y_c = load_floats<W>(y + row + c);
        for (int i = 0; i < W; i++) { sum.x[i] = madd(s_n, y_c.x[i], sum.x[i]); }
        store_floats(out + row + c, sum);
    }
}

template <int W, typename X>
static inline void row_gate_add_launch_(X* out, const X* y, const float* s, int N, int C, const Device* dev) {
    const unsigned threads = (unsigned)(C / W < GRID_BLOCK ? C / W : (int)GRID_BLOCK);
    const dim3 block(threads, GRID_BLOCK / threads);
    row_gate_add_kernel<W><<<(unsigned)ceil_div(N, block.y), block, 0, dev->stream>>>(out, y, s, N, C);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void row_gate_add(X* out, const X* y, const float* s, int N, int C, const Device* dev) {
    constexpr int W = pack_width<X>();
    if (N == 0) { return; }
    if (C % W == 0 && pack_aligned(out, y)) {
        row_gate_add_launch_<W>(out, y, s, N, C, dev);
    } else {
        row_gate_add_launch_<1>(out, y, s, N, C, dev);
    }
}

template <typename X>
__global__ void row_gate_backward_kernel(X* dlogit, const float* ds, const float* s, int N) {
    for (size_t n = grid_first<1>(); n < (size_t)N; n += grid_step<1>()) {
        dlogit[n] = from_float<X>(ds[n] * (s[n] * (1.0f - s[n])));
    }
}

template <typename X>
static inline void row_gate_backward(X* dlogit, const float* ds, const float* s, int N, const Device* dev) {
    if (N == 0) { return; }
    row_gate_backward_kernel<<<grid_blocks((size_t)N, 1, dev), GRID_BLOCK, 0, dev->stream>>>(dlogit, ds, s, N);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_ROW_GATE_H
