/*
The folder of a run, beside its checkpoints.
    run_holds          does a path lie in the folder of a run?
    run_check_unused   refuses a folder that holds another run, or a model, before any work
    run_open           makes the folder, settings.json and the log
    run_show_sample    samples.txt
    run_open_answers   answers.jsonl
    run_summary        summary.json: how a run ended
    settings.json      command lines, options, build, data with checksums: enough to make the same run again
*/
#ifndef LLMC_FOLDER_H
#define LLMC_FOLDER_H
#include "../core/vec.h"         // VLANES
#include "checkpoints.h"         // run_check_folder, RunState, RunOptions
#include "log.h"                 // Log, log_open
#include "peak.h"                // processor_name

// clang's __VERSION__ begins with its name
#if defined(__clang__) || defined(__CUDACC__)
#define COMPILER __VERSION__
#else
#define COMPILER "gcc " __VERSION__
#endif

static inline const char* build_name(void) {
#if defined(SYSTEM_LIBM)
    return "parity build: the C library's functions, llm.c's order, no fused multiply-add";
#elif defined(__CUDACC__) && !defined(EXACT)
    return "fast build: the same bits only on one kind of GPU";
#else
    return MADD_IS_FAST ? "exact build: the same bits on any machine and number of threads"
                        : "exact build, slow: for a CPU without fused multiply-add (ARCH=native has this one's)";
#endif
}

// samples after the checkpoint come again
static inline void run_cut_samples_(const RunOptions* o, const RunState* s) {
    char path[PATH_BYTES];
    struct stat status;
    if (lstat(path_join(path, o->run, "samples.txt"), &status) != 0) { return; }
    const int fd = file_append(path);
    const int cut = status.st_size <= s->n_sample_bytes || ftruncate(fd, s->n_sample_bytes) == 0;
    if (!cut) { fail_run("%s: cannot be cut: %s", path, strerror(errno)); }
    close(fd);
}

#define RUN_ANSWERS "answers.jsonl"

// answers after the checkpoint come again, and its own where a signal came before them
static inline void run_cut_answers_(const RunOptions* o, const RunState* s) {
    char path[PATH_BYTES], temporary[PATH_BYTES];
    path_join(path, o->run, RUN_ANSWERS);
    if (!path_exists(path)) { return; }
    FILE* out = fdopen(file_create(path_join(temporary, o->run, RUN_ANSWERS ".tmp")), "w");
    if (!out) { log_fail_(temporary); }
    log_copy_(out, path, s->step, !s->interrupted);
    if (fflush(out) != 0 || ferror(out) || fsync(fileno(out)) != 0 || fclose(out) != 0) { log_fail_(temporary); }
    if (rename(temporary, path) != 0) { log_fail_(path); }
}

// a new run stands beside no other's checkpoints, and beside no model
static inline void run_check_unused(const RunOptions* o) {
    run_check_folder(o);
    if (o->resume) { return; }
    if (checkpoint_newest(o->run, -1) < 0) {
        run_check_empty(o);
        return;
    }
    fail_input("%s: there are checkpoints in this folder: choose another --run, or go on with them by --resume",
               o->run);
}

enum { N_RUN_FILES = 5 };

// the files that a run writes beside checkpoints
static inline const char* const* run_file_names(void) {
    static const char* const names[N_RUN_FILES] = {"metrics.jsonl", "samples.txt", "settings.json", "summary.json",
                                                   RUN_ANSWERS};
    return names;
}

// does a path, which need not exist, lie in the folder of a run, or of its checkpoints?
static inline int run_holds(const char* path) {
    char folder[PATH_BYTES], below[PATH_BYTES], metrics[PATH_BYTES], settings[PATH_BYTES];
    if (!path_resolve_(below, path)) { return 0; }
    while (strcmp(path_parent(folder, below), below) != 0) {
        const int has_metrics = path_exists(path_join(metrics, folder, "metrics.jsonl"));
        if (has_metrics && path_exists(path_join(settings, folder, "settings.json"))) { return 1; }
        memcpy(below, folder, sizeof below);
    }
    return 0;
}

