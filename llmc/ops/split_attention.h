/*
Attention of attention.h for one new position against a long cache, as generation has it: fast CUDA builds, bf16, on
tensor cores. flash_attention.h gives a block one head of q; with one query it would compute 64 or 128 rows of which one
exists, in as many blocks as there are heads, and read a key once for each head that shares it. Here
    a block    is one warp. It has a *split*, some neighbouring keys, of one head of k and v, and the query heads that
               read it, up to 16 of them as the rows of an mma: a key and its value are read once for all. What it finds
               goes to scratch: of each row the largest score, the sum of exponentials and the sum of values, as in
               flash_attention.h before its division
    a merge    follows: each head's splits, scaled to the largest of their maxima, are added in an order that does not
               depend on which block was first
attention.h calls it for one query of more than SPLIT_KEYS keys, where flash_attention.h could do it too.
Cost:   memory bound: 4*HS bytes for each key that is seen and each head of k and v, read once (for a group of more than
        16 heads once for each 16); judge it in GB/s. For B = 1, one head of k and v, HS 128 and 32768 keys that is
        16 MiB, where 12 query heads for themselves ask for 192. As many splits as give each multiprocessor
        SPLIT_BLOCKS blocks, none shorter than SPLIT_KEYS; a block has 16 KiB of keys and values under way while it
        computes with as many. Scratch: 4*(HS + 2) bytes for each head and split, written and read once: with these 12
        heads, on 132 multiprocessors, 256 splits of 128 keys, 1.5 MiB. By ptxas of CUDA 13.0, without spills,
        registers of a thread on sm_80, sm_90: HS <= 64 142, 138, HS <= 128 167, 168; a block has 36 KiB of shared
        memory at most.
Error:  as flash_attention.h. Keys that the query does not see are not read: an Inf or NaN there reaches nothing.
Order:  a split chains over its tiles of keys, ascending, 16 keys in a mma. In the merge each of eight warps adds every
        eighth split, ascending, then warps are added in order. The splits follow from the shape and the number of
        multiprocessors: the same machine gives the same bits. EXACT builds, where a softmax is one chain over all
        keys, keep the kernel of attention.h.
Source: Dao et al. 2023, "Flash-Decoding for long-context inference", for the splits; groups: Ainslie et al. 2023,
        arXiv:2305.13245
*/
#ifndef LLMC_SPLIT_ATTENTION_H
#define LLMC_SPLIT_ATTENTION_H
#if defined(__CUDACC__) && !defined(EXACT)
#include "flash_attention.h"  // flash_fits, FLASH_CHANNELS; of flash_steps.h: flash_softmax_step
#include "tile.h"             // tile_load, tile_add_product, tile_quad_sum

enum {
    SPLIT_KEYS = 64,    // the fewest of a split, and what its length is a multiple of
    SPLIT_HEADS = 16,   // query heads of a block, at most
    SPLIT_TILE = 4096,  // elements of keys that are loaded at once, and of values
    SPLIT_BLOCKS = 2,   // for each multiprocessor
    SPLIT_MERGERS = 8,  // warps that merge a head
};

// how the keys of each head are split, and where what is found of them lies
typedef struct {
    int n_splits, keys;  // of each split but the last
    float* levels;       // (B, NH, n_splits, 2) largest score, in base 2, and sum of exponentials
    float* sums;         // (B, NH, n_splits, HS)
} AttentionSplits;

// scores of keys that do not exist: column n_keys and those after it
template <int N>
__device__ inline void split_mask_(float (&scores)[1][N][4], int n_keys) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = 8 * n + threadIdx.x % 4 * 2 + i % 2;
            scores[0][n][i] = column < n_keys ? scores[0][n][i] : -INFINITY;
        }
    }
}

// what this split has found of heads h..h+n_heads-1: a quad stores a row
template <int W>
__device__ inline void split_store_(AttentionSplits a, const AttentionShape& s, const float (&sums)[1][W / 8][4],
                                    const float (&max)[1][2], const float (&sum)[1][2], int b, int h, int n_heads,
                                    int split) {
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = threadIdx.x / 4 + 8 * half, column = threadIdx.x % 4 * 2;
        float total = tile_quad_sum(sum[0][half]);
        if (row >= n_heads) { continue; }
        size_t at = ((size_t)b * s.NH + h + row) * a.n_splits + split;
        if (column == 0) { pack_store(a.levels + 2 * at, Pack<float, 2>{{max[0][half], total}}); }
        #pragma unroll
        for (int n = 0; n < W / 8; n++) {
            const Pack<float, 2> pair = {{sums[0][n][2 * half], sums[0][n][2 * half + 1]}};
            if (8 * n < s.HS) { pack_store(a.sums + at * s.HS + 8 * n + column, pair); }
        }
    }
}

