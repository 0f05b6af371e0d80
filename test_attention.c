/*
Promises of llmc/attention.h. The plain loop is judged in double, by finite differences and on inputs whose answer is
obvious; the fast version must equal it bit for bit, whatever the shape and the threads, and no token may feel a later
one.
*/
#include "llmc/attention.h"
#include "llmc/test.h"

// one problem and the plain loop's answer
typedef struct {
    int B, T, C, NH;
    float *qkv, *dout;                               // given
    float *out, *preatt, *att, *max, *inv, *dqkv;    // found
} Attention;

static size_t n_out(const Attention* a) { return (size_t)a->B * (size_t)a->T * (size_t)a->C; }
static size_t n_rows(const Attention* a) { return (size_t)a->B * (size_t)a->NH * (size_t)a->T; }

static void solve(Attention* a) {
    attention_forward_ref(a->out, a->preatt, a->att, a->max, a->inv, a->qkv, a->B, a->T, a->C, a->NH);
    attention_backward_ref(a->dqkv, a->dout, a->qkv, a->B, a->T, a->C, a->NH);
}

// hard 1: cancellation, subnormals, -0; hard 2: also infinities and NaNs
static Attention attention(int B, int T, int C, int NH, int hard) {
    Attention a;
    a.B = B, a.T = T, a.C = C, a.NH = NH;
    size_t n = n_out(&a), rows = n_rows(&a);
    a.qkv = hard ? hard_array(3 * n, 1) : random_array(3 * n, 2.0f, 1);
    a.dout = hard ? hard_array(n, 2) : random_array(n, 1.0f, 2);
    if (hard == 2) {
        sprinkle(a.qkv, 3 * n, (uint32_t)(n / 5 + 2), 3);
        sprinkle(a.dout, n, (uint32_t)(n / 2 + 2), 4);
    }
    a.out = filled_array(n, 77.0f);
    a.dqkv = filled_array(3 * n, 77.0f);
    a.max = filled_array(rows, 77.0f);
    a.inv = filled_array(rows, 77.0f);
    a.preatt = filled_array(rows * (size_t)T, 77.0f);
    a.att = filled_array(rows * (size_t)T, 77.0f);
    solve(&a);
    return a;
}

static void attention_free(Attention* a) {
    free(a->qkv), free(a->dout);
    free(a->out), free(a->preatt), free(a->att), free(a->max), free(a->inv), free(a->dqkv);
}

// queries t0.. of every sequence and head: out (B, T-t0, C), max and inv (B, NH, T-t0)
static void check_forward(Test* t, const Attention* a, int t0, const Device* dev) {
    size_t n_queries = (size_t)(a->T - t0), C = (size_t)a->C, BNH = (size_t)a->B * (size_t)a->NH;
    float *out = filled_array((size_t)a->B * n_queries * C, NAN), *max = filled_array(BNH * n_queries, NAN);
    float* inv = filled_array(BNH * n_queries, NAN);
    char what[96];
    attention_forward(out, max, inv, a->qkv, a->B, a->T, a->C, a->NH, t0, dev);
    snprintf(what, sizeof what, "B %d, T %d, C %d, NH %d, t0 %d, %d threads", a->B, a->T, a->C, a->NH, t0,
             dev->n_threads);
    for (size_t b = 0; b < (size_t)a->B; b++) {
        check_bits(t, what, out + b * n_queries * C, a->out + (b * (size_t)a->T + (size_t)t0) * C, n_queries * C);
    }
    for (size_t row = 0; row < BNH; row++) {
        check_bits(t, "max", max + row * n_queries, a->max + row * (size_t)a->T + t0, n_queries);
        check_bits(t, "inv", inv + row * n_queries, a->inv + row * (size_t)a->T + t0, n_queries);
    }
    free(out), free(max), free(inv);
}

static void check_backward(Test* t, const Attention* a, const Device* dev) {
    float* dqkv = filled_array(3 * n_out(a), NAN);
    char what[96];
    attention_backward(dqkv, a->dout, a->out, a->max, a->inv, a->qkv, a->B, a->T, a->C, a->NH, dev);
    snprintf(what, sizeof what, "B %d, T %d, C %d, NH %d, %d threads", a->B, a->T, a->C, a->NH, dev->n_threads);
    check_bits(t, what, dqkv, a->dqkv, 3 * n_out(a));
    free(dqkv);
}

// ---- fast against plain ----

typedef enum { FORWARD, BACKWARD } Direction;

