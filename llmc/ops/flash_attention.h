/*
Attention of attention.h in bf16 on tensor cores: nothing of the size (T, T) ever leaves the registers. attention.h calls it where
it can: HS a multiple of 8 up to 128, rows that begin at multiples of 16 bytes; otherwise its own kernels run. HS 64 and 128 waste
nothing, others are filled up with zeros to the next of the two.
    forward        a block has 64 or 128 queries, 16 or 32 for each of four warps, and goes over tiles of 64 keys and values
    backward       D, then dk and dv (a block has 64 keys, goes over tiles of queries and, in a group, over its heads), then dq
                   (64 queries, as forward). Each sum has one owner, so there are no atomics and two runs give the same bits; the
                   price is that scores and datt are computed twice: 7 products instead of 5
    softmax        "online": a running maximum; when it grows, what was summed so far is multiplied by exp(old - new)
                   (doc/attention.md). In base 2: exp(x) = 2^(x * log2 e), one instruction with the factor in the scale
    causal, window tiles that no query of the block sees are skipped, and where all see all, nothing is masked
    copies         cp.async: the next tile is under way while this one is used, with one barrier per tile
Error:  products of bf16 are exact in float. With e = 2^-8, the rounding of bf16, and sums in float, to first order:
            out   e * sum of att |v|  (weights are rounded before they meet v)  + e |out|
            D     sum over channels of |dout| * (error of out): it is computed as dout . out
            dv_u  e * sum over t of att |dout|  + e |dv|
            ds    att * scale * (error of D)  + e |ds|      dq, dk: sum of (error of ds) * |k| or |q|, + e |dq| or |dk|
        test_attention.c bounds each element so. An Inf or NaN reaches the queries of tiles that it lies in, seen or not.
Cost:   forward 4*HS flops for each query and key it sees, backward 14*HS; the limit is the tensor cores. A warp's ldmatrix of 512
        bytes feeds two mma, which shared memory and tensor cores of sm_80 do in the same time; with 32 queries per warp it feeds
        four. By ptxas of CUDA 13.0, without spills; what fits on a multiprocessor at once:
                              registers on sm_80, sm_90   shared memory   blocks of four warps
            forward      HS <=  64   217, 221                 48 KiB            2
                         HS <= 128   168, 168                 80 KiB            2
            dk and dv    HS <=  64   234, 223                 49 KiB            2
                         HS <= 128   244, 250                 65 KiB            2
            dq           HS <=  64   160, 164                 48 KiB            3
                         HS <= 128   168, 168                 64 KiB            2, on sm_90 3
Source: Dao 2023, arXiv:2307.08691; online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867
*/
#ifndef LLMC_FLASH_ATTENTION_H
#define LLMC_FLASH_ATTENTION_H
#include "attention_shape.h"  // AttentionShape
#ifdef __CUDACC__
#include "../core/kernel.h"  // WARP, Pack, cudaCheck, device_workspace
#include "../core/mma.h"     // mma_m16n8k16, ldmatrix_x4, cp_async_16

typedef __nv_bfloat16 bf16_;

enum { FLASH_THREADS = 128, FLASH_KEYS = 64 };  // four warps; keys of a block or of a tile

__device__ inline float flash_exp2(float x) {
#ifdef SIMT
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));  // 2 ulp; 2^-Inf = 0
    return y;
#endif
}

// ---- tiles in shared memory ----
// ldmatrix reads 16 bytes ("a chunk") of each of eight rows at once. Rows are 128 or 256 bytes, so the same chunk of eight rows would
// lie in the same four of the 32 banks, and the reads would queue up. Chunk c of row r therefore lies at chunk c ^ (r & 7):
//     row 0:  0 1 2 3 4 5 6 7      row 1:  1 0 3 2 5 4 7 6      row 2:  2 3 0 1 6 7 4 5   ...
// and eight rows of any chunk are in eight different places.

// W: channels of a row, 64 or 128
template <int W>
__device__ inline bf16_* tile_chunk(bf16_* tile, int row, int chunk) { return tile + row * W + (chunk ^ (row & 7)) * 8; }

