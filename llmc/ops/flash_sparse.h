/*
Sparse attention of sparse_attention.h in bf16 on tensor cores, which calls it where it can: d a multiple of 8 up to
512, rows that begin at multiples of 16 bytes, and as much shared memory as d needs; otherwise its own kernels run.
d 128 and 512, and heads that are a multiple of 64, waste nothing; others are filled up with zeros to the next of these.
    A block of threads has up to 64 heads of one position. All of them see the same keys, and the keys are the values as
    well, so what a position sees is gathered once, a chunk of keys at a time, and is an operand of every product.
    forward    scores of a chunk, softmax "online" (flash_attention.h), out += weights * keys
    backward   D = dout . out (flash_rows.h; sinks have no values), so once over the keys: ds, dq += ds * keys, and what
               this position gives each of its keys, ds' q + att' dout, a row of bf16 for each key in memory, of a slab
               of positions. Then a thread has eight channels of a key, or entry, and adds what the slab's positions
               gave it, ascending. No atomics
    mass       scores of a chunk of entries, then sums over heads
    products   of scores: a warp has 32 heads, 32 keys and half of the channels; the halves meet in shared memory, where
               whole rows are read for the softmax. The others: a warp has all heads, or keys, and an eighth of the
               channels
    copies     cp.async: the next chunk is under way while this one is used
    Hopper     make CUDA_ARCH=sm_90a: other kernels, by wgmma, but those that add by key (flash_sparse_hopper.h)
Error:  products of bf16 are exact in float. With e = 2^-8, the rounding of bf16, to first order, beside sums in float:
            out       e * sum of att |key|  (weights are rounded before they meet keys)  + e |out|
            D         e * sum of |dout| |out|, where out is rounded and nothing else, as in the test. ds has att * scale
                      of it, `off`, and dsinks the share of the sink
            dq        sum of (e |ds| + off) |key|  + e |dq|
            dkey      sum over h, n of (2 e |ds| + off) |q| + 2 e att |dout|  (e of what a position gives)  + e |dkey|
        test_sparse_attention.c bounds each element so.
Cost:   of each head, position and key forward 4*d flops, backward 10*d, mass 2*d. Backward writes and reads 2*d bytes
        for each position and key, and adds 4*d bytes for each key and entry; positions of a slab as SPARSE_KEPT allows.
        Before that it reads dout and out once.
        Shared memory is 80 KiB for d <= 128, where two blocks share a multiprocessor, else 224 KiB: cards with less
        (sm_80) run the kernels on CUDA cores then. By ptxas of CUDA 13.0 for sm_90, without spills:
                         registers, d <= 128, d <= 512     chunk
            forward           126           239            64 keys
            backward          124           254            32 keys
            mass              100           134            64 entries
        Not measured on a GPU; doc/gpu/deepseek_v4.md derives 40% of an H200's peak forward, 42% backward, by wgmma 60%
        and 75%.
Source: Dao 2023, arXiv:2307.08691; DeepSeek-AI 2025, arXiv:2512.02556
*/
#ifndef LLMC_FLASH_SPARSE_H
#define LLMC_FLASH_SPARSE_H
#ifdef __CUDACC__
#include "../core/kernel.h"      // WARP, bf16, kernel_exp, pack_fits, load_floats, store_floats
#include "../core/mma.h"         // cp_async_16_zfill, cp_async_commit, cp_async_wait
#include "flash_rows.h"          // FlashRow, flash_head_rows
#include "flash_sparse_steps.h"  // FlashSparseChunk, FlashSparseGiven, flash_sparse_find
#include "sparse_inputs.h"       // SparseInputsOf
#include "tile.h"                // tile_load, tile_add_product_of, tile_quad_max
#include "tile_rows.h"           // tile_rows_dots, tile_rows_read, tile_rows_write, tile_rows_store
#ifdef WGMMA
#include "flash_sparse_hopper.h"  // flash_sparse_hopper_forward, flash_sparse_hopper_give, flash_sparse_hopper_mass
#ifndef FLASH_SPARSE_HOPPER  // test_sparse_attention.c: a variable, so that it has both kinds of kernels
#define FLASH_SPARSE_HOPPER 1
#endif
#endif

