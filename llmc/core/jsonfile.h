/*
JSON files, whole: read with a message that names file and line, written durably with their checksum.
    json_parse_within   bytes to an object: the one way into the JSON parser, for files that anybody may have made
    json_parse_bounded  the same for files that may be large
    json_read           the same from a file, with a message and an exit
    json_read_or_not    from one that may be large, for readers that have another to go on with
    json_need_int       an integer out of an object; json_ints: several, each within its bounds
    json_choice, json_switch, json_number   one of a list of names (choice.h), true or false, a number; or absent
    json_refuse_value   "key": expected one thing, found another
    json_agrees         settings that must have one value or be absent
    json_write          a new file; json_replace: one that others may read at any time; json_text: the text of both
    json_write_doubles  a new file whose numbers are doubles, not floats: json_text_doubles
    json_finite         a number for a file, null where there is none
    json_never_null     called once, before the first JSON of a program
Strict JSON (RFC 8259): one object, UTF-8, no key twice, no NaN or Infinity, integers below 2^63, nothing behind it.
Size, nesting and the number of values are bounded before the parser sees a byte: they bound its heap and its stack.
A mark is one of , : [ {, not in a text; { counts four. jansson takes at most 72 bytes a mark (measured: {} 224, [] 112,
a number 40, a key with its value 140), so that the bounds mean, beside the texts themselves:
    json_read            2 MiB, 2^18 marks: 19 MB. config.json has 2 kB; settings.json has a command line, of which
                         Linux allows 2 MiB, and manifest.json an entry for each file
    json_parse_bounded   100 MB, 2^23 marks: 600 MB. The length is the format's bound on a safetensors header; the
                         largest tokenizer.json (Gemma 3: 33 MB, 262,144 tokens, merges as lists) has 2.2 million marks
    jsonlines.h          1 GiB, 2^20 marks: 75 MB, for a line
Errors: fail_input with file, line or key, what was expected and what was found; json_parse_bounded, json_ints and
        json_agrees return it. fail_run when writing fails, as outfile.h.
*/
#ifndef LLMC_JSONFILE_H
#define LLMC_JSONFILE_H
#include "choice.h"   // choice_find
#include "outfile.h"  // OutFile, FileSum, MappedFile, ErrorText
#include <jansson.h>
#include <math.h>

enum { JSON_MAX_BYTES = 100000000, JSON_MAX_DEPTH = 32, JSON_MAX_MARKS = 1 << 23 };
enum { JSON_READ_BYTES = 2 << 20, JSON_READ_MARKS = 1 << 18 };  // of json_read

// what the bytes of a file may ask of the parser
typedef struct {
    size_t n_bytes;
    int depth, n_marks;
    size_t allows;  // jansson's JSON_ALLOW_NUL, or 0
} JsonBudget;

// ---- reading ----

// offset of the first bracket that is nested too deep, or of the first mark too many, or n_bytes; `why` tells which
static inline size_t json_beyond_(const char* text, size_t n_bytes, const JsonBudget* most, char why[64]) {
    int depth = 0, in_string = 0, n_marks = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        char c = text[i];
        if (c == '"') {
            in_string = !in_string;
        } else if (in_string) {
            i += c == '\\';  // the escaped character cannot end the string
        } else {
            const int opens = c == '{' || c == '[', closes = c == '}' || c == ']';
            depth += opens - closes;
            n_marks += c == '{' ? 4 : opens || c == ',' || c == ':';
            if (depth > most->depth) {
                snprintf(why, 64, "more than %d nested brackets", most->depth);
                return i;
            }
            if (n_marks > most->n_marks) {
                snprintf(why, 64, "more than %d commas, colons and brackets", most->n_marks);
                return i;
            }
        }
    }
    return n_bytes;
}

static inline json_t* json_refuse_(json_error_t* error, int line, size_t position, const char* text) {
    error->line = line;
    error->position = (int)position;
    snprintf(error->text, sizeof error->text, "%s", text);
    return NULL;
}

