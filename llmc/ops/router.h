/*
Router of a mixture of experts: which k of E experts a row goes to, and with what weights. A row is a token here; one of
its k experts and it are a pair (n, j), of which expert_rows.h makes a row of that expert.
    logits, scores (N, E)   experts, weights (N, k)   lse (N)   bias (E)   given (N, k): floats and ints in every build
scores p of a row of logits z, by RouterShape.score:
    ROUTER_SOFTMAX        p = softmax(z)           lse = log of the sum of exp(z), for the z-loss; NULL: not wanted
    ROUTER_SIGMOID        p = sigmoid(z)           lse is NULL
    ROUTER_SQRT_SOFTPLUS  p = sqrt(softplus(z))    lse is NULL
choice: the k experts of largest c = p + bias (bias NULL: p), ties to the lower index, a NaN counts as -Inf: always k
different experts. With groups > 1, of E / groups neighbours each, first the top_groups groups of largest score stay, a
group's score being the sum of its two largest c. The choice has no gradient. experts are in ascending order.
given (hash routing, or the experts of an earlier call): nothing is chosen, experts = given in its own order; an expert
may stand in a row twice, as two pairs that know nothing of each other. experts may be given.
    w_j = p_j * factor    or, with renormalize,    w_j = p_j / (sum of the chosen p + tiny) * factor
tiny is 1e-20, with softmax 0. With k = 1 and renormalize the router learns nothing: w is factor.

router_statistics, of N rows, on the device: 2 * E + ROUTER_TOTALS floats,
    statistics[e]                       c_e  how many pairs went to expert e, a whole number below 2^24
    statistics[E + e]                   P_e  mean over rows of p (softmax), or of p / (sum of the row's p + 1e-20)
    statistics[2 * E + ROUTER_BALANCE]  E * sum over e of c_e / (N k) * P_e: 1 where all experts have as much to do
    ... + ROUTER_Z                      mean of lse^2; 0 without lse
    ... + ROUTER_TOP, ROUTER_SURE       mean of a row's largest weight; share of rows where it is above 0.9 * factor
A NaN among the logits makes the balance NaN. router_pool makes of the statistics of several layers those of all of them
together: means over layers, and the balance of these. router_mean_balance: of B sequences, each with statistics of its
own, the balance of all of them is the mean of theirs. router_load makes numbers to print of counts, on the host.
Losses: balance_weight * balance and z_weight * z (softmax only), a weight of 0: no such loss. The counts are constants:
they may be those of more rows than these N, divided by how many times as many (several layers, ranks); for a loss per
sequence, call statistics and backward for the rows of one after another.
Backward: dlogits (N, E) written; of the pairs' dweights (N, k) and of both losses. dp first, 0 everywhere, then
    dp_j += factor * dw_j    or    dp_j += factor * (dw_j - sum of v dw) / (sum of the chosen p + tiny), v = w / factor
    dp_e += q_e, q_e = balance_weight * E * f_e / N, f_e = c_e / (N k)                      softmax
    dp_e += (q_e - sum of q p / t) / t, t the sum of the row's p + 1e-20                    other scores
    softmax: dz = p (dp - sum of p dp) + 2 z_weight / N * lse * p     sigmoid: dz = dp p (1 - p)
    sqrt-softplus: dz = dp sigmoid(z) / (2 p), below z = -20, where that tends to 0 / 0, dz = dp p / 2
scores are always needed; weights and given dw with renormalize; lse for the z-loss, logits for sqrt-softplus,
statistics for the balance loss: else NULL will do.
router_bias_update: after an update, from the counts of all its rows: bias += rate * sign(mean of c - c), with `centred`
then minus the mean of the biases. On the host.
Cost:   C, one thread, AVX-512, E 256, k 8, us per row: softmax with both losses 1.0 forward, 0.1 statistics, 0.2
        backward; sigmoid 0.6, 0.2, 0.6; sqrt-softplus 1.7, 0.2, 0.8; the smallest of 30 calls on a busy machine.
        CUDA: moves 2*N*E floats forward, 1*N*E statistics, 2*N*E backward.
Error:  a softmax has a chain of E sums: p is within (E + 3) * 2^-24 of itself. Fast kernels: the same functions, sums
        along trees of 32 lanes.
Order:  every sum over experts, chosen ones or rows ascends from 0, as the plain loop writes it; maxima have no order.
        Fast kernels: statistics in pieces of 64 rows, added in order.
Source: Shazeer et al. 2017, arXiv:1701.06538; balance: Fedus et al. 2021, arXiv:2101.03961; z-loss: Zoph et al. 2022,
        arXiv:2202.08906; sigmoid, groups and bias: DeepSeek-AI 2024, arXiv:2412.19437
*/
#ifndef LLMC_ROUTER_H
#define LLMC_ROUTER_H
#include "../core/device.h"  // Device, device_workspace, ceil_div
#include "../core/fmath.h"   // fm_exp, fm_log, FM_FUNCTION
#include "../core/kernel.h"  // row_add, row_madd, row_total, row_max
#include "../core/madd.h"    // madd
#include "silu.h"            // sigmoid_one
#include "softplus.h"        // softplus_one
#include <math.h>
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_load_columns, v_fill, v_madd
#endif

enum { ROUTER_SOFTMAX, ROUTER_SIGMOID, ROUTER_SQRT_SOFTPLUS };
enum { ROUTER_BALANCE, ROUTER_Z, ROUTER_TOP, ROUTER_SURE, ROUTER_TOTALS };
enum { ROUTER_MOST_EXPERTS = 1024, ROUTER_MOST_CHOSEN = 32 };
#define ROUTER_TINY 1e-20f

typedef struct {
    int E, k;                // experts; how many of them a row goes to
    int score;               // ROUTER_SOFTMAX, ROUTER_SIGMOID or ROUTER_SQRT_SOFTPLUS
    int renormalize;         // do the weights of a row sum up to factor?
    float factor;            // 1: none
    int groups, top_groups;  // 0 or 1: no groups
} RouterShape;

static inline void router_check(const RouterShape* s) {
    const int most = s->E < ROUTER_MOST_CHOSEN ? s->E : ROUTER_MOST_CHOSEN;
    if (s->E < 1 || s->E > ROUTER_MOST_EXPERTS || s->k < 1 || s->k > most) {
        fail_run("router: %d of %d experts: at most %d of %d", s->k, s->E, ROUTER_MOST_CHOSEN, ROUTER_MOST_EXPERTS);
    }
    if (s->groups > 1 && (s->E % s->groups != 0 || s->E / s->groups < 2 || s->top_groups < 1 ||
                          s->top_groups > s->groups || s->k > s->E / s->groups * s->top_groups)) {
        fail_run("router: %d groups of %d experts, of which %d stay for %d chosen: groups are equal, of two experts or "
                 "more, and those that stay have as many as are chosen", s->groups, s->E, s->top_groups, s->k);
    }
}

