/*
The tensor table against safetensors: every parameter, gradient or moment under its name and shape on disk.
    tensors_declare, tensors_put   every tensor into a file that may hold more; tensor_put_slice is one step of it
    tensors_load                   every tensor out of a SafeSet; tensor_load_slice is one step of it
    tensors_load_layers            the same into a model with more layers than the file: where each one was
    tensor_is_in                   does a SafeSet have this tensor? For those that a model may or may not come with
    tensors_save_folder            model.safetensors, or shards of at most so many bytes and their index, written last
In memory a slice is (rows, columns); on disk it may be turned (GPT-2's Conv1D) or have one more dimension, and lacks the
padding rows. A file has its
tensors in the order of their names, as Hugging Face's writer lays it out: an export equals, byte by byte, what
save_pretrained writes for the same parameters.
Loading accepts F32, F16 and BF16, and names with or without the leading "transformer."
Errors: fail_input names the file, the tensor and both shapes; fail_run names path and errno text when writing fails.
*/
#ifndef LLMC_TENSORFILE_H
#define LLMC_TENSORFILE_H
#include "../core/print.h"   // progress
#include "../core/tensor.h"  // Tensor, tensor_slice_name
#include "hf_folder.h"       // SafeSet, HF_INDEX
#include "safetensors.h"     // SafeWriter

enum { NAME_BYTES = 256, HF_SHARDS_WRITTEN_MAX = CHECKPOINT_FILES_MAX - 8 };

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
static inline int tensor_disk_shape(const Tensor* t, int64_t shape[3]) {
    const int n_dims = t->on_disk == VECTOR ? 1 : t->on_disk == CONV ? 3 : 2;
    shape[0] = t->on_disk == VECTOR || t->on_disk == TRANSPOSED ? t->columns : t->disk_rows;
    shape[1] = t->on_disk == TRANSPOSED ? t->disk_rows : t->on_disk == CONV ? 1 : t->columns;
    shape[2] = t->columns;
    return n_dims;
}

// room for the largest slice that has to be turned; some in any case, or gcc would warn of a turn that never comes
static inline float* tensors_turning_room(const Tensor* table, int n) {
    size_t largest = 64;
    for (int i = 0; i < n; i++) {
        size_t n_elements = table[i].on_disk == TRANSPOSED ? tensor_disk_elements(&table[i]) : 0;
        largest = n_elements > largest ? n_elements : largest;
    }
    return (float*)malloc_check(sizeof(float) * largest, "buffer of a tensor");
}

// ---- the slices of a table, sorted by name ----

typedef struct {
    char name[NAME_BYTES];  // on disk
    const Tensor* tensor;
    int layer;
} TensorSlice;

typedef struct {
    TensorSlice* slice;     // on the heap
    int n;
} TensorSlices;

static inline int slice_by_name_(const void* a, const void* b) {
    return strcmp(((const TensorSlice*)a)->name, ((const TensorSlice*)b)->name);
}

static inline TensorSlices tensors_sorted(const Tensor* table, int n) {
    TensorSlices s = {NULL, 0};
    for (int i = 0; i < n; i++) { s.n += tensor_slices(&table[i]); }
    s.slice = (TensorSlice*)malloc_check(sizeof(TensorSlice) * (size_t)s.n, "names of tensors");
    for (int i = 0, k = 0; i < n; i++) {
        for (int l = 0; l < tensor_slices(&table[i]); l++, k++) {
            s.slice[k].tensor = &table[i];
            s.slice[k].layer = l;
            tensor_slice_name(s.slice[k].name, NAME_BYTES, &table[i], l);
        }
    }
    qsort(s.slice, (size_t)s.n, sizeof(TensorSlice), slice_by_name_);
    return s;
}

// ---- writing: declare every tensor of the table, later put every tensor of an arena ----

static inline void slices_declare_(SafeWriter* w, const TensorSlice* slice, int n, const char* prefix) {
    for (int i = 0; i < n; i++) {
        char prefixed[2 * NAME_BYTES];
        int64_t shape[3];
        int n_dims = tensor_disk_shape(slice[i].tensor, shape);
        snprintf(prefixed, sizeof prefixed, "%s%s", prefix, slice[i].name);
        safewriter_declare(w, prefixed, DTYPE_F32, n_dims, shape);
    }
}

