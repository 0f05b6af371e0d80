/*
LoRA: beside a linear layer whose weight does not learn stands an adapter, two thin matrices A and B that do. The
layer's outputs go on with scale * B A x.
    inp (N, C)   A (r, C)   B (n_out, r)   r, the rank, is small: 4 to 64
    out          n_out columns of rows out_row apart, for gate and up are halves of one product; what is between stays
        x = inp, or in training dropout(inp)
        u = scale * (x A^T)      (N, r)
        out += u B^T
Backward (derived in doc/lora.md), dout lying as out does. NULL for any of the three: nobody asks for it
    dB = dout^T u                (n_out, r)   float, written: one call is one leaf
    du = scale * (dout B)        (N, r)
    dA = du^T x                  (r, C)       float, written
    dinp += du A                 (N, C)       it holds the gradient by way of the weight, or of another adapter, too
    dinp += dropout(du A)                     where there is dropout: the same elements
u is not kept but computed again. scratch has lora_scratch_elements, stored as inp is; nothing in it outlives the call.
Where ranks share the columns of inp (--tp) dinp is (N, n), columns first .. first + n - 1 of all C alone (LoraColumns),
and with `learns` dA is (r, n) of these, too; inp and A are whole.
Adapters of experts (LoraExperts; NULL: one adapter): A (E, r, C), B (E, n_out, r). Which rows are whose, and inp_index
and dout_index, is as in grouped_matmul.h. weight (N): what a row is multiplied by in all that comes after this layer.
dout and dinp are without it, so it multiplies u in dB and x in dA. It is that of row weight_index[n], or n. Experts
have no dropout.
Cost:   2*N*r*(C + n_out) flops forward, 2*N*r*(3*C + 2*n_out) backward. Few for what is read, so on a GPU judge it in
        GB/s; on a CPU by its share of the layer's time (dev/bench/lora.c). Beside the products with the weight, arrays
        wider than r pass by so often: forward reads inp and out once and writes out once; backward reads inp twice (for
        u and dA) and dout twice (for dB and du), and reads and writes dinp once. Dropout stores its x, forward and
        backward, and du A. weight costs nothing wide in fast CUDA builds, where du takes it in place of x; elsewhere a
        copy of x is made.
Error:  of chains of about K float sums, K * 2^-24 * (sum of |products|) at most: K is C + r for out, N + C for dB, N +
        n_out for dA, n_out + r for dinp. Where u and du are stored as bf16, 2^-8 of (sum of |products|) more.
Order:  u chains over c from 0, then one product with scale; out goes on over j. dB and dA chain over the rows from 0.
        du chains over o from 0, then one product; dinp goes on over j. With dropout du A is a chain over j from 0, then
        one product with 1 / (1 - p) and one sum. weight is one product with u, or with x. Fast CUDA builds: by
        gemm_cublas.h, which takes scale along, where rows of r elements are whole packs, as bf16 if 8 divides r; of
        experts by grouped_matmul.h.
Source: Hu et al. 2021, "LoRA", arXiv:2106.09685, section 4.1; a row's weight in sums over rows: Guo et al. 2025,
        arXiv:2512.14080 (SonicMoE)
*/
#ifndef LLMC_LORA_H
#define LLMC_LORA_H
#include "dropout.h"         // Dropout, dropout, dropout_ref, dropout_element_
#include "gemm_cublas.h"     // gemm_cublas
#include "grouped_matmul.h"  // grouped_product, grouped_gradient, gemm, gemm_matrix, gemm_transposed
#include "thin_gemm.h"       // thin_gemm
#include <assert.h>

// of the C columns of inputs those that the caller has
typedef struct {
    int first, n;  // n 0: all of them
    int learns;    // of dA as of dinp; else dA is whole
} LoraColumns;