static void check_shape(Test* t, Direction direction, int B, int T, int C, int NH, int hard) {
    Attention a = attention(B, T, C, NH, hard);
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        if (direction == FORWARD) {
            check_forward(t, &a, 0, &dev);
        } else {
            check_backward(t, &a, &dev);
        }
        device_free(&dev);
    }
    attention_free(&a);
}

static void check_shapes(Test* t, Direction direction) {
    const int shapes[][4] = {  // B, T, C, NH
        {1, 1, 1, 1}, {1, 2, 2, 1}, {1, 7, 33, 1}, {2, 7, 33, 3}, {3, 33, 14, 2}, {1, 33, 64, 1}, {2, 31, 130, 2},
        {1, 257, 7, 1}, {1, 67, 192, 3}, {2, TILE_N, 2 * TILE_M, 2}, {1, TILE_N - 1, TILE_M - 1, 1},
        {1, TILE_N + 1, TILE_M + 1, 1}, {1, 2 * TILE_N, TILE_N, 1}, {1, 3 * TILE_N + 5, TILE_N + 1, 1},
        {1, GEMM_K + 3, 5, 1}, {1, 9, GEMM_K + 1, 1},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_shape(t, direction, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 0);
    }
}

static void check_special(Test* t, Direction direction) {
    for (int hard = 1; hard <= 2; hard++) {
        check_shape(t, direction, 1, 7, 5, 1, hard);
        check_shape(t, direction, 3, TILE_N + 7, 3 * VLANES + 3, 3, hard);
        check_shape(t, direction, 1, 2 * TILE_N + 1, 8, 1, hard);
    }
}

static void test_forward(Test* t) { check_shapes(t, FORWARD); }
static void test_backward(Test* t) { check_shapes(t, BACKWARD); }
static void test_forward_special(Test* t) { check_special(t, FORWARD); }
static void test_backward_special(Test* t) { check_special(t, BACKWARD); }

static void test_cache(Test* t) {
    Attention a = attention(2, 2 * TILE_N + 7, 24, 3, 0);
    const int starts[] = {0, 1, 5, TILE_N - 1, TILE_N, TILE_N + 1, 2 * TILE_N + 6};
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        for (size_t j = 0; j < sizeof starts / sizeof *starts; j++) { check_forward(t, &a, starts[j], &dev); }
        device_free(&dev);
    }
    attention_free(&a);
}

// token by token, as generation does: each new row is the row that one pass over the whole text gives
static void test_generation(Test* t) {
    Attention a = attention(1, TILE_N + 9, 20, 2, 0);
    Device dev = test_device(2);
    for (int n = 1; n <= a.T; n++) {
        float out[20], max[2], inv[2];
        attention_forward(out, max, inv, a.qkv, 1, n, 20, 2, n - 1, &dev);
        check_bits(t, "newest row", out, a.out + (n - 1) * 20, 20);
    }
    device_free(&dev);
    attention_free(&a);
}

// ---- causality ----

typedef enum { Q, K, V } Part;

// out rows before s and their dq are what they were before token s was spoilt. A spoilt q reaches its own row only, a
// spoilt v no gradient of v
static void check_causal(Test* t, const Attention* clean, const Attention* spoilt, int s, Part part,
                         const Device* dev) {
    size_t C = (size_t)clean->C;
    float *out = filled_array(n_out(clean), NAN), *dqkv = filled_array(3 * n_out(clean), NAN);
    float *max = filled_array(n_rows(clean), NAN), *inv = filled_array(n_rows(clean), NAN);
    attention_forward(out, max, inv, spoilt->qkv, 1, clean->T, clean->C, clean->NH, 0, dev);
    attention_backward(dqkv, clean->dout, out, max, inv, spoilt->qkv, 1, clean->T, clean->C, clean->NH, dev);
    check_bits(t, "out", out, spoilt->out, n_out(clean));
    check_bits(t, "dqkv", dqkv, spoilt->dqkv, 3 * n_out(clean));
    for (int n = 0; n < clean->T; n++) {
        char what[64];
        snprintf(what, sizeof what, "token %d, with %c of token %d spoilt", n, "qkv"[part], s);
        if (n < s || (part == Q && n != s)) {
            check_bits(t, what, out + (size_t)n * C, clean->out + (size_t)n * C, C);
            check_bits(t, what, dqkv + (size_t)n * 3 * C, clean->dqkv + (size_t)n * 3 * C, C);
        }
        if (part == V) {
            check_bits(t, what, dqkv + (size_t)n * 3 * C + 2 * C, clean->dqkv + (size_t)n * 3 * C + 2 * C, C);
        }
    }
    free(out), free(dqkv), free(max), free(inv);
}

