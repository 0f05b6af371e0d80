/*
floatX: how a .cu trainer stores weights and activations, chosen when it is built.
    PRECISION=bf16   bf16, products on tensor cores    (default)
    PRECISION=fp32   float, fast sums                  -DFP32
    PRECISION=tf32   float, products on tensor cores, which see 11 bits of each factor   -DFP32 -DTF32
    PRECISION=exact  float, the bits of the C code     -DEXACT; also what a build without a CUDA compiler is
Only trainers say floatX: headers have a template parameter X.
*/
#ifndef LLMC_FLOATX_H
#define LLMC_FLOATX_H
#include "device.h"  // device_download
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

// n stored values, in host memory, as floats; they may lie in the upper end of `out`
static inline void floatx_widen(float* out, const void* stored, size_t n) {
    for (size_t i = 0; i < n; i++) {
        floatX value;
        memcpy(&value, (const char*)stored + sizeof(floatX) * i, sizeof value);
        out[i] = (float)value;
    }
}

// the same from the device: waits for every op before it
static inline void floatx_download(float* out, const floatX* x, size_t n, const Device* dev) {
    char* upper = (char*)out + (sizeof(float) - sizeof(floatX)) * n;
    device_download(upper, x, sizeof(floatX) * n, dev);
    floatx_widen(out, upper, n);
}
#endif  // LLMC_FLOATX_H
