/*
Promises of llmc/gemm.h and llmc/matmul.h. The plain loops are judged in double, by finite differences and on inputs
whose answer is obvious; the fast versions must equal the plain loops bit for bit, whatever the shape, the strides and
the threads.
*/
#include "llmc/matmul.h"
#include "llmc/test.h"

// ---- gemm ----

// element (r, c)
static float at(Matrix m, int r, int c) { return m.data[(size_t)r * m.row_stride + (size_t)c * m.col_stride]; }

// rows first, first + step, ... of start + a * b, as the header of gemm.h states them
static void gemm_plain(float* out, size_t out_stride, const float* start, size_t start_stride, Matrix a, Matrix b,
                       int M, int N, int K, int step) {
    for (int m = 0; m < M; m += step) {
        for (int n = 0; n < N; n++) {
            float sum = start ? start[(size_t)m * start_stride + (size_t)n] : 0.0f;
            for (int k = 0; k < K; k++) { sum += at(a, m, k) * at(b, k, n); }
            out[(size_t)m * out_stride + (size_t)n] = sum;
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
} Product;

static Matrix operand(const float* data, int turned, int rows, int columns) {
    return turned ? transposed(data, (size_t)rows + 3) : matrix(data, (size_t)columns + 3);
}

static void check_product(Test* t, Product p, const float* a_data, const float* b_data, const float* starts,
                          const Device* dev) {
    size_t stride = (size_t)p.N + 5, n_out = (size_t)p.M * stride;
    Matrix a = operand(a_data, p.a_turned, p.M, p.K), b = operand(b_data, p.b_turned, p.K, p.N);
    float* got = p.start == FROM_OUT ? copied_array(starts, n_out) : filled_array(n_out, 77.0f);
    float* want = copied_array(got, n_out);
    const float* start = p.start == FROM_ZERO ? NULL : p.start == FROM_OUT ? got : starts;
    size_t start_stride = p.start == FROM_BIAS ? 0 : stride;
    gemm_plain(want, stride, start, start_stride, a, b, p.M, p.N, p.K, p.step);
    gemm(got, stride, start, start_stride, a, b, p.M, p.N, p.K, dev);
    char what[160];
    snprintf(what, sizeof what, "M %d, N %d, K %d, a %d, b %d, start %d, %d threads", p.M, p.N, p.K, p.a_turned,
             p.b_turned, (int)p.start, dev->n_threads);
    for (int m = 0; m < p.M; m += p.step) {  // whole rows: the gap after each must be as it was
        if (!check_bits(t, what, got + (size_t)m * stride, want + (size_t)m * stride, stride)) { break; }
    }
    free(got);
    free(want);
}

// one shape with every combination of turned operands and starts
static void check_products(Test* t, int M, int N, int K, int step, int special) {
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
            if (step > 1 && way % 5 != i % 5) { continue; }  // large: each way once, the four starts among them
            Product p = {M, N, K, way & 1, way >> 1 & 1, (Start)(way >> 2), step};
            check_product(t, p, a, b, starts, &dev);
        }
        device_free(&dev);
    }
    free(a);
    free(b);
    free(starts);
}

static void test_gemm_shapes(Test* t) {
    const int shapes[][3] = {  // M, N, K
        {1, 1, 1}, {1, 7, 33}, {7, 1, 33}, {33, 7, 1}, {1, 257, 7}, {257, 1, 7}, {31, 61, 127}, {3, 2, 0},
        {TILE_M, TILE_N, 16}, {2 * TILE_M, 2 * TILE_N, 32}, {TILE_M - 1, TILE_N - 1, 17}, {TILE_M + 1, TILE_N + 1, 15},
        {8 * TILE_M, TILE_N, VLANES}, {8 * TILE_M + 1, VLANES + 1, VLANES + 1}, {17 * TILE_M + 5, 5 * TILE_N + 1, 3},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_products(t, shapes[i][0], shapes[i][1], shapes[i][2], 1, 0);
    }
}

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
        check_products(t, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 0);
    }
}

static void test_gemm_special(Test* t) {
    for (int special = 1; special <= 2; special++) {
        check_products(t, 33, 61, 17, 1, special);
        check_products(t, 2 * TILE_M + 1, TILE_N + 3, GEMM_K + 5, 1, special);
    }
}

// ---- matmul ----

typedef struct {
    int N, C, OC, hard;
    float *inp, *weight, *bias, *dout;
} Layer;

// hard 1: cancellation, subnormals, -0; hard 2: also infinities and NaNs
static Layer layer(int N, int C, int OC, int hard) {
    Layer l = {N, C, OC, hard, NULL, NULL, NULL, NULL};
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
    return l;
}

