/*
The staircase of the linear layers of experts: out (R, OC), row s of expert e = inp[index[s]] (C) * weight[e] (OC, C)^T.
Each step changes one thing; main checks every step against grouped_matmul_forward_ref and, on a GPU, times it at 8192
tokens of 4 experts each, R 32768, E 16, C 768, OC 12288: 618 GFLOP, gate and up of a mixture of 16 experts.

    step              what it changes                                                              on an H200
    1 loop            one cuBLASLt product after the other, of rows that were copied together. The host  not measured
                      has to know offsets: it waits for the GPU, which then waits for the host
    2 outputs         one launch: one thread computes one output and looks for its expert; nothing is      not measured
                      copied, and the host waits for nobody
    3 tiles           a block has 64 x 64 outputs of one expert, and its warps find that together; each    not measured
                      float that is read serves 64 outputs (grouped_rows_kernel of llmc/ops/grouped_matmul.h,
                      the EXACT build's)
    4 tensor cores    bf16: 128 x 128 outputs, a warp multiplies 16 x 16 by 16 x 8 in one instruction      not measured
    5 two stages      the next tiles are copied while these are used. What fast builds use                 not measured
    6 backward        5's other two products: dinp, whose b lies the other way round, and dweight, whose   not measured
                      chains run along the rows of an expert; each has as many operations

The limits on an H200: float 67 TFLOP/s, bf16 989 TFLOP/s (with wgmma; mma, which runs on older cards too, reaches
less), memory 4.8 TB/s. In a build for sm_90a steps 5 and 6 are the kernels by wgmma (llmc/ops/grouped_hopper.h).
    make build/nvcc-sm_90-bf16/cuda/grouped_matmul && build/nvcc-sm_90-bf16/cuda/grouped_matmul
    under dev/simt (build/simt-fast/cuda/grouped_matmul): only the checks
*/
#include "llmc/ops/grouped_matmul.h"  // grouped_matmul_forward, ... and the parts of its kernels
#include "llmc/ops/matmul.h"          // matmul_forward
#include "llmc/test/test.h"           // bf16_array, to_device_as, check

// one layer in both precisions; the floats are bf16 values, so that one answer is right for all steps
typedef struct {
    int N, E, R, C, OC;
    float *inp, *weight, *out, *dweight;
    bf16 *inp_bf16, *copied_bf16, *weight_bf16, *out_bf16, *dinp_bf16;
    int *index, *offsets;
} Layer;

// ---- 1: rows are copied to where their expert's product wants them; the host calls one product after the other ----

// block is (WARP): 16 bytes a lane. C is a multiple of 8
__global__ void copy_rows_kernel(bf16* copied, const bf16* inp, const int* index, int C) {
    const bf16* from = inp + (size_t)index[blockIdx.x] * C;
    bf16* to = copied + (size_t)blockIdx.x * C;
    for (int c = threadIdx.x * 8; c < C; c += WARP * 8) { pack_store(to + c, pack_load<8>(from + c)); }
}

static void loop(const Layer* l, const Device* dev) {
    int* offsets = (int*)new_array((size_t)l->E + 1, sizeof(int));
    copy_rows_kernel<<<(unsigned)l->R, WARP, 0, dev->stream>>>(l->copied_bf16, l->inp_bf16, l->index, l->C);
    device_download(offsets, l->offsets, sizeof(int) * ((size_t)l->E + 1), dev);
    for (int e = 0; e < l->E; e++) {
        size_t s = (size_t)offsets[e];
        int n_rows = offsets[e + 1] - offsets[e];
        if (n_rows == 0) { continue; }
        matmul_forward(l->out_bf16 + s * l->OC, l->copied_bf16 + s * l->C, l->weight_bf16 + (size_t)e * l->OC * l->C,
                       NULL, n_rows, l->C, l->OC, dev);
    }
    free(offsets);
}

// ---- 2: one thread, one output ----

enum { OUTPUTS = 16 };

