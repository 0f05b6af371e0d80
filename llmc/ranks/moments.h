/*
Arenas of which every rank keeps a part (model.h) against safetensors: the file is the one that a single rank would
write.
    moments_save    optimizer.safetensors: rank 0 writes, slice by slice as they come from their owners; the other
                    ranks only send, and need no path. All ranks call
    moments_load_layers    every rank reads what it keeps; the model may have more layers than the file. A slice that
                    learns and has no moments in the file, because it was frozen before, begins with 0
    moments_load_average   the same of the average of the parameters, whose file has what does not learn, too
What does not learn has no moments, in memory or in the file.
Arenas are device memory, or with dev NULL copies of them in host memory (snapshot.h).
Memory: two slices.
*/
#ifndef LLMC_MOMENTS_H
#define LLMC_MOMENTS_H
#include "../files/tensorfile.h"  // tensor_put_slice, tensor_load_slice
#include "model_collect.h"        // model_slice

static inline float* moments_room_(const Model* m) {
    return (float*)malloc_check(sizeof(float) * model_largest_slice(m, m->n_saved), "a slice of a tensor");
}

static inline int moments_learns_(const Model* m, int i, int k) {
    return !slice_is_frozen(m->frozen, tensors_slices(m->table, i) + k);
}

// the slices that learn, sorted by name
static inline TensorSlices moments_sorted_(const Model* m) {
    TensorSlices sorted = tensors_sorted(m->table, m->n_saved);
    int n = 0;
    for (int k = 0; k < sorted.n; k++) {
        const TensorSlice* x = &sorted.slice[k];
        if (moments_learns_(m, (int)(x->tensor - m->table), x->k)) { sorted.slice[n++] = *x; }
    }
    sorted.n = n;
    return sorted;
}

// w: the open file on rank 0
static inline void moments_put_(SafeWriter* w, Model* m, TensorSlices sorted, const float* arena, const Device* dev) {
    float *room = moments_room_(m), *turned = tensors_turning_room(m->table, m->n_saved);
    for (int k = 0; k < sorted.n; k++) {
        const TensorSlice* x = &sorted.slice[k];
        const float* slice = model_slice(m, arena, (int)(x->tensor - m->table), x->k, room, dev);
        if (slice) { tensor_put_slice(w, x->tensor, slice, turned); }
    }
    free(room);
    free(turned);
}

// AdamW's moments, in one file; its sum comes back on rank 0
static inline FileSum moments_save(const char* path, Model* m, const float* first, const float* second,
                                   const Device* dev) {
    SafeWriter w;
    FileSum sum;
    TensorSlices sorted = moments_sorted_(m);
    memset(&sum, 0, sizeof sum);
    if (model_rank(m) == 0) {
        safewriter_init(&w);
        safewriter_meta(&w, "format", "pt");  // transformers asks for it
        slices_declare_(&w, sorted.slice, sorted.n, "exp_avg.");
        slices_declare_(&w, sorted.slice, sorted.n, "exp_avg_sq.");
        safewriter_open(&w, path);
    }
    moments_put_(&w, m, sorted, first, dev);
    moments_put_(&w, m, sorted, second, dev);
    free(sorted.slice);
    if (model_rank(m) == 0) { sum = safewriter_close(&w); }
    return sum;
}

// Slice k of row i, as far as this rank keeps it. file: the slice of the file, -1: none, then it is 0
static inline void moments_load_slice_(SafeSet* set, Model* m, const char* prefix, float* arena, int i, int k,
                                       int file, float* room, float* turned, const Device* dev) {
    const Tensor* t = &m->table[i];
    const Part own = model_kept(m, i, k);
    if (own.n == 0) { return; }
    memset(room, 0, sizeof(float) * tensor_slice_elements(t));  // padding rows too
    if (file >= 0) { tensor_load_slice(set, t, file, prefix, room, turned); }
    model_take_part(m, i, room, room);
    device_upload(arena + own.at, room + own.first, sizeof(float) * own.n, dev);
    device_sync(dev);  // room is written again
}

static inline int moments_are_there_(SafeSet* set, const Tensor* t, int k) {
    char name[NAME_BYTES];
    tensor_slice_name(name, sizeof name, t, k);
    return find_tensor_(set, "exp_avg.", name) || find_tensor_(set, "exp_avg_sq.", name);
}

// old_layer as in tensors_load_layers; the moments of a new layer are 0
static inline void moments_load_layers(const char* path, Model* m, float* first, float* second, const int* old_layer,
                                       const Device* dev) {
    float *room = moments_room_(m), *turned = tensors_turning_room(m->table, m->n_saved);
    int n_new = 0;
    SafeSet set;
    safeset_open(&set, path);
    for (int i = 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        for (int k = 0, n_slices = tensor_slices(t); k < n_slices; k++) {
            int file = tensor_old_slice(t, old_layer, k);
            if (!moments_learns_(m, i, k)) { continue; }
            const int is_new = file >= 0 && !moments_are_there_(&set, t, file);
            n_new += is_new && k % tensor_joined(t) == 0;
            file = is_new ? -1 : file;
            moments_load_slice_(&set, m, "exp_avg.", first, i, k, file, room, turned, dev);
            moments_load_slice_(&set, m, "exp_avg_sq.", second, i, k, file, room, turned, dev);
        }
        progress("loading", i + 1, m->n_table);
    }
    if (n_new > 0 && model_rank(m) == 0) {
        warn_line("%s: %d tensor%s that learn%s now %s frozen or not there: their moments begin with 0", path, n_new,
                  n_new > 1 ? "s" : "", n_new > 1 ? "" : "s", n_new > 1 ? "were" : "was");
    }
    safeset_close(&set);
    free(room);
    free(turned);
}

// the average of the parameters (ema.h), from a file of them all
static inline void moments_load_average(const char* path, Model* m, float* average, const Device* dev) {
    float *room = moments_room_(m), *turned = tensors_turning_room(m->table, m->n_saved);
    SafeSet set;
    safeset_open(&set, path);
    for (int i = 0; i < m->n_table; i++) {
        for (int k = 0, n_slices = tensor_slices(&m->table[i]); k < n_slices; k++) {
            if (!moments_learns_(m, i, k)) { continue; }
            moments_load_slice_(&set, m, "", average, i, k, k, room, turned, dev);
        }
    }
    safeset_close(&set);
    free(room);
    free(turned);
}
#endif  // LLMC_MOMENTS_H
