/*
safetensors: Hugging Face's file of named tensors, read and written.
    offset      size   meaning
    0           8      H, little-endian, 1 .. 100,000,000
    8           H      JSON in UTF-8, starts with `{`, may end in blanks:
                         {"__metadata__": {"key": "text", ...},
                          "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    8 + H       rest   the tensors, row-major, little-endian; offsets count from here
Reading maps the file and believes nothing: no name twice, names of 1..512 bytes without control characters, known
dtype, shape x dtype = end - begin, and the tensors sorted by offset cover the data without hole, overlap or rest, so
that every byte of the file has one meaning. H is arbitrary, hence data is not aligned: read elements by memcpy or
safetensors_to_f32. At most 8 dimensions and 1,000,000 tensors; a tensor may be empty.
Writing declares all tensors first, then streams their bytes in the declared order, so no second copy of a model exists:
    safewriter_init, safewriter_declare and _meta in any number, safewriter_open, safewriter_put..., safewriter_close
Declare wider dtypes first (F32 before BF16), then by name: Hugging Face's writer does, and every tensor is aligned, for
the header is padded to a multiple of 8 bytes.
Cost:    opening is O(n log n) in the number of tensors and touches no data; safetensors_find is O(log n).
Errors:  fail_input for any file that breaks a rule, with the tensor, what was expected and what was found;
         fail_run when writing fails, with path and errno text. Once safewriter_close returned (the file's size and
         checksum), the file is complete and durable.
Source:  huggingface/safetensors, format section of its README; dtype names of version 0.8. Link with -ljansson.
*/
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H
#include "../core/bf16.h"      // bf16_widen
#include "../core/jsonfile.h"  // json_parse_bounded, OutFile, FileSum
#include "../core/mapfile.h"   // MappedFile, file_map, file_unmap, file_changed, file_looks_like, ErrorText, error_set
#include <assert.h>

// ---- element types ----

typedef enum {
    DTYPE_BOOL, DTYPE_F4, DTYPE_F6_E2M3, DTYPE_F6_E3M2, DTYPE_U8, DTYPE_I8, DTYPE_F8_E5M2, DTYPE_F8_E4M3, DTYPE_F8_E8M0,
    DTYPE_F8_E4M3FNUZ, DTYPE_F8_E5M2FNUZ, DTYPE_I16, DTYPE_U16, DTYPE_F16, DTYPE_BF16, DTYPE_I32, DTYPE_U32, DTYPE_F32,
    DTYPE_C64, DTYPE_F64, DTYPE_I64, DTYPE_U64, N_DTYPES
} Dtype;

typedef struct { const char* name; int bits; } DtypeInfo_;

static inline DtypeInfo_ dtype_info_(Dtype dtype) {
    static const DtypeInfo_ table[N_DTYPES] = {  // in the order of the enum
        {"BOOL", 8}, {"F4", 4}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8}, {"I8", 8}, {"F8_E5M2", 8}, {"F8_E4M3", 8},
        {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16}, {"BF16", 16},
        {"I32", 32}, {"U32", 32}, {"F32", 32}, {"C64", 64}, {"F64", 64}, {"I64", 64}, {"U64", 64},
    };
    assert((int)dtype >= 0 && dtype < N_DTYPES);
    return table[dtype];
}

static inline const char* dtype_name(Dtype dtype) { return dtype_info_(dtype).name; }

// bytes of one element; 0 for F4 and F6, several of which share a byte
static inline size_t dtype_size(Dtype dtype) { return (size_t)dtype_info_(dtype).bits / 8; }

static inline int dtype_from_name(Dtype* dtype, const char* name) {
    for (int i = 0; i < N_DTYPES; i++) {
        *dtype = (Dtype)i;
        if (strcmp(dtype_name(*dtype), name) == 0) { return 1; }
    }
    return 0;
}

