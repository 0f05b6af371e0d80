/*
Promises of llmc/ops/gated_delta.h. Both forms are judged in double, their gradients by finite differences and by an
example of the specification; fast chunks must have the plain loop's bits, windows and documents those of the whole.
*/
#if defined(SIMT) && !defined(EXACT)
#define WGMMA  // dev/simt models it
#endif
#if defined(WGMMA) && !defined(EXACT)
static int delta_hopper;  // 1 takes the kernels of flash_delta_hopper.h, 0 those of other cards
#define FLASH_DELTA_HOPPER delta_hopper
#endif
#include "llmc/ops/gated_delta.h"
#include "llmc/test/golden.h"  // golden_open, golden_floats
#include "llmc/test/test.h"

// one problem, everything in it given
typedef struct {
    DeltaShape s;
    DeltaInputs in;
    float *q, *k, *v, *g, *beta, *dout, *state, *dstate;
    unsigned char* starts;
} Problem;

enum { N_GRADIENTS = 5 };
// what both passes find
typedef struct {
    float *o, *state, *dstate, *d[N_GRADIENTS];
} Result;

enum { WITH_STATE = 1, WITH_STARTS = 2, EXTREME = 4 };  // EXTREME: g of 0 and -60, beta of 0 and 1

static size_t n_positions(const Problem* p) { return (size_t)p->s.B * (size_t)p->s.T; }
static size_t n_keys(const Problem* p) { return n_positions(p) * (size_t)p->s.Hk * (size_t)p->s.DK; }
static size_t n_values(const Problem* p) { return n_positions(p) * (size_t)p->s.Hv * (size_t)p->s.DV; }
static size_t n_gates(const Problem* p) { return n_positions(p) * (size_t)p->s.Hv; }
static size_t n_states(const Problem* p) {
    return (size_t)p->s.B * (size_t)p->s.Hv * (size_t)p->s.DK * (size_t)p->s.DV;
}

// rows of unit length, as l2norm leaves them
static void normalise(float* x, size_t n, size_t C) {
    for (size_t i = 0; i < n; i += C) {
        float sum = 1e-6f;
        for (size_t c = 0; c < C; c++) { sum += x[i + c] * x[i + c]; }
        for (size_t c = 0; c < C; c++) { x[i + c] /= sqrtf(sum); }
    }
}

static Problem problem(int B, int T, int Hk, int Hv, int DK, int DV, int kind) {
    Problem p;
    memset(&p, 0, sizeof p);
    p.s.B = B, p.s.T = T, p.s.Hk = Hk, p.s.Hv = Hv, p.s.DK = DK, p.s.DV = DV;
    p.q = random_array(n_keys(&p), 1.0f, 1), p.k = random_array(n_keys(&p), 1.0f, 2);
    normalise(p.q, n_keys(&p), (size_t)DK), normalise(p.k, n_keys(&p), (size_t)DK);
    p.v = random_array(n_values(&p), 1.0f, 3), p.dout = random_array(n_values(&p), 1.0f, 4);
    p.g = random_array(n_gates(&p), 0.3f, 5), p.beta = random_array(n_gates(&p), 0.5f, 6);
    for (size_t i = 0; i < n_gates(&p); i++) {
        p.g[i] = -fabsf(p.g[i]), p.beta[i] += 0.5f;
        if (kind & EXTREME && i % 5 == 2) { p.g[i] = i % 2 ? -60.0f : 0.0f; }
        if (kind & EXTREME && i % 7 == 3) { p.beta[i] = i % 2 ? 1.0f : 0.0f; }
    }
    p.state = kind & WITH_STATE ? random_array(n_states(&p), 1.0f, 7) : NULL;
    p.dstate = kind & WITH_STATE ? random_array(n_states(&p), 1.0f, 8) : NULL;
    if (kind & WITH_STARTS) {
        p.starts = (unsigned char*)new_array(n_positions(&p), 1);
        for (size_t i = 0; i < n_positions(&p); i++) { p.starts[i] = i % 97 == 5 || i % 89 == 75; }
    }
    p.s.starts = p.starts;
    DeltaInputs in = {p.q, p.k, p.v, p.g, p.beta};
    p.in = in;
    return p;
}

static void problem_free(Problem* p) {
    free(p->q), free(p->k), free(p->v), free(p->g), free(p->beta), free(p->dout), free(p->state), free(p->dstate);
    free(p->starts);
}

