/*
Examples: rows with targets of their own, for classification and tagging, where tokens of a text have the next token.
A safetensors file (safetensors.h) of two tensors, as --probe takes it; others beside them are not read:
    inputs    I32 (n, T)   token ids, 0 or more
    targets   I32 (n, T)   class of each position, for classification one class at the last of them; negative: not
              counted
Reading checks everything once: shapes, ids below 2^31 - 1, inputs of 0 or more, at least one counted target.
Cost:   one pass at the speed of memory or disk; nothing is copied.
Errors: as text, without an exit, so that tests and fuzzers call the reader too.
*/
#ifndef LLMC_EXAMPLES_H
#define LLMC_EXAMPLES_H
#include "../files/safetensors.h"  // SafeFile, safetensors_parse_, safetensors_find

typedef struct {
    int64_t n;                     // rows
    int T;                         // positions in each
    const void *inputs, *targets;  // (n, T) int32 in the mapped file, not aligned: read by memcpy
    int vocab_size_needed;         // 1 + largest input
    int classes_needed;            // 1 + largest target
    int64_t n_counted;             // targets that are not negative
} Examples;

enum { EXAMPLES_MAX_T = 1 << 24 };  // as --seq-len

static inline int examples_id_(const void* ids, int64_t i) {
    int32_t id;
    memcpy(&id, (const char*)ids + 4 * i, sizeof id);
    return id;
}

// does the file begin as safetensors do? No text does: the header's length has bytes that are 0
static inline int examples_is_file_(const unsigned char* bytes, size_t n_bytes) {
    uint64_t n_header = 0;
    if (n_bytes < 9) { return 0; }
    memcpy(&n_header, bytes, 8);
    return n_header > 0 && n_header <= n_bytes - 8 && bytes[8] == '{';
}

// the tensor of this name, or NULL with the reason
static inline const SafeTensor* examples_tensor_(const SafeFile* file, const char* name, ErrorText* error) {
    const SafeTensor* t = safetensors_find(file, name);
    if (!t) {
        error_set(error,
                  "expected examples, tensors \"inputs\" and \"targets\", I32 of shape (n, T), found no \"%s\" (a "
                  "model goes to --from)", name);
        return NULL;
    }
    if (t->dtype != DTYPE_I32 || t->n_dims != 2) {
        error_set(error, "tensor \"%s\": expected I32 of shape (n, T), found %s of %d dimension%s", name,
                  dtype_name(t->dtype), t->n_dims, t->n_dims == 1 ? "" : "s");
        return NULL;
    }
    if (t->n == 0 || t->shape[1] > EXAMPLES_MAX_T) {
        error_set(error, "tensor \"%s\": expected 1 row or more of 1..%d positions, found (%lld, %lld)", name,
                  EXAMPLES_MAX_T, (long long)t->shape[0], (long long)t->shape[1]);
        return NULL;
    }
    return t;
}

// 1 + the largest id, where all lie in low..2^31-2; else -1 with the first that does not
static inline int examples_needed_(const SafeTensor* t, int low, ErrorText* error) {
    int largest = -1;
    for (int64_t i = 0; i < (int64_t)t->n; i++) {
        int id = examples_id_(t->data, i);
        if (id < low || id == INT_MAX) {
            error_set(error, "%s[%lld, %lld]: expected an id %s2147483646, found %d", t->name,
                      (long long)(i / t->shape[1]), (long long)(i % t->shape[1]), low < 0 ? "up to " : "0..", id);
            return -1;
        }
        largest = id > largest ? id : largest;
    }
    return largest + 1;
}

static inline int examples_check_(Examples* e, const SafeFile* file, ErrorText* error) {
    const SafeTensor* inputs = examples_tensor_(file, "inputs", error);
    const SafeTensor* targets = inputs ? examples_tensor_(file, "targets", error) : NULL;
    if (!targets) { return 0; }
    if (inputs->shape[0] != targets->shape[0] || inputs->shape[1] != targets->shape[1]) {
        return error_set(error, "expected targets of the shape of inputs, (%lld, %lld), found (%lld, %lld)",
                         (long long)inputs->shape[0], (long long)inputs->shape[1], (long long)targets->shape[0],
                         (long long)targets->shape[1]);
    }
    e->n = inputs->shape[0];
    e->T = (int)inputs->shape[1];
    e->inputs = inputs->data;
    e->targets = targets->data;
    e->vocab_size_needed = examples_needed_(inputs, 0, error);
    if (e->vocab_size_needed < 0) { return 0; }
    e->classes_needed = examples_needed_(targets, INT_MIN, error);
    if (e->classes_needed < 0) { return 0; }
    for (int64_t i = 0; i < e->n * e->T; i++) { e->n_counted += examples_id_(e->targets, i) >= 0; }
    if (e->n_counted == 0) { return error_set(error, "all targets are negative: there is nothing to learn"); }
    return 1;
}

// a file's bytes: 1, or 0 with the reason. The result points into them.
static inline int examples_parse(Examples* e, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    SafeFile file;
    memset(e, 0, sizeof *e);
    if (!safetensors_parse_(&file, bytes, n_bytes, error)) { return 0; }
    int good = examples_check_(e, &file, error);
    safetensors_free_(&file);  // its table; the bytes are the caller's
    return good;
}
#endif  // LLMC_EXAMPLES_H
