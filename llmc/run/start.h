/*
How a run begins: options, data, model, plan, the box. Whatever is wrong with them ends it here, before anything is
computed or written.
    start_open      options, data, sizes of the model; conflicts
    start_device    threads or a GPU; the box; status 1 when memory is short
    start_training  what a run has beside its model: rows, log, folder
*/
#ifndef LLMC_START_H
#define LLMC_START_H
#include "../core/floatx.h"  // FLOATX_NAME
#include "../core/layers.h"  // freeze_slices
#include "folder.h"          // run_open, run_check_unused
#include "peak.h"            // matmul_peak, memory_available, check_memory
#include "save.h"            // save_find_model
#include "same_data.h"       // data_to_json, data_check
#include "tasks.h"           // task_open_generator
#include "train.h"           // train_row
#include "trainer.h"         // Run
#include <limits.h>

// a mistake of ours: a trainer that leaves out what every run needs, or half of a pair
static inline void start_check_trainer_(const Trainer* t) {
    assert(t->name && t->about && t->presets && t->stored_bytes > 0 && t->usual_T > 0);
    assert(t->choose && t->box && t->flops_per_token && t->activation_bytes && t->open && t->leaf && t->losses &&
           t->forward);
    assert(t->logits && t->next_logits && t->write_config && t->close && t->n_scores <= MAX_SCORES);
    assert((t->sparing != NULL) == (t->sparing_bytes != NULL));
    assert((t->extras != NULL) == (t->load_extras != NULL));
    assert((t->scores != NULL) == (t->n_scores > 0));
    assert(!t->without_more || t->more_loss);
}

// ---- options and sizes ----

static inline void start_parse_(Run* r, int argc, char** argv) {
    const Trainer* t = r->trainer;
    start_check_trainer_(t);
    r->n_options = run_options(r->table, &r->o, t->presets);
    if (t->more_data) { r->n_options = data_options(r->table, r->n_options, &r->d); }
    if (t->options) { t->options(r); }
    options_parse(r->table, r->n_options, argc, argv, t->about);
    options_refuse(r->o.resume && r->o.go_on, "continue", "means --resume where there is a checkpoint: leave that out");
    r->place = rank_place(run_is_typed(r, "rank") ? r->o.rank : "");
    r->comm = ranks_open(&r->place, &r->o);
    const int begins = !r->o.dry_run && run_will_train(r);
    const int goes_on = r->o.resume || (r->o.go_on && ranks_goes_on(r->comm, &r->o, begins));
    r->state = goes_on ? ranks_restore(r->comm, r->table, r->n_options, &r->o) : run_state_start(r->o.seed);
    if (goes_on) { options_set(r->table, r->n_options, "resume", "1"); }
    if (t->parsed) { t->parsed(r); }
    if (!goes_on && r->comm->rank == 0 && begins && *r->o.run) { run_check_unused(&r->o); }
}

static inline void start_freeze_(Run* r) {
    r->model->frozen = freeze_slices(r->o.freeze, r->model->table, r->model->n_table);
    if (r->trainer->freeze) { r->trainer->freeze(r); }
    model_find_lowest(r->model);
}

// is anything asked for? The message names those options of this trainer that ask for something, data first
static inline void start_check_purpose_(const Run* r) {
    char expected[512] = "";
    size_t used = 0;
    if (run_is_training(r) || r->o.eval_only || run_is_generating(r) || *r->o.probe || *r->o.export_hf ||
        r->exports_more) {
        return;
    }
    for (int i = 0; i < 2 * r->n_options; i++) {
        const Option* row = &r->table[i % r->n_options];
        if (!(row->flags & (i < r->n_options ? OPTION_TRAINS : OPTION_WORK)) || used >= sizeof expected) { continue; }
        used += (size_t)snprintf(expected + used, sizeof expected - used, "%s--%s", used > 0 ? ", " : "", row->name);
    }
    fail_input("nothing to do: expected %s or --dry-run", expected);
}

static inline void start_plan_rows_(Run* r) {
    RunOptions* o = &r->o;
    const int usual = r->trainer->usual_T < r->max_T ? r->trainer->usual_T : r->max_T;
    r->T = data_seq_len(&r->data, o, r->table, r->n_options, usual);
    if (r->T > r->max_T) {
        options_fail("seq-len", "expected at most the model's %d positions, found %d", r->max_T, r->T);
    }
    r->n_leaves = run_leaves(r->table, r->n_options, o, r->T);
}

