/*
Causal self-attention: out_t = sum over u <= t of att_t[u] * v_u, att_t = softmax over u <= t of (q_t . k_u) / sqrt(HS).
    qkv (B, T, 3C)  q, then k, then v; head h owns columns h*HS .. h*HS+HS-1 of each, HS = C / NH
    out (B, T-t0, C), max, inv (B, NH, T-t0)  of the queries t0..T-1: the result, the largest score and 1 / sum of
                    exponentials: att_t[u] = exp(score - max) * inv
    t0  first query: 0 in training, where backward rebuilds att from max and inv, so that no (T, T) matrix is ever kept;
        in generation the rows of qkv before t0 are the key-value cache
Backward (derived in doc/attention.md): dqkv written, with
    datt[u] = v_u . dout_t      D = sum over u of att[u] * datt[u]      ds[u] = att[u] * (datt[u] - D) / sqrt(HS)
    dq_t = sum over u of ds_t[u] * k_u    dk_u = sum over t >= u of ds_t[u] * q_t    dv_u = same of att_t[u] * dout_t
    out of forward is read by the tensor cores' D = dout_t . out_t alone
grouped_attention_forward, grouped_attention_backward: the same for any AttentionShape: q, k and v apart, several heads
    of q that share one of k and v, a sliding window, another scale. dk and dv of a head are sums over the query heads
    of its group. On a GPU also rows of several documents, in one launch.
block_attention_backward: of queries whose keys come in several blocks (attention_merge.h): max and inv are those of
    all their keys, and so is D, which is given: dq, dk and dv are what this block adds.
Cost:   compute bound for long T: forward 2*B*T*T*C flops, backward 2.5 times that: it rebuilds the scores.
        Memory beside the tensors: three (T, TILE_N) strips and four packed (T, HS) operands per thread.
        bf16 on a GPU: tensor cores (flash_attention.h; one query of many keys: split_attention.h). float, and what
        those do not take: a warp per query and per key, with a multiply and an add per float loaded, and 2*(T + HS)
        floats of scratch for each of 48 warps per multiprocessor.
Order:  every sum above chains ascending from 0, products by madd, in dk and dv over the heads of the group and in each
        over t; the score is its finished chain times the scale; max starts at -10000.
Source: Vaswani et al. 2017, arXiv:1706.03762; D as in Dao et al. 2022, arXiv:2205.14135. Groups: Ainslie et al. 2023,
        arXiv:2305.13245. We multiply by the scale once per weight, in ds, where upstream does so once per element of dq
        and dk; its order, quadratic in T, is what the parity build (SYSTEM_LIBM) computes. Slower and faster kernels:
        dev/cuda/attention.cu
*/
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H
#include "../core/kernel.h"   // in a CUDA build: row_add, kernel_exp
#include "attention_shape.h"  // AttentionShape
#include "few_attention.h"    // few_attention_forward, few_attention_backward: generation, windows
#include "gemm.h"             // gemm_pack_, gemm_panel_, TILE_M, TILE_N
#include <assert.h>

// ---- plain C: read this first; it defines every bit ----

// scores and weights of query t: preatt, att (T), both 0 where it does not see a key
static inline void attention_row_ref(float* preatt, float* att, float* max, float* inv, const float* q, const float* k,
                                     int t, const AttentionShape* s) {
    int first = attention_first_key(s, t), last = attention_last_key(s, t);
    float sum = 0.0f;
    *max = -10000.0f;
    for (int u = 0; u < s->T; u++) {
        preatt[u] = att[u] = 0.0f;
        if (u < first || u > last) { continue; }
        float dot = 0.0f;
        for (int i = 0; i < s->HS; i++) { dot = madd(q[i], k[u * s->kv_row + i], dot); }
        preatt[u] = dot * s->scale;
        *max = preatt[u] > *max ? preatt[u] : *max;
    }
    for (int u = first; u <= last; u++) {
        att[u] = fm_exp(preatt[u] - *max);
        sum += att[u];
    }
    *inv = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int u = first; u <= last; u++) { att[u] *= *inv; }
}

// head h of sequence b; preatt, att (T-t0, T), or one row (T) for all queries: step 0
static inline void attention_forward_head_ref(float* out, float* preatt, float* att, size_t step, float* max,
                                              float* inv, const float* q, const float* k, const float* v, int b, int h,
                                              const AttentionShape* s) {
    size_t kv = attention_at_kv(s, b, h / (s->NH / s->NKV), 0);
    for (int t = s->t0; t < s->T; t++, preatt += step, att += step) {
        size_t row = attention_at_row(s, b, h, t);
        float* y = out + attention_at_out(s, b, h, t);
        attention_row_ref(preatt, att, max + row, inv + row, q + attention_at_q(s, b, h, t), k + kv, t, s);
        for (int i = 0; i < s->HS; i++) {
            float sum = 0.0f;
            for (int u = attention_first_key(s, t); u <= attention_last_key(s, t); u++) {
                sum = madd(att[u], v[kv + u * s->kv_row + i], sum);
            }
            y[i] = sum;
        }
    }
}

// preatt, att (B, NH, T-t0, T): what the fast version never stores
static inline void grouped_attention_forward_ref(float* out, float* preatt, float* att, float* max, float* inv,
                                                 const float* q, const float* k, const float* v,
                                                 const AttentionShape* s) {
    for (int head = 0; head < s->B * s->NH; head++) {
        size_t first = (size_t)head * attention_queries(s) * s->T;
        attention_forward_head_ref(out, preatt + first, att + first, (size_t)s->T, max, inv, q, k, v, head / s->NH,
                                   head % s->NH, s);
    }
}

