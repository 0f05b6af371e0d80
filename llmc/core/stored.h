/*
How a matrix is stored that does not learn: floats, bf16, or fp8 or fp4 with scales. What the products of ops/ read.
    Stored, StoredMatrix       the type of elements; a matrix of them
    stored_matrix              one with whole blocks
    stored_next                the same matrix of the next expert
    stored_value, stored_row   an element, a row, as floats: exactly, but for scales that are no powers of two
    stored_bytes               of so many elements; stored_size: of a matrix with its scales
    stored_scales, stored_row_scales   how many scales a matrix of fp8 has; those of a row
    stored_exponents, stored_row_exponents   the same of fp4
    stored_blocks              blocks that so many rows or columns have
    stored_cut                 the largest block that divides another and a length
A matrix is (rows, columns), row-major. Of fp8 the data are bytes of e4m3, and scales (blocks of rows, blocks of
columns) multiply (fp8.h). A matrix of several parts that files have apart, as gate and up, has blocks for each of them:
in a part of 200 rows the second block has 72, and the next part begins with a block of its own. Of a matrix that ranks
share (--tp) each has smaller blocks where its rows or columns cut those of the whole: of half of 200 rows they have 4,
and 25 of them the scale of one. Of fp4 the data are (rows, columns / 2), two e2m1 in a byte, and the scales bytes of
e8m0 (rows, columns / 32) (fp4.h): columns are a multiple of 32.
*/
#ifndef LLMC_STORED_H
#define LLMC_STORED_H
#include "bf16.h"  // bf16_widen
#include "fp4.h"   // fp4_widen, e8m0_widen, FP4_GROUP
#include "fp8.h"   // fp8_widen, FP8_BLOCK, FP8_FUNCTION
#include <assert.h>

// What a parameter is stored as while it is used: what the build stores (floatX), or always this. FP8: e4m3, and a
// scale for each block of 128 x 128; FP4: two in a byte, and a scale for each 32 of a row
typedef enum { STORED_BY_BUILD, STORED_F32, STORED_BF16, STORED_FP8, STORED_FP4 } Stored;

typedef struct {
    const void* data;    // as `kind` says; in a CUDA build F32 are what the product reads, float or bf16
    Stored kind;         // F32, BF16, FP8 or FP4
    int rows, columns;
    int part_rows;       // FP8: of a part; the parts are all the rows
    const void* scales;  // FP8: floats; FP4: bytes of e8m0; else NULL
    int block_rows, block_columns;  // FP8: that share a scale, FP8_BLOCK or what divides it
} StoredMatrix;

static inline StoredMatrix stored_matrix(const void* data, Stored kind, int rows, int columns, int part_rows,
                                         const void* scales) {
    const StoredMatrix m = {data, kind, rows, columns, part_rows, scales, FP8_BLOCK, FP8_BLOCK};
    return m;
}

// bytes of n elements
static inline size_t stored_bytes(Stored kind, size_t n) {
    assert(kind != STORED_FP4 || n % 2 == 0);
    return kind == STORED_FP4 ? n / 2 : kind == STORED_FP8 ? n : kind == STORED_BF16 ? 2 * n : 4 * n;
}

FP8_FUNCTION int stored_blocks(int n, int block) { return (n + block - 1) / block; }

// a power of two, as `block` is
static inline int stored_cut(int block, int n) {
    while (n % block != 0) { block /= 2; }
    return block;
}

// scales of a matrix, and where those of a row begin
FP8_FUNCTION size_t stored_scales(const StoredMatrix* m) {
    return (size_t)(m->rows / m->part_rows) * (size_t)stored_blocks(m->part_rows, m->block_rows) *
           (size_t)stored_blocks(m->columns, m->block_columns);
}
FP8_FUNCTION const float* stored_row_scales(const StoredMatrix* m, int row) {
    const int part = row / m->part_rows, block = row % m->part_rows / m->block_rows;
    return (const float*)m->scales + (size_t)(part * stored_blocks(m->part_rows, m->block_rows) + block) *
                                         (size_t)stored_blocks(m->columns, m->block_columns);
}

FP8_FUNCTION size_t stored_exponents(int rows, int columns) { return (size_t)rows * (size_t)(columns / FP4_GROUP); }
FP8_FUNCTION const uint8_t* stored_row_exponents(const StoredMatrix* m, int row) {
    return (const uint8_t*)m->scales + stored_exponents(row, m->columns);
}

// build_bytes: of an element that is stored as the build says
static inline size_t stored_size(const StoredMatrix* m, size_t build_bytes) {
    const size_t n = (size_t)m->rows * (size_t)m->columns;
    switch (m->kind) {
        case STORED_BY_BUILD: return build_bytes * n;
        case STORED_FP4: return (size_t)m->rows * (size_t)((m->columns + 1) / 2 + stored_blocks(m->columns, FP4_GROUP));
        case STORED_FP8: return n + sizeof(float) * stored_scales(m);
        default: return stored_bytes(m->kind, n);
    }
}

static inline StoredMatrix stored_next(StoredMatrix m) {
    const size_t n_scales = m.kind == STORED_FP4 ? stored_exponents(m.rows, m.columns)
                                                 : sizeof(float) * stored_scales(&m);
    m.data = (const char*)m.data + stored_bytes(m.kind, (size_t)m.rows * (size_t)m.columns);
    if (m.scales) { m.scales = (const char*)m.scales + n_scales; }
    return m;
}

static inline float stored_value(const StoredMatrix* m, int row, int column) {
    const size_t at = (size_t)row * (size_t)m->columns + (size_t)column;
    switch (m->kind) {
        case STORED_FP4:
            return fp4_widen(fp4_code((const uint8_t*)m->data + at / 2, (int)(at % 2))) *
                   e8m0_widen(stored_row_exponents(m, row)[column / FP4_GROUP]);
        case STORED_FP8:
            return fp8_widen(((const uint8_t*)m->data)[at]) * stored_row_scales(m, row)[column / m->block_columns];
        case STORED_BF16: return bf16_widen(((const uint16_t*)m->data)[at]);
        default: return ((const float*)m->data)[at];
    }
}

static inline void stored_row(float* out, const StoredMatrix* m, int row) {
    for (int c = 0; c < m->columns; c++) { out[c] = stored_value(m, row, c); }
}
#endif  // LLMC_STORED_H
