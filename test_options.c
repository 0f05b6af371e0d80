/*
Promises of llmc/core/options.h: what is accepted and what it becomes, every wrong option with its message, --args
files, --help, the settings box, and settings that go through JSON without losing a bit.
    cc -std=gnu11 -O2 test_options.c -o build/test_options -ljansson -lm && build/test_options
*/
#include "llmc/core/options.h"  // everything under test
#include "llmc/test/test.h"     // check, check_exit, test_main

typedef struct {
    int batch_size, steps, offset, shuffle, resume, schedule, head;
    float lr, final_lr, any;
    const char *train, *prompt, *tokenizer, *copy;
    Amount warmup;
} Settings;

enum { CONSTANT, LINEAR, COSINE, WSD };  // --schedule
enum { NO_HEAD = -1, SOFTMAX, SPHERE };  // --head

enum { MAX_ROWS = 16, MAX_TEXT = 16384 };

static int make_table(Option* table, Settings* s) {
    Option rows[] = {
        {"data", "train", "-i --input-bin", OPTION_TEXT, &s->train, "", 0, 0, "PATH",
         "token shards (glob), a text file or folder, or JSONL, told apart by content; a long meaning goes on in the "
         "next line", 0},
        {"data", "batch-size", "-b", OPTION_INT, &s->batch_size, "4", 1, 65536, "N", "rows per micro-batch", 0},
        {"data", "offset", "", OPTION_INT, &s->offset, "0", INT_MIN, INT_MAX, "N",
         "first token; with its default this row is one column too long", 0},
        {"optimizer", "steps", "-x --max-steps", OPTION_INT, &s->steps, "100", -1, INT_MAX, "N",
         "updates, -1 = one epoch", 0},
        {"optimizer", "lr", "-l", OPTION_FLOAT, &s->lr, "3e-4", 0, 0.1, "F", "peak learning rate", 0},
        {"optimizer", "final-lr", "", OPTION_FLOAT, &s->final_lr, "0.1", 0, INFINITY, "F",
         "last rate as a share of --lr", 0},
        {"optimizer", "any", "", OPTION_FLOAT, &s->any, "1", -INFINITY, INFINITY, "F",
         "a number without limits; this row ends in the last column of", 0},
        {"optimizer", "schedule", "-k", OPTION_CHOICE, &s->schedule, "cosine", 0, 0, "constant|linear|cosine|wsd",
         "course of the learning rate", 0},
        {"optimizer", "warmup", "", OPTION_AMOUNT, &s->warmup, "2%", 0, INT_MAX, "N|F%", "steps, or a share", 0},
        {"run", "resume", "-y", OPTION_SWITCH, &s->resume, "0", 0, 1, "", "go on from the newest good checkpoint", 0},
        {"run", "head", "", OPTION_CHOICE, &s->head, "", 0, 0, "softmax|sphere,ball", "which of them; empty: none", 0},
        {"out", "generate", "", OPTION_TEXT, &s->prompt, "hello", 0, 0, "TEXT|-", "continue this text", OPTION_WORK},
        {"model", "tokenizer", "", OPTION_TEXT, &s->tokenizer, "", 0, 0, "bytes|PATH", "of which tokens", OPTION_READS},
        {"model", "copy", "", OPTION_TEXT, &s->copy, "", 0, 0, "FILE", "the model as a file", OPTION_WRITES},
        // this one joins its group
        {"data", "shuffle", "", OPTION_SWITCH, &s->shuffle, "1", 0, 1, "0|1", "visit the shards in random order", 0},
    };
    memcpy(table, rows, sizeof rows);
    return (int)(sizeof rows / sizeof rows[0]);
}

// a command line as one text, its words separated by "|"
static int parse(Option* table, Settings* s, const char* words) {
    char *text = string_copy(words), *rest = text, *argv[64];
    int argc = 1, n = make_table(table, s);
    argv[0] = program_invocation_short_name;
    while (*words && argc < 64 && rest) { argv[argc++] = strsep(&rest, "|"); }
    options_parse(table, n, argc, argv, "trains a model and says how it goes");
    free(text);
    return n;
}

// ---- files and what a child prints ----

static void temporary_path(char path[64], const char* name) {
    snprintf(path, 64, "/tmp/test_options.%d.%s", (int)getpid(), name);
}

static void write_file(const char* path, const char* bytes, size_t n_bytes) {
    FILE* file = fopen(path, "w");
    if (!file || fwrite(bytes, 1, n_bytes, file) != n_bytes || fclose(file) != 0) {
        fail_run("%s: %s", path, strerror(errno));
    }
}

