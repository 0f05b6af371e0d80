/*
--pp of a trainer whose passes can be cut between two layers (Trainer.turn and what follows it): what the option asks
for, and the micro-batches of an update on their way through the stages.
    pipeline_option    its row of the table
    pipeline_begin     in Trainer.choose, once the model has its layout and before --ep divides experts: which ranks
                       have which layers
    pipeline_slots     micro-batches whose forward pass is over before the backward pass of the first
    pipeline_leaves    the micro-batches of this rank in the order of 1F1B (pipeline_schedule.h)
    pipeline_box       rows of the box
A rank swaps streams and gradients with its neighbours. With the stage behind: until the first gradient comes it sends
one stream after the other, as many as there are stages behind it; then each stream that it sends is one swap with the
gradient that comes, and at the end gradients come alone. So the stage behind receives its next stream when it has sent
a gradient: a slot is free then, and no rank waits for one that waits for it.
*/
#ifndef LLMC_PIPELINE_H
#define LLMC_PIPELINE_H
#include "../ranks/pipeline_link.h"      // PipelineEnds, pipeline_swap
#include "../ranks/pipeline_schedule.h"  // pp_order, pp_warmup
#include "trainer.h"                     // Run, run_is_typed

// why a micro-batch is no graph then (graph_check)
#define PIPELINE_NO_GRAPH "is not for --pp: a micro-batch is computed in two parts"

// ---- the option ----

static inline Option pipeline_option(int* size) {
    const Option row = {"machine", "pp", "", OPTION_INT, size, "1", 1, PIPELINE_RANKS_MAX, "P",
                        "cut the layers into P stages, each on ranks of its own, through which micro-batches go one "
                        "after the other: needs a multiple of P ranks, and --grad-accum of a few times the ranks to "
                        "keep them busy. The result does not depend on it", 0};
    return row;
}

