/*
CUDA kernels of sparse_attention.h, on CUDA cores; bf16 goes to tensor cores where it can (flash_sparse.h). A block has
SPARSE_HEADS heads of one position, goes over what the position sees SPARSE_CHUNK keys at a time, and shares the keys
that it loads among these heads. Scores are not kept: each pass over the keys makes them anew, so that no scratch grows
with what is seen.
    forward    EXACT: a pass for max, one for the total, one for out. Otherwise max and total in one pass, online
    backward   queries: a pass for D, one for dq, which leaves att and ds in memory, as in C, of as many heads as fit;
               then keys: a block has 64 neighbouring keys of the window, or entries, and 64 channels, or where there
               are lists one entry, whose positions inverse_lists.h finds. No atomics
Cost:   forward 8*d flops (EXACT) or 6*d for each head, position and key, backward 14*d. dkv and dentries are two sums
        in float, which take 8 bytes for each element beside what is kept. By ptxas of CUDA 13.0 for sm_90 no kernel
        spills; nothing was measured on a GPU.
Order:  EXACT builds have the chains of the plain loops. Otherwise totals, D and dsinks are sums along trees over 32
        lanes, everything else is the same chain.
*/
#ifndef LLMC_SPARSE_ATTENTION_KERNELS_H
#define LLMC_SPARSE_ATTENTION_KERNELS_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // to_float, from_float, kernel_exp, row_max, lane_sum
#include "flash_sparse.h"    // flash_sparse_forward, flash_sparse_rows, flash_sparse_give, flash_sparse_add, ...
#include "sparse_inputs.h"   // SparseInputsOf, sparse_key_, SparsePositions

enum {
    SPARSE_HEADS = 16,    // of a block...
    SPARSE_CHUNK = 64,    // ...with so many keys at a time...
    SPARSE_THREADS = 256, // ...by so many threads, each of which has a head and every 16th key
    SPARSE_DEPTH = 32,    // channels that are in shared memory at a time
    SPARSE_TILE = 64,     // keys, and channels, of a block that sums over positions...
    SPARSE_TERMS = 16,    // ...so many at a time
    SPARSE_SUMS = 4       // keys and channels of one of its threads
};

// ---- products of the heads of a block with a chunk of keys ----

// what a block shares
template <typename X>
struct SparseShared {
    float x[SPARSE_HEADS][SPARSE_DEPTH + 1];
    float keys[SPARSE_CHUNK][SPARSE_DEPTH + 1];
    const X* key[SPARSE_CHUNK];  // NULL: there is none
};

// where the keys k0..k0+63 of those are
template <typename X>
__device__ inline void sparse_find_keys_(SparseShared<X>& tile, const SparseInputsOf<X>& in, const SparseSeen& see,
                                         int k0) {
    __syncthreads();  // the chunk before has been used
    if (threadIdx.x < SPARSE_CHUNK) {
        const int k = k0 + (int)threadIdx.x;
        tile.key[threadIdx.x] = k < see.n_keys ? sparse_key_(in, see, k) : NULL;
    }
    __syncthreads();
}