enum {
    FLASH_SPARSE_THREADS = TILE_ROWS_THREADS,  // eight warps
    FLASH_SPARSE_PACK = 8                      // channels of a thread that adds
};
static_assert((int)FLASH_SPARSE_HEADS == (int)TILE_ROWS, "heads of a block are the rows of tile_rows.h");

// ---- keys into shared memory ----

template <int W, int KEYS>
__device__ inline void flash_sparse_load_(bf16* tile, const FlashSparseChunk<KEYS>& chunk, int d) {
    const int ROWS = FLASH_SPARSE_THREADS / (W / 8);  // at once
    const int column = threadIdx.x % (W / 8), first = threadIdx.x / (W / 8);
    #pragma unroll
    for (int i = 0; i < KEYS / ROWS; i++) {
        const int row = first + i * ROWS, exists = row < chunk.n && column * 8 < d;
        cp_async_16_zfill(tile_chunk<W>(tile, row, column), chunk.key[row] + (exists ? column * 8 : 0),
                          exists ? 16 : 0);
    }
    cp_async_commit();
}

// ---- forward ----

// x, products of this lane's row with a chunk's n keys, become weights by the largest score so far; total, this lane's
// part, goes on. Returns what belongs to the largest score before is multiplied by
__device__ inline float flash_sparse_weights_(float (&x)[4][4], float* top, float* total, int n, float scale) {
    float most = *top, sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        float& one = x[i / 4][i % 4];
        one = tile_rows_column(i / 4, i % 4) < n ? one * scale : -INFINITY;
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

// block is (FLASH_SPARSE_THREADS), grid (N, tiles of heads). shared memory: queries, two stages of keys, dots
template <int W>
__global__ void __launch_bounds__(FLASH_SPARSE_THREADS, W == 128 ? 2 : 1)
flash_sparse_forward_kernel(bf16* out, float* max, float* inv, const float* sinks, SparseInputsOf<bf16> in) {
    const int KEYS = FLASH_SPARSE_KEYS, TILE = KEYS * W;
    extern __shared__ __align__(128) bf16 sparse_tiles[];
    __shared__ FlashSparseChunk<KEYS> chunks[2];
    __shared__ float factors[FLASH_SPARSE_HEADS];
    bf16 *q_tile = sparse_tiles, *k_tile = q_tile + FLASH_SPARSE_HEADS * W;
    float* dots = (float*)(k_tile + 2 * TILE);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, head = blockIdx.y * FLASH_SPARSE_HEADS;
    const int n_heads = min(FLASH_SPARSE_HEADS, in.s.H - head), h = tile_rows_row(), d = in.s.d;
    const size_t row = (size_t)blockIdx.x * in.s.H + head;
    const SparseSeen see = sparse_seen_(in, blockIdx.x);
    const float sink = h < n_heads ? sinks[head + h] : 0.0f;
    float sums[4][W / 64][4], top = sink, total = 0.0f;
    tile_set_zero(sums);
    flash_sparse_find(chunks[0], in, see, 0);
    flash_sparse_find(chunks[1], in, see, KEYS);
    __syncthreads();
    tile_load<FLASH_SPARSE_HEADS, W, FLASH_SPARSE_THREADS>(q_tile, in.q + row * d, (size_t)d, n_heads, d);
    flash_sparse_load_<W>(k_tile, chunks[0], d);
    for (int k0 = 0, stage = 0; k0 < see.n_keys; k0 += KEYS, stage ^= 1) {
        bf16* keys = k_tile + stage * TILE;
        cp_async_wait<0>();
        __syncthreads();  // this chunk has arrived, and nobody uses the one before any more
        if (k0 + KEYS < see.n_keys) { flash_sparse_load_<W>(k_tile + (stage ^ 1) * TILE, chunks[stage ^ 1], d); }
        flash_sparse_find(chunks[stage], in, see, k0 + 2 * KEYS);
        tile_rows_dots<W, KEYS>(dots + warp % 2 * FLASH_SPARSE_HEADS * KEYS, q_tile, warp / 4 * 32, keys,
                                    warp / 2 % 2 * 32, warp % 2);
        __syncthreads();
        float x[KEYS / 16][4];
        tile_rows_read<KEYS>(x, dots);
        const float shrink = flash_sparse_weights_(x, &top, &total, see.n_keys - k0, in.s.scale);
        tile_rows_write<KEYS>(dots, x);
        if (lane % 4 == 0) { factors[h] = shrink; }
        if (__syncthreads_or(shrink < 1.0f)) { tile_rows_scale(sums, factors); }
        tile_add_product_of<2 * KEYS, W, KEYS / 16, 0>(sums, (bf16*)dots, 0, keys, warp * (W / 64));
    }
    total = 1.0f / (tile_quad_sum(total) + kernel_exp(sink - top));
    __syncthreads();  // factors have been used
    if (lane % 4 == 0) { factors[h] = total; }
    if (lane % 4 == 0 && h < n_heads) { max[row + h] = top, inv[row + h] = total; }
    __syncthreads();
    tile_rows_scale(sums, factors);
    tile_rows_store<W>(out + row * d, (size_t)d, n_heads, d, q_tile, sums);
}

// ---- backward: positions ----

// of a chunk's n keys: weights from x, products with q, and ds from y, those with dout. Beyond the last key a score is
// 0, which may be far above max
__device__ inline void flash_sparse_gradients_(float (&x)[2][4], float (&y)[2][4], const FlashRow& of, int n,
                                               float scale) {
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        const int exists = tile_rows_column(i / 4, i % 4) < n;
        const float weight = exists ? kernel_exp2(x[i / 4][i % 4] * (scale * LOG2_E) - of.level) : 0.0f;
        x[i / 4][i % 4] = weight;
        y[i / 4][i % 4] = exists ? weight * (y[i / 4][i % 4] - of.D) * scale : 0.0f;
    }
}

