/*
Softmax over the vocabulary and the cross entropy of the target.
    logits, probs (N, Vp), the first V columns count; probs may be logits: in place
    targets (N)  negative = not counted
    losses (N)  -log probs[target], 0 where the target is not counted
Backward: dlogits = (probs - [column == target]) * dloss, written; a row that is not counted and the columns V..Vp-1 are
0. dlogits may be probs. dloss is 1 / (targets counted in the whole update), the same for every row.
crossentropy_fused is both in one: logits become dlogits in place, and probabilities are never stored; without the
gradient, for validation, logits stay as they are. crossentropy_losses_sum: the sum of N losses, to where the device can
read it.
The same of rows whose columns lie in several parts, each on a rank (--tp, models/vocabulary.h). Of its part, the V
columns from number `first` on in rows of Vp, a rank knows, in a CrossEntropyRow for each position,
    crossentropy_part_begin   the largest logit, and the target's where it has that
    crossentropy_part_join    of all parts (P, N): those of the whole row
    crossentropy_part_add     its exponentials, in place of the logits, added to the sum of the parts before; in order
                              of parts. Where CROSSENTROPY_CHAINS is 0 there is none: begin and join have made the sum
    crossentropy_part_end     losses (N), on every rank; with the gradient dlogits in place of what add has left
What P parts give are the bits of one; what becomes of a row that is not counted before the end is left open.
Cost:   C: three passes over rows of 4*V bytes, which fit in the second cache, and one exp per column, 0.7 ns with
        AVX-512. CUDA: memory bound. Fused moves 2*N*Vp elements, 4 bytes a logit in bf16 (loss alone: half of it): a
        block keeps its row in shared memory, which two rows of 57,600 columns fit into on an H100 or H200, and sends
        for all of it at once. Columns beyond that are read twice, the second time from L2 if it has them. H200,
        2026-11-28, in a bench: N 16384, Vp 50304 in 0.83 ms, 4.0 TB/s of a copy's 4.2 (1.05 ms when the row came from
        L2 the second time, 0.87 with kernel_exp). Judge it in GB/s.
Error:  the sum of V exponentials is a plain chain: relative error <= V * 2^-24, found 1e-5 at V = 50257.
        Fast kernels, against exact arithmetic on the same logits, d = max - logit: an exponential is off by (3 + 2 d)
        2^-23 of itself (hardware exp: 2 + 1.2 d, CUDA guide; the difference rounds, too), below 2^-126 by all of it.
        Their sum by the mean of that, where the mean of d is at most log V, and 96 * 2^-23 for adding and joining:
        1.5e-5 at V = 50257. A probability is off by both, and a loss by as much as its probability of itself. Stored in
        bf16: 2^-8 of itself more.
Order:  max from -10000, then the sum of exp(logit - max) chains over columns from 0, then every column is divided by
        it. crossentropy_losses_sum chains over positions from 0. Fast kernels: each thread sums its columns online,
        then a fixed tree; sums of parts join in their order.
Source: sums online: Milakov & Gimelshein 2018, arXiv:1805.02867; derived in doc/crossentropy.md. Slower and faster
        kernels: dev/cuda/crossentropy.cu
*/
#ifndef LLMC_CROSSENTROPY_H
#define LLMC_CROSSENTROPY_H
#include "../core/device.h"  // Device
#include "../core/fmath.h"   // fm_exp, fm_log
#include "../core/kernel.h"  // row_add, row_max, Pack
#include "../core/mma.h"     // in a CUDA build: cp_async_16, cp_async_commit, cp_async_wait
#include "../core/vec.h"     // v_load_columns: rows of one column side by side

// of a position, of the columns seen so far
typedef struct {
    float max, sum;  // of exp(logit - max)
    float target;    // its logit; -INFINITY: it is in another part
} CrossEntropyRow;

#if defined(__CUDACC__) && !defined(EXACT)
#define CROSSENTROPY_CHAINS 0
#else
#define CROSSENTROPY_CHAINS 1
#endif

// ---- plain C: read this first; it defines every bit ----

static inline void crossentropy_softmax_ref(float* probs, const float* logits, int V, int Vp) {
    float max = -10000.0f, sum = 0.0f;
    for (int v = 0; v < V; v++) { max = logits[v] > max ? logits[v] : max; }
    for (int v = 0; v < V; v++) {
        probs[v] = fm_exp(logits[v] - max);
        sum += probs[v];
    }
    for (int v = 0; v < V; v++) { probs[v] /= sum; }
    for (int v = V; v < Vp; v++) { probs[v] = 0.0f; }
}

