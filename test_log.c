/*
Promises of llmc/run/log.h and llmc/run/schedule.h: the lines a run prints, records that read back to the same bits, a
resumed metrics file, errors of the disk, the progress bar, and the learning rates.
    cc -std=gnu11 -O2 -ffp-contract=off test_log.c -o build/test_log -ljansson -lm && build/test_log
*/
#include "llmc/core/choice.h"   // choice_find, choice_name
#include "llmc/run/log.h"       // everything under test
#include "llmc/run/schedule.h"  // schedule_lr, SCHEDULE_NAMES
#include "llmc/test/test.h"     // check, check_bits, check_exit, test_main
#include <signal.h>
#include <sys/resource.h>
#include <fcntl.h>
#include <sys/stat.h>

enum { MAX_TEXT = 16384 };

// ---- a run folder for one promise ----

typedef struct {
    char folder[64], metrics[96], temporary[96];
} Run;

static Run run_new(void) {
    Run run;
    snprintf(run.folder, sizeof run.folder, "/tmp/test_log.%d", (int)getpid());
    snprintf(run.metrics, sizeof run.metrics, "%s/metrics.jsonl", run.folder);
    snprintf(run.temporary, sizeof run.temporary, "%s/metrics.jsonl.tmp", run.folder);
    if (mkdir(run.folder, 0777) != 0) { fail_run("%s: %s", run.folder, strerror(errno)); }
    return run;
}

static void run_free(const Run* run) {
    unlink(run->metrics);
    unlink(run->temporary);
    rmdir(run->folder);
}

static void read_file(const char* path, char text[MAX_TEXT]) {
    FILE* file = fopen(path, "r");
    if (!file) { fail_run("%s: %s", path, strerror(errno)); }
    text[fread(text, 1, MAX_TEXT - 1, file)] = '\0';
    fclose(file);
}

static void append_file(const char* path, const char* text) {
    FILE* file = fopen(path, "a");
    if (!file || fputs(text, file) < 0 || fclose(file) != 0) { fail_run("%s: %s", path, strerror(errno)); }
}

static json_t* line_of(const char* text, int i) {
    while (i-- > 0 && text) { text = strchr(text, '\n') ? strchr(text, '\n') + 1 : NULL; }
    return text ? json_loadb(text, strcspn(text, "\n"), 0, NULL) : NULL;
}

// ---- formats ----

static void test_formats(Test* t) {
    const struct { double x; const char* text; } durations[] = {
        {0, "0s"}, {0.4, "0s"}, {45, "45s"}, {59.4, "59s"}, {59.6, "1m00s"}, {77, "1m17s"}, {3599.4, "59m59s"},
        {3599.6, "1h00m"}, {7530, "2h05m"}, {86399, "23h59m"}, {86400, "1d00h"}, {273600, "3d04h"}, {-1, "?"},
        {INFINITY, "?"}, {NAN, "?"}};
    const struct { double x; const char* text; } counts[] = {
        {0, "0"}, {7, "7"}, {999, "999"}, {999.6, "1.0k"}, {1000, "1.0k"}, {25000, "25.0k"}, {999949, "999.9k"},
        {999950, "1.0M"}, {1.2e6, "1.2M"}, {124475904, "124.5M"}, {6.9e9, "6.9B"}, {1.4e12, "1.4T"},
        {3e16, "30000.0T"}, {-25000, "-25.0k"}};
    const struct { double x; const char* text; } bytes[] = {
        {0, "0 B"}, {1023, "1023 B"}, {1024, "1.00 KiB"}, {1536, "1.50 KiB"}, {1048575, "1.00 MiB"}, {1 << 20,
                                                                                                      "1.00 MiB"},
        {2.21 * 1073741824.0, "2.21 GiB"}, {3e12, "2.73 TiB"}};
    for (size_t i = 0; i < sizeof durations / sizeof durations[0]; i++) {
        ShortText got = format_duration(durations[i].x);
        const char* want = durations[i].text;
        check(t, !strcmp(got.s, want), "%g seconds: found %s, expected %s", durations[i].x, got.s, want);
    }
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        ShortText got = format_count(counts[i].x);
        check(t, !strcmp(got.s, counts[i].text), "%.10g: found %s, expected %s", counts[i].x, got.s, counts[i].text);
    }
    for (size_t i = 0; i < sizeof bytes / sizeof bytes[0]; i++) {
        ShortText got = format_bytes(bytes[i].x);
        check(t, !strcmp(got.s, bytes[i].text), "%.10g bytes: found %s, expected %s", bytes[i].x, got.s, bytes[i].text);
    }
}

