/*
A linear layer as a trainer meets it: a weight that the build stores as floatX or, in a CPU build, as bf16 where it does
not learn. The calls are those of ops/matmul.h, ops/embedding.h and ops/grouped_matmul.h.
    linear_forward         out (N, OC) = inp (N, C) * weight^T + bias; bias may be NULL
    linear_backward_input  dinp (N, C) = dout (N, OC) * weight, or with add 1 goes on from what dinp holds
    linear_rows            out (N, C) = the rows of the weight that belong to tokens, as an embedding has them
    linear_grouped_forward, linear_grouped_backward_input   of experts: weight (E, OC, C)
A bf16 is a float whose lower half is 0: the bits are those of the same numbers stored as floats.
*/
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H
#include "../core/floatx.h"    // floatX
#include "../ops/embedding.h"  // token_embedding_forward
#include "../ops/grouped_matmul.h"  // grouped_matmul_forward, grouped_matmul_backward_input
#include "../ops/matmul.h"     // matmul_forward, matmul_backward_input

typedef struct {
    const void* weight;  // (OC, C)
    int is_bf16;         // in a CPU build; else floatX
} Linear;

static inline Linear linear_of(const floatX* weight, int is_bf16) {
    const Linear w = {weight, is_bf16};
    return w;
}

#ifndef __CUDACC__
static inline void linear_forward(float* out, const float* inp, Linear w, const float* bias, int N, int C, int OC,
                                  const Device* dev) {
    if (w.is_bf16) { matmul_forward_bf16(out, inp, (const uint16_t*)w.weight, bias, N, C, OC, dev); }
    else { matmul_forward(out, inp, (const float*)w.weight, bias, N, C, OC, dev); }
}

static inline void linear_backward_input(float* dinp, const float* dout, Linear w, int add, int N, int C, int OC,
                                         const Device* dev) {
    if (w.is_bf16) { matmul_backward_input_bf16(dinp, dout, (const uint16_t*)w.weight, add, N, C, OC, dev); }
    else { matmul_backward_input(dinp, dout, (const float*)w.weight, add, N, C, OC, dev); }
}

static inline void linear_rows(float* out, const int* tokens, Linear w, int N, int C, const Device* dev) {
    if (w.is_bf16) { token_embedding_forward_bf16(out, tokens, (const uint16_t*)w.weight, N, C, dev); }
    else { token_embedding_forward(out, tokens, (const float*)w.weight, N, C, dev); }
}

static inline void linear_grouped_forward(float* out, const float* inp, const int* index, Linear w, const int* offsets,
                                          int E, int R, int C, int OC, const Device* dev) {
    if (w.is_bf16) {
        grouped_matmul_forward_bf16(out, inp, index, (const uint16_t*)w.weight, offsets, E, R, C, OC, dev);
    } else {
        grouped_matmul_forward(out, inp, index, (const float*)w.weight, offsets, E, R, C, OC, dev);
    }
}

static inline void linear_grouped_backward_input(float* dinp, const float* dout, const int* index, Linear w,
                                                 const int* offsets, int E, int R, int C, int OC, const Device* dev) {
    if (w.is_bf16) {
        grouped_matmul_backward_input_bf16(dinp, dout, index, (const uint16_t*)w.weight, offsets, E, R, C, OC, dev);
    } else {
        grouped_matmul_backward_input(dinp, dout, index, (const float*)w.weight, offsets, E, R, C, OC, dev);
    }
}
#else
// out may be float where floatX is bf16
template <typename Out>
static inline void linear_forward(Out* out, const floatX* inp, Linear w, const typename MaybeNull<Out>::type* bias,
                                  int N, int C, int OC, const Device* dev) {
    matmul_forward(out, inp, (const floatX*)w.weight, bias, N, C, OC, dev);
}

static inline void linear_backward_input(floatX* dinp, const floatX* dout, Linear w, int add, int N, int C, int OC,
                                         const Device* dev) {
    matmul_backward_input(dinp, dout, (const floatX*)w.weight, add, N, C, OC, dev);
}

static inline void linear_rows(floatX* out, const int* tokens, Linear w, int N, int C, const Device* dev) {
    token_embedding_forward(out, tokens, (const floatX*)w.weight, N, C, dev);
}

static inline void linear_grouped_forward(floatX* out, const floatX* inp, const int* index, Linear w,
                                          const int* offsets, int E, int R, int C, int OC, const Device* dev) {
    grouped_matmul_forward(out, inp, index, (const floatX*)w.weight, offsets, E, R, C, OC, dev);
}

static inline void linear_grouped_backward_input(floatX* dinp, const floatX* dout, const int* index, Linear w,
                                                 const int* offsets, int E, int R, int C, int OC, const Device* dev) {
    grouped_matmul_backward_input(dinp, dout, index, (const floatX*)w.weight, offsets, E, R, C, OC, dev);
}
#endif
#endif  // LLMC_LINEAR_H