// grid: B * NKV heads, for each of them chunks of SPLIT_HEADS query heads, and for each of these the splits. shared
// memory: the chunk's queries, then two stages of keys and values
template <int W>
__global__ void __launch_bounds__(WARP)
split_attention_kernel(AttentionSplits a, const bf16* q, const bf16* k, const bf16* v, AttentionShape s) {
    const int KEYS = SPLIT_TILE / W;
    extern __shared__ __align__(128) bf16 tiles[];
    bf16 *q_tile = tiles, *k_tile = q_tile + SPLIT_HEADS * W, *v_tile = k_tile + 2 * SPLIT_TILE;
    int group = s.NH / s.NKV, n_chunks = (group + SPLIT_HEADS - 1) / SPLIT_HEADS, t = s.T - 1;
    int split = blockIdx.x % a.n_splits, chunk = blockIdx.x / a.n_splits % n_chunks;
    int head = blockIdx.x / a.n_splits / n_chunks, b = head / s.NKV, g = head % s.NKV;
    int h = g * group + chunk * SPLIT_HEADS, n_heads = min(SPLIT_HEADS, (g + 1) * group - h);
    int first = attention_first_key(&s, t) + split * a.keys, end = min(first + a.keys, s.T);
    size_t kv = attention_at_kv(&s, b, g, 0);
    auto load_keys = [&](int u, int stage) {
        tile_load<KEYS, W, WARP>(k_tile + stage * SPLIT_TILE, k + kv + u * s.kv_row, s.kv_row, end - u, s.HS);
        tile_load<KEYS, W, WARP>(v_tile + stage * SPLIT_TILE, v + kv + u * s.kv_row, s.kv_row, end - u, s.HS);
        cp_async_commit();
    };
    float sums[1][W / 8][4], max[1][2] = {{-10000.0f * LOG2_E, -10000.0f * LOG2_E}}, sum[1][2] = {{0.0f}};
    tile_set_zero(sums);
    tile_load<SPLIT_HEADS, W, WARP>(q_tile, q + attention_at_q(&s, b, h, t), (size_t)s.HS, n_heads, s.HS);
    load_keys(first, 0);
    for (int u = first, stage = 0; u < end; u += KEYS, stage = 1 - stage) {
        cp_async_wait<0>();
        __syncwarp();  // these keys have arrived, and nobody uses those before any more
        if (u + KEYS < end) { load_keys(u + KEYS, 1 - stage); }
        float p[1][KEYS / 8][4];
        unsigned operands[1][KEYS / 16][4];
        tile_set_zero(p);
        tile_add_product_transposed<W>(p, q_tile, 0, k_tile + stage * SPLIT_TILE);
        if (end - u < KEYS) { split_mask_(p, end - u); }
        flash_softmax_step<W>(p, sums, max, sum, s.scale * LOG2_E);
        tile_to_operands(operands, p);
        tile_add_product<W>(sums, operands, v_tile + stage * SPLIT_TILE);
    }
    split_store_<W>(a, s, sums, max, sum, b, h, n_heads, split);
}

