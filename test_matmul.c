/*
Promises of llmc/ops/gemm.h, thin_gemm.h and matmul.h. The plain loops are judged in double, by finite differences and
on inputs whose answer is obvious. The fast versions must equal the plain loops bit for bit, whatever the shape, the
strides and the threads; so must the kernels of an EXACT build. Other CUDA builds add in another order and may store
bf16: there the plain loops, on the same stored numbers, must be met within what roundings can make.
*/
#include "llmc/ops/matmul.h"
#include "llmc/test/asked.h"
#include "llmc/test/test.h"

enum { MANY_ROWS = 40, MANY_OUTPUTS = 48 };  // more than few, and than a thin side has

#if defined(__CUDACC__) && !defined(EXACT)
#define SAME_BITS 0
enum { N_STORED = 2 };
#else
#define SAME_BITS 1
enum { N_STORED = 1 };
#endif
typedef enum { FLOAT, BF16 } Type;

// ---- ops on arrays of the host: to the device, there, and back. `stored` is how the device has what is not a gradient
//      of a parameter ----

#ifdef __CUDACC__
template <typename X>
static X* to_device_or_null(const float* x, size_t n, const Device* dev) {
    return x ? to_device_as<X>(x, n, dev) : NULL;
}

template <typename X>
static void from_device_or_null(float* x, X* d, size_t n, const Device* dev) {
    if (d) { from_device_as<X>(x, d, n, dev); }
}

// as the device will have them
static void round_as(Type stored, float* x, size_t n) {
    for (size_t i = 0; stored == BF16 && i < n; i++) { x[i] = (float)(__nv_bfloat16)x[i]; }
}

template <typename X>
static void forward_as(float* out, float* pre, const float* inp, const float* weight, const float* bias, int fused,
                       int N, int C, int OC, const Device* dev) {
    size_t n_out = (size_t)N * (size_t)OC, n_inp = (size_t)N * (size_t)C, n_weight = (size_t)OC * (size_t)C;
    X *d_out = to_device_as<X>(out, n_out, dev), *d_pre = to_device_or_null<X>(pre, n_out, dev);
    X *d_inp = to_device_as<X>(inp, n_inp, dev), *d_weight = to_device_as<X>(weight, n_weight, dev);
    X* d_bias = to_device_or_null<X>(bias, (size_t)OC, dev);
    if (pre) {
        matmul_gelu_forward(d_out, d_pre, d_inp, d_weight, d_bias, fused, N, C, OC, dev);
    } else {
        matmul_forward(d_out, d_inp, d_weight, d_bias, N, C, OC, dev);
    }
    from_device_as<X>(out, d_out, n_out, dev);
    from_device_or_null<X>(pre, d_pre, n_out, dev);
    device_drop(d_inp), device_drop(d_weight), device_drop(d_bias);
}

static void forward(Type stored, float* out, const float* inp, const float* weight, const float* bias, int N, int C,
                    int OC, const Device* dev) {
    if (stored == BF16) { forward_as<__nv_bfloat16>(out, NULL, inp, weight, bias, 0, N, C, OC, dev); }
    else { forward_as<float>(out, NULL, inp, weight, bias, 0, N, C, OC, dev); }
}

static void gelu_layer(Type stored, float* out, float* pre, const float* inp, const float* weight, const float* bias,
                       int fused, int N, int C, int OC, const Device* dev) {
    if (stored == BF16) { forward_as<__nv_bfloat16>(out, pre, inp, weight, bias, fused, N, C, OC, dev); }
    else { forward_as<float>(out, pre, inp, weight, bias, fused, N, C, OC, dev); }
}

// add 1: dinp and dweight, going on from what is in them
template <typename X>
static void backward_as(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                        const float* weight, int add, int N, int C, int OC, const Device* dev) {
    size_t n_out = (size_t)N * (size_t)OC, n_inp = (size_t)N * (size_t)C, n_weight = (size_t)OC * (size_t)C;
    X *d_dinp = to_device_or_null<X>(dinp, n_inp, dev), *d_dout = to_device_or_null<X>(dout, n_out, dev);
    X *d_inp = to_device_or_null<X>(inp, n_inp, dev), *d_weight = to_device_or_null<X>(weight, n_weight, dev);
    float *d_dweight = asked_to_device(dweight, n_weight, dev), *d_dbias = asked_to_device(dbias, (size_t)OC, dev);
    if (add) {
        matmul_backward_input(d_dinp, d_dout, d_weight, 1, N, C, OC, dev);
        matmul_backward_weight(d_dweight, d_dout, d_inp, 1, N, C, OC, dev);
    } else {
        matmul_backward(d_dinp, d_dweight, d_dbias, d_dout, d_inp, d_weight, N, C, OC, dev);
    }
    from_device_or_null<X>(dinp, d_dinp, n_inp, dev);
    asked_from_device(dweight, d_dweight, n_weight, dev), asked_from_device(dbias, d_dbias, (size_t)OC, dev);
    device_drop(d_dout), device_drop(d_inp), device_drop(d_weight);
}

static void backward(Type stored, float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                     const float* weight, int add, int N, int C, int OC, const Device* dev) {
    if (stored == BF16) { backward_as<__nv_bfloat16>(dinp, dweight, dbias, dout, inp, weight, add, N, C, OC, dev); }
    else { backward_as<float>(dinp, dweight, dbias, dout, inp, weight, add, N, C, OC, dev); }
}

template <typename X>
static void gelu_backward_as(float* dpre, const float* dout, const float* weight, const float* pre, int fused, int N,
                             int C, int OC, const Device* dev) {
    size_t n_out = (size_t)N * (size_t)OC, n_inp = (size_t)N * (size_t)C, n_weight = (size_t)OC * (size_t)C;
    X *d_dpre = to_device_as<X>(dpre, n_inp, dev), *d_dout = to_device_as<X>(dout, n_out, dev);
    X *d_weight = to_device_as<X>(weight, n_weight, dev), *d_pre = to_device_as<X>(pre, n_inp, dev);
    matmul_gelu_backward_input(d_dpre, (const X*)d_dout, (const X*)d_weight, (const X*)d_pre, fused, N, C, OC, dev);
    from_device_as<X>(dpre, d_dpre, n_inp, dev);
    device_drop(d_dout), device_drop(d_weight), device_drop(d_pre);
}

static void gelu_backward_layer(Type stored, float* dpre, const float* dout, const float* weight, const float* pre,
                                int fused, int N, int C, int OC, const Device* dev) {
    if (stored == BF16) { gelu_backward_as<__nv_bfloat16>(dpre, dout, weight, pre, fused, N, C, OC, dev); }
    else { gelu_backward_as<float>(dpre, dout, weight, pre, fused, N, C, OC, dev); }
}

template <typename X>
static void backward_bias_as(float* sums, const float* x, int N, int OC, const Device* dev) {
    X* d_x = to_device_as<X>(x, (size_t)N * (size_t)OC, dev);
    float* d_sums = to_device(sums, (size_t)OC, dev);
    matmul_backward_bias(d_sums, d_x, N, OC, dev);
    from_device(sums, d_sums, (size_t)OC, dev);
    device_drop(d_x);
}

static void backward_bias(Type stored, float* sums, const float* x, int N, int OC, const Device* dev) {
    if (stored == BF16) { backward_bias_as<__nv_bfloat16>(sums, x, N, OC, dev); }
    else { backward_bias_as<float>(sums, x, N, OC, dev); }
}
#else
static void round_as(Type stored, float* x, size_t n) { (void)stored, (void)x, (void)n; }

static void forward(Type stored, float* out, const float* inp, const float* weight, const float* bias, int N, int C,
                    int OC, const Device* dev) {
    (void)stored;
    matmul_forward(out, inp, weight, bias, N, C, OC, dev);
}

static void gelu_layer(Type stored, float* out, float* pre, const float* inp, const float* weight, const float* bias,
                       int fused, int N, int C, int OC, const Device* dev) {
    (void)stored;
    matmul_gelu_forward(out, pre, inp, weight, bias, fused, N, C, OC, dev);
}

static void gelu_backward_layer(Type stored, float* dpre, const float* dout, const float* weight, const float* pre,
                                int fused, int N, int C, int OC, const Device* dev) {
    (void)stored;
    matmul_gelu_backward_input(dpre, dout, weight, pre, fused, N, C, OC, dev);
}

static void backward(Type stored, float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                     const float* weight, int add, int N, int C, int OC, const Device* dev) {
    (void)stored;
    if (add) {
        matmul_backward_input(dinp, dout, weight, 1, N, C, OC, dev);
        matmul_backward_weight(dweight, dout, inp, 1, N, C, OC, dev);
    } else {
        matmul_backward(dinp, dweight, dbias, dout, inp, weight, N, C, OC, dev);
    }
}

static void backward_bias(Type stored, float* sums, const float* x, int N, int OC, const Device* dev) {
    (void)stored;
    matmul_backward_bias(sums, x, N, OC, dev);
}
#endif