// turned: tensors_turning_room
static inline void tensor_put_slice(SafeWriter* w, const Tensor* t, const float* slice, float* turned) {
    if (t->on_disk == TRANSPOSED) {
        transpose(turned, slice, t->disk_rows, t->columns);
        slice = turned;
    }
    safewriter_put(w, slice, sizeof(float) * tensor_disk_elements(t));
}

static inline void slices_put_(SafeWriter* w, const TensorSlice* slice, int n, const float* arena, float* turned) {
    for (int i = 0; i < n; i++) {
        const Tensor* t = slice[i].tensor;
        tensor_put_slice(w, t, arena + t->offset + slice[i].layer * tensor_slice_elements(t), turned);
    }
}

static inline void tensors_declare(SafeWriter* w, const Tensor* table, int n, const char* prefix) {
    TensorSlices s = tensors_sorted(table, n);
    slices_declare_(w, s.slice, s.n, prefix);
    free(s.slice);
}

static inline void tensors_put(SafeWriter* w, const Tensor* table, int n, const float* arena) {
    TensorSlices s = tensors_sorted(table, n);
    float* turned = tensors_turning_room(table, n);
    slices_put_(w, s.slice, s.n, arena, turned);
    free(turned);
    free(s.slice);
}

// ---- writing a model in shards ----

static inline size_t slice_bytes_(const TensorSlice* slice) { return sizeof(float) * tensor_disk_elements(slice->tensor); }

// where the shard ends that begins at slice `first`: as many as fit, at least one
static inline int shard_end_(const TensorSlices* s, int first, size_t shard_bytes) {
    int end = first + 1;
    size_t n_bytes = slice_bytes_(&s->slice[first]);
    while (end < s->n && n_bytes <= shard_bytes && slice_bytes_(&s->slice[end]) <= shard_bytes - n_bytes) {
        n_bytes += slice_bytes_(&s->slice[end++]);
    }
    return end;
}

static inline FileSum index_write_(const char* path, json_t* weight_map, const Tensor* table, int n) {
    size_t n_elements = 0;
    for (int i = 0; i < n; i++) { n_elements += tensor_disk_elements(&table[i]) * (size_t)tensor_slices(&table[i]); }
    return json_write(path, json_pack("{s:{s:I, s:I}, s:o}", "metadata", "total_parameters", (json_int_t)n_elements, "total_size",
                                      (json_int_t)(sizeof(float) * n_elements), "weight_map", weight_map));
}

