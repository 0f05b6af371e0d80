/*
Losses that are beside that of the next token, each as a number that a leaf counts (Model.n_numbers): behind those of
routers that of each indexer, an MTP module's last, then that of the module.
    other_losses_layout  in the trainer's layout: where they stand
    mtp_loss, index_loss   of an update, once the leaves of all ranks have been added (model_reduce): means over what
                         counts for them, with the i-th indexer for a module's among those of its layers
    mtp_counts, index_counts   does anything count for it in that update?
    index_losses         how many indexers learn; index_losses_mean: the mean of theirs, of those for which something
                         counts
    other_loss_log       in the step line and in the record: "mtp 1.2345"; "mtp -" and null where nothing counts
*/
#ifndef LLMC_OTHER_LOSSES_H
#define LLMC_OTHER_LOSSES_H
#include "../ranks/model.h"  // Model, dp_sums
#include "../run/log.h"      // log_note, log_extra

// so many numbers of routers; indexers in the layers of the model, and in that of its MTP module, 0 or 1
static inline void other_losses_layout(Model* m, int of_routers, int n_indexers, int mtp_indexers) {
    m->index_number = of_routers;
    m->n_indexers = n_indexers;
    m->mtp_number = of_routers + (m->learns_index ? n_indexers + mtp_indexers : 0);
    m->n_numbers = m->mtp_number + m->learns_mtp;
}

static inline float mtp_loss(const Model* m) { return dp_sums(&m->dp)[m->mtp_number] / m->mtp_counted; }

static inline int mtp_counts(const Model* m) { return isfinite(m->mtp_counted); }

static inline int index_losses(const Model* m) { return m->mtp_number - m->index_number; }

static inline float index_counted_(const Model* m, int i) {
    return i < m->n_indexers ? m->index_counted : m->mtp_index_counted;
}

static inline float index_loss(const Model* m, int i) {
    return dp_sums(&m->dp)[m->index_number + i] / index_counted_(m, i);
}

static inline int index_counts(const Model* m) {
    int n = 0;
    for (int i = 0; i < index_losses(m); i++) { n += isfinite(index_counted_(m, i)); }
    return n;
}

static inline double index_losses_mean(const Model* m) {
    double sum = 0.0;
    for (int i = 0; i < index_losses(m); i++) { sum += (double)index_loss(m, i); }  // 0 where nothing counts
    return sum / index_counts(m);
}

static inline void other_loss_log(Log* log, const char* name, const char* key, double loss, int counts) {
    if (counts) { log_note(log, "%s %.4f", name, loss); }
    else { log_note(log, "%s -", name); }
    log_extra(log, json_pack("{s:o}", key, counts ? json_finite(loss) : json_null()));
}
#endif  // LLMC_OTHER_LOSSES_H
