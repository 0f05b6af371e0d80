/*
Promises of llmc/ops/selective_scan.h. The plain loops are judged in double, by finite differences, and on a small case
computed elsewhere; the fast version must equal them bit for bit, whatever the shape, the threads and the chunk. What
the model needs of the recurrence, that rows can be cut and that documents do not see each other, is tested on the fast
version, in bits too.
*/
#include "llmc/ops/selective_scan.h"
#include "llmc/test/asked.h"
#include "llmc/test/test.h"

// one problem
typedef struct {
    int B, T, C, NS;
    size_t stride;                                              // of ssm_B, ssm_C and their gradients, columns of it
    float *u, *delta, *A_log, *ssm_B, *ssm_C, *D, *dy, *state, *dstate;  // given
    unsigned char* starts;
} Problem;

// all that both passes find
typedef struct {
    float *y, *state, *du, *ddelta, *dA_log, *dp, *dD, *dstate;  // dp: dssm_B, then dssm_C, in rows of stride floats
} Result;

enum { WITH_STATE = 1, WITH_STARTS = 2, HARD = 4, SPECIAL = 8 };  // what a problem has; SPECIAL: infinities and NaNs

static size_t n_inputs(const Problem* p) { return (size_t)p->B * (size_t)p->T * (size_t)p->C; }
static size_t n_states(const Problem* p) { return (size_t)p->B * (size_t)p->C * (size_t)p->NS; }
static size_t n_rates(const Problem* p) { return (size_t)p->C * (size_t)p->NS; }
static size_t n_columns(const Problem* p) { return (size_t)p->B * (size_t)p->T * p->stride; }

static Problem problem(int B, int T, int C, int NS, int kind) {
    Problem p;
    p.B = B, p.T = T, p.C = C, p.NS = NS, p.stride = 2 * (size_t)NS + 3;
    size_t n = n_inputs(&p);
    p.u = kind & HARD ? hard_array(n, 1) : random_array(n, 1.0f, 1);
    p.delta = kind & HARD ? hard_array(n, 2) : random_array(n, 1.0f, 2);
    p.A_log = kind & HARD ? hard_array(n_rates(&p), 3) : random_array(n_rates(&p), 2.0f, 3);
    p.ssm_B = kind & HARD ? hard_array(n_columns(&p), 4) : random_array(n_columns(&p), 1.0f, 4);
    p.ssm_C = p.ssm_B + NS + 1;
    p.D = kind & HARD ? hard_array((size_t)C, 5) : random_array((size_t)C, 1.0f, 5);
    p.dy = kind & HARD ? hard_array(n, 6) : random_array(n, 1.0f, 6);
    p.state = kind & WITH_STATE ? random_array(n_states(&p), 1.0f, 7) : NULL;
    p.dstate = kind & WITH_STATE ? random_array(n_states(&p), 1.0f, 12) : NULL;
    p.starts = kind & WITH_STARTS ? (unsigned char*)new_array((size_t)B * (size_t)T, 1) : NULL;
    for (size_t i = 0; i < n; i++) { p.delta[i] = fabsf(p.delta[i]); }
    for (int i = 0; p.starts && i < B * T; i++) { p.starts[i] = i * 7 % 5 == 1 || i * 3 % 11 == 9; }
    if (kind & SPECIAL) {
        sprinkle(p.u, n, (uint32_t)(n / 2 + 2), 8),
            sprinkle(p.ssm_B, n_columns(&p), (uint32_t)(n_columns(&p) / 2 + 2), 9);
        sprinkle(p.dy, n, (uint32_t)(n / 2 + 2), 10),
            sprinkle(p.A_log, n_rates(&p), (uint32_t)(n_rates(&p) / 2 + 2), 11);
    }
    return p;
}

static void problem_free(Problem* p) {
    free(p->u), free(p->delta), free(p->A_log), free(p->ssm_B), free(p->D), free(p->dy), free(p->state),
        free(p->dstate), free(p->starts);
}

