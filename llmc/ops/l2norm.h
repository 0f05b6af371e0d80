/*
L2 norm of q and k in the gated delta rule: out = inp * rstd, rstd = 1 / sqrt(sum of inp^2 + eps) over each row of C
channels, then times `scale`: 1/sqrt(C) for q, 1 for k. eps is added to the sum, not to the mean.
    inp, out (N, C)   rstd (N)  kept for backward   out may be inp where no backward follows
Backward, with dy = dout * scale and y = inp * rstd:
    dinp = rstd * (dy - y * sum(dy * y))   (N, C)   written; may be dout
Cost:   memory bound: forward moves 2*N*C elements, backward 3*N*C. The squares of VLANES short rows are read side by
        side, as rmsnorm.h does.
Order:  sums chain over c from 0; each product and difference rounds. Fast kernels: each lane a sum of its own, then a
        tree.
Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464; doc/qwen36.md "Formula", doc/gated_delta.md "Formula"
*/
#ifndef LLMC_L2NORM_H
#define LLMC_L2NORM_H
#include "../core/device.h"  // Device
#include "../core/kernel.h"  // row_madd, load_floats
#include "../core/madd.h"    // madd
#ifndef __CUDACC__
#include "../core/vec.h"  // v_load_columns, v_madd
#endif

// ---- plain C: read this first; it defines every bit ----

static inline void l2norm_forward_ref(float* out, float* rstd, const float* inp, float scale, float eps, int N, int C) {
    for (int n = 0; n < N; n++) {
        const float* x = inp + (size_t)n * C;
        float sum = 0.0f;
        for (int c = 0; c < C; c++) { sum = madd(x[c], x[c], sum); }
        const float s = 1.0f / sqrtf(sum + eps);
        for (int c = 0; c < C; c++) { out[(size_t)n * C + c] = x[c] * s * scale; }
        rstd[n] = s;
    }
}

static inline void l2norm_backward_ref(float* dinp, const float* dout, const float* inp, const float* rstd, float scale,
                                       int N, int C) {
    for (int n = 0; n < N; n++) {
        const float *x = inp + (size_t)n * C, *d = dout + (size_t)n * C, s = rstd[n];
        float sum = 0.0f;
        for (int c = 0; c < C; c++) { sum = madd(d[c] * scale, x[c] * s, sum); }
        for (int c = 0; c < C; c++) { dinp[(size_t)n * C + c] = s * (d[c] * scale - x[c] * s * sum); }
    }
}

#ifndef __CUDACC__  // ---- fast C: the sums of VLANES rows side by side; a rest of rows goes the plain way ----

// of VLANES rows the sums of (a * a_factor) * (b * b_factor), factors one for each row
static inline vfloat l2norm_sums_(const float* a, vfloat a_factor, const float* b, vfloat b_factor, int C) {
    vfloat sum = v_fill(0.0f), a_columns[VLANES], b_columns[VLANES];
    const int whole = C / VLANES * VLANES;
    for (int c = 0; c < whole; c += VLANES) {
        v_load_columns(a_columns, a + c, (size_t)C);
        v_load_columns(b_columns, b + c, (size_t)C);
        for (int i = 0; i < VLANES; i++) { sum = v_madd(a_columns[i] * a_factor, b_columns[i] * b_factor, sum); }
    }
    for (int r = 0; r < VLANES; r++, a += C, b += C) {
        for (int c = whole; c < C; c++) { sum[r] = madd(a[c] * a_factor[r], b[c] * b_factor[r], sum[r]); }
    }
    return sum;
}

static inline void l2norm_forward(float* out, float* rstd, const float* inp, float scale, float eps, int N, int C,
                                  const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const float* x = inp + (size_t)first * C;
        float* y = out + (size_t)first * C;
        if (first + VLANES > N) {
            l2norm_forward_ref(y, rstd + first, x, scale, eps, N - first, C);
            continue;
        }
        const vfloat sums = l2norm_sums_(x, v_fill(1.0f), x, v_fill(1.0f), C);
        for (int r = 0; r < VLANES; r++, x += C, y += C) {
            const float s = rstd[first + r] = 1.0f / sqrtf(sums[r] + eps);
            #pragma omp simd
            for (int c = 0; c < C; c++) { y[c] = x[c] * s * scale; }
        }
    }
}

