/*
Ops of llmc/, timed alone; for dev/gpu_check.sh. Those of GPT-2 124M have its sizes, B 16, T 1024, attention others too.
Of larger models there are RMSNorm, products of experts, sparse and latent attention; their names have their sizes.
    gpu_ops                  all cases
    gpu_ops --only attention  cases whose name contains this
    gpu_ops --rounds 5       repetitions, of which the shortest counts
    gpu_ops --small          tiny shapes, to see that all cases run
    gpu_ops --list           names of the cases; nothing runs
A case is one line: PROGRAM tab CASE tab MILLISECONDS tab BYTES tab FLOPS, the form of dev/bench/pytorch_gpu.py. BYTES
are the fewest that the op must move: every input read once, every output written once. FLOPS of attention are those of
the keys that positions see, without what backward computes again. Operands come from a pool that is handed out slice
after slice and is far larger than the second-level cache, so each call finds its inputs in memory; lists of what is
seen are the same each time. Time is that between two events around at least 20 ms of calls. Like a trainer this is C:
`cc -x c` builds it for the CPU.
*/
#include "llmc/ops/adamw.h"         // adamw_step, adamw_update_stored
#include "llmc/ops/attention.h"     // attention_forward, attention_backward
#include "llmc/ops/crossentropy.h"  // crossentropy_fused
#include "llmc/core/device.h"       // Device, device_alloc, device_upload, device_copy
#include "llmc/ops/embedding.h"     // embedding_forward, embedding_backward
#include "llmc/core/floatx.h"       // floatX
#include "llmc/ops/gelu.h"          // gelu_forward, gelu_backward
#include "llmc/ops/global_norm.h"   // norm_see, norm_add
#include "llmc/ops/grouped_matmul.h"  // grouped_matmul_forward, grouped_matmul_forward_stored, ...
#include "llmc/ops/latent_attention.h"  // latent_attention_forward, latent_attention_backward, latent_attention_mass
#include "llmc/ops/layernorm.h"     // layernorm_forward, residual_layernorm_forward, layernorm_backward
#include "llmc/core/print.h"        // seconds_now
#include "llmc/ops/matmul.h"        // matmul_forward, matmul_gelu_forward, matmul_backward, ...
#include "llmc/ops/residual.h"      // residual_forward
#include "llmc/ops/rmsnorm.h"       // rmsnorm_forward, rmsnorm_backward
#include "llmc/core/rng.h"          // xorshift_u32
#include "llmc/ops/sparse_attention.h"  // sparse_attention_forward, sparse_attention_backward, sparse_attention_mass
#include "llmc/test/device_time.h"  // device_time

typedef struct {
    int B, T, C, NH, V;
} Shape;

// sizes of larger models' ops
typedef struct {
    int N, C;            // RMSNorm: rows, channels
    int E, R, IC, OC;    // experts, their rows together, channels that go in and come out
    SparseShape sparse;  // DeepSeek V4
    int r;               // tokens of an entry
    LatentShape latent;  // GLM-5.2
    int neighbours;      // positions that follow each other and whose lists are alike
} Large;

static const Large LARGE = {16384, 4096, 16, 8192, 4096, 1536, {4096, 64, 512, 128, 512, 0.0442f, 0}, 4,
                            {4096, 64, 192, 64, 256, 2048, 0.0625f}, 128};
static const Large LARGE_SMALL = {40, 64, 3, 60, 64, 128, {40, 2, 32, 8, 8, 0.1768f, 0}, 2,
                                  {40, 2, 24, 8, 16, 16, 0.1768f}, 4};

// whole numbers on the device, which say who sees whom: one document of positions
typedef struct {
    const int* offsets;                // (E+1) the experts have equally many rows
    Places places;                     // of sparse and of latent attention, whose N are the same
    EntryWindows entries;
    const int *chosen, *alike, *apart;  // (N, topk) of entries; of keys, see make_lists
    double of_window, of_entries, all_keys, of_lists;  // pairs of a position and what it sees, of each head
} Sight;

