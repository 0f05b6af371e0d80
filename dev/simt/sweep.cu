/*
Every op of GPT-2 at every combination of the sizes 1, 7, 33, 257 and 1024: the exact CUDA build against the plain loop, bit by
bit, on ordinary numbers and on hard ones (cancellation, subnormals, -0). The tests take a few of these; this takes all.
    make build/simt-exact/simt/sweep && build/simt-exact/simt/sweep      about five minutes of CPU under dev/simt
Ends with "N comparisons, N differing bits"; status 1 if any differs.
*/
#include "llmc/ops/adamw.h"
#include "llmc/ops/attention.h"
#include "llmc/ops/crossentropy.h"
#include "llmc/ops/embedding.h"
#include "llmc/ops/gelu.h"
#include "llmc/ops/global_norm.h"
#include "llmc/ops/layernorm.h"
#include "llmc/core/print.h"
#include "llmc/ops/matmul.h"
#include "llmc/ops/residual.h"
#include "llmc/test/test.h"

#ifndef EXACT
#error "the exact build is what equals the plain loops: -DEXACT"
#endif

static const int SIZES[] = {1, 7, 33, 257, 1024};
enum { N_SIZES = 5 };

typedef struct {
    Device dev;
    int hard;
    uint64_t seed;
    size_t n_comparisons, n_different;
} Sweep;

static float* numbers(Sweep* s, size_t n) { return s->hard ? hard_array(n, ++s->seed) : random_array(n, 1.5f, ++s->seed); }
static float* given(Sweep* s, const float* x, size_t n) { return to_device(x, n, &s->dev); }

// an array that the op writes: NaN before, on the host and on the device
typedef struct {
    float *expected, *device;
    size_t n;
} Output;

static Output output(Sweep* s, size_t n) {
    Output o = {filled_array(n, NAN), NULL, n};
    o.device = to_device(o.expected, n, &s->dev);
    return o;
}

// one that it adds to or changes
static Output changed(Sweep* s, size_t n, float smallest) {
    Output o = {numbers(s, n), NULL, n};
    for (size_t i = 0; i < n && smallest >= 0.0f; i++) { o.expected[i] = fabsf(o.expected[i]) + smallest; }
    o.device = to_device(o.expected, n, &s->dev);
    return o;
}

static void compare(Sweep* s, const char* what, Output o) {
    float* found = filled_array(o.n, NAN);
    from_device(found, o.device, o.n, &s->dev);
    size_t n_different = 0;
    for (size_t i = 0; i < o.n; i++) {
        int both_nan = isnan(found[i]) && isnan(o.expected[i]);
        n_different += !both_nan && float_bits(found[i]) != float_bits(o.expected[i]);
    }
    if (n_different > 0) { printf("FAIL  %s: %zu of %zu differ\n", what, n_different, o.n); }
    s->n_comparisons += o.n;
    s->n_different += n_different;
    free(found);
    free(o.expected);
}

static void sweep_layernorm(Sweep* s, int N, int C) {
    const size_t n = (size_t)N * C;
    float *left = numbers(s, n), *right = numbers(s, n), *w = numbers(s, C), *b = numbers(s, C), *dout = numbers(s, n);
    float *dl = given(s, left, n), *dr = given(s, right, n), *dw = given(s, w, C), *db = given(s, b, C), *dd = given(s, dout, n);
    Output residual = output(s, n), out = output(s, n), mean = output(s, N), rstd = output(s, N);
    residual_layernorm_forward_ref(residual.expected, out.expected, mean.expected, rstd.expected, left, right, w, b, LAYERNORM_EPS, N, C);
    residual_layernorm_forward(residual.device, out.device, mean.device, rstd.device, dl, dr, dw, db, LAYERNORM_EPS, N, C, &s->dev);
    Output dinp = changed(s, n, -1.0f), dweight = output(s, C), dbias = output(s, C);
    layernorm_backward_ref(dinp.expected, dweight.expected, dbias.expected, dout, residual.expected, w, mean.expected, rstd.expected, N, C);
    layernorm_backward(dinp.device, dweight.device, dbias.device, dd, residual.device, dw, mean.device, rstd.device, N, C, &s->dev);
    Output plain = output(s, n), mean2 = output(s, N), rstd2 = output(s, N);
    layernorm_forward_ref(plain.expected, mean2.expected, rstd2.expected, left, w, b, LAYERNORM_EPS, N, C);
    layernorm_forward(plain.device, mean2.device, rstd2.device, dl, dw, db, LAYERNORM_EPS, N, C, &s->dev);
    compare(s, "residual_layernorm: residual", residual), compare(s, "out", out), compare(s, "mean", mean), compare(s, "rstd", rstd);
    compare(s, "layernorm_backward: dinp", dinp), compare(s, "dweight", dweight), compare(s, "dbias", dbias);
    compare(s, "layernorm_forward: out", plain), compare(s, "mean", mean2), compare(s, "rstd", rstd2);
    free(left), free(right), free(w), free(b), free(dout);
    device_drop(dl), device_drop(dr), device_drop(dw), device_drop(db), device_drop(dd);
}

