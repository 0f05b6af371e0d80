/*
Latent attention of latent_attention.h in bf16 on tensor cores, which calls it where it can: dn, dr and dv multiples of
8, keys and values of up to 256 channels, rows that begin at multiples of 16 bytes, and as much shared memory as that
needs; otherwise its own kernels run. Keys and values of 128 or 256 channels waste nothing; others are filled up with
zeros to the next of the two.
In a build for Hopper (WGMMA) flash_latent_hopper.h has all of it, but for the rows of FlashRow.
    A block of threads has 64 neighbouring positions of one head and goes over what any of them sees (latent_inputs.h),
    a chunk at a time; who does not see a key gives it no weight. Backward has the same twice: positions and what they
    see, for dq, then keys and the positions by which they are seen, for dk and dv. No atomics
    forward    softmax "online" (flash_attention.h). The keys of the next chunk are under way (cp.async) while this
               one's values are used, and its values while the next scores are made
    backward   a chunk is half as long and has two stages, as two products are made of it at a time
    mass       a block goes from head to head with a chunk, and adds up weights in registers
Error:  products of bf16 are exact in float. With e = 2^-8, the rounding of bf16, to first order, beside sums in float:
            out   e * sum of att |value|  (weights are rounded before they meet values)  + e |out|
            dq    e * sum of (|ds| + att scale |dout| . |out|) |key|  + e |dq|  (D is made of out, rounded)
            dkv   the same sums over n, with |q|, or e * sum of att |dout|,  + e |dkv|
        An Inf or NaN reaches the rows of tiles that see it, and no others.
Cost:   flops of each head, position and key of its tile: forward 2 (dn + dr + dv), mass 2 (dn + dr), backward
        8 (dn + dr) + 6 dv, for scores and datt are made twice. Forward reads 2 (dn + dr + dv) bytes for each head and
        key of a tile of 64 positions, which is 64 flops a byte; backward reads twice as many bytes. By ptxas of CUDA
        13.0 for sm_90, without spills, of blocks of eight warps:
                         registers, W 128, W 256     shared memory             blocks at once
            forward           127           166      80 KiB, 128 KiB           2, 1
            mass              114           112      96 KiB, 160 KiB           2, 1
            positions         126           163      96 KiB, 160 KiB           2, 1
            keys              160           229      96 KiB, 160 KiB           1, 1
        Not measured on a GPU.
Source: Dao 2023, arXiv:2307.08691; DeepSeek-AI 2024, arXiv:2405.04434
*/
#ifndef LLMC_FLASH_LATENT_H
#define LLMC_FLASH_LATENT_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // WARP, LOG2_E, bf16, forgotten, kernel_exp, kernel_exp2
#include "../core/mma.h"     // cp_async_16_zfill, cp_async_commit, cp_async_wait
#ifdef WGMMA
#include "flash_latent_hopper.h"  // FLASH_LATENT_HOPPER_WORDS, flash_latent_hopper_forward, ...
#endif
#include "flash_rows.h"      // FlashRow, flash_head_rows
#include "latent_inputs.h"   // LatentInputsOf, LatentSight, latent_see, latent_next, latent_find
#include "tile_rows.h"       // tile_rows_dots, tile_rows_read, tile_rows_write, tile_rows_store

#ifndef FLASH_LATENT_HOPPER  // test_latent_attention.c: a variable, so that it has both kinds of kernels
#define FLASH_LATENT_HOPPER 1
#endif

enum {
    FLASH_LATENT_WORDS = TILE_ROWS / WARP,   // of a tile's rows...
#ifdef WGMMA
    FLASH_LATENT_MOST_WORDS = FLASH_LATENT_HOPPER_WORDS,  // ...and as many as scratch has room for
#else
    FLASH_LATENT_MOST_WORDS = FLASH_LATENT_WORDS,
#endif
    FLASH_LATENT_KEYS = 64,                  // of a chunk in forward and mass...
    FLASH_LATENT_HALF = FLASH_LATENT_KEYS / 2,  // ...and in backward
    FLASH_LATENT_STEPS = 8                   // blocks that share a tile's chunks in mass
};
typedef LatentSeen<FLASH_LATENT_WORDS> FlashLatentSeen;
template <int KEYS>
using FlashLatentChunk = LatentChunk<FLASH_LATENT_WORDS, KEYS>;

