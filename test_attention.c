/*
Promises of llmc/ops/attention.h. The plain loop is judged in double, by finite differences and on inputs whose answer
is obvious; the fast version must equal it bit for bit, whatever the shape and the threads, and no token may feel a
later one. In a fast CUDA build sums have another order, and weights may be bf16: there every element must lie within a
bound that is computed beside it in double.
*/
#define FLASH_STREAM 20000  // bytes: 1 or 2 heads form a group of flash_attention.h
#if defined(SIMT) && !defined(EXACT)
#define WGMMA  // dev/simt models it
#endif
#if defined(WGMMA) && !defined(EXACT)
static int flash_hopper;  // 1 takes the kernels of flash_hopper.h, 0 those of other cards
#define FLASH_HOPPER flash_hopper
#endif
#include "llmc/ops/attention.h"
#include "llmc/test/test.h"

#ifdef __CUDACC__
// in C the edges of tiles; here small, for dev/simt takes its time
enum { TILE_M = 7, TILE_N = 21, VLANES = 4, GEMM_K = 64, CAUSAL_STEP = 4 };
#else
enum { CAUSAL_STEP = 1 };
#endif
// does this build keep the plain loop's order?
static int same_bits(void) {
#if defined(__CUDACC__) && !defined(EXACT)
    return 0;
#else
    return 1;
#endif
}

// one problem and the plain loop's answer. q, k and v are parts of one array; the gradient lies like it
typedef struct {
    AttentionShape s;
    int C;                             // of a packed problem, for attention_forward; 0: for grouped_attention_forward
    size_t n_inp, n_out, n_rows;
    size_t k_at, v_at;                 // q is at 0
    float *inp, *dout;                 // given
    float *out, *max, *inv, *dinp;     // found
} Problem;

static void solve(Problem* p) {
    size_t n_weights = p->n_rows * (size_t)p->s.T;
    float *preatt = filled_array(n_weights, 77.0f), *att = filled_array(n_weights, 77.0f);
    grouped_attention_forward_ref(p->out, preatt, att, p->max, p->inv, p->inp, p->inp + p->k_at, p->inp + p->v_at,
                                  &p->s);
    grouped_attention_backward_ref(p->dinp, p->dinp + p->k_at, p->dinp + p->v_at, p->dout, p->inp, p->inp + p->k_at,
                                   p->inp + p->v_at, &p->s);
    free(preatt), free(att);
}

// rounds what it is given to what is stored: identity for float
typedef float (*Rounding)(float x);
static float as_float(float x) { return x; }

// hard 1: cancellation, subnormals, -0; hard 2: also infinities and NaNs. What lies between rows is 77 and stays so
static Problem problem(AttentionShape s, int C, size_t n_inp, size_t k_at, size_t v_at, int hard, Rounding rounded) {
    size_t n_rows = (size_t)s.B * (size_t)s.NH * (size_t)attention_queries(&s), n_out = (size_t)s.B * s.out_seq;
    Problem p = {s, C, n_inp, n_out, n_rows, k_at, v_at, NULL, NULL, NULL, NULL, NULL, NULL};
    p.inp = hard ? hard_array(n_inp, 1) : random_array(n_inp, 2.0f, 1);
    p.dout = hard ? hard_array(n_out, 2) : random_array(n_out, 1.0f, 2);
    if (hard == 2) {
        sprinkle(p.inp, n_inp, (uint32_t)(n_out / 5 + 2), 3);
        sprinkle(p.dout, n_out, (uint32_t)(n_out / 2 + 2), 4);
    }
    for (size_t i = 0; i < n_inp; i++) { p.inp[i] = rounded(p.inp[i]); }
    for (size_t i = 0; i < n_out; i++) { p.dout[i] = rounded(p.dout[i]); }
    p.out = filled_array(n_out, 77.0f);
    p.dinp = filled_array(n_inp, 77.0f);
    p.max = filled_array(n_rows, 77.0f);
    p.inv = filled_array(n_rows, 77.0f);
    solve(&p);
    return p;
}

static Problem packed(int B, int T, int C, int NH, int hard) {
    size_t n = (size_t)B * (size_t)T * (size_t)C;
    return problem(attention_packed_shape(B, T, C, NH, 0), C, 3 * n, (size_t)C, 2 * (size_t)C, hard, as_float);
}

// q, k and v apart; k and v in a cache with room for 3 positions more. Rows are a multiple of 8 longer than their heads
typedef struct {
    int B, T, t0, NH, NKV, HS, window;
} Sizes;

// keys: that exist
static Problem grouped_block(Sizes z, int keys, int hard, Rounding rounded) {
    AttentionShape s;
    s.keys = keys, s.documents = NULL, s.documents_T = 0;
    s.B = z.B, s.T = z.T, s.t0 = z.t0, s.NH = z.NH, s.NKV = z.NKV, s.HS = z.HS, s.window = z.window;
    s.scale = 0.9f / sqrtf((float)z.HS);
    s.q_row = (size_t)(z.NH * z.HS + 8), s.kv_row = (size_t)(z.NKV * z.HS + 16), s.out_row = (size_t)(z.NH * z.HS + 24);
    s.q_seq = s.q_row * (size_t)(z.T - z.t0), s.kv_seq = s.kv_row * (size_t)(z.T + 3),
    s.out_seq = s.out_row * (size_t)(z.T - z.t0);
    size_t k_at = (size_t)z.B * s.q_seq, n_kv = (size_t)z.B * s.kv_seq;
    return problem(s, 0, k_at + 2 * n_kv, k_at, k_at + n_kv, hard, rounded);
}

static Problem grouped(Sizes z, int hard, Rounding rounded) { return grouped_block(z, z.T, hard, rounded); }

static void problem_free(Problem* p) {
    free(p->inp), free(p->dout);
    free(p->out), free(p->max), free(p->inv), free(p->dinp);
}

static const char* name_of(const Problem* p, const char* what, const Device* dev) {
    static char text[160];
    const AttentionShape* s = &p->s;
    snprintf(text, sizeof text, "%s: B %d, T %d, t0 %d, NH %d, NKV %d, HS %d, window %d, %d threads", what, s->B, s->T,
             s->t0, s->NH, s->NKV, s->HS, s->window, dev->n_threads);
    return text;
}

// ---- the ops, from and to ordinary memory ----

// queries t0.. of every sequence and head: out (B, T-t0, C), max and inv (B, NH, T-t0). A grouped problem has a t0 of
// its own
static void run_forward(float* out, float* max, float* inv, const Problem* p, int t0, const Device* dev) {
    const AttentionShape* s = &p->s;
    size_t n_rows = p->C ? (size_t)s->B * (size_t)s->NH * (size_t)(s->T - t0) : p->n_rows;
    size_t n_out = p->C ? (size_t)s->B * (size_t)(s->T - t0) * (size_t)p->C : p->n_out;
    float *inp_d = to_device(p->inp, p->n_inp, dev), *out_d = to_device(out, n_out, dev);
    float *max_d = to_device(max, n_rows, dev), *inv_d = to_device(inv, n_rows, dev);
    const float *q = inp_d, *k = inp_d + p->k_at, *v = inp_d + p->v_at;
    if (p->C) {
        attention_forward(out_d, max_d, inv_d, q, s->B, s->T, p->C, s->NH, t0, dev);
    } else {
        grouped_attention_forward(out_d, max_d, inv_d, q, k, v, s, dev);
    }
    from_device(out, out_d, n_out, dev), from_device(max, max_d, n_rows, dev), from_device(inv, inv_d, n_rows, dev);
    device_drop(inp_d);
}

