/*
The staircase of causal attention, forward, as GPT-2 calls it: qkv (B, T, 3C) with heads of 64 channels. Each step
changes one thing; main checks every step against attention_forward_ref and, on a GPU, times it at B 8, T 1024, NH 12: a
layer of GPT-2 124M, 12.9 GFLOP of which queries see the result.

    step              what it changes                                                              on an H200
    1 matrix          three kernels: scores, softmax, weighted sum. The (T, T) matrices of all heads, 0.4   not measured
                      GB, go to memory and back several times; qkv and out are 0.1 GB
    2 online softmax  one kernel, a warp per query: weights stay in registers, and what was summed shrinks  not measured
                      when a larger score comes. Nothing of size (T, T) is left, but each query reads all of k and v
    3 shared tiles    32 queries of a block share each tile of k and v                                      not measured
    4 tensor cores    bf16: a warp multiplies 16 queries by 8 keys in one instruction, weights go from one  not measured
                      product to the next in registers
    5 two stages      the next tile is copied while this one is used; 32 queries per warp share a fragment. not measured
                      llmc/ops/flash_attention.h, what fast builds use
    backward          5's, in two passes: 3.5 times the products of forward                                 not measured

The limits on an H200: float 67 TFLOP/s, bf16 989 TFLOP/s (with wgmma; mma, which runs on older cards too, reaches
less), memory 4.8 TB/s.
    make build/nvcc-sm_90-bf16/cuda/attention && build/nvcc-sm_90-bf16/cuda/attention
    under dev/simt: only the checks
*/
#include "llmc/ops/attention.h"        // attention_forward_ref
#include "llmc/ops/flash_attention.h"  // flash_attention_forward and its parts
#include "llmc/test/test.h"            // filled_array, to_device_as, check_close

enum { HEAD = 64 };

// one layer in both precisions; the floats are bf16 values, so that one answer is right for all steps
typedef struct {
    int B, T, C, NH;
    float *qkv, *out, *matrix, *max, *inv;  // matrix (B*NH, T, T)
    bf16 *qkv_bf16, *out_bf16, *dout_bf16, *dqkv_bf16;
} Layer;

// ---- 1: the formula, a kernel for each line ----

// block is (32, 8): 32 keys of 8 queries
__global__ void scores_kernel(float* matrix, const float* qkv, int T, int C, int NH) {
    int u = blockIdx.x * 32 + threadIdx.x, t = blockIdx.y * 8 + threadIdx.y, b = blockIdx.z / NH, h = blockIdx.z % NH;
    if (u >= T || t >= T) { return; }
    const float *q = qkv + ((size_t)b * T + t) * 3 * C + h * HEAD,
                *k = qkv + ((size_t)b * T + u) * 3 * C + C + h * HEAD;
    float dot = 0.0f;
    for (int i = 0; i < HEAD && u <= t; i++) { dot += q[i] * k[i]; }
    matrix[((size_t)blockIdx.z * T + t) * T + u] = u <= t ? dot / 8.0f : -INFINITY;  // 8: the root of HEAD
}

// a warp per row; block is 32
__global__ void softmax_kernel(float* matrix, int T) {
    float *x = matrix + (size_t)blockIdx.x * T, top = -10000.0f, sum = 0.0f;
    for (int u = threadIdx.x; u < T; u += WARP) { top = fmaxf(top, x[u]); }
    top = row_max(top);
    for (int u = threadIdx.x; u < T; u += WARP) { sum += x[u] = expf(x[u] - top); }
    sum = lane_sum(sum);
    for (int u = threadIdx.x; u < T; u += WARP) { x[u] /= sum; }
}

