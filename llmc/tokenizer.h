/*
Tokenizer: text to token ids and back.
    tokenizer_bytes_init   256 tokens, one for each byte, and id 256 = end of text; needs no file, loses nothing
    tokenizer_load_bin     llm.c's gpt2_tokenizer.bin: the bytes of each token, so it decodes but cannot encode
    offset      size   meaning of gpt2_tokenizer.bin, little-endian
    0           4      magic 20240328
    4           4      version 1 or 2
    8           4      number of tokens n
    12          4      id of end of text (version 2; version 1 means 50256)
    16          1008   0
    1024        rest   n times: 1 byte length >= 1, then that many bytes; the file ends with the last
A tokenizer that can encode puts its function into `encode`; everything else here is the same for all kinds.
Errors: fail_input for a file that breaks a rule; encoding with a tokenizer that cannot.
Source: the format of karpathy/llm.c.
*/
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H
#include "fail.h"
#include "mapfile.h"  // MappedFile, file_map, file_unmap, file_looks_like, ErrorText, error_set

typedef struct Tokenizer {
    const char* kind;      // "bytes", "gpt2.bin"
    int n_tokens;          // ids are 0 .. n_tokens-1
    int eot;               // end of text: stands before each document
    unsigned char* bytes;  // of all tokens, one after the other
    uint32_t* starts;      // (n_tokens + 1) token i is bytes[starts[i] .. starts[i+1])
    int cut_anywhere;      // the tokens of a text are those of its pieces, wherever it is cut
    int (*encode)(const struct Tokenizer* t, const char* text, size_t n_bytes,
                  int* tokens);  // tokens: room for n_bytes
} Tokenizer;

static inline int tokenizer_bytes_encode_(const Tokenizer* t, const char* text, size_t n_bytes, int* tokens) {
    (void)t;
    for (size_t i = 0; i < n_bytes; i++) { tokens[i] = (unsigned char)text[i]; }
    return (int)n_bytes;
}

static inline void tokenizer_bytes_init(Tokenizer* t) {
    memset(t, 0, sizeof *t);
    t->kind = "bytes";
    t->n_tokens = 257;
    t->eot = 256;  // stands for no byte
    t->cut_anywhere = 1;
    t->encode = tokenizer_bytes_encode_;
    t->bytes = (unsigned char*)malloc_check(256, "byte tokenizer");
    t->starts = (uint32_t*)malloc_check(258 * sizeof(uint32_t), "byte tokenizer");
    for (int i = 0; i < 258; i++) { t->starts[i] = i < 256 ? (uint32_t)i : 256; }
    for (int i = 0; i < 256; i++) { t->bytes[i] = (unsigned char)i; }
}

static inline void tokenizer_free(Tokenizer* t) {
    free(t->bytes);
    free(t->starts);
    memset(t, 0, sizeof *t);
}

// magic, version, number of tokens and end of text, against each other and the file's size
static inline int tokenizer_bin_header_(Tokenizer* t, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    int32_t header[4];  // magic, version, n_tokens, eot
    const char* other = file_looks_like(bytes, n_bytes);
    if (n_bytes >= sizeof header) { memcpy(header, bytes, sizeof header); }
    if (n_bytes < 1024 || header[0] != 20240328) {
        if (other) { return error_set(error, "expected a tokenizer file (gpt2_tokenizer.bin), found %s", other); }
        if (n_bytes < 1024) {
            return error_set(error, "expected a tokenizer file, a header of 1024 bytes, found %zu bytes", n_bytes);
        }
        return error_set(error, "expected a tokenizer file, magic number 20240328, found %d", header[0]);
    }
    if (header[1] != 1 && header[1] != 2) {
        return error_set(error, "expected tokenizer version 1 or 2, found %d", header[1]);
    }
    int eot = header[1] == 1 ? 50256 : header[3];
    size_t most = (n_bytes - 1024) / 2;  // every token takes at least 2 bytes of the file
    if (header[2] < 1 || (size_t)header[2] > most) {
        return error_set(error, "expected 1..%zu tokens in a file of %zu bytes, found %d in the header", most, n_bytes,
                         header[2]);
    }
    if (eot < 0 || eot >= header[2]) {
        return error_set(error, "end of text is token %d, expected 0..%d", eot, header[2] - 1);
    }
    t->n_tokens = header[2];
    t->eot = eot;
    return 1;
}

