/*
Hyper-connections of DeepSeek V4: in the place of one residual stream a position has hc of them, X_0 .. X_hc-1, and
each half of a layer (a site) says of every position anew how they mix: what the half reads (pre), into which of them
its answer goes (post), and how they go on (comb). Sinkhorn's iterations make comb nearly doubly stochastic.
    X (N, hc*D)   a position's streams one behind the other; as one row of n = hc*D numbers it is called u
    fn (M, n), base (M), scale (3), float   of a site, M = (2 + hc) * hc; scale has a part for pre, post and comb
    hyper_site_forward     r (N)   = 1 / sqrt(mean of u^2 + eps_n)
                           z (N, M) = r * (fn u)         a = z * scale[part] + base
                           pre (N, hc) = sigmoid(a) + eps_h     post (N, hc) = 2 sigmoid(a)
                           comb (N, hc*hc) = sinkhorn(a)        comb[j][k]: from stream j to stream k
                           y (N, D) = sum over j of pre[j] X_j
    hyper_expand_forward   out_k = post[k] f + sum over j of comb[j][k] X_j    f (N, D): what the half says of y
    hyper_collapse_forward y again, from X and pre: what a layer that is recomputed needs
    hyper_head_forward     behind the last layer: fn (hc, n), base (hc), scale (1), pre and y alone
    hyper_spread_forward   X_j = encoded, of an embedding
Sinkhorn of (hc, hc): softmax of the rows + eps_h; then columns, and iters - 1 times rows and columns, are divided by
(their sum + eps_h). r, z, pre, post and comb are float.
Backward, everything written but where it says otherwise, in the order of a layer's backward:
    hyper_expand_backward  df = sum over k of post[k] dout_k    dX_j = sum over k of comb[j][k] dout_k
                           dpost[k] = f . dout_k    dcomb[j][k] = X_j . dout_k      dX may be dout
    hyper_site_backward    dX_j += pre[j] dy, then dX += r (fn^T dz) - u (r^2 / n) (dz . z), where dz = da * scale and
                           da: of pre  (X_j . dy) s (1 - s), s the sigmoid; of post  dpost post (1 - s); of comb
                           Sinkhorn's steps upside down, each dP = (dP - sum of dP Y) / q with Y and q of the step, then
                           S (dP - sum of dP S) with S the softmax
                           dfn (M, n) = sum over n of r dz u    dbase (M) = sum of da    dscale (3) = sum of da z
                           float; one call is one leaf. NULL for any of the three: nobody asks for it
    hyper_head_backward    the same of the head; dX is written
    hyper_spread_backward  dencoded = sum over j of dX_j
Cost:   on a CPU the products with fn, not bytes: 2*M*N*n flops forward, twice that backward, for 4 bytes of each of the
        N*n numbers of X, so 12 and 24 flops a byte with hc 4. Expand and spread are memory bound; to turn rows into
        lanes is most of expand's backward. N 512, hc 4, D 512 and 4096, one thread of a busy AMD EPYC with AVX2, whose
        peak is 91 GFLOP/s and whose memcpy of X took 0.11 and 2.5 ms, gcc 12, CPU time, the smallest of many calls:
            ms        site forward  expand  its backward, in place  site backward  without dfn  spread, back
            D 512              1.0    0.24             1.6     1.2            3.1          2.1   0.09   0.09
            D 4096             9.0     3.5            13.1     9.3           29.8         20.8    1.9    1.8
        which is 52 and 48 GFLOP/s forward, 34 and 28 backward. Two threads, D 512, wall time: 0.52, 0.12, 0.83, and 2.0
        for the site's backward. One thread of a busy Zen 5 with AVX-512, X from memory, in the table's order: D 512:
        0.48, 0.23, in place 0.72, 0.93, 0.72; D 4096: 4.3, 2.5, 7.0, 12.1, 8.7. A GPU: hyper_kernels.h.
Error:  fp32 against fp64 at the values of test_hyper_connections.c: comb of 20 iterations within 5e-7, its gradient
        1e-6. A step of Sinkhorn has hc + 2 roundings, which later steps do not enlarge. bf16 rounds what is stored:
        2^-8.
Order:  all sums are chains from 0, ascending: over a row's n or D numbers, over streams, over positions; dscale is one
        chain over positions, and in each over the numbers of its part. out_k is one chain, f first. dX has pre[j] dy by
        one madd, then the rest as one number. In C lanes hold positions where sums go along a row, else channels.
Source: Xie et al. 2025, arXiv:2512.24880 (mHC); Zhu et al. 2024, arXiv:2409.19606 (hyper-connections);
        doc/deepseek_v4.md "Formula". The reference: dev/ref/hyper_connections.py
*/
#ifndef LLMC_HYPER_CONNECTIONS_H
#define LLMC_HYPER_CONNECTIONS_H
#include "../core/device.h"  // Device, device_workspace, ceil_div, thread_number
#include "../core/fmath.h"   // fm_exp
#include "../core/madd.h"    // madd
#include "hyper_shape.h"     // HyperShape, hyper_numbers, hyper_part_, hyper_at_
#include "matmul.h"          // matmul_forward
#include "silu.h"            // sigmoid_one
#include <assert.h>
#include <math.h>
#ifdef __CUDACC__
#include "hyper_kernels.h"  // the same names on a GPU
#else
#include "../core/vec.h"  // vfloat, v_load, v_store, v_fill, v_madd, v_transpose
#endif

// ---- plain C: read this first; it defines every bit ----

// of each row
static inline void hyper_softmax_ref_(float* softmax, const float* A, int hc) {
    for (int j = 0; j < hc; j++) {
        float largest = A[j * hc], sum = 0.0f;
        for (int k = 1; k < hc; k++) { largest = A[j * hc + k] > largest ? A[j * hc + k] : largest; }
        for (int k = 0; k < hc; k++) { sum += fm_exp(A[j * hc + k] - largest); }
        for (int k = 0; k < hc; k++) { softmax[j * hc + k] = fm_exp(A[j * hc + k] - largest) / sum; }
    }
}

// A (hc, hc). P after so many divisions, and what the last one divided each row or column by
static inline void hyper_sinkhorn_ref_(float* P, float* q, const float* A, int n_steps, const HyperShape* s) {
    const int hc = s->hc;
    hyper_softmax_ref_(P, A, hc);
    for (int e = 0; e < hc * hc; e++) { P[e] += s->eps_h; }
    for (int step = 0; step < n_steps; step++) {
        const int by_row = step % 2;  // columns first
        for (int i = 0; i < hc; i++) {
            float sum = 0.0f;
            for (int k = 0; k < hc; k++) { sum += P[hyper_at_(by_row, i, k, hc)]; }
            q[i] = sum + s->eps_h;
            for (int k = 0; k < hc; k++) { P[hyper_at_(by_row, i, k, hc)] /= q[i]; }
        }
    }
}

static inline void hyper_sinkhorn_backward_ref_(float* dA, const float* dcomb, const float* A, const HyperShape* s) {
    const int hc = s->hc;
    float Y[HYPER_SQUARE], q[HYPER_STREAMS];
    for (int e = 0; e < hc * hc; e++) { dA[e] = dcomb[e]; }
    for (int step = 2 * s->iters - 2; step >= 0; step--) {
        const int by_row = step % 2;
        hyper_sinkhorn_ref_(Y, q, A, step + 1, s);
        for (int i = 0; i < hc; i++) {
            float dot = 0.0f;
            for (int k = 0; k < hc; k++) {
                const int e = hyper_at_(by_row, i, k, hc);
                dot = madd(dA[e], Y[e], dot);
            }
            for (int k = 0; k < hc; k++) {
                const int e = hyper_at_(by_row, i, k, hc);
                dA[e] = (dA[e] - dot) / q[i];
            }
        }
    }
    hyper_softmax_ref_(Y, A, hc);
    for (int j = 0; j < hc; j++) {
        float dot = 0.0f;
        for (int k = 0; k < hc; k++) { dot = madd(dA[j * hc + k], Y[j * hc + k], dot); }
        for (int k = 0; k < hc; k++) { dA[j * hc + k] = Y[j * hc + k] * (dA[j * hc + k] - dot); }
    }
}

