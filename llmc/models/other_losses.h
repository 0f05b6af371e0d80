/*
Losses that are beside that of the next token, each as a number that a leaf counts (Model.n_numbers): behind those of
routers that of each indexer, an MTP module's last, then that of the module.
    other_losses_layout  in the trainer's layout: where they stand
    mtp_loss, index_loss   of an update, once the leaves of all ranks have been added (model_reduce): means over what
                         counts for them, with the i-th indexer for a module's among those of its layers
    index_losses         how many indexers learn; index_losses_mean: the mean of theirs
*/
#ifndef LLMC_OTHER_LOSSES_H
#define LLMC_OTHER_LOSSES_H
#include "../ranks/model.h"  // Model, dp_sums

// so many numbers of routers; indexers in the layers of the model, and in that of its MTP module, 0 or 1
static inline void other_losses_layout(Model* m, int of_routers, int n_indexers, int mtp_indexers) {
    m->index_number = of_routers;
    m->n_indexers = n_indexers;
    m->mtp_number = of_routers + (m->learns_index ? n_indexers + mtp_indexers : 0);
    m->n_numbers = m->mtp_number + m->learns_mtp;
}

static inline float mtp_loss(const Model* m) { return dp_sums(&m->dp)[m->mtp_number] / m->mtp_counted; }

static inline int index_losses(const Model* m) { return m->mtp_number - m->index_number; }

static inline float index_loss(const Model* m, int i) {
    return dp_sums(&m->dp)[m->index_number + i] / (i < m->n_indexers ? m->index_counted : m->mtp_index_counted);
}

static inline double index_losses_mean(const Model* m) {
    double sum = 0.0;
    for (int i = 0; i < index_losses(m); i++) { sum += (double)index_loss(m, i); }
    return sum / index_losses(m);
}
#endif  // LLMC_OTHER_LOSSES_H
