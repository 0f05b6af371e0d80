/*
Promises of llmc/ops/layernorm.h. The plain loop is judged in double, by finite differences and on rows whose answer is
obvious; the fast version must equal it bit for bit, whatever the shape and the threads. Fast builds for GPUs keep tolerances.
*/
#include "llmc/ops/layernorm.h"
#include "llmc/test/asked.h"
#include "llmc/test/test.h"

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

// ---- fast against plain, on the device ----

static void forward(float* out, float* mean, float* rstd, const float* inp, const LayerNorm* l, const Device* dev) {
    size_t n = (size_t)l->N * (size_t)l->C, rows = (size_t)l->N, channels = (size_t)l->C;
    float *d_inp = to_device(inp, n, dev), *weight = to_device(l->weight, channels, dev), *bias = to_device(l->bias, channels, dev);
    float *d_out = to_device(out, n, dev), *d_mean = to_device(mean, rows, dev), *d_rstd = to_device(rstd, rows, dev);
    layernorm_forward(d_out, d_mean, d_rstd, d_inp, weight, bias, l->N, l->C, dev);
    from_device(out, d_out, n, dev), from_device(mean, d_mean, rows, dev), from_device(rstd, d_rstd, rows, dev);
    device_drop(d_inp), device_drop(weight), device_drop(bias);
}

// in_place 0: residual lies apart, 1: it is left, 2: it is right
static void residual_and_forward(int in_place, float* residual, float* out, float* mean, float* rstd, const float* left, const float* right,
                                const LayerNorm* l, const Device* dev) {
    size_t n = (size_t)l->N * (size_t)l->C, rows = (size_t)l->N, channels = (size_t)l->C;
    float *d_left = to_device(left, n, dev), *d_right = to_device(right, n, dev), *apart = to_device(residual, n, dev);
    float *weight = to_device(l->weight, channels, dev), *bias = to_device(l->bias, channels, dev);
    float *d_out = to_device(out, n, dev), *d_mean = to_device(mean, rows, dev), *d_rstd = to_device(rstd, rows, dev);
    float* d_residual = in_place == 1 ? d_left : in_place == 2 ? d_right : apart;
    residual_layernorm_forward(d_residual, d_out, d_mean, d_rstd, d_left, d_right, weight, bias, l->N, l->C, dev);
    from_device(residual, d_residual, n, dev);
    from_device(out, d_out, n, dev), from_device(mean, d_mean, rows, dev), from_device(rstd, d_rstd, rows, dev);
    if (in_place != 1) { device_drop(d_left); }
    if (in_place != 2) { device_drop(d_right); }
    if (in_place) { device_drop(apart); }
    device_drop(weight), device_drop(bias);
}

static void backward(float* dinp, float* dweight, float* dbias, const float* inp, const float* mean, const float* rstd, const LayerNorm* l,
                     const Device* dev) {
    size_t n = (size_t)l->N * (size_t)l->C, rows = (size_t)l->N, channels = (size_t)l->C;
    float *d_inp = to_device(inp, n, dev), *dout = to_device(l->dout, n, dev), *weight = to_device(l->weight, channels, dev);
    float *d_mean = to_device(mean, rows, dev), *d_rstd = to_device(rstd, rows, dev), *d_dinp = to_device(dinp, n, dev);
    float *d_dweight = to_device(dweight, channels, dev), *d_dbias = to_device(dbias, channels, dev);
    layernorm_backward(d_dinp, d_dweight, d_dbias, dout, d_inp, weight, d_mean, d_rstd, l->N, l->C, dev);
    from_device(dinp, d_dinp, n, dev), from_device(dweight, d_dweight, channels, dev), from_device(dbias, d_dbias, channels, dev);
    device_drop(d_inp), device_drop(dout), device_drop(weight), device_drop(d_mean), device_drop(d_rstd);
}

// d: dinp, dweight, dbias; inputs that nobody needs are NULL
static void asked_plain(float* const* d, const void* problem, const Device* dev) {
    const LayerNorm* l = (const LayerNorm*)problem;
    int any = d[0] || d[1] || d[2], rows = d[0] || d[1];
    (void)dev;
    layernorm_backward_ref(d[0], d[1], d[2], any ? l->dout : NULL, rows ? l->inp : NULL, d[0] ? l->weight : NULL,
                           rows ? l->mean : NULL, rows ? l->rstd : NULL, l->N, l->C);
}

