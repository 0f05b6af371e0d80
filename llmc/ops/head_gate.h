/*
The output gate of Qwen3.6's attention: each head's output times the logistic function of a gate of its own, which
q_proj computes beside the queries. With s = sigmoid(gate):
    proj (N, H, 2, HS)  rows of q_proj: of each head its HS queries, then its HS gates
    q, attention, out (N, H*HS)   out may be attention
    head_gate_split     q = the query halves of proj
    head_gate_forward   out = attention * s
Backward, everything written; dattention may be dout or attention, dproj may be proj:
    head_gate_backward  dattention = dout * s     the gate halves of dproj = (dout * attention) * (s * (1 - s))
    head_gate_join      the query halves of dproj = dq
Each of the two leaves the other's halves of dproj as they are, so their order does not matter.
Cost:   split and join are memory bound. On a CPU the gate is bound by the exponential: 0.72 ns per element of out
        forward, 0.82 backward, one thread, AVX-512, gcc 12, AMD EPYC, the smallest of 100 calls. On a GPU all are
        memory bound: 3 elements moved for each of out forward, 5 backward; not measured on a GPU yet.
Error:  s is within 3 * 2^-24 of itself; out has one rounding more, dattention too. s * (1 - s) is within 5 * 2^-24 of
        1/4 at most, its product has two roundings more. bf16 rounds what is stored: 2^-8. Fast kernels have the
        hardware's exponential: s within 12 * 2^-23 for |gate| < 4.
Order:  element by element, products as their parentheses say.
Source: Qiu et al. 2025, arXiv:2505.06708 (the gate behind attention); doc/qwen36.md "What differs from other models"
*/
#ifndef LLMC_HEAD_GATE_H
#define LLMC_HEAD_GATE_H
#include "../core/device.h"  // Device, ceil_div
#include "../core/kernel.h"  // load_floats, store_floats, pack_load, pack_store, pack_aligned, GRID_BLOCK
#include "silu.h"            // sigmoid_one

// ---- plain C: read this first; it defines every bit. Row r = n * H + h is head h of position n ----

static inline void head_gate_split_ref(float* q, const float* proj, int N, int H, int HS) {
    for (size_t r = 0; r < (size_t)N * H; r++) {
        for (int c = 0; c < HS; c++) { q[r * HS + c] = proj[r * 2 * HS + c]; }
    }
}

static inline void head_gate_forward_ref(float* out, const float* attention, const float* proj, int N, int H, int HS) {
    for (size_t r = 0; r < (size_t)N * H; r++) {
        const float* gate = proj + r * 2 * HS + HS;
        for (int c = 0; c < HS; c++) { out[r * HS + c] = attention[r * HS + c] * sigmoid_one(gate[c]); }
    }
}

static inline void head_gate_backward_ref(float* dattention, float* dproj, const float* dout, const float* attention,
                                          const float* proj, int N, int H, int HS) {
    for (size_t r = 0; r < (size_t)N * H; r++) {
        const size_t gates = r * 2 * HS + HS;
        for (int c = 0; c < HS; c++) {
            const float d = dout[r * HS + c], o = attention[r * HS + c], s = sigmoid_one(proj[gates + c]);
            dattention[r * HS + c] = d * s;
            dproj[gates + c] = (d * o) * (s * (1.0f - s));
        }
    }
}

static inline void head_gate_join_ref(float* dproj, const float* dq, int N, int H, int HS) {
    for (size_t r = 0; r < (size_t)N * H; r++) {
        for (int c = 0; c < HS; c++) { dproj[r * 2 * HS + c] = dq[r * HS + c]; }
    }
}

#ifndef __CUDACC__  // ---- fast C ----

static inline void head_gate_split(float* q, const float* proj, int N, int H, int HS, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (size_t r = 0; r < (size_t)N * H; r++) {
        const float* from = proj + r * 2 * HS;
        float* to = q + r * HS;
        #pragma omp simd
        for (int c = 0; c < HS; c++) { to[c] = from[c]; }
    }
}

