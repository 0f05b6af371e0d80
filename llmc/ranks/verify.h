/*
A step computed twice (--verify-every K): the same inputs give the same bits, so any difference is the hardware (a
flipped bit in memory, an unstable clock) or a bug, and the run stops before the wrong numbers reach a checkpoint.
    verify_init, verify_free
    verify_watch    an arena to look at: parameters, masters, moments, gradients (data_parallel.h calls it for all)
    verify_first    after the gradients of a step: sums of all these arenas and of the gradients, a block at a time
    verify_second   after the same gradients were computed once more: compares with those sums. That parameters and
                    moments are the same as before is part of it, for nothing may write to them between
    verify_adamw    the update, on a copy first and then in place, and both compared
Arenas are device memory; a GPU's are looked at in pieces that come to the host: slow, but a check.
Cost:   the step takes twice its time. Memory: 1/8 of an arena for the sums, 12 MiB for the copy.
Errors: fail_run names step, tensor and element.
Explained in doc/checkpoints.md
*/
#ifndef LLMC_VERIFY_H
#define LLMC_VERIFY_H
#include "../core/tensor.h"  // tensor_slice_name
#include "../ops/weights.h"  // Weights, weights_update
#include "part.h"            // Part
#include <xxhash.h>

enum { VERIFY_BLOCK = 64, VERIFY_PIECE = 1 << 20 };  // elements under one sum; of one copy

typedef enum {
    VERIFY_PARAMETERS, VERIFY_MASTERS, VERIFY_MOMENTS_1, VERIFY_MOMENTS_2, VERIFY_GRADIENTS, N_VERIFIED
} Verified;

typedef struct {
    const char* memory;   // on the device; NULL: there is none
    const Part* parts;    // that it holds; parameters lie as they are stored
    int n_parts;
    uint64_t* sums;       // one for each block of each part
} VerifyArena;

typedef struct {
    int step;                // that is being verified
    VerifyArena arena[N_VERIFIED];
    float loss, norm;        // of the first computation
    float* copy;             // on the device, (4, VERIFY_PIECE): what an update changes, of a piece
    float* room;             // on the host, (2, VERIFY_PIECE): what a GPU's memory is copied to
} Verify;

static inline void verify_init(Verify* v) {
    memset(v, 0, sizeof *v);
    v->copy = (float*)device_alloc(sizeof(float) * 4 * VERIFY_PIECE, "copy of --verify-every");
#ifdef __CUDACC__
    v->room = (float*)device_pinned(sizeof(float) * 2 * VERIFY_PIECE, "room of --verify-every");
#endif
}

static inline void verify_free(Verify* v) {
    for (int a = 0; a < N_VERIFIED; a++) { free(v->arena[a].sums); }
    device_release(v->copy, sizeof(float) * 4 * VERIFY_PIECE);
    device_pinned_free(v->room);
    memset(v, 0, sizeof *v);
}

static inline size_t verify_blocks_(size_t n) { return (n + VERIFY_BLOCK - 1) / VERIFY_BLOCK; }

static inline void verify_watch(Verify* v, Verified a, const void* memory, const Part* parts, int n_parts) {
    VerifyArena arena = {(const char*)memory, parts, n_parts, v->arena[a].sums};
    size_t n_blocks = 0;
    for (int i = 0; i < n_parts; i++) { n_blocks += verify_blocks_(parts[i].n); }
    if (memory && !arena.sums) {
        arena.sums = (uint64_t*)malloc_check(sizeof(uint64_t) * n_blocks, "sums of --verify-every");
    }
    v->arena[a] = arena;
}

// Bytes for a model of n parameters, what is frozen too, of which a rank keeps n_kept: their moments, gradients and,
// where there are some, masters
static inline double verify_bytes(size_t n, size_t n_kept, int has_masters) {
    const double of_each = 3.0 + has_masters, n_sums = ((double)n + of_each * (double)n_kept) / (double)VERIFY_BLOCK;
    return sizeof(uint64_t) * n_sums + of_each * sizeof(float) * (double)VERIFY_PIECE;
}

