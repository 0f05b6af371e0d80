/*
The staircase of the classifier: logits (N, Vp) become dlogits in place, and each row's loss is written. Each step
changes one thing; main checks every step against crossentropy_fused_ref and, on a GPU, times it at N 8192, V 50257, Vp
50304: 8 rows of 1024 tokens of GPT-2, 412 million logits.

    step      what it changes                                                            bytes a logit   on an H200
    1 rows    one thread has one row: a warp's load asks for 32 lines, a row apart, and 8192          16   not measured
              threads wait for memory one float at a time
    2 warps   one warp has one row and reads neighbouring columns                                     16   not measured
    3 blocks  1024 threads have one row: so few rows are in work that L2 holds nearly all of           8   not measured
              them, and only the first of three passes reads from memory
    4 online  maximum and sum in one pass: two passes instead of three                                 8   not measured
    5 bf16    half the bytes, and all rows in work fit in L2                                           4   not measured
    6 packs   16 bytes a load, 8 columns for one maximum                                               4   not measured
    7 kept    all of the row sets out for shared memory at once: loads wait for nothing, and the       4   0.420 ms,
              second pass does not even ask L2. It needs 100 KB a block: two fit on a                      3.9 TB/s
              multiprocessor of an H100, one on an A100's. Lives in llmc/ops/crossentropy.h

Bytes are those that memory itself moves. The limit on an H200: 4.8 TB/s, 0.34 ms for 412 million logits of 4 bytes. Two
exponentials a logit, 16 a clock and multiprocessor, take two thirds of that: they must overlap with the loads. A copy
reaches 4.2 TB/s. Times are of 2026-11-28.
    make build/nvcc-sm_90-bf16/cuda/crossentropy && build/nvcc-sm_90-bf16/cuda/crossentropy
    under dev/simt: only the checks
*/
#include "llmc/ops/crossentropy.h"  // crossentropy_fused, crossentropy_fused_ref
#include "llmc/test/test.h"         // filled_array, to_device_as, check

typedef struct {
    int N, V, Vp;
    float dloss, *losses, *logits;
    __nv_bfloat16* logits_bf16;
    int* targets;
} Classifier;

enum { BLOCK = 1024 };

// ---- 1: one thread, one row. The C loop as it stands ----

__global__ void rows_kernel(float* losses, float* logits, const int* targets, float dloss, int N, int V, int Vp) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    float *x = logits + (size_t)n * Vp, max = -10000.0f, sum = 0.0f;
    for (int v = 0; v < V; v++) { max = fmaxf(max, x[v]); }
    for (int v = 0; v < V; v++) { sum += kernel_exp(x[v] - max); }
    losses[n] = -fm_log(kernel_exp(x[targets[n]] - max) / sum);
    for (int v = 0; v < Vp; v++) {
        x[v] = v < V ? (kernel_exp(x[v] - max) / sum - (v == targets[n] ? 1.0f : 0.0f)) * dloss : 0.0f;
    }
}

static void rows(const Classifier* c, const Device* dev) {
    const unsigned grid = (unsigned)ceil_div(c->N, 128);
    rows_kernel<<<grid, 128, 0, dev->stream>>>(c->losses, c->logits, c->targets, c->dloss, c->N, c->V, c->Vp);
}

// ---- 2: one warp, one row. 132 multiprocessors with 64 warps each have 8448 rows in work, 1.7 GB, and every pass
//      reads them from memory ----

// block is (32, 8)
__global__ void warps_kernel(float* losses, float* logits, const int* targets, float dloss, int N, int V, int Vp) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
    if (n >= N) { return; }  // a warp leaves whole
    float *x = logits + (size_t)n * Vp, max = -10000.0f, sum = 0.0f;
    for (int v = lane; v < V; v += WARP) { max = fmaxf(max, x[v]); }
    max = row_max(max);
    for (int v = lane; v < V; v += WARP) { sum += kernel_exp(x[v] - max); }
    sum = lane_sum(sum);
    if (lane == 0) { losses[n] = -fm_log(kernel_exp(x[targets[n]] - max) / sum); }
    __syncwarp();  // the target's logit has been read
    for (int v = lane; v < Vp; v += WARP) {
        x[v] = v < V ? (kernel_exp(x[v] - max) / sum - (v == targets[n] ? 1.0f : 0.0f)) * dloss : 0.0f;
    }
}

static void warps(const Classifier* c, const Device* dev) {
    dim3 grid((unsigned)ceil_div(c->N, 8)), block(WARP, 8);
    warps_kernel<<<grid, block, 0, dev->stream>>>(c->losses, c->logits, c->targets, c->dloss, c->N, c->V, c->Vp);
}

// ---- 3: one block, one row. Two blocks on each multiprocessor: 264 rows, 53 MB as float, 26 MB as bf16; L2 has 50
//      MB ----

