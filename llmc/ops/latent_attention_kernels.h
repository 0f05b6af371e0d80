/*
CUDA kernels of latent_attention.h, on CUDA cores; bf16 goes to tensor cores where it can (flash_latent.h). A block has
LATENT_TILE neighbouring positions of one head and goes over all keys that any of them sees, LATENT_CHUNK at a time:
neighbours choose much the same, so what is loaded is shared by many. Which keys these are is found once for all heads
(latent_inputs.h). Scores are not kept: each pass makes them anew, so that no scratch grows with what is seen.
    forward    EXACT: a pass for max, one for the total, one for out. Otherwise one, online (flash_attention.h)
    mass       a block has a tile of positions and goes from head to head with each chunk
    backward   positions: a pass for D, one for dq. Then keys, the other way round: a block has a tile of keys and goes
               over the positions that see any of them, for dk and dv. No atomics on floats
    dk_rope    what each head has of it is kept, and added last
Cost:   of each head, position and key of its tile forward 2 (dn + dr + dv) flops (EXACT: twice the scores more),
        backward four times that and 2 (dn + dr), mass 2 (dn + dr). Beside the tensors and what lists take, backward has
        4 (1 + dr) bytes for each head and position. A thread has two rows and four columns of a product, and takes four
        channels of six rows at a time from shared memory: 32 multiply-adds for six loads of 16 bytes. By ptxas of CUDA
        13.0 for sm_90, without spills:
                         registers, bf16     shared memory
            forward            80            24 KiB and 128 bytes for each channel of values
            mass              114            15 KiB
            positions         114            24 KiB (EXACT 33) and 128 bytes for each channel of keys
            keys               96            33 KiB and 128 bytes for each channel of keys and of values
        Not measured on a GPU.
Order:  EXACT builds have the chains of the plain loops. Otherwise totals and D are sums along trees over a tile's
        threads, a key that a position does not see has a weight of 0 there, and everything else is the same chain. An
        Inf or NaN then reaches the positions of tiles that see it, and no others.
*/
#ifndef LLMC_LATENT_ATTENTION_KERNELS_H
#define LLMC_LATENT_ATTENTION_KERNELS_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // to_float, from_float, kernel_exp, pack_load, load_floats
#include "flash_latent.h"    // flash_latent_forward, flash_latent_backward, flash_latent_mass: bf16
#include "latent_inputs.h"   // LatentInputsOf, LatentSight, latent_see, latent_next, latent_find

enum {
    LATENT_TILE = WARP,    // rows of a block: positions, or keys whose gradients it sums...
    LATENT_CHUNK = 64,     // ...with so many of what they see at a time...
    LATENT_THREADS = 256,  // ...by so many threads, each of which has two rows and every 16th column of a product
    LATENT_DEPTH = 32,     // channels that are in shared memory at a time
    LATENT_ROW = LATENT_DEPTH + 4,  // floats of a row there: eight of these rows meet in no bank
    LATENT_LANES = 16,     // threads that share two rows
    LATENT_OF = 4          // columns of a thread
};

// what a block shares: channels of its rows and of a chunk of items, and which items these are
struct LatentTile {
    float x[LATENT_TILE][LATENT_ROW], y[LATENT_CHUNK][LATENT_ROW];
    LatentChunk<1, LATENT_CHUNK> chunk;
};
typedef LatentSeen<1> LatentSeen_;

// the items from place k0 on
__device__ inline void latent_find_(LatentTile& tile, const LatentSight& see, const LatentSeen_& seen, int k0) {
    __syncthreads();  // the chunk before has been used
    latent_find<LATENT_THREADS>(tile.chunk, see, seen, k0);
    __syncthreads();
}

// ---- products of the rows of a tile with a chunk of what they see ----

// of this thread: rows latent_row_ and the next, columns latent_column_, and every 16th from there on
__device__ inline int latent_row_() { return threadIdx.x / LATENT_LANES * 2; }
__device__ inline int latent_column_() { return threadIdx.x % LATENT_LANES; }

