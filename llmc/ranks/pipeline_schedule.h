/*
Pipeline parallelism as data: the layers of a model are cut into stages, and this says which rank computes what of which
micro-batch in which order. What the order is worth, and that nobody waits for ever, is then a matter of counting.
    pp_check     the sizes that can be; else why not
    pp_open      all ranks' operations, each with the tick in which it can be computed
    pp_source    who makes the input of an operation, and in which of its own
    pp_held      of how many micro-batches a rank keeps activations at once, at most; each chunk counts
    pp_rooms     how many inputs wait at a rank at once, at most
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
Trainers use v = 1 (run/pipeline.h). Chunks are proved, but each would need gradients of its own: those of a later
chunk join the tree of leaves while those of an earlier one still wait.
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
} PpSchedule;

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
    x->n_ops = (int)n;
    x->ops = (PpOp*)malloc_check(sizeof(PpOp) * n * shape.p, "pipeline");
    for (int rank = 0; rank < shape.p; rank++) { pp_order(x->ops + rank * n, &shape, rank); }
    int* ticks = (int*)memset(malloc_check(n_bytes, "pipeline"), -1, n_bytes);
    x->n_ticks = pp_time_(x, ticks);
    free(ticks);
}

static inline void pp_free(PpSchedule* x) { free(x->ops); }

static inline int pp_held(const PpSchedule* x, int rank) {
    const PpOp* op = x->ops + (size_t)rank * x->n_ops;
    int held = 0, most = 0;
    for (int i = 0; i < x->n_ops; i++) {
        held += op[i].is_backward ? -1 : 1;
        most = held > most ? held : most;
    }
    return most;
}

// where the input of a rank's operation is made: 1, and by which rank in which operation; 0: it needs none from others
static inline int pp_source(const PpShape* s, int rank, const PpOp* op, int* from, PpOp* made) {
    const int stage = pp_stage(s, rank, op), source = op->is_backward ? stage + 1 : stage - 1;
    if (source < 0 || source == s->p * s->v || s->p == 1) { return 0; }
    const PpOp there = {op->micro, source / s->p, op->is_backward, -1};
    *from = source % s->p;
    *made = there;
    return 1;
}

// rooms for outputs of the stage before, or gradients of the one behind, that wait at a rank until it uses them
static inline int pp_rooms(const PpShape* s, int is_backward) {
    const int half = (s->p + 1) / 2;
    return s->v == 1 ? 1 : is_backward && half > 2 ? half : 2;
}
#endif  // LLMC_PIPELINE_SCHEDULE_H
