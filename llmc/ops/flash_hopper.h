/*
Attention of attention.h by wgmma, for Hopper (sm_90a): flash_attention.h calls it in a build with WGMMA, that of
make CUDA_ARCH=sm_90a. What it says of shapes, of the order of sums and of errors holds here too; the steps between
products are those of flash_steps.h. Other than there:
    heads       of up to 256 channels, filled up with zeros to 64, 128, 192 or 256
    products    a warpgroup, four warps, has 64 rows of a block; tiles lie in shared memory as wide_tile.h says
    forward     the scores of a tile, and the weights of the one before times its values, are products of one batch
    dk and dv   scores and datt are transposed, keys by queries: weights and ds are operands a as registers hold them.
                Above 128 channels both sums are more than a thread's registers: two warpgroups have the same keys, the
                first finds weights and dv, the second datt and dk, and weights go through shared memory as floats
    causal      a warpgroup leaves out tiles of its block that none of its own 64 rows sees
Cost:   as there; tensor cores need 2 W cycles of a multiprocessor for a product of 64 x 64 x W, exp2 of 64 x 64 256.
        By ptxas of CUDA 13.0, without spills:
                               warpgroups  queries, keys of a tile  registers  shared memory  blocks at once
            forward   HS <= 64     2             128, 64                127         48 KiB          2
                      HS <= 128    3             192, 64                164        112 KiB          1
                      HS <= 192    2             128, 64                194        144 KiB          1
                      HS <= 256    2             128, 64                227        192 KiB          1
            dk, dv    HS <= 64     1              48, 64                166         41 KiB          3
                      HS <= 128    1              64, 64                253         97 KiB          2
                      HS <= 192    2              64, 64                248        161 KiB          1
                      HS <= 256    2              64, 64                238        209 KiB          1
            dq        HS <= 64     2             128, 64                122         64 KiB          2
                      HS <= 128    3             192, 64                156        160 KiB          1
                      HS <= 192    2             128, 64                198        192 KiB          1
                      HS <= 256    2             128, 48                213        224 KiB          1
        Heads of more than 128 channels were not measured.
        Measured on an H200 (2026-11-28, before addresses took fewer instructions), causal, TFLOP/s of what queries see
        at T 1024 (384 heads of 64 channels; 256 of 128 in pairs) and 16384 (16 heads); in brackets those of
        flash_attention.h:
                         HS 64, T 1024  HS 64, T 16384  HS 128, T 1024  HS 128, T 16384
            forward         250 (236)      369 (327)       285 (249)       503 (313)
            dk, dv          334 (259)      461 (320)       483 (276)       571 (315)
            dq              430 (269)      576 (324)       426 (267)       687 (302)
Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), without its producer warps
*/
#ifndef LLMC_FLASH_HOPPER_H
#define LLMC_FLASH_HOPPER_H
#if defined(__CUDACC__) && defined(WGMMA)
#include "../core/kernel.h"  // WARP, LOG2_E, bf16, cudaCheck
#include "../core/wgmma.h"   // WARPGROUP, wgmma_fence, wgmma_commit, wgmma_wait, wgmma_keep
#include "flash_rows.h"      // FlashRow, flash_row_weights, flash_row_gradients, flash_column_weights, ...
#include "flash_steps.h"     // FlashPlace, flash_mask_scores, flash_softmax_weights, flash_my_rows
#include "tile.h"            // tile_to_operands, tile_set_zero, tile_quad_sum
#include "wide_tile.h"       // WideRows, wide_tile_arrived, wide_tile_product_transposed, wide_tile_tell

enum { FLASH_HOPPER_CHANNELS = 256 };  // of a head, at most

// tiles of keys that a warpgroup's 64 queries from t on see; without queries of its own it goes along with the last
__device__ inline FlashRange flash_tiles_(const AttentionShape& s, int b, int t, int keys) {
    int last = attention_last_key(&s, min(t + 63, s.T - 1)) / keys;
    return {min(attention_sees_from(&s, b, min(t, s.T - 1)) / keys, last), last};
}

// ---- forward ----

