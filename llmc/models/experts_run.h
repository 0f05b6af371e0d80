/*
--ep of a trainer whose MLPs are experts: what its options ask for, and what that costs.
    experts_options      rows of the table: --ep, --ep-room; what --freeze means
    experts_begin_ep     in Trainer.choose, once the model has its layout: which ranks share the experts
    experts_refuse       ... or what a model without experts refuses
    experts_check        in Trainer.check: can the rows of a pass be counted; does each rank of a group have as many
                         micro-batches?
    experts_obstacle     why a micro-batch is no graph (graph_check), or NULL
    experts_box          rows of the box: which ranks have them, what travels
    experts_balance_box  ... how they are kept equally busy
    experts_sent_bytes   of rows, by each rank in an update where experts are equally busy; says_again: backward
                         computes outputs again
    experts_parts_sent   with --tp: of positions, in a micro-batch
    experts_count_sent   with --cp: of what a router counts, in a micro-batch
A number that was not typed but comes from an earlier run is given up where it does not fit these ranks, this update, or
what was asked for now: the result does not depend on it.
*/
#ifndef LLMC_EXPERTS_RUN_H
#define LLMC_EXPERTS_RUN_H
#include "../core/print.h"   // format_float
#include "../run/pipeline.h"  // pp_sum, pp_who
#include "../run/trainer.h"  // Run, run_is_typed
#include "expert_layer.h"    // EpOptions, expert_most_positions

static inline void experts_options(Run* r, EpOptions* x) {
    const Option own[] = {
        {"machine", "ep", "", OPTION_INT, &x->size, "1", 1, RANK_GROUP_MAX, "G",
         "so many ranks, a power of two, share the experts of every layer: each keeps and computes its part of them. "
         "Needs as many micro-batches in an update as ranks, or a multiple (--grad-accum). Brings --zero 2 for the "
         "rest; the result does not depend on it", 0},
        {"machine", "ep-room", "", OPTION_FLOAT, &x->room, "0", 0, RANK_GROUP_MAX, "F",
         "with --ep: memory for F times as many rows as experts get when all are equally busy; more of them end the "
         "run. 0: for the most that can come", 0},
    };
    run_add_options(r, own, sizeof own);
    options_reword(r->table, r->n_options, "freeze",
                   "no updates of tensors with such names, of all layers, of one or of an expert: "
                   "'model.embed_tokens.*,*.layers.0.*,*.experts.3.*'; first:N: of the first N layers; indices:A,B,..: "
                   "of these layers, from 0");
}

// the powers of two beside G that divide P ranks and E experts: "the nearest are 2 and 4"
static inline ShortText experts_near_(int G, int P, int E) {
    int below = 1;
    ShortText out;
    while (2 * below < G && P % (2 * below) == 0 && E % (2 * below) == 0) { below *= 2; }
    const int above = 2 * below, has_above = above > G && P % above == 0 && E % above == 0;
    snprintf(out.s, sizeof out.s, has_above ? "the nearest are %d and %d" : "the nearest is %d", below, above);
    return out;
}