static inline void crossentropy_forward_ref(float* losses, float* probs, const float* logits, const int* targets, int N,
                                            int V, int Vp) {
    for (int n = 0; n < N; n++) {
        size_t row = (size_t)n * Vp;
        crossentropy_softmax_ref(probs + row, logits + row, V, Vp);
        losses[n] = targets[n] < 0 ? 0.0f : -fm_log(probs[row + targets[n]]);
    }
}

static inline void crossentropy_backward_ref(float* dlogits, const float* probs, const int* targets, float dloss, int N,
                                             int V, int Vp) {
    for (int n = 0; n < N; n++) {
        for (int v = 0; v < Vp; v++) {
            size_t i = (size_t)n * Vp + v;
            dlogits[i] = v >= V || targets[n] < 0 ? 0.0f : (probs[i] - (v == targets[n] ? 1.0f : 0.0f)) * dloss;
        }
    }
}

// forward and backward in place; without the gradient the logits are only read
static inline void crossentropy_fused_ref(float* losses, float* logits, const int* targets, float dloss,
                                          int with_gradient, int N, int V, int Vp) {
    if (with_gradient) {
        crossentropy_forward_ref(losses, logits, logits, targets, N, V, Vp);
        crossentropy_backward_ref(logits, logits, targets, dloss, N, V, Vp);
        return;
    }
    for (int n = 0; n < N; n++) {
        const float* x = logits + (size_t)n * Vp;
        float max = -10000.0f, sum = 0.0f;
        for (int v = 0; v < V; v++) { max = x[v] > max ? x[v] : max; }
        for (int v = 0; v < V; v++) { sum += fm_exp(x[v] - max); }
        losses[n] = targets[n] < 0 ? 0.0f : -fm_log(fm_exp(x[targets[n]] - max) / sum);
    }
}

// ---- in parts: the columns first .. first + V - 1 ----

static inline void crossentropy_part_begin_ref(CrossEntropyRow* rows, const float* logits, const int* targets,
                                               int first, int N, int V, int Vp) {
    for (int n = 0; n < N; n++) {
        const float* x = logits + (size_t)n * Vp;
        const int target = targets[n] - first;
        CrossEntropyRow row = {-10000.0f, 0.0f, target >= 0 && target < V ? x[target] : -INFINITY};
        for (int v = 0; v < V; v++) { row.max = x[v] > row.max ? x[v] : row.max; }
        rows[n] = row;
    }
}

static inline void crossentropy_part_join_ref(CrossEntropyRow* rows, const CrossEntropyRow* parts, int P, int N) {
    for (int n = 0; n < N; n++) {
        CrossEntropyRow row = parts[n];
        for (int p = 1; p < P; p++) {
            const CrossEntropyRow other = parts[(size_t)p * N + n];
            row.max = other.max > row.max ? other.max : row.max;
            row.target = other.target > row.target ? other.target : row.target;
        }
        rows[n] = row;
    }
}

static inline void crossentropy_part_add_ref(CrossEntropyRow* rows, float* logits, int N, int V, int Vp) {
    for (int n = 0; n < N; n++) {
        float* x = logits + (size_t)n * Vp;
        for (int v = 0; v < V; v++) {
            x[v] = fm_exp(x[v] - rows[n].max);
            rows[n].sum += x[v];
        }
    }
}

static inline void crossentropy_part_end_ref(float* losses, float* logits, const CrossEntropyRow* rows,
                                             const int* targets, int first, float dloss, int with_gradient, int N,
                                             int V, int Vp) {
    for (int n = 0; n < N; n++) {
        const CrossEntropyRow row = rows[n];
        float* x = logits + (size_t)n * Vp;
        losses[n] = targets[n] < 0 ? 0.0f : -fm_log(fm_exp(row.target - row.max) / row.sum);
        for (int v = 0; with_gradient && v < Vp; v++) {
            const float p = v < V ? x[v] / row.sum : 0.0f;
            x[v] = v >= V || targets[n] < 0 ? 0.0f : (p - (first + v == targets[n] ? 1.0f : 0.0f)) * dloss;
        }
    }
}

static inline void crossentropy_losses_sum_ref(float* sum, const float* losses, int N) {
    float total = 0.0f;
    for (int n = 0; n < N; n++) { total += losses[n]; }
    *sum = total;
}

