/*
LoRA beside a linear layer in groups (block_matmul.h): the adapter is that of the stored matrix (OC, C/G), so all groups
share A, and each has its own rows of B. With the names of lora.h, and Cg = C/G, R = OC/G:
    inp (N, C)   A (r, Cg)   B (OC, r)   out (N, OC)
        u[n][g] = scale * (A x[n][g])                (N, G, r)   x[n][g]: the Cg inputs of the group, in training
        out[n][g*R ..] += B_g u[n][g]                            behind dropout
Backward. NULL for any of the three: nobody asks for it
    dB_g = sum over n of dout[n][g*R ..] u[n][g]^T   (OC, r)     float, written: one call is one leaf
    du[n][g] = scale * (B_g^T dout[n][g*R ..])       (N, G, r)
    dA = sum over n and g of du[n][g] x[n][g]^T      (r, Cg)     float, written
    dinp[n][g] += A^T du[n][g]                       (N, C)      or, where there is dropout, dropout(A^T du[n][g])
The LoraShape: N positions, C inputs of one group, n_out and out_row OC; its dropout counts the elements of inp as they
lie. scratch: block_lora_scratch_elements, as in lora.h.
Where ranks share the groups (--tp) the caller has G of all_groups, from column own.first of the inputs of all: arrays,
n_out and out_row are those of its own groups, A is whole, dropout counts the elements of all. dA sums over all groups,
so here it is NULL.
Cost:   2*N*r*(C + OC) flops forward, 2*N*r*(3*C + 2*OC) backward. A row of C is G rows of Cg, and so what A multiplies
        is one product for all groups.
Error:  as lora.h; dA is a sum of G times as many terms. In fast CUDA builds du is stored before it is multiplied by
        scale: one rounding more.
Order:  for each group that of lora.h for a linear layer of its own. dA is one chain from 0 over (position, group), the
        groups of a position ascending.
Source: Hu et al. 2021, arXiv:2106.09685; doc/deepseek_v4.md "What is trained"
*/
#ifndef LLMC_BLOCK_LORA_H
#define LLMC_BLOCK_LORA_H
#include "lora.h"  // LoraShape, lora_product_, lora_into_rank_, lora_out_of_rank_, lora_gradient_

// each group's inputs as a row
static inline LoraShape block_lora_rows_(const LoraShape* s, int G) {
    LoraShape rows = *s;
    rows.N = s->N * G;
    return rows;
}

// the columns of a position's inputs that the caller has of all
static inline LoraShape block_lora_columns_(const LoraShape* s, int G) {
    LoraShape columns = *s;
    columns.C = s->C * (s->all_groups > 0 ? s->all_groups : G);
    columns.own.n = s->C * G;
    return columns;
}

// ---- plain C: read this first; it defines every bit ----

static inline void block_lora_dropout_ref(float* out, const float* inp, const LoraShape* s, int G) {
    const LoraShape all = block_lora_columns_(s, G);
    for (size_t n = 0; n < (size_t)s->N; n++) {
        Dropout row = s->dropout;
        const size_t at = n * (size_t)all.own.n;
        row.first += n * (uint64_t)all.C + (uint64_t)all.own.first;
        dropout_ref(out + at, inp + at, &row, s->site, (size_t)all.own.n);
    }
}

// scratch of both: N * G * (2 * r + C) floats
static inline void block_lora_forward_ref(float* out, const float* inp, const float* A, const float* B,
                                          const LoraShape* s, int G, float* scratch) {
    const size_t r = (size_t)s->r, Cg = (size_t)s->C, R = (size_t)(s->n_out / G), n_rows = (size_t)s->N * G;
    float *u = scratch, *x = u + n_rows * r;
    if (s->dropout.p > 0.0f) { block_lora_dropout_ref(x, inp, s, G), inp = x; }
    for (size_t i = 0; i < n_rows * r; i++) {
        float sum = 0.0f;
        for (size_t c = 0; c < Cg; c++) { sum = madd(inp[i / r * Cg + c], A[i % r * Cg + c], sum); }
        u[i] = s->scale * sum;
    }
    for (size_t n = 0; n < (size_t)s->N; n++) {
        for (size_t o = 0; o < R * G; o++) {
            float sum = out[n * s->out_row + o];
            for (size_t j = 0; j < r; j++) { sum = madd(u[(n * G + o / R) * r + j], B[o * r + j], sum); }
            out[n * s->out_row + o] = sum;
        }
    }
}