// the table that follows the header, into t->bytes and t->starts
static inline int tokenizer_bin_table_(Tokenizer* t, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    size_t at = 1024;
    uint32_t used = 0;
    for (int i = 0; i < t->n_tokens; i++) {
        size_t length = at < n_bytes ? bytes[at] : 0;
        if (length == 0) {
            return error_set(error, "token %d of %d at offset %zu: expected a length of 1..255, found %s", i,
                             t->n_tokens, at, at < n_bytes ? "0" : "the end of the file");
        }
        if (length > n_bytes - at - 1) {
            return error_set(error,
                             "token %d at offset %zu: %zu bytes long, but only %zu follow: the file is cut short, "
                             "copy or download it again", i, at, length, n_bytes - at - 1);
        }
        t->starts[i] = used;
        memcpy(t->bytes + used, bytes + at + 1, length);
        used += (uint32_t)length;
        at += 1 + length;
    }
    t->starts[t->n_tokens] = used;
    if (at != n_bytes) {
        return error_set(error, "%zu bytes follow the last of %d tokens, expected none", n_bytes - at, t->n_tokens);
    }
    return 1;
}

// The whole reader on bytes in memory, without an exit: 1, or 0 with the reason in `error` and nothing left to free.
static inline int tokenizer_parse_bin_(Tokenizer* t, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    memset(t, 0, sizeof *t);
    t->kind = "gpt2.bin";
    if (n_bytes > UINT32_MAX) {
        return error_set(error, "expected a tokenizer file below 4 GiB, found %zu bytes", n_bytes);
    }
    if (!tokenizer_bin_header_(t, bytes, n_bytes, error)) { return 0; }
    t->bytes = (unsigned char*)malloc_check(n_bytes - 1024, "tokenizer");
    t->starts = (uint32_t*)malloc_check(((size_t)t->n_tokens + 1) * sizeof(uint32_t), "tokenizer");
    if (tokenizer_bin_table_(t, bytes, n_bytes, error)) { return 1; }
    tokenizer_free(t);
    return 0;
}

static inline void tokenizer_load_bin(Tokenizer* t, const char* path) {
    MappedFile file;
    ErrorText error;
    file_map(&file, path);
    if (!tokenizer_parse_bin_(t, file.bytes, file.n_bytes, &error)) { fail_input("%s: %s", path, error.text); }
    file_unmap(&file);
}

// what --tokenizer means: "bytes" or a file
static inline void tokenizer_open(Tokenizer* t, const char* name) {
    if (strcmp(name, "bytes") == 0) { tokenizer_bytes_init(t); } else { tokenizer_load_bin(t, name); }
}

// The bytes of a token, not terminated by 0. End of text of the byte tokenizer has none, nor has an id outside the
// vocabulary (a model's padded vocabulary is larger than its tokenizer's).
static inline const char* tokenizer_bytes_of(const Tokenizer* t, int id, int* n_bytes) {
    *n_bytes = 0;
    if (id < 0 || id >= t->n_tokens) { return ""; }
    *n_bytes = (int)(t->starts[id + 1] - t->starts[id]);
    return (const char*)t->bytes + t->starts[id];
}

// bytes of text behind n tokens; end of text is not text
static inline int64_t tokenizer_count_bytes(const Tokenizer* t, const int* tokens, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) {
        int n_bytes;
        tokenizer_bytes_of(t, tokens[i], &n_bytes);
        sum += tokens[i] == t->eot ? 0 : n_bytes;
    }
    return sum;
}

// *tokens = the tokens of a text, to be freed by the caller; returns their number
static inline int tokenizer_encode(const Tokenizer* t, const char* text, size_t n_bytes, int** tokens) {
    if (!t->encode) {
        fail_input("encoding text needs the byte tokenizer in this version (--tokenizer bytes), found %s", t->kind);
    }
    if (n_bytes > INT_MAX) {
        fail_input("a text of %zu bytes is too long to encode in one piece: cut it below 2 GiB", n_bytes);
    }
    *tokens = (int*)malloc_check(n_bytes * sizeof(int), "tokens");
    return t->encode(t, text, n_bytes, *tokens);
}

// Write a token's bytes, as in a sample of generated text. A token of one byte that is a control character other than white
// space is left out: such bytes ring the bell or move the cursor. Bytes from 128 on are parts of UTF-8 characters.
static inline void tokenizer_print_safe(const Tokenizer* t, int id, FILE* out) {
    int n_bytes;
    const char* bytes = tokenizer_bytes_of(t, id, &n_bytes);
    unsigned char c = n_bytes == 1 ? (unsigned char)bytes[0] : ' ';
    int printable = c >= ' ' && c != 127, white = c >= '\t' && c <= '\r';
    if (printable || white) { fwrite(bytes, 1, (size_t)n_bytes, out); }
}
#endif  // LLMC_TOKENIZER_H
