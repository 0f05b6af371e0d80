/*
What do experts cost beside one dense layer? GFLOP/s of the three products of llmc/ops/grouped_matmul.h.
    build/grouped [THREADS...]      default: 1 2; dev/bench/README.md says how it is built
First table: R rows over E experts beside the dense product of the same R, C and OC (gemm of matmul.h), and beside one
call of gemm after the other, expert by expert. Rows are gathered, and their number differs from expert to expert by up
to half of the mean. Second table: an expert MLP, up, silu and down with all gradients, beside the dense MLP whose
products have as many operations, for more and more experts. The contenders take turns until SECONDS have passed, at
least REPEATS times; the shortest time of each counts.
*/
#include "llmc/ops/grouped_matmul.h"  // grouped_matmul_forward, ...
#include "llmc/ops/matmul.h"          // matmul_forward, ...
#include "llmc/ops/silu.h"            // silu_one, silu_slope_one
#include "llmc/core/print.h"          // seconds_now
#include <math.h>

enum { REPEATS = 5 };
static const double SECONDS = 2.0;

typedef struct { int E, R, C, OC; } Shape;
typedef enum { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, PRODUCTS } Product;
typedef enum { DENSE, LOOP, GROUPED, CONTENDERS } Contender;

typedef struct {
    Shape s;
    float *inp, *dout, *weight, *out, *dinp, *dweight;
    int *offsets, *index;
} Problem;

static float* random_floats(size_t n, uint32_t state) {
    float* x = (float*)arena_alloc(sizeof(float) * n, "bench");
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) / 16777216.0f - 0.5f;
    }
    return x;
}

// counts between half and one and a half times the mean
static int* random_offsets(int E, int R) {
    int* offsets = (int*)malloc_check(sizeof(int) * (E + 1), "offsets");
    double sum = 0.0, upto = 0.0;
    for (int pass = 0; pass < 2; pass++) {
        uint32_t state = 7;
        for (int e = 0; e < E; e++) {
            state = state * 1664525u + 1013904223u;
            *(pass ? &upto : &sum) += 0.5 + (state >> 8) / 16777216.0;
            if (pass) { offsets[e + 1] = (int)(R * (upto / sum) + 0.5); }
        }
    }
    offsets[0] = 0;
    return offsets;
}

static Problem problem_make(Shape s) {
    size_t n_inp = (size_t)s.R * s.C, n_out = (size_t)s.R * s.OC, n_weight = (size_t)s.E * s.OC * s.C;
    Problem p = {s, random_floats(n_inp, 1), random_floats(n_out, 2), random_floats(n_weight, 3), random_floats(n_out, 4),
                 random_floats(n_inp, 5), random_floats(n_weight, 6), random_offsets(s.E, s.R), NULL};
    p.index = (int*)malloc_check(sizeof(int) * s.R, "index");
    for (int e = 0; e < s.E; e++) {  // of half as many tokens, ascending in each expert
        int first = p.offsets[e], n = p.offsets[e + 1] - first;
        for (int i = 0; i < n; i++) { p.index[first + i] = (int)((int64_t)i * ((s.R + 1) / 2) / n); }
    }
    return p;
}

static void problem_free(Problem* p) {
    size_t n_inp = (size_t)p->s.R * p->s.C, n_out = (size_t)p->s.R * p->s.OC, n_weight = (size_t)p->s.E * p->s.OC * p->s.C;
    arena_free(p->inp, sizeof(float) * n_inp), arena_free(p->dinp, sizeof(float) * n_inp);
    arena_free(p->dout, sizeof(float) * n_out), arena_free(p->out, sizeof(float) * n_out);
    arena_free(p->weight, sizeof(float) * n_weight), arena_free(p->dweight, sizeof(float) * n_weight);
    free(p->offsets), free(p->index);
}