// E experts of a layer
static inline void experts_begin_ep(Run* r, EpOptions* x, int E) {
    Comm* stage = model_stage_ranks(r->model, r->comm);
    const int P = stage->size, T = r->model->tp.size, is_typed = run_is_typed(r, "ep");
    const char* const who = is_typed || T == 1 ? "ep" : "tp";
    int G = x->size;
    if (!is_typed && (r->o.verify_every > 0 || r->o.noise_scale > 0)) { G = 1; }
    while (!is_typed && P % G != 0) { G /= 2; }
    if (!is_typed && G < T) { G = T; }
    if ((T & (T - 1)) != 0) {
        options_fail("tp", "expected a power of two for a model with experts, found %d: of those that divide %d ranks "
                     "and %d experts %s", T, P, E, experts_near_(T, P, E).s);
    }
    ranks_same(r->comm, "number of ranks that share experts (--ep)", (uint64_t)G);
    if ((G & (G - 1)) != 0) {
        options_fail("ep", "expected a power of two, found %d: of those that divide %d ranks and %d experts %s", G, P,
                     E, experts_near_(G, P, E).s);
    }
    if (E % G != 0) {
        options_fail(who, "%d: expected a number that divides the %d experts: %s", G, E,
                     experts_near_(G, P % G == 0 ? P : E, E).s);
    }
    if (P % G != 0 && P == 1) {
        options_fail("ep", "%d: expected as many ranks or a multiple, found %d: start with %s", G, P,
                     run_ranks_remedy(r).s);
    }
    if (P % G != 0) {
        options_fail("ep", "%d: expected a number that divides the ranks%s, %d: %s, or start other ranks: %s", G,
                     model_has_pp(r->model) ? " of a stage" : "", P, experts_near_(G, P, E).s, run_ranks_remedy(r).s);
    }
    if (G % T != 0) {
        options_fail("ep", "%d: ranks that share matrices share experts, too: expected %d, as --tp, or a multiple", G,
                     T);
    }
    x->size = G;
    x->parts = T;
    options_refuse(G == 1 && x->room > 0.0f && run_is_typed(r, "ep-room"), "ep-room", "is for --ep 2 and more");
    if (G == 1) { return; }
    options_refuse(x->room > 0.0f && x->room < 1.0f, "ep-room", "expected 0, or 1 and more");
    options_refuse(run_is_typed(r, "zero") && r->o.zero != 2, "zero", "--ep brings --zero 2: leave it out");
    options_refuse(r->o.verify_every > 0, "verify-every", "is not for --ep");
    options_refuse(r->o.noise_scale > 0, "noise-scale", "is not for --ep");
    options_set(r->table, r->n_options, "zero", "2");
    model_begin_ep(r->model, stage, G);
}

// in its place, of a model without experts
static inline void experts_refuse(const Run* r, const EpOptions* x) {
    options_refuse(x->size > 1, "ep", "is for models with experts");
    options_refuse(x->room > 0.0f && run_is_typed(r, "ep-room"), "ep-room", "is for --ep, and for models with experts");
}

// a position goes to k experts
static inline void experts_check(Run* r, EpOptions* x, int k) {
    const int P = model_sharing(r->model, r->comm)->size, n_leaves = model_leaves(r->model, r->n_leaves);
    const int each = r->model->cp.size;  // ranks that compute a micro-batch, but for those of --tp
    if ((double)r->o.batch_size * r->T > expert_most_positions(k)) {
        options_fail("batch-size", "expected at most %d rows of %d positions, each with %d experts, found %d",
                     expert_most_positions(k) / r->T, r->T, k, r->o.batch_size);
    }
    if (!model_has_ep(r->model) || !run_is_training(r) || n_leaves % P == 0) { return; }
    if (run_is_typed(r, "ep") || model_has_tp(r->model)) {
        const int parts = r->model->tp.size;
        options_fail("ep", "expected a multiple of %d micro-batches in an update, as many as ranks%s%s, found %d: "
                     "--grad-accum %d", P / each, model_has_pp(r->model) ? " of a stage" : "",
                     parts > 1 ? " divided by --tp" : each > 1 ? " divided by --cp" : "", r->n_leaves, P / each);
    }
    x->size = 1;
    model_hold_all(r->model, r->trainer->stored_bytes);
}

// layers of this rank from number `first` on that have experts, that of an MTP module among them
static inline int experts_layers_(const Model* m, int first) {
    int n = 0, i = 0;
    while (m->table[i].experts == 0) { i++; }
    for (int l = model_first_layer(m); l < model_end_layer(m); l++) {
        n += l >= first && !m->table[i].is_behind && tensor_has_layer(&m->table[i], l);
    }
    return n + (m->learns_mtp && model_has_head(m));
}

