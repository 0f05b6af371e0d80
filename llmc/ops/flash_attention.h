/*
Attention of attention.h in bf16 on tensor cores: nothing of the size (T, T) ever leaves the registers. attention.h
calls it where it can: HS a multiple of 8 up to 128, rows that begin at multiples of 16 bytes; otherwise its own kernels
run. HS 64 and 128 waste nothing, others are filled up with zeros to the next of the two.
    forward        a block has 64 or 128 queries, 16 or 32 for each of four warps, and goes over tiles of 64 keys and
                   values
    backward       D, then dk and dv (a block has 64 keys, goes over tiles of queries and, in a group, over its heads),
                   then dq (64 queries, as forward). Each sum has one owner, so there are no atomics and two runs give
                   the same bits; the price is that scores and datt are computed twice: 7 products instead of 5
    softmax        "online": a running maximum; when it grows, what was summed so far is multiplied by exp(old - new)
                   (doc/attention.md). In base 2: exp(x) = 2^(x * log2 e), one instruction with the factor in the scale
    causal, window, documents    tiles that no query of the block sees are skipped, and where all see all, nothing is
                   masked
    copies         cp.async: the next tile is under way while this one is used, with one barrier per tile
    Hopper         make CUDA_ARCH=sm_90a: other kernels, by wgmma, and HS up to 256 (flash_hopper.h)
    order          groups of heads whose keys and values fit into the L2, in a group tile after tile (flash_place)
Error:  products of bf16 are exact in float. With e = 2^-8, the rounding of bf16, and sums in float, to first order:
            out   e * sum of att |v|  (weights are rounded before they meet v)  + e |out|
            D     sum over channels of |dout| * (error of out): it is computed as dout . out
            dv_u  e * sum over t of att |dout|  + e |dv|
            ds    att * scale * (error of D)  + e |ds|      dq, dk: sum of (error of ds) * |k| or |q|, + e |dq| or |dk|
        test_attention.c bounds each element so. An Inf or NaN reaches the queries of tiles that it lies in, seen or
        not, also those of another document. Tiles begin where rows do: a document has not the bits that it has alone.
Cost:   forward 4*HS flops for each query and key it sees, backward 14*HS; the limit is the tensor cores. A warp's
        ldmatrix of 512 bytes feeds two mma, which shared memory and tensor cores of sm_80 do in the same time; with 32
        queries per warp it feeds four. By ptxas of CUDA 13.0, without spills; what fits on a multiprocessor at once:
                              registers on sm_80, sm_90   shared memory   blocks of four warps
            forward      HS <=  64   237, 231                 48 KiB            2
                         HS <= 128   168, 168                 80 KiB            2
            dk and dv    HS <=  64   222, 235                 49 KiB            2
                         HS <= 128   254, 254                 65 KiB            2
            dq           HS <=  64   165, 168                 48 KiB            3
                         HS <= 128   168, 168                 64 KiB            2, on sm_90 3
        What a warp issues for a tile that is not masked (make sass, sm_90), beside 128, 128 and 96 mma of about 6.4
        cycles each: forward 712 instructions (HS 64) or 678 (HS 128), dk and dv 566 or 544, dq 459 or 472.
Source: Dao 2023, arXiv:2307.08691; online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867
*/
#ifndef LLMC_FLASH_ATTENTION_H
#define LLMC_FLASH_ATTENTION_H
#include "attention_shape.h"  // AttentionShape
#ifdef __CUDACC__
#include "../core/kernel.h"  // WARP, bf16, kernel_exp2, cudaCheck, device_workspace
#include "../core/mma.h"     // cp_async_commit, cp_async_wait
#include "flash_steps.h"     // FlashPlace, flash_mask_scores, flash_softmax_step, flash_load_rows, flash_my_rows
#include "tile.h"            // tile_load, tile_add_product, tile_store_rows
#ifdef WGMMA
#include "flash_hopper.h"    // flash_hopper_forward, flash_hopper_backward
#ifndef FLASH_HOPPER  // test_attention.c: a variable, so that it has both kinds of kernels
#define FLASH_HOPPER 1
#endif
#endif

enum { FLASH_THREADS = 128, FLASH_KEYS = 64 };  // four warps; keys of a block or of a tile
enum { FLASH_CHANNELS = 128 };                  // of a head, at most

