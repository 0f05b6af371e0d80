/*
madd(a, b, c) = a * b + c, rounded once: the fused multiply-add of IEEE 754. A chain of products is written with it,
    for (int i = 0; i < n; i++) { sum = madd(x[i], y[i], sum); }
in matrix products, attention, convolutions, scans, dot products and sums of squares; everything else rounds each
operation, and no compiler may fuse or separate anything by itself (doc/exactness.md rule 1).
Nearly every x86 CPU since 2013, every ARM64 CPU and every GPU has the instruction; compiled for another, this calls
the C library's fmaf: the same bits, slowly. v_madd, the same for vectors, is in vec.h, and row_madd, for the lanes of a
kernel, in kernel.h.
The parity build (SYSTEM_LIBM) rounds the product too, as upstream llm.c does.
*/
#ifndef LLMC_MADD_H
#define LLMC_MADD_H
#include <math.h>

#ifdef __CUDACC__
#define MADD_FUNCTION static inline __host__ __device__
#else
#define MADD_FUNCTION static inline
#endif

MADD_FUNCTION float madd(float a, float b, float c) {
#ifdef SYSTEM_LIBM
    return a * b + c;
#else
    return fmaf(a, b, c);
#endif
}

// has the machine that this is compiled for the instruction?
#if defined(__FMA__) || defined(__aarch64__) || defined(__CUDACC__) || defined(SYSTEM_LIBM)
enum { MADD_IS_FAST = 1 };
#else
enum { MADD_IS_FAST = 0 };
#endif
#endif  // LLMC_MADD_H