// sums = x times y, chains over channels; rows of x from `first` on, n_rows of which exist
template <typename X>
__device__ inline void latent_dots_(float (&sums)[2][LATENT_OF], LatentTile& tile, int first, int n_rows,
                                    const LatentRowsOf<X>& x, const LatentRowsOf<X>& y) {
    const int ROWS = LATENT_THREADS / LATENT_DEPTH;
    const int lane = threadIdx.x % LATENT_DEPTH, row = threadIdx.x / LATENT_DEPTH;
    for (int i = 0; i < 2 * LATENT_OF; i++) { sums[i / LATENT_OF][i % LATENT_OF] = 0.0f; }
    for (int c0 = 0; c0 < x.n; c0 += LATENT_DEPTH) {
        const int c = c0 + lane, exists = c < x.n;
        const X *from_x = x.channel(exists ? c : 0), *from_y = y.channel(exists ? c : 0);
        const unsigned stride_x = x.stride(exists ? c : 0), stride_y = y.stride(exists ? c : 0);
        __syncthreads();  // the channels before have been used
        #pragma unroll
        for (int i = row; i < LATENT_TILE; i += ROWS) {  // behind the last channel -0 * 0, which changes no bit
            const size_t at = latent_offset(first + min(i, n_rows - 1), stride_x);
            tile.x[i][lane] = exists ? to_float(from_x[at]) : -0.0f;
        }
        #pragma unroll
        for (int i = row; i < LATENT_CHUNK; i += ROWS) {
            tile.y[i][lane] = exists ? to_float(from_y[latent_offset(tile.chunk.item[i], stride_y)]) : 0.0f;
        }
        __syncthreads();
        #pragma unroll 4
        for (int k = 0; k < LATENT_DEPTH; k += 4) {
            Pack<float, 4> a[2], b[LATENT_OF];
            for (int i = 0; i < 2; i++) { a[i] = pack_load<4>(&tile.x[latent_row_() + i][k]); }
            for (int j = 0; j < LATENT_OF; j++) {
                b[j] = pack_load<4>(&tile.y[latent_column_() + j * LATENT_LANES][k]);
            }
            for (int i = 0; i < 2; i++) {
                for (int j = 0; j < LATENT_OF; j++) {
                    for (int l = 0; l < 4; l++) { sums[i][j] = madd(a[i].x[l], b[j].x[l], sums[i][j]); }
                }
            }
        }
    }
}

// ... weights of what is not seen change no sum
__device__ inline float latent_madd_(float weight, float y, float sum, unsigned sees) {
#ifdef EXACT
    return sees & 1 ? madd(weight, y, sum) : sum;
#else
    (void)sees;
    return madd(weight, y, sum);
#endif
}

// weights of a chunk: of each item those of the rows
typedef float LatentWeights[LATENT_CHUNK][LATENT_TILE + 4];

__device__ inline void latent_put_(LatentWeights& weights, const float (&x)[2][LATENT_OF]) {
    for (int j = 0; j < LATENT_OF; j++) {
        float* to = &weights[latent_column_() + j * LATENT_LANES][latent_row_()];
        to[0] = x[0][j], to[1] = x[1][j];
    }
}

__device__ inline int latent_sees_(const LatentTile& tile, int i, int j) {
    return latent_sees(tile.chunk, latent_row_() + i, latent_column_() + j * LATENT_LANES);
}

// sums (LATENT_TILE, y.n) of which each row shrinks first, += weights of the n items times y. Neighbouring threads have
// neighbouring channels
template <typename X>
__device__ inline void latent_gather_(float* sums, const LatentWeights& weights, const LatentTile& tile,
                                      const LatentRowsOf<X>& y, int n, const float* shrink) {
    const int COLUMNS = 64, ROWS = LATENT_TILE / (LATENT_THREADS / COLUMNS), row = threadIdx.x / COLUMNS * ROWS;
    for (int c = threadIdx.x % COLUMNS; c < y.n; c += COLUMNS) {
        const X* from = y.channel(c);
        const unsigned stride = y.stride(c);
        float sum[ROWS];
        for (int i = 0; i < ROWS; i++) { sum[i] = sums[(row + i) * y.n + c] * (shrink ? shrink[row + i] : 1.0f); }
        #pragma unroll 4
        for (int k = 0; k < n; k++) {
            const float one = to_float(from[latent_offset(tile.chunk.item[k], stride)]);
            const Pack<float, ROWS> w = load_floats<ROWS>(&weights[k][row]);
            const unsigned by = tile.chunk.seen_by[0][k] >> row;
            for (int i = 0; i < ROWS; i++) { sum[i] = latent_madd_(w.x[i], one, sum[i], by >> i); }
        }
        for (int i = 0; i < ROWS; i++) { sums[(row + i) * y.n + c] = sum[i]; }
    }
}