// Hugging Face's layout: one file when shard_bytes are enough, else shards of at most that (or one tensor) and their index
static inline void tensors_save_folder(const char* folder, const Tensor* table, int n, const float* arena, size_t shard_bytes,
                                       SavedFiles* files) {
    TensorSlices s = tensors_sorted(table, n);
    float* turned = tensors_turning_room(table, n);
    json_t* weight_map = json_object();
    int n_shards = 0, shard = 0;
    for (int first = 0; first < s.n; first = shard_end_(&s, first, shard_bytes)) { n_shards++; }
    if (n_shards > HF_SHARDS_WRITTEN_MAX) {
        fail_input("%s: files of at most %s would be %d shards: at most %d, give a larger limit", folder,
                   format_bytes((double)shard_bytes).s, n_shards, HF_SHARDS_WRITTEN_MAX);
    }
    for (int first = 0, end; first < s.n; first = end) {
        char name[64] = HF_WEIGHTS, path[PATH_BYTES];
        SafeWriter w;
        end = shard_end_(&s, first, shard_bytes);
        if (n_shards > 1) { snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", ++shard, n_shards); }
        for (int i = first; i < end; i++) { json_object_set_new(weight_map, s.slice[i].name, json_string(name)); }
        safewriter_init(&w);
        safewriter_meta(&w, "format", "pt");
        slices_declare_(&w, s.slice + first, end - first, "");
        safewriter_open(&w, path_join(path, folder, name));
        slices_put_(&w, s.slice + first, end - first, arena, turned);
        saved_files_add(files, safewriter_close(&w));
        progress("writing", end, s.n);
    }
    if (n_shards > 1) {
        char path[PATH_BYTES];
        saved_files_add(files, index_write_(path_join(path, folder, HF_INDEX), weight_map, table, n));  // takes the reference
    } else {
        json_decref(weight_map);
    }
    free(turned);
    free(s.slice);
}

// ---- reading ----

// a tensor by its full name, or by what follows the base model's name ("transformer.")
static inline const SafeTensor* find_tensor_(SafeSet* set, const char* prefix, const char* name) {
    char full[2 * NAME_BYTES];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    const SafeTensor* found = safeset_find(set, full);
    const char* dot = strchr(name, '.');
    return found || !dot ? found : safeset_find(set, dot + 1);
}

// "(257, 32)"
static inline ShortText shape_text_(const int64_t* shape, int n_dims) {
    ShortText out;
    size_t used = 0;
    for (int i = 0; i < n_dims && used < sizeof out.s - 32; i++) {
        used += (size_t)snprintf(out.s + used, sizeof out.s - used, "%s%lld", i > 0 ? ", " : "(", (long long)shape[i]);
    }
    snprintf(out.s + used, sizeof out.s - used, n_dims > 0 ? ")" : "()");
    return out;
}

static inline void check_shape_(const SafeSet* set, const SafeTensor* found, const Tensor* t) {
    int64_t shape[3];
    const int n_dims = tensor_disk_shape(t, shape);
    if (found->n_dims == n_dims && memcmp(found->shape, shape, sizeof shape[0] * (size_t)n_dims) == 0) { return; }
    fail_input("%s: tensor \"%s\": expected %d dimension%s %s, found %d %s: another model than config.json says", set->path,
               found->name, n_dims, n_dims > 1 ? "s" : "", shape_text_(shape, n_dims).s, found->n_dims,
               shape_text_(found->shape, found->n_dims).s);
}

static inline int tensor_is_in(SafeSet* set, const Tensor* t, const char* prefix) {
    char name[NAME_BYTES];
    return find_tensor_(set, prefix, tensor_slice_name(name, sizeof name, t, 0)) != NULL;
}

// layer l of a tensor into `slice`; its padding rows are left as they are
static inline void tensor_load_slice(SafeSet* set, const Tensor* t, int l, const char* prefix, float* slice, float* turned) {
    char name[NAME_BYTES];
    const SafeTensor* found = find_tensor_(set, prefix, tensor_slice_name(name, sizeof name, t, l));
    if (!found) { fail_input("%s: tensor \"%s%s\" is missing: another model than config.json says, or a part of one", set->path, prefix, name); }
    if (found->dtype != DTYPE_F32 && found->dtype != DTYPE_F16 && found->dtype != DTYPE_BF16) {
        fail_input("%s: tensor \"%s\": expected F32, F16 or BF16, found %s", set->path, found->name, dtype_name(found->dtype));
    }
    check_shape_(set, found, t);
    safetensors_to_f32(t->on_disk == TRANSPOSED ? turned : slice, found, 0, tensor_disk_elements(t));
    if (t->on_disk == TRANSPOSED) { transpose(slice, turned, t->columns, t->disk_rows); }
}

// where layer l of the model stands in the file; -1: it is not there
static inline int tensor_old_layer(const Tensor* t, const int* old_layer, int l) {
    return t->layers > 0 && old_layer ? old_layer[l] : l;
}

// old_layer: of each layer of the model the layer that it is in the file, -1 for a new one, which is left as it is; NULL: the
// same
static inline void tensors_load_layers(SafeSet* set, const Tensor* table, int n, const char* prefix, float* arena,
                                       const int* old_layer) {
    float* turned = tensors_turning_room(table, n);
    for (int i = 0; i < n; i++) {
        const Tensor* t = &table[i];
        for (int l = 0; l < tensor_slices(t); l++) {
            const int from = tensor_old_layer(t, old_layer, l);
            float* slice = arena + t->offset + l * tensor_slice_elements(t);
            if (from >= 0) { tensor_load_slice(set, t, from, prefix, slice, turned); }
        }
        progress("loading", i + 1, n);
    }
    free(turned);
}

static inline void tensors_load(SafeSet* set, const Tensor* table, int n, const char* prefix, float* arena) {
    tensors_load_layers(set, table, n, prefix, arena, NULL);
}

// A tied matrix may be stored a second time; then both copies must be the same bytes, or the file is another model's.
static inline void tensors_check_tied(SafeSet* set, const char* copy, const char* original) {
    const SafeTensor *a = safeset_find(set, copy), *b = find_tensor_(set, "", original);
    if (!a || !b) { return; }
    if (a->dtype != b->dtype || a->n_bytes != b->n_bytes || memcmp(a->data, b->data, a->n_bytes) != 0) {
        fail_input("%s: tensor \"%s\" differs from \"%s\", to which config.json ties it: this trainer has one matrix for both",
                   set->path, a->name, b->name);
    }
}
#endif  // LLMC_TENSORFILE_H