// block is (FLASH_SPARSE_THREADS), grid (positions, tiles of heads). shared memory: queries, dout, two stages of keys,
// dots of both
template <int W>
__global__ void __launch_bounds__(FLASH_SPARSE_THREADS, W == 128 ? 2 : 1)
flash_sparse_backward_kernel(bf16* dq, const bf16* dout, const FlashRow* rows, SparseInputsOf<bf16> in,
                             FlashSparseGiven given) {
    const int KEYS = FLASH_SPARSE_KEYS / 2, TILE = KEYS * W, DOTS = FLASH_SPARSE_HEADS * KEYS;
    extern __shared__ __align__(128) bf16 sparse_tiles[];
    __shared__ FlashSparseChunk<KEYS> chunks[2];
    bf16 *q_tile = sparse_tiles, *dout_tile = q_tile + FLASH_SPARSE_HEADS * W;
    bf16* k_tile = dout_tile + FLASH_SPARSE_HEADS * W;
    float *dots = (float*)(k_tile + 2 * TILE), *dout_dots = dots + 2 * DOTS;
    const int warp = threadIdx.x / WARP, first = warp * (W / 64), h = tile_rows_row(), d = in.s.d;
    const int n = given.first + blockIdx.x, head = blockIdx.y * FLASH_SPARSE_HEADS;
    const int n_heads = min(FLASH_SPARSE_HEADS, in.s.H - head);
    const size_t row = (size_t)n * in.s.H + head;
    const SparseSeen see = sparse_seen_(in, n);
    FlashRow of = {INFINITY, 0.0f};  // without a head all weights are 0
    if (h < n_heads) { of = rows[row + h]; }
    float sums[4][W / 64][4];
    tile_set_zero(sums);
    flash_sparse_find(chunks[0], in, see, 0);
    flash_sparse_find(chunks[1], in, see, KEYS);
    __syncthreads();
    tile_load<FLASH_SPARSE_HEADS, W, FLASH_SPARSE_THREADS>(q_tile, in.q + row * d, (size_t)d, n_heads, d);
    tile_load<FLASH_SPARSE_HEADS, W, FLASH_SPARSE_THREADS>(dout_tile, dout + row * d, (size_t)d, n_heads, d);
    flash_sparse_load_<W>(k_tile, chunks[0], d);
    for (int k0 = 0, stage = 0; k0 < see.n_keys; k0 += KEYS, stage ^= 1) {
        bf16* keys = k_tile + stage * TILE;
        cp_async_wait<0>();
        __syncthreads();  // this chunk has arrived, and nobody uses the one before any more
        if (k0 + KEYS < see.n_keys) { flash_sparse_load_<W>(k_tile + (stage ^ 1) * TILE, chunks[stage ^ 1], d); }
        flash_sparse_find(chunks[stage], in, see, k0 + 2 * KEYS);
        // two blocks share the registers of a multiprocessor where W is 128: the fewer there
        tile_rows_dots<W, KEYS, W == 128 ? 2 : 4>(dots + warp / 4 * 2 * DOTS + warp % 2 * DOTS,
                                                  warp < 4 ? q_tile : dout_tile, warp / 2 % 2 * 32, keys, 0, warp % 2);
        __syncthreads();
        float x[KEYS / 16][4], y[KEYS / 16][4];
        tile_rows_read<KEYS>(x, dots);
        tile_rows_read<KEYS>(y, dout_dots);
        flash_sparse_gradients_(x, y, of, see.n_keys - k0, in.s.scale);
        tile_rows_write<KEYS>(dots, x);
        tile_rows_write<KEYS>(dout_dots, y);
        __syncthreads();
        bf16 *att_tile = (bf16*)dots, *ds_tile = (bf16*)dout_dots;
        tile_add_product_of<2 * KEYS, W, KEYS / 16, 0>(sums, ds_tile, 0, keys, first);
        float gives[KEYS / 16][W / 64][4];
        tile_set_zero(gives);
        tile_add_product_of<2 * KEYS, W, FLASH_SPARSE_HEADS / 16, 1>(gives, ds_tile, 0, q_tile, first);
        tile_add_product_of<2 * KEYS, W, FLASH_SPARSE_HEADS / 16, 1>(gives, att_tile, 0, dout_tile, first);
        tile_rows_store<W>(flash_sparse_given_at(given, n, blockIdx.y, k0, d), (size_t)d, see.n_keys - k0, d, keys,
                           gives);
    }
    // since the last barrier a warp reads its channels
    tile_rows_store<W>(dq + row * d, (size_t)d, n_heads, d, q_tile, sums);
}