// grid (B * NH, tiles of 64 * WARPGROUPS queries) in the order of flash_place, tiles with the most keys first. BLOCKS:
// of a multiprocessor. shared memory: queries, then two stages of keys and of values
template <int W, int WARPGROUPS, int KEYS, int BLOCKS>
__global__ void __launch_bounds__(WARPGROUP * WARPGROUPS, BLOCKS)
    flash_forward_hopper_kernel(bf16* out, float* max, float* inv, const bf16* q, const bf16* k, const bf16* v,
                                AttentionShape s, int together) {
    const int QUERIES = 64 * WARPGROUPS, TILE = KEYS * W, THREADS = WARPGROUP * WARPGROUPS;
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    bf16 *q_tile = wide_tiles, *k_tile = q_tile + QUERIES * W, *v_tile = k_tile + 2 * TILE;
    FlashPlace place = flash_my_place(together);
    int b = place.head / s.NH, h = place.head % s.NH, part = wide_tile_warpgroup(), row = threadIdx.x / WARP * 16;
    int t = s.t0 + ((int)gridDim.y - 1 - place.tile) * QUERIES, n_queries = min(QUERIES, s.T - t);
    int last = attention_last_key(&s, t + n_queries - 1) / KEYS;
    int first = min(attention_sees_from(&s, b, t) / KEYS, last);  // a window may have left all keys behind
    FlashRange all = flash_keys(s, b, t + row, 16), mine = flash_tiles_(s, b, t + 64 * part, KEYS);
    WideRows<KEYS, W, THREADS> rows(attention_at_kv(&s, b, h / (s.NH / s.NKV), first * KEYS), s.kv_row,
                                    s.keys - first * KEYS, s.HS);
    float sums[1][W / 8][4], scores[1][KEYS / 8][4], shrink[1][2];
    float m[1][2] = {{-10000.0f * LOG2_E, -10000.0f * LOG2_E}}, sum[1][2] = {{0.0f, 0.0f}};
    unsigned p[1][KEYS / 16][4];
    auto weigh = [&](int u) {
        if (!all.has_all(u, KEYS)) { flash_mask_scores(scores, s, b, t + row, u); }
        flash_softmax_weights(scores, shrink, m, sum, s.scale * LOG2_E);
    };
    tile_set_zero(sums);
    wide_tile_load<QUERIES, W, THREADS>(q_tile, q + attention_at_q(&s, b, h, t), s.q_row, n_queries, s.HS);
    rows.load(k_tile + first % 2u * TILE, k, s.kv_row);
    cp_async_commit();
    for (int tile = first; tile <= last + 1; tile++) {  // the scores of `tile`, the values of the one before
        wide_tile_arrived();
        int stage = tile % 2u * TILE, before = TILE - stage;
        rows.next(s.kv_row);
        if (tile < last) { rows.load(k_tile + before, k, s.kv_row); }
        if (tile <= last) { rows.load(v_tile + stage, v, s.kv_row, 1); }
        cp_async_commit();
        // each way ends with nothing under way
        if (tile > mine.first && tile <= mine.last) {
            wgmma_keep(sums);
            wgmma_fence();
            wide_tile_product_transposed<W, QUERIES>(scores, q_tile, part, k_tile + stage);
            wgmma_commit();
            wide_tile_product<W>(sums, p, v_tile + before, 1);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_keep(scores);
            weigh(tile * KEYS);
            wgmma_wait<0>();
            wgmma_keep(sums);
            bool grew = shrink[0][0] != 1.0f || shrink[0][1] != 1.0f;
            if (__any_sync(ALL_LANES, grew)) { flash_scale_rows(sums, shrink); }
            tile_to_operands(p, scores);
        } else if (tile == mine.first) {
            wgmma_fence();
            wide_tile_product_transposed<W, QUERIES>(scores, q_tile, part, k_tile + stage);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_keep(scores);
            weigh(tile * KEYS);
            tile_to_operands(p, scores);
        } else if (tile == mine.last + 1) {
            wgmma_keep(sums);
            wgmma_fence();
            wide_tile_product<W>(sums, p, v_tile + before, 1);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_keep(sums);
        }
    }
    __syncthreads();  // nobody multiplies queries any more
    for (int i = 0; i < 2; i++) {
        float total = tile_quad_sum(sum[0][i]), r = total == 0.0f ? 0.0f : 1.0f / total;
        int n = row + 8 * i + threadIdx.x % WARP / 4;
        sum[0][i] = r;
        if (threadIdx.x % 4 == 0 && n < n_queries) {
            size_t at = attention_at_row(&s, b, h, t + n);
            max[at] = m[0][i] * FLASH_LN_2, inv[at] = r;
        }
    }
    wide_tile_store_rows<W, QUERIES>(out + attention_at_out(&s, b, h, t), s.out_row, n_queries, s.HS, q_tile, row, sums,
                                     sum);
}

