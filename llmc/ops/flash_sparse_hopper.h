/*
Sparse attention of sparse_attention.h by wgmma, for Hopper (sm_90a): flash_sparse.h calls it in a build with WGMMA,
that of make CUDA_ARCH=sm_90a, and says what it computes, of which shapes, and how far off. Other than there:
    forward     a warpgroup, four warps, has all heads. Above 128 channels two of them have half of the channels each:
                they tell each other their sums of scores, and both go on with the weights of all keys, in registers.
                Products of 16 keys are under way while the weights of the next 16 are made
    backward    one warpgroup has scores, the other one datt; each tells the other half of them, and makes weights and
                ds of half of the keys, two tiles whose rows are heads. Then a warpgroup has half of the channels: of
                dq, and of what keys are given, whose left operands, ds' and att', are in registers where d is above
                128: shared memory would be the limit. The next keys come meanwhile, in the place of those before
    mass        scores as in forward; a warpgroup then has half of the keys, a warp a quarter of their heads
Cost:   as there. By ptxas of CUDA 13.0, without spills; what fits on a multiprocessor at once; instructions that a warp
        issues for a chunk (make sass; of the warpgroup with fewer), and the cycles for which tensor cores are busy with
        a block's:
                              registers  shared memory   blocks of warps  chunk   instructions      tensor cores
            forward  d <= 128    145        49 KiB          3 of 4        64 keys     323                512
                     d <= 512    221       225 KiB          1 of 8        64 keys     422               2048
            backward d <= 128    128        81 KiB          2 of 8        64 keys     531               1280
                     d <= 512    255       225 KiB          1 of 8        64 keys    1256               5120
            mass     d <= 128     72        50 KiB          4 of 4        64 keys     349                256
                     d <= 512     92       226 KiB          1 of 8        64 keys     349               1024
        No card has run them; doc/gpu/deepseek_v4.md derives 60% of an H200's peak forward, 75% backward, 36% of mass.
*/
#ifndef LLMC_FLASH_SPARSE_HOPPER_H
#define LLMC_FLASH_SPARSE_HOPPER_H
#if defined(__CUDACC__) && defined(WGMMA)
#include "../core/kernel.h"      // WARP, ALL_LANES, LOG2_E, bf16, kernel_exp2, cudaCheck
#include "../core/wgmma.h"       // WARPGROUP, wgmma_ss, wgmma_rs, wgmma_fence, wgmma_commit, wgmma_wait, wgmma_keep
#include "flash_rows.h"          // FlashRow, flash_row_weights, flash_row_gradients
#include "flash_sparse_steps.h"  // FlashSparseChunk, FlashSparseGiven, flash_sparse_find, flash_sparse_given_at
#include "flash_steps.h"         // flash_hide, flash_scale_rows, FLASH_LN_2
#include "sparse_inputs.h"       // SparseInputsOf, SparseSeen, sparse_seen_
#include "tile.h"                // tile_chunk, tile_to_operands, tile_load_a_transposed, tile_quad_max, cp_async_...
#include "wide_tile.h"           // wide_tile_load, wide_tile_gather, wide_tile_arrived, wide_tile_product, ...

// keys of a chunk are on their way to a tile; zeros beyond the last one, and beyond d
template <int W, int THREADS, int KEYS>
__device__ inline void flash_sparse_hopper_load_(bf16* tile, const FlashSparseChunk<KEYS>& chunk, int d) {
    wide_tile_gather<W, KEYS, THREADS>(tile, [&](int i) { return WideRow{chunk.key[i], i < chunk.n ? d : 0}; });
    cp_async_commit();
}

// sums, of this warpgroup's channels, become those of all; told: a place for each warpgroup's
template <int WARPGROUPS, int N>
__device__ inline void flash_sparse_hopper_share_(float (&sums)[1][N][4], float4* told, int part) {
    if (WARPGROUPS == 1) { return; }
    float others[1][N][4];
    wide_tile_tell(told + part * N * WARPGROUP, sums);
    __syncthreads();
    wide_tile_hear(others, told + (1 - part) * N * WARPGROUP);
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) { sums[0][i / 4][i % 4] += others[0][i / 4][i % 4]; }
}

