/*
The staircase of the gated delta rule, heads of 128 by 128 as in Qwen3.6. Each step changes one thing; main checks every
step against delta_steps_forward_ref and delta_steps_backward_ref and, on a GPU, times it at B 2, T 4096, 32 value heads
on 16 key heads: 38.7 GFLOP by chunks, backward 101.

    step            what it changes                                                 KB a position   on an H200
    1 memory        a thread has a column of a head's S, in memory: each position reads it    199   not measured
                    twice and writes it once (delta_steps_kernel of gated_delta_kernels.h,
                    what generation and EXACT builds use)
    2 registers     the column stays in 128 registers until the row ends: S does not move.      5   not measured
                    But a sum is a chain of 128 madds, for 256 warps on 132 multiprocessors
    3 lanes         8 lanes share a column: chains of 16 madds and three shuffles. 8 times     33   not measured
                    as many warps read q and k, and 4096 positions still wait for one another
    4 chunks        64 positions at once: S changes 64 times a row, and all is products of    310   not measured
                    matrices but a triangle (delta_forward_kernel of gated_delta_kernels.h).
                    A thread for each output takes what each madd needs from memory or a
                    cache, so nothing is saved yet
    5 parts         three kernels: P, and Y, the triangle's inverse, of all chunks at once;    14   not measured
                    the scan, u and S+ alone; o of all chunks at once. A float that is read
                    serves 64 outputs. 64 chunks wait for one another, 4096 positions do not
    6 tensor cores  bf16: a warp multiplies 16 x 16 by 16 x 8 in one instruction. S stays in  5.3   not measured
                    registers as floats, and is multiplied as bf16
    7 one scan      o is made in the scan, where S and D are at hand: D is not written, S and 3.8   not measured
                    D are not read again. The scan's steps become longer
    8 two stages    the next chunk is copied while this one is computed. Lives in             3.8   not measured
                    llmc/ops/flash_delta.h

    backward
    1 chunks        step 4's: a block for each key head, 32 in all                                  not measured
    2 tensor cores  step 8's: a scan makes dS, dv and dD, from the last chunk on; u before it,      not measured
                    dq, dk, dg and dbeta after it, of all chunks at once. Lives in
                    llmc/ops/flash_delta.h

KB are counted, not measured: 1024 bytes that loads and stores ask caches or memory for, of a position and value head;
what lanes of a warp read together counts once, shared memory does not count. q, k, v and o are 0.75 KB of bf16, all of
them 0.2 GB. The limits on an H200: float 67 TFLOP/s, bf16 989 TFLOP/s (with wgmma; mma, which runs on older cards too,
reaches less), memory 4.8 TB/s. From 5 on a scan has 128 blocks, one on a multiprocessor, and 64 chunks in each wait for
one another: how near it comes to these limits, only a card can tell. In a build for sm_90a step 8 and the scan of
backward are the kernels by wgmma (llmc/ops/flash_delta_hopper.h).
    make build/nvcc-sm_90-bf16/cuda/gated_delta && build/nvcc-sm_90-bf16/cuda/gated_delta
    under dev/simt (build/simt-fast/cuda/gated_delta): only the checks
*/
#include "llmc/ops/gated_delta.h"  // delta_steps_forward, delta_chunks_forward, ..., the plain loops
#include "llmc/ops/gemm.h"         // gemm_terms_, gemm_load_, gemm_store_
#include "llmc/test/test.h"        // bf16_array, to_device_as, check_close, rounding_walk

enum { HEAD = 128 };  // channels of keys and of values
enum { C = DELTA_CHUNK, V = FLASH_DELTA_V };

// of step 5. Squares are C * C floats, a head's one after the other; gates (B, Hv, T); deltas (B, T, Hv, HEAD): D_i of
// gated_delta.h, and before it beta r
typedef struct {
    float *P, *Y, *eG, *fG, *deltas;
} Parts;

// one layer in both precisions; the floats are bf16 values, so that one answer is right for all steps. A row is a
// document
typedef struct {
    DeltaShape s;
    DeltaInputs in;
    DeltaInputsOf<bf16> in_bf16;
    float *state, *states, *states_mma, *dstate;  // states: of steps in float; states_mma: of those on tensor cores
    float *o, *dout;
    bf16 *o_bf16, *dout_bf16;
    DeltaGradients d;
    DeltaGradientsOf<bf16> d_bf16;
    Parts parts;
} Layer;

