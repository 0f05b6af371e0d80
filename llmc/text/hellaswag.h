/*
HellaSwag, and every test in its form (MMLU): a context, four completions, of which one is right. A model answers with
the completion whose tokens it finds likeliest on average; its accuracy is the share of right answers (the field's
acc_norm).
    offset   bytes   meaning of the file (llm.c's dev/data), little-endian
    0        4       magic 20240522
    4        4       version 1
    8        4       number of examples n
    12       4       bytes of the longest record
    16       1008    0
    1024     rest    n records; the file ends with the last
A record is made of uint16:
    65535; bytes of this record; index; label 0..3; number of completions, 4;
    tokens in the context, and these; then four times: tokens in the completion, and these
Row 4*e + c is example e with completion c: tokens = context ++ completion, inputs all but the last, targets the token
after each, of which only those of the completion count (the others are -1). Rows are padded on the right, where
causality keeps padding from being seen. A row longer than T keeps its end: the beginning of the context is cut off, and
of a completion longer than T tokens the last T count. Score of a row: mean loss over its counted targets.
In a trainer, any number B of rows at a time (they need no multiple of 4):
    hellaswag_open(&h, path);
    for (int row = 0; row < 4 * h.n; row += B) {
        hellaswag_batch(&h, row, B, T, inputs, targets);
        ... forward: losses (B, T) ...
        hellaswag_losses(&h, row, B, T, targets, losses);
    }
    int correct = hellaswag_correct(&h, 0, h.n);
Order:  losses of a row are added in the order of its positions; ties go to the lowest completion. A row's score depends
        neither on B nor on the rank that computes it.
Errors: fail_input for a file that breaks a rule, with example and offset; fail_run when it changes while in use.
Source: Zellers et al. 2019, arXiv:1905.07830; the format of karpathy/llm.c; doc/data.md
*/
#ifndef LLMC_HELLASWAG_H
#define LLMC_HELLASWAG_H
#include "../core/fail.h"
#include "../core/mapfile.h"  // MappedFile, file_map, file_unmap, file_looks_like, ErrorText, error_set
#include <math.h>
#include <xxhash.h>

enum { N_CHOICES = 4, HELLASWAG_SHORTEST = 30 };  // bytes of a record whose context and completions have one token each

typedef struct {
    int label;  // the right completion
    int n_context, n_completion[N_CHOICES];
    const uint16_t *context, *completion[N_CHOICES];
} HellaSwagExample;

typedef struct {
    MappedFile file;
    HellaSwagExample* examples;
    int n;                  // examples; there are 4*n rows
    int longest;            // inputs of the longest row: a larger T only adds padding
    int vocab_size_needed;  // 1 + largest token id
    uint64_t xxh3;          // of the file, as it was opened
    double* scores;         // (n, 4) mean loss of each row, INFINITY where it is not a number or not known yet
} HellaSwag;

// ---- the file ----

// a list at words[*at]: the number of its tokens, and these; `what` names it in messages
static inline const uint16_t* hellaswag_tokens_(const uint16_t* words, size_t n_words, size_t* at, int* n,
                                                const char* what, ErrorText* error) {
    size_t left = n_words - *at;
    *n = left > 0 ? words[*at] : 0;
    if (*n < 1 || (size_t)*n > left - 1) {
        error_set(error, "expected 1..%zu tokens in %s, found %d", left > 0 ? left - 1 : 0, what, *n);
        return NULL;
    }
    const uint16_t* tokens = words + *at + 1;
    *at += 1 + (size_t)*n;
    return tokens;
}

// one record of n_words, whose first two are checked already
static inline int hellaswag_record_(HellaSwagExample* e, const uint16_t* words, size_t n_words, ErrorText* error) {
    const char* names[] = {"completion 0", "completion 1", "completion 2", "completion 3"};
    size_t at = 5;
    e->label = words[3];
    if (e->label >= N_CHOICES) { return error_set(error, "expected a label 0..3, found %d", e->label); }
    if (words[4] != N_CHOICES) { return error_set(error, "expected 4 completions, found %d", words[4]); }
    e->context = hellaswag_tokens_(words, n_words, &at, &e->n_context, "the context", error);
    if (!e->context) { return 0; }
    for (int c = 0; c < N_CHOICES; c++) {
        e->completion[c] = hellaswag_tokens_(words, n_words, &at, &e->n_completion[c], names[c], error);
        if (!e->completion[c]) { return 0; }
    }
    return at == n_words || error_set(error, "%zu bytes follow the last completion, expected none", 2 * (n_words - at));
}

