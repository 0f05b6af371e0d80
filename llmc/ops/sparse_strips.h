/*
What the fast C of sparse_attention.h is made of. A strip is a few neighbouring positions of a document with some of
their heads: neighbouring rows of q, which become lanes. All they see lies below one another, a row of lanes for a key:
first the keys of the window of any of them, then the entries.
    sparse_strip       the one that begins at a position, with some of its heads
    sparse_dots        scores: keys (rows of a tile, wherever they lie) times the strip turned
    sparse_product     products of a few rows: what weights make of keys, or of queries
    sparse_stairs      the same where each row begins some terms after the one before: what a key has of positions
Cost:   nothing is packed but q, once for all keys; keys are read where they lie, lists through their index. A product
        keeps up to TILE_M x TILE_V vectors of sums in registers, as gemm.h. Of the keys that a strip sees together
        each of its n positions sees all but n - 1.
Order:  every sum is a chain over its terms, ascending; lanes and tiles hold different sums.
*/
#ifndef LLMC_SPARSE_STRIPS_H
#define LLMC_SPARSE_STRIPS_H
#ifndef __CUDACC__
#include "../core/vec.h"   // vfloat, VLANES, v_load, v_load_columns, v_store, v_fill, v_madd
#include "gemm.h"          // TILE_M, TILE_V, gemm_min_
#include "sparse_shape.h"  // SparseShape, Places, EntryWindows

enum { SPARSE_LANES = 64 };  // of a strip: whole positions, or as many heads of one

typedef struct {
    const SparseShape* s;
    const Places* places;
    const EntryWindows* w;
    const int* chosen;
    const float *q, *kv, *entries;
} SparseInputs;

typedef struct {
    int first, n;          // positions
    int head, n_heads;     // of each
    int lanes;             // n * n_heads
    size_t stride;         // floats of a row of lanes
    int key, n_keys;       // rows of kv that any of them sees
    int entry, n_entries;  // rows of entries, where there are no lists
} SparseStrip;

// what one position of a strip sees: rows of lanes
typedef struct {
    int n, lane;  // the position, and where its heads are
    int window_row, n_window, entry_row, n_entries;
} SparseSeen;

static inline size_t sparse_row(const SparseSeen* x, int k) {
    return (size_t)(k < x->n_window ? x->window_row + k : x->entry_row + k - x->n_window);
}

static inline int sparse_round_(int n) { return (n + VLANES - 1) / VLANES * VLANES; }

// positions of a strip that has n_heads of H heads of each
static inline int sparse_strip_positions(int n_heads, int H) {
    return n_heads < H || n_heads >= SPARSE_LANES ? 1 : SPARSE_LANES / n_heads;
}
// room for each of them to fill whole vectors
static inline size_t sparse_strip_stride(int n_heads, int H) {
    return (size_t)sparse_round_((sparse_strip_positions(n_heads, H) - 1) * n_heads + sparse_round_(n_heads));
}

// do positions n and n + 1 stand next to each other in a document?
static inline int sparse_neighbours_(const SparseInputs* x, int n) {
    const Places* p = x->places;
    const int same_entries = !x->w || x->chosen || x->w->first_entry[n + 1] == x->w->first_entry[n];
    return p->first_key[n + 1] == p->first_key[n] && p->t[n + 1] == p->t[n] + 1 && same_entries;
}

// the strip that begins at position `first`, and ends before `end`
static inline SparseStrip sparse_strip(const SparseInputs* x, int first, int end, int head, int n_heads) {
    SparseStrip strip;
    int n = 1;
    while (first + n < end && sparse_neighbours_(x, first + n - 1)) { n++; }
    const int last = first + n - 1;
    strip.first = first, strip.n = n;
    strip.head = head, strip.n_heads = n_heads;
    strip.lanes = n * n_heads;
    strip.stride = sparse_strip_stride(n_heads, x->s->H);
    strip.key = sparse_first_key(x->s, x->places, first);
    strip.n_keys = x->places->first_key[last] + x->places->t[last] + 1 - strip.key;
    strip.n_entries = x->w && !x->chosen ? sparse_entries(x->s, x->places, x->w, NULL, last) : 0;
    strip.entry = strip.n_entries ? x->w->first_entry[last] : 0;
    return strip;
}

