/*
Promises of llmc/layernorm.h. The plain loop is judged in double, by finite differences and on rows whose answer is
obvious; the fast version must equal it bit for bit, whatever the shape and the threads.
*/
#include "llmc/layernorm.h"
#include "llmc/test.h"

// one problem and the plain loop's answer
typedef struct {
    int N, C;
    float *inp, *weight, *bias, *dout, *dinp_before;            // given
    float *out, *mean, *rstd, *dinp, *dweight, *dbias;          // found
} LayerNorm;

// hard 1: cancellation, subnormals, -0; hard 2: also infinities and NaNs
static LayerNorm layernorm(int N, int C, int hard) {
    LayerNorm l;
    size_t n = (size_t)N * (size_t)C, rows = (size_t)N, channels = (size_t)C;
    l.N = N, l.C = C;
    l.inp = hard ? hard_array(n, 1) : random_array(n, 2.0f, 1);
    l.weight = hard ? hard_array(channels, 2) : random_array(channels, 1.5f, 2);
    l.bias = hard ? hard_array(channels, 3) : random_array(channels, 1.0f, 3);
    l.dout = hard ? hard_array(n, 4) : random_array(n, 1.0f, 4);
    l.dinp_before = random_array(n, 1.0f, 5);
    if (hard == 2) {
        sprinkle(l.inp, n, (uint32_t)(n / 3 + 2), 6);
        sprinkle(l.weight, channels, 40, 7);
        sprinkle(l.bias, channels, 20, 8);
        sprinkle(l.dout, n, (uint32_t)(n / 3 + 2), 9);
    }
    l.out = filled_array(n, 77.0f), l.mean = filled_array(rows, 77.0f), l.rstd = filled_array(rows, 77.0f);
    l.dinp = copied_array(l.dinp_before, n), l.dweight = filled_array(channels, 77.0f),
    l.dbias = filled_array(channels, 77.0f);
    layernorm_forward_ref(l.out, l.mean, l.rstd, l.inp, l.weight, l.bias, N, C);
    layernorm_backward_ref(l.dinp, l.dweight, l.dbias, l.dout, l.inp, l.weight, l.mean, l.rstd, N, C);
    return l;
}

static void layernorm_free(LayerNorm* l) {
    free(l->inp), free(l->weight), free(l->bias), free(l->dout), free(l->dinp_before);
    free(l->out), free(l->mean), free(l->rstd), free(l->dinp), free(l->dweight), free(l->dbias);
}

// ---- fast against plain ----

static void check_forward(Test* t, const LayerNorm* l, const Device* dev) {
    size_t n = (size_t)l->N * (size_t)l->C, rows = (size_t)l->N;
    float *out = filled_array(n, NAN), *mean = filled_array(rows, NAN), *rstd = filled_array(rows, NAN);
    char what[64];
    layernorm_forward(out, mean, rstd, l->inp, l->weight, l->bias, l->N, l->C, dev);
    snprintf(what, sizeof what, "out, N %d, C %d, %d threads", l->N, l->C, dev->n_threads);
    check_bits(t, what, out, l->out, n);
    check_bits(t, "mean", mean, l->mean, rows);
    check_bits(t, "rstd", rstd, l->rstd, rows);
    free(out), free(mean), free(rstd);
}

static void check_backward(Test* t, const LayerNorm* l, const Device* dev) {
    size_t n = (size_t)l->N * (size_t)l->C, channels = (size_t)l->C;
    float *dinp = copied_array(l->dinp_before, n), *dweight = filled_array(channels, NAN),
          *dbias = filled_array(channels, NAN);
    char what[64];
    layernorm_backward(dinp, dweight, dbias, l->dout, l->inp, l->weight, l->mean, l->rstd, l->N, l->C, dev);
    snprintf(what, sizeof what, "dinp, N %d, C %d, %d threads", l->N, l->C, dev->n_threads);
    check_bits(t, what, dinp, l->dinp, n);
    check_bits(t, "dweight", dweight, l->dweight, channels);
    check_bits(t, "dbias", dbias, l->dbias, channels);
    free(dinp), free(dweight), free(dbias);
}

