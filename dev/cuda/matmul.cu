/*
The staircase of the linear layer: out (N, OC) = inp (N, C) * weight (OC, C)^T. Each step changes one thing; main checks
every step against matmul_forward_ref and, on a GPU, times it at N 8192, C 768, OC 3072: 38.7 GFLOP, a fully connected
layer of GPT-2 124M with 8 rows of 1024 tokens.

    step              what it changes                                                              on an H200
    1 outputs         one thread computes one output and reads 2*C floats for 2*C operations             not measured
    2 shared tiles    a block shares what it reads: each float is read once for 32 outputs               not measured
    3 register tiles  a thread computes 4 x 4 outputs: 8 loads of shared memory feed 16 products         not measured
                      (this is gemm of llmc/ops/gemm.h, the EXACT build's)
    4 vectors         8 x 8 outputs, 16 bytes a load, the next tile is fetched while this one is used    not measured
    5 tensor cores    bf16: a warp multiplies 16 x 16 by 16 x 8 in one instruction, copies run by        not measured
                      themselves
    6 cuBLASLt        NVIDIA's kernel for this shape and card: on Hopper it feeds tensor cores from      not measured
                      shared memory and has the copies done by a unit of their own. Fast builds use it

The limits on an H200: float 67 TFLOP/s, bf16 989 TFLOP/s, memory 4.8 TB/s. Here every float that comes from memory
could serve hundreds of products, so memory limits only the steps that fetch it again and again.
    make build/nvcc-sm_90-bf16/cuda/matmul && build/nvcc-sm_90-bf16/cuda/matmul
    under dev/simt: only the checks
*/
#include "llmc/ops/matmul.h"  // matmul_forward, matmul_forward_ref, gemm
#include "llmc/core/mma.h"    // mma_m16n8k16, ldmatrix_x4, cp_async_16_zfill
#include "llmc/test/test.h"   // filled_array, to_device_as, check

// the layer in both precisions; the floats are bf16 values, so that one answer is right for all steps
typedef struct {
    int N, C, OC;
    float *inp, *weight, *out;
    __nv_bfloat16 *inp_bf16, *weight_bf16, *out_bf16;
} Layer;

// ---- 1: one thread, one output. Lanes hold neighbouring oc, so a warp reads 32 rows of the weight, a whole row apart
//      each: 32 cache lines for 32 floats ----

enum { OUTPUTS = 16 };

// block is (OUTPUTS, OUTPUTS)
__global__ void outputs_kernel(float* out, const float* inp, const float* weight, int N, int C, int OC) {
    int n = blockIdx.y * OUTPUTS + threadIdx.y, oc = blockIdx.x * OUTPUTS + threadIdx.x;
    if (n >= N || oc >= OC) { return; }
    float sum = 0.0f;
    for (int c = 0; c < C; c++) { sum += inp[(size_t)n * C + c] * weight[(size_t)oc * C + c]; }
    out[(size_t)n * OC + oc] = sum;
}

static void outputs(const Layer* l, const Device* dev) {
    dim3 grid((unsigned)ceil_div(l->OC, OUTPUTS), (unsigned)ceil_div(l->N, OUTPUTS)), block(OUTPUTS, OUTPUTS);
    outputs_kernel<<<grid, block, 0, dev->stream>>>(l->out, l->inp, l->weight, l->N, l->C, l->OC);
}

// ---- 2: tiles in shared memory. A block of SIDE x SIDE threads fetches SIDE columns of both operands, then every
//      thread uses SIDE floats of each. The column more spreads a warp's reads down a column of the weight's tile over
//      32 banks ----

enum { SIDE = 32 };

