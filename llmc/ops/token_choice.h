/*
Choices that the token makes: of a table with k numbers for every token, the row of each position's. A router whose
layer goes by such a table (hash routing) is given its experts so.
    chosen (N, k) ints   tokens (N) ints   table (V, k) float: whole numbers below 2^24
Cost:   moves 2*N*k numbers.   Source: Roller et al. 2021, arXiv:2106.04426 (hash layers)
*/
#ifndef LLMC_TOKEN_CHOICE_H
#define LLMC_TOKEN_CHOICE_H
#include "../core/device.h"  // Device, cudaCheck
#include "../core/kernel.h"  // grid_first, grid_step, grid_blocks

// ---- plain C: read this first; it defines every bit ----

static inline void token_choice_ref(int* chosen, const int* tokens, const float* table, int N, int k) {
    for (size_t i = 0; i < (size_t)N * (size_t)k; i++) {
        chosen[i] = (int)table[(size_t)tokens[i / (size_t)k] * (size_t)k + i % (size_t)k];
    }
}

#ifndef __CUDACC__
static inline void token_choice(int* chosen, const int* tokens, const float* table, int N, int k, const Device* dev) {
    (void)dev;
    token_choice_ref(chosen, tokens, table, N, k);
}
#else  // ---- CUDA: a thread for each number ----
static __global__ void token_choice_kernel(int* chosen, const int* tokens, const float* table, int N, int k) {
    for (size_t i = grid_first<1>(); i < (size_t)N * (size_t)k; i += grid_step<1>()) {
        chosen[i] = (int)table[(size_t)tokens[i / (size_t)k] * (size_t)k + i % (size_t)k];
    }
}

static inline void token_choice(int* chosen, const int* tokens, const float* table, int N, int k, const Device* dev) {
    if (N == 0) { return; }
    const unsigned blocks = grid_blocks((size_t)N * (size_t)k, 1, dev);
    token_choice_kernel<<<blocks, GRID_BLOCK, 0, dev->stream>>>(chosen, tokens, table, N, k);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_TOKEN_CHOICE_H
