/*
Rows of experts: N positions go to k experts each (router.h), and these N * k pairs, sorted by expert, are the rows that
the experts compute. ExpertRows says which row is whose, and brings numbers there and back.
    expert_rows_find       from experts (N, k): rows sorted by (expert, n, j). Nothing is dropped or padded, an expert
                           may have no rows or all; one that stands twice in a position (hash routing) has both
    offsets (E + 1)        the rows of expert e are offsets[e] .. offsets[e + 1] - 1; offsets[E] = N * k
    token (N * k)          the position n of a row          pair (N * k)  its n * k + j
    slot (N, k)            the row that a pair has become, so slot[pair[row]] is row
All of it is on the device, and nothing waits for the host. With rows (N * k, D):
    expert_rows_combine    out_n = sum over j of weight_nj * rows[slot_nj]    (N, D)   written; forward
    expert_rows_add        dm_n += sum over j of rows[slot_nj]                (N, D)   added: gradients of the rows
    expert_rows_copy       rows[row] = x[token[row]], x (N, D)                (N * k, D) written; to send them elsewhere
    expert_rows_weights    row_weight[row] = weights[pair[row]]               (N * k)  written
    expert_rows_dweights   dweights[pair] = drow_weight[slot[pair]]           (N, k)   written: its backward
Everything is a gather by the owner of the result: no atomics, and no order that depends on time.
Cost:   memory bound: combine moves (k + 1) * N * D elements, add one N * D more: one thread does that at 23 GB/s where
        memcpy has 40 (AVX-512, N 4096, k 8, D 1024, a busy machine), and finds a row in 6 ns.
Error:  combine: a chain of k products, k * 2^-24 of the sum of their sizes. bf16 rounds what is stored: 2^-8.
Order:  j ascending, from 0 or from what dm holds: in one order in every build. Whole numbers have none.
Source: counting sort: Seward 1954; without padding: Gale et al. 2022, arXiv:2211.15841
*/
#ifndef LLMC_EXPERT_ROWS_H
#define LLMC_EXPERT_ROWS_H
#include "../core/device.h"  // Device, device_alloc, device_workspace, ceil_div
#include "../core/kernel.h"  // load_floats, store_floats, pack_aligned
#include "../core/madd.h"    // madd
#ifdef __CUDACC__
#include "embedding.h"  // embedding_scan
#endif

enum { EXPERT_ROWS_EXPERTS = 1024 };  // at most

typedef struct {
    int N, k, E;                         // N: of the last expert_rows_find
    int *offsets, *token, *slot, *pair;  // device memory; offsets is where it begins
    int most;                            // positions that there is room for
} ExpertRows;

static inline size_t expert_rows_bytes(int N, int k, int E) {
    return sizeof(int) * ((size_t)E + 1 + 3 * (size_t)N * (size_t)k);
}

// room for N positions at most
static inline void expert_rows_init(ExpertRows* r, int N, int k, int E) {
    const int64_t n_rows = (int64_t)N * k;
    if (N < 1 || k < 1 || E < 1 || E > EXPERT_ROWS_EXPERTS || n_rows > INT32_MAX) {
        fail_run("rows of experts: %d positions, %d of %d experts: expected 1 .. %d experts, below 2^31 rows", N, k, E,
                 EXPERT_ROWS_EXPERTS);
    }
    r->N = 0, r->k = k, r->E = E, r->most = N;
    r->offsets = (int*)device_alloc(expert_rows_bytes(N, k, E), "rows of experts");
    r->token = r->offsets + E + 1;
    r->slot = r->token + n_rows;
    r->pair = r->slot + n_rows;
}

static inline void expert_rows_free(ExpertRows* r) {
    device_release(r->offsets, expert_rows_bytes(r->most, r->k, r->E));
    r->offsets = r->token = r->slot = r->pair = NULL;
}

// R pairs that are to be sorted now
static inline int expert_rows_begin_(ExpertRows* r, int N) {
    if (N > r->most) { fail_run("rows of experts: %d positions, there is room for %d", N, r->most); }
    r->N = N;
    return N * r->k;
}

// ---- plain C: read this first; it defines every bit ----

// r in memory of the host
static inline void expert_rows_find_ref(ExpertRows* r, const int* experts, int N) {
    int row = 0;
    r->N = N;
    for (int e = 0; e < r->E; e++) {
        r->offsets[e] = row;
        for (int p = 0; p < N * r->k; p++) {
            if (experts[p] != e) { continue; }
            r->token[row] = p / r->k;
            r->pair[row] = p;
            r->slot[p] = row++;
        }
    }
    r->offsets[r->E] = row;
}

