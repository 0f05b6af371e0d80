/*
Ranks: who computes which micro-batch. This build has one rank, so every call is a copy or nothing at all; MPI and NCCL
come behind the same names (spec/parallel.md), and a trainer that is written against them does not change.
*/
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

typedef struct {
    int rank, size;
} Comm;

static inline Comm comm_world(void) {
    Comm one = {0, 1};
    return one;
}

// leaves first..last-1 of the update belong to this rank (spec/parallel.md 3.4)
static inline int comm_first_leaf(const Comm* c, int n_leaves) { return (int)((long long)c->rank * n_leaves / c->size); }
static inline int comm_last_leaf(const Comm* c, int n_leaves) { return (int)((c->rank + 1LL) * n_leaves / c->size); }
#endif  // LLMC_COMM_H
