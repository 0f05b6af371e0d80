/*
The gated delta rule (gated_delta.h) on tensor cores, for bf16 and keys and values of up to 128 channels. Notation is
that of gated_delta.h; rows of a chunk that do not exist are 0 everywhere.
A triangular system of 64 positions is no work for tensor cores, so its inverse is made first, of all chunks at once:
    u = v - exp(G) S'k - A beta u    has the solution    u = r + Y (beta r)    of r = v - exp(G) S'k
    Y = -A - A beta Y                strictly below the diagonal, column by column in float
and what backward solves, dD = r + Y' (beta r) with another r, has the same Y: (1 + beta A)^-1 = 1 + beta Y.
    chunks     where the chunks of each row begin
    scores     of all chunks at once: P and Y, and from G what is multiplied with
    forward    a block has 64 channels of the values of a head and goes from chunk to chunk with its part of S in
               registers: u, o, S+
    deltas     of all chunks at once, from S before each: u, once more
    backward   as forward, from the last chunk on, with dS in registers: dD, dv, dS
    keys       of all chunks at once, from S, dS+, u and dD: dq, dk, dg, dbeta. A block has a key head, and one value
               head after the other adds to its sums
Needs 104 KB of shared memory for a block, of keys above 64 channels 144: other GPUs than sm_80, sm_90 and their like
take the plain kernels. Hopper, make CUDA_ARCH=sm_90a: forward and backward by wgmma (flash_delta_hopper.h).
Error:  operands are rounded to bf16 (S, dS, u, D, dD, du, P, Y too), sums are float, and so are S and dS from chunk to
        chunk: test_gated_delta.c has bounds. An Inf or NaN reaches all positions of its chunk, also those before it,
        and what comes behind it in its document, of its head; no other document.
Memory: scratch of 2 * 64 bf16 and 3 floats for each position and value head, backward with 2 DV bf16 and DK DV / 64
        floats more.
Cost:   along a row B * Hv * DV / 64 blocks of 144 KB of shared memory, one on a multiprocessor: two rows of 32 heads
        fill a GPU. Nothing here was measured on a GPU yet.
*/
#ifndef LLMC_FLASH_DELTA_H
#define LLMC_FLASH_DELTA_H
#ifdef __CUDACC__
#include "delta_shape.h"         // DeltaShape, DeltaInputsOf
#include "flash_delta_chunks.h"  // FlashDelta, FlashDeltaChunk, FlashDeltaGates, FLASH_DELTA_V, FLASH_DELTA_THREADS
#include "tile.h"                // tile_load, tile_add_product_of
#ifdef WGMMA
#include "flash_delta_hopper.h"  // flash_delta_hopper_forward, flash_delta_hopper_backward
#ifndef FLASH_DELTA_HOPPER  // test_gated_delta.c: a variable, so that it has both kinds of kernels
#define FLASH_DELTA_HOPPER 1
#endif
#endif

enum { FLASH_DELTA_KEYS_THREADS = 256 };   // 8 warps: two have the same 16 positions, and half of the channels each

// ---- chunks and gates ----

// a warp for each row
static __global__ void flash_delta_chunks_kernel(int* begins, DeltaShape s) {
    const int b = (int)blockIdx.x, lane = (int)threadIdx.x;
    int *of_row = begins + (size_t)b * (s.T + 1), n_chunks = 0, n = 0;  // n: positions of the chunk so far
    for (int t0 = 0; t0 < s.T; t0 += WARP) {
        const unsigned starts = __ballot_sync(ALL_LANES, t0 + lane < s.T && delta_starts_(&s, b, t0 + lane));
        for (int i = 0; i < WARP && t0 + i < s.T; i++, n++) {
            if (t0 + i > 0 && n < DELTA_CHUNK && !(starts >> i & 1)) { continue; }
            if (lane == 0) { of_row[n_chunks] = t0 + i; }
            n_chunks++, n = 0;
        }
    }
    if (lane == 0) { of_row[s.T] = n_chunks; }
}

// sums of x over lanes 0 .. this one
__device__ inline float flash_delta_running_sum_(float x) {
    for (int step = 1; step < WARP; step *= 2) {
        const float y = __shfl_up_sync(ALL_LANES, x, step);
        if ((int)threadIdx.x % WARP >= step) { x += y; }
    }
    return x;
}

// G of 64 positions by one warp; beyond n it stays
__device__ inline void flash_delta_sum_gates_(float* G, const float* g, int stride, int n) {
    const int lane = threadIdx.x % WARP;
    const float low = flash_delta_running_sum_(lane < n ? g[(size_t)lane * stride] : 0.0f);
    const float high = flash_delta_running_sum_(lane + WARP < n ? g[(size_t)(lane + WARP) * stride] : 0.0f);
    G[lane] = low, G[lane + WARP] = __shfl_sync(ALL_LANES, low, WARP - 1) + high;
}

// row and first column of a lane's sums[0][n], pair i / 2 of them, whose rows begin at `row` and columns at `column`
__device__ inline int flash_delta_row_(int row, int i) { return row + (int)threadIdx.x % WARP / 4 + i / 2 * 8; }
__device__ inline int flash_delta_column_(int column, int n, int i) {
    return column + 8 * n + (int)threadIdx.x % 4 * 2 + i % 2;
}

// f(sum, its row, its column) of each sum of a lane. F: a function of the device
template <int M, int N, typename Sum, typename F>
__device__ inline void flash_delta_each_(Sum (&sums)[M][N][4], int row, int column, F f) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < N; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                f(sums[m][n][i], flash_delta_row_(row + 16 * m, i), flash_delta_column_(column, n, i));
            }
        }
    }
}

// each sum times the factor of its row
template <int M, int N>
__device__ inline void flash_delta_scale_(float (&sums)[M][N][4], const float* factor, int row) {
    flash_delta_each_(sums, row, 0, [&](float& x, int r, int) { x *= factor[r]; });
}

// two neighbouring columns, from `column` on, of a row of which C exist
__device__ inline void flash_delta_store_(bf16* x, int column, int C, float low, float high) {
    if (column < C) { *(unsigned*)(x + column) = tile_pair_(low, high); }
}

// ---- scores: grid (chunks, B * Hv) ----

