/*
EMA: the exponential moving average of the parameters over the updates of a run. Its loss is often lower than that of
the parameters themselves, which the noise of each update moves about.
    p (n) parameters after update t = 1, 2, 3, ...      e (n) their average, float, 0 before the first
    e += weight * (p - e)                               weight = (1 - decay) / (1 - decay^t)
so that e is the mean of p_1 .. p_t with weights decay^(t-1) .. decay, 1: of the start values, which no update has made,
there is nothing in it, and after the first update e is p. It remembers about 1 / (1 - decay) updates.
Cost:   memory bound: 3 floats moved per parameter.
Order:  element by element, as written; the weight in double, rounded once. ema_exchange moves bits.
Error:  EXACT kernels have the bits of the C code; fast ones may fuse.
Source: Polyak & Juditsky 1992; the correction is Adam's, Kingma & Ba 2014, arXiv:1412.6980, section 3
*/
#ifndef LLMC_EMA_H
#define LLMC_EMA_H
#include "../core/device.h"  // Device
#include "../core/fmath.h"   // fm_powi, FM_FUNCTION: for host and device
#include "../core/kernel.h"  // to_float

// t: updates with this one, since the average began
static inline float ema_weight(float decay, int t) {
    return (float)((1.0 - (double)decay) / (1.0 - fm_powi((double)decay, t)));
}

FM_FUNCTION float ema_element_(float e, float p, float weight) { return e + weight * (p - e); }

static inline void ema_update_ref(float* e, const float* p, size_t n, float weight) {
    for (size_t i = 0; i < n; i++) { e[i] = e[i] + weight * (p[i] - e[i]); }
}

#ifndef __CUDACC__
static inline void ema_update(float* e, const float* p, size_t n, float weight, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) { e[i] = ema_element_(e[i], p[i], weight); }
}

// each gets what the other has
static inline void ema_exchange(float* e, float* p, size_t n, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        const float x = e[i];
        e[i] = p[i];
        p[i] = x;
    }
}

#else  // ---- CUDA: one thread an element ----

template <typename X>
__global__ void ema_kernel(float* e, const X* p, size_t n, float weight) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { e[i] = ema_element_(e[i], to_float(p[i]), weight); }
}

template <typename X>
__global__ void ema_exchange_kernel(X* e, X* p, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    const X x = e[i];
    e[i] = p[i];
    p[i] = x;
}

template <typename X>
static inline void ema_update(float* e, const X* p, size_t n, float weight, const Device* dev) {
    if (n == 0) { return; }
    ema_kernel<<<(unsigned)ceil_div((int64_t)n, 256), 256, 0, dev->stream>>>(e, p, n, weight);
    cudaCheck(cudaGetLastError());
}

static inline void ema_exchange(float* e, float* p, size_t n, const Device* dev) {
    if (n == 0) { return; }
    ema_exchange_kernel<<<(unsigned)ceil_div((int64_t)n, 256), 256, 0, dev->stream>>>(e, p, n);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_EMA_H
