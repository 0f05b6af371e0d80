/*
bf16 on the host: the upper half of a float's bits, and nothing else.
    bf16_widen     as a float, exactly
    bf16_nearest   the nearest to a float, ties to even; NaN stays NaN, and what is beyond the largest, 0x1.fep127, by
                   half a step or more becomes infinite (numerics.md 6)
    bf16_is_beyond   a finite float of which that is so
With noise instead, for parameters that learn: stochastic_bf16 of rng.h. Vectors: v_load_bf16 of vec.h.
*/
#ifndef LLMC_BF16_H
#define LLMC_BF16_H
#include <stdint.h>
#include <string.h>

static inline float bf16_widen(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint16_t bf16_nearest(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t nearest = bits + 0x7fff + (bits >> 16 & 1), is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return (uint16_t)((is_nan ? bits | 0x400000 : nearest) >> 16);
}

static inline int bf16_is_beyond(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t magnitude = bits & 0x7fffffff;
    return magnitude >= 0x7f7f8000 && magnitude < 0x7f800000;
}
#endif  // LLMC_BF16_H
