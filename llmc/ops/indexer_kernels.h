/*
CUDA kernels of indexer.h, for any sizes and types. The products of a thread are chains in registers, so that EXACT
builds have the plain loop's bits; other builds take flash_index.h for scores where it fits.
    scores      a block has 64 positions and 64 entries, and goes from head to head
    topk        a warp has a position: four histograms of 8 bits of its scores' keys find the smallest that is chosen
    loss        a block has a position, a thread an entry that it chose and 16 heads; then a warp has its row
    dq, da      a block has a position and 16 heads: threads make slopes of 128 entries, then each sums a channel
    dk          a block has an entry and its list (inverse_lists.h), a thread a channel
No atomics on floats; those on whole numbers have no order. ptxas of CUDA 13.0 for sm_90: 128 registers at most, no
spills. Not measured on a GPU.
*/
#ifndef LLMC_INDEXER_KERNELS_H
#define LLMC_INDEXER_KERNELS_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // to_float, from_float, row_add, row_madd, row_total, row_max
#include "flash_index.h"     // flash_index_fits, flash_index_scores
#include "gemm.h"            // gemm_terms_, gemm_load_
#include "indexer.h"         // IndexShape, IndexRow, index_relu_one
#include <assert.h>

// ---- scores of all that is seen ----

#ifndef SIMT
enum { INDEX_BUFFER = 1 << 24 };  // scores that are kept at a time, about
#else
enum { INDEX_BUFFER = 1 << 12 };
#endif
enum {
    INDEX_CHOOSERS = 8,       // positions of a block that chooses, one for each warp
    INDEX_DIGITS = 256,       // of 8 bits
    INDEX_THREADS = 128,      // entries or channels at a time
    INDEX_GROUP = 16          // heads at a time
};

// scores (positions from n_first on, n_columns) of the N positions from there on. Positions that choose all they see
// need none, but where `all` is set. block is (GEMM_THREADS), grid (tiles of positions, tiles of entries)
template <typename X>
__global__ void __launch_bounds__(GEMM_THREADS)
index_scores_kernel(float* scores, int n_columns, const X* q, const X* k, const float* a, IndexShape s, int n_first,
                    int N, int all, const int* t, const int* first_entry, int r) {
    __shared__ alignas(16) float q_tile[GEMM_TILE_K][GEMM_TILE_ROW];
    __shared__ alignas(16) float k_tile[GEMM_TILE_K][GEMM_TILE_ROW];
    __shared__ int seen[GEMM_TILE], first[GEMM_TILE];
    const int row = blockIdx.x * GEMM_TILE, e = blockIdx.y * GEMM_TILE, n_rows = min(GEMM_TILE, N - row);
    const int m = gemm_first_row_(), n = gemm_first_column_();
    if ((int)threadIdx.x < n_rows) {
        const int position = n_first + row + (int)threadIdx.x, sees = ENTRIES_SEEN(t[position], r);
        assert(sees <= n_columns);
        seen[threadIdx.x] = all || sees > s.topk ? sees : 0;
        first[threadIdx.x] = first_entry[position];
    }
    __syncthreads();
    for (int begin = 0, end = 0; begin < n_rows; begin = end) {  // rows whose documents begin at the same entry
        int most = 0;
        for (; end < n_rows && first[end] == first[begin]; end++) { most = max(most, seen[end]); }
        if (most <= e) { continue; }
        const size_t head = (size_t)(n_first + row + begin) * s.heads;
        float score[GEMM_SUMS][GEMM_SUMS] = {};
        for (int h = 0; h < s.heads; h++) {
            float sum[GEMM_SUMS][GEMM_SUMS] = {};
            auto load_q = [&](float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], int c, int n_c) {
                gemm_load_(tile, q + (head + h) * s.dI + c, (size_t)s.heads * s.dI, 1, end - begin, n_c);
            };
            auto load_k = [&](float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], int c, int n_c) {
                gemm_load_(tile, k + (size_t)(first[begin] + e) * s.dI + c, (size_t)s.dI, 1, most - e, n_c);
            };
            gemm_terms_(sum, q_tile, k_tile, load_q, load_k, s.dI);
            for (int i = 0; i < GEMM_SUMS; i++) {
                const float weight = begin + m + i < end ? a[head + (size_t)(m + i) * s.heads + h] : 0.0f;
                for (int j = 0; j < GEMM_SUMS; j++) {
                    score[i][j] = madd(weight, index_relu_one(sum[i][j]), score[i][j]);
                }
            }
        }
        for (int i = 0; i < GEMM_SUMS && begin + m + i < end; i++) {
            float* to = scores + (size_t)(row + begin + m + i) * n_columns;
            for (int j = 0; j < GEMM_SUMS && e + n + j < seen[begin + m + i]; j++) { to[e + n + j] = score[i][j]; }
        }
    }
}