// N rows from row s on, with the weight of expert e
static void dense(const Problem* p, Product product, int e, int s, int N, const Device* dev) {
    const size_t C = p->s.C, OC = p->s.OC, w = e * OC * C;
    const int c = p->s.C, oc = p->s.OC;
    if (N == 0 && product != BACKWARD_WEIGHT) { return; }
    if (product == FORWARD) { matmul_forward(p->out + s * OC, p->inp + s * C, p->weight + w, NULL, N, c, oc, dev); }
    if (product == BACKWARD_INPUT) { matmul_backward_input(p->dinp + s * C, p->dout + s * OC, p->weight + w, 0, N, c, oc, dev); }
    if (product == BACKWARD_WEIGHT) { matmul_backward_weight(p->dweight + w, p->dout + s * OC, p->inp + s * C, 0, N, c, oc, dev); }
}

static void grouped(const Problem* p, Product product, const Device* dev) {
    const Shape s = p->s;
    if (product == FORWARD) { grouped_matmul_forward(p->out, p->inp, p->index, p->weight, p->offsets, s.E, s.R, s.C, s.OC, dev); }
    if (product == BACKWARD_INPUT) {
        grouped_matmul_backward_input(p->dinp, p->dout, p->index, p->weight, p->offsets, s.E, s.R, s.C, s.OC, dev);
    }
    if (product == BACKWARD_WEIGHT) {
        grouped_matmul_backward_weight(p->dweight, p->dout, NULL, p->inp, p->index, p->offsets, s.E, s.R, s.C, s.OC, dev);
    }
}

// of one thread the time on the processor counts: other programs only ever make it longer
static double seconds(const Device* dev) { return seconds_now(dev->n_threads > 1 ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID); }

static double seconds_of(const Problem* p, Product product, Contender who, const Device* dev) {
    const double begin = seconds(dev);
    if (who == DENSE) { dense(p, product, 0, 0, p->s.R, dev); }
    if (who == GROUPED) { grouped(p, product, dev); }
    for (int e = 0; who == LOOP && e < p->s.E; e++) {
        dense(p, product, e, p->offsets[e], p->offsets[e + 1] - p->offsets[e], dev);
    }
    return seconds(dev) - begin;
}

static void products(const Device* dev) {
    static const Shape shapes[] = {
        {8, 2048, 256, 2048}, {8, 2048, 1024, 256}, {16, 2048, 256, 2048}, {64, 2048, 256, 2048}, {64, 2048, 1024, 256},
        {128, 512, 256, 1024}, {1, 2048, 256, 2048},
    };
    static const char* names[] = {"forward", "backward_input", "backward_weight"};
    printf("%24s %16s %14s %14s %14s %16s %16s\n", "E, R, C, OC", "product", "dense GFLOP/s", "loop of gemm", "grouped", "grouped / dense",
           "grouped / loop");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const Shape s = shapes[i];
        Problem p = problem_make(s);
        char name[64];
        snprintf(name, sizeof name, "%d, %d, %d, %d", s.E, s.R, s.C, s.OC);
        for (int product = 0; product < PRODUCTS; product++) {
            double best[CONTENDERS] = {1e9, 1e9, 1e9}, begin = seconds_now(CLOCK_MONOTONIC);
            for (int n = 0; n < REPEATS || seconds_now(CLOCK_MONOTONIC) - begin < SECONDS; n++) {
                for (int who = 0; who < CONTENDERS; who++) {
                    double t = seconds_of(&p, (Product)product, (Contender)who, dev);
                    best[who] = t < best[who] ? t : best[who];
                }
            }
            const double gflop = 2e-9 * s.R * s.C * s.OC;
            printf("%24s %16s %14.1f %14.1f %14.1f %16.2f %16.2f\n", product ? "" : name, names[product], gflop / best[DENSE],
                   gflop / best[LOOP], gflop / best[GROUPED], best[DENSE] / best[GROUPED], best[LOOP] / best[GROUPED]);
        }
        problem_free(&p);
    }
    printf("\n");
}

// ---- an expert MLP, forward and backward, as the trainer calls it ----

enum { TOKENS = 1024, CHOSEN = 2, CHANNELS = 256, WIDTH = 512 };  // a row is a token at one of its CHOSEN experts

typedef struct {
    int E, R, F;  // dense: one expert, R = TOKENS and F = CHOSEN * WIDTH; otherwise R = TOKENS * CHOSEN, F = WIDTH
    float *m, *dout, *gate_up_weight, *down_weight, *dgate_up_weight, *ddown_weight;
    float *gate_up, *hidden, *t, *rows, *out;
    int *offsets, *index, *slot;  // index: token of a slot; slot (TOKENS, CHOSEN)
} Mlp;

