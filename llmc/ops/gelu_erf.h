/*
GELU as it is defined: out = x * Phi(x), Phi the normal distribution, 0.5 * (1 + erf(x / sqrt(2))). gelu.h has the form
with tanh, which is another function.
    inp, out (n)   any shape
Backward: dinp = dout * (Phi(x) + x * exp(-x^2 / 2) / sqrt(2 pi)), written; dinp may be dout.
Cost:   bound by arithmetic on a CPU: one erf forward, one exponential more backward. On a GPU, fast: memory bound, 2
        elements moved forward and 3 backward; not measured on a GPU yet.
Error:  x / sqrt(2) is rounded twice, which erf enlarges by at most 0.5: out is within 4 * 2^-24 |x|; the slope within
        8 * 2^-24. Fast kernels have the hardware's exponential, and CUDA's erff, of 2 units in the last place: within
        2^-20 (1 + |x|). Storing bf16 adds 2^-8 of the result.
Order:  element by element, expressions as written.
Source: Hendrycks & Gimpel 2016, arXiv:1606.08415
*/
#ifndef LLMC_GELU_ERF_H
#define LLMC_GELU_ERF_H
#include "../core/device.h"  // Device
#include "../core/fmath.h"   // fm_erf, fm_exp, FM_FUNCTION
#include "../core/kernel.h"  // load_floats, store_floats, grid_first, grid_step, grid_blocks, pack_part

#define GELU_ERF_HALF 0.707106769f    // 1 / sqrt(2), bits 3f3504f3
#define GELU_ERF_DENSITY 0.398942292f  // 1 / sqrt(2 pi), bits 3ecc422a

FM_FUNCTION float gelu_erf_forward_one(float x) { return 0.5f * x * (1.0f + fm_erf(x * GELU_ERF_HALF)); }

FM_FUNCTION float gelu_erf_slope_one(float x) {
    const float density = fm_exp(-0.5f * x * x) * GELU_ERF_DENSITY;
    return 0.5f * (1.0f + fm_erf(x * GELU_ERF_HALF)) + x * density;
}

static inline void gelu_erf_forward_ref(float* out, const float* inp, size_t n) {
    for (size_t i = 0; i < n; i++) { out[i] = gelu_erf_forward_one(inp[i]); }
}

static inline void gelu_erf_backward_ref(float* dinp, const float* inp, const float* dout, size_t n) {
    for (size_t i = 0; i < n; i++) { dinp[i] = gelu_erf_slope_one(inp[i]) * dout[i]; }
}

#ifndef __CUDACC__
static inline void gelu_erf_forward(float* out, const float* inp, size_t n, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) { out[i] = gelu_erf_forward_one(inp[i]); }
}

static inline void gelu_erf_backward(float* dinp, const float* inp, const float* dout, size_t n, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) { dinp[i] = gelu_erf_slope_one(inp[i]) * dout[i]; }
}
#else  // ---- CUDA ----

#ifdef EXACT
__device__ inline float gelu_erf_in_kernel_(float x) { return gelu_erf_forward_one(x); }
__device__ inline float gelu_erf_slope_in_kernel_(float x) { return gelu_erf_slope_one(x); }
#else
__device__ inline float gelu_erf_in_kernel_(float x) { return 0.5f * x * (1.0f + erff(x * GELU_ERF_HALF)); }
__device__ inline float gelu_erf_slope_in_kernel_(float x) {
    return 0.5f * (1.0f + erff(x * GELU_ERF_HALF)) + x * (kernel_exp(-0.5f * x * x) * GELU_ERF_DENSITY);
}
#endif

template <int W, typename X>
__global__ void gelu_erf_forward_kernel(X* out, const X* inp, size_t n) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        Pack<float, W> x = load_floats<W>(inp + i);
        for (int j = 0; j < W; j++) { x.x[j] = gelu_erf_in_kernel_(x.x[j]); }
        store_floats(out + i, x);
    }
}

template <int W, typename X>
__global__ void gelu_erf_backward_kernel(X* dinp, const X* inp, const X* dout, size_t n) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        Pack<float, W> x = load_floats<W>(inp + i), d = load_floats<W>(dout + i);
        for (int j = 0; j < W; j++) { x.x[j] = gelu_erf_slope_in_kernel_(x.x[j]) * d.x[j]; }
        store_floats(dinp + i, x);
    }
}

template <typename X>
static inline void gelu_erf_forward(X* out, const X* inp, size_t n, const Device* dev) {
    constexpr int W = pack_width<X>();
    size_t packed = pack_part(n, W, out, inp), rest = n - packed;
    if (packed) {
        gelu_erf_forward_kernel<W><<<grid_blocks(packed, W, dev), GRID_BLOCK, 0, dev->stream>>>(out, inp, packed);
    }
    if (rest) {
        gelu_erf_forward_kernel<1>
            <<<grid_blocks(rest, 1, dev), GRID_BLOCK, 0, dev->stream>>>(out + packed, inp + packed, rest);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void gelu_erf_backward(X* dinp, const X* inp, const X* dout, size_t n, const Device* dev) {
    constexpr int W = pack_width<X>();
    size_t packed = pack_part(n, W, dinp, inp, dout), rest = n - packed;
    if (packed) {
        gelu_erf_backward_kernel<W>
            <<<grid_blocks(packed, W, dev), GRID_BLOCK, 0, dev->stream>>>(dinp, inp, dout, packed);
    }
    if (rest) {
        gelu_erf_backward_kernel<1><<<grid_blocks(rest, 1, dev), GRID_BLOCK, 0, dev->stream>>>(
            dinp + packed, inp + packed, dout + packed, rest);
    }
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_GELU_ERF_H
