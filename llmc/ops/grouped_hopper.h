/*
Products of experts by wgmma, for Hopper (sm_90a): grouped_matmul.h calls it in a build with WGMMA, that of
make CUDA_ARCH=sm_90a. What it says of shapes, of the order of sums and of errors holds here too. Other than there:
    products    a block has 128 x 256 outputs, not 128 x 128: a warpgroup, four warps, has 64 of its rows, and both
                multiply with the same 256 columns. Tiles lie in shared memory as wide_tile.h says, and tensor cores
                read both operands there, transposed where terms are their rows
    copies      four stages of 64 terms: two are on their way while the products of two are under way
    rows        a warpgroup whose 64 rows do not exist multiplies nothing
    fp8         where every 64 x 64 of a weight has one scale, its codes become bf16 in registers on their way into a
                tile: the bits of widen.h, whose room is not used
Cost:   as there, but 85 operations for each byte that a block copies, not 64; with fp8 128. A step of 64 terms is 48
        KiB, with fp8 32, and its products take 1024 cycles of a multiprocessor, while each of four schedulers issues
        the instructions of two warps: 147 of each in forward, 144 in backward_input, with fp8 414 and 387, 142 in
        backward_weight (make sass). By ptxas of CUDA 13.0, without spills, registers of a thread, in the same order:
        170, 170, 255, 254, 166: one block of eight warps and 192 KiB on a multiprocessor. No card has run them.
Source: Thakkar et al. 2023, CUTLASS 3 (warpgroups that share a tile), without producer warps
*/
#ifndef LLMC_GROUPED_HOPPER_H
#define LLMC_GROUPED_HOPPER_H
#if defined(__CUDACC__) && defined(WGMMA)
#include "../core/kernel.h"  // WARP, Pack, pack_load, pack_store, bf16, cudaCheck
#include "../core/stored.h"  // StoredMatrix, stored_row_scales, fp8_widen
#include "../core/wgmma.h"   // WARPGROUP, wgmma_ss, wgmma_fence, wgmma_commit, wgmma_wait
#include "grouped_tiles.h"   // GroupedTile, grouped_find_tile, grouped_most_tiles, grouped_at
#include "tile.h"            // tile_chunk, tile_pair_, tile_set_zero
#include "wide_tile.h"       // wide_tile_load, wide_tile_arrived, wide_tile_store_rows, wide_tile_warpgroup

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
        from[i] = s < end ? (int)grouped_at(index, s) : -1;
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

// the steps along the terms, for the 64 rows of outputs of warpgroup `part`; has_rows: they exist. A_TURNED: the tile
// of a has terms as rows, otherwise as columns. B_TURNED: that of b has terms as columns, otherwise as rows. load(step,
// stage) starts the copies of one, n_loads times: that of a step, and of what it leaves for the next call
template <int A_TURNED, int B_TURNED, typename Load>
__device__ inline void grouped_hopper_sums_(float (&sums)[1][GROUPED_COLUMNS / 8][4], bf16* tiles, int n_steps,
                                            int n_loads, int part, bool has_rows, Load load) {
    uint64_t a = smem_descriptor(tiles + part * 64 * GROUPED_TERMS);  // 64 rows; turned, 64 columns: 8 KiB either way
    uint64_t b = smem_descriptor(tiles + GROUPED_A, B_TURNED ? 16 : GROUPED_TERMS * 128);
    auto load_stage = [&](int step) {
        if (step < n_loads) { load(step, tiles + step % GROUPED_STAGES * GROUPED_STAGE); }
        cp_async_commit();
    };
    tile_set_zero(sums);
    for (int step = 0; step < GROUPED_AHEAD; step++) { load_stage(step); }
    wgmma_keep(sums);
    for (int step = 0; step < n_steps; step++) {
        wide_tile_arrived<GROUPED_AHEAD - 1>();  // and nobody multiplies the tiles of two steps before any more
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

// ---- the tile of b: rows n0.. of a weight (N, K) turned (TURNED), or columns n0.. of a weight (K, N) ----

// of bf16, by cp.async
template <int TURNED>
struct GroupedHalves {
    enum { LATER = 0 };
    const bf16* w;
    int n0, K, N;
    __device__ inline GroupedHalves(const bf16* weight, int expert, int n0_, int K_, int N_)
        : w(weight + (size_t)expert * N_ * K_), n0(n0_), K(K_), N(N_) {}

    __device__ inline void load(bf16* tiles, int step) {
        int k = step * GROUPED_TERMS;
        bf16* tile = tiles + step % GROUPED_STAGES * GROUPED_STAGE + GROUPED_A;
        if (TURNED) {
            wide_tile_load<GROUPED_COLUMNS, GROUPED_TERMS, GROUPED_LOADERS>(tile, w + (size_t)n0 * K + k, (size_t)K,
                                                                            N - n0, K - k);
        } else {
            wide_tile_load<GROUPED_TERMS, GROUPED_COLUMNS, GROUPED_LOADERS>(tile, w + (size_t)k * N + n0, (size_t)N,
                                                                            K - k, N - n0);
        }
    }
};

// two codes of fp8 times their scale, rounded as widen.h does it, the first in the lower half
__device__ inline unsigned grouped_hopper_widen_(unsigned codes, float scale) {
#ifdef SIMT
    return tile_pair_(fp8_widen((uint8_t)codes) * scale, fp8_widen((uint8_t)(codes >> 8)) * scale);
#else
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)codes));  // exact, also of NaN
    __half2 pair;
    memcpy(&pair, &halves, sizeof pair);
    const float2 x = __half22float2(pair);
    return tile_pair_(x.x * scale, x.y * scale);
