/*
Promises of llmc/text/hellaswag.h on records made here: the rows of an example, the accuracy of a model whose losses are
known, and a message for each way in which a file can be wrong.
*/
#include "llmc/core/device.h"
#include "llmc/text/hellaswag.h"
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"

// ---- files for tests ----

typedef struct {
    uint16_t* words;  // header and records
    size_t n;
} EvalFile;

static void put(EvalFile* f, int word) { f->words[f->n++] = (uint16_t)word; }

static void set_header(EvalFile* f, int entry, int32_t value) { memcpy(f->words + 2 * entry, &value, sizeof value); }

static int32_t header_entry(const EvalFile* f, int entry) {
    int32_t value;
    memcpy(&value, f->words + 2 * entry, sizeof value);
    return value;
}

static EvalFile eval_new(void) {
    EvalFile f = {(uint16_t*)new_array(1 << 20, sizeof(uint16_t)), 512};
    set_header(&f, 0, 20240522);
    set_header(&f, 1, 1);
    return f;
}

static void eval_add(EvalFile* f, int label, int n_context, const int* context, const int n_completion[4],
                     const int* completions[4]) {
    size_t start = f->n;
    int index = header_entry(f, 2);
    const int head[6] = {65535, 0, index, label, 4, n_context};
    for (int i = 0; i < 6; i++) { put(f, head[i]); }
    for (int i = 0; i < n_context; i++) { put(f, context[i]); }
    for (int c = 0; c < 4; c++) {
        put(f, n_completion[c]);
        for (int i = 0; i < n_completion[c]; i++) { put(f, completions[c][i]); }
    }
    int n_bytes = (int)(2 * (f->n - start)), longest = header_entry(f, 3);
    f->words[start + 1] = (uint16_t)n_bytes;
    set_header(f, 2, index + 1);
    set_header(f, 3, n_bytes > longest ? n_bytes : longest);
}

// two examples: contexts 10 11 12 and 20, completions of 1..4 tokens, labels 2 and 0
static EvalFile eval_small(void) {
    EvalFile f = eval_new();
    const int first[] = {10, 11, 12}, second[] = {20}, a[] = {30}, b[] = {40, 41}, c[] = {50, 51, 52}, d[] = {60, 61,
                                                                                                              62, 63};
    const int* completions[] = {a, b, c, d};
    const int n_completion[] = {1, 2, 3, 4};
    eval_add(&f, 2, 3, first, n_completion, completions);
    eval_add(&f, 0, 1, second, n_completion, completions);
    return f;
}

enum { VOCAB = 5000 };

// many examples of random lengths and tokens
static EvalFile eval_random(int n) {
    EvalFile f = eval_new();
    uint64_t s = seeded_stream(5);
    for (int e = 0; e < n; e++) {
        int tokens[5][20], lengths[5];
        for (int k = 0; k < 5; k++) {
            lengths[k] = 1 + (int)(xorshift_u32(&s) % 20);
            for (int i = 0; i < 20; i++) { tokens[k][i] = (int)(xorshift_u32(&s) % VOCAB); }
        }
        const int* completions[] = {tokens[1], tokens[2], tokens[3], tokens[4]};
        eval_add(&f, (int)(xorshift_u32(&s) % 4), lengths[0], tokens[0], lengths + 1, completions);
    }
    return f;
}

static void eval_parse(Test* t, HellaSwag* h, const EvalFile* f) {
    ErrorText error = {""};
    check(t, hellaswag_parse_(h, (const unsigned char*)f->words, 2 * f->n, &error), "refused: %s", error.text);
}

// ---- rows ----

static void check_row(Test* t, const HellaSwag* h, int row, int T, const int* inputs, const int* targets) {
    int found_inputs[16], found_targets[16];
    hellaswag_batch(h, row, 1, T, found_inputs, found_targets);
    for (int i = 0; i < T; i++) {
        check(t, found_inputs[i] == inputs[i] && found_targets[i] == targets[i],
              "row %d, T %d, position %d: %d and %d, expected %d and %d", row, T, i, found_inputs[i], found_targets[i],
              inputs[i], targets[i]);
    }
}