#ifndef __CUDACC__  // ---- fast C: the chain of a row cannot be split, so VLANES rows run theirs side by side ----

static inline float crossentropy_max_(const float* logits, int V) {
    float lane[16];
    for (int i = 0; i < 16; i++) { lane[i] = -10000.0f; }
    int v = 0;
    for (; v + 16 <= V; v += 16) {  // a maximum has no rounding: its order is free
        #pragma omp simd
        for (int i = 0; i < 16; i++) { lane[i] = logits[v + i] > lane[i] ? logits[v + i] : lane[i]; }
    }
    for (; v < V; v++) { lane[0] = logits[v] > lane[0] ? logits[v] : lane[0]; }
    for (int i = 1; i < 16; i++) { lane[0] = lane[i] > lane[0] ? lane[i] : lane[0]; }
    return lane[0];
}

// probs = exp(logits - max) for VLANES rows, and their sums, which go on from what they are
static inline void crossentropy_exponentials_(float* probs, const float* logits, const float* max, float* sums, int V,
                                              int Vp) {
    const int width = 4 * VLANES;  // columns at a time: all rows' share of them stays in the first cache
    vfloat sum = v_load(sums), columns[VLANES];
    for (int v0 = 0; v0 < V; v0 += width) {
        int n_valid = V - v0 < width ? V - v0 : width;
        for (int r = 0; r < VLANES; r++) {
            const float* x = logits + (size_t)r * Vp + v0;
            float *p = probs + (size_t)r * Vp + v0, row_max = max[r];
            #pragma omp simd
            for (int i = 0; i < n_valid; i++) { p[i] = fm_exp(x[i] - row_max); }
        }
        int v = v0;
        for (; v + VLANES <= v0 + n_valid; v += VLANES) {
            v_load_columns(columns, probs + v, (size_t)Vp);
            for (int i = 0; i < VLANES; i++) { sum += columns[i]; }
        }
        for (; v < v0 + n_valid; v++) {
            for (int r = 0; r < VLANES; r++) { sum[r] += probs[(size_t)r * Vp + v]; }
        }
    }
    v_store(sums, sum);
}

// VLANES rows, or fewer at the end
static inline void crossentropy_rows_(float* losses, float* probs, const float* logits, const int* targets, int n,
                                      int V, int Vp) {
    float max[VLANES], sums[VLANES];
    if (n < VLANES) {
        crossentropy_forward_ref(losses, probs, logits, targets, n, V, Vp);
        return;
    }
    for (int r = 0; r < VLANES; r++) { max[r] = crossentropy_max_(logits + (size_t)r * Vp, V), sums[r] = 0.0f; }
    crossentropy_exponentials_(probs, logits, max, sums, V, Vp);
    for (int r = 0; r < VLANES; r++) {
        float *p = probs + (size_t)r * Vp, sum = sums[r];
        int target = targets[r];
        #pragma omp simd
        for (int v = 0; v < V; v++) { p[v] /= sum; }
        memset(p + V, 0, sizeof(float) * (Vp - V));
        losses[r] = target < 0 ? 0.0f : -fm_log(p[target]);
    }
}

static inline void crossentropy_forward(float* losses, float* probs, const float* logits, const int* targets, int N,
                                        int V, int Vp, const Device* dev) {
    (void)dev;
    #pragma omp parallel for schedule(dynamic)
    for (int first = 0; first < N; first += VLANES) {
        size_t row = (size_t)first * Vp;
        int n = N - first < VLANES ? N - first : VLANES;
        crossentropy_rows_(losses + first, probs + row, logits + row, targets + first, n, V, Vp);
    }
}

static inline void crossentropy_backward(float* dlogits, const float* probs, const int* targets, float dloss, int N,
                                         int V, int Vp, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float* p = probs + (size_t)n * Vp;
        float* d = dlogits + (size_t)n * Vp;
        int target = targets[n];
        if (target < 0) {
            memset(d, 0, sizeof(float) * Vp);
            continue;
        }
        float dtarget = (p[target] - 1.0f) * dloss;  // before the row is overwritten
        #pragma omp simd
        for (int v = 0; v < V; v++) { d[v] = p[v] * dloss; }
        d[target] = dtarget;
        memset(d + V, 0, sizeof(float) * (Vp - V));
    }
}

