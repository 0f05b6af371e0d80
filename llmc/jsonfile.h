/*
JSON files, whole: read with a message that names file and line, written durably with their checksum.
*/
#ifndef LLMC_JSONFILE_H
#define LLMC_JSONFILE_H
#include "outfile.h"  // OutFile, FileSum
#include <jansson.h>

static inline json_t* json_read(const char* path) {
    json_error_t error;
    if (access(path, R_OK) != 0) { fail_input("%s: cannot be opened: %s", path, strerror(errno)); }
    json_t* json = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!json) { fail_input("%s:%d: expected JSON, found: %s", path, error.line, error.text); }
    if (!json_is_object(json)) { fail_input("%s: expected a JSON object {...}", path); }
    return json;
}

// an object as text, two blanks a level, ending in a newline; takes the reference; floats have the digits that read back
static inline char* json_text(json_t* json, const char* what) {
    char* text = json ? json_dumps(json, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) : NULL;
    if (!text) { fail_run("%s: no memory for its JSON, or a text in it is not UTF-8", what); }
    size_t n = strlen(text);
    text = (char*)realloc_check(text, n + 2, what);
    strcpy(text + n, "\n");
    json_decref(json);
    return text;
}

// takes the reference
static inline FileSum json_write(const char* path, json_t* json) {
    OutFile file;
    char* text = json_text(json, path);
    outfile_open(&file, path);
    outfile_write(&file, text, strlen(text));
    free(text);
    return outfile_close(&file);
}

// a file that others may read at any time: the old one or the new one, never half of one; takes the reference
static inline void json_replace(const char* path, json_t* json) {
    char temporary[PATH_BYTES];
    if (snprintf(temporary, sizeof temporary, "%s.tmp", path) >= PATH_BYTES) { fail_input("%s: this path is too long", path); }
    json_write(temporary, json);
    if (rename(temporary, path) != 0) { fail_run("%s: cannot be renamed to %s: %s", temporary, path, strerror(errno)); }
    parent_sync(path);
}

// every object of jansson in memory that cannot be refused: a NULL of its own would leave out a key without a word
static inline void* json_malloc_(size_t n_bytes) { return malloc_check(n_bytes, "JSON"); }
static inline void json_never_null(void) { json_set_alloc_funcs(json_malloc_, free); }

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
#endif  // LLMC_JSONFILE_H
