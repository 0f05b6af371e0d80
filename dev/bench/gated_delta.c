/*
Milliseconds and GFLOP/s of the gated delta rule by chunks (llmc/ops/gated_delta.h), the smallest of many calls.
    build: gcc -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -I. dev/bench/gated_delta.c -lm -o build/bench_delta
    build/bench_delta [threads 2] [calls 10] [T 4096] [heads 16] [DK 128] [DV 128]
*/
#include "llmc/ops/gated_delta.h"
#include <stdio.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float* array(size_t n, float low, float high) {
    static uint32_t seed = 1;
    float* x = (float*)arena_alloc(sizeof(float) * n, "array");
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = low + (high - low) * (float)(seed >> 8) * 0x1p-24f;
    }
    return x;
}

int main(int argc, char** argv) {
    int n[] = {2, 10, 4096, 16, 128, 128};
    for (int i = 1; i < argc && i < 7; i++) { n[i - 1] = atoi(argv[i]); }
    DeltaShape s = {1, n[2], n[3], n[3], n[4], n[5], NULL};
    const size_t keys = (size_t)s.T * s.Hk * s.DK, values = (size_t)s.T * s.Hv * s.DV, gates = (size_t)s.T * s.Hv;
    const float unit = 1.7f / sqrtf((float)s.DK);  // keys of about unit length
    DeltaInputs in = {array(keys, -unit, unit), array(keys, -unit, unit), array(values, -1.0f, 1.0f),
                      array(gates, -0.2f, 0.0f), array(gates, 0.0f, 1.0f)};
    DeltaGradients d = {array(keys, 0, 0), array(keys, 0, 0), array(values, 0, 0), array(gates, 0, 0),
                        array(gates, 0, 0)};
    float *o = array(values, 0, 0), *dout = array(values, -1.0f, 1.0f), *states = array(delta_states_floats(&s), 0, 0);
    Device dev;
    device_init(&dev, n[0]);
    double best[2] = {1e30, 1e30};
    for (int i = 0; i < n[1]; i++) {
        double start = now();
        delta_chunks_forward(o, states, NULL, in, &s, &dev);
        double middle = now();
        delta_chunks_backward(d, NULL, dout, states, in, &s, &dev);
        double end = now();
        best[0] = middle - start < best[0] ? middle - start : best[0];
        best[1] = end - middle < best[1] ? end - middle : best[1];
    }
    const double C = DELTA_CHUNK, heads = (double)gates, kv = (double)s.DK * s.DV;
    const double flops[2] = {heads * (6 * kv + C * (4.0 * s.DK + 2.0 * s.DV)),
                             heads * (16 * kv + C * (7.0 * s.DK + 8.0 * s.DV))};
    printf("forward %.1f ms %.0f GFLOP/s   backward %.1f ms %.0f GFLOP/s\n", 1e3 * best[0], 1e-9 * flops[0] / best[0],
           1e3 * best[1], 1e-9 * flops[1] / best[1]);
    return 0;
}