static inline void crossentropy_fused(float* losses, float* logits, const int* targets, float dloss, int with_gradient,
                                      int N, int V, int Vp, const Device* dev) {
    if (with_gradient) {
        crossentropy_forward(losses, logits, logits, targets, N, V, Vp, dev);
        crossentropy_backward(logits, logits, targets, dloss, N, V, Vp, dev);
        return;
    }
    const size_t n_scratch = (size_t)VLANES * Vp;  // probabilities of the rows that a thread has in hand
    float* scratch = device_workspace(dev, sizeof(float) * n_scratch * dev->n_threads);
    #pragma omp parallel for schedule(dynamic)
    for (int first = 0; first < N; first += VLANES) {
        int n = N - first < VLANES ? N - first : VLANES;
        float* probs = scratch + thread_number() * n_scratch;
        crossentropy_rows_(losses + first, probs, logits + (size_t)first * Vp, targets + first, n, V, Vp);
    }
}

// ---- in parts ----

static inline void crossentropy_part_begin(CrossEntropyRow* rows, const float* logits, const int* targets, int first,
                                           int N, int V, int Vp, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float* x = logits + (size_t)n * Vp;
        const int target = targets[n] - first;
        const CrossEntropyRow row = {crossentropy_max_(x, V), 0.0f, target >= 0 && target < V ? x[target] : -INFINITY};
        rows[n] = row;
    }
}

static inline void crossentropy_part_join(CrossEntropyRow* rows, const CrossEntropyRow* parts, int P, int N,
                                          const Device* dev) {
    (void)dev;
    crossentropy_part_join_ref(rows, parts, P, N);
}

static inline void crossentropy_part_add(CrossEntropyRow* rows, float* logits, int N, int V, int Vp,
                                         const Device* dev) {
    (void)dev;
    #pragma omp parallel for schedule(dynamic)
    for (int first = 0; first < N; first += VLANES) {
        float *x = logits + (size_t)first * Vp, max[VLANES], sums[VLANES];
        CrossEntropyRow* row = rows + first;
        if (N - first < VLANES) {
            crossentropy_part_add_ref(row, x, N - first, V, Vp);
            continue;
        }
        for (int r = 0; r < VLANES; r++) { max[r] = row[r].max, sums[r] = row[r].sum; }
        crossentropy_exponentials_(x, x, max, sums, V, Vp);
        for (int r = 0; r < VLANES; r++) { row[r].sum = sums[r]; }
    }
}

static inline void crossentropy_part_end(float* losses, float* logits, const CrossEntropyRow* rows, const int* targets,
                                         int first, float dloss, int with_gradient, int N, int V, int Vp,
                                         const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        float *x = logits + (size_t)n * Vp, sum = rows[n].sum;
        const int target = targets[n] - first, is_here = target >= 0 && target < V, counts = targets[n] >= 0;
        losses[n] = counts ? -fm_log(fm_exp(rows[n].target - rows[n].max) / sum) : 0.0f;
        if (!with_gradient) { continue; }
        const float dtarget = is_here ? (x[target] / sum - 1.0f) * dloss : 0.0f;  // before the row is overwritten
        if (!counts) { memset(x, 0, sizeof(float) * V); }
        #pragma omp simd
        for (int v = 0; v < (counts ? V : 0); v++) { x[v] = x[v] / sum * dloss; }
        if (is_here) { x[target] = dtarget; }
        memset(x + V, 0, sizeof(float) * (Vp - V));
    }
}

static inline void crossentropy_losses_sum(float* sum, const float* losses, int N, const Device* dev) {
    (void)dev;
    crossentropy_losses_sum_ref(sum, losses, N);
}

#else  // ---- CUDA: one block per row, in EXACT builds a single warp, since the sum is a chain ----

#ifdef EXACT
enum { CROSSENTROPY_THREADS = WARP };  // at most
#else
enum { CROSSENTROPY_THREADS = 1024 };
#endif

struct Softmax { float max, sum; };  // of a row: its probabilities are exp(x - max) / sum

__device__ inline float crossentropy_exp_(float x, float max) {
#ifdef EXACT
    return kernel_exp(x - max);
#else
    return kernel_exp2((x - max) * LOG2_E);
#endif
}

// e: the exponential. A target's is made by kernel_exp, for its loss is to be finite down to 2^-149
__device__ inline float crossentropy_prob_(float e, Softmax row) {
#ifdef EXACT
    return e / row.sum;
#else
    return e * (1.0f / row.sum);  // the compiler takes the reciprocal once per row
#endif
}