// block is (SIDE, SIDE)
__global__ void shared_tiles_kernel(float* out, const float* inp, const float* weight, int N, int C, int OC) {
    __shared__ float inp_tile[SIDE][SIDE + 1];
    __shared__ float weight_tile[SIDE][SIDE + 1];
    int x = threadIdx.x, y = threadIdx.y, n = blockIdx.y * SIDE + y, oc = blockIdx.x * SIDE;
    float sum = 0.0f;
    for (int c = 0; c < C; c += SIDE) {
        __syncthreads();  // the tiles before these have been used
        inp_tile[y][x] = n < N && c + x < C ? inp[(size_t)n * C + c + x] : 0.0f;
        weight_tile[y][x] = oc + y < OC && c + x < C ? weight[(size_t)(oc + y) * C + c + x] : 0.0f;
        __syncthreads();
        for (int i = 0; i < SIDE && c + i < C; i++) { sum += inp_tile[y][i] * weight_tile[x][i]; }
    }
    if (n < N && oc + x < OC) { out[(size_t)n * OC + oc + x] = sum; }
}

static void shared_tiles(const Layer* l, const Device* dev) {
    dim3 grid((unsigned)ceil_div(l->OC, SIDE), (unsigned)ceil_div(l->N, SIDE)), block(SIDE, SIDE);
    shared_tiles_kernel<<<grid, block, 0, dev->stream>>>(l->out, l->inp, l->weight, l->N, l->C, l->OC);
}

// ---- 3: tiles in registers, any strides and types: the winner without tensor cores lives in llmc/ops/gemm.h ----

static void register_tiles(const Layer* l, const Device* dev) {
    Matrix a = gemm_matrix(l->inp, (size_t)l->C), b = gemm_transposed(l->weight, (size_t)l->C);
    gemm(l->out, (size_t)l->OC, NULL, 0, a, b, l->N, l->OC, l->C, dev);
}

// ---- 4: 8 x 8 outputs a thread, packs of 4 floats, two buffers. While a tile is multiplied, the next one is on its
//      way from memory into registers; then it goes into the other buffer, and one barrier a tile is enough. C is a
//      multiple of DEPTH ----

enum { VTILE = 128, DEPTH = 8, VTHREADS = 256, VROW = VTILE + 4 };
static_assert(VTILE * DEPTH == VTHREADS * 4, "each thread fetches one pack of each operand");

// this thread's pack of rows first.. at column c: row thread / 2, columns thread % 2 * 4 on; zeros beyond the last row
__device__ inline Pack<float, 4> fetch(const float* x, int first, int rows, int c, int C) {
    int row = first + threadIdx.x / 2;
    if (row < rows) { return pack_load<4>(x + (size_t)row * C + c + threadIdx.x % 2 * 4); }
    return Pack<float, 4>{{0.0f, 0.0f, 0.0f, 0.0f}};
}

__device__ inline void stash(float (&tile)[DEPTH][VROW], Pack<float, 4> pack) {
    for (int i = 0; i < 4; i++) { tile[threadIdx.x % 2 * 4 + i][threadIdx.x / 2] = pack.x[i]; }
}

// a thread's 8 rows (columns) of a tile: 4 from its own place on, and 4 half a tile further, so that a warp's packs lie
// side by side
__device__ inline void pick(float (&x)[8], const float* row, int place) {
    for (int i = 0; i < 8; i++) { x[i] = row[place + i % 4 + i / 4 * (VTILE / 2)]; }
}

