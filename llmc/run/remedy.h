/*
What to try where memory is short: the end of the line "needs 128.00 GiB of memory, 22.89 GiB are free: try ...".
    shortage_of        what a rank would take, and where it should fit
    remedy_of_memory   only options that this trainer has and that help here, with numbers
Four cases, each with what would be enough:
    moments   --zero 1, which costs nothing
    the batch     all else fits: --recompute where that is enough (with what it would take), the largest --batch-size
                  that fits with and without it, shorter rows, --cp
    the rest of training   parameters fit, gradients and moments do not: fewer ranks on this machine, or --zero 2 on so
                  many machines, GPUs or cards that a rank's part of them fits beside its parameters
    parameters    --zero 2 would leave them whole on every rank: --ep, --tp, --pp, with the least number of ranks on
                  which all of it, shared evenly, has room, that is what shares already times a power of two
Where parameters and the batch are both too large, and no number of ranks would have room for the batch, that comes
first.
The last two and --cp are tried: the planner says what so many ranks take (trial_plan.h), of each option the least
number of ranks that have room, the smallest first. Where it has no answer in time the line has an estimate, a division
of what the box has; what is shared is never quite even. Other ranks wait meanwhile, so that all of it ends after
REMEDY_SECONDS or a quarter of --comm-timeout.
*/
#ifndef LLMC_REMEDY_H
#define LLMC_REMEDY_H
#include "tp_option.h"  // tp_fits, tp_experts
#include "trainer.h"    // Run
#include "trial_plan.h"  // trial_plan

enum { REMEDY_BYTES = 512, REMEDY_MOST = 1024 };  // ranks: who lacks more memory than these have needs another model

// bytes of a rank, and where it would have to fit
typedef struct {
    double parameters, gradients, moments, rest;
    double batch, spared;  // activations and scratch of a micro-batch: as it is; with Trainer.sparing
    int largest, largest_spared;  // --batch-size that fits, so and so; -1: nobody knows
    double free;           // of a machine, a GPU or a card
    const char* place;     // which of them
    int n_here;            // ranks that take from it
} Shortage;

