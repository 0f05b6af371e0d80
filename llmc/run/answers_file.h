/*
The file of --generate-out: records of answers, plain JSON Lines, by one writer at a time; and beside it, as
FILE.settings.json, what has made them:
    {"made_with": {"weights_xxh3": ..., "adapter_xxh3": ..., "seed": 42, "temperature": 0.8, ...}, "options": {...}}
A start that finds answers goes on with them if "made_with" is what it was: the model, its adapter and its tokenizer,
the seed, and how tokens are chosen.
    answers_is_plain   is it a file, or will be one?
    answers_open       the file, to write behind what it has; locked as long as it is open
    answers_is_begun   is a half line, that of a start which was killed, the beginning of this record?
    answers_check      are the answers that the file has made with the same? Where it has none, settings are written
A device or a pipe has no lock, no earlier answers and no settings.
Errors: fail_run where another process writes to it; fail_input names the file and what is another now.
*/
#ifndef LLMC_ANSWERS_FILE_H
#define LLMC_ANSWERS_FILE_H
#include "../core/jsonfile.h"  // json_t, json_read, json_replace
#include "../core/options.h"   // options_fail
#include "../core/outfile.h"   // file_append, file_lock

#define ANSWERS_SETTINGS ".settings.json"

static inline int answers_is_plain(const char* path) {
    struct stat status;
    return stat(path, &status) != 0 || S_ISREG(status.st_mode);
}

static inline const char* answers_settings_path_(char settings[PATH_BYTES], const char* path) {
    if (snprintf(settings, PATH_BYTES, "%s" ANSWERS_SETTINGS, path) >= PATH_BYTES) {
        options_fail("generate-out", "%s: this path is too long", path);
    }
    return settings;
}

// "made_with" of the settings beside a file, to be dereferenced; NULL: there are none. What somebody else keeps under
// that name stays
static inline json_t* answers_settings_(const char* settings) {
    if (!path_exists(settings)) { return NULL; }
    json_t* json = json_read(settings);
    json_t* made_with = json_incref(json_object_get(json, "made_with"));
    json_decref(json);
    if (!json_is_object(made_with)) {
        options_fail("generate-out", "needs %s for what makes the answers, and something else is there: give another "
                     "name, or remove it", settings);
    }
    return made_with;
}

static inline FILE* answers_open(const char* path) {
    char settings[PATH_BYTES];
    const int is_plain = answers_is_plain(path);
    if (is_plain) { json_decref(answers_settings_(answers_settings_path_(settings, path))); }
    const int fd = file_append(path), locked = is_plain ? file_lock(fd) : 1;
    if (!locked || (is_plain && !file_has_name(fd, path))) { file_is_locked_(path); }
    if (locked < 0) {
        warn_line("%s: this file system has no locks (%s): see to it that no other process writes to it", path,
                  strerror(errno));
    }
    FILE* out = fdopen(fd, "a");
    if (!out) { fail_run("%s: %s", path, strerror(errno)); }
    return out;
}

// asked: the record's first keys, behind which comes "answer"
static inline int answers_is_begun(const json_t* asked, const char* half, size_t n_bytes) {
    char* line = json_dumps(asked, JSON_COMPACT);  // {"prompt":"A"}
    if (!line) { fail_run("answers: no memory"); }
    const char rest[] = ",\"answer\":\"";
    const size_t n_asked = strlen(line) - 1, n_rest = sizeof rest - 1;
    const size_t n_first = n_bytes < n_asked ? n_bytes : n_asked;
    const size_t n_then = n_bytes - n_first < n_rest ? n_bytes - n_first : n_rest;
    const int begins = memcmp(line, half, n_first) == 0 && memcmp(rest, half + n_first, n_then) == 0;
    free(line);
    return begins;
}

// the first key that has another value now; NULL: none has
static inline const char* answers_changed_(const json_t* before, json_t* now) {
    const char* key;
    json_t* value;
    json_object_foreach(now, key, value) {
        const json_t* was = json_object_get(before, key);
        if (!was || !json_equal(was, value)) { return key; }
    }
    return NULL;
}

__attribute__((noreturn))
static inline void answers_refuse_(const char* path, const char* key, const json_t* before, const json_t* now) {
    const char *sum = strstr(key, "_xxh3"), *remedy = "give another name, or remove it";
    char *was = before ? json_dumps(before, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9)) : NULL;
    char* is = json_dumps(now, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    if (sum) {
        options_fail("generate-out", "%s: its answers were made with another %.*s: %s", path, (int)(sum - key), key,
                     remedy);
    }
    options_fail("generate-out", "%s: its answers were made with --%s %.100s, found %.100s: %s", path, key,
                 was ? was : "that nobody noted", is ? is : "", remedy);
}

// settings: {"made_with": {name: number or text, ...}, ...}
static inline void answers_check(const char* path, int has_answers, json_t* settings) {
    char beside[PATH_BYTES];
    json_t* before = answers_settings_(answers_settings_path_(beside, path));
    json_t* now = json_object_get(settings, "made_with");
    if (!has_answers) {
        json_replace(beside, json_incref(settings));
    } else if (!before) {
        options_fail("generate-out", "%s: has answers, but no %s beside it says what made them: give another name, or "
                     "remove it", path, beside);
    }
    const char* changed = has_answers ? answers_changed_(before, now) : NULL;
    if (changed) { answers_refuse_(path, changed, json_object_get(before, changed), json_object_get(now, changed)); }
    json_decref(before);
}
#endif  // LLMC_ANSWERS_FILE_H
