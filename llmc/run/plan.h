/*
--plan W: what a run would take on W ranks, said by one process that starts none of them, before anybody has rented the
machines: the box of rank 0, then for each place (--pp) the memory of a rank and what it sends, and with --plan-card
whether that fits and how long an update takes.
    plan_begin    as which rank this process plans: rank 0; for the first rank of each further place a process of its
                  own
    plan_memory   bytes of memory that a rank may take: of the card; 0: not known. Without --plan what is free here
    plan_say      the places and the card; status 1 if they do not fit
Every figure of memory and bytes is what the ranks themselves would have in their boxes: a process opens options, data
and model as its rank would, in a world where nothing travels (COMM_PLAN in comm.h). Time is an estimate, of
    products   FLOPs of the most costly place in the micro-batches of a line, at --plan-rate of the card's peak
    waiting    of stages for each other: pp_idle
    sending    bytes over the link of a card: that of a machine where all ranks of the group fit in one, else its share
               of the network. Groups are those of doc/ranks.md: ranks of a stage follow each other
and what is sent is added, as if nothing of it happened beside products. Left out: what --recompute computes again,
everything that is no product, latencies, experts that are busier than others, links that are busy with others.
Explained in doc/plan.md
*/
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H
#include "../ranks/context_parallel.h"  // CP_BY_HEADS
#include "cards.h"     // Card, cards
#include "peak.h"      // memory_available
#include "pipeline.h"  // pp_shape, pp_idle
#include "remedy.h"    // remedy_of_memory
#include <sys/prctl.h>
#include <sys/wait.h>

// GiB that programs on a card cannot have: contexts, libraries, NCCL's buffers. A guess, none of it is planned
#define PLAN_RESERVE 2.0

// by its whole name
static inline const Card* plan_card(const Run* r) {
    int n;
    const Card* all = cards(&n);
    for (int i = 0; i < n; i++) {
        if (strcasecmp(all[i].name, r->o.plan_card) == 0) { return &all[i]; }
    }
    return NULL;
}

// the card's name is one of the table, and of one whose links it has
static inline void plan_check_card_(const Run* r) {
    char known[256] = "";
    int n;
    const Card *all = cards(&n), *card = plan_card(r);
    if (!*r->o.plan_card) { return; }
    for (int i = 0; i < n; i++) {
        if (all[i].in_machine == 0) { continue; }
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", *known ? ", " : "", all[i].name);
    }
    if (!card || card->in_machine == 0) { options_fail("plan-card", "%s: expected one of %s", r->o.plan_card, known); }
    if (!r->trainer->on_gpus) {
        options_fail("plan-card", "is for trainers on GPUs, and %s is for CPUs alone: leave it out", r->trainer->name);
    }
    if (FLOATX_IS_FLOAT) {
        options_fail("plan-card", "is for a build in bf16: make setup-cuda && make %s; no GPU is needed to plan",
                     r->trainer->on_gpus);
    }
}

// places of ranks with other layers, as --pp asks for; 1 where it does not divide the ranks, as its own check will say
static inline int plan_places_(const Run* r) { return run_divisor(r, "pp", r->o.plan); }

static inline void plan_begin(Run* r) {
    options_refuse(r->place.size > 1, "plan", "is said by one process: start it without launch, srun or mpirun, and "
                   "without RANK and WORLD_SIZE");
    options_refuse(run_is_generating(r) || *r->o.probe, "plan", "is for training and --eval-only");
    options_refuse(r->o.resume || r->o.go_on, "plan", "is for a run that begins: give --from instead");
    options_refuse(run_is_typed(r, "dry-run") && !r->o.dry_run, "dry-run", "--plan W computes nothing: leave it out");
    plan_check_card_(r);
    r->o.dry_run = 1;
    r->place.size = r->o.plan;
    r->place.is_plan = 1;
    r->place.local_size = 1;  // as if each had a machine, or a card, of its own
    r->plan_out = -1;
    fflush(stdout);
    for (int s = 1, n = plan_places_(r); s < n; s++) {
        int ends[2];
        r->plan_said[s] = tmpfile();
        if (pipe(ends) != 0 || !r->plan_said[s]) { fail_run("--plan: no pipe: %s", strerror(errno)); }
        const pid_t child = fork();
        if (child < 0) { fail_run("--plan: no process for place %d: %s", s, strerror(errno)); }
        r->plan_in[s] = ends[0];
        if (child > 0) {
            close(ends[1]);
            continue;
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);  // who stops the plan stops all of it
        r->place.rank = r->o.plan / n * s;
        r->plan_out = ends[1];
        dup2(fileno(r->plan_said[s]), STDERR_FILENO);  // rank 0 finds most errors, too
        return;
    }
}

