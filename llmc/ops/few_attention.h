/*
Attention of attention.h for queries one by one, on CPUs: of few new positions against a cache, as generation has them,
and where a window hides keys. attention.h's strips give each lane a query, pack the keys for them and go over all keys
before the strip; here lanes hold keys, then channels, and what is read is what a query sees, where it lies, once for
all heads of its group.
    few_attention_forward, few_attention_backward    what attention.h's plain loops compute, to the last bit; 0: nothing
                            is done, for strips are the faster way
Cost:   4*HS flops for each query and key it sees, backward 10*HS. Of a long cache 8*HS bytes of keys and values for
        each query of FEW_HEADS heads of a group, a matter of GB/s. Backward reads and writes dk and dv of a window for
        each query: it should stay in the second cache.
Order:  attention.h's: a score chains over channels, a softmax and an output over keys, each ascending; dk and dv over
        the heads of a group and in each over queries.
*/
#ifndef LLMC_FEW_ATTENTION_H
#define LLMC_FEW_ATTENTION_H
#ifndef __CUDACC__
#include "../core/device.h"   // device_workspace, thread_number
#include "attention_shape.h"  // AttentionShape
#include "gemm.h"             // gemm_few_task_: scores are a product of few rows with a matrix turned

enum {
    FEW_HEADS = GEMM_FEW_STORED,  // that read keys and values together
    FEW_QUERIES = 8,              // more of them are a strip of attention.h
    FEW_BLOCK = 64,               // queries of a task
    FEW_AHEAD = 8                 // keys between the values that are used and those that are asked for
};

// out (n, T): of n rows x the dot products with rows first..t of y, which are as far apart as those of k and v
static inline void few_attention_dots_(float* out, const float* x, const float* y, int n, int first, int t,
                                       const AttentionShape* s) {
    if (first > t) { return; }
    const GemmPart part = {out, NULL, 0, gemm_matrix(x, (size_t)s->HS), gemm_transposed(y, s->kv_row), n, s->HS, NULL,
                           0, 0, 0};
    gemm_few_task_(&part, (size_t)s->T, first, t + 1, first);
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

// out (n, HS) = weights (n, T) of rows first..t of y, times these
static inline void few_attention_gather_(float* out, const float* weights, const float* y, int n, int first, int t,
                                         const AttentionShape* s) {
    memset(out, 0, sizeof(float) * n * s->HS);
    for (int u = first; u <= t; u++) {
        const float* y_u = y + u * s->kv_row;
        for (int i = 0; i < s->HS; i += GEMM_LINE) { __builtin_prefetch(y_u + FEW_AHEAD * s->kv_row + i); }
        for (int h = 0; h < n; h++) {
            float *o = out + (size_t)h * s->HS, w = weights[(size_t)h * s->T + u];
            #pragma omp simd
            for (int i = 0; i < s->HS; i++) { o[i] = madd(w, y_u[i], o[i]); }
        }
    }
}

// dy_u += weights[u] * x for rows first..t
static inline void few_attention_scatter_(float* dy, const float* weights, const float* x, int first, int t,
                                          const AttentionShape* s) {
    for (int u = first; u <= t; u++) {
        float *d = dy + u * s->kv_row, w = weights[u];
        #pragma omp simd
        for (int i = 0; i < s->HS; i++) { d[i] = madd(w, x[i], d[i]); }
    }
}

// query t of all heads that read head g of k and v. weights: FEW_HEADS * T floats of this thread
static inline void few_attention_query_(float* out, float* max, float* inv, const float* q, const float* k,
                                        const float* v, float* weights, int b, int g, int t, const AttentionShape* s) {
    const int group = s->NH / s->NKV, first = attention_first_key(s, t), last = attention_last_key(s, t);
    const size_t kv = attention_at_kv(s, b, g, 0);
    for (int h = g * group; h < (g + 1) * group; h += FEW_HEADS) {
        const int n = gemm_min_(FEW_HEADS, (g + 1) * group - h);
        few_attention_dots_(weights, q + attention_at_q(s, b, h, t), k + kv, n, first, last, s);
        few_attention_softmax_(weights, max, inv, attention_at_row(s, b, h, t), n, first, last, s);
        few_attention_gather_(out + attention_at_out(s, b, h, t), weights, v + kv, n, first, last, s);
    }
}

static inline int few_attention_forward(float* out, float* max, float* inv, const float* q, const float* k,
                                        const float* v, const AttentionShape* s, const Device* dev) {
    const int n_queries = attention_queries(s), n_blocks = (int)ceil_div(n_queries, FEW_BLOCK);
    if (s->window == 0 && n_queries > FEW_QUERIES) { return 0; }
    float* workspace = device_workspace(dev, sizeof(float) * dev->n_threads * FEW_HEADS * s->T);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < s->B * s->NKV * n_blocks; task++) {
        const int b = task / n_blocks / s->NKV, g = task / n_blocks % s->NKV;
        const int begin = s->t0 + task % n_blocks * FEW_BLOCK, end = gemm_min_(begin + FEW_BLOCK, s->T);
        float* weights = workspace + (size_t)thread_number() * FEW_HEADS * s->T;
        for (int t = begin; t < end; t++) { few_attention_query_(out, max, inv, q, k, v, weights, b, g, t, s); }
    }
    return 1;
}

