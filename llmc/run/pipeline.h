/*
--pp and --pp-chunks of a trainer whose passes can be cut between two layers (Trainer.turn and what follows it): what
the options ask for, and the micro-batches of an update on their way through the stages.
    pp_option, pp_chunks_option   rows of the table
    pp_begin     in Trainer.choose, once the model has its layout and before --ep divides experts: which ranks have
                 which layers; pp_begin_between: of a model that can be cut in front of some layers alone
    pp_check_batches   in Trainer.check: are there as many as --pp-chunks needs?
    pp_slots     the layers of this rank; in training for the micro-batches whose forward pass is over before the
                 backward pass of the first
    pp_kept      micro-batches whose rows are needed at once
    pp_rooms_bytes, pp_rooms_open, pp_rooms_close   with --pp-chunks, memory for gradients that wait; with --tp also
                 for streams, for all layers write theirs to one place
    pp_leaves    the micro-batches of this rank in the order of 1F1B (pipeline_schedule.h)
    pp_box       rows of the box
    pp_own_batches   micro-batches of an update of which this rank computes something
    pp_sum       of all stages of this rank; pp_who: whose it is, "each" or "rank 0"
A rank goes through its operations of the schedule, and between them through its messages: of those before the tick of
an operation it waits for the one that this needs.
*/
#ifndef LLMC_PIPELINE_H
#define LLMC_PIPELINE_H
#include "../core/tensor_arena.h"        // ArenaSlots
#include "../ranks/pipeline_link.h"      // PpStreams, pp_swap
#include "../ranks/pipeline_schedule.h"  // PpSchedule, pp_messages
#include "trainer.h"                     // Run, run_is_typed

// ---- the option ----

static inline Option pp_option(int* size) {
    const Option row = {"machine", "pp", "", OPTION_INT, size, "1", 1, PP_MAX, "P",
                        "cut the layers into P stages, each on ranks of its own, through which micro-batches go one "
                        "after the other: needs a multiple of P ranks, and --grad-accum of a few times the ranks to "
                        "keep them busy. The result does not depend on it", 0};
    return row;
}

static inline Option pp_chunks_option(int* n) {
    const Option row = {"machine", "pp-chunks", "", OPTION_INT, n, "1", 1, PP_CHUNKS_MAX, "V",
                        "with --pp P: cut the layers into P*V stages, of which each rank has V, from all over the "
                        "model. Ranks wait for each other V times less, and send V times as much; needs a multiple of "
                        "P micro-batches in an update. The result does not depend on it", 0};
    return row;
}

// Multiplications of a position with the matrices of each layer: cost (L). What stands before layer 0 costs nothing: a
// tower's is a matter of the data. active: the share of experts that a position takes
static inline void pp_costs_(double* cost, int L, const Model* m, double active) {
    for (int l = 0; l < L; l++) { cost[l] = 0.0; }
    for (int i = 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        if (t->is_before || (t->is_behind && !m->learns_mtp)) { continue; }
        for (int l = 0; l < t->layers; l++) {
            if (t->on_disk == VECTOR || !tensor_has_layer(t, l)) { continue; }
            cost[l] += (double)tensor_layer_elements(t) * (t->experts > 0 ? active : 1.0);
        }
    }
}

// of the multiplications of all stages those of this rank; cost, head: as in pp_cut
static inline double pp_work_of_(const PpRanks* x, const double* cost, double head) {
    double own = pp_has_last(x) ? head : 0.0, all = head;
    for (int l = 0; l < x->begin[x->n_stages]; l++) {
        all += cost[l];
        own += pp_place_of(x, pp_stage_of(x, l)) == x->place ? cost[l] : 0.0;
    }
    return own / all;
}

// once the stages are known to fit
// pieces: of layers, into which stages can be cut; what: their name
static inline void pp_begin_chunks_(Run* r, int size, int* n, int pieces, const char* what) {
    const int most = (pieces < PP_MAX ? pieces : PP_MAX) / size;
    if (!run_is_typed(r, "pp-chunks") && (size == 1 || *n > most)) { *n = 1; }
    options_refuse(*n > 1 && size == 1, "pp-chunks", "is for --pp 2 and more");
    ranks_same(r->comm, "number of chunks (--pp-chunks)", (uint64_t)*n);
    if (*n > most) {
        options_fail("pp-chunks", "%d: expected at most %d, for %d %s on %d ranks (--pp) and at most %d stages in all",
                     *n, most, pieces, what, size, PP_MAX);
    }
}

