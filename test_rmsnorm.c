/*
Promises of llmc/ops/rmsnorm.h. The plain loop is judged in double, by finite differences and on rows whose answer is obvious; the
fast version must equal it bit for bit, whatever the shape and the threads.
*/
#include "llmc/ops/rmsnorm.h"
#include "llmc/test/asked.h"
#include "llmc/test/test.h"

static const float EPS = 1e-5f;

// one problem and the plain loop's answer
typedef struct {
    int N, C;
    float *inp, *weight, *dout, *dinp_before;  // given
    float *out, *rstd, *dinp, *dweight;        // found
} RMSNorm;

// hard 1: cancellation, subnormals, -0; hard 2: also infinities and NaNs
static RMSNorm rmsnorm(int N, int C, int hard) {
    RMSNorm r;
    size_t n = (size_t)N * (size_t)C, rows = (size_t)N, channels = (size_t)C;
    r.N = N, r.C = C;
    r.inp = hard ? hard_array(n, 1) : random_array(n, 2.0f, 1);
    r.weight = hard ? hard_array(channels, 2) : random_array(channels, 1.5f, 2);
    r.dout = hard ? hard_array(n, 3) : random_array(n, 1.0f, 3);
    r.dinp_before = random_array(n, 1.0f, 4);
    if (hard == 2) {
        sprinkle(r.inp, n, (uint32_t)(n / 3 + 2), 5);
        sprinkle(r.weight, channels, 40, 6);
        sprinkle(r.dout, n, (uint32_t)(n / 3 + 2), 7);
    }
    r.out = filled_array(n, 77.0f), r.rstd = filled_array(rows, 77.0f);
    r.dinp = copied_array(r.dinp_before, n), r.dweight = filled_array(channels, 77.0f);
    rmsnorm_forward_ref(r.out, r.rstd, r.inp, r.weight, EPS, N, C);
    rmsnorm_backward_ref(r.dinp, r.dweight, r.dout, r.inp, r.weight, r.rstd, N, C);
    return r;
}

static void rmsnorm_free(RMSNorm* r) {
    free(r->inp), free(r->weight), free(r->dout), free(r->dinp_before);
    free(r->out), free(r->rstd), free(r->dinp), free(r->dweight);
}

static void check_forward(Test* t, const RMSNorm* r, const Device* dev) {
    size_t n = (size_t)r->N * (size_t)r->C, rows = (size_t)r->N;
    float *out = filled_array(n, NAN), *rstd = filled_array(rows, NAN);
    char what[64];
    rmsnorm_forward(out, rstd, r->inp, r->weight, EPS, r->N, r->C, dev);
    snprintf(what, sizeof what, "out, N %d, C %d, %d threads", r->N, r->C, dev->n_threads);
    check_bits(t, what, out, r->out, n);
    check_bits(t, "rstd", rstd, r->rstd, rows);
    free(out), free(rstd);
}

static void check_backward(Test* t, const RMSNorm* r, const Device* dev) {
    size_t n = (size_t)r->N * (size_t)r->C, channels = (size_t)r->C;
    float *dinp = copied_array(r->dinp_before, n), *dweight = filled_array(channels, NAN);
    char what[64];
    rmsnorm_backward(dinp, dweight, r->dout, r->inp, r->weight, r->rstd, r->N, r->C, dev);
    snprintf(what, sizeof what, "dinp, N %d, C %d, %d threads", r->N, r->C, dev->n_threads);
    check_bits(t, what, dinp, r->dinp, n);
    check_bits(t, "dweight", dweight, r->dweight, channels);
    free(dinp), free(dweight);
}

// d: dinp, dweight; inputs that nobody needs are NULL
static void asked_plain(float* const* d, const void* problem, const Device* dev) {
    const RMSNorm* r = (const RMSNorm*)problem;
    int any = d[0] || d[1];
    (void)dev;
    rmsnorm_backward_ref(d[0], d[1], any ? r->dout : NULL, any ? r->inp : NULL, d[0] ? r->weight : NULL, any ? r->rstd : NULL,
                         r->N, r->C);
}

static void asked_fast(float* const* d, const void* problem, const Device* dev) {
    const RMSNorm* r = (const RMSNorm*)problem;
    int any = d[0] || d[1];
    rmsnorm_backward(d[0], d[1], any ? r->dout : NULL, any ? r->inp : NULL, d[0] ? r->weight : NULL, any ? r->rstd : NULL,
                     r->N, r->C, dev);
}

