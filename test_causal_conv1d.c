/*
Promises of llmc/ops/causal_conv1d.h. The plain loop is judged in double, by finite differences and on inputs whose
answer is obvious; the fast version must equal it bit for bit with every number of taps, with strides, histories and
starts of documents; and a sequence that comes in windows must have the bits of the whole.
*/
#include "llmc/ops/causal_conv1d.h"
#include "llmc/test/asked.h"
#include "llmc/test/test.h"

// one problem and the plain loop's answer. inp is the left part of rows of `stride` floats, and dinp is written over a
// copy of it
typedef struct {
    int B, T, C, K;
    size_t stride;
    float *inp, *weight, *bias, *history, *dout;  // given; history has rows that are not there
    unsigned char* starts;
    float *conv, *out, *dinp, *dweight, *dbias;   // found; dinp (B*T, stride)
} Conv;

enum { BIAS = 1, HISTORY = 2, STARTS = 4, ALL_PARTS = 8 };

// documents of 1 to 6 positions, some at the first of a row
static unsigned char* random_starts(size_t n, uint64_t seed) {
    unsigned char* starts = (unsigned char*)new_array(n, 1);
    uint64_t s = seeded_stream(seed);
    for (size_t i = 0; i < n; i++) { starts[i] = xorshift_u32(&s) % 4 == 0; }
    return starts;
}

// row b has the last b % K of the K-1 positions
static float* some_history(int B, int C, int K, int hard) {
    size_t row = (size_t)(K - 1) * (size_t)C;
    float* history = hard ? hard_array((size_t)B * row, 11) : random_array((size_t)B * row, 1.0f, 11);
    float* nothing = filled_array(row, conv1d_nothing());
    for (int b = 0; b < B; b++) {
        size_t n_missing = (size_t)(K - 1 - b % K) * (size_t)C;
        memcpy(history + (size_t)b * row, nothing, sizeof(float) * n_missing);
    }
    free(nothing);
    return history;
}

static void forward_ref(const Conv* p) {
    conv1d_forward_ref(p->conv, p->out, p->inp, p->stride, p->weight, p->bias, p->history, p->starts, p->B, p->T, p->C,
                       p->K);
}

static void backward_ref(const Conv* p) {
    conv1d_backward_ref(p->dinp, p->stride, p->dweight, p->dbias, p->dout, p->conv, p->inp, p->stride, p->weight,
                        p->history, p->starts, p->B, p->T, p->C, p->K);
}

// hard 1: cancellation, subnormals, -0; hard 2: also infinities and NaNs
static Conv conv_problem(int B, int T, int C, int K, int parts, int hard) {
    Conv p;
    p.B = B, p.T = T, p.C = C, p.K = K, p.stride = (size_t)(parts % 2 ? C : 2 * C + 3);
    size_t channels = (size_t)C, taps = channels * (size_t)K, n = (size_t)B * (size_t)T * channels,
           wide = (size_t)B * (size_t)T * p.stride;
    p.inp = hard ? hard_array(wide, 1) : random_array(wide, 1.0f, 1);
    p.weight = hard ? hard_array(taps, 2) : random_array(taps, 1.0f, 2);
    p.bias = !(parts & BIAS) ? NULL : hard ? hard_array(channels, 3) : random_array(channels, 1.0f, 3);
    p.history = parts & HISTORY ? some_history(B, C, K, hard) : NULL;
    p.starts = parts & STARTS ? random_starts((size_t)B * (size_t)T, 4) : NULL;
    p.dout = hard ? hard_array(n, 5) : random_array(n, 1.0f, 5);
    if (hard == 2) { sprinkle(p.inp, wide, 50, 6), sprinkle(p.weight, taps, 50, 7), sprinkle(p.dout, n, 50, 8); }
    p.conv = filled_array(n, 77.0f), p.out = filled_array(n, 77.0f), p.dinp = copied_array(p.inp, wide);
    p.dweight = filled_array(taps, 77.0f), p.dbias = p.bias ? filled_array(channels, 77.0f) : NULL;
    forward_ref(&p), backward_ref(&p);
    return p;
}

static void conv_free(Conv* p) {
    free(p->inp), free(p->weight), free(p->bias), free(p->history), free(p->dout), free(p->starts);
    free(p->conv), free(p->out), free(p->dinp), free(p->dweight), free(p->dbias);
}

// ---- fast against plain ----

