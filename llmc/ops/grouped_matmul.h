/*
Linear layers of experts: each of R rows goes through the weight of its expert, nothing is padded and none is dropped.
    out (R, OC)   inp (R, C)   weight (E, OC, C)   offsets (E+1) on the device: rows offsets[e]..offsets[e+1]-1 are
    expert e's, from offsets[0] = 0 to offsets[E] = R; an expert may have none
    inp_index, dout_index (R) or NULL: row s of the operand is row index[s] of what is passed, which is read where it
    lies, as the MoE's rows are those of their tokens; no two of these rows need be different
Backward, row s of expert e:
    dinp[s]    = dout[s] * weight[e]                          (R, C)       written; NULL: nobody asks for it
    dweight[e] = sum over the expert's rows of dout^T * inp   (E, OC, C)   float, written; zeros where there are no rows
Cost:   2*R*C*OC flops each. Every expert's weight is read, or written, once: with so few rows for each that this takes
        longer than the products, judge it in GB/s. In C: the parts of a block of gemm.h, so one parallel region has the
        panels of all experts as its tasks.
Error:  as matmul.h.
Order:  out chains over c, dinp over oc, dweight over the expert's rows, all ascending from 0.
Source: Gale et al. 2023, "MegaBlocks", arXiv:2211.15841, for products without padding. Measured: dev/bench/grouped.c.
        Slower and faster kernels: dev/cuda/grouped_matmul.cu
*/
#ifndef LLMC_GROUPED_MATMUL_H
#define LLMC_GROUPED_MATMUL_H
#include "gemm.h"  // GemmPart, GemmBlock, gemm_block_, Matrix, MaybeNull, Device

// ---- plain C: read this first; it defines every bit ----

static inline const float* grouped_row_(const float* x, const int* index, size_t s, int width) {
    return x + (index ? (size_t)index[s] : s) * (size_t)width;
}

static inline void grouped_matmul_forward_ref(float* out, const float* inp, const int* inp_index, const float* weight,
                                              const int* offsets, int E, int C, int OC) {
    for (int e = 0; e < E; e++) {
        for (int s = offsets[e]; s < offsets[e + 1]; s++) {
            const float* x = grouped_row_(inp, inp_index, (size_t)s, C);
            for (int oc = 0; oc < OC; oc++) {
                const float* w = weight + ((size_t)e * (size_t)OC + (size_t)oc) * (size_t)C;
                float sum = 0.0f;
                for (int c = 0; c < C; c++) { sum = madd(x[c], w[c], sum); }
                out[(size_t)s * (size_t)OC + (size_t)oc] = sum;
            }
        }
    }
}

static inline void grouped_matmul_backward_input_ref(float* dinp, const float* dout, const int* dout_index,
                                                     const float* weight, const int* offsets, int E, int C, int OC) {
    for (int e = 0; dinp && e < E; e++) {
        const float* w = weight + (size_t)e * (size_t)OC * (size_t)C;
        for (int s = offsets[e]; s < offsets[e + 1]; s++) {
            const float* dy = grouped_row_(dout, dout_index, (size_t)s, OC);
            for (int c = 0; c < C; c++) {
                float sum = 0.0f;
                for (int oc = 0; oc < OC; oc++) { sum = madd(dy[oc], w[(size_t)oc * (size_t)C + (size_t)c], sum); }
                dinp[(size_t)s * (size_t)C + (size_t)c] = sum;
            }
        }
    }
}

static inline void grouped_matmul_backward_weight_ref(float* dweight, const float* dout, const int* dout_index,
                                                      const float* inp, const int* inp_index, const int* offsets,
                                                      int E, int C, int OC) {
    for (int e = 0; dweight && e < E; e++) {
        for (int oc = 0; oc < OC; oc++) {
            float* dw = dweight + ((size_t)e * (size_t)OC + (size_t)oc) * (size_t)C;
            for (int c = 0; c < C; c++) {
                float sum = 0.0f;
                for (int s = offsets[e]; s < offsets[e + 1]; s++) {
                    sum = madd(grouped_row_(dout, dout_index, (size_t)s, OC)[oc],
                               grouped_row_(inp, inp_index, (size_t)s, C)[c], sum);
                }
                dw[c] = sum;
            }
        }
    }
}

#ifndef __CUDACC__  // ---- fast C: the same chains, many outputs at a time ----

// the products of all experts, cut into parts, and these into blocks whose packed a has at most GEMM_A_FLOATS
typedef struct {
    GemmPart* part;
    GemmBlock* block;
    float *a_packed, *b_packed;
    int n_parts, n_blocks;
    size_t n_packed;  // floats of the last block
    int N;            // columns of every product
} GroupedPlan;

// at most so many parts: of products with `rows` rows together and terms each, and of those with M rows each and terms
// together
static inline size_t grouped_parts_of_rows_(int E, int rows, int K) {
    return (size_t)(E + ceil_div(rows, gemm_block_rows_(INT_MAX, GEMM_LONG_K))) * (size_t)ceil_div(K, GEMM_LONG_K);
}
static inline size_t grouped_parts_of_terms_(int E, int M, int terms) {
    return (size_t)ceil_div(M, gemm_block_rows_(INT_MAX, GEMM_LONG_K)) * (size_t)(E + ceil_div(terms, GEMM_LONG_K));
}

static inline size_t grouped_bytes_(size_t n_parts, int n_threads) {
    return (GEMM_A_FLOATS + (size_t)n_threads * GEMM_K * TILE_N) * sizeof(float) +
           n_parts * (sizeof(GemmPart) + sizeof(GemmBlock));
}