typedef struct {
    int N, C, n_out, r;  // rows, inputs, outputs, rank
    size_t out_row;      // elements from one row of out, and of dout, to the next
    float scale;         // alpha / r, or alpha / sqrt(r)
    Dropout dropout;     // all zero: none. Its first is the number of inp's first element in the update, at this site
    int site;            // of this adapter's dropout
    LoraColumns own;     // all zero: every column. Not of experts
    int all_groups;      // of block_lora.h alone; 0: the caller has all of them
} LoraShape;

typedef struct {
    int E;
    const int *offsets, *inp_index, *dout_index;  // (E+1), (N) or NULL, (N) or NULL; on the device
    const float* weight;                          // (N) or NULL; on the device
    const int* weight_index;                      // (N): where a row's weight is; NULL: in order
} LoraExperts;

// ---- plain C: read this first; it defines every bit ----

// what row n is multiplied by in all that comes after
static inline float lora_weight_(const LoraExperts* experts, int n) {
    return experts->weight[experts->weight_index ? experts->weight_index[n] : n];
}

// the columns that dinp has, and with `learns` dA
static inline LoraColumns lora_own_(const LoraShape* s) {
    const LoraColumns all = {0, s->C, 0};
    return s->own.n > 0 ? s->own : all;
}

// ... and dA
static inline LoraColumns lora_learning_(const LoraShape* s) {
    const LoraColumns all = {0, s->C, 0};
    return s->own.learns ? s->own : all;
}

// the row that an index, which may be NULL, says for row n; rows are `row` floats apart
static inline const float* lora_row_(const float* x, const int* index, int n, size_t row) {
    return x + (index ? (size_t)index[n] : (size_t)n) * row;
}

// u[n] = scale * A x[n]
static inline void lora_inside_ref(float* u, const float* x, const float* A, const LoraShape* s,
                                   const LoraExperts* experts) {
    for (int e = 0; e < experts->E; e++, A += s->r * s->C) {
        for (int n = experts->offsets[e]; n < experts->offsets[e + 1]; n++) {
            const float* xn = lora_row_(x, experts->inp_index, n, (size_t)s->C);
            for (int j = 0; j < s->r; j++) {
                float sum = 0.0f;
                for (int c = 0; c < s->C; c++) { sum = madd(xn[c], A[j * s->C + c], sum); }
                u[(size_t)n * s->r + j] = s->scale * sum;
            }
        }
    }
}

// du[n] = scale * B^T dout[n]
static inline void lora_backward_inside_ref(float* du, const float* dout, const float* B, const LoraShape* s,
                                            const LoraExperts* experts) {
    for (int e = 0; e < experts->E; e++, B += s->n_out * s->r) {
        for (int n = experts->offsets[e]; n < experts->offsets[e + 1]; n++) {
            const float* dy = lora_row_(dout, experts->dout_index, n, s->out_row);
            for (int j = 0; j < s->r; j++) {
                float sum = 0.0f;
                for (int o = 0; o < s->n_out; o++) { sum = madd(dy[o], B[o * s->r + j], sum); }
                du[(size_t)n * s->r + j] = s->scale * sum;
            }
        }
    }
}

// dweight[i][k] = sum over the rows of left[n][i] * (weight[n] * right[n][k])
static inline void lora_gradient_ref(float* dweight, const float* left, size_t left_row, const int* left_index,
                                     const float* right, size_t right_row, const int* right_index,
                                     const LoraExperts* experts, int n_left, int n_right) {
    for (int e = 0; e < experts->E; e++, dweight += n_left * n_right) {
        for (int i = 0; i < n_left * n_right; i++) {
            float sum = 0.0f;
            for (int n = experts->offsets[e]; n < experts->offsets[e + 1]; n++) {
                float y = lora_row_(right, right_index, n, right_row)[i % n_right];
                if (experts->weight) { y = lora_weight_(experts, n) * y; }
                sum = madd(lora_row_(left, left_index, n, left_row)[i / n_right], y, sum);
            }
            dweight[i] = sum;
        }
    }
}