// ---- the topk of a row, by a warp. Digit by digit, from the highest, it finds the smallest key that is chosen:
// a histogram of the keys that have the digits found so far ----

// unsigned numbers in the order of what scores are compared by
__device__ inline unsigned index_key_(float score) {
    const int bits = __float_as_int(index_rank_one(score));
    return (unsigned)(bits ^ (int)((unsigned)(bits >> 31) >> 1)) ^ 0x80000000u;
}

// the digit of the key that is number `wanted` from the top, which becomes its number among those of this digit
__device__ inline int index_digit_(const int* counts, int* wanted) {
    enum { EACH = INDEX_DIGITS / WARP };
    const int lane = threadIdx.x, top = INDEX_DIGITS - 1 - EACH * lane;  // lane 0 has the highest digits
    int mine = 0, before = 0, digit = top;
    for (int i = 0; i < EACH; i++) { mine += counts[top - i]; }
    before = mine;
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, before, step);
        before += lane >= step ? other : 0;
    }
    const int owner = __ffs((int)__ballot_sync(ALL_LANES, before >= *wanted)) - 1;
    int left = *wanted - (before - mine);
    for (int i = 0; i < EACH - 1 && left > counts[digit]; i++, digit--) { left -= counts[digit]; }
    *wanted = __shfl_sync(ALL_LANES, left, owner);
    return __shfl_sync(ALL_LANES, digit, owner);
}

// the smallest key of the topk; *equals: how many entries of that key are among them
__device__ inline unsigned index_limit_(int* counts, const float* scores, int seen, int topk, int* equals) {
    const int lane = threadIdx.x;
    unsigned limit = 0;
    *equals = topk;
    for (int shift = 24; shift >= 0; shift -= 8) {
        const unsigned known = shift < 24 ? ALL_LANES << (shift + 8) : 0;
        for (int i = lane; i < INDEX_DIGITS; i += WARP) { counts[i] = 0; }
        __syncwarp();
        for (int e = lane; e < seen; e += WARP) {
            const unsigned key = index_key_(scores[e]);
            if ((key & known) == limit) { atomicAdd(&counts[key >> shift & (INDEX_DIGITS - 1)], 1); }
        }
        __syncwarp();
        limit |= (unsigned)index_digit_(counts, equals) << shift;
        __syncwarp();
    }
    return limit;
}