// block is (VTHREADS)
__global__ void __launch_bounds__(VTHREADS, 2)
vectors_kernel(float* out, const float* inp, const float* weight, int N, int C, int OC) {
    __shared__ alignas(16) float inp_tiles[2][DEPTH][VROW];
    __shared__ alignas(16) float weight_tiles[2][DEPTH][VROW];
    int n0 = blockIdx.y * VTILE, oc0 = blockIdx.x * VTILE, n = threadIdx.x / 16 * 4, oc = threadIdx.x % 16 * 4;
    float sum[8][8] = {{0.0f}};
    stash(inp_tiles[0], fetch(inp, n0, N, 0, C));
    stash(weight_tiles[0], fetch(weight, oc0, OC, 0, C));
    __syncthreads();
    for (int c = 0, now = 0; c < C; c += DEPTH, now ^= 1) {
        int more = c + DEPTH < C;
        Pack<float, 4> next_inp, next_weight;
        if (more) { next_inp = fetch(inp, n0, N, c + DEPTH, C), next_weight = fetch(weight, oc0, OC, c + DEPTH, C); }
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            float a[8], b[8];
            pick(a, inp_tiles[now][i], n);
            pick(b, weight_tiles[now][i], oc);
            for (int j = 0; j < 64; j++) { sum[j / 8][j % 8] += a[j / 8] * b[j % 8]; }
        }
        if (more) { stash(inp_tiles[now ^ 1], next_inp), stash(weight_tiles[now ^ 1], next_weight); }
        __syncthreads();
    }
    #pragma unroll
    for (int j = 0; j < 64; j++) {
        int row = n0 + n + j / 8 % 4 + j / 32 * (VTILE / 2), column = oc0 + oc + j % 4 + j % 8 / 4 * (VTILE / 2);
        if (row < N && column < OC) { out[(size_t)row * OC + column] = sum[j / 8][j % 8]; }
    }
}

static void vectors(const Layer* l, const Device* dev) {
    dim3 grid((unsigned)ceil_div(l->OC, VTILE), (unsigned)ceil_div(l->N, VTILE));
    vectors_kernel<<<grid, VTHREADS, 0, dev->stream>>>(l->out, l->inp, l->weight, l->N, l->C, l->OC);
}

// ---- 5: tensor cores. Eight warps, 2 x 4, compute 64 x 32 outputs each out of a tile of 128 x 128; cp.async fills one
//      pair of tiles while the other is multiplied. Rows of a tile lie 80 bytes apart: the 8 rows that ldmatrix reads
//      at a time are then in 8 different 16-byte columns of the banks. C and OC are multiples of 8 ----

enum { MTILE = 128, MDEPTH = 32, MROW = MDEPTH + 8, MTHREADS = 256, WARP_M = 64, WARP_N = 32 };

// rows first.. and columns c.. of x (rows, C) into a tile, 16 bytes a copy; zeros beyond the last row and column
__device__ inline void copy_tile(__nv_bfloat16 (*tile)[MROW], const __nv_bfloat16* x, int first, int rows, int c,
                                 int C) {
    for (int i = threadIdx.x; i < MTILE * MDEPTH / 8; i += MTHREADS) {
        int row = i / (MDEPTH / 8), column = i % (MDEPTH / 8) * 8, valid = first + row < rows && c + column < C;
        cp_async_16_zfill(&tile[row][column], valid ? x + (size_t)(first + row) * C + c + column : x, valid ? 16 : 0);
    }
}

// sum[i][j]: rows 16*i.. and columns 8*j.. of this warp's outputs. a and b: its rows of the two tiles, from column k on
__device__ inline void multiply_tiles(float (&sum)[4][4][4], __nv_bfloat16 (*a)[MROW], __nv_bfloat16 (*b)[MROW],
                                      int k) {
    int lane = threadIdx.x % WARP;
    unsigned a_part[4][4], b_part[2][4];  // b_part: columns 16*j..: two registers for the first 8, two for the others
    for (int i = 0; i < 4; i++) { ldmatrix_x4(a_part[i], &a[16 * i + lane % 16][k + lane / 16 * 8]); }
    for (int j = 0; j < 2; j++) { ldmatrix_x4(b_part[j], &b[16 * j + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]); }
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            unsigned columns[2] = {b_part[j / 2][j % 2 * 2], b_part[j / 2][j % 2 * 2 + 1]};
            mma_m16n8k16(sum[i][j], a_part[i], columns, sum[i][j]);
        }
    }
}