static void read_file(const char* path, char* text) {
    FILE* file = fopen(path, "r");
    if (!file) { fail_run("%s: %s", path, strerror(errno)); }
    text[fread(text, 1, MAX_TEXT - 1, file)] = '\0';
    fclose(file);
    unlink(path);
}

// what these words print, in a child, goes to the file `path`
typedef struct { const char *path, *words; } Printing;

static void print_settings(void* arg) {
    const Printing* p = (const Printing*)arg;
    Option table[MAX_ROWS];
    Settings s;
    if (!freopen(p->path, "w", stdout)) { fail_run("%s: %s", p->path, strerror(errno)); }
    int n = parse(table, &s, p->words);
    options_print(table, n);
    options_free(table, n);
    fflush(stdout);
}

static void printed(Test* t, const char* words, char text[MAX_TEXT]) {
    char path[64];
    temporary_path(path, "out");
    Printing p = {path, words};
    check_exit(t, words, print_settings, &p, 0, "");
    read_file(path, text);
}

static size_t longest_line(const char* text) {
    size_t longest = 0;
    for (const char* line = text; *line; line += strcspn(line, "\n") + 1) {
        size_t n = strcspn(line, "\n");
        longest = n > longest ? n : longest;
    }
    return longest;
}

// ---- the promises ----

static void test_defaults(Test* t) {
    Option table[MAX_ROWS];
    Settings s;
    int n = parse(table, &s, "");
    check(t, s.batch_size == 4 && s.steps == 100 && s.shuffle == 1 && s.resume == 0, "integers and switches");
    check(t, s.lr == 3e-4f && s.final_lr == 0.1f, "floats");
    check(t, !strcmp(s.train, "") && !strcmp(s.prompt, "hello"), "texts");
    check(t, s.schedule == COSINE && s.head == NO_HEAD, "choices");
    check(t, s.warmup.n == 0 && s.warmup.percent == 2.0f, "amounts");
    for (int i = 0; i < n; i++) { check(t, !options_given(table, n, table[i].name), "%s: given", table[i].name); }
    options_free(table, n);
}