// r, and M numbers z, of each position
static inline void hyper_mix_ref_(float* r, float* z, const float* X, const float* fn, const HyperShape* s, int M) {
    const size_t n = (size_t)s->hc * s->D;
    for (size_t t = 0; t < (size_t)s->N; t++) {
        const float* u = X + t * n;
        float squares = 0.0f;
        for (size_t i = 0; i < n; i++) { squares = madd(u[i], u[i], squares); }
        r[t] = 1.0f / sqrtf(squares / (float)n + s->eps_n);
        for (size_t m = 0; m < (size_t)M; m++) {
            float sum = 0.0f;
            for (size_t i = 0; i < n; i++) { sum = madd(u[i], fn[m * n + i], sum); }
            z[t * M + m] = r[t] * sum;
        }
    }
}

static inline void hyper_collapse_forward_ref(float* y, const float* X, const float* pre, const HyperShape* s) {
    const size_t hc = (size_t)s->hc, D = (size_t)s->D;
    for (size_t t = 0; t < (size_t)s->N; t++) {
        for (size_t d = 0; d < D; d++) {
            float sum = 0.0f;
            for (size_t j = 0; j < hc; j++) { sum = madd(pre[t * hc + j], X[(t * hc + j) * D + d], sum); }
            y[t * D + d] = sum;
        }
    }
}

// pre from z, of which a position has M numbers
static inline void hyper_pre_ref_(float* pre, const float* z, const float* base, const float* scale,
                                  const HyperShape* s, int M) {
    for (int i = 0; i < s->N * s->hc; i++) {
        const int t = i / s->hc, j = i % s->hc;
        pre[i] = sigmoid_one(z[(size_t)t * M + j] * scale[0] + base[j]) + s->eps_h;
    }
}

static inline void hyper_site_forward_ref(float* y, float* r, float* z, float* pre, float* post, float* comb,
                                          const float* X, const float* fn, const float* base, const float* scale,
                                          const HyperShape* s) {
    const int hc = s->hc, M = hyper_numbers(s);
    hyper_mix_ref_(r, z, X, fn, s, M);
    for (size_t t = 0; t < (size_t)s->N; t++) {
        float a[HYPER_MOST], q[HYPER_STREAMS];
        for (int m = 0; m < M; m++) { a[m] = z[t * M + m] * scale[hyper_part_(m, hc)] + base[m]; }
        for (int k = 0; k < hc; k++) { post[t * hc + k] = 2.0f * sigmoid_one(a[hc + k]); }
        hyper_sinkhorn_ref_(comb + t * hc * hc, q, a + 2 * hc, 2 * s->iters - 1, s);
    }
    hyper_pre_ref_(pre, z, base, scale, s, M);
    hyper_collapse_forward_ref(y, X, pre, s);
}

static inline void hyper_head_forward_ref(float* y, float* r, float* z, float* pre, const float* X, const float* fn,
                                          const float* base, const float* scale, const HyperShape* s) {
    hyper_mix_ref_(r, z, X, fn, s, s->hc);
    hyper_pre_ref_(pre, z, base, scale, s, s->hc);
    hyper_collapse_forward_ref(y, X, pre, s);
}

static inline void hyper_expand_forward_ref(float* out, const float* X, const float* f, const float* post,
                                            const float* comb, const HyperShape* s) {
    const size_t hc = (size_t)s->hc, D = (size_t)s->D;
    for (size_t t = 0; t < (size_t)s->N; t++) {
        for (size_t k = 0; k < hc; k++) {
            for (size_t d = 0; d < D; d++) {
                float sum = madd(post[t * hc + k], f[t * D + d], 0.0f);
                for (size_t j = 0; j < hc; j++) {
                    sum = madd(comb[(t * hc + j) * hc + k], X[(t * hc + j) * D + d], sum);
                }
                out[(t * hc + k) * D + d] = sum;
            }
        }
    }
}

// df and dX of one channel d; dX may be dout
static inline void hyper_expand_channel_ref_(float* df, float* dX, const float* dout, const float* post,
                                             const float* comb, size_t d, size_t hc, size_t D) {
    float sum = 0.0f, sums[HYPER_STREAMS] = {0};
    for (size_t k = 0; k < hc; k++) {
        sum = madd(post[k], dout[k * D + d], sum);
        for (size_t j = 0; j < hc; j++) { sums[j] = madd(comb[j * hc + k], dout[k * D + d], sums[j]); }
    }
    df[d] = sum;
    for (size_t j = 0; j < hc; j++) { dX[j * D + d] = sums[j]; }
}

static inline void hyper_expand_backward_ref(float* df, float* dX, float* dpost, float* dcomb, const float* dout,
                                             const float* X, const float* f, const float* post, const float* comb,
                                             const HyperShape* s) {
    const size_t hc = (size_t)s->hc, D = (size_t)s->D;
    for (size_t t = 0; t < (size_t)s->N; t++) {
        for (size_t k = 0; k < hc; k++) {
            const float* d_k = dout + (t * hc + k) * D;
            float sum = 0.0f;
            for (size_t d = 0; d < D; d++) { sum = madd(d_k[d], f[t * D + d], sum); }
            dpost[t * hc + k] = sum;
            for (size_t j = 0; j < hc; j++) {
                float dot = 0.0f;
                for (size_t d = 0; d < D; d++) { dot = madd(X[(t * hc + j) * D + d], d_k[d], dot); }
                dcomb[(t * hc + j) * hc + k] = dot;
            }
        }
        for (size_t d = 0; d < D; d++) {
            hyper_expand_channel_ref_(df + t * D, dX + t * hc * D, dout + t * hc * D, post + t * hc,
                                      comb + t * hc * hc, d, hc, D);
        }
    }
}

// what base gets of one position: da (M). dpre[j] is X_j . dy; dpost NULL: the head
static inline void hyper_da_ref_(float* da, const float* dy, const float* dpost, const float* dcomb, const float* X,
                                 const float* z, const float* post, const float* base, const float* scale,
                                 const HyperShape* s) {
    const int hc = s->hc;
    float A[HYPER_SQUARE];
    for (int j = 0; j < hc; j++) {
        const float sigmoid = sigmoid_one(z[j] * scale[0] + base[j]);
        float dpre = 0.0f;
        for (int d = 0; d < s->D; d++) { dpre = madd(X[(size_t)j * s->D + d], dy[d], dpre); }
        da[j] = dpre * (sigmoid * (1.0f - sigmoid));
    }
    if (!dpost) { return; }
    for (int m = hc; m < 2 * hc; m++) {
        const float sigmoid = sigmoid_one(z[m] * scale[1] + base[m]);
        da[m] = dpost[m - hc] * (post[m - hc] * (1.0f - sigmoid));
    }
    for (int e = 0; e < hc * hc; e++) { A[e] = z[2 * hc + e] * scale[2] + base[2 * hc + e]; }
    hyper_sinkhorn_backward_ref_(da + 2 * hc, dcomb, A, s);
}

// dX of one position, with t = (r^2 / n) (dz . z)
static inline void hyper_dx_ref_(float* dX, const float* dy, const float* u, const float* da, float r, const float* z,
                                 const float* pre, const float* fn, const float* scale, int add, const HyperShape* s,
                                 int M) {
    const size_t n = (size_t)s->hc * s->D;
    float dot = 0.0f;
    for (int m = 0; m < M; m++) { dot = madd(da[m] * scale[hyper_part_(m, s->hc)], z[m], dot); }
    const float t = r * r / (float)n * dot;
    for (size_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int m = 0; m < M; m++) { sum = madd(da[m] * scale[hyper_part_(m, s->hc)], fn[m * n + i], sum); }
        dX[i] = madd(pre[i / s->D], dy[i % s->D], add ? dX[i] : 0.0f) + (r * sum - u[i] * t);
    }
}

