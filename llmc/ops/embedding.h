/*
Token and position embedding: out[b][t] = wte[token at b, t] + wpe[t].
    out (B, T, C)   tokens (B, T) in 0..V-1, V <= 2^24   wte (V, C)   wpe (maxT, C)
    t0  position of the first column, 0 in training
placed_embedding_forward, _backward: the same of N tokens in a row, each with a position of its own, places (N).
token_embedding_forward, _backward: the same without positions, for N = B*T tokens in a row; in C also of a table that
        does not learn and is stored as bf16, fp8 or fp4 (core/stored.h), _forward_stored.
A token below 0 has its row of wte elsewhere: forward leaves its row of out as it is, backward has no dwte for it.
Of a table whose rows lie in P parts of R, each on a rank (--tp, models/vocabulary.h):
    embedding_own     own (N): the numbers that tokens have in the part from row `first` on, -1 where it is another's
    embedding_owned   out (N, C) from parts (P, N, C): each row from the part that has its token
Backward: dwte[token] and dwpe[t] are ADDED to, so the caller starts them: a tied head has already written dwte. NULL
for either: nobody asks for it, and nothing is done for it.
Cost:   memory bound: 3*B*T*C elements moved forward, as many backward. On a GPU backward reads dout twice, and moves
        dwte and dwpe where they change; nine short kernels sort the tokens before.
Order:  both gradients take their positions n = b*T + t ascending; threads split the channels. Fast builds on a GPU cut
        what a token gets into runs of at most 64 positions, whose sums are added in order.
Error:  forward one rounding, to X: bf16 2^-8 |out|. dwte, dwpe: sums of n floats, in any order within n * 2^-24 sum
        |dout|.
*/
#ifndef LLMC_EMBEDDING_H
#define LLMC_EMBEDDING_H
#include "../core/stored.h"  // StoredMatrix, stored_row
#include "../core/device.h"  // Device, device_workspace, ceil_div
#include "../core/kernel.h"  // load_floats, store_floats, pack_aligned
#include "widen.h"           // in a CUDA build: widen_rows

// ---- plain C: read this first; it defines every bit ----

static inline void embedding_forward_ref(float* out, const int* tokens, const float* wte, const float* wpe, int B,
                                         int T, int C, int t0) {
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) {
            size_t n = (size_t)b * T + t;
            if (tokens[n] < 0) { continue; }
            const float* token = wte + (size_t)tokens[n] * C;
            const float* position = wpe + (size_t)(t0 + t) * C;
            for (int c = 0; c < C; c++) { out[n * C + c] = token[c] + position[c]; }
        }
    }
}

static inline void embedding_backward_ref(float* dwte, float* dwpe, const float* dout, const int* tokens, int B, int T,
                                          int C) {
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) {
            size_t n = (size_t)b * T + t;
            float* dtoken = dwte && tokens[n] >= 0 ? dwte + (size_t)tokens[n] * C : NULL;
            for (int c = 0; dtoken && c < C; c++) { dtoken[c] += dout[n * C + c]; }
            for (int c = 0; dwpe && c < C; c++) { dwpe[(size_t)t * C + c] += dout[n * C + c]; }
        }
    }
}

static inline void placed_embedding_forward_ref(float* out, const int* tokens, const int* places, const float* wte,
                                                const float* wpe, int N, int C) {
    for (size_t n = 0; n < (size_t)N; n++) {
        embedding_forward_ref(out + n * C, tokens + n, wte, wpe, 1, 1, C, places[n]);
    }
}

static inline void placed_embedding_backward_ref(float* dwte, float* dwpe, const float* dout, const int* tokens,
                                                 const int* places, int N, int C) {
    embedding_backward_ref(dwte, NULL, dout, tokens, 1, N, C);
    embedding_backward_ref(dwpe, NULL, dout, places, 1, N, C);
}

static inline void token_embedding_forward_ref(float* out, const int* tokens, const float* wte, int N, int C) {
    for (size_t n = 0; n < (size_t)N; n++) {
        for (int c = 0; tokens[n] >= 0 && c < C; c++) { out[n * C + c] = wte[(size_t)tokens[n] * C + c]; }
    }
}

static inline void token_embedding_backward_ref(float* dwte, const float* dout, const int* tokens, int N, int C) {
    embedding_backward_ref(dwte, NULL, dout, tokens, 1, N, C);
}