enum { MOST_ARRAYS = 16 };

typedef struct {
    Device dev;
    char* pool;        // random numbers in [-1, 1), both as floatX and as float, no byte of which is NaN as e4m3
    size_t n_pool, at; // bytes; where the next slice begins
    const int* ids;    // B*T token ids, on the device
    const Large* large;
    Sight sight;
    double bytes;      // moved by the calls since it was last set to 0
    double flops;      // of one call
    struct { int* p; size_t n_bytes; } arrays[MOST_ARRAYS];  // of whole numbers, to be given back
    int n_arrays;
} Bench;

typedef enum { GPT2, ROWS, EXPERTS, ENTRIES, LATENT, LISTS, KINDS } Kind;  // whose sizes a name has

typedef struct {
    const char* name;
    void (*run)(Bench* b, const Shape* s);
    Kind kind;
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
        if ((block[i] & 0x7f) == 0x7f) { block[i] ^= 1; }  // NaN as e4m3
    }
    device_upload(b->pool, block, sizeof block, &b->dev);
    for (size_t full = sizeof block; full < b->n_pool; full *= 2) {
        size_t rest = b->n_pool - full;
        device_copy(b->pool + full, b->pool, rest < full ? rest : full, &b->dev);
    }
    device_sync(&b->dev);
}

// ---------------------------------------------------------------------------------------------------------------------
// Whole numbers: tokens, rows of experts, who sees whom. Made on the host once; beside floats they are few.

// takes x, which was allocated
static const int* upload(Bench* b, int* x, size_t n) {
    const size_t n_bytes = sizeof(int) * n;
    if (b->n_arrays == MOST_ARRAYS) { fail_run("gpu_ops: more than %d arrays of whole numbers", MOST_ARRAYS); }
    int* p = (int*)device_alloc(n_bytes, "whole numbers");
    device_upload(p, x, n_bytes, &b->dev);
    device_sync(&b->dev);
    free(x);
    b->arrays[b->n_arrays].p = p, b->arrays[b->n_arrays].n_bytes = n_bytes;
    b->n_arrays++;
    return p;
}

static int* ints(size_t n) { return (int*)malloc_check(sizeof(int) * n, "whole numbers"); }

static int at_most(int x, int most) { return x < most ? x : most; }

// Lists (N, topk) of N positions. Position n sees the (n + 1) / r that there are so far, or topk of them, evenly
// spread: together the lists of a hundred neighbours then hold nearly all. In blocks of `alike` neighbours they are the
// same, but for the positions of the block itself, of which each sees all that are there by then
static int* make_lists(int N, int topk, int r, int alike) {
    int* lists = ints((size_t)N * topk);
    for (int n = 0; n < N; n++) {
        const int so_far = (n + 1) / r, length = at_most(so_far, topk), own = alike ? n % alike + 1 : 0;
        for (int i = 0; i < topk; i++) {
            const int few = alike ? topk : length, many = so_far - own;  // few <= many, where not all are seen
            int x = (int)((int64_t)i * many / (few > 0 ? few : 1));
            if (i >= length - own || so_far <= topk) { x = so_far - length + i; }
            lists[(size_t)n * topk + i] = i < length ? x : -1;
        }
    }
    return lists;
}

// sums over positions n of (n + 1) / r, or of `most` where that is less
static double count_pairs(int N, int r, int most) {
    double sum = 0.0;
    for (int n = 0; n < N; n++) { sum += at_most((n + 1) / r, most); }
    return sum;
}

