/*
Promises of llmc/ops/adamw.h, llmc/ops/ema.h, llmc/ops/global_norm.h and of the noise in llmc/core/rng.h: frozen
expressions, corrections that are the rounded true values, a norm that has no order of addition, rounding whose mean is
the value.
*/
#include "llmc/ops/adamw.h"
#include "llmc/ops/ema.h"
#include "llmc/ops/global_norm.h"
#include "llmc/test/test.h"
#include <float.h>

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

// n elements, in host memory
typedef struct {
    float *p, *m, *v, *g;
    size_t n;
} State;

// hard 1: cancellation, subnormals, -0, spread over 2^40; hard 2: also infinities and NaNs
static State new_state(size_t n, int hard) {
    State s = {hard ? hard_array(n, 1) : random_array(n, 1.0f, 1), hard ? hard_array(n, 2) : random_array(n, 0.1f, 2),
               hard ? hard_array(n, 3) : random_array(n, 0.1f, 3), hard ? hard_array(n, 4) : random_array(n, 0.5f, 4),
               n};
    for (size_t i = 0; i < n; i++) { s.v[i] = fabsf(s.v[i]); }
    if (hard == 2) {
        sprinkle(s.p, n, 40, 5), sprinkle(s.m, n, 40, 6), sprinkle(s.v, n, 40, 7), sprinkle(s.g, n, 40, 8);
    }
    return s;
}

static State copied_state(const State* s) {
    State copy = {copied_array(s->p, s->n), copied_array(s->m, s->n), copied_array(s->v, s->n),
                  copied_array(s->g, s->n), s->n};
    return copy;
}

static void free_state(State* s) { free(s->p), free(s->m), free(s->v), free(s->g); }

// adamw_update, on the device
static void update(State* s, float weight_decay, const AdamW* a, const Device* dev) {
    float *p = to_device(s->p, s->n, dev), *m = to_device(s->m, s->n, dev), *v = to_device(s->v, s->n, dev),
          *g = to_device(s->g, s->n, dev);
    adamw_update(p, m, v, g, s->n, weight_decay, a, dev);
    from_device(s->p, p, s->n, dev), from_device(s->m, m, s->n, dev), from_device(s->v, v, s->n, dev),
        from_device(s->g, g, s->n, dev);
}

// How far fused multiply-adds may be from the plain loop: a product inside a sum is not rounded, or rounded to a
// subnormal. 4 roundings of 2^-24 instead of the one or two that differ.
static double p_error(const State* before, size_t i, float weight_decay, const AdamW* a, double* m_error,
                      double* v_error) {
    const double eps = 4 * 0x1p-24, grad = (double)before->g[i] * (double)a->grad_scale, m = (double)before->m[i],
                 v = (double)before->v[i];
    const double m_size = fabs((double)a->beta1 * m) + (1.0 - (double)a->beta1) * fabs(grad);
    const double v_new = (double)a->beta2 * v + (1.0 - (double)a->beta2) * grad * grad;
    *m_error = eps * m_size + 0x1p-148, *v_error = eps * v_new + 0x1p-148;
    double root = sqrt(v_new / (double)a->correction2), below = root + (double)a->eps;
    double root_error = sqrt((v_new + *v_error) / (double)a->correction2) - root + eps * below;
    double ratio_error = (*m_error + m_size * (root_error / below + eps)) / (double)a->correction1 / below;
    double p = fabs((double)before->p[i]);
    return eps * p + (double)a->lr * (ratio_error + eps * (double)weight_decay * p) + 0x1p-148;
}

