/*
Promises of llmc/adamw.h and llmc/global_norm.h: frozen expressions, corrections that are the rounded true values, a
norm whose order of addition depends on the length alone.
*/
#include "llmc/adamw.h"
#include "llmc/global_norm.h"
#include "llmc/test.h"

// 1 - beta^t for the floats beta = 0.9f and 0.999f, t = 1..50, in exact rational arithmetic (Python's fractions),
// rounded once
static const uint32_t corrections_09[50] = {
    0x3dccccd0, 0x3e428f5f, 0x3e8ac085, 0x3eb013ab, 0x3ed1ab4e, 0x3eefe6fa, 0x3f058e57, 0x3f11cce8, 0x3f1cd204,
    0x3f26bd04, 0x3f2faa1d, 0x3f37b2b4, 0x3f3eeda2, 0x3f456f79, 0x3f4b4ab9, 0x3f50900d, 0x3f554e72, 0x3f599367,
    0x3f5d6b10, 0x3f60e05b, 0x3f63fd1f, 0x3f66ca36, 0x3f694f97, 0x3f6b946e, 0x3f6d9f30, 0x3f6f75ab, 0x3f711d1a,
    0x3f729a31, 0x3f73f12c, 0x3f7525db, 0x3f763bab, 0x3f7735b4, 0x3f7816bc, 0x3f78e142, 0x3f799789, 0x3f7a3b95,
    0x3f7acf39, 0x3f7b541a, 0x3f7bcbb1, 0x3f7c3752, 0x3f7c9830, 0x3f7cef5f, 0x3f7d3dd5, 0x3f7d8473, 0x3f7dc401,
    0x3f7dfd34, 0x3f7e30af, 0x3f7e5f04, 0x3f7e88b7, 0x3f7eae3e,
};
static const uint32_t corrections_0999[50] = {
    0x3a831200, 0x3b030139, 0x3b4468b0, 0x3b82dfb4, 0x3ba382b3, 0x3bc41d57, 0x3be4afa3, 0x3c029ccc, 0x3c12dd9c,
    0x3c231a43, 0x3c3352c3, 0x3c43871b, 0x3c53b74d, 0x3c63e35a, 0x3c740b43, 0x3c821785, 0x3c8a2757, 0x3c923519,
    0x3c9a40cc, 0x3ca24a6f, 0x3caa5203, 0x3cb25789, 0x3cba5b01, 0x3cc25c6c, 0x3cca5bcb, 0x3cd2591d, 0x3cda5464,
    0x3ce24da0, 0x3cea44d1, 0x3cf239f8, 0x3cfa2d16, 0x3d010f15, 0x3d05069b, 0x3d08fd1d, 0x3d0cf29c, 0x3d10e717,
    0x3d14da8f, 0x3d18cd03, 0x3d1cbe76, 0x3d20aee5, 0x3d249e53, 0x3d288cbf, 0x3d2c7a29, 0x3d306691, 0x3d3451f9,
    0x3d383c60, 0x3d3c25c6, 0x3d400e2c, 0x3d43f591, 0x3d47dbf7,
};

// the settings of update t, with the true corrections also where the parity build takes powf's
static AdamW settings(float grad_scale, int t) {
    AdamW a = adamw_step(1e-3f, 0.9f, 0.999f, 1e-8f, grad_scale, t);
    a.correction1 = float_from_bits(corrections_09[t - 1]);
    a.correction2 = float_from_bits(corrections_0999[t - 1]);
    return a;
}

static void test_corrections(Test* t) {
#ifdef SYSTEM_LIBM
    skip(t, "the parity build takes powf from the C library");
#else
    for (int step = 1; step <= 50; step++) {
        AdamW a = adamw_step(1e-3f, 0.9f, 0.999f, 1e-8f, 1.0f, step);
        check(t, float_bits(a.correction1) == corrections_09[step - 1], "1 - 0.9^%d: found %.9g", step,
              (double)a.correction1);
        check(t, float_bits(a.correction2) == corrections_0999[step - 1], "1 - 0.999^%d: found %.9g", step,
              (double)a.correction2);
    }
    AdamW late = adamw_step(1e-3f, 0.9f, 0.999f, 1e-8f, 1.0f, 1000000);
    check(t, late.correction1 == 1.0f && late.correction2 == 1.0f, "after a million updates both corrections are 1");
#endif
}

