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
#include "../ops/widen.h"    // in a CUDA build: widen_bytes
#include "folder.h"          // run_open, run_check_unused
#include "other_trainers.h"  // other_trainers
#include "pipeline.h"        // pp_stream_bytes
#include "peak.h"            // matmul_peak, memory_available, check_memory
#include "plan.h"            // plan_begin, plan_memory, plan_say
#include "remedy.h"          // remedy_of_memory
#include "save.h"            // save_find_model
#include "same_data.h"       // data_to_json, data_check
#include "tasks.h"           // task_open_generator
#include "train.h"           // train_row
#include "trainer.h"         // Run
#include <float.h>
#include <limits.h>

// a mistake of ours: a trainer that leaves out what every run needs, or half of a pair
static inline void start_check_trainer_(const Trainer* t) {
    assert(t->name && t->about && t->presets && t->stored_bytes > 0 && t->usual_T > 0);
    assert(t->choose && t->box && t->flops_per_token && t->activation_bytes && t->open && t->leaf && t->forward);
    assert(t->logits && t->losses && t->config_json && t->close && t->n_scores <= MAX_SCORES);
    assert((t->extras != NULL) == (t->load_extras != NULL));
    assert((t->next_of_each != NULL) == (t->share_text != NULL));
    assert((t->scores != NULL) == (t->n_scores > 0));
    assert(!t->without_more || t->more_loss);
    assert(!t->parts_sent || (t->layer_parts_sent && t->layer_keys_sent));
    assert(!(t->more_data && t->takes_conversations));  // data_open_more knows nothing of them
}

// ---- options and sizes ----

// --chat and --generate-file stand alone: nothing else is typed that gives a run something to do
static inline void start_check_alone_(const Run* r, const char* name) {
    const int work = OPTION_TRAINS | OPTION_VALIDATES | OPTION_WORK;
    for (int i = 0; i < r->n_options; i++) {
        const Option* row = &r->table[i];
        if (!(row->flags & work) || !(row->flags & OPTION_TYPED) || strcmp(row->name, name) == 0) { continue; }
        const int is_on = row->type == OPTION_SWITCH ? *(int*)row->value : **(const char**)row->value != '\0';
        if (!is_on && strcmp(row->name, "generate") != 0) { continue; }
        options_fail(name, "stands alone: leave out --%s", row->name);
    }
    options_refuse(r->o.resume || r->o.go_on, name, "takes a model as it is: give --from PATH");
}

// of several of these a run does one, and the others would be dropped
static inline void start_check_task_(const Run* r) {
    const struct { const char* name; int is_on; } tasks[] = {
        {"generate", run_is_typed(r, "generate")}, {"eval-only", r->o.eval_only}, {"probe", *r->o.probe != '\0'}};
    const char* first = NULL;
    for (size_t i = 0; i < sizeof tasks / sizeof tasks[0]; i++) {
        if (!tasks[i].is_on) { continue; }
        if (first) { options_fail(tasks[i].name, "is another task than --%s: give one at a time", first); }
        first = tasks[i].name;
    }
    for (int i = 0; i < r->n_options && *r->o.probe; i++) {
        const Option* row = &r->table[i];
        if ((row->flags & OPTION_TYPED) && *option_path(row, OPTION_TRAINS | OPTION_VALIDATES)) {
            options_fail("probe", "computes the batch in its own file alone: leave out --%s", row->name);
        }
    }
    options_refuse(r->o.eval_only && r->o.sample_every > 0 && run_is_typed(r, "sample-every"), "sample-every",
                   "is for training: with --eval-only leave it out; --generate TEXT writes one");
}

static inline void start_parse_(Run* r, int argc, char** argv) {
    const Trainer* t = r->trainer;
    start_check_trainer_(t);
    r->n_options = run_options(r->table, &r->o, t->presets);
    if (t->next_of_each) { r->n_options = run_batch_option(r->table, r->n_options, &r->o); }
    if (t->more_data) { r->n_options = data_options(r->table, r->n_options, &r->d); }
    if (t->takes_conversations) {
        r->n_options = chat_options(r->table, r->n_options, &r->chat);
        r->data.chat.o = &r->chat;
    }
    if (t->options) { t->options(r); }
    *options_of_others() = other_trainers;
    options_parse(r->table, r->n_options, argc, argv, t->about);
    r->place = rank_place(run_is_typed(r, "rank") ? r->o.rank : "");
    failure_()->silent = options_of_later_rank();  // all find it alike, before they meet: as options_parse does
    options_refuse(r->o.resume && r->o.go_on, "continue", "means --resume where there is a checkpoint: leave that out");
    if (run_is_chatting(r)) { start_check_alone_(r, "chat"); }
    if (run_answers_file(r)) { start_check_alone_(r, "generate-file"); }
    start_check_task_(r);
    if (r->o.plan > 0) { plan_begin(r); }
    options_refuse(r->o.plan == 0 && *r->o.plan_card, "plan-card", "is for --plan W");
    options_refuse(run_is_typed(r, "plan-rate") && !*r->o.plan_card, "plan-rate", "is for --plan-card NAME");
    failure_()->silent = 0;
    r->comm = ranks_open(&r->place, &r->o);
    const int begins = !r->o.dry_run && run_will_train(r);
    ranks_same(r->comm, "choice of --resume and --continue", (uint64_t)(2 * r->o.resume + r->o.go_on));
    const int goes_on = r->o.resume || (r->o.go_on && ranks_goes_on(r->comm, &r->o, begins));
    r->state = goes_on ? ranks_restore(r->comm, r->table, r->n_options, &r->o) : run_state_start(r->o.seed);
    if (goes_on) { options_set(r->table, r->n_options, "resume", "1"); }
    run_note_grid(r->table, r->n_options, &r->o);
    if (t->parsed) { t->parsed(r); }
    if (!goes_on && r->comm->rank == 0 && begins && *r->o.run) { run_check_unused(&r->o); }
}