static void asked_fast(float* const* d, const void* problem, const Device* dev) {
    const LayerNorm* l = (const LayerNorm*)problem;
    size_t n = (size_t)l->N * (size_t)l->C, N = (size_t)l->N, C = (size_t)l->C;
    int any = d[0] || d[1] || d[2], rows = d[0] || d[1] || (FAST_KERNELS && d[2]);  // there dbias comes with dweight
    float *inp = asked_to_device(rows ? l->inp : NULL, n, dev), *dout = asked_to_device(any ? l->dout : NULL, n, dev);
    float *weight = asked_to_device(d[0] ? l->weight : NULL, C, dev), *mean = asked_to_device(rows ? l->mean : NULL, N, dev);
    float *rstd = asked_to_device(rows ? l->rstd : NULL, N, dev), *dinp = asked_to_device(d[0], n, dev);
    float *dweight = asked_to_device(d[1], C, dev), *dbias = asked_to_device(d[2], C, dev);
    layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd, l->N, l->C, dev);
    asked_from_device(d[0], dinp, n, dev), asked_from_device(d[1], dweight, C, dev), asked_from_device(d[2], dbias, C, dev);
    device_drop(inp), device_drop(dout), device_drop(weight), device_drop(mean), device_drop(rstd);
}

static void test_asked(Test* t) {
    const int shapes[][2] = {{7, 33}, {35, 64}, {33, 260}};  // N, C: on a GPU no packs, one pass, packs but two passes
    Device dev = test_device(3);
    for (int i = 0; i < 3; i++) {
        LayerNorm l = layernorm(shapes[i][0], shapes[i][1], 1);
        const AskedGradient gradients[] = {
            {"dinp", (size_t)l.N * (size_t)l.C, l.dinp_before}, {"dweight", (size_t)l.C, NULL}, {"dbias", (size_t)l.C, NULL},
        };
        check_asked(t, "plain", gradients, 3, asked_plain, &l, &dev);
        check_asked(t, "fast", gradients, 3, asked_fast, &l, &dev);
        layernorm_free(&l);
    }
    device_free(&dev);
}

// bits; in a fast build within the tolerance
static void check_same(Test* t, const char* what, const float* got, const float* want, size_t n, double tolerance) {
    if (!FAST_KERNELS) {
        check_bits(t, what, got, want, n);
        return;
    }
    double* exact = double_array(want, n);
    check_close(t, what, got, exact, n, tolerance);
    free(exact);
}

// What two orders of the sums may be apart. |inp| < 3 (a residual sum; 2 otherwise), |weight| < 1.5, |bias|, |dout| < 1; the rows
// of these tests have rstd < 3, or one channel, and then every order is exact
static double mean_tolerance(int C) { return 2.0 * rounding_walk(C, 3.0 * C) / C; }

// d rstd = rstd^3 / 2 * d var; the squares add up to less than 9 C
static double rstd_tolerance(int C) { return 13.5 * 2.0 * rounding_walk(C, 9.0 * C) / C + rounding_walk(4, 3.0); }

// d out = rstd * weight * d mean + (inp - mean) * weight * d rstd, and 8 roundings of values below 16
static double out_tolerance(int C) { return 4.5 * mean_tolerance(C) + 9.0 * rstd_tolerance(C) + rounding_walk(8, 16.0); }

// |xhat| < 12: the sum of g has terms below 1.5, that of g * xhat below 18 and comes back times xhat; all times rstd
static double dinp_tolerance(int C) {
    return 3.0 * 2.0 * (rounding_walk(C, 1.5 * C) + 12.0 * rounding_walk(C, 18.0 * C)) / C + rounding_walk(8, 64.0);
}

static double dweight_tolerance(int N) { return 2.0 * rounding_walk(N, 12.0 * N) + rounding_walk(4 * N, 12.0); }
static double dbias_tolerance(int N) { return 2.0 * rounding_walk(N, 1.0 * N); }