// block is (OUTPUTS, OUTPUTS)
__global__ void outputs_kernel(float* out, const float* inp, const int* index, const float* weight, const int* offsets,
                               int E, int R, int C, int OC) {
    int s = blockIdx.y * OUTPUTS + threadIdx.y, oc = blockIdx.x * OUTPUTS + threadIdx.x, e = 0;
    if (s >= R || oc >= OC) { return; }
    while (e < E && s >= offsets[e + 1]) { e++; }
    const float *x = inp + (size_t)index[s] * C, *w = weight + ((size_t)e * OC + oc) * C;
    float sum = 0.0f;
    for (int c = 0; c < C; c++) { sum += x[c] * w[c]; }
    out[(size_t)s * OC + oc] = sum;
}

static void outputs(const Layer* l, const Device* dev) {
    dim3 grid((unsigned)ceil_div(l->OC, OUTPUTS), (unsigned)ceil_div(l->R, OUTPUTS)), block(OUTPUTS, OUTPUTS);
    outputs_kernel<<<grid, block, 0, dev->stream>>>(l->out, l->inp, l->index, l->weight, l->offsets, l->E, l->R, l->C,
                                                    l->OC);
}

// ---- 3: in floats the op runs its kernel for CUDA cores ----

static void plain_tiles(const Layer* l, const Device* dev) {
    grouped_matmul_forward(l->out, l->inp, l->index, l->weight, l->offsets, l->E, l->R, l->C, l->OC, dev);
}

// ---- 4: the tiles of 5, but a block waits for its copies before it multiplies. C and OC are multiples of 8 ----

// block is (GROUPED_THREADS); grid as grouped_rows_mma_kernel's. shared memory: one pair of tiles
__global__ void __launch_bounds__(GROUPED_THREADS, 2)
tensor_cores_kernel(bf16* out, const bf16* inp, const int* index, const bf16* weight, const int* offsets, int E, int C,
                    int OC) {
    extern __shared__ __align__(128) bf16 pair[];
    __shared__ int row_of[GROUPED_TILE];
    int n_columns = (OC + GROUPED_TILE - 1) / GROUPED_TILE, oc = blockIdx.x % n_columns * GROUPED_TILE;
    int warp = threadIdx.x / WARP, m = warp / 2 * 64, n = warp % 2 * 64;
    GroupedTile rows = grouped_find_tile(offsets, E, GROUPED_TILE, blockIdx.x / n_columns);
    if (rows.n_rows == 0) { return; }
    const bf16* w = weight + ((size_t)rows.expert * OC + oc) * C;
    bf16 *a_tile = pair, *b_tile = pair + GROUPED_PAIR / 2;
    float sums[4][8][4];
    const float one[4][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}, {1.0f, 1.0f}};
    tile_set_zero(sums);
    grouped_find_rows_(row_of, GROUPED_TILE, index, rows);
    for (int c = 0; c < C; c += GROUPED_K) {
        grouped_tile_load_<GROUPED_TILE, GROUPED_K>(a_tile, inp, (size_t)C, row_of, c, C);
        tile_load<GROUPED_TILE, GROUPED_K, GROUPED_THREADS>(b_tile, w + c, (size_t)C, OC - oc, C - c);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        grouped_multiply_<0, 1>(sums, a_tile, b_tile, m, n);
        __syncthreads();
    }
    tile_store_rows<64>(out + (size_t)(rows.first + m) * OC + oc + n, (size_t)OC, rows.n_rows - m, OC - oc - n,
                        pair + warp * 64 * 64, 0, sums, one);
}

static void tensor_cores(const Layer* l, const Device* dev) {
    unsigned grid = (unsigned)(grouped_most_tiles(l->E, l->R, GROUPED_TILE) * ceil_div(l->OC, GROUPED_TILE));
    tensor_cores_kernel<<<grid, GROUPED_THREADS, GROUPED_PAIR * sizeof(bf16), dev->stream>>>(
        l->out_bf16, l->inp_bf16, l->index, l->weight_bf16, l->offsets, l->E, l->C, l->OC);
}

// ---- 5 and 6: the op ----