// dots[h][k] = x (n_heads, d) times the keys of the chunk, chains over channels
template <typename X>
__device__ inline void sparse_dots_(float (&dots)[SPARSE_HEADS][SPARSE_CHUNK + 1], SparseShared<X>& tile, const X* x,
                                    int n_heads, int d) {
    const int t = threadIdx.x, h = t / SPARSE_HEADS, k = t % SPARSE_HEADS;
    float sum[SPARSE_CHUNK / SPARSE_HEADS] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int c0 = 0; c0 < d; c0 += SPARSE_DEPTH) {
        const int n = d - c0 < SPARSE_DEPTH ? d - c0 : SPARSE_DEPTH;
        for (int i = t; i < SPARSE_HEADS * SPARSE_DEPTH; i += SPARSE_THREADS) {
            const int row = i / SPARSE_DEPTH, c = i % SPARSE_DEPTH, is_one = row < n_heads && c < n;
            tile.x[row][c] = is_one ? to_float(x[(size_t)row * d + c0 + c]) : 0.0f;
        }
        for (int i = t; i < SPARSE_CHUNK * SPARSE_DEPTH; i += SPARSE_THREADS) {
            const int row = i / SPARSE_DEPTH, c = i % SPARSE_DEPTH;
            const X* key = tile.key[row];
            tile.keys[row][c] = key && c < n ? to_float(key[c0 + c]) : 0.0f;
        }
        __syncthreads();
        #pragma unroll 8
        for (int c = 0; c < n; c++) {
            for (int i = 0; i < SPARSE_CHUNK / SPARSE_HEADS; i++) {
                sum[i] = madd(tile.x[h][c], tile.keys[k + i * SPARSE_HEADS][c], sum[i]);
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < SPARSE_CHUNK / SPARSE_HEADS; i++) { dots[h][k + i * SPARSE_HEADS] = sum[i]; }
    __syncthreads();
}

// sums (16, d) += weights of the chunk's n keys times these. The threads of a warp have neighbouring channels
template <typename X>
__device__ inline void sparse_gather_(float* sums, const float (&weights)[SPARSE_HEADS][SPARSE_CHUNK + 1],
                                      const SparseShared<X>& tile, int n, int d) {
    const int rows = SPARSE_HEADS / (SPARSE_THREADS / SPARSE_TILE), h = threadIdx.x / SPARSE_TILE * rows;
    for (int c = threadIdx.x % SPARSE_TILE; c < d; c += SPARSE_TILE) {
        float sum[rows];
        for (int i = 0; i < rows; i++) { sum[i] = sums[(h + i) * d + c]; }
        #pragma unroll 4
        for (int k = 0; k < n; k++) {
            const float key = to_float(tile.key[k][c]);
            for (int i = 0; i < rows; i++) { sum[i] = madd(weights[h + i][k], key, sum[i]); }
        }
        for (int i = 0; i < rows; i++) { sums[(h + i) * d + c] = sum[i]; }
    }
}

__device__ inline void sparse_clear_(float* sums, int d) {
    for (int i = threadIdx.x; i < SPARSE_HEADS * d; i += SPARSE_THREADS) { sums[i] = 0.0f; }
}

// the n_heads rows of sums, stored
template <typename X>
__device__ inline void sparse_store_(X* out, const float* sums, int n_heads, int d) {
    __syncthreads();
    for (int i = threadIdx.x; i < n_heads * d; i += SPARSE_THREADS) { out[i] = from_float<X>(sums[i]); }
}

// ---- forward ----

// max and total (16) go on with the scores of a chunk's n keys. EXACT: in pass 0 max, in pass 1 total
__device__ inline void sparse_statistics_(float* max, float* total, float (&scores)[SPARSE_HEADS][SPARSE_CHUNK + 1],
                                          int n, int n_heads, int pass) {
#ifdef EXACT
    const int t = threadIdx.x;
    if (pass == 1) {
        for (int i = t; i < n_heads * n; i += SPARSE_THREADS) {
            scores[i / n][i % n] = fm_exp(scores[i / n][i % n] - max[i / n]);
        }
        __syncthreads();
    }
    if (t < n_heads) {
        for (int k = 0; k < n; k++) {
            if (pass == 0) { max[t] = scores[t][k] > max[t] ? scores[t][k] : max[t]; }
            else { total[t] += scores[t][k]; }
        }
    }
#else
    (void)pass;
    for (int h = threadIdx.x / WARP; h < n_heads; h += SPARSE_THREADS / WARP) {
        float top = max[h], sum = 0.0f;
        for (int k = threadIdx.x % WARP; k < n; k += WARP) { top = scores[h][k] > top ? scores[h][k] : top; }
        top = row_max(top);
        for (int k = threadIdx.x % WARP; k < n; k += WARP) { sum += kernel_exp(scores[h][k] - top); }
        sum = lane_sum(sum);
        __syncwarp();
        if (threadIdx.x % WARP == 0) { total[h] = total[h] * kernel_exp(max[h] - top) + sum, max[h] = top; }
    }
#endif
    __syncthreads();
}

// block is (SPARSE_THREADS), grid (N, tiles of heads); 16 * d floats of shared memory
template <typename X>
__global__ void __launch_bounds__(SPARSE_THREADS, 3)
sparse_forward_kernel(X* out, float* max, float* inv, const float* sinks, SparseInputsOf<X> in) {
    extern __shared__ float sums[];
    __shared__ SparseShared<X> tile;
    __shared__ float scores[SPARSE_HEADS][SPARSE_CHUNK + 1], top[SPARSE_HEADS], total[SPARSE_HEADS];
#ifdef EXACT
    const int n_passes = 2;
#else
    const int n_passes = 1;
#endif
    const int t = threadIdx.x, d = in.s.d, head = blockIdx.y * SPARSE_HEADS;
    const int n_heads = in.s.H - head < SPARSE_HEADS ? in.s.H - head : SPARSE_HEADS;
    const size_t row = (size_t)blockIdx.x * in.s.H + head;
    const SparseSeen see = sparse_seen_(in, blockIdx.x);
    if (t < SPARSE_HEADS) { top[t] = t < n_heads ? sinks[head + t] : 0.0f, total[t] = 0.0f; }
    sparse_clear_(sums, d);
    for (int pass = 0; pass <= n_passes; pass++) {
        for (int k0 = 0; k0 < see.n_keys; k0 += SPARSE_CHUNK) {
            const int n = see.n_keys - k0 < SPARSE_CHUNK ? see.n_keys - k0 : SPARSE_CHUNK;
            sparse_find_keys_(tile, in, see, k0);
            sparse_dots_(scores, tile, in.q + row * d, n_heads, d);
            for (int i = t; i < SPARSE_HEADS * n; i += SPARSE_THREADS) {
                float* score = &scores[i / n][i % n];
                *score *= in.s.scale;
                if (pass == n_passes) { *score = kernel_exp(*score - top[i / n]) * total[i / n]; }
            }
            __syncthreads();
            if (pass < n_passes) {
                sparse_statistics_(top, total, scores, n, n_heads, pass);
            } else {
                sparse_gather_(sums, scores, tile, n, d);
            }
        }
        __syncthreads();
        if (pass == n_passes - 1 && t < n_heads) {  // from here on total is inv
            total[t] = 1.0f / (total[t] + kernel_exp(sinks[head + t] - top[t]));
            max[row + t] = top[t], inv[row + t] = total[t];
        }
        __syncthreads();
    }
    sparse_store_(out + row * d, sums, n_heads, d);
}

static inline int sparse_most_channels(const Device* dev) {
    const int room = 32 << 10;
    return (dev->most_shared - room) / ((int)sizeof(float) * SPARSE_HEADS);
}

// a kernel with 16 * d floats of dynamic shared memory
template <typename Kernel>
static inline size_t sparse_shared_bytes_(Kernel kernel, int d, const Device* dev) {
    const size_t n_bytes = sizeof(float) * SPARSE_HEADS * (size_t)d;
    if (d > sparse_most_channels(dev)) {
        fail_run("sparse attention: heads of %d channels need more shared memory than this GPU has", d);
    }
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes));
    return n_bytes;
}