static void test_format_float(Test* t) {
    const struct { uint32_t bits; const char* text; } cases[] = {
        {0x3dcccccd, "0.1"}, {0x399d4952, "0.0003"}, {0x3eaaaaab, "0.33333334"}, {0x00000001, "1.4013e-45"},
        {0x80000000, "-0"}, {0x7f7fffff, "3.4028235e+38"}, {0x4b800000, "16777216"}, {0x3f800001, "1.0000001"},
        {0x7f800000, "inf"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ShortText got = format_float(float_from_bits(cases[i].bits));
        check(t, !strcmp(got.s, cases[i].text), "%08x: found %s, expected %s", cases[i].bits, got.s, cases[i].text);
    }
    for (uint32_t i = 0, random = 7; i < 100000; i++) {
        random = random * 1664525 + 1013904223;
        float x = float_from_bits(random);
        if (isnan(x)) { continue; }
        float back = strtof(format_float(x).s, NULL);
        if (!check_bits(t, format_float(x).s, &back, &x, 1)) { return; }
    }
}

// ---- printed lines: in a child whose standard output is a file ----

static const StepRecord example = {120, 2000, 1.82341f, 0.912f, 3e-4f, 41.0, 122880, 24975.6, 0.384, 0};

typedef struct {
    const char* path;
    int which;
} Printing;

static void print_lines(void* arg) {
    const Printing* p = (const Printing*)arg;
    Log log = {0};
    StepRecord r = example;
    if (!freopen(p->path, "w", stdout)) { fail_run("%s: %s", p->path, strerror(errno)); }
    log_open(&log, NULL, -1, 1);
    if (p->which == 0) {
        log_step(&log, &r, 1);
        r.step++;
        log_step(&log, &r, 0);  // not printed
        r.peak = -1.0;
        r.skipped = 1;
        r.loss = NAN;
        r.norm = INFINITY;
        log_step(&log, &r, 1);
        r.skipped = 0;
        r.norm = NAN;
        log_step(&log, &r, 1);  // neither was computed
        r.skipped = 1;
        r.step = r.n_steps;
        r.ms = 3.25;
        r.norm = 0.00123f;
        log_step(&log, &r, 1);
        log_validation(&log, 120, 1.90118f, 2.7428, 1);
        log_validation(&log, 130, 1.95f, -1.0, 0);
    } else {
        // 100 slow steps, then 100 fast ones: the eta follows the recent ones
        for (r.step = 1; r.step <= 200; r.step++) {
            r.ms = r.step <= 100 ? 1000.0 : 10.0;
            log_step(&log, &r, r.step == 100 || r.step == 200);
        }
    }
    log_close(&log);
}

// columns, and bytes that fit into five of them
static void test_text_that_fits(Test* t) {
    const struct { const char* text; size_t n_bytes; int columns; } cases[] = {
        {"", 0, 0}, {"abc", 3, 3}, {"abcdefg", 5, 5}, {"b\xc3\xbc" "cher!", 6, 5}, {"e\xcc\x81tude", 7, 5},
        {"\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e", 6, 4},  // a third character of two columns has no room
        {"\xff\xfe" "abcd", 5, 5}, {"a\xe6\x97", 3, 3}};     // not UTF-8: a column for each byte
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int columns;
        const size_t n = text_that_fits(cases[i].text, 5, &columns);
        check(t, n == cases[i].n_bytes && columns == cases[i].columns, "text %zu: %zu bytes in %d columns", i, n, columns);
    }
    char controls[] = "a\x1b[2J\xc2\x9b" "b\xc2\xa0";
    plain_text(controls);
    check(t, !strcmp(controls, "a?[2J??b\xc2\xa0"), "control characters stay: %s", controls);
}

