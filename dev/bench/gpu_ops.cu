/*
Every op of llmc/ at the sizes of GPT-2 124M, timed alone; for dev/gpu_check.sh.
    gpu_ops                  B 16, T 1024; attention also at other sizes
    gpu_ops --only attention  cases whose name contains this
    gpu_ops --rounds 5       repetitions, of which the shortest counts
    gpu_ops --small          tiny shapes, to see that all cases run
A case is one line: PROGRAM tab CASE tab MILLISECONDS tab BYTES tab FLOPS, the form of dev/bench/pytorch_gpu.py. BYTES are the
fewest that the op must move: every input read once, every output written once. Operands come from a pool that is handed out
slice after slice and is far larger than the second-level cache, so each call finds its inputs in memory. Time is that
between two events around at least 20 ms of calls. Like a trainer this is C: `cc -x c` builds it for the CPU.
*/
#include "llmc/ops/adamw.h"         // adamw_step, adamw_update_stored
#include "llmc/ops/attention.h"     // attention_forward, attention_backward
#include "llmc/ops/crossentropy.h"  // crossentropy_fused
#include "llmc/core/device.h"       // Device, device_alloc, device_upload, device_copy
#include "llmc/ops/embedding.h"     // embedding_forward, embedding_backward
#include "llmc/core/floatx.h"       // floatX
#include "llmc/ops/gelu.h"          // gelu_forward, gelu_backward
#include "llmc/ops/global_norm.h"   // norm_see, norm_add
#include "llmc/ops/layernorm.h"     // layernorm_forward, residual_layernorm_forward, layernorm_backward
#include "llmc/core/print.h"        // seconds_now
#include "llmc/ops/matmul.h"        // matmul_forward, matmul_gelu_forward, matmul_backward, ...
#include "llmc/ops/residual.h"      // residual_forward
#include "llmc/core/rng.h"          // xorshift_u32
#include "llmc/test/device_time.h"  // device_time

typedef struct {
    int B, T, C, NH, V;
} Shape;

typedef struct {
    Device dev;
    char* pool;        // random numbers in [-1, 1), both as floatX and as float
    size_t n_pool, at; // bytes; where the next slice begins
    int* ids;          // B*T token ids, on the device
    double bytes;      // moved by the calls since it was last set to 0
    double flops;      // of one call
} Bench;

typedef struct {
    const char* name;
    void (*run)(Bench* b, const Shape* s);
} Case;

// ---------------------------------------------------------------------------------------------------------------------
// The pool. What an op reads, writes or updates is a slice of it, and is counted.

enum { SLICE = 256 };  // slices begin at multiples of this

static char* slice(Bench* b, size_t n_bytes, int times_moved) {
    size_t rounded = (n_bytes + SLICE - 1) / SLICE * SLICE;
    if (rounded > b->n_pool) { fail_run("gpu_ops: an operand of %zu bytes does not fit the pool of %zu", n_bytes, b->n_pool); }
    if (b->at + rounded > b->n_pool) { b->at = 0; }
    char* p = b->pool + b->at;
    b->at += rounded;
    b->bytes += (double)n_bytes * times_moved;
    return p;
}

static floatX* one_way(Bench* b, size_t n) { return (floatX*)slice(b, n * sizeof(floatX), 1); }  // read, or written
static floatX* updated(Bench* b, size_t n) { return (floatX*)slice(b, n * sizeof(floatX), 2); }  // read and written
static float* one_way_float(Bench* b, size_t n) { return (float*)slice(b, n * sizeof(float), 1); }
static float* updated_float(Bench* b, size_t n) { return (float*)slice(b, n * sizeof(float), 2); }