// y[n] goes on with one term for each rank. b (n_y, r), with those strides, is B or A turned
static inline void lora_outside_ref(float* y, size_t y_row, const float* v, const float* b, size_t b_row,
                                    size_t b_column, const LoraShape* s, const LoraExperts* experts, int n_y) {
    for (int e = 0; e < experts->E; e++, b += s->r * n_y) {
        for (int n = experts->offsets[e]; n < experts->offsets[e + 1]; n++) {
            for (int i = 0; i < n_y; i++) {
                float sum = y[n * y_row + i];
                for (int j = 0; j < s->r; j++) {
                    sum = madd(v[(size_t)n * s->r + j], b[i * b_row + j * b_column], sum);
                }
                y[n * y_row + i] = sum;
            }
        }
    }
}

// scratch of both: N * (2 * r + C) floats
static inline void lora_forward_ref(float* out, const float* inp, const float* A, const float* B, const LoraShape* s,
                                    const LoraExperts* experts, float* scratch) {
    const int all[] = {0, s->N};
    const LoraExperts one = {1, all, NULL, NULL, NULL, NULL};
    float *u = scratch, *x = u + (size_t)s->N * s->r;
    experts = experts ? experts : &one;
    if (s->dropout.p > 0.0f) { dropout_ref(x, inp, &s->dropout, s->site, (size_t)s->N * s->C), inp = x; }
    lora_inside_ref(u, inp, A, s, experts);
    lora_outside_ref(out, s->out_row, u, B, (size_t)s->r, 1, s, experts, s->n_out);
}

static inline void lora_backward_ref(float* dinp, float* dA, float* dB, const float* dout, const float* inp,
                                     const float* A, const float* B, const LoraShape* s, const LoraExperts* experts,
                                     float* scratch) {
    const int all[] = {0, s->N};
    const LoraExperts one = {1, all, NULL, NULL, NULL, NULL};
    const size_t n_wide = (size_t)s->N * s->C, r = (size_t)s->r, C = (size_t)s->C;
    const LoraColumns own = lora_own_(s), learning = lora_learning_(s);
    float *u = scratch, *du = u + (size_t)s->N * r, *wide = du + (size_t)s->N * r;
    experts = experts ? experts : &one;
    if (dA || dinp) { lora_backward_inside_ref(du, dout, B, s, experts); }
    if ((dA || dB) && s->dropout.p > 0.0f) { dropout_ref(wide, inp, &s->dropout, s->site, n_wide), inp = wide; }
    if (dB) {
        lora_inside_ref(u, inp, A, s, experts);
        lora_gradient_ref(dB, dout, s->out_row, experts->dout_index, u, r, NULL, experts, s->n_out, s->r);
    }
    if (dA) {
        lora_gradient_ref(dA, du, r, NULL, inp + learning.first, C, experts->inp_index, experts, s->r, learning.n);
    }
    if (dinp && s->dropout.p == 0.0f) {
        lora_outside_ref(dinp, (size_t)own.n, du, A + own.first, 1, C, s, experts, own.n);
    }
    if (dinp && s->dropout.p > 0.0f) {
        memset(wide, 0, sizeof(float) * n_wide);
        lora_outside_ref(wide, C, du, A, 1, C, s, experts, s->C);
        dropout_ref(wide, wide, &s->dropout, s->site, n_wide);
        for (int i = 0; i < s->N * own.n; i++) {
            dinp[i] += wide[(size_t)(i / own.n) * C + (size_t)(own.first + i % own.n)];
        }
    }
}

#ifndef __CUDACC__  // ---- fast C: the same chains, by gemm.h and grouped_matmul.h ----

typedef float LoraX;
#define LORA_STORED  // in CUDA LoraX is float or bf16
enum { LORA_WEIGHS_INPUT = 1 };  // weight multiplies x in dA

