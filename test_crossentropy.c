/*
Promises of llmc/ops/crossentropy.h. The plain loop is judged in double, by finite differences and on rows whose answer
is obvious; the fast version must equal it bit for bit, whatever the shape, the threads, the targets and the logits, in
place too, and so must rows whose columns lie in several parts. Fast kernels must agree with double within the tolerance
that the header derives.
*/
#define CROSSENTROPY_KEPT 480  // bytes: some rows of these tests are long ones, of which a block keeps a part
#include "llmc/ops/crossentropy.h"
#include "llmc/test/test.h"

#define DLOSS 0.03f  // not a power of two: dividing by 1 / DLOSS would be another result

// one problem and the plain loop's answer
typedef struct {
    int N, V, Vp;
    float* logits;   // given; the padding holds garbage
    int* targets;    // about one in five is not counted
    float *losses, *probs, *dlogits;                    // found
    double *losses_error, *probs_error, *dlogits_error;  // how far a fast kernel may be from that
} CrossEntropy;

static void solve(CrossEntropy* c) {
    crossentropy_forward_ref(c->losses, c->probs, c->logits, c->targets, c->N, c->V, c->Vp);
    crossentropy_backward_ref(c->dlogits, c->probs, c->targets, DLOSS, c->N, c->V, c->Vp);
}

// hard 1: cancellation, subnormals, -0, spread over 2^40; hard 2: also infinities and NaNs
static CrossEntropy crossentropy(int N, int V, int Vp, int hard) {
    CrossEntropy c;
    size_t n = (size_t)N * (size_t)Vp;
    uint64_t s = seeded_stream(7);
    c.N = N, c.V = V, c.Vp = Vp;
    c.logits = hard ? hard_array(n, 1) : random_array(n, 8.0f, 1);
    if (hard == 2) { sprinkle(c.logits, n, (uint32_t)(2 * V), 2); }
    for (size_t i = 0; i < n; i++) {
        if (i % (size_t)Vp >= (size_t)V) { c.logits[i] = i % 2 ? NAN : 1e30f; }
    }
    c.targets = (int*)new_array((size_t)N, sizeof(int));
    for (int i = 0; i < N; i++) {
        uint32_t u = xorshift_u32(&s);
        c.targets[i] = u % 5 == 0 ? -1 - (int)(u >> 8 & 127) : (int)(u % (uint32_t)V);
    }
    c.losses = filled_array((size_t)N, 77.0f), c.probs = filled_array(n, 77.0f), c.dlogits = filled_array(n, 77.0f);
    c.losses_error = (double*)new_array((size_t)N, sizeof(double));
    c.probs_error = (double*)new_array(n, sizeof(double)), c.dlogits_error = (double*)new_array(n, sizeof(double));
    solve(&c);
    return c;
}

static void crossentropy_free(CrossEntropy* c) {
    free(c->logits), free(c->targets);
    free(c->losses), free(c->probs), free(c->dlogits);
    free(c->losses_error), free(c->probs_error), free(c->dlogits_error);
}

// ---- what a fast kernel may return: the answer in double, with the errors that llmc/ops/crossentropy.h derives ----

static const double ULP = 0x1p-23, FLUSHED = 0x1p-125;  // the hardware may take subnormal exponentials for 0
static const float LARGEST_LOSS = 60.0f;  // beyond it probabilities come near them: all such losses are alike

// of exp(-d), of itself; the difference in the exponent rounds, too
static double exp_error(double d) { return (3.0 + 2.0 * fmin(d, 1000.0)) * ULP; }