static void sweep_elements(Sweep* s, int N, int C) {
    const size_t n = (size_t)N * C;
    float *x = numbers(s, n), *y = numbers(s, n), *dx = given(s, x, n), *dy = given(s, y, n);
    Output sum = output(s, n), gelu = output(s, n), slope = output(s, n);
    residual_forward_ref(sum.expected, x, y, n), residual_forward(sum.device, dx, dy, n, &s->dev);
    gelu_forward_ref(gelu.expected, x, n), gelu_forward(gelu.device, dx, n, &s->dev);
    gelu_backward_ref(slope.expected, x, y, n), gelu_backward(slope.device, dx, dy, n, &s->dev);
    compare(s, "residual", sum), compare(s, "gelu", gelu), compare(s, "gelu_backward", slope);
    Output p = changed(s, n, -1.0f), m = changed(s, n, -1.0f), v = changed(s, n, 0.0f);
    const AdamW step = adamw_step(1e-3f, 0.9f, 0.95f, 1e-8f, 0.7f, 3);
    adamw_update_ref(p.expected, m.expected, v.expected, y, n, 0.1f, &step);
    adamw_update(p.device, m.device, v.device, dy, n, 0.1f, &step, &s->dev);
    compare(s, "adamw: p", p), compare(s, "m", m), compare(s, "v", v);
    NormSum expected = norm_sum_init(), found, *room = (NormSum*)device_alloc(sizeof found, "the norm");
    norm_see_ref(&expected, x, n), norm_add_ref(&expected, x, n);
    device_zero(room, sizeof found, &s->dev);
    norm_see(room, dx, n, &s->dev), norm_add(room, dx, n, &s->dev);
    device_download(&found, room, sizeof found, &s->dev);
    device_release(room, sizeof found);
    const double want = norm_value(&expected), got = norm_value(&found);
    s->n_comparisons++;
    if (memcmp(&want, &got, sizeof want) != 0) { printf("FAIL  norm_add\n"), s->n_different++; }
    free(x), free(y), device_drop(dx), device_drop(dy);
}

static void sweep_embedding(Sweep* s, int N, int C) {
    enum { V = 97 };
    const int T = N % 7 == 0 ? N / 7 : N, B = N / T;
    const size_t n = (size_t)N * C;
    int* tokens = (int*)new_array((size_t)N, sizeof(int));
    uint64_t stream = seeded_stream(++s->seed);
    for (int i = 0; i < N; i++) { tokens[i] = (int)(xorshift_u32(&stream) % V); }
    int* dtokens = ints_to_device(tokens, (size_t)N, &s->dev);
    float *wte = numbers(s, (size_t)V * C), *wpe = numbers(s, (size_t)T * C), *dout = numbers(s, n);
    float *a = given(s, wte, (size_t)V * C), *b = given(s, wpe, (size_t)T * C), *d = given(s, dout, n);
    Output out = output(s, n), dwte = changed(s, (size_t)V * C, -1.0f), dwpe = changed(s, (size_t)T * C, -1.0f);
    embedding_forward_ref(out.expected, tokens, wte, wpe, B, T, C, 0);
    embedding_forward(out.device, dtokens, a, b, B, T, C, 0, &s->dev);
    embedding_backward_ref(dwte.expected, dwpe.expected, dout, tokens, B, T, C);
    embedding_backward(dwte.device, dwpe.device, d, dtokens, B, T, C, &s->dev);
    compare(s, "embedding", out), compare(s, "dwte", dwte), compare(s, "dwpe", dwpe);
    free(tokens), free(wte), free(wpe), free(dout);
    device_drop(dtokens), device_drop(a), device_drop(b), device_drop(d);
}

