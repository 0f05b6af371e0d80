/*
Weights: what an update changes, as one thing to hand around. A CPU build has float parameters and their moments; a
CUDA build may store bf16 and keep float masters beside it, from which each update rounds anew. What does not learn may
be bf16 in every build.
*/
#ifndef LLMC_WEIGHTS_H
#define LLMC_WEIGHTS_H
#include "adamw.h"  // adamw_update_stored, adamw_round_stored
#include "../core/bf16.h"    // bf16_nearest
#include "../core/tensor.h"  // Tensor, tensor_stored_place
#include "ema.h"    // ema_update
#include "muon.h"   // muon_direction, muon_descend_stored

// all of it is device memory
typedef struct {
    void* stored;          // parameters as the ops read them: float, or bf16
    size_t stored_bytes;   // of one; in a whole arena of them each tensor says it (tensors_store)
    float *master, *m, *v; // master: the same parameters in float, from which `stored` is rounded; NULL: none
} Weights;

static inline Weights weights_of(void* stored, size_t stored_bytes, float* master, float* m, float* v) {
    Weights w = {stored, stored_bytes, master, m, v};
    return w;
}

// AdamW on n elements with these numbers in the model; key: of the noise with which `stored` is
// rounded
static inline void weights_update(const Weights* w, const float* g, size_t n, float weight_decay, const AdamW* step,
                                  uint32_t key, ElementNumbers numbers, const Device* dev) {
#ifdef __CUDACC__
    if (w->stored_bytes == sizeof(__nv_bfloat16)) {
        adamw_update_stored((__nv_bfloat16*)w->stored, w->master, w->m, w->v, g, n, weight_decay, step, key, numbers,
                            dev);
        return;
    }
#endif
    adamw_update_stored((float*)w->stored, w->master, w->m, w->v, g, n, weight_decay, step, key, numbers, dev);
}

// Muon on n elements of a matrix (rows, columns) from number `first` on, where w stands; x: all of the matrix, as
// muon_momentum has left it
static inline void weights_muon(const Weights* w, const float* x, size_t first, size_t n, int rows, int columns,
                                float weight_decay, const Muon* u, uint32_t key, ElementNumbers numbers, void* room,
                                const Device* dev) {
#ifdef __CUDACC__
    if (w->stored_bytes == sizeof(__nv_bfloat16)) {
        __nv_bfloat16* stored = (__nv_bfloat16*)w->stored;
        const __nv_bfloat16* direction = muon_direction(x, rows, columns, room, (const __nv_bfloat16*)stored, dev);
        muon_descend_stored(stored, w->master, direction + first, n, rows, columns, weight_decay, u, key, numbers, dev);
        return;
    }
#endif
    float* stored = (float*)w->stored;
    const float* direction = muon_direction(x, rows, columns, room, (const float*)stored, dev);
    muon_descend_stored(stored, w->master, direction + first, n, rows, columns, weight_decay, u, key, numbers, dev);
}

// bf16 of a CPU build, which does not learn
static inline void weights_narrow_(uint16_t* stored, const float* x, size_t n) {
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) { stored[i] = bf16_nearest(x[i]); }
}

// `stored` anew from the masters, with the noise of that update
static inline void weights_round(const Weights* w, size_t n, uint32_t key, ElementNumbers numbers, const Device* dev) {
#ifdef __CUDACC__
    if (w->stored_bytes == sizeof(__nv_bfloat16)) {
        adamw_round_stored((__nv_bfloat16*)w->stored, w->master, n, key, numbers, dev);
        return;
    }
#else
    if (w->stored_bytes == sizeof(uint16_t)) {
        weights_narrow_((uint16_t*)w->stored, w->master, n);
        return;
    }
#endif
    adamw_round_stored((float*)w->stored, w->master, n, key, numbers, dev);
}

// the average e (n) takes in the parameters, from their masters where there are any
static inline void weights_average(const Weights* w, float* e, size_t n, float weight, const Device* dev) {
#ifdef __CUDACC__
    if (!w->master && w->stored_bytes == sizeof(__nv_bfloat16)) {
        ema_update(e, (const __nv_bfloat16*)w->stored, n, weight, dev);
        return;
    }
#endif
    ema_update(e, w->master ? w->master : (const float*)w->stored, n, weight, dev);
}

// of a whole arena of stored parameters those from element `first` of a tensor on, and of what is kept from `kept` on
static inline Weights weights_from(const Weights* w, const Tensor* t, size_t first, size_t kept) {
    float* master = w->master ? w->master + kept : NULL;
    char* stored = (char*)w->stored + tensor_stored_place(t, first);
    return weights_of(stored, t->stored_bytes, master, w->m + kept, w->v + kept);
}

// the same, n elements further
static inline Weights weights_further(const Weights* w, size_t n) {
    float* master = w->master ? w->master + n : NULL;
    return weights_of((char*)w->stored + n * w->stored_bytes, w->stored_bytes, master, w->m + n, w->v + n);
}
#endif  // LLMC_WEIGHTS_H