// p: of rank 0; in a plan of the rank that takes most
static inline Shortage shortage_of(const Planned* p, double n_free, const char* place, int n_here) {
    const double rest = p->activations + p->rest - p->batch;
    const Shortage s = {p->parameters, p->gradients, p->moments, rest, p->batch, p->spared, p->largest,
                        p->largest_spared, n_free, place, n_here};
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

// ---- what the planner says ----

enum { REMEDY_SECONDS = 4 };  // for all that is tried
typedef enum { REMEDY_ZERO, REMEDY_EP, REMEDY_TP, REMEDY_CP, REMEDY_PP, REMEDY_WAYS } RemedyWay;
static const char* const remedy_ways_[REMEDY_WAYS] = {"zero", "ep", "tp", "cp", "pp"};

typedef struct {
    int size[REMEDY_WAYS];  // ranks that share in each way, 0: the trainer has none such; of --zero its level
    RemedyWay way;          // which of them is another than now,
    int has_zero;           // and --zero 2 besides
    int ranks, grad_accum;  // in all; micro-batches of an update that these need, 0: as many as now
} Proposal;

// "--ep 8 --grad-accum 8", "--tp 8 --zero 2"; is_on: of what is typed already "the same"
static inline ShortText proposal_words_(const Proposal* p, int is_on) {
    ShortText out;
    size_t n = (size_t)snprintf(out.s, sizeof out.s, "--%s %d%s", remedy_ways_[p->way], p->size[p->way],
                                p->has_zero ? " --zero 2" : "");
    if (is_on) { n = (size_t)snprintf(out.s, sizeof out.s, "the same%s", p->grad_accum > 0 ? " and" : ""); }
    if (p->grad_accum > 0) { snprintf(out.s + n, sizeof out.s - n, " --grad-accum %d", p->grad_accum); }
    return out;
}

// of a way, no rank among none
static inline int proposal_size_(const Proposal* p, RemedyWay way) { return p->size[way] > 1 ? p->size[way] : 1; }

// W ranks or more, and as many as there are now: those that the grid needs, and the micro-batches
static inline void proposal_place_(Proposal* p, const Run* r, int W) {
    const int ep = proposal_size_(p, REMEDY_EP), tp = proposal_size_(p, REMEDY_TP);
    const int line = tp * proposal_size_(p, REMEDY_CP), pp = proposal_size_(p, REMEDY_PP);
    int stage = line;
    while (stage % ep != 0) { stage += line; }
    const int unit = stage * pp, least = W > r->comm->size ? W : r->comm->size;
    p->ranks = (least + unit - 1) / unit * unit;
    const int n_lines = p->ranks / pp / line, shares = tp_experts(r->model) > 0 && (ep > 1 || tp > 1);
    p->grad_accum = shares && r->n_leaves % n_lines != 0 ? (r->n_leaves + n_lines - 1) / n_lines * n_lines : 0;
}

// the next larger number in this way that the model takes; 0: there is none
static inline int proposal_next_(const Run* r, RemedyWay way, int size) {
    const Model* m = r->model;
    const int E = tp_experts(m), L = tensors_layers_between(m->table, m->n_table, 0), now = remedy_size_(r, "tp");
    if (way == REMEDY_PP) {
        const int most = L < PP_MAX ? L : PP_MAX, next = size + 1 + size / 16;
        return size < most ? (next < most ? next : most) : 0;
    }
    if (run_is_training(r) && r->o.optimizer == OPTIMIZER_MUON) { return 0; }
    if (way == REMEDY_EP) { return E > 0 && E % (2 * size) == 0 ? 2 * size : 0; }
    if (way == REMEDY_CP) { return 2 * size <= RANK_GROUP_MAX && r->T % (2 * size) == 0 ? 2 * size : 0; }
    for (int T = size + now; T <= 8 * now && T <= RANK_GROUP_MAX; T += now) {
        if (tp_fits(m, T)) { return T; }
    }
    return 0;
}

// does it fit?
static inline int proposal_fits_(const Proposal* p, const Shortage* s, const char* sparing, double deadline) {
    char words[256];
    size_t n = (size_t)snprintf(words, sizeof words, "%s --continue 0 --dry-run --plan %d", sparing ? sparing : "",
                                p->ranks);  // as of a run that begins, as it would
    for (int i = 0; i < REMEDY_WAYS; i++) {
        if (p->size[i] == 0 || (i == REMEDY_ZERO && p->way != REMEDY_ZERO && !p->has_zero)) { continue; }
        n += (size_t)snprintf(words + n, sizeof words - n, " --%s %d", remedy_ways_[i], p->size[i]);
    }
    if (p->grad_accum > 0) { snprintf(words + n, sizeof words - n, " --grad-accum %d", p->grad_accum); }
    return trial_plan(words, deadline) <= s->free;
}

// by CLOCK_MONOTONIC
static inline double remedy_end_(const Run* r) {
    return seconds_now(CLOCK_MONOTONIC) + fmin(REMEDY_SECONDS, 0.25 * r->o.comm_timeout);
}

// the least ranks that have room in this way, least or more; 0: there are none by the deadline
static inline int remedy_finds_(Proposal* p, const Run* r, const Shortage* s, const char* sparing, RemedyWay way,
                                int least, double deadline) {
    const int can_zero = (way == REMEDY_TP || way == REMEDY_PP) && r->o.optimizer != OPTIMIZER_MUON && r->o.zero < 2;
    memset(p, 0, sizeof *p);
    if (r->comm->rank > 0 || !remedy_has_(r, remedy_ways_[way])) { return 0; }  // rank 0 speaks
    for (int i = 0; i < REMEDY_WAYS; i++) { p->size[i] = remedy_size_(r, remedy_ways_[i]); }
    p->way = way;
    if (way == REMEDY_ZERO) { p->size[way] = 2; }
    for (int W = least; seconds_now(CLOCK_MONOTONIC) < deadline; W = p->ranks + 1 + p->ranks / 16) {
        const int next = way == REMEDY_ZERO || p->has_zero ? 0 : proposal_next_(r, way, p->size[way]);
        if (next > 0) { W = 0, p->size[way] = next; }
        else if (way != REMEDY_ZERO && !p->has_zero) {  // the most that can share so, and --zero 2 the rest
            if (!can_zero || p->size[way] == remedy_size_(r, remedy_ways_[way])) { return 0; }
            p->has_zero = 1, p->size[REMEDY_ZERO] = 2;
        }
        proposal_place_(p, r, W);
        if (p->ranks > REMEDY_MOST) { return 0; }
        if (p->ranks >= least && proposal_fits_(p, s, sparing, deadline)) { return 1; }
    }
    return 0;
}

// "--recompute 3 with --tp 8 on 8 machines (one rank on each), --zero 2 on 24 or --pp 12 on 12, or a smaller model";
// returns how many there are. by_zero: no fewer ranks can do by --zero 2; 0: it does not help. least: in all other ways
static inline int remedy_planned_(char* text, const Run* r, const Shortage* s, const char* sparing, int by_zero,
                                  int least) {
    Proposal found[REMEDY_WAYS];
    const double end = remedy_end_(r);
    int n = 0;
    for (int way = 0; way < REMEDY_WAYS; way++) {
        const int from = way == REMEDY_ZERO ? by_zero : least;
        const double now = seconds_now(CLOCK_MONOTONIC), deadline = now + (end - now) / (REMEDY_WAYS - way);
        if (way == REMEDY_ZERO && by_zero == 0) { continue; }
        if (!remedy_finds_(&found[n], r, s, sparing, (RemedyWay)way, from, deadline)) { continue; }
        for (int i = n++; i > 0 && found[i].ranks < found[i - 1].ranks; i--) {
            const Proposal p = found[i];
            found[i] = found[i - 1], found[i - 1] = p;
        }
    }
    size_t used = (size_t)snprintf(text, REMEDY_BYTES, "%s%s", sparing ? sparing : "", sparing ? " with " : "");
    for (int i = 0; i < n; i++) {
        const char* between = i == 0 ? "" : i + 1 < n ? ", " : " or ";
        const int is_on = found[i].way == REMEDY_ZERO && r->o.zero == 2;
        used += (size_t)snprintf(text + used, REMEDY_BYTES - used, "%s%s on %d", between,
                                 proposal_words_(&found[i], is_on).s, found[i].ranks);
        if (i > 0) { continue; }
        used += (size_t)snprintf(text + used, REMEDY_BYTES - used, " %ss%s", s->place,
                                 strcmp(s->place, "machine") == 0 ? " (one rank on each)" : "");
    }
    if (n > 0) { snprintf(text + used, REMEDY_BYTES - used, ", or a smaller model"); }
    return n;
}

// "--batch-size (at most 15; 20 with --recompute 3), "; "": fewer rows than now do not fit, or there are none
static inline ShortText remedy_rows_(const Run* r, const Shortage* s, const char* sparing) {
    const int most = s->largest, more = sparing ? s->largest_spared : most;
    ShortText out = {""};
    if (r->o.batch_size == 1 || (most == 0 && more == 0)) { return out; }
    if (most < 0) { snprintf(out.s, sizeof out.s, "--batch-size, "); }
    else if (more <= most) { snprintf(out.s, sizeof out.s, "--batch-size (at most %d), ", most); }
    else if (most == 0) { snprintf(out.s, sizeof out.s, "--batch-size (at most %d with %s), ", more, sparing); }
    else { snprintf(out.s, sizeof out.s, "--batch-size (at most %d; %d with %s), ", most, more, sparing); }
    return out;
}

// all but the batch fits
static inline void remedy_of_batch_(char* text, const Run* r, const Shortage* s, const char* sparing) {
    const double fixed = s->parameters + s->gradients + s->moments + s->rest, spared = s->n_here * (fixed + s->spared);
    const ShortText rows = remedy_rows_(r, s, sparing);
    const int is_enough = sparing && spared <= s->free, is_named = strstr(rows.s, "with") != NULL;
    char with[160] = "";
    if (is_enough) { snprintf(with, sizeof with, "%s (%s in all), ", sparing, format_bytes(spared).s); }
    else if (sparing && !is_named) { snprintf(with, sizeof with, "%s, ", sparing); }
    Proposal cp;
    const int has_cp = run_is_training(r) && remedy_finds_(&cp, r, s, NULL, REMEDY_CP, 0, remedy_end_(r));
    const size_t n = (size_t)snprintf(text, REMEDY_BYTES, "%sa smaller %s--seq-len or --model", with, rows.s);
    if (has_cp) {
        snprintf(text + n, REMEDY_BYTES - n, ", or %s on %d %ss", proposal_words_(&cp, 0).s, cp.ranks, s->place);
    }
}

// of all parameters, whoever has them
static inline double remedy_parameters_(const Model* m) {
    double n_bytes = 0.0;
    for (int i = 0; i < m->n_table; i++) {
        n_bytes += (double)tensor_stored_size(&m->table[i], tensor_elements(&m->table[i]));
    }
    return n_bytes;
}

// W ranks, an estimate: "about 4 GPUs or more"
static inline ShortText remedy_places_(const Shortage* s, double W) {
    ShortText out;
    snprintf(out.s, sizeof out.s, "about %.0f %ss or more", fmax(2.0, W), s->place);
    return out;
}

// What it takes besides to share in other ways than --zero, "--recompute 3 --noise-scale 0"; NULL: nothing
static inline const char* remedy_besides_(char* text, size_t n_bytes, const Run* r, const char* sparing) {
    size_t used = (size_t)snprintf(text, n_bytes, "%s", sparing ? sparing : "");
    if (r->o.verify_every > 0) {
        used += (size_t)snprintf(text + used, n_bytes - used, "%s--verify-every 0", used > 0 ? " " : "");
    }
    if (r->o.noise_scale > 0) {
        used += (size_t)snprintf(text + used, n_bytes - used, "%s--noise-scale 0", used > 0 ? " " : "");
    }
    return used > 0 ? text : NULL;
}

// of training; `text` has REMEDY_BYTES
static inline const char* remedy_of_memory(char* text, const Run* r, const Shortage* s) {
    const Model* m = r->model;
    const char* sparing = s->spared < 0.99 * s->batch ? r->trainer->sparing : NULL;
    const double batch = sparing ? s->spared : s->batch, left = s->free - s->rest - batch;
    const double each = s->parameters + s->gradients + s->moments + s->rest;
    const int P = model_sharing(m, r->comm)->size, grid = r->comm->size / P, zero = r->o.zero;
    const double moments = s->moments * (zero > 0 ? P : 1), whole = remedy_parameters_(m);
    const double shared = s->gradients * (zero == 2 ? P : 1) + moments;  // by --zero 2
    const double level = moments / (2.0 + r->has_masters + (r->o.ema > 0.0f));  // one gradient: no grid has less
    const int takes_zero_2 = r->o.optimizer != OPTIMIZER_MUON;
    const double zero_1 = s->n_here * (each - s->moments + s->moments / P);  // without the batch
    char ways[64], options[64], with[72] = "";
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
    const char* besides = remedy_besides_(options, sizeof options, r, sparing);
    if (besides) { snprintf(with, sizeof with, "%s with ", besides); }
    const double parts = ceil(shared / (left - s->parameters));  // of gradients and moments
    const int helps = takes_zero_2 && left > s->parameters && parts <= (double)REMEDY_MOST && (zero < 2 || parts > P);
    const int unit = remedy_unit_(r), by_zero = helps ? (int)ceil(parts * grid / unit) * unit : 0;
    const double all = whole + shared * grid, least = ceil((whole + (moments + level) * grid) / s->free);
    const int least_zero = helps ? (int)ceil((moments + level) / (left - s->parameters)) * grid : 0;
    if (remedy_planned_(text, r, s, besides, least_zero, (int)fmin(least, REMEDY_MOST))) { return text; }
    if (helps) {
        if (parts <= P && s->n_here <= 1) { snprintf(text, REMEDY_BYTES, "%s--zero 2", with); }
        else {
            snprintf(text, REMEDY_BYTES, "%s%s%s", with, zero < 2 ? "--zero 2 on " : "", remedy_places_(s, by_zero).s);
        }
        return text;
    }
    const double W = remedy_ranks_(r, left > 0.0 ? ceil(all / left) : INFINITY), least_batch = batch / r->o.batch_size;
    const double left_of_row = s->free - s->rest - least_batch;  // with one row
    const int n_ways = remedy_of_sharing_(ways, sizeof ways, r), fits_none = W > (double)REMEDY_MOST;
    const int of_batch = fits_none && (left_of_row <= 0.0 || ceil(all / left_of_row) <= (double)REMEDY_MOST);
    if (of_batch) {
        snprintf(text, REMEDY_BYTES, "%sa smaller %s--seq-len, and then %s", with,
                 r->o.batch_size > 1 ? "--batch-size or " : "", n_ways > 0 ? ways : "a smaller model");
    } else if (fits_none || n_ways == 0) {
        return "a smaller model";
    } else {
        snprintf(text, REMEDY_BYTES, "%s%s on %s (--plan W says what W ranks take), or a smaller model", with, ways,
                 remedy_places_(s, W).s);
    }
    return text;
}
#endif  // LLMC_REMEDY_H