// shared memory: q and k, then A, (64, 64) floats; beta Y takes the place of q and k
template <int W>
__global__ void __launch_bounds__(FLASH_DELTA_THREADS)
    flash_delta_scores_kernel(FlashDelta x, DeltaInputsOf<bf16> in, DeltaShape s) {
    const int C = DELTA_CHUNK, b = (int)blockIdx.y / s.Hv, h = (int)blockIdx.y % s.Hv, row = threadIdx.x / WARP * 16;
    extern __shared__ __align__(128) bf16 tiles[];
    __shared__ float G[DELTA_CHUNK], beta[DELTA_CHUNK];
    bf16 *q = tiles, *k = q + C * W;
    float *A = (float*)(k + C * W), *bY = (float*)tiles;
    for (int chunk = blockIdx.x; chunk < x.begins[(size_t)b * (s.T + 1) + s.T]; chunk += gridDim.x) {
        const FlashDeltaChunk c = flash_delta_chunk(x.begins, s, b, chunk);
        const size_t at = delta_qk_(&s, b, c.t, h), at_g = delta_g_(&s, b, c.t, h);
        __syncthreads();
        tile_load<C, W, FLASH_DELTA_THREADS>(q, in.q + at, (size_t)s.Hk * s.DK, c.n, s.DK);
        tile_load<C, W, FLASH_DELTA_THREADS>(k, in.k + at, (size_t)s.Hk * s.DK, c.n, s.DK);
        cp_async_commit();
        if (threadIdx.x < WARP) { flash_delta_sum_gates_(G, in.g + at_g, s.Hv, c.n); }
        if (threadIdx.x < C) { beta[threadIdx.x] = (int)threadIdx.x < c.n ? in.beta[at_g + threadIdx.x * s.Hv] : 0.0f; }
        cp_async_wait<0>();
        __syncthreads();
        float p[1][8][4], a[1][8][4];
        tile_set_zero(p), tile_set_zero(a);
        tile_add_product_transposed<W>(p, q, row, k);
        tile_add_product_transposed<W>(a, k, row, k);
        bf16* P = x.P + flash_delta_at_square(s, b, c.t, h);
        #pragma unroll
        for (int n = 0; n < 8; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = flash_delta_row_(row, i), j = flash_delta_column_(0, n, i);
                const float decay = j <= r ? __expf(G[r] - G[j]) : 0.0f;
                p[0][n][i] *= decay;
                A[r * C + j] = j < r ? a[0][n][i] * decay : 0.0f;
            }
            for (int half = 0; half < 2; half++) {
                const int r = flash_delta_row_(row, 2 * half);
                bf16* to = P + (size_t)r * s.Hv * C;
                const float (&pair)[4] = p[0][n];
                if (r >= c.n) { continue; }
                flash_delta_store_(to, flash_delta_column_(0, n, 0), C, pair[2 * half], pair[2 * half + 1]);
            }
        }
        __syncthreads();
        if (threadIdx.x < C) {  // a column of Y; what it reads of bY is its own
            const int j = threadIdx.x;
            bf16* Y = x.Y + flash_delta_at_square(s, b, c.t, h) + j;
            for (int i = 0; i < c.n; i++) {
                float sum = -A[i * C + j];
                for (int m = 0; m < i; m++) { sum -= A[i * C + m] * bY[m * C + j]; }
                bY[i * C + j] = beta[i] * sum;
                Y[(size_t)i * s.Hv * C] = __float2bfloat16_rn(sum);
            }
            const size_t gate = flash_delta_at_gate(s, b, h, c.t) + j;
            if (j < c.n) { x.eG[gate] = __expf(G[j]), x.fG[gate] = __expf(G[c.n - 1] - G[j]), x.G[gate] = G[j]; }
        }
    }
}

// ---- S and dS in registers: rows d0 .. d0 + 16 M - 1 of the block's 64 channels from x0 on ----

template <int M>
__device__ inline void flash_delta_load_state_(float (&S)[M][8][4], const float* from, const DeltaShape& s, int d0,
                                               int x0) {
    flash_delta_each_(S, d0, x0, [&](float& x, int d, int v) {
        x = from && d < s.DK && v < s.DV ? from[(size_t)d * s.DV + v] : 0.0f;
    });
}
template <int M>
__device__ inline void flash_delta_store_state_(float* to, const float (&S)[M][8][4], const DeltaShape& s, int d0,
                                                int x0) {
    flash_delta_each_(S, d0, x0, [&](float x, int d, int v) {
        if (d < s.DK && v < s.DV) { to[(size_t)d * s.DV + v] = x; }
    });
}
template <int M>
__device__ inline void flash_delta_state_tile_(bf16* tile, const float (&S)[M][8][4], int d0) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
        #pragma unroll
        for (int n = 0; n < 8; n++) {
            tile_set_pair<FLASH_DELTA_V>(tile, flash_delta_row_(d0 + 16 * m, 0), n, S[m][n][0], S[m][n][1]);
            tile_set_pair<FLASH_DELTA_V>(tile, flash_delta_row_(d0 + 16 * m, 2), n, S[m][n][2], S[m][n][3]);
        }
    }
}
// rows of x times factor, to the same rows of a tile
__device__ inline void flash_delta_rows_(bf16* tile, const float (&x)[1][8][4], const float* factor, int row) {
    const float upper = factor[flash_delta_row_(row, 0)], lower = factor[flash_delta_row_(row, 2)];
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        tile_set_pair<FLASH_DELTA_V>(tile, flash_delta_row_(row, 0), n, upper * x[0][n][0], upper * x[0][n][1]);
        tile_set_pair<FLASH_DELTA_V>(tile, flash_delta_row_(row, 2), n, lower * x[0][n][2], lower * x[0][n][3]);
    }
}

// r = v - exp(G) * kS, where kS came in
__device__ inline void flash_delta_right_side_(float (&r)[1][8][4], bf16* v, const FlashDeltaGates& g, int row) {
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int p = flash_delta_row_(row, i);
            r[0][n][i] = to_float(tile_pair_at<FLASH_DELTA_V>(v, p, n)[i % 2]) - g.eG[p] * r[0][n][i];
        }
    }
}

// ---- the tiles of a chunk, for both passes along a row ----