// the largest, or the sum, of what the threads of a row have
__device__ inline float latent_row_max_(float x) {
    for (int step = LATENT_LANES / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, x, step);
        x = other > x ? other : x;
    }
    return x;
}
__device__ inline float latent_row_sum_(float x) {
    for (int step = LATENT_LANES / 2; step > 0; step /= 2) { x += __shfl_xor_sync(ALL_LANES, x, step); }
    return x;
}

// ---- forward ----

// of the rows of a tile, as far as they are known; in the last pass of EXACT total is inv
struct LatentStatistics_ {
    float top[LATENT_TILE], total[LATENT_TILE], shrink[LATENT_TILE];
};

#ifdef EXACT
enum { LATENT_PASSES = 3 };  // max, total, out

// scores become weights of a pass, and what it finds goes on with the n items of a chunk
__device__ inline void latent_softmax_(LatentWeights& weights, LatentStatistics_& of, const LatentTile& tile,
                                       float (&x)[2][LATENT_OF], int n, int pass) {
    for (int i = 0; i < 2 && pass > 0; i++) {
        for (int j = 0; j < LATENT_OF; j++) {
            const int row = latent_row_() + i;
            x[i][j] = fm_exp(x[i][j] - of.top[row]) * (pass == 2 ? of.total[row] : 1.0f);
        }
    }
    latent_put_(weights, x);
    __syncthreads();
    if (pass == 2 || threadIdx.x >= LATENT_TILE) { return; }
    float top = of.top[threadIdx.x], total = of.total[threadIdx.x];
    for (int k = 0; k < n; k++) {
        const float one = weights[k][threadIdx.x];
        if (!(tile.chunk.seen_by[0][k] >> threadIdx.x & 1)) { continue; }
        if (pass == 0) { top = one > top ? one : top; } else { total += one; }
    }
    of.top[threadIdx.x] = top, of.total[threadIdx.x] = total;
}
#else
enum { LATENT_PASSES = 1 };

__device__ inline void latent_softmax_(LatentWeights& weights, LatentStatistics_& of, const LatentTile& tile,
                                       float (&x)[2][LATENT_OF], int, int) {
    for (int i = 0; i < 2; i++) {
        const int row = latent_row_() + i;
        const float before = of.top[row];
        float top = before, sum = 0.0f;
        for (int j = 0; j < LATENT_OF; j++) {
            x[i][j] = latent_sees_(tile, i, j) ? x[i][j] : -INFINITY;
            top = x[i][j] > top ? x[i][j] : top;
        }
        top = latent_row_max_(top);
        for (int j = 0; j < LATENT_OF; j++) {
            x[i][j] = kernel_exp(x[i][j] - top);
            sum += x[i][j];
        }
        sum = latent_row_sum_(sum);
        const float shrink = kernel_exp(before - top);
        if (latent_column_() == 0) {
            of.total[row] = of.total[row] * shrink + sum, of.top[row] = top, of.shrink[row] = shrink;
        }
    }
    latent_put_(weights, x);
    __syncthreads();
}
#endif

