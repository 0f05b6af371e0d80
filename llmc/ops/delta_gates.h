/*
The gates of the gated delta rule (gated_delta.h), of each position and value head: how fast its memory fades, and how
much of a value is written. a and b are what two linear layers say of the position, A_log and dt_bias the head's own.
    a, b (N, H)   A_log, dt_bias (H)   g, beta (N, H) float
    g    = -(exp(A_log) * softplus(a + dt_bias))      the logarithm of what a step keeps, never above 0
    beta = sigmoid(b)
Backward, with sp = softplus(a + dt_bias), everything written; da may be a, db may be b
    da       = -(exp(A_log) * dg) * (1 - exp(-sp))    (N, H)
    db       = dbeta * (beta * (1 - beta))            (N, H)
    dA_log   = sum over n of dg * g                   (H) float } one call is one leaf. NULL for either: nobody asks
    ddt_bias = sum over n of da before it is stored   (H) float } for it. g is read for dA_log alone
Cost:   N*H numbers, a thousandth of the layer. On a CPU bound by exp, log1p and expm1, one behind the other: 4.2 ns for
        each forward, 6.6 backward, one thread, AVX-512, gcc 12, AMD EPYC, the smallest of 100 calls. Not measured on a
        GPU yet: kernels compute da twice, once for its sum.
Error:  x = a + dt_bias is rounded, and softplus of a large -x is exp(x): g is within (5 + |x|) 2^-24 of itself, da
        within (8 + |x|) 2^-24 of |exp(A_log) * dg|. beta as in row_gate.h. bf16 rounds what is stored: 2^-8.
Order:  element by element, parentheses as they stand; dA_log is a chain of fused products over n from 0, ddt_bias one
        of additions. In C and in EXACT kernels lanes hold heads. Fast kernels have the same functions, of which nvcc
        may fuse products, and sum over parts of the positions, as many as there are multiprocessors at most; then over
        the parts, ascending.
Source: Dao & Gu 2024, arXiv:2405.21060 (A_log, dt_bias); Yang et al. 2024, arXiv:2412.06464 (Gated DeltaNet);
        doc/qwen36.md "Formula"
*/
#ifndef LLMC_DELTA_GATES_H
#define LLMC_DELTA_GATES_H
#include "../core/device.h"  // Device, device_workspace, ceil_div
#include "../core/fmath.h"   // fm_exp, FM_FUNCTION
#include "../core/kernel.h"  // to_float, from_float, grid_first, grid_step, grid_blocks
#include "../core/madd.h"    // madd
#include "silu.h"            // sigmoid_one
#include "softplus.h"        // softplus_one, softplus_slope_one

// decay = exp(A_log)
FM_FUNCTION float delta_gates_g_(float a, float decay, float dt_bias) { return -(decay * softplus_one(a + dt_bias)); }

FM_FUNCTION float delta_gates_da_(float dg, float a, float decay, float dt_bias) {
    return -(decay * dg) * softplus_slope_one(softplus_one(a + dt_bias));
}

FM_FUNCTION float delta_gates_db_(float dbeta, float beta) { return dbeta * (beta * (1.0f - beta)); }

// ---- plain C: read this first; it defines every bit ----

static inline void delta_gates_forward_ref(float* g, float* beta, const float* a, const float* b, const float* A_log,
                                           const float* dt_bias, int N, int H) {
    for (size_t n = 0; n < (size_t)N; n++) {
        for (int h = 0; h < H; h++) {
            g[n * H + h] = delta_gates_g_(a[n * H + h], fm_exp(A_log[h]), dt_bias[h]);
            beta[n * H + h] = sigmoid_one(b[n * H + h]);
        }
    }
}

static inline void delta_gates_backward_ref(float* da, float* db, float* dA_log, float* ddt_bias, const float* dg,
                                            const float* dbeta, const float* a, const float* g, const float* beta,
                                            const float* A_log, const float* dt_bias, int N, int H) {
    for (int h = 0; h < H; h++) {
        float A_sum = 0.0f, bias_sum = 0.0f;
        for (size_t n = 0; n < (size_t)N; n++) {
            const size_t i = n * H + h;
            da[i] = delta_gates_da_(dg[i], a[i], fm_exp(A_log[h]), dt_bias[h]);
            db[i] = delta_gates_db_(dbeta[i], beta[i]);
            bias_sum += da[i];
            if (dA_log) { A_sum = madd(dg[i], g[i], A_sum); }
        }
        if (dA_log) { dA_log[h] = A_sum; }
        if (ddt_bias) { ddt_bias[h] = bias_sum; }
    }
}

#ifndef __CUDACC__  // ---- fast C: positions over threads, lanes are neighbouring heads ----

enum { DELTA_GATES_HEADS = 64, DELTA_GATES_ROWS = 32 };  // whose decay is computed once, for so many positions