static void test_rows(Test* t) {
    EvalFile f = eval_small();
    HellaSwag h;
    eval_parse(t, &h, &f);
    check(t, h.n == 2 && h.longest == 6 && h.vocab_size_needed == 64, "%d examples, longest row %d, vocabulary %d", h.n,
          h.longest, h.vocab_size_needed);
    const int inputs[] = {10, 11, 12, 60, 61, 62, 0, 0}, targets[] = {-1, -1, 60, 61, 62, 63, -1, -1};
    check_row(t, &h, 3, 8, inputs, targets);
    check_row(t, &h, 3, 6, inputs, targets);
    const int one[] = {10, 11, 12, 0, 0}, one_target[] = {-1, -1, 30, -1, -1};
    check_row(t, &h, 0, 5, one, one_target);
    const int second[] = {20, 50, 51, 0}, second_target[] = {50, 51, 52, -1};
    check_row(t, &h, 6, 4, second, second_target);
    const int nothing[] = {0, 0, 0}, no_target[] = {-1, -1, -1};
    check_row(t, &h, 8, 3, nothing, no_target);  // beyond the last
    check_row(t, &h, 1000, 3, nothing, no_target);
    hellaswag_free_(&h);
    free(f.words);
}

static void test_long_rows(Test* t) {
    EvalFile f = eval_small();
    HellaSwag h;
    eval_parse(t, &h, &f);
    const int five[] = {11, 12, 60, 61, 62}, five_targets[] = {-1, 60, 61, 62, 63};
    check_row(t, &h, 3, 5, five, five_targets);
    const int four[] = {12, 60, 61, 62}, four_targets[] = {60, 61, 62, 63};
    check_row(t, &h, 3, 4, four, four_targets);
    const int two[] = {61, 62}, two_targets[] = {62, 63};  // the completion does not fit: its end counts
    check_row(t, &h, 3, 2, two, two_targets);
    const int last[] = {62}, last_target[] = {63}, single[] = {12}, single_target[] = {30};
    check_row(t, &h, 3, 1, last, last_target);
    check_row(t, &h, 0, 1, single, single_target);
    hellaswag_free_(&h);
    free(f.words);
}

// ---- scores ----

// a model that finds each token as hard as this, whatever stands before
static float hardness(int token) { return (float)(seeded_stream((uint64_t)token) >> 40) * 0x1p-24f; }

// all rows in batches of B, with losses where nothing counts that must not matter
static void run_model(HellaSwag* h, int first, int last, int B, int T, float (*loss)(int)) {
    int *inputs = (int*)new_array((size_t)B * T, sizeof(int)), *targets = (int*)new_array((size_t)B * T, sizeof(int));
    float* losses = filled_array((size_t)B * T, NAN);
    for (int row = 4 * first; row < 4 * last; row += B) {
        hellaswag_batch(h, row, B, T, inputs, targets);
        for (int i = 0; i < B * T; i++) { losses[i] = targets[i] < 0 ? NAN : loss(targets[i]); }
        hellaswag_losses(h, row, B, T, targets, losses);
    }
    free(inputs);
    free(targets);
    free(losses);
}

// the answer to one example from its tokens, without rows
static int expected_choice(const HellaSwagExample* e) {
    double best = INFINITY;
    int choice = -1;
    for (int c = 0; c < 4; c++) {
        double sum = 0.0;
        for (int i = 0; i < e->n_completion[c]; i++) { sum += (double)hardness(e->completion[c][i]); }
        if (sum / e->n_completion[c] < best) {
            best = sum / e->n_completion[c];
            choice = c;
        }
    }
    return choice;
}

static void test_accuracy(Test* t) {
    enum { N = 501 };
    const int batches[] = {1, 3, 4, 5, 64, 5000};
    EvalFile f = eval_random(N);
    HellaSwag h;
    int expected = 0;
    eval_parse(t, &h, &f);
    for (int e = 0; e < h.n; e++) { expected += expected_choice(&h.examples[e]) == h.examples[e].label; }
    check(t, expected > N / 8 && expected < N / 2, "%d right answers say little", expected);
    for (int i = 0; i < 6; i++) {
        run_model(&h, 0, h.n, batches[i], i % 2 ? h.longest : 64, hardness);
        for (int e = 0; e < h.n; e++) {
            check(t, hellaswag_choice(&h, e) == expected_choice(&h.examples[e]), "batches of %d: example %d",
                  batches[i], e);
        }
        check(t, hellaswag_correct(&h, 0, h.n) == expected, "batches of %d: %d right, expected %d", batches[i],
              hellaswag_correct(&h, 0, h.n), expected);
        for (int k = 0; k < 4 * N; k++) { h.scores[k] = INFINITY; }
    }
    hellaswag_free_(&h);
    free(f.words);
}

