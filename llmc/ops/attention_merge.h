/*
Attention whose keys come in blocks, one after the other: each block gives results of its own (attention.h, with
`keys`), and two of them become what both blocks together give.
    attention_merge      out (B, T, NH*HS), max, inv (B, NH, T) of the keys so far, and `more` of the same queries and
                         other keys: with sums of exponentials s = 1 / inv,
        max' = larger of max and more_max     s' = s exp(max - max') + more_s exp(more_max - max')     inv' = 1 / s'
        out' = out s exp(max - max') inv' + more more_s exp(more_max - max') inv'
                         Who has seen no key, inv 0, changes nothing: the other's numbers stay to the last bit
    attention_products   D (B, NH, T) = dout_t . out_t of each head: what backward subtracts from datt, of all keys
Order:  s' is the sum of what was there and what comes, in this order; out' = madd(more, its factor, out * its factor);
        D chains over channels, ascending. Blocks are merged in the order in which they are given.
Error:  with u = 2^-24 and the exponentials' 1 ulp: factors are off by 8 u of themselves, out' by 10 u (|out| + |more|)
        and one rounding to X; of n blocks, n times as much, for weights are at most 1.
Cost:   memory bound: 3 elements moved for each of out; products 2.
Source: the online softmax, Milakov & Gimelshein 2018, arXiv:1805.02867; of blocks on several ranks: Liu et al. 2023,
        arXiv:2310.01889
*/
#ifndef LLMC_ATTENTION_MERGE_H
#define LLMC_ATTENTION_MERGE_H
#include "../core/device.h"  // Device
#include "../core/fmath.h"   // fm_exp, FM_FUNCTION
#include "../core/kernel.h"  // WARP, kernel_exp, to_float, from_float
#include "../core/madd.h"    // madd

// what is left of either side: out' = madd(more, b, out * a)
typedef struct { float a, b, max, inv; } AttentionMerged;

FM_FUNCTION float attention_larger_(float x, float y) { return y > x ? y : x; }

// e, more_e: exp(max - larger) and exp(more_max - larger)
FM_FUNCTION AttentionMerged attention_merged_(float max, float inv, float more_max, float more_inv, float e,
                                              float more_e) {
    const float s = e / inv, more_s = more_e / more_inv, r = 1.0f / (s + more_s);
    const AttentionMerged x = {s * r, more_s * r, attention_larger_(max, more_max), r};
    return x;
}

// ---- plain C: it defines every bit ----

static inline void attention_merge_row_ref(float* out, float* max, float* inv, const float* more, float more_max,
                                           float more_inv, int HS) {
    const float top = attention_larger_(*max, more_max);
    if (more_inv == 0.0f) { return; }
    if (*inv == 0.0f) {
        for (int i = 0; i < HS; i++) { out[i] = more[i]; }
        *max = more_max, *inv = more_inv;
        return;
    }
    const AttentionMerged x = attention_merged_(*max, *inv, more_max, more_inv, fm_exp(*max - top),
                                                fm_exp(more_max - top));
    for (int i = 0; i < HS; i++) { out[i] = madd(more[i], x.b, out[i] * x.a); }
    *max = x.max, *inv = x.inv;
}

static inline void attention_merge_ref(float* out, float* max, float* inv, const float* more, const float* more_max,
                                       const float* more_inv, int B, int T, int NH, int HS) {
    for (int row = 0; row < B * NH * T; row++) {  // as max has them
        const int t = row % T, h = row / T % NH, b = row / T / NH;
        const size_t at = (((size_t)b * (size_t)T + (size_t)t) * (size_t)NH + (size_t)h) * (size_t)HS;
        attention_merge_row_ref(out + at, max + row, inv + row, more + at, more_max[row], more_inv[row], HS);
    }
}

static inline void attention_products_ref(float* D, const float* dout, const float* out, int B, int T, int NH,
                                          int HS) {
    for (int row = 0; row < B * NH * T; row++) {
        const int t = row % T, h = row / T % NH, b = row / T / NH;
        const size_t at = (((size_t)b * (size_t)T + (size_t)t) * (size_t)NH + (size_t)h) * (size_t)HS;
        float sum = 0.0f;
        for (int i = 0; i < HS; i++) { sum = madd(dout[at + (size_t)i], out[at + (size_t)i], sum); }
        D[row] = sum;
    }
}

#ifndef __CUDACC__  // ---- fast C: the rows of a position one behind the other, as they lie ----

