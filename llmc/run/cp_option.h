/*
--cp: groups of ranks that have the positions of every row together (ranks/context_ranks.h). `chunks`, of a row on each
rank: 2 of attention, as models/segment_attention.h has it; 1 of what goes along a row, as ranks/carried_line.h has it.
    cp_option    its row of the table
    cp_by_option   of attention: how it comes by the keys of other ranks
    cp_begin     in Trainer.choose, behind pp_begin and tp_begin: which ranks have which positions
    cp_check     in Trainer.check: can rows be cut so?
    cp_check_by  behind it, of attention with so many heads
    cp_box       rows of the box, for attention; cp_halo_box, where keys come in one way alone, of which the first rank
                 has its own to send; cp_line_box, for what goes along rows alone
    cp_layer_sent   for Trainer.layer_keys_sent: of attention with so many heads
*/
#ifndef LLMC_CP_OPTION_H
#define LLMC_CP_OPTION_H
#include "../ranks/context_parallel.h"  // CP_BY_NAMES, cp_attention_sends, cp_heads_obstacle
#include "../ranks/model.h"             // model_begin_cp
#include "pipeline.h"                   // pp_sum
#include "trainer.h"                    // Run, run_is_typed

static inline Option cp_option(int* size, int chunks) {
    const Option row = {"machine", "cp", "", OPTION_INT, size, "1", 1, RANK_GROUP_MAX, "C",
                        chunks == 1 ?
                        "share the positions of every row among groups of C ranks, for rows that are too long for one: "
                        "each hands the states at its end to the next. Needs a multiple of C ranks, and rows of a "
                        "multiple of C positions. Brings --zero 2. Sums over positions are made of C parts: with "
                        "another C the last digits differ" :
                        "share the positions of every row among groups of C ranks, for rows that are too long for one: "
                        "needs a multiple of C ranks, and rows of a multiple of 2C positions. Brings --zero 2. Sums "
                        "over positions are made of C parts: with another C the last digits differ", 0};
    return row;
}

static inline Option cp_by_option(int* by) {
    const Option row = {"machine", "cp-by", "", OPTION_CHOICE, by, "gather", 0, 0, CP_BY_NAMES,
                        "with --cp, how queries meet the keys of other ranks. gather: every rank gets all keys and "
                        "values of a layer. ring: they go round, and a rank has those of two ranks at a time: the same "
                        "bytes on the way forward, for rows whose keys are too many. heads: each rank gets all "
                        "positions of some heads, and gives back their outputs: the least to send without grouped "
                        "heads, and gradients of keys with the bits of one rank. C divides the heads", 0};
    return row;
}

// rows of T positions, which have to be a multiple of `each`
static inline void cp_check_rows_(const Run* r, int size, int each, int T) {
    if (T % each == 0) { return; }
    if (each > r->max_T) {
        options_fail("cp", "%d: expected rows of a multiple of %d positions, found a model of %d: fewer ranks", size,
                     each, r->max_T);
    }
    options_fail("cp", "%d: expected rows of a multiple of %d positions, found %d: --seq-len %d", size, each, T,
                 T / each > 0 ? T / each * each : each);
}

// A number that was not typed but comes from an earlier start is given up where it does not fit (start_say_grid_)
static inline void cp_begin(Run* r, int* size, int chunks) {
    Model* m = r->model;
    const int P = model_sharing(m, r->comm)->size, is_typed = run_is_typed(r, "cp");
    const int is_alone = run_is_generating(r) || *r->o.probe;
    if (!is_typed && (P % *size != 0 || is_alone || r->o.verify_every > 0 || r->o.noise_scale > 0)) { *size = 1; }
    options_refuse(is_alone && *size > 1, "cp", "is for training and --eval-only: all else is one rank's work");
    ranks_same(r->comm, "number of ranks that share positions (--cp)", (uint64_t)*size);
    if (*size == 1) { return; }
    if (P % *size != 0) {
        cp_check_rows_(r, *size, chunks * *size, run_row(r));
        options_fail("cp", r->comm->size == 1
                               ? "%d: expected as many ranks or a multiple, found %d: start with %s"
                               : P < r->comm->size
                                   ? "%d: expected a number that divides the ranks that share micro-batches, %d: %s"
                                   : "%d: expected a number that divides the ranks, %d: %s",
                     *size, P, run_ranks_remedy(r).s);
    }
    options_refuse(r->o.verify_every > 0, "verify-every", "is not for --cp");
    options_refuse(r->o.noise_scale > 0, "noise-scale", "is not for --cp");
    options_refuse(run_is_typed(r, "zero") && r->o.zero != 2, "zero", "--cp brings --zero 2: leave it out");
    options_set(r->table, r->n_options, "zero", "2");
    model_begin_cp(m, r->comm, *size, chunks);
}

