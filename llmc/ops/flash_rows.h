/*
What backward of attention on tensor cores needs of each row of a head, a FlashRow: its weights are
2^(score * scale * LOG2_E - level), and D, the sum of weights times their gradients, is dout . out, so that no pass over
the keys is needed for it. And what becomes of a product by them, in sums of a warpgroup (wide_tile.h).
Error:  of D: out is rounded, so e * sum |dout| |out| with e = 2^-8, and a gradient of a score has att * scale of it.
Cost:   reads dout and out once.
*/
#ifndef LLMC_FLASH_ROWS_H
#define LLMC_FLASH_ROWS_H
#ifdef __CUDACC__
#include "../core/device.h"  // Device, ceil_div
#include "../core/kernel.h"  // ALL_LANES, LOG2_E, Pack, bf16, kernel_exp2, cudaCheck

enum { FLASH_ROWS_THREADS = 128 };

struct FlashRow {
    float level, D;
};

// eight lanes per row, 16 bytes each; C is a multiple of 8. All lanes of the warp come
__device__ inline float flash_row_D(const bf16* dout, const bf16* out, int C) {
    float D = 0.0f;
    for (int c = threadIdx.x % 8 * 8; c < C; c += 64) {
        Pack<bf16, 8> x = pack_load<8>(dout + c), y = pack_load<8>(out + c);
        for (int j = 0; j < 8; j++) { D += to_float(x.x[j]) * to_float(y.x[j]); }
    }
    for (int step = 4; step > 0; step /= 2) { D += __shfl_xor_sync(ALL_LANES, D, step); }
    return D;
}

__device__ inline FlashRow flash_row(float max, float inv, float D) {
    return {max * LOG2_E - log2f(inv), D};  // inv 0: level Inf, so that all weights are 0
}

// rows (n_rows) of dout and out (n_rows, C), max and inv (n_rows)
__global__ static void flash_head_rows_kernel(FlashRow* rows, const bf16* dout, const bf16* out, const float* max,
                                              const float* inv, int64_t n_rows, int C) {
    const int64_t n = (int64_t)blockIdx.x * (FLASH_ROWS_THREADS / 8) + threadIdx.x / 8;
    const int64_t i = n < n_rows ? n : n_rows - 1;  // all lanes stay for the sum
    const float D = flash_row_D(dout + i * C, out + i * C, C);
    if (n < n_rows && threadIdx.x % 8 == 0) { rows[i] = flash_row(max[i], inv[i], D); }
}

static inline void flash_head_rows(FlashRow* rows, const bf16* dout, const bf16* out, const float* max,
                                   const float* inv, int64_t n_rows, int C, const Device* dev) {
    if (n_rows == 0) { return; }
    flash_head_rows_kernel<<<(unsigned)ceil_div(n_rows, FLASH_ROWS_THREADS / 8), FLASH_ROWS_THREADS, 0,
                             dev->stream>>>(rows, dout, out, max, inv, n_rows, C);
    cudaCheck(cudaGetLastError());
}

// ---- sums of a warpgroup: weights from scores, and ds / scale from datt; scale: with LOG2_E ----

// rows: of this lane's two
template <int N>
__device__ inline void flash_row_weights(float (&p)[1][N][4], const FlashRow (&rows)[2], float scale) {
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        float& x = p[0][i / 4][i % 4];
        x = kernel_exp2(x * scale - rows[i % 4 / 2].level);
    }
}
template <int N>
__device__ inline void flash_row_gradients(float (&ds)[1][N][4], const float (&p)[1][N][4], const FlashRow (&rows)[2]) {
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        float& x = ds[0][i / 4][i % 4];
        x = p[0][i / 4][i % 4] * (x - rows[i % 4 / 2].D);
    }
}

// transposed, of queries that are columns; columns: of this lane's first, and on
template <int N>
__device__ inline void flash_column_weights(float (&p)[1][N][4], const FlashRow* columns, float scale) {
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        float& x = p[0][i / 4][i % 4];
        x = kernel_exp2(x * scale - columns[i / 4 * 8 + i % 2].level);
    }
}
template <int N>
__device__ inline void flash_column_gradients(float (&ds)[1][N][4], const float (&p)[1][N][4],
                                              const FlashRow* columns) {
    #pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        float& x = ds[0][i / 4][i % 4];
        x = p[0][i / 4][i % 4] * (x - columns[i / 4 * 8 + i % 2].D);
    }
}
#endif  // __CUDACC__
#endif  // LLMC_FLASH_ROWS_H
