/*
RMSNorm: out = inp * rstd * weight, rstd = 1/sqrt(mean(inp^2) + eps) over each row of C channels.
    inp, out (N, C)   weight (C)   rstd (N) float, kept for backward
Backward, with xhat = inp * rstd and g = dout * weight (derived in doc/rmsnorm.md). NULL for either: nobody asks for it,
and nothing is done for it
    dinp    += rstd * (g - xhat * mean(g * xhat))   (N, C)  added: inp is the residual stream
    dweight  = sum over n of dout * xhat            (C)     written, one call is one leaf
Cost:   memory bound: forward moves 2*N*C floats, backward 6*N*C. Judge it in GB/s: one thread has 30 and 35 where
        memcpy has 32.
Error:  a chain of C squares, then 4 roundings: |rstd| error <= (C + 8) * 2^-25 |rstd|.
Order:  row sums chain over c from 0, dweight chains over n from 0; lanes hold neighbouring rows for the first and
        neighbouring channels for the second.
Source: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4
*/
#ifndef LLMC_RMSNORM_H
#define LLMC_RMSNORM_H
#include "../core/device.h"  // Device
#include <math.h>
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_load, v_load_columns, v_fill
#endif

// ---- plain C: read this first; it defines every bit ----

static inline void rmsnorm_forward_ref(float* out, float* rstd, const float* inp, const float* weight, float eps, int N,
                                       int C) {
    for (int n = 0; n < N; n++) {
        const float* x = inp + (size_t)n * C;
        float sum = 0.0f;
        for (int c = 0; c < C; c++) { sum = madd(x[c], x[c], sum); }
        float s = 1.0f / sqrtf(sum / (float)C + eps);
        for (int c = 0; c < C; c++) { out[(size_t)n * C + c] = x[c] * s * weight[c]; }
        rstd[n] = s;
    }
}

// dinp of one row
static inline void rmsnorm_backward_row_ref(float* dinp, const float* dout, const float* inp, const float* weight,
                                            float rstd, int C) {
    float sum = 0.0f;
    for (int c = 0; c < C; c++) { sum = madd(dout[c] * weight[c], inp[c] * rstd, sum); }
    float mean = sum / (float)C;
    for (int c = 0; c < C; c++) { dinp[c] += rstd * (dout[c] * weight[c] - inp[c] * rstd * mean); }
}

static inline void rmsnorm_backward_ref(float* dinp, float* dweight, const float* dout, const float* inp,
                                        const float* weight, const float* rstd, int N, int C) {
    for (size_t n = 0; dinp && n < (size_t)N; n++) {
        rmsnorm_backward_row_ref(dinp + n * C, dout + n * C, inp + n * C, weight, rstd[n], C);
    }
    for (int c = 0; dweight && c < C; c++) {
        dweight[c] = 0.0f;
        for (size_t n = 0; n < (size_t)N; n++) {
            dweight[c] = madd(dout[n * C + c] * inp[n * C + c], rstd[n], dweight[c]);
        }
    }
}

#ifndef __CUDACC__  // ---- fast C: the sums of VLANES rows side by side ----

// rstd of VLANES rows. The channels beyond the last whole square follow one by one
static inline void rmsnorm_statistics_(float* rstd, const float* x, float eps, int C) {
    vfloat sum = v_fill(0.0f), columns[VLANES];
    int c_squares = C / VLANES * VLANES;
    for (int c = 0; c < c_squares; c += VLANES) {
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
            for (int c = 0; c < C; c++) { y[c] = x[c] * s * weight[c]; }
        }
    }
}

// mean of g * xhat for VLANES rows
static inline void rmsnorm_gradient_means_(float* means, const float* d, const float* x, const float* weight,
                                           const float* rstd, int C) {
    vfloat s = v_load(rstd), sum = v_fill(0.0f), x_columns[VLANES], d_columns[VLANES];
    int c_squares = C / VLANES * VLANES;
    for (int c = 0; c < c_squares; c += VLANES) {
        v_load_columns(x_columns, x + c, (size_t)C);
        v_load_columns(d_columns, d + c, (size_t)C);
        for (int i = 0; i < VLANES; i++) {
            sum = v_madd(d_columns[i] * v_fill(weight[c + i]), x_columns[i] * s, sum);
        }
    }
    for (int r = 0; r < VLANES; r++, x += C, d += C) {
        float row_sum = sum[r];
        for (int c = c_squares; c < C; c++) { row_sum = madd(d[c] * weight[c], x[c] * rstd[r], row_sum); }
        means[r] = row_sum / (float)C;
    }
}

// dinp of VLANES rows
static inline void rmsnorm_backward_rows_(float* dinp, const float* dout, const float* inp, const float* weight,
                                          const float* rstd, int C) {
    float means[VLANES];
    rmsnorm_gradient_means_(means, dout, inp, weight, rstd, C);
    for (int r = 0; r < VLANES; r++, dinp += C, dout += C, inp += C) {
        float s = rstd[r], mean = means[r];
        #pragma omp simd
        for (int c = 0; c < C; c++) { dinp[c] += s * (dout[c] * weight[c] - inp[c] * s * mean); }
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
                                           const float* rstd, int N, int C) {
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        size_t row = (size_t)first * C;
        if (first + VLANES <= N) {
            rmsnorm_backward_rows_(dinp + row, dout + row, inp + row, weight, rstd + first, C);
            continue;
        }
        for (int n = first; n < N; n++, row += C) {
            rmsnorm_backward_row_ref(dinp + row, dout + row, inp + row, weight, rstd[n], C);
        }
    }
}

static inline void rmsnorm_backward(float* dinp, float* dweight, const float* dout, const float* inp,
                                    const float* weight, const float* rstd, int N, int C, const Device* dev) {
    (void)dev;
    if (dweight) { rmsnorm_backward_weight_(dweight, dout, inp, rstd, N, C); }
    if (dinp) { rmsnorm_backward_input_(dinp, dout, inp, weight, rstd, N, C); }
}
#endif
#endif  // LLMC_RMSNORM_H