static void make_sight(Bench* b) {
    const Large* x = b->large;
    const SparseShape* s = &x->sparse;
    const LatentShape* l = &x->latent;
    Sight* sight = &b->sight;
    int *offsets = ints((size_t)x->E + 1), *t = ints((size_t)s->N), *zeros = ints((size_t)s->N);
    int* behind = ints((size_t)s->N);
    for (int e = 0; e <= x->E; e++) { offsets[e] = (int)((int64_t)e * x->R / x->E); }
    for (int n = 0; n < s->N; n++) { t[n] = n, zeros[n] = 0, behind[n] = s->N; }
    sight->offsets = upload(b, offsets, (size_t)x->E + 1);
    sight->places.N = s->N, sight->places.t = upload(b, t, (size_t)s->N);
    sight->places.first_key = sight->entries.first_entry = upload(b, zeros, (size_t)s->N);
    sight->places.behind = upload(b, behind, (size_t)s->N);
    sight->entries.r = x->r, sight->entries.W = s->N / x->r;
    sight->chosen = upload(b, make_lists(s->N, s->topk, x->r, 0), (size_t)s->N * s->topk);
    sight->alike = upload(b, make_lists(l->N, l->topk, 1, x->neighbours), (size_t)l->N * l->topk);
    sight->apart = upload(b, make_lists(l->N, l->topk, 1, 0), (size_t)l->N * l->topk);
    sight->of_window = count_pairs(s->N, 1, s->window), sight->of_entries = count_pairs(s->N, x->r, s->topk);
    sight->all_keys = count_pairs(l->N, 1, l->N), sight->of_lists = count_pairs(l->N, 1, l->topk);
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

// ---- larger models ----

static void run_rmsnorm(Bench* b, const Shape* s) {
    const size_t N = (size_t)b->large->N, C = (size_t)b->large->C;
    (void)s;
    floatX* out = one_way(b, N * C);
    float* rstd = one_way_float(b, N);
    const floatX* inp = one_way(b, N * C);
    const floatX* weight = one_way(b, C);
    rmsnorm_forward(out, rstd, inp, weight, 1e-6f, b->large->N, b->large->C, &b->dev);
}

static void run_rmsnorm_backward(Bench* b, const Shape* s) {
    const size_t N = (size_t)b->large->N, C = (size_t)b->large->C;
    (void)s;
    floatX* dinp = updated(b, N * C);
    float* dweight = one_way_float(b, C);
    const floatX* dout = one_way(b, N * C);
    const floatX* inp = one_way(b, N * C);
    const floatX* weight = one_way(b, C);
    const float* rstd = one_way_float(b, N);
    rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd, 1, b->large->N, b->large->C, &b->dev);
}

static void run_grouped(Bench* b, const Shape* s) {
    const Large* x = b->large;
    (void)s;
    floatX* out = one_way(b, (size_t)x->R * x->OC);
    const floatX* inp = one_way(b, (size_t)x->R * x->IC);
    const floatX* weight = one_way(b, (size_t)x->E * x->OC * x->IC);
    grouped_matmul_forward(out, inp, NULL, weight, b->sight.offsets, x->E, x->R, x->IC, x->OC, &b->dev);
    b->flops = 2.0 * x->R * x->IC * x->OC;
}

static void run_grouped_fp8(Bench* b, const Shape* s) {
    const Large* x = b->large;
    (void)s;
    floatX* out = one_way(b, (size_t)x->R * x->OC);
    const floatX* inp = one_way(b, (size_t)x->R * x->IC);
    const char* codes = slice(b, (size_t)x->E * x->OC * x->IC, 1);
    StoredMatrix weight = stored_matrix(codes, STORED_FP8, x->OC, x->IC, x->OC, NULL);
    weight.scales = one_way_float(b, x->E * stored_scales(&weight));
    grouped_matmul_forward_stored(out, inp, NULL, weight, b->sight.offsets, x->E, x->R, &b->dev);
    b->flops = 2.0 * x->R * x->IC * x->OC;
}

static void run_grouped_input(Bench* b, const Shape* s) {
    const Large* x = b->large;
    (void)s;
    floatX* dinp = one_way(b, (size_t)x->R * x->IC);
    const floatX* dout = one_way(b, (size_t)x->R * x->OC);
    const floatX* weight = one_way(b, (size_t)x->E * x->OC * x->IC);
    grouped_matmul_backward_input(dinp, dout, NULL, weight, b->sight.offsets, x->E, x->R, x->IC, x->OC, &b->dev);
    b->flops = 2.0 * x->R * x->IC * x->OC;
}