static inline void expert_rows_combine_ref(float* out, const float* rows, const float* weights, const ExpertRows* r,
                                           int D) {
    for (size_t n = 0; n < (size_t)r->N; n++) {
        for (int d = 0; d < D; d++) {
            float sum = 0.0f;
            for (size_t p = n * r->k; p < (n + 1) * r->k; p++) {
                sum = madd(weights[p], rows[(size_t)r->slot[p] * D + d], sum);
            }
            out[n * D + d] = sum;
        }
    }
}

static inline void expert_rows_add_ref(float* dm, const float* rows, const ExpertRows* r, int D) {
    for (size_t n = 0; n < (size_t)r->N; n++) {
        for (int d = 0; d < D; d++) {
            for (size_t p = n * r->k; p < (n + 1) * r->k; p++) { dm[n * D + d] += rows[(size_t)r->slot[p] * D + d]; }
        }
    }
}

static inline void expert_rows_copy_ref(float* rows, const float* x, const ExpertRows* r, int D) {
    for (size_t row = 0; row < (size_t)r->N * r->k; row++) {
        for (int d = 0; d < D; d++) { rows[row * D + d] = x[(size_t)r->token[row] * D + d]; }
    }
}

static inline void expert_rows_weights_ref(float* row_weight, const float* weights, const ExpertRows* r) {
    for (int row = 0; row < r->N * r->k; row++) { row_weight[row] = weights[r->pair[row]]; }
}

static inline void expert_rows_dweights_ref(float* dweights, const float* drow_weight, const ExpertRows* r) {
    for (int p = 0; p < r->N * r->k; p++) { dweights[p] = drow_weight[r->slot[p]]; }
}

#ifndef __CUDACC__  // ---- fast C: blocks of pairs, then positions, over threads ----

enum { EXPERT_ROWS_BLOCK = 4096 };  // pairs

// starts (blocks, E): how many pairs of a block each expert has become the rows where they begin
static inline void expert_rows_scan_(int* offsets, int* starts, int n_blocks, int E) {
    int row = 0;
    for (int e = 0; e < E; e++) {
        offsets[e] = row;
        for (int b = 0; b < n_blocks; b++) {
            int count = starts[(size_t)b * E + e];
            starts[(size_t)b * E + e] = row;
            row += count;
        }
    }
    offsets[E] = row;
}

static inline void expert_rows_find(ExpertRows* r, const int* experts, int N, const Device* dev) {
    const int R = expert_rows_begin_(r, N), E = r->E, k = r->k;
    const int n_blocks = (int)ceil_div(R, EXPERT_ROWS_BLOCK);
    int* starts = (int*)(void*)device_workspace(dev, sizeof(int) * (size_t)n_blocks * (size_t)E);
    memset(starts, 0, sizeof(int) * (size_t)n_blocks * (size_t)E);
    #pragma omp parallel for
    for (int b = 0; b < n_blocks; b++) {
        const int first = b * EXPERT_ROWS_BLOCK, n = R - first < EXPERT_ROWS_BLOCK ? R - first : EXPERT_ROWS_BLOCK;
        for (int i = 0; i < n; i++) { starts[(size_t)b * E + experts[first + i]]++; }
    }
    expert_rows_scan_(r->offsets, starts, n_blocks, E);
    #pragma omp parallel for
    for (int b = 0; b < n_blocks; b++) {
        const int first = b * EXPERT_ROWS_BLOCK, n = R - first < EXPERT_ROWS_BLOCK ? R - first : EXPERT_ROWS_BLOCK;
        for (int p = first; p < first + n; p++) {
            const int row = starts[(size_t)b * E + experts[p]]++;
            r->token[row] = p / k;
            r->pair[row] = p;
            r->slot[p] = row;
        }
    }
}

// to += the rows of k pairs, j ascending. Four are on their way from memory at once: 1.6 times as fast as one by one
static inline void expert_rows_add_row_(float* to, const float* rows, const int* slot, int k, int D) {
    int j = 0;
    for (; j + 4 <= k; j += 4) {
        const float *x0 = rows + (size_t)slot[j] * D, *x1 = rows + (size_t)slot[j + 1] * D,
                    *x2 = rows + (size_t)slot[j + 2] * D, *x3 = rows + (size_t)slot[j + 3] * D;
        #pragma omp simd
        for (int d = 0; d < D; d++) { to[d] = to[d] + x0[d] + x1[d] + x2[d] + x3[d]; }
    }
    for (; j < k; j++) {
        const float* x = rows + (size_t)slot[j] * D;
        #pragma omp simd
        for (int d = 0; d < D; d++) { to[d] += x[d]; }
    }
}