// block is (WARP, SPLIT_MERGERS), grid B * NH: a lane has four channels
static __global__ void __launch_bounds__(WARP * SPLIT_MERGERS)
split_attention_merge_kernel(bf16* out, float* max, float* inv, AttentionSplits a, AttentionShape s) {
    __shared__ float of_warps[SPLIT_MERGERS][4 * WARP], totals[SPLIT_MERGERS];
    int lane = threadIdx.x, warp = threadIdx.y, c = 4 * lane;
    size_t first = (size_t)blockIdx.x * a.n_splits;
    const float *levels = a.levels + first * 2, *sums = a.sums + first * s.HS;
    float top = -INFINITY, total = 0.0f, sum[4] = {0.0f};
    for (int i = lane; i < a.n_splits; i += WARP) { top = fmaxf(top, levels[2 * i]); }
    top = row_max(top);
    #pragma unroll 4
    for (int i = warp; i < a.n_splits; i += SPLIT_MERGERS) {
        float shrink = kernel_exp2(levels[2 * i] - top);
        total += levels[2 * i + 1] * shrink;
        Pack<float, 4> x = {{0.0f, 0.0f, 0.0f, 0.0f}};
        if (c < s.HS) { x = load_floats<4>(sums + (size_t)i * s.HS + c); }
        for (int j = 0; j < 4; j++) { sum[j] += x.x[j] * shrink; }
    }
    for (int j = 0; j < 4; j++) { of_warps[warp][c + j] = sum[j]; }
    if (lane == 0) { totals[warp] = total; }
    __syncthreads();
    total = 0.0f;
    for (int i = 0; i < SPLIT_MERGERS; i++) { total += totals[i]; }
    float r = total == 0.0f ? 0.0f : 1.0f / total;
    bf16* y = out + attention_at_out(&s, blockIdx.x / s.NH, blockIdx.x % s.NH, s.T - 1);
    for (int i = warp * WARP + lane; i < s.HS; i += WARP * SPLIT_MERGERS) {
        float y_i = 0.0f;
        for (int w = 0; w < SPLIT_MERGERS; w++) { y_i += of_warps[w][i]; }
        y[i] = from_float<bf16>(y_i * r);
    }
    if (warp == 0 && lane == 0) { max[blockIdx.x] = top * FLASH_LN_2, inv[blockIdx.x] = r; }
}

// ---- launches ----

static inline AttentionSplits split_plan_(const AttentionShape* s, int n_blocks, const Device* dev) {
    const int n_keys = s->T - attention_first_key(s, s->T - 1), wanted = SPLIT_BLOCKS * dev->n_sms / n_blocks;
    AttentionSplits a = {0, 0, NULL, NULL};
    a.keys = (int)ceil_div(ceil_div(n_keys, wanted > 1 ? wanted : 1), SPLIT_KEYS) * SPLIT_KEYS;
    a.n_splits = (int)ceil_div(n_keys, a.keys);
    const size_t n_rows = (size_t)s->B * s->NH * a.n_splits;
    a.sums = device_workspace(dev, sizeof(float) * n_rows * (size_t)(s->HS + 2));
    a.levels = a.sums + n_rows * s->HS;
    return a;
}

template <int W>
static inline void split_forward_(const bf16* q, const bf16* k, const bf16* v, AttentionSplits a, unsigned grid,
                                  const AttentionShape* s, const Device* dev) {
    const size_t n_bytes = sizeof(bf16) * (SPLIT_HEADS * W + 4 * SPLIT_TILE);
    split_attention_kernel<W><<<grid, WARP, n_bytes, dev->stream>>>(a, q, k, v, *s);
    cudaCheck(cudaGetLastError());
}

// 1: done. 0: not for these shapes or, the template, not for this type
static inline int split_attention_forward(bf16* out, float* max, float* inv, const bf16* q, const bf16* k,
                                          const bf16* v, const AttentionShape* s, const Device* dev) {
    const int is_short = s->T - attention_first_key(s, s->T - 1) <= SPLIT_KEYS;
    if (attention_queries(s) != 1 || is_short || s->keys < s->T || s->documents) { return 0; }
    if (!flash_fits(q, k, v, out, s) || s->HS > FLASH_CHANNELS) { return 0; }
    const int n_blocks = s->B * s->NKV * (int)ceil_div(s->NH / s->NKV, SPLIT_HEADS);
    const AttentionSplits a = split_plan_(s, n_blocks, dev);
    if (s->HS <= 64) {
        split_forward_<64>(q, k, v, a, (unsigned)(n_blocks * a.n_splits), s, dev);
    } else {
        split_forward_<128>(q, k, v, a, (unsigned)(n_blocks * a.n_splits), s, dev);
    }
    dim3 block(WARP, SPLIT_MERGERS);
    split_attention_merge_kernel<<<(unsigned)(s->B * s->NH), block, 0, dev->stream>>>(out, max, inv, a, *s);
    cudaCheck(cudaGetLastError());
    return 1;
}
template <typename X>
static inline int split_attention_forward(X*, float*, float*, const X*, const X*, const X*, const AttentionShape*,
                                          const Device*) {
    return 0;
}
#endif  // __CUDACC__, not EXACT
#endif  // LLMC_SPLIT_ATTENTION_H