// ROWS rows of HS channels, of which n_rows exist, on their way to a tile; the rest becomes 0
template <int ROWS, int W>
__device__ inline void tile_load(bf16_* tile, const bf16_* x, size_t stride, int n_rows, int HS) {
    for (int i = threadIdx.x; i < ROWS * W / 8; i += FLASH_THREADS) {
        int row = i / (W / 8), chunk = i % (W / 8), exists = row < n_rows && chunk * 8 < HS;
        cp_async_16_zfill(tile_chunk<W>(tile, row, chunk), exists ? x + row * stride + chunk * 8 : x, exists ? 16 : 0);
    }
}

// operand a: rows row..row+15, channels 16k..16k+15
template <int W>
__device__ inline void load_a(unsigned (&a)[4], bf16_* tile, int row, int k) {
    int lane = threadIdx.x % WARP;
    ldmatrix_x4(a, tile_chunk<W>(tile, row + lane % 16, 2 * k + lane / 16));
}

// two operands b for products with the transposed tile: rows row..row+7 and row+8..row+15 become columns; channels as above
template <int W>
__device__ inline void load_b_transposed(unsigned (&b)[2][2], bf16_* tile, int row, int k) {
    int lane = threadIdx.x % WARP;
    unsigned r[4];
    ldmatrix_x4(r, tile_chunk<W>(tile, row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// two operands b for products with the tile as it stands: rows row..row+15 are summed over, columns are channels 16n.. and 16n+8..
template <int W>
__device__ inline void load_b(unsigned (&b)[2][2], bf16_* tile, int row, int n) {
    int lane = threadIdx.x % WARP;
    unsigned r[4];
    ldmatrix_x4_trans(r, tile_chunk<W>(tile, row + lane % 16, 2 * n + lane / 16));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// ---- products of a warp ----
// Sums are (M*16, N*8) in registers: sums[m][n][0..1] are columns 8n + 2 (lane % 4) and the next of row 16m + lane / 4, and
// sums[m][n][2..3] the same of the row 8 below. p[m][k] are operands a: columns 16k..16k+15 of such sums

// sums += x y', x: M*16 rows of a tile from row_x on, y: N*8 rows of a tile
template <int W, int M, int N>
__device__ inline void add_product_transposed(float (&sums)[M][N][4], bf16_* x, int row_x, bf16_* y) {
    #pragma unroll
    for (int k = 0; k < W / 16; k++) {
        unsigned a[M][4], b[2][2];
        #pragma unroll
        for (int m = 0; m < M; m++) { load_a<W>(a[m], x, row_x + 16 * m, k); }
        #pragma unroll
        for (int n = 0; n < N; n++) {
            if (n % 2 == 0) { load_b_transposed<W>(b, y, 8 * n, k); }
            #pragma unroll
            for (int m = 0; m < M; m++) { mma_m16n8k16(sums[m][n], a[m], b[n % 2], sums[m][n]); }
        }
    }
}

// sums += p y, y: K*16 rows of a tile
template <int W, int M, int K>
__device__ inline void add_product(float (&sums)[M][W / 8][4], const unsigned (&p)[M][K][4], bf16_* y) {
    #pragma unroll
    for (int k = 0; k < K; k++) {
        unsigned b[2][2];
        #pragma unroll
        for (int n = 0; n < W / 8; n++) {
            if (n % 2 == 0) { load_b<W>(b, y, 16 * k, n / 2); }
            #pragma unroll
            for (int m = 0; m < M; m++) { mma_m16n8k16(sums[m][n], p[m][k], b[n % 2], sums[m][n]); }
        }
    }
}

__device__ inline unsigned bf16_pair(float low, float high) {
    return (unsigned)__bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16 | __bfloat16_as_ushort(__float2bfloat16_rn(low));
}

// sums, rounded, as operands a: a lane already holds the elements that mma wants from it
template <int M, int N>
__device__ inline void to_operands(unsigned (&p)[M][N / 2][4], const float (&sums)[M][N][4]) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n++) {
            p[m][n / 2][n % 2 * 2] = bf16_pair(sums[m][n][0], sums[m][n][1]);
            p[m][n / 2][n % 2 * 2 + 1] = bf16_pair(sums[m][n][2], sums[m][n][3]);
        }
    }
}

template <int M, int N>
__device__ inline void set_zero(float (&sums)[M][N][4]) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n++) { sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0.0f; }
    }
}