// block is (LATENT_THREADS), grid (tiles of positions, heads); LATENT_TILE * dv floats of shared memory
template <typename X>
__global__ void __launch_bounds__(LATENT_THREADS, 3)
latent_forward_kernel(X* out, float* max, float* inv, LatentInputsOf<X> in, LatentSight see) {
    extern __shared__ float sums[];
    __shared__ alignas(16) LatentTile tile;
    __shared__ alignas(16) LatentWeights weights;
    __shared__ LatentStatistics_ of;
    const int t = threadIdx.x, h = blockIdx.y, dv = in.s.dv;
    const LatentSeen_ seen = latent_see<1>(see, gridDim.x - 1 - blockIdx.x);  // what sees most comes first
    const int n_rows = seen.n_rows(see);
    if (t < LATENT_TILE) { of.top[t] = -10000.0f, of.total[t] = 0.0f; }
    for (int i = t; i < LATENT_TILE * dv; i += LATENT_THREADS) { sums[i] = 0.0f; }
    for (int pass = 0; pass < LATENT_PASSES; pass++) {
        for (int k0 = latent_next(see, seen, 0); k0 < seen.end; k0 = latent_next(see, seen, k0 + LATENT_CHUNK)) {
            const int n = min(LATENT_CHUNK, seen.end - k0);
            float x[2][LATENT_OF];
            latent_find_(tile, see, seen, k0);
            latent_dots_(x, tile, seen.row, n_rows, in.queries(h), in.keys(h));
            for (int i = 0; i < 2 * LATENT_OF; i++) { x[i / LATENT_OF][i % LATENT_OF] *= in.s.scale; }
            latent_softmax_(weights, of, tile, x, n, pass);
            if (pass < LATENT_PASSES - 1) { continue; }
            latent_gather_(sums, weights, tile, in.values(h), n, LATENT_PASSES == 1 ? of.shrink : NULL);
        }
        __syncthreads();
        if (t < n_rows && pass == (LATENT_PASSES == 1 ? 0 : 1)) {  // from here on total is inv
            const size_t row = (size_t)(seen.row + t) * in.s.H + h;
            of.total[t] = of.total[t] == 0.0f ? 0.0f : 1.0f / of.total[t];
            max[row] = of.top[t], inv[row] = of.total[t];
        }
        __syncthreads();
    }
    for (int i = t; i < n_rows * dv; i += LATENT_THREADS) {
        const size_t at = ((size_t)(seen.row + i / dv) * in.s.H + h) * dv + i % dv;
        out[at] = from_float<X>(LATENT_PASSES == 1 ? sums[i] * of.total[i / dv] : sums[i]);
    }
}

// ---- mass ----

// block is (LATENT_THREADS), grid (tiles of positions, LATENT_STEPS): a block has every LATENT_STEPS-th chunk
enum { LATENT_STEPS = 8 };
template <typename X>
__global__ void __launch_bounds__(LATENT_THREADS, 2)
latent_mass_kernel(float* mass, LatentInputsOf<X> in, LatentSight see, int goes_on) {
    __shared__ alignas(16) LatentTile tile;
    const LatentSeen_ seen = latent_see<1>(see, gridDim.x - 1 - blockIdx.x);
    const int n_rows = seen.n_rows(see);
    const int H = in.s.H;
    float* kept = tile.y[0];  // (LATENT_TILE, LATENT_CHUNK), before and after the products of a chunk
    static_assert(sizeof tile.y >= sizeof(float) * LATENT_TILE * LATENT_CHUNK, "what is kept fits into the tile");
    auto each_mine = [&](auto&& use) {
        #pragma unroll
        for (int i = 0; i < 2 * LATENT_OF; i++) {
            const int row = latent_row_() + i / LATENT_OF, k = latent_column_() + i % LATENT_OF * LATENT_LANES;
            use(i / LATENT_OF, i % LATENT_OF, kept[row * LATENT_CHUNK + k]);
        }
    };
    if (blockIdx.y == 0) { latent_clear_ends<LATENT_THREADS>(mass, see, seen); }
    for (int k0 = blockIdx.y * LATENT_CHUNK; k0 < seen.end; k0 += LATENT_STEPS * LATENT_CHUNK) {
        float total[2][LATENT_OF] = {};
        latent_find_(tile, see, seen, k0);
        if (goes_on) {
            latent_each_seen<LATENT_THREADS>(see, seen, tile.chunk, [&](size_t place, int row, int k) {
                kept[row * LATENT_CHUNK + k] = mass[place];
            });
            __syncthreads();
            each_mine([&](int i, int j, float& x) { total[i][j] = x; });  // of what is not seen, anything
            __syncthreads();
        }
        for (int h = 0; h < H; h++) {
            float x[2][LATENT_OF];
            latent_dots_(x, tile, seen.row, n_rows, in.queries(h), in.keys(h));
            for (int i = 0; i < 2; i++) {
                const size_t row = (size_t)(seen.row + min(latent_row_() + i, n_rows - 1)) * H + h;
                const float top = in.max[row], factor = in.inv[row];
                for (int j = 0; j < LATENT_OF; j++) {
                    total[i][j] += kernel_exp(x[i][j] * in.s.scale - top) * factor;
                }
            }
        }
        __syncthreads();  // the last head's channels have been read
        each_mine([&](int i, int j, float& x) { x = total[i][j]; });
        __syncthreads();
        latent_each_seen<LATENT_THREADS>(see, seen, tile.chunk, [&](size_t place, int row, int k) {
            mass[place] = kept[row * LATENT_CHUNK + k];
        });
    }
}

