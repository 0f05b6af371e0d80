/*
Promises of llmc/ops/hpn.h and llmc/models/prototypes.h: fast and plain loops agree to the last bit; gradients agree
with finite differences and with numbers computed elsewhere; prototypes stand where geometry says that they are farthest
apart.
*/
#include "llmc/ops/crossentropy.h"
#include "llmc/ops/hpn.h"
#include "llmc/models/prototypes.h"
#include "llmc/test/op_promises.h"  // Op, op_main
#include "llmc/test/testfiles.h"

// one problem; targets reach every prototype but the last, about one in five is not counted
typedef struct {
    int N, C, V;
    int* targets;
    float *z, *p;
} Problem;

static Problem problem(int N, int C, int V) {
    Problem a = {N, C, V, (int*)new_array((size_t)N, sizeof(int)), NULL, NULL};
    size_t n_z = (size_t)N * (size_t)C, n_p = (size_t)V * (size_t)C;
    uint64_t s = seeded_stream(1);
    for (int n = 0; n < N; n++) {
        int coin = (int)(xorshift_u32(&s) % 5), target = (int)(xorshift_u32(&s) % (uint32_t)(V > 1 ? V - 1 : 1));
        a.targets[n] = coin == 0 ? -1 - 99 * (n % 2) : target;
    }
    a.z = random_array(n_z, 1.0f, 2), a.p = random_array(n_p, 1.0f, 3);
    return a;
}

static void problem_free(Problem* a) { free(a->targets), free(a->z), free(a->p); }

static double length_double(const double* x, int C) {
    double sum = 0.0;
    for (int c = 0; c < C; c++) { sum += x[c] * x[c]; }
    return sqrt(sum);
}

// ---- unit rows ----

enum { X, UNIT, NORM, DUNIT, DX };

static void unit_ref(float* const* a, const int* d) { unit_forward_ref(a[UNIT], a[NORM], a[X], d['N'], d['C']); }

static void unit_fast(float* const* x, float* const* a, const int* d, const Device* dev) {
    unit_forward(a[UNIT], a[NORM], a[X], d['N'], d['C'], dev);
}

static void unit_slope_ref(float* const* a, const int* d) {
    unit_backward_ref(a[DX], a[DUNIT], a[UNIT], a[NORM], d['N'], d['C']);
}

static void unit_slope(float* const* x, float* const* a, const int* d, const Device* dev) {
    unit_backward(a[DX], a[DUNIT], a[UNIT], a[NORM], d['N'], d['C'], dev);
}

static void unit_double(double* const* a, const int* d) {
    for (int n = 0, C = d['C']; n < d['N']; n++) {
        a[NORM][n] = length_double(a[X] + n * C, C);
        for (int c = 0; c < C; c++) { a[UNIT][n * C + c] = a[X][n * C + c] / a[NORM][n]; }
    }
}

// lengths stay below 5 and above 2; a chain of C squares, of whose relative error half comes into the length
static double unit_error(int array, const int* d) {
    double length = rounding_walk(d['C'], 1.0) / 2.0 + rounding_walk(2, 1.0);
    return array == UNIT ? length : array == NORM ? 5.0 * length : rounding_walk(2 * d['C'], 1.0);
}

static const int unit_shapes[][OP_DIMS] = {{1, 1},  {1, 257}, {7, 33},   {16, 16}, {33, 7},
                                           {257, 1}, {65, 129}, {257, 65}, {0}};

static const Op unit_rows = {
    .name = "unit", .dims = "NC",
    .arrays = {
        {X, "x", "NC", GIVEN, 1.0f},
        {UNIT, "unit", "NC", MADE, 0.0f, NULL, "x"},
        {NORM, "norm", "N", MADE},
        {DUNIT, "dunit", "NC", GIVEN, 1.0f},
        {DX, "dx", "NC", GRADIENT, 0.0f, NULL, "dunit"},
    },
    .shapes = unit_shapes, .traits = ROWS,
    .forward_ref = unit_ref, .forward = {unit_fast}, .backward_ref = unit_slope_ref, .backward = {unit_slope},
    .in_double = unit_double, .error = unit_error, .judged = {{19, 33}},
};

// ---- the loss ----

enum { Z, P, TARGETS, LOSSES, COSINES, DZ, DP };

static const float DLOSS = 0.37f;

static void loss_ref(float* const* a, const int* d) {
    hpn_forward_ref(a[LOSSES], a[COSINES], a[Z], a[P], (int*)a[TARGETS], d['N'], d['C']);
}

static void loss_fast(float* const* x, float* const* a, const int* d, const Device* dev) {
    hpn_forward(a[LOSSES], a[COSINES], a[Z], a[P], (int*)a[TARGETS], d['N'], d['C'], dev);
}

static void loss_slope_ref(float* const* a, const int* d) {
    hpn_backward_ref(a[DZ], a[DP], a[Z], a[P], a[COSINES], (int*)a[TARGETS], DLOSS, d['N'], d['C'], d['V']);
}

static void loss_slope(float* const* x, float* const* a, const int* d, const Device* dev) {
    hpn_backward(a[DZ], a[DP], a[Z], a[P], a[COSINES], (int*)a[TARGETS], DLOSS, d['N'], d['C'], d['V'], dev);
}

// about one in five is not counted, and nobody aims at the last prototype
static void loss_fill(float* const* a, const int* d) {
    int* targets = (int*)a[TARGETS];
    for (int n = 0; n < d['N']; n++) {
        if (targets[n] == d['V'] - 1) { targets[n] = 0; }
        if (splitmix64(1, (uint64_t)n) % 5 == 0) { targets[n] = -1 - 99 * (n % 2); }
    }
}

