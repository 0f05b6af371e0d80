/*
The one matrix product under every linear layer: out = start + a * b, each output a plain chain over k ascending.
    out (M, N)  rows out_stride apart
    a (M, K), b (K, N)  a Matrix says how its elements lie, so a transpose is free
    start: where each chain begins. NULL: at 0; a row of N floats with stride 0: at a bias; `out` itself: goes on
Order:  sum = madd(a[m][k], b[k][n], sum) for k = 0, 1, ... from start: each step rounds once, on a GPU too.
Cost:   2*M*N*K flops. In C: blocks of a and panels of b are copied into the order in which the inner loop reads them
        ("packed"), and a tile of outputs stays in registers while k runs: TILE_M * TILE_N chains side by side hide the
        latency of an addition, and lanes hold different n. A long k is cut into blocks; the next block goes on from the
        stored tile. Threads share a's packed block and take panels of b one by one, as many each; they meet twice per
        block, however long N is. While a thread multiplies, the part of b that it will pack next comes from memory. Few
        rows, as when a text is generated, are a matter of GB/s: a weight's rows are turned in registers, nothing is
        packed. On a GPU: a block of threads computes a tile, sharing what it reads; each thread keeps 4 x 4 sums in
        registers, on the CUDA cores. gemm_cublas.h is what fast builds use where it can.
Source: Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication"; only their k loop is kept in
        order. Measured: dev/bench/gemm.c. Slower and faster kernels: dev/cuda/matmul.cu
*/
#ifndef LLMC_GEMM_H
#define LLMC_GEMM_H
#include "../core/device.h"  // Device, ceil_div
#include "../core/kernel.h"  // to_float, from_float, MaybeNull
#ifndef __CUDACC__
#include "../core/stored.h"  // StoredMatrix, stored_value
#include "../core/vec.h"  // vfloat, VLANES, v_load, v_load_column_words, v_store, v_fill, v_madd
#include <limits.h>

// element (r, c) is data[r * row_stride + c * col_stride]; one of the strides is 1. An index that is not NULL gathers:
// row_index[r] is in the place of r, or col_index[c] in that of c. b may be stored otherwise than as floats,
// without an index: `weight` has its elements then; the chains are those of the same numbers as floats
typedef struct {
    const float* data;
    size_t row_stride, col_stride;
    const int *row_index, *col_index;
    int is_stored, is_turned;  // b is `weight`, or its transpose
    StoredMatrix weight;
    int row, column;           // of the weight with which b begins
} Matrix;

static inline Matrix gemm_floats_(const float* data, size_t row_stride, size_t col_stride, const int* row_index,
                                  const int* col_index) {
    Matrix m;
    memset(&m, 0, sizeof m);
    m.data = data;
    m.row_stride = row_stride;
    m.col_stride = col_stride;
    m.row_index = row_index;
    m.col_index = col_index;
    return m;
}
static inline Matrix gemm_matrix(const float* data, size_t row_stride) {
    return gemm_floats_(data, row_stride, 1, NULL, NULL);
}
static inline Matrix gemm_transposed(const float* data, size_t row_stride) {
    return gemm_floats_(data, 1, row_stride, NULL, NULL);
}
static inline Matrix gemm_gathered(const float* data, const int* index, size_t row_stride) {
    return gemm_floats_(data, row_stride, 1, index, NULL);
}
static inline Matrix gemm_gathered_transposed(const float* data, const int* index, size_t row_stride) {
    return gemm_floats_(data, 1, row_stride, NULL, index);
}
static inline Matrix gemm_stored_(StoredMatrix weight, int is_turned) {
    const size_t columns = (size_t)weight.columns;
    Matrix m = gemm_floats_((const float*)weight.data, is_turned ? 1 : columns, is_turned ? columns : 1, NULL, NULL);
    m.is_stored = weight.kind != STORED_F32;
    m.is_turned = is_turned;
    m.weight = weight;
    return m;
}
static inline Matrix gemm_stored(StoredMatrix weight) { return gemm_stored_(weight, 0); }
static inline Matrix gemm_stored_transposed(StoredMatrix weight) { return gemm_stored_(weight, 1); }

// what begins at row r and column c of m
static inline Matrix gemm_from_(Matrix m, int r, int c) {
    if (m.is_stored) {
        m.row += m.is_turned ? c : r;
        m.column += m.is_turned ? r : c;
        return m;
    }
    if (m.row_index) { m.row_index += r; } else { m.data += r * m.row_stride; }
    if (m.col_index) { m.col_index += c; } else { m.data += c * m.col_stride; }
    return m;
}

// the first byte of b from row r of the weight and column c on, counted from where b begins, and bytes from a row of
// the weight to the next
static inline const char* gemm_stored_at_(const Matrix* b, int r, int c) {
    const size_t at = (size_t)(b->row + r) * (size_t)b->weight.columns + (size_t)(b->column + c);
    return (const char*)b->weight.data + stored_bytes(b->weight.kind, at);
}
static inline size_t gemm_stored_stride_(const Matrix* b) {
    return stored_bytes(b->weight.kind, (size_t)b->weight.columns);
}

// registers: 32 with AVX-512 hold 8 x 3 sums, 3 vectors of b and a few products; 16 elsewhere hold 6 x 2
enum {
    TILE_M = VLANES == 16 ? 8 : 6,
    TILE_V = VLANES == 16 ? 3 : 2,
    TILE_N = TILE_V * VLANES,
    GEMM_LINE = 16,          // floats of a cache line...
    GEMM_PREFETCH_K = 8,         // ...of which one is asked for ahead of time in so many steps of k
    GEMM_K = 24 * FP4_GROUP, // longest k block of a panel of b (k, TILE_N), which should stay in the second cache
    GEMM_LONG_K = 4096,      // k block of a, packed for all threads together...
    GEMM_A_FLOATS = 1 << 21, // ...with as many rows as make this many floats
    GEMM_TASKS = 4,          // at least so many tasks a thread, for a fair share when one is held up...
    GEMM_UNIT = TILE_V == 3 ? VLANES : TILE_N,  // columns of which a panel has several
    GEMM_PIECE = 8 * TILE_M  // ...cut at multiples of so many rows, for each task packs its panel of b anew
};

static inline int gemm_min_(int a, int b) { return a < b ? a : b; }

// ---- packing: `width` neighbours per k side by side, zeros where the matrix ends ----

static inline size_t gemm_at_(const int* index, int i) { return index ? (size_t)index[i] : (size_t)i; }

