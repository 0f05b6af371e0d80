/*
Promises of llmc/ops/forward_forward.h: corrupted rows differ and are functions of a key, goodness and its gradient agree with double
and with finite differences, rust_trainer's hinge has the numbers of spec mamba_hpn.md 13.C1, and threads change no bit.
*/
#include "llmc/ops/forward_forward.h"
#include "llmc/ops/gradient_surgery.h"  // rust_trainer's two gradients of one d_skip
#include "llmc/test/test.h"

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
        for (int n = 0; n < B * T; n++) { check(t, negatives[n] >= 0 && negatives[n] < V, "V %d: found %d", V, negatives[n]); }
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
    for (int v = 0; v < V; v++) { check(t, abs(counts[v] - 2400) < 220, "token %d: expected about 2400, found %d", v, counts[v]); }
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
        check(t, memcmp(some, all, sizeof(int) * 3 * T) == 0, "fraction %g: three rows of eight are not those of three", (double)fraction);
        ff_corrupt(some, tokens, 8, T, fraction, V, 6);
        check(t, memcmp(some, all, sizeof(int) * 8 * T) != 0, "fraction %g: another key makes the same rows", (double)fraction);
        memcpy(some, tokens, sizeof(int) * 8 * T);
        ff_corrupt(some, some, 8, T, fraction, V, 5);
        check(t, memcmp(some, all, sizeof(int) * 8 * T) == 0, "fraction %g: in place it is not the same", (double)fraction);
    }
    free(tokens), free(some), free(all);
}

// ---- goodness ----

static void check_goodness(Test* t, const float* o, int N, int M, const Device* dev) {
    const size_t n = (size_t)N * M;
    float *dout = filled_array(n, NAN), *want = filled_array(n, 77.0f), *losses = filled_array(N, NAN), *want_losses = filled_array(N, 77.0f);
    char what[64];
    for (int is_real = 0; is_real < 2; is_real++) {
        snprintf(what, sizeof what, "(%d, %d), real %d, %d threads", N, M, is_real, dev->n_threads);
        ff_goodness_ref(want_losses, want, o, 0.4f, is_real, 0.7f, N, M);
        ff_goodness(losses, dout, o, 0.4f, is_real, 0.7f, N, M, dev);
        check_bits(t, what, dout, want, n);
        check_bits(t, what, losses, want_losses, N);
        memcpy(dout, o, sizeof(float) * n);
        ff_goodness(losses, dout, dout, 0.4f, is_real, 0.7f, N, M, dev);
        check_bits(t, what, dout, want, n);
    }
    free(dout), free(want), free(losses), free(want_losses);
}

static void test_goodness_bits(Test* t) {
    const int sizes[] = {1, 7, 33, 257};
    for (int i = 0; i < N_TEST_THREADS * 16 * 3; i++) {
        const int N = sizes[i % 4], M = sizes[i / 4 % 4], kind = i / 16 % 3;
        Device dev = test_device(test_threads(i / 48));
        float* o = kind ? hard_array((size_t)N * M, (uint64_t)i) : random_array((size_t)N * M, 2.0f, (uint64_t)i);
        if (kind == 2) { sprinkle(o, (size_t)N * M, 100, (uint64_t)i); }
        check_goodness(t, o, N, M, &dev);
        free(o);
        device_free(&dev);
    }
}

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
        // G < 9 by 34 roundings moves the slope, 1/4 steep at most, by 34 * 2^-25 * 9 / 4 at most; times 2 * 3 / 33 / 4, and as many of it
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
        ff_goodness(&loss, dout, o, 9.0f, is_real, 1.0f, 1, 2, &dev);  // at the threshold: log 2, and half the slope of the goodness
        check(t, loss == 0.693147182f, "real %d: loss %.9g", is_real, (double)loss);
        check(t, dout[0] == sign * 1.5f && dout[1] == sign * -1.5f, "real %d: dout %g %g", is_real, (double)dout[0], (double)dout[1]);
        ff_goodness(&loss, dout, large, 1.0f, is_real, 1.0f, 1, 2, &dev);
        check(t, loss == (is_real ? 0.0f : 399.0f), "real %d, large: loss %g", is_real, (double)loss);
        ff_goodness(&loss, dout, huge, 1.0f, is_real, 1.0f, 1, 2, &dev);  // the goodness overflows: a perfect or a hopeless one
        check(t, is_real ? loss == 0.0f : isinf(loss), "real %d, huge: loss %g", is_real, (double)loss);
        check(t, is_real ? dout[0] == 0.0f : dout[0] == 1e30f, "real %d, huge: dout %g", is_real, (double)dout[0]);
    }
    device_free(&dev);
}