static void check_forward(Test* t, const LayerNorm* l, const Device* dev) {
    size_t n = (size_t)l->N * (size_t)l->C, rows = (size_t)l->N;
    float *out = filled_array(n, NAN), *mean = filled_array(rows, NAN), *rstd = filled_array(rows, NAN);
    char what[64];
    forward(out, mean, rstd, l->inp, l, dev);
    snprintf(what, sizeof what, "out, N %d, C %d, %d threads", l->N, l->C, dev->n_threads);
    check_same(t, what, out, l->out, n, out_tolerance(l->C));
    check_same(t, "mean", mean, l->mean, rows, mean_tolerance(l->C));
    check_same(t, "rstd", rstd, l->rstd, rows, rstd_tolerance(l->C));
    free(out), free(mean), free(rstd);
}

// inp is left, dinp_before is right
static void check_residual(Test* t, const LayerNorm* l, const Device* dev) {
    size_t n = (size_t)l->N * (size_t)l->C, rows = (size_t)l->N;
    float *want[4] = {filled_array(n, 77.0f), filled_array(n, 77.0f), filled_array(rows, 77.0f), filled_array(rows, 77.0f)};
    float *got[4] = {filled_array(n, NAN), filled_array(n, NAN), filled_array(rows, NAN), filled_array(rows, NAN)};
    residual_layernorm_forward_ref(want[0], want[1], want[2], want[3], l->inp, l->dinp_before, l->weight, l->bias, l->N, l->C);
    for (int in_place = 0; in_place < 3; in_place++) {
        char what[64];
        residual_and_forward(in_place, got[0], got[1], got[2], got[3], l->inp, l->dinp_before, l, dev);
        snprintf(what, sizeof what, "residual, N %d, C %d, in place %d", l->N, l->C, in_place);
        check_bits(t, what, got[0], want[0], n);  // one sum of two, in every build
        check_same(t, "out", got[1], want[1], n, out_tolerance(l->C));
        check_same(t, "mean", got[2], want[2], rows, mean_tolerance(l->C));
        check_same(t, "rstd", got[3], want[3], rows, rstd_tolerance(l->C));
    }
    for (int i = 0; i < 4; i++) { free(want[i]), free(got[i]); }
}

static void check_backward(Test* t, const LayerNorm* l, const Device* dev) {
    size_t n = (size_t)l->N * (size_t)l->C, channels = (size_t)l->C;
    float *dinp = copied_array(l->dinp_before, n), *dweight = filled_array(channels, NAN),
          *dbias = filled_array(channels, NAN);
    char what[64];
    backward(dinp, dweight, dbias, l->inp, l->mean, l->rstd, l, dev);
    snprintf(what, sizeof what, "dinp, N %d, C %d, %d threads", l->N, l->C, dev->n_threads);
    check_same(t, what, dinp, l->dinp, n, dinp_tolerance(l->C));
    check_same(t, "dweight", dweight, l->dweight, channels, dweight_tolerance(l->N));
    check_same(t, "dbias", dbias, l->dbias, channels, dbias_tolerance(l->N));
    free(dinp), free(dweight), free(dbias);
}

static void check_shape(Test* t, void (*check_one)(Test*, const LayerNorm*, const Device*), int N, int C, int hard) {
    LayerNorm l = layernorm(N, C, hard);
    for (int j = 0; j < N_TEST_THREADS; j++) {
        Device dev = test_device(test_threads(j));
        check_one(t, &l, &dev);
        device_free(&dev);
    }
    layernorm_free(&l);
}

static void check_shapes(Test* t, void (*check_one)(Test*, const LayerNorm*, const Device*), int hard) {
    const int shapes[][2] = {  // N, C
        {1, 1}, {1, 7}, {7, 1}, {7, 33}, {33, 7}, {8, 128}, {9, 264}, {2, 257}, {2, 769},
#ifndef __CUDACC__  // vectors of VLANES rows; kernels have one row in a warp
        {16, 16}, {64, 128}, {65, 127}, {257, 33}, {33, 257}, {31, 129}, {17, 769},
        {VLANES, VLANES}, {VLANES + 1, VLANES - 1}, {2 * VLANES - 1, 3 * VLANES + 1},
#endif
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) { check_shape(t, check_one, shapes[i][0], shapes[i][1], hard); }
}

