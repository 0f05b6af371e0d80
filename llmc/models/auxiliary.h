/*
What a model learns beside the next token, of DeepSeek V4 and GLM-5, which have all of it: the token after the next
(mtp.h), indexers that choose keys (ops/indexer.h), routers that are kept busy (levelled_routers.h).
    Auxiliary         a member of the model's Config
    AUXILIARY_KEYS    of config.json, all of which may be left out: |KEY for each
    auxiliary_parse, auxiliary_json   from config.json, and back
    auxiliary_loss    of an update, once the leaves of all ranks have been added (model_reduce): what is added to the
                      loss of the next token. What indexers lose is no part of it: they share no parameter with the rest
Errors: 0 with the reason.
*/
#ifndef LLMC_AUXILIARY_H
#define LLMC_AUXILIARY_H
#include "../ops/indexer.h"    // INDEXER_NAMES
#include "config_parts.h"      // MTP_WEIGHT, config_is_absent
#include "levelled_routers.h"  // levelled_balance
#include "other_losses.h"      // mtp_loss

typedef struct {
    int mtp;           // there is a module that predicts the token after the next (MTP)
    float mtp_weight;  // of its loss
    int indexer;       // how indexers learn, an IndexerTraining
    float balance;     // weight of the balance of each sequence in the loss; 0: it is not in it
    float bias_rate;   // how far the bias of a router moves in an update; 0: not at all
} Auxiliary;

#define AUXILIARY_KEYS "|num_nextn_predict_layers|mtp_weight|indexer_train|seq_balance_coef|bias_update_rate"

// most: modules of which a config.json may speak; whatever it says, there is one or none
static inline int auxiliary_parse(Auxiliary* x, int most, const json_t* json, ErrorText* error) {
    double weight = (double)MTP_WEIGHT, balance = 0.0, rate = 0.0;
    int modules = 0;
    const JsonInt mtp[] = {{"num_nextn_predict_layers", &modules, 0, most}};
    if ((!config_is_absent(json, mtp[0].key) && !json_ints(json, mtp, 1, error)) ||
        !json_number(&weight, json, "mtp_weight", 0.0, 1e3, error) ||
        !json_number(&balance, json, "seq_balance_coef", 0.0, 1e3, error) ||
        !json_number(&rate, json, "bias_update_rate", 0.0, 1.0, error) ||
        !json_choice(&x->indexer, json, "indexer_train", INDEXER_NAMES, error)) {
        return 0;
    }
    x->mtp = modules > 0;
    x->mtp_weight = (float)weight, x->balance = (float)balance, x->bias_rate = (float)rate;
    return 1;
}

static inline json_t* auxiliary_json(const Auxiliary* x) {
    json_t* json = json_pack("{s:i, s:s, s:f, s:f}", "num_nextn_predict_layers", x->mtp, "indexer_train",
                             choice_name(INDEXER_NAMES, x->indexer).s, "seq_balance_coef", shortest_double(x->balance),
                             "bias_update_rate", shortest_double(x->bias_rate));
    if (x->mtp) { json_object_set_new(json, "mtp_weight", json_real(shortest_double(x->mtp_weight))); }
    return json;
}

// router, bias: fields of the table; E experts
static inline float auxiliary_loss(const Model* m, const Auxiliary* x, size_t router, size_t bias, int E) {
    const float balance = x->balance > 0.0f ? x->balance * levelled_balance(m, router, bias, E) : 0.0f;
    return m->learns_mtp ? x->mtp_weight * mtp_loss(m) + balance : balance;
}
#endif  // LLMC_AUXILIARY_H