static void test_lines(Test* t) {
    Run run = run_new();
    char text[MAX_TEXT];
    Printing p = {run.metrics, 0};
    check_exit(t, "step lines", print_lines, &p, 0, "");
    read_file(run.metrics, text);
    const char* expected =
        "step 120/2000 | loss 1.8234 | norm 0.91 | lr 3.0e-04 | 41 ms | 25.0k tok/s | 38% peak | eta 1m17s\n"
        "step 121/2000 | loss nan | norm inf | lr 3.0e-04 | 41 ms | 25.0k tok/s | eta 1m17s | skipped\n"
        "step 121/2000 | loss - | norm - | lr 3.0e-04 | 41 ms | 25.0k tok/s | eta 1m17s\n"
        "step 2000/2000 | loss nan | norm 1.2e-03 | lr 3.0e-04 | 3.2 ms | 25.0k tok/s | eta 0s | skipped\n"
        "step 120 | val loss 1.9012 | 2.743 bits/byte | best\n"
        "step 130 | val loss 1.9500\n";
    check(t, !strcmp(text, expected), "found\n%s", text);
    p.which = 1;
    check_exit(t, "eta", print_lines, &p, 0, "");
    read_file(run.metrics, text);
    check(t, strstr(text, "| 1000 ms | 25.0k tok/s | 38% peak | eta 31m40s\n") != NULL, "1900 s left, found\n%s", text);
    check(t, strstr(text, "| eta 28s\n") != NULL, "1800 steps of 10 ms plus 0.95^100 of the rest, found\n%s", text);
    run_free(&run);
}

// ---- metrics.jsonl ----

// the number under `key`, read as a reader would: as a double, and cast where the writer had a float
static void check_number(Test* t, const json_t* record, const char* key, int is_float, double expected) {
    const json_t* value = json_object_get(record, key);
    double found = is_float ? (double)(float)json_number_value(value) : json_number_value(value);
    int same = isfinite(expected) ? json_is_number(value) && memcmp(&found, &expected, sizeof found) == 0
                                  : json_is_null(value);
    check(t, same, "%s: found %a, expected %a (null if not finite)", key, found, expected);
}

static void check_record(Test* t, const json_t* record, const StepRecord* r, float val_loss, double val_bpb) {
    check(t, json_object_size(record) == 13, "expected 13 keys, found %zu", json_object_size(record));
    check(t, json_integer_value(json_object_get(record, "step")) == r->step, "step");
    check_number(t, record, "loss", 1, (double)r->loss);
    check_number(t, record, "norm", 1, (double)r->norm);
    check_number(t, record, "lr", 1, (double)r->lr);
    check_number(t, record, "ms", 0, r->ms);
    check_number(t, record, "tokens", 0, r->tokens < 0 ? NAN : (double)r->tokens);
    check_number(t, record, "tok_per_s", 0, r->tok_per_s);
    check_number(t, record, "peak", 0, r->peak < 0.0 ? NAN : r->peak);
    check_number(t, record, "val_loss", 1, (double)val_loss);
    check_number(t, record, "val_bpb", 0, val_bpb < 0.0 ? NAN : val_bpb);
    const json_t* skipped = json_object_get(record, "skipped");
    int is_skipped = json_is_null(skipped) ? -1 : json_is_false(skipped) ? 0 : json_is_true(skipped) ? 1 : 2;
    check(t, is_skipped == r->skipped, "skipped: found %d, expected %d", is_skipped, r->skipped);
    double age = seconds_now(CLOCK_REALTIME) - json_number_value(json_object_get(record, "time"));
    check(t, age > -1.0 && age < 60.0, "time: %g seconds ago", age);
}

static const float nine_digits = 1.01799735e36f;  // 8 digits read back to its neighbour

// 64 random bits
static uint64_t random_bits(uint64_t* state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state ^ (*state >> 32);
}

