/*
Token and position embedding: out[b][t] = wte[token at b, t] + wpe[t].
    out (B, T, C)   tokens (B, T) in 0..V-1   wte (V, C)   wpe (maxT, C)   t0: position of the first column (0 in training)
Backward: dwte[token] and dwpe[t] are ADDED to, so the caller starts them: a tied head has already written dwte.
Cost:   memory bound: 3*B*T*C floats moved forward, as many backward.
Order:  both gradients take their positions n = b*T + t ascending; threads split the channels.
*/
#ifndef LLMC_EMBEDDING_H
#define LLMC_EMBEDDING_H
#include "device.h"  // Device

// ---- plain C: read this first; it defines every bit ----

static inline void embedding_forward_ref(float* out, const int* tokens, const float* wte, const float* wpe, int B, int T, int C, int t0) {
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) {
            size_t n = (size_t)b * T + t;
            const float* token = wte + (size_t)tokens[n] * C;
            const float* position = wpe + (size_t)(t0 + t) * C;
            for (int c = 0; c < C; c++) { out[n * C + c] = token[c] + position[c]; }
        }
    }
}

static inline void embedding_backward_ref(float* dwte, float* dwpe, const float* dout, const int* tokens, int B, int T, int C) {
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) {
            size_t n = (size_t)b * T + t;
            float* dtoken = dwte + (size_t)tokens[n] * C;
            float* dposition = dwpe + (size_t)t * C;
            for (int c = 0; c < C; c++) {
                dtoken[c] += dout[n * C + c];
                dposition[c] += dout[n * C + c];
            }
        }
    }
}

// ---- fast C: rows over threads forward, channels over threads backward ----

static inline void embedding_forward(float* out, const int* tokens, const float* wte, const float* wpe, int B, int T, int C, int t0,
                                     const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < B * T; n++) {
        embedding_forward_ref(out + (size_t)n * C, tokens + n, wte, wpe, 1, 1, C, t0 + n % T);
    }
}

static inline void embedding_backward(float* dwte, float* dwpe, const float* dout, const int* tokens, int B, int T, int C,
                                      const Device* dev) {
    (void)dev;
    const int width = 64;
    #pragma omp parallel for
    for (int first = 0; first < C; first += width) {
        int last = first + width < C ? first + width : C;
        for (int n = 0; n < B * T; n++) {
            const float* d = dout + (size_t)n * C;
            float* dtoken = dwte + (size_t)tokens[n] * C;
            float* dposition = dwpe + (size_t)(n % T) * C;
            #pragma omp simd
            for (int c = first; c < last; c++) {
                dtoken[c] += d[c];
                dposition[c] += d[c];
            }
        }
    }
}
#endif  // LLMC_EMBEDDING_H
