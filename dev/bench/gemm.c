/*
How fast is our matrix product? GFLOP/s of llmc/ops/matmul.h against OpenBLAS's sgemm and this machine's peak, on 1 and 2 threads.
    build/gemm [THREADS...]      default: 1 2; about half a minute each; dev/bench/run.sh builds it
Both compute out (M, N) = inp (M, K) * weight (N, K)^T, the linear layer's forward. Per shape the two take turns until SECONDS
have passed, at least REPEATS times, and the shortest time of each counts. The peak is that of fused multiply-adds, which both use.
OpenBLAS is loaded at run time; without libopenblas.so.0 its columns stay empty.
*/
#include "../../llmc/ops/matmul.h"  // matmul_forward, Device, device_init, device_free
#include "../../llmc/run/peak.h"    // seconds_now
#include "vector_peak.h"            // vector_peak
#include <dlfcn.h>
#include <math.h>

enum { REPEATS = 5 };
static const double SECONDS = 3.0;

typedef struct { int M, N, K; } Shape;
static const Shape shapes[] = {  // no dimension below 256, the size of the waking product in seconds_of
    {256, 768, 3072}, {256, 3072, 768}, {256, 50304, 768},  // GPT-2 124M at B 4, T 64: fcproj, fc, logits
    {1024, 1024, 1024}, {4096, 4096, 4096}, {257, 1023, 769},
};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };

// ---- the two products ----

static void ours(float* out, const float* inp, const float* weight, Shape s, const Device* dev) {
    matmul_forward(out, inp, weight, NULL, s.M, s.K, s.N, dev);
}

typedef struct {  // functions of libopenblas; sgemm is NULL where the library is missing
    void (*sgemm)(int order, int trans_a, int trans_b, int M, int N, int K, float alpha, const float* a, int a_stride,
                  const float* b, int b_stride, float beta, float* out, int out_stride);
    void (*set_threads)(int n_threads);
    char* (*core_name)(void);
} OpenBlas;

static OpenBlas openblas_load(void) {
    OpenBlas blas = {NULL, NULL, NULL};
    void* library = dlopen("libopenblas.so.0", RTLD_NOW);
    if (!library) { return blas; }
    *(void**)&blas.sgemm = dlsym(library, "cblas_sgemm");
    *(void**)&blas.set_threads = dlsym(library, "openblas_set_num_threads");
    *(void**)&blas.core_name = dlsym(library, "openblas_get_corename");
    if (!blas.sgemm || !blas.set_threads || !blas.core_name) { fail_run("libopenblas.so.0: lacks a function: %s", dlerror()); }
    return blas;
}

static void openblas(float* out, const float* inp, const float* weight, Shape s, const OpenBlas* blas) {
    enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };  // CBLAS's numbers
    blas->sgemm(ROW_MAJOR, NO_TRANS, TRANS, s.M, s.N, s.K, 1.0f, inp, s.K, weight, s.K, 0.0f, out, s.N);
}

// ---- measuring ----

// idle threads of the library that ran before spin for some 30 ms: let them fall asleep, then wake our own with a small product
static double seconds_of(float* out, const float* inp, const float* weight, Shape s, const Device* dev, const OpenBlas* blas) {
    const struct timespec nap = {0, 50 * 1000 * 1000};
    const Shape small = {256, 256, 256};
    double begin = 0.0;
    nanosleep(&nap, NULL);
    for (int timed = 0; timed <= 1; timed++) {
        begin = seconds_now(CLOCK_MONOTONIC);
        if (blas) { openblas(out, inp, weight, timed ? s : small, blas); } else { ours(out, inp, weight, timed ? s : small, dev); }
    }
    return seconds_now(CLOCK_MONOTONIC) - begin;
}

static float* random_matrix(int rows, int columns, uint32_t state) {
    size_t n = (size_t)rows * columns;
    float* x = (float*)malloc_check(sizeof(float) * n, "matrix");
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) / 16777216.0f - 0.5f;
    }
    return x;
}

// a wrong product is fast too: the two may differ by the roundings of K sums of products below 1/4
static void check_equal(const float* a, const float* b, Shape s) {
    float allowed = 2.0f * 0x1p-24f * (float)s.K * (float)s.K / 4.0f;
    for (size_t i = 0; i < (size_t)s.M * s.N; i++) {
        if (!(fabsf(a[i] - b[i]) <= allowed)) {
            fail_run("%d x %d x %d: [%zu] ours %.9g, OpenBLAS %.9g: not the same product", s.M, s.N, s.K, i, (double)a[i], (double)b[i]);
        }
    }
}

// seconds[0] ours, seconds[1] OpenBLAS (infinite where it is missing); *peak is raised to the best seen
static void measure(double seconds[2], double* peak, Shape s, const Device* dev, const OpenBlas* blas) {
    float* inp = random_matrix(s.M, s.K, 1);
    float* weight = random_matrix(s.N, s.K, 2);
    float* out[2] = {random_matrix(s.M, s.N, 3), random_matrix(s.M, s.N, 4)};
    double begin = seconds_now(CLOCK_MONOTONIC);
    seconds[0] = seconds[1] = INFINITY;
    for (int i = 0; i < REPEATS || seconds_now(CLOCK_MONOTONIC) - begin < SECONDS; i++) {
        seconds[0] = fmin(seconds[0], seconds_of(out[0], inp, weight, s, dev, NULL));
        if (blas->sgemm) { seconds[1] = fmin(seconds[1], seconds_of(out[1], inp, weight, s, dev, blas)); }
        *peak = fmax(*peak, vector_peak(dev->n_threads));
    }
    if (blas->sgemm) { check_equal(out[0], out[1], s); }
    free(inp);
    free(weight);
    free(out[0]);
    free(out[1]);
}

static void table(int n_threads, const OpenBlas* blas) {
    Device dev;
    double seconds[N_SHAPES][2], peak = 0.0;
    device_init(&dev, n_threads);
    if (blas->sgemm) { blas->set_threads(n_threads); }
    for (int i = 0; i < N_SHAPES; i++) { measure(seconds[i], &peak, shapes[i], &dev, blas); }
    device_free(&dev);
    printf("%d thread%s: peak %.1f GFLOP/s; OpenBLAS %s\n", n_threads, n_threads > 1 ? "s" : "", peak,
           blas->sgemm ? blas->core_name() : "missing");
    printf("%20s %14s %10s %18s %10s %16s\n", "M x N x K", "ours GFLOP/s", "% of peak", "OpenBLAS GFLOP/s", "% of peak", "ours / OpenBLAS");
    for (int i = 0; i < N_SHAPES; i++) {
        Shape s = shapes[i];
        double gflop = 2e-9 * s.M * s.N * s.K, our_rate = gflop / seconds[i][0], blas_rate = gflop / seconds[i][1];
        char name[64];
        snprintf(name, sizeof name, "%d x %d x %d", s.M, s.N, s.K);
        printf("%20s %14.1f %10.1f", name, our_rate, 100 * our_rate / peak);
        if (blas->sgemm) { printf(" %18.1f %10.1f %16.2f", blas_rate, 100 * blas_rate / peak, our_rate / blas_rate); }
        printf("\n");
    }
    printf("\n");
}

int main(int argc, char** argv) {
    OpenBlas blas = openblas_load();
    for (int i = 1; i < argc; i++) {
        int n_threads = atoi(argv[i]);
        if (n_threads < 1) { fail_input("expected numbers of threads, found \"%s\"", argv[i]); }
        table(n_threads, &blas);
    }
    if (argc == 1) {
        table(1, &blas);
        table(2, &blas);
    }
    return 0;
}
