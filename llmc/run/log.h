/*
What a run prints of its steps and validations, and what it records of them in metrics.jsonl. ASCII.

metrics.jsonl is a file of lines, each one JSON object. The first is {"schema": {key: meaning, ...}}; every other one is
a record with the same thirteen keys:
    step       updates done, this one included (0: before the first)      integer
    loss       training loss of the whole update, nats per target         float32
    norm       norm of all gradients before clipping                      float32
    lr         learning rate of this update                               float32
    ms         time of this step in milliseconds                          float64
    tokens     positions of rows since the run began, padding too         integer
    tok_per_s  of these, per second, in this step                         float64
    peak       share of the machine's matmul rate, 0..1                   float64
    skipped    whether the update was left out (outlier, non-finite)      true or false
    val_loss   validation loss, nats per target                           float32
    val_bpb    validation loss in bits per byte of text                   float64
    accuracy   share of right answers, HellaSwag's                        float64
    time       when the record was written, seconds since 1970            float64
An update gives one record whose val_* and accuracy are null; a validation after s updates gives one of its own, with
only step, val_* and time not null, and a test on examples one with step, accuracy and time. Unknown and non-finite
numbers are null too. Other numbers have the digits (9 for a float32, 17 for a float64) that read back to the same bits.
A trainer adds keys of its own behind these: Log.extra_schema says what they mean, log_extra what they are in the next
record, null where it does not; so does a run that measures more than usual (log_add_key). Where Log.json_lines is set,
the records are printed too, instead of the lines for people.
Each line is handed to the system before training goes on, so a kill costs at most the line being written. On resume the
records after the checkpoint's step are cut, for they come again.
Errors: what cannot be written ends the run (status 1) with the path and the system's reason.
        On resume a line of more than 1 MiB is no record: status 2, with its number.
*/
#ifndef LLMC_LOG_H
#define LLMC_LOG_H
#include "../core/jsonfile.h"  // json_parse_within, JsonBudget
#include "../core/outfile.h"  // file_create, file_append
#include "../core/print.h"  // seconds_now, format_count, format_duration; fail_run, fail_input, malloc_check
#include <assert.h>

typedef struct {
    json_t* extra_schema;  // {key: meaning} of the trainer's keys, or NULL; and
    int json_lines;        // whether records are printed: set, or zero, before log_open
    json_t* extra;         // the trainer's values of the next record, and
    ShortText note;        // its field of the next step line, "": none
    FILE* metrics;         // NULL: nothing is recorded
    char* path;            // of metrics.jsonl, for messages
    double ms_sum;         // the steps' times, each weighing 0.95 of the next ...
    double ms_weights;     // ... and those weights: the quotient is the recent average behind the eta
    int columns;           // of the terminal in the last step line, 0: no terminal;
    int n_left_out;        // fields that it had no room for
} Log;

typedef struct {
    int step, n_steps;  // updates done, this one included, of how many
    float loss, norm, lr;
    double ms;          // time of this step
    int64_t tokens;     // since the run began, this step included
    double tok_per_s;
    double peak;        // share of the machine's matmul rate, 0..1; negative = unknown
    int skipped;        // 1: the update was left out
} StepRecord;

__attribute__((noreturn))
static inline void log_fail_(const char* path) { fail_run("%s: %s", path, strerror(errno)); }

static inline void log_schema_(FILE* metrics, json_t* extra_schema) {
    const char* key;
    json_t* meaning;
    fprintf(metrics, "{\"schema\": {"
            "\"step\": \"updates done\", \"loss\": \"training loss, nats per target\", "
            "\"norm\": \"gradient norm before clipping\", \"lr\": \"learning rate\", "
            "\"ms\": \"milliseconds of the step\", \"tokens\": \"positions of rows so far, padding too\", "
            "\"tok_per_s\": \"tokens per second\", \"peak\": \"share of the matmul rate, 0..1\", "
            "\"skipped\": \"update left out\", \"val_loss\": \"validation loss, nats per target\", "
            "\"val_bpb\": \"validation loss, bits per byte\", \"accuracy\": \"share of right answers\", "
            "\"time\": \"seconds since 1970\"");
    json_object_foreach(extra_schema, key, meaning) {
        fprintf(metrics, ", \"%s\": \"%s\"", key, json_string_value(meaning));
    }
    fprintf(metrics, "}}\n");
}

// the step of a line of metrics.jsonl, or -1 if the line is the schema, or -2 if it is no record at all; of a
// validation?
static inline int64_t log_step_of_(const char* line, size_t n_bytes, int* is_validation) {
    json_error_t error;
    // answers may have \u0000
    const JsonBudget most = {JSON_READ_BYTES, JSON_MAX_DEPTH, JSON_READ_MARKS, JSON_ALLOW_NUL};
    json_t* record = json_parse_within(line, n_bytes, &most, &error);
    const json_t* step = json_object_get(record, "step");
    int64_t found = json_is_integer(step) ? json_integer_value(step) : json_object_get(record, "schema") ? -1 : -2;
    *is_validation = json_is_null(json_object_get(record, "ms"));
    json_decref(record);
    return found;
}