// ---- backward ----

// D (LATENT_TILE) goes on with the n items of a chunk
__device__ inline void latent_add_D_(float* D, LatentWeights& att, LatentWeights& datt, const LatentTile& tile,
                                     const float (&x)[2][LATENT_OF], const float (&y)[2][LATENT_OF], int n) {
#ifdef EXACT
    latent_put_(att, x);
    latent_put_(datt, y);
    __syncthreads();
    if (threadIdx.x >= LATENT_TILE) { return; }
    float sum = D[threadIdx.x];
    for (int k = 0; k < n; k++) {
        sum = latent_madd_(att[k][threadIdx.x], datt[k][threadIdx.x], sum, tile.chunk.seen_by[0][k] >> threadIdx.x);
    }
    D[threadIdx.x] = sum;
#else
    (void)att, (void)datt, (void)tile, (void)n;
    for (int i = 0; i < 2; i++) {
        float sum = 0.0f;
        for (int j = 0; j < LATENT_OF; j++) { sum = madd(x[i][j], y[i][j], sum); }
        sum = latent_row_sum_(sum);
        if (latent_column_() == 0) { D[latent_row_() + i] += sum; }
    }
#endif
}

// block is (LATENT_THREADS), grid (tiles of positions, heads); LATENT_TILE * (dn + dr) floats of shared memory
template <typename X>
__global__ void __launch_bounds__(LATENT_THREADS, 2)
latent_positions_kernel(X* dq, float* D, LatentInputsOf<X> in, LatentSight see) {
    extern __shared__ float sums[];
    __shared__ alignas(16) LatentTile tile;
    __shared__ alignas(16) LatentWeights att, ds;
    __shared__ float D_of[LATENT_TILE];
    const int t = threadIdx.x, h = blockIdx.y, Q = in.s.dn + in.s.dr;
    const LatentSeen_ seen = latent_see<1>(see, gridDim.x - 1 - blockIdx.x);
    const int n_rows = seen.n_rows(see);
    float top[2], factor[2];
    for (int i = 0; i < 2; i++) {
        const size_t row = (size_t)(seen.row + min(latent_row_() + i, n_rows - 1)) * in.s.H + h;
        top[i] = in.max[row], factor[i] = in.inv[row];
    }
    if (t < LATENT_TILE) { D_of[t] = 0.0f; }
    for (int i = t; i < LATENT_TILE * Q; i += LATENT_THREADS) { sums[i] = 0.0f; }
    for (int pass = 0; pass < 2; pass++) {  // D, then what needs it
        for (int k0 = latent_next(see, seen, 0); k0 < seen.end; k0 = latent_next(see, seen, k0 + LATENT_CHUNK)) {
            const int n = min(LATENT_CHUNK, seen.end - k0);
            float x[2][LATENT_OF], y[2][LATENT_OF];
            latent_find_(tile, see, seen, k0);
            latent_dots_(x, tile, seen.row, n_rows, in.queries(h), in.keys(h));
            latent_dots_(y, tile, seen.row, n_rows, in.gradients(h), in.values(h));
            for (int i = 0; i < 2; i++) {
                for (int j = 0; j < LATENT_OF; j++) {
                    const float weight = kernel_exp(x[i][j] * in.s.scale - top[i]) * factor[i];
                    x[i][j] = latent_sees_(tile, i, j) ? weight : 0.0f;
                }
            }
            if (pass == 0) {
                latent_add_D_(D_of, att, ds, tile, x, y, n);
                continue;
            }
            for (int i = 0; i < 2; i++) {
                for (int j = 0; j < LATENT_OF; j++) {
                    y[i][j] = x[i][j] * (y[i][j] - D_of[latent_row_() + i]) * in.s.scale;
                }
            }
            latent_put_(ds, y);
            __syncthreads();
            latent_gather_(sums, ds, tile, in.keys(h), n, NULL);
        }
        __syncthreads();
    }
    if (t < n_rows) { D[(size_t)(seen.row + t) * in.s.H + h] = D_of[t]; }
    for (int i = t; i < n_rows * Q; i += LATENT_THREADS) {
        dq[((size_t)(seen.row + i / Q) * in.s.H + h) * Q + i % Q] = from_float<X>(sums[i]);
    }
}