// ---- rust_trainer's hinge ----

static void check_rt(Test* t, const float* r_in, const float* d_skip, int B, int T, int M, const Device* dev) {
    float *found = filled_array(M, NAN), *want = filled_array(M, 77.0f), loss, want_loss;
    char what[64];
    for (int complete = 0; complete < 2; complete++) {
        snprintf(what, sizeof what, "(%d, %d, %d), complete %d, %d threads", B, T, M, complete, dev->n_threads);
        rt_ff_ref(want, &want_loss, r_in, d_skip, complete, B, T, M, dev);
        rt_ff(found, &loss, r_in, d_skip, complete, B, T, M, dev);
        check_bits(t, what, found, want, M);
        check_bits(t, what, &loss, &want_loss, 1);
    }
    free(found), free(want);
}

static void test_rt_bits(Test* t) {
    const int sizes[] = {1, 7, 33, 257};
    for (int i = 0; i < N_TEST_THREADS * 16 * 3; i++) {
        const int T = sizes[i % 4], M = sizes[i / 4 % 4], kind = i / 16 % 3, B = 2;
        const size_t n = (size_t)B * T * M;
        Device dev = test_device(test_threads(i / 48));
        float *r_in = kind ? hard_array(n, (uint64_t)i) : random_array(n, 2.0f, (uint64_t)i), *d_skip = random_array(M, 0.02f, 7);
        if (kind == 2) { sprinkle(r_in, n, 2000, (uint64_t)i); }
        check_rt(t, r_in, d_skip, B, T, M, &dev);
        free(r_in), free(d_skip);
        device_free(&dev);
    }
}

// The model of spec mamba_hpn.md 13.C1 in double: rt_loss is 2.1 step by step, and leaves the input of each layer
enum { RT_V = 6, RT_M = 4, RT_N = 3, RT_K = 4, RT_L = 2, RT_T = 5, RT_P = 2 * RT_N + 1 };

typedef struct {
    double a_log[RT_M][RT_N], d_skip[RT_M], x_proj[RT_M][RT_P], dt_w[RT_M], dt_b[RT_M], conv_w[RT_M][RT_K], conv_b[RT_M], out_proj[RT_M][RT_M];
} RtLayer;

typedef struct {
    double embedding[RT_V][RT_M];
    RtLayer layer[RT_L];
    double prototypes[RT_V][RT_M];
    double inputs[RT_L][RT_T][RT_M];  // of the layers, after rt_loss
    int moved;                        // layer whose d_skip rt_loss_of_d_skip changes
} RtModel;

// tensor j: base + amp * sin(0.37 (i + 1) + 1.3 j), i from 0
static void rt_fill(double* x, size_t n, int j, double base, double amp) {
    for (size_t i = 0; i < n; i++) { x[i] = base + amp * sin(0.37 * (double)(i + 1) + 1.3 * j); }
}

#define RT_FILL(tensor, j, base, amp) rt_fill((double*)(tensor), sizeof(tensor) / sizeof(double), j, base, amp)
static void rt_init(RtModel* m) {
    RT_FILL(m->embedding, 0, 0.0, 1.0);
    for (int l = 0; l < RT_L; l++) {
        RtLayer* p = m->layer + l;
        const int j = 1 + 8 * l;
        RT_FILL(p->a_log, j, 0.0, 0.3), RT_FILL(p->d_skip, j + 1, 0.0, 0.5), RT_FILL(p->x_proj, j + 2, 0.0, 1.0);
        RT_FILL(p->dt_w, j + 3, 0.0, 1.0), RT_FILL(p->dt_b, j + 4, -1.0, 0.5), RT_FILL(p->conv_w, j + 5, 0.0, 0.8);
        RT_FILL(p->conv_b, j + 6, 0.0, 0.1), RT_FILL(p->out_proj, j + 7, 0.0, 0.4);
    }
    RT_FILL(m->prototypes, 1 + 8 * RT_L, 0.0, 0.6);
}

