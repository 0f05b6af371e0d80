/*
A tensor table with the memory that it lays out: the activations of a model. (Parameters, gradients and moments have
arenas of their own in ranks/model.h, for ranks share them.)
    tensor_arena_layout   sizes only; returns the bytes that tensor_arena_open will take
    tensor_arena_open     zeroed device memory
    tensor_arena_point    the fields of a struct of pointers point into it, at a layer
    tensor_arena_at       where a row of the table begins, at a layer that it has
    tensor_arena_close    also of one that was never opened, if it is all zero
*/
#ifndef LLMC_TENSOR_ARENA_H
#define LLMC_TENSOR_ARENA_H
#include "device.h"  // device_alloc, device_release
#include "tensor.h"  // Tensor, tensors_layout
#include <assert.h>

enum { TENSOR_ARENA_MAX = 64 };  // tensors

typedef struct {
    Tensor table[TENSOR_ARENA_MAX];
    int n_table;
    size_t n, element_bytes;  // elements
    void* memory;
} TensorArena;

// the first n_table rows of the table are filled in
static inline double tensor_arena_layout(TensorArena* a, int n_table, size_t element_bytes) {
    assert(n_table <= TENSOR_ARENA_MAX);
    a->n_table = n_table;
    a->element_bytes = element_bytes;
    a->n = tensors_layout(a->table, n_table);
    return (double)tensors_store(a->table, n_table, element_bytes);
}

static inline void tensor_arena_open(TensorArena* a, const char* what) {
    a->memory = device_alloc(a->element_bytes * a->n, what);
}

static inline void tensor_arena_close(TensorArena* a) {
    device_release(a->memory, a->element_bytes * a->n);
    a->memory = NULL;
}

static inline void tensor_arena_point(const TensorArena* a, void* pointers, int layer) {
    tensors_point(pointers, a->table, a->n_table, a->memory, layer);
}

static inline void* tensor_arena_at(const TensorArena* a, const Tensor* t, int layer) {
    return (char*)a->memory + tensor_stored_place(t, (size_t)tensor_slice(t, layer) * tensor_slice_elements(t));
}
#endif  // LLMC_TENSOR_ARENA_H
