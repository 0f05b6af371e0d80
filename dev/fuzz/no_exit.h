/*
For a fuzz program whose parser stops the process (options): exit() jumps back to the fuzzer instead. Include it before
anything of llmc/, and call the parser inside
    if (setjmp(*fuzz_return()) == 0) { options_parse(...); }
    fuzz_close_files();
What the parser had opened is closed there; what it had on the heap and no table owns would show up as a leak.
*/
#ifndef FUZZ_NO_EXIT_H
#define FUZZ_NO_EXIT_H
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline jmp_buf* fuzz_return(void) {
    static jmp_buf place;
    return &place;
}

__attribute__((noreturn)) static inline void fuzz_exit(int status) { longjmp(*fuzz_return(), status == 0 ? 100 : status); }

// the one file that a parser has open: its bytes are the fuzzer's input, whatever its name is
typedef struct {
    const char* bytes;
    size_t n_bytes;
    FILE* open;
} FuzzFile;

static inline FuzzFile* fuzz_file(void) {
    static FuzzFile file;
    return &file;
}

static inline FILE* fuzz_fopen(const char* path, const char* mode) {
    FuzzFile* f = fuzz_file();
    if (*path == '\0' || f->open || f->n_bytes == 0) { return NULL; }
    return f->open = fmemopen((void*)f->bytes, f->n_bytes, mode);
}

static inline int fuzz_fclose(FILE* file) {
    fuzz_file()->open = NULL;
    return fclose(file);
}

static inline void fuzz_close_files(void) {
    if (fuzz_file()->open) { fuzz_fclose(fuzz_file()->open); }
}

#define exit(status) fuzz_exit(status)
#define fopen(path, mode) fuzz_fopen(path, mode)
#define fclose(file) fuzz_fclose(file)
#endif  // FUZZ_NO_EXIT_H
