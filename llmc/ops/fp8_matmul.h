/*
Linear layer of a weight in fp8 or fp4 whose inputs become fp8: out = r(inp) * weight^T + bias, with r of fp8_rows.h.
    inp (N, C)   out (N, OC)   weight (OC, C), core/stored.h's   bias (OC) or NULL   room: fp8_matmul_bytes
Backward: matmul_backward_input_stored and its kin, of inp as it was: r is taken as nothing (straight-through).
Cost:   2*N*C*OC flops, and r, which is memory bound. By cuBLASLt the product alone is 1.4 to 1.7 times as fast as in
        bf16, and no weight is widened (widen.h): on an H200, cuBLASLt 13.1, 2026-11-28, at (N, OC, C) = (8192, 4096,
        7168) 432 us, in bf16 590 and 26 to widen; (4096, 24576, 1536) 320, 466 and 33; (4096, 4096, 4096) 122, 209 and
        16. A trial's r took 76, 9 and 21: with both, 1.2 to 1.6 times as fast.
Error:  that of r, then of matmul.h. By cuBLASLt, whose sums gemm_cublas.h describes: a block of 128 is 4 words of 32
        products and the sum so far, so 132 * 2^-13 of the sum of |products| at most; at random 1.2e-4 to 2.2e-4 of all.
Order:  that of matmul_forward_stored of r(inp). Fast CUDA builds, bf16: gemm_cublas_fp8 for more than 16 rows of a
        weight in fp8, where it takes the product; where it does not the Device counts that.
Source: as fp8_rows.h
*/
#ifndef LLMC_FP8_MATMUL_H
#define LLMC_FP8_MATMUL_H
#include "fp8_rows.h"  // fp8_rows_forward, fp8_rows_codes
#include "matmul.h"    // matmul_forward_stored

// ---- plain C: read this first; it defines every bit. rounded (N, C): r(inp) ----

static inline void fp8_matmul_forward_ref(float* out, float* rounded, const float* inp, const StoredMatrix* weight,
                                          const float* bias, int N) {
    const size_t C = (size_t)weight->columns, OC = (size_t)weight->rows;
    fp8_rows_forward_ref(rounded, inp, NULL, N, (int)C);
    for (size_t n = 0; n < (size_t)N; n++) {
        for (size_t oc = 0; oc < OC; oc++) {
            float sum = bias ? bias[oc] : 0.0f;
            for (size_t c = 0; c < C; c++) {
                sum = madd(rounded[n * C + c], stored_value(weight, (int)oc, (int)c), sum);
            }
            out[n * OC + oc] = sum;
        }
    }
}

#ifndef __CUDACC__  // ---- fast C ----

// of N rows of C inputs, with OC outputs: what `room` needs, where an element has so many bytes
static inline size_t fp8_matmul_bytes(size_t element, int N, int C, int OC) {
    (void)OC;
    return element * (size_t)N * (size_t)C;
}

static inline void fp8_matmul_forward(float* out, const float* inp, StoredMatrix weight, const float* bias, float* room,
                                      int N, const Device* dev) {
    fp8_rows_forward(room, inp, NULL, N, weight.columns, dev);
    matmul_forward_stored(out, room, weight, bias, N, dev);
}

#else  // ---- CUDA ----

// In room are the rows, or their codes; behind these lie scales (blocks of a row, N), and behind these a copy of the
// weight's, in rows of whole packs. Bytes:
static inline size_t fp8_matmul_codes_(int N, int C) { return ((size_t)N * (size_t)C + 15) / 16 * 16; }
static inline size_t fp8_matmul_scales_(int N, int C) {
    return sizeof(float) * (((size_t)N * (size_t)fp8_blocks(C) + 3) / 4 * 4);
}
static inline size_t fp8_matmul_scale_row_(int C) { return sizeof(float) * (size_t)((fp8_blocks(C) + 3) / 4 * 4); }

static inline size_t fp8_matmul_bytes(size_t element, int N, int C, int OC) {
    const size_t of_weight = fp8_matmul_scale_row_(C) * (size_t)fp8_blocks(OC);
    const size_t codes = fp8_matmul_codes_(N, C) + fp8_matmul_scales_(N, C) + of_weight;
    const size_t numbers = element * (size_t)N * (size_t)C;
    return numbers > codes ? numbers : codes;
}

#ifndef EXACT
// the weight's scales as cuBLASLt reads them: they themselves, or a copy whose rows are whole
static inline const float* fp8_matmul_whole_rows_(float* copy, const StoredMatrix* w, const Device* dev) {
    const size_t row = sizeof(float) * (size_t)fp8_blocks(w->columns), whole = fp8_matmul_scale_row_(w->columns);
    if (row == whole && (uintptr_t)w->scales % 16 == 0) { return (const float*)w->scales; }
    device_copy_strips(copy, whole, w->scales, row, row, fp8_blocks(w->rows), dev);
    return copy;
}

// 1: done. 0: not for these rows or, the template of X, not for this type
template <typename Out>
static inline int fp8_matmul_on_codes_(Out* out, const bf16* inp, const StoredMatrix* w,
                                       const typename MaybeNull<Out>::type* bias, bf16* room, int N,
                                       const Device* dev) {
    const int C = w->columns;
    if (N <= FEW_ROWS || w->kind != STORED_FP8) { return 0; }
    uint8_t* codes = (uint8_t*)room;
    float* scales = (float*)(void*)(codes + fp8_matmul_codes_(N, C));
    float* copy = (float*)(void*)(codes + fp8_matmul_codes_(N, C) + fp8_matmul_scales_(N, C));
    fp8_rows_codes(codes, scales, inp, N, C, dev);
    return gemm_cublas_fp8(out, bias, codes, w, CublasScales{scales, fp8_matmul_whole_rows_(copy, w, dev)}, N, dev);
}
template <typename Out, typename X>
static inline int fp8_matmul_on_codes_(Out*, const X*, const StoredMatrix*, const typename MaybeNull<Out>::type*, X*,
                                       int, const Device*) {
    return 0;
}
#endif

// out may be float where inp is bf16
template <typename Out, typename X>
static inline void fp8_matmul_forward(Out* out, const X* inp, StoredMatrix weight,
                                      const typename MaybeNull<Out>::type* bias, X* room, int N, const Device* dev) {
#ifndef EXACT
    if (fp8_matmul_on_codes_(out, inp, &weight, bias, room, N, dev)) { return; }
#endif
    fp8_rows_forward(room, inp, NULL, N, weight.columns, dev);
    matmul_forward_stored(out, (const X*)room, weight, bias, N, dev);
}
#endif  // __CUDACC__
#endif  // LLMC_FP8_MATMUL_H