static void run_backward(float* dinp, const float* out, const float* max, const float* inv, const Problem* p,
                         const Device* dev) {
    const AttentionShape* s = &p->s;
    float *inp_d = to_device(p->inp, p->n_inp, dev), *dout_d = to_device(p->dout, p->n_out, dev),
          *dinp_d = to_device(dinp, p->n_inp, dev);
    float *out_d = to_device(out, p->n_out, dev), *max_d = to_device(max, p->n_rows, dev),
          *inv_d = to_device(inv, p->n_rows, dev);
    const float *q = inp_d, *k = inp_d + p->k_at, *v = inp_d + p->v_at, *dout = dout_d, *y = out_d;
    if (p->C) {
        attention_backward(dinp_d, dout, y, max_d, inv_d, q, s->B, s->T, p->C, s->NH, dev);
    } else {
        grouped_attention_backward(dinp_d, dinp_d + p->k_at, dinp_d + p->v_at, dout, y, max_d, inv_d, q, k, v, s, dev);
    }
    from_device(dinp, dinp_d, p->n_inp, dev);
    device_drop(inp_d), device_drop(dout_d), device_drop(out_d), device_drop(max_d), device_drop(inv_d);
}

// ---- in double, with bounds: from the contract, not by the functions of attention_shape.h ----

static int sees(const AttentionShape* s, int t, int u) {
    return u <= t && u < s->keys && (s->window == 0 || t - u < s->window);
}

static int last_key(const AttentionShape* s, int t) { return t < s->keys ? t : s->keys - 1; }

static size_t at_q(const AttentionShape* s, int b, int h, int t) {
    return (size_t)b * s->q_seq + (size_t)(t - s->t0) * s->q_row + (size_t)(h * s->HS);
}
static size_t at_out(const AttentionShape* s, int b, int h, int t) {
    return (size_t)b * s->out_seq + (size_t)(t - s->t0) * s->out_row + (size_t)(h * s->HS);
}
// key 0 of the head that query head h reads
static size_t at_kv(const AttentionShape* s, int b, int h) {
    return (size_t)b * s->kv_seq + (size_t)(h * s->NKV / s->NH * s->HS);
}

// the textbook's answers, and how far an element may be from them when weights, ds and results are rounded by e
// (relative; bf16: 2^-8, float: 0) and whatever happens in float, scores and exponentials too, adds f relative to the
// sum of magnitudes
typedef struct {
    double *out, *dinp, *level;          // level: max - log(inv)
    double *out_error, *dinp_error;
} Bounds;

// 2^-15: a score is HS <= 256 products below 4 and their sums below 64, times the scale: rounding_walk(2 * 256, 64) /
// 17 is 2^-16.8. Sums over 257 queries or keys: rounding_walk(257, 1) is 2^-19.2
static const double FLOAT_ERROR = 0x1p-15;

static Bounds bounds_new(const Problem* p) {
    Bounds x = {NULL, NULL, NULL, NULL, NULL};
    x.out = double_array(p->out, p->n_out), x.out_error = (double*)new_array(p->n_out, sizeof(double));
    x.dinp = double_array(p->dinp, p->n_inp), x.dinp_error = (double*)new_array(p->n_inp, sizeof(double));
    x.level = (double*)new_array(p->n_rows, sizeof(double));
    return x;
}

static void bounds_free(Bounds* x) {
    free(x->out), free(x->dinp), free(x->level), free(x->out_error), free(x->dinp_error);
}

// value += a * b, with the error of a and of the float sum
static void add_bounded(double* value, double* error, double a, double a_error, double b, double f) {
    *value += a * b;
    *error += (a_error + f * fabs(a)) * fabs(b);
}

// weights of query t in att, 0 where it does not see a key; returns its level
static double weights_double(double* att, const double* q, const double* k, int t, const AttentionShape* s) {
    double sum = 0.0;
    for (int u = 0; u <= last_key(s, t); u++) {
        double dot = 0.0;
        for (int i = 0; i < s->HS; i++) { dot += q[i] * k[(size_t)u * s->kv_row + (size_t)i]; }
        sum += att[u] = sees(s, t, u) ? exp(dot * (double)s->scale) : 0.0;
    }
    for (int u = 0; u <= last_key(s, t); u++) { att[u] /= sum; }
    return log(sum);
}

// query t of head h; dk and dv go on from the queries before. att (T): scratch
static void bounds_of_query(Bounds* x, const Problem* p, const double* inp, double* att, int b, int h, int t, double e,
                            double f) {
    const AttentionShape* s = &p->s;
    size_t q = at_q(s, b, h, t), y = at_out(s, b, h, t), kv = at_kv(s, b, h);
    const double *k = inp + p->k_at + kv, *v = inp + p->v_at + kv;
    double *dk = x->dinp + p->k_at + kv, *dv = x->dinp + p->v_at + kv, *dk_error = x->dinp_error + p->k_at + kv;
    double *dv_error = x->dinp_error + p->v_at + kv, D = 0.0, D_error = 0.0;
    x->level[(b * s->NH + h) * (s->T - s->t0) + t - s->t0] = weights_double(att, inp + q, k, t, s);
    for (size_t i = 0; i < (size_t)s->HS; i++) {
        x->out[y + i] = x->out_error[y + i] = x->dinp[q + i] = x->dinp_error[q + i] = 0.0;
        for (int u = 0; u <= last_key(s, t); u++) {
            add_bounded(x->out + y + i, x->out_error + y + i, att[u], e * att[u], v[(size_t)u * s->kv_row + i], f);
        }
        x->out_error[y + i] += e * fabs(x->out[y + i]);
        add_bounded(&D, &D_error, x->out[y + i], x->out_error[y + i], (double)p->dout[y + i], f);
    }
    for (int u = 0; u <= last_key(s, t); u++) {
        size_t row = (size_t)u * s->kv_row;
        double datt = 0.0, datt_error = 0.0;
        for (size_t i = 0; i < (size_t)s->HS; i++) {
            add_bounded(&datt, &datt_error, v[row + i], 0.0, (double)p->dout[y + i], f);
        }
        double ds = att[u] * (datt - D) * (double)s->scale;
        double ds_error = att[u] * (datt_error + D_error) * (double)s->scale + (e + f) * fabs(ds);
        for (size_t i = 0; i < (size_t)s->HS; i++) {
            add_bounded(x->dinp + q + i, x->dinp_error + q + i, ds, ds_error, k[row + i], f);
            add_bounded(dk + row + i, dk_error + row + i, ds, ds_error, inp[q + i], f);
            add_bounded(dv + row + i, dv_error + row + i, att[u], e * att[u], (double)p->dout[y + i], f);
        }
    }
}

static Bounds bounds(const Problem* p, double e, double f) {
    const AttentionShape* s = &p->s;
    Bounds x = bounds_new(p);
    double *inp = double_array(p->inp, p->n_inp), *att = (double*)new_array((size_t)s->T, sizeof(double));
    for (int row = 0; row < s->B * s->NH * s->keys; row++) {
        size_t kv = at_kv(s, row / s->keys / s->NH, row / s->keys % s->NH) + (size_t)(row % s->keys) * s->kv_row;
        memset(x.dinp + p->k_at + kv, 0, sizeof(double) * (size_t)s->HS);
        memset(x.dinp + p->v_at + kv, 0, sizeof(double) * (size_t)s->HS);
    }
    for (int head = 0; head < s->B * s->NH; head++) {
        for (int t = s->t0; t < s->T; t++) { bounds_of_query(&x, p, inp, att, head / s->NH, head % s->NH, t, e, f); }
    }
    for (size_t i = 0; i < p->n_inp; i++) { x.dinp_error[i] += x.dinp_error[i] > 0.0 ? e * fabs(x.dinp[i]) : 0.0; }
    free(inp), free(att);
    return x;
}