// head: multiplications of a position behind all layers; C: channels of the stream. active: the share of experts that a
// position takes. shared: the field of the embedding where the last stage reads it, too, else TENSOR_NO_FIELD. starts
// (layers): before which a stage may begin; NULL: all. A number that was not typed but comes from an earlier run is
// given up where it does not fit
static inline void pp_begin_between(Run* r, int* size, int* n_chunks, double head, int C, double active, size_t shared,
                                    const char* starts) {
    Model* m = r->model;
    const int P = r->comm->size, is_typed = run_is_typed(r, "pp"), n = m->n_table;
    const int L = tensors_layers_between(m->table, n, 0), end = tensors_layers_between(m->table, n, 1);
    const int is_alone = run_is_generating(r) || *r->o.probe, pieces = pp_starts(starts, L);
    const char* what = pieces < L ? "layers with an indexer" : "layers";
    const int fits = P / run_kept_cp(r, P) % *size == 0 && *size <= pieces && !is_alone;
    if (!is_typed && (!fits || r->o.verify_every > 0 || r->o.noise_scale > 0)) { *size = 1; }
    options_refuse(is_alone && *size > 1, "pp", "is for training and --eval-only: all else is one rank's work");
    ranks_same(r->comm, "number of stages (--pp)", (uint64_t)*size);
    if (*size > pieces) {
        options_fail("pp", "%d: expected at most one stage for each of the %d %s", *size, pieces, what);
    }
    if (P % *size != 0) {
        options_fail("pp", P == 1 ? "%d: expected as many ranks or a multiple, found %d: start with %s"
                                  : "%d: expected a number that divides the ranks, %d: %s", *size, P,
                     run_ranks_remedy(r).s);
    }
    pp_begin_chunks_(r, *size, n_chunks, pieces, what);
    if (*size == 1) { return; }
    options_refuse(r->o.verify_every > 0, "verify-every", "is not for --pp");
    options_refuse(r->o.noise_scale > 0, "noise-scale", "is not for --pp");
    options_refuse(!run_will_train(r) && *r->o.export_hf, "export-hf", "with --pp only at the end of training: else by "
                   "one process, --from RUN --export-hf DIR");
    double *cost = (double*)malloc_check(sizeof(double) * (size_t)end, "layers"), behind = head;
    int begin[PP_MAX + 1];
    pp_costs_(cost, end, m, active);
    for (int l = L; l < end; l++) { behind += cost[l]; }
    pp_cut_between(begin, *size * *n_chunks, cost, starts, L, behind);
    begin[*size * *n_chunks] = end;
    model_begin_pp(m, r->comm, *size, *n_chunks, begin, shared, C);
    m->pp.n_cut = L;
    m->pp.work = pp_work_of_(&m->pp, cost, head);
    free(cost);
}

static inline void pp_begin(Run* r, int* size, int* n_chunks, double head, int C, double active, size_t shared) {
    pp_begin_between(r, size, n_chunks, head, C, active, shared, NULL);
}

// among which the micro-batches of an update are dealt out
static inline int pp_lines(const Run* r) { return model_dealing(r->model, r->comm)->size; }

// the stages, and m micro-batches that go through them
static inline PpShape pp_shape_of_(const Run* r, int m) {
    const PpShape s = {r->model->pp.size, r->model->pp.n_chunks, m};
    return s;
}

// of the line that has most of them
static inline PpShape pp_shape(const Run* r) { return pp_shape_of_(r, (int)ceil_div(r->n_leaves, pp_lines(r))); }