#ifndef SYSTEM_LIBM
// query t adds its share: dq_t is written, dk_u and dv_u for u <= t go on from the queries before. given: D, or NULL
static inline void attention_backward_row_ref(float* dq, float* dk, float* dv, float* ds, const float* dout,
                                              const float* given, const float* q, const float* k, const float* v,
                                              const float* att, int t, const AttentionShape* s) {
    int first = attention_first_key(s, t), last = attention_last_key(s, t), HS = s->HS;
    size_t stride = s->kv_row;
    float D = 0.0f;
    for (int u = first; u <= last; u++) {
        ds[u] = 0.0f;
        for (int i = 0; i < HS; i++) { ds[u] = madd(v[u * stride + i], dout[i], ds[u]); }  // datt
        D = madd(att[u], ds[u], D);
    }
    D = given ? *given : D;
    for (int u = first; u <= last; u++) { ds[u] = att[u] * (ds[u] - D) * s->scale; }
    for (int u = first; u <= last; u++) {
        for (int i = 0; i < HS; i++) {
            dq[i] = madd(ds[u], k[u * stride + i], dq[i]);
            dk[u * stride + i] = madd(ds[u], q[i], dk[u * stride + i]);
            dv[u * stride + i] = madd(att[u], dout[i], dv[u * stride + i]);
        }
    }
}
#else
// upstream's order: the softmax derivative entry by entry, O(T^2) per query, and the scale inside the sums
static inline void attention_backward_row_ref(float* dq, float* dk, float* dv, float* ds, const float* dout,
                                              const float* given, const float* q, const float* k, const float* v,
                                              const float* att, int t, const AttentionShape* s) {
    (void)given;
    int first = attention_first_key(s, t), HS = s->HS;
    size_t stride = s->kv_row;
    for (int w = first; w <= t; w++) { ds[w] = 0.0f; }
    for (int u = first; u <= t; u++) {
        float datt = 0.0f;
        for (int i = 0; i < HS; i++) {
            datt += v[u * stride + i] * dout[i];
            dv[u * stride + i] += att[u] * dout[i];
        }
        for (int w = first; w <= t; w++) { ds[w] += att[u] * ((w == u ? 1.0f : 0.0f) - att[w]) * datt; }
    }
    for (int u = first; u <= t; u++) {
        for (int i = 0; i < HS; i++) {
            dq[i] += k[u * stride + i] * ds[u] * s->scale;
            dk[u * stride + i] += q[i] * ds[u] * s->scale;
        }
    }
}
#endif

// head g of k and v of sequence b, with the query heads of its group, from rebuilt weights; row (3, T): scratch
static inline void attention_backward_group_ref(float* dq, float* dk, float* dv, const float* dout, const float* q,
                                                const float* k, const float* v, float* row, int b, int g,
                                                const AttentionShape* s) {
    int group = s->NH / s->NKV;
    size_t kv = attention_at_kv(s, b, g, 0), head_bytes = sizeof(float) * s->HS;
    float *preatt = row, *att = row + s->T, *ds = row + 2 * (size_t)s->T, max, inv;
    for (int u = 0; u < s->keys; u++) {
        memset(dk + kv + u * s->kv_row, 0, head_bytes);
        memset(dv + kv + u * s->kv_row, 0, head_bytes);
    }
    for (int h = g * group; h < (g + 1) * group; h++) {
        for (int t = s->t0; t < s->T; t++) {
            size_t at = attention_at_q(s, b, h, t);
            memset(dq + at, 0, head_bytes);
            attention_row_ref(preatt, att, &max, &inv, q + at, k + kv, t, s);
            attention_backward_row_ref(dq + at, dk + kv, dv + kv, ds, dout + attention_at_out(s, b, h, t), NULL,
                                       q + at, k + kv, v + kv, att, t, s);
        }
    }
}

static inline void grouped_attention_backward_ref(float* dq, float* dk, float* dv, const float* dout, const float* q,
                                                  const float* k, const float* v, const AttentionShape* s) {
    float* row = (float*)malloc_check(sizeof(float) * 3 * s->T, "attention row");
    for (int head = 0; head < s->B * s->NKV; head++) {
        attention_backward_group_ref(dq, dk, dv, dout, q, k, v, row, head / s->NKV, head % s->NKV, s);
    }
    free(row);
}

#ifndef SYSTEM_LIBM
// a block of keys: max, inv and D (B, NH, T-t0) are given
static inline void block_attention_backward_ref(float* dq, float* dk, float* dv, const float* dout, const float* D,
                                                const float* max, const float* inv, const float* q, const float* k,
                                                const float* v, const AttentionShape* s) {
    float* row = (float*)malloc_check(sizeof(float) * 3 * s->T, "attention row");
    float *preatt = row, *att = row + s->T, *ds = row + 2 * (size_t)s->T, own_max, own_inv;
    for (int n = 0; n < s->B * s->NKV * s->keys; n++) {
        size_t at = attention_at_kv(s, n / s->keys / s->NKV, n / s->keys % s->NKV, n % s->keys);
        memset(dk + at, 0, sizeof(float) * s->HS);
        memset(dv + at, 0, sizeof(float) * s->HS);
    }
    for (int n = 0; n < s->B * s->NH * attention_queries(s); n++) {  // the rows of max, one after the other
        int t = s->t0 + n % attention_queries(s), h = n / attention_queries(s) % s->NH;
        int b = n / attention_queries(s) / s->NH;
        size_t at = attention_at_q(s, b, h, t), kv = attention_at_kv(s, b, h / (s->NH / s->NKV), 0);
        memset(dq + at, 0, sizeof(float) * s->HS);
        attention_row_ref(preatt, att, &own_max, &own_inv, q + at, k + kv, t, s);
        for (int u = attention_first_key(s, t); u <= attention_last_key(s, t); u++) {
            att[u] = fm_exp(preatt[u] - max[n]) * inv[n];
        }
        attention_backward_row_ref(dq + at, dk + kv, dv + kv, ds, dout + attention_at_out(s, b, h, t), D + n, q + at,
                                   k + kv, v + kv, att, t, s);
    }
    free(row);
}
#endif