// ---- rows into shared memory ----

// ROWS rows of channels, row i number at(i), are on their way to a tile; what lies beyond the last channel becomes 0
template <int W, int ROWS, typename At>
__device__ inline void flash_latent_load_(bf16* tile, const LatentRowsOf<bf16>& x, At at) {
    const int AT_ONCE = TILE_ROWS_THREADS / (W / 8);
    const int t = forgotten(threadIdx.x);  // between two chunks registers are short
    const int column = t % (W / 8), first = t / (W / 8), exists = column * 8 < x.n;
    const bf16* from = x.channel(exists ? column * 8 : 0);
    const unsigned stride = x.stride(exists ? column * 8 : 0);
    #pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; i++) {
        const int row = first + i * AT_ONCE;
        cp_async_16_zfill(tile_chunk<W>(tile, row, column), from + latent_offset(at(row), stride),
                          exists ? 16 : 0);
    }
}

// of a tile; rows that do not exist are copies of the last one
template <int W>
__device__ inline void flash_latent_load_rows_(bf16* tile, const LatentRowsOf<bf16>& x, const LatentSight& see,
                                               const FlashLatentSeen& seen) {
    flash_latent_load_<W, TILE_ROWS>(tile, x, [&](int row) { return min(seen.row + row, see.N - 1); });
}

template <int W, int KEYS>
__device__ inline void flash_latent_load_items_(bf16* tile, const LatentRowsOf<bf16>& x,
                                                const FlashLatentChunk<KEYS>& chunk) {
    flash_latent_load_<W, KEYS>(tile, x, [&](int row) { return chunk.item[row]; });
}

// ---- forward ----

// x, products of this lane's row with a chunk of keys, become weights by the largest score so far; total, this lane's
// part, goes on. Returns what belongs to the largest score before is multiplied by
__device__ inline float flash_latent_weights_(float (&x)[4][4], float* top, float* total,
                                              const FlashLatentChunk<FLASH_LATENT_KEYS>& chunk, float scale) {
    float most = *top, sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        float& one = x[i / 4][i % 4];
        one = latent_sees(chunk, tile_rows_row(), tile_rows_column(i / 4, i % 4)) ? one * scale : -INFINITY;
        most = one > most ? one : most;
    }
    most = tile_quad_max(most);
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        float& one = x[i / 4][i % 4];
        one = kernel_exp(one - most);
        sum += one;
    }
    const float shrink = kernel_exp(*top - most);
    *top = most, *total = *total * shrink + sum;
    return shrink;
}