static size_t n_positions(const DeltaShape* s) { return (size_t)s->B * (size_t)s->T; }
static size_t n_keys(const DeltaShape* s) { return n_positions(s) * (size_t)s->Hk * HEAD; }
static size_t n_values(const DeltaShape* s) { return n_positions(s) * (size_t)s->Hv * HEAD; }
static size_t n_gates(const DeltaShape* s) { return n_positions(s) * (size_t)s->Hv; }
static size_t n_states(const DeltaShape* s) { return (size_t)s->B * (size_t)s->Hv * HEAD * HEAD; }
static size_t n_squares(const DeltaShape* s) { return (size_t)s->B * (size_t)s->Hv * delta_chunks_(s) * C * C; }

static unsigned n_heads(const DeltaShape* s) { return (unsigned)(s->B * s->Hv); }
static dim3 chunk_grid(const DeltaShape* s) { return dim3((unsigned)delta_chunks_(s), n_heads(s)); }

// ---- 1: one thread, one column, S in memory ----

static void memory(const Layer* l, const Device* dev) { delta_steps_forward(l->o, l->state, l->in, &l->s, dev); }

// ---- 2 and 3: LANES lanes have a column of S in registers, packs of 4 rows by turns. S~'k is exp(g) S'k, so S is read
//      for it as it is ----

// the sum of neighbouring LANES lanes
template <int LANES>
__device__ inline float column_sum(float x) {
    for (int step = 1; step < LANES; step *= 2) { x += __shfl_xor_sync(ALL_LANES, x, step); }
    return x;
}

// block is (WARP)
template <int LANES>
__global__ void columns_kernel(float* o, float* state, DeltaInputs in, DeltaShape s) {
    __shared__ alignas(16) float q[HEAD];
    __shared__ alignas(16) float k[HEAD];
    const int b = blockIdx.x / s.Hv, h = blockIdx.x % s.Hv, thread = threadIdx.x, lane = thread % LANES * 4;
    const int x = (int)(blockIdx.y * WARP) / LANES + thread / LANES;
    float S[HEAD / LANES], *of_head = state + (size_t)blockIdx.x * HEAD * HEAD + x;
    #pragma unroll
    for (int d = 0; d < HEAD / LANES; d++) { S[d] = of_head[(size_t)(d / 4 * 4 * LANES + lane + d % 4) * HEAD]; }
    for (int t = 0; t < s.T; t++) {
        const size_t at_k = delta_qk_(&s, b, t, h), at_v = delta_v_(&s, b, t, h) + x, at_g = delta_g_(&s, b, t, h);
        const float a = kernel_exp(in.g[at_g]);
        float found = 0.0f, sum = 0.0f;
        __syncwarp();
        pack_store(q + 4 * thread, pack_load<4>(in.q + at_k + 4 * thread));
        pack_store(k + 4 * thread, pack_load<4>(in.k + at_k + 4 * thread));
        __syncwarp();
        #pragma unroll
        for (int d = 0; d < HEAD / LANES; d += 4) {
            const Pack<float, 4> k_pack = pack_load<4>(k + d * LANES + lane);
            for (int i = 0; i < 4; i++) { found = madd(k_pack.x[i], S[d + i], found); }
        }
        const float delta = in.beta[at_g] * (in.v[at_v] - a * column_sum<LANES>(found));
        __syncwarp();  // for the compiler, which would keep k, too, in 128 registers
        #pragma unroll
        for (int d = 0; d < HEAD / LANES; d += 4) {
            const Pack<float, 4> k_pack = pack_load<4>(k + d * LANES + lane),
                                 q_pack = pack_load<4>(q + d * LANES + lane);
            for (int i = 0; i < 4; i++) {
                S[d + i] = madd(k_pack.x[i], delta, a * S[d + i]);
                sum = madd(S[d + i], q_pack.x[i], sum);
            }
        }
        sum = column_sum<LANES>(sum);
        if (lane == 0) { o[at_v] = sum; }
    }
    #pragma unroll
    for (int d = 0; d < HEAD / LANES; d++) { of_head[(size_t)(d / 4 * 4 * LANES + lane + d % 4) * HEAD] = S[d]; }
}

template <int LANES>
static void columns(const Layer* l, const Device* dev) {
    const dim3 grid(n_heads(&l->s), HEAD * LANES / WARP);
    columns_kernel<LANES><<<grid, WARP, 0, dev->stream>>>(l->o, l->state, l->in, l->s);
}

// ---- 4: chunks. In floats the op runs its plain kernel ----

static void chunks(const Layer* l, const Device* dev) {
    delta_chunks_forward(l->o, l->states, l->state, l->in, &l->s, dev);
}

// ---- 5: three kernels, with the tiles of gemm.h: a block multiplies 64 x 64 outputs, a thread 4 x 4 of them ----

typedef float Sums[GEMM_SUMS][GEMM_SUMS];
typedef float Tile[GEMM_TILE_K][GEMM_TILE_ROW];
struct Tiles {
    alignas(16) Tile a;
    alignas(16) Tile b;
};

