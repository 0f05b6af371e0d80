/*
A model's parameters as a checkpoint has them, from the ranks that keep them (model.h): floats on the host of rank 0.
    model_slice           of an arena of parts that ranks keep one slice
    model_whole           the parameters, all of them; model_whole_free
    model_whole_average   their average over updates in the same way (ema.h)
    model_download        the stored parameters as floats: of a model that is whole here
    model_source_of, model_any_slice   a slice of either; model_slices.h: one after the other
*/
#ifndef LLMC_MODEL_COLLECT_H
#define LLMC_MODEL_COLLECT_H
#include "../core/bf16.h"  // bf16_widen
#include "model.h"         // Model, model_source_rank, model_put_part_

// are the masters, like the moments, dealt out over the ranks?
static inline int model_masters_in_parts(const Model* m) { return m->w.master && m->dp.zero > 0; }

// do all ranks have something of the parameters that rank 0 lacks?
static inline int model_is_in_parts(const Model* m) { return model_masters_in_parts(m) || model_is_divided(m); }

// what of the parameters a checkpoint is made from, and its bytes: masters or, without them, what is stored
static inline const void* model_source(const Model* m) { return m->w.master ? (const void*)m->w.master : m->w.stored; }
static inline size_t model_source_bytes(const Model* m) {
    return m->w.master ? sizeof(float) * m->n_kept : model_saved_bytes(m);
}

// What rank `source` has, `from`, comes to rank 0: in `room`, or where it is. NULL elsewhere
static inline const float* model_bring_(const Model* m, const float* from, float* room, size_t n, int source) {
    Comm* world = m->world;
    if (source == 0) { return model_rank(m) > 0 ? NULL : from; }
    const int sends = world->rank == source, receives = world->rank == 0;
    comm_wait(world, comm_send_recv(world, from, sends ? n : 0, sends ? 0 : -1, room, receives ? n : 0,
                                    receives ? source : -1, DT_F32, HERE));
    return receives ? room : NULL;
}

// Slice k of row i, of which `from` is what this rank has: whole on rank 0, in `room` or where it is. NULL elsewhere
static inline const float* model_bring_slice_(const Model* m, const float* from, float* room, int i, int k) {
    const int source = model_source_rank(m, i, k), n_parts = model_parts(m, i);
    const size_t n = model_part_elements(m, i);
    if (n_parts == 1) { return model_bring_(m, from, room, n, source); }
    float* part = (float*)malloc_check(sizeof(float) * n, "part of a tensor");
    if (from) { memcpy(part, from, sizeof(float) * n); }
    for (int p = 0; p < n_parts; p++) {
        if (model_bring_(m, part, part, n, source + p)) { model_put_part_(m, i, room, part, p); }
    }
    free(part);
    return model_rank(m) == 0 ? room : NULL;
}

// Slice k of row i, which learns, of an arena of kept parts: on rank 0 the whole slice comes back, in the arena or in
// `room`, on the others NULL. All ranks call, with room for a slice on the host. dev NULL: the arena is host memory
static inline const float* model_slice(Model* m, const float* arena, int i, int k, float* room, const Device* dev) {
    const int held = model_has_stage_of(m, i, k) ? model_held_slice(m, i, k) : -1;
    const float* from = held < 0 ? NULL : dp_slice(model_dp(m, i), arena, i, held, room, dev);
    return model_bring_slice_(m, from, room, i, k);
}

// n stored values, which lie at the beginning of `room` as they are stored, become floats there
static inline void model_widen_(float* room, size_t stored_bytes, size_t n) {
    for (size_t j = n; stored_bytes == sizeof(uint16_t) && j-- > 0;) {
        uint16_t half;
        memcpy(&half, (const char*)room + sizeof half * j, sizeof half);
        room[j] = bf16_widen(half);
    }
}

// a slice of fp8 or fp4, of an arena of stored parameters on the host
static inline void model_widen_scaled_(float* room, const void* stored, const Tensor* held, int slice) {
    const size_t n = tensor_slice_elements(held);
    const char* arena = (const char*)stored;
    StoredMatrix w = tensor_as_stored(held);
    w.rows = (int)(n / (size_t)held->columns);
    w.data = arena + tensor_stored_place(held, n * (size_t)slice), w.scales = arena + tensor_scales_place(held, slice);
    #pragma omp parallel for
    for (int r = 0; r < w.rows; r++) { stored_row(room + (size_t)r * (size_t)w.columns, &w, r); }
}