#ifdef EXACT
// block is (32)
template <typename X>
__device__ inline float crossentropy_row_max_(const X* x, int V) {
    float max = -10000.0f;
    // fmaxf of a NaN and a number is the number
    for (int v = threadIdx.x; v < V; v += WARP) { max = fmaxf(max, to_float(x[v])); }
    return row_max(max);
}

template <int W, typename X>
__device__ inline Softmax crossentropy_softmax_(const X* x, int V, const Pack<X, W>*, int) {
    Softmax row = {crossentropy_row_max_(x, V), 0.0f};
    const int lane = threadIdx.x;
    for (int v = lane; v - lane < V; v += WARP) {
        row.sum = row_add(row.sum, v < V ? kernel_exp(to_float(x[v]) - row.max) : 0.0f);
    }
    return row;
}
#else
// the softmax of the columns of all 32 lanes, from each lane's own
__device__ inline Softmax crossentropy_join_lanes_(Softmax s) {
    const float max = row_max(s.max);
    const Softmax all = {max, lane_sum(s.sum * crossentropy_exp_(s.max, max))};
    return all;
}

// what a thread has, and W columns more: one pass finds the maximum and the sum, which shrinks when the maximum grows
template <int W>
__device__ inline Softmax crossentropy_add_(Softmax s, const float (&x)[W]) {
    float max = s.max;
    for (int i = 0; i < W; i++) { max = fmaxf(max, x[i]); }  // of a NaN and a number: the number
    s.sum *= crossentropy_exp_(s.max, max);
    for (int i = 0; i < W; i++) { s.sum += crossentropy_exp_(x[i], max); }
    s.max = max;
    return s;
}

// Block is a multiple of 32, at most 32 * 32; every thread gets the row's. The first n_kept columns, whole packs, are
// on their way to `kept`; the others are read while these come. A thread has the packs that it asked for itself
template <int W, typename X>
__device__ inline Softmax crossentropy_softmax_(const X* x, int V, const Pack<X, W>* kept, int n_kept) {
    __shared__ Softmax of_warp[WARP];
    const Softmax nothing = {-10000.0f, 0.0f};
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP, whole = V / W * W;
    Softmax s = nothing;
    for (int v = n_kept + W * threadIdx.x; v < whole; v += W * blockDim.x) {
        s = crossentropy_add_(s, load_floats<W>(x + v).x);
    }
    for (int v = whole + threadIdx.x; v < V; v += blockDim.x) {
        const float column[1] = {to_float(x[v])};
        s = crossentropy_add_(s, column);
    }
    cp_async_wait<0>();
    for (int v = W * threadIdx.x; v < n_kept; v += W * blockDim.x) {
        s = crossentropy_add_(s, load_floats<W>(kept[v / W].x).x);
    }
    s = crossentropy_join_lanes_(s);
    if (lane == 0) { of_warp[warp] = s; }
    __syncthreads();
    return crossentropy_join_lanes_(lane < n_warps ? of_warp[lane] : nothing);
}
#endif

enum { WRITE_NOTHING, WRITE_PROBS, WRITE_GRADIENT };