// sums += a b, of which (M, K) and (K, N) exist
__device__ inline void add_product(Sums& sums, Tiles* tiles, MatrixOf<float> a, MatrixOf<float> b, int M, int N,
                                   int K) {
    auto load_a = [&](Tile& tile, int k, int n) {
        gemm_load_(tile, a.data + k * a.col_stride, a.row_stride, a.col_stride, M, n);
    };
    auto load_b = [&](Tile& tile, int k, int n) {
        gemm_load_(tile, b.data + k * b.row_stride, b.col_stride, b.row_stride, N, n);
    };
    gemm_terms_(sums, tiles->a, tiles->b, load_a, load_b, K);
}

// f(sum, its row, its column) of each sum of a thread
template <typename F>
__device__ inline void each(Sums& sums, F f) {
    #pragma unroll
    for (int i = 0; i < GEMM_SUMS * GEMM_SUMS; i++) {
        f(sums[i / GEMM_SUMS][i % GEMM_SUMS], gemm_first_row_() + i / GEMM_SUMS, gemm_first_column_() + i % GEMM_SUMS);
    }
}

// grid (chunks, B * Hv). The triangular system (1 + A beta) u = r has the solution u = r + Y (beta r): Y column by
// column, a thread each
__global__ void __launch_bounds__(GEMM_THREADS) scores_kernel(Parts parts, DeltaInputs in, DeltaShape s) {
    __shared__ Tiles tiles;
    __shared__ float A[C * C];
    __shared__ float bY[C * C];
    __shared__ float G[C];
    __shared__ float beta[C];
    const int b = blockIdx.y / s.Hv, h = blockIdx.y % s.Hv, t = blockIdx.x * C, n = min(C, s.T - t), j = threadIdx.x;
    const size_t at_g = delta_g_(&s, b, t, h), row = (size_t)s.Hk * HEAD;
    const size_t square = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * C * C;
    const float *q = in.q + delta_qk_(&s, b, t, h), *k = in.k + delta_qk_(&s, b, t, h);
    const MatrixOf<float> keys_down = {k, row, 1}, keys_across = {k, 1, row};
    if (j < WARP) { flash_delta_sum_gates_(G, in.g + at_g, s.Hv, n); }
    if (j < n) { beta[j] = in.beta[at_g + (size_t)j * s.Hv]; }
    Sums p = {}, a = {};
    add_product(p, &tiles, {q, row, 1}, keys_across, n, n, HEAD);
    add_product(a, &tiles, keys_down, keys_across, n, n, HEAD);
    each(p, [&](float x, int i, int m) {
        parts.P[square + i * C + m] = m <= i ? x * kernel_exp(G[i] - G[m]) : 0.0f;
    });
    each(a, [&](float x, int i, int m) { A[i * C + m] = m < i ? x * kernel_exp(G[i] - G[m]) : 0.0f; });
    __syncthreads();
    if (j >= C) { return; }
    for (int i = 0; i < n; i++) {
        float sum = -A[i * C + j];
        for (int m = 0; m < i; m++) { sum -= A[i * C + m] * bY[m * C + j]; }
        bY[i * C + j] = beta[i] * sum;
        parts.Y[square + i * C + j] = sum;
    }
    const size_t gate = flash_delta_at_gate(s, b, h, t) + j;
    if (j < n) { parts.eG[gate] = kernel_exp(G[j]), parts.fG[gate] = kernel_exp(G[n - 1] - G[j]); }
}

