/*
Routers that are kept busy each by itself, as DeepSeek-V3 has it: a bias by which a router only chooses follows the
counts of each update, and a loss weighs the balance of each sequence, or without it of each leaf.
    levelled_bias     of a router
    levelled_keep     before training: biases learn by counting, not by gradients; and which do not even that
    levelled_weight   of that balance, or of a z-loss, in the gradient of one router
    levelled_balance  in an update: means over leaves, summed over the layers whose router has a bias, but for that of
                      an MTP module
    levelled_biases   after an update: the biases follow
router, bias: fields of the table; E experts. The last two are for when the leaves of all ranks have been added
(model_reduce).
Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2; that biases keep their mean: pytorch/torchtitan
*/
#ifndef LLMC_LEVELLED_ROUTERS_H
#define LLMC_LEVELLED_ROUTERS_H
#include "../ranks/model.h"  // Model, model_row, model_field_learns, dp_sums
#include "expert_layer.h"    // expert_level_bias, router_statistics_length

// by which the router of layer l chooses; NULL: it has none, or another rank has it
static inline float* levelled_bias(const Model* m, size_t bias, int l) {
    const int row = model_row(m, bias, l);
    return row >= 0 && tensor_is_held(&m->held[row], l) ? (float*)model_pointer(m, row, l) : NULL;
}

// stays (layers): those that --freeze keeps as they are, or all of them. Returns whether one is left that moves
static inline int levelled_keep(Model* m, size_t bias, int all_stay, char* stays) {
    int moves = 0;
    for (int l = 0; l < tensors_layers_between(m->table, m->n_table, 1); l++) {
        stays[l] = (char)(all_stay || !model_field_learns(m, bias, l));
        moves |= !stays[l];
    }
    for (int i = 0; i < m->n_table; i++) {
        if (m->table[i].field == bias) { model_freeze(m, &m->table[i]); }
    }
    return moves;
}

// balance: its weight in the loss; sequences of a leaf that have one, 1: all of it. A mean over those of all leaves
static inline float levelled_weight(const Model* m, float balance, int sequences) {
    return balance > 0.0f ? balance * (1.0f / (float)(sequences * m->dp.n_leaves)) : 0.0f;
}

// what the i-th router has counted
static inline const float* levelled_counts_(const Model* m, int i, int E) {
    return dp_sums(&m->dp) + (size_t)i * router_statistics_length(E);
}

static inline float levelled_balance(const Model* m, size_t router, size_t bias, int E) {
    float sum = 0.0f;
    for (int l = 0, i = 0; l < tensors_layers_between(m->table, m->n_table, 0); l++) {
        if (model_row(m, router, l) < 0) { continue; }
        const float* counts = levelled_counts_(m, i++, E);
        if (model_row(m, bias, l) >= 0) { sum += counts[2 * E + ROUTER_BALANCE] / (float)m->dp.n_leaves; }
    }
    return sum;
}

// of the routers of this rank. centred: biases keep their mean; stays: as levelled_keep has it, NULL: none
static inline void levelled_biases(const Model* m, size_t router, size_t bias, float rate, int centred,
                                   const char* stays, int E, const Device* dev) {
    for (int l = 0, i = 0; l < tensors_layers_between(m->table, m->n_table, m->learns_mtp); l++) {
        if (model_row(m, router, l) < 0) { continue; }
        const float* counts = levelled_counts_(m, i++, E);
        float* x = levelled_bias(m, bias, l);
        if (x && !(stays && stays[l])) { expert_level_bias(x, counts, rate, centred, E, l, dev); }
    }
}
#endif  // LLMC_LEVELLED_ROUTERS_H