static inline SparseSeen sparse_seen(const SparseInputs* x, const SparseStrip* strip, int i) {
    SparseSeen seen;
    seen.n = strip->first + i, seen.lane = i * strip->n_heads;
    seen.n_window = sparse_window_keys(x->s, x->places, seen.n);
    seen.window_row = sparse_first_key(x->s, x->places, seen.n) - strip->key;
    seen.entry_row = strip->n_keys;
    seen.n_entries = sparse_entries(x->s, x->places, x->w, x->chosen, seen.n);
    return seen;
}

// turned (d, stride): row l of x (lanes, d) becomes lane l; those behind the last are 0
static inline void sparse_turn(float* turned, size_t stride, const float* x, int lanes, int d) {
    const int d_whole = d / VLANES * VLANES;
    for (int l = 0; l < lanes; l += VLANES) {
        const float* rows = x + (size_t)l * d;
        const int n = gemm_min_(VLANES, lanes - l), turns = n == VLANES ? d_whole : 0;
        for (int c = 0; c < turns; c += VLANES) {
            vfloat columns[VLANES];
            v_load_columns(columns, rows + c, (size_t)d);
            for (int i = 0; i < VLANES; i++) { v_store(turned + (size_t)(c + i) * stride + l, columns[i]); }
        }
        for (int c = turns; c < d; c++) {
            for (int i = 0; i < n; i++) { turned[(size_t)c * stride + l + i] = rows[(size_t)i * d + c]; }
        }
    }
    for (int c = 0; c < d; c++) {
        memset(turned + (size_t)c * stride + lanes, 0, sizeof(float) * (stride - (size_t)lanes));
    }
}

// x, kept in a register: gcc would load it anew for each of its uses, and loads are what is short there
static inline vfloat sparse_held_(vfloat x) {
#if defined(__SSE2__)
    __asm__("" : "+v"(x));
#endif
    return x;
}

// ---- scores ----

static inline __attribute__((always_inline)) void sparse_dots_tile_(float* out, size_t stride, const float* const* at,
                                                                    const float* x, int d, int V) {
    vfloat sum[TILE_M][TILE_V];
    #pragma GCC unroll 8
    for (int m = 0; m < TILE_M; m++) {
        for (int v = 0; v < V; v++) { sum[m][v] = v_fill(0.0f); }
    }
    for (ptrdiff_t c = 0; c < d; c++, x += stride) {
        vfloat xc[TILE_V];
        for (int v = 0; v < V; v++) { xc[v] = sparse_held_(v_load(x + v * VLANES)); }
        #pragma GCC unroll 8
        for (int m = 0; m < TILE_M; m++) {
            const vfloat y = v_fill(at[m][c]);
            #pragma GCC unroll 4
            for (int v = 0; v < V; v++) { sum[m][v] = v_madd(y, xc[v], sum[m][v]); }
        }
    }
    #pragma GCC unroll 8
    for (int m = 0; m < TILE_M; m++) {
        for (int v = 0; v < V; v++) { v_store(out + m * stride + v * VLANES, sum[m][v]); }
    }
}

