/*
The gated delta rule of flash_delta.h along a row, by wgmma, for Hopper (sm_90a): flash_delta.h calls it in a build with
WGMMA, that of make CUDA_ARCH=sm_90a. What it says of shapes, of what is rounded and of errors holds here too. Other
than there
    turned      the block's 64 channels of values are rows of each product, positions or channels of keys its columns:
                S' k' instead of k S. So every left operand, S', r', D' and their gradients, is what registers of the
                warpgroup hold already, and every right one a tile as it was copied: nothing goes through shared memory
                from one product to the next, and no barrier lies between them
    barriers    two for a chunk, not five: its tiles have arrived; its gates have been read
    memory      no tiles of S, r and D: 113 KB of a block, of keys up to 64 channels 81, so a multiprocessor has two
Cost:   products of a chunk, of keys above 64 channels, take 1024 cycles of a multiprocessor. Three batches of them wait
        for each other: S' k', then Y, then the next S; q and P are multiplied beside. A warp issues 884 instructions
        forward and 791 backward, where by mma.sync it issues 1866 and 1800. By ptxas of CUDA 13.0 251 and 253
        registers (of keys up to 64 channels 221 and 211), without spills.
        Where every multiprocessor has a block, memory is the limit: forward of training moves some 64 KB for a chunk,
        half of it `states`, which an H200's 4.8 TB/s take 3300 cycles for; without states 1650, but its copies of 56 KB
        come from the second-level cache in 2500. Nothing here was measured on a GPU yet.
*/
#ifndef LLMC_FLASH_DELTA_HOPPER_H
#define LLMC_FLASH_DELTA_HOPPER_H
#if defined(__CUDACC__) && defined(WGMMA)
#include "../core/wgmma.h"       // wgmma_fence, wgmma_commit, wgmma_wait, wgmma_keep
#include "delta_shape.h"         // DeltaShape, DeltaInputsOf
#include "flash_delta_chunks.h"  // FlashDelta, FlashDeltaChunk, FlashDeltaGates, FLASH_DELTA_V, FLASH_DELTA_THREADS
#include "tile.h"                // tile_load_a_transposed, tile_to_operands, tile_set_zero
#include "wide_tile.h"           // wide_tile_load, wide_tile_arrived, wide_tile_product, wide_tile_store_turned

// ---- the tiles of a chunk ----

// v: values, or dout. W channels of keys in wide tiles
template <int W>
struct FlashDeltaHopperTiles {
    bf16 k[DELTA_CHUNK * W], q[DELTA_CHUNK * W], v[DELTA_CHUNK * FLASH_DELTA_V], P[DELTA_CHUNK * DELTA_CHUNK],
        Y[DELTA_CHUNK * DELTA_CHUNK];
};

template <int W>
struct FlashDeltaHopper {
    FlashDeltaHopperTiles<W> stage[2];
    FlashDeltaGates g;
    float minus[DELTA_CHUNK];  // backward: -exp(G) beta
};

// they are on their way; values: v or dout of all heads, of which 64 channels from x0 on
template <int W>
__device__ inline void flash_delta_hopper_load_(FlashDeltaHopperTiles<W>* to, const FlashDelta& x,
                                                const DeltaInputsOf<bf16>& in, const bf16* values, const DeltaShape& s,
                                                int b, int h, int x0, FlashDeltaChunk c) {
    const int C = DELTA_CHUNK, V = FLASH_DELTA_V, THREADS = FLASH_DELTA_THREADS;
    const size_t qk = delta_qk_(&s, b, c.t, h), square = flash_delta_at_square(s, b, c.t, h);
    const size_t k_row = (size_t)s.Hk * s.DK, v_row = (size_t)s.Hv * s.DV, square_row = (size_t)s.Hv * C;
    wide_tile_load<C, W, THREADS>(to->k, in.k + qk, k_row, c.n, s.DK);
    wide_tile_load<C, W, THREADS>(to->q, in.q + qk, k_row, c.n, s.DK);
    wide_tile_load<C, V, THREADS>(to->v, values + delta_v_(&s, b, c.t, h) + x0, v_row, c.n, s.DV - x0);
    wide_tile_load<C, C, THREADS>(to->P, x.P + square, square_row, c.n, C);
    wide_tile_load<C, C, THREADS>(to->Y, x.Y + square, square_row, c.n, C);
    cp_async_commit();
}