// ---- how far a fast build may be off ----

// Two chains of K products and sums, in any order, with size = |start| + sum of |products|. Each of the K + 1 roundings
// is off by 2^-24 of a value that is at most size, in either chain. A tensor core may take a factor below 2^-126 as 0;
// the other is below 2^21
static double sum_bound(int K, double size, Type stored) {
    double bound = 2.0 * (K + 2) * 0x1p-24 * size + (K + 1) * 0x1p-105;
#ifdef TF32
    bound += stored == FLOAT ? size * 0x1p-10 : 0.0;  // either factor is off by 2^-11
#endif
    (void)stored;
    return bound;
}

// `want` rounded to how it is stored is off by so much
static double store_bound(double want, Type stored) { return stored == BF16 ? fabs(want) * 0x1p-8 : 0.0; }

// the same bits; in a fast build the same infinities and NaNs, and |got - want| <= bounds
static int check_sums(Test* t, const char* what, const float* got, const float* want, const double* bounds, size_t n) {
#if SAME_BITS
    (void)bounds;
    return check_bits(t, what, got, want, n);
#else
    for (size_t i = 0; i < n; i++) {
        double apart = fabs((double)got[i] - (double)want[i]);
        int same = isnan(want[i]) ? isnan(got[i]) : isinf(want[i]) ? got[i] == want[i] : apart <= bounds[i];
        if (!check(t, same, "%s: [%zu] found %.9g, expected %.9g, apart %.3g, allowed %.3g", what, i, (double)got[i],
                   (double)want[i], apart, bounds[i])) { return 0; }
    }
    return 1;
#endif
}

// ---- gemm ----

// element (r, c)
static float at(Matrix m, int r, int c) { return m.data[(size_t)r * m.row_stride + (size_t)c * m.col_stride]; }

// rows first, first + step, ... of start + a * b, as the header of gemm.h states them; and how far off each may be
static void gemm_plain(float* out, double* bounds, size_t out_stride, const float* start, size_t start_stride, Matrix a,
                       Matrix b, int M, int N, int K, int step) {
    for (int m = 0; m < M; m += step) {
        for (int n = 0; n < N; n++) {
            float sum = start ? start[(size_t)m * start_stride + (size_t)n] : 0.0f;
            double size = fabs((double)sum);
            for (int k = 0; k < K; k++) {
                sum = madd(at(a, m, k), at(b, k, n), sum);
                size += SAME_BITS ? 0.0 : fabs((double)at(a, m, k) * (double)at(b, k, n));
            }
            out[(size_t)m * out_stride + (size_t)n] = sum;
            bounds[(size_t)m * out_stride + (size_t)n] = sum_bound(K, size, FLOAT);
        }
    }
}

typedef enum { FROM_ZERO, FROM_BIAS, FROM_OUT, FROM_OTHER } Start;

// how one product is asked for: gaps lie between the rows, and both operands may be turned
typedef struct {
    int M, N, K;
    int a_turned, b_turned;
    Start start;
    int step;  // every how many rows are compared
    int thin;  // 1: by thin_gemm
} Product;

#ifdef __CUDACC__
#define thin_gemm gemm  // CPUs have one
#endif

static Matrix operand(const float* data, int turned, int rows, int columns) {
    return turned ? gemm_transposed(data, (size_t)rows + 3) : gemm_matrix(data, (size_t)columns + 3);
}

static size_t operand_floats(int turned, int rows, int columns) {
    return turned ? (size_t)columns * (size_t)(rows + 3) : (size_t)rows * (size_t)(columns + 3);
}

static void check_product(Test* t, Product p, const float* a_data, const float* b_data, const float* starts,
                          const Device* dev) {
    size_t stride = (size_t)p.N + 5, n_out = (size_t)p.M * stride;
    float* got = p.start == FROM_OUT ? copied_array(starts, n_out) : filled_array(n_out, 77.0f);
    float* want = copied_array(got, n_out);
    double* bounds = (double*)new_array(n_out, sizeof(double));
    const float* start = p.start == FROM_ZERO ? NULL : p.start == FROM_OUT ? got : starts;
    size_t start_stride = p.start == FROM_BIAS ? 0 : stride;
    Matrix a = operand(a_data, p.a_turned, p.M, p.K), b = operand(b_data, p.b_turned, p.K, p.N);
    gemm_plain(want, bounds, stride, start, start_stride, a, b, p.M, p.N, p.K, p.step);
    float *d_a = to_device(a_data, operand_floats(p.a_turned, p.M, p.K), dev),
          *d_b = to_device(b_data, operand_floats(p.b_turned, p.K, p.N), dev),
          *d_starts = to_device(starts, n_out, dev), *d_out = to_device(got, n_out, dev);
    start = p.start == FROM_ZERO ? NULL : p.start == FROM_OUT ? d_out : d_starts;
    a = operand(d_a, p.a_turned, p.M, p.K), b = operand(d_b, p.b_turned, p.K, p.N);
    if (p.thin) { thin_gemm(d_out, stride, start, start_stride, a, b, p.M, p.N, p.K, dev); }
    else { gemm(d_out, stride, start, start_stride, a, b, p.M, p.N, p.K, dev); }
    from_device(got, d_out, n_out, dev);
    device_drop(d_a), device_drop(d_b), device_drop(d_starts);
    char what[160];
    snprintf(what, sizeof what, "M %d, N %d, K %d, a %d, b %d, start %d, thin %d, %d threads", p.M, p.N, p.K,
             p.a_turned, p.b_turned, (int)p.start, p.thin, dev->n_threads);
    for (int m = 0; m < p.M; m += p.step) {  // whole rows: the gap after each must be as it was
        size_t row = (size_t)m * stride;
        if (!check_sums(t, what, got + row, want + row, bounds + row, stride)) { break; }
    }
    free(got), free(want), free(bounds);
}

// one shape with every combination of turned operands and starts
static void check_products(Test* t, int M, int N, int K, int step, int special, int thin) {
    size_t n_a = (size_t)(M + 3) * (size_t)(K + 3), n_b = (size_t)(K + 3) * (size_t)(N + 3),
           n_out = (size_t)M * (size_t)(N + 5);
    float *a = random_array(n_a, 1.0f, 1), *b = random_array(n_b, 1.0f, 2), *starts = random_array(n_out, 1.0f, 3);
    if (special) {
        free(a), free(b), free(starts);
        a = hard_array(n_a, 4), b = hard_array(n_b, 5), starts = hard_array(n_out, 6);
    }
    if (special == 2) {
        sprinkle(a, n_a, 300, 7);
        sprinkle(b, n_b, 300, 8);
        sprinkle(starts, n_out, 50, 9);
    }
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        for (int way = 0; way < 16; way++) {
#ifdef __CUDACC__
            if (way % 5 != M % 5) { continue; }  // each shape some ways, all shapes together every way
#else
            if (step > 1 && way % 5 != i % 5) { continue; }  // large: each way once, the four starts among them
#endif
            Product p = {M, N, K, way & 1, way >> 1 & 1, (Start)(way >> 2), step, thin};
            check_product(t, p, a, b, starts, &dev);
        }
        device_free(&dev);
    }
    free(a);
    free(b);
    free(starts);
}

#ifdef __CUDACC__
enum { EDGE_M = GEMM_TILE, EDGE_N = GEMM_TILE, EDGE_K = GEMM_TILE_K, LONG_K = 8 * GEMM_TILE_K };
#else
enum { EDGE_M = TILE_M, EDGE_N = TILE_N, EDGE_K = GEMM_K, LONG_K = GEMM_LONG_K };
#endif

static void test_gemm_shapes(Test* t) {
    const int shapes[][3] = {  // M, N, K
        {1, 1, 1}, {1, 7, 33}, {7, 1, 33}, {33, 7, 1}, {1, 257, 7}, {257, 1, 7}, {31, 61, 127}, {3, 2, 0},
        {EDGE_M, EDGE_N, 16}, {EDGE_M - 1, EDGE_N - 1, 17}, {EDGE_M + 1, EDGE_N + 1, 15},
#ifndef __CUDACC__
        {2 * TILE_M, 2 * TILE_N, 32},
        {1, 5 * TILE_N + VLANES + 3, 67}, {2, TILE_N + 1, 2 * VLANES}, {GEMM_FEW - 1, 2 * TILE_N, VLANES + 1},
        {GEMM_FEW, 3 * TILE_N - 1, 4 * VLANES + 3}, {GEMM_FEW + 1, TILE_N, 2 * VLANES + 1},
        {5, TILE_N + VLANES + 1, 3 * VLANES}, {6, TILE_N, VLANES + 2},
        {8 * TILE_M, TILE_N, VLANES}, {8 * TILE_M + 1, VLANES + 1, VLANES + 1}, {17 * TILE_M + 5, 5 * TILE_N + 1, 3},
        {TILE_M + 1, 2 * GEMM_TASKS * TILE_N + 1, 2}, {TILE_M, (3 * GEMM_TASKS + 1) * TILE_N - VLANES, 2},  // panels narrower
#endif
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_products(t, shapes[i][0], shapes[i][1], shapes[i][2], 1, 0, 0);
    }
}

