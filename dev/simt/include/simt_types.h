/*
CUDA's words and vector types for a C++ compiler. Qualifiers mean nothing here: one process is host and device at once.
*/
#ifndef SIMT_TYPES_H
#define SIMT_TYPES_H
#include <stddef.h>
#include <stdint.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
#define __maxnreg__(n)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __grid_constant__

// a vector may be moved in one instruction, so its address must be a multiple of its size: the sanitizer checks it
#define SIMT_VECTORS(type, name, a2, a4)                                                                        \
    struct name##1 { type x; };                                                                                 \
    struct __align__(a2) name##2 { type x, y; };                                                                \
    struct name##3 { type x, y, z; };                                                                           \
    struct __align__(a4) name##4 { type x, y, z, w; };                                                          \
    static inline name##1 make_##name##1(type x) { return name##1{x}; }                                         \
    static inline name##2 make_##name##2(type x, type y) { return name##2{x, y}; }                              \
    static inline name##3 make_##name##3(type x, type y, type z) { return name##3{x, y, z}; }                   \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return name##4{x, y, z, w}; }
SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned, uint, 8, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(double, double, 16, 16)
#undef SIMT_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// parts of this harness that run for every thread: the sanitizers watch kernels, not these
#define SIMT_TRUSTED __attribute__((no_sanitize("address"), no_sanitize("undefined")))

// Where in the source a call stands: a last parameter of every function whose place matters, filled in by the compiler
#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#endif  // SIMT_TYPES_H