// ---- backward: keys ----

// sum += what position n gives its k-th key, FLASH_SPARSE_PACK channels from c on
__device__ inline void flash_sparse_add_(Pack<float, FLASH_SPARSE_PACK>& sum, const FlashSparseGiven& given, int n,
                                         int k, int c, int d) {
    for (int tile = 0; tile < given.tiles; tile++) {
        const Pack<float, FLASH_SPARSE_PACK> x =
            load_floats<FLASH_SPARSE_PACK>(flash_sparse_given_at(given, n, tile, k, d) + c);
        for (int i = 0; i < FLASH_SPARSE_PACK; i++) { sum.x[i] += x.x[i]; }
    }
}

// sums (rows, d) of these keys of the window, or of entries where there are no lists, go on with a slab
__global__ static void flash_sparse_keys_kernel(float* sums, SparseInputsOf<bf16> in, FlashSparseGiven given,
                                                SparseIntervals of, SparsePart keys, int is_entry) {
    const int packs = in.s.d / FLASH_SPARSE_PACK;
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int u = keys.first + (int)(i / packs), c = (int)(i % packs) * FLASH_SPARSE_PACK;
    if (u >= keys.end) { return; }
    const int first = max(of.begin[u], given.first), end = min(of.end[u], given.end);
    if (first >= end) { return; }
    Pack<float, FLASH_SPARSE_PACK> sum = load_floats<FLASH_SPARSE_PACK>(sums + (size_t)u * in.s.d + c);
    #pragma unroll 4
    for (int n = first; n < end; n++) {
        const int n_window = sparse_window_keys(&in.s, &in.places, n);
        const int k = is_entry ? n_window + u - in.w.first_entry[n] : u - sparse_first_key(&in.s, &in.places, n);
        flash_sparse_add_(sum, given, n, k, c, in.s.d);
    }
    store_floats(sums + (size_t)u * in.s.d + c, sum);
}