// grid is (N). Shared memory: n_kept columns, whole packs
template <int WRITE, int W, typename X>
__global__ __launch_bounds__(CROSSENTROPY_THREADS) void crossentropy_kernel(float* losses, X* out, const X* logits,
                                                                            const int* targets, float dloss, int V,
                                                                            int Vp, int n_kept) {
    extern __shared__ float4 crossentropy_kept[];
    Pack<X, W>* kept = reinterpret_cast<Pack<X, W>*>(crossentropy_kept);
    const int n = gridDim.x - 1 - blockIdx.x, target = targets[n];  // the last rows first: they are still in L2
    const int n_columns = WRITE != WRITE_PROBS && target < 0 ? 0 : V;  // a row that is not counted is not read
    const int whole = n_columns / W * W, stride = W * blockDim.x;
    const X* x = logits + (size_t)n * Vp;
    X* y = out + (size_t)n * Vp;
    n_kept = n_kept < whole ? n_kept : whole;
    for (int v = W * threadIdx.x; v < n_kept; v += stride) { cp_async_16(kept + v / W, x + v); }
    cp_async_commit();
    const Softmax row = crossentropy_softmax_<W>(x, n_columns, kept, n_kept);
    // out may be logits: one thread reads and writes the target's column
    const int owner = target < 0 ? 0 : target < whole ? target % stride / W : target - whole;
    const int is_owner = (int)threadIdx.x == owner;
    float p_target = 0.0f;
    if (is_owner && target >= 0) { p_target = crossentropy_prob_(kernel_exp(to_float(x[target]) - row.max), row); }
    if (is_owner) { losses[n] = target < 0 ? 0.0f : -fm_log(p_target); }
    if (WRITE == WRITE_NOTHING) { return; }
    for (int v = W * threadIdx.x; v < whole; v += stride) {
        Pack<X, W> pack = v < n_kept ? kept[v / W] : pack_load<W>(x + v);
        for (int i = 0; i < W; i++) {
            const float p = crossentropy_prob_(crossentropy_exp_(to_float(pack.x[i]), row.max), row);
            pack.x[i] = from_float<X>(WRITE == WRITE_GRADIENT ? p * dloss : p);
        }
        pack_store(y + v, pack);
    }
    for (int v = whole + threadIdx.x; v < Vp; v += blockDim.x) {
        const float p = v < n_columns ? crossentropy_prob_(crossentropy_exp_(to_float(x[v]), row.max), row) : 0.0f;
        y[v] = from_float<X>(WRITE == WRITE_GRADIENT ? p * dloss : p);
    }
    if (WRITE == WRITE_GRADIENT && is_owner && target >= 0) { y[target] = from_float<X>((p_target - 1.0f) * dloss); }
}

// grid is (N)
template <int W, typename X>
__global__ void crossentropy_backward_kernel(X* dlogits, const X* probs, const int* targets, float dloss, int V,
                                             int Vp) {
    const size_t row = (size_t)blockIdx.x * Vp;
    const int target = targets[blockIdx.x], n_columns = target < 0 ? 0 : V;
    for (int v = W * threadIdx.x; v < Vp; v += W * blockDim.x) {
        Pack<X, W> pack = pack_load<W>(probs + row + v);
        for (int i = 0; i < W; i++) {
            const float d = (to_float(pack.x[i]) - (v + i == target ? 1.0f : 0.0f)) * dloss;
            pack.x[i] = from_float<X>(v + i < n_columns ? d : 0.0f);
        }
        pack_store(dlogits + row + v, pack);
    }
}

// ---- in parts ----

// grid is (N)
template <int W, typename X>
__global__ __launch_bounds__(CROSSENTROPY_THREADS) void crossentropy_part_begin_kernel(
    CrossEntropyRow* rows, const X* logits, const int* targets, int first, int V, int Vp) {
    const int n = blockIdx.x, target = targets[n] - first, n_columns = targets[n] < 0 ? 0 : V;
    const X* x = logits + (size_t)n * Vp;
#ifdef EXACT
    const Softmax row = {crossentropy_row_max_(x, n_columns), 0.0f};
#else
    const Softmax row = crossentropy_softmax_<W>(x, n_columns, (const Pack<X, W>*)NULL, 0);
#endif
    if (threadIdx.x > 0) { return; }
    const int is_here = target >= 0 && target < n_columns;
    const CrossEntropyRow found = {row.max, row.sum, is_here ? to_float(x[target]) : -INFINITY};
    rows[n] = found;
}

// a thread for each row
static __global__ void crossentropy_part_join_kernel(CrossEntropyRow* rows, const CrossEntropyRow* parts, int P,
                                                     int N) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    CrossEntropyRow row = parts[n];
    for (int p = 1; p < P; p++) {
        const CrossEntropyRow other = parts[(size_t)p * N + n];
        const float max = other.max > row.max ? other.max : row.max;
#if !CROSSENTROPY_CHAINS
        row.sum = row.sum * kernel_exp(row.max - max) + other.sum * kernel_exp(other.max - max);
#endif
        row.max = max;
        row.target = other.target > row.target ? other.target : row.target;
    }
    rows[n] = row;
}

#if CROSSENTROPY_CHAINS
// grid is (N), block is (32)
template <typename X>
__global__ void crossentropy_part_add_kernel(CrossEntropyRow* rows, X* logits, int V, int Vp) {
    X* x = logits + (size_t)blockIdx.x * Vp;
    const CrossEntropyRow row = rows[blockIdx.x];
    const int lane = threadIdx.x;
    float sum = row.sum;
    for (int v = lane; v - lane < V; v += WARP) {
        const float e = v < V ? kernel_exp(to_float(x[v]) - row.max) : 0.0f;
        if (v < V) { x[v] = from_float<X>(e); }
        sum = row_add(sum, e);
    }
    if (lane == 0) { rows[blockIdx.x].sum = sum; }
}
#endif