// elements and bytes of a shape; 0 when they pass 64 bits or F4/F6 elements do not fill whole bytes
static inline int dtype_shape_size_(size_t* n, size_t* n_bytes, Dtype dtype, int n_dims, const int64_t* shape) {
    size_t bits = (size_t)dtype_info_(dtype).bits;
    *n = 1;
    for (int i = 0; i < n_dims; i++) {
        size_t dim = (size_t)shape[i];
        if (dim > 0 && *n > SIZE_MAX / dim) { return 0; }
        *n *= dim;
    }
    if (*n > SIZE_MAX / bits || *n * bits % 8 != 0) { return 0; }
    *n_bytes = *n * bits / 8;
    return 1;
}

// ---- reading ----

#define SAFETENSORS_MAX_DIMS 8
#define SAFETENSORS_MAX_HEADER 100000000  // bytes; the limit of the reference implementation, and of json_parse_bounded
#define SAFETENSORS_MAX_TENSORS 1000000
#define SAFETENSORS_MAX_NAME 512

typedef struct {
    const char* name;
    Dtype dtype;
    int n_dims;
    int64_t shape[SAFETENSORS_MAX_DIMS];
    const void* data;  // in the mapped file, not aligned
    size_t n_bytes;
    size_t n;          // elements
} SafeTensor;

typedef struct {
    const char* path;
    SafeTensor* tensors;         // in the order of their data
    int n_tensors;
    json_t* metadata;            // __metadata__, an object of strings, or NULL
    const SafeTensor** by_name;  // the same tensors sorted by name
    json_t* header;              // owns names and metadata
    MappedFile file;
} SafeFile;

static inline int safetensors_by_data_(const void* a, const void* b) {
    const SafeTensor *x = (const SafeTensor*)a, *y = (const SafeTensor*)b;
    if (x->data != y->data) { return (const char*)x->data < (const char*)y->data ? -1 : 1; }
    return x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes;  // empty tensors before the one that begins there
}

static inline int safetensors_by_name_(const void* a, const void* b) {
    return strcmp((*(const SafeTensor* const*)a)->name, (*(const SafeTensor* const*)b)->name);
}

// the first 8 bytes and the `{` after them; *n_header is only set when the header lies inside the file
static inline int safetensors_length_(size_t* n_header, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    uint64_t length = 0;
    const char* other = file_looks_like(bytes, n_bytes);
    if (n_bytes >= 8) { memcpy(&length, bytes, 8); }
    if (length > 0 && length <= SAFETENSORS_MAX_HEADER && length <= n_bytes - 8 && bytes[8] == '{') {
        *n_header = (size_t)length;
        return 1;
    }
    if (other) { return error_set(error, "expected safetensors, found %s", other); }
    if (n_bytes < 8) {
        return error_set(error,
                         "expected safetensors, at least 8 bytes for the header's length, found a file of %zu bytes",
                         n_bytes);
    }
    if (length == 0 || length > SAFETENSORS_MAX_HEADER) {
        return error_set(error, "expected safetensors, a header length of 1..%d in the first 8 bytes, found %llu",
                         SAFETENSORS_MAX_HEADER, (unsigned long long)length);
    }
    if (length > n_bytes - 8) {
        return error_set(error, "header of %llu bytes, but only %zu follow its length: the file is cut short, copy or "
                         "download it again", (unsigned long long)length, n_bytes - 8);
    }
    return error_set(error, "expected safetensors, a header that starts with '{', found byte 0x%02x", bytes[8]);
}