// An object (a new reference), or NULL with what was found instead, its line and its offset.
static inline json_t* json_parse_within(const char* text, size_t n_bytes, const JsonBudget* most, json_error_t* error) {
    char found[64];
    memset(error, 0, sizeof *error);
    if (n_bytes > most->n_bytes) {
        snprintf(found, sizeof found, "%zu bytes, more than %zu", n_bytes, most->n_bytes);
        return json_refuse_(error, 1, 0, found);
    }
    size_t beyond = json_beyond_(text, n_bytes, most, found);
    if (beyond < n_bytes) {
        int line = 1;
        for (size_t i = 0; i < beyond; i++) { line += text[i] == '\n'; }
        return json_refuse_(error, line, beyond, found);
    }
    json_t* json = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES | most->allows, error);
    if (!json || json_is_object(json)) { return json; }
    json_decref(json);
    return json_refuse_(error, 1, 0, "a list instead of an object {...}");  // strict: there is no other root
}

static inline json_t* json_parse_bounded(const char* text, size_t n_bytes, int max_depth, json_error_t* error) {
    const JsonBudget most = {JSON_MAX_BYTES, max_depth, JSON_MAX_MARKS, 0};
    return json_parse_within(text, n_bytes, &most, error);
}

// NULL: the reason
static inline json_t* json_read_or_not(const char* path, ErrorText* reason) {
    MappedFile file;
    json_error_t error;
    if (!file_map_or_not(&file, path, reason)) { return NULL; }
    json_t* json = json_parse_bounded((const char*)file.bytes, file.n_bytes, JSON_MAX_DEPTH, &error);
    if (!json) { error_set(reason, "line %d: expected JSON, found: %s", error.line, error.text); }
    file_unmap(&file);
    return json;
}

static inline json_t* json_read(const char* path) {
    const JsonBudget most = {JSON_READ_BYTES, JSON_MAX_DEPTH, JSON_READ_MARKS, 0};
    MappedFile file;
    json_error_t error;
    file_map(&file, path);
    json_t* json = json_parse_within((const char*)file.bytes, file.n_bytes, &most, &error);
    const char* other = file_looks_like(file.bytes, file.n_bytes);
    if (!json && other) { fail_input("%s: expected JSON, found %s", path, other); }
    if (!json) { fail_input("%s:%d: expected JSON, found: %s", path, error.line, error.text); }
    file_unmap(&file);
    return json;
}

// ---- values ----

// 0: the reason names the key and what is there
static inline int json_int_(int64_t* out, const json_t* json, const char* key, int64_t low, int64_t high,
                            ErrorText* error) {
    const json_t* value = json_object_get(json, key);
    if (json_is_integer(value) && json_integer_value(value) >= low && json_integer_value(value) <= high) {
        *out = json_integer_value(value);
        return 1;
    }
    char* found = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;
    error_set(error, "\"%s\": expected an integer %lld..%lld, found %.200s", key, (long long)low, (long long)high,
              found ? found : "nothing");
    free(found);
    return 0;
}

// an integer of a JSON object within low..high, or a message that names file and key
static inline int64_t json_need_int(const json_t* json, const char* path, const char* key, int64_t low, int64_t high) {
    int64_t value = 0;
    ErrorText error;
    if (!json_int_(&value, json, key, low, high, &error)) { fail_input("%s: %s", path, error.text); }
    return value;
}

// a size that a model's config.json must have
typedef struct {
    const char* key;
    int* value;
    int low, high;
} JsonInt;

static inline int json_ints(const json_t* json, const JsonInt* sizes, int n, ErrorText* error) {
    for (int i = 0; i < n; i++) {
        int64_t value = 0;
        if (!json_int_(&value, json, sizes[i].key, sizes[i].low, sizes[i].high, error)) { return 0; }
        *sizes[i].value = (int)value;
    }
    return 1;
}

static inline int json_refuse_value(ErrorText* error, const char* key, const char* expected, const json_t* found) {
    char* text = json_dumps(found, JSON_ENCODE_ANY);
    error_set(error, "\"%s\": expected %s, found %.60s", key, expected, text);
    free(text);
    return 0;
}

// the position in `names`; an absent key leaves *value as it is. 0: error says what is wrong
static inline int json_choice(int* value, const json_t* json, const char* key, const char* names, ErrorText* error) {
    const json_t* found = json_object_get(json, key);
    if (!found) { return 1; }
    const int position = json_is_string(found) ? choice_find(names, json_string_value(found)) : -1;
    if (position < 0) { return json_refuse_value(error, key, names, found); }
    *value = position;
    return 1;
}

