/*
Times the algorithms that cuBLASLt offers for the products of a training step of GPT-2, and prints rows for the table in
llmc/ops/gemm_algorithms.h: those where another than its first answer is faster by 1% at least.
    gemm_algorithms                   124M, N 65536 positions (B 64, T 1024), logits of 8192 at a time
    gemm_algorithms --positions 16384 another N; --head-rows 65536 other logits; --channels 1600
    gemm_algorithms --all             a row for each product, also where the first answer is the fastest
    gemm_algorithms --rounds 5        repetitions, of which the shortest counts; the answers take turns
    gemm_algorithms --small           tiny shapes, to see that it runs
Times are between two events around at least 20 ms of calls. Operands are the same in each call: of what a product reads again
the L2 may keep some, alike for all answers.
*/
#include "llmc/core/device.h"  // Device, device_alloc, device_upload
#include "llmc/core/floatx.h"  // floatX
#include "llmc/core/rng.h"     // xorshift_float
#include "llmc/test/device_time.h"  // device_time
#include "llmc/ops/matmul.h"   // matmul_forward, matmul_gelu_forward, ..., CublasPlan, cublas_answers

typedef struct {
    int N, C, V, head_rows, rounds, all;
} Sizes;

// three operands, each as large as the largest
typedef struct {
    Device dev;
    char *left, *right, *out;
    size_t n_bytes;
} Bench;

static size_t largest(size_t a, size_t b) { return a > b ? a : b; }

// numbers in [-1, 1): power, and with it the clock, depends on what is multiplied
static void fill(Bench* b, char* to) {
    enum { N_BLOCK = 1 << 16 };
    static floatX block[N_BLOCK];
    uint64_t state = 1337;
    for (int i = 0; i < N_BLOCK; i++) { block[i] = (floatX)(2.0f * xorshift_float(&state) - 1.0f); }
    for (size_t at = 0; at < b->n_bytes; at += sizeof block) {
        const size_t rest = b->n_bytes - at;
        device_upload(to + at, block, rest < sizeof block ? rest : sizeof block, &b->dev);
    }
}

// Each product of a step is asked for once, and so its shape has a plan. GELU is part of the products beside it
static void ask_step(Bench* b, const Sizes* s) {
    const Device* dev = &b->dev;
    const int N = s->N, C = s->C, layers[][2] = {{C, 3 * C}, {C, C}, {C, 4 * C}, {4 * C, C}};
    floatX *out = (floatX*)b->out, *left = (floatX*)b->left, *right = (floatX*)b->right;
    float* sums = (float*)b->out;
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        const int IC = layers[i][0], OC = layers[i][1], widens = OC == 4 * C, narrows = IC == 4 * C;
        if (widens) { matmul_gelu_forward(out, left, left, right, right, 1, N, IC, OC, dev); }
        else { matmul_forward(out, left, right, right, N, IC, OC, dev); }
        if (narrows) { matmul_gelu_backward_input(out, left, right, left, 1, N, IC, OC, dev); }
        else { matmul_backward_input(out, left, right, 0, N, IC, OC, dev); }
        matmul_backward_weight(sums, left, right, 0, N, IC, OC, dev);
    }
    matmul_forward(out, left, right, (const floatX*)NULL, s->head_rows, C, s->V, dev);
    matmul_backward_input(out, left, right, 0, s->head_rows, C, s->V, dev);
    matmul_backward_weight(sums, left, right, 0, s->head_rows, C, s->V, dev);
}

// n calls, in milliseconds
static double time_calls(Bench* b, CublasPlan* plan, const cublasLtMatmulAlgo_t* algo, int n) {
    const float scale = 1.0f, from_old = 0.0f;
    void* workspace = device_workspace(&b->dev, CUBLAS_WORKSPACE);
    return device_time(n, &b->dev, [&] {
        cublasCheck(cublasLtMatmul(b->dev.blas, &plan->product, &scale, b->right, &plan->left, b->left, &plan->right,
                                   &from_old, b->out, &plan->out, b->out, &plan->out, algo, workspace, CUBLAS_WORKSPACE,
                                   b->dev.stream));
    });
}

