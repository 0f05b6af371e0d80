/*
Causal depthwise convolution and SiLU: every channel mixes its own last K inputs.
    conv[t] = bias + sum over k of weight[k] * inp[t - (K-1) + k],  out = silu(conv), for each row and channel
    inp (B, T, C), positions inp_stride floats apart   weight (C, K)   bias (C) or NULL   conv, out (B, T, C)
    1 <= K <= 16. conv is kept for backward; where none follows, it may be out.
In CUDA builds all of these are float or bf16; dweight, dbias and ahead are float.
Where a row begins, the taps that would reach before it are left out. Two arguments move that beginning:
    history  (B, K-1, C) or NULL: the inputs before position 0, oldest first, left there by conv1d_history. So a
             sequence may come in windows of any length, with the bits of the whole. Filled with conv1d_nothing():
             nothing stands before. Zeros are inputs that are zero. In CUDA conv1d_nothing_as<X>() is the mark
    starts   (B, T) or NULL: 1 where a document begins; no tap of a later position reaches before it, nor into a history
Backward, with dconv = dout * silu'(conv) (derived in doc/conv1d.md), everything written; dinp may be inp. NULL for any
of the three: nobody asks for it, and nothing is done for it
    dinp[t]    = sum over k of weight[k] * dconv[t + (K-1) - k]          (B, T, C), positions dinp_stride floats apart
    dweight[k] = sum over b, t of dconv[t] * inp[t - (K-1) + k]     (C, K)
    dbias      = sum over b, t of dconv                             (C)
dweight sees a history. Inputs that later windows have seen, too, get their gradients where these come first:
    ahead    (B, K-1, C) or NULL: dconv of the positions behind the last, nearest first, left there by conv1d_ahead;
             filled with conv1d_nothing(): nothing follows. NULL: what follows is not asked, a history is constant.
             Floats in every build: what it brings is not rounded on the way
Cost:   per element with 4 taps 1.3 ns forward and 1.7 ns backward, of which SiLU takes 0.9 and 1.1: the taps themselves
        go at the speed of memory, 3*B*T*C floats moved forward and 4*B*T*C backward. One thread, AVX-512, gcc 12, Intel
        Sapphire Rapids class, (B, T, C) = (1, 512, 1536), the smallest of 100 calls on a busy machine. On a GPU memory
        bound: 3*B*T*C elements forward, 3*B*T*C for dinp and 3*B*T*C for dweight and dbias, K-1 positions of each
        stretch twice; only K = 4 goes in packs. Not measured on a GPU yet.
Order:  conv chains over k from the bias (0 without one), dinp over k from 0: latest position first; dweight and dbias
        chain over positions b * T + t from 0. A tap that is left out adds nothing, not a zero. Lanes hold neighbouring
        channels. Fast kernels keep the chains of conv and dinp; dweight and dbias are chains over stretches of
        positions, which are added in a fixed order; their number follows from the shape and from how many
        multiprocessors the GPU has.
Source: Gu & Dao 2023, arXiv:2312.00752, section 3.4 and figure 3
*/
#ifndef LLMC_CAUSAL_CONV1D_H
#define LLMC_CAUSAL_CONV1D_H
#include "../core/device.h"  // Device, ceil_div, device_workspace, fail_run
#include "../core/kernel.h"  // Pack, load_floats, store_floats, pack_width, pack_aligned, MaybeNull
#include "silu.h"            // silu_one, silu_slope_one, silu_and_slope_
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_load, v_store
#endif

enum { CONV1D_MOST_TAPS = 16 };

static inline void conv1d_check_(int K) {
    if (K < 1 || K > CONV1D_MOST_TAPS) { fail_run("conv1d: %d taps: expected 1 to %d", K, CONV1D_MOST_TAPS); }
}

// what the taps see
typedef struct {
    const float* inp;             // (B, T, C)
    size_t stride;                // floats from one position of inp to the next
    const float* history;         // (B, K-1, C) or NULL
    const unsigned char* starts;  // (B, T) or NULL
    int T, C, K;
    const float* ahead;           // (B, K-1, C) or NULL: of backward
} Conv1dWindow;

// A position of a history that was never written, or that belongs to another document, has this NaN in its first
// channel. Arithmetic makes NaNs without a payload, so no input has these bits
enum { CONV1D_NOTHING = 0x7fc0c0de };

FM_FUNCTION int conv1d_is_nothing_(const float* position) {
    int32_t bits;
    memcpy(&bits, position, sizeof bits);
    return bits == CONV1D_NOTHING;
}

FM_FUNCTION float conv1d_nothing(void) {
    const int32_t bits = CONV1D_NOTHING;
    float nothing;
    memcpy(&nothing, &bits, sizeof bits);
    return nothing;
}

static inline void conv1d_set_nothing_(float* position, int C) {
    for (int c = 0; c < C; c++) { position[c] = conv1d_nothing(); }
}

#ifdef __CUDACC__
// The mark of bf16. Rounding to bf16 makes of every NaN 0x7fff, or 0x7fc0 where it cuts bits off (of this float, too):
// so a history is copied as it is, never converted
enum { CONV1D_NOTHING_BF16 = 0x7fde };

FM_FUNCTION int conv1d_is_nothing_(const bf16* position) {
    uint16_t bits;
    memcpy(&bits, position, sizeof bits);
    return bits == CONV1D_NOTHING_BF16;
}

template <typename X> __host__ __device__ inline X conv1d_nothing_as();
template <> __host__ __device__ inline float conv1d_nothing_as<float>() { return conv1d_nothing(); }
template <> __host__ __device__ inline bf16 conv1d_nothing_as<bf16>() {
    const uint16_t bits = CONV1D_NOTHING_BF16;
    bf16 nothing;
    memcpy(&nothing, &bits, sizeof bits);
    return nothing;
}
#endif