// the first of pairs first..end-1, ascending, that is not below `limit`
__device__ inline int flash_sparse_search_(const int* pairs, int first, int end, int64_t limit) {
    while (first < end) {
        const int middle = first + (end - first) / 2;
        if (pairs[middle] < limit) { first = middle + 1; } else { end = middle; }
    }
    return first;
}

// the same of entries from lists
__global__ static void flash_sparse_listed_kernel(float* sums, SparseInputsOf<bf16> in, FlashSparseGiven given,
                                                  const int* offsets, const int* pairs, SparsePart entries) {
    const int packs = in.s.d / FLASH_SPARSE_PACK, topk = in.s.topk;
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int e = entries.first + (int)(i / packs), c = (int)(i % packs) * FLASH_SPARSE_PACK;
    if (e >= entries.end) { return; }
    const int first = flash_sparse_search_(pairs, offsets[e], offsets[e + 1], (int64_t)given.first * topk);
    const int end = flash_sparse_search_(pairs, first, offsets[e + 1], (int64_t)given.end * topk);
    if (first >= end) { return; }
    Pack<float, FLASH_SPARSE_PACK> sum = load_floats<FLASH_SPARSE_PACK>(sums + (size_t)e * in.s.d + c);
    #pragma unroll 4
    for (int j = first; j < end; j++) {
        const int n = pairs[j] / topk, k = sparse_window_keys(&in.s, &in.places, n) + pairs[j] % topk;
        flash_sparse_add_(sum, given, n, k, c, in.s.d);
    }
    store_floats(sums + (size_t)e * in.s.d + c, sum);
}

// ---- mass ----