// 16-bit patterns of bf16 numbers: two of them are also one float of the same size. positive: without their signs
static void fill_pool(Bench* b, int positive) {
    enum { N_BLOCK = 1 << 20 };
    static uint16_t block[N_BLOCK];
    uint64_t state = 1337;
    for (int i = 0; i < N_BLOCK; i++) {
        float x = 2.0f * xorshift_float(&state) - 1.0f;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        block[i] = (uint16_t)(bits >> 16 & (positive ? 0x7fff : 0xffff));
    }
    device_upload(b->pool, block, sizeof block, &b->dev);
    for (size_t full = sizeof block; full < b->n_pool; full *= 2) {
        size_t rest = b->n_pool - full;
        device_copy(b->pool + full, b->pool, rest < full ? rest : full, &b->dev);
    }
    device_sync(&b->dev);
}

// ---------------------------------------------------------------------------------------------------------------------
// The cases: one call each.

static void run_copy(Bench* b, const Shape* s) {
    size_t n_bytes = (size_t)(s->C > 64 ? 1 << 30 : 1 << 20);
    char* to = slice(b, n_bytes, 1);
    device_copy(to, slice(b, n_bytes, 1), n_bytes, &b->dev);
}

static void linear(Bench* b, int N, int IC, int OC, int has_bias) {
    floatX* out = one_way(b, (size_t)N * OC);
    const floatX* inp = one_way(b, (size_t)N * IC);
    const floatX* weight = one_way(b, (size_t)OC * IC);
    matmul_forward(out, inp, weight, has_bias ? one_way(b, (size_t)OC) : NULL, N, IC, OC, &b->dev);
    b->flops = 2.0 * N * IC * OC;
}

static void linear_backward(Bench* b, int N, int IC, int OC, int has_bias) {
    floatX* dinp = one_way(b, (size_t)N * IC);
    float* dweight = one_way_float(b, (size_t)OC * IC);
    float* dbias = has_bias ? one_way_float(b, (size_t)OC) : NULL;
    const floatX* dout = one_way(b, (size_t)N * OC);
    const floatX* inp = one_way(b, (size_t)N * IC);
    matmul_backward(dinp, dweight, dbias, dout, inp, one_way(b, (size_t)OC * IC), N, IC, OC, &b->dev);
    b->flops = 4.0 * N * IC * OC;
}

// the two products of a linear layer's backward pass, apart
static void linear_input(Bench* b, int N, int IC, int OC) {
    floatX* dinp = one_way(b, (size_t)N * IC);
    const floatX* dout = one_way(b, (size_t)N * OC);
    matmul_backward_input(dinp, dout, one_way(b, (size_t)OC * IC), 0, N, IC, OC, &b->dev);
    b->flops = 2.0 * N * IC * OC;
}

static void linear_weight(Bench* b, int N, int IC, int OC) {
    float* dweight = one_way_float(b, (size_t)OC * IC);
    const floatX* dout = one_way(b, (size_t)N * OC);
    matmul_backward_weight(dweight, dout, one_way(b, (size_t)N * IC), 0, N, IC, OC, &b->dev);
    b->flops = 2.0 * N * IC * OC;
}

static void run_matmul_square(Bench* b, const Shape* s) {
    int side = s->C > 64 ? 8192 : 64;
    linear(b, side, side, side, 0);
}

static void run_qkv(Bench* b, const Shape* s) { linear(b, s->B * s->T, s->C, 3 * s->C, 1); }
static void run_qkv_backward(Bench* b, const Shape* s) { linear_backward(b, s->B * s->T, s->C, 3 * s->C, 1); }
static void run_attproj(Bench* b, const Shape* s) { linear(b, s->B * s->T, s->C, s->C, 1); }
static void run_attproj_backward(Bench* b, const Shape* s) { linear_backward(b, s->B * s->T, s->C, s->C, 1); }
static void run_fc(Bench* b, const Shape* s) { linear(b, s->B * s->T, s->C, 4 * s->C, 1); }
static void run_fc_backward(Bench* b, const Shape* s) { linear_backward(b, s->B * s->T, s->C, 4 * s->C, 1); }
static void run_fcproj(Bench* b, const Shape* s) { linear(b, s->B * s->T, 4 * s->C, s->C, 1); }
static void run_fcproj_backward(Bench* b, const Shape* s) { linear_backward(b, s->B * s->T, 4 * s->C, s->C, 1); }