// the inputs at position t of row b; before 0 they are the history's
static inline const float* conv1d_input_(const Conv1dWindow* w, int b, int t) {
    if (t >= 0) { return w->inp + ((size_t)b * w->T + t) * w->stride; }
    return w->history + ((size_t)b * (w->K - 1) + (w->K - 1 + t)) * w->C;
}

// the first position that taps of row b may see, before any start: 0, or down to -(K-1)
static inline int conv1d_row_begin_(const Conv1dWindow* w, int b) {
    int t = w->history ? -(w->K - 1) : 0;
    while (t < 0 && conv1d_is_nothing_(conv1d_input_(w, b, t))) { t++; }
    return t;
}

// the first that position t may see, when it was `begin` at t - 1
static inline int conv1d_begin_(const Conv1dWindow* w, int b, int t, int begin) {
    return w->starts && w->starts[(size_t)b * w->T + t] ? t : begin;
}

// the first that taps of position t reach
static inline int conv1d_first_(const Conv1dWindow* w, int t, int begin) {
    return t - (w->K - 1) > begin ? t - (w->K - 1) : begin;
}

// dconv at position t of row b, behind the last of the window
static inline const float* conv1d_behind_(const Conv1dWindow* w, int b, int t) {
    return w->ahead + ((size_t)b * (w->K - 1) + (t - w->T)) * w->C;
}

// the last position with a tap that reaches t
static inline int conv1d_last_(const Conv1dWindow* w, int b, int t) {
    const int reach = t + w->K - 1;
    for (int q = t + 1; q <= reach; q++) {
        if (q < w->T ? w->starts && w->starts[(size_t)b * w->T + q]
                     : !w->ahead || conv1d_is_nothing_(conv1d_behind_(w, b, q))) { return q - 1; }
    }
    return reach;
}

// ---- plain C: read this first; it defines every bit ----

static inline void conv1d_forward_ref(float* conv, float* out, const float* inp, size_t inp_stride, const float* weight,
                                      const float* bias, const float* history, const unsigned char* starts, int B,
                                      int T, int C, int K) {
    Conv1dWindow w = {inp, inp_stride, history, starts, T, C, K, NULL};
    for (int i = 0; i < B * C; i++) {
        int b = i / C, c = i % C, begin = conv1d_row_begin_(&w, b);
        for (int t = 0; t < T; t++) {
            begin = conv1d_begin_(&w, b, t, begin);
            float sum = bias ? bias[c] : 0.0f;
            for (int s = conv1d_first_(&w, t, begin); s <= t; s++) {
                sum = madd(weight[c * K + s - t + K - 1], conv1d_input_(&w, b, s)[c], sum);
            }
            conv[((size_t)b * T + t) * C + c] = sum;
            out[((size_t)b * T + t) * C + c] = silu_one(sum);
        }
    }
}

static inline float conv1d_dconv_ref(const float* dout, const float* conv, size_t i) {
    return dout[i] * silu_slope_one(conv[i]);
}

// dweight of tap k of channel c
static inline float conv1d_dweight_ref(const float* dout, const float* conv, const Conv1dWindow* w, int B, int c,
                                       int k) {
    float sum = 0.0f;
    for (int b = 0; b < B; b++) {
        int begin = conv1d_row_begin_(w, b);
        for (int t = 0; t < w->T; t++) {
            int s = t - (w->K - 1) + k;
            begin = conv1d_begin_(w, b, t, begin);
            if (s < begin) { continue; }
            sum = madd(conv1d_dconv_ref(dout, conv, ((size_t)b * w->T + t) * w->C + c), conv1d_input_(w, b, s)[c], sum);
        }
    }
    return sum;
}

// dinp of position t and channel c of row b
static inline float conv1d_dinp_ref(const float* dout, const float* conv, const float* weight, const Conv1dWindow* w,
                                    int b, int t, int c) {
    float sum = 0.0f;
    for (int q = conv1d_last_(w, b, t); q >= t; q--) {
        const float dconv = q < w->T ? conv1d_dconv_ref(dout, conv, ((size_t)b * w->T + q) * w->C + c)
                                     : conv1d_behind_(w, b, q)[c];
        sum = madd(weight[c * w->K + t - q + w->K - 1], dconv, sum);
    }
    return sum;
}

static inline void conv1d_backward_ref(float* dinp, size_t dinp_stride, float* dweight, float* dbias, const float* dout,
                                       const float* conv, const float* inp, size_t inp_stride, const float* weight,
                                       const float* history, const float* ahead, const unsigned char* starts, int B,
                                       int T, int C, int K) {
    Conv1dWindow w = {inp, inp_stride, history, starts, T, C, K, ahead};
    for (int c = 0; dweight && c < C; c++) {
        for (int k = 0; k < K; k++) { dweight[c * K + k] = conv1d_dweight_ref(dout, conv, &w, B, c, k); }
    }
    for (int c = 0; dbias && c < C; c++) {
        dbias[c] = 0.0f;
        for (int n = 0; n < B * T; n++) { dbias[c] += conv1d_dconv_ref(dout, conv, (size_t)n * C + c); }
    }
    for (int n = 0; dinp && n < B * T; n++) {
        for (int c = 0; c < C; c++) {
            dinp[n * dinp_stride + c] = conv1d_dinp_ref(dout, conv, weight, &w, n / T, n % T, c);
        }
    }
}

#ifndef __CUDACC__  // ---- from one window to the next ----