static Result result(const Problem* p) {
    Result r;
    size_t n = n_inputs(p);
    r.y = filled_array(n, NAN), r.du = filled_array(n, NAN), r.ddelta = filled_array(n, NAN);
    r.dA_log = filled_array(n_rates(p), NAN), r.dD = filled_array((size_t)p->C, NAN);
    r.dp = filled_array(n_columns(p), 77.0f);  // and 77 it stays between the columns
    r.state = p->state ? copied_array(p->state, n_states(p)) : NULL;
    r.dstate = p->dstate ? copied_array(p->dstate, n_states(p)) : NULL;
    return r;
}

static void result_free(Result* r) {
    free(r->y), free(r->state), free(r->du), free(r->ddelta), free(r->dA_log), free(r->dp), free(r->dD);
    free(r->dstate);
}

static Result plain(const Problem* p) {
    Result r = result(p);
    scan_forward_ref(r.y, r.state, p->u, p->delta, p->A_log, p->ssm_B, p->ssm_C, p->stride, p->D, p->starts, p->B, p->T,
                     p->C, p->NS);
    scan_backward_ref(r.du, r.ddelta, r.dA_log, r.dp, r.dp + p->NS + 1, p->stride, r.dD, r.dstate, p->dy, p->state,
                      p->u, p->delta, p->A_log, p->ssm_B, p->ssm_C, p->stride, p->D, p->starts, p->B, p->T, p->C,
                      p->NS);
    return r;
}

static Result fast(const Problem* p, int chunk, const Device* dev) {
    Result r = result(p);
    float* states = filled_array(scan_states_floats(p->B, p->T, p->C, p->NS, chunk), NAN);
    scan_forward(r.y, states, r.state, p->u, p->delta, p->A_log, p->ssm_B, p->ssm_C, p->stride, p->D, p->starts, p->B,
                 p->T, p->C, p->NS, chunk, dev);
    scan_backward(r.du, r.ddelta, r.dA_log, r.dp, r.dp + p->NS + 1, p->stride, r.dD, r.dstate, p->dy, states, p->u,
                  p->delta, p->A_log, p->ssm_B, p->ssm_C, p->stride, p->D, p->starts, p->B, p->T, p->C, p->NS, chunk,
                  dev);
    free(states);
    return r;
}

static Result fast_alone(const Problem* p, int chunk) {
    Device dev = test_device(1);
    Result r = fast(p, chunk, &dev);
    device_free(&dev);
    return r;
}

static void check_results(Test* t, const Problem* p, const char* title, const Result* got, const Result* want) {
    const char* names[] = {"y", "state", "du", "ddelta", "dA_log", "dssm_B and dssm_C", "dD", "dstate"};
    const float* g[] = {got->y, got->state, got->du, got->ddelta, got->dA_log, got->dp, got->dD, got->dstate};
    const float* w[] = {want->y, want->state, want->du, want->ddelta, want->dA_log, want->dp, want->dD, want->dstate};
    const size_t n[] = {n_inputs(p), got->state ? n_states(p) : 0, n_inputs(p), n_inputs(p), n_rates(p), n_columns(p),
                        (size_t)p->C, got->dstate ? n_states(p) : 0};
    for (int i = 0; i < 8; i++) {
        char what[160];
        snprintf(what, sizeof what, "%s, B %d T %d C %d NS %d, %s: %s", title, p->B, p->T, p->C, p->NS,
                 p->starts ? "documents" : "rows", names[i]);
        check_bits(t, what, g[i], w[i], n[i]);
    }
}

// ---- fast against plain ----

