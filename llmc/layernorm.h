/*
LayerNorm: out = (inp - mean) * rstd * weight + bias, mean and variance over each row of C channels, rstd = 1/sqrt(var + 1e-5).
    inp, out (N, C)   weight, bias (C)   mean, rstd (N), kept for backward
Backward, with xhat = (inp - mean) * rstd and g = weight * dout (derived in doc/layernorm.md):
    dinp    += (g - mean(g) - xhat * mean(g * xhat)) * rstd    (N, C)  added: inp is the residual stream
    dweight  = sum over n of xhat * dout                       (C)     written, one call is one leaf
    dbias    = sum over n of dout                              (C)     written
Cost:   memory bound: forward moves 2*N*C floats, backward 6*N*C. Judge it in GB/s.
Error:  chains of C sums: |mean| error <= C * 2^-24 * mean(|inp|).
Order:  row sums chain over c from 0; dweight and dbias chain over n from 0. Lanes hold neighbouring rows for the first and
        neighbouring channels for the second.
Source: Ba, Kiros & Hinton 2016, arXiv:1607.06450; spec gpt2.md sections 3 and 4
*/
#ifndef LLMC_LAYERNORM_H
#define LLMC_LAYERNORM_H
#include "device.h"  // Device
#include "vec.h"     // vfloat, v_load, v_fill, v_transpose
#include <math.h>

#define LAYERNORM_EPS 1e-5f

// ---- plain C: read this first; it defines every bit ----

static inline void layernorm_forward_ref(float* out, float* mean, float* rstd, const float* inp, const float* weight,
                                         const float* bias, int N, int C) {
    for (int n = 0; n < N; n++) {
        const float* x = inp + (size_t)n * C;
        float sum = 0.0f, sum2 = 0.0f;
        for (int c = 0; c < C; c++) { sum += x[c]; }
        float m = sum / (float)C;
        for (int c = 0; c < C; c++) { sum2 += (x[c] - m) * (x[c] - m); }
        float s = 1.0f / sqrtf(sum2 / (float)C + LAYERNORM_EPS);
        for (int c = 0; c < C; c++) { out[(size_t)n * C + c] = s * (x[c] - m) * weight[c] + bias[c]; }
        mean[n] = m;
        rstd[n] = s;
    }
}

// dinp of one row
static inline void layernorm_backward_row_ref(float* dinp, const float* dout, const float* inp, const float* weight, float mean,
                                              float rstd, int C) {
    float sum_g = 0.0f, sum_gx = 0.0f;
    for (int c = 0; c < C; c++) { sum_g += weight[c] * dout[c]; }
    for (int c = 0; c < C; c++) { sum_gx += (weight[c] * dout[c]) * ((inp[c] - mean) * rstd); }
    float mean_g = sum_g / (float)C, mean_gx = sum_gx / (float)C;
    for (int c = 0; c < C; c++) { dinp[c] += (weight[c] * dout[c] - mean_g - (inp[c] - mean) * rstd * mean_gx) * rstd; }
}

static inline void layernorm_backward_ref(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                                          const float* weight, const float* mean, const float* rstd, int N, int C) {
    for (int c = 0; c < C; c++) { dweight[c] = dbias[c] = 0.0f; }
    for (int n = 0; n < N; n++) {
        const float* x = inp + (size_t)n * C;
        const float* d = dout + (size_t)n * C;
        layernorm_backward_row_ref(dinp + (size_t)n * C, d, x, weight, mean[n], rstd[n], C);
        for (int c = 0; c < C; c++) {
            dweight[c] += (x[c] - mean[n]) * rstd[n] * d[c];
            dbias[c] += d[c];
        }
    }
}

// ---- fast C: VLANES rows side by side ----

// the square of VLANES rows x VLANES channels at x, turned: lane r of column c is x[r][c]
static inline void layernorm_columns_(vfloat columns[VLANES], const float* x, int C) {
    for (int r = 0; r < VLANES; r++) { columns[r] = v_load(x + (size_t)r * C); }
    v_transpose(columns);
}

// VLANES values of one channel, one per row; beyond the last whole square they are gathered one by one
static inline vfloat layernorm_column_(const float* x, int C, int c) {
    vfloat column;
    for (int r = 0; r < VLANES; r++) { column[r] = x[(size_t)r * C + c]; }
    return column;
}