static inline void embedding_own_ref(int* own, const int* tokens, int first, int R, int N) {
    for (int n = 0; n < N; n++) {
        own[n] = tokens[n] >= first && tokens[n] < first + R ? tokens[n] - first : -1;
    }
}

static inline void embedding_owned_ref(float* out, const float* parts, const int* tokens, int R, int N, int C) {
    for (size_t n = 0; n < (size_t)N; n++) {
        const float* from = parts + ((size_t)(tokens[n] / R) * N + n) * C;
        for (int c = 0; c < C; c++) { out[n * C + c] = from[c]; }
    }
}

#ifndef __CUDACC__  // ---- fast C: rows over threads forward, channels over threads backward ----

static inline void embedding_forward(float* out, const int* tokens, const float* wte, const float* wpe, int B, int T,
                                     int C, int t0, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < B * T; n++) {
        embedding_forward_ref(out + (size_t)n * C, tokens + n, wte, wpe, 1, 1, C, t0 + n % T);
    }
}

static inline void placed_embedding_forward(float* out, const int* tokens, const int* places, const float* wte,
                                            const float* wpe, int N, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        embedding_forward_ref(out + (size_t)n * C, tokens + n, wte, wpe, 1, 1, C, places[n]);
    }
}

static inline void embedding_add_(float* to, const float* from, int n) {
    #pragma omp simd
    for (int i = 0; i < n; i++) { to[i] += from[i]; }
}

static inline void embedding_backward(float* dwte, float* dwpe, const float* dout, const int* tokens, int B, int T,
                                      int C, const Device* dev) {
    (void)dev;
    if (!dwte && !dwpe) { return; }
    const int width = 64;
    #pragma omp parallel for
    for (int first = 0; first < C; first += width) {
        int n_channels = C - first < width ? C - first : width;
        for (int n = 0; n < B * T; n++) {
            const float* d = dout + (size_t)n * C + first;
            if (dwte && tokens[n] >= 0) { embedding_add_(dwte + (size_t)tokens[n] * C + first, d, n_channels); }
            if (dwpe) { embedding_add_(dwpe + (size_t)(n % T) * C + first, d, n_channels); }
        }
    }
}

static inline void token_embedding_forward(float* out, const int* tokens, const float* wte, int N, int C,
                                           const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) { token_embedding_forward_ref(out + (size_t)n * C, tokens + n, wte, 1, C); }
}

static inline void placed_embedding_backward(float* dwte, float* dwpe, const float* dout, const int* tokens,
                                             const int* places, int N, int C, const Device* dev) {
    embedding_backward(dwte, NULL, dout, tokens, 1, N, C, dev);
    embedding_backward(dwpe, NULL, dout, places, 1, N, C, dev);
}

// the same of a table that does not learn
static inline void token_embedding_forward_stored(float* out, const int* tokens, StoredMatrix wte, int N,
                                                  const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < N; n++) {
        if (tokens[n] >= 0) { stored_row(out + (size_t)n * (size_t)wte.columns, &wte, tokens[n]); }
    }
}

static inline void token_embedding_backward(float* dwte, const float* dout, const int* tokens, int N, int C,
                                            const Device* dev) {
    embedding_backward(dwte, NULL, dout, tokens, 1, N, C, dev);
}

static inline void embedding_own(int* own, const int* tokens, int first, int R, int N, const Device* dev) {
    (void)dev;
    embedding_own_ref(own, tokens, first, R, N);
}

static inline void embedding_owned(float* out, const float* parts, const int* tokens, int R, int N, int C,
                                   const Device* dev) {
    (void)dev;
    embedding_owned_ref(out, parts, tokens, R, N, C);
}
#else  // ---- CUDA forward: one warp per position, sums of two, so both builds give the same ----

enum { EMBEDDING_ROWS = 8 };  // warps of a block: blocks are (32, 8)

// places: NULL, or of each position
template <int W, typename X>
__global__ void embedding_forward_kernel(X* out, const int* tokens, const int* places, const X* wte, const X* wpe,
                                         int N, int T, int C, int t0) {
    int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N || tokens[n] < 0) { return; }
    const X* token = wte + (size_t)tokens[n] * C;
    const X* position = wpe ? wpe + (size_t)(places ? places[n] : t0 + n % T) * C : NULL;
    for (int c = threadIdx.x * W; c < C; c += WARP * W) {
        Pack<float, W> a = load_floats<W>(token + c);
        if (position) {
            Pack<float, W> b = load_floats<W>(position + c);
            for (int i = 0; i < W; i++) { a.x[i] += b.x[i]; }
        }
        store_floats(out + (size_t)n * C + c, a);
    }
}

