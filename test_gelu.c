/*
Promises of llmc/ops/gelu.h: its value and slope are frozen expressions, judged in double; fast and plain loops agree on
every kind of float, in place too. Fast builds for GPUs keep the tolerances that llmc/ops/gelu.h derives.
*/
#include "llmc/ops/gelu.h"
#include "llmc/test/test.h"

// every 4099th float (a prime): all exponents, both signs, subnormals, Inf and NaN, about a million numbers
static float* all_kinds(size_t* n) {
    *n = 0x100000000 / 4099 + 1;
    float* x = filled_array(*n, 0.0f);
    for (size_t i = 0; i < *n; i++) { x[i] = float_from_bits((uint32_t)(i * 4099)); }
    return x;
}

// ---- fast against plain, on the device ----

static void forward(float* out, const float* inp, size_t n, const Device* dev) {
    float *d_inp = to_device(inp, n, dev), *d_out = to_device(out, n, dev);
    gelu_forward(d_out, d_inp, n, dev);
    from_device(out, d_out, n, dev);
    device_drop(d_inp);
}

// in_place: dinp is dout
static void backward(float* dinp, const float* inp, const float* dout, int in_place, size_t n, const Device* dev) {
    float *d_inp = to_device(inp, n, dev), *d_dout = to_device(dout, n, dev),
          *d_dinp = in_place ? d_dout : to_device(dinp, n, dev);
    gelu_backward(d_dinp, d_inp, d_dout, n, dev);
    from_device(dinp, d_dinp, n, dev);
    device_drop(d_inp);
    if (!in_place) { device_drop(d_dout); }
}

// bits; in a fast build |got - want| <= tolerance * scale[i], or 1 + |scale[i]| with plus_one, and Inf and NaN where
// they belong
static void check_same(Test* t, const char* what, const float* got, const float* want, const float* scale, int plus_one,
                       double tolerance, size_t n) {
    if (!FAST_KERNELS) {
        check_bits(t, what, got, want, n);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        // 2^-126: the hardware may flush subnormals
        double allowed = tolerance * ((double)fabsf(scale[i]) + plus_one) + 0x1p-126;
        int same = isfinite(want[i]) ? fabs((double)got[i] - (double)want[i]) <= allowed
                                     : got[i] == want[i] || (isnan(got[i]) && isnan(want[i]));
        check(t, same, "%s: [%zu] found %.9g, expected %.9g, allowed %.3g", what, i, (double)got[i], (double)want[i],
              allowed);
    }
}

// of (1 + |x|) and of |dout|: derived in llmc/ops/gelu.h
static const double VALUE_ERROR = 0x1p-20, SLOPE_ERROR = 0x1p-18;

static void check_length(Test* t, const float* x, const float* dout, size_t n, const Device* dev) {
    float *out = filled_array(n, NAN), *want = filled_array(n, 77.0f);
    char what[64];
    snprintf(what, sizeof what, "n %zu, %d threads", n, dev->n_threads);
    forward(out, x, n, dev);
    gelu_forward_ref(want, x, n);
    check_same(t, what, out, want, x, 1, VALUE_ERROR, n);
    gelu_backward_ref(want, x, dout, n);
    for (int in_place = 0; in_place < 2; in_place++) {
        backward(out, x, dout, in_place, n, dev);
        check_same(t, what, out, want, dout, 0, SLOPE_ERROR, n);
    }
    free(out), free(want);
}

static void test_lengths(Test* t) {
    const size_t lengths[] = {1, 7, 16, 33, 257, 1009, 4096};
    float *x = random_array(4096, 6.0f, 1), *dout = random_array(4096, 1.0f, 2);
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
    if (!FAST_KERNELS) { sprinkle(dout, n, 100, 4); }  // Inf times a slope near 0 is Inf or NaN, as the slope rounds
    for (int i = 0; i < N_TEST_THREADS; i += 3) {
        Device dev = test_device(test_threads(i));
        check_length(t, x, dout, n, &dev);
        device_free(&dev);
    }
    free(x), free(dout);
}

// spec gpt2.md sections 3 and 4, one operation per line
static float spelled_value(float x) {
    float cube = 0.044715f * x;
    cube = cube * x;
    cube = cube * x;
    float u = float_from_bits(0x3f4c4229) * (x + cube);
    float one_plus = 1.0f + fm_tanh(u), half_x = 0.5f * x;
    return half_x * one_plus;
}