// ---- forward ----

// max: the largest scores of this lane's rows so far, times scale. total, its part of the sum of weights, shrinks to
// it, and what belonged to the largest before is to be multiplied by shrink: is that another number than 1?
template <int N>
__device__ inline bool flash_sparse_hopper_grow_(float (&shrink)[1][2], float (&max)[2], float (&total)[2],
                                                 const float (&scores)[1][N][4], float scale) {
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = -INFINITY;
        #pragma unroll
        for (int n = 0; n < N; n++) { top = fmaxf(top, fmaxf(scores[0][n][2 * half], scores[0][n][2 * half + 1])); }
        top = fmaxf(max[half], tile_quad_max(top) * scale);
        shrink[0][half] = kernel_exp2(max[half] - top);
        max[half] = top, total[half] *= shrink[0][half];
    }
    return shrink[0][0] != 1.0f || shrink[0][1] != 1.0f;
}

// sums += weights * keys: while the products of 16 keys are under way, the weights of the next are made
template <int W, int N>
__device__ inline void flash_sparse_hopper_weigh_(float (&sums)[1][W / 8][4], float (&total)[2],
                                                  float (&scores)[1][N][4], const float (&max)[2], float scale,
                                                  const bf16* keys) {
    const uint64_t b = smem_descriptor(keys, N * 8 * 128);
    unsigned p[N / 2][1][1][4];
    wgmma_keep(sums);
    #pragma unroll
    for (int k = 0; k < N / 2; k++) {
        float x[1][2][4];
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            x[0][i / 4][i % 4] = kernel_exp2(scores[0][2 * k + i / 4][i % 4] * scale - max[i % 4 / 2]);
            total[i % 4 / 2] += x[0][i / 4][i % 4];
        }
        tile_to_operands(p[k], x);
        wgmma_fence();
        wgmma_rs<1>(sums, p[k][0][0], smem_descriptor_at(b, k * 16 * 128), 1);
        wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_keep(sums);
}

