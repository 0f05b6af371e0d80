/*
Arenas of which every rank keeps a part (data_parallel.h) against safetensors: the file is the one that a single rank would write.
    moments_save    optimizer.safetensors: rank 0 writes, slice by slice as they come from their owners; the other ranks only send,
                    and need no path. All ranks call
    moments_load    every rank reads what it keeps; moments_load_layers: the same into a model with more layers than the file
    dp_collect  such an arena, whole, on rank 0's host. All ranks call
Arenas are device memory, or with dev NULL copies of them in host memory (snapshot.h).
Memory: two slices.
*/
#ifndef LLMC_MOMENTS_H
#define LLMC_MOMENTS_H
#include "../files/tensorfile.h"  // tensor_put_slice, tensor_load_slice
#include "data_parallel.h"        // DataParallel, dp_slice

static inline float* dp_slice_room_(const DataParallel* s) {
    size_t most = 0;
    for (int i = 0; i < s->n_tensors; i++) {
        size_t n = tensor_slice_elements(&s->table[i]);
        most = n > most ? n : most;
    }
    return (float*)malloc_check(sizeof(float) * most, "a slice of a tensor");
}

// w: the open file on rank 0
static inline void dp_put_(SafeWriter* w, DataParallel* s, const float* arena, const Device* dev) {
    TensorSlices sorted = tensors_sorted(s->table, s->n_tensors);
    float *room = dp_slice_room_(s), *turned = tensors_turning_room(s->table, s->n_tensors);
    for (int k = 0; k < sorted.n; k++) {
        const TensorSlice* x = &sorted.slice[k];
        const float* slice = dp_slice(s, arena, (int)(x->tensor - s->table), x->k, room, dev);
        if (slice) { tensor_put_slice(w, x->tensor, slice, turned); }
    }
    free(room);
    free(turned);
    free(sorted.slice);
}

// AdamW's moments, in one file; its sum comes back on rank 0
static inline FileSum moments_save(const char* path, DataParallel* s, const float* m, const float* v, const Device* dev) {
    SafeWriter w;
    FileSum sum;
    memset(&sum, 0, sizeof sum);
    if (s->rank == 0) {
        safewriter_init(&w);
        safewriter_meta(&w, "format", "pt");  // transformers asks for it
        tensors_declare(&w, s->table, s->n_tensors, "exp_avg.");
        tensors_declare(&w, s->table, s->n_tensors, "exp_avg_sq.");
        safewriter_open(&w, path);
    }
    dp_put_(&w, s, m, dev);
    dp_put_(&w, s, v, dev);
    if (s->rank == 0) { sum = safewriter_close(&w); }
    return sum;
}

// whole: a whole arena on rank 0; the others need none
static inline void dp_collect(DataParallel* s, const float* arena, float* whole, const Device* dev) {
    float* room = dp_slice_room_(s);
    for (int i = 0; i < s->n_tensors; i++) {
        const Tensor* t = &s->table[i];
        const size_t n = tensor_slice_elements(t);
        for (int l = 0; l < tensor_slices(t); l++) {
            const float* slice = dp_slice(s, arena, i, l, room, dev);
            if (slice) { memcpy(whole + t->offset + n * (size_t)l, slice, sizeof(float) * n); }
        }
    }
    free(room);
}

static inline void dp_load_(SafeSet* set, const DataParallel* s, const char* prefix, float* arena, const int* old_layer,
                                const Device* dev) {
    float *room = dp_slice_room_(s), *turned = tensors_turning_room(s->table, s->n_tensors);
    for (int i = 0; i < s->n_tensors; i++) {
        const Tensor* t = &s->table[i];
        const size_t n = tensor_slice_elements(t);
        for (int l = 0; l < tensor_slices(t); l++) {
            const size_t first = n * (size_t)l;
            const Part own = part_within(s->kept[i], first, first + n);
            const int from = tensor_old_slice(t, old_layer, l);
            if (own.n == 0) { continue; }
            memset(room, 0, sizeof(float) * n);  // padding rows, new layers
            if (from >= 0) { tensor_load_slice(set, t, from, prefix, room, turned); }
            device_upload(arena + own.at, room + (own.first - first), sizeof(float) * own.n, dev);
        }
        progress("loading", i + 1, s->n_tensors);
    }
    free(room);
    free(turned);
}

// old_layer as in tensors_load_layers; the moments of a new layer are 0
static inline void moments_load_layers(const char* path, const DataParallel* s, float* m, float* v, const int* old_layer,
                                       const Device* dev) {
    SafeSet set;
    safeset_open(&set, path);
    dp_load_(&set, s, "exp_avg.", m, old_layer, dev);
    dp_load_(&set, s, "exp_avg_sq.", v, old_layer, dev);
    safeset_close(&set);
}

static inline void moments_load(const char* path, const DataParallel* s, float* m, float* v, const Device* dev) {
    moments_load_layers(path, s, m, v, NULL, dev);
}
#endif  // LLMC_MOMENTS_H