// out[k][l] = dot of row k of y and lane l of x (d, stride), for whole vectors of lanes and whole tiles of keys: room
// for TILE_M - 1 more is needed. Row k is number index[k] of y, or k
static inline void sparse_dots(float* out, size_t stride, const float* y, const int* index, int n_keys, const float* x,
                               int n_lanes, int d) {
    for (int k = 0; k < n_keys; k += TILE_M) {
        const float* at[TILE_M];
        for (int m = 0; m < TILE_M; m++) {
            const int row = gemm_min_(k + m, n_keys - 1);
            at[m] = y + (index ? (size_t)index[row] : (size_t)row) * d;
        }
        float* o = out + (size_t)k * stride;
        for (int left = (int)ceil_div(n_lanes, VLANES), l = 0, V; left > 0; left -= V, l += V * VLANES) {
            V = (int)ceil_div(left, ceil_div(left, TILE_V));
            switch (V) {
                case 1: sparse_dots_tile_(o + l, stride, at, x + l, d, 1); break;
                case 2: sparse_dots_tile_(o + l, stride, at, x + l, d, 2); break;
                default: sparse_dots_tile_(o + l, stride, at, x + l, d, TILE_V);
            }
        }
    }
}

// ---- products ----

typedef struct {
    float* out;           // (M, C), rows out_step apart
    const float* a;       // term k of row m is a[k * a_step + m]...
    const float* b;       // ...times row index[k] of b, or k
    const int* index;
    size_t out_step, a_step, b_step;
    int M, C, K;
    int go_on;            // from what is in out, or from 0
    int stair, stairs_down;  // sparse_stairs
} SparseProduct;

static inline __attribute__((always_inline)) void sparse_product_tile_(const SparseProduct* p, int m0, int c, int M,
                                                                       int V) {
    vfloat sum[TILE_M][TILE_V];
    float* out = p->out + m0 * p->out_step + c;
    const float *a = p->a + m0, *b = p->b + c;
    #pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        for (int v = 0; v < V; v++) {
            sum[m][v] = p->go_on ? v_load(out + m * p->out_step + v * VLANES) : v_fill(0.0f);
        }
    }
    for (ptrdiff_t k = 0, K = p->K; k < K; k++, a += p->a_step) {
        const float* b_k = b + (p->index ? p->index[k] : k) * p->b_step;
        vfloat bk[TILE_V];
        for (int v = 0; v < V; v++) { bk[v] = sparse_held_(v_load(b_k + v * VLANES)); }
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const vfloat am = v_fill(a[m]);
            #pragma GCC unroll 4
            for (int v = 0; v < V; v++) { sum[m][v] = v_madd(am, bk[v], sum[m][v]); }
        }
    }
    #pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        for (int v = 0; v < V; v++) { v_store(out + m * p->out_step + v * VLANES, sum[m][v]); }
    }
}

// columns that fill no vector
static inline void sparse_product_rest_(const SparseProduct* p, int c) {
    for (int m = 0; m < p->M; m++) {
        for (int i = c; i < p->C; i++) {
            float* out = p->out + m * p->out_step + i;
            float sum = p->go_on ? *out : 0.0f;
            for (int k = 0; k < p->K; k++) {
                sum = madd(p->a[k * p->a_step + m], p->b[(p->index ? p->index[k] : k) * p->b_step + i], sum);
            }
            *out = sum;
        }
    }
}

// rows m..m + M
static inline __attribute__((always_inline)) void sparse_product_rows_(const SparseProduct* p, int m, int M) {
    for (int left = p->C / VLANES, c = 0, V; left > 0; left -= V, c += V * VLANES) {
        V = (int)ceil_div(left, ceil_div(left, TILE_V));
        switch (V) {
            case 1: sparse_product_tile_(p, m, c, M, 1); break;
            case 2: sparse_product_tile_(p, m, c, M, 2); break;
            default: sparse_product_tile_(p, m, c, M, TILE_V);
        }
    }
}

// rows in tiles of about this length each: 8 heads as twice 4 where there is no room for 8
static inline void sparse_product(const SparseProduct* p) {
    for (int m = 0, M; m < p->M; m += M) {
        M = (int)ceil_div(p->M - m, ceil_div(p->M - m, TILE_M));
        switch (M) {
            case 1: sparse_product_rows_(p, m, 1); break;
            case 2: sparse_product_rows_(p, m, 2); break;
            case 3: sparse_product_rows_(p, m, 3); break;
            case 4: sparse_product_rows_(p, m, 4); break;
            case 5: sparse_product_rows_(p, m, 5); break;
            case 6: sparse_product_rows_(p, m, 6); break;
            case 7: sparse_product_rows_(p, m, TILE_M == 8 ? 7 : 1); break;
            default: sparse_product_rows_(p, m, TILE_M);
        }
    }
    if (p->C % VLANES) { sparse_product_rest_(p, p->C / VLANES * VLANES); }
}