// grid (B * Hv, 64 channels of values each). A block goes from chunk to chunk with its part of S in registers, two
// tiles of 64 rows; what it multiplies with lies in memory, S too
__global__ void __launch_bounds__(GEMM_THREADS)
    scan_kernel(float* state, float* states, Parts parts, DeltaInputs in, DeltaShape s) {
    __shared__ Tiles tiles;
    const int b = blockIdx.x / s.Hv, h = blockIdx.x % s.Hv, x0 = blockIdx.y * V;
    const size_t k_row = (size_t)s.Hk * HEAD, v_row = (size_t)s.Hv * HEAD, n_chunks = delta_chunks_(&s);
    float* of_head = state + (size_t)blockIdx.x * HEAD * HEAD + x0;
    Sums S[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        each(S[half], [&](float& y, int d, int x) { y = of_head[(64 * half + d) * HEAD + x]; });
    }
    for (int t = 0; t < s.T; t += C) {
        const int n = min(C, s.T - t);
        const size_t at_v = delta_v_(&s, b, t, h) + x0, gate = flash_delta_at_gate(s, b, h, t);
        const float *k = in.k + delta_qk_(&s, b, t, h), *beta = in.beta + delta_g_(&s, b, t, h);
        const float *Y = parts.Y + (blockIdx.x * n_chunks + t / C) * C * C, *eG = parts.eG + gate,
                    *fG = parts.fG + gate;
        float *before = states + delta_slot_(&s, b, t, h) + x0, *deltas = parts.deltas + at_v;
        #pragma unroll
        for (int half = 0; half < 2; half++) { gemm_store_(before + 64 * half * HEAD, (size_t)HEAD, S[half], 64, V); }
        Sums u = {};
        add_product(u, &tiles, {k, k_row, 1}, {before, HEAD, 1}, n, V, HEAD);
        each(u, [&](float& y, int i, int x) {
            if (i >= n) { return; }
            y = in.v[at_v + i * v_row + x] - eG[i] * y;
            deltas[i * v_row + x] = beta[(size_t)i * s.Hv] * y;  // beta r
        });
        add_product(u, &tiles, {Y, C, 1}, {deltas, v_row, 1}, n, V, n);  // its last barrier: beta r has been read
        each(u, [&](float y, int i, int x) {
            if (i < n) { deltas[i * v_row + x] = beta[(size_t)i * s.Hv] * y; }
        });
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            auto load_keys = [&](Tile& tile, int i, int n_i) {  // those of positions i.., times what is left of them
                for (int at = threadIdx.x; at < GEMM_TILE_K * GEMM_TILE; at += GEMM_THREADS) {
                    const int r = at / GEMM_TILE, d = at % GEMM_TILE;
                    tile[r][d] = r < n_i ? k[(i + r) * k_row + 64 * half + d] * fG[i + r] : 0.0f;
                }
            };
            auto load_deltas = [&](Tile& tile, int i, int n_i) {
                gemm_load_(tile, deltas + i * v_row, 1, v_row, V, n_i);
            };
            each(S[half], [&](float& y, int, int) { y *= eG[n - 1]; });
            gemm_terms_(S[half], tiles.a, tiles.b, load_keys, load_deltas, n);
        }
    }
    #pragma unroll
    for (int half = 0; half < 2; half++) { gemm_store_(of_head + 64 * half * HEAD, (size_t)HEAD, S[half], 64, V); }
}

// grid (chunks, B * Hv, 64 channels of values each)
__global__ void __launch_bounds__(GEMM_THREADS)
    outputs_kernel(float* o, const float* states, Parts parts, DeltaInputs in, DeltaShape s) {
    __shared__ Tiles tiles;
    const int b = blockIdx.y / s.Hv, h = blockIdx.y % s.Hv, t = blockIdx.x * C, x0 = blockIdx.z * V,
              n = min(C, s.T - t);
    const size_t k_row = (size_t)s.Hk * HEAD, v_row = (size_t)s.Hv * HEAD, at_v = delta_v_(&s, b, t, h) + x0;
    const float *S = states + delta_slot_(&s, b, t, h) + x0, *eG = parts.eG + flash_delta_at_gate(s, b, h, t);
    const float* P = parts.P + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * C * C;
    Sums out = {};
    add_product(out, &tiles, {in.q + delta_qk_(&s, b, t, h), k_row, 1}, {S, HEAD, 1}, n, V, HEAD);
    each(out, [&](float& y, int i, int) { y *= i < n ? eG[i] : 0.0f; });
    add_product(out, &tiles, {P, C, 1}, {parts.deltas + at_v, v_row, 1}, n, V, n);
    gemm_store_(o + at_v, v_row, out, n, V);
}

static void in_parts(const Layer* l, const Device* dev) {
    const DeltaShape s = l->s;
    const dim3 scan_grid(n_heads(&s), HEAD / V), outputs_grid((unsigned)delta_chunks_(&s), n_heads(&s), HEAD / V);
    scores_kernel<<<chunk_grid(&s), GEMM_THREADS, 0, dev->stream>>>(l->parts, l->in, s);
    scan_kernel<<<scan_grid, GEMM_THREADS, 0, dev->stream>>>(l->state, l->states, l->parts, l->in, s);
    outputs_kernel<<<outputs_grid, GEMM_THREADS, 0, dev->stream>>>(l->o, l->states, l->parts, l->in, s);
}

// ---- 6 and 7: tensor cores, with the parts of flash_delta.h: 4 warps, of 16 positions and of 32 rows of S each. The
//      scores are its kernel's; here a block waits for its copies ----

struct ScanTiles {
    FlashDeltaTiles<HEAD> t;
    bf16 S[HEAD * V], r[C * V], deltas[C * V];
};

