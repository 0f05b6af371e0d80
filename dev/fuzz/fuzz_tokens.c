/*
libFuzzer on the readers of token shards, gpt2_tokenizer.bin, text, evaluation records, .gitignore, token ids in decimal and
examples, and on the cutting of batches into documents: any bytes are refused with a reason, or every row, every token and every character of what was
accepted can be read.
    make build/fuzz/fuzz_tokens
    mkdir -p build/fuzz/corpus_tokens && build/fuzz/fuzz_tokens -max_total_time=60 -max_len=2048 \
        build/fuzz/corpus_tokens dev/fuzz/corpus/tokens
The first byte picks the reader; for shards, tokenizers and records the next twelve are header entries and the rest is the body,
so that no mutation is spent on the empty part of the header.
*/
#include "../../llmc/text/dataloader.h"
#include "../../llmc/ops/documents.h"
#include "../../llmc/text/hellaswag.h"

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
    TokenShard shard = {"fuzz", NULL, 0, 0, NULL};
    TokenData d;
    DataLoader l = {&d, 1, 1, ORDER_ROWS, 1, 17, 0};
    ErrorText error = {""};
    int inputs[64], targets[64];
    memset(&d, 0, sizeof d);
    if (!tokens_parse_shard_(&shard, &d.token_bytes, &d.vocab_size_needed, bytes, n_bytes, &error)) {
        require_reason(&error);
        return;
    }
    d.shards = &shard;
    d.n_shards = 1;
    d.n_tokens = shard.n_tokens;
    for (l.T = 1; l.T <= 64; l.T *= 4) {
        l.stride = l.T;
        l.n_rows = dataloader_shard_rows_(&l, &shard);
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
    JsonLines lines = {bytes, n_bytes, 0, 0, NULL};
    const char* document;
    size_t n_document, n_all = 0;
    int found;
    while ((found = json_lines_next(&lines, &document, &n_document, &error)) > 0) {
        n_all += n_document;
        if (n_document == 0 || document[n_document] != '\0') { __builtin_trap(); }
    }
    if (n_all > n_bytes || lines.row) { __builtin_trap(); }  // an escape is longer than what it stands for
    if (found < 0) { require_reason(&error); }
    error.text[0] = '\0';
    tokens_is_shard_(bytes, n_bytes);
    if (!tokens_check_text_(bytes, n_bytes, &error)) { require_reason(&error); }
}

// every row at several T: inside the vocabulary, with a counted target in each; each example gets an answer
static void try_records(const unsigned char* bytes, size_t n_bytes) {
    HellaSwag h;
    ErrorText error = {""};
    int inputs[64], targets[64];
    float losses[64];
    if (!hellaswag_parse_(&h, bytes, n_bytes, &error)) {
        require_reason(&error);
        return;
    }
    for (int T = 1; T <= 64; T *= 4) {
        for (int row = 0; row < 4 * h.n; row++) {
            int n_counted = 0;
            hellaswag_batch(&h, row, 1, T, inputs, targets);
            for (int t = 0; t < T; t++) {
                if (inputs[t] < 0 || inputs[t] >= h.vocab_size_needed || targets[t] >= h.vocab_size_needed) { __builtin_trap(); }
                losses[t] = (float)inputs[t];
                n_counted += targets[t] >= 0;
            }
            if (n_counted == 0) { __builtin_trap(); }
            hellaswag_losses(&h, row, 1, T, targets, losses);
        }
        if (hellaswag_correct(&h, 0, h.n) > h.n) { __builtin_trap(); }
    }
    hellaswag_free_(&h);
}

// rules up to the first NUL, then the path of a file
static void try_ignore(const unsigned char* bytes, size_t n_bytes) {
    IgnoreFile f;
    char path[256] = "/f/";
    size_t n_rules = strnlen((const char*)bytes, n_bytes), n_path = n_bytes - n_rules;
    memset(&f, 0, sizeof f);
    f.n_folder = 2;
    ignore_parse_(&f, bytes, n_rules);
    if (n_path > 1) { memcpy(path + 3, bytes + n_rules + 1, n_path - 1 < 200 ? n_path - 1 : 200); }
    int as_file = ignore_says_(&f, path, 0), as_folder = ignore_says_(&f, path, 1);
    if (as_file < 0 || as_file > 1 || as_folder < 0 || as_folder > 1) { __builtin_trap(); }
    ignore_free_(&f);
}