// bytes of the record at `words`, or 0 with the reason; `left` bytes are in the file, the header allows `longest`
static inline size_t hellaswag_size_(const uint16_t* words, size_t left, size_t longest, ErrorText* error) {
    size_t n_bytes = left >= HELLASWAG_SHORTEST ? words[1] : 0, most = left < longest ? left : longest;
    if (left < HELLASWAG_SHORTEST) {
        error_set(error, "expected a record, found the last %zu bytes of the file", left);
    } else if (words[0] != 65535) {
        error_set(error, "expected 65535, the start of a record, found %d", words[0]);
    } else if (n_bytes < HELLASWAG_SHORTEST || n_bytes > most || n_bytes % 2 != 0) {
        error_set(error, "expected an even number of %d..%zu bytes, found %zu", HELLASWAG_SHORTEST, most, n_bytes);
    } else {
        return n_bytes;
    }
    return 0;
}

// all records; `longest` is what the header says of their bytes
static inline int hellaswag_records_(HellaSwag* h, const uint16_t* words, size_t n_words, size_t longest,
                                     ErrorText* error) {
    size_t at = 0;
    for (int i = 0; i < h->n; i++) {
        ErrorText why;
        size_t n_bytes = hellaswag_size_(words + at, 2 * (n_words - at), longest, &why);
        if (n_bytes == 0 || !hellaswag_record_(&h->examples[i], words + at, n_bytes / 2, &why)) {
            return error_set(error, "example %d of %d at offset %zu: %s", i, h->n, 1024 + 2 * at, why.text);
        }
        at += n_bytes / 2;
    }
    return at == n_words ||
           error_set(error, "%zu bytes follow the last of %d examples, expected none", 2 * (n_words - at), h->n);
}

static inline int hellaswag_token_(const HellaSwagExample* e, int c, int i) {
    return i < e->n_context ? e->context[i] : e->completion[c][i - e->n_context];
}

// longest row and largest token
static inline int hellaswag_measure_(HellaSwag* h, ErrorText* error) {
    for (int row = 0; row < h->n * N_CHOICES; row++) {
        const HellaSwagExample* e = &h->examples[row / N_CHOICES];
        const int c = row % N_CHOICES, n_tokens = e->n_context + e->n_completion[c];
        h->longest = n_tokens - 1 > h->longest ? n_tokens - 1 : h->longest;
        for (int i = 0; i < n_tokens; i++) {
            int token = hellaswag_token_(e, c, i);
            h->vocab_size_needed = token >= h->vocab_size_needed ? token + 1 : h->vocab_size_needed;
        }
        if (h->vocab_size_needed > 65535) {
            return error_set(error, "example %d: expected tokens below 65535, the mark of a record's start, found it",
                             row / N_CHOICES);
        }
    }
    return 1;
}

static inline void hellaswag_free_(HellaSwag* h) {
    free(h->examples);
    free(h->scores);
    h->examples = NULL;
    h->scores = NULL;
}

// The whole reader on bytes (2-aligned) in memory, without an exit: 1, or 0 with the reason and nothing left to free.
static inline int hellaswag_parse_(HellaSwag* h, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    int32_t header[4] = {0, 0, 0, 0};  // magic, version, examples, longest
    const char* other = file_looks_like(bytes, n_bytes);
    memset(h, 0, sizeof *h);
    if (n_bytes >= 1024) { memcpy(header, bytes, sizeof header); }
    if (header[0] != 20240522) {
        if (other) { return error_set(error, "expected evaluation records (hellaswag_val.bin), found %s", other); }
        if (n_bytes > 0 && bytes[0] == '{') {
            return error_set(error,
                             "expected evaluation records, found JSON: dev/data/hellaswag.py --input makes records of "
                             "it");
        }
        if (n_bytes < 1024) {
            return error_set(error, "expected evaluation records, a header of 1024 bytes, found a file of %zu bytes",
                             n_bytes);
        }
        return error_set(error, "expected evaluation records, magic number 20240522, found %d", header[0]);
    }
    if (header[1] != 1) { return error_set(error, "expected version 1 of evaluation records, found %d", header[1]); }
    size_t most = (n_bytes - 1024) / HELLASWAG_SHORTEST;
    if (most > INT_MAX / N_CHOICES) { most = INT_MAX / N_CHOICES; }  // rows are counted by an int
    if (header[2] < 1 || (size_t)header[2] > most) {
        return error_set(error, "expected 1..%zu examples in a file of %zu bytes, found %d in the header", most,
                         n_bytes, header[2]);
    }
    if (header[3] < HELLASWAG_SHORTEST) {
        return error_set(error, "expected a longest record of %d bytes or more, found %d in the header",
                         HELLASWAG_SHORTEST, header[3]);
    }
    if (n_bytes % 2 != 0) { return error_set(error, "expected an even number of bytes, found a file of %zu", n_bytes); }
    h->n = header[2];
    h->examples = (HellaSwagExample*)malloc_check((size_t)h->n * sizeof(HellaSwagExample), "examples");
    h->scores = (double*)malloc_check((size_t)h->n * N_CHOICES * sizeof(double), "scores of the examples");
    for (size_t i = 0; i < (size_t)h->n * N_CHOICES; i++) { h->scores[i] = INFINITY; }
    const uint16_t* words = (const uint16_t*)(bytes + 1024);
    if (hellaswag_records_(h, words, (n_bytes - 1024) / 2, (size_t)header[3], error) && hellaswag_measure_(h, error)) {
        return 1;
    }
    hellaswag_free_(h);
    return 0;
}