// a thread per channel of a query; block is HEAD
__global__ void values_kernel(float* out, const float* matrix, const float* qkv, int T, int C, int NH) {
    int t = blockIdx.x % T, h = blockIdx.x / T % NH, b = blockIdx.x / T / NH;
    const float *v = qkv + (size_t)b * T * 3 * C + 2 * C + h * HEAD, *att = matrix + (size_t)blockIdx.x * T;
    float sum = 0.0f;
    for (int u = 0; u <= t; u++) { sum += att[u] * v[(size_t)u * 3 * C + threadIdx.x]; }
    out[((size_t)b * T + t) * C + h * HEAD + threadIdx.x] = sum;
}

static void matrix_steps(const Layer* l, const Device* dev) {
    dim3 grid((unsigned)ceil_div(l->T, 32), (unsigned)ceil_div(l->T, 8), (unsigned)(l->B * l->NH)), block(32, 8);
    int n_rows = l->B * l->NH * l->T;
    scores_kernel<<<grid, block, 0, dev->stream>>>(l->matrix, l->qkv, l->T, l->C, l->NH);
    softmax_kernel<<<n_rows, WARP, 0, dev->stream>>>(l->matrix, l->T);
    values_kernel<<<n_rows, HEAD, 0, dev->stream>>>(l->out, l->matrix, l->qkv, l->T, l->C, l->NH);
}

// ---- 2: online softmax. A warp takes 32 keys at a time: each lane scores one, then each lane sums two channels over
//      all 32 ----

typedef struct {
    float max, sum, out[2];  // sum: this lane's keys; out: channels lane and lane + 32
} Online;

// n keys, at most 32, `row` floats apart
__device__ inline void online_step(Online* o, const float* q, const float* k, const float* v, size_t row, int n) {
    int lane = threadIdx.x;
    float score = -INFINITY;
    if (lane < n) {
        score = 0.0f;
        for (int i = 0; i < HEAD; i++) { score += q[i] * k[lane * row + i]; }
        score /= 8.0f;
    }
    float top = fmaxf(o->max, row_max(score)), shrink = expf(o->max - top), weight = expf(score - top);
    o->max = top;
    o->sum = o->sum * shrink + weight;
    o->out[0] *= shrink, o->out[1] *= shrink;
    for (int j = 0; j < n; j++) {
        float w = __shfl_sync(ALL_LANES, weight, j);
        o->out[0] += w * v[j * row + lane], o->out[1] += w * v[j * row + lane + 32];
    }
}

__device__ inline void online_store(float* out, const Online* o) {
    float sum = lane_sum(o->sum);
    out[threadIdx.x] = o->out[0] / sum, out[threadIdx.x + 32] = o->out[1] / sum;
}

// block is (32, 4): a warp per query
__global__ void online_kernel(float* out, const float* qkv, int T, int C, int NH) {
    int t = blockIdx.y * 4 + threadIdx.y, b = blockIdx.x / NH, h = blockIdx.x % NH;
    if (t >= T) { return; }
    size_t row = 3 * (size_t)C;
    const float *q = qkv + ((size_t)b * T + t) * row + h * HEAD, *k = qkv + (size_t)b * T * row + C + h * HEAD,
                *v = k + C;
    Online o = {-10000.0f, 0.0f, {0.0f, 0.0f}};
    for (int u = 0; u <= t; u += WARP) { online_step(&o, q, k + u * row, v + u * row, row, min(WARP, t + 1 - u)); }
    online_store(out + ((size_t)b * T + t) * C + h * HEAD, &o);
}

static void online(const Layer* l, const Device* dev) {
    dim3 grid((unsigned)(l->B * l->NH), (unsigned)ceil_div(l->T, 4)), block(32, 4);
    online_kernel<<<grid, block, 0, dev->stream>>>(l->out, l->qkv, l->T, l->C, l->NH);
}

// ---- 3: tiles of 32 keys and values in shared memory, for 32 queries, 4 for each of 8 warps. The channel more per row
//      puts a channel of 32 keys into 32 different banks ----

enum { ROW = HEAD + 1, QUERIES = 32, PER_WARP = 4 };

