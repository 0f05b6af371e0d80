/*
Latent attention of latent_attention.h by wgmma, for Hopper (sm_90a): flash_latent.h calls it in a build with WGMMA,
that of make CUDA_ARCH=sm_90a, and says what it computes, of which shapes, and how far off. Other than there:
    channels    queries and keys are filled up with zeros to WQ, values to WV: 128, 128; 192, 128 (DeepSeek V3); 256,
                256 (GLM-5); for dk and dv both to WQ
    tiles       128 positions of a head have a block of two warpgroups, 64 each, in forward, dq and mass: half of the
                copies. What they see are more keys than 64 positions see, if their lists differ
    forward     the scores of a chunk, and the weights of the one before times its values, are products of one batch
    dk and dv   64 keys; scores and datt are transposed, keys by positions. The first warpgroup finds weights and dv,
                the second datt and dk, and weights go through shared memory as floats
    mass        128 keys; 64 channels of queries and keys are a stage, of which two are under way
Rows of a chunk are gathered by cp.async while the one before is multiplied. All but mass look it up two steps ahead.
Cost:   as there, but that a tile of 128 positions has 128 flops a byte. By ptxas of CUDA 13.0, without spills, of
        blocks of eight warps, one on a multiprocessor at once; and, of 256 channels, instructions that a warp issues
        for a chunk (make sass) and cycles for which tensor cores are busy with a block's:
                          registers, WQ   shared memory   chunk of      instructions   tensor cores
                         128, 192, 256
            forward      174, 157, 233       196 KiB      64 keys            563           2048
            positions    148, 181, 214       227 KiB      48 keys            583           2304
            keys         168, 199, 233       212 KiB      64 positions       305           2048
            mass         197, 198, 204       131 KiB      128 keys          1000           2048, of each head
        No card has run them; doc/gpu/glm5.md derives 69% of an H200's peak forward, 43% backward, 34% of mass.
*/
#ifndef LLMC_FLASH_LATENT_HOPPER_H
#define LLMC_FLASH_LATENT_HOPPER_H
#if defined(__CUDACC__) && defined(WGMMA)
#include "../core/kernel.h"  // WARP, ALL_LANES, LOG2_E, bf16, forgotten, cudaCheck
#include "../core/wgmma.h"   // WARPGROUP, wgmma_fence, wgmma_commit, wgmma_wait, wgmma_keep
#include "flash_rows.h"      // FlashRow, flash_row_weights, flash_row_gradients, flash_column_weights, ...
#include "flash_steps.h"     // flash_softmax_weights, flash_scale_rows, FLASH_LN_2
#include "latent_inputs.h"   // LatentInputsOf, LatentSight, LatentChunk, latent_see, latent_next, latent_find
#include "tile.h"            // tile_to_operands, tile_set_zero, tile_quad_sum, cp_async_commit
#include "wide_tile.h"       // wide_tile_load, wide_tile_gather, wide_tile_arrived, wide_tile_product, wide_tile_tell

enum {
    FLASH_LATENT_HOPPER_THREADS = 2 * WARPGROUP,
    FLASH_LATENT_HOPPER_WORDS = 4,                             // of a tile of positions
    FLASH_LATENT_HOPPER_ROWS = FLASH_LATENT_HOPPER_WORDS * WARP,
    FLASH_LATENT_HOPPER_KEYS = 64,   // of a chunk in forward; of a tile of keys, and of a chunk of positions
    FLASH_LATENT_HOPPER_FEW = 48,    // of a chunk in dq, as shared memory has room for
    FLASH_LATENT_HOPPER_MASS = 128,  // of a chunk in mass
    FLASH_LATENT_HOPPER_STEPS = 8,   // blocks that share a tile's chunks in mass
    FLASH_LATENT_HOPPER_STAGES = 4,  // of 64 channels in mass: so many lie in shared memory...
    FLASH_LATENT_HOPPER_AHEAD = 2    // ...and so many are under way
};
template <int KEYS>
using FlashLatentHopperChunk = LatentChunk<FLASH_LATENT_HOPPER_WORDS, KEYS>;

// ---- rows into shared memory ----

// row n of channels, from channel `first` on; TURNS: it is of keys, whose last channels lie elsewhere
template <int TURNS>
struct FlashLatentHopperRow {
    const bf16 *from, *turns;
    int n, n_from;
    __device__ FlashLatentHopperRow(const LatentRowsOf<bf16>& x, int row, int first) {
        from = x.from + latent_offset(row, (unsigned)x.row) + first, turns = from;
        if (TURNS) { turns = x.k_rope + latent_offset(row, (unsigned)x.k_rope_row) + (first - x.n_from); }
        n = x.n - first, n_from = x.n_from - first;
    }
    __device__ const bf16* channel(int c, int more) const {
        return (TURNS && c + more >= n_from ? turns : from) + c + more;
    }
};

