/*
A linear layer in G groups: each has inputs and outputs of its own, and the weight is block diagonal, of which the
blocks alone are stored, below each other. G = 1 is matmul.h without bias.
    inp (N, C)   out (N, OC)   weight (OC, C/G): rows g*R .. g*R + R-1 are those of group g
    out[n][g*R + r] = sum over c of inp[n][g*Cg + c] * weight[g*R + r][c]     with Cg = C/G, R = OC/G
Backward. NULL: nobody asks for it
    dinp[n][g*Cg + c]     = sum over r of dout[n][g*R + r] * weight[g*R + r][c]      (N, C)      written
    dweight[g*R + r][c]   = sum over n of dout[n][g*R + r] * inp[n][g*Cg + c]        (OC, C/G)   float, written: one
                                                                                     call is one leaf
A weight that does not learn may be stored as bf16, fp8 or fp4 (core/stored.h): ..._forward_stored and
..._backward_input_stored have the bits of the same numbers as floats (widen.h: as X).
Cost:   2*N*OC*C/G flops each, a G-th of what a layer with a whole weight takes. In C: the groups are parts of a block
        of gemm.h, so one parallel region has the panels of all as its tasks: with N 512, G 8, C/G 1024 and R 256
        forward reaches 68 GFLOP/s, dinp 69, dweight 65, one product of as many flops 77 (processor time of one thread,
        AVX-512, gcc 12, AMD EPYC shared with others, the smallest of 8 calls). On a GPU one product after the other,
        their rows as far apart as all groups' are; fast builds by gemm_cublas.h, and forward of at most 16 rows of bf16
        by few_rows.h, all groups at once: by ptxas of CUDA 13.0 for sm_90 80 and 108 registers, without spills. Not
        measured on a GPU yet.
Error:  as matmul.h.
Order:  out chains over c, dinp over r, dweight over n, all ascending from 0: the bits of each group as a linear layer
        of its own. Fast CUDA builds: as matmul.h.
Source: doc/deepseek_v4.md "Formula" (the output projection of attention)
*/
#ifndef LLMC_BLOCK_MATMUL_H
#define LLMC_BLOCK_MATMUL_H
#include "few_rows.h"        // in a fast CUDA build: few_rows_outputs
#include "gemm_cublas.h"     // gemm_cublas
#include "grouped_matmul.h"  // GroupedPlan, grouped_plan_, gemm, Matrix, Device
#include "widen.h"           // in a CUDA build: widen_matrix
#include <assert.h>

// ---- plain C: read this first; it defines every bit ----

static inline void block_matmul_forward_ref(float* out, const float* inp, const float* weight, int N, int C, int OC,
                                            int G) {
    const size_t Cg = (size_t)(C / G), R = (size_t)(OC / G);
    for (size_t n = 0; n < (size_t)N; n++) {
        for (size_t oc = 0; oc < (size_t)OC; oc++) {
            const float* x = inp + n * (size_t)C + oc / R * Cg;
            float sum = 0.0f;
            for (size_t c = 0; c < Cg; c++) { sum = madd(x[c], weight[oc * Cg + c], sum); }
            out[n * (size_t)OC + oc] = sum;
        }
    }
}

static inline void block_matmul_backward_input_ref(float* dinp, const float* dout, const float* weight, int N, int C,
                                                   int OC, int G) {
    const size_t Cg = (size_t)(C / G), R = (size_t)(OC / G);
    if (!dinp) { return; }
    for (size_t n = 0; n < (size_t)N; n++) {
        for (size_t c = 0; c < (size_t)C; c++) {
            const size_t first = c / Cg * R;  // output of the group
            float sum = 0.0f;
            for (size_t oc = first; oc < first + R; oc++) {
                sum = madd(dout[n * (size_t)OC + oc], weight[oc * Cg + c % Cg], sum);
            }
            dinp[n * (size_t)C + c] = sum;
        }
    }
}

static inline void block_matmul_backward_weight_ref(float* dweight, const float* dout, const float* inp, int N, int C,
                                                    int OC, int G) {
    const size_t Cg = (size_t)(C / G), R = (size_t)(OC / G);
    if (!dweight) { return; }
    for (size_t oc = 0; oc < (size_t)OC; oc++) {
        for (size_t c = 0; c < Cg; c++) {
            float sum = 0.0f;
            for (size_t n = 0; n < (size_t)N; n++) {
                sum = madd(dout[n * (size_t)OC + oc], inp[n * (size_t)C + oc / R * Cg + c], sum);
            }
            dweight[oc * Cg + c] = sum;
        }
    }
}