static void check_forward(Test* t, const Conv* p, const Device* dev) {
    size_t n = (size_t)p->B * (size_t)p->T * (size_t)p->C;
    float *conv = filled_array(n, NAN), *out = filled_array(n, NAN);
    char what[96];
    snprintf(what, sizeof what, "conv, B %d, T %d, C %d, K %d, %d threads", p->B, p->T, p->C, p->K, dev->n_threads);
    conv1d_forward(conv, out, p->inp, p->stride, p->weight, p->bias, p->history, p->starts, p->B, p->T, p->C, p->K,
                   dev);
    check_bits(t, what, conv, p->conv, n);
    check_bits(t, "out", out, p->out, n);
    conv1d_forward(conv, conv, p->inp, p->stride, p->weight, p->bias, p->history, p->starts, p->B, p->T, p->C, p->K,
                   dev);
    check_bits(t, "conv is out", conv, p->out, n);
    free(conv), free(out);
}

static void check_backward(Test* t, const Conv* p, const Device* dev) {
    size_t rows = (size_t)p->B * (size_t)p->T, C = (size_t)p->C, taps = C * (size_t)p->K;
    float *dinp = copied_array(p->inp, rows * p->stride), *tight = filled_array(rows * C, NAN),
          *dweight = filled_array(taps, NAN), *dbias = filled_array(C, NAN);
    char what[96];
    snprintf(what, sizeof what, "dinp over inp, B %d, T %d, C %d, K %d, %d threads", p->B, p->T, p->C, p->K,
             dev->n_threads);
    conv1d_backward(dinp, p->stride, dweight, p->bias ? dbias : NULL, p->dout, p->conv, dinp, p->stride, p->weight,
                    p->history, p->starts, p->B, p->T, p->C, p->K, dev);
    check_bits(t, what, dinp, p->dinp, rows * p->stride);
    check_bits(t, "dweight", dweight, p->dweight, taps);
    if (p->bias) { check_bits(t, "dbias", dbias, p->dbias, C); }
    conv1d_backward(tight, C, dweight, p->bias ? dbias : NULL, p->dout, p->conv, p->inp, p->stride, p->weight,
                    p->history, p->starts, p->B, p->T, p->C, p->K, dev);
    for (size_t n = 0; n < rows; n++) {
        check_bits(t, "dinp of another stride", tight + n * C, p->dinp + n * p->stride, C);
    }
    check_bits(t, "dweight", dweight, p->dweight, taps);
    free(dinp), free(tight), free(dweight), free(dbias);
}

// d: dinp, dweight, dbias; inputs that nobody needs are NULL
static void asked_plain(float* const* d, const void* problem, const Device* dev) {
    const Conv* p = (const Conv*)problem;
    int any = d[0] || d[1] || d[2];
    (void)dev;
    conv1d_backward_ref(d[0], p->stride, d[1], d[2], any ? p->dout : NULL, any ? p->conv : NULL, d[1] ? p->inp : NULL,
                        p->stride, d[0] ? p->weight : NULL, d[1] ? p->history : NULL, any ? p->starts : NULL, p->B,
                        p->T, p->C, p->K);
}

static void asked_fast(float* const* d, const void* problem, const Device* dev) {
    const Conv* p = (const Conv*)problem;
    int any = d[0] || d[1] || d[2];
    conv1d_backward(d[0], p->stride, d[1], d[2], any ? p->dout : NULL, any ? p->conv : NULL, d[1] ? p->inp : NULL,
                    p->stride, d[0] ? p->weight : NULL, d[1] ? p->history : NULL, any ? p->starts : NULL, p->B, p->T,
                    p->C, p->K, dev);
}

static void test_asked(Test* t) {
    Device dev = test_device(3);
    for (int parts = 0; parts < ALL_PARTS; parts++) {
        Conv p = conv_problem(2, 17, 37, 4, parts, 1);
        size_t n_inp = (size_t)p.B * (size_t)p.T * p.stride, C = (size_t)p.C;
        float* before = filled_array(n_inp, 77.0f);  // and 77 it stays between the rows
        const AskedGradient gradients[] = {{"dinp", n_inp, before},
                                           {"dweight", C * (size_t)p.K, NULL},
                                           {"dbias", C, NULL}};
        check_asked(t, "plain", gradients, 3, asked_plain, &p, &dev);
        check_asked(t, "fast", gradients, 3, asked_fast, &p, &dev);
        free(before);
        conv_free(&p);
    }
    device_free(&dev);
}

static void check_problem(Test* t, int B, int T, int C, int K, int parts, int hard) {
    Conv p = conv_problem(B, T, C, K, parts, hard);
    for (int j = 0; j < N_TEST_THREADS; j++) {
        Device dev = test_device(test_threads(j));
        check_forward(t, &p, &dev);
        check_backward(t, &p, &dev);
        device_free(&dev);
    }
    conv_free(&p);
}