// true or false; an absent key or null leaves *value as it is. 0: error says what is wrong
static inline int json_switch(int* value, const json_t* json, const char* key, ErrorText* error) {
    const json_t* found = json_object_get(json, key);
    if (!found || json_is_null(found)) { return 1; }
    if (!json_is_boolean(found)) { return json_refuse_value(error, key, "true or false", found); }
    *value = json_is_true(found);
    return 1;
}

// a number within low..high; an absent key or null leaves *value as it is. 0: error says what is wrong
static inline int json_number(double* value, const json_t* json, const char* key, double low, double high,
                              ErrorText* error) {
    const json_t* found = json_object_get(json, key);
    if (!found || json_is_null(found)) { return 1; }
    const double x = json_number_value(found);
    if (!json_is_number(found) || !(x >= low && x <= high)) {
        char range[64];
        snprintf(range, sizeof range, "a number %g..%g", low, high);
        return json_refuse_value(error, key, range, found);
    }
    *value = x;
    return 1;
}

// Settings that would make another model than the trainer's: where `json` has a key of `expected` (whose reference is
// taken), and it is not null, the values must be equal. 0: the reason names the key and both values.
static inline int json_agrees(const json_t* json, json_t* expected, ErrorText* error) {
    const char* key;
    json_t* want;
    int good = 1;
    json_object_foreach(expected, key, want) {
        const json_t* found = json_object_get(json, key);
        int numbers = json_is_number(found) && json_is_number(want);  // 1 and 1.0 are the same setting
        if (!found || json_is_null(found) || json_equal(found, want)) { continue; }
        if (numbers && json_number_value(found) == json_number_value(want)) { continue; }
        char *have_text = json_dumps(found, JSON_ENCODE_ANY), *want_text = json_dumps(want, JSON_ENCODE_ANY);
        good = error_set(error, "\"%s\": this trainer computes %s, found %.200s", key, want_text, have_text);
        free(have_text);
        free(want_text);
        break;
    }
    json_decref(expected);
    return good;
}

// ---- writing ----

// a number; null for NaN and infinity, which JSON cannot say
static inline json_t* json_finite(double x) { return isfinite(x) ? json_real(x) : json_null(); }

// takes the reference
static inline char* json_text_(json_t* json, int digits, const char* what) {
    char* text = json ? json_dumps(json, JSON_INDENT(2) | JSON_REAL_PRECISION((size_t)digits)) : NULL;
    if (!text) { fail_run("%s: no memory for its JSON, or a text in it is not UTF-8", what); }
    size_t n = strlen(text);
    text = (char*)realloc_check(text, n + 2, what);
    strcpy(text + n, "\n");
    json_decref(json);
    return text;
}

// an object as text, two blanks a level, ending in a newline; takes the reference; floats have the digits that read
// back
static inline char* json_text(json_t* json, const char* what) { return json_text_(json, 9, what); }

// the same with doubles that read back: as few digits as that takes, 1e-6 and not 9.9999999999999995e-7
static inline char* json_text_doubles(json_t* json, const char* what) {
    int same = 0;
    char* text = NULL;
    for (int digits = 9; digits <= 17 && !same; digits += digits < 15 ? 6 : 1) {
        free(text);
        text = json_text_(json_incref(json), digits, what);
        json_t* again = json_loads(text, 0, NULL);
        same = json_equal(again, json);
        json_decref(again);
    }
    json_decref(json);
    return text;
}

static inline FileSum json_write_text_(const char* path, char* text) {
    OutFile file;
    outfile_open(&file, path);
    outfile_write(&file, text, strlen(text));
    free(text);
    return outfile_close(&file);
}

// takes the reference
static inline FileSum json_write(const char* path, json_t* json) {
    return json_write_text_(path, json_text(json, path));
}

static inline FileSum json_write_doubles(const char* path, json_t* json) {
    return json_write_text_(path, json_text_doubles(json, path));
}

// a file that others may read at any time: the old one or the new one, never half of one; takes the reference
static inline void json_replace(const char* path, json_t* json) {
    char temporary[PATH_BYTES];
    json_write(temporary_path(temporary, path), json);
    file_publish(temporary, path);
}

// every object of jansson in memory that cannot be refused: a NULL of its own would leave out a key without a word
static inline void* json_malloc_(size_t n_bytes) { return malloc_check(n_bytes, "JSON"); }
static inline void json_never_null(void) { json_set_alloc_funcs(json_malloc_, free); }
#endif  // LLMC_JSONFILE_H
