/*
Adapters (LoRA) in a run: what a trainer whose linear layers may have them tells it. Its own part is the table of its
model (tensor_adaptable) and linear_adapt in its passes.
    adapters_choose     in Trainer.choose: the adapter that options or a checkpoint ask for
    adapters_folder     where there is one already: --lora, or the checkpoint of a resumed run
    adapters_load       A's and B's, new or from there
    adapters_dropout    of a leaf in training
    adapters_box        its rows of the box
A checkpoint of an adapter holds Trainer.write_adapter's files; its model is read from --from again. Whoever loads one,
to go on, to evaluate or to generate, is told where that is another model than the one beside which it has learnt: by a
sum that the checkpoint has, and an adapter of PEFT's has not.
Errors: fail_input, with the option's name or the files.
*/
#ifndef LLMC_ADAPTERS_RUN_H
#define LLMC_ADAPTERS_RUN_H
#include "../ops/dropout.h"   // Dropout, dropout_key
#include "../run/save.h"      // save_find_average
#include "../run/trainer.h"   // Run, run_is_typed
#include "adapter_files.h"    // adapter_open
#include "adapter_options.h"  // AdapterOptions, adapter_settings_new

enum { ADAPTERS_STREAM = 2 };  // of the seed: start values of A (DROPOUT_STREAM is 1)

// "": the adapter is new
static inline const char* adapters_folder(const Run* r, const AdapterOptions* o) {
    return *r->adapter ? r->adapter : o->lora;
}

// the file of its values
static inline void adapters_find_(Run* r, const AdapterOptions* o) {
    char folder[PATH_BYTES];
    checkpoint_find(folder, adapters_folder(r, o));
    path_join(r->adapter_weights, folder, HF_ADAPTER_WEIGHTS);
    if (!*r->adapter && run_takes_average(r) && !(r->o.ema > 0.0f && run_will_train(r))) {
        save_find_average(r->adapter_weights);
    }
}

// base_sum: of the model that is there now
static inline void adapters_check_base_(const Run* r, int64_t base_sum) {
    char folder[PATH_BYTES], path[PATH_BYTES];
    int64_t sum;
    const Extra base = {"base", DTYPE_I64, &sum, 1};
    path_join(path, path_parent(folder, r->adapter_weights), "trainer.safetensors");
    if (!*r->adapter && !path_exists(path)) { return; }  // no checkpoint
    extras_load(path, &base, 1);
    if (sum == base_sum) { return; }
    options_fail(*r->adapter ? "resume" : "lora", "%s has learnt beside another model%s%s, or that one was changed: "
                 "give it back, or copy " HF_ADAPTER_CONFIG " and " HF_ADAPTER_WEIGHTS " into a folder of their own "
                 "for --lora", folder, *r->o.from ? " than " : "", r->o.from);
}

// base_sum of a model that begins at random: what is drawn from which seed
static inline int64_t adapters_random_base(const Tensor* base, int n, int seed) {
    uint64_t sum = (uint64_t)seed;
    for (int i = 0; i < n; i++) {
        const Tensor* t = &base[i];
        const int shape[] = {t->layers, t->experts, t->rows, t->columns, t->disk_rows, (int)t->init};
        sum = XXH3_64bits_withSeed(shape, sizeof shape, sum);
        sum = XXH3_64bits_withSeed(&t->std, sizeof t->std, sum);
        sum = XXH3_64bits_withSeed(t->name, strlen(t->name), sum);
    }
    return (int64_t)sum;
}

