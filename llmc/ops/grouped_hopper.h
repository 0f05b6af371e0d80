/*
Products of experts by wgmma, for Hopper (sm_90a): grouped_matmul.h calls it in a build with WGMMA, that of
make CUDA_ARCH=sm_90a. What it says of shapes, of the order of sums and of errors holds here too. Other than there:
    products    a block has 128 x 256 outputs, not 128 x 128: a warpgroup, four warps, has 64 of its rows, and both
                multiply with the same 256 columns. Tiles lie in shared memory as wide_tile.h says, and tensor cores
                read both operands there, transposed where terms are their rows
    copies      four stages of 64 terms: two are on their way while the products of two are under way
    rows        a warpgroup whose 64 rows do not exist multiplies nothing
Cost:   as there, but 85 operations for each byte that a block copies, not 64. A step of 64 terms is 48 KiB; its
        products take 1024 cycles of a multiprocessor. By ptxas of CUDA 13.0, without spills, registers of a thread:
        forward 170, backward_input 170, backward_weight 166: one block of eight warps and 192 KiB on a multiprocessor.
        No card has run these kernels.
Source: Thakkar et al. 2023, CUTLASS 3 (warpgroups that share a tile), without producer warps
*/
#ifndef LLMC_GROUPED_HOPPER_H
#define LLMC_GROUPED_HOPPER_H
#if defined(__CUDACC__) && defined(WGMMA)
#include "../core/kernel.h"  // WARP, Pack, pack_store, bf16, cudaCheck
#include "../core/wgmma.h"   // WARPGROUP, wgmma_ss, wgmma_fence, wgmma_commit, wgmma_wait, fence_proxy_async
#include "grouped_tiles.h"   // GroupedTile, grouped_find_tile_, grouped_most_tiles_, grouped_at_
#include "tile.h"            // tile_chunk, tile_set_zero
#include "wide_tile.h"       // wide_tile_load, wide_tile_store_rows

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "WGMMA is for sm_90a: make CUDA_ARCH=sm_90a"
#endif

enum { GROUPED_ROWS = 128, GROUPED_COLUMNS = 256, GROUPED_TERMS = 64 };  // outputs of a block, terms of a step
enum { GROUPED_STAGES = 4, GROUPED_AHEAD = 2 };                          // steps that are copied ahead
enum { GROUPED_LOADERS = 2 * WARPGROUP, GROUPED_ROW_STEP = GROUPED_LOADERS / 8 };  // all threads of a block
enum { GROUPED_A = GROUPED_ROWS * GROUPED_TERMS, GROUPED_STAGE = GROUPED_A + GROUPED_COLUMNS * GROUPED_TERMS };
static const int GROUPED_HOPPER_BYTES = GROUPED_STAGES * GROUPED_STAGE * (int)sizeof(bf16);
static_assert(GROUPED_AHEAD + 2 <= GROUPED_STAGES, "a stage is filled when nobody multiplies what was in it");

// ---- rows that lie anywhere: a thread copies the same chunk of rows threadIdx.x / 8 + 32 i ----

// from[i]: which row of x that of an operand's rows first .. end - 1 is; -1 for those beyond
template <int N>
__device__ inline void grouped_hopper_find_rows_(int (&from)[N], const int* index, int first, int end) {
    #pragma unroll
    for (int i = 0; i < N; i++) {
        int s = first + (int)threadIdx.x / 8 + i * GROUPED_ROW_STEP;
        from[i] = s < end ? (int)grouped_at_(index, s) : -1;
    }
}

// their W channels from c on, of C, are on their way to a wide tile; zeros for row -1 and beyond C
template <int W, int N>
__device__ inline void grouped_hopper_load_rows_(bf16* tile, const bf16* x, size_t x_row, const int (&from)[N], int c,
                                                 int C) {
    const int ROWS = N * GROUPED_ROW_STEP;
    int chunk = threadIdx.x % 8, channels = C - c - chunk * 8;
    tile = tile_chunk<64>(tile, threadIdx.x / 8, chunk);
    x += c + chunk * 8;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const bf16* row = x + (size_t)max(from[i], 0) * x_row;
        int n = from[i] >= 0 ? channels : 0;
        #pragma unroll
        for (int w = 0; w < W; w += 64) {
            cp_async_16_zfill(tile + w * ROWS + i * GROUPED_ROW_STEP * 64, row + w, w < n ? 16 : 0);
        }
    }
}

// ---- products ----