static void expect_row(CrossEntropy* c, int n, double x_error) {
    const float* x = c->logits + (size_t)n * (size_t)c->Vp;
    const size_t row = (size_t)n * (size_t)c->Vp;
    double max = -10000.0, sum = 0.0, sum_error = 0.0;
    for (int v = 0; v < c->V; v++) { max = (double)x[v] > max ? (double)x[v] : max; }
    for (int v = 0; v < c->V; v++) {
        double e = exp((double)x[v] - max);
        sum += e, sum_error += e * exp_error(max - (double)x[v]);
    }
    if (sum < 0x1p-126) { sum = NAN; }                 // every exponential is 0 as a float: 0 / 0
    double relative = sum_error / sum + 96.0 * ULP;    // a thread's sum, which shrinks, two trees, the reciprocal
    for (int v = 0; v < c->Vp; v++) {
        int hot = v == c->targets[n], counted = v < c->V && c->targets[n] >= 0;
        double p = v < c->V ? exp((double)x[v] - max) / sum : 0.0, d = counted ? (p - hot) * (double)DLOSS : 0.0;
        double p_error = v < c->V ? p * (relative + exp_error(max - (double)x[v])) + FLUSHED : 0.0;
        c->probs[row + (size_t)v] = (float)p, c->dlogits[row + (size_t)v] = (float)d;
        c->probs_error[row + (size_t)v] = p_error * (1.0 + x_error) + x_error * p;
        c->dlogits_error[row + (size_t)v] =
            counted ? (p_error + hot * ULP) * (double)DLOSS * (1.0 + x_error) + x_error * fabs(d) : 0.0;
        if (hot) { c->losses[n] = (float)fmin(-log(p), (double)LARGEST_LOSS); }
        if (hot) { c->losses_error[n] = relative + exp_error(max - (double)x[v]) + (double)LARGEST_LOSS * ULP; }
        if (hot && isnan(p)) { c->losses[n] = NAN; }
    }
}

// x_error: rounding to what is stored, of itself
static void expect(CrossEntropy* c, double x_error) {
    for (int n = 0; n < c->N; n++) { expect_row(c, n, x_error); }
}

// bits; of a fast kernel a number within the error, or NaN where it belongs
static void check_same(Test* t, const char* what, const float* got, const float* want, const double* error, size_t n) {
    if (!FAST_KERNELS) { check_bits(t, what, got, want, n); }
    for (size_t i = 0; FAST_KERNELS && i < n; i++) {
        int same = isnan(want[i]) ? isnan(got[i]) : fabs((double)got[i] - (double)want[i]) <= error[i];
        check(t, same, "%s: [%zu] found %.9g, expected %.9g, allowed %.3g", what, i, (double)got[i], (double)want[i],
              error[i]);
    }
}

static void check_losses(Test* t, const char* what, float* losses, const CrossEntropy* c) {
    for (int n = 0; FAST_KERNELS && n < c->N; n++) { losses[n] = losses[n] > LARGEST_LOSS ? LARGEST_LOSS : losses[n]; }
    check_same(t, what, losses, c->losses, c->losses_error, (size_t)c->N);
}

// ---- the ops, on arrays that go to the device and come back ----

// probs may be logits
static void forward(float* losses, float* probs, const float* logits, const CrossEntropy* c, const Device* dev) {
    size_t n = (size_t)c->N * (size_t)c->Vp;
    float *d_losses = to_device(losses, (size_t)c->N, dev), *d_probs = to_device(probs, n, dev),
          *d_logits = logits == probs ? d_probs : to_device(logits, n, dev);
    int* d_targets = ints_to_device(c->targets, (size_t)c->N, dev);
    crossentropy_forward(d_losses, d_probs, d_logits, d_targets, c->N, c->V, c->Vp, dev);
    if (logits != probs) { device_drop(d_logits); }
    from_device(losses, d_losses, (size_t)c->N, dev), from_device(probs, d_probs, n, dev), device_drop(d_targets);
}

// dlogits may be probs; probs come back as the device has them
static void backward(float* dlogits, float* probs, const CrossEntropy* c, const Device* dev) {
    size_t n = (size_t)c->N * (size_t)c->Vp;
    float *d_probs = to_device(probs, n, dev), *d_dlogits = dlogits == probs ? d_probs : to_device(dlogits, n, dev);
    int* d_targets = ints_to_device(c->targets, (size_t)c->N, dev);
    crossentropy_backward(d_dlogits, d_probs, d_targets, DLOSS, c->N, c->V, c->Vp, dev);
    if (dlogits != probs) { from_device(probs, d_probs, n, dev); }
    from_device(dlogits, d_dlogits, n, dev), device_drop(d_targets);
}

static void fused(float* losses, float* logits, int with_gradient, const CrossEntropy* c, const Device* dev) {
    size_t n = (size_t)c->N * (size_t)c->Vp;
    float *d_losses = to_device(losses, (size_t)c->N, dev), *d_logits = to_device(logits, n, dev);
    int* d_targets = ints_to_device(c->targets, (size_t)c->N, dev);
    crossentropy_fused(d_losses, d_logits, d_targets, DLOSS, with_gradient, c->N, c->V, c->Vp, dev);
    from_device(losses, d_losses, (size_t)c->N, dev), from_device(logits, d_logits, n, dev), device_drop(d_targets);
}

