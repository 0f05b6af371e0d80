/*
The staircase of LayerNorm: bf16 rows, float sums. Each step changes one thing; main checks every step against the plain
loops of llmc/ops/layernorm.h and, on a GPU, times it at N 65536, C 768: 64 rows of 1024 tokens of GPT-2, 50 million
elements.

    forward       what it changes                                                          bytes an element   on an H200
    1 rows        one thread has one row: neighbouring threads read addresses that are a row          8   not measured
                  apart, so each load of a warp asks for 32 lines
    2 blocks      256 threads have one row and read neighbouring channels; sums go through            4   not measured
                  shared memory, and the block waits for each of them 9 times
    3 warps       32 lanes have one row: sums go through registers, nobody waits                      4   not measured
    4 packs       a lane loads 16 bytes at a time: an eighth of the load instructions                 4   not measured
    5 registers   the row stays in registers between the three passes; C must be known when           4   not measured
                  this is compiled
    6 kept        it stays in shared memory, for any C. Lives in llmc/ops/layernorm.h                 4   0.061 ms,
                                                                                                          3.3 TB/s
    7 two ops     left + right, then step 6: the sum is written, and read again                      10   not measured
    8 fused       both in one kernel. Lives in llmc/ops/layernorm.h                                   8   0.103 ms,
                                                                                                          3.9 TB/s

    backward
    1 rows        one thread has a row for dinp, then one thread a channel for dweight, dbias        12   not measured
    2 two passes  a warp has a row; for dweight and dbias the rows are cut into parts. It lives      12   not measured
                  in llmc/ops/layernorm.h for exact builds and rows too long for step 3
    3 one pass    a thread stays on its 24 channels while its block walks down the rows: inp and       8   0.100 ms,
                  dout are read once, and come while the rows before them are worked on. Lives in          4.0 TB/s
                  llmc/ops/layernorm.h

Bytes are those that memory itself must move when a row that was just read is still in a cache. The limit on an H200:
4.8 TB/s, 0.042 ms for 50 million elements of 4 bytes; a copy reaches 4.2. Times are of 2026-11-28, backward with dright.
    make build/nvcc-sm_90-bf16/cuda/layernorm && build/nvcc-sm_90-bf16/cuda/layernorm
    under dev/simt: only the checks
*/
#include "llmc/ops/layernorm.h"  // layernorm_forward, residual_layernorm_forward, layernorm_backward, the plain loops
#include "llmc/test/test.h"      // random_array, to_device_as, check, rounding_walk

// on the device; what a step writes: out, residual, mean, rstd or dinp, dweight, dbias
typedef struct {
    int N, C;
    bf16 *left, *right, *weight, *bias, *dout, *residual, *out, *dinp;
    float *mean, *rstd, *dweight, *dbias;
} LayerNorm;

// ---- forward 1: one thread, one row. The C loop as it stands ----

__global__ void rows_kernel(bf16* out, float* mean, float* rstd, const bf16* inp, const bf16* weight, const bf16* bias,
                            int N, int C) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    const bf16* x = inp + (size_t)n * C;
    float sum = 0.0f, sum2 = 0.0f;
    for (int c = 0; c < C; c++) { sum += to_float(x[c]); }
    float m = sum / (float)C;
    for (int c = 0; c < C; c++) { sum2 += (to_float(x[c]) - m) * (to_float(x[c]) - m); }
    float s = 1.0f / sqrtf(sum2 / (float)C + LAYERNORM_EPS);
    for (int c = 0; c < C; c++) {
        out[(size_t)n * C + c] = from_float<bf16>(s * (to_float(x[c]) - m) * to_float(weight[c]) + to_float(bias[c]));
    }
    mean[n] = m;
    rstd[n] = s;
}

static void rows(const LayerNorm* l, const Device* dev) {
    rows_kernel<<<(unsigned)ceil_div(l->N, 128), 128, 0, dev->stream>>>(l->out, l->mean, l->rstd, l->left, l->weight,
                                                                        l->bias, l->N, l->C);
}

// ---- forward 2: one block, one row ----

enum { BLOCK = 256 };