// dtype and shape of one entry, with n and n_bytes that follow from them
static inline int safetensors_shape_(SafeTensor* t, json_t* entry, ErrorText* error) {
    const char* dtype = json_string_value(json_object_get(entry, "dtype"));
    json_t* shape = json_object_get(entry, "shape");
    if (!dtype) { return error_set(error, "tensor \"%.80s\": expected a string \"dtype\", found no such", t->name); }
    if (!dtype_from_name(&t->dtype, dtype)) {
        return error_set(error, "tensor \"%.80s\": unknown dtype \"%.40s\" (F32, BF16, ... as in safetensors 0.8)",
                         t->name, dtype);
    }
    if (!json_is_array(shape)) {
        return error_set(error, "tensor \"%.80s\": expected a list \"shape\", found no such", t->name);
    }
    if (json_array_size(shape) > SAFETENSORS_MAX_DIMS) {
        return error_set(error, "tensor \"%.80s\": expected at most %d dimensions, found %zu", t->name,
                         SAFETENSORS_MAX_DIMS, json_array_size(shape));
    }
    t->n_dims = (int)json_array_size(shape);
    for (int i = 0; i < t->n_dims; i++) {
        json_t* dim = json_array_get(shape, (size_t)i);
        t->shape[i] = json_integer_value(dim);
        if (!json_is_integer(dim) || t->shape[i] < 0) {
            return error_set(error, "tensor \"%.80s\": shape[%d] is not an integer of at least 0", t->name, i);
        }
    }
    if (!dtype_shape_size_(&t->n, &t->n_bytes, t->dtype, t->n_dims, t->shape)) {
        return error_set(error, "tensor \"%.80s\": shape x %s is not a whole number of bytes below 2^64", t->name,
                         dtype);
    }
    return 1;
}

static inline int safetensors_is_name_(const char* name) {
    size_t n = 0;
    while (n <= SAFETENSORS_MAX_NAME && (unsigned char)name[n] >= ' ' && name[n] != 127) { n++; }
    return n >= 1 && n <= SAFETENSORS_MAX_NAME && name[n] == '\0';
}

// one entry of the header; data of n_data bytes is all that follows the header
static inline int safetensors_entry_(SafeTensor* t, const char* name, json_t* entry, const unsigned char* data,
                                     size_t n_data, ErrorText* error) {
    t->name = name;
    if (!safetensors_is_name_(name)) {
        return error_set(error, "tensor \"%.80s\": expected a name of 1..%d bytes without control characters", name,
                         SAFETENSORS_MAX_NAME);
    }
    if (!json_is_object(entry)) {
        return error_set(error, "tensor \"%.80s\": expected an object, found another JSON type", name);
    }
    if (!safetensors_shape_(t, entry, error)) { return 0; }
    json_t* offsets = json_object_get(entry, "data_offsets");
    json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);  // NULL when it is no such list
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end)) {
        return error_set(error,
                         "tensor \"%.80s\": expected \"data_offsets\" [begin, end], found no list of two integers",
                         name);
    }
    json_int_t from = json_integer_value(begin), to = json_integer_value(end);
    if (from < 0 || to < from) {
        return error_set(error, "tensor \"%.80s\": expected data_offsets 0 <= begin <= end, found [%lld, %lld]", name,
                         (long long)from, (long long)to);
    }
    if ((uint64_t)to > n_data) {
        return error_set(error, "tensor \"%.80s\": data ends at %lld, but the file holds %zu bytes of data: "
                         "it is cut short, copy or download it again", name, (long long)to, n_data);
    }
    if ((uint64_t)(to - from) != t->n_bytes) {
        return error_set(error, "tensor \"%.80s\": shape x dtype is %zu bytes, data_offsets [%lld, %lld] hold %lld",
                         name, t->n_bytes, (long long)from, (long long)to, (long long)(to - from));
    }
    t->data = data + from;
    return 1;
}

static inline int safetensors_metadata_(json_t* metadata, ErrorText* error) {
    const char* key;
    json_t* value;
    if (!json_is_object(metadata)) {
        return error_set(error, "__metadata__: expected an object of strings, found another JSON type");
    }
    json_object_foreach(metadata, key, value) {
        if (!json_is_string(value)) {
            return error_set(error, "__metadata__ \"%.80s\": expected a string, found another JSON type", key);
        }
    }
    return 1;
}