static inline void head_gate_forward(float* out, const float* attention, const float* proj, int N, int H, int HS,
                                     const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (size_t r = 0; r < (size_t)N * H; r++) {
        const float *o = attention + r * HS, *gate = proj + r * 2 * HS + HS;
        float* y = out + r * HS;
        #pragma omp simd
        for (int c = 0; c < HS; c++) { y[c] = o[c] * sigmoid_one(gate[c]); }
    }
}

static inline void head_gate_backward(float* dattention, float* dproj, const float* dout, const float* attention,
                                      const float* proj, int N, int H, int HS, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (size_t r = 0; r < (size_t)N * H; r++) {
        const float *dy = dout + r * HS, *att = attention + r * HS, *gate = proj + r * 2 * HS + HS;
        float *datt = dattention + r * HS, *dgate = dproj + r * 2 * HS + HS;
        #pragma omp simd
        for (int c = 0; c < HS; c++) {
            const float d = dy[c], o = att[c], s = sigmoid_one(gate[c]);
            datt[c] = d * s;
            dgate[c] = (d * o) * (s * (1.0f - s));
        }
    }
}

static inline void head_gate_join(float* dproj, const float* dq, int N, int H, int HS, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (size_t r = 0; r < (size_t)N * H; r++) {
        const float* from = dq + r * HS;
        float* to = dproj + r * 2 * HS;
        #pragma omp simd
        for (int c = 0; c < HS; c++) { to[c] = from[c]; }
    }
}
#else  // ---- CUDA: blocks (threads, rows), a head's row is walked over by the threads that share threadIdx.y ----

__device__ inline float head_gate_sigmoid_(float x) {
#ifdef EXACT
    return sigmoid_one(x);
#else
    return __fdividef(1.0f, 1.0f + kernel_exp(-x));
#endif
}

// rows of HS elements, `to_row` apart, are those that lie `from_row` apart
template <int W, typename X>
__global__ void head_gate_copy_kernel(X* to, size_t to_row, const X* from, size_t from_row, size_t n_rows, int HS) {
    const size_t r = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (r >= n_rows) { return; }
    for (int c = threadIdx.x * W; c < HS; c += blockDim.x * W) {
        pack_store(to + r * to_row + c, pack_load<W>(from + r * from_row + c));
    }
}

template <int W, typename X>
__global__ void head_gate_forward_kernel(X* out, const X* attention, const X* proj, size_t n_rows, int HS) {
    const size_t r = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (r >= n_rows) { return; }
    for (int c = threadIdx.x * W; c < HS; c += blockDim.x * W) {
        Pack<float, W> y = load_floats<W>(attention + r * HS + c), gate = load_floats<W>(proj + r * 2 * HS + HS + c);
        for (int i = 0; i < W; i++) { y.x[i] *= head_gate_sigmoid_(gate.x[i]); }
        store_floats(out + r * HS + c, y);
    }
}

// a thread has read its packs before it writes them, so what is written may lie where they were
template <int W, typename X>
__global__ void head_gate_backward_kernel(X* dattention, X* dproj, const X* dout, const X* attention, const X* proj,
                                          size_t n_rows, int HS) {
    const size_t r = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (r >= n_rows) { return; }
    for (int c = threadIdx.x * W; c < HS; c += blockDim.x * W) {
        const size_t gates = r * 2 * HS + HS + c;
        Pack<float, W> d = load_floats<W>(dout + r * HS + c), o = load_floats<W>(attention + r * HS + c);
        const Pack<float, W> gate = load_floats<W>(proj + gates);
        for (int i = 0; i < W; i++) {
            const float s = head_gate_sigmoid_(gate.x[i]);
            o.x[i] = (d.x[i] * o.x[i]) * (s * (1.0f - s));
            d.x[i] *= s;
        }
        store_floats(dattention + r * HS + c, d);
        store_floats(dproj + gates, o);
    }
}