// of what stands in place of a logit
__device__ inline float crossentropy_part_prob_(float x, Softmax row) {
#if CROSSENTROPY_CHAINS
    return x / row.sum;  // its exponential
#else
    return crossentropy_prob_(crossentropy_exp_(x, row.max), row);
#endif
}

// grid is (N)
template <int W, typename X>
__global__ __launch_bounds__(CROSSENTROPY_THREADS) void crossentropy_part_end_kernel(
    float* losses, X* logits, const CrossEntropyRow* rows, const int* targets, int first, float dloss,
    int with_gradient, int V, int Vp) {
    const int n = blockIdx.x, target = targets[n] - first, n_columns = targets[n] < 0 ? 0 : V;
    const Softmax row = {rows[n].max, rows[n].sum};
    X* x = logits + (size_t)n * Vp;
    const float p_target = crossentropy_prob_(kernel_exp(rows[n].target - row.max), row);
    if (threadIdx.x == 0) { losses[n] = targets[n] < 0 ? 0.0f : -fm_log(p_target); }
    for (int v = W * threadIdx.x; with_gradient && v < Vp; v += W * blockDim.x) {
        Pack<X, W> pack = pack_load<W>(x + v);
        for (int i = 0; i < W; i++) {
            const float p = v + i == target ? p_target - 1.0f : crossentropy_part_prob_(to_float(pack.x[i]), row);
            pack.x[i] = from_float<X>(v + i < n_columns ? p * dloss : 0.0f);
        }
        pack_store(x + v, pack);
    }
}

