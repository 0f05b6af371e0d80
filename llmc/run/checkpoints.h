/*
The checkpoints of a run: which one it goes on from, what comes back of it, which ones stay.
    run_check_folder       is --run a folder, or nothing yet? run_check_empty: one that holds no model
    run_has_checkpoint, run_find_checkpoint   for --continue and --resume; from there on the caller is the run's only
                                              writer. run_keep: of a folder made by the former, once the run writes
    run_restore            options and state of it
    run_newest_finite      the newest before anything went wrong
    run_save_begin, _end   a new one: between them save.h writes its files into the temporary folder
    box_checkpoints        a row of the box: what they take
The files of one checkpoint, and how it becomes whole: ../files/checkpoint.h. Explained in doc/checkpoints.md
*/
#ifndef LLMC_CHECKPOINTS_H
#define LLMC_CHECKPOINTS_H
#include "../core/tensor.h"        // Tensor
#include "../files/checkpoint.h"  // checkpoint_newest_good, checkpoint_publish, manifest_write
#include "../files/hf_folder.h"   // HF_WEIGHTS
#include "../text/pathlist.h"     // path_from, path_list_from
#include "state.h"                // RunState; run_options.h

static inline void run_check_folder(const RunOptions* o) {
    struct stat status;
    char folder[PATH_BYTES], manifest[PATH_BYTES];
    if (stat(o->run, &status) == 0 && !S_ISDIR(status.st_mode)) {
        options_fail("run", "%s: expected a folder, or a name for a new one; found a file", o->run);
    }
    for (size_t n = strlen(o->run); n > 0; n--) {  // the folder itself, then those that it is to stand in
        if (o->run[n] != '/' && o->run[n] != '\0') { continue; }
        snprintf(folder, sizeof folder, "%.*s", (int)n, o->run);
        if (path_exists(path_join(manifest, folder, "manifest.json"))) {
            options_fail("run", "%s: is or lies in a checkpoint, which is deleted when others are newer: name another "
                         "folder", o->run);
        }
    }
}

// A new run does not begin in the folder of a model or an adapter: --from and --lora would find its checkpoints there
static inline void run_check_empty(const RunOptions* o) {
    const char* const names[] = {HF_WEIGHTS, HF_INDEX, HF_ADAPTER_WEIGHTS};
    char path[PATH_BYTES];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (!path_exists(path_join(path, o->run, names[i]))) { continue; }
        options_fail("run", "%s holds %s, in whose place its readers would find the run's checkpoints: choose "
                     "another", o->run, names[i]);
    }
}

// Somebody else's run stays as it is: dev/tools/launch starts ranks again that have not begun theirs
static inline void run_check_job_(const RunOptions* o) {
    char path[PATH_BYTES];
    const char* job = getenv("LLMC_JOB");
    if (!job || !*job) { return; }
    json_t* settings = path_exists(path_join(path, o->run, "settings.json")) ? json_read(path) : NULL;
    const json_t* starts = json_object_get(settings, "starts");
    const json_t* last = json_array_get(starts, json_array_size(starts) - 1);
    const char* found = json_string_value(json_object_get(last, "job"));
    if (!found || strncmp(found, job, strlen(job)) != 0) {
        fail_input("%s: there are checkpoints in this folder, of a run that this launch has not begun: choose another "
                   "--run, or go on with them by --resume", o->run);
    }
    json_decref(settings);
}

// the folder of a run that this process has made and locked, and in which nothing of the run is yet; "": none
static inline char* run_made_(void) {
    static char path[PATH_BYTES] = "";
    return path;
}

static inline void run_remove_made_(void) {
    char path[PATH_BYTES];
    if (!*run_made_() || !is_same_file_(path_join(path, run_made_(), ".lock"), &run_lock_held_()->file)) { return; }
    unlink(path);
    rmdir(run_made_());
}

// of several that make it at once the one that has it locked
static inline void run_make_(const char* run) {
    const int is_new = !path_exists(run);
    make_folder(run);
    run_lock(run);
    if (is_new && atexit(run_remove_made_) == 0) { snprintf(run_made_(), PATH_BYTES, "%s", run); }
}

// the run begins to write
static inline void run_keep(void) { *run_made_() = '\0'; }

// Is there one to go on from? Asked for --continue, by the only writer: another may just be saving the first. begins:
// where there is none a run begins, so its folder is made and locked now, and of several that come at once one does. A
// new folder goes again with a process that ends before it writes (run_keep)
static inline int run_has_checkpoint(const RunOptions* o, int begins) {
    if (!*o->run) { options_fail("continue", "needs the --run to begin or to go on with"); }
    run_check_folder(o);
    const int is_new = checkpoint_newest(o->run, -1) < 0 && !checkpoint_is_aside(o->run);
    if (begins && is_new) { run_check_empty(o); }
    if (begins) { run_make_(o->run); }
    if (!path_exists(o->run)) { return 0; }
    run_lock(o->run);
    checkpoint_clean(o->run);
    const int has = checkpoint_newest(o->run, -1) >= 0;
    if (has) { run_check_job_(o); }
    return has;
}

