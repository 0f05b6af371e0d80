// llmc/text/tokenizer.h as a shared library, for dev/ref/check_tokenizer.py: plain functions that ctypes can call.
#include "llmc/core/fail.h"       // ErrorText, malloc_check
#include "llmc/text/tokenizer.h"  // Tokenizer, tokenizer_parse_json_, tokenizer_encode, tokenizer_decode_with

// NULL: refused, and the reason stands in `reason`
Tokenizer* shared_open(const unsigned char* json, size_t n_bytes, char* reason, size_t reason_size) {
    Tokenizer* t = (Tokenizer*)malloc_check(sizeof *t, "tokenizer");
    ErrorText error;
    error.text[0] = 0;
    if (tokenizer_parse_json_(t, json, n_bytes, &error)) { return t; }
    snprintf(reason, reason_size, "%s", error.text);
    free(t);
    return NULL;
}

void shared_close(Tokenizer* t) {
    tokenizer_free(t);
    free(t);
}

int shared_encode(const Tokenizer* t, const char* text, size_t n_bytes, int** ids) {
    return tokenizer_encode(t, text, n_bytes, ids);
}

char* shared_decode(const Tokenizer* t, const int* ids, int n, int skip_special, size_t* n_bytes) {
    return tokenizer_decode_with(t, ids, n, skip_special, n_bytes);
}

// the byte tokenizer's tokenizer.json, as models are exported with it
void shared_save_bytes(const char* folder) {
    Tokenizer t;
    SavedFiles files;
    files.n = 0;
    tokenizer_bytes_init(&t);
    tokenizer_save(folder, &t, &files);
    tokenizer_free(&t);
}

void shared_free(void* p) { free(p); }
