/*
Attention of attention.h for queries one by one, on CPUs: of few new positions against a cache, as generation has them,
and where a window hides keys. attention.h's strips give each lane a query, pack the keys for them and go over all keys
before the strip; here lanes hold keys, then channels, and what is read is what a query sees, where it lies, once for
all heads of its group.
    few_attention_group    every query of one head of k and v: out, max and inv, the bits of attention.h's plain loop
    few_attention_fits     is it the faster way?
Cost:   4*HS flops for each query and key it sees; 8*HS bytes of keys and values for each query of a group of at most
        FEW_HEADS heads, a matter of GB/s: 2 * FEW_HEADS * T floats of scratch are written and read beside them.
Order:  attention.h's: a score chains over channels, a softmax and an output over keys, each ascending.
*/
#ifndef LLMC_FEW_ATTENTION_H
#define LLMC_FEW_ATTENTION_H
#ifndef __CUDACC__
#include "attention_shape.h"  // AttentionShape
#include "gemm.h"             // gemm_few_task_: scores are a product of few rows with a matrix turned

enum {
    FEW_HEADS = GEMM_FEW_STORED,  // that read keys and values together
    FEW_QUERIES = 8,              // more of them are a strip of attention.h
    FEW_AHEAD = 8                 // keys between the values that are used and those that are asked for
};

static inline int few_attention_fits(const AttentionShape* s) {
    return s->window > 0 || attention_queries(s) <= FEW_QUERIES;
}

// scores (n, T) of n heads, and the keys first..t that the query sees, to weights
static inline void few_attention_softmax_(float* weights, float* max, float* inv, size_t row, int n, int first, int t,
                                          const AttentionShape* s) {
    for (int h = 0; h < n; h++) {
        float *w = weights + (size_t)h * s->T, most = -10000.0f, sum = 0.0f;
        for (int u = first; u <= t; u++) {
            w[u] *= s->scale;
            most = w[u] > most ? w[u] : most;
        }
        #pragma omp simd
        for (int u = first; u <= t; u++) { w[u] = fm_exp(w[u] - most); }
        for (int u = first; u <= t; u++) { sum += w[u]; }
        const float one = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int u = first; u <= t; u++) { w[u] *= one; }
        max[row + (size_t)h * attention_queries(s)] = most;
        inv[row + (size_t)h * attention_queries(s)] = one;
    }
}

// out (n, HS) = weights (n, T) of the keys first..t times their values
static inline void few_attention_gather_(float* out, const float* weights, const float* v, int n, int first, int t,
                                         const AttentionShape* s) {
    memset(out, 0, sizeof(float) * n * s->HS);
    for (int u = first; u <= t; u++) {
        const float* v_u = v + u * s->kv_row;
        for (int i = 0; i < s->HS; i += GEMM_LINE) { __builtin_prefetch(v_u + FEW_AHEAD * s->kv_row + i); }
        for (int h = 0; h < n; h++) {
            float *y = out + (size_t)h * s->HS, w = weights[(size_t)h * s->T + u];
            #pragma omp simd
            for (int i = 0; i < s->HS; i++) { y[i] = madd(w, v_u[i], y[i]); }
        }
    }
}

// weights: FEW_HEADS * T floats of this thread
static inline void few_attention_group(float* out, float* max, float* inv, const float* q, const float* k,
                                       const float* v, float* weights, int b, int g, const AttentionShape* s) {
    const int group = s->NH / s->NKV;
    const size_t kv = attention_at_kv(s, b, g, 0);
    for (int t = s->t0; t < s->T; t++) {
        const int first = attention_first_key(s, t);
        for (int h = g * group; h < (g + 1) * group; h += FEW_HEADS) {
            const int n = gemm_min_(FEW_HEADS, (g + 1) * group - h);
            const GemmPart scores = {weights, NULL, 0, gemm_matrix(q + attention_at_q(s, b, h, t), (size_t)s->HS),
                                     gemm_transposed(k + kv, s->kv_row), n, s->HS, NULL, 0, 0, 0};
            gemm_few_task_(&scores, (size_t)s->T, first, t + 1, first);
            few_attention_softmax_(weights, max, inv, attention_at_row(s, b, h, t), n, first, t, s);
            few_attention_gather_(out + attention_at_out(s, b, h, t), weights, v + kv, n, first, t, s);
        }
    }
}
#endif  // __CUDACC__
#endif  // LLMC_FEW_ATTENTION_H
