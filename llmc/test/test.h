/*
A test program is a table of promises and one call:
    static void test_backward(Test* t) { check(t, n == 3, "expected 3 rows, found %d", n); }
    int main(int argc, char** argv) {
        Promise promises[] = { {"backward", "agrees with finite differences at (7, 33)", test_backward} };
        return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
    }
It prints one line per promise and ends with `N passed, N failed` (and `, N skipped` where there are some), status 1 if
any failed. An argument on the command line runs only the promises whose name contains it.
*/
#ifndef LLMC_TEST_H
#define LLMC_TEST_H
#include "../core/device.h"  // Device, fail.h
#include "../core/rng.h"     // xorshift_u32, xorshift_float
#include "device_time.h"     // device_time
#include <math.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __CUDACC__
#include <cuda_bf16.h>
#endif
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"  // the rows of tables may end early: the rest is 0

typedef struct {
    int n_failures;       // broken checks of the promise that runs now
    const char* skipped;  // reason, when the promise cannot be tested here
    const void* about;    // the promise's
} Test;

typedef struct {
    const char* name;     // what is tested: "matmul forward"
    const char* promise;  // what it keeps: "equals the plain loop to the last bit at odd shapes"
    void (*run)(Test* t);
    const void* about;    // what run finds in t->about, where one function keeps the promise of several things
} Promise;

// the first few broken checks of a promise are printed, all are counted
__attribute__((format(printf, 3, 4)))
static inline int check(Test* t, int ok, const char* format, ...) {
    if (!ok && t->n_failures++ < 5) {
        va_list args;
        va_start(args, format);
        printf("    ");
        vprintf(format, args);
        printf("\n");
        va_end(args);
    }
    return ok;
}

static inline void skip(Test* t, const char* reason) { t->skipped = reason; }

// ---- floats ----

static inline uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float float_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

// distance in units in the last place: floats mapped to integers in their own order, -0 and +0 one apart
static inline int64_t float_ulps(float a, float b) {
    int64_t ia = float_bits(a), ib = float_bits(b);
    ia = (ia & 0x80000000) ? 0x7fffffff - ia : ia;
    ib = (ib & 0x80000000) ? 0x7fffffff - ib : ib;
    return ia > ib ? ia - ib : ib - ia;
}

// every bit equal, -0 and +0 apart; a NaN equals any NaN, since sign and payload of a new NaN are the machine's
static inline int check_bits(Test* t, const char* what, const float* got, const float* want, size_t n) {
    size_t n_wrong = 0, first = 0;
    for (size_t i = 0; i < n; i++) {
        int same = float_bits(got[i]) == float_bits(want[i]) || (isnan(got[i]) && isnan(want[i]));
        if (!same && n_wrong++ == 0) { first = i; }
    }
    if (n_wrong == 0) { return 1; }
    return check(t, 0, "%s: %zu of %zu differ, first at [%zu]: found %08x (%.9g), expected %08x (%.9g), %lld ulp apart",
                 what, n_wrong, n, first, float_bits(got[first]), (double)got[first], float_bits(want[first]),
                 (double)want[first], (long long)float_ulps(got[first], want[first]));
}

// |got - want| <= tolerance everywhere; give the tolerance with its reason
static inline int check_close(Test* t, const char* what, const float* got, const double* want, size_t n,
                              double tolerance) {
    double worst = 0.0;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)got[i] - want[i]);
        if (!(d <= worst) && !isnan(worst)) { worst = d; at = i; }  // the first NaN stays
    }
    return check(t, worst <= tolerance, "%s: [%zu] found %.9g, expected %.9g, apart %.3g, allowed %.3g",
                 what, at, (double)got[at], want[at], worst, tolerance);
}

// ---- arrays and devices for ops ----
// Every array starts a stream of its own from the caller's seed, so that a promise sees the same numbers when it runs
// alone. The caller frees. Arrays are exactly as long as asked for: a sanitizer sees the first float beyond.

static inline uint64_t seeded_stream(uint64_t seed) { return (2 * seed + 1) * 0x9E3779B97F4A7C15ULL; }

// zeroed, because compilers cannot see that the loops below fill all of it
static inline void* new_array(size_t n, size_t element_bytes) {
    void* p = calloc(n ? n : 1, element_bytes);
    if (!p) { fail_run("array: no memory for %zu elements", n); }
    return p;
}

// what an op will write to: NAN shows where it did not
static inline float* filled_array(size_t n, float value) {
    float* x = (float*)new_array(n, sizeof(float));
    for (size_t i = 0; i < n; i++) { x[i] = value; }
    return x;
}

static inline float* copied_array(const float* x, size_t n) {
    return (float*)memcpy(new_array(n, sizeof(float)), x, sizeof(float) * n);
}

