/*
What the kernels of flash_delta.h and flash_delta_hopper.h share: the scratch of both passes, chunks as a block finds
them, and the gates of a chunk in shared memory.
*/
#ifndef LLMC_FLASH_DELTA_CHUNKS_H
#define LLMC_FLASH_DELTA_CHUNKS_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // bf16
#include "delta_shape.h"     // DeltaShape, DELTA_CHUNK

enum { FLASH_DELTA_V = 64 };         // channels of values of a block: a tile
enum { FLASH_DELTA_THREADS = 128 };  // 4 warps

// scratch of both passes. Gates: of each position of a row and head exp(G), exp(G_last - G) and G
struct FlashDelta {
    int* begins;            // (B, T + 1); the last: how many chunks there are
    float *eG, *fG, *G;     // (B, Hv, T)
    bf16 *P, *Y;            // (B, T, Hv, 64): the rows of the squares
    bf16 *u, *dD;           // (B, T, Hv, DV)
    float *dS;              // as `states`: dS+ of the chunk that ends where this one begins
    float *dS_last;         // (B, Hv, DK, DV): dS+ of the last chunk
};

// ---- chunks ----

__device__ inline size_t flash_delta_at_gate(const DeltaShape& s, int b, int h, int t) {
    return ((size_t)b * s.Hv + h) * s.T + t;
}
__device__ inline size_t flash_delta_at_square(const DeltaShape& s, int b, int t, int h) {
    return delta_g_(&s, b, t, h) * DELTA_CHUNK;
}

// a chunk of a row, as a block finds it
struct FlashDeltaChunk {
    int t, n, fresh;  // its positions; does a document begin with it?
};

__device__ inline FlashDeltaChunk flash_delta_chunk(const int* begins, const DeltaShape& s, int b, int i) {
    const int *of_row = begins + (size_t)b * (s.T + 1), t = of_row[i];
    FlashDeltaChunk c = {t, (i + 1 < of_row[s.T] ? of_row[i + 1] : s.T) - t, delta_starts_(&s, b, t)};
    return c;
}

// ---- the gates of a chunk in shared memory ----

struct FlashDeltaGates {
    float eG[DELTA_CHUNK], fG[DELTA_CHUNK], beta[DELTA_CHUNK];
};

// of position `threadIdx.x` of the chunk, in registers: read before they are needed. Beyond n: 0
__device__ inline void flash_delta_read_gates(float (&gates)[3], const FlashDelta& x, const float* beta,
                                              const DeltaShape& s, int b, int h, FlashDeltaChunk c) {
    const int i = threadIdx.x;
    const size_t at = flash_delta_at_gate(s, b, h, c.t) + i;
    gates[0] = gates[1] = gates[2] = 0.0f;
    if (i < c.n && i < DELTA_CHUNK) {
        gates[0] = x.eG[at], gates[1] = x.fG[at], gates[2] = beta[delta_g_(&s, b, c.t + i, h)];
    }
}
__device__ inline void flash_delta_keep_gates(FlashDeltaGates* to, const float (&gates)[3]) {
    const int i = threadIdx.x;
    if (i < DELTA_CHUNK) { to->eG[i] = gates[0], to->fG[i] = gates[1], to->beta[i] = gates[2]; }
}
#endif  // __CUDACC__
#endif  // LLMC_FLASH_DELTA_CHUNKS_H