// The newest good checkpoint of --run. From here on this process is the only one that writes to the run.
static inline int run_find_checkpoint(const RunOptions* o) {
    if (!*o->run) { options_fail("resume", "needs the --run to go on with"); }
    if (checkpoint_newest(o->run, -1) < 0 && !checkpoint_is_aside(o->run)) {
        char path[PATH_BYTES];
        if (path_exists(path_join(path, o->run, "settings.json"))) {
            options_fail("resume", "%s was stopped before its first checkpoint: give the command again that began it "
                         "(\"command\" in %s)", o->run, path);
        }
        options_fail(
            "resume",
            "%s holds no complete checkpoint: name the folder of the run itself, or begin one without --resume",
            o->run);
    }
    run_lock(o->run);
    checkpoint_clean(o->run);
    int step = checkpoint_newest_good(o->run);
    if (step < 0) { options_fail("resume", "%s: none of its checkpoints is whole", o->run); }
    return step;
}

// the folder in which the process was started; null where its name is no UTF-8
static inline json_t* run_folder_json(void) {
    char here[PATH_BYTES];
    json_t* folder = json_string(getcwd(here, sizeof here) ? here : "");
    return folder ? folder : json_null();
}

// Paths that a checkpoint has brought back were meant from the folder in which its run was started. From another one
// they are looked for there first, so that going on does not depend on where one stands
static inline void run_restore_paths_(Option* table, int n, const char* folder) {
    char here[PATH_BYTES];
    if (!folder || !*folder || !getcwd(here, sizeof here) || strcmp(here, folder) == 0) { return; }
    for (int i = 0; i < n; i++) {
        const Option* row = &table[i];
        const char* as_stored = option_path(row, OPTION_READS);
        if (!(row->flags & OPTION_RESTORED) || !*as_stored) { continue; }
        char* path = (row->flags & OPTION_LIST ? path_list_from : path_from)(folder, as_stored);
        options_set(table, n, row->name, path);
        free(path);
    }
}

// --continue comes with the model that the run began with, or it is a mistake
static inline void run_check_model_(const Option* table, int n, const RunOptions* o, const json_t* before) {
    const char *names[] = {"model", "from", "config"}, *typed[] = {o->model, o->from, o->config};
    for (int i = 0; i < 3; i++) {
        const char *was = json_string_value(json_object_get(before, names[i])), *now = typed[i];
        const int is_same = !was || strcmp(was, now) == 0 || path_is_same(was, now);
        if (options_given(table, n, names[i]) != 1 || is_same) { continue; }
        options_fail(names[i], "the run began with %s, found %s: choose another --run, or leave it out",
                     *was ? was : "another source", now);
    }
}