static const int loss_shapes[][OP_DIMS] = {{1, 1, 1}, {1, 257, 3}, {7, 33, 5}, {16, 16, 7}, {33, 7, 33}, {257, 1, 4},
                                           {65, 129, 11}, {257, 65, 2}, {0}};

static const Op hpn = {
    .name = "hpn", .dims = "NCV",
    .arrays = {
        {Z, "z", "NC", GIVEN, 1.0f},
        {P, "p", "VC", GIVEN, 1.0f},
        {.number = TARGETS, .name = "targets", .extents = "N", .role = GIVEN | INDEX, .below = 'V'},
        {LOSSES, "losses", "N", MADE},
        {COSINES, "cosines", "N", MADE},
        {DZ, "dz", "NC", GRADIENT},
        {DP, "dp", "VC", GRADIENT | ADDED | ASKED, 1.0f},
    },
    .shapes = loss_shapes, .traits = ROWS, .fill = loss_fill,
    .forward_ref = loss_ref, .forward = {loss_fast}, .backward_ref = loss_slope_ref, .backward = {loss_slope},
};

// ---- what is done with N rows of V scores ----

enum { SCORES, LABELS, LOGITS, SCALED, RANKS };

static void scores_ref(float* const* a, const int* d) {
    const int *targets = (int*)a[LABELS], N = d['N'], V = d['V'];
    hpn_scale_array_ref(a[SCALED], 16.3f, (size_t)N * (size_t)V);
    for (int n = 0; n < N; n++) {
        ((int*)a[RANKS])[n] = targets[n] < 0 ? -1 : hpn_target_rank_ref(a[SCORES] + n * V, targets[n], V);
    }
    hpn_readout_ref(a[LOGITS], a[SCORES], N, V);
}

static void scores_fast(float* const* x, float* const* a, const int* d, const Device* dev) {
    hpn_scale_array(a[SCALED], 16.3f, (size_t)d['N'] * (size_t)d['V'], dev);
    hpn_target_ranks((int*)a[RANKS], a[SCORES], (int*)a[LABELS], d['N'], d['V'], dev);
    hpn_readout(a[LOGITS], a[SCORES], d['N'], d['V'], dev);
}

static void scores_fill(float* const* a, const int* d) {
    for (int n = 0; n < d['N']; n += 5) { ((int*)a[LABELS])[n] = -1 - n; }
}

static const Op scores = {
    .name = "scores", .dims = "NV",
    .arrays = {
        {SCORES, "scores", "NV", GIVEN, 1.0f},
        {.number = LABELS, .name = "labels", .extents = "N", .role = GIVEN | INDEX, .below = 'V'},
        {LOGITS, "logits", "NV", MADE, 0.0f, NULL, "scores"},
        {SCALED, "scaled", "NV", MADE | ADDED, 1.0f},
        {RANKS, "ranks", "N", MADE | INDEX},
    },
    .shapes = unit_shapes, .traits = ROWS, .fill = scores_fill,
    .forward_ref = scores_ref, .forward = {scores_fast},
};

// ---- against double ----

// cosine of two rows that need not be unit
static double cosine_double(const double* a, const double* b, int C) {
    double sum = 0.0;
    for (int c = 0; c < C; c++) { sum += a[c] * b[c]; }
    return sum / (length_double(a, C) * length_double(b, C));
}

// x: z (N, C), then p (V, C); sum of the counted losses over 1/dloss = 20
static double hpn_loss(const double* x, void* arg) {
    const Problem* a = (const Problem*)arg;
    double sum = 0.0;
    for (int n = 0; n < a->N; n++) {
        if (a->targets[n] < 0) { continue; }
        double c = cosine_double(x + n * a->C, x + (a->N + a->targets[n]) * a->C, a->C);
        sum += (1.0 - c) * (1.0 - c);
    }
    return sum / 20.0;
}

static const float SOFTMAX_SCALE = 12.0f;

static double softmax_loss(const double* x, void* arg) {
    const Problem* a = (const Problem*)arg;
    double loss = 0.0;
    for (int n = 0; n < a->N; n++) {
        double sum = 0.0;
        if (a->targets[n] < 0) { continue; }
        const double *z = x + n * a->C, *p = x + a->N * a->C;
        double at = (double)SOFTMAX_SCALE * cosine_double(z, p + a->targets[n] * a->C, a->C);
        for (int v = 0; v < a->V; v++) {
            sum += exp((double)SOFTMAX_SCALE * cosine_double(z, p + v * a->C, a->C) - at);
        }
        loss += log(sum);
    }
    return loss / 20.0;
}

static double* concatenated(const Problem* a) {
    int n = a->N * a->C, n_p = a->V * a->C;
    double* x = (double*)new_array((size_t)(n + n_p), sizeof(double));
    for (int i = 0; i < n + n_p; i++) { x[i] = (double)(i < n ? a->z[i] : a->p[i - n]); }
    return x;
}

typedef struct {
    float *z_unit, *z_norm, *p_unit, *p_norm, *dz, *dp;
} Units;

static Units units(const Problem* a, const Device* dev) {
    size_t n_z = (size_t)a->N * (size_t)a->C, n_p = (size_t)a->V * (size_t)a->C;
    Units u = {filled_array(n_z, NAN), filled_array((size_t)a->N, NAN), filled_array(n_p, NAN),
               filled_array((size_t)a->V, NAN), filled_array(n_z, 0.0f), filled_array(n_p, 0.0f)};
    unit_forward(u.z_unit, u.z_norm, a->z, a->N, a->C, dev);
    unit_forward(u.p_unit, u.p_norm, a->p, a->V, a->C, dev);
    return u;
}