// block is a multiple of 32, at most CROSSENTROPY_THREADS; grid is (1)
static __global__ void crossentropy_losses_sum_kernel(float* sum, const float* losses, int N) {
    __shared__ float of_warp[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP;
    float s = 0.0f;
    for (int n = threadIdx.x; n - lane < N; n += blockDim.x) { s = row_add(s, n < N ? losses[n] : 0.0f); }
    s = row_total(s);
    if (lane == 0) { of_warp[warp] = s; }
    __syncthreads();
    s = lane_sum(lane < n_warps ? of_warp[lane] : 0.0f);  // of one warp: + 0 changes nothing
    if (threadIdx.x == 0) { *sum = s; }
}

// threads of a block that share a row of n_packs: the order of its sum follows from the shape alone
static inline int crossentropy_threads_(int64_t n_packs) {
    return n_packs < CROSSENTROPY_THREADS ? (int)ceil_div(n_packs, WARP) * WARP : CROSSENTROPY_THREADS;
}

#ifndef CROSSENTROPY_KEPT           // test_crossentropy.c: less, so that its rows are long ones
#define CROSSENTROPY_KEPT (1 << 30)  // bytes of shared memory of a block; at most what there is
#endif

// columns of a row that its block keeps, multiples of W: all, or as many as leave room for another block
template <int WRITE, typename X>
static inline int crossentropy_kept_columns_(int V, int W, const Device* dev) {
    const int half = dev->most_shared / 2 - 1536;  // 1 KiB of each has the system; the sums of warps have 1 KiB, too,
                                                   // where there are wide tiles (wide_tile.h)
    const int room = (half < CROSSENTROPY_KEPT ? half : CROSSENTROPY_KEPT) / (int)sizeof(X);
    if (CROSSENTROPY_CHAINS || WRITE == WRITE_NOTHING) { return 0; }
    return (V < room ? V : room) / W * W;
}

// packs of 16 bytes where rows divide into them
template <int WRITE, typename X>
static inline void crossentropy_launch_(float* losses, X* out, const X* logits, const int* targets, float dloss,
                                        int N, int V, int Vp, const Device* dev) {
    const int W = pack_width<X>();
    if (pack_fits(logits, Vp) && pack_fits(out, Vp)) {
        const int n_kept = crossentropy_kept_columns_<WRITE, X>(V, W, dev), n_bytes = n_kept * (int)sizeof(X);
        cudaCheck(cudaFuncSetAttribute(crossentropy_kernel<WRITE, W, X>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       n_bytes));
        crossentropy_kernel<WRITE, W><<<N, crossentropy_threads_(Vp / W), n_bytes, dev->stream>>>(
            losses, out, logits, targets, dloss, V, Vp, n_kept);
    } else {
        crossentropy_kernel<WRITE, 1>
            <<<N, crossentropy_threads_(Vp), 0, dev->stream>>>(losses, out, logits, targets, dloss, V, Vp, 0);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void crossentropy_forward(float* losses, X* probs, const X* logits, const int* targets, int N, int V,
                                        int Vp, const Device* dev) {
    crossentropy_launch_<WRITE_PROBS>(losses, probs, logits, targets, 0.0f, N, V, Vp, dev);
}

template <typename X>
static inline void crossentropy_backward(X* dlogits, const X* probs, const int* targets, float dloss, int N, int V,
                                         int Vp, const Device* dev) {
    const int W = pack_width<X>();
    if (pack_fits(dlogits, Vp) && pack_fits(probs, Vp)) {
        crossentropy_backward_kernel<W>
            <<<N, crossentropy_threads_(Vp / W), 0, dev->stream>>>(dlogits, probs, targets, dloss, V, Vp);
    } else {
        crossentropy_backward_kernel<1>
            <<<N, crossentropy_threads_(Vp), 0, dev->stream>>>(dlogits, probs, targets, dloss, V, Vp);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void crossentropy_fused(float* losses, X* logits, const int* targets, float dloss, int with_gradient,
                                      int N, int V, int Vp, const Device* dev) {
    if (with_gradient) {
        crossentropy_launch_<WRITE_GRADIENT, X>(losses, logits, logits, targets, dloss, N, V, Vp, dev);
    } else {
        crossentropy_launch_<WRITE_NOTHING, X>(losses, logits, logits, targets, dloss, N, V, Vp, dev);
    }
}

template <typename X>
static inline void crossentropy_part_begin(CrossEntropyRow* rows, const X* logits, const int* targets, int first, int N,
                                           int V, int Vp, const Device* dev) {
    const int W = pack_width<X>();
    if (N == 0) { return; }
    if (pack_fits(logits, Vp)) {
        crossentropy_part_begin_kernel<W>
            <<<N, crossentropy_threads_(Vp / W), 0, dev->stream>>>(rows, logits, targets, first, V, Vp);
    } else {
        crossentropy_part_begin_kernel<1>
            <<<N, crossentropy_threads_(Vp), 0, dev->stream>>>(rows, logits, targets, first, V, Vp);
    }
    cudaCheck(cudaGetLastError());
}

static inline void crossentropy_part_join(CrossEntropyRow* rows, const CrossEntropyRow* parts, int P, int N,
                                          const Device* dev) {
    if (N == 0) { return; }
    crossentropy_part_join_kernel<<<(unsigned)ceil_div(N, 128), 128, 0, dev->stream>>>(rows, parts, P, N);
    cudaCheck(cudaGetLastError());
}

#if CROSSENTROPY_CHAINS
template <typename X>
static inline void crossentropy_part_add(CrossEntropyRow* rows, X* logits, int N, int V, int Vp, const Device* dev) {
    if (N == 0) { return; }
    crossentropy_part_add_kernel<<<N, WARP, 0, dev->stream>>>(rows, logits, V, Vp);
    cudaCheck(cudaGetLastError());
}
#endif

template <typename X>
static inline void crossentropy_part_end(float* losses, X* logits, const CrossEntropyRow* rows, const int* targets,
                                         int first, float dloss, int with_gradient, int N, int V, int Vp,
                                         const Device* dev) {
    const int W = pack_width<X>();
    if (N == 0) { return; }
    if (pack_fits(logits, Vp)) {
        crossentropy_part_end_kernel<W><<<N, crossentropy_threads_(Vp / W), 0, dev->stream>>>(
            losses, logits, rows, targets, first, dloss, with_gradient, V, Vp);
    } else {
        crossentropy_part_end_kernel<1><<<N, crossentropy_threads_(Vp), 0, dev->stream>>>(
            losses, logits, rows, targets, first, dloss, with_gradient, V, Vp);
    }
    cudaCheck(cudaGetLastError());
}

static inline void crossentropy_losses_sum(float* sum, const float* losses, int N, const Device* dev) {
    crossentropy_losses_sum_kernel<<<1, crossentropy_threads_(N), 0, dev->stream>>>(sum, losses, N);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_CROSSENTROPY_H
