/*
libFuzzer on the options: any command line and any --args file gives values within their ranges, or one
line and status 2; what was accepted can be kept as JSON and read back to the same values.
    make build/fuzz/fuzz_options
    mkdir -p build/fuzz/corpus_options && build/fuzz/fuzz_options -max_total_time=60 -max_len=512 -close_fd_mask=3 \
        -dict=dev/fuzz/options.dict build/fuzz/corpus_options dev/fuzz/corpus/options
Words are separated by 0; what follows the first byte 1 is the content of every --args file. -close_fd_mask=3 drops
the messages and --help. The table has a row of each kind, not the fifty of a trainer: every run sets all defaults.
*/
#include "no_exit.h"
#include "llmc/options.h"

enum { MAX_WORDS = 64, N_ROWS = 7 };

typedef struct {
    int shuffle, batch_size, seed, steps;
    float lr;
    const char *train, *schedule;
} Values;

static void rows(Option table[N_ROWS], Values* o) {
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
}

// every number lies in its range, every text is there
static void check_values(const Option* table, int n) {
    for (int i = 0; i < n; i++) {
        const Option* o = &table[i];
        if (option_is_text_(o) && !*(const char**)o->value) { __builtin_trap(); }
        if (option_is_text_(o)) { continue; }
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
    for (int i = 0; i < n; i++) { table[i].given = 0; }
    options_from_json(table, n, read);
    json_t* after = options_to_json(table, n);
    if (!json_equal(before, after)) { __builtin_trap(); }
    json_decref(before);
    json_decref(read);
    json_decref(after);
    free(text);
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    static Option table[N_ROWS];  // static: what is kept over a longjmp
    static Values values;
    static char* text;
    char* words[MAX_WORDS + 1] = {(char*)"fuzz"};
    int n_words = 1;
    text = (char*)calloc(n_bytes + 1, 1);
    if (n_bytes > 0) { memcpy(text, bytes, n_bytes); }
    char* file = (char*)memchr(text, 1, n_bytes);
    if (file) { *file++ = '\0'; }
    fuzz_file()->bytes = file;
    fuzz_file()->n_bytes = file ? n_bytes - (size_t)(file - text) : 0;
    for (char* word = text; word < (file ? file : text + n_bytes) && n_words < MAX_WORDS; word += strlen(word) + 1) {
        words[n_words++] = word;
    }
    rows(table, &values);
    if (setjmp(*fuzz_return()) == 0) {
        options_parse(table, N_ROWS, n_words, words, "fuzz");
        check_values(table, N_ROWS);
        check_round_trip(table, N_ROWS);
    }
    fuzz_close_files();
    options_free(table, N_ROWS);
    free(text);
    return 0;
}
