/*
How a matrix is stored that does not learn: floats, bf16, or fp8 with scales. What the products of ops/ read.
    Stored, StoredMatrix       the type of elements; a matrix of them
    stored_halves              one of bf16
    stored_next                the same matrix of the next expert
    stored_value, stored_row   an element, a row, as floats: exactly, but for scales that are no powers of two
    stored_width               bytes of an element
    stored_scales, stored_row_scales   how many scales a matrix of fp8 has; those of a row
A matrix is (rows, columns), row-major. Of fp8 the data are bytes of e4m3, and scales (blocks of rows, blocks of
columns) multiply (fp8.h). A matrix of several parts that files have apart, as gate and up, has blocks for each of them:
in a part of 200 rows the second block has 72, and the next part begins with a block of its own.
*/
#ifndef LLMC_STORED_H
#define LLMC_STORED_H
#include "bf16.h"  // bf16_widen
#include "fp8.h"   // fp8_widen, fp8_blocks, FP8_BLOCK

// What a parameter is stored as while it is used: what the build stores (floatX), or always this. FP8: e4m3, and a
// scale for each block of 128 x 128; FP4: two in a byte, and a scale for each 32 of a row
typedef enum { STORED_BY_BUILD, STORED_F32, STORED_BF16, STORED_FP8, STORED_FP4 } Stored;

typedef struct {
    const void* data;     // floatX, or as `kind` says
    Stored kind;          // F32, BF16 or FP8
    int rows, columns;
    int part_rows;        // FP8: of a part; the parts are all the rows
    const float* scales;  // FP8, else NULL
} StoredMatrix;

static inline StoredMatrix stored_halves(const uint16_t* data, int rows, int columns) {
    const StoredMatrix m = {data, STORED_BF16, rows, columns, rows, NULL};
    return m;
}

// bytes of an element
static inline size_t stored_width(Stored kind) { return kind == STORED_FP8 ? 1 : kind == STORED_BF16 ? 2 : 4; }

// scales of a matrix, and where those of a row begin
static inline size_t stored_scales(int rows, int columns, int part_rows) {
    return (size_t)(rows / part_rows) * (size_t)fp8_blocks(part_rows) * (size_t)fp8_blocks(columns);
}
static inline const float* stored_row_scales(const StoredMatrix* m, int row) {
    const int block = row / m->part_rows * fp8_blocks(m->part_rows) + row % m->part_rows / FP8_BLOCK;
    return m->scales + (size_t)block * (size_t)fp8_blocks(m->columns);
}

static inline StoredMatrix stored_next(StoredMatrix m) {
    m.data = (const char*)m.data + stored_width(m.kind) * (size_t)m.rows * (size_t)m.columns;
    if (m.scales) { m.scales += stored_scales(m.rows, m.columns, m.part_rows); }
    return m;
}

static inline float stored_value(const StoredMatrix* m, int row, int column) {
    const size_t at = (size_t)row * (size_t)m->columns + (size_t)column;
    switch (m->kind) {
        case STORED_FP8:
            return fp8_widen(((const uint8_t*)m->data)[at]) * stored_row_scales(m, row)[column / FP8_BLOCK];
        case STORED_BF16: return bf16_widen(((const uint16_t*)m->data)[at]);
        default: return ((const float*)m->data)[at];
    }
}

static inline void stored_row(float* out, const StoredMatrix* m, int row) {
    for (int c = 0; c < m->columns; c++) { out[c] = stored_value(m, row, c); }
}
#endif  // LLMC_STORED_H