// history becomes what stands before the next window: the last K-1 positions of history and inp together; what a start
// in this window hides is nothing
static inline void conv1d_history(float* history, const float* inp, size_t inp_stride, const unsigned char* starts,
                                  int B, int T, int C, int K, const Device* dev) {
    Conv1dWindow w = {inp, inp_stride, history, starts, T, C, K, NULL};
    (void)dev;
    for (int b = 0; b < B; b++) {
        int begin = conv1d_row_begin_(&w, b);
        for (int t = 0; t < T; t++) { begin = conv1d_begin_(&w, b, t, begin); }
        for (int j = 0; j < K - 1; j++) {  // ascending: a position that stays moves down, over one that was read before
            float* to = history + ((size_t)b * (K - 1) + j) * C;
            int s = T - (K - 1) + j;
            if (s < begin) {
                conv1d_set_nothing_(to, C);
            } else {
                memcpy(to, conv1d_input_(&w, b, s), sizeof(float) * C);
            }
        }
    }
}

// ahead becomes what stands behind the window before this one: dconv of the first K-1 positions of this window and
// ahead together; from the first start in this window on, nothing
static inline void conv1d_ahead(float* ahead, const float* dout, const float* conv, const unsigned char* starts, int B,
                                int T, int C, int K, const Device* dev) {
    (void)dev;
    for (int b = 0; b < B; b++) {
        const unsigned char* first = starts ? (const unsigned char*)memchr(starts + (size_t)b * T, 1, (size_t)T) : NULL;
        const int end = first ? (int)(first - (starts + (size_t)b * T)) : T + K;
        float* row = ahead + (size_t)b * (K - 1) * C;
        for (int j = K - 2; j >= 0; j--) {  // descending: a position that stays moves up, over one that was read before
            if (j >= end) {
                conv1d_set_nothing_(row + (size_t)j * C, C);
            } else if (j >= T) {
                memcpy(row + (size_t)j * C, row + (size_t)(j - T) * C, sizeof(float) * C);
            } else {
                const size_t at = ((size_t)b * T + j) * C;
                for (int c = 0; c < C; c++) { row[(size_t)j * C + c] = conv1d_dconv_ref(dout, conv, at + c); }
            }
        }
    }
}

// ---- fast C: a thread has a block of channels; its lanes hold neighbouring ones ----

enum { CONV1D_WIDTH = 256 };  // channels of a block, at most
typedef float Conv1dTaps[CONV1D_MOST_TAPS][CONV1D_WIDTH] __attribute__((aligned(64)));

// channels of a block where rows are shared out too (n_rows 1: they are not): narrower if threads would have nothing to
// do
static inline int conv1d_width_(int C, int n_rows, const Device* dev) {
    int64_t width = ceil_div(ceil_div((int64_t)C * n_rows, dev->n_threads), 16) * 16;
    return width < CONV1D_WIDTH ? (int)width : CONV1D_WIDTH;
}

// The taps of one position: n pairs of rows. sum[c] = start[c] + the products of each pair in turn
typedef struct {
    int n;
    const float *a[CONV1D_MOST_TAPS], *x[CONV1D_MOST_TAPS];
} Conv1dPairs;

static inline void conv1d_pair_(Conv1dPairs* pairs, const float* a, const float* x) {
    pairs->a[pairs->n] = a;
    pairs->x[pairs->n++] = x;
}

static inline void conv1d_sum_(float* sum, const float* start, const Conv1dPairs* pairs, int width) {
    int c = 0;
    for (; c + VLANES <= width; c += VLANES) {
        vfloat total = v_load(start + c);
        for (int i = 0; i < pairs->n; i++) {
            total = v_madd(v_load(pairs->a[i] + c), v_load(pairs->x[i] + c), total);
        }
        v_store(sum + c, total);
    }
    for (; c < width; c++) {
        float total = start[c];
        for (int i = 0; i < pairs->n; i++) { total = madd(pairs->a[i][c], pairs->x[i][c], total); }
        sum[c] = total;
    }
}

// weight (C, K) turned, so that neighbouring channels are neighbours: taps[k] of the channels first..first+width-1
static inline void conv1d_turn_(Conv1dTaps taps, const float* weight, int first, int width, int K) {
    for (int c = 0; c < width; c++) {
        for (int k = 0; k < K; k++) { taps[k][c] = weight[(size_t)(first + c) * K + k]; }
    }
}

// the turned taps go back to weight (C, K)
static inline void conv1d_turn_back_(float* weight, Conv1dTaps taps, int first, int width, int K) {
    for (int c = 0; c < width; c++) {
        for (int k = 0; k < K; k++) { weight[(size_t)(first + c) * K + k] = taps[k][c]; }
    }
}

// row b of `width` channels from `first`
static inline void conv1d_forward_block_(float* conv, float* out, const float* weight, const float* bias,
                                         const Conv1dWindow* w, int b, int first, int width) {
    Conv1dTaps taps;
    float start[CONV1D_WIDTH];
    int K = w->K, begin = conv1d_row_begin_(w, b);
    conv1d_turn_(taps, weight, first, width, K);
    for (int c = 0; c < width; c++) { start[c] = bias ? bias[first + c] : 0.0f; }
    for (int t = 0; t < w->T; t++) {
        size_t here = ((size_t)b * w->T + t) * w->C + first;
        float *sum = conv + here, *y = out + here;
        begin = conv1d_begin_(w, b, t, begin);
        Conv1dPairs pairs;
        pairs.n = 0;
        for (int s = conv1d_first_(w, t, begin); s <= t; s++) {
            conv1d_pair_(&pairs, taps[s - t + K - 1], conv1d_input_(w, b, s) + first);
        }
        conv1d_sum_(sum, start, &pairs, width);
        #pragma omp simd
        for (int c = 0; c < width; c++) { y[c] = silu_one(sum[c]); }
    }
}