// the product of fc with its GELU; the other way to it is matmul_forward fc, then gelu_forward
static void run_fc_gelu(Bench* b, const Shape* s) {
    int N = s->B * s->T, C = s->C, OC = 4 * C;
    floatX* out = one_way(b, (size_t)N * OC);
    floatX* pre = one_way(b, (size_t)N * OC);
    const floatX* inp = one_way(b, (size_t)N * C);
    const floatX* weight = one_way(b, (size_t)OC * C);
    matmul_gelu_forward(out, pre, inp, weight, one_way(b, (size_t)OC), 1, N, C, OC, &b->dev);
    b->flops = 2.0 * N * C * OC;
}

// dinp of fcproj with the GELU before it; the other way to it is a third of matmul_backward fcproj, then gelu_backward
static void run_fcproj_gelu_backward(Bench* b, const Shape* s) {
    int N = s->B * s->T, C = 4 * s->C, OC = s->C;
    floatX* dpre = one_way(b, (size_t)N * C);
    const floatX* dout = one_way(b, (size_t)N * OC);
    const floatX* weight = one_way(b, (size_t)OC * C);
    const floatX* pre = one_way(b, (size_t)N * C);
    matmul_gelu_backward_input(dpre, dout, weight, pre, 1, N, C, OC, &b->dev);
    b->flops = 2.0 * N * C * OC;
}

static void run_fc_backward_bias(Bench* b, const Shape* s) {
    int N = s->B * s->T, OC = 4 * s->C;
    float* sums = one_way_float(b, (size_t)OC);
    matmul_backward_bias(sums, one_way(b, (size_t)N * OC), N, OC, &b->dev);
}

static void run_qkv_input(Bench* b, const Shape* s) { linear_input(b, s->B * s->T, s->C, 3 * s->C); }
static void run_qkv_weight(Bench* b, const Shape* s) { linear_weight(b, s->B * s->T, s->C, 3 * s->C); }
static void run_attproj_input(Bench* b, const Shape* s) { linear_input(b, s->B * s->T, s->C, s->C); }
static void run_attproj_weight(Bench* b, const Shape* s) { linear_weight(b, s->B * s->T, s->C, s->C); }
static void run_fc_input(Bench* b, const Shape* s) { linear_input(b, s->B * s->T, s->C, 4 * s->C); }
static void run_fc_weight(Bench* b, const Shape* s) { linear_weight(b, s->B * s->T, s->C, 4 * s->C); }
static void run_fcproj_weight(Bench* b, const Shape* s) { linear_weight(b, s->B * s->T, 4 * s->C, s->C); }
static void run_logits_input(Bench* b, const Shape* s) { linear_input(b, s->B * s->T, s->C, s->V); }
static void run_logits_weight(Bench* b, const Shape* s) { linear_weight(b, s->B * s->T, s->C, s->V); }

static void run_logits(Bench* b, const Shape* s) { linear(b, s->B * s->T, s->C, s->V, 0); }
static void run_logits_backward(Bench* b, const Shape* s) { linear_backward(b, s->B * s->T, s->C, s->V, 0); }

static void run_layernorm(Bench* b, const Shape* s) {
    int N = s->B * s->T;
    size_t C = (size_t)s->C;
    floatX* out = one_way(b, N * C);
    float* mean = one_way_float(b, (size_t)N);
    float* rstd = one_way_float(b, (size_t)N);
    const floatX* inp = one_way(b, N * C);
    const floatX* weight = one_way(b, C);
    layernorm_forward(out, mean, rstd, inp, weight, one_way(b, C), LAYERNORM_EPS, N, s->C, &b->dev);
}

static void run_residual_layernorm(Bench* b, const Shape* s) {
    int N = s->B * s->T;
    size_t C = (size_t)s->C;
    floatX* residual = one_way(b, N * C);
    floatX* out = one_way(b, N * C);
    float* mean = one_way_float(b, (size_t)N);
    float* rstd = one_way_float(b, (size_t)N);
    const floatX* left = one_way(b, N * C);
    const floatX* right = one_way(b, N * C);
    const floatX* weight = one_way(b, C);
    residual_layernorm_forward(residual, out, mean, rstd, left, right, weight, one_way(b, C), LAYERNORM_EPS, N, s->C,
                               &b->dev);
}