// grid (N, tiles of heads). BLOCKS: of a multiprocessor. shared memory: queries, two stages of keys, what warpgroups
// tell each other, and where the keys of two chunks are
template <int W, int WARPGROUPS, int BLOCKS>
__global__ void __launch_bounds__(WARPGROUP * WARPGROUPS, BLOCKS)
flash_sparse_forward_hopper_kernel(bf16* out, float* max, float* inv, const float* sinks, SparseInputsOf<bf16> in) {
    const int HEADS = FLASH_SPARSE_HEADS, KEYS = FLASH_SPARSE_KEYS, TILE = KEYS * W, MINE = W / WARPGROUPS;
    const int THREADS = WARPGROUP * WARPGROUPS;
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    bf16 *q_tile = wide_tiles, *k_tile = q_tile + HEADS * W;
    float4* told = (float4*)(k_tile + 2 * TILE);
    FlashSparseChunk<KEYS>* chunks = (FlashSparseChunk<KEYS>*)(told + (WARPGROUPS - 1) * 2 * HEADS * KEYS / 4);
    const int part = WARPGROUPS == 1 ? 0 : wide_tile_warpgroup(), first = part * MINE;  // of this warpgroup's channels
    const int row = threadIdx.x / WARP % 4 * 16, lane = threadIdx.x % WARP, d = in.s.d;
    const int head = blockIdx.y * FLASH_SPARSE_HEADS, n_heads = min(FLASH_SPARSE_HEADS, in.s.H - head);
    const size_t rows = (size_t)blockIdx.x * in.s.H + head;
    const SparseSeen see = sparse_seen_(in, blockIdx.x);
    const bf16* my_queries = q_tile + first * HEADS;
    float sums[1][MINE / 8][4], scores[1][KEYS / 8][4], shrink[1][2], m[2], sum[2] = {0.0f, 0.0f};
    for (int i = 0; i < 2; i++) {
        const int h = row + 8 * i + lane / 4;
        m[i] = h < n_heads ? sinks[head + h] * LOG2_E : 0.0f;
    }
    tile_set_zero(sums);
    flash_sparse_find(chunks[0], in, see, 0);
    flash_sparse_find(chunks[1], in, see, KEYS);
    __syncthreads();
    wide_tile_load<HEADS, W, THREADS>(q_tile, in.q + rows * d, (size_t)d, n_heads, d);
    flash_sparse_hopper_load_<W, THREADS>(k_tile, chunks[0], d);
    for (int k0 = 0, stage = 0; k0 < see.n_keys; k0 += KEYS, stage ^= 1) {
        const bf16* my_keys = k_tile + stage * TILE + first * KEYS;
        wide_tile_arrived();  // and nobody multiplies the chunk before any more
        if (k0 + KEYS < see.n_keys) {
            flash_sparse_hopper_load_<W, THREADS>(k_tile + (stage ^ 1) * TILE, chunks[stage ^ 1], d);
        }
        flash_sparse_find(chunks[stage], in, see, k0 + 2 * KEYS);
        wgmma_fence();
        wide_tile_product_transposed<MINE, HEADS>(scores, my_queries, 0, my_keys);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(scores);
        flash_sparse_hopper_share_<WARPGROUPS>(scores, told, part);
        if (see.n_keys - k0 < KEYS) {
            const FlashRange exist = {0, see.n_keys - k0 - 1};
            for (int i = 0; i < 2; i++) { flash_hide(scores[0], i, exist, 0, -INFINITY); }
        }
        const float scale = in.s.scale * LOG2_E;
        const bool grew = flash_sparse_hopper_grow_(shrink, m, sum, scores, scale);
        if (__any_sync(ALL_LANES, grew)) { flash_scale_rows(sums, shrink); }
        flash_sparse_hopper_weigh_<MINE>(sums, sum, scores, m, scale, my_keys);
    }
    float factor[1][2];
    for (int i = 0; i < 2; i++) {
        const int h = row + 8 * i + lane / 4;
        const float sink = h < n_heads ? sinks[head + h] * LOG2_E : 0.0f;
        factor[0][i] = 1.0f / (tile_quad_sum(sum[i]) + kernel_exp2(sink - m[i]));
        if (part == 0 && lane % 4 == 0 && h < n_heads) {
            max[rows + h] = m[i] * FLASH_LN_2, inv[rows + h] = factor[0][i];
        }
    }
    __syncthreads();  // nobody multiplies queries any more
    wide_tile_store_rows<MINE, HEADS>(out + rows * d + first, (size_t)d, n_heads, d - first, q_tile + first * HEADS,
                                      row, sums, factor);
}

// ---- backward: positions ----

// this lane's two rows; without a head all weights are 0
__device__ inline void flash_sparse_hopper_rows_(FlashRow (&of)[2], const FlashRow* rows, int h, int n_heads) {
    #pragma unroll
    for (int i = 0; i < 2; i++, h += 8) {
        of[i] = {INFINITY, 0.0f};
        if (h < n_heads) { of[i] = rows[h]; }
    }
}

// Of all keys part 0 has scores, part 1 datt; from here on part 0 has both of the first half, part 1 of the second
template <int N>
__device__ inline void flash_sparse_hopper_swap_(float (&scores)[1][N][4], float (&datt)[1][N][4],
                                                 const float (&products)[1][2 * N][4], float4* told, int part) {
    float mine[1][N][4], other[1][N][4];
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        const float one = products[0][i / 4][i % 4], two = products[0][N + i / 4][i % 4];
        mine[0][i / 4][i % 4] = part ? two : one, other[0][i / 4][i % 4] = part ? one : two;
    }
    wide_tile_tell(told + part * N * WARPGROUP, other);
    wgmma_keep(mine);  // chosen here, so that the others need no registers any more
    __syncthreads();
    wide_tile_hear(other, told + (1 - part) * N * WARPGROUP);
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        const float own = mine[0][i / 4][i % 4], heard = other[0][i / 4][i % 4];
        scores[0][i / 4][i % 4] = part ? heard : own, datt[0][i / 4][i % 4] = part ? own : heard;
    }
}