static void check_shapes(Test* t, int kind) {
    const int shapes[][5] = {
        // B, T, C, NS, chunk
        {1, 1, 1, 1, 1},     {2, 7, 1, 2, 3},    {1, 9, 7, 1, 4},
        {3, 4, 33, 3, 2},    {1, 33, 64, 16, 8}, {2, 6, 65, 7, 4},
        {1, 5, 257, 17, 32}, {2, 3, 144, 33, 2}, {1, 2, 16, SCAN_MAX_STATES, 1},
        {1, 257, 3, 2, 64},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int* s = shapes[i];
        Problem p = problem(s[0], s[1], s[2], s[3], kind);
        Result want = plain(&p);
        for (int j = 0; j < N_TEST_THREADS; j++) {
            Device dev = test_device(test_threads(j));
            Result got = fast(&p, s[4], &dev);
            size_t promised = scan_workspace_bytes(p.B, p.T, p.C, p.NS, s[4], dev.n_threads);
            check(t, dev.workspace->n_bytes == promised, "workspace of %zu bytes, said %zu", dev.workspace->n_bytes,
                  promised);
            check_results(t, &p, "fast", &got, &want);
            result_free(&got);
            device_free(&dev);
        }
        result_free(&want);
        problem_free(&p);
    }
}

static void test_shapes(Test* t) { check_shapes(t, 0); }
static void test_shapes_state(Test* t) { check_shapes(t, WITH_STATE | WITH_STARTS); }

static void test_hard(Test* t) {
    check_shapes(t, HARD | WITH_STATE);
    check_shapes(t, HARD | SPECIAL | WITH_STARTS);
}

// ---- rows, chunks, documents: always bits ----

// d: du, ddelta, dA_log, dssm_B, dssm_C, dD; where nobody asks for anything, nothing is read
static void asked_plain(float* const* d, const void* problem, const Device* dev) {
    const Problem* p = (const Problem*)problem;
    (void)dev;
    scan_backward_ref(d[0], d[1], d[2], d[3], d[4], p->stride, d[5], NULL, p->dy, p->state, p->u, p->delta, p->A_log,
                      p->ssm_B, p->ssm_C, p->stride, p->D, p->starts, p->B, p->T, p->C, p->NS);
}

static void asked_fast(float* const* d, const void* problem, const Device* dev) {
    const Problem* p = (const Problem*)problem;
    const int chunk = 4, any = d[0] || d[1] || d[2] || d[3] || d[4] || d[5];
    float* states = filled_array(scan_states_floats(p->B, p->T, p->C, p->NS, chunk), NAN);
    float *state = p->state ? copied_array(p->state, n_states(p)) : NULL, *y = filled_array(n_inputs(p), NAN);
    scan_forward(y, states, state, p->u, p->delta, p->A_log, p->ssm_B, p->ssm_C, p->stride, p->D, p->starts, p->B, p->T,
                 p->C, p->NS, chunk, dev);
    scan_backward(d[0], d[1], d[2], d[3], d[4], p->stride, d[5], NULL, any ? p->dy : NULL, any ? states : NULL,
                  any ? p->u : NULL, any ? p->delta : NULL, any ? p->A_log : NULL, any ? p->ssm_B : NULL,
                  any ? p->ssm_C : NULL, p->stride, any ? p->D : NULL, p->starts, p->B, p->T, p->C, p->NS, chunk, dev);
    free(states), free(state), free(y);
}

static void test_asked(Test* t) {
    Device dev = test_device(3);
    Problem p = problem(2, 9, 65, 7, WITH_STATE | WITH_STARTS);
    size_t n = n_inputs(&p), n_rows = n_columns(&p);
    float* before = filled_array(n_rows, 77.0f);  // and 77 it stays between the rows
    const AskedGradient gradients[] = {
        {"du", n, NULL}, {"ddelta", n, NULL}, {"dA_log", n_rates(&p), NULL},
        {"dssm_B", n_rows, before}, {"dssm_C", n_rows, before}, {"dD", (size_t)p.C, NULL},
    };
    check_asked(t, "plain", gradients, 6, asked_plain, &p, &dev);
    check_asked(t, "fast", gradients, 6, asked_fast, &p, &dev);
    free(before);
    problem_free(&p);
    device_free(&dev);
}