// block is (32, 8)
__global__ void shared_tiles_kernel(float* out, const float* qkv, int T, int C, int NH) {
    __shared__ float q_tile[QUERIES][HEAD];
    __shared__ float k_tile[WARP][ROW];
    __shared__ float v_tile[WARP][ROW];
    int first = blockIdx.y * QUERIES, b = blockIdx.x / NH, h = blockIdx.x % NH,
        thread = threadIdx.y * WARP + threadIdx.x;
    size_t row = 3 * (size_t)C;
    const float* x = qkv + (size_t)b * T * row + h * HEAD;
    Online o[PER_WARP];
    for (int j = 0; j < PER_WARP; j++) { o[j] = Online{-10000.0f, 0.0f, {0.0f, 0.0f}}; }
    for (int i = thread; i < QUERIES * HEAD; i += 256) {
        q_tile[i / HEAD][i % HEAD] = first + i / HEAD < T ? x[(first + i / HEAD) * row + i % HEAD] : 0.0f;
    }
    for (int u = 0; u < first + QUERIES && u < T; u += WARP) {
        __syncthreads();  // the tiles before these have been used
        for (int i = thread; i < WARP * HEAD; i += 256) {
            bool exists = u + i / HEAD < T;
            k_tile[i / HEAD][i % HEAD] = exists ? x[(u + i / HEAD) * row + C + i % HEAD] : 0.0f;
            v_tile[i / HEAD][i % HEAD] = exists ? x[(u + i / HEAD) * row + 2 * C + i % HEAD] : 0.0f;
        }
        __syncthreads();
        for (int j = 0; j < PER_WARP; j++) {
            int n = threadIdx.y * PER_WARP + j;
            if (u <= first + n) {
                online_step(&o[j], q_tile[n], k_tile[0], v_tile[0], ROW, min(WARP, first + n + 1 - u));
            }
        }
    }
    for (int j = 0; j < PER_WARP; j++) {
        int t = first + threadIdx.y * PER_WARP + j;
        if (t < T) { online_store(out + ((size_t)b * T + t) * C + h * HEAD, &o[j]); }
    }
}

static void shared_tiles(const Layer* l, const Device* dev) {
    dim3 grid((unsigned)(l->B * l->NH), (unsigned)ceil_div(l->T, QUERIES)), block(32, 8);
    shared_tiles_kernel<<<grid, block, 0, dev->stream>>>(l->out, l->qkv, l->T, l->C, l->NH);
}

// ---- 4: tensor cores, with the parts of flash_attention.h: 64 queries, 16 for each of 4 warps; tiles of 64 keys,
//      waited for ----

__global__ void __launch_bounds__(FLASH_THREADS) tensor_cores_kernel(bf16* out, const bf16* qkv, AttentionShape s) {
    __shared__ __align__(128) bf16 q_tile[64 * HEAD];
    __shared__ __align__(128) bf16 k_tile[64 * HEAD];
    __shared__ __align__(128) bf16 v_tile[64 * HEAD];
    int b = blockIdx.x / s.NH, h = blockIdx.x % s.NH, t = blockIdx.y * 64, row = threadIdx.x / WARP * 16,
        C = s.NH * HEAD;
    float sums[1][HEAD / 8][4], m[1][2] = {{-10000.0f, -10000.0f}}, sum[1][2] = {{0.0f, 0.0f}};
    tile_set_zero(sums);
    tile_load<64, HEAD, FLASH_THREADS>(q_tile, qkv + attention_at_q(&s, b, h, t), s.q_row, s.T - t, HEAD);
    for (int u = 0; u < t + 64 && u < s.T; u += 64) {
        float p[1][8][4];
        unsigned operands[1][4][4];
        const bf16* k = qkv + C + attention_at_kv(&s, b, h, u);
        __syncthreads();
        tile_load<64, HEAD, FLASH_THREADS>(k_tile, k, s.kv_row, s.T - u, HEAD);
        tile_load<64, HEAD, FLASH_THREADS>(v_tile, k + C, s.kv_row, s.T - u, HEAD);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        tile_set_zero(p);
        tile_add_product_transposed<HEAD>(p, q_tile, row, k_tile);
        flash_mask_scores(p, s, b, t + row, u);
        flash_softmax_step<HEAD>(p, sums, m, sum, s.scale * LOG2_E);
        tile_to_operands(operands, p);
        tile_add_product<HEAD>(sums, operands, v_tile);
    }
    sum[0][0] = 1.0f / tile_quad_sum(sum[0][0]), sum[0][1] = 1.0f / tile_quad_sum(sum[0][1]);
    tile_store_rows<HEAD>(out + attention_at_out(&s, b, h, t), s.out_row, s.T - t, HEAD, q_tile, row, sums, sum);
}