// in training each chunk has its own slots; other passes go through all layers of this rank with one
static inline ArenaSlots pp_slots(const Run* r, Purpose purpose) {
    const Model* m = r->model;
    ArenaSlots s;
    memset(&s, 0, sizeof s);
    if (!model_has_pp(m)) { return s; }
    s.n = 1, s.held[0] = m->held_layers, s.slots[0] = 1;
    if (purpose != TO_TRAIN || !run_is_training(r)) { return s; }
    PpSchedule schedule;
    pp_open(&schedule, pp_shape(r));
    pp_held_by(&schedule, m->pp.place, s.slots);
    pp_free(&schedule);
    for (s.n = 0; s.n < m->pp.n_chunks; s.n++) { s.held[s.n] = m->chunk_layers[s.n]; }
    return s;
}

// micro-batches whose rows are needed at once: those that the first chunk holds, for it begins and ends them
static inline int pp_kept(const Run* r) {
    const ArenaSlots s = pp_slots(r, TO_TRAIN);
    return s.n > 0 ? s.slots[0] : 1;
}

static inline void pp_check_batches(const Run* r) {
    const int P = r->model->pp.size, n_lines = pp_lines(r);
    if (r->model->pp.n_chunks == 1 || !run_is_training(r) || r->n_leaves % (P * n_lines) == 0) { return; }
    if (!run_is_typed(r, "pp-chunks")) {
        options_fail("pp-chunks", "%d, asked for earlier, needs a multiple of %d as micro-batches of an update, "
                     "found %d: give --pp-chunks 1, which changes no bit", r->model->pp.n_chunks, P * n_lines,
                     r->n_leaves);
    }
    if (n_lines == 1) {
        options_fail("pp-chunks", "expected a multiple of --pp %d as micro-batches of an update, found %d: give "
                     "--grad-accum %d, or --pp-chunks 1", P, r->n_leaves, (int)ceil_div(r->n_leaves, P) * P);
    }
    options_fail("pp-chunks", "expected a multiple of %d as micro-batches of an update, --pp %d in each of %d lines, "
                 "found %d: give --grad-accum %d, or --pp-chunks 1", P * n_lines, P, n_lines, r->n_leaves,
                 (int)ceil_div(r->n_leaves, P * n_lines) * P * n_lines);
}

// who sends what rank 0 does: the others may have other layers, or a micro-batch more
static inline const char* pp_who(const Run* r) {
    if (model_has_pp(r->model)) { return "rank 0"; }
    return model_leaves(r->model, r->n_leaves) % model_sharing(r->model, r->comm)->size == 0 ? "each" : "rank 0";
}

// "at most ": of conversations a head that ranks share (--tp) leaves out stretches of positions without a target, and
// which rows come when is not planned
static inline const char* pp_at_most(const Run* r) {
    const Model* m = r->model;
    const int has_head = !model_has_pp(m) || pp_has_last(&m->pp);
    return model_has_tp(m) && has_head && data_is_chat(&r->data) ? "at most " : "";
}

// micro-batches of an update of which this rank computes something, or with --cp its share of them
static inline int pp_own_batches(const Run* r) {
    const Comm* sharing = model_sharing(r->model, r->comm);
    return dp_share_of_leaves(model_leaves(r->model, r->n_leaves), sharing->rank, sharing->size, r->o.zero);
}

// of every stage of this rank; f asks about the one whose turn it is
static inline double pp_sum(const Run* r, double (*f)(const Run* r)) {
    double sum = 0.0;
    r->model->pp.is_alone = pp_own_batches(r) == 1;
    for (int c = r->model->pp.n_chunks - 1; c >= 0; c--) {
        model_turn_to(r->model, c);
        sum += f(r);
    }
    return sum;
}

// bytes of the stream of a micro-batch
static inline double pp_stream_bytes(const Run* r) {
    return (double)run_positions(r) * r->model->pp.channels * (double)r->trainer->stored_bytes;
}

// with B rows: a gradient that waits, as far as another part of its room
static inline size_t pp_gradient_room_(const Run* r, int B) {
    return ((size_t)pp_stream_bytes(r) / (size_t)r->o.batch_size * (size_t)B + 63) / 64 * 64;
}

// and what routers have counted
static inline size_t pp_room_bytes_(const Run* r, int B) {
    return pp_gradient_room_(r, B) + (sizeof(float) * (size_t)r->model->n_numbers + 63) / 64 * 64;
}

