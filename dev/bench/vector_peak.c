/*
Prints this machine's float32 peak in GFLOP/s (vector_peak.h), best of REPEATS: "N threads, F GFLOP/s".
    gcc -O3 -march=native -ffp-contract=off -fopenmp vector_peak.c -lm -o vector_peak && ./vector_peak THREADS
*/
#include "../../llmc/core/fail.h"  // fail_input
#include "vector_peak.h"           // vector_peak
#include <math.h>

enum { REPEATS = 20 };

int main(int argc, char** argv) {
    int n_threads = argc == 2 ? atoi(argv[1]) : 0;
    if (n_threads < 1) { fail_input("expected one argument, the number of threads"); }
    double peak = 0.0;
    for (int i = 0; i < REPEATS; i++) { peak = fmax(peak, vector_peak(n_threads)); }
    printf("%d threads, %.1f GFLOP/s\n", n_threads, peak);
    return 0;
}