// packed: preatt, att (B, NH, T, T)
static inline void attention_forward_ref(float* out, float* preatt, float* att, float* max, float* inv,
                                         const float* qkv, int B, int T, int C, int NH) {
    AttentionShape s = attention_packed_shape(B, T, C, NH, 0);
    grouped_attention_forward_ref(out, preatt, att, max, inv, qkv, qkv + C, qkv + 2 * (size_t)C, &s);
}

static inline void attention_backward_ref(float* dqkv, const float* dout, const float* qkv, int B, int T, int C,
                                          int NH) {
    AttentionShape s = attention_packed_shape(B, T, C, NH, 0);
    size_t v = 2 * (size_t)C;
    grouped_attention_backward_ref(dqkv, dqkv + C, dqkv + v, dout, qkv, qkv + C, qkv + v, &s);
}

#ifndef __CUDACC__  // ---- fast C ----
// One head at a time per thread, in strips of TILE_N queries: lanes hold queries, so that the chains of a softmax run
// side by side and a strip of weights (u, TILE_N) is already the packed operand of the next product. Keys u before the
// strip are seen by all its queries and go through gemm_panel_; the triangle of the strip's own keys is done row by
// row. Few queries, or a window: few_attention.h.

typedef struct {
    float *k_by_u, *v_by_u;    // packed for chains over i: tiles of TILE_M rows u          (T, HS)
    float *k_by_i, *v_by_i;    // packed for chains over u: tiles of TILE_M channels i      (HS, T)
    float *q_strip, *d_strip;  // q and dout of a strip, turned                             (HS, TILE_N)
    float *weights, *ds;       // att and ds of a strip, keys down                          (T, TILE_N)
    float *turned;             // packed tile rows and results on their way to memory
} AttentionScratch_;

static inline size_t attention_round_(int n) { return (size_t)ceil_div(n, 64) * 64 + 64; }

static inline size_t attention_workspace_bytes(int T, int HS, int n_threads) {
    size_t T_up = attention_round_(T), HS_up = attention_round_(HS);
    return sizeof(float) * n_threads *
           (4 * T_up * HS_up + 2 * TILE_N * HS_up + 2 * TILE_N * T_up + TILE_N * (HS_up + T_up));
}

// this thread's share of the workspace
static inline AttentionScratch_ attention_scratch_(float* workspace, int T, int HS) {
    size_t T_up = attention_round_(T), HS_up = attention_round_(HS);
    float* p = workspace + thread_number() * (attention_workspace_bytes(T, HS, 1) / sizeof(float));
    AttentionScratch_ s;
    s.k_by_u = p, p += T_up * HS_up;
    s.v_by_u = p, p += T_up * HS_up;
    s.k_by_i = p, p += T_up * HS_up;
    s.v_by_i = p, p += T_up * HS_up;
    s.q_strip = p, p += TILE_N * HS_up;
    s.d_strip = p, p += TILE_N * HS_up;
    s.weights = p, p += TILE_N * T_up;
    s.ds = p, p += TILE_N * T_up;
    s.turned = p;
    return s;
}

// packed tiles of TILE_M rows of x (rows, depth), whose elements lie as the strides say
static inline void attention_pack_(float* packed, const float* x, size_t row_stride, size_t depth_stride, int rows,
                                   int depth) {
    for (int r = 0; r < rows; r += TILE_M) {
        gemm_pack_(packed + (size_t)r * depth, x + r * row_stride, row_stride, depth_stride, TILE_M,
                   gemm_min_(TILE_M, rows - r), depth);
    }
}

// keys that n queries from t1 on see, and those that all of them see, but for windows
static inline int attention_strip_keys_(const AttentionShape* s, int t1, int n) { return gemm_min_(t1 + n, s->keys); }
static inline int attention_strip_before_(const AttentionShape* s, int t1) { return gemm_min_(t1, s->keys); }

// weights[u][j] = score of key u for query t1+j, for all keys u < t1 + n; q: of query t1
static inline void attention_scores_(AttentionScratch_* s, const float* q, int t1, int n, const AttentionShape* shape) {
    static const float zeros[TILE_N] = {0};
    gemm_pack_(s->q_strip, q, shape->q_row, 1, TILE_N, n, shape->HS);
    const int n_keys = attention_strip_keys_(shape, t1, n);
    gemm_panel_(s->weights, TILE_N, zeros, 0, s->k_by_u, s->q_strip, 0, n_keys, TILE_N, shape->HS, NULL);
    for (int i = 0; i < n_keys * TILE_N; i++) { s->weights[i] *= shape->scale; }
}

// first query of the strip that sees key u
static inline int attention_first_(int u, int t1) { return u > t1 ? u - t1 : 0; }