// ---- forward ----

// grid (B * NH, tiles of queries) in the order of flash_place: tiles with the most keys first, for an even end. M:
// blocks of 16 queries per warp. shared memory: queries, then two stages of keys and values
template <int W, int M>
__global__ void __launch_bounds__(FLASH_THREADS)
    flash_forward_kernel(bf16* out, float* max, float* inv, const bf16* q, const bf16* k, const bf16* v,
                         AttentionShape s, int together) {
    const int QUERIES = 64 * M, TILE = FLASH_KEYS * W;
    extern __shared__ __align__(128) bf16 tiles[];
    bf16 *q_tile = tiles, *k_tile = q_tile + QUERIES * W, *v_tile = k_tile + 2 * TILE;
    FlashPlace place = flash_my_place(together);
    int b = place.head / s.NH, h = place.head % s.NH, row = threadIdx.x / WARP * 16 * M;
    int t = s.t0 + ((int)gridDim.y - 1 - place.tile) * QUERIES, n_queries = min(QUERIES, s.T - t);
    int last = attention_last_key(&s, t + n_queries - 1) / FLASH_KEYS;
    int first = min(attention_sees_from(&s, b, t) / FLASH_KEYS, last);  // a window may have left all keys behind
    FlashRange all = flash_keys(s, b, t + row, 16 * M);
    size_t kv = attention_at_kv(&s, b, h / (s.NH / s.NKV), 0);
    auto load_keys = [&](int tile) {
        int u = tile * FLASH_KEYS, stage = tile % 2 * TILE;
        tile_load<FLASH_KEYS, W, FLASH_THREADS>(k_tile + stage, k + kv + u * s.kv_row, s.kv_row, s.keys - u, s.HS);
        tile_load<FLASH_KEYS, W, FLASH_THREADS>(v_tile + stage, v + kv + u * s.kv_row, s.kv_row, s.keys - u, s.HS);
        cp_async_commit();
    };
    float sums[M][W / 8][4], m[M][2], sum[M][2];
    tile_set_zero(sums);
    for (int i = 0; i < M; i++) { m[i][0] = m[i][1] = -10000.0f * LOG2_E, sum[i][0] = sum[i][1] = 0.0f; }
    tile_load<QUERIES, W, FLASH_THREADS>(q_tile, q + attention_at_q(&s, b, h, t), s.q_row, n_queries, s.HS);
    load_keys(first);
    for (int tile = first; tile <= last; tile++) {
        int u = tile * FLASH_KEYS, stage = tile % 2 * TILE;
        cp_async_wait<0>();
        __syncthreads();  // this tile has arrived, and nobody uses the one before any more
        if (tile < last) { load_keys(tile + 1); }
        float p[M][FLASH_KEYS / 8][4];
        unsigned operands[M][FLASH_KEYS / 16][4];
        tile_set_zero(p);
        tile_add_product_transposed<W>(p, q_tile, row, k_tile + stage);
        if (!all.has_all(u, FLASH_KEYS)) { flash_mask_scores(p, s, b, t + row, u); }
        flash_softmax_step<W>(p, sums, m, sum, s.scale * LOG2_E);
        tile_to_operands(operands, p);
        tile_add_product<W>(sums, operands, v_tile + stage);
    }
    for (int i = 0; i < 2 * M; i++) {
        float total = tile_quad_sum(sum[i / 2][i % 2]), r = total == 0.0f ? 0.0f : 1.0f / total;
        int n = row + 8 * i + threadIdx.x % WARP / 4;
        sum[i / 2][i % 2] = r;
        if (threadIdx.x % 4 == 0 && n < n_queries) {
            size_t at = attention_at_row(&s, b, h, t + n);
            max[at] = m[i / 2][i % 2] * FLASH_LN_2, inv[at] = r;
        }
    }
    tile_store_rows<W>(out + attention_at_out(&s, b, h, t), s.out_row, n_queries, s.HS, q_tile, row, sums, sum);
}

// ---- backward ----

