/*
Tokens as text that people and scripts write: decimal numbers with blanks (space, tab, line end) between.
    12 0 7
    50256 3
Every number is a token id, 0..2147483646. Anything else is an error that names the line; ids are never wrapped.
Cost:   200 MB of text in a second; 4 bytes of memory a token while reading, half of that afterwards where all ids fit
        into 2 bytes.
Errors: as text, without an exit.
*/
#ifndef LLMC_NUMBERS_H
#define LLMC_NUMBERS_H
#include "../core/print.h"    // progress
#include "../core/mapfile.h"  // file_looks_like, ErrorText, error_set

typedef struct {
    uint32_t* ids;
    int64_t n, capacity;
    uint32_t largest;
    int64_t n_bytes_read, n_bytes_total;  // of all files, for the progress bar
} Numbers;

static inline int numbers_is_blank_(unsigned char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static inline void numbers_add_(Numbers* list, uint32_t id) {
    if (list->n == list->capacity) {
        list->capacity = list->capacity > 0 ? list->capacity + list->capacity / 2 : 1 << 16;
        list->ids = (uint32_t*)realloc_check(list->ids, (size_t)list->capacity * sizeof(uint32_t),
                                             "tokens of the text");
    }
    list->ids[list->n++] = id;
    list->largest = id > list->largest ? id : list->largest;
}

// what is wrong with the word at `at`, with its line
static inline int numbers_error_(const unsigned char* bytes, size_t n_bytes, size_t at, ErrorText* error) {
    const char* other = at == 0 ? file_looks_like(bytes, n_bytes) : NULL;
    size_t n = 0, n_digits = 0;
    int64_t line = 1;
    for (size_t i = 0; i < at; i++) { line += bytes[i] == '\n'; }
    while (at + n < n_bytes && !numbers_is_blank_(bytes[at + n])) { n++; }
    while (n_digits < n && isdigit(bytes[at + n_digits])) { n_digits++; }
    const char* shown = (const char*)bytes + at;
    const char* rest = n > 40 ? "..." : "";
    int n_shown = n > 40 ? 40 : (int)n;
    if (other) { return error_set(error, "1: expected token ids in decimal, found %s", other); }
    if (n_digits == n) {
        return error_set(error, "%lld: expected token ids below 2147483647, found %.*s%s", (long long)line, n_shown,
                         shown, rest);
    }
    if (*shown == '-' && n > 1 && isdigit(bytes[at + 1])) {
        return error_set(error, "%lld: expected token ids of 0 or more, found %.*s%s", (long long)line, n_shown, shown,
                         rest);
    }
    return error_set(error,
                     "%lld: expected token ids in decimal with blanks between, found \"%.*s%s\" (text goes to --train)",
                     (long long)line, n_shown, shown, rest);
}

// appends the numbers of a file's bytes: 1, or 0 with "LINE: reason"
static inline int numbers_parse(Numbers* list, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    size_t at = 0;
    while (1) {
        while (at < n_bytes && numbers_is_blank_(bytes[at])) { at++; }
        if (at == n_bytes) { break; }
        const size_t begin = at;
        uint64_t id = 0;
        for (; at < n_bytes && bytes[at] >= '0' && bytes[at] <= '9' && id < INT_MAX; at++) {
            id = 10 * id + (bytes[at] - '0');
        }
        if (at == begin || id >= INT_MAX || (at < n_bytes && !numbers_is_blank_(bytes[at]))) {
            return numbers_error_(bytes, n_bytes, begin, error);
        }
        numbers_add_(list, (uint32_t)id);
        if (list->n % 65536 == 0) {
            progress("reading token numbers", list->n_bytes_read + (int64_t)at, list->n_bytes_total);
        }
    }
    list->n_bytes_read += (int64_t)n_bytes;
    return 1;
}

// The ids in 2 bytes each where all fit, else in 4; exactly as much memory as they need. The list is empty afterwards.
static inline void* numbers_take(Numbers* list, int* token_bytes) {
    char* bytes = (char*)list->ids;
    *token_bytes = list->largest < 65536 ? 2 : 4;
    // in place: a narrow id never lies behind its wide one
    for (int64_t i = 0; *token_bytes == 2 && i < list->n; i++) {
        uint16_t id = (uint16_t)list->ids[i];
        memcpy(bytes + 2 * i, &id, sizeof id);
    }
    void* tokens = realloc_check(bytes, (size_t)list->n * (size_t)*token_bytes, "tokens of the text");
    memset(list, 0, sizeof *list);
    return tokens;
}
#endif  // LLMC_NUMBERS_H
