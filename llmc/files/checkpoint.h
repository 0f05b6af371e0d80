/*
Checkpoints: the folders of a run, and how to know that one is whole.
    run/step_000200/  config.json           the model, as Hugging Face writes it (the trainer's own function)
                      model.safetensors     parameters under Hugging Face's names and shapes
                      optimizer.safetensors exp_avg.<name>, exp_avg_sq.<name>: AdamW's moments
                      tokenizer.json        and what else transformers needs to read and write text with it
                      manifest.json         step, place in the data, generator, options; size and XXH3 of every file
Saving writes step_000200.tmp file by file, each made durable; the manifest is last; then the folder takes its name.
A manifest ends with its own XXH3 (over its text with 16 zeros in that place), so no byte of a checkpoint can change
unseen. Which checkpoint is the newest is computed from what is there and verifies; no file says so.
    checkpoint_verify       is every byte the one that was saved?
    checkpoint_newest_good  the newest that verifies; each damaged one before it is named on stderr
    checkpoint_find         what a path means: a checkpoint, or the newest good one of a run
    checkpoint_option       with which option it was made; checkpoint_number: an integer or a switch
    checkpoint_begin/publish/remove   each leaves whole checkpoints only, wherever a kill or a power cut falls into it
    checkpoint_clean        removes what such an interruption has left
    run_lock                one writer to a run
Names in a run that are nobody's checkpoint: step_N.tmp is being written, or removed; step_N.replaced has been
replaced; a folder with manifest.removed is being removed; step_N.old-1 is somebody's and stood where a checkpoint had
to go. doc/checkpoints.md goes through the protocol.
Errors: checkpoint_verify returns the reason; fail_run names path and errno text when writing fails.
*/
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H
#include "../core/jsonfile.h"  // json_text, FileSum, OutFile, hex_text
#include "../core/print.h"     // progress
#include <dirent.h>
#include <limits.h>

enum { MANIFEST_FORMAT = 2, CHECKPOINT_FILES_MAX = 1024 };

// ---- files that go along ----

// Files of Hugging Face's that nothing here reads (companions.h): first the model's, then its tokenizer's
enum { N_MODEL_COMPANIONS = 4, N_COMPANIONS = 10 };

static inline const char* companion_name(int i) {
    static const char* const names[N_COMPANIONS] = {
        "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
        "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json",
        "merges.txt"};
    return names[i];
}

static inline int companion_find(const char* name) {
    int i = N_COMPANIONS;
    while (i-- > 0 && strcmp(name, companion_name(i)) != 0) {}
    return i;
}

// ---- the manifest ----

// the files of a checkpoint, in the order of writing: 280 KB, which a thread's stack may not have (ulimit -s)
typedef struct {
    FileSum file[CHECKPOINT_FILES_MAX];
    int n;
} SavedFiles;

static inline SavedFiles* saved_files_new(void) {
    SavedFiles* files = (SavedFiles*)malloc_check(sizeof *files, "list of files");
    files->n = 0;
    return files;
}

static inline void saved_files_add(SavedFiles* files, FileSum sum) {
    if (files->n == CHECKPOINT_FILES_MAX) { fail_run("a checkpoint of more than %d files", CHECKPOINT_FILES_MAX); }
    files->file[files->n++] = sum;
}

