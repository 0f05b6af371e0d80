/*
How fast the tokenizer encodes: dev/bench/tokenizer.py builds and runs it beside Hugging Face tokenizers.
    bench_tokenizer TOKENIZER ROUNDS FILE...   prints for each file: bytes, tokens, MB/s of the whole text, MB/s line by line
The shortest processor time of all rounds counts: other programs on the machine disturb it least.
*/
#include "../../llmc/core/print.h"  // seconds_now
#include "../../llmc/text/tokenizer.h"

// seconds to encode a text, whole or in lines; the workspace, and so the cache, is new each time
static double seconds_to_encode(const Tokenizer* t, const char* text, size_t n, int by_line, int64_t* n_tokens) {
    TokenizerWork w;
    double start = seconds_now(CLOCK_PROCESS_CPUTIME_ID);
    *n_tokens = 0;
    tokenizer_work_init(&w, t, n);
    for (size_t at = 0; at < n;) {
        const char* newline = by_line ? (const char*)memchr(text + at, '\n', n - at) : NULL;
        size_t length = newline ? (size_t)(newline - text) - at + 1 : n - at;
        *n_tokens += tokenizer_encode_with(t, &w, text + at, length, TOKENIZER_ADDED);
        at += length;
    }
    tokenizer_work_free(&w);
    return seconds_now(CLOCK_PROCESS_CPUTIME_ID) - start;
}

int main(int argc, char** argv) {
    Tokenizer t;
    if (argc < 4) { fail_input("expected TOKENIZER ROUNDS FILE..."); }
    tokenizer_open(&t, argv[1]);
    for (int i = 3; i < argc; i++) {
        MappedFile file;
        double best[2] = {1e30, 1e30};
        int64_t n_tokens[2];
        file_map(&file, argv[i]);
        for (int round = 0; round < 2 * atoi(argv[2]); round++) {
            double seconds = seconds_to_encode(&t, (const char*)file.bytes, file.n_bytes, round % 2, &n_tokens[round % 2]);
            best[round % 2] = seconds < best[round % 2] ? seconds : best[round % 2];
        }
        double megabytes = 1e-6 * (double)file.n_bytes;
        printf("%zu %lld %.2f %.2f\n", file.n_bytes, (long long)n_tokens[0], megabytes / best[0], megabytes / best[1]);
        file_unmap(&file);
    }
    tokenizer_free(&t);
    return 0;
}
