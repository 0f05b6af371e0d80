/*
Linear layer of a weight in fp8 whose inputs become fp8, too: out = r(inp) * weight^T + bias, with r of fp8_rows.h.
    inp (N, C)   out (N, OC)   weight (OC, C) in fp8 (core/stored.h)   bias (OC) or NULL
Backward: matmul_backward_input_stored and its kin, of inp as it was: r is taken as nothing (straight-through).
Cost:   2*N*C*OC flops, and r, which is memory bound. By cuBLASLt 1.4 to 1.7 times as fast as in bf16, and no weight is
        widened (widen.h): on an H200, cuBLASLt 13.1, 2026-11-28, at (N, OC, C) = (8192, 4096, 7168) 432 us, in bf16 590
        and 26 to widen; (4096, 24576, 1536) 320, 466 and 33; (4096, 4096, 4096) 122, 209 and 16.
Error:  that of r, then of matmul.h. By cuBLASLt, whose sums gemm_cublas.h describes: a block of 128 is 4 words of 32
        products and the sum so far, so 132 * 2^-13 of the sum of |products| at most; at random 1.2e-4 of the result.
Order:  that of matmul_forward_stored of r(inp). Fast CUDA builds, bf16: gemm_cublas_fp8 for more than 16 rows, where it
        takes the product; where it does not the Device counts that.
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
    fp8_rows_forward_ref(rounded, inp, N, (int)C);
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

static inline size_t fp8_matmul_bytes(const StoredMatrix* weight, int N) {
    return sizeof(float) * (size_t)N * (size_t)weight->columns;
}

static inline void fp8_matmul_forward(float* out, const float* inp, StoredMatrix weight, const float* bias, int N,
                                      const Device* dev) {
    float* rounded = (float*)device_rounded(dev, fp8_matmul_bytes(&weight, N));
    fp8_rows_forward(rounded, inp, N, weight.columns, dev);
    matmul_forward_stored(out, rounded, weight, bias, N, dev);
}

#else  // ---- CUDA ----

// codes of N rows; behind them lie their scales, and behind these those of the weight, in rows of whole packs
static inline size_t fp8_matmul_codes_(const StoredMatrix* w, int N) {
    return ((size_t)N * (size_t)w->columns + 15) / 16 * 16;
}
static inline size_t fp8_matmul_scales_(const StoredMatrix* w, int N) {
    return sizeof(float) * (((size_t)N * (size_t)fp8_blocks(w->columns) + 3) / 4 * 4);
}
static inline size_t fp8_matmul_scale_row_(const StoredMatrix* w) {
    return sizeof(float) * (size_t)((fp8_blocks(w->columns) + 3) / 4 * 4);
}

// what device_rounded is asked for
template <typename X>
static inline size_t fp8_matmul_bytes(const StoredMatrix* w, int N) {
    const size_t of_weight = fp8_matmul_scale_row_(w) * (size_t)fp8_blocks(w->rows);
    const size_t codes = fp8_matmul_codes_(w, N) + fp8_matmul_scales_(w, N) + of_weight;
    const size_t numbers = sizeof(X) * (size_t)N * (size_t)w->columns;
    return numbers > codes ? numbers : codes;
}

#ifndef EXACT
// the weight's scales as cuBLASLt reads them: they themselves, or a copy in `room` whose rows are whole
static inline const float* fp8_matmul_whole_rows_(float* room, const StoredMatrix* w, const Device* dev) {
    const size_t row = sizeof(float) * (size_t)fp8_blocks(w->columns), whole = fp8_matmul_scale_row_(w);
    if (row == whole && (uintptr_t)w->scales % 16 == 0) { return (const float*)w->scales; }
    device_copy_strips(room, whole, w->scales, row, row, fp8_blocks(w->rows), dev);
    return room;
}

// 1: done. 0: not for these rows or, the template of X, not for this type
template <typename Out>
static inline int fp8_matmul_on_codes_(Out* out, const bf16* inp, const StoredMatrix* w,
                                       const typename MaybeNull<Out>::type* bias, int N, const Device* dev) {
    if (N <= FEW_ROWS) { return 0; }
    char* room = (char*)device_rounded(dev, fp8_matmul_bytes<bf16>(w, N));
    float* scales = (float*)(room + fp8_matmul_codes_(w, N));
    float* of_weight = (float*)(room + fp8_matmul_codes_(w, N) + fp8_matmul_scales_(w, N));
    fp8_rows_codes((uint8_t*)room, scales, inp, N, w->columns, dev);
    const CublasScales both = {scales, fp8_matmul_whole_rows_(of_weight, w, dev)};
    return gemm_cublas_fp8(out, bias, (const uint8_t*)room, w, both, N, dev);
}
template <typename Out, typename X>
static inline int fp8_matmul_on_codes_(Out*, const X*, const StoredMatrix*, const typename MaybeNull<Out>::type*, int,
                                       const Device*) {
    return 0;
}
#endif

// out may be float where inp is bf16
template <typename Out, typename X>
static inline void fp8_matmul_forward(Out* out, const X* inp, StoredMatrix weight,
                                      const typename MaybeNull<Out>::type* bias, int N, const Device* dev) {
#ifndef EXACT
    if (fp8_matmul_on_codes_(out, inp, &weight, bias, N, dev)) { return; }
#endif
    X* rounded = (X*)device_rounded(dev, fp8_matmul_bytes<X>(&weight, N));
    fp8_rows_forward(rounded, inp, N, weight.columns, dev);
    matmul_forward_stored(out, (const X*)rounded, weight, bias, N, dev);
}
#endif  // __CUDACC__
#endif  // LLMC_FP8_MATMUL_H
