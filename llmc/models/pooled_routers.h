/*
One balance for the routers of all layers, as transformers has it of Qwen's models: where tokens go is counted over all
layers together, so an expert that is busy in one of them may be idle in another.
    pooled_numbers   how many numbers the routers of a leaf count: of each layer, then of all of them together, whose
                     layer_numbers are those of `layers`
    pooled_weight    of the balance in the gradient of one router
    pooled_balance   in an update: the mean over leaves, 1 where all experts are equally busy
    pooled_loss      what it adds to the loss: transformers' balance is k times ours
layers: that have experts; E: of each; a token takes k. balance: its weight in the loss, 0: none. pooled_balance and
pooled_loss are for when the leaves of all ranks have been added (model_reduce).
*/
#ifndef LLMC_POOLED_ROUTERS_H
#define LLMC_POOLED_ROUTERS_H
#include "../ops/router.h"    // router_statistics_length
#include "../ranks/model.h"   // Model, dp_sums

// 0 layers: none
static inline int pooled_numbers(int layers, int E) {
    return layers > 0 ? (layers + 1) * (int)router_statistics_length(E) : 0;
}

// the losses of routers are means over leaves
static inline float pooled_weight(const Model* m, float balance, int k, int layers) {
    const float per_leaf = 1.0f / (float)m->dp.n_leaves;
    return balance * (float)k / (float)layers * per_leaf;
}

static inline float pooled_balance(const Model* m, int layers, int E) {
    const float* pooled = dp_sums(&m->dp) + (size_t)layers * router_statistics_length(E);
    return pooled[2 * E + ROUTER_BALANCE] / (float)m->dp.n_leaves;
}

static inline float pooled_loss(const Model* m, float balance, int k, int layers, int E) {
    return layers > 0 && balance > 0.0f ? balance * (float)k * pooled_balance(m, layers, E) : 0.0f;
}
#endif  // LLMC_POOLED_ROUTERS_H
