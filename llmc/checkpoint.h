/*
Parameters and moments on disk: the tensor table against safetensors, and the folders of a run.
    run/step_000200/  config.json           the model, as Hugging Face writes it (the trainer's own function)
                      model.safetensors     parameters under Hugging Face's names and shapes
                      optimizer.safetensors exp_avg.<name>, exp_avg_sq.<name>: AdamW's moments
                      manifest.json         step, place in the data, generator, options; written last
A folder without a manifest is not a checkpoint. It is written as step_000200.tmp and renamed when it is complete.
Loading accepts F32, F16 and BF16, and names with or without the leading "transformer."
Errors: fail_input names the file, the tensor and both shapes; fail_run names path and errno text when writing fails.
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H
#include "log.h"          // progress
#include "safetensors.h"  // SafeFile, SafeWriter
#include "tensor.h"       // Tensor, tensor_slice_name
#include <dirent.h>

enum { NAME_BYTES = 256, PATH_BYTES = 4096 };

// path = folder/name, or a message when that is too long
static inline const char* path_join(char path[PATH_BYTES], const char* folder, const char* name) {
    if (snprintf(path, PATH_BYTES, "%s/%s", folder, name) >= PATH_BYTES) { fail_input("%s/%s: this path is too long", folder, name); }
    return path;
}

static inline int path_exists(const char* path) { return access(path, F_OK) == 0; }

static inline void make_folder(const char* path) {
    char parent[PATH_BYTES];
    snprintf(parent, sizeof parent, "%s", path);
    for (char* c = parent + 1; *c; c++) {
        if (*c == '/') {
            *c = '\0';
            mkdir(parent, 0777);  // what is wrong with a parent shows in the last mkdir
            *c = '/';
        }
    }
    if (mkdir(path, 0777) != 0 && errno != EEXIST) { fail_run("%s: this folder cannot be made: %s", path, strerror(errno)); }
}

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

static inline void tensors_put(SafeWriter* w, const Tensor* table, int n, const float* arena) {
    float* turned = (float*)malloc_check(sizeof(float) * largest_transposed_(table, n), "buffer of a tensor");
    for (int i = 0; i < n; i++) {
        const Tensor* t = &table[i];
        for (int l = 0; l < tensor_slices(t); l++) {
            const float* slice = arena + t->offset + l * tensor_slice_elements(t);
            if (t->on_disk == TRANSPOSED) {
                transpose(turned, slice, t->disk_rows, t->columns);
                slice = turned;
            }
            safewriter_put(w, slice, sizeof(float) * tensor_disk_elements(t));
        }
    }
    free(turned);
}

// one file with one arena for each prefix
static inline void tensors_save(const char* path, const Tensor* table, int n, const char* const* prefixes, const float* const* arenas,
                                int n_arenas) {
    SafeWriter w;
    safewriter_init(&w);
    safewriter_meta(&w, "format", "pt");  // transformers asks for it
    for (int i = 0; i < n_arenas; i++) { tensors_declare(&w, table, n, prefixes[i]); }
    safewriter_open(&w, path);
    for (int i = 0; i < n_arenas; i++) { tensors_put(&w, table, n, arenas[i]); }
    safewriter_close(&w);
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

static inline void tensors_load(const SafeFile* f, const Tensor* table, int n, const char* prefix, float* arena) {
    float* turned = (float*)malloc_check(sizeof(float) * largest_transposed_(table, n), "buffer of a tensor");
    for (int i = 0; i < n; i++) {
        const Tensor* t = &table[i];
        for (int l = 0; l < tensor_slices(t); l++) {
            char name[NAME_BYTES];
            const SafeTensor* found = find_tensor_(f, prefix, tensor_slice_name(name, sizeof name, t, l));
            float* slice = arena + t->offset + l * tensor_slice_elements(t);
            if (!found) { fail_input("%s: tensor \"%s%s\" is missing", f->path, prefix, name); }
            if (found->dtype != DTYPE_F32 && found->dtype != DTYPE_F16 && found->dtype != DTYPE_BF16) {
                fail_input("%s: tensor \"%s\": expected F32, F16 or BF16, found %s", f->path, found->name, dtype_name(found->dtype));
            }
            check_shape_(f, found, t);
            safetensors_to_f32(t->on_disk == TRANSPOSED ? turned : slice, found, 0, tensor_disk_elements(t));
            if (t->on_disk == TRANSPOSED) { transpose(slice, turned, t->columns, t->disk_rows); }
        }
        progress("loading", i + 1, n);
    }
    free(turned);
}

// ---- JSON files, whole ----

static inline json_t* json_read(const char* path) {
    json_error_t error;
    if (access(path, R_OK) != 0) { fail_input("%s: cannot be opened: %s", path, strerror(errno)); }
    json_t* json = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!json) { fail_input("%s:%d: expected JSON, found: %s", path, error.line, error.text); }
    if (!json_is_object(json)) { fail_input("%s: expected a JSON object {...}", path); }
    return json;
}

// write and make durable; takes the reference
static inline void json_write(const char* path, json_t* json) {
    FILE* file = fopen(path, "w");
    if (!file) { fail_run("%s: cannot be created: %s", path, strerror(errno)); }
    int failed = json_dumpf(json, file, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) != 0 || fputc('\n', file) == EOF;
    if (failed || fflush(file) != 0 || fsync(fileno(file)) != 0) { fail_run("%s: cannot be written: %s", path, strerror(errno)); }
    if (fclose(file) != 0) { fail_run("%s: cannot be closed: %s", path, strerror(errno)); }
    json_decref(json);
}

// an integer of a JSON object within low..high, or a message that names file and key
static inline int64_t json_need_int(const json_t* json, const char* path, const char* key, int64_t low, int64_t high) {
    const json_t* value = json_object_get(json, key);
    if (!json_is_integer(value) || json_integer_value(value) < low || json_integer_value(value) > high) {
        char* found = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;
        fail_input("%s: \"%s\": expected an integer %lld..%lld, found %s", path, key, (long long)low, (long long)high,
                   found ? found : "nothing");
    }
    return json_integer_value(value);
}

// ---- folders of a run ----

// step of a folder name "step_000200", or -1
static inline int checkpoint_step_(const char* name) {
    char* end;
    if (strncmp(name, "step_", 5) != 0 || name[5] < '0' || name[5] > '9') { return -1; }
    long step = strtol(name + 5, &end, 10);
    return *end || step > 2147483647L ? -1 : (int)step;
}

// the newest complete checkpoint below `run`, or the newest one older than `before` (< 0: any); -1 when there is none
static inline int checkpoint_newest(const char* run, int before) {
    int newest = -1;
    DIR* folder = opendir(run);
    if (!folder) { return -1; }
    for (struct dirent* entry; (entry = readdir(folder));) {
        char path[PATH_BYTES];
        int step = checkpoint_step_(entry->d_name);
        if (step <= newest || (before >= 0 && step >= before)) { continue; }
        snprintf(path, sizeof path, "%s/%s/manifest.json", run, entry->d_name);
        if (path_exists(path)) { newest = step; }
    }
    closedir(folder);
    return newest;
}

static inline const char* checkpoint_folder(char path[PATH_BYTES], const char* run, int step) {
    char name[32];
    snprintf(name, sizeof name, "step_%06d", step);
    return path_join(path, run, name);
}

// remove a checkpoint: the manifest first, so that what is left after an interruption is no checkpoint
static inline void checkpoint_remove(const char* folder) {
    const char* names[] = {"manifest.json", "optimizer.safetensors", "model.safetensors", "config.json"};
    char path[PATH_BYTES];
    for (int i = 0; i < 4; i++) { unlink(path_join(path, folder, names[i])); }
    int removed = rmdir(folder) == 0 || errno == ENOENT || errno == ENOTEMPTY;  // with a file of the user's in it, it stays
    if (!removed) { fail_run("%s: cannot be removed: %s", folder, strerror(errno)); }
}

// the names in a folder survive a power cut
static inline void folder_sync_(const char* path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY);
    if (fd < 0 || fsync(fd) != 0) { fail_run("%s: cannot be made durable (fsync): %s", path, strerror(errno)); }
    close(fd);
}

// the finished folder takes its name, durably
static inline void checkpoint_publish(const char* temporary, const char* folder) {
    char parent[PATH_BYTES];
    folder_sync_(temporary);
    if (path_exists(folder)) { checkpoint_remove(folder); }  // the same step again, after a resume
    if (rename(temporary, folder) != 0) { fail_run("%s: cannot be renamed to %s: %s", temporary, folder, strerror(errno)); }
    snprintf(parent, sizeof parent, "%s", folder);
    *strrchr(parent, '/') = '\0';
    folder_sync_(parent);
}
#endif  // LLMC_CHECKPOINT_H
