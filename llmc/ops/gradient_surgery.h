/*
Gradient surgery: how the gradients of several tasks over one vector of shared parameters become one.
    g[i] (arena)  gradient of task i; all arenas have one layout. g[0] is the head's ("b"), g[1] Forward-Forward's ("f")
    ranges        which floats of the arenas are the shared vector; what lies between them is neither read nor written
    surgery_apply leaves the result in the ranges of g[0]. It is always a weighted sum of the g[i]: every method finds
    its weights from the dot products alone, so the vectors are read once for those and once for the sum.
Methods, by name, upper or lower case (derived in doc/gradient_surgery.md), 1..8 tasks, those with "2" exactly two:
    none        sum of g[i]
    pcgrad      for every i: g = g[i]; for the other j in random order:
                    if g.g[j] < 0: g -= g.g[j] / (|g[j]|^2 + epsilon) g[j]
                result: the sum of the n vectors. The order is a pure function of (seed, step)
    cagrad   2  the d with |d - g0| <= c |g0| whose smaller one of d.f, d.b is greatest; g0 = (f + b) / 2, 0 <= c < 1.
                It is (1/2 + k x) f + (1/2 + k (1 - x)) b with k = c |g0| / |g_x|, g_x = x f + (1 - x) b; x in 0..1
                makes g_x.g0 + c |g0| |g_x| smallest. "cagradstep" is the same method
    gradnorm    sum of w[i] g[i]; w is learnt (GradNorm below)
    orthograd 2 b + f - f.b / (|b|^2 + epsilon) b, conflict or not
With one task every method is none. A quotient whose divisor is 0 counts as 0. A gradient that is not finite leaves
such numbers in the result, for the guards of a trainer to see, and the state of gradnorm as it was.
Cost:   memory bound: (2 n_tasks + 1) floats moved per shared parameter. Judge it in GB/s. For gradnorm norm_range comes
        on top.
Error:  weights in double; every element of the result is a sum in double, rounded once to float.
Order:  dot products: a range is cut into chunks of 4096; in a chunk, double sum j of 16 takes elements j, j+16, ...
        ascending; then the 16 are added in order; chunk sums are added in order from 0, and so are the sums of ranges.
        Result: chain over tasks from weight[0] * g[0]. The same bits for any thread count.
CPU only; the arenas are in ordinary memory. On several ranks: give it gradients that are already summed over ranks.
Errors: a method, epsilon, lambda or alpha out of range is the user's fault, status 2; no memory, status 1.
Source: PCGrad: Yu et al. 2020, arXiv:2001.06782; CAGrad: Liu et al. 2021, arXiv:2110.14048; GradNorm: Chen et al. 2018,
        arXiv:1711.02257
*/
#ifndef LLMC_GRADIENT_SURGERY_H
#define LLMC_GRADIENT_SURGERY_H
#include "../core/choice.h"  // choice_name
#include "../core/fmath.h"   // fm_exp, fm_log
#include "../core/rng.h"     // splitmix64
#include "adamw.h"           // adamw_step, adamw_update_ref
#include <assert.h>
#include <math.h>

enum { SURGERY_MAX_TASKS = 8, SURGERY_CHUNK = 4096, SURGERY_LANES = 16 };

// ---- names ----

#define SURGERY_NAMES "none|pcgrad|cagrad,cagradstep|gradnorm|orthograd"  // a list of choice.h
typedef enum {
    SURGERY_NONE, SURGERY_PCGRAD, SURGERY_CAGRAD, SURGERY_GRADNORM, SURGERY_ORTHOGRAD, N_SURGERY_METHODS
} SurgeryMethod;

static inline ShortText surgery_name(SurgeryMethod method) { return choice_name(SURGERY_NAMES, (int)method); }

// ---- weights of two or more tasks, from their dot products: dots (n, n), weight (n) ----

static inline double surgery_ratio_(double dot, double square, double epsilon) {
    return square + epsilon > 0.0 ? dot / (square + epsilon) : 0.0;
}

// a vector of 0 length shows the rounding of its dot products: never below 0
static inline double surgery_length_(double square) { return square < 0.0 ? 0.0 : sqrt(square); }