// this warp's warpgroup of the block: the compiler learns that all lanes have the same
__device__ inline int grouped_hopper_part_() { return __shfl_sync(ALL_LANES, (int)threadIdx.x / WARPGROUP, 0); }

// the steps along the terms, for the 64 rows of outputs of warpgroup `part`; has_rows: they exist. A_TURNED: the tile
// of a has terms as rows, otherwise as columns. B_TURNED: that of b has terms as columns, otherwise as rows. load(step,
// a_tile, b_tile) starts the copies of one
template <int A_TURNED, int B_TURNED, typename Load>
__device__ inline void grouped_hopper_sums_(float (&sums)[1][GROUPED_COLUMNS / 8][4], bf16* tiles, int n_steps,
                                            int part, bool has_rows, Load load) {
    uint64_t a = smem_descriptor(tiles + part * 64 * GROUPED_TERMS);  // 64 rows; turned, 64 columns: 8 KiB either way
    uint64_t b = smem_descriptor(tiles + GROUPED_A, B_TURNED ? 16 : GROUPED_TERMS * 128);
    auto load_stage = [&](int step) {
        bf16* stage = tiles + step % GROUPED_STAGES * GROUPED_STAGE;
        if (step < n_steps) { load(step, stage, stage + GROUPED_A); }
        cp_async_commit();
    };
    tile_set_zero(sums);
    for (int step = 0; step < GROUPED_AHEAD; step++) { load_stage(step); }
    wgmma_keep(sums);
    for (int step = 0; step < n_steps; step++) {
        cp_async_wait<GROUPED_AHEAD - 1>();
        fence_proxy_async();
        __syncthreads();  // this step's tiles have arrived, and nobody multiplies those of two steps before any more
        if (has_rows) {  // with its commit: one behind the branch would be a group more
            int at = step % GROUPED_STAGES * GROUPED_STAGE * (int)sizeof(bf16);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < GROUPED_TERMS; k += 16) {
                wgmma_ss<A_TURNED, !B_TURNED>(sums, smem_descriptor_at(a, at + (A_TURNED ? k * 128 : k * 2)),
                                              smem_descriptor_at(b, at + (B_TURNED ? k * 2 : k * 128)), 1);
            }
            wgmma_commit();
        }
        load_stage(step + GROUPED_AHEAD);
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    wgmma_keep(sums);
    cp_async_wait<0>();
    __syncthreads();
}

// as grouped_rows_mma_kernel. shared memory: stages, of each the tile of a, then that of b
template <int TURNED>
__global__ void __launch_bounds__(GROUPED_LOADERS, 1)
grouped_rows_hopper_kernel(bf16* out, size_t out_row, const bf16* x, size_t x_row, const int* index, const bf16* weight,
                           const int* offsets, int E, int K, int N) {
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    int n_columns = (N + GROUPED_COLUMNS - 1) / GROUPED_COLUMNS, n0 = blockIdx.x % n_columns * GROUPED_COLUMNS;
    int part = grouped_hopper_part_(), from[GROUPED_ROWS / GROUPED_ROW_STEP];
    GroupedTile rows = grouped_find_tile_(offsets, E, GROUPED_ROWS, blockIdx.x / n_columns);
    if (rows.n_rows == 0) { return; }
    const bf16* w = weight + (size_t)rows.expert * N * K;
    grouped_hopper_find_rows_(from, index, rows.first, rows.first + rows.n_rows);
    auto load = [&](int step, bf16* a_tile, bf16* b_tile) {
        int k = step * GROUPED_TERMS;
        grouped_hopper_load_rows_<GROUPED_TERMS>(a_tile, x, x_row, from, k, K);
        if (TURNED) {
            wide_tile_load<GROUPED_COLUMNS, GROUPED_TERMS, GROUPED_LOADERS>(b_tile, w + (size_t)n0 * K + k, (size_t)K,
                                                                            N - n0, K - k);
        } else {
            wide_tile_load<GROUPED_TERMS, GROUPED_COLUMNS, GROUPED_LOADERS>(b_tile, w + (size_t)k * N + n0, (size_t)N,
                                                                            K - k, N - n0);
        }
    };
    float sums[1][GROUPED_COLUMNS / 8][4];
    const float one[1][2] = {{1.0f, 1.0f}};
    grouped_hopper_sums_<0, TURNED>(sums, wide_tiles, (K + GROUPED_TERMS - 1) / GROUPED_TERMS, part,
                                    64 * part < rows.n_rows, load);
    wide_tile_store_rows<GROUPED_COLUMNS, GROUPED_ROWS>(out + rows.first * out_row + n0, out_row, rows.n_rows, N - n0,
                                                        wide_tiles, threadIdx.x / WARP * 16, sums, one);
}