// ---- turned sums: a lane's x[0][n][i] is of channel lane / 4 + i / 2 * 8 of its warp and column 8n + lane % 4 * 2 +
// i % 2 ----

__device__ inline float2 flash_delta_hopper_factors_(const float* factor, int n) {
    return *(const float2*)(factor + 8 * n + threadIdx.x % 4 * 2);
}

// each times the factor of its position
__device__ inline void flash_delta_hopper_scale_(float (&x)[1][8][4], const float* factor) {
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 f = flash_delta_hopper_factors_(factor, n);
        x[0][n][0] *= f.x, x[0][n][1] *= f.y, x[0][n][2] *= f.x, x[0][n][3] *= f.y;
    }
}

// operands of x times the factor of each position
__device__ inline void flash_delta_hopper_operands_(unsigned (&p)[1][4][4], const float (&x)[1][8][4],
                                                    const float* factor) {
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 f = flash_delta_hopper_factors_(factor, n);
        p[0][n / 2][n % 2 * 2] = tile_pair_(x[0][n][0] * f.x, x[0][n][1] * f.y);
        p[0][n / 2][n % 2 * 2 + 1] = tile_pair_(x[0][n][2] * f.x, x[0][n][3] * f.y);
    }
}

// v', or dout', as operands
__device__ inline void flash_delta_hopper_values_(unsigned (&p)[1][4][4], bf16* v) {
    #pragma unroll
    for (int k = 0; k < 4; k++) {
        tile_load_a_transposed<FLASH_DELTA_V>(p[0][k], v, 16 * k, threadIdx.x / WARP);
    }
}

// each times the factor of its position
__device__ inline void flash_delta_hopper_fade_values_(unsigned (&p)[1][4][4], const float* factor) {
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        unsigned& pair = p[0][i / 4][i % 4];
        const float2 f = flash_delta_hopper_factors_(factor, i / 2);
        pair = tile_pair_(f.x * tile_low_(pair), f.y * tile_high_(pair));
    }
}

// x = factor of each position * x + y
__device__ inline void flash_delta_hopper_add_(float (&x)[1][8][4], const float (&y)[1][8][4], const float* factor) {
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 f = flash_delta_hopper_factors_(factor, n);
        #pragma unroll
        for (int i = 0; i < 4; i++) { x[0][n][i] = (i % 2 ? f.y : f.x) * x[0][n][i] + y[0][n][i]; }
    }
}

// r' = v' - exp(G) * S'k', where S'k' came in
__device__ inline void flash_delta_hopper_right_side_(float (&r)[1][8][4], bf16* v, const float* eG) {
    unsigned p[1][4][4];
    flash_delta_hopper_values_(p, v);
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        const unsigned pair = p[0][i / 4][i % 4];
        const float2 f = flash_delta_hopper_factors_(eG, i / 2);
        float &low = r[0][i / 2][i % 2 * 2], &high = r[0][i / 2][i % 2 * 2 + 1];
        low = tile_low_(pair) - f.x * low, high = tile_high_(pair) - f.y * high;
    }
}

// ---- S' and dS' in registers: rows are the block's channels of values from x0 on, columns channels of keys ----

