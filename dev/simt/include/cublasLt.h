/*
A stand-in for cuBLASLt: the calls of llmc/ops/gemm_cublas.h. D = epilogue(alpha * op(A) * op(B) + beta * C), matrices by columns.
Every sum is a plain chain over k ascending in float, which is none of the orders of the real library: tests must allow for
that.
It refuses what the real one refuses, and it ends the program, with the reason, where the real one may return a bare
CUBLAS_STATUS_INVALID_VALUE or read what it should not:
    descriptors that were not initialised, attributes of another size, shapes that do not fit together
    an algorithm that was chosen for another problem; a pointer less aligned than the preference said
    memory that is not the device's, or too short; less workspace than the algorithm wants, and it does overwrite it
    an epilogue without its bias or its auxiliary matrix, whose leading dimension must be a multiple of 8
Types that it does not multiply are CUBLAS_STATUS_NOT_SUPPORTED, as in the real one.
Factors of e4m3 have scales, and that alone which an H200 was found to take (doc/gpu/fp8.md): A in blocks of 128 x 128, B in groups of
1 x 128, A turned and B not. Their sums lose what an H200 cuts off: of 32 products and the sum so far what lies below 2^-13 of the largest.
*/
#ifndef SIMT_CUBLASLT_H
#define SIMT_CUBLASLT_H
#include "cuda_bf16.h"
#include "cuda_fp8.h"
#include "cuda_runtime.h"
#include <math.h>
#include <vector>
#define CUBLAS_VERSION 130000
#define CUBLAS_WORKSPACE ((size_t)64 << 10)  // of gemm_cublas.h: the race check compares all memory at every launch

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;
typedef enum { CUDA_R_32F = 0, CUDA_R_16BF = 14, CUDA_R_8F_E4M3 = 28 } cudaDataType_t;
typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 } cublasOperation_t;
typedef enum { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 } cublasComputeType_t;
typedef enum {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_GELU_AUX = 32 | 128,
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 32 | 128 | 4,
    CUBLASLT_EPILOGUE_DGELU = 64 | 128
} cublasLtEpilogue_t;
typedef enum {
    CUBLASLT_REDUCTION_SCHEME_NONE = 0,
    CUBLASLT_REDUCTION_SCHEME_INPLACE = 1,
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2,
    CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE = 4,
    CUBLASLT_REDUCTION_SCHEME_MASK = 7
} cublasLtReductionScheme_t;

typedef enum {
    CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F = 0,
    CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F = 4,
    CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F = 5
} cublasLtMatmulMatrixScale_t;

typedef struct SimtBlas* cublasLtHandle_t;
struct SimtBlas { int unused; };
static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = new SimtBlas();
    return CUBLAS_STATUS_SUCCESS;
}
static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

// ---- descriptors, with the defaults of the manual; `valid` says that somebody initialised it ----

enum { SIMT_BLAS_VALID = 0x600db1a5 };

typedef struct {
    int valid;
    int32_t type;
    uint64_t rows, columns;
    int64_t ld;
} cublasLtMatrixLayoutOpaque_t;
typedef cublasLtMatrixLayoutOpaque_t* cublasLtMatrixLayout_t;

typedef struct {
    int valid;
    int32_t compute, scale, turn_a, turn_b;
    uint32_t epilogue;
    const void* bias;
    void* aux;  // of DGELU it is read
    int64_t aux_ld;
    int32_t scale_mode_a, scale_mode_b;
    const float *scales_a, *scales_b;
} cublasLtMatmulDescOpaque_t;
typedef cublasLtMatmulDescOpaque_t* cublasLtMatmulDesc_t;

typedef struct {
    int valid;
    uint64_t workspace;
    uint32_t reductions, alignment[4];  // of A, B, C, D
} cublasLtMatmulPreferenceOpaque_t;
typedef cublasLtMatmulPreferenceOpaque_t* cublasLtMatmulPreference_t;