// bits; of a fast kernel p, m and v within the error, Inf and NaN where they belong
static void check_state(Test* t, const char* what, const State* got, const State* want, const State* before,
                        float weight_decay, const AdamW* a) {
    check_bits(t, "the gradient is left alone", got->g, before->g, got->n);
    if (!FAST_KERNELS) {
        check_bits(t, what, got->p, want->p, got->n);
        check_bits(t, "m", got->m, want->m, got->n);
        check_bits(t, "v", got->v, want->v, got->n);
    }
    for (size_t i = 0; FAST_KERNELS && i < got->n; i++) {
        double m_error, v_error, error = p_error(before, i, weight_decay, a, &m_error, &v_error);
        const float pairs[3][2] = {{got->p[i], want->p[i]}, {got->m[i], want->m[i]}, {got->v[i], want->v[i]}};
        const double errors[3] = {error, m_error, v_error};
        for (int k = 0; k < 3; k++) {
            float x = pairs[k][0], y = pairs[k][1];
            int same = x == y || (isnan(x) && isnan(y)) || (isfinite(y) && fabs((double)x - (double)y) <= errors[k]);
            check(t, same, "%s: %c[%zu] found %.9g, expected %.9g, allowed %.3g", what, "pmv"[k], i, (double)x,
                  (double)y, errors[k]);
        }
    }
}

// three updates in a row; each is judged from where the one before it led
static void check_update(Test* t, size_t n, int hard, int n_threads) {
    Device dev = test_device(n_threads);
    State s = new_state(n, hard);
    for (int step = 1; step <= 3; step++) {
        AdamW a = settings(step == 2 ? 1.0f : 0.37f, step);
        float weight_decay = step == 3 ? 0.0f : 0.1f;
        State before = copied_state(&s), want = copied_state(&s);
        char what[64];
        snprintf(what, sizeof what, "update %d, n %zu, hard %d, %d threads", step, n, hard, n_threads);
        adamw_update_ref(want.p, want.m, want.v, want.g, n, weight_decay, &a);
        update(&s, weight_decay, &a, &dev);
        check_state(t, what, &s, &want, &before, weight_decay, &a);
        free_state(&before), free_state(&want);
    }
    free_state(&s);
    device_free(&dev);
}

static void test_lengths(Test* t) {
    const size_t lengths[] = {1, 7, 16, 33, 257, 4096, 30011};  // the last goes round a grid for 3 multiprocessors
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
    float p[] = {1.0f, 1.0f, 1.0f, 2.0f}, m[4] = {0}, v[4] = {0}, g[] = {1e-3f, -1e3f, 0.0f, 0.0f};
    State first = {p, m, v, g, 3}, last = {p + 3, m + 3, v + 3, g + 3, 1};
    Device dev = test_device(1);
    AdamW a = settings(1.0f, 1);
    update(&first, 0.0f, &a, &dev);
    // the first step is lr against the gradient's sign, whatever its size: eps is 1e-5 of the smaller one
    check(t, fabsf(p[0] - 0.999f) < 1e-7f && fabsf(p[1] - 1.001f) < 1e-7f, "found %.9g and %.9g", (double)p[0],
          (double)p[1]);
    check(t, p[2] == 1.0f && m[2] == 0.0f && v[2] == 0.0f, "no gradient, no decay: nothing moves");
    update(&last, 0.5f, &a, &dev);
    check(t, p[3] == 2.0f - 1e-3f * (0.5f * 2.0f), "no gradient: decay alone, found %.9g", (double)p[3]);
    device_free(&dev);
}

// ---- noise ----

static void test_noise(Test* t) {
    // the published stream of seed 0
    const uint64_t want[] = {0xE220A8397B1DCDAFu, 0x6E789E6AA1B965F4u, 0x06C45D188009454Fu, 0xF88BB8A8724C81ECu};
    for (uint64_t i = 0; i < 4; i++) {
        check(t, splitmix64(0, i) == want[i], "number %d: found %016llx", (int)i, (unsigned long long)splitmix64(0, i));
    }
    check(t, noise_u32(0, 2) == 0x06C45D18u && noise_u32(1, 2) == (uint32_t)(splitmix64(0, (1ull << 32) + 2) >> 32),
          "keys are 2^32 apart");
    const uint32_t key = noise_key_of(1, 2, 3);
    check(t, key != noise_key_of(2, 2, 3) && key != noise_key_of(1, 3, 3) && key != noise_key_of(1, 2, 4) &&
                 key != noise_key_of(1, 3, 2),
          "seed, step and tensor each make another key");
    // products of neighbours, of steps and of tensors: independent uniform numbers have the mean 0 and the variance 1/9
    enum { N = 1 << 16 };
    const uint32_t keys[] = {key, noise_key_of(1, 3, 3), noise_key_of(1, 2, 4), key + 1};
    for (int k = 0; k < 4; k++) {
        double sum = 0.0;
        for (uint64_t i = 0; i < N; i++) {
            double a = (noise_u32(key, i) & 0xffff) / 32767.5 - 1.0,
                   b = (noise_u32(keys[k], i + (k == 0)) & 0xffff) / 32767.5 - 1.0;
            sum += a * b;
        }
        check(t, fabs(sum) < 5.0 * sqrt(N / 9.0), "correlation %d: found %.3g standard deviations", k,
              sum / sqrt(N / 9.0));
    }
}