// the same with weights w (k)
static inline void expert_rows_madd_row_(float* to, const float* rows, const int* slot, const float* w, int k, int D) {
    int j = 0;
    for (; j + 4 <= k; j += 4) {
        const float *x0 = rows + (size_t)slot[j] * D, *x1 = rows + (size_t)slot[j + 1] * D,
                    *x2 = rows + (size_t)slot[j + 2] * D, *x3 = rows + (size_t)slot[j + 3] * D;
        const float w0 = w[j], w1 = w[j + 1], w2 = w[j + 2], w3 = w[j + 3];
        #pragma omp simd
        for (int d = 0; d < D; d++) {
            to[d] = madd(w3, x3[d], madd(w2, x2[d], madd(w1, x1[d], madd(w0, x0[d], to[d]))));
        }
    }
    for (; j < k; j++) {
        const float w_j = w[j], *x = rows + (size_t)slot[j] * D;
        #pragma omp simd
        for (int d = 0; d < D; d++) { to[d] = madd(w_j, x[d], to[d]); }
    }
}

static inline void expert_rows_combine(float* out, const float* rows, const float* weights, const ExpertRows* r, int D,
                                       const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < r->N; n++) {
        const size_t p = (size_t)n * r->k;
        memset(out + (size_t)n * D, 0, sizeof(float) * (size_t)D);
        expert_rows_madd_row_(out + (size_t)n * D, rows, r->slot + p, weights + p, r->k, D);
    }
}

static inline void expert_rows_add(float* dm, const float* rows, const ExpertRows* r, int D, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < r->N; n++) {
        expert_rows_add_row_(dm + (size_t)n * D, rows, r->slot + (size_t)n * r->k, r->k, D);
    }
}

static inline void expert_rows_copy(float* rows, const float* x, const ExpertRows* r, int D, const Device* dev) {
    const int *token = r->token, R = r->N * r->k;
    (void)dev;
    #pragma omp parallel for
    for (int row = 0; row < R; row++) {
        memcpy(rows + (size_t)row * D, x + (size_t)token[row] * D, sizeof(float) * (size_t)D);
    }
}

static inline void expert_rows_weights(float* row_weight, const float* weights, const ExpertRows* r,
                                       const Device* dev) {
    const int *pair = r->pair, R = r->N * r->k;
    (void)dev;
    #pragma omp parallel for
    for (int row = 0; row < R; row++) { row_weight[row] = weights[pair[row]]; }
}

static inline void expert_rows_dweights(float* dweights, const float* drow_weight, const ExpertRows* r,
                                        const Device* dev) {
    const int *slot = r->slot, R = r->N * r->k;
    (void)dev;
    #pragma omp parallel for
    for (int p = 0; p < R; p++) { dweights[p] = drow_weight[slot[p]]; }
}

#else  // ---- CUDA, first part: a stable counting sort ----
// A warp has EXPERT_ROWS_ROUNDS * 32 pairs and counts its experts; so does every warp of a block. The counts of blocks,
// expert after expert, are summed up to the row where each block begins for each expert; then each warp counts again,
// and places its pairs in order.

enum { EXPERT_ROWS_WARPS = 8, EXPERT_ROWS_ROUNDS = 4 };
enum { EXPERT_ROWS_WARP = EXPERT_ROWS_ROUNDS * WARP, EXPERT_ROWS_BLOCK = EXPERT_ROWS_WARPS * EXPERT_ROWS_WARP };

// lanes whose expert is that of this lane; all are below 2^bits
__device__ inline unsigned expert_rows_equals_(int expert, int bits) {
    unsigned equals = ALL_LANES;
    for (int bit = 0; bit < bits; bit++) {
        unsigned ones = __ballot_sync(ALL_LANES, expert >> bit & 1);
        equals &= expert >> bit & 1 ? ones : ~ones;
    }
    return equals;
}

// first pair of this warp
__device__ inline int expert_rows_first_() {
    return (int)blockIdx.x * EXPERT_ROWS_BLOCK + (int)threadIdx.x / WARP * EXPERT_ROWS_WARP;
}