static void units_backward(Units* u, const Problem* a, const Device* dev) {
    unit_backward(u->dz, u->dz, u->z_unit, u->z_norm, a->N, a->C, dev);
    unit_backward(u->dp, u->dp, u->p_unit, u->p_norm, a->V, a->C, dev);
}

static void units_free(Units* u) {
    free(u->z_unit), free(u->z_norm), free(u->p_unit), free(u->p_norm), free(u->dz), free(u->dp);
}

static void check_gradient(Test* t, const Units* u, Problem* a, double (*loss)(const double*, void*),
                           double tolerance) {
    size_t n_z = (size_t)a->N * (size_t)a->C, n_p = (size_t)a->V * (size_t)a->C;
    double *x = concatenated(a), *want = finite_differences(loss, x, n_z + n_p, a);
    check_close(t, "dz", u->dz, want, n_z, tolerance);
    check_close(t, "dp", u->dp, want + n_z, n_p, tolerance);
    free(x), free(want);
}

static void test_differences(Test* t) {
    Device dev = test_device(2);
    Problem a = problem(19, 33, 5);
    Units u = units(&a, &dev);
    float losses[19], cosines[19];
    hpn_forward(losses, cosines, u.z_unit, u.p_unit, a.targets, a.N, a.C, &dev);
    hpn_backward(u.dz, u.dp, u.z_unit, u.p_unit, cosines, a.targets, 1.0f / 20.0f, a.N, a.C, a.V, &dev);
    units_backward(&u, &a, &dev);
    // entries of dz stay below 0.05, of dp, from up to 8 positions, below 0.2; a chain of 33 and one of 8 products
    check_gradient(t, &u, &a, hpn_loss, 41 * 0x1p-24 * 0.2);
    units_free(&u), problem_free(&a), device_free(&dev);
}

// hpn-softmax as a trainer puts it together; cosines are left in `cosines`, their gradient in `dcosines`
static void softmax_head(Units* u, const Problem* a, float* cosines, float* dcosines, float* losses,
                         const Device* dev) {
    size_t n = (size_t)a->N * (size_t)a->V;
    matmul_forward(cosines, u->z_unit, u->p_unit, NULL, a->N, a->C, a->V, dev);
    memcpy(dcosines, cosines, sizeof(float) * n);
    hpn_scale_array(dcosines, SOFTMAX_SCALE, n, dev);
    crossentropy_fused(losses, dcosines, a->targets, 1.0f / 20.0f, 1, a->N, a->V, a->V, dev);
    hpn_scale_array(dcosines, SOFTMAX_SCALE, n, dev);
    matmul_backward(u->dz, u->dp, NULL, dcosines, u->z_unit, u->p_unit, a->N, a->C, a->V, dev);
    units_backward(u, a, dev);
}

// dz and dp by the formulas of doc/hpn.md, in double: dz = (dC P - (sum_k dC*C) z_unit) / |z|,  dp_k = ((dC^T Z)_k -
// (sum_i dC*C)_k p_unit_k) / |p_k|,  dC = s (pi - onehot) / T
static double* softmax_gradient_double(const Problem* a) {
    int N = a->N, C = a->C, V = a->V;
    double *x = concatenated(a), *p = x + N * C,
        *grad = (double*)new_array((size_t)(N + V) * (size_t)C, sizeof(double));
    for (int n = 0; n < N; n++) {
        double sum = 0.0, *z = x + n * C, z_length = length_double(z, C);
        for (int v = 0; v < V; v++) { sum += exp((double)SOFTMAX_SCALE * cosine_double(z, p + v * C, C)); }
        for (int v = 0; v < V && a->targets[n] >= 0; v++) {
            double cosine = cosine_double(z, p + v * C, C), p_length = length_double(p + v * C, C);
            double q = exp((double)SOFTMAX_SCALE * cosine) / sum;
            double d = (double)SOFTMAX_SCALE * (q - (v == a->targets[n])) / 20.0;
            for (int c = 0; c < C; c++) {
                double z_unit = z[c] / z_length, p_unit = p[v * C + c] / p_length;
                grad[n * C + c] += d * (p_unit - cosine * z_unit) / z_length;
                grad[(N + v) * C + c] += d * (z_unit - cosine * p_unit) / p_length;
            }
        }
    }
    free(x);
    return grad;
}

static void test_softmax(Test* t) {
    Device dev = test_device(2);
    Problem a = problem(19, 33, 5);
    Units u = units(&a, &dev);
    float cosines[19 * 5], dcosines[19 * 5], losses[19];
    double *want = softmax_gradient_double(&a), *x = concatenated(&a), total = 0.0, loss = softmax_loss(x, &a);
    softmax_head(&u, &a, cosines, dcosines, losses, &dev);
    for (int n = 0; n < a.N; n++) { total += (double)losses[n] / 20.0; }
    // cosines are off by at most 33 * 2^-24 * 0.5, logits by 12 times that, losses by
    // twice it, softmax being 1-Lipschitz
    check(t, fabs(total - loss) < 2e-6, "loss: found %.9g, expected %.9g", total, loss);
    const double tolerance = 24 * 33 * 0x1p-25 * 0.4;  // that error of the logits, times gradients below 0.4
    check_close(t, "dz of the formula", u.dz, want, 19 * 33, tolerance);
    check_close(t, "dp of the formula", u.dp, want + 19 * 33, 5 * 33, tolerance);
    check_gradient(t, &u, &a, softmax_loss, tolerance);
    free(want), free(x), units_free(&u), problem_free(&a), device_free(&dev);
}

// ---- numbers computed elsewhere ----

static void check_number(Test* t, const char* what, double got, double want, double tolerance) {
    check(t, fabs(got - want) <= tolerance, "%s: found %.9g, expected %.9g", what, got, want);
}

static double norm_of(const float* x, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) { sum += (double)x[i] * (double)x[i]; }
    return sqrt(sum);
}

