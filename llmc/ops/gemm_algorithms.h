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

// what the heuristic is asked about. All of one type: there is no padding, so shapes are compared by their bytes
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

// no card has been measured yet
static const CublasRow CUBLAS_ROWS[] = {
    {NULL, 0, 0, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0, 0}},
};

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