static void test_chunks(Test* t) {
    const int chunks[] = {3, 5, 11, 37, 1000};
    Problem p = problem(2, 37, 70, 5, WITH_STATE | WITH_STARTS);
    Result want = fast_alone(&p, 1);
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        Result got = fast_alone(&p, chunks[i]);
        check_results(t, &p, "chunks", &got, &want);
        result_free(&got);
    }
    result_free(&want);
    problem_free(&p);
}

// n positions from `first` on of a problem with one row, as a problem of its own; `state` is what the positions before
// left
static void forward_part(float* y, float* state, const Problem* p, int first, int n, const Device* dev) {
    size_t at = (size_t)first * (size_t)p->C, column = (size_t)first * p->stride;
    scan_forward(y + at, NULL, state, p->u + at, p->delta + at, p->A_log, p->ssm_B + column, p->ssm_C + column,
                 p->stride, p->D, p->starts ? p->starts + first : NULL, 1, n, p->C, p->NS, 4, dev);
}

static void test_split(Test* t) {
    Problem p = problem(1, 23, 70, 6, WITH_STATE);
    Result whole = fast_alone(&p, 8);
    Device dev = test_device(2);
    for (int step = 1; step < 23; step += 5) {  // 1: as generation does it
        float *y = filled_array(n_inputs(&p), NAN), *state = copied_array(p.state, n_states(&p));
        for (int first = 0; first < p.T; first += step) {
            forward_part(y, state, &p, first, first + step < p.T ? step : p.T - first, &dev);
        }
        check_bits(t, "y", y, whole.y, n_inputs(&p));
        check_bits(t, "state", state, whole.state, n_states(&p));
        free(y), free(state);
    }
    result_free(&whole);
    problem_free(&p);
    device_free(&dev);
}

// a row that comes back in parts, the last one first: `dstate` is what the parts behind ask
static void backward_part(const Result* r, float* dstate, const Problem* p, int first, int n, const Device* dev) {
    size_t at = (size_t)first * (size_t)p->C, column = (size_t)first * p->stride;
    const unsigned char* starts = p->starts ? p->starts + first : NULL;
    float *state = copied_array(p->state, n_states(p)), *y = filled_array(n_inputs(p), NAN);
    float* states = filled_array(scan_states_floats(1, n, p->C, p->NS, 4), NAN);
    forward_part(y, state, p, 0, first, dev);
    scan_forward(y + at, states, state, p->u + at, p->delta + at, p->A_log, p->ssm_B + column, p->ssm_C + column,
                 p->stride, p->D, starts, 1, n, p->C, p->NS, 4, dev);
    scan_backward(r->du + at, r->ddelta + at, r->dA_log, r->dp + column, r->dp + column + p->NS + 1, p->stride, r->dD,
                  dstate, p->dy + at, states, p->u + at, p->delta + at, p->A_log, p->ssm_B + column,
                  p->ssm_C + column, p->stride, p->D, starts, 1, n, p->C, p->NS, 4, dev);
    free(states), free(state), free(y);
}

static void test_split_backward(Test* t) {
    Device dev = test_device(2);
    for (int kind = WITH_STATE; kind <= (WITH_STATE | WITH_STARTS); kind += WITH_STARTS) {
        Problem p = problem(1, 23, 70, 6, kind);
        Result whole = fast_alone(&p, 8);
        for (int step = 1; step < 23; step += 5) {
            Result parts = result(&p);
            for (int end = p.T; end > 0; end -= step) {
                const int n = end < step ? end : step;
                backward_part(&parts, parts.dstate, &p, end - n, n, &dev);
            }
            check_bits(t, "du", parts.du, whole.du, n_inputs(&p));
            check_bits(t, "ddelta", parts.ddelta, whole.ddelta, n_inputs(&p));
            check_bits(t, "dssm_B and dssm_C", parts.dp, whole.dp, n_columns(&p));
            check_bits(t, "dstate", parts.dstate, whole.dstate, n_states(&p));
            result_free(&parts);
        }
        result_free(&whole);
        problem_free(&p);
    }
    device_free(&dev);
}

