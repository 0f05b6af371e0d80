/*
Who has which experts. With --ep G the experts of every layer are shared by groups of G ranks: of P ranks, which with
--pp are those of a stage, rank r has place r % G in group r / G, and with it the E/G experts from number (r % G) * E/G
on. Everything else of the model, or of its stage, every rank has. Ranks of the same place hold the same experts: they
are *holders* of one another.
    expert_ranks_init   the groups; G = 1: every rank has all experts, and nothing here is used
    expert_ranks_parts  ranks that compute one micro-batch together
    expert_ranks_free
Leaves go to ranks as --zero 2 deals them: in round k a group computes the G leaves that follow each other from
k * P + group * G on. Its experts so see them in order, and a sum over them is a node of the tree over all leaves, which
holders go on with: that is why G is a power of two.
With --tp T ranks that follow each other compute one micro-batch together, and T divides G: each brings its part of the
positions, so that a group computes G / T leaves, and of the parts of a leaf the next goes on where the last has ended.
Explained in doc/ranks.md
*/
#ifndef LLMC_EXPERT_RANKS_H
#define LLMC_EXPERT_RANKS_H
#include "rank_group.h"  // RankGroup

typedef struct {
    Comm* world;
    RankGroup ep;         // those that share the experts of a layer; alike: its holders
    const RankGroup* tp;  // those that have matrices together
} ExpertRanks;

static inline int expert_ranks_parts(const ExpertRanks* x) { return x->ep.size > 1 ? x->tp->size : 1; }

// all ranks call; size: a power of two that divides the number of ranks
static inline ExpertRanks expert_ranks_init(Comm* world, int size, const RankGroup* tp) {
    const ExpertRanks x = {world, rank_group_init(world, size), tp};
    return x;
}

static inline void expert_ranks_free(ExpertRanks* x) { rank_group_free(&x->ep); }
#endif  // LLMC_EXPERT_RANKS_H
