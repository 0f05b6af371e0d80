/*
Linear layer: out = inp * weight^T + bias.
    inp (N, C)   out (N, OC)   weight (OC, C), one row per output   bias (OC) or NULL   N = B*T positions
    with GELU behind it: pre (N, OC) = inp * weight^T + bias, out = gelu(pre)
Backward (derived in doc/matmul.md). NULL for any of the three: nobody asks for it, and nothing is done for it
    dinp    = dout * weight          (N, C)   written
    dweight = dout^T * inp           (OC, C)  float; written: one call is one leaf (doc/exactness.md rule 3)
    dbias   = sum over n of dout     (OC)     float, written
    with GELU before it, inp = gelu(pre): dpre = gelu'(pre) * (dout * weight)  (N, C)  written
matmul_backward is all three; matmul_backward_input, matmul_backward_weight and matmul_backward_bias are one each. With
add 1 the first goes on from what is in dinp, where several layers read inp, and the second from what is in dweight,
where the weight is used twice; matmul_forward_on goes on from what is in out, without bias. A weight that does not
learn may be bf16, fp8 or fp4 (core/stored.h): matmul_forward_stored and matmul_backward_input_stored have the bits of
the same numbers as floats; on a GPU, where X is bf16, those of the same numbers as bf16 (widen.h).
Cost:   compute bound: forward 2*N*C*OC flops, backward twice that. Judge it in GFLOP/s, matmul_backward_bias, which
        reads N*OC elements, in GB/s.
Error:  a plain chain of K float sums: |error| <= K * 2^-24 * (sum of |products|); stored as bf16, 2^-8 of the result
        more.
Order:  forward chains over c from the bias, dinp over oc from 0, dweight and dbias over n from 0 (dinp and dweight with
        add 1: from their old values), all ascending. Fast CUDA builds: gemm_cublas.h, but few_rows.h for matmul_forward
        of at most 16 rows of bf16; and matmul_backward_bias along a tree that only N and OC choose. There, fused 1
        takes gelu of pre before pre is rounded to X: out may be off gelu_forward(pre) in its last bit, so a trainer
        that recomputes out in its backward wants fused 0; and it multiplies by gelu'(pre) before dout * weight is
        rounded. Where cuBLASLt does not take the product with its GELU, fused is as 0.
Source: Linnainmaa 1970 for the derivative; the fast products: llmc/ops/gemm.h, llmc/ops/gemm_cublas.h; how one gets
        there: dev/cuda/matmul.cu
*/
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H
#include "few_rows.h"     // in a fast CUDA build: few_rows_outputs
#include "gelu.h"         // gelu_forward, gelu_forward_ref
#include "gemm.h"         // gemm, matrix, transposed, MaybeNull, Device
#include "gemm_cublas.h"  // gemm_cublas
#include "thin_gemm.h"    // thin_gemm, gemm
#include "widen.h"        // in a CUDA build: widen_matrix

// ---- plain C: read this first; it defines every bit ----

static inline void matmul_forward_ref(float* out, const float* inp, const float* weight, const float* bias,
                                      int N, int C, int OC) {
    for (size_t n = 0; n < (size_t)N; n++) {
        for (size_t oc = 0; oc < (size_t)OC; oc++) {
            float sum = bias ? bias[oc] : 0.0f;
            for (int c = 0; c < C; c++) { sum = madd(inp[n * C + c], weight[oc * C + c], sum); }
            out[n * OC + oc] = sum;
        }
    }
}

static inline void matmul_gelu_forward_ref(float* out, float* pre, const float* inp, const float* weight,
                                           const float* bias, int N, int C, int OC) {
    matmul_forward_ref(pre, inp, weight, bias, N, C, OC);
    gelu_forward_ref(out, pre, (size_t)N * (size_t)OC);
}

static inline void matmul_backward_input_ref(float* dinp, const float* dout, const float* weight, int add, int N,
                                             int C, int OC) {
    if (!dinp) { return; }
    for (size_t n = 0; n < (size_t)N; n++) {
        for (size_t c = 0; c < (size_t)C; c++) {
            float sum = add ? dinp[n * C + c] : 0.0f;
            for (size_t oc = 0; oc < (size_t)OC; oc++) { sum = madd(dout[n * OC + oc], weight[oc * C + c], sum); }
            dinp[n * C + c] = sum;
        }
    }
}