// block is (FLASH_SPARSE_THREADS), grid (N). shared memory as in forward
template <int W>
__global__ void __launch_bounds__(FLASH_SPARSE_THREADS, W == 128 ? 2 : 1)
flash_sparse_mass_kernel(float* mass, const float* max, const float* inv, SparseInputsOf<bf16> in, int goes_on) {
    const int KEYS = FLASH_SPARSE_KEYS, TILE = KEYS * W, ROWS = FLASH_SPARSE_HEADS / (FLASH_SPARSE_THREADS / WARP);
    extern __shared__ __align__(128) bf16 sparse_tiles[];
    __shared__ FlashSparseChunk<KEYS> chunks[2];
    bf16 *q_tile = sparse_tiles, *k_tile = q_tile + FLASH_SPARSE_HEADS * W;
    float* dots = (float*)(k_tile + 2 * TILE);
    const int warp = threadIdx.x / WARP, n = blockIdx.x, d = in.s.d, topk = in.s.topk, t = threadIdx.x;
    const SparseSeen see = {n, 0, 0, sparse_list_length(in.chosen + (size_t)n * topk, topk)};
    float* to = mass + (size_t)n * topk;
    for (int k = t + (goes_on ? see.n_keys : 0); k < topk; k += FLASH_SPARSE_THREADS) { to[k] = 0.0f; }
    for (int head = 0; see.n_keys > 0 && head < in.s.H; head += FLASH_SPARSE_HEADS) {
        const int n_heads = min(FLASH_SPARSE_HEADS, in.s.H - head), h = tile_rows_row();
        const size_t row = (size_t)n * in.s.H + head;
        const float top = h < n_heads ? max[row + h] : 0.0f, factor = h < n_heads ? inv[row + h] : 0.0f;
        flash_sparse_find(chunks[0], in, see, 0);
        flash_sparse_find(chunks[1], in, see, KEYS);
        __syncthreads();
        tile_load<FLASH_SPARSE_HEADS, W, FLASH_SPARSE_THREADS>(q_tile, in.q + row * d, (size_t)d, n_heads, d);
        flash_sparse_load_<W>(k_tile, chunks[0], d);
        for (int k0 = 0, stage = 0; k0 < see.n_keys; k0 += KEYS, stage ^= 1) {
            cp_async_wait<0>();
            __syncthreads();
            if (k0 + KEYS < see.n_keys) { flash_sparse_load_<W>(k_tile + (stage ^ 1) * TILE, chunks[stage ^ 1], d); }
            flash_sparse_find(chunks[stage], in, see, k0 + 2 * KEYS);
            tile_rows_dots<W, KEYS>(dots + warp % 2 * FLASH_SPARSE_HEADS * KEYS, q_tile, warp / 4 * 32,
                                        k_tile + stage * TILE, warp / 2 % 2 * 32, warp % 2);
            __syncthreads();
            float x[KEYS / 16][4], sum = 0.0f;
            tile_rows_read<KEYS>(x, dots);
            __syncwarp();  // the sums of a warp's rows take the place of the first
            #pragma unroll
            for (int i = 0; i < 16; i++) {
                float one = kernel_exp(x[i / 4][i % 4] * in.s.scale - top) * factor;
                for (int step = 4; step < WARP; step *= 2) { one += __shfl_xor_sync(ALL_LANES, one, step); }
                if (t % WARP < 4) { dots[warp * ROWS * KEYS + tile_rows_column(i / 4, i % 4)] = one; }
            }
            __syncthreads();
            for (int r = 0; r < FLASH_SPARSE_HEADS && t < KEYS; r += ROWS) { sum += dots[r * KEYS + t]; }
            if (t < KEYS && k0 + t < see.n_keys) { to[k0 + t] += sum; }
        }
    }
}

// ---- launches. Of forward and mass 1: done. 0: not for these shapes or, the templates, not for this type ----

// of all kernels alike: queries and two chunks, or queries, dout and two half chunks; dots
template <int W>
static inline size_t flash_sparse_shared_() {
    const size_t n_dots = 2 * FLASH_SPARSE_HEADS * FLASH_SPARSE_KEYS;
    return sizeof(bf16) * W * (FLASH_SPARSE_HEADS + 2 * FLASH_SPARSE_KEYS) + sizeof(float) * n_dots;
}

// x, y, z: what else has rows of heads
static inline int flash_sparse_fits(const bf16* x, const bf16* y, const bf16* z, const SparseInputsOf<bf16>& in,
                                    const Device* dev) {
    const int d = in.s.d;
    const size_t room = 3 << 10, n_bytes = d <= 128 ? flash_sparse_shared_<128>() : flash_sparse_shared_<512>();
    return d <= 512 && n_bytes + room <= (size_t)dev->most_shared && pack_fits(x, d) && pack_fits(y, d) &&
           pack_fits(z, d) && pack_fits(in.q, d) && pack_fits(in.kv, d) && pack_fits(in.entries, d);
}

