/*
Promises of llmc/ops/causal_conv1d.h, which follow from the table (llmc/test/op.h) with every number of taps, with
strides, histories and starts of documents; and a sequence that comes in windows must have the bits of the whole.
*/
#include "llmc/ops/causal_conv1d.h"
#include "llmc/test/op_promises.h"  // Op, op_problem, op_main

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

// the history as plain loops take it; the caller frees. Of bf16 the mark was rounded: it is some NaN
static float* plain_history(float* const* a, const int* d) {
    float* given = some_history(a, d);
    if (!given) { return NULL; }
    float* history = copied_array(given, (size_t)(d['B'] * d['k'] * d['C']));
    for (int n = 0; FAST_KERNELS && n < d['B'] * d['k']; n++) {
        if (isnan(history[n * d['C']])) { history[n * d['C']] = conv1d_nothing(); }
    }
    return history;
}

static void forward_ref(float* const* a, const int* d) {
    unsigned char* starts = some_starts(a, d);
    float* history = plain_history(a, d);
    conv1d_forward_ref(a[CONV], a[OUT], a[INP], (size_t)d['S'], a[WEIGHT], some_bias(a, d), history, starts, d['B'],
                       d['T'], d['C'], d['K']);
    free(starts), free(history);
}

static void backward_ref(float* const* a, const int* d) {
    unsigned char* starts = some_starts(a, d);
    float* history = plain_history(a, d);
    conv1d_backward_ref(a[DINP], (size_t)d['D'], a[DWEIGHT], a[DBIAS], a[DOUT], a[CONV], a[INP], (size_t)d['S'],
                        a[WEIGHT], history, some_ahead(a, d), starts, d['B'], d['T'], d['C'], d['K']);
    free(starts), free(history);
}

// ---- the same on the device ----

static unsigned char* bytes_to_device(const unsigned char* bytes, size_t n, const Device* dev) {
    unsigned char* on_device = (unsigned char*)device_alloc(n, "starts");
    device_upload(on_device, bytes, n, dev);
    device_sync(dev);
    return on_device;
}

// of starts on the device; the caller releases it, or NULL
static unsigned char* device_starts(float* const* a, const int* d, const Device* dev) {
    const size_t n = (size_t)(d['B'] * d['T']);
    if (!(d['p'] & WITH_STARTS) || !a[STARTS]) { return NULL; }
    int* starts = (int*)new_array(n, sizeof(int));
    unsigned char* bytes = (unsigned char*)new_array(n, 1);
    device_download(starts, a[STARTS], sizeof(int) * n, dev);
    for (size_t i = 0; i < n; i++) { bytes[i] = (unsigned char)starts[i]; }
    unsigned char* on_device = bytes_to_device(bytes, n, dev);
    free(starts), free(bytes);
    return on_device;
}

// n positions of C channels with the mark of X where the first is NaN; the caller drops what is not `history` itself
static float* marked(float* history, int n, int C, const Device* dev) { return history; }

#if defined(__CUDACC__) && !defined(EXACT)
static OpBf16* marked(OpBf16* history, int n, int C, const Device* dev) {
    const size_t n_bytes = sizeof(OpBf16) * (size_t)(n * C);
    if (!history) { return NULL; }
    OpBf16 *on_host = (OpBf16*)new_array(n_bytes, 1), *on_device = (OpBf16*)device_alloc(n_bytes, "history");
    device_download(on_host, history, n_bytes, dev);
    for (int i = 0; i < n; i++) {
        if (isnan((float)on_host[i * C])) { on_host[i * C] = conv1d_nothing_as<OpBf16>(); }
    }
    device_upload(on_device, on_host, n_bytes, dev);
    device_sync(dev);
    free(on_host);
    return on_device;
}
#endif

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const size_t n = (size_t)(d['B'] * d['T']);
    unsigned char* starts = device_starts(a, d, dev);
    X *given = d['p'] & WITH_HISTORY ? x[HISTORY] : NULL, *history = marked(given, d['B'] * d['k'], d['C'], dev);
    conv1d_forward(x[CONV], x[OUT], x[INP], (size_t)d['S'], x[WEIGHT], d['p'] & WITH_BIAS ? x[BIAS] : NULL, history,
                   starts, d['B'], d['T'], d['C'], d['K'], dev);
    device_release(starts, n);
    if (history != given) { device_drop(history); }
}