static void print_row(const Bench* b, const CublasPlan* plan, const CublasConfig* c, double ms, double first_ms) {
    const CublasShape* s = &plan->shape;
    const int64_t numbers[] = {s->M,        s->N,        s->K,    s->out_stride, s->a_stride, s->b_stride,
                               s->a_turned, s->b_turned, s->type, s->out_type,   s->epilogue};
    printf("    {\"%s\", %d, %lld, {", b->dev.plans->cache->card, b->dev.n_sms, (long long)cublasLtGetVersion());
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) { printf("%s%lld", i ? ", " : "", (long long)numbers[i]); }
    printf("}, {%d, %d, %d, %d, %d, %d, %d, %d, %d}},  // %.4f ms, the first answer %.4f\n", c->id, c->tile, c->splits,
           c->reduction, c->swizzle, c->custom, c->stages, c->inner, c->cluster, ms, first_ms);
    fflush(stdout);
}

static void choose(Bench* b, CublasPlan* plan, const Sizes* s) {
    cublasLtMatmulHeuristicResult_t results[CUBLAS_ANSWERS];
    double best[CUBLAS_ANSWERS];
    const int n = cublas_answers(results, CUBLAS_ANSWERS, plan, &b->dev);
    int fastest = 0;
    for (int i = 0; i < n; i++) { best[i] = results[i].state == CUBLAS_STATUS_SUCCESS ? 1e30 : INFINITY; }
    for (int round = 0; round < s->rounds; round++) {
        for (int i = 0; i < n; i++) {
            if (isinf(best[i])) { continue; }
            const double once = time_calls(b, plan, &results[i].algo, 1);
            const int calls = once < 20.0 && s->N > 1024 ? 1 + (int)(20.0 / (once > 1e-3 ? once : 1e-3)) : 1;
            const double ms = time_calls(b, plan, &results[i].algo, calls) / calls;
            best[i] = ms < best[i] ? ms : best[i];
        }
    }
    for (int i = 1; i < n; i++) { fastest = best[i] < best[fastest] ? i : fastest; }
    if (best[fastest] > 0.99 * best[0]) { fastest = 0; }
    const CublasConfig config = cublas_config(&results[fastest].algo);
    if (fastest > 0 || s->all) { print_row(b, plan, &config, best[fastest], best[0]); }
}

int main(int argc, char** argv) {
    Sizes s = {65536, 768, 50304, 8192, 5, 0};
    const Sizes tiny = {32, 32, 264, 24, 1, 0};
    struct { const char* name; int* value; } numbers[] = {{"--positions", &s.N}, {"--channels", &s.C}, {"--vocabulary", &s.V},
                                                          {"--head-rows", &s.head_rows}, {"--rounds", &s.rounds}};
    for (int i = 1; i < argc; i++) {
        int known = 0;
        if (strcmp(argv[i], "--small") == 0) { s = tiny, known = 1; }
        if (strcmp(argv[i], "--all") == 0) { s.all = known = 1; }
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers && i + 1 < argc && !known; k++) {
            if (strcmp(argv[i], numbers[k].name) == 0) { *numbers[k].value = atoi(argv[++i]), known = 1; }
        }
        if (!known) { fail_input("%s: expected --small, --all, or --positions, --channels, --vocabulary, --head-rows, --rounds N", argv[i]); }
    }
    Bench b;
    memset(&b, 0, sizeof b);
    device_choose(0);
    device_init(&b.dev, 0);
    b.n_bytes = largest(largest(sizeof(floatX) * (size_t)s.N * 4 * (size_t)s.C, sizeof(floatX) * (size_t)s.head_rows * (size_t)s.V),
                        sizeof(float) * (size_t)s.V * (size_t)s.C);
    char** operands[] = {&b.left, &b.right, &b.out};
    for (char** operand : operands) {
        *operand = (char*)device_alloc(b.n_bytes, "operands");
        fill(&b, *operand);
    }
    ask_step(&b, &s);
    CublasCache* cache = cublas_cache(&b.dev);
    for (int i = 0; i < cache->n_plans; i++) {
        if (cache->plan[i].possible) { choose(&b, &cache->plan[i], &s); }
    }
    const int64_t n_slow = device_say_fallbacks(&b.dev, stderr);
    for (char** operand : operands) { device_release(*operand, b.n_bytes); }
    device_free(&b.dev);
    return n_slow > 0;
}