template <int W>
static inline void flash_sparse_forward_(bf16* out, float* max, float* inv, const float* sinks,
                                         const SparseInputsOf<bf16>& in, const Device* dev) {
    const size_t n_bytes = flash_sparse_shared_<W>();
    const dim3 grid((unsigned)in.s.N, (unsigned)ceil_div(in.s.H, FLASH_SPARSE_HEADS));
    cudaCheck(cudaFuncSetAttribute(flash_sparse_forward_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)n_bytes));
    flash_sparse_forward_kernel<W><<<grid, FLASH_SPARSE_THREADS, n_bytes, dev->stream>>>(out, max, inv, sinks, in);
    cudaCheck(cudaGetLastError());
}

static inline int flash_sparse_forward(bf16* out, float* max, float* inv, const float* sinks,
                                       const SparseInputsOf<bf16>& in, const Device* dev) {
    if (!flash_sparse_fits(out, in.q, in.q, in, dev)) { return 0; }
#ifdef WGMMA
    if (FLASH_SPARSE_HOPPER) {
        flash_sparse_hopper_forward(out, max, inv, sinks, in, dev);
        return 1;
    }
#endif
    if (in.s.d <= 128) { flash_sparse_forward_<128>(out, max, inv, sinks, in, dev); }
    else { flash_sparse_forward_<512>(out, max, inv, sinks, in, dev); }
    return 1;
}

template <int W>
static inline void flash_sparse_mass_(float* mass, const float* max, const float* inv, const SparseInputsOf<bf16>& in,
                                      int goes_on, const Device* dev) {
    const size_t n_bytes = flash_sparse_shared_<W>();
    cudaCheck(cudaFuncSetAttribute(flash_sparse_mass_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)n_bytes));
    flash_sparse_mass_kernel<W><<<(unsigned)in.s.N, FLASH_SPARSE_THREADS, n_bytes, dev->stream>>>(mass, max, inv, in,
                                                                                                  goes_on);
    cudaCheck(cudaGetLastError());
}

static inline int flash_sparse_mass(float* mass, const float* max, const float* inv, const SparseInputsOf<bf16>& in,
                                    int goes_on, const Device* dev) {
    if (!flash_sparse_fits(in.q, in.q, in.q, in, dev)) { return 0; }
#ifdef WGMMA
    if (FLASH_SPARSE_HOPPER) {
        flash_sparse_hopper_mass(mass, max, inv, in, goes_on, dev);
        return 1;
    }
#endif
    if (in.s.d <= 128) { flash_sparse_mass_<128>(mass, max, inv, in, goes_on, dev); }
    else { flash_sparse_mass_<512>(mass, max, inv, in, goes_on, dev); }
    return 1;
}

template <int W>
static inline void flash_sparse_positions_(bf16* dq, const bf16* dout, const FlashRow* rows,
                                           const SparseInputsOf<bf16>& in, const FlashSparseGiven& given,
                                           const Device* dev) {
    const size_t n_bytes = flash_sparse_shared_<W>();
    const dim3 grid((unsigned)(given.end - given.first), (unsigned)given.tiles);
    cudaCheck(cudaFuncSetAttribute(flash_sparse_backward_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)n_bytes));
    flash_sparse_backward_kernel<W><<<grid, FLASH_SPARSE_THREADS, n_bytes, dev->stream>>>(dq, dout, rows, in, given);
    cudaCheck(cudaGetLastError());
}

// `given` of no position yet: each gives `row` rows at most
static inline FlashSparseGiven flash_sparse_given(size_t row, int H) {
    const FlashSparseGiven given = {NULL, row, 0, 0, (int)ceil_div(H, FLASH_SPARSE_HEADS)};
    return given;
}

// floats of a slab
static inline size_t flash_sparse_room(const SparseShape* s, const FlashSparseGiven& given, int slab) {
    return (size_t)slab * given.tiles * given.row * s->d / 2;  // d is a multiple of 8
}