static float float_of_bf16(uint16_t x) { return float_from_bits((uint32_t)x << 16); }

static void test_rounding(Test* t) {
    enum { N = 1 << 16 };
    const float values[] = {1.0f + 0x1p-8f,   1.0f + 0x1p-9f,   -1.0f - 0x1.8p-8f, 1.0f + 0x1p-23f,
                            3.14159274f,      -2.71828175e-20f, 0x1.fffffep0f,     1e-41f,
                            -0x1.23456p-130f, 0x1.fffffep-127f};
    for (size_t k = 0; k < sizeof values / sizeof *values; k++) {
        const float x = values[k], low = float_from_bits(float_bits(x) & 0xffff0000u),
                    high = float_from_bits((float_bits(x) & 0xffff0000u) + 0x10000u);
        const double up = ((double)x - (double)low) / ((double)high - (double)low);
        int n_high = 0;
        for (uint64_t i = 0; i < N; i++) {
            float y = float_of_bf16(stochastic_bf16(x, noise_u32(7, i)));
            check(t, y == low || y == high, "%.9g becomes %.9g", (double)x, (double)y);
            n_high += y == high;
        }
        double apart = fabs(n_high - N * up), allowed = 5.0 * sqrt(N * up * (1.0 - up)) + 1.0;
        check(t, apart <= allowed, "%.9g: rounded up %d of %d times, expected %.1f", (double)x, n_high, (int)N, N * up);
    }
    // exactly as often as the lower half says: each of the 65536 thresholds once
    for (uint32_t low = 0; low < 65536; low += 4369) {
        uint32_t n_high = 0;
        for (uint32_t noise = 0; noise < 65536; noise++) {
            n_high += stochastic_bf16(float_from_bits(0x3f800000u + low), noise << 16 | noise) == 0x3f81;
        }
        check(t, n_high == low, "lower half %u: rounded up %u times", low, n_high);
    }
}

static void test_rounding_special(Test* t) {
    const uint32_t kept[] = {0x00000000, 0x80000000, 0x3f800000, 0xbf810000, 0x7f7f0000,
                             0x00010000, 0x80010000, 0x7f800000, 0xff800000};
    const uint32_t nans[] = {0x7fc00000, 0xffc00000, 0x7f800001, 0xff80ffff, 0x7fffffff, 0x7fa00000};
    for (uint64_t i = 0; i < 1000; i++) {
        uint32_t noise = i == 0 ? 0xffffffffu : noise_u32(3, i);
        for (size_t k = 0; k < sizeof kept / sizeof *kept; k++) {
            uint16_t y = stochastic_bf16(float_from_bits(kept[k]), noise);
            check(t, y == kept[k] >> 16, "%08x becomes %04x", kept[k], y);
        }
        for (size_t k = 0; k < sizeof nans / sizeof *nans; k++) {
            uint16_t y = stochastic_bf16(float_from_bits(nans[k]), noise);
            check(t, isnan(float_of_bf16(y)) && y >> 15 == nans[k] >> 31, "NaN %08x becomes %04x", nans[k], y);
        }
    }
    check(t, stochastic_bf16(FLT_MAX, 0xffff) == 0x7f80 && stochastic_bf16(FLT_MAX, 0) == 0x7f7f,
          "the largest float: up is infinity");
}

// ---- stored parameters ----

