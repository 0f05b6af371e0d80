/*
gemm on tensor cores, by cuBLASLt: out = scale * a * b with what follows a product in the same kernel. Fast CUDA builds
only. And that of factors in fp8, gemm_cublas_fp8.
    out (M, N)                 rows out_stride apart, those of pre N; a (M, K), b (K, N) of gemm.h
    bias (N) or NULL           added to every row
    pre (M, N) or NULL         then out = gelu(a * b + bias) and pre what gelu was taken of, for its backward; in
                               gemm_cublas_gelu_slope out = (a * b) * gelu'(pre), of sums that nothing has rounded yet
    add                        1: out = out + scale * a * b
In fp8 a (M, K) are codes of e4m3 with a scale for each row and each 128 of K, blocks of K x M: those of a block lie
together. b^T is a StoredMatrix (N, K) with a scale for each block of 128 x 128, blocks of N x blocks of K, rows of a
multiple of 4. That is all that Hopper has: neither factor turned, M a multiple of 4, K of 16, no FAST_ACCUM.
Returns 0, and has done nothing, where cuBLASLt cannot or would be slow: rows that are not whole packs of 16 bytes. The
Device counts these calls (device_fell_back).
X bf16: products of tensor cores, sums in float, rounded once to Out. X float: float products, or with -DTF32 products
of factors that are rounded to 10 bits of fraction first.
In fp8 an H200 adds the products of a block of K in words that end 2^-13 below their largest part, and what lies lower
is cut off; then out = madd(sum, scale of a * scale of b, out) in float, block after block.
Order:  cuBLASLt's own. Its manual promises the same bits from the same version on GPUs of one architecture with
        equally many multiprocessors, given one workspace per stream (section "Results reproducibility"). The
        algorithm is that of gemm_algorithms.h for card and shape, else the first of its heuristic for the shape:
        addresses, alignment beyond 16 bytes and the size of the workspace are kept out of the choice. A sum may be
        split along K, but its parts are added in float: schemes whose parts have the type of the result, in place or in
        the workspace, only where that is float (cublas_reductions), as for gradients of weights, which have few outputs
        and long sums. In place parts wait for each other in order; --verify-every would find another one.
Cost:   a bf16 product of an H200 has 989 TFLOP/s as its limit, float 67. The host asks the heuristic once for a shape,
        which may take it a millisecond, and keeps the CUBLAS_PLANS answers that were used last: M may change with every
        call, as in generation, and the shapes that come again in every step stay. A shape is found by its hash. The
        host never waits for the GPU.
Source: cuBLAS manual, "Using the cuBLASLt API", and of fp8 "128-element 1D and 128x128 2D Block Scaling"
*/
#ifndef LLMC_GEMM_CUBLAS_H
#define LLMC_GEMM_CUBLAS_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // pack_fits, pack_aligned
#include "../core/stored.h"  // StoredMatrix
#include "gemm_algorithms.h" // CublasShape, CublasConfig, cublas_row
#include "gemm.h"            // MatrixOf, MaybeNull, Device, cublasCheck, CUBLAS_WORKSPACE

enum { CUBLAS_ALIGNMENT = 16 };  // of every pointer, in bytes
enum { CUBLAS_PLANS = 256 };     // are kept; training has about 15, generation 5 for each length of a prompt
enum { CUBLAS_CHAINS = 512 };    // lists of plans whose shapes hash alike: most have none or one

template <typename X> static inline cudaDataType_t cublas_type_();
template <> inline cudaDataType_t cublas_type_<float>() { return CUDA_R_32F; }
template <> inline cudaDataType_t cublas_type_<__nv_bfloat16>() { return CUDA_R_16BF; }
template <> inline cudaDataType_t cublas_type_<uint8_t>() { return CUDA_R_8F_E4M3; }  // codes

// how sums and products of X are made
template <typename X>
static inline cublasComputeType_t cublas_compute_() {
#ifdef TF32
    return sizeof(X) == sizeof(float) ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
#else
    return CUBLAS_COMPUTE_32F;
#endif
}

// the answer, and what a call says to cuBLASLt
struct CublasPlan {
    CublasShape shape;
    CublasPlan* next;    // of the same chain
    uint64_t last_used;  // the number of the call
    int possible;        // 0: there is no algorithm
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t left, right, out;
    cublasLtMatmulAlgo_t algo;
};

struct CublasCache {
    CublasPlan plan[CUBLAS_PLANS];
    CublasPlan* chain[CUBLAS_CHAINS];
    int n_plans;            // of which so many are in use
    uint64_t n_calls;       // so far
    const CublasRow* rows;  // of gemm_algorithms.h
    char card[256];         // this GPU's name
};

