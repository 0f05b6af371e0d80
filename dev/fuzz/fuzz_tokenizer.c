/*
libFuzzer on tokenizer.json: any bytes are refused with one line, or become a tokenizer that encodes and decodes whatever it
is given; every id it gives is one of its own, and a stream of tokens gives the same text as all of them at once.
    clang -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined dev/fuzz/fuzz_tokenizer.c \
        -ljansson -lpcre2-8 -o build/fuzz_tokenizer
    mkdir -p build/corpus_tokenizer && build/fuzz_tokenizer -max_total_time=60 -max_len=8192 -dict=dev/fuzz/tokenizer.dict \
        build/corpus_tokenizer dev/fuzz/corpus/tokenizer
An input is a file, a byte 0, and a text to encode; without the byte 0 a text of our own is used.
*/
#include "../../llmc/tokenizer.h"

static void require(int promise) {
    if (!promise) { __builtin_trap(); }
}

static void try_text(const Tokenizer* t, const char* text, size_t n_bytes, int choices) {
    TokenizerWork w;
    TokenStream stream;
    ByteBuffer streamed = {NULL, 0, 0};
    size_t n_decoded, n_more;
    tokenizer_work_init(&w, t, n_bytes);
    int n = tokenizer_encode_with(t, &w, text, n_bytes, choices);
    for (int i = 0; i < n; i++) { require(w.tokens[i] >= 0 && w.tokens[i] < t->n_tokens); }
    char* decoded = tokenizer_decode(t, w.tokens, n, &n_decoded);
    token_stream_init(&stream, t, 0);
    for (int i = 0; i <= n; i++) {
        const char* more = i < n ? token_stream_put(&stream, w.tokens[i], &n_more) : token_stream_end(&stream, &n_more);
        buffer_append(&streamed, more, n_more);
    }
    require(streamed.n == n_decoded && (n_decoded == 0 || memcmp(streamed.bytes, decoded, n_decoded) == 0));
    require(utf8_valid_prefix((const unsigned char*)decoded, n_decoded) == n_decoded);
    token_stream_free(&stream);
    buffer_free(&streamed);
    free(decoded);
    tokenizer_work_free(&w);
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    const char* own = "Hello the <s> abc\t\xc3\xa9" "e\xcc\x81\xff 123\n\n  \xe4\xb8\xad\xf0\x9f\x98\x80 <|endoftext|>'ll";
    const unsigned char* zero = n_bytes > 0 ? (const unsigned char*)memchr(bytes, 0, n_bytes) : NULL;
    size_t n_file = zero ? (size_t)(zero - bytes) : n_bytes;
    Tokenizer t;
    ErrorText error = {""};
    if (!tokenizer_parse_json_(&t, bytes, n_file, &error)) {
        require(error.text[0] != '\0' && !strchr(error.text, '\n'));
        return 0;
    }
    for (int choices = 0; choices < 4; choices++) {
        try_text(&t, own, strlen(own), choices);
        if (zero) { try_text(&t, (const char*)zero + 1, n_bytes - n_file - 1, choices); }
    }
    tokenizer_free(&t);
    return 0;
}
