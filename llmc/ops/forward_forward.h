/*
Forward-Forward: a layer learns from its own activity, without a gradient from the layers above.
(1) Hinton's form. The layer sees real data and corrupted data; the goodness G of a position is the mean square of the layer's
    output o, and should be above a threshold for real data and below it for corrupted.
    ff_corrupt   tokens, negatives (B, T) in 0..V-1, V > 1    negatives: the same rows with a part of the tokens replaced
    ff_goodness  o, dout (N, M)   losses (N)    loss = softplus(threshold - G) for real, softplus(G - threshold) for corrupted;
                 dout, written: the gradient of dloss * sum of losses. Nothing goes to the layers below: they are constants here.
(2) rust_trainer's form, of d_skip of one layer alone, from the layer's input. Per channel d, h+ is the mean of the input over all
    positions and h- that of the next position's input (after a row's last comes its first), its sign turned where t + d is odd.
    With s(h) = standard deviation over d + 1e-5 and l = |d_skip| + 1e-5:
        goodness g = sum over d of (h[d] / s(h)) * (d_skip[d] / l)       loss = max(0, 1 - (g+ - g-))
    rt_ff        r_in (B, T, M)   d_skip, dd_skip (M)    dd_skip, written, is 0 where the loss is, else with q = h+/s(h+) - h-/s(h-)
                 -q / l, as rust_trainer has it; with complete_gradient + (q.d_skip) d_skip / (|d_skip| l^2), which it leaves out
Cost:   ff_goodness is memory bound: N*M floats read and written once; rt_ff reads its input once, its channels shared among
        threads in blocks of 256. Judge them in GB/s.
Error:  G: a chain of M squares, relative error below (M + 1) * 2^-24; so much moves the loss and dout by less than G times that.
Order:  ff_corrupt: position n = b*T + t is a function of (key, n) alone. ff_goodness: G = chain over m from 0 of o*o, / M;
        slope = -sigmoid(threshold - G) or sigmoid(G - threshold);  dout = ((slope * 2 / M) * dloss) * o. rt_ff: means are chains over
        n from 0, / N; standard deviations, |d_skip|, goodness and q.d_skip chains over d from 0; then
        dd_skip = -(q / l), plus (((q.d_skip) / |d_skip| / l) / l) * d_skip in front of it for the complete gradient (0 if |d_skip| is).
CPU only.
Source: Hinton 2022, arXiv:2212.13345; github.com/neuromamba/rust_trainer; both in doc/gradient_surgery.md
*/
#ifndef LLMC_FORWARD_FORWARD_H
#define LLMC_FORWARD_FORWARD_H
#include "../core/device.h"  // Device, device_workspace
#include "../core/rng.h"     // splitmix64
#include "silu.h"            // sigmoid_one
#include "softplus.h"        // softplus_one
#include <assert.h>
#include <math.h>
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_load_columns, v_fill
#endif

// ---- corrupted data ----

// Each token is replaced with probability `fraction`, by one of the V - 1 others, all of them alike. A row in which none was
// drawn loses the token at a place drawn for it, so that no row stays real
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

// of one position, from the sum of its squares: the loss, and what o is multiplied by
static inline float ff_loss_(float* loss, float sum, float threshold, int is_real, float dloss, int M) {
    const float goodness = sum / (float)M, wrong = is_real ? threshold - goodness : goodness - threshold;
    const float slope = is_real ? -sigmoid_one(wrong) : sigmoid_one(wrong);
    *loss = softplus_one(wrong);
    return slope * 2.0f / (float)M * dloss;
}

static inline void ff_goodness_ref(float* losses, float* dout, const float* o, float threshold, int is_real, float dloss, int N, int M) {
    for (int n = 0; n < N; n++) {
        const float* x = o + (size_t)n * M;
        float sum = 0.0f;
        for (int m = 0; m < M; m++) { sum += x[m] * x[m]; }
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
        for (int i = 0; i < VLANES; i++) { sum += columns[i] * columns[i]; }
    }
    for (; m < M; m++) {
        for (int r = 0; r < VLANES; r++) { sum[r] += o[(size_t)r * M + m] * o[(size_t)r * M + m]; }
    }
    return sum;
}