// rows, row i number at(i), are on their way to a tile
template <int W, int ROWS, int TURNS, typename At>
__device__ inline void flash_latent_hopper_load_(bf16* tile, const LatentRowsOf<bf16>& x, At at, int first = 0) {
    wide_tile_gather<W, ROWS, FLASH_LATENT_HOPPER_THREADS>(
        tile, [&](int i) { return FlashLatentHopperRow<TURNS>(x, at(i), first); }, forgotten(threadIdx.x));
}

template <int W, int TURNS, int WORDS, int KEYS>
__device__ inline void flash_latent_hopper_load_items_(bf16* tile, const LatentRowsOf<bf16>& x,
                                                       const LatentChunk<WORDS, KEYS>& chunk, int first = 0) {
    flash_latent_hopper_load_<W, KEYS, TURNS>(tile, x, [&](int row) { return chunk.item[row]; }, first);
}

// Of the chunks that a block goes over three are known at a time: chunk i is chunks[i % 3]. While it is multiplied rows
// of the next one arrive, and the one behind that is looked up. Here are the places of the first two
struct FlashLatentHopperPlaces {
    int now, next;
};
template <int WORDS, int KEYS>
__device__ inline FlashLatentHopperPlaces flash_latent_hopper_begin_(LatentChunk<WORDS, KEYS>* chunks,
                                                                     const LatentSight& see,
                                                                     const LatentSeen<WORDS>& seen) {
    const int now = latent_next(see, seen, 0), next = latent_next(see, seen, now + KEYS);
    latent_find<FLASH_LATENT_HOPPER_THREADS>(chunks[0], see, seen, now);
    latent_find<FLASH_LATENT_HOPPER_THREADS>(chunks[1], see, seen, next);
    __syncthreads();
    return {now, next};
}

// x of a warp's 16 rows, from `row` of the tile on, and a chunk's items: `hidden` where one does not see the other
template <int N, int WORDS>
__device__ inline void flash_latent_hopper_hide_(float (&x)[1][N][4], const LatentChunk<WORDS, 8 * N>& chunk, int row,
                                                 float hidden) {
    const int lane = threadIdx.x % WARP, bit = row % WARP + lane / 4;
    #pragma unroll
    for (int n = 0; n < N; n++) {
        const uint2 by = *(const uint2*)&chunk.seen_by[row / WARP][8 * n + lane % 4 * 2];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned bits = i % 2 ? by.y : by.x;
            x[0][n][i] = bits >> (bit + i / 2 * 8) & 1 ? x[0][n][i] : hidden;
        }
    }
}

// ---- forward ----