static float spelled_slope(float x) {
    float cube = 0.044715f * x;
    cube = cube * x;
    cube = cube * x;
    float k = float_from_bits(0x3f4c4229), u = k * (x + cube), th = fm_tanh(u), ch = fm_cosh(u);
    float square = ch * ch, sech2 = 1.0f / square, left = 1.0f + th;
    float inner = float_from_bits(0x3e095d4e) * x;
    inner = inner * x;
    inner = 1.0f + inner;
    float right = x * 0.5f;
    right = right * sech2;
    right = right * k;
    right = right * inner;
    left = 0.5f * left;
    return left + right;
}

static void test_frozen(Test* t) {
    size_t n;
    float *x = all_kinds(&n), *got = filled_array(n, NAN), *want = filled_array(n, 77.0f),
          *ones = filled_array(n, 1.0f);
    for (size_t i = 0; i < n; i++) { want[i] = spelled_value(x[i]); }
    gelu_forward_ref(got, x, n);
    check_bits(t, "value", got, want, n);
    for (size_t i = 0; i < n; i++) { want[i] = spelled_slope(x[i]); }
    gelu_backward_ref(got, x, ones, n);
    check_bits(t, "slope", got, want, n);
    free(x), free(got), free(want), free(ones);
}

// computed once with NumPy's float32, one operation at a time, tanh and cosh in double and rounded
static void test_known(Test* t) {
#ifdef SYSTEM_LIBM
    skip(t, "the parity build takes tanhf and coshf from the C library");
#else
    const uint32_t known[][3] = {  // x, value, slope
        {0xc0400000, 0xbb6e6200, 0xbc3dcb78}, {0xbfd9999a, 0xbd9b6e5c, 0xbded64a6},
        {0xbf000000, 0xbe1dfd26, 0x3e07d032}, {0x3dcccccd, 0x3d5d1d05, 0x3f145b8a},
        {0x3f666666, 0x3f3bf665, 0x3f870c71}, {0x3f800000, 0x3f57585c, 0x3f8a9e92},
        {0x40200000, 0x401f08dc, 0x3f84db99}, {0x4089999a, 0x4089997a, 0x3f8002b3},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        float x = float_from_bits(known[i][0]), one = 1.0f, value, slope;
        gelu_forward_ref(&value, &x, 1);
        gelu_backward_ref(&slope, &x, &one, 1);
        check(t, float_bits(value) == known[i][1], "value at %g: found %08x", (double)x, float_bits(value));
        check(t, float_bits(slope) == known[i][2], "slope at %g: found %08x", (double)x, float_bits(slope));
    }
#endif
}