// What only a beginning can choose, as the rank of an adapter or a module that a model has or not, is what it was,
// whether typed or not
static inline void run_check_begun_(const Option* table, int n, const json_t* before) {
    json_t* typed = options_to_json(table, n);
    for (int i = 0; i < n; i++) {
        const json_t *was = json_object_get(before, table[i].name), *now = json_object_get(typed, table[i].name);
        if (!(table[i].flags & OPTION_BEGINS) || options_given(table, n, table[i].name) != 1) { continue; }
        if (!was || json_equal(was, now)) { continue; }
        char* text = json_dumps(was, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
        const char* begun = json_is_boolean(was) ? (json_is_true(was) ? "1" : "0") : text ? text : "";
        options_fail(table[i].name, "the run began with %s: choose another --run, or leave it out", begun);
    }
    json_decref(typed);
}

// state and options of that checkpoint; options typed now win
static inline RunState run_restore(Option* table, int n, const RunOptions* o, int step) {
    char folder[PATH_BYTES], path[PATH_BYTES];
    json_t* manifest = json_read(path_join(path, checkpoint_folder(folder, o->run, step), "manifest.json"));
    if (run_continues(table, n, o)) { run_check_model_(table, n, o, json_object_get(manifest, "options")); }
    run_check_begun_(table, n, json_object_get(manifest, "options"));
    options_from_json(table, n, json_object_get(manifest, "options"));
    options_from_json(table, n, json_object_get(manifest, "grid"));  // over what was in use
    run_restore_paths_(table, n, json_string_value(json_object_get(manifest, "folder")));
    if (options_given(table, n, "epochs") == 1 && options_given(table, n, "steps") != 1) {
        options_set(table, n, "steps", "0");
    }
    RunState s = run_state_from_json(json_object_get(manifest, "state"), path);
    json_decref(manifest);
    return s;
}

// ---- a new one, and which ones stay ----

// bytes of a checkpoint: parameters, their average where one is kept and, of what learns, both moments; about 300 for
// each tensor's entry, and the rest. frozen: of every slice in table order, NULL: none
static inline double run_checkpoint_bytes(const Tensor* table, int n, const int* frozen, int has_average) {
    double n_bytes = 8192.0;
    for (int i = 0, slice = 0; i < n; i++) {
        const double each = 300.0 + 4.0 * (double)tensor_disk_elements(&table[i]);
        for (int k = 0; k < tensor_slices(&table[i]); k++, slice++) {
            n_bytes += ((slice_is_frozen(frozen, slice) ? 1.0 : 3.0) + (has_average ? 1.0 : 0.0)) * each;
        }
    }
    return n_bytes;
}

// the temporary folder into which save.h writes config.json, model.safetensors and optimizer.safetensors
static inline const char* run_save_begin(char temporary[PATH_BYTES], const RunOptions* o, const RunState* s,
                                         double n_bytes) {
    run_check_lock(o->run);
    checkpoint_begin(temporary, o->run, s->step, n_bytes);
    return temporary;
}

// bytes of samples.txt, which belong to the state that is saved
static inline int64_t run_sample_bytes(const RunOptions* o) {
    char path[PATH_BYTES];
    struct stat status;
    return stat(path_join(path, o->run, "samples.txt"), &status) == 0 ? (int64_t)status.st_size : 0;
}

// samples.txt and metrics.jsonl belong to a checkpoint as far as they are written
static inline void run_sync_records_(const RunOptions* o) {
    const char* names[2] = {"metrics.jsonl", "samples.txt"};
    for (int i = 0; i < 2; i++) {
        char path[PATH_BYTES];
        if (path_exists(path_join(path, o->run, names[i]))) { path_sync(path); }
    }
}

// Of the checkpoints up to this step stay the newest --keep, the best one and each --keep-every-th. Later ones are
// damaged, or this run would have gone on from them: they give way when a checkpoint of their step is saved.
static inline void run_prune_(const RunOptions* o, const RunState* s) {
    char folder[PATH_BYTES];
    int kept = 1;  // this one
    if (s->skips > 0) { return; }  // what was saved before the updates that were not finite may be needed
    for (int step = checkpoint_newest(o->run, s->step); step >= 0; step = checkpoint_newest(o->run, step)) {
        int forever = step == s->best_step || (o->keep_every > 0 && step % o->keep_every == 0);
        if (kept++ >= o->keep && !forever) { checkpoint_remove(checkpoint_folder(folder, o->run, step)); }
    }
}

// the manifest, the final name, and room. data: what was learnt from (same_data.h), or NULL
static inline void run_save_end(const char* temporary, const SavedFiles* files, const Option* table, int n,
                                const RunOptions* o, const RunState* s, json_t* data) {
    char folder[PATH_BYTES], path[PATH_BYTES];
    run_sync_records_(o);
    manifest_write(path_join(path, temporary, "manifest.json"),
                   json_pack("{s:o, s:o, s:o, s:o, s:O*}", "state", run_state_to_json(s), "options",
                             options_to_json(table, n), "grid", run_grid_to_json(table, n, o), "folder",
                             run_folder_json(), "data", data), files);
    checkpoint_publish(temporary, checkpoint_folder(folder, o->run, s->step));
    run_prune_(o, s);
}

// the newest checkpoint up to `last` that is whole and whose last update was finite, -1 when there is none
static inline int run_newest_finite(const RunOptions* o, int last) {
    int step = checkpoint_newest(o->run, last + 1);
    for (; step >= 0; step = checkpoint_newest(o->run, step)) {
        char path[PATH_BYTES];
        ErrorText error;
        if (!checkpoint_verify(checkpoint_folder(path, o->run, step), &error)) { continue; }
        json_t* manifest = json_read(checkpoint_path(path, o->run, step, "manifest.json"));
        const int finite = json_integer_value(json_object_get(json_object_get(manifest, "state"), "skips")) == 0;
        json_decref(manifest);
        if (finite) { break; }
    }
    return step;
}

// ---- the box ----

// what the checkpoints of the run will take; a disk that is too small for them is no error yet, but said
static inline void box_checkpoints(const RunOptions* o, const RunState* s, double n_bytes) {
    double n_free = disk_free(*o->run ? o->run : ".");
    if (o->resume) { box_row("resumed", "after step %d", s->step); }
    const double n_left = o->steps > 0 ? fmax(0.0, (double)o->steps - s->step) : 1.0;  // 0: a dry run without data
    double n_saved = o->save_every > 0 ? ceil(n_left / o->save_every) : fmin(1.0, n_left);
    if (o->save_minutes > 0.0f) { n_saved = n_left; }
    const int saves_often = o->save_every > 0 || o->save_minutes > 0.0f;
    double n_forever = o->keep_every > 0 && saves_often ? floor(n_left / o->keep_every) : 0.0;
    double n_kept = fmin(n_saved, o->keep + 2.0 + n_forever);  // the newest, the best, and the one that is being
                                                               // written
    if (o->plan > 0) { box_row("checkpoints", "%.0f at most, of %s", n_kept, format_bytes(n_bytes).s); }
    if (n_free < 0.0 || o->plan > 0) { return; }
    box_row("checkpoints", "%.0f at most, of %s; %s free", n_kept, format_bytes(n_bytes).s, format_bytes(n_free).s);
    if (n_kept * n_bytes > n_free) {
        warn_alike("the run keeps up to %.0f checkpoint%s of %s, the disk has %s free", n_kept, n_kept > 1.0 ? "s" : "",
                   format_bytes(n_bytes).s, format_bytes(n_free).s);
    }
}
#endif  // LLMC_CHECKPOINTS_H