// block is (WARP, INDEX_CHOOSERS); scores (N, n_columns) of positions from n_first on, NULL: all see topk at most
__global__ static void index_choose_kernel(int* chosen, const float* scores, int n_columns, int topk, int n_first,
                                           int N, const int* t, const int* first_entry, int r) {
    __shared__ int counts[INDEX_CHOOSERS][INDEX_DIGITS];
    const int row = blockIdx.x * INDEX_CHOOSERS + threadIdx.y, lane = threadIdx.x;
    if (row >= N) { return; }
    const int n = n_first + row, seen = ENTRIES_SEEN(t[n], r), first = first_entry[n];
    int* to = chosen + (size_t)n * topk;
    if (seen <= topk) {
        for (int j = lane; j < topk; j += WARP) { to[j] = j < seen ? first + j : -1; }
        return;
    }
    const float* from = scores + (size_t)row * n_columns;
    int equals, n_chosen = 0;
    const unsigned limit = index_limit_(counts[threadIdx.y], from, seen, topk, &equals), lower = (1u << lane) - 1;
    for (int e = lane; n_chosen < topk; e += WARP) {
        const unsigned key = e < seen ? index_key_(from[e]) : 0;
        const unsigned equal = __ballot_sync(ALL_LANES, e < seen && key == limit);
        const bool takes = e < seen && (key > limit || (key == limit && __popc(equal & lower) < equals));
        const unsigned taken = __ballot_sync(ALL_LANES, takes);
        if (takes) { to[n_chosen + __popc(taken & lower)] = first + e; }
        n_chosen += __popc(taken);
        equals -= __popc(equal);
    }
}

// scores (N, n_columns) of the N positions from n on
template <typename X>
static inline void index_scores_(float* scores, int n_columns, const X* q, const X* k, const float* a,
                                 const IndexShape* s, int n, int N, int all, const Places* places,
                                 const EntryWindows* w, const Device* dev) {
#ifndef EXACT
    if (flash_index_fits(q, k, s->heads, s->dI)) {
        const FlashIndex f = {s->heads, s->dI, s->topk, n, N, n_columns, all, w->r};
        flash_index_scores(scores, q, k, a, &f, places->t, w->first_entry, dev);
        return;
    }
#endif
    const dim3 grid((unsigned)ceil_div(N, GEMM_TILE), (unsigned)ceil_div(n_columns, GEMM_TILE));
    index_scores_kernel<<<grid, GEMM_THREADS, 0, dev->stream>>>(scores, n_columns, q, k, a, *s, n, N, all, places->t,
                                                                w->first_entry, w->r);
    cudaCheck(cudaGetLastError());
}

// positions whose scores are kept at a time
static inline int index_at_once_(int N, int n_columns) {
    const int64_t room = ceil_div(INDEX_BUFFER, (int64_t)n_columns * GEMM_TILE) * GEMM_TILE;
    return room > N ? N : (int)room;
}

template <typename X>
static inline void index_choose(int* chosen, float* scores, int n_columns, const X* q, const X* k, const float* a,
                                const IndexShape* s, const Places* places, const EntryWindows* w, const Device* dev) {
    const int at_once = scores ? s->N : index_at_once_(s->N, n_columns > 0 ? n_columns : 1);
    const int needs = scores || n_columns > s->topk;
    float* to = scores;
    index_check_(s);
    if (!scores && needs) { to = device_workspace(dev, sizeof(float) * (size_t)at_once * (size_t)n_columns); }
    for (int n = 0; n < s->N; n += at_once) {
        const int N = s->N - n < at_once ? s->N - n : at_once;
        const dim3 block(WARP, INDEX_CHOOSERS);
        if (needs && n_columns > 0) { index_scores_(to, n_columns, q, k, a, s, n, N, scores != NULL, places, w, dev); }
        index_choose_kernel<<<(unsigned)ceil_div(N, INDEX_CHOOSERS), block, 0, dev->stream>>>(
            chosen, to, n_columns, s->topk, n, N, places->t, w->first_entry, w->r);
    }
    cudaCheck(cudaGetLastError());
}

// ---- the loss: a block of threads has a position. A thread has an entry that it chose, or a channel, and
// INDEX_GROUP heads at a time ----

// q of heads h .. h + INDEX_GROUP - 1 to shared memory, (dI, INDEX_GROUP); zeros behind the last head
template <typename X>
__device__ inline void index_load_heads_(float* q_tile, const X* q, int h, int heads, int dI) {
    for (int i = threadIdx.x; i < INDEX_GROUP * dI; i += INDEX_THREADS) {
        const int head = i / dI, c = i % dI;
        q_tile[c * INDEX_GROUP + head] = h + head < heads ? to_float(q[(size_t)(h + head) * dI + c]) : 0.0f;
    }
}