static inline void router_check_losses_(const RouterShape* s, float z_weight) {
    if (z_weight != 0.0f && s->score != ROUTER_SOFTMAX) { fail_run("router: the z-loss is for softmax scores only"); }
}

static inline size_t router_statistics_length(int E) { return 2 * (size_t)E + ROUTER_TOTALS; }

// ---- one number ----

FM_FUNCTION float router_score_one(float z, int score) {
    return score == ROUTER_SIGMOID ? sigmoid_one(z) : sqrtf(softplus_one(z));
}

// d score / dz
FM_FUNCTION float router_slope_one(float z, float p, int score) {
    if (score == ROUTER_SIGMOID) { return p * (1.0f - p); }
    return z < -20.0f ? 0.5f * p : sigmoid_one(z) / (2.0f * p);
}

// what experts are chosen by; a NaN is no better than anything. Never -0: p is not, and no sum of it
FM_FUNCTION float router_choice_one(float p, float bias) {
    float c = p + bias;
    return c == c ? c : -INFINITY;
}

// the sum of a group's two largest
FM_FUNCTION float router_group_one(float first, float second) { return router_choice_one(first, second); }

// what a chosen score is divided by; sum: of all that are chosen
FM_FUNCTION float router_below_one(float sum, const RouterShape s) {
    return s.score == ROUTER_SOFTMAX ? sum : sum + ROUTER_TINY;
}

FM_FUNCTION float router_weight_one(float p, float below, const RouterShape s) {
    float w = s.renormalize ? p / below : p;
    return s.factor != 1.0f ? w * s.factor : w;
}

FM_FUNCTION float router_unscaled_one(float w, const RouterShape s) { return s.factor != 1.0f ? w / s.factor : w; }

// dp of a chosen expert; dot: the sum of v dw
FM_FUNCTION float router_chosen_one(float dw, float dot, float below, const RouterShape s) {
    float d = s.renormalize ? (dw - dot) / below : dw;
    return s.factor != 1.0f ? d * s.factor : d;
}

// c_e / (N k)
FM_FUNCTION float router_share_one(float count, int N, int k) { return count / (float)((int64_t)N * k); }

// q_e
FM_FUNCTION float router_balance_one(float count, float balance_weight, int N, const RouterShape s) {
    return ((balance_weight * (float)s.E) * router_share_one(count, N, s.k)) / (float)N;
}

// ---- plain C: read this first; it defines every bit ----

static inline void router_scores_row_ref(float* scores, float* lse, const float* logits, const RouterShape* s) {
    if (s->score != ROUTER_SOFTMAX) {
        for (int e = 0; e < s->E; e++) { scores[e] = router_score_one(logits[e], s->score); }
        return;
    }
    float largest = -INFINITY, sum = 0.0f;
    for (int e = 0; e < s->E; e++) { largest = logits[e] > largest ? logits[e] : largest; }
    for (int e = 0; e < s->E; e++) {
        scores[e] = fm_exp(logits[e] - largest);
        sum += scores[e];
    }
    for (int e = 0; e < s->E; e++) { scores[e] /= sum; }
    if (lse) { *lse = largest + fm_log(sum); }
}

// does x of index i come before y of index j?
static inline int router_before_ref(float x, int i, float y, int j) { return x > y || (x == y && i < j); }

// the sum of the two largest of n
static inline float router_group_ref(const float* choice, int n) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = 0; e < n; e++) {
        if (choice[e] > first) {
            second = first;
            first = choice[e];
        } else if (choice[e] > second) {
            second = choice[e];
        }
    }
    return router_group_one(first, second);
}

// those that fewer than `most` come before, ascending; stays NULL: all may be chosen
static inline void router_choose_ref(int* chosen, const float* x, const int* stays, int n, int most) {
    int n_chosen = 0;
    for (int i = 0; i < n; i++) {
        int before = 0;
        for (int j = 0; j < n; j++) { before += (!stays || stays[j]) && router_before_ref(x[j], j, x[i], i); }
        if ((!stays || stays[i]) && before < most) { chosen[n_chosen++] = i; }
    }
}

static inline void router_experts_row_ref(int* experts, const float* scores, const float* bias, const RouterShape* s) {
    float choice[ROUTER_MOST_EXPERTS], group[ROUTER_MOST_EXPERTS];
    int stays[ROUTER_MOST_EXPERTS] = {0}, groups[ROUTER_MOST_EXPERTS];
    for (int e = 0; e < s->E; e++) { choice[e] = router_choice_one(scores[e], bias ? bias[e] : 0.0f); }
    if (s->groups > 1) {
        const int width = s->E / s->groups;
        for (int g = 0; g < s->groups; g++) { group[g] = router_group_ref(choice + g * width, width); }
        router_choose_ref(groups, group, NULL, s->groups, s->top_groups);
        for (int i = 0; i < s->top_groups; i++) {
            for (int e = 0; e < width; e++) { stays[groups[i] * width + e] = 1; }
        }
    }
    router_choose_ref(experts, choice, s->groups > 1 ? stays : NULL, s->E, s->k);
}

// what the chosen scores of a row are divided by
static inline float router_below_ref(const int* experts, const float* scores, const RouterShape* s) {
    float sum = 0.0f;
    for (int j = 0; j < s->k; j++) { sum += scores[experts[j]]; }
    return router_below_one(sum, *s);
}

static inline void router_weights_row_ref(float* weights, const int* experts, const float* scores,
                                          const RouterShape* s) {
    float below = router_below_ref(experts, scores, s);
    for (int j = 0; j < s->k; j++) { weights[j] = router_weight_one(scores[experts[j]], below, *s); }
}

static inline void router_forward_ref(int* experts, float* weights, float* scores, float* lse, const float* logits,
                                      const float* bias, const int* given, const RouterShape* s, int N) {
    for (size_t n = 0; n < (size_t)N; n++, experts += s->k, weights += s->k) {
        float* p = scores + n * s->E;
        router_scores_row_ref(p, lse ? lse + n : NULL, logits + n * s->E, s);
        if (!given) { router_experts_row_ref(experts, p, bias, s); }
        for (int j = 0; given && j < s->k; j++) { experts[j] = given[n * s->k + j]; }
        router_weights_row_ref(weights, experts, p, s);
    }
}

// what the scores of a row are divided by for P
static inline float router_total_ref(const float* scores, const RouterShape* s) {
    float sum = 0.0f;
    for (int e = 0; e < s->E; e++) { sum += scores[e]; }
    return sum + ROUTER_TINY;
}

static inline float router_top_ref(const float* weights, int k) {
    float top = weights[0];
    for (int j = 1; j < k; j++) { top = weights[j] > top ? weights[j] : top; }
    return top;
}