// of the parameters; da (N, M)
static inline void hyper_parameters_ref_(float* dfn, float* dbase, float* dscale, const float* da, const float* X,
                                         const float* r, const float* z, const float* scale, const HyperShape* s,
                                         int M) {
    const size_t n = (size_t)s->hc * s->D;
    for (int part = 0; dscale && part < (M > s->hc ? 3 : 1); part++) { dscale[part] = 0.0f; }
    for (int m = 0; dbase && m < M; m++) { dbase[m] = 0.0f; }
    for (size_t i = 0; dfn && i < M * n; i++) { dfn[i] = 0.0f; }
    for (size_t t = 0; t < (size_t)s->N; t++) {
        for (int m = 0; m < M; m++) {
            const int part = hyper_part_(m, s->hc);
            const float d = da[t * M + m], left = r[t] * (d * scale[part]);
            if (dscale) { dscale[part] = madd(d, z[t * M + m], dscale[part]); }
            if (dbase) { dbase[m] += d; }
            for (size_t i = 0; dfn && i < n; i++) { dfn[m * n + i] = madd(left, X[t * n + i], dfn[m * n + i]); }
        }
    }
}

// dpost NULL: the head
static inline void hyper_backward_ref_(float* dX, float* dfn, float* dbase, float* dscale, const float* dy,
                                       const float* dpost, const float* dcomb, const float* X, const float* r,
                                       const float* z, const float* pre, const float* post, const float* fn,
                                       const float* base, const float* scale, const HyperShape* s) {
    const size_t hc = (size_t)s->hc, n = hc * s->D, M = dpost ? (size_t)hyper_numbers(s) : hc;
    float* da = (float*)malloc_check(sizeof(float) * (s->N * M + 1), "da");
    for (size_t t = 0; t < (size_t)s->N; t++) {
        hyper_da_ref_(da + t * M, dy + t * s->D, dpost ? dpost + t * hc : NULL, dpost ? dcomb + t * hc * hc : NULL,
                      X + t * n, z + t * M, dpost ? post + t * hc : NULL, base, scale, s);
        hyper_dx_ref_(dX + t * n, dy + t * s->D, X + t * n, da + t * M, r[t], z + t * M, pre + t * hc, fn, scale,
                      dpost != NULL, s, (int)M);
    }
    hyper_parameters_ref_(dfn, dbase, dscale, da, X, r, z, scale, s, (int)M);
    free(da);
}

static inline void hyper_site_backward_ref(float* dX, float* dfn, float* dbase, float* dscale, const float* dy,
                                           const float* dpost, const float* dcomb, const float* X, const float* r,
                                           const float* z, const float* pre, const float* post, const float* fn,
                                           const float* base, const float* scale, const HyperShape* s) {
    hyper_backward_ref_(dX, dfn, dbase, dscale, dy, dpost, dcomb, X, r, z, pre, post, fn, base, scale, s);
}

static inline void hyper_head_backward_ref(float* dX, float* dfn, float* dbase, float* dscale, const float* dy,
                                           const float* X, const float* r, const float* z, const float* pre,
                                           const float* fn, const float* base, const float* scale,
                                           const HyperShape* s) {
    hyper_backward_ref_(dX, dfn, dbase, dscale, dy, NULL, NULL, X, r, z, pre, NULL, fn, base, scale, s);
}

static inline void hyper_spread_forward_ref(float* X, const float* encoded, int N, int hc, int D) {
    for (size_t row = 0; row < (size_t)N * hc; row++) {
        for (size_t d = 0; d < (size_t)D; d++) { X[row * D + d] = encoded[row / hc * D + d]; }
    }
}

static inline void hyper_spread_backward_ref(float* dencoded, const float* dX, int N, int hc, int D) {
    for (size_t t = 0; t < (size_t)N; t++) {
        for (size_t d = 0; d < (size_t)D; d++) {
            float sum = 0.0f;
            for (size_t j = 0; j < (size_t)hc; j++) { sum += dX[(t * hc + j) * D + d]; }
            dencoded[t * D + d] = sum;
        }
    }
}

#ifndef __CUDACC__  // ---- fast C ----

enum {
    HYPER_SIDE = 16,                       // positions side by side: one vector or several
    HYPER_PIECE = VLANES == 16 ? 12 : 6,   // numbers of a site whose sums, one vector or two, are in registers
    HYPER_CHUNK = 128,                     // channels of a block of positions that are turned at a time
    HYPER_CHANNELS = 16,                   // ...and of several streams
    HYPER_AHEAD = 128,                     // floats of a row that are asked for ahead of time
    HYPER_ROWS = VLANES == 16 ? 8 : 4,     // positions, and channels of each, whose part of dX registers hold
    HYPER_WIDE = 3 * VLANES,
    HYPER_PANEL = 64,                      // columns of dfn of a task...
    HYPER_TERMS = 64                       // ...and positions between two visits of them
};

static inline int hyper_least_(int a, int b) { return a < b ? a : b; }
// M filled up to whole pieces, and to whole vectors of them
static inline int hyper_round_(int M) { return (M + HYPER_PIECE - 1) / HYPER_PIECE * HYPER_PIECE; }
static inline size_t hyper_row_(int M) { return (size_t)(hyper_round_(M) + VLANES - 1) / VLANES * VLANES; }

// n numbers, those beyond VLANES left out; zeros follow
static inline __attribute__((always_inline)) vfloat hyper_load_(const float* x, int n) {
    float part[VLANES] = {0};
    if (n >= VLANES) { return v_load(x); }
    memcpy(part, x, sizeof(float) * (size_t)n);
    return v_load(part);
}
static inline __attribute__((always_inline)) void hyper_store_(float* x, vfloat v, int n) {
    float part[VLANES];
    if (n >= VLANES) {
        v_store(x, v);
        return;
    }
    v_store(part, v);
    memcpy(x, part, sizeof(float) * (size_t)n);
}

// ---- HYPER_SIDE positions side by side; where there are fewer, the last one stands in for the rest ----

typedef struct {
    size_t at[HYPER_SIDE];  // number of each position
    int n;                  // that there are
} HyperSide;

typedef float HyperLanes[HYPER_SIDE];  // a number of each

static inline HyperSide hyper_side_(int first, int N) {
    HyperSide l;
    l.n = hyper_least_(HYPER_SIDE, N - first);
    for (int r = 0; r < HYPER_SIDE; r++) { l.at[r] = (size_t)(first + hyper_least_(r, l.n - 1)); }
    return l;
}

// columns[i][r] is number `from` + i of row r of x, for i < n. A line of a row is taken whole: rows that lie a power of
// two apart drive each other out of the first cache
static inline __attribute__((always_inline)) void hyper_columns_(HyperLanes* columns, const float* x, size_t row,
                                                                 size_t from, int n, const HyperSide* l) {
    const float* rows[HYPER_SIDE];
    vfloat square[VLANES];
    for (int r = 0; r < HYPER_SIDE; r++) { rows[r] = x + l->at[r] * row + from; }
    for (int line = 0; line < n; line += GEMM_LINE) {
        for (int r = 0; r < HYPER_SIDE; r++) { __builtin_prefetch(rows[r] + line + HYPER_AHEAD, 0, 2); }
        for (int v = 0; v < HYPER_SIDE; v += VLANES) {
            for (int i = line; i < line + GEMM_LINE && i < n; i += VLANES) {
                for (int r = 0; r < VLANES; r++) { square[r] = hyper_load_(rows[v + r] + i, n - i); }
                v_transpose(square);
                for (int k = 0; k < VLANES; k++) {
                    if (k < n - i) { v_store(columns[i + k] + v, square[k]); }
                }
            }
        }
    }
}

// numbers of positions, `width` of each: into lanes and back
static inline void hyper_into_lanes_(HyperLanes* lanes, const float* x, int width, const HyperSide* l) {
    for (int r = 0; r < HYPER_SIDE; r++) {
        for (int i = 0; i < width; i++) { lanes[i][r] = x[l->at[r] * width + i]; }
    }
}
static inline void hyper_out_of_lanes_(float* x, HyperLanes* lanes, int width, const HyperSide* l) {
    for (int r = 0; r < l->n; r++) {
        for (int i = 0; i < width; i++) { x[l->at[r] * width + i] = lanes[i][r]; }
    }
}