// block is (MTHREADS)
__global__ void __launch_bounds__(MTHREADS, 2)
tensor_cores_kernel(__nv_bfloat16* out, const __nv_bfloat16* inp, const __nv_bfloat16* weight, int N, int C, int OC) {
    __shared__ alignas(16) __nv_bfloat16 inp_tiles[2][MTILE][MROW];
    __shared__ alignas(16) __nv_bfloat16 weight_tiles[2][MTILE][MROW];
    int n0 = blockIdx.y * MTILE, oc0 = blockIdx.x * MTILE, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int n = warp / 4 * WARP_M, oc = warp % 4 * WARP_N;  // this warp's first outputs in the tile
    float sum[4][4][4] = {{{0.0f}}};
    copy_tile(inp_tiles[0], inp, n0, N, 0, C);
    copy_tile(weight_tiles[0], weight, oc0, OC, 0, C);
    cp_async_commit();
    for (int c = 0, now = 0; c < C; c += MDEPTH, now ^= 1) {
        cp_async_wait<0>();
        __syncthreads();  // everybody's copies have arrived, and nobody uses the other tiles any more
        if (c + MDEPTH < C) {
            copy_tile(inp_tiles[now ^ 1], inp, n0, N, c + MDEPTH, C);
            copy_tile(weight_tiles[now ^ 1], weight, oc0, OC, c + MDEPTH, C);
            cp_async_commit();
        }
        #pragma unroll
        for (int k = 0; k < MDEPTH; k += 16) { multiply_tiles(sum, &inp_tiles[now][n], &weight_tiles[now][oc], k); }
    }
    #pragma unroll
    for (int i = 0; i < 32; i++) {  // two neighbouring outputs of tile i / 8, i / 2 % 4, upper or lower half
        int row = n0 + n + 16 * (i / 8) + lane / 4 + i % 2 * 8, column = oc0 + oc + 8 * (i / 2 % 4) + lane % 4 * 2;
        const float* pair = &sum[i / 8][i / 2 % 4][i % 2 * 2];
        Pack<__nv_bfloat16, 2> stored = {{from_float<__nv_bfloat16>(pair[0]), from_float<__nv_bfloat16>(pair[1])}};
        if (row < N && column < OC) { pack_store<2>(out + (size_t)row * OC + column, stored); }
    }
}

static void tensor_cores(const Layer* l, const Device* dev) {
    dim3 grid((unsigned)ceil_div(l->OC, MTILE), (unsigned)ceil_div(l->N, MTILE));
    tensor_cores_kernel<<<grid, MTHREADS, 0, dev->stream>>>(l->out_bf16, l->inp_bf16, l->weight_bf16, l->N, l->C,
                                                            l->OC);
}

// ---- 6: cuBLASLt, in both precisions, as fast builds call it (an EXACT build goes back to 3) ----

static void cublas_float(const Layer* l, const Device* dev) {
    matmul_forward(l->out, l->inp, l->weight, NULL, l->N, l->C, l->OC, dev);
}

static void cublas_bf16(const Layer* l, const Device* dev) {
    matmul_forward(l->out_bf16, l->inp_bf16, l->weight_bf16, NULL, l->N, l->C, l->OC, dev);
}

// ---- check and time ----

typedef struct {
    const char* name;
    void (*run)(const Layer* l, const Device* dev);
    int bf16;
} Step;

static const Step steps[] = {
    {"1 outputs", outputs, 0},
    {"2 shared tiles", shared_tiles, 0},
    {"3 register tiles", register_tiles, 0},
    {"4 vectors", vectors, 0},
    {"5 tensor cores", tensor_cores, 1},
    {"6 cuBLASLt, float", cublas_float, 0},
    {"6 cuBLASLt, bf16", cublas_bf16, 1},
};
enum { N_STEPS = sizeof steps / sizeof *steps };

