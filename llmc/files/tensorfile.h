/*
The tensor table against safetensors: every parameter, gradient or moment under its name and shape on disk.
    tensors_declare, tensors_put   every tensor that may learn into a file that may hold more: gradients;
                                   tensor_put_slice is one step of it
    tensors_load                   every tensor out of a SafeSet; tensor_load_slice is one step of it
    tensors_load_layers            the same into a model with more layers than the file: where each one was
    tensor_is_in                   does a SafeSet have this tensor? For those that a model may or may not come with
    tensor_stored_in               as what its matrices can lie in memory and be, bit for bit, those of a SafeSet
    tensors_save_folder            model.safetensors, or shards of at most so many bytes and their index, written last;
                                   as floats, or as bf16: the nearest, but for tensors that the table stores as F32;
                                   tensors_save_slices: not from an arena, but slice by slice, or as they were read
In memory a slice is (rows, columns); on disk it may be turned (GPT-2's Conv1D), a matrix in which experts are stacked
or woven, or have more dimensions, and lacks the padding rows. Slices of fused experts are one tensor, (E, rows,
columns). A file has its tensors in the order of their names, as Hugging Face's writer lays it out, those of F32 before
those of BF16: an export equals, byte by byte, what save_pretrained writes for the same parameters. Whole numbers
(tensor_whole_numbers) are I64 on disk; I32 is read, too.
Loading accepts F32, F16 and BF16, and names with or without the leading "transformer."; of matrices, fused experts too,
also F8_E4M3 with a scale for each block of 128 x 128, which multiplies: F32, BF16 or F8_E8M0; and I8 of (rows,
columns / 2), two fp4 in a byte, with a scale of F8_E8M0 for each 32 columns of a row. The scales are named
"..._scale_inv" or, in place of ".weight", ".scale". They become floats or, where a sink stores them so, stay as they
are (SliceSink.scaled). Which a tensor is its own type says; config.json is not asked.
Whether a file has experts fused or apart is asked with tensor_is_in.
Cost:   files are read at the rate of disk or memory, in blocks by all threads, and do not count as memory of the
        process; what is bf16 on disk and as it is stored goes there without becoming floats.
Errors: fail_input names the file, the tensor and both shapes; fail_run names path and errno text when writing fails.
*/
#ifndef LLMC_TENSORFILE_H
#define LLMC_TENSORFILE_H
#include "../core/print.h"   // progress
#include "../core/tensor.h"  // Tensor, tensor_slice_name
#include "hf_folder.h"       // SafeSet, HF_INDEX
#include "safetensors.h"     // SafeWriter

enum { NAME_BYTES = 256, HF_SHARDS_WRITTEN_MAX = CHECKPOINT_FILES_MAX - 16 };

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

static inline int tensor_experts_are_(const Tensor* t, ExpertsOnDisk how) {
    return t->experts > 0 && t->experts_on_disk == how;
}

// shape on disk of a slice, of fused experts of all together; returns the number of dimensions
static inline int tensor_disk_shape(const Tensor* t, int64_t shape[SAFETENSORS_MAX_DIMS]) {
    const int rows = t->disk_rows / tensor_names(t), is_turned = t->on_disk == TRANSPOSED;
    int n = 0;
    if (tensor_experts_are_(t, STACKED) || tensor_experts_are_(t, WOVEN)) {
        const int64_t E = t->experts, is_stacked = t->experts_on_disk == STACKED;
        shape[n++] = is_stacked ? E * rows : rows;
        shape[n++] = is_stacked ? t->columns : E * t->columns;
        return n;
    }
    if (tensor_experts_are_(t, FUSED)) { shape[n++] = t->experts; }
    if (t->on_disk != VECTOR) { shape[n++] = is_turned ? t->columns : rows; }
    if (t->on_disk == CONV) { shape[n++] = 1; }
    if (t->dims[0] == 0) { shape[n++] = is_turned ? rows : t->columns; }
    for (int k = 0; k < DISK_DIMS_MAX && t->dims[k] > 0; k++) { shape[n++] = t->dims[k]; }
    return n;
}

// does a slice lie otherwise on disk than in memory?
static inline int tensor_is_turned_(const Tensor* t) {
    return t->on_disk == TRANSPOSED || tensor_experts_are_(t, WOVEN);
}

// A slice as it lies on disk (to_disk), or in memory. Woven experts are turned as one matrix, of which each expert is a
// row
static inline void tensor_turn_(float* out, const float* in, const Tensor* t, int to_disk) {
    const int is_woven = tensor_experts_are_(t, WOVEN);
    const int rows = is_woven ? t->experts : t->disk_rows / tensor_names(t);
    const int columns = is_woven ? t->rows * t->columns : t->columns;
    if (to_disk) { transpose(out, in, rows, columns); }
    else { transpose(out, in, columns, rows); }
}

// room for the largest slice that has to be turned; some in any case, or gcc would warn of a turn that never comes
static inline size_t tensors_turning_bytes(const Tensor* table, int n) {
    size_t largest = 64;
    for (int i = 0; i < n; i++) {
        const size_t n_elements = tensor_is_turned_(&table[i]) ? tensor_disk_elements(&table[i]) : 0;
        largest = n_elements > largest ? n_elements : largest;
    }
    return sizeof(float) * largest;
}

static inline float* tensors_turning_room(const Tensor* table, int n) {
    return (float*)malloc_check(tensors_turning_bytes(table, n), "buffer of a tensor");
}

// ---- the slices of a table, sorted by name ----

typedef struct {
    char name[NAME_BYTES];  // on disk
    const Tensor* tensor;
    int k;                  // number of the slice in its tensor
    Dtype dtype;            // on disk
    // the tensor of another file that it is, byte for byte, or is_scales of it; of fused experts all of it. NULL: it is
    // made from floats, as F32 or BF16
    const SafeTensor* as_read;
    int is_scales;
} TensorSlice;

typedef struct {
    TensorSlice* slice;     // on the heap
    int n;
} TensorSlices;

// those of one name, as fused experts have it, in the order of the table
static inline int slice_by_name_(const void* a, const void* b) {
    const TensorSlice *x = (const TensorSlice*)a, *y = (const TensorSlice*)b;
    const int by_name = strcmp(x->name, y->name);
    return by_name != 0 ? by_name : (x->k > y->k) - (x->k < y->k);
}

// the order of a file: later types first, of which none is narrower, so that all are aligned
static inline int slice_by_place_(const void* a, const void* b) {
    const TensorSlice *x = (const TensorSlice*)a, *y = (const TensorSlice*)b;
    return x->dtype != y->dtype ? (x->dtype > y->dtype ? -1 : 1) : slice_by_name_(a, b);
}