template <typename X>
static inline void embedding_forward_(X* out, const int* tokens, const int* places, const X* wte, const X* wpe, int N,
                                      int T, int C, int t0, const Device* dev) {
    constexpr int W = pack_width<X>();
    dim3 block(WARP, EMBEDDING_ROWS);
    unsigned grid = (unsigned)ceil_div(N, EMBEDDING_ROWS);
    if (C % W == 0 && pack_aligned(out, wte, wpe)) {
        embedding_forward_kernel<W><<<grid, block, 0, dev->stream>>>(out, tokens, places, wte, wpe, N, T, C, t0);
    } else {
        embedding_forward_kernel<1><<<grid, block, 0, dev->stream>>>(out, tokens, places, wte, wpe, N, T, C, t0);
    }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void embedding_forward(X* out, const int* tokens, const X* wte, const X* wpe, int B, int T, int C, int t0,
                                     const Device* dev) {
    embedding_forward_(out, tokens, NULL, wte, wpe, B * T, T, C, t0, dev);
}

template <typename X>
static inline void placed_embedding_forward(X* out, const int* tokens, const int* places, const X* wte, const X* wpe,
                                            int N, int C, const Device* dev) {
    embedding_forward_(out, tokens, places, wte, wpe, N, N, C, 0, dev);
}

template <typename X>
static inline void token_embedding_forward(X* out, const int* tokens, const X* wte, int N, int C, const Device* dev) {
    embedding_forward(out, tokens, wte, (const X*)NULL, 1, N, C, 0, dev);
}

// the same of a table that does not learn
template <typename X>
static inline void token_embedding_forward_stored(X* out, const int* tokens, StoredMatrix wte, int N,
                                                  const Device* dev) {
    if (!widen_is_wide<X>(&wte)) { widen_rows(out, tokens, &wte, N, dev); }
    else { token_embedding_forward(out, tokens, (const X*)wte.data, N, wte.columns, dev); }
}

// ---- CUDA, a table in parts ----

static __global__ void embedding_own_kernel(int* own, const int* tokens, int first, int R, int N) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n < N) { own[n] = tokens[n] >= first && tokens[n] < first + R ? tokens[n] - first : -1; }
}

static inline void embedding_own(int* own, const int* tokens, int first, int R, int N, const Device* dev) {
    if (N == 0) { return; }
    embedding_own_kernel<<<(unsigned)ceil_div(N, 256), 256, 0, dev->stream>>>(own, tokens, first, R, N);
    cudaCheck(cudaGetLastError());
}

// one warp for each row
template <typename X>
__global__ void embedding_owned_kernel(X* out, const X* parts, const int* tokens, int R, int N, int C) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N) { return; }
    const X* from = parts + ((size_t)(tokens[n] / R) * N + n) * C;
    for (int c = threadIdx.x; c < C; c += WARP) { out[(size_t)n * C + c] = from[c]; }
}

template <typename X>
static inline void embedding_owned(X* out, const X* parts, const int* tokens, int R, int N, int C, const Device* dev) {
    const dim3 block(WARP, EMBEDDING_ROWS);
    if (N == 0) { return; }
    embedding_owned_kernel<<<(unsigned)ceil_div(N, EMBEDDING_ROWS), block, 0, dev->stream>>>(out, parts, tokens, R, N,
                                                                                             C);
    cudaCheck(cudaGetLastError());
}

// ---- CUDA backward, first part: positions sorted by token ----
// A radix sort by 8 bits of the token at a time that keeps the order of equals: afterwards the positions of one token
// stand side by side, ascending. A pass has three kernels: count the digits of each block, add the counts up, put every
// position in its place. Tokens below 0 are sorted as if they were 2^24 - 1.

enum { SORT_BLOCK = 1024, SORT_BITS = 8, SORT_DIGITS = 1 << SORT_BITS, SORT_PASSES = 3 };  // tokens below 2^24
// blocks have whole warps, SORT_BLOCK threads where there are as many positions

// the position at place i of the order so far (NULL: as they come)
__device__ inline int embedding_position_(const int* order, int i) { return order ? order[i] : i; }

// this thread's position, -1 beyond the last, and the digit of its token
__device__ inline int embedding_digit_(int* position, const int* order, const int* tokens, int N, int shift) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    *position = i < N ? embedding_position_(order, i) : -1;
    return i < N ? tokens[*position] >> shift & (SORT_DIGITS - 1) : 0;
}