static inline dim3 head_gate_block_(int HS, int W) {
    const unsigned threads = (unsigned)(HS / W < GRID_BLOCK ? HS / W : (int)GRID_BLOCK);
    return dim3(threads, GRID_BLOCK / threads);
}

template <int W, typename X>
static inline void head_gate_copy_launch_(X* to, size_t to_row, const X* from, size_t from_row, size_t n_rows, int HS,
                                          const Device* dev) {
    const dim3 block = head_gate_block_(HS, W);
    const unsigned n = (unsigned)ceil_div((int64_t)n_rows, (int64_t)block.y);
    head_gate_copy_kernel<W><<<n, block, 0, dev->stream>>>(to, to_row, from, from_row, n_rows, HS);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void head_gate_copy_(X* to, size_t to_row, const X* from, size_t from_row, size_t n_rows, int HS,
                                   const Device* dev) {
    constexpr int W = pack_width<X>();
    if (n_rows == 0) { return; }
    if (HS % W == 0 && pack_aligned(to, from)) {
        head_gate_copy_launch_<W>(to, to_row, from, from_row, n_rows, HS, dev);
    } else {
        head_gate_copy_launch_<1>(to, to_row, from, from_row, n_rows, HS, dev);
    }
}

template <typename X>
static inline void head_gate_split(X* q, const X* proj, int N, int H, int HS, const Device* dev) {
    head_gate_copy_(q, (size_t)HS, proj, (size_t)2 * HS, (size_t)N * H, HS, dev);
}

template <typename X>
static inline void head_gate_join(X* dproj, const X* dq, int N, int H, int HS, const Device* dev) {
    head_gate_copy_(dproj, (size_t)2 * HS, dq, (size_t)HS, (size_t)N * H, HS, dev);
}

template <int W, typename X>
static inline void head_gate_forward_launch_(X* out, const X* attention, const X* proj, size_t n_rows, int HS,
                                             const Device* dev) {
    const dim3 block = head_gate_block_(HS, W);
    const unsigned n = (unsigned)ceil_div((int64_t)n_rows, (int64_t)block.y);
    head_gate_forward_kernel<W><<<n, block, 0, dev->stream>>>(out, attention, proj, n_rows, HS);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void head_gate_forward(X* out, const X* attention, const X* proj, int N, int H, int HS,
                                     const Device* dev) {
    constexpr int W = pack_width<X>();
    if (N == 0) { return; }
    if (HS % W == 0 && pack_aligned(out, attention, proj)) {
        head_gate_forward_launch_<W>(out, attention, proj, (size_t)N * H, HS, dev);
    } else {
        head_gate_forward_launch_<1>(out, attention, proj, (size_t)N * H, HS, dev);
    }
}

template <int W, typename X>
static inline void head_gate_backward_launch_(X* dattention, X* dproj, const X* dout, const X* attention,
                                              const X* proj, size_t n_rows, int HS, const Device* dev) {
    const dim3 block = head_gate_block_(HS, W);
    const unsigned n = (unsigned)ceil_div((int64_t)n_rows, (int64_t)block.y);
    head_gate_backward_kernel<W><<<n, block, 0, dev->stream>>>(dattention, dproj, dout, attention, proj, n_rows, HS);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void head_gate_backward(X* dattention, X* dproj, const X* dout, const X* attention, const X* proj, int N,
                                      int H, int HS, const Device* dev) {
    constexpr int W = pack_width<X>();
    if (N == 0) { return; }
    if (HS % W == 0 && pack_aligned(dattention, dproj, dout, attention, proj)) {
        head_gate_backward_launch_<W>(dattention, dproj, dout, attention, proj, (size_t)N * H, HS, dev);
    } else {
        head_gate_backward_launch_<1>(dattention, dproj, dout, attention, proj, (size_t)N * H, HS, dev);
    }
}
#endif
#endif  // LLMC_HEAD_GATE_H