// beside an adapter nothing of the model learns: then its own tensors are meant
static inline void start_freeze_(Run* r) {
    Model* m = r->model;
    const char* what = model_is_adapter(m) ? "tensor of the adapter, beside which the whole model is frozen" : "tensor";
    m->frozen = freeze_slices(r->o.freeze, m->table, m->n_saved, what);
    if (r->trainer->freeze) { r->trainer->freeze(r); }
    model_freeze_base(m);
    model_find_lowest(m);
}

// is anything asked for? The message names those options of this trainer that ask for something, data first
static inline void start_check_purpose_(const Run* r) {
    char expected[512] = "";
    size_t used = 0;
    if (run_is_training(r) || r->o.eval_only || run_is_generating(r) || *r->o.probe || run_exports(r)) {
        return;
    }
    for (int i = 0; i < 2 * r->n_options; i++) {
        const Option* row = &r->table[i % r->n_options];
        if (!(row->flags & (i < r->n_options ? OPTION_TRAINS : OPTION_WORK)) || used >= sizeof expected) { continue; }
        used += (size_t)snprintf(expected + used, sizeof expected - used, "%s--%s", used > 0 ? ", " : "", row->name);
    }
    fail_input("nothing to do: expected %s, --dry-run or --plan W", expected);
}

// Where the chat template is: with the adapter, if that has one; else with the tokenizer, or in the model's own folder
// where --tokenizer is no folder's
static inline const char* start_template_folder_(char folder[PATH_BYTES], const Run* r) {
    char* of_adapter = *r->adapter_weights ? chat_template_text(path_parent(folder, r->adapter_weights)) : NULL;
    const int is_adapters = of_adapter != NULL;
    free(of_adapter);
    if (is_adapters) { return folder; }
    tokenizer_folder(folder, r->o.tokenizer);
    if (!*folder && *r->config && *r->weights) { path_parent(folder, r->config); }
    return folder;
}

// --chat-template auto: a name that was typed when the model was trained, or the adapter beside it, holds on
static inline void start_recall_template_(Run* r) {
    char folder[PATH_BYTES];
    const char* trained = *r->adapter_weights ? r->adapter_weights : r->config;
    if (!r->trainer->takes_conversations || run_is_typed(r, "chat-template") || !*trained) { return; }
    char* name = checkpoint_option(path_parent(folder, trained), "chat-template");
    if (name && strcmp(name, CHAT_AUTO) != 0) {
        options_set(r->table, r->n_options, "chat-template", name);
        r->chat.is_recalled = 1;
    }
    free(name);
}

static inline void start_plan_rows_(Run* r) {
    RunOptions* o = &r->o;
    char folder[PATH_BYTES];
    start_recall_template_(r);
    r->T = run_row(r);
    if (r->T > r->max_T) {
        options_fail("seq-len", "expected at most the model's %d positions, found %d", r->max_T, r->T);
    }
    r->n_leaves = run_leaves(r->table, r->n_options, o, r->T);
    r->data.chat.is_longest = r->T == r->max_T;
    const int has_images = data_is_chat(&r->data) && r->trainer->image_measure;
    data_read_chat(&r->data, o, &r->tokenizer, has_images ? r->trainer->image_measure(r) : NULL, r->T,
                   start_template_folder_(folder, r));
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

// The run's folder is not the model's, of which its checkpoints would take the place. What a run reads has no name in
// there that the run will give to a file of its own. A folder that is read as a
// whole may hold the run: what a run writes is no data
static inline void start_check_inputs_(const Run* r) {
    char path[PATH_BYTES];
    if (!*r->o.run || r->o.resume) { return; }
    const char* const models[] = {*r->weights ? r->config : "", r->adapter_weights};
    for (int i = 0; i < 2; i++) {
        options_refuse(*models[i] && path_is_same(r->o.run, path_parent(path, models[i])), "run",
                       "is the folder of the model that is read: choose another");
    }
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

// Nor does an output lie in the folder of a run, this or another, or take the name of another output
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
        if (run_holds(output)) {
            options_fail(row->name, "%s lies in the folder of a run, whose files are the run's: give another", output);
        }
        // into a folder looks who writes it (hf_export_check)
        if (!(row->flags & OPTION_FOLDER)) { start_check_output_(r, row, argc, argv); }
    }
}

// "model_type" of a config.json; "": it has none
static inline const char* start_model_type_(const json_t* config) {
    const char* type = json_string_value(json_object_get(config, "model_type"));
    return type ? type : "";
}

// does a folder hold a model of another architecture?
static inline void start_check_type_(const Run* r, const char* option, const char* folder) {
    char path[PATH_BYTES];
    if (!path_exists(path_join(path, folder, "config.json"))) { return; }
    json_t *config = json_read(path), *own = r->trainer->config_json(r, run_end_of_text(r), "float32");
    const char *ours = start_model_type_(own), *there = start_model_type_(config);
    if (strcmp(there, ours) != 0) {
        options_fail(option, "%s: holds another model, whose model_type is \"%s\", not \"%s\": choose another folder",
                     folder, format_text(there).s, ours);
    }
    json_decref(config);
    json_decref(own);
}

// A folder that an export replaces is an earlier one of the same kind: a model does not give way to an adapter, nor an
// adapter to a model, nor a model to one of another architecture. `other`: a file of the other kind. What is read, or
// what an adapter learns beside, stays as it is: it may be the only copy with all its digits
static inline void start_check_export_(const Run* r, const char* option, const char* folder, const char* other,
                                       const char* kind) {
    char path[PATH_BYTES], base[PATH_BYTES];
    hf_export_check(option, folder);
    const char* const models[] = {r->weights, r->began_weights};
    int is_read = 0;
    for (int i = 0; i < 2; i++) { is_read |= *models[i] && path_is_same(folder, path_parent(base, models[i])); }
    options_refuse(is_read && model_is_adapter(r->model), option,
                   "is the model beside which the adapter learns: choose another folder");
    options_refuse(is_read, option, "is the folder of the model that is read: choose another");
    if (path_exists(path_join(path, folder, other))) {
        options_fail(option, "%s: holds %s: choose another folder", folder, kind);
    }
    start_check_type_(r, option, folder);
}