// scores of n keys become weights
template <int N>
__device__ inline void flash_sparse_hopper_weights_(float (&x)[1][N][4], const FlashRow (&of)[2], int n, float scale) {
    if (n < 8 * N) {
        const FlashRange exist = {0, n - 1};
        for (int i = 0; i < 2; i++) { flash_hide(x[0], i, exist, 0, -INFINITY); }
    }
    flash_row_weights(x, of, scale * LOG2_E);
}

// ds as operands, from datt
template <int N>
__device__ inline void flash_sparse_hopper_gradients_(unsigned (&ds)[1][N / 2][4], const float (&att)[1][N][4],
                                                      float (&datt)[1][N][4], const FlashRow (&of)[2], float scale) {
    flash_row_gradients(datt, att, of);
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) { datt[0][i / 4][i % 4] *= scale; }
    tile_to_operands(ds, datt);
}

// operands of a warp's 16 rows, from `row` on, into columns 8 * first.. of a tile of 64
template <int K>
__device__ inline void flash_sparse_hopper_write_(bf16* tile, int row, int first, const unsigned (&p)[1][K][4]) {
    row += threadIdx.x % WARP / 4;
    #pragma unroll
    for (int i = 0; i < 4 * K; i++) {
        *(unsigned*)tile_pair_at<64>(tile, row + i % 2 * 8, first + i / 2) = p[0][i / 4][i % 4];
    }
}

// sums += x y: x (heads, KEYS), y (KEYS, W channels)
template <int W, int KEYS>
__device__ inline void flash_sparse_hopper_over_keys_(float (&sums)[1][W / 8][4], const bf16* x, const bf16* y) {
    const uint64_t a = smem_descriptor(x), b = smem_descriptor(y, KEYS * 128);
    #pragma unroll
    for (int k = 0; k < KEYS; k += 16) {
        wgmma_ss<0, 1>(sums, smem_descriptor_at(a, k * 2), smem_descriptor_at(b, k * 128), 1);
    }
}

// sums += x' y: x (heads, 64 keys), y (heads, 64 channels); ADD 0: sums =
template <int HEADS, int ADD>
__device__ inline void flash_sparse_hopper_over_heads_(float (&sums)[1][8][4], const bf16* x, const bf16* y) {
    const uint64_t a = smem_descriptor(x), b = smem_descriptor(y);
    #pragma unroll
    for (int k = 0; k < HEADS; k += 16) {
        wgmma_ss<1, 1>(sums, smem_descriptor_at(a, k * 128), smem_descriptor_at(b, k * 128), ADD || k > 0);
    }
}

// x' as operands, of a warp's 16 keys, from `row` on
template <int K>
__device__ inline void flash_sparse_hopper_turn_(unsigned (&p)[1][K][4], bf16* x, int row) {
    #pragma unroll
    for (int k = 0; k < K; k++) { tile_load_a_transposed<64>(p[0][k], x, 16 * k, row / 16); }
}

