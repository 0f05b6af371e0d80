/*
SiLU, the gate made of it, and the logistic function in both:
    sigmoid(x) = 1 / (1 + exp(-x))     silu(x) = x * sigmoid(x) = x / (1 + exp(-x))     out = y * silu(z) is the gate
    gate_forward    y, out (N, C); z (N, C), rows z_stride floats apart, so that it can be the right half of a wider
                    matrix. out may be y
Backward of the gate, everything written; dy may be dout or y, and dz may be z:
    dy = dout * silu(z)     dz = dout * y * silu'(z)     silu'(x) = s (1 + x (1 - s)), s = sigmoid(x)
Cost:   bound by the exponential on a CPU: the gate 0.9 ns per element forward and 1.2 backward, where both functions
        share one. One thread, AVX-512, gcc 12, Intel Sapphire Rapids class, the smallest of 100 calls on a busy
        machine. On a GPU memory bound: 3*N*C elements forward, 5*N*C backward; not measured on a GPU yet.
Error:  silu: 3 roundings, 3 * 2^-24 relative. Slope: the rounding of s comes times x: within (4 + |x|) 2^-24 up to x =
        17, where s becomes 1. Below -89 silu is -0; silu(-Inf) is NaN, for Inf / Inf is. Fast kernels take the
        hardware's exponential. bf16 rounds what is stored: 2^-8.
Order:  element by element, expressions as written.
Source: Hendrycks & Gimpel 2016, arXiv:1606.08415 (as SiLU); Gu & Dao 2023, arXiv:2312.00752, figure 3 (the gate)
*/
#ifndef LLMC_SILU_H
#define LLMC_SILU_H
#include "../core/device.h"  // Device
#include "../core/fmath.h"   // fm_exp, FM_FUNCTION
#include "../core/kernel.h"  // load_floats, store_floats, pack_width, pack_aligned

FM_FUNCTION float sigmoid_one(float x) { return 1.0f / (1.0f + fm_exp(-x)); }
FM_FUNCTION float silu_one(float x) { return x / (1.0f + fm_exp(-x)); }

// d silu / dx
FM_FUNCTION float silu_slope_one(float x) {
    float s = sigmoid_one(x);
    return s * (1.0f + x * (1.0f - s));
}

static inline void gate_forward_ref(float* out, const float* y, const float* z, size_t z_stride, int N, int C) {
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < C; c++) { out[(size_t)n * C + c] = y[(size_t)n * C + c] * silu_one(z[n * z_stride + c]); }
    }
}

static inline void gate_backward_ref(float* dy, float* dz, size_t dz_stride, const float* dout, const float* y,
                                     const float* z, size_t z_stride, int N, int C) {
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < C; c++) {
            size_t i = (size_t)n * C + c;
            float d = dout[i], y_i = y[i], z_i = z[n * z_stride + c];
            dy[i] = d * silu_one(z_i);
            dz[n * dz_stride + c] = d * y_i * silu_slope_one(z_i);
        }
    }
}

#ifndef __CUDACC__  // ---- fast C ----

static inline void gate_forward(float* out, const float* y, const float* z, size_t z_stride, int N, int C,
                                const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *y_n = y + (size_t)n * C, *z_n = z + n * z_stride;
        float* out_n = out + (size_t)n * C;
        #pragma omp simd
        for (int c = 0; c < C; c++) { out_n[c] = y_n[c] * silu_one(z_n[c]); }
    }
}

// both functions of one z share their exponential: the compiler sees that it is the same
static inline void gate_backward(float* dy, float* dz, size_t dz_stride, const float* dout, const float* y,
                                 const float* z, size_t z_stride, int N, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *dout_n = dout + (size_t)n * C, *y_n = y + (size_t)n * C, *z_n = z + n * z_stride;
        float *dy_n = dy + (size_t)n * C, *dz_n = dz + n * dz_stride;
        #pragma omp simd
        for (int c = 0; c < C; c++) {
            float d = dout_n[c], y_c = y_n[c], z_c = z_n[c];
            dy_n[c] = d * silu_one(z_c);
            dz_n[c] = d * y_c * silu_slope_one(z_c);
        }
    }
}
#else  // ---- CUDA: blocks (threads, rows): a row is walked over by the threads that share threadIdx.y ----