// f(element, its place in a state (DK, DV)) of those that exist
template <int N, typename Sum, typename X, typename F>
__device__ inline void flash_delta_hopper_each_(Sum (&S)[1][N][4], X* state, const DeltaShape& s, int x0, F f) {
    const int lane = threadIdx.x % WARP, v = x0 + threadIdx.x / WARP * 16 + lane / 4;
    const bool exists = v < s.DV, exists_below = v + 8 < s.DV;
    X* at = state + lane % 4 * 2 * s.DV + v;
    #pragma unroll
    for (int n = 0; n < N; n++, at += 8 * s.DV) {
        if (8 * n >= s.DK) { break; }  // DK is a multiple of 8
        if (exists) { f(S[0][n][0], at[0]), f(S[0][n][1], at[s.DV]); }
        if (exists_below) { f(S[0][n][2], at[8]), f(S[0][n][3], at[s.DV + 8]); }
    }
}
template <int N>
__device__ inline void flash_delta_hopper_load_state_(float (&S)[1][N][4], const float* from, const DeltaShape& s,
                                                      int x0) {
    tile_set_zero(S);
    if (from) { flash_delta_hopper_each_(S, from, s, x0, [](float& x, float kept) { x = kept; }); }
}
template <int N>
__device__ inline void flash_delta_hopper_store_state_(float* to, const float (&S)[1][N][4], const DeltaShape& s,
                                                       int x0) {
    flash_delta_hopper_each_(S, to, s, x0, [](float x, float& kept) { kept = x; });
}
// faded by the whole chunk
template <int N>
__device__ inline void flash_delta_hopper_fade_(float (&S)[1][N][4], float factor) {
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) { S[0][i / 4][i % 4] *= factor; }
}

// ---- forward: grid (64 channels each, Hv, B) ----

template <int W>
__global__ void __launch_bounds__(FLASH_DELTA_THREADS, 2)
    flash_delta_forward_hopper_kernel(bf16* o, float* states, float* state, FlashDelta x, DeltaInputsOf<bf16> in,
                                      DeltaShape s) {
    const int V = FLASH_DELTA_V, x0 = (int)blockIdx.x * V, h = (int)blockIdx.y, b = (int)blockIdx.z;
    const size_t v_row = (size_t)s.Hv * s.DV, of_head = ((size_t)b * s.Hv + h) * delta_state_floats_(&s);
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    FlashDeltaHopper<W>* w = (FlashDeltaHopper<W>*)wide_tiles;
    const FlashDeltaGates& g = w->g;
    auto find = [&](int i) { return flash_delta_chunk(x.begins, s, b, i); };
    auto load = [&](FlashDeltaChunk c, int i) {
        flash_delta_hopper_load_<W>(&w->stage[i % 2], x, in, in.v, s, b, h, x0, c);
    };
    const int last = x.begins[(size_t)b * (s.T + 1) + s.T] - 1;
    float S[1][W / 8][4], u[1][8][4], out[1][8][4], gates[3];
    unsigned before[1][W / 16][4], deltas[1][4][4], faded[1][4][4];
    flash_delta_hopper_load_state_(S, state ? state + of_head : NULL, s, x0);
    FlashDeltaChunk c = find(0), next = find(min(1, last));
    load(c, 0);
    flash_delta_read_gates(gates, x, in.beta, s, b, h, c);
    flash_delta_keep_gates(&w->g, gates);
    for (int chunk = 0; chunk <= last; chunk++) {
        FlashDeltaHopperTiles<W>* t = &w->stage[chunk % 2];
        wide_tile_arrived();  // this chunk, and nobody uses the one before any more
        if (chunk < last) { load(next, chunk + 1); }
        flash_delta_read_gates(gates, x, in.beta, s, b, h, next);
        if (c.fresh) { tile_set_zero(S); }
        tile_to_operands(before, S);
        wgmma_fence();
        wide_tile_product_transposed(u, before, t->k);
        wgmma_commit();
        wide_tile_product_transposed(out, before, t->q);
        wgmma_commit();
        if (!c.fresh && states) {
            flash_delta_hopper_store_state_(states + delta_slot_(&s, b, c.t, h), S, s, x0);
        }
        flash_delta_hopper_fade_(S, g.eG[c.n - 1]);
        wgmma_wait<1>();
        wgmma_keep(u);
        flash_delta_hopper_right_side_(u, t->v, g.eG);
        flash_delta_hopper_operands_(deltas, u, g.beta);
        wgmma_keep(u);
        wgmma_fence();
        wide_tile_product_transposed(u, deltas, t->Y, 1);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_keep(out);
        flash_delta_hopper_scale_(out, g.eG);
        wgmma_wait<0>();
        wgmma_keep(u);
        flash_delta_hopper_scale_(u, g.beta);  // D
        tile_to_operands(deltas, u);
        wgmma_keep(out);
        wgmma_fence();
        wide_tile_product_transposed(out, deltas, t->P, 1);
        wgmma_commit();
        flash_delta_hopper_operands_(faded, u, g.fG);
        wgmma_keep(S);
        wgmma_fence();
        wide_tile_product<W>(S, faded, t->k, 1);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_keep(out);
        wide_tile_store_turned(o + delta_v_(&s, b, c.t, h) + x0, v_row, c.n, s.DV - x0, t->v, out);
        __syncthreads();  // the gates of this chunk have been read
        flash_delta_keep_gates(&w->g, gates);
        const FlashDeltaChunk after = find(min(chunk + 2, last));
        wgmma_wait<0>();
        wgmma_keep(S);
        c = next, next = after;
    }
    if (state) { flash_delta_hopper_store_state_(state + of_head, S, s, x0); }
}