static void test_causality(Test* t) {
    Attention clean = attention(1, 2 * TILE_N + 3, 6, 1, 0), spoilt = attention(1, 2 * TILE_N + 3, 6, 1, 0);
    const float poisons[] = {INFINITY, -INFINITY, NAN};
    const int tokens[] = {1, 2, TILE_M, TILE_N - 1, TILE_N, TILE_N + 1, 2 * TILE_N + 2};
    Device dev = test_device(2);
    for (size_t i = 0; i < 9 * sizeof tokens / sizeof *tokens; i++) {
        int part = (int)(i % 3), s = tokens[i / 9];
        float *x = spoilt.qkv + s * 3 * 6 + part * 6, kept[6];
        memcpy(kept, x, sizeof kept);
        for (int c = 0; c < 6; c++) { x[c] = poisons[i / 3 % 3]; }
        solve(&spoilt);
        check_causal(t, &clean, &spoilt, s, (Part)part, &dev);
        memcpy(x, kept, sizeof kept);
    }
    device_free(&dev);
    attention_free(&clean);
    attention_free(&spoilt);
}

// ---- the plain loop itself ----

// the textbook's softmax in double
static void attention_double(double* out, const double* qkv, int B, int T, int C, int NH) {
    int HS = C / NH;
    double* att = (double*)malloc_check(sizeof(double) * T, "att");
    for (int row = 0; row < B * NH * T; row++) {
        int n = row % T, h = row / T % NH, b = row / T / NH;
        const double *q = qkv + (b * T + n) * 3 * C + h * HS, *k = qkv + b * T * 3 * C + C + h * HS, *v = k + C;
        double sum = 0.0;
        for (int u = 0; u <= n; u++) {
            double dot = 0.0;
            for (int i = 0; i < HS; i++) { dot += q[i] * k[u * 3 * C + i]; }
            sum += att[u] = exp(dot / sqrt((double)HS));
        }
        for (int i = 0; i < HS; i++) {
            double y = 0.0;
            for (int u = 0; u <= n; u++) { y += att[u] / sum * v[u * 3 * C + i]; }
            out[(b * T + n) * C + h * HS + i] = y;
        }
    }
    free(att);
}

// sum of dout * out
static double attention_loss(const double* qkv, void* arg) {
    const Attention* a = (const Attention*)arg;
    double loss = 0.0, *out = (double*)malloc_check(sizeof(double) * n_out(a), "out");
    attention_double(out, qkv, a->B, a->T, a->C, a->NH);
    for (size_t i = 0; i < n_out(a); i++) { loss += out[i] * (double)a->dout[i]; }
    free(out);
    return loss;
}

static void test_forward_double(Test* t) {
    Attention a = attention(2, 33, 32, 2, 0);
    double *qkv = double_array(a.qkv, 3 * n_out(&a)), *want = (double*)malloc_check(sizeof(double) * n_out(&a), "want");
    attention_double(want, qkv, a.B, a.T, a.C, a.NH);
    // |v| <= 2; a score is 16 products and sums below 32, scaled by 1/4, and the exponential turns its error into a
    // relative one; the two chains over 33 keys add theirs
    check_close(t, "out", a.out, want, n_out(&a), (rounding_walk(32, 32.0) / 4.0 + rounding_walk(2 * 33, 1.0)) * 2.0);
    free(qkv), free(want);
    attention_free(&a);
}

static void check_differences(Test* t, int B, int T, int C, int NH, double tolerance) {
    Attention a = attention(B, T, C, NH, 0);
    double *qkv = double_array(a.qkv, 3 * n_out(&a)),
           *want = finite_differences(attention_loss, qkv, 3 * n_out(&a), &a);
    check_close(t, "dqkv", a.dqkv, want, 3 * n_out(&a), tolerance);
    free(qkv), free(want);
    attention_free(&a);
}

static void test_differences(Test* t) {
    check_differences(t, 2, 5, 6, 2, rounding_walk(64, 4.0));            // gradients below 4, chains of 3 and 5 terms
    check_differences(t, 1, TILE_N + 3, 2, 1, rounding_walk(256, 4.0));  // chains of TILE_N + 3 terms
}

