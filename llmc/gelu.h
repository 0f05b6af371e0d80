/*
GELU, tanh form: out = 0.5 * x * (1 + tanh(k * (x + 0.044715 x^3))), k = sqrt(2/pi).
    inp, out (n)   any shape
Backward: dinp = dout * d out / d inp, written; dinp may be dout.
Cost:   about 1 ns per element and core: one tanh, vectorised (llmc/fmath.h); backward shares the exponential of tanh and cosh.
Order:  element by element, expressions as written. k is sqrtf of the float 2/pi, bits 3f4c4229, as in llm.c; a root taken
        in double and rounded afterwards is the next float, 3f4c422a.
Source: Hendrycks & Gimpel 2016, arXiv:1606.08415; spec gpt2.md sections 3 and 4; derived in doc/gelu.md
*/
#ifndef LLMC_GELU_H
#define LLMC_GELU_H
#include "device.h"  // Device
#include "fmath.h"   // fm_tanh, fm_tanh_cosh

#define GELU_K 0.797884524f  // bits 3f4c4229

static inline float gelu_forward_one(float x) {
    float cube = 0.044715f * x * x * x;
    return 0.5f * x * (1.0f + fm_tanh(GELU_K * (x + cube)));
}

// d gelu / dx: 0.5 (1 + tanh u) + 0.5 x sech^2(u) du/dx
static inline float gelu_slope_one(float x) {
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
#endif  // LLMC_GELU_H