static inline double plan_memory(const Run* r) {
    const Card* card = plan_card(r);
    if (r->o.plan == 0) { return memory_available(); }
    return card ? (card->gib - PLAN_RESERVE) * 1073741824.0 : 0.0;
}

// GB/s of a card whose ranks first, first + step, ... talk with those so far behind them: is any pair on two machines?
static inline double plan_link_(const Card* card, int n_ranks, int step, int distance) {
    for (int first = 0; first + distance < n_ranks; first += step) {
        if (first / card->in_machine != (first + distance) / card->in_machine) { return card->gb_network; }
    }
    return card->gb_machine;
}

// "1.91 s", "0.0036 s"
static inline ShortText plan_seconds_(double seconds) {
    ShortText out;
    snprintf(out.s, sizeof out.s, seconds >= 0.1 ? "%.2f s" : "%.2g s", seconds);
    return out;
}

static inline void plan_row_time_(const char* name, double n_bytes, double gb, double seconds) {
    if (seconds < 1e-6) { return; }
    box_row(name, "%s: %s from a card, at %g GB/s", plan_seconds_(seconds).s, format_bytes(n_bytes).s, gb);
}

// FLOP for a token as if each were divided by all ranks that compute it together. Attention is what grows with a row: a
// third of it forward. Where --tp has more ranks than there are heads of keys, each computes the way back of all g that
// share one (shared_keys.h), and with --cp-by heads forward once more
static inline double plan_flops_per_token_(const Run* r) {
    const double flops = r->trainer->flops_per_token(r), g = r->model->keys.size;
    Run short_row = *r;
    short_row.T = 1;
    if (!model_shares_keys(r->model)) { return flops; }
    const double attention = flops - r->trainer->flops_per_token(&short_row);
    return flops + attention * (2.0 * (g - 1.0) + (model_has_cp(r->model) && r->model->cp.by == CP_BY_HEADS) * g) / 3.0;
}

// all: of each place
static inline void plan_box_time_(const Run* r, const Planned* all) {
    const Model* m = r->model;
    const Card* card = plan_card(r);
    const int n_places = m->pp.size, each = r->o.plan / n_places;
    const PpShape shape = pp_shape(r);
    const double of_leaf = (double)r->o.batch_size * r->T, tokens = of_leaf * r->n_leaves;
    const double flops_per_token = r->trainer->flops_per_token(r), flops = flops_per_token * tokens;
    Planned most = all[0];
    for (int s = 1; s < n_places; s++) {
        most.data = fmax(most.data, all[s].data);
        most.streams = fmax(most.streams, all[s].streams);
        most.rows = fmax(most.rows, all[s].rows);
        most.parts = fmax(most.parts, all[s].parts);
        most.keys = fmax(most.keys, all[s].keys);
        most.share = fmax(most.share, all[s].share);
    }
    const double rate = r->o.plan_rate * 1e12 * card->tflops;
    const double products =
        plan_flops_per_token_(r) * of_leaf * shape.m * most.share / rate / (m->tp.size * m->cp.size);
    const double idle = n_places > 1 ? products * pp_idle(&shape) / (1.0 - pp_idle(&shape)) : 0.0;
    const int W = r->o.plan, G = m->ranks.ep.size, T = m->tp.size;  // ranks that share experts, matrices
    const int C = T * m->cp.size;                                // that compute a micro-batch
    const double gb_around = m->pp.n_chunks > 1 ? plan_link_(card, W, 1, W - each) : INFINITY;  // from last to first
    const double gb_data = plan_link_(card, W, each, each - T);
    const double gb_streams = fmin(plan_link_(card, W, 1, each), gb_around);
    const double gb_rows = plan_link_(card, W, G, G - 1), gb_parts = plan_link_(card, W, T, T - 1),
                 gb_keys = plan_link_(card, W, C, C - T);
    const double data = most.data / (1e9 * gb_data), streams = most.streams / (1e9 * gb_streams);
    const double rows = most.rows / (1e9 * gb_rows), parts = most.parts / (1e9 * gb_parts),
                 keys = most.keys / (1e9 * gb_keys);
    const double update = products + idle + data + rows + parts + keys + streams;
    const int size = flops < 1e15 ? 0 : flops < 1e18 ? 1 : 2;
    box_row("products", "%s%s, at %.0f%% of %g TFLOP/s; in all %.3g %cFLOP on %d x %s", plan_seconds_(products).s,
            n_places > 1 ? " in the place with most" : "", 100.0 * r->o.plan_rate, card->tflops,
            flops / (1e12 * pow(1000.0, size)), "TPE"[size], W, card->name);
    if (idle > 0.0) { box_row("stages wait", "%s", plan_seconds_(idle).s); }
    plan_row_time_("gradients", most.data, gb_data, data);
    plan_row_time_("streams", most.streams, gb_streams, streams);
    plan_row_time_("rows of experts", most.rows, gb_rows, rows);
    plan_row_time_("parts of matrices", most.parts, gb_parts, parts);
    plan_row_time_("keys and values", most.keys, gb_keys, keys);
    box_row("an update", "%s for %s tokens, if nothing is sent beside products and nothing computed again",
            plan_seconds_(update).s, format_count(tokens).s);
    box_row("tokens a second", "%s, %s with each card: %.0f%% of its peak", format_count(tokens / update).s,
            format_count(tokens / update / r->o.plan).s,
            100.0 * flops / update / r->o.plan / (1e12 * card->tflops));
}

