/*
The staircase of AdamW: parameters, moments and gradients of n elements, element by element. There is little to compute,
so each step is about the bytes that move; main checks every step against adamw_update_ref and, on a GPU, times it at
n = 124 million, all of GPT-2.

    step             what it changes                                                  bytes a parameter   on an H200
    1 three kernels  one for m, one for v, one for p: g, m and v are read twice                      40   not measured
    2 one kernel     everything is read once and written once                                        28   not measured
    3 packs          16 bytes a load: a quarter of the instructions. adamw_update                    28   not measured
    4 nearest        parameters stored as bf16, rounded to nearest. Wrong: a step below half         24   not measured
                     a last place, 2^-9 of the parameter, is lost, every time (main shows it)
    5 stochastic     rounded up or down at random, so that small steps count on average.             24   not measured
                     adamw_update_stored without a master
    6 master         float masters beside the bf16 parameters: no step is lost at all                30   not measured

Steps 3, 5 and 6 live in llmc/ops/adamw.h. The limit on an H200: 4.8 TB/s, 0.73 ms for 124 million parameters of 28
bytes.
    make build/nvcc-sm_90-bf16/cuda/adamw && build/nvcc-sm_90-bf16/cuda/adamw
    under dev/simt: only the checks
*/
#include "llmc/ops/adamw.h"  // adamw_update, adamw_update_stored, adamw_element_, adamw_update_ref
#include "llmc/test/test.h"  // random_array, to_device_as, check

typedef struct {
    size_t n;
    float *p, *m, *v, *g;
    __nv_bfloat16* stored;
} Parameters;

static const float WEIGHT_DECAY = 0.1f;
enum { BLOCK = 256 };

// ---- 1: as the formulas stand ----

__global__ void m_kernel(float* m, const float* g, size_t n, AdamW a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { m[i] = a.beta1 * m[i] + (1.0f - a.beta1) * (g[i] * a.grad_scale); }
}

__global__ void v_kernel(float* v, const float* g, size_t n, AdamW a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    const float grad = g[i] * a.grad_scale;
    v[i] = a.beta2 * v[i] + (1.0f - a.beta2) * grad * grad;
}

__global__ void p_kernel(float* p, const float* m, const float* v, size_t n, float weight_decay, AdamW a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        p[i] -= a.lr * ((m[i] / a.correction1) / (sqrtf(v[i] / a.correction2) + a.eps) + weight_decay * p[i]);
    }
}

static void three_kernels(const Parameters* x, const AdamW* a, uint32_t, const Device* dev) {
    const unsigned grid = (unsigned)ceil_div((int64_t)x->n, BLOCK);
    m_kernel<<<grid, BLOCK, 0, dev->stream>>>(x->m, x->g, x->n, *a);
    v_kernel<<<grid, BLOCK, 0, dev->stream>>>(x->v, x->g, x->n, *a);
    p_kernel<<<grid, BLOCK, 0, dev->stream>>>(x->p, x->m, x->v, x->n, WEIGHT_DECAY, *a);
}

// ---- 2: one kernel, one element a thread ----

__global__ void one_kernel_kernel(float* p, float* m, float* v, const float* g, size_t n, float weight_decay, AdamW a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { p[i] = adamw_element_(p[i], m + i, v + i, g[i], weight_decay, a); }
}

static void one_kernel(const Parameters* x, const AdamW* a, uint32_t, const Device* dev) {
    const unsigned grid = (unsigned)ceil_div((int64_t)x->n, BLOCK);
    one_kernel_kernel<<<grid, BLOCK, 0, dev->stream>>>(x->p, x->m, x->v, x->g, x->n, WEIGHT_DECAY, *a);
}

// ---- 3: packs ----

static void packs(const Parameters* x, const AdamW* a, uint32_t, const Device* dev) {
    adamw_update(x->p, x->m, x->v, x->g, x->n, WEIGHT_DECAY, a, dev);
}

// ---- 4: bf16, to nearest. n is a multiple of 4 ----

