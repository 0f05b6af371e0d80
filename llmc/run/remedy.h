/*
What to try where memory is short: the end of the line "needs 128.00 GiB of memory, 22.89 GiB are free: try ...".
    shortage_of        what a rank would take, and where it should fit
    remedy_of_memory   only options that this trainer has and that help here, with numbers
Three cases, each with what would be enough:
    the batch     all else fits: --recompute (with what it would take), smaller rows, --cp
    the rest of training   parameters fit, gradients and moments do not: fewer ranks on this machine, or --zero 2 on so
                  many machines, GPUs or cards that a rank's part of them fits beside its parameters
    parameters    --zero 2 would leave them whole on every rank: --ep, --tp, --pp, with the least number of ranks on
                  which all of it, shared evenly, has room
Numbers are divisions of what the box has; what is shared is never quite even, so --plan W has the last word.
*/
#ifndef LLMC_REMEDY_H
#define LLMC_REMEDY_H
#include "tp_option.h"  // tp_obstacle
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

// planned: of rank 0; in a plan of the rank that takes most
static inline Shortage shortage_of(const Run* r, const Planned* p, double n_free, const char* place, int n_here) {
    const Purpose purpose = run_purpose(r);
    const double batch = r->trainer->activation_bytes(r, purpose, r->o.batch_size, r->T, 0);
    const double spared = r->trainer->activation_bytes(r, purpose, r->o.batch_size, r->T, 1);
    const double scratch = r->trainer->workspace_bytes ? r->trainer->workspace_bytes(r, r->o.batch_size) : 0.0;
    const double all = p->activations + scratch;
    const Shortage s = {p->parameters, p->gradients, p->moments, p->rest - scratch, all, all - batch + spared, n_free,
                        place, n_here};
    return s;
}

static inline int remedy_has_(const Run* r, const char* name) {
    return options_at(r->table, r->n_options, name) != NULL;
}

static inline int remedy_has_experts_(const Model* m) {
    for (int i = 0; i < m->n_table; i++) {
        if (m->table[i].experts > 0) { return 1; }
    }
    return 0;
}

// ways to share parameters: "--ep, --tp or --pp"; returns how many
static inline int remedy_of_sharing_(char* text, size_t n_bytes, const Run* r) {
    const Model* m = r->model;
    const char* ways[3];
    char unused[TP_OBSTACLE_BYTES];
    int n = 0;
    if (remedy_has_(r, "ep") && remedy_has_experts_(m)) { ways[n++] = "--ep"; }
    if (remedy_has_(r, "tp") && !tp_obstacle(m, 2, unused, sizeof unused)) { ways[n++] = "--tp"; }
    if (remedy_has_(r, "pp")) { ways[n++] = "--pp"; }
    *text = '\0';
    for (int i = 0; i < n; i++) {
        const size_t used = strlen(text);
        snprintf(text + used, n_bytes - used, "%s%s", i == 0 ? "" : i + 1 < n ? ", " : " or ", ways[i]);
    }
    return n;
}

// all but the batch fits
static inline void remedy_of_batch_(char* text, const Run* r, const Shortage* s, const char* sparing) {
    const double fixed = s->parameters + s->gradients + s->moments + s->rest, spared = s->n_here * (fixed + s->spared);
    char with[160] = "";
    if (sparing && spared <= s->free) { snprintf(with, sizeof with, " (%s in all)", format_bytes(spared).s); }
    const int has_cp = run_is_training(r) && r->o.batch_size == 1 && remedy_has_(r, "cp");
    snprintf(text, REMEDY_BYTES, "%s%s%sa smaller %s--seq-len or --model%s%s%s", sparing ? sparing : "", with,
             sparing ? ", " : "", r->o.batch_size > 1 ? "--batch-size, " : "", has_cp ? ", or --cp on more " : "",
             has_cp ? s->place : "", has_cp ? "s" : "");
}

// W ranks: "on 4 GPUs or more"
static inline ShortText remedy_places_(const Shortage* s, double W) {
    ShortText out;
    snprintf(out.s, sizeof out.s, "on %.0f %ss or more", fmax(2.0, W), s->place);
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
    char ways[64], with[64] = "";
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
    if (left > s->parameters && parts <= (double)REMEDY_MOST && (zero < 2 || parts > P)) {
        if (parts <= P && s->n_here <= 1) { snprintf(text, REMEDY_BYTES, "%s--zero 2", with); }
        else { snprintf(text, REMEDY_BYTES, "%s--zero 2 %s", with, remedy_places_(s, parts * grid).s); }
        return text;
    }
    const double all = (s->parameters + shared) * grid * (model_has_ep(m) ? m->ranks.ep.size : 1), W = ceil(all / left);
    if (remedy_of_sharing_(ways, sizeof ways, r) == 0 || W > (double)REMEDY_MOST) { return "a smaller model"; }
    if (left <= 0.0) { snprintf(text, REMEDY_BYTES, "a smaller --batch-size or --seq-len, and then %s", ways); }
    else {
        snprintf(text, REMEDY_BYTES, "%s%s on more than %.0f %ss (--plan W says what W ranks take), or a smaller model",
                 with, ways, fmax(1.0, W - 1.0), s->place);
    }
    return text;
}
#endif  // LLMC_REMEDY_H