// grid (tiles of positions, heads). shared memory: queries, two stages of keys, two of values, three chunks
template <int WQ, int WV>
__global__ void __launch_bounds__(FLASH_LATENT_HOPPER_THREADS)
flash_latent_forward_hopper_kernel(bf16* out, float* max, float* inv, LatentInputsOf<bf16> in, LatentSight see) {
    const int ROWS = FLASH_LATENT_HOPPER_ROWS, KEYS = FLASH_LATENT_HOPPER_KEYS, THREADS = FLASH_LATENT_HOPPER_THREADS;
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    bf16 *q_tile = wide_tiles, *k_tile = q_tile + ROWS * WQ, *v_tile = k_tile + 2 * KEYS * WQ;
    FlashLatentHopperChunk<KEYS>* chunks = (FlashLatentHopperChunk<KEYS>*)(v_tile + 2 * KEYS * WV);
    const int h = blockIdx.y, H = in.s.H, Q = in.s.dn + in.s.dr, dv = in.s.dv;
    const int part = wide_tile_warpgroup(), row = threadIdx.x / WARP * 16;
    const LatentSeen<FLASH_LATENT_HOPPER_WORDS> seen =
        latent_see<FLASH_LATENT_HOPPER_WORDS>(see, gridDim.x - 1 - blockIdx.x);
    const size_t first = (size_t)seen.row * H + h;
    const int n_rows = seen.n_rows(see);
    FlashLatentHopperPlaces at = flash_latent_hopper_begin_(chunks, see, seen);
    float sums[1][WV / 8][4], scores[1][KEYS / 8][4], shrink[1][2];
    float m[1][2] = {{-10000.0f * LOG2_E, -10000.0f * LOG2_E}}, sum[1][2] = {{0.0f, 0.0f}};
    unsigned p[1][KEYS / 16][4];
    auto load_keys = [&](int i) {
        flash_latent_hopper_load_items_<WQ, 1>(k_tile + i % 2u * KEYS * WQ, in.keys(h), chunks[i % 3u]);
    };
    auto product = [&](int i) {
        wgmma_fence();
        wide_tile_product_transposed<WQ, ROWS>(scores, q_tile, part, k_tile + i % 2u * KEYS * WQ);
        wgmma_commit();
    };
    auto add_product = [&](int i) {
        wgmma_keep(sums);
        wgmma_fence();
        wide_tile_product<WV>(sums, p, v_tile + i % 2u * KEYS * WV, 1);
        wgmma_commit();
    };
    auto weigh = [&](int i) {
        wgmma_keep(scores);
        flash_latent_hopper_hide_(scores, chunks[i % 3u], row, -INFINITY);
        flash_softmax_weights(scores, shrink, m, sum, in.s.scale * LOG2_E);
    };
    // the keys of chunk i have arrived, and the values of the one before; its own values, and the next keys, set out
    auto arrive = [&](int i) {
        wide_tile_arrived();
        if (at.next < seen.end) { load_keys(i + 1); }
        flash_latent_hopper_load_items_<WV, 0>(v_tile + i % 2u * KEYS * WV, in.values(h), chunks[i % 3u]);
        cp_async_commit();
    };
    tile_set_zero(sums);
    if (at.now < seen.end) {
        wide_tile_load<ROWS, WQ, THREADS>(q_tile, in.q + first * Q, (size_t)H * Q, n_rows, Q);
        load_keys(0);
        cp_async_commit();
        arrive(0);
        int i = 1, later = latent_next(see, seen, at.next + KEYS);
        LatentItem<FLASH_LATENT_HOPPER_WORDS> item = latent_look<THREADS, KEYS>(see, seen, later);
        product(0);
        latent_keep<THREADS>(chunks[2], item);
        wgmma_wait<0>();
        weigh(0);
        tile_to_operands(p, scores);
        at = {at.next, later};
        for (; at.now < seen.end; i++) {
            arrive(i);
            later = latent_next(see, seen, at.next + KEYS);
            item = latent_look<THREADS, KEYS>(see, seen, later);
            product(i);
            add_product(i - 1);
            latent_keep<THREADS>(chunks[(i + 2) % 3u], item);
            wgmma_wait<1>();
            weigh(i);
            wgmma_wait<0>();
            wgmma_keep(sums);
            const bool grew = shrink[0][0] != 1.0f || shrink[0][1] != 1.0f;
            if (__any_sync(ALL_LANES, grew)) { flash_scale_rows(sums, shrink); }
            tile_to_operands(p, scores);
            at = {at.next, later};
        }
        wide_tile_arrived();  // and nobody multiplies queries any more
        add_product(i - 1);
        wgmma_wait<0>();
        wgmma_keep(sums);
    }
    for (int i = 0; i < 2; i++) {
        const float total = tile_quad_sum(sum[0][i]), r = total == 0.0f ? 0.0f : 1.0f / total;
        const int n = row + 8 * i + threadIdx.x % WARP / 4;
        sum[0][i] = r;
        if (threadIdx.x % 4 == 0 && n < n_rows) { max[first + n * H] = m[0][i] * FLASH_LN_2, inv[first + n * H] = r; }
    }
    wide_tile_store_rows<WV, ROWS>(out + first * dv, (size_t)H * dv, n_rows, dv, q_tile, row, sums, sum);
}

// ---- backward ----

