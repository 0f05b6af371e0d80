/*
Sum of squares of a gradient, for the global norm: norm = (float)sqrt(sum over all tensors in table order).
    g (n)   one tensor; sum: the running total, to which the tensor's chunks are added
Ranks compute chunk sums of the parts that they own, exchange them, and add all in order (data_parallel.h).
norm_sum_of_squares returns to the host: in a CUDA build it waits for the device. norm_chunk_sums does not.
Cost:   memory bound, n floats read once, n / 4096 doubles written. CUDA: 16 bytes a load; a conversion and a
        multiply-add in double per element, which A100, H100 and H200 do faster than memory delivers, consumer cards do
        not.
Order:  one chain over a billion squares would neither be accurate nor parallel, so the law here is another fixed order,
        chosen by shape alone: the tensor is cut into chunks of 4096 elements; in a chunk, double sum j of 16 takes
        elements j, j+16, j+32, ... ascending; then the 16 are added in order, and the chunk sums are added to `sum` in
        order. A product of two floats is exact in double, so fusing cannot change a bit: C, EXACT and fast kernels
        agree.
Source: doc/exactness.md rule 4
*/
#ifndef LLMC_GLOBAL_NORM_H
#define LLMC_GLOBAL_NORM_H
#include "../core/device.h"  // Device, ceil_div
#include "../core/kernel.h"  // Pack

enum { NORM_CHUNK = 4096, NORM_LANES = 16 };

// sum of a[i] * b[i] over the chunk that starts at a and b, n elements before their end: for squares, and for
// gradient_surgery.h
static inline double norm_dot_chunk(const float* a, const float* b, size_t n) {
    double lane[NORM_LANES] = {0}, sum = 0.0;
    size_t i = 0;
    if (n > NORM_CHUNK) { n = NORM_CHUNK; }
    for (; i + NORM_LANES <= n; i += NORM_LANES) {
        #pragma omp simd
        for (int j = 0; j < NORM_LANES; j++) { lane[j] += (double)a[i + j] * (double)b[i + j]; }
    }
    for (int j = 0; i + j < n; j++) { lane[j] += (double)a[i + j] * (double)b[i + j]; }
    for (int j = 0; j < NORM_LANES; j++) { sum += lane[j]; }
    return sum;
}

static inline double norm_chunk_(const float* g, size_t n) { return norm_dot_chunk(g, g, n); }

static inline double norm_sum_of_squares_ref(double sum, const float* g, size_t n) {
    for (size_t i = 0; i < n; i += NORM_CHUNK) { sum += norm_chunk_(g + i, n - i); }
    return sum;
}

#ifndef __CUDACC__
// chunk sums of a tensor, or of a part of it that begins with a chunk: sums (n_chunks)
static inline void norm_chunk_sums(double* sums, const float* g, size_t n, const Device* dev) {
    const int64_t n_chunks = ceil_div((int64_t)n, NORM_CHUNK);
    (void)dev;
    #pragma omp parallel for schedule(static)
    for (int64_t chunk = 0; chunk < n_chunks; chunk++) {
        size_t i = (size_t)chunk * NORM_CHUNK;
        sums[chunk] = norm_chunk_(g + i, n - i);
    }
}

#else  // ---- CUDA: the 16 sums of a chunk belong to 16 / W neighbouring threads, W each ----

// block is a multiple of 32: chunks beyond the end take part in the shuffles, with nothing
template <int W>
__global__ void norm_chunk_sums_kernel(double* sums, const float* g, size_t n) {
    // this thread has the sums W * j .. W * j + W - 1
    const int n_threads = NORM_LANES / W, j = threadIdx.x % n_threads;
    const size_t chunk = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / n_threads, start = chunk * NORM_CHUNK;
    const int n_chunk = start >= n ? 0 : n - start < NORM_CHUNK ? (int)(n - start) : NORM_CHUNK;
    const int whole = n_chunk / W * W;
    double lane[W] = {0}, sum = 0.0;
    for (int i = W * j; i < whole; i += NORM_LANES) {
        const Pack<float, W> x = pack_load<W>(g + start + i);
        for (int k = 0; k < W; k++) { lane[k] += (double)x.x[k] * (double)x.x[k]; }
    }
    for (int k = 0; k < W; k++) {  // the last elements, fewer than a pack, are the last of their sums
        const int i = whole + k;
        if (i < n_chunk && i % NORM_LANES / W == j) { lane[k] += (double)g[start + i] * (double)g[start + i]; }
    }
    for (int thread = 0; thread < n_threads; thread++) {
        for (int k = 0; k < W; k++) { sum += __shfl_sync(ALL_LANES, lane[k], thread, n_threads); }
    }
    if (j == 0 && n_chunk > 0) { sums[chunk] = sum; }
}

static inline void norm_chunk_sums(double* sums, const float* g, size_t n, const Device* dev) {
    const int64_t n_chunks = ceil_div((int64_t)n, NORM_CHUNK);
    const int block = 256, W = pack_width<float>();
    if (n == 0) { return; }
    if (pack_fits(g, NORM_CHUNK)) {
        norm_chunk_sums_kernel<W>
            <<<(unsigned)ceil_div(n_chunks * (NORM_LANES / W), block), block, 0, dev->stream>>>(sums, g, n);
    } else {
        norm_chunk_sums_kernel<1>
            <<<(unsigned)ceil_div(n_chunks * NORM_LANES, block), block, 0, dev->stream>>>(sums, g, n);
    }
    cudaCheck(cudaGetLastError());
}
#endif

// the chunk sums are added on the host, in order
static inline double norm_sum_of_squares(double sum, const float* g, size_t n, const Device* dev) {
    const int64_t n_chunks = ceil_div((int64_t)n, NORM_CHUNK);
    if (n == 0) { return sum; }
    double* sums = (double*)device_workspace(dev, sizeof(double) * (size_t)n_chunks);
    norm_chunk_sums(sums, g, n, dev);
    double* on_host = (double*)malloc(sizeof(double) * (size_t)n_chunks);
    if (!on_host) { fail_run("norm: no memory for %lld chunk sums", (long long)n_chunks); }
    device_download(on_host, sums, sizeof(double) * (size_t)n_chunks, dev);
    for (int64_t chunk = 0; chunk < n_chunks; chunk++) { sum += on_host[chunk]; }
    free(on_host);
    return sum;
}
#endif  // LLMC_GLOBAL_NORM_H
