/*
How a program of this project stops: one clear line on stderr, then an exit status that says whose fault it was.
    fail_input  status 2: what the user gave is wrong (option, file, data); nothing was changed
    fail_run    status 1: the run could not go on (disk, memory, non-finite numbers, lost rank)
    warn_line   the same line, and the program goes on
A message says what, where, expected, found and, where there is one, the remedy; no newline, no "Error:" in front.
    train_gpt2: --batch-size: expected an integer 1..65536, found "4x"
`assert` stays for our own mistakes; anything a user typed or a file contained comes here.
*/
#ifndef LLMC_FAIL_H
#define LLMC_FAIL_H
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C"
#else
extern
#endif
char* program_invocation_short_name;  // the C library's; declared here, for errno.h hides it when included before us

// control characters, which could break a line or drive a terminal, become "?"
static inline void plain_text(char* text) {
    for (; *text; text++) { *text = (unsigned char)*text < ' ' || *text == 127 ? '?' : *text; }
}

static inline void fail_line_(const char* format, va_list args) {
    char line[4096];
    vsnprintf(line, sizeof line, format, args);
    plain_text(line);
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, line);
}

__attribute__((noreturn, format(printf, 1, 2)))
static inline void fail_input(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fail_line_(format, args);
    va_end(args);
    exit(2);
}

__attribute__((noreturn, format(printf, 1, 2)))
static inline void fail_run(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fail_line_(format, args);
    va_end(args);
    exit(1);
}

__attribute__((format(printf, 1, 2)))
static inline void warn_line(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fail_line_(format, args);
    va_end(args);
}

// malloc that cannot return NULL; `what` names the thing in the message ("activations")
static inline void* malloc_check(size_t n_bytes, const char* what) {
    void* p = malloc(n_bytes ? n_bytes : 1);
    if (!p) { fail_run("%s: no memory for %zu bytes", what, n_bytes); }
    return p;
}

// realloc of the same kind, for lists that grow
static inline void* realloc_check(void* old, size_t n_bytes, const char* what) {
    void* p = realloc(old, n_bytes ? n_bytes : 1);
    if (!p) { fail_run("%s: no memory for %zu bytes", what, n_bytes); }
    return p;
}

// a copy of a string on the heap
static inline char* string_copy(const char* s) {
    size_t n_bytes = strlen(s) + 1;
    return (char*)memcpy(malloc_check(n_bytes, "string"), s, n_bytes);
}

static inline int ends_with(const char* text, const char* end) {
    size_t n = strlen(text), n_end = strlen(end);
    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}
#endif  // LLMC_FAIL_H