static inline int delta_gates_least_(int a, int b) { return a < b ? a : b; }

// decay of n heads
static inline void delta_gates_decay_(float decay[DELTA_GATES_HEADS], const float* A_log, int n) {
    #pragma omp simd
    for (int h = 0; h < n; h++) { decay[h] = fm_exp(A_log[h]); }
}

static inline void delta_gates_forward(float* g, float* beta, const float* a, const float* b, const float* A_log,
                                       const float* dt_bias, int N, int H, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int first = 0; first < N; first += DELTA_GATES_ROWS) {
        const int last = delta_gates_least_(first + DELTA_GATES_ROWS, N);
        for (int head = 0; head < H; head += DELTA_GATES_HEADS) {
            const int n_heads = delta_gates_least_(DELTA_GATES_HEADS, H - head);
            float decay[DELTA_GATES_HEADS];
            delta_gates_decay_(decay, A_log + head, n_heads);
            for (size_t i = (size_t)first * H + head; i < (size_t)last * H; i += H) {
                #pragma omp simd
                for (int h = 0; h < n_heads; h++) {
                    g[i + h] = delta_gates_g_(a[i + h], decay[h], dt_bias[head + h]);
                    beta[i + h] = sigmoid_one(b[i + h]);
                }
            }
        }
    }
}

// da and db, positions over threads
static inline void delta_gates_backward_inputs_(float* da, float* db, const float* dg, const float* dbeta,
                                                const float* a, const float* beta, const float* A_log,
                                                const float* dt_bias, int N, int H) {
    #pragma omp parallel for
    for (int first = 0; first < N; first += DELTA_GATES_ROWS) {
        const int last = delta_gates_least_(first + DELTA_GATES_ROWS, N);
        for (int head = 0; head < H; head += DELTA_GATES_HEADS) {
            const int n_heads = delta_gates_least_(DELTA_GATES_HEADS, H - head);
            float decay[DELTA_GATES_HEADS];
            delta_gates_decay_(decay, A_log + head, n_heads);
            for (size_t i = (size_t)first * H + head; i < (size_t)last * H; i += H) {
                #pragma omp simd
                for (int h = 0; h < n_heads; h++) {
                    da[i + h] = delta_gates_da_(dg[i + h], a[i + h], decay[h], dt_bias[head + h]);
                    db[i + h] = delta_gates_db_(dbeta[i + h], beta[i + h]);
                }
            }
        }
    }
}

// the sums, heads over threads: 16 of them are a cache line
static inline void delta_gates_backward_sums_(float* dA_log, float* ddt_bias, const float* dg, const float* g,
                                              const float* da, int N, int H) {
    enum { LINE = 16 };
    #pragma omp parallel for
    for (int head = 0; head < H; head += LINE) {
        const int n_heads = delta_gates_least_(LINE, H - head);
        float A_sum[LINE] = {0}, bias_sum[LINE] = {0};
        for (size_t i = (size_t)head; i < (size_t)N * H; i += H) {
            for (int h = 0; dA_log && h < n_heads; h++) { A_sum[h] = madd(dg[i + h], g[i + h], A_sum[h]); }
            for (int h = 0; h < n_heads; h++) { bias_sum[h] += da[i + h]; }
        }
        for (int h = 0; dA_log && h < n_heads; h++) { dA_log[head + h] = A_sum[h]; }
        for (int h = 0; ddt_bias && h < n_heads; h++) { ddt_bias[head + h] = bias_sum[h]; }
    }
}

static inline void delta_gates_backward(float* da, float* db, float* dA_log, float* ddt_bias, const float* dg,
                                        const float* dbeta, const float* a, const float* g, const float* beta,
                                        const float* A_log, const float* dt_bias, int N, int H, const Device* dev) {
    (void)dev;
    delta_gates_backward_inputs_(da, db, dg, dbeta, a, beta, A_log, dt_bias, N, H);
    if (dA_log || ddt_bias) { delta_gates_backward_sums_(dA_log, ddt_bias, dg, g, da, N, H); }
}
#else  // ---- CUDA ----

template <typename X>
__global__ void delta_gates_forward_kernel(float* g, float* beta, const X* a, const X* b, const X* A_log,
                                           const X* dt_bias, size_t n, int H) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) {
        const int h = (int)(i % H);
        g[i] = delta_gates_g_(to_float(a[i]), fm_exp(to_float(A_log[h])), to_float(dt_bias[h]));
        beta[i] = sigmoid_one(to_float(b[i]));
    }
}

template <typename X>
static inline void delta_gates_forward(float* g, float* beta, const X* a, const X* b, const X* A_log, const X* dt_bias,
                                       int N, int H, const Device* dev) {
    const size_t n = (size_t)N * H;
    if (n == 0) { return; }
    delta_gates_forward_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(g, beta, a, b, A_log, dt_bias, n,
                                                                                       H);
    cudaCheck(cudaGetLastError());
}