static void test_asked(Test* t) {
    const int shapes[][2] = {{7, 33}, {2 * VLANES + 3, 129}};  // N, C
    Device dev = test_device(3);
    for (int i = 0; i < 2; i++) {
        RMSNorm r = rmsnorm(shapes[i][0], shapes[i][1], 1);
        const AskedGradient gradients[] = {{"dinp", (size_t)r.N * (size_t)r.C, r.dinp_before}, {"dweight", (size_t)r.C, NULL}};
        check_asked(t, "plain", gradients, 2, asked_plain, &r, &dev);
        check_asked(t, "fast", gradients, 2, asked_fast, &r, &dev);
        rmsnorm_free(&r);
    }
    device_free(&dev);
}

static void check_shapes(Test* t, void (*check_one)(Test*, const RMSNorm*, const Device*), int hard) {
    const int shapes[][2] = {  // N, C
        {1, 1}, {1, 7}, {7, 1}, {7, 33}, {33, 7}, {16, 16}, {64, 128}, {65, 127}, {257, 33}, {33, 257}, {31, 129}, {17, 769},
        {VLANES, VLANES}, {VLANES + 1, VLANES - 1}, {2 * VLANES - 1, 3 * VLANES + 1}, {3, 1600}, {2 * VLANES, 5641},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        RMSNorm r = rmsnorm(shapes[i][0], shapes[i][1], hard);
        for (int j = 0; j < N_TEST_THREADS; j++) {
            Device dev = test_device(test_threads(j));
            check_one(t, &r, &dev);
            device_free(&dev);
        }
        rmsnorm_free(&r);
    }
}

static void test_forward(Test* t) { check_shapes(t, check_forward, 0); }
static void test_backward(Test* t) { check_shapes(t, check_backward, 0); }

static void test_forward_special(Test* t) {
    check_shapes(t, check_forward, 1);
    check_shapes(t, check_forward, 2);
}

static void test_backward_special(Test* t) {
    check_shapes(t, check_backward, 1);
    check_shapes(t, check_backward, 2);
}

// a row with Inf or NaN leaves its neighbours as they were, also those that share its vector
static void test_rows_apart(Test* t) {
    enum { N = 2 * VLANES + 3, C = 33 };
    RMSNorm r = rmsnorm(N, C, 0);
    Device dev = test_device(2);
    float *out = filled_array(N * C, NAN), *rstd = filled_array(N, NAN), *dweight = filled_array(C, NAN);
    for (int spoilt = 0; spoilt < N; spoilt += 5) {
        float *inp = copied_array(r.inp, N * C), *dinp = copied_array(r.dinp_before, N * C);
        inp[spoilt * C + 7] = spoilt % 2 ? INFINITY : NAN;
        rmsnorm_forward(out, rstd, inp, r.weight, EPS, N, C, &dev);
        rmsnorm_backward(dinp, dweight, r.dout, inp, r.weight, rstd, N, C, &dev);
        for (int row = 0; row < N; row++) {
            if (row == spoilt) { continue; }
            check_bits(t, "out", out + row * C, r.out + row * C, C);
            check_bits(t, "dinp", dinp + row * C, r.dinp + row * C, C);
        }
        free(inp), free(dinp);
    }
    free(out), free(rstd), free(dweight);
    device_free(&dev);
    rmsnorm_free(&r);
}

// ---- the plain loop itself ----

static void rmsnorm_double(double* out, const double* inp, const double* weight, int N, int C) {
    for (int n = 0; n < N; n++) {
        double mean = 0.0;
        for (int c = 0; c < C; c++) { mean += inp[n * C + c] * inp[n * C + c] / C; }
        for (int c = 0; c < C; c++) { out[n * C + c] = inp[n * C + c] / sqrt(mean + 1e-5) * weight[c]; }
    }
}

static void test_double(Test* t) {
    RMSNorm r = rmsnorm(7, 257, 0);
    double *inp = double_array(r.inp, 7 * 257), *weight = double_array(r.weight, 257), *want = double_array(r.out, 7 * 257);
    rmsnorm_double(want, inp, weight, 7, 257);
    // |out| < 3; half the relative error of the sum of squares comes into rstd; 8 more roundings
    check_close(t, "out", r.out, want, 7 * 257, (rounding_walk(257, 1.0) / 2.0 + rounding_walk(8, 1.0)) * 3.0);
    free(inp), free(weight), free(want);
    rmsnorm_free(&r);
}

// sum of dout * out; x = inp, then weight
static double rmsnorm_loss(const double* x, void* arg) {
    const RMSNorm* r = (const RMSNorm*)arg;
    int n = r->N * r->C;
    double loss = 0.0, *out = double_array(r->out, (size_t)n);
    rmsnorm_double(out, x, x + n, r->N, r->C);
    for (int i = 0; i < n; i++) { loss += out[i] * (double)r->dout[i]; }
    free(out);
    return loss;
}