// out[n] = scale * x[n], or with `weights` the row's weight * (scale * x[n]), for N rows; out may be x where no index
// gathers them
static inline void lora_scale_rows_(float* out, const float* x, const int* index, float scale,
                                    const LoraExperts* weights, int N, int width, const Device* dev) {
    (void)dev;
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const float* from = lora_row_(x, index, n, (size_t)width);
        float* to = out + (size_t)n * width;
        for (int i = 0; i < width; i++) { to[i] = scale * from[i]; }
        if (!weights) { continue; }
        const float weight = lora_weight_(weights, n);
        for (int i = 0; i < width; i++) { to[i] = weight * to[i]; }
    }
}

// y += dropout(x), of the columns of dinp
static inline void lora_add_dropped_(float* y, const float* x, DropoutSite site, const LoraShape* s,
                                     const Device* dev) {
    const LoraColumns own = lora_own_(s);
    (void)dev;
    #pragma omp parallel for schedule(static)
    for (int n = 0; n < s->N; n++) {
        const uint64_t first = (uint64_t)n * (uint64_t)s->C + (uint64_t)own.first;
        const float* from = x + (size_t)n * (size_t)own.n;
        float* to = y + (size_t)n * (size_t)own.n;
        #pragma omp simd
        for (int c = 0; c < own.n; c++) { to[c] += dropout_element_(from[c], site, first + (uint64_t)c); }
    }
}

// out = scale * a * b, or with add 1 and scale 1 out goes on. Returns 1 where scale is left to the caller
static inline int lora_product_(float* out, size_t out_row, float scale, int add, Matrix a, Matrix b, int M, int N,
                                int K, const Device* dev) {
    thin_gemm(out, out_row, add ? out : NULL, out_row, a, b, M, N, K, dev);
    return scale != 1.0f;
}

#else  // ---- CUDA ----

#define LORA_STORED template <typename LoraX>
#ifdef EXACT
enum { LORA_WEIGHS_INPUT = 1 };
#else
enum { LORA_WEIGHS_INPUT = 0 };  // it multiplies du
#endif

// n_all: elements of out
template <typename X>
__global__ void lora_scale_rows_kernel(X* out, const X* x, const int* index, float scale, const float* weight,
                                       const int* weight_index, size_t n_all, int width) {
    for (size_t i = grid_first<1>(); i < n_all; i += grid_step<1>()) {
        size_t n = i / width, from = index ? (size_t)index[n] * width + i % width : i;
        float y = scale * to_float(x[from]);
        out[i] = from_float<X>(weight ? weight[weight_index ? (size_t)weight_index[n] : n] * y : y);
    }
}

template <typename X>
static inline void lora_scale_rows_(X* out, const X* x, const int* index, float scale, const LoraExperts* weights,
                                    int N, int width, const Device* dev) {
    const float* weight = weights ? weights->weight : NULL;
    const int* weight_index = weights ? weights->weight_index : NULL;
    const size_t n = (size_t)N * width;
    if (n == 0) { return; }
    lora_scale_rows_kernel<<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(out, x, index, scale, weight,
                                                                                   weight_index, n, width);
    cudaCheck(cudaGetLastError());
}

// a pack lies in one row of the columns that there are of C
template <int W, typename X>
__global__ void lora_add_dropped_kernel(X* y, const X* x, DropoutSite site, size_t n, size_t C, LoraColumns own) {
    const size_t width = own.n;
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        Pack<float, W> sum = load_floats<W>(y + i), added = load_floats<W>(x + i);
        const size_t number = width == C ? i : i / width * C + own.first + i % width;
        for (int j = 0; j < W; j++) { sum.x[j] += dropout_element_(added.x[j], site, number + j); }
        store_floats(y + i, sum);
    }
}

