/*
Promises of llmc/embedding.h and llmc/residual.h: sums of two rows forward, sums over positions in ascending order
backward, added to what the gradient already held.
*/
#include "llmc/embedding.h"
#include "llmc/residual.h"
#include "llmc/test.h"

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

static void check_embedding(Test* t, const Embedding* e, int t0, const Device* dev) {
    size_t n_wte = (size_t)e->V * (size_t)e->C, n_wpe = (size_t)e->maxT * (size_t)e->C;
    size_t n_out = (size_t)e->B * (size_t)e->T * (size_t)e->C;
    float *got = filled_array(n_out, NAN), *want = filled_array(n_out, 77.0f);
    char what[96];
    snprintf(what, sizeof what, "out, B %d, T %d, C %d, V %d, t0 %d, %d threads", e->B, e->T, e->C, e->V, t0,
             dev->n_threads);
    embedding_forward_ref(want, e->tokens, e->wte, e->wpe, e->B, e->T, e->C, t0);
    embedding_forward(got, e->tokens, e->wte, e->wpe, e->B, e->T, e->C, t0, dev);
    check_bits(t, what, got, want, n_out);
    float *dwte = copied_array(e->dwte, n_wte), *dwpe = copied_array(e->dwpe, n_wpe);
    float *want_dwte = copied_array(e->dwte, n_wte), *want_dwpe = copied_array(e->dwpe, n_wpe);
    embedding_backward_ref(want_dwte, want_dwpe, e->dout, e->tokens, e->B, e->T, e->C);
    embedding_backward(dwte, dwpe, e->dout, e->tokens, e->B, e->T, e->C, dev);
    check_bits(t, "dwte", dwte, want_dwte, n_wte);
    check_bits(t, "dwpe", dwpe, want_dwpe, n_wpe);
    free(got), free(want), free(dwte), free(dwpe), free(want_dwte), free(want_dwpe);
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
            check_embedding(t, &e, 0, &dev);
            check_embedding(t, &e, 9, &dev);
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
    const int tokens[] = {1, 1, 0, 1};
    const float wte[] = {1, 2, 10, 20}, wpe[] = {100, 200, 300, 400, 500, 600}, dout[] = {1, 2, 3, 4, 5, 6, 7, 8};
    const float want[] = {310, 420, 510, 620, 301, 402, 510, 620}, want_dwte[] = {5, 6, 11, 14},
                want_dwpe[] = {6, 8, 10, 12, 0, 0};
    float out[8], dwte[4] = {0}, dwpe[6] = {0};
    Device dev = test_device(2);
    embedding_forward(out, tokens, wte, wpe, 2, 2, 2, 1, &dev);  // positions 1 and 2
    embedding_backward(dwte, dwpe, dout, tokens, 2, 2, 2, &dev);
    check_bits(t, "out", out, want, 8);
    check_bits(t, "dwte", dwte, want_dwte, 4);
    check_bits(t, "dwpe", dwpe, want_dwpe, 6);
    device_free(&dev);
}

// 2^24 + 1 rounds back, 1 + 1 + 2^24 does not: positions must come in ascending order, after what was there
static void test_order(Test* t) {
    const int tokens[] = {0, 0, 0};
    const float dout[] = {1, 1, 16777216}, reversed[] = {16777216, 1, 1};
    float dwte = 0.0f, dwpe[3] = {0};
    Device dev = test_device(2);
    embedding_backward(&dwte, dwpe, dout, tokens, 1, 3, 1, &dev);
    check(t, dwte == 16777218.0f, "1 + 1 + 2^24: found %.1f", (double)dwte);
    dwte = 0.0f;
    embedding_backward(&dwte, dwpe, reversed, tokens, 1, 3, 1, &dev);
    check(t, dwte == 16777216.0f, "2^24 + 1 + 1: found %.1f", (double)dwte);
    device_free(&dev);
}

// ---- residual ----

static void check_residual(Test* t, const float* left, const float* right, size_t n, const Device* dev) {
    float *want = filled_array(n, 77.0f), *out = filled_array(n, NAN), *in_left = copied_array(left, n),
          *in_right = copied_array(right, n);
    residual_forward_ref(want, left, right, n);
    for (size_t i = 0; i < n; i++) {
        float sum = left[i] + right[i];
        check_bits(t, "plain loop", want + i, &sum, 1);
    }
    residual_forward(out, left, right, n, dev);
    residual_forward(in_left, in_left, right, n, dev);
    residual_forward(in_right, left, in_right, n, dev);
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

int main(int argc, char** argv) {
    Promise promises[] = {
        {"embedding", "out, dwte and dwpe equal the plain loops at odd shapes, t0 0 and 9; both gradients are added to",
         test_shapes},
        {"embedding special", "the same with cancellation, subnormals, -0, Inf, NaN", test_special},
        {"embedding differences", "the gradients agree with finite differences at (3, 7, 5)", test_differences},
        {"embedding obvious", "a sum that can be done by hand", test_obvious},
        {"embedding order", "positions are added in ascending order", test_order},
        {"residual", "is left + right at odd lengths, apart and in place on either side, Inf and NaN too",
         test_residual},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