// packed[k * width + w] = element (w, k) of src for w < n_valid, 0 up to width
static inline __attribute__((always_inline)) void gemm_pack_matrix_(float* packed, Matrix src, int width, int n_valid,
                                                                    int K) {
    if (n_valid < width) {
        for (int k = 0; k < K; k++) {
            const float* column = src.data + gemm_at_(src.col_index, k) * src.col_stride;
            for (int w = 0; w < width; w++) {
                packed[k * width + w] = w < n_valid ? column[gemm_at_(src.row_index, w) * src.row_stride] : 0.0f;
            }
        }
        return;
    }
    if (src.row_stride == 1 && !src.row_index) {
        for (int k = 0; k < K; k++) {
            memcpy(packed + (size_t)k * width, src.data + gemm_at_(src.col_index, k) * src.col_stride,
                   sizeof(float) * width);
        }
        return;
    }
    // rows are turned in registers, as many at a time, and VLANES of k. Fewer rows that do not divide VLANES are turned
    // with copies of the last: each store ends where the next begins
    const int is_ragged = width < VLANES && VLANES % width != 0, n = width % VLANES == 0 || is_ragged ? VLANES : width;
    const int K_turned = VLANES % n == 0 ? (K - is_ragged) / VLANES * VLANES : 0;
    for (int w = 0; w < width; w += n) {  // few rows at a time, each read to its end: memory is fastest so
        for (int k = 0; k < K_turned; k += VLANES) {
            const float* first = src.data + (src.row_index ? 0 : w * src.row_stride) + k;
            vfloat rows[VLANES];
            for (int i = 0; i < n; i++) {
                const int row = is_ragged ? gemm_min_(i, width - 1) : i;
                const size_t at = src.row_index ? (size_t)src.row_index[w + row] : (size_t)row;
                rows[i] = v_load(first + at * src.row_stride);
            }
            if (n == VLANES) { v_transpose(rows); } else { v_transpose_rows(rows, n); }
            float* to = packed + k * width + w;
            for (int i = 0; i < n; i++) { v_store(to + i * (width == n ? VLANES : width), rows[i]); }
        }
    }
    for (int k = K_turned; k < K; k++) {
        for (int w = 0; w < width; w++) {
            packed[k * width + w] = src.data[gemm_at_(src.row_index, w) * src.row_stride + k];
        }
    }
}

// the same of src[w * w_stride + k * k_stride]
static inline __attribute__((always_inline)) void gemm_pack_(float* packed, const float* src, size_t w_stride,
                                                             size_t k_stride, int width, int n_valid, int K) {
    const Matrix plain = gemm_floats_(src, w_stride, k_stride, NULL, NULL);
    gemm_pack_matrix_(packed, plain, width, n_valid, K);
}

// ---- packing what is stored as bf16, fp8 or fp4 ----

// `kind` is known where these are inlined: elements of a word of 4 bytes, and number i of them in each lane
static inline __attribute__((always_inline)) int gemm_each_(Stored kind) {
    return kind == STORED_FP4 ? 8 : kind == STORED_FP8 ? 4 : kind == STORED_BF16 ? 2 : 1;
}
static inline __attribute__((always_inline)) vfloat gemm_widen_(vfloat words, int i, vfloat factor, Stored kind) {
    switch (kind) {
        case STORED_FP4: return v_part_fp4(words, i) * factor;
        case STORED_FP8: return v_part_fp8(words, i) * factor;
        case STORED_BF16: return i > 0 ? v_upper_bf16(words) : v_lower_bf16(words);
        default: return words;
    }
}

// where the scales of VLANES rows of a weight of fp8 are, from row r on
typedef struct {
    const float* row[VLANES];
    int are_one;  // they share them all
    int block_columns;
} GemmScales;

static inline GemmScales gemm_scales_(const StoredMatrix* w, int r) {
    GemmScales s;
    for (int i = 0; i < VLANES; i++) { s.row[i] = stored_row_scales(w, r + i); }
    s.are_one = s.row[0] == s.row[VLANES - 1];
    s.block_columns = w->block_columns;
    return s;
}

// what the bytes of these rows in a column are multiplied by
static inline vfloat gemm_factor_(const GemmScales* s, int column) {
    float factor[VLANES];
    const int block = column / s->block_columns;
    if (s->are_one) { return v_fill(s->row[0][block] * FP8_UNIT); }
    for (int i = 0; i < VLANES; i++) { factor[i] = s->row[i][block] * FP8_UNIT; }
    return v_load(factor);
}

// the same of VLANES columns from this one on, in row r
static inline vfloat gemm_column_factors_(const StoredMatrix* w, int r, int column) {
    const float* scales = stored_row_scales(w, r);
    float factor[VLANES];
    for (int i = 0; i < VLANES; i++) { factor[i] = scales[(column + i) / w->block_columns] * FP8_UNIT; }
    return v_load(factor);
}

// how many of n elements from this one on, in a row or a column, have the scale of the first; of fp8 `block` share one
static inline __attribute__((always_inline)) int gemm_alike_(int at, int n, int block, Stored kind) {
    return kind == STORED_FP8 ? gemm_min_(n, block - at % block) : n;
}

// v_load_column_words of the last n_bytes of VLANES rows, as if zeros followed
static __attribute__((noinline, unused)) void gemm_load_last_(vfloat* words, const char* x, size_t stride,
                                                              size_t n_bytes) {
    char rows[VLANES][sizeof(vfloat)] = {{0}};
    for (int r = 0; r < VLANES; r++) { memcpy(rows[r], x + r * stride, n_bytes); }
    v_load_column_words(words, rows[0], sizeof rows[0]);
}

// The scales of VLANES rows of a weight of fp4 from row r on, turned, 4 groups of columns in a word: those from group
// `first` on that words have
typedef struct {
    const StoredMatrix* weight;
    int r, first, end;
    vfloat words[VLANES];
} GemmExponents;

static inline void gemm_load_exponents_(GemmExponents* x, int group) {
    const int n_groups = x->weight->columns / FP4_GROUP, left = n_groups - group, most = 4 * VLANES;
    const int n = left < most ? left : most;
    const char* from = (const char*)(stored_row_exponents(x->weight, x->r) + group);
    gemm_load_last_(x->words, from, (size_t)n_groups, (size_t)n);
    x->first = group, x->end = group + n;
}

static inline GemmExponents gemm_exponents_(const StoredMatrix* w, int r, int column) {
    GemmExponents x;
    assert(column % FP4_GROUP == 0);  // blocks of k are whole groups
    x.weight = w;
    x.r = r;
    gemm_load_exponents_(&x, column / FP4_GROUP);
    return x;
}