// learning: without tables of whole numbers, which never do
static inline TensorSlices tensors_sorted_(const Tensor* table, int n, int learning) {
    TensorSlices s = {NULL, 0};
    s.slice = (TensorSlice*)malloc_check(sizeof(TensorSlice) * (size_t)tensors_slices(table, n), "names of tensors");
    for (int i = 0; i < n; i++) {
        if (learning && table[i].whole_below > 0) { continue; }
        for (int k = 0, n_slices = tensor_slices(&table[i]); k < n_slices; k++) {
            TensorSlice* slice = &s.slice[s.n++];
            slice->tensor = &table[i];
            slice->k = k;
            slice->dtype = table[i].whole_below > 0 ? DTYPE_I64 : DTYPE_F32;
            slice->as_read = NULL;
            slice->is_scales = 0;
            tensor_slice_name(slice->name, NAME_BYTES, &table[i], k);
        }
    }
    qsort(s.slice, (size_t)s.n, sizeof(TensorSlice), slice_by_name_);
    return s;
}

static inline TensorSlices tensors_sorted(const Tensor* table, int n) { return tensors_sorted_(table, n, 0); }

// ---- writing: declare every tensor of the table, later put every tensor of an arena ----

// so many slices of a list are one tensor on disk
static inline int slice_joined_(const TensorSlice* slice) {
    return slice->as_read ? 1 : tensor_joined(slice->tensor);
}

static inline void slices_declare_(SafeWriter* w, const TensorSlice* slice, int n, const char* prefix) {
    for (int i = 0; i < n; i++) {
        char prefixed[2 * NAME_BYTES];
        int64_t shape[SAFETENSORS_MAX_DIMS];
        if (slice[i].k % slice_joined_(&slice[i]) != 0) { continue; }  // the first has declared it
        int n_dims = tensor_disk_shape(slice[i].tensor, shape);
        if (slice[i].as_read) {
            n_dims = slice[i].as_read->n_dims;
            memcpy(shape, slice[i].as_read->shape, sizeof shape);
        }
        snprintf(prefixed, sizeof prefixed, "%s%s", prefix, slice[i].name);
        safewriter_declare(w, prefixed, slice[i].dtype, n_dims, shape);
    }
}

// how many finite numbers of a model became infinite as bf16
typedef struct {
    size_t n, n_first;       // in all tensors, in the first that has some
    char first[NAME_BYTES];  // its name
} BeyondBf16;

static inline void beyond_note_(BeyondBf16* beyond, size_t n, const char* name) {
    if (n == 0) { return; }
    if (beyond->n == 0) { snprintf(beyond->first, sizeof beyond->first, "%s", name); }
    if (strcmp(beyond->first, name) == 0) { beyond->n_first += n; }
    beyond->n += n;
}

static inline void beyond_say_(const BeyondBf16* beyond) {
    char others[64] = "";
    const size_t n_others = beyond->n - beyond->n_first;
    if (beyond->n == 0) { return; }
    if (n_others > 0) { snprintf(others, sizeof others, ", %zu of other tensors", n_others); }
    warn_line("%zu finite number%s of %s became infinite%s: beyond bf16's largest, 3.39e38; --export-dtype fp32 keeps "
              "them", beyond->n_first, beyond->n_first > 1 ? "s" : "", beyond->first, others);
}

// returns how many are beyond it
static inline size_t put_as_bf16_(SafeWriter* w, const float* x, size_t n) {
    const size_t most = 4096;
    size_t n_beyond = 0;
    uint16_t halves[4096];
    for (size_t at = 0, n_piece; at < n; at += n_piece) {
        n_piece = n - at < most ? n - at : most;
        for (size_t i = 0; i < n_piece; i++) {
            halves[i] = bf16_nearest(x[at + i]);
            n_beyond += (size_t)bf16_is_beyond(x[at + i]);
        }
        safewriter_put(w, halves, sizeof halves[0] * n_piece);
    }
    return n_beyond;
}

static inline void put_as_integers_(SafeWriter* w, const float* x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const int64_t whole = (int64_t)x[i];
        safewriter_put(w, &whole, sizeof whole);
    }
}

// returns put_as_bf16_
static inline size_t tensor_put_slice_as_(SafeWriter* w, const Tensor* t, const float* slice, float* turned,
                                          Dtype dtype) {
    const size_t n = tensor_disk_elements(t);
    if (tensor_is_turned_(t)) {
        tensor_turn_(turned, slice, t, 1);
        slice = turned;
    }
    if (dtype == DTYPE_BF16) { return put_as_bf16_(w, slice, n); }
    if (dtype == DTYPE_I64) { put_as_integers_(w, slice, n); }
    else { safewriter_put(w, slice, sizeof(float) * n); }
    return 0;
}

// turned: tensors_turning_room
static inline void tensor_put_slice(SafeWriter* w, const Tensor* t, const float* slice, float* turned) {
    tensor_put_slice_as_(w, t, slice, turned, DTYPE_F32);
}

// where slices come from: an arena of all, or one after the other from somewhere else
typedef struct {
    const float* (*slice)(void* from, const Tensor* t, int k);
    void* from;
} SliceSource;

static inline const float* slice_of_arena_(void* arena, const Tensor* t, int k) {
    return (const float*)arena + t->offset + (size_t)k * tensor_slice_elements(t);
}

static inline SliceSource slice_source(const float* arena) {
    const SliceSource source = {slice_of_arena_, (void*)arena};
    return source;
}

enum { COPY_PIECE = 8 << 20 };  // bytes

// the pages that were copied are no longer memory of this process
static inline void put_as_read_(SafeWriter* w, const SafeTensor* t, const MappedFile* file) {
    const unsigned char* data = (const unsigned char*)t->data;
    for (size_t at = 0, n; at < t->n_bytes; at += n) {
        n = t->n_bytes - at < (size_t)COPY_PIECE ? t->n_bytes - at : (size_t)COPY_PIECE;
        safewriter_put(w, data + at, n);
        file_behind(file, data + at, n);
    }
}

// set: the files of those that are as they were read; beyond: NULL where none is bf16
static inline void slices_put_(SafeWriter* w, const TensorSlice* slice, int n, SliceSource source, const SafeSet* set,
                               float* turned, BeyondBf16* beyond) {
    for (int i = 0; i < n; i++) {
        if (slice[i].as_read) {
            put_as_read_(w, slice[i].as_read, safeset_file(set, slice[i].as_read));
            continue;
        }
        const float* from = source.slice(source.from, slice[i].tensor, slice[i].k);
        const size_t n_beyond = tensor_put_slice_as_(w, slice[i].tensor, from, turned, slice[i].dtype);
        if (beyond) { beyond_note_(beyond, n_beyond, slice[i].name); }
    }
}

static inline void tensors_declare(SafeWriter* w, const Tensor* table, int n, const char* prefix) {
    TensorSlices s = tensors_sorted_(table, n, 1);
    slices_declare_(w, s.slice, s.n, prefix);
    free(s.slice);
}

