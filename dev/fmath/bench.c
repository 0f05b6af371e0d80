/*
Time per element of llmc/core/fmath.h in a loop, beside the C library's float function called in the same loop.
    gcc -std=gnu11 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math dev/fmath/bench.c -o build/bench -lm
    build/bench [repeats]
One thread, 4096 elements in the first-level cache; the smallest of `repeats` (default 2000) times, since other programs
only ever make a loop slower. Inputs are uniform: logarithms over (0, 8], exp over [-8, 0] as in softmax, others [-4, 4].
gcc takes 256-bit vectors unless told -mprefer-vector-width=512.
*/
#include "../../llmc/core/fail.h"
#include "../../llmc/core/fmath.h"
#include <time.h>

enum { N = 4096 };

typedef struct {
    const char* name;
    void (*ours)(float* y, const float* x);
    void (*library)(float* y, const float* x);
    float low, high;  // of the inputs
} Row;

// noinline: the loop must not be merged with the timing around it
#define LOOPS(name)                                                                                             \
    __attribute__((noinline)) static void name##_ours(float* __restrict__ y, const float* __restrict__ x) {    \
        for (int i = 0; i < N; i++) { y[i] = fm_##name(x[i]); }                                                 \
    }                                                                                                           \
    __attribute__((noinline)) static void name##_library(float* __restrict__ y, const float* __restrict__ x) { \
        for (int i = 0; i < N; i++) { y[i] = name##f(x[i]); }                                                   \
    }
LOOPS(exp) LOOPS(exp2) LOOPS(expm1) LOOPS(log) LOOPS(log2) LOOPS(log1p) LOOPS(tanh) LOOPS(cosh) LOOPS(sinh) LOOPS(sin)
LOOPS(cos) LOOPS(erf)

__attribute__((noinline)) static void pair_ours(float* __restrict__ y, const float* __restrict__ x) {
    float c[N];
    for (int i = 0; i < N; i++) { fm_tanh_cosh(x[i], &y[i], &c[i]); }
    for (int i = 0; i < N; i++) { y[i] += c[i]; }
}

__attribute__((noinline)) static void pair_library(float* __restrict__ y, const float* __restrict__ x) {
    for (int i = 0; i < N; i++) { y[i] = tanhf(x[i]) + coshf(x[i]); }
}

static double nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static double smallest_time(void (*loop)(float*, const float*), float* y, const float* x, int n_repeats) {
    double best = INFINITY;
    for (int i = 0; i < n_repeats; i++) {
        double start = nanoseconds();
        loop(y, x);
        best = fmin(best, nanoseconds() - start);
    }
    return best / (double)N;
}

int main(int argc, char** argv) {
    const Row rows[] = {
        {"exp", exp_ours, exp_library, -8, 0},       {"exp2", exp2_ours, exp2_library, -4, 4},
        {"expm1", expm1_ours, expm1_library, -4, 4}, {"log", log_ours, log_library, 0, 8},
        {"log2", log2_ours, log2_library, 0, 8},     {"log1p", log1p_ours, log1p_library, 0, 8},
        {"tanh", tanh_ours, tanh_library, -4, 4},    {"cosh", cosh_ours, cosh_library, -4, 4},
        {"tanh_cosh", pair_ours, pair_library, -4, 4}, {"sinh", sinh_ours, sinh_library, -4, 4},
        {"sin", sin_ours, sin_library, -4, 4},       {"cos", cos_ours, cos_library, -4, 4},
        {"erf", erf_ours, erf_library, -4, 4},
    };
    int n_repeats = argc > 1 ? atoi(argv[1]) : 2000;
    if (argc > 2 || n_repeats < 1) { fail_input("expected at most one argument, a number of repeats"); }
    printf("%-10s %8s %8s\n", "ns/element", "ours", "library");
    for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
        static float x[N], y[N];
        for (int i = 0; i < N; i++) {  // a fixed permutation of N equal steps, so that no branch predictor learns it
            x[i] = rows[k].low + (rows[k].high - rows[k].low) * (float)(i * 2897 % N + 1) / (float)N;
        }
        printf("%-10s %8.2f %8.2f\n", rows[k].name, smallest_time(rows[k].ours, y, x, n_repeats),
               smallest_time(rows[k].library, y, x, n_repeats));
        fflush(stdout);
    }
    return 0;
}