// counts (SORT_DIGITS, blocks). Whole numbers: atomics in any order give the same
__global__ static void embedding_count_kernel(int* counts, const int* order, const int* tokens, int N, int shift) {
    __shared__ int count[SORT_DIGITS];
    int position, digit = embedding_digit_(&position, order, tokens, N, shift);
    for (int i = threadIdx.x; i < SORT_DIGITS; i += blockDim.x) { count[i] = 0; }
    __syncthreads();
    if (position >= 0) { atomicAdd(&count[digit], 1); }
    __syncthreads();
    for (int i = threadIdx.x; i < SORT_DIGITS; i += blockDim.x) { counts[i * gridDim.x + blockIdx.x] = count[i]; }
}

// every count becomes the sum of those before it. One block, whole warps: each turn takes SCAN_COUNTS for every thread
enum { SCAN_COUNTS = 4 };
__global__ static void embedding_scan_kernel(int* counts, int n) {
    __shared__ int warp_sums[SORT_BLOCK / WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP, before = 0;
    for (int first = 0; first < n; first += SCAN_COUNTS * blockDim.x) {
        int at = first + SCAN_COUNTS * threadIdx.x, count[SCAN_COUNTS], own = 0;
        for (int k = 0; k < SCAN_COUNTS; k++) { own += count[k] = at + k < n ? counts[at + k] : 0; }
        int sum = own;  // then with the lanes before
        for (int step = 1; step < WARP; step *= 2) {
            int other = __shfl_up_sync(ALL_LANES, sum, step);
            sum += lane >= step ? other : 0;
        }
        if (lane == WARP - 1) { warp_sums[warp] = sum; }
        __syncthreads();
        int all = before;
        sum += before - own;
        for (int w = 0; w < n_warps; w++) {
            sum += w < warp ? warp_sums[w] : 0;
            all += warp_sums[w];
        }
        for (int k = 0; k < SCAN_COUNTS; k++) {
            if (at + k < n) { counts[at + k] = sum; }
            sum += count[k];
        }
        before = all;
        __syncthreads();  // warp_sums is read
    }
}

static inline void embedding_scan(int* counts, int n, const Device* dev) {
    unsigned threads = n < SORT_BLOCK ? (unsigned)ceil_div(n, WARP) * WARP : (unsigned)SORT_BLOCK;
    embedding_scan_kernel<<<1, threads, 0, dev->stream>>>(counts, n);
}

// Place of a position: the places of its digit in this block begin at counts; before it stand the equals in earlier
// warps and in earlier lanes of its own
__global__ static void embedding_place_kernel(int* sorted, const int* counts, const int* order, const int* tokens,
                                              int N, int shift) {
    // equals in each warp, then in the warps before it
    __shared__ unsigned short in_warp[SORT_BLOCK / WARP][SORT_DIGITS];
    int position, digit = embedding_digit_(&position, order, tokens, N, shift);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int i = lane; i < SORT_DIGITS; i += WARP) { in_warp[warp][i] = 0; }
    __syncthreads();
    unsigned equals = __ballot_sync(ALL_LANES, position >= 0);  // lanes whose digits have the same bits as this one's
    for (int bit = 0; bit < SORT_BITS; bit++) {
        unsigned ones = __ballot_sync(ALL_LANES, digit >> bit & 1);
        equals &= digit >> bit & 1 ? ones : ~ones;
    }
    int earlier = __popc(equals & ((1u << lane) - 1));
    if (position >= 0 && earlier == 0) { in_warp[warp][digit] = (unsigned short)__popc(equals); }
    __syncthreads();
    for (int i = threadIdx.x; i < SORT_DIGITS; i += blockDim.x) {
        int before = 0;
        for (int w = 0; w < (int)blockDim.x / WARP; w++) {
            int count = in_warp[w][i];
            in_warp[w][i] = (unsigned short)before;
            before += count;
        }
    }
    __syncthreads();
    if (position >= 0) { sorted[counts[digit * gridDim.x + blockIdx.x] + in_warp[warp][digit] + earlier] = position; }
}