// ---- backward along the row: grid (64 channels each, Hv, B) ----

template <int W>
__global__ void __launch_bounds__(FLASH_DELTA_THREADS, 2)
    flash_delta_backward_hopper_kernel(bf16* dv, float* dstate, const bf16* dout, FlashDelta x, DeltaInputsOf<bf16> in,
                                       DeltaShape s) {
    const int V = FLASH_DELTA_V, x0 = (int)blockIdx.x * V, h = (int)blockIdx.y, b = (int)blockIdx.z;
    const size_t v_row = (size_t)s.Hv * s.DV, of_head = ((size_t)b * s.Hv + h) * delta_state_floats_(&s);
    extern __shared__ __align__(1024) bf16 wide_tiles[];
    FlashDeltaHopper<W>* w = (FlashDeltaHopper<W>*)wide_tiles;
    const FlashDeltaGates& g = w->g;
    auto find = [&](int i) { return flash_delta_chunk(x.begins, s, b, i); };
    auto load = [&](FlashDeltaChunk c, int i) {
        flash_delta_hopper_load_<W>(&w->stage[i % 2], x, in, dout, s, b, h, x0, c);
    };
    auto keep_gates = [&](const float (&gates)[3]) {
        flash_delta_keep_gates(&w->g, gates);
        if (threadIdx.x < DELTA_CHUNK) { w->minus[threadIdx.x] = -gates[0] * gates[2]; }
    };
    const int last = x.begins[(size_t)b * (s.T + 1) + s.T] - 1;
    float dS[1][W / 8][4], dD[1][8][4], of_out[1][8][4], gates[3];
    unsigned behind[1][W / 16][4], out[1][4][4], deltas[1][4][4];
    flash_delta_hopper_load_state_(dS, dstate ? dstate + of_head : NULL, s, x0);
    FlashDeltaChunk c = find(last), next = find(max(last - 1, 0)), after = {s.T, 0, 0};
    load(c, last);
    flash_delta_read_gates(gates, x, in.beta, s, b, h, c);
    keep_gates(gates);
    for (int chunk = last; chunk >= 0; chunk--) {
        FlashDeltaHopperTiles<W>* t = &w->stage[chunk % 2];
        wide_tile_arrived();  // this chunk, and nobody uses the one behind any more
        if (chunk > 0) { load(next, chunk - 1); }
        flash_delta_hopper_values_(out, t->v);
        wgmma_fence();
        wide_tile_product<V>(of_out, out, t->P);
        wgmma_commit();
        tile_to_operands(behind, dS);
        wgmma_fence();
        wide_tile_product_transposed(dD, behind, t->k);
        wgmma_commit();
        float* kept = after.t == s.T ? x.dS_last + of_head : x.dS + delta_slot_(&s, b, after.t, h);
        if (!after.fresh) { flash_delta_hopper_store_state_(kept, dS, s, x0); }
        flash_delta_hopper_fade_(dS, g.eG[c.n - 1]);
        wgmma_wait<0>();
        wgmma_keep(of_out), wgmma_keep(dD);
        flash_delta_hopper_add_(dD, of_out, g.fG);  // dD = fG dD + of_out
        flash_delta_hopper_operands_(deltas, dD, g.beta);
        wgmma_keep(dD);
        wgmma_fence();
        wide_tile_product<V>(dD, deltas, t->Y, 1);
        wgmma_commit();
        flash_delta_hopper_values_(out, t->v);  // again: registers are short
        flash_delta_hopper_fade_values_(out, g.eG);
        wgmma_keep(dS);
        wgmma_fence();
        wide_tile_product<W>(dS, out, t->q, 1);
        wgmma_commit();
        const FlashDeltaChunk before = find(max(chunk - 2, 0));
        wgmma_wait<1>();
        wgmma_keep(dD);
        flash_delta_hopper_operands_(deltas, dD, w->minus);
        wgmma_fence();
        wide_tile_product<W>(dS, deltas, t->k, 1);
        wgmma_commit();
        flash_delta_read_gates(gates, x, in.beta, s, b, h, next);
        const size_t v = delta_v_(&s, b, c.t, h) + x0;
        wide_tile_store_turned(x.dD + v, v_row, c.n, s.DV - x0, t->v, dD);
        if (dv) {
            flash_delta_hopper_scale_(dD, g.beta);
            wide_tile_store_turned(dv + v, v_row, c.n, s.DV - x0, t->v, dD);
        }
        __syncthreads();  // the gates of this chunk have been read
        keep_gates(gates);
        wgmma_wait<0>();
        wgmma_keep(dS);
        if (c.fresh) { tile_set_zero(dS); }
        after = c, c = next, next = before;
    }
    if (dstate) { flash_delta_hopper_store_state_(dstate + of_head, dS, s, x0); }
}

