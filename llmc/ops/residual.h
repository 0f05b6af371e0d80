/*
Residual connection: out = left + right, element by element; left is the stream. out may be either of them.
Backward needs no code: the gradient of the sum is the gradient of both sides.
Cost:   memory bound, 3 elements moved for each. Judge it in GB/s.
Error:  one rounding, to X: bf16 2^-8 |out|.
*/
#ifndef LLMC_RESIDUAL_H
#define LLMC_RESIDUAL_H
#include "../core/device.h"  // Device
#include "../core/kernel.h"  // load_floats, store_floats, grid_first, grid_step, grid_blocks, pack_part

static inline void residual_forward_ref(float* out, const float* left, const float* right, size_t n) {
    for (size_t i = 0; i < n; i++) { out[i] = left[i] + right[i]; }
}

#ifndef __CUDACC__
static inline void residual_forward(float* out, const float* left, const float* right, size_t n, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) { out[i] = left[i] + right[i]; }
}
#else  // ---- CUDA: one bit pattern in both builds, since each output is one sum of two ----

template <int W, typename X>
__global__ void residual_forward_kernel(X* out, const X* left, const X* right, size_t n) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        Pack<float, W> a = load_floats<W>(left + i), b = load_floats<W>(right + i);
        for (int j = 0; j < W; j++) { a.x[j] += b.x[j]; }
        store_floats(out + i, a);
    }
}

// n passes 2^31 where whole arenas are added (leaf_tree.h)
template <typename X>
static inline void residual_forward(X* out, const X* left, const X* right, size_t n, const Device* dev) {
    constexpr int W = pack_width<X>();
    size_t packed = pack_part(n, W, out, left, right), rest = n - packed;
    if (packed) {
        residual_forward_kernel<W>
            <<<grid_blocks(packed, W, dev), GRID_BLOCK, 0, dev->stream>>>(out, left, right, packed);
    }
    if (rest) {
        residual_forward_kernel<1><<<grid_blocks(rest, 1, dev), GRID_BLOCK, 0, dev->stream>>>(out + packed,
                                                                                              left + packed,
                                                                                              right + packed, rest);
    }
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_RESIDUAL_H