// of the group that begins with this column
static inline __attribute__((always_inline)) vfloat gemm_group_factor_(GemmExponents* x, int column) {
    const int group = column / FP4_GROUP;
    if (group >= x->end) { gemm_load_exponents_(x, group); }
    return v_part_e8m0(x->words[(group - x->first) / 4], (group - x->first) % 4);
}

// VLANES columns of b, which are rows of the weight: K of their elements from k on
static inline __attribute__((always_inline)) void gemm_pack_turned_(float* packed, const Matrix* b, int w, int K,
                                                                    Stored kind) {
    const int each = gemm_each_(kind), step = each * VLANES;
    const size_t stride = gemm_stored_stride_(b);
    GemmScales scales;
    GemmExponents exponents;
    vfloat words[VLANES], factor = v_fill(1.0f);
    if (kind == STORED_FP8) { scales = gemm_scales_(&b->weight, b->row + w); }
    if (kind == STORED_FP4) { exponents = gemm_exponents_(&b->weight, b->row + w, b->column); }
    for (int k = 0; k < K;) {
        const int end = k + gemm_alike_(b->column + k, K - k, b->weight.block_columns, kind);
        if (kind == STORED_FP8) { factor = gemm_factor_(&scales, b->column + k); }
        for (; k + step <= end; k += step) {
            v_load_column_words(words, gemm_stored_at_(b, w, k), stride);
            for (int i = 0; i < step; i++) {
                const int begins = kind == STORED_FP4 && i % FP4_GROUP == 0;
                if (begins) { factor = gemm_group_factor_(&exponents, b->column + k + i); }
                v_store(packed + (k + i) * TILE_N + w, gemm_widen_(words[i / each], i % each, factor, kind));
            }
        }
        if (k < end) {
            vfloat last[VLANES];
            gemm_load_last_(last, gemm_stored_at_(b, w, k), stride, stored_bytes(kind, (size_t)(end - k)));
            for (int i = 0; k < end; i++, k++) {
                const int begins = kind == STORED_FP4 && i % FP4_GROUP == 0;
                if (begins) { factor = gemm_group_factor_(&exponents, b->column + k); }
                v_store(packed + k * TILE_N + w, gemm_widen_(last[i / each], i % each, factor, kind));
            }
        }
    }
}

// VLANES columns of b, which are columns of a weight of fp4, and all of one group
static inline __attribute__((always_inline)) void gemm_pack_straight_fp4_(float* packed, const Matrix* b, int w,
                                                                          int K) {
    const size_t stride = gemm_stored_stride_(b), n_groups = (size_t)(b->weight.columns / FP4_GROUP);
    const uint8_t* from = (const uint8_t*)gemm_stored_at_(b, 0, w);
    const uint8_t* exponent = stored_row_exponents(&b->weight, b->row) + (b->column + w) / FP4_GROUP;
    for (int k = 0; k < K; k++, from += stride, exponent += n_groups, packed += TILE_N) {
        v_store(packed, v_load_fp4(from) * v_fill(e8m0_widen(*exponent)));
    }
}

// VLANES columns of b, which are columns of the weight
static inline __attribute__((always_inline)) void gemm_pack_straight_(float* packed, const Matrix* b, int w, int K,
                                                                      Stored kind) {
    const size_t stride = gemm_stored_stride_(b);
    vfloat factor = v_fill(1.0f);
    if (kind == STORED_FP4) {
        gemm_pack_straight_fp4_(packed + w, b, w, K);
        return;
    }
    for (int k = 0; k < K;) {
        const int row = (b->row + k) % b->weight.part_rows, left = gemm_min_(K - k, b->weight.part_rows - row);
        const int end = k + gemm_alike_(row, left, b->weight.block_rows, kind);
        if (kind == STORED_FP8) { factor = gemm_column_factors_(&b->weight, b->row + k, b->column + w); }
        const char* from = gemm_stored_at_(b, k, w);
        for (; k < end; k++, from += stride) {
            v_store(packed + k * TILE_N + w, kind == STORED_FP8 ? v_load_fp8((const uint8_t*)from) * factor
                                                                : v_load_bf16((const uint16_t*)from));
        }
    }
}

// TILE_N columns of b
static inline __attribute__((always_inline)) void gemm_pack_stored_(float* packed, const Matrix* b, int n_valid, int K,
                                                                    Stored kind) {
    const int whole = n_valid / VLANES * VLANES;  // columns that fill vectors; the others one by one
    for (int w = 0; w < whole; w += VLANES) {
        if (b->is_turned) { gemm_pack_turned_(packed, b, w, K, kind); }
        else { gemm_pack_straight_(packed, b, w, K, kind); }
    }
    for (int k = 0; k < K && whole < TILE_N; k++) {
        for (int w = whole; w < TILE_N; w++) {
            const int row = b->row + (b->is_turned ? w : k), column = b->column + (b->is_turned ? k : w);
            packed[k * TILE_N + w] = w < n_valid ? stored_value(&b->weight, row, column) : 0.0f;
        }
    }
}

// TILE_M rows of a, or TILE_N columns of b. The compiler makes a loop without indices and one with them; inlined, they
// would take registers from the loop over tiles
static __attribute__((noinline, unused)) void gemm_pack_a_tile_(float* packed, Matrix a, int M, int K) {
    if (a.row_index || a.col_index) {
        gemm_pack_matrix_(packed, a, TILE_M, gemm_min_(TILE_M, M), K);
    } else {
        gemm_pack_(packed, a.data, a.row_stride, a.col_stride, TILE_M, gemm_min_(TILE_M, M), K);
    }
}
static __attribute__((noinline, unused)) void gemm_pack_b_panel_(float* packed, Matrix b, int N, int K) {
    const Matrix turned = gemm_floats_(b.data, b.col_stride, b.row_stride, b.col_index, b.row_index);
    if (b.is_stored && b.weight.kind == STORED_FP4) {
        gemm_pack_stored_(packed, &b, N, K, STORED_FP4);
    } else if (b.is_stored && b.weight.kind == STORED_FP8) {
        gemm_pack_stored_(packed, &b, N, K, STORED_FP8);
    } else if (b.is_stored) {
        gemm_pack_stored_(packed, &b, N, K, STORED_BF16);
    } else if (b.row_index || b.col_index) {
        gemm_pack_matrix_(packed, turned, TILE_N, N, K);
    } else {
        gemm_pack_(packed, b.data, b.col_stride, b.row_stride, TILE_N, N, K);
    }
}