static inline void conv1d_forward(float* conv, float* out, const float* inp, size_t inp_stride, const float* weight,
                                  const float* bias, const float* history, const unsigned char* starts, int B, int T,
                                  int C, int K, const Device* dev) {
    conv1d_check_(K);
    Conv1dWindow w = {inp, inp_stride, history, starts, T, C, K, NULL};
    int width = conv1d_width_(C, B, dev);
    #pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++) {
        for (int first = 0; first < C; first += width) {
            conv1d_forward_block_(conv, out, weight, bias, &w, b, first, C - first < width ? C - first : width);
        }
    }
}

// what backward keeps of its block of channels
typedef struct {
    Conv1dTaps taps, dtaps;
    Conv1dTaps dconv;  // of the last K positions: position t in dconv[t % K]
    float dbias[CONV1D_WIDTH], zeros[CONV1D_WIDTH];
    int first, width, with_taps, with_bias;  // with: somebody asks for dtaps, for dbias
} Conv1dBlock;

// dconv of position t of row b, and what it adds to dbias and dtaps
static inline void conv1d_backward_taps_(Conv1dBlock* block, const float* dout, const float* conv,
                                         const Conv1dWindow* w, int b, int t, int begin) {
    int first = block->first, width = block->width;
    size_t here = ((size_t)b * w->T + t) * w->C + first;
    float* dc = block->dconv[t % w->K];
    #pragma omp simd
    for (int c = 0; c < width; c++) { dc[c] = dout[here + c] * silu_slope_one(conv[here + c]); }
    if (block->with_bias) {
        #pragma omp simd
        for (int c = 0; c < width; c++) { block->dbias[c] += dc[c]; }
    }
    for (int s = conv1d_first_(w, t, begin); block->with_taps && s <= t; s++) {
        const float* x = conv1d_input_(w, b, s) + first;
        float* dtap = block->dtaps[s - t + w->K - 1];
        #pragma omp simd
        for (int c = 0; c < width; c++) { dtap[c] = madd(dc[c], x[c], dtap[c]); }
    }
}

// dinp of position t of row b, at dinp
static inline void conv1d_backward_input_(float* dinp, const Conv1dBlock* block, const Conv1dWindow* w, int b, int t) {
    Conv1dPairs pairs;
    pairs.n = 0;
    for (int q = conv1d_last_(w, b, t); q >= t; q--) {
        conv1d_pair_(&pairs, block->taps[t - q + w->K - 1], block->dconv[q % w->K]);
    }
    conv1d_sum_(dinp, block->zeros, &pairs, block->width);
}

// All rows of a block. dinp (NULL: none) of a position follows K-1 positions later, when the last that it needs is
// known and its own input is not needed any more
static inline void conv1d_backward_block_(float* dinp, size_t dinp_stride, Conv1dBlock* block, const float* dout,
                                          const float* conv, const Conv1dWindow* w, int B) {
    for (int b = 0; b < B; b++) {
        int begin = conv1d_row_begin_(w, b), wait = dinp ? w->K - 1 : 0;
        for (int t = 0; t < w->T + wait; t++) {
            if (t < w->T) {
                begin = conv1d_begin_(w, b, t, begin);
                conv1d_backward_taps_(block, dout, conv, w, b, t, begin);
            } else if (w->ahead) {
                memcpy(block->dconv[t % w->K], conv1d_behind_(w, b, t) + block->first, sizeof(float) * block->width);
            }
            if (dinp && t >= wait) {
                float* to = dinp + ((size_t)b * w->T + t - wait) * dinp_stride + block->first;
                conv1d_backward_input_(to, block, w, b, t - wait);
            }
        }
    }
}

static inline void conv1d_backward(float* dinp, size_t dinp_stride, float* dweight, float* dbias, const float* dout,
                                   const float* conv, const float* inp, size_t inp_stride, const float* weight,
                                   const float* history, const float* ahead, const unsigned char* starts, int B,
                                   int T, int C, int K, const Device* dev) {
    conv1d_check_(K);
    if (!dinp && !dweight && !dbias) { return; }
    Conv1dWindow w = {inp, inp_stride, history, starts, T, C, K, ahead};
    int width = conv1d_width_(C, 1, dev);
    #pragma omp parallel for
    for (int first = 0; first < C; first += width) {
        Conv1dBlock block;
        block.first = first, block.width = C - first < width ? C - first : width;
        block.with_taps = dweight != NULL, block.with_bias = dbias != NULL;
        memset(block.dtaps, 0, sizeof *block.dtaps * K);
        memset(block.dbias, 0, sizeof block.dbias);
        memset(block.zeros, 0, sizeof block.zeros);
        if (dinp) { conv1d_turn_(block.taps, weight, first, block.width, K); }
        conv1d_backward_block_(dinp, dinp_stride, &block, dout, conv, &w, B);
        if (dweight) { conv1d_turn_back_(dweight, block.dtaps, first, block.width, K); }
        for (int c = 0; dbias && c < block.width; c++) { dbias[first + c] = block.dbias[c]; }
    }
}
#else  // ---- CUDA: a thread has W channels and walks over a stretch of positions ----

// What the taps see is in registers: of a stretch each position is loaded once, CONV1D_BATCH of them at a time. M taps
// are compiled; K is M or less, and then the first M - K are seen by no position. What is seen of the M - 1 positions
// beside one is a number, for nothing lies behind a beginning
enum { CONV1D_BATCH = 4, CONV1D_THREADS = 128 };
enum { CONV1D_PACKED = 4 };  // taps of kernels with packs

template <typename X>
struct Conv1dInputs {
    const X *inp, *history;       // (B, T, C), positions stride apart; (B, K-1, C) or NULL
    size_t stride;
    const unsigned char* starts;  // (B, T) or NULL
    int B, T, C, K;
};