// ---- Sinkhorn ----

static inline __attribute__((always_inline)) void hyper_softmax_(vfloat* softmax, HyperLanes* A, int v,
                                                                 int hc) {
    for (int j = 0; j < hc; j++, A += hc, softmax += hc) {
        float largest[VLANES], e[HYPER_STREAMS][VLANES];
        #pragma omp simd
        for (int r = 0; r < VLANES; r++) {
            largest[r] = A[0][v + r];
            for (int k = 1; k < hc; k++) { largest[r] = A[k][v + r] > largest[r] ? A[k][v + r] : largest[r]; }
        }
        vfloat sum = v_fill(0.0f);
        for (int k = 0; k < hc; k++) {
            #pragma omp simd
            for (int r = 0; r < VLANES; r++) { e[k][r] = fm_exp(A[k][v + r] - largest[r]); }
            sum += v_load(e[k]);
        }
        for (int k = 0; k < hc; k++) { softmax[k] = v_load(e[k]) / sum; }
    }
}

// one step: P = before / q
static inline __attribute__((always_inline)) void hyper_step_(vfloat* P, vfloat* q, const vfloat* before, int by_row,
                                                              int hc, float eps) {
    for (int i = 0; i < hc; i++) {
        vfloat sum = v_fill(0.0f);
        for (int k = 0; k < hc; k++) { sum += before[hyper_at_(by_row, i, k, hc)]; }
        q[i] = sum + v_fill(eps);
        for (int k = 0; k < hc; k++) {
            const int e = hyper_at_(by_row, i, k, hc);
            P[e] = before[e] / q[i];
        }
    }
}

static inline __attribute__((always_inline)) void hyper_sinkhorn_(HyperLanes* comb, HyperLanes* A, int v, int hc,
                                                                  const HyperShape* s) {
    vfloat P[HYPER_SQUARE], q[HYPER_STREAMS];
    hyper_softmax_(P, A, v, hc);
    for (int e = 0; e < hc * hc; e++) { P[e] += v_fill(s->eps_h); }
    for (int step = 0; step < 2 * s->iters - 1; step++) { hyper_step_(P, q, P, step % 2, hc, s->eps_h); }
    for (int e = 0; e < hc * hc; e++) { v_store(comb[e] + v, P[e]); }
}

// vectors that all steps leave: P before the first, then of each step P and q
static inline size_t hyper_steps_(const HyperShape* s) {
    return (size_t)2 * s->iters * (s->hc * s->hc + s->hc) + s->hc * s->hc;
}

// dA takes the place of dcomb
static inline __attribute__((always_inline)) void hyper_sinkhorn_backward_(HyperLanes* dcomb, HyperLanes* A,
                                                                           vfloat* steps, int v, int hc,
                                                                           const HyperShape* s) {
    const int square = hc * hc, each = square + hc, n_steps = 2 * s->iters - 1;
    vfloat dP[HYPER_SQUARE], softmax[HYPER_SQUARE], *P = steps;
    hyper_softmax_(softmax, A, v, hc);
    for (int e = 0; e < square; e++) { P[e] = softmax[e] + v_fill(s->eps_h), dP[e] = v_load(dcomb[e] + v); }
    for (int step = 0; step < n_steps; step++) {
        vfloat* next = steps + square + (size_t)step * each;
        hyper_step_(next, next + square, P, step % 2, hc, s->eps_h);
        P = next;
    }
    for (int step = n_steps - 1; step >= 0; step--) {
        const vfloat *Y = steps + square + (size_t)step * each, *q = Y + square;
        for (int i = 0; i < hc; i++) {
            vfloat dot = v_fill(0.0f);
            for (int k = 0; k < hc; k++) {
                const int e = hyper_at_(step % 2, i, k, hc);
                dot = v_madd(dP[e], Y[e], dot);
            }
            for (int k = 0; k < hc; k++) {
                const int e = hyper_at_(step % 2, i, k, hc);
                dP[e] = (dP[e] - dot) / q[i];
            }
        }
    }
    for (int j = 0; j < square; j += hc) {
        vfloat dot = v_fill(0.0f);
        for (int k = 0; k < hc; k++) { dot = v_madd(dP[j + k], softmax[j + k], dot); }
        for (int k = 0; k < hc; k++) { v_store(dcomb[j + k] + v, softmax[j + k] * (dP[j + k] - dot)); }
    }
}

// 4 streams, which models have, have code of their own
static inline void hyper_sinkhorn_lanes_(HyperLanes* comb, HyperLanes* A, const HyperShape* s) {
    for (int v = 0; v < HYPER_SIDE; v += VLANES) {
        if (s->hc == 4) { hyper_sinkhorn_(comb, A, v, 4, s); } else { hyper_sinkhorn_(comb, A, v, s->hc, s); }
    }
}
static inline void hyper_sinkhorn_backward_lanes_(HyperLanes* dcomb, HyperLanes* A, float* steps,
                                                  const HyperShape* s) {
    for (int v = 0; v < HYPER_SIDE; v += VLANES) {
        if (s->hc == 4) {
            hyper_sinkhorn_backward_(dcomb, A, (vfloat*)steps, v, 4, s);
        } else {
            hyper_sinkhorn_backward_(dcomb, A, (vfloat*)steps, v, s->hc, s);
        }
    }
}

// ---- forward ----

typedef struct {
    float *y, *r, *z, *pre, *post, *comb;  // post, comb NULL: of the head
    const float *X, *packed, *base, *scale;
    int M;
    const HyperShape* s;
} HyperForward;

// packed (n, hyper_row_(M)) = fn turned, zeros beyond M; by the threads of the enclosing parallel region, as all that
// follows with omp for
static inline void hyper_pack_(float* packed, const float* fn, int M, int n) {
    const size_t row = hyper_row_(M);
    #pragma omp for
    for (int i = 0; i < n; i += VLANES) {
        for (size_t m = 0; m < row; m += VLANES) {
            vfloat square[VLANES];
            for (size_t r = 0; r < VLANES; r++) {
                square[r] = m + r < (size_t)M ? hyper_load_(fn + (m + r) * n + i, n - i) : v_fill(0.0f);
            }
            v_transpose(square);
            for (int k = 0; k < VLANES; k++) {
                if (k < n - i) { v_store(packed + (size_t)(i + k) * row + m, square[k]); }
            }
        }
    }
}

// the sums of a piece and of VLANES positions go on with n terms
static inline __attribute__((always_inline)) void hyper_terms_(HyperLanes* sums, HyperLanes* x, const float* packed,
                                                               size_t row, int n) {
    enum { VECTORS = VLANES == 8 ? 2 : 1 };  // AVX2 has twice as many of half the length
    for (int v = 0; v < HYPER_SIDE; v += VECTORS * VLANES) {
        vfloat sum[HYPER_PIECE][VECTORS];
        #pragma GCC unroll 12
        for (int m = 0; m < HYPER_PIECE; m++) {
            for (int w = 0; w < VECTORS; w++) { sum[m][w] = v_load(sums[m] + v + w * VLANES); }
        }
        for (int i = 0; i < n; i++) {
            vfloat x_i[VECTORS];
            for (int w = 0; w < VECTORS; w++) { x_i[w] = v_load(x[i] + v + w * VLANES); }
            #pragma GCC unroll 12
            for (int m = 0; m < HYPER_PIECE; m++) {
                const vfloat f = v_fill(packed[i * row + m]);
                for (int w = 0; w < VECTORS; w++) { sum[m][w] = v_madd(f, x_i[w], sum[m][w]); }
            }
        }
        #pragma GCC unroll 12
        for (int m = 0; m < HYPER_PIECE; m++) {
            for (int w = 0; w < VECTORS; w++) { v_store(sums[m] + v + w * VLANES, sum[m][w]); }
        }
    }
}