// 13.D
static void test_fixture_d(Test* t) {
    Device dev = test_device(1);
    Problem a = {6, 8, 5, (int*)new_array(6, sizeof(int)), filled_array(48, 0.0f), filled_array(40, 0.0f)};
    const int targets[] = {0, 2, 1, 4, 3, 2};
    memcpy(a.targets, targets, sizeof targets);
    for (int i = 0; i < 48; i++) { a.z[i] = (float)(0.7 * sin(0.03 * i) + 0.1 * (i % 8)); }
    for (int i = 0; i < 40; i++) { a.p[i] = (float)(0.6 * cos(0.02 * (i + 11)) + 0.05 * (i / 8)); }
    Units u = units(&a, &dev);
    float losses[6], cosines[6], total;
    hpn_forward(losses, cosines, u.z_unit, u.p_unit, a.targets, 6, 8, &dev);
    crossentropy_losses_sum(&total, losses, 6, &dev);
    hpn_backward(u.dz, u.dp, u.z_unit, u.p_unit, cosines, a.targets, 1.0f / 6.0f, 6, 8, 5, &dev);
    unit_backward(u.dz, u.dz, u.z_unit, u.z_norm, 6, 8, &dev);
    unit_backward(u.dp, u.dp, u.p_unit, u.p_norm, 5, 8, &dev);
    // inputs are rounded to float, and 1 - cosine loses the digits that cosine has in common
    // with 1: 2^-23 of 1, slopes below 2
    check_number(t, "loss", (double)total / 6.0, 0.0084847212, 0x1p-22);
    check_number(t, "|dz|", norm_of(u.dz, 48), 0.024325009, 0x1p-22);
    check_number(t, "|dp|", norm_of(u.dp, 40), 0.023505147, 0x1p-22);
    check_number(t, "dz[0][1]", (double)u.dz[1], -0.011485483, 0x1p-22);
    check_number(t, "dp[0][1]", (double)u.dp[1], 0.007459477, 0x1p-22);
    units_free(&u), problem_free(&a), device_free(&dev);
}

// tensor j of the fixtures
static void fixture_tensor(float* x, int n, int j, double amplitude) {
    for (int i = 0; i < n; i++) { x[i] = (float)(amplitude * sin(0.37 * (i + 1) + 1.3 * j)); }
}

// 13.B: the final hidden states of the first and the last position
static void test_fixture_b(Test* t) {
    Device dev = test_device(1);
    const float z[8] = {0.62507385f, 0.80206773f, 1.1046051f, 1.2701888f, -1.2680766f, 1.0907525f, -0.93678008f,
                        0.68756809f};
    const int targets[2] = {3, 4}, argmax[2] = {2, 1}, all_first[2] = {0, 0};
    float p[24], z_unit[8], norms[6], losses[2], found[2], all[12];
    int ranks[2];
    fixture_tensor(p, 24, 22, 1.0);
    unit_forward(p, norms, p, 6, 4, &dev);
    unit_forward(z_unit, norms, z, 2, 4, &dev);
    hpn_forward(losses, found, z_unit, p, targets, 2, 4, &dev);
    check_number(t, "label cosine 0", (double)found[0], 0.67585519, 0x1p-22);  // z has 8 digits
    check_number(t, "label cosine 4", (double)found[1], -0.04875864, 0x1p-22);
    matmul_forward(all, z_unit, p, NULL, 2, 4, 6, &dev);
    check_bits(t, "the same among all cosines", &all[3], &found[0], 1);
    hpn_target_ranks(ranks, all, argmax, 2, 6, &dev);
    check(t, memcmp(ranks, all_first, sizeof ranks) == 0, "argmax: ranks %d %d of 2 and 1", ranks[0], ranks[1]);
    // the mean loss over the five label cosines that the specification lists
    const float cosines[5] = {0.67585519f, 0.3548236f, -0.27491934f, -0.015550865f, -0.04875864f},
        ones[5] = {1, 1, 1, 1, 1};
    const int first[5] = {0, 0, 0, 0, 0};
    float five[5], same[5], total;
    hpn_forward(five, same, cosines, ones, first, 5, 1, &dev);  // one channel, one prototype at 1: z_unit is the cosine
    crossentropy_losses_sum(&total, five, 5, &dev);
    check_number(t, "loss", (double)total / 5.0, 0.85559601, 0x1p-21);
    device_free(&dev);
}

// ---- hard and obvious inputs ----

static void test_zero_rows(Test* t) {
    Device dev = test_device(1);
    const float x[6] = {0.0f, -0.0f, 1e-30f, 0.0f, 3e-8f, 4e-8f}, d[6] = {1.0f, 2.0f, 1.0f, 2.0f, 1.0f, 2.0f};
    float unit[6], norm[3], dx[6];
    unit_forward(unit, norm, x, 3, 2, &dev);
    unit_backward(dx, d, unit, norm, 3, 2, &dev);
    check(t, norm[0] == 1e-8f && norm[1] == 1e-8f, "norms of 0 and 1e-30: %g %g", (double)norm[0], (double)norm[1]);
    check(t, float_bits(unit[0]) == 0 && float_bits(unit[1]) == 0x80000000, "unit of 0 and -0: %g %g", (double)unit[0],
          (double)unit[1]);
    check(t, dx[0] == 1.0f / 1e-8f && dx[1] == 2.0f / 1e-8f, "dx of a row of zeros: %g %g", (double)dx[0],
          (double)dx[1]);
    check_number(t, "norm of (3e-8, 4e-8)", (double)norm[2], 5e-8, 1e-14);
    check_number(t, "unit", (double)unit[4], 0.6, 0x1p-23);
    // (1, 2) less its part along (0.6, 0.8), 2.2, over the length 5e-8
    check_number(t, "dx", (double)dx[4], (1.0 - 0.6 * 2.2) / 5e-8, 4.0);
    device_free(&dev);
}