// tensors sorted by offset: each begins where the one before ends, the last ends with the file
static inline int safetensors_cover_(const SafeFile* f, const unsigned char* data, size_t n_data, ErrorText* error) {
    size_t covered = 0;
    for (int i = 0; i < f->n_tensors; i++) {
        const SafeTensor* t = &f->tensors[i];
        size_t begin = (size_t)((const unsigned char*)t->data - data);
        if (begin != covered) {
            return error_set(error, "tensor \"%.80s\": begins at %zu of the data, where %zu was expected: %s", t->name,
                             begin, covered,
                             begin < covered ? "it overlaps the tensor before it" : "there is a hole before it");
        }
        covered += t->n_bytes;
    }
    if (covered != n_data) {
        return error_set(error, "%zu bytes follow the last tensor, expected none: the file is damaged or has something "
                         "appended", n_data - covered);
    }
    return 1;
}

static inline void safetensors_free_(SafeFile* f) {
    free(f->tensors);
    free(f->by_name);
    json_decref(f->header);
    memset(f, 0, sizeof *f);
}

// every entry of a header that is valid JSON
static inline int safetensors_entries_(SafeFile* f, const unsigned char* data, size_t n_data, ErrorText* error) {
    size_t n = json_object_size(f->header);
    const char* name;
    json_t* entry;
    if (n > SAFETENSORS_MAX_TENSORS) {
        return error_set(error, "expected at most %d tensors, found %zu", SAFETENSORS_MAX_TENSORS, n);
    }
    f->tensors = (SafeTensor*)malloc_check((n + 1) * sizeof(SafeTensor), "table of tensors");
    f->by_name = (const SafeTensor**)malloc_check((n + 1) * sizeof(SafeTensor*), "table of tensors");
    memset(f->tensors, 0, (n + 1) * sizeof(SafeTensor));
    json_object_foreach(f->header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) {
            if (!safetensors_metadata_(entry, error)) { return 0; }
            f->metadata = entry;
        } else if (!safetensors_entry_(&f->tensors[f->n_tensors++], name, entry, data, n_data, error)) {
            return 0;
        }
    }
    qsort(f->tensors, (size_t)f->n_tensors, sizeof(SafeTensor), safetensors_by_data_);
    for (int i = 0; i < f->n_tensors; i++) { f->by_name[i] = &f->tensors[i]; }
    qsort(f->by_name, (size_t)f->n_tensors, sizeof(SafeTensor*), safetensors_by_name_);
    return safetensors_cover_(f, data, n_data, error);
}

// The whole reader on bytes in memory, without an exit: 1, or 0 with the reason in `error` and nothing left to free.
static inline int safetensors_parse_(SafeFile* f, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    size_t n_header = 0;
    json_error_t json_error;
    memset(f, 0, sizeof *f);
    if (!safetensors_length_(&n_header, bytes, n_bytes, error)) { return 0; }
    f->header = json_parse_bounded((const char*)bytes + 8, n_header, 3, &json_error);  // { name: { "shape": [ ] } }
    if (!f->header) {
        return error_set(error, "header is not valid JSON, at offset %d: found %s", 8 + json_error.position,
                         json_error.text);
    }
    if (safetensors_entries_(f, bytes + 8 + n_header, n_bytes - 8 - n_header, error)) { return 1; }
    safetensors_free_(f);
    return 0;
}

static inline void safetensors_open(SafeFile* f, const char* path) {
    MappedFile file;
    ErrorText error;
    file_map(&file, path);
    if (!safetensors_parse_(f, file.bytes, file.n_bytes, &error)) { fail_input("%s: %s", path, error.text); }
    f->file = file;
    f->path = file.path;
}