#ifdef __CUDACC__
// several tiles of K, and the last of them short
static void test_gemm_blocks(Test* t) {
    const int shapes[][3] = {  // M, N, K
        {3, 5, EDGE_K - 1}, {5, 7, EDGE_K + 1}, {9, EDGE_N + 1, 3 * EDGE_K + 2}, {3, 5, 509},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_products(t, shapes[i][0], shapes[i][1], shapes[i][2], 1, 0, 0);
    }
}
#else
// K longer than a panel's block and than a's, more rows of a than are packed at once, and both
static void test_gemm_blocks(Test* t) {
    const int rows = gemm_block_rows_(1 << 30, GEMM_LONG_K);
    const int shapes[][4] = {  // M, N, K, step
        {3, 1541, 4, 1}, {1031, 5, 3, 1}, {5, 7, GEMM_K + 1, 1}, {9, 50, 2 * GEMM_K, 1},
        {TILE_M + 1, TILE_N + 1, 3 * GEMM_K + 2, 1}, {3, 5, GEMM_LONG_K + 1, 1},
        {5, 3, 2 * GEMM_LONG_K + GEMM_K + 1, 1}, {rows + 1, 9, GEMM_LONG_K, rows / 8},
        {rows + TILE_M + 1, TILE_N + 1, GEMM_LONG_K + GEMM_K + 1, rows / 8},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_products(t, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 0, 0);
    }
}
#endif

static void test_gemm_special(Test* t) {
    for (int special = 1; special <= 2; special++) {
        check_products(t, 33, 61, 17, 1, special, 0);
        check_products(t, 3, 61, 35, 1, special, 0);
        check_products(t, EDGE_M + 1, EDGE_N + 3, EDGE_K + 5, 1, special, 0);
    }
}

// thin sides, whole vectors and not, up to more than THIN, and chains of several visits
#ifndef __CUDACC__
static void test_thin(Test* t) {
    const int shapes[][3] = {  // M, N, K
        {64, 16, 40}, {67, 16, 33}, {5, 1, 9}, {33, 7, 19}, {70, THIN, 21}, {70, THIN + 1, 21}, {9, 8, 2 * THIN_K + 3},
        {16, 64, 40}, {16, 67, 33}, {8, 50, 9}, {THIN, 35, 21}, {THIN + 1, 70, 21}, {6, 2 * VLANES + 1, THIN_K + 1},
        {4, 70, 5}, {1, 70, 5}, {9, 9, 9}, {THIN, THIN, THIN}, {9, 50, 0},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_products(t, shapes[i][0], shapes[i][1], shapes[i][2], 1, 0, 1);
    }
    for (int special = 1; special <= 2; special++) {
        check_products(t, 61, 17, 33, 1, special, 1);
        check_products(t, 17, 61, 33, 1, special, 1);
    }
}
#endif

// ---- matmul ----

typedef struct {
    int N, C, OC, hard;
    Type stored;
    float *inp, *weight, *bias, *dout;
} Layer;

// hard 1: cancellation, subnormals, -0; hard 2: also infinities and NaNs
static Layer layer(int N, int C, int OC, int hard, Type stored) {
    Layer l = {N, C, OC, hard, stored, NULL, NULL, NULL, NULL};
    size_t n_inp = (size_t)N * (size_t)C, n_weight = (size_t)OC * (size_t)C, n_out = (size_t)N * (size_t)OC;
    l.inp = hard ? hard_array(n_inp, 1) : random_array(n_inp, 1.0f, 1);
    l.weight = hard ? hard_array(n_weight, 2) : random_array(n_weight, 1.0f, 2);
    l.bias = hard ? hard_array((size_t)OC, 3) : random_array((size_t)OC, 1.0f, 3);
    l.dout = hard ? hard_array(n_out, 4) : random_array(n_out, 1.0f, 4);
    if (hard == 2) {
        sprinkle(l.inp, n_inp, 200, 5);
        sprinkle(l.weight, n_weight, 200, 6);
        sprinkle(l.bias, (size_t)OC, 20, 7);
        sprinkle(l.dout, n_out, 200, 8);
    }
    round_as(stored, l.inp, n_inp), round_as(stored, l.weight, n_weight);
    round_as(stored, l.bias, (size_t)OC), round_as(stored, l.dout, n_out);
    return l;
}

static void layer_free(Layer* l) {
    free(l->inp);
    free(l->weight);
    free(l->bias);
    free(l->dout);
}

// of every output of start + a * b; not needed where bits are compared
static double* layer_bounds(const float* start, Matrix a, Matrix b, int M, int N, int K, const float* want,
                            Type stored) {
    double* bounds = (double*)new_array((size_t)M * (size_t)N, sizeof(double));
    for (int i = 0; !SAME_BITS && i < M * N; i++) {
        int m = i / N, n = i % N;
        double size = start ? fabs((double)start[n]) : 0.0;
        for (int k = 0; k < K; k++) { size += fabs((double)at(a, m, k) * (double)at(b, k, n)); }
        bounds[i] = sum_bound(K, size, stored) + store_bound((double)want[i], stored);
    }
    return bounds;
}

static double* forward_bounds(const Layer* l, const float* bias, const float* want) {
    Matrix inp = gemm_matrix(l->inp, (size_t)l->C), weight = gemm_transposed(l->weight, (size_t)l->C);
    return layer_bounds(bias, inp, weight, l->N, l->OC, l->C, want, l->stored);
}

static void check_forward(Test* t, const Layer* l) {
    size_t n_out = (size_t)l->N * (size_t)l->OC;
    for (int with_bias = 0; with_bias < 2; with_bias++) {
        const float* bias = with_bias ? l->bias : NULL;
        float* want = filled_array(n_out, 77.0f);
        matmul_forward_ref(want, l->inp, l->weight, bias, l->N, l->C, l->OC);
        double* bounds = forward_bounds(l, bias, want);
        for (int i = 0; i < N_TEST_THREADS; i++) {
            Device dev = test_device(test_threads(i));
            float* got = filled_array(n_out, NAN);
            char what[112];
            snprintf(what, sizeof what, "N %d, C %d, OC %d, hard %d, stored %d, %d threads", l->N, l->C, l->OC, l->hard,
                     (int)l->stored, dev.n_threads);
            forward(l->stored, got, l->inp, l->weight, bias, l->N, l->C, l->OC, &dev);
            check_sums(t, what, got, want, bounds, n_out);
            free(got);
            device_free(&dev);
        }
        free(want), free(bounds);
    }
}

// gelu's slope is below 1.13. In a fast build tanh is the hardware's or cuBLASLt's: off by at most 2^-10
static void check_gelu(Test* t, const Layer* l) {
    size_t n_out = (size_t)l->N * (size_t)l->OC;
    float *want_pre = filled_array(n_out, 77.0f), *want = filled_array(n_out, 77.0f);
    matmul_gelu_forward_ref(want, want_pre, l->inp, l->weight, l->bias, l->N, l->C, l->OC);
    double* bounds = forward_bounds(l, l->bias, want_pre);
    double* gelu_bounds = (double*)new_array(n_out, sizeof(double));
    for (size_t i = 0; i < n_out; i++) {
        double tanh_bound = 0.5 * (fabs((double)want_pre[i]) + bounds[i]) * 0x1p-10;
        gelu_bounds[i] = 1.13 * bounds[i] + tanh_bound + store_bound((double)want[i], l->stored);
    }
    Device dev = test_device(2);
    for (int fused = 0; fused < 2; fused++) {
        float *pre = filled_array(n_out, NAN), *got = filled_array(n_out, NAN);
        char what[112];
        snprintf(what, sizeof what, "N %d, C %d, OC %d, stored %d, fused %d", l->N, l->C, l->OC, (int)l->stored, fused);
        gelu_layer(l->stored, got, pre, l->inp, l->weight, l->bias, fused, l->N, l->C, l->OC, &dev);
        check_sums(t, what, pre, want_pre, bounds, n_out);
        check_sums(t, what, got, want, gelu_bounds, n_out);
        free(pre), free(got);
    }
    device_free(&dev);
    free(want_pre), free(want), free(bounds), free(gelu_bounds);
}

// what backward should give, and how far off it may be
typedef struct {
    float *dinp, *dweight, *dbias;
    double *dinp_bounds, *dweight_bounds, *dbias_bounds;
} Gradients;