static inline void matmul_gelu_backward_input_ref(float* dpre, const float* dout, const float* weight, const float* pre,
                                                  int N, int C, int OC) {
    matmul_backward_input_ref(dpre, dout, weight, 0, N, C, OC);
    gelu_backward_ref(dpre, pre, dpre, (size_t)N * (size_t)C);
}

static inline void matmul_backward_weight_ref(float* dweight, const float* dout, const float* inp, int add,
                                              int N, int C, int OC) {
    if (!dweight) { return; }
    for (size_t oc = 0; oc < (size_t)OC; oc++) {
        for (size_t c = 0; c < (size_t)C; c++) {
            float sum = add ? dweight[oc * C + c] : 0.0f;
            for (size_t n = 0; n < (size_t)N; n++) { sum = madd(dout[n * OC + oc], inp[n * C + c], sum); }
            dweight[oc * C + c] = sum;
        }
    }
}

static inline void matmul_backward_bias_ref(float* sums, const float* x, int N, int OC) {
    if (!sums) { return; }
    for (size_t oc = 0; oc < (size_t)OC; oc++) {
        float sum = 0.0f;
        for (size_t n = 0; n < (size_t)N; n++) { sum += x[n * OC + oc]; }
        sums[oc] = sum;
    }
}

static inline void matmul_backward_ref(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                                       const float* weight, int N, int C, int OC) {
    matmul_backward_input_ref(dinp, dout, weight, 0, N, C, OC);
    matmul_backward_weight_ref(dweight, dout, inp, 0, N, C, OC);
    matmul_backward_bias_ref(dbias, dout, N, OC);
}

#ifndef __CUDACC__  // ---- fast C: the same chains, many outputs at a time ----

static inline void matmul_forward(float* out, const float* inp, const float* weight, const float* bias,
                                  int N, int C, int OC, const Device* dev) {
    thin_gemm(out, OC, bias, 0, gemm_matrix(inp, C), gemm_transposed(weight, C), N, OC, C, dev);
}

static inline void matmul_forward_on(float* out, const float* inp, const float* weight, int N, int C, int OC,
                                     const Device* dev) {
    gemm(out, OC, out, OC, gemm_matrix(inp, C), gemm_transposed(weight, C), N, OC, C, dev);
}

// weight (OC, C)
static inline void matmul_forward_stored(float* out, const float* inp, StoredMatrix weight, const float* bias, int N,
                                         const Device* dev) {
    const int C = weight.columns, OC = weight.rows;
    gemm(out, OC, bias, 0, gemm_matrix(inp, C), gemm_stored_transposed(weight), N, OC, C, dev);
}

static inline void matmul_gelu_forward(float* out, float* pre, const float* inp, const float* weight, const float* bias,
                                       int fused, int N, int C, int OC, const Device* dev) {
    (void)fused;
    matmul_forward(pre, inp, weight, bias, N, C, OC, dev);
    gelu_forward(out, pre, (size_t)N * (size_t)OC, dev);
}

static inline void matmul_backward_input(float* dinp, const float* dout, const float* weight, int add, int N, int C,
                                         int OC, const Device* dev) {
    if (!dinp) { return; }
    gemm(dinp, C, add ? dinp : NULL, C, gemm_matrix(dout, OC), gemm_matrix(weight, C), N, C, OC, dev);
}

static inline void matmul_backward_input_stored(float* dinp, const float* dout, StoredMatrix weight, int add, int N,
                                                const Device* dev) {
    const int C = weight.columns, OC = weight.rows;
    if (!dinp) { return; }
    gemm(dinp, C, add ? dinp : NULL, C, gemm_matrix(dout, OC), gemm_stored(weight), N, C, OC, dev);
}

static inline void matmul_backward_weight(float* dweight, const float* dout, const float* inp, int add,
                                          int N, int C, int OC, const Device* dev) {
    if (!dweight) { return; }
    thin_gemm(dweight, C, add ? dweight : NULL, C, gemm_transposed(dout, OC), gemm_matrix(inp, C), OC, C, N, dev);
}