// a row of two documents: each has the outputs and gradients that it has alone, whatever stands in the other
static void test_documents(Test* t) {
    const int T = 19, second = 8;
    Problem p = problem(1, T, 37, 4, WITH_STATE | WITH_STARTS);
    for (int i = 0; i < T; i++) { p.starts[i] = i == second; }
    Result before = fast_alone(&p, 5);
    size_t first_u = (size_t)second * (size_t)p.C, rest_u = n_inputs(&p) - first_u;
    size_t first_p = (size_t)second * p.stride, rest_p = n_columns(&p) - first_p;
    for (size_t i = 0; i < first_u; i++) { p.u[i] += 1.0f, p.delta[i] *= 0.5f, p.dy[i] -= 3.0f; }
    p.state[0] = 1e30f;
    Result other_first = fast_alone(&p, 5);
    check_bits(t, "y after", other_first.y + first_u, before.y + first_u, rest_u);
    check_bits(t, "du after", other_first.du + first_u, before.du + first_u, rest_u);
    check_bits(t, "ddelta after", other_first.ddelta + first_u, before.ddelta + first_u, rest_u);
    check_bits(t, "dssm after", other_first.dp + first_p, before.dp + first_p, rest_p);
    check_bits(t, "last state", other_first.state, before.state, n_states(&p));
    for (size_t i = first_u; i < n_inputs(&p); i++) { p.u[i] += 1.0f, p.delta[i] *= 0.5f, p.dy[i] -= 3.0f; }
    Result other_both = fast_alone(&p, 5);
    check_bits(t, "y before", other_both.y, other_first.y, first_u);
    check_bits(t, "du before", other_both.du, other_first.du, first_u);
    check_bits(t, "ddelta before", other_both.ddelta, other_first.ddelta, first_u);
    check_bits(t, "dssm before", other_both.dp, other_first.dp, first_p);
    result_free(&before), result_free(&other_first), result_free(&other_both);
    problem_free(&p);
}

// ---- in double ----

// the inputs of a problem one after the other: u, delta, A_log, columns of ssm_B and ssm_C, D
static size_t pack(double* x, const Problem* p) {
    const float* arrays[] = {p->u, p->delta, p->A_log, p->ssm_B, p->D};
    const size_t n[] = {n_inputs(p), n_inputs(p), n_rates(p), n_columns(p), (size_t)p->C};
    size_t at = 0;
    for (int i = 0; i < 5; i++) {
        for (size_t j = 0; x && j < n[i]; j++) { x[at + j] = (double)arrays[i][j]; }
        at += n[i];
    }
    return at;
}

// one channel of one row; returns the sum of y * dy, and of h after the last position * dstate. y NULL where it is not
// wanted
static double double_channel(double* y, const double* x, const Problem* p, int b, int c) {
    size_t rates = 2 * n_inputs(p), columns = rates + n_rates(p), skips = columns + n_columns(p);
    double h[SCAN_MAX_STATES], loss = 0.0;
    for (int n = 0; n < p->NS; n++) { h[n] = p->state ? (double)p->state[(b * p->C + c) * p->NS + n] : 0.0; }
    for (int bt = b * p->T; bt < (b + 1) * p->T; bt++) {
        size_t at = (size_t)(bt * p->C + c);
        const double *ssm_B = x + columns + (size_t)bt * p->stride, *ssm_C = ssm_B + p->NS + 1;
        double u = x[at], delta = x[n_inputs(p) + at], sum = x[skips + (size_t)c] * u;
        for (int n = 0; n < p->NS; n++) {
            double A = -exp(x[rates + (size_t)(c * p->NS + n)]);
            h[n] = (p->starts && p->starts[bt] ? 0.0 : exp(delta * A) * h[n]) + delta * u * ssm_B[n];
            sum += ssm_C[n] * h[n];
        }
        if (y) { y[at] = sum; }
        loss += sum * (double)p->dy[at];
    }
    for (int n = 0; p->dstate && n < p->NS; n++) { loss += h[n] * (double)p->dstate[(b * p->C + c) * p->NS + n]; }
    return loss;
}

