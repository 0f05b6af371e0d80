/*
Gradients of a model and what an update makes of them: the calls of data_parallel.h, once for what every rank has and
once for experts, with --ep; with --pp of the stages together. Without these each is that call and nothing else.
    model_point_gradients   the fields of a struct of pointers point to where backward writes the gradients of a layer
    model_gradient_of       one of them
    model_layer_done, model_leaf_done   told by backward
    model_receive_shared, model_send_shared   with --pp, of a row that the first and the last stage share: the head's
                            gradient goes to the first stage, whose embedding adds its own
    model_reduce            sums over all leaves; the arena of what every rank has comes back
    model_norm, model_update
    model_stage_bytes       what --pp sends
    model_average_now, model_exchange_average   of the parameters over updates (ema.h)
    model_first_bad         for messages: what is not finite
Order:  the norm adds the sums of chunks in the order of the whole table, whoever has them. Chunks of experts
        must be those of a rank that has all: so a matrix of an expert has a multiple of NORM_CHUNK elements. Stages
        may meet inside a chunk: its elements then come together, and every rank sums them.
*/
#ifndef LLMC_MODEL_GRADIENTS_H
#define LLMC_MODEL_GRADIENTS_H
#include "model.h"          // Model, model_has_ep, model_has_pp
#include "pipeline_link.h"  // pp_tell

// of the last stage: where the head's gradient of micro-batch k, counted from the first of this rank, is to be written
static inline float* model_shared_room_(const Model* m, int k) {
    return m->shared_grads + tensor_elements(&m->table[m->shared]) * (size_t)(k % model_shared_rooms(m));
}

// as dp_point; of experts that ranks share, the gradients of all leaves that their group computes now; on
// the last stage of the row that it shares with the first, the head's share
static inline void model_point_gradients(Model* m, void* pointers, int layer) {
    dp_point(&m->dp, pointers, layer);
    if (model_has_ep(m)) { dp_point_learning(&m->dp_experts, pointers, layer); }
    if (model_sends_shared(m)) {
        tensor_set_field_(pointers, &m->table[m->shared], model_shared_room_(m, m->dp.tree.next - m->dp.tree.first));
    }
}

// the same of row i alone; NULL: it does not learn
static inline float* model_gradient_of(Model* m, int i, int layer) {
    if (i >= 0 && i == m->shared && model_sends_shared(m)) {
        return model_shared_room_(m, m->dp.tree.next - m->dp.tree.first);
    }
    return dp_gradient_of(model_dp(m, i), i, layer);
}

static inline void model_layer_done(Model* m, int layer, const Device* dev) {
    dp_layer_done(&m->dp, layer, dev);
    if (model_has_ep(m)) { dp_layer_done(&m->dp_experts, layer, dev); }
}

static inline void model_leaf_done(Model* m, const Device* dev) {
    dp_leaf_done(&m->dp, dev);
    if (model_has_ep(m)) { dp_leaf_done(&m->dp_experts, dev); }
}

// ---- a row that the first and the last stage share ----

// what goes around: from the last stage to the first, or back. The host waits
static inline void model_go_around_(const Model* m, const void* send, void* recv, size_t n_bytes, const Device* dev) {
    Comm* tie = m->pp.tie;
    comm_wait_device(tie, pp_exchange(tie, send, recv, n_bytes, dev), dev);
}

// on the first stage, once a leaf has come down to the embedding: what the head has written there
static inline void model_receive_shared(Model* m, const Device* dev) {
    if (!model_receives_shared(m)) { return; }
    const size_t n_bytes = sizeof(float) * tensor_elements(&m->table[m->shared]);
    model_go_around_(m, NULL, dp_gradient_of(&m->dp, m->shared, 0), n_bytes, dev);
}

