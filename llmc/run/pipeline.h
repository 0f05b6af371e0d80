/*
--pp of a trainer whose passes can be cut between two layers (Trainer.turn and what follows it): what the option asks
for, and the micro-batches of an update on their way through the stages.
    pp_option    its row of the table
    pp_begin     in Trainer.choose, once the model has its layout and before --ep divides experts: which ranks have
                 which layers
    pp_slots     micro-batches whose forward pass is over before the backward pass of the first
    pp_leaves    the micro-batches of this rank in the order of 1F1B (pipeline_schedule.h)
    pp_box       rows of the box
A rank swaps streams and gradients with its neighbours. With the stage behind: until the first gradient comes it sends
one stream after the other, as many as there are stages behind it; then each stream that it sends is one swap with the
gradient that comes, and at the end gradients come alone. So the stage behind receives its next stream when it has sent
a gradient: a slot is free then, and no rank waits for one that waits for it. Of three stages and four micro-batches,
the first: send 0, send 1, send 2 for the gradient of 0, send 3 for that of 1, receive that of 2, of 3.
*/
#ifndef LLMC_PIPELINE_H
#define LLMC_PIPELINE_H
#include "../ranks/pipeline_link.h"      // PpStreams, pp_swap
#include "../ranks/pipeline_schedule.h"  // pp_order, pp_warmup
#include "trainer.h"                     // Run, run_is_typed

// ---- the option ----

static inline Option pp_option(int* size) {
    const Option row = {"machine", "pp", "", OPTION_INT, size, "1", 1, PP_MAX, "P",
                        "cut the layers into P stages, each on ranks of its own, through which micro-batches go one "
                        "after the other: needs a multiple of P ranks, and --grad-accum of a few times the ranks to "
                        "keep them busy. The result does not depend on it", 0};
    return row;
}

// multiplications of a position with the matrices of each layer: cost (layers). active: the share of experts that a
// position takes
static inline void pp_costs_(double* cost, const Model* m, double active) {
    const int L = tensors_layers(m->table, m->n_table);
    for (int l = 0; l < L; l++) { cost[l] = 0.0; }
    for (int i = 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        for (int l = 0; l < t->layers; l++) {
            if (t->on_disk == VECTOR || !tensor_has_layer(t, l)) { continue; }
            cost[l] += (double)tensor_layer_elements(t) * (t->experts > 0 ? active : 1.0);
        }
    }
}

// of the multiplications of all stages those of this one; cost, head: as in pp_cut
static inline double pp_work_of_(const PpRanks* x, const double* cost, double head) {
    double own = pp_is_last(x) ? head : 0.0, all = head;
    for (int l = 0; l < x->begin[x->n_stages]; l++) {
        all += cost[l];
        own += l >= pp_first_layer(x) && l < pp_end_layer(x) ? cost[l] : 0.0;
    }
    return own / all;
}

// V, C: of the output matrix, C channels. active: the share of experts that a position takes. shared: the field of the
// embedding where that is the output matrix, else TENSOR_NO_FIELD. A number that was not typed but comes from an
// earlier run is given up where it does not fit
static inline void pp_begin(Run* r, int* size, int V, int C, double active, size_t shared) {
    Model* m = r->model;
    const int P = r->comm->size, L = tensors_layers(m->table, m->n_table), is_typed = run_is_typed(r, "pp");
    const int is_alone = run_is_generating(r) || *r->o.probe, was = *size;
    const int fits = P % *size == 0 && *size <= L && !is_alone;
    if (!is_typed && (!fits || r->o.verify_every > 0 || r->o.noise_scale > 0)) { *size = 1; }
    if (*size < was && P > 1 && r->comm->rank == 0) {
        warn_line("--pp %d, with which the run began, does not fit: %d ranks, each with all layers now", was, P);
    }
    options_refuse(is_alone && *size > 1, "pp", "is for training and --eval-only: all else is one rank's work");
    ranks_same(r->comm, "number of stages (--pp)", (uint64_t)*size);
    if (P % *size != 0) {
        options_fail("pp", P == 1 ? "%d: expected as many ranks or a multiple, found %d: start with launch -n %d"
                                  : "%d: expected a number that divides the ranks, %d", *size, P, *size);
    }
    if (*size > L) { options_fail("pp", "%d: expected at most one stage for each of the %d layers", *size, L); }
    if (*size == 1) { return; }
    options_refuse(r->o.verify_every > 0, "verify-every", "is not for --pp");
    options_refuse(r->o.noise_scale > 0, "noise-scale", "is not for --pp");
    const int collects = model_is_adapter(m) || !run_will_train(r);
    options_refuse(collects && *r->o.export_hf, "export-hf", "is for --pp where a model is trained, and not an adapter"
                   ": export the checkpoint, by one process");
    double* cost = (double*)malloc_check(sizeof(double) * (size_t)L, "layers");
    int begin[PP_MAX + 1];
    pp_costs_(cost, m, active);
    pp_cut(begin, *size, cost, L, (double)V * C);
    model_begin_pp(m, r->comm, *size, begin, shared, C);
    m->pp.work = pp_work_of_(&m->pp, cost, (double)V * C);
    free(cost);
}