// where the host can read n_bytes of device memory: in it, or in room number k
static inline const char* verify_view_(const Verify* v, int k, const void* x, size_t n_bytes, const Device* dev) {
#ifdef __CUDACC__
    device_download(v->room + k * VERIFY_PIECE, x, n_bytes, dev);
    return (const char*)(v->room + k * VERIFY_PIECE);
#else
    (void)v, (void)k, (void)n_bytes, (void)dev;
    return (const char*)x;
#endif
}

// block b of n elements
static inline uint64_t verify_sum_(const char* x, size_t n, size_t b, size_t element_bytes) {
    const size_t first = b * VERIFY_BLOCK, end = first + VERIFY_BLOCK;
    return XXH3_64bits(x + first * element_bytes, element_bytes * ((end < n ? end : n) - first));
}

// element first of a tensor, or one of first..last, as far as they belong to one slice
__attribute__((noreturn))
static inline void verify_fail_(const Verify* v, const char* what, const Tensor* t, size_t first, size_t last,
                                const char* values) {
    char name[256], elements[64];
    const size_t n = tensor_slice_elements(t), slice = first / n, from = first - slice * n;
    const size_t to = last / n == slice ? last - slice * n : n - 1;
    snprintf(elements, sizeof elements, from == to ? "element %zu" : "one of the elements %zu..%zu", from, to);
    fail_run("step %d: the same computation gave two results: %s of %s, %s%s: the hardware (memory, overclocking) or a "
             "bug; the checkpoints are from before",
             v->step, what, tensor_slice_name(name, sizeof name, t, (int)slice), elements, values);
}

// the sums of an arena, or its comparison with them: the first block that differs ends the run
static inline void verify_arena_(const Verify* v, Verified a, int compare, const Device* dev) {
    const char* names[N_VERIFIED] = {"parameters", "float masters", "first moments", "second moments", "gradients"};
    const VerifyArena* arena = &v->arena[a];
    uint64_t* sums = arena->sums;
    for (int i = 0; arena->memory && i < arena->n_parts; i++) {
        const Part part = arena->parts[i];
        for (size_t from = 0; from < part.n; from += VERIFY_PIECE) {
            const size_t n = part.n - from < VERIFY_PIECE ? part.n - from : (size_t)VERIFY_PIECE,
                         n_blocks = verify_blocks_(n);
            const int is_stored = a == VERIFY_PARAMETERS;
            const size_t n_bytes = is_stored ? part.tensor->stored_bytes : sizeof(float);
            const size_t at = is_stored ? tensor_stored_place(part.tensor, part.first) : n_bytes * part.at;
            const char* x = verify_view_(v, 0, arena->memory + at + n_bytes * from, n * n_bytes, dev);
            size_t bad = n_blocks;
            #pragma omp parallel for reduction(min : bad)
            for (size_t b = 0; b < n_blocks; b++) {
                uint64_t sum = verify_sum_(x, n, b, n_bytes);
                if (compare && sum != sums[b] && b < bad) { bad = b; }
                sums[b] = sum;
            }
            const size_t first = part.first + from + bad * VERIFY_BLOCK, next = first + VERIFY_BLOCK,
                         end = part.first + from + n;
            if (bad < n_blocks) { verify_fail_(v, names[a], part.tensor, first, (next < end ? next : end) - 1, ""); }
            sums += n_blocks;
        }
    }
}

// parts: of the gradients that this rank has, as many as verify_watch was told
static inline void verify_first(Verify* v, int step, float loss, float norm, const float* grads, const Part* parts,
                                const Device* dev) {
    v->step = step;
    v->loss = loss;
    v->norm = norm;
    verify_watch(v, VERIFY_GRADIENTS, grads, parts, v->arena[VERIFY_GRADIENTS].n_parts);
    for (int a = 0; a < N_VERIFIED; a++) { verify_arena_(v, (Verified)a, 0, dev); }
}