#endif
}

// of codes of fp8: a thread has 16 neighbours of row threadIdx.x / 4 of each of the tile's four blocks of 64 x 64, of
// which each has one scale. They wait in registers until the next step's are asked for, and are then widened into the
// tile. Steps are loaded one after the other
template <int TURNED>
struct GroupedCodes {
    enum { LATER = 1 };  // what the last step asked for is widened by one load more
    const StoredMatrix& m;
    const uint8_t* at;       // this thread's first code of the step
    const float* scales[4];  // of the rows of each block; not turned, all have those of scales[0]
    int n0, blocks_of_row, shift, row_of_part;  // shift: 1 << shift columns share a scale
    Pack<unsigned, 4> codes[4];
    float scale[4];

    __device__ inline GroupedCodes(const StoredMatrix& weight, int expert, int n0_, int, int) : m(weight), n0(n0_) {
        int first = expert * m.rows, row = threadIdx.x / 4, column = threadIdx.x % 4 * 16;
        at = (const uint8_t*)m.data + (size_t)(first + row) * m.columns + column;
        at += TURNED ? (size_t)n0 * m.columns : (size_t)n0;
        for (int j = 0; j < 4; j++) { scales[j] = stored_row_scales(&m, first + (TURNED ? n0 + 64 * j : 0)); }
        shift = m.block_columns == 128 ? 7 : 6;
        blocks_of_row = stored_blocks(m.columns, m.block_columns), row_of_part = 0;
    }

    __device__ inline void load(bf16* tiles, int step) {
        if (step > 0) { widen(tiles + (step - 1) % GROUPED_STAGES * GROUPED_STAGE + GROUPED_A); }
        int k = step * GROUPED_TERMS, row = threadIdx.x / 4, column = threadIdx.x % 4 * 16;
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = TURNED ? n0 + 64 * j : k, c = TURNED ? k : n0 + 64 * j;
            codes[j] = {{0, 0, 0, 0}}, scale[j] = 0.0f;
            if (r < m.rows && c < m.columns) { scale[j] = scales[TURNED ? j : 0][c >> shift]; }
            if (r + row < m.rows && c + column < m.columns) {
                codes[j] = pack_load<4>((const unsigned*)(at + 64 * j * (TURNED ? (size_t)m.columns : 1)));
            }
        }
        at += GROUPED_TERMS * (TURNED ? 1 : (size_t)m.columns);
        if (!TURNED) {  // the next 64 rows: of the next part, or block, or the same
            row_of_part = row_of_part + 64 == m.part_rows ? 0 : row_of_part + 64;
            scales[0] += (row_of_part & (m.block_rows - 1)) == 0 ? blocks_of_row : 0;
        }
    }

    __device__ inline void widen(bf16* tile) const {
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                Pack<unsigned, 4> x;
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    unsigned two = codes[j].x[half * 2 + i / 2] >> i % 2 * 16;
                    x.x[i] = grouped_hopper_widen_(two & 0xffff, scale[j]);
                }
                pack_store((unsigned*)tile_chunk<64>(tile + j * 64 * 64, threadIdx.x / 4, threadIdx.x % 4 * 2 + half),
                           x);
            }
        }
    }
};

template <int TURNED>
__device__ inline GroupedHalves<TURNED> grouped_hopper_b_(const bf16* weight, int expert, int n0, int K, int N) {
    return {weight, expert, n0, K, N};
}
template <int TURNED>
__device__ inline GroupedCodes<TURNED> grouped_hopper_b_(const StoredMatrix& weight, int expert, int n0, int K, int N) {
    return {weight, expert, n0, K, N};
}

