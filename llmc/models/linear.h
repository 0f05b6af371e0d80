/*
Linear layers as a trainer meets them: what a layer of the model's table has of a product, in one struct. The calls are
those of ops/matmul.h, ops/embedding.h and ops/grouped_matmul.h.
    model_linear            the weight of a field of the table at a layer, and its bias
    model_linear_gradients  where their gradients go; NULL where they do not learn
    linear_forward          out (N, OC) = inp (N, C) * weight^T + bias
    linear_backward         of dout (N, OC): gradients of weight and bias are written, dinp (N, C) = dout * weight; with
                            add 1 it goes on from what dinp holds; NULL: nobody asks
    linear_backward_input, linear_backward_weight   dinp alone; gradients of weight and bias alone
    linear_rows             out (N, C) = the rows of the weight that belong to tokens, as an embedding has them
    linear_grouped_forward, linear_grouped_backward_input   of experts: weight (E, OC, C)
    linear_adapt, linear_adapt_gradients   adapters (LoRA) beside the weight, whose places adapters.h knows: all of the
                            calls above go on with them, but for linear_rows
Weights are stored as floatX or, in a CPU build, as bf16 or fp8 where they do not learn (core/stored.h): the bits are
those of the same numbers stored as floats.
*/
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H
#include "../core/floatx.h"    // floatX
#include "../ops/lora.h"       // lora_forward, lora_backward, LoraShape, LoraExperts
#include "../ops/embedding.h"  // token_embedding_forward
#include "../ops/grouped_matmul.h"  // grouped_matmul_forward, grouped_matmul_backward_input
#include "../ops/matmul.h"     // matmul_forward, matmul_backward_input, matmul_backward_weight, matmul_backward_bias
#include "../ranks/model_gradients.h"  // Model, model_place_of, model_gradient_of
#include "adapters.h"          // Adapters, AdapterPlace, adapter_find

#define NO_BIAS SIZE_MAX  // in place of the field of a bias

enum { LINEAR_PARTS = 2 };  // of outputs, each with an adapter of its own: gate and up

// of outputs first, first + 1, ...; experts have an A and a B each
typedef struct {
    LoraShape shape;      // but for N
    int first;
    const floatX *A, *B;
} LinearAdapter;

typedef struct {
    StoredMatrix weight;  // (OC, C), of experts (E, OC, C); in a CUDA build its data alone count, which are floatX
    const floatX* bias;   // (OC) or NULL
    int C, OC;
    int n_adapters;
    LinearAdapter adapter[LINEAR_PARTS];
    floatX* scratch;      // of adapters: adapter_scratch_elements
} Linear;

// NULL: does not learn
typedef struct { float *weight, *bias, *A[LINEAR_PARTS], *B[LINEAR_PARTS]; } LinearGradients;

static const LinearGradients NO_GRADIENTS = {NULL, NULL, {NULL, NULL}, {NULL, NULL}};

static inline Linear model_linear(const Model* m, size_t weight, size_t bias, int layer) {
    Linear w;
    const int i = model_row(m, weight, layer), b = bias == NO_BIAS ? -1 : model_row(m, bias, layer);
    memset(&w, 0, sizeof w);
    if (i < 0) { return w; }
    w.weight = model_matrix(m, i, layer);
    w.bias = b < 0 ? NULL : (const floatX*)model_place_of(m, b, layer);
    w.C = m->held[i].columns;
    w.OC = m->held[i].rows;
    return w;
}

static inline LinearGradients model_linear_gradients(Model* m, size_t weight, size_t bias, int layer) {
    const int i = model_row(m, weight, layer), b = bias == NO_BIAS ? -1 : model_row(m, bias, layer);
    LinearGradients d;
    memset(&d, 0, sizeof d);
    d.weight = i < 0 ? NULL : model_gradient_of(m, i, layer);
    d.bias = b < 0 ? NULL : model_gradient_of(m, b, layer);
    return d;
}

// ---- adapters: rows in front of the model's table ----

// what adapters need in training: the key of the update, the number of the leaf's first row in it, and room. p is not
// that of a place; 0: nothing is left out
typedef struct {
    Dropout dropout;
    floatX* scratch;
} AdapterPass;

// of N rows and, for experts, R: the most that a place needs, elements
static inline size_t adapter_scratch_elements(const Adapters* x, const Model* m, int N, int R) {
    size_t most = 0;
    for (int i = 0; i < x->n_places; i++) {
        const AdapterPlace* p = &x->places[i];
        const Tensor* t = &m->table[x->n_table + p->row];
        LoraShape s = {t->experts > 0 ? R : N, t->columns, p->n, p->rank, 0, 0.0f, {p->dropout, 0, 0}, 0};
        const size_t n = lora_scratch_elements(&s, t->experts > 0);
        most = n > most ? n : most;
    }
    return most;
}

