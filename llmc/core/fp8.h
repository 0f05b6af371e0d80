/*
float8 on the host, in the format e4m3 of neural networks, and matrices of it in blocks that share a scale.
    fp8_widen           as a float, exactly
    fp8_nearest         the nearest to a float, ties to even; what is larger than 448 becomes 448; not for NaN
    fp8_scale           of a block whose largest magnitude is known
    fp8_row_scale       of a group of activations: FP8_BLOCK neighbours of a row; fp8_magnitude: of one of them
    fp8_quantize_rows   FP8_BLOCK rows at most, all of their blocks
Format: sign, 4 bits of exponent whose bias is 7, 3 of mantissa; exponent 0: multiples of 2^-9. No infinity: the largest
        number is 448 = 1.75 * 2^8, and only 0x7f and 0xff are NaN.
Scales: one float for each block of 128 x 128; a weight is its byte's number times the scale. Those of fp8_scale are
        powers of two: a weight then has 4 digits and fits into a bf16, the product rounds nothing, and the model that
        computes is one that a file of bf16 can hold, bit for bit. Files may come with any others up to 2^7.
Error:  half a last place: 2^-4 of a weight at most, and below 2^-6 of a scale 2^-10 of it. The largest of a block lies
        between 224 and 448 scales: another scale than a power of two would move that last limit by less than 2.
Source: Micikevicius et al. 2022, arXiv:2209.05433, table 1; blocks of 128 x 128 as DeepSeek-AI 2024, arXiv:2412.19437
*/
#ifndef LLMC_FP8_H
#define LLMC_FP8_H
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__  // kernels read codes, too
#define FP8_FUNCTION static inline __host__ __device__
#else
#define FP8_FUNCTION static inline
#endif

enum { FP8_BLOCK = 128 };  // rows and columns that share a scale; the last ones of a matrix may be fewer

#define FP8_LARGEST 448.0f
#define FP8_LEAST_SCALE 0x1p-120f  // all products with it are normal floats and fit into a bf16
#define FP8_LARGEST_SCALE 0x1p7f   // times FP8_UNIT it is a float
#define FP8_LEAST_ROW 1e-4f        // official inference code of DeepSeek takes no group of activations as smaller
#define FP8_LARGEST_WEIGHT (FP8_LARGEST * FP8_LARGEST_SCALE)  // 57,344

// Exponent and mantissa in the places that those of a float have are a number 2^-120 as large, subnormal ones too
#define FP8_UNIT 0x1p120f

FP8_FUNCTION float fp8_widen(uint8_t byte) {
    const uint32_t bits = (uint32_t)(byte & 0x80) << 24 | (uint32_t)(byte & 0x7f) << 20;
    float x;
    memcpy(&x, &bits, sizeof x);
    return (byte & 0x7f) == 0x7f ? NAN : x * FP8_UNIT;
}

FP8_FUNCTION uint8_t fp8_nearest(float x) {
    const float size = fabsf(x), at_most = size < FP8_LARGEST ? size : FP8_LARGEST;
    const float small = at_most + 0x1p14f;  // whose last place is 2^-9
    uint32_t bits, small_bits, sign;
    memcpy(&bits, &at_most, sizeof bits);
    memcpy(&small_bits, &small, sizeof small_bits);
    memcpy(&sign, &x, sizeof sign);
    const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)((sign >> 24 & 0x80) | ((at_most < 0x1p-6f ? small_bits : normal) & 0x7f));
}

// the smallest power of two with which the largest magnitude of a block is 448 at most
static inline float fp8_scale(float largest) {
    int exponent;
    const float mantissa = frexpf(largest, &exponent);  // from 0.5 to 1; 448 = 0.875 * 2^9
    const float scale = largest > 0.0f ? ldexpf(1.0f, exponent - 9 + (mantissa > 0.875f)) : 0.0f;
    return scale < FP8_LEAST_SCALE ? FP8_LEAST_SCALE : scale < FP8_LARGEST_SCALE ? scale : FP8_LARGEST_SCALE;
}

// An activation may be anything: NaN counts as infinite
FP8_FUNCTION float fp8_magnitude(float x) { return fabsf(x) <= FLT_MAX ? fabsf(x) : INFINITY; }

// the smallest power of two with which the largest of a group is 448 at most, FP8_LEAST_ROW where it is smaller than
// that. A group with an infinite number has none: NaN
FP8_FUNCTION float fp8_row_scale(float largest) {
    const float size = largest > FP8_LEAST_ROW ? largest : FP8_LEAST_ROW;
    uint32_t bits;
    memcpy(&bits, &size, sizeof bits);
    const uint32_t is_above = (bits & 0x7fffff) > 0x600000;  // 448 = 1.75 * 2^8
    bits = ((bits >> 23) - 8 + is_above) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return largest <= FLT_MAX ? scale : NAN;
}

// blocks that a row of so many columns crosses
static inline int fp8_blocks(int n) { return (n + FP8_BLOCK - 1) / FP8_BLOCK; }

// x (n_rows, columns) finite and of at most FP8_LARGEST_WEIGHT; scales (fp8_blocks(columns)) are written too
static inline void fp8_quantize_rows(uint8_t* out, float* scales, const float* x, int n_rows, int columns) {
    for (int b = 0; b < fp8_blocks(columns); b++) {
        const int first = b * FP8_BLOCK, end = first + FP8_BLOCK < columns ? first + FP8_BLOCK : columns;
        float largest = 0.0f;
        for (int r = 0; r < n_rows; r++) {
            const float* row = x + (size_t)r * (size_t)columns;
            for (int c = first; c < end; c++) { largest = fabsf(row[c]) > largest ? fabsf(row[c]) : largest; }
        }
        const float scale = fp8_scale(largest), inverse = 1.0f / scale;  // a power of two as well
        for (int r = 0; r < n_rows; r++) {
            const size_t at = (size_t)r * (size_t)columns;
            for (int c = first; c < end; c++) { out[at + (size_t)c] = fp8_nearest(x[at + (size_t)c] * inverse); }
        }
        scales[b] = scale;
    }
}
#endif  // LLMC_FP8_H