// grid (tiles of positions, heads). rows (N, H). shared memory: queries, dout, two stages of keys, two of values, three
// chunks
template <int WQ, int WV>
__global__ void __launch_bounds__(FLASH_LATENT_HOPPER_THREADS)
flash_latent_positions_hopper_kernel(bf16* dq, const FlashRow* rows, LatentInputsOf<bf16> in, LatentSight see) {
    const int ROWS = FLASH_LATENT_HOPPER_ROWS, KEYS = FLASH_LATENT_HOPPER_FEW, THREADS = FLASH_LATENT_HOPPER_THREADS;
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    bf16 *q_tile = wide_tiles, *dout_tile = q_tile + ROWS * WQ, *k_tile = dout_tile + ROWS * WV,
         *v_tile = k_tile + 2 * KEYS * WQ;
    FlashLatentHopperChunk<KEYS>* chunks = (FlashLatentHopperChunk<KEYS>*)(v_tile + 2 * KEYS * WV);
    const int h = blockIdx.y, H = in.s.H, Q = in.s.dn + in.s.dr, dv = in.s.dv;
    const int part = wide_tile_warpgroup(), row = threadIdx.x / WARP * 16;
    const LatentSeen<FLASH_LATENT_HOPPER_WORDS> seen =
        latent_see<FLASH_LATENT_HOPPER_WORDS>(see, gridDim.x - 1 - blockIdx.x);
    const size_t first = (size_t)seen.row * H + h;
    const int n_rows = seen.n_rows(see);
    FlashLatentHopperPlaces at = flash_latent_hopper_begin_(chunks, see, seen);
    auto load = [&](int i) {
        flash_latent_hopper_load_items_<WQ, 1>(k_tile + i % 2u * KEYS * WQ, in.keys(h), chunks[i % 3u]);
        flash_latent_hopper_load_items_<WV, 0>(v_tile + i % 2u * KEYS * WV, in.values(h), chunks[i % 3u]);
        cp_async_commit();
    };
    FlashRow of[2];
    for (int i = 0; i < 2; i++) {
        const int n = row + 8 * i + threadIdx.x % WARP / 4;
        of[i] = {INFINITY, 0.0f};
        if (n < n_rows) { of[i] = rows[first + n * H]; }
    }
    float sums[1][WQ / 8][4];
    tile_set_zero(sums);
    wide_tile_load<ROWS, WQ, THREADS>(q_tile, in.q + first * Q, (size_t)H * Q, n_rows, Q);
    wide_tile_load<ROWS, WV, THREADS>(dout_tile, in.dout + first * dv, (size_t)H * dv, n_rows, dv);
    load(0);
    for (int i = 0; at.now < seen.end; i++) {
        const bf16 *keys = k_tile + i % 2u * KEYS * WQ, *values = v_tile + i % 2u * KEYS * WV;
        float p[1][KEYS / 8][4], ds[1][KEYS / 8][4];
        unsigned operands[1][KEYS / 16][4];
        wide_tile_arrived();  // and nobody multiplies the chunk before any more
        if (at.next < seen.end) { load(i + 1); }
        const int later = latent_next(see, seen, at.next + KEYS);
        const LatentItem<FLASH_LATENT_HOPPER_WORDS> item = latent_look<THREADS, KEYS>(see, seen, later);
        wgmma_fence();
        wide_tile_product_transposed<WQ, ROWS>(p, q_tile, part, keys);
        wide_tile_product_transposed<WV, ROWS>(ds, dout_tile, part, values);
        wgmma_commit();
        latent_keep<THREADS>(chunks[(i + 2) % 3u], item);
        wgmma_wait<0>();
        wgmma_keep(p);
        wgmma_keep(ds);
        flash_row_weights(p, of, in.s.scale * LOG2_E);
        flash_row_gradients(ds, p, of);
        flash_latent_hopper_hide_(ds, chunks[i % 3u], row, 0.0f);
        tile_to_operands(operands, ds);
        wgmma_keep(sums);
        wgmma_fence();
        wide_tile_product<WQ>(sums, operands, keys, 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(sums);
        at = {at.next, later};
    }
    cp_async_wait<0>();  // of a tile that sees nothing
    __syncthreads();     // nobody multiplies queries any more
    const float scale[1][2] = {{in.s.scale, in.s.scale}};
    wide_tile_store_rows<WQ, ROWS>(dq + first * Q, (size_t)H * Q, n_rows, Q, q_tile, row, sums, scale);
}

// of a warp's 16 keys, from `row` on, of which n_rows exist, the dr channels from dn on: times scale to (keys, dr)
template <int N>
__device__ inline void flash_latent_hopper_k_rope_(float* to, const float (&sums)[1][N][4], int row, int n_rows, int dn,
                                                   int dr, float scale) {
    const int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        const int n = i / 2, r = row + i % 2 * 8 + lane / 4, c = 8 * n + lane % 4 * 2 - dn;
        if (8 * n < dn || 8 * n >= dn + dr || r >= n_rows) { continue; }
        to[(size_t)r * dr + c] = sums[0][n][i % 2 * 2] * scale;
        to[(size_t)r * dr + c + 1] = sums[0][n][i % 2 * 2 + 1] * scale;
    }
}

