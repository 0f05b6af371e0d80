/*
Experts that are kept equally busy by biases that follow their counts, and by a loss of each sequence, as their user
meets it: what every trainer with such routers says of it in the same words (levelled_routers.h does it).
    LevelledOptions   a member of the trainer's own struct
    levelled_options  rows of the table: --bias-rate, --seq-balance
    levelled_typed    in Trainer.choose: what was typed instead of what config.json says
    levelled_choose   ... behind adapted_choose: what of it this run does. What excludes it is refused
    levelled_check_moves   biases that are to move are not all frozen
    levelled_freeze   in Trainer.freeze: biases follow counts alone, and those that --freeze keeps not even these, which
                      are not all
    levelled_box      its row of the box
*/
#ifndef LLMC_LEVELLED_RUN_H
#define LLMC_LEVELLED_RUN_H
#include "../core/print.h"   // format_float
#include "../run/trainer.h"  // Run, run_is_chosen
#include "experts_run.h"     // experts_balance_box
#include "levelled_routers.h"  // levelled_keep

enum { LEVELLED_MOST_LAYERS = 1025 };

typedef struct {
    float bias_rate, loss;             // --bias-rate, --seq-balance
    int all_stay;                      // all biases, beside --indexer-alone
    char stays[LEVELLED_MOST_LAYERS];  // of the router of each layer: --freeze keeps its bias
} LevelledOptions;

static inline void levelled_options(Run* r, LevelledOptions* x) {
    const Option own[] = {
        {"experts", "bias-rate", "", OPTION_FLOAT, &x->bias_rate, "0", 0, 1, "F",
         "how far the bias by which a router chooses moves in an update, towards experts that have less to do; 0: not "
         "at all. Where it is not typed, config.json's bias_update_rate or the preset's, 0.001 of tiny and small", 0},
        {"experts", "seq-balance", "", OPTION_FLOAT, &x->loss, "0", 0, 1e3, "F",
         "weight of the balance of experts in each sequence, a loss; 0: none. Where it is not typed, config.json's "
         "seq_balance_coef or the preset's", 0},
    };
    run_add_options(r, own, sizeof own);
}

static inline void levelled_typed(Run* r, const LevelledOptions* x, float* bias_rate, float* loss) {
    if (run_is_typed(r, "bias-rate")) { *bias_rate = x->bias_rate; }
    if (run_is_chosen(r, "seq-balance")) { *loss = x->loss; }
}

// bias_rate, loss: of the Config. The table of settings has what this run trains with: 0 where it computes no gradient.
// has_bias, has_loss: of some router in training. config.json keeps its own. stays: nothing of the routers learns
static inline void levelled_choose(Run* r, LevelledOptions* x, float bias_rate, float loss, int has_bias, int has_loss,
                                   int is_adapter, int stays) {
    const int moves = run_is_training(r) && !is_adapter && has_bias && !stays;
    const int computes = (run_is_training(r) || *r->o.probe) && has_loss;
    options_refuse(run_is_typed(r, "bias-rate") && is_adapter && x->bias_rate > 0.0f, "bias-rate",
                   "is not for adapters, beside which routers stay as they are");
    options_refuse(run_is_typed(r, "bias-rate") && x->bias_rate > 0.0f && !has_bias, "bias-rate",
                   "is for models whose layers choose experts");
    options_refuse(run_is_typed(r, "seq-balance") && x->loss > 0.0f && !has_loss, "seq-balance",
                   "is for models whose layers choose experts");
    options_refuse(run_is_typed(r, "bias-rate") && x->bias_rate > 0.0f && stays, "bias-rate",
                   "is not for --indexer-alone, beside which routers stay as they are");
    options_refuse(run_is_typed(r, "seq-balance") && x->loss > 0.0f && stays, "seq-balance",
                   "is not for --indexer-alone, beside which routers stay as they are");
    x->all_stay = stays;
    options_set(r->table, r->n_options, "bias-rate", format_float(moves ? bias_rate : 0.0f).s);
    options_set(r->table, r->n_options, "seq-balance", format_float(computes ? loss : 0.0f).s);
}

// rate: by which biases are to move, 0: not at all; moves: one is left that does
static inline void levelled_check_moves(float rate, int moves) {
    if (rate == 0.0f || moves) { return; }
    options_fail("freeze", "the biases of all routers are frozen, which --bias-rate %s moves: leave some of them out, "
                 "or give --bias-rate 0", format_float(rate).s);
}

// bias: field of the biases. Called while those of a module that does not learn are frozen already
static inline void levelled_freeze(const Run* r, LevelledOptions* x, size_t bias) {
    Model* m = r->model;
    assert(tensors_layers_between(m->table, m->n_table, 1) <= LEVELLED_MOST_LAYERS);
    if (model_is_adapter(m)) { return; }
    const int learns = model_learns(m), moves = levelled_keep(m, bias, x->all_stay, x->stays);
    levelled_check_moves(learns ? x->bias_rate : 0.0f, moves);
}

static inline void levelled_box(const Run* r, const LevelledOptions* x, float bias_rate, float loss) {
    const int moves = bias_rate > 0.0f && !x->all_stay;
    if (!run_is_training(r) || model_is_adapter(r->model)) { return; }
    experts_balance_box(moves ? format_float(bias_rate).s : "stays", loss, " for each sequence", "");
}
#endif  // LLMC_LEVELLED_RUN_H