template <typename X>
static inline void sparse_attention_forward(X* out, float* max, float* inv, const X* q, const X* kv, const X* entries,
                                            const float* sinks, const int* chosen, const SparseShape* s,
                                            const Places* places, const EntryWindows* w, const Device* dev) {
    if (s->N == 0) { return; }
    const SparseInputsOf<X> in = sparse_inputs_(q, kv, entries, chosen, s, places, w);
    if (flash_sparse_forward(out, max, inv, sinks, in, dev)) { return; }
    const size_t n_bytes = sparse_shared_bytes_(sparse_forward_kernel<X>, s->d, dev);
    const dim3 grid((unsigned)s->N, (unsigned)ceil_div(s->H, SPARSE_HEADS));
    sparse_forward_kernel<X><<<grid, SPARSE_THREADS, n_bytes, dev->stream>>>(out, max, inv, sinks, in);
    cudaCheck(cudaGetLastError());
}

// ---- mass: block is (SPARSE_THREADS), grid (N) ----

template <typename X>
__global__ void __launch_bounds__(SPARSE_THREADS, 3)
sparse_mass_kernel(float* mass, const float* max, const float* inv, SparseInputsOf<X> in, int goes_on) {
    __shared__ SparseShared<X> tile;
    __shared__ float att[SPARSE_HEADS][SPARSE_CHUNK + 1];
    const int t = threadIdx.x, n = blockIdx.x, d = in.s.d, topk = in.s.topk;
    const SparseSeen see = {n, 0, 0, sparse_list_length(in.chosen + (size_t)n * topk, topk)};
    for (int k0 = 0; k0 < topk; k0 += SPARSE_CHUNK) {
        float sum = goes_on && t < SPARSE_CHUNK && k0 + t < topk ? mass[(size_t)n * topk + k0 + t] : 0.0f;
        sparse_find_keys_(tile, in, see, k0);
        for (int head = 0; head < in.s.H; head += SPARSE_HEADS) {
            const int n_heads = in.s.H - head < SPARSE_HEADS ? in.s.H - head : SPARSE_HEADS;
            const size_t row = (size_t)n * in.s.H + head;
            sparse_dots_(att, tile, in.q + row * d, n_heads, d);
            for (int i = t; i < n_heads * SPARSE_CHUNK; i += SPARSE_THREADS) {
                const int h = i / SPARSE_CHUNK;
                float* one = &att[h][i % SPARSE_CHUNK];
                *one = kernel_exp(*one * in.s.scale - max[row + h]) * inv[row + h];
            }
            __syncthreads();
            for (int h = 0; h < n_heads && t < SPARSE_CHUNK; h++) { sum += att[h][t]; }
            __syncthreads();
        }
        if (t < SPARSE_CHUNK && k0 + t < topk) { mass[(size_t)n * topk + k0 + t] = k0 + t < see.n_keys ? sum : 0.0f; }
    }
}