static size_t n_gradient(const Problem* p, int i) { return i < 2 ? n_keys(p) : i < 3 ? n_values(p) : n_gates(p); }

static Result result(const Problem* p) {
    Result r;
    r.o = filled_array(n_values(p), NAN);
    r.state = p->state ? copied_array(p->state, n_states(p)) : NULL;
    r.dstate = p->dstate ? copied_array(p->dstate, n_states(p)) : NULL;
    for (int i = 0; i < N_GRADIENTS; i++) { r.d[i] = filled_array(n_gradient(p, i), NAN); }
    return r;
}

static void result_free(Result* r) {
    free(r->o), free(r->state), free(r->dstate);
    for (int i = 0; i < N_GRADIENTS; i++) { free(r->d[i]); }
}

static Result run(const Problem* p, int chunks) {
    Result r = result(p);
    DeltaGradients d = {r.d[0], r.d[1], r.d[2], r.d[3], r.d[4]};
    if (chunks) {
        float* states = filled_array(delta_states_floats(&p->s), NAN);
        delta_chunks_forward_ref(r.o, states, r.state, p->in, &p->s);
        delta_chunks_backward_ref(d, r.dstate, p->dout, states, p->in, &p->s);
        free(states);
    } else {
        delta_steps_forward_ref(r.o, r.state, p->in, &p->s);
        delta_steps_backward_ref(d, r.dstate, p->dout, p->state, p->in, &p->s);
    }
    return r;
}

// p's arrays on the device
static DeltaInputs inputs_to_device(const Problem* p, const Device* dev) {
    DeltaInputs in = {to_device(p->in.q, n_keys(p), dev), to_device(p->in.k, n_keys(p), dev),
                      to_device(p->in.v, n_values(p), dev), to_device(p->in.g, n_gates(p), dev),
                      to_device(p->in.beta, n_gates(p), dev)};
    return in;
}

static void inputs_drop(DeltaInputs* in) {
    const float* arrays[] = {in->q, in->k, in->v, in->g, in->beta};
    for (int i = 0; i < 5; i++) { device_drop((void*)(size_t)arrays[i]); }
}

static DeltaShape shape_to_device(const Problem* p, const Device* dev) {
    DeltaShape s = p->s;
    if (!p->starts) { return s; }
    unsigned char* starts = (unsigned char*)device_alloc(n_positions(p), "starts");
    device_upload(starts, p->starts, n_positions(p), dev);
    device_sync(dev);
    s.starts = starts;
    return s;
}

static void shape_drop(DeltaShape* s) {
    if (s->starts) { device_release((void*)(size_t)s->starts, (size_t)s->B * (size_t)s->T); }
}

static float* to_device_or_null(const float* x, size_t n, const Device* dev) {
    return x ? to_device(x, n, dev) : NULL;
}
static void from_device_or_null(float* x, float* d, size_t n, const Device* dev) {
    if (x) { from_device(x, d, n, dev); }
}

static Result fast(const Problem* p, const Device* dev) {
    Result r = result(p);
    DeltaInputs in = inputs_to_device(p, dev);
    DeltaShape s = shape_to_device(p, dev);
    float *states = (float*)device_alloc(sizeof(float) * delta_states_floats(&s), "states"), *d[N_GRADIENTS];
    float *o = to_device(r.o, n_values(p), dev), *dout = to_device(p->dout, n_values(p), dev);
    float* state = to_device_or_null(r.state, n_states(p), dev);
    float* dstate = to_device_or_null(r.dstate, n_states(p), dev);
    for (int i = 0; i < N_GRADIENTS; i++) { d[i] = to_device(r.d[i], n_gradient(p, i), dev); }
    DeltaGradients gradients = {d[0], d[1], d[2], d[3], d[4]};
    delta_chunks_forward(o, states, state, in, &s, dev);
    delta_chunks_backward(gradients, dstate, (const float*)dout, states, in, &s, dev);
    from_device(r.o, o, n_values(p), dev);
    from_device_or_null(r.state, state, n_states(p), dev), from_device_or_null(r.dstate, dstate, n_states(p), dev);
    for (int i = 0; i < N_GRADIENTS; i++) { from_device(r.d[i], d[i], n_gradient(p, i), dev); }
    device_release(states, sizeof(float) * delta_states_floats(&s));
    device_drop(dout), inputs_drop(&in), shape_drop(&s);
    return r;
}

