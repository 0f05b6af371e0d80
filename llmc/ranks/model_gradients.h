/*
Gradients of a model and what an update makes of them: the calls of data_parallel.h, once for what every rank has and
once for experts, with --ep. Without it each is that call and nothing else.
    model_point_gradients   the fields of a struct of pointers point to where backward writes the gradients of a layer
    model_gradient_of       one of them
    model_layer_done, model_leaf_done   told by backward
    model_reduce            sums over all leaves; the arena of what every rank has comes back
    model_norm, model_update
    model_average_now, model_exchange_average   of the parameters over updates (ema.h)
    model_first_bad         for messages: what is not finite
Order:  the norm adds the sums of chunks in the order of the whole table, whoever has them. Chunks of experts
        must be those of a rank that has all: so a matrix of an expert has a multiple of NORM_CHUNK elements.
*/
#ifndef LLMC_MODEL_GRADIENTS_H
#define LLMC_MODEL_GRADIENTS_H
#include "model.h"  // Model, model_has_ep

// as dp_point; of experts that ranks share, the gradients of all leaves that their group computes now
static inline void model_point_gradients(Model* m, void* pointers, int layer) {
    dp_point(&m->dp, pointers, layer);
    if (model_has_ep(m)) { dp_point_learning(&m->dp_experts, pointers, layer); }
}

// the same of row i alone; NULL: it does not learn
static inline float* model_gradient_of(Model* m, int i, int layer) { return dp_gradient_of(model_dp(m, i), i, layer); }

static inline void model_layer_done(Model* m, int layer, const Device* dev) {
    dp_layer_done(&m->dp, layer, dev);
    if (model_has_ep(m)) { dp_layer_done(&m->dp_experts, layer, dev); }
}

static inline void model_leaf_done(Model* m, const Device* dev) {
    dp_leaf_done(&m->dp, dev);
    if (model_has_ep(m)) { dp_leaf_done(&m->dp_experts, dev); }
}

// the arena that dp_reduce has returned
static inline const float* model_expert_gradients_(const Model* m) { return m->dp_experts.tree.arena[0]; }

static inline float* model_reduce(Model* m, float* loss, const Device* dev) {
    float none;
    if (model_has_ep(m)) { dp_reduce(&m->dp_experts, &none, dev); }
    return dp_reduce(&m->dp, loss, dev);
}

// Row i has experts, slice k is the first of a layer: chunks of those of its experts that the rank at `place`
// has, 0 where none of them learns. slice: the row's first in table order
static inline size_t model_ep_chunks_(const Model* m, int i, int slice, int k, int place) {
    const Tensor* held = &m->held[i];
    const int n = tensor_layer_slices(held);
    return slices_learn(m->frozen, slice + k + place * n, n) ? tensor_layer_elements(held) / NORM_CHUNK : 0;
}

// counts (ranks of the group): chunks of experts that learn, of each
static inline void model_count_ep_(const Model* m, size_t* counts) {
    memset(counts, 0, sizeof(size_t) * (size_t)m->ranks.size);
    for (int i = 0, slice = 0; i < m->n_table; slice += tensor_slices(&m->table[i++])) {
        const Tensor* t = &m->table[i];
        for (int k = 0; t->experts > 0 && k < tensor_slices(t); k += tensor_layer_slices(t)) {
            for (int place = 0; place < m->ranks.size; place++) {
                counts[place] += model_ep_chunks_(m, i, slice, k, place);
            }
        }
    }
}

// adds the sums of row i's chunks, layer by layer and in each of one rank of the group after the other; next: where
// those of each rank go on
static inline double model_add_ep_(const Model* m, double sum, const double** next, int i) {
    const Tensor* t = &m->table[i];
    const int slice = tensors_slices(m->table, i);
    for (int k = 0; k < tensor_slices(t); k += tensor_layer_slices(t)) {
        for (int place = 0; place < m->ranks.size; place++) {
            for (size_t n = model_ep_chunks_(m, i, slice, k, place); n > 0; n--) { sum += *next[place]++; }
        }
    }
    return sum;
}