#define MANIFEST_END "  \"xxh3\": \"0000000000000000\"\n}\n"
// where its digits begin
enum { MANIFEST_END_BYTES = sizeof MANIFEST_END - 1, MANIFEST_HASH_AT = MANIFEST_END_BYTES - 20 };

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
        json_array_append_new(list, json_pack("{s:s, s:I, s:s}", "name", f->name, "bytes", (json_int_t)f->n_bytes,
                                              "xxh3", hex_text(f->xxh3).s));
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
    const char *name = json_string_value(json_object_get(entry, "name")),
               *xxh3 = json_string_value(json_object_get(entry, "xxh3"));
    const json_t* bytes = json_object_get(entry, "bytes");
    int plain = name && *name && *name != '.' && !strpbrk(name, "/\\") && strlen(name) < sizeof sum->name;
    if (!plain) { return error_set(error, "manifest.json: \"files\": expected plain file names"); }
    if (!json_is_integer(bytes) || json_integer_value(bytes) < 0 || !xxh3 || strspn(xxh3, "0123456789abcdef") != 16 ||
        xxh3[16]) {
        return error_set(error,
                         "manifest.json: \"files\": %s: expected \"bytes\" and 16 hexadecimal digits of \"xxh3\"",
                         name);
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
    if (n_bytes <= MANIFEST_END_BYTES ||
        memcmp(text + n_bytes - MANIFEST_END_BYTES, MANIFEST_END, MANIFEST_HASH_AT) != 0 ||
        memcmp(text + n_bytes - 4, "\"\n}\n", 4) != 0) {
        error_set(error, "manifest.json: does not end with its checksum: cut short, or of an older version");
        return NULL;
    }
    if (memcmp(text + hash_at, hex_text(manifest_sum_(text, n_bytes)).s, 16) != 0) {
        error_set(error, "manifest.json: its checksum differs: the file is damaged or was edited");
        return NULL;
    }
    json_t* manifest = json_parse_bounded(text, n_bytes, JSON_MAX_DEPTH, &json_error);
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

// Size and XXH3 of a file, read and not mapped: a bad block of the disk is an error here and no SIGBUS. Reading stops
// past `expected` bytes.
static inline int manifest_file_sum_(FileSum* found, const char* path, size_t expected, ErrorText* error) {
    const size_t room = 1 << 20;
    memset(found, 0, sizeof *found);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) { return error_set(error, "cannot be opened: %s", strerror(errno)); }
    posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    unsigned char* buffer = (unsigned char*)malloc_check(room, "buffer of a file");
    XXH3_state_t* hash = XXH3_createState();
    if (!hash) { fail_run("%s: no memory for its checksum", path); }
    XXH3_64bits_reset(hash);
    ssize_t n = 1;
    while (n > 0 && found->n_bytes <= expected) {
        progress("verifying the checkpoint", (int64_t)found->n_bytes, (int64_t)expected + 1);
        do { n = read(fd, buffer, room); } while (n < 0 && errno == EINTR);
        if (n < 0) { break; }
        XXH3_64bits_update(hash, buffer, (size_t)n);
        found->n_bytes += (size_t)n;
    }
    if (n < 0) { error_set(error, "cannot be read at offset %zu: %s", found->n_bytes, strerror(errno)); }
    progress("verifying the checkpoint", 1, 1);
    found->xxh3 = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    free(buffer);
    close(fd);
    return n >= 0;
}

// size and XXH3 of one file as the manifest has them
static inline int checkpoint_verify_file_(const char* folder, const FileSum* sum, ErrorText* error) {
    char path[PATH_BYTES];
    FileSum found;
    ErrorText reason;
    if (!manifest_file_sum_(&found, path_join(path, folder, sum->name), sum->n_bytes, &reason)) {
        return error_set(error, "%s: %s", sum->name, reason.text);
    }
    if (found.n_bytes != sum->n_bytes) {
        return error_set(error, "%s: expected %zu bytes, found %s%zu", sum->name, sum->n_bytes,
                         found.n_bytes > sum->n_bytes ? "at least " : "", found.n_bytes);
    }
    if (found.xxh3 != sum->xxh3) {
        return error_set(error, "%s: expected XXH3 %s, found %s: the file is damaged", sum->name, hex_text(sum->xxh3).s,
                         hex_text(found.xxh3).s);
    }
    return 1;
}

// step of a folder name "step_000200", or -1; *rest is what follows the digits. Only as we write them: "step_20" is
// somebody else's
static inline int checkpoint_step_(const char* name, const char** rest) {
    char ours[32], *end;
    if (strncmp(name, "step_", 5) != 0 || name[5] < '0' || name[5] > '9') { return -1; }
    const long step = strtol(name + 5, &end, 10);
    const int n = snprintf(ours, sizeof ours, "step_%06ld", step);
    *rest = end;
    return step > INT_MAX || end - name != n || strncmp(name, ours, (size_t)n) != 0 ? -1 : (int)step;
}