static void run_grouped_weight(Bench* b, const Shape* s) {
    const Large* x = b->large;
    (void)s;
    float* dweight = one_way_float(b, (size_t)x->E * x->OC * x->IC);
    const floatX* dout = one_way(b, (size_t)x->R * x->OC);
    const floatX* inp = one_way(b, (size_t)x->R * x->IC);
    grouped_matmul_backward_weight(dweight, dout, NULL, inp, NULL, b->sight.offsets, x->E, x->R, x->IC, x->OC, &b->dev);
    b->flops = 2.0 * x->R * x->IC * x->OC;
}

// lists that are read
static const int* listed(Bench* b, const int* lists, size_t n) {
    b->bytes += lists ? (double)(sizeof(int) * n) : 0.0;
    return lists;
}

static void run_sparse(Bench* b, const Shape* shape) {
    const SparseShape* s = &b->large->sparse;
    const Sight* x = &b->sight;
    const size_t N = (size_t)s->N, H = (size_t)s->H, d = (size_t)s->d;
    (void)shape;
    floatX* out = one_way(b, N * H * d);
    float* max = one_way_float(b, N * H);
    float* inv = one_way_float(b, N * H);
    const floatX* q = one_way(b, N * H * d);
    const floatX* kv = one_way(b, N * d);
    const floatX* entries = one_way(b, (size_t)x->entries.W * d);
    const float* sinks = one_way_float(b, H);
    const int* chosen = listed(b, x->chosen, N * s->topk);
    sparse_attention_forward(out, max, inv, q, kv, entries, sinks, chosen, s, &x->places, &x->entries, &b->dev);
    b->flops = 4.0 * s->H * s->d * (x->of_window + x->of_entries);
}

static void run_sparse_backward(Bench* b, const Shape* shape) {
    const SparseShape* s = &b->large->sparse;
    const Sight* x = &b->sight;
    const size_t N = (size_t)s->N, H = (size_t)s->H, d = (size_t)s->d, n_entries = (size_t)x->entries.W;
    (void)shape;
    floatX* dq = one_way(b, N * H * d);
    floatX* dkv = one_way(b, N * d);
    floatX* dentries = one_way(b, n_entries * d);
    float* dsinks = one_way_float(b, H);
    const floatX* dout = one_way(b, N * H * d);
    const floatX* out = one_way(b, N * H * d);
    const floatX* q = one_way(b, N * H * d);
    const floatX* kv = one_way(b, N * d);
    const floatX* entries = one_way(b, n_entries * d);
    const float* max = one_way_float(b, N * H);
    const float* inv = one_way_float(b, N * H);
    const float* sinks = one_way_float(b, H);
    const int* chosen = listed(b, x->chosen, N * s->topk);
    sparse_attention_backward(dq, dkv, dentries, dsinks, dout, out, q, kv, entries, max, inv, sinks, chosen,
                              x->entries.W, s, &x->places, &x->entries, &b->dev);
    b->flops = 10.0 * s->H * s->d * (x->of_window + x->of_entries);
}

static void run_sparse_mass(Bench* b, const Shape* shape) {
    const SparseShape* s = &b->large->sparse;
    const Sight* x = &b->sight;
    const size_t N = (size_t)s->N, H = (size_t)s->H, d = (size_t)s->d;
    (void)shape;
    float* mass = one_way_float(b, N * s->topk);
    const floatX* q = one_way(b, N * H * d);
    const floatX* entries = one_way(b, (size_t)x->entries.W * d);
    const float* max = one_way_float(b, N * H);
    const float* inv = one_way_float(b, N * H);
    const int* chosen = listed(b, x->chosen, N * s->topk);
    sparse_attention_mass(mass, q, entries, max, inv, chosen, 0, s, &x->entries, &b->dev);
    b->flops = 2.0 * s->H * s->d * x->of_entries;
}

