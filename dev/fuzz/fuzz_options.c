/*
libFuzzer on the options: any command line and any --args file gives values within their ranges, or one
line and status 2; what was accepted can be kept as JSON and read back to the same values, and gives a plan of steps.
    make build/fuzz/fuzz_options
    mkdir -p build/fuzz/corpus_options && build/fuzz/fuzz_options -max_total_time=60 -max_len=512 -close_fd_mask=3 \
        -dict=dev/fuzz/options.dict build/fuzz/corpus_options dev/fuzz/corpus/options
Words are separated by 0; what follows the first byte 1 is the content of every --args file. The first byte of all picks
the table: 2 the trainers' own, 3 a small one for tools that take files; others (and the words begin with it) the small
one. 4 is no command line but the options and the state of a checkpoint's manifest.json. A word's first byte 128 + i stands for "--" and the name of row i, so that not most words are unknown options.
-close_fd_mask=3 drops the messages and --help.
*/
#define NDEBUG  // that no spelling stands twice in a table is checked at every start of a trainer, and slow
#include "no_exit.h"
#include "llmc/run/run_options.h"  // run_options, run_check_sources, run_leaves, run_plan_steps; options.h
#include "llmc/run/state.h"        // run_state_from_json, run_state_to_json
#include <sanitizer/lsan_interface.h>

enum { MAX_WORDS = 64, N_ROWS = 7, TRAINER = 2, TOOL = 3, MANIFEST = 4 };

typedef struct {
    int shuffle, batch_size, seed, steps, schedule;
    float lr;
    const char* train;
} Values;

static int small_table(Option* table, Values* o) {
    const Option all[N_ROWS] = {
        {"data", "train", "-i --input", OPTION_TEXT, &o->train, "", 0, 0, "PATH", "a text", 0},
        {"data", "shuffle", "", OPTION_SWITCH, &o->shuffle, "1", 0, 0, "0|1", "a switch", 0},
        {"data", "batch-size", "-b", OPTION_INT, &o->batch_size, "4", 1, 65536, "N", "an integer with both ends", 0},
        {"data", "seed", "", OPTION_INT, &o->seed, "42", INT_MIN, INT_MAX, "N", "any integer", 0},
        {"run", "steps", "-x", OPTION_INT, &o->steps, "0", 0, INT_MAX, "N", "an integer with one end", 0},
        {"run", "lr", "-l", OPTION_FLOAT, &o->lr, "3e-4", 0, 0.1, "F", "a number", 0},
        {"run", "schedule", "-k", OPTION_CHOICE, &o->schedule, "cosine", 0, 0, "constant|linear|cosine|wsd", "a choice", 0},
    };
    memcpy(table, all, sizeof all);
    return N_ROWS;
}

// every number lies in its range, every text is there
static void check_values(const Option* table, int n) {
    for (int i = 0; i < n; i++) {
        const Option* o = &table[i];
        if (o->type == OPTION_TEXT && !*(const char**)o->value) { __builtin_trap(); }
        if (o->type == OPTION_CHOICE && choice_find(o->takes, choice_name(o->takes, *(int*)o->value).s) != *(int*)o->value) { __builtin_trap(); }
        if (o->type == OPTION_TEXT || o->type == OPTION_CHOICE) { continue; }
        if (o->type == OPTION_AMOUNT && ((const Amount*)o->value)->percent > 0.0f) { continue; }
        int is_float = o->type == OPTION_FLOAT, is_switch = o->type == OPTION_SWITCH;
        double x = is_float ? (double)*(float*)o->value : *(int*)o->value;
        double low = is_switch ? 0.0 : is_float ? (double)(float)o->low : o->low;
        double high = is_switch ? 1.0 : is_float ? (double)(float)o->high : o->high;
        if (!(x >= low && x <= high)) { __builtin_trap(); }
    }
}

// settings of a checkpoint give the same values back
static void check_round_trip(Option* table, int n) {
    json_t* before = options_to_json(table, n);
    char* text = json_dumps(before, JSON_REAL_PRECISION(9));
    json_t* read = json_loads(text, 0, NULL);
    for (int i = 0; i < n; i++) { option_mark_(&table[i], 0); }
    options_from_json(table, n, read);
    json_t* after = options_to_json(table, n);
    if (!json_equal(before, after)) { __builtin_trap(); }
    json_decref(before);
    json_decref(read);
    json_decref(after);
    free(text);
}