static inline void attention_merge(float* out, float* max, float* inv, const float* more, const float* more_max,
                                   const float* more_inv, int B, int T, int NH, int HS, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < B * T; n++) {
        for (int h = 0; h < NH; h++) {
            const size_t row = ((size_t)(n / T) * (size_t)NH + (size_t)h) * (size_t)T + (size_t)(n % T);
            const size_t at = ((size_t)n * (size_t)NH + (size_t)h) * (size_t)HS;
            const float top = attention_larger_(max[row], more_max[row]);
            float* y = out + at;
            if (more_inv[row] == 0.0f) { continue; }
            if (inv[row] == 0.0f) {
                memcpy(y, more + at, sizeof(float) * (size_t)HS);
                max[row] = more_max[row], inv[row] = more_inv[row];
                continue;
            }
            const AttentionMerged x = attention_merged_(max[row], inv[row], more_max[row], more_inv[row],
                                                        fm_exp(max[row] - top), fm_exp(more_max[row] - top));
            #pragma omp simd
            for (int i = 0; i < HS; i++) { y[i] = madd(more[at + (size_t)i], x.b, y[i] * x.a); }
            max[row] = x.max, inv[row] = x.inv;
        }
    }
}

static inline void attention_products(float* D, const float* dout, const float* out, int B, int T, int NH, int HS,
                                      const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int n = 0; n < B * T; n++) {
        for (int h = 0; h < NH; h++) {
            const size_t at = ((size_t)n * (size_t)NH + (size_t)h) * (size_t)HS;
            float sum = 0.0f;
            for (int i = 0; i < HS; i++) { sum = madd(dout[at + (size_t)i], out[at + (size_t)i], sum); }
            D[((size_t)(n / T) * (size_t)NH + (size_t)h) * (size_t)T + (size_t)(n % T)] = sum;
        }
    }
}
#else  // ---- CUDA: one bit pattern in both builds but for the exponential. A warp has a row: block (WARP, MERGE_WARPS)

enum { MERGE_WARPS = 4 };

// where out has row n of max, neighbours in memory being neighbours in n; *row: where max has it
__device__ inline size_t attention_merge_at_(size_t* row, int64_t n, int T, int NH, int HS) {
    const int h = (int)(n % NH), t = (int)(n / NH % T), b = (int)(n / NH / T);
    *row = ((size_t)b * NH + h) * T + t;
    return (size_t)n * HS;
}

template <typename X>
__global__ void attention_merge_kernel(X* out, float* max, float* inv, const X* more, const float* more_max,
                                       const float* more_inv, int64_t n_rows, int T, int NH, int HS) {
    const int64_t n = (int64_t)blockIdx.x * MERGE_WARPS + threadIdx.y;
    size_t row;
    if (n >= n_rows) { return; }
    const size_t at = attention_merge_at_(&row, n, T, NH, HS);
    const float m = max[row], r = inv[row], more_m = more_max[row], more_r = more_inv[row];
    if (more_r == 0.0f) { return; }
    const float top = attention_larger_(m, more_m);
    AttentionMerged x = {0.0f, 1.0f, more_m, more_r};
    if (r != 0.0f) { x = attention_merged_(m, r, more_m, more_r, kernel_exp(m - top), kernel_exp(more_m - top)); }
    for (int i = threadIdx.x; i < HS; i += WARP) {
        const float y = to_float(more[at + i]);
        out[at + i] = from_float<X>(r == 0.0f ? y : madd(y, x.b, to_float(out[at + i]) * x.a));
    }
    __syncwarp();  // all lanes have read
    if (threadIdx.x == 0) { max[row] = x.max, inv[row] = x.inv; }
}

template <typename X>
__global__ void attention_products_kernel(float* D, const X* dout, const X* out, int64_t n_rows, int T, int NH,
                                          int HS) {
    const int64_t n = (int64_t)blockIdx.x * MERGE_WARPS + threadIdx.y;
    size_t row;
    if (n >= n_rows) { return; }
    const size_t at = attention_merge_at_(&row, n, T, NH, HS);
    float sum = 0.0f;
    for (int i = threadIdx.x; i - (int)threadIdx.x < HS; i += WARP) {  // -0 * 0 leaves every sum as it is
        sum = row_madd(i < HS ? to_float(dout[at + i]) : -0.0f, i < HS ? to_float(out[at + i]) : 0.0f, sum);
    }
    sum = row_total(sum);
    if (threadIdx.x == 0) { D[row] = sum; }
}

template <typename X>
static inline void attention_merge(X* out, float* max, float* inv, const X* more, const float* more_max,
                                   const float* more_inv, int B, int T, int NH, int HS, const Device* dev) {
    const int64_t n_rows = (int64_t)B * T * NH;
    attention_merge_kernel<<<(unsigned)ceil_div(n_rows, MERGE_WARPS), dim3(WARP, MERGE_WARPS), 0, dev->stream>>>(
        out, max, inv, more, more_max, more_inv, n_rows, T, NH, HS);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void attention_products(float* D, const X* dout, const X* out, int B, int T, int NH, int HS,
                                      const Device* dev) {
    const int64_t n_rows = (int64_t)B * T * NH;
    attention_products_kernel<<<(unsigned)ceil_div(n_rows, MERGE_WARPS), dim3(WARP, MERGE_WARPS), 0, dev->stream>>>(
        D, dout, out, n_rows, T, NH, HS);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_ATTENTION_MERGE_H