static inline void tensors_put(SafeWriter* w, const Tensor* table, int n, const float* arena) {
    TensorSlices s = tensors_sorted_(table, n, 1);
    float* turned = tensors_turning_room(table, n);
    slices_put_(w, s.slice, s.n, slice_source(arena), NULL, turned, NULL);
    free(turned);
    free(s.slice);
}

// ---- writing a model in shards ----

static inline size_t slice_bytes_(const TensorSlice* slice) {
    if (slice->as_read) { return slice->as_read->n_bytes; }
    return dtype_size(slice->dtype) * tensor_disk_elements(slice->tensor);
}

// of the tensor on disk that begins with this slice
static inline size_t joined_bytes_(const TensorSlice* slice) {
    return slice_bytes_(slice) * (size_t)slice_joined_(slice);
}

// where the shard ends that begins at slice `first`: as many tensors as fit, at least one
static inline int shard_end_(const TensorSlices* s, int first, size_t shard_bytes) {
    int end = first + slice_joined_(&s->slice[first]);
    size_t n_bytes = joined_bytes_(&s->slice[first]);
    while (end < s->n && n_bytes <= shard_bytes && joined_bytes_(&s->slice[end]) <= shard_bytes - n_bytes) {
        n_bytes += joined_bytes_(&s->slice[end]);
        end += slice_joined_(&s->slice[end]);
    }
    return end;
}

// parameters, of which scales are none, whatever they take in the file
static inline FileSum index_write_(const char* path, json_t* weight_map, const TensorSlices* s) {
    size_t n_elements = 0, n_bytes = 0;
    for (int i = 0; i < s->n; i++) {
        const TensorSlice* slice = &s->slice[i];
        const int n_slices = slice->is_scales ? 0 : slice->as_read ? tensor_joined(slice->tensor) : 1;
        n_elements += (size_t)n_slices * tensor_disk_elements(slice->tensor);
        n_bytes += slice_bytes_(slice);
    }
    return json_write(path,
                      json_pack("{s:{s:I, s:I}, s:o}", "metadata", "total_parameters", (json_int_t)n_elements,
                                "total_size", (json_int_t)n_bytes, "weight_map", weight_map));
}

// What the table stores as F32 whatever the build stores loses too much as a bf16
static inline void slices_as_bf16_(TensorSlices* s) {
    for (int i = 0; i < s->n; i++) {
        if (s->slice[i].tensor->stored != STORED_F32) { s->slice[i].dtype = DTYPE_BF16; }
    }
}

static inline FileSum tensors_save_from(const char* path, const Tensor* table, int n, SliceSource source) {
    SafeWriter w;
    TensorSlices s = tensors_sorted(table, n);
    float* turned = tensors_turning_room(table, n);
    qsort(s.slice, (size_t)s.n, sizeof(TensorSlice), slice_by_place_);
    safewriter_init(&w);
    safewriter_meta(&w, "format", "pt");
    slices_declare_(&w, s.slice, s.n, "");
    safewriter_open(&w, path);
    slices_put_(&w, s.slice, s.n, source, NULL, turned, NULL);
    free(turned);
    free(s.slice);
    return safewriter_close(&w);
}