// y of position t, from u of it; h (RT_M, RT_N) is the state
static void rt_scan(double* y, double h[RT_M][RT_N], const double* u, const RtLayer* p) {
    double proj[RT_P] = {0};
    for (int d = 0; d < RT_M; d++) {
        for (int i = 0; i < RT_P; i++) { proj[i] += u[d] * p->x_proj[d][i]; }
    }
    for (int d = 0; d < RT_M; d++) {
        double delta = log1p(exp(proj[2 * RT_N] * p->dt_w[d] + p->dt_b[d]));
        y[d] = p->d_skip[d] * u[d];
        for (int n = 0; n < RT_N; n++) {
            h[d][n] = exp(-delta * exp(p->a_log[d][n])) * h[d][n] + delta * u[d] * proj[n];
            y[d] += proj[RT_N + n] * h[d][n];
        }
    }
}

// r += the layer's output
static void rt_layer(double r[RT_T][RT_M], const RtLayer* p) {
    double h[RT_M][RT_N] = {{0}}, in[RT_T][RT_M], u[RT_M], y[RT_M];
    memcpy(in, r, sizeof in);
    for (int t = 0; t < RT_T; t++) {
        for (int d = 0; d < RT_M; d++) {
            double c = p->conv_b[d];
            for (int k = 0; k < RT_K; k++) { c += t - (RT_K - 1) + k < 0 ? 0.0 : p->conv_w[d][k] * in[t - (RT_K - 1) + k][d]; }
            u[d] = c / (1.0 + exp(-c));
        }
        rt_scan(y, h, u, p);
        for (int i = 0; i < RT_M * RT_M; i++) { r[t][i % RT_M] += y[i / RT_M] * p->out_proj[i / RT_M][i % RT_M]; }
    }
}

// (1 - c)^2 of one position: LayerNorm, then c = z . prototype / |z|
static double rt_head(const double* r, const double* prototype) {
    double mean = 0.0, square = 0.0, dot = 0.0, length = 0.0;
    for (int d = 0; d < RT_M; d++) { mean += r[d] / RT_M; }
    for (int d = 0; d < RT_M; d++) { square += (r[d] - mean) * (r[d] - mean) / RT_M; }
    for (int d = 0; d < RT_M; d++) {
        double z = (r[d] - mean) / sqrt(square + 1e-5);
        dot += z * prototype[d];
        length += z * z;
    }
    double c = dot / sqrt(length);
    return (1.0 - c) * (1.0 - c);
}

static double rt_loss(RtModel* m) {
    const int tokens[RT_T] = {0, 3, 1, 5, 2}, targets[RT_T] = {3, 1, 5, 2, 4};
    double r[RT_T][RT_M], loss = 0.0;
    for (int t = 0; t < RT_T; t++) { memcpy(r[t], m->embedding[tokens[t]], sizeof r[t]); }
    for (int l = 0; l < RT_L; l++) {
        memcpy(m->inputs[l], r, sizeof r);
        rt_layer(r, m->layer + l);
    }
    for (int t = 0; t < RT_T; t++) { loss += rt_head(r[t], m->prototypes[targets[t]]) / RT_T; }
    return loss;
}

static double rt_loss_of_d_skip(const double* d_skip, void* arg) {
    RtModel* m = (RtModel*)arg;
    memcpy(m->layer[m->moved].d_skip, d_skip, sizeof m->layer[m->moved].d_skip);
    return rt_loss(m);
}

static void rt_floats(float* x, const double* from, size_t n) {
    for (size_t i = 0; i < n; i++) { x[i] = (float)from[i]; }
}