// scores of n_keys to weights, 0 where a query does not see the key, and the statistics of the strip's n queries
static inline void attention_softmax_(float* weights, float* max, float* inv, int t1, int n, int n_keys) {
    float m[TILE_N], sum[TILE_N] = {0};
    for (int j = 0; j < TILE_N; j++) { m[j] = -10000.0f; }
    for (int u = 0; u < n_keys; u++) {
        const float* w = weights + (size_t)u * TILE_N;
        for (int j = attention_first_(u, t1); j < TILE_N; j++) { m[j] = w[j] > m[j] ? w[j] : m[j]; }
    }
    for (int u = 0; u < n_keys; u++) {
        float* w = weights + (size_t)u * TILE_N;
        #pragma omp simd
        for (int j = 0; j < TILE_N; j++) { w[j] = fm_exp(w[j] - m[j]); }
        for (int j = 0; j < attention_first_(u, t1); j++) { w[j] = 0.0f; }
        for (int j = attention_first_(u, t1); j < TILE_N; j++) { sum[j] += w[j]; }
    }
    for (int j = 0; j < TILE_N; j++) { sum[j] = sum[j] == 0.0f ? 0.0f : 1.0f / sum[j]; }
    for (int u = 0; u < n_keys; u++) {
        for (int j = 0; j < TILE_N; j++) { weights[(size_t)u * TILE_N + j] *= sum[j]; }
    }
    memcpy(max, m, sizeof(float) * n);
    memcpy(inv, sum, sizeof(float) * n);
}

// weights from scores, given the statistics of the strip's queries; 0 where a query does not see the key
static inline void attention_weights_(float* weights, const float* max, const float* inv, int t1, int n, int n_keys) {
    float m[TILE_N] = {0}, r[TILE_N] = {0};
    memcpy(m, max, sizeof(float) * n);
    memcpy(r, inv, sizeof(float) * n);
    for (int u = 0; u < n_keys; u++) {
        float* w = weights + (size_t)u * TILE_N;
        #pragma omp simd
        for (int j = 0; j < TILE_N; j++) { w[j] = fm_exp(w[j] - m[j]) * r[j]; }
        for (int j = 0; j < attention_first_(u, t1); j++) { w[j] = 0.0f; }
    }
}

// out_j = sum over keys u <= t1+j of weights[u][j] * x_u, ascending: keys before the strip, then the strip's own
// triangle
static inline void attention_gather_(float* out, size_t out_stride, const float* weights, const float* x_by_i,
                                     const float* x, size_t stride, float* turned, int t1, int n,
                                     const AttentionShape* s) {
    static const float zeros[TILE_N] = {0};
    const int HS = s->HS, n_keys = attention_strip_keys_(s, t1, n), before = attention_strip_before_(s, t1);
    for (int i = 0; i < HS; i += TILE_M) {
        gemm_panel_(turned + (size_t)i * TILE_N, TILE_N, zeros, 0, x_by_i + (size_t)i * s->keys, weights, 0,
                    gemm_min_(TILE_M, HS - i), TILE_N, before, NULL);
    }
    for (int j = 0; j < n; j++) {
        float* o = out + j * out_stride;
        for (int i = 0; i < HS; i++) { o[i] = turned[(size_t)i * TILE_N + j]; }
        for (int u = t1; u <= t1 + j && u < n_keys; u++) {
            float w = weights[(size_t)u * TILE_N + j];
            const float* x_u = x + u * stride;
            #pragma omp simd
            for (int i = 0; i < HS; i++) { o[i] = madd(w, x_u[i], o[i]); }
        }
    }
}

static inline void attention_forward_head_(float* out, float* max, float* inv, const float* q, const float* k,
                                           const float* v, AttentionScratch_ s, int b, int h,
                                           const AttentionShape* shape) {
    size_t kv = attention_at_kv(shape, b, h / (shape->NH / shape->NKV), 0), stride = shape->kv_row;
    int T = shape->T, HS = shape->HS;
    attention_pack_(s.k_by_u, k + kv, stride, 1, shape->keys, HS);
    attention_pack_(s.v_by_i, v + kv, 1, stride, HS, shape->keys);
    for (int t1 = shape->t0; t1 < T; t1 += TILE_N) {
        int n = gemm_min_(TILE_N, T - t1);
        size_t row = attention_at_row(shape, b, h, t1);
        attention_scores_(&s, q + attention_at_q(shape, b, h, t1), t1, n, shape);
        attention_softmax_(s.weights, max + row, inv + row, t1, n, attention_strip_keys_(shape, t1, n));
        attention_gather_(out + attention_at_out(shape, b, h, t1), shape->out_row, s.weights, s.v_by_i, v + kv, stride,
                          s.turned, t1, n, shape);
    }
}

static inline void grouped_attention_forward(float* out, float* max, float* inv, const float* q, const float* k,
                                             const float* v, const AttentionShape* shape, const Device* dev) {
    assert(!shape->documents);
    if (few_attention_forward(out, max, inv, q, k, v, shape, dev)) { return; }
    float* workspace = device_workspace(dev, attention_workspace_bytes(shape->T, shape->HS, dev->n_threads));
    #pragma omp parallel for schedule(dynamic)
    for (int head = 0; head < shape->B * shape->NH; head++) {
        AttentionScratch_ s = attention_scratch_(workspace, shape->T, shape->HS);
        attention_forward_head_(out, max, inv, q, k, v, s, head / shape->NH, head % shape->NH, shape);
    }
}