static void sweep_classifier(Sweep* s, int N, int V) {
    const int Vp = (V + 127) / 128 * 128;
    int* targets = (int*)new_array((size_t)N, sizeof(int));
    uint64_t stream = seeded_stream(++s->seed);
    for (int i = 0; i < N; i++) { targets[i] = (int)(xorshift_u32(&stream) % (uint32_t)(V + 1)) - 1; }
    int* dtargets = ints_to_device(targets, (size_t)N, &s->dev);
    Output losses = output(s, N), logits = changed(s, (size_t)N * Vp, -1.0f), sum = output(s, 1);
    crossentropy_fused_ref(losses.expected, logits.expected, targets, 0.01f, 1, N, V, Vp);
    crossentropy_fused(losses.device, logits.device, dtargets, 0.01f, 1, N, V, Vp, &s->dev);
    crossentropy_losses_sum_ref(sum.expected, losses.expected, N), crossentropy_losses_sum(sum.device, losses.device, N, &s->dev);
    compare(s, "crossentropy: losses", losses), compare(s, "dlogits", logits), compare(s, "crossentropy_losses_sum", sum);
    free(targets), device_drop(dtargets);
}

static void sweep_matmul(Sweep* s, int N, int C, int OC) {
    const size_t n_inp = (size_t)N * C, n_weight = (size_t)OC * C, n_out = (size_t)N * OC;
    float *inp = numbers(s, n_inp), *w = numbers(s, n_weight), *b = numbers(s, OC), *dout = numbers(s, n_out);
    float *di = given(s, inp, n_inp), *dw = given(s, w, n_weight), *db = given(s, b, OC), *dd = given(s, dout, n_out);
    Output out = output(s, n_out), pre = output(s, n_out), dinp = output(s, n_inp), dweight = output(s, n_weight), dbias = output(s, OC);
    matmul_gelu_forward_ref(out.expected, pre.expected, inp, w, b, N, C, OC);
    matmul_gelu_forward(out.device, pre.device, di, dw, db, 0, N, C, OC, &s->dev);
    matmul_backward_ref(dinp.expected, dweight.expected, dbias.expected, dout, inp, w, N, C, OC);
    matmul_backward(dinp.device, dweight.device, dbias.device, dd, di, dw, N, C, OC, &s->dev);
    compare(s, "matmul: pre", pre), compare(s, "gelu", out), compare(s, "dinp", dinp), compare(s, "dweight", dweight), compare(s, "dbias", dbias);
    free(inp), free(w), free(b), free(dout);
    device_drop(di), device_drop(dw), device_drop(db), device_drop(dd);
}

// T positions, two heads of HS channels
static void sweep_attention(Sweep* s, int T, int HS) {
    const int NH = 2, C = NH * HS;
    const size_t n = (size_t)T * C, n_weights = (size_t)NH * T * T;
    float *qkv = numbers(s, 3 * n), *dout = numbers(s, n), *preatt = filled_array(2 * n_weights, NAN);
    float *a = given(s, qkv, 3 * n), *d = given(s, dout, n);
    Output out = output(s, n), max = output(s, (size_t)NH * T), inv = output(s, (size_t)NH * T), dqkv = output(s, 3 * n);
    attention_forward_ref(out.expected, preatt, preatt + n_weights, max.expected, inv.expected, qkv, 1, T, C, NH);
    attention_forward(out.device, max.device, inv.device, a, 1, T, C, NH, 0, &s->dev);
    attention_backward_ref(dqkv.expected, dout, qkv, 1, T, C, NH);
    attention_backward(dqkv.device, d, out.device, max.device, inv.device, a, 1, T, C, NH, &s->dev);
    compare(s, "attention: out", out), compare(s, "max", max), compare(s, "inv", inv), compare(s, "dqkv", dqkv);
    free(qkv), free(dout), free(preatt), device_drop(a), device_drop(d);
}

static void sweep_all(Sweep* s) {
    for (int i = 0; i < N_SIZES * N_SIZES; i++) {
        const int N = SIZES[i / N_SIZES], C = SIZES[i % N_SIZES];
        sweep_layernorm(s, N, C), sweep_elements(s, N, C), sweep_embedding(s, N, C), sweep_classifier(s, N, C);
        if (C <= 257) { sweep_attention(s, N, C); }
        for (int j = 0; j < N_SIZES; j++) { sweep_matmul(s, N, C, SIZES[j]); }
        progress("shapes", i + 1, N_SIZES * N_SIZES);
    }
}

int main(void) {
    Sweep s;
    memset(&s, 0, sizeof s);
    device_init(&s.dev, 0);
    for (s.hard = 0; s.hard < 2; s.hard++) { sweep_all(&s); }
    device_free(&s.dev);
    printf("%zu comparisons, %zu differing bits\n", s.n_comparisons, s.n_different);
    return s.n_different > 0;
}