// ds' q + att' dout, of 64 keys of which n_keys exist, and of a warpgroup's W channels, to memory by way of `staged`,
// (64 keys, 64 channels): 64 channels go there while the next ones are multiplied, and meanwhile() is called while the
// first ones are. C channels exist, d are of a row
template <int W, int HEADS, typename Meanwhile>
__device__ inline void flash_sparse_hopper_give_(bf16* to, int n_keys, int d, int C, bf16* ds, const bf16* q, bf16* att,
                                                 const bf16* dout, bf16* staged, Meanwhile meanwhile) {
    const int row = threadIdx.x / WARP % 4 * 16, key = row + threadIdx.x % WARP / 8, chunk = threadIdx.x % 8;
    const float one[1][2] = {{1.0f, 1.0f}};
    auto copy = [&](int c) {
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const bool exists = key + i < n_keys && c + chunk * 8 < C;
            if (exists) { pack_store(to + c + (size_t)i * d, pack_load<8>(tile_chunk<64>(staged, key + i, chunk))); }
        }
    };
    const bool IN_REGISTERS = W > 64;  // ds' and att': shared memory is the limit, and there are registers for them
    unsigned by_q[1][HEADS / 16][4], by_dout[1][HEADS / 16][4];
    float sums[1][8][4];
    if (IN_REGISTERS) { flash_sparse_hopper_turn_(by_q, ds, row), flash_sparse_hopper_turn_(by_dout, att, row); }
    to += (size_t)key * d + chunk * 8;
    #pragma unroll
    for (int c = 0; c < W; c += 64) {
        wgmma_fence();
        if (IN_REGISTERS) {
            wide_tile_product<64>(sums, by_q, q + c * HEADS);
            wide_tile_product<64>(sums, by_dout, dout + c * HEADS, 1);
        } else {
            flash_sparse_hopper_over_heads_<HEADS, 0>(sums, ds, q + c * HEADS);
            flash_sparse_hopper_over_heads_<HEADS, 1>(sums, att, dout + c * HEADS);
        }
        wgmma_commit();
        if (c == 0) { meanwhile(); } else { copy(c - 64); }
        wgmma_wait<0>();
        wgmma_keep(sums);
        tile_set_rows<64>(staged, row, sums, one);
    }
    copy(W - 64);
}