// is every byte of this checkpoint the one that was saved? Reads all of it. 0: the reason.
static inline int checkpoint_verify(const char* folder, ErrorText* error) {
    char path[PATH_BYTES];
    MappedFile file;
    ErrorText reason;
    if (!file_map_or_not(&file, path_join(path, folder, "manifest.json"), &reason)) {
        return error_set(error, "manifest.json: %s", reason.text);
    }
    SavedFiles* files = saved_files_new();
    json_t* manifest = manifest_parse_((const char*)file.bytes, file.n_bytes, files, error);
    int good = manifest != NULL;
    const char *slash = strrchr(folder, '/'), *rest = "";
    int named = checkpoint_step_(slash ? slash + 1 : folder, &rest);
    json_int_t step = json_integer_value(json_object_get(json_object_get(manifest, "state"), "step"));
    if (good && named >= 0 && !*rest && named != step) {
        good = error_set(error, "manifest.json: of step %lld: the folder was renamed", (long long)step);
    }
    for (int i = 0; good && i < files->n; i++) { good = checkpoint_verify_file_(folder, &files->file[i], error); }
    json_decref(manifest);
    file_unmap(&file);
    free(files);
    return good;
}

// ---- which checkpoint ----

// the newest whose name ends so
static inline int checkpoint_newest_named_(const char* run, int before, const char* end) {
    int newest = -1;
    DIR* folder = opendir(run);
    if (!folder) { return -1; }
    for (struct dirent* entry; (entry = readdir(folder));) {
        char path[PATH_BYTES];
        const char* rest = "";
        int step = checkpoint_step_(entry->d_name, &rest);
        if (step <= newest || strcmp(rest, end) != 0 || (before >= 0 && step >= before)) { continue; }
        snprintf(path, sizeof path, "%s/%s/manifest.json", run, entry->d_name);
        if (path_exists(path)) { newest = step; }
    }
    closedir(folder);
    return newest;
}

// the newest checkpoint below `run`, or the newest one older than `before` (< 0: any); -1 when there is none
static inline int checkpoint_newest(const char* run, int before) { return checkpoint_newest_named_(run, before, ""); }

// has a save that was interrupted set one aside, which checkpoint_clean gives its name back?
static inline int checkpoint_is_aside(const char* run) { return checkpoint_newest_named_(run, -1, ".replaced") >= 0; }

static inline const char* checkpoint_folder(char path[PATH_BYTES], const char* run, int step) {
    char name[32];
    snprintf(name, sizeof name, "step_%06d", step);
    return path_join(path, run, name);
}

// one file of a checkpoint
static inline const char* checkpoint_path(char path[PATH_BYTES], const char* run, int step, const char* name) {
    char folder[PATH_BYTES];
    return path_join(path, checkpoint_folder(folder, run, step), name);
}

// the newest checkpoint of a run that verifies, -1 when there is none; a line on stderr for each damaged one that is
// newer
static inline int checkpoint_newest_good(const char* run) {
    char folder[PATH_BYTES], manifest[PATH_BYTES];
    ErrorText error;
    int step = checkpoint_newest(run, -1), n_removed = 0;
    while (step >= 0 && !checkpoint_verify(checkpoint_folder(folder, run, step), &error)) {
        // by a running trainer, which has saved a newer one
        int removed = !path_exists(path_join(manifest, folder, "manifest.json"));
        if (!removed) { warn_line("%s: %s; looking for the checkpoint before it", folder, error.text); }
        if (removed && ++n_removed > 100) { fail_run("%s: checkpoints come and go: try again later", run); }
        step = checkpoint_newest(run, removed ? -1 : step);
    }
    return step;
}

// The checkpoint that `path` means: itself, or the newest good one of a run. 0: it is something else. A damaged one
// that was asked for by name is refused.
static inline int checkpoint_find(char folder[PATH_BYTES], const char* path) {
    ErrorText error;
    if (snprintf(folder, PATH_BYTES, "%s", path) >= PATH_BYTES - 64) {
        fail_input("%.64s...: this path is too long", path);
    }
    for (size_t n = strlen(folder); n > 1 && folder[n - 1] == '/'; n--) { folder[n - 1] = '\0'; }
    char manifest[PATH_BYTES];
    if (path_exists(path_join(manifest, folder, "manifest.json"))) {
        if (!checkpoint_verify(folder, &error)) {
            fail_input("%s: %s (to load it as it is, remove its manifest.json)", path, error.text);
        }
        return 1;
    }
    if (checkpoint_newest(path, -1) < 0) { return 0; }
    int step = checkpoint_newest_good(path);
    if (step < 0) { fail_input("%s: none of its checkpoints is whole", path); }
    checkpoint_folder(folder, path, step);
    return 1;
}