// the sum of x over the block, the same in all threads: half of them add what the other half has, and so on
__device__ inline float block_sum(float x, float* sums) {
    sums[threadIdx.x] = x;
    for (int step = BLOCK / 2; step > 0; step /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < step) { sums[threadIdx.x] += sums[threadIdx.x + step]; }
    }
    __syncthreads();
    return sums[0];
}

__global__ void blocks_kernel(bf16* out, float* mean, float* rstd, const bf16* inp, const bf16* weight,
                              const bf16* bias, int C) {
    __shared__ float sums[BLOCK];
    __shared__ float squares[BLOCK];  // its own: some threads may still read the first sum
    const int n = blockIdx.x;
    const bf16* x = inp + (size_t)n * C;
    float sum = 0.0f, sum2 = 0.0f;
    for (int c = threadIdx.x; c < C; c += BLOCK) { sum += to_float(x[c]); }
    float m = block_sum(sum, sums) / (float)C;
    for (int c = threadIdx.x; c < C; c += BLOCK) { sum2 += (to_float(x[c]) - m) * (to_float(x[c]) - m); }
    float s = 1.0f / sqrtf(block_sum(sum2, squares) / (float)C + LAYERNORM_EPS);
    for (int c = threadIdx.x; c < C; c += BLOCK) {
        out[(size_t)n * C + c] = from_float<bf16>(s * (to_float(x[c]) - m) * to_float(weight[c]) + to_float(bias[c]));
    }
    if (threadIdx.x == 0) {
        mean[n] = m;
        rstd[n] = s;
    }
}

static void blocks(const LayerNorm* l, const Device* dev) {
    blocks_kernel<<<l->N, BLOCK, 0, dev->stream>>>(l->out, l->mean, l->rstd, l->left, l->weight, l->bias, l->C);
}

// ---- forward 3 and 4: one warp, one row; 1 or 8 channels at a time ----

// block is (32, 8)
template <int W>
__global__ void warps_kernel(bf16* out, float* mean, float* rstd, const bf16* inp, const bf16* weight, const bf16* bias,
                             int N, int C) {
    int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x * W;
    if (n >= N) { return; }
    const bf16* row = inp + (size_t)n * C;
    float sum = 0.0f, sum2 = 0.0f;
    for (int c = lane; c < C; c += WARP * W) {
        Pack<float, W> x = load_floats<W>(row + c);
        for (int i = 0; i < W; i++) { sum += x.x[i]; }
    }
    float m = lane_sum(sum) / (float)C;
    for (int c = lane; c < C; c += WARP * W) {
        Pack<float, W> x = load_floats<W>(row + c);
        for (int i = 0; i < W; i++) { sum2 += (x.x[i] - m) * (x.x[i] - m); }
    }
    float s = 1.0f / sqrtf(lane_sum(sum2) / (float)C + LAYERNORM_EPS);
    for (int c = lane; c < C; c += WARP * W) {
        Pack<float, W> x = load_floats<W>(row + c), w = load_floats<W>(weight + c), b = load_floats<W>(bias + c);
        for (int i = 0; i < W; i++) { x.x[i] = s * (x.x[i] - m) * w.x[i] + b.x[i]; }
        store_floats(out + (size_t)n * C + c, x);
    }
    if (threadIdx.x == 0) {
        mean[n] = m;
        rstd[n] = s;
    }
}

template <int W>
static void warps(const LayerNorm* l, const Device* dev) {
    dim3 block(WARP, 8);
    warps_kernel<W><<<(unsigned)ceil_div(l->N, 8), block, 0, dev->stream>>>(l->out, l->mean, l->rstd, l->left,
                                                                            l->weight, l->bias, l->N, l->C);
}

// ---- forward 5: PACKS packs of 8 channels in the registers of a lane ----