// ---- fast against plain ----

static void check_both(Test* t, const CrossEntropy* c, int in_place, const Device* dev) {
    size_t n = (size_t)c->N * (size_t)c->Vp;
    float *losses = filled_array((size_t)c->N, NAN),
          *probs = in_place ? copied_array(c->logits, n) : filled_array(n, NAN);
    float* dlogits = in_place ? probs : filled_array(n, NAN);
    char what[96];
    snprintf(what, sizeof what, "probs, N %d, V %d, Vp %d, in place %d, %d threads", c->N, c->V, c->Vp, in_place,
             dev->n_threads);
    forward(losses, probs, in_place ? probs : c->logits, c, dev);
    check_same(t, what, probs, c->probs, c->probs_error, n);
    check_losses(t, "losses", losses, c);
    float* probs_before = copied_array(probs, n);
    backward(dlogits, probs, c, dev);
    check_same(t, "dlogits", dlogits, c->dlogits, c->dlogits_error, n);
    if (!in_place) {
        check_bits(t, "probs are left alone", probs, probs_before, n);
        free(dlogits);
    }
    free(losses), free(probs), free(probs_before);
}

// with the gradient, without, and with it again: the loss has the same bits, although the logits are overwritten
static void check_fused(Test* t, const CrossEntropy* c, const Device* dev) {
    size_t n = (size_t)c->N * (size_t)c->Vp;
    float *losses = filled_array((size_t)c->N, NAN), *logits = copied_array(c->logits, n),
          *alone = filled_array((size_t)c->N, NAN);
    char what[96];
    snprintf(what, sizeof what, "fused dlogits, N %d, V %d, Vp %d, %d threads", c->N, c->V, c->Vp, dev->n_threads);
    fused(alone, logits, 0, c, dev);
    check(t, memcmp(logits, c->logits, sizeof(float) * n) == 0, "%s: without the gradient the logits stay as they are",
          what);
    fused(losses, logits, 1, c, dev);
    check_bits(t, "loss with and without the gradient", losses, alone, (size_t)c->N);
    check_same(t, what, logits, c->dlogits, c->dlogits_error, n);
    float* again = copied_array(c->logits, n);
    fused(alone, again, 1, c, dev);
    check_bits(t, "a second time: dlogits", again, logits, n);
    check_bits(t, "a second time: losses", alone, losses, (size_t)c->N);
    check_losses(t, "fused losses", losses, c);
    free(losses), free(logits), free(alone), free(again);
}

static void check_all_threads(Test* t, CrossEntropy* c) {
    if (FAST_KERNELS) { expect(c, 0.0); }
    for (int i = 0; i < 3 * N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i / 3));
        if (i % 3 < 2) { check_both(t, c, i % 3, &dev); } else { check_fused(t, c, &dev); }
        device_free(&dev);
    }
}

#ifdef __CUDACC__
// a warp, a block of 1024 and one that goes round, each with packs and without; few rows, because dev/simt must run
// them, too
static const int shapes[][3] = {{1, 1, 1}, {1, 1, 7}, {1, 7, 7}, {7, 33, 64}, {3, 7, 9}, {5, 257, 257}, {3, 127, 128},
                                {2, 1009, 1024}, {1, 1100, 1101}, {1, 5003, 5004}};
#else
static const int shapes[][3] = {  // N, V, Vp
    {1, 1, 1}, {1, 1, 7}, {1, 7, 7}, {7, 33, 64}, {33, 7, 9}, {17, 257, 257}, {33, 127, 128}, {16, 97, 128},
    {31, 1009, 1024}, {VLANES, VLANES, VLANES}, {VLANES, 4 * VLANES, 4 * VLANES + 1},
    {2 * VLANES + 1, 4 * VLANES + 1, 5 * VLANES}, {3 * VLANES - 1, 9 * VLANES - 1, 9 * VLANES},
    {VLANES, 5003, 5004},
};
#endif

static void check_shapes(Test* t, int hard, int largest_V) {
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (shapes[i][1] > largest_V) { continue; }
        CrossEntropy c = crossentropy(shapes[i][0], shapes[i][1], shapes[i][2], hard);
        check_all_threads(t, &c);
        crossentropy_free(&c);
    }
}

