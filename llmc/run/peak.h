/*
What this machine can do: the matmul rate behind "38% peak" in the step line, and the memory that is free.
    matmul_peak       flop/s of matrix products. CPU: measured, the best of 0.2 s of 512 x 768 x 768 exact products on
                      all threads; of a twentieth of a short run, 0.01 s at least. GPU: bf16: the dense rate its maker
                      states, 0 for a card that is not in the table (cards.h); float: what its multiprocessors can add
                      and multiply at its highest clock
    processor_name    what the CPU, or in a CUDA build the GPU, is called
    memory_available  bytes that are free for arenas: in this container if there is one; in a CUDA build on the GPU
    check_memory      status 1 when a run needs more than that, with a remedy
*/
#ifndef LLMC_PEAK_H
#define LLMC_PEAK_H
#include "../core/floatx.h"  // FLOATX_IS_FLOAT
#include "../core/memory.h"  // memory_free
#include "../ops/gemm.h"     // gemm
#include "../core/print.h"   // seconds_now, format_bytes
#include "cards.h"           // card_find

#ifdef __CUDACC__  // ---- of a GPU ----

static inline ShortText processor_name(void) {
    cudaDeviceProp properties;
    ShortText name;
    int gpu = 0;
    cudaCheck(cudaGetDevice(&gpu));
    cudaCheck(cudaGetDeviceProperties(&properties, gpu));
    snprintf(name.s, sizeof name.s, "%.127s", properties.name);
    return name;
}

static inline double peak_bf16_(const char* name) {
    const Card* card = card_find(name);
    return card ? 1e12 * card->tflops : 0.0;
}

// float: a multiprocessor does 128 multiply-adds in a clock, that of compute capability 8.0 (A100) 64
static inline double matmul_peak(const Device* dev, double n_flops) {
    (void)n_flops;  // of the run: for CPUs
    int gpu = 0, khz = 0, major = 0, minor = 0;
    if (!FLOATX_IS_FLOAT) { return peak_bf16_(processor_name().s); }
#ifdef TF32
    return 0.5 * peak_bf16_(processor_name().s);  // on all of these cards
#endif
    cudaCheck(cudaGetDevice(&gpu));
    cudaCheck(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, gpu));
    cudaCheck(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu));
    cudaCheck(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu));
    return 2.0 * (major == 8 && minor == 0 ? 64 : 128) * 1e3 * khz * dev->n_sms;
}

static inline double memory_available(void) {
    size_t n_free = 0, n_all = 0;
    cudaCheck(cudaMemGetInfo(&n_free, &n_all));
    return (double)n_free;
}

#else  // ---- of a CPU ----

static inline double matmul_peak(const Device* dev, double n_flops) {  // of the run
    const int M = 512, N = 768, K = 768;
    size_t n_bytes = sizeof(float) * ((size_t)M * K + (size_t)K * N + (size_t)M * N);
    float *a = (float*)arena_alloc(n_bytes, "matmul test"), *b = a + M * K, *c = b + K * N;
    const double start = seconds_now(CLOCK_MONOTONIC);
    double best = 0.0, now = start;
    int rows = M / 8;  // a first guess
    do {
        const double before = now;
        gemm(c, N, NULL, 0, gemm_matrix(a, K), gemm_matrix(b, N), rows, N, K, dev);
        now = seconds_now(CLOCK_MONOTONIC);
        best = fmax(best, 2.0 * rows * N * K / (now - before));
        rows = M;
    } while (now - start < fmin(0.2, fmax(0.01, 0.05 * n_flops / best)));
    arena_free(a, n_bytes);
    return best;
}

// as /proc/cpuinfo calls it
static inline ShortText processor_name(void) {
    ShortText name = {"unknown"};
    char line[256];
    FILE* file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "model name : %127[^\n]", name.s) == 1) { break; }
    }
    if (file) { fclose(file); }
    return name;
}

static inline double memory_available(void) { return memory_free(); }

#endif

// stop, before anything big is allocated, when a run cannot fit
static inline void check_memory(double n_bytes, const char* remedy) {
    double available = memory_available();
    if (available > 0.0 && n_bytes > available) {
        fail_run("needs %s of memory, %s are free: try %s", format_bytes(n_bytes).s, format_bytes(available).s, remedy);
    }
}
#endif  // LLMC_PEAK_H