// metrics.jsonl as metrics.old-2.jsonl
static inline const char* run_old_name_(char path[PATH_BYTES], const RunOptions* o, const char* name, int number) {
    char aside[64];
    const char* dot = strchr(name, '.');
    snprintf(aside, sizeof aside, "%.*s.old-%d%s", (int)(dot - name), name, number, dot);
    return path_join(path, o->run, aside);
}

// What an earlier start has left that ended before its first checkpoint, or somebody else under these names: the run
// begins anew, its records are set aside
static inline void run_set_aside_(const RunOptions* o) {
    const char* const* names = run_file_names();
    char path[PATH_BYTES], aside[PATH_BYTES], moved[128] = "";
    int number = 1;
    for (int i = 0; i < N_RUN_FILES; i++) {
        while (path_exists(run_old_name_(aside, o, names[i], number))) { number++; }
    }
    for (int i = 0; i < N_RUN_FILES; i++) {
        if (!path_exists(path_join(path, o->run, names[i]))) { continue; }
        run_old_name_(aside, o, names[i], number);
        if (rename(path, aside) != 0) { fail_run("%s: cannot be renamed to %s: %s", path, aside, strerror(errno)); }
        const size_t used = strlen(moved);
        snprintf(moved + used, sizeof moved - used, "%s%s", used > 0 ? ", " : "", names[i]);
    }
    if (*moved) {
        printf("%s: holds no checkpoint, so the run begins anew: %s of before have .old-%d in their names now\n",
               o->run, moved, number);
    }
}

// runs/<trainer>-<date-time> for a run without a name, with -2, -3, ... where others began in the same second
static inline void run_name_(Option* table, int n) {
    char name[128];
    const time_t now = time(NULL);
    int used = snprintf(name, sizeof name, "runs/%.60s-", program_invocation_short_name);
    used += (int)strftime(name + used, sizeof name - (size_t)used, "%Y%m%d-%H%M%S", localtime(&now));
    make_folder("runs");
    for (int k = 2; mkdir(name, 0777) != 0; k++) {
        if (errno != EEXIST) { fail_run("%s: this folder cannot be made: %s", name, strerror(errno)); }
        snprintf(name + used, sizeof name - (size_t)used, "-%d", k);
    }
    options_set(table, n, "run", name);
}

static inline json_t* run_command_(int argc, char** argv) {
    json_t* command = json_array();
    for (int i = 0; i < argc; i++) { json_array_append_new(command, json_string(argv[i])); }
    return command;
}

// settings.json of the starts before this one, or NULL
static inline json_t* run_old_settings_(const char* path, int resumes) {
    return resumes && path_exists(path) ? json_read(path) : NULL;
}

// "command" is the one that began the run; "starts" has them all, each with the step after which it went on
static inline void run_add_starts_(json_t* settings, json_t* before, const RunState* s, int argc, char** argv) {
    json_t *starts = json_incref(json_object_get(before, "starts")), *command = run_command_(argc, argv);
    if (!json_is_array(starts)) { starts = json_array(); }
    json_t* first = json_object_get(before, "command");
    json_object_set(settings, "command", json_is_array(first) ? first : command);
    json_array_append_new(
        starts, json_pack("{s:o, s:i, s:o, s:s, s:I, s:s*}", "command", command, "after_step", s->step, "folder",
                          run_folder_json(), "commit", COMMIT, "time",
                          (json_int_t)seconds_now(CLOCK_REALTIME), "job", getenv("TORCHELASTIC_RUN_ID")));
    json_object_set_new(settings, "starts", starts);
    json_decref(before);
}

// what settings.json says of a start
typedef struct {
    Option* table;                 // (n)
    int n;
    const RunOptions* o;
    const RunState* s;
    json_t* data;                  // of data_to_json
    int n_threads, n_ranks;
    int argc;                      // the command
    char** argv;
} RunStart;

