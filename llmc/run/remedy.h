/*
What to try where memory is short: the end of the line "needs 128.00 GiB of memory, 22.89 GiB are free: try ...".
    shortage_of        what a rank would take, and where it should fit
    remedy_of_memory   only options that this trainer has and that help here, with numbers
Four cases, each with what would be enough:
    moments   --zero 1, which costs nothing
    the batch     all else fits: --recompute (with what it would take), smaller rows, --cp
    the rest of training   parameters fit, gradients and moments do not: fewer ranks on this machine, or --zero 2 on so
                  many machines, GPUs or cards that a rank's part of them fits beside its parameters
    parameters    --zero 2 would leave them whole on every rank: --ep, --tp, --pp, with the least number of ranks on
                  which all of it, shared evenly, has room, that is what shares already times a power of two
Numbers are divisions of what the box has; what is shared is never quite even, so --plan W has the last word.
*/
#ifndef LLMC_REMEDY_H
#define LLMC_REMEDY_H
#include "tp_option.h"  // tp_fits, tp_experts
#include "trainer.h"    // Run

enum { REMEDY_BYTES = 512, REMEDY_MOST = 1024 };  // ranks: who lacks more memory than these have needs another model

// bytes of a rank, and where it would have to fit
typedef struct {
    double parameters, gradients, moments, rest;
    double batch, spared;  // activations and scratch of a micro-batch: as it is; with Trainer.sparing
    double free;           // of a machine, a GPU or a card
    const char* place;     // which of them
    int n_here;            // ranks that take from it
} Shortage;

// p: of rank 0; in a plan of the rank that takes most
static inline Shortage shortage_of(const Planned* p, double n_free, const char* place, int n_here) {
    const double rest = p->activations + p->rest - p->batch;
    const Shortage s = {p->parameters, p->gradients, p->moments, rest, p->batch, p->spared, n_free, place, n_here};
    return s;
}

static inline int remedy_has_(const Run* r, const char* name) {
    return options_at(r->table, r->n_options, name) != NULL;
}

// ranks that share in this way now; 0: the trainer has none such
static inline int remedy_size_(const Run* r, const char* name) {
    const Option* row = options_at(r->table, r->n_options, name);
    return row ? *(const int*)row->value : 0;
}

// Could more ranks share in this way, twice as many or for --tp some multiple? Muon wants whole matrices
static inline int remedy_grows_(const Run* r, const char* name) {
    const Model* m = r->model;
    const int now = remedy_size_(r, name), has_muon = run_is_training(r) && r->o.optimizer == OPTIMIZER_MUON;
    if (now == 0) { return 0; }
    if (strcmp(name, "pp") == 0) { return 2 * now <= tensors_layers_between(m->table, m->n_table, 0); }
    if (has_muon) { return 0; }
    if (strcmp(name, "ep") == 0) { return tp_experts(m) > 0 && tp_experts(m) % (2 * now) == 0; }
    int T = 2 * now;
    while (T <= 8 * now && !tp_fits(m, T)) { T += now; }
    return T <= 8 * now;
}

// ways to share parameters: "--ep, a larger --tp or --pp"; returns how many
static inline int remedy_of_sharing_(char* text, size_t n_bytes, const Run* r) {
    static const char* const names[] = {"ep", "tp", "pp"};
    const char* ways[3];
    int n = 0;
    for (int i = 0; i < 3; i++) {
        if (remedy_grows_(r, names[i])) { ways[n++] = names[i]; }
    }
    *text = '\0';
    for (int i = 0; i < n; i++) {
        const size_t used = strlen(text);
        snprintf(text + used, n_bytes - used, "%s%s--%s", i == 0 ? "" : i + 1 < n ? ", " : " or ",
                 remedy_size_(r, ways[i]) > 1 ? "a larger " : "", ways[i]);
    }
    return n;
}

// ranks that share in some way now: others are a multiple of them
static inline int remedy_unit_(const Run* r) {
    const Model* m = r->model;
    const int each = m->tp.size * m->cp.size, G = m->ranks.ep.size > 1 ? m->ranks.ep.size : 1;
    int unit = each;
    while (unit % G != 0) { unit += each; }
    return unit * m->pp.size;
}

// W ranks or more: whole units, and so many of them that experts and heads can be divided, a power of two
static inline double remedy_ranks_(const Run* r, double W) {
    double n = remedy_unit_(r);
    while (n < W) { n *= 2.0; }
    return n;
}

