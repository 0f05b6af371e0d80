/*
Groups of ranks that do something together, and the groups across these: n ranks that follow each other have places
0 .. n - 1, and those of one place, one in each group, are alike.
    --tp T  (tensor_parallel.h)   of each matrix that is split a rank has the rows (heads, channels of an MLP) or
                                  columns of its place (tensor_split, tensor_share); what is not split every rank has.
                                  The group computes one micro-batch together
    --cp C  (context_ranks.h)     a rank has the positions of its place, of every row of a micro-batch
    --ep G  (expert_ranks.h)      a rank has the experts of its place, of every layer
Ranks that are alike have the same: they share gradients and what follows from them as the ranks of a world without
groups do (data_parallel.h).
    rank_group_init   the groups; n = 1: a rank is alone in its group, and has everything
    rank_group_free
    rank_group_exchange   on the device: a block of n bytes to and from each of the others of the group. Block p of
                          `landing` comes from place p; what goes to it lies p * stride bytes behind `send`
    rank_group_pass   on the device: n bytes to the next place, and as many from the one before; behind the last comes
                      the first
    rank_pair, rank_pair_exchange   a group of two; bytes of a device with the other, each way, or one, or neither
Explained in doc/ranks.md
*/
#ifndef LLMC_RANK_GROUP_H
#define LLMC_RANK_GROUP_H
#include "comm_nccl.h"  // Comm, comm_every, comm_exchange_device

enum { RANK_GROUP_MAX = 256 };

typedef struct {
    int size, place;  // of the group, and this rank's in it
    int chunks;       // of every row that a rank has, with --cp
    int unit;         // of positions: a chunk has a multiple of it
    int by;           // CpBy: how attention comes by the keys of others, with --cp (context_parallel.h)
    Comm *group, *alike;
} RankGroup;

// n: of a group, which divides the ranks of `among`: all of them, or those that share what other groups have. All call
static inline RankGroup rank_group_init(Comm* among, int n) {
    RankGroup x = {n, among ? among->rank % n : 0, 1, 1, 0, NULL, NULL};
    if (n == 1) { return x; }
    x.group = comm_every(among, among->rank / n * n, 1, n, HERE);
    x.alike = comm_every(among, x.place, n, among->size / n, HERE);
    return x;
}

static inline void rank_group_free(RankGroup* x) {
    if (x->group) { comm_free(x->group); }
    if (x->alike) { comm_free(x->alike); }
    x->group = x->alike = NULL;
    x->size = 1;
}

static inline void rank_group_exchange(void* landing, const void* send, size_t stride, size_t n, const RankGroup* x,
                                       const Device* dev) {
    CommPiece pieces[RANK_GROUP_MAX];
    for (size_t p = 0; p < (size_t)x->size; p++) {
        const size_t n_bytes = p == (size_t)x->place ? 0 : n;
        const CommPiece piece = {(const char*)send + stride * p, (char*)landing + n * p, n_bytes, n_bytes};
        pieces[p] = piece;
    }
    comm_wait_device(x->group, comm_exchange_device(x->group, pieces, dev, HERE), dev);
}

static inline CommTicket rank_group_pass(void* landing, const void* send, size_t n, const RankGroup* x,
                                         const Device* dev) {
    CommPiece pieces[RANK_GROUP_MAX];
    const int next = (x->place + 1) % x->size, before = (x->place + x->size - 1) % x->size;
    memset(pieces, 0, sizeof(CommPiece) * (size_t)x->size);
    pieces[next].send = send, pieces[next].n_send = n;
    pieces[before].recv = landing, pieces[before].n_recv = n;
    return comm_exchange_device(x->group, pieces, dev, HERE);
}

// a group of ranks a and b on these two; the others, which call too, have none
static inline Comm* rank_pair(Comm* world, int a, int b) {
    const int is_one = world->rank == a || world->rank == b;
    Comm* pair = comm_every(world, is_one ? a : world->rank, b - a, is_one ? 2 : 1, HERE);
    if (is_one) { return pair; }
    comm_free(pair);
    return NULL;
}

// NULL: nothing goes, or comes
static inline CommTicket rank_pair_exchange(Comm* pair, const void* send, void* recv, size_t n_bytes,
                                            const Device* dev) {
    const CommPiece with = {send, recv, send ? n_bytes : 0, recv ? n_bytes : 0}, none = {NULL, NULL, 0, 0};
    const CommPiece pieces[2] = {pair->rank == 0 ? none : with, pair->rank == 0 ? with : none};
    return comm_exchange_device(pair, pieces, dev, HERE);
}
#endif  // LLMC_RANK_GROUP_H