// every element within its bound
static void check_bounded(Test* t, const char* what, const float* got, const double* want, const double* error,
                          size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!(fabs((double)got[i] - want[i]) <= error[i])) {
            check(t, 0, "%s: [%zu] found %.9g, expected %.9g, allowed %.3g", what, i, (double)got[i], want[i],
                  error[i]);
            return;
        }
    }
}

static void check_results(Test* t, const char* what, const float* out, const float* max, const float* inv,
                          const float* dinp, const Bounds* x, const Problem* p) {
    check_bounded(t, what, out, x->out, x->out_error, p->n_out);
    check_bounded(t, what, dinp, x->dinp, x->dinp_error, p->n_inp);
    for (size_t i = 0; i < p->n_rows; i++) {
        double level = (double)max[i] - log((double)inv[i]);
        int ok = fabs(level - x->level[i]) <= FLOAT_ERROR;
        if (!check(t, ok, "%s: max - log(inv) [%zu] is %.9g, expected %.9g", what, i, level, x->level[i])) { break; }
    }
}

// ---- fast against plain ----

// a packed problem from t0 on: the rows of the whole
static void check_forward(Test* t, const Problem* p, int t0, const Device* dev) {
    size_t n_queries = (size_t)(p->s.T - t0), C = (size_t)p->C, B = (size_t)p->s.B, BNH = B * (size_t)p->s.NH;
    float *out = filled_array(B * n_queries * C, NAN), *max = filled_array(BNH * n_queries, NAN),
          *inv = filled_array(BNH * n_queries, NAN);
    const char* what = name_of(p, t0 ? "with t0" : "forward", dev);
    run_forward(out, max, inv, p, t0, dev);
    for (size_t b = 0; b < B; b++) {
        check_bits(t, what, out + b * n_queries * C, p->out + (b * (size_t)p->s.T + (size_t)t0) * C, n_queries * C);
    }
    for (size_t row = 0; row < BNH; row++) {
        check_bits(t, "max", max + row * n_queries, p->max + row * (size_t)p->s.T + t0, n_queries);
        check_bits(t, "inv", inv + row * n_queries, p->inv + row * (size_t)p->s.T + t0, n_queries);
    }
    free(out), free(max), free(inv);
}

static void check_backward(Test* t, const Problem* p, const Device* dev) {
    float* dinp = filled_array(p->n_inp, NAN);
    run_backward(dinp, p->out, p->max, p->inv, p, dev);
    check_bits(t, name_of(p, "backward", dev), dinp, p->dinp, p->n_inp);
    free(dinp);
}

// a fast CUDA build: both directions within bounds
static void check_within(Test* t, const Problem* p, const Device* dev) {
    float *out = filled_array(p->n_out, 77.0f), *dinp = filled_array(p->n_inp, 77.0f);
    float *max = filled_array(p->n_rows, NAN), *inv = filled_array(p->n_rows, NAN);
    run_forward(out, max, inv, p, p->s.t0, dev);
    run_backward(dinp, out, max, inv, p, dev);
    Bounds x = bounds(p, 0.0, FLOAT_ERROR);
    check_results(t, name_of(p, "float", dev), out, max, inv, dinp, &x, p);
    bounds_free(&x);
    free(out), free(dinp), free(max), free(inv);
}

typedef enum { FORWARD, BACKWARD } Direction;

static void check_shape(Test* t, Direction direction, int B, int T, int C, int NH, int hard) {
    Problem p = packed(B, T, C, NH, hard);
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        if (!same_bits()) {
            check_within(t, &p, &dev);
        } else if (direction == FORWARD) {
            check_forward(t, &p, 0, &dev);
        } else {
            check_backward(t, &p, &dev);
        }
        device_free(&dev);
    }
    problem_free(&p);
}

static void check_shapes(Test* t, Direction direction) {
    const int shapes[][4] = {  // B, T, C, NH
        {1, 1, 1, 1}, {1, 2, 2, 1}, {1, 7, 33, 1}, {2, 7, 33, 3}, {3, 33, 14, 2}, {1, 33, 64, 1}, {2, 31, 130, 2},
        {1, 257, 7, 1}, {1, 67, 192, 3}, {2, TILE_N, 2 * TILE_M, 2}, {1, TILE_N - 1, TILE_M - 1, 1},
        {1, TILE_N + 1, TILE_M + 1, 1}, {1, 2 * TILE_N, TILE_N, 1}, {1, 3 * TILE_N + 5, TILE_N + 1, 1},
        {1, GEMM_K + 3, 5, 1}, {1, 9, GEMM_K + 1, 1},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_shape(t, direction, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 0);
    }
}

static void check_special(Test* t, Direction direction) {
    if (!same_bits()) { skip(t, "another order of sums"); return; }
    for (int hard = 1; hard <= 2; hard++) {
        check_shape(t, direction, 1, 7, 5, 1, hard);
        check_shape(t, direction, 3, TILE_N + 7, 3 * VLANES + 3, 3, hard);
        check_shape(t, direction, 1, 2 * TILE_N + 1, 8, 1, hard);
    }
}

static void test_forward(Test* t) { check_shapes(t, FORWARD); }
static void test_backward(Test* t) { check_shapes(t, BACKWARD); }
static void test_forward_special(Test* t) { check_special(t, FORWARD); }
static void test_backward_special(Test* t) { check_special(t, BACKWARD); }

// one grouped problem, whose gaps must stay as they are
static void check_grouped_block(Test* t, Sizes z, int keys, int hard) {
    Problem p = grouped_block(z, keys, hard, as_float);
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        if (!same_bits()) {
            check_within(t, &p, &dev);
            device_free(&dev);
            continue;
        }
        float *out = filled_array(p.n_out, 77.0f), *dinp = filled_array(p.n_inp, 77.0f);
        float *max = filled_array(p.n_rows, NAN), *inv = filled_array(p.n_rows, NAN);
        run_forward(out, max, inv, &p, z.t0, &dev);
        run_backward(dinp, out, max, inv, &p, &dev);
        check_bits(t, name_of(&p, "out", &dev), out, p.out, p.n_out);
        check_bits(t, name_of(&p, "max", &dev), max, p.max, p.n_rows);
        check_bits(t, name_of(&p, "inv", &dev), inv, p.inv, p.n_rows);
        check_bits(t, name_of(&p, "gradient", &dev), dinp, p.dinp, p.n_inp);
        free(out), free(dinp), free(max), free(inv);
        device_free(&dev);
    }
    problem_free(&p);
}

static void check_grouped(Test* t, Sizes z, int hard) { check_grouped_block(t, z, z.T, hard); }

// keys that end before the queries; of some a window has left all behind
static const Sizes block_sizes[] = {
    // B, T, t0, NH, NKV, HS, window
    {2, 33, 16, 4, 2, 5, 0},               {1, 3 * TILE_N + 5, TILE_N + 3, 4, 1, 9, 0}, {1, 96, 40, 2, 2, 16, 0},
    {1, 2 * TILE_N, TILE_N, 2, 1, 8, 0},   {2, 40, 20, 4, 2, 7, 12},                    {1, 64, 32, 2, 1, 8, 3},
    {1, 50, 8, 3, 3, 4, 0},
};
static const int block_keys[] = {16, TILE_N - 2, 40, TILE_N, 20, 32, 3};