// ---- in parts: what P ranks give is what one gives ----

// the columns first .. first + n - 1 of a row of c
typedef struct {
    int first, V, Vp;
    float* logits;
} Part;

// part p of P whose borders lie at odd places; where columns are few, some have none, or padding alone
static Part part_of(const CrossEntropy* c, int p, int P) {
    const int begin = c->Vp * p / P, end = c->Vp * (p + 1) / P, V = c->V < end ? c->V - begin : end - begin;
    const Part part = {begin, V > 0 ? V : 0, end - begin, (float*)new_array((size_t)(c->N * (end - begin) + 1), 4)};
    for (int n = 0; n < c->N; n++) {
        const float* from = c->logits + (size_t)n * (size_t)c->Vp + begin;
        memcpy(part.logits + n * part.Vp, from, sizeof(float) * (size_t)part.Vp);
    }
    return part;
}

enum { MOST_PARTS = 7 };

static void solve_parts(float* losses, float* dlogits, const CrossEntropy* c, int P, int with_gradient,
                        const Device* dev) {
    const size_t N = (size_t)c->N, row = sizeof(CrossEntropyRow) / sizeof(float);
    int* targets = ints_to_device(c->targets, N, dev);
    float* nothing = filled_array(N * row * (size_t)P, NAN);
    float *of_parts = to_device(nothing, N * row * (size_t)P, dev), *of_all = to_device(nothing, N * row, dev),
          *d_losses = to_device(losses, N, dev);
    CrossEntropyRow *parts = (CrossEntropyRow*)of_parts, *rows = (CrossEntropyRow*)of_all;
    Part part[MOST_PARTS];
    float* x[MOST_PARTS];
    for (int p = 0; p < P; p++) {
        part[p] = part_of(c, p, P);
        x[p] = to_device(part[p].logits, N * (size_t)part[p].Vp + 1, dev);
        crossentropy_part_begin(parts + N * (size_t)p, x[p], targets, part[p].first, c->N, part[p].V, part[p].Vp, dev);
    }
    crossentropy_part_join(rows, parts, P, c->N, dev);
#if CROSSENTROPY_CHAINS
    for (int p = 0; p < P; p++) { crossentropy_part_add(rows, x[p], c->N, part[p].V, part[p].Vp, dev); }
#endif
    for (int p = 0; p < P; p++) {
        const size_t width = sizeof(float) * (size_t)part[p].Vp;
        crossentropy_part_end(d_losses, x[p], rows, targets, part[p].first, DLOSS, with_gradient, c->N, part[p].V,
                              part[p].Vp, dev);
        from_device(part[p].logits, x[p], N * (size_t)part[p].Vp + 1, dev);
        for (size_t n = 0; n < N; n++) {
            memcpy(dlogits + n * (size_t)c->Vp + part[p].first, part[p].logits + n * (size_t)part[p].Vp, width);
        }
        free(part[p].logits);
    }
    from_device(losses, d_losses, N, dev), device_drop(of_parts), device_drop(of_all), device_drop(targets);
    free(nothing);
}

// the same by the plain loops
static void solve_parts_ref(float* losses, float* dlogits, const CrossEntropy* c, int P) {
    const size_t N = (size_t)c->N;
    CrossEntropyRow* parts = (CrossEntropyRow*)new_array(N * (size_t)(P + 1), sizeof *parts);
    CrossEntropyRow* rows = parts + N * (size_t)P;
    Part part[MOST_PARTS];
    for (int p = 0; p < P; p++) {
        part[p] = part_of(c, p, P);
        crossentropy_part_begin_ref(parts + N * (size_t)p, part[p].logits, c->targets, part[p].first, c->N, part[p].V,
                                    part[p].Vp);
    }
    crossentropy_part_join_ref(rows, parts, P, c->N);
    for (int p = 0; p < P; p++) { crossentropy_part_add_ref(rows, part[p].logits, c->N, part[p].V, part[p].Vp); }
    for (int p = 0; p < P; p++) {
        crossentropy_part_end_ref(losses, part[p].logits, rows, c->targets, part[p].first, DLOSS, 1, c->N, part[p].V,
                                  part[p].Vp);
        for (size_t n = 0; n < N; n++) {
            memcpy(dlogits + n * (size_t)c->Vp + part[p].first, part[p].logits + n * (size_t)part[p].Vp,
                   sizeof(float) * (size_t)part[p].Vp);
        }
        free(part[p].logits);
    }
    free(parts);
}