// mean and rstd of VLANES rows
static inline void layernorm_statistics_(float* mean, float* rstd, const float* x, int C) {
    vfloat sum = v_fill(0.0f), sum2 = v_fill(0.0f), columns[VLANES];
    int c_squares = C / VLANES * VLANES;
    for (int c = 0; c < c_squares; c += VLANES) {
        layernorm_columns_(columns, x + c, C);
        for (int i = 0; i < VLANES; i++) { sum += columns[i]; }
    }
    for (int c = c_squares; c < C; c++) { sum += layernorm_column_(x, C, c); }
    vfloat m = sum / v_fill((float)C);
    for (int c = 0; c < c_squares; c += VLANES) {
        layernorm_columns_(columns, x + c, C);
        for (int i = 0; i < VLANES; i++) { sum2 += (columns[i] - m) * (columns[i] - m); }
    }
    for (int c = c_squares; c < C; c++) {
        vfloat column = layernorm_column_(x, C, c);
        sum2 += (column - m) * (column - m);
    }
    for (int r = 0; r < VLANES; r++) {
        mean[r] = m[r];
        rstd[r] = 1.0f / sqrtf(sum2[r] / (float)C + LAYERNORM_EPS);
    }
}

static inline void layernorm_forward(float* out, float* mean, float* rstd, const float* inp, const float* weight,
                                     const float* bias, int N, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const float* x = inp + (size_t)first * C;
        float* y = out + (size_t)first * C;
        if (first + VLANES > N) {
            layernorm_forward_ref(y, mean + first, rstd + first, x, weight, bias, N - first, C);
            continue;
        }
        layernorm_statistics_(mean + first, rstd + first, x, C);
        for (int n = first; n < first + VLANES; n++, x += C, y += C) {
            float m = mean[n], s = rstd[n];
            #pragma omp simd
            for (int c = 0; c < C; c++) { y[c] = s * (x[c] - m) * weight[c] + bias[c]; }
        }
    }
}

// mean of g and of g * xhat for VLANES rows
static inline void layernorm_gradient_means_(float* mean_g, float* mean_gx, const float* d, const float* x, const float* weight,
                                             const float* mean, const float* rstd, int C) {
    vfloat m = v_load(mean), s = v_load(rstd), sum_g = v_fill(0.0f), sum_gx = v_fill(0.0f);
    vfloat x_columns[VLANES], d_columns[VLANES];
    int c_squares = C / VLANES * VLANES;
    for (int c = 0; c < c_squares; c += VLANES) {
        layernorm_columns_(x_columns, x + c, C);
        layernorm_columns_(d_columns, d + c, C);
        for (int i = 0; i < VLANES; i++) {
            vfloat g = v_fill(weight[c + i]) * d_columns[i];
            sum_g += g;
            sum_gx += g * ((x_columns[i] - m) * s);
        }
    }
    for (int c = c_squares; c < C; c++) {
        vfloat g = v_fill(weight[c]) * layernorm_column_(d, C, c);
        sum_g += g;
        sum_gx += g * ((layernorm_column_(x, C, c) - m) * s);
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
                                                const float* mean, const float* rstd, int N, int C, int first, int last) {
    for (int c = first; c < last; c++) { dweight[c] = dbias[c] = 0.0f; }
    for (int n = 0; n < N; n++) {
        const float* x = inp + (size_t)n * C;
        const float* d = dout + (size_t)n * C;
        float m = mean[n], s = rstd[n];
        #pragma omp simd
        for (int c = first; c < last; c++) {
            dweight[c] += (x[c] - m) * s * d[c];
            dbias[c] += d[c];
        }
    }
}

static inline void layernorm_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                                      const float* weight, const float* mean, const float* rstd, int N, int C, const Device* dev) {
    (void)dev;
    const int width = 128;
    #pragma omp parallel for
    for (int first = 0; first < C; first += width) {
        layernorm_backward_channels_(dweight, dbias, dout, inp, mean, rstd, N, C, first, first + width < C ? first + width : C);
    }
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
#endif  // LLMC_LAYERNORM_H
