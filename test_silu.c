/*
Promises of llmc/ops/silu.h and llmc/ops/softplus.h: frozen expressions, judged in double; fast and plain loops agree on
every kind of float, with strides and in place too.
*/
#include "llmc/ops/silu.h"
#include "llmc/ops/softplus.h"
#include "llmc/test/test.h"

// every 4099th float (a prime): all exponents, both signs, subnormals, Inf and NaN, about a million numbers
static float* all_kinds(size_t* n) {
    *n = 0x100000000 / 4099 + 1;
    float* x = filled_array(*n, 0.0f);
    for (size_t i = 0; i < *n; i++) { x[i] = float_from_bits((uint32_t)(i * 4099)); }
    return x;
}

// ---- fast against plain ----

static void check_length(Test* t, const float* x, const float* dout, size_t n, const Device* dev) {
    float *want = filled_array(n, 77.0f), *y = filled_array(n, 77.0f), *got = filled_array(n, NAN),
          *in_place = copied_array(x, n);
    char what[64];
    snprintf(what, sizeof what, "n %zu, %d threads", n, dev->n_threads);
    softplus_forward_ref(y, x, n);
    softplus_forward(got, x, n, dev), softplus_forward(in_place, in_place, n, dev);
    check_bits(t, what, got, y, n), check_bits(t, "softplus in place", in_place, y, n);
    softplus_backward_ref(want, dout, y, n);
    memcpy(in_place, dout, sizeof(float) * n);
    softplus_backward(got, dout, y, n, dev), softplus_backward(in_place, in_place, y, n, dev);
    check_bits(t, what, got, want, n), check_bits(t, "softplus backward in place", in_place, want, n);
    free(want), free(got), free(in_place), free(y);
}

static void test_lengths(Test* t) {
    const size_t lengths[] = {1, 7, 16, 33, 255, 257, 1009, 4096};
    float *x = random_array(4096, 30.0f, 1), *dout = random_array(4096, 1.0f, 2);
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++) { check_length(t, x, dout, lengths[j], &dev); }
        device_free(&dev);
    }
    free(x), free(dout);
}

static void test_all_kinds(Test* t) {
    size_t n;
    float *x = all_kinds(&n), *dout = hard_array(n, 3);
    sprinkle(dout, n, 100, 4);
    for (int i = 0; i < N_TEST_THREADS; i += 3) {
        Device dev = test_device(test_threads(i));
        check_length(t, x, dout, n, &dev);
        device_free(&dev);
    }
    free(x), free(dout);
}

// ---- the gate ----

// z and dz are the right halves of rows of 2 C + gap floats; where dz is written nothing else may change
typedef struct {
    int N, C;
    size_t stride;
    float *y, *z, *dout;    // given; z (N, stride)
    float *out, *dy, *dz;   // the plain loop's; dz (N, stride)
} Gate;

static Gate gate(int N, int C, int gap, int hard) {
    Gate g;
    size_t n = (size_t)N * (size_t)C;
    g.N = N, g.C = C, g.stride = (size_t)(2 * C + gap);
    size_t wide = (size_t)N * g.stride;
    g.y = hard ? hard_array(n, 1) : random_array(n, 2.0f, 1);
    g.z = hard ? hard_array(wide, 2) : random_array(wide, 6.0f, 2);
    g.dout = hard ? hard_array(n, 3) : random_array(n, 1.0f, 3);
    if (hard) { sprinkle(g.y, n, 20, 4), sprinkle(g.z, wide, 20, 5), sprinkle(g.dout, n, 20, 6); }
    g.out = filled_array(n, 77.0f), g.dy = filled_array(n, 77.0f), g.dz = copied_array(g.z, wide);
    gate_forward_ref(g.out, g.y, g.z + C, g.stride, N, C);
    gate_backward_ref(g.dy, g.dz + C, g.stride, g.dout, g.y, g.z + C, g.stride, N, C);
    return g;
}

static void gate_free(Gate* g) { free(g->y), free(g->z), free(g->dout), free(g->out), free(g->dy), free(g->dz); }

