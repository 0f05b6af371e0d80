/*
Causal self-attention: out_t = sum over u <= t of att_t[u] * v_u, att_t = softmax over u <= t of (q_t . k_u) / sqrt(HS).
    qkv (B, T, 3C)  q, then k, then v; head h owns columns h*HS .. h*HS+HS-1 of each, HS = C / NH
    out (B, T-t0, C), max, inv (B, NH, T-t0)  of the queries t0..T-1: the result, the largest score and 1 / sum of exponentials
    t0  first query: 0 in training, where backward rebuilds att from max and inv, so that no (T, T) matrix is ever kept;
        in generation the rows of qkv before t0 are the key-value cache
Backward (derived in doc/attention.md): dqkv written, with
    datt[u] = v_u . dout_t      D = sum over u of att[u] * datt[u]      ds[u] = att[u] * (datt[u] - D) / sqrt(HS)
    dq_t = sum over u of ds_t[u] * k_u      dk_u = sum over t >= u of ds_t[u] * q_t      dv_u = same of att_t[u] * dout_t
Cost:   compute bound for long T: forward 2*B*T*T*C flops, backward 2.5 times that: it rebuilds the scores.
        Memory beside the tensors: three (T, TILE_N) strips and four packed (T, HS) operands per thread.
Order:  every sum above chains ascending from 0; the score is its finished chain times 1/sqrtf(HS); max starts at -10000.
Source: Vaswani et al. 2017, arXiv:1706.03762; D as in Dao et al. 2022, arXiv:2205.14135; spec gpt2.md sections 3 and 4.
        We multiply by the scale once per weight, in ds, where upstream does so once per element of dq and dk; its order,
        quadratic in T, is what the parity build (SYSTEM_LIBM) computes.
*/
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H
#include "gemm.h"   // gemm_pack_, gemm_panel_, TILE_M, TILE_N
#include "fmath.h"  // fm_exp

// ---- plain C: read this first; it defines every bit ----

// scores and weights of query t: preatt, att (T), both 0 beyond t
static inline void attention_row_ref(float* preatt, float* att, float* max, float* inv, const float* q, const float* k, int t, int T,
                                     int HS, size_t stride) {
    float scale = 1.0f / sqrtf((float)HS), sum = 0.0f;
    *max = -10000.0f;
    for (int u = 0; u < T; u++) {
        preatt[u] = att[u] = 0.0f;
        if (u > t) { continue; }
        float dot = 0.0f;
        for (int i = 0; i < HS; i++) { dot += q[i] * k[u * stride + i]; }
        preatt[u] = dot * scale;
        *max = preatt[u] > *max ? preatt[u] : *max;
    }
    for (int u = 0; u <= t; u++) {
        att[u] = fm_exp(preatt[u] - *max);
        sum += att[u];
    }
    *inv = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int u = 0; u <= t; u++) { att[u] *= *inv; }
}

// preatt, att (B, NH, T, T): what the fast version never stores
static inline void attention_forward_ref(float* out, float* preatt, float* att, float* max, float* inv, const float* qkv, int B, int T,
                                         int C, int NH) {
    int HS = C / NH;
    size_t stride = 3 * (size_t)C;
    for (size_t row = 0; row < (size_t)B * NH * T; row++) {
        size_t t = row % T, h = row / T % NH, b = row / T / NH;
        const float *q = qkv + (b * T + t) * stride + h * HS, *k = qkv + b * T * stride + C + h * HS, *v = k + C;
        float *y = out + (b * T + t) * C + h * HS, *a = att + row * T;
        attention_row_ref(preatt + row * T, a, max + row, inv + row, q, k, (int)t, T, HS, stride);
        for (int i = 0; i < HS; i++) {
            float sum = 0.0f;
            for (size_t u = 0; u <= t; u++) { sum += a[u] * v[u * stride + i]; }
            y[i] = sum;
        }
    }
}