// block is (32, 8), C is 256 * PACKS
template <int PACKS>
__global__ void registers_kernel(bf16* out, float* mean, float* rstd, const bf16* inp, const bf16* weight,
                                 const bf16* bias, int N) {
    const int W = 8, C = PACKS * WARP * W;
    int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x * W;
    if (n >= N) { return; }
    Pack<float, W> x[PACKS];
    float sum = 0.0f, sum2 = 0.0f;
    for (int p = 0; p < PACKS; p++) { x[p] = load_floats<W>(inp + (size_t)n * C + lane + p * WARP * W); }
    for (int p = 0; p < PACKS; p++) {
        for (int i = 0; i < W; i++) { sum += x[p].x[i]; }
    }
    float m = lane_sum(sum) / (float)C;
    for (int p = 0; p < PACKS; p++) {
        for (int i = 0; i < W; i++) { sum2 += (x[p].x[i] - m) * (x[p].x[i] - m); }
    }
    float s = 1.0f / sqrtf(lane_sum(sum2) / (float)C + LAYERNORM_EPS);
    for (int p = 0; p < PACKS; p++) {
        int c = lane + p * WARP * W;
        Pack<float, W> w = load_floats<W>(weight + c), b = load_floats<W>(bias + c);
        for (int i = 0; i < W; i++) { x[p].x[i] = s * (x[p].x[i] - m) * w.x[i] + b.x[i]; }
        store_floats(out + (size_t)n * C + c, x[p]);
    }
    if (threadIdx.x == 0) {
        mean[n] = m;
        rstd[n] = s;
    }
}

static void registers(const LayerNorm* l, const Device* dev) {
    dim3 block(WARP, 8);
    registers_kernel<3><<<(unsigned)ceil_div(l->N, 8), block, 0, dev->stream>>>(l->out, l->mean, l->rstd, l->left,
                                                                                l->weight, l->bias, l->N);
}

// ---- forward 6 to 8: llmc/ops/layernorm.h ----

static void kept(const LayerNorm* l, const Device* dev) {
    layernorm_forward(l->out, l->mean, l->rstd, l->left, l->weight, l->bias, LAYERNORM_EPS, l->N, l->C, dev);
}

static void two_ops(const LayerNorm* l, const Device* dev) {
    residual_forward(l->residual, l->left, l->right, (size_t)l->N * l->C, dev);
    layernorm_forward(l->out, l->mean, l->rstd, l->residual, l->weight, l->bias, LAYERNORM_EPS, l->N, l->C, dev);
}

static void fused(const LayerNorm* l, const Device* dev) {
    residual_layernorm_forward(l->residual, l->out, l->mean, l->rstd, l->left, l->right, l->weight, l->bias, LAYERNORM_EPS, l->N, l->C,
                               dev);
}

// ---- backward 1: a thread has a row, then a thread has a channel ----

__global__ void backward_rows_kernel(bf16* dinp, const bf16* dout, const bf16* inp, const bf16* weight,
                                     const float* mean, const float* rstd, int N, int C) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    const bf16 *x = inp + (size_t)n * C, *d = dout + (size_t)n * C;
    float m = mean[n], s = rstd[n], sum_g = 0.0f, sum_gx = 0.0f;
    for (int c = 0; c < C; c++) {
        float g = to_float(weight[c]) * to_float(d[c]);
        sum_g += g;
        sum_gx += g * ((to_float(x[c]) - m) * s);
    }
    for (int c = 0; c < C; c++) {
        float g = to_float(weight[c]) * to_float(d[c]), xhat = (to_float(x[c]) - m) * s;
        bf16* to = dinp + (size_t)n * C + c;
        *to = from_float<bf16>(to_float(*to) + (g - sum_g / (float)C - xhat * (sum_gx / (float)C)) * s);
    }
}

__global__ void backward_channels_kernel(float* dweight, float* dbias, const bf16* dout, const bf16* inp,
                                         const float* mean, const float* rstd, int N, int C) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) { return; }
    float sum_weight = 0.0f, sum_bias = 0.0f;
    for (int n = 0; n < N; n++) {
        float d = to_float(dout[(size_t)n * C + c]);
        sum_weight += (to_float(inp[(size_t)n * C + c]) - mean[n]) * rstd[n] * d;
        sum_bias += d;
    }
    dweight[c] = sum_weight;
    dbias[c] = sum_bias;
}