static inline void run_open(Log* log, const RunStart* start) {
    Option* table = start->table;
    const RunOptions* o = start->o;
    const RunState* s = start->s;
    const int n = start->n;
    const int resume_step = o->resume ? s->step : -1;
    char path[PATH_BYTES];
    if (!*o->run) { run_name_(table, n); }
    make_folder(o->run);
    if (resume_step < 0) {
        run_lock(o->run);
        checkpoint_clean(o->run);
        run_check_unused(o);  // again: by now nobody else writes
        run_keep();
        run_set_aside_(o);
    } else {
        run_cut_samples_(o, s);
        run_cut_answers_(o, s);
    }
    log_open(log, o->run, resume_step, !s->interrupted);
    path_join(path, o->run, "settings.json");
    json_t* settings = json_pack("{s:s, s:n, s:o, s:o, s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:i}", "trainer",
                                 program_invocation_short_name, "command", "options", options_to_json(table, n),
                                 "grid", run_grid_to_json(table, n, o), "build", build_name(), "compiler", COMPILER,
                                 "flags", FLAGS, "commit", COMMIT, "cpu", processor_name().s, "lanes", VLANES,
                                 "threads", start->n_threads, "ranks", start->n_ranks);
    json_object_update(settings, start->data);
    run_add_starts_(settings, run_old_settings_(path, resume_step >= 0), s, start->argc, start->argv);
    json_replace(path, settings);
}

// a sample made while training, to the terminal and to samples.txt; which: "" or ", prompt 1 of 2: ..."
static inline void run_show_sample(const RunOptions* o, int step, const char* which, const char* text) {
    char path[PATH_BYTES];
    FILE* file = fdopen(file_append(path_join(path, o->run, "samples.txt")), "a");
    if (!file) { fail_run("%s: %s", path, strerror(errno)); }
    printf("--- sample after step %d%s\n%s---\n", step, which, text);
    fprintf(file, "--- sample after step %d%s\n%s---\n", step, which, text);
    if (fclose(file) != 0) { fail_run("%s: %s", path, strerror(errno)); }
}

// to go on with, and to be closed once the answers of a step are in it
static inline FILE* run_open_answers(const RunOptions* o) {
    char path[PATH_BYTES];
    FILE* file = fdopen(file_append(path_join(path, o->run, RUN_ANSWERS)), "a");
    if (!file) { fail_run("%s: %s", path, strerror(errno)); }
    return file;
}

static inline void run_close_answers(FILE* file, int step, int n) {
    if (fflush(file) != 0 || fsync(fileno(file)) != 0 || fclose(file) != 0) {
        fail_run(RUN_ANSWERS ": %s", strerror(errno));
    }
    printf("step %d | %d answer%s in " RUN_ANSWERS "\n", step, n, n == 1 ? "" : "s");
}

// the checkpoint of that step, if there is one, or null
static inline json_t* run_checkpoint_json_(const RunOptions* o, int step) {
    char folder[PATH_BYTES], manifest[PATH_BYTES];
    const int exists =
        step >= 0 && path_exists(path_join(manifest, checkpoint_folder(folder, o->run, step), "manifest.json"));
    return exists ? json_string(folder) : json_null();
}

// summary.json at the end of a run, for programs that start many. best: of the validations, null without one; its
// checkpoint may be missing, where none was saved at that step. extra: the trainer's own keys, or NULL; takes the
// reference
static inline void run_summary(const RunOptions* o, const RunState* s, int stopped_early, json_t* extra) {
    char path[PATH_BYTES], metrics[PATH_BYTES];
    const int best_step = isfinite(s->best_val) ? s->best_step : -1;
    json_t* summary =
        json_pack("{s:i, s:b, s:o, s:o, s:i, s:I, s:o, s:o, s:s}", "final_step", s->step, "stopped_early",
                  stopped_early, "best_val_loss", json_finite((double)s->best_val), "best_step",
                  best_step >= 0 ? json_integer(best_step) : json_null(), "updates", s->updates, "tokens",
                  (json_int_t)s->tokens, "checkpoint", run_checkpoint_json_(o, s->step), "best_checkpoint",
                  run_checkpoint_json_(o, best_step), "metrics", path_join(metrics, o->run, "metrics.jsonl"));
    if (extra) { json_object_update(summary, extra); }
    json_decref(extra);
    json_replace(path_join(path, o->run, "summary.json"), summary);
}
#endif  // LLMC_FOLDER_H
