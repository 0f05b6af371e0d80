/*
Promises of llmc/ops/embedding.h and llmc/ops/residual.h: sums of two rows forward, sums over positions in ascending order
backward, added to what the gradient already held. Fast builds for GPUs may cut a long sum over positions in pieces.
*/
#include "llmc/ops/embedding.h"
#include "llmc/ops/residual.h"
#include "llmc/test/asked.h"
#include "llmc/test/test.h"

// one problem; V and maxT are larger than what the tokens reach, so that rows nobody asked for can be watched
typedef struct {
    int B, T, C, V, maxT;
    int* tokens;
    float *wte, *wpe, *dout, *dwte, *dwpe;  // dwte and dwpe: what they hold before
} Embedding;

static Embedding embedding(int B, int T, int C, int V, int hard) {
    Embedding e;
    e.B = B, e.T = T, e.C = C, e.V = V, e.maxT = T + 9;
    size_t n_wte = (size_t)V * (size_t)C, n_wpe = (size_t)e.maxT * (size_t)C, n_out = (size_t)B * (size_t)T * (size_t)C;
    uint64_t s = seeded_stream(1);
    e.tokens = (int*)new_array((size_t)B * (size_t)T, sizeof(int));
    for (int n = 0; n < B * T; n++) { e.tokens[n] = (int)(xorshift_u32(&s) % (uint32_t)V); }
    e.wte = hard ? hard_array(n_wte, 2) : random_array(n_wte, 1.0f, 2);
    e.wpe = hard ? hard_array(n_wpe, 3) : random_array(n_wpe, 1.0f, 3);
    e.dout = hard ? hard_array(n_out, 4) : random_array(n_out, 1.0f, 4);
    e.dwte = hard ? hard_array(n_wte, 5) : random_array(n_wte, 1.0f, 5);
    e.dwpe = hard ? hard_array(n_wpe, 6) : random_array(n_wpe, 1.0f, 6);
    if (hard == 2) {
        sprinkle(e.wte, n_wte, 50, 7);
        sprinkle(e.dout, n_out, 100, 8);
    }
    return e;
}

static void embedding_free(Embedding* e) {
    free(e->tokens);
    free(e->wte), free(e->wpe), free(e->dout), free(e->dwte), free(e->dwpe);
}

// ---- fast against plain, on the device ----

#if defined(__CUDACC__) && !defined(EXACT)
template <typename X>
static void run(float* out, float* dwte, float* dwpe, const Embedding* e, int t0, const Device* dev) {
    size_t n = (size_t)e->B * (size_t)e->T, n_wte = (size_t)e->V * (size_t)e->C, n_wpe = (size_t)e->maxT * (size_t)e->C;
    X *wte = to_device_as<X>(e->wte, n_wte, dev), *wpe = to_device_as<X>(e->wpe, n_wpe, dev);
    X *dout = to_device_as<X>(e->dout, n * (size_t)e->C, dev), *d_out = to_device_as<X>(out, n * (size_t)e->C, dev);
    float *d_dwte = to_device(e->dwte, n_wte, dev), *d_dwpe = to_device(e->dwpe, n_wpe, dev);
    int* tokens = ints_to_device(e->tokens, n, dev);
    embedding_forward(d_out, tokens, wte, wpe, e->B, e->T, e->C, t0, dev);
    embedding_backward(d_dwte, d_dwpe, dout, tokens, e->B, e->T, e->C, dev);
    from_device_as(out, d_out, n * (size_t)e->C, dev);
    from_device(dwte, d_dwte, n_wte, dev), from_device(dwpe, d_dwpe, n_wpe, dev);
    device_drop(wte), device_drop(wpe), device_drop(dout), device_drop(tokens);
}

