/*
Promises of llmc/ops/forward_forward.h: corrupted rows differ and are functions of a key, goodness and its gradient
agree with double and with finite differences, and threads change no bit.
*/
#include "llmc/ops/forward_forward.h"
#include "llmc/test/op_promises.h"  // Op, op_main

// ---- corrupted data ----

static int* random_tokens(size_t n, int V, uint64_t seed) {
    int* tokens = (int*)new_array(n, sizeof(int));
    for (size_t i = 0; i < n; i++) { tokens[i] = (int)(splitmix64(seed, i) % (uint64_t)V); }
    return tokens;
}

static int count_replaced(const int* negatives, const int* tokens, int n) {
    int n_replaced = 0;
    for (int i = 0; i < n; i++) { n_replaced += negatives[i] != tokens[i]; }
    return n_replaced;
}

static void test_corrupt_rows(Test* t) {
    const float fractions[] = {0.0f, 0.05f, 0.5f, 1.0f};
    const int B = 50, lengths[] = {1, 2, 33};
    for (int i = 0; i < 4 * 3 * 2; i++) {
        const int T = lengths[i % 3], V = i < 12 ? 2 : 300;
        const float fraction = fractions[i / 3 % 4];
        int *tokens = random_tokens((size_t)B * T, V, 1), *negatives = random_tokens((size_t)B * T, V, 2);
        ff_corrupt(negatives, tokens, B, T, fraction, V, 77);
        for (int b = 0; b < B; b++) {
            int n = count_replaced(negatives + b * T, tokens + b * T, T);
            int as_asked = fraction > 0.0f ? (fraction < 1.0f ? n >= 1 : n == T) : n == 1;
            check(t, as_asked, "T %d, V %d, fraction %g: %d replaced in row %d", T, V, (double)fraction, n, b);
        }
        for (int n = 0; n < B * T; n++) {
            check(t, negatives[n] >= 0 && negatives[n] < V, "V %d: found %d", V, negatives[n]);
        }
        free(tokens), free(negatives);
    }
}

static void test_corrupt_draws(Test* t) {
    const int B = 40, T = 1000, V = 5, N = B * T;
    int *tokens = random_tokens((size_t)N, V, 1), *negatives = random_tokens((size_t)N, V, 2), counts[5] = {0};
    ff_corrupt(negatives, tokens, B, T, 0.3f, V, 5);
    int n_replaced = count_replaced(negatives, tokens, N);
    // binomial: standard deviations sqrt(40000 * 0.3 * 0.7) = 92 and sqrt(12000 * 0.2 * 0.8) = 44; five of them
    check(t, abs(n_replaced - 12000) < 460, "expected about 12000 replaced, found %d", n_replaced);
    for (int n = 0; n < N; n++) { counts[negatives[n]] += negatives[n] != tokens[n]; }
    for (int v = 0; v < V; v++) {
        check(t, abs(counts[v] - 2400) < 220, "token %d: expected about 2400, found %d", v, counts[v]);
    }
    int n_alike = 0, n_same_place = 0;
    for (int n = 0; n < T; n++) { n_alike += (negatives[n] != tokens[n]) == (negatives[T + n] != tokens[T + n]); }
    // 0.3^2 + 0.7^2 = 0.58 of them, standard deviation sqrt(1000 * 0.58 * 0.42) = 15.6
    check(t, n_alike < 580 + 78, "%d of 1000 places are alike in two rows", n_alike);
    ff_corrupt(negatives, tokens, B, T, 0.0f, V, 5);
    for (int n = 0; n < T; n++) { n_same_place += negatives[n] != tokens[n] && negatives[T + n] != tokens[T + n]; }
    check(t, n_same_place == 0, "two rows lose the token at the same place");
    free(tokens), free(negatives);
}

