/*
Who has which part of a matrix. With --tp T groups of T ranks that follow each other compute the same micro-batch
together: rank r has place r % T, and of each matrix that is split the rows (heads, channels of an MLP) or columns of
its place (tensor_split, tensor_share). What is not split every rank has. Ranks of the same place, in the same stage,
share gradients as ranks without --tp do (data_parallel.h): each holds what the others hold.
    tp_ranks_init   the groups; T = 1: every rank has whole matrices, and nothing here is used
    tp_ranks_free
Explained in doc/ranks.md
*/
#ifndef LLMC_TENSOR_RANKS_H
#define LLMC_TENSOR_RANKS_H
#include "comm.h"  // Comm, comm_every

enum { TP_MAX = 64 };  // ranks of a group

typedef struct {
    int size, place;  // of the group, and this rank's in it; size 1: matrices are whole
    Comm* group;      // the ranks that have one matrix together
    Comm* alike;      // of the same place
} TpRanks;

// n: of a group, which divides the ranks of `among`: all, or those of a stage. All ranks call
static inline TpRanks tp_ranks_init(Comm* among, int n) {
    TpRanks x = {n, among ? among->rank % n : 0, NULL, NULL};
    if (n == 1) { return x; }
    x.group = comm_every(among, among->rank / n * n, 1, n, HERE);
    x.alike = comm_every(among, x.place, n, among->size / n, HERE);
    return x;
}

static inline void tp_ranks_free(TpRanks* x) {
    if (x->group) { comm_free(x->group); }
    if (x->alike) { comm_free(x->alike); }
    x->group = x->alike = NULL;
    x->size = 1;
}
#endif  // LLMC_TENSOR_RANKS_H