// positions first .. last-1 of row b
struct Conv1dSpan {
    int b, first, last;
};

template <typename X>
__device__ inline const X* conv1d_position_(const Conv1dInputs<X>& in, int b, int t) {
    if (t >= 0) { return in.inp + ((size_t)b * in.T + t) * in.stride; }
    return in.history + ((size_t)b * (in.K - 1) + (in.K - 1 + t)) * in.C;
}

__device__ inline int conv1d_starts_(const unsigned char* starts, size_t n) { return starts && starts[n]; }

// of the K-1 positions before t, how many its taps see if no document starts at t
template <typename X>
__device__ inline int conv1d_seen_(const Conv1dInputs<X>& in, int b, int t) {
    const int from = t - (in.K - 1);
    int begin = from > 0 ? from : 0;
    if (from < 0 && in.history) {
        begin = -(in.K - 1);
        while (begin < 0 && conv1d_is_nothing_(conv1d_position_(in, b, begin))) { begin++; }
    }
    for (int s = from > 0 ? from : 0; s < t; s++) {
        if (conv1d_starts_(in.starts, (size_t)b * in.T + s)) { begin = s; }
    }
    return t - (begin > from ? begin : from);
}

// one more position is seen, as far as taps reach
__device__ inline int conv1d_one_more_(int seen, int K) { return seen < K - 1 ? seen + 1 : K - 1; }

// weight of W channels from c, M to each: tap k is [M - K + k], so the last is always [M - 1]
template <int M, int W, typename X>
__device__ inline Pack<float, M * W> conv1d_taps_(const X* weight, int c, int K) {
    if (W > 1) { return load_floats<M * W>(weight + (size_t)c * M); }  // K is M
    Pack<float, M * W> taps = {};
    for (int k = 0; k < M; k++) {
        if (k >= M - K) { taps.x[k] = to_float(weight[(size_t)c * K + k - (M - K)]); }
    }
    return taps;
}

template <int W, typename X>
__device__ inline Pack<float, W> conv1d_dconv_(const X* dout, const X* conv) {
    Pack<float, W> d = load_floats<W>(dout), v = load_floats<W>(conv);
    for (int i = 0; i < W; i++) {
        float slope;
        silu_and_slope_(v.x[i], &slope);
        d.x[i] *= slope;
    }
    return d;
}

// x[j]: the position M - 1 - j before t, where it is seen
template <int M, int W, typename X, int N>
__device__ inline void conv1d_before_(Pack<float, W> (&x)[N], const Conv1dInputs<X>& in, int b, int t, int c,
                                      int seen) {
    for (int j = 0; j < M - 1; j++) {
        x[j] = {};
        if (M - 1 - j <= seen) { x[j] = load_floats<W>(conv1d_position_(in, b, t - (M - 1) + j) + c); }
    }
}

// ---- forward and dinp: sums are the plain loop's chains in both builds ----

// the stretch and the channels of this thread of a Conv1dLaunch; 0: none
template <int W>
__device__ inline int conv1d_span_(Conv1dSpan* s, int* c, int B, int T, int C, int stretch) {
    const int n = (T + stretch - 1) / stretch, i = blockIdx.x * blockDim.y + threadIdx.y;
    s->b = i / n, s->first = i % n * stretch;
    s->last = T - s->first < stretch ? T : s->first + stretch;
    *c = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    return s->b < B && *c < C;
}

template <int M, int W, typename X>
__global__ void conv1d_forward_kernel(X* conv, X* out, Conv1dInputs<X> in, const X* weight, const X* bias,
                                      int stretch) {
    constexpr int G = CONV1D_BATCH;
    Conv1dSpan s;
    int c;
    if (!conv1d_span_<W>(&s, &c, in.B, in.T, in.C, stretch)) { return; }
    const Pack<float, M * W> taps = conv1d_taps_<M, W>(weight, c, in.K);
    const size_t row = (size_t)s.b * in.T;
    Pack<float, W> x[M - 1 + G], start = {};
    int seen = conv1d_seen_(in, s.b, s.first);
    if (bias) { start = load_floats<W>(bias + c); }
    conv1d_before_<M, W>(x, in, s.b, s.first, c, seen);
    for (int t = s.first; t < s.last; t += G) {
        for (int g = 0; g < G; g++) {
            if (t + g < s.last) { x[M - 1 + g] = load_floats<W>(in.inp + (row + t + g) * in.stride + c); }
        }
        for (int g = 0; g < G; g++) {
            if (t + g >= s.last) { break; }
            Pack<float, W> sum = start;
            if (conv1d_starts_(in.starts, row + t + g)) { seen = 0; }
            for (int j = 0; j < M; j++) {
                if (M - 1 - j > seen) { continue; }
                for (int i = 0; i < W; i++) { sum.x[i] = madd(taps.x[i * M + j], x[g + j].x[i], sum.x[i]); }
            }
            seen = conv1d_one_more_(seen, in.K);
            store_floats(conv + (row + t + g) * in.C + c, sum);
            for (int i = 0; i < W; i++) {
                float slope;
                sum.x[i] = silu_and_slope_(sum.x[i], &slope);
            }
            store_floats(out + (row + t + g) * in.C + c, sum);
        }
        for (int j = 0; j < M - 1; j++) { x[j] = x[j + G]; }
    }
}

// dconv of W channels from c at position t of row b, behind the last
template <int W>
__device__ inline Pack<float, W> conv1d_behind_(const float* ahead, int b, int t, int c, int T, int C, int K) {
    return load_floats<W>(ahead + ((size_t)b * (K - 1) + t - T) * C + c);
}