// the plain loop with what is given of all keys: here any numbers
static void check_block_backward(Test* t, Sizes z, int keys) {
#ifndef SYSTEM_LIBM
    Problem p = grouped_block(z, keys, 0, as_float);
    Device dev = test_device(2);
    float* D = random_array(p.n_rows, 1.0f, 7);
    float *max = filled_array(p.n_rows, 0.0f), *inv = filled_array(p.n_rows, 0.0f);
    float *want = filled_array(p.n_inp, 77.0f), *got = filled_array(p.n_inp, 77.0f);
    for (size_t i = 0; i < p.n_rows; i++) { max[i] = p.max[i] + 0.25f, inv[i] = 0.7f * p.inv[i]; }
    block_attention_backward_ref(want, want + p.k_at, want + p.v_at, p.dout, D, max, inv, p.inp, p.inp + p.k_at,
                                 p.inp + p.v_at, &p.s);
    float *inp_d = to_device(p.inp, p.n_inp, &dev), *dout_d = to_device(p.dout, p.n_out, &dev);
    float *D_d = to_device(D, p.n_rows, &dev), *max_d = to_device(max, p.n_rows, &dev);
    float *inv_d = to_device(inv, p.n_rows, &dev), *got_d = to_device(got, p.n_inp, &dev);
    const float *q = inp_d, *k = q + p.k_at, *v = q + p.v_at, *dout = dout_d;
    block_attention_backward(got_d, got_d + p.k_at, got_d + p.v_at, dout, (const float*)NULL, D_d, max_d, inv_d, q, k,
                             v, &p.s, &dev);
    from_device(got, got_d, p.n_inp, &dev);
    device_drop(inp_d), device_drop(dout_d), device_drop(D_d), device_drop(max_d), device_drop(inv_d);
    if (same_bits()) { check_bits(t, name_of(&p, "gradient of a block", &dev), got, want, p.n_inp); }
    for (size_t i = 0; i < p.n_inp && !same_bits(); i++) {
        check(t, fabsf(got[i] - want[i]) <= 1e-3f, "%zu: %g, expected %g", i, (double)got[i], (double)want[i]);
    }
    free(D), free(max), free(inv), free(want), free(got);
    device_free(&dev);
    problem_free(&p);
#else
    (void)t, (void)z, (void)keys;
#endif
}

static void test_block(Test* t) {
    for (size_t i = 0; i < sizeof block_sizes / sizeof *block_sizes; i++) {
        // a query that sees nothing has no bound
        if (same_bits() || block_sizes[i].window == 0) { check_grouped_block(t, block_sizes[i], block_keys[i], 0); }
        check_block_backward(t, block_sizes[i], block_keys[i]);
    }
}

static void test_grouped(Test* t) {
    const Sizes sizes[] = {
        // B, T, t0, NH, NKV, HS, window
        {1, 1, 0, 2, 1, 3, 0},          {2, 7, 0, 4, 2, 5, 0},
        {1, TILE_N + 1, 0, 4, 1, 9, 0}, {2, 2 * TILE_N + 3, 0, 3, 3, 7, 0},
        {1, 33, 20, 4, 2, 8, 0},        {1, TILE_N + 9, TILE_N + 2, 2, 1, 16, 0},
        {1, 7, 0, 2, 2, 5, 1},          {2, 33, 0, 4, 2, 5, 5},
        {1, 70, 0, 2, 1, 4, 64},        {1, 70, 0, 2, 1, 4, 100},
        {1, 70, 33, 6, 2, 3, 5},        {1, 37, 36, 2, 1, 3, 2},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) { check_grouped(t, sizes[i], 0); }
}

static void test_grouped_special(Test* t) {
    if (!same_bits()) { skip(t, "another order of sums"); return; }
    const Sizes sizes[] = {{1, 37, 0, 4, 2, 5, 0}, {1, 37, 3, 4, 2, 5, 6}};
    for (int i = 0; i < 4; i++) { check_grouped(t, sizes[i % 2], 1 + i / 2); }
}

// which rows t0 gives, in any build: the same bits as all of them
static void test_cache(Test* t) {
    Problem p = packed(2, 2 * TILE_N + 7, 12, 2, 0);
    const int starts[] = {0, 1, 5, TILE_N - 1, TILE_N, TILE_N + 1, 2 * TILE_N + 6};
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        run_forward(p.out, p.max, p.inv, &p, 0, &dev);
        for (size_t j = 0; j < sizeof starts / sizeof *starts; j++) { check_forward(t, &p, starts[j], &dev); }
        device_free(&dev);
    }
    problem_free(&p);
}

// token by token, as generation does: each new row is the row that one pass over the whole text gives
static void test_generation(Test* t) {
    Problem p = packed(1, TILE_N + 9, 20, 2, 0), sofar = p;
    Device dev = test_device(2);
    run_forward(p.out, p.max, p.inv, &p, 0, &dev);
    for (int n = 1; n <= p.s.T; n++) {
        float out[20], max[2], inv[2];
        sofar.s = attention_packed_shape(1, n, 20, 2, 0);
        run_forward(out, max, inv, &sofar, n - 1, &dev);
        check_bits(t, "newest row", out, p.out + (n - 1) * 20, 20);
    }
    device_free(&dev);
    problem_free(&p);
}

// ---- causality ----

typedef enum { Q, K, V } Part;

typedef struct {
    float *out, *max, *inv, *dinp;
} Results;

static Results results(const Problem* p, const Device* dev) {
    Results r = {filled_array(p->n_out, NAN), filled_array(p->n_rows, NAN), filled_array(p->n_rows, NAN),
                 filled_array(p->n_inp, NAN)};
    run_forward(r.out, r.max, r.inv, p, 0, dev);
    run_backward(r.dinp, r.out, r.max, r.inv, p, dev);
    return r;
}

static void results_free(Results* r) { free(r->out), free(r->max), free(r->inv), free(r->dinp); }

// out rows before s and their dq are what they were before token s was spoilt. A spoilt q reaches its own row only, a
// spoilt v no gradient of v
static void check_causal(Test* t, const Problem* p, const Results* clean, const Results* spoilt, int s, Part part) {
    size_t C = (size_t)p->C;
    for (int n = 0; n < p->s.T; n++) {
        char what[64];
        size_t at = (size_t)n * C;
        snprintf(what, sizeof what, "token %d, with %c of token %d spoilt", n, "qkv"[part], s);
        if (n < s || (part == Q && n != s)) {
            check_bits(t, what, spoilt->out + at, clean->out + at, C);
            check_bits(t, what, spoilt->dinp + 3 * at, clean->dinp + 3 * at, C);
        }
        if (part == V) { check_bits(t, what, spoilt->dinp + 3 * at + 2 * C, clean->dinp + 3 * at + 2 * C, C); }
    }
}