// Query t of head h, which reads head g. dk and dv go on from the queries and heads before. given: D of all keys, or
// NULL. row (2, T): scratch
static inline void few_attention_backward_query_(float* dq, float* dk, float* dv, const float* dout, const float* given,
                                                 const float* max, const float* inv, const float* q, const float* k,
                                                 const float* v, float* row, int b, int g, int h, int t,
                                                 const AttentionShape* s) {
    const int first = attention_first_key(s, t), last = attention_last_key(s, t);
    const size_t kv = attention_at_kv(s, b, g, 0), at = attention_at_q(s, b, h, t);
    const float *d = dout + attention_at_out(s, b, h, t), most = max[attention_at_row(s, b, h, t)],
                one = inv[attention_at_row(s, b, h, t)];
    float *att = row, *ds = row + s->T, D = 0.0f;
    few_attention_dots_(att, q + at, k + kv, 1, first, last, s);
    few_attention_dots_(ds, d, v + kv, 1, first, last, s);  // datt
    #pragma omp simd
    for (int u = first; u <= last; u++) { att[u] = fm_exp(att[u] * s->scale - most) * one; }
    for (int u = first; u <= last; u++) { D = madd(att[u], ds[u], D); }
    D = given ? given[attention_at_row(s, b, h, t)] : D;
    for (int u = first; u <= last; u++) { ds[u] = att[u] * (ds[u] - D) * s->scale; }
    few_attention_gather_(dq + at, ds, k + kv, 1, first, last, s);
    few_attention_scatter_(dk + kv, ds, q + at, first, last, s);
    few_attention_scatter_(dv + kv, att, d, first, last, s);
}

static inline int few_attention_backward(float* dq, float* dk, float* dv, const float* dout, const float* given,
                                         const float* max, const float* inv, const float* q, const float* k,
                                         const float* v, const AttentionShape* s, const Device* dev) {
    const int group = s->NH / s->NKV;
    if (s->window == 0) { return 0; }
    float* workspace = device_workspace(dev, sizeof(float) * dev->n_threads * 2 * s->T);
    #pragma omp parallel for schedule(dynamic)
    for (int task = 0; task < s->B * s->NKV; task++) {
        const int b = task / s->NKV, g = task % s->NKV;
        float* row = workspace + (size_t)thread_number() * 2 * s->T;
        for (int u = 0; u < s->keys; u++) {
            memset(dk + attention_at_kv(s, b, g, u), 0, sizeof(float) * s->HS);
            memset(dv + attention_at_kv(s, b, g, u), 0, sizeof(float) * s->HS);
        }
        for (int i = 0; i < group * attention_queries(s); i++) {  // a head after the other
            const int h = g * group + i / attention_queries(s), t = s->t0 + i % attention_queries(s);
            few_attention_backward_query_(dq, dk, dv, dout, given, max, inv, q, k, v, row, b, g, h, t, s);
        }
    }
    return 1;
}
#endif  // __CUDACC__
#endif  // LLMC_FEW_ATTENTION_H
