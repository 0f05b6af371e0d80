/*
Matrices that do not learn and are stored in fewer bytes (core/stored.h) as a product on a GPU reads them: X, which is
float or bf16. They stay in memory as they are; one at a time, or a few experts, is widened into a room that the next
one takes.
    widen_matrix    (rows, columns) of X; a matrix of X already is itself
    widen_experts   n of E matrices from number `first` on; where offsets (grouped_matmul.h) says that an expert has no
                    rows, nothing is written for it
    widen_rows      out (N, columns) = the rows that tokens say, as an embedding has them; below 0: none
    widen_at_once   how many experts of E are widened together: what fits into WIDEN_ROOM, at least one
    widen_bytes     what the room takes of memory
A matrix of kind STORED_F32, or as the build stores them, is one of X.
Bits:   X float: stored_value of each element, so a product has the bits of the C code, whose chains are the same. X
        bf16: that, rounded once: exact but for scales of fp8 that are no powers of two, which cost half a last place,
        2^-9 of a weight.
Cost:   memory bound: an element of fp8 moves 1 byte in and sizeof(X) out, of fp4 half a byte in; the product then
        reads sizeof(X) again. Beside a product of N rows, 2 N flops an element, that is little from a few hundred rows
        on. Forward of at most 16 rows of bf16 reads the codes themselves (few_rows.h), as do products of experts of fp8
        on Hopper (grouped_hopper.h), and nothing is widened. Judge it in GB/s. By ptxas of CUDA 13.0 for sm_90, at most
        32 registers of a thread, without spills. Not measured on a GPU yet.
Source: as stored.h
*/
#ifndef LLMC_WIDEN_H
#define LLMC_WIDEN_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // Pack, pack_load, store_floats, bf16
#include "../core/stored.h"  // StoredMatrix, stored_row_scales, fp8_widen, fp4_widen

enum { WIDEN_THREADS = 128, WIDEN_PACK = 8 };  // elements that a thread takes at once
#ifndef WIDEN_ROOM
#define WIDEN_ROOM ((size_t)256 << 20)  // bytes of experts; five in bf16 of 4096 x 6144
#endif

// W elements from column c on of a row that begins with element `at` of the data; scales: of the row
template <int W>
__device__ inline Pack<float, W> widen_load(const StoredMatrix& m, const void* scales, size_t at, int c) {
    Pack<float, W> x;
    if (m.kind == STORED_BF16) { return load_floats<W>((const bf16*)m.data + at + c); }
    if (m.kind == STORED_FP4) {
        const float scale = e8m0_widen(((const uint8_t*)scales)[c / FP4_GROUP]);
        const uint8_t* row = (const uint8_t*)m.data + at / 2;
        for (int i = 0; i < W; i++) { x.x[i] = fp4_widen(fp4_code(row, c + i)) * scale; }
        return x;
    }
    const float scale = ((const float*)scales)[c / m.block_columns];
    const Pack<uint8_t, W> codes = pack_load<W>((const uint8_t*)m.data + at + c);
    for (int i = 0; i < W; i++) { x.x[i] = fp8_widen(codes.x[i]) * scale; }
    return x;
}

// a row of it or of a matrix behind it, by n_threads of which this is number `thread`
template <int W, typename X>
__device__ inline void widen_row_(X* out, const StoredMatrix& first, int row, int thread, int n_threads) {
    const size_t at = (size_t)row * first.columns;
    const void* scales = NULL;
    if (first.kind == STORED_FP8) { scales = stored_row_scales(&first, row); }
    if (first.kind == STORED_FP4) { scales = stored_row_exponents(&first, row); }
    for (int c = thread * W; c < first.columns; c += n_threads * W) {
        store_floats(out + c, widen_load<W>(first, scales, at, c));
    }
}