#ifndef SYSTEM_LIBM
// query t adds its share: dq_t is written, dk_u and dv_u for u <= t go on from the queries before
static inline void attention_backward_row_ref(float* dq, float* dk, float* dv, float* ds, const float* dout, const float* q,
                                              const float* k, const float* v, const float* att, int t, int HS, size_t stride) {
    float scale = 1.0f / sqrtf((float)HS), D = 0.0f;
    for (int u = 0; u <= t; u++) {
        ds[u] = 0.0f;
        for (int i = 0; i < HS; i++) { ds[u] += v[u * stride + i] * dout[i]; }  // datt
        D += att[u] * ds[u];
    }
    for (int u = 0; u <= t; u++) { ds[u] = att[u] * (ds[u] - D) * scale; }
    for (int u = 0; u <= t; u++) {
        for (int i = 0; i < HS; i++) {
            dq[i] += ds[u] * k[u * stride + i];
            dk[u * stride + i] += ds[u] * q[i];
            dv[u * stride + i] += att[u] * dout[i];
        }
    }
}
#else
// upstream's order: the softmax derivative entry by entry, O(T^2) per query, and the scale inside the sums
static inline void attention_backward_row_ref(float* dq, float* dk, float* dv, float* ds, const float* dout, const float* q,
                                              const float* k, const float* v, const float* att, int t, int HS, size_t stride) {
    float scale = 1.0f / sqrtf((float)HS);
    for (int w = 0; w <= t; w++) { ds[w] = 0.0f; }
    for (int u = 0; u <= t; u++) {
        float datt = 0.0f;
        for (int i = 0; i < HS; i++) {
            datt += v[u * stride + i] * dout[i];
            dv[u * stride + i] += att[u] * dout[i];
        }
        for (int w = 0; w <= t; w++) { ds[w] += att[u] * ((w == u ? 1.0f : 0.0f) - att[w]) * datt; }
    }
    for (int u = 0; u <= t; u++) {
        for (int i = 0; i < HS; i++) {
            dq[i] += k[u * stride + i] * ds[u] * scale;
            dk[u * stride + i] += q[i] * ds[u] * scale;
        }
    }
}
#endif

// one head of one sequence from rebuilt weights; row (3, T): scratch
static inline void attention_backward_head_ref(float* dqkv, const float* dout, const float* qkv, float* row, int T, int C, int HS) {
    size_t stride = 3 * (size_t)C;
    const float *k = qkv + C, *v = k + C;
    float *preatt = row, *att = row + T, *ds = row + 2 * (size_t)T, max, inv;
    for (size_t t = 0; t < (size_t)T; t++) {
        for (int part = 0; part < 3; part++) { memset(dqkv + t * stride + part * (size_t)C, 0, sizeof(float) * HS); }
    }
    for (int t = 0; t < T; t++) {
        attention_row_ref(preatt, att, &max, &inv, qkv + t * stride, k, t, T, HS, stride);
        attention_backward_row_ref(dqkv + t * stride, dqkv + C, dqkv + 2 * (size_t)C, ds, dout + (size_t)t * C, qkv + t * stride, k, v,
                                   att, t, HS, stride);
    }
}

static inline void attention_backward_ref(float* dqkv, const float* dout, const float* qkv, int B, int T, int C, int NH) {
    int HS = C / NH;
    float* row = (float*)malloc_check(sizeof(float) * 3 * T, "attention row");
    for (size_t head = 0; head < (size_t)B * NH; head++) {
        size_t first = head / NH * T, column = head % NH * HS;
        attention_backward_head_ref(dqkv + first * 3 * C + column, dout + first * C + column, qkv + first * 3 * C + column, row, T, C, HS);
    }
    free(row);
}

// ---- fast C ----
// One head at a time per thread, in strips of TILE_N queries: lanes hold queries, so that the chains of a softmax run side
// by side and a strip of weights (u, TILE_N) is already the packed operand of the next product. Keys u before the strip are
// seen by all its queries and go through gemm_panel_; the triangle of the strip's own keys is done row by row.

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
    return sizeof(float) * n_threads * (4 * T_up * HS_up + 2 * TILE_N * HS_up + 2 * TILE_N * T_up + TILE_N * (HS_up + T_up));
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
static inline void attention_pack_(float* packed, const float* x, size_t row_stride, size_t depth_stride, int rows, int depth) {
    for (int r = 0; r < rows; r += TILE_M) {
        gemm_pack_(packed + (size_t)r * depth, x + r * row_stride, row_stride, depth_stride, TILE_M, gemm_min_(TILE_M, rows - r), depth);
    }
}

// weights[u][j] = score of key u for query t1+j, for all keys u < t1 + n
static inline void attention_scores_(AttentionScratch_* s, const float* q, int t1, int n, int HS, size_t stride) {
    static const float zeros[TILE_N] = {0};
    gemm_pack_(s->q_strip, q + t1 * stride, stride, 1, TILE_N, n, HS);
    gemm_panel_(s->weights, TILE_N, zeros, 0, s->k_by_u, s->q_strip, 0, t1 + n, TILE_N, HS);
    float scale = 1.0f / sqrtf((float)HS);
    for (int i = 0; i < (t1 + n) * TILE_N; i++) { s->weights[i] *= scale; }
}

// first query of the strip that sees key u
static inline int attention_first_(int u, int t1) { return u > t1 ? u - t1 : 0; }

