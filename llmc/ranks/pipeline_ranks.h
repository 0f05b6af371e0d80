/*
Who has which layers. With --pp P the layers of a model are cut into P stages that follow each other: of W ranks, those
from s * W/P on have stage s. Ranks of a stage share its work as ranks without stages do (data_parallel.h), each with
micro-batches of its own; the ranks with the same number in all stages are a *line*, through which these go.
    pp_ranks_init   the groups; P = 1: every rank has all layers, and nothing here is used
    pp_cut          from the cost of each layer where the stages begin, so that the most costly one costs least
    pp_stage_of     the stage of a layer
    pp_ranks_free
Explained in doc/ranks.md
*/
#ifndef LLMC_PIPELINE_RANKS_H
#define LLMC_PIPELINE_RANKS_H
#include "rank_group.h"  // Comm, comm_every, rank_pair
#include <assert.h>
#include <math.h>

enum { PP_MAX = 64 };  // stages

typedef struct {
    Comm* world;
    int n_stages, stage;        // and the one of this rank
    int begin[PP_MAX + 1];      // the first layer of each stage, and the end
    int channels;               // of the stream that goes from stage to stage
    double work;                // of the multiplications of all stages those of this one
    Comm* stage_ranks;          // that have the same layers
    Comm* line;                 // one rank of each stage, in their order
    Comm *previous, *next;      // two ranks: this one and its line's with the stage before, or behind; NULL: none
    Comm* tie;                  // two ranks: the line's first and last, on these
} PpRanks;

static inline int pp_first_layer(const PpRanks* x) { return x->begin[x->stage]; }
static inline int pp_end_layer(const PpRanks* x) { return x->begin[x->stage + 1]; }
static inline int pp_is_first(const PpRanks* x) { return x->stage == 0; }
static inline int pp_is_last(const PpRanks* x) { return x->stage == x->n_stages - 1; }

static inline int pp_stage_of(const PpRanks* x, int layer) {
    int stage = 0;
    while (x->begin[stage + 1] <= layer) { stage++; }
    return stage;
}

// the first of the ranks that have stage `stage`, in the world
static inline int pp_first_rank(const PpRanks* x, int stage) {
    return x->world->size / x->n_stages * stage;
}

// Where n stages begin: begin (n + 1). cost (L): of each layer; head: what the last stage has to do besides. Each stage
// has a layer or more: n <= L. Of equal cuts the one with the earliest ends, for the first stages keep the activations
// of most micro-batches
static inline void pp_cut(int* begin, int n, const double* cost, int L, double head) {
    double* most = (double*)malloc_check(sizeof(double) * (size_t)(n + 1) * (size_t)(L + 1), "stages");
    int* from = (int*)malloc_check(sizeof(int) * (size_t)(n + 1) * (size_t)(L + 1), "stages");
    assert(n >= 1 && n <= L && n <= PP_MAX);
    for (int s = 0; s <= n; s++) {  // the first `end` layers as s stages
        for (int end = 0; end <= L; end++) {
            double *best = &most[s * (L + 1) + end], sum = s == n ? head : 0.0;
            *best = s == 0 && end == 0 ? 0.0 : INFINITY;
            for (int l = end - 1; s > 0 && l >= s - 1; l--) {
                const double other = most[(s - 1) * (L + 1) + l];
                sum += cost[l];
                const double all = sum > other ? sum : other;
                if (all <= *best && isfinite(other)) { *best = all, from[s * (L + 1) + end] = l; }
            }
        }
    }
    begin[n] = L;
    for (int s = n; s > 0; s--) { begin[s - 1] = from[s * (L + 1) + begin[s]]; }
    free(most);
    free(from);
}

// n: stages, which divide the ranks. begin: of pp_cut. All ranks call
static inline PpRanks pp_ranks_init(Comm* world, int n, const int* begin) {
    PpRanks x;
    memset(&x, 0, sizeof x);
    x.world = world;
    x.n_stages = n;
    if (n == 1) { return x; }
    const int each = world->size / n, rank = world->rank, line = rank % each;
    x.stage = rank / each;
    memcpy(x.begin, begin, sizeof(int) * (size_t)(n + 1));
    x.stage_ranks = comm_every(world, x.stage * each, 1, each, HERE);
    x.line = comm_every(world, line, each, n, HERE);
    for (int s = 0; s < n - 1; s++) {
        Comm* pair = rank_pair(world, s * each + line, (s + 1) * each + line);
        if (s == x.stage) { x.next = pair; }
        if (s + 1 == x.stage) { x.previous = pair; }
    }
    x.tie = rank_pair(world, line, (n - 1) * each + line);
    return x;
}

static inline void pp_ranks_free(PpRanks* x) {
    Comm* const groups[] = {x->stage_ranks, x->line, x->previous, x->next, x->tie};
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        if (groups[i]) { comm_free(groups[i]); }
    }
    memset(x, 0, sizeof *x);
    x->n_stages = 1;
}
#endif  // LLMC_PIPELINE_RANKS_H
