/*
SwiGLU: hidden = silu(gate) * up, what lies between the two linear layers of an MLP or of one expert.
    gate_up (R, 2F)  row: gate's F numbers, then up's, as one linear layer leaves them     hidden (R, F)
    limit            0: none. Else, before anything else, gate = min(gate, limit) and up = what is nearest to it in
                     -limit .. limit (DeepSeek V4). A NaN stays one
Backward, of rows that come into the sum of the model's stream with a weight each: out = weight * (hidden * Wd^T). With
t (R, F) = dout * Wd, the gradient of hidden where the weight is 1, and the gradient of hidden dh = weight * t:
    dgate     = dh * up * silu'(gate)      0 where gate > limit                    } (R, 2F), written; dgate_up may be
    dup       = dh * silu(gate)            0 where up > limit or up < -limit       } gate_up
    weighted  = weight * hidden            (R, F)  written, or NULL. With it dWd is dout * weighted: may be t
    dweight   = sum over f of t * hidden   (R)     float, written, or NULL
weight, float, may be NULL: all are 1, and nothing is multiplied by it. hidden is not read but computed again.
Cost:   bound by the exponential on a CPU: 0.77 ns per element of hidden forward, 1.05 backward, 1.12 with `weighted`,
        1.30 with dweight too (silu.h's gate in the same run: 0.70 and 0.86). One thread, AVX-512, gcc 12, AMD EPYC.
        On a GPU memory bound: 3*R*F elements forward, 7*R*F backward with `weighted`. Judge it in GB/s.
Error:  silu and its slope are silu.h's; hidden one rounding more, dgate three. bf16 rounds what is stored: 2^-8.
Order:  element by element, products from the left as written; dweight chains over f from 0, in fast kernels over 32
        lanes and a tree. In C lanes hold neighbouring elements, and for dweight neighbouring rows.
Source: Shazeer 2020, arXiv:2002.05202; DeepSeek-V4's limit: its model.py; the backward that needs no output of Wd:
        Guo et al. 2025, arXiv:2512.14080 (SonicMoE)
*/
#ifndef LLMC_SWIGLU_H
#define LLMC_SWIGLU_H
#include "../core/device.h"  // Device
#include "../core/kernel.h"  // load_floats, store_floats, row_madd, row_total, pack_aligned
#include "silu.h"            // silu_one, silu_slope_one
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_load_columns, v_madd
#endif