static void check_shapes(Test* t, int hard) {
    const int shapes[][4] = {  // B, T, C, K; each with every choice of bias, history and starts
        {1, 1, 1, 1}, {1, 1, 7, 4}, {2, 7, 33, 4}, {3, 33, 7, 4}, {5, 2, 17, 5}, {1, 5, 257, 3},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (int parts = 0; parts < ALL_PARTS; parts++) {
            check_problem(t, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], parts, hard);
        }
    }
}

static void test_shapes(Test* t) { check_shapes(t, 0); }

static void test_special(Test* t) {
    check_shapes(t, 1);
    check_shapes(t, 2);
}

static void test_taps(Test* t) {
    for (int K = 1; K <= CONV1D_MOST_TAPS; K++) {
        check_problem(t, 3, 19, 21, K, BIAS | (K % 4) << 1, 0);
        check_problem(t, K, 3, 5, K, BIAS | HISTORY | STARTS, 0);  // windows shorter than what the taps reach
    }
}

// several blocks of channels for a thread, the last not full
static void test_wide(Test* t) { check_problem(t, 2, 9, 2 * CONV1D_WIDTH + 37, 4, BIAS | HISTORY | STARTS, 0); }

// ---- windows ----

// the T positions from `first` of all rows: forward, and the history goes on
static void check_window(Test* t, const Conv* p, float* history, int first, int T, const Device* dev) {
    int B = p->B, C = p->C, K = p->K;
    size_t row = (size_t)T * (size_t)C, wide = (size_t)T * p->stride;
    float *inp = filled_array((size_t)B * wide, NAN), *conv = filled_array((size_t)B * row, NAN),
          *out = filled_array((size_t)B * row, NAN);
    unsigned char* starts = p->starts ? (unsigned char*)new_array((size_t)(B * T), 1) : NULL;
    for (int b = 0; b < B; b++) {
        size_t from = (size_t)b * (size_t)p->T + (size_t)first;
        memcpy(inp + (size_t)b * wide, p->inp + from * p->stride, sizeof(float) * wide);
        if (starts) { memcpy(starts + b * T, p->starts + from, (size_t)T); }
    }
    conv1d_forward(conv, out, inp, p->stride, p->weight, p->bias, history, starts, B, T, C, K, dev);
    conv1d_history(history, inp, p->stride, starts, B, T, C, K);
    for (int b = 0; b < B; b++) {
        size_t from = ((size_t)b * (size_t)p->T + (size_t)first) * (size_t)C;
        char what[96];
        snprintf(what, sizeof what, "row %d, K %d, window of %d from %d", b, K, T, first);
        check_bits(t, what, conv + (size_t)b * row, p->conv + from, row);
        check_bits(t, "out", out + (size_t)b * row, p->out + from, row);
    }
    free(inp), free(conv), free(out), free(starts);
}

// windows of these lengths, over and over
static void check_windows(Test* t, const Conv* p, const int* lengths, int n_lengths, const Device* dev) {
    float* history = filled_array((size_t)(p->B * (p->K - 1) * p->C), conv1d_nothing());
    if (p->history) { memcpy(history, p->history, sizeof(float) * (size_t)(p->B * (p->K - 1) * p->C)); }
    for (int i = 0, first = 0, T; first < p->T; i++, first += T) {
        T = lengths[i % n_lengths] < p->T - first ? lengths[i % n_lengths] : p->T - first;
        check_window(t, p, history, first, T, dev);
    }
    free(history);
}

static void test_windows(Test* t) {
    const int one[] = {1}, uneven[] = {3, 1, 7, 2}, taps[] = {1, 2, 3, 4, 5, 16};
    Device dev = test_device(2);
    for (size_t i = 0; i < sizeof taps / sizeof *taps; i++) {
        for (int parts = 0; parts < ALL_PARTS; parts++) {
            Conv p = conv_problem(3, 23, 9, taps[i], parts, 2);
            for (int first = 1; first < p.T; first++) {
                const int halves[] = {first, p.T - first};
                check_windows(t, &p, halves, 2, &dev);
            }
            check_windows(t, &p, one, 1, &dev);
            check_windows(t, &p, uneven, 4, &dev);
            conv_free(&p);
        }
    }
    device_free(&dev);
}