static void latent(Bench* b, const int* lists, double pairs) {
    const LatentShape* s = &b->large->latent;
    const size_t N = (size_t)s->N, H = (size_t)s->H, dn = (size_t)s->dn, dr = (size_t)s->dr, dv = (size_t)s->dv;
    floatX* out = one_way(b, N * H * dv);
    float* max = one_way_float(b, N * H);
    float* inv = one_way_float(b, N * H);
    const floatX* q = one_way(b, N * H * (dn + dr));
    const floatX* kv = one_way(b, N * H * (dn + dv));
    const floatX* k_rope = one_way(b, N * dr);
    const int* chosen = listed(b, lists, N * s->topk);
    latent_attention_forward(out, max, inv, q, kv, k_rope, chosen, s, &b->sight.places, &b->dev);
    b->flops = 2.0 * s->H * (s->dn + s->dr + s->dv) * pairs;
}

static void latent_backward(Bench* b, const int* lists, double pairs) {
    const LatentShape* s = &b->large->latent;
    const size_t N = (size_t)s->N, H = (size_t)s->H, dn = (size_t)s->dn, dr = (size_t)s->dr, dv = (size_t)s->dv;
    floatX* dq = one_way(b, N * H * (dn + dr));
    floatX* dkv = one_way(b, N * H * (dn + dv));
    floatX* dk_rope = one_way(b, N * dr);
    const floatX* dout = one_way(b, N * H * dv);
    const floatX* out = one_way(b, N * H * dv);
    const floatX* q = one_way(b, N * H * (dn + dr));
    const floatX* kv = one_way(b, N * H * (dn + dv));
    const floatX* k_rope = one_way(b, N * dr);
    const float* max = one_way_float(b, N * H);
    const float* inv = one_way_float(b, N * H);
    const int* chosen = listed(b, lists, N * s->topk);
    latent_attention_backward(dq, dkv, dk_rope, dout, out, q, kv, k_rope, max, inv, chosen, s->N, s, &b->sight.places,
                              &b->dev);
    b->flops = 5.0 * s->H * (s->dn + s->dr + s->dv) * pairs;
}

static void latent_mass(Bench* b, const int* lists, double pairs) {
    const LatentShape* s = &b->large->latent;
    const size_t N = (size_t)s->N, H = (size_t)s->H, dn = (size_t)s->dn, dr = (size_t)s->dr, dv = (size_t)s->dv;
    float* mass = one_way_float(b, N * s->topk);
    const floatX* q = one_way(b, N * H * (dn + dr));
    const floatX* kv = (const floatX*)slice(b, N * H * (dn + dv) * sizeof(floatX), 0);  // of it values are not read
    const floatX* k_rope = one_way(b, N * dr);
    const float* max = one_way_float(b, N * H);
    const float* inv = one_way_float(b, N * H);
    const int* chosen = listed(b, lists, N * s->topk);
    b->bytes += (double)(N * H * dn * sizeof(floatX));
    latent_attention_mass(mass, q, kv, k_rope, max, inv, chosen, 0, s, &b->sight.places, &b->dev);
    b->flops = 2.0 * s->H * (s->dn + s->dr) * pairs;
}

static void run_latent(Bench* b, const Shape* s) { (void)s, latent(b, NULL, b->sight.all_keys); }
static void run_latent_alike(Bench* b, const Shape* s) { (void)s, latent(b, b->sight.alike, b->sight.of_lists); }
static void run_latent_backward(Bench* b, const Shape* s) { (void)s, latent_backward(b, NULL, b->sight.all_keys); }
static void run_latent_backward_alike(Bench* b, const Shape* s) {
    (void)s, latent_backward(b, b->sight.alike, b->sight.of_lists);
}
static void run_latent_mass_alike(Bench* b, const Shape* s) {
    (void)s, latent_mass(b, b->sight.alike, b->sight.of_lists);
}
// counted as doc/gpu/glm5.md does: of a block's lists that together hold all keys so far, all of them
static void run_latent_mass_apart(Bench* b, const Shape* s) {
    (void)s, latent_mass(b, b->sight.apart, b->sight.all_keys);
}