// all but the batch fits
static inline void remedy_of_batch_(char* text, const Run* r, const Shortage* s, const char* sparing) {
    const double fixed = s->parameters + s->gradients + s->moments + s->rest, spared = s->n_here * (fixed + s->spared);
    char with[160] = "";
    if (sparing && spared <= s->free) { snprintf(with, sizeof with, " (%s in all)", format_bytes(spared).s); }
    const RankGroup* cp = &r->model->cp;
    const int has_cp = run_is_training(r) && r->o.batch_size == 1 && remedy_has_(r, "cp") &&
                       r->T % (4 * cp->size * (cp->unit > 1 ? cp->unit : 1)) == 0;
    snprintf(text, REMEDY_BYTES, "%s%s%sa smaller %s--seq-len or --model%s%s%s%s", sparing ? sparing : "", with,
             sparing ? ", " : "", r->o.batch_size > 1 ? "--batch-size, " : "",
             !has_cp ? "" : cp->size > 1 ? ", or a larger --cp" : ", or --cp", has_cp ? " on more " : "",
             has_cp ? s->place : "", has_cp ? "s" : "");
}

// W ranks: "4 GPUs or more"
static inline ShortText remedy_places_(const Shortage* s, double W) {
    ShortText out;
    snprintf(out.s, sizeof out.s, "%.0f %ss or more", fmax(2.0, W), s->place);
    return out;
}

// of training; `text` has REMEDY_BYTES
static inline const char* remedy_of_memory(char* text, const Run* r, const Shortage* s) {
    const Model* m = r->model;
    const char* sparing = s->spared < 0.99 * s->batch ? r->trainer->sparing : NULL;
    const double batch = sparing ? s->spared : s->batch, left = s->free - s->rest - batch;
    const double each = s->parameters + s->gradients + s->moments + s->rest;
    const int P = model_sharing(m, r->comm)->size, grid = r->comm->size / P, zero = r->o.zero;
    const double shared = s->gradients * (zero == 2 ? P : 1) + s->moments * (zero > 0 ? P : 1);  // by --zero 2
    const int takes_zero_2 = r->o.optimizer != OPTIMIZER_MUON;
    const double zero_1 = s->n_here * (each - s->moments + s->moments / P);  // without the batch
    char ways[64], with[64] = "";
    const int fits = zero_1 + s->n_here * s->batch <= s->free;  // as the batch is
    const int fits_spared = zero_1 + s->n_here * batch <= s->free && s->n_here * (each + batch) > s->free;
    if (zero == 0 && P > 1 && s->moments > 0.0 && (fits || (sparing && fits_spared))) {
        snprintf(text, REMEDY_BYTES, "%s%s--zero 1 (%s in all)", fits ? "" : sparing, fits ? "" : " with ",
                 format_bytes(zero_1 + s->n_here * (fits ? s->batch : batch)).s);
        return text;
    }
    if (s->n_here * each <= s->free) {
        remedy_of_batch_(text, r, s, sparing);
        return text;
    }
    if (s->n_here > 1 && each + batch <= s->free) {
        const int n = (int)(s->free / (each + batch));
        snprintf(text, REMEDY_BYTES, "%s%s%d rank%s on each machine", sparing ? sparing : "", sparing ? " and " : "", n,
                 n > 1 ? "s" : "");
        return text;
    }
    if (sparing) { snprintf(with, sizeof with, "%s with ", sparing); }
    const double parts = ceil(shared / (left - s->parameters));  // of gradients and moments
    if (takes_zero_2 && left > s->parameters && parts <= (double)REMEDY_MOST && (zero < 2 || parts > P)) {
        const int unit = remedy_unit_(r);
        const ShortText places = remedy_places_(s, ceil(parts * grid / unit) * unit);
        if (parts <= P && s->n_here <= 1) { snprintf(text, REMEDY_BYTES, "%s--zero 2", with); }
        else { snprintf(text, REMEDY_BYTES, "%s%s%s", with, zero < 2 ? "--zero 2 on " : "", places.s); }
        return text;
    }
    const double all = (s->parameters + shared) * grid * (model_has_ep(m) ? m->ranks.ep.size : 1);
    const double W = remedy_ranks_(r, ceil(all / left));
    if (remedy_of_sharing_(ways, sizeof ways, r) == 0 || W > (double)REMEDY_MOST) { return "a smaller model"; }
    if (left <= 0.0) { snprintf(text, REMEDY_BYTES, "a smaller --batch-size or --seq-len, and then %s", ways); }
    else {
        snprintf(text, REMEDY_BYTES, "%s%s on %s (--plan W says what W ranks take), or a smaller model", with, ways,
                 remedy_places_(s, W).s);
    }
    return text;
}
#endif  // LLMC_REMEDY_H