// Sums of nothing but -0 and an infinite weight tell a tap that is left out from one that meets a zero. In one window,
// then position by position: where a document began, the history has nothing before it
static void test_left_out(Test* t) {
    const float inp[] = {1.0f, 2.0f, 3.0f, 4.0f}, weight[] = {INFINITY, -0.0f, -0.0f}, bias[] = {-0.0f};
    const float want[] = {-0.0f, -0.0f, -0.0f, -0.0f};
    const unsigned char starts[] = {0, 0, 1, 0};
    float history[] = {conv1d_nothing(), conv1d_nothing()}, conv[4], out[4];
    Device dev = test_device(1);
    conv1d_forward(conv, out, inp, 1, weight, bias, history, starts, 1, 4, 1, 3, &dev);
    check_bits(t, "one window", conv, want, 4);
    for (int i = 0; i < 4; i++) {
        conv1d_forward(conv + i, out, inp + i, 1, weight, bias, history, starts + i, 1, 1, 1, 3, &dev);
        conv1d_history(history, inp + i, 1, starts + i, 1, 1, 1, 3);
    }
    check_bits(t, "position by position", conv, want, 4);
    device_free(&dev);
}

// ---- starts ----

// a document computes what it would alone, forward and backward; the history is seen only by what goes on from it
static void check_document(Test* t, const Conv* p, int b, int first, int last) {
    size_t C = (size_t)p->C, from = (size_t)b * (size_t)p->T + (size_t)first;
    int T = last - first, goes_on = first == 0 && !(p->starts[from]);
    Conv d = conv_problem(1, T, p->C, p->K, 0, 0);
    free(d.inp), free(d.dinp), free(d.dout), free(d.weight);
    d.stride = p->stride;
    d.inp = copied_array(p->inp + from * p->stride, (size_t)T * p->stride),
    d.dinp = copied_array(d.inp, (size_t)T * p->stride);
    d.dout = copied_array(p->dout + from * C, (size_t)T * C), d.weight = copied_array(p->weight, C * (size_t)p->K);
    d.bias = copied_array(p->bias, C), d.dbias = filled_array(C, NAN);
    d.history = goes_on ? copied_array(p->history + (size_t)b * (size_t)(p->K - 1) * C, (size_t)(p->K - 1) * C) : NULL;
    forward_ref(&d), backward_ref(&d);
    char what[96];
    snprintf(what, sizeof what, "conv of the document %d .. %d in row %d", first, last - 1, b);
    check_bits(t, what, p->conv + from * C, d.conv, (size_t)T * C);
    check_bits(t, "out", p->out + from * C, d.out, (size_t)T * C);
    check_bits(t, "dinp", p->dinp + from * p->stride, d.dinp, (size_t)T * p->stride);
    conv_free(&d);
}

static void test_documents(Test* t) {
    Conv p = conv_problem(7, 29, 5, 4, BIAS | HISTORY | STARTS, 0);
    int n_goes_on = 0, n_hidden = 0;
    for (int b = 0; b < p.B; b++) {
        for (int first = 0, last; first < p.T; first = last) {
            for (last = first + 1; last < p.T && !p.starts[b * p.T + last]; last++) {}
            check_document(t, &p, b, first, last);
        }
        n_hidden += p.starts[b * p.T], n_goes_on += !p.starts[b * p.T];
    }
    check(t, n_goes_on > 0 && n_hidden > 0, "expected rows of both kinds, found %d and %d", n_goes_on, n_hidden);
    conv_free(&p);
}

// ---- the plain loop itself ----

// x: inp (B*T, C), then weight, then bias
static void conv_double(double* out, const double* x, const Conv* p) {
    const double *weight = x + p->B * p->T * p->C, *bias = weight + p->C * p->K;
    Conv1dWindow w = {p->inp, p->stride, p->history, p->starts, p->T, p->C, p->K};
    for (int i = 0; i < p->B * p->T * p->C; i++) {
        int c = i % p->C, t = i / p->C % p->T, b = i / p->C / p->T;
        double sum = bias[c];
        for (int k = p->K - 1; k >= 0; k--) {  // back in time: a start ends it
            int s = t - (p->K - 1) + k;
            if (s < 0 && (!p->history || conv1d_is_nothing_(conv1d_input_(&w, b, s)))) { break; }
            sum += weight[c * p->K + k] * (s >= 0 ? x[(b * p->T + s) * p->C + c] : (double)conv1d_input_(&w, b, s)[c]);
            if (s >= 0 && p->starts && p->starts[b * p->T + s]) { break; }
        }
        out[i] = sum / (1.0 + exp(-sum));
    }
}

static double conv_loss(const double* x, void* arg) {
    const Conv* p = (const Conv*)arg;
    int n = p->B * p->T * p->C;
    double loss = 0.0, *out = double_array(p->out, (size_t)n);
    conv_double(out, x, p);
    for (int i = 0; i < n; i++) { loss += out[i] * (double)p->dout[i]; }
    free(out);
    return loss;
}