template <typename X>
static inline void sparse_attention_mass(float* mass, const X* q, const X* entries, const float* max, const float* inv,
                                         const int* chosen, int goes_on, const SparseShape* s, const EntryWindows* w,
                                         const Device* dev) {
    if (s->N == 0) { return; }
    const X* no_keys = NULL;
    const SparseInputsOf<X> in = sparse_inputs_(q, no_keys, entries, chosen, s, (const Places*)NULL, w);
    if (flash_sparse_mass(mass, max, inv, in, goes_on, dev)) { return; }
    sparse_mass_kernel<X><<<(unsigned)s->N, SPARSE_THREADS, 0, dev->stream>>>(mass, max, inv, in, goes_on);
    cudaCheck(cudaGetLastError());
}

// ---- backward: queries ----

// att and ds (n_heads, N, row) of the heads from first_head on: keys of the window end at column n_window, where the
// entries begin
struct SparseKept {
    float *att, *ds;
    size_t row;
    int n_window, first_head, n_heads;
};

__device__ inline size_t sparse_kept_at_(const SparseKept& kept, int h, int N, int n) {
    return ((size_t)h * N + n) * kept.row + kept.n_window;
}

// D (16) goes on with the chunk's n keys
__device__ inline void sparse_add_D_(float* D, const float (&att)[SPARSE_HEADS][SPARSE_CHUNK + 1],
                                     const float (&datt)[SPARSE_HEADS][SPARSE_CHUNK + 1], int n, int n_heads) {
#ifdef EXACT
    if ((int)threadIdx.x < n_heads) {
        float sum = D[threadIdx.x];
        for (int k = 0; k < n; k++) { sum = madd(att[threadIdx.x][k], datt[threadIdx.x][k], sum); }
        D[threadIdx.x] = sum;
    }
#else
    for (int h = threadIdx.x / WARP; h < n_heads; h += SPARSE_THREADS / WARP) {
        float sum = 0.0f;
        for (int k = threadIdx.x % WARP; k < n; k += WARP) { sum = madd(att[h][k], datt[h][k], sum); }
        sum = lane_sum(sum);
        if (threadIdx.x % WARP == 0) { D[h] += sum; }
    }
#endif
    __syncthreads();
}

// block is (SPARSE_THREADS), grid (N, tiles of heads); 16 * d floats of shared memory
template <typename X>
__global__ void __launch_bounds__(SPARSE_THREADS, 3)
sparse_queries_kernel(X* dq, float* D, const X* dout, const float* max, const float* inv, SparseInputsOf<X> in,
                      SparseKept kept) {
    extern __shared__ float sums[];
    __shared__ SparseShared<X> tile;
    __shared__ float att[SPARSE_HEADS][SPARSE_CHUNK + 1], ds[SPARSE_HEADS][SPARSE_CHUNK + 1], D_of[SPARSE_HEADS];
    const int t = threadIdx.x, d = in.s.d, of_kept = blockIdx.y * SPARSE_HEADS, left = kept.n_heads - of_kept;
    const int n_heads = left < SPARSE_HEADS ? left : SPARSE_HEADS;
    const size_t row = (size_t)blockIdx.x * in.s.H + kept.first_head + of_kept;
    const SparseSeen see = sparse_seen_(in, blockIdx.x);
    if (t < SPARSE_HEADS) { D_of[t] = 0.0f; }
    sparse_clear_(sums, d);
    for (int pass = 0; pass < 2; pass++) {
        for (int k0 = 0; k0 < see.n_keys; k0 += SPARSE_CHUNK) {
            const int n = see.n_keys - k0 < SPARSE_CHUNK ? see.n_keys - k0 : SPARSE_CHUNK;
            sparse_find_keys_(tile, in, see, k0);
            sparse_dots_(att, tile, in.q + row * d, n_heads, d);
            sparse_dots_(ds, tile, dout + row * d, n_heads, d);  // datt
            for (int i = t; i < n_heads * n; i += SPARSE_THREADS) {
                const int h = i / n, k = i % n;
                const float weight = kernel_exp(att[h][k] * in.s.scale - max[row + h]) * inv[row + h];
                att[h][k] = weight;
                if (pass == 0) { continue; }
                const size_t at = sparse_kept_at_(kept, of_kept + h, in.s.N, see.n) + (size_t)(k0 + k) - see.n_window;
                const float d_score = weight * (ds[h][k] - D_of[h]) * in.s.scale;
                ds[h][k] = d_score;
                kept.att[at] = weight, kept.ds[at] = d_score;
            }
            __syncthreads();
            if (pass == 0) {
                sparse_add_D_(D_of, att, ds, n, n_heads);
            } else {
                sparse_gather_(sums, ds, tile, n, d);
            }
        }
        __syncthreads();
    }
    if (t < n_heads) { D[row + t] = D_of[t]; }
    sparse_store_(dq + row * d, sums, n_heads, d);
}

