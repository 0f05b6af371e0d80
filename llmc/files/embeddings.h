/*
Where a model puts its inputs, for pictures (dev/tools/plot_embeddings.py): unit vectors of positions with their labels,
beside the unit vectors of the classes.
    embeddings_init, embeddings_add   positions that have a label, until `room` are full
    embeddings_check_out              may they take this name?
    embeddings_write                  a safetensors file: z F32 (n, D), labels I32 (n), prototypes F32 (classes, D)
Errors: fail_run names path and errno text when writing fails.
*/
#ifndef LLMC_EMBEDDINGS_H
#define LLMC_EMBEDDINGS_H
#include "safetensors.h"  // SafeWriter

typedef struct {
    int n, room, D;
    float* z;     // (room, D)
    int* labels;  // (room)
} Embeddings;

static inline void embeddings_init(Embeddings* e, int room, int D) {
    e->n = 0;
    e->room = room;
    e->D = D;
    e->z = (float*)malloc_check(sizeof(float) * (size_t)room * (size_t)D, "embeddings");
    e->labels = (int*)malloc_check(sizeof(int) * (size_t)room, "labels");
}

static inline void embeddings_free(Embeddings* e) {
    free(e->z);
    free(e->labels);
}

// z (N, D), labels (N), negative: none
static inline void embeddings_add(Embeddings* e, const float* z, const int* labels, int N) {
    for (int n = 0; n < N && e->n < e->room; n++) {
        if (labels[n] < 0) { continue; }
        memcpy(e->z + (size_t)e->n * (size_t)e->D, z + (size_t)n * (size_t)e->D, sizeof(float) * (size_t)e->D);
        e->labels[e->n++] = labels[n];
    }
}

// before a run that ends with them
static inline void embeddings_check_out(const char* path) {
    static const char* const names[] = {"z", "labels", "prototypes", NULL};
    safetensors_check_out("embeddings-out", path, "a file of embeddings", names);
}

static inline void embeddings_write(const char* path, const Embeddings* e, const float* prototypes, int classes) {
    SafeWriter out;
    const int64_t z_shape[] = {e->n, e->D}, label_shape[] = {e->n}, prototype_shape[] = {classes, e->D};
    safewriter_init(&out);
    safewriter_declare(&out, "z", DTYPE_F32, 2, z_shape);
    safewriter_declare(&out, "labels", DTYPE_I32, 1, label_shape);
    safewriter_declare(&out, "prototypes", DTYPE_F32, 2, prototype_shape);
    safewriter_open(&out, path);
    safewriter_put(&out, e->z, sizeof(float) * (size_t)e->n * (size_t)e->D);
    safewriter_put(&out, e->labels, sizeof(int) * (size_t)e->n);
    safewriter_put(&out, prototypes, sizeof(float) * (size_t)classes * (size_t)e->D);
    safewriter_close(&out);
}
#endif  // LLMC_EMBEDDINGS_H