// the paths that the option reads, one or several; none where it reads nothing
static inline void start_inputs_(PathList* list, const Option* row) {
    const char* text = option_path(row, OPTION_READS);
    memset(list, 0, sizeof *list);
    if (*text && row->flags & OPTION_LIST) { path_list_make(list, text); }
    else if (*text) { list->of[list->n++].path = string_copy(text); }
}

// Which of these paths would be gone if a file of this name were written? Folders that hold it count too, or not. On
// the heap; NULL: none
static inline char* start_overwritten_(const char* path, const Option* row, int folders_too) {
    PathList list;
    char* found = NULL;
    start_inputs_(&list, row);
    for (int i = 0; i < list.n && !found; i++) {
        const char* input = list.of[i].path;
        if ((folders_too || !path_is_folder(input)) && path_overwrites(path, input)) { found = string_copy(input); }
    }
    path_list_free(&list);
    return found;
}

// What a run reads has no name in its folder that the run will give to a file of its own. A folder that is read as a
// whole may hold the run: what a run writes is no data
static inline void start_check_inputs_(const Run* r) {
    char path[PATH_BYTES];
    if (!*r->o.run || r->o.resume) { return; }
    for (int i = 0; i < N_RUN_FILES; i++) {
        path_join(path, r->o.run, run_file_names()[i]);
        for (int k = 0; k < r->n_options; k++) {
            const char* input = start_overwritten_(path, &r->table[k], 0);
            if (!input) { continue; }
            options_fail(r->table[k].name, "%s %s a file that the run in --run %s writes: give another name or folder",
                         input, path_exists(input) ? "is" : "matches", r->o.run);
        }
    }
}

// where the option writes now; "": nowhere. --probe-out has a default, which only --probe writes
static inline const char* start_output_(const Run* r, const Option* row) {
    return row->value == &r->o.probe_out && !*r->o.probe ? "" : option_path(row, OPTION_WRITES);
}

// a file takes the name of nothing that is read: it would be gone
static inline void start_check_output_(const Run* r, const Option* of, int argc, char** argv) {
    const char* output = start_output_(r, of);
    for (int k = 0; k < r->n_options; k++) {
        char* input = start_overwritten_(output, &r->table[k], 1);
        if (!input) { continue; }
        free(input);
        options_fail(of->name, "%s is what --%s reads: give another name", output, r->table[k].name);
    }
    for (int k = 0; options_args_file(argc, argv, k); k++) {
        options_refuse(path_is_same(output, options_args_file(argc, argv, k)), of->name,
                       "is the file of --args: give another name");
    }
    if (path_overwrites(output, r->weights) || path_overwrites(output, r->config)) {
        options_fail(of->name, "%s belongs to the model that is read: give another name", output);
    }
}

// a folder that is written as a whole, at first under another name, holds no other output
static inline void start_check_apart_(const Option* folder, const char* path, const char* other, const char* inside) {
    char temporary[PATH_BYTES];
    if (!(folder->flags & OPTION_FOLDER) || !*path || !*inside) { return; }
    if (path_lies_in(inside, path) || path_lies_in(inside, hf_export_temporary(temporary, path))) {
        options_fail(other, "lies in the folder of --%s, which is written as a whole: give another",
                     folder->name);
    }
}

// Nor does an output lie in the run's folder, whose files are the run's, or take the name of another output
static inline void start_check_outputs_(const Run* r, int argc, char** argv) {
    for (int i = 0; i < r->n_options; i++) {
        const Option* row = &r->table[i];
        const char* output = start_output_(r, row);
        if (!*output) { continue; }
        for (int k = 0; k < i; k++) {
            const char* other = start_output_(r, &r->table[k]);
            options_refuse(*other && path_is_same(output, other), row->name,
                           "is the name of another output: give each one of its own");
            start_check_apart_(row, output, r->table[k].name, other);
            start_check_apart_(&r->table[k], other, row->name, output);
        }
        start_check_apart_(row, output, "run", r->o.run);
        options_refuse(*r->o.run && path_is_same(output, r->o.run), row->name,
                       "is the folder of --run, whose files are the run's: give another");
        if (*r->o.run && path_lies_in(output, r->o.run)) {
            options_fail(row->name, "%s lies in --run %s, whose files are the run's: give another folder", output,
                         r->o.run);
        }
        // into a folder looks who writes it (hf_export_check)
        if (!(row->flags & OPTION_FOLDER)) { start_check_output_(r, row, argc, argv); }
    }
}