static void test_differences(Test* t) {
    enum { N = 7, C = 33 };
    RMSNorm r = rmsnorm(N, C, 0);
    float x[N * C + C];
    memcpy(x, r.inp, sizeof(float) * N * C);
    memcpy(x + N * C, r.weight, sizeof(float) * C);
    double *at = double_array(x, N * C + C), *want = finite_differences(rmsnorm_loss, at, N * C + C, &r);
    for (int i = 0; i < N * C; i++) { want[i] += (double)r.dinp_before[i]; }  // dinp is added to
    const double tolerance = rounding_walk(2 * C, 4.0);  // gradients below 4, made of two chains of C terms
    check_close(t, "dinp", r.dinp, want, N * C, tolerance);
    check_close(t, "dweight", r.dweight, want + N * C, C, tolerance);
    free(at), free(want);
    rmsnorm_free(&r);
}

// the specification of both, one operation per line, for one row
static void test_frozen(Test* t) {
    enum { C = 19 };
    RMSNorm r = rmsnorm(1, C, 0);
    float squares = 0.0f, dot = 0.0f, out[C], dinp[C], dweight[C];
    for (int c = 0; c < C; c++) {
        float square = r.inp[c] * r.inp[c];
        squares = squares + square;
    }
    float mean = squares / 19.0f, s = 1.0f / sqrtf(mean + EPS);
    for (int c = 0; c < C; c++) {
        float xhat = r.inp[c] * s, g = r.dout[c] * r.weight[c], gx = g * r.inp[c], dx = r.dout[c] * r.inp[c];
        out[c] = xhat * r.weight[c];
        gx = gx * s;
        dot = dot + gx;
        dx = dx * s;
        dweight[c] = 0.0f + dx;
    }
    float mean_gx = dot / 19.0f;
    for (int c = 0; c < C; c++) {
        float xhat = r.inp[c] * s, g = r.dout[c] * r.weight[c], part = xhat * mean_gx;
        part = g - part;
        part = s * part;
        dinp[c] = r.dinp_before[c] + part;
    }
    check_bits(t, "out", r.out, out, C);
    check_bits(t, "rstd", r.rstd, &s, 1);
    check_bits(t, "dinp", r.dinp, dinp, C);
    check_bits(t, "dweight", r.dweight, dweight, C);
    rmsnorm_free(&r);
}

static void test_obvious(Test* t) {
    const float inp[] = {0, 0, 0, 0, 1000, -1000, 1000, -1000}, weight[] = {1, 2, 3, 4}, dout[] = {1, 2, 3, 4, 1, 2, 3, 4};
    const float want_out[] = {0, 0, 0, 0, 1, -2, 3, -4}, want_dweight[] = {1, -2, 3, -4};
    float out[8], rstd[2], dinp[8] = {0}, dweight[4];
    Device dev = test_device(1);
    rmsnorm_forward(out, rstd, inp, weight, EPS, 2, 4, &dev);
    rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd, 2, 4, &dev);
    check(t, rstd[0] == 1.0f / sqrtf(EPS), "a row of zeros: rstd is 1/sqrt(eps), found %.9g", (double)rstd[0]);
    for (int c = 0; c < 8; c++) {  // +-1000: eps is far below the last place of 10^6, rstd is the float nearest 1/1000
        check(t, fabsf(out[c] - want_out[c]) < 1e-6f, "out[%d]: found %.9g", c, (double)out[c]);
    }
    for (int c = 0; c < 4; c++) {
        check(t, dinp[c] == rstd[0] * (dout[c] * weight[c]), "a row of zeros: dinp is g * rstd, found %.9g", (double)dinp[c]);
        check(t, fabsf(dweight[c] - want_dweight[c]) < 1e-6f, "dweight of channel %d: found %.9g", c, (double)dweight[c]);
    }
    device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"forward", "out and rstd equal the plain loop bit for bit at odd shapes", test_forward},
        {"forward special", "the same with cancellation, subnormals, -0, Inf, NaN", test_forward_special},
        {"backward", "dinp (added) and dweight (written) equal the plain loop bit for bit at odd shapes", test_backward},
        {"backward special", "the same with cancellation, subnormals, -0, Inf, NaN", test_backward_special},
        {"asked", "gradients that nobody asks for are NULL: the others keep their bits", test_asked},
        {"rows apart", "Inf or NaN in a row reaches no other row", test_rows_apart},
        {"frozen", "the plain loop rounds as the specification says, bit for bit", test_frozen},
        {"forward double", "out agrees with double at (7, 257)", test_double},
        {"backward differences", "dinp and dweight agree with finite differences at (7, 33)", test_differences},
        {"obvious", "a row of zeros stays 0, +-1000 becomes +-1 times the weight", test_obvious},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
