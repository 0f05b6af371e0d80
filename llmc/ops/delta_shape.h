/*
What a gated delta rule (gated_delta.h) is about: its sizes, its arrays, which position lies where, and where chunks of
a row begin.
*/
#ifndef LLMC_DELTA_SHAPE_H
#define LLMC_DELTA_SHAPE_H
#include <stddef.h>

enum { DELTA_CHUNK = 64 };

#ifdef __CUDACC__
#define DELTA_FUNCTION static inline __host__ __device__
#else
#define DELTA_FUNCTION static inline
#endif

typedef struct {
    int B, T, Hk, Hv, DK, DV;
    const unsigned char* starts;
} DeltaShape;

// what both passes read, and what backward is asked for; NULL: nobody asks
#ifdef __CUDACC__
template <typename X>
struct DeltaInputsOf {
    const X *q, *k, *v;
    const float *g, *beta;
};
template <typename X>
struct DeltaGradientsOf {
    X *dq, *dk, *dv;
    float *dg, *dbeta;
};
typedef DeltaInputsOf<float> DeltaInputs;
typedef DeltaGradientsOf<float> DeltaGradients;
#else
typedef struct {
    const float *q, *k, *v, *g, *beta;
} DeltaInputs;
typedef struct {
    float *dq, *dk, *dv, *dg, *dbeta;
} DeltaGradients;
#endif

DELTA_FUNCTION size_t delta_state_floats_(const DeltaShape* s) { return (size_t)s->DK * (size_t)s->DV; }
// of a row, cut from its beginning
DELTA_FUNCTION size_t delta_chunks_(const DeltaShape* s) { return ((size_t)s->T + DELTA_CHUNK - 1) / DELTA_CHUNK; }
// floats of `states`
static inline size_t delta_states_floats(const DeltaShape* s) {
    return (size_t)s->B * delta_chunks_(s) * (size_t)s->Hv * delta_state_floats_(s);
}
// where position t of row b begins in q and k, v and o, g and beta, at this value head
DELTA_FUNCTION size_t delta_qk_(const DeltaShape* s, int b, int t, int h) {
    return (((size_t)b * s->T + t) * s->Hk + h / (s->Hv / s->Hk)) * s->DK;
}
DELTA_FUNCTION size_t delta_v_(const DeltaShape* s, int b, int t, int h) {
    return (((size_t)b * s->T + t) * s->Hv + h) * s->DV;
}
DELTA_FUNCTION size_t delta_g_(const DeltaShape* s, int b, int t, int h) { return ((size_t)b * s->T + t) * s->Hv + h; }
DELTA_FUNCTION int delta_starts_(const DeltaShape* s, int b, int t) {
    return s->starts && s->starts[(size_t)b * s->T + t];
}
// how many positions the chunk has that begins at t
DELTA_FUNCTION int delta_chunk_length_(const DeltaShape* s, int b, int t) {
    int n = 1;
    while (n < DELTA_CHUNK && t + n < s->T && !delta_starts_(s, b, t + n)) { n++; }
    return n;
}
// Where `states` has S before the chunk that begins at t. A chunk that goes on follows a whole one of its document, so
// no two of them begin in the same DELTA_CHUNK positions; one that begins a document needs no place
DELTA_FUNCTION size_t delta_slot_(const DeltaShape* s, int b, int t, int h) {
    return (((size_t)b * delta_chunks_(s) + t / DELTA_CHUNK) * s->Hv + h) * delta_state_floats_(s);
}
#endif  // LLMC_DELTA_SHAPE_H