static void tensor_cores(const Layer* l, const Device* dev) {
    dim3 grid((unsigned)(l->B * l->NH), (unsigned)ceil_div(l->T, 64));
    AttentionShape s = attention_packed_shape(l->B, l->T, l->C, l->NH, 0);
    tensor_cores_kernel<<<grid, FLASH_THREADS, 0, dev->stream>>>(l->out_bf16, l->qkv_bf16, s);
}

// ---- 5: what the trainer calls ----

static void two_stages(const Layer* l, const Device* dev) {
    AttentionShape s = attention_packed_shape(l->B, l->T, l->C, l->NH, 0);
    const bf16 *q = l->qkv_bf16, *k = q + l->C, *v = k + l->C;
    flash_attention_forward(l->out_bf16, l->max, l->inv, q, k, v, &s, dev);
}

#ifndef SIMT
// after a forward pass; test_attention.c checks it
static void backward(const Layer* l, const Device* dev) {
    AttentionShape s = attention_packed_shape(l->B, l->T, l->C, l->NH, 0);
    const bf16 *q = l->qkv_bf16, *k = q + l->C, *v = k + l->C;
    bf16 *dq = l->dqkv_bf16, *dk = dq + l->C, *dv = dk + l->C;
    flash_attention_backward(dq, dk, dv, l->dout_bf16, l->out_bf16, l->max, l->inv, q, k, v, &s, dev);
}
#endif

// ---- check and time ----

typedef struct {
    const char* name;
    void (*run)(const Layer* l, const Device* dev);
    int bf16_out;
} Step;

static const Step steps[] = {
    {"1 matrix", matrix_steps, 0},       {"2 online softmax", online, 0},  {"3 shared tiles", shared_tiles, 0},
    {"4 tensor cores", tensor_cores, 1}, {"5 two stages", two_stages, 1},
};
enum { N_STEPS = sizeof steps / sizeof *steps };

static Layer layer(const float* qkv, const float* dout, int B, int T, int NH, const Device* dev) {
    size_t n = (size_t)B * (size_t)T * (size_t)NH * HEAD, n_rows = (size_t)B * (size_t)NH * (size_t)T;
    Layer l = {B,
               T,
               NH * HEAD,
               NH,
               to_device(qkv, 3 * n, dev),
               NULL,
               NULL,
               NULL,
               NULL,
               to_device_as<bf16>(qkv, 3 * n, dev),
               NULL,
               to_device_as<bf16>(dout, n, dev),
               NULL};
    l.out = (float*)device_alloc(sizeof(float) * n, "out");
    l.matrix = (float*)device_alloc(sizeof(float) * n_rows * (size_t)T, "matrix");
    l.max = (float*)device_alloc(sizeof(float) * n_rows, "max");
    l.inv = (float*)device_alloc(sizeof(float) * n_rows, "inv");
    l.out_bf16 = (bf16*)device_alloc(sizeof(bf16) * n, "out");
    l.dqkv_bf16 = (bf16*)device_alloc(sizeof(bf16) * 3 * n, "dqkv");
    return l;
}

static void layer_free(Layer* l) {
    void* all[] = {l->qkv, l->out, l->matrix, l->max, l->inv, l->qkv_bf16, l->out_bf16, l->dout_bf16, l->dqkv_bf16};
    for (void* p : all) { device_drop(p); }
}

