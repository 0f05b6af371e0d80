/*
Causal depthwise convolution and SiLU: every channel mixes its own last K inputs.
    conv[t] = bias + sum over k of weight[k] * inp[t - (K-1) + k],  out = silu(conv), for each row and channel
    inp (B, T, C), positions inp_stride floats apart   weight (C, K)   bias (C) or NULL   conv, out (B, T, C)
    1 <= K <= 16. conv is kept for backward; where none follows, it may be out.
Where a row begins, the taps that would reach before it are left out. Two arguments move that beginning:
    history  (B, K-1, C) or NULL: the inputs before position 0, oldest first, left there by conv1d_history. So a
             sequence may come in windows of any length, with the bits of the whole. Filled with conv1d_nothing():
             nothing stands before. Zeros are inputs that are zero
    starts   (B, T) or NULL: 1 where a document begins; no tap of a later position reaches before it, nor into a history
Backward, with dconv = dout * silu'(conv) (derived in doc/conv1d.md), everything written; dinp may be inp. NULL for any
of the three: nobody asks for it, and nothing is done for it
    dinp[t]    = sum over k of weight[k] * dconv[t + (K-1) - k]          (B, T, C), positions dinp_stride floats apart
    dweight[k] = sum over b, t of dconv[t] * inp[t - (K-1) + k]     (C, K)
    dbias      = sum over b, t of dconv                             (C)
dweight sees a history. Inputs that later windows have seen, too, get their gradients where these come first:
    ahead    (B, K-1, C) or NULL: dconv of the positions behind the last, nearest first, left there by conv1d_ahead;
             filled with conv1d_nothing(): nothing follows. NULL: what follows is not asked, a history is constant
Cost:   per element with 4 taps 1.3 ns forward and 1.7 ns backward, of which SiLU takes 0.9 and 1.1: the taps themselves
        go at the speed of memory, 3*B*T*C floats moved forward and 4*B*T*C backward. One thread, AVX-512, gcc 12, Intel
        Sapphire Rapids class, (B, T, C) = (1, 512, 1536), the smallest of 100 calls on a busy machine.
Order:  conv chains over k from the bias (0 without one), dinp over k from 0: latest position first; dweight and dbias
        chain over positions b * T + t from 0. A tap that is left out adds nothing, not a zero. Lanes hold neighbouring
        channels.
Source: Gu & Dao 2023, arXiv:2312.00752, section 3.4 and figure 3
*/
#ifndef LLMC_CAUSAL_CONV1D_H
#define LLMC_CAUSAL_CONV1D_H
#include "../core/device.h"  // Device, ceil_div, fail_run
#include "silu.h"            // silu_one, silu_slope_one
#ifndef __CUDACC__
#include "../core/vec.h"  // vfloat, v_load, v_store
#endif

enum { CONV1D_MOST_TAPS = 16 };

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

static inline int conv1d_is_nothing_(const float* position) {
    int32_t bits;
    memcpy(&bits, position, sizeof bits);
    return bits == CONV1D_NOTHING;
}

static inline float conv1d_nothing(void) {
    const int32_t bits = CONV1D_NOTHING;
    float nothing;
    memcpy(&nothing, &bits, sizeof bits);
    return nothing;
}

static inline void conv1d_set_nothing_(float* position, int C) {
    for (int c = 0; c < C; c++) { position[c] = conv1d_nothing(); }
}

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

// ---- from one window to the next ----

// history becomes what stands before the next window: the last K-1 positions of history and inp together; what a start
// in this window hides is nothing
static inline void conv1d_history(float* history, const float* inp, size_t inp_stride, const unsigned char* starts,
                                  int B, int T, int C, int K) {
    Conv1dWindow w = {inp, inp_stride, history, starts, T, C, K, NULL};
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
                                int T, int C, int K) {
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

#ifndef __CUDACC__  // ---- fast C: a thread has a block of channels; its lanes hold neighbouring ones ----

enum { CONV1D_WIDTH = 256 };  // channels of a block, at most
typedef float Conv1dTaps[CONV1D_MOST_TAPS][CONV1D_WIDTH] __attribute__((aligned(64)));

static inline void conv1d_check_(int K) {
    if (K < 1 || K > CONV1D_MOST_TAPS) { fail_run("conv1d: %d taps: expected 1 to %d", K, CONV1D_MOST_TAPS); }
}

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
#endif
#endif  // LLMC_CAUSAL_CONV1D_H
