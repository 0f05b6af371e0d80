/*
Linear layer: out = inp * weight^T + bias.
    inp (N, C)   out (N, OC)   weight (OC, C), one row per output   bias (OC) or NULL   N = B*T positions
Backward (derived in doc/matmul.md):
    dinp    = dout * weight          (N, C)   written; NULL where nobody asks for it
    dweight = dout^T * inp           (OC, C)  written, not added to: one call is one leaf (doc/exactness.md rule 3)
    dbias   = sum over n of dout     (OC)     written; NULL where there is no bias
Cost:   compute bound: forward 2*N*C*OC flops, backward twice that. Judge it in GFLOP/s.
Error:  a plain chain of K float sums: |error| <= K * 2^-24 * (sum of |products|).
Order:  forward chains over c from the bias, dinp over oc from 0, dweight and dbias over n from 0, all ascending.
Source: Linnainmaa 1970 for the derivative; the fast product: llmc/gemm.h
*/
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H
#include "gemm.h"  // gemm, matrix, transposed, Device

// ---- plain C: read this first; it defines every bit ----

static inline void matmul_forward_ref(float* out, const float* inp, const float* weight, const float* bias, int N, int C, int OC) {
    for (size_t n = 0; n < (size_t)N; n++) {
        for (size_t oc = 0; oc < (size_t)OC; oc++) {
            float sum = bias ? bias[oc] : 0.0f;
            for (int c = 0; c < C; c++) { sum += inp[n * C + c] * weight[oc * C + c]; }
            out[n * OC + oc] = sum;
        }
    }
}

static inline void matmul_backward_ref(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                                       const float* weight, int N, int C, int OC) {
    for (size_t n = 0; dinp && n < (size_t)N; n++) {
        for (size_t c = 0; c < (size_t)C; c++) {
            float sum = 0.0f;
            for (size_t oc = 0; oc < (size_t)OC; oc++) { sum += dout[n * OC + oc] * weight[oc * C + c]; }
            dinp[n * C + c] = sum;
        }
    }
    for (size_t oc = 0; oc < (size_t)OC; oc++) {
        for (size_t c = 0; c < (size_t)C; c++) {
            float sum = 0.0f;
            for (size_t n = 0; n < (size_t)N; n++) { sum += dout[n * OC + oc] * inp[n * C + c]; }
            dweight[oc * C + c] = sum;
        }
    }
    for (size_t oc = 0; dbias && oc < (size_t)OC; oc++) {
        float sum = 0.0f;
        for (size_t n = 0; n < (size_t)N; n++) { sum += dout[n * OC + oc]; }
        dbias[oc] = sum;
    }
}

// ---- fast C: the same chains, many outputs at a time; a CUDA build gives the same names its kernels ----

static inline void matmul_forward(float* out, const float* inp, const float* weight, const float* bias, int N, int C, int OC,
                                  const Device* dev) {
    gemm(out, OC, bias, 0, matrix(inp, C), transposed(weight, C), N, OC, C, dev);
}

// dbias: lanes and threads hold neighbouring oc, every one runs down its own column
static inline void column_sums(float* sums, const float* x, int N, int OC, const Device* dev) {
    (void)dev;
    const int width = 64;
    #pragma omp parallel for
    for (int first = 0; first < OC; first += width) {
        float block[64] = {0};
        int n_valid = OC - first < width ? OC - first : width;
        for (size_t n = 0; n < (size_t)N; n++) {
            const float* row = x + n * OC + first;
            for (int i = 0; i < n_valid; i++) { block[i] += row[i]; }
        }
        memcpy(sums + first, block, sizeof(float) * n_valid);
    }
}

static inline void matmul_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                                   const float* weight, int N, int C, int OC, const Device* dev) {
    if (dinp) { gemm(dinp, C, NULL, 0, matrix(dout, OC), matrix(weight, C), N, C, OC, dev); }
    gemm(dweight, C, NULL, 0, transposed(dout, OC), matrix(inp, C), OC, C, N, dev);
    if (dbias) { column_sums(dbias, dout, N, OC, dev); }
}
#endif  // LLMC_MATMUL_H