// among which the micro-batches of an update are dealt out
static inline int pp_lines(const Run* r) { return model_dealing(r->model, r->comm)->size; }

// the stages, and m micro-batches that go through them
static inline PpShape pp_shape_of_(const Run* r, int m) {
    const PpShape s = {r->model->pp.n_stages, 1, m};
    return s;
}

// of the line that has most of them
static inline PpShape pp_shape(const Run* r) { return pp_shape_of_(r, (int)ceil_div(r->n_leaves, pp_lines(r))); }

static inline int pp_slots(const Run* r) {
    const PpShape s = pp_shape(r);
    const int held = pp_warmup(&s, r->model->pp.stage) + 1;
    return !model_has_pp(r->model) || r->n_leaves == 0 ? 1 : held < s.m ? held : s.m;
}

// bytes of the stream of a micro-batch
static inline double pp_stream_bytes(const Run* r) {
    return (double)run_positions(r) * r->model->pp.channels * (double)r->trainer->stored_bytes;
}

static inline void pp_box(const Run* r) {
    const PpRanks* x = &r->model->pp;
    char text[1024] = "";
    if (!model_has_pp(r->model)) { return; }
    for (int s = 0; s < x->n_stages && strlen(text) < sizeof text - 32; s++) {
        const size_t n = strlen(text);
        const int first = x->begin[s], last = x->begin[s + 1] - 1;
        if (first == last) { snprintf(text + n, sizeof text - n, "%s%d", s > 0 ? ", " : "", first); }
        else { snprintf(text + n, sizeof text - n, "%s%d-%d", s > 0 ? ", " : "", first, last); }
    }
    box_row("stages", "%d: layers %s", x->n_stages, text);
    if (!run_is_training(r)) { return; }
    const PpShape s = pp_shape(r);
    const int n_lines = pp_lines(r);
    const char *most = r->n_leaves % n_lines > 0 ? "up to " : "", *es = s.m > 1 ? "es" : "";
    if (n_lines == 1) { box_row("  idle", "%.0f%% of an update of %d micro-batch%s", 100.0 * pp_idle(&s), s.m, es); }
    else {
        box_row("  idle", "%.0f%% of an update of %s%d micro-batch%s in each of %d lines", 100.0 * pp_idle(&s), most,
                s.m, es, n_lines);
    }
}

// ---- the micro-batches of an update ----

typedef struct {
    Run* r;
    const PpRanks* x;
    PpShape shape;
    int warmup_previous, warmup;  // streams that the stage before, and this one, sends until the first gradient comes
    PpSwap with_previous, with_next;  // the last swap with each neighbour
    int returns, comes;         // does a gradient go to the stage before? Does one come from behind?
    const int *inputs[PP_MAX], *targets[PP_MAX];  // of each slot
} PpWork;

// the streams of micro-batch k, whose turn it is from now on
static inline PpStreams pp_turn_(const PpWork* w, int k) {
    w->r->trainer->turn(w->r, k % pp_slots(w->r));
    return w->r->trainer->streams(w->r, run_positions(w->r));
}