// the totals behind counts and P; sums: of lse^2 and of the largest weights, and how many of these are sure
static inline void router_totals_ref(float* statistics, const float* sums, const RouterShape* s, int N) {
    float balance = 0.0f, *totals = statistics + 2 * s->E;
    for (int e = 0; e < s->E; e++) {
        balance = madd(router_share_one(statistics[e], N, s->k), statistics[s->E + e], balance);
    }
    totals[ROUTER_BALANCE] = (float)s->E * balance;
    for (int i = 0; i < 3; i++) { totals[ROUTER_Z + i] = sums[i] / (float)N; }
}

static inline void router_statistics_ref(float* statistics, const int* experts, const float* weights,
                                         const float* scores, const float* lse, const RouterShape* s, int N) {
    const int E = s->E, k = s->k;
    float sums[3] = {0.0f, 0.0f, 0.0f};
    for (int e = 0; e < 2 * E; e++) { statistics[e] = 0.0f; }
    for (size_t i = 0; i < (size_t)N * k; i++) { statistics[experts[i]] += 1.0f; }
    for (size_t n = 0; n < (size_t)N; n++) {
        const float* p = scores + n * E;
        float total = router_total_ref(p, s), top = router_top_ref(weights + n * k, k);
        for (int e = 0; e < E; e++) { statistics[E + e] += s->score == ROUTER_SOFTMAX ? p[e] : p[e] / total; }
        if (lse) { sums[0] = madd(lse[n], lse[n], sums[0]); }
        sums[1] += top;
        sums[2] += top > 0.9f * s->factor ? 1.0f : 0.0f;
    }
    for (int e = 0; e < E; e++) { statistics[E + e] /= (float)N; }
    router_totals_ref(statistics, sums, s, N);
}

// pooled (2 * E + ROUTER_TOTALS) of statistics (layers, the same), of N rows each
static inline void router_pool_ref(float* pooled, const float* statistics, int layers, const RouterShape* s, int N) {
    const size_t n = router_statistics_length(s->E);
    float balance = 0.0f;
    for (size_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int l = 0; l < layers; l++) { sum += statistics[l * n + i]; }
        pooled[i] = sum / (float)layers;
    }
    for (int e = 0; e < s->E; e++) { balance = madd(router_share_one(pooled[e], N, s->k), pooled[s->E + e], balance); }
    pooled[2 * s->E + ROUTER_BALANCE] = (float)s->E * balance;
}

static inline void router_mean_balance_ref(float* statistics, const float* of_sequences, int B, int E) {
    const size_t n = router_statistics_length(E);
    float sum = 0.0f;
    for (int b = 0; b < B; b++) { sum += of_sequences[(size_t)b * n + 2 * (size_t)E + ROUTER_BALANCE]; }
    statistics[2 * E + ROUTER_BALANCE] = sum / (float)B;
}

// dp of the chosen experts of a row is added
static inline void router_chosen_row_ref(float* dp, const float* dweights, const int* experts, const float* weights,
                                         const float* scores, const RouterShape* s) {
    float below = 1.0f, dot = 0.0f;
    if (s->renormalize) {
        below = router_below_ref(experts, scores, s);
        for (int j = 0; j < s->k; j++) { dot = madd(router_unscaled_one(weights[j], *s), dweights[j], dot); }
    }
    for (int j = 0; j < s->k; j++) { dp[experts[j]] += router_chosen_one(dweights[j], dot, below, *s); }
}

// dp of the balance loss is added
static inline void router_balance_row_ref(float* dp, const float* scores, const float* counts, float balance_weight,
                                          const RouterShape* s, int N) {
    float total = 1.0f, dot = 0.0f;
    if (s->score != ROUTER_SOFTMAX) {
        total = router_total_ref(scores, s);
        for (int e = 0; e < s->E; e++) {
            dot = madd(router_balance_one(counts[e], balance_weight, N, *s), scores[e] / total, dot);
        }
    }
    for (int e = 0; e < s->E; e++) {
        float q = router_balance_one(counts[e], balance_weight, N, *s);
        dp[e] += s->score == ROUTER_SOFTMAX ? q : (q - dot) / total;
    }
}

// from dp to dz, in place
static inline void router_logits_row_ref(float* dz, const float* scores, const float* logits, const RouterShape* s) {
    float dot = 0.0f;
    if (s->score != ROUTER_SOFTMAX) {
        for (int e = 0; e < s->E; e++) {
            dz[e] = dz[e] * router_slope_one(s->score == ROUTER_SIGMOID ? 0.0f : logits[e], scores[e], s->score);
        }
        return;
    }
    for (int e = 0; e < s->E; e++) { dot = madd(scores[e], dz[e], dot); }
    for (int e = 0; e < s->E; e++) { dz[e] = scores[e] * (dz[e] - dot); }
}

static inline void router_backward_ref(float* dlogits, const float* dweights, const int* experts, const float* weights,
                                       const float* scores, const float* lse, const float* logits,
                                       const float* statistics, float balance_weight, float z_weight,
                                       const RouterShape* s, int N) {
    for (size_t n = 0; n < (size_t)N; n++) {
        const size_t row = n * s->E, chosen = n * s->k;
        float* dz = dlogits + row;
        for (int e = 0; e < s->E; e++) { dz[e] = 0.0f; }
        router_chosen_row_ref(dz, dweights + chosen, experts + chosen, s->renormalize ? weights + chosen : NULL,
                              scores + row, s);
        if (balance_weight != 0.0f) { router_balance_row_ref(dz, scores + row, statistics, balance_weight, s, N); }
        router_logits_row_ref(dz, scores + row, logits ? logits + row : NULL, s);
        for (int e = 0; z_weight != 0.0f && e < s->E; e++) {
            dz[e] = madd(((2.0f * z_weight) / (float)N) * lse[n], scores[row + e], dz[e]);
        }
    }
}

// ---- on the host ----

static inline void router_bias_update(float* bias, const float* counts, float rate, int centred, int E) {
    float sum = 0.0f, sum_bias = 0.0f;
    for (int e = 0; e < E; e++) { sum += counts[e]; }
    const float mean = sum / (float)E;
    for (int e = 0; e < E; e++) {
        float sign = mean > counts[e] ? 1.0f : mean < counts[e] ? -1.0f : 0.0f;
        bias[e] = bias[e] + rate * sign;
        sum_bias += bias[e];
    }
    for (int e = 0; e < E && centred; e++) { bias[e] = bias[e] - sum_bias / (float)E; }
}

// what a step line says of the counts of a layer
typedef struct {
    float busiest;  // largest count / mean: 1 is balance
    float entropy;  // of the counts' shares, in nats: log(E) is balance
    int dead;       // experts that nothing went to
} RouterLoad;

static inline RouterLoad router_load(const float* counts, int E) {
    RouterLoad load = {0.0f, 0.0f, 0};
    float sum = 0.0f, most = 0.0f;
    for (int e = 0; e < E; e++) {
        sum += counts[e];
        most = counts[e] > most ? counts[e] : most;
    }
    for (int e = 0; e < E; e++) {
        float share = counts[e] / sum;
        if (share > 0.0f) { load.entropy = madd(-share, fm_log(share), load.entropy); }
        load.dead += counts[e] == 0.0f;
    }
    load.busiest = sum > 0.0f ? most / (sum / (float)E) : 0.0f;
    return load;
}