// multiplications of a position with the matrices of each layer: cost (layers). active: the share of experts that a
// position takes
static inline void pipeline_costs_(double* cost, const Model* m, double active) {
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

// of the multiplications of all stages those of this one; behind: of the last one, besides its layers
static inline double pipeline_share_of_(const PipelineRanks* x, const double* cost, double behind) {
    double own = pipeline_is_last(x) ? behind : 0.0, all = behind;
    for (int l = 0; l < x->begin[x->size]; l++) {
        all += cost[l];
        own += l >= pipeline_first(x) && l < pipeline_end(x) ? cost[l] : 0.0;
    }
    return own / all;
}

// V, C: of the output matrix, C channels. active: the share of experts that a position takes. shared: the field of the
// embedding where that is the output matrix, else TENSOR_NO_FIELD. A number that was not typed but comes from an
// earlier run is given up where it does not fit
static inline void pipeline_begin(Run* r, int* size, int V, int C, double active, size_t shared) {
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
    int begin[PIPELINE_RANKS_MAX + 1];
    pipeline_costs_(cost, m, active);
    pipeline_cut(begin, *size, cost, L, 0.0, (double)V * C);
    model_begin_pp(m, r->comm, *size, begin, shared, C);
    m->pipe.share = pipeline_share_of_(&m->pipe, cost, (double)V * C);
    free(cost);
}

// ranks that share the micro-batches of an update
static inline int pipeline_lines(const Run* r) { return r->comm->size / r->model->pipe.size; }

static inline PpShape pipeline_shape_(const Run* r) {
    const PpShape s = {r->model->pipe.size, 1, (int)ceil_div(r->n_leaves, pipeline_lines(r))};
    return s;
}

static inline int pipeline_slots(const Run* r) {
    const PpShape s = pipeline_shape_(r);
    const int held = s.p - r->model->pipe.place;
    return !model_has_pp(r->model) || r->n_leaves == 0 ? 1 : held < s.m ? held : s.m;
}

// bytes of the stream of a micro-batch
static inline double pipeline_stream_bytes(const Run* r) {
    return (double)r->o.batch_size * r->T * r->model->pipe.channels * (double)r->trainer->stored_bytes;
}

static inline void pipeline_box(const Run* r) {
    const PipelineRanks* x = &r->model->pipe;
    char text[1024] = "";
    if (!model_has_pp(r->model)) { return; }
    for (int s = 0; s < x->size && strlen(text) < sizeof text - 32; s++) {
        const size_t n = strlen(text);
        const int first = x->begin[s], last = x->begin[s + 1] - 1;
        if (first == last) { snprintf(text + n, sizeof text - n, "%s%d", s > 0 ? ", " : "", first); }
        else { snprintf(text + n, sizeof text - n, "%s%d-%d", s > 0 ? ", " : "", first, last); }
    }
    box_row("stages", "%d: layers %s", x->size, text);
    if (!run_is_training(r)) { return; }
    const PpShape s = pipeline_shape_(r);
    const int n_lines = pipeline_lines(r);
    box_row("  idle", "%.0f%% of an update of %s%d micro-batch%s in each of %d line%s", 100.0 * pp_idle(&s),
            r->n_leaves % n_lines > 0 ? "up to " : "", s.m, s.m > 1 ? "es" : "", n_lines, n_lines > 1 ? "s" : "");
}

// ---- the micro-batches of an update ----

typedef struct {
    Run* r;
    const PipelineRanks* x;
    PpShape shape;
    int warmup_before, warmup;  // streams that the stage before, and this one, sends until the first gradient comes
    PipelineSwap of_before, of_behind;  // the last swap with each neighbour
    int returns, comes;         // does a gradient go to the stage before? Does one come from behind?
    const int *inputs[PIPELINE_RANKS_MAX], *targets[PIPELINE_RANKS_MAX];  // of each slot
} PipelineWork;

// the ends of micro-batch k, whose turn it is from now on
static inline PipelineEnds pipeline_turn_(const PipelineWork* w, int k) {
    w->r->trainer->turn(w->r, k % pipeline_slots(w->r));
    return w->r->trainer->ends(w->r, w->r->o.batch_size * w->r->T);
}

// With the stage behind: a stream goes there, or a gradient comes; where it comes to is free once the last one has gone
static inline void pipeline_swap_behind_(PipelineWork* w, const PipelineEnds* e, int sends, int receives) {
    const int comes = receives && w->comes;
    if (receives) { pipeline_wait(&w->of_before, e, &w->r->dev); }
    w->of_behind = pipeline_swap(w->x->behind, sends ? e->out : NULL, sends ? e->numbers : NULL,
                                 comes ? e->gradient : NULL, comes ? e->returned : NULL, e, &w->r->dev);
}

// with the stage before: a gradient goes there, or a stream comes
static inline void pipeline_swap_before_(PipelineWork* w, const PipelineEnds* e, int sends, int receives) {
    const int returns = sends && w->returns;
    w->of_before = pipeline_swap(w->x->before, returns ? e->gradient : NULL, returns ? e->returned : NULL,
                                 receives ? e->in : NULL, receives ? e->numbers : NULL, e, &w->r->dev);
}

static inline void pipeline_forward_(PipelineWork* w, int k) {
    Run* r = w->r;
    const int slot = k % pipeline_slots(r);
    const PipelineEnds e = pipeline_turn_(w, k);
    if (!pipeline_is_first(w->x)) {
        if (k < w->warmup_before) { pipeline_swap_before_(w, &e, 0, 1); }
        pipeline_wait(&w->of_before, &e, &r->dev);
    }
    r->trainer->forward_leaf(r, k, w->inputs[slot], w->targets[slot], r->o.batch_size, r->T);
    if (!pipeline_is_last(w->x)) { pipeline_swap_behind_(w, &e, 1, k >= w->warmup); }
}

static inline void pipeline_backward_(PipelineWork* w, int k, float dloss) {
    Run* r = w->r;
    const int slot = k % pipeline_slots(r), m = w->shape.m;
    const int goes_on = k + w->warmup_before < m;  // this slot becomes that of the micro-batch then
    const PipelineEnds e = pipeline_turn_(w, k);
    if (!pipeline_is_last(w->x)) {
        if (k + w->warmup >= m) { pipeline_swap_behind_(w, &e, 0, 1); }  // no stream goes with it any more
        pipeline_wait(&w->of_behind, &e, &r->dev);
    }
    r->trainer->backward_leaf(r, k, w->inputs[slot], w->targets[slot], dloss, r->o.batch_size, r->T);
    if (pipeline_is_first(w->x)) { return; }
    pipeline_swap_before_(w, &e, 1, goes_on);
    if (pipeline_is_last(w->x)) { model_send_shared(r->model, k + 1, k + 1 == m, &r->dev); }
}

// batch: gives micro-batch k, which stays until as many others were given as there are slots
static inline void pipeline_leaves(Run* r, float dloss,
                                   void (*batch)(Run* r, int k, const int** inputs, const int** targets)) {
    const Model* m = r->model;
    const PipelineRanks* x = &m->pipe;
    PipelineWork w;
    memset(&w, 0, sizeof w);
    w.r = r;
    w.x = x;
    w.shape.p = x->size, w.shape.v = 1, w.shape.m = dp_n_leaves(&m->dp);
    w.warmup_before = pipeline_is_first(x) ? 0 : pp_warmup(&w.shape, x->place - 1);
    w.warmup = pp_warmup(&w.shape, x->place);
    w.returns = m->lowest < pipeline_first(x);
    w.comes = m->lowest < pipeline_end(x);
    PpOp* ops = (PpOp*)malloc_check(sizeof(PpOp) * 2 * (size_t)w.shape.m, "pipeline");
    pp_order(ops, &w.shape, x->place);
    for (int i = 0; i < 2 * w.shape.m; i++) {
        const int k = ops[i].micro, slot = k % pipeline_slots(r);
        if (!ops[i].is_backward) {
            batch(r, k, &w.inputs[slot], &w.targets[slot]);
            pipeline_forward_(&w, k);
        } else {
            pipeline_backward_(&w, k, dloss);
        }
        comm_watch(r->comm, HERE);
    }
    const PipelineEnds e = r->trainer->ends(r, r->o.batch_size * r->T);
    pipeline_wait(&w.of_before, &e, &r->dev);
    pipeline_wait(&w.of_behind, &e, &r->dev);
    free(ops);
}
#endif  // LLMC_PIPELINE_H