static inline void hellaswag_open(HellaSwag* h, const char* path) {
    MappedFile file;
    ErrorText error;
    file_map(&file, path);
    if (!hellaswag_parse_(h, file.bytes, file.n_bytes, &error)) { fail_input("%s: %s", path, error.text); }
    h->file = file;
    h->xxh3 = XXH3_64bits(file.bytes, file.n_bytes);
}

static inline void hellaswag_close(HellaSwag* h) {
    hellaswag_free_(h);
    file_unmap(&h->file);
}

// stop unless every token id is below vocab_size; `what` says whose that is ("the model")
static inline void hellaswag_check_vocab(const HellaSwag* h, int vocab_size, const char* what) {
    if (h->vocab_size_needed > vocab_size) {
        fail_input("%s: expected token ids below %d, the vocabulary of %s, found %d: make it with the model's "
                   "tokenizer", h->file.path, vocab_size, what, h->vocab_size_needed - 1);
    }
}

// ---- rows and scores ----

// every token was seen when the file was opened; it is mapped, and somebody may have written to it since
static inline void hellaswag_check_row_(const HellaSwag* h, int row, const int* inputs, const int* targets, int T) {
    int largest = 0;
    for (int t = 0; t < T; t++) {
        largest = inputs[t] > largest ? inputs[t] : largest;
        largest = targets[t] > largest ? targets[t] : largest;
    }
    if (largest >= h->vocab_size_needed) {
        fail_run("%s: changed while in use: example %d has token %d after a check that found ids below %d",
                 h->file.path, row / N_CHOICES, largest, h->vocab_size_needed);
    }
}

// rows first .. first+B-1 as inputs and targets (B, T); rows beyond the last are padding alone
static inline void hellaswag_batch(const HellaSwag* h, int first, int B, int T, int* inputs, int* targets) {
    for (int64_t b = 0; b < B; b++) {
        const int64_t row = first + b;
        const int inside = row < N_CHOICES * h->n, c = (int)(row % N_CHOICES);
        const HellaSwagExample* e = &h->examples[inside ? row / N_CHOICES : 0];
        const int n_tokens = inside ? e->n_context + e->n_completion[c] : 0,
                  cut = n_tokens > T + 1 ? n_tokens - (T + 1) : 0;
        for (int t = 0; t < T; t++) {
            int next = cut + t + 1, padding = next >= n_tokens;
            inputs[b * T + t] = padding ? 0 : hellaswag_token_(e, c, next - 1);
            targets[b * T + t] = padding || next < e->n_context ? -1 : hellaswag_token_(e, c, next);
        }
        hellaswag_check_row_(h, (int)row, inputs + b * T, targets + b * T, T);
    }
}

// takes the losses (B, T) of the batch that hellaswag_batch made
static inline void hellaswag_losses(HellaSwag* h, int first, int B, int T, const int* targets, const float* losses) {
    for (int64_t b = 0; b < B && first + b < N_CHOICES * h->n; b++) {
        double sum = 0.0;
        int n_counted = 0;
        for (int64_t i = b * T; i < (b + 1) * T; i++) {
            sum += targets[i] < 0 ? 0.0 : (double)losses[i];
            n_counted += targets[i] >= 0;
        }
        double score = sum / n_counted;  // each row counts one at least
        h->scores[first + b] = isnan(score) ? INFINITY : score;
    }
}

// the completion that the scores choose for an example
static inline int hellaswag_choice(const HellaSwag* h, int example) {
    const double* scores = h->scores + (size_t)example * N_CHOICES;
    int best = 0;
    for (int c = 1; c < N_CHOICES; c++) { best = scores[c] < scores[best] ? c : best; }
    return best;
}

// right answers among examples first .. last-1; over ranks these numbers add
static inline int hellaswag_correct(const HellaSwag* h, int first, int last) {
    int n = 0;
    for (int i = first; i < last; i++) { n += hellaswag_choice(h, i) == h->examples[i].label; }
    return n;
}

// standard error of the accuracy correct / n: sqrt(a (1-a) / n)
static inline double hellaswag_standard_error(int correct, int n) {
    double accuracy = (double)correct / n;
    return sqrt(accuracy * (1.0 - accuracy) / n);
}
#endif  // LLMC_HELLASWAG_H