// a target that is not counted: no loss, no gradient, whatever the row holds
static void test_ignored(Test* t) {
    Device dev = test_device(2);
    Problem a = problem(40, 7, 5);
    float losses[40], cosines[40], dz[280], dp[35] = {0}, want[35] = {0};
    for (int n = 0; n < 40; n++) { a.targets[n] = n % 2 ? -1 : -100; }
    for (int i = 0; i < 7; i++) { a.z[i] = NAN; }
    hpn_forward(losses, cosines, a.z, a.p, a.targets, 40, 7, &dev);
    hpn_backward(dz, dp, a.z, a.p, cosines, a.targets, 1.0f, 40, 7, 5, &dev);
    for (int i = 0; i < 280; i++) { check(t, losses[i / 7] == 0.0f && dz[i] == 0.0f, "row %d counts", i / 7); }
    check_bits(t, "dp", dp, want, 35);
    problem_free(&a), device_free(&dev);
}

// prototypes +e_k, and the minimiser of mean (1 - cosine)^2 under true probabilities q: cosine_k
// = q_k / (q_k + mu), of length 1
static void test_readout(Test* t) {
    Device dev = test_device(1);
    double q[8], low = 1e-9, high = 10.0, total = 0.0, sum = 0.0;
    float cosines[8], logits[8];
    for (int k = 0; k < 8; k++) { total += q[k] = 1.0 / (1.0 + k * k); }
    for (int i = 0; i < 200; i++) {
        double mu = (low + high) / 2.0, length2 = 0.0;
        for (int k = 0; k < 8; k++) { length2 += pow(q[k] / (q[k] + mu * total), 2.0); }
        if (length2 > 1.0) { low = mu; } else { high = mu; }
    }
    for (int k = 0; k < 8; k++) { cosines[k] = (float)(q[k] / (q[k] + low * total)); }
    hpn_readout(logits, cosines, 1, 8, &dev);
    for (int k = 0; k < 8; k++) { sum += exp((double)logits[k]); }
    for (int k = 0; k < 8; k++) { check_number(t, "probability", exp((double)logits[k]) / sum, q[k] / total, 0x1p-21); }
    const float edge[7] = {1.0f, 1.0001f, 0.5f, 0.0f, -0.0f, -1.0f, NAN};
    float edge_logits[7];
    hpn_readout(edge_logits, edge, 1, 7, &dev);
    check_number(t, "at 1", (double)edge_logits[0], log(16777215.0), 1e-6);
    check(t, edge_logits[0] == edge_logits[1] && edge_logits[2] == 0.0f, "above 1, 1/2: %g %g", (double)edge_logits[1],
          (double)edge_logits[2]);
    for (int i = 3; i < 6; i++) { check_number(t, "at or below 0", (double)edge_logits[i], -log(16777215.0), 1e-6); }
    check(t, isnan(edge_logits[6]), "NaN: %g", (double)edge_logits[6]);
    device_free(&dev);
}

static void test_ranks(Test* t) {
    Device dev = test_device(2);
    const float rows[4 * 6] = {0.1f, 0.9f, 0.5f, 0.9f, -1.0f, 0.0f, 3, 3, 3, 3, 3, 3, 0, NAN, 0.5f, 1, 2, 3, INFINITY,
                               1, 2, 3, 4, 5};
    const int targets[][4] = {{1, 0, 1, 0}, {3, 5, 2, 1}, {4, 2, 5, -1}},
        want[][4] = {{0, 0, 5, 0}, {1, 5, 4, 5}, {5, 2, 1, -1}};
    int ranks[4];
    for (int i = 0; i < 3; i++) {
        hpn_target_ranks(ranks, rows, targets[i], 4, 6, &dev);
        for (int n = 0; n < 4; n++) {
            check(t, ranks[n] == want[i][n], "row %d, target %d: rank %d", n, targets[i][n], ranks[n]);
        }
    }
    check(t, hpn_count_hits(ranks, 4, 1) == 0 && hpn_count_hits(ranks, 4, 5) == 2 && hpn_count_hits(ranks, 4, 6) == 3,
          "hits");
    device_free(&dev);
}

static void test_pairs(Test* t) {
    const int sizes[] = {2, 7, 256, 257, 1000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int N = sizes[i], C = 5, S = N < 256 ? N : 256;
        double sum = 0.0;
        float *x = random_array((size_t)(N * C), 1.0f, 8), *norms = filled_array((size_t)N, NAN);
        unit_forward_ref(x, norms, x, N, C);
        for (int a = 0; a < S; a++) {
            for (int b = 0; b < a; b++) {
                for (int c = 0; c < C; c++) { sum += (double)x[a * N / S * C + c] * (double)x[b * N / S * C + c]; }
            }
        }
        check_number(t, "mean over all pairs", hpn_mean_pairwise_cosine(x, N, C), 2.0 * sum / S / (S - 1), 1e-12);
        for (int j = C; j < N * C; j++) { x[j] = x[j % C]; }
        check_number(t, "all rows the same", hpn_mean_pairwise_cosine(x, N, C), 1.0, 0x1p-21);
        check_number(t, "a single row", hpn_mean_pairwise_cosine(x, 1, C), 0.0, 0.0);
        free(x), free(norms);
    }
}

// ---- where prototypes stand ----