static inline void matmul_gelu_backward_input(float* dpre, const float* dout, const float* weight, const float* pre,
                                              int fused, int N, int C, int OC, const Device* dev) {
    (void)fused;
    matmul_backward_input(dpre, dout, weight, 0, N, C, OC, dev);
    gelu_backward(dpre, pre, dpre, (size_t)N * (size_t)C, dev);
}

// lanes and threads hold neighbouring oc, every one runs down its own column
static inline void matmul_backward_bias(float* sums, const float* x, int N, int OC, const Device* dev) {
    (void)dev;
    if (!sums) { return; }
    const int width = 64;
    #pragma omp parallel for
    for (int first = 0; first < OC; first += width) {
        float block[64] = {0};
        int n_valid = OC - first < width ? OC - first : width;
        for (size_t n = 0; n < (size_t)N; n++) {
            const float* row = x + n * OC + first;
            for (int i = 0; i < n_valid; i++) { block[i] += row[i]; }
        }
        memcpy(sums + first, block, sizeof(float) * n_valid);
    }
}

static inline void matmul_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                                   const float* weight, int N, int C, int OC, const Device* dev) {
    matmul_backward_input(dinp, dout, weight, 0, N, C, OC, dev);
    matmul_backward_weight(dweight, dout, inp, 0, N, C, OC, dev);
    matmul_backward_bias(dbias, dout, N, OC, dev);
}

#else  // ---- CUDA ----

// out = a * b + bias, or out + a * b: our own kernel in EXACT builds, and for shapes that cuBLASLt would not do fast
template <typename Out, typename X>
static inline void matmul_product_(Out* out, const typename MaybeNull<Out>::type* bias, int add, MatrixOf<X> a,
                                   MatrixOf<X> b, int M, int N, int K, const Device* dev) {
#ifndef EXACT
    if (gemm_cublas(out, (size_t)N, bias, NULL, 1.0f, add, a, b, M, N, K, dev)) { return; }
#endif
    gemm(out, (size_t)N, add ? out : bias, add ? (size_t)N : 0, a, b, M, N, K, dev);
}

#ifndef EXACT
// block is (FEW_THREADS), grid the outputs
template <int TILES, typename Out, typename Weight>
__global__ void __launch_bounds__(FEW_THREADS, 2)
matmul_few_kernel(Out* out, const bf16* inp, Weight weight, const Out* bias, int N, int C, int OC) {
    auto row_of = [](int n) { return n; };
    few_rows_outputs<TILES>(out, inp, row_of, weight, bias, N, (int)blockIdx.x * FEW_OUTPUTS, C, OC);
}

template <typename Out, typename Weight>
static inline void matmul_few_launch_(Out* out, const bf16* inp, Weight weight,
                                      const typename MaybeNull<Out>::type* bias, int N, int C, int OC,
                                      const Device* dev) {
    unsigned grid = (unsigned)ceil_div(OC, FEW_OUTPUTS);
    if (N <= 8) {
        matmul_few_kernel<1><<<grid, FEW_THREADS, 0, dev->stream>>>(out, inp, weight, bias, N, C, OC);
    } else {
        matmul_few_kernel<2><<<grid, FEW_THREADS, 0, dev->stream>>>(out, inp, weight, bias, N, C, OC);
    }
    cudaCheck(cudaGetLastError());
}

// 1: done. 0: not for these rows or, the templates of X, not for this type
template <typename Out>
static inline int matmul_few_(Out* out, const bf16* inp, const bf16* weight, const typename MaybeNull<Out>::type* bias,
                              int N, int C, int OC, const Device* dev) {
    if (!few_rows_fit(inp, weight, N, C)) { return 0; }
    matmul_few_launch_(out, inp, FewHalves{weight, C}, bias, N, C, OC, dev);
    return 1;
}
template <typename Out, typename X>
static inline int matmul_few_(Out*, const X*, const X*, const typename MaybeNull<Out>::type*, int, int, int,
                              const Device*) {
    return 0;
}

template <typename Out>
static inline int matmul_few_codes_(Out* out, const bf16* inp, const StoredMatrix* w,
                                    const typename MaybeNull<Out>::type* bias, int N, const Device* dev) {
    if (!few_codes_fit(inp, w, N)) { return 0; }
    few_codes_launch(w, [=](auto codes) {
        matmul_few_launch_(out, inp, codes, bias, N, w->columns, w->rows, dev);
    });
    return 1;
}
template <typename Out, typename X>
static inline int matmul_few_codes_(Out*, const X*, const StoredMatrix*, const typename MaybeNull<Out>::type*, int,
                                    const Device*) {
    return 0;
}
#endif

