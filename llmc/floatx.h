/*
floatX: how a .cu trainer stores weights and activations, chosen when it is built.
    PRECISION=bf16   bf16, products on tensor cores    (default)
    PRECISION=fp32   float, fast sums                  -DFP32
    PRECISION=exact  float, the bits of the C code     -DEXACT; also what a build without a CUDA compiler is
Only trainers say floatX: headers have a template parameter X.
*/
#ifndef LLMC_FLOATX_H
#define LLMC_FLOATX_H
#if defined(__CUDACC__) && !defined(EXACT) && !defined(FP32)
#include <cuda_bf16.h>
typedef __nv_bfloat16 floatX;
#define FLOATX_NAME "bf16"
enum { FLOATX_IS_FLOAT = 0 };
#else
typedef float floatX;
#define FLOATX_NAME "fp32"
enum { FLOATX_IS_FLOAT = 1 };
#endif
#endif  // LLMC_FLOATX_H
