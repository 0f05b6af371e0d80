/*
The hyperspherical prototype head: every token has a direction, its prototype, and a position should point along its
target's.
    z (N, C)  positions    z_unit (N, C)  the same with length 1    prototypes (V, C)  unit rows
    targets (N) in 0..V-1, negative = not counted    cosines (N) of z_unit and the target's prototype    losses (N)
    unit_forward   norm = max(|x|, 1e-8), unit = x / norm, row by row; unit may be x
    hpn_forward    cosine = z_unit . prototypes[target],  loss = (1 - cosine)^2;  both 0 where the target is not counted
    hpn-softmax    needs no op of its own: unit_forward, matmul_forward, hpn_scale_array, crossentropy.h
Backward (derived in doc/hpn.md):
    dx          = (dunit - unit * (dunit . unit)) / norm         (N, C)  written; dx may be dunit
    dz_unit     = -2 (1 - cosine) dloss * prototypes[target]     (N, C)  written; 0 where the target is not counted
    dprototypes += -2 (1 - cosine) dloss * z_unit, at [target]   (V, C)  added, positions ascending; NULL: fixed ones
    dloss is 1 / (targets counted in the whole update). A row of zeros has unit 0 and dx = 1e8 * dunit: clip gradients.
    Below a length of 1e-8 dx is the formula's, not the derivative's (which has no second term there).
hpn_readout: logits for sampling and perplexity from the cosines with all V prototypes, log(c / (1 - c)), c kept within
2^-24 .. 1 - 2^-24, so that they lie within -16.7 .. 16.7 and no token is impossible. With orthonormal prototypes,
trained to the minimum, softmax of them is the true probability of each token; where V > C, or for a simplex, an
approximation.
Cost:   memory bound and independent of V: hpn_forward reads 2*N*C floats, hpn_backward reads and writes 2*N*C (5*N*C
        with dprototypes). Evaluation needs all cosines: matmul_forward of N*V*C multiply-adds.
Error:  chains of C products of unit rows: |cosine| error <= C * 2^-24.
Order:  row sums chain over c from 0, dprototypes over n from what it holds. Lanes hold neighbouring rows, threads rows,
        or channels for dprototypes. Measures are sums in double in a stated order.
Source: Mettes, van der Pol & Snoek 2019, arXiv:1901.10514. Where prototypes stand: prototypes.h
*/
#ifndef LLMC_HPN_H
#define LLMC_HPN_H
#include "../core/device.h"  // Device
#include "../core/fmath.h"   // fm_log
#include <assert.h>
#include <math.h>
#include <stdint.h>
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_load, v_fill, v_transpose
#endif

#define HPN_NORM_MIN 1e-8f
#define HPN_COSINE_MIN 0x1p-24f             // hpn_readout keeps cosines between these two: one step of a float from 1
#define HPN_COSINE_MAX (1.0f - 0x1p-24f)

// ---- plain C: read this first; it defines every bit ----

// a . b
static inline float hpn_dot_ref(const float* a, const float* b, int C) {
    float sum = 0.0f;
    for (int c = 0; c < C; c++) { sum = madd(a[c], b[c], sum); }
    return sum;
}

static inline float hpn_norm_(float norm_sum_of_squares) {
    float norm = sqrtf(norm_sum_of_squares);
    return norm > HPN_NORM_MIN ? norm : HPN_NORM_MIN;
}

static inline void unit_forward_ref(float* unit, float* norm, const float* x, int N, int C) {
    for (size_t n = 0; n < (size_t)N; n++) {
        const float* row = x + n * C;
        norm[n] = hpn_norm_(hpn_dot_ref(row, row, C));
        for (int c = 0; c < C; c++) { unit[n * C + c] = row[c] / norm[n]; }
    }
}

static inline void unit_backward_ref(float* dx, const float* dunit, const float* unit, const float* norm,
                                     int N, int C) {
    for (size_t n = 0; n < (size_t)N; n++) {
        const float *d = dunit + n * C, *u = unit + n * C;
        float dot = hpn_dot_ref(d, u, C);
        for (int c = 0; c < C; c++) { dx[n * C + c] = (d[c] - u[c] * dot) / norm[n]; }
    }
}

static inline void hpn_forward_ref(float* losses, float* cosines, const float* z_unit, const float* prototypes,
                                   const int* targets, int N, int C) {
    for (size_t n = 0; n < (size_t)N; n++) {
        int counted = targets[n] >= 0;
        float cosine = counted ? hpn_dot_ref(z_unit + n * C, prototypes + (size_t)targets[n] * C, C) : 0.0f;
        cosines[n] = cosine;
        losses[n] = counted ? (1.0f - cosine) * (1.0f - cosine) : 0.0f;
    }
}