// the sorted positions; scratch: 2 * N ints and the counts
static inline const int* embedding_sort_(int* scratch, const int* tokens, int N, const Device* dev) {
    unsigned most = SORT_BLOCK, threads = N < SORT_BLOCK ? (unsigned)ceil_div(N, WARP) * WARP : most;
    unsigned blocks = (unsigned)ceil_div(N, most), n_counts = blocks * SORT_DIGITS;
    int *sorted[2] = {scratch, scratch + N}, *counts = scratch + 2 * (size_t)N;
    const int* order = NULL;
    for (int pass = 0; pass < SORT_PASSES; pass++) {
        int shift = pass * SORT_BITS;
        embedding_count_kernel<<<blocks, threads, 0, dev->stream>>>(counts, order, tokens, N, shift);
        embedding_scan(counts, (int)n_counts, dev);
        embedding_place_kernel<<<blocks, threads, 0, dev->stream>>>(sorted[pass % 2], counts, order, tokens, N, shift);
        order = sorted[pass % 2];
    }
    return order;
}

// ---- CUDA backward, second part: sums ----
// Places are cut into pieces of a fixed number, so that a token that comes often does not keep one warp busy while all
// others have finished. The places of a token inside a piece are a run. Its first run is added to dwte; a run that goes
// on from the piece before fills the row of its piece in `rows`, and these rows are added to dwte in order afterwards.
// EXACT: one piece, no such rows, a chain.

enum { EMBEDDING_PIECE = 64 };

__device__ inline int embedding_token_(const int* order, const int* tokens, int i) { return tokens[order[i]]; }

// does place i go on with the token of the place before?
__device__ inline int embedding_goes_on_(const int* order, const int* tokens, int i) {
    return i > 0 && embedding_token_(order, tokens, i - 1) == embedding_token_(order, tokens, i);
}

// sum += the rows at the places first, first + step, ... below `last`, up to the first that has another token. step 1:
// rows of dout at their positions; step > 1: rows of pieces. 32 places are looked up at once, and four rows are on
// their way at a time
template <int W, typename X>
__device__ inline void embedding_add_(Pack<float, W>& sum, const X* from, const int* order, const int* tokens,
                                      int token, int first, int step, int last, int c, int C) {
    const int at_once = 4;
    for (int count = WARP; first < last && count == WARP; first += WARP * step) {
        int place = first + (int)threadIdx.x * step, position = place < last ? order[place] : -1;
        int row = step == 1 ? position : place / step;
        unsigned others = __ballot_sync(ALL_LANES, position < 0 || tokens[position] != token);
        count = others ? __ffs((int)others) - 1 : WARP;
        for (int k = 0; k < count; k += at_once) {
            Pack<float, W> x[at_once] = {};
            for (int i = 0; i < at_once; i++) {
                size_t n = (size_t)__shfl_sync(ALL_LANES, row, k + i);
                if (c < C && k + i < count) { x[i] = load_floats<W>(from + n * C + c); }
            }
            for (int i = 0; i < at_once && k + i < count; i++) {  // never + 0: it would make +0 of a -0
                for (int j = 0; j < W; j++) { sum.x[j] += x[i].x[j]; }
            }
        }
    }
}

// one warp for each place and 32 * W channels; it works where a run begins
template <int W, typename X>
__global__ void embedding_runs_kernel(float* dwte, float* rows, const X* dout, const int* order, const int* tokens,
                                      int N, int C, int piece) {
    int i = blockIdx.x * blockDim.y + threadIdx.y, c = (blockIdx.y * WARP + threadIdx.x) * W;
    if (i >= N) { return; }
    int goes_on = embedding_goes_on_(order, tokens, i);
    if (goes_on && i % piece != 0) { return; }
    if (embedding_token_(order, tokens, i) < 0) { return; }
    int token = embedding_token_(order, tokens, i), last = i / piece * piece + min(piece, N - i / piece * piece);
    float* to = goes_on ? rows + (size_t)(i / piece) * C : dwte + (size_t)token * C;
    Pack<float, W> sum = {};
    if (c < C && !goes_on) { sum = load_floats<W>(to + c); }
    embedding_add_(sum, dout, order, tokens, token, i, 1, last, c, C);
    if (c < C) { store_floats(to + c, sum); }
}

// one warp for each piece and 32 * W channels; it works where a token that began in the piece before goes on
template <int W>
__global__ void embedding_rows_kernel(float* dwte, const float* rows, const int* order, const int* tokens, int N, int C,
                                      int piece) {
    int i = (int)blockIdx.x * piece, c = (blockIdx.y * WARP + threadIdx.x) * W;
    if (!embedding_goes_on_(order, tokens, i)) { return; }
    int token = embedding_token_(order, tokens, i);
    if (token < 0) { return; }
    if (embedding_token_(order, tokens, i - piece) == token && embedding_goes_on_(order, tokens, i - piece)) { return; }
    float* to = dwte + (size_t)token * C + c;
    Pack<float, W> sum = {};
    if (c < C) { sum = load_floats<W>(to); }
    embedding_add_(sum, rows, order, tokens, token, i, piece, N, c, C);
    if (c < C) { store_floats(to, sum); }
}