// rows row..row+16*M-1 of the block, times factor[m][0] (upper 8 rows) and [1], to memory; n_rows of the block's rows exist. By way of
// the same rows of a tile, which this warp alone still uses, so that a lane stores 16 bytes
template <int W, int M>
__device__ inline void store_rows(bf16_* x, size_t stride, int n_rows, int HS, bf16_* tile, int row, const float (&sums)[M][W / 8][4],
                                  const float (&factor)[M][2]) {
    int lane = threadIdx.x % WARP;
    __syncwarp();
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < W / 8; n++) {
            const float(&s)[4] = sums[m][n];
            int r = row + 16 * m + lane / 4;
            *(unsigned*)(tile_chunk<W>(tile, r, n) + lane % 4 * 2) = bf16_pair(s[0] * factor[m][0], s[1] * factor[m][0]);
            *(unsigned*)(tile_chunk<W>(tile, r + 8, n) + lane % 4 * 2) = bf16_pair(s[2] * factor[m][1], s[3] * factor[m][1]);
        }
    }
    __syncwarp();
    for (int i = lane; i < 16 * M * W / 8; i += WARP) {
        int r = row + i / (W / 8), chunk = i % (W / 8);
        if (r < n_rows && chunk * 8 < HS) { pack_store(x + r * stride + chunk * 8, pack_load<8>(tile_chunk<W>(tile, r, chunk))); }
    }
}

// ---- who sees whom ----

// are all keys u..u+n_keys-1 seen by all queries t..t+n-1?
__device__ inline bool all_seen(const AttentionShape& s, int t, int n, int u, int n_keys) {
    return u + n_keys - 1 <= t && (s.window == 0 || t + n - 1 - u < s.window);
}
__device__ inline bool seen(const AttentionShape& s, int t, int u) { return u <= t && (s.window == 0 || t - u < s.window); }

// ---- forward ----

// scores that are not seen become -Inf; t, u: query and key of the warp's first row and column
template <int M, int N>
__device__ inline void mask_scores(float (&scores)[M][N][4], const AttentionShape& s, int t, int u) {
    int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                bool sees = seen(s, t + 16 * m + lane / 4 + i / 2 * 8, u + 8 * n + lane % 4 * 2 + i % 2);
                scores[m][n][i] = sees ? scores[m][n][i] : -INFINITY;
            }
        }
    }
}

// maximum and sum of a row's four lanes
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// scores become 2^(score * scale - max); what belongs to a smaller max, out and this lane's part of sum, shrinks to the new one. The
// maximum begins at a number, not at -Inf, so no difference is Inf - Inf
template <int W, int M, int N>
__device__ inline void softmax_step(float (&scores)[M][N][4], float (&out)[M][W / 8][4], float (&max)[M][2], float (&sum)[M][2],
                                    float scale) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {  // the two rows of this lane
            float top = -INFINITY;
            #pragma unroll
            for (int n = 0; n < N; n++) { top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1])); }
            top = fmaxf(max[m][half], quad_max(top) * scale);
            float shrink = flash_exp2(max[m][half] - top);
            max[m][half] = top;
            sum[m][half] *= shrink;
            #pragma unroll
            for (int n = 0; n < 2 * N; n++) {
                float& p = scores[m][n / 2][2 * half + n % 2];
                p = flash_exp2(p * scale - top);
                sum[m][half] += p;
            }
            #pragma unroll
            for (int n = 0; n < 2 * (W / 8); n++) { out[m][n / 2][2 * half + n % 2] *= shrink; }
        }
    }
}

static const float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