static void run_layernorm_backward(Bench* b, const Shape* s) {
    int N = s->B * s->T;
    size_t C = (size_t)s->C;
    floatX* dinp = updated(b, N * C);
    float* dweight = one_way_float(b, C);
    float* dbias = one_way_float(b, C);
    const floatX* dout = one_way(b, N * C);
    const floatX* inp = one_way(b, N * C);
    const floatX* weight = one_way(b, C);
    const float* mean = one_way_float(b, (size_t)N);
    layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, one_way_float(b, (size_t)N), N, s->C, &b->dev);
}

static void run_residual(Bench* b, const Shape* s) {
    size_t n = (size_t)s->B * s->T * s->C;
    floatX* out = one_way(b, n);
    const floatX* left = one_way(b, n);
    residual_forward(out, left, one_way(b, n), n, &b->dev);
}

static void run_gelu(Bench* b, const Shape* s) {
    size_t n = (size_t)s->B * s->T * 4 * s->C;
    floatX* out = one_way(b, n);
    gelu_forward(out, one_way(b, n), n, &b->dev);
}

static void run_gelu_backward(Bench* b, const Shape* s) {
    size_t n = (size_t)s->B * s->T * 4 * s->C;
    floatX* dinp = one_way(b, n);
    const floatX* inp = one_way(b, n);
    gelu_backward(dinp, inp, one_way(b, n), n, &b->dev);
}

static void run_attention(Bench* b, const Shape* s) {
    size_t N = (size_t)s->B * s->T, n_rows = N * s->NH;
    floatX* out = one_way(b, N * s->C);
    float* max = one_way_float(b, n_rows);
    float* inv = one_way_float(b, n_rows);
    attention_forward(out, max, inv, one_way(b, N * 3 * s->C), s->B, s->T, s->C, s->NH, 0, &b->dev);
    b->flops = 2.0 * s->B * s->T * s->T * s->C;
}

static void run_attention_backward(Bench* b, const Shape* s) {
    size_t N = (size_t)s->B * s->T, n_rows = N * s->NH;
    floatX* dqkv = one_way(b, N * 3 * s->C);
    const floatX* dout = one_way(b, N * s->C);
    const floatX* out = one_way(b, N * s->C);
    const float* max = one_way_float(b, n_rows);
    const float* inv = one_way_float(b, n_rows);
    attention_backward(dqkv, dout, out, max, inv, one_way(b, N * 3 * s->C), s->B, s->T, s->C, s->NH, &b->dev);
    b->flops = 5.0 * s->B * s->T * s->T * s->C;
}

static void run_crossentropy(Bench* b, const Shape* s) {
    int N = s->B * s->T;
    floatX* logits = updated(b, (size_t)N * s->V);
    float* losses = one_way_float(b, (size_t)N);
    crossentropy_fused(losses, logits, b->ids, 1.0f / (float)N, 1, N, s->V, s->V, &b->dev);
}

// a wide vocabulary: rows of 512 KB, more of them in flight than the second-level cache holds
static void run_crossentropy_wide(Bench* b, const Shape* s) {
    const int N = s->C > 64 ? 4096 : 4, V = s->C > 64 ? 256000 : 1000;
    floatX* logits = updated(b, (size_t)N * V);
    float* losses = one_way_float(b, (size_t)N);
    crossentropy_fused(losses, logits, b->ids, 1.0f / (float)N, 1, N, V, V, &b->dev);
}

static void run_embedding(Bench* b, const Shape* s) {
    size_t C = (size_t)s->C, N = (size_t)s->B * s->T;
    floatX* out = one_way(b, N * C);
    const floatX* wte = (const floatX*)slice(b, s->V * C * sizeof(floatX), 0);  // of it only the N rows are read
    b->bytes += (double)(N * C * sizeof(floatX));
    embedding_forward(out, b->ids, wte, one_way(b, s->T * C), s->B, s->T, s->C, 0, &b->dev);
}