// out may be float where the others are bf16
template <typename Out, typename X>
static inline void matmul_forward(Out* out, const X* inp, const X* weight, const typename MaybeNull<Out>::type* bias,
                                  int N, int C, int OC, const Device* dev) {
#ifndef EXACT
    if (matmul_few_(out, inp, weight, bias, N, C, OC, dev)) { return; }
#endif
    matmul_product_(out, bias, 0, gemm_matrix(inp, C), gemm_transposed(weight, C), N, OC, C, dev);
}

// weight (OC, C)
template <typename Out, typename X>
static inline void matmul_forward_stored(Out* out, const X* inp, StoredMatrix weight,
                                         const typename MaybeNull<Out>::type* bias, int N, const Device* dev) {
#ifndef EXACT
    if (matmul_few_codes_(out, inp, &weight, bias, N, dev)) { return; }
#endif
    matmul_forward(out, inp, widen_matrix<X>(&weight, dev), bias, N, weight.columns, weight.rows, dev);
}

template <typename X>
static inline void matmul_forward_on(X* out, const X* inp, const X* weight, int N, int C, int OC, const Device* dev) {
    matmul_product_(out, NULL, 1, gemm_matrix(inp, C), gemm_transposed(weight, C), N, OC, C, dev);
}

template <typename X>
static inline void matmul_gelu_forward(X* out, X* pre, const X* inp, const X* weight,
                                       const typename MaybeNull<X>::type* bias, int fused, int N, int C, int OC,
                                       const Device* dev) {
#ifndef EXACT
    MatrixOf<X> a = gemm_matrix(inp, (size_t)C), b = gemm_transposed(weight, (size_t)C);
    int is_few = sizeof(X) < sizeof(float) && N <= FEW_ROWS;  // a text that is written: matmul_few_
    if (fused && !is_few && gemm_cublas(out, (size_t)OC, bias, pre, 1.0f, 0, a, b, N, OC, C, dev)) { return; }
#else
    (void)fused;
#endif
    matmul_forward(pre, inp, weight, bias, N, C, OC, dev);
    gelu_forward(out, pre, (size_t)N * (size_t)OC, dev);
}

template <typename X>
static inline void matmul_backward_input(X* dinp, const X* dout, const X* weight, int add, int N, int C, int OC,
                                         const Device* dev) {
    if (!dinp) { return; }
    matmul_product_(dinp, NULL, add, gemm_matrix(dout, OC), gemm_matrix(weight, C), N, C, OC, dev);
}

template <typename X>
static inline void matmul_backward_input_stored(X* dinp, const X* dout, StoredMatrix weight, int add, int N,
                                                const Device* dev) {
    if (!dinp) { return; }
    matmul_backward_input(dinp, dout, widen_matrix<X>(&weight, dev), add, N, weight.columns, weight.rows, dev);
}

template <typename X>
static inline void matmul_gelu_backward_input(X* dpre, const X* dout, const X* weight, const X* pre, int fused, int N,
                                              int C, int OC, const Device* dev) {
#ifndef EXACT
    MatrixOf<X> a = gemm_matrix(dout, (size_t)OC), b = gemm_matrix(weight, (size_t)C);
    if (fused && gemm_cublas_gelu_slope(dpre, pre, a, b, N, C, OC, dev)) { return; }
#else
    (void)fused;
#endif
    matmul_backward_input(dpre, dout, weight, 0, N, C, OC, dev);
    gelu_backward(dpre, pre, dpre, (size_t)N * (size_t)C, dev);
}

template <typename X>
static inline void matmul_backward_weight(float* dweight, const X* dout, const X* inp, int add, int N, int C, int OC,
                                          const Device* dev) {
    if (!dweight) { return; }
    matmul_product_(dweight, NULL, add, gemm_transposed(dout, OC), gemm_matrix(inp, C), OC, C, N, dev);
}

// ---- sums of columns: a warp takes WARP * W neighbouring columns and runs down, lane l those from l * W ----