// X = float: stored is the new parameter, with a master and without
static void test_stored_float(Test* t) {
    Device dev = test_device(2);
    for (int with_master = 0; with_master < 2; with_master++) {
        State s = new_state(1003, 2), want = copied_state(&s);
        AdamW a = settings(0.5f, 2);
        float *stored = with_master ? filled_array(s.n, NAN) : copied_array(s.p, s.n);
        update(&want, 0.1f, &a, &dev);
        float *d_stored = to_device(stored, s.n, &dev), *p = to_device(s.p, s.n, &dev), *m = to_device(s.m, s.n, &dev),
              *v = to_device(s.v, s.n, &dev), *g = to_device(s.g, s.n, &dev);
        adamw_update_stored(d_stored, with_master ? p : (float*)NULL, m, v, g, s.n, 0.1f, &a, 5, numbers_from(7), &dev);
        from_device(stored, d_stored, s.n, &dev), from_device(s.p, p, s.n, &dev), from_device(s.m, m, s.n, &dev),
            from_device(s.v, v, s.n, &dev);
        check_bits(t, "stored", stored, want.p, s.n);
        check_bits(t, "m", s.m, want.m, s.n);
        check_bits(t, "v", s.v, want.v, s.n);
        if (with_master) { check_bits(t, "master", s.p, want.p, s.n); }
        d_stored = to_device(stored, s.n, &dev), p = to_device(s.p, s.n, &dev);
        adamw_round_stored(d_stored, p, s.n, 5, numbers_from(7), &dev);
        from_device(stored, d_stored, s.n, &dev), device_drop(p), device_drop(g);
        check_bits(t, "adamw_round_stored copies", stored, s.p, s.n);
        free(stored), free_state(&s), free_state(&want);
    }
    device_free(&dev);
}

#if defined(__CUDACC__) && !defined(EXACT)
// adamw_update_stored for the elements from `first` on, in pieces of at most n_piece: stored (n) as floats, and s
static void update_stored(float* stored, State* s, int with_master, size_t first, size_t n_piece, const AdamW* a,
                          const Device* dev) {
    bf16* d_stored = to_device_as<bf16>(stored, s->n, dev);
    float *p = to_device(s->p, s->n, dev), *m = to_device(s->m, s->n, dev), *v = to_device(s->v, s->n, dev),
          *g = to_device(s->g, s->n, dev);
    for (size_t i = 0; i < s->n; i += n_piece) {
        size_t n = s->n - i < n_piece ? s->n - i : n_piece;
        adamw_update_stored(d_stored + i, with_master ? p + i : NULL, m + i, v + i, g + i, n, 0.1f, a, 11u, numbers_from(first + i),
                            dev);
    }
    from_device_as(stored, d_stored, s->n, dev);
    from_device(s->p, p, s->n, dev), from_device(s->m, m, s->n, dev), from_device(s->v, v, s->n, dev), device_drop(g);
}

// with a master that has no more digits than bf16, an update must not depend on where the parameter is read
static void check_stored(Test* t, size_t n, size_t first, int hard) {
    Device dev = test_device(1);
    State s = new_state(n, hard), want = copied_state(&s), before;
    AdamW a = settings(0.5f, 2);
    float *stored = filled_array(n, 77.0f), *alone = copied_array(s.p, n), *again = filled_array(n, NAN);
    for (size_t i = 0; i < n; i++) { s.p[i] = want.p[i] = alone[i] = (float)(bf16)s.p[i]; }
    before = copied_state(&s);
    adamw_update_ref(want.p, want.m, want.v, want.g, n, 0.1f, &a);
    State s_alone = copied_state(&s);
    update_stored(stored, &s, 1, first, n, &a, &dev);
    check_state(t, "master", &s, &want, &before, 0.1f, &a);
    for (size_t i = 0; i < n; i++) { again[i] = float_of_bf16(stochastic_bf16(s.p[i], noise_u32(11, first + i))); }
    check_bits(t, "stored is the master, rounded by the noise of its element", stored, again, n);
    update_stored(alone, &s_alone, 0, first, n, &a, &dev);
    check_bits(t, "without a master: stored", alone, stored, n);
    check_bits(t, "without a master: m", s_alone.m, s.m, n);
    bf16* d_again = to_device_as<bf16>(alone, n, &dev);
    float* d_master = to_device(s.p, n, &dev);
    adamw_round_stored(d_again, d_master, n, 11u, numbers_from(first), &dev);
    from_device_as(again, d_again, n, &dev), device_drop(d_master);
    check_bits(t, "adamw_round_stored: what the update stored", again, stored, n);
    free(stored), free(alone), free(again), free_state(&s), free_state(&want), free_state(&before),
        free_state(&s_alone);
    device_free(&dev);
}