// prompts in files, and --chat: who turns conversations into prompts, and what they ask
static inline void start_questions_(Run* r) {
    const int chats = run_is_chatting(r), answers_file = run_answers_file(r);
    char folder[PATH_BYTES];
    if (!r->trainer->takes_conversations) { return; }
    const int never = run_answers(r) && r->o.eval_every == 0 && r->o.sample_every == 0;
    options_refuse(never && run_is_typed(r, "eval-generate"), "eval-generate",
                   "answers with each validation or sample: --eval-every 0 has none, give --sample-every N");
    options_refuse(*r->chat.generate_out && !answers_file, "generate-out", "is for --generate-file: give that too");
    options_refuse(run_is_typed(r, "eval-generate") && *r->chat.eval_generate && !run_is_training(r), "eval-generate",
                   "answers while training: give --train, or the file to --generate-file");
    if (!chats && !answers_file && !run_answers(r)) { return; }
    const char* name = chats ? "chat" : answers_file ? "generate-file" : "eval-generate";
    task_need_text(r, name);
    const ImageMeasure* measure = r->trainer->image_measure ? r->trainer->image_measure(r) : NULL;
    asker_init(&r->asker, &r->chat, start_template_folder_(folder, r), &r->tokenizer, measure, r->o.stop);
    if (chats) { asker_open(&r->asker); }
    else {
        questions_read(&r->questions, &r->asker, &r->o, name,
                       answers_file ? r->chat.generate_file : r->chat.eval_generate, r->max_T);
    }
}

// what is asked of texts that the model writes
static inline void start_texts_(Run* r) {
    const RunOptions* o = &r->o;
    const int samples = run_is_training(r) && o->sample_every > 0;
    ErrorText error;
    start_questions_(r);
    r->prompts.longest = 1;
    if (!stop_texts_parse(&r->stop, o->stop, &error)) { options_fail("stop", "%s", error.text); }
    if (*o->stop && (samples || run_is_generating(r))) { task_need_text(r, "stop"); }
    if (run_is_generating(r) && !o->dry_run) { task_need_text(r, "generate"); }  // before the model is read
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
    int n_tensors = 0;
    for (int i = 0; i < m->n_table; i++) {
        char name[NAME_BYTES];
        const int n_slices = tensor_slices(&m->table[i]), n = n_slices / tensor_joined(&m->table[i]);
        if (n_slices == 0) { continue; }  // no layer has it
        tensor_slice_name(name, sizeof name, &m->table[i], n_slices - 1);
        n_bytes += 2.0 * n * ((double)strlen(name) + of_each);
        n_tensors += n;
    }
    if (n_bytes > SAFETENSORS_MAX_HEADER || 2 * n_tensors > SAFETENSORS_MAX_TENSORS) {
        fail_input("the model: %d tensors by name, whose moments no safetensors file can name: its header ends at %d "
                   "bytes: fewer layers or experts", n_tensors, SAFETENSORS_MAX_HEADER);
    }
}

// --zero 2 and what brings it, or shares matrices, leave no rank a whole one
__attribute__((noreturn))
static inline void start_fail_muon_(const Run* r) {
    static const char* const names[] = {"tp", "ep", "cp"};
    char without[64] = "";
    size_t used = 0;
    for (int i = 0; i < 3; i++) {
        if (!options_at(r->table, r->n_options, names[i])) { continue; }
        const char* before = used > 0 ? ", --" : ", without --";
        used += (size_t)snprintf(without + used, sizeof without - used, "%s%s", before, names[i]);
    }
    options_fail("optimizer", "muon needs whole matrices: several ranks want --zero 0 or 1%s", without);
}

// Does a run go on with the text and the tokenizer that it began with? With --continue it does, though all of them are
// typed: data_check refuses others, and other tokens
static inline int start_keeps_text_(const Run* r) {
    const int is_typed = run_is_typed(r, "train") || run_is_typed(r, "val") || run_is_typed(r, "tokenizer");
    return r->o.resume && (!is_typed || run_continues(r->table, r->n_options, &r->o));
}

// What an earlier start asked for and the ranks of now cannot share so, or not with what was typed now, is given up by
// this start alone
static inline void start_say_grid_(const Run* r) {
    static const char* const now[GRID_OPTIONS] = {
        "each rank has all layers now", "one chunk of layers on each rank now", "each rank has whole matrices now",
        "each rank has whole rows now, and sums over positions have other last digits",
        "each rank has all experts now"};
    int no_stages = 0;
    for (int i = 0; i < GRID_OPTIONS && r->comm->rank == 0 && run_is_training(r); i++) {
        const Option* row = options_at(r->table, r->n_options, grid_name(i));
        const int asked = r->o.grid[i], used = row ? *(const int*)row->value : asked;
        if (used >= asked || (no_stages && strcmp(row->name, "pp-chunks") == 0)) { continue; }
        no_stages = no_stages || strcmp(row->name, "pp") == 0;
        if (used > 1) { warn_line("--%s %d, asked for earlier, does not fit: %d now", row->name, asked, used); }
        else { warn_line("--%s %d, asked for earlier, does not fit: %s", row->name, asked, now[i]); }
    }
}

