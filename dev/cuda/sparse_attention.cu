/*
The staircase of DeepSeek V4's attention (sparse_attention.h), forward, heads of 512 channels: one head of keys, which
are values as well, for all heads of queries; a window, and entries that each position has chosen. Each step changes one
thing; main checks every step against sparse_attention_forward_ref and, on a GPU, times it at N 4096, H 64, window 128,
512 of 1024 entries: 640 keys of a late position, 274 GFLOP in all.

    step              what it changes                                              KB a position    on an H200
    1 matrix          three kernels: scores, softmax, weighted sum. The weights of all     170,000   not measured
                      heads and keys, 0.16 MB a position, go to memory and back, and
                      every head gathers every key for itself, twice
    2 online softmax  one kernel, a warp per head: weights stay in registers, and what     166,000   not measured
                      was summed shrinks when a larger score comes
    3 shared keys     16 heads of a block share each chunk of 64 keys. Products are float   33,000   not measured
                      (sparse_attention_kernels.h, what EXACT builds use)
    4 tensor cores    bf16: all 64 heads share a chunk, once, and it serves both products:     770   not measured
                      queries are 64 rows of an operand, keys columns, then rows, of another
    5 two stages      the next chunk is copied while this one is used.                         770   not measured
                      Lives in llmc/ops/flash_sparse.h

    backward
    1 shared keys     step 3's: att and ds of all keys go to memory, and an entry reads q  185,000   not measured
                      and dout of all heads of each position that has chosen it
    2 tensor cores    step 5's: what a position gives its keys is a product, too, and       2,200   not measured
                      goes to memory as a row of bf16 for each key, which then are added.
                      D is dout . out. Lives in llmc/ops/flash_sparse.h

In a build for sm_90a step 5, and step 2 of backward, are the kernels by wgmma (llmc/ops/flash_sparse_hopper.h).
KB are counted, not measured: 1024 bytes that loads and stores ask caches or memory for, of a position that sees 640
keys; what lanes of a warp read together counts once, shared memory does not count. q and out are 128 KB of bf16, keys
640, and neighbours share most of them: an H200's second-level cache, 50 MB, holds all entries. The limits on it: float
67 TFLOP/s, bf16 989 TFLOP/s (with wgmma; mma reaches less), memory 4.8 TB/s; doc/gpu/deepseek_v4.md says what of that
is to be expected.
    make build/nvcc-sm_90-bf16/cuda/sparse_attention && build/nvcc-sm_90-bf16/cuda/sparse_attention
    under dev/simt (build/simt-fast/cuda/sparse_attention): only the checks
*/
#include "llmc/ops/sparse_attention.h"  // sparse_attention_forward, sparse_attention_forward_ref, flash_sparse_forward
#include "llmc/ops/tile_rows.h"         // tile_rows_dots, tile_rows_read, tile_rows_write, tile_rows_scale, tile_rows_store
#include "llmc/test/test.h"             // random_array, to_device_as, check

enum { D = 512, LANE_CHANNELS = D / WARP };  // channels of a head, and those of a lane in step 2

// one layer in both precisions; the floats are bf16 values, so that one answer is right for all steps
typedef struct {
    SparseShape s;
    int W;          // entries
    int* ints;      // t, first_key, behind, first_entry (N) each, then lists
    Places places;  // on the device
    EntryWindows w;
    SparseInputsOf<float> in;
    SparseInputsOf<bf16> in_bf16;
    float *sinks, *out, *matrix, *max, *inv, *dout, *dq, *dkv, *dentries;
    bf16 *out_bf16, *dout_bf16, *dq_bf16, *dkv_bf16, *dentries_bf16;
} Layer;

static size_t most_keys(const Layer* l) { return (size_t)(l->s.window + l->s.topk); }

// ---- 1: the formula, a kernel for each line ----