#ifndef __CUDACC__  // ---- fast C: rows over threads; sums of VLANES rows side by side ----

static inline float router_max_(const float* x, int n) {
    float lanes[VLANES], largest = -INFINITY;
    int whole = n / VLANES * VLANES;
    for (int i = 0; i < VLANES; i++) { lanes[i] = -INFINITY; }
    for (int e = 0; e < whole; e += VLANES) {
        #pragma omp simd
        for (int i = 0; i < VLANES; i++) { lanes[i] = x[e + i] > lanes[i] ? x[e + i] : lanes[i]; }
    }
    for (int i = 0; i < VLANES; i++) { largest = lanes[i] > largest ? lanes[i] : largest; }
    for (int e = whole; e < n; e++) { largest = x[e] > largest ? x[e] : largest; }
    return largest;
}

// sums of VLANES rows of E
static inline void router_sums_(float* sums, const float* x, int E) {
    vfloat sum = v_fill(0.0f), columns[VLANES];
    int whole = E / VLANES * VLANES;
    for (int e = 0; e < whole; e += VLANES) {
        v_load_columns(columns, x + e, (size_t)E);
        for (int i = 0; i < VLANES; i++) { sum += columns[i]; }
    }
    for (int r = 0; r < VLANES; r++, x += E) {
        float row_sum = sum[r];
        for (int e = whole; e < E; e++) { row_sum += x[e]; }
        sums[r] = row_sum;
    }
}

// sums of the products of VLANES rows of E
static inline void router_dots_(float* dots, const float* x, const float* y, int E) {
    vfloat dot = v_fill(0.0f), x_columns[VLANES], y_columns[VLANES];
    int whole = E / VLANES * VLANES;
    for (int e = 0; e < whole; e += VLANES) {
        v_load_columns(x_columns, x + e, (size_t)E);
        v_load_columns(y_columns, y + e, (size_t)E);
        for (int i = 0; i < VLANES; i++) { dot = v_madd(x_columns[i], y_columns[i], dot); }
    }
    for (int r = 0; r < VLANES; r++, x += E, y += E) {
        float row_dot = dot[r];
        for (int e = whole; e < E; e++) { row_dot = madd(x[e], y[e], row_dot); }
        dots[r] = row_dot;
    }
}

// softmax of VLANES rows
static inline void router_softmax_rows_(float* scores, float* lse, const float* logits, int E) {
    float largest[VLANES], sums[VLANES];
    for (int r = 0; r < VLANES; r++) {
        const float *z = logits + (size_t)r * E, row_largest = router_max_(z, E);
        float* x = scores + (size_t)r * E;
        #pragma omp simd
        for (int e = 0; e < E; e++) { x[e] = fm_exp(z[e] - row_largest); }
        largest[r] = row_largest;
    }
    router_sums_(sums, scores, E);
    for (int r = 0; r < VLANES; r++) {
        float *p = scores + (size_t)r * E, sum = sums[r];
        #pragma omp simd
        for (int e = 0; e < E; e++) { p[e] /= sum; }
        if (lse) { lse[r] = largest[r] + fm_log(sum); }
    }
}

static inline void router_scores_rows_(float* scores, float* lse, const float* logits, const RouterShape* s, int rows) {
    const int E = s->E;
    if (s->score == ROUTER_SIGMOID) {
        #pragma omp simd
        for (int i = 0; i < rows * E; i++) { scores[i] = router_score_one(logits[i], ROUTER_SIGMOID); }
    } else if (s->score == ROUTER_SQRT_SOFTPLUS) {
        #pragma omp simd
        for (int i = 0; i < rows * E; i++) { scores[i] = router_score_one(logits[i], ROUTER_SQRT_SOFTPLUS); }
    } else if (rows == VLANES) {
        router_softmax_rows_(scores, lse, logits, E);
    } else {
        for (int r = 0; r < rows; r++) {
            router_scores_row_ref(scores + (size_t)r * E, lse ? lse + r : NULL, logits + (size_t)r * E, s);
        }
    }
}

// A choice (a number or an infinity, never -0) and its index as a whole number: the larger the choice, then the lower
// the index, the larger. Their largest is found with vectors, and needs no other search for where it was
static inline int64_t router_pair_(float choice, int index) {
    int32_t bits;
    memcpy(&bits, &choice, sizeof bits);
    bits ^= bits >> 31 & 0x7fffffff;
    return (int64_t)((uint64_t)(uint32_t)bits << 32 | (uint32_t)~index);
}

// the `most` largest of n pairs, ascending by index; they become the smallest
static inline void router_take_(int* chosen, int64_t* pairs, int n, int most) {
    for (int j = 0; j < most; j++) {
        int64_t best = INT64_MIN;
        for (int e = 0; e < n; e++) { best = pairs[e] > best ? pairs[e] : best; }
        const int e = (int)~(uint32_t)best;
        int i = j;
        pairs[e] = INT64_MIN;
        for (; i > 0 && chosen[i - 1] > e; i--) { chosen[i] = chosen[i - 1]; }
        chosen[i] = e;
    }
}

// the pairs of groups that do not stay become the smallest
static inline void router_keep_groups_(int64_t* pairs, const float* choice, const RouterShape* s) {
    const int width = s->E / s->groups;
    int64_t groups[ROUTER_MOST_EXPERTS];
    int stay[ROUTER_MOST_EXPERTS];
    for (int g = 0; g < s->groups; g++) { groups[g] = router_pair_(router_group_ref(choice + g * width, width), g); }
    router_take_(stay, groups, s->groups, s->top_groups);
    for (int g = 0; g < s->groups; g++) {
        for (int e = g * width; groups[g] != INT64_MIN && e < (g + 1) * width; e++) { pairs[e] = INT64_MIN; }
    }
}

static inline void router_experts_row_(int* experts, const float* scores, const float* bias, const RouterShape* s) {
    float choice[ROUTER_MOST_EXPERTS];
    int64_t pairs[ROUTER_MOST_EXPERTS];
    #pragma omp simd
    for (int e = 0; e < s->E; e++) { choice[e] = router_choice_one(scores[e], bias ? bias[e] : 0.0f); }
    #pragma omp simd
    for (int e = 0; e < s->E; e++) { pairs[e] = router_pair_(choice[e], e); }
    if (s->groups > 1) { router_keep_groups_(pairs, choice, s); }
    router_take_(experts, pairs, s->E, s->k);
}

