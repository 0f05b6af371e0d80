/*
Who has which layers. With --pp P the layers of a model are cut into P stages that follow each other: of W ranks, those
from s * W/P on have stage s. Ranks of a stage share its work as ranks without stages do (data_parallel.h), each with
the micro-batches of its place; the ranks of the same place in all stages are a *line*, through which these go.
    pipeline_ranks_init   the groups; P = 1: every rank has all layers, and nothing here is used
    pipeline_cut          from the cost of each layer where the stages begin, so that the most costly one costs least
    pipeline_stage_of     the stage of a layer
    pipeline_ranks_free
Explained in doc/ranks.md
*/
#ifndef LLMC_PIPELINE_RANKS_H
#define LLMC_PIPELINE_RANKS_H
#include "comm.h"  // Comm, comm_every
#include <assert.h>
#include <math.h>

enum { PIPELINE_RANKS_MAX = 64 };  // stages

typedef struct {
    Comm* world;
    Comm* stage;         // the ranks that have the same layers
    Comm* line;          // one of each stage, in their order
    Comm *before, *behind;  // a group of two: the rank of this line with the stage before, or behind; NULL: there is
                            // none
    Comm* around;           // the same of the first stage and the last, on these two
    int size, place;     // stages; the one of this rank
    int channels;        // of the stream that goes from stage to stage
    double share;        // of the multiplications of all stages those of this one
    int begin[PIPELINE_RANKS_MAX + 1];  // the first layer of each stage, and the end
} PipelineRanks;

static inline int pipeline_first(const PipelineRanks* x) { return x->begin[x->place]; }
static inline int pipeline_end(const PipelineRanks* x) { return x->begin[x->place + 1]; }
static inline int pipeline_is_first(const PipelineRanks* x) { return x->place == 0; }
static inline int pipeline_is_last(const PipelineRanks* x) { return x->place == x->size - 1; }

static inline int pipeline_stage_of(const PipelineRanks* x, int layer) {
    int stage = 0;
    while (x->begin[stage + 1] <= layer) { stage++; }
    return stage;
}

// the rank of the world that has stage `stage` and the first place
static inline int pipeline_first_rank(const PipelineRanks* x, int stage) {
    return x->world->size / x->size * stage;
}

// Where stages begin: begin (size + 1). cost (L): of each layer; before, behind: what the first and the last stage have
// to do besides. Each stage has a layer or more: size <= L. Of equal cuts the one with the earliest ends, for the first
// stages keep the activations of most micro-batches
static inline void pipeline_cut(int* begin, int size, const double* cost, int L, double before, double behind) {
    double* most = (double*)malloc_check(sizeof(double) * (size_t)(size + 1) * (size_t)(L + 1), "stages");
    int* from = (int*)malloc_check(sizeof(int) * (size_t)(size + 1) * (size_t)(L + 1), "stages");
    assert(size >= 1 && size <= L && size <= PIPELINE_RANKS_MAX);
    for (int s = 0; s <= size; s++) {  // the first `end` layers as s stages
        for (int end = 0; end <= L; end++) {
            double *best = &most[s * (L + 1) + end], sum = (s == 1 ? before : 0.0) + (s == size ? behind : 0.0);
            *best = s == 0 && end == 0 ? 0.0 : INFINITY;
            for (int l = end - 1; s > 0 && l >= s - 1; l--) {
                const double other = most[(s - 1) * (L + 1) + l];
                sum += cost[l];
                const double all = sum > other ? sum : other;
                if (all <= *best && isfinite(other)) { *best = all, from[s * (L + 1) + end] = l; }
            }
        }
    }
    begin[size] = L;
    for (int s = size; s > 0; s--) { begin[s - 1] = from[s * (L + 1) + begin[s]]; }
    free(most);
    free(from);
}

// size: divides the ranks. begin: of pipeline_cut. All ranks call
static inline PipelineRanks pipeline_ranks_init(Comm* world, int size, const int* begin) {
    PipelineRanks x;
    memset(&x, 0, sizeof x);
    x.world = world;
    x.size = size;
    if (size == 1) { return x; }
    const int each = world->size / size, rank = world->rank, place = x.place = rank / each, line = rank % each;
    memcpy(x.begin, begin, sizeof(int) * (size_t)(size + 1));
    x.stage = comm_every(world, place * each, 1, each, HERE);
    x.line = comm_every(world, line, each, size, HERE);
    for (int odd = 0; odd < 2; odd++) {  // the pairs that begin with an even stage, then those with an odd one
        const int is_left = place % 2 == odd, left = is_left ? place : place - 1;
        const int has_pair = left >= 0 && left + 1 < size;
        Comm* pair = comm_every(world, has_pair ? left * each + line : rank, each, has_pair ? 2 : 1, HERE);
        if (!has_pair) { comm_free(pair); }
        else if (is_left) { x.behind = pair; }
        else { x.before = pair; }
    }
    const int is_end = place == 0 || place == size - 1;
    Comm* ends = comm_every(world, is_end ? line : rank, (size - 1) * each, is_end ? 2 : 1, HERE);
    if (is_end) { x.around = ends; } else { comm_free(ends); }
    return x;
}

static inline void pipeline_ranks_free(PipelineRanks* x) {
    Comm* const groups[] = {x->stage, x->line, x->before, x->behind, x->around};
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        if (groups[i]) { comm_free(groups[i]); }
    }
    memset(x, 0, sizeof *x);
    x->size = 1;
}
#endif  // LLMC_PIPELINE_RANKS_H