static void check_parts(Test* t, CrossEntropy* c, const Device* dev) {
    const size_t n = (size_t)c->N * (size_t)c->Vp;
    char what[96];
    if (FAST_KERNELS) { expect(c, 0.0); }
    for (int P = 1; P <= MOST_PARTS && P <= c->Vp; P++) {
        float *losses = filled_array((size_t)c->N, NAN), *dlogits = filled_array(n, NAN);
        snprintf(what, sizeof what, "dlogits of %d parts, N %d, V %d, Vp %d, %d threads", P, c->N, c->V, c->Vp,
                 dev->n_threads);
        solve_parts(losses, dlogits, c, P, 1, dev);
        check_same(t, what, dlogits, c->dlogits, c->dlogits_error, n);
        check_losses(t, what, losses, c);
        solve_parts(losses, dlogits, c, P, 0, dev);
        check_losses(t, "losses of parts, without the gradient", losses, c);
        if (!FAST_KERNELS) {
            solve_parts_ref(losses, dlogits, c, P);
            check_same(t, "dlogits of parts by the plain loops", dlogits, c->dlogits, c->dlogits_error, n);
            check_losses(t, "losses of parts by the plain loops", losses, c);
        }
        free(losses), free(dlogits);
    }
}

static void test_parts(Test* t) {
    Device dev = test_device(2);
    for (size_t i = 0; i < 3 * sizeof shapes / sizeof *shapes; i++) {
        const int *shape = shapes[i / 3], hard = (int)(i % 3);
        if (hard > 0 && shape[1] > 300) { continue; }
        CrossEntropy c = crossentropy(shape[0], shape[1], shape[2], hard);
        for (int n = 0; n + 1 < c.N; n += 2) {  // the first column of a part, or the last
            const int border = c.Vp * (1 + n % 6) / MOST_PARTS - n / 2 % 2;
            if (c.targets[n] >= 0 && border >= 0 && border < c.V) { c.targets[n] = border; }
        }
        solve(&c);
        check_parts(t, &c, &dev);
        crossentropy_free(&c);
    }
    device_free(&dev);
}

static void test_shapes(Test* t) { check_shapes(t, 0, 5003); }

static void test_special(Test* t) {
    check_shapes(t, 1, N_TEST_THREADS > 1 ? 5003 : 300);
    check_shapes(t, 2, N_TEST_THREADS > 1 ? 5003 : 300);
}

// rows of one extreme value each: the maximum starts at -10000, so below it a row may have no weight at all
static void test_huge(Test* t) {
    const float values[] = {1e4f, -1e4f, 3e38f, -3e38f, -9999.0f, -10050.0f, -10110.0f, INFINITY, -INFINITY, NAN};
    const int n_values = (int)(sizeof values / sizeof *values);
    CrossEntropy c = crossentropy(3 * n_values, 37, 40, 0);
    for (int n = 0; n < c.N; n++) {
        for (int v = 0; v < c.V; v++) {  // everywhere, in one place, everywhere but in one place
            int one = v == n % c.V, kind = n / n_values;
            if (kind == 0 || one == (kind == 1)) { c.logits[n * c.Vp + v] = values[n % n_values]; }
        }
    }
    solve(&c);
    check_all_threads(t, &c);
    Device dev = test_device(2);
    check_parts(t, &c, &dev);
    device_free(&dev);
    crossentropy_free(&c);
}

// the padding is 0 in probs and dlogits whatever the logits hold there; a row that is not counted has no loss and no
// gradient
static void test_not_counted(Test* t) {
    CrossEntropy c = crossentropy(2 * VLANES + 3, 33, 64, 0);
    Device dev = test_device(2);
    for (int i = 0; i < c.N * 64; i++) { c.probs[i] = c.dlogits[i] = c.losses[i / 64] = NAN; }
    forward(c.losses, c.probs, c.logits, &c, &dev);
    backward(c.dlogits, c.probs, &c, &dev);
    int n_without = 0;
    for (int n = 0; n < c.N; n++) {
        const float zeros[64] = {0};
        check_bits(t, "padding of probs", c.probs + n * 64 + 33, zeros, 31);
        check_bits(t, "padding of dlogits", c.dlogits + n * 64 + 33, zeros, 31);
        if (c.targets[n] >= 0) { continue; }
        check_bits(t, "dlogits of a row that is not counted", c.dlogits + n * 64, zeros, 64);
        check(t, float_bits(c.losses[n]) == 0, "loss of a row that is not counted: found %.9g", (double)c.losses[n]);
        n_without++;
    }
    check(t, n_without > 0 && n_without < c.N, "the data must hold both kinds of row");
    device_free(&dev);
    crossentropy_free(&c);
}