static void test_ranks(Test* t) {
    const int sizes[] = {1, 2, 7, 10, 11};
    for (int i = 0; i < 5; i++) {
        EvalFile f = eval_random(sizes[i]);
        HellaSwag whole, part;
        eval_parse(t, &whole, &f);
        run_model(&whole, 0, whole.n, 4, 40, hardness);
        for (int R = 1; R <= 12; R++) {
            int n = 0;
            for (int rank = 0; rank < R; rank++) {
                const int first = sizes[i] * rank / R, last = sizes[i] * (rank + 1) / R;
                eval_parse(t, &part, &f);
                run_model(&part, first, last, 3, 40, hardness);
                n += hellaswag_correct(&part, first, last);
                hellaswag_free_(&part);
            }
            check(t, n == hellaswag_correct(&whole, 0, whole.n), "%d examples, %d ranks: %d right", sizes[i], R, n);
        }
        hellaswag_free_(&whole);
        free(f.words);
    }
}

static float always_two(int token) { (void)token; return 2.0f; }
static float bad_below_60(int token) { return token < 60 ? NAN : 3.0f; }
static float endless(int token) { return token < 50 ? INFINITY : 1e30f; }

static void test_ties(Test* t) {
    EvalFile f = eval_small();
    HellaSwag h;
    eval_parse(t, &h, &f);
    run_model(&h, 0, 2, 4, 8, always_two);  // of the mean: the sums are 2, 4, 6, 8
    for (int e = 0; e < 2; e++) {
        check(t, hellaswag_choice(&h, e) == 0, "equal means: completion %d", hellaswag_choice(&h, e));
    }
    check(t, h.scores[3] == 2.0 && hellaswag_correct(&h, 0, 2) == 1, "mean %g", h.scores[3]);
    run_model(&h, 0, 2, 4, 8, bad_below_60);
    check(t, hellaswag_choice(&h, 0) == 3, "NaN is not likely: %d", hellaswag_choice(&h, 0));
    run_model(&h, 0, 2, 4, 8, endless);
    check(t, hellaswag_choice(&h, 0) == 2, "infinity is less likely than 1e30: %d", hellaswag_choice(&h, 0));
    check(t, fabs(hellaswag_standard_error(2944, 10000) - 0.0045577) < 1e-7, "%.8f",
          hellaswag_standard_error(2944, 10000));
    check(t, hellaswag_standard_error(0, 5) == 0.0 && hellaswag_standard_error(5, 5) == 0.0, "no error at the ends");
    hellaswag_free_(&h);
    free(f.words);
}

// ---- files that are not right ----

static int refused(const void* bytes, size_t n_bytes, ErrorText* error) {
    HellaSwag h;
    int inputs[6], targets[6];
    unsigned char* exact = heap_copy(bytes, n_bytes);
    int accepted = hellaswag_parse_(&h, exact, n_bytes, error);
    for (int row = 0; accepted && row < 4 * h.n; row++) { hellaswag_batch(&h, row, 1, 6, inputs, targets); }
    if (accepted) { hellaswag_free_(&h); }
    free(exact);
    return !accepted;
}

