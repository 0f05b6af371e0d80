/*
This machine's float32 peak in GFLOP/s, measured: the ceiling against which gemm.c and step.py judge everything.
    vector_peak(n_threads)   fused multiply-adds
A loop of sum = madd(sum, m, a) over PEAK_CHAINS independent sums that stay in registers: 2 flops per lane and chain, no memory.
The chains hide the latency of a multiply-add (4 cycles, at 2 per cycle). The sums approach a / (1 - m) = 1, so that they are never
subnormal or infinite. One call takes about 10 ms; keep the best of several. Disassembled with gcc 12 and clang 14 for AVX-512 and
AVX2: the loop holds PEAK_CHAINS multiply-adds and no load or store.
*/
#ifndef VECTOR_PEAK_H
#define VECTOR_PEAK_H
#include "../../llmc/core/print.h"  // seconds_now
#include "../../llmc/core/vec.h"    // vfloat, VLANES, v_fill, v_madd

enum {
    PEAK_CHAINS = VLANES == 16 ? 24 : 12,  // with m and a they fit the 32 or 16 vector registers
    PEAK_ROUNDS = 1500000
};

// `volatile` start values and the empty asm, which "reads" the sums, keep the compiler from leaving the loop out
static inline void peak_loop_(void) {
    volatile float start = 0.5f, factor = 0.999f, add = 0.001f;
    vfloat sum[PEAK_CHAINS], m = v_fill(factor), a = v_fill(add);
    for (int i = 0; i < PEAK_CHAINS; i++) { sum[i] = v_fill(start); }
    for (int round = 0; round < PEAK_ROUNDS; round++) {
        #pragma GCC unroll 24
        for (int i = 0; i < PEAK_CHAINS; i++) { sum[i] = v_madd(sum[i], m, a); }
    }
    __asm__ volatile("" : : "m"(sum));
}

static inline double vector_peak(int n_threads) {
    double begin = seconds_now(CLOCK_MONOTONIC);
    #pragma omp parallel num_threads(n_threads)
    peak_loop_();
    return 2e-9 * VLANES * PEAK_CHAINS * PEAK_ROUNDS * n_threads / (seconds_now(CLOCK_MONOTONIC) - begin);
}
#endif  // VECTOR_PEAK_H
