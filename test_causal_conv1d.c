/*
Promises of llmc/ops/causal_conv1d.h, which follow from the table (llmc/test/op.h) with every number of taps, with
strides, histories and starts of documents; and a sequence that comes in windows must have the bits of the whole.
*/
#include "llmc/ops/causal_conv1d.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

enum { INP, WEIGHT, BIAS, HISTORY, STARTS, CONV, OUT, DOUT, AHEAD, DINP, DWEIGHT, DBIAS };
enum { WITH_BIAS = 1, WITH_HISTORY = 2, WITH_STARTS = 4, ALL_PARTS = 8, WITH_AHEAD = 8 };  // d['p']: which there are

// starts as the op takes them, or NULL; the caller frees
static unsigned char* some_starts(float* const* a, const int* d) {
    const int* starts = (const int*)a[STARTS];
    if (!(d['p'] & WITH_STARTS) || !starts) { return NULL; }
    unsigned char* bytes = (unsigned char*)new_array((size_t)(d['B'] * d['T']), 1);
    for (int n = 0; n < d['B'] * d['T']; n++) { bytes[n] = (unsigned char)starts[n]; }
    return bytes;
}

static float* some_bias(float* const* a, const int* d) { return d['p'] & WITH_BIAS ? a[BIAS] : NULL; }
static float* some_history(float* const* a, const int* d) { return d['p'] & WITH_HISTORY ? a[HISTORY] : NULL; }

static float* some_ahead(float* const* a, const int* d) { return d['p'] & WITH_AHEAD ? a[AHEAD] : NULL; }

static void forward_ref(float* const* a, const int* d) {
    unsigned char* starts = some_starts(a, d);
    conv1d_forward_ref(a[CONV], a[OUT], a[INP], (size_t)d['S'], a[WEIGHT], some_bias(a, d), some_history(a, d), starts,
                       d['B'], d['T'], d['C'], d['K']);
    free(starts);
}

static void forward(float* const* x, float* const* a, const int* d, const Device* dev) {
    unsigned char* starts = some_starts(a, d);
    conv1d_forward(a[CONV], a[OUT], a[INP], (size_t)d['S'], a[WEIGHT], some_bias(a, d), some_history(a, d), starts,
                   d['B'], d['T'], d['C'], d['K'], dev);
    free(starts);
}

static void backward_ref(float* const* a, const int* d) {
    unsigned char* starts = some_starts(a, d);
    conv1d_backward_ref(a[DINP], (size_t)d['D'], a[DWEIGHT], a[DBIAS], a[DOUT], a[CONV], a[INP], (size_t)d['S'],
                        a[WEIGHT], some_history(a, d), some_ahead(a, d), starts, d['B'], d['T'], d['C'], d['K']);
    free(starts);
}

static void backward(float* const* x, float* const* a, const int* d, const Device* dev) {
    unsigned char* starts = some_starts(a, d);
    conv1d_backward(a[DINP], (size_t)d['D'], a[DWEIGHT], a[DBIAS], a[DOUT], a[CONV], a[INP], (size_t)d['S'], a[WEIGHT],
                    some_history(a, d), some_ahead(a, d), starts, d['B'], d['T'], d['C'], d['K'], dev);
    free(starts);
}

// documents of 1 to 6 positions, some at the first of a row; of the history row b has the last b % K positions,
// of what is ahead the first b % K
static void fill(float* const* a, const int* d) {
    for (int n = 0; n < d['B'] * d['T']; n++) { ((int*)a[STARTS])[n] = splitmix64(4, (uint64_t)n) % 4 == 0; }
    for (int b = 0; b < d['B']; b++) {
        float* row = a[HISTORY] + b * d['k'] * d['C'];
        for (int i = 0; i < (d['k'] - b % d['K']) * d['C']; i++) { row[i] = conv1d_nothing(); }
        float* behind = a[AHEAD] + b * d['k'] * d['C'];
        for (int i = b % d['K'] * d['C']; i < d['k'] * d['C']; i++) { behind[i] = conv1d_nothing(); }
    }
}