// ---- the plain loop itself ----

// mean-free textbook form: log sum exp - logit of the target
static double crossentropy_double(const double* logits, int target, int V) {
    double max = logits[0], sum = 0.0;
    for (int v = 1; v < V; v++) { max = logits[v] > max ? logits[v] : max; }
    for (int v = 0; v < V; v++) { sum += exp(logits[v] - max); }
    return log(sum) + max - logits[target];
}

static double crossentropy_loss(const double* logits, void* arg) {
    const CrossEntropy* c = (const CrossEntropy*)arg;
    double loss = 0.0;
    for (int n = 0; n < c->N; n++) {
        if (c->targets[n] >= 0) {
            loss += (double)DLOSS * crossentropy_double(logits + n * c->Vp, c->targets[n], c->V);
        }
    }
    return loss;
}

static void test_forward_double(Test* t) {
    CrossEntropy c = crossentropy(33, 257, 260, 0);
    double *logits = double_array(c.logits, 33 * 260), *losses = double_array(c.losses, 33),
           *probs = double_array(c.probs, 33 * 260);
    for (int n = 0; n < 33; n++) {
        if (c.targets[n] >= 0) { losses[n] = crossentropy_double(logits + n * 260, c.targets[n], 257); }
        for (int v = 0; v < 257; v++) { probs[n * 260 + v] = exp(-crossentropy_double(logits + n * 260, v, 257)); }
    }
    // a logit minus the largest, below 16, then a sum of 257 and a division: relative to a probability below 1/2, and
    // absolute in its logarithm, which is below 32 and rounds once more
    double relative = rounding_walk(1, 16.0) + rounding_walk(257 + 2, 1.0);
    check_close(t, "probs", c.probs, probs, 33 * 260, relative * 0.5);
    check_close(t, "losses", c.losses, losses, 33, relative + rounding_walk(1, 32.0));
    free(logits), free(losses), free(probs);
    crossentropy_free(&c);
}

static void test_differences(Test* t) {
    CrossEntropy c = crossentropy(7, 33, 40, 0);
    double *logits = double_array(c.logits, 7 * 40), *want = finite_differences(crossentropy_loss, logits, 7 * 40, &c);
    check_close(t, "dlogits", c.dlogits, want, 7 * 40,
                (rounding_walk(1, 16.0) + rounding_walk(33 + 4, 1.0)) * (double)DLOSS);
    free(logits), free(want);
    crossentropy_free(&c);
}

static void test_obvious(Test* t) {
    float logits[] = {3, 3, 3, 3, 9,   0, 200, 0, 0, 9,   -INFINITY, 1, 1, -INFINITY, 9};
    const float want_probs[] = {0.25f, 0.25f, 0.25f, 0.25f, 0,   0, 1, 0, 0, 0,   0, 0.5f, 0.5f, 0, 0};
    // times DLOSS
    const float want_dlogits[] = {0.25f, 0.25f, -0.75f, 0.25f, 0,   0, 0, 0, 0, 0,   -1, 0.5f, 0.5f, 0, 0};
    int targets[] = {2, 1, 0};
    float losses[3], probs[15], dlogits[15];
    Device dev = test_device(1);
    CrossEntropy c = {3, 4, 5, logits, targets, losses, probs, dlogits, NULL, NULL, NULL};
    forward(losses, probs, logits, &c, &dev);
    backward(dlogits, probs, &c, &dev);
    check_bits(t, "probs", probs, want_probs, 15);
    for (int i = 0; i < 15; i++) { dlogits[i] /= DLOSS; }
    check_bits(t, "dlogits", dlogits, want_dlogits, 15);
    check(t, losses[0] == 1.38629436f, "equal logits: the loss is log 4, found %.9g", (double)losses[0]);
    check(t, losses[1] == 0.0f && losses[2] == INFINITY, "certain and impossible: found %g and %g", (double)losses[1],
          (double)losses[2]);
    device_free(&dev);
}