// what is asked of texts that the model writes
static inline void start_texts_(Run* r) {
    const RunOptions* o = &r->o;
    const int samples = run_is_training(r) && o->sample_every > 0;
    ErrorText error;
    r->prompts.longest = 1;
    if (!stop_texts_parse(&r->stop, o->stop, &error)) { options_fail("stop", "%s", error.text); }
    if (*o->stop && (samples || run_is_generating(r))) { task_need_text(r, "stop"); }
    if (!*o->sample_prompts) { return; }
    // --sample-every 0, typed, switches prompts off that stand in a file of options
    options_refuse(!samples && run_is_typed(r, "sample-prompts") && !run_is_typed(r, "sample-every"), "sample-prompts",
                   "is for samples while training: give --sample-every too");
    if (!samples) { return; }
    task_need_text(r, "sample-prompts");
    prompts_read(&r->prompts, o, &r->tokenizer, r->max_T);
}

// token shards, or a dry run without any data, and no tokenizer with as many tokens as the model: nobody said "bytes",
// and neither do the settings
static inline void start_forget_tokenizer_(Run* r) {
    const int is_data = has_data(&r->data.train) || has_data(&r->data.val) || (r->o.dry_run && run_is_training(r));
    if (!is_data || run_has_text(r) || run_is_typed(r, "tokenizer")) { return; }
    options_set(r->table, r->n_options, "tokenizer", "");
}

// A file of moments names two tensors for each of the model's: more of them than a header can hold are refused now, not
// at the first checkpoint
static inline void start_check_names_(const Run* r) {
    const Model* m = r->model;
    const double of_each = 75.0;  // "exp_avg_sq.", type, shape, place and marks, about
    double n_bytes = 0.0;
    for (int i = 0; i < m->n_table; i++) {
        char name[NAME_BYTES];
        const int n = tensor_slices(&m->table[i]);
        n_bytes += 2.0 * n * ((double)strlen(tensor_slice_name(name, sizeof name, &m->table[i], n - 1)) + of_each);
    }
    if (n_bytes > SAFETENSORS_MAX_HEADER || 2 * m->n_slices > SAFETENSORS_MAX_TENSORS) {
        fail_input("the model: %d tensors by name, whose moments no safetensors file can name: its header ends at %d "
                   "bytes: fewer layers or experts", m->n_slices, SAFETENSORS_MAX_HEADER);
    }
}

// sizes that follow from the model and the data; conflicts
static inline void start_plan_(Run* r, int argc, char** argv) {
    RunOptions* o = &r->o;
    start_plan_rows_(r);
    start_check_outputs_(r, argc, argv);
    if (r->trainer->check) { r->trainer->check(r); }
    if (run_is_training(r)) { start_check_names_(r); }
    assert(r->trainer->write_more || !r->exports_more);
    data_check_tokenizer(&r->data, o, &r->tokenizer, r->V, run_has_text(r));
    save_check_tokenizer(r);
    start_forget_tokenizer_(r);
    start_check_purpose_(r);
    options_refuse(run_is_training(r) && o->ema > 0.0f && r->trainer->stored_bytes < sizeof(float) && !r->has_masters,
                   "ema", "averages float weights: give --master-weights 1");
    const int averages = run_is_training(r) && o->ema > 0.0f;
    options_refuse(run_takes_average(r) && !*o->from && !o->resume && !averages, "ema-weights",
                   "takes the averaged weights of a checkpoint or of a run: give --from, or --ema");
    options_refuse(run_is_training(r) && o->noise_scale > 0 && r->n_leaves == 1, "noise-scale",
                   "compares the micro-batches of an update, of which there is one: give --grad-accum 2 or more");
    if (run_is_training(r) || *o->export_hf || o->doc_reset) { data_check_documents(&r->data, o, run_end_of_text(r)); }
    if (r->comm->size > 1 && !run_is_training(r) && !o->eval_only) {
        ranks_fail_input(r->comm, "%d ranks are for training and --eval-only: start one", r->comm->size);
    }
    if (*o->probe) {  // it brings its own sizes
        probe_read(&r->probe, o->probe, r->V, r->classes, r->max_T);
        o->batch_size = r->probe.B;
        r->T = r->probe.T;
        r->n_leaves = 1;
    }
    // config.json names it: refuse now, not at a checkpoint
    if (run_is_training(r) || *o->export_hf) { run_end_of_text(r); }
    if (*o->export_hf) { hf_export_check(o->export_hf); }
    start_texts_(r);
    if (run_is_training(r)) { start_check_inputs_(r); }
    if (run_is_training(r) && !model_learns(r->model)) {
        options_fail("freeze", "every tensor is frozen: nothing learns");
    }
    data_plan(&r->data, o, r->T, r->V, r->classes, r->n_leaves);
}

