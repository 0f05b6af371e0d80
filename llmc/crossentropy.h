/*
Softmax over the vocabulary and the cross entropy of the target.
    logits, probs (N, Vp), the first V columns count; probs may be logits: in place    targets (N), negative = not counted
    losses (N)  -log probs[target], 0 where the target is not counted
Backward: dlogits = (probs - [column == target]) * dloss, written; a row that is not counted and the columns V..Vp-1 are 0.
dlogits may be probs. dloss is 1 / (targets counted in the whole update), the same for every row.
Cost:   three passes over rows of 4*V bytes, which fit in the second cache, and one exp per column, 0.7 ns with AVX-512.
Error:  the sum of V exponentials is a plain chain: relative error <= V * 2^-24, found 1e-5 at V = 50257.
Order:  max from -10000, then the sum of exp(logit - max) chains over columns from 0, then every column is divided by it.
Source: spec gpt2.md sections 3 and 4; derived in doc/crossentropy.md
*/
#ifndef LLMC_CROSSENTROPY_H
#define LLMC_CROSSENTROPY_H
#include "device.h"  // Device
#include "fmath.h"   // fm_exp, fm_log
#include "vec.h"     // v_transpose: rows of one column side by side

// ---- plain C: read this first; it defines every bit ----

static inline void softmax_row_ref(float* probs, const float* logits, int V, int Vp) {
    float max = -10000.0f, sum = 0.0f;
    for (int v = 0; v < V; v++) { max = logits[v] > max ? logits[v] : max; }
    for (int v = 0; v < V; v++) {
        probs[v] = fm_exp(logits[v] - max);
        sum += probs[v];
    }
    for (int v = 0; v < V; v++) { probs[v] /= sum; }
    for (int v = V; v < Vp; v++) { probs[v] = 0.0f; }
}

static inline void crossentropy_forward_ref(float* losses, float* probs, const float* logits, const int* targets, int N, int V, int Vp) {
    for (int n = 0; n < N; n++) {
        size_t row = (size_t)n * Vp;
        softmax_row_ref(probs + row, logits + row, V, Vp);
        losses[n] = targets[n] < 0 ? 0.0f : -fm_log(probs[row + targets[n]]);
    }
}

static inline void crossentropy_backward_ref(float* dlogits, const float* probs, const int* targets, float dloss, int N, int V, int Vp) {
    for (int n = 0; n < N; n++) {
        for (int v = 0; v < Vp; v++) {
            size_t i = (size_t)n * Vp + v;
            dlogits[i] = v >= V || targets[n] < 0 ? 0.0f : (probs[i] - (v == targets[n] ? 1.0f : 0.0f)) * dloss;
        }
    }
}

// ---- fast C: the chain of a row cannot be split, so VLANES rows run their chains side by side ----

static inline float softmax_max_(const float* logits, int V) {
    float lane[16];
    for (int i = 0; i < 16; i++) { lane[i] = -10000.0f; }
    int v = 0;
    for (; v + 16 <= V; v += 16) {  // a maximum has no rounding: its order is free
        #pragma omp simd
        for (int i = 0; i < 16; i++) { lane[i] = logits[v + i] > lane[i] ? logits[v + i] : lane[i]; }
    }
    for (; v < V; v++) { lane[0] = logits[v] > lane[0] ? logits[v] : lane[0]; }
    for (int i = 1; i < 16; i++) { lane[0] = lane[i] > lane[0] ? lane[i] : lane[0]; }
    return lane[0];
}

// probs = exp(logits - max) for VLANES rows, and their sums
static inline void softmax_exponentials_(float* probs, const float* logits, float* sums, int V, int Vp) {
    const int width = 4 * VLANES;  // columns at a time: all rows' share of them stays in the first cache
    float max[VLANES];
    vfloat sum = v_fill(0.0f), columns[VLANES];
    for (int r = 0; r < VLANES; r++) { max[r] = softmax_max_(logits + (size_t)r * Vp, V); }
    for (int v0 = 0; v0 < V; v0 += width) {
        int n_valid = V - v0 < width ? V - v0 : width;
        for (int r = 0; r < VLANES; r++) {
            const float* x = logits + (size_t)r * Vp + v0;
            float *p = probs + (size_t)r * Vp + v0, row_max = max[r];
            #pragma omp simd
            for (int i = 0; i < n_valid; i++) { p[i] = fm_exp(x[i] - row_max); }
        }
        int v = v0;
        for (; v + VLANES <= v0 + n_valid; v += VLANES) {
            for (int r = 0; r < VLANES; r++) { columns[r] = v_load(probs + (size_t)r * Vp + v); }
            v_transpose(columns);
            for (int i = 0; i < VLANES; i++) { sum += columns[i]; }
        }
        for (; v < v0 + n_valid; v++) {
            for (int r = 0; r < VLANES; r++) { sum[r] += probs[(size_t)r * Vp + v]; }
        }
    }
    v_store(sums, sum);
}

static inline void crossentropy_forward(float* losses, float* probs, const float* logits, const int* targets, int N, int V, int Vp,
                                        const Device* dev) {
    (void)dev;
    #pragma omp parallel for schedule(dynamic)
    for (int first = 0; first < N; first += VLANES) {
        size_t row = (size_t)first * Vp;
        if (first + VLANES > N) {
            crossentropy_forward_ref(losses + first, probs + row, logits + row, targets + first, N - first, V, Vp);
            continue;
        }
        float sums[VLANES];
        softmax_exponentials_(probs + row, logits + row, sums, V, Vp);
        for (int r = 0; r < VLANES; r++, row += Vp) {
            float *p = probs + row, sum = sums[r];
            int target = targets[first + r];
            #pragma omp simd
            for (int v = 0; v < V; v++) { p[v] /= sum; }
            memset(p + V, 0, sizeof(float) * (Vp - V));
            losses[first + r] = target < 0 ? 0.0f : -fm_log(p[target]);
        }
    }
}

static inline void crossentropy_backward(float* dlogits, const float* probs, const int* targets, float dloss, int N, int V, int Vp,
                                         const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float* p = probs + (size_t)n * Vp;
        float* d = dlogits + (size_t)n * Vp;
        int target = targets[n];
        if (target < 0) {
            memset(d, 0, sizeof(float) * Vp);
            continue;
        }
        float dtarget = (p[target] - 1.0f) * dloss;  // before the row is overwritten
        #pragma omp simd
        for (int v = 0; v < V; v++) { d[v] = p[v] * dloss; }
        d[target] = dtarget;
        memset(d + V, 0, sizeof(float) * (Vp - V));
    }
}
#endif  // LLMC_CROSSENTROPY_H