// sum of dout * gelu(x), in double and with the true sqrt(2 / pi)
static double gelu_double(double x) {
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

static double gelu_loss(const double* x, void* arg) {
    const float* dout = (const float*)arg;
    double loss = 0.0;
    for (int i = 0; i < 257; i++) { loss += gelu_double(x[i]) * (double)dout[i]; }
    return loss;
}

static void test_double(Test* t) {
    float *x = random_array(257, 5.0f, 5), *dout = random_array(257, 1.0f, 6), *out = filled_array(257, NAN),
          *dinp = filled_array(257, NAN);
    double *at = double_array(x, 257), *want = double_array(x, 257);
    gelu_forward_ref(out, x, 257);
    gelu_backward_ref(dinp, x, dout, 257);
    for (int i = 0; i < 257; i++) { want[i] = gelu_double(at[i]); }
    // |out| <= 5; u < 9 carries 6 roundings, damped by tanh' = sech^2 where u is large: together below 8 roundings of 4
    check_close(t, "out", out, want, 257, 8 * 0x1p-24 * 4.0);
    free(want);
    want = finite_differences(gelu_loss, at, 257, dout);
    // the slope is below 1.2; its second term x sech^2(u) u' is below 2, sech^2 carries twice u's relative error times
    // u
    check_close(t, "dinp", dinp, want, 257, 32 * 0x1p-24);
    free(x), free(dout), free(out), free(dinp), free(at), free(want);
}

static void test_obvious(Test* t) {
    const float x[] = {0.0f, -0.0f, 20.0f, -20.0f, 1e30f, -1e30f, INFINITY}, ones[] = {1, 1, 1, 1, 1, 1, 1};
    const float want[] = {0.0f, -0.0f, 20.0f, -0.0f, 1e30f, -0.0f, INFINITY},
                want_slope[] = {0.5f, 0.5f, 1.0f, 0.0f, 1.0f};
    float out[7] = {0}, slope[7] = {0};
    Device dev = test_device(1);
    forward(out, x, 7, &dev);
    backward(slope, x, ones, 0, 7, &dev);
    check_bits(t, "out", out, want, 7);
    for (int i = 0; i < 4; i++) {
        check(t, slope[i] == want_slope[i], "slope at %g: found %.9g", (double)x[i], (double)slope[i]);
    }
    float k = sqrtf((float)(2.0f / 3.14159265358979323846));
    check(t, float_bits(k) == 0x3f4c4229 && GELU_K == k, "k: found %08x", float_bits(GELU_K));
    device_free(&dev);
}

// ---- bf16 ----

#if defined(__CUDACC__) && !defined(EXACT)
// a pack that lies between 16-byte lines, and one that does not fill: every path of the launcher
static void check_bf16(Test* t, size_t first, size_t n, const Device* dev) {
    float *x = random_array(first + n, 6.0f, 7), *dout = random_array(first + n, 1.0f, 8),
          *out = filled_array(first + n, 0.0f), *dinp = filled_array(first + n, 0.0f), *want = filled_array(n, 0.0f);
    bf16 *d_x = to_device_as<bf16>(x, first + n, dev), *d_dout = to_device_as<bf16>(dout, first + n, dev),
         *d_out = to_device_as<bf16>(out, first + n, dev), *d_dinp = to_device_as<bf16>(dinp, first + n, dev);
    gelu_forward(d_out + first, d_x + first, n, dev);
    gelu_backward(d_dinp + first, d_x + first, d_dout + first, n, dev);
    from_device_as(out, d_out, first + n, dev), from_device_as(dinp, d_dinp, first + n, dev);
    from_device_as(x, d_x, first + n, dev), from_device_as(dout, d_dout, first + n, dev);  // as they were rounded
    gelu_forward_ref(want, x + first, n);
    for (size_t i = 0; i < n; i++) {
        double error = fabs((double)out[first + i] - (double)want[i]), y = fabs((double)want[i]),
               xi = fabs((double)x[first + i]);
        check(t, error <= 0x1p-8 * y + VALUE_ERROR * (1.0 + xi), "n %zu: value at %g: found %g", n, xi,
              (double)out[first + i]);
    }
    gelu_backward_ref(want, x + first, dout + first, n);
    for (size_t i = 0; i < n; i++) {
        double error = fabs((double)dinp[first + i] - (double)want[i]), y = fabs((double)want[i]),
               d = fabs((double)dout[first + i]);
        check(t, error <= 0x1p-8 * y + SLOPE_ERROR * d, "n %zu: slope at %g: found %g", n, (double)x[first + i],
              (double)dinp[first + i]);
    }
    free(x), free(dout), free(out), free(dinp), free(want);
}

static void test_bf16(Test* t) {
    Device dev = test_device(1);
    for (size_t first = 0; first < 2; first++) {
        const size_t lengths[] = {1, 7, 8, 33, 257, 4096};
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) { check_bf16(t, first, lengths[i], &dev); }
    }
    device_free(&dev);
}
#else
static void test_bf16(Test* t) { skip(t, "a fast build for GPUs stores bf16"); }
#endif

int main(int argc, char** argv) {
    Promise promises[] = {
        {"lengths", "forward and backward equal the plain loop at odd lengths; dinp may be dout", test_lengths},
        {"all kinds", "the same over every 4099th float, Inf and NaN among them", test_all_kinds},
        {"frozen", "value and slope are the expressions of the specification, bit for bit", test_frozen},
        {"known", "eight values and slopes have the bits that NumPy gives", test_known},
        {"double", "value and slope agree with double and finite differences on -5 .. 5", test_double},
        {"bf16", "value and slope within the rounding of bf16, at odd lengths and addresses", test_bf16},
        {"obvious", "0 at 0 and far left, x far right; slopes 1/2, 0 and 1", test_obvious},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