static inline void hyper_squares_(HyperLanes squares, HyperLanes* x, int n) {
    vfloat sum[HYPER_SIDE / VLANES];
    for (int v = 0; v < HYPER_SIDE / VLANES; v++) { sum[v] = v_load(squares + v * VLANES); }
    for (int i = 0; i < n; i++) {
        for (int v = 0; v < HYPER_SIDE / VLANES; v++) {
            const vfloat x_i = v_load(x[i] + v * VLANES);
            sum[v] = v_madd(x_i, x_i, sum[v]);
        }
    }
    for (int v = 0; v < HYPER_SIDE / VLANES; v++) { v_store(squares + v * VLANES, sum[v]); }
}

// z and r of these positions
static inline void hyper_mix_(HyperLanes* z, const HyperForward* p, const HyperSide* l) {
    const int n = p->s->hc * p->s->D, M_round = hyper_round_(p->M);
    const size_t row = hyper_row_(p->M);
    HyperLanes x[HYPER_CHUNK], r[1] = {{0}};
    memset(z, 0, sizeof(HyperLanes) * (size_t)M_round);
    for (int c = 0; c < n; c += HYPER_CHUNK) {
        const int n_c = hyper_least_(HYPER_CHUNK, n - c);
        hyper_columns_(x, p->X, (size_t)n, (size_t)c, n_c, l);
        hyper_squares_(r[0], x, n_c);
        for (int m = 0; m < M_round; m += HYPER_PIECE) { hyper_terms_(z + m, x, p->packed + c * row + m, row, n_c); }
    }
    #pragma omp simd
    for (int i = 0; i < HYPER_SIDE; i++) { r[0][i] = 1.0f / sqrtf(r[0][i] / (float)n + p->s->eps_n); }
    for (int m = 0; m < p->M; m++) {
        #pragma omp simd
        for (int i = 0; i < HYPER_SIDE; i++) { z[m][i] = r[0][i] * z[m][i]; }
    }
    hyper_out_of_lanes_(p->r, r, 1, l);
    hyper_out_of_lanes_(p->z, z, p->M, l);
}

// where z has the products, and packed is NULL
static inline void hyper_mix_few_(HyperLanes* z, const HyperForward* p, const HyperSide* l) {
    const int n = p->s->hc * p->s->D;
    for (int i = 0; i < l->n; i++) {
        const float* u = p->X + l->at[i] * n;
        float squares = 0.0f;
        for (int c = 0; c < n; c++) { squares = madd(u[c], u[c], squares); }
        const float r = 1.0f / sqrtf(squares / (float)n + p->s->eps_n);
        p->r[l->at[i]] = r;
        for (int m = 0; m < p->M; m++) { p->z[l->at[i] * p->M + m] *= r; }
    }
    hyper_into_lanes_(z, p->z, p->M, l);
}

// a, and sigmoid of the first n_sigmoids
static inline void hyper_logits_(HyperLanes* a, HyperLanes* sigmoid, HyperLanes* z, int M, int n_sigmoids,
                                 const float* base, const float* scale, int hc) {
    for (int m = 0; m < M; m++) {
        const float factor = scale[hyper_part_(m, hc)];
        #pragma omp simd
        for (int r = 0; r < HYPER_SIDE; r++) { a[m][r] = z[m][r] * factor + base[m]; }
    }
    for (int m = 0; m < n_sigmoids; m++) {
        #pragma omp simd
        for (int r = 0; r < HYPER_SIDE; r++) { sigmoid[m][r] = sigmoid_one(a[m][r]); }
    }
}

// y of one position
static inline __attribute__((always_inline)) void hyper_collapse_row_(float* y, const float* X, const float* pre,
                                                                      int hc, int D) {
    for (int d = 0; d < D; d += VLANES) {
        vfloat sum = v_fill(0.0f);
        for (int j = 0; j < hc; j++) { sum = v_madd(v_fill(pre[j]), hyper_load_(X + (size_t)j * D + d, D - d), sum); }
        hyper_store_(y + d, sum, D - d);
    }
}

// ... of position t
static inline void hyper_collapse_(float* y, const float* X, const float* pre, const HyperShape* s, size_t t) {
    const int hc = s->hc, D = s->D;
    y += t * D, X += t * hc * D, pre += t * hc;
    if (hc == 4) { hyper_collapse_row_(y, X, pre, 4, D); } else { hyper_collapse_row_(y, X, pre, hc, D); }
}

static inline void hyper_collapse_forward(float* y, const float* X, const float* pre, const HyperShape* s,
                                          const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (size_t t = 0; t < (size_t)s->N; t++) { hyper_collapse_(y, X, pre, s, t); }
}

// what follows from z, and y
static inline void hyper_forward_side_(const HyperForward* p, int first) {
    const HyperShape* s = p->s;
    const int hc = s->hc, is_site = p->post != NULL;
    const HyperSide l = hyper_side_(first, s->N);
    HyperLanes z[HYPER_MOST + HYPER_PIECE], a[HYPER_MOST], sigmoid[2 * HYPER_STREAMS], comb[HYPER_SQUARE];
    if (p->packed) { hyper_mix_(z, p, &l); } else { hyper_mix_few_(z, p, &l); }
    hyper_logits_(a, sigmoid, z, p->M, is_site ? 2 * hc : hc, p->base, p->scale, hc);
    for (int j = 0; j < hc; j++) {
        for (int r = 0; r < HYPER_SIDE; r++) { sigmoid[j][r] += s->eps_h; }
    }
    hyper_out_of_lanes_(p->pre, sigmoid, hc, &l);
    if (is_site) {
        for (int k = hc; k < 2 * hc; k++) {
            for (int r = 0; r < HYPER_SIDE; r++) { sigmoid[k][r] = 2.0f * sigmoid[k][r]; }
        }
        hyper_out_of_lanes_(p->post, sigmoid + hc, hc, &l);
        hyper_sinkhorn_lanes_(comb, a + 2 * hc, s);
        hyper_out_of_lanes_(p->comb, comb, hc * hc, &l);
    }
    for (size_t t = (size_t)first; t < (size_t)first + l.n; t++) { hyper_collapse_(p->y, p->X, p->pre, s, t); }
}

// Few positions, as in generation, do without the copy of fn
static inline void hyper_forward_(HyperForward* p, const float* fn, const Device* dev) {
    const HyperShape* s = p->s;
    const int n = s->hc * s->D;
    assert(s->hc >= 1 && s->hc <= HYPER_STREAMS && s->iters >= 1);
    float* packed = NULL;
    if (s->N <= GEMM_FEW) {
        matmul_forward(p->z, p->X, fn, NULL, s->N, n, p->M, dev);
    } else {
        packed = device_workspace(dev, sizeof(float) * hyper_row_(p->M) * n);
    }
    p->packed = packed;
    #pragma omp parallel
    {
        if (packed) { hyper_pack_(packed, fn, p->M, n); }
        #pragma omp for schedule(dynamic) nowait
        for (int first = 0; first < s->N; first += HYPER_SIDE) { hyper_forward_side_(p, first); }
    }
}

static inline void hyper_site_forward(float* y, float* r, float* z, float* pre, float* post, float* comb,
                                      const float* X, const float* fn, const float* base, const float* scale,
                                      const HyperShape* s, const Device* dev) {
    HyperForward p = {y, r, z, pre, post, comb, X, NULL, base, scale, hyper_numbers(s), s};
    hyper_forward_(&p, fn, dev);
}

static inline void hyper_head_forward(float* y, float* r, float* z, float* pre, const float* X, const float* fn,
                                      const float* base, const float* scale, const HyperShape* s, const Device* dev) {
    HyperForward p = {y, r, z, pre, NULL, NULL, X, NULL, base, scale, s->hc, s};
    hyper_forward_(&p, fn, dev);
}

// ---- expand ----