// v: values, or dout
template <int W>
struct FlashDeltaTiles {
    bf16 k[DELTA_CHUNK * W], q[DELTA_CHUNK * W], v[DELTA_CHUNK * FLASH_DELTA_V], P[DELTA_CHUNK * DELTA_CHUNK],
        Y[DELTA_CHUNK * DELTA_CHUNK];
};

// they are on their way; values: v or dout of all heads, of which 64 channels from x0 on
template <int W>
__device__ inline void flash_delta_load_(FlashDeltaTiles<W>* to, const FlashDelta& x, const DeltaInputsOf<bf16>& in,
                                         const bf16* values, const DeltaShape& s, int b, int h, int x0,
                                         FlashDeltaChunk c) {
    const int C = DELTA_CHUNK, V = FLASH_DELTA_V, THREADS = FLASH_DELTA_THREADS;
    const size_t qk = delta_qk_(&s, b, c.t, h), square = flash_delta_at_square(s, b, c.t, h);
    const size_t k_row = (size_t)s.Hk * s.DK, v_row = (size_t)s.Hv * s.DV, square_row = (size_t)s.Hv * C;
    tile_load<C, W, THREADS>(to->k, in.k + qk, k_row, c.n, s.DK);
    tile_load<C, W, THREADS>(to->q, in.q + qk, k_row, c.n, s.DK);
    tile_load<C, V, THREADS>(to->v, values + delta_v_(&s, b, c.t, h) + x0, v_row, c.n, s.DV - x0);
    tile_load<C, C, THREADS>(to->P, x.P + square, square_row, c.n, C);
    tile_load<C, C, THREADS>(to->Y, x.Y + square, square_row, c.n, C);
    cp_async_commit();
}

// ---- forward: grid (B * Hv, 64 channels each) ----

template <int W>
struct FlashDeltaForward {
    FlashDeltaTiles<W> stage[2];
    bf16 S[W * FLASH_DELTA_V], r[DELTA_CHUNK * FLASH_DELTA_V], D[DELTA_CHUNK * FLASH_DELTA_V];
};

template <int W>
__global__ void __launch_bounds__(FLASH_DELTA_THREADS)
    flash_delta_forward_kernel(bf16* o, float* states, float* state, FlashDelta x, DeltaInputsOf<bf16> in,
                               DeltaShape s) {
    const int C = DELTA_CHUNK, V = FLASH_DELTA_V, M = W / 64;
    const int b = (int)blockIdx.x / s.Hv, h = (int)blockIdx.x % s.Hv, x0 = (int)blockIdx.y * V;
    const int warp = threadIdx.x / WARP, row = 16 * warp, d0 = 16 * M * warp;
    const size_t v_row = (size_t)s.Hv * s.DV;
    extern __shared__ __align__(128) bf16 tiles[];
    FlashDeltaForward<W>* w = (FlashDeltaForward<W>*)tiles;
    __shared__ FlashDeltaGates g;
    auto load = [&](FlashDeltaChunk c, int i) {
        flash_delta_load_<W>(&w->stage[i % 2], x, in, in.v, s, b, h, x0, c);
    };
    const size_t of_head = blockIdx.x * delta_state_floats_(&s);
    const int n_chunks = x.begins[(size_t)b * (s.T + 1) + s.T];
    float S[M][8][4], gates[3];
    flash_delta_load_state_(S, state ? state + of_head : NULL, s, d0, x0);
    FlashDeltaChunk c = flash_delta_chunk(x.begins, s, b, 0);
    load(c, 0);
    flash_delta_read_gates(gates, x, in.beta, s, b, h, c);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        FlashDeltaTiles<W>* t = &w->stage[chunk % 2];
        const FlashDeltaChunk next = chunk + 1 < n_chunks ? flash_delta_chunk(x.begins, s, b, chunk + 1) : c;
        if (c.fresh) { tile_set_zero(S); }
        else if (states) { flash_delta_store_state_(states + delta_slot_(&s, b, c.t, h), S, s, d0, x0); }
        cp_async_wait<0>();
        __syncthreads();  // this chunk has arrived, and nobody uses the one before any more
        if (chunk + 1 < n_chunks) { load(next, chunk + 1); }
        flash_delta_keep_gates(&g, gates);
        flash_delta_read_gates(gates, x, in.beta, s, b, h, next);
        flash_delta_state_tile_(w->S, S, d0);
        __syncthreads();
        float u[1][8][4], out[1][8][4];
        tile_set_zero(u), tile_set_zero(out);
        tile_add_product_of<W, V, W / 16, 0>(u, t->k, row, w->S, 0);
        tile_add_product_of<W, V, W / 16, 0>(out, t->q, row, w->S, 0);
        flash_delta_right_side_(u, t->v, g, row);
        flash_delta_rows_(w->r, u, g.beta, row);
        __syncthreads();
        tile_add_product_of<C, V, C / 16, 0>(u, t->Y, row, w->r, 0);
        flash_delta_rows_(w->D, u, g.beta, row);
        __syncthreads();
        flash_delta_scale_(out, g.eG, row);
        tile_add_product_of<C, V, C / 16, 0>(out, t->P, row, w->D, 0);
        const float ones[1][2] = {{1.0f, 1.0f}};
        tile_store_rows<V>(o + delta_v_(&s, b, c.t, h) + x0, v_row, c.n, s.DV - x0, t->v, row, out, ones);
        flash_delta_scale_(u, g.beta, row);  // exp(G_last - G) D in place of r: all have read it
        flash_delta_rows_(w->r, u, g.fG, row);
        __syncthreads();
        flash_delta_each_(S, 0, 0, [&](float& x, int, int) { x *= g.eG[c.n - 1]; });
        tile_add_product_of<W, V, C / 16, 1>(S, t->k, d0, w->r, 0);
        c = next;
    }
    if (state) { flash_delta_store_state_(state + of_head, S, s, d0, x0); }
}

// ---- backward: u once more; grid (chunks, B * Hv, 64 channels each) ----

template <int W>
struct FlashDeltaDeltas {
    bf16 k[DELTA_CHUNK * W], S[W * FLASH_DELTA_V], v[DELTA_CHUNK * FLASH_DELTA_V], Y[DELTA_CHUNK * DELTA_CHUNK];
};