static void backward_rows(const LayerNorm* l, const Device* dev) {
    backward_rows_kernel<<<(unsigned)ceil_div(l->N, 128), 128, 0, dev->stream>>>(l->dinp, l->dout, l->left, l->weight,
                                                                                 l->mean, l->rstd, l->N, l->C);
    backward_channels_kernel<<<(unsigned)ceil_div(l->C, 32), 32, 0, dev->stream>>>(l->dweight, l->dbias, l->dout,
                                                                                   l->left, l->mean, l->rstd, l->N,
                                                                                   l->C);
}

// ---- backward 2 and 3: llmc/ops/layernorm.h ----

static void two_passes(const LayerNorm* l, const Device* dev) {
    layernorm_backward_two_passes_<8>(l->dinp, l->dweight, l->dbias, NULL, l->dout, l->left, l->weight, l->mean,
                                      l->rstd, l->N, l->C, dev);
}

static void one_pass(const LayerNorm* l, const Device* dev) {
    layernorm_backward(l->dinp, l->dweight, l->dbias, l->dout, l->left, l->weight, l->mean, l->rstd, l->N, l->C, dev);
}

// ---- check and time ----

typedef struct {
    const char* name;
    void (*run)(const LayerNorm* l, const Device* dev);
    int residual, backward, n_bytes;  // adds right; goes backward; bytes an element
} Step;

static const Step steps[] = {
    {"1 rows", rows, 0, 0, 4}, {"2 blocks", blocks, 0, 0, 4},
    {"3 warps", warps<1>, 0, 0, 4}, {"4 packs", warps<8>, 0, 0, 4},
    {"5 registers", registers, 0, 0, 4}, {"6 kept", kept, 0, 0, 4},
    {"7 two ops", two_ops, 1, 0, 8}, {"8 fused", fused, 1, 0, 8},
    {"1 backward, rows", backward_rows, 0, 1, 8}, {"2 two passes", two_passes, 0, 1, 8},
    {"3 one pass", one_pass, 0, 1, 8},
};
enum { N_STEPS = sizeof steps / sizeof *steps };

// the same numbers on both sides: rounded to bf16 in place, then copied
static bf16* to_bf16(float* x, size_t n, const Device* dev) {
    for (size_t i = 0; i < n; i++) { x[i] = (float)(bf16)x[i]; }
    return to_device_as<bf16>(x, n, dev);
}

// |got - want| <= tolerance + 2^-8 |want|: the last is the rounding to bf16
static void check_bf16(Test* t, const char* what, bf16* d, const float* want, size_t n, double tolerance,
                       const Device* dev) {
    float* got = filled_array(n, NAN);
    from_device_as(got, d, n, dev);
    for (size_t i = 0; i < n; i++) {
        double apart = fabs((double)got[i] - (double)want[i]), allowed = tolerance + 0x1p-8 * fabs((double)want[i]);
        check(t, apart <= allowed, "%s: [%zu] found %.9g, expected %.9g", what, i, (double)got[i], (double)want[i]);
    }
    free(got);
}

static void check_sums(Test* t, const char* what, float* d, const float* want, size_t n, double tolerance,
                       const Device* dev) {
    float* got = filled_array(n, NAN);
    double* exact = double_array(want, n);
    from_device(got, d, n, dev);
    check_close(t, what, got, exact, n, tolerance);
    free(got), free(exact);
}