static void run_embedding(float* out, float* dwte, float* dwpe, const Embedding* e, int t0, int bf16, const Device* dev) {
    if (bf16) { run<__nv_bfloat16>(out, dwte, dwpe, e, t0, dev); } else { run<float>(out, dwte, dwpe, e, t0, dev); }
}
#else
static void run_embedding(float* out, float* dwte, float* dwpe, const Embedding* e, int t0, int bf16, const Device* dev) {
    size_t n = (size_t)e->B * (size_t)e->T, n_wte = (size_t)e->V * (size_t)e->C, n_wpe = (size_t)e->maxT * (size_t)e->C;
    float *wte = to_device(e->wte, n_wte, dev), *wpe = to_device(e->wpe, n_wpe, dev);
    float *dout = to_device(e->dout, n * (size_t)e->C, dev), *d_out = to_device(out, n * (size_t)e->C, dev);
    float *d_dwte = to_device(e->dwte, n_wte, dev), *d_dwpe = to_device(e->dwpe, n_wpe, dev);
    int* tokens = ints_to_device(e->tokens, n, dev);
    (void)bf16;
    embedding_forward(d_out, tokens, wte, wpe, e->B, e->T, e->C, t0, dev);
    embedding_backward(d_dwte, d_dwpe, dout, tokens, e->B, e->T, e->C, dev);
    from_device(out, d_out, n * (size_t)e->C, dev);
    from_device(dwte, d_dwte, n_wte, dev), from_device(dwpe, d_dwpe, n_wpe, dev);
    device_drop(wte), device_drop(wpe), device_drop(dout), device_drop(tokens);
}
#endif

// to the nearest bf16, ties to even; finite numbers
static float bf16_nearest(float x) {
    uint32_t u = float_bits(x);
    return float_from_bits((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000);
}

// |x|: what bounds the rounding errors of a sum
static float* absolute(const float* x, size_t n) {
    float* y = copied_array(x, n);
    for (size_t i = 0; i < n; i++) { y[i] = fabsf(y[i]); }
    return y;
}

// bits; in a fast build any order of n_terms sums: each order is off by at most n_terms * 2^-24 * the sum of their sizes
static void check_sums(Test* t, const char* what, const float* got, const float* want, const float* sizes, int n_terms, size_t n) {
    if (!FAST_KERNELS) {
        check_bits(t, what, got, want, n);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        double allowed = n_terms * 0x1p-23 * (double)sizes[i];
        int same = isfinite(want[i]) ? fabs((double)got[i] - (double)want[i]) <= allowed
                                     : got[i] == want[i] || (isnan(got[i]) && isnan(want[i]));
        check(t, same, "%s: [%zu] found %.9g, expected %.9g, allowed %.3g", what, i, (double)got[i], (double)want[i], allowed);
    }
}

// bf16: everything in `e` that is stored is a bf16 already
static void check_embedding(Test* t, const Embedding* e, int t0, int bf16, const Device* dev) {
    size_t n_wte = (size_t)e->V * (size_t)e->C, n_wpe = (size_t)e->maxT * (size_t)e->C;
    size_t n_out = (size_t)e->B * (size_t)e->T * (size_t)e->C;
    float *got = filled_array(n_out, NAN), *want = filled_array(n_out, 77.0f), *dwte = filled_array(n_wte, NAN),
          *dwpe = filled_array(n_wpe, NAN), *want_dwte = copied_array(e->dwte, n_wte), *want_dwpe = copied_array(e->dwpe, n_wpe),
          *dout_sizes = absolute(e->dout, n_out), *dwte_sizes = absolute(e->dwte, n_wte), *dwpe_sizes = absolute(e->dwpe, n_wpe);
    char what[96];
    snprintf(what, sizeof what, "out, B %d, T %d, C %d, V %d, t0 %d, %d threads", e->B, e->T, e->C, e->V, t0,
             dev->n_threads);
    embedding_forward_ref(want, e->tokens, e->wte, e->wpe, e->B, e->T, e->C, t0);
    embedding_backward_ref(want_dwte, want_dwpe, e->dout, e->tokens, e->B, e->T, e->C);
    embedding_backward_ref(dwte_sizes, dwpe_sizes, dout_sizes, e->tokens, e->B, e->T, e->C);
    for (size_t i = 0; bf16 && i < n_out; i++) { want[i] = bf16_nearest(want[i]); }
    run_embedding(got, dwte, dwpe, e, t0, bf16, dev);
    check_bits(t, what, got, want, n_out);  // one sum of two, in every build
    check_sums(t, "dwte", dwte, want_dwte, dwte_sizes, e->B * e->T, n_wte);
    check_sums(t, "dwpe", dwpe, want_dwpe, dwpe_sizes, e->B, n_wpe);
    free(got), free(want), free(dwte), free(dwpe), free(want_dwte), free(want_dwpe);
    free(dout_sizes), free(dwte_sizes), free(dwpe_sizes);
}

static void check_shapes(Test* t, int hard) {
    const int shapes[][4] = {  // B, T, C, V: few tokens, so that most come again
        {1, 1, 1, 1}, {1, 7, 33, 3}, {3, 33, 7, 5}, {2, 31, 64, 7}, {2, 9, 65, 2}, {4, 16, 257, 97}, {257, 1, 3, 4},
        {1, 257, 129, 11},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        Embedding e = embedding(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], hard);
        for (int j = 0; j < N_TEST_THREADS; j++) {
            Device dev = test_device(test_threads(j));
            check_embedding(t, &e, 0, 0, &dev);
            check_embedding(t, &e, 9, 0, &dev);
            device_free(&dev);
        }
        embedding_free(&e);
    }
}