// the sums of all chunks in the order of the whole table. squares: those of what every rank has; all: of experts,
// one rank after the other
static inline double model_add_squares_(const Model* m, const double* squares, const double* all,
                                        const size_t* counts) {
    const double** next = (const double**)malloc_check(sizeof *next * (size_t)m->ranks.size, "chunk sums");
    double sum = 0.0;
    for (int place = 0; place < m->ranks.size; place++) {
        next[place] = all;
        all += counts[place];
    }
    int64_t chunk = 0;
    for (int i = 0, j = 0; i < m->n_table; i++) {
        if (m->table[i].experts > 0) { sum = model_add_ep_(m, sum, next, i); }
        for (; j < m->dp.n_stretches && m->dp.stretches[j].tensor == i; j++) {
            for (; chunk < m->dp.stretches[j].end; chunk++) { sum += squares[chunk]; }
        }
    }
    free(next);
    return sum;
}

static inline float model_norm(Model* m, const float* grads, const Device* dev) {
    if (!model_has_ep(m)) { return dp_norm(&m->dp, grads, dev); }
    const double* squares = dp_squares(&m->dp, grads, dev);
    const double* own = dp_squares(&m->dp_experts, model_expert_gradients_(m), dev);
    size_t *counts = (size_t*)malloc_check(sizeof(size_t) * (size_t)m->ranks.size, "chunk sums"), n = 0, first = 0;
    model_count_ep_(m, counts);
    for (int place = 0; place < m->ranks.size; place++) {
        first += place < m->ranks.place ? counts[place] : 0;
        n += counts[place];
    }
    double* all = (double*)malloc_check(sizeof(double) * n, "chunk sums");
    assert(counts[m->ranks.place] == (size_t)dp_chunks(&m->dp_experts));
    memcpy(all + first, own, sizeof(double) * counts[m->ranks.place]);
    comm_wait(m->ranks.group, comm_all_gather_v(m->ranks.group, all, counts, DT_F64, HERE));
    const double sum = model_add_squares_(m, squares, all, counts);
    free(all);
    free(counts);
    return (float)sqrt(sum);
}

static inline void model_update(Model* m, const float* grads, float norm, const Optimizer* o, int t,
                                const Device* dev) {
    dp_update(&m->dp, &m->w, grads, norm, o, t, dev);
    if (model_has_ep(m)) { dp_update(&m->dp_experts, &m->w, model_expert_gradients_(m), norm, o, t, dev); }
}

static inline void model_average_now(Model* m, float weight, const Device* dev) {
    dp_average(&m->dp, &m->w, m->average, weight, dev);
    if (model_has_ep(m)) { dp_average(&m->dp_experts, &m->w, m->average, weight, dev); }
}

static inline void model_exchange_average(Model* m, int back, int t, const Device* dev) {
    dp_exchange_average(&m->dp, &m->w, m->average, back, t, dev);
    if (model_has_ep(m)) { dp_exchange_average(&m->dp_experts, &m->w, m->average, back, t, dev); }
}

// dp: whose gradients `grads` are, the model's or those of a second loss
static inline const char* model_first_bad(Model* m, DataParallel* dp, char* name, size_t n_bytes,
                                          const float* grads, const Device* dev) {
    const char* bad = dp_first_bad(dp, name, n_bytes, grads, dev);
    if (dp != &m->dp || !model_has_ep(m) || strcmp(bad, "none") != 0) { return bad; }
    bad = dp_first_bad(&m->dp_experts, name, n_bytes, model_expert_gradients_(m), dev);
    const int n_ranks = m->ranks.group->size, is_bad = strcmp(bad, "none") != 0;
    int first = is_bad ? m->ranks.place : n_ranks;  // of the group
    comm_all_reduce(m->ranks.group, &first, 1, DT_I32, OP_MIN, HERE);
    if (first == n_ranks) { return bad; }
    comm_wait(m->ranks.group, comm_broadcast(m->ranks.group, name, n_bytes, DT_U8, first, HERE));
    return name;
}
#endif  // LLMC_MODEL_GRADIENTS_H