// of the K-1 positions behind t, how many have a tap that reaches it
__device__ inline int conv1d_reached_(const unsigned char* starts, const float* ahead, int b, int t, int T, int C,
                                      int K) {
    int n = 0;
    for (; n < K - 1; n++) {
        const int q = t + n + 1;
        if (q < T ? conv1d_starts_(starts, (size_t)b * T + q)
                  : !ahead || conv1d_is_nothing_(ahead + ((size_t)b * (K - 1) + q - T) * C)) { break; }
    }
    return n;
}

// from the last position of a stretch to the first; d[g + j] is dconv of the position j behind one
template <int M, int W, typename X>
__global__ void conv1d_dinp_kernel(X* dinp, size_t dinp_stride, const X* dout, const X* conv, const X* weight,
                                   const unsigned char* starts, const float* ahead, int B, int T, int C, int K,
                                   int stretch) {
    constexpr int G = CONV1D_BATCH;
    Conv1dSpan s;
    int c;
    if (!conv1d_span_<W>(&s, &c, B, T, C, stretch)) { return; }
    const Pack<float, M * W> taps = conv1d_taps_<M, W>(weight, c, K);
    const size_t row = (size_t)s.b * T;
    Pack<float, W> d[G + M - 1];
    int reached = conv1d_reached_(starts, ahead, s.b, s.last - 1, T, C, K);
    for (int j = 0; j < M - 1; j++) {
        const size_t at = (row + s.last + j) * C + c;
        d[j] = {};
        if (j >= reached) { continue; }
        d[j] = s.last + j < T ? conv1d_dconv_<W>(dout + at, conv + at)
                              : conv1d_behind_<W>(ahead, s.b, s.last + j, c, T, C, K);
    }
    for (int end = s.last; end > s.first; end -= G) {
        for (int j = M - 2; j >= 0; j--) { d[G + j] = d[j]; }
        for (int g = 0; g < G; g++) {
            const size_t at = (row + end - G + g) * C + c;
            if (end - G + g >= s.first) { d[g] = conv1d_dconv_<W>(dout + at, conv + at); }
        }
        for (int g = G - 1; g >= 0; g--) {
            const int t = end - G + g;
            if (t < s.first) { break; }
            Pack<float, W> sum = {};
            for (int j = M - 1; j >= 0; j--) {
                if (j > reached) { continue; }
                for (int i = 0; i < W; i++) { sum.x[i] = madd(taps.x[i * M + M - 1 - j], d[g + j].x[i], sum.x[i]); }
            }
            reached = conv1d_starts_(starts, row + t) ? 0 : conv1d_one_more_(reached, K);
            store_floats(dinp + (row + t) * dinp_stride + c, sum);
        }
    }
}

// ---- dweight and dbias: a thread's stretch is a part of all B*T positions, and parts are added in order ----

// what the positions of s add to dtaps, laid out as conv1d_taps_ does, and to dbias; in.inp NULL: to dbias alone
template <int M, int W, typename X>
__device__ inline void conv1d_add_span_(Pack<float, M * W>& dtaps, Pack<float, W>& dbias, const X* dout, const X* conv,
                                        const Conv1dInputs<X>& in, const Conv1dSpan& s, int c) {
    constexpr int G = CONV1D_BATCH;
    const size_t row = (size_t)s.b * in.T;
    Pack<float, W> x[M - 1 + G] = {}, d[G] = {};
    int seen = in.inp ? conv1d_seen_(in, s.b, s.first) : 0;
    if (in.inp) { conv1d_before_<M, W>(x, in, s.b, s.first, c, seen); }
    for (int t = s.first; t < s.last; t += G) {
        for (int g = 0; g < G; g++) {
            const size_t n = row + t + g;
            if (t + g >= s.last) { continue; }
            d[g] = conv1d_dconv_<W>(dout + n * in.C + c, conv + n * in.C + c);
            if (in.inp) { x[M - 1 + g] = load_floats<W>(in.inp + n * in.stride + c); }
        }
        for (int g = 0; g < G; g++) {
            if (t + g >= s.last) { break; }
            for (int i = 0; i < W; i++) { dbias.x[i] += d[g].x[i]; }
            if (conv1d_starts_(in.starts, row + t + g)) { seen = 0; }
            for (int j = 0; j < M; j++) {
                if (!in.inp || M - 1 - j > seen) { continue; }
                for (int i = 0; i < W; i++) {
                    dtaps.x[i * M + j] = madd(d[g].x[i], x[g + j].x[i], dtaps.x[i * M + j]);
                }
            }
            seen = conv1d_one_more_(seen, in.K);
        }
        for (int j = 0; j < M - 1; j++) { x[j] = x[j + G]; }
    }
}

// dweight (n_parts, C, K), dbias (n_parts, C): of part p the positions n * p / n_parts .. of all n. NULL: not asked
template <int M, int W, typename X>
__global__ void conv1d_parts_kernel(float* dweight, float* dbias, const X* dout, const X* conv, Conv1dInputs<X> in,
                                    int n_parts) {
    const int part = blockIdx.x * blockDim.y + threadIdx.y, c = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (part >= n_parts || c >= in.C) { return; }
    const int64_t n = (int64_t)in.B * in.T, last = n * (part + 1) / n_parts;
    Pack<float, M * W> dtaps = {};
    Pack<float, W> sum = {};
    for (int64_t first = n * part / n_parts; first < last;) {
        const int b = (int)(first / in.T), t = (int)(first % in.T);
        const int64_t end = last - first < in.T - t ? t + (last - first) : in.T;
        const Conv1dSpan s = {b, t, (int)end};
        conv1d_add_span_<M, W>(dtaps, sum, dout, conv, in, s, c);
        first += end - t;
    }
    if (dbias) { store_floats(dbias + (size_t)part * in.C + c, sum); }
    if (!dweight) { return; }
    float* to = dweight + ((size_t)part * in.C + c) * in.K;
    if (W > 1) {  // K is M
        store_floats(to, dtaps);
        return;
    }
    for (int k = 0; k < M; k++) {
        if (k >= M - in.K) { to[k - (M - in.K)] = dtaps.x[k]; }
    }
}

