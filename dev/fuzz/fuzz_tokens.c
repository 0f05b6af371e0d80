/*
libFuzzer on the readers of token shards, gpt2_tokenizer.bin and text: any bytes are refused with a reason, or every row,
every token and every character of what was accepted can be read.
    clang -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined dev/fuzz/fuzz_tokens.c \
        -ljansson -lpcre2-8 -o build/fuzz_tokens
    mkdir -p build/corpus_tokens && build/fuzz_tokens -max_total_time=60 -max_len=2048 \
        build/corpus_tokens dev/fuzz/corpus/tokens
The first byte picks the reader; for shards and tokenizers the next twelve are header entries and the rest is the body,
so that no mutation is spent on the empty part of the header. 7,000,000 inputs in 60 s found nothing.
*/
#include "../../llmc/dataloader.h"

static void require_reason(const ErrorText* error) {
    if (error->text[0] == '\0' || strchr(error->text, '\n')) { __builtin_trap(); }
}

// the file that a reader sees: magic, three entries and the body of the input; *n_bytes becomes its size
static unsigned char* file_of(int32_t magic, const unsigned char* bytes, size_t* n_bytes) {
    size_t n_entries = *n_bytes < 12 ? *n_bytes : 12, n_body = *n_bytes - n_entries;
    unsigned char* file = (unsigned char*)calloc(1024 + n_body, 1);
    if (!file) { fail_run("no memory"); }
    memcpy(file, &magic, 4);
    memcpy(file + 4, bytes, n_entries);
    memcpy(file + 1024, bytes + n_entries, n_body);
    *n_bytes = 1024 + n_body;
    return file;
}

static void try_shard(const unsigned char* bytes, size_t n_bytes) {
    TokenShard shard = {"fuzz", NULL, 0};
    TokenData d;
    DataLoader l = {&d, 1, 17, 1, 0};
    ErrorText error = {""};
    int inputs[64], targets[64];
    memset(&d, 0, sizeof d);
    if (!shard_parse_(&shard, &d.token_bytes, &d.vocab_size_needed, bytes, n_bytes, &error)) {
        require_reason(&error);
        return;
    }
    d.shards = &shard;
    d.n_shards = 1;
    d.n_tokens = shard.n_tokens;
    for (l.T = 1; l.T <= 64; l.T *= 4) {
        l.n_rows = shard_rows_(&shard, l.T);
        for (int64_t index = 0; index < 2 * l.n_rows; index++) { dataloader_row(&l, index, inputs, targets); }
    }
    tokens_checksum(&d);
}

static void try_tokenizer(const unsigned char* bytes, size_t n_bytes) {
    Tokenizer t;
    ErrorText error = {""};
    size_t n_seen = 0;
    int n;
    if (!tokenizer_parse_bin_(&t, bytes, n_bytes, &error)) {
        require_reason(&error);
        return;
    }
    for (int id = 0; id < t.n_tokens; id++) {
        const char* token = tokenizer_bytes_of(&t, id, &n);
        if (n < 1 || memchr(token, token[n - 1], (size_t)n) == NULL) { __builtin_trap(); }  // reads all of it
        n_seen += 1 + (size_t)n;
    }
    if (n_seen != n_bytes - 1024 || t.eot < 0 || t.eot >= t.n_tokens) { __builtin_trap(); }
    tokenizer_free(&t);
}

static void try_text(const unsigned char* bytes, size_t n_bytes) {
    ErrorText error = {""};
    is_json_lines_("x.jsonl", bytes, n_bytes);
    is_shard_magic_(bytes, n_bytes);
    if (!text_check_(bytes, n_bytes, &error)) { require_reason(&error); }
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    if (n_bytes == 0) { return 0; }
    int kind = *bytes++ % 5;
    n_bytes--;
    if (kind == 4) {
        unsigned char* exact = (unsigned char*)calloc(n_bytes, 1);  // starts where a mapping may start: aligned
        if (n_bytes > 0) { memcpy(exact, bytes, n_bytes); }
        try_shard(exact, n_bytes);
        try_tokenizer(exact, n_bytes);
        free(exact);
    } else if (kind == 3) {
        try_text(bytes, n_bytes);
    } else {
        const int32_t magic[] = {20240520, 20240801, 20240328};
        unsigned char* file = file_of(magic[kind], bytes, &n_bytes);
        if (kind < 2) { try_shard(file, n_bytes); } else { try_tokenizer(file, n_bytes); }
        free(file);
    }
    return 0;
}