static void test_records(Test* t) {
    Run run = run_new();
    Log log = {0};
    char text[MAX_TEXT];
    uint64_t state = 1;
    log_open(&log, run.folder, -1, 1);
    read_file(run.metrics, text);
    json_t* schema = line_of(text, 0);
    size_t n_keys = json_object_size(json_object_get(schema, "schema"));
    check(t, n_keys == 13, "the first line describes the 13 keys, found: %s", text);
    json_decref(schema);
    // each record is in the file before log_step returns: it is read while the log is open
    for (int i = 0; i < 40; i++) {
        StepRecord r = example;
        uint64_t bits[2] = {random_bits(&state), random_bits(&state)};
        r.step = i + 1;
        r.loss = i == 1 ? -0.0f : float_from_bits((uint32_t)bits[0]);
        r.norm = i == 2 ? INFINITY : float_from_bits((uint32_t)(bits[0] >> 32));
        r.lr = i == 3 ? 1e-45f : 0.1f;
        memcpy(&r.ms, &bits[1], sizeof r.ms);
        r.tok_per_s = i == 4 ? -0.0 : 1e5 / 3.0;
        r.tokens = i == 5 ? (int64_t)1 << 53 : i;
        r.peak = i == 6 ? -1.0 : 0.1;
        r.skipped = i == 7;
        if (i == 8) { r.loss = r.norm = r.lr = nine_digits; }
        log_step(&log, &r, 0);
        read_file(run.metrics, text);
        json_t* record = line_of(text, i + 1);
        check_record(t, record, &r, NAN, NAN);
        json_decref(record);
    }
    log_close(&log);
    run_free(&run);
    check(t, log.metrics == NULL && log.path == NULL, "log_close leaves nothing");
}

static void validations_in_child(void* folder) {
    Log log = {0};
    if (!freopen("/dev/null", "w", stdout)) { fail_run("/dev/null: %s", strerror(errno)); }
    log_open(&log, (const char*)folder, -1, 1);
    log_validation(&log, 7, nine_digits, 1.0 / 3.0, 1);
    log_validation(&log, 8, NAN, -1.0, 0);
    _exit(0);  // not closed: what log_validation wrote must be in the file already
}

static void test_validation_records(Test* t) {
    Run run = run_new();
    char text[MAX_TEXT];
    StepRecord none = {7, 0, NAN, NAN, NAN, NAN, -1, NAN, NAN, -1};
    check_exit(t, "validations", validations_in_child, run.folder, 0, "");
    read_file(run.metrics, text);
    json_t *first = line_of(text, 1), *second = line_of(text, 2);
    check_record(t, first, &none, nine_digits, 1.0 / 3.0);
    none.step = 8;
    check_record(t, second, &none, NAN, NAN);
    json_decref(first);
    json_decref(second);
    run_free(&run);
}

// ---- keys of the trainer's ----

static json_t* own_schema(void) {
    return json_pack("{s:s, s:s, s:s}", "acc1", "share of targets found", "kind", "train or val", "count", "a number");
}

static void log_with_extras(void* path) {
    Log log = {0};
    StepRecord r = example;
    const char* run = (const char*)path;
    char printed[128];
    snprintf(printed, sizeof printed, "%s/metrics.jsonl.tmp", run);
    log.extra_schema = own_schema();
    log_open(&log, run, -1, 1);
    if (!freopen(printed, "w", stdout)) { fail_run("%s: %s", printed, strerror(errno)); }
    log_extra(&log, json_pack("{s:o, s:s}", "acc1", json_finite((double)nine_digits), "kind", "train"));
    log_step(&log, &r, 1);
    log_step(&log, &r, 0);  // nothing is left of the step before
    log_extra(&log, json_pack("{s:o, s:i}", "acc1", json_finite((double)NAN), "count", 3));
    log_validation(&log, 120, 1.5f, -1.0, 0);
    log.json_lines = 1;
    log_step(&log, &r, 0);
    log_step(&log, &r, 1);
    log_extra(&log, json_pack("{s:i}", "count", 4));
    log_validation(&log, 121, 1.5f, -1.0, 1);
    log_close(&log);
}