static double double_loss(const double* x, void* arg) {
    const Problem* p = (const Problem*)arg;
    double loss = 0.0;
    for (int b = 0; b < p->B; b++) {
        for (int c = 0; c < p->C; c++) { loss += double_channel(NULL, x, p, b, c); }
    }
    return loss;
}

static void test_forward_double(Test* t) {
    Problem p = problem(2, 65, 70, 16, WITH_STATE | WITH_STARTS);
    Result r = fast_alone(&p, 16);
    double *x = (double*)new_array(pack(NULL, &p), sizeof(double)),
           *want = (double*)new_array(n_inputs(&p), sizeof(double));
    pack(x, &p);
    for (int b = 0; b < p.B; b++) {
        for (int c = 0; c < p.C; c++) { double_channel(want, x, &p, b, c); }
    }
    // |h| < 2, |y| < 32: 16 products and sums, each term with the errors of about ten steps of h
    check_close(t, "y", r.y, want, n_inputs(&p), rounding_walk(16, 32.0) + rounding_walk(16 * 10 * 4, 2.0));
    free(x), free(want);
    result_free(&r);
    problem_free(&p);
}

static void test_differences(Test* t) {
    const int kinds[] = {0, WITH_STATE, WITH_STARTS, WITH_STATE | WITH_STARTS};
    for (int i = 0; i < 4; i++) {
        Problem p = problem(2, 7, 5, 3, kinds[i]);
        Result r = fast_alone(&p, 3);
        double* x = (double*)new_array(pack(NULL, &p), sizeof(double));
        double* slopes = finite_differences(double_loss, x, pack(x, &p), &p);
        double *du = slopes, *ddelta = du + n_inputs(&p), *dA = ddelta + n_inputs(&p), *dp = dA + n_rates(&p),
               *dD = dp + n_columns(&p);
        const double tolerance =
            1e-5;  // gradients below 10, about 200 roundings of 2^-24 of that, and 1e-8 of the differences
        check_close(t, "du", r.du, du, n_inputs(&p), tolerance);
        check_close(t, "ddelta", r.ddelta, ddelta, n_inputs(&p), tolerance);
        check_close(t, "dA_log", r.dA_log, dA, n_rates(&p), tolerance);
        check_close(t, "dD", r.dD, dD, (size_t)p.C, tolerance);
        for (int bt = 0; bt < p.B * p.T; bt++) {
            size_t row = (size_t)bt * p.stride, to_C = row + (size_t)p.NS + 1;
            check_close(t, "dssm_B", r.dp + row, dp + row, (size_t)p.NS, tolerance);
            check_close(t, "dssm_C", r.dp + to_C, dp + to_C, (size_t)p.NS, tolerance);
            check(t, r.dp[row + (size_t)p.NS] == 77.0f, "a number between the columns was overwritten");
        }
        free(x), free(slopes);
        result_free(&r);
        problem_free(&p);
    }
}

// ---- a case computed elsewhere, with its bias, softplus and gate by plain code ----

enum { FIXTURE_T = 4 };

static double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

// (T, 2) to (2, T), as the fixture lists them
static void check_fixture(Test* t, const char* what, const float* got, const double* want, int by_channel) {
    float turned[2 * FIXTURE_T];
    for (int i = 0; i < FIXTURE_T; i++) {
        for (int c = 0; c < 2; c++) {
            turned[c * FIXTURE_T + i] = by_channel ? got[i * 2 + c] : got[c * FIXTURE_T + i];
        }
    }
    check_close(t, what, turned, want, 2 * FIXTURE_T, 1e-6);
}