// scores to weights, 0 where a query does not see the key, and the statistics of the strip's n queries
static inline void attention_softmax_(float* weights, float* max, float* inv, int t1, int n) {
    float m[TILE_N], sum[TILE_N] = {0};
    for (int j = 0; j < TILE_N; j++) { m[j] = -10000.0f; }
    for (int u = 0; u < t1 + n; u++) {
        const float* w = weights + (size_t)u * TILE_N;
        for (int j = attention_first_(u, t1); j < TILE_N; j++) { m[j] = w[j] > m[j] ? w[j] : m[j]; }
    }
    for (int u = 0; u < t1 + n; u++) {
        float* w = weights + (size_t)u * TILE_N;
        #pragma omp simd
        for (int j = 0; j < TILE_N; j++) { w[j] = fm_exp(w[j] - m[j]); }
        for (int j = 0; j < attention_first_(u, t1); j++) { w[j] = 0.0f; }
        for (int j = attention_first_(u, t1); j < TILE_N; j++) { sum[j] += w[j]; }
    }
    for (int j = 0; j < TILE_N; j++) { sum[j] = sum[j] == 0.0f ? 0.0f : 1.0f / sum[j]; }
    for (int u = 0; u < t1 + n; u++) {
        for (int j = 0; j < TILE_N; j++) { weights[(size_t)u * TILE_N + j] *= sum[j]; }
    }
    memcpy(max, m, sizeof(float) * n);
    memcpy(inv, sum, sizeof(float) * n);
}

// weights from scores, given the statistics of the strip's queries; 0 where a query does not see the key
static inline void attention_weights_(float* weights, const float* max, const float* inv, int t1, int n) {
    float m[TILE_N] = {0}, r[TILE_N] = {0};
    memcpy(m, max, sizeof(float) * n);
    memcpy(r, inv, sizeof(float) * n);
    for (int u = 0; u < t1 + n; u++) {
        float* w = weights + (size_t)u * TILE_N;
        #pragma omp simd
        for (int j = 0; j < TILE_N; j++) { w[j] = fm_exp(w[j] - m[j]) * r[j]; }
        for (int j = 0; j < attention_first_(u, t1); j++) { w[j] = 0.0f; }
    }
}

// out_j = sum over keys u <= t1+j of weights[u][j] * x_u, ascending: keys before the strip, then the strip's own triangle
static inline void attention_gather_(float* out, size_t out_stride, const float* weights, const float* x_by_i, const float* x,
                                     size_t stride, float* turned, int t1, int n, int T, int HS) {
    static const float zeros[TILE_N] = {0};
    for (int i = 0; i < HS; i += TILE_M) {
        gemm_panel_(turned + (size_t)i * TILE_N, TILE_N, zeros, 0, x_by_i + (size_t)i * T, weights, 0, gemm_min_(TILE_M, HS - i),
                    TILE_N, t1);
    }
    for (int j = 0; j < n; j++) {
        float* o = out + j * out_stride;
        for (int i = 0; i < HS; i++) { o[i] = turned[(size_t)i * TILE_N + j]; }
        for (int u = t1; u <= t1 + j; u++) {
            float w = weights[(size_t)u * TILE_N + j];
            const float* x_u = x + u * stride;
            #pragma omp simd
            for (int i = 0; i < HS; i++) { o[i] += w * x_u[i]; }
        }
    }
}

static inline void attention_forward(float* out, float* max, float* inv, const float* qkv, int B, int T, int C, int NH, int t0,
                                     const Device* dev) {
    int HS = C / NH;
    size_t stride = 3 * (size_t)C;
    float* workspace = device_workspace(dev, attention_workspace_bytes(T, HS, dev->n_threads));
    #pragma omp parallel for schedule(dynamic)
    for (int head = 0; head < B * NH; head++) {
        AttentionScratch_ s = attention_scratch_(workspace, T, HS);
        size_t b = (size_t)(head / NH), h = (size_t)(head % NH), n_queries = (size_t)(T - t0);
        const float *q = qkv + b * T * stride + h * HS, *k = q + C, *v = k + C;
        attention_pack_(s.k_by_u, k, stride, 1, T, HS);
        attention_pack_(s.v_by_i, v, 1, stride, HS, T);
        for (int t1 = t0; t1 < T; t1 += TILE_N) {
            int n = gemm_min_(TILE_N, T - t1);
            size_t row = head * n_queries + t1 - t0;
            attention_scores_(&s, q, t1, n, HS, stride);
            attention_softmax_(s.weights, max + row, inv + row, t1, n);
            attention_gather_(out + (b * n_queries + t1 - t0) * C + h * HS, C, s.weights, s.v_by_i, v, stride, s.turned, t1, n, T, HS);
        }
    }
}