// the tasks other than i, shuffled (Fisher and Yates): order (n - 1)
static inline void surgery_pcgrad_order_(int* order, int n, int i, uint64_t seed, uint64_t step) {
    const uint64_t key = splitmix64(splitmix64(splitmix64(seed, 0), step), (uint64_t)i);
    for (int j = 0; j < n - 1; j++) { order[j] = j < i ? j : j + 1; }
    for (int j = n - 2; j > 0; j--) {
        int k = (int)(splitmix64(key, (uint64_t)j) % (uint64_t)(j + 1)), other = order[j];
        order[j] = order[k];
        order[k] = other;
    }
}

// One vector of PCGrad, as weights of the tasks' gradients: it begins as g[i] and is projected off each other one that
// it opposes. The test is of the vector as it has become, what is taken away a multiple of the other's own gradient.
static inline void surgery_pcgrad_project_(double* vector, const double* dots, int n, int i, const int* order,
                                           double epsilon) {
    for (int k = 0; k < n; k++) { vector[k] = k == i ? 1.0 : 0.0; }
    for (int next = 0; next < n - 1; next++) {
        int j = order[next];
        double dot = 0.0;
        for (int k = 0; k < n; k++) { dot += vector[k] * dots[k * n + j]; }
        if (dot < 0.0) { vector[j] -= surgery_ratio_(dot, dots[j * n + j], epsilon); }
    }
}

static inline void surgery_pcgrad_weights(double* weight, const double* dots, int n, double epsilon, uint64_t seed,
                                          uint64_t step) {
    int order[SURGERY_MAX_TASKS];
    double vector[SURGERY_MAX_TASKS];
    for (int k = 0; k < n; k++) { weight[k] = 0.0; }
    for (int i = 0; i < n; i++) {
        surgery_pcgrad_order_(order, n, i, seed, step);
        surgery_pcgrad_project_(vector, dots, n, i, order, epsilon);
        for (int k = 0; k < n; k++) { weight[k] += vector[k]; }
    }
}

// |g_x|, g_x = x f + (1 - x) b
static inline double surgery_cagrad_length_(const double* dots, double x) {
    double bb = dots[0], fb = dots[1], ff = dots[3];
    return surgery_length_(x * x * ff + 2.0 * x * (1.0 - x) * fb + (1.0 - x) * (1.0 - x) * bb);
}

// derivative of g_x.g0 + radius |g_x| by x; radius = c |g0|
static inline double surgery_cagrad_slope_(const double* dots, double radius, double x) {
    double bb = dots[0], fb = dots[1], ff = dots[3], length = surgery_cagrad_length_(dots, x);
    double turn = length > 0.0 ? (x * ff + (1.0 - 2.0 * x) * fb - (1.0 - x) * bb) / length : 0.0;
    return 0.5 * (ff - bb) + radius * turn;
}

// returns x, the part of f in g_x. The function is convex: where its slope changes sign is found by halving an interval
static inline double surgery_cagrad_weights(double* weight, const double* dots, double c) {
    const double radius = c * surgery_cagrad_length_(dots, 0.5);
    double low = 0.0, high = 1.0, x;
    if (surgery_cagrad_slope_(dots, radius, 0.0) >= 0.0) { high = 0.0; }
    else if (surgery_cagrad_slope_(dots, radius, 1.0) <= 0.0) { low = 1.0; }
    for (int i = 0; i < 60 && low < high; i++) {
        double middle = 0.5 * (low + high);
        if (surgery_cagrad_slope_(dots, radius, middle) < 0.0) { low = middle; } else { high = middle; }
    }
    x = 0.5 * (low + high);
    double length = surgery_cagrad_length_(dots, x), k = length > 0.0 ? radius / length : 0.0;
    weight[0] = 0.5 + k * (1.0 - x);
    weight[1] = 0.5 + k * x;
    return x;
}

// ---- GradNorm: weights of the losses that are learnt, so that all tasks train at one pace ----

