/*
Gradients of a model and what an update makes of them: the calls of data_parallel.h, once for what every rank has and
once for experts, with --ep; with --pp of the stages together. Without these each is that call and nothing else.
    model_point_gradients   the fields of a struct of pointers point to where backward writes the gradients of a layer
    model_gradient_of       one of them; model_vector_gradient: that of a field at a layer
    model_layer_done, model_leaf_done   told by backward
    model_receive_shared, model_send_shared   with --pp, of a row that the first and the last stage share: the head's
                            gradient goes to the first stage, whose embedding adds its own
    model_reduce            sums over all leaves; the arena of what every rank has comes back
    model_norm, model_update
    model_stage_bytes       what --pp sends
    model_average_now, model_exchange_average   of the parameters over updates (ema.h)
    model_first_bad         for messages: what is not finite
    model_gradient_bytes    what a rank sends because of gradients
*/
#ifndef LLMC_MODEL_GRADIENTS_H
#define LLMC_MODEL_GRADIENTS_H
#include "model.h"          // Model, model_has_ep, model_has_pp
#include "pipeline_link.h"  // pp_tell

// of the last stage: where the head's gradient of micro-batch k, counted from the first of this rank, is to be written
static inline float* model_shared_room_(const Model* m, int k) {
    return m->shared_grads + tensor_elements(&m->held[m->shared]) * (size_t)(k % m->pp.tie_rooms);
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

static inline float* model_vector_gradient(Model* m, size_t field, int layer) {
    return model_gradient_of(m, model_row(m, field, layer), layer);
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
    comm_wait_device(tie, rank_pair_exchange(tie, send, recv, n_bytes, dev), dev);
}

// on the first stage, once a leaf has come down to the embedding: what the head has written there
static inline void model_receive_shared(Model* m, const Device* dev) {
    if (!model_receives_shared(m)) { return; }
    const size_t n_bytes = sizeof(float) * tensor_elements(&m->held[m->shared]);
    model_go_around_(m, NULL, dp_gradient_of(&m->dp, m->shared, 0), n_bytes, dev);
}

// on the last stage, when the first one asks for what the head has written of micro-batch k (PP_TIE)
static inline void model_send_shared(const Model* m, int k, const Device* dev) {
    if (!model_sends_shared(m)) { return; }
    const size_t n_bytes = sizeof(float) * tensor_elements(&m->held[m->shared]);
    model_go_around_(m, model_shared_room_(m, k), NULL, n_bytes, dev);
}

// after an update the last stage gets what the first has made of it
static inline void model_refresh_shared_(Model* m, const Device* dev) {
    const Tensor* t = model_has_pp(m) && m->shared >= 0 ? &m->held[m->shared] : NULL;
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

// What a rank sends in an update because there are stages, in bytes. stream: of a micro-batch. Of a planned model
static inline double model_stage_bytes(const Model* m, double stream) {
    const PpRanks* x = &m->pp;
    if (!model_has_pp(m)) { return 0.0; }
    const double n_leaves = dp_n_leaves(&m->dp), others = x->size - 1;
    const double numbers = sizeof(float) * (double)m->n_numbers;
    double n = pp_has_last(x) ? others * (sizeof(float) + numbers) : 0.0;
    for (int s = x->place; s < x->n_stages; s += x->size) {
        n += (s + 1 < x->n_stages) * n_leaves * (stream + numbers);
        n += (s > 0 && m->lowest < x->begin[s]) * n_leaves * (stream + numbers);
    }
    n += pp_has_first(x) ? n_leaves * x->row_bytes[0] : pp_has_last(x) ? n_leaves * x->row_bytes[1] : 0.0;
    if (model_sends_shared(m)) { n += n_leaves * sizeof(float) * (double)tensor_elements(&m->held[m->shared]); }
    if (model_receives_shared(m)) {
        n += (double)m->held[m->shared].stored_bytes * (double)tensor_elements(&m->held[m->shared]);
    }
    return n;
}

// all ranks; NULL: alone
static inline Comm* model_world_(const Model* m) { return m->world ? m->world : m->dp.comm; }

// what a rank sends in an update of gradients, sums and new parameters, in bytes
static inline double model_gradient_bytes(const Model* m) {
    return dp_bytes(&m->dp) + (model_has_ep(m) ? dp_bytes(&m->dp_experts) : 0.0) + dp_norm_bytes(model_world_(m));
}

// Euclidean norm over the gradients of all that learns, whoever has them
static inline float model_norm(Model* m, const float* grads, const Device* dev) {
    const DpGradients of[2] = {{&m->dp, grads}, {&m->dp_experts, model_has_ep(m) ? model_expert_gradients_(m) : NULL}};
    return dp_norms(model_world_(m), of, model_has_ep(m) ? 2 : 1, dev);
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
        expert = model_share_bad_(m->ranks.ep.group, room, n_bytes, expert);
        if (strcmp(bad, "none") == 0 && strcmp(expert, "none") != 0) {
            snprintf(name, n_bytes, "%s", expert);
            bad = name;
        }
        free(room);
    }
    if (model_has_tp(m)) { bad = model_share_bad_(m->tp.group, name, n_bytes, bad); }
    return model_has_pp(m) ? model_share_bad_(m->pp.line, name, n_bytes, bad) : bad;
}
#endif  // LLMC_MODEL_GRADIENTS_H
