/*
Random numbers: small generators, each a pure function of its state. Never seeded by a thread, a rank or the clock.
    xorshift*   sampling of tokens: 64 bits of state
    mt19937     start values: the stream of PyTorch's CPU generator, so that the same seed makes the same network
    noise       rounding: no state at all, any place of the stream is computed at once, on the device too
Order:  one sequence; normal_fill consumes it in the order of the elements, 16 at a time (as PyTorch does). Noise:
        element i of tensor k in update t gets the same bits on every machine, however threads and ranks share the
        elements.
Source: Vigna 2016, arXiv:1402.6246; Matsumoto & Nishimura 1998; Box & Muller 1958; SplitMix64: Steele,
        Lea & Flood 2014, doi:10.1145/2660193.2660195
*/
#ifndef LLMC_RNG_H
#define LLMC_RNG_H
#include "fmath.h"  // fm_log, fm_sin, fm_cos, FM_FUNCTION: for host and device
#include <math.h>
#include <stddef.h>
#include <stdint.h>

// ---- xorshift* ----

static inline uint32_t xorshift_u32(uint64_t* state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (uint32_t)((*state * 0x2545F4914F6CDD1DULL) >> 32);
}

// in [0, 1), 24 random bits
static inline float xorshift_float(uint64_t* state) { return (float)(xorshift_u32(state) >> 8) / 16777216.0f; }

// ---- mt19937 ----

enum { MT_N = 624, MT_M = 397 };

typedef struct {
    uint32_t word[MT_N];
    int next;  // index of the word that comes next; MT_N: make new ones first
} Mt19937;

static inline void mt19937_init(Mt19937* mt, uint32_t seed) {
    mt->word[0] = seed;
    for (uint32_t i = 1; i < MT_N; i++) { mt->word[i] = 1812433253u * (mt->word[i - 1] ^ (mt->word[i - 1] >> 30)) + i; }
    mt->next = MT_N;
}