template <int W>
__global__ void __launch_bounds__(FLASH_DELTA_THREADS)
    flash_delta_deltas_kernel(const float* states, FlashDelta x, DeltaInputsOf<bf16> in, DeltaShape s) {
    const int C = DELTA_CHUNK, V = FLASH_DELTA_V, M = W / 64, THREADS = FLASH_DELTA_THREADS;
    const int b = (int)blockIdx.y / s.Hv, h = (int)blockIdx.y % s.Hv, x0 = (int)blockIdx.z * V;
    const int warp = threadIdx.x / WARP, row = 16 * warp, d0 = 16 * M * warp;
    const size_t k_row = (size_t)s.Hk * s.DK, v_row = (size_t)s.Hv * s.DV;
    extern __shared__ __align__(128) bf16 tiles[];
    FlashDeltaDeltas<W>* w = (FlashDeltaDeltas<W>*)tiles;
    __shared__ FlashDeltaGates g;
    for (int chunk = blockIdx.x; chunk < x.begins[(size_t)b * (s.T + 1) + s.T]; chunk += gridDim.x) {
        const FlashDeltaChunk c = flash_delta_chunk(x.begins, s, b, chunk);
        const size_t v = delta_v_(&s, b, c.t, h) + x0;
        float S[M][8][4], u[1][8][4], gates[3];
        __syncthreads();
        tile_load<C, W, THREADS>(w->k, in.k + delta_qk_(&s, b, c.t, h), k_row, c.n, s.DK);
        tile_load<C, V, THREADS>(w->v, in.v + v, v_row, c.n, s.DV - x0);
        tile_load<C, C, THREADS>(w->Y, x.Y + flash_delta_at_square(s, b, c.t, h), (size_t)s.Hv * C, c.n, C);
        cp_async_commit();
        flash_delta_load_state_(S, c.fresh ? NULL : states + delta_slot_(&s, b, c.t, h), s, d0, x0);
        flash_delta_state_tile_(w->S, S, d0);
        flash_delta_read_gates(gates, x, in.beta, s, b, h, c);
        flash_delta_keep_gates(&g, gates);
        cp_async_wait<0>();
        __syncthreads();
        tile_set_zero(u);
        tile_add_product_of<W, V, W / 16, 0>(u, w->k, row, w->S, 0);
        flash_delta_right_side_(u, w->v, g, row);
        flash_delta_rows_(w->v, u, g.beta, row);  // a lane's own pairs
        __syncthreads();
        tile_add_product_of<C, V, C / 16, 0>(u, w->Y, row, w->v, 0);
        const float ones[1][2] = {{1.0f, 1.0f}};
        tile_store_rows<V>(x.u + v, v_row, c.n, s.DV - x0, w->S, row, u, ones);
    }
}

// ---- backward along the row: grid (B * Hv, 64 channels each) ----

template <int W>
struct FlashDeltaBackward {
    FlashDeltaTiles<W> stage[2];
    bf16 dS[W * FLASH_DELTA_V], r[DELTA_CHUNK * FLASH_DELTA_V], staged[DELTA_CHUNK * FLASH_DELTA_V];
};

template <int W>
__global__ void __launch_bounds__(FLASH_DELTA_THREADS)
    flash_delta_backward_kernel(bf16* dv, float* dstate, const bf16* dout, FlashDelta x, DeltaInputsOf<bf16> in,
                                DeltaShape s) {
    const int C = DELTA_CHUNK, V = FLASH_DELTA_V, M = W / 64;
    const int b = (int)blockIdx.x / s.Hv, h = (int)blockIdx.x % s.Hv, x0 = (int)blockIdx.y * V;
    const int warp = threadIdx.x / WARP, row = 16 * warp, d0 = 16 * M * warp;
    const size_t v_row = (size_t)s.Hv * s.DV;
    extern __shared__ __align__(128) bf16 tiles[];
    FlashDeltaBackward<W>* w = (FlashDeltaBackward<W>*)tiles;
    __shared__ FlashDeltaGates g;
    __shared__ float minus[DELTA_CHUNK];  // -exp(G) beta
    auto load = [&](FlashDeltaChunk c, int i) {
        flash_delta_load_<W>(&w->stage[i % 2], x, in, dout, s, b, h, x0, c);
    };
    const size_t of_head = blockIdx.x * delta_state_floats_(&s);
    const int n_chunks = x.begins[(size_t)b * (s.T + 1) + s.T];
    float dS[M][8][4], gates[3];
    flash_delta_load_state_(dS, dstate ? dstate + of_head : NULL, s, d0, x0);
    FlashDeltaChunk c = flash_delta_chunk(x.begins, s, b, n_chunks - 1), after = {s.T, 0, 0};
    load(c, n_chunks - 1);
    flash_delta_read_gates(gates, x, in.beta, s, b, h, c);
    for (int chunk = n_chunks - 1; chunk >= 0; chunk--) {
        FlashDeltaTiles<W>* t = &w->stage[chunk % 2];
        const FlashDeltaChunk next = chunk > 0 ? flash_delta_chunk(x.begins, s, b, chunk - 1) : c;
        float* kept = after.t == s.T ? x.dS_last + of_head : x.dS + delta_slot_(&s, b, after.t, h);
        if (!after.fresh) { flash_delta_store_state_(kept, dS, s, d0, x0); }
        cp_async_wait<0>();
        __syncthreads();
        if (chunk > 0) { load(next, chunk - 1); }
        flash_delta_keep_gates(&g, gates);
        if (threadIdx.x < C) { minus[threadIdx.x] = -gates[0] * gates[2]; }
        flash_delta_read_gates(gates, x, in.beta, s, b, h, next);
        flash_delta_state_tile_(w->dS, dS, d0);
        __syncthreads();
        float dD[1][8][4];
        tile_set_zero(dD);
        tile_add_product_of<W, V, W / 16, 0>(dD, t->k, row, w->dS, 0);
        flash_delta_scale_(dD, g.fG, row);
        tile_add_product_of<C, V, C / 16, 1>(dD, t->P, row, t->v, 0);
        flash_delta_rows_(w->r, dD, g.beta, row);
        __syncthreads();
        tile_add_product_of<C, V, C / 16, 1>(dD, t->Y, row, w->r, 0);
        const float beta[1][2] = {{g.beta[flash_delta_row_(row, 0)], g.beta[flash_delta_row_(row, 2)]}};
        const float ones[1][2] = {{1.0f, 1.0f}};
        const size_t v = delta_v_(&s, b, c.t, h) + x0;
        tile_store_rows<V>(x.dD + v, v_row, c.n, s.DV - x0, w->staged, row, dD, ones);
        if (dv) { tile_store_rows<V>(dv + v, v_row, c.n, s.DV - x0, w->staged, row, dD, beta); }
        __syncthreads();  // r and dout have been read: they become -exp(G) du and exp(G) dout
        flash_delta_rows_(w->r, dD, minus, row);
        #pragma unroll
        for (int n = 0; n < 8; n++) {
            for (int half = 0; half < 2; half++) {
                const int p = flash_delta_row_(row, 2 * half);
                bf16* pair = tile_pair_at<V>(t->v, p, n);
                tile_set_pair<V>(t->v, p, n, g.eG[p] * to_float(pair[0]), g.eG[p] * to_float(pair[1]));
            }
        }
        __syncthreads();
        if (c.fresh) {
            tile_set_zero(dS);
        } else {
            flash_delta_each_(dS, 0, 0, [&](float& x, int, int) { x *= g.eG[c.n - 1]; });
            tile_add_product_of<W, V, C / 16, 1>(dS, t->q, d0, t->v, 0);
            tile_add_product_of<W, V, C / 16, 1>(dS, t->k, d0, w->r, 0);
        }
        after = c;
        c = next;
    }
    if (dstate) { flash_delta_store_state_(dstate + of_head, dS, s, d0, x0); }
}