static void test_stored(Test* t) {
    const size_t lengths[] = {1, 7, 33, 257, 4096, 7001};
    for (size_t i = 0; i < 3 * sizeof lengths / sizeof *lengths; i++) {
        check_stored(t, lengths[i / 3], i * 1000003, (int)(i % 3));
    }
    check_stored(t, 33, ((size_t)1 << 33) + 5, 0);
}

// in one call; in pieces that begin between packs; on a GPU of one multiprocessor and of many
static void test_stored_shares(Test* t) {
    const size_t n = 10003, pieces[] = {10003, 2048, 137, 1004, 10003, 10003};
    const int n_sms[] = {3, 3, 3, 3, 1, 132};
    float* first = NULL;
    for (int i = 0; i < 6; i++) {
        Device dev = test_device(1);
        dev.n_sms = n_sms[i];
        State s = new_state(n, 0);
        AdamW a = settings(0.5f, 2);
        float* stored = filled_array(n, 0.0f);
        update_stored(stored, &s, 1, 0, pieces[i], &a, &dev);
        if (first) { check_bits(t, "stored", stored, first, n); }
        if (first) { free(stored); } else { first = stored; }
        free_state(&s);
        device_free(&dev);
    }
    free(first);
}

// steps far below half a last place, of which rounding to nearest would keep none
static void test_stored_small_steps(Test* t) {
    enum { N = 4096, STEPS = 20 };
    Device dev = test_device(1);
    float *ones = filled_array(N, 1.0f), *zeros = filled_array(N, 0.0f);
    bf16* stored = to_device_as<bf16>(ones, N, &dev);
    float *m = to_device(zeros, N, &dev), *v = to_device(zeros, N, &dev), *g = to_device(ones, N, &dev);
    for (int step = 1; step <= STEPS; step++) {
        AdamW a = adamw_step(1e-4f, 0.9f, 0.999f, 1e-8f, 1.0f, step);
        adamw_update_stored(stored, (float*)NULL, m, v, g, N, 0.0f, &a, noise_key_of(1, (uint64_t)step, 0), numbers_from(0), &dev);
    }
    from_device_as(ones, stored, N, &dev), device_drop(m), device_drop(v), device_drop(g);
    double mean = 0.0;
    for (int i = 0; i < N; i++) { mean += (double)ones[i] / N; }
    // below 1 a step is 1e-4 / 2^-8 = 0.0256 of a last place: each rounding has the variance 0.025 last places squared
    double deviation = sqrt(0.0256 * STEPS / N) * 0x1p-8;
    check(t, fabs(mean - (1.0 - STEPS * 1e-4)) < 5.0 * deviation, "20 steps of 1e-4 lead from 1 to %.6f, on average",
          mean);
    free(ones), free(zeros);
    device_free(&dev);
}
#else
static void test_stored(Test* t) { skip(t, "a fast build for GPUs stores bf16"); }
static void test_stored_shares(Test* t) { test_stored(t); }
static void test_stored_small_steps(Test* t) { test_stored(t); }
#endif

// ---- global norm ----

// the sum that the header states, by another way: units are counted in 128 bits, element by element. Returns the double
// that the digits make
static double spelled_sum(const float* g, size_t n) {
    double largest = 0.0;
    int exponent = -126;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(g[i])) { largest = isnan(g[i]) || isnan(largest) ? NAN : INFINITY; }
        else if (fabsf(g[i]) > largest) { largest = fabs((double)g[i]); }
    }
    if (!isfinite(largest)) { return largest; }
    while (ldexp(1.0, exponent) <= largest) { exponent++; }
    unsigned __int128 units = 0;
    for (size_t i = 0; i < n; i++) {
        units += (unsigned __int128)ldexp((double)g[i] * (double)g[i], 62 - 2 * exponent);
    }
    const double low = (double)(uint64_t)(units & 0x7fffffff), middle = (double)(uint64_t)(units >> 31 & 0x7fffffff);
    return ldexp((double)(uint64_t)(units >> 62) + (middle * 0x1p-31 + low * 0x1p-62), 2 * exponent);
}