// block is (32, 8): 32 keys of 8 heads; grid (keys, heads, N). matrix (N, H, most keys)
__global__ void scores_kernel(float* matrix, SparseInputsOf<float> in, size_t row) {
    const SparseSeen see = sparse_seen_(in, blockIdx.z);
    const int k = blockIdx.x * 32 + threadIdx.x, h = blockIdx.y * 8 + threadIdx.y;
    if (k >= see.n_keys || h >= in.s.H) { return; }
    const size_t i = (size_t)see.n * in.s.H + h;
    const float *q = in.q + i * D, *key = sparse_key_(in, see, k);
    float dot = 0.0f;
    for (int c = 0; c < D; c++) { dot += q[c] * key[c]; }
    matrix[i * row + k] = dot * in.s.scale;
}

// a warp per head of a position; block is 32
__global__ void softmax_kernel(float* matrix, const float* sinks, SparseInputsOf<float> in, size_t row) {
    const SparseSeen see = sparse_seen_(in, blockIdx.x / in.s.H);
    const float sink = sinks[blockIdx.x % in.s.H];
    float *x = matrix + (size_t)blockIdx.x * row, top = sink, sum = 0.0f;
    for (int k = threadIdx.x; k < see.n_keys; k += WARP) { top = fmaxf(top, x[k]); }
    top = row_max(top);
    for (int k = threadIdx.x; k < see.n_keys; k += WARP) { sum += x[k] = expf(x[k] - top); }
    sum = lane_sum(sum) + expf(sink - top);
    for (int k = threadIdx.x; k < see.n_keys; k += WARP) { x[k] /= sum; }
}

// a thread per channel of a head; block is D
__global__ void values_kernel(float* out, const float* matrix, SparseInputsOf<float> in, size_t row) {
    const SparseSeen see = sparse_seen_(in, blockIdx.x / in.s.H);
    const float* att = matrix + (size_t)blockIdx.x * row;
    float sum = 0.0f;
    for (int k = 0; k < see.n_keys; k++) { sum += att[k] * sparse_key_(in, see, k)[threadIdx.x]; }
    out[(size_t)blockIdx.x * D + threadIdx.x] = sum;
}

static void matrix_steps(const Layer* l, const Device* dev) {
    const size_t row = most_keys(l);
    const dim3 grid((unsigned)ceil_div((int64_t)row, 32), (unsigned)ceil_div(l->s.H, 8), (unsigned)l->s.N);
    const dim3 block(32, 8);
    const unsigned n_rows = (unsigned)(l->s.N * l->s.H);
    scores_kernel<<<grid, block, 0, dev->stream>>>(l->matrix, l->in, row);
    softmax_kernel<<<n_rows, WARP, 0, dev->stream>>>(l->matrix, l->sinks, l->in, row);
    values_kernel<<<n_rows, D, 0, dev->stream>>>(l->out, l->matrix, l->in, row);
}

// ---- 2: online softmax. A warp takes 32 keys at a time: each lane scores one, then sums 16 channels over all 32 ----

// block is (32, 4): a warp per head of a position
__global__ void online_kernel(float* out, const float* sinks, SparseInputsOf<float> in) {
    const int i = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x;
    if (i >= in.s.N * in.s.H) { return; }
    const SparseSeen see = sparse_seen_(in, i / in.s.H);
    const float *q = in.q + (size_t)i * D, sink = sinks[i % in.s.H];
    float top = sink, total = 0.0f, sum[LANE_CHANNELS] = {0.0f};
    for (int k0 = 0; k0 < see.n_keys; k0 += WARP) {
        float score = -INFINITY;
        if (k0 + lane < see.n_keys) {
            const float* key = sparse_key_(in, see, k0 + lane);
            score = 0.0f;
            for (int c = 0; c < D; c++) { score += q[c] * key[c]; }
            score *= in.s.scale;
        }
        const float larger = fmaxf(top, row_max(score)), shrink = expf(top - larger), weight = expf(score - larger);
        top = larger, total = total * shrink + weight;
        for (int j = 0; j < LANE_CHANNELS; j++) { sum[j] *= shrink; }
        for (int k = 0; k < WARP && k0 + k < see.n_keys; k++) {
            const float w = __shfl_sync(ALL_LANES, weight, k), *key = sparse_key_(in, see, k0 + k);
            for (int j = 0; j < LANE_CHANNELS; j++) { sum[j] += w * key[j * WARP + lane]; }
        }
    }
    total = lane_sum(total) + expf(sink - top);
    for (int j = 0; j < LANE_CHANNELS; j++) { out[(size_t)i * D + j * WARP + lane] = sum[j] / total; }
}