// forward alone: o and the state
static Result fast_steps(const Problem* p, const Device* dev) {
    Result r = result(p);
    DeltaInputs in = inputs_to_device(p, dev);
    DeltaShape s = shape_to_device(p, dev);
    float *o = to_device(r.o, n_values(p), dev), *state = to_device_or_null(r.state, n_states(p), dev);
    delta_steps_forward(o, state, in, &s, dev);
    from_device(r.o, o, n_values(p), dev), from_device_or_null(r.state, state, n_states(p), dev);
    inputs_drop(&in), shape_drop(&s);
    return r;
}

static const char* gradient_names[N_GRADIENTS] = {"dq", "dk", "dv", "dg", "dbeta"};

// ---- double ----

typedef struct {
    const Problem* p;
    double *in[N_GRADIENTS], *before, *o, *state;
} InDouble;

// the recurrence as doc/gated_delta.md writes it ("Formula")
static void in_double(InDouble* w) {
    const DeltaShape* s = &w->p->s;
    const int DK = s->DK, DV = s->DV;
    double *m = (double*)new_array((size_t)DV, sizeof(double));
    for (int b = 0; b < s->B; b++) {
        for (int h = 0; h < s->Hv; h++) {
            double* S = w->state + ((size_t)b * (size_t)s->Hv + (size_t)h) * (size_t)(DK * DV);
            for (int i = 0; i < DK * DV; i++) {
                S[i] = w->p->state ? w->before[S - w->state + i] : 0.0;
            }
            for (int t = 0; t < s->T; t++) {
                const double *q = w->in[0] + delta_qk_(s, b, t, h), *k = w->in[1] + delta_qk_(s, b, t, h);
                const double* v = w->in[2] + delta_v_(s, b, t, h);
                const double a = exp(w->in[3][delta_g_(s, b, t, h)]), beta = w->in[4][delta_g_(s, b, t, h)];
                double* o = w->o + delta_v_(s, b, t, h);
                for (int i = 0; i < DK * DV; i++) { S[i] = delta_starts_(s, b, t) ? 0.0 : a * S[i]; }
                for (int c = 0; c < DV; c++) { m[c] = o[c] = 0.0; }
                for (int i = 0; i < DK * DV; i++) { m[i % DV] += S[i] * k[i / DV]; }
                for (int i = 0; i < DK * DV; i++) {
                    S[i] += k[i / DV] * beta * (v[i % DV] - m[i % DV]);
                    o[i % DV] += S[i] * q[i / DV];
                }
            }
        }
    }
    free(m);
}

static InDouble double_of(const Problem* p) {
    InDouble w = {p, {NULL}, NULL, NULL, NULL};
    const float* in[] = {p->q, p->k, p->v, p->g, p->beta};
    for (int i = 0; i < N_GRADIENTS; i++) { w.in[i] = double_array(in[i], n_gradient(p, i)); }
    w.before = p->state ? double_array(p->state, n_states(p)) : NULL;
    w.o = (double*)new_array(n_values(p), sizeof(double));
    w.state = (double*)new_array(n_states(p), sizeof(double));
    in_double(&w);
    return w;
}

static void double_free(InDouble* w) {
    for (int i = 0; i < N_GRADIENTS; i++) { free(w->in[i]); }
    free(w->before), free(w->o), free(w->state);
}

// |o| and |S| stay near 1 since beta and keys are at most 1; a position adds some 2 (DK + 64) roundings of 2^-24, and
// exp(-g) forgets old ones. Measured 2e-6; gradients add up over later positions: 1e-5. Where g is -60 at every tenth
// position, G of a chunk falls to -400: its roundings come into exp(G_i - G_j) as 400 * 2^-24 = 2.4e-5, some times over
static double forward_error(int kind) { return kind & EXTREME ? 6e-5 : 8e-6; }
static double gradient_error(int kind) { return kind & EXTREME ? 3e-4 : 4e-5; }

