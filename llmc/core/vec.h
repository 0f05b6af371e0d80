/*
One vector type for the fast C code: as many floats as the CPU this is compiled for takes in one instruction.
    VLANES   16 (AVX-512), 8 (AVX) or 4 (SSE2, NEON, anything else): the same source builds for all of them
    vfloat   VLANES floats; + - * / work lane by lane and round exactly as the scalar ones do; v_madd is madd
GCC's vector extension (clang has it too) instead of intrinsics, but for v_madd: a line reads like its scalar twin.
Lanes hold different OUTPUTS, never parts of one sum, so that the width cannot change a bit (doc/exactness.md rule 2).
*/
#ifndef LLMC_VEC_H
#define LLMC_VEC_H
#include "madd.h"  // madd
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#elif !defined(SYSTEM_LIBM) && defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VLANES 16
#elif defined(__AVX__)
#define VLANES 8
#else
#define VLANES 4
#endif

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "__builtin_shufflevector needs gcc 12 or newer, or clang (make CC=clang)"
#endif

typedef float vfloat __attribute__((vector_size(4 * VLANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * VLANES)));
typedef int32_t vint __attribute__((vector_size(4 * VLANES)));
typedef uint16_t vhalf __attribute__((vector_size(2 * VLANES), aligned(2), may_alias));
typedef uint8_t vbyte __attribute__((vector_size(VLANES), aligned(1), may_alias));
typedef float vfloat_unaligned __attribute__((vector_size(4 * VLANES), aligned(4), may_alias));

static inline __attribute__((always_inline)) vfloat v_load(const float* p) { return *(const vfloat_unaligned*)p; }
// VLANES values of bf16, which are the upper halves of floats
static inline vfloat v_load_bf16(const uint16_t* p) {
    const vuint bits = __builtin_convertvector(*(const vhalf*)p, vuint) << 16;
    return (vfloat)bits;
}
// the upper byte of each word as the e4m3 that it is, 2^120 times too small (FP8_UNIT of fp8.h): the sign stays, and
// exponent and mantissa move to where a float has theirs
static inline vfloat v_upper_fp8(vuint words) { return (vfloat)((vint)words >> 4 & (int32_t)0x87f00000); }
// VLANES such bytes
static inline vfloat v_load_fp8(const uint8_t* p) {
    return v_upper_fp8(__builtin_convertvector(*(const vbyte*)p, vuint) << 24);
}
// the lowest 4 bits of each word as the e2m1 that they are (fp4.h); all else in it counts for nothing
static inline vfloat v_widen_fp4(vuint codes) {
#if defined(__AVX512F__)
    const vfloat numbers = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                            -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return (vfloat)_mm512_permutexvar_ps((__m512i)codes, (__m512)numbers);
#elif defined(__AVX2__)
    const vfloat numbers = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const vfloat sizes = (vfloat)_mm256_permutevar8x32_ps((__m256)numbers, (__m256i)codes);
    return (vfloat)((vuint)sizes | (codes << 28 & 0x80000000u));
#else  // exponent and mantissa move to where a float has theirs, 2^126 times too small; the sign stays
    return (vfloat)((vint)(codes << 28) >> 6 & (int32_t)0x81c00000) * 0x1p126f;
#endif
}
// VLANES such codes, two in a byte, the first in its lower half
static inline vfloat v_load_fp4(const uint8_t* p) {
#if VLANES == 16
    uint32_t a, b;
    memcpy(&a, p, sizeof a);
    memcpy(&b, p + sizeof a, sizeof b);
    const vuint codes = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
    const vuint places = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
#elif VLANES == 8
    uint32_t a;
    memcpy(&a, p, sizeof a);
    const vuint codes = {a, a, a, a, a, a, a, a}, places = {0, 4, 8, 12, 16, 20, 24, 28};
#else
    uint16_t a;
    memcpy(&a, p, sizeof a);
    const vuint codes = {a, a, a, a}, places = {0, 4, 8, 12};
#endif
    return v_widen_fp4(codes >> places);
}
// byte i of each word, the lowest is 0, as the scale of e8m0 that it is (fp4.h), but not NaN
static inline vfloat v_part_e8m0(vfloat words, int i) {
    const vuint bits = (vuint)words >> 8 * i << 24 >> 1;
    return (vfloat)(bits | ((vuint)(bits == 0) & 0x00400000u));
}
static inline __attribute__((always_inline)) void v_store(float* p, vfloat x) { *(vfloat_unaligned*)p = x; }

// v_store past the caches, for what nobody reads soon: a line of which all is written so need not be read first. p is a
// multiple of the vector's size. Another thread may read it after v_past_done() of this one
static inline __attribute__((always_inline)) void v_store_past(float* p, vfloat x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)x);
#elif defined(__AVX__)
    _mm256_stream_ps(p, (__m256)x);
#elif defined(__SSE2__)
    _mm_stream_ps(p, (__m128)x);
#else
    v_store(p, x);