static void online(const Layer* l, const Device* dev) {
    const dim3 block(32, 4);
    online_kernel<<<(unsigned)ceil_div(l->s.N * l->s.H, 4), block, 0, dev->stream>>>(l->out, l->sinks, l->in);
}

// ---- 3: what EXACT builds call ----

static void shared_keys(const Layer* l, const Device* dev) {
    sparse_attention_forward(l->out, l->max, l->inv, l->in.q, l->in.kv, l->in.entries, l->sinks, l->in.chosen, &l->s,
                             &l->places, &l->w, dev);
}

// ---- 4: tensor cores, with the parts of tile_rows.h; each chunk of 64 keys is waited for ----

// block is (FLASH_SPARSE_THREADS), grid (N, tiles of heads). shared memory: queries, keys, dots
__global__ void __launch_bounds__(FLASH_SPARSE_THREADS)
tensor_cores_kernel(bf16* out, const float* sinks, SparseInputsOf<bf16> in) {
    const int KEYS = FLASH_SPARSE_KEYS, HEADS = FLASH_SPARSE_HEADS;
    extern __shared__ __align__(128) bf16 tiles[];
    __shared__ FlashSparseChunk<KEYS> chunk;
    __shared__ float factors[HEADS];
    bf16 *q_tile = tiles, *keys = q_tile + HEADS * D;
    float* dots = (float*)(keys + KEYS * D);
    const int warp = threadIdx.x / WARP, head = blockIdx.y * HEADS, h = tile_rows_row();
    const int n_heads = min(HEADS, in.s.H - head), is_first = threadIdx.x % 4 == 0;
    const size_t row = (size_t)blockIdx.x * in.s.H + head;
    const SparseSeen see = sparse_seen_(in, blockIdx.x);
    const float sink = h < n_heads ? sinks[head + h] : 0.0f;
    float sums[4][D / 64][4], top = sink, total = 0.0f;
    tile_set_zero(sums);
    tile_load<HEADS, D, FLASH_SPARSE_THREADS>(q_tile, in.q + row * D, (size_t)D, n_heads, D);
    for (int k0 = 0; k0 < see.n_keys; k0 += KEYS) {
        float x[KEYS / 16][4];
        __syncthreads();  // nobody uses the chunk before any more
        flash_sparse_find(chunk, in, see, k0);
        __syncthreads();
        flash_sparse_load_<D>(keys, chunk, D);
        cp_async_wait<0>();
        __syncthreads();
        tile_rows_dots<D, KEYS>(dots + warp % 2 * HEADS * KEYS, q_tile, warp / 4 * 32, keys, warp / 2 % 2 * 32,
                                warp % 2);
        __syncthreads();
        tile_rows_read<KEYS>(x, dots);
        const float shrink = flash_sparse_weights_(x, &top, &total, see.n_keys - k0, in.s.scale);
        tile_rows_write<KEYS>(dots, x);
        if (is_first) { factors[h] = shrink; }
        __syncthreads();
        tile_rows_scale(sums, factors);
        tile_add_product_of<2 * KEYS, D, KEYS / 16, 0>(sums, (bf16*)dots, 0, keys, warp * (D / 64));
    }
    total = tile_quad_sum(total) + expf(sink - top);
    __syncthreads();
    if (is_first) { factors[h] = 1.0f / total; }
    __syncthreads();
    tile_rows_scale(sums, factors);
    tile_rows_store<D>(out + row * D, (size_t)D, n_heads, D, q_tile, sums);
}