// the adapters of the weight of a field at a layer; x NULL: there are none
static inline void linear_adapt(Linear* w, const Model* m, const Adapters* x, AdapterPass pass, size_t field,
                                int layer) {
    const int row = x ? model_row(m, field, layer) : -1;
    w->scratch = pass.scratch;
    for (int part = 0; row >= 0 && part < LINEAR_PARTS; part++) {
        const AdapterPlace* p = adapter_find(x, row - x->n_table, layer, part);
        if (!p) { continue; }
        LinearAdapter* a = &w->adapter[w->n_adapters++];
        const uint64_t first = pass.dropout.first * (uint64_t)w->C;
        const Dropout dropout = {p->dropout, pass.dropout.key, first}, none = {0.0f, 0, 0};
        const LoraShape shape = {0, w->C, p->n, p->rank, (size_t)w->OC, p->scale,
                                 pass.dropout.p > 0.0f ? dropout : none, (int)(p - x->places)};
        a->shape = shape;
        a->first = p->first;
        a->A = (const floatX*)model_place_of(m, p->a, layer);
        a->B = (const floatX*)model_place_of(m, p->b, layer);
    }
}

static inline void linear_adapt_gradients(LinearGradients* d, Model* m, const Adapters* x, size_t field, int layer) {
    const int row = x ? model_row(m, field, layer) : -1;
    for (int part = 0, n = 0; row >= 0 && part < LINEAR_PARTS; part++) {
        const AdapterPlace* p = adapter_find(x, row - x->n_table, layer, part);
        if (!p) { continue; }
        d->A[n] = model_gradient_of(m, p->a, layer);
        d->B[n++] = model_gradient_of(m, p->b, layer);
    }
}

// outputs (N, OC) go on; experts NULL: those of all rows are one
static inline void linear_adapters_forward_(floatX* out, const floatX* inp, const Linear* w, int N,
                                            const LoraExperts* experts, const Device* dev) {
    for (int i = 0; i < w->n_adapters; i++) {
        const LinearAdapter* a = &w->adapter[i];
        LoraShape shape = a->shape;
        shape.N = N;
        lora_forward(out + a->first, inp, a->A, a->B, &shape, experts, w->scratch, dev);
    }
}

// dinp (N, C) goes on; d NULL: its gradient alone
static inline void linear_adapters_backward_(floatX* dinp, const LinearGradients* d, const floatX* dout,
                                             const floatX* inp, const Linear* w, int N, const LoraExperts* experts,
                                             const Device* dev) {
    for (int i = 0; i < w->n_adapters; i++) {
        const LinearAdapter* a = &w->adapter[i];
        LoraShape shape = a->shape;
        shape.N = N;
        lora_backward(dinp, d ? d->A[i] : NULL, d ? d->B[i] : NULL, dout + a->first, inp, a->A, a->B, &shape, experts,
                      w->scratch, dev);
    }
}

// ---- the products ----

#ifndef __CUDACC__
static inline void linear_product_(float* out, const float* inp, const Linear* w, int N, const Device* dev) {
    matmul_forward_stored(out, inp, w->weight, w->bias, N, dev);
}

static inline void linear_product_back_(float* dinp, const float* dout, const Linear* w, int add, int N,
                                        const Device* dev) {
    matmul_backward_input_stored(dinp, dout, w->weight, add, N, dev);
}

static inline void linear_rows(float* out, const int* tokens, Linear w, int N, const Device* dev) {
    token_embedding_forward_stored(out, tokens, w.weight, N, dev);
}

static inline void linear_grouped_product_(float* out, const float* inp, const int* index, const Linear* w,
                                           const int* offsets, int E, int R, const Device* dev) {
    grouped_matmul_forward_stored(out, inp, index, w->weight, offsets, E, R, dev);
}

static inline void linear_grouped_product_back_(float* dinp, const float* dout, const int* index, const Linear* w,
                                                const int* offsets, int E, int R, const Device* dev) {
    grouped_matmul_backward_input_stored(dinp, dout, index, w->weight, offsets, E, R, dev);
}
#else
static inline void linear_product_(floatX* out, const floatX* inp, const Linear* w, int N, const Device* dev) {
    matmul_forward(out, inp, (const floatX*)w->weight.data, w->bias, N, w->C, w->OC, dev);
}

