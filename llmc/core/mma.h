/*
Tensor cores and asynchronous copies: the instructions that CUDA C++ has no plain word for, one function each.
    mma_m16n8k16      d = a * b + c for a warp: a (16, 16) and b (16, 8) bf16, c and d (16, 8) float
    ldmatrix_x4       four 8x8 matrices of bf16 from shared memory into fragments; _trans: each of them transposed
    stmatrix_x4_trans the way back of ldmatrix_x4_trans
    cp_async_16       16 bytes from global to shared memory while the thread goes on; _zfill: beyond n_valid bytes zeros
    cp_async_commit   closes a group of this thread's copies; cp_async_wait<n>: until at most n groups are under way
All 32 lanes of the warp call mma and ldmatrix together. Copied data is seen by the thread that copied after its wait,
by others after a __syncthreads() behind it.

Who holds what: lane = 4 * g + t with g = 0..7, t = 0..3; a register holds two bf16, the first in its lower half.
    a (16, 16), row m, column k              b (16, 8), row k, column n           c, d (16, 8), row m, column n
             k = 2t,2t+1   k = 2t+8,2t+9              n = g                                n = 2t   n = 2t+1
    m = g       a[0]           a[2]          k = 2t,2t+1     b[0]                 m = g       c[0]     c[1]
    m = g+8     a[1]           a[3]          k = 2t+8,2t+9   b[1]                 m = g+8     c[2]     c[3]
ldmatrix_x4: lane 8 * j + i gives the address of row i of matrix j (8 bf16, 16 bytes, at a multiple of 16). Lane 4 * g +
t receives in r[j] of matrix j row g, columns 2t and 2t+1; transposed: rows 2t and 2t+1 of column g. So
    a from A (16, 16) in rows of k:   matrices A[0:8, 0:8], A[8:16, 0:8], A[0:8, 8:16], A[8:16, 8:16]:
                                      lane l gives row l % 16, column l / 16 * 8
    b from B' (8, 16) in rows of k (a weight, output by input): matrices B'[:, 0:8], B'[:, 8:16], not transposed
    b from B (16, 8) in rows of n:    matrices B[0:8, :], B[8:16, :], transposed
Order:  within one mma the hardware adds 16 products and c in an order of its own, in float or slightly better; the same
        inputs give the same bits on one architecture.
Cost:   mma 2048 multiply-adds; ldmatrix 512 bytes of shared memory, without bank conflicts where the 8 rows of a matrix
        lie in different 16-byte columns modulo 128.
Needs compute capability 8.0, stmatrix 9.0. Where no GPU runs, dev/simt models the same functions.
Source: PTX ISA, mma.m16n8k16, ldmatrix, stmatrix, cp.async
*/
#ifndef LLMC_MMA_H
#define LLMC_MMA_H
#ifdef __CUDACC__
#include <cuda_bf16.h>
#ifdef SIMT
#include <simt_mma.h>  // the model of each
#endif

__device__ inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                    const float (&c)[4]) {
#ifdef SIMT
    simt_mma_m16n8k16_bf16(d, a, b, c);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %11, %12, %13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
                   "f"(c[3]));
#endif
}

// ---- shared memory to fragments ----

__device__ inline void ldmatrix_x4(unsigned (&r)[4], const void* row) {
#ifdef SIMT
    simt_ldmatrix_x4(r, row, 0);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
#endif
}

__device__ inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
#ifdef SIMT
    simt_ldmatrix_x4(r, row, 1);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
#endif
}

// ---- fragments to shared memory ----

__device__ inline void stmatrix_x4_trans(void* row, const unsigned (&r)[4]) {
#ifdef SIMT
    simt_stmatrix_x4(row, r, 1);
#else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"((unsigned)__cvta_generic_to_shared(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
#endif
}

// ---- global to shared memory, asynchronously; both addresses are multiples of 16 ----

// n_valid 0..16 bytes are read, the rest of the 16 become zeros; `global` need not be readable where n_valid is 0
__device__ inline void cp_async_16_zfill(void* shared, const void* global, int n_valid) {
#ifdef SIMT
    simt_cp_async_16(shared, global, n_valid);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(n_valid)
                 : "memory");
#endif
}

__device__ inline void cp_async_16(void* shared, const void* global) { cp_async_16_zfill(shared, global, 16); }

__device__ inline void cp_async_commit() {
#ifdef SIMT
    simt_cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N>
__device__ inline void cp_async_wait() {
#ifdef SIMT
    simt_cp_async_wait(N);
#else
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#endif
}
#endif  // __CUDACC__
#endif  // LLMC_MMA_H