// block is (TILE_ROWS_THREADS), grid (tiles of positions, heads). shared memory: queries, keys, values, dots
template <int W>
__global__ void __launch_bounds__(TILE_ROWS_THREADS, W == 128 ? 2 : 1)
flash_latent_forward_kernel(bf16* out, float* max, float* inv, LatentInputsOf<bf16> in, LatentSight see) {
    const int KEYS = FLASH_LATENT_KEYS;
    extern __shared__ __align__(128) bf16 latent_room[];
    __shared__ FlashLatentChunk<FLASH_LATENT_KEYS> chunks[2];
    __shared__ float factors[TILE_ROWS];
    bf16 *q_tile = latent_room, *k_tile = q_tile + TILE_ROWS * W, *v_tile = k_tile + KEYS * W;
    float* dots = (float*)(v_tile + KEYS * W);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, h = blockIdx.y, dv = in.s.dv, r = tile_rows_row();
    const FlashLatentSeen seen = latent_see<FLASH_LATENT_WORDS>(see, gridDim.x - 1 - blockIdx.x);
    const LatentRowsOf<bf16> keys = in.keys(h), values = in.values(h);
    float sums[4][W / 64][4], top = -10000.0f, total = 0.0f;
    tile_set_zero(sums);
    int k0 = latent_next(see, seen, 0);
    latent_find<TILE_ROWS_THREADS>(chunks[0], see, seen, k0);
    __syncthreads();
    flash_latent_load_rows_<W>(q_tile, in.queries(h), see, seen);
    flash_latent_load_items_<W>(k_tile, keys, chunks[0]);
    cp_async_commit();
    flash_latent_load_items_<W>(v_tile, values, chunks[0]);
    cp_async_commit();
    for (int stage = 0, next; k0 < seen.end; k0 = next, stage ^= 1) {
        next = latent_next(see, seen, k0 + KEYS);
        cp_async_wait<1>();
        __syncthreads();  // the keys have arrived, and nobody uses the chunk before any more
        if (next < seen.end) { latent_find<TILE_ROWS_THREADS>(chunks[stage ^ 1], see, seen, next); }
        tile_rows_dots<W, KEYS>(dots + warp % 2 * TILE_ROWS * KEYS, q_tile, warp / 4 * 32, k_tile, warp / 2 % 2 * 32,
                                warp % 2);
        __syncthreads();
        if (next < seen.end) { flash_latent_load_items_<W>(k_tile, keys, chunks[stage ^ 1]); }
        cp_async_commit();
        float x[KEYS / 16][4];
        tile_rows_read<KEYS>(x, dots);
        const float shrink = flash_latent_weights_(x, &top, &total, chunks[stage], in.s.scale);
        tile_rows_write<KEYS>(dots, x);
        if (lane % 4 == 0) { factors[r] = shrink; }
        cp_async_wait<1>();  // the values have arrived
        if (__syncthreads_or(shrink < 1.0f)) { tile_rows_scale(sums, factors); }
        tile_add_product_of<2 * KEYS, W, KEYS / 16, 0>(sums, (bf16*)dots, 0, v_tile, warp * (W / 64));
        __syncthreads();
        if (next < seen.end) { flash_latent_load_items_<W>(v_tile, values, chunks[stage ^ 1]); }
        cp_async_commit();
    }
    total = tile_quad_sum(total);
    total = total == 0.0f ? 0.0f : 1.0f / total;
    cp_async_wait<0>();
    __syncthreads();  // factors have been used
    if (lane % 4 == 0) { factors[r] = total; }
    if (lane % 4 == 0 && r < seen.n_rows(see)) {
        const size_t row = (size_t)(seen.row + r) * in.s.H + h;
        max[row] = top, inv[row] = total;
    }
    __syncthreads();
    tile_rows_scale(sums, factors);
    tile_rows_store<W>(out + ((size_t)seen.row * in.s.H + h) * dv, (size_t)in.s.H * dv, seen.n_rows(see), dv, q_tile,
                       sums);
}

// ---- mass ----

