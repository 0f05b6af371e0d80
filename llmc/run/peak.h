/*
What this machine can do: the matmul rate behind "38% peak" in the step line, and the memory that is free.
    matmul_peak       flop/s of matrix products. CPU: measured, the best of 0.2 s of 512 x 768 x 768 exact products on
                      all threads. GPU: bf16: the dense rate its maker states, 0 for a card that is not in the table;
                      float: what its multiprocessors can add and multiply at its highest clock
    processor_name    what the CPU, or in a CUDA build the GPU, is called
    memory_available  bytes that are free for arenas: in this container if there is one; in a CUDA build on the GPU
    check_memory      status 1 when a run needs more than that, with the trainer's remedy
Source of the GPU rates: spec gpt2.md 13, the makers' data sheets
*/
#ifndef LLMC_PEAK_H
#define LLMC_PEAK_H
#include "../core/floatx.h"  // FLOATX_IS_FLOAT
#include "../ops/gemm.h"     // gemm
#include "../core/print.h"   // seconds_now, format_bytes

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

// tensor cores, bf16 in and float sums, TFLOP/s; the first name that is part of the card's
static inline double peak_bf16_(const char* card) {
    static const struct {
        const char* name;
        double tflops;
    } cards[] = {{"H100 PCIe", 756}, {"H100", 989}, {"H200", 989}, {"GH200", 989}, {"H20", 148}, {"A100", 312},
                 {"A40", 149.7}, {"A10", 125}, {"L40S", 362}, {"L40", 181}, {"L4", 121}, {"RTX 6000 Ada", 182},
                 {"RTX 3090", 71}, {"RTX 4090", 165.2}, {"B200", 2250}};
    for (size_t i = 0; i < sizeof cards / sizeof cards[0]; i++) {
        if (strstr(card, cards[i].name)) { return 1e12 * cards[i].tflops; }
    }
    return 0.0;
}

// float: a multiprocessor does 128 multiply-adds in a clock, that of compute capability 8.0 (A100) 64
static inline double matmul_peak(const Device* dev) {
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

// number behind `key` in a file of "key number" lines, the file's only number for key ""; -1 when there is none
static inline double peak_number_in_file_(const char* path, const char* key) {
    char line[512];
    double found = -1.0;
    const size_t n_key = strlen(key);
    FILE* file = fopen(path, "r");
    while (file && found < 0.0 && fgets(line, sizeof line, file)) {
        if (strncmp(line, key, n_key) == 0) { sscanf(line + n_key, "%lf", &found); }
    }
    if (file) { fclose(file); }
    return found;
}

// what the control group `group` below `folder` leaves; pages of files that could be dropped do not count as used
static inline double peak_cgroup_free_(const char* folder, const char* group, const char* limit, const char* used,
                                       const char* files) {
    char path[3][1024];
    const char* names[3] = {limit, used, "memory.stat"};
    for (int i = 0; i < 3; i++) { snprintf(path[i], sizeof path[i], "%s%s/%s", folder, group, names[i]); }
    if (*group && access(path[0], R_OK) != 0) {  // a container sees its own group as the root
        return peak_cgroup_free_(folder, "", limit, used, files);
    }
    double most = peak_number_in_file_(path[0], ""), now = peak_number_in_file_(path[1], "");
    double droppable = peak_number_in_file_(path[2], files);
    return most > 0.0 && now >= 0.0 ? most - now + fmax(droppable, 0.0) : INFINITY;
}

// what the limits of this process's control group leave, as a container has one; both versions of the interface
static inline double peak_cgroup_available_(void) {
    char line[512];
    double available = INFINITY;
    FILE* file = fopen("/proc/self/cgroup", "r");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        const char* v1 = strstr(line, ":memory:");
        if (v1) {
            available = fmin(available, peak_cgroup_free_("/sys/fs/cgroup/memory", v1 + 8, "memory.limit_in_bytes",
                                                          "memory.usage_in_bytes", "total_inactive_file "));
        } else if (strncmp(line, "0::", 3) == 0) {
            available = fmin(available, peak_cgroup_free_("/sys/fs/cgroup", line + 3, "memory.max", "memory.current",
                                                          "inactive_file "));
        }
    }
    if (file) { fclose(file); }
    return available;
}

// bytes the kernel would hand out without swapping, or 0 where it does not say
static inline double memory_available(void) {
    double kib = peak_number_in_file_("/proc/meminfo", "MemAvailable:");
    return kib > 0.0 ? fmin(1024.0 * kib, peak_cgroup_available_()) : 0.0;
}

#endif

// stop, before anything big is allocated, when a run cannot fit
static inline void check_memory(double n_bytes, const char* remedy) {
    double available = memory_available();
    if (available > 0.0 && n_bytes > available) {
        fail_run("needs %s of memory, %s are free: try %s", format_bytes(n_bytes).s, format_bytes(available).s, remedy);
    }
}
#endif  // LLMC_PEAK_H