static void check_differences(Test* t, int K, int parts) {
    Conv p = conv_problem(3, 11, 5, K, parts | BIAS, 0);  // with BIAS the stride is C
    size_t n = 3 * 11 * 5, taps = 5 * (size_t)K;
    float* x = filled_array(n + taps + 5, 0.0f);
    memcpy(x, p.inp, sizeof(float) * n), memcpy(x + n, p.weight, sizeof(float) * taps);
    memcpy(x + n + taps, p.bias, sizeof(float) * 5);
    double *at = double_array(x, n + taps + 5), *want_out = double_array(x, n);
    double* want = finite_differences(conv_loss, at, n + taps + 5, &p);
    conv_double(want_out, at, &p);
    check_close(t, "out", p.out, want_out, n, rounding_walk(2 * K + 4, 1.0 + K));
    // a term has the slope, which the roundings of conv, below 1 + K, move; dinp has K terms, the others one per
    // position
    check_close(t, "dinp", p.dinp, want, n, rounding_walk(4 * K + 16, 2.0 + K));
    check_close(t, "dweight", p.dweight, want + n, taps, rounding_walk(33 * 16, 4.0 + K));
    check_close(t, "dbias", p.dbias, want + n + taps, 5, rounding_walk(33 * 16, 4.0 + K));
    free(x), free(at), free(want_out), free(want);
    conv_free(&p);
}

static void test_differences(Test* t) {
    for (int parts = 0; parts < ALL_PARTS; parts += 2) {
        check_differences(t, 1, parts);
        check_differences(t, 4, parts);
        check_differences(t, 7, parts);
    }
}

// an impulse shows the taps, last first; an impulse of the gradient shows them backwards
static void test_obvious(Test* t) {
    const float weight[] = {1, 2, 3, 4}, inp[] = {0, 1, 0, 0, 0, 0}, want_conv[] = {0, 4, 3, 2, 1, 0},
                dout[] = {0, 0, 0, 0, 1, 0};
    const float conv_zero[6] = {0};  // silu'(0) = 1/2
    const float want_dinp[] = {0, 0.5f, 1.0f, 1.5f, 2.0f, 0}, want_dweight[] = {0.5f, 0, 0, 0};
    float conv[6], out[6], dinp[6], dweight[4], dbias[1];
    Device dev = test_device(1);
    conv1d_forward(conv, out, inp, 1, weight, NULL, NULL, NULL, 1, 6, 1, 4, &dev);
    conv1d_backward(dinp, 1, dweight, dbias, dout, conv_zero, inp, 1, weight, NULL, NULL, 1, 6, 1, 4, &dev);
    check_bits(t, "conv", conv, want_conv, 6);
    for (int i = 0; i < 6; i++) { check(t, out[i] == silu_one(conv[i]), "out[%d]: found %g", i, (double)out[i]); }
    check_bits(t, "dinp", dinp, want_dinp, 6);
    check_bits(t, "dweight", dweight, want_dweight, 4);
    check(t, dbias[0] == 0.5f, "dbias: found %g", (double)dbias[0]);
    device_free(&dev);
}

static void too_many_taps(void* arg) {
    Device dev = test_device(1);
    float* x = (float*)arg;
    conv1d_forward(x, x, x, 1, x, NULL, NULL, NULL, 1, 1, 1, CONV1D_MOST_TAPS + 1, &dev);
}

static void test_too_many(Test* t) {
    float x[CONV1D_MOST_TAPS + 1] = {0};
    check_exit(t, "17 taps", too_many_taps, x, 1, "17 taps: expected 1 to 16");
}

int main(int argc, char** argv) {
    Promise promises[] = {
        // it forks, so it comes before there are threads
        {"too many", "more taps than fit stop the program", test_too_many},
        {"shapes", "forward and backward equal the plain loop, with strides, histories, starts, dinp over inp",
         test_shapes},
        {"special", "the same with cancellation, subnormals, -0, Inf, NaN", test_special},
        {"asked", "gradients that nobody asks for are NULL: the others keep their bits", test_asked},
        {"taps", "the same with 1 to 16 taps, also in windows shorter than that", test_taps},
        {"wide", "the same with several blocks of channels", test_wide},
        {"windows", "a sequence cut anywhere, or into single positions, has the bits of the whole", test_windows},
        {"left out", "a tap before the beginning is left out; it does not meet a zero", test_left_out},
        {"documents", "a document computes what it would alone; its start hides the history", test_documents},
        {"differences", "out and gradients agree with double and finite differences, with histories and starts",
         test_differences},
        {"obvious", "an impulse shows the taps, forward and backward", test_obvious},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