// block is (TILE_ROWS_THREADS), grid (tiles of positions, FLASH_LATENT_STEPS): a block has every FLASH_LATENT_STEPS-th
// chunk. shared memory: two stages of queries and keys, dots
template <int W>
__global__ void __launch_bounds__(TILE_ROWS_THREADS, W == 128 ? 2 : 1)
flash_latent_mass_kernel(float* mass, LatentInputsOf<bf16> in, LatentSight see, int goes_on) {
    const int KEYS = FLASH_LATENT_KEYS, TILE = (TILE_ROWS + KEYS) * W;
    extern __shared__ __align__(128) bf16 latent_room[];
    __shared__ FlashLatentChunk<FLASH_LATENT_KEYS> chunk;
    float* dots = (float*)(latent_room + 2 * TILE);
    const int warp = threadIdx.x / WARP, H = in.s.H, r = tile_rows_row();
    const FlashLatentSeen seen = latent_see<FLASH_LATENT_WORDS>(see, gridDim.x - 1 - blockIdx.x);
    const size_t row = (size_t)(seen.row + min(r, seen.n_rows(see) - 1));
    if (blockIdx.y == 0) { latent_clear_ends<TILE_ROWS_THREADS>(mass, see, seen); }
    float* kept = dots;  // (TILE_ROWS, KEYS), before and after the products of a chunk
    auto each_mine = [&](auto&& use) {
        #pragma unroll
        for (int i = 0; i < 16; i++) { use(i, kept[r * KEYS + tile_rows_column(i / 4, i % 4)]); }
    };
    for (int k0 = blockIdx.y * KEYS; k0 < seen.end; k0 += FLASH_LATENT_STEPS * KEYS) {
        float totals[KEYS / 16][4] = {};
        __syncthreads();  // the chunk before has been used
        latent_find<TILE_ROWS_THREADS>(chunk, see, seen, k0);
        __syncthreads();
        if (goes_on) {
            latent_each_seen<TILE_ROWS_THREADS>(see, seen, chunk, [&](size_t place, int row_of, int k) {
                kept[row_of * KEYS + k] = mass[place];
            });
            __syncthreads();
            each_mine([&](int i, float& x) { totals[i / 4][i % 4] = x; });  // of what is not seen, anything
        }
        for (int step = 0; step <= H; step++) {  // head `step` is on its way while the one before is used
            if (step > 0) { cp_async_wait<0>(); }
            __syncthreads();
            if (step < H) {
                bf16* to = latent_room + step % 2 * TILE;
                flash_latent_load_rows_<W>(to, in.queries(step), see, seen);
                flash_latent_load_items_<W>(to + TILE_ROWS * W, in.keys(step), chunk);
                cp_async_commit();
            }
            if (step == 0) { continue; }
            bf16* q_tile = latent_room + (step - 1) % 2 * TILE;
            tile_rows_dots<W, KEYS>(dots + warp % 2 * TILE_ROWS * KEYS, q_tile, warp / 4 * 32, q_tile + TILE_ROWS * W,
                                    warp / 2 % 2 * 32, warp % 2);
            __syncthreads();
            float x[KEYS / 16][4];
            tile_rows_read<KEYS>(x, dots);
            const float top = in.max[row * H + step - 1], factor = in.inv[row * H + step - 1];
            #pragma unroll
            for (int i = 0; i < 16; i++) {
                totals[i / 4][i % 4] += kernel_exp(x[i / 4][i % 4] * in.s.scale - top) * factor;
            }
        }
        __syncthreads();  // the dots of the last head have been read
        each_mine([&](int i, float& x) { x = totals[i / 4][i % 4]; });
        __syncthreads();
        latent_each_seen<TILE_ROWS_THREADS>(see, seen, chunk, [&](size_t place, int row_of, int k) {
            mass[place] = kept[row_of * KEYS + k];
        });
    }
}

// ---- backward ----

// two products of rows with a chunk, dots of both: two tiles of x, one behind the other, with two of y
template <int W>
__device__ inline void flash_latent_two_dots_(float* dots, bf16* x, bf16* y) {
    const int KEYS = FLASH_LATENT_HALF, warp = threadIdx.x / WARP, second = warp / 4;
    tile_rows_dots<W, KEYS, 2>(dots + (second * 2 + warp % 2) * TILE_ROWS * KEYS, x + second * TILE_ROWS * W,
                               warp / 2 % 2 * 32, y + second * KEYS * W, 0, warp % 2);
}