static void test_double(Test* t) {
    const int lengths[] = {1, 3, 63, 64, 65, 130};
    for (int i = 0; i < 6; i++) {
        for (int kind = 0; kind < 8; kind++) {
            Problem p = problem(2, lengths[i], 2, 4, 12, 7, kind);
            InDouble w = double_of(&p);
            for (int chunks = 0; chunks < 2; chunks++) {
                Result r = run(&p, chunks);
                check_close(t, chunks ? "chunks: o" : "steps: o", r.o, w.o, n_values(&p), forward_error(kind));
                if (r.state) { check_close(t, "state", r.state, w.state, n_states(&p), forward_error(kind)); }
                result_free(&r);
            }
            double_free(&w);
            problem_free(&p);
        }
    }
}

static double loss(const double* x, void* arg) {
    InDouble* w = (InDouble*)arg;
    double sum = 0.0;
    (void)x;
    in_double(w);
    for (size_t i = 0; i < n_values(w->p); i++) { sum += w->o[i] * (double)w->p->dout[i]; }
    for (size_t i = 0; w->p->dstate && i < n_states(w->p); i++) { sum += w->state[i] * (double)w->p->dstate[i]; }
    return sum;
}

static void test_differences(Test* t) {
    const int lengths[] = {1, 3, 66, 130};
    for (int i = 0; i < 8; i++) {
        const int kind = i % 2 ? WITH_STATE | WITH_STARTS : WITH_STATE | EXTREME;
        Problem p = problem(1, lengths[i / 2], 1, 2, 3, 4, kind);
        InDouble w = double_of(&p);
        double* want[N_GRADIENTS];
        for (int j = 0; j < N_GRADIENTS; j++) { want[j] = finite_differences(loss, w.in[j], n_gradient(&p, j), &w); }
        double* dstate = finite_differences(loss, w.before, n_states(&p), &w);
        for (int chunks = 0; chunks < 2; chunks++) {
            Result r = run(&p, chunks);
            for (int j = 0; j < N_GRADIENTS; j++) {
                check_close(t, gradient_names[j], r.d[j], want[j], n_gradient(&p, j), gradient_error(kind));
            }
            check_close(t, "dstate", r.dstate, dstate, n_states(&p), gradient_error(kind));
            result_free(&r);
        }
        for (int j = 0; j < N_GRADIENTS; j++) { free(want[j]); }
        free(dstate);
        double_free(&w);
        problem_free(&p);
    }
}

// bits; of kernels that add and round as they like, nearly
static void check_same(Test* t, const char* what, const float* got, const float* want, size_t n, double error) {
    if (!FAST_KERNELS) {
        check_bits(t, what, got, want, n);
        return;
    }
    double* in_double = double_array(want, n);
    check_close(t, what, got, in_double, n, error);
    free(in_double);
}

// fast against plain
static void test_bits(Test* t) {
    const int shapes[][6] = {{1, 1, 1, 1, 1, 1},   {2, 63, 1, 2, 16, 16}, {1, 64, 2, 4, 33, 7},  {1, 65, 1, 3, 5, 49},
                             {2, 130, 3, 3, 17, 96}, {1, 200, 2, 2, 64, 80}, {1, 130, 2, 4, 128, 128}};
    for (size_t i = 0; i < 2 * (sizeof shapes / sizeof *shapes); i++) {
        const int *n = shapes[i / 2], kind = i % 2 ? WITH_STATE | WITH_STARTS | EXTREME : 0;
        Problem p = problem(n[0], n[1], n[2], n[3], n[4], n[5], kind);
        Result want = run(&p, 1), want_steps = run(&p, 0);
        for (int j = 0; j < N_TEST_THREADS; j++) {
            Device dev = test_device(test_threads(j));
            Result got = fast(&p, &dev), steps = fast_steps(&p, &dev);
            check(t, dev.workspace->n_bytes == delta_workspace_bytes(&p.s, dev.n_threads), "workspace");
            check_same(t, "o", got.o, want.o, n_values(&p), forward_error(kind));
            check_same(t, "steps: o", steps.o, want_steps.o, n_values(&p), forward_error(kind));
            if (got.state) {
                check_same(t, "state", got.state, want.state, n_states(&p), forward_error(kind));
                check_same(t, "steps: state", steps.state, want_steps.state, n_states(&p), forward_error(kind));
                check_same(t, "dstate", got.dstate, want.dstate, n_states(&p), gradient_error(kind));
            }
            for (int g = 0; g < N_GRADIENTS; g++) {
                check_same(t, gradient_names[g], got.d[g], want.d[g], n_gradient(&p, g), gradient_error(kind));
            }
            result_free(&got), result_free(&steps);
            device_free(&dev);
        }
        result_free(&want), result_free(&want_steps);
        problem_free(&p);
    }
}