static inline FileSum tensors_save(const char* path, const Tensor* table, int n, const float* arena) {
    return tensors_save_from(path, table, n, slice_source(arena));
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

// packed: two elements share a byte
static inline void check_shape_(const SafeSet* set, const SafeTensor* found, const Tensor* t, int packed) {
    int64_t shape[SAFETENSORS_MAX_DIMS] = {0};
    const int n_dims = tensor_disk_shape(t, shape);
    const int is_flat = t->on_disk == CONV && found->n_dims == 2;  // (rows, columns), as some programs write it
    if (packed && shape[n_dims - 1] % FP4_GROUP != 0) {
        fail_input("%s: tensor \"%s\" is I8, two fp4 in a byte: expected columns in groups of %d, config.json says "
                   "%lld", set->path, found->name, FP4_GROUP, (long long)shape[n_dims - 1]);
    }
    if (packed) { shape[n_dims - 1] /= 2; }
    if (is_flat && found->shape[0] == shape[0] && found->shape[1] == shape[2]) { return; }
    if (found->n_dims == n_dims && memcmp(found->shape, shape, sizeof shape[0] * (size_t)n_dims) == 0) { return; }
    fail_input("%s: tensor \"%s\": expected %d dimension%s %s, found %d %s: another model than config.json says",
               set->path, found->name, n_dims, n_dims > 1 ? "s" : "", shape_text_(shape, n_dims).s, found->n_dims,
               shape_text_(found->shape, found->n_dims).s);
}

// is any slice of it in the file? Then all must be: who loads it says which is missing
static inline int tensor_is_in(SafeSet* set, const Tensor* t, const char* prefix) {
    char name[NAME_BYTES];
    int found = 0;
    for (int k = 0, n = tensor_slices(t); k < n && !found; k++) {
        found = find_tensor_(set, prefix, tensor_slice_name(name, sizeof name, t, k)) != NULL;
    }
    return found;
}

// files may have it in fp8 or fp4: a matrix, or one of each expert, as it lies in memory
static inline int tensor_takes_scales_(const Tensor* t) {
    return t->on_disk == AS_IS && t->dims[0] == 0 && (t->experts == 0 || tensor_experts_are_slices(t));
}

// as what a file has it: FP8 or FP4, with scales, or anything else
static inline Stored dtype_scaled_(Dtype dtype) {
    return dtype == DTYPE_F8_E4M3 ? STORED_FP8 : dtype == DTYPE_I8 ? STORED_FP4 : STORED_BY_BUILD;
}
static inline Stored scaled_as_(const Tensor* t, const SafeTensor* found) {
    return tensor_takes_scales_(t) ? dtype_scaled_(found->dtype) : STORED_BY_BUILD;
}

// As what the slices of a matrix lie in memory without a digit lost: fp8, fp4 or bf16, if all of them are that in the
// file, else as floats
static inline Stored tensor_stored_in(SafeSet* set, const Tensor* t, const char* prefix) {
    char name[NAME_BYTES];
    Dtype dtype = DTYPE_F32;
    for (int k = 0, n = tensor_slices(t); k < n; k++) {
        const SafeTensor* found = find_tensor_(set, prefix, tensor_slice_name(name, sizeof name, t, k));
        if (!found || (k > 0 && found->dtype != dtype)) { return STORED_BY_BUILD; }
        dtype = found->dtype;
    }
    const Stored scaled = tensor_takes_scales_(t) ? dtype_scaled_(dtype) : STORED_BY_BUILD;
    if (scaled == STORED_FP4 && t->columns % FP4_GROUP != 0) { return STORED_BY_BUILD; }  // who reads it says so
    return dtype == DTYPE_BF16 ? STORED_BF16 : scaled;
}

// ---- scales: their names, and that none is alone ----

enum { SCALE_NAMES = 2 };

// what files call the scales of a tensor: "W.weight_scale_inv" or "W.scale"
static inline const char* scale_name(char name[2 * NAME_BYTES], const char* of, int form) {
    const int n = (int)strlen(of) - (ends_with(of, ".weight") ? 7 : 0);
    if (form == 0) { snprintf(name, 2 * NAME_BYTES, "%s_scale_inv", of); }
    else { snprintf(name, 2 * NAME_BYTES, "%.*s.scale", n, of); }
    return name;
}

// The name of what has this tensor as its scales; NULL: it is none. A parameter may be called "scale" too, but none is
// F8_E8M0
static inline const char* scale_owner_(char name[2 * NAME_BYTES], const SafeSet* set, const SafeTensor* scales) {
    const char* const ends[SCALE_NAMES] = {"_scale_inv", ".scale"};
    const int n = (int)strlen(scales->name);
    if (ends_with(scales->name, ends[0])) {
        snprintf(name, 2 * NAME_BYTES, "%.*s", n - (int)strlen(ends[0]), scales->name);
        return name;
    }
    if (!ends_with(scales->name, ends[1]) || scales->dtype != DTYPE_F8_E8M0) { return NULL; }
    const int n_module = n - (int)strlen(ends[1]);
    snprintf(name, 2 * NAME_BYTES, "%.*s", n_module, scales->name);
    if (!safeset_look(set, name)) { snprintf(name, 2 * NAME_BYTES, "%.*s.weight", n_module, scales->name); }
    return name;
}

// scales without what they multiply are of a file that lacks something, or has it twice
static inline void check_scales_(const SafeSet* set) {
    char name[2 * NAME_BYTES];
    for (int i = 0; i < set->n_tensors; i++) {
        const SafeTensor* scales = set->by_name[i];
        if (!scale_owner_(name, set, scales)) { continue; }
        const SafeTensor* owner = safeset_look(set, name);
        if (!owner) {
            fail_input("%s: tensor \"%s\" has the scales of \"%s\", which is missing", set->path, scales->name, name);
        }
        if (dtype_scaled_(owner->dtype) == STORED_BY_BUILD) {
            fail_input("%s: tensor \"%s\": expected F8_E4M3 or I8, for \"%s\" has scales of it, found %s", set->path,
                       name, scales->name, dtype_name(owner->dtype));
        }
    }
}

// Their shape: of fp8 (rows, columns) or (E, rows, columns) one for each block of 128 x 128 of each matrix; of fp4, of
// which two share a byte, one for each 32 columns
static inline void scales_shape_(int64_t shape[SAFETENSORS_MAX_DIMS], const SafeTensor* t, Stored kind) {
    for (int i = 0; i < t->n_dims; i++) {
        const int block = i < t->n_dims - 2 ? 1 : FP8_BLOCK;
        shape[i] = kind == STORED_FP8 ? (t->shape[i] + block - 1) / block : t->shape[i];
    }
    if (kind == STORED_FP4) { shape[t->n_dims - 1] /= FP4_GROUP / 2; }
}

// the scales of a tensor in fp8 or fp4
static inline const SafeTensor* find_scales_(SafeSet* set, const SafeTensor* t, Stored kind) {
    char names[SCALE_NAMES][2 * NAME_BYTES];
    int64_t shape[SAFETENSORS_MAX_DIMS] = {0};
    const SafeTensor* found = NULL;
    for (int i = 0; i < SCALE_NAMES; i++) {
        const SafeTensor* scales = safeset_find(set, scale_name(names[i], t->name, i));
        if (found && scales) {
            fail_input("%s: tensor \"%s\": expected scales \"%s\" or \"%s\", found both: remove those that are not its",
                       set->path, t->name, found->name, scales->name);
        }
        found = found ? found : scales;
    }
    if (!found) {
        fail_input("%s: tensor \"%s\" is %s and has no scales \"%s\" or \"%s\"", set->path, t->name,
                   dtype_name(t->dtype), names[0], names[1]);
    }
    scales_shape_(shape, t, kind);
    const size_t n_bytes = sizeof shape[0] * (size_t)t->n_dims;
    const int fits = found->n_dims == t->n_dims && memcmp(found->shape, shape, n_bytes) == 0;
    const int is_float = found->dtype == DTYPE_F32 || found->dtype == DTYPE_BF16;
    if (!fits || (found->dtype != DTYPE_F8_E8M0 && (kind == STORED_FP4 || !is_float))) {
        fail_input("%s: tensor \"%s\": expected scales of %s %s, found %s %s", set->path, found->name,
                   kind == STORED_FP4 ? "32 columns of a row, F8_E8M0" : "blocks of 128 x 128, F32, BF16 or F8_E8M0",
                   shape_text_(shape, t->n_dims).s, dtype_name(found->dtype),
                   shape_text_(found->shape, found->n_dims).s);
    }
    return found;
}

// of a tensor of fused experts the part that is slice k, as if it were one by itself; any other is its slice
static inline SafeTensor slice_of_tensor_(const SafeTensor* found, const Tensor* t, int k) {
    const size_t n_joined = (size_t)tensor_joined(t);
    SafeTensor slice = *found;
    slice.n /= n_joined, slice.n_bytes /= n_joined;
    slice.data = (const unsigned char*)found->data + slice.n_bytes * ((size_t)k % n_joined);
    return slice;
}

// slice k of a tensor in the file: it is there, of a type that can be read and of this shape
static inline SafeTensor find_slice_(SafeSet* set, const Tensor* t, int k, const char* prefix) {
    char name[NAME_BYTES];
    const SafeTensor* found = find_tensor_(set, prefix, tensor_slice_name(name, sizeof name, t, k));
    if (!found) {
        fail_input("%s: tensor \"%s%s\" is missing: another model than config.json says, or a part of one", set->path,
                   prefix, name);
    }
    const Stored kind = scaled_as_(t, found);
    const int is_float = found->dtype == DTYPE_F32 || found->dtype == DTYPE_F16 || found->dtype == DTYPE_BF16;
    if (t->whole_below > 0 && found->dtype != DTYPE_I64 && found->dtype != DTYPE_I32) {
        fail_input("%s: tensor \"%s\": expected I64 or I32, found %s", set->path, found->name,
                   dtype_name(found->dtype));
    }
    if (t->whole_below == 0 && !is_float && kind == STORED_BY_BUILD) {
        fail_input("%s: tensor \"%s\": expected F32, F16 or BF16, found %s", set->path, found->name,
                   dtype_name(found->dtype));
    }
    check_shape_(set, found, t, kind == STORED_FP4);
    if (kind != STORED_BY_BUILD) { find_scales_(set, found, kind); }  // on ranks that do not read the slice, too
    return slice_of_tensor_(found, t, k);
}

enum { READ_BLOCK = 1 << 18, READ_PART = 8 << 20, READ_AHEAD = 32 << 20 };  // bytes of a file

// out[0 .. n) = the nearest bf16 of elements first .. first+n of a tensor
static inline void to_bf16_(uint16_t* out, const SafeTensor* t, size_t first, size_t n) {
    const size_t most = 4096;
    float x[4096];
    if (t->dtype == DTYPE_BF16) {
        memcpy(out, (const unsigned char*)t->data + sizeof *out * first, sizeof *out * n);
        return;
    }
    for (size_t at = 0, n_piece; at < n; at += n_piece) {
        n_piece = n - at < most ? n - at : most;
        safetensors_to_f32(x, t, first + at, n_piece);
        for (size_t i = 0; i < n_piece; i++) { out[at + i] = bf16_nearest(x[i]); }
    }
}

// Elements first .. first+n of a tensor, in blocks by all threads: as floats or, where there are halves, as those. The
// disk brings what follows meanwhile
static inline void tensor_read_part_(const MappedFile* file, const SafeTensor* t, size_t first, size_t n, float* floats,
                                     uint16_t* halves) {
    const size_t width = dtype_size(t->dtype), most = READ_BLOCK / width;
    const unsigned char* data = (const unsigned char*)t->data;
    const int64_t n_blocks = (int64_t)((n + most - 1) / most);
    if (n_blocks > 1) { file_ahead(file, data + width * first + READ_AHEAD, width * n); }
    #pragma omp parallel for if (n_blocks > 1)
    for (int64_t b = 0; b < n_blocks; b++) {
        const size_t at = first + (size_t)b * most, left = first + n - at, n_block = left < most ? left : most;
        if (n_blocks > 1) { file_here(file, data + width * at, width * n_block); }
        if (halves) { to_bf16_(halves + (at - first), t, at, n_block); }
        else { safetensors_to_f32(floats + (at - first), t, at, n_block); }
    }
}

// elements first .. end of a tensor
static inline void tensor_read_(SafeSet* set, const SafeTensor* t, size_t first, size_t end, float* floats,
                                uint16_t* halves) {
    const MappedFile* file = safeset_file(set, t);
    const size_t width = dtype_size(t->dtype), most = READ_PART / width;
    for (size_t at = first, n; at < end; at += n) {
        n = end - at < most ? end - at : most;
        tensor_read_part_(file, t, at, n, floats ? floats + (at - first) : NULL, halves ? halves + (at - first) : NULL);
        safeset_was_read(set, file, (const unsigned char*)t->data + width * at, width * n);
    }
}

// of a window the rows that a file has; those behind are padding
static inline int window_rows_(const TensorWindow* w, size_t rows) {
    const int left = (int)rows - w->row;
    return left < 0 ? 0 : left < w->n_rows ? left : w->n_rows;
}

// rows of a file that are read at once, and fetched
static inline int rows_at_once_(size_t row_bytes) { return row_bytes < READ_PART ? (int)(READ_PART / row_bytes) : 1; }

static inline void fetch_rows_(const MappedFile* file, const unsigned char* from, size_t n_bytes) {
    if (n_bytes <= READ_BLOCK) { return; }
    file_ahead(file, from + READ_AHEAD, n_bytes);
    file_here(file, from, n_bytes);
}

// some columns of n_rows rows of a tensor, by all threads
static inline void read_columns_(SafeSet* set, const SafeTensor* t, size_t C, const TensorWindow* w, int n_rows,
                                 uint16_t* halves) {
    const MappedFile* file = safeset_file(set, t);
    const size_t row_bytes = dtype_size(t->dtype) * C, width = (size_t)w->n_columns;
    const int most = rows_at_once_(row_bytes), end = w->row + n_rows;
    for (int first = w->row, n; first < end; first += n) {
        n = end - first < most ? end - first : most;
        const unsigned char* from = (const unsigned char*)t->data + row_bytes * (size_t)first;
        fetch_rows_(file, from, row_bytes * (size_t)n);
        #pragma omp parallel for if (row_bytes * (size_t)n > READ_BLOCK)
        for (int r = first; r < first + n; r++) {
            to_bf16_(halves + width * (size_t)(r - w->row), t, C * (size_t)r + (size_t)w->column, width);
        }
        safeset_was_read(set, file, from, row_bytes * (size_t)n);
    }
}

// a part of a slice as bf16; its padding rows are left as they are
static inline void read_halves_(SafeSet* set, const Tensor* t, const SafeTensor* found, const TensorPart* part,
                                uint16_t* halves) {
    const size_t C = t->on_disk == VECTOR ? 1 : (size_t)t->columns, n_read = set->n_read;
    for (int k = 0; k < part->n; k++) {
        const TensorWindow* w = &part->of[k];
        const int n_rows = window_rows_(w, found->n / C);
        const size_t first = C * (size_t)w->row;
        if ((size_t)w->n_columns < C) { read_columns_(set, found, C, w, n_rows, halves); }
        else { tensor_read_(set, found, first, first + C * (size_t)n_rows, NULL, halves); }
        halves += (size_t)w->n_rows * (size_t)w->n_columns;
    }
    safeset_passes_over(set, found->n_bytes - (set->n_read - n_read));
}

// ---- fp8 and fp4 ----

// those of slice k among the scales of a tensor, as they lie in the file
static inline SafeTensor scales_of_slice_(SafeSet* set, const Tensor* t, int k, const SafeTensor* found, Stored kind) {
    SafeTensor scales = *find_scales_(set, found, kind);
    const size_t n_joined = (size_t)tensor_joined(t);
    scales.n /= n_joined, scales.n_bytes /= n_joined;
    scales.data = (const unsigned char*)scales.data + scales.n_bytes * ((size_t)k % n_joined);
    return scales;
}

// of slice k in fp8, as floats
static inline void read_scales_(float* out, SafeSet* set, const Tensor* t, int k, const SafeTensor* found) {
    const SafeTensor scales = scales_of_slice_(set, t, k, found, STORED_FP8);
    const uint8_t* exponents = (const uint8_t*)scales.data;  // of F8_E8M0, which has no mantissa
    if (scales.dtype != DTYPE_F8_E8M0) { safetensors_to_f32(out, &scales, 0, scales.n); }
    for (size_t i = 0; i < scales.n; i++) {
        if (scales.dtype == DTYPE_F8_E8M0) { out[i] = e8m0_widen(exponents[i]); }
        if (!isfinite(out[i])) {
            fail_input("%s: tensor \"%s\": expected finite scales, found %g", set->path, scales.name, (double)out[i]);
        }
    }
    safeset_was_read(set, safeset_file(set, &scales), scales.data, scales.n_bytes);
}

// of slice k in fp4, as they are
static inline void read_exponents_(uint8_t* out, SafeSet* set, const Tensor* t, int k, const SafeTensor* found) {
    const SafeTensor scales = scales_of_slice_(set, t, k, found, STORED_FP4);
    memcpy(out, scales.data, scales.n_bytes);
    for (size_t i = 0; i < scales.n; i++) {
        if (out[i] <= FP4_LARGEST_SCALE) { continue; }
        fail_input("%s: tensor \"%s\": expected scales of at most 2^%d, with which all fp4 are floats, found %g",
                   set->path, scales.name, FP4_LARGEST_SCALE - 127, (double)e8m0_widen(out[i]));
    }
    safeset_was_read(set, safeset_file(set, &scales), scales.data, scales.n_bytes);
}

// Of rows first .. first + n of a matrix of e4m3 what a window has, to where that begins, by all threads: as bytes or,
// each a number times the scale of its block, as floats. Returns how many bytes are no number
static inline size_t read_fp8_rows_(uint8_t* bytes, float* floats, const unsigned char* data, const float* scales,
                                    const TensorWindow* w, int first, int n, int columns) {
    const size_t width = (size_t)w->n_columns;
    size_t n_bad = 0;
    #pragma omp parallel for if ((size_t)n * width > READ_BLOCK) reduction(+ : n_bad)
    for (int r = first; r < first + n; r++) {
        const unsigned char* from = data + (size_t)r * (size_t)columns + w->column;
        const size_t at = (size_t)(r - w->row) * width;
        const float* of_row = scales + (size_t)(r / FP8_BLOCK) * (size_t)fp8_blocks(columns);
        for (size_t c = 0; c < width; c++) { n_bad += (from[c] & 0x7f) == 0x7f; }
        for (int c = 0; floats && c < w->n_columns; c++) {
            floats[at + (size_t)c] = fp8_widen(from[c]) * of_row[(w->column + c) / FP8_BLOCK];
        }
        if (bytes) { memcpy(bytes + at, from, width); }
    }
    return n_bad;
}

// the same of e2m1, of which all are numbers; windows are cut between groups
static inline void read_fp4_rows_(uint8_t* bytes, float* floats, const unsigned char* data, const uint8_t* exponents,
                                  const TensorWindow* w, int first, int n, int columns) {
    const size_t width = (size_t)w->n_columns;
    #pragma omp parallel for if ((size_t)n * width > READ_BLOCK)
    for (int r = first; r < first + n; r++) {
        const size_t begin = (size_t)r * (size_t)columns + (size_t)w->column, to = (size_t)(r - w->row) * width;
        if (bytes) { memcpy(bytes + to / 2, data + begin / 2, width / 2); }
        for (size_t at = 0; floats && at < width; at += FP4_GROUP) {
            const float scale = e8m0_widen(exponents[(begin + at) / FP4_GROUP]);
            float weight[16];  // that a code can be
            for (int code = 0; code < 16; code++) { weight[code] = fp4_widen(code) * scale; }
            for (int c = 0; c < FP4_GROUP; c++) { floats[to + at + c] = weight[fp4_code(data + (begin + at) / 2, c)]; }
        }
    }
}

// What a window has of a tensor, whose `scales` are here, into `bytes` or `floats`: the other is NULL. Returns how many
// bytes are no number; padding rows are left as they are
static inline size_t read_window_(SafeSet* set, const Tensor* t, const SafeTensor* found, const void* scales,
                                  const TensorWindow* w, uint8_t* bytes, float* floats) {
    const MappedFile* file = safeset_file(set, found);
    const unsigned char* data = (const unsigned char*)found->data;
    const size_t row_bytes = (size_t)found->shape[found->n_dims - 1];
    const int most = rows_at_once_(row_bytes), end = w->row + window_rows_(w, found->n_bytes / row_bytes);
    size_t n_bad = 0;
    for (int first = w->row, n; first < end; first += n) {
        n = end - first < most ? end - first : most;
        const unsigned char* from = data + row_bytes * (size_t)first;
        fetch_rows_(file, from, row_bytes * (size_t)n);
        if (scaled_as_(t, found) == STORED_FP4) {
            read_fp4_rows_(bytes, floats, data, (const uint8_t*)scales, w, first, n, t->columns);
        } else {
            n_bad += read_fp8_rows_(bytes, floats, data, (const float*)scales, w, first, n, t->columns);
        }
        safeset_was_read(set, file, from, row_bytes * (size_t)n);
    }
    return n_bad;
}

// Slice k, whole, as floats, or a part of it as bytes, whose padding rows are zero. `scales`: room for those of all
static inline void read_scaled_(SafeSet* set, const Tensor* t, int k, const SafeTensor* found, const TensorPart* part,
                                uint8_t* bytes, void* scales, float* floats) {
    const Stored kind = scaled_as_(t, found);
    const size_t n_read = set->n_read, of_scales = scales_of_slice_(set, t, k, found, kind).n_bytes;
    size_t n_bad = 0;
    if (kind == STORED_FP4) { read_exponents_((uint8_t*)scales, set, t, k, found); }
    else { read_scales_((float*)scales, set, t, k, found); }
    for (int j = 0; j < part->n; j++) {
        const TensorWindow* w = &part->of[j];
        const size_t n = stored_bytes(kind, (size_t)w->n_rows * (size_t)w->n_columns);
        const size_t there = (size_t)window_rows_(w, (size_t)found->shape[found->n_dims - 2]);
        const size_t n_there = stored_bytes(kind, there * (size_t)w->n_columns);
        n_bad += read_window_(set, t, found, scales, w, bytes, floats);
        if (bytes) { memset(bytes + n_there, 0, n - n_there); }
        bytes = bytes ? bytes + n : NULL;
    }
    safeset_passes_over(set, found->n_bytes + of_scales - (set->n_read - n_read));
    if (n_bad > 0) {
        fail_input("%s: tensor \"%s\": expected numbers of e4m3, found %zu bytes that are NaN", set->path, found->name,
                   n_bad);
    }
}

// a scale of fp8 times FP8_UNIT must be a float
static inline void check_large_scales_(SafeSet* set, const Tensor* t, const SafeTensor* found, const float* scales) {
    for (size_t i = 0; i < tensor_scales(t); i++) {
        if (fabsf(scales[i]) <= FP8_LARGEST_SCALE) { continue; }
        fail_input("%s: tensor \"%s\": expected scales of at most %g for --weights fp8, found %g: --weights fp32 has "
                   "room for it", set->path, find_scales_(set, found, STORED_FP8)->name, (double)FP8_LARGEST_SCALE,
                   (double)scales[i]);
    }
}

// The same, a part of it, to where it is stored as the file has it; padding rows are zero
static inline void read_as_it_is_(SafeSet* set, const Tensor* t, int k, const SafeTensor* found, const TensorPart* part,
                                  uint8_t* bytes, void* scales) {
    const Stored kind = scaled_as_(t, found);
    const size_t n_bytes = tensor_scale_bytes(t, kind);
    const int rows = tensor_part_rows(t), C = t->columns;
    void* whole = memset(malloc_check(n_bytes, "scales of a tensor"), 0, n_bytes);
    read_scaled_(set, t, k, found, part, bytes, whole, NULL);
    if (kind == STORED_FP4) { tensor_take_rows(scales, whole, part, C, FP4_GROUP, 1, 0, rows); }
    else {
        check_large_scales_(set, t, found, (const float*)whole);
        tensor_take_scales((float*)scales, (const float*)whole, part, C, 0, rows);
    }
    free(whole);
}

// of a table of whole numbers
static inline void read_whole_(SafeSet* set, const Tensor* t, const SafeTensor* found, float* slice) {
    const unsigned char* data = (const unsigned char*)found->data;
    for (size_t i = 0; i < found->n; i++) {
        int64_t wide = 0;
        int32_t narrow = 0;
        if (found->dtype == DTYPE_I64) { memcpy(&wide, data + sizeof wide * i, sizeof wide); }
        else {
            memcpy(&narrow, data + sizeof narrow * i, sizeof narrow);
            wide = narrow;
        }
        if (wide < 0 || wide >= t->whole_below) {
            fail_input("%s: tensor \"%s\": expected numbers 0..%d, found %lld", set->path, found->name,
                       t->whole_below - 1, (long long)wide);
        }
        slice[i] = (float)wide;
    }
    safeset_was_read(set, safeset_file(set, found), found->data, found->n_bytes);
}

// as floats; padding rows of `slice` are left as they are
static inline void read_slice_(SafeSet* set, const Tensor* t, int k, const SafeTensor* found, float* slice,
                               float* turned) {
    if (t->whole_below > 0) {
        read_whole_(set, t, found, slice);
        return;
    }
    if (scaled_as_(t, found) != STORED_BY_BUILD) {
        void* scales = malloc_check(tensor_scale_bytes(t, scaled_as_(t, found)), "scales of a tensor");
        const TensorPart whole = tensor_part(t, 0, 1);
        read_scaled_(set, t, k, found, &whole, NULL, scales, slice);
        free(scales);
        return;
    }
    tensor_read_(set, found, 0, found->n, tensor_is_turned_(t) ? turned : slice, NULL);
    if (tensor_is_turned_(t)) { tensor_turn_(slice, turned, t, 0); }
}

// Slice k by bands, as many at a time as READ_PART bytes of floats hold, at least one; `room` has so many. Padding rows
// are zero
static inline size_t bands_room_(const Tensor* t) {
    const size_t band = (size_t)FP8_BLOCK * (size_t)t->columns, most = READ_PART / sizeof(float);
    return band > most ? band : most / band * band;
}

static inline void read_bands_(SafeSet* set, const Tensor* t, int k, const SafeTensor* found, const SliceSink* sink,
                               float* room) {
    const MappedFile* file = safeset_file(set, found);
    const size_t C = (size_t)t->columns, width = dtype_size(found->dtype);
    const int n_bands = tensor_bands(t), most = (int)(bands_room_(t) / C / FP8_BLOCK);
    for (int band = 0, n; band < n_bands; band += n) {
        int last_rows;
        n = n_bands - band < most ? n_bands - band : most;
        const size_t first = tensor_band(t, band, &last_rows) * C, last = tensor_band(t, band + n - 1, &last_rows) * C;
        const size_t end = last + (size_t)last_rows * C, on_disk = end < found->n ? end : found->n;
        const size_t n_read = on_disk > first ? on_disk - first : 0;
        tensor_read_part_(file, found, first, n_read, room, NULL);
        memset(room + n_read, 0, sizeof(float) * (end - first - n_read));
        sink->bands(sink->to, t, k, band, n, room);
        safeset_was_read(set, file, (const unsigned char*)found->data + width * first, width * n_read);
    }
}

// slice k of a tensor into `slice`; its padding rows are left as they are
static inline void tensor_load_slice(SafeSet* set, const Tensor* t, int k, const char* prefix, float* slice,
                                     float* turned) {
    const SafeTensor found = find_slice_(set, t, k, prefix);
    read_slice_(set, t, k, &found, slice, turned);
}

// which slice of the file slice k of the model was; -1: none. The layers of a model that grows have the same tensors
static inline int tensor_old_slice(const Tensor* t, const int* old_layer, int k) {
    const int layer = tensor_slice_layer(t, k), from = layer >= 0 && old_layer ? old_layer[layer] : layer;
    if (from == layer) { return k; }
    return from < 0 ? -1 : tensor_slice(t, from) + (k - tensor_slice(t, layer));
}

// old_layer: of each layer of the model the layer that it is in the file, -1 for a new one, which is left as it is;
// NULL: the same
static inline void tensors_load_into(const SliceSink* sink, SafeSet* set, const Tensor* table, int n,
                                     const char* prefix, const int* old_layer) {
    float *turned = tensors_turning_room(table, n), *room = NULL;  // of bands
    size_t room_bytes = 0;
    check_scales_(set);
    for (int i = 0; i < n; i++) {
        const Tensor* t = &table[i];
        for (int k = 0, n_slices = tensor_slices(t); k < n_slices; k++) {
            const int from = tensor_old_slice(t, old_layer, k);
            if (from < 0) { continue; }
            const SafeTensor found = find_slice_(set, t, from, prefix);
            if (!slice_sink_needs(sink, t, k)) {
                safeset_passes_over(set, found.n_bytes);
                continue;
            }
            const Stored kind = scaled_as_(t, &found);
            const int is_plain = !tensor_is_turned_(t) && kind == STORED_BY_BUILD && t->whole_below == 0;
            void* scales = NULL;
            const int can_stay = kind != STORED_BY_BUILD && sink->scaled;
            uint8_t* bytes = can_stay ? sink->scaled(sink->to, t, k, kind, &scales) : NULL;
            const int by_bands = is_plain && sink->takes_bands && sink->takes_bands(sink->to, t, k);
            uint16_t* halves = is_plain && !by_bands && sink->halves
                                   ? sink->halves(sink->to, t, k, found.dtype == DTYPE_BF16) : NULL;
            const TensorPart part = slice_sink_part(sink, t, k);
            if (bytes) {
                read_as_it_is_(set, t, from, &found, &part, bytes, scales);
            } else if (by_bands) {
                const size_t n_bytes = sizeof(float) * bands_room_(t);
                if (n_bytes > room_bytes) { room = (float*)realloc_check(room, room_bytes = n_bytes, "bands"); }
                read_bands_(set, t, k, &found, sink, room);
            } else if (halves) {
                read_halves_(set, t, &found, &part, halves);
            } else {
                read_slice_(set, t, from, &found, sink->room(sink->to, t, k), turned);
            }
            slice_sink_done(sink, t, k);
        }
    }
    free(room);
    free(turned);
}

static inline void tensors_load_layers(SafeSet* set, const Tensor* table, int n, const char* prefix, float* arena,
                                       const int* old_layer) {
    const SliceSink sink = slice_sink(arena);
    tensors_load_into(&sink, set, table, n, prefix, old_layer);
}

static inline void tensors_load(SafeSet* set, const Tensor* table, int n, const char* prefix, float* arena) {
    tensors_load_layers(set, table, n, prefix, arena, NULL);
}

// two of as many bytes
static inline int tensors_equal_(const SafeSet* set, const SafeTensor* a, const SafeTensor* b) {
    const unsigned char *x = (const unsigned char*)a->data, *y = (const unsigned char*)b->data;
    int is_equal = 1;
    for (size_t at = 0, n; at < a->n_bytes && is_equal; at += n) {
        n = a->n_bytes - at < (size_t)READ_BLOCK ? a->n_bytes - at : (size_t)READ_BLOCK;
        is_equal = memcmp(x + at, y + at, n) == 0;
        file_behind(safeset_file(set, a), x + at, n);
        file_behind(safeset_file(set, b), y + at, n);
    }
    return is_equal;
}

// do two tensors that are in a file have the same bytes?
static inline int tensors_match(SafeSet* set, const char* copy, const char* original) {
    const SafeTensor *a = find_tensor_(set, "", copy), *b = find_tensor_(set, "", original);
    return a->dtype == b->dtype && a->n_bytes == b->n_bytes && tensors_equal_(set, a, b);
}

// A tied matrix may be stored a second time; then both copies must be the same bytes, or the file is another model's.
static inline void tensors_check_tied(SafeSet* set, const char* copy, const char* original) {
    const SafeTensor *a = safeset_find(set, copy), *b = find_tensor_(set, "", original);
    if (!a || !b || tensors_match(set, copy, original)) { return; }
    fail_input(
        "%s: tensor \"%s\" differs from \"%s\", to which config.json ties it: this trainer has one matrix for both",
        set->path, a->name, b->name);
}

// ---- writing what was read as it was ----

typedef struct {
    SafeSet* set;  // from which the model came
    int (*has_learnt)(const void* of, const Tensor* t, int k);  // is slice k no longer what it was there?
    const void* of;
} AsRead;

// does any of the slices that are one tensor with this one, the first?
static inline int as_read_has_learnt_(const AsRead* x, const TensorSlice* slice) {
    int has_learnt = 0;
    for (int i = 0, n = tensor_joined(slice->tensor); i < n; i++) {
        has_learnt |= x->has_learnt(x->of, slice->tensor, slice->k + i);
    }
    return has_learnt;
}

static inline void slices_add_as_read_(TensorSlices* to, const TensorSlice* slice, const SafeTensor* t,
                                       int is_scales) {
    TensorSlice* x = &to->slice[to->n++];
    *x = *slice;
    snprintf(x->name, sizeof x->name, "%s", t->name);
    x->dtype = t->dtype;
    x->as_read = t;
    x->is_scales = is_scales;
}

// What has not learnt is the file's tensor, and its scales are one more; what has is bf16, floats where the file has
// floats; what the files lack is as in an export of bf16, if they have any; whole numbers stay whole
static inline void slices_as_read_(TensorSlices* s, const AsRead* x) {
    TensorSlices to = {(TensorSlice*)malloc_check(2 * sizeof(TensorSlice) * (size_t)s->n, "names of tensors"), 0};
    const int has_bf16 = safeset_has(x->set, DTYPE_BF16);
    for (int i = 0, n; i < s->n; i += n) {
        const SafeTensor* found = find_tensor_(x->set, "", s->slice[i].name);
        n = tensor_joined(s->slice[i].tensor);
        if (found && !as_read_has_learnt_(x, &s->slice[i])) {
            const Stored kind = scaled_as_(s->slice[i].tensor, found);
            const SafeTensor* scales = kind != STORED_BY_BUILD ? find_scales_(x->set, found, kind) : NULL;
            slices_add_as_read_(&to, &s->slice[i], found, 0);
            if (scales) { slices_add_as_read_(&to, &s->slice[i], scales, 1); }
            continue;
        }
        for (int k = 0; k < n; k++) {
            TensorSlice* learnt = &to.slice[to.n++];
            *learnt = s->slice[i + k];
            if (learnt->tensor->whole_below > 0) { continue; }
            const int is_float = found ? found->dtype == DTYPE_F32 : !has_bf16 || learnt->tensor->stored == STORED_F32;
            learnt->dtype = is_float ? DTYPE_F32 : DTYPE_BF16;
        }
    }
    free(s->slice);
    qsort(to.slice, (size_t)to.n, sizeof(TensorSlice), slice_by_name_);
    *s = to;
}

// ---- writing a folder ----

// Hugging Face's layout: one file when shard_bytes are enough, else shards of at most that (or one tensor) and their
// index. dtype: DTYPE_F32 or DTYPE_BF16, of what is not as it was read; as_read NULL: of all
static inline void tensors_save_slices(const char* folder, const Tensor* table, int n, SliceSource source, Dtype dtype,
                                       const AsRead* as_read, size_t shard_bytes, SavedFiles* files) {
    TensorSlices s = tensors_sorted(table, n);
    if (dtype == DTYPE_BF16) { slices_as_bf16_(&s); }
    if (as_read) { slices_as_read_(&s, as_read); }
    float* turned = tensors_turning_room(table, n);
    json_t* weight_map = json_object();
    BeyondBf16 beyond = {0, 0, ""};
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
        qsort(s.slice + first, (size_t)(end - first), sizeof(TensorSlice), slice_by_place_);
        safewriter_init(&w);
        safewriter_meta(&w, "format", "pt");
        slices_declare_(&w, s.slice + first, end - first, "");
        safewriter_open(&w, path_join(path, folder, name));
        slices_put_(&w, s.slice + first, end - first, source, as_read ? as_read->set : NULL, turned, &beyond);
        saved_files_add(files, safewriter_close(&w));
        progress("writing", end, s.n);
    }
    if (n_shards > 1) {
        char path[PATH_BYTES];
        // takes the reference
        saved_files_add(files, index_write_(path_join(path, folder, HF_INDEX), weight_map, &s));
    } else {
        json_decref(weight_map);
    }
    beyond_say_(&beyond);
    free(turned);
    free(s.slice);
}

// all tensors in one file; its sum comes back
static inline void tensors_save_folder(const char* folder, const Tensor* table, int n, const float* arena, Dtype dtype,
                                       size_t shard_bytes, SavedFiles* files) {
    tensors_save_slices(folder, table, n, slice_source(arena), dtype, NULL, shard_bytes, files);
}
#endif  // LLMC_TENSORFILE_H