static inline uint32_t mt19937_u32(Mt19937* mt) {
    if (mt->next == MT_N) {
        for (int i = 0; i < MT_N; i++) {
            uint32_t y = (mt->word[i] & 0x80000000u) | (mt->word[(i + 1) % MT_N] & 0x7fffffffu);
            mt->word[i] = mt->word[(i + MT_M) % MT_N] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0u);
        }
        mt->next = 0;
    }
    uint32_t y = mt->word[mt->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

static inline float mt19937_float(Mt19937* mt) { return (float)(mt19937_u32(mt) & 0xffffff) / 16777216.0f; }

static inline double mt19937_double(Mt19937* mt) {
    uint64_t high = mt19937_u32(mt);
    uint64_t both = high << 32 | mt19937_u32(mt);
    return (double)(both & ((1ULL << 53) - 1)) / 9007199254740992.0;
}

// ---- uniform and normal numbers, as torch.Tensor.uniform_ and normal_ draw them ----

// from low to high, rounded once: PyTorch fuses the multiply-add, which double holds exactly
static inline void uniform_fill(Mt19937* mt, float* x, size_t n, float low, float high) {
    const double width = (double)(high - low);
    for (size_t i = 0; i < n; i++) { x[i] = (float)((double)mt19937_float(mt) * width + (double)low); }
}

// Box-Muller over a group of 16 uniforms: x[t] and x[t+8] make a pair
static inline void normal_group_(float* x, float mean, float std) {
    const double pi = 3.14159265358979323846;
    for (int t = 0; t < 8; t++) {
        float u1 = 1.0f - x[t], u2 = x[t + 8];
        float radius = sqrtf(-2.0f * fm_log(u1 + 1e-12f)), theta = (float)(2.0 * pi * (double)u2);
        x[t] = radius * fm_cos(theta) * std + mean;
        x[t + 8] = radius * fm_sin(theta) * std + mean;
    }
}

static inline void normal_fill(Mt19937* mt, float* x, size_t n, float mean, float std) {
    const double pi = 3.14159265358979323846;
    if (n >= 16) {
        for (size_t i = 0; i < n; i++) { x[i] = mt19937_float(mt); }
        for (size_t i = 0; i + 16 <= n; i += 16) { normal_group_(x + i, mean, std); }
        if (n % 16 != 0) {  // the last 16 are drawn anew and overlap the group before
            for (size_t i = n - 16; i < n; i++) { x[i] = mt19937_float(mt); }
            normal_group_(x + n - 16, mean, std);
        }
        return;
    }
    for (size_t i = 0; i < n; i += 2) {
        float u1 = (float)mt19937_double(mt), u2 = (float)mt19937_double(mt);
        float radius = sqrtf(-2.0f * fm_log(1.0f - u2 + 1e-12f)), theta = (float)(2.0 * pi * (double)u1);
        x[i] = radius * fm_cos(theta) * std + mean;
        if (i + 1 < n) { x[i + 1] = radius * fm_sin(theta) * std + mean; }
    }
}

// ---- noise ----

// number i of SplitMix64's stream that starts at seed: a counter, mixed until every output bit depends on every input
// bit
FM_FUNCTION uint64_t splitmix64(uint64_t seed, uint64_t i) {
    uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

// one key for each update of each tensor of a run
static inline uint32_t noise_key_of(uint64_t seed, uint64_t step, uint64_t tensor) {
    return (uint32_t)(splitmix64(splitmix64(splitmix64(seed, 0), step), tensor) >> 32);
}

enum { NUMBERS_CUTS = 3 };

// The numbers that elements have in the whole model: of element i `first` plus its place, where after `run` that follow
// each other come those of other ranks, until the next begin `step` behind; run 0: all follow each other. Inside of a
// run others' come in, too: from its element cut[k] on numbers are jump[k] larger; jump 0: there are none
typedef struct {
    size_t first, begin, run, step;  // begin: element 0 is this one of them
    size_t cut[NUMBERS_CUTS], jump[NUMBERS_CUTS];
} ElementNumbers;

FM_FUNCTION size_t element_number(ElementNumbers x, size_t i) {
    const size_t at = x.begin + i;
    if (x.run == 0) { return x.first + at; }
    size_t number = x.first + at / x.run * x.step + at % x.run;
    for (int k = 0; k < NUMBERS_CUTS; k++) { number += at % x.run >= x.cut[k] ? x.jump[k] : 0; }
    return number;
}

static inline ElementNumbers numbers_from(size_t first) {
    const ElementNumbers x = {first, 0, 0, 0, {0}, {0}};
    return x;
}

static inline ElementNumbers numbers_by(size_t first, size_t run, size_t step) {
    const ElementNumbers x = {first, 0, run, step, {0}, {0}};
    return x;
}

static inline ElementNumbers numbers_further(ElementNumbers x, size_t n) {
    x.begin += n;
    return x;
}

// element i: keys begin 2^32 places apart in one stream
FM_FUNCTION uint32_t noise_u32(uint32_t key, uint64_t i) {
    return (uint32_t)(splitmix64(0, ((uint64_t)key << 32) + i) >> 32);
}

// Stochastic rounding of a float to bf16, its upper 16 bits: up, away from 0, with the probability that the lower 16
// bits are of the distance to the next bf16, so that the mean over the noise is x itself. Adding 16 random bits
// carries in just that many cases. A bf16 stays what it is; so do infinities and NaNs; beyond the largest bf16 comes
// infinity, as when rounding to nearest.
FM_FUNCTION uint16_t stochastic_bf16(float x, uint32_t noise) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    // a NaN stays one
    if ((u & 0x7f800000u) == 0x7f800000u) { return (uint16_t)(u >> 16 | (u & 0x007fffffu ? 0x40u : 0u)); }
    return (uint16_t)((u + (noise & 0xffffu)) >> 16);
}
#endif  // LLMC_RNG_H
