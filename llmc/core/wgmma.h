/*
Products of a warpgroup on Hopper's tensor cores, asynchronously: one function for each instruction.
    wgmma_ss    sums (64, N) = a b or += a b: a (64, 16) and b (16, N) bf16 in shared memory; N = 32, 48, 64, 128,
                192 or 256
    wgmma_rs    the same with a in registers
    wgmma_fence, wgmma_commit, wgmma_wait<n>    before the first product, behind the last of a group, until n groups
                are under way; wgmma_keep(sums) behind the wait holds the compiler from reading them before it
    smem_descriptor    says where a matrix lies in shared memory
    fence_proxy_async  between a thread's own writes to shared memory (also by cp.async, once it has waited for them)
                and the barrier behind which a warpgroup multiplies them: tensor cores read by another way
A warpgroup is four warps, the first of them at a multiple of four; all 128 threads make each call together. Between a
product and the wait for it, nobody may touch sums, the registers of a, or write to shared memory that it reads.

Who holds what: sums[0][n][i] of warp w are rows 16w..16w+15, in them as c of mma_m16n8k16 (mma.h) of columns 8n..8n+7;
a in registers likewise: of warp w rows 16w..16w+15, as a of mma_m16n8k16.
In shared memory: rows of 64 bf16, 128 bytes, at a multiple of 1024 bytes, where 16-byte chunk c of row r lies at
c ^ (r & 7): the tile of tile.h with W = 64 ("128-byte swizzle"). Eight rows are 1024 bytes, the stride of descriptors.
    not transposed    a row of 64 holds what is summed over: of a row of a, or of a column of b. 16 further: 32 bytes on
    transposed        it holds rows of a, or columns of b. 16 further to sum over: 16 rows, 2048 bytes on. b has such a
                      matrix for each 64 columns, `apart` bytes from one to the next
Order:  as mma_m16n8k16: 16 products and a sum at a time, in an order of the hardware's own.
Cost:   64 * N * 16 multiply-adds in N / 2 cycles of a multiprocessor.
Needs sm_90a (make CUDA_ARCH=sm_90a). Where no GPU runs, dev/simt models the same functions.
Source: PTX ISA, wgmma
*/
#ifndef LLMC_WGMMA_H
#define LLMC_WGMMA_H
#ifdef __CUDACC__
#include "kernel.h"  // bf16
#ifdef SIMT
#include <simt_wgmma.h>  // the model of each
#endif

#if defined(WGMMA) && defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "WGMMA is for sm_90a: make CUDA_ARCH=sm_90a"
#endif

enum { WARPGROUP = 128 };
// N of sums, here and in wide_tile.h: columns / 8, as in tile.h

// of a matrix that begins at x; apart: bytes from 64 columns of a transposed b to the next 64
__device__ inline uint64_t smem_descriptor(const bf16* x, int apart = 16) {
#ifdef SIMT
    const unsigned address = simt_shared_address(x);
#else
    const unsigned address = (unsigned)__cvta_generic_to_shared(x);
#endif
    const uint64_t swizzle_128 = (uint64_t)1 << 62, eight_rows = (uint64_t)(1024 >> 4) << 32;
    return swizzle_128 | eight_rows | (uint64_t)(apart >> 4) << 16 | (uint64_t)((address & 0x3ffff) >> 4);
}

// of what lies so many bytes, a multiple of 16, behind it
__device__ inline uint64_t smem_descriptor_at(uint64_t x, int n_bytes) {
    return (x & 0xffffffff00000000) | ((unsigned)x + (unsigned)(n_bytes / 16));  // no carry: one addition of 32 bits
}