#if defined(__CUDACC__) && !defined(EXACT)
// ---- bf16: on tensor cores where sizes are multiples of 8, at most 128 ----

static void store_bf16(float* x, size_t n) {
    for (size_t i = 0; i < n; i++) { x[i] = (float)(bf16)x[i]; }
}

// trains: both passes; or forward alone, which then keeps no states
static Result run_bf16(const Problem* p, int trains, const Device* dev) {
    Result r = result(p);
    DeltaShape s = shape_to_device(p, dev);
    const DeltaInputsOf<bf16> in = {
        to_device_as<bf16>(p->q, n_keys(p), dev), to_device_as<bf16>(p->k, n_keys(p), dev),
        to_device_as<bf16>(p->v, n_values(p), dev), to_device(p->g, n_gates(p), dev),
        to_device(p->beta, n_gates(p), dev)};
    const size_t n_bytes = sizeof(float) * delta_states_floats(&s);
    float* states = trains ? (float*)device_alloc(n_bytes, "states") : NULL;
    bf16 *o = to_device_as<bf16>(r.o, n_values(p), dev), *dout = to_device_as<bf16>(p->dout, n_values(p), dev);
    float* state = to_device_or_null(r.state, n_states(p), dev);
    float* dstate = to_device_or_null(r.dstate, n_states(p), dev);
    const DeltaGradientsOf<bf16> d = {
        to_device_as<bf16>(r.d[0], n_keys(p), dev), to_device_as<bf16>(r.d[1], n_keys(p), dev),
        to_device_as<bf16>(r.d[2], n_values(p), dev), to_device(r.d[3], n_gates(p), dev),
        to_device(r.d[4], n_gates(p), dev)};
    delta_chunks_forward(o, states, state, in, &s, dev);
    if (trains) { delta_chunks_backward(d, dstate, (const bf16*)dout, states, in, &s, dev); }
    from_device_as<bf16>(r.o, o, n_values(p), dev);
    from_device_as<bf16>(r.d[0], d.dq, n_keys(p), dev), from_device_as<bf16>(r.d[1], d.dk, n_keys(p), dev);
    from_device_as<bf16>(r.d[2], d.dv, n_values(p), dev);
    from_device(r.d[3], d.dg, n_gates(p), dev), from_device(r.d[4], d.dbeta, n_gates(p), dev);
    from_device_or_null(r.state, state, n_states(p), dev), from_device_or_null(r.dstate, dstate, n_states(p), dev);
    if (trains) { device_release(states, n_bytes); }
    device_drop(dout), shape_drop(&s);
    device_drop((void*)in.q), device_drop((void*)in.k), device_drop((void*)in.v);
    device_drop((void*)in.g), device_drop((void*)in.beta);
    return r;
}

static double largest(const float* x, size_t n) {
    double most = 0.0;
    for (size_t i = 0; i < n; i++) { most = fabs((double)x[i]) > most ? fabs((double)x[i]) : most; }
    return most;
}

// An operand is off by 2^-9 of itself, and of what follows from S, r, D and their gradients some five lie on the way of
// each number: 2^-6.7, and as much again for sums whose terms are larger than themselves. Measured: 2^-7 of the largest
static void check_bf16(Test* t, const char* what, const float* got, const float* want, size_t n) {
    double* in_double = double_array(want, n);
    check_close(t, what, got, in_double, n, 0x1p-6 * (0.125 + largest(want, n)));
    free(in_double);
}