// one step against the plain loop
static void check_step(Test* t, const Step* step, int N, int C, const Device* dev) {
    size_t n = (size_t)N * (size_t)C, channels = (size_t)C, n_rows = (size_t)N;
    float *left = random_array(n, 2.0f, 1), *right = random_array(n, 1.0f, 2),
          *weight = random_array(channels, 1.5f, 3), *bias = random_array(channels, 1.0f, 4),
          *dout = random_array(n, 1.0f, 5), *dinp = random_array(n, 1.0f, 6), *out = filled_array(n, 0.0f),
          *mean = filled_array(n_rows, 0.0f), *rstd = filled_array(n_rows, 0.0f),
          *dweight = filled_array(channels, 0.0f), *dbias = filled_array(channels, 0.0f);
    LayerNorm l = {N,
                   C,
                   to_bf16(left, n, dev),
                   to_bf16(right, n, dev),
                   to_bf16(weight, channels, dev),
                   to_bf16(bias, channels, dev),
                   to_bf16(dout, n, dev),
                   to_bf16(out, n, dev),
                   to_bf16(out, n, dev),
                   to_bf16(dinp, n, dev),
                   NULL,
                   NULL,
                   to_device(dweight, channels, dev),
                   to_device(dbias, channels, dev)};
    for (size_t i = 0; step->residual && i < n; i++) { left[i] = (float)(bf16)(left[i] + right[i]); }
    layernorm_forward_ref(out, mean, rstd, left, weight, bias, LAYERNORM_EPS, N, C);
    l.mean = to_device(mean, n_rows, dev), l.rstd = to_device(rstd, n_rows, dev);
    step->run(&l, dev);
    cudaCheck(cudaGetLastError());
    // sums of C terms in another order are off by this walk; rstd < 3 and xhat < 12 multiply it (test_layernorm.c has
    // it in full)
    double tolerance = 128.0 * rounding_walk(C, 9.0 * C) / C;
    if (step->backward) {
        layernorm_backward_ref(dinp, dweight, dbias, dout, left, weight, mean, rstd, N, C);
        check_bf16(t, step->name, l.dinp, dinp, n, tolerance, dev), device_drop(l.out);
        check_sums(t, step->name, l.dweight, dweight, channels, 4.0 * rounding_walk(N, 12.0 * N), dev);
        check_sums(t, step->name, l.dbias, dbias, channels, 2.0 * rounding_walk(N, 1.0 * N), dev);
    } else {
        check_bf16(t, step->name, l.out, out, n, tolerance, dev);
        device_drop(l.dinp), device_drop(l.dweight), device_drop(l.dbias);
    }
    device_drop(l.left), device_drop(l.right), device_drop(l.weight), device_drop(l.bias), device_drop(l.dout),
        device_drop(l.residual);
    device_drop(l.mean), device_drop(l.rstd);
    free(left), free(right), free(weight), free(bias), free(dout), free(dinp), free(out), free(mean), free(rstd),
        free(dweight), free(dbias);
}

#ifndef SIMT
static void time_steps(int N, int C, const Device* dev) {
    const int n_runs = 50;
    size_t n = (size_t)N * (size_t)C;
    bf16* arrays[8];
    float* sums[4];
    for (int i = 0; i < 8; i++) { arrays[i] = (bf16*)device_alloc(sizeof(bf16) * n, "arrays"); }
    for (int i = 0; i < 4; i++) { sums[i] = (float*)device_alloc(sizeof(float) * (size_t)(N > C ? N : C), "sums"); }
    LayerNorm l = {N,         C,         arrays[0], arrays[1], arrays[2], arrays[3], arrays[4],
                   arrays[5], arrays[6], arrays[7], sums[0],   sums[1],   sums[2],   sums[3]};
    for (int s = 0; s < N_STEPS; s++) {
        const double ms = device_milliseconds(n_runs, dev, [&]() { steps[s].run(&l, dev); });
        printf("%-16s %8.3f ms %7.0f GB/s of what it must move\n", steps[s].name, ms,
               1e-6 * steps[s].n_bytes * (double)n / ms);
    }
    for (int i = 0; i < 8; i++) { device_drop(arrays[i]); }
    for (int i = 0; i < 4; i++) { device_drop(sums[i]); }
}
#endif

int main(void) {
    Test t = {0, NULL};
    Device dev;
    device_choose(0);
    device_init(&dev, 0);
    for (int s = 0; s < N_STEPS; s++) {
        check_step(&t, &steps[s], 1, 768, &dev);
        check_step(&t, &steps[s], 9, 768, &dev);
    }
    printf("%d steps, %d wrong\n", N_STEPS, t.n_failures);
#ifndef SIMT
    if (!t.n_failures) { time_steps(65536, 768, &dev); }
#endif
    device_free(&dev);
    return t.n_failures > 0;
}