enum { LOG_LINE_BYTES = 1 << 20 };  // a record has some hundreds

// of the line that begins here, with its end; one that is too long is not read further
static inline size_t log_line_bytes_(const char* line, size_t n_left) {
    const size_t n = n_left < LOG_LINE_BYTES + 1 ? n_left : LOG_LINE_BYTES + 1;
    const char* end = (const char*)memchr(line, '\n', n);
    return end ? (size_t)(end - line) + 1 : n;
}

// the records of `path` up to last_step, its validation only if `validated`, written to `out`; broken lines are dropped
// and counted. The end of a line that is missing is what kill -9 leaves of a step that comes again: nothing is said
static inline void log_copy_(FILE* out, const char* path, int last_step, int validated) {
    struct stat status;
    const int there = lstat(path, &status) == 0;
    if (!there && errno == ENOENT) { return; }  // a folder that came with its checkpoints only
    if (!there) { log_fail_(path); }
    if (!S_ISREG(status.st_mode)) { fail_input("%s: expected a file, found a link, folder, pipe or device", path); }
    MappedFile old;
    ErrorText reason;
    if (!file_map_or_not(&old, path, &reason)) { fail_run("%s: %s", path, reason.text); }
    int n_broken = 0, number = 0;
    for (size_t at = 0, n; at < old.n_bytes; at += n) {
        const char* line = (const char*)old.bytes + at;
        n = log_line_bytes_(line, old.n_bytes - at);
        number++;
        if (n > LOG_LINE_BYTES) {
            fail_input("%s:%d: expected a record, found a line of more than %d bytes: cut the file there, or remove it",
                       path, number, LOG_LINE_BYTES);
        }
        int is_validation;
        int64_t step = log_step_of_(line, n, &is_validation);
        int comes_again = step == last_step && is_validation && !validated;
        if (step >= 0 && step <= last_step && !comes_again) {
            fwrite(line, 1, n, out);
            if (line[n - 1] != '\n') { fputc('\n', out); }
        }
        n_broken += step < -1 && line[n - 1] == '\n';
    }
    if (n_broken) { fprintf(stderr, "%s: %d broken line%s dropped\n", path, n_broken, n_broken > 1 ? "s" : ""); }
    file_unmap(&old);
}

// The log is all zero, but for extra_schema (whose reference it takes) and json_lines. resume_step < 0: a new run,
// which must not have a metrics file yet; otherwise it goes on after the records up to resume_step, of its validation
// if that was done before the checkpoint (`validated`). run_dir NULL: nothing is recorded (ranks other than 0). The
// file is replaced as a whole or not at all.
static inline void log_open(Log* log, const char* run_dir, int resume_step, int validated) {
    json_t* extra_schema = log->extra_schema;
    const int json_lines = log->json_lines;
    memset(log, 0, sizeof *log);
    log->extra_schema = extra_schema;
    log->json_lines = json_lines;
    if (!run_dir) { return; }
    size_t size = strlen(run_dir) + sizeof "/metrics.jsonl.tmp";
    char* temporary = (char*)malloc_check(size, "path");
    log->path = (char*)malloc_check(size, "path");
    snprintf(temporary, size, "%s/metrics.jsonl.tmp", run_dir);
    snprintf(log->path, size, "%s/metrics.jsonl", run_dir);
    if (resume_step < 0 && access(log->path, F_OK) == 0) {
        fail_input("%s: there is a run in this folder: choose another --run, or go on with it by --resume", log->path);
    }
    FILE* out = fdopen(file_create(temporary), "w");
    if (!out) { log_fail_(temporary); }
    log_schema_(out, log->extra_schema);
    if (resume_step >= 0) { log_copy_(out, log->path, resume_step, validated); }
    if (fflush(out) != 0 || ferror(out) || fsync(fileno(out)) != 0 || fclose(out) != 0) { log_fail_(temporary); }
    if (rename(temporary, log->path) != 0) { log_fail_(log->path); }
    log->metrics = fdopen(file_append(log->path), "a");
    if (!log->metrics) { log_fail_(log->path); }
    free(temporary);
}

// a JSON number that reads back to the same bits (9 digits do for a float, 17 for a double); null for NaN and infinity
static inline ShortText log_number_(double x, int digits) {
    ShortText out = {"null"};
    const char* point = x == 0.0 && signbit(x) ? ".0" : "";  // "-0" would be read as an integer and lose its sign
    if (isfinite(x)) { snprintf(out.s, sizeof out.s, "%.*g%s", digits, x, point); }
    return out;
}