// uniform in [-scale, scale)
static inline float* random_array(size_t n, float scale, uint64_t seed) {
    float* x = (float*)new_array(n, sizeof(float));
    uint64_t s = seeded_stream(seed);
    for (size_t i = 0; i < n; i++) { x[i] = scale * (2.0f * xorshift_float(&s) - 1.0f); }
    return x;
}

// finite, but hard on sums: neighbours that cancel, magnitudes 2^-20 .. 2^20, subnormals, -0, products that underflow
static inline float* hard_array(size_t n, uint64_t seed) {
    float* x = random_array(n, 1.0f, seed);
    uint64_t s = seeded_stream(~seed);
    for (size_t i = 0; i < n; i++) {
        uint32_t u = xorshift_u32(&s);
        switch (u >> 8 & 7) {
            case 0: x[i] = i > 0 ? -x[i - 1] : x[i]; break;
            case 1: x[i] = ldexpf(x[i], (int)(u >> 12) % 41 - 20); break;
            case 2: x[i] = float_from_bits(u & 0x807fffff); break;
            case 3: x[i] = ldexpf(x[i], -70); break;
            case 4: x[i] = -0.0f; break;
            default: break;
        }
    }
    return x;
}

// put an infinity or a NaN in the place of about one element in `one_in`
static inline void sprinkle(float* x, size_t n, uint32_t one_in, uint64_t seed) {
    const float specials[4] = {INFINITY, -INFINITY, NAN, INFINITY};
    uint64_t s = seeded_stream(~seed);
    for (size_t i = 0; i < n; i++) {
        uint32_t u = xorshift_u32(&s);
        if (u % one_in == 0) { x[i] = specials[u >> 28 & 3]; }
    }
}

#ifdef __CUDACC__
enum { N_TEST_THREADS = 1 };  // the host's threads have no part in kernels
#else
enum { N_TEST_THREADS = 4 };
#endif
static inline int test_threads(int i) { return i < 3 ? i + 1 : 7; }  // 1, 2, 3, 7

// do the ops add and round as fast kernels do? Then their bits are not those of the plain loops
#if defined(__CUDACC__) && !defined(EXACT)
enum { FAST_KERNELS = 1 };
#else
enum { FAST_KERNELS = 0 };
#endif

// ---- arrays on the device: copies of plain ones, in a CUDA build on the GPU ----

#ifdef __CUDACC__
// stored as X
template <typename X>
static inline X* to_device_as(const float* x, size_t n, const Device* dev) {
    X* stored = (X*)new_array(n, sizeof(X));
    for (size_t i = 0; i < n; i++) { stored[i] = (X)x[i]; }
    X* d = (X*)device_alloc(sizeof(X) * n, "test array");
    device_upload(d, stored, sizeof(X) * n, dev);
    device_sync(dev);
    free(stored);
    return d;
}

// back to floats; the device's array is freed
template <typename X>
static inline void from_device_as(float* x, X* d, size_t n, const Device* dev) {
    X* stored = (X*)new_array(n, sizeof(X));
    device_download(stored, d, sizeof(X) * n, dev);
    for (size_t i = 0; i < n; i++) { x[i] = (float)stored[i]; }
    free(stored);
    device_release(d, sizeof(X) * n);
}

static inline float* to_device(const float* x, size_t n, const Device* dev) { return to_device_as<float>(x, n, dev); }
static inline void from_device(float* x, float* d, size_t n, const Device* dev) { from_device_as<float>(x, d, n, dev); }

static inline int* ints_to_device(const int* x, size_t n, const Device* dev) {
    int* d = (int*)device_alloc(sizeof(int) * n, "test array");
    device_upload(d, x, sizeof(int) * n, dev);
    device_sync(dev);
    return d;
}

static inline void device_drop(void* d) { device_release(d, 0); }

// uniform numbers that bf16 has
static inline float* bf16_array(size_t n, float scale, uint64_t seed) {
    float* x = random_array(n, scale, seed);
    for (size_t i = 0; i < n; i++) { x[i] = (float)(__nv_bfloat16)x[i]; }
    return x;
}

// of one call of run, on the device: the mean of n_runs, after three that warm up
template <typename Run>
static inline double device_milliseconds(int n_runs, const Device* dev, Run run) {
    for (int i = 0; i < 3; i++) { run(); }
    return device_time(n_runs, dev, run) / n_runs;
}
#else
static inline float* to_device(const float* x, size_t n, const Device* dev) {
    (void)dev;
    return (float*)memcpy(new_array(n, sizeof(float)), x, sizeof(float) * n);
}