template <typename Value>
static inline void cublas_set_(CublasPlan* plan, cublasLtMatmulDescAttributes_t attribute, Value value) {
    cublasCheck(cublasLtMatmulDescSetAttribute(&plan->product, attribute, &value, sizeof value));
}

// cuBLASLt reads memory by columns, so it sees every matrix of ours turned: it is asked for out^T = b^T * a^T. A matrix
// of ours whose rows are contiguous is then what it calls N, not transposed
static inline cublasOperation_t cublas_operand_(cublasLtMatrixLayout_t layout, int64_t type, int64_t turned,
                                                int64_t stride, int64_t rows, int64_t columns) {
    cublasCheck(cublasLtMatrixLayoutInit(layout, (cudaDataType_t)type, (uint64_t)(turned ? rows : columns),
                                         (uint64_t)(turned ? columns : rows), stride));
    return turned ? CUBLAS_OP_T : CUBLAS_OP_N;
}

template <typename Value>
static inline void cublas_prefer_(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                                  Value value) {
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

// how the parts of a split sum may be added
static inline uint32_t cublas_reductions(const CublasShape* s) {
    return s->out_type == CUDA_R_32F ? CUBLASLT_REDUCTION_SCHEME_MASK : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

// n_asked answers of the heuristic, for any pointers that are multiples of CUBLAS_ALIGNMENT; returns how many came
static inline int cublas_answers(cublasLtMatmulHeuristicResult_t* results, int n_asked, CublasPlan* plan,
                                 const Device* dev) {
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasCheck(cublasLtMatmulPreferenceInit(&preference));
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)CUBLAS_WORKSPACE);
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, cublas_reductions(&plan->shape));
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)CUBLAS_ALIGNMENT);
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)CUBLAS_ALIGNMENT);
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)CUBLAS_ALIGNMENT);
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)CUBLAS_ALIGNMENT);
    int n_found = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(dev->blas, &plan->product, &plan->left, &plan->right, &plan->out, &plan->out,
                                       &preference, n_asked, results, &n_found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) { return 0; }
    cublasCheck(status);
    return n_found;
}

template <typename Value>
static inline int32_t cublas_config_value_(const cublasLtMatmulAlgo_t* algo,
                                           cublasLtMatmulAlgoConfigAttributes_t attribute) {
    Value value = 0;
    size_t n_bytes = 0;
    cublasCheck(cublasLtMatmulAlgoConfigGetAttribute(algo, attribute, &value, sizeof value, &n_bytes));
    return (int32_t)value;
}

static inline CublasConfig cublas_config(const cublasLtMatmulAlgo_t* algo) {
    const CublasConfig config = {cublas_config_value_<int32_t>(algo, CUBLASLT_ALGO_CONFIG_ID),
                                 cublas_config_value_<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_TILE_ID),
                                 cublas_config_value_<int32_t>(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
                                 cublas_config_value_<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME),
                                 cublas_config_value_<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
                                 cublas_config_value_<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
                                 cublas_config_value_<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                                 cublas_config_value_<uint16_t>(algo, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
                                 cublas_config_value_<uint16_t>(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)};
    return config;
}

// the algorithm of the table, or the first of the heuristic; 0: there is none
static inline int cublas_choose_(CublasPlan* plan, const CublasCache* cache, const Device* dev) {
    const CublasRow* row =
        cublas_row(cache->rows, cache->card, dev->n_sms, (int64_t)cublasLtGetVersion(), &plan->shape);
    cublasLtMatmulHeuristicResult_t results[CUBLAS_ANSWERS];
    const int n_found = cublas_answers(results, row ? CUBLAS_ANSWERS : 1, plan, dev);
    if (n_found == 0 || results[0].state != CUBLAS_STATUS_SUCCESS) { return 0; }
    plan->algo = results[0].algo;
    for (int i = 0; row && i < n_found; i++) {
        const CublasConfig config = cublas_config(&results[i].algo);
        if (results[i].state == CUBLAS_STATUS_SUCCESS && memcmp(&config, &row->config, sizeof config) == 0) {
            plan->algo = results[i].algo;
            return 1;
        }
    }
    const CublasShape* s = &plan->shape;
    if (row) { device_fell_back(dev, FALLBACK_ALGORITHM, "(%d, %d) of sums of %d", (int)s->M, (int)s->N, (int)s->K); }
    return 1;
}

