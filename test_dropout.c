/*
Promises of llmc/ops/dropout.h: the plain loop's bits in any pieces, the right share left out, nothing in common between
sites, steps and seeds. That a model with it trains and differentiates rightly is for test_gpt2.c and its golden files.
*/
#include "llmc/ops/dropout.h"
#include "llmc/test/test.h"

static Dropout example(float p, uint64_t seed, uint64_t step, uint64_t first) {
    const Dropout d = {p, dropout_key(seed, step), first};
    return d;
}

// the elements from..n-1, in place or not; what comes back is said to lie there
static float* fast(Test* t, const float* x, Dropout d, int site, size_t from, size_t n, int in_place,
                   const Device* dev) {
    float *inp = to_device(x, n, dev), *out = in_place ? inp : to_device(x, n, dev);
    float* found = copied_array(x, n);
    d.first += from;
    const float* where = dropout(out + from, inp + from, &d, site, n - from, dev);
    check(t, where == out + from, "the result is elsewhere");
    if (!in_place) { device_drop(inp); }
    from_device(found, out, n, dev);
    return found;
}

static void test_lengths(Test* t) {
    const size_t lengths[] = {1, 7, 16, 33, 257, 4099};
    Device dev = test_device(3);
    for (int i = 0; i < 6; i++) {
        const size_t n = lengths[i];
        const Dropout d = example(0.3f, 42, 5, (uint64_t)1 << 40);
        float *x = random_array(n, 2.0f, 9), *want = filled_array(n, NAN);
        dropout_ref(want, x, &d, 4, n);
        for (int in_place = 0; in_place < 2; in_place++) {
            float* found = fast(t, x, d, 4, 0, n, in_place, &dev);
            check_bits(t, in_place ? "in place" : "fast", found, want, n);
            free(found);
        }
        float* piece = fast(t, x, d, 4, n / 3, n, 0, &dev);  // begins between boundaries
        check_bits(t, "from the third part on", piece + n / 3, want + n / 3, n - n / 3);
        free(piece), free(x), free(want);
    }
    device_free(&dev);
}

static void test_none(Test* t) {
    Device dev = test_device(1);
    float x[4] = {1.0f, -0.0f, INFINITY, NAN}, out[4] = {0};
    const Dropout none = example(0.0f, 1, 1, 0);
    check(t, dropout(out, x, &none, 0, 4, &dev) == x && out[0] == 0.0f,
          "with p = 0 inp comes back and out is not touched");
    device_free(&dev);
}

// zeros of x (n ones) after dropout, into left_out
static int zeros(unsigned char* left_out, size_t n, Dropout d, int site) {
    float *x = filled_array(n, 1.0f), *out = filled_array(n, 0.0f);
    int count = 0;
    dropout_ref(out, x, &d, site, n);
    for (size_t i = 0; i < n; i++) { count += left_out[i] = out[i] == 0.0f; }
    free(x), free(out);
    return count;
}

// the share and, between two draws, the share left out by both, within 5 standard deviations
static void test_share(Test* t) {
    enum { N = 100000 };
    const float shares[] = {0.01f, 0.1f, 0.5f, 0.9f};
    unsigned char *a = (unsigned char*)new_array(N, 1), *b = (unsigned char*)new_array(N, 1);
    for (int i = 0; i < 4; i++) {
        const double p = (double)shares[i], both = p * p;
        const int n = zeros(a, N, example(shares[i], 42, 7, 0), 3);
        check(t, fabs(n - N * p) < 5.0 * sqrt(N * p * (1.0 - p)), "p %g: %d of %d left out", p, n, N);
        const Dropout others[] = {example(shares[i], 43, 7, 0), example(shares[i], 42, 8, 0),
                                  example(shares[i], 42, 7, 0), example(shares[i], 42, 7, N)};
        for (int k = 0; k < 4; k++) {
            int n_both = 0;
            zeros(b, N, others[k], k == 2 ? 4 : 3);
            for (int j = 0; j < N; j++) { n_both += a[j] && b[j]; }
            check(t, fabs(n_both - N * both) < 5.0 * sqrt(N * both * (1.0 - both)), "p %g, other %s: %d by both", p,
                  k == 0 ? "seed" : k == 1 ? "step" : k == 2 ? "site" : "rows", n_both);
        }
    }
    free(a), free(b);
}

// 1 / (1 - 0.25) and nothing else
static void test_obvious(Test* t) {
    float x[64], out[64];
    int n = 0;
    for (int i = 0; i < 64; i++) { x[i] = 3.0f; }
    const Dropout d = example(0.25f, 1, 0, 0);
    dropout_ref(out, x, &d, 0, 64);
    for (int i = 0; i < 64; i++) {
        check(t, out[i] == 0.0f || out[i] == 4.0f, "3 became %g", (double)out[i]);
        n += out[i] == 0.0f;
    }
    check(t, n > 4 && n < 30, "%d of 64 left out", n);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"lengths", "equals the plain loop at odd lengths, in place, in pieces", test_lengths},
        {"none", "with p = 0 nothing is copied", test_none},
        {"share", "as many are left out as p says; seeds, steps, sites and rows have nothing in common", test_share},
        {"obvious", "what stays is divided by 1 - p", test_obvious},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