// as grouped_weight_mma_kernel; which rows of the expert a step has is fetched a step ahead
static __global__ void __launch_bounds__(GROUPED_LOADERS, 1)
grouped_weight_hopper_kernel(float* dweight, const bf16* dout, size_t dout_row, const int* dout_index, const bf16* inp,
                             const int* inp_index, const int* offsets, int C, int OC) {
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    int n_columns = (C + GROUPED_COLUMNS - 1) / GROUPED_COLUMNS, n_rows = (OC + GROUPED_ROWS - 1) / GROUPED_ROWS;
    int c = blockIdx.x % n_columns * GROUPED_COLUMNS, oc = blockIdx.x / n_columns % n_rows * GROUPED_ROWS;
    int e = blockIdx.x / n_columns / n_rows, first = offsets[e], end = offsets[e + 1];
    int part = grouped_hopper_part_(), lane = threadIdx.x % WARP;
    int of_dout[GROUPED_TERMS / GROUPED_ROW_STEP], of_inp[GROUPED_TERMS / GROUPED_ROW_STEP];
    auto fetch_rows = [&](int step) {
        grouped_hopper_find_rows_(of_dout, dout_index, first + step * GROUPED_TERMS, end);
        grouped_hopper_find_rows_(of_inp, inp_index, first + step * GROUPED_TERMS, end);
    };
    auto load = [&](int step, bf16* a_tile, bf16* b_tile) {
        grouped_hopper_load_rows_<GROUPED_ROWS>(a_tile, dout, dout_row, of_dout, oc, OC);
        grouped_hopper_load_rows_<GROUPED_COLUMNS>(b_tile, inp, (size_t)C, of_inp, c, C);
        fetch_rows(step + 1);
    };
    float sums[1][GROUPED_COLUMNS / 8][4];
    fetch_rows(0);
    grouped_hopper_sums_<1, 0>(sums, wide_tiles, (end - first + GROUPED_TERMS - 1) / GROUPED_TERMS, part,
                               oc + 64 * part < OC, load);
    int row = oc + threadIdx.x / WARP * 16 + lane / 4, column = c + lane % 4 * 2;
    #pragma unroll
    for (int i = 0; i < GROUPED_COLUMNS / 4; i++) {  // two neighbouring outputs of sums[0][i / 2], upper or lower half
        const float* pair = &sums[0][i / 2][i % 2 * 2];
        Pack<float, 2> stored = {{pair[0], pair[1]}};
        int r = row + i % 2 * 8, n = column + i / 2 * 8;
        if (r < OC && n < C) { pack_store(dweight + ((size_t)e * OC + r) * C + n, stored); }
    }
}

// ---- launches ----

template <int TURNED>
static inline void grouped_hopper_rows(bf16* out, size_t out_row, const bf16* x, size_t x_row, const int* index,
                                       const bf16* weight, const int* offsets, int E, int R, int K, int N,
                                       const Device* dev) {
    cudaCheck(cudaFuncSetAttribute(grouped_rows_hopper_kernel<TURNED>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   GROUPED_HOPPER_BYTES));
    unsigned grid = (unsigned)(grouped_most_tiles_(E, R, GROUPED_ROWS) * ceil_div(N, GROUPED_COLUMNS));
    grouped_rows_hopper_kernel<TURNED><<<grid, GROUPED_LOADERS, GROUPED_HOPPER_BYTES, dev->stream>>>(
        out, out_row, x, x_row, index, weight, offsets, E, K, N);
    cudaCheck(cudaGetLastError());
}

static inline void grouped_hopper_weight(float* dweight, const bf16* dout, size_t dout_row, const int* dout_index,
                                         const bf16* inp, const int* inp_index, const int* offsets, int E, int C,
                                         int OC, const Device* dev) {
    cudaCheck(cudaFuncSetAttribute(grouped_weight_hopper_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   GROUPED_HOPPER_BYTES));
    unsigned grid = (unsigned)(E * ceil_div(OC, GROUPED_ROWS) * ceil_div(C, GROUPED_COLUMNS));
    grouped_weight_hopper_kernel<<<grid, GROUPED_LOADERS, GROUPED_HOPPER_BYTES, dev->stream>>>(
        dweight, dout, dout_row, dout_index, inp, inp_index, offsets, C, OC);
    cudaCheck(cudaGetLastError());
}
#endif  // WGMMA
#endif  // LLMC_GROUPED_HOPPER_H