template <typename X>
static inline void lora_add_dropped_(X* y, const X* x, DropoutSite site, const LoraShape* s, const Device* dev) {
    constexpr int W = pack_width<X>();
    const LoraColumns own = lora_own_(s);
    const size_t n = (size_t)s->N * own.n, C = (size_t)s->C;
    if (pack_part(n, W, x, y) == n && (own.n == s->C || own.n % W == 0)) {
        lora_add_dropped_kernel<W><<<grid_blocks(n, W, dev), GRID_BLOCK, 0, dev->stream>>>(y, x, site, n, C, own);
    } else {
        lora_add_dropped_kernel<1><<<grid_blocks(n, 1, dev), GRID_BLOCK, 0, dev->stream>>>(y, x, site, n, C, own);
    }
    cudaCheck(cudaGetLastError());
}

// out = scale * a * b, or with add 1 and scale 1 out goes on. Returns 1 where scale is left to the caller
template <typename Out, typename X>
static inline int lora_product_(Out* out, size_t out_row, float scale, int add, MatrixOf<X> a, MatrixOf<X> b, int M,
                                int N, int K, const Device* dev) {
#ifndef EXACT
    if (gemm_cublas(out, out_row, NULL, NULL, scale, add, a, b, M, N, K, dev)) { return 0; }
#endif
    gemm(out, out_row, add ? out : NULL, out_row, a, b, M, N, K, dev);
    return scale != 1.0f;
}
#endif  // __CUDACC__

// ---- both ----

// u and du begin at multiples of 16 elements
static inline size_t lora_inside_elements_(const LoraShape* s) { return ((size_t)s->N * s->r + 15) / 16 * 16; }

// is_weighted: LoraExperts has a weight
static inline size_t lora_scratch_elements(const LoraShape* s, int is_weighted) {
    const int is_wide = s->dropout.p > 0.0f || (LORA_WEIGHS_INPUT && is_weighted);
    return 2 * lora_inside_elements_(s) + (is_wide ? (size_t)s->N * s->C : 0);
}

// v (N, r) = scale * x w, with `is_weighted` times the row's weight; x (N, K), rows x_row apart; w is B (K, r) or,
// turned, A (r, K)
LORA_STORED
static inline void lora_into_rank_(LoraX* v, const LoraX* x, size_t x_row, const int* index, const LoraX* w, int turned,
                                   int is_weighted, const LoraShape* s, const LoraExperts* experts, int K,
                                   const Device* dev) {
    const size_t r = (size_t)s->r;
    int scales = 1;
    if (s->N == 0) { return; }
    if (experts) {
        grouped_product(v, r, 0, x, x_row, index, turned ? gemm_transposed(w, (size_t)K) : gemm_matrix(w, r),
                        experts->offsets, experts->E, s->N, K, s->r, dev);
    } else {
        scales = lora_product_(v, r, s->scale, 0, gemm_matrix(x, x_row),
                               turned ? gemm_transposed(w, (size_t)K) : gemm_matrix(w, r), s->N, s->r, K, dev);
    }
    if (scales) { lora_scale_rows_(v, v, NULL, s->scale, is_weighted ? experts : NULL, s->N, s->r, dev); }
}

// y (N, n_y), rows y_row apart, goes on with v w, or with add 0 begins at 0; w is columns of A (r, C) or, turned,
// B (n_y, r)
LORA_STORED
static inline void lora_out_of_rank_(LoraX* y, size_t y_row, int add, const LoraX* v, const LoraX* w, int turned,
                                     const LoraShape* s, const LoraExperts* experts, int n_y, const Device* dev) {
    const size_t r = (size_t)s->r, C = (size_t)s->C;
    if (s->N == 0) { return; }
    if (experts) {
        grouped_product(y, y_row, add, v, r, NULL, turned ? gemm_transposed(w, r) : gemm_matrix(w, C),
                        experts->offsets, experts->E, s->N, s->r, n_y, dev);
    } else {
        lora_product_(y, y_row, 1.0f, add, gemm_matrix(v, r), turned ? gemm_transposed(w, r) : gemm_matrix(w, C), s->N,
                      n_y, s->r, dev);
    }
}