// All that a run keeps of it from step to step: plain floats, for a checkpoint
typedef struct {
    float weight[SURGERY_MAX_TASKS];      // w, sum n_tasks
    float first_loss[SURGERY_MAX_TASKS];  // L0: the first loss above 0; 0: there was none yet
    float m[SURGERY_MAX_TASKS], v[SURGERY_MAX_TASKS];  // Adam's moments of w
    float n_updates;
} GradNorm;

#define GRADNORM_LR 0.025f
#define GRADNORM_LEAST_WEIGHT 1e-3f

static inline void gradnorm_init(GradNorm* s) {
    memset(s, 0, sizeof *s);
    for (int i = 0; i < SURGERY_MAX_TASKS; i++) { s->weight[i] = 1.0f; }
}

// Targets T[i] = mean(G) * r[i]^alpha of the norms G[i] = w[i] * norms[i], where norms[i] is the norm of task i's
// unweighted gradient, and r[i] = (L[i] / L0[i]) / mean(L / L0): a task that is behind gets a larger one.
static inline void gradnorm_targets(double* targets, const GradNorm* s, const double* norms, const float* losses,
                                    float alpha, int n) {
    double mean_norm = 0.0, mean_ratio = 0.0;
    for (int i = 0; i < n; i++) {
        mean_norm += (double)s->weight[i] * norms[i] / n;
        mean_ratio += (double)losses[i] / (double)s->first_loss[i] / n;
    }
    for (int i = 0; i < n; i++) {
        double ratio = (double)losses[i] / (double)s->first_loss[i] / mean_ratio;
        targets[i] = mean_norm * (alpha > 0.0f ? (double)fm_exp(alpha * fm_log((float)ratio)) : 1.0);
    }
}

// d/dw of the sum of |G[i] - T[i]|, targets held constant: sign(G[i] - T[i]) * norms[i]
static inline void gradnorm_slopes(float* slopes, const GradNorm* s, const double* norms, const float* losses,
                                   float alpha, int n) {
    double targets[SURGERY_MAX_TASKS];
    gradnorm_targets(targets, s, norms, losses, alpha, n);
    for (int i = 0; i < n; i++) {
        double above = (double)s->weight[i] * norms[i] - targets[i];
        slopes[i] = (float)(((above > 0.0) - (above < 0.0)) * norms[i]);
    }
}

static inline void gradnorm_rescale(GradNorm* s, int n) {
    float sum = 0.0f;
    for (int i = 0; i < n; i++) {
        s->weight[i] = s->weight[i] < GRADNORM_LEAST_WEIGHT ? GRADNORM_LEAST_WEIGHT : s->weight[i];
        sum += s->weight[i];
    }
    for (int i = 0; i < n; i++) { s->weight[i] *= (float)n / sum; }
}

// One step of Adam on w, after the parameters' update has taken w as it was. w rests until every task has had a loss
// above 0, and where there is nothing to learn from: no loss left, or a number that is not finite
static inline void gradnorm_update(GradNorm* s, const double* norms, const float* losses, float alpha, int n) {
    float slopes[SURGERY_MAX_TASKS], total = 0.0f;
    int n_begun = 0;
    for (int i = 0; i < n; i++) {
        if (!(losses[i] >= 0.0f) || !isfinite(losses[i]) || !isfinite(norms[i])) { return; }
    }
    for (int i = 0; i < n; i++) {
        s->first_loss[i] = s->first_loss[i] > 0.0f ? s->first_loss[i] : losses[i];
        n_begun += s->first_loss[i] > 0.0f;
        total += losses[i];
    }
    if (n_begun < n || total == 0.0f) { return; }
    gradnorm_slopes(slopes, s, norms, losses, alpha, n);
    s->n_updates += s->n_updates < 1e6f ? 1.0f : 0.0f;  // from there on 1 - beta^t is 1
    AdamW step = adamw_step(GRADNORM_LR, 0.9f, 0.999f, 1e-8f, 1.0f, (int)s->n_updates);
    adamw_update_ref(s->weight, s->m, s->v, slopes, (size_t)n, 0.0f, &step);
    gradnorm_rescale(s, n);
}