// as grouped_rows_mma_kernel. Weight: const bf16* or, of fp8, StoredMatrix. shared memory: stages, of each the tile of
// a, then that of b
template <int TURNED, typename Weight>
__global__ void __launch_bounds__(GROUPED_LOADERS, 1)
grouped_rows_hopper_kernel(bf16* out, size_t out_row, const bf16* x, size_t x_row, const int* index, Weight weight,
                           const int* offsets, int E, int K, int N) {
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    int n_columns = (N + GROUPED_COLUMNS - 1) / GROUPED_COLUMNS, n0 = blockIdx.x % n_columns * GROUPED_COLUMNS;
    int part = wide_tile_warpgroup(), from[GROUPED_ROWS / GROUPED_ROW_STEP];
    GroupedTile rows = grouped_find_tile(offsets, E, GROUPED_ROWS, blockIdx.x / n_columns);
    if (rows.n_rows == 0) { return; }
    auto b = grouped_hopper_b_<TURNED>(weight, rows.expert, n0, K, N);
    grouped_hopper_find_rows_(from, index, rows.first, rows.first + rows.n_rows);
    auto load = [&](int step, bf16* a_tile) {
        grouped_hopper_load_rows_<GROUPED_TERMS>(a_tile, x, x_row, from, step * GROUPED_TERMS, K);
        b.load(wide_tiles, step);
    };
    float sums[1][GROUPED_COLUMNS / 8][4];
    const float one[1][2] = {{1.0f, 1.0f}};
    int n_steps = (K + GROUPED_TERMS - 1) / GROUPED_TERMS;
    grouped_hopper_sums_<0, TURNED>(sums, wide_tiles, n_steps, n_steps + b.LATER, part, 64 * part < rows.n_rows, load);
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
    int part = wide_tile_warpgroup(), lane = threadIdx.x % WARP;
    int of_dout[GROUPED_TERMS / GROUPED_ROW_STEP], of_inp[GROUPED_TERMS / GROUPED_ROW_STEP];
    auto fetch_rows = [&](int step) {
        grouped_hopper_find_rows_(of_dout, dout_index, first + step * GROUPED_TERMS, end);
        grouped_hopper_find_rows_(of_inp, inp_index, first + step * GROUPED_TERMS, end);
    };
    auto load = [&](int step, bf16* stage) {
        grouped_hopper_load_rows_<GROUPED_ROWS>(stage, dout, dout_row, of_dout, oc, OC);
        grouped_hopper_load_rows_<GROUPED_COLUMNS>(stage + GROUPED_A, inp, (size_t)C, of_inp, c, C);
        fetch_rows(step + 1);
    };
    float sums[1][GROUPED_COLUMNS / 8][4];
    int n_steps = (end - first + GROUPED_TERMS - 1) / GROUPED_TERMS;
    fetch_rows(0);
    grouped_hopper_sums_<1, 0>(sums, wide_tiles, n_steps, n_steps, part, oc + 64 * part < OC, load);
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

template <int TURNED, typename Weight>
static inline void grouped_hopper_rows(bf16* out, size_t out_row, const bf16* x, size_t x_row, const int* index,
                                       Weight weight, const int* offsets, int E, int R, int K, int N,
                                       const Device* dev) {
    cudaCheck(cudaFuncSetAttribute(grouped_rows_hopper_kernel<TURNED, Weight>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, GROUPED_HOPPER_BYTES));
    unsigned grid = (unsigned)(grouped_most_tiles(E, R, GROUPED_ROWS) * ceil_div(N, GROUPED_COLUMNS));
    grouped_rows_hopper_kernel<TURNED, Weight><<<grid, GROUPED_LOADERS, GROUPED_HOPPER_BYTES, dev->stream>>>(
        out, out_row, x, x_row, index, weight, offsets, E, K, N);
    cudaCheck(cudaGetLastError());
}

// does every 64 x 64 of the matrix have one scale, and can 16 codes be loaded at once? A block has 128 or what divides
// it (stored.h)
static inline int grouped_hopper_reads_codes(const StoredMatrix* m) {
    const int whole = m->part_rows % 64 == 0 && m->block_rows % 64 == 0 && m->block_columns % 64 == 0;
    return m->kind == STORED_FP8 && whole && m->columns % 16 == 0 && (uintptr_t)m->data % 16 == 0;
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