// of_k_rope (H, n_keys, dr), n_keys the rows of `see`. block is (LATENT_THREADS), grid (tiles of keys, heads);
// LATENT_TILE * (dn + dr + dv) floats of shared memory
template <typename X>
__global__ void __launch_bounds__(LATENT_THREADS, 2)
latent_keys_kernel(X* dkv, float* of_k_rope, LatentInputsOf<X> in, LatentSight see) {
    extern __shared__ float sums[];
    __shared__ alignas(16) LatentTile tile;
    __shared__ alignas(16) LatentWeights att, ds;
    const int t = threadIdx.x, h = blockIdx.y, dn = in.s.dn, dr = in.s.dr, dv = in.s.dv, Q = dn + dr, KV = dn + dv;
    const LatentSeen_ seen = latent_see<1>(see, blockIdx.x);  // the first keys are seen by most
    const int n_rows = seen.n_rows(see);
    float* of_values = sums + LATENT_TILE * Q;
    for (int i = t; i < LATENT_TILE * (Q + dv); i += LATENT_THREADS) { sums[i] = 0.0f; }
    for (int k0 = latent_next(see, seen, 0); k0 < seen.end; k0 = latent_next(see, seen, k0 + LATENT_CHUNK)) {
        const int n = min(LATENT_CHUNK, seen.end - k0);
        float x[2][LATENT_OF], y[2][LATENT_OF];
        latent_find_(tile, see, seen, k0);
        latent_dots_(x, tile, seen.row, n_rows, in.keys(h), in.queries(h));
        latent_dots_(y, tile, seen.row, n_rows, in.values(h), in.gradients(h));
        for (int j = 0; j < LATENT_OF; j++) {
            const size_t row = (size_t)tile.chunk.item[latent_column_() + j * LATENT_LANES] * in.s.H + h;
            const float top = in.max[row], factor = in.inv[row], D = in.D[row];
            for (int i = 0; i < 2; i++) {
                const float weight = kernel_exp(x[i][j] * in.s.scale - top) * factor;
                x[i][j] = latent_sees_(tile, i, j) ? weight : 0.0f;
                y[i][j] = latent_sees_(tile, i, j) ? weight * (y[i][j] - D) * in.s.scale : 0.0f;
            }
        }
        latent_put_(att, x);
        latent_put_(ds, y);
        __syncthreads();
        latent_gather_(sums, ds, tile, in.queries(h), n, NULL);
        latent_gather_(of_values, att, tile, in.gradients(h), n, NULL);
    }
    __syncthreads();
    for (int i = t; i < n_rows * KV; i += LATENT_THREADS) {
        const int row = i / KV, c = i % KV;
        const float sum = c < dn ? sums[row * Q + c] : of_values[row * dv + c - dn];
        dkv[((size_t)(seen.row + row) * in.s.H + h) * KV + c] = from_float<X>(sum);
    }
    for (int i = t; i < n_rows * dr; i += LATENT_THREADS) {
        of_k_rope[((size_t)h * see.N + seen.row) * dr + i] = sums[i / dr * Q + dn + i % dr];
    }
}

// numbers first .. end - 1 of k_rope (n): the sum over heads of what they have of it, heads (H, n)
__global__ static void latent_k_rope_kernel(float* k_rope, const float* heads, size_t first, size_t end, int goes_on,
                                             int H, size_t n) {
    for (size_t i = first + grid_first<1>(); i < end; i += grid_step<1>()) {
        float sum = goes_on ? k_rope[i] : 0.0f;
        for (int h = 0; h < H; h++) { sum += heads[(size_t)h * n + i]; }
        k_rope[i] = sum;
    }
}

template <typename X>
__global__ void latent_turned_kernel(X* dk_rope, const float* k_rope, size_t n) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) { dk_rope[i] = from_float<X>(k_rope[i]); }
}

// ---- launches ----

static inline int latent_most_channels(const Device* dev) {
    const int room = (int)(sizeof(LatentTile) + 2 * sizeof(LatentWeights)) + 256;
    return (dev->most_shared - room) / ((int)sizeof(float) * LATENT_TILE);
}