// ---- the shared vector: dot products and the weighted sum, each in one pass ----

typedef struct {
    size_t first, n;  // floats of the arena
} SurgeryRange;

// sum of a[i] * b[i] over the chunk that starts at a and b, n elements before their end
static inline double surgery_dot_chunk(const float* a, const float* b, size_t n) {
    double lane[SURGERY_LANES] = {0}, sum = 0.0;
    size_t i = 0;
    if (n > SURGERY_CHUNK) { n = SURGERY_CHUNK; }
    for (; i + SURGERY_LANES <= n; i += SURGERY_LANES) {
        #pragma omp simd
        for (int j = 0; j < SURGERY_LANES; j++) { lane[j] += (double)a[i + j] * (double)b[i + j]; }
    }
    for (int j = 0; i + j < n; j++) { lane[j] += (double)a[i + j] * (double)b[i + j]; }
    for (int j = 0; j < SURGERY_LANES; j++) { sum += lane[j]; }
    return sum;
}

static inline double surgery_dot_ref(const float* a, const float* b, const SurgeryRange* ranges, int n_ranges) {
    double sum = 0.0;
    for (int r = 0; r < n_ranges; r++) {
        double range_sum = 0.0;
        for (size_t i = 0; i < ranges[r].n; i += SURGERY_CHUNK) {
            range_sum += surgery_dot_chunk(a + ranges[r].first + i, b + ranges[r].first + i, ranges[r].n - i);
        }
        sum += range_sum;
    }
    return sum;
}

static inline void surgery_sum_ref(float* const* g, const double* weight, int n_tasks, size_t first, size_t n) {
    for (size_t i = first; i < first + n; i++) {
        double sum = weight[0] * (double)g[0][i];
        for (int k = 1; k < n_tasks; k++) { sum += weight[k] * (double)g[k][i]; }
        g[0][i] = (float)sum;
    }
}

// the same; sums of a block stay in the cache while task after task is added
static inline void surgery_sum_(float* const* g, const double* weight, int n_tasks, size_t first, size_t n) {
    enum { BLOCK = 256 };
    double sum[BLOCK];
    for (size_t end = first + n; first < end; first += BLOCK) {
        const int n_block = end - first < BLOCK ? (int)(end - first) : BLOCK;
        float* out = g[0] + first;
        #pragma omp simd
        for (int i = 0; i < n_block; i++) { sum[i] = weight[0] * (double)out[i]; }
        for (int k = 1; k < n_tasks; k++) {
            const float* x = g[k] + first;
            const double w = weight[k];
            #pragma omp simd
            for (int i = 0; i < n_block; i++) { sum[i] += w * (double)x[i]; }
        }
        #pragma omp simd
        for (int i = 0; i < n_block; i++) { out[i] = (float)sum[i]; }
    }
}

// ---- what a trainer calls ----

typedef struct {
    SurgeryMethod method;
    float epsilon;            // >= 0, added to a divisor
    float cagrad_lambda;      // cagrad: c, 0 <= c < 1
    float gradnorm_alpha;     // >= 0: how strongly a task that is behind is favoured
    SurgeryRange norm_range;  // gradnorm: it takes norms of this range, such as the last out_proj; n 0: of all
    uint64_t seed;            // pcgrad: of its random order
} SurgeryConfig;

// a chunk of a range
typedef struct {
    size_t first;
    int n, range;
} SurgeryPiece_;

typedef struct {
    SurgeryConfig config;
    GradNorm gradnorm;       // a checkpoint stores it, whatever the method
    SurgeryRange* ranges;    // (n_ranges) and, last, norm_range
    SurgeryPiece_* pieces;   // (n_pieces), then those of norm_range
    double* piece_dots;      // (n_pieces + those of norm_range, n_tasks, n_tasks)
    double* range_dots;      // (n_ranges + 1, n_tasks, n_tasks)
    int n_tasks, n_ranges;
    int64_t n_pieces, n_all_pieces;
} Surgery;