// ---- the part of b that is packed next: its lines are asked for one by one while another is multiplied ----

typedef struct {
    const char* row;
    size_t row_stride;  // bytes
    int n_rows;         // that are left
    int length, at;     // bytes of a row, and which of them is next
    int n_lines;        // at a time; 0: nothing comes
    const int* index;   // of this row, or NULL: rows lie one after the other
    const char* data;   // where row 0 of the index is
} PanelPrefetch;

static inline void gemm_prefetch_(PanelPrefetch* p) {
    for (int i = 0; i < p->n_lines && p->n_rows > 0; i++) {
        __builtin_prefetch(p->row + p->at, 0, 2);  // to be read; into the second cache
        p->at += GEMM_LINE * (int)sizeof(float);
        if (p->at >= p->length) {
            p->at = 0;
            if (--p->n_rows > 0) { p->row = p->index ? p->data + *++p->index * p->row_stride : p->row + p->row_stride; }
        }
    }
}

// ---- the inner loop: TILE_M x TILE_N chains in registers ----

// it is optimized in every build: of tests and debuggers (-Og) it would be six times slower
#if defined(__clang__) || defined(__CUDACC__)
#define GEMM_OPTIMIZED
#else
#define GEMM_OPTIMIZED __attribute__((optimize("O3")))
#endif

// the first V vectors of each row of a tile. past: they are stored past the caches
static inline __attribute__((always_inline)) void gemm_vectors_(float* out, size_t out_stride, const float* start,
                                                                size_t start_stride, const float* a, const float* b,
                                                                int V, int K, PanelPrefetch* next, int past) {
    vfloat sum[TILE_M][TILE_V];
    for (int m = 0; m < TILE_M; m++) {
        for (int v = 0; v < V; v++) { sum[m][v] = v_load(start + m * start_stride + v * VLANES); }
    }
    for (int left = K; left > 0; left -= GEMM_PREFETCH_K) {
        if (next) { gemm_prefetch_(next); }
        for (int k = gemm_min_(left, GEMM_PREFETCH_K); k > 0; k--) {
            vfloat bk[TILE_V];
            for (int v = 0; v < V; v++) { bk[v] = v_load(b + v * VLANES); }
            #pragma GCC unroll 8
            for (int m = 0; m < TILE_M; m++) {
                vfloat am = v_fill(a[m]);
                #pragma GCC unroll 4
                for (int v = 0; v < V; v++) { sum[m][v] = v_madd(am, bk[v], sum[m][v]); }
            }
            a += TILE_M;
            b += TILE_N;
        }
    }
    for (int m = 0; m < TILE_M; m++) {
        for (int v = 0; v < V; v++) {
            float* o = out + m * out_stride + v * VLANES;
            if (past) { v_store_past(o, sum[m][v]); } else { v_store(o, sum[m][v]); }
        }
    }
}

// N columns of a tile. The compiler makes a loop of its own for each number of vectors
static inline GEMM_OPTIMIZED void gemm_tile_(float* out, size_t out_stride, const float* start, size_t start_stride,
                                             const float* a, const float* b, int N, int K, PanelPrefetch* next,
                                             int past) {
    if (N > 2 * VLANES) {
        gemm_vectors_(out, out_stride, start, start_stride, a, b, TILE_V, K, next, past);
    } else if (N > VLANES) {
        gemm_vectors_(out, out_stride, start, start_stride, a, b, 2, K, next, past);
    } else {
        gemm_vectors_(out, out_stride, start, start_stride, a, b, 1, K, next, past);
    }
}

// a tile at the rim has fewer than TILE_M rows or ends inside a vector: it is computed whole in a buffer, the valid
// part copied
static inline void gemm_rim_tile_(float* out, size_t out_stride, const float* start, size_t start_stride,
                                  const float* a, const float* b, int M, int N, int K, PanelPrefetch* next) {
    float tile[TILE_M * TILE_N] = {0};
    for (int m = 0; m < M; m++) { memcpy(tile + m * TILE_N, start + m * start_stride, sizeof(float) * N); }
    gemm_tile_(tile, TILE_N, tile, TILE_N, a, b, N, K, next, 0);
    for (int m = 0; m < M; m++) { memcpy(out + m * out_stride, tile + m * TILE_N, sizeof(float) * N); }
}

// a long k is cut into blocks of about this length each: no short one is left over. Whole groups of fp4
static inline int gemm_k_block_(int K) {
    const int n_blocks = K > 0 ? (int)ceil_div(K, GEMM_K) : 1;
    return K > 0 ? (int)ceil_div(ceil_div(K, n_blocks), FP4_GROUP) * FP4_GROUP : 1;
}

// one packed panel of b (K, TILE_N) against the packed rows m0..m1 of a
static inline __attribute__((always_inline)) void gemm_tiles_(float* out, size_t out_stride, const float* start,
                                                              size_t start_stride, const float* a, const float* b,
                                                              int m0, int m1, int N, int K, PanelPrefetch* next,
                                                              int past) {
    for (int m = m0; m < m1; m += TILE_M) {
        const float* a_tile = a + (size_t)m * K;
        float* o = out + m * out_stride;
        const float* s = start + m * start_stride;
        if (m + TILE_M <= m1 && N % VLANES == 0) {
            gemm_tile_(o, out_stride, s, start_stride, a_tile, b, N, K, next, past);
        } else {
            gemm_rim_tile_(o, out_stride, s, start_stride, a_tile, b, gemm_min_(TILE_M, m1 - m), N, K, next);
        }
    }
}

static inline void gemm_panel_(float* out, size_t out_stride, const float* start, size_t start_stride,
                               const float* a, const float* b, int m0, int m1, int N, int K, PanelPrefetch* next) {
    gemm_tiles_(out, out_stride, start, start_stride, a, b, m0, m1, N, K, next, 0);
}

// rows of a that are packed at once when k is this long
static inline int gemm_block_rows_(int M, int K) {
    int most = GEMM_A_FLOATS / gemm_min_(K > 0 ? K : 1, GEMM_LONG_K) / TILE_M * TILE_M;
    return gemm_min_(M, most);
}

// floats of a's packed block: whole tiles, and whole cache lines so that b's panels start on one
static inline size_t gemm_a_floats_(int M, int K) {
    size_t n = (size_t)ceil_div(gemm_block_rows_(M, K), TILE_M) * TILE_M * gemm_min_(K, GEMM_LONG_K);
    return (n + GEMM_LINE - 1) / GEMM_LINE * GEMM_LINE;
}

