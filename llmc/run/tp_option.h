/*
--tp of a trainer whose products are those of models/linear.h: groups of ranks that have each matrix together and
compute every micro-batch together (ranks/tensor_parallel.h).
    tp_option    its row of the table
    tp_obstacle  why T ranks cannot share the matrices; tp_fits: whether they can; tp_experts
    tp_begin     in Trainer.choose, behind pp_begin: which ranks have which parts of matrices
    tp_box       rows of the box
*/
#ifndef LLMC_TP_OPTION_H
#define LLMC_TP_OPTION_H
#include "../ranks/model.h"  // model_begin_tp
#include "pipeline.h"        // pp_sum
#include "trainer.h"         // Run, run_is_typed

static inline Option tp_option(int* size) {
    const Option row = {"machine", "tp", "", OPTION_INT, size, "1", 1, RANK_GROUP_MAX, "T",
                        "share each matrix among groups of T ranks, which compute every micro-batch together: needs a "
                        "multiple of T ranks, in one machine, and T divides the heads, or is a multiple of those of "
                        "keys. The result does not depend on it, but for last digits in bf16 or beside --cp-by heads",
                        0};
    return row;
}

enum { TP_OBSTACLE_BYTES = NAME_BYTES + 128 };  // of the text of tp_obstacle

// of the first row that T ranks cannot share, what T would have to divide; NULL: there is none. A product is turned:
// the other side of the matrix is divided, too, and columns of fp4 between groups. Not of a vocabulary, whose rows are
// padded to a multiple of 128, of groups that have inputs of their own, nor of what is no matrix. Adapters are shared
// as the matrices are beside which they stand
static inline const char* tp_obstacle(const Model* m, int T, char* text, size_t n_bytes) {
    char name[NAME_BYTES];
    for (int i = model_is_adapter(m) ? m->n_saved : 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        const int is_vocabulary = t->split == SPLIT_VOCABULARY;
        const int is_matrix = tensor_is_matrix(t) && !is_vocabulary && !t->blocks;
        const int other = t->split == SPLIT_ROWS ? t->columns : t->rows;
        const char* unit = t->blocks ? "groups" : "heads";
        int first, n;
        if (t->split == SPLIT_NONE) { continue; }
        const int fits = tensor_units_divide(t, T), divides = fits && (!is_matrix || other % T == 0);
        const int is_cut = is_matrix && t->stored == STORED_FP4 && t->columns / FP4_GROUP % T != 0;
        if (divides && !is_cut && tensor_share(t, 0, 0, T, &first, &n)) { continue; }
        tensor_slice_name(name, sizeof name, t, 0);
        if (is_vocabulary) { snprintf(text, n_bytes, "the %d rows of %s, padded", t->rows, name); }
        else if (!fits) {
            snprintf(text, n_bytes, "the %d %s of %s%s", t->units, unit, name, t->cuts_units ? ", or a multiple" : "");
        }
        else if (is_cut) {
            snprintf(text, n_bytes, "the %d groups of %d columns that %s has in fp4 (--weights bf16 has none)",
                     t->columns / FP4_GROUP, FP4_GROUP, name);
        }
        else { snprintf(text, n_bytes, "both sides of %s, %d and %d", name, t->rows, t->columns); }
        return text;
    }
    return NULL;
}

// experts of a layer; 0: there are none
static inline int tp_experts(const Model* m) {
    int E = 0;
    for (int i = 0; i < m->n_table; i++) { E = m->table[i].experts > 0 ? m->table[i].experts : E; }
    return E;
}

// can T ranks share the matrices and, as --tp T brings --ep T, the experts?
static inline int tp_fits(const Model* m, int T) {
    char unused[TP_OBSTACLE_BYTES];
    const int E = tp_experts(m);
    return (E == 0 || ((T & (T - 1)) == 0 && E % T == 0)) && !tp_obstacle(m, T, unused, sizeof unused);
}

// which can: "this model takes 2, 4"
static inline ShortText tp_that_fit_(const Model* m) {
    ShortText out = {"this model takes "};
    size_t used = strlen(out.s);
    const size_t begin = used;
    for (int T = 2; T <= RANK_GROUP_MAX && used + 8 < sizeof out.s; T++) {
        if (!tp_fits(m, T)) { continue; }
        used += (size_t)snprintf(out.s + used, sizeof out.s - used, "%s%d", used > begin ? ", " : "", T);
    }
    if (used == begin) { snprintf(out.s, sizeof out.s, "there is none for this model: leave it out"); }
    return out;
}

// A number that was not typed but comes from an earlier start is given up where it does not fit (start_say_grid_)
static inline void tp_begin(Run* r, int* size) {
    Model* m = r->model;
    char text[TP_OBSTACLE_BYTES];
    const int P = model_sharing(m, r->comm)->size, is_typed = run_is_typed(r, "tp");
    const int is_alone = run_is_generating(r) || *r->o.probe;
    const char* obstacle = *size > 1 ? tp_obstacle(m, *size, text, sizeof text) : NULL;
    const int fits = P / run_kept_cp(r, P) % *size == 0 && !is_alone && !obstacle;
    if (!is_typed && (!fits || r->o.verify_every > 0 || r->o.noise_scale > 0)) { *size = 1; }
    options_refuse(is_alone && *size > 1, "tp", "is for training and --eval-only: all else is one rank's work");
    ranks_same(r->comm, "number of ranks that share matrices (--tp)", (uint64_t)*size);
    if (*size == 1) { return; }
    if (obstacle) {
        options_fail("tp", "%d: expected a number that divides %s: %s", *size, obstacle, tp_that_fit_(m).s);
    }
    if (P % *size != 0 && !tp_fits(m, *size)) {
        options_fail("tp", "%d: expected a power of two that divides the %d experts: %s", *size, tp_experts(m),
                     tp_that_fit_(m).s);
    }
    if (P % *size != 0) {
        options_fail("tp", r->comm->size == 1
                               ? "%d: expected as many ranks or a multiple, found %d: start with %s"
                               : model_has_pp(m) ? "%d: expected a number that divides the ranks of a stage, %d: %s"
                                                 : "%d: expected a number that divides the ranks, %d: %s",
                     *size, P, run_ranks_remedy(r).s);
    }
    options_refuse(r->o.verify_every > 0, "verify-every", "is not for --tp");
    options_refuse(r->o.noise_scale > 0, "noise-scale", "is not for --tp");
    options_refuse(!run_will_train(r) && *r->o.export_hf, "export-hf", "with --tp only at the end of training: else by "
                   "one process, --from RUN --export-hf DIR");
    model_begin_tp(m, r->comm, *size);
}

static inline void tp_box(const Run* r) {
    const Model* m = r->model;
    if (!model_has_tp(m)) { return; }
    box_row("matrices", "each shared by %d ranks", m->tp.size);
    if (model_shares_keys(m)) { box_row("  heads of keys", "each shared by %d of them", m->keys.size); }
    if (!run_is_training(r)) { return; }
    box_row("  parts sent", "%s%s per update by %s", pp_at_most(r), format_bytes(pp_sum(r, r->trainer->parts_sent)).s,
            pp_who(r));
}
#endif  // LLMC_TP_OPTION_H