static inline void router_forward(int* experts, float* weights, float* scores, float* lse, const float* logits,
                                  const float* bias, const int* given, const RouterShape* s, int N, const Device* dev) {
    (void)dev;
    router_check(s);
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const int rows = first + VLANES < N ? VLANES : N - first;
        const size_t start = (size_t)first * s->E;
        router_scores_rows_(scores + start, lse ? lse + first : NULL, logits + start, s, rows);
        for (int n = first; n < first + rows; n++) {
            const float* p = scores + (size_t)n * s->E;
            const size_t chosen = (size_t)n * s->k;
            if (!given) { router_experts_row_(experts + chosen, p, bias, s); }
            for (int j = 0; given && j < s->k; j++) { experts[chosen + j] = given[chosen + j]; }
            router_weights_row_ref(weights + chosen, experts + chosen, p, s);
        }
    }
}

// P of the experts first..last-1, rows ascending; totals NULL: softmax
static inline void router_means_(float* means, const float* scores, const float* totals, int E, int N, int first,
                                 int last) {
    for (int e = first; e < last; e++) { means[e] = 0.0f; }
    for (int n = 0; n < N; n++) {
        const float* p = scores + (size_t)n * E;
        if (totals) {
            float total = totals[n];
            #pragma omp simd
            for (int e = first; e < last; e++) { means[e] += p[e] / total; }
        } else {
            #pragma omp simd
            for (int e = first; e < last; e++) { means[e] += p[e]; }
        }
    }
    for (int e = first; e < last; e++) { means[e] /= (float)N; }
}

// what router_total_ref says, of every row
static inline void router_row_totals_(float* totals, const float* scores, const RouterShape* s, int N) {
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const float* p = scores + (size_t)first * s->E;
        if (first + VLANES <= N) {
            router_sums_(totals + first, p, s->E);
            for (int r = 0; r < VLANES; r++) { totals[first + r] += ROUTER_TINY; }
            continue;
        }
        for (int n = first; n < N; n++, p += s->E) { totals[n] = router_total_ref(p, s); }
    }
}

static inline void router_statistics(float* statistics, const int* experts, const float* weights, const float* scores,
                                     const float* lse, const RouterShape* s, int N, const Device* dev) {
    const int E = s->E, k = s->k, width = 64;
    float sums[3] = {0.0f, 0.0f, 0.0f};
    float* totals = s->score == ROUTER_SOFTMAX ? NULL : device_workspace(dev, sizeof(float) * (size_t)N);
    if (totals) { router_row_totals_(totals, scores, s, N); }
    #pragma omp parallel for
    for (int first = 0; first < E; first += width) {
        router_means_(statistics + E, scores, totals, E, N, first, first + width < E ? first + width : E);
    }
    for (int e = 0; e < E; e++) { statistics[e] = 0.0f; }
    for (size_t i = 0; i < (size_t)N * k; i++) { statistics[experts[i]] += 1.0f; }
    for (size_t n = 0; n < (size_t)N; n++) {
        float top = router_top_ref(weights + n * k, k);
        if (lse) { sums[0] = madd(lse[n], lse[n], sums[0]); }
        sums[1] += top;
        sums[2] += top > 0.9f * s->factor ? 1.0f : 0.0f;
    }
    router_totals_ref(statistics, sums, s, N);
}

static inline void router_pool(float* pooled, const float* statistics, int layers, const RouterShape* s, int N,
                               const Device* dev) {
    (void)dev;
    router_pool_ref(pooled, statistics, layers, s, N);
}

static inline void router_mean_balance(float* statistics, const float* of_sequences, int B, int E, const Device* dev) {
    (void)dev;
    router_mean_balance_ref(statistics, of_sequences, B, E);
}

// dp of the balance loss is added; q (E)
static inline void router_balance_row_(float* dp, const float* scores, const float* q, const RouterShape* s) {
    float total = 1.0f, dot = 0.0f;
    if (s->score == ROUTER_SOFTMAX) {
        #pragma omp simd
        for (int e = 0; e < s->E; e++) { dp[e] += q[e]; }
        return;
    }
    total = router_total_ref(scores, s);
    for (int e = 0; e < s->E; e++) { dot = madd(q[e], scores[e] / total, dot); }
    #pragma omp simd
    for (int e = 0; e < s->E; e++) { dp[e] += (q[e] - dot) / total; }
}

// from dp to dz of VLANES rows of a softmax
static inline void router_softmax_logits_(float* dz, const float* scores, int E) {
    float dots[VLANES];
    router_dots_(dots, scores, dz, E);
    for (int r = 0; r < VLANES; r++, dz += E, scores += E) {
        float dot = dots[r];
        #pragma omp simd
        for (int e = 0; e < E; e++) { dz[e] = scores[e] * (dz[e] - dot); }
    }
}

static inline void router_logits_rows_(float* dz, const float* scores, const float* logits, const RouterShape* s,
                                       int rows) {
    const int n = rows * s->E;
    if (s->score == ROUTER_SIGMOID) {
        #pragma omp simd
        for (int i = 0; i < n; i++) { dz[i] = dz[i] * router_slope_one(0.0f, scores[i], ROUTER_SIGMOID); }
    } else if (s->score == ROUTER_SQRT_SOFTPLUS) {
        #pragma omp simd
        for (int i = 0; i < n; i++) { dz[i] = dz[i] * router_slope_one(logits[i], scores[i], ROUTER_SQRT_SOFTPLUS); }
    } else if (rows == VLANES) {
        router_softmax_logits_(dz, scores, s->E);
    } else {
        for (int i = 0; i < n; i += s->E) { router_logits_row_ref(dz + i, scores + i, NULL, s); }
    }
}

static inline void router_backward(float* dlogits, const float* dweights, const int* experts, const float* weights,
                                   const float* scores, const float* lse, const float* logits, const float* statistics,
                                   float balance_weight, float z_weight, const RouterShape* s, int N,
                                   const Device* dev) {
    const int E = s->E;
    router_check_losses_(s, z_weight);
    float* q = device_workspace(dev, sizeof(float) * (size_t)E);
    for (int e = 0; balance_weight != 0.0f && e < E; e++) {
        q[e] = router_balance_one(statistics[e], balance_weight, N, *s);
    }
    #pragma omp parallel for
    for (int first = 0; first < N; first += VLANES) {
        const int rows = first + VLANES < N ? VLANES : N - first;
        const size_t start = (size_t)first * E;
        for (int n = first; n < first + rows; n++) {
            const size_t row = (size_t)n * E, chosen = (size_t)n * s->k;
            memset(dlogits + row, 0, sizeof(float) * (size_t)E);
            router_chosen_row_ref(dlogits + row, dweights + chosen, experts + chosen,
                                  s->renormalize ? weights + chosen : NULL, scores + row, s);
            if (balance_weight != 0.0f) { router_balance_row_(dlogits + row, scores + row, q, s); }
        }
        router_logits_rows_(dlogits + start, scores + start, logits ? logits + start : NULL, s, rows);
        for (int n = first; z_weight != 0.0f && n < first + rows; n++) {
            const float by = ((2.0f * z_weight) / (float)N) * lse[n], *p = scores + (size_t)n * E;
            float* dz = dlogits + (size_t)n * E;
            #pragma omp simd
            for (int e = 0; e < E; e++) { dz[e] = madd(by, p[e], dz[e]); }
        }
    }
}
#else  // ---- CUDA: a warp for a row, lane l has the experts l, l + 32, ... ----

