/*
Matrix products of which one side is thin, as an adapter's rank is. gemm.h copies both matrices into the order of its
inner loop, which is worth it where each element is used often; here the large one is read where it lies, once.
    thin_gemm   out (M, N) = start + a (M, K) * b (K, N); arguments and result are gemm's, to the last bit
                N <= THIN: b stays in the cache, and a's rows, or lines of its columns, go by
                M <= THIN: a stays, and lines of b's rows go by
                anything else, gathered rows or few of them beside a turned matrix among it: by gemm
Order:  gemm's: each output a chain over k ascending; lanes hold different n.
Cost:   2*M*N*K flops; the large matrix is read once, the thin one once for each piece of THIN_K terms and each task.
        Measured beside gemm: dev/bench/lora.c
*/
#ifndef LLMC_THIN_GEMM_H
#define LLMC_THIN_GEMM_H
#include "gemm.h"  // gemm, Matrix, gemm_pack_, v_load, v_store, v_fill, v_madd

#ifndef __CUDACC__
enum {
    THIN = 32,
    THIN_K = 512,    // terms of a chain between two visits of its output
    THIN_ROWS = 8,   // of a tile, which is one vector wide: enough chains to hide the latency of an addition
    THIN_LINE = VLANES == 16 ? 16 : 8,  // of a tile whose rows are neighbours: a whole line, if registers hold it
    THIN_TASKS = 4   // for each thread
};

// one matrix as tiles read it: a step from tile to tile, a term from k to k. A last tile that is not whole is a copy,
// filled up with zeros
typedef struct {
    const float *data, *last;  // last: NULL where all are whole
    size_t step, term, last_term;
    int n_tiles, width;        // width: rows or columns of a tile
} ThinSide;

typedef struct {
    float* out;
    const float* start;
    size_t out_stride, start_stride;
    ThinSide a, b;
    size_t a_row;              // 0: rows of a are neighbours; else they lie along k, so many floats apart
    int M, N, K;
} ThinProduct;

// a tile whose rows lie along k, each at a place of its own
static inline void thin_tile_rows_(float* out, size_t out_stride, const float* start, size_t start_stride,
                                   const float* a, size_t a_row, const float* b, size_t b_term, int K) {
    const float* at[THIN_ROWS];
    vfloat sum[THIN_ROWS];
    #pragma GCC unroll 8
    for (int m = 0; m < THIN_ROWS; m++) { sum[m] = v_load(start + m * start_stride), at[m] = a + m * a_row; }
    for (ptrdiff_t k = 0; k < K; k++, b += b_term) {
        const vfloat bk = v_load(b);
        #pragma GCC unroll 8
        for (int m = 0; m < THIN_ROWS; m++) { sum[m] = v_madd(v_fill(at[m][k]), bk, sum[m]); }
    }
    #pragma GCC unroll 8
    for (int m = 0; m < THIN_ROWS; m++) { v_store(out + m * out_stride, sum[m]); }
}

// a tile whose rows are neighbours. The lines behind those of the matrix with the longer way from k to k are asked for
static inline __attribute__((always_inline)) void thin_tile_line_(float* out, size_t out_stride, const float* start,
                                                                  size_t start_stride, const float* a, size_t a_term,
                                                                  const float* b, size_t b_term, int rows, int K) {
    vfloat sum[THIN_LINE];
    const float* large = a_term > b_term ? a : b;
    const size_t large_term = a_term > b_term ? a_term : b_term;
    #pragma GCC unroll 16
    for (int m = 0; m < rows; m++) { sum[m] = v_load(start + m * start_stride); }
    for (int k = 0; k < K; k++, a += a_term, b += b_term, large += large_term) {
        const vfloat bk = v_load(b);
        __builtin_prefetch(large + GEMM_LINE, 0, 2);
        #pragma GCC unroll 16
        for (int m = 0; m < rows; m++) { sum[m] = v_madd(v_fill(a[m]), bk, sum[m]); }
    }
    #pragma GCC unroll 16
    for (int m = 0; m < rows; m++) { v_store(out + m * out_stride, sum[m]); }
}

// where tile i of a side begins, at its k-th term
static inline const float* thin_at_(const ThinSide* x, int i, int k, size_t* term) {
    const int is_copy = x->last && i == x->n_tiles - 1;
    *term = is_copy ? x->last_term : x->term;
    return is_copy ? x->last + k * x->last_term : x->data + i * x->step + k * x->term;
}