// block is (TILE_ROWS_THREADS), grid (tiles of positions, heads). rows (N, H). shared memory: queries, dout, two stages
// of keys and values, dots of both
template <int W>
__global__ void __launch_bounds__(TILE_ROWS_THREADS, W == 128 ? 2 : 1)
flash_latent_positions_kernel(bf16* dq, const FlashRow* rows, LatentInputsOf<bf16> in, LatentSight see) {
    const int KEYS = FLASH_LATENT_HALF, TILE = KEYS * W;
    extern __shared__ __align__(128) bf16 latent_room[];
    __shared__ FlashLatentChunk<FLASH_LATENT_HALF> chunks[2];
    bf16 *q_tile = latent_room, *dout_tile = q_tile + TILE_ROWS * W, *stages = dout_tile + TILE_ROWS * W;
    float *dots = (float*)(stages + 4 * TILE), *dout_dots = dots + 2 * TILE_ROWS * KEYS;
    const int h = blockIdx.y, Q = in.s.dn + in.s.dr, r = tile_rows_row();
    const FlashLatentSeen seen = latent_see<FLASH_LATENT_WORDS>(see, gridDim.x - 1 - blockIdx.x);
    const FlashRow of = rows[(size_t)(seen.row + min(r, seen.n_rows(see) - 1)) * in.s.H + h];
    int k0 = latent_next(see, seen, 0);
    float sums[4][W / 64][4];
    tile_set_zero(sums);
    latent_find<TILE_ROWS_THREADS>(chunks[0], see, seen, k0);
    __syncthreads();
    flash_latent_load_rows_<W>(q_tile, in.queries(h), see, seen);
    flash_latent_load_rows_<W>(dout_tile, in.gradients(h), see, seen);
    flash_latent_load_items_<W>(stages, in.keys(h), chunks[0]);
    flash_latent_load_items_<W>(stages + TILE, in.values(h), chunks[0]);
    cp_async_commit();
    for (int stage = 0; k0 < seen.end; stage ^= 1) {
        bf16 *keys = stages + stage * 2 * TILE, *later = stages + (stage ^ 1) * 2 * TILE;
        cp_async_wait<0>();
        __syncthreads();  // this chunk has arrived, and nobody uses the one before any more
        k0 = latent_next(see, seen, k0 + KEYS);
        if (k0 < seen.end) { latent_find<TILE_ROWS_THREADS>(chunks[stage ^ 1], see, seen, k0); }
        flash_latent_two_dots_<W>(dots, q_tile, keys);
        __syncthreads();
        if (k0 < seen.end) {
            flash_latent_load_items_<W>(later, in.keys(h), chunks[stage ^ 1]);
            flash_latent_load_items_<W>(later + TILE, in.values(h), chunks[stage ^ 1]);
            cp_async_commit();
        }
        float x[KEYS / 16][4], y[KEYS / 16][4];
        tile_rows_read<KEYS>(x, dots);
        tile_rows_read<KEYS>(y, dout_dots);
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            float& ds = x[j / 4][j % 4];
            const float weight = kernel_exp2(ds * (in.s.scale * LOG2_E) - of.level);
            ds = weight * (y[j / 4][j % 4] - of.D) * in.s.scale;
            ds = latent_sees(chunks[stage], r, tile_rows_column(j / 4, j % 4)) ? ds : 0.0f;
        }
        tile_rows_write<KEYS>(dots, x);
        __syncthreads();
        tile_add_product_of<2 * KEYS, W, KEYS / 16, 0>(sums, (bf16*)dots, 0, keys, threadIdx.x / WARP * (W / 64));
    }
    cp_async_wait<0>();
    __syncthreads();
    tile_rows_store<W>(dq + ((size_t)seen.row * in.s.H + h) * Q, (size_t)in.s.H * Q, seen.n_rows(see), Q, q_tile, sums);
}

// the channels from `first` on of a warp's sums that turn: (rows, dr) floats
template <int N>
__device__ inline void flash_latent_k_rope_(float* to, const float (&sums)[4][N][4], int first, int n_rows, int dn,
                                             int dr) {
    const int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int i = 0; i < 16 * N; i++) {  // four numbers of blocks of 8 channels of blocks of 16 rows
        const int m = i / (4 * N), n = i / 4 % N, j = i % 4;
        const int row = 16 * m + j / 2 * 8 + lane / 4, c = first + 8 * n + lane % 4 * 2 + j % 2 - dn;
        if (row < n_rows && c >= 0 && c < dr) { to[(size_t)row * dr + c] = sums[m][n][j]; }
    }
}