// dx_u += sum over the strip's queries t >= u of weights[u][t] * y_t, ascending
static inline void attention_scatter_(float* dx, size_t stride, const float* weights, const float* y, size_t y_stride,
                                      float* turned, int t1, int n, const AttentionShape* s) {
    const int HS = s->HS, n_keys = attention_strip_keys_(s, t1, n), before = attention_strip_before_(s, t1);
    float* y_packed = turned + (size_t)TILE_N * attention_round_(before);
    for (int u = 0; u < before; u += TILE_M) {
        gemm_pack_(turned + (size_t)u * n, weights + (size_t)u * TILE_N, TILE_N, 1, TILE_M,
                   gemm_min_(TILE_M, before - u), n);
    }
    for (int i = 0; i < HS; i += TILE_N) {
        int width = gemm_min_(TILE_N, HS - i);
        gemm_pack_(y_packed, y + i, 1, y_stride, TILE_N, width, n);
        gemm_panel_(dx + i, stride, dx + i, stride, turned, y_packed, 0, before, width, n, NULL);
    }
    for (int j = 0; j < n; j++) {
        const float* y_j = y + j * y_stride;
        for (int u = t1; u <= t1 + j && u < n_keys; u++) {
            float w = weights[(size_t)u * TILE_N + j];
            float* dx_u = dx + u * stride;
            #pragma omp simd
            for (int i = 0; i < HS; i++) { dx_u[i] = madd(w, y_j[i], dx_u[i]); }
        }
    }
}

// ds = att * (datt - D) * scale of a strip, D given or chaining over u
static inline void attention_dscores_(float* ds, const float* weights, const float* given, int t1, int n,
                                      const AttentionShape* s) {
    const int n_keys = attention_strip_keys_(s, t1, n);
    const float scale = s->scale;
    float D[TILE_N] = {0};
    if (given) { memcpy(D, given, sizeof(float) * n); }
    for (int u = 0; u < n_keys && !given; u++) {
        const float *w = weights + (size_t)u * TILE_N, *datt = ds + (size_t)u * TILE_N;
        for (int j = attention_first_(u, t1); j < TILE_N; j++) { D[j] = madd(w[j], datt[j], D[j]); }
    }
    for (int u = 0; u < n_keys; u++) {
        const float* w = weights + (size_t)u * TILE_N;
        float* d = ds + (size_t)u * TILE_N;
        for (int j = 0; j < TILE_N; j++) { d[j] = w[j] * (d[j] - D[j]) * scale; }
        for (int j = 0; j < attention_first_(u, t1); j++) { d[j] = 0.0f; }  // a stranger's Inf would leave NaN
    }
}

// query head h; k, dk and dv at their head, packed already; dk and dv go on from the heads of the group before
static inline void attention_backward_head_(float* dq, float* dk, float* dv, const float* dout, const float* D,
                                            const float* max, const float* inv, const float* q, const float* k,
                                            AttentionScratch_ s, int b, int h, const AttentionShape* shape) {
    static const float zeros[TILE_N] = {0};
    size_t stride = shape->kv_row;
    int T = shape->T, HS = shape->HS;
    for (int t1 = shape->t0; t1 < T; t1 += TILE_N) {
        int n = gemm_min_(TILE_N, T - t1), n_keys = attention_strip_keys_(shape, t1, n);
        size_t at = attention_at_q(shape, b, h, t1), row = attention_at_row(shape, b, h, t1);
        const float* d = dout + attention_at_out(shape, b, h, t1);
        attention_scores_(&s, q + at, t1, n, shape);
        attention_weights_(s.weights, max + row, inv + row, t1, n, n_keys);
        gemm_pack_(s.d_strip, d, shape->out_row, 1, TILE_N, n, HS);
        gemm_panel_(s.ds, TILE_N, zeros, 0, s.v_by_u, s.d_strip, 0, n_keys, TILE_N, HS, NULL);  // datt
        attention_dscores_(s.ds, s.weights, D ? D + row : NULL, t1, n, shape);
        attention_gather_(dq + at, shape->q_row, s.ds, s.k_by_i, k, stride, s.turned, t1, n, shape);
        attention_scatter_(dk, stride, s.ds, q + at, shape->q_row, s.turned, t1, n, shape);
        attention_scatter_(dv, stride, s.weights, d, shape->out_row, s.turned, t1, n, shape);
    }
}

// head g of k and v with the query heads of its group
static inline void attention_backward_group_(float* dq, float* dk, float* dv, const float* dout, const float* D,
                                             const float* max, const float* inv, const float* q, const float* k,
                                             const float* v, AttentionScratch_ s, int b, int g,
                                             const AttentionShape* shape) {
    size_t kv = attention_at_kv(shape, b, g, 0), stride = shape->kv_row;
    int T = shape->keys, HS = shape->HS, group = shape->NH / shape->NKV;
    attention_pack_(s.k_by_u, k + kv, stride, 1, T, HS);
    attention_pack_(s.v_by_u, v + kv, stride, 1, T, HS);
    attention_pack_(s.k_by_i, k + kv, 1, stride, HS, T);
    for (int u = 0; u < T; u++) {
        memset(dk + kv + u * stride, 0, sizeof(float) * HS);
        memset(dv + kv + u * stride, 0, sizeof(float) * HS);
    }
    for (int h = g * group; h < (g + 1) * group; h++) {
        attention_backward_head_(dq, dk + kv, dv + kv, dout, D, max, inv, q, k + kv, s, b, h, shape);
    }
}

