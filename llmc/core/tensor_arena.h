/*
A tensor table with the memory that it lays out: the activations of a model. (Parameters, gradients and moments have
arenas of their own in ranks/model.h, for ranks share them.)
    tensor_arena_layout   sizes only; returns the bytes that tensor_arena_open will take
    tensor_arena_layout_slots   the same for several micro-batches of which backward is still to come: what it will ask
                          for (tensor_waits), each has by itself
    tensor_arena_divide   ... and of some of the layers
    tensor_arena_turn     from now on the arena is that of this slot
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
    size_t n_bytes;
    int slot;
    void* memory;
} TensorArena;

// the bytes of one slot of a row
static inline size_t tensor_arena_row_bytes_(const Tensor* t) {
    return (tensor_held_elements(t) + 15) / 16 * 16 * t->stored_bytes;
}

// the first n_table rows of the table are filled in
static inline double tensor_arena_layout_slots(TensorArena* a, int n_table, size_t element_bytes, int n_slots) {
    assert(n_table <= TENSOR_ARENA_MAX && n_slots > 0);
    a->n_table = n_table;
    a->n_bytes = 0;
    a->slot = 0;
    tensors_layout(a->table, n_table);
    for (int i = 0; i < n_table; i++) {
        Tensor* t = &a->table[i];
        t->stored_bytes = element_bytes;
        t->stored_at = a->n_bytes;
        a->n_bytes += tensor_arena_row_bytes_(t) * (size_t)(tensor_waits(t) ? n_slots : 1);
    }
    return (double)a->n_bytes;
}

static inline double tensor_arena_layout(TensorArena* a, int n_table, size_t element_bytes) {
    return tensor_arena_layout_slots(a, n_table, element_bytes, 1);
}

// After a layout, the same for a rank that has some of the layers (tensor_hold_layers; NULL: all)
static inline double tensor_arena_divide(TensorArena* a, const char* held, int n_slots) {
    for (int i = 0; i < a->n_table && held; i++) {
        if (a->table[i].layers > 0) { tensor_hold_layers(&a->table[i], held); }
    }
    return tensor_arena_layout_slots(a, a->n_table, a->table[0].stored_bytes, n_slots);
}

static inline void tensor_arena_open(TensorArena* a, const char* what) { a->memory = device_alloc(a->n_bytes, what); }

static inline void tensor_arena_close(TensorArena* a) {
    device_release(a->memory, a->n_bytes);
    a->memory = NULL;
}

static inline void tensor_arena_turn(TensorArena* a, int slot) {
    for (int i = 0; i < a->n_table; i++) {
        Tensor* t = &a->table[i];
        const size_t n = tensor_waits(t) ? tensor_arena_row_bytes_(t) : 0;
        t->stored_at = t->stored_at - n * (size_t)a->slot + n * (size_t)slot;
    }
    a->slot = slot;
}

static inline void tensor_arena_point(const TensorArena* a, void* pointers, int layer) {
    tensors_point(pointers, a->table, a->n_table, a->memory, layer);
}

static inline void* tensor_arena_at(const TensorArena* a, const Tensor* t, int layer) {
    return (char*)a->memory + tensor_stored_place(t, (size_t)tensor_slice(t, layer) * tensor_slice_elements(t));
}
#endif  // LLMC_TENSOR_ARENA_H