#ifdef EXACT
enum { COLUMN_WARPS = 1, COLUMN_BLOCKS = 1 };    // every sum is one chain
#else
enum { COLUMN_WARPS = 8, COLUMN_BLOCKS = 792 };  // six of each of 132 multiprocessors: 4.2 TB/s, of two 3.4 (an H200)
#endif

// block is (WARP, COLUMN_WARPS), grid (packs of columns, slices of `rows` rows). sums (gridDim.y, OC): one row for each
// slice. The warps of a block take rows in turn and are added up in order
template <int W, typename X>
__global__ void matmul_backward_bias_kernel(float* sums, const X* x, int rows, int N, int OC) {
    __shared__ float of_warps[COLUMN_WARPS][WARP * W];
    int lane = threadIdx.x, warp = threadIdx.y, first = (blockIdx.x * WARP + lane) * W;
    int begin = blockIdx.y * rows, end = begin + rows < N ? begin + rows : N;
    float sum[W] = {0.0f};
    if (first < OC) {  // W divides OC: a pack lies inside its row
        #pragma unroll 4
        for (int n = begin + warp; n < end; n += COLUMN_WARPS) {
            Pack<X, W> pack = pack_load<W>(x + (size_t)n * OC + first);
            for (int i = 0; i < W; i++) { sum[i] += to_float(pack.x[i]); }
        }
    }
    for (int i = 0; i < W; i++) { of_warps[warp][lane * W + i] = sum[i]; }
    __syncthreads();
    for (int i = warp * WARP + lane; i < WARP * W; i += WARP * COLUMN_WARPS) {
        int column = blockIdx.x * WARP * W + i;
        float total = of_warps[0][i];
        for (int w = 1; w < COLUMN_WARPS; w++) { total += of_warps[w][i]; }
        if (column < OC) { sums[(size_t)blockIdx.y * OC + column] = total; }
    }
}

template <typename X>
static inline void matmul_backward_bias_launch_(float* sums, const X* x, int rows, int N, int OC, const Device* dev) {
    const int width = pack_width<X>();
    dim3 block(WARP, COLUMN_WARPS);
    if (pack_fits(x, OC)) {
        dim3 grid((unsigned)ceil_div(OC, WARP * width), (unsigned)ceil_div(N, rows));
        matmul_backward_bias_kernel<width><<<grid, block, 0, dev->stream>>>(sums, x, rows, N, OC);
    } else {
        dim3 grid((unsigned)ceil_div(OC, WARP), (unsigned)ceil_div(N, rows));
        matmul_backward_bias_kernel<1><<<grid, block, 0, dev->stream>>>(sums, x, rows, N, OC);
    }
    cudaCheck(cudaGetLastError());
}

// rows are cut into as many slices as it takes to have COLUMN_BLOCKS blocks, none shorter than 64 rows; a second pass
// adds the slices
template <typename X>
static inline void matmul_backward_bias(float* sums, const X* x, int N, int OC, const Device* dev) {
    if (!sums) { return; }
    int64_t columns = WARP * (pack_fits(x, OC) ? pack_width<X>() : 1), slices = COLUMN_BLOCKS / ceil_div(OC, columns);
    int64_t longest = ceil_div(N, slices > 0 ? slices : 1);
    int rows = COLUMN_BLOCKS == 1 ? N : longest > 64 ? (int)longest : 64;
    int n_slices = (int)ceil_div(N, rows);
    if (n_slices <= 1) {
        matmul_backward_bias_launch_(sums, x, rows, N, OC, dev);
        return;
    }
    float* parts = device_workspace(dev, sizeof(float) * (size_t)n_slices * (size_t)OC);
    matmul_backward_bias_launch_(parts, x, rows, N, OC, dev);
    matmul_backward_bias_launch_(sums, (const float*)parts, n_slices, n_slices, OC, dev);
}

template <typename X>
static inline void matmul_backward(typename MaybeNull<X>::type* dinp, float* dweight, float* dbias, const X* dout,
                                   const X* inp, const X* weight, int N, int C, int OC, const Device* dev) {
    matmul_backward_input(dinp, dout, weight, 0, N, C, OC, dev);
    matmul_backward_weight(dweight, dout, inp, 0, N, C, OC, dev);
    matmul_backward_bias(dbias, dout, N, OC, dev);
}
#endif  // __CUDACC__
#endif  // LLMC_MATMUL_H