static void check_shapes(Test* t, void (*check_one)(Test*, const LayerNorm*, const Device*), int hard) {
    const int shapes[][2] = {  // N, C
        {1, 1}, {1, 7}, {7, 1}, {7, 33}, {33, 7}, {16, 16}, {64, 128}, {65, 127}, {257, 33}, {33, 257}, {31, 129},
        {17, 769}, {VLANES, VLANES}, {VLANES + 1, VLANES - 1}, {2 * VLANES - 1, 3 * VLANES + 1},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        LayerNorm l = layernorm(shapes[i][0], shapes[i][1], hard);
        for (int j = 0; j < N_TEST_THREADS; j++) {
            Device dev = test_device(test_threads(j));
            check_one(t, &l, &dev);
            device_free(&dev);
        }
        layernorm_free(&l);
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
    LayerNorm l = layernorm(2 * VLANES + 3, 33, 0);
    Device dev = test_device(2);
    size_t n = (size_t)l.N * 33;
    for (int spoilt = 0; spoilt < l.N; spoilt += 5) {
        float *inp = copied_array(l.inp, n), *out = filled_array(n, NAN), *dinp = copied_array(l.dinp_before, n);
        float *mean = filled_array((size_t)l.N, NAN), *rstd = filled_array((size_t)l.N, NAN), dweight[33], dbias[33];
        inp[spoilt * 33 + 7] = spoilt % 2 ? INFINITY : NAN;
        layernorm_forward(out, mean, rstd, inp, l.weight, l.bias, l.N, 33, &dev);
        layernorm_backward(dinp, dweight, dbias, l.dout, inp, l.weight, mean, rstd, l.N, 33, &dev);
        for (int row = 0; row < l.N; row++) {
            if (row == spoilt) { continue; }
            check_bits(t, "out", out + row * 33, l.out + row * 33, 33);
            check_bits(t, "dinp", dinp + row * 33, l.dinp + row * 33, 33);
        }
        free(inp), free(out), free(dinp), free(mean), free(rstd);
    }
    device_free(&dev);
    layernorm_free(&l);
}

// ---- the plain loop itself ----

static void layernorm_double(double* out, const double* inp, const double* weight, const double* bias, int N, int C) {
    for (int n = 0; n < N; n++) {
        double mean = 0.0, var = 0.0;
        for (int c = 0; c < C; c++) { mean += inp[n * C + c] / C; }
        for (int c = 0; c < C; c++) { var += (inp[n * C + c] - mean) * (inp[n * C + c] - mean) / C; }
        for (int c = 0; c < C; c++) {
            out[n * C + c] = (inp[n * C + c] - mean) / sqrt(var + 1e-5) * weight[c] + bias[c];
        }
    }
}

static void test_forward_double(Test* t) {
    LayerNorm l = layernorm(7, 257, 0);
    double *inp = double_array(l.inp, 7 * 257), *weight = double_array(l.weight, 257),
           *bias = double_array(l.bias, 257);
    double* want = double_array(l.out, 7 * 257);
    layernorm_double(want, inp, weight, bias, 7, 257);
    // |out| < 4; the mean is a chain of sums below 64 over 257; half the variance's relative error comes into rstd; 8
    // more roundings
    double tolerance = (rounding_walk(257, 64.0) / 257.0 + rounding_walk(257, 1.0) / 2.0 + rounding_walk(8, 1.0)) * 4.0;
    check_close(t, "out", l.out, want, 7 * 257, tolerance);
    free(inp), free(weight), free(bias), free(want);
    layernorm_free(&l);
}

// sum of dout * out; x = inp, then weight, then bias
static double layernorm_loss(const double* x, void* arg) {
    const LayerNorm* l = (const LayerNorm*)arg;
    int n = l->N * l->C;
    double loss = 0.0, *out = double_array(l->out, (size_t)n);
    layernorm_double(out, x, x + n, x + n + l->C, l->N, l->C);
    for (int i = 0; i < n; i++) { loss += out[i] * (double)l->dout[i]; }
    free(out);
    return loss;
}

static void test_differences(Test* t) {
    enum { N = 7, C = 33 };
    LayerNorm l = layernorm(N, C, 0);
    float x[N * C + 2 * C];
    memcpy(x, l.inp, sizeof(float) * N * C);
    memcpy(x + N * C, l.weight, sizeof(float) * C);
    memcpy(x + N * C + C, l.bias, sizeof(float) * C);
    double *at = double_array(x, N * C + 2 * C), *want = finite_differences(layernorm_loss, at, N * C + 2 * C, &l);
    for (int i = 0; i < N * C; i++) { want[i] += (double)l.dinp_before[i]; }  // dinp is added to
    const double tolerance = rounding_walk(3 * C, 4.0);  // gradients below 4, made of three chains of C terms
    check_close(t, "dinp", l.dinp, want, N * C, tolerance);
    check_close(t, "dweight", l.dweight, want + N * C, C, tolerance);
    check_close(t, "dbias", l.dbias, want + N * C + C, C, tolerance);
    free(at), free(want);
    layernorm_free(&l);
}

static void test_obvious(Test* t) {
    const float inp[] = {3, 3, 3, 3, 1000, -1000, 1000, -1000}, weight[] = {1, 2, 3, 4}, bias[] = {5, 6, 7, 8};
    const float want_constant[] = {5, 6, 7, 8}, want_alternating[] = {6, 4, 10, 4}, dout[] = {0, 0, 0, 0, 1, 2, 3, 4};
    const float want_dweight[] = {1, -2, 3, -4}, want_dbias[] = {1, 2, 3, 4};
    float out[8], mean[2], rstd[2], dinp[8] = {0}, dweight[4], dbias[4];
    Device dev = test_device(1);
    layernorm_forward(out, mean, rstd, inp, weight, bias, 2, 4, &dev);
    check_bits(t, "a constant row gives the bias", out, want_constant, 4);
    check(t, mean[0] == 3.0f && rstd[0] == 1.0f / sqrtf(1e-5f), "constant row: mean 3 and variance 0, found %.9g",
          (double)mean[0]);
    for (int c = 0; c < 4; c++) {  // +-1000: eps is far below the last place of 10^6, rstd is the float nearest 1/1000
        check(t, fabsf(out[4 + c] - want_alternating[c]) < 1e-6f, "alternating row, channel %d: found %.9g", c,
              (double)out[4 + c]);
    }
    layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd, 2, 4, &dev);
    for (int c = 0; c < 4; c++) {
        check(t, fabsf(dweight[c] - want_dweight[c]) < 1e-6f, "dweight of channel %d: found %.9g", c,
              (double)dweight[c]);
        check(t, dinp[c] == 0.0f, "no gradient came into row 0, found %.9g", (double)dinp[c]);
    }
    check_bits(t, "dbias", dbias, want_dbias, 4);
    device_free(&dev);
}