static const Case CASES[] = {
    {"copy", run_copy, GPT2},  // the most that memory gives
    {"matmul 8192", run_matmul_square, GPT2},  // the most that tensor cores give
    {"embedding_forward", run_embedding, GPT2},
    {"embedding_backward", run_embedding_backward, GPT2},
    {"layernorm_forward", run_layernorm, GPT2},
    {"residual_layernorm_forward", run_residual_layernorm, GPT2},
    {"layernorm_backward", run_layernorm_backward, GPT2},
    {"residual_forward", run_residual, GPT2},
    {"matmul_forward qkv", run_qkv, GPT2},
    {"matmul_backward qkv", run_qkv_backward, GPT2},
    {"matmul_forward attproj", run_attproj, GPT2},
    {"matmul_backward attproj", run_attproj_backward, GPT2},
    {"matmul_forward fc", run_fc, GPT2},
    {"matmul_backward fc", run_fc_backward, GPT2},
    {"matmul_gelu_forward fc", run_fc_gelu, GPT2},
    {"matmul_backward_bias fc", run_fc_backward_bias, GPT2},
    {"matmul_forward fcproj", run_fcproj, GPT2},
    {"matmul_backward fcproj", run_fcproj_backward, GPT2},
    {"matmul_gelu_backward_input fcproj", run_fcproj_gelu_backward, GPT2},
    {"matmul_forward logits", run_logits, GPT2},
    {"matmul_backward logits", run_logits_backward, GPT2},
    {"matmul_backward_input qkv", run_qkv_input, GPT2},  // the two products of each apart
    {"matmul_backward_weight qkv", run_qkv_weight, GPT2},
    {"matmul_backward_input attproj", run_attproj_input, GPT2},
    {"matmul_backward_weight attproj", run_attproj_weight, GPT2},
    {"matmul_backward_input fc", run_fc_input, GPT2},
    {"matmul_backward_weight fc", run_fc_weight, GPT2},
    {"matmul_backward_weight fcproj", run_fcproj_weight, GPT2},
    {"matmul_backward_input logits", run_logits_input, GPT2},
    {"matmul_backward_weight logits", run_logits_weight, GPT2},
    {"gelu_forward", run_gelu, GPT2},
    {"gelu_backward", run_gelu_backward, GPT2},
    {"crossentropy", run_crossentropy, GPT2},  // forward and backward, in place
    {"crossentropy wide", run_crossentropy_wide, GPT2},
    {"adamw_update", run_adamw, GPT2},         // all parameters at once, with float masters
    {"norm", run_norm, GPT2},                  // twice through all gradients
    {"rmsnorm_forward", run_rmsnorm, ROWS},
    {"rmsnorm_backward", run_rmsnorm_backward, ROWS},  // dinp is added to
    {"grouped_matmul_forward", run_grouped, EXPERTS},
    {"grouped_matmul_forward fp8", run_grouped_fp8, EXPERTS},
    {"grouped_matmul_backward_input", run_grouped_input, EXPERTS},
    {"grouped_matmul_backward_weight", run_grouped_weight, EXPERTS},
    {"sparse_attention_forward", run_sparse, ENTRIES},
    {"sparse_attention_backward", run_sparse_backward, ENTRIES},
    {"sparse_attention_mass", run_sparse_mass, ENTRIES},
    {"latent_attention_forward", run_latent, LATENT},  // all keys so far
    {"latent_attention_backward", run_latent_backward, LATENT},
    {"latent_attention_forward alike", run_latent_alike, LISTS},
    {"latent_attention_backward alike", run_latent_backward_alike, LISTS},
    {"latent_attention_mass alike", run_latent_mass_alike, LISTS},
    {"latent_attention_mass apart", run_latent_mass_apart, LISTS},
};

