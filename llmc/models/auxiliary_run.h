/*
What a model learns beside the next token (auxiliary.h), as its user meets it: what trainers of models that have all of
it tell a run in the same words.
    AuxiliaryOptions    a member of the trainer's own struct; AuxiliaryRows: which of its parameters are whose
    auxiliary_options   rows of the table: --indexer, --indexer-alone, --bias-rate, --seq-balance, --mtp, --mtp-weight
    auxiliary_typed     in Trainer.choose: what was typed instead of what config.json says
    auxiliary_choose    ... behind adapted_choose: what of it this run does. What excludes it is refused
    auxiliary_freeze    in Trainer.freeze
    auxiliary_stepped   in Trainer.stepped: the log; biases of routers follow what these have counted
Rows of the box are those of mtp_run.h and levelled_run.h, each at its place.
*/
#ifndef LLMC_AUXILIARY_RUN_H
#define LLMC_AUXILIARY_RUN_H
#include "../run/save.h"   // save_let_change
#include "auxiliary.h"     // Auxiliary
#include "indexer_run.h"   // IndexerOptions
#include "levelled_run.h"  // LevelledOptions
#include "mtp_run.h"       // MtpOptions
#include "router_log.h"    // router_log_step

typedef struct {
    MtpOptions mtp;
    IndexerOptions indexer;
    LevelledOptions balance;
} AuxiliaryOptions;

typedef struct {
    size_t router, bias;  // fields of the table: of routers, and the biases by which they choose
    int (*is_index)(const Tensor* t), (*is_mtp)(const Tensor* t);  // is a row an indexer's, the MTP module's?
} AuxiliaryRows;

// do the module and the indexers learn?
typedef struct { int mtp, index; } AuxiliaryLearns;

static inline void auxiliary_options(Run* r, AuxiliaryOptions* x) {
    indexer_options(r, &x->indexer);
    levelled_options(r, &x->balance);
    mtp_options(r, &x->mtp);
}

static inline void auxiliary_typed(Run* r, AuxiliaryOptions* x, Auxiliary* c) {
    mtp_typed(r, &x->mtp, &c->mtp, &c->mtp_weight);
    indexer_typed(r, &x->indexer, &c->indexer);
    levelled_typed(r, &x->balance, &c->bias_rate, &c->balance);
}

// has_indexers, chooses: of the layers before the module's; chooses: routers choose experts by a bias
static inline AuxiliaryLearns auxiliary_choose(Run* r, AuxiliaryOptions* x, const Auxiliary* c, int has_indexers,
                                               int chooses, int is_adapter) {
    AuxiliaryLearns learns;
    learns.mtp = mtp_choose(r, &x->mtp, c->mtp, c->mtp_weight, is_adapter);
    learns.index = indexer_choose(r, &x->indexer, c->indexer, has_indexers, is_adapter);
    levelled_choose(r, &x->balance, c->bias_rate, c->balance, chooses || learns.mtp, chooses, is_adapter,
                    x->indexer.alone);
    return learns;
}

static inline void auxiliary_freeze(Run* r, AuxiliaryOptions* x, const AuxiliaryRows* rows) {
    Model* m = r->model;
    mtp_freeze(r->model, rows->is_mtp);
    indexer_check_freeze(r, &x->indexer, rows->is_index);
    levelled_freeze(r, &x->balance, rows->bias);
    for (int i = 0; i < m->n_table && !model_is_adapter(m); i++) {
        if (indexer_freezes(&x->indexer, m, rows->is_index(&m->table[i]))) { model_freeze(m, &m->table[i]); }
    }
}

// E experts; n_routers of layers before the module's, of which n_levelled choose by a bias
static inline void auxiliary_stepped(Run* r, const Step* s, const AuxiliaryOptions* x, const Auxiliary* c,
                                     const AuxiliaryRows* rows, int n_routers, int n_levelled, int E) {
    const Model* m = r->model;
    if (n_routers > 0) {
        const Routing now = routing_read(m, n_routers, E);
        const float sum = levelled_balance(m, rows->router, rows->bias, E);
        router_log_step(r, n_levelled > 0 ? sum / (float)n_levelled : 1.0f, NULL, now.load, now.idle);
    }
    if (!s->skipped && c->bias_rate > 0.0f && !model_is_adapter(m)) {
        save_let_change(r);
        levelled_biases(m, rows->router, rows->bias, c->bias_rate, 0, x->balance.stays, E, &r->dev);
    }
    mtp_log(r);
    indexer_log(r);
}
#endif  // LLMC_AUXILIARY_RUN_H