static void check_special(Test* t, void (*check_one)(Test*, const LayerNorm*, const Device*)) {
    if (FAST_KERNELS) {
        skip(t, "sums in another order may overflow or cancel elsewhere");
        return;
    }
    check_shapes(t, check_one, 1);
    check_shapes(t, check_one, 2);
}

static void test_forward(Test* t) { check_shapes(t, check_forward, 0); }
static void test_residual(Test* t) { check_shapes(t, check_residual, 0); }
static void test_backward(Test* t) { check_shapes(t, check_backward, 0); }
static void test_forward_special(Test* t) { check_special(t, check_forward); }
static void test_residual_special(Test* t) { check_special(t, check_residual); }
static void test_backward_special(Test* t) { check_special(t, check_backward); }

// rows of several packs in a lane; more rows than blocks take at once; rows too long for one pass backward, or for shared memory
static void test_long(Test* t) {
    const int shapes[][2] = {{FAST_KERNELS ? 19 : 3, 1600}, {2, 5640}, {1, 12296}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_shape(t, check_forward, shapes[i][0], shapes[i][1], 0);
        check_shape(t, check_residual, shapes[i][0], shapes[i][1], 0);
        check_shape(t, check_backward, shapes[i][0], shapes[i][1], 0);
    }
}

// a row with Inf or NaN leaves its neighbours as they were, also those that share its vector or its block
static void check_rows_apart(Test* t, int N, int C) {
    LayerNorm l = layernorm(N, C, 0);
    Device dev = test_device(2);
    size_t n = (size_t)N * (size_t)C, rows = (size_t)N, channels = (size_t)C;
    float *out = filled_array(n, NAN), *mean = filled_array(rows, NAN), *rstd = filled_array(rows, NAN), *want = filled_array(n, NAN),
          *want_dinp = copied_array(l.dinp_before, n), *dweight = filled_array(channels, NAN), *dbias = filled_array(channels, NAN);
    forward(want, mean, rstd, l.inp, &l, &dev);
    backward(want_dinp, dweight, dbias, l.inp, mean, rstd, &l, &dev);
    for (int spoilt = 0; spoilt < N; spoilt += 5) {
        float *inp = copied_array(l.inp, n), *dinp = copied_array(l.dinp_before, n);
        inp[spoilt * C + 7] = spoilt % 2 ? INFINITY : NAN;
        forward(out, mean, rstd, inp, &l, &dev);
        backward(dinp, dweight, dbias, inp, mean, rstd, &l, &dev);
        for (int row = 0; row < N; row++) {
            if (row == spoilt) { continue; }
            check_bits(t, "out", out + row * C, want + row * C, channels);
            check_bits(t, "dinp", dinp + row * C, want_dinp + row * C, channels);
        }
        free(inp), free(dinp);
    }
    free(out), free(mean), free(rstd), free(want), free(want_dinp), free(dweight), free(dbias);
    device_free(&dev);
    layernorm_free(&l);
}

static void test_rows_apart(Test* t) {
    check_rows_apart(t, N_TEST_THREADS > 1 ? 2 * 16 + 3 : 11, 33);
    check_rows_apart(t, 7, 264);
}

// ---- bf16: what is stored rounds to 2^-8 of itself, the sums are float ----

#if defined(__CUDACC__) && !defined(EXACT)
typedef __nv_bfloat16 bf16;

// to bf16 on the device; `x` becomes what is stored
static bf16* stored(float* x, size_t n, const Device* dev) {
    for (size_t i = 0; i < n; i++) { x[i] = (float)(bf16)x[i]; }
    return to_device_as<bf16>(x, n, dev);
}

// |got - want| <= tolerance + 2^-8 |want|
static void check_stored(Test* t, const char* what, bf16* d, const float* want, size_t n, double tolerance, const Device* dev) {
    float* got = filled_array(n, NAN);
    from_device_as(got, d, n, dev);
    for (size_t i = 0; i < n; i++) {
        double apart = fabs((double)got[i] - (double)want[i]), allowed = tolerance + 0x1p-8 * fabs((double)want[i]);
        check(t, apart <= allowed, "%s: [%zu] found %.9g, expected %.9g, allowed %.3g", what, i, (double)got[i], (double)want[i], allowed);
    }
    free(got);
}