// grid (B * NH, tiles of queries): tiles with the most keys first, for an even end. M: blocks of 16 queries per warp.
// shared memory: queries, then two stages of keys and values
template <int W, int M>
__global__ void __launch_bounds__(FLASH_THREADS) flash_forward_kernel(bf16_* out, float* max, float* inv, const bf16_* q, const bf16_* k,
                                                                      const bf16_* v, AttentionShape s) {
    const int QUERIES = 64 * M, TILE = FLASH_KEYS * W;
    extern __shared__ __align__(128) bf16_ tiles[];
    bf16_ *q_tile = tiles, *k_tile = q_tile + QUERIES * W, *v_tile = k_tile + 2 * TILE;
    int b = blockIdx.x / s.NH, h = blockIdx.x % s.NH, row = threadIdx.x / WARP * 16 * M;
    int t = s.t0 + (gridDim.y - 1 - blockIdx.y) * QUERIES, n_queries = min(QUERIES, s.T - t);
    int first = attention_first_key(&s, t) / FLASH_KEYS, last = (t + n_queries - 1) / FLASH_KEYS;
    size_t kv = attention_at_kv(&s, b, h / (s.NH / s.NKV), 0);
    auto load_keys = [&](int tile) {
        int u = tile * FLASH_KEYS, stage = tile % 2 * TILE;
        tile_load<FLASH_KEYS, W>(k_tile + stage, k + kv + u * s.kv_row, s.kv_row, s.T - u, s.HS);
        tile_load<FLASH_KEYS, W>(v_tile + stage, v + kv + u * s.kv_row, s.kv_row, s.T - u, s.HS);
        cp_async_commit();
    };
    float sums[M][W / 8][4], m[M][2], sum[M][2];
    set_zero(sums);
    for (int i = 0; i < M; i++) { m[i][0] = m[i][1] = -10000.0f * LOG2_E, sum[i][0] = sum[i][1] = 0.0f; }
    tile_load<QUERIES, W>(q_tile, q + attention_at_q(&s, b, h, t), s.q_row, n_queries, s.HS);
    load_keys(first);
    for (int tile = first; tile <= last; tile++) {
        int u = tile * FLASH_KEYS, stage = tile % 2 * TILE;
        cp_async_wait<0>();
        __syncthreads();  // this tile has arrived, and nobody uses the one before any more
        if (tile < last) { load_keys(tile + 1); }
        float p[M][FLASH_KEYS / 8][4];
        unsigned operands[M][FLASH_KEYS / 16][4];
        set_zero(p);
        add_product_transposed<W>(p, q_tile, row, k_tile + stage);
        if (!all_seen(s, t + row, 16 * M, u, FLASH_KEYS)) { mask_scores(p, s, t + row, u); }
        softmax_step<W>(p, sums, m, sum, s.scale * LOG2_E);
        to_operands(operands, p);
        add_product<W>(sums, operands, v_tile + stage);
    }
    for (int i = 0; i < 2 * M; i++) {
        float total = quad_sum(sum[i / 2][i % 2]), r = total == 0.0f ? 0.0f : 1.0f / total;
        int n = row + 8 * i + threadIdx.x % WARP / 4;
        sum[i / 2][i % 2] = r;
        if (threadIdx.x % 4 == 0 && n < n_queries) {
            size_t at = attention_at_row(&s, b, h, t + n);
            max[at] = m[i / 2][i % 2] * LN_2, inv[at] = r;
        }
    }
    store_rows<W>(out + attention_at_out(&s, b, h, t), s.out_row, n_queries, s.HS, q_tile, row, sums, sum);
}

// ---- backward ----

// what backward needs of a query: its weights are 2^(score - level)
struct FlashRow {
    float level, D;
};

// where that of query t is: two make 16 bytes, so each head begins at an even place
__host__ __device__ inline size_t flash_row_stride(const AttentionShape* s) { return (size_t)(attention_queries(s) + 1) / 2 * 2; }
__device__ inline size_t flash_at_row(const AttentionShape& s, int b, int h, int t) {
    return ((size_t)b * s.NH + h) * flash_row_stride(&s) + (t - s.t0);
}