OP_STORED(X)
static void backward(X* const* x, float* const* a, const int* d, const Device* dev) {
    const size_t n = (size_t)(d['B'] * d['T']);
    unsigned char* starts = device_starts(a, d, dev);
    X *given = d['p'] & WITH_HISTORY ? x[HISTORY] : NULL, *history = marked(given, d['B'] * d['k'], d['C'], dev);
    conv1d_backward(x[DINP], (size_t)d['D'], a[DWEIGHT], a[DBIAS], x[DOUT], x[CONV], x[INP], (size_t)d['S'], x[WEIGHT],
                    history, some_ahead(a, d), starts, d['B'], d['T'], d['C'], d['K'], dev);
    device_release(starts, n);
    if (history != given) { device_drop(history); }
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

// What fast kernels may be apart. conv has the plain loop's bits; |conv| <= Z = 1 + K. The hardware's exponential is
// 2 + 1.2 Z units of the last place off, its division 2, a few roundings follow: silu is off by Z times as much, its
// slope by 1 + Z times. A sum has one for each term, and for dweight and dbias another order
static double apart(const OpProblem* p, int array, size_t i) {
    const int K = p->d['K'], N = p->d['B'] * p->d['T'];
    const double Z = 1.0 + K, function = (8.0 + 1.2 * Z) * 0x1p-23;
    (void)i;
    switch (array) {
        case CONV: return 0.0;
        case OUT: return Z * function;
        case DINP: return K * (1.0 + Z) * function + rounding_walk(2 * K, 1.1 * K);
        default: return N * (1.0 + Z) * function + 2.0 * rounding_walk(N, 1.1 * N);
    }
}

// B, T, C, K, K - 1, strides of inp and of dinp, parts; conv1d_shapes writes them
static int shapes[172][OP_DIMS];

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
        {AHEAD, "ahead", "BkC", GIVEN | FLOAT, 1.0f, "dinp"},
        {DINP, "dinp", "BTD", GRADIENT | PARTLY | ASKED, 1.0f, NULL, "inp"},
        {DWEIGHT, "dweight", "CK", GRADIENT | ASKED | FLOAT},
        {DBIAS, "dbias", "C", GRADIENT | ASKED | FLOAT},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE, .fill = fill,
    .forward_ref = forward_ref, .forward = OP_FAST(forward), .backward_ref = backward_ref,
    .backward = OP_FAST(backward),
    .in_double = in_double, .error = error, .judged = {
        {3, 11, 5, 1, 0, 5, 5, 1}, {3, 11, 5, 1, 0, 5, 5, 3}, {3, 11, 5, 1, 0, 5, 5, 5}, {3, 11, 5, 1, 0, 5, 5, 7},
        {3, 11, 5, 4, 3, 5, 5, 1}, {3, 11, 5, 4, 3, 5, 5, 3}, {3, 11, 5, 4, 3, 5, 5, 5}, {3, 11, 5, 4, 3, 5, 5, 7},
        {3, 11, 5, 7, 6, 5, 5, 1}, {3, 11, 5, 7, 6, 5, 5, 3}, {3, 11, 5, 7, 6, 5, 5, 5}, {3, 11, 5, 7, 6, 5, 5, 7},
    },
    .apart = apart,
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
    // packs of kernels, several stretches, several parts of dweight, more channels than a block has threads
    const int packs[][OP_DIMS] = {
        {3, 33, 16, 4, 3, 48, 48, 7}, {2, 70, 24, 4, 3, 24, 24, 0}, {1, 129, 8, 4, 3, 16, 8, 1},
        {5, 3, 40, 4, 3, 44, 40, 7}, {3, 19, 16, 4, 3, 16, 20, 6}, {1, 3, 1064, 4, 3, 1064, 1064, 3},
        {41, 7, 8, 4, 3, 8, 8, 7}, {2, 70, 3, 9, 8, 3, 3, 7}, {4, 66, 16, 4, 3, 48, 48, 15}, {5, 2, 24, 4, 3, 24, 24, 15},
    };
    for (size_t i = 0; i < sizeof packs / sizeof *packs; i++) { memcpy(shapes[n++], packs[i], sizeof *packs); }
#ifndef __CUDACC__
    // several blocks of channels for a thread, the last not full
    shape_of(shapes[n++], 2, 9, 2 * CONV1D_WIDTH + 37, 4, WITH_BIAS | WITH_HISTORY | WITH_STARTS | WITH_AHEAD, 0);
#endif
}

// ---- windows ----