static void in_double(double* const* a, const int* d) {
    for (int i = 0, T = d['T'], C = d['C'], K = d['K']; i < d['B'] * T * C; i++) {
        int c = i % C, t = i / C % T, b = i / C / T;
        double sum = d['p'] & WITH_BIAS ? a[BIAS][c] : 0.0;
        for (int s = t; s > t - K; s--) {  // back in time: a start ends it
            const double* history = a[HISTORY] + (b * d['k'] + d['k'] + s) * C;
            if (s < 0 && (!(d['p'] & WITH_HISTORY) || isnan(history[0]))) { break; }
            sum += a[WEIGHT][c * K + s - t + K - 1] * (s >= 0 ? a[INP][(b * T + s) * d['S'] + c] : history[c]);
            if (s >= 0 && d['p'] & WITH_STARTS && a[STARTS][b * T + s] != 0.0) { break; }
        }
        a[CONV][i] = sum, a[OUT][i] = sum / (1.0 + exp(-sum));
    }
}

static double error(int array, const int* d) {
    const int K = d['K'];
    switch (array) {
        case CONV: case OUT: return rounding_walk(2 * K + 4, 1.0 + K);
        // a term has the slope, which the roundings of conv, below 1 + K, move; dinp has K terms, the others one per
        // position
        case DINP: return rounding_walk(4 * K + 16, 2.0 + K);
        default: return rounding_walk(33 * 16, 4.0 + K);
    }
}

// B, T, C, K, K - 1, strides of inp and of dinp, parts; conv1d_shapes writes them
static int shapes[160][OP_DIMS];

static const Op conv1d = {
    .name = "conv1d", .dims = "BTCKkSDp",
    .arrays = {
        {INP, "inp", "BTS", GIVEN, 1.0f, "dweight"},
        {WEIGHT, "weight", "CK", GIVEN, 1.0f, "dinp"},
        {BIAS, "bias", "C", GIVEN, 1.0f, ""},
        {HISTORY, "history", "BkC", GIVEN, 1.0f, "dweight"},
        {.number = STARTS, .name = "starts", .extents = "BT", .role = GIVEN | INDEX, .needed = "dinp dweight dbias",
         .below = 'B'},
        {CONV, "conv", "BTC", MADE, 0.0f, "dinp dweight dbias"},
        {OUT, "out", "BTC", MADE, 0.0f, "", "conv"},
        {DOUT, "dout", "BTC", GIVEN, 1.0f, "dinp dweight dbias"},
        {AHEAD, "ahead", "BkC", GIVEN, 1.0f, "dinp"},
        {DINP, "dinp", "BTD", GRADIENT | PARTLY | ASKED, 1.0f, NULL, "inp"},
        {DWEIGHT, "dweight", "CK", GRADIENT | ASKED},
        {DBIAS, "dbias", "C", GRADIENT | ASKED},
    },
    .shapes = shapes, .traits = ROWS, .fill = fill,
    .forward_ref = forward_ref, .forward = {forward}, .backward_ref = backward_ref, .backward = {backward},
    .in_double = in_double, .error = error, .judged = {
        {3, 11, 5, 1, 0, 5, 5, 1}, {3, 11, 5, 1, 0, 5, 5, 3}, {3, 11, 5, 1, 0, 5, 5, 5}, {3, 11, 5, 1, 0, 5, 5, 7},
        {3, 11, 5, 4, 3, 5, 5, 1}, {3, 11, 5, 4, 3, 5, 5, 3}, {3, 11, 5, 4, 3, 5, 5, 5}, {3, 11, 5, 4, 3, 5, 5, 7},
        {3, 11, 5, 7, 6, 5, 5, 1}, {3, 11, 5, 7, 6, 5, 5, 3}, {3, 11, 5, 7, 6, 5, 5, 5}, {3, 11, 5, 7, 6, 5, 5, 7},
    },
};

// inp is the left part of wider rows, or alone in its own; dinp lies as inp does, or `apart` in rows of C
static void shape_of(int* shape, int B, int T, int C, int K, int parts, int apart) {
    int S = parts % 2 ? C : 2 * C + 3, row[OP_DIMS] = {B, T, C, K, K - 1, S, apart ? C : S, parts};
    memcpy(shape, row, sizeof row);
}