// eight lanes per query, 16 bytes each
__global__ void flash_rows_kernel(FlashRow* rows, const bf16_* dout, const bf16_* out, const float* max, const float* inv,
                                  AttentionShape s) {
    int n_queries = attention_queries(&s);
    int64_t n = (int64_t)blockIdx.x * (FLASH_THREADS / 8) + threadIdx.x / 8, n_rows = (int64_t)s.B * n_queries * s.NH;
    int64_t i = n < n_rows ? n : n_rows - 1;  // all lanes stay for the sum; heads are neighbours in memory
    int h = (int)(i % s.NH), t = s.t0 + (int)(i / s.NH % n_queries), b = (int)(i / s.NH / n_queries);
    size_t at = attention_at_out(&s, b, h, t), row = attention_at_row(&s, b, h, t);
    float D = 0.0f;
    for (int c = threadIdx.x % 8 * 8; c < s.HS; c += 64) {
        Pack<bf16_, 8> x = pack_load<8>(dout + at + c), y = pack_load<8>(out + at + c);
        for (int j = 0; j < 8; j++) { D += to_float(x.x[j]) * to_float(y.x[j]); }
    }
    for (int step = 4; step > 0; step /= 2) { D += __shfl_xor_sync(ALL_LANES, D, step); }
    if (n < n_rows && threadIdx.x % 8 == 0) {
        FlashRow x = {max[row] * LOG2_E - log2f(inv[row]), D};  // inv 0: level Inf, so that all weights are 0
        rows[flash_at_row(s, b, h, t)] = x;
    }
}

// weights from scores, ds / scale from datt, of a warp's 16 keys (rows) and the queries of a tile (columns)
template <int N>
__device__ inline void key_gradients(float (&p)[1][N][4], float (&ds)[1][N][4], const FlashRow* rows, const AttentionShape& s, int t,
                                     int u) {
    int lane = threadIdx.x % WARP;
    bool all = all_seen(s, t, 8 * N, u, 16);
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = 8 * n + lane % 4 * 2 + i % 2;
            bool sees = all || seen(s, t + column, u + lane / 4 + i / 2 * 8);
            float weight = flash_exp2(p[0][n][i] * (s.scale * LOG2_E) - rows[column].level);
            p[0][n][i] = sees ? weight : 0.0f;
            ds[0][n][i] = sees ? weight * (ds[0][n][i] - rows[column].D) : 0.0f;
        }
    }
}