static inline void linear_product_back_(floatX* dinp, const floatX* dout, const Linear* w, int add, int N,
                                        const Device* dev) {
    matmul_backward_input(dinp, dout, (const floatX*)w->weight.data, add, N, w->C, w->OC, dev);
}

static inline void linear_rows(floatX* out, const int* tokens, Linear w, int N, const Device* dev) {
    token_embedding_forward(out, tokens, (const floatX*)w.weight.data, N, w.C, dev);
}

static inline void linear_grouped_product_(floatX* out, const floatX* inp, const int* index, const Linear* w,
                                           const int* offsets, int E, int R, const Device* dev) {
    grouped_matmul_forward(out, inp, index, (const floatX*)w->weight.data, offsets, E, R, w->C, w->OC, dev);
}

static inline void linear_grouped_product_back_(floatX* dinp, const floatX* dout, const int* index, const Linear* w,
                                                const int* offsets, int E, int R, const Device* dev) {
    grouped_matmul_backward_input(dinp, dout, index, (const floatX*)w->weight.data, offsets, E, R, w->C, w->OC, dev);
}

#if !defined(EXACT) && !defined(FP32)
// to floats, as a router's logits are; without bias and adapters
static inline void linear_forward(float* out, const floatX* inp, Linear w, int N, const Device* dev) {
    assert(!w.bias && w.n_adapters == 0);
    matmul_forward(out, inp, (const floatX*)w.weight.data, NULL, N, w.C, w.OC, dev);
}
#endif
#endif

static inline void linear_forward(floatX* out, const floatX* inp, Linear w, int N, const Device* dev) {
    linear_product_(out, inp, &w, N, dev);
    linear_adapters_forward_(out, inp, &w, N, NULL, dev);
}

// inp: what forward read
static inline void linear_backward_weight(const floatX* dout, const floatX* inp, Linear w, LinearGradients d, int N,
                                          const Device* dev) {
    matmul_backward_weight(d.weight, dout, inp, 0, N, w.C, w.OC, dev);
    matmul_backward_bias(d.bias, dout, N, w.OC, dev);
    linear_adapters_backward_(NULL, &d, dout, inp, &w, N, NULL, dev);
}

static inline void linear_backward_input(floatX* dinp, const floatX* dout, Linear w, int add, int N,
                                         const Device* dev) {
    linear_product_back_(dinp, dout, &w, add, N, dev);
    linear_adapters_backward_(dinp, NULL, dout, NULL, &w, N, NULL, dev);
}

static inline void linear_backward(floatX* dinp, const floatX* dout, const floatX* inp, Linear w, LinearGradients d,
                                   int add, int N, const Device* dev) {
    matmul_backward_weight(d.weight, dout, inp, 0, N, w.C, w.OC, dev);
    matmul_backward_bias(d.bias, dout, N, w.OC, dev);
    linear_product_back_(dinp, dout, &w, add, N, dev);
    linear_adapters_backward_(dinp, &d, dout, inp, &w, N, NULL, dev);
}

// ---- of experts: R rows, of which row s is row index[s] of inp or dout (NULL: s), sorted by expert (offsets) ----

static inline void linear_grouped_forward(floatX* out, const floatX* inp, const int* index, Linear w,
                                          const int* offsets, int E, int R, const Device* dev) {
    const LoraExperts experts = {E, offsets, index, NULL, NULL};
    linear_grouped_product_(out, inp, index, &w, offsets, E, R, dev);
    linear_adapters_forward_(out, inp, &w, R, &experts, dev);
}

static inline void linear_grouped_backward_input(floatX* dinp, const floatX* dout, const int* index, Linear w,
                                                 const int* offsets, int E, int R, const Device* dev) {
    const LoraExperts experts = {E, offsets, NULL, index, NULL};
    linear_grouped_product_back_(dinp, dout, index, &w, offsets, E, R, dev);
    linear_adapters_backward_(dinp, NULL, dout, NULL, &w, R, &experts, dev);
}

// Gradients of adapters alone. weight (R): what a row is multiplied by in all that comes after; NULL: nothing
static inline void linear_grouped_backward_adapters(const LinearGradients* d, const floatX* dout, const int* dout_index,
                                                    const floatX* inp, const int* inp_index, const float* weight,
                                                    Linear w, const int* offsets, int E, int R, const Device* dev) {
    const LoraExperts experts = {E, offsets, inp_index, dout_index, weight};
    linear_adapters_backward_(NULL, d, dout, inp, &w, R, &experts, dev);
}
#endif  // LLMC_LINEAR_H