static void conv1d_shapes(void) {
    const int base[][4] = {{1, 1, 1, 1}, {1, 1, 7, 4}, {2, 7, 33, 4}, {3, 33, 7, 4}, {5, 2, 17, 5}, {1, 5, 257, 3},
                           {2, 17, 37, 4}};
    int n = 0;
    for (int i = 0; i < 7 * ALL_PARTS; i++) {
        const int* b = base[i / ALL_PARTS];
        shape_of(shapes[n++], b[0], b[1], b[2], b[3], i % ALL_PARTS, 0);
        shape_of(shapes[n++], b[0], b[1], b[2], b[3], i % ALL_PARTS | WITH_AHEAD, 1);
    }
    for (int K = 1; K <= CONV1D_MOST_TAPS; K++) {
        shape_of(shapes[n++], 3, 19, 21, K, WITH_BIAS | (K % 4) << 1, 0);
        // windows shorter than what the taps reach
        shape_of(shapes[n++], K, 3, 5, K, WITH_BIAS | WITH_HISTORY | WITH_STARTS | WITH_AHEAD, 0);
    }
    // several blocks of channels for a thread, the last not full
    shape_of(shapes[n++], 2, 9, 2 * CONV1D_WIDTH + 37, 4, WITH_BIAS | WITH_HISTORY | WITH_STARTS | WITH_AHEAD, 0);
}

// ---- windows ----

// the T positions from `first` of all rows: forward, and the history goes on
static void check_window(Test* t, const OpProblem* p, float* history, int first, int T, const Device* dev) {
    const int B = p->d['B'], C = p->d['C'], K = p->d['K'], *all_starts = (const int*)p->a[STARTS];
    size_t S = (size_t)p->d['S'], row = (size_t)T * (size_t)C, wide = (size_t)T * S;
    float *inp = filled_array((size_t)B * wide, NAN), *conv = filled_array((size_t)B * row, NAN),
          *out = filled_array((size_t)B * row, NAN);
    unsigned char* starts = p->d['p'] & WITH_STARTS ? (unsigned char*)new_array((size_t)(B * T), 1) : NULL;
    for (int b = 0; b < B; b++) {
        int from = b * p->d['T'] + first;
        memcpy(inp + (size_t)b * wide, p->a[INP] + (size_t)from * S, sizeof(float) * wide);
        for (int i = 0; starts && i < T; i++) { starts[b * T + i] = (unsigned char)all_starts[from + i]; }
    }
    conv1d_forward(conv, out, inp, S, p->a[WEIGHT], some_bias(p->a, p->d), history, starts, B, T, C, K, dev);
    conv1d_history(history, inp, S, starts, B, T, C, K);
    for (int b = 0; b < B; b++) {
        size_t from = (size_t)(b * p->d['T'] + first) * (size_t)C;
        char what[96];
        snprintf(what, sizeof what, "row %d, K %d, window of %d from %d", b, K, T, first);
        check_bits(t, what, conv + (size_t)b * row, p->a[CONV] + from, row);
        check_bits(t, "out", out + (size_t)b * row, p->a[OUT] + from, row);
    }
    free(inp), free(conv), free(out), free(starts);
}

// backward of the same positions: dinp has the bits of the whole, and what the windows before need goes to them
static void check_window_back(Test* t, const OpProblem* p, float* ahead, int first, int T, const Device* dev) {
    const int B = p->d['B'], C = p->d['C'], K = p->d['K'], *all_starts = (const int*)p->a[STARTS];
    size_t S = (size_t)p->d['S'], D = (size_t)p->d['D'], row = (size_t)T * (size_t)C;
    float *dinp = filled_array((size_t)(B * T) * D, NAN), *inp = filled_array((size_t)(B * T) * S, NAN),
          *conv = filled_array((size_t)B * row, NAN), *dout = filled_array((size_t)B * row, NAN);
    unsigned char* starts = p->d['p'] & WITH_STARTS ? (unsigned char*)new_array((size_t)(B * T), 1) : NULL;
    for (int b = 0; b < B; b++) {
        const int from = b * p->d['T'] + first;
        memcpy(conv + (size_t)b * row, p->a[CONV] + (size_t)(from * C), sizeof(float) * row);
        memcpy(dout + (size_t)b * row, p->a[DOUT] + (size_t)(from * C), sizeof(float) * row);
        for (int i = 0; starts && i < T; i++) { starts[b * T + i] = (unsigned char)all_starts[from + i]; }
    }
    conv1d_backward(dinp, D, NULL, NULL, dout, conv, inp, S, p->a[WEIGHT], NULL, ahead, starts, B, T, C, K, dev);
    conv1d_ahead(ahead, dout, conv, starts, B, T, C, K);
    for (int n = 0; n < B * T; n++) {
        char what[96];
        snprintf(what, sizeof what, "dinp, row %d, K %d, position %d of %d from %d", n / T, K, n % T, T, first);
        check_bits(t, what, dinp + (size_t)n * D,
                   p->a[DINP] + (size_t)(n / T * p->d['T'] + first + n % T) * D, (size_t)C);
    }
    free(dinp), free(inp), free(conv), free(dout), free(starts);
}

