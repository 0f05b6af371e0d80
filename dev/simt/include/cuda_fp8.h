/*
fp8: e4m3 (4 bits of exponent, largest number 448, no infinity, NaN 0x7f) and e5m2 (5 bits, 57344, infinities 0x7c).
From float: round to nearest, ties to even; what is too large becomes the largest number (SATFINITE) or NaN, for e5m2 infinity
(NOSAT). A NaN becomes 0x7f, as the hardware's does.
*/
#ifndef SIMT_CUDA_FP8_H
#define SIMT_CUDA_FP8_H
#include "cuda_bf16.h"

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
typedef enum { __NV_NOSAT, __NV_SATFINITE } __nv_saturation_t;
typedef enum { __NV_E4M3, __NV_E5M2 } __nv_fp8_interpretation_t;

static inline float simt_fp8_float_(unsigned char x, __nv_fp8_interpretation_t kind) {
    int n_mantissa = kind == __NV_E4M3 ? 3 : 2, bias = kind == __NV_E4M3 ? 7 : 15;
    int exponent = (x & 0x7f) >> n_mantissa, mantissa = x & ((1 << n_mantissa) - 1);
    float sign = x & 0x80 ? -1.0f : 1.0f;
    if (kind == __NV_E4M3 && (x & 0x7f) == 0x7f) { return NAN; }
    if (kind == __NV_E5M2 && exponent == 31) { return mantissa ? NAN : sign * INFINITY; }
    if (exponent > 0) { mantissa += 1 << n_mantissa; } else { exponent = 1; }  // subnormals have the exponent of the smallest normal
    return sign * ldexpf((float)mantissa, exponent - bias - n_mantissa);
}

static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturate, __nv_fp8_interpretation_t kind) {
    if (isnan(x)) { return 0x7f; }
    int n_mantissa = kind == __NV_E4M3 ? 3 : 2, bias = kind == __NV_E4M3 ? 7 : 15, exponent = 1 - bias;
    unsigned char sign = signbit(x) ? 0x80 : 0, largest = kind == __NV_E4M3 ? 0x7e : 0x7b;
    unsigned char beyond = saturate == __NV_SATFINITE ? largest : kind == __NV_E4M3 ? 0x7f : 0x7c;
    float a = fabsf(x);
    if (isinf(a)) { return sign | beyond; }
    if (a > 0.0f && ilogbf(a) > exponent) { exponent = ilogbf(a); }
    int steps = (int)rintf(ldexpf(a, n_mantissa - exponent));  // in units of the last place there; at most 2^(n_mantissa + 1)
    if (ldexpf((float)steps, exponent - n_mantissa) > simt_fp8_float_(largest, kind)) { return sign | beyond; }
    // a carry into the next exponent is right by itself: the fields stand side by side
    return (unsigned char)(sign | (((exponent + bias - 1) << n_mantissa) + steps));
}

#define SIMT_FP8(name, kind)                                                                                        \
    struct name {                                                                                                   \
        __nv_fp8_storage_t __x;                                                                                     \
        name() = default;                                                                                           \
        explicit name(float v) : __x(__nv_cvt_float_to_fp8(v, __NV_SATFINITE, kind)) {}                             \
        explicit name(__nv_bfloat16 v) : __x(__nv_cvt_float_to_fp8((float)v, __NV_SATFINITE, kind)) {}              \
        explicit operator float() const { return simt_fp8_float_(__x, kind); }                                      \
    };
SIMT_FP8(__nv_fp8_e4m3, __NV_E4M3)
SIMT_FP8(__nv_fp8_e5m2, __NV_E5M2)
#undef SIMT_FP8
#endif  // SIMT_CUDA_FP8_H