// block is (2 * WARPGROUP), grid (positions, tiles of heads). shared memory: queries, dout, keys, weights and ds of
// these, what warpgroups tell each other, on its way to memory also what keys are given, and where the next keys are
template <int W, int BLOCKS>
__global__ void __launch_bounds__(2 * WARPGROUP, BLOCKS)
flash_sparse_backward_hopper_kernel(bf16* dq, const bf16* dout, const FlashRow* rows, SparseInputsOf<bf16> in,
                                    FlashSparseGiven given) {
    const int HEADS = FLASH_SPARSE_HEADS, KEYS = FLASH_SPARSE_KEYS, HALF = KEYS / 2, MINE = W / 2, N = HALF / 8;
    const int THREADS = 2 * WARPGROUP;
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    bf16 *q_tile = wide_tiles, *dout_tile = q_tile + HEADS * W, *k_tile = dout_tile + HEADS * W;
    bf16 *att_tile = k_tile + KEYS * W, *ds_tile = att_tile + HEADS * KEYS, *told_tile = ds_tile + HEADS * KEYS;
    float4* told = (float4*)told_tile;
    FlashSparseChunk<KEYS>* chunk = (FlashSparseChunk<KEYS>*)(told + 2 * HEADS * HALF / 4);
    const int part = wide_tile_warpgroup(), first = part * MINE;  // of this warpgroup's channels
    const int row = threadIdx.x / WARP % 4 * 16, h = row + threadIdx.x % WARP / 4, d = in.s.d;
    const int n = given.first + blockIdx.x, head = blockIdx.y * HEADS, n_heads = min(HEADS, in.s.H - head);
    const size_t first_row = (size_t)n * in.s.H + head;
    const SparseSeen see = sparse_seen_(in, n);
    const float one[1][2] = {{1.0f, 1.0f}};
    FlashRow of[2];
    flash_sparse_hopper_rows_(of, rows + first_row, h, n_heads);
    float sums[1][MINE / 8][4];
    flash_sparse_find(*chunk, in, see, 0);
    __syncthreads();
    wide_tile_load<HEADS, W, THREADS>(q_tile, in.q + first_row * d, (size_t)d, n_heads, d);
    wide_tile_load<HEADS, W, THREADS>(dout_tile, dout + first_row * d, (size_t)d, n_heads, d);
    flash_sparse_hopper_load_<W, THREADS>(k_tile, *chunk, d);
    tile_set_zero(sums);
    for (int k0 = 0; k0 < see.n_keys; k0 += KEYS) {
        // the first warpgroup has scores, the second datt; then each has half of the keys of both
        float products[1][2 * N][4], att[1][N][4], datt[1][N][4];
        unsigned operands[1][N / 2][4];
        wide_tile_arrived();
        flash_sparse_find(*chunk, in, see, k0 + KEYS);
        wgmma_fence();
        wide_tile_product_transposed<W, HEADS>(products, part ? dout_tile : q_tile, 0, k_tile);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(products);
        flash_sparse_hopper_swap_(att, datt, products, told, part);
        flash_sparse_hopper_weights_(att, of, see.n_keys - k0 - part * HALF, in.s.scale);
        tile_to_operands(operands, att);
        flash_sparse_hopper_write_(att_tile, row, part * N, operands);
        flash_sparse_hopper_gradients_(operands, att, datt, of, in.s.scale);
        flash_sparse_hopper_write_(ds_tile, row, part * N, operands);
        fence_proxy_async();
        __syncthreads();
        wgmma_keep(sums);
        wgmma_fence();
        flash_sparse_hopper_over_keys_<MINE, KEYS>(sums, ds_tile, k_tile + first * KEYS);
        wgmma_commit();
        auto load_next = [&] {
            wgmma_wait<1>();
            wgmma_keep(sums);
            __syncthreads();  // nobody multiplies these keys any more
            if (k0 + KEYS < see.n_keys) { flash_sparse_hopper_load_<W, THREADS>(k_tile, *chunk, d); }
        };
        bf16* to = flash_sparse_given_at(given, n, blockIdx.y, k0, d) + first;
        flash_sparse_hopper_give_<MINE, HEADS>(to, see.n_keys - k0, d, d - first, ds_tile, q_tile + first * HEADS,
                                               att_tile, dout_tile + first * HEADS, told_tile + part * HEADS * 64,
                                               load_next);
    }
    __syncthreads();  // nobody multiplies queries any more
    wide_tile_store_rows<MINE, HEADS>(dq + first_row * d + first, (size_t)d, n_heads, d - first, q_tile + first * HEADS,
                                      row, sums, one);
}

// ---- mass ----