// sums (n) of parts (n_parts, n). A block (32, rows): row y of its threads adds the parts y, y + rows, ..., then the
// first row adds these sums
__global__ static void conv1d_add_parts_kernel(float* sums, const float* parts, int n_parts, int n) {
    __shared__ float of_rows[WARP][WARP];
    const int i = blockIdx.x * WARP + threadIdx.x;
    float sum = 0.0f;
    #pragma unroll 8
    for (int p = threadIdx.y; p < n_parts; p += blockDim.y) { sum += i < n ? parts[(size_t)p * n + i] : 0.0f; }
    of_rows[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || i >= n) { return; }
    for (int y = 1; y < (int)blockDim.y; y++) { sum += of_rows[y][threadIdx.x]; }
    sums[i] = sum;
}

// ---- launches ----

// a block has channels along x, stretches along y
typedef struct {
    dim3 grid, block;
    int stretch;
} Conv1dLaunch;

static inline Conv1dLaunch conv1d_blocks_(int64_t n_stretches, int stretch, int n_packs) {
    const int threads = n_packs < CONV1D_THREADS ? n_packs : (int)CONV1D_THREADS, rows = CONV1D_THREADS / threads;
    const Conv1dLaunch launch = {dim3((unsigned)ceil_div(n_stretches, rows), (unsigned)ceil_div(n_packs, threads)),
                                 dim3((unsigned)threads, (unsigned)rows), stretch};
    return launch;
}

// of forward and dinp: stretches so long that the GPU is just full, for each begins with positions of the one before
static inline Conv1dLaunch conv1d_launch_(int B, int T, int n_packs, const Device* dev) {
    const int64_t least = 8, most = 64, full = ceil_div((int64_t)B * T * n_packs, (int64_t)dev->n_sms * 1024);
    const int stretch = (int)(full < least ? least : full > most ? most : full);
    return conv1d_blocks_(B * ceil_div(T, stretch), stretch, n_packs);
}

// into how many parts the positions are cut
static inline int conv1d_n_parts_(int B, int T, int n_packs, const Device* dev) {
#ifdef EXACT
    (void)B, (void)T, (void)n_packs, (void)dev;
    return 1;  // a chain
#else
    const int64_t most = ceil_div((int64_t)B * T, 32), full = ceil_div((int64_t)dev->n_sms * 512, n_packs);
    return (int)(most < full ? most : full);
#endif
}

static inline void conv1d_add_parts_(float* sums, const float* parts, int n_parts, int n, const Device* dev) {
    const dim3 block(WARP, (unsigned)(n_parts < WARP ? n_parts : (int)WARP));
    conv1d_add_parts_kernel<<<(unsigned)ceil_div(n, WARP), block, 0, dev->stream>>>(sums, parts, n_parts, n);
}

template <int M, int W, typename X>
static inline void conv1d_backward_weight_(float* dweight, float* dbias, const X* dout, const X* conv,
                                           const Conv1dInputs<X>& in, const Device* dev) {
    const int n_packs = in.C / W, n_parts = conv1d_n_parts_(in.B, in.T, n_packs, dev), n = in.C * in.K;
    const Conv1dLaunch launch = conv1d_blocks_(n_parts, 0, n_packs);
    float *weight_parts = dweight, *bias_parts = dbias;
    if (n_parts > 1) {
        float* parts = device_workspace(dev, sizeof(float) * (size_t)n_parts * (size_t)(n + in.C));
        weight_parts = dweight ? parts : NULL, bias_parts = dbias ? parts + (size_t)n_parts * n : NULL;
    }
    conv1d_parts_kernel<M, W><<<launch.grid, launch.block, 0, dev->stream>>>(weight_parts, bias_parts, dout, conv, in,
                                                                            n_parts);
    // one part is the sum itself: adding it to 0 would lose the sign of -0, to which a tiny product rounds
    if (n_parts > 1 && dweight) { conv1d_add_parts_(dweight, weight_parts, n_parts, n, dev); }
    if (n_parts > 1 && dbias) { conv1d_add_parts_(dbias, bias_parts, n_parts, in.C, dev); }
}

template <int M, int W, typename X>
static inline void conv1d_forward_launch_(X* conv, X* out, const Conv1dInputs<X>& in, const X* weight, const X* bias,
                                          const Device* dev) {
    const Conv1dLaunch launch = conv1d_launch_(in.B, in.T, in.C / W, dev);
    conv1d_forward_kernel<M, W><<<launch.grid, launch.block, 0, dev->stream>>>(conv, out, in, weight, bias,
                                                                              launch.stretch);
}

template <int M, int W, typename X>
static inline void conv1d_dinp_launch_(X* dinp, size_t dinp_stride, const X* dout, const X* conv, const X* weight,
                                       const Conv1dInputs<X>& in, const float* ahead, const Device* dev) {
    const Conv1dLaunch launch = conv1d_launch_(in.B, in.T, in.C / W, dev);
    conv1d_dinp_kernel<M, W><<<launch.grid, launch.block, 0, dev->stream>>>(
        dinp, dinp_stride, dout, conv, weight, in.starts, ahead, in.B, in.T, in.C, in.K, launch.stretch);
}