static void test_shapes(Test* t) { check_shapes(t, 0); }

static void test_special(Test* t) {
    check_shapes(t, 1);
    check_shapes(t, 2);
}

// more positions than one block sorts, one token in every third place, and one that has its lower 16 bits
static void test_many(Test* t) {
    Embedding e = embedding(5, 501, 8, 70001, 0);
    for (int n = 0; n < e.B * e.T; n += 3) { e.tokens[n] = n % 2 ? 66051 : 66051 - 65536; }
    Device dev = test_device(2);
    check_embedding(t, &e, 0, 0, &dev);
    device_free(&dev);
    embedding_free(&e);
}

// d: dwte, dwpe; inputs that nobody needs are NULL
static void asked_plain(float* const* d, const void* problem, const Device* dev) {
    const Embedding* e = (const Embedding*)problem;
    (void)dev;
    embedding_backward_ref(d[0], d[1], d[0] || d[1] ? e->dout : NULL, d[0] ? e->tokens : NULL, e->B, e->T, e->C);
}

static void asked_fast(float* const* d, const void* problem, const Device* dev) {
    const Embedding* e = (const Embedding*)problem;
    size_t N = (size_t)e->B * (size_t)e->T, C = (size_t)e->C, n_wte = (size_t)e->V * C, n_wpe = (size_t)e->maxT * C;
    float *dwte = asked_to_device(d[0], n_wte, dev), *dwpe = asked_to_device(d[1], n_wpe, dev);
    float* dout = asked_to_device(d[0] || d[1] ? e->dout : NULL, N * C, dev);
    int* tokens = d[0] ? ints_to_device(e->tokens, N, dev) : NULL;
    embedding_backward(dwte, dwpe, dout, tokens, e->B, e->T, e->C, dev);
    asked_from_device(d[0], dwte, n_wte, dev), asked_from_device(d[1], dwpe, n_wpe, dev);
    device_drop(dout), device_drop(tokens);
}