__global__ void nearest_kernel(__nv_bfloat16* stored, float* m, float* v, const float* g, size_t n, float weight_decay,
                               AdamW a) {
    const size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) { return; }
    Pack<__nv_bfloat16, 4> s = pack_load<4>(stored + i);
    Pack<float, 4> m_pack = pack_load<4>(m + i), v_pack = pack_load<4>(v + i), g_pack = pack_load<4>(g + i);
    for (int k = 0; k < 4; k++) {
        s.x[k] = from_float<__nv_bfloat16>(
            adamw_element_(to_float(s.x[k]), &m_pack.x[k], &v_pack.x[k], g_pack.x[k], weight_decay, a));
    }
    pack_store(m + i, m_pack);
    pack_store(v + i, v_pack);
    pack_store(stored + i, s);
}

static void nearest(const Parameters* x, const AdamW* a, uint32_t, const Device* dev) {
    const unsigned grid = (unsigned)ceil_div((int64_t)x->n / 4, BLOCK);
    nearest_kernel<<<grid, BLOCK, 0, dev->stream>>>(x->stored, x->m, x->v, x->g, x->n, WEIGHT_DECAY, *a);
}

// ---- 5 and 6: bf16, stochastically, without masters and with them ----

static void stochastic(const Parameters* x, const AdamW* a, uint32_t noise_key, const Device* dev) {
    adamw_update_stored(x->stored, (float*)NULL, x->m, x->v, x->g, x->n, WEIGHT_DECAY, a, noise_key, numbers_from(0), dev);
}

static void master(const Parameters* x, const AdamW* a, uint32_t noise_key, const Device* dev) {
    adamw_update_stored(x->stored, x->p, x->m, x->v, x->g, x->n, WEIGHT_DECAY, a, noise_key, numbers_from(0), dev);
}

// ---- check and time ----

typedef struct {
    const char* name;
    void (*run)(const Parameters* x, const AdamW* a, uint32_t noise_key, const Device* dev);
    int bf16;     // what comes out is `stored`
    int n_bytes;  // that a parameter moves
    double mean;  // of 20 steps of 1e-4 from 1, on average
} Step;

static const double ALL_STEPS = 1.0 - 20 * (1e-4 + 1e-4 * 0.1);  // with the decay, 0.1 of the parameter times lr
static const Step steps[] = {
    {"1 three kernels", three_kernels, 0, 40, ALL_STEPS},
    {"2 one kernel", one_kernel, 0, 28, ALL_STEPS},
    {"3 packs", packs, 0, 28, ALL_STEPS},
    {"4 nearest", nearest, 1, 24, 1.0},
    {"5 stochastic", stochastic, 1, 24, ALL_STEPS},
    {"6 master", master, 1, 30, ALL_STEPS},
};
enum { N_STEPS = sizeof steps / sizeof *steps };

static Parameters parameters(const float* p, const float* m, const float* v, const float* g, size_t n,
                             const Device* dev) {
    Parameters x = {n, to_device(p, n, dev), to_device(m, n, dev), to_device(v, n, dev), to_device(g, n, dev),
                    to_device_as<__nv_bfloat16>(p, n, dev)};
    return x;
}

// what the step made of the parameters; all memory is given back
static void parameters_back(float* p, const Step* step, Parameters* x, const Device* dev) {
    device_drop(x->m), device_drop(x->v), device_drop(x->g);
    if (step->bf16) { from_device_as(p, x->stored, x->n, dev), device_drop(x->p); }
    if (!step->bf16) { from_device(p, x->p, x->n, dev), device_drop(x->stored); }
}