// rows of length n from `first` on of all those of x, which are n_all long; the caller frees
static float* cut(const float* x, int B, size_t n_all, size_t first, size_t n) {
    float* part = filled_array((size_t)B * n, NAN);
    for (int b = 0; b < B; b++) {
        memcpy(part + (size_t)b * n, x + (size_t)b * n_all + first, sizeof(float) * n);
    }
    return part;
}

// the T positions from `first` of all rows: forward, and the history goes on. p has the answers to the whole
OP_STORED(X)
static void check_window(Test* t, const OpProblem* p, X* history, int first, int T, const Device* dev) {
    const int B = p->d['B'], C = p->d['C'], K = p->d['K'], T_all = p->d['T'], *all_starts = (const int*)p->a[STARTS];
    const size_t S = (size_t)p->d['S'], row = (size_t)T * (size_t)C, n = (size_t)B * row;
    float *part = cut(p->a[INP], B, (size_t)T_all * S, (size_t)first * S, (size_t)T * S);
    float *conv = filled_array(n, NAN), *out = filled_array(n, NAN);
    unsigned char *bytes = (unsigned char*)new_array((size_t)(B * T), 1), *starts = NULL;
    for (int i = 0; i < B * T; i++) { bytes[i] = (unsigned char)all_starts[i / T * T_all + first + i % T]; }
    if (p->d['p'] & WITH_STARTS) { starts = bytes_to_device(bytes, (size_t)(B * T), dev); }
    X *inp_d = op_up_(history, part, (size_t)(B * T) * S, dev), *conv_d = op_up_(history, conv, n, dev);
    X *out_d = op_up_(history, out, n, dev), *weight = op_up_(history, p->a[WEIGHT], op_length(p, WEIGHT), dev);
    X *bias = op_up_(history, p->a[BIAS], (size_t)C, dev);
    conv1d_forward(conv_d, out_d, inp_d, S, weight, p->d['p'] & WITH_BIAS ? bias : NULL, history, starts, B, T, C, K,
                   dev);
    conv1d_history(history, inp_d, S, starts, B, T, C, K, dev);
    op_down_(conv, conv_d, n, dev), op_down_(out, out_d, n, dev);
    for (int b = 0; b < B; b++) {
        size_t from = (size_t)(b * T_all + first) * (size_t)C;
        char what[96];
        snprintf(what, sizeof what, "row %d, K %d, window of %d from %d", b, K, T, first);
        check_bits(t, what, conv + (size_t)b * row, p->a[CONV] + from, row);
        check_bits(t, "out", out + (size_t)b * row, p->a[OUT] + from, row);
    }
    device_drop(inp_d), device_drop(weight), device_drop(bias), device_release(starts, (size_t)(B * T));
    free(part), free(conv), free(out), free(bytes);
}

// backward of the same positions: dinp has the bits of the whole, and what the windows before need goes to them
OP_STORED(X)
static void check_window_back(Test* t, const OpProblem* p, X* type, float* ahead, int first, int T, const Device* dev) {
    const int B = p->d['B'], C = p->d['C'], K = p->d['K'], T_all = p->d['T'], *all_starts = (const int*)p->a[STARTS];
    const size_t S = (size_t)p->d['S'], D = (size_t)p->d['D'], row = (size_t)T * (size_t)C, from = (size_t)(first * C);
    const size_t n = (size_t)(B * T), n_all = (size_t)(T_all * C);
    float *dinp = filled_array(n * D, NAN), *inp = filled_array(n * S, NAN);
    float *conv = cut(p->a[CONV], B, n_all, from, row), *dout = cut(p->a[DOUT], B, n_all, from, row);
    unsigned char *bytes = (unsigned char*)new_array(n, 1), *starts = NULL;
    for (int i = 0; i < B * T; i++) { bytes[i] = (unsigned char)all_starts[i / T * T_all + first + i % T]; }
    if (p->d['p'] & WITH_STARTS) { starts = bytes_to_device(bytes, n, dev); }
    X *dinp_d = op_up_(type, dinp, n * D, dev), *inp_d = op_up_(type, inp, n * S, dev);
    X *conv_d = op_up_(type, conv, (size_t)B * row, dev), *dout_d = op_up_(type, dout, (size_t)B * row, dev);
    X* weight = op_up_(type, p->a[WEIGHT], op_length(p, WEIGHT), dev);
    conv1d_backward(dinp_d, D, NULL, NULL, dout_d, conv_d, inp_d, S, weight, NULL, ahead, starts, B, T, C, K, dev);
    conv1d_ahead(ahead, dout_d, conv_d, starts, B, T, C, K, dev);
    op_down_(dinp, dinp_d, n * D, dev);
    for (int i = 0; i < B * T; i++) {
        char what[96];
        snprintf(what, sizeof what, "dinp, row %d, K %d, position %d of %d from %d", i / T, K, i % T, T, first);
        check_bits(t, what, dinp + (size_t)i * D, p->a[DINP] + (size_t)(i / T * T_all + first + i % T) * D, (size_t)C);
    }
    device_drop(inp_d), device_drop(conv_d), device_drop(dout_d), device_drop(weight), device_release(starts, n);
    free(dinp), free(inp), free(conv), free(dout), free(bytes);
}