// ---- backward: keys ----

// keys and entries of a block in shared memory: SPARSE_TERMS positions
struct SparseTerms {
    float ds[SPARSE_TERMS][SPARSE_TILE], att[SPARSE_TERMS][SPARSE_TILE];
    float q[SPARSE_TERMS][SPARSE_TILE], dout[SPARSE_TERMS][SPARSE_TILE];
    int begin[SPARSE_TILE], end[SPARSE_TILE];
};

// what positions n0..n0+15 have of head h: 0 where they do not see a key, or there is no channel
template <typename X>
__device__ inline void sparse_load_terms_(SparseTerms& x, const X* dout, const SparseInputsOf<X>& in,
                                          const SparseKept& kept, int is_entry, int u0, int c0, int h, int n0,
                                          int end) {
    for (int i = threadIdx.x; i < SPARSE_TERMS * SPARSE_TILE; i += SPARSE_THREADS) {
        const int n = n0 + i / SPARSE_TILE, j = i % SPARSE_TILE, sees = n < end && x.begin[j] <= n && n < x.end[j];
        const int has = n < end && c0 + j < in.s.d;
        size_t weight = 0, at = 0;
        if (sees) {
            weight = sparse_kept_at_(kept, h, in.s.N, n) + (size_t)(u0 + j);
            weight -= (size_t)(is_entry ? in.w.first_entry[n] : sparse_own_key(&in.places, n) + 1);
        }
        if (has) { at = ((size_t)n * in.s.H + kept.first_head + h) * in.s.d + c0 + j; }
        x.ds[i / SPARSE_TILE][j] = sees ? kept.ds[weight] : 0.0f;
        x.att[i / SPARSE_TILE][j] = sees ? kept.att[weight] : 0.0f;
        x.q[i / SPARSE_TILE][j] = has ? to_float(in.q[at]) : 0.0f;
        x.dout[i / SPARSE_TILE][j] = has ? to_float(dout[at]) : 0.0f;
    }
}

// by_q and by_dout of these keys (d) go on with the heads at hand. block is (SPARSE_THREADS), grid (tiles of keys,
// tiles of channels)
template <typename X>
__global__ void __launch_bounds__(SPARSE_THREADS, 3)
sparse_keys_kernel(float* by_q, float* by_dout, const X* dout, SparseInputsOf<X> in, SparseKept kept,
                   SparseIntervals of, SparsePart keys, int is_entry) {
    __shared__ SparseTerms x;
    const int t = threadIdx.x, u0 = keys.first + blockIdx.x * SPARSE_TILE, c0 = blockIdx.y * SPARSE_TILE, d = in.s.d;
    const int m = t / (SPARSE_TILE / SPARSE_SUMS) * SPARSE_SUMS, c = t % (SPARSE_TILE / SPARSE_SUMS) * SPARSE_SUMS;
    int first = in.s.N, end = 0;
    float q_sum[SPARSE_SUMS][SPARSE_SUMS], dout_sum[SPARSE_SUMS][SPARSE_SUMS];
    if (t < SPARSE_TILE) {
        x.begin[t] = u0 + t < keys.end ? of.begin[u0 + t] : 0;
        x.end[t] = u0 + t < keys.end ? of.end[u0 + t] : 0;
    }
    __syncthreads();
    for (int i = 0; i < SPARSE_TILE; i++) {
        if (x.begin[i] < x.end[i] && x.begin[i] < first) { first = x.begin[i]; }
        if (x.end[i] > end) { end = x.end[i]; }
    }
    for (int i = 0; i < SPARSE_SUMS; i++) {
        for (int j = 0; j < SPARSE_SUMS; j++) {
            const int is_one = u0 + m + i < keys.end && c0 + c + j < d;
            const size_t at = is_one ? (size_t)(u0 + m + i) * d + c0 + c + j : 0;
            q_sum[i][j] = is_one ? by_q[at] : 0.0f, dout_sum[i][j] = is_one ? by_dout[at] : 0.0f;
        }
    }
    for (int h = 0; h < kept.n_heads; h++) {
        for (int n0 = first; n0 < end; n0 += SPARSE_TERMS) {
            __syncthreads();
            sparse_load_terms_(x, dout, in, kept, is_entry, u0, c0, h, n0, end);
            __syncthreads();
            #pragma unroll 4
            for (int k = 0; k < SPARSE_TERMS; k++) {
                #pragma unroll
                for (int i = 0; i < SPARSE_SUMS; i++) {
                    if (x.begin[m + i] > n0 + k || n0 + k >= x.end[m + i]) { continue; }
                    #pragma unroll
                    for (int j = 0; j < SPARSE_SUMS; j++) {
                        q_sum[i][j] = madd(x.ds[k][m + i], x.q[k][c + j], q_sum[i][j]);
                        dout_sum[i][j] = madd(x.att[k][m + i], x.dout[k][c + j], dout_sum[i][j]);
                    }
                }
            }
        }
    }
    for (int i = 0; i < SPARSE_SUMS && u0 + m + i < keys.end; i++) {
        for (int j = 0; j < SPARSE_SUMS && c0 + c + j < d; j++) {
            const size_t at = (size_t)(u0 + m + i) * d + c0 + c + j;
            by_q[at] = q_sum[i][j], by_dout[at] = dout_sum[i][j];
        }
    }
}