static void test_causality(Test* t) {
    Problem p = packed(1, 2 * TILE_N + 3, 6, 1, 0);
    const float poisons[] = {INFINITY, -INFINITY, NAN};
    const int tokens[] = {1, 2, TILE_M, TILE_N - 1, TILE_N, TILE_N + 1, 2 * TILE_N + 2};
    Device dev = test_device(2);
    Results clean = results(&p, &dev);
    for (size_t i = 0; i < 9 * sizeof tokens / sizeof *tokens; i += CAUSAL_STEP) {
        int part = (int)(i % 3), s = tokens[i / 9];
        float *x = p.inp + s * 3 * 6 + part * 6, kept[6];
        memcpy(kept, x, sizeof kept);
        for (int c = 0; c < 6; c++) { x[c] = poisons[i / 3 % 3]; }
        Results spoilt = results(&p, &dev);
        check_causal(t, &p, &clean, &spoilt, s, (Part)part);
        if (same_bits()) {
            solve(&p);
            check_bits(t, "out", spoilt.out, p.out, p.n_out);
            check_bits(t, "dqkv", spoilt.dinp, p.dinp, p.n_inp);
        }
        memcpy(x, kept, sizeof kept);
        results_free(&spoilt);
    }
    results_free(&clean);
    device_free(&dev);
    problem_free(&p);
}

// ---- the plain loop itself ----

static void check_plain(Test* t, Problem p) {
    Bounds x = bounds(&p, 0.0, FLOAT_ERROR);
    check_results(t, "the plain loop", p.out, p.max, p.inv, p.dinp, &x, &p);
    bounds_free(&x);
    problem_free(&p);
}

static void test_double(Test* t) {
    const Sizes windowed = {1, 40, 0, 4, 2, 16, 9}, cached = {2, 30, 11, 6, 2, 8, 0};
    check_plain(t, packed(2, 33, 32, 2, 0));
    check_plain(t, grouped(windowed, 0, as_float));
    check_plain(t, grouped(cached, 0, as_float));
}

// sum of dout * out in double; inp as in the problem
static double attention_loss(const double* inp, void* arg) {
    const Problem* p = (const Problem*)arg;
    const AttentionShape* s = &p->s;
    double loss = 0.0, *att = (double*)new_array((size_t)s->T, sizeof(double));
    int n_queries = s->T - s->t0;
    for (int row = 0; row < s->B * s->NH * n_queries; row++) {
        int t = s->t0 + row % n_queries, h = row / n_queries % s->NH, b = row / n_queries / s->NH;
        size_t kv = at_kv(s, b, h);
        weights_double(att, inp + at_q(s, b, h, t), inp + p->k_at + kv, t, s);
        for (int u = 0; u <= t; u++) {
            for (size_t i = 0; i < (size_t)s->HS; i++) {
                loss +=
                    att[u] * inp[p->v_at + kv + (size_t)u * s->kv_row + i] * (double)p->dout[at_out(s, b, h, t) + i];
            }
        }
    }
    free(att);
    return loss;
}

// what lies between rows has no gradient
static void check_differences(Test* t, Problem p, double tolerance) {
    double *inp = double_array(p.inp, p.n_inp), *want = finite_differences(attention_loss, inp, p.n_inp, &p);
    for (size_t i = 0; i < p.n_inp; i++) { p.dinp[i] = p.dinp[i] == 77.0f && want[i] == 0.0 ? 0.0f : p.dinp[i]; }
    check_close(t, "gradient", p.dinp, want, p.n_inp, tolerance);
    free(inp), free(want);
    problem_free(&p);
}

static void test_differences(Test* t) {
    const Sizes windowed = {1, 9, 2, 4, 2, 3, 4};
    check_differences(t, packed(2, 5, 6, 2, 0), rounding_walk(64, 4.0));  // gradients below 4, chains of 3 and 5 terms
    check_differences(t, packed(1, TILE_N + 3, 2, 1, 0), rounding_walk(256, 4.0));  // chains of TILE_N + 3 terms
    check_differences(t, grouped(windowed, 0, as_float), rounding_walk(64, 4.0));   // 2 heads with 4 queries each
}

static void test_obvious(Test* t) {
    // one token sees itself only; the second of two with equal keys takes the mean of both values
    const float qkv[] = {1, 2, 3, 5, 4, 8,   7, 1, 3, 5, 2, 2}, dout[] = {1, 1, 2, 4};
    const float want_out[] = {4, 8, 3, 5}, want_max[] = {13.0f / sqrtf(2.0f), 26.0f / sqrtf(2.0f)},
                want_inv[] = {1, 0.5f};
    const float want_dv[] = {2, 3, 1, 2};
    float out[4], max[2], inv[2], dqkv[12];
    Device dev = test_device(1);
    Problem p = packed(1, 2, 2, 1, 0);
    memcpy(p.inp, qkv, sizeof qkv), memcpy(p.dout, dout, sizeof dout);
    run_forward(out, max, inv, &p, 0, &dev);
    run_backward(dqkv, out, max, inv, &p, &dev);
    check_bits(t, "out", out, want_out, 4);
    check_bits(t, "inv", inv, want_inv, 2);
    check(t, float_ulps(max[0], want_max[0]) <= 1 && float_ulps(max[1], want_max[1]) <= 1, "max: found %.9g %.9g",
          (double)max[0], (double)max[1]);
    // where scores near 18 are summed in another order, weights of 1/2 are 2^-19 off; so datt and D do not cancel, either
    const float off = same_bits() ? 0.0f : 0x1p-19f, apart = off * 40.0f * 35.0f;
    for (int i = 0; i < 4; i++) {
        const float dv = dqkv[4 + i / 2 * 6 + i % 2];
        check(t, fabsf(dv - want_dv[i]) <= off * want_dv[i], "dv of token %d: %.9g", i / 2, (double)dv);
    }
    // datt = (40, 12), D = 26: ds = (7, -7) / sqrt(2), and equal keys cancel in dq, up to the rounding of 25
    check(t, fabsf(dqkv[0]) <= apart && fabsf(dqkv[1]) <= apart, "a token that sees only itself cannot move its query");
    check(t, fabsf(dqkv[6]) <= 0x1p-20f + apart && fabsf(dqkv[7]) <= 0x1p-20f + apart,
          "equal keys: the query cannot choose between them, found %.9g and %.9g", (double)dqkv[6], (double)dqkv[7]);
    check(t, fabsf(dqkv[2] - 49.0f / sqrtf(2.0f)) < 2e-5f + apart && fabsf(dqkv[8] + dqkv[2]) <= apart,
          "dk is +-7 q / sqrt(2), found %.9g and %.9g", (double)dqkv[2],
          (double)dqkv[8]);  // 2e-5: five times the last place of 34.6
    device_free(&dev);
    problem_free(&p);
}

// scores below the start of the maximum: exp underflows, the weights are 0 or infinite as the plain loop says, nobody
// divides by 0
static void test_far_scores(Test* t) {
    if (!same_bits()) { skip(t, "another exponential"); return; }
    const float scores[] = {-9950.0f, -10080.0f, -10095.0f, -10110.0f, -2e4f};
    for (size_t i = 0; i < sizeof scores / sizeof *scores; i++) {
        Problem p = packed(1, TILE_N + 2, 1, 1, 0);
        for (int n = 0; n < p.s.T; n++) { p.inp[3 * n] = scores[i], p.inp[3 * n + 1] = 1.0f; }
        solve(&p);
        Device dev = test_device(3);
        check_forward(t, &p, 0, &dev);
        check_backward(t, &p, &dev);
        if (scores[i] < -10104.0f) {
            check(t, p.inv[0] == 0.0f && p.out[0] == 0.0f, "no weight: inv and out must be 0");
        }
        device_free(&dev);
        problem_free(&p);
    }
}