enum { ROUTER_ROWS = 8 };     // rows of a block: blocks are (32, 8)
enum { ROUTER_PIECE = 64 };   // rows that are summed before others are added; EXACT: all of them
enum { ROUTER_COLUMNS = 128 };

// In the order of floats, and above 0: choices are numbers or infinities, never -0
__device__ inline unsigned router_key_(float choice) {
    unsigned bits = __float_as_uint(choice);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// the larger of two (key, index); of equal keys that of the lower index, which is stored inverted
__device__ inline unsigned long long router_pair_(unsigned key, int index) {
    return (unsigned long long)key << 32 | (unsigned)~index;
}

// this lane's largest of keys[first .. last - 1], of which it has every 32nd
__device__ inline unsigned long long router_best_(const unsigned* keys, int first, int last) {
    unsigned long long best = 0;
    for (int e = first + (int)threadIdx.x; e < last; e += WARP) {
        unsigned long long other = router_pair_(keys[e], e);
        best = other > best ? other : best;
    }
    return best;
}

__device__ inline unsigned long long router_best_of_warp_(unsigned long long best) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        unsigned long long other = __shfl_xor_sync(ALL_LANES, best, step);
        best = other > best ? other : best;
    }
    return best;
}

// The `most` largest of n keys: bit i of what comes back says that expert lane + 32 * i is one of them. Their keys
// become 0, and no other lane looks at them
__device__ inline unsigned router_take_(unsigned* keys, int n, int most) {
    unsigned taken = 0;
    unsigned long long mine = router_best_(keys, 0, n);
    for (int j = 0; j < most; j++) {
        int best = (int)~(unsigned)router_best_of_warp_(mine);
        if (best % WARP == (int)threadIdx.x) {
            taken |= 1u << best / WARP;
            keys[best] = 0;
            mine = router_best_(keys, 0, n);
        }
    }
    return taken;
}

// the keys of groups that do not stay become 0; groups (s.groups) is room for their own
__device__ inline void router_keep_groups_(unsigned* keys, unsigned* groups, const float* choice, const RouterShape s) {
    const int width = s.E / s.groups, lane = threadIdx.x;
    for (int g = lane; g < s.groups; g += WARP) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * width; e < (g + 1) * width; e++) {
            float c = choice[e];
            second = c > first ? first : c > second ? c : second;
            first = c > first ? c : first;
        }
        groups[g] = router_key_(router_group_one(first, second));
    }
    router_take_(groups, s.groups, s.top_groups);  // a group that stays has 0 now
    __syncwarp();
    for (int e = lane; e < s.E; e += WARP) { keys[e] = groups[e / width] == 0 ? router_key_(choice[e]) : 0; }
}

// p of a row, to scores and to `row`, room of this warp
__device__ inline void router_scores_(float* scores, float* lse, float* row, const float* logits, const RouterShape s) {
    const int lane = threadIdx.x, E = s.E;
    float largest = -INFINITY, sum = 0.0f;
    if (s.score != ROUTER_SOFTMAX) {
        for (int e = lane; e < E; e += WARP) { scores[e] = row[e] = router_score_one(logits[e], s.score); }
        return;
    }
    for (int e = lane; e < E; e += WARP) {
        row[e] = logits[e];
        largest = row[e] > largest ? row[e] : largest;
    }
    largest = row_max(largest);
    for (int e = lane; e - lane < E; e += WARP) {
        float x = e < E ? fm_exp(row[e] - largest) : 0.0f;
        if (e < E) { row[e] = x; }
        sum = row_add(sum, x);
    }
    sum = row_total(sum);
    for (int e = lane; e < E; e += WARP) { scores[e] = row[e] = row[e] / sum; }
    if (lse && lane == 0) { *lse = largest + fm_log(sum); }
}

// the chosen experts, ascending; row: p, then room. Its second half, of E floats, is used with groups only
__device__ inline void router_choose_(int* experts, float* row, const float* bias, const RouterShape s) {
    const int lane = threadIdx.x, E = s.E;
    unsigned* keys = reinterpret_cast<unsigned*>(s.groups > 1 ? row + E : row);
    for (int e = lane; e < E; e += WARP) {
        float choice = router_choice_one(row[e], bias ? bias[e] : 0.0f);
        if (s.groups > 1) {
            row[e] = choice;
        } else {
            keys[e] = router_key_(choice);
        }
    }
    if (s.groups > 1) {
        __syncwarp();
        router_keep_groups_(keys, keys + E, row, s);
    }
    unsigned taken = router_take_(keys, E, s.k);
    for (int i = 0, n = 0; i * WARP < E; i++) {
        unsigned lanes = __ballot_sync(ALL_LANES, taken >> i & 1);
        if (taken >> i & 1) { experts[n + __popc(lanes & ((1u << lane) - 1))] = i * WARP + lane; }
        n += __popc(lanes);
    }
}

// the sum of x of lanes 0 .. n-1, in order in both builds
__device__ inline float router_chain_(float x, int n) {
    float sum = 0.0f;
    for (int j = 0; j < n; j++) { sum += __shfl_sync(ALL_LANES, x, j); }
    return sum;
}

// floats of shared memory that a row needs
static inline int router_room_(const RouterShape* s) { return s->groups > 1 ? 2 * s->E + s->groups : s->E; }

__global__ static void router_forward_kernel(int* experts, float* weights, float* scores, float* lse,
                                             const float* logits, const float* bias, const int* given, RouterShape s,
                                             int N, int room) {
    extern __shared__ float router_rows[];
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y, first = n * s.E, pair = n * s.k + threadIdx.x;
    const int lane = threadIdx.x;
    if (n >= (size_t)N) { return; }  // a warp shares threadIdx.y, so it leaves whole and shuffles stay legal
    float* row = router_rows + (size_t)threadIdx.y * room;
    router_scores_(scores + first, lse ? lse + n : NULL, row, logits + first, s);
    if (given) {
        if (lane < s.k) { experts[pair] = given[pair]; }
    } else {
        router_choose_(experts + n * s.k, row, bias, s);
    }
    __syncwarp();  // lane j reads what others wrote: the expert of pair j, and its score
    float p = lane < s.k ? scores[first + experts[pair]] : 0.0f;
    float below = router_below_one(router_chain_(p, s.k), s);
    if (lane < s.k) { weights[pair] = router_weight_one(p, below, s); }
}