// one more key for extra_schema, before log_open
static inline void log_add_key(Log* log, const char* key, const char* meaning) {
    if (!log->extra_schema) { log->extra_schema = json_object(); }
    json_object_set_new(log->extra_schema, key, json_string(meaning));
}

// a field of the trainer's own in the next step line, such as "load 1.31"; behind those that it has there already
__attribute__((format(printf, 2, 3)))
static inline void log_note(Log* log, const char* format, ...) {
    const size_t n = strlen(log->note.s), n_mark = n > 0 ? strlen(" | ") : 0;
    va_list args;
    if (n + n_mark >= sizeof log->note.s) { return; }
    memcpy(log->note.s + n, " | ", n_mark);
    va_start(args, format);
    vsnprintf(log->note.s + n + n_mark, sizeof log->note.s - n - n_mark, format, args);
    va_end(args);
}

// such keys of the next record, beside those that were given before: some of extra_schema, as json_finite, json_string,
// ...; takes the reference
static inline void log_extra(Log* log, json_t* values) {
    if (!log->extra) { log->extra = json_object(); }
    json_object_update(log->extra, values);
    json_decref(values);
}

// `, "acc1": 0.5, ...` for all of extra_schema
static inline void log_print_extra_(FILE* out, const Log* log) {
    size_t n_found = 0;
    for (void* at = json_object_iter(log->extra_schema); at; at = json_object_iter_next(log->extra_schema, at)) {
        const char* key = json_object_iter_key(at);
        const json_t* value = json_object_get(log->extra, key);
        char* text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(17)) : NULL;
        fprintf(out, ", \"%s\": %s", key, text ? text : "null");
        n_found += value != NULL;
        free(text);
    }
    assert(n_found == json_object_size(log->extra));  // no key that the schema lacks
}

// one line; NAN stands for null, as do negative tokens and skipped
static inline void log_print_record_(FILE* out, const Log* log, const StepRecord* r, float val_loss, double val_bpb,
                                     double accuracy, double time) {
    double tokens = r->tokens < 0 ? NAN : (double)r->tokens;  // exact to 2^53
    const char* skipped = r->skipped < 0 ? "null" : r->skipped ? "true" : "false";
    fprintf(out, "{\"step\": %d, \"loss\": %s, \"norm\": %s, \"lr\": %s, ", r->step,
            log_number_((double)r->loss, 9).s, log_number_((double)r->norm, 9).s, log_number_((double)r->lr, 9).s);
    fprintf(out, "\"ms\": %s, \"tokens\": %s, \"tok_per_s\": %s, \"peak\": %s, \"skipped\": %s, ",
            log_number_(r->ms, 17).s, log_number_(tokens, 17).s, log_number_(r->tok_per_s, 17).s,
            log_number_(r->peak < 0.0 ? NAN : r->peak, 17).s, skipped);
    fprintf(out, "\"val_loss\": %s, \"val_bpb\": %s, \"accuracy\": %s, \"time\": %.3f",
            log_number_((double)val_loss, 9).s, log_number_(val_bpb < 0.0 ? NAN : val_bpb, 17).s,
            log_number_(accuracy, 17).s, time);
    log_print_extra_(out, log);
    fprintf(out, "}\n");
}

// into the file, out of our hands before this returns, and if `print` and so wanted to the terminal. Is anything left
// to print?
static inline int log_record_(Log* log, const StepRecord* r, float val_loss, double val_bpb, double accuracy,
                              int print) {
    const double time = seconds_now(CLOCK_REALTIME);
    const int prints = print && log->json_lines;
    if (log->metrics) {
        log_print_record_(log->metrics, log, r, val_loss, val_bpb, accuracy, time);
        if (fflush(log->metrics) != 0) { log_fail_(log->path); }
    }
    if (prints) {
        log_print_record_(stdout, log, r, val_loss, val_bpb, accuracy, time);
        fflush(stdout);
    }
    json_decref(log->extra);
    log->extra = NULL;
    return print && !prints;
}

// a field of the step line; on a narrow terminal that with the least gives_way goes first, 0 stays
typedef struct {
    ShortText text;
    int gives_way;
} StepField;

enum { STEP_FIELDS = 10 };

__attribute__((format(printf, 3, 4)))
static inline void step_field_(StepField* field, int gives_way, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(field->text.s, sizeof field->text.s, format, args);
    va_end(args);
    field->gives_way = gives_way;
}

static inline int step_field_is_shown_(const StepField* field, int n_left_out) {
    return field->text.s[0] && (field->gives_way == 0 || field->gives_way > n_left_out);
}