static inline size_t gemm_workspace_bytes(int M, int K, int n_threads) {
    return sizeof(float) * (gemm_a_floats_(M, K) + (size_t)n_threads * GEMM_K * TILE_N);
}

// what a task reads of b: at most TILE_N of its columns, none of them past its end
typedef struct {
    Matrix b;
    int N, K;
} PanelSource;

static inline PanelSource gemm_columns_(Matrix b, int n, int N, int K) {
    PanelSource p = {b, 0, K};
    if (n < N) {
        p.b = gemm_from_(b, 0, n);
        p.N = gemm_min_(TILE_N, N - n);
    }
    return p;
}

// rows k..k + n_k of a panel, for whoever asks so many times
static inline PanelPrefetch gemm_prefetch_plan_(PanelSource p, int k, int64_t n_calls) {
    const Matrix b = gemm_from_(p.b, k, 0);
    const int n_k = gemm_min_(gemm_k_block_(p.K), p.K - k), rows_along_k = b.row_stride == 1 && !b.row_index;
    const Stored kind = b.is_stored ? b.weight.kind : STORED_F32;
    const int line = GEMM_LINE * (int)sizeof(float), length = rows_along_k ? n_k : p.N + p.N % 2;  // whole bytes
    const char* data = b.is_stored ? gemm_stored_at_(&b, 0, 0) : (const char*)b.data;
    PanelPrefetch next = {data, stored_bytes(kind, rows_along_k ? b.col_stride : b.row_stride),
                          rows_along_k ? p.N : n_k, (int)stored_bytes(kind, (size_t)length), 0, 0, b.row_index, data};
    if (p.N > 0) { next.n_lines = (int)ceil_div(next.n_rows * ceil_div(next.length, line), n_calls); }
    if (next.n_lines > 0) { next.row += gemm_at_(b.row_index, 0) * next.row_stride; }
    return next;
}

// rows m0..m1 of one panel of out: its b is packed by the thread that needs it, so no thread waits for another
static inline void gemm_task_(float* out, size_t out_stride, const float* start, size_t start_stride,
                              const float* a_packed, float* b_packed, PanelSource panel, PanelSource next_panel,
                              int m0, int m1, int M, int past) {
    const size_t M_whole = (size_t)ceil_div(M, TILE_M) * TILE_M;
    const int K = panel.K, k_block = gemm_k_block_(K);
    for (int k = 0; k < K || k == 0; k += k_block) {  // ascending: each block goes on where the last one stopped
        const int n_k = gemm_min_(k_block, K - k), next_k = k + n_k < K ? k + n_k : 0;
        const int64_t n_calls = ceil_div(m1 - m0, TILE_M) * ceil_div(n_k, GEMM_PREFETCH_K);
        PanelPrefetch next = gemm_prefetch_plan_(next_k > 0 ? panel : next_panel, next_k, n_calls > 0 ? n_calls : 1);
        gemm_pack_b_panel_(b_packed, gemm_from_(panel.b, k, 0), panel.N, n_k);
        gemm_tiles_(out, out_stride, k > 0 ? out : start, k > 0 ? out_stride : start_stride, a_packed + M_whole * k,
                    b_packed, m0, m1, panel.N, n_k, &next, past && k + n_k >= K);
    }
    if (past) { v_past_done(); }
}

// ---- what is computed between two meetings of the threads: parts of one product, or of several ----

// some rows of out, and GEMM_LONG_K terms of their chains at most
typedef struct {
    float* out;
    const float* start;  // NULL: the chains begin at 0
    size_t start_stride;
    Matrix a, b;
    int M, K;
    float* a_packed;     // this and what follows is gemm_plan_block_'s
    int rows;            // of a task, which has a panel of columns
    int first_tile, first_task;
} GemmPart;

// none of the parts may need what another one computes
typedef struct {
    GemmPart* part;
    int n_parts;
    int N;
    size_t out_stride;
    int past;              // 1: out is stored past the caches; it begins at cache lines, and so do its rows
    int n_tiles, n_tasks;  // of all parts
    int n_panels;          // of columns, in each part
} GemmBlock;

// floats of a part's a, packed: whole tiles, and whole cache lines
static inline size_t gemm_part_floats_(int M, int K) {
    size_t n = (size_t)ceil_div(M, TILE_M) * TILE_M * K;
    return (n + GEMM_LINE - 1) / GEMM_LINE * GEMM_LINE;
}

// ---- few rows: where a linear layer has few positions, weights are read from memory once and never packed ----

// rows of a at most: as many as are faster so than packed, where a weight of few bytes is widened in registers, too
enum { GEMM_FEW = VLANES == 16 ? 7 : 4, GEMM_FEW_STORED = 8 };

// b is a transposed matrix: its rows, of which each is a column here, are what a weight has for one output
static inline int gemm_is_few_(const GemmPart* p) {
    const int a_plain = p->a.col_stride == 1 && !p->a.col_index, most = p->b.is_stored ? GEMM_FEW_STORED : GEMM_FEW;
    const int b_turned = p->b.is_stored ? p->b.is_turned : p->b.row_stride == 1;
    return p->M <= most && a_plain && b_turned && !p->b.row_index && !p->b.col_index;
}

// one more term of `chains` chains in each lane: element k of VLANES rows of the weight
static inline __attribute__((always_inline)) void gemm_few_term_(vfloat* sum, const float* const* a, vfloat column,
                                                                 int k, int chains) {
    for (int m = 0; m < chains; m++) { sum[m] = v_madd(v_fill(a[m][k]), column, sum[m]); }
}