static void test_values(Test* t) {
    const struct { const char *words, *name, *value; } cases[] = {
        {"--batch-size|8", "batch-size", "8"}, {"--batch-size=8", "batch-size", "8"}, {"-b|8", "batch-size", "8"},
        {"-b=8", "batch-size", "8"}, {"--batch-size|+8", "batch-size", "8"}, {"--batch-size|007", "batch-size", "7"},
        {"--batch-size|65536", "batch-size", "65536"}, {"--batch-size|1", "batch-size", "1"},
        {"-b|8|--batch-size|16", "batch-size", "16"}, {"--max-steps=-1", "steps", "-1"}, {"--steps|-1", "steps", "-1"},
        {"--steps|2147483647", "steps", "2147483647"}, {"--offset|-2147483648", "offset", "-2147483648"},
        {"--lr|0.1", "lr", "0.1"}, {"--lr|1e-4", "lr", "0.0001"}, {"--lr|.05", "lr", "0.05"}, {"--lr|0", "lr", "0"},
        {"--lr|0e9", "lr", "0"}, {"--any|-3.4028235e38", "any", "-3.4028235e+38"},
        {"--any|1e-45", "any", "1.4013e-45"},
        {"--any|0.333333343", "any", "0.33333334"}, {"--any|0.10000001", "any", "0.10000001"},
        {"--any|16777217", "any", "16777216"}, {"--resume", "resume", "1"}, {"--resume|0", "resume", "0"},
        {"--resume=1", "resume", "1"}, {"-y|--shuffle", "resume", "1"}, {"--shuffle|0", "shuffle", "0"},
        {"-y|1|--shuffle=0", "shuffle", "0"},
        {"--schedule|wsd", "schedule", "wsd"}, {"-k=linear", "schedule", "linear"},
        {"-k|Constant", "schedule", "constant"},
        {"--warmup|100", "warmup", "100"}, {"--warmup|+7", "warmup", "7"}, {"--warmup|5%", "warmup", "5%"},
        {"--warmup=.7%", "warmup", "0.7%"}, {"--warmup|1e1%", "warmup", "10%"}, {"--warmup|0%", "warmup", "0"},
        {"--warmup|99.9999%", "warmup", "99.9999%"}, {"--warmup|5%|--warmup|3", "warmup", "3"},
        {"--head|softmax", "head", "softmax"}, {"--head|ball", "head", "sphere"}, {"--head|ball|--head=", "head", ""},
        {"--train|data/*.bin", "train", "data/*.bin"}, {"--input-bin|x", "train", "x"}, {"--train=a=b", "train", "a=b"},
        {"--train=", "train", ""}, {"--train|", "train", ""}, {"--train=--lr", "train", "--lr"},
        {"--train|-q", "train", "-q"}, {"--generate|-", "generate", "-"}, {"--generate=-", "generate", "-"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Option table[MAX_ROWS];
        Settings s;
        int n = parse(table, &s, cases[i].words);
        char* value = option_text_(options_named_(table, n, cases[i].name));
        check(t, !strcmp(value, cases[i].value), "%s: found %s, expected %s", cases[i].words, value, cases[i].value);
        check(t, options_given(table, n, cases[i].name) == 1, "%s: --%s is not given", cases[i].words, cases[i].name);
        free(value);
        options_free(table, n);
    }
}

// the value is the position of the name, whichever spelling was typed
static void test_choices(Test* t) {
    const struct { const char* words; int schedule, head; } cases[] = {
        {"", COSINE, NO_HEAD}, {"-k|constant", CONSTANT, NO_HEAD}, {"-k|linear|--head|softmax", LINEAR, SOFTMAX},
        {"-k|WSD|--head|sphere", WSD, SPHERE}, {"--head|Ball", COSINE, SPHERE},
        {"--head|ball|--head|", COSINE, NO_HEAD},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Option table[MAX_ROWS];
        Settings s;
        int n = parse(table, &s, cases[i].words);
        check(t, s.schedule == cases[i].schedule && s.head == cases[i].head, "%s: found %d and %d, expected %d and %d",
              cases[i].words, s.schedule, s.head, cases[i].schedule, cases[i].head);
        options_free(table, n);
    }
    for (int head = NO_HEAD; head <= SPHERE; head++) {
        check(t, choice_find("softmax|sphere,ball", choice_name("softmax|sphere,ball", head).s) == head, "name of %d",
              head);
    }
}

// a share is that of the decimal that was typed, rounded down
static void test_amounts(Test* t) {
    const struct { const char* words; int total, want; } cases[] = {
        {"--warmup|100", 40, 100}, {"--warmup|2%", 49, 0}, {"--warmup|2%", 50, 1}, {"--warmup|2%", 149, 2},
        {"--warmup|0.7%", 1000, 7}, {"--warmup|12.5%", 2147483647, 268435455}, {"--warmup|0%", 1000, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Option table[MAX_ROWS];
        Settings s;
        int n = parse(table, &s, cases[i].words), found = amount_of(s.warmup, cases[i].total);
        check(t, found == cases[i].want, "%s of %d: found %d, expected %d", cases[i].words, cases[i].total, found,
              cases[i].want);
        options_free(table, n);
    }
}

static void parse_in_child(void* words) {
    Option table[MAX_ROWS];
    Settings s;
    options_free(table, parse(table, &s, (const char*)words));
}

static const char* of_others(const char* word, size_t length) {
    return option_in_list("--pp --ep", word, length) ? "train_a and train_b" : NULL;
}

static void test_wrong(Test* t) {
    *options_of_others() = of_others;
    const char* cases[][2] = {
        {"--batch-size|4x", "--batch-size: expected an integer 1..65536, found \"4x\""},
        {"--batch-size|", "--batch-size: expected an integer 1..65536, found \"\""},
        {"--batch-size=", "--batch-size: expected an integer 1..65536, found \"\""},
        {"--batch-size| 4", "--batch-size: expected an integer 1..65536, found \" 4\""},
        {"--batch-size|4 ", "--batch-size: expected an integer 1..65536, found \"4 \""},
        {"--batch-size|4.0", "--batch-size: expected an integer 1..65536, found \"4.0\""},
        {"--batch-size|1e3", "--batch-size: expected an integer 1..65536, found \"1e3\""},
        {"--batch-size|0x10", "--batch-size: expected an integer 1..65536, found \"0x10\""},
        {"--batch-size|+", "--batch-size: expected an integer 1..65536, found \"+\""},
        {"--batch-size|4-", "--batch-size: expected an integer 1..65536, found \"4-\""},
        {"--batch-size|0", "--batch-size: expected an integer 1..65536, found \"0\""},
        {"--batch-size|65537", "--batch-size: expected an integer 1..65536, found \"65537\""},
        {"--batch-size|99999999999999999999",
         "--batch-size: expected an integer 1..65536, found \"99999999999999999999\""},
        {"--batch-size|4\n5\x1b[31m", "--batch-size: expected an integer 1..65536, found \"4?5?[31m\""},
        {"--batch-size|xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
         "--batch-size: expected an integer 1..65536, found "
         "\"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...\""},
        {"-b|4x", "--batch-size: expected an integer 1..65536, found \"4x\""},
        {"--batch-size|8|-b|0", "--batch-size: expected an integer 1..65536, found \"0\""},
        {"--steps|-2", "--steps: expected an integer, -1 or more, found \"-2\""},
        {"--steps|2147483648", "--steps: expected an integer -1..2147483647, found \"2147483648\""},
        {"--offset|-2147483649", "--offset: expected an integer, found \"-2147483649\""},
        {"--lr|1e400", "--lr: expected a number 0..0.1, found \"1e400\""},
        {"--any|1e400", "--any: expected a number, found \"1e400\""},
        {"--any|-1e400", "--any: expected a number, found \"-1e400\""},
        {"--any|nan", "--any: expected a number, found \"nan\""},
        {"--any|inf", "--any: expected a number, found \"inf\""},
        {"--any|-infinity", "--any: expected a number, found \"-infinity\""},
        {"--any|0x1p3", "--any: expected a number, found \"0x1p3\""},
        {"--any|1.5.2", "--any: expected a number, found \"1.5.2\""},
        {"--any|1e", "--any: expected a number, found \"1e\""},
        {"--any|.", "--any: expected a number, found \".\""},
        {"--any|1,5", "--any: expected a number, found \"1,5\""},
        {"--any| 1", "--any: expected a number, found \" 1\""},
        {"--any|", "--any: expected a number, found \"\""},
        {"--lr|1e-50", "--lr: expected 0, or a number that is not 0 as a float, found \"1e-50\""},
        {"--lr|-1e-9", "--lr: expected a number 0..0.1, found \"-1e-9\""},
        {"--lr|0.10000001", "--lr: expected a number 0..0.1, found \"0.10000001\""},
        {"--final-lr|-1", "--final-lr: expected a number, 0 or more, found \"-1\""},
        {"--warmup|100%", "--warmup: expected an integer, 0 or more, or a percentage below 100%, found \"100%\""},
        {"--warmup|-1%", "--warmup: expected an integer, 0 or more, or a percentage below 100%, found \"-1%\""},
        {"--warmup|-1", "--warmup: expected an integer, 0 or more, or a percentage below 100%, found \"-1\""},
        {"--warmup|0.5", "--warmup: expected an integer, 0 or more, or a percentage below 100%, found \"0.5\""},
        {"--warmup|%", "--warmup: expected an integer, 0 or more, or a percentage below 100%, found \"%\""},
        {"--warmup|2%%", "--warmup: expected an integer, 0 or more, or a percentage below 100%, found \"2%%\""},
        {"--warmup=", "--warmup: expected an integer, 0 or more, or a percentage below 100%, found \"\""},
        {"--shuffle|2", "--shuffle: expected 0 or 1, found \"2\""},
        {"--shuffle|yes", "--shuffle: expected 0 or 1, found \"yes\""},
        {"--resume=", "--resume: expected 0 or 1, found \"\""},
        {"--schedule|cosin", "--schedule: expected constant|linear|cosine|wsd, found \"cosin\""},
        {"--schedule|linear|--schedule|cosine|--schedule|",
         "--schedule: expected constant|linear|cosine|wsd, found \"\""},
        {"--schedule|cos", "--schedule: expected constant|linear|cosine|wsd, found \"cos\""},
        {"--head|sphere,ball", "--head: expected softmax|sphere,ball, found \"sphere,ball\""},
        {"--schedule|constant|--schedule=linear|cosine",
         "expected an option such as --name value, found \"cosine\" (--help lists all)"},
        {"--train|a\xff", "--train: expected UTF-8, found \"a\xff\""},
        {"--batch-size", "--batch-size: expected an integer 1..65536, found nothing"},
        {"--train", "--train: expected PATH, found nothing"},
        {"--train|--lr|1", "--train: expected PATH, found the option --lr (as a value: --train=--lr)"},
        {"--train|-b|1", "--train: expected PATH, found the option -b (as a value: --train=-b)"},
        {"--train|--other", "--train: expected PATH, found the option --other (as a value: --train=--other)"},
        {"--batchsize|4", "--batchsize: unknown option, did you mean --batch-size? (--help lists all)"},
        {"--batch_size=4", "--batch_size: unknown option, did you mean --batch-size? (--help lists all)"},
        {"-batch-size|4", "-batch-size: unknown option, did you mean --batch-size? (--help lists all)"},
        {"-xbatch-size|4", "-xbatch-size: unknown option, did you mean --batch-size? (--help lists all)"},
        {"--batch|4", "--batch: unknown option, did you mean --batch-size? (--help lists all)"},
        {"--BATCH-SIZE|4", "--BATCH-SIZE: unknown option (--help lists all)"},
        {"--shedule|wsd", "--shedule: unknown option, did you mean --schedule? (--help lists all)"},
        {"--max-step|4", "--max-step: unknown option, did you mean --max-steps? (--help lists all)"},
        {"--hlep", "--hlep: unknown option, did you mean --help? (--help lists all)"},
        {"--arg|x", "--arg: unknown option, did you mean --args? (--help lists all)"},
        {"--pp|2", "--pp: expected an option of this program, found one of train_a and train_b"},
        {"--pp=2", "--pp: expected an option of this program, found one of train_a and train_b"},
        {"--ppp|2", "--ppp: unknown option (--help lists all)"},
        {"--lernrate|3", "--lernrate: unknown option (--help lists all)"},
        {"--l", "--l: unknown option (--help lists all)"},
        {"--ir|3", "--ir: unknown option, did you mean --lr? (--help lists all)"},
        {"--entirely-else", "--entirely-else: unknown option (--help lists all)"},
        {"-q", "-q: unknown option (--help lists all)"},
        {"--", "--: unknown option (--help lists all)"},
        {"-", "-: unknown option (--help lists all)"},
        {"--bad\nname", "--bad?name: unknown option (--help lists all)"},
        {"input.txt", "expected an option such as --name value, found \"input.txt\" (--help lists all)"},
        {"--train|/dev/null|/dev/zero",
         "expected an option such as --name value, found \"/dev/zero\", a second file after --train: put a pattern "
         "in quotes (--train '*.txt'), so that the shell leaves it alone"},
        {"--train|x|/nowhere/x",
         "expected an option such as --name value, found \"/nowhere/x\" (--help lists all)"},
        {"--lr|0.1|/dev/zero", "expected an option such as --name value, found \"/dev/zero\" (--help lists all)"},
        {"--resume|-y|x.txt", "--resume: expected 0 or 1, found \"x.txt\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char line[512], words[512];
        snprintf(words, sizeof words, "%s", cases[i][0]);
        snprintf(line, sizeof line, "%s: %s\n", program_invocation_short_name, cases[i][1]);
        check_exit(t, cases[i][0], parse_in_child, words, 2, line);
    }
}

static void fail_warmup(void* arg) {
    (void)arg;
    options_fail("warmup", "expected less than --steps %d, found %d", 10, 20);
}

static void test_fail(Test* t) {
    check_exit(t, "options_fail", fail_warmup, NULL, 2, ": --warmup: expected less than --steps 10, found 20\n");
}

static void test_file(Test* t) {
    const char* text = "# settings of a test\n\n  \t\n"
                       "batch-size = 8\n--lr=0.01\n -b = 16   # the later value wins\n-x = 7\t# a tab is a blank too\n"
                       "train = data/a b#c = d.bin \r\nresume\n\tshuffle\t=\t0\r\ngenerate =";
    char path[64], words[128];
    Option table[MAX_ROWS];
    Settings s;
    temporary_path(path, "txt");
    write_file(path, text, strlen(text));
    snprintf(words, sizeof words, "--lr|0.02|--args|%s|--resume|0", path);
    int n = parse(table, &s, words);
    check(t, s.batch_size == 16 && s.shuffle == 0, "batch size %d, shuffle %d", s.batch_size, s.shuffle);
    check(t, s.steps == 7, "steps %d", s.steps);
    check(t, s.lr == 0.01f, "the file comes after --lr, found %g", (double)s.lr);
    check(t, s.resume == 0, "--resume 0 comes after the file");
    check(t, !strcmp(s.train, "data/a b#c = d.bin"), "train is \"%s\"", s.train);
    check(t, !strcmp(s.prompt, ""), "generate is \"%s\"", s.prompt);
    check(t, options_given(table, n, "shuffle") == 1 && options_given(table, n, "offset") == 0, "given");
    options_free(table, n);
    snprintf(words, sizeof words, "--args=%s", path);
    options_free(table, parse(table, &s, words));
    check(t, s.resume == 1, "a switch alone on its line is on");
    unlink(path);
}

static void test_wrong_file(Test* t) {
    const struct { const char* text; size_t n_bytes; const char* message; } cases[] = {
        {"\n\nbatch-size = 4x\n", 0, ":3: --batch-size: expected an integer 1..65536, found \"4x\""},
        {"lr = 1e-3\nbatchsize = 4", 0,
         ":2: --batchsize: unknown option, did you mean --batch-size? (--help lists all)"},
        {"-q = 4", 0, ":1: -q: unknown option (--help lists all)"},
        {"batch-size\n", 0, ":1: --batch-size: expected an integer 1..65536, found nothing"},
        {"batch-size = 4 8\n", 0, ":1: --batch-size: expected an integer 1..65536, found \"4 8\""},
        {"--batch-size 4\n", 0, ":1: expected name = value, found \"--batch-size 4\""},
        {" = 4\n", 0, ":1: expected name = value, found \"\""},
        {"schedule = # nothing\n", 0, ":1: --schedule: expected constant|linear|cosine|wsd, found \"\""},
        {"train = a\n\0\n", 12, ":2: expected text in lines of less than 4096 bytes"},
    };
    char path[64], words[80], line[512];
    temporary_path(path, "wrong");
    snprintf(words, sizeof words, "--args|%s", path);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_file(path, cases[i].text, cases[i].n_bytes ? cases[i].n_bytes : strlen(cases[i].text));
        snprintf(line, sizeof line, "%s: %s%s\n", program_invocation_short_name, path, cases[i].message);
        check_exit(t, cases[i].text, parse_in_child, words, 2, line);
    }
    char long_line[4096];
    memset(long_line, '#', sizeof long_line);
    write_file(path, long_line, 4095);
    check_exit(t, "a line of 4095 bytes", parse_in_child, words, 0, "");
    write_file(path, long_line, 4096);
    check_exit(t, "a line of 4096 bytes", parse_in_child, words, 2,
               ".wrong:1: expected text in lines of less than 4096 bytes\n");
    unlink(path);
    char missing[] = "--args|/nowhere/x.txt", folder[] = "--args|/tmp", zeros[] = "--args=/dev/zero",
        nothing[] = "--args";
    check_exit(t, missing, parse_in_child, missing, 2, ": --args: /nowhere/x.txt: No such file or directory\n");
    check_exit(t, folder, parse_in_child, folder, 2, ": --args: /tmp: Is a directory\n");
    check_exit(t, zeros, parse_in_child, zeros, 2, ": /dev/zero:1: expected text in lines");
    check_exit(t, nothing, parse_in_child, nothing, 2, ": --args: expected FILE, found nothing\n");
}

static void test_help(Test* t) {
    char text[MAX_TEXT], again[MAX_TEXT];
    Option table[MAX_ROWS];
    Settings s;
    int n = make_table(table, &s);
    printed(t, "--help", text);
    printed(t, "-b|8|-h|--no-such-option", again);
    check(t, !strcmp(text, again), "-h prints the same");
    check(t, longest_line(text) == 100, "expected 100 columns, found a line of %zu", longest_line(text));
    const char* parts[] = {
        "\ntrains a model and says how it goes\n\nWhere 0|1 is taken, --name alone is --name 1.\n\ndata\n  --train PATH ",
        ("\n  --train PATH              token shards (glob), a text file or folder, or JSONL, told apart by\n"
         "                            content; a long meaning goes on in the next line (also -i --input-bin)\n"),
        "\n  --batch-size N            rows per micro-batch (default 4; also -b)\n",
        "\n  --shuffle 0|1             visit the shards in random order (default 1)\n\noptimizer\n",
        "one column too long (default\n                            0)\n",
        ("\n  --schedule constant|linear|cosine|wsd\n"
         "                            course of the learning rate (default cosine; also -k)\n"),
        "\n\nout\n  --generate TEXT|-         continue this text (default hello)\n\nmodel\n"
        "  --tokenizer bytes|PATH    of which tokens\n  --copy FILE               the model as a file\n\nhelp\n",
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        check(t, strstr(text, parts[i]) != NULL, "missing: %s", parts[i]);
    }
    for (int i = 0; i < n; i++) {
        char row[64];
        snprintf(row, sizeof row, "\n  --%s%s", table[i].name, *table[i].takes ? " " : "  ");
        check(t, strstr(text, row) != NULL, "no row for --%s", table[i].name);
    }
}

static void test_reword(Test* t) {
    Option table[MAX_ROWS];
    Settings s;
    int n = parse(table, &s, "");
    options_reword(table, n, "lr", "as steep as it gets");
    for (int i = 0; i < n; i++) {
        const int is_lr = !strcmp(table[i].name, "lr");
        check(t, is_lr == !strcmp(table[i].meaning, "as steep as it gets"), "--%s: %s", table[i].name,
              table[i].meaning);
    }
    options_free(table, n);
}

static void test_box(Test* t) {
    const char* expected =
        "+-----------------------+----------------------------------------------------+\n"
        "| train                 | a/path/of/more/than/fifty/characters/goes/on/in/   |\n"
        "|                       | the/next?line                                      |\n"
        "| lr                    | 0.001                                              |\n"
        "| generate              |                                                    |\n";
    char text[MAX_TEXT];
    printed(t, "--train|a/path/of/more/than/fifty/characters/goes/on/in/the/next\nline|--lr|1e-3|-b|4|--generate=",
            text);
    check(t, !strcmp(text, expected), "found\n%s", text);
    printed(t, "", text);
    check(t, !strchr(text, '|'), "a default has no row:\n%s", text);
}

// every settings value out to JSON text, in with another table, and equal to the last bit
static void test_json(Test* t) {
    Option table[MAX_ROWS], restored[MAX_ROWS];
    Settings s, r;
    const char* words = "-b|8|--steps|-1|--offset|-2147483648|--shuffle|0|--resume|"
        "--train|a\"b\\c\x01\xc3\xa9|-k|wsd|--head|ball|--warmup|0.7%";
    int n = parse(table, &s, words);
    uint32_t bits[] = {0x00000001, 0x80000000, 0x007fffff, 0x00800000, 0x3dcccccd, 0x3eaaaaab, 0x7f7fffff, 0xff7fffff,
                       0x4b7fffff};
    uint32_t random = 1;
    for (int i = 0; i < 2000; i++) {
        random = random * 1664525 + 1013904223;
        s.any = float_from_bits(i < 9 ? bits[i] : random);
        if (!isfinite(s.any)) { continue; }
        json_t* out = options_to_json(table, n);
        char* dumped = json_dumps(out, i % 2 ? JSON_COMPACT : JSON_COMPACT | JSON_REAL_PRECISION(9));
        json_t* in = json_loads(dumped, 0, NULL);
        int m = parse(restored, &r, "");
        options_from_json(restored, m, in);
        check_bits(t, dumped, &r.any, &s.any, 1);
        check(t, r.lr == s.lr && r.final_lr == s.final_lr, "%s", dumped);
        check(t, r.batch_size == 8 && r.steps == -1 && r.offset == INT_MIN, "%s", dumped);
        check(t, r.shuffle == 0 && r.resume == 1 && r.warmup.percent == 0.7f, "%s", dumped);
        check(t, !strcmp(r.train, s.train) && r.schedule == WSD && r.head == SPHERE, "%s", dumped);
        free(dumped);
        json_decref(out);
        json_decref(in);
        options_free(restored, m);
    }
    options_free(table, n);
}

static void test_restore(Test* t) {
    Option table[MAX_ROWS];
    Settings s;
    const char* text = "{\"batch-size\": 8, \"lr\": 0.01, \"resume\": 1, \"shuffle\": false, \"schedule\": \"linear\", "
                       "\"head\": \"Ball\", \"warmup\": 0, \"removed\": [1], \"tokenizer\": \"t.json\", "
                       "\"generate\": \"more\", \"copy\": \"/etc/passwd\"}";
    json_t* stored = json_loads(text, 0, NULL);
    int n = parse(table, &s, "--lr|0.02");
    options_from_json(table, n, stored);
    check(t, s.batch_size == 8 && options_given(table, n, "batch-size") == 2, "a stored value is taken and marked 2");
    check(t, s.lr == 0.02f && options_given(table, n, "lr") == 1, "a typed value stays, found %g", (double)s.lr);
    check(t, s.resume == 1 && s.shuffle == 0, "a switch is a boolean, or 0 or 1");
    check(t, s.steps == 100 && options_given(table, n, "steps") == 0, "what was not stored keeps its default");
    check(t, s.schedule == LINEAR && s.head == SPHERE, "a stored choice is found by any of its spellings");
    check(t, s.warmup.n == 0 && s.warmup.percent == 0.0f, "a stored amount is a number, or a text with a percentage");
    check(t, !strcmp(s.tokenizer, "t.json"), "a path that is read comes back, found \"%s\"", s.tokenizer);
    check(t, !strcmp(s.prompt, "hello"), "work is asked for anew, found \"%s\"", s.prompt);
    check(t, !*s.copy, "where to write is asked for anew, found \"%s\"", s.copy);
    json_t* none = json_null();
    options_from_json(table, n, none);
    options_set(table, n, "train", "runs/x");
    options_set(table, n, "train", s.train);
    check(t, !strcmp(s.train, "runs/x") && options_given(table, n, "train") == 0, "options_set, found %s", s.train);
    json_decref(stored);
    options_free(table, n);
}

static void test_paths(Test* t) {
    const struct { const char *words, *name, *reads, *writes; } cases[] = {
        {"--tokenizer|t.json|--copy|model.bin", "tokenizer", "t.json", ""},
        {"--tokenizer|t.json|--copy|model.bin", "copy", "", "model.bin"},
        {"--tokenizer|bytes", "tokenizer", "", ""},        // a word before the last of bytes|PATH
        {"--tokenizer|PATH", "tokenizer", "PATH", ""},     // a file may have that name
        {"--tokenizer|bytes.json", "tokenizer", "bytes.json", ""},
        {"--generate|t.json", "generate", "", ""},         // a text that is no path
        {"", "tokenizer", "", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Option table[MAX_ROWS];
        Settings s;
        int n = parse(table, &s, cases[i].words);
        const Option* row = options_named_(table, n, cases[i].name);
        const char *reads = option_path(row, OPTION_READS), *writes = option_path(row, OPTION_WRITES);
        check(t, !strcmp(reads, cases[i].reads) && !strcmp(writes, cases[i].writes), "%s: --%s: \"%s\", \"%s\"",
              cases[i].words, cases[i].name, reads, writes);
        options_free(table, n);
    }
}

static void restore_in_child(void* arg) {
    Option table[MAX_ROWS];
    Settings s;
    json_t* stored = json_loads((const char*)arg, 0, NULL);
    int n = parse(table, &s, "");
    options_from_json(table, n, stored);
}

static void test_wrong_settings(Test* t) {
    const char* cases[][2] = {
        {"{\"batch-size\": 0}", "--batch-size: expected an integer 1..65536, found \"0\"\n"},
        {"{\"batch-size\": 4.0}", "--batch-size: expected an integer 1..65536, found \"4.0\"\n"},
        {"{\"batch-size\": 4000000000}", "--batch-size: expected an integer 1..65536, found \"4000000000\"\n"},
        {"{\"batch-size\": null}", "--batch-size: expected an integer 1..65536, found \"null\"\n"},
        {"{\"lr\": [1, 2]}", "--lr: expected a number 0..0.1, found \"[1,2]\"\n"},
        {"{\"any\": 1e300}", "--any: expected a number, found \"1"},
        {"{\"shuffle\": 2}", "--shuffle: expected 0 or 1, found \"2\"\n"},
        {"{\"schedule\": \"step\"}", "--schedule: expected constant|linear|cosine|wsd, found \"step\"\n"},
        {"{\"schedule\": 1}", "--schedule: expected constant|linear|cosine|wsd, found \"1\"\n"},
        {"{\"train\": 3}", "--train: expected a text, found 3\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char stored[64], line[256];
        snprintf(stored, sizeof stored, "%s", cases[i][0]);
        snprintf(line, sizeof line, ": settings of the checkpoint: %s", cases[i][1]);
        check_exit(t, stored, restore_in_child, stored, 2, line);
    }
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"defaults", "no arguments give the defaults of the table", test_defaults},
        {"values", "every spelling, alias and number form gives its value, the later one wins", test_values},
        {"choices", "the value is the position in the list, by any spelling; none only where that is the default",
         test_choices},
        {"amounts", "a number, or a share of a total, rounded down", test_amounts},
        {"wrong options", "each stops with status 2 and one line that says what was expected and found", test_wrong},
        {"options_fail", "the trainer's own checks print the same kind of line", test_fail},
        {"args file", "lines, comments, dashes, switches; later values win", test_file},
        {"wrong args file", "each stops with status 2 and one line naming file and line", test_wrong_file},
        {"help", "groups, aligned rows, aliases and defaults within 100 columns", test_help},
        {"reword", "gives one row another meaning in --help", test_reword},
        {"settings box", "what is not the default, long values over several lines", test_box},
        {"json", "settings come back from JSON text to the same bits", test_json},
        {"restore", "stored values fill in what was not typed", test_restore},
        {"paths", "what an option names outside the program, by the last column of its row", test_paths},
        {"wrong settings", "a damaged settings object stops with status 2 and one line", test_wrong_settings},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