static void check_gate(Test* t, const Gate* g, const Device* dev) {
    size_t n = (size_t)g->N * (size_t)g->C, wide = (size_t)g->N * g->stride;
    float *out = filled_array(n, NAN), *dy = filled_array(n, NAN), *dz = copied_array(g->z, wide),
          *tight = filled_array(n, NAN);
    char what[64];
    snprintf(what, sizeof what, "out, N %d, C %d, %d threads", g->N, g->C, dev->n_threads);
    gate_forward(out, g->y, g->z + g->C, g->stride, g->N, g->C, dev);
    check_bits(t, what, out, g->out, n);
    memcpy(out, g->y, sizeof(float) * n);
    gate_forward(out, out, g->z + g->C, g->stride, g->N, g->C, dev);
    check_bits(t, "out is y", out, g->out, n);
    gate_backward(dy, dz + g->C, g->stride, g->dout, g->y, dz + g->C, g->stride, g->N, g->C, dev);
    check_bits(t, "dy", dy, g->dy, n);
    check_bits(t, "dz over z, and nothing beside it", dz, g->dz, wide);
    memcpy(dy, g->dout, sizeof(float) * n);
    gate_backward(dy, tight, (size_t)g->C, dy, g->y, g->z + g->C, g->stride, g->N, g->C, dev);
    check_bits(t, "dy is dout", dy, g->dy, n);
    for (int row = 0; row < g->N; row++) {
        const float *got = tight + (size_t)row * (size_t)g->C, *want = g->dz + (size_t)row * g->stride + g->C;
        check_bits(t, "dz of another stride", got, want, (size_t)g->C);
    }
    free(out), free(dy), free(dz), free(tight);
}

static void check_gates(Test* t, int hard) {
    const int shapes[][2] = {{1, 1}, {1, 7}, {7, 1}, {7, 33}, {33, 7}, {3, 257}, {257, 16}};  // N, C
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        Gate g = gate(shapes[i][0], shapes[i][1], (int)i % 3, hard);
        for (int j = 0; j < N_TEST_THREADS; j++) {
            Device dev = test_device(test_threads(j));
            check_gate(t, &g, &dev);
            device_free(&dev);
        }
        gate_free(&g);
    }
}

static void test_gate(Test* t) { check_gates(t, 0); }
static void test_gate_special(Test* t) { check_gates(t, 1); }

// ---- the expressions themselves ----

// spec numerics.md 1.5, one operation per line
static void test_frozen(Test* t) {
    size_t n;
    float *x = all_kinds(&n), *got = filled_array(n, NAN), *want = filled_array(n, 77.0f);
    for (size_t i = 0; i < n; i++) {
        float below = 1.0f + fm_exp(-x[i]);
        want[i] = x[i] / below;
        got[i] = silu_one(x[i]);
    }
    check_bits(t, "silu", got, want, n);
    for (size_t i = 0; i < n; i++) {
        float below = 1.0f + fm_exp(-x[i]), s = 1.0f / below, rest = 1.0f - s;
        rest = x[i] * rest;
        rest = 1.0f + rest;
        want[i] = s * rest;
        got[i] = silu_slope_one(x[i]);
    }
    check_bits(t, "slope of silu", got, want, n);
    for (size_t i = 0; i < n; i++) {
        float e = fm_exp(x[i]);
        want[i] = x[i] > 20.0f ? x[i] : fm_log1p(e);
    }
    softplus_forward_ref(got, x, n);
    check_bits(t, "softplus", got, want, n);
    for (size_t i = 0; i < n; i++) {
        float less = fm_expm1(-x[i]);
        want[i] = -less;
        got[i] = softplus_slope_one(x[i]);
    }
    check_bits(t, "slope of softplus", got, want, n);
    free(x), free(got), free(want);
}

// computed once with NumPy's float32, one operation at a time, exp, log1p and expm1 in double and rounded
static void test_known(Test* t) {
#ifdef SYSTEM_LIBM
    skip(t, "the parity build takes expf from the C library");
#else
    const uint32_t known[][5] = {  // x, silu, its slope, softplus, its slope from the output
        {0xc1480000, 0xb843621b, 0xb833c078, 0x367a174b, 0x367a172c},
        {0xc0400000, 0xbe11b139, 0xbdb46fec, 0x3d470387, 0x3d4241a1},
        {0xbfa39581, 0xbe8e92e7, 0x38d440c0, 0x3e7ba8c4, 0x3e5f1ec8},
        {0xbe800000, 0xbde02a67, 0x3ec0a915, 0x3f1370c4, 0x3ee02a67},
        {0x3dcccccd, 0x3d57080f, 0x3f0cc758, 0x3f3e90c8, 0x3f066509},
        {0x3f800000, 0x3f3b26a8, 0x3f6d7bd1, 0x3fa818f5, 0x3f3b26a7},
        {0x4089999a, 0x4087c20a, 0x3f858e55, 0x408a0802, 0x3f7c92ad},
        {0x419f3333, 0x419f3333, 0x3f800000, 0x419f3333, 0x3f800000},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        float x = float_from_bits(known[i][0]), y = softplus_one(x);
        float got[4] = {silu_one(x), silu_slope_one(x), y, softplus_slope_one(y)}, want[4];
        for (int j = 0; j < 4; j++) { want[j] = float_from_bits(known[i][1 + j]); }
        check_bits(t, "silu, slope, softplus, slope", got, want, 4);
    }
#endif
}

static double silu_double(double x) { return x / (1.0 + exp(-x)); }
static double softplus_double(double x) { return log1p(exp(x)); }

// sum of dout * f(x), for the f under test
typedef struct {
    double (*function)(double);
    const float* dout;
} Loss;