// positions of a slab: as many as SPARSE_KEPT allows, and whole rounds of blocks where it is more than one
static inline int flash_sparse_slab(const SparseShape* s, const FlashSparseGiven& given, const Device* dev) {
    const size_t fit = SPARSE_KEPT / sizeof(float) / (flash_sparse_room(s, given, 1) + 1), wave = (size_t)dev->n_sms;
    const size_t whole = fit > wave ? fit / wave * wave : fit;
    return whole >= (size_t)s->N ? s->N : whole > 0 ? (int)whole : 1;
}

// rows (N, H)
static inline void flash_sparse_rows(FlashRow* rows, const bf16* dout, const bf16* out, const float* max,
                                     const float* inv, const SparseShape* s, const Device* dev) {
    flash_head_rows(rows, dout, out, max, inv, (int64_t)s->N * s->H, s->d, dev);
}

static inline void flash_sparse_give(bf16* dq, const bf16* dout, const FlashRow* rows, const SparseInputsOf<bf16>& in,
                                     const FlashSparseGiven& given, const Device* dev) {
#ifdef WGMMA
    if (FLASH_SPARSE_HOPPER) {
        flash_sparse_hopper_give(dq, dout, rows, in, given, dev);
        return;
    }
#endif
    if (in.s.d <= 128) { flash_sparse_positions_<128>(dq, dout, rows, in, given, dev); }
    else { flash_sparse_positions_<512>(dq, dout, rows, in, given, dev); }
}

// what a slab's positions gave these keys and entries goes into the sums (rows + entries, d)
static inline void flash_sparse_add(float* sums, const SparseInputsOf<bf16>& in, const FlashSparseGiven& given,
                                    const SparsePositions& see, SparsePart keys, SparsePart entries,
                                    const Device* dev) {
    const int64_t packs = in.s.d / FLASH_SPARSE_PACK;
    const unsigned of_keys = (unsigned)ceil_div((keys.end - keys.first) * packs, GRID_BLOCK);
    const unsigned of_entries = (unsigned)ceil_div((entries.end - entries.first) * packs, GRID_BLOCK);
    float* behind = sums + (size_t)sparse_rows(&in.s) * in.s.d;
    if (of_keys > 0) {
        flash_sparse_keys_kernel<<<of_keys, GRID_BLOCK, 0, dev->stream>>>(sums, in, given, see.of_window, keys, 0);
    }
    if (in.chosen && of_entries > 0) {
        flash_sparse_listed_kernel<<<of_entries, GRID_BLOCK, 0, dev->stream>>>(behind, in, given, see.offsets,
                                                                               see.pairs, entries);
    } else if (of_entries > 0) {
        flash_sparse_keys_kernel<<<of_entries, GRID_BLOCK, 0, dev->stream>>>(behind, in, given, see.of_entries, entries,
                                                                             1);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline int flash_sparse_forward(X*, float*, float*, const float*, const SparseInputsOf<X>&, const Device*) {
    return 0;
}
template <typename X>
static inline int flash_sparse_mass(float*, const float*, const float*, const SparseInputsOf<X>&, int, const Device*) {
    return 0;
}
template <typename X>
static inline int flash_sparse_fits(const X*, const X*, const X*, const SparseInputsOf<X>&, const Device*) {
    return 0;
}
template <typename X>
static inline void flash_sparse_rows(FlashRow*, const X*, const X*, const float*, const float*, const SparseShape*,
                                     const Device*) {}
template <typename X>
static inline void flash_sparse_give(X*, const X*, const FlashRow*, const SparseInputsOf<X>&, const FlashSparseGiven&,
                                     const Device*) {}
template <typename X>
static inline void flash_sparse_add(float*, const SparseInputsOf<X>&, const FlashSparseGiven&, const SparsePositions&,
                                    SparsePart, SparsePart, const Device*) {}
#endif  // __CUDACC__
#endif  // LLMC_FLASH_SPARSE_H