static Gradients gradients(const Layer* l) {
    size_t C = (size_t)l->C, OC = (size_t)l->OC, N = (size_t)l->N;
    Gradients g = {filled_array(N * C, 77.0f), filled_array(OC * C, 77.0f), filled_array(OC, 77.0f), NULL, NULL, NULL};
    float* ones = filled_array(N, 1.0f);
    matmul_backward_ref(g.dinp, g.dweight, g.dbias, l->dout, l->inp, l->weight, l->N, l->C, l->OC);
    g.dinp_bounds =
        layer_bounds(NULL, gemm_matrix(l->dout, OC), gemm_matrix(l->weight, C), l->N, l->C, l->OC, g.dinp, l->stored);
    g.dweight_bounds =
        layer_bounds(NULL, gemm_transposed(l->dout, OC), gemm_matrix(l->inp, C), l->OC, l->C, l->N, g.dweight, FLOAT);
    g.dbias_bounds = layer_bounds(NULL, gemm_matrix(ones, N), gemm_matrix(l->dout, OC), 1, l->OC, l->N, g.dbias, FLOAT);
    free(ones);
    return g;
}

static void gradients_free(Gradients* g) {
    free(g->dinp), free(g->dweight), free(g->dbias);
    free(g->dinp_bounds), free(g->dweight_bounds), free(g->dbias_bounds);
}

static void check_backward(Test* t, const Layer* l) {
    size_t n_inp = (size_t)l->N * (size_t)l->C, n_weight = (size_t)l->OC * (size_t)l->C, n_bias = (size_t)l->OC;
    Gradients want = gradients(l);
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        float *dinp = filled_array(n_inp, NAN), *dweight = filled_array(n_weight, NAN),
              *dbias = filled_array(n_bias, NAN);
        char what[112];
        backward(l->stored, dinp, dweight, dbias, l->dout, l->inp, l->weight, 0, l->N, l->C, l->OC, &dev);
        snprintf(what, sizeof what, "dweight, N %d, C %d, OC %d, hard %d, stored %d, %d threads", l->N, l->C, l->OC,
                 l->hard, (int)l->stored, dev.n_threads);
        check_sums(t, what, dweight, want.dweight, want.dweight_bounds, n_weight);
        check_sums(t, "dinp", dinp, want.dinp, want.dinp_bounds, n_inp);
        check_sums(t, "dbias", dbias, want.dbias, want.dbias_bounds, n_bias);
        free(dinp), free(dweight), free(dbias);
        device_free(&dev);
    }
    gradients_free(&want);
}

// inp as what gelu was taken of. Its slope is below 1.13; a tanh that is off by t moves it by (1 + 2 |x| du/dx) t / 2,
// and either tanh is off by at most 2^-10. fused 0 rounds the sums once more
static void check_gelu_backward(Test* t, const Layer* l) {
    const size_t n = (size_t)l->N * (size_t)l->C;
    Gradients g = gradients(l);
    float* want = filled_array(n, 77.0f);
    double* bounds = (double*)new_array(n, sizeof(double));
    matmul_gelu_backward_input_ref(want, l->dout, l->weight, l->inp, l->N, l->C, l->OC);
    for (size_t i = 0; i < n; i++) {
        double x = fabs((double)l->inp[i]), dudx = 0.798 * (1.0 + 0.135 * x * x);
        double slope_bound = 0.5 * (1.0 + 2.0 * x * dudx) * 0x1p-10;
        bounds[i] = 1.13 * g.dinp_bounds[i] + (fabs((double)g.dinp[i]) + g.dinp_bounds[i]) * slope_bound +
                    store_bound((double)want[i], l->stored);
    }
    Device dev = test_device(2);
    for (int fused = 0; fused < 2; fused++) {
        float* got = filled_array(n, NAN);
        char what[112];
        snprintf(what, sizeof what, "N %d, C %d, OC %d, stored %d, fused %d", l->N, l->C, l->OC, (int)l->stored, fused);
        gelu_backward_layer(l->stored, got, l->dout, l->weight, l->inp, fused, l->N, l->C, l->OC, &dev);
        check_sums(t, what, got, want, bounds, n);
        free(got);
    }
    device_free(&dev);
    free(want), free(bounds);
    gradients_free(&g);
}

// two halves of the positions, one after the other into the same dweight, are one chain
static void check_added(Test* t, const Layer* l) {
    size_t n_weight = (size_t)l->OC * (size_t)l->C;
    int half = l->N / 2;
    Gradients want = gradients(l);
    Device dev = test_device(3);
    float* dweight = filled_array(n_weight, 0.0f);
    if (half) { backward(l->stored, NULL, dweight, NULL, l->dout, l->inp, l->weight, 0, half, l->C, l->OC, &dev); }
    const float *dout = l->dout + (size_t)half * (size_t)l->OC, *inp = l->inp + (size_t)half * (size_t)l->C;
    backward(l->stored, NULL, dweight, NULL, dout, inp, l->weight, 1, l->N - half, l->C, l->OC, &dev);
    char what[96];
    snprintf(what, sizeof what, "N %d, C %d, OC %d, hard %d, stored %d", l->N, l->C, l->OC, l->hard, (int)l->stored);
    check_sums(t, what, dweight, want.dweight, want.dweight_bounds, n_weight);
    free(dweight);
    device_free(&dev);
    gradients_free(&want);
}

// columns first..last-1 of dout, alone
static float* some_outputs(const Layer* l, int first, int last) {
    const size_t n = (size_t)(last - first);
    float* dout = filled_array((size_t)l->N * n + 1, 0.0f);
    for (size_t r = 0; r < (size_t)l->N; r++) {
        for (size_t i = 0; i < n; i++) { dout[r * n + i] = l->dout[r * (size_t)l->OC + (size_t)first + i]; }
    }
    return dout;
}

// two layers that read the same inp, one after the other into the same dinp, are one chain. What is stored as bf16 is
// rounded between them
static void check_added_input(Test* t, const Layer* l) {
    const size_t n_inp = (size_t)l->N * (size_t)l->C;
    const int half = l->OC / 2;
    if (l->stored != FLOAT) { return; }
    Gradients want = gradients(l);
    Device dev = test_device(3);
    float *dinp = filled_array(n_inp, 0.0f), *left = some_outputs(l, 0, half), *right = some_outputs(l, half, l->OC);
    if (half) { backward(l->stored, dinp, NULL, NULL, left, NULL, l->weight, 0, l->N, l->C, half, &dev); }
    backward(l->stored, dinp, NULL, NULL, right, NULL, l->weight + (size_t)half * (size_t)l->C, 1, l->N, l->C,
             l->OC - half, &dev);
    check_sums(t, "dinp", dinp, want.dinp, want.dinp_bounds, n_inp);
    free(dinp), free(left), free(right);
    device_free(&dev);
    gradients_free(&want);
}

static void check_layers(Test* t, void (*check_layer)(Test*, const Layer*), int hard) {
    const int shapes[][3] = {  // N, C, OC
        {1, 1, 1}, {1, 7, 33}, {7, 33, 1}, {33, 1, 7}, {31, 127, 61}, {64, 64, 65}, {257, 7, 33},
        {33, 257, 7}, {7, 33, 257}, {1, 8, 8}, {33, 64, 40}, {7, 1024, 8}, {65, 8, 72},
        {1, 584, 33}, {9, 72, 16}, {16, 1032, 18}, {17, 40, 5},
#ifndef __CUDACC__
        {5, 1541, 3}, {5, 3, 1541}, {1031, 9, TILE_N + 1},
        {TILE_M + 1, GEMM_K + 1, TILE_N + 1}, {TILE_N + 1, TILE_M + 1, GEMM_K + 1},
        {GEMM_K + 1, TILE_N + 1, TILE_M + 1}, {TILE_M + 1, GEMM_LONG_K + 1, 5}, {5, TILE_M + 1, GEMM_LONG_K + 1},
        {GEMM_LONG_K + 1, 5, TILE_M + 1},
#endif
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int stored = 0; stored < N_STORED; stored++) {
            Layer l = layer(shapes[i][0], shapes[i][1], shapes[i][2], hard, (Type)stored);
            check_layer(t, &l);
            layer_free(&l);
        }
    }
}

static void test_forward(Test* t) { check_layers(t, check_forward, 0); }
static void test_gelu(Test* t) { check_layers(t, check_gelu, 0); }
static void test_gelu_backward(Test* t) { check_layers(t, check_gelu_backward, 0); }
static void test_backward(Test* t) { check_layers(t, check_backward, 0); }

static void test_forward_special(Test* t) {
    check_layers(t, check_forward, 1);
    check_layers(t, check_forward, 2);
}

static void test_backward_special(Test* t) {
    check_layers(t, check_backward, 1);
    check_layers(t, check_backward, 2);
}

// d: dinp, dweight, dbias; inputs that nobody needs are NULL
static void asked_plain(float* const* d, const void* problem, const Device* dev) {
    const Layer* l = (const Layer*)problem;
    (void)dev;
    matmul_backward_ref(d[0], d[1], d[2], d[0] || d[1] || d[2] ? l->dout : NULL, d[1] ? l->inp : NULL,
                        d[0] ? l->weight : NULL, l->N, l->C, l->OC);
}