// rooms for streams that are not yet sent, behind those for gradients
static inline int pp_unsent_rooms_(const Run* r, const PpSchedule* schedule) {
    const PpRanks* x = &r->model->pp;
    return x->n_chunks > 1 && model_has_tp(r->model) ? pp_unsent(schedule, x->place) : 0;
}

static inline double pp_rooms_bytes(const Run* r, int B) {
    PpSchedule schedule;
    if (r->model->pp.n_chunks == 1) { return 0.0; }
    pp_open(&schedule, pp_shape(r));
    const int n = pp_rooms(&schedule.shape, 1) + pp_unsent_rooms_(r, &schedule);
    pp_free(&schedule);
    return (double)n * (double)pp_room_bytes_(r, B);
}

static inline void pp_rooms_open(Run* r) {
    const size_t n_bytes = (size_t)pp_rooms_bytes(r, r->o.batch_size);
    if (n_bytes > 0) { r->returned = (char*)device_alloc(n_bytes, "gradients of streams"); }
}

static inline void pp_rooms_close(Run* r) {
    if (r->returned) { device_release(r->returned, (size_t)pp_rooms_bytes(r, r->o.batch_size)); }
    r->returned = NULL;
}

// "0-3, 7" behind text: layers of a stage
static inline void pp_name_layers(char* text, size_t n_bytes, const PpRanks* x, int stage, const char* between) {
    const size_t n = strlen(text);
    const int first = x->begin[stage], end = x->begin[stage + 1], last = (end < x->n_cut ? end : x->n_cut) - 1;
    between = n > 0 ? between : "";
    if (first == last) { snprintf(text + n, n_bytes - n, "%s%d", between, first); }
    else { snprintf(text + n, n_bytes - n, "%s%d-%d", between, first, last); }
}

static inline void pp_box(const Run* r) {
    const PpRanks* x = &r->model->pp;
    char text[1024] = "";
    if (!model_has_pp(r->model)) { return; }
    for (int s = 0; s < x->n_stages && strlen(text) < sizeof text - 32; s++) {
        pp_name_layers(text, sizeof text, x, s, ", ");
    }
    box_row("stages", "%d: layers %s", x->n_stages, text);
    if (x->n_chunks > 1) { box_row("  chunks", "%d on each rank, %d stages apart", x->n_chunks, x->size); }
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
    PpSchedule schedule;        // of this line
    PpMessage* messages;        // of this rank
    int n_messages, next;
    ArenaSlots slots;
    PpStreams* at;              // of each slot
    PpSwap* came;               // of each slot: the last one with which a stream has come
    PpSwap* returned;           // of each room: with which a gradient has
    int n_rooms, n_returned, n_taken;  // gradients that have come, and that a backward pass has taken
    int n_unsent, n_made, n_sent;       // rooms for streams; those that were put there, and of which one was sent
    PpSwap sent_stream, sent_gradient;  // the last one
    int n_kept;
    const int **inputs, **targets;  // (n_kept), of the micro-batches that are under way
} PpWork;

// room i for gradients: with one chunk that which backward reads
static inline char* pp_room_(const PpWork* w, int i) {
    const Run* r = w->r;
    return r->returned ? r->returned + pp_room_bytes_(r, r->o.batch_size) * (size_t)i : (char*)w->at[0].gradient;
}

// ... and for what the routers have counted
static inline char* pp_number_room_(const PpWork* w, int i) {
    const Run* r = w->r;
    return r->returned ? pp_room_(w, i) + pp_gradient_room_(r, r->o.batch_size) : (char*)w->at[0].returned;
}

static inline char* pp_unsent_room_(const PpWork* w, int i) { return pp_room_(w, w->n_rooms + i % w->n_unsent); }

static inline int pp_slot_(const PpWork* w, int chunk, int micro) {
    return arena_first_slot(&w->slots, chunk) + micro % w->slots.slots[chunk];
}

// what goes with one swap
typedef struct {
    const void *send, *numbers_out;
    void *recv, *numbers_in;
} PpCargo;