// one position
static inline __attribute__((always_inline)) void hyper_expand_(float* out, const float* X, const float* f,
                                                                const float* post, const float* comb, int hc,
                                                                size_t D) {
    for (size_t d = 0; d < D; d += VLANES) {
        const int n = D - d < VLANES ? (int)(D - d) : VLANES;
        const vfloat f_d = hyper_load_(f + d, n);
        vfloat sums[HYPER_STREAMS];
        #pragma GCC unroll 8
        for (int k = 0; k < HYPER_STREAMS; k++) {
            sums[k] = k < hc ? v_madd(v_fill(post[k]), f_d, v_fill(0.0f)) : v_fill(0.0f);
        }
        for (int j = 0; j < hc; j++) {
            const vfloat x = hyper_load_(X + (size_t)j * D + d, n);
            #pragma GCC unroll 8
            for (int k = 0; k < hc; k++) { sums[k] = v_madd(v_fill(comb[j * hc + k]), x, sums[k]); }
        }
        #pragma GCC unroll 8
        for (int k = 0; k < hc; k++) { hyper_store_(out + (size_t)k * D + d, sums[k], n); }
    }
}

static inline void hyper_expand_forward(float* out, const float* X, const float* f, const float* post,
                                        const float* comb, const HyperShape* s, const Device* dev) {
    const size_t hc = (size_t)s->hc, D = (size_t)s->D;
    (void)dev;
    assert(s->hc >= 1 && s->hc <= HYPER_STREAMS);
    #pragma omp parallel for
    for (size_t t = 0; t < (size_t)s->N; t++) {
        if (hc == 4) {
            hyper_expand_(out + t * hc * D, X + t * hc * D, f + t * D, post + t * hc, comb + t * hc * hc, 4, D);
        } else {
            hyper_expand_(out + t * hc * D, X + t * hc * D, f + t * D, post + t * hc, comb + t * hc * hc, (int)hc, D);
        }
    }
}

typedef struct {
    float *df, *dX, *dpost, *dcomb;
    const float *dout, *X, *f, *post, *comb;
    const HyperShape* s;
} HyperExpand;

// the dot products go on with n channels. dots: of post, then of comb; dout: of all streams
static inline __attribute__((always_inline)) void hyper_dots_(HyperLanes* dots, HyperLanes* x, HyperLanes* dout,
                                                              int n, int v, int hc) {
    vfloat sum[HYPER_STREAMS];
    #pragma GCC unroll 8
    for (int k = 0; k < HYPER_STREAMS; k++) { sum[k] = k < hc ? v_load(dots[k] + v) : v_fill(0.0f); }
    for (int i = 0; i < n; i++) {
        const vfloat x_i = v_load(x[i] + v);
        #pragma GCC unroll 8
        for (int k = 0; k < hc; k++) { sum[k] = v_madd(x_i, v_load(dout[k * HYPER_CHANNELS + i] + v), sum[k]); }
    }
    #pragma GCC unroll 8
    for (int k = 0; k < hc; k++) { v_store(dots[k] + v, sum[k]); }
}

// channels d..end of these positions
static inline __attribute__((always_inline)) void hyper_dots_chunk_(HyperLanes* dots, const HyperExpand* p,
                                                                    const HyperSide* l, int d, int end, int hc) {
    const size_t D = (size_t)p->s->D, n = (size_t)hc * D;
    HyperLanes dout[HYPER_STREAMS * HYPER_CHANNELS], x[HYPER_CHANNELS];
    for (int n_d; d < end; d += n_d) {
        n_d = hyper_least_(HYPER_CHANNELS, end - d);
        for (int k = 0; k < hc; k++) {
            hyper_columns_(dout + k * HYPER_CHANNELS, p->dout, n, (size_t)k * D + d, n_d, l);
        }
        for (int j = -1; j < hc; j++) {
            hyper_columns_(x, j < 0 ? p->f : p->X, j < 0 ? D : n, (j < 0 ? 0 : (size_t)j * D) + d, n_d, l);
            for (int v = 0; v < HYPER_SIDE; v += VLANES) { hyper_dots_(dots + (j + 1) * hc, x, dout, n_d, v, hc); }
        }
    }
}

// channels d..end of position t: df and dX, which may be dout
static inline __attribute__((always_inline)) void hyper_spread_back_(const HyperExpand* p, size_t t, int d, int end,
                                                                     int hc) {
    const size_t D = (size_t)p->s->D, n = (size_t)hc * D;
    const float *post = p->post + t * hc, *comb = p->comb + t * hc * hc;
    for (int n_d; d < end; d += n_d) {
        vfloat df = v_fill(0.0f), sums[HYPER_STREAMS];
        n_d = hyper_least_(VLANES, end - d);
        #pragma GCC unroll 8
        for (int j = 0; j < HYPER_STREAMS; j++) { sums[j] = v_fill(0.0f); }
        for (int k = 0; k < hc; k++) {
            const vfloat x = hyper_load_(p->dout + t * n + (size_t)k * D + d, n_d);
            df = v_madd(v_fill(post[k]), x, df);
            #pragma GCC unroll 8
            for (int j = 0; j < hc; j++) { sums[j] = v_madd(v_fill(comb[j * hc + k]), x, sums[j]); }
        }
        hyper_store_(p->df + t * D + d, df, n_d);
        #pragma GCC unroll 8
        for (int j = 0; j < hc; j++) { hyper_store_(p->dX + t * n + (size_t)j * D + d, sums[j], n_d); }
    }
}

// a chunk of channels is read for the dot products, then from the cache for the rest
static inline __attribute__((always_inline)) void hyper_expand_side_(const HyperExpand* p, int first, int hc) {
    const HyperSide l = hyper_side_(first, p->s->N);
    HyperLanes dots[HYPER_SQUARE + HYPER_STREAMS] = {{0}};
    for (int d = 0; d < p->s->D; d += HYPER_CHUNK) {
        const int end = hyper_least_(d + HYPER_CHUNK, p->s->D);
        hyper_dots_chunk_(dots, p, &l, d, end, hc);
        for (int r = 0; r < l.n; r++) { hyper_spread_back_(p, l.at[r], d, end, hc); }
    }
    hyper_out_of_lanes_(p->dpost, dots, hc, &l);
    hyper_out_of_lanes_(p->dcomb, dots + hc, hc * hc, &l);
}

static inline void hyper_expand_backward(float* df, float* dX, float* dpost, float* dcomb, const float* dout,
                                         const float* X, const float* f, const float* post, const float* comb,
                                         const HyperShape* s, const Device* dev) {
    const HyperExpand p = {df, dX, dpost, dcomb, dout, X, f, post, comb, s};
    (void)dev;
    assert(s->hc >= 1 && s->hc <= HYPER_STREAMS);
    #pragma omp parallel for schedule(dynamic)
    for (int first = 0; first < s->N; first += HYPER_SIDE) {
        if (s->hc == 4) { hyper_expand_side_(&p, first, 4); } else { hyper_expand_side_(&p, first, s->hc); }
    }
}

// ---- backward of a site or the head ----

typedef struct {
    float *dX, *da, *left, *packed;  // da (N, M); left (N, hyper_row_(M)): r dz; packed: by hyper_pack_wide_
    const float *dy, *dpost, *dcomb, *X, *r, *z, *pre, *post, *fn, *base, *scale;  // dpost NULL: of the head
    int M;
    const HyperShape* s;
} HyperBackward;

// dpre[j] = X_j . dy
static inline __attribute__((always_inline)) void hyper_dpre_(HyperLanes* dpre, const HyperBackward* p,
                                                              const HyperSide* l, int hc) {
    const size_t D = (size_t)p->s->D, n = (size_t)hc * D;
    HyperLanes dy[HYPER_CHANNELS], x[HYPER_STREAMS * HYPER_CHANNELS];
    memset(dpre, 0, sizeof(HyperLanes) * (size_t)hc);
    for (int d = 0; d < p->s->D; d += HYPER_CHANNELS) {
        const int n_d = hyper_least_(HYPER_CHANNELS, p->s->D - d);
        hyper_columns_(dy, p->dy, D, (size_t)d, n_d, l);
        for (int j = 0; j < hc; j++) {
            hyper_columns_(x + j * HYPER_CHANNELS, p->X, n, (size_t)j * D + d, n_d, l);
        }
        for (int v = 0; v < HYPER_SIDE; v += VLANES) { hyper_dots_(dpre, dy, x, n_d, v, hc); }
    }
}