// D NULL: shape has all keys
static inline void block_attention_backward(float* dq, float* dk, float* dv, const float* dout, const float* out,
                                            const float* D, const float* max, const float* inv, const float* q,
                                            const float* k, const float* v, const AttentionShape* shape,
                                            const Device* dev) {
    (void)out;
    assert(!shape->documents);
#ifdef SYSTEM_LIBM
    const int plain = D == NULL;
#else
    const int plain = 0;
    if (few_attention_backward(dq, dk, dv, dout, D, max, inv, q, k, v, shape, dev)) { return; }
#endif
    float* workspace = device_workspace(dev, attention_workspace_bytes(shape->T, shape->HS, dev->n_threads));
    #pragma omp parallel for schedule(dynamic)
    for (int head = 0; head < shape->B * shape->NKV; head++) {
        AttentionScratch_ s = attention_scratch_(workspace, shape->T, shape->HS);
        int b = head / shape->NKV, g = head % shape->NKV;
        if (plain) {
            attention_backward_group_ref(dq, dk, dv, dout, q, k, v, s.weights, b, g, shape);
        } else {
            attention_backward_group_(dq, dk, dv, dout, D, max, inv, q, k, v, s, b, g, shape);
        }
    }
}

static inline void grouped_attention_backward(float* dq, float* dk, float* dv, const float* dout, const float* out,
                                              const float* max, const float* inv, const float* q, const float* k,
                                              const float* v, const AttentionShape* shape, const Device* dev) {
    block_attention_backward(dq, dk, dv, dout, out, NULL, max, inv, q, k, v, shape, dev);
}

static inline void attention_forward(float* out, float* max, float* inv, const float* qkv, int B, int T, int C, int NH,
                                     int t0, const Device* dev) {
    AttentionShape s = attention_packed_shape(B, T, C, NH, t0);
    const float *k = qkv + C, *v = k + C;
    grouped_attention_forward(out, max, inv, qkv + t0 * s.q_row, k, v, &s, dev);
}

// scratch of a training step, for the account of memory
static inline size_t attention_bytes(size_t element_bytes, int B, int T, int C, int NH, const Device* dev) {
    (void)element_bytes, (void)B;
    return attention_workspace_bytes(T, C / NH, dev->n_threads);
}

static inline void attention_backward(float* dqkv, const float* dout, const float* out, const float* max,
                                      const float* inv, const float* qkv, int B, int T, int C, int NH,
                                      const Device* dev) {
    AttentionShape s = attention_packed_shape(B, T, C, NH, 0);
    const float *k = qkv + C, *v = k + C;
    grouped_attention_backward(dqkv, dqkv + C, dqkv + 2 * (size_t)C, dout, out, max, inv, qkv, k, v, &s, dev);
}
#else  // ---- CUDA ----
#ifndef EXACT
#include "flash_attention.h"  // flash_attention_forward, flash_attention_backward
#include "split_attention.h"  // split_attention_forward
#endif

// Kernels that follow the plain loops. A warp owns a query (out, dq) or a key (dk, dv); its 32 lanes take 32 dot
// products at a time, then 32 channels at a time, and between the two weights pass through rows of scratch. Block is
// (32, ATTENTION_WARPS)
enum { ATTENTION_WARPS = 4 };

template <typename X>
__device__ inline float attention_dot_(const X* a, const X* b, int n) {
    float sum = 0.0f;
    for (int i = 0; i < n; i++) { sum = madd(to_float(a[i]), to_float(b[i]), sum); }
    return sum;
}

// scratch: T floats for each warp of the grid
template <typename X>
__global__ void attention_forward_kernel(X* out, float* max, float* inv, const X* q, const X* k, const X* v,
                                         float* scratch, AttentionShape s) {
    int lane = threadIdx.x, n_queries = attention_queries(&s), n_warps = gridDim.x * ATTENTION_WARPS;
    int warp = blockIdx.x * ATTENTION_WARPS + threadIdx.y;
    float* att = scratch + (size_t)warp * s.T;
    for (int64_t n = warp; n < (int64_t)s.B * s.NH * n_queries; n += n_warps) {
        int t = s.t0 + (int)(n % n_queries), h = (int)(n / n_queries % s.NH), b = (int)(n / n_queries / s.NH);
        int first = attention_sees_from(&s, b, t), last = attention_last_key(&s, t);
        size_t kv = attention_at_kv(&s, b, h / (s.NH / s.NKV), 0), row = attention_at_row(&s, b, h, t);
        const X *q_t = q + attention_at_q(&s, b, h, t), *k_b = k + kv, *v_b = v + kv;
        X* y = out + attention_at_out(&s, b, h, t);
        float top = -10000.0f, sum = 0.0f;
        for (int u = first + lane; u <= last; u += WARP) {
            att[u] = attention_dot_(q_t, k_b + u * s.kv_row, s.HS) * s.scale;
        }
        __syncwarp();
        // every lane: the first of -0 and 0 stays
        for (int u = first; u <= last; u++) { top = att[u] > top ? att[u] : top; }
        __syncwarp();
        for (int u = first + lane; u - lane <= last; u += WARP) {
            float e = u <= last ? kernel_exp(att[u] - top) : 0.0f;
            if (u <= last) { att[u] = e; }
            sum = row_add(sum, e);
        }
        sum = row_total(sum);
        float r = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int u = first + lane; u <= last; u += WARP) { att[u] *= r; }
        __syncwarp();
        for (int i = lane; i < s.HS; i += WARP) {
            float y_i = 0.0f;
            for (int u = first; u <= last; u++) { y_i = madd(att[u], to_float(v_b[u * s.kv_row + i]), y_i); }
            y[i] = from_float<X>(y_i);
        }
        if (lane == 0) { max[row] = top, inv[row] = r; }
        __syncwarp();  // the scratch is free for the next query
    }
}