// q k of an entry and all heads of the group
template <int W, typename X>
__device__ inline void index_products_(float (&sum)[INDEX_GROUP], const float* q_tile, const X* k, int dI) {
    for (int h = 0; h < INDEX_GROUP; h++) { sum[h] = 0.0f; }
    for (int c = 0; c < dI; c += W) {
        const Pack<float, W> x = load_floats<W>(k + c);
        #pragma unroll
        for (int i = 0; i < W; i++) {
            const Pack<float, INDEX_GROUP> y = load_floats<INDEX_GROUP>(q_tile + (c + i) * INDEX_GROUP);
            #pragma unroll
            for (int h = 0; h < INDEX_GROUP; h++) { sum[h] = madd(y.x[h], x.x[i], sum[h]); }
        }
    }
}

// scores (N, topk) of what is chosen; block is (INDEX_THREADS), grid (N). shared memory: q of a group
template <int W, typename X>
__global__ void __launch_bounds__(INDEX_THREADS)
index_list_scores_kernel(float* scores, const int* chosen, const X* q, const X* k, const float* a, IndexShape s) {
    extern __shared__ __align__(16) float index_q_tile[];
    const size_t n = blockIdx.x;
    for (int h = 0; h < s.heads; h += INDEX_GROUP) {
        __syncthreads();
        index_load_heads_(index_q_tile, q + n * s.heads * s.dI, h, s.heads, s.dI);
        __syncthreads();
        for (int j = threadIdx.x; j < s.topk; j += INDEX_THREADS) {
            const int e = chosen[n * s.topk + j];
            if (e < 0) { break; }
            float sum[INDEX_GROUP], score = h > 0 ? scores[n * s.topk + j] : 0.0f;
            index_products_<W>(sum, index_q_tile, k + (size_t)e * s.dI, s.dI);
            #pragma unroll
            for (int i = 0; i < INDEX_GROUP; i++) {
                if (h + i < s.heads) { score = madd(a[n * s.heads + h + i], index_relu_one(sum[i]), score); }
            }
            scores[n * s.topk + j] = score;
        }
    }
}

// how many entries a row has, known to all lanes
__device__ inline int index_count_(const int* chosen, int topk) {
    int n = 0;
    for (int j = threadIdx.x; j - (int)threadIdx.x < topk; j += WARP) {
        n += __popc(__ballot_sync(ALL_LANES, j < topk && chosen[j] >= 0));
    }
    return n;
}

// teacher and student of n entries, by a warp; index_row_ref
__device__ inline IndexRow index_row_(const float* scores, const float* mass, int n) {
    const int lane = threadIdx.x;
    IndexRow row = {0.0f, -INFINITY, 0.0f, 0};
    for (int j = lane; j - lane < n; j += WARP) {
        row.mass = row_add(row.mass, j < n ? mass[j] : 0.0f);
        row.largest = j < n && scores[j] > row.largest ? scores[j] : row.largest;
    }
    row.mass = row_total(row.mass), row.largest = row_max(row.largest);
    for (int j = lane; j - lane < n; j += WARP) {
        row.total = row_add(row.total, j < n ? kernel_exp(scores[j] - row.largest) : 0.0f);
        row.taught |= j < n && index_teacher_one(mass[j], row.mass) > 0.0f;
    }
    row.total = row_total(row.total), row.taught = __ballot_sync(ALL_LANES, row.taught) != 0;
    return row;
}