// heads (H, n_keys, dr): what each adds to dk_rope; n_keys: rows of `see`. block is (TILE_ROWS_THREADS), grid (tiles
// of keys, heads). rows (N, H). shared memory: keys, values, two stages of queries and dout, dots of both
template <int W>
__global__ void __launch_bounds__(TILE_ROWS_THREADS)
flash_latent_keys_kernel(bf16* dkv, float* heads, const FlashRow* rows, LatentInputsOf<bf16> in, LatentSight see) {
    const int KEYS = FLASH_LATENT_HALF, TILE = KEYS * W;
    extern __shared__ __align__(128) bf16 latent_room[];
    __shared__ FlashLatentChunk<FLASH_LATENT_HALF> chunks[2];
    __shared__ FlashRow positions[2][FLASH_LATENT_HALF];
    bf16 *k_tile = latent_room, *v_tile = k_tile + TILE_ROWS * W, *stages = v_tile + TILE_ROWS * W;
    float *dots = (float*)(stages + 4 * TILE), *dout_dots = dots + 2 * TILE_ROWS * KEYS;
    const int h = blockIdx.y, H = in.s.H, dn = in.s.dn, KV = dn + in.s.dv, t = threadIdx.x, r = tile_rows_row();
    const int of_values = t / WARP / 4, first = t / WARP % 4 * (W / 32);  // half of the warps have dk, half dv
    const FlashLatentSeen seen = latent_see<FLASH_LATENT_WORDS>(see, blockIdx.x);
    int k0 = latent_next(see, seen, 0);
    float sums[4][W / 32][4];
    tile_set_zero(sums);
    latent_find<TILE_ROWS_THREADS>(chunks[0], see, seen, k0);
    __syncthreads();
    flash_latent_load_rows_<W>(k_tile, in.keys(h), see, seen);
    flash_latent_load_rows_<W>(v_tile, in.values(h), see, seen);
    flash_latent_load_items_<W>(stages, in.queries(h), chunks[0]);
    flash_latent_load_items_<W>(stages + TILE, in.gradients(h), chunks[0]);
    cp_async_commit();
    if (t < KEYS) { positions[0][t] = rows[(size_t)chunks[0].item[t] * H + h]; }
    for (int stage = 0; k0 < seen.end; stage ^= 1) {
        bf16* queries = stages + stage * 2 * TILE;
        cp_async_wait<0>();
        __syncthreads();  // this chunk has arrived, and nobody uses the one before any more
        flash_latent_two_dots_<W>(dots, k_tile, queries);
        k0 = latent_next(see, seen, k0 + KEYS);
        if (k0 < seen.end) { latent_find<TILE_ROWS_THREADS>(chunks[stage ^ 1], see, seen, k0); }
        __syncthreads();
        if (k0 < seen.end) {
            const FlashLatentChunk<FLASH_LATENT_HALF>& chunk = chunks[stage ^ 1];
            bf16* later = stages + (stage ^ 1) * 2 * TILE;
            flash_latent_load_items_<W>(later, in.queries(h), chunk);
            flash_latent_load_items_<W>(later + TILE, in.gradients(h), chunk);
            cp_async_commit();
            if (t < KEYS) { positions[stage ^ 1][t] = rows[(size_t)chunk.item[t] * H + h]; }
        }
        float x[KEYS / 16][4], y[KEYS / 16][4];
        tile_rows_read<KEYS>(x, dots);
        tile_rows_read<KEYS>(y, dout_dots);
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            const int k = tile_rows_column(j / 4, j % 4), sees = latent_sees(chunks[stage], r, k);
            const FlashRow of = positions[stage][k];
            const float score = x[j / 4][j % 4] * (in.s.scale * LOG2_E);
            const float weight = sees ? kernel_exp2(score - of.level) : 0.0f;
            x[j / 4][j % 4] = weight;
            y[j / 4][j % 4] = sees ? weight * (y[j / 4][j % 4] - of.D) * in.s.scale : 0.0f;
        }
        tile_rows_write<KEYS>(dots, x);
        tile_rows_write<KEYS>(dout_dots, y);
        __syncthreads();
        bf16* weights = (bf16*)(of_values ? dots : dout_dots);
        tile_add_product_of<2 * KEYS, W, KEYS / 16, 0>(sums, weights, 0, queries + of_values * TILE, first);
    }
    cp_async_wait<0>();
    __syncthreads();
    bf16* to = dkv + ((size_t)seen.row * H + h) * KV;
    if (of_values) {
        tile_rows_store<W>(to + dn, (size_t)H * KV, seen.n_rows(see), in.s.dv, v_tile, sums);
        return;
    }
    tile_rows_store<W>(to, (size_t)H * KV, seen.n_rows(see), dn, k_tile, sums);
    flash_latent_k_rope_(heads + ((size_t)h * see.N + seen.row) * in.s.dr, sums, first * 8, seen.n_rows(see), dn,
                          in.s.dr);
}

// ---- launches. 1: done. 0: not for these shapes or, the templates, not for this type ----

