/*
What this machine can do: the matmul rate behind "38% peak" in the step line, and the memory that is free.
    matmul_peak       flop/s of the exact product on all threads: the best of 0.2 s of 512 x 768 x 768 products
    memory_available  bytes that are free
    check_memory      status 1 when a run needs more than that
*/
#ifndef LLMC_PEAK_H
#define LLMC_PEAK_H
#include "gemm.h"  // gemm
#include "log.h"   // seconds_now, format_bytes

static inline double matmul_peak(const Device* dev) {
    const int M = 512, N = 768, K = 768;
    size_t n_bytes = sizeof(float) * ((size_t)M * K + (size_t)K * N + (size_t)M * N);
    float *a = (float*)arena_alloc(n_bytes, "matmul test"), *b = a + M * K, *c = b + K * N;
    double best = 1e30, start = seconds_now(CLOCK_MONOTONIC);
    while (seconds_now(CLOCK_MONOTONIC) - start < 0.2) {
        double before = seconds_now(CLOCK_MONOTONIC);
        gemm(c, N, NULL, 0, matrix(a, K), matrix(b, N), M, N, K, dev);
        double seconds = seconds_now(CLOCK_MONOTONIC) - before;
        best = seconds < best ? seconds : best;
    }
    arena_free(a, n_bytes);
    return 2.0 * M * N * K / best;
}

// bytes the kernel would hand out without swapping, or 0 where it does not say
static inline double memory_available(void) {
    double kib = 0.0;
    char line[256];
    FILE* file = fopen("/proc/meminfo", "r");
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "MemAvailable: %lf kB", &kib) == 1) { break; }
    }
    if (file) { fclose(file); }
    return kib * 1024.0;
}

// stop, before anything big is allocated, when a run cannot fit
static inline void check_memory(double n_bytes) {
    double available = memory_available();
    if (available > 0.0 && n_bytes > available) {
        fail_run("needs %s of memory, %s are free: try a smaller --batch-size, --seq-len or --model", format_bytes(n_bytes).s,
                 format_bytes(available).s);
    }
}
#endif  // LLMC_PEAK_H
