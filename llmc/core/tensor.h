/*
The tensor table: everything anyone asks about a parameter or an activation stands on its line. Allocation, start values,
weight decay, checkpoints, gradients, ranks and tests loop over the table; no code says "tensor number 6".
A tensor holds all its layers one after the other, (layers, rows, columns) row-major; tensors start at multiples of 64 bytes.
The same table lays out every arena of the same shape: parameters, gradients, both moments.
*/
#ifndef LLMC_TENSOR_H
#define LLMC_TENSOR_H
#include "rng.h"  // Mt19937, normal_fill
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef enum { INIT_ZEROS, INIT_ONES, INIT_NORMAL, INIT_UNIFORM, INIT_NONE } Init;  // NONE: the trainer's; they are left alone
typedef enum { NO_DECAY, DECAY } Decay;
// TRANSPOSED: (columns, rows), as GPT-2's Conv1D; VECTOR: (columns); CONV: (rows, 1, columns), a convolution of each channel by
// itself
typedef enum { AS_IS, TRANSPOSED, VECTOR, CONV } OnDisk;

typedef struct {
    const char* name;    // on disk; %d stands for the layer
    size_t field;        // offsetof the pointer in the struct that names the tensors
    int layers;          // 0: belongs to no layer; the tensor is one slice
    int rows, columns;   // of one slice; a vector has 1 row
    int disk_rows;       // rows that a file holds; the padding up to `rows` is zero and stays zero
    Init init;
    float std;           // of INIT_NORMAL; of INIT_UNIFORM the bound: from -std to std
    Decay decay;
    OnDisk on_disk;
    int frozen;          // no update
    size_t offset;       // first element in an arena; set by tensors_layout
} Tensor;

static inline Tensor tensor(const char* name, size_t field, int layers, int rows, int columns, Init init, float std, Decay decay,
                            OnDisk on_disk) {
    Tensor t = {name, field, layers, rows, columns, rows, init, std, decay, on_disk, 0, 0};
    return t;
}

// a row of an activation table: nothing is drawn, saved or decayed
static inline Tensor activation(const char* name, size_t field, int layers, int rows, int columns) {
    return tensor(name, field, layers, rows, columns, INIT_ZEROS, 0.0f, NO_DECAY, AS_IS);
}

static inline int tensor_slices(const Tensor* t) { return t->layers > 0 ? t->layers : 1; }
static inline size_t tensor_slice_elements(const Tensor* t) { return (size_t)t->rows * (size_t)t->columns; }
static inline size_t tensor_elements(const Tensor* t) { return tensor_slice_elements(t) * (size_t)tensor_slices(t); }

// elements of one slice that a file holds
static inline size_t tensor_disk_elements(const Tensor* t) { return (size_t)t->disk_rows * (size_t)t->columns; }

// fill in the offsets; the arena's size in elements comes back
static inline size_t tensors_layout(Tensor* table, int n) {
    size_t offset = 0;
    for (int i = 0; i < n; i++) {
        table[i].offset = offset;
        offset += (tensor_elements(&table[i]) + 15) / 16 * 16;
    }
    return offset;
}

// elements of all tensors, without the gaps between them
static inline size_t tensors_count(const Tensor* table, int n) {
    size_t count = 0;
    for (int i = 0; i < n; i++) { count += tensor_elements(&table[i]); }
    return count;
}

// Let the fields of `pointers` point into an arena: at layer `layer` of those tensors that have layers. Elements of another
// size than float's, as floatX of a .cu trainer may have, are told. A field whose tensor this model's table lacks keeps what it
// holds: NULL, where the trainer has put it
static inline void tensors_point_sized(void* pointers, const Tensor* table, int n, void* arena, size_t element_bytes, int layer) {
    for (int i = 0; i < n; i++) {
        size_t element = table[i].offset + (table[i].layers > 0 ? (size_t)layer * tensor_slice_elements(&table[i]) : 0);
        char* first = (char*)arena + element_bytes * element;
        memcpy((char*)pointers + table[i].field, &first, sizeof first);
    }
}

static inline void tensors_point(void* pointers, const Tensor* table, int n, float* arena, int layer) {
    tensors_point_sized(pointers, table, n, arena, sizeof(float), layer);
}

// the name of one slice: "transformer.h.%d.ln_1.weight" of layer 3 is "transformer.h.3.ln_1.weight"
static inline const char* tensor_slice_name(char* buffer, size_t n_bytes, const Tensor* t, int layer) {
    const char* mark = strstr(t->name, "%d");
    if (mark) {
        snprintf(buffer, n_bytes, "%.*s%d%s", (int)(mark - t->name), t->name, layer, mark + 2);
    } else {
        snprintf(buffer, n_bytes, "%s", t->name);
    }
    return buffer;
}

// start values: layer by layer, in table order within a layer, so that the draws come as PyTorch makes the same network
static inline void tensors_init(const Tensor* table, int n, float* arena, uint32_t seed) {
    Mt19937 mt;
    mt19937_init(&mt, seed);
    int n_layers = 1;
    for (int i = 0; i < n; i++) { n_layers = table[i].layers > n_layers ? table[i].layers : n_layers; }
    for (int l = 0; l < n_layers; l++) {
        for (int i = 0; i < n; i++) {
            const Tensor* t = &table[i];
            float* x = arena + t->offset + l * tensor_slice_elements(t);
            if (l >= tensor_slices(t) || t->init == INIT_NONE) { continue; }
            memset(x, 0, sizeof(float) * tensor_slice_elements(t));
            if (t->init == INIT_NORMAL) { normal_fill(&mt, x, tensor_disk_elements(t), 0.0f, t->std); }
            if (t->init == INIT_UNIFORM) { uniform_fill(&mt, x, tensor_disk_elements(t), -t->std, t->std); }
            for (size_t j = 0; t->init == INIT_ONES && j < tensor_disk_elements(t); j++) { x[j] = 1.0f; }
        }
    }
}
#endif  // LLMC_TENSOR_H
