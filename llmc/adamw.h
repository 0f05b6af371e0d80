/*
AdamW: one step of Adam with decoupled weight decay, over one tensor of n elements.
    p, m, v (n)  parameters and moments, updated in place   g (n) gradient, read only
    g' = g * grad_scale                         (the clip factor; 1 where nothing is clipped)
    m  = beta1*m + (1-beta1)*g'                 v = beta2*v + ((1-beta2)*g')*g'
    p -= lr * ( (m / correction1) / (sqrt(v / correction2) + eps) + weight_decay * p )
with correction = 1 - beta^t, t = 1, 2, 3, ... counted from the first update.
Cost:   memory bound: 7 floats moved per parameter (28 bytes). Judge it in GB/s.
Order:  element by element, expressions as written; corrections in double, rounded once (parity build: powf, as upstream).
Source: Loshchilov & Hutter 2017, arXiv:1711.05101; spec gpt2.md section 5; doc/adamw.md
*/
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H
#include "device.h"  // Device
#include "fmath.h"   // fm_powi
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

static inline void adamw_update_ref(float* p, float* m, float* v, const float* g, size_t n, float weight_decay, const AdamW* a) {
    for (size_t i = 0; i < n; i++) {
        float grad = g[i] * a->grad_scale;
        m[i] = a->beta1 * m[i] + (1.0f - a->beta1) * grad;
        v[i] = a->beta2 * v[i] + (1.0f - a->beta2) * grad * grad;
        float m_hat = m[i] / a->correction1, v_hat = v[i] / a->correction2;
        p[i] -= a->lr * (m_hat / (sqrtf(v_hat) + a->eps) + weight_decay * p[i]);
    }
}

// the same lines; threads take blocks, lanes take elements
static inline void adamw_update(float* p, float* m, float* v, const float* g, size_t n, float weight_decay, const AdamW* step,
                                const Device* dev) {
    (void)dev;
    const AdamW a = *step;  // a copy: the compiler need not fear that p points into it
    const float one_minus_beta1 = 1.0f - a.beta1, one_minus_beta2 = 1.0f - a.beta2;
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        float grad = g[i] * a.grad_scale;
        float m_new = a.beta1 * m[i] + one_minus_beta1 * grad;
        float v_new = a.beta2 * v[i] + one_minus_beta2 * grad * grad;
        m[i] = m_new;
        v[i] = v_new;
        p[i] -= a.lr * ((m_new / a.correction1) / (sqrtf(v_new / a.correction2) + a.eps) + weight_decay * p[i]);
    }
}
#endif  // LLMC_ADAMW_H