static inline int same_bits_(float a, float b) { return memcmp(&a, &b, sizeof a) == 0; }

static inline void verify_second(Verify* v, float loss, float norm, const float* grads, const Part* parts,
                                 const Device* dev) {
    verify_watch(v, VERIFY_GRADIENTS, grads, parts, v->arena[VERIFY_GRADIENTS].n_parts);
    for (int a = 0; a < N_VERIFIED; a++) { verify_arena_(v, (Verified)a, 1, dev); }
    if (!same_bits_(loss, v->loss) || !same_bits_(norm, v->norm)) {
        fail_run("step %d: the same computation gave two results: loss %.9g and %.9g, norm %.9g and %.9g: the hardware "
                 "(memory, overclocking) or a bug; the checkpoints are from before",
                 v->step, (double)v->loss, (double)loss, (double)v->norm, (double)norm);
    }
}

// what one of the arrays of Weights holds after the two computations; element `first` of the tensor is its first
static inline void verify_equal_(const Verify* v, int which, const Tensor* t, size_t first, const void* twin,
                                 const void* real, size_t n, size_t element_bytes, const Device* dev) {
    const char* names[4] = {"new parameters", "new float masters", "new first moments", "new second moments"};
    const char *a = verify_view_(v, 0, twin, n * element_bytes, dev),
               *b = verify_view_(v, 1, real, n * element_bytes, dev);
    if (memcmp(a, b, n * element_bytes) == 0) { return; }
    char values[64] = "";
    size_t i = 0;
    while (memcmp(a + i * element_bytes, b + i * element_bytes, element_bytes) == 0) { i++; }
    if (element_bytes == sizeof(float)) {
        float x, y;
        memcpy(&x, a + i * sizeof x, sizeof x);
        memcpy(&y, b + i * sizeof y, sizeof y);
        snprintf(values, sizeof values, " (%.9g and %.9g)", (double)x, (double)y);
    }
    verify_fail_(v, names[which], t, first + i, first + i, values);
}

// n elements of a tensor from element `at` on, which is where the pointers stand; what is compared are the new
// parameters and moments of both computations, bit by bit
static inline void verify_adamw(const Verify* v, const Tensor* t, size_t at, size_t n, const Weights* w, const float* g,
                                float weight_decay, const AdamW* step, uint32_t key, const Device* dev) {
    for (size_t first = 0; first < n; first += VERIFY_PIECE) {
        const size_t count = n - first < VERIFY_PIECE ? n - first : (size_t)VERIFY_PIECE;
        const ElementNumbers numbers = tensor_numbers(t, at + first);
        float* copy = v->copy;
        const Weights real = weights_further(w, first);
        float* twin_master = w->master ? copy + VERIFY_PIECE : NULL;
        const Weights twin =
            weights_of(copy, w->stored_bytes, twin_master, copy + 2 * VERIFY_PIECE, copy + 3 * VERIFY_PIECE);
        void *to[4] = {twin.stored, twin.master, twin.m, twin.v}, *from[4] = {real.stored, real.master, real.m, real.v};
        const size_t n_bytes[4] = {w->stored_bytes, sizeof(float), sizeof(float), sizeof(float)};
        for (int a = 0; a < 4; a++) {
            if (to[a]) { device_copy(to[a], from[a], n_bytes[a] * count, dev); }
        }
        weights_update(&twin, g + first, count, weight_decay, step, key, numbers, dev);
        weights_update(&real, g + first, count, weight_decay, step, key, numbers, dev);
        for (int a = 0; a < 4; a++) {
            if (to[a]) { verify_equal_(v, a, t, at + first, to[a], from[a], count, n_bytes[a], dev); }
        }
    }
}
#endif  // LLMC_VERIFY_H