// windows of these lengths, the last first
static void check_windows_back(Test* t, const OpProblem* p, const int* lengths, int n_lengths, const Device* dev) {
    const size_t n = op_length(p, AHEAD);
    float* given = some_ahead(p->a, p->d);
    float* ahead = given ? copied_array(given, n) : filled_array(n, conv1d_nothing());
    for (int i = 0, end = p->d['T'], T; end > 0; i++, end -= T) {
        T = lengths[i % n_lengths] < end ? lengths[i % n_lengths] : end;
        check_window_back(t, p, ahead, end - T, T, dev);
    }
    free(ahead);
}

// windows of these lengths, over and over
static void check_windows(Test* t, const OpProblem* p, const int* lengths, int n_lengths, const Device* dev) {
    size_t n = op_length(p, HISTORY);
    float* given = some_history(p->a, p->d);
    float* history = given ? copied_array(given, n) : filled_array(n, conv1d_nothing());
    for (int i = 0, first = 0, T; first < p->d['T']; i++, first += T) {
        T = lengths[i % n_lengths] < p->d['T'] - first ? lengths[i % n_lengths] : p->d['T'] - first;
        check_window(t, p, history, first, T, dev);
    }
    free(history);
}

static void test_windows(Test* t) {
    const int one[] = {1}, uneven[] = {3, 1, 7, 2}, taps[] = {1, 2, 3, 4, 5, 16};
    int shape[OP_DIMS];
    Device dev = test_device(2);
    for (int i = 0; i < 6 * ALL_PARTS; i++) {
        shape_of(shape, 3, 23, 9, taps[i / ALL_PARTS], i % ALL_PARTS, 0);
        OpProblem p = op_problem(&conv1d, shape, FEW_SPECIALS, 0);
        for (int first = 1; first < 23; first++) {
            const int halves[] = {first, 23 - first};
            check_windows(t, &p, halves, 2, &dev);
        }
        check_windows(t, &p, one, 1, &dev);
        check_windows(t, &p, uneven, 4, &dev);
        op_problem_free(&p);
    }
    device_free(&dev);
}