static void layer_free(Layer* l) {
    free(l->inp);
    free(l->weight);
    free(l->bias);
    free(l->dout);
}

static void check_forward(Test* t, const Layer* l) {
    size_t n_out = (size_t)l->N * (size_t)l->OC;
    for (int with_bias = 0; with_bias < 2; with_bias++) {
        const float* bias = with_bias ? l->bias : NULL;
        float* want = filled_array(n_out, 77.0f);
        matmul_forward_ref(want, l->inp, l->weight, bias, l->N, l->C, l->OC);
        for (int i = 0; i < N_TEST_THREADS; i++) {
            Device dev = test_device(test_threads(i));
            float* got = filled_array(n_out, NAN);
            char what[96];
            snprintf(what, sizeof what, "N %d, C %d, OC %d, hard %d, %d threads", l->N, l->C, l->OC, l->hard,
                     dev.n_threads);
            matmul_forward(got, l->inp, l->weight, bias, l->N, l->C, l->OC, &dev);
            check_bits(t, what, got, want, n_out);
            free(got);
            device_free(&dev);
        }
        free(want);
    }
}

static void check_backward(Test* t, const Layer* l) {
    size_t n_inp = (size_t)l->N * (size_t)l->C, n_weight = (size_t)l->OC * (size_t)l->C, n_bias = (size_t)l->OC;
    float *dinp = filled_array(n_inp, 77.0f), *dweight = filled_array(n_weight, 77.0f),
          *dbias = filled_array(n_bias, 77.0f);
    matmul_backward_ref(dinp, dweight, dbias, l->dout, l->inp, l->weight, l->N, l->C, l->OC);
    for (int i = 0; i < 2 * N_TEST_THREADS; i++) {
        int all = i % 2;  // otherwise only dweight is asked for
        Device dev = test_device(test_threads(i / 2));
        float *got_dinp = filled_array(n_inp, NAN), *got_dweight = filled_array(n_weight, NAN),
              *got_dbias = filled_array(n_bias, NAN);
        char what[96];
        matmul_backward(all ? got_dinp : NULL, got_dweight, all ? got_dbias : NULL, l->dout, l->inp, l->weight, l->N,
                        l->C, l->OC, &dev);
        snprintf(what, sizeof what, "dweight, N %d, C %d, OC %d, hard %d, %d threads", l->N, l->C, l->OC, l->hard,
                 dev.n_threads);
        check_bits(t, what, got_dweight, dweight, n_weight);
        if (all) {
            check_bits(t, "dinp", got_dinp, dinp, n_inp);
            check_bits(t, "dbias", got_dbias, dbias, n_bias);
        }
        free(got_dinp);
        free(got_dweight);
        free(got_dbias);
        device_free(&dev);
    }
    free(dinp);
    free(dweight);
    free(dbias);
}

static void check_layers(Test* t, void (*check_layer)(Test*, const Layer*), int hard) {
    const int shapes[][3] = {  // N, C, OC
        {1, 1, 1}, {1, 7, 33}, {7, 33, 1}, {33, 1, 7}, {31, 127, 61}, {64, 64, 65}, {257, 7, 33},
        {33, 257, 7}, {7, 33, 257}, {5, 1541, 3}, {5, 3, 1541}, {1031, 9, TILE_N + 1},
        {TILE_M + 1, GEMM_K + 1, TILE_N + 1}, {TILE_N + 1, TILE_M + 1, GEMM_K + 1},
        {GEMM_K + 1, TILE_N + 1, TILE_M + 1}, {TILE_M + 1, GEMM_LONG_K + 1, 5}, {5, TILE_M + 1, GEMM_LONG_K + 1},
        {GEMM_LONG_K + 1, 5, TILE_M + 1},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        Layer l = layer(shapes[i][0], shapes[i][1], shapes[i][2], hard);
        check_layer(t, &l);
        layer_free(&l);
    }
}

static void test_forward(Test* t) { check_layers(t, check_forward, 0); }
static void test_backward(Test* t) { check_layers(t, check_backward, 0); }

static void test_forward_special(Test* t) {
    check_layers(t, check_forward, 1);
    check_layers(t, check_forward, 2);
}