static double loss_double(const double* x, void* arg) {
    const Loss* l = (const Loss*)arg;
    double loss = 0.0;
    for (int i = 0; i < 257; i++) { loss += l->function(x[i]) * (double)l->dout[i]; }
    return loss;
}

static void test_double(Test* t) {
    float *x = random_array(257, 8.0f, 5), *dout = random_array(257, 1.0f, 6);
    float *y = filled_array(257, NAN), *dx = filled_array(257, NAN);
    double *at = double_array(x, 257), *want = double_array(x, 257), *slopes;
    Loss silu = {silu_double, dout}, softplus = {softplus_double, dout};
    for (int i = 0; i < 257; i++) { y[i] = silu_one(x[i]), want[i] = silu_double(at[i]); }
    check_close(t, "silu", y, want, 257, 3 * 0x1p-24 * 8.0);  // 3 roundings of values below 8
    for (int i = 0; i < 257; i++) { dx[i] = dout[i] * silu_slope_one(x[i]); }
    slopes = finite_differences(loss_double, at, 257, &silu);
    check_close(t, "slope of silu", dx, slopes, 257, (4 + 8 + 1) * 0x1p-24);  // silu.h, |x| < 8; and the product
    free(slopes);
    softplus_forward_ref(y, x, 257);
    for (int i = 0; i < 257; i++) { want[i] = softplus_double(at[i]); }
    check_close(t, "softplus", y, want, 257, 0x1p-23 * 8.0);
    softplus_backward_ref(dx, dout, y, 257);
    slopes = finite_differences(loss_double, at, 257, &softplus);
    check_close(t, "slope of softplus", dx, slopes, 257, 4 * 0x1p-24);  // 2^-23 of the slope below 1, and the product
    free(slopes), free(x), free(dout), free(y), free(dx), free(at), free(want);
}

// a small gate by finite differences: x = y, then z
static double gate_loss(const double* x, void* arg) {
    const float* dout = (const float*)arg;
    double loss = 0.0;
    for (int i = 0; i < 35; i++) { loss += x[i] * silu_double(x[35 + i]) * (double)dout[i]; }
    return loss;
}

static void test_gate_differences(Test* t) {
    float *x = random_array(70, 3.0f, 7), *dout = random_array(35, 1.0f, 8), dx[70];
    double *at = double_array(x, 70), *want = finite_differences(gate_loss, at, 70, dout);
    gate_backward_ref(dx, dx + 35, 7, dout, x, x + 35, 7, 5, 7);
    check_close(t, "dy and dz", dx, want, 70, 12 * 0x1p-24 * 4.0);  // |y * slope| < 4, 12 roundings
    free(x), free(dout), free(at), free(want);
}

static void test_obvious(Test* t) {
    check(t, silu_one(0.0f) == 0.0f && silu_slope_one(0.0f) == 0.5f, "silu at 0 is 0, its slope 1/2");
    check(t, silu_one(100.0f) == 100.0f && silu_slope_one(100.0f) == 1.0f, "silu is x far right");
    check(t, float_bits(silu_one(-1e30f)) == 0x80000000 && silu_slope_one(-1e30f) == 0.0f, "silu is -0 far left");
    check(t, softplus_one(20.5f) == 20.5f && softplus_one(INFINITY) == INFINITY, "softplus is x far right");
    check(t, softplus_one(-INFINITY) == 0.0f, "softplus is 0 far left");
    check(t, isnan(softplus_one(NAN)) && isnan(silu_one(NAN)), "NaN stays NaN");
    check(t, softplus_slope_one(25.0f) == 1.0f && softplus_slope_one(0.0f) == 0.0f,
          "slope of softplus: 1 far right, 0 far left");
    float below = softplus_one(20.0f), above = softplus_one(float_from_bits(float_bits(20.0f) + 1));
    check(t, below == 20.0f && above > below, "softplus has no jump at 20: %.9g, %.9g", (double)below, (double)above);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"lengths", "softplus, forward and backward, equals the plain loops at odd lengths, in place too",
         test_lengths},
        {"all kinds", "the same over every 4099th float, Inf and NaN among them", test_all_kinds},
        {"gate", "out, dy and dz equal the plain loops at odd shapes, with strides, in place; nothing else is written",
         test_gate},
        {"gate special", "the same with cancellation, subnormals, -0, Inf, NaN", test_gate_special},
        {"frozen", "the plain loops are the expressions of the specification, bit for bit", test_frozen},
        {"known", "eight values and slopes have the bits that NumPy gives", test_known},
        {"double", "values and slopes agree with double and finite differences on -8 .. 8", test_double},
        {"gate differences", "dy and dz agree with finite differences at (5, 7)", test_gate_differences},
        {"obvious", "what 0, far left, far right and NaN give; no jump at the threshold", test_obvious},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
