/*
What a trainer must keep besides parameters, moments and RunState, in a file of its own beside them: counters of layers,
states of generators, weights of losses. A safetensors file of named vectors, which the manifest covers as every file of
a checkpoint.
    const Extra extras[] = {{"updates", DTYPE_I32, updates, n_slices}, {"loss_weights", DTYPE_F32, weights, 2}};
    extras_save(path_join(path, folder, "trainer.safetensors"), extras, 2, &files);
    extras_load(path, extras, 2);   fills the arrays: name, type and length must be those that were saved
Errors: fail_input names file and vector, what was expected and what was found; fail_run when writing fails.
*/
#ifndef LLMC_EXTRAS_H
#define LLMC_EXTRAS_H
#include "checkpoint.h"   // SavedFiles
#include "safetensors.h"  // SafeWriter, SafeFile

typedef struct {
    const char* name;
    Dtype dtype;   // DTYPE_I32, DTYPE_F32, DTYPE_I64, ...
    void* values;  // (n), in host memory
    size_t n;
} Extra;

static inline void extras_save(const char* path, const Extra* extras, int n, SavedFiles* files) {
    SafeWriter w;
    safewriter_init(&w);
    for (int i = 0; i < n; i++) {
        const int64_t length = (int64_t)extras[i].n;
        safewriter_declare(&w, extras[i].name, extras[i].dtype, 1, &length);
    }
    safewriter_open(&w, path);
    for (int i = 0; i < n; i++) { safewriter_put(&w, extras[i].values, dtype_size(extras[i].dtype) * extras[i].n); }
    saved_files_add(files, safewriter_close(&w));
}

static inline void extras_load(const char* path, const Extra* extras, int n) {
    SafeFile file;
    safetensors_open(&file, path);
    for (int i = 0; i < n; i++) {
        const Extra* want = &extras[i];
        const SafeTensor* found = safetensors_find(&file, want->name);
        if (!found) {
            fail_input("%s: \"%s\" is missing: saved by another trainer, an older one, or with other options", path,
                       want->name);
        }
        if (found->dtype != want->dtype || found->n_dims != 1 || found->n != want->n) {
            fail_input("%s: \"%s\": expected %s of %zu, found %s of %zu: saved with other options", path, want->name,
                       dtype_name(want->dtype), want->n, dtype_name(found->dtype), found->n);
        }
        memcpy(want->values, found->data, found->n_bytes);
    }
    safetensors_close(&file);
}
#endif  // LLMC_EXTRAS_H