// windows of these lengths, the last first; type: NULL
OP_STORED(X)
static void check_windows_back(Test* t, const OpProblem* p, X* type, const int* lengths, int n_lengths,
                               const Device* dev) {
    const size_t n = op_length(p, AHEAD);
    float* given = some_ahead(p->a, p->d);
    float* start = given ? copied_array(given, n) : filled_array(n, conv1d_nothing());
    float* ahead = to_device(start, n, dev);
    for (int i = 0, end = p->d['T'], T; end > 0; i++, end -= T) {
        T = lengths[i % n_lengths] < end ? lengths[i % n_lengths] : end;
        check_window_back(t, p, type, ahead, end - T, T, dev);
    }
    free(start), device_drop(ahead);
}

// windows of these lengths, over and over; type: NULL
OP_STORED(X)
static void check_windows(Test* t, const OpProblem* p, X* type, const int* lengths, int n_lengths,
                          const Device* dev) {
    const size_t n = op_length(p, HISTORY);
    const float* given = some_history(p->a, p->d);
    float* start = given ? copied_array(given, n) : filled_array(n, conv1d_nothing());
    X *rounded = op_up_(type, start, n, dev), *history = marked(rounded, p->d['B'] * p->d['k'], p->d['C'], dev);
    for (int i = 0, first = 0, T; first < p->d['T']; i++, first += T) {
        T = lengths[i % n_lengths] < p->d['T'] - first ? lengths[i % n_lengths] : p->d['T'] - first;
        check_window(t, p, history, first, T, dev);
    }
    free(start), device_drop(rounded);
    if (history != rounded) { device_drop(history); }
}

// of C channels, alone in their rows or not
OP_STORED(X)
static void check_cuts(Test* t, int C, X* type, int kind, int as_bf16) {
    const int one[] = {1}, uneven[] = {3, 1, 7, 2}, taps[] = {1, 2, 3, 4, 5, 16};
    int shape[OP_DIMS];
    Device dev = test_device(2);
    for (int i = 0; i < 6 * ALL_PARTS; i++) {
        shape_of(shape, 3, 23, C, taps[i / ALL_PARTS], i % ALL_PARTS, 0);
        OpProblem p = op_problem(&conv1d, shape, kind, as_bf16);
        op_answer(t, &p, &dev);
        for (int first = 1; first < 23; first += N_TEST_THREADS > 1 ? 1 : 6) {
            const int halves[] = {first, 23 - first};
            check_windows(t, &p, type, halves, 2, &dev);
        }
        check_windows(t, &p, type, one, 1, &dev);
        check_windows(t, &p, type, uneven, 4, &dev);
        op_problem_free(&p);
    }
    device_free(&dev);
}

static void test_windows(Test* t) {
    check_cuts(t, 9, (float*)NULL, FAST_KERNELS ? EASY : FEW_SPECIALS, 0);
    check_cuts(t, 16, (float*)NULL, EASY, 0);
    if (FAST_KERNELS) { check_cuts(t, 16, (OpBf16*)NULL, EASY, 1); }
}

// of C channels
OP_STORED(X)
static void check_cuts_back(Test* t, int C, X* type, int kind, int as_bf16) {
    const int one[] = {1}, uneven[] = {3, 1, 7, 2}, taps[] = {1, 2, 3, 4, 5, 16};
    int shape[OP_DIMS];
    Device dev = test_device(2);
    for (int i = 0; i < 6 * 2 * ALL_PARTS; i++) {
        shape_of(shape, 3, 23, C, taps[i / (2 * ALL_PARTS)], i % (2 * ALL_PARTS), i % 2);
        OpProblem p = op_problem(&conv1d, shape, kind, as_bf16);
        op_answer(t, &p, &dev);
        for (int first = 1; first < 23; first += N_TEST_THREADS > 1 ? 1 : 6) {
            const int halves[] = {23 - first, first};
            check_windows_back(t, &p, type, halves, 2, &dev);
        }
        check_windows_back(t, &p, type, one, 1, &dev);
        check_windows_back(t, &p, type, uneven, 4, &dev);
        op_problem_free(&p);
    }
    device_free(&dev);
}