// A run that is over has nothing left to do, unless it is to write something, or a signal came before its last
// validation and sample; several ranks find that out together
static inline void start_check_left_(const Run* r) {
    const int is_over = r->o.resume && run_is_training(r) && r->state.step >= r->o.steps;
    if (!is_over || r->state.interrupted) { return; }
    char folder[PATH_BYTES];
    printf("all %d steps are done, checkpoint in %s; to go on, give more --steps\n", r->o.steps,
           checkpoint_folder(folder, r->o.run, r->state.step));
    if (r->comm->size == 1 && !*r->o.export_hf && !r->exports_more && !r->o.dry_run) {
        exit(fflush(stdout) == 0 ? 0 : 1);
    }
}

// Ranks that were given the same path may find another file there. config.json comes before all that follows from it
static inline void start_compare_config_(const Run* r) {
    MappedFile file;
    ErrorText reason;
    uint64_t sum = 0;  // of a preset, or of a file that cannot be read: choose says why
    if (*r->config && file_map_or_not(&file, r->config, &reason)) {
        sum = XXH3_64bits(file.bytes, file.n_bytes);
        file_unmap(&file);
    }
    ranks_same(r->comm, "config.json", sum);
}

static inline void start_compare_(Run* r) {
    const Tokenizer* t = &r->tokenizer;
    const void* tokens = t->json ? (const void*)t->json : (const void*)t->bytes;
    const size_t n_bytes = t->json ? t->n_json : t->starts[t->n_tokens];
    ranks_compare(r->comm, r->table, r->n_options, &r->state, &r->data);
    ranks_same(r->comm, "tokenizer", XXH3_64bits_withSeed(tokens, n_bytes, (uint64_t)t->eot));
    ranks_same(r->comm, "examples (--hellaswag)", r->data.examples.xxh3);
    ranks_same(r->comm, "prompts (--sample-prompts)", r->prompts.xxh3);
}

static inline void start_open(Run* r, int argc, char** argv) {
    start_parse_(r, argc, argv);
    save_find_model(r);
    tokenizer_open(&r->tokenizer, r->o.tokenizer);
    if (r->trainer->more_data) { data_open_more(&r->data, &r->o, &r->d, r->table, r->n_options, &r->tokenizer); }
    else { data_open(&r->data, &r->o, &r->tokenizer); }
    save_find_again(r);
    start_compare_config_(r);
    r->trainer->choose(r);
    start_freeze_(r);
    model_layout_stored(r->model, r->trainer->stored_bytes);
    start_plan_(r, argc, argv);
    save_find_companions(r);
    // not the path of the tokenizer.json that says no more than that
    const int is_bytes = *r->o.tokenizer && strcmp(r->tokenizer.kind, "bytes") == 0;
    if (is_bytes) { options_set(r->table, r->n_options, "tokenizer", "bytes"); }
    start_compare_(r);
    start_check_left_(r);
}

// micro-batches that threads make ahead (--prefetch-buffer), and that stay: a GPU may fetch those of a whole update
// late
static inline int start_batches_ahead_(const Run* r) { return r->trainer->more_data ? r->d.prefetch_buffer : 1; }
static inline int start_batches_kept_(const Run* r) {
    return DEVICE_IS_SHARED ? 1 : (int)ceil_div(r->n_leaves, r->comm->size);
}

// ---- the box ----

static inline double start_workspace_(const Run* r, int B) {
    return r->trainer->workspace_bytes ? r->trainer->workspace_bytes(r, B) : 0.0;
}