// what was asked for, so that a call with anything else is seen; number: of the answer, all of which compute the same
typedef struct {
    int valid, number;
    cublasLtMatmulDescOpaque_t product;  // pointers aside
    cublasLtMatrixLayoutOpaque_t a, b, c, d;
    uint32_t alignment[4];
    size_t workspace;
} cublasLtMatmulAlgo_t;

typedef struct {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
} cublasLtMatmulHeuristicResult_t;

static inline cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t m, cudaDataType_t type, uint64_t rows,
                                                      uint64_t columns, int64_t ld) {
    memset(m, 0, sizeof *m);  // padding too: layouts are compared by their bytes
    m->valid = SIMT_BLAS_VALID, m->type = type, m->rows = rows, m->columns = columns, m->ld = ld;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t p, cublasComputeType_t compute, cudaDataType_t scale) {
    memset(p, 0, sizeof *p);
    p->valid = SIMT_BLAS_VALID, p->compute = compute, p->scale = scale, p->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t p) {
    memset(p, 0, sizeof *p);
    p->valid = SIMT_BLAS_VALID, p->reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
    for (uint32_t& bytes : p->alignment) { bytes = 256; }
    return CUBLAS_STATUS_SUCCESS;
}

template <typename Value>
static inline cublasStatus_t simt_blas_set_(const char* call, int attribute, Value* to, const void* from, size_t n_bytes) {
    if (!from || n_bytes != sizeof *to) {
        simt_fail("%s: attribute %d has %zu bytes, found %zu", call, attribute, sizeof *to, n_bytes);
    }
    memcpy(to, from, n_bytes);
    return CUBLAS_STATUS_SUCCESS;
}

typedef enum {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12,
    CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,
    CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18,
    CUBLASLT_MATMUL_DESC_A_SCALE_MODE = 31,
    CUBLASLT_MATMUL_DESC_B_SCALE_MODE = 32
} cublasLtMatmulDescAttributes_t;

static inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t p, cublasLtMatmulDescAttributes_t attribute,
                                                            const void* value, size_t n_bytes) {
    const char* call = "cublasLtMatmulDescSetAttribute";
    if (p->valid != SIMT_BLAS_VALID) { simt_fail("%s: the descriptor was not initialised", call); }
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return simt_blas_set_(call, attribute, &p->turn_a, value, n_bytes);
        case CUBLASLT_MATMUL_DESC_TRANSB: return simt_blas_set_(call, attribute, &p->turn_b, value, n_bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return simt_blas_set_(call, attribute, &p->epilogue, value, n_bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return simt_blas_set_(call, attribute, &p->bias, value, n_bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return simt_blas_set_(call, attribute, &p->aux, value, n_bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return simt_blas_set_(call, attribute, &p->aux_ld, value, n_bytes);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return simt_blas_set_(call, attribute, &p->scales_a, value, n_bytes);
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return simt_blas_set_(call, attribute, &p->scales_b, value, n_bytes);
        case CUBLASLT_MATMUL_DESC_A_SCALE_MODE: return simt_blas_set_(call, attribute, &p->scale_mode_a, value, n_bytes);
        case CUBLASLT_MATMUL_DESC_B_SCALE_MODE: return simt_blas_set_(call, attribute, &p->scale_mode_b, value, n_bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

typedef enum {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
} cublasLtMatmulPreferenceAttributes_t;

static inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                                  cublasLtMatmulPreferenceAttributes_t attribute,
                                                                  const void* value, size_t n_bytes) {
    const char* call = "cublasLtMatmulPreferenceSetAttribute";
    if (p->valid != SIMT_BLAS_VALID) { simt_fail("%s: the preference was not initialised", call); }
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return simt_blas_set_(call, attribute, &p->workspace, value, n_bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return simt_blas_set_(call, attribute, &p->reductions, value, n_bytes);
        default: break;
    }
    int i = attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
    return simt_blas_set_(call, attribute, &p->alignment[i], value, n_bytes);
}

// ---- what fits together ----

static inline size_t simt_blas_bytes_(int32_t type) {
    return type == CUDA_R_32F ? sizeof(float) : type == CUDA_R_16BF ? sizeof(__nv_bfloat16) : 1;
}

typedef long long unsigned SimtCount;  // for %llu

static inline void simt_blas_check_layout_(const char* call, const char* name, cublasLtMatrixLayout_t m, uint64_t rows,
                                           uint64_t columns) {
    if (m->valid != SIMT_BLAS_VALID) { simt_fail("%s: the layout of %s was not initialised", call, name); }
    if (m->rows != rows || m->columns != columns) {
        simt_fail("%s: %s is %llu x %llu, expected %llu x %llu", call, name, (SimtCount)m->rows, (SimtCount)m->columns,
                  (SimtCount)rows, (SimtCount)columns);
    }
    if (m->ld < (int64_t)m->rows) {
        simt_fail("%s: %s has leading dimension %lld, below its %llu rows", call, name, (long long)m->ld, (SimtCount)rows);
    }
}

static inline int simt_blas_with_bias_(const cublasLtMatmulDescOpaque_t* p) {
    return p->epilogue == CUBLASLT_EPILOGUE_BIAS || p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

static inline int simt_blas_with_slope_(const cublasLtMatmulDescOpaque_t* p) { return p->epilogue == CUBLASLT_EPILOGUE_DGELU; }

static inline int simt_blas_with_aux_(const cublasLtMatmulDescOpaque_t* p) {
    return p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX || p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           simt_blas_with_slope_(p);
}

static inline void simt_blas_check_shapes_(const char* call, cublasLtHandle_t handle, cublasLtMatmulDesc_t p,
                                           cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                           cublasLtMatrixLayout_t d) {
    if (!handle) { simt_fail("%s: no handle", call); }
    if (p->valid != SIMT_BLAS_VALID) { simt_fail("%s: the descriptor was not initialised", call); }
    uint64_t m = d->rows, n = d->columns, k = p->turn_a == CUBLAS_OP_T ? a->rows : a->columns;
    simt_blas_check_layout_(call, "A", a, p->turn_a == CUBLAS_OP_T ? k : m, p->turn_a == CUBLAS_OP_T ? m : k);
    simt_blas_check_layout_(call, "B", b, p->turn_b == CUBLAS_OP_T ? n : k, p->turn_b == CUBLAS_OP_T ? k : n);
    simt_blas_check_layout_(call, "C", c, m, n);
    simt_blas_check_layout_(call, "D", d, m, n);
    if (m == 0 || n == 0 || k == 0) {
        simt_fail("%s: a product of %llu x %llu x %llu", call, (SimtCount)m, (SimtCount)n, (SimtCount)k);
    }
    int with_bias = simt_blas_with_bias_(p), with_aux = simt_blas_with_aux_(p);
    if (!with_bias && !with_aux && p->epilogue != CUBLASLT_EPILOGUE_DEFAULT) {
        simt_fail("%s: epilogue %u is not in this stand-in", call, p->epilogue);
    }
    if (with_bias && !p->bias) { simt_fail("%s: an epilogue with bias and no bias pointer", call); }
    if (with_aux && (!p->aux || p->aux_ld % 8 != 0 || p->aux_ld < (int64_t)m)) {
        simt_fail("%s: expected an auxiliary matrix whose leading dimension is a multiple of 8, at least %llu, found %p and %lld",
                  call, (SimtCount)m, p->aux, (long long)p->aux_ld);
    }
}

// factors of e4m3: D (m, n)
static inline int simt_blas_supports_fp8_(const cublasLtMatmulDescOpaque_t* p, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                          cublasLtMatrixLayout_t d) {
    const int with_modes = p->scale_mode_a == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F &&
                           p->scale_mode_b == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    const int is_packed = a->ld % 16 == 0 && b->ld % 16 == 0 && a->rows % 16 == 0 && d->rows * simt_blas_bytes_(d->type) % 16 == 0;
    return with_modes && is_packed && p->compute == CUBLAS_COMPUTE_32F && p->turn_a == CUBLAS_OP_T && p->turn_b == CUBLAS_OP_N &&
           d->columns % 4 == 0 && (d->type == CUDA_R_32F || d->type == CUDA_R_16BF) && !simt_blas_with_aux_(p);
}

// the part of the manual's table of types that is computed here
static inline int simt_blas_supported_(const cublasLtMatmulDescOpaque_t* p, int32_t a, int32_t b, int32_t c, int32_t d) {
    if (p->scale != CUDA_R_32F || a != b || c != d) { return 0; }
    if (p->compute == CUBLAS_COMPUTE_32F_FAST_TF32) { return a == CUDA_R_32F && d == CUDA_R_32F; }
    return p->compute == CUBLAS_COMPUTE_32F && (d == CUDA_R_32F || a == CUDA_R_16BF);
}

static inline cublasLtMatmulAlgo_t simt_blas_problem_(cublasLtMatmulDesc_t p, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                      cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
    cublasLtMatmulAlgo_t problem;
    memset((void*)&problem, 0, sizeof problem);
    problem.valid = SIMT_BLAS_VALID;
    memcpy((void*)&problem.product, p, sizeof *p);
    memcpy((void*)&problem.a, a, sizeof *a), memcpy((void*)&problem.b, b, sizeof *b);
    memcpy((void*)&problem.c, c, sizeof *c), memcpy((void*)&problem.d, d, sizeof *d);
    problem.product.bias = NULL, problem.product.aux = NULL;
    problem.product.scales_a = problem.product.scales_b = NULL;
    return problem;
}

static int simt_blas_n_asked;       // calls of the heuristic, for tests
enum { SIMT_BLAS_ANSWERS = 3 };     // of which it has so many

static inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t p,
                                                            cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                            cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                            cublasLtMatmulPreference_t preference, int n_asked,
                                                            cublasLtMatmulHeuristicResult_t* results, int* n_found) {
    const char* call = "cublasLtMatmulAlgoGetHeuristic";
    *n_found = 0;
    simt_blas_n_asked++;
    simt_blas_check_shapes_(call, handle, p, a, b, c, d);
    if (preference->valid != SIMT_BLAS_VALID) { simt_fail("%s: the preference was not initialised", call); }
    const int of_result = CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
    if (d->type != CUDA_R_32F && preference->reductions & of_result) {
        simt_fail("%s: parts of a split sum may be rounded to the type of the result", call);
    }
    if (n_asked < 1) { simt_fail("%s: %d results asked for", call, n_asked); }
    const int is_fp8 = a->type == CUDA_R_8F_E4M3 && b->type == CUDA_R_8F_E4M3 && c->type == d->type;
    const int is_supported = is_fp8 ? simt_blas_supports_fp8_(p, a, b, d) : simt_blas_supported_(p, a->type, b->type, c->type, d->type);
    if (!is_supported) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    for (*n_found = 0; *n_found < n_asked && *n_found < SIMT_BLAS_ANSWERS; ++*n_found) {
        cublasLtMatmulHeuristicResult_t* result = &results[*n_found];
        memset((void*)result, 0, sizeof *result);
        result->algo = simt_blas_problem_(p, a, b, c, d);
        result->algo.number = *n_found;
        memcpy(result->algo.alignment, preference->alignment, sizeof preference->alignment);
        result->algo.workspace = result->workspaceSize = preference->workspace;
        result->state = CUBLAS_STATUS_SUCCESS;
        result->wavesCount = 1.0f;
    }
    return CUBLAS_STATUS_SUCCESS;
}

// ---- what an algorithm is ----

typedef enum {
    CUBLASLT_ALGO_CONFIG_ID = 0,
    CUBLASLT_ALGO_CONFIG_TILE_ID = 1,
    CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 2,
    CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME = 3,
    CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING = 4,
    CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION = 5,
    CUBLASLT_ALGO_CONFIG_STAGES_ID = 6,
    CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID = 7,
    CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID = 8
} cublasLtMatmulAlgoConfigAttributes_t;

static inline size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

// the number of the answer is its tile; all else is 0, but for one split
static inline cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                                  cublasLtMatmulAlgoConfigAttributes_t attribute, void* value,
                                                                  size_t n_bytes, size_t* n_written) {
    const int is_short = attribute == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID || attribute == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID;
    *n_written = is_short ? sizeof(uint16_t) : sizeof(uint32_t);
    if (algo->valid != SIMT_BLAS_VALID || n_bytes != *n_written) {
        simt_fail("cublasLtMatmulAlgoConfigGetAttribute: attribute %d of %s algorithm has %zu bytes, found %zu", (int)attribute,
                  algo->valid == SIMT_BLAS_VALID ? "an" : "no", *n_written, n_bytes);
    }
    const uint32_t found = attribute == CUBLASLT_ALGO_CONFIG_TILE_ID ? (uint32_t)algo->number : attribute == CUBLASLT_ALGO_CONFIG_SPLITK_NUM;
    memcpy(value, &found, n_bytes);
    return CUBLAS_STATUS_SUCCESS;
}

// ---- the product ----

static inline float simt_blas_load_(const void* p, int32_t type, size_t i) {
    if (type == CUDA_R_8F_E4M3) { return simt_fp8_float_(((const unsigned char*)p)[i], __NV_E4M3); }
    return type == CUDA_R_32F ? ((const float*)p)[i] : (float)((const __nv_bfloat16*)p)[i];
}

static inline void simt_blas_store_(void* p, int32_t type, size_t i, float x) {
    if (type == CUDA_R_32F) { ((float*)p)[i] = x; } else { ((__nv_bfloat16*)p)[i] = __nv_bfloat16(x); }
}

static inline float simt_blas_gelu_(float x) {
    double v = x;
    return (float)(0.5 * v * (1.0 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))));
}

static inline float simt_blas_gelu_slope_(float x) {
    double v = x, k = 0.7978845608028654, th = tanh(k * (v + 0.044715 * v * v * v));
    return (float)(0.5 * (1.0 + th) + 0.5 * v * (1.0 - th * th) * k * (1.0 + 3.0 * 0.044715 * v * v));
}

// op(M) as floats, element (i, k) at [k * n + i]: rows of neighbours in i for A, turned for B
static inline std::vector<float> simt_blas_unpack_(const void* data, cublasLtMatrixLayout_t m, int k_is_column, size_t n,
                                                   size_t K, int tf32) {
    std::vector<float> x(n * K);
    for (size_t k = 0; k < K; k++) {
        for (size_t i = 0; i < n; i++) {
            float v = simt_blas_load_(data, m->type, k_is_column ? i + k * (size_t)m->ld : k + i * (size_t)m->ld);
            if (tf32) { v = __uint_as_float((__float_as_uint(v) + 0x1000u) & ~0x1fffu); }  // 10 bits of fraction
            x[k * n + i] = v;
        }
    }
    return x;
}

// the matrix's memory: the device's, long enough, and as aligned as was promised
static inline void simt_blas_check_memory_(const char* name, const void* data, cublasLtMatrixLayout_t m, uint32_t alignment) {
    size_t n_bytes = ((size_t)m->ld * (m->columns - 1) + m->rows) * simt_blas_bytes_(m->type);
    simt_check_range("cublasLtMatmul", name, data, n_bytes, 1);
    if ((uintptr_t)data % alignment != 0) {
        simt_fail("cublasLtMatmul: %s %p is no multiple of %u bytes, as the preference said", name, data, alignment);
    }
}

static inline void simt_blas_check_call_(cublasLtMatmulDesc_t p, const void* a, cublasLtMatrixLayout_t a_layout,
                                         const void* b, cublasLtMatrixLayout_t b_layout, const void* c,
                                         cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                                         const cublasLtMatmulAlgo_t* algo, void* workspace, size_t n_bytes) {
    cublasLtMatmulAlgo_t asked = simt_blas_problem_(p, a_layout, b_layout, c_layout, d_layout);
    memcpy(asked.alignment, algo->alignment, sizeof asked.alignment);
    asked.workspace = algo->workspace, asked.number = algo->number;
    if (memcmp(&asked, algo, sizeof asked) != 0) { simt_fail("cublasLtMatmul: the algorithm was chosen for another product"); }
    simt_blas_check_memory_("A", a, a_layout, algo->alignment[0]);
    simt_blas_check_memory_("B", b, b_layout, algo->alignment[1]);
    simt_blas_check_memory_("C", c, c_layout, algo->alignment[2]);
    simt_blas_check_memory_("D", d, d_layout, algo->alignment[3]);
    if (simt_blas_with_bias_(p)) {
        simt_check_range("cublasLtMatmul", "bias", p->bias, d_layout->rows * simt_blas_bytes_(d_layout->type), 1);
        if ((uintptr_t)p->bias % 16 != 0) { simt_fail("cublasLtMatmul: bias %p is no multiple of 16 bytes", p->bias); }
    }
    if (a_layout->type == CUDA_R_8F_E4M3) {
        const size_t blocks = (a_layout->rows + 127) / 128, whole = (blocks + 3) / 4 * 4;
        const size_t n_a = whole * ((d_layout->rows + 127) / 128), n_b = blocks * d_layout->columns;
        simt_check_range("cublasLtMatmul", "scales of A", p->scales_a, sizeof(float) * n_a, 1);
        simt_check_range("cublasLtMatmul", "scales of B", p->scales_b, sizeof(float) * n_b, 1);
        if ((uintptr_t)p->scales_a % 16 != 0 || (uintptr_t)p->scales_b % 16 != 0) {
            simt_fail("cublasLtMatmul: scales %p and %p are no multiples of 16 bytes", (const void*)p->scales_a, (const void*)p->scales_b);
        }
    }
    if (simt_blas_with_aux_(p)) {
        cublasLtMatrixLayoutOpaque_t aux = *d_layout;
        aux.ld = p->aux_ld;
        simt_blas_check_memory_("the auxiliary matrix", p->aux, &aux, 16);
    }
    if (n_bytes < algo->workspace || (uintptr_t)workspace % 256 != 0) {
        simt_fail("cublasLtMatmul: workspace %p of %zu bytes, expected %zu at a multiple of 256", workspace, n_bytes, algo->workspace);
    }
    if (algo->workspace) { simt_check_range("cublasLtMatmul", "workspace", workspace, n_bytes, 1); }
}

// what the call was given, by value: a graph runs it again
struct SimtProduct {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, c_layout, d_layout;
    cublasLtMatmulAlgo_t algo;
    const void *a, *b, *c;
    void *d, *workspace;
    float alpha, beta;
};

// n products beside sum, of which all that lies below 2^-13 of the largest part is cut off
static inline float simt_blas_cut_sum_(float sum, const float* a, size_t a_step, const float* b, size_t b_step, size_t n) {
    float largest = fabsf(sum), plain = sum;
    for (size_t i = 0; i < n; i++) {
        largest = fmaxf(largest, fabsf(a[i * a_step] * b[i * b_step]));
        plain += a[i * a_step] * b[i * b_step];
    }
    if (largest == 0.0f || !isfinite(plain)) { return plain; }
    const float unit = ldexpf(1.0f, ilogbf(largest) - 13);
    float total = truncf(sum / unit);
    for (size_t i = 0; i < n; i++) { total += truncf(a[i * a_step] * b[i * b_step] / unit); }
    return total * unit;
}

// an element of a product of e4m3; left (K, M), right (K, N)
static inline float simt_blas_fp8_(const cublasLtMatmulDescOpaque_t* p, const float* left, const float* right, size_t m, size_t M,
                                   size_t n, size_t N, size_t K) {
    const size_t whole = ((K + 127) / 128 + 3) / 4 * 4;
    float sum = 0.0f;
    for (size_t first = 0; first < K; first += 128) {
        const size_t end = first + 128 < K ? first + 128 : K;
        float of_block = 0.0f;
        for (size_t k = first; k < end; k += 32) {
            of_block = simt_blas_cut_sum_(of_block, left + k * M + m, M, right + k * N + n, N, k + 32 < end ? 32 : end - k);
        }
        sum = fmaf(of_block, p->scales_a[m / 128 * whole + first / 128] * p->scales_b[first / 128 * N + n], sum);
    }
    return sum;
}

static inline void simt_blas_run_(const SimtProduct& x) {
    SimtAccess access;
    SimtProduct copy = x;
    cublasLtMatmulDesc_t p = &copy.product;
    cublasLtMatrixLayout_t a_layout = &copy.a_layout, b_layout = &copy.b_layout, c_layout = &copy.c_layout, d_layout = &copy.d_layout;
    memset(x.workspace, 0xff, x.algo.workspace);  // NaN: nobody may keep anything there
    size_t M = d_layout->rows, N = d_layout->columns, K = p->turn_a == CUBLAS_OP_T ? a_layout->rows : a_layout->columns;
    int with_bias = simt_blas_with_bias_(p), with_slope = simt_blas_with_slope_(p), with_gelu = simt_blas_with_aux_(p) && !with_slope;
    int tf32 = p->compute == CUBLAS_COMPUTE_32F_FAST_TF32, is_fp8 = a_layout->type == CUDA_R_8F_E4M3;
    std::vector<float> left = simt_blas_unpack_(x.a, a_layout, p->turn_a == CUBLAS_OP_N, M, K, tf32);
    std::vector<float> right = simt_blas_unpack_(x.b, b_layout, p->turn_b == CUBLAS_OP_T, N, K, tf32);
    #pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        std::vector<float> sum(M);
        for (size_t m = 0; is_fp8 && m < M; m++) { sum[m] = simt_blas_fp8_(p, left.data(), right.data(), m, M, n, N, K); }
        for (size_t k = 0; !is_fp8 && k < K; k++) {
            for (size_t m = 0; m < M; m++) { sum[m] += left[k * M + m] * right[k * N + n]; }
        }
        for (size_t m = 0; m < M; m++) {
            float y = x.alpha * sum[m];
            // beta 0: C is not read
            if (x.beta != 0.0f) { y += x.beta * simt_blas_load_(x.c, c_layout->type, m + n * (size_t)c_layout->ld); }
            if (with_bias) { y += simt_blas_load_(p->bias, d_layout->type, m); }
            if (with_slope) { y *= simt_blas_gelu_slope_(simt_blas_load_(p->aux, d_layout->type, m + n * (size_t)p->aux_ld)); }
            if (with_gelu) { simt_blas_store_(p->aux, d_layout->type, m + n * (size_t)p->aux_ld, y); }
            simt_blas_store_(x.d, d_layout->type, m + n * (size_t)d_layout->ld, with_gelu ? simt_blas_gelu_(y) : y);
        }
    }
}

static inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t p, const void* alpha,
                                            const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                                            cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                                            cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                                            const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes,
                                            cudaStream_t stream) {
    simt_blas_check_shapes_("cublasLtMatmul", handle, p, a_layout, b_layout, c_layout, d_layout);
    simt_blas_check_call_(p, a, a_layout, b, b_layout, c, c_layout, d, d_layout, algo, workspace, workspace_bytes);
    const SimtProduct x = {*p, *a_layout, *b_layout, *c_layout, *d_layout, *algo, a, b, c, d, workspace, *(const float*)alpha,
                           *(const float*)beta};
    int error = simt_submit(stream, "cublasLtMatmul", [=](cudaStream_t) { simt_blas_run_(x); });
    return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
#endif  // SIMT_CUBLASLT_H
