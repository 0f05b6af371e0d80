/*
gemm on tensor cores, by cuBLASLt: out = a * b with what follows a product in the same kernel. Fast CUDA builds only.
    out (M, N) contiguous      a (M, K), b (K, N) of gemm.h
    bias (N) or NULL           added to every row
    pre (M, N) or NULL         then out = gelu(a * b + bias) and pre what gelu was taken of, for its backward
    add                        1: out = out + a * b
Returns 0, and has done nothing, where cuBLASLt cannot or would be slow: rows that are not whole packs of 16 bytes.
X bf16: products of tensor cores, sums in float, rounded once to Out. X float: float products, or with -DTF32 products of
factors that are rounded to 10 bits of fraction first.
Order:  cuBLASLt's own. Its manual promises the same bits from the same version on GPUs of one architecture with equally
        many multiprocessors, given one workspace per stream (section "Results reproducibility"). The algorithm is the first
        of its heuristic for the shape: addresses, alignment beyond 16 bytes and the size of the workspace are kept out of
        the choice. A sum may be split along K, but its parts are added in float; schemes that round parts to bf16 are refused.
Cost:   a bf16 product of an H200 has 989 TFLOP/s as its limit, float 67. The host prepares each call anew, without waiting for
        the GPU.
Source: cuBLAS manual, "Using the cuBLASLt API"
*/
#ifndef LLMC_GEMM_CUBLAS_H
#define LLMC_GEMM_CUBLAS_H
#ifdef __CUDACC__
#include "gemm.h"    // MatrixOf, MaybeNull, Device, cublasCheck
#include "kernel.h"  // pack_fits

#ifndef CUBLAS_WORKSPACE
#define CUBLAS_WORKSPACE ((size_t)32 << 20)  // bytes: what NVIDIA advises for Hopper. dev/simt has less
#endif
enum { CUBLAS_ALIGNMENT = 16 };              // of every pointer, in bytes

template <typename X> static inline cudaDataType_t cublas_type_();
template <> inline cudaDataType_t cublas_type_<float>() { return CUDA_R_32F; }
template <> inline cudaDataType_t cublas_type_<__nv_bfloat16>() { return CUDA_R_16BF; }

// how sums and products of X are made
template <typename X>
static inline cublasComputeType_t cublas_compute_() {
#ifdef TF32
    return sizeof(X) == sizeof(float) ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
#else
    return CUBLAS_COMPUTE_32F;
#endif
}

// what a call says to cuBLASLt, on the caller's stack
typedef struct {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t left, right, out;
    cublasLtMatmulAlgo_t algo;
} CublasPlan_;

template <typename Value>
static inline void cublas_set_(CublasPlan_* plan, cublasLtMatmulDescAttributes_t attribute, Value value) {
    cublasCheck(cublasLtMatmulDescSetAttribute(&plan->product, attribute, &value, sizeof value));
}

// cuBLASLt reads memory by columns, so it sees every matrix of ours turned: it is asked for out^T = b^T * a^T. A matrix of
// ours whose rows are contiguous is then what it calls N, not transposed
template <typename X>
static inline cublasOperation_t cublas_operand_(cublasLtMatrixLayout_t layout, MatrixOf<X> m, int rows, int columns) {
    int contiguous = m.col_stride == 1;
    int64_t ld = (int64_t)(contiguous ? m.row_stride : m.col_stride);
    cublasCheck(cublasLtMatrixLayoutInit(layout, cublas_type_<X>(), (uint64_t)(contiguous ? columns : rows),
                                         (uint64_t)(contiguous ? rows : columns), ld));
    return contiguous ? CUBLAS_OP_N : CUBLAS_OP_T;
}

template <typename Value>
static inline void cublas_prefer_(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                                  Value value) {
    cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

// the first algorithm of the heuristic, for any pointers that are multiples of CUBLAS_ALIGNMENT; 0: there is none
static inline int cublas_choose_(CublasPlan_* plan, const Device* dev) {
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasCheck(cublasLtMatmulPreferenceInit(&preference));
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)CUBLAS_WORKSPACE);
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)CUBLAS_ALIGNMENT);
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)CUBLAS_ALIGNMENT);
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)CUBLAS_ALIGNMENT);
    cublas_prefer_(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)CUBLAS_ALIGNMENT);
    cublasLtMatmulHeuristicResult_t result;
    int n_found = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(dev->blas, &plan->product, &plan->left, &plan->right, &plan->out,
                                                           &plan->out, &preference, 1, &result, &n_found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && n_found == 0)) { return 0; }
    cublasCheck(status);
    plan->algo = result.algo;
    return 1;
}

// one of the strides is 1: the other is how long the rows, or the columns, are that lie in one piece
template <typename X>
static inline int cublas_fits_(MatrixOf<X> m) { return pack_fits(m.data, (int64_t)(m.row_stride * m.col_stride)); }

template <typename Out, typename X>
static inline int gemm_cublas(Out* out, const typename MaybeNull<Out>::type* bias, typename MaybeNull<Out>::type* pre, int add,
                              MatrixOf<X> a, MatrixOf<X> b, int M, int N, int K, const Device* dev) {
    int fits = cublas_fits_(a) && cublas_fits_(b) && pack_fits(out, N) && (uintptr_t)bias % CUBLAS_ALIGNMENT == 0;
    if (pre) { fits = fits && pack_fits(pre, N) && N % 8 == 0; }  // 8: cuBLASLt's rule for pre, of any type
    if (!fits) { return 0; }
    CublasPlan_ plan;
    cublasCheck(cublasLtMatmulDescInit(&plan.product, cublas_compute_<X>(), CUDA_R_32F));
    cublas_set_(&plan, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)cublas_operand_(&plan.left, b, K, N));
    cublas_set_(&plan, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)cublas_operand_(&plan.right, a, M, K));
    cublas_operand_(&plan.out, matrix(out, N), M, N);
    int epilogue = pre && bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : pre ? CUBLASLT_EPILOGUE_GELU_AUX
                   : bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    cublas_set_(&plan, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)epilogue);
    if (pre) { cublas_set_(&plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)N); }
    // the heuristic reads the alignment of these two pointers, so it is shown the least that they may have
    void* any = (void*)(uintptr_t)CUBLAS_ALIGNMENT;
    if (bias) { cublas_set_(&plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, any); }
    if (pre) { cublas_set_(&plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, any); }
    if (!cublas_choose_(&plan, dev)) { return 0; }
    if (bias) { cublas_set_(&plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (const void*)bias); }
    if (pre) { cublas_set_(&plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (void*)pre); }
    const float one = 1.0f, from_old = add ? 1.0f : 0.0f;
    void* workspace = device_workspace(dev, CUBLAS_WORKSPACE);
    cublasCheck(cublasLtMatmul(dev->blas, &plan.product, &one, b.data, &plan.left, a.data, &plan.right, &from_old, out, &plan.out,
                               out, &plan.out, &plan.algo, workspace, CUBLAS_WORKSPACE, dev->stream));
    return 1;
}
#endif  // __CUDACC__
#endif  // LLMC_GEMM_CUBLAS_H