// grid (B * Hv, 64 channels of values each). OUTPUTS: o too, else D goes to x.u
template <int OUTPUTS>
__global__ void __launch_bounds__(FLASH_DELTA_THREADS)
    mma_scan_kernel(bf16* o, float* states, float* state, FlashDelta x, DeltaInputsOf<bf16> in, DeltaShape s) {
    const int b = blockIdx.x / s.Hv, h = blockIdx.x % s.Hv, x0 = blockIdx.y * V;
    const int row = threadIdx.x / WARP * 16, d0 = 2 * row, n_chunks = x.begins[(size_t)b * (s.T + 1) + s.T];
    const size_t k_row = (size_t)s.Hk * HEAD, v_row = (size_t)s.Hv * HEAD;
    extern __shared__ __align__(128) bf16 tiles[];
    ScanTiles* w = (ScanTiles*)tiles;
    __shared__ FlashDeltaGates g;
    float S[2][8][4], gates[3], *of_head = state + (size_t)blockIdx.x * HEAD * HEAD;
    const float ones[1][2] = {{1.0f, 1.0f}};
    flash_delta_load_state_(S, of_head, s, d0, x0);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        const FlashDeltaChunk c = flash_delta_chunk(x.begins, s, b, chunk);
        const size_t at_v = delta_v_(&s, b, c.t, h) + x0;
        __syncthreads();  // nobody uses the chunk before any more
        if (OUTPUTS) {
            flash_delta_load_<HEAD>(&w->t, x, in, in.v, s, b, h, x0, c);
        } else {
            const bf16* Y = x.Y + flash_delta_at_square(s, b, c.t, h);
            tile_load<C, HEAD, FLASH_DELTA_THREADS>(w->t.k, in.k + delta_qk_(&s, b, c.t, h), k_row, c.n, HEAD);
            tile_load<C, V, FLASH_DELTA_THREADS>(w->t.v, in.v + at_v, v_row, c.n, V);
            tile_load<C, C, FLASH_DELTA_THREADS>(w->t.Y, Y, (size_t)s.Hv * C, c.n, C);
            cp_async_commit();
        }
        flash_delta_read_gates(gates, x, in.beta, s, b, h, c);
        flash_delta_keep_gates(&g, gates);
        flash_delta_store_state_(states + delta_slot_(&s, b, c.t, h), S, s, d0, x0);
        flash_delta_state_tile_(w->S, S, d0);
        cp_async_wait<0>();
        __syncthreads();
        float u[1][8][4], out[1][8][4];
        tile_set_zero(u), tile_set_zero(out);
        tile_add_product_of<HEAD, V, HEAD / 16, 0>(u, w->t.k, row, w->S, 0);
        if (OUTPUTS) { tile_add_product_of<HEAD, V, HEAD / 16, 0>(out, w->t.q, row, w->S, 0); }
        flash_delta_right_side_(u, w->t.v, g, row);
        flash_delta_rows_(w->r, u, g.beta, row);
        __syncthreads();
        tile_add_product_of<C, V, C / 16, 0>(u, w->t.Y, row, w->r, 0);
        flash_delta_rows_(w->deltas, u, g.beta, row);
        __syncthreads();  // D is whole, and all have read r
        flash_delta_scale_(u, g.beta, row);
        if (OUTPUTS) {
            flash_delta_scale_(out, g.eG, row);
            tile_add_product_of<C, V, C / 16, 0>(out, w->t.P, row, w->deltas, 0);
            tile_store_rows<V>(o + at_v, v_row, c.n, V, w->t.v, row, out, ones);
        } else {
            tile_store_rows<V>(x.u + at_v, v_row, c.n, V, w->deltas, row, u, ones);
        }
        flash_delta_rows_(w->r, u, g.fG, row);  // exp(G_last - G) D in place of r
        __syncthreads();
        flash_delta_each_(S, 0, 0, [&](float& y, int, int) { y *= g.eG[c.n - 1]; });
        tile_add_product_of<HEAD, V, C / 16, 1>(S, w->t.k, d0, w->r, 0);
    }
    flash_delta_store_state_(of_head, S, s, d0, x0);
}

struct OutputTiles {
    bf16 q[C * HEAD], S[HEAD * V], P[C * C], deltas[C * V];
};