// block is (WARPGROUP * WARPGROUPS), grid (N). A warpgroup adds the heads of its part of the keys. shared memory:
// queries, two stages of entries, what warpgroups tell each other, sums of each warp's heads, and where the entries of
// two chunks are
template <int W, int WARPGROUPS, int BLOCKS>
__global__ void __launch_bounds__(WARPGROUP * WARPGROUPS, BLOCKS)
flash_sparse_mass_hopper_kernel(float* mass, const float* max, const float* inv, SparseInputsOf<bf16> in, int goes_on) {
    const int HEADS = FLASH_SPARSE_HEADS, KEYS = FLASH_SPARSE_KEYS, TILE = KEYS * W, MINE = W / WARPGROUPS;
    const int THREADS = WARPGROUP * WARPGROUPS, COLUMNS = KEYS / 8 / WARPGROUPS;  // eights of them
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    bf16 *q_tile = wide_tiles, *k_tile = q_tile + HEADS * W;
    float4* told = (float4*)(k_tile + 2 * TILE);
    float* by_warp = (float*)(told + (WARPGROUPS - 1) * 2 * HEADS * KEYS / 4);
    FlashSparseChunk<KEYS>* chunks = (FlashSparseChunk<KEYS>*)(by_warp + 4 * KEYS);
    const int part = WARPGROUPS == 1 ? 0 : wide_tile_warpgroup(), first = part * MINE;
    const int warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP, n = blockIdx.x, d = in.s.d, topk = in.s.topk;
    const SparseSeen see = {n, 0, 0, sparse_list_length(in.chosen + (size_t)n * topk, topk)};
    float* to = mass + (size_t)n * topk;
    for (int k = threadIdx.x + (goes_on ? see.n_keys : 0); k < topk; k += THREADS) { to[k] = 0.0f; }
    for (int head = 0; see.n_keys > 0 && head < in.s.H; head += HEADS) {
        const int n_heads = min(HEADS, in.s.H - head);
        const size_t rows = (size_t)n * in.s.H + head;
        float scores[1][KEYS / 8][4];
        float level[2], factor[2];
        for (int i = 0; i < 2; i++) {
            const int h = 16 * warp + 8 * i + lane / 4;
            level[i] = h < n_heads ? max[rows + h] * LOG2_E : 0.0f, factor[i] = h < n_heads ? inv[rows + h] : 0.0f;
        }
        flash_sparse_find(chunks[0], in, see, 0);
        flash_sparse_find(chunks[1], in, see, KEYS);
        __syncthreads();
        wide_tile_load<HEADS, W, THREADS>(q_tile, in.q + rows * d, (size_t)d, n_heads, d);
        flash_sparse_hopper_load_<W, THREADS>(k_tile, chunks[0], d);
        for (int k0 = 0, stage = 0; k0 < see.n_keys; k0 += KEYS, stage ^= 1) {
            wide_tile_arrived();  // and nobody multiplies the chunk before any more
            if (k0 + KEYS < see.n_keys) {
                flash_sparse_hopper_load_<W, THREADS>(k_tile + (stage ^ 1) * TILE, chunks[stage ^ 1], d);
            }
            flash_sparse_find(chunks[stage], in, see, k0 + 2 * KEYS);
            wgmma_fence();
            wide_tile_product_transposed<MINE, HEADS>(scores, q_tile + first * HEADS, 0,
                                                      k_tile + stage * TILE + first * KEYS);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_keep(scores);
            flash_sparse_hopper_share_<WARPGROUPS>(scores, told, part);
            #pragma unroll
            for (int i = 0; i < 2 * COLUMNS; i++) {
                float sum = 0.0f;
                #pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float mine = scores[0][i / 2][2 * half + i % 2];
                    const float other = scores[0][(i / 2 + COLUMNS) % (KEYS / 8)][2 * half + i % 2];
                    const float weight = kernel_exp2((part ? other : mine) * (in.s.scale * LOG2_E) - level[half]);
                    sum += weight * factor[half];
                }
                for (int step = 4; step < WARP; step *= 2) { sum += __shfl_xor_sync(ALL_LANES, sum, step); }
                if (lane < 4) { by_warp[warp * KEYS + 8 * (part * COLUMNS + i / 2) + 2 * lane + i % 2] = sum; }
            }
            __syncthreads();
            const int k = threadIdx.x;
            if (k < min(KEYS, see.n_keys - k0)) {
                to[k0 + k] += by_warp[k] + by_warp[KEYS + k] + by_warp[2 * KEYS + k] + by_warp[3 * KEYS + k];
            }
        }
    }
}

// ---- launches ----

// of forward and mass alike
template <int W, int WARPGROUPS>
static inline size_t flash_sparse_hopper_bytes_() {
    const size_t n_told = (WARPGROUPS - 1) * 2 * FLASH_SPARSE_HEADS * FLASH_SPARSE_KEYS;
    return sizeof(bf16) * W * (FLASH_SPARSE_HEADS + 2 * FLASH_SPARSE_KEYS) + sizeof(float) * n_told +
           2 * sizeof(FlashSparseChunk<FLASH_SPARSE_KEYS>);
}