// the first byte is T, the others are tokens of as many rows as they fill, 0 the end of text
static void try_documents(const unsigned char* bytes, size_t n_bytes) {
    const int T = n_bytes > 0 ? 1 + bytes[0] % 64 : 1, B = n_bytes > 0 ? (int)(n_bytes - 1) / T : 0;
    size_t n = (size_t)B * (size_t)T;
    if (n == 0) { return; }
    int* inputs = (int*)malloc(n * sizeof(int));
    Segment* segments = (Segment*)malloc(n * sizeof(Segment));
    for (size_t i = 0; i < n; i++) { inputs[i] = bytes[1 + i]; }
    int n_segments = documents_segments(segments, inputs, B, T, 0), at = 0;
    for (int k = 0; k < n_segments; k++) {
        int end = segments[k].first + segments[k].T;
        if (segments[k].first != at || end <= at || at / T != (end - 1) / T) { __builtin_trap(); }
        for (at++; at < end; at++) {
            if (inputs[at] == 0) { __builtin_trap(); }
        }
    }
    if ((size_t)at != n) { __builtin_trap(); }
    free(inputs);
    free(segments);
}

// what was accepted is as many ids as there are words, each below 2^31 - 1
static void try_numbers(const unsigned char* bytes, size_t n_bytes) {
    Numbers list;
    ErrorText error = {""};
    int64_t n_words = 0;
    int token_bytes;
    memset(&list, 0, sizeof list);
    for (size_t i = 0; i < n_bytes; i++) { n_words += !numbers_is_blank_(bytes[i]) && (i == 0 || numbers_is_blank_(bytes[i - 1])); }
    if (!numbers_parse(&list, bytes, n_bytes, &error)) {
        require_reason(&error);
        free(list.ids);
        return;
    }
    if (list.n != n_words || list.largest >= INT_MAX) { __builtin_trap(); }
    free(numbers_take(&list, &token_bytes));
}

// every row of what was accepted, in each order
static void try_examples(const unsigned char* bytes, size_t n_bytes) {
    Examples e;
    TokenData d;
    DataLoader l;
    ErrorText error = {""};
    memset(&d, 0, sizeof d);
    if (!examples_parse(&e, bytes, n_bytes, &error)) {
        require_reason(&error);
        return;
    }
    TokenShard shard = {"fuzz", e.inputs, e.n * e.T, 0, e.targets};
    int* row = (int*)malloc(sizeof(int) * 2 * (size_t)e.T);
    d.path = (char*)"fuzz";
    d.shards = &shard;
    d.n_shards = 1;
    d.token_bytes = 4;
    d.n_tokens = shard.n_tokens;
    d.examples_T = e.T;
    d.vocab_size_needed = e.vocab_size_needed;
    d.classes_needed = e.classes_needed;
    for (int order = ORDER_FILE; order <= ORDER_SHARDS; order++) {
        dataloader_init(&l, &d, e.T, (RowOrder)order, 1);
        for (int64_t index = 0; index < l.n_rows; index++) { dataloader_row(&l, index, row, row + e.T); }
        if (l.n_rows != e.n || dataloader_counted(&l, 0, l.n_rows) != e.n_counted) { __builtin_trap(); }
    }
    tokens_checksum(&d);
    free(row);
}

// in a block of exactly its size, which starts where a mapping may start: aligned
static void try_exact(int kind, const unsigned char* bytes, size_t n_bytes) {
    unsigned char* exact = (unsigned char*)calloc(n_bytes, 1);
    if (n_bytes > 0) { memcpy(exact, bytes, n_bytes); }
    if (kind == 3) { try_text(exact, n_bytes); }
    if (kind == 4) { try_shard(exact, n_bytes), try_tokenizer(exact, n_bytes), try_records(exact, n_bytes); }
    if (kind == 6) { try_ignore(exact, n_bytes); }
    if (kind == 7) { try_documents(exact, n_bytes); }
    if (kind == 8) { try_numbers(exact, n_bytes); }
    if (kind == 9) { try_examples(exact, n_bytes); }
    free(exact);
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    if (n_bytes == 0) { return 0; }
    int kind = *bytes++ % 10;
    n_bytes--;
    const int32_t magic[] = {20240520, 20240801, 20240328, 0, 0, 20240522};
    if (kind > 5 || magic[kind] == 0) {
        try_exact(kind, bytes, n_bytes);
        return 0;
    }
    unsigned char* file = file_of(magic[kind], bytes, &n_bytes);
    if (kind < 2) { try_shard(file, n_bytes); }
    if (kind == 2) { try_tokenizer(file, n_bytes); }
    if (kind == 5) { try_records(file, n_bytes); }
    free(file);
    return 0;
}