// grid (chunks, B * Hv, 64 channels of values each)
__global__ void __launch_bounds__(FLASH_DELTA_THREADS)
    mma_outputs_kernel(bf16* o, const float* states, FlashDelta x, DeltaInputsOf<bf16> in, DeltaShape s) {
    const int b = blockIdx.y / s.Hv, h = blockIdx.y % s.Hv, x0 = blockIdx.z * V;
    const int row = threadIdx.x / WARP * 16, d0 = 2 * row;
    extern __shared__ __align__(128) bf16 tiles[];
    OutputTiles* w = (OutputTiles*)tiles;
    __shared__ FlashDeltaGates g;
    const FlashDeltaChunk c = flash_delta_chunk(x.begins, s, b, blockIdx.x);
    const size_t at_v = delta_v_(&s, b, c.t, h) + x0, k_row = (size_t)s.Hk * HEAD, v_row = (size_t)s.Hv * HEAD;
    const bf16* P = x.P + flash_delta_at_square(s, b, c.t, h);
    const float ones[1][2] = {{1.0f, 1.0f}};
    float S[2][8][4], out[1][8][4], gates[3];
    tile_load<C, HEAD, FLASH_DELTA_THREADS>(w->q, in.q + delta_qk_(&s, b, c.t, h), k_row, c.n, HEAD);
    tile_load<C, C, FLASH_DELTA_THREADS>(w->P, P, (size_t)s.Hv * C, c.n, C);
    tile_load<C, V, FLASH_DELTA_THREADS>(w->deltas, x.u + at_v, v_row, c.n, V);
    cp_async_commit();
    flash_delta_load_state_(S, states + delta_slot_(&s, b, c.t, h), s, d0, x0);
    flash_delta_state_tile_(w->S, S, d0);
    flash_delta_read_gates(gates, x, in.beta, s, b, h, c);
    flash_delta_keep_gates(&g, gates);
    cp_async_wait<0>();
    __syncthreads();
    tile_set_zero(out);
    tile_add_product_of<HEAD, V, HEAD / 16, 0>(out, w->q, row, w->S, 0);
    flash_delta_scale_(out, g.eG, row);
    tile_add_product_of<C, V, C / 16, 0>(out, w->P, row, w->deltas, 0);
    tile_store_rows<V>(o + at_v, v_row, c.n, V, w->P, row, out, ones);
}

template <int OUTPUTS>
static FlashDelta mma_scan(const Layer* l, const Device* dev) {
    const FlashDelta x = flash_delta_begin_<HEAD>(l->in_bf16, &l->s, 1, dev);
    const dim3 grid(n_heads(&l->s), HEAD / V);
    cudaCheck(cudaFuncSetAttribute(mma_scan_kernel<OUTPUTS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)sizeof(ScanTiles)));
    mma_scan_kernel<OUTPUTS><<<grid, FLASH_DELTA_THREADS, sizeof(ScanTiles), dev->stream>>>(
        l->o_bf16, l->states_mma, l->state, x, l->in_bf16, l->s);
    return x;
}

static void tensor_cores(const Layer* l, const Device* dev) {
    const FlashDelta x = mma_scan<0>(l, dev);
    const dim3 grid((unsigned)delta_chunks_(&l->s), n_heads(&l->s), HEAD / V);
    cudaCheck(cudaFuncSetAttribute(mma_outputs_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (int)sizeof(OutputTiles)));
    mma_outputs_kernel<<<grid, FLASH_DELTA_THREADS, sizeof(OutputTiles), dev->stream>>>(l->o_bf16, l->states_mma, x,
                                                                                       l->in_bf16, l->s);
}

static void one_scan(const Layer* l, const Device* dev) { mma_scan<1>(l, dev); }

// ---- 8, and backward: what the trainer calls ----

static void need_tensor_cores(int done) {
    if (!done) { fail_run("gated_delta: expected a GPU with 144 KB of shared memory for a block (flash_delta.h)"); }
}

static void two_stages(const Layer* l, const Device* dev) {
    need_tensor_cores(flash_delta_forward(l->o_bf16, l->states_mma, l->state, l->in_bf16, &l->s, dev));
}

// after forward steps, of which 5 has left `states`, 8 states_mma
static void backward_chunks(const Layer* l, const Device* dev) {
    delta_chunks_backward(l->d, l->dstate, (const float*)l->dout, l->states, l->in, &l->s, dev);
}
static void backward_tensor_cores(const Layer* l, const Device* dev) {
    need_tensor_cores(flash_delta_backward(l->d_bf16, l->dstate, l->dout_bf16, l->states_mma, l->in_bf16, &l->s, dev));
}

// ---- check and time ----

typedef struct {
    const char* name;
    void (*run)(const Layer* l, const Device* dev);
    int is_bf16, is_backward;
} Step;

static const Step steps[] = {
    {"1 memory", memory, 0, 0},
    {"2 registers", columns<1>, 0, 0},
    {"3 lanes", columns<8>, 0, 0},
    {"4 chunks", chunks, 0, 0},
    {"5 parts", in_parts, 0, 0},
    {"6 tensor cores", tensor_cores, 1, 0},
    {"7 one scan", one_scan, 1, 0},
    {"8 two stages", two_stages, 1, 0},
    {"backward 1 chunks", backward_chunks, 0, 1},
    {"backward 2 tensor cores", backward_tensor_cores, 1, 1},
};
enum { N_STEPS = sizeof steps / sizeof *steps };

// on the host
typedef struct {
    float *q, *k, *v, *g, *beta, *dout, *state, *dstate;
} Problem;

