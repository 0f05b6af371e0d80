/*
The module that predicts the token after the next (mtp.h), as its user meets it: what every trainer that has one says
of it in the same words.
    MtpOptions    a member of the trainer's own struct
    mtp_options   rows of the table: --mtp, --mtp-weight
    mtp_typed     in Trainer.choose: what was typed instead of what config.json says
    mtp_choose    ... behind adapted_choose: does the module learn? What excludes it is refused
    mtp_check     in Trainer.check: are rows long enough?
    mtp_freeze    in Trainer.freeze: a module that does not learn stays as it is. One that --freeze keeps may go on with
                  its loss, which then teaches the model alone
    mtp_box       its row of the box
    mtp_rows_before  rows of the model's table before the module's, or before what else stands beside the text's
    mtp_load      in Trainer.load: its rows. It is drawn by itself: the rest begins as it does without
    mtp_load_model   ... with all before, of a trainer that has nothing else
    mtp_log       in Trainer.stepped: its loss, of an update
is_row: does a row of the table belong to the module?
*/
#ifndef LLMC_MTP_RUN_H
#define LLMC_MTP_RUN_H
#include "../core/print.h"        // format_float, format_count
#include "../core/rng.h"          // splitmix64
#include "../files/tensorfile.h"  // tensors_load_into
#include "../run/trainer.h"       // Run, run_is_chosen
#include "decoder_run.h"          // decoder_count
#include "other_losses.h"         // mtp_loss

typedef struct {
    int mtp;       // --mtp
    int is_new;    // the files have no such module
    int is_added;  // nor has config.json or the preset, in a run that begins
    float weight;  // --mtp-weight
} MtpOptions;

static inline void mtp_options(Run* r, MtpOptions* x) {
    const Option own[] = {
        {"model", "mtp", "", OPTION_SWITCH, &x->mtp, "0", 0, 0, "0|1",
         "a module that predicts the token after the next (MTP): 1 gives one to a model that has none, 0 leaves it "
         "out. Where it is not typed, as the files have it", OPTION_BEGINS},
        {"model", "mtp-weight", "", OPTION_FLOAT, &x->weight, "0.1", 0, 1e3, "F",
         "weight of the loss of that module; 0: it stays as it is. Where it is not typed, config.json's mtp_weight or "
         "the preset's", 0},
    };
    run_add_options(r, own, sizeof own);
}

// has, weight: of the Config
static inline void mtp_typed(Run* r, MtpOptions* x, int* has, float* weight) {
    x->is_added = run_is_typed(r, "mtp") && x->mtp && !*has && !r->o.resume;
    x->is_new = *r->weights && run_is_typed(r, "mtp") && x->mtp && !*has;
    if (run_is_chosen(r, "mtp")) { *has = x->mtp; }
    if (run_is_typed(r, "mtp-weight")) { *weight = x->weight; }
}

// The table of settings has the weight that the module learns with: 0 where a model or adapter learns without it, and
// what was typed where nothing learns. config.json keeps its own
static inline int mtp_choose(Run* r, const MtpOptions* x, int has, float weight, int is_adapter) {
    const int learns = has && !is_adapter && (weight > 0.0f || *r->o.probe);
    const int computes = run_is_training(r) || *r->o.probe;
    const int is_idle = x->is_new && !(learns && (run_will_train(r) || *r->o.probe));
    options_refuse(is_idle || (x->is_added && is_adapter), "mtp",
                   "1 gives a new module to a model that is trained, all of it, with --mtp-weight above 0");
    options_refuse(run_is_typed(r, "mtp-weight") && is_adapter && x->weight > 0.0f, "mtp-weight",
                   "is not for adapters, beside which the module stays as it is");
    options_refuse(run_is_typed(r, "mtp-weight") && !has, "mtp-weight", "is for a model with that module: --mtp 1");
    options_set(r->table, r->n_options, "mtp", has ? "1" : "0");
    if (computes) {
        options_set(r->table, r->n_options, "mtp-weight", format_float(has && !learns ? 0.0f : weight).s);
    }
    if (learns) { log_add_key(&r->log, "mtp_loss", "of the token after the next, before its weight"); }
    return learns;
}

static inline void mtp_check(const Run* r) {
    if (r->model->learns_mtp && r->T < 2) {
        options_fail("seq-len", "expected at least 2 positions, so that there is a token after the next, found %d: "
                     "give more, or --mtp 0", r->T);
    }
}

static inline void mtp_freeze(Model* m, int (*is_row)(const Tensor* t)) {
    for (int i = 0; i < m->n_table && !model_is_adapter(m) && !m->learns_mtp; i++) {
        if (is_row(&m->table[i])) { model_freeze(m, &m->table[i]); }
    }
}

static inline void mtp_box(const Run* r, const MtpOptions* x, int (*is_row)(const Tensor* t)) {
    const double n = decoder_count(r->model, is_row);
    if (n == 0.0) { return; }
    box_row("mtp", "a %slayer and %s more parameters for the token after the next%s", x->is_new ? "new " : "",
            format_count(n).s, run_is_generating(r) || r->model->learns_mtp ? "" : ", which stay as they are");
}

// set NULL: the model begins at random
static inline void mtp_load(const Run* r, const MtpOptions* x, const SliceSink* sink, SafeSet* set, Tensor* rows,
                            int n) {
    if (!set || x->is_new) { tensors_init_into(sink, rows, n, (uint32_t)splitmix64((uint64_t)r->o.seed, 0)); }
    else { tensors_load_into(sink, set, rows, n, "", NULL); }
}

// from row `first` on, behind those of adapters
static inline int mtp_rows_before(const Model* m, int first, int (*is_row)(const Tensor* t)) {
    int n = first;
    while (n < m->n_table && !is_row(&m->table[n])) { n++; }
    return n - first;
}

// leave_rest: of a file what the model does not have
static inline void mtp_load_model(Run* r, const MtpOptions* x, const SliceSink* sink, int first,
                                  int (*is_row)(const Tensor* t), void (*leave_rest)(const Run* r, SafeSet* set)) {
    Model* m = r->model;
    const int n = mtp_rows_before(m, first, is_row), n_mtp = m->n_table - first - n;
    Tensor *base = m->table + first, *mtp = base + n;
    SafeSet set;
    if (!*r->weights) {
        tensors_init_into(sink, base, n, (uint32_t)r->o.seed);
        mtp_load(r, x, sink, NULL, mtp, n_mtp);
        return;
    }
    safeset_open(&set, r->weights);
    tensors_load_into(sink, &set, base, n, "", NULL);
    mtp_load(r, x, sink, &set, mtp, n_mtp);
    leave_rest(r, &set);
    safeset_report_unused(&set);
    safeset_close(&set);
}

static inline void mtp_log(Run* r) {
    if (!r->model->learns_mtp) { return; }
    other_loss_log(&r->log, "mtp", "mtp_loss", (double)mtp_loss(r->model), mtp_counts(r->model));
}
#endif  // LLMC_MTP_RUN_H