// what the manifest of a checkpoint says of an option, a new reference; NULL: nobody has noted it
static inline json_t* checkpoint_noted_(const char* folder, const char* name) {
    char path[PATH_BYTES];
    if (!path_exists(path_join(path, folder, "manifest.json"))) { return NULL; }
    json_t* manifest = json_read(path);
    json_t* value = json_incref(json_object_get(json_object_get(manifest, "options"), name));
    json_decref(manifest);
    return value;
}

// what an option was when the checkpoint in this folder was made, on the heap; NULL: nobody has noted it
static inline char* checkpoint_option(const char* folder, const char* name) {
    json_t* value = checkpoint_noted_(folder, name);
    char* copy = json_is_string(value) ? string_copy(json_string_value(value)) : NULL;
    json_decref(value);
    return copy;
}

// the same of an option that is an integer or a switch; nobody has noted it: `usual`
static inline int checkpoint_number(const char* folder, const char* name, int usual) {
    json_t* value = checkpoint_noted_(folder, name);
    const int is_number = json_is_integer(value), is_switch = json_is_boolean(value);
    const int n = is_number ? (int)json_integer_value(value) : is_switch ? json_is_true(value) : usual;
    json_decref(value);
    return n;
}

// ---- removing ----

static inline int checkpoint_remove_file_(const char* path) {
    int gone = unlink(path) == 0 || errno == ENOENT;
    if (!gone) { warn_line("%s: cannot be removed: %s", path, strerror(errno)); }
    return gone;
}

// did we write it? What the manifest lists; of a folder without one, which was not finished, what looks like it
static inline int checkpoint_is_saved_file_(const SavedFiles* files, const char* name) {
    for (int i = 0; i < files->n; i++) {
        if (strcmp(name, files->file[i].name) == 0) { return 1; }
    }
    const char* dot = strrchr(name, '.');
    const int looks_like_it = dot && (strcmp(dot, ".safetensors") == 0 || strcmp(dot, ".json") == 0);
    return files->n == 0 && (looks_like_it || companion_find(name) >= 0);
}

// Gives a name free that somebody else's file or folder has: a link goes, anything else stays beside it as NAME.old-1,
// or the next number that is free
static inline void checkpoint_set_aside_(const char* path) {
    char aside[PATH_BYTES];
    struct stat status;
    int number = 1;
    if (lstat(path, &status) != 0) { return; }
    if (S_ISLNK(status.st_mode)) {
        if (!checkpoint_remove_file_(path)) { fail_run("%s: is in the way of a checkpoint: remove it", path); }
        return;
    }
    do {
        if (snprintf(aside, sizeof aside, "%s.old-%d", path, number++) >= PATH_BYTES) { errno = ENAMETOOLONG; break; }
    } while (lstat(aside, &status) == 0);
    if (errno != ENOENT || rename(path, aside) != 0) {
        fail_run("%s: is in the way of a checkpoint and cannot be renamed to %s: %s", path, aside, strerror(errno));
    }
    warn_line("%s: is no checkpoint and was in the way of one: its name is %s now", path, aside);
}

// the files of a checkpoint, `list` naming them; that is the last to go, so an interrupted removal can be finished
static inline void checkpoint_empty_(const char* folder, const char* list) {
    char path[PATH_BYTES];
    MappedFile file;
    SavedFiles* files = saved_files_new();
    ErrorText error;
    int left = 0;
    if (path_exists(path_join(path, folder, list)) && file_map_or_not(&file, path, &error)) {
        json_decref(manifest_parse_((const char*)file.bytes, file.n_bytes, files, &error));
        file_unmap(&file);
    }
    DIR* entries = opendir(folder);
    for (struct dirent* entry; entries && (entry = readdir(entries));) {
        if (strcmp(entry->d_name, list) == 0 || !checkpoint_is_saved_file_(files, entry->d_name)) { continue; }
        left += !checkpoint_remove_file_(path_join(path, folder, entry->d_name));
    }
    if (entries) { closedir(entries); }
    free(files);
    if (left == 0) { checkpoint_remove_file_(path_join(path, folder, list)); }
}