// over the block, for every thread. Block is (BLOCK); a second call waits until the first has been read by all
__device__ static float block_max(float x) {
    __shared__ float of_warp[WARP];
    x = row_max(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) { of_warp[threadIdx.x / WARP] = x; }
    __syncthreads();
    return row_max(of_warp[threadIdx.x % WARP]);
}

__device__ static float block_sum(float x) {
    __shared__ float of_warp[WARP];
    x = lane_sum(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) { of_warp[threadIdx.x / WARP] = x; }
    __syncthreads();
    return lane_sum(of_warp[threadIdx.x % WARP]);
}

// the last pass of steps 3 to 5
template <typename X>
__device__ static void write_gradient(X* x, float max, float sum, int target, float dloss, int V, int Vp) {
    const float scale = 1.0f / sum;
    for (int v = threadIdx.x; v < Vp; v += BLOCK) {
        const float p = v < V ? kernel_exp(to_float(x[v]) - max) * scale : 0.0f;
        x[v] = from_float<X>((p - (v == target ? 1.0f : 0.0f)) * dloss);
    }
}

// block is (BLOCK)
__global__ void blocks_kernel(float* losses, float* logits, const int* targets, float dloss, int V, int Vp) {
    const int n = gridDim.x - 1 - blockIdx.x, target = targets[n];
    float *x = logits + (size_t)n * Vp, max = -10000.0f, sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += BLOCK) { max = fmaxf(max, x[v]); }
    max = block_max(max);
    for (int v = threadIdx.x; v < V; v += BLOCK) { sum += kernel_exp(x[v] - max); }
    sum = block_sum(sum);
    if (threadIdx.x == 0) { losses[n] = -fm_log(kernel_exp(x[target] - max) / sum); }
    __syncthreads();  // the target's logit has been read
    write_gradient(x, max, sum, target, dloss, V, Vp);
}

static void blocks(const Classifier* c, const Device* dev) {
    blocks_kernel<<<c->N, BLOCK, 0, dev->stream>>>(c->losses, c->logits, c->targets, c->dloss, c->V, c->Vp);
}

// ---- 4 and 5: the sum follows the maximum found so far, and shrinks when that grows: s exp(old - new). X: float, then
//      bf16 ----

// block is (BLOCK)
template <typename X>
__global__ void online_kernel(float* losses, X* logits, const int* targets, float dloss, int V, int Vp) {
    const int n = gridDim.x - 1 - blockIdx.x, target = targets[n];
    X* x = logits + (size_t)n * Vp;
    float max = -10000.0f, sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += BLOCK) {
        const float logit = to_float(x[v]), larger = fmaxf(max, logit);
        sum = sum * kernel_exp(max - larger) + kernel_exp(logit - larger);
        max = larger;
    }
    const float row_maximum = block_max(max);
    sum = block_sum(sum * kernel_exp(max - row_maximum));
    if (threadIdx.x == 0) { losses[n] = -fm_log(kernel_exp(to_float(x[target]) - row_maximum) / sum); }
    __syncthreads();  // the target's logit has been read
    write_gradient(x, row_maximum, sum, target, dloss, V, Vp);
}

static void online(const Classifier* c, const Device* dev) {
    online_kernel<<<c->N, BLOCK, 0, dev->stream>>>(c->losses, c->logits, c->targets, c->dloss, c->V, c->Vp);
}

static void online_bf16(const Classifier* c, const Device* dev) {
    online_kernel<<<c->N, BLOCK, 0, dev->stream>>>(c->losses, c->logits_bf16, c->targets, c->dloss, c->V, c->Vp);
}

// ---- 6: packs, the kernel of llmc/ops/crossentropy.h that keeps no column. In float, too. Vp divides into packs ----

template <typename X>
static void packs_of(X* logits, const Classifier* c, const Device* dev) {
    const int W = pack_width<X>();
    crossentropy_kernel<WRITE_GRADIENT, W><<<c->N, crossentropy_threads_(c->Vp / W), 0, dev->stream>>>(
        c->losses, logits, logits, c->targets, c->dloss, c->V, c->Vp, 0);
}

static void packs_float(const Classifier* c, const Device* dev) { packs_of(c->logits, c, dev); }
static void packs(const Classifier* c, const Device* dev) { packs_of(c->logits_bf16, c, dev); }

// ---- 7: the same kernel keeps all columns; the winner, in llmc/ops/crossentropy.h ----

static void kept(const Classifier* c, const Device* dev) {
    crossentropy_fused(c->losses, c->logits_bf16, c->targets, c->dloss, 1, c->N, c->V, c->Vp, dev);
}

// ---- check and time ----

typedef struct {
    const char* name;
    void (*run)(const Classifier* c, const Device* dev);
    int bf16;
} Step;

