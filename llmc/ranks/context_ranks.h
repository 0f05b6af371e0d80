/*
Who has which positions of a row. With --cp C the C ranks of a group (rank_group.h) compute each micro-batch
together. For attention a row of T positions is cut into 2C chunks, and the rank of place p has chunks p and 2C-1-p: of
causal attention, in which a late position reads more than an early one, each then computes as much as the others:
    C = 2, T = 8      position 0 1 | 2 3 | 4 5 | 6 7      place 0: 0 1 6 7      place 1: 2 3 4 5
What goes along a row (a scan, carried_line.h) has one chunk on each rank, p on that of place p, and so has attention
in a model with both.
Everything else looks at one position at a time. Each rank has the whole model; gradients are sums over positions, and a
place's share of a micro-batch is one leaf of the tree (data_parallel.h).
    cp_rows         of B rows of T positions, what this rank has: first its early chunk of all rows, then its late one
    cp_positions    how many these are
    cp_take, cp_take_bytes   these of an array on the host, of ints or of so many bytes each
    cp_multiple     of so many positions are rows that can be cut
    cp_bring        of an array on the host that each rank has for its own positions, all positions. All ranks call
Explained in doc/ranks.md; how keys and values are brought together: context_parallel.h
*/
#ifndef LLMC_CONTEXT_RANKS_H
#define LLMC_CONTEXT_RANKS_H
#include "rank_group.h"  // RankGroup

enum { CP_CHUNKS = 2 };  // that each rank of a group has of a row, at most

typedef struct {
    int B, T;               // of whole rows
    int n_chunks, n;        // of each row: chunks, and positions in each; alone one chunk, the row
    int begin[CP_CHUNKS];   // where they begin in the row
} CpRows;

// of the rank of this place; T is a multiple of chunks * size
static inline CpRows cp_rows_of(int B, int T, const RankGroup* x, int place) {
    const int n = T / (x->chunks * x->size);
    const CpRows rows = {B, T, x->chunks, n, {place * n, (CP_CHUNKS * x->size - 1 - place) * n}};
    return rows;
}

// of a rank that has all of them
static inline CpRows cp_rows_whole(int B, int T) {
    const CpRows rows = {B, T, 1, T, {0}};
    return rows;
}

static inline CpRows cp_rows(int B, int T, const RankGroup* x) { return cp_rows_of(B, T, x, x->place); }
static inline int cp_positions(const CpRows* r) { return r->B * r->n * r->n_chunks; }
static inline int cp_multiple(const RankGroup* x) { return x->chunks * x->size * x->unit; }

// where position t of row b lies among those of all, and chunk i of row b among those of this rank
static inline size_t cp_at(const CpRows* r, int b, int t) { return (size_t)b * (size_t)r->T + (size_t)t; }

static inline size_t cp_own_at(const CpRows* r, int i, int b) {
    return ((size_t)i * (size_t)r->B + (size_t)b) * (size_t)r->n;
}

static inline void cp_take_bytes(void* own, const void* all, size_t width, const CpRows* r) {
    for (int i = 0; i < r->n_chunks; i++) {
        for (int b = 0; b < r->B; b++) {
            memcpy((char*)own + width * cp_own_at(r, i, b), (const char*)all + width * cp_at(r, b, r->begin[i]),
                   width * (size_t)r->n);
        }
    }
}

static inline void cp_take(int* own, const int* all, const CpRows* r) { cp_take_bytes(own, all, sizeof(int), r); }

// all (B, T): at its beginning this rank's own
static inline void cp_bring(float* all, int B, int T, const RankGroup* x) {
    const CpRows own = cp_rows(B, T, x);
    const size_t n = (size_t)cp_positions(&own);
    if (x->size == 1) { return; }
    float* parts = (float*)malloc_check(sizeof(float) * n * (size_t)x->size, "positions of all ranks");
    comm_wait(x->group, comm_all_gather(x->group, all, parts, n, DT_F32, HERE));
    for (int p = 0; p < x->size; p++) {
        const CpRows r = cp_rows_of(B, T, x, p);
        for (int i = 0; i < r.n_chunks; i++) {
            for (int b = 0; b < B; b++) {
                memcpy(all + cp_at(&r, b, r.begin[i]), parts + n * (size_t)p + cp_own_at(&r, i, b),
                       sizeof(float) * (size_t)r.n);
            }
        }
    }
    free(parts);
}
#endif  // LLMC_CONTEXT_RANKS_H