// three updates of four parameters, computed once with NumPy's float32, one operation at a time
static void test_frozen(Test* t) {
    const float g[3][4] = {{0.1f, -2.0f, 1e-6f, -0.0f},
                           {0.2f, -1.0f, 2e-6f, -0.0f},
                           {0.3f, -0.666666687f, 3e-6f, -0.0f}};
    const uint32_t want[3][4] = {{0x3efe6d3c, 0xbf9f97cd, 0x3908eaf0, 0x40dfeecc},
                                 {0x3caa0a98, 0xbdf17910, 0x345ee06c, 0x00000000},
                                 {0x37a0b483, 0x3a430fef, 0x270a0b6e, 0x00000000}};
    float p[4] = {0.5f, -1.25f, 3.0e-3f, 7.0f}, m[4] = {0}, v[4] = {0};
    for (int step = 1; step <= 3; step++) {
        AdamW a = settings(0.37f, step);
        adamw_update_ref(p, m, v, g[step - 1], 4, 0.1f, &a);
    }
    for (int i = 0; i < 4; i++) {
        check(t, float_bits(p[i]) == want[0][i], "p[%d]: found %08x, expected %08x", i, float_bits(p[i]), want[0][i]);
        check(t, float_bits(m[i]) == want[1][i], "m[%d]: found %08x, expected %08x", i, float_bits(m[i]), want[1][i]);
        check(t, float_bits(v[i]) == want[2][i], "v[%d]: found %08x, expected %08x", i, float_bits(v[i]), want[2][i]);
    }
}

// ---- fast against plain ----

static void check_update(Test* t, size_t n, int hard, int n_threads) {
    Device dev = test_device(n_threads);
    float *p = hard ? hard_array(n, 1) : random_array(n, 1.0f, 1),
          *m = hard ? hard_array(n, 2) : random_array(n, 0.1f, 2);
    float *v = hard ? hard_array(n, 3) : random_array(n, 0.1f, 3),
          *g = hard ? hard_array(n, 4) : random_array(n, 0.5f, 4);
    for (size_t i = 0; i < n; i++) { v[i] = fabsf(v[i]); }
    if (hard == 2) {
        sprinkle(p, n, 40, 5);
        sprinkle(m, n, 40, 6);
        sprinkle(v, n, 40, 7);
        sprinkle(g, n, 40, 8);
    }
    float *p_want = copied_array(p, n), *m_want = copied_array(m, n), *v_want = copied_array(v, n),
          *g_before = copied_array(g, n);
    for (int step = 1; step <= 3; step++) {
        AdamW a = settings(step == 2 ? 1.0f : 0.37f, step);
        float weight_decay = step == 3 ? 0.0f : 0.1f;
        adamw_update_ref(p_want, m_want, v_want, g_before, n, weight_decay, &a);
        adamw_update(p, m, v, g, n, weight_decay, &a, &dev);
    }
    char what[64];
    snprintf(what, sizeof what, "p, n %zu, hard %d, %d threads", n, hard, n_threads);
    check_bits(t, what, p, p_want, n);
    check_bits(t, "m", m, m_want, n);
    check_bits(t, "v", v, v_want, n);
    check_bits(t, "the gradient is left alone", g, g_before, n);
    free(p), free(m), free(v), free(g), free(p_want), free(m_want), free(v_want), free(g_before);
    device_free(&dev);
}

static void test_lengths(Test* t) {
    const size_t lengths[] = {1, 7, 16, 33, 257, 4096, 10007};
    for (size_t i = 0; i < 3 * N_TEST_THREADS * sizeof lengths / sizeof *lengths; i++) {
        check_update(t, lengths[i / (3 * N_TEST_THREADS)], (int)(i / N_TEST_THREADS % 3),
                     test_threads((int)i % N_TEST_THREADS));
    }
}

// ---- what an update is ----

static void test_double(Test* t) {
    enum { N = 257 };
    float *p = random_array(N, 1.0f, 1), *m = random_array(N, 0.1f, 2), *v = random_array(N, 0.1f, 3),
          *g = random_array(N, 1.0f, 4);
    double want[N];
    AdamW a = settings(0.5f, 7);
    for (int i = 0; i < N; i++) {
        v[i] = fabsf(v[i]);
        double grad = 0.5 * (double)g[i], m_new = 0.9 * (double)m[i] + 0.1 * grad,
               v_new = 0.999 * (double)v[i] + 0.001 * grad * grad;
        double m_hat = m_new / (1.0 - pow(0.9, 7)), v_hat = v_new / (1.0 - pow(0.999, 7));
        want[i] = (double)p[i] - 1e-3 * (m_hat / (sqrt(v_hat) + 1e-8) + 0.1 * (double)p[i]);
    }
    adamw_update_ref(p, m, v, g, N, 0.1f, &a);
    // p <= 1 rounds once, 2^-25; lr * m_hat / sqrt(v_hat) stays below 0.01 and its 0.999f is off by 1e-8, so 1 - 0.999f
    // by 1e-5 of itself: half of that under the root
    check_close(t, "p", p, want, N, 0x1p-25 + 0.01 * 1e-5);
    free(p), free(m), free(v), free(g);
}