// ---- backward ----

// x of a warp's 16 keys (rows, from key u on) and the queries of a tile (columns, from t on): 0 where one does not see
// the other. all: queries that see all of these keys
template <int N>
__device__ inline void flash_hopper_mask_keys_(float (&x)[1][N][4], const AttentionShape& s, FlashRange all, int b,
                                               int t, int u) {
    if (all.has_all(t, 8 * N)) { return; }
    int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        flash_hide(x[0], half, flash_queries(s, b, u + lane / 4 + half * 8, 1), t, 0.0f);
    }
}

// A step of two warpgroups with the same 64 keys, of which each makes one product of its own, keys by queries or values
// by dout, and adds to its sums one with the other's: the first dv, the second dk
template <int W, int QUERIES>
__device__ inline void flash_hopper_apart_step_(float (&sums)[1][W / 8][4], float4* told, int is_second,
                                                const bf16* rows_tile, const bf16* column_tile, const bf16* other_tile,
                                                const FlashRow* rows, const AttentionShape& s, FlashRange all, int b,
                                                int t, int u) {
    float x[1][QUERIES / 8][4];
    unsigned operands[1][QUERIES / 16][4];
    wgmma_fence();
    wide_tile_product_transposed<W, 64>(x, rows_tile, 0, column_tile);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(x);
    if (!is_second) {
        flash_column_weights(x, rows, s.scale * LOG2_E);
        flash_hopper_mask_keys_(x, s, all, b, t, u);
        wide_tile_tell(told, x);
    }
    __syncthreads();
    if (is_second) {
        float p[1][QUERIES / 8][4];
        wide_tile_hear(p, told);
        flash_column_gradients(x, p, rows);  // 0 where the weight is
    }
    tile_to_operands(operands, x);
    wgmma_keep(sums);
    wgmma_fence();
    wide_tile_product<W>(sums, operands, other_tile, 1);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(sums);
}

// more channels of dk and dv than a thread has registers for
__host__ __device__ constexpr bool flash_hopper_apart_(int W) { return W > 128; }
template <int W, int WARPGROUPS>
__host__ __device__ constexpr int flash_hopper_block_keys_() {
    static_assert(!flash_hopper_apart_(W) || WARPGROUPS == 2, "one warpgroup has dv, one dk");
    return flash_hopper_apart_(W) ? 64 : 64 * WARPGROUPS;
}