// with x = 1 + 2^-12, x * x rounds to 1 + 2^-11: only a fused multiply-add keeps the 2^-24
static void test_rounding(Test* t) {
#ifdef SYSTEM_LIBM
    const float kept = 0.0f;
#else
    const float kept = 0x1p-24f;
#endif
    if (!same_bits()) { skip(t, "sums in another order"); return; }
    const float x = 1.0f + 0x1p-12f, qkv[] = {-(1.0f + 0x1p-11f), x, 1, x, 1, 1};
    float out[2], max, inv;
    Device dev = test_device(1);
    Problem p = packed(1, 1, 2, 1, 0);
    memcpy(p.inp, qkv, sizeof qkv);
    run_forward(out, &max, &inv, &p, 0, &dev);
    check(t, max == kept * p.s.scale, "expected the score %g, found %g", (double)(kept * p.s.scale), (double)max);
    device_free(&dev);
    problem_free(&p);
}

#ifdef __CUDACC__
// ---- rows of several documents, in one launch: each must be as if it stood alone ----

// positions begin..end-1 of row b of a larger problem
typedef struct {
    Problem of;
    size_t q, kv, out, row;  // where its arrays begin in those of the larger one
} Piece;

// q, k and v of an array that lies as inp
static float* piece_part(const Piece* x, const Problem* p, const float* from) {
    const AttentionShape* s = &x->of.s;
    float* part = (float*)new_array(x->of.n_inp, sizeof(float));
    memcpy(part, from + x->q, sizeof(float) * s->q_seq);
    memcpy(part + x->of.k_at, from + p->k_at + x->kv, sizeof(float) * s->kv_seq);
    memcpy(part + x->of.v_at, from + p->v_at + x->kv, sizeof(float) * s->kv_seq);
    return part;
}

// alone, and solved: it has queries
static Piece piece_of(const Problem* p, int b, int begin, int end) {
    Piece x;
    AttentionShape s = p->s;
    const int from = begin > s.t0 ? begin : s.t0, n_queries = end - from;
    const size_t n_rows = (size_t)(n_queries * s.NH), before = (size_t)b * (size_t)(s.T - s.t0) + (size_t)(from - s.t0);
    x.q = (size_t)b * s.q_seq + (size_t)(from - s.t0) * s.q_row;
    x.kv = (size_t)b * s.kv_seq + (size_t)begin * s.kv_row;
    x.out = (size_t)b * s.out_seq + (size_t)(from - s.t0) * s.out_row;
    x.row = before * (size_t)s.NH;
    s.B = 1, s.T = s.keys = end - begin, s.t0 = from - begin, s.documents = NULL;
    s.q_seq = (size_t)n_queries * s.q_row, s.kv_seq = (size_t)s.T * s.kv_row;
    s.out_seq = (size_t)n_queries * s.out_row;
    const Problem of = {s, 0, s.q_seq + 2 * s.kv_seq, s.out_seq, n_rows, s.q_seq, s.q_seq + s.kv_seq, NULL,
                        copied_array(p->dout + x.out, s.out_seq), filled_array(s.out_seq, 77.0f),
                        filled_array(n_rows, 77.0f), filled_array(n_rows, 77.0f), NULL};
    x.of = of;
    x.of.inp = piece_part(&x, p, p->inp);
    x.of.dinp = filled_array(of.n_inp, 77.0f);
    solve(&x.of);
    return x;
}

// e: rounding of what is stored
static void check_piece(Test* t, const char* what, const Results* got, const Problem* p, int b, int begin, int end,
                        double e) {
    Piece x = piece_of(p, b, begin, end);
    float* dinp = piece_part(&x, p, got->dinp);
    if (same_bits()) {
        check_bits(t, what, got->out + x.out, x.of.out, x.of.n_out);
        check_bits(t, what, got->max + x.row, x.of.max, x.of.n_rows);
        check_bits(t, what, got->inv + x.row, x.of.inv, x.of.n_rows);
        check_bits(t, what, dinp, x.of.dinp, x.of.n_inp);
    } else {
        Bounds bound = bounds(&x.of, e, FLOAT_ERROR);
        check_results(t, what, got->out + x.out, got->max + x.row, got->inv + x.row, dinp, &bound, &x.of);
        bounds_free(&bound);
    }
    free(dinp);
    problem_free(&x.of);
}

// keys that no query sees
static void check_no_gradient(Test* t, const char* what, const Results* got, const Problem* p, int b, int begin,
                              int end) {
    for (int u = begin; u < end; u++) {
        const size_t at = p->k_at + (size_t)b * p->s.kv_seq + (size_t)u * p->s.kv_row;
        for (size_t i = 0; i < (size_t)(p->s.NKV * p->s.HS); i++) {
            check(t, got->dinp[at + i] == 0.0f && got->dinp[at + p->v_at - p->k_at + i] == 0.0f,
                  "%s: gradient of key %d, which no query sees", what, u);
        }
    }
}

// X: float, or bf16 of a fast build; s has the documents of the device
template <typename X>
static Results results_as(const Problem* p, const AttentionShape* s, const Device* dev) {
    Results r = {filled_array(p->n_out, 77.0f), filled_array(p->n_rows, NAN), filled_array(p->n_rows, NAN),
                 filled_array(p->n_inp, 77.0f)};
    X *inp = to_device_as<X>(p->inp, p->n_inp, dev), *dout = to_device_as<X>(p->dout, p->n_out, dev);
    X *out = to_device_as<X>(r.out, p->n_out, dev), *dinp = to_device_as<X>(r.dinp, p->n_inp, dev);
    float *max = to_device(r.max, p->n_rows, dev), *inv = to_device(r.inv, p->n_rows, dev);
    const X *q = inp, *k = inp + p->k_at, *v = inp + p->v_at;
    grouped_attention_forward(out, max, inv, q, k, v, s, dev);
    grouped_attention_backward(dinp, dinp + p->k_at, dinp + p->v_at, (const X*)dout, (const X*)out, max, inv, q, k, v,
                               s, dev);
    from_device_as<X>(r.out, out, p->n_out, dev), from_device_as<X>(r.dinp, dinp, p->n_inp, dev);
    from_device(r.max, max, p->n_rows, dev), from_device(r.inv, inv, p->n_rows, dev);
    device_drop(inp), device_drop(dout);
    return r;
}

// one chance in one_in for each position to begin a document
template <typename X>
static void check_documents(Test* t, Sizes z, uint32_t one_in, Rounding rounded, double e) {
    Problem p = grouped(z, 0, rounded);
    Device dev = test_device(1);
    const int N = z.B * z.T;
    int* tokens = (int*)new_array((size_t)N, sizeof(int));
    DocumentBounds* made = (DocumentBounds*)new_array((size_t)N, sizeof(DocumentBounds));
    uint64_t stream = seeded_stream(one_in);
    Segments segments;
    segments_init(&segments, z.B, z.T);
    segments.document_start = 1;
    for (int i = 0; i < N; i++) { tokens[i] = xorshift_u32(&stream) % one_in == 0; }
    segments_find(&segments, tokens, z.B, z.T);
    documents_bounds(made, &segments, z.T);
    AttentionShape s = p.s;
    int* bounds_d = ints_to_device((const int*)made, 2 * (size_t)N, &dev);
    s.documents = (const DocumentBounds*)bounds_d, s.documents_T = z.T;
    Results got = results_as<X>(&p, &s, &dev);
    for (int i = 0; i < segments.n; i++) {
        const int b = (int)segments.at[i].first / z.T, begin = (int)segments.at[i].first % z.T;
        const int end = begin + segments.at[i].T;
        const char* what = name_of(&p, "documents", &dev);
        if (end <= z.t0) { check_no_gradient(t, what, &got, &p, b, begin, end); }
        else { check_piece(t, what, &got, &p, b, begin, end, e); }
    }
    device_drop(bounds_d);
    results_free(&got);
    free(tokens), free(made), free(segments.at);
    device_free(&dev);
    problem_free(&p);
}