// heads (H, n_keys, dr): what each adds to dk_rope; n_keys: rows of `see`. grid (tiles of keys, heads). rows (N, H).
// shared memory: keys, values, two stages of queries, two of dout, weights from one warpgroup to the other, two stages
// of rows, three chunks
template <int W>
__global__ void __launch_bounds__(FLASH_LATENT_HOPPER_THREADS)
flash_latent_keys_hopper_kernel(bf16* dkv, float* heads, const FlashRow* rows, LatentInputsOf<bf16> in,
                                LatentSight see) {
    const int KEYS = FLASH_LATENT_HOPPER_KEYS, WORDS = KEYS / WARP, TILE = KEYS * W;
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    bf16 *k_tile = wide_tiles, *v_tile = k_tile + TILE, *q_tile = v_tile + TILE, *dout_tile = q_tile + 2 * TILE;
    float4* told = (float4*)(dout_tile + 2 * TILE);
    FlashRow* row_tile = (FlashRow*)(told + KEYS * KEYS / 4);
    LatentChunk<WORDS, KEYS>* chunks = (LatentChunk<WORDS, KEYS>*)(row_tile + 2 * KEYS);
    const int h = blockIdx.y, H = in.s.H, dn = in.s.dn, KV = dn + in.s.dv;
    const int part = wide_tile_warpgroup(), t = threadIdx.x % WARPGROUP, row = t / WARP * 16;
    const LatentSeen<WORDS> seen = latent_see<WORDS>(see, blockIdx.x);  // the first keys are seen by most
    const int n_rows = seen.n_rows(see);
    FlashLatentHopperPlaces at = flash_latent_hopper_begin_(chunks, see, seen);
    auto load = [&](int i) {
        flash_latent_hopper_load_items_<W, 0>(q_tile + i % 2u * TILE, in.queries(h), chunks[i % 3u]);
        flash_latent_hopper_load_items_<W, 0>(dout_tile + i % 2u * TILE, in.gradients(h), chunks[i % 3u]);
        cp_async_commit();
    };
    const bool has_row = part && t < KEYS;  // of a position, on its way to the first warpgroup too
    auto row_of = [&](int i) { return rows[(size_t)chunks[i % 3u].item[t % KEYS] * H + h]; };
    auto mine = [&](int n) { return min(seen.row + n, see.N - 1); };
    float sums[1][W / 8][4];  // of the first dv, of the second dk
    tile_set_zero(sums);
    flash_latent_hopper_load_<W, KEYS, 1>(k_tile, in.keys(h), mine);
    flash_latent_hopper_load_<W, KEYS, 0>(v_tile, in.values(h), mine);
    load(0);
    if (has_row) { row_tile[t] = row_of(0); }
    for (int i = 0; at.now < seen.end; i++) {
        const bf16 *queries = q_tile + i % 2u * TILE, *douts = dout_tile + i % 2u * TILE;
        const FlashRow* now = row_tile + i % 2u * KEYS + t % 4 * 2;
        float x[1][KEYS / 8][4];
        unsigned operands[1][KEYS / 16][4];
        FlashRow next_row = {0.0f, 0.0f};
        wide_tile_arrived();  // and nobody multiplies the chunk before any more
        if (at.next < seen.end) {
            load(i + 1);
            if (has_row) { next_row = row_of(i + 1); }
        }
        const int later = latent_next(see, seen, at.next + KEYS);
        const LatentItem<WORDS> item = latent_look<FLASH_LATENT_HOPPER_THREADS, KEYS>(see, seen, later);
        wgmma_fence();
        wide_tile_product_transposed<W, KEYS>(x, part ? v_tile : k_tile, 0, part ? douts : queries);
        wgmma_commit();
        latent_keep<FLASH_LATENT_HOPPER_THREADS>(chunks[(i + 2) % 3u], item);
        wgmma_wait<0>();
        wgmma_keep(x);
        if (!part) {
            flash_column_weights(x, now, in.s.scale * LOG2_E);
            flash_latent_hopper_hide_(x, chunks[i % 3u], row, 0.0f);
            wide_tile_tell(told, x);
        }
        __syncthreads();
        if (part) {
            float p[1][KEYS / 8][4];
            wide_tile_hear(p, told);
            flash_column_gradients(x, p, now);
            if (has_row) { row_tile[(i + 1) % 2u * KEYS + t] = next_row; }
        }
        tile_to_operands(operands, x);
        wgmma_keep(sums);
        wgmma_fence();
        wide_tile_product<W>(sums, operands, part ? queries : douts, 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(sums);
        at = {at.next, later};
    }
    cp_async_wait<0>();  // of keys that no position sees, copies may be under way
    __syncthreads();
    bf16* to = dkv + ((size_t)seen.row * H + h) * KV;
    if (!part) {
        const float one[1][2] = {{1.0f, 1.0f}};
        wide_tile_store_rows<W, KEYS>(to + dn, (size_t)H * KV, n_rows, in.s.dv, v_tile, row, sums, one);
        return;
    }
    const float scale[1][2] = {{in.s.scale, in.s.scale}};
    wide_tile_store_rows<W, KEYS>(to, (size_t)H * KV, n_rows, dn, k_tile, row, sums, scale);
    flash_latent_hopper_k_rope_(heads + ((size_t)h * see.N + seen.row) * in.s.dr, sums, row, n_rows, dn, in.s.dr,
                                in.s.scale);
}

// ---- mass ----

// grid (tiles of positions, FLASH_LATENT_HOPPER_STEPS): a block has every FLASH_LATENT_HOPPER_STEPS-th chunk. shared
// memory: stages of 64 channels of queries and of keys, a chunk
template <int WQ>
__global__ void __launch_bounds__(FLASH_LATENT_HOPPER_THREADS)
flash_latent_mass_hopper_kernel(float* mass, LatentInputsOf<bf16> in, LatentSight see, int goes_on) {
    const int ROWS = FLASH_LATENT_HOPPER_ROWS, KEYS = FLASH_LATENT_HOPPER_MASS, THREADS = FLASH_LATENT_HOPPER_THREADS;
    const int STAGES = FLASH_LATENT_HOPPER_STAGES, AHEAD = FLASH_LATENT_HOPPER_AHEAD;
    const int TILE = (ROWS + KEYS) * 64, SLICES = WQ / 64;
    static_assert(SLICES >= AHEAD, "what sets out before the first head is used is of that head");
    static_assert(AHEAD + 2 <= STAGES, "a stage is written two steps after its product began");
    static_assert(sizeof(float) * ROWS * KEYS <= sizeof(bf16) * STAGES * TILE, "what is kept fits into the stages");
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    float* kept = (float*)wide_tiles;  // (ROWS, KEYS), before and after the products of a chunk
    FlashLatentHopperChunk<KEYS>& chunk = *(FlashLatentHopperChunk<KEYS>*)(wide_tiles + STAGES * TILE);
    const int H = in.s.H, Q = in.s.dn + in.s.dr, lane = threadIdx.x % WARP;
    const int part = wide_tile_warpgroup(), row = threadIdx.x / WARP * 16;
    const LatentSeen<FLASH_LATENT_HOPPER_WORDS> seen =
        latent_see<FLASH_LATENT_HOPPER_WORDS>(see, gridDim.x - 1 - blockIdx.x);
    const int n_rows = seen.n_rows(see);
    if (blockIdx.y == 0) { latent_clear_ends<THREADS>(mass, see, seen); }
    // step by step 64 channels of a head
    auto load = [&](int step) {
        const int h = step / SLICES, c = step % SLICES * 64;
        bf16* tile = wide_tiles + step % STAGES * TILE;
        const size_t from = (size_t)seen.row * H * Q + (size_t)h * Q + c;
        wide_tile_load<ROWS, 64, THREADS>(tile, in.q + from, (size_t)H * Q, n_rows, Q - c);
        flash_latent_hopper_load_items_<64, 1>(tile + ROWS * 64, in.keys(h), chunk, c);
        cp_async_commit();
    };
    for (int k0 = blockIdx.y * KEYS; k0 < seen.end; k0 += FLASH_LATENT_HOPPER_STEPS * KEYS) {
        float totals[1][KEYS / 8][4], scores[1][KEYS / 8][4];
        tile_set_zero(totals);
        __syncthreads();  // the chunk before has been used
        latent_find<THREADS>(chunk, see, seen, k0);
        __syncthreads();
        auto each_mine = [&](auto&& use) {
            #pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                const int r = row + i % 4 / 2 * 8 + lane / 4, k = i / 4 * 8 + lane % 4 * 2 + i % 2;
                use(totals[0][i / 4][i % 4], kept[r * KEYS + k]);
            }
        };
        if (goes_on) {
            latent_each_seen<THREADS>(see, seen, chunk,
                                      [&](size_t place, int r, int k) { kept[r * KEYS + k] = mass[place]; });
            __syncthreads();
            each_mine([](float& total, float& x) { total = x; });  // of what is not seen, anything
            __syncthreads();
        }
        for (int step = 0; step < AHEAD; step++) { load(step); }
        for (int h = 0; h < H; h++) {
            float level[2], factor[2];
            for (int i = 0; i < 2; i++) {
                const int n = min(row + 8 * i + lane / 4, n_rows - 1);
                const size_t at = (size_t)(seen.row + n) * H + h;
                level[i] = in.max[at] * LOG2_E, factor[i] = in.inv[at];
            }
            #pragma unroll
            for (int slice = 0; slice < SLICES; slice++) {
                const int step = h * SLICES + slice;
                const bf16* tile = wide_tiles + step % STAGES * TILE;
                wide_tile_arrived<AHEAD - 1>();  // and nobody multiplies what was two steps before any more
                if (step + AHEAD < H * SLICES) { load(step + AHEAD); }
                else { cp_async_commit(); }
                wgmma_fence();
                wide_tile_product_transposed<64, ROWS>(scores, tile, part, tile + ROWS * 64, slice > 0);
                wgmma_commit();
                if (slice + 1 < SLICES) { wgmma_wait<1>(); }
                else { wgmma_wait<0>(); }
            }
            wgmma_keep(scores);
            #pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                const float score = scores[0][i / 4][i % 4] * (in.s.scale * LOG2_E);
                totals[0][i / 4][i % 4] += kernel_exp2(score - level[i % 4 / 2]) * factor[i % 4 / 2];
            }
        }
        __syncthreads();  // nobody multiplies any more
        each_mine([](float& total, float& x) { x = total; });
        __syncthreads();
        latent_each_seen<THREADS>(see, seen, chunk,
                                  [&](size_t place, int r, int k) { mass[place] = kept[r * KEYS + k]; });
    }
}