// ---- backward of keys: grid (chunks, B * Hk) ----

// W, WV: keys and values in tiles
template <int W, int WV>
struct FlashDeltaKeys {
    bf16 q[DELTA_CHUNK * W], k[DELTA_CHUNK * W], dout[DELTA_CHUNK * WV], D[DELTA_CHUNK * WV], du[DELTA_CHUNK * WV],
        S[W * WV], M[DELTA_CHUNK * DELTA_CHUNK], N[DELTA_CHUNK * DELTA_CHUNK];  // S: then dS
};
struct FlashDeltaSums {
    FlashDeltaGates g;
    float G[DELTA_CHUNK], dG[DELTA_CHUNK], z[DELTA_CHUNK], dbeta[DELTA_CHUNK];
    float rows[2][DELTA_CHUNK], columns[4][DELTA_CHUNK];  // parts of sums: of two halves of channels; of four warps
    float product[FLASH_DELTA_KEYS_THREADS / WARP];
};

// S or dS as a tile, and each warp's part of its product with `other`; NULL: zeros
template <int W, int WV>
__device__ inline void flash_delta_keys_state_(FlashDeltaKeys<W, WV>* w, FlashDeltaSums* sums, const float* S,
                                               const float* other, const DeltaShape& s) {
    float product = 0.0f;
    for (int i = threadIdx.x; i < W * WV / 2; i += FLASH_DELTA_KEYS_THREADS) {
        const int d = i / (WV / 2), v = i % (WV / 2) * 2, exists = d < s.DK && v < s.DV;
        const size_t at = (size_t)d * s.DV + v;
        const float2 zero = make_float2(0.0f, 0.0f), x = S && exists ? *(const float2*)(S + at) : zero,
                     y = other && exists ? *(const float2*)(other + at) : zero;
        *(unsigned*)(tile_chunk<WV>(w->S, d, v / 8) + v % 8) = tile_pair_(x.x, x.y);
        product += x.x * y.x + x.y * y.y;
    }
    product = lane_sum(product);
    if (threadIdx.x % WARP == 0) { sums->product[threadIdx.x / WARP] = product; }
}

// u and dD become D and du; dbeta. Four threads have a row
template <int W, int WV>
__device__ inline void flash_delta_keys_deltas_(FlashDeltaKeys<W, WV>* w, FlashDeltaSums* sums) {
    const int i = threadIdx.x / 4;
    const float beta = sums->g.beta[i];
    float sum = 0.0f;
    for (int v = threadIdx.x % 4 * 2; v < WV; v += 8) {
        bf16 *u = tile_chunk<WV>(w->D, i, v / 8) + v % 8, *dD = tile_chunk<WV>(w->du, i, v / 8) + v % 8;
        const float u0 = to_float(u[0]), u1 = to_float(u[1]), d0 = to_float(dD[0]), d1 = to_float(dD[1]);
        sum += u0 * d0 + u1 * d1;
        *(unsigned*)u = tile_pair_(beta * u0, beta * u1);
        *(unsigned*)dD = tile_pair_(beta * d0, beta * d1);
    }
    sum = tile_quad_sum(sum);
    if (threadIdx.x % 4 == 0) { sums->dbeta[i] = sum; }
}

// of a warp's rows: x (16, N*8) from column on times the same of a tile, summed into parts of `half`
template <int W, int N>
__device__ inline void flash_delta_keys_dots_(float* parts, bf16* tile, const float (&x)[1][N][4], int row, int first) {
    for (int half = 0; half < 2; half++) {
        const int r = flash_delta_row_(row, 2 * half);
        float sum = 0.0f;
        #pragma unroll
        for (int n = 0; n < N; n++) {
            const bf16* pair = tile_pair_at<W>(tile, r, first + n);
            sum += x[0][n][2 * half] * to_float(pair[0]) + x[0][n][2 * half + 1] * to_float(pair[1]);
        }
        sum = tile_quad_sum(sum);
        if (threadIdx.x % 4 == 0) { parts[r] = sum; }
    }
}