// Remove a checkpoint, or what is left of one. Its manifest changes its name first, so after an interruption nothing
// looks like a checkpoint (a .tmp never does). Files of the user's stay, and the folder with them; of a folder that has
// no manifest, and is no temporary one, everything does. So does what a symbolic link leads to: a link in the place of
// a temporary folder goes, that of a checkpoint moved elsewhere stays
static inline void checkpoint_remove(const char* folder) {
    char path[PATH_BYTES], removed[PATH_BYTES];
    struct stat status;
    const char* dot = strrchr(folder, '.');
    int temporary = dot && strcmp(dot, ".tmp") == 0, renamed = temporary;
    const char* list = temporary ? "manifest.json" : "manifest.removed";
    if (lstat(folder, &status) == 0 && S_ISLNK(status.st_mode)) {
        if (temporary) { checkpoint_remove_file_(folder); }
        return;
    }
    if (!temporary) {
        renamed = rename(path_join(path, folder, "manifest.json"), path_join(removed, folder, list)) == 0 ||
                  errno == ENOENT;
    }
    if (!renamed) {
        warn_line("%s: cannot be renamed: %s", path, strerror(errno));
        return;
    }
    if (temporary || path_exists(path_join(removed, folder, list))) { checkpoint_empty_(folder, list); }
    int gone = rmdir(folder) == 0 || errno == ENOENT || errno == ENOTEMPTY || errno == EEXIST;
    if (!gone) { warn_line("%s: cannot be removed: %s", folder, strerror(errno)); }
}

// What an interrupted save or removal has left. Only the writer of a run may call this.
static inline void checkpoint_clean(const char* run) {
    DIR* entries = opendir(run);
    if (!entries) { return; }
    for (struct dirent* entry; (entry = readdir(entries));) {
        char path[PATH_BYTES], manifest[PATH_BYTES], name[PATH_BYTES];
        const char* rest = "";
        struct stat status;
        int step = checkpoint_step_(entry->d_name, &rest);
        if (step < 0 || lstat(path_join(path, run, entry->d_name), &status) != 0) { continue; }
        checkpoint_folder(name, run, step);
        if (!S_ISDIR(status.st_mode) && !S_ISLNK(status.st_mode)) {
            if (strcmp(rest, ".tmp") == 0) { checkpoint_set_aside_(path); }  // no save has made a file of this name
        } else if (strcmp(rest, ".replaced") == 0 && !path_exists(name)) {
            if (rename(path, name) != 0) { fail_run("%s: cannot be renamed to %s: %s", path, name, strerror(errno)); }
        } else if (strcmp(rest, ".tmp") == 0 || strcmp(rest, ".replaced") == 0 ||
                   path_exists(path_join(manifest, path, "manifest.removed"))) {
            checkpoint_remove(path);
        } else if (!*rest && !path_exists(path_join(manifest, path, "manifest.json"))) {
            rmdir(path);  // if it is empty, only that was left to be done
        }
    }
    closedir(entries);
}

// ---- writing ----

typedef struct {
    char folder[PATH_BYTES];  // "": none
    int registered;           // with atexit
} UnfinishedCheckpoint;

// the folder that is being written; a state of the process, for its end removes the folder
static inline UnfinishedCheckpoint* checkpoint_unfinished_(void) {
    static UnfinishedCheckpoint unfinished;
    return &unfinished;
}

static inline void checkpoint_abandon_(void) {
    if (*checkpoint_unfinished_()->folder) { checkpoint_remove(checkpoint_unfinished_()->folder); }
}

// What is registered later runs earlier: whoever lets exit() wait for a writer calls this before.
static inline void checkpoint_abandon_at_exit(void) {
    UnfinishedCheckpoint* unfinished = checkpoint_unfinished_();
    if (!unfinished->registered) { unfinished->registered = atexit(checkpoint_abandon_) == 0; }
}

// An empty run/step_N.tmp, after a look at the disk: n_bytes is what the checkpoint takes. If the process exits before
// checkpoint_publish, full disk and failed fsync included, the folder goes away again.
static inline void checkpoint_begin(char temporary[PATH_BYTES], const char* run, int step, double n_bytes) {
    char name[32];
    checkpoint_clean(run);
    double n_free = disk_free(run);
    if (n_free >= 0.0 && n_free < n_bytes) {
        fail_run("%s: a checkpoint takes %s, the disk has %s free: %s", run, format_bytes(n_bytes).s,
                 format_bytes(n_free).s,
                 checkpoint_newest(run, -1) >= 0
                     ? "the checkpoints before are whole; make room, then --resume"
                     : "no checkpoint has been written yet; make room, then give the command again that began the run");
    }
    checkpoint_abandon_at_exit();
    snprintf(name, sizeof name, "step_%06d.tmp", step);
    path_join(temporary, run, name);
    snprintf(checkpoint_unfinished_()->folder, PATH_BYTES, "%s", temporary);
    make_folder(temporary);
}