static void test_documents(Test* t) {
    const Sizes sizes[] = {
        // B, T, t0, NH, NKV, HS, window
        {1, 1, 0, 1, 1, 3, 0}, {2, 33, 0, 4, 2, 5, 0}, {3, 21, 0, 2, 2, 8, 4}, {2, 40, 23, 4, 1, 6, 0},
        {1, 70, 69, 2, 1, 4, 0},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_documents<float>(t, sizes[i], 1, as_float, 0.0);
        check_documents<float>(t, sizes[i], 9, as_float, 0.0);
    }
}
#endif

#if defined(__CUDACC__) && !defined(EXACT)
// ---- bf16 ----

static float as_bf16(float x) { return (float)(bf16)x; }

static void test_bf16_documents(Test* t) {
    const Sizes sizes[] = {
        {2, 33, 0, 2, 1, 64, 0}, {1, 200, 0, 2, 2, 64, 0},   {2, 140, 0, 2, 1, 128, 0}, {1, 200, 0, 1, 1, 64, 70},
        {1, 170, 90, 2, 1, 64, 0}, {2, 100, 50, 1, 1, 128, 0}, {1, 90, 89, 2, 1, 64, 0},  {1, 33, 0, 2, 1, 5, 0},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_documents<bf16>(t, sizes[i], 9, as_bf16, 0x1p-8);
        check_documents<bf16>(t, sizes[i], 60, as_bf16, 0x1p-8);
    }
}

static Results results_bf16(const Problem* p, const Device* dev) { return results_as<bf16>(p, &p->s, dev); }

// returns how many calls went to plain kernels
static int check_bf16(Test* t, Sizes z, int keys) {
    Problem p = grouped_block(z, keys, 0, as_bf16);
    Device dev = test_device(1);
    Results r = results_bf16(&p, &dev);
    Bounds x = bounds(&p, 0x1p-8, FLOAT_ERROR);
    check_results(t, name_of(&p, "bf16", &dev), r.out, r.max, r.inv, r.dinp, &x, &p);
    const int n_plain = (int)dev.fallbacks[FALLBACK_ATTENTION].n;
    bounds_free(&x);
    results_free(&r);
    device_free(&dev);
    problem_free(&p);
    return n_plain;
}

static void test_bf16(Test* t) {
    const Sizes sizes[] =
        {
            // B, T, t0, NH, NKV, HS, window
            {1, 1, 0, 1, 1, 64, 0},   {2, 7, 0, 2, 1, 64, 0},      {1, 33, 0, 4, 2, 64, 0},
            {1, 64, 0, 1, 1, 64, 1},  {1, 65, 0, 2, 1, 64, 0},     {1, 127, 0, 1, 1, 64, 64},
            {1, 257, 0, 1, 1, 64, 0}, {1, 150, 0, 1, 1, 64, 100},  {1, 70, 0, 1, 1, 64, 5},
            {1, 1, 0, 1, 1, 128, 0},  {1, 65, 0, 2, 1, 128, 0},    {1, 127, 0, 1, 1, 128, 5},
            {2, 33, 0, 1, 1, 128, 1}, {1, 104, 0, 1, 1, 128, 100}, {1, 33, 0, 2, 1, 8, 0},
            {1, 20, 0, 1, 1, 40, 0},  {1, 20, 0, 1, 1, 80, 0},     {1, 66, 0, 1, 1, 96, 64},
            {1, 90, 70, 2, 1, 64, 0}, {1, 110, 109, 2, 1, 128, 0}, {1, 140, 99, 2, 1, 64, 20},
            {1, 300, 299, 12, 1, 64, 0}, {1, 900, 899, 3, 1, 64, 0}, {2, 130, 129, 4, 2, 128, 0},  // split_attention.h
            {1, 400, 399, 2, 2, 40, 0},  {1, 257, 256, 20, 1, 96, 100}, {1, 65, 64, 33, 1, 8, 0},
            {3, 65, 64, 6, 3, 64, 0},    {1, 64, 63, 2, 1, 64, 0},  // the shortest, and one that is not
            {1, 33, 0, 2, 1, 5, 0},   {1, 20, 3, 1, 1, 136, 7},  // not for tensor cores: 10-byte rows; 136 channels
    };
    // keys that end before the queries, which all see some
    const Sizes blocks[] = {{1, 128, 64, 2, 1, 64, 0}, {1, 100, 40, 2, 1, 64, 0}, {1, 140, 70, 2, 1, 128, 0},
                            {1, 140, 70, 2, 1, 64, 75}};
    const int keys[] = {64, 37, 70, 70};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) { check_bf16(t, sizes[i], sizes[i].T); }
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) { check_bf16(t, blocks[i], keys[i]); }
}

// what no query may see is large but finite: with weight 0 it must not reach a result (an Inf may, within a tile)
static void check_bf16_causality(Test* t, int HS) {
    const Sizes z = {1, 80, 0, 1, 1, HS, 12};
    const int token = 40;
    Problem p = grouped(z, 0, as_bf16);
    Device dev = test_device(1);
    Results clean = results_bf16(&p, &dev);
    for (int i = 0; i < HS; i++) {
        p.inp[p.k_at + token * p.s.kv_row + (size_t)i] = as_bf16(1e30f);
        p.inp[p.v_at + token * p.s.kv_row + (size_t)i] = as_bf16(-1e30f);
    }
    Results spoilt = results_bf16(&p, &dev);
    int n_felt = 0;
    for (int n = 0; n < z.T; n++) {
        size_t y = at_out(&p.s, 0, 0, n), q = at_q(&p.s, 0, 0, n);
        if (n >= token && n < token + z.window) {
            n_felt += memcmp(spoilt.out + y, clean.out + y, sizeof(float) * (size_t)HS) != 0;
            continue;
        }
        check_bits(t, "out", spoilt.out + y, clean.out + y, (size_t)HS);
        check_bits(t, "dq", spoilt.dinp + q, clean.dinp + q, (size_t)HS);
    }
    check(t, n_felt == z.window, "%d of %d queries that see token %d have felt it", n_felt, z.window, token);
    results_free(&clean), results_free(&spoilt);
    device_free(&dev);
    problem_free(&p);
}

static void test_bf16_causality(Test* t) { check_bf16_causality(t, 64); }

// the keys that a window hides from the one query of a long cache, and what lies behind the last key: not even NaN
// there changes a bit
static void test_bf16_hidden(Test* t) {
    const Sizes z = {1, 300, 299, 6, 1, 64, 130};
    Problem p = grouped(z, 0, as_bf16);
    Device dev = test_device(1);
    Results clean = results_bf16(&p, &dev);
    for (int u = 0; u < z.T + 3; u++) {
        if (u >= z.T - z.window && u < z.T) { continue; }
        for (size_t i = 0; i < p.s.kv_row; i++) {
            p.inp[p.k_at + (size_t)u * p.s.kv_row + i] = p.inp[p.v_at + (size_t)u * p.s.kv_row + i] = NAN;
        }
    }
    Results spoilt = results_bf16(&p, &dev);
    check_bits(t, "out", spoilt.out, clean.out, p.n_out);
    check_bits(t, "max", spoilt.max, clean.max, p.n_rows);
    check_bits(t, "inv", spoilt.inv, clean.inv, p.n_rows);
    results_free(&clean), results_free(&spoilt);
    device_free(&dev);
    problem_free(&p);
}

