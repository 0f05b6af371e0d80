/*
Promises of llmc/crossentropy.h. The plain loop is judged in double, by finite differences and on rows whose answer is
obvious; the fast version must equal it bit for bit, whatever the shape, the threads, the targets and the logits, in
place too.
*/
#include "llmc/crossentropy.h"
#include "llmc/test.h"

#define DLOSS 0.03f  // not a power of two: dividing by 1 / DLOSS would be another result

// one problem and the plain loop's answer
typedef struct {
    int N, V, Vp;
    float* logits;   // given; the padding holds garbage
    int* targets;    // about one in five is not counted
    float *losses, *probs, *dlogits;  // found
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
    solve(&c);
    return c;
}

static void crossentropy_free(CrossEntropy* c) {
    free(c->logits), free(c->targets);
    free(c->losses), free(c->probs), free(c->dlogits);
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
    crossentropy_forward(losses, probs, in_place ? probs : c->logits, c->targets, c->N, c->V, c->Vp, dev);
    check_bits(t, what, probs, c->probs, n);
    check_bits(t, "losses", losses, c->losses, (size_t)c->N);
    crossentropy_backward(dlogits, probs, c->targets, DLOSS, c->N, c->V, c->Vp, dev);
    check_bits(t, "dlogits", dlogits, c->dlogits, n);
    if (!in_place) {
        check_bits(t, "probs are left alone", probs, c->probs, n);
        free(dlogits);
    }
    free(losses), free(probs);
}

static void check_all_threads(Test* t, const CrossEntropy* c) {
    for (int i = 0; i < 2 * N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i / 2));
        check_both(t, c, i % 2, &dev);
        device_free(&dev);
    }
}

static void check_shapes(Test* t, int hard) {
    const int shapes[][3] = {  // N, V, Vp
        {1, 1, 1}, {1, 1, 7}, {1, 7, 7}, {7, 33, 64}, {33, 7, 9}, {17, 257, 257}, {33, 127, 128}, {16, 97, 128},
        {31, 1009, 1024}, {VLANES, VLANES, VLANES}, {VLANES, 4 * VLANES, 4 * VLANES + 1},
        {2 * VLANES + 1, 4 * VLANES + 1, 5 * VLANES}, {3 * VLANES - 1, 9 * VLANES - 1, 9 * VLANES},
        {VLANES, 5003, 5004},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        CrossEntropy c = crossentropy(shapes[i][0], shapes[i][1], shapes[i][2], hard);
        check_all_threads(t, &c);
        crossentropy_free(&c);
    }
}

static void test_shapes(Test* t) { check_shapes(t, 0); }

static void test_special(Test* t) {
    check_shapes(t, 1);
    check_shapes(t, 2);
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
    crossentropy_free(&c);
}

// the padding is 0 in probs and dlogits whatever the logits hold there; a row that is not counted has no loss and no
// gradient
static void test_not_counted(Test* t) {
    CrossEntropy c = crossentropy(2 * VLANES + 3, 33, 64, 0);
    Device dev = test_device(2);
    for (int i = 0; i < c.N * 64; i++) { c.probs[i] = c.dlogits[i] = c.losses[i / 64] = NAN; }
    crossentropy_forward(c.losses, c.probs, c.logits, c.targets, c.N, c.V, c.Vp, &dev);
    crossentropy_backward(c.dlogits, c.probs, c.targets, DLOSS, c.N, c.V, c.Vp, &dev);
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
    const float logits[] = {3, 3, 3, 3, 9,   0, 200, 0, 0, 9,   -INFINITY, 1, 1, -INFINITY, 9};
    const float want_probs[] = {0.25f, 0.25f, 0.25f, 0.25f, 0,   0, 1, 0, 0, 0,   0, 0.5f, 0.5f, 0, 0};
    const float want_dlogits[] = {0.5f, 0.5f, -1.5f, 0.5f, 0,   0, 0, 0, 0, 0,   -2, 1, 1, 0, 0};
    const int targets[] = {2, 1, 0};
    float losses[3], probs[15], dlogits[15];
    Device dev = test_device(1);
    crossentropy_forward(losses, probs, logits, targets, 3, 4, 5, &dev);
    crossentropy_backward(dlogits, probs, targets, 2.0f, 3, 4, 5, &dev);
    check_bits(t, "probs", probs, want_probs, 15);
    check_bits(t, "dlogits", dlogits, want_dlogits, 15);
    check(t, losses[0] == 1.38629436f, "equal logits: the loss is log 4, found %.9g", (double)losses[0]);
    check(t, losses[1] == 0.0f && losses[2] == INFINITY, "certain and impossible: found %g and %g", (double)losses[1],
          (double)losses[2]);
    device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"shapes", "losses, probs, dlogits equal the plain loop at odd shapes, in place too", test_shapes},
        {"special", "the same with cancellation, subnormals, -0, Inf, NaN among the logits", test_special},
        {"huge", "the same with rows of +-1e4, +-3e38, Inf, NaN", test_huge},
        {"not counted", "zeros in the padding and in rows with a negative target", test_not_counted},
        {"forward double", "the plain loop agrees with double at (33, 257)", test_forward_double},
        {"backward differences", "the plain loop agrees with finite differences at (7, 33)", test_differences},
        {"obvious", "equal logits, one certain token, one impossible token", test_obvious},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
