/*
Which of its algorithms cuBLASLt shall take for a product. By itself it estimates, and its first answer is not always
its fastest; so dev/bench/gemm_algorithms.cu times CUBLAS_ANSWERS of them on a card and prints rows for the table below.
    cublas_row   the row of a card, a version of the library and a shape; NULL: there is none
Strict: a row holds for its card, that many multiprocessors, and that version, for another one may give another meaning
to the same numbers; and for exactly its shape, strides and epilogue. Where there is no row, gemm_cublas.h takes the
first answer, as it does where the library no longer offers the algorithm of the row, which the Device counts. So bits
are fixed by this file: a row that changes changes those of its products on its card.
Source: cuBLAS manual, "cublasLtMatmulAlgoConfigAttributes_t"
*/
#ifndef LLMC_GEMM_ALGORITHMS_H
#define LLMC_GEMM_ALGORITHMS_H
#ifdef __CUDACC__
#include <stdint.h>
#include <string.h>

enum { CUBLAS_ANSWERS = 16 };  // of the heuristic, where there is a row

// What the heuristic is asked about. All of one type: there is no padding, so shapes are compared by their bytes. type
// and out_type are of cudaDataType_t: 0 float, 14 bf16; epilogue is of cublasLtEpilogue_t: 1 none, 4 a bias, 164 a bias
// and GELU, whose input is kept, 192 GELU's slope
typedef struct {
    int64_t M, N, K, out_stride, a_stride, b_stride, a_turned, b_turned, type, out_type, epilogue;
} CublasShape;

// what distinguishes the answers: cublasLtMatmulAlgoConfigAttributes_t, in its order
typedef struct {
    int32_t id, tile, splits, reduction, swizzle, custom, stages, inner, cluster;
} CublasConfig;

typedef struct {
    const char* card;  // cudaDeviceProp.name; NULL: the end of the table
    int n_sms;
    int64_t version;   // cublasLtGetVersion
    CublasShape shape;
    CublasConfig config;
} CublasRow;

#define H200 "NVIDIA H200", 132, 130100

// GPT-2 124M, B 64, T 1024, on an H200, cuBLAS 13.1.0 (dev/setup.sh brings it), 2026-11-28: milliseconds, and those of
// the first answer, each the shortest of three rounds, and of four runs where the head's pieces do not matter
static const CublasRow CUBLAS_ROWS[] = {
    // attproj forward, dinp of attproj, fc with GELU, dinp of fcproj with GELU's slope
    {H200, {65536, 768, 768, 768, 768, 768, 0, 1, 14, 14, 4}, {66, 20, 1, 0, 0, 1, 35, 0, 3}},  // 0.111, 0.121
    {H200, {65536, 768, 768, 768, 768, 768, 0, 0, 14, 14, 1}, {66, 29, 1, 0, 0, 1, 35, 0, 3}},  // 0.108, 0.129
    {H200, {65536, 3072, 768, 3072, 768, 768, 0, 1, 14, 14, 164}, {66, 28, 1, 0, 0, 0, 35, 0, 3}},  // 0.497, 0.564
    {H200, {65536, 3072, 768, 3072, 768, 3072, 0, 0, 14, 14, 192}, {39, 20, 1, 0, 1, 0, 35, 0, 5}},  // 0.503, 0.563
    // logits by --head-rows
    {H200, {8192, 50304, 768, 50304, 768, 768, 0, 1, 14, 14, 1}, {66, 201, 1, 0, 0, 2, 35, 0, 5}},  // 0.725, 0.822
    {H200, {16384, 50304, 768, 50304, 768, 768, 0, 1, 14, 14, 1}, {66, 201, 1, 0, 0, 2, 35, 0, 5}},  // 1.40, 1.62
    {H200, {32768, 50304, 768, 50304, 768, 768, 0, 1, 14, 14, 1}, {66, 201, 1, 0, 0, 2, 35, 0, 5}},  // 2.81, 3.22
    {H200, {65536, 50304, 768, 50304, 768, 768, 0, 1, 14, 14, 1}, {66, 201, 1, 0, 0, 2, 35, 0, 5}},  // 5.64, 6.64
    // dW of the logits
    {H200, {50304, 768, 32768, 768, 50304, 768, 1, 0, 14, 0, 1}, {66, 20, 1, 0, 0, 3, 35, 0, 5}},  // 2.88, 2.97
    {H200, {50304, 768, 65536, 768, 50304, 768, 1, 0, 14, 0, 1}, {66, 495, 1, 0, 0, 7, 35, 0, 5}},  // 5.81, 6.13
    {NULL, 0, 0, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0, 0}},
};
#undef H200

static inline const CublasRow* cublas_row(const CublasRow* rows, const char* card, int n_sms, int64_t version,
                                          const CublasShape* shape) {
    for (const CublasRow* row = rows; row->card; row++) {
        if (strcmp(row->card, card) == 0 && row->n_sms == n_sms && row->version == version &&
            memcmp(&row->shape, shape, sizeof *shape) == 0) { return row; }
    }
    return NULL;
}
#endif  // __CUDACC__
#endif  // LLMC_GEMM_ALGORITHMS_H