// On the last stage, of whose micro-batches n are computed: those for which the first one now waits, or with `all` the
// rest of the update
static inline void model_send_shared(Model* m, int n, int all, const Device* dev) {
    const int end = all ? n : n - model_shared_delay(m);
    if (!model_sends_shared(m)) { return; }
    for (; m->n_shared_sent < end; m->n_shared_sent++) {
        const size_t n_bytes = sizeof(float) * tensor_elements(&m->table[m->shared]);
        model_go_around_(m, model_shared_room_(m, m->n_shared_sent), NULL, n_bytes, dev);
    }
    if (all) { m->n_shared_sent = 0; }
}

// after an update the last stage gets what the first has made of it
static inline void model_refresh_shared_(Model* m, const Device* dev) {
    const Tensor* t = model_has_pp(m) && m->shared >= 0 ? &m->table[m->shared] : NULL;
    const int receives = model_sends_shared(m);
    if (!receives && !model_receives_shared(m)) { return; }
    void* stored = (char*)m->w.stored + t->stored_at;
    model_go_around_(m, receives ? NULL : stored, receives ? stored : NULL, t->stored_bytes * tensor_elements(t), dev);
}

// the arena that dp_reduce has returned
static inline const float* model_expert_gradients_(const Model* m) { return m->dp_experts.tree.arena[0]; }

// of stages the last one has the loss, and what the layers of all have counted
static inline float* model_reduce(Model* m, float* loss, const Device* dev) {
    float none;
    if (model_has_ep(m)) { dp_reduce(&m->dp_experts, &none, dev); }
    float* grads = dp_reduce(&m->dp, loss, dev);
    if (model_has_pp(m)) {
        pp_tell(&m->pp, m->dp.sums, (size_t)m->dp.n_numbers);
        *loss = m->dp.sums[0];
    }
    return grads;
}