// VLANES columns of out from column n of b on: as many rows of the weight, turned in registers, VLANES words of k at a
// time. after: columns from there to those that are read next. They are asked for meanwhile, one row after the other,
// for memory is fastest so. chains: those in registers; of them M are written, the others are those of some row again
static inline __attribute__((always_inline)) void gemm_few_columns_(float* out, size_t out_stride, const float* start,
                                                                    size_t start_stride, const float* const* a,
                                                                    const Matrix* b, int n, int after, Stored kind,
                                                                    int chains, int M, int K) {
    const int each = gemm_each_(kind), step = each * VLANES;
    // words whose terms stand one after the other; of fp4 those of a group
    const int at_once = (kind == STORED_FP8 || kind == STORED_FP4) && VLANES > 4 ? 4 : VLANES;
    const size_t stride = stored_bytes(kind, b->col_stride);
    const char* data = kind == STORED_F32 ? (const char*)(b->data + n * b->col_stride) : gemm_stored_at_(b, n, 0);
    const size_t row_bytes = stored_bytes(kind, (size_t)K);
    const char *ask = data + (ptrdiff_t)stride * after, *row_end = ask + row_bytes;
    GemmScales scales;
    GemmExponents exponents;
    vfloat sum[GEMM_FEW_STORED], words[VLANES], factor = v_fill(1.0f);
    if (kind == STORED_FP8) { scales = gemm_scales_(&b->weight, b->row + n); }
    if (kind == STORED_FP4) { exponents = gemm_exponents_(&b->weight, b->row + n, b->column); }
    for (int m = 0; m < chains; m++) { sum[m] = v_load(start + (m < M ? m : 0) * start_stride); }
    int k = 0;
    do {  // of fp8 for each block of scales, else once
        const int end = k + gemm_alike_(b->column + k, K - k, b->weight.block_columns, kind);
        if (kind == STORED_FP8) { factor = gemm_factor_(&scales, b->column + k); }
        for (; k + step <= end; k += step) {
            for (int i = 0; i < VLANES; i += 4) {
                for (int j = 0; j < 4; j++, ask += sizeof(vfloat)) { __builtin_prefetch(ask); }
                if (ask >= row_end) { ask += stride - row_bytes, row_end += stride; }
            }
            v_load_column_words(words, data + stored_bytes(kind, (size_t)k), stride);
            for (int w = 0; w < VLANES; w += at_once) {
                if (kind == STORED_FP4) { factor = gemm_group_factor_(&exponents, b->column + k + w * each); }
                #pragma GCC unroll 32
                for (int i = 0; i < at_once * each; i++) {
                    const vfloat column = gemm_widen_(words[w + i / each], i % each, factor, kind);
                    gemm_few_term_(sum, a, column, k + w * each + i, chains);
                }
            }
        }
        if (k < end) {
            vfloat last[VLANES];
            gemm_load_last_(last, data + stored_bytes(kind, (size_t)k), stride, stored_bytes(kind, (size_t)(end - k)));
            for (int i = 0; k < end; i++, k++) {
                const int begins = kind == STORED_FP4 && i % FP4_GROUP == 0;
                if (begins) { factor = gemm_group_factor_(&exponents, b->column + k); }
                gemm_few_term_(sum, a, gemm_widen_(last[i / each], i % each, factor, kind), k, chains);
            }
        }
    } while (kind == STORED_FP8 && k < K);
    for (int m = 0; m < chains && m < M; m++) { v_store(out + m * out_stride, sum[m]); }
}

// columns n..n_end of a part; columns after are what is asked for when the last of these are read. The compiler makes a
// loop of its own for 1, 2, 4 and 8 chains: one for each number of rows took more than half of its time
static inline __attribute__((always_inline)) void gemm_few_panel_(const GemmPart* p, size_t out_stride, int n,
                                                                  int n_end, int after, Stored kind) {
    static const float zeros[VLANES] = {0};
    const size_t start_stride = p->start ? p->start_stride : 0;
    const Matrix* b = &p->b;
    const float* a[GEMM_FEW_STORED];
    for (int m = 0; m < GEMM_FEW_STORED; m++) {
        a[m] = p->a.data + gemm_at_(p->a.row_index, m < p->M ? m : 0) * p->a.row_stride;
    }
    for (; n + VLANES <= n_end; n += VLANES) {
        float* out = p->out + n;
        const float* start = p->start ? p->start + n : zeros;
        const int next = (n + 2 * VLANES <= n_end ? n + VLANES : after) - n;
        if (p->M == 1) {
            gemm_few_columns_(out, out_stride, start, start_stride, a, b, n, next, kind, 1, p->M, p->K);
        } else if (p->M == 2) {
            gemm_few_columns_(out, out_stride, start, start_stride, a, b, n, next, kind, 2, p->M, p->K);
        } else if (p->M <= 4) {
            gemm_few_columns_(out, out_stride, start, start_stride, a, b, n, next, kind, 4, p->M, p->K);
        } else {
            gemm_few_columns_(out, out_stride, start, start_stride, a, b, n, next, kind, 8, p->M, p->K);
        }
    }
    for (; n < n_end; n++) {
        for (int m = 0; m < p->M; m++) {
            float sum = p->start ? p->start[m * start_stride + n] : 0.0f;
            for (int k = 0; k < p->K; k++) {
                const float x = kind == STORED_F32 ? b->data[n * b->col_stride + k]
                                                   : stored_value(&b->weight, b->row + n, b->column + k);
                sum = madd(a[m][k], x, sum);
            }
            p->out[m * out_stride + n] = sum;
        }
    }
}

static __attribute__((noinline, unused)) void gemm_few_task_(const GemmPart* p, size_t out_stride, int n, int n_end,
                                                             int after) {
    switch (p->b.is_stored ? p->b.weight.kind : STORED_F32) {
        case STORED_FP4: gemm_few_panel_(p, out_stride, n, n_end, after, STORED_FP4); break;
        case STORED_FP8: gemm_few_panel_(p, out_stride, n, n_end, after, STORED_FP8); break;
        case STORED_BF16: gemm_few_panel_(p, out_stride, n, n_end, after, STORED_BF16); break;
        default: gemm_few_panel_(p, out_stride, n, n_end, after, STORED_F32);
    }
}

// Whole panels of one product are as many for each thread, for which some have fewer columns: 512 of them are 8 panels
// of 48 and 4 of 32 for two threads
static inline int gemm_panels_(int N, int n_parts, int n_threads) {
    const int n = (int)ceil_div(N, TILE_N), fair = (int)ceil_div(n, n_threads) * n_threads;
    return n_parts == 1 && n >= GEMM_TASKS * n_threads && fair <= ceil_div(N, GEMM_UNIT) ? fair : n;
}

// the first column of a panel
static inline int gemm_panel_begin_(const GemmBlock* block, int panel) {
    const int64_t n_units = ceil_div(block->N, GEMM_UNIT);
    if ((int64_t)block->n_panels * TILE_N < block->N + TILE_N) { return gemm_min_(panel * TILE_N, block->N); }
    return gemm_min_((int)(n_units * panel / block->n_panels) * GEMM_UNIT, block->N);
}