static void test_asked(Test* t) {
    const int shapes[][4] = {{3, 33, 7, 5}, {2, 65, 64, 3}};  // B, T, C, V
    Device dev = test_device(3);
    for (int i = 0; i < 2; i++) {
        Embedding e = embedding(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 1);
        size_t C = (size_t)e.C;
        const AskedGradient gradients[] = {{"dwte", (size_t)e.V * C, e.dwte}, {"dwpe", (size_t)e.maxT * C, e.dwpe}};
        check_asked(t, "plain", gradients, 2, asked_plain, &e, &dev);
        check_asked(t, "fast", gradients, 2, asked_fast, &e, &dev);
        embedding_free(&e);
    }
    device_free(&dev);
}

// without positions
static void test_tokens(Test* t) {
#ifdef __CUDACC__
    skip(t, "in C only");
#else
    const int shapes[][3] = {{1, 1, 1}, {7, 33, 3}, {99, 65, 5}, {257, 129, 11}};  // N, C, V
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int N = shapes[i][0], C = shapes[i][1], V = shapes[i][2];
        Embedding e = embedding(1, N, C, V, 0);
        size_t n_out = (size_t)N * (size_t)C, n_wte = (size_t)V * (size_t)C;
        for (int j = 0; j < N_TEST_THREADS; j++) {
            Device dev = test_device(test_threads(j));
            float *got = filled_array(n_out, NAN), *want = filled_array(n_out, NAN), *dwte = copied_array(e.dwte, n_wte),
                  *want_dwte = copied_array(e.dwte, n_wte);
            token_embedding_forward(got, e.tokens, e.wte, N, C, &dev);
            token_embedding_forward_ref(want, e.tokens, e.wte, N, C);
            token_embedding_backward(dwte, e.dout, e.tokens, N, C, &dev);
            token_embedding_backward_ref(want_dwte, e.dout, e.tokens, N, C);
            check_bits(t, "tokens alone", got, want, n_out);
            check_bits(t, "their gradient", dwte, want_dwte, n_wte);
            free(got), free(want), free(dwte), free(want_dwte);
            device_free(&dev);
        }
        embedding_free(&e);
    }
#endif
}

static void test_bf16(Test* t) {
    if (!FAST_KERNELS) {
        skip(t, "a fast build for GPUs stores bf16");
        return;
    }
    const int shapes[][4] = {{1, 1, 1, 1}, {3, 33, 7, 5}, {2, 31, 64, 7}, {2, 129, 24, 3}, {4, 16, 264, 97}, {1, 257, 129, 11}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        Embedding e = embedding(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 0);
        size_t n_wte = (size_t)e.V * (size_t)e.C, n_wpe = (size_t)e.maxT * (size_t)e.C, n_out = (size_t)e.B * (size_t)e.T * (size_t)e.C;
        for (size_t j = 0; j < n_wte; j++) { e.wte[j] = bf16_nearest(e.wte[j]); }
        for (size_t j = 0; j < n_wpe; j++) { e.wpe[j] = bf16_nearest(e.wpe[j]); }
        for (size_t j = 0; j < n_out; j++) { e.dout[j] = bf16_nearest(e.dout[j]); }
        Device dev = test_device(1);
        check_embedding(t, &e, 9, 1, &dev);
        device_free(&dev);
        embedding_free(&e);
    }
}

// sum of dout * out; x = wte, then wpe
static double embedding_loss(const double* x, void* arg) {
    const Embedding* e = (const Embedding*)arg;
    double loss = 0.0;
    for (int i = 0; i < e->B * e->T * e->C; i++) {
        int n = i / e->C, c = i % e->C;
        loss += (double)e->dout[i] * (x[e->tokens[n] * e->C + c] + x[(e->V + n % e->T) * e->C + c]);
    }
    return loss;
}