// what layernorm_forward left on the device against l->mean and l->rstd, which become the device's
static void check_statistics(Test* t, LayerNorm* l, const float* d_mean, const float* d_rstd, const Device* dev) {
    size_t rows = (size_t)l->N;
    float *mean = filled_array(rows, NAN), *rstd = filled_array(rows, NAN);
    device_download(mean, d_mean, sizeof(float) * rows, dev);
    device_download(rstd, d_rstd, sizeof(float) * rows, dev);
    check_same(t, "mean", mean, l->mean, rows, mean_tolerance(l->C));
    check_same(t, "rstd", rstd, l->rstd, rows, rstd_tolerance(l->C));
    memcpy(l->mean, mean, sizeof(float) * rows), memcpy(l->rstd, rstd, sizeof(float) * rows);
    free(mean), free(rstd);
}

static void check_bf16(Test* t, int N, int C, const Device* dev) {
    LayerNorm l = layernorm(N, C, 0);
    size_t n = (size_t)N * (size_t)C, rows = (size_t)N, channels = (size_t)C;
    bf16 *inp = stored(l.inp, n, dev), *right = stored(l.dout, n, dev), *weight = stored(l.weight, channels, dev),
         *bias = stored(l.bias, channels, dev), *dinp = stored(l.dinp_before, n, dev), *residual = stored(l.dinp, n, dev),
         *out = stored(l.out, n, dev);
    float *mean = to_device(l.mean, rows, dev), *rstd = to_device(l.rstd, rows, dev), *dweight = to_device(l.dweight, channels, dev),
          *dbias = to_device(l.dbias, channels, dev);
    residual_layernorm_forward(residual, out, mean, rstd, inp, right, weight, bias, N, C, dev);
    residual_forward_ref(l.dinp, l.inp, l.dout, n);
    for (size_t i = 0; i < n; i++) { l.dinp[i] = (float)(bf16)l.dinp[i]; }
    layernorm_forward_ref(l.out, l.mean, l.rstd, l.dinp, l.weight, l.bias, N, C);
    check_stored(t, "residual", residual, l.dinp, n, 0.0, dev);
    check_stored(t, "out with residual", out, l.out, n, out_tolerance(C), dev);
    check_statistics(t, &l, mean, rstd, dev);
    out = stored(l.out, n, dev);
    layernorm_forward(out, mean, rstd, inp, weight, bias, N, C, dev);
    layernorm_forward_ref(l.out, l.mean, l.rstd, l.inp, l.weight, l.bias, N, C);
    check_stored(t, "out", out, l.out, n, out_tolerance(C), dev);
    check_statistics(t, &l, mean, rstd, dev);
    layernorm_backward(dinp, dweight, dbias, right, inp, weight, mean, rstd, N, C, dev);
    float *want_dweight = filled_array(channels, NAN), *want_dbias = filled_array(channels, NAN);
    layernorm_backward_ref(l.dinp_before, want_dweight, want_dbias, l.dout, l.inp, l.weight, l.mean, l.rstd, N, C);
    check_stored(t, "dinp", dinp, l.dinp_before, n, dinp_tolerance(C), dev);
    from_device(l.dweight, dweight, channels, dev), from_device(l.dbias, dbias, channels, dev);
    check_same(t, "dweight", l.dweight, want_dweight, channels, dweight_tolerance(N));
    check_same(t, "dbias", l.dbias, want_dbias, channels, dbias_tolerance(N));
    device_drop(inp), device_drop(right), device_drop(weight), device_drop(bias), device_drop(mean), device_drop(rstd);
    free(want_dweight), free(want_dbias);
    layernorm_free(&l);
}