// NULL when there is no tensor of that name
static inline const SafeTensor* safetensors_find(const SafeFile* f, const char* name) {
    int low = 0, high = f->n_tensors;  // by_name[low .. high) may hold it
    while (low < high) {
        int middle = low + (high - low) / 2;
        int order = strcmp(name, f->by_name[middle]->name);
        if (order == 0) { return f->by_name[middle]; }
        if (order < 0) { high = middle; } else { low = middle + 1; }
    }
    return NULL;
}

// the string stored under `key` in __metadata__, or NULL
static inline const char* safetensors_meta(const SafeFile* f, const char* key) {
    return json_string_value(json_object_get(f->metadata, key));
}

// also says so when somebody wrote to the file meanwhile, because then what was read may be half old and half new
static inline void safetensors_close(SafeFile* f) {
    if (file_changed(&f->file)) {
        fail_run("%s: changed while it was being read: wait until its writer is done, then load it again", f->path);
    }
    file_unmap(&f->file);
    safetensors_free_(f);
}

// Can a file with tensors of these names be written here (outfile_check)? An earlier one, even cut short, gives way,
// another's tensors do not. kind: what it is, for the message; names: up to NULL
static inline void safetensors_check_out(const char* option, const char* path, const char* kind,
                                         const char* const* names) {
    MappedFile file;
    ErrorText error;
    json_error_t json_error;
    size_t n_header = 0;
    outfile_check(option, path, "a safetensors file");
    if (!path_exists(path) || !file_map_or_not(&file, path, &error)) { return; }
    const char* bytes = (const char*)file.bytes;
    const int is_known = file.n_bytes > 0 && safetensors_length_(&n_header, file.bytes, file.n_bytes, &error);
    json_t* header = is_known ? json_parse_bounded(bytes + 8, n_header, 3, &json_error) : NULL;
    for (; *names && file.n_bytes > 0; names++) {
        if (json_object_get(header, *names)) { continue; }
        fail_input("--%s: %s: is there already, and not %s, which has a tensor \"%s\": give another name, or remove it",
                   option, path, kind, *names);
    }
    json_decref(header);
    file_unmap(&file);
}

// IEEE half to single: exact. Subnormals are multiples of 2^-24; the payload of a NaN is kept.
static inline float safetensors_f16_(uint16_t half) {
    uint32_t exponent = half >> 10 & 31, mantissa = half & 1023u, u;
    float magnitude = (float)mantissa * 0x1p-24f;
    memcpy(&u, &magnitude, 4);
    if (exponent > 0) { u = ((exponent == 31 ? 255 : exponent + 112) << 23) | mantissa << 13; }  // 112 = 127 - 15
    u |= (uint32_t)(half >> 15) << 31;
    memcpy(&magnitude, &u, 4);
    return magnitude;
}

// out[0 .. n) = elements first .. first+n of an F32, F16 or BF16 tensor; all three conversions are exact
static inline void safetensors_to_f32(float* out, const SafeTensor* t, size_t first, size_t n) {
    assert(first <= t->n && n <= t->n - first);
    const unsigned char* data = (const unsigned char*)t->data + first * dtype_size(t->dtype);
    if (t->dtype == DTYPE_F32) {
        if (n > 0) { memcpy(out, data, n * sizeof(float)); }
    } else if (t->dtype == DTYPE_BF16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t half;
            memcpy(&half, data + 2 * i, 2);
            out[i] = bf16_widen(half);
        }
    } else if (t->dtype == DTYPE_F16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t half;
            memcpy(&half, data + 2 * i, 2);
            out[i] = safetensors_f16_(half);
        }
    } else {
        fail_input("tensor \"%.80s\": expected F32, F16 or BF16, found %s: convert the file", t->name,
                   dtype_name(t->dtype));
    }
}

// ---- writing ----

typedef struct {
    OutFile file;
    json_t* header;    // what will be written, in the order of declaration
    json_t* metadata;  // its "__metadata__"
    size_t n_bytes;    // declared so far
    size_t n_put;      // of them written
} SafeWriter;