// of the sums of a tile, of so many channels
static inline int latent_shared_bytes_(int channels, const Device* dev) {
    if (channels > latent_most_channels(dev)) {
        fail_run("latent attention: sums of %d channels of a head need more shared memory than this GPU has", channels);
    }
    return (int)sizeof(float) * LATENT_TILE * channels;
}

template <typename X>
static inline void latent_attention_forward(X* out, float* max, float* inv, const X* q, const X* kv, const X* k_rope,
                                            const int* chosen, const LatentShape* s, const Places* places,
                                            const Device* dev) {
    if (s->N == 0) { return; }
    const LatentInputsOf<X> in = latent_inputs<X>(q, kv, k_rope, NULL, NULL, NULL, NULL, s);
    if (flash_latent_forward(out, max, inv, in, chosen, places, dev)) { return; }
    int* room = (int*)device_workspace(dev, sizeof(int) * latent_sight_ints(s->N, s->N, chosen ? s->topk : 0, 1));
    const LatentSight see = latent_sight<1>(room, chosen, s, places, dev);
    const dim3 grid(latent_tiles(s->N, 1), (unsigned)s->H);
    const int n_bytes = latent_shared_bytes_(s->dv, dev);
    cudaCheck(cudaFuncSetAttribute(latent_forward_kernel<X>, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    latent_forward_kernel<X><<<grid, LATENT_THREADS, n_bytes, dev->stream>>>(out, max, inv, in, see);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void latent_attention_mass(float* mass, const X* q, const X* kv, const X* k_rope, const float* max,
                                         const float* inv, const int* chosen, int goes_on, const LatentShape* s,
                                         const Places* places, const Device* dev) {
    if (s->N == 0) { return; }
    const LatentInputsOf<X> in = latent_inputs<X>(q, kv, k_rope, NULL, max, inv, NULL, s);
    if (flash_latent_mass(mass, in, chosen, goes_on, places, dev)) { return; }
    int* room = (int*)device_workspace(dev, sizeof(int) * latent_sight_ints(s->N, s->N, s->topk, 1));
    const LatentSight see = latent_sight<1>(room, chosen, s, places, dev);
    const dim3 grid(latent_tiles(s->N, 1), LATENT_STEPS);
    latent_mass_kernel<X><<<grid, LATENT_THREADS, 0, dev->stream>>>(mass, in, see, goes_on);
    cudaCheck(cudaGetLastError());
}

// floats of backward's scratch: D, or FlashRow, what heads have of dk_rope, and their sums
static inline size_t latent_backward_floats_(const LatentShape* s, int n_keys) {
    return 2 * (size_t)s->N * (size_t)s->H + (size_t)n_keys * ((size_t)s->H + 1) * (size_t)s->dr;
}
// ... and ints; topk 0: no lists
static inline size_t latent_backward_ints_(const LatentShape* s, int n_keys, int topk, int words) {
    const size_t turned = topk > 0 ? (size_t)n_keys + 1 + (size_t)s->N * (size_t)topk : 0;
    return latent_sight_ints(s->N, n_keys, topk, words) + turned;
}

// scratch of a training step of N positions, for the account of memory
static inline double latent_workspace_bytes(const LatentShape* s, int n_keys, int T, int trains, const Device* dev) {
    (void)T, (void)dev;
    const int words = FLASH_LATENT_MOST_WORDS;
    if (!trains) { return (double)sizeof(int) * (double)latent_sight_ints(s->N, s->N, s->topk, words); }
    const size_t n_ints = latent_backward_ints_(s, n_keys, s->topk, words);
    return (double)sizeof(float) * (double)(latent_backward_floats_(s, n_keys) + n_ints);
}

// on CUDA cores
template <typename X>
static inline void latent_backward_(X* dq, X* dkv, float* D, float* heads, const LatentInputsOf<X>& in, int* room,
                                    int* lists, const int* chosen, int n_keys, const Places* places,
                                    const Device* dev) {
    const LatentShape* s = &in.s;
    const LatentSight see = latent_sight<1>(room, chosen, s, places, dev);
    const dim3 grid(latent_tiles(s->N, 1), (unsigned)s->H);
    const int n_bytes = latent_shared_bytes_(s->dn + s->dr, dev);
    const int n_both = latent_shared_bytes_(s->dn + s->dr + s->dv, dev);
    cudaCheck(cudaFuncSetAttribute(latent_positions_kernel<X>, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes));
    cudaCheck(cudaFuncSetAttribute(latent_keys_kernel<X>, cudaFuncAttributeMaxDynamicSharedMemorySize, n_both));
    latent_positions_kernel<X><<<grid, LATENT_THREADS, n_bytes, dev->stream>>>(dq, D, in, see);
    const LatentSight turned = latent_turned<1>(see, lists, n_keys, dev);
    const dim3 grid_of_keys(latent_tiles(n_keys, 1), (unsigned)s->H);
    latent_keys_kernel<X><<<grid_of_keys, LATENT_THREADS, n_both, dev->stream>>>(dkv, heads, in, turned);
    cudaCheck(cudaGetLastError());
}

// all but dk_rope. The device's workspace stays as it is up to latent_backward_end
template <typename X>
static inline LatentBackward latent_backward_begin(X* dq, X* dkv, X* dk_rope, const X* dout, const X* out, const X* q,
                                                   const X* kv, const X* k_rope, const float* max, const float* inv,
                                                   const int* chosen, int n_keys, const LatentShape* s,
                                                   const Places* places, const Device* dev) {
    (void)dk_rope;  // of CPUs
    LatentInputsOf<X> in = latent_inputs<X>(q, kv, k_rope, dout, max, inv, NULL, s);
    const int by_tensor_cores = flash_latent_fits(dq, dkv, in, dev) && pack_aligned(out);
    const int words = by_tensor_cores ? FLASH_LATENT_MOST_WORDS : 1;
    const int topk = chosen ? s->topk : 0;
    const size_t n_floats = latent_backward_floats_(s, n_keys), n_ints = latent_backward_ints_(s, n_keys, topk, words);
    float* D = device_workspace(dev, sizeof(float) * (n_floats + n_ints));
    float *heads = D + 2 * (size_t)s->N * s->H, *sums = heads + (size_t)s->H * n_keys * s->dr;
    int *room = (int*)(D + n_floats), *lists = room + latent_sight_ints(s->N, n_keys, topk, words);
    const LatentBackward b = {sums, heads, s->H, n_keys, s->dr};
    if (s->N == 0) {
        device_zero(dkv, sizeof(X) * (size_t)n_keys * (size_t)s->H * latent_kv_(s), dev);
        device_zero(heads, sizeof(float) * (size_t)n_keys * (size_t)s->H * (size_t)s->dr, dev);
        return b;
    }
    if (by_tensor_cores) {
        flash_latent_backward(dq, dkv, (FlashRow*)D, heads, out, in, room, lists, chosen, n_keys, places, dev);
        return b;
    }
    in.D = D;
    latent_backward_(dq, dkv, D, heads, in, room, lists, chosen, n_keys, places, dev);
    return b;
}

// rows first .. end - 1; goes_on: from the heads before
static inline void latent_backward_k_rope(LatentBackward* b, int first, int end, int goes_on, const Device* dev) {
    const size_t dr = (size_t)b->dr, n = (size_t)(end - first) * dr;
    if (n == 0) { return; }
    latent_k_rope_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(
        b->k_rope, b->heads, (size_t)first * dr, (size_t)end * dr, goes_on, b->H, (size_t)b->n_keys * dr);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void latent_backward_end(X* dk_rope, const LatentBackward* b, const Device* dev) {
    const size_t n = (size_t)b->n_keys * (size_t)b->dr;
    if (n == 0) { return; }
    latent_turned_kernel<X><<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(dk_rope, b->k_rope, n);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void latent_attention_backward(X* dq, X* dkv, X* dk_rope, const X* dout, const X* out, const X* q,
                                             const X* kv, const X* k_rope, const float* max, const float* inv,
                                             const int* chosen, int n_keys, const LatentShape* s,
                                             const Places* places, const Device* dev) {
    LatentBackward b = latent_backward_begin(dq, dkv, dk_rope, dout, out, q, kv, k_rope, max, inv, chosen, n_keys, s,
                                             places, dev);
    latent_backward_k_rope(&b, 0, n_keys, 0, dev);
    latent_backward_end(dk_rope, &b, dev);
}
#endif  // __CUDACC__
#endif  // LLMC_LATENT_ATTENTION_KERNELS_H