static void test_windows_back(Test* t) {
    check_cuts_back(t, 9, (float*)NULL, FAST_KERNELS ? EASY : FEW_SPECIALS, 0);
    if (N_TEST_THREADS > 1) { return; }
    check_cuts_back(t, 16, (float*)NULL, EASY, 0);
    if (FAST_KERNELS) { check_cuts_back(t, 16, (OpBf16*)NULL, EASY, 1); }
}

// Sums of nothing but -0 and an infinite weight tell a tap that is left out from one that meets a zero. In one window,
// then position by position: where a document began, the history has nothing before it
static void test_left_out(Test* t) {
    const float inp[] = {1.0f, 2.0f, 3.0f, 4.0f}, weight[] = {INFINITY, -0.0f, -0.0f}, bias[] = {-0.0f};
    const float want[] = {-0.0f, -0.0f, -0.0f, -0.0f};
    const unsigned char starts[] = {0, 0, 1, 0};
    const float nothing[] = {conv1d_nothing(), conv1d_nothing()};
    float conv[4] = {0};
    Device dev = test_device(1);
    float *x = to_device(inp, 4, &dev), *w = to_device(weight, 3, &dev), *start = to_device(bias, 1, &dev);
    float *history = to_device(nothing, 2, &dev), *sums = to_device(conv, 4, &dev), *out = to_device(conv, 4, &dev);
    unsigned char* begins = bytes_to_device(starts, 4, &dev);
    conv1d_forward(sums, out, x, 1, w, start, history, begins, 1, 4, 1, 3, &dev);
    device_download(conv, sums, sizeof conv, &dev);
    check_bits(t, "one window", conv, want, 4);
    device_zero(sums, sizeof conv, &dev);
    for (int i = 0; i < 4; i++) {
        conv1d_forward(sums + i, out, x + i, 1, w, start, history, begins + i, 1, 1, 1, 3, &dev);
        conv1d_history(history, x + i, 1, begins + i, 1, 1, 1, 3, &dev);
    }
    from_device(conv, sums, 4, &dev);
    check_bits(t, "position by position", conv, want, 4);
    device_drop(x), device_drop(w), device_drop(start), device_drop(history), device_drop(out);
    device_release(begins, 4);
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
    float conv[6] = {0}, out[6], dinp[6], dweight[4], dbias[1] = {0};
    Device dev = test_device(1);
    float *x = to_device(inp, 6, &dev), *w = to_device(weight, 4, &dev), *d = to_device(dout, 6, &dev);
    float *sums = to_device(conv, 6, &dev), *y = to_device(conv, 6, &dev), *zeros = to_device(conv_zero, 6, &dev);
    float *dx = to_device(conv, 6, &dev), *dw = to_device(weight, 4, &dev), *db = to_device(dbias, 1, &dev);
    conv1d_forward(sums, y, x, 1, w, NULL, NULL, NULL, 1, 6, 1, 4, &dev);
    conv1d_backward(dx, 1, dw, db, d, zeros, x, 1, w, NULL, NULL, NULL, 1, 6, 1, 4, &dev);
    from_device(conv, sums, 6, &dev), from_device(out, y, 6, &dev), from_device(dinp, dx, 6, &dev);
    from_device(dweight, dw, 4, &dev), from_device(dbias, db, 1, &dev);
    check_bits(t, "conv", conv, want_conv, 6);
    for (int i = 0; i < 6; i++) {
        const float far = fabsf(out[i] - silu_one(conv[i]));  // 4 roundings of the fast function, below 4
        check(t, far <= (FAST_KERNELS ? 4 * 0x1p-22f : 0.0f), "out[%d]: found %g", i, (double)out[i]);
    }
    check_bits(t, "dinp", dinp, want_dinp, 6);
    check_bits(t, "dweight", dweight, want_dweight, 4);
    check(t, dbias[0] == 0.5f, "dbias: found %g", (double)dbias[0]);
    device_drop(x), device_drop(w), device_drop(d), device_drop(zeros);
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