static void asked_fast(float* const* d, const void* problem, const Device* dev) {
    const Layer* l = (const Layer*)problem;
    backward(l->stored, d[0], d[1], d[2], d[0] || d[1] || d[2] ? l->dout : NULL, d[1] ? l->inp : NULL,
             d[0] ? l->weight : NULL, 0, l->N, l->C, l->OC, dev);
}

static void test_asked(Test* t) {
    Device dev = test_device(3);
    for (int stored = 0; stored < N_STORED; stored++) {
        for (int aligned = 0; aligned <= 1; aligned++) {  // a fast build's cuBLASLt takes sizes of whole packs alone
            Layer l = layer(7, aligned ? 40 : 33, aligned ? 24 : 9, 1, (Type)stored);
            size_t C = (size_t)l.C, OC = (size_t)l.OC;
            const AskedGradient asked[] = {{"dinp", (size_t)l.N * C, NULL},
                                           {"dweight", OC * C, NULL},
                                           {"dbias", OC, NULL}};
            check_asked(t, "plain", asked, 3, asked_plain, &l, &dev);
            check_asked(t, "fast", asked, 3, asked_fast, &l, &dev);
            layer_free(&l);
        }
    }
    device_free(&dev);
}

static void test_added(Test* t) {
    check_layers(t, check_added, 0);
    check_layers(t, check_added, 1);
    check_layers(t, check_added_input, 0);
    check_layers(t, check_added_input, 1);
}

static void check_backward_bias(Test* t, int N, int OC, Type stored, const Device* dev) {
    size_t n = (size_t)N * (size_t)OC;
    float *x = hard_array(n, 11), *want = filled_array((size_t)OC, NAN), *got = filled_array((size_t)OC, NAN),
          *ones = filled_array((size_t)N, 1.0f);
    round_as(stored, x, n);
    matmul_backward_bias_ref(want, x, N, OC);
    double* bounds =
        layer_bounds(NULL, gemm_matrix(ones, (size_t)N), gemm_matrix(x, (size_t)OC), 1, OC, N, want, FLOAT);
    char what[64];
    snprintf(what, sizeof what, "N %d, OC %d, stored %d", N, OC, (int)stored);
    backward_bias(stored, got, x, N, OC, dev);
    check_sums(t, what, got, want, bounds, (size_t)OC);
    free(x), free(want), free(got), free(ones), free(bounds);
}

static void test_backward_bias(Test* t) {
    const int sizes[] = {1, 7, 33, 257, 1024};
    Device dev = test_device(3);
    for (int stored = 0; stored < N_STORED; stored++) {
        for (int i = 0; i < 25; i++) { check_backward_bias(t, sizes[i / 5], sizes[i % 5], (Type)stored, &dev); }
        check_backward_bias(t, 5000, 8, (Type)stored, &dev);  // few columns: the rows are cut into many slices
    }
    device_free(&dev);
}

#ifdef __CUDACC__
// arrays that begin one element behind a multiple of 16 bytes, as slices of an arena may: cuBLASLt would refuse them.
// And 16 bytes behind a multiple of 256, where it must have been told that there are such
static void test_addresses(Test* t) {
    const int N = 16, C = 24, OC = 32;
    Device dev = test_device(1);
    Layer l = layer(N, C, OC, 0, FLOAT);
    float *want = filled_array((size_t)(N * OC), NAN), *got = filled_array((size_t)(N * OC + 1), NAN);
    matmul_forward_ref(want, l.inp, l.weight, l.bias, N, C, OC);
    double* bounds = forward_bounds(&l, l.bias, want);
    for (int which = 0; which < 8; which++) {  // out, inp, weight, bias
        float* arrays[4] = {got, l.inp, l.weight, l.bias};
        size_t sizes[4] = {(size_t)(N * OC), (size_t)(N * C), (size_t)(OC * C), (size_t)OC};
        float *whole[4], *shifted[4];
        for (int i = 0; i < 4; i++) {
            whole[i] = (float*)device_alloc(sizeof(float) * (sizes[i] + 4), "test array");
            shifted[i] = whole[i] + (i != which % 4 ? 0 : which < 4 ? 1 : 4);
            device_upload(shifted[i], arrays[i], sizeof(float) * sizes[i], &dev);
        }
        matmul_forward(shifted[0], shifted[1], shifted[2], shifted[3], N, C, OC, &dev);
        device_download(got, shifted[0], sizeof(float) * sizes[0], &dev);
        check_sums(t, "shifted", got, want, bounds, sizes[0]);
        for (int i = 0; i < 4; i++) { device_drop(whole[i]); }
    }
    free(want), free(got), free(bounds);
    layer_free(&l);
    device_free(&dev);
}

// the same call gives the same bits
static void test_repeats(Test* t) {
    Device dev = test_device(1);
    for (int stored = 0; stored < N_STORED; stored++) {
        Layer l = layer(130, 72, 88, 0, (Type)stored);
        size_t n_out = 130 * 88, n_inp = 130 * 72, n_weight = 88 * 72;
        float *out[2], *dinp[2], *dweight[2], *dbias[2];
        for (int i = 0; i < 2; i++) {
            out[i] = filled_array(n_out, NAN), dinp[i] = filled_array(n_inp, NAN);
            dweight[i] = filled_array(n_weight, NAN), dbias[i] = filled_array(88, NAN);
            forward((Type)stored, out[i], l.inp, l.weight, l.bias, 130, 72, 88, &dev);
            backward((Type)stored, dinp[i], dweight[i], dbias[i], l.dout, l.inp, l.weight, 0, 130, 72, 88, &dev);
        }
        check_bits(t, "out", out[1], out[0], n_out);
        check_bits(t, "dinp", dinp[1], dinp[0], n_inp);
        check_bits(t, "dweight", dweight[1], dweight[0], n_weight);
        check_bits(t, "dbias", dbias[1], dbias[0], 88);
        for (int i = 0; i < 2; i++) { free(out[i]), free(dinp[i]), free(dweight[i]), free(dbias[i]); }
        layer_free(&l);
    }
    device_free(&dev);
}

#ifndef EXACT
// bf16 whose products are stored as float
static void forward_to_float(float* out, const Layer* l, int first, int N, const Device* dev) {
    const size_t n_out = (size_t)(N * l->OC), n_inp = (size_t)(N * l->C), n_weight = (size_t)(l->OC * l->C);
    __nv_bfloat16* inp = to_device_as<__nv_bfloat16>(l->inp + first * l->C, n_inp, dev);
    __nv_bfloat16* weight = to_device_as<__nv_bfloat16>(l->weight, n_weight, dev);
    float *d_out = to_device(out, n_out, dev), *bias = to_device(l->bias, (size_t)l->OC, dev);
    matmul_forward(d_out, inp, weight, bias, N, l->C, l->OC, dev);
    from_device(out, d_out, n_out, dev);
    device_drop(inp), device_drop(weight), device_drop(bias);
}

// the most rows that few_rows.h takes, each alone, and with rows of Inf and NaN: what is stored as float shows every bit
static void test_few(Test* t) {
    enum { C = 584, OC = 37 };  // a warp has terms of two rounds, the last one a part of a step
    Device dev = test_device(1);
    Layer l = layer(FEW_ROWS, C, OC, 0, BF16);
    l.stored = FLOAT;  // as out is
    float *want = filled_array(FEW_ROWS * OC, NAN), *got = filled_array(FEW_ROWS * OC, NAN),
          *alone = filled_array(OC, NAN), *spoilt = filled_array(FEW_ROWS * OC, NAN);
    matmul_forward_ref(want, l.inp, l.weight, l.bias, FEW_ROWS, C, OC);
    double* bounds = forward_bounds(&l, l.bias, want);
    forward_to_float(got, &l, 0, FEW_ROWS, &dev);
    check_sums(t, "all rows", got, want, bounds, FEW_ROWS * OC);
    for (int n = 0; n < FEW_ROWS; n++) {
        forward_to_float(alone, &l, n, 1, &dev);
        check_bits(t, "a row alone", alone, got + n * OC, OC);
    }
    l.inp[3 * C + 5] = INFINITY, l.inp[12 * C + C - 1] = NAN;
    forward_to_float(spoilt, &l, 0, FEW_ROWS, &dev);
    for (int n = 0; n < FEW_ROWS; n++) {
        if (n != 3 && n != 12) { check_bits(t, "beside Inf and NaN", spoilt + n * OC, got + n * OC, OC); }
    }
    check(t, !isfinite(spoilt[3 * OC]) && isnan(spoilt[12 * OC]), "Inf and NaN stay in their rows");
    free(want), free(got), free(alone), free(spoilt), free(bounds);
    layer_free(&l);
    device_free(&dev);
}

enum { MANY = FEW_ROWS + 1 };  // so many rows and more are cuBLASLt's

// how often the heuristic was asked. Only the stand-in of dev/simt counts; on a GPU the answer is what is expected
static int heuristics(int expected) {
#ifdef SIMT
    (void)expected;
    return simt_blas_n_asked;
#else
    return expected;
#endif
}

