/*
Promises of llmc/ops/muon.h: the numbers of dev/ref/muon.py, the plain loop's bits at odd shapes, turned matrices, and
what an update is: the singular values that the polynomials give, the same size always. Fast builds for GPUs keep
tolerances.
*/
#include "llmc/ops/muon.h"
#include "llmc/test/golden.h"
#include "llmc/test/test.h"

static Muon settings(void) {
    const Muon u = {0.02f, 0.95f, 0.75f};
    return u;
}

// ---- one matrix, in host memory ----

typedef struct {
    float *p, *m, *g;
    int rows, columns;
    size_t n;
} Matrices;

// hard 1: cancellation, subnormals, -0, spread over 2^40; hard 2: also infinities and NaNs
static Matrices new_matrices(int rows, int columns, int hard) {
    const size_t n = (size_t)rows * (size_t)columns;
    Matrices x = {hard ? hard_array(n, 1) : random_array(n, 1.0f, 1), hard ? hard_array(n, 2) : random_array(n, 1.0f, 2),
                  hard ? hard_array(n, 3) : random_array(n, 1.0f, 3), rows, columns, n};
    if (hard == 2) { sprinkle(x.p, n, 40, 4), sprinkle(x.m, n, (uint32_t)n, 5), sprinkle(x.g, n, (uint32_t)n, 6); }
    return x;
}

static void free_matrices(Matrices* x) { free(x->p), free(x->m), free(x->g); }

static void update_plain(Matrices* x, float weight_decay, const Muon* u) {
    float *direction = filled_array(x->n, NAN), *room = (float*)malloc(muon_room_bytes(x->rows, x->columns));
    muon_update_ref(x->p, x->m, x->g, x->rows, x->columns, weight_decay, u, direction, room);
    free(direction), free(room);
}

// on the device; x of the update takes the gradient's place
static void update_fast(Matrices* x, float weight_decay, const Muon* u, const Device* dev) {
    const size_t n_room = muon_room_bytes(x->rows, x->columns);
    float *p = to_device(x->p, x->n, dev), *m = to_device(x->m, x->n, dev), *g = to_device(x->g, x->n, dev);
    void* room = device_alloc(n_room, "room");
    muon_momentum(g, m, g, x->n, u, dev);
    const float* direction = muon_direction(g, x->rows, x->columns, room, p, dev);
    muon_descend_stored(p, (float*)NULL, direction, x->n, x->rows, x->columns, weight_decay, u, 0, numbers_from(0), dev);
    from_device(x->p, p, x->n, dev), from_device(x->m, m, x->n, dev), from_device(x->g, g, x->n, dev);
    device_release(room, n_room);
}

// the direction of x, by the plain loop
static float* plain_direction(const float* x, int rows, int columns) {
    float *direction = copied_array(x, (size_t)rows * (size_t)columns), *room = (float*)malloc(muon_room_bytes(rows, columns));
    muon_direction_ref(direction, rows, columns, room);
    free(room);
    return direction;
}

// ---- the reference ----

static void check_golden(Test* t, const Golden* g, const char* name, int E, int rows, int columns) {
    const size_t n = (size_t)(rows * columns), all = n * (size_t)E;
    char key[32];
    snprintf(key, sizeof key, "%s.p0", name);
    float *p = copied_array(golden_floats(g, key), all), *m = filled_array(all, 0.0f);
    const Muon u = {golden_float(g, "lr"), golden_float(g, "momentum"), golden_float(g, "grad_scale")};
    for (int step = 1; step <= 3; step++) {
        snprintf(key, sizeof key, "%s.g%d", name, step);
        float* grad = copied_array(golden_floats(g, key), all);
        for (int e = 0; e < E; e++) {
            Matrices x = {p + n * (size_t)e, m + n * (size_t)e, grad + n * (size_t)e, rows, columns, n};
            update_plain(&x, golden_float(g, "weight_decay"), &u);
        }
        snprintf(key, sizeof key, "%s.p%d", name, step);
        golden_check(t, g, key, p, all);
        snprintf(key, sizeof key, "%s.m%d", name, step);
        golden_check(t, g, key, m, all);
        free(grad);
    }
    free(p), free(m);
}