// losses (N), or NULL, and scores become dscores. block is (WARP, INDEX_CHOOSERS)
__global__ static void index_rows_kernel(float* losses, float* scores, float dloss, const float* mass,
                                         const int* chosen, int N, int topk) {
    const size_t n = (size_t)blockIdx.x * INDEX_CHOOSERS + threadIdx.y;
    const int lane = threadIdx.x;
    if (n >= (size_t)N) { return; }
    const int count = index_count_(chosen + n * topk, topk);
    scores += n * topk, mass += n * topk;
    const IndexRow row = index_row_(scores, mass, count);
    const float log_total = fm_log(row.total);
    float loss = 0.0f;
    for (int j = lane; j - lane < count; j += WARP) {
        const float p = j < count ? index_teacher_one(mass[j], row.mass) : -0.0f;
        const float distance = j < count ? scores[j] - row.largest : 0.0f;
        if (losses) {
            loss = row_madd(p, j < count ? index_apart_one(p, distance, log_total) : 0.0f, loss);
        } else if (j < count) {
            scores[j] = row.taught ? (kernel_exp(distance) / row.total - p) * dloss : 0.0f;
        }
    }
    loss = row_total(loss);
    if (losses && lane == 0) { losses[n] = loss; }
}

// dq and da; open (N, topk, groups): which heads of a group have q k > 0, as bits. block is (INDEX_THREADS), grid (N).
// Entry by entry the threads make slopes, which they then sum channel by channel
template <int W, typename X>
__global__ void __launch_bounds__(INDEX_THREADS)
index_dq_kernel(X* dq, float* da, unsigned short* open, const float* dscores, const int* chosen, const X* q, const X* k,
                const float* a, IndexShape s) {
    extern __shared__ __align__(16) float index_heads[];
    __shared__ alignas(16) float slopes[INDEX_THREADS][INDEX_GROUP], terms[INDEX_THREADS][INDEX_GROUP + 1];
    __shared__ int entries[INDEX_THREADS];
    const size_t n = blockIdx.x, head = n * s.heads;
    const int i = threadIdx.x, groups = (s.heads + INDEX_GROUP - 1) / INDEX_GROUP;
    const int h = blockIdx.y * INDEX_GROUP;
    index_load_heads_(index_heads, q + head * s.dI, h, s.heads, s.dI);
    for (int c = i; c - i < s.dI; c += INDEX_THREADS) {
        float sum[INDEX_GROUP] = {}, da_sum = 0.0f;
        for (int first = 0; first < s.topk; first += INDEX_THREADS) {
            const size_t pair = n * s.topk + first + i;
            const int e = first + i < s.topk ? chosen[pair] : -1;
            __syncthreads();  // what the entries before left has been read
            entries[i] = e;
            if (e >= 0) {
                float products[INDEX_GROUP];
                unsigned bits = 0;
                index_products_<W>(products, index_heads, k + (size_t)e * s.dI, s.dI);
                #pragma unroll
                for (int g = 0; g < INDEX_GROUP; g++) {
                    const float weight = h + g < s.heads ? a[head + h + g] : 0.0f;
                    slopes[i][g] = index_slope_one(products[g], weight, dscores[pair]);
                    terms[i][g] = index_relu_one(products[g]);
                    bits |= (products[g] > 0.0f ? 1u : 0u) << g;
                }
                terms[i][INDEX_GROUP] = dscores[pair];
                open[pair * groups + blockIdx.y] = (unsigned short)bits;
            }
            __syncthreads();
            for (int j = 0; j < INDEX_THREADS && entries[j] >= 0; j++) {
                const float x = c < s.dI ? to_float(k[(size_t)entries[j] * s.dI + c]) : 0.0f;
                const Pack<float, INDEX_GROUP> d = load_floats<INDEX_GROUP>(slopes[j]);
                #pragma unroll
                for (int g = 0; g < INDEX_GROUP; g++) { sum[g] = madd(d.x[g], x, sum[g]); }
                if (i < INDEX_GROUP) { da_sum = madd(terms[j][INDEX_GROUP], terms[j][i], da_sum); }
            }
        }
        #pragma unroll
        for (int g = 0; g < INDEX_GROUP; g++) {
            if (c < s.dI && h + g < s.heads) { dq[(head + h + g) * s.dI + c] = from_float<X>(sum[g]); }
        }
        if (c < INDEX_GROUP && h + c < s.heads) { da[head + h + c] = da_sum; }
    }
}

