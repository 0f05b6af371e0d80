/*
Prints this machine's float32 peak in GFLOP/s (vector_peak.h), best of REPEATS: "N threads, S multiply+add, F fused multiply-add".
    gcc -O3 -march=native -ffp-contract=off -fopenmp vector_peak.c -lm -o vector_peak && ./vector_peak THREADS
*/
#include "../../llmc/core/fail.h"  // fail_input
#include "vector_peak.h"           // vector_peak
#include <math.h>

enum { REPEATS = 20 };

int main(int argc, char** argv) {
    int n_threads = argc == 2 ? atoi(argv[1]) : 0;
    if (n_threads < 1) { fail_input("expected one argument, the number of threads"); }
    double separate = 0.0, fused = 0.0;
    for (int i = 0; i < REPEATS; i++) {
        separate = fmax(separate, vector_peak(0, n_threads));
        fused = fmax(fused, vector_peak(1, n_threads));
    }
    printf("%d threads, %.1f multiply+add, %.1f fused multiply-add\n", n_threads, separate, fused);
    return 0;
}