// the stages one below the other; with --pp-chunks those of a place in one line
static inline void plan_print_places_(const Run* r, const Planned* all, double most) {
    const int n = r->model->pp.size, has_chunks = r->model->pp.n_chunks > 1, is_large = most >= 1073741824.0;
    const double unit = is_large ? 1073741824.0 : 1048576.0;
    int width = 7;
    for (int s = 0; s < n; s++) { width = (int)strlen(all[s].layers) > width ? (int)strlen(all[s].layers) : width; }
    const char *in = is_large ? "GiB" : "MiB", *what = has_chunks ? "place" : "stage";
    if (r->o.plan > n) { printf("%s for each of %d ranks of a %s:\n", in, r->o.plan / n, what); }
    else { printf("%s for the rank of each %s:\n", in, what); }
    printf("%5s %*s %10s %9s %8s %11s %7s %8s %7s\n", what, width, "layers", "parameters", "gradients", "moments",
           "activations", "rest", "memory", "sends");
    for (int s = 0; s < n; s++) {
        const Planned* p = &all[s];
        printf("%5d %*s %10.2f %9.2f %8.2f %11.2f %7.2f %8.2f %7.2f\n", s, width, p->layers, p->parameters / unit,
               p->gradients / unit, p->moments / unit, p->activations / unit, p->rest / unit, p->memory / unit,
               (p->data + p->streams + p->rows + p->parts + p->keys) / unit);
    }
    printf("memory of each rank: %s at most\n", format_bytes(most).s);
}

// a preset takes the vocabulary of its text's tokenizer: with bytes it is another model than the one of that name
static inline void plan_warn_of_vocabulary_(const Run* r) {
    const int usual = r->trainer->usual_V, is_ours = !strcmp(r->o.model, "tiny") || !strcmp(r->o.model, "small");
    if (!*r->o.model || is_ours || r->V >= usual / 2) { return; }
    warn_line("--model %s has the %d tokens of the tokenizer here, and %d without --train: leave that out, or give "
              "shards of its tokens, or --tokenizer FILE", r->o.model, r->V, usual);
}

// once the box is printed. The process of a further place ends here
static inline void plan_say(Run* r) {
    const int n = r->model->pp.size;
    const Card* card = plan_card(r);
    Planned all[PP_MAX] = {r->planned};
    const Planned* largest = all;
    if (r->plan_out >= 0) { exit(write(r->plan_out, &r->planned, sizeof r->planned) != sizeof r->planned); }
    plan_warn_of_vocabulary_(r);
    for (int s = 1; s < n; s++) {
        if (read(r->plan_in[s], &all[s], sizeof all[s]) != sizeof all[s]) {
            char why[512] = "";
            rewind(r->plan_said[s]);
            if (!fgets(why, sizeof why, r->plan_said[s])) { why[0] = '\0'; }
            fail_run("--plan: no plan of place %d: %s", s, strtok(why, "\n"));
        }
        fclose(r->plan_said[s]);
        close(r->plan_in[s]);
        largest = all[s].memory > largest->memory ? &all[s] : largest;
    }
    const double most = largest->memory;
    while (wait(NULL) > 0) {}
    if (n > 1) { plan_print_places_(r, all, most); }
    if (!card) { return; }
    if (n > 1) { box_line(); }
    box_row("memory", "%s at most of %g - %g GiB: %s", format_bytes(most).s, card->gib, PLAN_RESERVE,
            most <= plan_memory(r) ? "it fits" : "it does not fit");
    if (run_is_training(r)) { plan_box_time_(r, all); }
    box_line();
    if (most > plan_memory(r)) {
        char text[REMEDY_BYTES];
        const Shortage s = shortage_of(largest, plan_memory(r), "card", 1);
        fail_run("needs %s of memory, a card has %s: try %s", format_bytes(most).s, format_bytes(plan_memory(r)).s,
                 remedy_of_memory(text, r, &s));
    }
}
#endif  // LLMC_PLAN_H
