/*
The input of --probe (doc/files.md): one batch that somebody wants computed, everything visible.
    IN.safetensors   inputs, targets  I32 (B, T), already shifted; a negative target is not counted
What comes out (tasks.h): logits, loss and grad.<name> of every tensor, under its name and shape on disk. Where a model
adds a loss of its own to that of the targets, the latter too, under the name that its trainer gives it.
*/
#ifndef LLMC_PROBE_H
#define LLMC_PROBE_H
#include "../files/safetensors.h"  // SafeFile, safetensors_find
#include "../files/tensorfile.h"   // tensors_declare

typedef struct {
    int B, T, counted;      // counted: targets that are not negative
    int *inputs, *targets;  // (B, T), on the heap
} ProbeBatch;

static inline int* probe_tokens_(const SafeFile* file, const char* name, ProbeBatch* batch, int low, int V) {
    const SafeTensor* t = safetensors_find(file, name);
    if (!t || t->dtype != DTYPE_I32 || t->n_dims != 2 || t->n == 0 || t->n > INT32_MAX) {
        fail_input("%s: expected a tensor \"%s\", I32 of shape (B, T)", file->path, name);
    }
    if (batch->B > 0 && (t->shape[0] != batch->B || t->shape[1] != batch->T)) {
        fail_input("%s: expected targets of the shape of inputs, (%d, %d), found (%lld, %lld)", file->path, batch->B,
                   batch->T, (long long)t->shape[0], (long long)t->shape[1]);
    }
    batch->B = (int)t->shape[0];
    batch->T = (int)t->shape[1];
    int* tokens = (int*)malloc_check(t->n_bytes, "tokens of the probe");
    memcpy(tokens, t->data, t->n_bytes);
    for (size_t i = 0; i < t->n; i++) {
        if (tokens[i] < low || tokens[i] >= V) {
            fail_input("%s: %s[%zu]: expected a token 0..%d%s, found %d", file->path, name, i, V - 1,
                       low < 0 ? " (negative: not counted)" : "", tokens[i]);
        }
    }
    return tokens;
}

// inputs in 0..V-1, targets in 0..classes-1 or negative
static inline void probe_read(ProbeBatch* batch, const char* path, int V, int classes, int max_T) {
    SafeFile file;
    memset(batch, 0, sizeof *batch);
    safetensors_open(&file, path);
    batch->inputs = probe_tokens_(&file, "inputs", batch, 0, V);
    batch->targets = probe_tokens_(&file, "targets", batch, INT_MIN, classes);
    for (int n = 0; n < batch->B * batch->T; n++) { batch->counted += batch->targets[n] >= 0; }
    if (batch->T > max_T) {
        fail_input("%s: expected at most the model's %d positions, found %d", path, max_T, batch->T);
    }
    if (batch->counted == 0) { fail_input("%s: all targets are negative: there is no loss", path); }
    safetensors_close(&file);
}

// The file of the result: logits, loss, the loss named `without_more` unless that is NULL, then the gradients of a
// table come into it, in this order
static inline void probe_open(SafeWriter* out, const char* path, const ProbeBatch* batch, int V,
                              const char* without_more, const Tensor* table, int n) {
    const int64_t logits_shape[] = {batch->B, batch->T, V}, loss_shape[] = {1};
    safewriter_init(out);
    safewriter_declare(out, "logits", DTYPE_F32, 3, logits_shape);
    safewriter_declare(out, "loss", DTYPE_F32, 1, loss_shape);
    if (without_more) { safewriter_declare(out, without_more, DTYPE_F32, 1, loss_shape); }
    tensors_declare(out, table, n, "grad.");
    safewriter_open(out, path);
}

// part: the loss without what the model adds to it; part_name NULL: it has none
static inline void probe_print(const ProbeBatch* batch, float loss, const char* part_name, float part,
                               const char* path) {
    printf("probe: %d rows of %d positions, %d targets counted, loss %.6f", batch->B, batch->T, batch->counted,
           (double)loss);
    if (part_name) { printf(" (%s %.6f)", part_name, (double)part); }
    printf(", written to %s\n", path);
}

static inline void probe_free(ProbeBatch* batch) {
    free(batch->inputs);
    free(batch->targets);
}
#endif  // LLMC_PROBE_H
