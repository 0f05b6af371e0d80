/*
float4 on the host, in the format e2m1 of neural networks, and rows of it in groups that share a scale, a power of two.
    fp4_widen           a code, the lowest 4 bits, as a float
    fp4_code            of a row, packed, the code in a column
    fp4_nearest         the nearest to a float, ties to the even code; what is larger than 6 becomes 6; not for NaN
    e8m0_widen          a scale as a float
    fp4_scale           of a group whose largest magnitude is known, as e8m0
    fp4_quantize_row    all groups of a row
Format: e2m1: sign, 2 bits of exponent whose bias is 1, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. No infinity, no NaN.
        Byte j of a row has column 2j in its lower half and 2j + 1 in the upper: 0xa3 is 1.5, -1.
Scales: a byte of e8m0 for 32 columns of a row: 2^(byte - 127); 255 is NaN. A weight is its number times the scale: it
        has 2 digits, and fits into a float and a bf16 with every scale up to FP4_LARGEST_SCALE. fp4_scale's are
        2^ceil(log2(largest / 6)), the largest floored at 6 * 2^-126.
Error:  half a last place: 2^-2 of a weight at most, and below 1 scale 2^-2 of it.
Source: OCP Microscaling Formats 1.0, 5.3.3 and 5.4; packed so by DeepSeek-V4's files, and re-packed by its convert.py
*/
#ifndef LLMC_FP4_H
#define LLMC_FP4_H
#include "fp8.h"  // FP8_FUNCTION

enum {
    FP4_GROUP = 32,           // columns that share a scale: a row has whole groups
    FP4_LARGEST_SCALE = 252   // 2^125: 6 times that is a float
};
#define FP4_LARGEST 6.0f

FP8_FUNCTION float fp4_widen(int code) {
    const int exponent = code >> 1 & 3, mantissa = code & 1;
    const float size = exponent > 0 ? (float)((2 + mantissa) << (exponent - 1)) * 0.5f : (float)mantissa * 0.5f;
    return code & 8 ? -size : size;
}

FP8_FUNCTION int fp4_code(const uint8_t* row, int column) { return row[column / 2] >> 4 * (column % 2) & 15; }

// A sum with a number whose last place is the unit rounds to units, ties to even. Codes are numbered through: an even
// number of units is an even code
static inline int fp4_nearest(float x) {
    const float size = fabsf(x), at_most = size < FP4_LARGEST ? size : FP4_LARGEST;
    const float unit = at_most < 2.0f ? 0.5f : at_most < 4.0f ? 1.0f : 2.0f;  // from a number to the next
    const float rounder = unit * 0x1p23f;
    const int n = (int)((at_most + rounder - rounder) / unit), before = at_most < 2.0f ? 0 : at_most < 4.0f ? 2 : 4;
    return (signbit(x) ? 8 : 0) | (before + n);
}

FP8_FUNCTION float e8m0_widen(uint8_t exponent) {
    uint32_t bits = exponent > 0 ? (uint32_t)exponent << 23 : 0x00400000u;  // 2^-127 is subnormal
    bits = exponent == 255 ? 0x7fc00000u : bits;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// the smallest power of two from 2^-126 on with which the largest magnitude of a group is 6 at most
static inline uint8_t fp4_scale(float largest) {
    int exponent;
    const float mantissa = frexpf(largest, &exponent);  // from 0.5 to 1; 6 = 0.75 * 2^3
    const int scale = largest > 0.0f ? exponent - 3 + (mantissa > 0.75f) + 127 : 1;
    return (uint8_t)(scale < 1 ? 1 : scale < FP4_LARGEST_SCALE ? scale : FP4_LARGEST_SCALE);
}

// x (columns) finite; out (columns / 2), exponents (columns / FP4_GROUP)
static inline void fp4_quantize_row(uint8_t* out, uint8_t* exponents, const float* x, int columns) {
    for (int first = 0; first < columns; first += FP4_GROUP) {
        const float* group = x + first;
        float largest = 0.0f;
        for (int c = 0; c < FP4_GROUP; c++) { largest = fabsf(group[c]) > largest ? fabsf(group[c]) : largest; }
        const uint8_t exponent = fp4_scale(largest);
        const float inverse = e8m0_widen((uint8_t)(254 - exponent));  // a power of two as well
        for (int c = 0; c < FP4_GROUP; c += 2) {
            const int low = fp4_nearest(group[c] * inverse), high = fp4_nearest(group[c + 1] * inverse);
            out[(first + c) / 2] = (uint8_t)(low | high << 4);
        }
        exponents[first / FP4_GROUP] = exponent;
    }
}
#endif  // LLMC_FP4_H