// Two folders change names. At once where the system can; else the old one is set aside first, and for an instant there
// is no step_N: checkpoint_clean gives it its name back.
static inline int checkpoint_exchange_(const char* temporary, const char* folder) {
    char aside[PATH_BYTES];
    if (renameat2(AT_FDCWD, temporary, AT_FDCWD, folder, RENAME_EXCHANGE) == 0) { return 1; }
    if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) { return 0; }
    if (snprintf(aside, sizeof aside, "%s.replaced", folder) >= PATH_BYTES) { errno = ENAMETOOLONG; return 0; }
    if (rename(folder, aside) != 0) { return 0; }
    return rename(temporary, folder) == 0 ? rename(aside, temporary) == 0 : (rename(aside, folder), 0);
}

// The finished folder takes its name, durably. After a resume there may be a checkpoint of this step already: it
// changes places with the new one and is removed afterwards. Anything else at this name is somebody's and stays.
static inline void checkpoint_publish(const char* temporary, const char* folder) {
    char manifest[PATH_BYTES];
    const int replaces = path_exists(path_join(manifest, folder, "manifest.json"));
    if (!replaces) { checkpoint_set_aside_(folder); }
    path_sync(temporary);
    int done = replaces ? checkpoint_exchange_(temporary, folder) : rename(temporary, folder) == 0;
    if (!done) { fail_run("%s: cannot be renamed to %s: %s", temporary, folder, strerror(errno)); }
    checkpoint_unfinished_()->folder[0] = '\0';
    parent_sync(folder);
    if (replaces) { checkpoint_remove(temporary); }
}

// ---- one writer ----

// the locked file and its folder; a state of the process: the lock goes with it
typedef struct {
    int held;
    struct stat file, folder;
} RunLock;

static inline RunLock* run_lock_held_(void) {
    static RunLock lock;
    return &lock;
}

static inline int is_same_file_(const char* path, const struct stat* held) {
    struct stat found;
    return stat(path, &found) == 0 && found.st_dev == held->st_dev && found.st_ino == held->st_ino;
}

// Refuses a run to which another process writes. The lock is the kernel's and goes with the process, however that ends;
// the file .lock only holds the writer's process id, for the message. A second's patience: a process that was killed a
// moment ago may still be on its way out.
static inline void run_lock(const char* run) {
    char path[PATH_BYTES], pid[32] = "";
    RunLock* lock = run_lock_held_();
    path_join(path, run, ".lock");
    if (lock->held && is_same_file_(path, &lock->file)) { return; }
    int fd = file_open(path, O_RDWR | O_CREAT);
    if (fstat(fd, &lock->file) != 0 || stat(run, &lock->folder) != 0) { fail_run("%s: %s", path, strerror(errno)); }
    lock->held = 1;  // fd is open as long as the process lives
    const int locked = file_lock(fd);
    if (locked < 0) {
        warn_line("%s: this file system has no locks (%s): see to it that no other process writes to this run", path,
                  strerror(errno));
        return;
    }
    if (!locked) {
        ssize_t n = read(fd, pid, sizeof pid - 1);
        fail_input("%s: another process (%.*s) writes to this run: wait for its end, or choose another --run", run,
                   n > 0 ? (int)strcspn(pid, "\n") : 7, n > 0 ? pid : "unknown");
    }
    int written = ftruncate(fd, 0) == 0 && dprintf(fd, "%d\n", (int)getpid()) > 0;
    if (!written) { warn_line("%s: cannot be written: %s", path, strerror(errno)); }
}

// Asked before each save. Another folder may stand at the name of the locked one by now: nothing of this run may be
// written to it. A lock that somebody has tidied away is taken anew
static inline void run_check_lock(const char* run) {
    char path[PATH_BYTES];
    const RunLock* lock = run_lock_held_();
    if (!lock->held) { return; }
    if (!is_same_file_(run, &lock->folder)) {
        fail_run("%s: this folder was %s while the run was writing to it: nothing more is written", run,
                 path_exists(run) ? "replaced" : "removed or renamed");
    }
    if (is_same_file_(path_join(path, run, ".lock"), &lock->file)) { return; }
    warn_line("%s: was removed or replaced while the run was writing: locked anew", path);
    run_lock(run);
}
#endif  // LLMC_CHECKPOINT_H