static inline void router_forward(int* experts, float* weights, float* scores, float* lse, const float* logits,
                                  const float* bias, const int* given, const RouterShape* s, int N, const Device* dev) {
    router_check(s);
    if (N == 0) { return; }
    const int room = router_room_(s), rows = 48 * 1024 / 4 / room, at_once = rows < ROUTER_ROWS ? rows : ROUTER_ROWS;
    dim3 block(WARP, (unsigned)at_once);
    router_forward_kernel<<<(unsigned)ceil_div(N, at_once), block, sizeof(float) * room * at_once, dev->stream>>>(
        experts, weights, scores, lse, logits, bias, given, *s, N, room);
    cudaCheck(cudaGetLastError());
}

// ---- CUDA: statistics ----

// counts (E) start as 0. Whole numbers: atomics in any order give the same
__global__ static void router_count_kernel(int* counts, const int* experts, int n, int E) {
    __shared__ int count[ROUTER_MOST_EXPERTS];
    for (int e = threadIdx.x; e < E; e += blockDim.x) { count[e] = 0; }
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        atomicAdd(&count[experts[i]], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        if (count[e] > 0) { atomicAdd(&counts[e], count[e]); }
    }
}

// what P divides the scores of a row by
__global__ static void router_row_totals_kernel(float* totals, const float* scores, int N, int E) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    const int lane = threadIdx.x;
    if (n >= (size_t)N) { return; }
    float sum = 0.0f;
    for (int e = lane; e - lane < E; e += WARP) { sum = row_add(sum, e < E ? scores[n * E + e] : 0.0f); }
    sum = row_total(sum);
    if (lane == 0) { totals[n] = sum + ROUTER_TINY; }
}

// sums of lse^2 and of largest weights, and how many of these are sure, over the rows first .. last - 1; one warp
__device__ inline void router_sum_rows_(float* sums, const float* weights, const float* lse, const RouterShape s,
                                        int first, int last) {
    const int lane = threadIdx.x;
    float squares = 0.0f, tops = 0.0f;
    int n_sure = 0;
    for (int n = first + lane; n - lane < last; n += WARP) {
        float l = lse && n < last ? lse[n] : 0.0f, top = 0.0f;
        if (n < last) {
            const float* w = weights + (size_t)n * s.k;
            top = w[0];
            for (int j = 1; j < s.k; j++) { top = w[j] > top ? w[j] : top; }
        }
        squares = row_madd(l, l, squares);
        tops = row_add(tops, top);
        n_sure += __popc(__ballot_sync(ALL_LANES, n < last && top > 0.9f * s.factor));
    }
    squares = row_total(squares);
    tops = row_total(tops);
    if (lane == 0) { sums[0] = squares, sums[1] = tops, sums[2] = (float)n_sure; }
}

// Sums over the rows of a piece: parts (pieces, E + 3). Blocks have ROUTER_COLUMNS experts, a thread each; the last
// block of a piece has what is summed beside them
__global__ static void router_parts_kernel(float* parts, const float* weights, const float* scores, const float* lse,
                                           const float* totals, RouterShape s, int N, int piece) {
    const int first = (int)blockIdx.y * piece, last = first + min(piece, N - first), E = s.E;
    const int e = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0.0f, *part = parts + (size_t)blockIdx.y * (E + 3);
    if (blockIdx.x == gridDim.x - 1) {
        if (threadIdx.x < WARP) { router_sum_rows_(part + E, weights, lse, s, first, last); }
        return;
    }
    if (e >= E) { return; }
    #pragma unroll 8
    for (int n = first; n < last; n++) {
        float p = scores[(size_t)n * E + e];
        sum += totals ? p / totals[n] : p;
    }
    part[e] = sum;
}

// one block: the pieces are added in order, and the balance is made of their sums
__global__ static void router_finish_kernel(float* statistics, const int* counts, const float* parts, int n_pieces,
                                            RouterShape s, int N) {
    const int E = s.E;
    float balance = 0.0f;
    for (int e = threadIdx.x; e < E + 3; e += blockDim.x) {
        float sum = 0.0f;
        #pragma unroll 8
        for (int i = 0; i < n_pieces; i++) { sum += parts[(size_t)i * (E + 3) + e]; }
        // behind the means stands the balance
        statistics[e < E ? E + e : E + e + 1] = sum / (float)N;
        if (e < E) { statistics[e] = (float)counts[e]; }
    }
    __syncthreads();
    if (threadIdx.x >= WARP) { return; }
    for (int lane = threadIdx.x, e = lane; e - lane < E; e += WARP) {
        float f = e < E ? router_share_one(statistics[e], N, s.k) : 0.0f;
        balance = row_madd(f, e < E ? statistics[E + e] : 0.0f, balance);
    }
    balance = row_total(balance);
    if (threadIdx.x == 0) { statistics[2 * E + ROUTER_BALANCE] = (float)E * balance; }
}

static inline void router_statistics(float* statistics, const int* experts, const float* weights, const float* scores,
                                     const float* lse, const RouterShape* s, int N, const Device* dev) {
#ifdef EXACT
    const int piece = N;
#else
    const int piece = ROUTER_PIECE;
#endif
    const int E = s->E, n_pairs = N * s->k, n_pieces = (int)ceil_div(N, piece), threads = 256;
    float* parts = device_workspace(dev, sizeof(float) * ((size_t)n_pieces * (E + 3) + N) + sizeof(int) * (size_t)E);
    float* totals = s->score == ROUTER_SOFTMAX ? NULL : parts + (size_t)n_pieces * (E + 3);
    int* counts = (int*)(parts + (size_t)n_pieces * (E + 3) + N);
    device_zero(counts, sizeof(int) * (size_t)E, dev);
    router_count_kernel<<<(unsigned)ceil_div(n_pairs, 4 * threads), threads, 0, dev->stream>>>(counts, experts, n_pairs,
                                                                                             E);
    if (totals) {
        dim3 block(WARP, ROUTER_ROWS);
        router_row_totals_kernel<<<(unsigned)ceil_div(N, ROUTER_ROWS), block, 0, dev->stream>>>(totals, scores, N, E);
    }
    dim3 grid((unsigned)ceil_div(E, ROUTER_COLUMNS) + 1, (unsigned)n_pieces);
    router_parts_kernel<<<grid, ROUTER_COLUMNS, 0, dev->stream>>>(parts, weights, scores, lse, totals, *s, N, piece);
    router_finish_kernel<<<1, threads, 0, dev->stream>>>(statistics, counts, parts, n_pieces, *s, N);
    cudaCheck(cudaGetLastError());
}

// one block; statistics (layers, length)
__global__ static void router_pool_kernel(float* pooled, const float* statistics, int layers, const RouterShape s,
                                          int N) {
    const int length = 2 * s.E + ROUTER_TOTALS;
    for (int i = threadIdx.x; i < length; i += blockDim.x) {
        float sum = 0.0f;
        for (int l = 0; l < layers; l++) { sum += statistics[(size_t)l * length + i]; }
        pooled[i] = sum / (float)layers;
    }
    __syncthreads();
    if (threadIdx.x > 0) { return; }
    float balance = 0.0f;
    for (int e = 0; e < s.E; e++) { balance = madd(router_share_one(pooled[e], N, s.k), pooled[s.E + e], balance); }
    pooled[2 * s.E + ROUTER_BALANCE] = (float)s.E * balance;
}