#ifdef EXACT
__device__ inline float silu_and_slope_(float x, float* slope) {
    *slope = silu_slope_one(x);
    return silu_one(x);
}
#else
// one exponential and one division for both
__device__ inline float silu_and_slope_(float x, float* slope) {
    const float s = __fdividef(1.0f, 1.0f + kernel_exp(-x));
    *slope = s * (1.0f + x * (1.0f - s));
    return x * s;
}
#endif

template <int W, typename X>
__global__ void gate_forward_kernel(X* out, const X* y, const X* z, size_t z_stride, int N, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) { return; }
    const size_t row = (size_t)n * C, z_row = n * z_stride;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Pack<float, W> y_c = load_floats<W>(y + row + c), z_c = load_floats<W>(z + z_row + c);
        for (int i = 0; i < W; i++) {
            float slope;
            y_c.x[i] = y_c.x[i] * silu_and_slope_(z_c.x[i], &slope);
        }
        store_floats(out + row + c, y_c);
    }
}

// a thread has read its packs before it writes them, so what is written may lie where they were
template <int W, typename X>
__global__ void gate_backward_kernel(X* dy, X* dz, size_t dz_stride, const X* dout, const X* y, const X* z,
                                     size_t z_stride, int N, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) { return; }
    const size_t row = (size_t)n * C, z_row = n * z_stride, dz_row = n * dz_stride;
    for (int c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        const Pack<float, W> d = load_floats<W>(dout + row + c);
        Pack<float, W> y_c = load_floats<W>(y + row + c), z_c = load_floats<W>(z + z_row + c);
        for (int i = 0; i < W; i++) {
            float slope;
            const float y_i = y_c.x[i], silu = silu_and_slope_(z_c.x[i], &slope);
            y_c.x[i] = d.x[i] * silu;
            z_c.x[i] = d.x[i] * y_i * slope;
        }
        store_floats(dy + row + c, y_c);
        store_floats(dz + dz_row + c, z_c);
    }
}

// the block of rows of C channels, W to a thread
static inline dim3 gate_block_(int C, int W) {
    const unsigned threads = (unsigned)(C / W < GRID_BLOCK ? C / W : (int)GRID_BLOCK);
    return dim3(threads, GRID_BLOCK / threads);
}

template <typename X>
static inline void gate_forward(X* out, const X* y, const X* z, size_t z_stride, int N, int C, const Device* dev) {
    constexpr int W = pack_width<X>();
    const int packs = C % W == 0 && z_stride % W == 0 && pack_aligned(out, y, z);
    if (N == 0 || C == 0) { return; }
    const dim3 block = gate_block_(C, packs ? W : 1);
    const unsigned n = (unsigned)ceil_div(N, block.y);
    if (packs) {
        gate_forward_kernel<W><<<n, block, 0, dev->stream>>>(out, y, z, z_stride, N, C);
    } else {
        gate_forward_kernel<1><<<n, block, 0, dev->stream>>>(out, y, z, z_stride, N, C);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void gate_backward(X* dy, X* dz, size_t dz_stride, const X* dout, const X* y, const X* z, size_t z_stride,
                                 int N, int C, const Device* dev) {
    constexpr int W = pack_width<X>();
    const int packs = C % W == 0 && z_stride % W == 0 && dz_stride % W == 0 && pack_aligned(dy, dz, dout, y, z);
    if (N == 0 || C == 0) { return; }
    const dim3 block = gate_block_(C, packs ? W : 1);
    const unsigned n = (unsigned)ceil_div(N, block.y);
    if (packs) {
        gate_backward_kernel<W><<<n, block, 0, dev->stream>>>(dy, dz, dz_stride, dout, y, z, z_stride, N, C);
    } else {
        gate_backward_kernel<1><<<n, block, 0, dev->stream>>>(dy, dz, dz_stride, dout, y, z, z_stride, N, C);
    }
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_SILU_H