// grid (B * NKV, tiles of keys): early keys have the most queries and come first. A step is a tile of queries of one head.
// QUERIES: 64, or 32 where two sums of 128 channels leave room for less.
// shared memory: keys, values, then two stages of queries, dout and rows
template <int W, int QUERIES>
__global__ void __launch_bounds__(FLASH_THREADS) flash_backward_keys_kernel(bf16_* dk, bf16_* dv, const bf16_* dout, const FlashRow* rows,
                                                                            const bf16_* q, const bf16_* k, const bf16_* v,
                                                                            AttentionShape s) {
    const int TILE = QUERIES * W;
    extern __shared__ __align__(128) bf16_ tiles[];
    bf16_ *k_tile = tiles, *v_tile = k_tile + FLASH_KEYS * W, *q_tile = v_tile + FLASH_KEYS * W, *dout_tile = q_tile + 2 * TILE;
    FlashRow* row_tile = (FlashRow*)(dout_tile + 2 * TILE);
    int b = blockIdx.x / s.NKV, g = blockIdx.x % s.NKV, group = s.NH / s.NKV, row = threadIdx.x / WARP * 16;
    int u = blockIdx.y * FLASH_KEYS, n_keys = min(FLASH_KEYS, s.T - u);
    int first = attention_first_query(&s, u), n_tiles = 0;
    first -= (first - s.t0) % QUERIES;  // for 16-byte copies of rows
    int n_queries = attention_last_query(&s, u + n_keys - 1) - first + 1;
    if (n_queries > 0) { n_tiles = (n_queries + QUERIES - 1) / QUERIES; }
    size_t kv = attention_at_kv(&s, b, g, u);
    auto load_queries = [&](int step) {
        int h = g * group + step / n_tiles, t = first + step % n_tiles * QUERIES, stage = step % 2;
        tile_load<QUERIES, W>(q_tile + stage * TILE, q + attention_at_q(&s, b, h, t), s.q_row, s.T - t, s.HS);
        tile_load<QUERIES, W>(dout_tile + stage * TILE, dout + attention_at_out(&s, b, h, t), s.out_row, s.T - t, s.HS);
        if (threadIdx.x < QUERIES / 2) {  // 0 for a query that does not exist: its q and dout are 0, and so is what it adds
            int n = 2 * threadIdx.x, n_exist = max(0, min(2, s.T - t - n));
            cp_async_16_zfill(row_tile + stage * QUERIES + n, rows + flash_at_row(s, b, h, t) + n, n_exist * (int)sizeof(FlashRow));
        }
        cp_async_commit();
    };
    float dk_sums[1][W / 8][4], dv_sums[1][W / 8][4];
    set_zero(dk_sums);
    set_zero(dv_sums);
    tile_load<FLASH_KEYS, W>(k_tile, k + kv, s.kv_row, n_keys, s.HS);
    tile_load<FLASH_KEYS, W>(v_tile, v + kv, s.kv_row, n_keys, s.HS);
    cp_async_commit();
    if (n_tiles > 0) { load_queries(0); }
    for (int step = 0; step < group * n_tiles; step++) {
        int t = first + step % n_tiles * QUERIES, stage = step % 2 * TILE;
        cp_async_wait<0>();
        __syncthreads();
        if (step + 1 < group * n_tiles) { load_queries(step + 1); }
        float p[1][QUERIES / 8][4], ds[1][QUERIES / 8][4];
        unsigned operands[1][QUERIES / 16][4];
        set_zero(p);
        set_zero(ds);
        add_product_transposed<W>(p, k_tile, row, q_tile + stage);
        add_product_transposed<W>(ds, v_tile, row, dout_tile + stage);
        key_gradients(p, ds, row_tile + step % 2 * QUERIES, s, t, u + row);
        to_operands(operands, p);
        add_product<W>(dv_sums, operands, dout_tile + stage);
        to_operands(operands, ds);
        add_product<W>(dk_sums, operands, q_tile + stage);
    }
    cp_async_wait<0>();  // of keys that no query sees, copies may be under way
    __syncthreads();
    const float scale[1][2] = {{s.scale, s.scale}}, one[1][2] = {{1.0f, 1.0f}};
    store_rows<W>(dk + kv, s.kv_row, n_keys, s.HS, k_tile, row, dk_sums, scale);
    store_rows<W>(dv + kv, s.kv_row, n_keys, s.HS, v_tile, row, dv_sums, one);
}

// ds / scale from scores and datt of a warp's 16 queries (rows) and the keys of a tile (columns)
template <int N>
__device__ inline void query_gradients(float (&ds)[1][N][4], const float (&scores)[1][N][4], const FlashRow (&rows)[2],
                                       const AttentionShape& s, int t, int u) {
    int lane = threadIdx.x % WARP;
    bool all = all_seen(s, t, 16, u, 8 * N);
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            bool sees = all || seen(s, t + lane / 4 + i / 2 * 8, u + 8 * n + lane % 4 * 2 + i % 2);
            float weight = flash_exp2(scores[0][n][i] * (s.scale * LOG2_E) - rows[i / 2].level);
            ds[0][n][i] = sees ? weight * (ds[0][n][i] - rows[i / 2].D) : 0.0f;
        }
    }
}