// activations and scratch of a micro-batch of B rows; sparing: with the option that saves most
static inline double start_batch_bytes_(const Run* r, int B, int sparing) {
    const Trainer* t = r->trainer;
    const Purpose purpose = run_is_training(r) || *r->o.probe ? TO_TRAIN : TO_EVALUATE;
    const double activations = sparing ? t->sparing_bytes(r, B, r->T) : t->activation_bytes(r, purpose, B, r->T);
    return activations + start_workspace_(r, B);
}

// the largest --batch-size whose activations and scratch fit in n_bytes
static inline int start_largest_batch_(const Run* r, double n_bytes, int sparing) {
    int B = 0;
    for (int more = 1 << 20; more > 0; more /= 2) {
        if ((int64_t)(B + more) * r->T > INT_MAX / 4) { continue; }  // as run_leaves refuses
        if (start_batch_bytes_(r, B + more, sparing) <= n_bytes) { B += more; }
    }
    return B;
}

// n_bytes are free for activations and scratch of a micro-batch
static inline void start_box_largest_(const Run* r, double n_bytes) {
    const Trainer* t = r->trainer;
    const int B = start_largest_batch_(r, n_bytes, 0);
    const int sparing = t->sparing && run_is_training(r) ? start_largest_batch_(r, n_bytes, 1) : 0;
    if (sparing > B) { box_row("  largest batch-size", "%d; with %s: %d", B, t->sparing, sparing); }
    else { box_row("  largest batch-size", "%d", B); }
}

// what a checkpoint copies beside parameters and moments
static inline double start_extras_bytes_(const Run* r) {
    Extra extras[MAX_EXTRAS];
    const int n = run_extras(r, extras);
    double n_bytes = r->trainer->counts_updates ? sizeof(int) * (double)r->model->n_slices : 0.0;
    for (int i = 0; i < n; i++) { n_bytes += (double)(dtype_size(extras[i].dtype) * extras[i].n); }
    return n_bytes;
}

// What saving takes on rank 0 of a machine whose memory is the device's: a whole model where none lies as it is saved,
// and the names of tensors, sorted and as JSON
static inline double start_saving_bytes_(const Run* r) {
    const Model* m = r->model;
    const int has_average = r->o.ema > 0.0f, in_parts = r->has_masters || !m->is_float || model_is_shared(m);
    const int exports = *r->o.export_hf || r->exports_more;  // as read, in floats
    if (!run_is_training(r) || !DEVICE_IS_SHARED) { return exports && in_parts ? sizeof(float) * (double)m->n : 0.0; }
    const double of_name = 3200.0;  // found: of a tensor, with its two moments
    return (has_average || in_parts ? sizeof(float) * (double)m->n : 0.0) + of_name * m->n_slices;
}

// bytes that have still to be taken of what this rank can see: a GPU of its own, or the machine's memory, which it
// shares with other ranks and in which text and copies are, too
typedef struct {
    double all, without_batch;
} Needed;