static inline int cublas_has_bias_(const CublasShape* s) {
    return s->epilogue == CUBLASLT_EPILOGUE_BIAS || s->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

static inline int cublas_has_pre_(const CublasShape* s) {
    return s->epilogue == CUBLASLT_EPILOGUE_GELU_AUX || s->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           s->epilogue == CUBLASLT_EPILOGUE_DGELU;
}

// of a and of b, which cuBLASLt calls B and A
static inline void cublas_set_scales_(CublasPlan* plan, const float* a, const float* b) {
    cublas_set_(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (const void*)b);
    cublas_set_(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (const void*)a);
}

static inline void cublas_make_plan_(CublasPlan* plan, const CublasCache* cache, const CublasShape* s,
                                     cublasComputeType_t compute, const Device* dev) {
    plan->shape = *s;
    cublasCheck(cublasLtMatmulDescInit(&plan->product, compute, CUDA_R_32F));
    cublasOperation_t turn_b = cublas_operand_(&plan->left, s->type, s->b_turned, s->b_stride, s->K, s->N);
    cublasOperation_t turn_a = cublas_operand_(&plan->right, s->type, s->a_turned, s->a_stride, s->M, s->K);
    cublas_set_(plan, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)turn_b);
    cublas_set_(plan, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)turn_a);
    cublas_operand_(&plan->out, s->out_type, 0, s->out_stride, s->M, s->N);
    cublas_set_(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)s->epilogue);
    if (cublas_has_pre_(s)) { cublas_set_(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)s->N); }
    // the heuristic reads the alignment of these pointers, so it is shown the least that they may have
    void* any = (void*)(uintptr_t)CUBLAS_ALIGNMENT;
    if (s->type == CUDA_R_8F_E4M3) {
        cublas_set_(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
        cublas_set_(plan, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
        cublas_set_scales_(plan, (const float*)any, (const float*)any);
    }
    if (cublas_has_bias_(s)) { cublas_set_(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, any); }
    if (cublas_has_pre_(s)) { cublas_set_(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, any); }
    plan->possible = cublas_choose_(plan, cache, dev);
}

// ---- plans that are kept ----

// the chain of a shape: FNV-1a over its numbers, of which the high bits have seen all
static inline CublasPlan** cublas_chain_(CublasCache* cache, const CublasShape* s) {
    const int64_t numbers[] = {s->M,        s->N,        s->K,    s->out_stride, s->a_stride, s->b_stride,
                               s->a_turned, s->b_turned, s->type, s->out_type,   s->epilogue};
    uint64_t hash = 0xcbf29ce484222325u;
    for (int64_t number : numbers) { hash = (hash ^ (uint64_t)number) * 0x100000001b3u; }
    return &cache->chain[(hash >> 32) % CUBLAS_CHAINS];
}

// room for a new plan: an unused one, or that of the shape that was not asked for the longest time, taken out of its
// chain
static inline CublasPlan* cublas_room_(CublasCache* cache) {
    if (cache->n_plans < CUBLAS_PLANS) { return &cache->plan[cache->n_plans++]; }
    CublasPlan* oldest = cache->plan;
    for (CublasPlan& plan : cache->plan) { oldest = plan.last_used < oldest->last_used ? &plan : oldest; }
    CublasPlan** link = cublas_chain_(cache, &oldest->shape);
    while (*link != oldest) { link = &(*link)->next; }
    *link = oldest->next;
    return oldest;
}

static inline CublasCache* cublas_cache(const Device* dev) {
    if (dev->plans->cache) { return dev->plans->cache; }
    CublasCache* cache = (CublasCache*)malloc_check(sizeof(CublasCache), "cuBLASLt's plans");
    cudaDeviceProp properties;
    int gpu = 0;
    memset((void*)cache, 0, sizeof *cache);
    cudaCheck(cudaGetDevice(&gpu));
    cudaCheck(cudaGetDeviceProperties(&properties, gpu));
    snprintf(cache->card, sizeof cache->card, "%s", properties.name);
    cache->rows = CUBLAS_ROWS;
    dev->plans->cache = cache;
    return cache;
}

// the plan for a shape, from before or new. It stays until the next call
static inline CublasPlan* cublas_plan_(const CublasShape* shape, cublasComputeType_t compute, const Device* dev) {
    CublasCache* cache = cublas_cache(dev);
    CublasPlan **chain = cublas_chain_(cache, shape), *plan = *chain;
    while (plan && memcmp(&plan->shape, shape, sizeof *shape) != 0) { plan = plan->next; }
    if (!plan) {
        plan = cublas_room_(cache);
        memset((void*)plan, 0, sizeof *plan);
        cublas_make_plan_(plan, cache, shape, compute, dev);
        plan->next = *chain;
        *chain = plan;
    }
    plan->last_used = ++cache->n_calls;
    return plan;
}

// one of the strides is 1: the other is how long the rows, or the columns, are that lie in one piece
template <typename X>
static inline int64_t cublas_stride_(MatrixOf<X> m) { return (int64_t)(m.row_stride * m.col_stride); }

// with GELU a product follows that may be one of cuBLASLt again, and so it does where the factors are in fp8
template <typename X>
static inline int cublas_refused_(cublasLtEpilogue_t epilogue, int M, int N, int K, const Device* dev) {
    const int is_plain = epilogue == CUBLASLT_EPILOGUE_DEFAULT || epilogue == CUBLASLT_EPILOGUE_BIAS;
    const FallbackKind kind = sizeof(X) == 1 ? FALLBACK_FP8 : is_plain ? FALLBACK_PRODUCT : FALLBACK_GELU;
    device_fell_back(dev, kind, "(%d, %d) of sums of %d", M, N, K);
    return 0;
}

// of factors in fp8
struct CublasScales {
    const float *a, *b;
};

// pre: read or written, as the epilogue says
template <typename Out, typename X>
static inline int cublas_product_(Out* out, size_t out_stride, cublasLtEpilogue_t epilogue, const Out* bias,
                                  const Out* pre, float scale, int add, MatrixOf<X> a, MatrixOf<X> b, int M, int N,
                                  int K, const Device* dev, CublasScales scales = {NULL, NULL}) {
    int64_t a_stride = cublas_stride_(a), b_stride = cublas_stride_(b), stride = (int64_t)out_stride;
    int fits = pack_fits(a.data, a_stride) && pack_fits(b.data, b_stride) && pack_fits(out, stride) &&
               pack_aligned(bias);
    if (pre) { fits = fits && pack_fits(pre, N) && N % 8 == 0; }  // 8: cuBLASLt's rule for pre, of any type
    if (!fits) { return cublas_refused_<X>(epilogue, M, N, K, dev); }
    const CublasShape shape = {M, N, K, stride, a_stride, b_stride, a.col_stride != 1, b.col_stride != 1,
                                cublas_type_<X>(), cublas_type_<Out>(), epilogue};
    CublasPlan* plan = cublas_plan_(&shape, cublas_compute_<X>(), dev);
    if (!plan->possible) { return cublas_refused_<X>(epilogue, M, N, K, dev); }
    if (scales.a) { cublas_set_scales_(plan, scales.a, scales.b); }
    if (bias) { cublas_set_(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (const void*)bias); }
    if (pre) { cublas_set_(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (const void*)pre); }
    const float from_old = add ? 1.0f : 0.0f;
    void* workspace = device_workspace(dev, CUBLAS_WORKSPACE);
    cublasCheck(cublasLtMatmul(dev->blas, &plan->product, &scale, b.data, &plan->left, a.data, &plan->right, &from_old,
                               out, &plan->out, out, &plan->out, &plan->algo, workspace, CUBLAS_WORKSPACE,
                               dev->stream));
    return 1;
}

template <typename Out, typename X>
static inline int gemm_cublas(Out* out, size_t out_stride, const typename MaybeNull<Out>::type* bias,
                              typename MaybeNull<Out>::type* pre, float scale, int add, MatrixOf<X> a, MatrixOf<X> b,
                              int M, int N, int K, const Device* dev) {
    cublasLtEpilogue_t epilogue = pre && bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : pre ? CUBLASLT_EPILOGUE_GELU_AUX
                                  : bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    return cublas_product_(out, out_stride, epilogue, bias, pre, scale, add, a, b, M, N, K, dev);
}

template <typename Out, typename X>
static inline int gemm_cublas_gelu_slope(Out* out, const Out* pre, MatrixOf<X> a, MatrixOf<X> b, int M, int N, int K,
                                         const Device* dev) {
    return cublas_product_(out, (size_t)N, CUBLASLT_EPILOGUE_DGELU, (const Out*)NULL, pre, 1.0f, 0, a, b, M, N, K, dev);
}

// out (M, N) = a * b^T + bias, where b is in fp8. scales.b: b's, with whole rows
template <typename Out>
static inline int gemm_cublas_fp8(Out* out, const typename MaybeNull<Out>::type* bias, const uint8_t* a,
                                  const StoredMatrix* b, CublasScales scales, int M, const Device* dev) {
    const int N = b->rows, K = b->columns;
    const cublasLtEpilogue_t epilogue = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    const int is_whole = b->block_rows == FP8_BLOCK && b->block_columns == FP8_BLOCK &&
                         (b->part_rows == N || b->part_rows % FP8_BLOCK == 0);
    if (!is_whole || !pack_aligned(scales.a, scales.b)) { return cublas_refused_<uint8_t>(epilogue, M, N, K, dev); }
    return cublas_product_(out, (size_t)N, epilogue, bias, (const Out*)NULL, 1.0f, 0, gemm_matrix(a, (size_t)K),
                           gemm_transposed((const uint8_t*)b->data, (size_t)K), M, N, K, dev, scales);
}
#endif  // __CUDACC__
#endif  // LLMC_GEMM_CUBLAS_H