// ---- launches ----

constexpr size_t FLASH_LATENT_HOPPER_SHARED = (size_t)227 << 10;  // bytes that a block can have

template <int WQ, int WV>
static inline void flash_latent_hopper_forward_(bf16* out, float* max, float* inv, const LatentInputsOf<bf16>& in,
                                                const LatentSight& see, const Device* dev) {
    const int KEYS = FLASH_LATENT_HOPPER_KEYS;
    constexpr size_t n_bytes = sizeof(bf16) * (FLASH_LATENT_HOPPER_ROWS * WQ + 2 * KEYS * (WQ + WV)) +
                               3 * sizeof(FlashLatentHopperChunk<KEYS>);
    static_assert(n_bytes <= FLASH_LATENT_HOPPER_SHARED, "a block has no room for its tiles");
    const dim3 grid(latent_tiles(see.N, FLASH_LATENT_HOPPER_WORDS), (unsigned)in.s.H);
    cudaCheck(cudaFuncSetAttribute(flash_latent_forward_hopper_kernel<WQ, WV>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes));
    flash_latent_forward_hopper_kernel<WQ, WV>
        <<<grid, FLASH_LATENT_HOPPER_THREADS, n_bytes, dev->stream>>>(out, max, inv, in, see);
    cudaCheck(cudaGetLastError());
}