// one thread for each t and W channels adds over b
template <int W, typename X>
__global__ void embedding_positions_kernel(float* dwpe, const X* dout, int B, int T, int C) {
    int c = (blockIdx.x * blockDim.x + threadIdx.x) * W, t = blockIdx.y * blockDim.y + threadIdx.y;
    if (c >= C || t >= T) { return; }
    Pack<float, W> sum = load_floats<W>(dwpe + (size_t)t * C + c);
    #pragma unroll 8
    for (int b = 0; b < B; b++) {
        Pack<float, W> d = load_floats<W>(dout + ((size_t)b * T + t) * C + c);
        for (int j = 0; j < W; j++) { sum.x[j] += d.x[j]; }
    }
    store_floats(dwpe + (size_t)t * C + c, sum);
}

template <int W, typename X>
static inline void embedding_backward_tokens_(float* dwte, const X* dout, const int* tokens, int N, int C,
                                              const Device* dev) {
#ifdef EXACT
    int piece = N;
#else
    int piece = EMBEDDING_PIECE;
#endif
    size_t n_rows = (size_t)ceil_div(N, piece) * C, n_counts = (size_t)ceil_div(N, SORT_BLOCK) * SORT_DIGITS;
    float* rows = device_workspace(dev, sizeof(float) * n_rows + sizeof(int) * (2 * (size_t)N + n_counts));
    const int* order = embedding_sort_((int*)(rows + n_rows), tokens, N, dev);
    unsigned n_columns = (unsigned)ceil_div(C, WARP * W);
    dim3 block(WARP, EMBEDDING_ROWS), places((unsigned)ceil_div(N, EMBEDDING_ROWS), n_columns);
    embedding_runs_kernel<W><<<places, block, 0, dev->stream>>>(dwte, rows, dout, order, tokens, N, C, piece);
    if (piece < N) {
        dim3 pieces((unsigned)ceil_div(N, piece), n_columns);
        embedding_rows_kernel<W><<<pieces, WARP, 0, dev->stream>>>(dwte, rows, order, tokens, N, C, piece);
    }
}

template <int W, typename X>
static inline void embedding_backward_positions_(float* dwpe, const X* dout, int B, int T, int C, const Device* dev) {
    dim3 block(WARP, EMBEDDING_ROWS), grid((unsigned)ceil_div(C, WARP * W), (unsigned)ceil_div(T, EMBEDDING_ROWS));
    embedding_positions_kernel<W><<<grid, block, 0, dev->stream>>>(dwpe, dout, B, T, C);
}

template <int W, typename X>
static inline void embedding_backward_(float* dwte, float* dwpe, const X* dout, const int* tokens, int B, int T, int C,
                                       const Device* dev) {
    if (dwte) { embedding_backward_tokens_<W>(dwte, dout, tokens, B * T, C, dev); }
    if (dwpe) { embedding_backward_positions_<W>(dwpe, dout, B, T, C, dev); }
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void embedding_backward(float* dwte, float* dwpe, const X* dout, const int* tokens, int B, int T, int C,
                                      const Device* dev) {
    constexpr int W = pack_width<X>();
    if (C % W == 0 && pack_aligned(dwte, dwpe, dout)) {
        embedding_backward_<W>(dwte, dwpe, dout, tokens, B, T, C, dev);
    } else {
        embedding_backward_<1>(dwte, dwpe, dout, tokens, B, T, C, dev);
    }
}

// dwpe is sorted by places as dwte is by tokens
template <typename X>
static inline void placed_embedding_backward(float* dwte, float* dwpe, const X* dout, const int* tokens,
                                             const int* places, int N, int C, const Device* dev) {
    embedding_backward(dwte, NULL, dout, tokens, 1, N, C, dev);
    embedding_backward(dwpe, NULL, dout, places, 1, N, C, dev);
}

template <typename X>
static inline void token_embedding_backward(float* dwte, const X* dout, const int* tokens, int N, int C,
                                            const Device* dev) {
    embedding_backward(dwte, NULL, dout, tokens, 1, N, C, dev);
}
#endif
#endif  // LLMC_EMBEDDING_H