// da from dpre, which stands at its beginning. z: of these positions
static inline void hyper_da_(HyperLanes* da, HyperLanes* z, const HyperBackward* p, float* steps,
                             const HyperSide* l) {
    const int hc = p->s->hc;
    HyperLanes a[HYPER_MOST], sigmoid[2 * HYPER_STREAMS], post[HYPER_STREAMS];
    hyper_logits_(a, sigmoid, z, p->M, p->dpost ? 2 * hc : hc, p->base, p->scale, hc);
    for (int j = 0; j < hc; j++) {
        for (int r = 0; r < HYPER_SIDE; r++) { da[j][r] *= sigmoid[j][r] * (1.0f - sigmoid[j][r]); }
    }
    if (!p->dpost) { return; }
    hyper_into_lanes_(post, p->post, hc, l);
    hyper_into_lanes_(da + hc, p->dpost, hc, l);
    for (int k = 0; k < hc; k++) {
        for (int r = 0; r < HYPER_SIDE; r++) { da[hc + k][r] *= post[k][r] * (1.0f - sigmoid[hc + k][r]); }
    }
    hyper_into_lanes_(da + 2 * hc, p->dcomb, hc * hc, l);
    hyper_sinkhorn_backward_lanes_(da + 2 * hc, a + 2 * hc, steps, p->s);
}

// of each stream its channels, HYPER_WIDE at a time: (M, HYPER_WIDE), zeros where the stream ends
static inline size_t hyper_wides_(const HyperShape* s) { return (size_t)ceil_div(s->D, HYPER_WIDE); }
static inline void hyper_pack_wide_(float* packed, const HyperBackward* p) {
    const size_t n_wides = hyper_wides_(p->s), D = (size_t)p->s->D, row = (size_t)p->s->hc * D;
    #pragma omp for
    for (size_t i = 0; i < (size_t)p->s->hc * n_wides; i++) {
        const size_t j = i / n_wides, d = i % n_wides * HYPER_WIDE, n = D - d < HYPER_WIDE ? D - d : (size_t)HYPER_WIDE;
        for (size_t m = 0; m < (size_t)p->M; m++) {
            float* to = packed + (i * p->M + m) * HYPER_WIDE;
            memcpy(to, p->fn + m * row + j * D + d, sizeof(float) * n);
            memset(to + n, 0, sizeof(float) * (HYPER_WIDE - n));
        }
    }
}

// what a position's channels from d on of stream j need beside the products fn^T dz, and where their dX goes
typedef struct {
    float* dX;
    const float *X, *dy;
    vfloat pre, r, t;
} HyperRow;

static inline __attribute__((always_inline)) HyperRow hyper_dx_row_(const HyperBackward* p, float t, size_t at, int j,
                                                                    int d) {
    const size_t stream = at * p->s->hc + j, D = (size_t)p->s->D;
    const HyperRow row = {p->dX + stream * D + d, p->X + stream * D + d, p->dy + at * D + d, v_fill(p->pre[stream]),
                          v_fill(p->r[at]), v_fill(t)};
    return row;
}

// its lines are asked for
static inline __attribute__((always_inline)) void hyper_dx_ask_(const HyperBackward* p, size_t at, int j, int d) {
    const size_t D = (size_t)p->s->D, of_stream = (at * p->s->hc + j) * D + d, of_y = at * D + d;
    for (int i = 0; i < HYPER_WIDE; i += GEMM_LINE) {
        __builtin_prefetch(p->dX + of_stream + i, 1, 3);
        __builtin_prefetch(p->X + of_stream + i, 0, 3);
        __builtin_prefetch(p->dy + of_y + i, 0, 3);
    }
}

// n channels: dX, which with add 0 begins at 0
static inline __attribute__((always_inline)) void hyper_dx_end_(const HyperRow* row, const vfloat* product, int add,
                                                                int n) {
    for (int i = 0; i < HYPER_WIDE && i < n; i += VLANES) {
        const vfloat before = add ? hyper_load_(row->dX + i, n - i) : v_fill(0.0f);
        const vfloat with_y = v_madd(row->pre, hyper_load_(row->dy + i, n - i), before);
        const vfloat du = row->r * product[i / VLANES] - hyper_load_(row->X + i, n - i) * row->t;
        hyper_store_(row->dX + i, with_y + du, n - i);
    }
}

// HYPER_WIDE channels of stream j, from d on, of the positions of l from `first` on. dz (M); t as in hyper_dx_ref_
static inline __attribute__((always_inline)) void hyper_dx_(const HyperBackward* p, HyperLanes* dz, const float* t,
                                                            const HyperSide* l, int first, int j, int d) {
    const float* f = p->packed + ((size_t)j * hyper_wides_(p->s) + d / HYPER_WIDE) * p->M * HYPER_WIDE;
    const int add = p->dpost != NULL, n = p->s->D - d, M = p->M;
    const float* factor = dz[0] + first;
    vfloat sums[HYPER_ROWS][3];
    #pragma GCC unroll 8
    for (int r = 0; r < HYPER_ROWS; r++) {
        hyper_dx_ask_(p, l->at[first + r], j, d);
        sums[r][0] = sums[r][1] = sums[r][2] = v_fill(0.0f);
    }
    for (int m = 0; m < M; m++, f += HYPER_WIDE, factor += HYPER_SIDE) {
        const vfloat f0 = v_load(f), f1 = v_load(f + VLANES), f2 = v_load(f + 2 * VLANES);
        #pragma GCC unroll 8
        for (int r = 0; r < HYPER_ROWS; r++) {
            const vfloat x = v_fill(factor[r]);
            sums[r][0] = v_madd(x, f0, sums[r][0]);
            sums[r][1] = v_madd(x, f1, sums[r][1]);
            sums[r][2] = v_madd(x, f2, sums[r][2]);
        }
    }
    #pragma GCC unroll 8
    for (int r = 0; r < HYPER_ROWS; r++) {
        if (first + r >= l->n) { break; }
        const HyperRow row = hyper_dx_row_(p, t[first + r], l->at[first + r], j, d);
        if (add && n >= HYPER_WIDE) {
            hyper_dx_end_(&row, sums[r], 1, HYPER_WIDE);
        } else {
            hyper_dx_end_(&row, sums[r], add, n);
        }
    }
}

static inline void hyper_backward_side_(const HyperBackward* p, int first, float* steps) {
    const HyperShape* s = p->s;
    const int hc = s->hc, M = p->M;
    const HyperSide l = hyper_side_(first, s->N);
    HyperLanes da[HYPER_MOST], z[HYPER_MOST], r[1], dot = {0};
    hyper_into_lanes_(z, p->z, M, &l);
    hyper_into_lanes_(r, p->r, 1, &l);
    if (hc == 4) { hyper_dpre_(da, p, &l, 4); } else { hyper_dpre_(da, p, &l, hc); }
    hyper_da_(da, z, p, steps, &l);
    hyper_out_of_lanes_(p->da, da, M, &l);
    for (int m = 0; m < M; m++) {  // da becomes dz
        const float factor = p->scale[hyper_part_(m, hc)];
        for (int i = 0; i < HYPER_SIDE; i++) {
            da[m][i] *= factor;
            dot[i] = madd(da[m][i], z[m][i], dot[i]);
        }
    }
    for (int i = 0; i < l.n; i++) {
        float* left = p->left + l.at[i] * hyper_row_(M);
        for (int m = 0; m < (int)hyper_row_(M); m++) { left[m] = m < M ? r[0][i] * da[m][i] : 0.0f; }
    }
    for (int i = 0; i < HYPER_SIDE; i++) { dot[i] = r[0][i] * r[0][i] / (float)(hc * s->D) * dot[i]; }
    for (int j = 0; j < hc; j++) {
        for (int d = 0; d < s->D; d += HYPER_WIDE) {
            for (int i = 0; i < l.n; i += HYPER_ROWS) { hyper_dx_(p, da, dot, &l, i, j, d); }
        }
    }
}