#ifndef __CUDACC__  // ---- fast C: the same chains, the groups' products side by side ----

// weight (OC, C/G)
static inline void block_matmul_forward_stored(float* out, const float* inp, StoredMatrix weight, int N, int G,
                                               const Device* dev) {
    const int Cg = weight.columns, R = weight.rows / G;
    const size_t C = (size_t)Cg * (size_t)G;
    assert(weight.rows % G == 0);
    GroupedPlan plan = grouped_plan_(grouped_parts_of_rows_(G, G * N, Cg), R, (size_t)weight.rows, 0, dev);
    for (int g = 0; g < G; g++) {
        const Matrix block = gemm_from_(gemm_stored_transposed(weight), 0, g * R);
        grouped_add_(&plan, out + g * R, gemm_matrix(inp + g * Cg, C), block, N, Cg);
    }
    grouped_run_(&plan, dev);
}

static inline void block_matmul_backward_input_stored(float* dinp, const float* dout, StoredMatrix weight, int N, int G,
                                                      const Device* dev) {
    const int Cg = weight.columns, R = weight.rows / G;
    assert(weight.rows % G == 0);
    if (!dinp) { return; }
    GroupedPlan plan = grouped_plan_(grouped_parts_of_rows_(G, G * N, R), Cg, (size_t)Cg * (size_t)G, 0, dev);
    for (int g = 0; g < G; g++) {
        const Matrix block = gemm_from_(gemm_stored(weight), g * R, 0);
        grouped_add_(&plan, dinp + g * Cg, gemm_matrix(dout + g * R, (size_t)weight.rows), block, N, R);
    }
    grouped_run_(&plan, dev);
}

static inline StoredMatrix block_floats_(const float* weight, int C, int OC, int G) {
    assert(C % G == 0);
    return stored_matrix(weight, STORED_F32, OC, C / G, OC, NULL);
}

static inline void block_matmul_forward(float* out, const float* inp, const float* weight, int N, int C, int OC, int G,
                                        const Device* dev) {
    block_matmul_forward_stored(out, inp, block_floats_(weight, C, OC, G), N, G, dev);
}

static inline void block_matmul_backward_input(float* dinp, const float* dout, const float* weight, int N, int C,
                                               int OC, int G, const Device* dev) {
    block_matmul_backward_input_stored(dinp, dout, block_floats_(weight, C, OC, G), N, G, dev);
}

static inline void block_matmul_backward_weight(float* dweight, const float* dout, const float* inp, int N, int C,
                                                int OC, int G, const Device* dev) {
    const int Cg = C / G, R = OC / G;
    assert(C % G == 0 && OC % G == 0);
    if (!dweight) { return; }
    GroupedPlan plan = grouped_plan_(grouped_parts_of_terms_(G, R, G * N), Cg, (size_t)Cg, 0, dev);
    plan.past = grouped_is_past_(dweight, (size_t)OC, Cg);
    for (int g = 0; g < G; g++) {
        grouped_add_(&plan, dweight + (size_t)g * R * Cg, gemm_transposed(dout + g * R, (size_t)OC),
                     gemm_matrix(inp + g * Cg, (size_t)C), R, N);
    }
    grouped_run_(&plan, dev);
}

#else  // ---- CUDA ----

// out = a * b of one group: our own kernel in EXACT builds, and for shapes that cuBLASLt would not do fast
template <typename Out, typename X>
static inline void block_product_(Out* out, size_t out_row, MatrixOf<X> a, MatrixOf<X> b, int M, int N, int K,
                                  const Device* dev) {
    if (M == 0) { return; }
#ifndef EXACT
    if (gemm_cublas(out, out_row, NULL, NULL, 1.0f, 0, a, b, M, N, K, dev)) { return; }
#endif
    gemm(out, out_row, (const Out*)NULL, 0, a, b, M, N, K, dev);
}

#ifndef EXACT
// block is (FEW_THREADS), grid the outputs of all groups, of which FEW_OUTPUTS neighbours are in one
template <int TILES, typename Weight>
__global__ void __launch_bounds__(FEW_THREADS, 2)
block_few_kernel(bf16* out, const bf16* inp, Weight weight, int N, int Cg, int OC, int G) {
    const int first = (int)blockIdx.x * FEW_OUTPUTS, g = first / (OC / G);
    auto row_of = [=](int n) { return n * G; };  // a row of C is G rows of Cg
    few_rows_outputs<TILES>(out, inp + g * Cg, row_of, weight, (const bf16*)NULL, N, first, Cg, OC);
}

