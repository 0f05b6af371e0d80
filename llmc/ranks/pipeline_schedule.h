/*
Pipeline parallelism as data: the layers of a model are cut into stages, and this says which rank computes what of which
micro-batch in which order. What the order is worth, and that nobody waits for ever, is then a matter of counting.
    pp_check     the sizes that can be; else why not
    pp_open      all ranks' operations, each with the tick in which it can be computed
    pp_tick      of one of them
    pp_held_by   of how many micro-batches a rank keeps activations at once in each of its chunks, at most
    pp_rooms     how many inputs wait at a rank at once, at most
    pp_messages  what a rank sends and receives, in order
    pp_unsent    outputs that wait at once at the rank that has made them, at most
    pp_tie_rooms how many gradients of a row that the first and the last stage share wait at the last one, at most
    pp_idle      the share of an update in which a rank computes nothing
p ranks have v chunks of layers each: stage s is chunk s / p of rank s % p, so v > 1 gives a rank layers from all over
the model. An operation is the forward or the backward pass of one chunk for one of m micro-batches. A forward needs the
output of the stage before, a backward the gradient of the stage behind; the last stage goes straight on to backward.
Order:  of a rank: `pp_warmup` forwards, then a forward and a backward by turns, then the backwards that are left
        (1F1B). With v = 1 micro-batches go by one after the other; with v > 1 p of them go through the first chunk, the
        same p through the second, and so on, and in backward from the last chunk to the first. Each chunk has its
        backwards in the order of micro-batches, so gradients join the tree of leaves as on one rank: no bit depends on
        p or v.
Ticks:  a forward and a backward take one each, and what a tick has made can be used in the next. p 3, v 1, m 4:
            rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
            rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
            rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
Cost:   2*v*m operations of a rank in 2*(v*m + p - 1) ticks, p - 1 of them idle for each direction: the share
        (p - 1) / (v*m + p - 1). v > 1 divides the idle part by v and multiplies what is sent by v.
        Held: p - rank micro-batches for v 1, warm-up + 1 chunks for v > 1, and never more than v*m. Inputs that wait:
        one of each direction for v 1; for v > 1 two outputs and as many gradients, or half as many as ranks.
Messages: each has a time, and a rank comes to it after its operations of this tick and before those of later ones. All
        ranks have them in one order, and an operation has its input before its tick: so nobody waits for ever, even
        where a message keeps both its ranks until it has gone. A gradient goes in the tick in which it is made, for
        its buffer is needed. An output stays where it lies until the rank behind has given up the activations of an
        earlier micro-batch, whose place it takes. So both often go in one tick, as one swap. Of three stages and four
        micro-batches, the first with the second: send 0, send 1, send 2 for the gradient of 0, send 3 for that of 1,
        receive that of 2, of 3. A row that the first and the last stage share (the embedding that is the output
        matrix) has its gradient sent to the first stage when this comes to its own share of it: a tie. Where a module
        behind the head reads rows of the first stage, such as images' (has_rows), these come to the last one between
        its forward and its backward pass, and their gradient goes back behind that.
Source: 1F1B: Narayanan et al. 2019 (PipeDream), arXiv:1806.03377; chunks: Narayanan et al. 2021, arXiv:2104.04473
*/
#ifndef LLMC_PIPELINE_SCHEDULE_H
#define LLMC_PIPELINE_SCHEDULE_H
#include "../core/fail.h"  // malloc_check
#include <assert.h>

typedef struct {
    int p, v, m;  // ranks; chunks of a rank; micro-batches of an update
} PpShape;

typedef struct {
    int micro, chunk, is_backward;
    int tick;
} PpOp;

typedef struct {
    PpShape shape;
    int n_ops;        // of a rank
    int n_ticks;      // -1: somebody waits for ever
    PpOp* ops;        // (p, n_ops)
    int* ticks;       // (m, 2, v p): of the operations of a micro-batch, its forwards by stage, then its backwards
    int has_rows;     // 0 as it is opened
} PpSchedule;