// block is (WIDEN_THREADS), grid (rows, matrices)
template <int W, typename X>
__global__ void widen_kernel(X* out, StoredMatrix first, int first_expert, const int* offsets) {
    const int row = blockIdx.x, e = first_expert + blockIdx.y;
    if (offsets && offsets[e] == offsets[e + 1]) { return; }  // nobody reads it
    widen_row_<W>(out + ((size_t)blockIdx.y * first.rows + row) * first.columns, first, e * first.rows + row,
                  threadIdx.x, WIDEN_THREADS);
}

// one warp a token; blocks are (32, WIDEN_THREADS / 32)
template <int W, typename X>
__global__ void widen_rows_kernel(X* out, const int* tokens, StoredMatrix m, int N) {
    const int n = blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= N || tokens[n] < 0) { return; }
    widen_row_<W>(out + (size_t)n * m.columns, m, tokens[n], threadIdx.x, WARP);
}

template <typename X>
static inline int widen_is_wide(const StoredMatrix* m) {
    const int is_of_build = m->kind == STORED_F32 || m->kind == STORED_BY_BUILD;
    return is_of_build || (m->kind == STORED_BF16 && sizeof(X) == sizeof(bf16));
}

// do WIDEN_PACK elements lie in one row, under one scale, and where a load may begin?
template <typename X>
static inline int widen_in_packs(const X* out, const StoredMatrix* m) {
    const int whole_blocks = m->kind != STORED_FP8 || m->block_columns % WIDEN_PACK == 0;
    return m->columns % WIDEN_PACK == 0 && whole_blocks && pack_aligned(out, (const char*)m->data);
}

template <typename X>
static inline int widen_at_once(const StoredMatrix* m, int E) {
    const size_t most = WIDEN_ROOM / (sizeof(X) * (size_t)m->rows * (size_t)m->columns);
    return widen_is_wide<X>(m) || most >= (size_t)E ? E : most < 1 ? 1 : (int)most;
}

// of E experts; of a matrix that is none's E is 1
template <typename X>
static inline size_t widen_bytes(const StoredMatrix* m, int E) {
    if (widen_is_wide<X>(m)) { return 0; }
    return sizeof(X) * (size_t)m->rows * (size_t)m->columns * (size_t)widen_at_once<X>(m, E);
}

// offsets (E + 1) of all experts, or NULL
template <typename X>
static inline const X* widen_experts(const StoredMatrix* m, int first, int n, const int* offsets,
                                     const Device* dev) {
    const size_t each = (size_t)m->rows * (size_t)m->columns;
    if (widen_is_wide<X>(m)) { return (const X*)m->data + (size_t)first * each; }
    X* out = (X*)device_widened(dev, sizeof(X) * (size_t)n * each);
    const dim3 grid((unsigned)m->rows, (unsigned)n);
    if (widen_in_packs(out, m)) {
        widen_kernel<WIDEN_PACK><<<grid, WIDEN_THREADS, 0, dev->stream>>>(out, *m, first, offsets);
    } else {
        widen_kernel<1><<<grid, WIDEN_THREADS, 0, dev->stream>>>(out, *m, first, offsets);
    }
    cudaCheck(cudaGetLastError());
    return out;
}

template <typename X>
static inline const X* widen_matrix(const StoredMatrix* m, const Device* dev) {
    return widen_experts<X>(m, 0, 1, NULL, dev);
}

template <typename X>
static inline void widen_rows(X* out, const int* tokens, const StoredMatrix* m, int N, const Device* dev) {
    const dim3 block(WARP, WIDEN_THREADS / WARP);
    const unsigned grid = (unsigned)ceil_div(N, WIDEN_THREADS / WARP);
    if (widen_in_packs(out, m)) {
        widen_rows_kernel<WIDEN_PACK><<<grid, block, 0, dev->stream>>>(out, tokens, *m, N);
    } else {
        widen_rows_kernel<1><<<grid, block, 0, dev->stream>>>(out, tokens, *m, N);
    }
    cudaCheck(cudaGetLastError());
}
#endif  // __CUDACC__
#endif  // LLMC_WIDEN_H