static void test_extras(Test* t) {
    const char* want[] = {"\"time\"", ", \"acc1\": 1.017997351858894e36, \"kind\": \"train\", \"count\": null}",
                          ", \"acc1\": null, \"kind\": null, \"count\": null}",
                          ", \"acc1\": null, \"kind\": null, \"count\": 3}",
                          ", \"acc1\": null, \"kind\": null, \"count\": null}",
                          ", \"acc1\": null, \"kind\": null, \"count\": null}",
                          ", \"acc1\": null, \"kind\": null, \"count\": 4}"};
    Run run = run_new();
    char text[MAX_TEXT], printed[MAX_TEXT];
    check_exit(t, "extras", log_with_extras, run.folder, 0, "");
    read_file(run.metrics, text);
    read_file(run.temporary, printed);
    json_t *schema = line_of(text, 0), *own = own_schema();
    const char* key;
    json_t* meaning;
    check(t, json_object_size(json_object_get(schema, "schema")) == 16, "16 keys in %s", text);
    json_object_foreach(own, key, meaning) {
        check(t, json_equal(json_object_get(json_object_get(schema, "schema"), key), meaning), "the meaning of %s",
              key);
    }
    const char* line = text;
    for (int i = 1; i < 7; i++) {
        line = strchr(line, '\n') + 1;
        const char *end = strchr(line, '\n'), *extras = strstr(line, want[i]);
        json_t* record = line_of(text, i);
        check(t, extras && extras + strlen(want[i]) == end, "line %d: expected %s at the end of %.*s", i + 1, want[i],
              (int)(end - line), line);
        check(t, json_object_size(record) == 16, "line %d: 16 keys", i + 1);
        json_decref(record);
    }
    const char* human = strstr(printed, "step 120 | val loss 1.5000\n");
    // what follows the validation, without the step that is not printed
    const char* records = strstr(text, want[3]) + strlen(want[3]) + 1;
    check(t, human && !strncmp(printed, "step 120/2000 | loss", 20), "lines for people first: %s", printed);
    check(t, human && !strcmp(human + 27, strchr(records, '\n') + 1), "then records: %s", printed);
    json_decref(schema);
    json_decref(own);
    run_free(&run);
}

// steps 1..n, written by a run that did not stop in order
static void write_steps(const Run* run, int resume_step, int first, int last) {
    Log log = {0};
    StepRecord r = example;
    log_open(&log, run->folder, resume_step, 1);
    for (r.step = first; r.step <= last; r.step++) { log_step(&log, &r, 0); }
    log_close(&log);
}

static void check_steps(Test* t, const Run* run, const char* what, const int* steps, int n) {
    char text[MAX_TEXT];
    read_file(run->metrics, text);
    int n_lines = 0;
    for (const char* c = text; *c; c++) { n_lines += *c == '\n'; }
    check(t, n_lines == n + 1, "%s: expected the schema and %d records, found %d lines:\n%s", what, n, n_lines, text);
    for (int i = 0; i <= n; i++) {
        json_t* line = line_of(text, i);
        json_int_t step = json_integer_value(json_object_get(line, "step"));
        if (i == 0) { check(t, json_object_get(line, "schema") != NULL, "%s: no schema in the first line", what);
        } else {
            check(t, step == steps[i - 1], "%s: line %d is step %lld, expected %d", what, i + 1, step, steps[i - 1]);
        }
        json_decref(line);
    }
}

static void resume_in_child(void* run) { write_steps((const Run*)run, 3, 4, 4); }