typedef void (*NormPass)(NormSum*, const float*, size_t, const Device*);

// over an array on the device that comes in `pieces`
static NormSum device_pass(NormPass pass, NormSum sum, const float* d_g, size_t n, size_t pieces, const Device* dev) {
    NormSum* room = (NormSum*)device_alloc(sizeof sum, "the norm");
    device_upload(room, &sum, sizeof sum, dev);
    for (size_t k = 0; k < pieces; k++) { pass(room, d_g + n * k / pieces, n * (k + 1) / pieces - n * k / pieces, dev); }
    device_download(&sum, room, sizeof sum, dev);
    device_release(room, sizeof sum);
    return sum;
}

// the sum of an array that begins `skip_first` floats behind a boundary
static double device_sum(const float* g, size_t n, size_t skip_first, size_t pieces, const Device* dev) {
    float *shifted = filled_array(skip_first + n, 1e30f), *d_g;
    memcpy(shifted + skip_first, g, sizeof(float) * n);
    d_g = to_device(shifted, skip_first + n, dev);
    NormSum sum = device_pass(norm_see, norm_sum_init(), d_g + skip_first, n, pieces, dev);
    sum = device_pass(norm_add, sum, d_g + skip_first, n, pieces, dev);
    device_drop(d_g), free(shifted);
    return norm_value(&sum);
}

// ... by one pass that expects this exponent of its largest number, and a second one only where that was wrong
static double tried_sum(const float* g, size_t n, int exponent, int* passes, const Device* dev) {
    const float expected = ldexpf(0.75f, exponent);
    uint32_t bits;
    memcpy(&bits, &expected, sizeof bits);
    float* d_g = to_device(g, n, dev);
    NormSum sum = device_pass(norm_try, norm_sum_expecting(bits), d_g, n, 2, dev);
    *passes = norm_is_done(&sum) ? 1 : 2;
    if (*passes == 2) {
        norm_restart(&sum);
        sum = device_pass(norm_add, sum, d_g, n, 2, dev);
    }
    device_drop(d_g);
    return norm_value(&sum);
}

static double plain_sum(const float* g, size_t n) {
    NormSum sum = norm_sum_init();
    norm_see_ref(&sum, g, n);
    norm_add_ref(&sum, g, n);
    return norm_value(&sum);
}

static void check_sum(Test* t, double found, double want, const char* what, size_t n, int n_threads) {
    int same = memcmp(&found, &want, sizeof want) == 0 || (isnan(found) && isnan(want));
    check(t, same, "%s, n %zu, %d threads: found %.17g, expected %.17g", what, n, n_threads, found, want);
}

static void test_norm_order(Test* t) {
    const size_t lengths[] = {0, 1, 7, 15, 16, 17, 33, 257, 4097, 65535, 65536 + 33, 200003};
    for (size_t i = 0; i < 3 * N_TEST_THREADS * sizeof lengths / sizeof *lengths; i++) {
        size_t n = lengths[i / (3 * N_TEST_THREADS)];
        int hard = (int)(i / N_TEST_THREADS % 3), n_threads = test_threads((int)i % N_TEST_THREADS);
        float* g = hard ? hard_array(n, 1) : random_array(n, 1.0f, 1);
        if (hard == 2) { sprinkle(g, n, (uint32_t)n + 1, 2); }
        double want = spelled_sum(g, n);
        check_sum(t, plain_sum(g, n), want, "plain", n, n_threads);
        Device dev = test_device(n_threads);
        check_sum(t, device_sum(g, n, 0, 1, &dev), want, "fast", n, n_threads);
        check_sum(t, device_sum(g, n, 1, 3, &dev), want, "fast, three pieces between boundaries", n, n_threads);
        device_free(&dev);
        free(g);
    }
}

