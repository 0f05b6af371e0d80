/*
AdamW: one step of Adam with decoupled weight decay, over one tensor of n elements.
    p, m, v (n)  parameters and moments, updated in place   g (n) gradient, read only
    g' = g * grad_scale                         (the clip factor; 1 where nothing is clipped)
    m  = beta1*m + (1-beta1)*g'                 v = beta2*v + ((1-beta2)*g')*g'
    p -= lr * ( (m / correction1) / (sqrt(v / correction2) + eps) + weight_decay * p )
with correction = 1 - beta^t, t = 1, 2, 3, ... counted from the first update.
Cost:   memory bound: 7 floats moved per parameter (28 bytes). Judge it in GB/s.
Stored as X (CUDA: bf16 too): the new parameter is computed in float, from its master or, without one, from what is
stored, and stored by stochastic rounding: steps below half a bf16's last place would else be lost, all of them. Its
noise is a function of noise_key and the element's number in the model (ElementNumbers), so that a part gets the bits
that it has in the whole. X = float: stored is the new parameter itself. adamw_round_stored makes `stored` anew from the
masters, as after a load.
        bf16 moves 30 bytes with a master, 24 without; adamw_round_stored 6.
Order:  element by element, expressions as written; corrections in double, rounded once (parity build: powf, as
        upstream).
Error:  EXACT kernels have the bits of the C code; fast ones may fuse: m and v by one rounding of their larger term.
Source: Loshchilov & Hutter 2017, arXiv:1711.05101; doc/adamw.md. Slower kernels: dev/cuda/adamw.cu
*/
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H
#include "../core/device.h"  // Device
#include "../core/fmath.h"   // fm_powi, FM_FUNCTION: for host and device
#include "../core/kernel.h"  // Pack
#include "../core/rng.h"     // noise_u32, stochastic_bf16
#include <math.h>

typedef struct {
    float lr, beta1, beta2, eps;
    float correction1, correction2;  // 1 - beta^t
    float grad_scale;
} AdamW;

static inline AdamW adamw_step(float lr, float beta1, float beta2, float eps, float grad_scale, int t) {
    AdamW a = {lr, beta1, beta2, eps, 0.0f, 0.0f, grad_scale};
#ifdef SYSTEM_LIBM
    a.correction1 = 1.0f - powf(beta1, (float)t);
    a.correction2 = 1.0f - powf(beta2, (float)t);
#else
    a.correction1 = (float)(1.0 - fm_powi((double)beta1, t));
    a.correction2 = (float)(1.0 - fm_powi((double)beta2, t));
#endif
    return a;
}

static inline void adamw_update_ref(float* p, float* m, float* v, const float* g, size_t n, float weight_decay,
                                    const AdamW* a) {
    for (size_t i = 0; i < n; i++) {
        float grad = g[i] * a->grad_scale;
        m[i] = a->beta1 * m[i] + (1.0f - a->beta1) * grad;
        v[i] = a->beta2 * v[i] + (1.0f - a->beta2) * grad * grad;
        float m_hat = m[i] / a->correction1, v_hat = v[i] / a->correction2;
        p[i] -= a->lr * (m_hat / (sqrtf(v_hat) + a->eps) + weight_decay * p[i]);
    }
}

// the same lines for one element: the new parameter comes back
FM_FUNCTION float adamw_element_(float p, float* m, float* v, float g, float weight_decay, AdamW a) {
    float grad = g * a.grad_scale;
    float m_new = a.beta1 * *m + (1.0f - a.beta1) * grad;
    float v_new = a.beta2 * *v + (1.0f - a.beta2) * grad * grad;
    *m = m_new;
    *v = v_new;
    return p - a.lr * ((m_new / a.correction1) / (sqrtf(v_new / a.correction2) + a.eps) + weight_decay * p);
}

#ifndef __CUDACC__  // ---- fast C: threads take blocks, lanes take elements ----

static inline void adamw_update(float* p, float* m, float* v, const float* g, size_t n, float weight_decay,
                                const AdamW* step, const Device* dev) {
    (void)dev;
    const AdamW a = *step;  // a copy: the compiler need not fear that p points into it
    #pragma omp parallel for simd schedule(static) if (parallel : n > FEW_ELEMENTS)
    for (size_t i = 0; i < n; i++) { p[i] = adamw_element_(p[i], m + i, v + i, g[i], weight_decay, a); }
}

static inline void adamw_round_stored(float* stored, const float* master, size_t n, uint32_t noise_key,
                                      ElementNumbers numbers, const Device* dev) {
    (void)noise_key, (void)numbers;  // a float loses nothing
    device_copy(stored, master, sizeof(float) * n, dev);
}

static inline void adamw_update_stored(float* stored, float* master, float* m, float* v, const float* g, size_t n,
                                       float weight_decay, const AdamW* step, uint32_t noise_key,
                                       ElementNumbers numbers, const Device* dev) {
    adamw_update(master ? master : stored, m, v, g, n, weight_decay, step, dev);
    if (master) { adamw_round_stored(stored, master, n, noise_key, numbers, dev); }
}

#else  // ---- CUDA: each thread takes packs of 4 elements, 16 bytes of every float array ----