static void test_obvious(Test* t) {
    // one token sees itself only; the second of two with equal keys takes the mean of both values
    const float qkv[] = {1, 2, 3, 5, 4, 8,   7, 1, 3, 5, 2, 2}, dout[] = {1, 1, 2, 4};
    const float want_out[] = {4, 8, 3, 5}, want_max[] = {13.0f / sqrtf(2.0f), 26.0f / sqrtf(2.0f)},
                want_inv[] = {1, 0.5f};
    const float want_dv[] = {2, 3, 1, 2};
    float out[4], max[2], inv[2], dqkv[12];
    Device dev = test_device(1);
    attention_forward(out, max, inv, qkv, 1, 2, 2, 1, 0, &dev);
    attention_backward(dqkv, dout, out, max, inv, qkv, 1, 2, 2, 1, &dev);
    check_bits(t, "out", out, want_out, 4);
    check_bits(t, "inv", inv, want_inv, 2);
    check(t, float_ulps(max[0], want_max[0]) <= 1 && float_ulps(max[1], want_max[1]) <= 1, "max: found %.9g %.9g",
          (double)max[0], (double)max[1]);
    check_bits(t, "dv of token 0", dqkv + 4, want_dv, 2);
    check_bits(t, "dv of token 1", dqkv + 10, want_dv + 2, 2);
    check(t, dqkv[0] == 0.0f && dqkv[1] == 0.0f, "a token that sees only itself cannot move its query");
    // datt = (40, 12), D = 26: ds = (7, -7) / sqrt(2), and equal keys cancel in dq
    check(t, dqkv[6] == 0.0f && dqkv[7] == 0.0f, "equal keys: the query cannot choose between them");
    check(t, fabsf(dqkv[2] - 49.0f / sqrtf(2.0f)) < 2e-5f && dqkv[8] == -dqkv[2],
          "dk is +-7 q / sqrt(2), found %.9g and %.9g", (double)dqkv[2],
          (double)dqkv[8]);  // 2e-5: five times the last place of 34.6
    device_free(&dev);
}

// scores below the start of the maximum: exp underflows, the weights are 0 or infinite as the plain loop says, nobody
// divides by 0
static void test_far_scores(Test* t) {
    const float scores[] = {-9950.0f, -10080.0f, -10095.0f, -10110.0f, -2e4f};
    for (size_t i = 0; i < sizeof scores / sizeof *scores; i++) {
        Attention a = attention(1, TILE_N + 2, 1, 1, 0);
        for (int n = 0; n < a.T; n++) { a.qkv[3 * n] = scores[i], a.qkv[3 * n + 1] = 1.0f; }
        solve(&a);
        Device dev = test_device(3);
        check_forward(t, &a, 0, &dev);
        check_backward(t, &a, &dev);
        if (scores[i] < -10104.0f) {
            check(t, a.inv[0] == 0.0f && a.out[0] == 0.0f, "no weight: inv and out must be 0");
        }
        device_free(&dev);
        attention_free(&a);
    }
}

// with x = 1 + 2^-12, x * x rounds to 1 + 2^-11: the score below is 0 unless a fused multiply-add keeps the 2^-24
static void test_rounding(Test* t) {
    const float x = 1.0f + 0x1p-12f, qkv[] = {-(1.0f + 0x1p-11f), x, 1, x, 1, 1};
    float out[2], max, inv;
    Device dev = test_device(1);
    attention_forward(out, &max, &inv, qkv, 1, 1, 2, 1, 0, &dev);
    check(t, max == 0.0f, "the score %g must be 0", (double)max);
    device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"forward", "out, max and inv equal the plain loop bit for bit at odd shapes", test_forward},
        {"forward special", "the same with cancellation, subnormals, -0, Inf, NaN", test_forward_special},
        {"backward", "dqkv equals the plain loop bit for bit at odd shapes", test_backward},
        {"backward special", "the same with cancellation, subnormals, -0, Inf, NaN", test_backward_special},
        {"cache", "queries from t0 on give the rows of the whole computation, bit for bit", test_cache},
        {"generation", "token by token gives the rows of one pass, bit for bit", test_generation},
        {"causality", "Inf and NaN in a token reach nothing that comes before it", test_causality},
        {"forward double", "the plain loop agrees with double at (2, 33, 32), 2 heads", test_forward_double},
        {"backward differences", "the plain loop agrees with finite differences", test_differences},
        {"obvious", "two tokens with equal keys: the mean of their values", test_obvious},
        {"far scores", "scores below -10000 do as the plain loop says", test_far_scores},
        {"rounding", "products round before they are added: no fused multiply-add", test_rounding},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