template <int W>
static inline int flash_latent_forward_bytes_() {
    const int dots = 2 * TILE_ROWS * FLASH_LATENT_KEYS;
    return (int)sizeof(bf16) * W * (TILE_ROWS + 2 * FLASH_LATENT_KEYS) + (int)sizeof(float) * dots;
}
// of backward, and of mass
template <int W>
static inline int flash_latent_backward_bytes_() {
    return flash_latent_forward_bytes_<W>() + (int)sizeof(bf16) * W * TILE_ROWS;
}

// x, y: what else has rows of heads
static inline int flash_latent_fits(const bf16* x, const bf16* y, const LatentInputsOf<bf16>& in, const Device* dev) {
    const LatentShape* s = &in.s;
    const int wide = s->dn + s->dr > s->dv ? s->dn + s->dr : s->dv, static_room = 3 << 10;
    const int n_bytes = wide <= 128 ? flash_latent_backward_bytes_<128>() : flash_latent_backward_bytes_<256>();
    return wide <= 256 && n_bytes + static_room <= dev->most_shared && s->dn % 8 == 0 && s->dr % 8 == 0 &&
           s->dv % 8 == 0 && s->dn > 0 && pack_aligned(x, y, in.q, in.kv, in.k_rope, in.dout);
}

static inline int flash_latent_is_narrow_(const LatentShape* s) { return s->dn + s->dr <= 128 && s->dv <= 128; }

// of tiles of N rows, for each head
static inline dim3 flash_latent_grid_(int N, const LatentShape* s) {
    return dim3(latent_tiles(N, FLASH_LATENT_WORDS), (unsigned)s->H);
}

template <int W>
static inline void flash_latent_forward_(bf16* out, float* max, float* inv, const LatentInputsOf<bf16>& in,
                                         const LatentSight& see, const Device* dev) {
    const int n_bytes = flash_latent_forward_bytes_<W>();
    const dim3 grid = flash_latent_grid_(see.N, &in.s);
    cudaCheck(cudaFuncSetAttribute(flash_latent_forward_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   n_bytes));
    flash_latent_forward_kernel<W><<<grid, TILE_ROWS_THREADS, n_bytes, dev->stream>>>(out, max, inv, in, see);
    cudaCheck(cudaGetLastError());
}

static inline int flash_latent_forward(bf16* out, float* max, float* inv, const LatentInputsOf<bf16>& in,
                                       const int* chosen, const Places* places, const Device* dev) {
    if (!flash_latent_fits(out, out, in, dev)) { return 0; }
    const size_t n_ints = latent_sight_ints(in.s.N, in.s.N, chosen ? in.s.topk : 0, FLASH_LATENT_MOST_WORDS);
    int* room = (int*)device_workspace(dev, sizeof(int) * n_ints);
#ifdef WGMMA
    if (FLASH_LATENT_HOPPER) {
        flash_latent_hopper_forward(out, max, inv, in, room, chosen, places, dev);
        return 1;
    }
#endif
    const LatentSight see = latent_sight<FLASH_LATENT_WORDS>(room, chosen, &in.s, places, dev);
    if (flash_latent_is_narrow_(&in.s)) { flash_latent_forward_<128>(out, max, inv, in, see, dev); }
    else { flash_latent_forward_<256>(out, max, inv, in, see, dev); }
    return 1;
}

