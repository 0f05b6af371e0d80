/*
L2 norm of q and k in the gated delta rule: out = inp * rstd, rstd = 1 / sqrt(sum of inp^2 + eps) over each row of C
channels, then times `scale`: 1/sqrt(C) for q, 1 for k. eps is added to the sum, not to the mean.
    inp, out (N, C)   rstd (N)  kept for backward   out may be inp where no backward follows
Backward, with dy = dout * scale and y = inp * rstd:
    dinp = rstd * (dy - y * sum(dy * y))   (N, C)   written
Cost:   memory bound: forward moves 2*N*C floats, backward 3*N*C. Each row is a scalar chain as yet.
Order:  sums chain over c from 0; each product and difference rounds. Threads share rows.
Source: spec qwen36.md 2.3 and 4.4
*/
#ifndef LLMC_L2NORM_H
#define LLMC_L2NORM_H
#include "../core/device.h"  // Device
#include "../core/madd.h"    // madd

static inline void l2norm_row_ref_(float* out, float* rstd, const float* x, float scale, float eps, int C) {
    float sum = 0.0f;
    for (int c = 0; c < C; c++) { sum = madd(x[c], x[c], sum); }
    const float s = 1.0f / sqrtf(sum + eps);
    for (int c = 0; c < C; c++) { out[c] = x[c] * s * scale; }
    *rstd = s;
}

static inline void l2norm_backward_row_ref_(float* dinp, const float* dout, const float* x, float rstd, float scale,
                                            int C) {
    float sum = 0.0f;
    for (int c = 0; c < C; c++) { sum = madd(dout[c] * scale, x[c] * rstd, sum); }
    for (int c = 0; c < C; c++) { dinp[c] = rstd * (dout[c] * scale - x[c] * rstd * sum); }
}

static inline void l2norm_forward(float* out, float* rstd, const float* inp, float scale, float eps, int N, int C,
                                  const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) { l2norm_row_ref_(out + (size_t)n * C, rstd + n, inp + (size_t)n * C, scale, eps, C); }
}

static inline void l2norm_backward(float* dinp, const float* dout, const float* inp, const float* rstd, float scale,
                                   int N, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const size_t at = (size_t)n * C;
        l2norm_backward_row_ref_(dinp + at, dout + at, inp + at, rstd[n], scale, C);
    }
}
#endif  // LLMC_L2NORM_H