// eight lanes per query, 16 bytes each
__global__ static void flash_rows_kernel(FlashRow* rows, const bf16* dout, const bf16* out, const float* max,
                                         const float* inv, AttentionShape s) {
    int n_queries = attention_queries(&s);
    int64_t n_rows = (int64_t)s.B * n_queries * s.NH;
    int64_t n = (int64_t)blockIdx.x * (FLASH_ROWS_THREADS / 8) + threadIdx.x / 8;
    int64_t i = n < n_rows ? n : n_rows - 1;  // all lanes stay for the sum; heads are neighbours in memory
    int h = (int)(i % s.NH), t = s.t0 + (int)(i / s.NH % n_queries), b = (int)(i / s.NH / n_queries);
    size_t at = attention_at_out(&s, b, h, t), row = attention_at_row(&s, b, h, t);
    const float D = flash_row_D(dout + at, out + at, s.HS);
    if (n < n_rows && threadIdx.x % 8 == 0) { rows[flash_at_row_(s, b, h, t)] = flash_row(max[row], inv[row], D); }
}

// weights from scores, ds / scale from datt, of a warp's 16 keys (rows) and the queries of a tile (columns); all:
// queries that see all of these keys
template <int N>
__device__ inline void flash_key_gradients_(float (&p)[1][N][4], float (&ds)[1][N][4], const FlashRow* rows,
                                            const AttentionShape& s, FlashRange all, int b, int t, int u) {
    int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = 8 * n + lane % 4 * 2 + i % 2;
            p[0][n][i] = kernel_exp2(p[0][n][i] * (s.scale * LOG2_E) - rows[column].level);
            ds[0][n][i] = p[0][n][i] * (ds[0][n][i] - rows[column].D);
        }
    }
    if (all.has_all(t, 8 * N)) { return; }
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        FlashRange see = flash_queries(s, b, u + lane / 4 + half * 8, 1);
        #pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            bool sees = see.has(t + n / 2 * 8 + lane % 4 * 2 + n % 2);
            float &weight = p[0][n / 2][2 * half + n % 2], &dscore = ds[0][n / 2][2 * half + n % 2];
            weight = sees ? weight : 0.0f;
            dscore = sees ? dscore : 0.0f;
        }
    }
}

// grid (B * NKV, tiles of keys): early keys have the most queries and come first. A step is a tile of queries of one
// head. QUERIES: 64, or 32 where two sums of 128 channels leave room for less.
// shared memory: keys, values, then two stages of queries, dout and rows
template <int W, int QUERIES>
__global__ void __launch_bounds__(FLASH_THREADS)
    flash_backward_keys_kernel(bf16* dk, bf16* dv, const bf16* dout, const FlashRow* rows, const bf16* q, const bf16* k,
                               const bf16* v, AttentionShape s, int together) {
    const int TILE = QUERIES * W;
    extern __shared__ __align__(128) bf16 tiles[];
    bf16 *k_tile = tiles, *v_tile = k_tile + FLASH_KEYS * W, *q_tile = v_tile + FLASH_KEYS * W,
         *dout_tile = q_tile + 2 * TILE;
    FlashRow* row_tile = (FlashRow*)(dout_tile + 2 * TILE);
    FlashPlace place = flash_my_place(together);
    int b = place.head / s.NKV, g = place.head % s.NKV, group = s.NH / s.NKV, row = threadIdx.x / WARP * 16;
    int u = place.tile * FLASH_KEYS, n_keys = min(FLASH_KEYS, s.keys - u);
    int first = attention_first_query(&s, u), n_tiles = 0;
    first -= (first - s.t0) % QUERIES;  // for 16-byte copies of rows
    int n_queries = attention_seen_until(&s, b, u + n_keys - 1) - first + 1;
    FlashRange all = flash_queries(s, b, u + row, 16);
    if (n_queries > 0) { n_tiles = (n_queries + QUERIES - 1) / QUERIES; }
    size_t kv = attention_at_kv(&s, b, g, u);
    auto load_queries = [&](int h, int t, int stage) {
        tile_load<QUERIES, W, FLASH_THREADS>(q_tile + stage * TILE, q + attention_at_q(&s, b, h, t), s.q_row, s.T - t,
                                             s.HS);
        tile_load<QUERIES, W, FLASH_THREADS>(dout_tile + stage * TILE, dout + attention_at_out(&s, b, h, t), s.out_row,
                                             s.T - t, s.HS);
        flash_load_rows<QUERIES>(row_tile + stage * QUERIES, rows, s, b, h, t);
        cp_async_commit();
    };
    float dk_sums[1][W / 8][4], dv_sums[1][W / 8][4];
    tile_set_zero(dk_sums);
    tile_set_zero(dv_sums);
    tile_load<FLASH_KEYS, W, FLASH_THREADS>(k_tile, k + kv, s.kv_row, n_keys, s.HS);
    tile_load<FLASH_KEYS, W, FLASH_THREADS>(v_tile, v + kv, s.kv_row, n_keys, s.HS);
    cp_async_commit();
    int next_h = g * group, next_t = first, end_h = n_tiles > 0 ? next_h + group : next_h;  // no division in each step
    if (next_h < end_h) { load_queries(next_h, next_t, 0); }
    for (int step = 0; next_h < end_h; step++) {
        int t = next_t, stage = step % 2 * TILE;
        next_t += QUERIES;
        if (next_t == first + n_tiles * QUERIES) { next_t = first, next_h++; }
        cp_async_wait<0>();
        __syncthreads();
        if (next_h < end_h) { load_queries(next_h, next_t, (step + 1) % 2); }
        float p[1][QUERIES / 8][4], ds[1][QUERIES / 8][4];
        unsigned operands[1][QUERIES / 16][4];
        tile_set_zero(p);
        tile_set_zero(ds);
        tile_add_product_transposed<W>(p, k_tile, row, q_tile + stage);
        tile_add_product_transposed<W>(ds, v_tile, row, dout_tile + stage);
        flash_key_gradients_(p, ds, row_tile + step % 2 * QUERIES, s, all, b, t, u + row);
        tile_to_operands(operands, p);
        tile_add_product<W>(dv_sums, operands, dout_tile + stage);
        tile_to_operands(operands, ds);
        tile_add_product<W>(dk_sums, operands, q_tile + stage);
    }
    cp_async_wait<0>();  // of keys that no query sees, copies may be under way
    __syncthreads();
    const float scale[1][2] = {{s.scale, s.scale}}, one[1][2] = {{1.0f, 1.0f}};
    tile_store_rows<W>(dk + kv, s.kv_row, n_keys, s.HS, k_tile, row, dk_sums, scale);
    tile_store_rows<W>(dv + kv, s.kv_row, n_keys, s.HS, v_tile, row, dv_sums, one);
}