template <int W>
static inline void flash_latent_mass_(float* mass, const LatentInputsOf<bf16>& in, const LatentSight& see, int goes_on,
                                      const Device* dev) {
    const int n_bytes = flash_latent_backward_bytes_<W>();
    const dim3 grid(latent_tiles(in.s.N, FLASH_LATENT_WORDS), FLASH_LATENT_STEPS);
    cudaCheck(cudaFuncSetAttribute(flash_latent_mass_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    flash_latent_mass_kernel<W><<<grid, TILE_ROWS_THREADS, n_bytes, dev->stream>>>(mass, in, see, goes_on);
    cudaCheck(cudaGetLastError());
}

static inline int flash_latent_mass(float* mass, const LatentInputsOf<bf16>& in, const int* chosen, int goes_on,
                                    const Places* places, const Device* dev) {
    if (!flash_latent_fits(in.q, in.q, in, dev)) { return 0; }
    const size_t n_ints = latent_sight_ints(in.s.N, in.s.N, in.s.topk, FLASH_LATENT_MOST_WORDS);
    int* room = (int*)device_workspace(dev, sizeof(int) * n_ints);
#ifdef WGMMA
    if (FLASH_LATENT_HOPPER) {
        flash_latent_hopper_mass(mass, in, room, chosen, goes_on, places, dev);
        return 1;
    }
#endif
    const LatentSight see = latent_sight<FLASH_LATENT_WORDS>(room, chosen, &in.s, places, dev);
    if (flash_latent_is_narrow_(&in.s)) { flash_latent_mass_<128>(mass, in, see, goes_on, dev); }
    else { flash_latent_mass_<256>(mass, in, see, goes_on, dev); }
    return 1;
}

template <int W>
static inline void flash_latent_positions_(bf16* dq, const FlashRow* rows, const LatentInputsOf<bf16>& in,
                                           const LatentSight& see, const Device* dev) {
    const int n_bytes = flash_latent_backward_bytes_<W>();
    const dim3 grid = flash_latent_grid_(see.N, &in.s);
    cudaCheck(cudaFuncSetAttribute(flash_latent_positions_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   n_bytes));
    flash_latent_positions_kernel<W><<<grid, TILE_ROWS_THREADS, n_bytes, dev->stream>>>(dq, rows, in, see);
    cudaCheck(cudaGetLastError());
}

template <int W>
static inline void flash_latent_keys_(bf16* dkv, float* heads, const FlashRow* rows, const LatentInputsOf<bf16>& in,
                                      const LatentSight& see, const Device* dev) {
    const int n_bytes = flash_latent_backward_bytes_<W>();
    const dim3 grid = flash_latent_grid_(see.N, &in.s);
    cudaCheck(cudaFuncSetAttribute(flash_latent_keys_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    flash_latent_keys_kernel<W><<<grid, TILE_ROWS_THREADS, n_bytes, dev->stream>>>(dkv, heads, rows, in, see);
    cudaCheck(cudaGetLastError());
}

// rows (N, H) is scratch; room, lists: of latent_sight, latent_turned
static inline void flash_latent_backward(bf16* dq, bf16* dkv, FlashRow* rows, float* heads, const bf16* out,
                                         const LatentInputsOf<bf16>& in, int* room, int* lists, const int* chosen,
                                         int n_keys, const Places* places, const Device* dev) {
    flash_head_rows(rows, in.dout, out, in.max, in.inv, (int64_t)in.s.N * in.s.H, in.s.dv, dev);
#ifdef WGMMA
    if (FLASH_LATENT_HOPPER) {
        flash_latent_hopper_backward(dq, dkv, rows, heads, in, room, lists, chosen, n_keys, places, dev);
        return;
    }
#endif
    const LatentSight see = latent_sight<FLASH_LATENT_WORDS>(room, chosen, &in.s, places, dev);
    const int is_narrow = flash_latent_is_narrow_(&in.s);
    if (is_narrow) { flash_latent_positions_<128>(dq, rows, in, see, dev); }
    else { flash_latent_positions_<256>(dq, rows, in, see, dev); }
    const LatentSight turned = latent_turned<FLASH_LATENT_WORDS>(see, lists, n_keys, dev);
    if (is_narrow) { flash_latent_keys_<128>(dkv, heads, rows, in, turned, dev); }
    else { flash_latent_keys_<256>(dkv, heads, rows, in, turned, dev); }
}

template <typename X>
static inline int flash_latent_fits(const X*, const X*, const LatentInputsOf<X>&, const Device*) { return 0; }
template <typename X>
static inline int flash_latent_forward(X*, float*, float*, const LatentInputsOf<X>&, const int*, const Places*,
                                       const Device*) {
    return 0;
}
template <typename X>
static inline int flash_latent_mass(float*, const LatentInputsOf<X>&, const int*, int, const Places*, const Device*) {
    return 0;
}
template <typename X>
static inline void flash_latent_backward(X*, X*, FlashRow*, float*, const X*, const LatentInputsOf<X>&, int*, int*,
                                         const int*, int, const Places*, const Device*) {}
#endif  // __CUDACC__
#endif  // LLMC_FLASH_LATENT_H