static Mlp mlp_make(int E) {
    const int D = CHANNELS, R = E == 1 ? TOKENS : TOKENS * CHOSEN, F = E == 1 ? CHOSEN * WIDTH : WIDTH;
    const size_t n_weight = (size_t)E * F * D, n_rows = (size_t)R * D, n_wide = (size_t)R * F;
    Mlp p = {E, R, F, random_floats((size_t)TOKENS * D, 1), random_floats((size_t)TOKENS * D, 2), random_floats(2 * n_weight, 3),
             random_floats(n_weight, 4), random_floats(2 * n_weight, 5), random_floats(n_weight, 6), random_floats(2 * n_wide, 7),
             random_floats(n_wide, 8), random_floats(n_wide, 9), random_floats(n_rows, 10), random_floats((size_t)TOKENS * D, 11),
             random_offsets(E, R), NULL, NULL};
    p.index = (int*)malloc_check(sizeof(int) * R, "index");
    p.slot = (int*)malloc_check(sizeof(int) * R, "slots");
    int* n_slots = (int*)calloc(TOKENS, sizeof(int));
    for (int s = 0; s < R; s++) {  // the slots of a token lie far apart, ascending tokens beside each other
        p.index[s] = s % TOKENS;
        p.slot[s % TOKENS * (R / TOKENS) + n_slots[s % TOKENS]++] = s;
    }
    free(n_slots);
    return p;
}

static void mlp_free(Mlp* p) {
    const size_t D = CHANNELS, n_weight = (size_t)p->E * p->F * D, n_rows = (size_t)p->R * D, n_wide = (size_t)p->R * p->F;
    const struct { float* x; size_t n; } arrays[] = {
        {p->m, TOKENS * D}, {p->dout, TOKENS * D}, {p->gate_up_weight, 2 * n_weight}, {p->down_weight, n_weight},
        {p->dgate_up_weight, 2 * n_weight}, {p->ddown_weight, n_weight}, {p->gate_up, 2 * n_wide}, {p->hidden, n_wide},
        {p->t, n_wide}, {p->rows, n_rows}, {p->out, TOKENS * D},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) { arena_free(arrays[i].x, sizeof(float) * arrays[i].n); }
    free(p->offsets), free(p->index), free(p->slot);
}

// hidden = silu(gate) * up
static void mlp_silu(const Mlp* p) {
    #pragma omp parallel for
    for (int s = 0; s < p->R; s++) {
        const float *gate = p->gate_up + (size_t)s * 2 * p->F, *up = gate + p->F;
        float* h = p->hidden + (size_t)s * p->F;
        #pragma omp simd
        for (int f = 0; f < p->F; f++) { h[f] = silu_one(gate[f]) * up[f]; }
    }
}

// gate_up becomes its gradient
static void mlp_silu_backward(const Mlp* p) {
    #pragma omp parallel for
    for (int s = 0; s < p->R; s++) {
        float *gate = p->gate_up + (size_t)s * 2 * p->F, *up = gate + p->F;
        const float* t = p->t + (size_t)s * p->F;
        #pragma omp simd
        for (int f = 0; f < p->F; f++) {
            float dh = 0.5f * t[f], g = gate[f];  // 0.5: the routing weight
            gate[f] = dh * up[f] * silu_slope_one(g);
            up[f] = dh * silu_one(g);
        }
    }
}

// rows of tokens, added up
static void mlp_combine(const Mlp* p) {
    const int D = CHANNELS, k = p->R / TOKENS;
    #pragma omp parallel for
    for (int n = 0; n < TOKENS; n++) {
        float* out = p->out + (size_t)n * D;
        memset(out, 0, sizeof(float) * D);
        for (int j = 0; j < k; j++) {
            const float* row = p->rows + (size_t)p->slot[n * k + j] * D;
            #pragma omp simd
            for (int d = 0; d < D; d++) { out[d] = madd(0.5f, row[d], out[d]); }
        }
    }
}