// With the stage behind: a stream goes there, or a gradient comes; where it comes to is free once the last one has gone
static inline void pp_swap_next_(PpWork* w, const PpStreams* e, int sends, int receives) {
    const int comes = receives && w->comes;
    if (receives) { pp_wait(&w->with_previous, e, &w->r->dev); }
    w->with_next = pp_swap(w->x->next, sends ? e->out : NULL, sends ? e->numbers : NULL, comes ? e->gradient : NULL,
                           comes ? e->returned : NULL, e, &w->r->dev);
}

// with the stage before: a gradient goes there, or a stream comes
static inline void pp_swap_previous_(PpWork* w, const PpStreams* e, int sends, int receives) {
    const int returns = sends && w->returns;
    w->with_previous = pp_swap(w->x->previous, returns ? e->gradient : NULL, returns ? e->returned : NULL,
                               receives ? e->in : NULL, receives ? e->numbers : NULL, e, &w->r->dev);
}

static inline void pp_forward_(PpWork* w, int k) {
    Run* r = w->r;
    const int slot = k % pp_slots(r);
    const PpStreams e = pp_turn_(w, k);
    if (!pp_is_first(w->x)) {
        if (k < w->warmup_previous) { pp_swap_previous_(w, &e, 0, 1); }
        pp_wait(&w->with_previous, &e, &r->dev);
    }
    r->trainer->forward_leaf(r, k, w->inputs[slot], w->targets[slot], r->o.batch_size, r->T);
    if (!pp_is_last(w->x)) { pp_swap_next_(w, &e, 1, k >= w->warmup); }
}

static inline void pp_backward_(PpWork* w, int k, float dloss) {
    Run* r = w->r;
    const int slot = k % pp_slots(r), m = w->shape.m;
    const int goes_on = k + w->warmup_previous < m;  // this slot becomes that of the micro-batch then
    const PpStreams e = pp_turn_(w, k);
    if (!pp_is_last(w->x)) {
        if (k + w->warmup >= m) { pp_swap_next_(w, &e, 0, 1); }  // no stream goes with it any more
        pp_wait(&w->with_next, &e, &r->dev);
    }
    r->trainer->backward_leaf(r, k, w->inputs[slot], w->targets[slot], dloss, r->o.batch_size, r->T);
    if (pp_is_first(w->x)) { return; }
    pp_swap_previous_(w, &e, 1, goes_on);
    if (pp_is_last(w->x)) { model_send_shared(r->model, k + 1, k + 1 == m, &r->dev); }
}

// batch: gives micro-batch k, which stays until as many others were given as there are slots
static inline void pp_leaves(Run* r, float dloss,
                             void (*batch)(Run* r, int k, const int** inputs, const int** targets)) {
    const Model* m = r->model;
    const PpRanks* x = &m->pp;
    PpWork w;
    memset(&w, 0, sizeof w);
    w.r = r;
    w.x = x;
    w.shape = pp_shape_of_(r, model_batches(m));
    w.warmup_previous = pp_is_first(x) ? 0 : pp_warmup(&w.shape, x->stage - 1);
    w.warmup = pp_warmup(&w.shape, x->stage);
    w.returns = m->lowest < pp_first_layer(x);
    w.comes = m->lowest < pp_end_layer(x);
    PpOp* ops = (PpOp*)malloc_check(sizeof(PpOp) * 2 * (size_t)w.shape.m, "pipeline");
    pp_order(ops, &w.shape, x->stage);
    for (int i = 0; i < 2 * w.shape.m; i++) {
        const int k = ops[i].micro, slot = k % pp_slots(r);
        if (!ops[i].is_backward) {
            batch(r, k, &w.inputs[slot], &w.targets[slot]);
            pp_forward_(&w, k);
        } else {
            pp_backward_(&w, k, dloss);
        }
        comm_watch(r->comm, HERE);
    }
    const PpStreams e = r->trainer->streams(r, run_positions(r));
    pp_wait(&w.with_previous, &e, &r->dev);
    pp_wait(&w.with_next, &e, &r->dev);
    free(ops);
}
#endif  // LLMC_PIPELINE_H