// dweight (n_left, n_right): a chain over the rows of left[n][i] * right[n][k]
static inline void block_lora_gradient_ref(float* dweight, const float* left, size_t left_row, const float* right,
                                           size_t right_row, size_t n_rows, size_t n_left, size_t n_right) {
    for (size_t i = 0; i < n_left * n_right; i++) {
        float sum = 0.0f;
        for (size_t n = 0; n < n_rows; n++) {
            sum = madd(left[n * left_row + i / n_right], right[n * right_row + i % n_right], sum);
        }
        dweight[i] = sum;
    }
}

static inline void block_lora_backward_ref(float* dinp, float* dA, float* dB, const float* dout, const float* inp,
                                           const float* A, const float* B, const LoraShape* s, int G, float* scratch) {
    const size_t r = (size_t)s->r, Cg = (size_t)s->C, R = (size_t)(s->n_out / G), n_rows = (size_t)s->N * G;
    float *u = scratch, *du = u + n_rows * r, *x = du + n_rows * r;
    if ((dA || dB) && s->dropout.p > 0.0f) { block_lora_dropout_ref(x, inp, s, G), inp = x; }
    for (size_t i = 0; dB && i < n_rows * r; i++) {
        float sum = 0.0f;
        for (size_t c = 0; c < Cg; c++) { sum = madd(inp[i / r * Cg + c], A[i % r * Cg + c], sum); }
        u[i] = s->scale * sum;
    }
    for (size_t g = 0; dB && g < (size_t)G; g++) {
        block_lora_gradient_ref(dB + g * R * r, dout + g * R, s->out_row, u + g * r, G * r, (size_t)s->N, R, r);
    }
    for (size_t i = 0; (dA || dinp) && i < n_rows * r; i++) {
        const size_t n = i / r / G, first = i / r % G * R;
        float sum = 0.0f;
        for (size_t o = first; o < first + R; o++) { sum = madd(dout[n * s->out_row + o], B[o * r + i % r], sum); }
        du[i] = s->scale * sum;
    }
    if (dA) { block_lora_gradient_ref(dA, du, r, inp, Cg, n_rows, r, Cg); }
    for (size_t i = 0; dinp && i < n_rows * Cg; i++) {
        x[i] = s->dropout.p > 0.0f ? 0.0f : dinp[i];
        for (size_t j = 0; j < r; j++) { x[i] = madd(du[i / Cg * r + j], A[j * Cg + i % Cg], x[i]); }
    }
    if (dinp && s->dropout.p > 0.0f) {
        block_lora_dropout_ref(x, x, s, G);
        for (size_t i = 0; i < n_rows * Cg; i++) { dinp[i] += x[i]; }
    } else if (dinp) {
        memcpy(dinp, x, sizeof(float) * n_rows * Cg);
    }
}

// ---- fast: the same chains, by lora.h's products ----

static inline size_t block_lora_scratch_elements(const LoraShape* s, int G) {
    const LoraShape rows = block_lora_rows_(s, G);
    return lora_scratch_elements(&rows, 0);
}

#ifdef __CUDACC__
#define BLOCK_LORA_STORED template <typename LoraX>
#else
#define BLOCK_LORA_STORED
#endif

