/*
Random numbers: two small generators, each a pure function of its state. Never seeded by a thread, a rank or the clock.
    xorshift*   sampling of tokens: 64 bits of state
    mt19937     start values: the stream of PyTorch's CPU generator, so that the same seed makes the same network
Order:  one sequence; normal_fill consumes it in the order of the elements, 16 at a time (as PyTorch does).
Source: Vigna 2016, arXiv:1402.6246; Matsumoto & Nishimura 1998; Box & Muller 1958; spec gpt2.md section 7
*/
#ifndef LLMC_RNG_H
#define LLMC_RNG_H
#include "fmath.h"  // fm_log, fm_sin, fm_cos
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

// ---- normal numbers, as torch.Tensor.normal_ draws them ----

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
#endif  // LLMC_RNG_H