// grid (B * NH, tiles of 64 queries) as in forward. KEYS of a tile: 64, or 32 so that two blocks find room in shared memory.
// shared memory: queries, dout, then two stages of keys and values
template <int W, int KEYS>
__global__ void __launch_bounds__(FLASH_THREADS) flash_backward_queries_kernel(bf16_* dq, const bf16_* dout, const FlashRow* rows,
                                                                               const bf16_* q, const bf16_* k, const bf16_* v,
                                                                               AttentionShape s) {
    const int QUERIES = 64, TILE = KEYS * W;
    extern __shared__ __align__(128) bf16_ tiles[];
    bf16_ *q_tile = tiles, *dout_tile = q_tile + QUERIES * W, *k_tile = dout_tile + QUERIES * W, *v_tile = k_tile + 2 * TILE;
    int b = blockIdx.x / s.NH, h = blockIdx.x % s.NH, row = threadIdx.x / WARP * 16;
    int t = s.t0 + (gridDim.y - 1 - blockIdx.y) * QUERIES, n_queries = min(QUERIES, s.T - t);
    int first = attention_first_key(&s, t) / KEYS, last = (t + n_queries - 1) / KEYS;
    size_t kv = attention_at_kv(&s, b, h / (s.NH / s.NKV), 0), at = attention_at_q(&s, b, h, t);
    auto load_keys = [&](int tile) {
        int u = tile * KEYS, stage = tile % 2 * TILE;
        tile_load<KEYS, W>(k_tile + stage, k + kv + u * s.kv_row, s.kv_row, s.T - u, s.HS);
        tile_load<KEYS, W>(v_tile + stage, v + kv + u * s.kv_row, s.kv_row, s.T - u, s.HS);
        cp_async_commit();
    };
    FlashRow mine[2];  // of this lane's two queries
    for (int half = 0; half < 2; half++) {
        int n = row + 8 * half + threadIdx.x % WARP / 4;
        FlashRow none = {INFINITY, 0.0f};
        mine[half] = n < n_queries ? rows[flash_at_row(s, b, h, t + n)] : none;
    }
    float sums[1][W / 8][4];
    set_zero(sums);
    tile_load<QUERIES, W>(q_tile, q + at, s.q_row, n_queries, s.HS);
    tile_load<QUERIES, W>(dout_tile, dout + attention_at_out(&s, b, h, t), s.out_row, n_queries, s.HS);
    load_keys(first);
    for (int tile = first; tile <= last; tile++) {
        int stage = tile % 2 * TILE;
        cp_async_wait<0>();
        __syncthreads();
        if (tile < last) { load_keys(tile + 1); }
        float scores[1][KEYS / 8][4], ds[1][KEYS / 8][4];
        unsigned operands[1][KEYS / 16][4];
        set_zero(scores);
        set_zero(ds);
        add_product_transposed<W>(scores, q_tile, row, k_tile + stage);
        add_product_transposed<W>(ds, dout_tile, row, v_tile + stage);
        query_gradients(ds, scores, mine, s, t + row, tile * KEYS);
        to_operands(operands, ds);
        add_product<W>(sums, operands, k_tile + stage);
    }
    const float scale[1][2] = {{s.scale, s.scale}};
    store_rows<W>(dq + at, s.q_row, n_queries, s.HS, q_tile, row, sums, scale);
}

// ---- launches ----

static inline int flash_aligned_(const void* x, size_t row, size_t seq) { return (uintptr_t)x % 16 == 0 && row % 8 == 0 && seq % 8 == 0; }

static inline int flash_fits_(const bf16_* q, const bf16_* k, const bf16_* v, const bf16_* out, const AttentionShape* s) {
    return s->HS % 8 == 0 && s->HS <= 128 && flash_aligned_(q, s->q_row, s->q_seq) && flash_aligned_(k, s->kv_row, s->kv_seq) &&
           flash_aligned_(v, s->kv_row, s->kv_seq) && flash_aligned_(out, s->out_row, s->out_seq);
}

static inline dim3 flash_grid_(int n_heads, int n_rows, int tile) { return dim3((unsigned)n_heads, (unsigned)ceil_div(n_rows, tile)); }

