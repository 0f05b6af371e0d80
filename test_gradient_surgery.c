/*
Promises of llmc/ops/gradient_surgery.h: numbers computed elsewhere, PCGrad's closed form, CAGrad's optimum, GradNorm's
derivative and what it balances; and that threads, ranges and what lies between them change no bit.
*/
#include "llmc/ops/gradient_surgery.h"
#include "llmc/test/test.h"

static SurgeryConfig config_of(SurgeryMethod method, float epsilon, float lambda, float alpha) {
    SurgeryConfig c = {method, epsilon, lambda, alpha, {0, 0}, 0};
    return c;
}

// surgery on b = g[0] and f = g[1], n floats in one range; out (n)
static SurgeryReport operate(Test* t, float* out, const float* f, const float* b, size_t n,
                             const SurgeryConfig* config) {
    const SurgeryRange range = {0, n};
    const float losses[2] = {1.0f, 1.0f};
    float *f_copy = copied_array(f, n), *g[2] = {out, f_copy};
    Device dev = test_device(1);
    Surgery s;
    SurgeryReport report;
    memcpy(out, b, sizeof(float) * n);
    surgery_init(&s, config, &range, 1, 2);
    surgery_apply(&report, g, &s, 0, losses, &dev);
    check_bits(t, "f", f_copy, f, n);
    surgery_free(&s), free(f_copy);
    device_free(&dev);
    return report;
}

static void check_number(Test* t, const char* what, double found, double want, double tolerance) {
    check(t, fabs(found - want) <= tolerance, "%s: found %.12g, expected %.12g", what, found, want);
}

static double dot(const double* a, const double* b, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }
    return sum;
}

// Gram matrix of n_tasks vectors (n_tasks, n)
static void gram_of(double* gram, const double* vectors, int n_tasks, int n) {
    for (int i = 0; i < n_tasks * n_tasks; i++) {
        gram[i] = dot(vectors + i / n_tasks * n, vectors + i % n_tasks * n, n);
    }
}

static double* random_doubles(int n, uint64_t seed) {
    double* x = (double*)new_array(n, sizeof(double));
    for (int i = 0; i < n; i++) { x[i] = (double)(int64_t)splitmix64(seed, (uint64_t)i) * 0x1p-63; }
    return x;
}

// ---- numbers computed elsewhere ----

static const float F[3] = {1.0f, -2.0f, 0.5f}, B[3] = {-1.0f, 1.5f, 1.0f};