// A run that goes on with other --steps has another learning rate from here on, but for --schedule constant behind its
// warm-up
static inline void start_say_schedule_(const Run* r) {
    const RunOptions* o = &r->o;
    char folder[PATH_BYTES];
    if (!o->resume || !run_is_training(r) || r->comm->rank > 0 || r->state.step >= o->steps) { return; }
    checkpoint_folder(folder, o->run, r->state.step);
    const int horizon = checkpoint_number(folder, "lr-horizon", 0), now = run_horizon_(o);
    const int was = horizon > 0 ? horizon : checkpoint_number(folder, "steps", now);
    const int warmup = amount_of(o->warmup, was > now ? was : now);
    if (was == now || (o->schedule == SCHEDULE_CONSTANT && r->state.step >= warmup)) { return; }
    printf("the learning rate is that of %d steps now, not of %d as before: --lr-horizon %d keeps it\n", now, was, was);
}

// sizes that follow from the model and the data; conflicts
static inline void start_plan_(Run* r, int argc, char** argv) {
    RunOptions* o = &r->o;
    start_plan_rows_(r);
    start_check_outputs_(r, argc, argv);
    if (r->trainer->check) { r->trainer->check(r); }
    start_say_grid_(r);
    if (run_is_training(r)) { start_check_names_(r); }
    assert(r->trainer->write_more || !r->exports_more);
    if (!start_keeps_text_(r)) { data_check_tokenizer(&r->data, o, &r->tokenizer, r->V, run_has_text(r)); }
    save_check_tokenizer(r);
    start_forget_tokenizer_(r);
    start_check_purpose_(r);
    options_refuse(run_is_training(r) && o->ema > 0.0f && r->trainer->stored_bytes < sizeof(float) && !r->has_masters,
                   "ema", "averages float weights: give --master-weights 1");
    const int has_muon = run_is_training(r) && o->optimizer == OPTIMIZER_MUON;
    if (has_muon && r->comm->size > 1 && (o->zero == 2 || model_has_tp(r->model))) { start_fail_muon_(r); }
    options_refuse(run_is_typed(r, "momentum") && o->optimizer != OPTIMIZER_MUON, "momentum",
                   "is for --optimizer muon");
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
        if (r->trainer->choices) { r->n_choices = r->trainer->choices(r, &r->choices); }
    }
    options_refuse(run_is_typed(r, "export-dtype") && !*o->export_hf, "export-dtype", "is for --export-hf DIR");
    const char* typed_by = save_reads_began_(r) ? r->began_weights : r->weights;
    options_refuse(o->export_dtype == EXPORT_AS_READ && *o->export_hf && !ends_with(typed_by, ".safetensors") &&
                       !ends_with(typed_by, ".json"), "export-dtype",
                   "as-read takes tensors as a folder has them: it is for --from a folder, a run or a .safetensors "
                   "file");
    options_refuse(run_is_typed(r, "shard-gb") && !*o->export_hf, "shard-gb", "is for --export-hf DIR");
    // config.json names it: refuse now, not at a checkpoint
    if (run_is_training(r) || *o->export_hf) { run_end_of_text(r); }
    if (*o->export_hf) { start_check_export_(r, "export-hf", o->export_hf, HF_ADAPTER_CONFIG, "an adapter"); }
    if (r->export_adapter && *r->export_adapter) {
        start_check_export_(r, "export-lora", r->export_adapter, "config.json", "a model");
    }
    start_texts_(r);
    if (run_is_training(r)) { start_check_inputs_(r); }
    if (run_is_training(r) && !model_learns(r->model)) {
        options_fail("freeze", "every tensor is frozen: nothing learns");
    }
    data_plan(&r->data, o, r->T, r->V, r->classes, r->n_leaves);
    start_say_schedule_(r);
}