// tasks are panels, cut into pieces of rows where there are few of them: large parts into more
static inline void gemm_plan_block_(GemmBlock* block, float* a_packed, int n_threads) {
    const int n_panels = gemm_panels_(block->N, block->n_parts, n_threads);
    const int pieces = (int)ceil_div(GEMM_TASKS * n_threads, n_panels);
    int64_t work = 0;
    block->n_panels = n_panels;
    for (int i = 0; i < block->n_parts; i++) { work += (int64_t)block->part[i].M * (block->part[i].K + 1); }
    block->n_tiles = block->n_tasks = 0;
    for (int i = 0; i < block->n_parts; i++) {
        GemmPart* p = &block->part[i];
        int64_t share = ceil_div(pieces * ((int64_t)p->M * (p->K + 1)), work);
        p->rows = (int)ceil_div(p->M, share * GEMM_PIECE) * GEMM_PIECE;
        p->a_packed = a_packed;
        p->first_tile = block->n_tiles, p->first_task = block->n_tasks;
        block->n_tiles += gemm_is_few_(p) ? 0 : (int)ceil_div(p->M, TILE_M);
        block->n_tasks += n_panels * (int)ceil_div(p->M, p->rows);
        a_packed += gemm_part_floats_(p->M, p->K);
    }
}

// the part of which a tile or a task is
static inline const GemmPart* gemm_part_of_(const GemmBlock* block, int tile, int task) {
    int first = 0, end = block->n_parts;
    while (end - first > 1) {
        int middle = (first + end) / 2;
        int before = block->part[middle].first_tile > tile || block->part[middle].first_task > task;
        if (before) { end = middle; } else { first = middle; }
    }
    return &block->part[first];
}

// one tile of TILE_M rows of a, packed: k blocks lie one after the other, in each the tiles
static inline void gemm_pack_a_(const GemmPart* p, int tile) {
    const int m = tile * TILE_M, k_block = gemm_k_block_(p->K);
    const size_t M_whole = (size_t)ceil_div(p->M, TILE_M) * TILE_M;
    for (int k = 0; k < p->K; k += k_block) {
        int n_k = gemm_min_(k_block, p->K - k);
        gemm_pack_a_tile_(p->a_packed + M_whole * k + (size_t)m * n_k, gemm_from_(p->a, m, k), p->M - m, n_k);
    }
}

// the columns of a task, none where there is no such task
static inline PanelSource gemm_task_columns_(const GemmBlock* block, int task) {
    const GemmPart* p = gemm_part_of_(block, INT_MAX, task);
    int n_pieces = (int)ceil_div(p->M, p->rows);
    const int panel = task < block->n_tasks ? (task - p->first_task) / n_pieces : block->n_panels;
    return gemm_columns_(p->b, gemm_panel_begin_(block, panel), gemm_panel_begin_(block, panel + 1), p->K);
}

// by the threads of the enclosing parallel region, which have to meet before the next block
static inline void gemm_block_(const GemmBlock* block, float* b_packed, int n_threads) {
    static const float zeros[TILE_N] = {0};
    if (block->n_tiles > 0) {  // few rows are not packed: nobody waits for them
        #pragma omp for
        for (int tile = 0; tile < block->n_tiles; tile++) {
            const GemmPart* p = gemm_part_of_(block, tile, INT_MAX);
            gemm_pack_a_(p, tile - p->first_tile);
        }
    }
    #pragma omp for schedule(dynamic) nowait
    for (int task = 0; task < block->n_tasks; task++) {
        const GemmPart* p = gemm_part_of_(block, INT_MAX, task);
        int n_pieces = (int)ceil_div(p->M, p->rows), i = task - p->first_task;
        const int panel = i / n_pieces, m = i % n_pieces * p->rows;
        const int n = gemm_panel_begin_(block, panel), n_end = gemm_panel_begin_(block, panel + 1);
        if (gemm_is_few_(p)) {
            const int after = gemm_panel_begin_(block, gemm_min_(panel + n_threads, block->n_panels));
            gemm_few_task_(p, block->out_stride, n, n_end, after + VLANES <= block->N ? after : n);
            continue;
        }
        gemm_task_(p->out + n, block->out_stride, p->start ? p->start + n : zeros, p->start ? p->start_stride : 0,
                   p->a_packed, b_packed, gemm_columns_(p->b, n, n_end, p->K),
                   gemm_task_columns_(block, task + n_threads),  // most likely the next: threads take turns
                   m, gemm_min_(m + p->rows, p->M), p->M, block->past);
    }
}

static inline float* gemm_b_packed_(float* workspace) { return workspace + (size_t)thread_number() * GEMM_K * TILE_N; }

static inline void gemm(float* out, size_t out_stride, const float* start, size_t start_stride, Matrix a, Matrix b,
                        int M, int N, int K, const Device* dev) {
    size_t a_floats = gemm_a_floats_(M, K);
    float* workspace = device_workspace(dev, gemm_workspace_bytes(M, K, dev->n_threads));
    int block_rows = gemm_block_rows_(M, K);
    #pragma omp parallel
    for (int m = 0; m < M; m += block_rows) {
        for (int k = 0; k < K || k == 0; k += GEMM_LONG_K) {
            float* o = out + m * out_stride;
            const float* from = k > 0 ? o : start ? start + m * start_stride : NULL;
            GemmPart part = {o, from, k > 0 ? out_stride : start_stride, gemm_from_(a, m, k), gemm_from_(b, k, 0),
                             gemm_min_(block_rows, M - m), gemm_min_(GEMM_LONG_K, K - k), NULL, 0, 0, 0};
            GemmBlock block = {&part, 1, N, out_stride, 0, 0, 0, 0};
            gemm_plan_block_(&block, workspace, dev->n_threads);
            if (m + k > 0) {
                #pragma omp barrier
            }
            gemm_block_(&block, gemm_b_packed_(workspace + a_floats), dev->n_threads);
        }
    }
}

#else  // ---- CUDA: the same chains, X and Out float or bf16 ----

// element (r, c) is data[r * row_stride + c * col_stride]; one of the strides is 1
template <typename X>
struct MatrixOf {
    const X* data;
    size_t row_stride, col_stride;
};
typedef MatrixOf<float> Matrix;

template <typename X>
static inline MatrixOf<X> gemm_matrix(const X* data, size_t row_stride) { return MatrixOf<X>{data, row_stride, 1}; }
template <typename X>
static inline MatrixOf<X> gemm_transposed(const X* data, size_t row_stride) { return MatrixOf<X>{data, 1, row_stride}; }

#ifndef CUBLAS_WORKSPACE
#define CUBLAS_WORKSPACE ((size_t)32 << 20)  // bytes: what NVIDIA advises for Hopper. dev/simt has less
#endif

// the workspace of fast builds, for gemm_cublas.h; the kernel here needs none
static inline size_t gemm_workspace_bytes(int M, int K, int n_threads) {
    (void)M, (void)K, (void)n_threads;
    return CUBLAS_WORKSPACE;
}