template <int W, int M>
static inline void flash_forward_(bf16_* out, float* max, float* inv, const bf16_* q, const bf16_* k, const bf16_* v,
                                  const AttentionShape* s, const Device* dev) {
    int n_bytes = (int)sizeof(bf16_) * W * (64 * M + 4 * FLASH_KEYS);
    dim3 grid = flash_grid_(s->B * s->NH, attention_queries(s), 64 * M);
    cudaCheck(cudaFuncSetAttribute(flash_forward_kernel<W, M>, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    flash_forward_kernel<W, M><<<grid, FLASH_THREADS, n_bytes, dev->stream>>>(out, max, inv, q, k, v, *s);
    cudaCheck(cudaGetLastError());
}

// N: queries, or keys, of a tile that is streamed
template <int W, int N>
static inline void flash_backward_(bf16_* dq, bf16_* dk, bf16_* dv, const bf16_* dout, const FlashRow* rows, const bf16_* q,
                                   const bf16_* k, const bf16_* v, const AttentionShape* s, const Device* dev) {
    int n_bytes = (int)sizeof(bf16_) * W * (2 * 64 + 4 * N), n_keys_bytes = n_bytes + 2 * N * (int)sizeof(FlashRow);
    dim3 key_grid = flash_grid_(s->B * s->NKV, s->T, FLASH_KEYS), query_grid = flash_grid_(s->B * s->NH, attention_queries(s), 64);
    cudaCheck(cudaFuncSetAttribute(flash_backward_keys_kernel<W, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, n_keys_bytes));
    cudaCheck(cudaFuncSetAttribute(flash_backward_queries_kernel<W, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    flash_backward_keys_kernel<W, N><<<key_grid, FLASH_THREADS, n_keys_bytes, dev->stream>>>(dk, dv, dout, rows, q, k, v, *s);
    flash_backward_queries_kernel<W, N><<<query_grid, FLASH_THREADS, n_bytes, dev->stream>>>(dq, dout, rows, q, k, v, *s);
    cudaCheck(cudaGetLastError());
}

// 1: done. 0: not for these shapes or, the templates, not for this type
static inline int flash_attention_forward(bf16_* out, float* max, float* inv, const bf16_* q, const bf16_* k, const bf16_* v,
                                          const AttentionShape* s, const Device* dev) {
    if (!flash_fits_(q, k, v, out, s)) { return 0; }
    if (s->HS <= 64) {
        flash_forward_<64, 2>(out, max, inv, q, k, v, s, dev);
    } else {
        flash_forward_<128, 1>(out, max, inv, q, k, v, s, dev);
    }
    return 1;
}

static inline int flash_attention_backward(bf16_* dq, bf16_* dk, bf16_* dv, const bf16_* dout, const bf16_* out, const float* max,
                                           const float* inv, const bf16_* q, const bf16_* k, const bf16_* v, const AttentionShape* s,
                                           const Device* dev) {
    if (!flash_fits_(q, k, v, out, s) || !flash_fits_(dq, dk, dv, dout, s)) { return 0; }
    int64_t n_rows = (int64_t)s->B * s->NH * attention_queries(s);
    FlashRow* rows = (FlashRow*)device_workspace(dev, sizeof(FlashRow) * s->B * s->NH * flash_row_stride(s));
    int n_blocks = (int)ceil_div(n_rows, FLASH_THREADS / 8);
    flash_rows_kernel<<<n_blocks, FLASH_THREADS, 0, dev->stream>>>(rows, dout, out, max, inv, *s);
    if (s->HS <= 64) {
        flash_backward_<64, 64>(dq, dk, dv, dout, rows, q, k, v, s, dev);
    } else {
        flash_backward_<128, 32>(dq, dk, dv, dout, rows, q, k, v, s, dev);
    }
    return 1;
}

template <typename X>
static inline int flash_attention_forward(X*, float*, float*, const X*, const X*, const X*, const AttentionShape*, const Device*) {
    return 0;
}
template <typename X>
static inline int flash_attention_backward(X*, X*, X*, const X*, const X*, const float*, const float*, const X*, const X*, const X*,
                                           const AttentionShape*, const Device*) {
    return 0;
}
#endif  // __CUDACC__
#endif  // LLMC_FLASH_ATTENTION_H