// one pass is enough where the largest number is what was expected, and counts nothing twice where it is not
static void test_norm_expected(Test* t) {
    const size_t lengths[] = {1, 33, 4095, 4097, 65536 + 33, 200003};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        const size_t n = lengths[i];
        float* g = random_array(n, 1.0f, (uint32_t)i);
        Device dev = test_device(i % 2 ? 2 : 3);
        g[n / 2] = 0x1.8p3f;  // the largest, of exponent 4
        for (int exponent = 2; exponent <= 6; exponent++) {
            int passes;
            check_sum(t, tried_sum(g, n, exponent, &passes, &dev), spelled_sum(g, n), "tried", n, dev.n_threads);
            check(t, passes == (exponent == 4 ? 1 : 2), "exponent %d: %d passes", exponent, passes);
        }
        g[0] = NAN;
        int passes;
        check(t, isnan(tried_sum(g, n, 4, &passes, &dev)) && passes == 1, "not a number");
        device_free(&dev);
        free(g);
    }
    NormSum sum = norm_sum_expecting(0x3f800000u), other = norm_sum_expecting(0x40800000u);
    sum.largest = other.largest = 0x3f800000u;
    norm_join(&sum, &other);
    check(t, !norm_is_done(&sum), "ranks that expect different numbers have no sum");
}

// ranks see and add what they have, and join: any of them gets what one has who has all
static void test_norm_join(Test* t) {
    enum { N = 10007, RANKS = 5 };
    float* g = random_array(N, 1.0f, 3);
    NormSum rank[RANKS], all = norm_sum_init();
    for (int i = 0; i < N; i++) { g[i] = ldexpf(g[i], i % 40 - 20); }
    for (int r = 0; r < RANKS; r++) {
        rank[r] = norm_sum_init();
        norm_see_ref(&rank[r], g + N * r / RANKS, (size_t)(N * (r + 1) / RANKS - N * r / RANKS));
        norm_join(&all, &rank[r]);
    }
    const uint32_t largest = all.largest;
    for (int r = RANKS - 1; r >= 0; r--) {
        rank[r].largest = largest;
        norm_add_ref(&rank[r], g + N * r / RANKS, (size_t)(N * (r + 1) / RANKS - N * r / RANKS));
        norm_join(&all, &rank[r]);
    }
    check_sum(t, norm_value(&all), spelled_sum(g, N), "joined descending", N, 1);
    free(g);
}

static void test_norm_obvious(Test* t) {
    float g[10000] = {0};
    Device dev = test_device(2);
    check(t, device_sum(g, 10000, 0, 1, &dev) == 0.0, "of zeros");
    g[0] = 3.0f, g[9999] = -4.0f;
    check(t, device_sum(g, 10000, 0, 1, &dev) == 25.0, "3 and -4 make 25");
    g[0] = 0x1p-149f, g[9999] = 0.0f;
    check(t, device_sum(g, 10000, 0, 1, &dev) == 0x1p-298, "of the smallest number");
    for (int i = 0; i < 10000; i++) { g[i] = FLT_MAX; }
    check(t, fabs(sqrt(device_sum(g, 10000, 0, 1, &dev)) / ((double)FLT_MAX * 100.0) - 1.0) < 1e-14, "no overflow");
    g[5] = -INFINITY;
    check(t, isinf(device_sum(g, 10000, 0, 1, &dev)) && device_sum(g, 10000, 0, 1, &dev) > 0.0, "infinite");
    g[7] = NAN;
    check(t, isnan(device_sum(g, 10000, 0, 1, &dev)), "not a number");
    device_free(&dev);
}

// Beside a chain in double, whose error a few sizes of numbers keep small
static void test_norm_error(Test* t) {
    const size_t n = 1 << 20;
    float* g = random_array(n, 1.0f, 11);
    double chain = 0.0;
    for (size_t i = 0; i < n; i++) {
        g[i] = ldexpf(g[i], (int)(i % 24) - 12);
        chain += (double)g[i] * (double)g[i];
    }
    check(t, fabs(plain_sum(g, n) / chain - 1.0) < 1e-11, "off by %.2g", plain_sum(g, n) / chain - 1.0);
    free(g);
}