// every step against the plain loop
static void check_steps(Test* t, int B, int T, int NH, const Device* dev) {
    size_t n = (size_t)B * (size_t)T * (size_t)NH * HEAD, n_rows = (size_t)B * (size_t)NH * (size_t)T,
           n_weights = n_rows * (size_t)T;
    float *qkv = bf16_array(3 * n, 2.0f, 1), *dout = bf16_array(n, 2.0f, 2), *want = filled_array(n, NAN),
          *got = filled_array(n, NAN);
    float *weights = filled_array(2 * n_weights, NAN), *rows = filled_array(2 * n_rows, NAN);
    attention_forward_ref(want, weights, weights + n_weights, rows, rows + n_rows, qkv, B, T, NH * HEAD, NH);
    double* want_double = double_array(want, n);
    Layer l = layer(qkv, dout, B, T, NH, dev);
    for (int s = 0; s < N_STEPS; s++) {
        char what[96];
        steps[s].run(&l, dev);
        cudaCheck(cudaGetLastError());
        snprintf(what, sizeof what, "%s, B %d, T %d, NH %d", steps[s].name, B, T, NH);
        bf16* got_bf16 = (bf16*)new_array(n, sizeof(bf16));
        device_download(got, l.out, sizeof(float) * n, dev);
        device_download(got_bf16, l.out_bf16, sizeof(bf16) * n, dev);
        for (size_t i = 0; i < n && steps[s].bf16_out; i++) { got[i] = (float)got_bf16[i]; }
        // |v| and |out| are below 2; weights and results are rounded to bf16, or everything to float (the bounds of
        // test_attention.c)
        check_close(t, what, got, want_double, n, steps[s].bf16_out ? 2.0 * 2.0 * 0x1p-8 : 2.0 * 0x1p-14);
        device_zero(l.out, sizeof(float) * n, dev);
        device_zero(l.out_bf16, sizeof(bf16) * n, dev);
        free(got_bf16);
    }
    layer_free(&l);
    free(qkv), free(dout), free(want), free(got), free(weights), free(rows), free(want_double);
}

#ifndef SIMT
// n_flops: of queries and the keys they see
static void time_step(const char* name, void (*run)(const Layer* l, const Device* dev), const Layer* l, double n_flops,
                      const Device* dev) {
    const double ms = device_milliseconds(20, dev, [&]() { run(l, dev); });
    printf("%-18s %8.3f ms %7.1f TFLOP/s\n", name, ms, 1e-9 * n_flops / ms);
}

static void time_steps(int B, int T, int NH, const Device* dev) {
    size_t n = (size_t)B * (size_t)T * (size_t)NH * HEAD;
    double n_flops = 2.0 * HEAD * B * NH * T * (T + 1.0);
    float *qkv = bf16_array(3 * n, 2.0f, 1), *dout = bf16_array(n, 2.0f, 2);
    Layer l = layer(qkv, dout, B, T, NH, dev);
    for (int s = 0; s < N_STEPS; s++) { time_step(steps[s].name, steps[s].run, &l, n_flops, dev); }
    time_step("backward", backward, &l, 2.5 * n_flops, dev);  // as usual, without what is computed twice
    layer_free(&l);
    free(qkv), free(dout);
}
#endif

int main(void) {
    Test t = {0, NULL};
    Device dev;
    device_choose(0);
    device_init(&dev, 0);
    check_steps(&t, 1, 1, 1, &dev);
    check_steps(&t, 2, 33, 2, &dev);
    check_steps(&t, 1, 130, 1, &dev);
    printf("%d steps, %d wrong\n", N_STEPS, t.n_failures);
#ifndef SIMT
    if (!t.n_failures) { time_steps(8, 1024, 12, &dev); }
#endif
    device_free(&dev);
    return t.n_failures > 0;
}