// largest and smallest cosine of a pair, and the largest distance of a row's length from 1
static void spread(double* most, double* least, double* off, const float* p, int V, int C) {
    double* x = double_array(p, (size_t)V * (size_t)C);
    *most = -2.0, *least = 2.0, *off = 0.0;
    for (int a = 0; a < V; a++) {
        *off = fmax(*off, fabs(length_double(x + a * C, C) - 1.0));
        for (int b = 0; b < a; b++) {
            double c = cosine_double(x + a * C, x + b * C, C);
            *most = fmax(*most, c), *least = fmin(*least, c);
        }
    }
    free(x);
}

static void check_placed(Test* t, const char* placement, int V, int C, uint32_t seed, double want_most,
                         double tolerance, const Device* dev) {
    double most, least, off;
    float* p = filled_array((size_t)V * (size_t)C, NAN);
    prototypes_init(p, placement, V, C, seed, dev);
    spread(&most, &least, &off, p, V, C);
    check(t, off < 1e-6, "%s, V %d, C %d: a length is off by %g", placement, V, C, off);
    check(t, V < 2 || fabs(most - want_most) <= tolerance, "%s, V %d, C %d: largest cosine %.6f, expected %.6f",
          placement, V, C, most, want_most);
    if (strcmp(placement, "simplex") == 0 && V > 1) {
        check(t, fabs(least - want_most) <= tolerance, "simplex, V %d, C %d: smallest cosine %.6f", V, C, least);
    }
    free(p);
}

// Kasarla et al.: P_1 = [1, -1], P_k = [[1, -1/k ...], [0, sqrt(1 - 1/k^2) P_(k-1)]], prototypes are the columns
static double simplex_recursion(int k, int row, int column) {
    if (row == 0) { return column == 0 ? 1.0 : -1.0 / k; }
    return column == 0 ? 0.0 : sqrt(1.0 - 1.0 / ((double)k * k)) * simplex_recursion(k - 1, row - 1, column - 1);
}

static void test_closed_forms(Test* t) {
    Device dev = test_device(2);
    const int simplexes[][2] = {{1, 1}, {2, 1}, {3, 2}, {6, 5}, {6, 9}, {33, 32}, {65, 257}};
    for (size_t i = 0; i < sizeof simplexes / sizeof *simplexes; i++) {
        int V = simplexes[i][0], C = simplexes[i][1];
        check_placed(t, "simplex", V, C, 1, V > 1 ? -1.0 / (V - 1) : 0.0, 4e-7, &dev);
        float* p = filled_array((size_t)V * (size_t)C, NAN);
        prototypes_simplex(p, V, C);
        for (int v = 0; v < V && V > 1; v++) {
            for (int c = 0; c < C; c++) {
                check_number(t, "the recursion", (double)p[v * C + c], c < V - 1 ? simplex_recursion(V - 1, c, v) : 0.0,
                             0x1p-24);
            }
        }
        free(p);
    }
    check_placed(t, "orthoplex", 10, 5, 1, 0.0, 0.0, &dev), check_placed(t, "orthoplex", 7, 5, 1, 0.0, 0.0, &dev);
    check_placed(t, "orthoplex", 4, 5, 1, 0.0, 0.0, &dev), check_placed(t, "orthoplex", 256, 128, 1, 0.0, 0.0, &dev);
    check_placed(t, "optimize", 3, 2, 1, -0.5, 1e-6, &dev), check_placed(t, "optimize", 8, 2, 1, sqrt(0.5), 1e-6, &dev);
    device_free(&dev);
}

static void test_optimize(Test* t) {
    Device dev = test_device(1);
    for (uint32_t seed = 0; seed < 3; seed++) {
        check_placed(t, "optimize", 6, 5, seed, -0.2, 0.0005, &dev);
        check_placed(t, "optimize", 10, 5, seed, 0.0, 0.0005, &dev);
        check_placed(t, "optimize", 12, 3, seed, 1.0 / sqrt(5.0), 0.0005, &dev);  // an icosahedron
    }
    // two rows meet on the way, and one must jump
    check_placed(t, "optimize", 12, 3, 14, 1.0 / sqrt(5.0), 0.0005, &dev);
    // the best known: 43.69 degrees, a snub cube
    check_placed(t, "optimize", 24, 3, 24, 0.72307, 0.0005, &dev);
    check_placed(t, "optimize", 1, 3, 1, 0.0, 0.0, &dev);
    device_free(&dev);
}

// random rows, and what a few steps make of them
static void improved(float* random, float* better, int V, int C, uint32_t seed, int n_threads) {
    Device dev = test_device(n_threads);
    prototypes_init(random, "random", V, C, seed, &dev);
    memcpy(better, random, sizeof(float) * (size_t)V * (size_t)C);
    prototypes_improve(better, V, C, 10, seed, &dev);
    device_free(&dev);
}

static void test_placement_threads(Test* t) {
    const int sizes[][2] = {{5, 3}, {PROTOTYPES_ROWS + 9, 19}, {PROTOTYPES_STEP_ROWS + 77, 6}};
    for (int k = 0; k < 3; k++) {
        int V = sizes[k][0], C = sizes[k][1];
        size_t n = (size_t)V * (size_t)C;
        float *random = filled_array(n, 77.0f), *better = filled_array(n, 77.0f), *got_random = filled_array(n, NAN),
              *got_better = filled_array(n, NAN);
        improved(random, better, V, C, 5, 1);
        check(t, memcmp(random, better, sizeof(float) * n) != 0, "nothing moves");
        for (int i = 1; i < N_TEST_THREADS; i++) {
            improved(got_random, got_better, V, C, 5, test_threads(i));
            check_bits(t, "random", got_random, random, n);
            check_bits(t, "after ten steps", got_better, better, n);
        }
        improved(got_random, got_better, V, C, 6, 1);
        check(t, memcmp(got_random, random, sizeof(float) * n) != 0, "the seed changes nothing");
        free(random), free(better), free(got_random), free(got_better);
    }
}