static void mlp_dense(const Mlp* p, const Device* dev) {
    const int N = p->R, D = CHANNELS, F = p->F;
    matmul_forward(p->gate_up, p->m, p->gate_up_weight, NULL, N, D, 2 * F, dev);
    mlp_silu(p);
    matmul_forward(p->out, p->hidden, p->down_weight, NULL, N, F, D, dev);
    matmul_backward_input(p->t, p->dout, p->down_weight, 0, N, F, D, dev);
    mlp_silu_backward(p);
    matmul_backward_weight(p->ddown_weight, p->dout, p->hidden, 0, N, F, D, dev);
    matmul_backward_weight(p->dgate_up_weight, p->gate_up, p->m, 0, N, D, 2 * F, dev);
    matmul_backward_input(p->out, p->gate_up, p->gate_up_weight, 0, N, D, 2 * F, dev);
}

static void mlp_experts(const Mlp* p, const Device* dev) {
    const int E = p->E, R = p->R, D = CHANNELS, F = p->F, *o = p->offsets, *index = p->index;
    grouped_matmul_forward(p->gate_up, p->m, index, p->gate_up_weight, o, E, R, D, 2 * F, dev);
    mlp_silu(p);
    grouped_matmul_forward(p->rows, p->hidden, NULL, p->down_weight, o, E, R, F, D, dev);
    mlp_combine(p);
    grouped_matmul_backward_input(p->t, p->dout, index, p->down_weight, o, E, R, F, D, dev);
    mlp_silu_backward(p);
    grouped_matmul_backward_weight(p->ddown_weight, p->dout, index, p->hidden, NULL, o, E, R, F, D, dev);
    grouped_matmul_backward_weight(p->dgate_up_weight, p->gate_up, NULL, p->m, index, o, E, R, D, 2 * F, dev);
    grouped_matmul_backward_input(p->rows, p->gate_up, NULL, p->gate_up_weight, o, E, R, D, 2 * F, dev);
    mlp_combine(p);
}

static void mlps(const Device* dev) {
    enum { SIZES = 4 };
    static const int n_experts[SIZES] = {1, 4, 16, 64};
    Mlp p[SIZES];
    double best[SIZES] = {1e9, 1e9, 1e9, 1e9};
    for (int i = 0; i < SIZES; i++) { p[i] = mlp_make(n_experts[i]); }
    const double begin = seconds_now(CLOCK_MONOTONIC);
    for (int n = 0; n < REPEATS || seconds_now(CLOCK_MONOTONIC) - begin < SIZES * SECONDS; n++) {
        for (int i = 0; i < SIZES; i++) {
            const double start = seconds(dev);
            if (i == 0) { mlp_dense(&p[i], dev); } else { mlp_experts(&p[i], dev); }
            best[i] = fmin(best[i], seconds(dev) - start);
        }
    }
    printf("%d tokens, %d channels, width %d at each of %d experts; %.1f MFLOP a token, forward and backward\n", TOKENS,
           CHANNELS, WIDTH, CHOSEN, 3e-6 * 6 * CHANNELS * WIDTH * CHOSEN);
    printf("%24s %16s %14s %14s %14s\n", "", "rows an expert", "ms", "GFLOP/s", "time / dense");
    for (int i = 0; i < SIZES; i++) {
        const double gflop = 3e-9 * 6 * CHANNELS * WIDTH * CHOSEN * TOKENS;
        char name[32];
        snprintf(name, sizeof name, i ? "%d experts" : "dense", n_experts[i]);
        printf("%24s %16d %14.2f %14.1f %14.2f\n", name, p[i].R / n_experts[i], 1e3 * best[i], gflop / best[i], best[i] / best[0]);
        mlp_free(&p[i]);
    }
    printf("\n");
}

int main(int argc, char** argv) {
    for (int i = 1; i < (argc > 1 ? argc : 3); i++) {
        int n_threads = argc > 1 ? atoi(argv[i]) : i;
        Device dev;
        if (n_threads < 1) { fail_input("expected numbers of threads, found \"%s\"", argv[i]); }
        device_init(&dev, n_threads);
        printf("%d thread%s\n", n_threads, n_threads > 1 ? "s" : "");
        products(&dev);
        mlps(&dev);
        device_free(&dev);
    }
    return 0;
}
