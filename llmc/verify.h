/*
A step computed twice (--verify-every K): the same inputs give the same bits, so any difference is the hardware (a flipped
bit in memory, an unstable clock) or a bug, and the run stops before the wrong numbers reach a checkpoint.
    verify_init, verify_free
    verify_first    after the gradients of a step: sums of parameters, moments and gradients, a block at a time
    verify_second   after the same gradients were computed once more: compares with those sums. That parameters and moments
                    are the same as before is part of it, for nothing may write to them between
    verify_adamw    adamw_update, on a copy first and then in place, and both compared
Cost:   the step takes twice its time. Memory: 1/8 of an arena for the sums, 12 MiB for the copy.
Errors: fail_run names step, tensor and element.
Source: spec/reliability.md 13; parallel.md 12.6
*/
#ifndef LLMC_VERIFY_H
#define LLMC_VERIFY_H
#include "adamw.h"   // adamw_update
#include "tensor.h"  // Tensor, tensor_slice_name
#include <xxhash.h>

enum { VERIFY_BLOCK = 64, VERIFY_PIECE = 1 << 20 };  // elements under one sum; of one copy

typedef enum { VERIFY_PARAMETERS, VERIFY_MOMENTS_1, VERIFY_MOMENTS_2, VERIFY_GRADIENTS, N_VERIFIED } Verified;

typedef struct {
    int step;                    // that is being verified
    const Tensor* table;
    int n_tensors;
    const float* arena[N_VERIFIED];
    uint64_t* sums[N_VERIFIED];  // one for each block of each tensor
    size_t n_blocks;
    float loss, norm;            // of the first computation
    float* copy;                 // (3, VERIFY_PIECE): parameters and moments of a piece
} Verify;

static inline size_t verify_blocks_(const Tensor* t) { return (tensor_elements(t) + VERIFY_BLOCK - 1) / VERIFY_BLOCK; }

static inline void verify_init(Verify* v, const Tensor* table, int n_tensors, const float* params, const float* adam_m, const float* adam_v) {
    memset(v, 0, sizeof *v);
    v->table = table;
    v->n_tensors = n_tensors;
    v->arena[VERIFY_PARAMETERS] = params;
    v->arena[VERIFY_MOMENTS_1] = adam_m;
    v->arena[VERIFY_MOMENTS_2] = adam_v;
    for (int i = 0; i < n_tensors; i++) { v->n_blocks += verify_blocks_(&table[i]); }
    for (int a = 0; a < N_VERIFIED; a++) { v->sums[a] = (uint64_t*)malloc_check(sizeof(uint64_t) * v->n_blocks, "sums of --verify-every"); }
    v->copy = (float*)malloc_check(sizeof(float) * 3 * VERIFY_PIECE, "copy of --verify-every");
}

static inline void verify_free(Verify* v) {
    for (int a = 0; a < N_VERIFIED; a++) { free(v->sums[a]); }
    free(v->copy);
    memset(v, 0, sizeof *v);
}

// bytes for a model of n parameters
static inline double verify_bytes(size_t n) {
    return (double)(N_VERIFIED * sizeof(uint64_t) * (n / VERIFY_BLOCK) + 3 * sizeof(float) * VERIFY_PIECE);
}

static inline uint64_t verify_sum_(const float* tensor, size_t n, size_t block) {
    const size_t first = block * VERIFY_BLOCK, end = first + VERIFY_BLOCK;
    return XXH3_64bits(tensor + first, sizeof(float) * ((end < n ? end : n) - first));
}

static inline void verify_first(Verify* v, int step, float loss, float norm, const float* grads) {
    v->step = step;
    v->loss = loss;
    v->norm = norm;
    v->arena[VERIFY_GRADIENTS] = grads;
    for (int a = 0; a < N_VERIFIED; a++) {
        uint64_t* sums = v->sums[a];
        for (int i = 0; i < v->n_tensors; i++) {
            const float* tensor = v->arena[a] + v->table[i].offset;
            const size_t n = tensor_elements(&v->table[i]), n_blocks = verify_blocks_(&v->table[i]);
            #pragma omp parallel for
            for (size_t b = 0; b < n_blocks; b++) { sums[b] = verify_sum_(tensor, n, b); }
            sums += n_blocks;
        }
    }
}