// d loss / d cosine
static inline float hpn_slope_(float cosine, float dloss) { return -2.0f * (1.0f - cosine) * dloss; }

static inline void hpn_backward_ref(float* dz_unit, float* dprototypes, const float* z_unit, const float* prototypes,
                                    const float* cosines, const int* targets, float dloss, int N, int C, int V) {
    for (size_t n = 0; n < (size_t)N; n++) {
        size_t row = n * C, p = (size_t)targets[n] * C;
        assert(targets[n] < V);
        float slope = hpn_slope_(cosines[n], dloss);
        for (int c = 0; c < C; c++) { dz_unit[row + c] = targets[n] < 0 ? 0.0f : slope * prototypes[p + c]; }
        for (int c = 0; dprototypes && targets[n] >= 0 && c < C; c++) {
            dprototypes[p + c] = madd(slope, z_unit[row + c], dprototypes[p + c]);
        }
    }
}

static inline void hpn_scale_array_ref(float* x, float scale, size_t n) {
    for (size_t i = 0; i < n; i++) { x[i] *= scale; }
}

static inline float hpn_readout_one_(float cosine) {
    float c = cosine < HPN_COSINE_MIN ? HPN_COSINE_MIN : cosine;
    c = c > HPN_COSINE_MAX ? HPN_COSINE_MAX : c;  // a NaN stays one
    return fm_log(c / (1.0f - c));
}

static inline void hpn_readout_ref(float* logits, const float* cosines, int N, int V) {
    for (size_t i = 0; i < (size_t)N * V; i++) { logits[i] = hpn_readout_one_(cosines[i]); }
}

// How many scores stand before the target's: larger ones, and equal ones of a lower index. 0: the target would be
// chosen. NaN counts as larger, a NaN target as last, so that a broken model has no hits.
static inline int hpn_target_rank_ref(const float* scores, int target, int V) {
    int rank = 0;
    float own = scores[target];
    for (int v = 0; v < V; v++) { rank += v < target ? !(scores[v] < own) : v > target && !(scores[v] <= own); }
    return rank;
}

#ifndef __CUDACC__  // ---- fast C: VLANES rows side by side, for the chain of one cannot be split ----

// dots[r] = a[r] . b[r], each a chain over c from 0
static inline void hpn_dots_(float dots[VLANES], const float* const a[VLANES], const float* const b[VLANES], int C) {
    vfloat sum = v_fill(0.0f), columns_a[VLANES], columns_b[VLANES];
    int c = 0;
    for (; c + VLANES <= C; c += VLANES) {  // a square, turned: lane r of column i is a[r][c + i]
        for (int r = 0; r < VLANES; r++) { columns_a[r] = v_load(a[r] + c), columns_b[r] = v_load(b[r] + c); }
        v_transpose(columns_a);
        v_transpose(columns_b);
        for (int i = 0; i < VLANES; i++) { sum = v_madd(columns_a[i], columns_b[i], sum); }
    }
    for (; c < C; c++) {
        vfloat column_a, column_b;
        for (int r = 0; r < VLANES; r++) { column_a[r] = a[r][c], column_b[r] = b[r][c]; }
        sum = v_madd(column_a, column_b, sum);
    }
    v_store(dots, sum);
}

// pointers to VLANES rows of x from `first` on; beyond the last of N to that one again, whose result nobody takes
static inline void hpn_rows_(const float* rows[VLANES], const float* x, int first, int N, int C) {
    for (int r = 0; r < VLANES; r++) { rows[r] = x + (size_t)(first + r < N ? first + r : N - 1) * C; }
}

static inline void unit_forward(float* unit, float* norm, const float* x, int N, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const float* rows[VLANES];
        float squares[VLANES];
        hpn_rows_(rows, x, first, N, C);
        hpn_dots_(squares, rows, rows, C);
        for (int n = first; n < N && n < first + VLANES; n++) {
            const float* row = rows[n - first];
            float *u = unit + (size_t)n * C, d = hpn_norm_(squares[n - first]);
            norm[n] = d;
            #pragma omp simd
            for (int c = 0; c < C; c++) { u[c] = row[c] / d; }
        }
    }
}

static inline void unit_backward(float* dx, const float* dunit, const float* unit, const float* norm, int N, int C,
                                 const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const float *d_rows[VLANES], *u_rows[VLANES];
        float dots[VLANES];
        hpn_rows_(d_rows, dunit, first, N, C);
        hpn_rows_(u_rows, unit, first, N, C);
        hpn_dots_(dots, d_rows, u_rows, C);
        for (int n = first; n < N && n < first + VLANES; n++) {
            const float *d = d_rows[n - first], *u = u_rows[n - first];
            float *out = dx + (size_t)n * C, dot = dots[n - first], length = norm[n];
            #pragma omp simd
            for (int c = 0; c < C; c++) { out[c] = (d[c] - u[c] * dot) / length; }
        }
    }
}