// 16 rows and 32 columns of a square: M (x = q, dx = dout), or N (x = k, dx = -du, without the diagonal); and for dG
// the sums of its rows and columns, times P or A
template <int W, int WV>
__device__ inline void flash_delta_keys_square_(bf16* to, float (&row_sums)[2], float (&column_sums)[4][2], bf16* x,
                                                bf16* k, bf16* dx, bf16* D, const float* G, float sign, int diagonal,
                                                int row, int half) {
    float scores[1][4][4], d[1][4][4];
    tile_set_zero(scores), tile_set_zero(d);
    tile_add_product_transposed<W, 2>(scores, x, row, k + 32 * half * W);
    tile_add_product_transposed<WV, 2>(d, dx, row, D + 32 * half * WV);
    #pragma unroll
    for (int n = 0; n < 4; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = flash_delta_row_(row, i), j = flash_delta_column_(32 * half, n, i);
            const float decay = j < r ? __expf(G[r] - G[j]) : j == r && diagonal ? 1.0f : 0.0f;
            const float y = sign * d[0][n][i] * decay, worth = j < r ? y * scores[0][n][i] : 0.0f;
            d[0][n][i] = y;
            row_sums[i / 2] += worth, column_sums[n][i % 2] += worth;
        }
        tile_set_pair<DELTA_CHUNK>(to, flash_delta_row_(row, 0), 4 * half + n, d[0][n][0], d[0][n][1]);
        tile_set_pair<DELTA_CHUNK>(to, flash_delta_row_(row, 2), 4 * half + n, d[0][n][2], d[0][n][3]);
    }
}

template <int W, int WV>
__device__ inline void flash_delta_keys_squares_(FlashDeltaKeys<W, WV>* w, FlashDeltaSums* sums, int row, int half) {
    float row_sums[2] = {0.0f, 0.0f}, column_sums[4][2] = {};
    flash_delta_keys_square_<W, WV>(w->M, row_sums, column_sums, w->q, w->k, w->dout, w->D, sums->G, 1.0f, 1, row,
                                    half);
    flash_delta_keys_square_<W, WV>(w->N, row_sums, column_sums, w->k, w->k, w->du, w->D, sums->G, -1.0f, 0, row,
                                    half);
    #pragma unroll
    for (int i = 0; i < 8; i++) {  // of the eight rows that other lanes have
        float sum = column_sums[i / 2][i % 2];
        for (int step = 4; step < WARP; step *= 2) { sum += __shfl_xor_sync(ALL_LANES, sum, step); }
        if (threadIdx.x % WARP < 4) { sums->columns[row / 16][flash_delta_column_(32 * half, i / 2, i)] = sum; }
    }
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const float sum = tile_quad_sum(row_sums[i]);
        if (threadIdx.x % 4 == 0) { sums->rows[half][flash_delta_row_(row, 2 * i)] = sum; }
    }
}

// sums += factor of each row * x
template <int N>
__device__ inline void flash_delta_keys_add_(float (&sums)[1][N][4], const float (&x)[1][N][4], const float* factor,
                                             int row, float sign) {
    #pragma unroll
    for (int n = 0; n < N; n++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) { sums[0][n][i] += sign * factor[flash_delta_row_(row, i)] * x[0][n][i]; }
    }
}

