/*
The tensor table against safetensors: every parameter, gradient or moment under its name and shape on disk.
    tensors_save, tensors_load     a whole file; tensors_declare and tensors_put are its two halves, for files that hold more;
                                   tensor_put_slice and tensor_load_slice are one step of them
In memory a slice is (rows, columns); on disk it may be turned (GPT-2's Conv1D) and lacks the padding rows.
Loading accepts F32, F16 and BF16, and names with or without the leading "transformer."
Errors: fail_input names the file, the tensor and both shapes; fail_run names path and errno text when writing fails.
*/
#ifndef LLMC_TENSORFILE_H
#define LLMC_TENSORFILE_H
#include "log.h"          // progress
#include "safetensors.h"  // SafeFile, SafeWriter
#include "tensor.h"       // Tensor, tensor_slice_name

enum { NAME_BYTES = 256 };

// ---- one slice of a tensor between memory (rows, columns) and disk (possibly turned, without padding rows) ----

static inline void transpose(float* out, const float* in, int rows, int columns) {
    const int block = 32;  // both sides stay in the first cache
    for (int r0 = 0; r0 < rows; r0 += block) {
        for (int c0 = 0; c0 < columns; c0 += block) {
            for (int i = 0; i < block * block; i++) {
                int r = r0 + i / block, c = c0 + i % block;
                if (r < rows && c < columns) { out[(size_t)c * rows + r] = in[(size_t)r * columns + c]; }
            }
        }
    }
}

// shape on disk; returns the number of dimensions
static inline int tensor_disk_shape(const Tensor* t, int64_t shape[2]) {
    int turned = t->on_disk == TRANSPOSED;
    shape[turned] = t->disk_rows;
    shape[!turned] = t->columns;
    if (t->on_disk != VECTOR) { return 2; }
    shape[0] = t->columns;
    return 1;
}

// elements of the largest slice that has to be turned
static inline size_t largest_transposed_(const Tensor* table, int n) {
    size_t largest = 0;
    for (int i = 0; i < n; i++) {
        size_t n_elements = table[i].on_disk == TRANSPOSED ? tensor_disk_elements(&table[i]) : 0;
        largest = n_elements > largest ? n_elements : largest;
    }
    return largest;
}

// ---- writing: declare every tensor of the table, later put every tensor of an arena ----

static inline void tensors_declare(SafeWriter* w, const Tensor* table, int n, const char* prefix) {
    for (int i = 0; i < n; i++) {
        for (int l = 0; l < tensor_slices(&table[i]); l++) {
            char name[NAME_BYTES], prefixed[2 * NAME_BYTES];
            int64_t shape[2];
            int n_dims = tensor_disk_shape(&table[i], shape);
            snprintf(prefixed, sizeof prefixed, "%s%s", prefix, tensor_slice_name(name, sizeof name, &table[i], l));
            safewriter_declare(w, prefixed, DTYPE_F32, n_dims, shape);
        }
    }
}

// room to turn any slice of the table
static inline float* tensors_turning_room(const Tensor* table, int n) {
    return (float*)malloc_check(sizeof(float) * largest_transposed_(table, n), "buffer of a tensor");
}

// turned: from tensors_turning_room
static inline void tensor_put_slice(SafeWriter* w, const Tensor* t, const float* slice, float* turned) {
    if (t->on_disk == TRANSPOSED) {
        transpose(turned, slice, t->disk_rows, t->columns);
        slice = turned;
    }
    safewriter_put(w, slice, sizeof(float) * tensor_disk_elements(t));
}

static inline void tensors_put(SafeWriter* w, const Tensor* table, int n, const float* arena) {
    float* turned = tensors_turning_room(table, n);
    for (int i = 0; i < n; i++) {
        const float* first = arena + table[i].offset;
        for (int l = 0; l < tensor_slices(&table[i]); l++) {
            tensor_put_slice(w, &table[i], first + l * tensor_slice_elements(&table[i]), turned);
        }
    }
    free(turned);
}

// one file with one arena for each prefix
static inline FileSum tensors_save(const char* path, const Tensor* table, int n, const char* const* prefixes, const float* const* arenas,
                                int n_arenas) {
    SafeWriter w;
    safewriter_init(&w);
    safewriter_meta(&w, "format", "pt");  // transformers asks for it
    for (int i = 0; i < n_arenas; i++) { tensors_declare(&w, table, n, prefixes[i]); }
    safewriter_open(&w, path);
    for (int i = 0; i < n_arenas; i++) { tensors_put(&w, table, n, arenas[i]); }
    return safewriter_close(&w);
}

// ---- reading ----

// a tensor by its full name, or by what follows the base model's name ("transformer.")
static inline const SafeTensor* find_tensor_(const SafeFile* f, const char* prefix, const char* name) {
    char full[2 * NAME_BYTES];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const SafeTensor* found = safetensors_find(f, full);
    const char* dot = strchr(name, '.');
    return found || !dot ? found : safetensors_find(f, dot + 1);
}

static inline void check_shape_(const SafeFile* f, const SafeTensor* found, const Tensor* t) {
    int64_t shape[2], d[2] = {0, 0};
    int n_dims = tensor_disk_shape(t, shape);
    for (int i = 0; i < found->n_dims && i < 2; i++) { d[i] = found->shape[i]; }
    if (found->n_dims == n_dims && d[0] == shape[0] && (n_dims == 1 || d[1] == shape[1])) { return; }
    fail_input("%s: tensor \"%s\": expected %d dimension%s (%lld%s%.0lld), found %d (%lld, %lld): another model than config.json says",
               f->path, found->name, n_dims, n_dims > 1 ? "s" : "", (long long)shape[0], n_dims > 1 ? ", " : "",
               n_dims > 1 ? (long long)shape[1] : 0LL, found->n_dims, (long long)d[0], (long long)d[1]);
}

// layer l of a tensor into `slice`; its padding rows are left as they are
static inline void tensor_load_slice(const SafeFile* f, const Tensor* t, int l, const char* prefix, float* slice, float* turned) {
    char name[NAME_BYTES];
    const SafeTensor* found = find_tensor_(f, prefix, tensor_slice_name(name, sizeof name, t, l));
    if (!found) { fail_input("%s: tensor \"%s%s\" is missing", f->path, prefix, name); }
    if (found->dtype != DTYPE_F32 && found->dtype != DTYPE_F16 && found->dtype != DTYPE_BF16) {
        fail_input("%s: tensor \"%s\": expected F32, F16 or BF16, found %s", f->path, found->name, dtype_name(found->dtype));
    }
    check_shape_(f, found, t);
    safetensors_to_f32(t->on_disk == TRANSPOSED ? turned : slice, found, 0, tensor_disk_elements(t));
    if (t->on_disk == TRANSPOSED) { transpose(slice, turned, t->columns, t->disk_rows); }
}

static inline void tensors_load(const SafeFile* f, const Tensor* table, int n, const char* prefix, float* arena) {
    float* turned = tensors_turning_room(table, n);
    for (int i = 0; i < n; i++) {
        const Tensor* t = &table[i];
        for (int l = 0; l < tensor_slices(t); l++) {
            tensor_load_slice(f, t, l, prefix, arena + t->offset + l * tensor_slice_elements(t), turned);
        }
        progress("loading", i + 1, n);
    }
    free(turned);
}
#endif  // LLMC_TENSORFILE_H