static void test_fixture(Test* t) {
    const double out[] = {0.01776233, -0.023911787, -0.027357782, -0.0011036122,
                          0.18941773, 0.0087472444, 0.025366455,  0.088258359},
                 last[] = {0.21203978, -0.087627427, 0.25688369, 0.15028942},
                 du[] = {0.20386672, 0.011210631, -0.035196721,  -0.060305441,
                         0.26680192, 0.02544081,  -0.0055664842, -0.022283756},
                 dq[] = {0.0091425493, 0.022487663,  0.0044155983, -0.014501057,
                         0.096722531,  0.0082968897, -0.008507845, -0.0014832851},
                 dA[] = {0.031650623, 0.00090711445, 0.024123131, 0.0010819538}, dD[] = {-0.17201374, 0.18174017},
                 dB[] = {0.0362561,  0.060103803,   0.097744584,  0.0061548974,
                         0.12189478, -0.0014730997, 0.0077306222, 0.003062415},
                 dC[] = {0.14397251, -0.0026674834, -0.092024271, -0.02540233,
                         0.13260746, -0.0030148255, -0.014763111, 0.0014419434},
                 dz[] = {0.069361203, 0.17309676, 0.028824857,  0.00040861227,
                         0.50445869,  0.12402594, -0.032452351, -0.016337041};
    Problem p = problem(1, FIXTURE_T, 2, 2, WITH_STATE);
    double z[2 * FIXTURE_T], dout[2 * FIXTURE_T];
    float got_out[2 * FIXTURE_T], got_dq[2 * FIXTURE_T], got_dz[2 * FIXTURE_T], got_dA[4], got_dB[2 * FIXTURE_T],
        got_dC[2 * FIXTURE_T];
    for (int c = 0; c < 2; c++) {
        for (int i = 0; i < FIXTURE_T; i++) {
            int at = i * 2 + c;
            double q = 0.2 * cos(0.5 * c + 0.3 * i) - 0.4 + 0.3 * c;
            z[at] = 0.6 * sin(0.3 * c - 0.7 * i + 0.5), dout[at] = cos(0.2 * c + 0.4 * i);
            p.u[at] = (float)sin(0.7 * c + 0.9 * i + 0.1), p.delta[at] = (float)log1p(exp(q));
            p.dy[at] = (float)(dout[at] * z[at] * sigmoid(z[at]));
            p.ssm_B[(size_t)i * p.stride + (size_t)c] = (float)cos(0.4 * c + 0.6 * i);  // c is n here
            p.ssm_C[(size_t)i * p.stride + (size_t)c] = (float)sin(0.8 * c - 0.5 * i + 0.2);
            p.A_log[c * 2 + i % 2] = (float)log((i % 2 + 1) * (1.0 + 0.25 * c));
        }
        p.D[c] = (float)(0.5 - 0.2 * c), p.state[2 * c] = p.state[2 * c + 1] = 0.0f;
        p.dstate[2 * c] = p.dstate[2 * c + 1] = 0.0f;
    }
    Result r = fast_alone(&p, 3);
    for (int i = 0; i < 2 * FIXTURE_T; i++) {
        double s = sigmoid(z[i]);
        got_out[i] = (float)((double)r.y[i] * z[i] * s);
        got_dz[i] = (float)(dout[i] * (double)r.y[i] * s * (1.0 + z[i] * (1.0 - s)));
        got_dq[i] = (float)((double)r.ddelta[i] * -expm1(-(double)p.delta[i]));
        got_dB[i] = r.dp[(size_t)(i % FIXTURE_T) * p.stride + (size_t)(i / FIXTURE_T)];
        got_dC[i] = r.dp[(size_t)(i % FIXTURE_T) * p.stride + (size_t)(i / FIXTURE_T) + 3];
    }
    for (int i = 0; i < 4; i++) { got_dA[i] = r.dA_log[i] / (float)((i % 2 + 1) * -(1.0 + 0.25 * (i / 2))); }
    check_fixture(t, "out", got_out, out, 1), check_fixture(t, "du", r.du, du, 1),
        check_fixture(t, "ddelta", got_dq, dq, 1);
    check_fixture(t, "dz", got_dz, dz, 1), check_fixture(t, "dB", got_dB, dB, 0), check_fixture(t, "dC", got_dC, dC, 0);
    check_close(t, "last h", r.state, last, 4, 1e-6), check_close(t, "dA", got_dA, dA, 4, 1e-6),
        check_close(t, "dD", r.dD, dD, 2, 1e-6);
    result_free(&r);
    problem_free(&p);
}