// counts (warps, E), in shared memory: how many of its pairs a warp has for each expert. One lane counts for all that
// have the same
__device__ inline void expert_rows_count_(int* counts, const int* experts, int R, int E, int bits) {
    const int lane = threadIdx.x % WARP, first = expert_rows_first_();
    int* count = counts + threadIdx.x / WARP * E;
    for (int e = lane; e < E; e += WARP) { count[e] = 0; }
    __syncwarp();
    for (int p = first + lane; p - lane < first + EXPERT_ROWS_WARP; p += WARP) {
        int e = p < R ? experts[p] : E;
        unsigned equals = expert_rows_equals_(e, bits);
        if (e < E && (equals & ((1u << lane) - 1)) == 0) { count[e] += __popc(equals); }
        __syncwarp();
    }
    __syncthreads();
}

// starts (E, blocks)
__global__ static void expert_rows_count_kernel(int* starts, const int* experts, int R, int E, int bits) {
    extern __shared__ int expert_rows_counts[];
    expert_rows_count_(expert_rows_counts, experts, R, E, bits);
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        int sum = 0;
        for (int w = 0; w < EXPERT_ROWS_WARPS; w++) { sum += expert_rows_counts[w * E + e]; }
        starts[(size_t)e * gridDim.x + blockIdx.x] = sum;
    }
}

// counts of warps become the rows where they begin
__device__ inline void expert_rows_begins_(int* counts, int* offsets, const int* starts, int R, int E) {
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        int row = starts[(size_t)e * gridDim.x + blockIdx.x];
        if (blockIdx.x == 0) { offsets[e] = row; }
        for (int w = 0; w < EXPERT_ROWS_WARPS; w++) {
            int count = counts[w * E + e];
            counts[w * E + e] = row;
            row += count;
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) { offsets[E] = R; }
    __syncthreads();
}

__global__ static void expert_rows_place_kernel(ExpertRows r, const int* starts, const int* experts, int R, int bits) {
    extern __shared__ int expert_rows_begins[];
    const int lane = threadIdx.x % WARP, first = expert_rows_first_(), E = r.E;
    int* begin = expert_rows_begins + threadIdx.x / WARP * E;
    expert_rows_count_(expert_rows_begins, experts, R, E, bits);
    expert_rows_begins_(expert_rows_begins, r.offsets, starts, R, E);
    for (int p = first + lane; p - lane < first + EXPERT_ROWS_WARP; p += WARP) {
        int e = p < R ? experts[p] : E;
        unsigned equals = expert_rows_equals_(e, bits), earlier = equals & ((1u << lane) - 1);
        int row = e < E ? begin[e] + __popc(earlier) : 0;
        __syncwarp();  // all have read before one counts on
        if (e < E) {
            if (earlier == 0) { begin[e] += __popc(equals); }
            r.token[row] = p / r.k;
            r.pair[row] = p;
            r.slot[p] = row;
        }
        __syncwarp();
    }
}

static inline void expert_rows_find(ExpertRows* r, const int* experts, int N, const Device* dev) {
    const int R = expert_rows_begin_(r, N), E = r->E;
    const unsigned n_blocks = (unsigned)ceil_div(R, EXPERT_ROWS_BLOCK), threads = EXPERT_ROWS_WARPS * WARP;
    const size_t shared = sizeof(int) * EXPERT_ROWS_WARPS * (size_t)E, n_starts = (size_t)n_blocks * E;
    int bits = 1;
    if (R == 0) {
        device_zero(r->offsets, sizeof(int) * ((size_t)E + 1), dev);
        return;
    }
    while (E >> bits) { bits++; }
    int* starts = (int*)device_workspace(dev, sizeof(int) * n_starts);
    expert_rows_count_kernel<<<n_blocks, threads, shared, dev->stream>>>(starts, experts, R, E, bits);
    embedding_scan(starts, (int)n_starts, dev);
    expert_rows_place_kernel<<<n_blocks, threads, shared, dev->stream>>>(*r, starts, experts, R, bits);
    cudaCheck(cudaGetLastError());
}

// ---- CUDA, second part: gathers ----

enum { EXPERT_ROWS_THREADS = 256 };

