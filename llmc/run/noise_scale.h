/*
Gradient noise scale: about how many targets an update should have. The gradients of the micro-batches of one update
(leaves) differ; from how much they do follows how noisy their sum is. Far below the noise scale, twice the targets in
an update need half as many updates; far above it they need hardly fewer.
    n    targets in an update; c_k of them, and the gradient g_k, belong to leaf k; their sum is g
    The mean gradient of c targets drawn at random is G on average, its squared distance from G tr(S) / c, with S the
    covariance of one target's gradient. g_k is c_k / n of such a mean, so
        a = sum of |g_k|^2   on average   q |G|^2 + tr(S) / n       q = sum of (c_k / n)^2, 1 / leaves for equal ones
        b = |g|^2            on average     |G|^2 + tr(S) / n
    and from both               |G|^2 = (b - a) / (1 - q)             tr(S) = n (a - q b) / (1 - q)
    Each is smoothed over the steps at which it is measured, x = 0.99 x + 0.01 new from x = 0, and the noise scale is
    the quotient of the two, tr(S) / |G|^2, in which the start at 0 cancels. There is none while the smoothed |G|^2 is
    not above 0: one estimate of it can be negative where noise outweighs the gradient.
Targets of one row are not drawn independently of each other: take the scale for its size, and for how it grows while
the loss falls. Needs two leaves; with few the estimate of |G|^2 is rough.
Exact:  sums in double in the order of leaves, the smoothed ones rounded to float; the same bits for any ranks, threads
        and --zero, and after --resume.
Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1: B_simple, there for two sizes of batch.
*/
#ifndef LLMC_NOISE_SCALE_H
#define LLMC_NOISE_SCALE_H
#include "../core/fail.h"  // fail_input
#include <jansson.h>
#include <math.h>
#include <stdint.h>

typedef struct {
    float gradient, noise;  // |G|^2 and tr(S), smoothed; 0 before the first measurement
} NoiseScale;

static inline float noise_scale_smooth_(float before, double x) { return (float)(0.99 * (double)before + 0.01 * x); }

// squares (n_leaves) of the norms of leaves, counted (n_leaves) targets in each; square of the norm of their sum. What
// is not finite, or of one leaf alone, adds nothing
static inline void noise_scale_add(NoiseScale* s, const double* squares, const int64_t* counted, int n_leaves,
                                   double square) {
    double a = 0.0, n = 0.0, q = 0.0;
    for (int k = 0; k < n_leaves; k++) {
        a += squares[k];
        n += (double)counted[k];
        q += (double)counted[k] * (double)counted[k];
    }
    q /= n * n;
    const double gradient = (square - a) / (1.0 - q), noise = n * (a - q * square) / (1.0 - q);
    if (!(q < 1.0) || !isfinite(gradient) || !isfinite(noise)) { return; }
    s->gradient = noise_scale_smooth_(s->gradient, gradient);
    s->noise = noise_scale_smooth_(s->noise, noise);
}

// in targets; NAN: not known
static inline double noise_scale_of(const NoiseScale* s) {
    return s->gradient > 0.0f && s->noise >= 0.0f ? (double)s->noise / (double)s->gradient : NAN;
}

// of the state in a checkpoint: [|G|^2, tr(S)]; one from before this was measured has none
static inline NoiseScale noise_scale_from_json(const json_t* pair, const char* path) {
    double x[2] = {0.0, 0.0};
    for (size_t i = 0; i < 2 && pair; i++) {
        const json_t* value = json_array_get(pair, i);
        x[i] = json_is_number(value) ? json_number_value(value) : NAN;
        if (!isfinite((float)x[i])) { fail_input("%s: \"noise\": expected two numbers", path); }
    }
    const NoiseScale s = {(float)x[0], (float)x[1]};
    return s;
}
#endif  // LLMC_NOISE_SCALE_H