static const Step steps[] = {
    {"1 rows", rows, 0},          {"2 warps", warps, 0},           {"3 blocks", blocks, 0}, {"4 online", online, 0},
    {"5 bf16", online_bf16, 1},   {"6 packs, float", packs_float, 0}, {"6 packs", packs, 1},   {"7 kept", kept, 1},
};
enum { N_STEPS = sizeof steps / sizeof *steps };

static int* random_targets(int N, int V) {
    int* targets = (int*)new_array((size_t)N, sizeof(int));
    uint64_t s = seeded_stream(2);
    for (int n = 0; n < N; n++) { targets[n] = (int)(xorshift_u32(&s) % (uint32_t)V); }
    return targets;
}

// one step against the plain loop
static void check_step(Test* t, const Step* step, int N, int V, int Vp, const Device* dev) {
    const float dloss = 1.0f / (float)N;
    size_t n = (size_t)N * (size_t)Vp;
    float *logits = bf16_array(n, 8.0f, 1), *want = copied_array(logits, n), *losses = filled_array((size_t)N, NAN),
          *want_losses = filled_array((size_t)N, NAN);
    int* targets = random_targets(N, V);
    crossentropy_fused_ref(want_losses, want, targets, dloss, 1, N, V, Vp);
    Classifier c = {N, V, Vp, dloss, to_device(losses, (size_t)N, dev), to_device(logits, n, dev),
                    to_device_as<__nv_bfloat16>(logits, n, dev),
                    ints_to_device(targets, (size_t)N, dev)};
    step->run(&c, dev);
    cudaCheck(cudaGetLastError());
    from_device(losses, c.losses, (size_t)N, dev), device_drop(c.targets);
    if (step->bf16) { from_device_as(logits, c.logits_bf16, n, dev), device_drop(c.logits); }
    if (!step->bf16) { from_device_as(logits, c.logits, n, dev), device_drop(c.logits_bf16); }
    // logits differ by at most 16: an exponential is off by 35 * 2^-23, their sum by that and 96 * 2^-23
    // (llmc/ops/crossentropy.h), or V / 2 * 2^-23 where it is a chain, as the plain loop's is
    const double relative = (2 * 35 + 96 + V) * 0x1p-23;
    for (size_t i = 0; i < n; i++) {
        double allowed = relative * (double)dloss + (step->bf16 ? 0x1p-8 * fabs((double)want[i]) : 0.0);
        check(t, fabs((double)logits[i] - (double)want[i]) <= allowed,
              "%s, N %d, V %d, Vp %d: [%zu] found %.9g, expected %.9g", step->name, N, V, Vp, i, (double)logits[i],
              (double)want[i]);
    }
    for (int i = 0; i < N; i++) {
        check(t, fabs((double)losses[i] - (double)want_losses[i]) <= relative + 16.0 * 0x1p-23,
              "%s: loss %d: found %.9g, expected %.9g", step->name, i, (double)losses[i], (double)want_losses[i]);
    }
    free(logits), free(want), free(losses), free(want_losses), free(targets);
}

#ifndef SIMT
static void time_steps(int N, int V, int Vp, const Device* dev) {
    const int n_runs = 10;
    size_t n = (size_t)N * (size_t)Vp;
    int* targets = random_targets(N, V);
    Classifier c = {N, V, Vp, 1.0f / (float)N,
                    (float*)device_alloc(sizeof(float) * (size_t)N, "losses"),
                    (float*)device_alloc(sizeof(float) * n, "logits"),
                    (__nv_bfloat16*)device_alloc(sizeof(__nv_bfloat16) * n, "logits"),
                    ints_to_device(targets, (size_t)N, dev)};
    for (int s = 0; s < N_STEPS; s++) {
        const double ms = device_milliseconds(n_runs, dev, [&]() { steps[s].run(&c, dev); });
        double n_bytes = 2.0 * (double)n * (steps[s].bf16 ? 2 : 4);  // each logit read once and written once
        printf("%-16s %8.3f ms %7.0f GB/s of what it must move\n", steps[s].name, ms, 1e-6 * n_bytes / ms);
    }
    device_drop(c.losses), device_drop(c.logits), device_drop(c.logits_bf16), device_drop(c.targets), free(targets);
}
#endif

int main(void) {
    Test t = {0, NULL};
    Device dev;
    device_choose(0);
    device_init(&dev, 0);
    for (int s = 0; s < N_STEPS; s++) {
        check_step(&t, &steps[s], 1, 1, 8, &dev);
        check_step(&t, &steps[s], 5, 257, 264, &dev);
        check_step(&t, &steps[s], 2, 9001, 9008, &dev);
    }
    printf("%d steps, %d wrong\n", N_STEPS, t.n_failures);
#ifndef SIMT
    if (!t.n_failures) { time_steps(8192, 50257, 50304, &dev); }
#endif
    device_free(&dev);
    return t.n_failures > 0;
}
