/*
A tensor table with the memory that it lays out: the activations of a model. (Parameters, gradients and moments have
arenas of their own in ranks/model.h, for ranks share them.)
    tensor_arena_layout   sizes only; returns the bytes that tensor_arena_open will take
    tensor_arena_divide   the same of some of the layers, for several micro-batches of which backward is still to come:
                          what it will ask for (tensor_waits), each has in a slot of its own
    arena_slots, arena_first_slot   how many there are; with which those of a chunk of layers begin;
                          arena_chunk_slot: the same, of an arena that may have all chunks in one slot
    tensor_arena_turn     from now on the arena is that of this slot, and has the layers of its chunk
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

enum { TENSOR_ARENA_MAX = 96, ARENA_CHUNKS_MAX = 16 };  // tensors; chunks of layers

// Which layers an arena has, and in how many slots. Chunks follow each other, as their slots do
typedef struct {
    int n;                               // chunks; 0: all layers are one, which has one slot
    const char* held[ARENA_CHUNKS_MAX];  // of each its layers (tensor_hold_layers); NULL: all
    int slots[ARENA_CHUNKS_MAX];
} ArenaSlots;

typedef struct {
    Tensor table[TENSOR_ARENA_MAX];
    int n_table;
    size_t n_bytes;
    ArenaSlots slots;
    int slot;
    void* memory;
} TensorArena;

// with which slot a chunk begins
static inline int arena_first_slot(const ArenaSlots* s, int chunk) {
    int first = 0;
    for (int c = 0; c < chunk; c++) { first += s->slots[c]; }
    return first;
}

static inline int arena_slots(const ArenaSlots* s) { return s->n > 0 ? arena_first_slot(s, s->n) : 1; }

// of a pass for which nothing waits
static inline int arena_chunk_slot(const ArenaSlots* s, int chunk) { return s->n > 1 ? arena_first_slot(s, chunk) : 0; }

static inline void tensor_arena_hold_(Tensor* t, const ArenaSlots* s, int chunk) {
    if (t->layers > 0 && s->n > 0 && s->held[chunk]) { tensor_hold_layers(t, s->held[chunk]); }
}

// the bytes of one slot of a row
static inline size_t tensor_arena_row_bytes_(const TensorArena* a, const Tensor* row, int chunk) {
    Tensor t = *row;
    tensor_arena_hold_(&t, &a->slots, chunk);
    return (tensor_held_elements(&t) + 15) / 16 * 16 * t.stored_bytes;
}

// where a slot of a row begins, counted from the first; its chunk in *chunk
static inline size_t tensor_arena_slot_(const TensorArena* a, const Tensor* t, int slot, int* chunk) {
    size_t at = 0;
    for (*chunk = 0; *chunk + 1 < a->slots.n && slot >= a->slots.slots[*chunk]; slot -= a->slots.slots[(*chunk)++]) {
        at += (size_t)a->slots.slots[*chunk] * tensor_arena_row_bytes_(a, t, *chunk);
    }
    return tensor_waits(t) ? at + (size_t)slot * tensor_arena_row_bytes_(a, t, *chunk) : 0;
}

// the first n_table rows of the table are filled in
static inline double tensor_arena_lay_(TensorArena* a) {
    const int n_slots = arena_slots(&a->slots);
    a->n_bytes = 0;
    a->slot = 0;
    for (int i = 0, chunk; i < a->n_table; i++) {
        Tensor* t = &a->table[i];
        t->stored_at = a->n_bytes;
        a->n_bytes += tensor_waits(t) ? tensor_arena_slot_(a, t, n_slots, &chunk) : tensor_arena_row_bytes_(a, t, 0);
        tensor_arena_hold_(t, &a->slots, 0);
    }
    return (double)a->n_bytes;
}

static inline double tensor_arena_layout(TensorArena* a, int n_table, size_t element_bytes) {
    assert(n_table <= TENSOR_ARENA_MAX);
    a->n_table = n_table;
    a->slots.n = 0;
    tensors_layout(a->table, n_table);
    for (int i = 0; i < n_table; i++) { a->table[i].stored_bytes = element_bytes; }
    return tensor_arena_lay_(a);
}

// after a layout
static inline double tensor_arena_divide(TensorArena* a, const ArenaSlots* slots) {
    a->slots = *slots;
    return tensor_arena_lay_(a);
}

static inline void tensor_arena_open(TensorArena* a, const char* what) { a->memory = device_alloc(a->n_bytes, what); }

static inline void tensor_arena_close(TensorArena* a) {
    device_release(a->memory, a->n_bytes);
    a->memory = NULL;
}

static inline void tensor_arena_turn(TensorArena* a, int slot) {
    for (int i = 0, chunk; i < a->n_table; i++) {
        Tensor* t = &a->table[i];
        t->stored_at -= tensor_arena_slot_(a, t, a->slot, &chunk);
        t->stored_at += tensor_arena_slot_(a, t, slot, &chunk);
        tensor_arena_hold_(t, &a->slots, chunk);
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
