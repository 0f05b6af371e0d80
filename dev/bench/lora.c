/*
What does an adapter cost beside the layer that it stands at? Milliseconds of llmc/ops/lora.h and of matmul.h.
    build/lora [THREADS [N]]        default: 1 1024; dev/bench/README.md says how it is built
For the layers of Qwen3-0.6B and several ranks: forward and backward of the layer whose weight does not learn (out and
dinp), the adapter's, their quotient, and the whole beside a layer that learns (out, dinp and dweight). The products
take turns until SECONDS have passed; the shortest time of each counts.
*/
#include "llmc/ops/lora.h"    // lora_forward, lora_backward
#include "llmc/ops/matmul.h"  // matmul_forward, ...
#include "llmc/core/print.h"  // seconds_now

static const double SECONDS = 1.0;
typedef enum { FORWARD, INPUT, WEIGHT, LORA_FORWARD, LORA_BACKWARD, PRODUCTS } Product;

typedef struct {
    LoraShape s;
    float *inp, *dout, *out, *dinp, *weight, *dweight, *A, *B, *dA, *dB, *scratch;
} Layer;

static float* random_floats(size_t n, uint32_t state) {
    float* x = (float*)malloc_check(sizeof(float) * n, "bench");
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) / 16777216.0f - 0.5f;
    }
    return x;
}

static Layer layer_make(int N, int C, int OC, int r) {
    const LoraShape s = {N, C, OC, r, (size_t)OC, 1e-3f, {0.0f, 0, 0}, 0, {0, 0, 0}, 0};
    const size_t n_inp = (size_t)N * C, n_out = (size_t)N * OC, n_weight = (size_t)OC * C, n_A = (size_t)r * C,
                 n_B = (size_t)OC * r;
    Layer l = {s, random_floats(n_inp, 1), random_floats(n_out, 2), random_floats(n_out, 3), random_floats(n_inp, 4),
               random_floats(n_weight, 5), random_floats(n_weight, 6), NULL, NULL, NULL, NULL, NULL};
    l.A = random_floats(n_A, 7), l.dA = random_floats(n_A, 8);
    l.B = random_floats(n_B, 9), l.dB = random_floats(n_B, 10);
    l.scratch = random_floats(lora_scratch_elements(&s, 0), 11);
    return l;
}

static void layer_free(Layer* l) {
    free(l->inp), free(l->dout), free(l->out), free(l->dinp), free(l->weight), free(l->dweight);
    free(l->A), free(l->B), free(l->dA), free(l->dB), free(l->scratch);
}

// of one thread the time on the processor counts: other programs only ever make it longer
static double seconds(const Device* dev) {
    return seconds_now(dev->n_threads > 1 ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID);
}

static double seconds_of(const Layer* l, Product product, const Device* dev) {
    const LoraShape* s = &l->s;
    const double begin = seconds(dev);
    switch (product) {
        case FORWARD: matmul_forward(l->out, l->inp, l->weight, NULL, s->N, s->C, s->n_out, dev); break;
        case INPUT: matmul_backward_input(l->dinp, l->dout, l->weight, 0, s->N, s->C, s->n_out, dev); break;
        case WEIGHT: matmul_backward_weight(l->dweight, l->dout, l->inp, 0, s->N, s->C, s->n_out, dev); break;
        case LORA_FORWARD: lora_forward(l->out, l->inp, l->A, l->B, s, NULL, l->scratch, dev); break;
        default: lora_backward(l->dinp, l->dA, l->dB, l->dout, l->inp, l->A, l->B, s, NULL, l->scratch, dev);
    }
    return seconds(dev) - begin;
}

static void measure(int N, int C, int OC, int r, const Device* dev) {
    Layer l = layer_make(N, C, OC, r);
    double best[PRODUCTS] = {1e9, 1e9, 1e9, 1e9, 1e9};
    for (double spent = 0.0; spent < SECONDS;) {
        for (int p = 0; p < PRODUCTS; p++) {
            const double t = seconds_of(&l, (Product)p, dev);
            best[p] = t < best[p] ? t : best[p];
            spent += t;
        }
    }
    const double frozen = best[FORWARD] + best[INPUT], adapter = best[LORA_FORWARD] + best[LORA_BACKWARD];
    printf("%6d %6d %4d %10.2f %10.2f %10.2f %10.2f %9.1f%% %11.1f%%\n", C, OC, r, 1e3 * best[FORWARD],
           1e3 * best[LORA_FORWARD], 1e3 * best[INPUT], 1e3 * best[LORA_BACKWARD], 100.0 * adapter / frozen,
           100.0 * (frozen + adapter) / (frozen + best[WEIGHT]));
    layer_free(&l);
}

int main(int argc, char** argv) {
    static const int layers[][2] = {{1024, 1024}, {1024, 2048}, {2048, 1024}, {1024, 3072}, {3072, 1024}};
    static const int ranks[] = {8, 16, 64};
    const int n_threads = argc > 1 ? atoi(argv[1]) : 1, N = argc > 2 ? atoi(argv[2]) : 1024;
    Device dev;
    device_init(&dev, n_threads);
    printf("%d positions, %d threads, milliseconds\n%6s %6s %4s %10s %10s %10s %10s %10s %12s\n", N, dev.n_threads, "C",
           "OC", "r", "forward", "adapter", "dinp", "adapter", "adapter /", "LoRA / all");
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        for (size_t j = 0; j < sizeof ranks / sizeof *ranks; j++) {
            measure(N, layers[i][0], layers[i][1], ranks[j], &dev);
        }
    }
    device_free(&dev);
    return 0;
}