// grid (B * NKV, tiles of keys): early keys have the most queries and come first. A step is a tile of queries of one
// head. A warpgroup has 64 keys; apart: both have the same, the first finds their weights and dv, the second datt, ds
// and dk. shared memory: keys, values, two stages of queries, of dout and of rows, then weights from one to the other
template <int W, int WARPGROUPS, int QUERIES, int BLOCKS>
__global__ void __launch_bounds__(WARPGROUP * WARPGROUPS, BLOCKS)
    flash_backward_keys_hopper_kernel(bf16* dk, bf16* dv, const bf16* dout, const FlashRow* rows, const bf16* q,
                                      const bf16* k, const bf16* v, AttentionShape s, int together) {
    const bool APART = flash_hopper_apart_(W);
    const int KEYS = flash_hopper_block_keys_<W, WARPGROUPS>(), TILE = QUERIES * W, THREADS = WARPGROUP * WARPGROUPS;
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    bf16 *k_tile = wide_tiles, *v_tile = k_tile + KEYS * W, *q_tile = v_tile + KEYS * W,
         *dout_tile = q_tile + 2 * TILE;
    FlashRow* row_tile = (FlashRow*)(dout_tile + 2 * TILE);
    float4* told = (float4*)(row_tile + 2 * QUERIES);
    FlashPlace place = flash_my_place(together);
    int b = place.head / s.NKV, g = place.head % s.NKV, group = s.NH / s.NKV;
    int warpgroup = wide_tile_warpgroup(), part = APART ? 0 : warpgroup, row = threadIdx.x / WARP * 16 % KEYS;
    int u = place.tile * KEYS, n_keys = min(KEYS, s.keys - u), my_u = min(u + 64 * part, s.keys - 1);
    int first = attention_first_query(&s, u), n_tiles = 0;
    first -= (first - s.t0) % QUERIES;  // for 16-byte copies of rows
    int n_queries = attention_seen_until(&s, b, u + n_keys - 1) - first + 1;
    FlashRange all = flash_queries(s, b, u + row, 16);
    FlashRange any = {attention_first_query(&s, my_u), attention_seen_until(&s, b, min(my_u + 63, s.keys - 1))};
    if (n_queries > 0) { n_tiles = (n_queries + QUERIES - 1) / QUERIES; }
    size_t kv = attention_at_kv(&s, b, g, u);
    typedef WideRows<QUERIES, W, THREADS> Rows;
    auto queries_of = [&](int h) { return Rows(attention_at_q(&s, b, h, first), s.q_row, s.T - first, s.HS); };
    auto douts_of = [&](int h) { return Rows(attention_at_out(&s, b, h, first), s.out_row, s.T - first, s.HS); };
    Rows q_rows = queries_of(g * group), dout_rows = douts_of(g * group);
    auto load_queries = [&](int h, int t, int stage) {
        q_rows.load(q_tile + stage * TILE, q, s.q_row);
        dout_rows.load(dout_tile + stage * TILE, dout, s.out_row);
        q_rows.next(s.q_row);
        dout_rows.next(s.out_row);
        flash_load_rows<QUERIES>(row_tile + stage * QUERIES, rows, s, b, h, t);
        cp_async_commit();
    };
    float dv_sums[1][W / 8][4], dk_sums[1][W / 8][4];  // apart, a thread's only one is the first
    tile_set_zero(dv_sums);
    tile_set_zero(dk_sums);
    wide_tile_load<KEYS, W, THREADS>(k_tile, k + kv, s.kv_row, n_keys, s.HS);
    wide_tile_load<KEYS, W, THREADS>(v_tile, v + kv, s.kv_row, n_keys, s.HS);
    cp_async_commit();
    int next_h = g * group, next_t = first, end_h = n_tiles > 0 ? next_h + group : next_h;  // no division in each step
    if (next_h < end_h) { load_queries(next_h, next_t, 0); }
    for (int step = 0; next_h < end_h; step++) {
        int t = next_t, stage = step % 2u;
        next_t += QUERIES;
        if (next_t == first + n_tiles * QUERIES) {
            next_t = first, next_h++;
            q_rows = queries_of(next_h), dout_rows = douts_of(next_h);
        }
        wide_tile_arrived();
        if (next_h < end_h) { load_queries(next_h, next_t, 1 - stage); }
        if (t + QUERIES <= any.first || t > any.last) { continue; }
        const bf16 *queries = q_tile + stage * TILE, *douts = dout_tile + stage * TILE;
        const FlashRow* now = row_tile + stage * QUERIES + threadIdx.x % 4 * 2;
        if (APART) {
            const bf16 *own = warpgroup ? v_tile : k_tile, *seen = warpgroup ? douts : queries;
            flash_hopper_apart_step_<W, QUERIES>(dv_sums, told, warpgroup, own, seen, warpgroup ? queries : douts, now,
                                                 s, all, b, t, u + row);
            continue;
        }
        float p[1][QUERIES / 8][4], ds[1][QUERIES / 8][4];
        unsigned p_operands[1][QUERIES / 16][4], ds_operands[1][QUERIES / 16][4];
        wgmma_fence();
        wide_tile_product_transposed<W, KEYS>(p, k_tile, part, queries);
        wgmma_commit();
        wide_tile_product_transposed<W, KEYS>(ds, v_tile, part, douts);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_keep(p);
        flash_column_weights(p, now, s.scale * LOG2_E);
        flash_hopper_mask_keys_(p, s, all, b, t, u + row);
        tile_to_operands(p_operands, p);
        wgmma_keep(dv_sums);
        wgmma_fence();
        wide_tile_product<W>(dv_sums, p_operands, douts, 1);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_keep(ds);
        flash_column_gradients(ds, p, now);
        flash_hopper_mask_keys_(ds, s, all, b, t, u + row);
        tile_to_operands(ds_operands, ds);
        wgmma_keep(dk_sums);
        wgmma_fence();
        wide_tile_product<W>(dk_sums, ds_operands, queries, 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(dv_sums);
        wgmma_keep(dk_sums);
    }
    cp_async_wait<0>();  // of keys that no query sees, copies may be under way
    __syncthreads();
    const float scale[1][2] = {{s.scale, s.scale}}, one[1][2] = {{1.0f, 1.0f}};
    if (APART) {
        float factor[1][2] = {{warpgroup ? s.scale : 1.0f, warpgroup ? s.scale : 1.0f}};
        wide_tile_store_rows<W, KEYS>((warpgroup ? dk : dv) + kv, s.kv_row, n_keys, s.HS, warpgroup ? k_tile : v_tile,
                                      row, dv_sums, factor);
        return;
    }
    wide_tile_store_rows<W, KEYS>(dk + kv, s.kv_row, n_keys, s.HS, k_tile, row, dk_sums, scale);
    wide_tile_store_rows<W, KEYS>(dv + kv, s.kv_row, n_keys, s.HS, v_tile, row, dv_sums, one);
}

// x of a warp's 16 queries (rows, from query t on) and the keys of a tile (columns, from key u on): 0 where one does
// not see the other. all: keys that all of these queries see
template <int N>
__device__ inline void flash_hopper_mask_queries_(float (&x)[1][N][4], const AttentionShape& s, FlashRange all, int b,
                                                  int t, int u) {
    if (all.has_all(u, 8 * N)) { return; }
    int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        flash_hide(x[0], half, flash_keys(s, b, t + lane / 4 + half * 8, 1), u, 0.0f);
    }
}