static void test_bf16(Test* t) {
    const int shapes[][2] = {{1, 1}, {1, 7}, {7, 33}, {64, 128}, {33, 257}, {3, 264}, {19, 1600}, {2, 5640}};
    Device dev = test_device(1);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) { check_bf16(t, shapes[i][0], shapes[i][1], &dev); }
    device_free(&dev);
}
#else
static void test_bf16(Test* t) { skip(t, "a fast build for GPUs stores bf16"); }
#endif

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
    LayerNorm l = layernorm(2, 4, 0);
    memcpy(l.weight, weight, sizeof weight), memcpy(l.bias, bias, sizeof bias), memcpy(l.dout, dout, sizeof dout);
    Device dev = test_device(1);
    forward(out, mean, rstd, inp, &l, &dev);
    check_bits(t, "a constant row gives the bias", out, want_constant, 4);
    check(t, mean[0] == 3.0f && rstd[0] == 1.0f / sqrtf(1e-5f), "constant row: mean 3 and variance 0, found %.9g",
          (double)mean[0]);
    for (int c = 0; c < 4; c++) {  // +-1000: eps is far below the last place of 10^6, rstd is the float nearest 1/1000
        check(t, fabsf(out[4 + c] - want_alternating[c]) < 1e-6f, "alternating row, channel %d: found %.9g", c,
              (double)out[4 + c]);
    }
    backward(dinp, dweight, dbias, inp, mean, rstd, &l, &dev);
    for (int c = 0; c < 4; c++) {
        check(t, fabsf(dweight[c] - want_dweight[c]) < 1e-6f, "dweight of channel %d: found %.9g", c,
              (double)dweight[c]);
        check(t, dinp[c] == 0.0f, "no gradient came into row 0, found %.9g", (double)dinp[c]);
    }
    check_bits(t, "dbias", dbias, want_dbias, 4);
    device_free(&dev);
    layernorm_free(&l);
}

// a bias that is minus the rounded product gives 0 unless a fused multiply-add keeps what was rounded off
static void test_rounding(Test* t) {
    const float inp[] = {1.0f, -1.0f}, rstd = 1.0f / sqrtf(1.0f + 1e-5f), w = 1.0f + 0x1p-12f, weight[] = {w, w};
    float product = rstd * w, bias[] = {-product, product}, out[2], mean, found_rstd;
    if (FAST_KERNELS) {
        skip(t, "fast builds for GPUs fuse");
        return;
    }
    LayerNorm l = layernorm(1, 2, 0);
    memcpy(l.weight, weight, sizeof weight), memcpy(l.bias, bias, sizeof bias);
    Device dev = test_device(1);
    forward(out, &mean, &found_rstd, inp, &l, &dev);
    check(t, found_rstd == rstd, "rstd: found %.9g, expected %.9g", (double)found_rstd, (double)rstd);
    check(t, out[0] == 0.0f && out[1] == 0.0f, "found %g and %g, expected 0", (double)out[0], (double)out[1]);
    device_free(&dev);
    layernorm_free(&l);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"forward", "out, mean and rstd equal the plain loop bit for bit at odd shapes", test_forward},
        {"forward special", "the same with cancellation, subnormals, -0, Inf, NaN", test_forward_special},
        {"backward", "dinp (added), dweight and dbias (written) equal the plain loop bit for bit at odd shapes",
         test_backward},
        {"backward special", "the same with cancellation, subnormals, -0, Inf, NaN", test_backward_special},
        {"asked", "gradients that nobody asks for are NULL: the others keep their bits", test_asked},
        {"residual", "left + right and its layernorm equal the plain loops, also where residual is left or right", test_residual},
        {"residual special", "the same with cancellation, subnormals, -0, Inf, NaN", test_residual_special},
        {"long rows", "all three with several packs in a lane, many rows in a block, rows too long to be kept", test_long},
        {"bf16", "forward, with residual and backward within the rounding of bf16; dweight and dbias are float sums", test_bf16},
        {"rows apart", "Inf or NaN in a row reaches no other row", test_rows_apart},
        {"forward double", "the plain loop agrees with double at (7, 257)", test_forward_double},
        {"backward differences", "the plain loop agrees with finite differences at (7, 33)", test_differences},
        {"obvious", "a constant row gives the bias, a row of +-1000 the weights", test_obvious},
        {"rounding", "products round before they are added: no fused multiply-add", test_rounding},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