// a gradient that nothing below asks for does not go
static inline int pp_goes_(const PpWork* w, const PpMessage* a) {
    const int stage = a->chunk * w->x->size + w->x->place;  // it comes from the one behind, or goes from here
    return a->kind == PP_STREAM || w->r->model->lowest < w->x->begin[a->sends ? stage : stage + 1];
}

static inline void pp_load_(PpWork* w, PpCargo* cargo, const PpMessage* a) {
    const PpStreams* e = &w->at[pp_slot_(w, a->chunk, a->micro)];
    const int room = w->n_returned % w->n_rooms;
    if (a->kind == PP_STREAM && a->sends) {
        cargo->send = w->n_unsent > 0 ? pp_unsent_room_(w, w->n_sent++) : (char*)e->out;
        cargo->numbers_out = e->numbers;
    }
    else if (a->kind == PP_STREAM) { cargo->recv = e->in, cargo->numbers_in = e->numbers; }
    else if (a->sends) { cargo->send = e->gradient, cargo->numbers_out = e->returned; }
    else { cargo->recv = pp_room_(w, room), cargo->numbers_in = pp_number_room_(w, room); }
}

static inline void pp_note_(PpWork* w, const PpMessage* a, PpSwap swap) {
    if (a->kind == PP_STREAM && a->sends) { w->sent_stream = swap; }
    else if (a->kind == PP_STREAM) { w->came[pp_slot_(w, a->chunk, a->micro)] = swap; }
    else if (a->sends) { w->sent_gradient = swap; }
    else { w->returned[w->n_returned++ % w->n_rooms] = swap; }
}

// the messages before this time. A stream and a gradient that go at the same time between the same two are one swap
static inline void pp_exchange_(PpWork* w, int time) {
    Run* r = w->r;
    while (w->next < w->n_messages && w->messages[w->next].time < time) {
        const PpMessage *a = &w->messages[w->next++], *b = a + 1;
        PpCargo cargo = {NULL, NULL, NULL, NULL};
        if (a->kind == PP_TIE) {
            model_send_shared(r->model, a->micro, &r->dev);
            continue;
        }
        if (a->kind == PP_ROWS || a->kind == PP_ROWS_BACK) {
            r->trainer->swap_rows(r, a->micro % w->n_kept, a->kind == PP_ROWS_BACK);
            continue;
        }
        const int is_swap = w->next < w->n_messages && a->kind == PP_STREAM && b->kind == PP_GRADIENT &&
                            b->edge == a->edge && b->time == a->time && pp_goes_(w, b);
        if (!pp_goes_(w, a)) { continue; }
        pp_load_(w, &cargo, a);
        if (is_swap) { pp_load_(w, &cargo, b); }
        if (!r->returned && cargo.recv == w->at[0].gradient) { pp_wait(&w->sent_gradient, &w->at[0], &r->dev); }
        const PpSwap swap = pp_swap(a->edge == w->x->place ? w->x->next : w->x->previous, cargo.send,
                                    cargo.numbers_out, cargo.recv, cargo.numbers_in, &w->at[0], &r->dev);
        pp_note_(w, a, swap);
        if (is_swap) { pp_note_(w, b, swap); }
        w->next += is_swap;
    }
}

// with --tp the stream behind this stage goes where no later layer writes
static inline void pp_keep_stream_(PpWork* w, const PpStreams* e) {
    if (w->n_unsent == 0 || pp_is_last(w->x)) { return; }
    pp_wait(&w->sent_stream, e, &w->r->dev);
    device_copy(pp_unsent_room_(w, w->n_made++), e->out, e->n_bytes, &w->r->dev);
}

// the gradient behind this stage, where backward reads it
static inline void pp_take_gradient_(PpWork* w) {
    const Run* r = w->r;
    const PpStreams* e = &w->at[0];
    const int room = w->n_taken % w->n_rooms;
    if (pp_is_last(w->x) || r->model->lowest >= pp_end_layer(w->x)) { return; }
    pp_wait(&w->returned[room], e, &r->dev);
    w->n_taken++;
    if (!r->returned) { return; }
    device_copy(e->gradient, pp_room_(w, room), e->n_bytes, &r->dev);
    if (e->n_number_bytes > 0) { device_copy(e->returned, pp_number_room_(w, room), e->n_number_bytes, &r->dev); }
}