static void test_resume(Test* t) {
    const int steps[] = {1, 2, 3, 4, 5};
    Run run = run_new();
    write_steps(&run, -1, 1, 5);
    check_steps(t, &run, "new", steps, 5);
    write_steps(&run, 5, 6, 5);
    check_steps(t, &run, "resumed at the last step", steps, 5);
    write_steps(&run, 3, 4, 4);
    check_steps(t, &run, "steps after the checkpoint are cut", steps, 4);
    append_file(run.metrics, "{\"step\": 5, \"lo");
    check_exit(t, "a line cut by a kill", resume_in_child, &run, 0, "");
    check_steps(t, &run, "a line cut by a kill goes", steps, 4);
    append_file(run.metrics, "{\"step\": \"3\"}\n[3]\n\x01\n{\"step\": 3}");
    const int with_last[] = {1, 2, 3, 3, 4};
    check_exit(t, "broken lines", resume_in_child, &run, 0, "");
    check_steps(t, &run, "broken lines go, a whole record without its newline stays", with_last, 5);
    write_steps(&run, 0, 1, 1);
    check_steps(t, &run, "resumed at 0", steps, 1);
    unlink(run.metrics);
    write_steps(&run, 3, 4, 3);
    check_steps(t, &run, "no file to go on with", steps, 0);
    check(t, access(run.temporary, F_OK) != 0, "the temporary file is gone");
    run_free(&run);
}

static void warn_in_child(void* run) {
    write_steps((const Run*)run, 3, 4, 3);
    exit(2);  // so that check_exit looks at the one line on stderr
}

static void open_new_in_child(void* folder) {
    Log log = {0};
    log_open(&log, (const char*)folder, -1, 1);
}

static void write_full_in_child(void* run) {
    Log log = {0};
    log_open(&log, ((const Run*)run)->folder, -1, 1);
    fclose(log.metrics);
    log.metrics = fopen("/dev/full", "a");
    log_step(&log, &example, 0);
}

// no file may grow beyond a few bytes: a disk that is full
static void resume_full_in_child(void* run) {
    const struct rlimit few = {16, 16};
    signal(SIGXFSZ, SIG_IGN);
    if (setrlimit(RLIMIT_FSIZE, &few) != 0) { fail_run("setrlimit: %s", strerror(errno)); }
    resume_in_child(run);
}

static void test_errors(Test* t) {
    Run run = run_new();
    char missing[] = "/nowhere/run", message[256];
    check_exit(t, "no folder", open_new_in_child, missing, 1,
               ": /nowhere/run/metrics.jsonl.tmp: cannot be created: No such file or directory\n");
    snprintf(message, sizeof message, ": %s: No space left on device\n", run.metrics);
    check_exit(t, "full disk at a step", write_full_in_child, &run, 1, message);
    snprintf(message, sizeof message,
             ": %s: there is a run in this folder: choose another --run, or go on with it by --resume\n", run.metrics);
    check_exit(t, "a second run in the folder", open_new_in_child, run.folder, 2, message);
    append_file(run.metrics, "{\"step\"\n{\"step\": 7, \"lo");
    snprintf(message, sizeof message, "%s: 1 broken line dropped\n", run.metrics);
    check_exit(t, "the note about a broken line, and none about one cut by a kill", warn_in_child, &run, 2, message);
    snprintf(message, sizeof message, ": %s: File too large\n", run.temporary);
    check_exit(t, "full disk on resume", resume_full_in_child, &run, 1, message);
    check_steps(t, &run, "a resume that failed leaves the old file", NULL, 0);
    run_free(&run);
}

// ---- progress bar ----

// what a child that works for so long with `bar` as its stderr draws there; returns the bytes read from `reader`
static size_t watch_progress(double work, int bar, int reader, char text[MAX_TEXT]) {
    size_t used = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(bar, STDERR_FILENO);
        double start = seconds_now(CLOCK_MONOTONIC), seconds = 0.0;
        for (; seconds < work; seconds = seconds_now(CLOCK_MONOTONIC) - start) {
            progress("loading model.safetensors", (int64_t)(1e6 * seconds), 1000000);
        }
        progress("loading model.safetensors", 1000000, 1000000);
        progress("loading model.safetensors", 1000000, 1000000);
        _exit(0);
    }
    close(bar);
    for (ssize_t n; used < MAX_TEXT - 1 && (n = read(reader, text + used, MAX_TEXT - 1 - used)) > 0;) {
        used += (size_t)n;
    }
    text[used] = '\0';
    close(reader);
    waitpid(child, NULL, 0);
    return used;
}

// a new terminal, of which its other end is opened as *bar; -1: there are none here
static int new_terminal(int* bar) {
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0 || grantpt(terminal) != 0 || unlockpt(terminal) != 0) { return -1; }
    *bar = open(ptsname(terminal), O_RDWR | O_NOCTTY);
    return terminal;
}