// dq and D of each query, which lies as max; given: D of all keys, or NULL; scratch: 2*T floats for each warp
template <typename X>
__global__ void attention_backward_queries_kernel(X* dq, float* D, const X* dout, const float* given, const float* max,
                                                  const float* inv, const X* q, const X* k, const X* v, float* scratch,
                                                  AttentionShape s) {
    int lane = threadIdx.x, n_queries = attention_queries(&s), n_warps = gridDim.x * ATTENTION_WARPS;
    int warp = blockIdx.x * ATTENTION_WARPS + threadIdx.y;
    float *att = scratch + (size_t)warp * 2 * s.T, *ds = att + s.T;
    for (int64_t n = warp; n < (int64_t)s.B * s.NH * n_queries; n += n_warps) {
        int t = s.t0 + (int)(n % n_queries), h = (int)(n / n_queries % s.NH), b = (int)(n / n_queries / s.NH);
        int first = attention_sees_from(&s, b, t), last = attention_last_key(&s, t);
        size_t kv = attention_at_kv(&s, b, h / (s.NH / s.NKV), 0), at = attention_at_q(&s, b, h, t);
        size_t row = attention_at_row(&s, b, h, t);
        const X *q_t = q + at, *dout_t = dout + attention_at_out(&s, b, h, t), *k_b = k + kv, *v_b = v + kv;
        float sum = 0.0f;
        for (int u = first + lane; u - lane <= last; u += WARP) {
            float weight = -0.0f, datt = 0.0f;  // beyond the last: -0 * 0 leaves every sum as it is, also -0
            if (u <= last) {
                weight = kernel_exp(attention_dot_(q_t, k_b + u * s.kv_row, s.HS) * s.scale - max[row]) * inv[row];
                datt = attention_dot_(v_b + u * s.kv_row, dout_t, s.HS);
                att[u] = weight, ds[u] = datt;
            }
            sum = row_madd(weight, datt, sum);
        }
        sum = given ? given[row] : row_total(sum);
        for (int u = first + lane; u <= last; u += WARP) { ds[u] = att[u] * (ds[u] - sum) * s.scale; }
        __syncwarp();
        for (int i = lane; i < s.HS; i += WARP) {
            float dq_i = 0.0f;
            for (int u = first; u <= last; u++) { dq_i = madd(ds[u], to_float(k_b[u * s.kv_row + i]), dq_i); }
            dq[at + i] = from_float<X>(dq_i);
        }
        if (lane == 0) { D[row] = sum; }
        __syncwarp();
    }
}

// att and ds of key u for the queries of head h that see it, the first one at 0
template <typename X>
__device__ inline void attention_column_(float* att, float* ds, const X* dout, const float* max, const float* inv,
                                         const float* D, const X* q, const X* k_u, const X* v_u, int b, int h, int u,
                                         const AttentionShape& s) {
    int first = attention_first_query(&s, u), last = attention_seen_until(&s, b, u);
    for (int t = first + threadIdx.x; t <= last; t += WARP) {
        size_t row = attention_at_row(&s, b, h, t);
        float weight =
            kernel_exp(attention_dot_(q + attention_at_q(&s, b, h, t), k_u, s.HS) * s.scale - max[row]) * inv[row];
        float datt = attention_dot_(v_u, dout + attention_at_out(&s, b, h, t), s.HS);
        att[t - first] = weight;
        ds[t - first] = weight * (datt - D[row]) * s.scale;
    }
}

// scratch: 2*(T + HS) floats for each warp
template <typename X>
__global__ void attention_backward_keys_kernel(X* dk, X* dv, const X* dout, const float* max, const float* inv,
                                               const float* D, const X* q, const X* k, const X* v, float* scratch,
                                               AttentionShape s) {
    int lane = threadIdx.x, n_warps = gridDim.x * ATTENTION_WARPS, group = s.NH / s.NKV;
    int warp = blockIdx.x * ATTENTION_WARPS + threadIdx.y;
    float *att = scratch + (size_t)warp * 2 * (s.T + s.HS), *ds = att + s.T, *dk_u = ds + s.T, *dv_u = dk_u + s.HS;
    for (int64_t n = warp; n < (int64_t)s.B * s.NKV * s.keys; n += n_warps) {
        int u = (int)(n % s.keys), g = (int)(n / s.keys % s.NKV), b = (int)(n / s.keys / s.NKV);
        int first = attention_first_query(&s, u), last = attention_seen_until(&s, b, u);
        size_t kv = attention_at_kv(&s, b, g, u);
        for (int i = lane; i < s.HS; i += WARP) { dk_u[i] = dv_u[i] = 0.0f; }
        for (int h = g * group; h < (g + 1) * group; h++) {
            attention_column_(att, ds, dout, max, inv, D, q, k + kv, v + kv, b, h, u, s);
            __syncwarp();
            for (int i = lane; i < s.HS; i += WARP) {  // these two sums are this lane's alone
                for (int t = first; t <= last; t++) {
                    dk_u[i] = madd(ds[t - first], to_float(q[attention_at_q(&s, b, h, t) + i]), dk_u[i]);
                    dv_u[i] = madd(att[t - first], to_float(dout[attention_at_out(&s, b, h, t) + i]), dv_u[i]);
                }
            }
            __syncwarp();
        }
        for (int i = lane; i < s.HS; i += WARP) {
            dk[kv + i] = from_float<X>(dk_u[i]);
            dv[kv + i] = from_float<X>(dv_u[i]);
        }
    }
}