// ---- obvious answers ----

// delta 0: nothing enters and nothing is lost. delta or A huge: nothing stays
static void test_extremes(Test* t) {
    Problem p = problem(1, 4, 3, 2, WITH_STATE);
    const float deltas[] = {0.0f, 1e30f, 0.0f}, rates[] = {0.0f, 0.0f, 88.0f};  // e^88 is finite, e^89 is not
    for (int i = 0; i < 12; i++) { p.u[i] = 2.0f, p.delta[i] = deltas[i % 3]; }
    for (int i = 0; i < 6; i++) { p.A_log[i] = rates[i / 2]; }
    p.delta[3 * 3 + 2] = 1e-30f;  // at the last position a = exp(-1e-30 * e^88) = exp(-1.65e8)
    Result r = fast_alone(&p, 2);
    const float *last_B = p.ssm_B + 3 * p.stride,
                want[] = {p.state[0], p.state[1], 2e30f * last_B[0], 2e30f * last_B[1], 0.0f, 0.0f};
    check_bits(t, "state", r.state, want, 4);
    for (int n = 0; n < 2; n++) {
        check(t, fabsf(r.state[4 + n]) < 3e-30f, "state %d: %g should have decayed", n, (double)r.state[4 + n]);
        check(t, r.dA_log[n] == 0.0f, "dA_log[%d] %g where delta is 0", n, (double)r.dA_log[n]);
        check(t, r.dA_log[2 + n] == 0.0f, "dA_log[%d] %g where nothing stays", 2 + n, (double)r.dA_log[2 + n]);
    }
    for (int i = 0; i < 12; i++) {
        check(t, isfinite(r.ddelta[i]) || i % 3 == 1, "ddelta[%d] is %g", i, (double)r.ddelta[i]);
    }
    result_free(&r);
    problem_free(&p);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"bits", "fast equals plain to the last bit at odd shapes, 1, 2, 3 and 7 threads; the workspace is as said",
         test_shapes},
        {"bits with state", "the same with a state that comes in and documents that begin anywhere", test_shapes_state},
        {"bits of hard inputs", "the same with cancellation, subnormals, -0, infinities and NaNs", test_hard},
        {"asked", "gradients that nobody asks for are NULL: the others keep their bits", test_asked},
        {"chunks", "any chunk gives the same bits", test_chunks},
        {"split", "a row in pieces, down to single positions, with the state carried, has the bits of the whole row",
         test_split},
        {"split backward", "a row in pieces, the last first, with what is asked of the state handed on, has the gradients "
         "of the whole row", test_split_backward},
        {"documents", "no output or gradient of a document depends on what stands in another", test_documents},
        {"forward in double", "y agrees with a computation in double", test_forward_double},
        {"finite differences", "every gradient agrees with differences in double, with and without state and documents",
         test_differences},
        {"fixture", "outputs and gradients of a case with bias, softplus and gate that was computed elsewhere",
         test_fixture},
        {"extremes", "delta 0 keeps the state, a huge delta or rate forgets it", test_extremes},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