// ---- sum of losses ----

static void test_losses_sum(Test* t) {
    const int lengths[] = {1, 7, 31, 32, 33, 257, 1024, 1025, 5003};
    for (size_t i = 0; i < 2 * sizeof lengths / sizeof *lengths; i++) {
        int n = lengths[i / 2];
        float *losses = i % 2 ? hard_array((size_t)n, 1) : random_array((size_t)n, 11.0f, 1), sum = NAN, want = 0.0f;
        double exact = 0.0, size = 0.0;
        Device dev = test_device(1);
        float *d_sum = to_device(&sum, 1, &dev), *d_losses = to_device(losses, (size_t)n, &dev);
        crossentropy_losses_sum(d_sum, d_losses, n, &dev);
        from_device(&sum, d_sum, 1, &dev), device_drop(d_losses);
        for (int k = 0; k < n; k++) { want += losses[k], exact += (double)losses[k], size += fabs((double)losses[k]); }
        if (!FAST_KERNELS) { check_bits(t, "sum of losses", &sum, &want, 1); }
        // a thread adds at most n / 1024 + 1 of them, then ten levels of a tree: each rounds once
        double error = fabs((double)sum - exact), allowed = (n / 1024 + 11) * 0x1p-24 * size;
        check(t, !FAST_KERNELS || error <= allowed, "n %d: found %.9g, expected %.9g, allowed %.3g", n, (double)sum,
              exact, allowed);
        device_free(&dev);
        free(losses);
    }
}

// ---- bf16 ----

#if defined(__CUDACC__) && !defined(EXACT)
static void check_bf16(Test* t, CrossEntropy* c, const Device* dev) {
    size_t n = (size_t)c->N * (size_t)c->Vp;
    float *losses = filled_array((size_t)c->N, NAN), *probs = filled_array(n, NAN), *dlogits = filled_array(n, NAN);
    for (size_t i = 0; i < n; i++) { c->logits[i] = (float)(bf16)c->logits[i]; }
    expect(c, 0x1p-8);  // half a last place of 8 bits
    bf16 *d_probs = to_device_as<bf16>(probs, n, dev), *d_logits = to_device_as<bf16>(c->logits, n, dev),
         *d_dlogits = to_device_as<bf16>(dlogits, n, dev);
    float* d_losses = to_device(losses, (size_t)c->N, dev);
    int* d_targets = ints_to_device(c->targets, (size_t)c->N, dev);
    crossentropy_forward(d_losses, d_probs, d_logits, d_targets, c->N, c->V, c->Vp, dev);
    crossentropy_backward(d_dlogits, d_probs, d_targets, DLOSS, c->N, c->V, c->Vp, dev);
    from_device_as(probs, d_probs, n, dev), from_device_as(dlogits, d_dlogits, n, dev);
    check_same(t, "bf16 probs", probs, c->probs, c->probs_error, n);
    // a stored probability has been rounded before
    for (size_t i = 0; i < n; i++) { c->dlogits_error[i] += 1.01 * 0x1p-8 * (double)c->probs[i] * (double)DLOSS; }
    check_same(t, "bf16 dlogits", dlogits, c->dlogits, c->dlogits_error, n);
    crossentropy_fused(d_losses, d_logits, d_targets, DLOSS, 0, c->N, c->V, c->Vp, dev);
    from_device_as(probs, to_device_as<bf16>(c->logits, n, dev), n, dev);
    from_device_as(dlogits, d_logits, n, dev);
    check(t, memcmp(dlogits, probs, sizeof(float) * n) == 0, "without the gradient the logits stay as they are");
    from_device(losses, d_losses, (size_t)c->N, dev);
    check_losses(t, "bf16 losses, no gradient", losses, c);
    expect(c, 0x1p-8);
    d_logits = to_device_as<bf16>(c->logits, n, dev), d_losses = to_device(losses, (size_t)c->N, dev);
    crossentropy_fused(d_losses, d_logits, d_targets, DLOSS, 1, c->N, c->V, c->Vp, dev);
    from_device_as(dlogits, d_logits, n, dev), from_device(losses, d_losses, (size_t)c->N, dev), device_drop(d_targets);
    check_losses(t, "bf16 losses", losses, c);
    check_same(t, "bf16 fused dlogits", dlogits, c->dlogits, c->dlogits_error, n);
    free(losses), free(probs), free(dlogits);
}