static void test_progress(Test* t) {
    char text[MAX_TEXT];
    int ends[2], bar;
    if (pipe(ends) != 0) { fail_run("pipe: %s", strerror(errno)); }
    size_t n = watch_progress(0.65, ends[1], ends[0], text);
    check(t, n == 0, "nothing goes to a pipe, found %zu bytes", n);
    int terminal = new_terminal(&bar);
    if (terminal < 0) {
        skip(t, "no pseudo-terminals here");
        return;
    }
    double begun = seconds_now(CLOCK_MONOTONIC);
    n = watch_progress(0.65, bar, terminal, text);
    const int most = (int)((seconds_now(CLOCK_MONOTONIC) - begun - 0.3) / 0.1) + 1;  // the machine may have stood still
    int n_drawn = 0;
    for (const char* c = text; (c = strchr(c, '%')) != NULL; c++) { n_drawn++; }
    check(t, n_drawn >= 1 && n_drawn <= most, "0.65 s: expected 1 to %d drawings, found %d:\n%s", most, n_drawn, text);
    check(t, n == 75 * (size_t)n_drawn + 80, "drawings of 75 bytes and one clearing of 80, found %zu bytes", n);
    const char* first = "loading model.safetensors            [#";
    check(t, !strncmp(text, first, strlen(first)), "found %s", text);
    check(t, n > 80 && strspn(text + n - 80, " ") == 79 && text[n - 1] == '\r', "the line is cleared at the end");
    terminal = new_terminal(&bar);
    begun = seconds_now(CLOCK_MONOTONIC);
    n = watch_progress(0.1, bar, terminal, text);
    const double seconds = seconds_now(CLOCK_MONOTONIC) - begun;
    check(t, n == 0 || seconds > 0.3, "%.2f s: expected nothing, found %zu bytes:\n%s", seconds, n, text);
}

// ---- schedules ----

// values of a Python reference written from the definitions (mpmath for the cosine)
static void test_schedule_values(Test* t) {
    const struct { Schedule schedule; int step, n_steps, warmup; double peak,
                  final_fraction; uint32_t bits; } cases[] = {
        {SCHEDULE_LINEAR, 10, 100, 10, 0.0003, 0.1, 0x399d4952},            // 0.000300000014
        {SCHEDULE_LINEAR, 37, 100, 10, 0.0003, 0.1, 0x3965a35d},            // 0.000218999994
        {SCHEDULE_LINEAR, 99, 100, 10, 0.0003, 0.1, 0x380a697b},            // 3.30000003e-05
        {SCHEDULE_COSINE, 11, 100, 10, 0.0003, 0.1, 0x399d3e48},            // 0.000299917767
        {SCHEDULE_COSINE, 37, 100, 10, 0.0003, 0.1, 0x39801c3d},            // 0.000244351017
        {SCHEDULE_COSINE, 55, 100, 10, 0.0003, 0.1, 0x392d03d9},            // 0.00016499999
        {SCHEDULE_COSINE, 99, 100, 10, 0.0003, 0.1, 0x37fc591c},            // 3.00822358e-05
        {SCHEDULE_COSINE, 1234567, 2000000, 1000, 0.0006, 0.0, 0x39497298},  // 0.000192115433
        {SCHEDULE_WSD, 79, 100, 10, 0.0003, 0.1, 0x399d4952},               // 0.000300000014
        {SCHEDULE_WSD, 81, 100, 10, 0.0003, 0.1, 0x397b4429},               // 0.00023962617
        {SCHEDULE_WSD, 99, 100, 10, 0.0003, 0.1, 0x381a80f3},               // 3.68365545e-05
        {SCHEDULE_WSD, 13, 17, 3, 1.0, 0.25, 0x3f800000},                   // d = 13, the square root of 0
        {SCHEDULE_WSD, 14, 17, 3, 1.0, 0.25, 0x3f200000},                   // 0.625
        {SCHEDULE_CONSTANT, 3, 100, 10, 0.0003, 0.1, 0x38fba882},           // 0.000119999997
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float got = schedule_lr(cases[i].schedule, cases[i].step, cases[i].n_steps, cases[i].warmup, cases[i].peak,
                                cases[i].final_fraction);
        float want = float_from_bits(cases[i].bits);
        char what[32];
        snprintf(what, sizeof what, "case %zu", i);
        check_bits(t, what, &got, &want, 1);
    }
}