// the same of entries from lists, from number first_entry on. block is (SPARSE_TILE), grid (entries, tiles of
// channels): a thread has a channel
template <typename X>
__global__ void sparse_listed_kernel(float* by_q, float* by_dout, const X* dout, SparseInputsOf<X> in, SparseKept kept,
                                     const int* offsets, const int* pairs, int first_entry) {
    const int e = first_entry + blockIdx.x, c = blockIdx.y * SPARSE_TILE + threadIdx.x, d = in.s.d;
    const int first = offsets[e], last = offsets[e + 1];
    if (c >= d) { return; }
    float q_sum = by_q[(size_t)e * d + c], dout_sum = by_dout[(size_t)e * d + c];
    for (int h = 0; h < kept.n_heads; h++) {
        #pragma unroll 4
        for (int i = first; i < last; i++) {
            const int n = pairs[i] / in.s.topk, k = pairs[i] % in.s.topk;
            const size_t weight = sparse_kept_at_(kept, h, in.s.N, n) + (size_t)k;
            const size_t at = ((size_t)n * in.s.H + kept.first_head + h) * d + c;
            q_sum = madd(kept.ds[weight], to_float(in.q[at]), q_sum);
            dout_sum = madd(kept.att[weight], to_float(dout[at]), dout_sum);
        }
    }
    by_q[(size_t)e * d + c] = q_sum, by_dout[(size_t)e * d + c] = dout_sum;
}

// out = x + y
template <typename X>
__global__ void sparse_join_kernel(X* out, const float* x, const float* y, size_t n) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) { out[i] = from_float<X>(x[i] + y[i]); }
}

// block is (WARP), grid (H). D: those of neighbouring rows are so many floats apart
__global__ void sparse_dsinks_kernel(float* dsinks, const float* D, int apart, const float* max, const float* inv,
                                     const float* sinks, int N, int H) {
    const int h = blockIdx.x, lane = threadIdx.x;
    float sum = 0.0f;
    for (int n = lane; n - lane < N; n += WARP) {
        const size_t i = (size_t)n * H + h;
        const float share = n < N ? -(kernel_exp(sinks[h] - max[i]) * inv[i]) : -0.0f;
        sum = row_madd(share, n < N ? D[i * apart] : 0.0f, sum);
    }
    sum = row_total(sum);
    if (lane == 0) { dsinks[h] = sum; }
}

// scratch of backward, on the device
typedef struct {
    float *D, *by_q, *by_dout;  // by_q, by_dout (rows + n_entries, d)
    SparseKept kept;            // on CUDA cores...
    FlashSparseGiven given;     // ...or on tensor cores, where by_q has both sums
    FlashRow* rows;             // ...and these have D
    SparsePositions see;
    int slab;                   // positions of `given`; 0: CUDA cores
} SparseScratch_;

// heads whose att and ds are kept together
static inline int sparse_heads_at_once_(const SparseShape* s, size_t row) {
    const size_t fit = SPARSE_KEPT / (2 * sizeof(float) * (size_t)s->N * row + 1) / SPARSE_HEADS * SPARSE_HEADS;
    return fit >= (size_t)s->H ? s->H : fit < SPARSE_HEADS ? SPARSE_HEADS : (int)fit;
}