static inline void safewriter_init(SafeWriter* w) {
    memset(w, 0, sizeof *w);
    w->header = json_object();
    w->metadata = json_object();
    if (!w->header || json_object_set(w->header, "__metadata__", w->metadata) != 0) {
        fail_run("safetensors header: no memory");
    }
}

static inline void safewriter_declare(SafeWriter* w, const char* name, Dtype dtype, int n_dims, const int64_t* shape) {
    size_t n = 0, n_bytes = 0;
    assert(!w->file.path && n_dims >= 0 && n_dims <= SAFETENSORS_MAX_DIMS);
    if (!dtype_shape_size_(&n, &n_bytes, dtype, n_dims, shape) || n_bytes > (size_t)INT64_MAX - w->n_bytes) {
        fail_run("tensor \"%s\": its size, or that of all tensors, is not a number of bytes below 2^63", name);
    }
    if (json_object_get(w->header, name)) { fail_run("tensor \"%s\": declared twice", name); }
    json_t* dims = json_array();
    for (int i = 0; i < n_dims; i++) { json_array_append_new(dims, json_integer(shape[i])); }
    json_t* entry = json_pack("{s:s, s:o, s:[I,I]}", "dtype", dtype_name(dtype), "shape", dims, "data_offsets",
                              (json_int_t)w->n_bytes, (json_int_t)(w->n_bytes + n_bytes));
    if (!entry || json_object_set_new(w->header, name, entry) != 0) {
        fail_run("tensor \"%s\": no memory, or its name is not UTF-8", name);
    }
    w->n_bytes += n_bytes;
}

static inline void safewriter_meta(SafeWriter* w, const char* key, const char* value) {
    assert(!w->file.path);
    if (json_object_set_new(w->metadata, key, json_string(value)) != 0) {
        fail_run("safetensors metadata \"%s\": no memory, or not UTF-8: \"%.80s\"", key, value);
    }
}

// creates the file, or empties it, and writes the header
static inline void safewriter_open(SafeWriter* w, const char* path) {
    if (json_object_size(w->metadata) == 0) { json_object_del(w->header, "__metadata__"); }
    char* json = json_dumps(w->header, JSON_COMPACT);
    if (!json) { fail_run("%s: no memory for the header", path); }
    size_t n_json = strlen(json);
    uint64_t n_header = (n_json + 7) / 8 * 8;
    if (n_header > SAFETENSORS_MAX_HEADER) {
        fail_run("%s: a header of %zu bytes passes the format's limit of %d: store fewer tensors or less metadata",
                 path, n_json, SAFETENSORS_MAX_HEADER);
    }
    outfile_open(&w->file, path);
    w->file.n_expected = 8 + (size_t)n_header + w->n_bytes;
    outfile_write(&w->file, &n_header, 8);
    outfile_write(&w->file, json, n_json);
    outfile_write(&w->file, "        ", (size_t)n_header - n_json);  // at most 7 blanks
    free(json);
}

// the next bytes of the declared tensors, in any portions
static inline void safewriter_put(SafeWriter* w, const void* data, size_t n_bytes) {
    if (n_bytes > w->n_bytes - w->n_put) {
        fail_run("%s: %zu bytes after the first %zu, but the declared tensors hold %zu", w->file.path, n_bytes,
                 w->n_put, w->n_bytes);
    }
    outfile_write(&w->file, data, n_bytes);
    w->n_put += n_bytes;
}

static inline FileSum safewriter_close(SafeWriter* w) {
    if (w->n_put != w->n_bytes) {
        fail_run("%s: closed after %zu of the %zu declared bytes", w->file.path, w->n_put, w->n_bytes);
    }
    FileSum sum = outfile_close(&w->file);
    json_decref(w->header);
    json_decref(w->metadata);
    memset(w, 0, sizeof *w);
    return sum;
}
#endif  // LLMC_SAFETENSORS_H
