/*
Checkpoints: the folders of a run, and how to know that one is whole.
    run/step_000200/  config.json           the model, as Hugging Face writes it (the trainer's own function)
                      model.safetensors     parameters under Hugging Face's names and shapes
                      optimizer.safetensors exp_avg.<name>, exp_avg_sq.<name>: AdamW's moments
                      manifest.json         step, place in the data, generator, options; size and XXH3 of every file
Saving writes step_000200.tmp file by file, each made durable; the manifest is last; then the folder takes its name.
A manifest ends with its own XXH3 (over its text with 16 zeros in that place), so no byte of a checkpoint can change
unseen. Which checkpoint is the newest is computed from what is there and verifies; no file says so.
Errors: checkpoint_verify returns the reason; fail_run names path and errno text when writing fails.
Source: spec/reliability.md
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H
#include "jsonfile.h"  // json_text, FileSum, OutFile
#include <dirent.h>

enum { MANIFEST_FORMAT = 2, CHECKPOINT_FILES_MAX = 1024 };

// ---- the manifest ----

// the files of a checkpoint, in the order of writing
typedef struct {
    FileSum file[CHECKPOINT_FILES_MAX];
    int n;
} SavedFiles;

static inline void saved_files_add(SavedFiles* files, FileSum sum) {
    if (files->n == CHECKPOINT_FILES_MAX) { fail_run("a checkpoint of more than %d files", CHECKPOINT_FILES_MAX); }
    files->file[files->n++] = sum;
}

typedef struct { char s[17]; } HexText;

static inline HexText hex_text(uint64_t x) {
    HexText out;
    snprintf(out.s, sizeof out.s, "%016llx", (unsigned long long)x);
    return out;
}

#define MANIFEST_END "  \"xxh3\": \"0000000000000000\"\n}\n"
enum { MANIFEST_END_BYTES = sizeof MANIFEST_END - 1, MANIFEST_HASH_AT = MANIFEST_END_BYTES - 20 };  // where its digits begin

// XXH3 of a manifest's text with zeros in place of the sum itself
static inline uint64_t manifest_sum_(const char* text, size_t n_bytes) {
    XXH3_state_t* hash = XXH3_createState();
    if (!hash) { fail_run("manifest: no memory for its checksum"); }
    XXH3_64bits_reset(hash);
    XXH3_64bits_update(hash, text, n_bytes - MANIFEST_END_BYTES);
    XXH3_64bits_update(hash, MANIFEST_END, MANIFEST_END_BYTES);
    uint64_t sum = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return sum;
}

// content: the trainer's part, {"state": ..., "options": ...}; takes the reference
static inline void manifest_write(const char* path, json_t* content, const SavedFiles* files) {
    json_t *manifest = json_pack("{s:i}", "format", MANIFEST_FORMAT), *list = json_array();
    for (int i = 0; i < files->n; i++) {
        const FileSum* f = &files->file[i];
        json_array_append_new(list, json_pack("{s:s, s:I, s:s}", "name", f->name, "bytes", (json_int_t)f->n_bytes, "xxh3", hex_text(f->xxh3).s));
    }
    json_object_update(manifest, content);
    json_decref(content);
    json_object_set_new(manifest, "files", list);
    json_object_set_new(manifest, "xxh3", json_string("0000000000000000"));
    char* text = json_text(manifest, path);
    size_t n_bytes = strlen(text);
    memcpy(text + n_bytes - MANIFEST_END_BYTES + MANIFEST_HASH_AT, hex_text(manifest_sum_(text, n_bytes)).s, 16);
    OutFile file;
    outfile_open(&file, path);
    outfile_write(&file, text, n_bytes);
    outfile_close(&file);
    free(text);
}

// one entry of "files"
static inline int manifest_file_(FileSum* sum, const json_t* entry, ErrorText* error) {
    const char *name = json_string_value(json_object_get(entry, "name")), *xxh3 = json_string_value(json_object_get(entry, "xxh3"));
    const json_t* bytes = json_object_get(entry, "bytes");
    int plain = name && *name && *name != '.' && !strpbrk(name, "/\\") && strlen(name) < sizeof sum->name;
    if (!plain) { return error_set(error, "manifest.json: \"files\": expected plain file names"); }
    if (!json_is_integer(bytes) || json_integer_value(bytes) < 0 || !xxh3 || strspn(xxh3, "0123456789abcdef") != 16 || xxh3[16]) {
        return error_set(error, "manifest.json: \"files\": %s: expected \"bytes\" and 16 hexadecimal digits of \"xxh3\"", name);
    }
    snprintf(sum->name, sizeof sum->name, "%s", name);
    sum->n_bytes = (size_t)json_integer_value(bytes);
    sum->xxh3 = strtoull(xxh3, NULL, 16);
    return 1;
}

// A manifest's text against its own sum; its JSON (a new reference) and the list of files come back. 0: the reason.
static inline json_t* manifest_parse_(const char* text, size_t n_bytes, SavedFiles* files, ErrorText* error) {
    json_error_t json_error;
    const size_t hash_at = n_bytes - MANIFEST_END_BYTES + MANIFEST_HASH_AT;
    files->n = 0;
    if (n_bytes <= MANIFEST_END_BYTES || memcmp(text + n_bytes - MANIFEST_END_BYTES, MANIFEST_END, MANIFEST_HASH_AT) != 0 ||
        memcmp(text + n_bytes - 4, "\"\n}\n", 4) != 0) {
        error_set(error, "manifest.json: does not end with its checksum: cut short, or of an older version");
        return NULL;
    }
    if (memcmp(text + hash_at, hex_text(manifest_sum_(text, n_bytes)).s, 16) != 0) {
        error_set(error, "manifest.json: its checksum differs: the file is damaged or was edited");
        return NULL;
    }
    json_t* manifest = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES, &json_error);
    json_t* list = json_object_get(manifest, "files");
    int good = json_is_array(list) && json_array_size(list) <= CHECKPOINT_FILES_MAX &&
               json_integer_value(json_object_get(manifest, "format")) == MANIFEST_FORMAT;
    if (!good) { error_set(error, "manifest.json: expected format %d with a list \"files\"", MANIFEST_FORMAT); }
    for (size_t i = 0; good && i < json_array_size(list); i++) {
        good = manifest_file_(&files->file[files->n++], json_array_get(list, i), error);
    }
    if (good) { return manifest; }
    json_decref(manifest);
    return NULL;
}

// size and XXH3 of one file as the manifest has them
static inline int checkpoint_verify_file_(const char* folder, const FileSum* sum, ErrorText* error) {
    char path[PATH_BYTES];
    MappedFile file;
    ErrorText reason;
    if (!file_map_or_not(&file, path_join(path, folder, sum->name), &reason)) { return error_set(error, "%s: %s", sum->name, reason.text); }
    size_t n_bytes = file.n_bytes;
    uint64_t xxh3 = n_bytes == sum->n_bytes ? XXH3_64bits(file.bytes, file.n_bytes) : 0;
    file_unmap(&file);
    if (n_bytes != sum->n_bytes) {
        return error_set(error, "%s: expected %zu bytes, found %zu", sum->name, sum->n_bytes, n_bytes);
    }
    if (xxh3 != sum->xxh3) {
        return error_set(error, "%s: expected XXH3 %s, found %s: the file is damaged", sum->name, hex_text(sum->xxh3).s, hex_text(xxh3).s);
    }
    return 1;
}

// is every byte of this checkpoint the one that was saved? Reads all of it. 0: the reason.
static inline int checkpoint_verify(const char* folder, ErrorText* error) {
    char path[PATH_BYTES];
    MappedFile file;
    ErrorText reason;
    if (!file_map_or_not(&file, path_join(path, folder, "manifest.json"), &reason)) { return error_set(error, "manifest.json: %s", reason.text); }
    SavedFiles files;
    json_t* manifest = manifest_parse_((const char*)file.bytes, file.n_bytes, &files, error);
    int good = manifest != NULL;
    for (int i = 0; good && i < files.n; i++) { good = checkpoint_verify_file_(folder, &files.file[i], error); }
    json_decref(manifest);
    file_unmap(&file);
    return good;
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

// the finished folder takes its name, durably
static inline void checkpoint_publish(const char* temporary, const char* folder) {
    char parent[PATH_BYTES];
    folder_sync(temporary);
    if (path_exists(folder)) { checkpoint_remove(folder); }  // the same step again, after a resume
    if (rename(temporary, folder) != 0) { fail_run("%s: cannot be renamed to %s: %s", temporary, folder, strerror(errno)); }
    snprintf(parent, sizeof parent, "%s", folder);
    *strrchr(parent, '/') = '\0';
    folder_sync(parent);
}
#endif  // LLMC_CHECKPOINT_H