typedef enum { PP_TIE, PP_STREAM, PP_GRADIENT, PP_ROWS, PP_ROWS_BACK } PpKind;

// of a rank with a neighbour, or with that at the other end
typedef struct {
    int time;
    PpKind kind;
    int edge;          // from rank `edge` to the one behind it, or for gradients back
    int sends;
    int micro, chunk;  // of this rank's operation that has made it or needs it
    int number;        // among those of this kind on this edge
} PpMessage;

// NULL: these sizes can be
static inline const char* pp_check(const PpShape* s) {
    if (s->p < 1 || s->v < 1 || s->m < 1) { return "expected at least one rank, chunk and micro-batch"; }
    if (s->v > 1 && s->p == 1) { return "one rank has no use for several chunks of layers"; }
    if (s->v > 1 && s->m % s->p != 0) { return "several chunks need a multiple of the ranks as micro-batches"; }
    return NULL;
}

static inline double pp_idle(const PpShape* s) {
    return (double)(s->p - 1) / ((double)s->v * s->m + s->p - 1);
}

// ---- the order of one rank ----

// forwards before its first backward: until then the first micro-batch is on its way to the last stage and back
static inline int pp_warmup(const PpShape* s, int rank) {
    const int behind = s->p - 1 - rank, n = s->v * s->m;
    const int warmup = s->v == 1 ? behind : 2 * behind + (s->v - 1) * s->p;
    return warmup < n ? warmup : n;
}

// number i of its forwards, or of its backwards
static inline PpOp pp_op_(const PpShape* s, int i, int is_backward) {
    const int round = i / (s->p * s->v), place = i % (s->p * s->v);
    const int chunk = place / s->p, micro = round * s->p + place % s->p;
    const PpOp op = {micro, is_backward ? s->v - 1 - chunk : chunk, is_backward, -1};
    return op;
}

// ops (2 * v * m)
static inline void pp_order(PpOp* ops, const PpShape* s, int rank) {
    const int n = s->v * s->m, warmup = pp_warmup(s, rank);
    for (int i = 0; i < warmup; i++) { *ops++ = pp_op_(s, i, 0); }
    for (int i = 0; i < n; i++) {
        if (warmup + i < n) { *ops++ = pp_op_(s, warmup + i, 0); }
        *ops++ = pp_op_(s, i, 1);
    }
}

// ---- all ranks together ----

static inline int pp_stage(const PpShape* s, int rank, const PpOp* op) {
    return op->chunk * s->p + rank;
}

// ticks of the operations of a micro-batch, its forwards by stage, then its backwards; -1: not yet computed
static inline int* pp_place_(int* ticks, const PpShape* s, int stage, const PpOp* op) {
    return &ticks[((size_t)op->micro * 2 + op->is_backward) * s->p * s->v + stage];
}

// the tick of the operation whose result this one needs; NULL: of none
static inline const int* pp_needs_(int* ticks, const PpShape* s, int stage, const PpOp* op) {
    const int last = s->p * s->v - 1;
    const PpOp forward = {op->micro, 0, 0, 0};
    if (op->is_backward) {
        return stage == last ? pp_place_(ticks, s, stage, &forward) : pp_place_(ticks, s, stage + 1, op);
    }
    return stage > 0 ? pp_place_(ticks, s, stage - 1, op) : NULL;
}

// every operation in the first tick in which it can be; returns how many ticks, -1 where nobody can go on
static inline int pp_time_(PpSchedule* x, int* ticks) {
    const PpShape* s = &x->shape;
    int *next = (int*)malloc_check(sizeof(int) * (size_t)s->p, "pipeline"), n_left = s->p * x->n_ops, tick = 0, n = 1;
    memset(next, 0, sizeof(int) * (size_t)s->p);
    for (; n_left > 0 && n > 0; tick++, n_left -= n) {
        n = 0;
        for (int rank = 0; rank < s->p; rank++) {
            PpOp* op = &x->ops[(size_t)rank * x->n_ops + next[rank]];
            if (next[rank] == x->n_ops) { continue; }
            const int stage = pp_stage(s, rank, op), *needs = pp_needs_(ticks, s, stage, op);
            if (needs && (*needs < 0 || *needs == tick)) { continue; }
            *pp_place_(ticks, s, stage, op) = op->tick = tick;
            next[rank]++, n++;
        }
    }
    free(next);
    return n_left > 0 ? -1 : tick;
}