template <typename X>
__global__ void delta_gates_backward_kernel(X* da, X* db, const float* dg, const float* dbeta, const X* a,
                                            const float* beta, const X* A_log, const X* dt_bias, size_t n, int H) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) {
        const int h = (int)(i % H);
        const float decay = fm_exp(to_float(A_log[h]));
        da[i] = from_float<X>(delta_gates_da_(dg[i], to_float(a[i]), decay, to_float(dt_bias[h])));
        db[i] = from_float<X>(delta_gates_db_(dbeta[i], beta[i]));
    }
}

// A_parts, bias_parts (gridDim.y, H): the sums over the positions N * y / gridDim.y .. of part y. A thread has a head;
// NULL: nobody asks
template <typename X>
__global__ void delta_gates_sums_kernel(float* A_parts, float* bias_parts, const float* dg, const X* a, const float* g,
                                        const X* A_log, const X* dt_bias, int N, int H) {
    const int h = blockIdx.x * blockDim.x + threadIdx.x, part = blockIdx.y;
    if (h >= H) { return; }
    const int first = (int)((int64_t)N * part / gridDim.y), last = (int)((int64_t)N * (part + 1) / gridDim.y);
    const float decay = fm_exp(to_float(A_log[h])), bias = to_float(dt_bias[h]);
    float A_sum = 0.0f, bias_sum = 0.0f;
    #pragma unroll 4
    for (int n = first; n < last; n++) {
        const size_t i = (size_t)n * H + h;
        const float d = dg[i];
        if (A_parts) { A_sum = madd(d, g[i], A_sum); }
        if (bias_parts) { bias_sum += delta_gates_da_(d, to_float(a[i]), decay, bias); }
    }
    if (A_parts) { A_parts[(size_t)part * H + h] = A_sum; }
    if (bias_parts) { bias_parts[(size_t)part * H + h] = bias_sum; }
}

// out (H): the sum of parts (n_parts, H), ascending
__global__ static void delta_gates_parts_kernel(float* out, const float* parts, int n_parts, int H) {
    const int h = blockIdx.x * blockDim.x + threadIdx.x;
    if (h >= H) { return; }
    float sum = parts[h];
    #pragma unroll 8
    for (int part = 1; part < n_parts; part++) { sum += parts[(size_t)part * H + h]; }
    out[h] = sum;
}

// into how many parts the positions are cut
static inline int delta_gates_n_parts_(int N, const Device* dev) {
#ifdef EXACT
    (void)N, (void)dev;
    return 1;  // a chain
#else
    const int n = (int)ceil_div(N, 32);
    return n < 1 ? 1 : n < dev->n_sms ? n : dev->n_sms;
#endif
}

template <typename X>
static inline void delta_gates_backward_sums_(float* dA_log, float* ddt_bias, const float* dg, const X* a,
                                              const float* g, const X* A_log, const X* dt_bias, int N, int H,
                                              const Device* dev) {
    const int n_parts = delta_gates_n_parts_(N, dev);
    const unsigned blocks = (unsigned)ceil_div(H, WARP);
    const size_t size = (size_t)n_parts * H;
    float *A_parts = dA_log, *bias_parts = ddt_bias;
    if (n_parts > 1) {
        float* parts = (float*)device_workspace(dev, sizeof(float) * 2 * size);
        A_parts = dA_log ? parts : NULL, bias_parts = ddt_bias ? parts + size : NULL;
    }
    const dim3 grid(blocks, (unsigned)n_parts);
    delta_gates_sums_kernel<<<grid, WARP, 0, dev->stream>>>(A_parts, bias_parts, dg, a, g, A_log, dt_bias, N, H);
    if (n_parts > 1 && dA_log) {
        delta_gates_parts_kernel<<<blocks, WARP, 0, dev->stream>>>(dA_log, A_parts, n_parts, H);
    }
    if (n_parts > 1 && ddt_bias) {
        delta_gates_parts_kernel<<<blocks, WARP, 0, dev->stream>>>(ddt_bias, bias_parts, n_parts, H);
    }
    cudaCheck(cudaGetLastError());
}

// the sums first: da may be a
template <typename X>
static inline void delta_gates_backward(X* da, X* db, float* dA_log, float* ddt_bias, const float* dg,
                                        const float* dbeta, const X* a, const float* g, const float* beta,
                                        const X* A_log, const X* dt_bias, int N, int H, const Device* dev) {
    const size_t n = (size_t)N * H;
    if (dA_log || ddt_bias) { delta_gates_backward_sums_(dA_log, ddt_bias, dg, a, g, A_log, dt_bias, N, H, dev); }
    if (n == 0) { return; }
    delta_gates_backward_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(da, db, dg, dbeta, a, beta,
                                                                                        A_log, dt_bias, n, H);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_DELTA_GATES_H