static void run_embedding_backward(Bench* b, const Shape* s) {
    size_t C = (size_t)s->C, N = (size_t)s->B * s->T;
    float* dwte = (float*)slice(b, s->V * C * sizeof(float), 0);  // of it at most the N rows are updated
    float* dwpe = updated_float(b, s->T * C);
    b->bytes += 2.0 * (double)(N * C * sizeof(float));
    embedding_backward(dwte, dwpe, one_way(b, N * C), b->ids, s->B, s->T, s->C, &b->dev);
}

// of GPT-2 124M; small: of a row
static size_t n_parameters(const Shape* s) { return s->C > 64 ? 124475904 : 4096; }

static void run_adamw(Bench* b, const Shape* s) {
    size_t n = n_parameters(s);
    AdamW step = adamw_step(1e-4f, 0.9f, 0.95f, 1e-8f, 1.0f, 2);
    floatX* stored = one_way(b, n);
    float* master = updated_float(b, n);
    float* m = updated_float(b, n);
    float* v = updated_float(b, n);
    adamw_update_stored(stored, master, m, v, one_way_float(b, n), n, 0.1f, &step, 1, numbers_from(0), &b->dev);
}

static void run_norm(Bench* b, const Shape* s) {
    const size_t n = n_parameters(s);
    NormSum* sum = (NormSum*)slice(b, sizeof(NormSum), 1);
    const float* g = one_way_float(b, n);
    norm_see(sum, g, n, &b->dev);
    norm_add(sum, g, n, &b->dev);
}

static const Case CASES[] = {
    {"copy", run_copy},  // the most that memory gives
    {"matmul 8192", run_matmul_square},  // the most that tensor cores give
    {"embedding_forward", run_embedding},
    {"embedding_backward", run_embedding_backward},
    {"layernorm_forward", run_layernorm},
    {"residual_layernorm_forward", run_residual_layernorm},
    {"layernorm_backward", run_layernorm_backward},
    {"residual_forward", run_residual},
    {"matmul_forward qkv", run_qkv},
    {"matmul_backward qkv", run_qkv_backward},
    {"matmul_forward attproj", run_attproj},
    {"matmul_backward attproj", run_attproj_backward},
    {"matmul_forward fc", run_fc},
    {"matmul_backward fc", run_fc_backward},
    {"matmul_gelu_forward fc", run_fc_gelu},
    {"matmul_backward_bias fc", run_fc_backward_bias},
    {"matmul_forward fcproj", run_fcproj},
    {"matmul_backward fcproj", run_fcproj_backward},
    {"matmul_gelu_backward_input fcproj", run_fcproj_gelu_backward},
    {"matmul_forward logits", run_logits},
    {"matmul_backward logits", run_logits_backward},
    {"matmul_backward_input qkv", run_qkv_input},  // the two products of each apart
    {"matmul_backward_weight qkv", run_qkv_weight},
    {"matmul_backward_input attproj", run_attproj_input},
    {"matmul_backward_weight attproj", run_attproj_weight},
    {"matmul_backward_input fc", run_fc_input},
    {"matmul_backward_weight fc", run_fc_weight},
    {"matmul_backward_weight fcproj", run_fcproj_weight},
    {"matmul_backward_input logits", run_logits_input},
    {"matmul_backward_weight logits", run_logits_weight},
    {"gelu_forward", run_gelu},
    {"gelu_backward", run_gelu_backward},
    {"crossentropy", run_crossentropy},  // forward and backward, in place
    {"crossentropy wide", run_crossentropy_wide},
    {"adamw_update", run_adamw},         // all parameters at once, with float masters
    {"norm", run_norm},                  // twice through all gradients
};

static const Case ATTENTION[] = {{"attention_forward", run_attention}, {"attention_backward", run_attention_backward}};

// ---------------------------------------------------------------------------------------------------------------------
// Time.