typedef struct {
    // dot products of the vectors before: [0][0] bb, [0][1] fb, [1][1] ff
    double dots[SURGERY_MAX_TASKS][SURGERY_MAX_TASKS];
    double weight[SURGERY_MAX_TASKS];  // the result is the sum of weight[i] * g[i]
    int n_conflicts;                   // ranges in which a pair of tasks has a dot product below 0, before
} SurgeryReport;

static inline void surgery_check_(const SurgeryConfig* c) {
    if (!(c->epsilon >= 0.0f) || !isfinite(c->epsilon)) {
        fail_input("--gradient-surgery-epsilon: expected a number, 0 or more, found %g", (double)c->epsilon);
    }
    if (c->method == SURGERY_CAGRAD && !(c->cagrad_lambda >= 0.0f && c->cagrad_lambda < 1.0f)) {
        fail_input("--cagrad-lambda: expected a number, 0 or more and below 1, found %g", (double)c->cagrad_lambda);
    }
    if (!(c->gradnorm_alpha >= 0.0f) || !isfinite(c->gradnorm_alpha)) {
        fail_input("--gradnorm-alpha: expected a number, 0 or more, found %g", (double)c->gradnorm_alpha);
    }
}

static inline void* surgery_alloc_(size_t n, size_t element_bytes) {
    void* p = calloc(n ? n : 1, element_bytes);
    if (!p) { fail_run("gradient surgery: no memory for %zu times %zu bytes", n, element_bytes); }
    return p;
}

static inline void surgery_init(Surgery* s, const SurgeryConfig* config, const SurgeryRange* ranges, int n_ranges,
                                int n_tasks) {
    memset(s, 0, sizeof *s);
    assert(n_tasks >= 1 && n_tasks <= SURGERY_MAX_TASKS);
    surgery_check_(config);
    s->config = *config;
    s->n_tasks = n_tasks;
    s->n_ranges = n_ranges;
    if (n_tasks == 1) { s->config.method = SURGERY_NONE; }
    gradnorm_init(&s->gradnorm);
    s->ranges = (SurgeryRange*)surgery_alloc_((size_t)n_ranges + 1, sizeof *s->ranges);
    for (int r = 0; r < n_ranges; r++) { s->ranges[r] = ranges[r]; }
    if (s->config.method == SURGERY_GRADNORM) { s->ranges[n_ranges] = config->norm_range; }
    for (int r = 0; r <= n_ranges; r++) {
        if (r == n_ranges) { s->n_pieces = s->n_all_pieces; }
        s->n_all_pieces += ceil_div((int64_t)s->ranges[r].n, SURGERY_CHUNK);
    }
    s->pieces = (SurgeryPiece_*)surgery_alloc_((size_t)s->n_all_pieces, sizeof *s->pieces);
    SurgeryPiece_* piece = s->pieces;
    for (int r = 0; r <= n_ranges; r++) {
        for (size_t i = 0; i < s->ranges[r].n; i += SURGERY_CHUNK, piece++) {
            size_t n = s->ranges[r].n - i;
            piece->first = s->ranges[r].first + i;
            piece->n = n < SURGERY_CHUNK ? (int)n : SURGERY_CHUNK;
            piece->range = r;
        }
    }
    const size_t n_pairs = (size_t)n_tasks * n_tasks;
    s->piece_dots = (double*)surgery_alloc_((size_t)s->n_all_pieces * n_pairs, sizeof(double));
    s->range_dots = (double*)surgery_alloc_(((size_t)n_ranges + 1) * n_pairs, sizeof(double));
}

static inline void surgery_free(Surgery* s) {
    free(s->ranges), free(s->pieces), free(s->piece_dots), free(s->range_dots);
    memset(s, 0, sizeof *s);
}