static void check_number(Test* t, const char* what, double found, double want, double relative) {
    check(t, fabs(found - want) <= relative * fabs(want), "%s: found %.9g, expected %.9g", what, found, want);
}

static void test_rt_fixture(Test* t) {
    const double goodness[RT_L][2] = {{-2.4220379, 0.77482741}, {7.2598547, -0.61409476}};  // g+, g-
    const double gradient[2][RT_M] = {{-8.4966337, -7.7226881, -2.8302841, -5.9493192}, {-9.5792627, -6.4729503, 0.58267438, -0.83506797}};
    RtModel m;
    Device dev = test_device(2);
    rt_init(&m);
    check_number(t, "head loss", rt_loss(&m), 1.1506279, 1e-7);
    for (int l = 0; l < RT_L; l++) {
        float r_in[RT_T * RT_M], d_skip[RT_M], dd_skip[RT_M], h[2 * RT_M], loss;
        rt_floats(r_in, &m.inputs[l][0][0], RT_T * RT_M), rt_floats(d_skip, m.layer[l].d_skip, RT_M);
        rt_ff_means_ref(h, r_in, 1, RT_T, RT_M, 0, RT_M);
        for (int i = 0; i < 2; i++) {
            rt_ff_normalise_(h + i * RT_M, RT_M);
            check_number(t, i ? "g-" : "g+", (double)rt_ff_goodness_(h + i * RT_M, d_skip, RT_M), goodness[l][i], 1e-5);
        }
        for (int complete = 0; complete < 2; complete++) {
            rt_ff(dd_skip, &loss, r_in, d_skip, complete, 1, RT_T, RT_M, &dev);
            check_number(t, "loss", (double)loss, l == 0 ? 4.1968654 : 0.0, 1e-5);
            for (int d = 0; d < RT_M; d++) { check_number(t, "gradient", (double)dd_skip[d], l == 0 ? gradient[complete][d] : 0.0, 2e-5); }
        }
    }
    device_free(&dev);
}

// f and b of d_skip in layer 0 oppose each other, and surgery sees it
static void test_rt_conflict(Test* t) {
    RtModel m;
    Device dev = test_device(2);
    rt_init(&m);
    m.moved = 0;
    double at[RT_M], length = 0.0;
    float r_in[RT_T * RT_M], d_skip[RT_M], f[RT_M], head[RT_M], loss, *g[2] = {head, f};
    memcpy(at, m.layer[0].d_skip, sizeof at);
    double* b = finite_differences(rt_loss_of_d_skip, at, RT_M, &m);
    rt_loss_of_d_skip(at, &m);
    rt_floats(r_in, &m.inputs[0][0][0], RT_T * RT_M), rt_floats(d_skip, at, RT_M), rt_floats(head, b, RT_M);
    rt_ff(f, &loss, r_in, d_skip, 0, 1, RT_T, RT_M, &dev);
    for (int d = 0; d < RT_M; d++) { length += b[d] * b[d]; }
    check_number(t, "first element of b", b[0], 0.00035955303, 1e-6);
    check_number(t, "|b|", sqrt(length), 0.0021956592, 1e-6);
    SurgeryConfig config = {SURGERY_RT_PCGRAD, 1e-8f, 1.0f, 0, 0.2f, {0, 0}, 0};
    const SurgeryRange range = {0, RT_M};
    Surgery s;
    SurgeryReport report;
    surgery_init(&s, &config, &range, 1, 2);
    surgery_apply(&report, g, &s, 0, 1.0f, NULL, &dev);
    check_number(t, "f.b", report.dots[0][1], -0.0025214445, 1e-5);
    check(t, report.n_conflicts == 1 && report.n_projections == 1, "expected a conflict and a projection, found %d and %d",
          report.n_conflicts, report.n_projections);
    surgery_free(&s), free(b);
    device_free(&dev);
}

// the hinge in double, of float means h+ and h- that were normalised
typedef struct {
    const float* h;
    int M;
} HingeCase;