static void test_windows_back(Test* t) {
    const int one[] = {1}, uneven[] = {3, 1, 7, 2}, taps[] = {1, 2, 3, 4, 5, 16};
    int shape[OP_DIMS];
    Device dev = test_device(2);
    for (int i = 0; i < 6 * 2 * ALL_PARTS; i++) {
        shape_of(shape, 3, 23, 9, taps[i / (2 * ALL_PARTS)], i % (2 * ALL_PARTS), i % 2);
        OpProblem p = op_problem(&conv1d, shape, FEW_SPECIALS, 0);
        for (int first = 1; first < 23; first++) {
            const int halves[] = {23 - first, first};
            check_windows_back(t, &p, halves, 2, &dev);
        }
        check_windows_back(t, &p, one, 1, &dev);
        check_windows_back(t, &p, uneven, 4, &dev);
        op_problem_free(&p);
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
static void check_document(Test* t, const OpProblem* p, int b, int first, int last) {
    const int T = last - first, K = p->d['K'], from = b * p->d['T'] + first;
    const int goes_on = first == 0 && !((int*)p->a[STARTS])[from];
    const size_t C = (size_t)p->d['C'], S = (size_t)p->d['S'], n = (size_t)T * C, history = (size_t)(K - 1) * C;
    int shape[OP_DIMS];
    char what[96];
    shape_of(shape, 1, T, (int)C, K, WITH_BIAS | (goes_on ? WITH_HISTORY : 0), 0);
    OpProblem q = op_problem(&conv1d, shape, EASY, 0);
    memcpy(q.a[INP], p->a[INP] + (size_t)from * S, sizeof(float) * (size_t)T * S);
    memcpy(q.a[DOUT], p->a[DOUT] + (size_t)from * C, sizeof(float) * n);
    memcpy(q.a[WEIGHT], p->a[WEIGHT], sizeof(float) * op_length(p, WEIGHT));
    memcpy(q.a[BIAS], p->a[BIAS], sizeof(float) * C);
    memcpy(q.a[HISTORY], p->a[HISTORY] + (size_t)b * history, sizeof(float) * history);
    op_solve(&q);
    snprintf(what, sizeof what, "conv of the document %d .. %d in row %d", first, last - 1, b);
    check_bits(t, what, p->a[CONV] + (size_t)from * C, q.a[CONV], n);
    check_bits(t, "out", p->a[OUT] + (size_t)from * C, q.a[OUT], n);
    check_bits(t, "dinp", p->a[DINP] + (size_t)from * S, q.a[DINP], n);
    op_problem_free(&q);
}

static void test_documents(Test* t) {
    int shape[OP_DIMS], n_goes_on = 0, n_hidden = 0;
    shape_of(shape, 7, 29, 5, 4, WITH_BIAS | WITH_HISTORY | WITH_STARTS, 0);
    OpProblem p = op_problem(&conv1d, shape, EASY, 0);
    const int* starts = (const int*)p.a[STARTS];
    for (int b = 0; b < 7; b++) {
        for (int first = 0, last; first < 29; first = last) {
            for (last = first + 1; last < 29 && !starts[b * 29 + last]; last++) {}
            check_document(t, &p, b, first, last);
        }
        n_hidden += starts[b * 29], n_goes_on += !starts[b * 29];
    }
    check(t, n_goes_on > 0 && n_hidden > 0, "expected rows of both kinds, found %d and %d", n_goes_on, n_hidden);
    op_problem_free(&p);
}

// ---- what is obvious ----

// an impulse shows the taps, last first; an impulse of the gradient shows them backwards
static void test_obvious(Test* t) {
    const float weight[] = {1, 2, 3, 4}, inp[] = {0, 1, 0, 0, 0, 0}, want_conv[] = {0, 4, 3, 2, 1, 0},
                dout[] = {0, 0, 0, 0, 1, 0};
    const float conv_zero[6] = {0};  // silu'(0) = 1/2
    const float want_dinp[] = {0, 0.5f, 1.0f, 1.5f, 2.0f, 0}, want_dweight[] = {0.5f, 0, 0, 0};
    float conv[6], out[6], dinp[6], dweight[4], dbias[1];
    Device dev = test_device(1);
    conv1d_forward(conv, out, inp, 1, weight, NULL, NULL, NULL, 1, 6, 1, 4, &dev);
    conv1d_backward(dinp, 1, dweight, dbias, dout, conv_zero, inp, 1, weight, NULL, NULL, NULL, 1, 6, 1, 4, &dev);
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
    const Op* ops[] = {&conv1d};
    const Promise promises[] = {
        // it forks, so it comes before there are threads
        {"too many", "more taps than fit stop the program", test_too_many},
        {"windows", "a sequence cut anywhere, or into single positions, has the bits of the whole", test_windows},
        {"windows back", "gradients of a sequence cut so, the last window first, have the bits of the whole",
         test_windows_back},
        {"left out", "a tap before the beginning is left out; it does not meet a zero", test_left_out},
        {"documents", "a document computes what it would alone; its start hides the history", test_documents},
        {"obvious", "an impulse shows the taps, forward and backward", test_obvious},
    };
    conv1d_shapes();
    return op_main(argc, argv, ops, 1, promises, sizeof promises / sizeof *promises);
}