// n more terms of rows m0..m1
static inline __attribute__((always_inline)) void sparse_stair_(vfloat (*sum)[TILE_V], const float** a, const float** b,
                                                                const SparseProduct* p, int n, int m0, int m1, int V) {
    for (; n > 0; n--, *a += p->a_step, *b += p->b_step) {
        vfloat bk[TILE_V];
        for (int v = 0; v < V; v++) { bk[v] = sparse_held_(v_load(*b + v * VLANES)); }
        #pragma GCC unroll 8
        for (int m = m0; m < m1; m++) {
            const vfloat am = v_fill((*a)[m]);
            #pragma GCC unroll 4
            for (int v = 0; v < V; v++) { sum[m][v] = v_madd(am, bk[v], sum[m][v]); }
        }
    }
}

static inline __attribute__((always_inline)) void sparse_stairs_tile_(const SparseProduct* p, int c, int V) {
    vfloat sum[TILE_M][TILE_V];
    const float *a = p->a, *b = p->b + c;
    #pragma GCC unroll 8
    for (int m = 0; m < TILE_M; m++) {
        for (int v = 0; v < V; v++) { sum[m][v] = v_load(p->out + m * p->out_step + c + v * VLANES); }
    }
    #pragma GCC unroll 8
    for (int m = 1; m < TILE_M; m++) { sparse_stair_(sum, &a, &b, p, p->stair, 0, m, V); }
    sparse_stair_(sum, &a, &b, p, p->K, 0, TILE_M, V);
    if (p->stairs_down) {
        #pragma GCC unroll 8
        for (int m = 1; m < TILE_M; m++) { sparse_stair_(sum, &a, &b, p, p->stair, m, TILE_M, V); }
    }
    #pragma GCC unroll 8
    for (int m = 0; m < TILE_M; m++) {
        for (int v = 0; v < V; v++) { v_store(p->out + m * p->out_step + c + v * VLANES, sum[m][v]); }
    }
}

// TILE_M rows that go on, of whole vectors, and no index: row m begins m * stair terms after the first; K terms that
// all of them have; then, with stairs_down, row m ends m * stair terms after the first
static inline void sparse_stairs(const SparseProduct* p) {
    for (int left = p->C / VLANES, c = 0, V; left > 0; left -= V, c += V * VLANES) {
        V = (int)ceil_div(left, ceil_div(left, TILE_V));
        switch (V) {
            case 1: sparse_stairs_tile_(p, c, 1); break;
            case 2: sparse_stairs_tile_(p, c, 2); break;
            default: sparse_stairs_tile_(p, c, TILE_V);
        }
    }
}

// ---- from lanes to rows ----

// Rows of lanes first..first + n of a position become parts of rows: lane h goes to x + h * step. Up to VLANES - 1
// more floats are written behind them, and as many rows of lanes read
static inline void sparse_keep(float* x, size_t step, const float* lanes, const SparseStrip* strip,
                               const SparseSeen* seen, int first, int n) {
    for (int k = 0; k < n; k += VLANES) {
        for (int h = 0; h < strip->n_heads; h += VLANES) {
            vfloat columns[VLANES];
            v_load_columns(columns, lanes + (size_t)(first + k) * strip->stride + seen->lane + h, strip->stride);
            for (int i = 0; i < VLANES && h + i < strip->n_heads; i++) { v_store(x + (h + i) * step + k, columns[i]); }
        }
    }
}
#endif  // __CUDACC__
#endif  // LLMC_SPARSE_STRIPS_H