template <typename X> __device__ inline X adamw_round_(float x, uint32_t noise_key, size_t i);
template <> __device__ inline float adamw_round_<float>(float x, uint32_t, size_t) { return x; }
template <> __device__ inline __nv_bfloat16 adamw_round_<__nv_bfloat16>(float x, uint32_t noise_key, size_t i) {
    return __ushort_as_bfloat16(stochastic_bf16(x, noise_u32(noise_key, i)));
}

// n is a multiple of W; any grid
template <int W, typename X>
__global__ void adamw_kernel(X* stored, float* master, float* m, float* v, const float* g, size_t n, float weight_decay,
                             AdamW a, uint32_t noise_key, ElementNumbers numbers) {
    const size_t stride = (size_t)W * gridDim.x * blockDim.x;
    for (size_t i = W * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); i < n; i += stride) {
        Pack<X, W> s;
        Pack<float, W> p, m_pack = pack_load<W>(m + i), v_pack = pack_load<W>(v + i), g_pack = pack_load<W>(g + i);
        if (master) {
            p = pack_load<W>(master + i);
        } else {
            s = pack_load<W>(stored + i);
            for (int k = 0; k < W; k++) { p.x[k] = to_float(s.x[k]); }
        }
        for (int k = 0; k < W; k++) {
            p.x[k] = adamw_element_(p.x[k], &m_pack.x[k], &v_pack.x[k], g_pack.x[k], weight_decay, a);
            s.x[k] = adamw_round_<X>(p.x[k], noise_key, element_number(numbers, i + k));
        }
        pack_store(m + i, m_pack);
        pack_store(v + i, v_pack);
        pack_store(stored + i, s);
        if (master) { pack_store(master + i, p); }
    }
}

// n is a multiple of W; any grid
template <int W, typename X>
__global__ void adamw_round_stored_kernel(X* stored, const float* master, size_t n, uint32_t noise_key,
                                          ElementNumbers numbers) {
    const size_t stride = (size_t)W * gridDim.x * blockDim.x;
    for (size_t i = W * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); i < n; i += stride) {
        const Pack<float, W> p = pack_load<W>(master + i);
        Pack<X, W> s;
        for (int k = 0; k < W; k++) { s.x[k] = adamw_round_<X>(p.x[k], noise_key, element_number(numbers, i + k)); }
        pack_store(stored + i, s);
    }
}

enum { ADAMW_PACK = 4, ADAMW_BLOCK = 256 };

// enough blocks for n_packs, at most as many as all multiprocessors can hold at once
static inline int adamw_blocks_(size_t n_packs, const Device* dev) {
    const int64_t needed = ceil_div((int64_t)n_packs, ADAMW_BLOCK), most = (int64_t)dev->n_sms * (2048 / ADAMW_BLOCK);
    return (int)(needed < most ? needed : most);
}

// how many of n elements go in whole packs: none where an array is not on a boundary of its packs
template <typename X>
static inline size_t adamw_whole_(size_t n, const X* stored, const float* a, const float* b, const float* c,
                                  const float* d) {
    const uintptr_t floats = (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d;
    const int fits = floats % (ADAMW_PACK * sizeof(float)) == 0 && (uintptr_t)stored % (ADAMW_PACK * sizeof(X)) == 0;
    return fits ? n / ADAMW_PACK * ADAMW_PACK : 0;
}

template <typename X>
static inline void adamw_update_stored(X* stored, float* master, float* m, float* v, const float* g, size_t n,
                                       float weight_decay, const AdamW* step, uint32_t noise_key,
                                       ElementNumbers numbers, const Device* dev) {
    const size_t whole = adamw_whole_(n, stored, master, m, v, g), rest = n - whole;
    if (whole > 0) {
        adamw_kernel<ADAMW_PACK><<<adamw_blocks_(whole / ADAMW_PACK, dev), ADAMW_BLOCK, 0, dev->stream>>>(
            stored, master, m, v, g, whole, weight_decay, *step, noise_key, numbers);
    }
    if (rest > 0) {
        adamw_kernel<1>
            <<<adamw_blocks_(rest, dev), ADAMW_BLOCK, 0, dev->stream>>>(stored + whole, master ? master + whole : NULL,
                                                                        m + whole, v + whole, g + whole, rest,
                                                                        weight_decay, *step, noise_key,
                                                                        numbers_further(numbers, whole));
    }
    cudaCheck(cudaGetLastError());
}

static inline void adamw_update(float* p, float* m, float* v, const float* g, size_t n, float weight_decay,
                                const AdamW* step, const Device* dev) {
    adamw_update_stored<float>(p, NULL, m, v, g, n, weight_decay, step, 0, numbers_from(0), dev);
}

template <typename X>
static inline void adamw_round_stored(X* stored, const float* master, size_t n, uint32_t noise_key,
                                      ElementNumbers numbers, const Device* dev) {
    const size_t whole = adamw_whole_(n, stored, master, NULL, NULL, NULL), rest = n - whole;
    if (whole > 0) {
        adamw_round_stored_kernel<ADAMW_PACK><<<adamw_blocks_(whole / ADAMW_PACK, dev), ADAMW_BLOCK, 0, dev->stream>>>(
            stored, master, whole, noise_key, numbers);
    }
    if (rest > 0) {
        adamw_round_stored_kernel<1><<<adamw_blocks_(rest, dev), ADAMW_BLOCK, 0, dev->stream>>>(
            stored + whole, master + whole, rest, noise_key, numbers_further(numbers, whole));
    }
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_ADAMW_H