static inline void pp_open(PpSchedule* x, PpShape shape) {
    const size_t n = 2 * (size_t)shape.v * shape.m, n_bytes = sizeof(int) * n * shape.p;
    assert(!pp_check(&shape));
    x->shape = shape;
    x->has_rows = 0;
    x->n_ops = (int)n;
    x->ops = (PpOp*)malloc_check(sizeof(PpOp) * n * shape.p, "pipeline");
    for (int rank = 0; rank < shape.p; rank++) { pp_order(x->ops + rank * n, &shape, rank); }
    x->ticks = (int*)memset(malloc_check(n_bytes, "pipeline"), -1, n_bytes);
    x->n_ticks = pp_time_(x, x->ticks);
}

static inline void pp_free(PpSchedule* x) {
    free(x->ops);
    free(x->ticks);
}

// of the pass of a micro-batch through a stage
static inline int pp_tick(const PpSchedule* x, int micro, int stage, int is_backward) {
    const PpOp op = {micro, 0, is_backward, 0};
    return *pp_place_(x->ticks, &x->shape, stage, &op);
}

// micro-batches that each chunk (v) of a rank holds at once, at most
static inline void pp_held_by(const PpSchedule* x, int rank, int* most) {
    for (int c = 0; c < x->shape.v; c++) {
        const PpOp* op = x->ops + (size_t)rank * x->n_ops;
        int held = 0;
        most[c] = 0;
        for (int i = 0; i < x->n_ops; i++) {
            if (op[i].chunk != c) { continue; }
            held += op[i].is_backward ? -1 : 1;
            most[c] = held > most[c] ? held : most[c];
        }
    }
}

// rooms for outputs of the stage before, or gradients of the one behind, that wait at a rank until it uses them
static inline int pp_rooms(const PpShape* s, int is_backward) {
    const int half = (s->p + 1) / 2;
    return s->v == 1 ? 1 : is_backward && half > 2 ? half : 2;
}

// ---- messages ----

// the rank behind, and the chunk with which it goes on
static inline int pp_behind_(const PpShape* s, int rank, int* chunk) {
    *chunk += rank == s->p - 1;
    return (rank + 1) % s->p;
}

// outputs of rank `edge`, on their way to the next; of this edge one follows the other
static inline PpMessage* pp_streams_(const PpSchedule* x, int edge, int rank, PpMessage* list) {
    const PpShape* s = &x->shape;
    const PpOp* ops = x->ops + (size_t)edge * x->n_ops;
    int* held = (int*)malloc_check(sizeof(int) * (size_t)s->v, "pipeline");
    pp_held_by(x, (edge + 1) % s->p, held);
    for (int i = 0, n = 0, time = 0; i < x->n_ops; i++) {
        int chunk = ops[i].chunk;
        const int behind = pp_behind_(s, edge, &chunk), before = chunk == s->v ? -1 : ops[i].micro - held[chunk];
        if (ops[i].is_backward || chunk == s->v) { continue; }  // the last stage sends none
        const int is_free = before < 0 ? 0 : pp_tick(x, before, chunk * s->p + behind, 1);
        time = ops[i].tick > time ? ops[i].tick : time;
        time = is_free > time ? is_free : time;
        const int sends = rank == edge;
        const PpMessage message = {time, PP_STREAM, edge, sends, ops[i].micro, sends ? ops[i].chunk : chunk, n++};
        *list++ = message;
    }
    free(held);
    return list;
}

