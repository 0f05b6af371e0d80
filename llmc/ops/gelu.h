/*
GELU, tanh form: out = 0.5 * x * (1 + tanh(k * (x + 0.044715 x^3))), k = sqrt(2/pi).
    inp, out (n)   any shape
Backward: dinp = dout * d out / d inp, written; dinp may be dout.
Cost:   about 1 ns per element and core: one tanh, vectorised (llmc/core/fmath.h); backward shares the exponential of
        tanh and cosh. On a GPU, fast: memory bound, 2 elements moved forward and 3 backward. Judge it in GB/s. EXACT:
        bound by arithmetic in double.
Error:  fast builds on a GPU take one exponential of the hardware, of y = 2|u|: relative error (2 + 3.2 y) * 2^-23 with
        that of u, and 4 * 2^-23 for the quotient. Where x > 0 that is 8 * 2^-23 |out|, where x < 0 at most 2 * 2^-23:
        the value is within 2^-20 (1 + |x|). The slope's second term is below 0.7 and (10 + 3.2 y) * 2^-23 relative:
        within 2^-18. Storing bf16 adds 2^-8 of the result.
Order:  element by element, expressions as written. k is sqrtf of the float 2/pi, bits 3f4c4229, as in llm.c; a root
        taken in double and rounded afterwards is the next float, 3f4c422a.
Source: Hendrycks & Gimpel 2016, arXiv:1606.08415; derived in doc/gelu.md
*/
#ifndef LLMC_GELU_H
#define LLMC_GELU_H
#include "../core/device.h"  // Device
#include "../core/fmath.h"   // fm_tanh, fm_tanh_cosh, FM_FUNCTION
#include "../core/kernel.h"  // load_floats, store_floats, grid_first, grid_step, grid_blocks, pack_part

#define GELU_K 0.797884524f  // bits 3f4c4229

FM_FUNCTION float gelu_forward_one(float x) {
    float cube = 0.044715f * x * x * x;
    return 0.5f * x * (1.0f + fm_tanh(GELU_K * (x + cube)));
}

// d gelu / dx: 0.5 (1 + tanh u) + 0.5 x sech^2(u) du/dx
FM_FUNCTION float gelu_slope_one(float x) {
    float cube = 0.044715f * x * x * x;
    float u = GELU_K * (x + cube);
    float tanh_u, cosh_u;
    fm_tanh_cosh(u, &tanh_u, &cosh_u);
    float sech2 = 1.0f / (cosh_u * cosh_u);  // 0 once the square overflows, as it should be
    return 0.5f * (1.0f + tanh_u) + x * 0.5f * sech2 * GELU_K * (1.0f + 3.0f * 0.044715f * x * x);
}

static inline void gelu_forward_ref(float* out, const float* inp, size_t n) {
    for (size_t i = 0; i < n; i++) { out[i] = gelu_forward_one(inp[i]); }
}

static inline void gelu_backward_ref(float* dinp, const float* inp, const float* dout, size_t n) {
    for (size_t i = 0; i < n; i++) { dinp[i] = gelu_slope_one(inp[i]) * dout[i]; }
}

#ifndef __CUDACC__
static inline void gelu_forward(float* out, const float* inp, size_t n, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) { out[i] = gelu_forward_one(inp[i]); }
}

static inline void gelu_backward(float* dinp, const float* inp, const float* dout, size_t n, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) { dinp[i] = gelu_slope_one(inp[i]) * dout[i]; }
}
#else  // ---- CUDA ----

#ifdef EXACT
__device__ inline float gelu_in_kernel_(float x) { return gelu_forward_one(x); }
__device__ inline float gelu_slope_in_kernel_(float x) { return gelu_slope_one(x); }
#else
// With e = e^(-2|u|) <= 1 the halves 0.5 (1 +- tanh|u|) are 1 / (1 + e) and e / (1 + e): nothing overflows, nothing
// cancels
__device__ inline void gelu_halves_(float x, float* larger, float* smaller) {
    float e = kernel_exp(-2.0f * fabsf(GELU_K * (x + 0.044715f * x * x * x)));
    *larger = __fdividef(1.0f, 1.0f + e);
    *smaller = e * *larger;
}

__device__ inline float gelu_in_kernel_(float x) {
    float larger, smaller;
    gelu_halves_(x, &larger, &smaller);
    return x * (x > 0.0f ? larger : smaller);
}

// 0.5 / cosh^2 u = 0.5 (1 - tanh^2 u) is twice the product of the halves
__device__ inline float gelu_slope_in_kernel_(float x) {
    float larger, smaller;
    gelu_halves_(x, &larger, &smaller);
    return (x > 0.0f ? larger : smaller) + x * (2.0f * larger * smaller) * GELU_K * (1.0f + 3.0f * 0.044715f * x * x);
}
#endif

template <int W, typename X>
__global__ void gelu_forward_kernel(X* out, const X* inp, size_t n) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        Pack<float, W> x = load_floats<W>(inp + i);
        for (int j = 0; j < W; j++) { x.x[j] = gelu_in_kernel_(x.x[j]); }
        store_floats(out + i, x);
    }
}

template <int W, typename X>
__global__ void gelu_backward_kernel(X* dinp, const X* inp, const X* dout, size_t n) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        Pack<float, W> x = load_floats<W>(inp + i), d = load_floats<W>(dout + i);
        for (int j = 0; j < W; j++) { x.x[j] = gelu_slope_in_kernel_(x.x[j]) * d.x[j]; }
        store_floats(dinp + i, x);
    }
}

template <typename X>
static inline void gelu_forward(X* out, const X* inp, size_t n, const Device* dev) {
    constexpr int W = pack_width<X>();
    size_t packed = pack_part(n, W, out, inp), rest = n - packed;
    if (packed) {
        gelu_forward_kernel<W><<<grid_blocks(packed, W, dev), GRID_BLOCK, 0, dev->stream>>>(out, inp, packed);
    }
    if (rest) {
        gelu_forward_kernel<1>
            <<<grid_blocks(rest, 1, dev), GRID_BLOCK, 0, dev->stream>>>(out + packed, inp + packed, rest);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void gelu_backward(X* dinp, const X* inp, const X* dout, size_t n, const Device* dev) {
    constexpr int W = pack_width<X>();
    size_t packed = pack_part(n, W, dinp, inp, dout), rest = n - packed;
    if (packed) {
        gelu_backward_kernel<W><<<grid_blocks(packed, W, dev), GRID_BLOCK, 0, dev->stream>>>(dinp, inp, dout, packed);
    }
    if (rest) {
        gelu_backward_kernel<1><<<grid_blocks(rest, 1, dev), GRID_BLOCK, 0, dev->stream>>>(dinp + packed, inp + packed,
                                                                                         dout + packed, rest);
    }
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_GELU_H
