/*
JSON Lines: one JSON object a line, of which each {"text": "..."} is a document.
    JsonLines lines = {bytes, n_bytes, 0, 0, NULL};
    while ((found = json_lines_next(&lines, &text, &n, &error)) > 0) { ... text[0..n-1] ... }
    if (found < 0) { fail_input("%s:%s", path, error.text); }        // data.jsonl:3: expected ...
json_lines_row gives the whole object of each line instead, in lines.row; it may be asked again behind a line that is
none.
Other keys of an object are passed over, as are blank lines, documents without a character and a byte order mark before
the first line. A text may hold any character, 0 too; half of a surrogate pair is none, and refused.
Cost:   a line is in memory at a time, as the tree that jansson makes of it, beside the text itself. A line may be a
        long book, of at most 1 GiB, but not a million values: its tree takes at most 75 MB beside its texts
        (jsonfile.h).
Errors: by ErrorText, with the number of the line in front; nothing here ends the program but a lack of memory
        (json_never_null).
Source: jsonlines.org; RFC 8259.
*/
#ifndef LLMC_JSONLINES_H
#define LLMC_JSONLINES_H
#include "../core/jsonfile.h"  // json_parse_within, JsonBudget; ErrorText, error_set
#include <ctype.h>

enum { JSON_LINE_BYTES = 1 << 30, JSON_LINE_DEPTH = 128, JSON_LINE_MARKS = 1 << 20 };

typedef struct {
    const unsigned char* bytes;
    size_t n_bytes, at;  // at: of the line that comes next
    long long number;    // of the line before it
    json_t* row;         // that line, which holds the text; freed by the next call
} JsonLines;

// the keys of an object, for a message
static inline void json_lines_keys_(char keys[128], const json_t* row) {
    json_t* object = (json_t*)row;
    size_t used = 0;
    keys[0] = '\0';
    for (void* at = json_object_iter(object); at && used < 100; at = json_object_iter_next(object, at)) {
        const char* key = json_object_iter_key(at);
        used += (size_t)snprintf(keys + used, 128 - used, "%s\"%.20s\"", used ? ", " : "", key);
    }
}

// the object of a line that is no blank one; 0 with the reason
static inline int json_lines_parse_(JsonLines* l, const char* line, size_t n, const char* example, ErrorText* error) {
    const JsonBudget most = {JSON_LINE_BYTES, JSON_LINE_DEPTH, JSON_LINE_MARKS, JSON_ALLOW_NUL};
    json_error_t json_error;
    size_t first = 0;
    while (isspace((unsigned char)line[first])) { first++; }  // it ends, for the line is no blank one
    if (line[first] == '[') {
        return error_set(error, "%lld: expected a JSON object such as %s, found a list: JSON Lines have an object on "
                                "each line, without [, commas and ]", l->number, example);
    }
    l->row = json_parse_within(line, n, &most, &json_error);
    if (l->row) { return 1; }
    return error_set(error, "%lld: expected a JSON object such as %s: %.100s", l->number, example, json_error.text);
}

// has the line's object a text? 0 with the reason
static inline int json_lines_check_(const JsonLines* l, ErrorText* error) {
    char keys[128];
    json_lines_keys_(keys, l->row);
    const json_t* text = json_object_get(l->row, "text");
    if (text && !json_is_string(text)) {
        return error_set(error, "%lld: expected a text as \"text\", found another value", l->number);
    }
    if (!text) {
        return error_set(error, "%lld: expected an object with the key \"text\", found %s", l->number,
                         *keys ? keys : "an empty one");
    }
    return 1;
}

// for one who does not read to the end
static inline void json_lines_close(JsonLines* l) {
    json_decref(l->row);
    l->row = NULL;
}

// the next object: 1, and 0 behind the last; -1 with the reason. example: of such an object, for a message
static inline int json_lines_row(JsonLines* l, const char* example, ErrorText* error) {
    json_lines_close(l);
    if (l->at == 0 && l->n_bytes >= 3 && memcmp(l->bytes, "\xef\xbb\xbf", 3) == 0) { l->at = 3; }  // byte order mark
    while (l->at < l->n_bytes) {
        const char* line = (const char*)l->bytes + l->at;
        const char* end = (const char*)memchr(line, '\n', l->n_bytes - l->at);
        const size_t n = end ? (size_t)(end - line) : l->n_bytes - l->at;
        size_t first = 0;
        l->at += n + (end != NULL);
        l->number++;
        while (first < n && isspace((unsigned char)line[first])) { first++; }
        if (first < n) { return json_lines_parse_(l, line, n, example, error) ? 1 : -1; }
    }
    return 0;
}

// the next document: 1, and 0 behind the last; -1 with the reason
static inline int json_lines_next(JsonLines* l, const char** text, size_t* n_bytes, ErrorText* error) {
    int found;
    while ((found = json_lines_row(l, "{\"text\": \"...\"}", error)) > 0) {
        if (!json_lines_check_(l, error)) {
            json_lines_close(l);
            return -1;
        }
        const json_t* value = json_object_get(l->row, "text");
        *text = json_string_value(value);
        *n_bytes = json_string_length(value);
        if (*n_bytes > 0) { return 1; }
    }
    return found;
}
#endif  // LLMC_JSONLINES_H