// grid (B * NH, tiles of 64 * WARPGROUPS queries) as in forward. shared memory: queries, dout, then two stages of keys
// and of values
template <int W, int WARPGROUPS, int KEYS, int BLOCKS>
__global__ void __launch_bounds__(WARPGROUP * WARPGROUPS, BLOCKS)
    flash_backward_queries_hopper_kernel(bf16* dq, const bf16* dout, const FlashRow* rows, const bf16* q, const bf16* k,
                                         const bf16* v, AttentionShape s, int together) {
    const int QUERIES = 64 * WARPGROUPS, TILE = KEYS * W, THREADS = WARPGROUP * WARPGROUPS;
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    bf16 *q_tile = wide_tiles, *dout_tile = q_tile + QUERIES * W, *k_tile = dout_tile + QUERIES * W,
         *v_tile = k_tile + 2 * TILE;
    FlashPlace place = flash_my_place(together);
    int b = place.head / s.NH, h = place.head % s.NH, part = wide_tile_warpgroup(), row = threadIdx.x / WARP * 16;
    int t = s.t0 + ((int)gridDim.y - 1 - place.tile) * QUERIES, n_queries = min(QUERIES, s.T - t);
    int last = attention_last_key(&s, t + n_queries - 1) / KEYS;
    int first = min(attention_sees_from(&s, b, t) / KEYS, last);
    FlashRange all = flash_keys(s, b, t + row, 16), mine = flash_tiles_(s, b, t + 64 * part, KEYS);
    size_t at = attention_at_q(&s, b, h, t);
    WideRows<KEYS, W, THREADS> kv_rows(attention_at_kv(&s, b, h / (s.NH / s.NKV), first * KEYS), s.kv_row,
                                       s.keys - first * KEYS, s.HS);
    auto load_keys = [&](int stage) {
        kv_rows.load(k_tile + stage * TILE, k, s.kv_row);
        kv_rows.load(v_tile + stage * TILE, v, s.kv_row);
        kv_rows.next(s.kv_row);
        cp_async_commit();
    };
    FlashRow my_rows[2];
    flash_my_rows(my_rows, rows, s, b, h, t, n_queries, row);
    float sums[1][W / 8][4];
    tile_set_zero(sums);
    wide_tile_load<QUERIES, W, THREADS>(q_tile, q + at, s.q_row, n_queries, s.HS);
    wide_tile_load<QUERIES, W, THREADS>(dout_tile, dout + attention_at_out(&s, b, h, t), s.out_row, n_queries, s.HS);
    load_keys(first % 2u);
    for (int tile = first; tile <= last; tile++) {
        int stage = tile % 2u;
        wide_tile_arrived();
        if (tile < last) { load_keys(1 - stage); }
        if (!mine.has(tile)) { continue; }
        float p[1][KEYS / 8][4], ds[1][KEYS / 8][4];
        unsigned operands[1][KEYS / 16][4];
        wgmma_fence();
        wide_tile_product_transposed<W, QUERIES>(p, q_tile, part, k_tile + stage * TILE);
        wide_tile_product_transposed<W, QUERIES>(ds, dout_tile, part, v_tile + stage * TILE);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(p);
        wgmma_keep(ds);
        flash_row_weights(p, my_rows, s.scale * LOG2_E);
        flash_row_gradients(ds, p, my_rows);
        flash_hopper_mask_queries_(ds, s, all, b, t + row, tile * KEYS);
        tile_to_operands(operands, ds);
        wgmma_keep(sums);
        wgmma_fence();
        wide_tile_product<W>(sums, operands, k_tile + stage * TILE, 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(sums);
    }
    __syncthreads();  // nobody multiplies queries any more
    const float scale[1][2] = {{s.scale, s.scale}};
    wide_tile_store_rows<W, QUERIES>(dq + at, s.q_row, n_queries, s.HS, q_tile, row, sums, scale);
}

// ---- launches ----

template <int W, int WARPGROUPS, int KEYS, int BLOCKS>
static inline void flash_hopper_forward_(bf16* out, float* max, float* inv, const bf16* q, const bf16* k, const bf16* v,
                                         const AttentionShape* s, const Device* dev) {
    int n_bytes = (int)sizeof(bf16) * W * (64 * WARPGROUPS + 4 * KEYS);
    dim3 grid = flash_grid(s->B * s->NH, attention_queries(s), 64 * WARPGROUPS);
    cudaCheck(cudaFuncSetAttribute(flash_forward_hopper_kernel<W, WARPGROUPS, KEYS, BLOCKS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    int together = flash_together(s->B * s->NH, s->keys, s->HS);
    flash_forward_hopper_kernel<W, WARPGROUPS, KEYS, BLOCKS>
        <<<grid, WARPGROUP * WARPGROUPS, n_bytes, dev->stream>>>(out, max, inv, q, k, v, *s, together);
    cudaCheck(cudaGetLastError());
}

template <int W, int WARPGROUPS, int QUERIES, int BLOCKS>
static inline void flash_hopper_keys_(bf16* dk, bf16* dv, const bf16* dout, const FlashRow* rows, const bf16* q,
                                      const bf16* k, const bf16* v, const AttentionShape* s, const Device* dev) {
    const int KEYS = flash_hopper_block_keys_<W, WARPGROUPS>();
    int n_bytes = (int)sizeof(bf16) * W * (2 * KEYS + 4 * QUERIES) + 2 * QUERIES * (int)sizeof(FlashRow) +
                  (flash_hopper_apart_(W) ? KEYS * QUERIES * (int)sizeof(float) : 0);
    dim3 grid = flash_grid(s->B * s->NKV, s->keys, KEYS);
    cudaCheck(cudaFuncSetAttribute(flash_backward_keys_hopper_kernel<W, WARPGROUPS, QUERIES, BLOCKS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    int64_t n_group_rows = (int64_t)(s->NH / s->NKV) * attention_queries(s);
    int together = flash_together(s->B * s->NKV, n_group_rows, s->HS);
    flash_backward_keys_hopper_kernel<W, WARPGROUPS, QUERIES, BLOCKS>
        <<<grid, WARPGROUP * WARPGROUPS, n_bytes, dev->stream>>>(dk, dv, dout, rows, q, k, v, *s, together);
    cudaCheck(cudaGetLastError());
}

template <int W, int WARPGROUPS, int KEYS, int BLOCKS>
static inline void flash_hopper_queries_(bf16* dq, const bf16* dout, const FlashRow* rows, const bf16* q, const bf16* k,
                                         const bf16* v, const AttentionShape* s, const Device* dev) {
    int n_bytes = (int)sizeof(bf16) * W * (128 * WARPGROUPS + 4 * KEYS);
    dim3 grid = flash_grid(s->B * s->NH, attention_queries(s), 64 * WARPGROUPS);
    cudaCheck(cudaFuncSetAttribute(flash_backward_queries_hopper_kernel<W, WARPGROUPS, KEYS, BLOCKS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    int together = flash_together(s->B * s->NH, s->keys, s->HS);
    flash_backward_queries_hopper_kernel<W, WARPGROUPS, KEYS, BLOCKS>
        <<<grid, WARPGROUP * WARPGROUPS, n_bytes, dev->stream>>>(dq, dout, rows, q, k, v, *s, together);
    cudaCheck(cudaGetLastError());
}

static inline void flash_hopper_forward(bf16* out, float* max, float* inv, const bf16* q, const bf16* k, const bf16* v,
                                        const AttentionShape* s, const Device* dev) {
    if (s->HS <= 64) {
        flash_hopper_forward_<64, 2, 64, 2>(out, max, inv, q, k, v, s, dev);
    } else if (s->HS <= 128) {
        flash_hopper_forward_<128, 3, 64, 1>(out, max, inv, q, k, v, s, dev);
    } else if (s->HS <= 192) {
        flash_hopper_forward_<192, 2, 64, 1>(out, max, inv, q, k, v, s, dev);
    } else {
        flash_hopper_forward_<256, 2, 64, 1>(out, max, inv, q, k, v, s, dev);
    }
}

static inline void flash_hopper_backward(bf16* dq, bf16* dk, bf16* dv, const bf16* dout, const FlashRow* rows,
                                         const bf16* q, const bf16* k, const bf16* v, const AttentionShape* s,
                                         const Device* dev) {
    if (s->HS <= 64) {
        flash_hopper_keys_<64, 1, 48, 3>(dk, dv, dout, rows, q, k, v, s, dev);
        flash_hopper_queries_<64, 2, 64, 2>(dq, dout, rows, q, k, v, s, dev);
    } else if (s->HS <= 128) {
        flash_hopper_keys_<128, 1, 64, 2>(dk, dv, dout, rows, q, k, v, s, dev);
        flash_hopper_queries_<128, 3, 64, 1>(dq, dout, rows, q, k, v, s, dev);
    } else if (s->HS <= 192) {
        flash_hopper_keys_<192, 2, 64, 1>(dk, dv, dout, rows, q, k, v, s, dev);
        flash_hopper_queries_<192, 2, 64, 1>(dq, dout, rows, q, k, v, s, dev);
    } else {
        flash_hopper_keys_<256, 2, 64, 1>(dk, dv, dout, rows, q, k, v, s, dev);
        flash_hopper_queries_<256, 2, 48, 1>(dq, dout, rows, q, k, v, s, dev);
    }
}
#endif  // WGMMA
#endif  // LLMC_FLASH_HOPPER_H