// memory of the device by class, in the order of allocation
static inline Needed start_box_memory_(const Run* r) {
    const RunOptions* o = &r->o;
    const Trainer* t = r->trainer;
    const Model* m = r->model;
    const int trains = run_is_training(r), backward = trains || *o->probe, has_batch = backward || o->eval_only;
    const int samples = run_is_generating(r) || (trains && o->sample_every > 0);
    const double parameters = (double)m->stored_bytes;
    const double workspace = start_workspace_(r, o->batch_size);
    const double batch = has_batch ? start_batch_bytes_(r, o->batch_size, 0) - workspace : 0.0;
    const int room = generator_room(o, r->prompts.longest, r->max_T);
    const double sampling = samples ? t->activation_bytes(r, TO_GENERATE, 1, room) : 0.0;
    const double text = DEVICE_IS_SHARED ? data_memory(&r->data) : 0.0, available = memory_available();
    const double verify = trains && o->verify_every > 0 ? verify_bytes(m->n) : 0.0;
    const double rows =
        prefetch_bytes(r->d.prefetch_workers, start_batches_ahead_(r), start_batches_kept_(r), o->batch_size, r->T);
    const double saving = trains ? (double)tensors_turning_bytes(m->table, m->n_table) : 0.0;
    const double more = t->more_bytes ? t->more_bytes(r) : 0.0, process = 12e6;  // found: the program and its libraries
    const double rest = text + verify + saving + more + process + (trains && DEVICE_IS_SHARED != 0 ? rows : 0.0);
    const int copies = DEVICE_IS_SHARED != 0 && trains && run_saves_beside(r);
    double kept = 0.0;
    double gradients = backward ? ranks_box(r->comm, m, !trains, r->n_leaves, o->zero, &kept) : 0.0;
    const int has_average = trains && o->ema > 0.0f;
    const double moments = !trains ? 0.0 : (2.0 + r->has_masters + has_average) * kept;
    const double copy =
        start_saving_bytes_(r) +
        (!copies ? 0.0 : (r->has_masters ? moments : parameters + moments) + start_extras_bytes_(r));
    box_row("memory: parameters", "%s", format_bytes(parameters).s);
    if (backward) {
        box_row(r->has_masters ? "  gradients, AdamW" : "  gradients, moments", "%s, %s%s", format_bytes(gradients).s,
                format_bytes(moments).s, has_average ? " with averaged weights" : "");
    }
    box_row("  activations", "%s", format_bytes(batch + sampling).s);
    box_row("  workspace, rest", "%s, %s", format_bytes(workspace).s, format_bytes(rest + copy).s);
    const double each = parameters + gradients + moments + batch + workspace + rest, of_rank_0 = sampling + copy;
    const double n_ranks = DEVICE_IS_SHARED ? fmax(1.0, r->place.local_size) : 1.0;  // that take from the same memory
    const double needed = n_ranks * (each - text) + of_rank_0;                       // the text is in memory already
    box_row("memory", "%s of %s free", format_bytes(each + of_rank_0).s, format_bytes(available).s);
    if (has_batch && !*o->probe && available > 0.0) {
        start_box_largest_(r, (available - needed) / n_ranks + batch + workspace);
    }
    const Needed n_bytes = {needed, needed - n_ranks * (batch + workspace)};
    return n_bytes;
}

static inline Needed start_box_(const Run* r) {
    const Model* m = r->model;
    printf("%s: %s\n", r->trainer->name, build_name());
    options_print(r->table, r->n_options);
    box_line();
#ifdef __CUDACC__
    box_row("build", "%s, %s", FLOATX_NAME, processor_name().s);
#else
    box_row("build", "%s, %d lanes, %d thread%s", COMPILER, VLANES, r->dev.n_threads, r->dev.n_threads > 1 ? "s" : "");
#endif
    r->trainer->box(r);
    const size_t n_parameters = tensors_disk_count(m->table, m->n_table);
    const size_t n_padded = tensors_count(m->table, m->n_table);
    box_row("parameters", n_padded > n_parameters ? "%s = %zu (padded: %zu)" : "%s = %zu",
            format_count((double)n_parameters).s, n_parameters, n_padded);
    data_box(&r->data);
    if (has_data(&r->data.train) && !run_has_text(r) && !r->has_no_text) {
        box_row("tokenizer", "none of %d tokens: samples are numbers", r->V);
    }
    if (run_is_training(r)) {
        box_update(&r->o, r->n_leaves, r->T);
        box_checkpoints(&r->o, &r->state, run_checkpoint_bytes(m->table, m->n_table, m->frozen, r->o.ema > 0.0f));
    }
    const Needed n_bytes = start_box_memory_(r);
    double flops = r->trainer->flops_per_token(r);
    const int n_steps = r->o.steps - r->state.step;
    double seconds = flops * (double)n_steps * r->n_leaves * r->o.batch_size * r->T / r->peak;
    box_row("matmul rate", "%s, %s FLOP per token", r->peak > 0.0 ? format_rate(r->peak).s : "unknown for this GPU",
            format_count(flops).s);
    if (run_is_training(r) && n_steps > 0 && r->peak > 0.0) {
        box_row("time", "at least %s for %d step%s", format_duration(seconds).s, n_steps, n_steps > 1 ? "s" : "");
    }
    box_line();
    return n_bytes;
}

// a byte of the prompt is a token at most; what comes from standard input may fill all positions
static inline double start_bytes_to_generate_(const Run* r) {
    const Trainer* t = r->trainer;
    const size_t n_bytes = strlen(r->o.generate);
    const int n_prompt = strcmp(r->o.generate, "-") == 0 || n_bytes > (size_t)r->max_T ? r->max_T : (int)n_bytes + 1;
    const int room = generator_room(&r->o, n_prompt, r->max_T);
    return (double)r->model->stored_bytes + t->activation_bytes(r, TO_GENERATE, 1, room);
}