static void test_differences(Test* t) {
    enum { B = 3, T = 7, C = 5, V = 4, MAX_T = T + 9 };
    Embedding e = embedding(B, T, C, V, 0);
    float x[(V + MAX_T) * C];
    memcpy(x, e.wte, sizeof(float) * V * C);
    memcpy(x + V * C, e.wpe, sizeof(float) * MAX_T * C);
    double *at = double_array(x, (V + MAX_T) * C), *want = finite_differences(embedding_loss, at, (V + MAX_T) * C, &e);
    for (int i = 0; i < V * C; i++) { want[i] += (double)e.dwte[i]; }  // both are added to
    for (int i = 0; i < MAX_T * C; i++) { want[V * C + i] += (double)e.dwpe[i]; }
    embedding_backward_ref(e.dwte, e.dwpe, e.dout, e.tokens, B, T, C);
    check_close(t, "dwte", e.dwte, want, V * C, rounding_walk(B * T, 8.0));  // at most B*T sums below 8
    check_close(t, "dwpe", e.dwpe, want + V * C, MAX_T * C, rounding_walk(B, 4.0));  // B sums below 4
    free(at), free(want);
    embedding_free(&e);
}

static void test_obvious(Test* t) {
    int tokens[] = {1, 1, 0, 1};
    float wte[] = {1, 2, 10, 20}, wpe[] = {100, 200, 300, 400, 500, 600}, dout[] = {1, 2, 3, 4, 5, 6, 7, 8};
    const float want[] = {310, 420, 510, 620, 301, 402, 510, 620}, want_dwte[] = {5, 6, 11, 14},
                want_dwpe[] = {6, 8, 10, 12, 0, 0};
    float out[8], dwte[4], dwpe[6], zeros[6] = {0};
    Embedding e = {2, 2, 2, 2, 3, tokens, wte, wpe, dout, zeros, zeros};
    Device dev = test_device(2);
    run_embedding(out, dwte, dwpe, &e, 1, 0, &dev);  // positions 1 and 2
    check_bits(t, "out", out, want, 8);
    check_bits(t, "dwte", dwte, want_dwte, 4);
    check_bits(t, "dwpe", dwpe, want_dwpe, 6);
    device_free(&dev);
}

// 2^24 + 1 rounds back, 1 + 1 + 2^24 does not: positions must come in ascending order, after what was there
static void test_order(Test* t) {
    int tokens[] = {0, 0, 0};
    float ascending[] = {1, 1, 16777216}, reversed[] = {16777216, 1, 1}, w[3] = {0}, dwte, dwpe[3], out[3];
    Embedding e = {1, 3, 1, 1, 3, tokens, w, w, ascending, w, w};
    Device dev = test_device(2);
    run_embedding(out, &dwte, dwpe, &e, 0, 0, &dev);
    check(t, dwte == 16777218.0f, "1 + 1 + 2^24: found %.1f", (double)dwte);
    e.dout = reversed;
    run_embedding(out, &dwte, dwpe, &e, 0, 0, &dev);
    check(t, dwte == 16777216.0f, "2^24 + 1 + 1: found %.1f", (double)dwte);
    device_free(&dev);
}

// ---- residual ----

static void check_residual(Test* t, const float* left, const float* right, size_t n, const Device* dev) {
    float *want = filled_array(n, 77.0f), *out = filled_array(n, NAN), *in_left = filled_array(n, NAN),
          *in_right = filled_array(n, NAN);
    residual_forward_ref(want, left, right, n);
    for (size_t i = 0; i < n; i++) {
        float sum = left[i] + right[i];
        check_bits(t, "plain loop", want + i, &sum, 1);
    }
    float *d_left = to_device(left, n, dev), *d_right = to_device(right, n, dev), *d_out = to_device(out, n, dev);
    residual_forward(d_out, d_left, d_right, n, dev);
    from_device(out, d_out, n, dev);
    residual_forward(d_left, d_left, d_right, n, dev);
    from_device(in_left, d_left, n, dev);
    d_left = to_device(left, n, dev);
    residual_forward(d_right, d_left, d_right, n, dev);
    from_device(in_right, d_right, n, dev);
    device_drop(d_left);
    check_bits(t, "out apart", out, want, n);
    check_bits(t, "out is left", in_left, want, n);
    check_bits(t, "out is right", in_right, want, n);
    free(want), free(out), free(in_left), free(in_right);
}