static void test_obvious(Test* t) {
    float p[] = {1.0f, 1.0f, 1.0f, 2.0f}, m[4] = {0}, v[4] = {0};
    const float g[] = {1e-3f, -1e3f, 0.0f, 0.0f};
    Device dev = test_device(1);
    AdamW a = settings(1.0f, 1);
    adamw_update(p, m, v, g, 3, 0.0f, &a, &dev);
    // the first step is lr against the gradient's sign, whatever its size: eps is 1e-5 of the smaller one
    check(t, fabsf(p[0] - 0.999f) < 1e-7f && fabsf(p[1] - 1.001f) < 1e-7f, "found %.9g and %.9g", (double)p[0],
          (double)p[1]);
    check(t, p[2] == 1.0f && m[2] == 0.0f && v[2] == 0.0f, "no gradient, no decay: nothing moves");
    adamw_update(p + 3, m + 3, v + 3, g + 3, 1, 0.5f, &a, &dev);
    check(t, p[3] == 2.0f - 1e-3f * (0.5f * 2.0f), "no gradient: decay alone, found %.9g", (double)p[3]);
    device_free(&dev);
}

// ---- global norm ----

// the order that the header states, spelled out
static double spelled_sum(double sum, const float* g, size_t n) {
    for (size_t chunk = 0; chunk < n; chunk += 4096) {
        double lane[16] = {0}, chunk_sum = 0.0;
        for (size_t j = 0; j < 16; j++) {
            for (size_t i = chunk + j; i < n && i < chunk + 4096; i += 16) { lane[j] += (double)g[i] * (double)g[i]; }
        }
        for (int j = 0; j < 16; j++) { chunk_sum += lane[j]; }
        sum += chunk_sum;
    }
    return sum;
}

static void check_sum(Test* t, double found, double want, const char* what, size_t n, int n_threads) {
    int same = memcmp(&found, &want, sizeof want) == 0 || (isnan(found) && isnan(want));
    check(t, same, "%s, n %zu, %d threads: found %.17g, expected %.17g", what, n, n_threads, found, want);
}

static void test_norm_order(Test* t) {
    const size_t lengths[] = {0, 1, 7, 15, 16, 17, 33, 257, 4095, 4096, 4097, 8192, 5 * 4096 + 33, 100003};
    for (size_t i = 0; i < 3 * N_TEST_THREADS * sizeof lengths / sizeof *lengths; i++) {
        size_t n = lengths[i / (3 * N_TEST_THREADS)];
        int hard = (int)(i / N_TEST_THREADS % 3), n_threads = test_threads((int)i % N_TEST_THREADS);
        float* g = hard ? hard_array(n, 1) : random_array(n, 1.0f, 1);
        if (hard == 2) { sprinkle(g, n, (uint32_t)n + 1, 2); }
        double want = spelled_sum(0.1, g, n);
        check_sum(t, sum_of_squares_ref(0.1, g, n), want, "plain", n, n_threads);
        Device dev = test_device(n_threads);
        check_sum(t, sum_of_squares(0.1, g, n, &dev), want, "fast", n, n_threads);
        device_free(&dev);
        free(g);
    }
}

static void test_norm_obvious(Test* t) {
    float g[10000] = {0};
    Device dev = test_device(2);
    g[0] = 3.0f, g[9999] = -4.0f;
    double sum = sum_of_squares(0.0, g, 10000, &dev);
    check(t, sqrt(sum) == 5.0, "the norm of (3, -4) is 5, found %.17g", sqrt(sum));
    check(t, sum_of_squares(sum, g, 10000, &dev) == 50.0, "a second tensor goes on from the first");
    for (int i = 0; i < 10000; i++) { g[i] = 1e30f; }
    check(t, fabs(sqrt(sum_of_squares(0.0, g, 10000, &dev)) / ((double)1e30f * 100.0) - 1.0) < 1e-14,
          "no overflow: squares are doubles");
    device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"corrections", "1 - beta^t is the rounded true value for t = 1..50", test_corrections},
        {"frozen", "three updates give the bits that NumPy gives", test_frozen},
        {"lengths", "equals the plain loop at odd lengths; cancellation, subnormals, -0, Inf, NaN too", test_lengths},
        {"double", "an update agrees with double", test_double},
        {"obvious", "a first step is lr against the sign, decay alone shrinks", test_obvious},
        {"norm order", "equals the stated order bit for bit at odd lengths", test_norm_order},
        {"norm obvious", "(3, -4) over 10000 elements; goes on from tensor to tensor; 1e30 does not overflow",
         test_norm_obvious},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
