/*
Activations as a product in fp8 reads them: a row is cut into groups of FP8_BLOCK neighbours, the last of which may be
shorter, and each becomes e4m3 times a scale of its own.
    out[n][c] = e4m3(inp[n][c] / s) * s      inp, out (N, C)      s: fp8_row_scale of the group's largest magnitude
An index that is not NULL gathers: row index[n] of inp is in the place of n.
s is a power of two, so nothing but e4m3 rounds, and out has 4 digits: it is a bf16 as well as a float. Its product with
a weight in fp8 is that of matmul.h, one chain over c, in every build but those whose sums have another order.
Backward: the gradient of out is that of inp (straight-through), so there is none.
Cost:   memory bound: 2*N*C elements. Judge it in GB/s.
Error:  2^-4 of a number, and of one below 2^-6 of s 2^-10 of s. What is 2^128 (1 - 2^-5) or more becomes infinite, as
        in bf16 what rounds to 2^128; in a group with Inf or NaN all become NaN.
Order:  none: the largest is the same in any.
Source: groups of 1 x 128: DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2; scales: "act_quant" of the inference code
        that comes with DeepSeek V3.1 and V4
*/
#ifndef LLMC_FP8_ROWS_H
#define LLMC_FP8_ROWS_H
#include "../core/device.h"  // Device, ceil_div
#include "../core/fp8.h"     // fp8_nearest, fp8_widen, fp8_row_scale, fp8_magnitude, fp8_blocks, FP8_BLOCK
#include "../core/kernel.h"  // in a CUDA build: Pack, load_floats, store_floats, row_max, WARP

// ---- plain C: read this first; it defines every bit ----

// n neighbours of a row; returns their scale
static inline float fp8_group_ref(float* out, const float* x, int n) {
    float largest = 0.0f;
    for (int i = 0; i < n; i++) {
        const float size = fp8_magnitude(x[i]);
        largest = size > largest ? size : largest;
    }
    const float scale = fp8_row_scale(largest), inverse = 1.0f / scale;
    for (int i = 0; i < n; i++) { out[i] = fp8_widen(fp8_nearest(x[i] * inverse)) * scale; }
    return scale;
}

static inline void fp8_row_ref(float* out, const float* x, int C) {
    for (int c = 0; c < C; c += FP8_BLOCK) { fp8_group_ref(out + c, x + c, C - c < FP8_BLOCK ? C - c : FP8_BLOCK); }
}

static inline void fp8_rows_forward_ref(float* out, const float* inp, const int* index, int N, int C) {
    for (int n = 0; n < N; n++) {
        fp8_row_ref(out + (size_t)n * (size_t)C, inp + (size_t)(index ? index[n] : n) * (size_t)C, C);
    }
}

#ifndef __CUDACC__  // ---- fast C: threads share rows ----

static inline void fp8_rows_forward(float* out, const float* inp, const int* index, int N, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for if ((size_t)N * (size_t)C > FEW_ELEMENTS)
    for (int n = 0; n < N; n++) {
        fp8_row_ref(out + (size_t)n * (size_t)C, inp + (size_t)(index ? index[n] : n) * (size_t)C, C);
    }
}

#else  // ---- CUDA: a warp has a group ----

enum { FP8_ROW_WARPS = 8 };  // of a block, each with a group of its own

// what becomes of a group: the numbers
template <typename X>
struct Fp8Numbers {
    X* out;
    template <int W>
    __device__ void put(size_t at, Pack<float, W> x, float scale) const {
        const float inverse = 1.0f / scale;
        for (int i = 0; i < W; i++) { x.x[i] = fp8_widen(fp8_nearest(x.x[i] * inverse)) * scale; }
        store_floats(out + at, x);
    }
    __device__ void put_scale(int, int, float) const {}
};

// ... or codes, and scales (groups of a row, N)
struct Fp8Codes {
    uint8_t* codes;
    float* scales;
    int N;
    template <int W>
    __device__ void put(size_t at, Pack<float, W> x, float scale) const {
        const float inverse = 1.0f / scale;
        Pack<uint8_t, W> y;
        for (int i = 0; i < W; i++) { y.x[i] = fp8_nearest(x.x[i] * inverse); }
        pack_store(codes + at, y);
    }
    __device__ void put_scale(int n, int group, float scale) const { scales[(size_t)group * N + n] = scale; }
};

// block is (WARP, FP8_ROW_WARPS), grid (N over FP8_ROW_WARPS, groups of a row). A lane takes W of each WARP * W
template <int W, typename X, typename Made>
__global__ void fp8_rows_kernel(Made made, const X* inp, const int* index, int N, int C) {
    constexpr int packs = FP8_BLOCK / (WARP * W);
    const int n = blockIdx.x * blockDim.y + threadIdx.y, group = blockIdx.y, lane = threadIdx.x;
    const int begin = group * FP8_BLOCK, end = C - begin < FP8_BLOCK ? C : begin + FP8_BLOCK, first = begin + lane * W;
    if (n >= N) { return; }
    const size_t row = (size_t)n * C, from = (size_t)(index ? index[n] : n) * C;
    Pack<float, W> x[packs];
    float largest = 0.0f;
    for (int k = 0; k < packs; k++) {
        const int c = first + k * WARP * W;
        if (c >= end) { continue; }
        x[k] = load_floats<W>(inp + from + c);
        for (int i = 0; i < W; i++) {
            const float size = fp8_magnitude(x[k].x[i]);
            largest = size > largest ? size : largest;
        }
    }
    const float scale = fp8_row_scale(row_max(largest));
    for (int k = 0; k < packs; k++) {
        const int c = first + k * WARP * W;
        if (c < end) { made.put(row + c, x[k], scale); }
    }
    if (lane == 0) { made.put_scale(n, group, scale); }
}

template <typename X, typename Made>
static inline void fp8_rows_launch_(Made made, const X* inp, const int* index, int is_wide, int N, int C,
                                    const Device* dev) {
    const dim3 block(WARP, FP8_ROW_WARPS), grid((unsigned)ceil_div(N, FP8_ROW_WARPS), (unsigned)fp8_blocks(C));
    if (N == 0) { return; }
    if (is_wide && C % 4 == 0) {
        fp8_rows_kernel<4><<<grid, block, 0, dev->stream>>>(made, inp, index, N, C);
    } else {
        fp8_rows_kernel<1><<<grid, block, 0, dev->stream>>>(made, inp, index, N, C);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void fp8_rows_forward(X* out, const X* inp, const int* index, int N, int C, const Device* dev) {
    fp8_rows_launch_(Fp8Numbers<X>{out}, inp, index, pack_aligned(out, inp), N, C, dev);
}

// codes (N, C), scales (fp8_blocks(C), N): what fp8_rows_forward makes, as cuBLASLt reads it
template <typename X>
static inline void fp8_rows_codes(uint8_t* codes, float* scales, const X* inp, int N, int C, const Device* dev) {
    fp8_rows_launch_(Fp8Codes{codes, scales, N}, inp, NULL, pack_aligned(codes, inp), N, C, dev);
}
#endif  // __CUDACC__
#endif  // LLMC_FP8_ROWS_H