static void test_golden(Test* t) {
    Golden g;
    golden_open(&g, "dev/golden/muon.safetensors");
    check_golden(t, &g, "wide", 1, 5, 12);
    check_golden(t, &g, "tall", 1, 12, 5);
    check_golden(t, &g, "experts", 3, 4, 6);
    golden_close(&g);
}

// ---- fast against plain ----

static const int shapes[][2] = {{1, 1}, {1, 7}, {7, 1}, {5, 12}, {12, 5}, {7, 7}, {33, 40}, {40, 33}, {3, 257}, {16, 64},
                                {257, 3}, {64, 16}, {130, 67}, {48, 96}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static void check_update(Test* t, int rows, int columns, int hard, int n_threads) {
    Device dev = test_device(n_threads);
    Matrices got = new_matrices(rows, columns, hard), want = new_matrices(rows, columns, hard);
    const Muon u = settings();
    char what[64];
    snprintf(what, sizeof what, "(%d, %d), hard %d, %d threads", rows, columns, hard, n_threads);
    for (int step = 0; step < 2; step++) {
        update_plain(&want, step ? 0.0f : 0.1f, &u);
        update_fast(&got, step ? 0.0f : 0.1f, &u, &dev);
        memcpy(got.g, want.g, sizeof(float) * got.n);  // x was in its place
        if (!FAST_KERNELS) {
            check_bits(t, what, got.p, want.p, got.n);
            check_bits(t, what, got.m, want.m, got.n);
            continue;
        }
        // products in another order: 2^-24 of what is largest becomes 3.4445^8 times as much where x is small
        for (size_t i = 0; i < got.n; i++) {
            const double off = fabs((double)got.p[i] - (double)want.p[i]), size = (double)muon_size(rows, columns);
            check(t, off <= (double)u.lr * size * 2e-3 + 1e-6, "%s: [%zu] found %.9g, expected %.9g", what, i,
                  (double)got.p[i], (double)want.p[i]);
        }
    }
    free_matrices(&got), free_matrices(&want);
    device_free(&dev);
}

static void test_shapes(Test* t) {
    for (int i = 0; i < N_SHAPES; i++) {
        for (int k = 0; k < N_TEST_THREADS; k++) {
            if (N_TEST_THREADS == 1 && shapes[i][0] * shapes[i][1] > 3000) { continue; }  // dev/simt
            check_update(t, shapes[i][0], shapes[i][1], 0, test_threads(k));
        }
    }
}

static void test_special(Test* t) {
    for (int i = 0; i < 2 * N_SHAPES && !FAST_KERNELS; i++) {
        const int *shape = shapes[i / 2], is_large = shape[0] * shape[1] > (N_TEST_THREADS == 1 ? 600 : 3000);
        if (!is_large) { check_update(t, shape[0], shape[1], 1 + i % 2, 2); }
    }
}

#ifndef __CUDACC__
// sides beyond a block of k of gemm.h, and beyond a strip of what is symmetric
static void test_large(Test* t) {
    const int large[][2] = {{9, GEMM_LONG_K + 5}, {GEMM_LONG_K + 5, 9}, {MUON_STRIP + 9, 150}, {150, MUON_STRIP + 9}};
    for (int i = 0; i < 4; i++) { check_update(t, large[i][0], large[i][1], 0, test_threads(i % N_TEST_THREADS)); }
    check_update(t, MUON_STRIP + 9, 150, 0, 7);
}
#endif

static float* turned(const float* x, int rows, int columns) {
    float* to = filled_array((size_t)rows * (size_t)columns, NAN);
    for (int i = 0; i < rows * columns; i++) { to[i % columns * rows + i / columns] = x[i]; }
    return to;
}

// a turned matrix has the turned direction, by the fast way too; a square one is never turned
static void test_turned(Test* t) {
    Device dev = test_device(2);
    for (int i = 0; i < N_SHAPES && !FAST_KERNELS; i++) {
        const int rows = shapes[i][0], columns = shapes[i][1];
        if (rows == columns || (N_TEST_THREADS == 1 && rows * columns > 1500)) { continue; }
        const Muon u = settings();
        Matrices x = new_matrices(rows, columns, 0), y = {turned(x.p, rows, columns), turned(x.m, rows, columns),
                                                         turned(x.g, rows, columns), columns, rows, x.n};
        update_fast(&x, 0.1f, &u, &dev), update_fast(&y, 0.1f, &u, &dev);
        float* back = turned(y.p, columns, rows);
        check_bits(t, "turned", back, x.p, x.n);
        free(back), free_matrices(&x), free_matrices(&y);
    }
    device_free(&dev);
}

// ---- what a direction is ----

// Jacobi's method: columns of x (rows, n) are turned in pairs until they are orthogonal, v (n, n) with them. The lengths
// of the columns are the singular values, those of v the right singular vectors
static void singular_vectors(double* x, double* v, int rows, int n) {
    for (int i = 0; i < n * n; i++) { v[i] = i / n == i % n; }
    for (int sweep = 0; sweep < 40; sweep++) {
        for (int a = 0; a < n; a++) {
            for (int b = a + 1; b < n; b++) {
                double aa = 0.0, bb = 0.0, ab = 0.0;
                for (int r = 0; r < rows; r++) {
                    aa += x[r * n + a] * x[r * n + a], bb += x[r * n + b] * x[r * n + b], ab += x[r * n + a] * x[r * n + b];
                }
                if (fabs(ab) <= 1e-16 * sqrt(aa * bb)) { continue; }
                const double z = (bb - aa) / (2.0 * ab), s = (z < 0.0 ? -1.0 : 1.0) / (fabs(z) + sqrt(1.0 + z * z));
                const double c = 1.0 / sqrt(1.0 + s * s), d = c * s;
                for (int k = 0; k < rows + n; k++) {
                    double* row = k < rows ? x + k * n : v + (k - rows) * n;
                    const double left = row[a], right = row[b];
                    row[a] = c * left - d * right, row[b] = d * left + c * right;
                }
            }
        }
    }
}

// what the polynomials make of a singular value
static double polynomials(double s) {
    for (int step = 0; step < MUON_STEPS; step++) {
        const MuonPolynomial f = muon_polynomial(step);
        s = (double)f.a * s + (double)f.b * s * s * s + (double)f.c * s * s * s * s * s;
    }
    return s;
}

// between 1 and 1.0006 from 3e-4 on
static void test_polynomials(Test* t) {
    for (int i = 0; i <= 100000; i++) {
        const double s = 3e-4 * pow(1.0 / 3e-4, i / 1e5), to = polynomials(s);
        check(t, to > 1.0 - 1e-6 && to < 1.0006, "%g becomes %.9g", s, to);  // coefficients are floats
    }
}

// the direction turns each right singular vector of x as x does, but for its length: that is the polynomials'
static void test_singular_values(Test* t) {
    const int cases[][2] = {{17, 6}, {30, 12}, {12, 12}, {40, 1}, {9, 8}};
    for (int i = 0; i < 5; i++) {
        const int rows = cases[i][0], n = cases[i][1];
        float *x = random_array((size_t)(rows * n), 1.0f, (uint64_t)i + 1), *o = plain_direction(x, rows, n);
        double *u = double_array(x, (size_t)(rows * n)), *v = (double*)malloc(sizeof(double) * (size_t)(n * n)), norm = 0.0;
        singular_vectors(u, v, rows, n);
        for (int k = 0; k < rows * n; k++) { norm += (double)x[k] * (double)x[k]; }
        for (int k = 0; k < n; k++) {
            double length = 0.0;
            for (int r = 0; r < rows; r++) { length += u[r * n + k] * u[r * n + k]; }
            const double s = sqrt(length / norm), want = polynomials(s);
            check(t, want > 0.99 && want < 1.001, "singular value %g becomes %g", s, want);
            for (int r = 0; r < rows; r++) {
                double got = 0.0;
                for (int c = 0; c < n; c++) { got += (double)o[r * n + c] * v[c * n + k]; }
                const double expected = want * u[r * n + k] / sqrt(length);
                check(t, fabs(got - expected) < 2e-5, "(%d, %d): vector %d, row %d: found %g, expected %g", rows, n, k, r,
                      got, expected);
            }
        }
        free(x), free(o), free(u), free(v);
    }
}

static void test_obvious(Test* t) {
    enum { ROWS = 6, COLUMNS = 9, N = ROWS * COLUMNS };
    Device dev = test_device(2);
    const Muon u = {1.0f, 0.95f, 1.0f};
    // one direction: each element of (u v^T) / (|u| |v|) is 1 / sqrt(rows columns)
    Matrices one = {filled_array(N, 0.0f), filled_array(N, 0.0f), filled_array(N, 1e-6f), ROWS, COLUMNS, N};
    update_fast(&one, 0.0f, &u, &dev);
    for (int i = 0; i < N; i++) {
        const double want = -0.18 * 3.0 / sqrt((double)N), off = fabs((double)one.p[i] / want - 1.0);
        check(t, off < 1e-3, "[%d] found %g, expected %g", i, (double)one.p[i], want);
        check(t, one.m[i] == 1e-6f, "the moment is the gradient");
    }
    // all directions alike: a matrix that is orthogonal stays one
    Matrices eye = {filled_array(N, 0.0f), filled_array(N, 0.0f), filled_array(N, 0.0f), ROWS, COLUMNS, N};
    for (int i = 0; i < ROWS; i++) { eye.g[i * COLUMNS + i] = 5.0f; }
    update_fast(&eye, 0.0f, &u, &dev);
    for (int i = 0; i < N; i++) {
        const double want = i / COLUMNS == i % COLUMNS ? -0.54 : 0.0;
        check(t, fabs((double)eye.p[i] - want) < 1e-3, "[%d] found %g, expected %g", i, (double)eye.p[i], want);
    }
    // no gradient: decay alone
    Matrices none = {filled_array(N, 2.0f), filled_array(N, 0.0f), filled_array(N, 0.0f), ROWS, COLUMNS, N};
    update_fast(&none, 0.25f, &u, &dev);
    for (int i = 0; i < N; i++) { check(t, none.p[i] == 1.5f && none.m[i] == 0.0f, "[%d] found %g", i, (double)none.p[i]); }
    free_matrices(&one), free_matrices(&eye), free_matrices(&none);
    device_free(&dev);
}

// whatever the gradient's size, p moves by lr 0.18 on average
static void test_size(Test* t) {
    enum { ROWS = 20, COLUMNS = 50, N = ROWS * COLUMNS };
    const float scales[] = {1.0f, 0x1p-60f, 0x1p60f};
    float first[N];
    for (int k = 0; k < 3; k++) {
        const Muon u = {0.5f, 0.9f, scales[k]};
        Matrices x = new_matrices(ROWS, COLUMNS, 0);
        double sum = 0.0;
        memset(x.m, 0, sizeof first), memset(x.p, 0, sizeof first);
        update_plain(&x, 0.0f, &u);
        for (int i = 0; i < N; i++) { sum += (double)x.p[i] * (double)x.p[i]; }
        check(t, fabs(sqrt(sum / N) - 0.09) < 1e-4, "scale %g: moved by %g", (double)scales[k], sqrt(sum / N));
        if (k > 0) { check_bits(t, "a power of two", x.p, first, N); }
        memcpy(first, x.p, sizeof first);
        free_matrices(&x);
    }
}

// the second half of an update in pieces, as ranks have them
static void test_pieces(Test* t) {
    enum { ROWS = 7, COLUMNS = 33, N = ROWS * COLUMNS };
    Device dev = test_device(3);
    const Muon u = settings();
    float *p = random_array(N, 1.0f, 1), *x = random_array(N, 1.0f, 2), *want = filled_array(N, NAN), *got = copied_array(want, N);
    for (int n_pieces = 1; n_pieces < 6; n_pieces += 4) {
        float *d_p = to_device(p, N, &dev), *d_x = to_device(x, N, &dev);
        for (int k = 0; k < n_pieces; k++) {
            const size_t first = (size_t)(N * k / n_pieces), end = (size_t)(N * (k + 1) / n_pieces);
            muon_descend_stored(d_p + first, (float*)NULL, d_x + first, end - first, ROWS, COLUMNS, 0.1f, &u, 0,
                                numbers_from(first), &dev);
        }
        from_device(n_pieces == 1 ? want : got, d_p, N, &dev);
        device_drop(d_x);
    }
    check_bits(t, "p", got, want, N);
    free(p), free(x), free(want), free(got);
    device_free(&dev);
}

#if defined(__CUDACC__) && !defined(EXACT)
// bf16, with a master: a matrix whose singular values are of one size keeps its direction within the rounding of x and
// P, which the last two steps do not make larger
static void test_stored(Test* t) {
    enum { ROWS = 16, COLUMNS = 64, N = ROWS * COLUMNS };
    Device dev = test_device(1);
    const Muon u = {1.0f, 0.95f, 1.0f};
    Matrices x = new_matrices(ROWS, COLUMNS, 0), want = new_matrices(ROWS, COLUMNS, 0);
    update_plain(&want, 0.0f, &u);
    const size_t n_room = muon_room_bytes(ROWS, COLUMNS);
    float *master = to_device(x.p, N, &dev), *m = to_device(x.m, N, &dev), *g = to_device(x.g, N, &dev);
    __nv_bfloat16* stored = to_device_as<__nv_bfloat16>(x.p, N, &dev);
    void* room = device_alloc(n_room, "room");
    muon_momentum(g, m, g, N, &u, &dev);
    const __nv_bfloat16* direction = muon_direction(g, ROWS, COLUMNS, room, stored, &dev);
    muon_descend_stored(stored, master, direction, N, ROWS, COLUMNS, 0.0f, &u, 7u, numbers_from(0), &dev);
    float *rounded = filled_array(N, NAN), *moved = filled_array(N, NAN), *wanted = filled_array(N, NAN);
    from_device_as<__nv_bfloat16>(rounded, stored, N, &dev);
    for (int i = 0; i < N; i++) { moved[i] = -x.p[i], wanted[i] = want.p[i] - x.p[i]; }
    from_device(x.p, master, N, &dev), from_device(x.m, m, N, &dev), device_drop(g);
    for (int i = 0; i < N; i++) {
        moved[i] += x.p[i];
        check(t, fabs((double)rounded[i] - (double)x.p[i]) <= 0x1p-7 * fabs((double)x.p[i]), "[%d] is not its master", i);
    }
    const double distance = relative_distance(moved, wanted, N);
    check(t, distance < 0.03, "direction: relative distance %g", distance);
    free(rounded), free(moved), free(wanted), free_matrices(&x), free_matrices(&want);
    device_release(room, n_room);
    device_free(&dev);
}
#endif

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden", "three updates of odd matrices and of experts give the bits of dev/ref/muon.py", test_golden},
        {"shapes", "the plain loop's bits at odd shapes, for 1, 2, 3 and 7 threads", test_shapes},
        {"special", "the same with cancellation, subnormals, -0, Inf, NaN", test_special},
#ifndef __CUDACC__
        {"large", "the same beyond the blocks of the product", test_large},
#endif
        {"turned", "a turned matrix has the turned update, bit for bit", test_turned},
        {"polynomials", "singular values from 3e-4 of the norm on become 1 to 1.0006", test_polynomials},
        {"singular values", "the direction has the singular vectors of x and the polynomials' singular values",
         test_singular_values},
        {"obvious", "one direction; all directions alike; no gradient", test_obvious},
        {"size", "whatever the gradient's size, a parameter moves by 0.18 lr on average", test_size},
        {"pieces", "an update applied in pieces has the same bits", test_pieces},
#if defined(__CUDACC__) && !defined(EXACT)
        {"stored", "as bf16: the direction within 3%, masters and what is rounded from them", test_stored},
#endif
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof *promises);
}