// enough blocks to fill the GPU: a warp takes one row after another, and its scratch is needed once
static inline int attention_blocks_(int64_t n_rows, const Device* dev) {
    int64_t blocks = ceil_div(n_rows, ATTENTION_WARPS), most = 12 * (int64_t)dev->n_sms;
    return (int)(blocks < most ? blocks : most);
}

// the scratch of backward in float; bf16 on tensor cores needs less
static inline size_t attention_scratch_bytes_(const AttentionShape* s, const Device* dev) {
    int64_t n_rows = (int64_t)s->B * s->NH * attention_queries(s), n_key_rows = (int64_t)s->B * s->NKV * s->T;
    size_t n_warps = (size_t)attention_blocks_(n_rows > n_key_rows ? n_rows : n_key_rows, dev) * ATTENTION_WARPS;
    return sizeof(float) * ((size_t)n_rows + n_warps * 2 * (size_t)(s->T + s->HS));
}

template <typename X>
static inline void grouped_attention_forward(X* out, float* max, float* inv, const X* q, const X* k, const X* v,
                                             const AttentionShape* shape, const Device* dev) {
#ifndef EXACT
    if (split_attention_forward(out, max, inv, q, k, v, shape, dev)) { return; }
    if (flash_attention_forward(out, max, inv, q, k, v, shape, dev)) { return; }
#endif
    int n_blocks = attention_blocks_((int64_t)shape->B * shape->NH * attention_queries(shape), dev);
    float* scratch = device_workspace(dev, sizeof(float) * n_blocks * ATTENTION_WARPS * shape->T);
    dim3 block(WARP, ATTENTION_WARPS);
    attention_forward_kernel<<<n_blocks, block, 0, dev->stream>>>(out, max, inv, q, k, v, scratch, *shape);
    cudaCheck(cudaGetLastError());
}

// given: D of all keys, where shape has a block of them; the tensor cores find it from `out`, of all keys, themselves
template <typename X>
static inline void block_attention_backward(X* dq, X* dk, X* dv, const X* dout, const X* out, const float* given,
                                            const float* max, const float* inv, const X* q, const X* k, const X* v,
                                            const AttentionShape* shape, const Device* dev) {
#ifndef EXACT
    if (flash_attention_backward(dq, dk, dv, dout, out, max, inv, q, k, v, shape, dev)) { return; }
#endif
    (void)out;
    int64_t n_rows = (int64_t)shape->B * shape->NH * attention_queries(shape);
    int n_blocks = attention_blocks_(n_rows, dev),
        n_key_blocks = attention_blocks_((int64_t)shape->B * shape->NKV * shape->T, dev);
    float* D = device_workspace(dev, attention_scratch_bytes_(shape, dev));
    float* scratch = D + n_rows;
    dim3 block(WARP, ATTENTION_WARPS);
    attention_backward_queries_kernel<<<n_blocks, block, 0, dev->stream>>>(dq, D, dout, given, max, inv, q, k, v,
                                                                           scratch, *shape);
    attention_backward_keys_kernel<<<n_key_blocks, block, 0, dev->stream>>>(dk, dv, dout, max, inv, D, q, k, v, scratch,
                                                                            *shape);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void grouped_attention_backward(X* dq, X* dk, X* dv, const X* dout, const X* out, const float* max,
                                              const float* inv, const X* q, const X* k, const X* v,
                                              const AttentionShape* shape, const Device* dev) {
    block_attention_backward(dq, dk, dv, dout, out, (const float*)NULL, max, inv, q, k, v, shape, dev);
}

template <typename X>
static inline void attention_forward(X* out, float* max, float* inv, const X* qkv, int B, int T, int C, int NH, int t0,
                                     const Device* dev) {
    AttentionShape s = attention_packed_shape(B, T, C, NH, t0);
    const X *k = qkv + C, *v = k + C;
    grouped_attention_forward(out, max, inv, qkv + t0 * s.q_row, k, v, &s, dev);
}

template <typename X>
static inline void attention_backward(X* dqkv, const X* dout, const X* out, const float* max, const float* inv,
                                      const X* qkv, int B, int T, int C, int NH, const Device* dev) {
    AttentionShape s = attention_packed_shape(B, T, C, NH, 0);
    const X *k = qkv + C, *v = k + C;
    grouped_attention_backward(dqkv, dqkv + C, dqkv + 2 * (size_t)C, dout, out, max, inv, qkv, k, v, &s, dev);
}

// scratch of a training step, for the account of memory; element_bytes of X
static inline size_t attention_bytes(size_t element_bytes, int B, int T, int C, int NH, const Device* dev) {
    AttentionShape s = attention_packed_shape(B, T, C, NH, 0);
    const size_t rows = (size_t)B * NH * ((size_t)(T + 1) / 2 * 2);  // flash_row_stride
    return element_bytes == sizeof(float) ? attention_scratch_bytes_(&s, dev) : 2 * sizeof(float) * rows;
}
#endif
#endif  // LLMC_ATTENTION_H
