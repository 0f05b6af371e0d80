/*
The same numbers stored otherwise: out (n) are inp (n) as floats, or rounded to bf16, to nearest even.
What is stored alike already is copied. cast_scaled: out = inp * factor, rounded once before it is stored.
Cost:   memory bound. Judge it in GB/s.
Error:  0, to bf16 2^-8 |inp|.
*/
#ifndef LLMC_CAST_H
#define LLMC_CAST_H
#include "../core/device.h"  // Device, device_copy
#include "../core/kernel.h"  // load_floats, store_floats, grid_first, grid_step, grid_blocks, pack_part

static inline void cast_ref(float* out, const float* inp, size_t n) {
    for (size_t i = 0; i < n; i++) { out[i] = inp[i]; }
}

static inline void cast_scaled_ref(float* out, const float* inp, float factor, size_t n) {
    for (size_t i = 0; i < n; i++) { out[i] = inp[i] * factor; }
}

#ifndef __CUDACC__
static inline void cast_scaled(float* out, const float* inp, float factor, size_t n, const Device* dev) {
    (void)dev;
    cast_scaled_ref(out, inp, factor, n);
}

static inline void cast(float* out, const float* inp, size_t n, const Device* dev) {
    device_copy(out, inp, sizeof(float) * n, dev);
}
#else  // ---- CUDA ----

template <int W, typename Out, typename X>
__global__ void cast_kernel(Out* out, const X* inp, size_t n) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) { store_floats(out + i, load_floats<W>(inp + i)); }
}

template <typename Out, typename X>
static inline void cast(Out* out, const X* inp, size_t n, const Device* dev) {
    constexpr int W = pack_width<X>() < pack_width<Out>() ? pack_width<X>() : pack_width<Out>();
    size_t packed = pack_part(n, W, out, inp), rest = n - packed;
    if (packed) { cast_kernel<W><<<grid_blocks(packed, W, dev), GRID_BLOCK, 0, dev->stream>>>(out, inp, packed); }
    if (rest) {
        cast_kernel<1><<<grid_blocks(rest, 1, dev), GRID_BLOCK, 0, dev->stream>>>(out + packed, inp + packed, rest);
    }
    cudaCheck(cudaGetLastError());
}

template <typename Out, typename X>
__global__ void cast_scaled_kernel(Out* out, const X* inp, float factor, size_t n) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) { out[i] = (Out)((float)inp[i] * factor); }
}

template <typename Out, typename X>
static inline void cast_scaled(Out* out, const X* inp, float factor, size_t n, const Device* dev) {
    if (n == 0) { return; }
    cast_scaled_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(out, inp, factor, n);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_CAST_H