__device__ inline void fence_proxy_async() {
#ifdef SIMT
    simt_fence_proxy_async();
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void wgmma_fence() {
#ifdef SIMT
    simt_wgmma_fence();
#else
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ inline void wgmma_commit() {
#ifdef SIMT
    simt_wgmma_commit();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int N>
__device__ inline void wgmma_wait() {
#ifdef SIMT
    simt_wgmma_wait(N);
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}

template <int N>
__device__ inline void wgmma_keep(float (&sums)[1][N][4]) {
#ifndef SIMT
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) { asm volatile("" : "+f"(sums[0][i / 4][i % 4])::"memory"); }
#endif
}

#ifdef SIMT
template <int TRANSPOSED_A, int TRANSPOSED_B, int N>
inline void wgmma_ss(float (&sums)[1][N][4], uint64_t a, uint64_t b, int add) {
    simt_wgmma(sums[0][0], N, NULL, a, b, TRANSPOSED_A, TRANSPOSED_B, add);
}
template <int TRANSPOSED_B, int N>
inline void wgmma_rs(float (&sums)[1][N][4], const unsigned (&a)[4], uint64_t b, int add) {
    simt_wgmma(sums[0][0], N, a, 0, b, 0, TRANSPOSED_B, add);
}
#else
// An asm statement names each register that it changes, four for eight columns; WGMMA_SUMS_ counts them, and the
// operands behind them go on from there
#define WGMMA_4_(n) "+f"(s[n][0]), "+f"(s[n][1]), "+f"(s[n][2]), "+f"(s[n][3])
#define WGMMA_32_(n) WGMMA_4_(n), WGMMA_4_(n + 1), WGMMA_4_(n + 2), WGMMA_4_(n + 3), WGMMA_4_(n + 4), \
        WGMMA_4_(n + 5), WGMMA_4_(n + 6), WGMMA_4_(n + 7)
#define WGMMA_16_(n) WGMMA_4_(n), WGMMA_4_(n + 1), WGMMA_4_(n + 2), WGMMA_4_(n + 3)
#define WGMMA_SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_SUMS_24 WGMMA_SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_SUMS_32 WGMMA_SUMS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_SUMS_48 WGMMA_SUMS_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_SUMS_64 WGMMA_SUMS_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_SUMS_80 WGMMA_SUMS_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_SUMS_96 WGMMA_SUMS_80 \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_SUMS_112 WGMMA_SUMS_96 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_SUMS_128 WGMMA_SUMS_112 \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// columns, their sums as a list of operands and of registers, numbers of the operands behind them
#define WGMMA_OF_(COLUMNS, SUMS, n0, n1, n2, n3, n4, n5, n6, ...) \
    template <int TRANSPOSED_A, int TRANSPOSED_B> \
    __device__ inline void wgmma_ss(float (&sums)[1][COLUMNS / 8][4], uint64_t a, uint64_t b, int add) { \
        float(&s)[COLUMNS / 8][4] = sums[0]; \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #n2 ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" SUMS "}, %" #n0 ", %" #n1 \
                     ", add, 1, 1, %" #n3 ", %" #n4 ";\n}" \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B)); \
    } \
    template <int TRANSPOSED_B> \
    __device__ inline void wgmma_rs(float (&sums)[1][COLUMNS / 8][4], const unsigned (&a)[4], uint64_t b, int add) { \
        float(&s)[COLUMNS / 8][4] = sums[0]; \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #n5 ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" SUMS "}, {%" #n0 ", %" #n1 \
                     ", %" #n2 ", %" #n3 "}, %" #n4 ", add, 1, 1, %" #n6 ";\n}" \
                     : __VA_ARGS__ \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED_B)); \
    }
WGMMA_OF_(32, WGMMA_SUMS_16, 16, 17, 18, 19, 20, 21, 22, WGMMA_16_(0))
WGMMA_OF_(48, WGMMA_SUMS_24, 24, 25, 26, 27, 28, 29, 30, WGMMA_16_(0), WGMMA_4_(4), WGMMA_4_(5))
WGMMA_OF_(64, WGMMA_SUMS_32, 32, 33, 34, 35, 36, 37, 38, WGMMA_32_(0))
WGMMA_OF_(128, WGMMA_SUMS_64, 64, 65, 66, 67, 68, 69, 70, WGMMA_32_(0), WGMMA_32_(8))
WGMMA_OF_(192, WGMMA_SUMS_96, 96, 97, 98, 99, 100, 101, 102, WGMMA_32_(0), WGMMA_32_(8), WGMMA_32_(16))
WGMMA_OF_(256, WGMMA_SUMS_128, 128, 129, 130, 131, 132, 133, 134, WGMMA_32_(0), WGMMA_32_(8), WGMMA_32_(16),
          WGMMA_32_(24))
#endif  // SIMT
#endif  // __CUDACC__
#endif  // LLMC_WGMMA_H