// ds / scale from scores and datt of a warp's 16 queries (rows) and the keys of a tile (columns); all: keys that all of
// these queries see
template <int N>
__device__ inline void flash_query_gradients_(float (&ds)[1][N][4], const float (&scores)[1][N][4],
                                              const FlashRow (&rows)[2], const AttentionShape& s, FlashRange all, int b,
                                              int t, int u) {
    int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            float weight = kernel_exp2(scores[0][n][i] * (s.scale * LOG2_E) - rows[i / 2].level);
            ds[0][n][i] = weight * (ds[0][n][i] - rows[i / 2].D);
        }
    }
    if (all.has_all(u, 8 * N)) { return; }
    FlashRange seen[2] = {flash_keys(s, b, t + lane / 4, 1), flash_keys(s, b, t + lane / 4 + 8, 1)};
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            ds[0][n][i] = seen[i / 2].has(u + 8 * n + lane % 4 * 2 + i % 2) ? ds[0][n][i] : 0.0f;
        }
    }
}

// grid (B * NH, tiles of 64 queries) as in forward. KEYS of a tile: 64, or 32 so that two blocks find room in shared
// memory. shared memory: queries, dout, then two stages of keys and values
template <int W, int KEYS>
__global__ void __launch_bounds__(FLASH_THREADS)
    flash_backward_queries_kernel(bf16* dq, const bf16* dout, const FlashRow* rows, const bf16* q, const bf16* k,
                                  const bf16* v, AttentionShape s, int together) {
    const int QUERIES = 64, TILE = KEYS * W;
    extern __shared__ __align__(128) bf16 tiles[];
    bf16 *q_tile = tiles, *dout_tile = q_tile + QUERIES * W, *k_tile = dout_tile + QUERIES * W,
         *v_tile = k_tile + 2 * TILE;
    FlashPlace place = flash_my_place(together);
    int b = place.head / s.NH, h = place.head % s.NH, row = threadIdx.x / WARP * 16;
    int t = s.t0 + ((int)gridDim.y - 1 - place.tile) * QUERIES, n_queries = min(QUERIES, s.T - t);
    int last = attention_last_key(&s, t + n_queries - 1) / KEYS;
    int first = min(attention_sees_from(&s, b, t) / KEYS, last);
    FlashRange all = flash_keys(s, b, t + row, 16);
    size_t kv = attention_at_kv(&s, b, h / (s.NH / s.NKV), 0), at = attention_at_q(&s, b, h, t);
    auto load_keys = [&](int tile) {
        int u = tile * KEYS, stage = tile % 2 * TILE;
        tile_load<KEYS, W, FLASH_THREADS>(k_tile + stage, k + kv + u * s.kv_row, s.kv_row, s.keys - u, s.HS);
        tile_load<KEYS, W, FLASH_THREADS>(v_tile + stage, v + kv + u * s.kv_row, s.kv_row, s.keys - u, s.HS);
        cp_async_commit();
    };
    FlashRow mine[2];
    flash_my_rows(mine, rows, s, b, h, t, n_queries, row);
    float sums[1][W / 8][4];
    tile_set_zero(sums);
    tile_load<QUERIES, W, FLASH_THREADS>(q_tile, q + at, s.q_row, n_queries, s.HS);
    tile_load<QUERIES, W, FLASH_THREADS>(dout_tile, dout + attention_at_out(&s, b, h, t), s.out_row, n_queries, s.HS);
    load_keys(first);
    for (int tile = first; tile <= last; tile++) {
        int stage = tile % 2 * TILE;
        cp_async_wait<0>();
        __syncthreads();
        if (tile < last) { load_keys(tile + 1); }
        float scores[1][KEYS / 8][4], ds[1][KEYS / 8][4];
        unsigned operands[1][KEYS / 16][4];
        tile_set_zero(scores);
        tile_set_zero(ds);
        tile_add_product_transposed<W>(scores, q_tile, row, k_tile + stage);
        tile_add_product_transposed<W>(ds, dout_tile, row, v_tile + stage);
        flash_query_gradients_(ds, scores, mine, s, all, b, t + row, tile * KEYS);
        tile_to_operands(operands, ds);
        tile_add_product<W>(sums, operands, k_tile + stage);
    }
    const float scale[1][2] = {{s.scale, s.scale}};
    tile_store_rows<W>(dq + at, s.q_row, n_queries, s.HS, q_tile, row, sums, scale);
}