// how far rows first..last-1 went, squared
static double way2(const float* a, const float* b, int first, int last, int C) {
    double sum = 0.0;
    for (int i = first * C; i < last * C; i++) { sum += pow((double)a[i] - (double)b[i], 2.0); }
    return sum;
}

// three times the rows that a step looks at: each third has its turn, a little later than the one before and at
// a lower rate, and moves away from its neighbours
static void test_sampled(Test* t) {
    Device dev = test_device(1);
    const int S = PROTOTYPES_STEP_ROWS, V = 3 * S, C = 6;
    float *random = filled_array((size_t)(V * C), NAN), *better = filled_array((size_t)(V * C), NAN);
    prototypes_random(random, V, C, 3, &dev);
    memcpy(better, random, sizeof(float) * (size_t)(V * C));
    prototypes_improve(better, V, C, 30, 3, &dev);
    double before = prototypes_separation(NULL, random, 1.0f, V, C, &dev),
        after = prototypes_separation(NULL, better, 1.0f, V, C, &dev);
    check(t, after < before - 0.01, "mean cosine of nearest neighbours %.4f, before %.4f", after, before);
    for (int third = 1; third < 3; third++) {
        double share = way2(random, better, third * S, (third + 1) * S, C) / way2(random, better, 0, S, C);
        check(t, share > 0.35 && share < 1.0, "third %d went %.3f as far as the first, squared", third, share);
    }
    free(random), free(better), device_free(&dev);
}

// ---- the separation loss ----

static void test_separation(Test* t) {
    const int shapes[][2] = {{1, 3}, {2, 1}, {7, 33}, {33, 7}, {65, 16}, {257, 5}};
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        for (size_t j = 0; j < 3 * sizeof shapes / sizeof *shapes; j++) {
            int V = shapes[j / 3][0], C = shapes[j / 3][1];
            size_t n = (size_t)V * (size_t)C;
            float *p = j % 3 ? hard_array(n, 9) : random_array(n, 1.0f, 9), *got = hard_array(n, 10),
                *want = copied_array(got, n);
            if (j % 3 == 2) { sprinkle(p, n, 40, 11); }
            double loss = prototypes_separation(got, p, 0.3f, V, C, &dev),
                want_loss = prototypes_separation_ref(want, p, 0.3f, V, C);
            check_bits(t, "dprototypes", got, want, n);
            check(t, loss == want_loss || (isnan(loss) && isnan(want_loss)), "loss: found %.17g, expected %.17g", loss,
                  want_loss);
            double alone = prototypes_separation(NULL, p, 0.3f, V, C, &dev);
            check(t, alone == loss || isnan(loss), "the loss alone: found %.17g, expected %.17g", alone, loss);
            free(p), free(got), free(want);
        }
        device_free(&dev);
    }
}

typedef struct { int V, C; } Shape;

static double separation_loss(const double* x, void* arg) {
    const Shape* s = (const Shape*)arg;
    double sum = 0.0;
    for (int i = 0; i < s->V; i++) {
        double most = -2.0;
        for (int j = 0; j < s->V; j++) {
            most = i == j ? most : fmax(most, cosine_double(x + i * s->C, x + j * s->C, s->C));
        }
        sum += most;
    }
    return 0.7 * sum / s->V;
}

static void test_separation_differences(Test* t) {
    Device dev = test_device(2);
    Shape s = {9, 4};
    float *p = random_array(36, 1.0f, 12), unit[36], norms[9], dp[36] = {0};
    unit_forward(unit, norms, p, 9, 4, &dev);
    double loss = prototypes_separation(dp, unit, 0.7f, 9, 4, &dev), *x = double_array(p, 36);
    unit_backward(dp, dp, unit, norms, 9, 4, &dev);
    double* want = finite_differences(separation_loss, x, 36, &s);
    check_number(t, "loss", loss, separation_loss(x, &s), 0x1p-22);
    check_close(t, "dprototypes", dp, want, 36, 12 * 0x1p-24);  // entries below 1, sums of at most 9 rows
    // the lowest index at equal cosines: each of the axes e_0, e_1, e_2 takes the first other one
    const float axes[9] = {1, 0, 0, 0, 1, 0, 0, 0, 1}, axes_want[9] = {0, 2, 1, 2, 0, 0, 1, 0, 0};
    float axes_d[9] = {0};
    prototypes_separation(axes_d, axes, 3.0f, 3, 3, &dev);
    check_bits(t, "ties", axes_d, axes_want, 9);
    free(p), free(x), free(want), device_free(&dev);
}

#ifndef SYSTEM_LIBM
// with x = 1 + 2^-12, x * x rounds to 1 + 2^-11: only a fused multiply-add keeps the 2^-24, here twice
static void test_separation_rounding(Test* t) {
    const float x = 1.0f + 0x1p-12f, start = -(1.0f + 0x1p-11f), p[] = {x, x};
    const float want[] = {1.0f + 0x1p-11f + 0x1p-23f, 1.0f + 0x1p-11f + 0x1p-23f};
    float plain[] = {start, start}, fast[] = {start, start};
    Device dev = test_device(1);
    prototypes_separation_ref(plain, p, 2.0f * x, 2, 1);
    prototypes_separation(fast, p, 2.0f * x, 2, 1, &dev);
    check_bits(t, "plain", plain, want, 2);
    check_bits(t, "fast", fast, want, 2);
    device_free(&dev);
}
#endif

// ---- files, and rows that coincide ----

// a < b: the pair that has to be found, a < b; -1 and -1: none
static void check_coincide(Test* t, const float* p, int V, int C, int a, int b) {
    int found_a = -1, found_b = -1, found = prototypes_coincide(&found_a, &found_b, p, V, C);
    check(t, found ? found_a == a && found_b == b : a < 0, "of %d rows: found %d, %d and %d, expected %d and %d", V,
          found, found_a, found_b, a, b);
}