// bf16 numbers in rows of about unit length, as l2norm leaves them
static float* unit_rows(size_t n, uint64_t seed) {
    float* x = random_array(n, 1.0f, seed);
    for (size_t i = 0; i < n; i += HEAD) {
        float sum = 0.0f;
        for (int d = 0; d < HEAD; d++) { sum += x[i + d] * x[i + d]; }
        for (int d = 0; d < HEAD; d++) { x[i + d] = (float)(bf16)(x[i + d] / sqrtf(sum)); }
    }
    return x;
}

static Problem problem(const DeltaShape* s) {
    Problem p = {unit_rows(n_keys(s), 1),
                 unit_rows(n_keys(s), 2),
                 bf16_array(n_values(s), 1.0f, 3),
                 random_array(n_gates(s), 0.15f, 4),
                 random_array(n_gates(s), 0.5f, 5),
                 bf16_array(n_values(s), 1.0f, 6),
                 random_array(n_states(s), 1.0f, 7),
                 random_array(n_states(s), 1.0f, 8)};
    for (size_t i = 0; i < n_gates(s); i++) { p.g[i] -= 0.15f, p.beta[i] += 0.5f; }
    return p;
}

static void problem_free(Problem* p) {
    float* all[] = {p->q, p->k, p->v, p->g, p->beta, p->dout, p->state, p->dstate};
    for (float* x : all) { free(x); }
}

template <typename X>
static X* of_device(size_t n) { return (X*)device_alloc(sizeof(X) * n, "array"); }

static Layer layer(const Problem* p, DeltaShape s, const Device* dev) {
    const size_t keys = n_keys(&s), values = n_values(&s), gates = n_gates(&s), squares = n_squares(&s);
    Layer l = {};
    l.s = s;
    float *g = to_device(p->g, gates, dev), *beta = to_device(p->beta, gates, dev);
    float *dg = of_device<float>(gates), *dbeta = of_device<float>(gates);
    l.in = {to_device(p->q, keys, dev), to_device(p->k, keys, dev), to_device(p->v, values, dev), g, beta};
    l.in_bf16 = {to_device_as<bf16>(p->q, keys, dev), to_device_as<bf16>(p->k, keys, dev),
                 to_device_as<bf16>(p->v, values, dev), g, beta};
    l.d = {of_device<float>(keys), of_device<float>(keys), of_device<float>(values), dg, dbeta};
    l.d_bf16 = {of_device<bf16>(keys), of_device<bf16>(keys), of_device<bf16>(values), dg, dbeta};
    l.dout = to_device(p->dout, values, dev), l.dout_bf16 = to_device_as<bf16>(p->dout, values, dev);
    l.o = of_device<float>(values), l.o_bf16 = of_device<bf16>(values);
    l.state = to_device(p->state, n_states(&s), dev), l.dstate = to_device(p->dstate, n_states(&s), dev);
    l.states = of_device<float>(delta_states_floats(&s)), l.states_mma = of_device<float>(delta_states_floats(&s));
    l.parts = {of_device<float>(squares), of_device<float>(squares), of_device<float>(gates), of_device<float>(gates),
               of_device<float>(values)};
    return l;
}

static void layer_free(Layer* l) {
    const void* all[] = {l->in.q,         l->in.k,         l->in.v,       l->in.g,       l->in.beta,     l->in_bf16.q,
                         l->in_bf16.k,    l->in_bf16.v,    l->state,      l->states,     l->states_mma,  l->dstate,
                         l->o,            l->dout,         l->o_bf16,     l->dout_bf16,  l->d.dq,        l->d.dk,
                         l->d.dv,         l->d.dg,         l->d.dbeta,    l->d_bf16.dq,  l->d_bf16.dk,   l->d_bf16.dv,
                         l->parts.P,      l->parts.Y,      l->parts.eG,   l->parts.fG,   l->parts.deltas};
    for (const void* x : all) { device_drop((void*)x); }
}

// an answer of a step: floats, or bf16 where they are not NULL. It is spoiled for the next step
static void check_answer(Test* t, const Step* step, const char* what, float* x, bf16* x_bf16, const float* want,
                         size_t n, const Device* dev) {
    float* got = filled_array(n, NAN);
    bf16* stored = (bf16*)new_array(n, sizeof(bf16));
    double *want_double = double_array(want, n), largest = 0.0;
    char title[96];
    if (x_bf16) { device_download(stored, x_bf16, sizeof(bf16) * n, dev); }
    else { device_download(got, x, sizeof(float) * n, dev); }
    for (size_t i = 0; i < n; i++) {
        if (x_bf16) { got[i] = (float)stored[i]; }
        largest = fmax(largest, fabs(want_double[i]));
    }
    // Floats: chains of 2 (HEAD + C) products, and as states fade by exp(-0.15), some 7 positions add theirs. bf16: an
    // operand is off by 2^-9 of itself, five lie on the way, sums have larger terms (test_gated_delta.c)
    const double size = 0.125 + largest,
                 allowed = step->is_bf16 ? 0x1p-6 * size : rounding_walk(14 * (HEAD + C), size);
    snprintf(title, sizeof title, "%s: %s", step->name, what);
    check_close(t, title, got, want_double, n, allowed);
    if (x_bf16) { device_zero(x_bf16, sizeof(bf16) * n, dev); }
    else { device_zero(x, sizeof(float) * n, dev); }
    free(got), free(stored), free(want_double);
}

