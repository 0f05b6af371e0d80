/*
This machine's float32 peak in GFLOP/s, measured: the ceiling against which gemm.c and step.py judge everything else.
    vector_peak(0, n_threads)   separate multiplications and additions, each rounded: the ceiling of an exact build
    vector_peak(1, n_threads)   fused multiply-add, for information: the ceiling of libraries that use it
A loop of sum = sum * m + a over PEAK_CHAINS independent sums that stay in registers: 2 flops per lane and chain, no memory.
The chains hide the latency of a multiplication followed by an addition (8 cycles at most, at 2 to 4 operations per cycle). The
sums approach a / (1 - m) = 1, so that they are never subnormal or infinite. One call takes about 10 ms; keep the best of several.
Compile with -ffp-contract=off, or the compiler fuses the separate ones. Disassembled with gcc 12 and clang 14 for AVX-512, AVX2
and SSE2: the loop holds PEAK_CHAINS multiplications and additions (or fused ones) and no load or store.
*/
#ifndef VECTOR_PEAK_H
#define VECTOR_PEAK_H
#include "../../llmc/run/peak.h"  // seconds_now
#include "../../llmc/core/vec.h"  // vfloat, VLANES, v_fill
#ifdef __FMA__
#include <immintrin.h>  // _mm512_fmadd_ps, _mm256_fmadd_ps
#endif

enum {
    PEAK_CHAINS = VLANES == 16 ? 24 : 12,  // with m and a they fit the 32 or 16 vector registers
    PEAK_ROUNDS = 1500000
};

// x * y + z rounded once; where the instruction is not known here, rounded twice, and the two peaks come out alike
static inline vfloat peak_fma_(vfloat x, vfloat y, vfloat z) {
#if VLANES == 16
    return (vfloat)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif VLANES == 8 && defined(__FMA__)
    return (vfloat)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
    return x * y + z;
#endif
}

// `volatile` start values and the empty asm, which "reads" the sums, keep the compiler from leaving the loop out
static inline __attribute__((always_inline)) void peak_loop_(int fused) {
    volatile float start = 0.5f, factor = 0.999f, add = 0.001f;
    vfloat sum[PEAK_CHAINS], m = v_fill(factor), a = v_fill(add);
    for (int i = 0; i < PEAK_CHAINS; i++) { sum[i] = v_fill(start); }
    for (int round = 0; round < PEAK_ROUNDS; round++) {
        #pragma GCC unroll 24
        for (int i = 0; i < PEAK_CHAINS; i++) { sum[i] = fused ? peak_fma_(sum[i], m, a) : sum[i] * m + a; }
    }
    __asm__ volatile("" : : "m"(sum));
}

static inline double vector_peak(int fused, int n_threads) {
    double begin = seconds_now(CLOCK_MONOTONIC);
    #pragma omp parallel num_threads(n_threads)
    {
        if (fused) { peak_loop_(1); } else { peak_loop_(0); }
    }
    return 2e-9 * VLANES * PEAK_CHAINS * PEAK_ROUNDS * n_threads / (seconds_now(CLOCK_MONOTONIC) - begin);
}
#endif  // VECTOR_PEAK_H