// A loss or norm that is NAN in a step that was not skipped was not computed
static inline void step_fields_(StepField* f, const StepRecord* r, const char* note, double seconds_left) {
    memset(f, 0, sizeof *f * STEP_FIELDS);
    step_field_(&f[0], 0, "step %d/%d", r->step, r->n_steps);
    if (isnan(r->loss)) { step_field_(&f[1], 0, r->skipped ? "loss nan" : "loss -"); }  // nan without a sign
    else { step_field_(&f[1], 0, "loss %.4f", (double)r->loss); }
    if (isnan(r->norm)) { step_field_(&f[2], 4, r->skipped ? "norm nan" : "norm -"); }
    else { step_field_(&f[2], 4, r->norm < 0.005f ? "norm %.1e" : "norm %.2f", (double)r->norm); }  // not 0.00
    step_field_(&f[3], 3, "lr %.1e", (double)r->lr);
    step_field_(&f[4], 2, "%.*f ms", r->ms < 9.95 ? 1 : 0, r->ms);
    step_field_(&f[5], 5, "%s tok/s", format_count(r->tok_per_s).s);
    if (r->peak >= 0.0) { step_field_(&f[6], 1, "%.0f%% peak", 100.0 * r->peak); }
    step_field_(&f[7], 6, "eta %s", format_duration(seconds_left).s);
    step_field_(&f[8], 7, "%s", note);
    if (r->skipped) { step_field_(&f[9], 0, "skipped"); }
}

// What has once made way stays away, so that fields stand below each other, until the terminal changes its width.
static inline void log_print_step_(Log* log, const StepField* f) {
    const int columns = terminal_columns();
    if (columns != log->columns) { log->n_left_out = 0; }
    log->columns = columns;
    for (; columns > 0 && log->n_left_out < STEP_FIELDS; log->n_left_out++) {
        int length = -3;
        for (int i = 0; i < STEP_FIELDS; i++) {
            if (step_field_is_shown_(&f[i], log->n_left_out)) { length += 3 + (int)strlen(f[i].text.s); }
        }
        if (length <= columns) { break; }
    }
    for (int i = 0; i < STEP_FIELDS; i++) {
        if (step_field_is_shown_(&f[i], log->n_left_out)) { printf("%s%s", i > 0 ? " | " : "", f[i].text.s); }
    }
    printf("\n");
    fflush(stdout);
}

// the record of one update, and if `print` its line, which on a terminal is no longer than that is wide:
// step 120/2000 | loss 1.8234 | norm 0.91 | lr 3.0e-04 | 41 ms | 25.0k tok/s | 38% peak | eta 1m17s
static inline void log_step(Log* log, const StepRecord* r, int print) {
    StepField fields[STEP_FIELDS];
    print = log_record_(log, r, NAN, NAN, NAN, print);
    log->ms_sum = 0.95 * log->ms_sum + r->ms;
    log->ms_weights = 0.95 * log->ms_weights + 1.0;
    step_fields_(fields, r, log->note.s, (r->n_steps - r->step) * log->ms_sum / log->ms_weights / 1000.0);
    log->note.s[0] = '\0';
    if (print) { log_print_step_(log, fields); }
}

// the record of something that is no update
static inline StepRecord log_no_update_(int step) {
    StepRecord none = {step, 0, NAN, NAN, NAN, NAN, -1, NAN, NAN, -1};
    return none;
}

// a validation after `step` updates; bits_per_byte negative = unknown:
// step 120 | val loss 1.9012 | 2.743 bits/byte | best
static inline void log_validation(Log* log, int step, float val_loss, double bits_per_byte, int best) {
    StepRecord none = log_no_update_(step);
    if (!log_record_(log, &none, val_loss, bits_per_byte, NAN, 1)) { return; }
    printf("step %d | val loss %.4f", step, (double)val_loss);
    if (bits_per_byte >= 0.0) { printf(" | %.3f bits/byte", bits_per_byte); }
    printf("%s\n", best ? " | best" : "");
    fflush(stdout);
}

// right answers of n after `step` updates:
// step 120 | HellaSwag 29.45% +- 0.45% | 2957 of 10042
static inline void log_accuracy(Log* log, int step, const char* name, int correct, int n, double standard_error) {
    StepRecord none = log_no_update_(step);
    double accuracy = (double)correct / n;
    if (!log_record_(log, &none, NAN, NAN, accuracy, 1)) { return; }
    printf("step %d | %s %.2f%% +- %.2f%% | %d of %d\n", step, name, 100.0 * accuracy, 100.0 * standard_error, correct,
           n);
    fflush(stdout);
}

static inline void log_close(Log* log) {
    if (log->metrics && fclose(log->metrics) != 0) { log_fail_(log->path); }
    free(log->path);
    json_decref(log->extra_schema);
    json_decref(log->extra);
    memset(log, 0, sizeof *log);
}
#endif  // LLMC_LOG_H
