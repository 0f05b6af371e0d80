/*
What a model whose memory has a fixed size hands from one pass to the next, so that a text may come in windows of any
length, down to single tokens, with the bits of the whole. Each layer has so many kinds of it for each row of a batch:
of Mamba the last inputs of the convolution, and the states of the scan.
    carried_none     nothing is carried: every pass starts anew
    carried_add      one kind: how many floats a row has of it in a layer, and what stands in them before a text
    carried_open     memory for so many batches that are read in turn; carried_batch: that of one of them
    carried_begin    a pass reads `now` and writes `next`. What layer l hands on begins as what it was given; its ops
                     then move it to the end of the pass
    carried_part     where that is; NULL where nothing is carried
    carried_swap     what was written is what the next pass reads: after backward, which reads `now` too
    carried_clear    rows that start from nothing
Layout: batches one after the other; of each the kinds, (L, B, n floats).
*/
#ifndef LLMC_CARRIED_H
#define LLMC_CARRIED_H
#include "device.h"  // device_alloc, device_copy, device_upload
#include <assert.h>

enum { CARRIED_KINDS = 4 };

typedef struct {
    int L, B, n_kinds, n_batches;
    size_t n[CARRIED_KINDS];       // floats of a row in a layer
    float nothing[CARRIED_KINDS];  // what stands there before a text
    float *now, *next;             // device memory
} Carried;

static inline Carried carried_none(int L, int B) {
    Carried s;
    memset(&s, 0, sizeof s);
    s.L = L;
    s.B = B;
    return s;
}

static inline void carried_add(Carried* s, size_t n, float nothing) {
    assert(s->n_kinds < CARRIED_KINDS);
    s->n[s->n_kinds] = n;
    s->nothing[s->n_kinds++] = nothing;
}

// floats of one layer; of all layers
static inline size_t carried_layer_floats(const Carried* s, int kind) { return (size_t)s->B * s->n[kind]; }
static inline size_t carried_kind_floats(const Carried* s, int kind) {
    return (size_t)s->L * carried_layer_floats(s, kind);
}

static inline size_t carried_floats(const Carried* s) {
    size_t n = 0;
    for (int kind = 0; kind < s->n_kinds; kind++) { n += carried_kind_floats(s, kind); }
    return n;
}

// of so many batches
static inline size_t carried_bytes(const Carried* s, int n_batches) {
    return sizeof(float) * (size_t)n_batches * carried_floats(s);
}

static inline void carried_open(Carried* s, int n_batches) {
    s->n_batches = n_batches;
    s->now = (float*)device_alloc(carried_bytes(s, n_batches), "carried states");
    s->next = (float*)device_alloc(carried_bytes(s, n_batches), "carried states");
}

static inline void carried_close(Carried* s) {
    device_release(s->now, carried_bytes(s, s->n_batches));
    device_release(s->next, carried_bytes(s, s->n_batches));
    s->now = s->next = NULL;
}

static inline Carried carried_batch(const Carried* s, int k) {
    Carried one = *s;
    if (s->now) {
        one.now += (size_t)k * carried_floats(s);
        one.next += (size_t)k * carried_floats(s);
    }
    return one;
}

// layer l's part of `states`, which is s->now or s->next; NULL where nothing is carried
static inline float* carried_part(const Carried* s, float* states, int kind, int l) {
    if (!states) { return NULL; }
    for (int k = 0; k < kind; k++) { states += carried_kind_floats(s, k); }
    return states + (size_t)l * carried_layer_floats(s, kind);
}

static inline void carried_begin(const Carried* s, int l, const Device* dev) {
    for (int kind = 0; kind < s->n_kinds && s->now; kind++) {
        device_copy(carried_part(s, s->next, kind, l), carried_part(s, s->now, kind, l),
                    sizeof(float) * carried_layer_floats(s, kind), dev);
    }
}

// rows first..end-1
static inline void carried_clear(const Carried* s, int first, int end, const Device* dev) {
    for (int kind = 0; kind < s->n_kinds; kind++) {
        const size_t n = (size_t)(end - first) * s->n[kind];
        float* nothing = (float*)malloc_check(sizeof(float) * n, "states of no text");
        for (size_t i = 0; i < n; i++) { nothing[i] = s->nothing[kind]; }
        for (int l = 0; l < s->L; l++) {
            float* to = carried_part(s, s->now, kind, l) + (size_t)first * s->n[kind];
            device_upload(to, nothing, sizeof(float) * n, dev);
        }
        device_sync(dev);
        free(nothing);
    }
}

static inline void carried_swap(Carried* s) {
    float* was = s->now;
    s->now = s->next;
    s->next = was;
}
#endif  // LLMC_CARRIED_H