// base: the n rows of the model's table; base_sum: of its numbers. 0: no adapter is asked for
static inline int adapters_choose(Run* r, Adapters* x, const AdapterOptions* o, const Tensor* base, int n,
                                  int64_t base_sum) {
    SafeSet set;
    adapter_options_check(o, r->table, r->n_options, r->o.export_hf);
    if (!adapter_is_asked(o)) { return 0; }
    options_refuse(*o->lora && !*r->weights && !r->o.resume, "lora", "needs the model that it belongs to: --from DIR");
    options_refuse(*r->o.export_hf && !o->merge, "export-hf", "writes a model: --merge puts the adapter into its "
                   "weights, --export-lora writes the adapter alone");
    options_refuse(!*adapters_folder(r, o) && (run_is_generating(r) || r->o.eval_only) && !r->o.dry_run, "lora-rank",
                   "begins an adapter, which adds nothing until it is trained: --lora DIR takes one that there is");
    if (*adapters_folder(r, o)) {
        adapter_open(x, &set, adapters_folder(r, o), base, n);
        safeset_close(&set);
        adapters_find_(r, o);
        adapters_check_base_(r, base_sum);
        if (run_is_typed(r, "lora-dropout")) { adapter_set_dropout(x, o->dropout); }
    } else {
        const AdapterSettings settings = adapter_settings_new(o);
        adapter_choose(x, &settings, base, n);
    }
    // ranks that were given the same path may find another adapter_config.json there
    ranks_same(r->comm, "adapter", XXH3_64bits(x->places, sizeof *x->places * (size_t)x->n_places));
    if (r->comm->rank == 0 && (run_is_training(r) || *o->export_lora)) { adapter_warn_of_peft(x, base, n); }
    r->export_adapter = o->export_lora;
    return 1;
}

// --lora asks for --from, and no folder has a model that begins at random
static inline void adapters_warn_of_random_(const Run* r) {
    if (r->comm->rank > 0) { return; }
    warn_line("the adapter learns beside a model of random numbers, which no folder holds: nothing but --resume can "
              "use it. Write that model first (%s %s --seed %d --export-hf BASE), then train with --from BASE",
              *r->o.config ? "--config" : "--model", *r->o.config ? r->o.config : r->o.model, r->o.seed);
}

static inline void adapters_load(Run* r, const AdapterOptions* o, const SliceSink* sink) {
    Model* m = r->model;
    SafeSet set;
    if (!*adapters_folder(r, o)) {
        if (!*r->weights && run_is_training(r) && !o->merge) { adapters_warn_of_random_(r); }
        tensors_init_into(sink, m->table, m->n_saved, (uint32_t)splitmix64((uint64_t)r->o.seed, ADAPTERS_STREAM));
        return;
    }
    adapters_find_(r, o);  // again: of a run that goes on another checkpoint may be the newest by now
    safeset_open(&set, r->adapter_weights);
    tensors_load_into(sink, &set, m->table, m->n_saved, "", NULL);
    safeset_close(&set);
}

// of micro-batch k of this rank, rows of T positions; a probe leaves nothing out
static inline Dropout adapters_dropout(const Run* r, const Adapters* x, int k, int B, int T) {
    const uint64_t row = (uint64_t)model_batch(r->model, k) * (uint64_t)B * (uint64_t)T;  // of the update
    const Dropout dropout = {*r->o.probe ? 0.0f : x->settings.dropout,
                             dropout_key((uint64_t)r->o.seed, (uint64_t)r->state.step), row};
    return dropout;
}

// is_bf16: the files of the model have their matrices so
static inline void adapters_box(const Run* r, const Adapters* x, const AdapterOptions* o, int is_bf16) {
    if (x->n_places == 0) { return; }
    const size_t n = tensors_disk_count(r->model->table, r->model->n_saved);
    box_row("adapter", "LoRA of rank %d, alpha %g%s, beside %d matrices: %s = %zu parameters", x->settings.rank,
            x->settings.alpha, x->settings.rslora ? ", rslora" : "", x->n_places, format_count((double)n).s, n);
    if (x->settings.dropout > 0.0f) { box_row("  dropout", "%s", format_float(x->settings.dropout).s); }
    if (*adapters_folder(r, o)) { box_row("  from", "%s", adapters_folder(r, o)); }
    if (!o->merge) { return; }
    const ShortText as = choice_name(EXPORT_DTYPE_NAMES, r->o.export_dtype);
    const int rounds = r->model->frozen_as == STORED_BF16 || r->trainer->stored_bytes < sizeof(float);
    const int as_read = r->o.export_dtype == EXPORT_AS_READ;
    if (as_read) { box_row("  merged", "written in bf16, or fp32; all else as it was read"); }
    else if (!rounds) { box_row("  merged", "written in %s", as.s); }
    else if (is_bf16) { box_row("  merged", "written in %s, from weights in bf16 as their files have them", as.s); }
    else { box_row("  merged", "written in %s, from weights rounded to bf16: their files have more digits", as.s); }
}
#endif  // LLMC_ADAPTERS_RUN_H