static void test_fixture(Test* t) {
    const struct {
        const char* method;
        float lambda, alpha;
        double want[3];
    } cases[] = {
        {"none", 0.4f, 0.2f, {0.0, -0.5, 1.5}},
        {"pcgrad", 0.4f, 0.2f, {-0.15686275, -0.59803922, 2.6568627}},
        {"cagrad", 0.5f, 0.2f, {-0.089757918, -0.21317506, 1.1331937}},
        {"cagrad", 0.0f, 0.2f, {0.0, -0.25, 0.75}},
        {"orthograd", 0.4f, 0.2f, {0.17647059 - 1.0, -0.76470588 + 1.5, 1.3235294 + 1.0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SurgeryConfig c = config_of((SurgeryMethod)choice_find(SURGERY_NAMES, cases[i].method), 0.0f, cases[i].lambda,
                                    cases[i].alpha);
        float out[3];
        SurgeryReport report = operate(t, out, F, B, 3, &c);
        // |out| < 4: half a last place, and the eight digits given
        check_close(t, cases[i].method, out, cases[i].want, 3, 2e-7);
        check(t, report.dots[0][1] == -3.5 && report.dots[0][0] == 4.25 && report.dots[1][1] == 5.25
              && report.n_conflicts == 1, "%s: dots %g %g %g, %d conflicts", cases[i].method, report.dots[0][1],
                  report.dots[0][0], report.dots[1][1], report.n_conflicts);
    }
}

static void test_fixture_cagrad(Test* t) {
    // the others by NumPy, on a grid of 5e-7
    const double cases[][2] = {{0.2, 0.2312385}, {0.5, 0.40669765}, {0.9, 0.4359285}};
    for (int i = 0; i < 3; i++) {
        SurgeryConfig c = config_of(SURGERY_CAGRAD, 0.0f, (float)cases[i][0], 0.2f);
        float out[3];
        const double gram[4] = {4.25, -3.5, -3.5, 5.25};
        double d[3], weight[2], f[3] = {1.0, -2.0, 0.5}, b[3] = {-1.0, 1.5, 1.0};
        SurgeryReport report = operate(t, out, F, B, 3, &c);
        const double x = surgery_cagrad_weights(weight, gram, (double)c.cagrad_lambda);
        check_number(t, "x", x, cases[i][1], i == 1 ? 5e-9 : 5e-7);
        for (int k = 0; k < 3; k++) { d[k] = report.weight[0] * b[k] + report.weight[1] * f[k]; }
        check_number(t, "d.f = d.b", dot(d, f, 3), dot(d, b, 3), 1e-12);
        if (i == 1) { check_number(t, "d.f", dot(d, f, 3), 0.9032, 5e-5); }
    }
}

static void test_fixture_gradnorm(Test* t) {
    const double norms[2] = {2.0, 0.5};
    const float losses[2] = {0.6f, 0.9f};
    GradNorm s;
    double targets[2];
    float slopes[2];
    gradnorm_init(&s);
    s.first_loss[0] = s.first_loss[1] = 1.0f;
    gradnorm_targets(targets, &s, norms, losses, 1.5f, 2);
    gradnorm_slopes(slopes, &s, norms, losses, 1.5f, 2);
    check_number(t, "T[0]", targets[0], 0.89442719, 2e-7);  // a power of r in float
    check_number(t, "T[1]", targets[1], 1.6431677, 4e-7);
    check_number(t, "sum |G - T|", fabs(2.0 - targets[0]) + fabs(0.5 - targets[1]), 2.2487405, 4e-7);
    check(t, slopes[0] == 2.0f && slopes[1] == -0.5f, "slopes: found %g %g", (double)slopes[0], (double)slopes[1]);
    for (int i = 0; i < 2; i++) { s.weight[i] -= 0.025f * slopes[i]; }
    gradnorm_rescale(&s, 2);
    check_number(t, "w[0]", (double)s.weight[0], 0.96815287, 1.2e-7);
    check_number(t, "w[1]", (double)s.weight[1], 1.0318471, 1.2e-7);
}

// ---- PCGrad ----

// (1 - f.b / |f|^2) f + (1 - f.b / |b|^2) b where they are in conflict
static void test_pcgrad_pairs(Test* t) {
    enum { N = 6 };
    int n_conflicts = 0;
    for (uint64_t pair = 0; pair < 200; pair++) {
        double *v = random_doubles(2 * N, pair), gram[4], weight[2], result[N];
        gram_of(gram, v, 2, N);
        const int conflict = gram[1] < 0.0;
        surgery_pcgrad_weights(weight, gram, 2, 0.0, 1, pair);
        double want[2] = {conflict ? 1.0 - gram[1] / gram[0] : 1.0, conflict ? 1.0 - gram[1] / gram[3] : 1.0};
        for (int k = 0; k < 2; k++) { check_number(t, "weight", weight[k], want[k], 1e-12 * want[k]); }
        for (int i = 0; i < N; i++) { result[i] = weight[0] * v[i] + weight[1] * v[N + i]; }
        for (int k = 0; k < 2; k++) {
            check(t, dot(result, v + k * N, N) >= 0.0, "pair %d: the sum opposes task %d", (int)pair, k);
        }
        n_conflicts += conflict;
        free(v);
    }
    check(t, n_conflicts > 50 && n_conflicts < 150, "%d conflicts among 200 pairs: the test is blind", n_conflicts);
}

// the same in floats, through the vectors
static void test_pcgrad_floats(Test* t) {
    for (uint64_t pair = 0; pair < 50; pair++) {
        enum { N = 33 };
        float *f = random_array(N, 1.0f, 2 * pair), *b = random_array(N, 1.0f, 2 * pair + 1), out[N];
        double *v = double_array(b, N), *vf = double_array(f, N), fb = dot(vf, v, N), ff = dot(vf, vf, N),
            bb = dot(v, v, N);
        SurgeryConfig c = config_of(SURGERY_PCGRAD, 0.0f, 0.4f, 0.2f);
        operate(t, out, f, b, N, &c);
        for (int i = 0; i < N; i++) {
            v[i] = fb < 0.0 ? (1.0 - fb / ff) * vf[i] + (1.0 - fb / bb) * v[i] : vf[i] + v[i];
        }
        check_close(t, "pcgrad", out, v, N, 4.0 * 0x1p-24);  // |out| < 4, rounded once: 2^-24 of its binade
        free(f), free(b), free(v), free(vf);
    }
}

// PCGrad as the paper writes it, on vectors, task i taking the others in the orders[i]-th of the two orders
static void pcgrad_spelled(double* sum, const double* g, int n, const int* orders) {
    double v[8];
    for (int k = 0; k < n; k++) { sum[k] = 0.0; }
    for (int i = 0; i < 3; i++) {
        memcpy(v, g + i * n, sizeof(double) * n);
        for (int next = 0; next < 2; next++) {
            const double* other = g + (i + 1 + (next ^ orders[i])) % 3 * n;
            double opposed = dot(v, other, n), square = dot(other, other, n);
            for (int k = 0; k < n && opposed < 0.0; k++) { v[k] -= opposed / square * other[k]; }
        }
        for (int k = 0; k < n; k++) { sum[k] += v[k]; }
    }
}

static double distance(const double* a, const double* b, int n) {
    double worst = 0.0;
    for (int i = 0; i < n; i++) { worst = fmax(worst, fabs(a[i] - b[i])); }
    return worst;
}

// three gradients in 5 dimensions, 200 steps: each result is that of one of the eight orders; n_seen (8) counts which
static void check_orders(Test* t, int* n_seen, const double* g, const double* gram) {
    enum { N = 5 };
    double weight[3], result[N], want[8][N];
    for (int o = 0; o < 8; o++) {
        const int orders[3] = {o & 1, o >> 1 & 1, o >> 2};
        pcgrad_spelled(want[o], g, N, orders);
    }
    for (uint64_t step = 0; step < 200; step++) {
        int n_equal = 0;
        surgery_pcgrad_weights(weight, gram, 3, 0.0, 3, step);
        for (int i = 0; i < N; i++) { result[i] = weight[0] * g[i] + weight[1] * g[N + i] + weight[2] * g[2 * N + i]; }
        for (int o = 0; o < 8; o++) {
            int equal = distance(result, want[o], N) < 1e-12;
            n_seen[o] += equal;
            n_equal += equal;
        }
        check(t, n_equal >= 1, "step %d: the result of no order", (int)step);
    }
}

// all eight orders come, where all three pairs are in conflict
static void test_pcgrad_three(Test* t) {
    int n_sets = 0;
    for (uint64_t set = 0; set < 40; set++) {
        double *g = random_doubles(15, set), gram[9];
        int n_seen[8] = {0};
        gram_of(gram, g, 3, 5);
        check_orders(t, n_seen, g, gram);
        int all_conflict = gram[1] < 0.0 && gram[2] < 0.0 && gram[5] < 0.0;
        for (int o = 0; o < 8 && all_conflict; o++) {
            check(t, n_seen[o] > 5, "set %d: order %d came %d times", (int)set, o, n_seen[o]);
        }
        n_sets += all_conflict;
        free(g);
    }
    check(t, n_sets >= 2, "only %d sets in which all pairs are in conflict", n_sets);
}

// five tasks: each order is a permutation of the other four, and each of them comes first equally often
static void test_pcgrad_order(Test* t) {
    int order[4], again[4], n_first[5] = {0};
    for (uint64_t step = 0; step < 4000; step++) {
        const int i = (int)(step % 5);
        int seen = 1 << i;
        surgery_pcgrad_order_(order, 5, i, 9, step);
        surgery_pcgrad_order_(again, 5, i, 9, step);
        for (int k = 0; k < 4; k++) { seen |= 1 << order[k]; }
        check(t, seen == 31 && memcmp(order, again, sizeof order) == 0, "task %d: order %d %d %d %d", i, order[0],
              order[1], order[2], order[3]);
        n_first[order[0]]++;
    }
    // 800 each; binomial, standard deviation sqrt(3200 / 4 * 3 / 4) = 24.5; five of them
    for (int k = 0; k < 5; k++) { check(t, abs(n_first[k] - 800) < 123, "task %d came first %d times", k, n_first[k]); }
}

// ---- CAGrad ----

// the smaller one of d.b and d.f
static double worse(const double* d, const double* v, int n) { return fmin(dot(d, v, n), dot(d, v + n, n)); }

// d = g0 + radius (cos a u + sin a w), u and w orthonormal in the plane of b and f: no angle is better
static void check_cagrad(Test* t, const double* v, int n, double c) {
    double gram[4], weight[2], g0[8], d[8], off[8], u[8], w[8], candidate[8], best = -INFINITY;
    gram_of(gram, v, 2, n);
    double x = surgery_cagrad_weights(weight, gram, c);
    for (int i = 0; i < n; i++) {
        g0[i] = 0.5 * (v[i] + v[n + i]);
        d[i] = weight[0] * v[i] + weight[1] * v[n + i];
        off[i] = d[i] - g0[i];
        u[i] = v[i] / sqrt(gram[0]);
        w[i] = v[n + i] - gram[1] / gram[0] * v[i];
    }
    const double radius = c * sqrt(dot(g0, g0, n)), w_length = sqrt(dot(w, w, n)), found = worse(d, v, n);
    check_number(t, "|d - g0|", sqrt(dot(off, off, n)), radius, 1e-12);
    for (int step = 0; step < 10000; step++) {
        double angle = step * 2e-4 * acos(-1.0);
        for (int i = 0; i < n; i++) {
            candidate[i] = g0[i] + radius * (cos(angle) * u[i] + sin(angle) / w_length * w[i]);
        }
        best = fmax(best, worse(candidate, v, n));
    }
    // between two angles the optimum may be missed by radius * 3.2e-4 * the longer gradient
    check(t, found >= best - 1e-12 && found <= best + radius * 3.2e-4 * sqrt(fmax(gram[0], gram[3])),
          "c %g: min %.12g, the search has %.12g", c, found, best);
    if (x > 0.0 && x < 1.0) { check_number(t, "d.f = d.b", dot(d, v, n), dot(d, v + n, n), 1e-9); }
}

static void test_cagrad_best(Test* t) {
    for (uint64_t pair = 0; pair < 20; pair++) {
        double* v = random_doubles(14, pair + 100);
        // unlike lengths bring optima at x = 0 and 1
        for (int i = 0; i < 7; i++) { v[i] *= pair % 3 == 0 ? 5.0 : 1.0; }
        for (int i = 0; i < 4; i++) { check_cagrad(t, v, 7, 0.05 + 0.3 * i); }
        free(v);
    }
}

static void test_cagrad_edges(Test* t) {
    const struct { double dots[4], want[2]; } cases[] = {
        {{4.0, 0.0, 0.0, 0.0}, {0.5, 1.0}},    // f = 0: g_x is f, no direction; the weight of f is that of nothing
        {{0.0, 0.0, 0.0, 4.0}, {1.0, 0.5}},    // b = 0
        {{0.0, 0.0, 0.0, 0.0}, {0.5, 0.5}},    // both
        {{4.0, 4.0, 4.0, 4.0}, {0.75, 0.75}},  // one vector: (1 + c) of it in all
        {{1.0, -1.0, -1.0, 1.0}, {0.5, 0.5}},  // opposed: nothing helps both
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double weight[2], sum = 0.0;
        surgery_cagrad_weights(weight, cases[i].dots, 0.5);
        // only what has a length counts: compare the vectors, as multiples of a unit vector
        const double b = sqrt(cases[i].dots[0]), f = (cases[i].dots[1] < 0.0 ? -1.0 : 1.0) * sqrt(cases[i].dots[3]);
        sum = (weight[0] - cases[i].want[0]) * b + (weight[1] - cases[i].want[1]) * f;
        check(t, isfinite(weight[0]) && isfinite(weight[1]) && fabs(sum) < 1e-12, "case %zu: weights %g %g", i,
              weight[0], weight[1]);
    }
}

// ---- GradNorm ----

typedef struct {
    const double *norms, *targets;
} BalanceCase;

static double gradnorm_loss(const double* w, void* arg) {
    const BalanceCase* c = (const BalanceCase*)arg;
    double loss = 0.0;
    for (int i = 0; i < 3; i++) { loss += fabs(w[i] * c->norms[i] - c->targets[i]); }
    return loss;
}

static void test_gradnorm_slope(Test* t) {
    const float losses[3] = {2.0f, 0.3f, 1.5f};
    const double norms[3] = {1.7, 0.4, 3.0};
    GradNorm s;
    gradnorm_init(&s);
    s.weight[0] = 0.8f, s.weight[1] = 1.3f, s.weight[2] = 0.9f;
    s.first_loss[0] = 2.5f, s.first_loss[1] = 2.0f, s.first_loss[2] = 1.6f;
    float slopes[3];
    double targets[3], *w = double_array(s.weight, 3);
    gradnorm_targets(targets, &s, norms, losses, 0.7f, 3);
    gradnorm_slopes(slopes, &s, norms, losses, 0.7f, 3);
    BalanceCase c = {norms, targets};
    double* want = finite_differences(gradnorm_loss, w, 3, &c);
    check_close(t, "slopes", slopes, want, 3, 1e-6);
    const double mean = ((double)s.weight[0] * 1.7 + (double)s.weight[1] * 0.4 + (double)s.weight[2] * 3.0) / 3.0;
    const double ratios[3] = {2.0 / 2.5, (double)0.3f / 2.0, 1.5 / (double)1.6f},
        mean_ratio = (ratios[0] + ratios[1] + ratios[2]) / 3.0;
    for (int i = 0; i < 3; i++) {
        check_number(t, "target", targets[i], mean * pow(ratios[i] / mean_ratio, (double)0.7f), 1e-6);
    }
    free(w), free(want);
}

// Two regressions on one vector p of 4: scale[i] / 2 |p - target[i]|^2. Their losses begin 1 : 30
typedef struct {
    float p[4], gradient[2][4], losses[2];
} Regressions;

static void regress(Regressions* r) {
    const float targets[2][4] = {{1.0f, 0.5f, -0.5f, 2.0f}, {-1.0f, 1.5f, 0.5f, 1.0f}}, scale[2] = {1.0f, 30.0f};
    for (int k = 0; k < 2; k++) {
        r->losses[k] = 0.0f;
        for (int i = 0; i < 4; i++) {
            r->gradient[k][i] = scale[k] * (r->p[i] - targets[k][i]);
            r->losses[k] += 0.5f * scale[k] * (r->p[i] - targets[k][i]) * (r->p[i] - targets[k][i]);
        }
    }
}

// trains p with surgery's gradnorm; ratios (2): L / L0 at the end. lr 0 leaves p alone
static Surgery regressions_trained(double* ratios, float alpha, float lr, int n_steps, const Device* dev) {
    const SurgeryRange range = {0, 4};
    SurgeryConfig c = config_of(SURGERY_GRADNORM, 0.0f, 0.4f, alpha);
    Regressions r;
    Surgery s;
    SurgeryReport report;
    memset(&r, 0, sizeof r);
    surgery_init(&s, &c, &range, 1, 2);
    for (int step = 0; step < n_steps; step++) {
        float* g[2] = {r.gradient[0], r.gradient[1]};
        regress(&r);
        surgery_apply(&report, g, &s, (uint64_t)step, r.losses, dev);
        for (int i = 0; i < 4; i++) { r.p[i] -= lr * g[0][i]; }
    }
    for (int k = 0; k < 2; k++) { ratios[k] = (double)r.losses[k] / (double)s.gradnorm.first_loss[k]; }
    return s;
}

static void test_gradnorm_balance(Test* t) {
    double ratios[2], norms[2];
    Device dev = test_device(1);
    Surgery s = regressions_trained(ratios, 1.5f, 0.002f, 2000, &dev);
    // w goes to and fro around the balance, by up to the rate of its Adam
    check(t, fabs(ratios[0] - ratios[1]) < 0.01 && ratios[0] < 0.36, "alpha 1.5: L / L0 are %g and %g", ratios[0],
          ratios[1]);
    check(t, s.gradnorm.weight[0] > 10.0f * s.gradnorm.weight[1], "weights %g and %g", (double)s.gradnorm.weight[0],
          (double)s.gradnorm.weight[1]);
    surgery_free(&s);
    s = regressions_trained(ratios, 0.0f, 0.0f, 1000, &dev);  // p stays: the weights alone make the norms equal
    Regressions r;
    memset(&r, 0, sizeof r);
    regress(&r);
    for (int k = 0; k < 2; k++) {
        norms[k] = (double)s.gradnorm.weight[k] * sqrt(surgery_dot_chunk(r.gradient[k], r.gradient[k], 4));
    }
    check(t, fabs(norms[0] / norms[1] - 1.0) < 0.1, "alpha 0: norms %g and %g", norms[0], norms[1]);
    surgery_free(&s);
    device_free(&dev);
}

static void test_gradnorm_steps(Test* t) {
    const SurgeryRange ranges[2] = {{0, 3}, {3, 2}};
    SurgeryConfig c = config_of(SURGERY_GRADNORM, 0.0f, 0.4f, 1.0f);
    float b[5] = {1, 2, 3, 4, 5}, f[5] = {5, 4, 3, 2, 1}, *g[2] = {b, f}, losses[2] = {1.0f, 0.0f};
    Device dev = test_device(1);
    Surgery s;
    SurgeryReport report;
    c.norm_range.first = 3, c.norm_range.n = 1;  // |b| = 4, |f| = 2
    surgery_init(&s, &c, ranges, 2, 2);
    surgery_apply(&report, g, &s, 0, losses, &dev);
    check(t, b[0] == 6.0f && b[4] == 6.0f, "weights begin at 1: found %g %g", (double)b[0], (double)b[4]);
    check(t, s.gradnorm.n_updates == 0.0f && s.gradnorm.weight[0] == 1.0f, "w moved before every task had a loss");
    check(t, s.gradnorm.first_loss[0] == 1.0f && s.gradnorm.first_loss[1] == 0.0f, "first losses");
    GradNorm before = s.gradnorm;
    losses[1] = 2.0f, f[2] = NAN;
    surgery_apply(&report, g, &s, 1, losses, &dev);
    check(t, isnan(b[2]) && memcmp(&before, &s.gradnorm, sizeof before) == 0,
          "a NaN outside norm_range changed the state");
    // elsewhere than in norm_range the norms are equal
    for (int i = 0; i < 5; i++) { b[i] = (float)(1 + i), f[i] = (float)(5 - i); }
    surgery_apply(&report, g, &s, 2, losses, &dev);
    for (int i = 0; i < 5; i++) {
        check(t, b[i] == 6.0f, "the weights from before the step: [%d] found %g", i, (double)b[i]);
    }
    // r = 1, T = 3: Adam's first step is its rate against the sign, b is above; the sum stays 2
    check_number(t, "w[0]", (double)s.gradnorm.weight[0], 0.975, 2e-7);
    check_number(t, "w[1]", (double)s.gradnorm.weight[1], 1.025, 2e-7);
    surgery_free(&s);
    device_free(&dev);
}

// ---- any method ----

enum { N_RANGES = 7, ARENA = 30000 };
// lengths around a chunk, a block and a vector; gaps between most, none before the third; order is the caller's
static const SurgeryRange RANGES[N_RANGES] = {{5, 1}, {7, 7}, {14, 257}, {9000, 4096}, {300, 4097}, {20000, 9000},
                                              {14000, 0}};

// dot products and result as the plain loops have them
static void operate_ref(Test* t, float* const* g, const SurgeryReport* report, int n_tasks) {
    for (int i = 0; i < n_tasks * n_tasks; i++) {
        const float *x = g[i / n_tasks], *y = g[i % n_tasks];
        double want = surgery_dot_ref(x, y, RANGES, N_RANGES), found = report->dots[i / n_tasks][i % n_tasks],
            plain = 0.0, sizes = 0.0;
        for (int r = 0; r < N_RANGES; r++) {
            for (size_t j = RANGES[r].first; j < RANGES[r].first + RANGES[r].n; j++) {
                plain += (double)x[j] * (double)y[j];
                sizes += fabs((double)x[j] * (double)y[j]);
            }
        }
        check(t, memcmp(&want, &found, sizeof want) == 0, "dot product %d: found %.17g, expected %.17g", i, found,
              want);
        check_number(t, "dot product", found, plain, sizes * ARENA * 0x1p-53);
    }
    for (int r = 0; r < N_RANGES; r++) { surgery_sum_ref(g, report->weight, n_tasks, RANGES[r].first, RANGES[r].n); }
}

static void check_threads(Test* t, SurgeryMethod method, int n_tasks, int hard) {
    const float losses[3] = {1.0f, 2.0f, 3.0f};
    float *start[3], *g[3], *want = NULL;
    for (int k = 0; k < 3; k++) {
        start[k] = hard ? hard_array(ARENA, (uint64_t)k) : random_array(ARENA, 1.0f, (uint64_t)k);
        g[k] = filled_array(ARENA, 0.0f);
    }
    for (int i = 0; i < N_TEST_THREADS; i++) {
        char what[192];
        SurgeryConfig c = config_of(method, 1e-8f, 0.4f, 0.2f);
        SurgeryReport report;
        Surgery s;
        Device dev = test_device(test_threads(i));
        snprintf(what, sizeof what, "%s, %d tasks, %d threads", surgery_name(method).s, n_tasks, dev.n_threads);
        surgery_init(&s, &c, RANGES, N_RANGES, n_tasks);
        for (int k = 0; k < 3; k++) { memcpy(g[k], start[k], sizeof(float) * ARENA); }
        surgery_apply(&report, g, &s, 5, losses, &dev);
        if (!want) {
            float* ref[3] = {want = copied_array(start[0], ARENA), start[1], start[2]};
            operate_ref(t, ref, &report, n_tasks);
        }
        check_bits(t, what, g[0], want, ARENA);
        for (int k = 1; k < 3; k++) { check_bits(t, "gradients but the first", g[k], start[k], ARENA); }
        surgery_free(&s);
        device_free(&dev);
    }
    for (int k = 0; k < 3; k++) { free(start[k]), free(g[k]); }
    free(want);
}

static void test_bits(Test* t) {
    for (int method = 0; method < N_SURGERY_METHODS; method++) {
        const int any_number = method == SURGERY_NONE || method == SURGERY_PCGRAD || method == SURGERY_GRADNORM;
        for (int hard = 0; hard < 2; hard++) {
            for (int n_tasks = 2; n_tasks <= 2 + any_number; n_tasks++) {
                check_threads(t, (SurgeryMethod)method, n_tasks, hard);
            }
        }
    }
}

// two layers, of which only the second is in conflict: the methods look at the whole vector, the report counts layers
static void test_ranges(Test* t) {
    const SurgeryRange ranges[2] = {{0, 2}, {2, 3}};
    float b[5] = {1, 1, B[0], B[1], B[2]}, f[5] = {2, 3, F[0], F[1], F[2]}, *g[2] = {b, f};
    const double want[5] = {3.0, 4.0, 0.0, -0.5, 1.5};
    SurgeryConfig c = config_of(SURGERY_PCGRAD, 0.0f, 0.4f, 0.2f);
    Device dev = test_device(1);
    Surgery s;
    SurgeryReport report;
    surgery_init(&s, &c, ranges, 2, 2);
    surgery_apply(&report, g, &s, 0, NULL, &dev);
    check_close(t, "b + f", b, want, 5, 0.0);
    check(t, report.n_conflicts == 1 && report.dots[0][1] == 1.5, "%d conflicts, f.b %g", report.n_conflicts,
          report.dots[0][1]);
    check(t, s.range_dots[1] == 5.0 && s.range_dots[4 + 1] == -3.5, "f.b of the ranges: %g and %g", s.range_dots[1],
          s.range_dots[4 + 1]);
    surgery_free(&s);
    device_free(&dev);
}

static void test_edges(Test* t) {
    const float zeros[3] = {0}, with_nan[3] = {1.0f, NAN, 2.0f}, with_inf[3] = {1.0f, INFINITY, 2.0f};
    for (int method = 0; method < N_SURGERY_METHODS; method++) {
        const ShortText name = surgery_name((SurgeryMethod)method);
        SurgeryConfig c = config_of((SurgeryMethod)method, 0.0f, 0.4f, 0.2f);
        float out[3];
        operate(t, out, F, zeros, 3, &c);
        check(t, isfinite(out[0]) && isfinite(out[1]) && isfinite(out[2]), "%s: b = 0 gives %g", name.s,
              (double)out[0]);
        operate(t, out, zeros, B, 3, &c);
        check(t, isfinite(out[0]) && isfinite(out[1]) && isfinite(out[2]), "%s: f = 0 gives %g", name.s,
              (double)out[0]);
        operate(t, out, zeros, zeros, 3, &c);
        check(t, out[0] == 0.0f && out[1] == 0.0f && out[2] == 0.0f, "%s: nothing gives %g", name.s, (double)out[0]);
        operate(t, out, with_nan, B, 3, &c);
        check(t, isnan(out[1]), "%s: a NaN is lost", name.s);
        operate(t, out, F, with_inf, 3, &c);
        check(t, !isfinite(out[1]), "%s: an infinity is lost", name.s);
    }
}

static void test_one_task(Test* t) {
    float* x = hard_array(ARENA, 4);
    for (int method = 0; method < N_SURGERY_METHODS; method++) {
        SurgeryConfig c = config_of((SurgeryMethod)method, 0.0f, 0.4f, 0.2f);
        float* g[1] = {copied_array(x, ARENA)};
        Device dev = test_device(2);
        Surgery s;
        SurgeryReport report;
        surgery_init(&s, &c, RANGES, N_RANGES, 1);
        surgery_apply(&report, g, &s, 0, NULL, &dev);
        check_bits(t, surgery_name((SurgeryMethod)method).s, g[0], x, ARENA);
        surgery_free(&s), free(g[0]);
        device_free(&dev);
    }
    free(x);
}

// ---- names and options ----

static void test_names(Test* t) {
    const struct { const char* name; int method; } names[] = {
        {"none", SURGERY_NONE}, {"pcgrad", SURGERY_PCGRAD}, {"cagrad", SURGERY_CAGRAD}, {"gradnorm", SURGERY_GRADNORM},
        {"orthograd", SURGERY_ORTHOGRAD}, {"CAGradStep", SURGERY_CAGRAD}, {"PCGrad", SURGERY_PCGRAD}, {"mgda", -1},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const int found = choice_find(SURGERY_NAMES, names[i].name);
        check(t, found == names[i].method, "%s: expected %d, found %d", names[i].name, names[i].method, found);
        const int is_name = i < N_SURGERY_METHODS;
        check(t, !is_name || !strcmp(surgery_name((SurgeryMethod)i).s, names[i].name), "%s: its name is %s",
              names[i].name, is_name ? surgery_name((SurgeryMethod)i).s : "");
    }
}

static void start_with(void* config) {
    const SurgeryRange range = {0, 4};
    Surgery s;
    surgery_init(&s, (const SurgeryConfig*)config, &range, 1, 2);
    surgery_free(&s);
}

static void test_refused(Test* t) {
    const struct {
        SurgeryMethod method;
        float epsilon, lambda, alpha;
        const char* text;  // NULL: accepted
    } cases[] = {
        {SURGERY_PCGRAD, -1e-8f, 0.4f, 0.2f, "--gradient-surgery-epsilon: expected a number, 0 or more, found -1e-08"},
        {SURGERY_CAGRAD, 1e-8f, 1.0f, 0.2f, "--cagrad-lambda: expected a number, 0 or more and below 1, found 1"},
        {SURGERY_CAGRAD, 1e-8f, -0.1f, 0.2f, "--cagrad-lambda"},
        {SURGERY_CAGRAD, 1e-8f, NAN, 0.2f, "--cagrad-lambda"},
        {SURGERY_GRADNORM, 1e-8f, 0.4f, -1.0f, "--gradnorm-alpha: expected a number, 0 or more, found -1"},
        {SURGERY_PCGRAD, 0.0f, 3.0f, 0.0f, NULL},
        {SURGERY_CAGRAD, 0.0f, 0.99f, 0.0f, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SurgeryConfig c = config_of(cases[i].method, cases[i].epsilon, cases[i].lambda, cases[i].alpha);
        check_exit(t, "config", start_with, &c, cases[i].text ? 2 : 0, cases[i].text ? cases[i].text : "");
    }
}

int main(int argc, char** argv) {
    Promise promises[] = {
        // first, for they fork: a process that has threads confuses the leak checker of a child
        {"names", "stand in the order of the enum; upper or lower case, an alias", test_names},
        {"refused", "epsilon, lambda and alpha out of range, with status 2", test_refused},
        {"fixture", "every method has the numbers computed elsewhere", test_fixture},
        {"fixture cagrad", "x for c 0.2, 0.5 and 0.9; d.f = d.b", test_fixture_cagrad},
        {"fixture gradnorm", "targets, slopes and weights computed elsewhere", test_fixture_gradnorm},
        {"pcgrad pairs", "the closed form for 200 random pairs; the sum opposes neither", test_pcgrad_pairs},
        {"pcgrad floats", "the closed form on vectors of 33 floats, to one rounding", test_pcgrad_floats},
        {"pcgrad three", "three tasks: the paper's loop in one of its eight orders, all of which come",
         test_pcgrad_three},
        {"pcgrad order", "a permutation of the others, a function of seed and step, even", test_pcgrad_order},
        {"cagrad best", "no direction on the circle is better for the worse task; |d - g0| = c |g0|", test_cagrad_best},
        {"cagrad edges", "gradients that are 0, equal or opposed", test_cagrad_edges},
        {"gradnorm slope", "the derivative of sum |G - T|, and T with a power in double", test_gradnorm_slope},
        {"gradnorm balance", "two regressions 1 : 30: alpha 1.5 makes L / L0 equal, alpha 0 the norms",
         test_gradnorm_balance},
        {"gradnorm steps", "weights of before the step; rests before all losses began and at a NaN",
         test_gradnorm_steps},
        {"bits", "1, 2, 3 and 7 threads have the bits of the plain loops, ranges in any order, gaps untouched",
         test_bits},
        {"ranges", "a method looks at the whole vector; conflicts are counted range by range", test_ranges},
        {"edges", "zero gradients stay finite; NaN and Inf are passed on", test_edges},
        {"one task", "with one task no bit changes, whatever the method", test_one_task},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