// tile i of rows, tile j of columns, terms k..k + n_k
static inline void thin_tile_(const ThinProduct* p, int i, int j, int k, int n_k) {
    static const float zeros[VLANES] = {0};
    float rim[THIN_LINE * VLANES];
    size_t a_term, b_term;
    const float *a = thin_at_(&p->a, i, k, &a_term), *b = thin_at_(&p->b, j, k, &b_term);
    const int rows = p->a.width, m = i * rows, n = j * VLANES;
    const int n_rows = gemm_min_(rows, p->M - m), n_columns = gemm_min_(VLANES, p->N - n);
    const int is_rim = n_rows < rows || n_columns < VLANES;
    const size_t n_bytes = sizeof(float) * n_columns;
    float* out = p->out + m * p->out_stride + n;
    const float* start = k > 0 ? out : p->start ? p->start + m * p->start_stride + n : zeros;
    size_t out_stride = p->out_stride, start_stride = k > 0 ? p->out_stride : p->start ? p->start_stride : 0;
    if (is_rim) {
        memset(rim, 0, sizeof rim);
        for (int r = 0; r < n_rows; r++) { memcpy(rim + r * VLANES, start + r * start_stride, n_bytes); }
        start = rim, out = rim, start_stride = out_stride = VLANES;
    }
    if (p->a_row > 0 && a_term == 1) {
        thin_tile_rows_(out, out_stride, start, start_stride, a, p->a_row, b, b_term, n_k);
    } else if (rows == THIN_ROWS) {
        thin_tile_line_(out, out_stride, start, start_stride, a, a_term, b, b_term, THIN_ROWS, n_k);
    } else {
        thin_tile_line_(out, out_stride, start, start_stride, a, a_term, b, b_term, THIN_LINE, n_k);
    }
    for (int r = 0; is_rim && r < n_rows; r++) {
        memcpy(p->out + (m + r) * p->out_stride + n, rim + r * VLANES, n_bytes);
    }
}

// these tiles of the large side against all of the thin one
static inline void thin_task_(const ThinProduct* p, int first, int end, int large_is_a) {
    const int n_thin = large_is_a ? p->b.n_tiles : p->a.n_tiles;
    for (int k = 0; k < p->K || k == 0; k += THIN_K) {
        for (int i = first; i < end; i++) {
            for (int j = 0; j < n_thin; j++) {
                thin_tile_(p, large_is_a ? i : j, large_is_a ? j : i, k, gemm_min_(THIN_K, p->K - k));
            }
        }
    }
}

// tiles of `width` of n, `step` floats apart, terms `term` apart. is_thin: all of them are copied, else the last one if
// it is not whole; copies: where
static inline ThinSide thin_side_(const float* data, size_t step, size_t term, int n, int width, int is_thin, int K,
                                  float* copies) {
    const int n_tiles = (int)ceil_div(n, width), first = is_thin ? 0 : n / width;
    const ThinSide copied = {copies, NULL, (size_t)K * width, (size_t)width, 0, n_tiles, width};
    ThinSide side = {data, NULL, width * step, term, (size_t)width, n_tiles, width};
    #pragma omp parallel for collapse(2) if ((int64_t)(n_tiles - first) * K > 1 << 14)
    for (int i = first; i < n_tiles; i++) {
        for (int k = 0; k < K; k += THIN_K) {
            float* to = copies + (size_t)(i - first) * K * width + (size_t)k * width;
            const float* from = data + (size_t)i * width * step + k * term;
            const int n_k = gemm_min_(THIN_K, K - k), n_valid = gemm_min_(width, n - i * width);
            if (width == VLANES) { gemm_pack_(to, from, step, term, VLANES, n_valid, n_k); }
            else if (width == THIN_ROWS) { gemm_pack_(to, from, step, term, THIN_ROWS, n_valid, n_k); }
            else { gemm_pack_(to, from, step, term, THIN_LINE, n_valid, n_k); }
        }
    }
    if (is_thin) { return copied; }
    side.last = first < n_tiles ? copies : NULL;
    return side;
}

static inline int thin_is_plain_(const Matrix* m) { return m->data && !m->row_index && !m->col_index; }

static inline void thin_gemm(float* out, size_t out_stride, const float* start, size_t start_stride, Matrix a, Matrix b,
                             int M, int N, int K, const Device* dev) {
    const int is_thin = (N <= THIN && N <= M) || (M <= THIN && b.col_stride == 1), large_is_a = N <= THIN && N <= M;
    const int is_few = M <= GEMM_FEW && b.row_stride == 1;  // which gemm reads where they lie, too
    if (!is_thin || is_few || K == 0 || !thin_is_plain_(&a) || !thin_is_plain_(&b)) {
        gemm(out, out_stride, start, start_stride, a, b, M, N, K, dev);
        return;
    }
    const int along_k = large_is_a && a.row_stride != 1, rows = along_k || M <= THIN_ROWS ? THIN_ROWS : THIN_LINE;
    const size_t n_copies = (size_t)(large_is_a ? rows : ceil_div(M, rows) * rows) * K;
    float* copies = device_workspace(dev, sizeof(float) * (n_copies + (size_t)(THIN + VLANES) * K));
    const ThinSide a_side = thin_side_(a.data, a.row_stride, a.col_stride, M, rows, !large_is_a, K, copies);
    const ThinSide b_side = thin_side_(b.data, b.col_stride, b.row_stride, N, VLANES, large_is_a, K, copies + n_copies);
    const ThinProduct p = {out, start, out_stride, start_stride, a_side, b_side, along_k ? a.row_stride : 0, M, N, K};
    const int n = large_is_a ? a_side.n_tiles : b_side.n_tiles, n_tasks = gemm_min_(n, THIN_TASKS * dev->n_threads);
    #pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < n_tasks; i++) {
        thin_task_(&p, (int)((int64_t)n * i / n_tasks), (int)((int64_t)n * (i + 1) / n_tasks), large_is_a);
    }
}
#endif  // __CUDACC__
#endif  // LLMC_THIN_GEMM_H
