/*
Sizes of latent_attention.h, and which keys a position sees.
*/
#ifndef LLMC_LATENT_SHAPE_H
#define LLMC_LATENT_SHAPE_H
#include "../core/device.h"  // in a CUDA build, what __host__ means
#include "../core/fmath.h"   // FM_FUNCTION: for the host and, in a CUDA build, for kernels
#include "entry_windows.h"   // Places

typedef struct {
    int N, H, dn, dr, dv, topk;  // positions; heads; channels; length of a list
    float scale;                 // of the scores, above 0
} LatentShape;

// between the three calls of backward, on the device
typedef struct {
    float* k_rope;      // dk_rope in floats, (n_keys, dr)
    const float* heads;  // (H, n_keys, dr): what each head adds to it
    int H, n_keys, dr;
} LatentBackward;

// how many keys position n sees; the i-th of them is row latent_key
FM_FUNCTION int latent_keys(const LatentShape* s, const Places* places, const int* chosen, size_t n) {
    int length = 0;
    if (!chosen) { return places->t[n] + 1; }
    while (length < s->topk && chosen[n * s->topk + length] >= 0) { length++; }
    return length;
}
FM_FUNCTION size_t latent_key(const LatentShape* s, const Places* places, const int* chosen, size_t n, int i) {
    return (size_t)(chosen ? chosen[n * s->topk + i] : places->first_key[n] + i);
}

// channels of a head: of q, of kv
FM_FUNCTION size_t latent_q_(const LatentShape* s) { return (size_t)(s->dn + s->dr); }
FM_FUNCTION size_t latent_kv_(const LatentShape* s) { return (size_t)(s->dn + s->dv); }
#endif  // LLMC_LATENT_SHAPE_H