static inline void hpn_forward(float* losses, float* cosines, const float* z_unit, const float* prototypes,
                               const int* targets, int N, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const float *z[VLANES], *p[VLANES];
        float dots[VLANES];
        hpn_rows_(z, z_unit, first, N, C);
        for (int r = 0; r < VLANES; r++) {
            int counted = first + r < N && targets[first + r] >= 0;
            p[r] = counted ? prototypes + (size_t)targets[first + r] * C : z[r];  // any row: nobody takes the result
        }
        hpn_dots_(dots, z, p, C);
        for (int n = first; n < N && n < first + VLANES; n++) {
            float cosine = targets[n] < 0 ? 0.0f : dots[n - first];
            cosines[n] = cosine;
            losses[n] = targets[n] < 0 ? 0.0f : (1.0f - cosine) * (1.0f - cosine);
        }
    }
}

// channels first..last-1 of the prototypes' gradient, positions ascending
static inline void hpn_backward_channels_(float* dprototypes, const float* z_unit, const float* cosines,
                                          const int* targets, float dloss, int N, int C, int first, int last) {
    for (int n = 0; n < N; n++) {
        if (targets[n] < 0) { continue; }
        const float* z = z_unit + (size_t)n * C;
        float *d = dprototypes + (size_t)targets[n] * C, slope = hpn_slope_(cosines[n], dloss);
        #pragma omp simd
        for (int c = first; c < last; c++) { d[c] = madd(slope, z[c], d[c]); }
    }
}

static inline void hpn_backward(float* dz_unit, float* dprototypes, const float* z_unit, const float* prototypes,
                                const float* cosines, const int* targets, float dloss, int N, int C, int V,
                                const Device* dev) {
    const int width = 64;  // channels of a thread at a time
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        assert(targets[n] < V);
        hpn_backward_ref(dz_unit + (size_t)n * C, NULL, NULL, prototypes, cosines + n, targets + n, dloss, 1, C, V);
    }
    #pragma omp parallel for
    for (int first = 0; first < (dprototypes ? C : 0); first += width) {
        int last = first + width < C ? first + width : C;
        hpn_backward_channels_(dprototypes, z_unit, cosines, targets, dloss, N, C, first, last);
    }
}

// x *= scale: cosines become logits of hpn-softmax, and their gradients those of the cosines
static inline void hpn_scale_array(float* x, float scale, size_t n, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) { x[i] *= scale; }
}

// logits, cosines (N, V); in place where they are the same array
static inline void hpn_readout(float* logits, const float* cosines, int N, int V, const Device* dev) {
    (void)dev;
    #pragma omp parallel for simd
    for (size_t i = 0; i < (size_t)N * V; i++) { logits[i] = hpn_readout_one_(cosines[i]); }
}

// ---- measures for evaluation ----

// ranks (N) of the targets among the V scores, cosines or logits, of each row; -1 where the target is not counted
static inline void hpn_target_ranks(int* ranks, const float* scores, const int* targets, int N, int V,
                                    const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        ranks[n] = targets[n] < 0 ? -1 : hpn_target_rank_ref(scores + (size_t)n * V, targets[n], V);
    }
}
#endif

// targets among the k highest scores: k 1 for accuracy, 5 for top-5
static inline int64_t hpn_count_hits(const int* ranks, int N, int k) {
    int64_t hits = 0;
    for (int n = 0; n < N; n++) { hits += ranks[n] >= 0 && ranks[n] < k; }
    return hits;
}

enum { HPN_PAIRS_SAMPLE = 256 };  // rows of hpn_mean_pairwise_cosine

// The alarm of a collapse: the mean cosine of all pairs among at most 256 of N unit rows, evenly spread; near 1 where
// they all point the same way. 0 where there is no pair. The sum over pairs is (|sum of rows|^2 - sum of |row|^2) / 2,
// in double, rows and channels ascending, so it costs 256*C and not 256^2*C / 2.
static inline double hpn_mean_pairwise_cosine(const float* unit, int N, int C) {
    int S = N < HPN_PAIRS_SAMPLE ? N : HPN_PAIRS_SAMPLE;
    double total2 = 0.0, squares = 0.0;
    if (S < 2) { return 0.0; }
    for (int c = 0; c < C; c++) {
        double sum = 0.0;
        for (int s = 0; s < S; s++) {
            double x = (double)unit[(size_t)((int64_t)s * N / S) * C + c];
            sum += x;
            squares += x * x;
        }
        total2 += sum * sum;
    }
    return (total2 - squares) / ((double)S * (S - 1));
}
#endif  // LLMC_HPN_H