template <int W, int WV>
__global__ void __launch_bounds__(FLASH_DELTA_KEYS_THREADS)
    flash_delta_keys_kernel(DeltaGradientsOf<bf16> d, const bf16* dout, const float* states, FlashDelta x,
                            DeltaInputsOf<bf16> in, DeltaShape s) {
    const int C = DELTA_CHUNK, THREADS = FLASH_DELTA_KEYS_THREADS, N = W / 16, R = s.Hv / s.Hk;
    const int b = (int)blockIdx.y / s.Hk, first = (int)blockIdx.y % s.Hk * R;
    const int warp = threadIdx.x / WARP, row = warp % 4 * 16, half = warp / 4, i = threadIdx.x;
    const size_t k_row = (size_t)s.Hk * s.DK, v_row = (size_t)s.Hv * s.DV;
    const size_t n_state = delta_state_floats_(&s);
    extern __shared__ __align__(128) bf16 tiles[];
    FlashDeltaKeys<W, WV>* w = (FlashDeltaKeys<W, WV>*)tiles;
    __shared__ FlashDeltaSums kept;
    const int n_chunks = x.begins[(size_t)b * (s.T + 1) + s.T];
    for (int chunk = blockIdx.x; chunk < n_chunks; chunk += gridDim.x) {
        const FlashDeltaChunk c = flash_delta_chunk(x.begins, s, b, chunk);
        FlashDeltaChunk after = {s.T, 0, 0};
        if (chunk + 1 < n_chunks) { after = flash_delta_chunk(x.begins, s, b, chunk + 1); }
        const size_t qk = delta_qk_(&s, b, c.t, first);
        float dq[1][N][4], dk[1][N][4];
        tile_set_zero(dq), tile_set_zero(dk);
        __syncthreads();
        tile_load<C, W, THREADS, 1>(w->q, in.q + qk, k_row, c.n, s.DK);  // once a chunk, and registers are short
        tile_load<C, W, THREADS, 1>(w->k, in.k + qk, k_row, c.n, s.DK);
        for (int h = first; h < first + R; h++) {
            const size_t v = delta_v_(&s, b, c.t, h);
            const float* S = c.fresh ? NULL : states + delta_slot_(&s, b, c.t, h);
            const float* dS = after.fresh ? NULL
                              : after.t == s.T ? x.dS_last + ((size_t)b * s.Hv + h) * n_state
                                               : x.dS + delta_slot_(&s, b, after.t, h);
            float gates[3], sums[1][N][4];
            __syncthreads();
            tile_load<C, WV, THREADS>(w->dout, dout + v, v_row, c.n, s.DV);
            tile_load<C, WV, THREADS>(w->D, x.u + v, v_row, c.n, s.DV);
            tile_load<C, WV, THREADS>(w->du, x.dD + v, v_row, c.n, s.DV);
            cp_async_commit();
            flash_delta_keys_state_(w, &kept, S, NULL, s);
            flash_delta_read_gates(gates, x, in.beta, s, b, h, c);
            flash_delta_keep_gates(&kept.g, gates);
            if (i < C) { kept.G[i] = x.G[flash_delta_at_gate(s, b, h, c.t + min(i, c.n - 1))]; }
            cp_async_wait<0>();
            __syncthreads();
            flash_delta_keys_deltas_(w, &kept);
            __syncthreads();
            flash_delta_keys_squares_(w, &kept, row, half);
            __syncthreads();
            if (i < C) {
                kept.dG[i] = kept.rows[0][i] + kept.rows[1][i];
                for (int p = 0; p < 4; p++) { kept.dG[i] -= kept.columns[p][i]; }
            }
            // B = S dout, X = S du, Z = dS D: each by the warp's half of the channels of keys
            const int column = half * N;  // of 8
            tile_set_zero(sums);
            tile_add_product_transposed<WV, 2>(sums, w->dout, row, w->S + 8 * column * WV);
            __syncthreads();
            flash_delta_keys_dots_<W>(kept.rows[half], w->q, sums, row, column);
            flash_delta_keys_add_(dq, sums, kept.g.eG, row, 1.0f);
            __syncthreads();
            if (i < C) { kept.dG[i] += kept.g.eG[i] * (kept.rows[0][i] + kept.rows[1][i]); }
            tile_set_zero(sums);
            tile_add_product_transposed<WV, 2>(sums, w->du, row, w->S + 8 * column * WV);
            __syncthreads();
            flash_delta_keys_dots_<W>(kept.rows[half], w->k, sums, row, column);
            flash_delta_keys_add_(dk, sums, kept.g.eG, row, -1.0f);
            __syncthreads();
            if (i < C) { kept.dG[i] -= kept.g.eG[i] * (kept.rows[0][i] + kept.rows[1][i]); }
            flash_delta_keys_state_(w, &kept, dS, S, s);
            __syncthreads();
            tile_set_zero(sums);
            tile_add_product_transposed<WV, 2>(sums, w->D, row, w->S + 8 * column * WV);
            __syncthreads();
            flash_delta_keys_dots_<W>(kept.rows[half], w->k, sums, row, column);
            flash_delta_keys_add_(dk, sums, kept.g.fG, row, 1.0f);
            __syncthreads();
            if (i < C) { kept.z[i] = kept.g.fG[i] * (kept.rows[0][i] + kept.rows[1][i]); }
            tile_add_product_of<C, W, C / 16, 0>(dq, w->M, row, w->k, column);
            tile_add_product_of<C, W, C / 16, 0>(dk, w->N, row, w->k, column);
            tile_add_product_of<C, W, C / 16, 1>(dk, w->N, row, w->k, column);
            tile_add_product_of<C, W, C / 16, 1>(dk, w->M, row, w->q, column);
            __syncthreads();
            if (warp == 0) {  // sums from each position to the last: G that are summed from behind
                float z = lane_sum(kept.z[i] + kept.z[i + WARP]), product = 0.0f;
                for (int p = 0; p < THREADS / WARP; p++) { product += kept.product[p]; }
                const int last = c.n - 1;
                const float more = z + kept.g.eG[last] * product;
                float low = kept.dG[i] - kept.z[i] + (i == last ? more : 0.0f);
                float high = kept.dG[i + WARP] - kept.z[i + WARP] + (i + WARP == last ? more : 0.0f);
                const float low_sum = flash_delta_running_sum_(low), high_sum = flash_delta_running_sum_(high);
                const float high_total = __shfl_sync(ALL_LANES, high_sum, WARP - 1);
                const float low_total = __shfl_sync(ALL_LANES, low_sum, WARP - 1);
                low = low_total - low_sum + low + high_total, high = high_total - high_sum + high;
                const size_t g = delta_g_(&s, b, c.t, h);
                if (d.dg && i < c.n) { d.dg[g + (size_t)i * s.Hv] = low; }
                if (d.dg && i + WARP < c.n) { d.dg[g + (size_t)(i + WARP) * s.Hv] = high; }
            }
            if (d.dbeta && i < c.n) { d.dbeta[delta_g_(&s, b, c.t + i, h)] = kept.dbeta[i]; }
        }
        #pragma unroll
        for (int n = 0; n < N; n++) {
            for (int p = 0; p < 4; p += 2) {
                const int r = flash_delta_row_(row, p), to = flash_delta_column_(8 * half * N, n, 0);
                const size_t at = qk + (size_t)r * k_row;
                if (r < c.n && d.dq) { flash_delta_store_(d.dq + at, to, s.DK, dq[0][n][p], dq[0][n][p + 1]); }
                if (r < c.n && d.dk) { flash_delta_store_(d.dk + at, to, s.DK, dk[0][n][p], dk[0][n][p + 1]); }
            }
        }
    }
}

// ---- launches ----

template <typename X>
static inline X* flash_delta_take_(char* memory, size_t* n_bytes, size_t n) {
    X* x = memory ? (X*)(memory + *n_bytes) : NULL;
    *n_bytes += (n * sizeof(X) + 127) / 128 * 128;
    return x;
}

// its bytes come back; memory NULL: only these. trains: with what backward alone needs
static inline size_t flash_delta_scratch(FlashDelta* x, char* memory, const DeltaShape* s, int trains) {
    const size_t n = (size_t)s->B * (size_t)s->T * (size_t)s->Hv, square = n * DELTA_CHUNK, values = n * (size_t)s->DV;
    size_t bytes = 0;
    x->begins = flash_delta_take_<int>(memory, &bytes, (size_t)s->B * ((size_t)s->T + 1));
    x->eG = flash_delta_take_<float>(memory, &bytes, n);
    x->fG = flash_delta_take_<float>(memory, &bytes, n);
    x->G = flash_delta_take_<float>(memory, &bytes, n);
    x->P = flash_delta_take_<bf16>(memory, &bytes, square);
    x->Y = flash_delta_take_<bf16>(memory, &bytes, square);
    if (!trains) { return bytes; }
    x->u = flash_delta_take_<bf16>(memory, &bytes, values);
    x->dD = flash_delta_take_<bf16>(memory, &bytes, values);
    x->dS = flash_delta_take_<float>(memory, &bytes, delta_states_floats(s));
    x->dS_last = flash_delta_take_<float>(memory, &bytes, (size_t)s->B * (size_t)s->Hv * delta_state_floats_(s));
    return bytes;
}

// the largest that any kernel asks for; both passes must fit, since backward reads what forward has kept
static inline size_t flash_delta_shared_(const DeltaShape* s) {
    return s->DK <= 64 ? sizeof(FlashDeltaBackward<64>) : sizeof(FlashDeltaBackward<128>);
}

static inline int flash_delta_fits_(const DeltaShape* s, const Device* dev) {
    return s->DK % 8 == 0 && s->DV % 8 == 0 && s->DK <= 128 && s->DV <= 128 && s->T > 0 &&
           flash_delta_shared_(s) <= (size_t)dev->most_shared;
}