// of n calls, in milliseconds
static double time_calls(Bench* b, const Case* c, const Shape* s, int n) {
#ifdef __CUDACC__
    return device_time(n, &b->dev, [&] { c->run(b, s); });
#else
    double begin = seconds_now(CLOCK_MONOTONIC);
    for (int i = 0; i < n; i++) { c->run(b, s); }
    return 1e3 * (seconds_now(CLOCK_MONOTONIC) - begin);
#endif
}

static void measure(Bench* b, const Case* c, const Shape* s, const char* name, int rounds) {
    fill_pool(b, c->run == run_adamw || c->run == run_attention_backward);  // as second moments and 1 / sums are
    time_calls(b, c, s, 1);             // chooses algorithms, grows the workspace
    b->bytes = b->flops = 0.0;
    double ms = time_calls(b, c, s, 1), bytes = b->bytes, best = 1e30;
    int n = ms < 20.0 ? 1 + (int)(20.0 / (ms > 1e-3 ? ms : 1e-3)) : 1;
    for (int i = 0; i < rounds; i++) {
        double mean = time_calls(b, c, s, n) / n;
        best = mean < best ? mean : best;
    }
    printf("ours\t%s\t%.6f\t%.0f\t%.0f\n", name, best, bytes, b->flops);
    fflush(stdout);
}

static void measure_all(Bench* b, const Shape* s, const char* only, int rounds) {
    static const Shape sizes[] = {{8, 1024, 768, 12, 0},  {8, 4096, 768, 12, 0},  {1, 32768, 768, 12, 0},
#ifdef WGMMA
                                  {8, 4096, 2048, 8, 0},  // heads of 256 channels: others run plain kernels
#endif
                                  {8, 1024, 2048, 16, 0}, {8, 4096, 2048, 16, 0}, {1, 32768, 2048, 16, 0}};
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        const char* name = s->C <= 64 && CASES[i].run == run_matmul_square ? "matmul 64" : CASES[i].name;
        if (strstr(name, only)) { measure(b, &CASES[i], s, name, rounds); }
    }
    for (size_t i = 0; i < 2 * (s->C > 64 ? sizeof sizes / sizeof sizes[0] : 1); i++) {
        const Case* c = &ATTENTION[i % 2];
        const Shape* size = s->C > 64 ? &sizes[i / 2] : s;
        char name[96];
        snprintf(name, sizeof name, "%s B %d T %d NH %d HS %d", c->name, size->B, size->T, size->NH, size->C / size->NH);
        if (strstr(name, only)) { measure(b, c, size, name, rounds); }
    }
}

int main(int argc, char** argv) {
    Shape s = {16, 1024, 768, 12, 50304};
    const Shape tiny = {1, 16, 32, 2, 256};
    const char* only = "";
    int rounds = 5, small = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0) {
            small = 1;
        } else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
            rounds = atoi(argv[++i]);
        } else {
            fail_input("%s: expected --small, --only NAME or --rounds N", argv[i]);
        }
    }
    if (small) { s = tiny; }
    Bench b;
    memset(&b, 0, sizeof b);
    device_choose(0);
    device_init(&b.dev, 0);
    b.n_pool = small ? (size_t)1 << 22 : (size_t)6 << 30;
    b.pool = (char*)device_alloc(b.n_pool, "pool");
    int n_ids = s.B * s.T;
    int* ids = (int*)calloc((size_t)n_ids, sizeof(int));
    uint64_t state = 42;
    for (int i = 0; ids && i < n_ids; i++) { ids[i] = (int)(xorshift_u32(&state) % (uint32_t)s.V); }
    b.ids = (int*)device_alloc(sizeof(int) * (size_t)n_ids, "token ids");
    device_upload(b.ids, ids, sizeof(int) * (size_t)n_ids, &b.dev);
    measure_all(&b, &s, only, rounds);
    free(ids);
    device_release(b.ids, sizeof(int) * (size_t)n_ids);
    device_release(b.pool, b.n_pool);
    const int64_t n_slow = device_say_fallbacks(&b.dev, stderr);  // of these shapes none may be
    device_free(&b.dev);
    return n_slow > 0;
}