static void test_corrupt_key(Test* t) {
    const int T = 20, V = 100;
    int *tokens = random_tokens(8 * T, V, 1), *some = random_tokens(8 * T, V, 2), *all = random_tokens(8 * T, V, 2);
    for (int i = 0; i < 2; i++) {
        const float fraction = i ? 0.4f : 0.0f;
        ff_corrupt(all, tokens, 8, T, fraction, V, 5);
        ff_corrupt(some, tokens, 3, T, fraction, V, 5);
        check(t, memcmp(some, all, sizeof(int) * 3 * T) == 0, "fraction %g: three rows of eight are not those of three",
              (double)fraction);
        ff_corrupt(some, tokens, 8, T, fraction, V, 6);
        check(t, memcmp(some, all, sizeof(int) * 8 * T) != 0, "fraction %g: another key makes the same rows",
              (double)fraction);
        memcpy(some, tokens, sizeof(int) * 8 * T);
        ff_corrupt(some, some, 8, T, fraction, V, 5);
        check(t, memcmp(some, all, sizeof(int) * 8 * T) == 0, "fraction %g: in place it is not the same",
              (double)fraction);
    }
    free(tokens), free(some), free(all);
}

// ---- goodness ----

enum { O, LOSSES, DOUT };

static void goodness_ref(float* const* a, const int* d) {
    ff_goodness_ref(a[LOSSES], a[DOUT], a[O], 0.4f, d['r'], 0.7f, d['N'], d['M']);
}

static void goodness_fast(float* const* x, float* const* a, const int* d, const Device* dev) {
    ff_goodness(a[LOSSES], a[DOUT], a[O], 0.4f, d['r'], 0.7f, d['N'], d['M'], dev);
}

static const int shapes[][OP_DIMS] = {  // N, M, is it real?
    {1, 1, 0}, {7, 1, 1}, {33, 1, 0}, {257, 1, 1}, {1, 7, 0}, {7, 7, 1}, {33, 7, 0}, {257, 7, 1},
    {1, 33, 0}, {7, 33, 1}, {33, 33, 0}, {257, 33, 1}, {1, 257, 0}, {7, 257, 1}, {33, 257, 0}, {257, 257, 1},
    {1, 1, 1}, {7, 1, 0}, {33, 1, 1}, {257, 1, 0}, {1, 7, 1}, {7, 7, 0}, {33, 7, 1}, {257, 7, 0},
    {1, 33, 1}, {7, 33, 0}, {33, 33, 1}, {257, 33, 0}, {1, 257, 1}, {7, 257, 0}, {33, 257, 1}, {257, 257, 0}, {0},
};

static const Op goodness_rows = {
    .name = "goodness", .dims = "NMr",
    .arrays = {
        {O, "o", "NM", GIVEN, 2.0f},
        {LOSSES, "losses", "N", MADE},
        {DOUT, "dout", "NM", MADE, 0.0f, NULL, "o"},
    },
    .shapes = shapes, .traits = ROWS, .forward_ref = goodness_ref, .forward = {goodness_fast},
};

typedef struct {
    int N, M, is_real;
    double threshold, dloss;
} GoodnessCase;

static double goodness_loss(const double* o, void* arg) {
    const GoodnessCase* c = (const GoodnessCase*)arg;
    double loss = 0.0;
    for (int n = 0; n < c->N; n++) {
        double goodness = 0.0;
        for (int m = 0; m < c->M; m++) { goodness += o[n * c->M + m] * o[n * c->M + m] / c->M; }
        loss += c->dloss * log1p(exp(c->is_real ? c->threshold - goodness : goodness - c->threshold));
    }
    return loss;
}

static void test_goodness_double(Test* t) {
    GoodnessCase c = {7, 33, 0, 1.5, 0.25};
    Device dev = test_device(2);
    float *o = random_array(7 * 33, 3.0f, 1), *dout = filled_array(7 * 33, NAN), losses[7];
    double* at = double_array(o, 7 * 33);
    for (c.is_real = 0; c.is_real < 2; c.is_real++) {
        ff_goodness(losses, dout, o, 1.5f, c.is_real, 0.25f, 7, 33, &dev);
        double *want = finite_differences(goodness_loss, at, 7 * 33, &c), sum = 0.0;
        // G < 9 by 34 roundings moves the slope, 1/4 steep at most, by 34 * 2^-25 * 9 / 4 at most; times 2
        // * 3 / 33 / 4, and as many of it
        check_close(t, c.is_real ? "dout, real" : "dout, corrupted", dout, want, 7 * 33, 80 * 0x1p-24 * 6.0 / 33 / 4);
        for (int n = 0; n < 7; n++) { sum += (double)losses[n] * c.dloss; }
        double expected = goodness_loss(at, &c);
        check(t, fabs(sum - expected) < 7 * 40 * 0x1p-25 * 9 * c.dloss, "loss: found %g, expected %g", sum, expected);
        free(want);
    }
    free(o), free(dout), free(at);
    device_free(&dev);
}