// once the length of rows is known. dropout: what it leaves out goes by positions of whole rows
static inline void cp_check(Run* r, int* size, float dropout) {
    const int each = cp_multiple(&r->model->cp), is_typed = run_is_typed(r, "cp");
    if (*size == 1) { return; }
    options_refuse(dropout > 0.0f && is_typed, "cp", "is not for dropout");
    if (r->T % each == 0 && dropout == 0.0f) { return; }
    if (is_typed) { cp_check_rows_(r, *size, each, r->T); }
    rank_group_free(&r->model->cp);
    *size = r->model->cp.chunks = r->model->cp.unit = 1;
}

// --cp-by heads: parts of which gradients of a head of keys are sums, where --tp leaves a rank so many such heads
static inline int cp_key_shares_(int NKV, int C) { return C > NKV ? C / NKV : 1; }

// with another --tp than the checkpoint was made with they may be others
static inline void cp_warn_of_keys_(const Run* r, int NKV) {
    const Model* m = r->model;
    const int C = m->cp.size, T = m->tp.size, all = NKV * T / m->keys.size;
    char folder[PATH_BYTES];
    if (!r->o.resume || r->comm->rank > 0 || !run_will_train(r)) { return; }
    const int began = checkpoint_number(checkpoint_folder(folder, r->o.run, r->state.step), "tp", 1);
    const int was = cp_key_shares_(all > began ? all / began : 1, C), now = cp_key_shares_(NKV, C);
    if (was == now) { return; }
    warn_line("--cp-by heads: with --tp %d, as in the checkpoint, the gradients of a head of keys were sums of %d "
              "part%s, with --tp %d of %d: they have other last digits now", began, was, was > 1 ? "s" : "", T, now);
}

// by: of CP_BY_NAMES; heads: of each rank of --tp
static inline void cp_check_by(Run* r, int by, int NH, int NKV) {
    RankGroup* x = &r->model->cp;
    if (x->size == 1) {
        options_refuse(by != CP_BY_GATHER && run_is_typed(r, "cp-by"), "cp-by", "is for --cp");
        return;
    }
    const char* needs = by == CP_BY_HEADS ? cp_heads_obstacle(NH, NKV, x->size) : NULL;
    if (needs) {
        options_fail("cp-by", "heads: expected a --cp that divides the %s, found --cp %d, %d heads of queries and "
                     "%d of keys: --cp-by gather", needs, x->size, NH, NKV);
    }
    ranks_same(r->comm, "way to the keys of other ranks (--cp-by)", (uint64_t)by);
    x->by = by;
    if (by == CP_BY_HEADS) { cp_warn_of_keys_(r, NKV); }
}

// does more follow?
static inline int cp_box_positions_(const Run* r) {
    const Model* m = r->model;
    if (!model_has_cp(m)) { return 0; }
    box_row("positions", "of each row shared by %d ranks: %d on each", m->cp.size, r->T / m->cp.size);
    return run_is_training(r);
}

static inline void cp_box(const Run* r) {
    if (!cp_box_positions_(r)) { return; }
    box_row("  keys sent", "%s per update by %s, by %s", format_bytes(pp_sum(r, r->trainer->keys_sent)).s, pp_who(r),
            choice_name(CP_BY_NAMES, r->model->cp.by).s);
}

static inline void cp_halo_box(const Run* r) {
    if (!cp_box_positions_(r)) { return; }
    box_row("  keys sent", "%s per update by rank 0", format_bytes(pp_sum(r, r->trainer->keys_sent)).s);
}

static inline void cp_line_box(const Run* r) {
    const Model* m = r->model;
    if (!cp_box_positions_(r)) { return; }
    const double sent = pp_sum(r, r->trainer->keys_sent);
    // layer by layer from rank to rank, and down to the lowest that learns back
    const int L = tensors_layers(m->table, m->n_table), C = m->cp.size;
    box_row("  states sent", "%s per update by all but the last, %s back by all but the first", format_bytes(sent).s,
            format_bytes(sent * (L - m->lowest) / L).s);
    box_row("  idle", "%.0f%% of an update: a rank begins when the one before has a layer",
            100.0 * (C - 1) / (L + C - 1));
}

// is_back: on the way back, too; again: which computes the layer once more
static inline double cp_layer_sent(const Run* r, int NH, int NKV, int HS, int is_back, int again) {
    const Model* m = r->model;
    const double forward = cp_attention_sends(&m->cp, NH, NKV, HS, 0, r->o.batch_size, r->T);
    double back = is_back ? cp_attention_sends(&m->cp, NH * m->keys.size, NKV, HS, 1, r->o.batch_size, r->T) : 0.0;
    if (is_back && model_shares_keys(m) && m->cp.by == CP_BY_HEADS) {  // shared_keys_repeats
        back += cp_attention_sends(&m->cp, NH * m->keys.size, NKV, HS, 0, r->o.batch_size, r->T);
    }
    return (1.0 + again) * forward + back;
}
#endif  // LLMC_CP_OPTION_H