template <int W, int WARPGROUPS, int BLOCKS>
static inline void flash_sparse_hopper_forward_(bf16* out, float* max, float* inv, const float* sinks,
                                                const SparseInputsOf<bf16>& in, const Device* dev) {
    const size_t n_bytes = flash_sparse_hopper_bytes_<W, WARPGROUPS>();
    const dim3 grid((unsigned)in.s.N, (unsigned)ceil_div(in.s.H, FLASH_SPARSE_HEADS));
    cudaCheck(cudaFuncSetAttribute(flash_sparse_forward_hopper_kernel<W, WARPGROUPS, BLOCKS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes));
    flash_sparse_forward_hopper_kernel<W, WARPGROUPS, BLOCKS>
        <<<grid, WARPGROUP * WARPGROUPS, n_bytes, dev->stream>>>(out, max, inv, sinks, in);
    cudaCheck(cudaGetLastError());
}

static inline void flash_sparse_hopper_forward(bf16* out, float* max, float* inv, const float* sinks,
                                               const SparseInputsOf<bf16>& in, const Device* dev) {
    if (in.s.d <= 128) { flash_sparse_hopper_forward_<128, 1, 3>(out, max, inv, sinks, in, dev); }
    else { flash_sparse_hopper_forward_<512, 2, 1>(out, max, inv, sinks, in, dev); }
}

template <int W, int WARPGROUPS, int BLOCKS>
static inline void flash_sparse_hopper_mass_(float* mass, const float* max, const float* inv,
                                             const SparseInputsOf<bf16>& in, int goes_on, const Device* dev) {
    const size_t n_bytes = flash_sparse_hopper_bytes_<W, WARPGROUPS>() + sizeof(float) * 4 * FLASH_SPARSE_KEYS;
    cudaCheck(cudaFuncSetAttribute(flash_sparse_mass_hopper_kernel<W, WARPGROUPS, BLOCKS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes));
    flash_sparse_mass_hopper_kernel<W, WARPGROUPS, BLOCKS>
        <<<(unsigned)in.s.N, WARPGROUP * WARPGROUPS, n_bytes, dev->stream>>>(mass, max, inv, in, goes_on);
    cudaCheck(cudaGetLastError());
}

static inline void flash_sparse_hopper_mass(float* mass, const float* max, const float* inv,
                                            const SparseInputsOf<bf16>& in, int goes_on, const Device* dev) {
    if (in.s.d <= 128) { flash_sparse_hopper_mass_<128, 1, 4>(mass, max, inv, in, goes_on, dev); }
    else { flash_sparse_hopper_mass_<512, 2, 1>(mass, max, inv, in, goes_on, dev); }
}

template <int W, int BLOCKS>
static inline void flash_sparse_hopper_give_to_(bf16* dq, const bf16* dout, const FlashRow* rows,
                                                const SparseInputsOf<bf16>& in, const FlashSparseGiven& given,
                                                const Device* dev) {
    const int HEADS = FLASH_SPARSE_HEADS, KEYS = FLASH_SPARSE_KEYS;
    const size_t n_bytes = sizeof(bf16) * (W * (2 * HEADS + KEYS) + 2 * HEADS * KEYS) + sizeof(float) * HEADS * KEYS +
                           sizeof(FlashSparseChunk<FLASH_SPARSE_KEYS>);
    const dim3 grid((unsigned)(given.end - given.first), (unsigned)given.tiles);
    cudaCheck(cudaFuncSetAttribute(flash_sparse_backward_hopper_kernel<W, BLOCKS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes));
    flash_sparse_backward_hopper_kernel<W, BLOCKS>
        <<<grid, 2 * WARPGROUP, n_bytes, dev->stream>>>(dq, dout, rows, in, given);
    cudaCheck(cudaGetLastError());
}

static inline void flash_sparse_hopper_give(bf16* dq, const bf16* dout, const FlashRow* rows,
                                            const SparseInputsOf<bf16>& in, const FlashSparseGiven& given,
                                            const Device* dev) {
    if (in.s.d <= 128) { flash_sparse_hopper_give_to_<128, 2>(dq, dout, rows, in, given, dev); }
    else { flash_sparse_hopper_give_to_<512, 1>(dq, dout, rows, in, given, dev); }
}
#endif  // WGMMA
#endif  // LLMC_FLASH_SPARSE_HOPPER_H