static void two_stages(const Layer* l, const Device* dev) {
    grouped_matmul_forward(l->out_bf16, l->inp_bf16, l->index, l->weight_bf16, l->offsets, l->E, l->R, l->C, l->OC,
                           dev);
}

static void backward_input(const Layer* l, const Device* dev) {
    grouped_matmul_backward_input(l->dinp_bf16, l->out_bf16, NULL, l->weight_bf16, l->offsets, l->E, l->R, l->C, l->OC,
                                  dev);
}

static void backward_weight(const Layer* l, const Device* dev) {
    grouped_matmul_backward_weight(l->dweight, l->out_bf16, NULL, l->inp_bf16, l->index, l->offsets, l->E, l->R, l->C,
                                   l->OC, dev);
}

// ---- check and time ----

typedef enum { OUT, OUT_BF16, NOT_CHECKED } Answer;  // where it is; test_grouped_matmul checks the gradients

typedef struct {
    const char* name;
    void (*run)(const Layer* l, const Device* dev);
    Answer answer;
} Step;

static const Step steps[] = {
    {"1 loop", loop, OUT_BF16},
    {"2 outputs", outputs, OUT},
    {"3 tiles", plain_tiles, OUT},
    {"4 tensor cores", tensor_cores, OUT_BF16},
    {"5 two stages", two_stages, OUT_BF16},
    {"6 backward_input", backward_input, NOT_CHECKED},
    {"6 backward_weight", backward_weight, NOT_CHECKED},
};
enum { N_STEPS = sizeof steps / sizeof *steps };

// tokens ascending in each expert, as the router's sort leaves them
static void route(int* offsets, int* index, int N, int E, int R) {
    for (int e = 0; e <= E; e++) {  // uneven: the first experts have few rows
        offsets[e] = (int)((int64_t)R * e * (e + E) / (2 * (int64_t)E * E));
    }
    for (int e = 0; e < E; e++) {
        int n = offsets[e + 1] - offsets[e];
        for (int i = 0; i < n; i++) { index[offsets[e] + i] = (int)((int64_t)i * N / n); }
    }
}

