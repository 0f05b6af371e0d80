/*
The part of cuBLASLt that every CUDA program here has: a handle.
*/
#ifndef SIMT_CUBLASLT_H
#define SIMT_CUBLASLT_H
#include "cuda_runtime.h"
#define CUBLAS_VERSION 130000

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;
typedef struct SimtBlas* cublasLtHandle_t;
struct SimtBlas { int unused; };
static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { *handle = new SimtBlas(); return CUBLAS_STATUS_SUCCESS; }
static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { delete handle; return CUBLAS_STATUS_SUCCESS; }
#endif  // SIMT_CUBLASLT_H
