/*
Routers that are kept busy each by itself, as DeepSeek-V3 has it: a bias by which a router only chooses follows the
counts of each update, and a loss weighs the balance of each sequence, or without it of each leaf.
    levelled_weight   of that balance in the gradient of one router
    levelled_balance  in an update: means over leaves, summed over the layers whose router has a bias, but for that of
                      an MTP module
    levelled_biases   after an update: the biases follow
router, bias: fields of the table; E experts. The last two are for when the leaves of all ranks have been added
(model_reduce).
Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2
*/
#ifndef LLMC_LEVELLED_ROUTERS_H
#define LLMC_LEVELLED_ROUTERS_H
#include "../ranks/model.h"  // Model, model_row, dp_sums
#include "expert_layer.h"    // expert_level_bias, router_statistics_length

// balance: its weight in the loss; sequences of a leaf that have one. A mean over those of all leaves
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

// of the routers of this rank. stays (layers): those that --freeze keeps; NULL: none
static inline void levelled_biases(const Model* m, size_t router, size_t bias, float rate, const char* stays, int E,
                                   const Device* dev) {
    for (int l = 0, i = 0; l < tensors_layers_between(m->table, m->n_table, m->learns_mtp); l++) {
        if (model_row(m, router, l) < 0) { continue; }
        const float* counts = levelled_counts_(m, i++, E);
        const int row = model_row(m, bias, l);
        if (row < 0 || (stays && stays[l]) || !tensor_is_held(&m->held[row], l)) { continue; }
        expert_level_bias((float*)model_pointer(m, row, l), counts, rate, 0, E, l, dev);
    }
}
#endif  // LLMC_LEVELLED_ROUTERS_H