static inline void l2norm_backward(float* dinp, const float* dout, const float* inp, const float* rstd, float scale,
                                   int N, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const float *x = inp + (size_t)first * C, *d = dout + (size_t)first * C;
        float* dx = dinp + (size_t)first * C;
        if (first + VLANES > N) {
            l2norm_backward_ref(dx, d, x, rstd + first, scale, N - first, C);
            continue;
        }
        const vfloat sums = l2norm_sums_(d, v_fill(scale), x, v_load(rstd + first), C);
        for (int r = 0; r < VLANES; r++, x += C, d += C, dx += C) {
            const float s = rstd[first + r], sum = sums[r];
            #pragma omp simd
            for (int c = 0; c < C; c++) { dx[c] = s * (d[c] * scale - x[c] * s * sum); }
        }
    }
}

#else  // ---- CUDA: one warp per row ----

enum { L2NORM_ROWS = 8 };  // rows of a block: blocks are (32, 8)

template <int W, typename X>
__global__ void l2norm_forward_kernel(X* out, float* rstd, const X* inp, float scale, float eps, int N, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x * W;
    if (n >= N) { return; }  // a warp shares threadIdx.y, so it leaves whole and shuffles stay legal
    const size_t start = (size_t)n * C;
    float sum = 0.0f;
    for (int c = lane; c - lane < C; c += WARP * W) {
        Pack<float, W> x = {};
        if (c < C) { x = load_floats<W>(inp + start + c); }
        sum = row_madd(x.x, x.x, sum);
    }
    const float s = 1.0f / sqrtf(row_total(sum) + eps);
    for (int c = lane; c < C; c += WARP * W) {
        Pack<float, W> x = load_floats<W>(inp + start + c);
        for (int i = 0; i < W; i++) { x.x[i] = x.x[i] * s * scale; }
        store_floats(out + start + c, x);
    }
    if (threadIdx.x == 0) { rstd[n] = s; }
}

template <int W, typename X>
__global__ void l2norm_backward_kernel(X* dinp, const X* dout, const X* inp, const float* rstd, float scale, int N,
                                       int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x * W;
    if (n >= N) { return; }
    const size_t start = (size_t)n * C;
    const float s = rstd[n];
    float sum = 0.0f;
    for (int c = lane; c - lane < C; c += WARP * W) {
        Pack<float, W> dy, y = {};
        for (int i = 0; i < W; i++) { dy.x[i] = -0.0f; }  // beyond the row: -0 * 0 leaves every sum as it is, also -0
        if (c < C) {
            dy = load_floats<W>(dout + start + c), y = load_floats<W>(inp + start + c);
            for (int i = 0; i < W; i++) { dy.x[i] *= scale, y.x[i] *= s; }
        }
        sum = row_madd(dy.x, y.x, sum);
    }
    const float total = row_total(sum);
    for (int c = lane; c < C; c += WARP * W) {
        Pack<float, W> d = load_floats<W>(dout + start + c), x = load_floats<W>(inp + start + c);
        for (int i = 0; i < W; i++) { d.x[i] = s * (d.x[i] * scale - x.x[i] * s * total); }
        store_floats(dinp + start + c, d);
    }
}

template <typename X>
static inline void l2norm_forward(X* out, float* rstd, const X* inp, float scale, float eps, int N, int C,
                                  const Device* dev) {
    constexpr int W = pack_width<X>();
    const dim3 block(WARP, L2NORM_ROWS);
    const unsigned n = (unsigned)ceil_div(N, L2NORM_ROWS);
    if (C % W == 0 && pack_aligned(out, inp)) {
        l2norm_forward_kernel<W><<<n, block, 0, dev->stream>>>(out, rstd, inp, scale, eps, N, C);
    } else {
        l2norm_forward_kernel<1><<<n, block, 0, dev->stream>>>(out, rstd, inp, scale, eps, N, C);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void l2norm_backward(X* dinp, const X* dout, const X* inp, const float* rstd, float scale, int N, int C,
                                   const Device* dev) {
    constexpr int W = pack_width<X>();
    const dim3 block(WARP, L2NORM_ROWS);
    const unsigned n = (unsigned)ceil_div(N, L2NORM_ROWS);
    if (C % W == 0 && pack_aligned(dinp, dout, inp)) {
        l2norm_backward_kernel<W><<<n, block, 0, dev->stream>>>(dinp, dout, inp, rstd, scale, N, C);
    } else {
        l2norm_backward_kernel<1><<<n, block, 0, dev->stream>>>(dinp, dout, inp, rstd, scale, N, C);
    }
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_L2NORM_H