// one size after the other, as prompts have them, and between them a shape of every step; the largest fits in `out`
static void ask_sizes(float* out, const Layer* l, int first, int last, const Device* dev) {
    for (int N = first; N <= last; N++) {
        forward(BF16, out, l->inp, l->weight, NULL, N, 8, 8, dev);
        forward(BF16, out, l->inp, l->weight, l->bias, N, 8, 4, dev);  // rows of 8 bytes: not for cuBLASLt
        forward(BF16, out, l->inp, l->weight, l->bias, MANY, 8, 8, dev);  // of every step
        forward(BF16, out, l->inp, l->weight, l->bias, FEW_ROWS, 8, 8, dev);  // of few_rows.h: nothing is asked
    }
}

static void test_fallbacks(Test* t) {
    const int shapes[][3] = {{33, 64, 40}, {33, 63, 40}, {33, 64, 41}, {33, 63, 40}};  // N, C, OC: rows of 16 bytes, or not
    const char* first = "(33, 40) of sums of 63";
    Device dev = test_device(1);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int* s = shapes[i];
        Layer l = layer(s[0], s[1], s[2], 0, BF16);
        float *out = filled_array((size_t)(l.N * l.OC), NAN), *pre = filled_array((size_t)(l.N * l.OC), NAN);
        forward(BF16, out, l.inp, l.weight, NULL, l.N, l.C, l.OC, &dev);
        check(t, dev.fallbacks[FALLBACK_PRODUCT].n == (int64_t)i, "products by plain kernels: %lld of %zu",
              (long long)dev.fallbacks[FALLBACK_PRODUCT].n, i + 1);
        if (i == 2) {  // a GELU apart, and behind a product that counts too
            gelu_layer(BF16, out, pre, l.inp, l.weight, NULL, 1, l.N, l.C, l.OC, &dev);
            check(t, dev.fallbacks[FALLBACK_GELU].n == 1, "GELUs apart: %lld", (long long)dev.fallbacks[FALLBACK_GELU].n);
            dev.fallbacks[FALLBACK_PRODUCT].n--;
        }
        free(out), free(pre);
        layer_free(&l);
    }
    check(t, strcmp(dev.fallbacks[FALLBACK_PRODUCT].first, first) == 0, "the first: found %s, expected %s",
          dev.fallbacks[FALLBACK_PRODUCT].first, first);
    device_free(&dev);
}

// the tile of the algorithm that is taken for (33, 40) of sums of 64, where gemm_algorithms.h has these rows
static int tile_taken(const CublasRow* rows, const Layer* l, Device* dev) {
    float* out = filled_array((size_t)(l->N * l->OC), NAN);
    *dev = test_device(1);
    cublas_cache(dev)->rows = rows;
    forward(BF16, out, l->inp, l->weight, NULL, l->N, l->C, l->OC, dev);
    free(out);
    return cublas_config(&dev->plans->cache->plan[0].algo).tile;
}

// the stand-in offers tiles 0, 1 and 2; a real library others, of which row 1 has the last. Each of the other rows is
// wrong in one thing, or asks for a tile that nobody offers
static void test_algorithms(Test* t) {
    const CublasRow end = {NULL, 0, 0, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0, 0}};
    Layer l = layer(33, 64, 40, 0, BF16);
    Device dev;
    const int first = tile_taken(&end, &l, &dev);
    CublasPlan* plan = &dev.plans->cache->plan[0];
    cublasLtMatmulHeuristicResult_t results[CUBLAS_ANSWERS];
    const int n = cublas_answers(results, CUBLAS_ANSWERS, plan, &dev);
    const CublasConfig last = cublas_config(&results[n - 1].algo);
    CublasRow row = {dev.plans->cache->card, dev.n_sms, (int64_t)cublasLtGetVersion(), plan->shape, last};
    char card[256];
    snprintf(card, sizeof card, "%s", row.card);
    row.card = card;
    device_free(&dev);
    enum { RIGHT, CARD, SMS, VERSION, SHAPE, EPILOGUE, CONFIG, KINDS };
    for (int kind = 0; kind < KINDS; kind++) {
        CublasRow rows[2] = {row, end};
        if (kind == CARD) { rows[0].card = "another card"; }
        rows[0].n_sms += kind == SMS, rows[0].version += kind == VERSION, rows[0].shape.M += kind == SHAPE;
        if (kind == EPILOGUE) { rows[0].shape.epilogue = CUBLASLT_EPILOGUE_BIAS; }
        if (kind == CONFIG) { rows[0].config.tile = 1 << 20; }
        const int found = tile_taken(rows, &l, &dev), expected = kind == RIGHT ? last.tile : first;
        const int64_t counted = dev.fallbacks[FALLBACK_ALGORITHM].n;
        check(t, found == expected, "row %d: tile %d, expected %d", kind, found, expected);
        check(t, counted == (kind == CONFIG), "row %d: %lld algorithms not offered", kind, (long long)counted);
        device_free(&dev);
    }
    layer_free(&l);
}

// a bf16 result takes its parts in float; what is float itself, the gradient of a weight, may hold them. dev/simt also ends
// a program that would let a part be rounded
static void test_reductions(Test* t) {
    Layer l = layer(33, 64, 40, 0, BF16);
    Device dev = test_device(1);
    float *out = filled_array(33 * 40, NAN), *dinp = filled_array(33 * 64, NAN), *dweight = filled_array(40 * 64, NAN);
    forward(BF16, out, l.inp, l.weight, NULL, l.N, l.C, l.OC, &dev);
    backward(BF16, dinp, dweight, NULL, l.dout, l.inp, l.weight, 0, l.N, l.C, l.OC, &dev);
    int n_float = 0;
    for (int i = 0; i < dev.plans->cache->n_plans; i++) {
        const CublasShape* s = &dev.plans->cache->plan[i].shape;
        const int is_float = s->out_type == CUDA_R_32F, any = cublas_reductions(s) == CUBLASLT_REDUCTION_SCHEME_MASK;
        n_float += is_float;
        check(t, any == is_float, "a result of type %d: reductions %u", (int)s->out_type, cublas_reductions(s));
    }
    check(t, n_float == 1 && dev.plans->cache->n_plans == 3, "%d of %d products have a float result", n_float,
          dev.plans->cache->n_plans);
    free(out), free(dinp), free(dweight);
    layer_free(&l);
    device_free(&dev);
}

static void test_plans(Test* t) {
    Device dev = test_device(1);
    const int most = CUBLAS_PLANS + 7, last = FEW_ROWS + most, before = heuristics(0);
    float *out = filled_array((size_t)last * 8, NAN), *first = filled_array(MANY * 8, NAN);
    Layer l = layer(last, 8, 8, 0, BF16);
    forward(BF16, first, l.inp, l.weight, NULL, MANY, 8, 8, &dev);
    ask_sizes(out, &l, MANY, last, &dev);
    int n = heuristics(most + 1) - before;
    check(t, n == most + 1, "%d sizes and a shape of every step: asked %d times", most, n);
    check(t, dev.plans->cache->n_plans == CUBLAS_PLANS, "%d plans kept", dev.plans->cache->n_plans);
    ask_sizes(out, &l, last - CUBLAS_PLANS + 2, last, &dev);
    n = heuristics(most + 1) - before;
    check(t, n == most + 1, "those used last, again: asked %d times", n - most - 1);
    forward(BF16, out, l.inp, l.weight, NULL, MANY, 8, 8, &dev);
    n = heuristics(most + 2) - before;
    check_bits(t, "a shape whose plan was dropped", out, first, MANY * 8);
    check(t, n == most + 2, "a shape whose plan was dropped: asked %d times", n - most - 1);
    free(out), free(first);
    layer_free(&l);
    device_free(&dev);
}
#endif
#endif

// ---- the plain loop itself ----

// sum over (n, oc) of dout * out in double; x = inp, then weight, then bias
static double layer_loss(const double* x, void* arg) {
    const Layer* l = (const Layer*)arg;
    const double *weight = x + l->N * l->C, *bias = weight + l->OC * l->C;
    double loss = 0.0;
    for (int i = 0; i < l->N * l->OC; i++) {
        int n = i / l->OC, oc = i % l->OC;
        double sum = bias[oc];
        for (int c = 0; c < l->C; c++) { sum += x[n * l->C + c] * weight[oc * l->C + c]; }
        loss += sum * (double)l->dout[i];
    }
    return loss;
}

static void test_forward_double(Test* t) {
    Layer l = layer(7, 65, 33, 0, FLOAT);
    float* out = filled_array(7 * 33, NAN);
    double* want = (double*)malloc_check(sizeof(double) * 7 * 33, "want");
    for (int i = 0; i < 7 * 33; i++) {
        want[i] = (double)l.bias[i % 33];
        for (int c = 0; c < 65; c++) { want[i] += (double)l.inp[i / 33 * 65 + c] * (double)l.weight[i % 33 * 65 + c]; }
    }
    matmul_forward_ref(out, l.inp, l.weight, l.bias, 7, 65, 33);
    check_close(t, "out", out, want, 7 * 33, rounding_walk(2 * 65, 8.0));  // 65 products and sums, all below 8
    free(out);
    free(want);
    layer_free(&l);
}

