/*
A second loss beside the one that is back-propagated through the whole model, such as Forward-Forward's, which asks for
gradients of the layers' parameters too: its leaves, the sum of them over all ranks, and how both gradients become one.
    second_loss_layout    sizes only; second_loss_open: memory for its gradients, which `dp` adds up like the first's
    second_loss_join      which parameters both losses share, all that learn in the layers, and how gradient_surgery.h
                          makes one gradient of two. Without it there is one task, and nothing to do
    second_loss_combine   the gradients of the first become those of both; returns their norm
    second_loss_descend   a step without the first loss: plain descent on the second
    second_loss_conflicts layers in which the losses pulled apart when they were combined
Not with --zero 1 or 2: a rank needs both gradients whole. Order: that of gradient_surgery.h.
*/
#ifndef LLMC_SECOND_LOSS_H
#define LLMC_SECOND_LOSS_H
#include "../ops/gradient_surgery.h"  // Surgery, surgery_apply
#include "model.h"                    // Model, DataParallel

typedef struct {
    DataParallel dp;   // gradients of the second loss
    Surgery surgery;   // its ranges: the shared parameters, layer by layer
    size_t* params;    // of each range: where it begins among the parameters
    int* ends;         // (L) where the ranges of each layer end
    int L;
} SecondLoss;

// leaves: those of the second loss
static inline void second_loss_layout(SecondLoss* s, const Model* m, Comm* comm, int n_leaves) {
    dp_init(&s->dp, comm, m->table, m->n_table, m->frozen, n_leaves, 0);
}

static inline void second_loss_open(SecondLoss* s, const Model* m, Comm* comm, int n_leaves) {
    second_loss_layout(s, m, comm, n_leaves);
    dp_open(&s->dp);
}

// where the gradients of slice k of a row of the table are, n 0: nobody asks for them
static inline SurgeryRange second_loss_range_(const Model* m, int row, int k) {
    SurgeryRange range = {0, 0};
    if (dp_stretch(&m->dp, row, k) < 0) { return range; }
    range.first = dp_gradient_at(&m->dp, row, k);
    range.n = tensor_slice_elements(&m->table[row]);
    return range;
}

// ranges (n_slices); returns how many there are
static inline int second_loss_ranges_(SecondLoss* s, const Model* m, SurgeryRange* ranges) {
    int n = 0;
    for (int l = 0; l < s->L; l++) {
        for (int i = 0; i < m->n_table; i++) {
            const Tensor* t = &m->table[i];
            const int first = t->layers > 0 ? tensor_slice(t, l) : -1;
            for (int k = first; first >= 0 && k < first + tensor_layer_slices(t); k++) {
                const SurgeryRange range = second_loss_range_(m, i, k);
                if (range.n == 0) { continue; }
                s->params[n] = t->offset + (size_t)k * range.n;
                ranges[n++] = range;
            }
        }
        s->ends[l] = n;
    }
    return n;
}

// L layers, once the model's gradients have their places. config->norm_range is set here: gradnorm compares the
// gradients of `compared`, one matrix in each layer, in the last layer that learns
static inline void second_loss_join(SecondLoss* s, const Model* m, int L, SurgeryConfig* config,
                                    const Tensor* compared) {
    const size_t n_slices = (size_t)m->n_slices;
    int last = L - 1;
    while (last > 0 && !model_layer_learns(m, last)) { last--; }
    config->norm_range = second_loss_range_(m, (int)(compared - m->table), last);
    s->L = L;
    s->params = (size_t*)malloc_check(sizeof(size_t) * n_slices, "shared parameters");
    s->ends = (int*)malloc_check(sizeof(int) * (size_t)L, "shared parameters");
    SurgeryRange* ranges = (SurgeryRange*)malloc_check(sizeof(SurgeryRange) * n_slices, "shared parameters");
    surgery_init(&s->surgery, config, ranges, second_loss_ranges_(s, m, ranges), 2);
    free(ranges);
}

static inline void second_loss_free(SecondLoss* s) {
    dp_free(&s->dp);
    surgery_free(&s->surgery);
    free(s->params);
    free(s->ends);
}

// `scale` is how much the second loss counts; gradnorm finds that by itself
static inline float second_loss_combine(SecondLoss* s, Model* m, float* grads, float* second, const float losses[2],
                                        float scale, uint64_t step, const Device* dev) {
    float* both[] = {grads, second};
    SurgeryReport report;
    for (int k = 0; k < s->surgery.n_ranges && s->surgery.config.method != SURGERY_GRADNORM; k++) {
        const SurgeryRange range = s->surgery.ranges[k];
        #pragma omp parallel for simd
        for (size_t i = 0; i < range.n; i++) { second[range.first + i] *= scale; }
    }
    surgery_apply(&report, both, &s->surgery, step, losses, dev);
    return dp_norm(&m->dp, grads, dev);
}

static inline void second_loss_descend(const SecondLoss* s, Model* m, const float* second, float rate) {
    for (int k = 0; k < s->surgery.n_ranges; k++) {
        const SurgeryRange range = s->surgery.ranges[k];
        float* params = model_floats(m) + s->params[k];
        #pragma omp parallel for simd
        for (size_t i = 0; i < range.n; i++) { params[i] -= rate * second[range.first + i]; }
    }
}

static inline int second_loss_conflicts(const SecondLoss* s) {
    int n = 0, k = 0;
    for (int l = 0; l < s->L; l++) {
        double dot = 0.0;
        for (; k < s->ends[l]; k++) { dot += s->surgery.range_dots[4 * k + 1]; }  // (2, 2) of each range: [0][1]
        n += dot < 0.0;
    }
    return n;
}
#endif  // LLMC_SECOND_LOSS_H