template <typename X>
static inline SparseScratch_ sparse_scratch_(const SparseInputsOf<X>& in, int n_entries, int by_tensor_cores,
                                             const Device* dev) {
    SparseScratch_ x;
    const SparseShape* s = &in.s;
    const int rows = sparse_rows(s);
    const size_t n_sums = ((size_t)rows + n_entries) * s->d;
    x.kept.n_window = s->window < rows ? s->window : rows;
    x.kept.row = (size_t)x.kept.n_window + (in.chosen ? s->topk : n_entries);
    x.kept.n_heads = x.kept.first_head = 0;
    x.given = flash_sparse_given(x.kept.row, s->H);
    x.slab = by_tensor_cores ? flash_sparse_slab(s, x.given, dev) : 0;
    const size_t n_weights = 2 * (size_t)sparse_heads_at_once_(s, x.kept.row) * s->N * x.kept.row;
    const size_t n_kept = x.slab ? flash_sparse_room(s, x.given, x.slab) : n_weights;
    const size_t n_D = (size_t)s->N * s->H * (x.slab ? sizeof(FlashRow) / sizeof(float) : 1);
    const size_t n_ints = sparse_positions_room_(rows, n_entries, in.chosen ? (size_t)s->N * s->topk : 0);
    float* p = device_workspace(dev, sizeof(float) * (n_D + 2 * n_sums + n_kept + n_ints));
    x.by_q = p, p += n_sums;
    x.by_dout = p, p += n_sums;
    x.given.x = (bf16*)p, x.kept.att = p, x.kept.ds = p + n_weights / 2, p += n_kept;  // one of them is in use
    x.rows = (FlashRow*)p, x.D = x.slab ? &x.rows->D : p, p += n_D;
    device_zero(x.by_q, sizeof(float) * 2 * n_sums, dev);
    if (s->N > 0) { x.see = sparse_find_positions_((int*)p, in, n_entries, dev); }
    return x;
}

template <typename X>
struct SparseBackwardOf {
    SparseInputsOf<X> in;
    SparseScratch_ scratch;
    const X* dout;
    X *dq, *dkv, *dentries;
    const float *max, *inv, *sinks;
    float* dsinks;
    int n_entries, at_once;  // heads
};

// att, ds, D and dq of as many heads as are kept, from `head` on
template <typename X>
static inline void sparse_keep_heads_(SparseBackwardOf<X>* b, int head, const Device* dev) {
    const SparseShape* s = &b->in.s;
    SparseKept* kept = &b->scratch.kept;
    if (kept->n_heads > 0 && kept->first_head == head) { return; }
    kept->first_head = head, kept->n_heads = s->H - head < b->at_once ? s->H - head : b->at_once;
    const size_t n_bytes = sparse_shared_bytes_(sparse_queries_kernel<X>, s->d, dev);
    const dim3 grid((unsigned)s->N, (unsigned)ceil_div(kept->n_heads, SPARSE_HEADS));
    sparse_queries_kernel<X><<<grid, SPARSE_THREADS, n_bytes, dev->stream>>>(b->dq, b->scratch.D, b->dout, b->max,
                                                                             b->inv, b->in, *kept);
    cudaCheck(cudaGetLastError());
}

// the same on tensor cores, of all heads: what a slab of positions gives, from `first` on
template <typename X>
static inline void sparse_keep_slab_(SparseBackwardOf<X>* b, int first, const Device* dev) {
    FlashSparseGiven* given = &b->scratch.given;
    const int N = b->in.s.N, slab = b->scratch.slab;
    if (given->end > 0 && given->first == first) { return; }
    given->first = first, given->end = N - first < slab ? N : first + slab;
    flash_sparse_give(b->dq, b->dout, b->scratch.rows, b->in, *given, dev);
}