// dweight (n_left, n_right) = left^T right
LORA_STORED
static inline void lora_gradient_(float* dweight, const LoraX* left, size_t left_row, const int* left_index,
                                  const LoraX* right, size_t right_row, const int* right_index, const LoraShape* s,
                                  const LoraExperts* experts, int n_left, int n_right, const Device* dev) {
    if (experts) {
        grouped_gradient(dweight, left, left_row, left_index, right, right_index, experts->offsets, experts->E, s->N,
                         n_right, n_left, dev);
    } else {
        lora_product_(dweight, (size_t)n_right, 1.0f, 0, gemm_transposed(left, left_row), gemm_matrix(right, right_row),
                      n_left, n_right, s->N, dev);
    }
}

LORA_STORED
static inline void lora_forward(LoraX* out, const LoraX* inp, const LoraX* A, const LoraX* B, const LoraShape* s,
                                const LoraExperts* experts, LoraX* scratch, const Device* dev) {
    const size_t C = (size_t)s->C;
    LoraX *u = scratch, *wide = u + 2 * lora_inside_elements_(s);
    assert(!experts || s->dropout.p == 0.0f);
    const LoraX* x = dropout(wide, inp, &s->dropout, s->site, (size_t)s->N * C, dev);
    lora_into_rank_(u, x, C, experts ? experts->inp_index : NULL, A, 1, 0, s, experts, s->C, dev);
    lora_out_of_rank_(out, s->out_row, 1, u, B, 1, s, experts, s->n_out, dev);
}

// once dB is done u's memory may have du * weight, and once dA is that of dropout(inp) du A
LORA_STORED
static inline void lora_backward(LoraX* dinp, float* dA, float* dB, const LoraX* dout, const LoraX* inp,
                                 const LoraX* A, const LoraX* B, const LoraShape* s, const LoraExperts* experts,
                                 LoraX* scratch, const Device* dev) {
    const size_t n_wide = (size_t)s->N * s->C, C = (size_t)s->C, r = (size_t)s->r;
    LoraX *u = scratch, *du = u + lora_inside_elements_(s), *wide = du + lora_inside_elements_(s);
    const int *inp_index = experts ? experts->inp_index : NULL, *dout_index = experts ? experts->dout_index : NULL;
    const int is_weighted = experts && experts->weight;
    const LoraColumns own = lora_own_(s), learning = lora_learning_(s);
    assert(!experts || (s->dropout.p == 0.0f && s->own.n == 0));
    const LoraX* x = dA || dB ? dropout(wide, inp, &s->dropout, s->site, n_wide, dev) : inp;
    if (dB) {
        lora_into_rank_(u, x, C, inp_index, A, 1, is_weighted, s, experts, s->C, dev);
        lora_gradient_(dB, dout, s->out_row, dout_index, u, r, NULL, s, experts, s->n_out, s->r, dev);
    }
    if (dA || dinp) {
        lora_into_rank_(du, dout, s->out_row, dout_index, B, 0, 0, s, experts, s->n_out, dev);
    }
    if (dA) {
        const LoraX* left = du;
        if (is_weighted && LORA_WEIGHS_INPUT != 0) {
            lora_scale_rows_(wide, inp, inp_index, 1.0f, experts, s->N, s->C, dev);
            x = wide, inp_index = NULL;
        } else if (is_weighted) {
            lora_scale_rows_(u, du, NULL, 1.0f, experts, s->N, s->r, dev);
            left = u;
        }
        lora_gradient_(dA, left, r, NULL, x + learning.first, C, inp_index, s, experts, s->r, learning.n, dev);
    }
    if (dinp && s->dropout.p == 0.0f) {
        lora_out_of_rank_(dinp, (size_t)own.n, 1, du, A + own.first, 0, s, experts, own.n, dev);
    } else if (dinp) {
        lora_out_of_rank_(wide, (size_t)own.n, 0, du, A + own.first, 0, s, experts, own.n, dev);
        lora_add_dropped_(dinp, wide, dropout_site_(&s->dropout, s->site), s, dev);
    }
}
#undef LORA_STORED
#endif  // LLMC_LORA_H