// numbers computed elsewhere, to the digits given there
static void test_schedule_table(Test* t) {
    const int steps[] = {0, 4, 9, 10, 32, 55, 99};
    const double want[] = {1e-4, 5e-4, 1e-3, 1e-3, 8.7370291e-4, 5.5e-4, 1.0027413e-4};
    for (int i = 0; i < 7; i++) {
        const double found = (double)schedule_lr(SCHEDULE_COSINE, steps[i], 100, 10, 1e-3, 0.1);
        // a float, of a float angle
        check(t, fabs(found - want[i]) < 2e-7 * want[i], "step %d: found %.9g, expected %.8g", steps[i], found,
              want[i]);
    }
}

static void test_schedule_shape(Test* t) {
    const int N = 50, w = 7;
    for (int k = 0; k < 4; k++) {
        const Schedule schedule = (Schedule)k;
        const ShortText name = choice_name(SCHEDULE_NAMES, k);
        for (int s = 0; s < N; s++) {
            float lr = schedule_lr(schedule, s, N, w, 2.0, 0.25);
            float before = s > 0 ? schedule_lr(schedule, s - 1, N, w, 2.0, 0.25) : 0.0f;
            int ok = s < w ? lr == (float)(2.0 * (s + 1) / w) : lr <= before && lr >= 0.5f;
            if (k == 0 && s >= w) { ok = lr == 2.0f; }
            if (k == 3 && s >= w) { ok = ok && (lr == 2.0f) == (s <= 40); }  // 40 = 0.8 * 50, where sqrt is still 0
            check(t, ok, "%s at %d is %g after %g", name.s, s, (double)lr, (double)before);
        }
        check(t, schedule_lr(schedule, 0, 1, 0, 2.0, 0.25) == 2.0f, "%s: a single step runs at the peak", name.s);
    }
}

static void test_schedule_names(Test* t) {
    const struct { const char* name; int value; } schedules[] = {
        {"constant", SCHEDULE_CONSTANT}, {"linear", SCHEDULE_LINEAR}, {"cosine", SCHEDULE_COSINE}, {"wsd", SCHEDULE_WSD}, {"step", -1},
    };
    for (int i = 0; i < 5; i++) {
        const int found = choice_find(SCHEDULE_NAMES, schedules[i].name);
        check(t, found == schedules[i].value, "%s: expected %d, found %d", schedules[i].name, schedules[i].value, found);
    }
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"formats", "durations, counts and bytes as people read them, also where a unit carries over", test_formats},
        {"float text", "fewest digits that read back to the same bits", test_format_float},
        {"widths", "whole characters of UTF-8 fill a line of the box; none of them drives a terminal", test_text_that_fits},
        {"lines", "step and validation lines as in the specification; eta from recent steps", test_lines},
        {"records", "one object per step, at once in the file, every number to the same bits", test_records},
        {"validation records", "the same keys, null where nothing was measured", test_validation_records},
        {"extras",
         "the trainer's keys stand behind the others, null where a record has none; records are printed if wanted",
         test_extras},
        {"resume", "records after the checkpoint and broken lines are cut, all others kept", test_resume},
        {"errors", "full disk, no folder, a run already there: one line and the right status", test_errors},
        {"progress", "drawn on a terminal only, after 0.3 s, at most ten times a second, cleared at the end", test_progress},
        {"schedule values", "bits of the reference", test_schedule_values},
        {"schedule table", "warm-up and cosine of the specification's other trainer", test_schedule_table},
        {"schedule shape", "warm-up is linear, then every schedule falls or stays", test_schedule_shape},
        {"schedule names", "stand in the order of the enum, and there are no more", test_schedule_names},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