// A run that is over has nothing left to do, unless it is to write something, or a signal came before its last
// validation and sample; several ranks find that out together
static inline void start_check_left_(const Run* r) {
    const int is_over = r->o.resume && run_is_training(r) && r->state.step >= r->o.steps;
    if (!is_over || r->state.interrupted) { return; }
    char folder[PATH_BYTES];
    checkpoint_folder(folder, r->o.run, r->state.step);
    if (r->state.step > r->o.steps) {
        printf("%d steps are done, more than --steps %d, checkpoint in %s; to go on, give --steps above %d\n",
               r->state.step, r->o.steps, folder, r->state.step);
    } else {
        printf("all %d steps are done, checkpoint in %s; to go on, give more --steps\n", r->o.steps, folder);
    }
    if (r->comm->size == 1 && !run_exports(r) && !r->o.dry_run) {
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
    ranks_same(r->comm, "prompts (--eval-generate)", r->questions.xxh3);
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
    return DEVICE_IS_SHARED ? pp_kept(r) : (int)ceil_div(r->n_leaves, pp_lines(r));
}

// ---- the box ----

// of what does not learn a GPU's products read one matrix at a time, or some experts, as the build stores (ops/widen.h)
static inline double start_widened_bytes_(const Run* r) {
    size_t most = 0;
#ifdef __CUDACC__
    const Model* m = r->model;
    for (int i = 0; i < m->n_table; i++) {
        const StoredMatrix w = tensor_as_stored(&m->held[i]);
        const int E = m->held[i].experts > 0 ? m->held[i].experts : 1;
        if (!tensor_is_matrix(&m->held[i]) || w.kind == STORED_BY_BUILD) { continue; }
        const size_t n = r->trainer->stored_bytes == sizeof(float) ? widen_bytes<float>(&w, E)
                                                                   : widen_bytes<bf16>(&w, E);
        most = n > most ? n : most;
    }
#else
    (void)r;
#endif
    return (double)most;
}

static inline double start_workspace_(const Run* r, int B) {
    return start_widened_bytes_(r) + (r->trainer->workspace_bytes ? r->trainer->workspace_bytes(r, B) : 0.0);
}

// activations and scratch of a micro-batch of B rows; sparing: with the option that saves most
static inline double start_batch_bytes_(const Run* r, int B, int sparing) {
    const Trainer* t = r->trainer;
    const Purpose purpose = run_purpose(r);
    const double rooms = purpose == TO_TRAIN ? pp_rooms_bytes(r, B) : 0.0;
    return t->activation_bytes(r, purpose, B, r->T, sparing) + rooms + start_workspace_(r, B);
}

// the largest --batch-size that the option takes and whose activations and scratch fit in n_bytes
static inline int start_largest_batch_(const Run* r, double n_bytes, int sparing) {
    const double most = options_at(r->table, r->n_options, "batch-size")->high;
    int B = 0;
    for (int more = 1 << 20; more > 0; more /= 2) {
        if (B + more > most || (int64_t)(B + more) * r->T > INT_MAX / 4) { continue; }  // as run_leaves refuses
        if (start_batch_bytes_(r, B + more, sparing) <= n_bytes) { B += more; }
    }
    return B;
}

// n_bytes are free for activations and scratch of a micro-batch
static inline void start_box_largest_(Run* r, double n_bytes) {
    const Trainer* t = r->trainer;
    int B = start_largest_batch_(r, n_bytes, 0);
    int sparing = t->sparing && run_is_training(r) ? start_largest_batch_(r, n_bytes, 1) : 0;
    comm_all_reduce(r->comm, &B, 1, DT_I32, OP_MIN, HERE);
    comm_all_reduce(r->comm, &sparing, 1, DT_I32, OP_MIN, HERE);
    if (sparing > B) { box_row("  largest batch-size", "%d; with %s: %d", B, t->sparing, sparing); }
    else { box_row("  largest batch-size", "%d", B); }
    r->planned.largest = B, r->planned.largest_spared = sparing > B ? sparing : B;
}

// what a checkpoint copies beside parameters and moments
static inline double start_extras_bytes_(const Run* r) {
    Extra extras[MAX_EXTRAS];
    const int n = run_extras(r, extras);
    double n_bytes = r->trainer->counts_updates ? sizeof(int) * (double)r->model->n_slices : 0.0;
    for (int i = 0; i < n; i++) { n_bytes += (double)(dtype_size(extras[i].dtype) * extras[i].n); }
    return n_bytes;
}

// what adding an adapter to its model takes: one tensor after the other, in floats; beside it the base's, where both
// are compared
static inline double start_merging_bytes_(const Run* r) {
    const Model* m = r->model;
    const int merges = model_is_adapter(m) && *r->o.export_hf;
    const double n = r->o.export_dtype != EXPORT_FP32 ? 2.0 : 1.0;
    return DEVICE_IS_SHARED && merges ? n * sizeof(float) * (double)model_largest_slice(m, m->n_table) : 0.0;
}

// What saving takes on rank 0 of a machine whose memory is the device's: the names of tensors, sorted and as JSON, and
// a whole model where none lies as it is saved; where ranks have parts of it, a slice there and one that comes
static inline double start_saving_bytes_(const Run* r) {
    const Model* m = r->model;
    const int has_average = r->o.ema > 0.0f, in_parts = r->has_masters || !m->saved_is_float || model_is_divided(m);
    const int by_slices = run_is_training(r) && save_by_slices_(m);
    const double whole = by_slices ? 2.0 * (double)model_largest_slice(m, m->n_table) : (double)m->n;
    const int exports = run_exports(r) && !model_exports_stored(m);  // as read, in floats
    if (!run_is_training(r) || !DEVICE_IS_SHARED) { return exports && in_parts ? sizeof(float) * (double)m->n : 0.0; }
    const double of_name = 3200.0;  // found: of a tensor, with its two moments
    return (has_average || in_parts ? sizeof(float) * whole : 0.0) + of_name * m->n_slices;
}

// bytes that have still to be taken of what this rank can see: a GPU of its own, or the machine's memory, which it
// shares with other ranks and in which text and copies are, too
typedef struct {
    double all, without_batch;
} Needed;

// tokens of the longest prompt, at most
static inline int start_prompt_(const Run* r) {
    const size_t n_bytes = strlen(r->o.generate);
    const int fills = strcmp(r->o.generate, "-") == 0 || n_bytes > (size_t)r->max_T;
    return run_is_typed(r, "generate") ? (fills ? r->max_T : (int)n_bytes + 1) : run_longest_prompt(r);
}

// Positions of a text that the run generates. A byte of the prompt is a token at most; what comes from standard input
// may fill all positions
static inline int start_room_(const Run* r) {
    return run_is_chatting(r) ? run_chat_room(r) : generator_room(&r->o, start_prompt_(r), r->max_T);
}

// texts that could be made side by side
static inline int64_t start_texts_at_once_(const Run* r) {
    if (!r->trainer->next_of_each || run_is_chatting(r)) { return 1; }
    if (run_answers_file(r)) { return (int64_t)r->questions.n * r->o.samples; }
    return run_is_generating(r) ? r->o.samples : run_answers(r) ? r->questions.n : 1;
}

// As many as --generate-batch says and there are. Where nobody has typed it, fewer if they would take more than a
// quarter of the memory that is free: what is generated does not depend on it. Ranks may have to make them together
static inline void start_choose_rows_(Run* r) {
    const int64_t n = start_texts_at_once_(r);
    const double available = plan_memory(r);
    r->n_rows = n < r->o.generate_batch ? (int)n : r->o.generate_batch > 1 ? r->o.generate_batch : 1;
    while (r->n_rows > 1 && !run_is_typed(r, "generate-batch") && available > 0.0 &&
           r->trainer->activation_bytes(r, TO_GENERATE, r->n_rows, start_room_(r), 0) > available / 4.0) {
        r->n_rows /= 2;
    }
    comm_all_reduce(r->comm, &r->n_rows, 1, DT_I32, OP_MIN, HERE);
}

// does the run compute batches of --batch-size rows? Does it write texts?
static inline int start_has_batch_(const Run* r) {
    return run_is_training(r) || *r->o.probe || r->o.eval_only;
}

static inline int start_has_texts_(const Run* r) {
    return run_is_generating(r) || run_answers(r) || (run_is_training(r) && r->o.sample_every > 0);
}

// a trainer says infinite where a pass would have more rows, as of heads, than an int counts
static inline void start_check_counted_(const Run* r) {
    const int T = start_has_texts_(r) ? start_room_(r) : 0;
    if (start_has_batch_(r) && !isfinite(start_batch_bytes_(r, r->o.batch_size, 0))) {
        options_fail("batch-size", "expected at most %d rows of %d positions, which a pass of this model can count, "
                     "found %d", start_largest_batch_(r, DBL_MAX, 0), r->T, r->o.batch_size);
    }
    if (T > 0 && !isfinite(r->trainer->activation_bytes(r, TO_GENERATE, r->n_rows, T, 0))) {
        options_fail("generate-batch", "%d texts of %d positions are more than a pass of this model can count: give "
                     "fewer, or a smaller --max-new-tokens", r->n_rows, T);
    }
}

// Of a plan: sent to ranks that share experts, matrices or positions by the rank that has most micro-batches
static inline double start_most_sent_(Run* r, double (*sent)(const Run*), double of_rank_0) {
    Comm* sharing = model_sharing(r->model, r->comm);
    const int own = sharing->rank;
    if (!comm_is_plan(r->comm) || !sent || !run_is_training(r)) { return of_rank_0; }
    sharing->rank = sharing->size - 1;  // comm_share
    const double most = pp_sum(r, sent);
    sharing->rank = own;
    return fmax(most, of_rank_0);
}

// memory of the device by class, in the order of allocation
static inline Needed start_box_memory_(Run* r) {
    const RunOptions* o = &r->o;
    const Trainer* t = r->trainer;
    const Model* m = r->model;
    const int trains = run_is_training(r), backward = trains || *o->probe, has_batch = start_has_batch_(r);
    const int samples = start_has_texts_(r);
    const double parameters = (double)m->stored_bytes;
    const double workspace = start_workspace_(r, o->batch_size);
    const double batch = has_batch ? start_batch_bytes_(r, o->batch_size, 0) - workspace : 0.0;
    const double sampling = samples ? t->activation_bytes(r, TO_GENERATE, r->n_rows, start_room_(r), 0) : 0.0;
    const double text = DEVICE_IS_SHARED ? data_memory(&r->data) : 0.0, available = plan_memory(r);
    const double rows =
        prefetch_bytes(r->d.prefetch_workers, start_batches_ahead_(r), start_batches_kept_(r), o->batch_size, r->T);
    const int n_saved = *o->export_hf ? m->n_table : m->n_saved;
    const double saving = trains || run_exports(r) ? (double)tensors_turning_bytes(m->table, n_saved) : 0.0;
    const double more = t->more_bytes ? t->more_bytes(r) : 0.0, process = 12e6;  // found: the program and its libraries
    const int copies = DEVICE_IS_SHARED != 0 && trains && run_saves_beside(r);
    RanksCost cost = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
    const double rows_sent = t->rows_sent && trains ? pp_sum(r, t->rows_sent) : 0.0;
    const double parts_sent = t->parts_sent && trains ? pp_sum(r, t->parts_sent) : 0.0;
    const double keys_sent = t->keys_sent && trains ? pp_sum(r, t->keys_sent) : 0.0;
    const double sent = rows_sent + parts_sent + keys_sent;
    if (backward) {
        cost = ranks_box(r->comm, m, !trains, r->n_leaves, o->zero, pp_stream_bytes(r), sent, pp_at_most(r));
    }
    const double most_rows = start_most_sent_(r, t->rows_sent, rows_sent);
    const double most_parts = start_most_sent_(r, t->parts_sent, parts_sent);
    const double most_keys = start_most_sent_(r, t->keys_sent, keys_sent);
    const double most_sent = cost.most_data + cost.most_streams + most_rows + most_parts + most_keys;
    if (most_sent > 1.001 * (cost.data + cost.streams + sent)) {
        box_row("    at most", "%s by the rank that sends most", format_bytes(most_sent).s);
    }
    const double gradients = cost.gradients, kept = cost.moment;
    const double verify = !trains || o->verify_every == 0 ? 0.0
        : verify_bytes(tensors_count(m->held, m->n_table), (size_t)kept / sizeof(float), r->has_masters);
    const double muon = trains && o->optimizer == OPTIMIZER_MUON ? (double)model_muon_bytes(m) : 0.0;
    const double rest = text + verify + muon + saving + more + process + (trains && DEVICE_IS_SHARED != 0 ? rows : 0.0);
    const int has_average = trains && o->ema > 0.0f;
    const double moments = !trains ? 0.0 : (2.0 + r->has_masters + has_average) * kept;
    const double copy =
        start_saving_bytes_(r) + start_merging_bytes_(r) +
        (!copies ? 0.0 : (r->has_masters ? moments : (double)model_saved_bytes(m) + moments) + start_extras_bytes_(r));
    box_row("memory: parameters", "%s", format_bytes(parameters).s);
    if (backward) {
        box_row(r->has_masters ? "  gradients, AdamW" : "  gradients, moments", "%s, %s%s", format_bytes(gradients).s,
                format_bytes(moments).s, has_average ? " with averaged weights" : "");
    }
    box_row("  activations", "%s", format_bytes(batch + sampling).s);
    if (samples && r->n_rows > 1) {
        box_row("  texts", "%d side by side, of at most %d positions", r->n_rows, start_room_(r));
    }
    box_row("  workspace, rest", "%s, %s", format_bytes(workspace).s, format_bytes(rest + copy).s);
    const double of_each = model_is_divided(m) ? sampling : 0.0, of_rank_0 = sampling - of_each + copy;  // run_samples
    const double each = parameters + gradients + moments + batch + workspace + rest + of_each;
    const double n_ranks = DEVICE_IS_SHARED ? fmax(1.0, r->place.local_size) : 1.0;  // that take from the same memory
    double all = each;  // ranks with other layers need more or less
    comm_all_reduce(r->comm, &all, 1, DT_F64, OP_SUM, HERE);
    double needed = n_ranks * (all / r->comm->size - text) + of_rank_0;  // the text is in memory already
    comm_all_reduce(r->comm, &needed, 1, DT_F64, OP_MAX, HERE);
    if (o->plan > 0) { box_row("memory of rank 0", "%s", format_bytes(each + of_rank_0).s); }
    else { box_row("memory", "%s of %s free", format_bytes(each + of_rank_0).s, format_bytes(available).s); }
    double most = r->comm->rank == 0 ? each + of_rank_0 : each;
    comm_all_reduce(r->comm, &most, 1, DT_F64, OP_MAX, HERE);
    if (model_has_pp(m) && o->plan == 0) { box_row("  of each rank", "at most %s", format_bytes(most).s); }
    const int is_0 = r->comm->rank == 0;
    const double texts = is_0 ? sampling : of_each;
    Planned planned;
    memset(&planned, 0, sizeof planned);
    planned.parameters = parameters, planned.gradients = gradients, planned.moments = moments;
    planned.activations = batch + texts;
    planned.rest = workspace + rest + (is_0 ? copy : 0.0);
    planned.memory = most;
    planned.batch = batch + workspace + texts;
    planned.spared = texts + (has_batch ? start_batch_bytes_(r, o->batch_size, 1) : workspace);
    planned.data = cost.most_data, planned.streams = cost.most_streams;
    planned.rows = most_rows, planned.parts = most_parts, planned.keys = most_keys;
    planned.share = model_has_pp(m) ? m->pp.work : 1.0;
    planned.largest = planned.largest_spared = -1;
    r->planned = planned;
    for (int s = m->pp.place; s < m->pp.n_stages && model_has_pp(m); s += m->pp.size) {
        pp_name_layers(r->planned.layers, sizeof r->planned.layers, &m->pp, s, ",");
    }
    if (has_batch && !*o->probe && available > 0.0 && !(o->plan > 0 && model_has_pp(m))) {
        start_box_largest_(r, (available - needed) / n_ranks + batch + workspace);
    }
    const Needed n_bytes = {needed, needed - n_ranks * (batch + workspace)};
    return n_bytes;
}

// FLOPs of the steps that are left
static inline double start_flops_(const Run* r) {
    return r->trainer->flops_per_token(r) * (double)(r->o.steps - r->state.step) * r->n_leaves * r->o.batch_size * r->T;
}

static inline Needed start_box_(Run* r) {
    const Model* m = r->model;
    printf("%s: %s\n", r->trainer->name, build_name());
    options_print(r->table, r->n_options);
    box_line();
#ifdef __CUDACC__
    box_row("build", "%s, %s", FLOATX_NAME, r->o.plan > 0 ? "a plan" : processor_name().s);
#else
    const char* s = r->dev.n_threads > 1 ? "s" : "";
    box_row("build", "%s, %d lanes, %d thread%s%s", COMPILER, VLANES, r->dev.n_threads, s,
            r->o.plan > 0 ? " on each rank, with scratch of its own (--threads)" : "");
#endif
    r->trainer->box(r);
    const Tensor* base = m->table + (model_is_adapter(m) ? m->n_saved : 0);
    const int n_base = (int)(m->table + m->n_table - base);
    const size_t n_parameters = tensors_disk_count(base, n_base), n_padded = tensors_count(base, n_base);
    box_row("parameters", n_padded > n_parameters ? "%s = %zu (padded: %zu)" : "%s = %zu",
            format_count((double)n_parameters).s, n_parameters, n_padded);
    data_box(&r->data);
    if (has_data(&r->data.train) && !run_has_text(r) && !r->has_no_text) {
        const int is_text = r->data.train.text || data_is_chat(&r->data);
        if (is_text) {
            box_row("tokenizer", "%s, of %d tokens; the model has %d: samples are numbers", r->tokenizer.kind,
                    r->tokenizer.n_tokens, r->V);
        } else {
            box_row("tokenizer", "none of %d tokens: samples are numbers", r->V);
        }
    }
    if (run_is_training(r)) {
        box_update(&r->o, r->n_leaves, r->T);
        box_checkpoints(&r->o, &r->state, run_checkpoint_bytes(m->table, m->n_saved, m->frozen, r->o.ema > 0.0f));
    }
    const Needed n_bytes = start_box_memory_(r);
    double flops = r->trainer->flops_per_token(r);
    const int n_steps = r->o.steps - r->state.step;
    const double seconds = start_flops_(r) / r->peak;
    if (r->o.plan > 0) { box_row("work", "%s FLOP per token", format_count(flops).s); }
    else {
        box_row("matmul rate", "%s, %s FLOP per token", r->peak > 0.0 ? format_rate(r->peak).s : "unknown for this GPU",
                format_count(flops).s);
    }
    if (run_is_training(r) && n_steps > 0 && r->peak > 0.0) {
        box_row("time", "at least %s for %d step%s", format_duration(seconds).s, n_steps, n_steps > 1 ? "s" : "");
    }
    box_line();
    chat_data_say(&r->data.chat);
    return n_bytes;
}

static inline double start_bytes_to_generate_(const Run* r) {
    return (double)r->model->stored_bytes + start_widened_bytes_(r) +
           r->trainer->activation_bytes(r, TO_GENERATE, r->n_rows, start_room_(r), 0);
}

// Bytes less where --weights keeps matrices so that do not learn; of fp8 some less than that: the embedding and gates
// are bf16, and there are scales
static inline double start_spared_(const Run* r, Stored kind) {
    const Model* m = r->model;
    double n_bytes = 0.0;
    for (int i = 0; i < m->n_table; i++) {
        const Tensor* t = &m->held[i];
        const size_t then = kind == STORED_FP8 && t->split != SPLIT_VOCABULARY ? 1 : 2;
        if (!tensor_is_matrix(t) || t->stored == STORED_F32 || t->stored_bytes <= then) { continue; }
        n_bytes += (double)(t->stored_bytes - then) * (double)tensor_held_elements(t);
    }
    return n_bytes;
}

static inline double start_texts_bytes_(const Run* r, int n_texts, int n_positions) {
    return r->trainer->activation_bytes(r, TO_GENERATE, n_texts, n_positions, 0);
}

// Where texts, or what validates, do not fit in memory: what would make them fit; n_here: ranks whose bytes these are.
// `text` has REMEDY_BYTES
static inline const char* start_remedy_of_texts_(char* text, const Run* r, double needed, double available,
                                                 int n_here) {
    static const struct { Stored kind; const char* name; } kinds[] = {{STORED_BF16, "bf16"}, {STORED_FP8, "fp8"}};
    double of_one = needed;  // with one text at a time
    if (r->n_rows > 1) {
        of_one += start_texts_bytes_(r, 1, start_room_(r)) - start_texts_bytes_(r, r->n_rows, start_room_(r));
    }
    if (of_one <= available) { return "a smaller --generate-batch"; }
    if (run_is_generating(r) && !run_is_chatting(r)) {
        const double spared = start_texts_bytes_(r, 1, start_room_(r)) - start_texts_bytes_(r, 1, start_prompt_(r));
        if (of_one - spared <= available) { return "a smaller --max-new-tokens"; }
    }
    for (int i = 0; i < 2 && options_at(r->table, r->n_options, "weights"); i++) {
        const double spared = n_here * start_spared_(r, kinds[i].kind);
        if (of_one - spared > available) { continue; }
        snprintf(text, REMEDY_BYTES, "--weights %s (%s in all)%s", kinds[i].name, format_bytes(of_one - spared).s,
                 needed - spared > available ? " and a smaller --generate-batch" : "");
        return text;
    }
    return "a smaller model";
}

// The same for a run. All ranks find it alike, of the least memory that is free for any of them, and the first says it
static inline void start_check_memory_(Run* r, const Needed* needed) {
    char text[REMEDY_BYTES], who[64] = "needs";
    double available = memory_available();
    comm_all_reduce(r->comm, &available, 1, DT_F64, OP_MIN, HERE);
    if (available <= 0.0 || needed->all <= available) { return; }
    const int n_here = DEVICE_IS_SHARED && r->place.local_size > 1 ? r->place.local_size : 1;
    const int of_texts = needed->without_batch > available && !run_is_training(r);
    const Shortage s = shortage_of(&r->planned, available, DEVICE_IS_SHARED ? "machine" : "GPU", n_here);
    const char* remedy = of_texts ? start_remedy_of_texts_(text, r, needed->all, available, n_here)
                                  : remedy_of_memory(text, r, &s);
    if (n_here > 1) { snprintf(who, sizeof who, "%d ranks of this machine need", n_here); }
    warn_alike("%s %s of memory, %s are free: try %s", who, format_bytes(needed->all).s, format_bytes(available).s,
               remedy);
    comm_barrier(r->comm, HERE);  // said: over MPI the first that ends, ends all
    exit(1);
}

// a run that only generates prints nothing but text
static inline void start_device(Run* r) {
    if (r->o.plan > 0) {
        if (DEVICE_IS_SHARED) { device_init(&r->dev, ranks_threads(&r->place, r->o.threads)); }  // scratch of threads
        start_choose_rows_(r);
        start_check_counted_(r);
        start_box_(r);
        if (run_is_training(r)) { ranks_warn_of_idle(r->comm, r->model, r->n_leaves); }
        plan_say(r);
        return;
    }
    device_choose(r->place.local_rank > 0 ? r->place.local_rank : 0);
    device_init(&r->dev, ranks_threads(&r->place, r->o.threads));
    if (r->trainer->check_device) { r->trainer->check_device(r); }
    start_choose_rows_(r);
    start_check_counted_(r);
    if (run_is_generating(r) && !r->o.dry_run) {
        const double n_bytes = start_bytes_to_generate_(r);
        char text[REMEDY_BYTES];
        check_memory(n_bytes, start_remedy_of_texts_(text, r, n_bytes, memory_available(), 1));
        return;
    }
    r->peak = matmul_peak(&r->dev, start_flops_(r) / r->comm->size);
    r->peak_measured = seconds_now(CLOCK_MONOTONIC);
    comm_all_reduce(r->comm, &r->peak, 1, DT_F64, OP_SUM, HERE);
    const Needed n_bytes = start_box_(r);
    if (run_is_training(r)) { ranks_warn_of_idle(r->comm, r->model, r->n_leaves); }
    start_check_memory_(r, &n_bytes);
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
        r->recorded = data_to_json(&r->data, r->o.seed, prompts_to_json(&r->prompts, r->o.sample_prompts));
        if (run_answers(r)) {
            json_object_set_new(r->recorded, "eval_prompts", questions_to_json(&r->questions, r->chat.eval_generate));
        }
        data_sum_images(&r->data, &r->o, r->o.resume ? r->state.step : -1, r->recorded);
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
    pp_rooms_open(r);
    if ((r->o.sample_every > 0 || run_answers(r)) && run_samples(r)) {
        task_open_generator(r, generator_room(&r->o, run_longest_prompt(r), r->max_T));
    }
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
