/*
Who has which layers. With --pp P the layers of a model are cut into stages that follow each other, and P ranks in a
*line* have them in turn: with --pp-chunks V there are P*V, of which the rank at place p has p, p + P, p + 2P, ...,
each a chunk of its layers. Of W ranks those from p * W/P on are at place p. They share the work of their stages as
ranks without stages do (data_parallel.h), each with micro-batches of its own, which go through its line. A stack before
layer 0 (tensor_before), such as a vision tower, is the first stage's, a layer behind all (tensor_again) the last one's.
    pp_ranks_init   the groups; P = 1: every rank has all layers, and nothing here is used
    pp_turn_to      what is computed from now on is the stage of this chunk
    pp_cut          from the cost of each layer where the stages begin, so that the most costly one costs least
    pp_cut_between  ... in front of some layers alone; pp_starts: how many these are
    pp_stage_of, pp_place_of   the stage of a layer; the place at which a stage is
    pp_ranks_free
Explained in doc/ranks.md
*/
#ifndef LLMC_PIPELINE_RANKS_H
#define LLMC_PIPELINE_RANKS_H
#include "../core/tensor_arena.h"  // ARENA_CHUNKS_MAX
#include "rank_group.h"            // Comm, comm_every, rank_pair
#include <assert.h>
#include <math.h>

enum { PP_MAX = 64, PP_CHUNKS_MAX = ARENA_CHUNKS_MAX };  // stages; chunks of a rank

typedef struct {
    Comm* world;
    int size, place;            // ranks of a line, and this one's place
    int n_chunks, n_stages;     // of a rank, of all
    int stage;                  // of this rank, whose turn it is
    int begin[PP_MAX + 1];      // the first layer of each stage, and the end; others are of a stack before layer 0
    int n_cut;                  // layers that stages divide; the last one may have more behind them
    int channels;               // of the stream that goes from stage to stage
    int tie_rooms;              // pp_tie_rooms, once it is known how many micro-batches an update has
    int is_alone;               // one micro-batch of an update goes through this line (pp_sum)
    double work;                // of the multiplications of all stages those of this rank
    double row_bytes[2];        // of a micro-batch, on average: what the first stage sends the last besides; and back
    Comm* place_ranks;          // that have the same layers
    Comm* line;                 // one rank of each place, in their order
    Comm *previous, *next;      // two ranks: this one and its line's with the stage before, or behind; NULL: none
    Comm* tie;                  // two ranks: the line's first and last, on these
} PpRanks;

static inline int pp_first_layer(const PpRanks* x) { return x->begin[x->stage]; }
static inline int pp_end_layer(const PpRanks* x) { return x->begin[x->stage + 1]; }
static inline int pp_is_first(const PpRanks* x) { return x->stage == 0; }
static inline int pp_is_last(const PpRanks* x) { return x->stage == x->n_stages - 1; }
static inline int pp_place_of(const PpRanks* x, int stage) { return stage % x->size; }
static inline void pp_turn_to(PpRanks* x, int chunk) { x->stage = chunk * x->size + x->place; }
static inline int pp_chunk(const PpRanks* x) { return x->stage / x->size; }

// has this rank the first stage, or the last?
static inline int pp_has_first(const PpRanks* x) { return x->place == 0; }
static inline int pp_has_last(const PpRanks* x) { return x->place == x->size - 1; }

static inline int pp_stage_of(const PpRanks* x, int layer) {
    int stage = 0;
    if (layer >= x->begin[x->n_stages]) { return 0; }  // of a stack before layer 0
    while (x->begin[stage + 1] <= layer) { stage++; }
    return stage;
}

// the first of the ranks that have stage `stage`, in the world
static inline int pp_first_rank(const PpRanks* x, int stage) {
    return x->world->size / x->size * pp_place_of(x, stage);
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

// layers before which a stage may begin; starts NULL: all L. The first is one of them
static inline int pp_starts(const char* starts, int L) {
    int n = 0;
    for (int l = 0; l < L; l++) { n += !starts || starts[l]; }
    return n;
}

// n <= pp_starts
static inline void pp_cut_between(int* begin, int n, const double* cost, const char* starts, int L, double head) {
    const int n_groups = pp_starts(starts, L);
    double* of_group = (double*)malloc_check(sizeof(double) * (size_t)n_groups, "stages");
    int* first = (int*)malloc_check(sizeof(int) * (size_t)(n_groups + 1), "stages");
    for (int l = 0, g = -1; l < L; l++) {
        if (!starts || starts[l]) { first[++g] = l, of_group[g] = 0.0; }
        of_group[g] += cost[l];
    }
    first[n_groups] = L;
    pp_cut(begin, n, of_group, n_groups, head);
    for (int s = 0; s <= n; s++) { begin[s] = first[begin[s]]; }
    free(of_group);
    free(first);
}

// n: ranks of a line, which divide all. begin: of pp_cut, for so many chunks on each, but for the end. All ranks call
static inline PpRanks pp_ranks_init(Comm* world, int n, int n_chunks, const int* begin) {
    PpRanks x;
    memset(&x, 0, sizeof x);
    x.world = world;
    x.size = n;
    x.n_chunks = n_chunks;
    x.n_stages = n * n_chunks;
    if (n == 1) { return x; }
    const int each = world->size / n, rank = world->rank, line = rank % each;
    x.place = rank / each;
    memcpy(x.begin, begin, sizeof(int) * (size_t)(x.n_stages + 1));
    pp_turn_to(&x, 0);
    x.place_ranks = comm_every(world, x.place * each, 1, each, HERE);
    x.line = comm_every(world, line, each, n, HERE);
    for (int p = 0; p < n - 1; p++) {
        Comm* pair = rank_pair(world, p * each + line, (p + 1) * each + line);
        if (p == x.place) { x.next = pair; }
        if (p + 1 == x.place) { x.previous = pair; }
    }
    x.tie = rank_pair(world, line, (n - 1) * each + line);
    if (n_chunks > 1) {  // from the last place a stream goes on to the first
        Comm* pair = rank_pair(world, line, (n - 1) * each + line);
        if (pp_has_last(&x)) { x.next = pair; }
        if (pp_has_first(&x)) { x.previous = pair; }
    }
    return x;
}

static inline void pp_ranks_free(PpRanks* x) {
    Comm* const groups[] = {x->place_ranks, x->line, x->previous, x->next, x->tie};
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        if (groups[i]) { comm_free(groups[i]); }
    }
    memset(x, 0, sizeof *x);
    x->size = x->n_chunks = x->n_stages = 1;
}
#endif  // LLMC_PIPELINE_RANKS_H