static void test_bf16(Test* t) {
    const int shapes[][6] = {{1, 1, 1, 1, 8, 8},        {1, 64, 1, 1, 64, 64}, {2, 63, 1, 2, 16, 16},
                             {1, 130, 2, 4, 128, 128}, {1, 65, 1, 3, 40, 72}, {2, 200, 2, 2, 120, 64},
                             {1, 70, 1, 1, 33, 7}};
    for (size_t i = 0; i < 2 * (sizeof shapes / sizeof *shapes); i++) {
        const int *n = shapes[i / 2], kind = i % 2 ? WITH_STATE | WITH_STARTS | EXTREME : 0;
        Problem p = problem(n[0], n[1], n[2], n[3], n[4], n[5], kind);
        store_bf16(p.q, n_keys(&p)), store_bf16(p.k, n_keys(&p)), store_bf16(p.v, n_values(&p));
        store_bf16(p.dout, n_values(&p));
        Device dev = test_device(1);
        Result want = run(&p, 1), got = run_bf16(&p, 1, &dev), alone = run_bf16(&p, 0, &dev);
        check_bits(t, "forward alone: o", alone.o, got.o, n_values(&p));
        if (got.state) { check_bits(t, "forward alone: state", alone.state, got.state, n_states(&p)); }
        check_bf16(t, "o", got.o, want.o, n_values(&p));
        if (got.state) {
            check_bf16(t, "state", got.state, want.state, n_states(&p));
            check_bf16(t, "dstate", got.dstate, want.dstate, n_states(&p));
        }
        for (int g = 0; g < N_GRADIENTS; g++) {
            check_bf16(t, gradient_names[g], got.d[g], want.d[g], n_gradient(&p, g));
        }
        result_free(&want), result_free(&got), result_free(&alone);
        device_free(&dev);
        problem_free(&p);
    }
}

#ifdef WGMMA
static void test_bf16_hopper(Test* t) {
    delta_hopper = 1;
    test_bf16(t);
    delta_hopper = 0;
}
#else
static void test_bf16_hopper(Test* t) { skip(t, "not built for sm_90a"); }
#endif

#ifdef SIMT
// there both kinds of tensor cores add in the same order, and forward's sums are the same
static void test_hopper_bits(Test* t) {
    Problem p = problem(1, 200, 2, 4, 128, 128, WITH_STATE | WITH_STARTS);
    Device dev = test_device(1);
    Result want = run_bf16(&p, 0, &dev);
    delta_hopper = 1;
    Result got = run_bf16(&p, 0, &dev);
    delta_hopper = 0;
    check_bits(t, "o", got.o, want.o, n_values(&p));
    check_bits(t, "state", got.state, want.state, n_states(&p));
    result_free(&want), result_free(&got);
    device_free(&dev);
    problem_free(&p);
}
#endif
#endif

// the two forms, from one another; both are float
static void test_forms(Test* t) {
    const int lengths[] = {1, 63, 64, 65, 200};
    for (int i = 0; i < 5; i++) {
        const int kind = WITH_STATE | (i % 2 ? WITH_STARTS | EXTREME : 0);
        Problem p = problem(1, lengths[i], 2, 4, 32, 24, kind);
        Result chunks = run(&p, 1), steps = run(&p, 0);
        for (int j = 0; j < N_GRADIENTS; j++) {
            double* want = double_array(steps.d[j], n_gradient(&p, j));
            check_close(t, gradient_names[j], chunks.d[j], want, n_gradient(&p, j), gradient_error(kind));
            free(want);
        }
        double* want = double_array(steps.o, n_values(&p));
        check_close(t, "o", chunks.o, want, n_values(&p), forward_error(kind));
        free(want);
        result_free(&chunks), result_free(&steps);
        problem_free(&p);
    }
}

// the example of qwen36.md 4.3, computed elsewhere
static void test_example(Test* t) {
    float q[] = {0.6f, -0.2f, 0.1f, 0.5f, -0.4f, 0.3f}, k[] = {0.8f, 0.6f, 0.6f, -0.8f, 1.0f, 0.0f};
    float v[] = {1.0f, -2.0f, 0.5f, 1.5f, -1.0f, 0.25f}, dout[] = {1.0f, 0.0f, 0.5f, -1.0f, 2.0f, 1.0f};
    float g[] = {-0.1f, -0.5f, -0.2f}, beta[] = {0.9f, 0.5f, 0.7f};
    const double o[] = {0.324, -0.648, 0.122433486, -0.669866971, 0.253680850, -0.336666694};
    const double dq[] = {0.72, 0.54, 0.716755, 1.318816, -1.040786, -0.818731};
    const double dk[] = {0.815668, 0.316749, 0.000289, 0.133723, 0.833867, -0.725695};
    const double dv[] = {0.5028, -0.169892, -0.340444, 0.042278, -0.56, -0.28};
    const double dg[] = {0.0, 0.518584, -0.319305}, dbeta[] = {0.936204, -0.21361, 0.945619};
    const double* want[] = {dq, dk, dv, dg, dbeta};
    Problem p;
    memset(&p, 0, sizeof p);
    DeltaShape s = {1, 3, 1, 1, 2, 2, NULL};
    DeltaInputs in = {q, k, v, g, beta};
    p.s = s, p.in = in, p.dout = dout;
    for (int chunks = 0; chunks < 2; chunks++) {
        Result r = run(&p, chunks);
        check_close(t, "o", r.o, o, 6, 1e-6);
        for (int j = 0; j < N_GRADIENTS; j++) {  // 6 digits are printed
            check_close(t, gradient_names[j], r.d[j], want[j], n_gradient(&p, j), 2e-6);
        }
        result_free(&r);
    }
}

