/*
A model of which each rank has a part (--pp, --ep), slice by slice on rank 0, so that no machine needs room for all of
it: rank 0 asks for one slice after the other, in whatever order a file wants them, and all ranks bring it.
    model_slices_open    on all ranks: the parameters, or their average, from where they lie
    model_slices_source  on rank 0: what files are written from (tensorfile.h)
    model_slices_answer  on the others: bring what is asked for, until
    model_slices_close   on rank 0 says that it has all; on all ranks
Where no rank lacks anything this is model_whole's business: there a copy is a file's source.
*/
#ifndef LLMC_MODEL_SLICES_H
#define LLMC_MODEL_SLICES_H
#include "../files/tensorfile.h"  // SliceSource
#include "model_collect.h"        // model_any_slice

typedef struct {
    Model* m;
    ModelSource from;
    float* room;  // for a slice, on the host
} ModelSlices;

static inline ModelSlices model_slices_open(Model* m, ModelSource from) {
    const ModelSlices x = {m, from, (float*)malloc_check(sizeof(float) * model_largest_slice(m, m->n_table),
                                                         "a slice of a tensor")};
    return x;
}

// a row of the table and a slice of it, row -1: none any more
static inline void model_slices_say_(const Model* m, int32_t asked[2]) {
    Comm* world = m->world;
    comm_wait(world, comm_broadcast(world, asked, 2, DT_I32, 0, HERE));
}

static inline const float* model_slices_ask_(void* slices, const Tensor* t, int k) {
    const ModelSlices* x = (const ModelSlices*)slices;
    int32_t asked[2] = {(int32_t)(t - x->m->table), k};
    model_slices_say_(x->m, asked);
    return model_any_slice(x->m, &x->from, asked[0], asked[1], x->room);
}

static inline SliceSource model_slices_source(ModelSlices* x) {
    const SliceSource source = {model_slices_ask_, x};
    return source;
}

static inline void model_slices_answer(ModelSlices* x) {
    for (;;) {
        int32_t asked[2];
        model_slices_say_(x->m, asked);
        if (asked[0] < 0) { return; }
        model_any_slice(x->m, &x->from, asked[0], asked[1], x->room);
    }
}

static inline void model_slices_close(ModelSlices* x) {
    int32_t none[2] = {-1, 0};
    if (model_rank(x->m) == 0) { model_slices_say_(x->m, none); }
    free(x->room);
}
#endif  // LLMC_MODEL_SLICES_H