// the same of stored parameters, or of a copy of them
static inline const float* model_stored_slice_(Model* m, const void* stored, int i, int k, float* room,
                                               const Device* dev) {
    const int held = model_held_slice(m, i, k), place = model_rank(m) - model_source_rank(m, i, k);
    const int is_source = place >= 0 && place < model_parts(m, i);
    const size_t n = model_part_elements(m, i), bytes = m->held[i].stored_bytes;
    if (is_source && tensor_has_scales(&m->held[i])) {
        model_widen_scaled_(room, stored, &m->held[i], held);
    } else if (is_source) {
        const char* from = (const char*)stored + tensor_stored_place(&m->held[i], n * (size_t)held);
        if (dev) { device_download(room, from, bytes * n, dev); } else { memcpy(room, from, bytes * n); }
        model_widen_(room, bytes, n);
    }
    return model_bring_slice_(m, room, room, i, k);
}

// Where parameters are read from: what learns from an arena of kept parts (NULL: as it is stored), the rest as it is
// stored. Without a device the arena is host memory
typedef struct {
    const float* kept;
    const Device* kept_dev;
    const void* stored;
    const Device* stored_dev;
} ModelSource;

// of a copy of model_source; what is frozen has no master, its stored weights stay as they are on dev
static inline ModelSource model_source_of(const Model* m, const void* copy, const Device* copy_dev, const Device* dev) {
    const ModelSource of_masters = {(const float*)copy, copy_dev, m->w.stored, dev};
    const ModelSource as_stored = {NULL, NULL, copy, copy_dev};
    return m->w.master ? of_masters : as_stored;
}

// of a copy of the average and one of model_source, where what does not learn is as it was then: biases of routers move
static inline ModelSource model_source_of_average(const Model* m, const float* average, const void* copy,
                                                  const Device* copy_dev, const Device* dev) {
    ModelSource from = model_source_of(m, copy, copy_dev, dev);
    from.kept = average, from.kept_dev = copy_dev;
    return from;
}

// Slice k of row i: on rank 0 floats, in `room` or where they are, on the others NULL. All ranks call
static inline const float* model_any_slice(Model* m, const ModelSource* from, int i, int k, float* room) {
    const int learns = from->kept && !slice_is_frozen(m->frozen, tensors_slices(m->table, i) + k);
    return learns ? model_slice(m, from->kept, i, k, room, from->kept_dev)
                  : model_stored_slice_(m, from->stored, i, k, room, from->stored_dev);
}

// All parameters as floats on the host of rank 0; NULL on the others; all ranks call
static inline float* model_collect_(Model* m, ModelSource from) {
    float* whole = model_rank(m) > 0 ? NULL : (float*)arena_alloc(sizeof(float) * m->n, "parameters on the host");
    float* room = (float*)malloc_check(sizeof(float) * model_largest_slice(m, m->n_saved), "a slice of a tensor");
    for (int i = 0; i < m->n_saved; i++) {
        const size_t n = tensor_slice_elements(&m->table[i]);
        for (int k = 0, n_slices = tensor_slices(&m->table[i]); k < n_slices; k++) {
            const float* x = model_any_slice(m, &from, i, k, room);
            if (x) { memcpy(whole + m->table[i].offset + n * (size_t)k, x, sizeof(float) * n); }
        }
    }
    free(room);
    return whole;
}

// The parameters from a copy of model_source: floats on the host of rank 0, NULL on the others. Where the copy is just
// that, it comes back itself. What ranks have in parts is collected, for which all call; what is frozen has no master,
// its stored weights stay as they are on dev. copy_dev NULL: the copy is in host memory
static inline const float* model_whole(Model* m, const void* copy, const Device* copy_dev, const Device* dev) {
    if (model_rank(m) > 0 && !model_is_in_parts(m)) { return NULL; }
    if (!m->w.master && m->saved_is_float && !model_is_divided(m)) { return (const float*)copy; }
    return model_collect_(m, model_source_of(m, copy, copy_dev, dev));
}

// The average from a copy of it and one of model_source, with what is frozen as it is stored: floats on the host of
// rank 0, which arena_free frees; NULL on the others. All ranks call
static inline float* model_whole_average(Model* m, const float* average, const void* copy, const Device* copy_dev,
                                         const Device* dev) {
    return model_collect_(m, model_source_of_average(m, average, copy, copy_dev, dev));
}

static inline void model_whole_free(const Model* m, const float* whole, const void* copy) {
    if (whole != copy) { arena_free((void*)whole, sizeof(float) * m->n); }
}

// The same, of now, which model_whole_free(m, whole, model_source(m)) frees; all ranks call
static inline const float* model_download(Model* m, const Device* dev) {
    if (DEVICE_IS_SHARED || model_is_in_parts(m)) { return model_whole(m, model_source(m), dev, dev); }
    const size_t n_bytes = model_source_bytes(m);
    void* copy = arena_alloc(n_bytes, "parameters on the host");
    device_download(copy, model_source(m), n_bytes, dev);
    const float* whole = model_whole(m, copy, NULL, dev);
    if (whole != copy) { arena_free(copy, n_bytes); }
    return whole;
}
#endif  // LLMC_MODEL_COLLECT_H