static inline void router_pool(float* pooled, const float* statistics, int layers, const RouterShape* s, int N,
                               const Device* dev) {
    router_pool_kernel<<<1, 256, 0, dev->stream>>>(pooled, statistics, layers, *s, N);
    cudaCheck(cudaGetLastError());
}

// one thread: a chain of B numbers
__global__ static void router_mean_balance_kernel(float* statistics, const float* of_sequences, int B, int E) {
    const size_t n = 2 * (size_t)E + ROUTER_TOTALS;
    float sum = 0.0f;
    for (int b = 0; b < B; b++) { sum += of_sequences[(size_t)b * n + 2 * (size_t)E + ROUTER_BALANCE]; }
    statistics[2 * E + ROUTER_BALANCE] = sum / (float)B;
}

static inline void router_mean_balance(float* statistics, const float* of_sequences, int B, int E, const Device* dev) {
    router_mean_balance_kernel<<<1, 1, 0, dev->stream>>>(statistics, of_sequences, B, E);
    cudaCheck(cudaGetLastError());
}

// ---- CUDA: backward ----

// dp of the chosen experts of row n is added to dp; each lane adds to its own experts, j ascending
__device__ inline void router_add_chosen_(float* dp, const float* dweights, const int* experts, const float* weights,
                                          const float* scores, const RouterShape s) {
    const int lane = threadIdx.x, mine = lane < s.k;
    const int expert = mine ? experts[lane] : 0;
    const float dw = mine ? dweights[lane] : 0.0f;
    float below = 1.0f, dot = 0.0f;
    if (s.renormalize) {
        float v = mine ? router_unscaled_one(weights[lane], s) : 0.0f;
        below = router_below_one(router_chain_(mine ? scores[expert] : 0.0f, s.k), s);
        for (int j = 0; j < s.k; j++) {
            dot = madd(__shfl_sync(ALL_LANES, v, j), __shfl_sync(ALL_LANES, dw, j), dot);
        }
    }
    const float d = router_chosen_one(dw, dot, below, s);
    for (int j = 0; j < s.k; j++) {
        int e = __shfl_sync(ALL_LANES, expert, j);
        float d_j = __shfl_sync(ALL_LANES, d, j);
        if (e % WARP == lane) { dp[e] += d_j; }
    }
}

// dp of the balance loss is added; q (E)
__device__ inline void router_add_balance_(float* dp, const float* scores, const float* q, const RouterShape s) {
    const int lane = threadIdx.x, E = s.E;
    float total = 1.0f, sum = 0.0f, dot = 0.0f;
    if (s.score != ROUTER_SOFTMAX) {
        for (int e = lane; e - lane < E; e += WARP) { sum = row_add(sum, e < E ? scores[e] : 0.0f); }
        total = row_total(sum) + ROUTER_TINY;
        for (int e = lane; e - lane < E; e += WARP) {
            dot = row_madd(e < E ? q[e] : -0.0f, e < E ? scores[e] / total : 0.0f, dot);
        }
        dot = row_total(dot);
    }
    for (int e = lane; e < E; e += WARP) { dp[e] += s.score == ROUTER_SOFTMAX ? q[e] : (q[e] - dot) / total; }
}

// from dp to dlogits of a row; z: what stands before p in the z-loss
__device__ inline void router_through_scores_(float* dlogits, const float* dp, const float* scores, const float* logits,
                                              const float* z, const RouterShape s) {
    const int lane = threadIdx.x, E = s.E;
    float dot = 0.0f;
    if (s.score != ROUTER_SOFTMAX) {
        for (int e = lane; e < E; e += WARP) {
            float logit = s.score == ROUTER_SIGMOID ? 0.0f : logits[e];
            dlogits[e] = dp[e] * router_slope_one(logit, scores[e], s.score);
        }
        return;
    }
    for (int e = lane; e - lane < E; e += WARP) {
        dot = row_madd(e < E ? scores[e] : -0.0f, e < E ? dp[e] : 0.0f, dot);
    }
    dot = row_total(dot);
    for (int e = lane; e < E; e += WARP) {
        float p = scores[e], dz = p * (dp[e] - dot);
        dlogits[e] = z ? madd(*z, p, dz) : dz;
    }
}

// shared memory: dp of each row of the block, then q
__global__ static void router_backward_kernel(float* dlogits, const float* dweights, const int* experts,
                                              const float* weights, const float* scores, const float* lse,
                                              const float* logits, const float* statistics, float balance_weight,
                                              float z_weight, RouterShape s, int N) {
    extern __shared__ float router_gradients[];
    const int lane = threadIdx.x, E = s.E;
    float *dp = router_gradients + (size_t)threadIdx.y * E, *q = router_gradients + (size_t)blockDim.y * E;
    for (int e = (int)threadIdx.y * WARP + lane; balance_weight != 0.0f && e < E; e += WARP * blockDim.y) {
        q[e] = router_balance_one(statistics[e], balance_weight, N, s);
    }
    __syncthreads();
    for (size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y; n < (size_t)N; n += gridDim.x * blockDim.y) {
        const size_t first = n * E, pair = n * s.k;
        for (int e = lane; e < E; e += WARP) { dp[e] = 0.0f; }
        router_add_chosen_(dp, dweights + pair, experts + pair, s.renormalize ? weights + pair : NULL, scores + first,
                           s);
        if (balance_weight != 0.0f) { router_add_balance_(dp, scores + first, q, s); }
        float z = z_weight != 0.0f ? ((2.0f * z_weight) / (float)N) * lse[n] : 0.0f;
        router_through_scores_(dlogits + first, dp, scores + first, logits ? logits + first : NULL,
                               z_weight != 0.0f ? &z : NULL, s);
    }
}

static inline void router_backward(float* dlogits, const float* dweights, const int* experts, const float* weights,
                                   const float* scores, const float* lse, const float* logits, const float* statistics,
                                   float balance_weight, float z_weight, const RouterShape* s, int N,
                                   const Device* dev) {
    const int64_t blocks = ceil_div(N, ROUTER_ROWS), at_once = (int64_t)dev->n_sms * (2048 / (WARP * ROUTER_ROWS));
    router_check_losses_(s, z_weight);
    if (N == 0) { return; }
    dim3 block(WARP, ROUTER_ROWS);
    router_backward_kernel<<<(unsigned)(blocks < at_once ? blocks : at_once), block,
                             sizeof(float) * (size_t)s->E * (ROUTER_ROWS + 1), dev->stream>>>(
        dlogits, dweights, experts, weights, scores, lse, logits, statistics, balance_weight, z_weight, *s, N);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_ROUTER_H