// for a run that does not fit in memory: what would make it smaller
static inline const char* start_remedy_(char* text, size_t n_bytes, const Run* r, const Needed* needed) {
    const char* sparing = r->trainer->sparing;
    if (needed->without_batch > memory_available()) {
        if (!run_is_training(r)) { return "a smaller model"; }
        return DEVICE_IS_SHARED != 0 ? "a smaller model, or more machines with --zero 2"
                                     : "a smaller model, or more GPUs with --zero 2";
    }
    snprintf(text, n_bytes, "%s%sa smaller --batch-size, --seq-len or --model", sparing ? sparing : "",
             sparing ? ", " : "");
    return text;
}

// a run that only generates prints nothing but text
static inline void start_device(Run* r) {
    device_choose(r->place.local_rank > 0 ? r->place.local_rank : 0);
    device_init(&r->dev, ranks_threads(&r->place, r->o.threads));
    if (run_is_generating(r) && !r->o.dry_run) {
        check_memory(start_bytes_to_generate_(r), "a smaller model");
        return;
    }
    r->peak = matmul_peak(&r->dev);
    r->peak_measured = seconds_now(CLOCK_MONOTONIC);
    comm_all_reduce(r->comm, &r->peak, 1, DT_F64, OP_SUM, HERE);
    const Needed n_bytes = start_box_(r);
    char remedy[128];
    check_memory(n_bytes.all, start_remedy_(remedy, sizeof remedy, r, &n_bytes));
}

// ---- what a run has beside its model ----

static inline void start_batch(Run* r, Purpose purpose) {
    const size_t n_bytes = sizeof(int) * (size_t)r->o.batch_size * (size_t)r->T;
    r->trainer->open(r, purpose, r->o.batch_size, r->T);
    r->inputs = (int*)malloc_check(n_bytes, "inputs");
    r->targets = (int*)malloc_check(n_bytes, "targets");
}

// On --resume the data must be what it was: rank 0 looks. Losses of other validation data compare with none of before
static inline void start_record_data_(Run* r) {
    int val_is_new = 0;
    if (r->comm->rank == 0) {
        r->recorded = data_to_json(&r->data, prompts_to_json(&r->prompts, r->o.sample_prompts));
        val_is_new =
            r->o.resume && data_check(&r->o, r->state.step, r->table, r->n_options, &r->data, r->recorded);
    }
    comm_wait(r->comm, comm_broadcast(r->comm, &val_is_new, 1, DT_I32, 0, HERE));
    if (!val_is_new || !isfinite(r->state.best_val)) { return; }
    if (r->comm->rank == 0) {
        warn_line("other validation data: the best loss of before, %.4f after step %d, is forgotten",
                  (double)r->state.best_val, r->state.best_step);
    }
    run_state_forget_best(&r->state);
}

static inline void start_training(Run* r, int argc, char** argv) {
    data_sums(&r->data);
    start_batch(r, TO_TRAIN);
    if (r->o.sample_every > 0 && run_samples(r)) { task_open_generator(r, r->prompts.longest); }
    save_resume(r);
    r->first_row = run_first_row(&r->o, &r->state);
    r->first_step = r->state.step;
    prefetch_start(&r->prefetch, &r->data.train_rows, r->o.batch_size, r->d.prefetch_workers, start_batches_ahead_(r),
                   start_batches_kept_(r), train_row, r);
    if (r->o.noise_scale > 0) {
        log_add_key(&r->log, "noise_scale", "gradient noise scale, targets, smoothed over the steps that measure it");
    }
    if (r->o.ema > 0.0f && has_data(&r->data.val)) {
        log_add_key(&r->log, "val_loss_ema", "validation loss of the averaged weights, nats per target");
    }
    start_record_data_(r);
    if (r->comm->rank == 0) {
        const RunStart start = {r->table, r->n_options, &r->o, &r->state, r->recorded, r->dev.n_threads,
                                r->comm->size, argc, argv};
        run_open(&r->log, &start);
    }
    ranks_run_name(r->comm, r->table, r->n_options, &r->o);
    tensorboard_open(&r->board, r->o.tensorboard && r->comm->rank == 0 ? r->o.run : NULL,
                     r->o.resume ? r->state.step : -1);
}
#endif  // LLMC_START_H