// ... through which the way back goes, but for a last one: what a layer computes is still there
static inline double experts_layers_again_(const Model* m) {
    const double down = experts_layers_(m, m->lowest);
    return down - (down > 0.0 && model_turns_back(m));
}

// Of a micro-batch, where all ranks of a group are chosen alike: positions of this rank that go to the others, and
// theirs that come here and go back
static inline double experts_rows_there_(const Run* r) {
    const double G = r->model->ranks.ep.size;
    return (G - 1.0) / G * tp_own_rows(run_positions(r), &r->model->tp);
}
static inline double experts_rows_back_(const Run* r) {
    const double G = r->model->ranks.ep.size, all = G / r->model->tp.size * (double)run_positions(r);
    return (all - tp_own_rows(run_positions(r), &r->model->tp)) / G;
}

// Inputs and outputs of experts in all layers of this rank; on the way back, as far down as anything learns, inputs
// again (but for the last layer of all, where they are still there), gradients of outputs and inputs, and weights of
// rows there and back. Before inputs go how many there are for each expert. says_again: outputs again, too
static inline double experts_sent_bytes(const Run* r, int E, int D, int k, int says_again) {
    const Model* m = r->model;
    if (!model_has_ep(m)) { return 0.0; }
    const double G = m->ranks.ep.size, width = (double)r->trainer->stored_bytes * D;
    const double up = experts_layers_(m, 0), down = experts_layers_(m, m->lowest), again = experts_layers_again_(m);
    const double there = experts_rows_there_(r), back = experts_rows_back_(r);
    const double rows = k * ((up + again) * there * width + (up + says_again * again) * back * width +
                             down * (there + back) * (width + sizeof(float)));
    const double counts = (up + again) * sizeof(int) * E * (G - 1.0) / G;
    return (double)model_leaves(m, r->n_leaves) / model_sharing(m, r->comm)->size * (rows + counts);
}

// bytes: what experts say forward; back the gradients of their inputs and of the weights that rows have
static inline double experts_parts_sent(const Run* r, int D, int k, int says_again) {
    const Model* m = r->model;
    const double T = m->tp.size, width = (double)r->trainer->stored_bytes * D;
    if (!model_has_ep(m)) { return 0.0; }
    const double up = experts_layers_(m, 0) + says_again * experts_layers_again_(m);
    const double down = experts_layers_(m, m->lowest);
    return (T - 1.0) * tp_own_rows(run_positions(r), &m->tp) * (up * width + down * (width + 4.0 * k));
}

static inline const char* experts_obstacle(const Run* r) {
    return model_has_ep(r->model)
               ? "is not for --ep: in every layer the host has to know how many rows other ranks send" : NULL;
}

// of E experts in a layer
static inline void experts_box(const Run* r, int E) {
    const int ranks = r->model->ranks.ep.size;
    if (ranks == 1) { return; }
    box_row("  of them", "%d on each of %d ranks", E / ranks, ranks);
    if (!run_is_training(r)) { return; }
    box_row("  rows sent", "%s per update by %s", format_bytes(pp_sum(r, r->trainer->rows_sent)).s, pp_who(r));
}

// bias: what becomes of those by which routers choose. loss: its weight; of: what it is of, behind a weight that is not
// 0, or nothing. who: says so, or nothing
static inline void experts_balance_box(const char* bias, float loss, const char* of, const char* who) {
    const ShortText weight = format_float(loss);
    box_row("balance", "bias %s, loss %s%s%s", bias, loss > 0.0f ? weight.s : "none", loss > 0.0f ? of : "", who);
}

// bytes of a micro-batch: with --cp, of what a router counts there and in `sequences` of its rows
static inline double experts_count_sent(const Run* r, int E, int sequences) {
    return (r->model->cp.size - 1.0) * sizeof(float) * (double)router_statistics_length(E) * (1 + sequences);
}
#endif  // LLMC_EXPERTS_RUN_H