// what a trainer does next with its options
static void try_plan(Option* table, int n, RunOptions* o) {
    const int T = o->seq_len > 0 ? o->seq_len : 1024;
    run_check_sources(table, n, o, 0);
    int n_leaves = run_leaves(table, n, o, T);
    if (n_leaves < 1 || (o->batch_tokens > 0 && (int64_t)n_leaves * o->batch_size * T != o->batch_tokens)) { __builtin_trap(); }
    run_plan_steps(o, INT64_MAX / 2, n_leaves);
    const int horizon = o->lr_horizon > 0 ? o->lr_horizon : o->steps;
    if (o->steps < 1 || amount_of(o->warmup, horizon) >= o->steps) { __builtin_trap(); }
}

// words with the names of rows put in; the caller frees them
static void name_rows(const Option* table, int n, int n_words, char** words) {
    for (int i = 1; i < n_words; i++) {
        int row = (unsigned char)words[i][0] - 128;
        const char* name = row >= 0 ? table[row % n].name : "";
        char* word = (char*)malloc_check(strlen(name) + strlen(words[i]) + 3, "word");
        sprintf(word, "%s%s%s", row >= 0 ? "--" : "", name, words[i] + (row >= 0));
        words[i] = word;
    }
}

static void try_words(int kind, int n_words, char** words) {
    static Option table[MAX_OPTIONS];  // static: what is kept over a longjmp
    static Values values;
    static RunOptions run;
    static const char* files[MAX_WORDS + 1];
    static int n;
    n = kind == TRAINER ? run_options(table, &run, "presets") : small_table(table, &values);
    name_rows(table, n, n_words, words);
    if (setjmp(*fuzz_return()) == 0) {
        OptionWords others = {"FILE...", files, 0};
        options_parse_words(table, n, kind == TOOL ? &others : NULL, n_words, words, "fuzz");
        if (others.n >= n_words) { __builtin_trap(); }
        check_values(table, n);
        check_round_trip(table, n);
        if (kind == TRAINER) { try_plan(table, n, &run); }
    }
    fuzz_close_files();
    options_free(table, n);
    for (int i = 1; i < n_words; i++) { free(words[i]); }
}

// what a checkpoint brings back; what a refusal leaves on the heap is no leak, for the program ends there
static void try_manifest(const char* text, size_t n_bytes) {
    static Option table[MAX_OPTIONS];
    static RunOptions run;
    static json_t* manifest;
    static int n;
    json_error_t error;
    n = run_options(table, &run, "presets");
    options_defaults_(table, n);
    __lsan_disable();
    manifest = json_parse_bounded(text, n_bytes, JSON_MAX_DEPTH, &error);
    if (manifest && setjmp(*fuzz_return()) == 0) {
        options_from_json(table, n, json_object_get(manifest, "options"));
        check_values(table, n);
        RunState s = run_state_from_json(json_object_get(manifest, "state"), "fuzz");
        if (s.updates > s.step || s.rows < 0 || s.tokens < 0) { __builtin_trap(); }
        is_outlier(&s.losses, 1.0f, 3.0f);
        json_decref(run_state_to_json(&s));
    }
    json_decref(manifest);
    options_free(table, n);
    __lsan_enable();
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    failure_()->status = 0;  // nothing has failed yet: the first message of each input is made
    char* words[MAX_WORDS + 1] = {(char*)"fuzz"};
    int n_words = 1, kind = n_bytes > 0 ? bytes[0] : 0, is_kind = kind == TRAINER || kind == TOOL || kind == MANIFEST;
    bytes += is_kind;
    n_bytes -= (size_t)is_kind;
    char* text = (char*)calloc(n_bytes + 1, 1);
    if (n_bytes > 0) { memcpy(text, bytes, n_bytes); }
    if (kind == MANIFEST) { try_manifest(text, n_bytes); }
    char* file = (char*)memchr(text, 1, n_bytes);
    if (file) { *file++ = '\0'; }
    fuzz_file()->bytes = file;
    fuzz_file()->n_bytes = file ? n_bytes - (size_t)(file - text) : 0;
    for (char* word = text; word < (file ? file : text + n_bytes) && n_words < MAX_WORDS; word += strlen(word) + 1) {
        words[n_words++] = word;
    }
    if (kind != MANIFEST) { try_words(kind, n_words, words); }
    free(text);
    return 0;
}