// gradients of the streams on this edge
static inline PpMessage* pp_gradients_(const PpSchedule* x, int edge, int rank, PpMessage* list) {
    const PpShape* s = &x->shape;
    for (int i = 0, n = 0, behind = (edge + 1) % s->p; i < x->n_ops; i++) {
        const PpOp op = x->ops[(size_t)behind * x->n_ops + i];
        const int chunk = op.chunk - (edge == s->p - 1), sends = rank == behind;  // of rank `edge`
        if (!op.is_backward || chunk < 0) { continue; }
        const PpMessage message = {op.tick, PP_GRADIENT, edge, sends, op.micro, sends ? op.chunk : chunk, n++};
        *list++ = message;
    }
    return list;
}

// rows of the first stage for the last one, and back, on both
static inline PpMessage* pp_rows_(const PpSchedule* x, int rank, PpMessage* list) {
    const PpShape* s = &x->shape;
    const int last = s->p - 1;
    for (int k = 0; k < s->m && x->has_rows && (rank == 0 || rank == last); k++) {
        for (int back = 0; back < 2; back++) {
            const PpMessage message = {pp_tick(x, k, s->p * s->v - 1, back), back ? PP_ROWS_BACK : PP_ROWS, last,
                                       (rank == last) == back, k, rank == 0 ? 0 : s->v - 1, k};
            *list++ = message;
        }
    }
    return list;
}

static inline int pp_compare_(const void* left, const void* right) {
    const PpMessage *a = (const PpMessage*)left, *b = (const PpMessage*)right;
    if (a->time != b->time) { return a->time - b->time; }
    if ((a->kind == PP_TIE) != (b->kind == PP_TIE)) { return a->kind == PP_TIE ? -1 : 1; }
    if (a->edge != b->edge) { return a->edge - b->edge; }
    return a->kind != b->kind ? (int)a->kind - (int)b->kind : a->number - b->number;
}

// of more than one rank; on the heap. The last rank sends ties, which the first one has as part of its backwards. They
// come first of their time
static inline PpMessage* pp_messages(const PpSchedule* x, int rank, int* n) {
    const PpShape* s = &x->shape;
    const int edge = (rank + s->p - 1) % s->p;  // with the rank before
    const size_t most = 4 * (size_t)s->v * s->m + 3 * (size_t)s->m;
    PpMessage *list = (PpMessage*)malloc_check(sizeof(PpMessage) * most, "pipeline"), *end = list;
    assert(s->p > 1);
    end = pp_gradients_(x, rank, rank, pp_streams_(x, rank, rank, end));
    end = pp_gradients_(x, edge, rank, pp_streams_(x, edge, rank, end));
    for (int k = 0; k < s->m && rank == s->p - 1; k++) {
        const PpMessage tie = {pp_tick(x, k, 0, 1), PP_TIE, rank, 1, k, s->v - 1, k};
        *end++ = tie;
    }
    end = pp_rows_(x, rank, end);
    *n = (int)(end - list);
    qsort(list, (size_t)*n, sizeof *list, pp_compare_);
    return list;
}

static inline int pp_unsent(const PpSchedule* x, int rank) {
    int n, made = 0, sent = 0, most = 0;
    PpMessage* messages = pp_messages(x, rank, &n);
    const PpOp* op = x->ops + (size_t)rank * x->n_ops;
    for (int i = 0, next = 0; i < x->n_ops; i++) {
        for (; next < n && messages[next].time < op[i].tick; next++) {
            sent += messages[next].kind == PP_STREAM && messages[next].sends;
        }
        made += !op[i].is_backward && pp_stage(&x->shape, rank, &op[i]) < x->shape.p * x->shape.v - 1;
        most = made - sent > most ? made - sent : most;
    }
    free(messages);
    return most;
}

static inline int pp_tie_rooms(const PpSchedule* x) {
    const int last = x->shape.p * x->shape.v - 1;
    int sent = 0, most = 0;
    for (int k = 0; k < x->shape.m; k++) {
        while (pp_tick(x, sent, 0, 1) < pp_tick(x, k, last, 1)) { sent++; }
        most = k + 1 - sent > most ? k + 1 - sent : most;
    }
    return most;
}
#endif  // LLMC_PIPELINE_SCHEDULE_H