static double hinge_loss(const double* d_skip, void* arg) {
    const HingeCase* c = (const HingeCase*)arg;
    double length = 0.0, difference = 0.0;
    for (int d = 0; d < c->M; d++) { length += d_skip[d] * d_skip[d]; }
    for (int d = 0; d < c->M; d++) { difference += ((double)c->h[d] - (double)c->h[c->M + d]) * d_skip[d] / (sqrt(length) + 1e-5); }
    return 1.0 - difference;
}

static void test_rt_gradient(Test* t) {
    enum { B = 3, T = 11, M = 33 };
    Device dev = test_device(2);
    float *r_in = random_array(B * T * M, 1.0f, 1), *d_skip = random_array(M, 0.5f, 2), dd_skip[M], h[2 * M], loss;
    rt_ff(dd_skip, &loss, r_in, d_skip, 1, B, T, M, &dev);
    if (loss == 0.0f) {  // the other way round it is above 1
        for (int d = 0; d < M; d++) { d_skip[d] = -d_skip[d]; }
        rt_ff(dd_skip, &loss, r_in, d_skip, 1, B, T, M, &dev);
    }
    rt_ff_means_ref(h, r_in, B, T, M, 0, M);
    rt_ff_normalise_(h, M), rt_ff_normalise_(h + M, M);
    HingeCase c = {h, M};
    double *at = double_array(d_skip, M), *want = finite_differences(hinge_loss, at, M, &c);
    check(t, loss > 0.0f, "no loss, no gradient");
    // q.d_skip is a chain of 33 terms, together below 33 * 5 * 0.5, over |d_skip| near 1.7, twice
    check_close(t, "complete gradient", dd_skip, want, M, rounding_walk(33, 33 * 5 * 0.5) / 1.7 / 1.7);
    check_number(t, "loss", (double)loss, hinge_loss(at, &c), 33 * 0x1p-24 * 10);
    free(r_in), free(d_skip), free(at), free(want);
    device_free(&dev);
}

static void test_rt_edges(Test* t) {
    enum { B = 1, T = 4, M = 8 };
    Device dev = test_device(1);
    float *r_in = random_array(B * T * M, 1.0f, 3), zero[M] = {0}, plain[M], complete[M], loss;
    rt_ff(plain, &loss, r_in, zero, 0, B, T, M, &dev);
    rt_ff(complete, &loss, r_in, zero, 1, B, T, M, &dev);
    check(t, loss == 1.0f && fabsf(plain[0]) > 100.0f, "d_skip 0: loss %g, gradient %g", (double)loss, (double)plain[0]);
    check_bits(t, "d_skip 0: the second term is 0", complete, plain, M);
    r_in[5] = NAN;
    rt_ff(plain, &loss, r_in, zero, 0, B, T, M, &dev);
    check(t, isnan(loss) && isnan(plain[0]), "NaN: loss %g, gradient %g", (double)loss, (double)plain[0]);
    free(r_in);
    device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"corrupt rows", "every row differs from the real one, by tokens of the vocabulary, also with V 2 and T 1", test_corrupt_rows},
        {"corrupt draws", "the asked fraction is replaced, all other tokens alike", test_corrupt_draws},
        {"corrupt key", "a position is a function of the key and its number; negatives may be tokens", test_corrupt_key},
        {"goodness bits", "equals the plain loop to the last bit, also in place, for 1, 2, 3 and 7 threads", test_goodness_bits},
        {"goodness double", "loss and dout agree with double and with finite differences", test_goodness_double},
        {"goodness obvious", "log 2 and half a slope at the threshold; an overflow stays harmless", test_goodness_obvious},
        {"rt bits", "equals the plain loop to the last bit for 1, 2, 3 and 7 threads", test_rt_bits},
        {"rt fixture", "loss, goodness and both gradients of spec 13.C1", test_rt_fixture},
        {"rt conflict", "there d_skip's two gradients have the dot product of the spec, a conflict", test_rt_conflict},
        {"rt gradient", "the complete gradient agrees with finite differences", test_rt_gradient},
        {"rt edges", "a d_skip of zeros and a NaN", test_rt_edges},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