// a bias that is minus the rounded product gives 0 unless a fused multiply-add keeps what was rounded off
static void test_rounding(Test* t) {
    const float inp[] = {1.0f, -1.0f}, rstd = 1.0f / sqrtf(1.0f + 1e-5f), w = 1.0f + 0x1p-12f, weight[] = {w, w};
    float product = rstd * w, bias[] = {-product, product}, out[2], mean, found_rstd;
    Device dev = test_device(1);
    layernorm_forward(out, &mean, &found_rstd, inp, weight, bias, 1, 2, &dev);
    check(t, found_rstd == rstd, "rstd: found %.9g, expected %.9g", (double)found_rstd, (double)rstd);
    check(t, out[0] == 0.0f && out[1] == 0.0f, "found %g and %g, expected 0", (double)out[0], (double)out[1]);
    device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"forward", "out, mean and rstd equal the plain loop bit for bit at odd shapes", test_forward},
        {"forward special", "the same with cancellation, subnormals, -0, Inf, NaN", test_forward_special},
        {"backward", "dinp (added), dweight and dbias (written) equal the plain loop bit for bit at odd shapes",
         test_backward},
        {"backward special", "the same with cancellation, subnormals, -0, Inf, NaN", test_backward_special},
        {"rows apart", "Inf or NaN in a row reaches no other row", test_rows_apart},
        {"forward double", "the plain loop agrees with double at (7, 257)", test_forward_double},
        {"backward differences", "the plain loop agrees with finite differences at (7, 33)", test_differences},
        {"obvious", "a constant row gives the bias, a row of +-1000 the weights", test_obvious},
        {"rounding", "products round before they are added: no fused multiply-add", test_rounding},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