static Layer layer(const float* inp, const float* weight, int N, int C, int OC, const Device* dev) {
    size_t n_inp = (size_t)N * (size_t)C, n_weight = (size_t)OC * (size_t)C, n_out = (size_t)N * (size_t)OC;
    Layer l = {N, C, OC, NULL, NULL, NULL, NULL, NULL, NULL};
    l.inp = to_device(inp, n_inp, dev), l.inp_bf16 = to_device_as<__nv_bfloat16>(inp, n_inp, dev);
    l.weight = to_device(weight, n_weight, dev), l.weight_bf16 = to_device_as<__nv_bfloat16>(weight, n_weight, dev);
    l.out = (float*)device_alloc(sizeof(float) * n_out, "out");
    l.out_bf16 = (__nv_bfloat16*)device_alloc(sizeof(__nv_bfloat16) * n_out, "out");
    return l;
}

static void layer_free(Layer* l) {
    device_drop(l->inp), device_drop(l->weight), device_drop(l->out);
    device_drop(l->inp_bf16), device_drop(l->weight_bf16), device_drop(l->out_bf16);
}

// every step against the plain loop
static void check_steps(Test* t, int N, int C, int OC, const Device* dev) {
    size_t n_out = (size_t)N * (size_t)OC;
    float *inp = bf16_array((size_t)N * (size_t)C, 1.0f, 1), *weight = bf16_array((size_t)OC * (size_t)C, 1.0f, 2);
    float *want = filled_array(n_out, NAN), *got = filled_array(n_out, NAN);
    matmul_forward_ref(want, inp, weight, NULL, N, C, OC);
    Layer l = layer(inp, weight, N, C, OC, dev);
    for (int s = 0; s < N_STEPS; s++) {
        device_zero(l.out, sizeof(float) * n_out, dev);
        device_zero(l.out_bf16, sizeof(__nv_bfloat16) * n_out, dev);
        steps[s].run(&l, dev);
        cudaCheck(cudaGetLastError());
        device_download(got, l.out, sizeof(float) * n_out, dev);
        __nv_bfloat16* got_bf16 = (__nv_bfloat16*)new_array(n_out, sizeof(__nv_bfloat16));
        device_download(got_bf16, l.out_bf16, sizeof(__nv_bfloat16) * n_out, dev);
        double worst = 0.0;
        for (size_t i = 0; i < n_out; i++) {
            double x = steps[s].bf16 ? (double)(float)got_bf16[i] : (double)got[i], apart = fabs(x - (double)want[i]);
            apart -= steps[s].bf16 ? fabs((double)want[i]) * 0x1p-8 : 0.0;  // stored as bf16
            worst = apart <= worst || isnan(worst) ? worst : apart;  // the first NaN stays
        }
        double allowed = 2.0 * (C + 1) * C * 0x1p-24;  // C roundings of sums below C, in both
        check(t, worst <= allowed, "%s, N %d, C %d, OC %d: apart %.3g, allowed %.3g", steps[s].name, N, C, OC, worst,
              allowed);
        free(got_bf16);
    }
    layer_free(&l);
    free(inp), free(weight), free(want), free(got);
}

#ifndef SIMT
static void time_steps(int N, int C, int OC, const Device* dev) {
    const int n_runs = 20;
    float *inp = bf16_array((size_t)N * (size_t)C, 1.0f, 1), *weight = bf16_array((size_t)OC * (size_t)C, 1.0f, 2);
    Layer l = layer(inp, weight, N, C, OC, dev);
    for (int s = 0; s < N_STEPS; s++) {
        const double ms = device_milliseconds(n_runs, dev, [&]() { steps[s].run(&l, dev); });
        printf("%-18s %8.3f ms %7.1f TFLOP/s\n", steps[s].name, ms, 2e-9 * N * C * OC / ms);
    }
    layer_free(&l);
    free(inp), free(weight);
}
#endif

int main(void) {
    Test t = {0, NULL};
    Device dev;
    device_choose(0);
    device_init(&dev, 0);
    check_steps(&t, 1, 8, 8, &dev);
    check_steps(&t, 129, 72, 136, &dev);
    printf("%d steps, %d wrong\n", N_STEPS, t.n_failures);
#ifndef SIMT
    if (!t.n_failures) { time_steps(8192, 768, 3072, &dev); }
#endif
    device_free(&dev);
    return t.n_failures > 0;
}
