/*
Forward-Forward: a layer learns from its own activity, without a gradient from the layers above. It sees real data and
corrupted data; the goodness G of a position is the mean square of the layer's output o, and should be above a threshold
for real data and below it for corrupted.
    ff_corrupt   tokens, negatives (B, T) in 0..V-1, V > 1    negatives: the same rows, a part of the tokens replaced
    ff_goodness  o, dout (N, M)   losses (N)    loss = softplus(threshold - G) for real, softplus(G - threshold) for
                 corrupted; dout, written: the gradient of dloss * sum of losses. Nothing goes to the layers below: they
                 are constants here.
Cost:   ff_goodness is memory bound: N*M floats read and written once. Judge it in GB/s.
Error:  G: a chain of M squares, relative error below (M + 1) * 2^-24; that moves the loss and dout by less than G times
        as much.
Order:  ff_corrupt: position n = b*T + t is a function of (key, n) alone. ff_goodness: G = chain over m from 0 of o*o,
        / M; slope = -sigmoid(threshold - G) or sigmoid(G - threshold);  dout = ((slope * 2 / M) * dloss) * o.
CPU only.
Source: Hinton 2022, arXiv:2212.13345; doc/gradient_surgery.md
*/
#ifndef LLMC_FORWARD_FORWARD_H
#define LLMC_FORWARD_FORWARD_H
#include "../core/device.h"  // Device
#include "../core/rng.h"     // splitmix64
#include "silu.h"            // sigmoid_one
#include "softplus.h"        // softplus_one
#include <assert.h>
#include <math.h>
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_load_columns, v_fill
#endif

// ---- corrupted data ----

// Each token is replaced with probability `fraction`, by one of the V - 1 others, all of them alike. A row in which
// none was drawn loses the token at a place drawn for it, so that no row stays real
static inline void ff_corrupt(int* negatives, const int* tokens, int B, int T, float fraction, int V, uint64_t key) {
    assert(V > 1);
    const uint64_t places = splitmix64(key, 0), others = splitmix64(key, 1), rows = splitmix64(key, 2);
    for (int b = 0; b < B; b++) {
        const int forced = (int)(splitmix64(rows, (uint64_t)b) % (uint64_t)T);
        int n_replaced = 0;
        for (int t = 0; t < T; t++) {
            size_t n = (size_t)b * T + t;
            int other = (int)(splitmix64(others, n) % (uint64_t)(V - 1));
            int is_drawn = (float)(splitmix64(places, n) >> 40) < fraction * 0x1p24f;
            other += other >= tokens[n];
            negatives[n] = is_drawn ? other : tokens[n];
            n_replaced += is_drawn;
        }
        if (n_replaced == 0) {
            size_t n = (size_t)b * T + forced;
            int other = (int)(splitmix64(others, n) % (uint64_t)(V - 1));
            negatives[n] = other + (other >= tokens[n]);
        }
    }
}

// ---- goodness ----

// the loss of one position from the sum of its squares; returns what o is multiplied by
static inline float ff_loss_(float* loss, float sum, float threshold, int is_real, float dloss, int M) {
    const float goodness = sum / (float)M, wrong = is_real ? threshold - goodness : goodness - threshold;
    const float slope = is_real ? -sigmoid_one(wrong) : sigmoid_one(wrong);
    *loss = softplus_one(wrong);
    return slope * 2.0f / (float)M * dloss;
}

static inline void ff_goodness_ref(float* losses, float* dout, const float* o, float threshold, int is_real,
                                   float dloss, int N, int M) {
    for (int n = 0; n < N; n++) {
        const float* x = o + (size_t)n * M;
        float sum = 0.0f;
        for (int m = 0; m < M; m++) { sum = madd(x[m], x[m], sum); }
        float factor = ff_loss_(losses + n, sum, threshold, is_real, dloss, M);
        for (int m = 0; m < M; m++) { dout[(size_t)n * M + m] = factor * x[m]; }
    }
}

#ifndef __CUDACC__
// sums of squares of VLANES positions: a lane for each
static inline vfloat ff_squares_(const float* o, int M) {
    vfloat sum = v_fill(0.0f), columns[VLANES];
    int m = 0;
    for (; m + VLANES <= M; m += VLANES) {
        v_load_columns(columns, o + m, (size_t)M);
        for (int i = 0; i < VLANES; i++) { sum = v_madd(columns[i], columns[i], sum); }
    }
    for (; m < M; m++) {
        for (int r = 0; r < VLANES; r++) { sum[r] = madd(o[(size_t)r * M + m], o[(size_t)r * M + m], sum[r]); }
    }
    return sum;
}

// dout may be o
static inline void ff_goodness(float* losses, float* dout, const float* o, float threshold, int is_real, float dloss,
                               int N, int M, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const float* x = o + (size_t)first * M;
        float* d = dout + (size_t)first * M;
        if (first + VLANES > N) {
            ff_goodness_ref(losses + first, d, x, threshold, is_real, dloss, N - first, M);
            continue;
        }
        const vfloat sums = ff_squares_(x, M);
        for (int r = 0; r < VLANES; r++, x += M, d += M) {
            float factor = ff_loss_(losses + first + r, sums[r], threshold, is_real, dloss, M);
            #pragma omp simd
            for (int m = 0; m < M; m++) { d[m] = factor * x[m]; }
        }
    }
}
#endif

#endif  // LLMC_FORWARD_FORWARD_H
