/*
Prints how fast this machine moves memory, GB/s, best of REPEATS: "N threads, read F GB/s, update F GB/s".
    gcc -O3 -march=native -ffp-contract=off -fopenmp bandwidth.c -lm -o bandwidth && ./bandwidth THREADS [SECONDS]
read: the sum of an array far larger than the caches, as generating a token reads weights. update: four arrays are read
and three of them written, the 28 bytes that AdamW moves for a parameter, with next to no arithmetic.
*/
#include "../../llmc/core/device.h"  // arena_alloc, fail_input
#include "../../llmc/core/vec.h"     // vfloat
#include "../../llmc/core/print.h"   // seconds_now
#include <math.h>

enum { REPEATS = 10, COUNT = 1 << 25 };  // arrays of 128 MiB

static double read_once(const float* x, int n_threads) {
    const double begin = seconds_now(CLOCK_MONOTONIC);
    #pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int block = 0; block < COUNT / 4096; block++) {
        vfloat sum[8] = {0};
        for (int i = 0; i < 4096; i += 8 * VLANES) {
            for (int v = 0; v < 8; v++) { sum[v] += v_load(x + (size_t)block * 4096 + i + v * VLANES); }
        }
        __asm__ volatile("" : : "m"(sum));  // "reads" the sums, or the compiler would leave them out
    }
    return 4e-9 * COUNT / (seconds_now(CLOCK_MONOTONIC) - begin);
}

static double update_once(float* p, float* m, float* v, const float* g, int n_threads) {
    const double begin = seconds_now(CLOCK_MONOTONIC);
    #pragma omp parallel for simd num_threads(n_threads) schedule(static)
    for (int i = 0; i < COUNT; i++) {
        m[i] += g[i];
        v[i] -= g[i];
        p[i] += m[i];
    }
    return 28e-9 * COUNT / (seconds_now(CLOCK_MONOTONIC) - begin);
}

int main(int argc, char** argv) {
    const int n_threads = argc > 1 ? atoi(argv[1]) : 0;
    const double seconds = argc > 2 ? atof(argv[2]) : 1.0, begin = seconds_now(CLOCK_MONOTONIC);
    float* x[4];
    double read = 0.0, update = 0.0;
    if (n_threads < 1) { fail_input("expected the number of threads"); }
    for (int i = 0; i < 4; i++) {
        x[i] = (float*)arena_alloc(sizeof(float) * COUNT, "bench");
        memset(x[i], 0, sizeof(float) * COUNT);  // else all of it would be the one page of zeros
    }
    for (int i = 0; i < REPEATS || seconds_now(CLOCK_MONOTONIC) - begin < seconds; i++) {
        read = fmax(read, read_once(x[3], n_threads));
        update = fmax(update, update_once(x[0], x[1], x[2], x[3], n_threads));
    }
    printf("%d threads, read %.1f GB/s, update %.1f GB/s\n", n_threads, read, update);
    return 0;
}