static inline void pp_compute_(PpWork* w, const PpOp* op, float dloss,
                               void (*batch)(Run* r, int k, const int** inputs, const int** targets)) {
    Run* r = w->r;
    const int slot = pp_slot_(w, op->chunk, op->micro), k = op->micro, kept = k % w->n_kept;
    model_turn_to(r->model, op->chunk);
    r->trainer->turn(r, slot);
    if (r->trainer->turn_images) { r->trainer->turn_images(r, kept); }
    // of --tp, where all layers write to one stream
    if (model_has_tp(r->model) && w->n_unsent == 0) { pp_wait(&w->sent_stream, &w->at[0], &r->dev); }
    if (!op->is_backward) {
        if (op->chunk == 0) { batch(r, k, &w->inputs[kept], &w->targets[kept]); }
        pp_wait(&w->came[slot], &w->at[0], &r->dev);
        r->trainer->forward_leaf(r, k, w->inputs[kept], w->targets[kept], r->o.batch_size, r->T);
        pp_keep_stream_(w, &w->at[slot]);
    } else {
        pp_wait(&w->sent_gradient, &w->at[0], &r->dev);
        pp_take_gradient_(w);
        r->trainer->backward_leaf(r, k, w->inputs[kept], w->targets[kept], dloss, r->o.batch_size, r->T);
    }
    comm_watch(r->comm, HERE);
}

static inline void pp_work_open_(PpWork* w, Run* r) {
    const PpRanks* x = &r->model->pp;
    memset(w, 0, sizeof *w);
    w->r = r;
    w->x = x;
    w->slots = pp_slots(r, TO_TRAIN);
    w->n_kept = w->slots.slots[0];
    pp_open(&w->schedule, pp_shape_of_(r, model_batches(r->model)));
    w->schedule.has_rows = x->row_bytes[0] > 0.0;
    w->messages = pp_messages(&w->schedule, x->place, &w->n_messages);
    w->n_rooms = pp_rooms(&w->schedule.shape, 1);
    w->n_unsent = pp_unsent_rooms_(r, &w->schedule);
    const size_t n_slots = (size_t)arena_slots(&w->slots), n_swaps = n_slots + (size_t)w->n_rooms;
    w->at = (PpStreams*)malloc_check(sizeof(PpStreams) * n_slots, "pipeline");
    w->came = (PpSwap*)memset(malloc_check(sizeof(PpSwap) * n_swaps, "pipeline"), 0, sizeof(PpSwap) * n_swaps);
    w->returned = w->came + n_slots;
    w->inputs = (const int**)malloc_check(2 * sizeof(int*) * (size_t)w->n_kept, "pipeline");
    w->targets = w->inputs + w->n_kept;
    for (int c = 0, slot = 0; c < x->n_chunks; c++) {
        model_turn_to(r->model, c);
        for (int i = 0; i < w->slots.slots[c]; i++, slot++) {
            r->trainer->turn(r, slot);
            w->at[slot] = r->trainer->streams(r, run_positions(r));
        }
    }
}

static inline void pp_work_close_(PpWork* w) {
    pp_free(&w->schedule);
    free(w->messages);
    free(w->at);
    free(w->came);
    free((void*)w->inputs);
}

// batch: gives micro-batch k, which stays until pp_kept others were given
static inline void pp_leaves(Run* r, float dloss,
                             void (*batch)(Run* r, int k, const int** inputs, const int** targets)) {
    PpWork w;
    if (model_batches(r->model) == 0) { return; }
    pp_work_open_(&w, r);
    const PpOp* ops = w.schedule.ops + (size_t)w.x->place * w.schedule.n_ops;
    for (int i = 0; i < w.schedule.n_ops; i++) {
        pp_exchange_(&w, ops[i].tick);
        pp_compute_(&w, &ops[i], dloss, batch);
    }
    pp_exchange_(&w, INT_MAX);
    pp_wait(&w.sent_stream, &w.at[0], &r->dev);
    pp_wait(&w.sent_gradient, &w.at[0], &r->dev);
    pp_work_close_(&w);
}
#endif  // LLMC_PIPELINE_H