// Row i has experts, slice k is the first of a layer: chunks of those of its experts that the rank at `place`
// has, 0 where none of them learns. slice: the row's first in table order
static inline size_t model_ep_chunks_(const Model* m, int i, int slice, int k, int place) {
    const Tensor* held = &m->held[i];
    const int n = tensor_layer_slices(held), learns = slices_learn(m->frozen, slice + k + place * n, n);
    return learns && model_is_of_stage(m, i, k) ? tensor_layer_elements(held) / NORM_CHUNK : 0;
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

// The sums of row i's chunks go to `to`, layer by layer and in each of one rank of the group after the other: those of
// a layer in which anything learns, 0 of experts that do not. next: where those of each rank go on. Returns the end
static inline double* model_put_ep_(const Model* m, double* to, const double** next, int i) {
    const Tensor* t = &m->table[i];
    const int slice = tensors_slices(m->table, i), each = tensor_layer_slices(t);
    const size_t n_each = tensor_layer_elements(&m->held[i]) / NORM_CHUNK;
    for (int k = 0; k < tensor_slices(t); k += each) {
        if (!slices_learn(m->frozen, slice + k, each) || !model_is_of_stage(m, i, k)) { continue; }
        for (int place = 0; place < m->ranks.size; place++, to += n_each) {
            const size_t n = model_ep_chunks_(m, i, slice, k, place);
            memset(to, 0, sizeof(double) * n_each);
            memcpy(to, next[place], sizeof(double) * n);
            next[place] += n;
        }
    }
    return to;
}

// The sums of all chunks of this stage in the order of the whole table, n of them, on the heap. squares: those of what
// every rank has; all: of experts, one rank after the other
static inline double* model_merge_squares_(const Model* m, const double* squares, const double* all,
                                           const size_t* counts, int64_t* n) {
    const double** next = (const double**)malloc_check(sizeof *next * (size_t)m->ranks.size, "chunk sums");
    size_t most = (size_t)dp_chunks(&m->dp);
    for (int i = 0; i < m->n_table; i++) {
        most += m->table[i].experts > 0 ? tensor_elements(&m->table[i]) / NORM_CHUNK : 0;
    }
    double *merged = (double*)malloc_check(sizeof(double) * most, "chunk sums"), *to = merged;
    for (int place = 0; place < m->ranks.size; place++) {
        next[place] = all;
        all += counts[place];
    }
    int64_t chunk = 0;
    for (int i = 0, j = 0; i < m->n_table; i++) {
        if (m->table[i].experts > 0) { to = model_put_ep_(m, to, next, i); }
        for (; j < m->dp.n_stretches && m->dp.stretches[j].tensor == i; j++) {
            for (; chunk < m->dp.stretches[j].end; chunk++) { *to++ = squares[chunk]; }
        }
    }
    free(next);
    *n = to - merged;
    return merged;
}

// the same, from gradients; all ranks call
static inline double* model_squares_(Model* m, const float* grads, int64_t* n, const Device* dev) {
    const double* squares = dp_squares(&m->dp, grads, dev);
    if (!model_has_ep(m)) {
        *n = dp_chunks(&m->dp);
        const size_t n_bytes = sizeof(double) * (size_t)*n;
        return (double*)memcpy(malloc_check(n_bytes, "chunk sums"), squares, n_bytes);
    }
    const double* own = dp_squares(&m->dp_experts, model_expert_gradients_(m), dev);
    size_t *counts = (size_t*)malloc_check(sizeof(size_t) * (size_t)m->ranks.size, "chunk sums"), sum = 0, first = 0;
    model_count_ep_(m, counts);
    for (int place = 0; place < m->ranks.size; place++) {
        first += place < m->ranks.place ? counts[place] : 0;
        sum += counts[place];
    }
    double* all = (double*)malloc_check(sizeof(double) * sum, "chunk sums");
    assert(counts[m->ranks.place] == (size_t)dp_chunks(&m->dp_experts));
    memcpy(all + first, own, sizeof(double) * counts[m->ranks.place]);
    comm_wait(m->ranks.group, comm_all_gather_v(m->ranks.group, all, counts, DT_F64, HERE));
    double* merged = model_merge_squares_(m, squares, all, counts, n);
    free(all);
    free(counts);
    return merged;
}

// ---- of stages ----

// a chunk of row `row` in which two stages or more meet
typedef struct {
    int row;
    int64_t chunk;
} ModelSeam;

// seams: room for as many as rows times stages; returns how many, in table order
static inline int model_seams_(const Model* m, ModelSeam* seams) {
    int n = 0;
    for (int i = 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        for (int s = 1; t->layers > 0 && s < m->pp.n_stages; s++) {
            const size_t at = (size_t)tensor_layers_below(t, m->pp.begin[s]) * tensor_layer_elements(t);
            const ModelSeam seam = {i, (int64_t)(at / NORM_CHUNK)};
            const int is_known = n > 0 && seams[n - 1].row == i && seams[n - 1].chunk == seam.chunk;
            if (at % NORM_CHUNK != 0 && at < tensor_elements(t) && !is_known) { seams[n++] = seam; }
        }
    }
    return n;
}

// the elements of a seam that this rank owns; the rest of x (NORM_CHUNK), on the host, is 0
static inline void model_seam_elements_(const Model* m, float* x, ModelSeam seam, const float* grads,
                                        const Device* dev) {
    const DataParallel* dp = &m->dp;
    const size_t begin = (size_t)seam.chunk * NORM_CHUNK;
    memset(x, 0, sizeof(float) * NORM_CHUNK);
    for (int j = 0; j < dp->n_stretches; j++) {
        const Part part = part_within(dp_part(dp, dp->rank, j), begin, begin + NORM_CHUNK);
        if (dp->stretches[j].tensor != seam.row || part.n == 0) { continue; }
        device_download(x + (part.first - begin), grads + part_at(dp->reduced[j], part.first), sizeof(float) * part.n,
                        dev);
    }
}

// sums (n) of the seams; all ranks call
static inline void model_seam_sums_(Model* m, double* sums, const ModelSeam* seams, int n, const float* grads,
                                    const Device* dev) {
    float* all = (float*)malloc_check(sizeof(float) * NORM_CHUNK * (size_t)n, "chunks of two stages");
    for (int j = 0; j < n; j++) { model_seam_elements_(m, all + (size_t)j * NORM_CHUNK, seams[j], grads, dev); }
    // one rank has a number, the others 0
    comm_all_reduce(m->pp.world, all, (size_t)n * NORM_CHUNK, DT_F32, OP_SUM, HERE);
    for (int j = 0; j < n; j++) {
        device_upload(m->dp.edge, all + (size_t)j * NORM_CHUNK, sizeof(float) * NORM_CHUNK, dev);
        norm_chunk_sums(m->seam_sum, m->dp.edge, NORM_CHUNK, dev);
        device_download(&sums[j], m->seam_sum, sizeof(double), dev);
    }
    free(all);
}

// The sums of all chunks in the order of the whole table. next (stages): those of each stage, as dp_squares has them;
// it is moved on
static inline double model_add_stages_(const Model* m, const double** next, const ModelSeam* seam, const double* sums,
                                       int n_seams) {
    int64_t counted[PP_MAX];  // the last chunk of this row that a stage has
    double sum = 0.0;
    int j = 0;
    for (int i = 0, slice = 0; i < m->n_table; slice += tensor_slices(&m->table[i++])) {
        const Tensor* t = &m->table[i];
        const int n_slices = tensor_slices(t), each = tensor_layer_slices(t);
        int64_t added = -1;
        memset(counted, -1, sizeof counted);
        for (int k = 0; k < n_slices; k += each) {
            const int stage = model_stage_of(m, i, k);
            const size_t begin = tensor_slice_elements(t) * (size_t)k, end = begin + tensor_layer_elements(t);
            if (!slices_learn(m->frozen, slice + k, each)) { continue; }
            for (int64_t c = (int64_t)(begin / NORM_CHUNK); c <= (int64_t)((end - 1) / NORM_CHUNK); c++) {
                double value = c != counted[stage] ? *next[stage]++ : 0.0;
                counted[stage] = c;
                if (c == added) { continue; }
                added = c;
                while (j < n_seams && (seam[j].row < i || (seam[j].row == i && seam[j].chunk < c))) { j++; }
                if (j < n_seams && seam[j].row == i && seam[j].chunk == c) { value = sums[j]; }
                sum += value;
            }
        }
    }
    return sum;
}

// of the sums of the own stage
static inline double model_norm_of_stages_(Model* m, const double* own, int64_t n_own, const float* grads,
                                           const Device* dev) {
    const PpRanks* x = &m->pp;
    const double* next[PP_MAX];
    const size_t most = (size_t)m->n_table * (size_t)x->n_stages;
    ModelSeam* seams = (ModelSeam*)malloc_check(sizeof(ModelSeam) * most, "chunks of two stages");
    double* sums = (double*)malloc_check(sizeof(double) * most, "chunks of two stages");
    const int n_seams = model_seams_(m, seams);
    model_seam_sums_(m, sums, seams, n_seams, grads, dev);
    int64_t n_of[PP_MAX];
    size_t counts[PP_MAX], first = 0, n = 0;
    comm_wait(x->line, comm_all_gather(x->line, &n_own, n_of, 1, DT_I64, HERE));
    for (int s = 0; s < x->n_stages; s++) {
        counts[s] = (size_t)n_of[s];
        first += s < x->stage ? counts[s] : 0;
        n += counts[s];
    }
    double* all = (double*)malloc_check(sizeof(double) * n, "chunk sums");
    memcpy(all + first, own, sizeof(double) * counts[x->stage]);
    comm_wait(x->line, comm_all_gather_v(x->line, all, counts, DT_F64, HERE));
    for (size_t s = 0, at = 0; s < (size_t)x->n_stages; at += counts[s++]) { next[s] = all + at; }
    const double sum = model_add_stages_(m, next, seams, sums, n_seams);
    free(all);
    free(sums);
    free(seams);
    return sum;
}

// What a rank sends in an update because there are stages, in bytes. stream: of a micro-batch. Of a planned model
static inline double model_stage_bytes(const Model* m, double stream) {
    const PpRanks* x = &m->pp;
    if (!model_has_pp(m)) { return 0.0; }
    const double n_leaves = dp_n_leaves(&m->dp), others = x->n_stages - 1;
    const double numbers = sizeof(float) * (double)m->n_numbers;
    const size_t most = (size_t)m->n_table * (size_t)x->n_stages;
    ModelSeam* seams = (ModelSeam*)malloc_check(sizeof(ModelSeam) * most, "chunks of two stages");
    const double in_seams = (double)sizeof(float) * (double)NORM_CHUNK * model_seams_(m, seams), all = x->world->size;
    free(seams);
    double n = 8.0 * others * (1.0 + (double)dp_chunks(&m->dp));
    n += in_seams * 2.0 * (all - 1.0) / all;
    if (!pp_is_last(x)) { n += n_leaves * (stream + numbers); } else { n += others * (sizeof(float) + numbers); }
    if (!pp_is_first(x) && m->lowest < pp_first_layer(x)) { n += n_leaves * (stream + numbers); }
    if (model_sends_shared(m)) { n += n_leaves * sizeof(float) * (double)tensor_elements(&m->table[m->shared]); }
    if (model_receives_shared(m)) {
        n += (double)m->table[m->shared].stored_bytes * (double)tensor_elements(&m->table[m->shared]);
    }
    return n;
}

static inline float model_norm(Model* m, const float* grads, const Device* dev) {
    if (!model_is_divided(m)) { return dp_norm(&m->dp, grads, dev); }
    int64_t n;
    double sum = 0.0, *squares = model_squares_(m, grads, &n, dev);
    if (model_has_pp(m)) { sum = model_norm_of_stages_(m, squares, n, grads, dev); }
    else { for (int64_t chunk = 0; chunk < n; chunk++) { sum += squares[chunk]; } }
    free(squares);
    return (float)sqrt(sum);
}

static inline void model_update(Model* m, const float* grads, float norm, const Optimizer* o, int t,
                                const Device* dev) {
    dp_update(&m->dp, &m->w, grads, norm, o, t, dev);
    model_refresh_shared_(m, dev);
    if (model_has_ep(m)) { dp_update(&m->dp_experts, &m->w, model_expert_gradients_(m), norm, o, t, dev); }
}

static inline void model_average_now(Model* m, float weight, const Device* dev) {
    dp_average(&m->dp, &m->w, m->average, weight, dev);
    if (model_has_ep(m)) { dp_average(&m->dp_experts, &m->w, m->average, weight, dev); }
}

static inline void model_exchange_average(Model* m, int back, int t, const Device* dev) {
    dp_exchange_average(&m->dp, &m->w, m->average, back, t, dev);
    model_refresh_shared_(m, dev);
    if (model_has_ep(m)) { dp_exchange_average(&m->dp_experts, &m->w, m->average, back, t, dev); }
}

// the lowest rank of the group that has found something tells the others; all call
static inline const char* model_share_bad_(Comm* group, char* name, size_t n_bytes, const char* bad) {
    int first = strcmp(bad, "none") != 0 ? group->rank : group->size;
    comm_all_reduce(group, &first, 1, DT_I32, OP_MIN, HERE);
    if (first == group->size) { return bad; }
    comm_wait(group, comm_broadcast(group, name, n_bytes, DT_U8, first, HERE));
    return name;
}

// dp: whose gradients `grads` are, the model's or those of a second loss
static inline const char* model_first_bad(Model* m, DataParallel* dp, char* name, size_t n_bytes,
                                          const float* grads, const Device* dev) {
    const char* bad = dp_first_bad(dp, name, n_bytes, grads, dev);
    if (dp == &m->dp && model_has_ep(m)) {
        char* room = (char*)malloc_check(n_bytes, "a name");
        const char* expert = dp_first_bad(&m->dp_experts, room, n_bytes, model_expert_gradients_(m), dev);
        expert = model_share_bad_(m->ranks.group, room, n_bytes, expert);
        if (strcmp(bad, "none") == 0 && strcmp(expert, "none") != 0) {
            snprintf(name, n_bytes, "%s", expert);
            bad = name;
        }
        free(room);
    }
    return model_has_pp(m) ? model_share_bad_(m->pp.line, name, n_bytes, bad) : bad;
}
#endif  // LLMC_MODEL_GRADIENTS_H