static void test_backward_special(Test* t) {
    check_layers(t, check_backward, 1);
    check_layers(t, check_backward, 2);
}

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
    Layer l = layer(7, 65, 33, 0);
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
    Layer l = layer(5, 7, 9, 0);
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
    float out[6], dinp[4], dweight[6], dbias[3];
    matmul_forward(out, inp, weight, bias, 2, 2, 3, &dev);
    matmul_backward(dinp, dweight, dbias, dout, inp, weight, 2, 2, 3, &dev);
    check_bits(t, "out", out, want_out, 6);
    check_bits(t, "dinp", dinp, want_dinp, 4);
    check_bits(t, "dweight", dweight, want_dweight, 6);
    check_bits(t, "dbias", dbias, want_dbias, 3);
    device_free(&dev);
}

// 2^24 + 1 rounds down and 2^24 + (1 + 1) does not: the value tells in which order, and from where, a sum was made
static void check_order(Test* t, int K, const Device* dev) {
    const float big = 16777216.0f, last = (float)(K - 1) + big;
    float *row = filled_array((size_t)K, 1.0f), *ones = filled_array((size_t)K, 1.0f), bias = big, out = NAN;
    matmul_forward(&out, row, ones, &bias, 1, K, 1, dev);
    check(t, out == big, "K %d: a chain that starts at 2^24 must stay there, found %.1f", K, (double)out);
    row[K - 1] = big;
    matmul_forward(&out, row, ones, NULL, 1, K, 1, dev);
    check(t, out == last, "K %d, 2^24 comes last: expected %.1f, found %.1f", K, (double)last, (double)out);
    row[0] = big, row[K - 1] = 1.0f;
    matmul_forward(&out, row, ones, NULL, 1, K, 1, dev);
    check(t, out == big, "K %d, 2^24 comes first: expected it back, found %.1f", K, (double)out);
    free(row), free(ones);
}

static void test_order(Test* t) {
    Device dev = test_device(2);
    check_order(t, GEMM_K + 2, &dev);
    check_order(t, GEMM_LONG_K + 2, &dev);
    device_free(&dev);
}

// with x = 1 + 2^-12, x * x rounds to 1 + 2^-11: the sum below is 0 unless a fused multiply-add keeps the 2^-24
static void test_rounding(Test* t) {
    Device dev = test_device(1);
    const float x = 1.0f + 0x1p-12f, minus = -(1.0f + 0x1p-11f), pair[] = {minus, x}, with[] = {1.0f, x};
    float out, dinp, dweight, dweights[2];
    matmul_forward(&out, &x, &x, &minus, 1, 1, 1, &dev);
    matmul_backward(&dinp, dweights, NULL, pair, &x, with, 1, 1, 2, &dev);
    check(t, out == 0.0f && dinp == 0.0f, "out %g and dinp %g must be 0", (double)out, (double)dinp);
    matmul_backward(NULL, &dweight, NULL, pair, with, with, 2, 1, 1, &dev);
    check(t, dweight == 0.0f, "dweight %g must be 0", (double)dweight);
    device_free(&dev);
}

// -0 + -0 * 1 is -0, and 0 + -0 * 1 is 0
static void test_signed_zero(Test* t) {
    Device dev = test_device(1);
    const float zero = -0.0f, one = 1.0f;
    float out[2];
    matmul_forward(out, &zero, &one, &zero, 1, 1, 1, &dev);
    matmul_forward(out + 1, &zero, &one, NULL, 1, 1, 1, &dev);
    check(t, float_bits(out[0]) == 0x80000000, "from -0: found %08x", float_bits(out[0]));
    check(t, float_bits(out[1]) == 0, "from 0: found %08x", float_bits(out[1]));
    device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"gemm shapes", "equals the stated chain at odd shapes, strides, starts and threads, gaps untouched",
         test_gemm_shapes},
        {"gemm blocks", "equals the stated chain beyond one block of M, N and K", test_gemm_blocks},
        {"gemm special", "equals the stated chain with cancellation, subnormals, -0, Inf, NaN", test_gemm_special},
        {"forward", "equals the plain loop bit for bit at odd shapes, with and without bias", test_forward},
        {"forward special", "equals the plain loop with cancellation, subnormals, -0, Inf, NaN", test_forward_special},
        {"backward", "equals the plain loop bit for bit at odd shapes; dinp and dbias may be NULL", test_backward},
        {"backward special", "equals the plain loop with cancellation, subnormals, -0, Inf, NaN",
         test_backward_special},
        {"forward double", "the plain loop agrees with double at (7, 65, 33)", test_forward_double},
        {"backward differences", "the plain loop agrees with finite differences at (5, 7, 9)",
         test_backward_differences},
        {"obvious", "a product that can be done by hand", test_obvious},
        {"order", "a chain starts at the bias and ascends, across blocks of K too", test_order},
        {"rounding", "products round before they are added: no fused multiply-add", test_rounding},
        {"signed zero", "-0 keeps its sign", test_signed_zero},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