// where the result is comes back, as by dropout
BLOCK_LORA_STORED
static inline const LoraX* block_lora_dropout_(LoraX* out, const LoraX* inp, const LoraShape* s, int G,
                                               const Device* dev) {
    const LoraShape columns = block_lora_columns_(s, G);
    const size_t n = (size_t)s->N * (size_t)columns.own.n;
    if (columns.own.n == columns.C || s->dropout.p == 0.0f) { return dropout(out, inp, &s->dropout, s->site, n, dev); }
    device_zero(out, sizeof(LoraX) * n, dev);
    lora_add_dropped_(out, inp, dropout_site_(&s->dropout, s->site), &columns, dev);
    return out;
}

BLOCK_LORA_STORED
static inline void block_lora_forward(LoraX* out, const LoraX* inp, const LoraX* A, const LoraX* B, const LoraShape* s,
                                      int G, LoraX* scratch, const Device* dev) {
    const LoraShape rows = block_lora_rows_(s, G);
    const size_t r = (size_t)s->r, R = (size_t)(s->n_out / G);
    LoraX *u = scratch, *wide = u + 2 * lora_inside_elements_(&rows);
    assert(s->n_out % G == 0);
    if (s->N == 0) { return; }
    const LoraX* x = block_lora_dropout_(wide, inp, s, G, dev);
    lora_into_rank_(u, x, (size_t)s->C, NULL, A, 1, 0, &rows, NULL, s->C, dev);
    for (int g = 0; g < G; g++) {
        lora_product_(out + g * R, s->out_row, 1.0f, 1, gemm_matrix(u + g * r, G * r),
                      gemm_transposed(B + g * R * r, r), s->N, (int)R, s->r, dev);
    }
}

BLOCK_LORA_STORED
static inline void block_lora_backward(LoraX* dinp, float* dA, float* dB, const LoraX* dout, const LoraX* inp,
                                       const LoraX* A, const LoraX* B, const LoraShape* s, int G, LoraX* scratch,
                                       const Device* dev) {
    const LoraShape rows = block_lora_rows_(s, G), columns = block_lora_columns_(s, G);
    const size_t r = (size_t)s->r, C = (size_t)s->C, R = (size_t)(s->n_out / G);
    LoraX *u = scratch, *du = u + lora_inside_elements_(&rows), *wide = du + lora_inside_elements_(&rows);
    const LoraX* x = dA || dB ? block_lora_dropout_(wide, inp, s, G, dev) : inp;
    assert(s->n_out % G == 0 && (!dA || columns.own.n == columns.C));
    if (dB) { lora_into_rank_(u, x, C, NULL, A, 1, 0, &rows, NULL, s->C, dev); }
    for (int g = 0; g < G; g++) {
        if (dB) {
            lora_product_(dB + g * R * r, r, 1.0f, 0, gemm_transposed(dout + g * R, s->out_row),
                          gemm_matrix(u + g * r, G * r), (int)R, s->r, s->N, dev);
        }
        if ((dA || dinp) && s->N > 0) {
            lora_product_(du + g * r, G * r, 1.0f, 0, gemm_matrix(dout + g * R, s->out_row),
                          gemm_matrix(B + g * R * r, r), s->N, s->r, (int)R, dev);
        }
    }
    if ((dA || dinp) && s->N > 0) { lora_scale_rows_(du, du, NULL, s->scale, NULL, rows.N, s->r, dev); }
    if (dA) { lora_gradient_(dA, du, r, NULL, x, C, NULL, &rows, NULL, s->r, s->C, dev); }
    if (dinp && s->dropout.p == 0.0f) {
        lora_out_of_rank_(dinp, C, 1, du, A, 0, &rows, NULL, s->C, dev);
    } else if (dinp) {
        lora_out_of_rank_(wide, C, 0, du, A, 0, &rows, NULL, s->C, dev);
        lora_add_dropped_(dinp, wide, dropout_site_(&s->dropout, s->site), &columns, dev);
    }
}
#undef BLOCK_LORA_STORED
#endif  // LLMC_BLOCK_LORA_H