// ---- what NumPy makes of it (dev/ref/gated_delta.py) ----

static float* golden_copy(const Golden* g, const char* name, size_t n) {
    return copied_array(golden_floats(g, name), n);
}

static Problem golden_problem(const Golden* g, int documents) {
    Problem p;
    memset(&p, 0, sizeof p);
    p.s.B = golden_int(g, "B"), p.s.T = golden_int(g, "T"), p.s.Hk = golden_int(g, "Hk"), p.s.Hv = golden_int(g, "Hv");
    p.s.DK = golden_int(g, "DK"), p.s.DV = golden_int(g, "DV");
    p.q = golden_copy(g, "q", n_keys(&p)), p.k = golden_copy(g, "k", n_keys(&p));
    p.v = golden_copy(g, "v", n_values(&p)), p.dout = golden_copy(g, "dout", n_values(&p));
    p.g = golden_copy(g, "g", n_gates(&p)), p.beta = golden_copy(g, "beta", n_gates(&p));
    p.state = golden_copy(g, "state", n_states(&p)), p.dstate = golden_copy(g, "dstate", n_states(&p));
    const int* starts = (const int*)golden_tensor(g, "starts", DTYPE_I32)->data;
    p.starts = documents ? (unsigned char*)new_array(n_positions(&p), 1) : NULL;
    for (size_t i = 0; documents && i < n_positions(&p); i++) { p.starts[i] = (unsigned char)starts[i]; }
    p.s.starts = p.starts;
    const DeltaInputs in = {p.q, p.k, p.v, p.g, p.beta};
    p.in = in;
    return p;
}

static void test_golden(Test* t) {
    Golden g;
    golden_open(&g, "dev/golden/gated_delta.safetensors");
    for (int i = 0; i < 4; i++) {
        const int chunks = i / 2, documents = i % 2;
        const char* names[] = {"o", "state", "dstate", "dq", "dk", "dv", "dg", "dbeta"};
        Problem p = golden_problem(&g, documents);
        Result r = run(&p, chunks);
        const float* found[] = {r.o, r.state, r.dstate, r.d[0], r.d[1], r.d[2], r.d[3], r.d[4]};
        const size_t n[] = {n_values(&p), n_states(&p), n_states(&p), n_keys(&p), n_keys(&p), n_values(&p),
                            n_gates(&p), n_gates(&p)};
        for (int j = 0; j < 8; j++) {
            char name[64];
            snprintf(name, sizeof name, "%s.%s.%s", chunks ? "chunks" : "steps", documents ? "documents" : "row",
                     names[j]);
            check_bits(t, name, found[j], golden_floats(&g, name), n[j]);
        }
        result_free(&r);
        problem_free(&p);
    }
    golden_close(&g);
}

// ---- windows and documents: always bits ----

// n positions of a problem of one row, from `first` on, as a problem of its own; it owns nothing
static Problem window(const Problem* p, int first, int n) {
    Problem w = *p;
    w.s.T = n;
    w.in.q += delta_qk_(&p->s, 0, first, 0), w.in.k += delta_qk_(&p->s, 0, first, 0);
    w.in.v += delta_v_(&p->s, 0, first, 0), w.dout += delta_v_(&p->s, 0, first, 0);
    w.in.g += delta_g_(&p->s, 0, first, 0), w.in.beta += delta_g_(&p->s, 0, first, 0);
    w.s.starts = p->starts ? p->starts + first : NULL;
    return w;
}