// A thread has W neighbours of a position, a block blockDim.y positions. WEIGHTED: out = 0 + the products; else
// out += the rows
template <int W, int WEIGHTED, typename X>
__global__ void expert_rows_gather_kernel(X* out, const X* rows, const float* weights, const int* slot, int N, int k,
                                          int D) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= (size_t)N) { return; }
    for (int d = threadIdx.x * W; d < D; d += blockDim.x * W) {
        Pack<float, W> sum = {};
        if (!WEIGHTED) { sum = load_floats<W>(out + n * D + d); }
        #pragma unroll 4
        for (int j = 0; j < k; j++) {
            const Pack<float, W> x = load_floats<W>(rows + (size_t)slot[n * k + j] * D + d);
            const float w = WEIGHTED ? weights[n * k + j] : 1.0f;
            for (int i = 0; i < W; i++) { sum.x[i] = WEIGHTED ? madd(w, x.x[i], sum.x[i]) : sum.x[i] + x.x[i]; }
        }
        store_floats(out + n * D + d, sum);
    }
}

template <int W, int WEIGHTED, typename X>
static inline void expert_rows_gather_(X* out, const X* rows, const float* weights, const ExpertRows* r, int D,
                                       const Device* dev) {
    const unsigned wanted = (unsigned)ceil_div(ceil_div(D, W), WARP) * WARP, most = EXPERT_ROWS_THREADS;
    const unsigned threads = wanted < most ? wanted : most;
    dim3 block(threads, most / threads);
    if (r->N == 0 || D == 0) { return; }
    expert_rows_gather_kernel<W, WEIGHTED><<<(unsigned)ceil_div(r->N, block.y), block, 0, dev->stream>>>(
        out, rows, weights, r->slot, r->N, r->k, D);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void expert_rows_combine(X* out, const X* rows, const float* weights, const ExpertRows* r, int D,
                                       const Device* dev) {
    constexpr int W = pack_width<X>();
    if (D % W == 0 && pack_aligned(out, rows)) {
        expert_rows_gather_<W, 1>(out, rows, weights, r, D, dev);
    } else {
        expert_rows_gather_<1, 1>(out, rows, weights, r, D, dev);
    }
}

template <typename X>
static inline void expert_rows_add(X* dm, const X* rows, const ExpertRows* r, int D, const Device* dev) {
    constexpr int W = pack_width<X>();
    if (D % W == 0 && pack_aligned(dm, rows)) {
        expert_rows_gather_<W, 0>(dm, rows, NULL, r, D, dev);
    } else {
        expert_rows_gather_<1, 0>(dm, rows, NULL, r, D, dev);
    }
}

template <int W, typename X>
__global__ void expert_rows_copy_kernel(X* rows, const X* x, const int* token, int R, int D) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= (size_t)R) { return; }
    const X* from = x + (size_t)token[row] * D;
    for (int d = threadIdx.x * W; d < D; d += blockDim.x * W) {
        store_floats(rows + row * D + d, load_floats<W>(from + d));
    }
}

template <int W, typename X>
static inline void expert_rows_copy_(X* rows, const X* x, const ExpertRows* r, int D, const Device* dev) {
    const unsigned wanted = (unsigned)ceil_div(ceil_div(D, W), WARP) * WARP, most = EXPERT_ROWS_THREADS;
    const unsigned threads = wanted < most ? wanted : most;
    const int R = r->N * r->k;
    dim3 block(threads, most / threads);
    if (R == 0 || D == 0) { return; }
    expert_rows_copy_kernel<W><<<(unsigned)ceil_div(R, block.y), block, 0, dev->stream>>>(rows, x, r->token, R, D);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void expert_rows_copy(X* rows, const X* x, const ExpertRows* r, int D, const Device* dev) {
    constexpr int W = pack_width<X>();
    if (D % W == 0 && pack_aligned(rows, x)) { expert_rows_copy_<W>(rows, x, r, D, dev); }
    else { expert_rows_copy_<1>(rows, x, r, D, dev); }
}

__global__ static void expert_rows_take_kernel(float* to, const float* from, const int* index, size_t n) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) { to[i] = from[index[i]]; }
}

static inline void expert_rows_take_(float* to, const float* from, const int* index, size_t n, const Device* dev) {
    if (n == 0) { return; }
    expert_rows_take_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(to, from, index, n);
    cudaCheck(cudaGetLastError());
}

static inline void expert_rows_weights(float* row_weight, const float* weights, const ExpertRows* r,
                                       const Device* dev) {
    expert_rows_take_(row_weight, weights, r->pair, (size_t)r->N * r->k, dev);
}

static inline void expert_rows_dweights(float* dweights, const float* drow_weight, const ExpertRows* r,
                                        const Device* dev) {
    expert_rows_take_(dweights, drow_weight, r->slot, (size_t)r->N * r->k, dev);
}
#endif
#endif  // LLMC_EXPERT_ROWS_H