static const Case ATTENTION[] = {{"attention_forward", run_attention, GPT2},
                                 {"attention_backward", run_attention_backward, GPT2}};

// does it read what is never negative: second moments, 1 / sums?
static int is_positive(const Case* c) {
    return c->run == run_adamw || strstr(c->name, "attention_backward") || strstr(c->name, "attention_mass");
}

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

// rounds 0: its name alone
static void measure(Bench* b, const Case* c, const Shape* s, const char* name, int rounds) {
    if (rounds == 0) {
        puts(name);
        return;
    }
    fill_pool(b, is_positive(c));
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

// the name of a case, with its sizes where they are not GPT-2's
static void name_case(char name[128], const Case* c, const Shape* s, const Large* x) {
    const SparseShape* e = &x->sparse;
    const LatentShape* l = &x->latent;
    char of[KINDS][96];
    of[GPT2][0] = '\0';
    snprintf(of[ROWS], sizeof of[0], " N %d C %d", x->N, x->C);
    snprintf(of[EXPERTS], sizeof of[0], " E %d R %d C %d OC %d", x->E, x->R, x->IC, x->OC);
    snprintf(of[ENTRIES], sizeof of[0], " N %d H %d d %d window %d topk %d", e->N, e->H, e->d, e->window, e->topk);
    snprintf(of[LATENT], sizeof of[0], " N %d H %d dn %d dr %d dv %d", l->N, l->H, l->dn, l->dr, l->dv);
    snprintf(of[LISTS], sizeof of[0], " topk %d N %d H %d dn %d dr %d dv %d", l->topk, l->N, l->H, l->dn, l->dr, l->dv);
    snprintf(name, 128, "%s%s", s->C <= 64 && c->run == run_matmul_square ? "matmul 64" : c->name, of[c->kind]);
}

static void measure_all(Bench* b, const Shape* s, const char* only, int rounds) {
    static const Shape sizes[] = {{8, 1024, 768, 12, 0},  {8, 4096, 768, 12, 0},  {1, 32768, 768, 12, 0},
#ifdef WGMMA
                                  {8, 4096, 2048, 8, 0},  // heads of 256 channels: others run plain kernels
#endif
                                  {8, 1024, 2048, 16, 0}, {8, 4096, 2048, 16, 0}, {1, 32768, 2048, 16, 0}};
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        char name[128];
        name_case(name, &CASES[i], s, b->large);
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
    int rounds = 5, small = 0, list = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0) {
            small = 1;
        } else if (strcmp(argv[i], "--list") == 0) {
            list = 1;
        } else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
            rounds = atoi(argv[++i]);
        } else {
            fail_input("%s: expected --small, --list, --only NAME or --rounds N", argv[i]);
        }
    }
    if (rounds < 1) { fail_input("--rounds: expected a whole number from 1 on"); }
    if (small) { s = tiny; }
    Bench b;
    memset(&b, 0, sizeof b);
    b.large = small ? &LARGE_SMALL : &LARGE;
    if (list) {
        measure_all(&b, &s, only, 0);
        return 0;
    }
    device_choose(0);
    device_init(&b.dev, 0);
    b.n_pool = small ? (size_t)1 << 22 : (size_t)6 << 30;
    b.pool = (char*)device_alloc(b.n_pool, "pool");
    const int n_ids = s.B * s.T;
    int* ids = ints((size_t)n_ids);
    uint64_t state = 42;
    for (int i = 0; i < n_ids; i++) { ids[i] = (int)(xorshift_u32(&state) % (uint32_t)s.V); }
    b.ids = upload(&b, ids, (size_t)n_ids);
    make_sight(&b);
    measure_all(&b, &s, only, rounds);
    while (b.n_arrays-- > 0) { device_release(b.arrays[b.n_arrays].p, b.arrays[b.n_arrays].n_bytes); }
    device_release(b.pool, b.n_pool);
    const int64_t n_slow = device_say_fallbacks(&b.dev, stderr);  // of these shapes none may be
    device_free(&b.dev);
    return n_slow > 0;
}