static Layer layer(const float* inp, const float* weight, const int* offsets, const int* index, int N, int E, int R,
                   int C, int OC, const Device* dev) {
    size_t n_inp = (size_t)N * (size_t)C, n_weight = (size_t)E * (size_t)OC * (size_t)C, n_out = (size_t)R * (size_t)OC;
    Layer l = {N, E, R, C, OC, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    l.inp = to_device(inp, n_inp, dev), l.inp_bf16 = to_device_as<bf16>(inp, n_inp, dev);
    l.weight = to_device(weight, n_weight, dev), l.weight_bf16 = to_device_as<bf16>(weight, n_weight, dev);
    l.out = (float*)device_alloc(sizeof(float) * n_out, "out");
    l.out_bf16 = (bf16*)device_alloc(sizeof(bf16) * n_out, "out");
    l.dweight = (float*)device_alloc(sizeof(float) * n_weight, "dweight");
    l.dinp_bf16 = (bf16*)device_alloc(sizeof(bf16) * (size_t)R * (size_t)C, "dinp");
    l.copied_bf16 = (bf16*)device_alloc(sizeof(bf16) * (size_t)R * (size_t)C, "copied rows");
    l.offsets = ints_to_device(offsets, (size_t)E + 1, dev), l.index = ints_to_device(index, (size_t)R, dev);
    return l;
}

static void layer_free(Layer* l) {
    device_drop(l->inp), device_drop(l->weight), device_drop(l->out), device_drop(l->dweight);
    device_drop(l->inp_bf16), device_drop(l->weight_bf16), device_drop(l->out_bf16), device_drop(l->dinp_bf16);
    device_drop(l->copied_bf16), device_drop(l->offsets), device_drop(l->index);
}

// the answer of a step, as floats
static void download(float* got, const Layer* l, Answer answer, const Device* dev) {
    size_t n_out = (size_t)l->R * (size_t)l->OC;
    bf16* stored = (bf16*)new_array(n_out, sizeof(bf16));
    device_download(got, l->out, sizeof(float) * n_out, dev);
    device_download(stored, l->out_bf16, sizeof(bf16) * n_out, dev);
    for (size_t i = 0; answer == OUT_BF16 && i < n_out; i++) { got[i] = (float)stored[i]; }
    free(stored);
}

// every step against the plain loop
static void check_steps(Test* t, int N, int E, int R, int C, int OC, const Device* dev) {
    size_t n_out = (size_t)R * (size_t)OC;
    float *inp = bf16_array((size_t)N * (size_t)C, 1.0f, 1),
          *weight = bf16_array((size_t)E * (size_t)OC * (size_t)C, 1.0f, 2);
    float *want = filled_array(n_out, NAN), *got = filled_array(n_out, NAN);
    int *offsets = (int*)new_array((size_t)E + 1, sizeof(int)), *index = (int*)new_array((size_t)R, sizeof(int));
    route(offsets, index, N, E, R);
    grouped_matmul_forward_ref(want, inp, index, weight, offsets, E, C, OC);
    Layer l = layer(inp, weight, offsets, index, N, E, R, C, OC, dev);
    for (int s = 0; s < N_STEPS; s++) {
        if (steps[s].answer != NOT_CHECKED) {
            device_zero(l.out, sizeof(float) * n_out, dev);
            device_zero(l.out_bf16, sizeof(bf16) * n_out, dev);
        }
        steps[s].run(&l, dev);
        cudaCheck(cudaGetLastError());
        if (steps[s].answer == NOT_CHECKED) { continue; }
        download(got, &l, steps[s].answer, dev);
        double worst = 0.0;
        for (size_t i = 0; i < n_out; i++) {
            double apart = fabs((double)got[i] - (double)want[i]);
            apart -= steps[s].answer == OUT_BF16 ? fabs((double)want[i]) * 0x1p-8 : 0.0;  // stored as bf16
            worst = apart <= worst || isnan(worst) ? worst : apart;  // the first NaN stays
        }
        double allowed = 2.0 * (C + 1) * C * 0x1p-24;  // C roundings of sums below C, in both
        check(t, worst <= allowed, "%s, N %d, E %d, R %d, C %d, OC %d: apart %.3g, allowed %.3g", steps[s].name, N, E,
              R, C, OC, worst, allowed);
    }
    layer_free(&l);
    free(inp), free(weight), free(want), free(got), free(offsets), free(index);
}

#ifndef SIMT
static void time_steps(int N, int E, int R, int C, int OC, const Device* dev) {
    float *inp = bf16_array((size_t)N * (size_t)C, 1.0f, 1),
          *weight = bf16_array((size_t)E * (size_t)OC * (size_t)C, 1.0f, 2);
    int *offsets = (int*)new_array((size_t)E + 1, sizeof(int)), *index = (int*)new_array((size_t)R, sizeof(int));
    route(offsets, index, N, E, R);
    Layer l = layer(inp, weight, offsets, index, N, E, R, C, OC, dev);
    for (int s = 0; s < N_STEPS; s++) {
        const double ms = device_milliseconds(s == 1 ? 2 : 20, dev, [&]() { steps[s].run(&l, dev); });
        printf("%-18s %8.3f ms %7.1f TFLOP/s\n", steps[s].name, ms, 2e-9 * R * C * OC / ms);
    }
    layer_free(&l);
    free(inp), free(weight), free(offsets), free(index);
}
#endif

int main(void) {
    Test t = {0, NULL};
    Device dev;
    device_choose(0);
    device_init(&dev, 0);
    check_steps(&t, 1, 1, 1, 8, 8, &dev);
    check_steps(&t, 70, 3, 210, 72, 136, &dev);
    check_steps(&t, 4, 40, 9, 16, 24, &dev);  // more experts than rows
    printf("%d steps, %d wrong\n", N_STEPS, t.n_failures);
#ifndef SIMT
    if (!t.n_failures) { time_steps(8192, 16, 32768, 768, 12288, &dev); }
#endif
    device_free(&dev);
    return t.n_failures > 0;
}