// two vectors of columns of a piece of rows of dfn: the chains go on over n positions, or with is_first begin at 0.
// n_rows, n_columns: that there are
static inline __attribute__((always_inline)) void hyper_dfn_tile_(float* dfn, size_t dfn_row, const float* left,
                                                                  size_t left_row, float (*x)[HYPER_PANEL], int n,
                                                                  int is_first, int n_rows, int n_columns) {
    vfloat sums[HYPER_PIECE][2];
    #pragma GCC unroll 12
    for (int m = 0; m < HYPER_PIECE; m++) {
        sums[m][0] = sums[m][1] = v_fill(0.0f);
        if (is_first || m >= n_rows) { continue; }
        sums[m][0] = hyper_load_(dfn + m * dfn_row, n_columns);
        if (n_columns > VLANES) { sums[m][1] = hyper_load_(dfn + m * dfn_row + VLANES, n_columns - VLANES); }
    }
    for (int t = 0; t < n; t++, left += left_row) {
        const vfloat x0 = v_load(x[t]), x1 = v_load(x[t] + VLANES);
        #pragma GCC unroll 12
        for (int m = 0; m < HYPER_PIECE; m++) {
            const vfloat factor = v_fill(left[m]);
            sums[m][0] = v_madd(factor, x0, sums[m][0]);
            sums[m][1] = v_madd(factor, x1, sums[m][1]);
        }
    }
    #pragma GCC unroll 12
    for (int m = 0; m < HYPER_PIECE; m++) {
        if (m >= n_rows) { continue; }
        hyper_store_(dfn + m * dfn_row, sums[m][0], n_columns);
        if (n_columns > VLANES) { hyper_store_(dfn + m * dfn_row + VLANES, sums[m][1], n_columns - VLANES); }
    }
}

// columns first..first + width of dfn. Positions are copied in blocks, so that neither many rows that lie a power of
// two apart nor several pieces read them from memory again
static inline void hyper_dfn_panel_(float* dfn, const HyperBackward* p, int first, int width) {
    const int N = p->s->N;
    const size_t row = (size_t)p->s->hc * p->s->D, left_row = hyper_row_(p->M);
    float x[HYPER_TERMS][HYPER_PANEL];
    memset(x, 0, sizeof x);
    for (int t = 0; t < N || t == 0; t += HYPER_TERMS) {
        const int n = hyper_least_(HYPER_TERMS, N - t);
        const float* X = p->X + (size_t)t * row + first;
        for (int k = 0; k < n; k++) { memcpy(x[k], X + k * row, sizeof(float) * (size_t)width); }
        for (int i = 0; i < width; i += 2 * VLANES) {
            for (int m = 0; m < p->M; m += HYPER_PIECE) {
                float* to = dfn + m * row + first + i;
                const float* left = p->left + (size_t)t * left_row + m;
                float (*from)[HYPER_PANEL] = (float (*)[HYPER_PANEL])(x[0] + i);
                if (p->M - m >= HYPER_PIECE && width - i >= 2 * VLANES) {
                    hyper_dfn_tile_(to, row, left, left_row, from, n, t == 0, HYPER_PIECE, 2 * VLANES);
                } else {
                    hyper_dfn_tile_(to, row, left, left_row, from, n, t == 0, p->M - m, width - i);
                }
            }
        }
    }
}

static inline void hyper_dfn_(float* dfn, const HyperBackward* p) {
    const int n = p->s->hc * p->s->D;
    #pragma omp for schedule(dynamic) nowait
    for (int first = 0; first < n; first += HYPER_PANEL) {
        hyper_dfn_panel_(dfn, p, first, hyper_least_(HYPER_PANEL, n - first));
    }
}

// a position after the other
static inline void hyper_few_gradients_(float* dbase, float* dscale, const HyperBackward* p) {
    const int M = p->M, hc = p->s->hc;
    float base[HYPER_MOST] = {0}, scale[3] = {0};
    const float *da = p->da, *z = p->z;
    for (int t = 0; t < p->s->N; t++, da += M, z += M) {
        for (int m = 0; m < M; m++) { base[m] += da[m]; }
        for (int m = 0; m < M; m++) { scale[hyper_part_(m, hc)] = madd(da[m], z[m], scale[hyper_part_(m, hc)]); }
    }
    for (int m = 0; dbase && m < M; m++) { dbase[m] = base[m]; }
    for (int part = 0; dscale && part < (M > hc ? 3 : 1); part++) { dscale[part] = scale[part]; }
}

static inline void hyper_backward_(float* dfn, float* dbase, float* dscale, HyperBackward* p, const Device* dev) {
    const HyperShape* s = p->s;
    const size_t n_steps = hyper_steps_(s) * VLANES, n_left = (size_t)s->N * hyper_row_(p->M);
    const size_t n_packed = s->hc * hyper_wides_(s) * p->M * HYPER_WIDE;
    assert(s->hc >= 1 && s->hc <= HYPER_STREAMS && s->iters >= 1);
    float* steps = device_workspace(dev, sizeof(float) * (n_steps * dev->n_threads + n_left + n_packed +
                                                          (size_t)s->N * p->M));
    p->left = steps + n_steps * dev->n_threads, p->packed = p->left + n_left, p->da = p->packed + n_packed;
    #pragma omp parallel
    {
        hyper_pack_wide_(p->packed, p);
        #pragma omp for schedule(dynamic)
        for (int first = 0; first < s->N; first += HYPER_SIDE) {
            hyper_backward_side_(p, first, steps + n_steps * thread_number());
        }
        #pragma omp single nowait  // chains over all positions, while the others begin with dfn
        if (dbase || dscale) { hyper_few_gradients_(dbase, dscale, p); }
        if (dfn) { hyper_dfn_(dfn, p); }
    }
}

static inline void hyper_site_backward(float* dX, float* dfn, float* dbase, float* dscale, const float* dy,
                                       const float* dpost, const float* dcomb, const float* X, const float* r,
                                       const float* z, const float* pre, const float* post, const float* fn,
                                       const float* base, const float* scale, const HyperShape* s,
                                       const Device* dev) {
    const int M = hyper_numbers(s);
    HyperBackward p = {dX, NULL, NULL, NULL, dy, dpost, dcomb, X, r, z, pre, post, fn, base, scale, M, s};
    hyper_backward_(dfn, dbase, dscale, &p, dev);
}

static inline void hyper_head_backward(float* dX, float* dfn, float* dbase, float* dscale, const float* dy,
                                       const float* X, const float* r, const float* z, const float* pre,
                                       const float* fn, const float* base, const float* scale, const HyperShape* s,
                                       const Device* dev) {
    HyperBackward p = {dX, NULL, NULL, NULL, dy, NULL, NULL, X, r, z, pre, NULL, fn, base, scale, s->hc, s};
    hyper_backward_(dfn, dbase, dscale, &p, dev);
}

// ---- spread ----

static inline void hyper_spread_forward(float* X, const float* encoded, int N, int hc, int D, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (size_t row = 0; row < (size_t)N * hc; row++) {
        memcpy(X + row * D, encoded + row / hc * D, sizeof(float) * (size_t)D);
    }
}

static inline void hyper_spread_backward(float* dencoded, const float* dX, int N, int hc, int D, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (size_t t = 0; t < (size_t)N; t++) {
        for (int d = 0; d < D; d += VLANES) {
            vfloat sum = v_fill(0.0f);
            for (int j = 0; j < hc; j++) { sum += hyper_load_(dX + (t * hc + j) * D + d, D - d); }
            hyper_store_(dencoded + t * D + d, sum, D - d);
        }
    }
}
#endif  // __CUDACC__
#endif  // LLMC_HYPER_CONNECTIONS_H