// the blocks of a grid have all places, each once: group after group of heads, in a group tile after tile
static void test_bf16_order(Test* t) {
    const int shapes[][3] = {{1, 1, 1}, {7, 3, 7}, {7, 3, 2}, {64, 16, 64}, {130, 5, 64}, {3, 40, 1}};
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        int n_heads = shapes[k][0], n_tiles = shapes[k][1], together = shapes[k][2], i = 0;
        for (int first = 0; first < n_heads; first += together) {
            for (int tile = 0; tile < n_tiles; tile++) {
                for (int head = first; head < n_heads && head < first + together; head++, i++) {
                    FlashPlace place = flash_place(i, n_heads, n_tiles, together);
                    check(t, place.head == head && place.tile == tile,
                          "block %d of %d heads, %d together, %d tiles: expected head %d, tile %d, found %d, %d", i,
                          n_heads, together, n_tiles, head, tile, place.head, place.tile);
                }
            }
        }
    }
}

static void test_bf16_fallbacks(Test* t) {
    const Sizes sizes[] = {{1, 33, 0, 2, 1, 64, 0}, {1, 33, 0, 2, 1, 5, 0}, {1, 20, 3, 1, 1, 136, 7}};
    const char* first = "B 1, T 33, 2 heads of 5 channels";
    Device dev = test_device(1);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        Problem p = grouped(sizes[i], 0, as_bf16);
        Results r = results_bf16(&p, &dev);
        check(t, dev.fallbacks[FALLBACK_ATTENTION].n == 2 * (int64_t)i, "forward and backward by plain kernels: %lld of %zu",
              (long long)dev.fallbacks[FALLBACK_ATTENTION].n, 2 * (i + 1));
        results_free(&r);
        problem_free(&p);
    }
    check(t, strcmp(dev.fallbacks[FALLBACK_ATTENTION].first, first) == 0, "the first: found %s, expected %s",
          dev.fallbacks[FALLBACK_ATTENTION].first, first);
    device_free(&dev);
}

static void check_bf16_again(Test* t, Sizes z) {
    Problem p = grouped(z, 0, as_bf16);
    Device dev = test_device(1);
    Results a = results_bf16(&p, &dev), b = results_bf16(&p, &dev);
    check_bits(t, "out", a.out, b.out, p.n_out);
    check_bits(t, "gradient", a.dinp, b.dinp, p.n_inp);
    results_free(&a), results_free(&b);
    device_free(&dev);
    problem_free(&p);
}

static void test_bf16_again(Test* t) {
    const Sizes sizes[] = {{1, 70, 0, 2, 1, 64, 0}, {1, 40, 0, 1, 1, 128, 20}, {1, 500, 499, 4, 1, 64, 0}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) { check_bf16_again(t, sizes[i]); }
}

#ifdef WGMMA
static void test_bf16_hopper(Test* t) {
    flash_hopper = 1;
    test_bf16(t);
    test_bf16_documents(t);
    test_bf16_causality(t);
    test_bf16_again(t);
    flash_hopper = 0;
}

// heads of up to 256 channels, which only these kernels take
static void test_bf16_wide(Test* t) {
    const Sizes sizes[] =
        {
            // B, T, t0, NH, NKV, HS, window
            {1, 1, 0, 1, 1, 256, 0},  {2, 7, 0, 2, 1, 256, 0},   {1, 33, 0, 4, 2, 256, 0},  {1, 131, 0, 1, 1, 256, 0},
            {1, 64, 0, 1, 1, 256, 1}, {1, 127, 0, 2, 1, 256, 64}, {1, 99, 0, 1, 1, 200, 5}, {1, 90, 70, 2, 1, 256, 0},
            {1, 70, 69, 2, 1, 256, 0}, {1, 65, 0, 2, 1, 192, 0}, {1, 130, 0, 1, 1, 192, 100}, {1, 20, 3, 1, 1, 136, 7},
        };
    const Sizes block = {1, 140, 70, 2, 1, 256, 75}, again = {1, 140, 0, 2, 1, 256, 0};
    const Sizes documents[] = {{2, 140, 0, 2, 1, 256, 0}, {1, 170, 90, 2, 1, 256, 70}, {1, 100, 0, 1, 1, 192, 0}};
    flash_hopper = 1;
    int n_plain = check_bf16(t, block, 70);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) { n_plain += check_bf16(t, sizes[i], sizes[i].T); }
    check(t, n_plain == 0, "%d calls went to plain kernels", n_plain);
    for (size_t i = 0; i < 6; i++) { check_documents<bf16>(t, documents[i / 2], i % 2 ? 60 : 9, as_bf16, 0x1p-8); }
    check_bf16_causality(t, 256);
    check_bf16_causality(t, 192);
    check_bf16_again(t, again);
    flash_hopper = 0;
}
#else
static void test_bf16_hopper(Test* t) { skip(t, "not built for sm_90a"); }
static void test_bf16_wide(Test* t) { skip(t, "not built for sm_90a"); }
#endif
#endif

int main(int argc, char** argv) {
    Promise promises[] = {
        {"forward", "out, max and inv equal the plain loop bit for bit at odd shapes", test_forward},
        {"forward special", "the same with cancellation, subnormals, -0, Inf, NaN", test_forward_special},
        {"backward", "dqkv equals the plain loop bit for bit at odd shapes", test_backward},
        {"backward special", "the same with cancellation, subnormals, -0, Inf, NaN", test_backward_special},
        {"block", "keys that end before the queries, and what is given of all keys: the plain loop bit for bit",
         test_block},
        {"grouped", "groups, windows, caches and gaps: the plain loop bit for bit", test_grouped},
        {"grouped special", "the same with cancellation, subnormals, -0, Inf, NaN", test_grouped_special},
        {"cache", "queries from t0 on give the rows of the whole computation, bit for bit", test_cache},
        {"generation", "token by token gives the rows of one pass, bit for bit", test_generation},
        {"causality", "Inf and NaN in a token reach nothing that comes before it", test_causality},
        {"double", "the plain loop agrees with double: packed, with a window, with groups and a cache", test_double},
        {"backward differences", "the plain loop agrees with finite differences", test_differences},
        {"obvious", "two tokens with equal keys: the mean of their values", test_obvious},
        {"far scores", "scores below -10000 do as the plain loop says", test_far_scores},
        {"rounding", "a product and its sum round once, together", test_rounding},
#ifdef __CUDACC__
        {"documents", "rows of several documents in one launch: each as the plain loop has it alone", test_documents},
#endif
#if defined(__CUDACC__) && !defined(EXACT)
        {"bf16", "tensor cores: every element within its bound", test_bf16},
        {"bf16 documents", "the same on tensor cores: every element within its bound", test_bf16_documents},
        {"bf16 causality", "what a query does not see changes no bit of its row", test_bf16_causality},
        {"bf16 hidden", "a query against a long cache does not read what it does not see", test_bf16_hidden},
        {"bf16 order", "blocks go by groups of heads, in a group tile after tile, each once", test_bf16_order},
        {"bf16 fallbacks", "what is not for tensor cores is counted, and the first is named", test_bf16_fallbacks},
        {"bf16 again", "two runs give the same bits", test_bf16_again},
        {"bf16 Hopper", "products of warpgroups: bounds, documents, causality, the same bits", test_bf16_hopper},
        {"bf16 wide", "the same of heads of up to 256 channels, none of which falls back", test_bf16_wide},
#endif
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