// logits of two parts; a gradient rounds once, a logit has before
static void check_bf16_parts(Test* t, CrossEntropy* c, const Device* dev) {
    const size_t N = (size_t)c->N, row = sizeof(CrossEntropyRow) / sizeof(float);
    if (c->Vp < 2) { return; }
    expect(c, 0x1p-8);
    float *losses = filled_array(N, NAN), *dlogits = filled_array(N * (size_t)c->Vp, NAN),
          *nothing = filled_array(2 * N * row, NAN);
    float *d_losses = to_device(losses, N, dev), *of_parts = to_device(nothing, 2 * N * row, dev),
          *of_all = to_device(nothing, N * row, dev);
    int* d_targets = ints_to_device(c->targets, N, dev);
    const Part part[2] = {part_of(c, 0, 2), part_of(c, 1, 2)};
    bf16* x[2];
    for (int p = 0; p < 2; p++) {
        x[p] = to_device_as<bf16>(part[p].logits, N * (size_t)part[p].Vp, dev);
        crossentropy_part_begin((CrossEntropyRow*)of_parts + N * (size_t)p, x[p], d_targets, part[p].first, c->N,
                                part[p].V, part[p].Vp, dev);
    }
    crossentropy_part_join((CrossEntropyRow*)of_all, (const CrossEntropyRow*)of_parts, 2, c->N, dev);
    for (int p = 0; p < 2; p++) {
        const size_t width = (size_t)part[p].Vp;
        crossentropy_part_end(d_losses, x[p], (const CrossEntropyRow*)of_all, d_targets, part[p].first, DLOSS, 1, c->N,
                              part[p].V, part[p].Vp, dev);
        from_device_as(part[p].logits, x[p], N * width, dev);
        for (size_t n = 0; n < N; n++) {
            memcpy(dlogits + n * (size_t)c->Vp + part[p].first, part[p].logits + n * width, sizeof(float) * width);
        }
        free(part[p].logits);
    }
    from_device(losses, d_losses, N, dev), device_drop(of_parts), device_drop(of_all), device_drop(d_targets);
    check_losses(t, "bf16 losses of parts", losses, c);
    check_same(t, "bf16 dlogits of parts", dlogits, c->dlogits, c->dlogits_error, N * (size_t)c->Vp);
    free(losses), free(dlogits), free(nothing);
}

static void test_bf16(Test* t) {
    const int bf16_shapes[][3] = {{1, 1, 1},       {7, 33, 64},     {3, 257, 257},
                                  {5, 1009, 1024}, {1, 1100, 1101}, {1, 9001, 9008}};
    Device dev = test_device(1);
    for (size_t i = 0; i < 3 * sizeof bf16_shapes / sizeof *bf16_shapes; i++) {
        const int *shape = bf16_shapes[i / 3], hard = (int)(i % 3);
        if (hard > 0 && shape[1] > 300) { continue; }
        CrossEntropy c = crossentropy(shape[0], shape[1], shape[2], hard);
        check_bf16(t, &c, &dev);
        check_bf16_parts(t, &c, &dev);
        crossentropy_free(&c);
    }
    device_free(&dev);
}
#else
static void test_bf16(Test* t) { skip(t, "a fast build for GPUs stores bf16"); }
#endif

int main(int argc, char** argv) {
    Promise promises[] = {
        {"shapes", "losses, probs, dlogits equal the plain loop at odd shapes, in place and fused too", test_shapes},
        {"special", "the same with cancellation, subnormals, -0, Inf, NaN among the logits", test_special},
        {"huge", "the same with rows of +-1e4, +-3e38, Inf, NaN", test_huge},
        {"parts", "columns in 1 to 7 parts give the bits of one, wherever the target is, padding too", test_parts},
        {"not counted", "zeros in the padding and in rows with a negative target", test_not_counted},
        {"forward double", "the plain loop agrees with double at (33, 257)", test_forward_double},
        {"backward differences", "the plain loop agrees with finite differences at (7, 33)", test_differences},
        {"losses sum", "the chain of the plain loop; fast kernels within the roundings of a tree", test_losses_sum},
        {"bf16", "losses, probs, dlogits, fused: within the rounding of bf16, Inf and NaN too", test_bf16},
        {"obvious", "equal logits, one certain token, one impossible token", test_obvious},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
