/*
bf16: the upper half of a float. Conversions round to nearest, ties to even, as the hardware's do; a NaN becomes 0x7fff.
Arithmetic happens in float and is rounded once, which for + - * / gives the correctly rounded bf16 (24 >= 2 * 8 + 2 bits).
*/
#ifndef SIMT_CUDA_BF16_H
#define SIMT_CUDA_BF16_H
#include "simt_device.h"

struct __nv_bfloat16_raw { unsigned short x; };

static inline unsigned short simt_bf16_bits_(float value) {
    uint32_t u = __float_as_uint(value);
    if ((u & 0x7fffffff) > 0x7f800000) { return 0x7fff; }
    return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline float simt_bf16_float_(unsigned short x) { return __uint_as_float((uint32_t)x << 16); }

struct __align__(2) __nv_bfloat16 {
    unsigned short x;
    __nv_bfloat16() = default;
    __nv_bfloat16(float v) : x(simt_bf16_bits_(v)) {}
    __nv_bfloat16(double v) : x(simt_bf16_bits_((float)v)) {}
    __nv_bfloat16(int v) : x(simt_bf16_bits_((float)v)) {}
    __nv_bfloat16(unsigned v) : x(simt_bf16_bits_((float)v)) {}
    __nv_bfloat16(const __nv_bfloat16_raw& r) : x(r.x) {}
    operator float() const { return simt_bf16_float_(x); }
    __nv_bfloat16& operator=(float v) { x = simt_bf16_bits_(v); return *this; }
};
typedef __nv_bfloat16 nv_bfloat16;

static inline __nv_bfloat16 __float2bfloat16_rn(float v) { return __nv_bfloat16(v); }
static inline __nv_bfloat16 __float2bfloat16(float v) { return __nv_bfloat16(v); }
static inline float __bfloat162float(__nv_bfloat16 v) { return simt_bf16_float_(v.x); }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.x; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return __nv_bfloat16(__nv_bfloat16_raw{u}); }
static inline __nv_bfloat16 __float2bfloat16_rz(float v) {
    uint32_t u = __float_as_uint(v);
    return __ushort_as_bfloat16((u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (unsigned short)(u >> 16));
}

#define SIMT_BF16_OPERATOR(op)                                                                                     \
    static inline __nv_bfloat16 operator op(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16((float)a op (float)b); }
SIMT_BF16_OPERATOR(+)
SIMT_BF16_OPERATOR(-)
SIMT_BF16_OPERATOR(*)
SIMT_BF16_OPERATOR(/)
#undef SIMT_BF16_OPERATOR
#define SIMT_BF16_COMPARE(op) \
    static inline bool operator op(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a op (float)b; }
SIMT_BF16_COMPARE(==)
SIMT_BF16_COMPARE(!=)
SIMT_BF16_COMPARE(<)
SIMT_BF16_COMPARE(<=)
SIMT_BF16_COMPARE(>)
SIMT_BF16_COMPARE(>=)
#undef SIMT_BF16_COMPARE

// ---- pairs: x is the lower half of the register ----

struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) : x(a), y(b) {}
};
typedef __nv_bfloat162 nv_bfloat162;
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat162(a, b); }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat162(a, b); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return __nv_bfloat162(a, b); }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __nv_bfloat162(v.x, v.y); }
static inline __nv_bfloat162 __float2bfloat162_rn(float v) { return __nv_bfloat162(v, v); }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return make_float2(v.x, v.y); }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
static inline float __low2float(__nv_bfloat162 v) { return v.x; }
static inline float __high2float(__nv_bfloat162 v) { return v.y; }
#endif  // SIMT_CUDA_BF16_H
