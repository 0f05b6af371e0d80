/*
How fast is our matrix product? GFLOP/s of llmc/ops/matmul.h against OpenBLAS's sgemm, torch.mm and this machine's peak.
    build/gemm [THREADS...]      default: 1 2; about half a minute each; dev/bench/run.sh builds it
All compute out (M, N) = inp (M, K) * weight (N, K)^T, the linear layer's forward. Per shape they take turns until SECONDS
have passed, at least REPEATS times, and the shortest time of each counts. The peak is that of fused multiply-adds, which all use.
OpenBLAS is loaded at run time, torch.mm runs in a child, by the Python that $PYTHON names; one that is missing has an empty column.
*/
#include "../../llmc/ops/matmul.h"  // matmul_forward, Device, device_init, device_free
#include "../../llmc/core/print.h"  // seconds_now
#include "vector_peak.h"            // vector_peak
#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <unistd.h>

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

// ---- torch.mm, in a child ----

typedef struct { FILE *ask, *answer; } TorchMm;

static TorchMm torch_start(void) {
    const char* python = getenv("PYTHON");
    int to[2], from[2];
    if (pipe(to) != 0 || pipe(from) != 0) { fail_run("pipe: %s", strerror(errno)); }
    if (fork() == 0) {
        dup2(to[0], 0), dup2(from[1], 1);
        close(to[1]), close(from[0]);
        execlp(python ? python : "python3", python ? python : "python3", "dev/bench/torch_mm.py", (char*)NULL);
        _exit(127);
    }
    close(to[0]), close(from[1]);
    signal(SIGPIPE, SIG_IGN);  // of a child that could not start
    return (TorchMm){fdopen(to[1], "w"), fdopen(from[0], "r")};
}

// infinite: there is no torch
static double torch_seconds(const TorchMm* torch, Shape s, int n_threads) {
    const struct timespec nap = {0, 50 * 1000 * 1000};
    char line[64] = "";
    nanosleep(&nap, NULL);
    fprintf(torch->ask, "%d %d %d %d\n", n_threads, s.M, s.N, s.K);
    fflush(torch->ask);
    const double seconds = fgets(line, sizeof line, torch->answer) ? atof(line) : 0.0;
    return seconds > 0.0 ? seconds : INFINITY;
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

enum { OURS, OPENBLAS, TORCH, CONTENDERS };

// the shortest of each contender, infinite where it is missing; *peak is raised to the best seen
static void measure(double seconds[CONTENDERS], double* peak, Shape s, const Device* dev, const OpenBlas* blas, const TorchMm* torch) {
    float* inp = random_matrix(s.M, s.K, 1);
    float* weight = random_matrix(s.N, s.K, 2);
    float* out[2] = {random_matrix(s.M, s.N, 3), random_matrix(s.M, s.N, 4)};
    double begin = seconds_now(CLOCK_MONOTONIC);
    seconds[OURS] = seconds[OPENBLAS] = seconds[TORCH] = INFINITY;
    for (int i = 0; i < REPEATS || seconds_now(CLOCK_MONOTONIC) - begin < SECONDS; i++) {
        seconds[OURS] = fmin(seconds[OURS], seconds_of(out[0], inp, weight, s, dev, NULL));
        if (blas->sgemm) { seconds[OPENBLAS] = fmin(seconds[OPENBLAS], seconds_of(out[1], inp, weight, s, dev, blas)); }
        seconds[TORCH] = fmin(seconds[TORCH], torch_seconds(torch, s, dev->n_threads));
        *peak = fmax(*peak, vector_peak(dev->n_threads));
    }
    if (blas->sgemm) { check_equal(out[0], out[1], s); }
    free(inp);
    free(weight);
    free(out[0]);
    free(out[1]);
}

static void table(int n_threads, const OpenBlas* blas, const TorchMm* torch) {
    Device dev;
    double seconds[N_SHAPES][CONTENDERS], peak = 0.0;
    device_init(&dev, n_threads);
    if (blas->sgemm) { blas->set_threads(n_threads); }
    for (int i = 0; i < N_SHAPES; i++) { measure(seconds[i], &peak, shapes[i], &dev, blas, torch); }
    device_free(&dev);
    printf("%d thread%s: peak %.1f GFLOP/s; OpenBLAS %s\n", n_threads, n_threads > 1 ? "s" : "", peak,
           blas->sgemm ? blas->core_name() : "missing");
    printf("%20s %12s %10s %16s %16s %24s\n", "M x N x K", "ours GFLOP/s", "% of peak", "OpenBLAS GFLOP/s", "torch.mm GFLOP/s",
           "ours / the faster of both");
    for (int i = 0; i < N_SHAPES; i++) {
        Shape s = shapes[i];
        const double gflop = 2e-9 * s.M * s.N * s.K, ours_rate = gflop / seconds[i][OURS];
        char name[64];
        snprintf(name, sizeof name, "%d x %d x %d", s.M, s.N, s.K);
        printf("%20s %12.1f %10.1f", name, ours_rate, 100 * ours_rate / peak);
        for (int c = OPENBLAS; c <= TORCH; c++) {
            if (isfinite(seconds[i][c])) { printf(" %16.1f", gflop / seconds[i][c]); } else { printf(" %16s", ""); }
        }
        const double best = fmin(seconds[i][OPENBLAS], seconds[i][TORCH]);
        if (isfinite(best)) { printf(" %24.2f", best / seconds[i][OURS]); }
        printf("\n");
    }
    printf("\n");
}

int main(int argc, char** argv) {
    OpenBlas blas = openblas_load();
    TorchMm torch = torch_start();
    for (int i = 1; i < argc; i++) {
        int n_threads = atoi(argv[i]);
        if (n_threads < 1) { fail_input("expected numbers of threads, found \"%s\"", argv[i]); }
        table(n_threads, &blas, &torch);
    }
    if (argc == 1) {
        table(1, &blas, &torch);
        table(2, &blas, &torch);
    }
    return 0;
}