// every step against the plain loops
static void check_steps(Test* t, int B, int T, int Hk, int Hv, const Device* dev) {
    const DeltaShape s = {B, T, Hk, Hv, HEAD, HEAD, NULL};
    Problem p = problem(&s);
    const DeltaInputs in = {p.q, p.k, p.v, p.g, p.beta};
    float *o = filled_array(n_values(&s), NAN), *state = copied_array(p.state, n_states(&s)),
          *dstate = copied_array(p.dstate, n_states(&s));
    const DeltaGradients d = {filled_array(n_keys(&s), NAN), filled_array(n_keys(&s), NAN),
                              filled_array(n_values(&s), NAN), filled_array(n_gates(&s), NAN),
                              filled_array(n_gates(&s), NAN)};
    delta_steps_forward_ref(o, state, in, &s);
    delta_steps_backward_ref(d, dstate, p.dout, p.state, in, &s);
    Layer l = layer(&p, s, dev);
    for (const Step& step : steps) {
        device_upload(l.state, p.state, sizeof(float) * n_states(&s), dev);
        device_upload(l.dstate, p.dstate, sizeof(float) * n_states(&s), dev);
        step.run(&l, dev);
        cudaCheck(cudaGetLastError());
        const DeltaGradientsOf<bf16> stored = step.is_bf16 ? l.d_bf16 : DeltaGradientsOf<bf16>{};
        if (!step.is_backward) {
            check_answer(t, &step, "o", l.o, step.is_bf16 ? l.o_bf16 : NULL, o, n_values(&s), dev);
            check_answer(t, &step, "state", l.state, NULL, state, n_states(&s), dev);
            continue;
        }
        check_answer(t, &step, "dq", l.d.dq, stored.dq, d.dq, n_keys(&s), dev);
        check_answer(t, &step, "dk", l.d.dk, stored.dk, d.dk, n_keys(&s), dev);
        check_answer(t, &step, "dv", l.d.dv, stored.dv, d.dv, n_values(&s), dev);
        check_answer(t, &step, "dg", l.d.dg, NULL, d.dg, n_gates(&s), dev);
        check_answer(t, &step, "dbeta", l.d.dbeta, NULL, d.dbeta, n_gates(&s), dev);
        check_answer(t, &step, "dstate", l.dstate, NULL, dstate, n_states(&s), dev);
    }
    layer_free(&l);
    problem_free(&p);
    free(o), free(state), free(dstate), free(d.dq), free(d.dk), free(d.dv), free(d.dg), free(d.dbeta);
}

#ifndef SIMT
static void time_steps(int B, int T, int Hk, int Hv, const Device* dev) {
    const DeltaShape s = {B, T, Hk, Hv, HEAD, HEAD, NULL};
    const double forward = (double)n_gates(&s) * (6.0 * HEAD * HEAD + C * 6.0 * HEAD),  // as gated_delta.h counts
        backward = (double)n_gates(&s) * (16.0 * HEAD * HEAD + C * 15.0 * HEAD);
    Problem p = problem(&s);
    Layer l = layer(&p, s, dev);
    for (const Step& step : steps) {
        const double ms = device_milliseconds(5, dev, [&]() { step.run(&l, dev); });
        printf("%-24s %8.3f ms %7.1f TFLOP/s\n", step.name, ms, 1e-9 * (step.is_backward ? backward : forward) / ms);
    }
    layer_free(&l);
    problem_free(&p);
}
#endif

int main(void) {
    Test t = {0, NULL};
    Device dev;
    device_choose(0);
    device_init(&dev, 0);
    check_steps(&t, 1, 1, 1, 1, &dev);
    check_steps(&t, 2, 65, 1, 2, &dev);
    check_steps(&t, 1, 200, 2, 2, &dev);
    printf("%d steps, %d wrong\n", N_STEPS, t.n_failures);
#ifndef SIMT
    if (!t.n_failures) { time_steps(2, 4096, 16, 32, &dev); }
#endif
    device_free(&dev);
    return t.n_failures > 0;
}