// dk of an entry: a thread has a channel, block is (INDEX_THREADS), grid (n_entries)
template <typename X>
__global__ void __launch_bounds__(INDEX_THREADS)
index_dk_kernel(X* dk, const unsigned short* open, const float* dscores, const int* offsets, const int* pairs,
                const X* q, const float* a, IndexShape s) {
    __shared__ float slopes[INDEX_THREADS];
    __shared__ int positions[INDEX_THREADS];
    const size_t e = blockIdx.x, stride = (size_t)s.heads * s.dI;
    const int i = threadIdx.x, first = offsets[e], last = offsets[e + 1];
    const int groups = (s.heads + INDEX_GROUP - 1) / INDEX_GROUP;
    for (int c = i; c - i < s.dI; c += INDEX_THREADS) {
        float sum = 0.0f;
        for (int h = 0; h < s.heads; h++) {
            for (int begin = first; begin < last; begin += INDEX_THREADS) {
                const int n_terms = min(INDEX_THREADS, last - begin);
                __syncthreads();
                if (i < n_terms) {
                    const int pair = pairs[begin + i], n = pair / s.topk;
                    const unsigned bits = open[(size_t)pair * groups + h / INDEX_GROUP];
                    const float slope = a[(size_t)n * s.heads + h] * dscores[pair];
                    positions[i] = n, slopes[i] = bits >> (h % INDEX_GROUP) & 1 ? slope : 0.0f;
                }
                __syncthreads();
                const X* from = q + (size_t)h * s.dI + (c < s.dI ? c : 0);
                #pragma unroll 4
                for (int j = 0; j < n_terms; j++) { sum = madd(slopes[j], to_float(from[positions[j] * stride]), sum); }
            }
        }
        if (c < s.dI) { dk[e * s.dI + c] = from_float<X>(sum); }
    }
}

// dynamic shared memory of a kernel that has q of a group: 64 KiB of 1024 channels
static inline int index_shared_(const IndexShape* s) { return (int)sizeof(float) * INDEX_GROUP * s->dI; }