static void test_coincide(Test* t) {
    const int V = 300, C = 7;
    float *p = random_array((size_t)(V * C), 1.0f, 13), *norms = filled_array((size_t)V, NAN);
    unit_forward_ref(p, norms, p, V, C);
    check_coincide(t, p, V, C, -1, -1);
    memcpy(p + 299 * C, p + 17 * C, sizeof(float) * (size_t)C);
    p[299 * C + 3] += 1e-7f;
    check_coincide(t, p, V, C, 17, 299);
    p[299 * C + 3] += 1e-3f;
    check_coincide(t, p, V, C, -1, -1);
    check_coincide(t, p, 1, C, -1, -1);
    free(p), free(norms);
}

typedef struct { const char* placement; int V, C; } Wish;

static void place(void* arg) {
    const Wish* w = (const Wish*)arg;
    Device dev = test_device(1);
    prototypes_init(filled_array((size_t)w->V * (size_t)w->C, 0.0f), w->placement, w->V, w->C, 1, &dev);
}

static TempPath prototype_file(const TempPath* folder, const char* name, const float* p, int64_t V, int64_t C,
                               int n_tensors) {
    TempPath path = temp_path(folder, name);
    const int64_t shape[2] = {V, C};
    SafeWriter w;
    safewriter_init(&w);
    for (int i = 0; i < n_tensors; i++) { safewriter_declare(&w, i ? "other" : "prototypes", DTYPE_F32, 2, shape); }
    safewriter_open(&w, path.s);
    for (int i = 0; i < n_tensors; i++) { safewriter_put(&w, p, sizeof(float) * (size_t)(V * C)); }
    safewriter_close(&w);
    return path;
}

static void test_file(Test* t) {
    Device dev = test_device(1);
    TempPath folder = temp_folder();
    float *p = random_array(12, 5.0f, 14), got[12], want[12], norms[4];
    unit_forward(want, norms, p, 4, 3, &dev);
    TempPath good = prototype_file(&folder, "good", p, 4, 3, 1), two = prototype_file(&folder, "two", p, 4, 3, 2);
    prototypes_init(got, good.s, 4, 3, 1, &dev);
    check_bits(t, "unit rows of the file", got, want, 12);
    memcpy(p + 9, p, sizeof(float) * 3);
    TempPath same = prototype_file(&folder, "same", p, 4, 3, 1);
    p[9] = p[10] = p[11] = 0.0f;
    TempPath zero = prototype_file(&folder, "zero", p, 4, 3, 1);
    p[9] = NAN;
    TempPath nan = prototype_file(&folder, "nan", p, 4, 3, 1);
    Wish wishes[] = {{good.s, 3, 4}, {good.s, 5, 3}, {two.s, 4, 3}, {same.s, 4, 3}, {zero.s, 4, 3}, {nan.s, 4, 3},
                     {"simplx", 4, 3}, {"simplex", 5, 3}, {"orthoplex", 7, 3}, {"random", 3, 1}};
    const char* texts[] = {
        "expected shape (3, 4), tokens by --proto-dim, found (4, 3)", "found (4, 3)", "found 2 tensors",
        "prototypes 0 and 3 to be the same", "row 3 has no direction", "row 3 has no direction",
        "expected simplex, orthoplex, optimize, random or a safetensors file, found \"simplx\"",
        "5 prototypes need at least 4 channels, found 3", "7 prototypes need at least 4 channels, found 3",
        "expected 3 different directions",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        check_exit(t, wishes[i].placement, place, &wishes[i], 2, texts[i]);
    }
    free(p), temp_remove(&folder), device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {  // the first forks, so no threads may have started
        {"file", "its rows become unit rows; wrong shapes, names and rows are refused in one line", test_file},
        {"differences", "dz and dp of the squared cosine distance agree with finite differences", test_differences},
        {"softmax", "the head put together from ops agrees with its formulas in double and with finite differences",
         test_softmax},
        {"fixture D", "loss and gradients have the specification's numbers", test_fixture_d},
        {"fixture B", "label cosines, argmax and loss have the specification's numbers", test_fixture_b},
        {"zero rows", "a length below 1e-8 counts as 1e-8", test_zero_rows},
        {"ignored", "negative targets have no loss and no gradient", test_ignored},
        {"readout", "true probabilities from the minimiser of orthonormal prototypes; finite at 1 and below 0",
         test_readout},
        {"ranks", "ties go to the lower index, NaN is no hit", test_ranks},
        {"pairs", "the mean cosine of pairs is that of all pairs, and 1 after a collapse", test_pairs},
        {"closed forms", "simplex -1/(V-1) and its recursion, orthoplex 0, equal angles on a circle",
         test_closed_forms},
        {"optimize", "gradient steps reach the best known cosines", test_optimize},
        {"sampled", "more prototypes than a step looks at move apart too", test_sampled},
        {"threads", "random rows and what steps make of them: the same bits for any threads, others for another seed",
         test_placement_threads},
        {"separation", "loss and gradient equal the plain loop for any threads", test_separation},
        {"separation slope", "its gradient agrees with finite differences; ties go to the lower index",
         test_separation_differences},
#ifndef SYSTEM_LIBM
        {"separation rounding", "a product and its sum round once, together", test_separation_rounding},
#endif
        {"coincide", "two rows at one place are found, near ones are let through", test_coincide},
    };
    const Op* ops[] = {&unit_rows, &hpn, &scores};
    return op_main(argc, argv, ops, 3, promises, sizeof promises / sizeof promises[0]);
}