template <typename Weight>
static inline void block_few_launch_(bf16* out, const bf16* inp, Weight weight, int N, int Cg, int OC, int G,
                                     const Device* dev) {
    const unsigned grid = (unsigned)(OC / FEW_OUTPUTS);
    if (N <= 8) {
        block_few_kernel<1><<<grid, FEW_THREADS, 0, dev->stream>>>(out, inp, weight, N, Cg, OC, G);
    } else {
        block_few_kernel<2><<<grid, FEW_THREADS, 0, dev->stream>>>(out, inp, weight, N, Cg, OC, G);
    }
    cudaCheck(cudaGetLastError());
}

// 1: done. 0: not for these rows or, the templates of X, not for this type
static inline int block_few_(bf16* out, const bf16* inp, const bf16* weight, int N, int Cg, int OC, int G,
                             const Device* dev) {
    if (!few_rows_fit(inp, weight, N, Cg) || OC / G % FEW_OUTPUTS != 0 || N == 0) { return 0; }
    block_few_launch_(out, inp, FewHalves{weight, Cg}, N, Cg, OC, G, dev);
    return 1;
}
template <typename X>
static inline int block_few_(X*, const X*, const X*, int, int, int, int, const Device*) { return 0; }

static inline int block_few_codes_(bf16* out, const bf16* inp, const StoredMatrix* w, int N, int G, const Device* dev) {
    if (!few_codes_fit(inp, w, N) || w->rows / G % FEW_OUTPUTS != 0 || N == 0) { return 0; }
    few_codes_launch(w, [=](auto codes) { block_few_launch_(out, inp, codes, N, w->columns, w->rows, G, dev); });
    return 1;
}
template <typename X>
static inline int block_few_codes_(X*, const X*, const StoredMatrix*, int, int, const Device*) { return 0; }
#endif

template <typename X>
static inline void block_matmul_forward(X* out, const X* inp, const X* weight, int N, int C, int OC, int G,
                                        const Device* dev) {
    const int Cg = C / G, R = OC / G;
    assert(C % G == 0 && OC % G == 0);
#ifndef EXACT
    if (block_few_(out, inp, weight, N, Cg, OC, G, dev)) { return; }
#endif
    for (int g = 0; g < G; g++) {
        block_product_(out + g * R, (size_t)OC, gemm_matrix(inp + g * Cg, (size_t)C),
                       gemm_transposed(weight + (size_t)g * R * Cg, (size_t)Cg), N, R, Cg, dev);
    }
}

template <typename X>
static inline void block_matmul_backward_input(X* dinp, const X* dout, const X* weight, int N, int C, int OC, int G,
                                               const Device* dev) {
    const int Cg = C / G, R = OC / G;
    assert(C % G == 0 && OC % G == 0);
    for (int g = 0; dinp && g < G; g++) {
        block_product_(dinp + g * Cg, (size_t)C, gemm_matrix(dout + g * R, (size_t)OC),
                       gemm_matrix(weight + (size_t)g * R * Cg, (size_t)Cg), N, Cg, R, dev);
    }
}

template <typename X>
static inline void block_matmul_backward_weight(float* dweight, const X* dout, const X* inp, int N, int C, int OC,
                                                int G, const Device* dev) {
    const int Cg = C / G, R = OC / G;
    assert(C % G == 0 && OC % G == 0);
    for (int g = 0; dweight && g < G; g++) {
        block_product_(dweight + (size_t)g * R * Cg, (size_t)Cg, gemm_transposed(dout + g * R, (size_t)OC),
                       gemm_matrix(inp + g * Cg, (size_t)C), R, Cg, N, dev);
    }
}

// weight (OC, C/G)
template <typename X>
static inline void block_matmul_forward_stored(X* out, const X* inp, StoredMatrix weight, int N, int G,
                                               const Device* dev) {
#ifndef EXACT
    if (block_few_codes_(out, inp, &weight, N, G, dev)) { return; }
#endif
    block_matmul_forward(out, inp, widen_matrix<X>(&weight, dev), N, G * weight.columns, weight.rows, G, dev);
}

template <typename X>
static inline void block_matmul_backward_input_stored(X* dinp, const X* dout, StoredMatrix weight, int N, int G,
                                                      const Device* dev) {
    if (!dinp) { return; }
    block_matmul_backward_input(dinp, dout, widen_matrix<X>(&weight, dev), N, G * weight.columns, weight.rows, G, dev);
}
#endif  // __CUDACC__
#endif  // LLMC_BLOCK_MATMUL_H