template <int W, typename X>
static inline void index_list_scores_of_(float* scores, const int* chosen, const X* q, const X* k, const float* a,
                                         const IndexShape* s, const Device* dev) {
    const int shared = index_shared_(s);
    const unsigned N = (unsigned)s->N;
    cudaCheck(cudaFuncSetAttribute(index_list_scores_kernel<W, X>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   shared));
    index_list_scores_kernel<W><<<N, INDEX_THREADS, shared, dev->stream>>>(scores, chosen, q, k, a, *s);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void index_list_scores_(float* scores, const int* chosen, const X* q, const X* k, const float* a,
                                      const IndexShape* s, const Device* dev) {
    if (pack_fits(k, s->dI)) { index_list_scores_of_<pack_width<X>()>(scores, chosen, q, k, a, s, dev); }
    else { index_list_scores_of_<1>(scores, chosen, q, k, a, s, dev); }
}

template <int W, typename X>
static inline void index_dq_(X* dq, float* da, unsigned short* open, const float* dscores, const int* chosen,
                             const X* q, const X* k, const float* a, const IndexShape* s, const Device* dev) {
    const int shared = index_shared_(s);
    const dim3 grid((unsigned)s->N, (unsigned)ceil_div(s->heads, INDEX_GROUP));
    cudaCheck(cudaFuncSetAttribute(index_dq_kernel<W, X>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    index_dq_kernel<W><<<grid, INDEX_THREADS, shared, dev->stream>>>(dq, da, open, dscores, chosen, q, k, a, *s);
    cudaCheck(cudaGetLastError());
}

// mass (N, topk) of the last position of each document becomes 0
__global__ static void index_forget_last_kernel(float* mass, const int* is_last, int topk, size_t n) {
    for (size_t i = grid_first<1>(); i < n; i += grid_step<1>()) {
        if (is_last[i / topk]) { mass[i] = 0.0f; }
    }
}

static inline void index_forget_last(float* mass, const int* is_last, int N, int topk, const Device* dev) {
    const size_t n = (size_t)N * (size_t)topk;
    if (n == 0) { return; }
    index_forget_last_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(mass, is_last, topk, n);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void index_loss_forward(float* losses, const float* mass, const int* chosen, const X* q, const X* k,
                                      const float* a, const IndexShape* s, const EntryWindows* w, const Device* dev) {
    const dim3 block(WARP, INDEX_CHOOSERS);
    (void)w;
    index_check_(s);
    if (s->N == 0) { return; }
    float* scores = device_workspace(dev, sizeof(float) * (size_t)s->N * (size_t)s->topk);
    index_list_scores_(scores, chosen, q, k, a, s, dev);
    index_rows_kernel<<<(unsigned)ceil_div(s->N, INDEX_CHOOSERS), block, 0, dev->stream>>>(
        losses, scores, 0.0f, mass, chosen, s->N, s->topk);
    cudaCheck(cudaGetLastError());
}

// bytes of the scratch of backward
static inline size_t index_scratch_bytes_(const IndexShape* s, int n_entries) {
    const size_t pairs = (size_t)s->N * s->topk, groups = (size_t)ceil_div(s->heads, INDEX_GROUP);
    return 4 * (2 * pairs + (size_t)n_entries + 1) + 2 * pairs * groups;
}

static inline double index_workspace_bytes(const IndexShape* s, int n_entries, int most, int learns,
                                           const Device* dev) {
    const int at_once = index_at_once_(s->N, most > 0 ? most : 1);
    const double choose = most > s->topk ? sizeof(float) * (double)at_once * most : 0.0;
    const double loss = learns ? (double)index_scratch_bytes_(s, n_entries) : 0.0;
    (void)dev;
    return choose > loss ? choose : loss;
}

template <typename X>
static inline void index_loss_backward(X* dq, X* dk, float* da, float dloss, const float* mass, const int* chosen,
                                       const X* q, const X* k, const float* a, int n_entries, const IndexShape* s,
                                       const Places* places, const EntryWindows* w, const Device* dev) {
    const size_t pairs = (size_t)s->N * s->topk;
    const dim3 block(WARP, INDEX_CHOOSERS);
    (void)places, (void)w;
    index_check_(s);
    float* dscores = device_workspace(dev, index_scratch_bytes_(s, n_entries));
    int *order = (int*)(void*)(dscores + pairs), *offsets = order + pairs;
    unsigned short* open = (unsigned short*)(void*)(offsets + n_entries + 1);
    inverse_lists(offsets, NULL, order, NULL, chosen, s->N, s->topk, n_entries, dev);
    if (s->N > 0) {
        index_list_scores_(dscores, chosen, q, k, a, s, dev);
        index_rows_kernel<<<(unsigned)ceil_div(s->N, INDEX_CHOOSERS), block, 0, dev->stream>>>(
            NULL, dscores, dloss, mass, chosen, s->N, s->topk);
        if (pack_fits(k, s->dI)) {
            index_dq_<pack_width<X>()>(dq, da, open, dscores, chosen, q, k, a, s, dev);
        } else {
            index_dq_<1>(dq, da, open, dscores, chosen, q, k, a, s, dev);
        }
    }
    if (n_entries > 0) {
        index_dk_kernel<<<(unsigned)n_entries, INDEX_THREADS, 0, dev->stream>>>(dk, open, dscores, offsets, order, q, a,
                                                                                *s);
    }
    cudaCheck(cudaGetLastError());
}
#endif  // __CUDACC__
#endif  // LLMC_INDEXER_KERNELS_H