// ---- launches ----

static inline int flash_aligned_(const void* x, size_t row, size_t seq) {
    return (uintptr_t)x % 16 == 0 && row % 8 == 0 && seq % 8 == 0;
}

// of a head
static inline int flash_most_channels_(void) {
#ifdef WGMMA
    if (FLASH_HOPPER) { return FLASH_HOPPER_CHANNELS; }
#endif
    return FLASH_CHANNELS;
}

static inline int flash_fits(const bf16* q, const bf16* k, const bf16* v, const bf16* out, const AttentionShape* s) {
    return s->HS % 8 == 0 && s->HS <= flash_most_channels_() && flash_aligned_(q, s->q_row, s->q_seq) &&
           flash_aligned_(k, s->kv_row, s->kv_seq) && flash_aligned_(v, s->kv_row, s->kv_seq) &&
           flash_aligned_(out, s->out_row, s->out_seq);
}

template <int W, int M>
static inline void flash_forward_(bf16* out, float* max, float* inv, const bf16* q, const bf16* k, const bf16* v,
                                  const AttentionShape* s, const Device* dev) {
    int n_bytes = (int)sizeof(bf16) * W * (64 * M + 4 * FLASH_KEYS);
    dim3 grid = flash_grid(s->B * s->NH, attention_queries(s), 64 * M);
    cudaCheck(cudaFuncSetAttribute(flash_forward_kernel<W, M>, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    int together = flash_together(s->B * s->NH, s->keys, s->HS);
    flash_forward_kernel<W, M><<<grid, FLASH_THREADS, n_bytes, dev->stream>>>(out, max, inv, q, k, v, *s, together);
    cudaCheck(cudaGetLastError());
}

// N: queries, or keys, of a tile that is streamed
template <int W, int N>
static inline void flash_backward_(bf16* dq, bf16* dk, bf16* dv, const bf16* dout, const FlashRow* rows, const bf16* q,
                                   const bf16* k, const bf16* v, const AttentionShape* s, const Device* dev) {
    int n_bytes = (int)sizeof(bf16) * W * (2 * 64 + 4 * N), n_keys_bytes = n_bytes + 2 * N * (int)sizeof(FlashRow);
    dim3 key_grid = flash_grid(s->B * s->NKV, s->keys, FLASH_KEYS),
         query_grid = flash_grid(s->B * s->NH, attention_queries(s), 64);
    cudaCheck(cudaFuncSetAttribute(flash_backward_keys_kernel<W, N>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   n_keys_bytes));
    cudaCheck(cudaFuncSetAttribute(flash_backward_queries_kernel<W, N>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   n_bytes));
    int64_t n_group_rows = (int64_t)(s->NH / s->NKV) * attention_queries(s);
    int keys_together = flash_together(s->B * s->NKV, n_group_rows, s->HS),
        queries_together = flash_together(s->B * s->NH, s->keys, s->HS);
    flash_backward_keys_kernel<W, N>
        <<<key_grid, FLASH_THREADS, n_keys_bytes, dev->stream>>>(dk, dv, dout, rows, q, k, v, *s, keys_together);
    flash_backward_queries_kernel<W, N>
        <<<query_grid, FLASH_THREADS, n_bytes, dev->stream>>>(dq, dout, rows, q, k, v, *s, queries_together);
    cudaCheck(cudaGetLastError());
}

static inline int flash_refused_(const AttentionShape* s, const Device* dev) {
    device_fell_back(dev, FALLBACK_ATTENTION, "B %d, T %d, %d heads of %d channels", s->B, s->T, s->NH, s->HS);
    return 0;
}

// 1: done. 0: not for these shapes, which the Device counts, or, the templates, not for this type
static inline int flash_attention_forward(bf16* out, float* max, float* inv, const bf16* q, const bf16* k,
                                          const bf16* v, const AttentionShape* s, const Device* dev) {
    if (!flash_fits(q, k, v, out, s)) { return flash_refused_(s, dev); }
#ifdef WGMMA
    if (FLASH_HOPPER) {
        flash_hopper_forward(out, max, inv, q, k, v, s, dev);
        return 1;
    }
#endif
    if (s->HS <= 64) {
        flash_forward_<64, 2>(out, max, inv, q, k, v, s, dev);
    } else {
        flash_forward_<128, 1>(out, max, inv, q, k, v, s, dev);
    }
    return 1;
}

static inline int flash_attention_backward(bf16* dq, bf16* dk, bf16* dv, const bf16* dout, const bf16* out,
                                           const float* max, const float* inv, const bf16* q, const bf16* k,
                                           const bf16* v, const AttentionShape* s, const Device* dev) {
    if (!flash_fits(q, k, v, out, s) || !flash_fits(dq, dk, dv, dout, s)) { return flash_refused_(s, dev); }
    int64_t n_rows = (int64_t)s->B * s->NH * attention_queries(s);
    FlashRow* rows = (FlashRow*)device_workspace(dev, sizeof(FlashRow) * s->B * s->NH * flash_row_stride(s));
    int n_blocks = (int)ceil_div(n_rows, FLASH_ROWS_THREADS / 8);
    flash_rows_kernel<<<n_blocks, FLASH_ROWS_THREADS, 0, dev->stream>>>(rows, dout, out, max, inv, *s);
#ifdef WGMMA
    if (FLASH_HOPPER) {
        flash_hopper_backward(dq, dk, dv, dout, rows, q, k, v, s, dev);
        return 1;
    }
#endif
    if (s->HS <= 64) {
        flash_backward_<64, 64>(dq, dk, dv, dout, rows, q, k, v, s, dev);
    } else {
        flash_backward_<128, 32>(dq, dk, dv, dout, rows, q, k, v, s, dev);
    }
    return 1;
}

template <typename X>
static inline int flash_attention_forward(X*, float*, float*, const X*, const X*, const X*, const AttentionShape*,
                                          const Device*) {
    return 0;
}
template <typename X>
static inline int flash_attention_backward(X*, X*, X*, const X*, const X*, const float*, const float*, const X*,
                                           const X*, const X*, const AttentionShape*, const Device*) {
    return 0;
}
#endif  // __CUDACC__
#endif  // LLMC_FLASH_ATTENTION_H