enum {
    GEMM_TILE = 64,  // a block of threads computes so many rows and columns of outputs...
    GEMM_SUMS = 4,   // ...and a thread so many
    GEMM_THREADS = GEMM_TILE / GEMM_SUMS * (GEMM_TILE / GEMM_SUMS),
    GEMM_TILE_K = 16,  // terms of every chain that are in shared memory at a time
    // floats from one k to the next: stores down a column meet few banks twice, packs stay aligned
    GEMM_TILE_ROW = GEMM_TILE + 4
};

// this thread's first output in the tile
__device__ inline int gemm_first_row_() { return (int)threadIdx.x / (GEMM_TILE / GEMM_SUMS) * GEMM_SUMS; }
__device__ inline int gemm_first_column_() { return (int)threadIdx.x % (GEMM_TILE / GEMM_SUMS) * GEMM_SUMS; }

// tile[k][w] = from[w * w_stride + k * k_stride]; neighbouring threads read neighbouring addresses. The zeros fill up
// rows and columns that are computed and thrown away; those in k are never read
template <typename X>
__device__ inline void gemm_load_(float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], const X* from, size_t w_stride,
                                  size_t k_stride, int n_valid, int n_k) {
    for (int i = threadIdx.x; i < GEMM_TILE_K * GEMM_TILE; i += GEMM_THREADS) {
        int k = k_stride == 1 ? i % GEMM_TILE_K : i / GEMM_TILE, w = k_stride == 1 ? i / GEMM_TILE_K : i % GEMM_TILE;
        tile[k][w] = w < n_valid && k < n_k ? to_float(from[w * w_stride + k * k_stride]) : 0.0f;
    }
}

// one more term of each of this thread's chains
__device__ inline void gemm_term_(float (&sum)[GEMM_SUMS][GEMM_SUMS], const float* a, const float* b) {
    for (int i = 0; i < GEMM_SUMS; i++) {
        for (int j = 0; j < GEMM_SUMS; j++) { sum[i][j] = madd(a[i], b[j], sum[i][j]); }
    }
}

// the sums of this thread go on with K terms. load_a(tile, k, n_k) and load_b bring those from k on into a tile
template <typename LoadA, typename LoadB>
__device__ inline void gemm_terms_(float (&sum)[GEMM_SUMS][GEMM_SUMS], float (&a_tile)[GEMM_TILE_K][GEMM_TILE_ROW],
                                   float (&b_tile)[GEMM_TILE_K][GEMM_TILE_ROW], LoadA load_a, LoadB load_b, int K) {
    int m = gemm_first_row_(), n = gemm_first_column_();
    for (int k = 0; k < K; k += GEMM_TILE_K) {
        int n_k = K - k < GEMM_TILE_K ? K - k : GEMM_TILE_K;
        __syncthreads();  // the tile before this one has been used
        load_a(a_tile, k, n_k);
        load_b(b_tile, k, n_k);
        __syncthreads();
        if (n_k == GEMM_TILE_K) {
            #pragma unroll
            for (int i = 0; i < GEMM_TILE_K; i++) { gemm_term_(sum, &a_tile[i][m], &b_tile[i][n]); }
        } else {
            #pragma unroll 1
            for (int i = 0; i < n_k; i++) { gemm_term_(sum, &a_tile[i][m], &b_tile[i][n]); }
        }
    }
}

// the sums of this thread to a tile of out, of which M rows and N columns exist
template <typename Out>
__device__ inline void gemm_store_(Out* out, size_t out_stride, const float (&sum)[GEMM_SUMS][GEMM_SUMS], int M,
                                   int N) {
    int m = gemm_first_row_(), n = gemm_first_column_();
    for (int i = 0; i < GEMM_SUMS && m + i < M; i++) {
        Out* row = out + (m + i) * out_stride + n;
        for (int j = 0; j < GEMM_SUMS && n + j < N; j++) { row[j] = from_float<Out>(sum[i][j]); }
    }
}

// block is (GEMM_THREADS), three of them on a multiprocessor; grid (tiles of M, tiles of N). start may be out: each
// element is read and written by one thread
template <typename Out, typename X>
__global__ void __launch_bounds__(GEMM_THREADS, 3)
gemm_kernel(Out* out, size_t out_stride, const Out* start, size_t start_stride, MatrixOf<X> a, MatrixOf<X> b,
            int M, int N, int K) {
    __shared__ alignas(16) float a_tile[GEMM_TILE_K][GEMM_TILE_ROW];
    __shared__ alignas(16) float b_tile[GEMM_TILE_K][GEMM_TILE_ROW];
    int m0 = blockIdx.x * GEMM_TILE, n0 = blockIdx.y * GEMM_TILE, m = gemm_first_row_(), n = gemm_first_column_();
    float sum[GEMM_SUMS][GEMM_SUMS];
    for (int i = 0; i < GEMM_SUMS; i++) {
        for (int j = 0; j < GEMM_SUMS; j++) {
            int valid = start && m0 + m + i < M && n0 + n + j < N;
            sum[i][j] = valid ? to_float(start[(m0 + m + i) * start_stride + n0 + n + j]) : 0.0f;
        }
    }
    auto load_a = [&](float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], int k, int n_k) {
        gemm_load_(tile, a.data + m0 * a.row_stride + k * a.col_stride, a.row_stride, a.col_stride, M - m0, n_k);
    };
    auto load_b = [&](float (&tile)[GEMM_TILE_K][GEMM_TILE_ROW], int k, int n_k) {
        gemm_load_(tile, b.data + k * b.row_stride + n0 * b.col_stride, b.col_stride, b.row_stride, N - n0, n_k);
    };
    gemm_terms_(sum, a_tile, b_tile, load_a, load_b, K);
    gemm_store_(out + m0 * out_stride + n0, out_stride, sum, M - m0, N - n0);
}

template <typename Out, typename X>
static inline void gemm(Out* out, size_t out_stride, const typename MaybeNull<Out>::type* start, size_t start_stride,
                        MatrixOf<X> a, MatrixOf<X> b, int M, int N, int K, const Device* dev) {
    // only x has room for millions of positions
    dim3 grid((unsigned)ceil_div(M, GEMM_TILE), (unsigned)ceil_div(N, GEMM_TILE));
    gemm_kernel<<<grid, GEMM_THREADS, 0, dev->stream>>>(out, out_stride, start, start_stride, a, b, M, N, K);
    cudaCheck(cudaGetLastError());
}
#endif  // __CUDACC__
#endif  // LLMC_GEMM_H