static void test_backward_differences(Test* t) {
    Layer l = layer(5, 7, 9, 0, FLOAT);
    size_t n_inp = 5 * 7, n_weight = 9 * 7, n_bias = 9;
    float *dinp = filled_array(n_inp, NAN), *dweight = filled_array(n_weight, NAN), *dbias = filled_array(n_bias, NAN);
    float* all = filled_array(n_inp + n_weight + n_bias, NAN);
    memcpy(all, l.inp, sizeof(float) * n_inp);
    memcpy(all + n_inp, l.weight, sizeof(float) * n_weight);
    memcpy(all + n_inp + n_weight, l.bias, sizeof(float) * n_bias);
    double *x = double_array(all, n_inp + n_weight + n_bias);
    double *want = finite_differences(layer_loss, x, n_inp + n_weight + n_bias, &l);
    matmul_backward_ref(dinp, dweight, dbias, l.dout, l.inp, l.weight, 5, 7, 9);
    const double tolerance = rounding_walk(2 * 9, 4.0);  // chains of at most 9 products, below 4
    check_close(t, "dinp", dinp, want, n_inp, tolerance);
    check_close(t, "dweight", dweight, want + n_inp, n_weight, tolerance);
    check_close(t, "dbias", dbias, want + n_inp + n_weight, n_bias, tolerance);
    free(dinp), free(dweight), free(dbias), free(all), free(x), free(want);
    layer_free(&l);
}

static void test_obvious(Test* t) {
    Device dev = test_device(2);
    const float inp[] = {1, 2, 3, 4}, weight[] = {1, 0, 0, 1, 1, 1}, bias[] = {10, 20, 30}, dout[] = {1, 0, 0, 0, 0, 1};
    const float want_out[] = {11, 22, 33, 13, 24, 37}, want_dinp[] = {1, 0, 1, 1}, want_dweight[] = {1, 2, 0, 0, 3, 4};
    const float want_dbias[] = {1, 0, 1};
    float out[6] = {0}, dinp[4] = {0}, dweight[6] = {0}, dbias[3] = {0};
    forward(FLOAT, out, inp, weight, bias, 2, 2, 3, &dev);
    backward(FLOAT, dinp, dweight, dbias, dout, inp, weight, 0, 2, 2, 3, &dev);
    check_bits(t, "out", out, want_out, 6);
    check_bits(t, "dinp", dinp, want_dinp, 4);
    check_bits(t, "dweight", dweight, want_dweight, 6);
    check_bits(t, "dbias", dbias, want_dbias, 3);
    device_free(&dev);
}

#if SAME_BITS
// 2^24 + 1 rounds down and 2^24 + (1 + 1) does not: the value tells in which order, and from where, a sum was made
static void check_order(Test* t, int K, const Device* dev) {
    const float big = 16777216.0f, last = (float)(K - 1) + big;
    float *row = filled_array((size_t)K, 1.0f), *ones = filled_array((size_t)K, 1.0f), bias = big, out = NAN;
    forward(FLOAT, &out, row, ones, &bias, 1, K, 1, dev);
    check(t, out == big, "K %d: a chain that starts at 2^24 must stay there, found %.1f", K, (double)out);
    row[K - 1] = big;
    forward(FLOAT, &out, row, ones, NULL, 1, K, 1, dev);
    check(t, out == last, "K %d, 2^24 comes last: expected %.1f, found %.1f", K, (double)last, (double)out);
    row[0] = big, row[K - 1] = 1.0f;
    forward(FLOAT, &out, row, ones, NULL, 1, K, 1, dev);
    check(t, out == big, "K %d, 2^24 comes first: expected it back, found %.1f", K, (double)out);
    free(row), free(ones);
}

static void test_order(Test* t) {
    Device dev = test_device(2);
    check_order(t, EDGE_K + 2, &dev);
    check_order(t, LONG_K + 2, &dev);
    device_free(&dev);
}

// with x = 1 + 2^-12, x * x rounds to 1 + 2^-11: only a fused multiply-add keeps the 2^-24
static void test_rounding(Test* t) {
#ifdef SYSTEM_LIBM
    const float kept = 0.0f;
#else
    const float kept = 0x1p-24f;
#endif
    Device dev = test_device(1);
    const float x = 1.0f + 0x1p-12f, minus = -(1.0f + 0x1p-11f), pair[] = {minus, x}, with[] = {1.0f, x};
    float out = NAN, dinp = NAN, dweight = NAN, dweights[2] = {NAN, NAN};
    forward(FLOAT, &out, &x, &x, &minus, 1, 1, 1, &dev);
    backward(FLOAT, &dinp, dweights, NULL, pair, &x, with, 0, 1, 1, 2, &dev);
    check(t, out == kept && dinp == kept, "expected %g, found out %g and dinp %g", (double)kept, (double)out,
          (double)dinp);
    float *many = filled_array(MANY_OUTPUTS, x), *biases = filled_array(MANY_OUTPUTS, minus);
    for (int n = 1; n <= MANY_OUTPUTS; n += MANY_OUTPUTS - 1) {  // thin, and in tiles
        float* outs = filled_array((size_t)MANY_ROWS * n, NAN);
        forward(FLOAT, outs, many, many, biases, MANY_ROWS, 1, n, &dev);
        for (int i = 0; i < MANY_ROWS * n; i++) { check(t, outs[i] == kept, "output %d: found %g", i, outs[i]); }
        free(outs);
    }
    free(many), free(biases);
    backward(FLOAT, NULL, &dweight, NULL, pair, with, with, 0, 2, 1, 1, &dev);
    check(t, dweight == kept, "expected %g, found dweight %g", (double)kept, (double)dweight);
    device_free(&dev);
}

#endif

#ifndef __CUDACC__
// n numbers stored as bf16, fp8 or fp4 (E, OC, C), and the same as floats, computed here anew; blocks begin anew at
// multiples of part_rows
typedef struct {
    float* floats;
    void* bytes;
    float* scales;
    StoredMatrix first;
} StoredWeight;

static StoredWeight stored_weight(Stored kind, int E, int OC, int C, int part_rows, uint64_t seed) {
    const size_t n = (size_t)E * OC * C, n_blocks = (size_t)fp8_blocks(C);
    const int n_parts = E * OC / part_rows, each = fp8_blocks(part_rows);
    StoredWeight w = {hard_array(n, seed), new_array(n, sizeof(uint16_t)),
                      filled_array((size_t)n_parts * each * n_blocks, NAN),
                      stored_matrix(NULL, kind, OC, C, part_rows, NULL)};
    w.first.data = w.bytes;
    w.first.scales = kind == STORED_FP8 ? w.scales : NULL;
    for (size_t i = 0; kind == STORED_BF16 && i < n; i++) {
        ((uint16_t*)w.bytes)[i] = (uint16_t)(float_bits(w.floats[i]) >> 16);
        w.floats[i] = float_from_bits(float_bits(w.floats[i]) & 0xffff0000u);
    }
    for (int b = 0; kind == STORED_FP8 && b < n_parts * each; b++) {
        const int first = b / each * part_rows + b % each * 128, end = (b / each + 1) * part_rows;
        const int n_rows = end - first < 128 ? end - first : 128;
        float* x = w.floats + (size_t)first * C;
        for (int i = 0; i < n_rows * C; i++) { x[i] = fminf(fmaxf(x[i], -5e4f), 5e4f); }
        fp8_quantize_rows((uint8_t*)w.bytes + (size_t)first * C, w.scales + b * n_blocks, x, n_rows, C);
        if (b % 3 == 1) { w.scales[b * n_blocks] *= 0.7f; }  // as files may have them
        for (int i = 0; i < n_rows * C; i++) {
            const int byte = ((uint8_t*)w.bytes)[(size_t)first * C + i], e = byte >> 3 & 15, m = byte & 7;
            const float size = e > 0 ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
            x[i] = (byte & 128 ? -size : size) * w.scales[b * n_blocks + i % C / 128];
        }
    }
    return w;
}