#endif
}
static inline void v_past_done(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// every lane is x; -0 is kept, since x - 0 is x
static inline __attribute__((always_inline)) vfloat v_fill(float x) {
    const vfloat zero = {0};
    return x - zero;
}

// a * b + c, rounded once
static inline __attribute__((always_inline)) vfloat v_madd(vfloat a, vfloat b, vfloat c) {
#if defined(SYSTEM_LIBM)
    return a * b + c;
#elif defined(__AVX512F__)
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vfloat)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    vfloat sum;
    for (int i = 0; i < VLANES; i++) { sum[i] = madd(a[i], b[i], c[i]); }
    return sum;
#endif
}

// of a comparison, whose lanes are -1 or 0: bit i is lane i
static inline uint32_t v_mask_bits(vint mask) {
#if defined(__AVX512F__)
    return (uint32_t)_mm512_cmplt_epi32_mask((__m512i)mask, _mm512_setzero_si512());
#elif defined(__AVX__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
    uint32_t bits = 0;
    for (int i = 0; i < VLANES; i++) { bits |= (uint32_t)(mask[i] & 1) << i; }
    return bits;
#endif
}

// lanes a0 b0 a1 b1 ... from the lower halves of a and b, and the same from the upper halves
static inline vfloat v_interleave_low(vfloat a, vfloat b) {
#if VLANES == 16
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif VLANES == 8
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

static inline vfloat v_interleave_high(vfloat a, vfloat b) {
#if VLANES == 16
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif VLANES == 8
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// and back: the lanes of even number of a, then of b, and those of odd number
static inline vfloat v_even(vfloat a, vfloat b) {
#if VLANES == 16
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif VLANES == 8
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
    return __builtin_shufflevector(a, b, 0, 2, 4, 6);
#endif
}

static inline vfloat v_odd(vfloat a, vfloat b) {
#if VLANES == 16
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif VLANES == 8
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    return __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// transpose n rows of VLANES columns in registers, n a power of two up to VLANES: each of the log2(n) rounds deals rows
// i and i + n/2 like two halves of a deck of cards; after all rounds columns lie one behind the other, n floats each
static inline __attribute__((always_inline)) void v_transpose_rows(vfloat* rows, int n) {
    vfloat dealt[VLANES];
    for (int round = 1; round < n; round *= 2) {
        #pragma GCC unroll 16
        for (int i = 0; i < n / 2; i++) {
            dealt[2 * i] = v_interleave_low(rows[i], rows[i + n / 2]);
            dealt[2 * i + 1] = v_interleave_high(rows[i], rows[i + n / 2]);
        }
        #pragma GCC unroll 16
        for (int i = 0; i < n; i++) { rows[i] = dealt[i]; }
    }
}

// a square: row i becomes column i. AVX moves numbers within halves of a vector with one instruction, across them with
// another: so it takes half as many as dealing does
#if VLANES == 8
static inline __attribute__((always_inline)) void v_transpose(vfloat rows[VLANES]) {
    vfloat pairs[8], fours[8];
    #pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    #pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {  // rows i / 4 * 4 .. + 3 of columns i % 4 and i % 4 + 4
        const vfloat a = pairs[i / 4 * 4 + i % 4 / 2], b = pairs[i / 4 * 4 + i % 4 / 2 + 2];
        fours[i] = i % 2 ? __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
                         : __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    }
    #pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        rows[i] = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        rows[i + 4] = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
#else
static inline __attribute__((always_inline)) void v_transpose(vfloat rows[VLANES]) { v_transpose_rows(rows, VLANES); }
#endif

// the square of VLANES rows x VLANES columns at x, rows `stride` floats apart, turned: lane r of columns[c] is x[r][c]
static inline void v_load_columns(vfloat columns[VLANES], const float* x, size_t stride) {
    for (int r = 0; r < VLANES; r++) { columns[r] = v_load(x + r * stride); }
    v_transpose(columns);
}

// The same of words of 4 bytes, rows `stride` bytes apart: two bf16, four e4m3 or eight e2m1 turn as one, with half, a
// quarter or an eighth of the work. Lane r of words[c] has the elements 2c and 2c + 1 of row r, or 4c to 4c + 3, or 8c
// to 8c + 7, the first in its lowest bits
static inline __attribute__((always_inline)) void v_load_column_words(vfloat words[VLANES], const char* x,
                                                                      size_t stride) {
    for (int r = 0; r < VLANES; r++) { memcpy(&words[r], x + r * stride, sizeof words[r]); }
    v_transpose(words);
}
static inline vfloat v_lower_bf16(vfloat pairs) { return (vfloat)((vuint)pairs << 16); }
static inline vfloat v_upper_bf16(vfloat pairs) { return (vfloat)((vuint)pairs & 0xffff0000u); }
// number i of the four, as v_upper_fp8 gives it
static inline vfloat v_part_fp8(vfloat words, int i) { return v_upper_fp8((vuint)words << (24 - 8 * i)); }
// number i of the eight
static inline vfloat v_part_fp4(vfloat words, int i) { return v_widen_fp4((vuint)words >> 4 * i); }
#endif  // LLMC_VEC_H