// element first of a tensor, or one of first..last, as far as they belong to one layer
__attribute__((noreturn))
static inline void verify_fail_(const Verify* v, const char* what, const Tensor* t, size_t first, size_t last, const char* values) {
    char name[256], elements[64];
    const size_t slice = tensor_slice_elements(t), layer = first / slice, from = first - layer * slice;
    const size_t to = last / slice == layer ? last - layer * slice : slice - 1;
    snprintf(elements, sizeof elements, from == to ? "element %zu" : "one of the elements %zu..%zu", from, to);
    fail_run("step %d: the same computation gave two results: %s of %s, %s%s: the hardware (memory, overclocking) or a bug; the "
             "checkpoints are from before", v->step, what, tensor_slice_name(name, sizeof name, t, (int)layer), elements, values);
}

// the first block that differs from its sum ends the run
static inline void verify_arena_(const Verify* v, Verified a) {
    const char* names[N_VERIFIED] = {"parameters", "first moments", "second moments", "gradients"};
    const uint64_t* sums = v->sums[a];
    for (int i = 0; i < v->n_tensors; i++) {
        const Tensor* t = &v->table[i];
        const float* tensor = v->arena[a] + t->offset;
        const size_t n = tensor_elements(t), n_blocks = verify_blocks_(t);
        size_t bad = n_blocks;
        #pragma omp parallel for reduction(min : bad)
        for (size_t b = 0; b < n_blocks; b++) {
            if (b < bad && verify_sum_(tensor, n, b) != sums[b]) { bad = b; }
        }
        size_t first = bad * VERIFY_BLOCK, last = first + VERIFY_BLOCK < n ? first + VERIFY_BLOCK - 1 : n - 1;
        if (bad < n_blocks) { verify_fail_(v, names[a], t, first, last, ""); }
        sums += n_blocks;
    }
}

static inline int same_bits_(float a, float b) { return memcmp(&a, &b, sizeof a) == 0; }

static inline void verify_second(Verify* v, float loss, float norm, const float* grads) {
    v->arena[VERIFY_GRADIENTS] = grads;
    for (int a = 0; a < N_VERIFIED; a++) { verify_arena_(v, (Verified)a); }
    if (!same_bits_(loss, v->loss) || !same_bits_(norm, v->norm)) {
        fail_run("step %d: the same computation gave two results: loss %.9g and %.9g, norm %.9g and %.9g: the hardware (memory, "
                 "overclocking) or a bug; the checkpoints are from before", v->step, (double)v->loss, (double)loss, (double)v->norm, (double)norm);
    }
}

// n elements of a tensor from element `at` on, which is where the pointers stand; what is compared are the new parameters and
// moments of both computations, bit by bit
static inline void verify_adamw(Verify* v, const Tensor* t, size_t at, size_t n, float* p, float* m, float* s, const float* g,
                                float weight_decay, const AdamW* step, const Device* dev) {
    const char* names[3] = {"new parameters", "new first moments", "new second moments"};
    for (size_t first = 0; first < n; first += VERIFY_PIECE) {
        const size_t end = first + VERIFY_PIECE, count = (end < n ? end : n) - first;
        float *real[3] = {p + first, m + first, s + first}, *copy[3] = {v->copy, v->copy + VERIFY_PIECE, v->copy + 2 * VERIFY_PIECE};
        for (int a = 0; a < 3; a++) { memcpy(copy[a], real[a], sizeof(float) * count); }
        adamw_update(copy[0], copy[1], copy[2], g + first, count, weight_decay, step, dev);
        adamw_update(real[0], real[1], real[2], g + first, count, weight_decay, step, dev);
        for (int a = 0; a < 3; a++) {
            if (memcmp(copy[a], real[a], sizeof(float) * count) == 0) { continue; }
            size_t i = 0;
            while (same_bits_(copy[a][i], real[a][i])) { i++; }
            char values[64];
            snprintf(values, sizeof values, " (%.9g and %.9g)", (double)copy[a][i], (double)real[a][i]);
            verify_fail_(v, names[a], t, at + first + i, at + first + i, values);
        }
    }
}
#endif  // LLMC_VERIFY_H