static inline float swiglu_limit_(float limit) { return limit > 0.0f ? limit : INFINITY; }
FM_FUNCTION float swiglu_below_(float x, float limit) { return x > limit ? limit : x; }
FM_FUNCTION float swiglu_between_(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// ---- plain C: read this first; it defines every bit ----

static inline void swiglu_forward_ref(float* hidden, const float* gate_up, float limit, int R, int F) {
    const float most = swiglu_limit_(limit);
    for (size_t r = 0; r < (size_t)R; r++) {
        for (int f = 0; f < F; f++) {
            float gate = swiglu_below_(gate_up[r * 2 * F + f], most);
            float up = swiglu_between_(gate_up[r * 2 * F + F + f], most);
            hidden[r * F + f] = silu_one(gate) * up;
        }
    }
}

static inline void swiglu_backward_ref(float* dgate_up, float* weighted, float* dweight, const float* t,
                                       const float* gate_up, const float* weight, float limit, int R, int F) {
    const float most = swiglu_limit_(limit);
    for (size_t r = 0; r < (size_t)R; r++) {
        float sum = 0.0f;
        for (int f = 0; f < F; f++) {
            float gate = gate_up[r * 2 * F + f], up = gate_up[r * 2 * F + F + f];
            float g = swiglu_below_(gate, most), u = swiglu_between_(up, most);
            float h = silu_one(g) * u, tf = t[r * F + f], dh = weight ? weight[r] * tf : tf;
            sum = madd(tf, h, sum);
            dgate_up[r * 2 * F + f] = gate > most ? 0.0f : dh * u * silu_slope_one(g);
            dgate_up[r * 2 * F + F + f] = up > most || up < -most ? 0.0f : dh * silu_one(g);
            if (weighted) { weighted[r * F + f] = weight ? weight[r] * h : h; }
        }
        if (dweight) { dweight[r] = sum; }
    }
}

#ifndef __CUDACC__  // ---- fast C ----

static inline void swiglu_forward(float* hidden, const float* gate_up, float limit, int R, int F, const Device* dev) {
    const float most = swiglu_limit_(limit);
    (void)dev;
    #pragma omp parallel for
    for (int r = 0; r < R; r++) {
        const float *gate = gate_up + (size_t)r * 2 * F, *up = gate + F;
        float* h = hidden + (size_t)r * F;
        #pragma omp simd
        for (int f = 0; f < F; f++) { h[f] = silu_one(swiglu_below_(gate[f], most)) * swiglu_between_(up[f], most); }
    }
}

enum { SWIGLU_STRIP = 256 };  // channels of VLANES rows whose hidden values stay in the cache until they are summed

// of n channels of a row: hidden into h, and both gradients. w 1: x * 1 is x
static inline void swiglu_slopes_(float* dgate, float* dup, float* h, const float* t, const float* gate,
                                  const float* up, float w, float most, int n) {
    #pragma omp simd
    for (int f = 0; f < n; f++) {
        float gate_f = gate[f], up_f = up[f], dh = w * t[f];
        float g = swiglu_below_(gate_f, most), u = swiglu_between_(up_f, most), s = silu_one(g);
        h[f] = s * u;
        dgate[f] = gate_f > most ? 0.0f : dh * u * silu_slope_one(g);
        dup[f] = up_f > most || up_f < -most ? 0.0f : dh * s;
    }
}

// sums[r] goes on over n channels of t * h, for n_rows rows: those of a whole square side by side
static inline void swiglu_sums_(float sums[VLANES], const float* t, size_t t_stride, const float* h, int n_rows,
                                int n) {
    int squares = n_rows == VLANES ? n / VLANES * VLANES : 0;
    vfloat sum = v_load(sums), t_columns[VLANES], h_columns[VLANES];
    for (int f = 0; f < squares; f += VLANES) {
        v_load_columns(t_columns, t + f, t_stride);
        v_load_columns(h_columns, h + f, SWIGLU_STRIP);
        for (int i = 0; i < VLANES; i++) { sum = v_madd(t_columns[i], h_columns[i], sum); }
    }
    v_store(sums, sum);
    for (int r = 0; r < n_rows; r++, t += t_stride, h += SWIGLU_STRIP) {
        for (int f = squares; f < n; f++) { sums[r] = madd(t[f], h[f], sums[r]); }
    }
}

// up to VLANES rows, the first of which all pointers are at
static inline void swiglu_backward_rows_(float* dgate_up, float* weighted, float* dweight, const float* t,
                                         const float* gate_up, const float* weight, float most, int n_rows, int F) {
    float h[VLANES * SWIGLU_STRIP], sums[VLANES] = {0};
    for (int f = 0; f < F; f += SWIGLU_STRIP) {
        int n = F - f < SWIGLU_STRIP ? F - f : SWIGLU_STRIP;
        for (int r = 0; r < n_rows; r++) {
            size_t gate = (size_t)r * 2 * F + f, up = gate + F;
            swiglu_slopes_(dgate_up + gate, dgate_up + up, h + r * SWIGLU_STRIP, t + (size_t)r * F + f,
                           gate_up + gate, gate_up + up, weight ? weight[r] : 1.0f, most, n);
        }
        if (dweight) { swiglu_sums_(sums, t + f, (size_t)F, h, n_rows, n); }
        for (int r = 0; weighted && r < n_rows; r++) {
            float *y = weighted + (size_t)r * F + f, w = weight ? weight[r] : 1.0f;
            #pragma omp simd
            for (int i = 0; i < n; i++) { y[i] = w * h[r * SWIGLU_STRIP + i]; }
        }
    }
    for (int r = 0; dweight && r < n_rows; r++) { dweight[r] = sums[r]; }
}

static inline void swiglu_backward(float* dgate_up, float* weighted, float* dweight, const float* t,
                                   const float* gate_up, const float* weight, float limit, int R, int F,
                                   const Device* dev) {
    const float most = swiglu_limit_(limit);
    (void)dev;
    #pragma omp parallel for
    for (int r = 0; r < R; r += VLANES) {
        const size_t n = (size_t)r * F;
        swiglu_backward_rows_(dgate_up + 2 * n, weighted ? weighted + n : NULL, dweight ? dweight + r : NULL,
                              t + n, gate_up + 2 * n, weight ? weight + r : NULL, most,
                              R - r < VLANES ? R - r : VLANES, F);
    }
}
#else  // ---- CUDA ----

#ifdef EXACT
__device__ inline float swiglu_silu_(float x, float* slope) {
    *slope = silu_slope_one(x);
    return silu_one(x);
}
#else
// one exponential and one division for both
__device__ inline float swiglu_silu_(float x, float* slope) {
    float s = __fdividef(1.0f, 1.0f + kernel_exp(-x));
    *slope = s * (1.0f + x * (1.0f - s));
    return x * s;
}
#endif

// blocks (threads, rows): a row is walked over by the threads that share threadIdx.y
template <int W, typename X>
__global__ void swiglu_forward_kernel(X* hidden, const X* gate_up, float most, int R, int F) {
    int r = blockIdx.x * blockDim.y + threadIdx.y;
    if (r >= R) { return; }
    const X* gate_row = gate_up + (size_t)r * 2 * F;
    for (int f = threadIdx.x * W; f < F; f += blockDim.x * W) {
        Pack<float, W> gate = load_floats<W>(gate_row + f), up = load_floats<W>(gate_row + F + f);
        for (int i = 0; i < W; i++) {
            float slope;
            up.x[i] = swiglu_silu_(swiglu_below_(gate.x[i], most), &slope) * swiglu_between_(up.x[i], most);
        }
        store_floats(hidden + (size_t)r * F + f, up);
    }
}

template <int W, typename X>
static inline void swiglu_forward_launch_(X* hidden, const X* gate_up, float most, int R, int F, const Device* dev) {
    const unsigned threads = (unsigned)(F / W < GRID_BLOCK ? F / W : (int)GRID_BLOCK);
    dim3 block(threads, GRID_BLOCK / threads);
    swiglu_forward_kernel<W><<<(unsigned)ceil_div(R, block.y), block, 0, dev->stream>>>(hidden, gate_up, most, R, F);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void swiglu_forward(X* hidden, const X* gate_up, float limit, int R, int F, const Device* dev) {
    constexpr int W = pack_width<X>();
    if (R == 0) { return; }
    if (F % W == 0 && pack_aligned(hidden, gate_up)) {
        swiglu_forward_launch_<W>(hidden, gate_up, swiglu_limit_(limit), R, F, dev);
    } else {
        swiglu_forward_launch_<1>(hidden, gate_up, swiglu_limit_(limit), R, F, dev);
    }
}

enum { SWIGLU_ROWS = 8 };  // rows of a block: blocks are (32, 8)

// one warp per row. A lane has read its packs before it writes them, so what is written may lie where they were
template <int W, typename X>
__global__ void swiglu_backward_kernel(X* dgate_up, X* weighted, float* dweight, const X* t, const X* gate_up,
                                       const float* weight, float most, int R, int F) {
    int r = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x * W;
    if (r >= R) { return; }  // a warp shares threadIdx.y, so it leaves whole and shuffles stay legal
    size_t row = (size_t)r * F, gate_row = 2 * row, up_row = gate_row + F;
    float w = weight ? weight[r] : 1.0f, sum = 0.0f;
    for (int f = lane; f - lane < F; f += WARP * W) {
        Pack<float, W> ts, h = {};
        for (int i = 0; i < W; i++) { ts.x[i] = -0.0f; }  // beyond the row: -0 * 0 leaves every sum as it is, also -0
        if (f < F) {
            Pack<float, W> gate = load_floats<W>(gate_up + gate_row + f), up = load_floats<W>(gate_up + up_row + f);
            ts = load_floats<W>(t + row + f);
            for (int i = 0; i < W; i++) {
                float gate_i = gate.x[i], up_i = up.x[i], dh = w * ts.x[i], slope;
                float u = swiglu_between_(up_i, most), s = swiglu_silu_(swiglu_below_(gate_i, most), &slope);
                h.x[i] = s * u;
                gate.x[i] = gate_i > most ? 0.0f : dh * u * slope;
                up.x[i] = up_i > most || up_i < -most ? 0.0f : dh * s;
            }
            store_floats(dgate_up + gate_row + f, gate);
            store_floats(dgate_up + up_row + f, up);
        }
        if (dweight) { sum = row_madd(ts.x, h.x, sum); }
        if (weighted && f < F) {
            for (int i = 0; i < W; i++) { h.x[i] *= w; }
            store_floats(weighted + row + f, h);
        }
    }
    if (!dweight) { return; }
    sum = row_total(sum);
    if (threadIdx.x == 0) { dweight[r] = sum; }
}

template <typename X>
static inline void swiglu_backward(X* dgate_up, typename MaybeNull<X>::type* weighted, float* dweight, const X* t,
                                   const X* gate_up, const float* weight, float limit, int R, int F,
                                   const Device* dev) {
    constexpr int W = pack_width<X>();
    const float most = swiglu_limit_(limit);
    const unsigned blocks = (unsigned)ceil_div(R, SWIGLU_ROWS);
    dim3 block(WARP, SWIGLU_ROWS);
    if (R == 0) { return; }
    if (F % W == 0 && pack_aligned(dgate_up, weighted, t, gate_up)) {
        swiglu_backward_kernel<W><<<blocks, block, 0, dev->stream>>>(dgate_up, weighted, dweight, t, gate_up,
                                                                     weight, most, R, F);
    } else {
        swiglu_backward_kernel<1><<<blocks, block, 0, dev->stream>>>(dgate_up, weighted, dweight, t, gate_up,
                                                                     weight, most, R, F);
    }
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_SWIGLU_H