// dot products of every range, norm_range last, into s->range_dots
static inline void surgery_range_dots_(Surgery* s, float* const* g) {
    const int n = s->n_tasks, n_pairs = n * n;
    #pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < s->n_all_pieces; p++) {
        const SurgeryPiece_* piece = s->pieces + p;
        for (int pair = 0; pair < n_pairs; pair++) {
            int i = pair / n, j = pair % n;
            const float *x = g[i] + piece->first, *y = g[j] + piece->first;
            if (i <= j) { s->piece_dots[p * n_pairs + pair] = surgery_dot_chunk(x, y, (size_t)piece->n); }
        }
    }
    memset(s->range_dots, 0, sizeof(double) * ((size_t)s->n_ranges + 1) * n_pairs);
    for (int64_t p = 0; p < s->n_all_pieces; p++) {
        double* dots = s->range_dots + (size_t)s->pieces[p].range * n_pairs;
        for (int pair = 0; pair < n_pairs; pair++) {
            int i = pair / n, j = pair % n;
            dots[pair] += s->piece_dots[p * n_pairs + (i <= j ? pair : j * n + i)];
        }
    }
}

// the dot products of the whole vector, and in how many ranges tasks are in conflict
static inline void surgery_total_(SurgeryReport* report, double* dots, const Surgery* s) {
    const int n = s->n_tasks, n_pairs = n * n;
    for (int pair = 0; pair < n_pairs; pair++) { dots[pair] = 0.0; }
    for (int r = 0; r < s->n_ranges; r++) {
        int conflict = 0;
        for (int pair = 0; pair < n_pairs; pair++) {
            dots[pair] += s->range_dots[r * n_pairs + pair];
            conflict |= s->range_dots[r * n_pairs + pair] < 0.0;
        }
        report->n_conflicts += conflict;
    }
    for (int pair = 0; pair < n_pairs; pair++) { report->dots[pair / n][pair % n] = dots[pair]; }
}

// the weights of a method, into report->weight
static inline void surgery_weights_(SurgeryReport* report, const double* dots, const Surgery* s, uint64_t step) {
    const SurgeryConfig* c = &s->config;
    double* weight = report->weight;
    for (int k = 0; k < s->n_tasks; k++) { weight[k] = 1.0; }
    if (c->method == SURGERY_PCGRAD) {
        surgery_pcgrad_weights(weight, dots, s->n_tasks, (double)c->epsilon, c->seed, step);
    } else if (c->method == SURGERY_CAGRAD) {
        surgery_cagrad_weights(weight, dots, (double)c->cagrad_lambda);
    } else if (c->method == SURGERY_ORTHOGRAD) {
        weight[0] -= surgery_ratio_(dots[1], dots[0], (double)c->epsilon);
    } else if (c->method == SURGERY_GRADNORM) {
        for (int k = 0; k < s->n_tasks; k++) { weight[k] = (double)s->gradnorm.weight[k]; }
    }
}

// gradnorm's weights learn from this step
static inline void surgery_learn_(Surgery* s, const double* dots, const float* losses) {
    const int n = s->n_tasks;
    const double* of = s->config.norm_range.n > 0 ? s->range_dots + (size_t)s->n_ranges * n * n : dots;
    double norms[SURGERY_MAX_TASKS];
    for (int k = 0; k < n; k++) { norms[k] = isfinite(dots[k * n + k]) ? sqrt(of[k * n + k]) : NAN; }
    gradnorm_update(&s->gradnorm, norms, losses, s->config.gradnorm_alpha, n);
}

// step: number of the update; losses (n_tasks): of gradnorm only, else may be NULL
static inline void surgery_apply(SurgeryReport* report, float* const* g, Surgery* s, uint64_t step, const float* losses,
                                 const Device* dev) {
    (void)dev;
    double dots[SURGERY_MAX_TASKS * SURGERY_MAX_TASKS];
    assert(s->n_tasks == 2 || (s->config.method != SURGERY_CAGRAD && s->config.method != SURGERY_ORTHOGRAD));
    assert(losses || s->config.method != SURGERY_GRADNORM);
    memset(report, 0, sizeof *report);
    surgery_range_dots_(s, g);
    surgery_total_(report, dots, s);
    surgery_weights_(report, dots, s, step);
    if (s->config.method == SURGERY_GRADNORM) { surgery_learn_(s, dots, losses); }
    #pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < s->n_pieces; p++) {
        surgery_sum_(g, report->weight, s->n_tasks, s->pieces[p].first, (size_t)s->pieces[p].n);
    }
}
#endif  // LLMC_GRADIENT_SURGERY_H
