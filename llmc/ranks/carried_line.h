/*
--cp of a model that goes along its rows, as a scan does: each rank has one chunk of every row (context_ranks.h). What a
layer carries to the end of it (core/carried.h) goes to the rank that has the next one; on the way back what a chunk
asks of what it was given goes to the rank that gave it.
    carried_line_init, carried_line_free   the neighbours of this rank; without --cp it has none, and nothing is sent
    carried_take    before layer l: what the neighbour hands on comes into `now`. Without one it stays what it is
    carried_pass    behind layer l: `next` goes to the neighbour
    carried_line_sends   bytes of one layer that a rank sends to one neighbour
    carried_bring, carried_hand   n bytes of a device that come from a neighbour, or go to one
A rank waits until the one before it has done the layer: C ranks with L layers are idle for (C - 1) / (L + C - 1) of a
pass, if nothing else holds them up.
*/
#ifndef LLMC_CARRIED_LINE_H
#define LLMC_CARRIED_LINE_H
#include "../core/carried.h"  // Carried, carried_part
#include "rank_group.h"       // RankGroup, rank_pair, rank_pair_exchange

typedef struct {
    Comm *before, *behind;  // this rank and the one with the positions before its own, or behind; NULL: none
} CarriedLine;

// x: a group of --cp among these ranks, which all call
static inline CarriedLine carried_line_init(Comm* among, const RankGroup* x) {
    CarriedLine line = {NULL, NULL};
    for (int p = 0; p + 1 < x->size; p++) {
        Comm* pair = rank_pair(among, among->rank - x->place + p, among->rank - x->place + p + 1);
        if (p == x->place) { line.behind = pair; }
        if (p + 1 == x->place) { line.before = pair; }
    }
    return line;
}

static inline void carried_line_free(CarriedLine* line) {
    if (line->before) { comm_free(line->before); }
    if (line->behind) { comm_free(line->behind); }
    line->before = line->behind = NULL;
}

// from NULL: nobody is there, and nothing comes
static inline void carried_bring(void* to, Comm* from, size_t n, const Device* dev) {
    if (from) { comm_wait_device(from, rank_pair_exchange(from, NULL, to, n, dev), dev); }
}

static inline void carried_hand(const void* from, Comm* to, size_t n, const Device* dev) {
    if (to) { comm_wait_device(to, rank_pair_exchange(to, from, NULL, n, dev), dev); }
}

// the first B rows of all kinds; NULL: nothing goes, or comes
static inline void carried_exchange_(Comm* pair, const Carried* s, float* send, float* recv, int l, int B,
                                     const Device* dev) {
    for (int kind = 0; kind < s->n_kinds && pair; kind++) {
        const size_t n_bytes = sizeof(float) * (size_t)B * s->n[kind];
        comm_wait_device(pair, rank_pair_exchange(pair, carried_part(s, send, kind, l), carried_part(s, recv, kind, l),
                                                  n_bytes, dev), dev);
    }
}

static inline void carried_take(const Carried* s, Comm* from, int l, int B, const Device* dev) {
    carried_exchange_(from, s, NULL, s->now, l, B, dev);
}

static inline void carried_pass(const Carried* s, Comm* to, int l, int B, const Device* dev) {
    carried_exchange_(to, s, s->next, NULL, l, B, dev);
}

static inline double carried_line_sends(const Carried* s) {
    double n = 0.0;
    for (int kind = 0; kind < s->n_kinds; kind++) { n += (double)carried_layer_floats(s, kind); }
    return sizeof(float) * n;
}
#endif  // LLMC_CARRIED_LINE_H
