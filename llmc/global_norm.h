/*
Sum of squares of a gradient, for the global norm: norm = (float)sqrt(sum over all tensors in table order).
    g (n)   one tensor; sum: the running total, to which the tensor's chunks are added
Ranks compute chunk sums of the parts that they own, exchange them, and add all in order (zero.h).
Cost:   memory bound, n floats read once.
Order:  one chain over a billion squares would neither be accurate nor parallel, so the law here is another fixed order,
        chosen by shape alone: the tensor is cut into chunks of 4096 elements; in a chunk, double sum j of 16 takes elements
        j, j+16, j+32, ... ascending; then the 16 are added in order, and the chunk sums are added to `sum` in order.
Source: doc/exactness.md rule 4, spec/parallel.md 3.5
*/
#ifndef LLMC_GLOBAL_NORM_H
#define LLMC_GLOBAL_NORM_H
#include "device.h"  // Device, ceil_div

enum { NORM_CHUNK = 4096, NORM_LANES = 16 };

// of the chunk that starts at g, n elements before the tensor's end
static inline double sum_of_squares_chunk_(const float* g, size_t n) {
    double lane[NORM_LANES] = {0}, sum = 0.0;
    size_t i = 0;
    if (n > NORM_CHUNK) { n = NORM_CHUNK; }
    for (; i + NORM_LANES <= n; i += NORM_LANES) {
        #pragma omp simd
        for (int j = 0; j < NORM_LANES; j++) { lane[j] += (double)g[i + j] * (double)g[i + j]; }
    }
    for (int j = 0; i + j < n; j++) { lane[j] += (double)g[i + j] * (double)g[i + j]; }
    for (int j = 0; j < NORM_LANES; j++) { sum += lane[j]; }
    return sum;
}

static inline double sum_of_squares_ref(double sum, const float* g, size_t n) {
    for (size_t i = 0; i < n; i += NORM_CHUNK) { sum += sum_of_squares_chunk_(g + i, n - i); }
    return sum;
}

// chunk sums of a tensor, or of a part of it that begins with a chunk: sums (n_chunks)
static inline void chunk_sums_of_squares(double* sums, const float* g, size_t n, const Device* dev) {
    const int64_t n_chunks = ceil_div((int64_t)n, NORM_CHUNK);
    (void)dev;
    #pragma omp parallel for schedule(static)
    for (int64_t chunk = 0; chunk < n_chunks; chunk++) {
        size_t i = (size_t)chunk * NORM_CHUNK;
        sums[chunk] = sum_of_squares_chunk_(g + i, n - i);
    }
}

// threads compute the chunks, one thread adds them in order
static inline double sum_of_squares(double sum, const float* g, size_t n, const Device* dev) {
    const int64_t n_chunks = ceil_div((int64_t)n, NORM_CHUNK);
    double* sums = (double*)device_workspace(dev, sizeof(double) * (size_t)n_chunks);
    chunk_sums_of_squares(sums, g, n, dev);
    for (int64_t chunk = 0; chunk < n_chunks; chunk++) { sum += sums[chunk]; }
    return sum;
}
#endif  // LLMC_GLOBAL_NORM_H
