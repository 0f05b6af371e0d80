/*
Arenas of which every rank keeps a part (data_parallel.h) against safetensors: the file is the one that a single rank
would write.
    moments_save    optimizer.safetensors: rank 0 writes, slice by slice as they come from their owners; the other
                    ranks only send, and need no path. All ranks call
    moments_load    every rank reads what it keeps; moments_load_layers: the same into a model with more layers than
                    the file. A slice that learns and has no moments in the file, because it was frozen before, begins
                    with 0
    moments_load_average   the same of the average of the parameters, whose file has what does not learn, too
    dp_collect      what learns of such an arena, at its place in a whole one on rank 0's host. All ranks call
    dp_collect_frozen   the rest of it from the stored weights, for what does not learn has no master
What does not learn has no moments, in memory or in the file.
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

// the slices that learn, sorted by name
static inline TensorSlices dp_sorted_(const DataParallel* s) {
    TensorSlices sorted = tensors_sorted(s->table, s->n_tensors);
    int n = 0;
    for (int k = 0; k < sorted.n; k++) {
        const TensorSlice* x = &sorted.slice[k];
        if (dp_stretch(s, (int)(x->tensor - s->table), x->k) >= 0) { sorted.slice[n++] = *x; }
    }
    sorted.n = n;
    return sorted;
}

// w: the open file on rank 0
static inline void dp_put_(SafeWriter* w, DataParallel* s, TensorSlices sorted, const float* arena, const Device* dev) {
    float *room = dp_slice_room_(s), *turned = tensors_turning_room(s->table, s->n_tensors);
    for (int k = 0; k < sorted.n; k++) {
        const TensorSlice* x = &sorted.slice[k];
        const float* slice = dp_slice(s, arena, (int)(x->tensor - s->table), x->k, room, dev);
        if (slice) { tensor_put_slice(w, x->tensor, slice, turned); }
    }
    free(room);
    free(turned);
}

// AdamW's moments, in one file; its sum comes back on rank 0
static inline FileSum moments_save(const char* path, DataParallel* s, const float* m, const float* v,
                                   const Device* dev) {
    SafeWriter w;
    FileSum sum;
    TensorSlices sorted = dp_sorted_(s);
    memset(&sum, 0, sizeof sum);
    if (s->rank == 0) {
        safewriter_init(&w);
        safewriter_meta(&w, "format", "pt");  // transformers asks for it
        slices_declare_(&w, sorted.slice, sorted.n, "exp_avg.");
        slices_declare_(&w, sorted.slice, sorted.n, "exp_avg_sq.");
        safewriter_open(&w, path);
    }
    dp_put_(&w, s, sorted, m, dev);
    dp_put_(&w, s, sorted, v, dev);
    free(sorted.slice);
    if (s->rank == 0) { sum = safewriter_close(&w); }
    return sum;
}

// whole: a whole arena on rank 0; the others need none
static inline void dp_collect(DataParallel* s, const float* arena, float* whole, const Device* dev) {
    float* room = dp_slice_room_(s);
    for (int i = 0; i < s->n_tensors; i++) {
        const Tensor* t = &s->table[i];
        const size_t n = tensor_slice_elements(t);
        for (int k = 0, n_slices = tensor_slices(t); k < n_slices; k++) {
            const float* slice = dp_stretch(s, i, k) >= 0 ? dp_slice(s, arena, i, k, room, dev) : NULL;
            if (slice) { memcpy(whole + t->offset + n * (size_t)k, slice, sizeof(float) * n); }
        }
    }
    free(room);
}

// stored: parameters of stored_bytes each, float or bf16, on the device. No other rank is asked
static inline void dp_collect_frozen(const DataParallel* s, const void* stored, size_t stored_bytes, float* whole,
                                     const Device* dev) {
    float* room = dp_slice_room_(s);
    for (int i = 0; i < s->n_tensors; i++) {
        const size_t n = tensor_slice_elements(&s->table[i]);
        for (int k = 0, n_slices = tensor_slices(&s->table[i]); k < n_slices; k++) {
            const size_t at = s->table[i].offset + n * (size_t)k;
            if (dp_stretch(s, i, k) >= 0) { continue; }
            device_download(room, (const char*)stored + stored_bytes * at, stored_bytes * n, dev);
            for (size_t j = 0; j < n; j++) {
                uint32_t bits = 0;  // bf16 is the upper half of a float
                memcpy((char*)&bits + (sizeof bits - stored_bytes), (const char*)room + stored_bytes * j, stored_bytes);
                memcpy(&whole[at + j], &bits, sizeof bits);
            }
        }
    }
    free(room);
}

// Slice k of tensor i, of which this rank keeps some. file: the slice of the file, -1: none, then it is 0
static inline void dp_load_slice_(SafeSet* set, const DataParallel* s, const char* prefix, float* arena, int i, int k,
                                  int file, float* room, float* turned, const Device* dev) {
    const Tensor* t = &s->table[i];
    const size_t n = tensor_slice_elements(t), first = n * (size_t)k;
    const Part own = part_within(s->kept[dp_stretch(s, i, k)], first, first + n);
    if (own.n == 0) { return; }
    memset(room, 0, sizeof(float) * n);  // padding rows too
    if (file >= 0) { tensor_load_slice(set, t, file, prefix, room, turned); }
    device_upload(arena + own.at, room + (own.first - first), sizeof(float) * own.n, dev);
    device_sync(dev);  // room is written again
}

static inline int dp_has_moments_(SafeSet* set, const Tensor* t, int k) {
    char name[NAME_BYTES];
    tensor_slice_name(name, sizeof name, t, k);
    return find_tensor_(set, "exp_avg.", name) || find_tensor_(set, "exp_avg_sq.", name);
}

// old_layer as in tensors_load_layers; the moments of a new layer are 0
static inline void moments_load_layers(const char* path, const DataParallel* s, float* m, float* v,
                                       const int* old_layer, const Device* dev) {
    float *room = dp_slice_room_(s), *turned = tensors_turning_room(s->table, s->n_tensors);
    int n_new = 0;
    SafeSet set;
    safeset_open(&set, path);
    for (int i = 0; i < s->n_tensors; i++) {
        const Tensor* t = &s->table[i];
        for (int k = 0, n_slices = tensor_slices(t); k < n_slices; k++) {
            int file = tensor_old_slice(t, old_layer, k);
            if (dp_stretch(s, i, k) < 0) { continue; }
            const int is_new = file >= 0 && !dp_has_moments_(&set, t, file);
            n_new += is_new;
            file = is_new ? -1 : file;
            dp_load_slice_(&set, s, "exp_avg.", m, i, k, file, room, turned, dev);
            dp_load_slice_(&set, s, "exp_avg_sq.", v, i, k, file, room, turned, dev);
        }
        progress("loading", i + 1, s->n_tensors);
    }
    if (n_new > 0 && s->rank == 0) {
        warn_line("%s: %d tensor%s that learn%s now %s frozen: their moments begin with 0", path, n_new,
                  n_new > 1 ? "s" : "", n_new > 1 ? "" : "s", n_new > 1 ? "were" : "was");
    }
    safeset_close(&set);
    free(room);
    free(turned);
}

// the average of the parameters (ema.h), from a file of them all
static inline void moments_load_average(const char* path, const DataParallel* s, float* average, const Device* dev) {
    float *room = dp_slice_room_(s), *turned = tensors_turning_room(s->table, s->n_tensors);
    SafeSet set;
    safeset_open(&set, path);
    for (int i = 0; i < s->n_tensors; i++) {
        for (int k = 0, n_slices = tensor_slices(&s->table[i]); k < n_slices; k++) {
            if (dp_stretch(s, i, k) >= 0) { dp_load_slice_(&set, s, "", average, i, k, k, room, turned, dev); }
        }
    }
    safeset_close(&set);
    free(room);
    free(turned);
}

static inline void moments_load(const char* path, const DataParallel* s, float* m, float* v, const Device* dev) {
    moments_load_layers(path, s, m, v, NULL, dev);
}
#endif  // LLMC_MOMENTS_H
