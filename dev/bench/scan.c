/*
Time of llmc/ops/selective_scan.h per position, channel and state, at the sizes of Mamba 130m; beside it fm_exp alone.
    gcc -std=gnu11 -D_GNU_SOURCE -O3 -march=native -mprefer-vector-width=512 -ffp-contract=off -fno-math-errno -fno-trapping-math
        -fopenmp -I. dev/bench/scan.c -o build/scan -lm
    build/scan [T [chunk [NS [repeats]]]]                            default 256 32 16 40
One thread; the smallest of `repeats` times, in this process's CPU time, since other programs only ever make it longer.
*/
#include "llmc/ops/selective_scan.h"
#include "llmc/test/test.h"
#include <time.h>

enum { C = 1536, R = 48 };  // channels; columns of dt beside ssm_B and ssm_C

static double nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

// in memory as a trainer has it, on huge pages
static float* arena(size_t n, float scale, uint64_t seed) {
    float *p = (float*)arena_alloc(sizeof(float) * n, "bench"), *x = random_array(n, scale, seed);
    memcpy(p, x, sizeof(float) * n);
    free(x);
    return p;
}

// noinline: the loop must not be merged with the timing around it
__attribute__((noinline)) static void exponentials(float* __restrict__ y, const float* __restrict__ x, int n) {
    for (int i = 0; i < n; i++) { y[i] = fm_exp(x[i]); }
}

static double exp_time(int n_repeats) {
    float x[1024], y[1024];
    double best = INFINITY;
    for (int i = 0; i < 1024; i++) { x[i] = -0.005f * (float)i; }
    for (int i = 0; i < 50 * n_repeats; i++) {
        double start = nanoseconds();
        for (int j = 0; j < 10; j++) { exponentials(y, x, 1024); }
        best = fmin(best, nanoseconds() - start);
    }
    return best / 10240.0;
}

int main(int argc, char** argv) {
    int T = argc > 1 ? atoi(argv[1]) : 256, chunk = argc > 2 ? atoi(argv[2]) : SCAN_CHUNK, NS = argc > 3 ? atoi(argv[3]) : 16;
    int n_repeats = argc > 4 ? atoi(argv[4]) : 40;
    size_t n = (size_t)T * C, P = (size_t)(R + 2 * NS);
    double forward = INFINITY, backward = INFINITY, step = INFINITY, states_n = (double)n * NS;
    float *u = arena(n, 1.0f, 1), *delta = arena(n, 0.05f, 2), *dy = arena(n, 1.0f, 3), *p = arena((size_t)T * P, 1.0f, 4);
    float *A_log = arena((size_t)C * NS, 1.0f, 5), *D = arena(C, 1.0f, 6), *dp = arena((size_t)T * P, 0.0f, 7);
    float *y = arena(n, 0.0f, 8), *du = arena(n, 0.0f, 8), *ddelta = arena(n, 0.0f, 8), *dA_log = arena((size_t)C * NS, 0.0f, 8);
    float *dD = arena(C, 0.0f, 8), *states = arena(scan_states_floats(1, T, C, NS, chunk), 0.0f, 8), *state = arena((size_t)C * NS, 0.0f, 8);
    Device dev = test_device(1);
    for (size_t i = 0; i < n; i++) { delta[i] = fabsf(delta[i]); }
    for (int i = 0; i < C * NS; i++) { A_log[i] = fm_log((float)(i % NS + 1)); }
    for (int i = 0; i < n_repeats; i++) {
        double start = nanoseconds();
        scan_forward(y, states, NULL, u, delta, A_log, p + R, p + R + NS, P, D, NULL, 1, T, C, NS, chunk, &dev);
        double middle = nanoseconds();
        scan_backward(du, ddelta, dA_log, dp + R, dp + R + NS, P, dD, NULL, dy, states, u, delta, A_log, p + R, p + R + NS, P, D, NULL, 1,
                      T, C, NS, chunk, &dev);
        double end = nanoseconds();
        scan_forward(y, NULL, state, u, delta, A_log, p + R, p + R + NS, P, D, NULL, 1, 1, C, NS, 1, &dev);
        step = fmin(step, nanoseconds() - end);
        backward = fmin(backward, end - middle);
        forward = fmin(forward, middle - start);
    }
    printf("T %d, chunk %d, NS %d: forward %.3f ns, backward %.3f ns, fm_exp alone %.3f ns; a call with T 1 %.1f us\n", T, chunk, NS,
           forward / states_n, backward / states_n, exp_time(n_repeats), step / 1000.0);
    return 0;
}
