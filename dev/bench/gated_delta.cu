/*
The gated delta rule by chunks (llmc/ops/gated_delta.h), forward and backward: one row of T positions, as many heads of
keys as of values.
    gated_delta [--rounds 10] [--threads 0] [--T 4096] [--heads 16] [--DK 128] [--DV 128] [--small]
A case is one line, the form of gpu_ops.cu: ours tab CASE tab MILLISECONDS tab BYTES tab FLOPS; the shortest of the
rounds. BYTES: every input read and every output written once. On the GPU in bf16, on a CPU in float:
    make build/nvcc-sm_90-bf16/bench/gated_delta, make $(make -s folder)/bench/gated_delta
*/
#include "llmc/core/floatx.h"  // floatX
#include "llmc/core/print.h"   // seconds_now
#include "llmc/core/rng.h"     // xorshift_float
#include "llmc/ops/gated_delta.h"

#ifdef __CUDACC__
typedef DeltaInputsOf<floatX> Inputs;
typedef DeltaGradientsOf<floatX> Gradients;
#else
typedef DeltaInputs Inputs;
typedef DeltaGradients Gradients;
#endif

static uint64_t rng = 1337;
static struct { void* p; size_t n_bytes; } arrays[16];
static int n_arrays;

static void* array(size_t n_bytes) {
    arrays[n_arrays].p = device_alloc(n_bytes, "array");
    arrays[n_arrays].n_bytes = n_bytes;
    return arrays[n_arrays++].p;
}

static float* floats(size_t n, float low, float high, const Device* dev) {
    float *x = (float*)malloc_check(sizeof(float) * n, "array"), *d = (float*)array(sizeof(float) * n);
    for (size_t i = 0; i < n; i++) { x[i] = low + (high - low) * xorshift_float(&rng); }
    device_upload(d, x, sizeof(float) * n, dev);
    device_sync(dev);
    free(x);
    return d;
}

static floatX* stored(size_t n, float low, float high, const Device* dev) {
    floatX *x = (floatX*)malloc_check(sizeof(floatX) * n, "array"), *d = (floatX*)array(sizeof(floatX) * n);
    for (size_t i = 0; i < n; i++) { x[i] = (floatX)(low + (high - low) * xorshift_float(&rng)); }
    device_upload(d, x, sizeof(floatX) * n, dev);
    device_sync(dev);
    free(x);
    return d;
}

static void report(const char* what, const DeltaShape* s, double seconds, double bytes, double flops) {
    printf("ours\tgated delta %s T %d heads %d DK %d DV %d\t%.6f\t%.0f\t%.0f\n", what, s->T, s->Hv, s->DK, s->DV,
           1e3 * seconds, bytes, flops);
}

static void measure(const DeltaShape* s, int rounds, Device* dev) {
    const size_t keys = (size_t)s->T * (size_t)s->Hk * (size_t)s->DK, gates = (size_t)s->T * (size_t)s->Hv,
                 values = gates * (size_t)s->DV, states = delta_states_floats(s);
    const float unit = 1.7f / sqrtf((float)s->DK);  // keys of about unit length
    const Inputs in = {stored(keys, -unit, unit, dev), stored(keys, -unit, unit, dev), stored(values, -1.0f, 1.0f, dev),
                       floats(gates, -0.2f, 0.0f, dev), floats(gates, 0.0f, 1.0f, dev)};
    const Gradients d = {stored(keys, 0, 0, dev), stored(keys, 0, 0, dev), stored(values, 0, 0, dev),
                         floats(gates, 0, 0, dev), floats(gates, 0, 0, dev)};
    floatX *o = stored(values, 0, 0, dev), *dout = stored(values, -1.0f, 1.0f, dev);
    float* S = floats(states, 0, 0, dev);
    double best[2] = {1e30, 1e30};
    for (int i = 0; i < rounds; i++) {
        const double start = seconds_now(CLOCK_MONOTONIC);
        delta_chunks_forward(o, S, NULL, in, s, dev);
        device_sync(dev);
        const double middle = seconds_now(CLOCK_MONOTONIC);
        delta_chunks_backward(d, NULL, (const floatX*)dout, S, in, s, dev);
        device_sync(dev);
        const double end = seconds_now(CLOCK_MONOTONIC);
        best[0] = middle - start < best[0] ? middle - start : best[0];
        best[1] = end - middle < best[1] ? end - middle : best[1];
    }
    const double C = DELTA_CHUNK, kv = (double)s->DK * s->DV, x = sizeof(floatX);
    const double forward = x * 2.0 * (double)(keys + values) + 4.0 * (2.0 * (double)gates + (double)states);
    report("forward", s, best[0], forward, (double)gates * (6.0 * kv + C * (4.0 * s->DK + 2.0 * s->DV)));
    report("backward", s, best[1], forward + x * (2.0 * (double)keys + (double)values) + 8.0 * (double)gates,
           (double)gates * (16.0 * kv + C * (7.0 * s->DK + 8.0 * s->DV)));
}

int main(int argc, char** argv) {
    int rounds = 10, threads = 0, T = 4096, heads = 16, DK = 128, DV = 128;
    const struct { const char* name; int* value; } options[] = {
        {"--rounds", &rounds}, {"--threads", &threads}, {"--T", &T}, {"--heads", &heads}, {"--DK", &DK}, {"--DV", &DV}};
    for (int i = 1; i < argc; i++) {
        int known = 0;
        if (strcmp(argv[i], "--small") == 0) { T = 200, heads = 2, DK = DV = 32, known = 1; }
        for (size_t j = 0; j < sizeof options / sizeof options[0] && i + 1 < argc && !known; j++) {
            if (strcmp(argv[i], options[j].name) == 0) { *options[j].value = atoi(argv[++i]), known = 1; }
        }
        if (!known) { fail_run("%s: expected --rounds, --threads, --T, --heads, --DK, --DV or --small", argv[i]); }
    }
    Device dev;
    device_choose(0);
    device_init(&dev, threads);
    const DeltaShape s = {1, T, heads, heads, DK, DV, NULL};
    measure(&s, rounds, &dev);
    while (n_arrays-- > 0) { device_release(arrays[n_arrays].p, arrays[n_arrays].n_bytes); }
    device_free(&dev);
    return 0;
}