static void check_window(Test* t, const char* title, const Problem* p, const Result* whole, const Result* part,
                         int first, const Problem* w) {
    const size_t at[] = {delta_qk_(&p->s, 0, first, 0), delta_qk_(&p->s, 0, first, 0), delta_v_(&p->s, 0, first, 0),
                         delta_g_(&p->s, 0, first, 0), delta_g_(&p->s, 0, first, 0)};
    check_bits(t, title, part->o, whole->o + at[2], n_values(w));
    for (int j = 0; j < N_GRADIENTS; j++) {
        check_bits(t, gradient_names[j], part->d[j], whole->d[j] + at[j], n_gradient(w, j));
    }
}

// forward in windows, each with the state that the one before left; then backward, the last window first
static void check_cut(Test* t, int step, int chunks, int kind) {
    Problem p = problem(1, 200, 1, 2, 5, 6, kind | WITH_STATE);
    Result whole = run(&p, chunks);
    float *state = copied_array(p.state, n_states(&p)), *dstate = copied_array(p.dstate, n_states(&p)), *before[200];
    int n_windows = 0;
    for (int first = 0; first < p.s.T; first += step) {
        Problem w = window(&p, first, first + step < p.s.T ? step : p.s.T - first);
        before[n_windows++] = copied_array(state, n_states(&p));
        w.state = state;
        Result r = run(&w, chunks);
        memcpy(state, r.state, sizeof(float) * n_states(&p));
        result_free(&r);
    }
    check_bits(t, "state", state, whole.state, n_states(&p));
    while (n_windows-- > 0) {
        const int first = n_windows * step;
        Problem w = window(&p, first, first + step < p.s.T ? step : p.s.T - first);
        w.state = before[n_windows], w.dstate = dstate;
        Result r = run(&w, chunks);
        check_window(t, "window", &p, &whole, &r, first, &w);
        memcpy(dstate, r.dstate, sizeof(float) * n_states(&p));
        result_free(&r);
        free(before[n_windows]);
    }
    check_bits(t, "dstate", dstate, whole.dstate, n_states(&p));
    free(state), free(dstate);
    result_free(&whole);
    problem_free(&p);
}

static void test_cut(Test* t) {
    check_cut(t, 1, 0, 0), check_cut(t, 7, 0, WITH_STARTS), check_cut(t, 65, 0, WITH_STARTS);
    check_cut(t, 64, 1, 0), check_cut(t, 128, 1, EXTREME);
}

// a packed row against its documents one by one
static void test_documents(Test* t) {
    const int first[] = {0, 1, 66, 130, 195, 200};  // of 1, 65, 64, 65 and 5 positions
    for (int chunks = 0; chunks < 2; chunks++) {
        Problem p = problem(1, 200, 1, 2, 5, 6, WITH_STARTS);
        memset(p.starts, 0, (size_t)p.s.T);
        for (int i = 0; i < 5; i++) { p.starts[first[i]] = 1; }
        Result packed = run(&p, chunks);
        for (int i = 0; i < 5; i++) {
            Problem w = window(&p, first[i], first[i + 1] - first[i]);
            w.s.starts = NULL;
            Result alone = run(&w, chunks);
            check_window(t, "document", &p, &packed, &alone, first[i], &w);
            result_free(&alone);
        }
        result_free(&packed);
        problem_free(&p);
    }
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"example", "outputs and gradients of both forms on an example that was computed elsewhere", test_example},
        {"golden", "outputs and all gradients have the bits that NumPy gives, both forms, with and without documents",
         test_golden},
        {"forward in double", "both forms agree with double, T 1 to 130, documents, g 0 and -60, beta 0 and 1",
         test_double},
        {"finite differences", "every gradient of both forms, of the state too, agrees with differences in double",
         test_differences},
        {"forms", "outputs and gradients of the two forms are as near as rounding", test_forms},
        {"bits", "fast steps and chunks equal the plain loops to the last bit at odd shapes, 1, 2, 3 and 7 threads",
         test_bits},
        {"windows", "a row cut anywhere (steps) or at multiples of DELTA_CHUNK (chunks) has the bits of the whole",
         test_cut},
#if defined(__CUDACC__) && !defined(EXACT)
        {"bf16", "outputs and gradients of bf16 are near those of floats, on tensor cores and at odd sizes", test_bf16},
        {"bf16 hopper", "the same of the kernels for Hopper", test_bf16_hopper},
#ifdef SIMT
        {"hopper bits", "in dev/simt they give the o and the state of the others to the last bit", test_hopper_bits},
#endif
#endif
        {"documents", "a packed row has the bits of its documents alone", test_documents},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