// dout may be o
static inline void ff_goodness(float* losses, float* dout, const float* o, float threshold, int is_real, float dloss, int N, int M,
                               const Device* dev) {
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

// ---- rust_trainer's hinge on a layer's input ----

#define RT_FF_EPS 1e-5f

// h (2, M): h+ and h- of the channels first..last-1
static inline void rt_ff_means_ref(float* h, const float* r_in, int B, int T, int M, int first, int last) {
    for (int d = first; d < last; d++) {
        float real = 0.0f, corrupted = 0.0f;
        for (int b = 0; b < B; b++) {
            for (int t = 0; t < T; t++) {
                float here = r_in[((size_t)b * T + t) * M + d], next = r_in[((size_t)b * T + (t + 1) % T) * M + d];
                real += here;
                corrupted += (t + d) % 2 == 0 ? next : -next;
            }
        }
        h[d] = real / (float)(B * T);
        h[M + d] = corrupted / (float)(B * T);
    }
}

// h / s(h), in place
static inline void rt_ff_normalise_(float* h, int M) {
    float mean = 0.0f, square = 0.0f;
    for (int d = 0; d < M; d++) { mean += h[d]; }
    mean /= (float)M;
    for (int d = 0; d < M; d++) { square += (h[d] - mean) * (h[d] - mean); }
    float s = sqrtf(square / (float)M) + RT_FF_EPS;
    for (int d = 0; d < M; d++) { h[d] /= s; }
}

static inline float rt_ff_dot_(const float* a, const float* b, int M) {
    float dot = 0.0f;
    for (int d = 0; d < M; d++) { dot += a[d] * b[d]; }
    return dot;
}

// of a normalised h
static inline float rt_ff_goodness_(const float* h, const float* d_skip, int M) {
    float l = sqrtf(rt_ff_dot_(d_skip, d_skip, M)) + RT_FF_EPS, goodness = 0.0f;
    for (int d = 0; d < M; d++) { goodness += h[d] * (d_skip[d] / l); }
    return goodness;
}

// loss and gradient from the means h (2, M), which are normalised in place
static inline void rt_ff_from_means_(float* dd_skip, float* loss, float* h, const float* d_skip, int complete_gradient, int M) {
    float *real = h, *corrupted = h + M;
    rt_ff_normalise_(real, M);
    rt_ff_normalise_(corrupted, M);
    float hinge = 1.0f - (rt_ff_goodness_(real, d_skip, M) - rt_ff_goodness_(corrupted, d_skip, M));
    *loss = hinge <= 0.0f ? 0.0f : hinge;  // NaN stays NaN
    if (hinge <= 0.0f) {
        memset(dd_skip, 0, sizeof(float) * M);
        return;
    }
    const float length = sqrtf(rt_ff_dot_(d_skip, d_skip, M)), l = length + RT_FF_EPS;
    float* q = real;
    for (int d = 0; d < M; d++) { q[d] = real[d] - corrupted[d]; }
    const int has_second = complete_gradient && length > 0.0f;
    const float second = has_second ? rt_ff_dot_(q, d_skip, M) / length / l / l : 0.0f;
    for (int d = 0; d < M; d++) { dd_skip[d] = has_second ? second * d_skip[d] - q[d] / l : -(q[d] / l); }
}

static inline void rt_ff_ref(float* dd_skip, float* loss, const float* r_in, const float* d_skip, int complete_gradient, int B, int T,
                             int M, const Device* dev) {
    float* h = device_workspace(dev, 2 * sizeof(float) * (size_t)M);
    rt_ff_means_ref(h, r_in, B, T, M, 0, M);
    rt_ff_from_means_(dd_skip, loss, h, d_skip, complete_gradient, M);
}

#ifndef __CUDACC__
enum { RT_FF_WIDTH = 256 };  // even; 1 KiB of each row: less, and the CPU does not see the next row coming

// the means of at most RT_FF_WIDTH channels: positions pass by, lanes are channels
static inline void rt_ff_means_(float* h, const float* r_in, int B, int T, int M, int first, int last) {
    float real[RT_FF_WIDTH] = {0}, corrupted[RT_FF_WIDTH] = {0}, sign[RT_FF_WIDTH + 1];
    const int n_channels = last - first;
    for (int i = 0; i <= RT_FF_WIDTH; i++) { sign[i] = (first + i) % 2 == 0 ? 1.0f : -1.0f; }
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) {
            const float* here = r_in + ((size_t)b * T + t) * M + first;
            const float* next = r_in + ((size_t)b * T + (t + 1) % T) * M + first;
            const float* turn = sign + t % 2;
            #pragma omp simd
            for (int i = 0; i < n_channels; i++) {
                real[i] += here[i];
                corrupted[i] += turn[i] * next[i];
            }
        }
    }
    for (int i = 0; i < n_channels; i++) {
        h[first + i] = real[i] / (float)(B * T);
        h[M + first + i] = corrupted[i] / (float)(B * T);
    }
}

static inline void rt_ff(float* dd_skip, float* loss, const float* r_in, const float* d_skip, int complete_gradient, int B, int T,
                         int M, const Device* dev) {
    float* h = device_workspace(dev, 2 * sizeof(float) * (size_t)M);
    #pragma omp parallel for
    for (int first = 0; first < M; first += RT_FF_WIDTH) {
        rt_ff_means_(h, r_in, B, T, M, first, first + RT_FF_WIDTH < M ? first + RT_FF_WIDTH : M);
    }
    rt_ff_from_means_(dd_skip, loss, h, d_skip, complete_gradient, M);
}
#endif
#endif  // LLMC_FORWARD_FORWARD_H