// one update against the plain loop
static void check_update(Test* t, const Step* step, size_t n, const Device* dev) {
    float *p = random_array(n, 1.0f, 1), *m = random_array(n, 0.1f, 2), *v = random_array(n, 0.1f, 3),
          *g = random_array(n, 0.5f, 4);
    for (size_t i = 0; i < n; i++) { p[i] = (float)(__nv_bfloat16)p[i], v[i] = fabsf(v[i]); }
    AdamW a = adamw_step(1e-3f, 0.9f, 0.95f, 1e-8f, 0.5f, 3);
    Parameters x = parameters(p, m, v, g, n, dev);
    float* got = filled_array(n, NAN);
    step->run(&x, &a, 1, dev);
    cudaCheck(cudaGetLastError());
    adamw_update_ref(p, m, v, g, n, WEIGHT_DECAY, &a);
    parameters_back(got, step, &x, dev);
    for (size_t i = 0; i < n; i++) {
        // a float rounds once, and a step is below 0.1 with fewer than 20 roundings; a bf16 moves to a neighbour, 2^-7
        // of it away
        double allowed = 0x1p-24 + 0.1 * 20 * 0x1p-24 + (step->bf16 ? 0x1p-7 * fabs((double)p[i]) : 0.0);
        check(t, fabs((double)got[i] - (double)p[i]) <= allowed, "%s: [%zu] found %.9g, expected %.9g", step->name, i,
              (double)got[i], (double)p[i]);
    }
    free(p), free(m), free(v), free(g), free(got);
}

// steps far below the last place of a bf16
static void check_small_steps(Test* t, const Step* step, const Device* dev) {
    enum { N = 4096 };
    float *ones = filled_array(N, 1.0f), *zeros = filled_array(N, 0.0f);
    Parameters x = parameters(ones, zeros, zeros, ones, N, dev);
    for (int i = 1; i <= 20; i++) {
        AdamW a = adamw_step(1e-4f, 0.9f, 0.999f, 1e-8f, 1.0f, i);
        step->run(&x, &a, noise_key_of(1, (uint64_t)i, 0), dev);
    }
    parameters_back(ones, step, &x, dev);
    double mean = 0.0;
    for (int i = 0; i < N; i++) { mean += (double)ones[i] / N; }
    // 20 roundings that go up once in 36 times, over 2^-8, averaged over N; and the decay of a parameter that shrinks
    // itself
    double allowed = 5.0 * sqrt(20.0 / 36.0 / N) * 0x1p-8 + 1e-6;
    check(t, fabs(mean - step->mean) < allowed, "%s: 20 steps of 1e-4 lead from 1 to %.6f, expected %.6f", step->name,
          mean, step->mean);
    free(ones), free(zeros);
}

#ifndef SIMT
static void time_steps(size_t n, const Device* dev) {
    const int n_runs = 20;
    Parameters x = {n,
                    (float*)device_alloc(sizeof(float) * n, "p"),
                    (float*)device_alloc(sizeof(float) * n, "m"),
                    (float*)device_alloc(sizeof(float) * n, "v"),
                    (float*)device_alloc(sizeof(float) * n, "g"),
                    (__nv_bfloat16*)device_alloc(sizeof(__nv_bfloat16) * n, "stored")};
    AdamW a = adamw_step(1e-3f, 0.9f, 0.95f, 1e-8f, 0.5f, 3);
    for (int s = 0; s < N_STEPS; s++) {
        const double ms = device_milliseconds(n_runs, dev, [&]() { steps[s].run(&x, &a, 1, dev); });
        printf("%-16s %8.3f ms %7.0f GB/s\n", steps[s].name, ms, 1e-6 * (double)n * steps[s].n_bytes / ms);
    }
    device_drop(x.p), device_drop(x.m), device_drop(x.v), device_drop(x.g), device_drop(x.stored);
}
#endif

int main(void) {
    Test t = {0, NULL};
    Device dev;
    device_choose(0);
    device_init(&dev, 0);
    for (int s = 0; s < N_STEPS; s++) {
        check_update(&t, &steps[s], 10004, &dev);
        check_small_steps(&t, &steps[s], &dev);
    }
    printf("%d steps, %d wrong\n", N_STEPS, t.n_failures);
#ifndef SIMT
    if (!t.n_failures) { time_steps(124475904, &dev); }
#endif
    device_free(&dev);
    return t.n_failures > 0;
}
