/*
Indexers that learn (ops/indexer.h), as their user meets them: what every trainer that has some says of it in the same
words.
    IndexerOptions   a member of the trainer's own struct
    indexer_options  rows of the table: --indexer, --indexer-alone
    indexer_typed    in Trainer.choose: what was typed instead of what config.json says
    indexer_choose   ... behind adapted_choose: do indexers learn? What excludes it is refused
    indexer_learns   ... behind these: in this process?
    indexer_check_freeze   in Trainer.freeze: indexers that are to learn are not all frozen
    indexer_freezes  ... does a row of the table stay as it is?
    indexer_forward  Trainer.forward
    indexer_log      in Trainer.stepped: what they lose, of an update
*/
#ifndef LLMC_INDEXER_RUN_H
#define LLMC_INDEXER_RUN_H
#include "../core/choice.h"      // choice_name
#include "../ops/indexer.h"      // INDEXER_NAMES, INDEXER_OFF
#include "../run/trainer.h"      // Run, run_is_typed
#include "decoder_run.h"         // decoder_forward, decoder_freezes_all
#include "other_losses.h"        // index_losses_mean

typedef struct {
    int training;  // --indexer, an IndexerTraining
    int alone;     // --indexer-alone
} IndexerOptions;

static inline void indexer_options(Run* r, IndexerOptions* x) {
    const Option own[] = {
        {"model", "indexer", "", OPTION_CHOICE, &x->training, "off", 0, 0, INDEXER_NAMES,
         "how indexers learn, by a loss of their own: kl, to choose as attention weighs what they have chosen; dense, "
         "as it weighs all that there is, which is all chosen meanwhile, but in validations and texts. off: they stay "
         "as they are. Where it is not typed, config.json's indexer_train or the preset's", 0},
        {"model", "indexer-alone", "", OPTION_SWITCH, &x->alone, "0", 0, 0, "0|1",
         "nothing but the indexers learns: a warm-up, with --indexer dense", 0},
    };
    run_add_options(r, own, sizeof own);
}

static inline void indexer_typed(Run* r, const IndexerOptions* x, int* training) {
    if (run_is_typed(r, "indexer")) { *training = x->training; }
}

// training: of the Config. The table of settings has how they learn in this run: off where it computes no gradient.
// config.json keeps its own
static inline int indexer_choose(Run* r, const IndexerOptions* x, int training, int has_some, int is_adapter) {
    const int is_on = training != INDEXER_OFF, learns = is_on && has_some && !is_adapter;
    const int computes = run_is_training(r) || *r->o.probe;
    options_refuse(run_is_typed(r, "indexer") && is_on && !has_some, "indexer",
                   "is for a model that has indexers");
    options_refuse(run_is_typed(r, "indexer") && is_on && is_adapter, "indexer",
                   "is not for adapters, beside which indexers stay as they are");
    options_refuse(x->alone && (!is_on || is_adapter), "indexer-alone",
                   "is for --indexer kl or dense, without an adapter");
    options_set(r->table, r->n_options, "indexer",
                choice_name(INDEXER_NAMES, computes && learns ? training : INDEXER_OFF).s);
    if (learns) {
        log_add_key(&r->log, "index_loss", "of the indexers, the mean over their layers; not in the loss");
    }
    return learns;
}

// for the box, of this process: an export learns nothing
static inline int indexer_learns(const Run* r) { return r->model->learns_index && run_purpose(r) == TO_TRAIN; }

static inline void indexer_check_freeze(const Run* r, const IndexerOptions* x, int (*is_index)(const Tensor* t)) {
    if (r->model->learns_index && decoder_freezes_all(r, is_index)) {
        options_fail("freeze", "all indexers are frozen, which --indexer %s lets learn: leave some of them out, or "
                     "give --indexer off", choice_name(INDEXER_NAMES, x->training).s);
    }
}

// is_index: the row is an indexer's
static inline int indexer_freezes(const IndexerOptions* x, const Model* m, int is_index) {
    return is_index ? !m->learns_index : x->alone;
}

// --indexer dense chooses all there is while the model learns. A validation is of the model that is saved, which has
// index_topk of it: *indexer, how passes train, is off meanwhile
static inline void indexer_forward(Run* r, int* indexer, Purpose purpose, const int* tokens, const int* targets, int B,
                                   int T, int t0) {
    const int training = *indexer;
    if (purpose == TO_EVALUATE) { *indexer = INDEXER_OFF; }
    decoder_forward(r, purpose, tokens, targets, B, T, t0);
    *indexer = training;
}

static inline void indexer_log(Run* r) {
    if (!r->model->learns_index) { return; }
    other_loss_log(&r->log, "index", "index_loss", index_losses_mean(r->model), index_counts(r->model) > 0);
}
#endif  // LLMC_INDEXER_RUN_H