// chunks and scores: both passes begin so
template <int W>
static inline FlashDelta flash_delta_begin_(DeltaInputsOf<bf16> in, const DeltaShape* s, int trains,
                                            const Device* dev) {
    FlashDelta x = {};
    const size_t bytes = flash_delta_scratch(&x, NULL, s, trains);
    const size_t shared = 2 * sizeof(bf16) * DELTA_CHUNK * W + sizeof(float) * DELTA_CHUNK * DELTA_CHUNK;
    flash_delta_scratch(&x, (char*)device_workspace(dev, bytes), s, trains);
    flash_delta_chunks_kernel<<<(unsigned)s->B, WARP, 0, dev->stream>>>(x.begins, *s);
    const dim3 grid((unsigned)delta_chunks_(s), (unsigned)(s->B * s->Hv));
    cudaCheck(cudaFuncSetAttribute(flash_delta_scores_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)shared));
    flash_delta_scores_kernel<W><<<grid, FLASH_DELTA_THREADS, shared, dev->stream>>>(x, in, *s);
    return x;
}

template <int W>
static inline void flash_delta_forward_(bf16* o, float* states, float* state, DeltaInputsOf<bf16> in,
                                        const DeltaShape* s, const Device* dev) {
    const FlashDelta x = flash_delta_begin_<W>(in, s, 0, dev);
#ifdef WGMMA
    if (FLASH_DELTA_HOPPER) {
        flash_delta_hopper_forward<W>(o, states, state, x, in, s, dev);
        return;
    }
#endif
    const dim3 grid((unsigned)(s->B * s->Hv), (unsigned)ceil_div(s->DV, FLASH_DELTA_V));
    const size_t shared = sizeof(FlashDeltaForward<W>);
    cudaCheck(cudaFuncSetAttribute(flash_delta_forward_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)shared));
    flash_delta_forward_kernel<W><<<grid, FLASH_DELTA_THREADS, shared, dev->stream>>>(o, states, state, x, in, *s);
    cudaCheck(cudaGetLastError());
}

// dS, dD and dv along the row
template <int W>
static inline void flash_delta_backward_along_(bf16* dv, float* dstate, const bf16* dout, const FlashDelta& x,
                                               DeltaInputsOf<bf16> in, const DeltaShape* s, const Device* dev) {
#ifdef WGMMA
    if (FLASH_DELTA_HOPPER) {
        flash_delta_hopper_backward<W>(dv, dstate, dout, x, in, s, dev);
        return;
    }
#endif
    const dim3 grid((unsigned)(s->B * s->Hv), (unsigned)ceil_div(s->DV, FLASH_DELTA_V));
    const size_t shared = sizeof(FlashDeltaBackward<W>);
    cudaCheck(cudaFuncSetAttribute(flash_delta_backward_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)shared));
    flash_delta_backward_kernel<W><<<grid, FLASH_DELTA_THREADS, shared, dev->stream>>>(dv, dstate, dout, x, in, *s);
}

template <int W, int WV>
static inline void flash_delta_backward_(DeltaGradientsOf<bf16> d, float* dstate, const bf16* dout, const float* states,
                                         DeltaInputsOf<bf16> in, const DeltaShape* s, const Device* dev) {
    const FlashDelta x = flash_delta_begin_<W>(in, s, 1, dev);
    const unsigned n_chunks = (unsigned)delta_chunks_(s), n_heads = (unsigned)(s->B * s->Hv),
                   parts = (unsigned)ceil_div(s->DV, FLASH_DELTA_V);
    const size_t of_deltas = sizeof(FlashDeltaDeltas<W>), of_keys = sizeof(FlashDeltaKeys<W, WV>);
    cudaCheck(cudaFuncSetAttribute(flash_delta_deltas_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)of_deltas));
    cudaCheck(cudaFuncSetAttribute(flash_delta_keys_kernel<W, WV>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)of_keys));
    flash_delta_deltas_kernel<W><<<dim3(n_chunks, n_heads, parts), FLASH_DELTA_THREADS, of_deltas, dev->stream>>>(
        states, x, in, *s);
    flash_delta_backward_along_<W>(d.dv, dstate, dout, x, in, s, dev);
    flash_delta_keys_kernel<W, WV><<<dim3(n_chunks, (unsigned)(s->B * s->Hk)), FLASH_DELTA_KEYS_THREADS, of_keys,
                                     dev->stream>>>(d, dout, states, x, in, *s);
    cudaCheck(cudaGetLastError());
}

// 1: done. 0: not for these shapes or, the templates, not for this type
static inline int flash_delta_forward(bf16* o, float* states, float* state, DeltaInputsOf<bf16> in,
                                      const DeltaShape* s, const Device* dev) {
    if (!flash_delta_fits_(s, dev) || !pack_aligned(o, in.q, in.k, in.v)) { return 0; }
    if (s->DK <= 64) { flash_delta_forward_<64>(o, states, state, in, s, dev); }
    else { flash_delta_forward_<128>(o, states, state, in, s, dev); }
    return 1;
}

static inline int flash_delta_backward(DeltaGradientsOf<bf16> d, float* dstate, const bf16* dout, const float* states,
                                       DeltaInputsOf<bf16> in, const DeltaShape* s, const Device* dev) {
    if (!flash_delta_fits_(s, dev) || !pack_aligned(d.dq, d.dk, d.dv, dout, in.q, in.k, in.v)) { return 0; }
    if (s->DK <= 64 && s->DV <= 64) { flash_delta_backward_<64, 64>(d, dstate, dout, states, in, s, dev); }
    else if (s->DK <= 64) { flash_delta_backward_<64, 128>(d, dstate, dout, states, in, s, dev); }
    else if (s->DV <= 64) { flash_delta_backward_<128, 64>(d, dstate, dout, states, in, s, dev); }
    else { flash_delta_backward_<128, 128>(d, dstate, dout, states, in, s, dev); }
    return 1;
}

template <typename X>
static inline int flash_delta_forward(X*, float*, float*, DeltaInputsOf<X>, const DeltaShape*, const Device*) {
    return 0;
}
template <typename X>
static inline int flash_delta_backward(DeltaGradientsOf<X>, float*, const X*, const float*, DeltaInputsOf<X>,
                                       const DeltaShape*, const Device*) {
    return 0;
}
#endif  // __CUDACC__
#endif  // LLMC_FLASH_DELTA_H