static inline void from_device(float* x, float* d, size_t n, const Device* dev) {
    (void)dev;
    memcpy(x, d, sizeof(float) * n);
    free(d);
}

static inline int* ints_to_device(const int* x, size_t n, const Device* dev) {
    (void)dev;
    return (int*)memcpy(new_array(n, sizeof(int)), x, sizeof(int) * n);
}

static inline void device_drop(void* d) { free(d); }  // of to_device, without reading it back
#endif

// each promise has its own: its workspace is as large as its largest op asked for, under a sanitizer to the byte
static inline Device test_device(int n_threads) {
    Device dev;
    device_init(&dev, n_threads);
    return dev;
}

// d loss / d x by central differences in double; loss(x, arg) is smooth, so the step 2^-17 leaves errors near 1e-10
static inline double* finite_differences(double (*loss)(const double* x, void* arg), double* x, size_t n, void* arg) {
    const double step = 0x1p-17;
    double* grad = (double*)new_array(n, sizeof(double));
    for (size_t i = 0; i < n; i++) {
        double x_i = x[i];
        x[i] = x_i + step;
        double above = loss(x, arg);
        x[i] = x_i - step;
        double below = loss(x, arg);
        x[i] = x_i;
        grad[i] = (above - below) / (2.0 * step);
    }
    return grad;
}

static inline double* double_array(const float* x, size_t n) {
    double* d = (double*)new_array(n, sizeof(double));
    for (size_t i = 0; i < n; i++) { d[i] = (double)x[i]; }
    return d;
}

// a tolerance: n roundings of values below `size`, each off by half a last place, size * 2^-25, at most and
// independent of the others. Six standard deviations of their sum; the worst case, all of them one way, is sqrt(3 n) /
// 6 times as wide
static inline double rounding_walk(int n, double size) { return 6.0 * sqrt(n / 3.0) * size * 0x1p-25; }

// ---- programs that stop ----

// A child that stops leaves its memory, and threads that fork has not copied, as they are: that is no leak for a
// sanitizer to report
static inline void leave_at_once_(int status, void* unused) {
    (void)unused;
    fflush(NULL);
    _exit(status);
}

// run f(arg) in a child: it must exit with `status` and print exactly one line on stderr that contains `text`
static inline int check_exit(Test* t, const char* what, void (*f)(void*), void* arg, int status, const char* text) {
    char line[4096] = "";
    int fd[2], state = 0;
    fflush(stdout);
    if (pipe(fd) != 0) { fail_run("pipe: %s", strerror(errno)); }
    pid_t child = fork();
    if (child == 0) {
        dup2(fd[1], 2);
        close(fd[0]);
#ifndef SIMT  // whose own end looks for device memory that was not freed
        on_exit(leave_at_once_, NULL);
#endif
        f(arg);
        fflush(stderr);
        _exit(0);
    }
    close(fd[1]);
    size_t used = 0;
    for (ssize_t n; used < sizeof line - 1 && (n = read(fd[0], line + used, sizeof line - 1 - used)) > 0;) {
        used += (size_t)n;
    }
    close(fd[0]);
    waitpid(child, &state, 0);
    int found = WIFEXITED(state) ? WEXITSTATUS(state) : -WTERMSIG(state);
    int n_lines = 0;
    for (const char* c = line; *c; c++) { n_lines += *c == '\n'; }
    return check(t, found == status && (status == 0 || (n_lines == 1 && strstr(line, text))),
                 "%s: expected status %d and one line with \"%s\", found status %d and: %s",
                 what, status, text, found, line);
}

static inline int test_main(int argc, char** argv, const Promise* promises, size_t n) {
    int n_passed = 0, n_failed = 0, n_skipped = 0;
    for (size_t i = 0; i < n; i++) {
        if (argc > 1 && !strstr(promises[i].name, argv[1])) { continue; }
        Test t = {0, NULL, promises[i].about};
        promises[i].run(&t);
        const char* verdict = t.n_failures ? "FAIL" : t.skipped ? "skip" : "ok  ";
        printf("%s  %s: %s%s%s\n", verdict, promises[i].name, promises[i].promise, t.skipped ? ": skipped, " : "",
               t.skipped ? t.skipped : "");
        fflush(stdout);
        n_failed += t.n_failures > 0;
        n_skipped += !t.n_failures && t.skipped;
        n_passed += !t.n_failures && !t.skipped;
    }
    if (argc > 1 && n_passed + n_failed + n_skipped == 0) {
        fail_input("no promise has \"%s\" in its name", argv[1]);
    }
    printf("%d passed, %d failed", n_passed, n_failed);
    if (n_skipped) { printf(", %d skipped", n_skipped); }
    printf("\n");
    return n_failed > 0;
}
#endif  // LLMC_TEST_H