// dx_u += sum over the strip's queries t >= u of weights[u][t] * y_t, ascending: the strip's own keys start here, at 0
static inline void attention_scatter_(float* dx, size_t stride, const float* weights, const float* y, size_t y_stride, float* turned,
                                      int t1, int n, int HS) {
    float* y_packed = turned + (size_t)TILE_N * attention_round_(t1);
    for (int u = 0; u < t1; u += TILE_M) {
        gemm_pack_(turned + (size_t)u * n, weights + (size_t)u * TILE_N, TILE_N, 1, TILE_M, gemm_min_(TILE_M, t1 - u), n);
    }
    for (int i = 0; i < HS; i += TILE_N) {
        int width = gemm_min_(TILE_N, HS - i);
        gemm_pack_(y_packed, y + i, 1, y_stride, TILE_N, width, n);
        gemm_panel_(dx + i, stride, dx + i, stride, turned, y_packed, 0, t1, width, n);
    }
    for (int u = t1; u < t1 + n; u++) { memset(dx + u * stride, 0, sizeof(float) * HS); }
    for (int j = 0; j < n; j++) {
        const float* y_j = y + j * y_stride;
        for (int u = t1; u <= t1 + j; u++) {
            float w = weights[(size_t)u * TILE_N + j];
            float* dx_u = dx + u * stride;
            #pragma omp simd
            for (int i = 0; i < HS; i++) { dx_u[i] += w * y_j[i]; }
        }
    }
}

// ds = att * (datt - D) / sqrt(HS) of a strip, D chaining over u
static inline void attention_dscores_(float* ds, const float* weights, int t1, int n, int HS) {
    float D[TILE_N] = {0}, scale = 1.0f / sqrtf((float)HS);
    for (int u = 0; u < t1 + n; u++) {
        const float *w = weights + (size_t)u * TILE_N, *datt = ds + (size_t)u * TILE_N;
        for (int j = attention_first_(u, t1); j < TILE_N; j++) { D[j] += w[j] * datt[j]; }
    }
    for (int u = 0; u < t1 + n; u++) {
        const float* w = weights + (size_t)u * TILE_N;
        float* d = ds + (size_t)u * TILE_N;
        for (int j = 0; j < TILE_N; j++) { d[j] = w[j] * (d[j] - D[j]) * scale; }
        for (int j = 0; j < attention_first_(u, t1); j++) { d[j] = 0.0f; }  // a stranger's Inf would leave NaN
    }
}

static inline void attention_backward_head_(float* dqkv, const float* dout, const float* max, const float* inv, const float* qkv,
                                            AttentionScratch_ s, int T, int C, int HS) {
    static const float zeros[TILE_N] = {0};
    size_t stride = 3 * (size_t)C;
    const float *q = qkv, *k = q + C, *v = k + C;
    attention_pack_(s.k_by_u, k, stride, 1, T, HS);
    attention_pack_(s.v_by_u, v, stride, 1, T, HS);
    attention_pack_(s.k_by_i, k, 1, stride, HS, T);
    for (int t1 = 0; t1 < T; t1 += TILE_N) {
        int n = gemm_min_(TILE_N, T - t1);
        const float* d = dout + (size_t)t1 * C;
        attention_scores_(&s, q, t1, n, HS, stride);
        attention_weights_(s.weights, max + t1, inv + t1, t1, n);
        gemm_pack_(s.d_strip, d, C, 1, TILE_N, n, HS);
        gemm_panel_(s.ds, TILE_N, zeros, 0, s.v_by_u, s.d_strip, 0, t1 + n, TILE_N, HS);  // datt
        attention_dscores_(s.ds, s.weights, t1, n, HS);
        attention_gather_(dqkv + t1 * stride, stride, s.ds, s.k_by_i, k, stride, s.turned, t1, n, T, HS);
        attention_scatter_(dqkv + C, stride, s.ds, q + t1 * stride, stride, s.turned, t1, n, HS);
        attention_scatter_(dqkv + 2 * (size_t)C, stride, s.weights, d, C, s.turned, t1, n, HS);
    }
}

static inline void attention_backward(float* dqkv, const float* dout, const float* max, const float* inv, const float* qkv,
                                      int B, int T, int C, int NH, const Device* dev) {
    int HS = C / NH;
    float* workspace = device_workspace(dev, attention_workspace_bytes(T, HS, dev->n_threads));
    #pragma omp parallel for schedule(dynamic)
    for (int head = 0; head < B * NH; head++) {
        AttentionScratch_ s = attention_scratch_(workspace, T, HS);
        size_t first = (size_t)(head / NH) * T, column = (size_t)(head % NH) * HS, row = (size_t)head * T;
#ifdef SYSTEM_LIBM
        (void)max, (void)inv, (void)row;
        attention_backward_head_ref(dqkv + first * 3 * C + column, dout + first * C + column, qkv + first * 3 * C + column,
                                    s.weights, T, C, HS);
#else
        attention_backward_head_(dqkv + first * 3 * C + column, dout + first * C + column, max + row, inv + row,
                                 qkv + first * 3 * C + column, s, T, C, HS);
#endif
    }
}
#endif  // LLMC_ATTENTION_H