static void test_goodness_obvious(Test* t) {
    Device dev = test_device(1);
    const float o[2] = {3.0f, -3.0f}, huge[2] = {1e30f, 1.0f};
    const float large[2] = {20.0f, 20.0f};  // G - threshold = 399: e to that power overflows, its softplus is itself
    float loss, dout[2];
    for (int is_real = 0; is_real < 2; is_real++) {
        const float sign = is_real ? -1.0f : 1.0f;
        // at the threshold: log 2, and half the slope of the goodness
        ff_goodness(&loss, dout, o, 9.0f, is_real, 1.0f, 1, 2, &dev);
        check(t, loss == 0.693147182f, "real %d: loss %.9g", is_real, (double)loss);
        check(t, dout[0] == sign * 1.5f && dout[1] == sign * -1.5f, "real %d: dout %g %g", is_real, (double)dout[0],
              (double)dout[1]);
        ff_goodness(&loss, dout, large, 1.0f, is_real, 1.0f, 1, 2, &dev);
        check(t, loss == (is_real ? 0.0f : 399.0f), "real %d, large: loss %g", is_real, (double)loss);
        // the goodness overflows: a perfect or a hopeless one
        ff_goodness(&loss, dout, huge, 1.0f, is_real, 1.0f, 1, 2, &dev);
        check(t, is_real ? loss == 0.0f : isinf(loss), "real %d, huge: loss %g", is_real, (double)loss);
        check(t, is_real ? dout[0] == 0.0f : dout[0] == 1e30f, "real %d, huge: dout %g", is_real, (double)dout[0]);
    }
    device_free(&dev);
}

#ifndef SYSTEM_LIBM
// with x = 1 + 2^-12, x * x rounds to 1 + 2^-11: only a fused multiply-add keeps the 2^-24, which the square before
// makes a 2^-23. The numbers are 32 times these; far above the threshold of 0 the loss is half of their squares' sum
static void test_goodness_rounding(Test* t) {
    enum { N = VLANES };
    const float want = 512.0f * (1.0f + 0x1p-11f + 0x1p-23f);
    float o[2 * N], dout[2 * N], plain[N], fast[N];
    Device dev = test_device(1);
    for (int n = 0; n < N; n++) { o[2 * n] = 32.0f * 0x1p-12f, o[2 * n + 1] = 32.0f * (1.0f + 0x1p-12f); }
    ff_goodness_ref(plain, dout, o, 0.0f, 0, 1.0f, N, 2);
    ff_goodness(fast, dout, o, 0.0f, 0, 1.0f, N, 2, &dev);
    for (int n = 0; n < N; n++) {
        check(t, plain[n] == want && fast[n] == want, "expected %.9g, found plain %.9g, fast %.9g", (double)want,
              (double)plain[n], (double)fast[n]);
    }
    device_free(&dev);
}
#endif

int main(int argc, char** argv) {
    Promise promises[] = {
        {"corrupt rows", "every row differs from the real one, by tokens of the vocabulary, also with V 2 and T 1",
         test_corrupt_rows},
        {"corrupt draws", "the asked fraction is replaced, all other tokens alike", test_corrupt_draws},
        {"corrupt key", "a position is a function of the key and its number; negatives may be tokens",
         test_corrupt_key},
        {"goodness double", "loss and dout agree with double and with finite differences", test_goodness_double},
        {"goodness obvious", "log 2 and half a slope at the threshold; an overflow stays harmless",
         test_goodness_obvious},
#ifndef SYSTEM_LIBM
        {"goodness rounding", "a square and its sum round once, together", test_goodness_rounding},
#endif
    };
    const Op* ops[] = {&goodness_rows};
    return op_main(argc, argv, ops, 1, promises, sizeof promises / sizeof promises[0]);
}