static void tensor_cores(const Layer* l, const Device* dev) {
    const size_t n_dots = 2 * FLASH_SPARSE_HEADS * FLASH_SPARSE_KEYS;
    const int n_bytes = (int)(sizeof(bf16) * D * (FLASH_SPARSE_HEADS + FLASH_SPARSE_KEYS) + sizeof(float) * n_dots);
    const dim3 grid((unsigned)l->s.N, (unsigned)ceil_div(l->s.H, FLASH_SPARSE_HEADS));
    cudaCheck(cudaFuncSetAttribute(tensor_cores_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    tensor_cores_kernel<<<grid, FLASH_SPARSE_THREADS, n_bytes, dev->stream>>>(l->out_bf16, l->sinks, l->in_bf16);
}

// ---- 5: what the trainer calls ----

static void two_stages(const Layer* l, const Device* dev) {
    if (!flash_sparse_forward(l->out_bf16, l->max, l->inv, l->sinks, l->in_bf16, dev)) {
        fail_run("sparse_attention: expected a GPU with 227 KB of shared memory for a block (flash_sparse.h)");
    }
}

#ifndef SIMT
// after forward steps; test_sparse_attention.c checks them
static void backward_shared_keys(const Layer* l, const Device* dev) {
    sparse_attention_backward(l->dq, l->dkv, l->dentries, (float*)NULL, (const float*)l->dout,
                              (const float*)l->out, l->in.q, l->in.kv, l->in.entries, l->max, l->inv, l->sinks,
                              l->in.chosen, l->W, &l->s, &l->places, &l->w, dev);
}

static void backward_tensor_cores(const Layer* l, const Device* dev) {
    const SparseInputsOf<bf16>* in = &l->in_bf16;
    sparse_attention_backward(l->dq_bf16, l->dkv_bf16, l->dentries_bf16, (float*)NULL, (const bf16*)l->dout_bf16,
                              (const bf16*)l->out_bf16, in->q, in->kv, in->entries, l->max, l->inv, l->sinks,
                              in->chosen, l->W, &l->s, &l->places, &l->w, dev);
}
#endif

// ---- check and time ----

typedef struct {
    const char* name;
    void (*run)(const Layer* l, const Device* dev);
    int bf16_out;
} Step;

static const Step steps[] = {
    {"1 matrix", matrix_steps, 0},       {"2 online softmax", online, 0},  {"3 shared keys", shared_keys, 0},
    {"4 tensor cores", tensor_cores, 1}, {"5 two stages", two_stages, 1},
};
enum { N_STEPS = sizeof steps / sizeof *steps };

// one document, whose positions have chosen entries at random among the first W, of which one ends every `r` positions
static void fill_ints(int* ints, const SparseShape* s, int W, int r) {
    uint64_t state = seeded_stream(7);
    for (int n = 0; n < s->N; n++) {
        int *list = ints + 4 * (size_t)s->N + (size_t)n * s->topk, k = 0;
        const int seen = (n + 1) / r < W ? (n + 1) / r : W;
        ints[n] = n, ints[s->N + n] = 0, ints[2 * s->N + n] = s->N, ints[3 * s->N + n] = 0;
        for (int e = 0; e < seen && k < s->topk; e++) {
            const int left = s->topk - k, takes = seen - e <= left || (int)(xorshift_u32(&state) % (seen - e)) < left;
            if (takes) { list[k++] = e; }
        }
        while (k < s->topk) { list[k++] = -1; }
    }
}

// what each array of the layer begins with
typedef struct {
    SparseShape s;
    int W, r;
    int* ints;
    float *q, *kv, *entries, *sinks, *dout;
} Numbers;

static Numbers numbers(int N, int H, int window, int topk, int W, int r) {
    Numbers x = {{N, H, D, window, topk, 1.0f / sqrtf((float)D)}, W, r, NULL, NULL, NULL, NULL, NULL, NULL};
    x.ints = (int*)new_array((size_t)N * (size_t)(4 + topk), sizeof(int));
    fill_ints(x.ints, &x.s, W, r);
    x.q = bf16_array((size_t)N * H * D, 4.0f, 1), x.kv = bf16_array((size_t)N * D, 1.0f, 2);
    x.entries = bf16_array((size_t)W * D, 1.0f, 3), x.sinks = random_array((size_t)H, 1.0f, 4);
    x.dout = bf16_array((size_t)N * H * D, 1.0f, 5);
    return x;
}

static void numbers_free(Numbers* x) {
    free(x->ints), free(x->q), free(x->kv), free(x->entries), free(x->sinks), free(x->dout);
}

static Layer layer(const Numbers* x, const Device* dev) {
    Layer l;
    const size_t N = (size_t)x->s.N, n = N * x->s.H * D, n_kv = N * D, n_entries = (size_t)x->W * D;
    l.s = x->s, l.W = x->W;
    l.ints = ints_to_device(x->ints, N * (4 + (size_t)x->s.topk), dev);
    const int* first_entry = l.ints + 3 * N;
    l.places = Places{x->s.N, l.ints, l.ints + N, l.ints + 2 * N};
    l.w = EntryWindows{x->r, 0, x->W, NULL, NULL, first_entry};
    const float *q = to_device(x->q, n, dev), *kv = to_device(x->kv, n_kv, dev);
    const bf16 *q_bf16 = to_device_as<bf16>(x->q, n, dev), *kv_bf16 = to_device_as<bf16>(x->kv, n_kv, dev);
    const float* entries = to_device(x->entries, n_entries, dev);
    const bf16* entries_bf16 = to_device_as<bf16>(x->entries, n_entries, dev);
    l.in = sparse_inputs_(q, kv, entries, first_entry + N, &l.s, &l.places, &l.w);
    l.in_bf16 = sparse_inputs_(q_bf16, kv_bf16, entries_bf16, first_entry + N, &l.s, &l.places, &l.w);
    l.sinks = to_device(x->sinks, (size_t)x->s.H, dev);
    l.dout = to_device(x->dout, n, dev), l.dout_bf16 = to_device_as<bf16>(x->dout, n, dev);
    l.matrix = (float*)device_alloc(sizeof(float) * N * x->s.H * most_keys(&l), "matrix");
    l.max = (float*)device_alloc(sizeof(float) * N * x->s.H, "max");
    l.inv = (float*)device_alloc(sizeof(float) * N * x->s.H, "inv");
    l.out = (float*)device_alloc(sizeof(float) * n, "out");
    l.out_bf16 = (bf16*)device_alloc(sizeof(bf16) * n, "out");
    l.dq = (float*)device_alloc(sizeof(float) * n, "dq");
    l.dq_bf16 = (bf16*)device_alloc(sizeof(bf16) * n, "dq");
    l.dkv = (float*)device_alloc(sizeof(float) * n_kv, "dkv");
    l.dkv_bf16 = (bf16*)device_alloc(sizeof(bf16) * n_kv, "dkv");
    l.dentries = (float*)device_alloc(sizeof(float) * n_entries, "dentries");
    l.dentries_bf16 = (bf16*)device_alloc(sizeof(bf16) * n_entries, "dentries");
    return l;
}

static void layer_free(Layer* l) {
    const void* all[] = {l->ints,     l->in.q,     l->in.kv,    l->in.entries, l->in_bf16.q, l->in_bf16.kv,
                         l->sinks,    l->matrix,   l->max,      l->inv,        l->out,       l->in_bf16.entries,
                         l->out_bf16, l->dq,       l->dq_bf16,  l->dkv,        l->dkv_bf16,  l->dentries,
                         l->dout,     l->dout_bf16, l->dentries_bf16};
    for (const void* p : all) { device_drop((void*)p); }
}

// every step against the plain loop
static void check_steps(Test* t, int N, int H, int window, int topk, int W, const Device* dev) {
    Numbers x = numbers(N, H, window, topk, W, 1);
    const size_t n = (size_t)N * H * D;
    float *want = filled_array(n, NAN), *got = filled_array(n, NAN), *rows = filled_array(2 * (size_t)N * H, NAN);
    const Places places = {N, x.ints, x.ints + N, x.ints + 2 * N};
    const EntryWindows w = {1, 0, W, NULL, NULL, x.ints + 3 * N};
    sparse_attention_forward_ref(want, rows, rows + N * H, x.q, x.kv, x.entries, x.sinks, x.ints + 4 * N, &x.s, &places,
                                 &w);
    double* want_double = double_array(want, n);
    Layer l = layer(&x, dev);
    for (int s = 0; s < N_STEPS; s++) {
        char what[96];
        steps[s].run(&l, dev);
        cudaCheck(cudaGetLastError());
        snprintf(what, sizeof what, "%s, N %d, H %d, window %d, topk %d", steps[s].name, N, H, window, topk);
        bf16* got_bf16 = (bf16*)new_array(n, sizeof(bf16));
        device_download(got, l.out, sizeof(float) * n, dev);
        device_download(got_bf16, l.out_bf16, sizeof(bf16) * n, dev);
        for (size_t i = 0; i < n && steps[s].bf16_out; i++) { got[i] = (float)got_bf16[i]; }
        // |keys| and |out| are below 1; weights and results are rounded to bf16, or everything to float
        check_close(t, what, got, want_double, n, steps[s].bf16_out ? 2.0 * 0x1p-8 : 0x1p-14);
        device_zero(l.out, sizeof(float) * n, dev);
        device_zero(l.out_bf16, sizeof(bf16) * n, dev);
        free(got_bf16);
    }
    layer_free(&l), numbers_free(&x);
    free(want), free(got), free(rows), free(want_double);
}

#ifndef SIMT
// n_flops: of heads and the keys they see
static void time_step(const char* name, void (*run)(const Layer* l, const Device* dev), const Layer* l, double n_flops,
                      const Device* dev) {
    const double ms = device_milliseconds(5, dev, [&]() { run(l, dev); });
    printf("%-18s %8.3f ms %7.1f TFLOP/s\n", name, ms, 1e-9 * n_flops / ms);
}

static void time_steps(int N, int H, int window, int topk, int W, int r, const Device* dev) {
    Numbers x = numbers(N, H, window, topk, W, r);
    const Places places = {N, x.ints, x.ints + N, x.ints + 2 * N};
    const EntryWindows w = {r, 0, W, NULL, NULL, x.ints + 3 * N};
    double n_keys = 0.0;
    for (int n = 0; n < N; n++) {
        n_keys += sparse_window_keys(&x.s, &places, n) + sparse_entries(&x.s, &places, &w, x.ints + 4 * N, n);
    }
    Layer l = layer(&x, dev);
    const double n_flops = 4.0 * D * H * n_keys;
    for (int s = 0; s < N_STEPS; s++) { time_step(steps[s].name, steps[s].run, &l, n_flops, dev); }
    // as usual, without what is computed twice
    time_step("backward 1", backward_shared_keys, &l, 2.5 * n_flops, dev);
    time_step("backward 2", backward_tensor_cores, &l, 2.5 * n_flops, dev);
    layer_free(&l), numbers_free(&x);
}
#endif

int main(void) {
    Test t = {0, NULL};
    Device dev;
    device_choose(0);
    device_init(&dev, 0);
    check_steps(&t, 1, 1, 4, 1, 1, &dev);
    check_steps(&t, 5, 66, 3, 4, 4, &dev);
    check_steps(&t, 70, 2, 40, 66, 70, &dev);
    printf("%d steps, %d wrong\n", N_STEPS, t.n_failures);
#ifndef SIMT
    if (!t.n_failures) { time_steps(4096, 64, 128, 512, 1024, 4, &dev); }
#endif
    device_free(&dev);
    return t.n_failures > 0;
}