// what the heads that are kept add to these keys and entries
template <typename X>
static inline void sparse_add_heads_(const SparseBackwardOf<X>* b, SparsePart keys, SparsePart entries,
                                     const Device* dev) {
    const SparseScratch_* x = &b->scratch;
    const SparseShape* s = &b->in.s;
    const int n_keys = keys.end - keys.first, n_entries = entries.end - entries.first;
    const unsigned channels = (unsigned)ceil_div(s->d, SPARSE_TILE);
    const dim3 of_keys((unsigned)ceil_div(n_keys, SPARSE_TILE), channels), listed((unsigned)n_entries, channels);
    const dim3 of_entries((unsigned)ceil_div(n_entries, SPARSE_TILE), channels);
    const size_t n_kv = (size_t)sparse_rows(s) * s->d;
    float *by_q = x->by_q + n_kv, *by_dout = x->by_dout + n_kv;
    if (n_keys > 0) {
        sparse_keys_kernel<X><<<of_keys, SPARSE_THREADS, 0, dev->stream>>>(x->by_q, x->by_dout, b->dout, b->in, x->kept,
                                                                           x->see.of_window, keys, 0);
    }
    if (b->in.chosen && n_entries > 0) {
        sparse_listed_kernel<X><<<listed, SPARSE_TILE, 0, dev->stream>>>(by_q, by_dout, b->dout, b->in, x->kept,
                                                                         x->see.offsets, x->see.pairs, entries.first);
    } else if (n_entries > 0) {
        sparse_keys_kernel<X><<<of_entries, SPARSE_THREADS, 0, dev->stream>>>(by_q, by_dout, b->dout, b->in, x->kept,
                                                                              x->see.of_entries, entries, 1);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline SparseBackwardOf<X> sparse_backward_begin(X* dq, X* dkv, X* dentries, float* dsinks, const X* dout,
                                                        const X* out, const X* q, const X* kv, const X* entries,
                                                        const float* max, const float* inv, const float* sinks,
                                                        const int* chosen, int n_entries, const SparseShape* s,
                                                        const Places* places, const EntryWindows* w,
                                                        const Device* dev) {
    SparseBackwardOf<X> b;
    b.in = sparse_inputs_(q, kv, entries, chosen, s, places, w);
    b.dout = dout, b.dq = dq, b.dkv = dkv, b.dentries = dentries, b.dsinks = dsinks;
    b.max = max, b.inv = inv, b.sinks = sinks;
    b.n_entries = w ? n_entries : 0;
    b.scratch = sparse_scratch_(b.in, b.n_entries, flash_sparse_fits(dq, dout, out, b.in, dev), dev);
    b.at_once = sparse_heads_at_once_(s, b.scratch.kept.row);
    if (s->N == 0) { return b; }
    if (b.scratch.slab) {
        flash_sparse_rows(b.scratch.rows, dout, out, max, inv, s, dev);
        sparse_keep_slab_(&b, 0, dev);
    } else {
        sparse_keep_heads_(&b, 0, dev);
    }
    return b;
}

template <typename X>
static inline void sparse_backward_sums(SparseSums sums[SPARSE_CHAINS], const SparseBackwardOf<X>* b) {
    const int n_rows = sparse_rows(&b->in.s);
    const size_t n_kv = (size_t)n_rows * b->in.s.d;
    for (int i = 0; i < SPARSE_CHAINS; i++) {
        float* rows = i % 2 == 0 ? b->scratch.by_q : b->scratch.by_dout;
        sums[i].rows = i < 2 ? rows : rows + n_kv, sums[i].n = i < 2 ? n_rows : b->n_entries;
    }
}

template <typename X>
static inline void sparse_backward_keys(SparseBackwardOf<X>* b, SparsePart keys, SparsePart entries,
                                        const Device* dev) {
    SparseScratch_* x = &b->scratch;
    for (int n = 0; x->slab && n < b->in.s.N; n += x->slab) {
        sparse_keep_slab_(b, n, dev);
        flash_sparse_add(x->by_q, b->in, x->given, x->see, keys, entries, dev);
    }
    for (int head = 0; !x->slab && head < b->in.s.H && b->in.s.N > 0; head += b->at_once) {
        sparse_keep_heads_(b, head, dev);
        sparse_add_heads_(b, keys, entries, dev);
    }
}

template <typename X>
static inline void sparse_backward_end(const SparseBackwardOf<X>* b, const Device* dev) {
    const SparseScratch_* x = &b->scratch;
    const SparseShape* s = &b->in.s;
    const size_t n_kv = (size_t)sparse_rows(s) * s->d, n_of_entries = (size_t)b->n_entries * s->d;
    if (s->N == 0) { return; }
    sparse_join_kernel<X><<<grid_blocks(n_kv, 1, dev), GRID_BLOCK, 0, dev->stream>>>(b->dkv, x->by_q, x->by_dout, n_kv);
    if (n_of_entries > 0) {
        sparse_join_kernel<X><<<grid_blocks(n_of_entries, 1, dev), GRID_BLOCK, 0, dev->stream>>>(
            b->dentries, x->by_q + n_kv, x->by_dout + n_kv, n_of_entries);
    }
    if (b->dsinks) {
        const int apart = x->slab ? (int)(sizeof(FlashRow) / sizeof(float)) : 1;
        sparse_dsinks_kernel<<<(unsigned)s->H, WARP, 0, dev->stream>>>(b->dsinks, x->D, apart, b->max, b->inv, b->sinks,
                                                                       s->N, s->H);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void sparse_attention_backward(X* dq, X* dkv, X* dentries, float* dsinks, const X* dout, const X* out,
                                             const X* q, const X* kv, const X* entries, const float* max,
                                             const float* inv, const float* sinks, const int* chosen, int n_entries,
                                             const SparseShape* s, const Places* places, const EntryWindows* w,
                                             const Device* dev) {
    SparseBackwardOf<X> b = sparse_backward_begin(dq, dkv, dentries, dsinks, dout, out, q, kv, entries, max, inv,
                                                  sinks, chosen, n_entries, s, places, w, dev);
    const SparsePart keys = {0, sparse_rows(s)}, all = {0, b.n_entries};
    sparse_backward_keys(&b, keys, all, dev);
    sparse_backward_end(&b, dev);
}
#endif  // __CUDACC__
#endif  // LLMC_SPARSE_ATTENTION_KERNELS_H