// fp8 of any numbers, in blocks that are as small as a part of a matrix may have them: the largest that divide its sides
static StoredWeight stored_small_blocks(int OC, int C, int part_rows, uint64_t seed) {
    const size_t n = (size_t)OC * C;
    StoredWeight w = {filled_array(n, NAN), new_array(n, 1), NULL,
                      stored_matrix(NULL, STORED_FP8, OC, C, part_rows, NULL)};
    uint8_t* bytes = (uint8_t*)w.bytes;
    w.first.block_rows = stored_cut(128, part_rows), w.first.block_columns = stored_cut(128, C);
    const int columns = C / w.first.block_columns, rows = OC / w.first.block_rows;
    w.scales = filled_array((size_t)rows * columns, NAN);
    for (int i = 0; i < rows * columns; i++) {
        w.scales[i] = ldexpf(i % 3 ? 1.0f : 0.7f, (int)(splitmix64(seed, (uint64_t)i) % 12) - 8);
    }
    for (size_t i = 0; i < n; i++) {
        bytes[i] = (uint8_t)(splitmix64(seed + 1, (uint64_t)i) % 127 + 128 * (i % 2));
        const int e = bytes[i] >> 3 & 15, m = bytes[i] & 7;
        const int block = (int)i / C / w.first.block_rows * columns + (int)i % C / w.first.block_columns;
        const float size = e > 0 ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
        w.floats[i] = (bytes[i] & 128 ? -size : size) * w.scales[block];
    }
    w.first.data = w.bytes, w.first.scales = w.scales;
    return w;
}

// any codes, with scales from 2^-127 to 2^5; a few are larger
static StoredWeight stored_fp4(int E, int OC, int C, uint64_t seed) {
    const float sizes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const size_t n = (size_t)E * OC * C;
    StoredWeight w = {filled_array(n, NAN), new_array(n / 2, 1), NULL,
                      stored_matrix(NULL, STORED_FP4, OC, C, OC, NULL)};
    uint8_t* exponents = (uint8_t*)new_array(n / 32, 1);
    uint8_t* bytes = (uint8_t*)w.bytes;
    for (size_t i = 0; i < n / 32; i++) {
        const int x = (int)(splitmix64(seed, (uint64_t)i) % 40);
        exponents[i] = (uint8_t)(x == 0 ? 0 : x == 1 ? 1 : x == 2 ? 252 : 94 + x);
    }
    for (size_t i = 0; i < n; i++) {
        const int code = (int)(splitmix64(seed + 1, (uint64_t)i) % 16), shift = i % 2 ? 4 : 0;
        bytes[i / 2] = (uint8_t)((shift ? bytes[i / 2] : 0) | code << shift);
        w.floats[i] = ldexpf(code & 8 ? -sizes[code & 7] : sizes[code & 7], exponents[i / 32] - 127);
    }
    w.first.data = w.bytes;
    w.first.scales = w.scales = (float*)(void*)exponents;
    return w;
}

static void stored_weight_free(StoredWeight* w) { free(w->floats), free(w->bytes), free(w->scales); }

// a weight that is stored gives the bits of the same numbers as floats: few rows and many, rims, several blocks of k
// and of scales
static void test_stored(Test* t) {
    const int shapes[][4] = {{1, 1, 1, 1},      {1, 33, 65, 65},    {3, 64, 48, 48},   {4, 100, 97, 97},
                             {5, 7, 130, 130},  {9, 257, 3, 3},     {31, 48, 160, 80}, {2, 2000, 40, 40},
                              {7, 97, 33, 33}, {13, 1601, 51, 51}, {1, 300, 402, 201}, {8, 300, 402, 134},
                              {2, 129, 258, 129},
                             {6, 64, 70, 70}, {6, 4225, 50, 50}, {1, 4225, 50, 25},
                             {13, 2080, 51, 51}};  // N, C, OC, part_rows
    const Stored kinds[] = {STORED_BF16, STORED_FP8, STORED_FP4, STORED_FP8};
    const char* const outs[] = {"bf16: out", "fp8: out", "fp4: out", "fp8 in small blocks: out"};
    const char* const dinps[] = {"bf16: dinp", "fp8: dinp", "fp4: dinp", "fp8 in small blocks: dinp"};
    for (size_t i = 0; i < 4 * sizeof shapes / sizeof *shapes; i++) {
        const Stored kind = kinds[i % 4];
        const int N = shapes[i / 4][0], OC = shapes[i / 4][2], part_rows = shapes[i / 4][3];
        const int C = kind == STORED_FP4 ? (shapes[i / 4][1] + 31) / 32 * 32 : shapes[i / 4][1];
        const size_t n_out = (size_t)N * OC, n_inp = (size_t)N * C;
        StoredWeight w = kind == STORED_FP4 ? stored_fp4(1, OC, C, 3)
                       : i % 4 == 3 ? stored_small_blocks(OC, C, part_rows, 3)
                                    : stored_weight(kind, 1, OC, C, part_rows, 3);
        float *inp = hard_array(n_inp, 1), *bias = hard_array(OC, 2);
        for (int k = 0; k < N_TEST_THREADS; k++) {
            Device dev = test_device(test_threads(k));
            float *want = filled_array(n_out, NAN), *got = filled_array(n_out, NAN);
            float *dwant = hard_array(n_inp, 5), *dgot = hard_array(n_inp, 5);
            matmul_forward(want, inp, w.floats, k % 2 ? bias : NULL, N, C, OC, &dev);
            matmul_forward_stored(got, inp, w.first, k % 2 ? bias : NULL, N, &dev);
            check_bits(t, outs[i % 4], got, want, n_out);
            matmul_backward_input(dwant, want, w.floats, k % 2, N, C, OC, &dev);
            matmul_backward_input_stored(dgot, want, w.first, k % 2, N, &dev);
            check_bits(t, dinps[i % 4], dgot, dwant, n_inp);
            free(want), free(got), free(dwant), free(dgot);
            device_free(&dev);
        }
        stored_weight_free(&w), free(inp), free(bias);
    }
}
#endif

// -0 + -0 * 1 is -0, and 0 + -0 * 1 is 0
static void test_signed_zero(Test* t) {
    Device dev = test_device(1);
    const float zero = -0.0f, one = 1.0f;
    float *zeros = filled_array(MANY_ROWS, zero), *out = filled_array(MANY_ROWS, NAN);
    for (int N = 1; N <= MANY_ROWS; N++) {
        forward(FLOAT, out, zeros, &one, &zero, N, 1, 1, &dev);
        for (int n = 0; n < N; n++) { check(t, float_bits(out[n]) == 0x80000000, "from -0: %08x", float_bits(out[n])); }
        forward(FLOAT, out, zeros, &one, NULL, N, 1, 1, &dev);
        for (int n = 0; n < N; n++) { check(t, float_bits(out[n]) == 0, "from 0: found %08x", float_bits(out[n])); }
    }
    free(zeros), free(out);
    device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"gemm shapes", "meets the stated chain at odd shapes, strides, starts and threads, gaps untouched",
         test_gemm_shapes},
        {"gemm blocks", "meets the stated chain beyond one block of M, N and K", test_gemm_blocks},
#ifndef __CUDACC__
        {"gemm thin", "where a side is thin: the same", test_thin},
#endif
        {"gemm special", "meets the stated chain with cancellation, subnormals, -0, Inf, NaN", test_gemm_special},
        {"forward", "meets the plain loop at odd shapes, with and without bias", test_forward},
        {"forward special", "meets the plain loop with cancellation, subnormals, -0, Inf, NaN", test_forward_special},
        {"gelu", "matmul_gelu_forward meets the plain loops, fused or not", test_gelu},
        {"gelu backward", "matmul_gelu_backward_input meets the plain loops, fused or not", test_gelu_backward},
        {"backward", "meets the plain loop at odd shapes", test_backward},
        {"asked", "gradients that nobody asks for are NULL: the others keep their bits", test_asked},
        {"backward special", "meets the plain loop with cancellation, subnormals, -0, Inf, NaN", test_backward_special},
        {"added", "dweight of two halves of the positions, dinp of two halves of the outputs: the second added", test_added},
#ifndef __CUDACC__
        {"stored", "a weight stored as bf16, fp8 or fp4 gives the bits of the same numbers as floats", test_stored},
#endif
        {"backward bias", "meets the plain loop at 1, 7, 33, 257 and 1024 rows and columns", test_backward_bias},
#ifdef __CUDACC__
        {"addresses", "arrays may begin anywhere", test_addresses},
        {"repeats", "the same call gives the same bits", test_repeats},
#ifndef EXACT
        {"few", "few rows of bf16: a row has the same bits whichever rows go with it", test_few},
        {"fallbacks", "products that cuBLASLt does not take are counted, and the first is named", test_fallbacks},
        {"algorithms", "a row of gemm_algorithms.h chooses for its card, version and shape alone", test_algorithms},
        {"reductions", "a split sum is added in float, whatever the result is stored as", test_reductions},
        {"plans", "cuBLASLt's heuristic is asked once for a shape; those used last are kept, however many there are",
         test_plans},
#endif
#endif
        {"forward double", "the plain loop agrees with double at (7, 65, 33)", test_forward_double},
        {"backward differences", "the plain loop agrees with finite differences at (5, 7, 9)",
         test_backward_differences},
        {"obvious", "a product that can be done by hand", test_obvious},
#if SAME_BITS
        {"order", "a chain starts at the bias and ascends, across blocks of K too", test_order},
        {"rounding", "a product and its sum round once, together", test_rounding},
#endif
        {"signed zero", "-0 keeps its sign", test_signed_zero},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