static void test_residual(Test* t) {
    const size_t lengths[] = {1, 7, 33, 257, 4096, 10007};
    for (size_t i = 0; i < N_TEST_THREADS * sizeof lengths / sizeof *lengths; i++) {
        size_t n = lengths[i / N_TEST_THREADS];
        Device dev = test_device(test_threads((int)i % N_TEST_THREADS));
        float *left = hard_array(n, 1), *right = hard_array(n, 2);
        check_residual(t, left, right, n, &dev);
        sprinkle(left, n, 20, 3);
        sprinkle(right, n, 20, 4);
        check_residual(t, left, right, n, &dev);
        free(left), free(right);
        device_free(&dev);
    }
}

#if defined(__CUDACC__) && !defined(EXACT)
// `first`: where in an array it begins, so that packs lie between 16-byte lines, or at different places of them
static void check_residual_bf16(Test* t, size_t first_left, size_t first_right, size_t n, const Device* dev) {
    float *left = random_array(n + 3, 1.0f, 1), *right = random_array(n + 3, 1.0f, 2), *out = filled_array(n + 3, NAN);
    for (size_t i = 0; i < n + 3; i++) { left[i] = bf16_nearest(left[i]), right[i] = bf16_nearest(right[i]); }
    __nv_bfloat16 *d_left = to_device_as<__nv_bfloat16>(left, n + 3, dev), *d_right = to_device_as<__nv_bfloat16>(right, n + 3, dev),
                  *d_out = to_device_as<__nv_bfloat16>(out, n + 3, dev);
    residual_forward(d_out, d_left + first_left, d_right + first_right, n, dev);
    from_device_as(out, d_out, n + 3, dev);
    for (size_t i = 0; i < n; i++) {
        float want = bf16_nearest(left[first_left + i] + right[first_right + i]);
        check(t, out[i] == want, "n %zu: [%zu] found %g, expected %g", n, i, (double)out[i], (double)want);
    }
    check(t, isnan(out[n]) && isnan(out[n + 1]) && isnan(out[n + 2]), "n %zu: written beyond the end", n);
    device_drop(d_left), device_drop(d_right), free(left), free(right), free(out);
}

static void test_residual_bf16(Test* t) {
    const size_t lengths[] = {1, 7, 8, 33, 257, 4096, 10007};
    Device dev = test_device(1);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        check_residual_bf16(t, 0, 0, lengths[i], &dev);
        check_residual_bf16(t, 0, 3, lengths[i], &dev);
    }
    device_free(&dev);
}
#else
static void test_residual_bf16(Test* t) { skip(t, "a fast build for GPUs stores bf16"); }
#endif

int main(int argc, char** argv) {
    Promise promises[] = {
        {"embedding", "out, dwte and dwpe equal the plain loops at odd shapes, t0 0 and 9; both gradients are added to",
         test_shapes},
        {"embedding special", "the same with cancellation, subnormals, -0, Inf, NaN", test_special},
        {"asked", "gradients that nobody asks for are NULL: the others keep their bits", test_asked},
        {"token embedding", "without positions: the plain loops' bits at odd shapes, 1 to 7 threads; added to", test_tokens},
        {"embedding many", "2505 positions and 70001 tokens, of which two fill every third place", test_many},
        {"embedding bf16", "out is the sum rounded to bf16, the gradients are float sums", test_bf16},
        {"embedding differences", "the gradients agree with finite differences at (3, 7, 5)", test_differences},
        {"embedding obvious", "a sum that can be done by hand", test_obvious},
        {"embedding order", "positions are added in ascending order", test_order},
        {"residual", "is left + right at odd lengths, apart and in place on either side, Inf and NaN too",
         test_residual},
        {"residual bf16", "the sum rounded to bf16, at odd lengths and addresses", test_residual_bf16},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