// ---- launches ----

template <int W>
static inline void flash_delta_hopper_forward(bf16* o, float* states, float* state, const FlashDelta& x,
                                              DeltaInputsOf<bf16> in, const DeltaShape* s, const Device* dev) {
    const dim3 grid((unsigned)ceil_div(s->DV, FLASH_DELTA_V), (unsigned)s->Hv, (unsigned)s->B);
    const size_t shared = sizeof(FlashDeltaHopper<W>);
    cudaCheck(cudaFuncSetAttribute(flash_delta_forward_hopper_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)shared));
    flash_delta_forward_hopper_kernel<W><<<grid, FLASH_DELTA_THREADS, shared, dev->stream>>>(o, states, state, x, in,
                                                                                           *s);
    cudaCheck(cudaGetLastError());
}

template <int W>
static inline void flash_delta_hopper_backward(bf16* dv, float* dstate, const bf16* dout, const FlashDelta& x,
                                               DeltaInputsOf<bf16> in, const DeltaShape* s, const Device* dev) {
    const dim3 grid((unsigned)ceil_div(s->DV, FLASH_DELTA_V), (unsigned)s->Hv, (unsigned)s->B);
    const size_t shared = sizeof(FlashDeltaHopper<W>);
    cudaCheck(cudaFuncSetAttribute(flash_delta_backward_hopper_kernel<W>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)shared));
    flash_delta_backward_hopper_kernel<W><<<grid, FLASH_DELTA_THREADS, shared, dev->stream>>>(dv, dstate, dout, x, in,
                                                                                            *s);
    cudaCheck(cudaGetLastError());
}
#endif  // WGMMA
#endif  // LLMC_FLASH_DELTA_HOPPER_H