template <int WQ, int WV>
static inline void flash_latent_hopper_positions_(bf16* dq, const FlashRow* rows, const LatentInputsOf<bf16>& in,
                                                  const LatentSight& see, const Device* dev) {
    const int KEYS = FLASH_LATENT_HOPPER_FEW;
    constexpr size_t n_bytes = sizeof(bf16) * (FLASH_LATENT_HOPPER_ROWS + 2 * KEYS) * (WQ + WV) +
                               3 * sizeof(FlashLatentHopperChunk<KEYS>);
    static_assert(n_bytes <= FLASH_LATENT_HOPPER_SHARED, "a block has no room for its tiles");
    const dim3 grid(latent_tiles(see.N, FLASH_LATENT_HOPPER_WORDS), (unsigned)in.s.H);
    cudaCheck(cudaFuncSetAttribute(flash_latent_positions_hopper_kernel<WQ, WV>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes));
    flash_latent_positions_hopper_kernel<WQ, WV>
        <<<grid, FLASH_LATENT_HOPPER_THREADS, n_bytes, dev->stream>>>(dq, rows, in, see);
    cudaCheck(cudaGetLastError());
}

template <int W>
static inline void flash_latent_hopper_keys_(bf16* dkv, float* heads, const FlashRow* rows,
                                             const LatentInputsOf<bf16>& in, const LatentSight& see,
                                             const Device* dev) {
    const int KEYS = FLASH_LATENT_HOPPER_KEYS, WORDS = KEYS / WARP;
    constexpr size_t n_bytes = sizeof(bf16) * 6 * KEYS * W + sizeof(float) * KEYS * KEYS +
                               2 * KEYS * sizeof(FlashRow) + 3 * sizeof(LatentChunk<WORDS, KEYS>);
    static_assert(n_bytes <= FLASH_LATENT_HOPPER_SHARED, "a block has no room for its tiles");
    const dim3 grid(latent_tiles(see.N, WORDS), (unsigned)in.s.H);
    cudaCheck(cudaFuncSetAttribute(flash_latent_keys_hopper_kernel<W>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes));
    flash_latent_keys_hopper_kernel<W>
        <<<grid, FLASH_LATENT_HOPPER_THREADS, n_bytes, dev->stream>>>(dkv, heads, rows, in, see);
    cudaCheck(cudaGetLastError());
}