template <typename X>
static inline void conv1d_forward(X* conv, X* out, const X* inp, size_t inp_stride, const X* weight,
                                  const typename MaybeNull<X>::type* bias, const typename MaybeNull<X>::type* history,
                                  const unsigned char* starts, int B, int T, int C, int K, const Device* dev) {
    constexpr int W = pack_width<X>(), M = CONV1D_PACKED;
    const Conv1dInputs<X> in = {inp, history, inp_stride, starts, B, T, C, K};
    conv1d_check_(K);
    if (B == 0 || T == 0 || C == 0) { return; }
    if (K == M && C % W == 0 && inp_stride % W == 0 && pack_aligned(conv, out, inp, weight, bias, history)) {
        conv1d_forward_launch_<M, W>(conv, out, in, weight, bias, dev);
    } else if (K <= M) {
        conv1d_forward_launch_<M, 1>(conv, out, in, weight, bias, dev);
    } else {
        conv1d_forward_launch_<CONV1D_MOST_TAPS, 1>(conv, out, in, weight, bias, dev);
    }
    cudaCheck(cudaGetLastError());
}

// dweight comes first, for dinp may be inp
template <typename X>
static inline void conv1d_backward(typename MaybeNull<X>::type* dinp, size_t dinp_stride, float* dweight, float* dbias,
                                   const X* dout, const X* conv, const typename MaybeNull<X>::type* inp,
                                   size_t inp_stride, const typename MaybeNull<X>::type* weight,
                                   const typename MaybeNull<X>::type* history, const float* ahead,
                                   const unsigned char* starts, int B, int T, int C, int K, const Device* dev) {
    constexpr int W = pack_width<X>(), M = CONV1D_PACKED, MOST = CONV1D_MOST_TAPS;
    const Conv1dInputs<X> in = {dweight ? inp : NULL, history, inp_stride, starts, B, T, C, K};
    const int packs = K == M && C % W == 0 && pack_aligned(dout, conv);
    conv1d_check_(K);
    if (B == 0 || T == 0 || C == 0) { return; }
    if (!dweight && !dbias) {
    } else if (packs && inp_stride % W == 0 && pack_aligned(in.inp, history, dweight, dbias)) {
        conv1d_backward_weight_<M, W>(dweight, dbias, dout, conv, in, dev);
    } else if (K <= M) {
        conv1d_backward_weight_<M, 1>(dweight, dbias, dout, conv, in, dev);
    } else {
        conv1d_backward_weight_<MOST, 1>(dweight, dbias, dout, conv, in, dev);
    }
    if (!dinp) {
    } else if (packs && dinp_stride % W == 0 && pack_aligned(dinp, weight, ahead)) {
        conv1d_dinp_launch_<M, W>(dinp, dinp_stride, dout, conv, weight, in, ahead, dev);
    } else if (K <= M) {
        conv1d_dinp_launch_<M, 1>(dinp, dinp_stride, dout, conv, weight, in, ahead, dev);
    } else {
        conv1d_dinp_launch_<MOST, 1>(dinp, dinp_stride, dout, conv, weight, in, ahead, dev);
    }
    cudaCheck(cudaGetLastError());
}

// ---- from one window to the next ----

// one block for each row: all have looked at its marks before one is overwritten. Elements are copied, not converted
template <typename X>
__global__ void conv1d_history_kernel(X* history, Conv1dInputs<X> in) {
    const int b = blockIdx.x, n = in.K - 1, hidden = n - conv1d_seen_(in, b, in.T);
    __syncthreads();
    for (int c = threadIdx.x; c < in.C; c += blockDim.x) {
        for (int j = 0; j < n; j++) {  // ascending: a position that stays moves down, over one that was read before
            X* to = history + ((size_t)b * n + j) * in.C + c;
            *to = j < hidden ? conv1d_nothing_as<X>() : conv1d_position_(in, b, in.T - n + j)[c];
        }
    }
}

template <typename X>
static inline void conv1d_history(X* history, const X* inp, size_t inp_stride, const unsigned char* starts, int B,
                                  int T, int C, int K, const Device* dev) {
    const Conv1dInputs<X> in = {inp, history, inp_stride, starts, B, T, C, K};
    conv1d_check_(K);
    if (B == 0 || C == 0 || K == 1) { return; }
    conv1d_history_kernel<<<(unsigned)B, 512, 0, dev->stream>>>(history, in);
    cudaCheck(cudaGetLastError());
}

// one block for each row
template <typename X>
__global__ void conv1d_ahead_kernel(float* ahead, const X* dout, const X* conv, const unsigned char* starts, int T,
                                    int C, int K) {
    const int b = blockIdx.x;
    int end = 0;  // the first start, if it is among the first K-1
    while (end < K - 1 && end < T && !conv1d_starts_(starts, (size_t)b * T + end)) { end++; }
    const int is_cut = end < K - 1 && end < T;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float* row = ahead + (size_t)b * (K - 1) * C + c;
        for (int j = K - 2; j >= 0; j--) {  // descending: a position that stays moves up, over one that was read before
            const size_t at = ((size_t)b * T + j) * C + c;
            row[(size_t)j * C] = is_cut && j >= end ? conv1d_nothing()
                                 : j >= T ? row[(size_t)(j - T) * C] : conv1d_dconv_<1>(dout + at, conv + at).x[0];
        }
    }
}

template <typename X>
static inline void conv1d_ahead(float* ahead, const X* dout, const X* conv, const unsigned char* starts, int B, int T,
                                int C, int K, const Device* dev) {
    conv1d_check_(K);
    if (B == 0 || C == 0 || K == 1) { return; }
    conv1d_ahead_kernel<<<(unsigned)B, 512, 0, dev->stream>>>(ahead, dout, conv, starts, T, C, K);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_CAUSAL_CONV1D_H