// of whichever of the three products needs most
static inline size_t grouped_matmul_workspace_bytes(int E, int R, int C, int OC, int n_threads) {
    size_t n = grouped_parts_of_rows_(E, R, C > OC ? C : OC), n_weight = grouped_parts_of_terms_(E, OC, R);
    return grouped_bytes_(n > n_weight ? n : n_weight, n_threads);
}

static inline GroupedPlan grouped_plan_(size_t most_parts, int N, const Device* dev) {
    float* workspace = device_workspace(dev, grouped_bytes_(most_parts, dev->n_threads));
    GroupedPlan plan = {NULL, NULL, workspace, NULL, 0, 0, 0, N};
    plan.b_packed = plan.a_packed + GEMM_A_FLOATS;
    plan.part = (GemmPart*)(plan.b_packed + (size_t)dev->n_threads * GEMM_K * TILE_N);
    plan.block = (GemmBlock*)(plan.part + most_parts);
    return plan;
}

// cut as gemm cuts it. A part that goes on with the chains of the one before begins a block
static inline void grouped_add_(GroupedPlan* plan, float* out, Matrix a, Matrix b, int M, int K) {
    const int block_rows = gemm_block_rows_(M, K);
    for (int m = 0; m < M; m += block_rows) {
        for (int k = 0; k < K || k == 0; k += GEMM_LONG_K) {
            float* o = out + (size_t)m * (size_t)plan->N;
            GemmPart part = {o, k > 0 ? o : NULL, (size_t)plan->N, gemm_from_(a, m, k), gemm_from_(b, k, 0),
                             gemm_min_(block_rows, M - m), gemm_min_(GEMM_LONG_K, K - k), NULL, 0, 0, 0};
            size_t n_packed = gemm_part_floats_(part.M, part.K);
            if (plan->n_blocks == 0 || k > 0 || plan->n_packed + n_packed > GEMM_A_FLOATS) {
                GemmBlock block = {plan->part + plan->n_parts, 0, plan->N, (size_t)plan->N, 0, 0};
                plan->block[plan->n_blocks++] = block;
                plan->n_packed = 0;
            }
            plan->part[plan->n_parts++] = part;
            plan->block[plan->n_blocks - 1].n_parts++;
            plan->n_packed += n_packed;
        }
    }
}

static inline void grouped_run_(const GroupedPlan* plan, const Device* dev) {
    for (int i = 0; i < plan->n_blocks; i++) { gemm_plan_block_(&plan->block[i], plan->a_packed, dev->n_threads); }
    #pragma omp parallel
    for (int i = 0; i < plan->n_blocks; i++) {
        gemm_block_(&plan->block[i], gemm_b_packed_(plan->b_packed), dev->n_threads);
    }
}

// the rows of x from row s of the operand on; transposed: they are columns
static inline Matrix grouped_rows_(const float* x, const int* index, int s, int width) {
    return index ? gemm_gathered(x, index + s, (size_t)width) : gemm_matrix(x + (size_t)s * width, (size_t)width);
}
static inline Matrix grouped_rows_transposed_(const float* x, const int* index, int s, int width) {
    Matrix m = grouped_rows_(x, index, s, width), turned = {m.data, 1, m.row_stride, NULL, m.row_index};
    return turned;
}

static inline void grouped_matmul_forward(float* out, const float* inp, const int* inp_index, const float* weight,
                                          const int* offsets, int E, int R, int C, int OC, const Device* dev) {
    GroupedPlan plan = grouped_plan_(grouped_parts_of_rows_(E, R, C), OC, dev);
    for (int e = 0; e < E; e++) {
        const int s = offsets[e];
        grouped_add_(&plan, out + (size_t)s * OC, grouped_rows_(inp, inp_index, s, C),
                     gemm_transposed(weight + (size_t)e * OC * C, C), offsets[e + 1] - s, C);
    }
    grouped_run_(&plan, dev);
}

static inline void grouped_matmul_backward_input(float* dinp, const float* dout, const int* dout_index,
                                                 const float* weight, const int* offsets, int E, int R, int C, int OC,
                                                 const Device* dev) {
    if (!dinp) { return; }
    GroupedPlan plan = grouped_plan_(grouped_parts_of_rows_(E, R, OC), C, dev);
    for (int e = 0; e < E; e++) {
        const int s = offsets[e];
        grouped_add_(&plan, dinp + (size_t)s * C, grouped_rows_(dout, dout_index, s, OC),
                     gemm_matrix(weight + (size_t)e * OC * C, C), offsets[e + 1] - s, OC);
    }
    grouped_run_(&plan, dev);
}

static inline void grouped_matmul_backward_weight(float* dweight, const float* dout, const int* dout_index,
                                                  const float* inp, const int* inp_index, const int* offsets,
                                                  int E, int R, int C, int OC, const Device* dev) {
    if (!dweight) { return; }
    GroupedPlan plan = grouped_plan_(grouped_parts_of_terms_(E, OC, R), C, dev);
    for (int e = 0; e < E; e++) {
        const int s = offsets[e];
        grouped_add_(&plan, dweight + (size_t)e * OC * C, grouped_rows_transposed_(dout, dout_index, s, OC),
                     grouped_rows_(inp, inp_index, s, C), OC, offsets[e + 1] - s);
    }
    grouped_run_(&plan, dev);
}

#else  // ---- CUDA ----
#endif  // __CUDACC__
#endif  // LLMC_GROUPED_MATMUL_H