// ---- the average of the parameters ----

// against the weighted mean in double, and the plain loop at odd lengths
static void test_ema(Test* t) {
    enum { N = 1025, UPDATES = 40 };
    const float decay = 0.9f;
    float *p = random_array(N, 1.0f, 1), *plain = filled_array(N, 0.0f), *host = filled_array(N, 0.0f);
    double *mean = (double*)calloc(N, sizeof(double)), total = 0.0;
    Device dev = test_device(2);
    float* e = (float*)device_alloc(sizeof(float) * N, "average");
    float* on_device = (float*)device_alloc(sizeof(float) * N, "parameters");
    device_zero(e, sizeof(float) * N, &dev);
    for (int update = 1; update <= UPDATES; update++) {
        float* step = random_array(N, 0.1f, (uint64_t)(1 + update));
        const float weight = ema_weight(decay, update);
        for (int i = 0; i < N; i++) {
            p[i] += step[i];
            mean[i] = (double)decay * mean[i] + (double)p[i];
        }
        total = (double)decay * total + 1.0;
        device_upload(on_device, p, sizeof(float) * N, &dev);
        ema_update_ref(plain, p, N, weight);
        ema_update(e, on_device, N, weight, &dev);
        if (update == 1) { check_bits(t, "after one update", plain, p, N); }
        free(step);
    }
    device_download(host, e, sizeof(float) * N, &dev);
    for (int i = 0; i < N; i++) {  // 40 updates round three times each, of which the older ones are forgotten
        const double error = fabs((double)plain[i] - mean[i] / total);
        check(t, error < 2e-6, "element %d: %g beside %g", i, (double)plain[i], mean[i] / total);
        const int same = float_bits(host[i]) == float_bits(plain[i]);
        check(t, same || (FAST_KERNELS && fabs((double)host[i] - (double)plain[i]) < 2e-6),
              "element %d: fast %g, plain %g", i, (double)host[i], (double)plain[i]);
    }
    ema_exchange(e, on_device, N, &dev);
    device_download(plain, on_device, sizeof(float) * N, &dev);
    check_bits(t, "parameters are the average", plain, host, N);
    device_download(host, e, sizeof(float) * N, &dev);
    check_bits(t, "and the average the parameters", host, p, N);
    device_release(e, sizeof(float) * N);
    device_release(on_device, sizeof(float) * N);
    device_free(&dev);
    free(p), free(plain), free(host), free(mean);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"corrections", "1 - beta^t is the rounded true value for t = 1..50", test_corrections},
        {"frozen", "three updates give the bits that NumPy gives", test_frozen},
        {"lengths", "equals the plain loop at odd lengths; cancellation, subnormals, -0, Inf, NaN too", test_lengths},
        {"double", "an update agrees with double", test_double},
        {"obvious", "a first step is lr against the sign, decay alone shrinks", test_obvious},
        {"noise", "the published stream; no correlation between elements, steps and tensors", test_noise},
        {"rounding", "up as often as the value lies near the upper bf16, so that the mean is the value", test_rounding},
        {"rounding special", "a bf16, an infinity, a NaN stay what they are", test_rounding_special},
        {"stored float", "as float: the new parameter itself, with a master and without", test_stored_float},
        {"stored", "as bf16: the rounded master; without one the same; adamw_round_stored makes it anew", test_stored},
        {"stored shares", "the same bits in pieces and on any number of multiprocessors", test_stored_shares},
        {"stored steps", "without a master, steps too small for a bf16 add up on average", test_stored_small_steps},
        {"norm order", "equals the stated sum bit for bit, whatever the threads and pieces", test_norm_order},
        {"norm expected", "one pass is enough where the largest number is as expected", test_norm_expected},
        {"norm join", "ranks that join what they have get the sum of one that has all", test_norm_join},
        {"norm obvious", "known sums, none overflows, what is not finite shows", test_norm_obvious},
        {"norm error", "within 1e-11 of a chain in double, over 24 powers of two", test_norm_error},
        {"average", "the weighted mean of all updates, after the first the parameters; exchanged bit by bit", test_ema},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