template <int WQ>
static inline void flash_latent_hopper_mass_(float* mass, const LatentInputsOf<bf16>& in, const LatentSight& see,
                                             int goes_on, const Device* dev) {
    const int ROWS = FLASH_LATENT_HOPPER_ROWS, KEYS = FLASH_LATENT_HOPPER_MASS;
    constexpr size_t n_bytes = sizeof(bf16) * FLASH_LATENT_HOPPER_STAGES * (ROWS + KEYS) * 64 +
                               sizeof(FlashLatentHopperChunk<KEYS>);
    static_assert(n_bytes <= FLASH_LATENT_HOPPER_SHARED, "a block has no room for its tiles");
    const dim3 grid(latent_tiles(see.N, FLASH_LATENT_HOPPER_WORDS), FLASH_LATENT_HOPPER_STEPS);
    cudaCheck(cudaFuncSetAttribute(flash_latent_mass_hopper_kernel<WQ>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)n_bytes));
    flash_latent_mass_hopper_kernel<WQ>
        <<<grid, FLASH_LATENT_HOPPER_THREADS, n_bytes, dev->stream>>>(mass, in, see, goes_on);
    cudaCheck(cudaGetLastError());
}

// room, lists: as flash_latent.h has them
static inline void flash_latent_hopper_forward(bf16* out, float* max, float* inv, const LatentInputsOf<bf16>& in,
                                               int* room, const int* chosen, const Places* places, const Device* dev) {
    const LatentSight see = latent_sight<FLASH_LATENT_HOPPER_WORDS>(room, chosen, &in.s, places, dev);
    const int Q = in.s.dn + in.s.dr;
    if (Q <= 128 && in.s.dv <= 128) { flash_latent_hopper_forward_<128, 128>(out, max, inv, in, see, dev); }
    else if (Q <= 192 && in.s.dv <= 128) { flash_latent_hopper_forward_<192, 128>(out, max, inv, in, see, dev); }
    else { flash_latent_hopper_forward_<256, 256>(out, max, inv, in, see, dev); }
}

template <int WQ, int WV>
static inline void flash_latent_hopper_backward_(bf16* dq, bf16* dkv, const FlashRow* rows, float* heads,
                                                 const LatentInputsOf<bf16>& in, int* room, int* lists,
                                                 const int* chosen, int n_keys, const Places* places,
                                                 const Device* dev) {
    const LatentSight see = latent_sight<FLASH_LATENT_HOPPER_WORDS>(room, chosen, &in.s, places, dev);
    flash_latent_hopper_positions_<WQ, WV>(dq, rows, in, see, dev);
    const LatentSight turned = latent_turned<FLASH_LATENT_HOPPER_KEYS / WARP>(see, lists, n_keys, dev);
    flash_latent_hopper_keys_<WQ>(dkv, heads, rows, in, turned, dev);
}

static inline void flash_latent_hopper_backward(bf16* dq, bf16* dkv, const FlashRow* rows, float* heads,
                                                const LatentInputsOf<bf16>& in, int* room, int* lists,
                                                const int* chosen, int n_keys, const Places* places,
                                                const Device* dev) {
    const int Q = in.s.dn + in.s.dr;
    auto* backward = flash_latent_hopper_backward_<256, 256>;
    if (Q <= 128 && in.s.dv <= 128) { backward = flash_latent_hopper_backward_<128, 128>; }
    else if (Q <= 192 && in.s.dv <= 128) { backward = flash_latent_hopper_backward_<192, 128>; }
    backward(dq, dkv, rows, heads, in, room, lists, chosen, n_keys, places, dev);
}

static inline void flash_latent_hopper_mass(float* mass, const LatentInputsOf<bf16>& in, int* room, const int* chosen,
                                            int goes_on, const Places* places, const Device* dev) {
    const LatentSight see = latent_sight<FLASH_LATENT_HOPPER_WORDS>(room, chosen, &in.s, places, dev);
    const int Q = in.s.dn + in.s.dr;
    if (Q <= 128) { flash_latent_hopper_mass_<128>(mass, in, see, goes_on, dev); }
    else if (Q <= 192) { flash_latent_hopper_mass_<192>(mass, in, see, goes_on, dev); }
    else { flash_latent_hopper_mass_<256>(mass, in, see, goes_on, dev); }
}
#endif  // WGMMA
#endif  // LLMC_FLASH_LATENT_HOPPER_H