// one word of the small file changed; the first record has 23 words from 512 on, the second 21 from 535 on
static void test_broken(Test* t) {
    const struct { int at, value; const char* expected; } cases[] = {
        {0, 1, "expected evaluation records, magic number 20240522, found 20185089"},
        {2, 2, "expected version 1 of evaluation records, found 2"},
        {4, 0, "expected 1..2 examples in a file of 1112 bytes, found 0 in the header"},
        {4, 3, "expected 1..2 examples in a file of 1112 bytes, found 3"},
        {5, 0x8000, "found -2147483646 in the header"},
        {4, 1, "42 bytes follow the last of 1 examples, expected none"},
        {6, 29, "expected a longest record of 30 bytes or more, found 29"},
        {6, 44, "example 0 of 2 at offset 1024: expected an even number of 30..44 bytes, found 46"},
        {512, 1, "example 0 of 2 at offset 1024: expected 65535, the start of a record, found 1"},
        {535, 0, "example 1 of 2 at offset 1070: expected 65535, the start of a record, found 0"},
        {513, 28, "expected an even number of 30..46 bytes, found 28"},
        {513, 31, "expected an even number of 30..46 bytes, found 31"},
        {536, 44, "example 1 of 2 at offset 1070: expected an even number of 30..42 bytes, found 44"},
        {536, 40, "example 1 of 2 at offset 1070: expected 1..3 tokens in completion 3, found 4"},
        {536, 65534, "found 65534"},
        {515, 4, "expected a label 0..3, found 4"},
        {516, 5, "expected 4 completions, found 5"},
        {516, 0, "expected 4 completions, found 0"},
        {517, 0, "expected 1..17 tokens in the context, found 0"},
        {517, 18, "expected 1..17 tokens in the context, found 18"},
        {517, 17, "expected 1..0 tokens in completion 0, found 0"},
        {521, 0, "expected 1..13 tokens in completion 0, found 0"},
        {523, 12, "expected 1..11 tokens in completion 1, found 12"},
        {551, 3, "2 bytes follow the last completion, expected none"},
        {555, 65535, "example 1: expected tokens below 65535, the mark of a record's start, found it"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        EvalFile f = eval_small();
        ErrorText error = {""};
        f.words[cases[i].at] = (uint16_t)cases[i].value;
        check(t, refused(f.words, 2 * f.n, &error) && strstr(error.text, cases[i].expected),
              "case %zu: expected \"%s\", found \"%s\"", i, cases[i].expected, error.text);
        free(f.words);
    }
}

// cut anywhere; each byte changed to every other: refused or read, watched by a sanitizer
static void test_damaged(Test* t) {
    EvalFile f = eval_small();
    ErrorText error = {""};
    unsigned char* bytes = (unsigned char*)f.words;
    check(t, !refused(bytes, 2 * f.n, &error), "whole: %s", error.text);
    for (size_t n = 0; n < 2 * f.n; n++) { check(t, refused(bytes, n, &error), "accepted, cut to %zu bytes", n); }
    check(t, refused(bytes, 2 * f.n + 1, &error) && strstr(error.text, "expected an even number of bytes"), "%s",
          error.text);
    check(t, refused(bytes, 2 * f.n + 2, &error) && strstr(error.text, "2 bytes follow the last of 2 examples"), "%s",
          error.text);
    for (size_t i = 0; i < 2 * f.n * 256; i++) {
        size_t at = i / 256;
        unsigned char kept = bytes[at];
        if (at >= 16 && at < 1024) { continue; }
        bytes[at] = (unsigned char)i;
        int bad = refused(bytes, 2 * f.n, &error);
        check(t, bad || at >= 12 || bytes[at] == kept, "header byte %zu = %d is accepted", at, (int)bytes[at]);
        bytes[at] = kept;
    }
    check(t, refused("<!DOCTYPE html>", 15, &error) && strstr(error.text, "found an HTML page"), "%s", error.text);
    check(t, refused("", 0, &error) && strstr(error.text, "a header of 1024 bytes, found a file of 0 bytes"), "%s",
          error.text);
    free(f.words);
}

static void open_eval(void* path) {
    HellaSwag h;
    hellaswag_open(&h, (const char*)path);
    hellaswag_check_vocab(&h, 64, "the model");
    hellaswag_check_vocab(&h, 63, "the model");
}

static void test_open(Test* t) {
    EvalFile f = eval_small();
    TempPath folder = temp_folder(), good = temp_file(&folder, "good.bin", f.words, 2 * f.n);
    TempPath bad = temp_file(&folder, "bad.bin", f.words, 1024);
    HellaSwag h;
    hellaswag_open(&h, good.s);
    run_model(&h, 0, h.n, 4, h.longest, always_two);
    check(t, hellaswag_correct(&h, 0, 2) == 1, "%d right", hellaswag_correct(&h, 0, 2));
    hellaswag_close(&h);
    check_exit(t, "vocabulary", open_eval, good.s, 2,
               "good.bin: expected token ids below 63, the vocabulary of the model, found 63");
    check_exit(t, "malformed", open_eval, bad.s, 2, "bad.bin: expected 1..0 examples in a file of 1024 bytes, found 2");
    check_exit(t, "missing", open_eval, temp_path(&folder, "none.bin").s, 2,
               "none.bin: cannot be opened: No such file");
    temp_remove(&folder);
    free(f.words);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"rows", "are context and completion, of which the completion counts", test_rows},
        {"long rows", "keep their end", test_long_rows},
        {"accuracy", "is exactly that of a model whose losses are known, in batches of any size", test_accuracy},
        {"ranks", "share the examples and add up to the same", test_ranks},
        {"ties", "go to the first completion; NaN is never chosen over a number", test_ties},
        {"broken files", "are refused, each with its own message", test_broken},
        {"damaged files", "are refused when cut anywhere, and never read beyond their end", test_damaged},
        {"open", "reads a file, and stops in one line for what cannot be used", test_open},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
