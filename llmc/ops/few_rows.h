/*
A few rows through a weight, on tensor cores: what a linear layer is in generation, where a call has one position, or
one of each text. Fast CUDA builds, bf16: matmul.h and grouped_matmul.h call it for FEW_ROWS rows at most.
    out (M, OC) bf16 or float   rows of x (.., C), chosen by a function   weight (OC, C)   bias (OC) or NULL
The weight is bf16 or, where it does not learn, fp8 or fp4 (core/stored.h), whose codes become bf16 in registers: the
bits of the same numbers as bf16 (widen.h).
A block owns FEW_OUTPUTS outputs of all the rows. Its warps share the terms of these sums among themselves, FEW_TERMS
neighbouring ones in turn, and are added up at the end.
Cost:   memory bound: each element of the weight is read once, 16 bytes a lane, straight into the registers that mma
        takes it from; no tile in shared memory, and no barrier before the sums are done. 2*OC*C bytes, beside which
        the rows, which every block reads from the caches, are small. Judge it in GB/s. mma computes 8 or 16 rows,
        whether they exist or not: 8 or 16 operations for each byte of the weight, of which an H200 has time for 206.
        By ptxas of CUDA 13.0, without spills, registers of a thread on sm_80, sm_90: 8 rows 80, 80, 16 rows 104, 110:
        two blocks or three on a multiprocessor. The loop is unrolled so that loads of two steps, 4 KiB of a warp and
        32 KiB of a block, can be under way together. fp8: 8 bytes a lane, half of the memory, 64 to 94 registers on
        sm_90; fp4: 4 bytes, a quarter, 80 to 95.
Error:  as matmul.h.
Order:  a step of FEW_TERMS terms is four mma, ascending; which 16 of its terms each one adds is few_rows_step_'s. A
        warp chains over its steps, then warps are added in order, then the bias. C alone decides all that: a row has
        the same bits alone and with any 15 others, and so a text beside other texts.
*/
#ifndef LLMC_FEW_ROWS_H
#define LLMC_FEW_ROWS_H
#if defined(__CUDACC__) && !defined(EXACT)
#include "../core/kernel.h"  // WARP, bf16, pack_load, pack_fits, from_float
#include "../core/mma.h"     // mma_m16n8k16
#include "widen.h"           // widen_load, widen_in_packs

enum {
    FEW_ROWS = 16,     // at most
    FEW_OUTPUTS = 16,  // of a block: rows of the weight that are the operand a of one mma
    FEW_WARPS = 8,     // of a block
    FEW_THREADS = FEW_WARPS * WARP,
    FEW_TERMS = 64,                // of a step: 128 bytes of each row of the weight, a whole line
    FEW_STRIDE = FEW_OUTPUTS + 4,  // floats from one row's sums to the next: stores of a warp meet no bank twice
};

// elements k..k+7 of a row as four registers; zeros beyond its K, and where there is no row
__device__ inline Pack<unsigned, 4> few_rows_load_(const bf16* row, int k, int K) {
    const Pack<unsigned, 4> none = {{0, 0, 0, 0}};
    return row && k < K ? pack_load<4>((const unsigned*)(row + k)) : none;
}

// ---- rows of a weight, which are bf16 or codes that become bf16 in registers ----

// elements k..k+7 of a row as four registers; a row that does not exist is all zero
struct FewRow {
    const bf16* at;
    __device__ Pack<unsigned, 4> load(int k, int K) const { return few_rows_load_(at, k, K); }
};

struct FewHalves {
    const bf16* data;
    int C;
    typedef FewRow Row;
    __device__ Row row(int oc) const { return {data + (size_t)oc * C}; }
    __device__ FewHalves from(size_t first) const { return {data + first * C, C}; }  // ... at another row
};

// KIND is all that is asked of the matrix's own, so that a load has no branch
template <Stored KIND>
struct FewCodesRow {
    const void *at, *scales;
    int block_columns;
    __device__ Pack<unsigned, 4> load(int k, int K) const {
        Pack<unsigned, 4> loaded = {{0, 0, 0, 0}};
        if (!at || k >= K) { return loaded; }
        StoredMatrix m = {at, KIND, 1, K, 1, scales, 1, block_columns};
        Pack<bf16, 8> x;
        store_floats(x.x, widen_load<8>(m, scales, 0, k));
        memcpy(&loaded, &x, sizeof loaded);
        return loaded;
    }
};

template <Stored KIND>
struct FewCodes {
    StoredMatrix m;
    size_t first;
    typedef FewCodesRow<KIND> Row;
    __device__ Row row(int oc) const {
        const size_t r = first + oc, at = r * m.columns;
        const void* scales = KIND == STORED_FP8 ? (const void*)stored_row_scales(&m, (int)r)
                                                : (const void*)stored_row_exponents(&m, (int)r);
        return {(const char*)m.data + (KIND == STORED_FP4 ? at / 2 : at), scales, m.block_columns};
    }
    __device__ FewCodes from(size_t r) const { return {m, first + r}; }
};

// terms k..k+63 join the sums of this warp. w: this lane's two rows of the weight, x: its row in each block of eight.
// The four lanes of a row have 8 neighbouring terms each: a mma takes the first or the last four of them, in either
// operand the same, and it is all one to a sum which of its terms mma calls the first
template <int TILES, typename Row>
__device__ inline void few_rows_step_(float (&sums)[TILES][4], const Row (&w)[2], const bf16* const (&x)[TILES], int k,
                                      int K) {
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const int first = k + FEW_TERMS / 2 * half + threadIdx.x % 4 * 8;
        const Pack<unsigned, 4> upper = w[0].load(first, K), lower = w[1].load(first, K);
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const Pack<unsigned, 4> row = few_rows_load_(x[tile], first, K);
            #pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const unsigned a[4] = {upper.x[i], lower.x[i], upper.x[i + 1], lower.x[i + 1]};
                const unsigned b[2] = {row.x[i], row.x[i + 1]};
                mma_m16n8k16(sums[tile], a, b, sums[tile]);
            }
        }
    }
}

// Outputs first..first+15, as many as there are, of n_rows <= 8 * TILES rows; out is at the first of these. Row s of
// the operand is row_of(s) of x. weight: FewHalves or FewCodes. Block is (FEW_THREADS); all its threads make this call,
// once
template <int TILES, typename Out, typename RowOf, typename Weight>
__device__ inline void few_rows_outputs(Out* out, const bf16* x, RowOf row_of, const Weight& weight, const Out* bias,
                                        int n_rows, int first, int C, int OC) {
    __shared__ float of_warps[FEW_WARPS][8 * TILES][FEW_STRIDE];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4;
    typename Weight::Row w[2] = {};
    const bf16* row[TILES];
    float sums[TILES][4];
    for (int i = 0; i < 2; i++) {
        const int oc = first + group + 8 * i;
        if (oc < OC) { w[i] = weight.row(oc); }
    }
    for (int tile = 0; tile < TILES; tile++) {
        const int s = 8 * tile + group;
        row[tile] = s < n_rows ? x + (size_t)row_of(s) * C : NULL;
        sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0.0f;
    }
    #pragma unroll 2
    for (int k = warp * FEW_TERMS; k < C; k += FEW_WARPS * FEW_TERMS) { few_rows_step_(sums, w, row, k, C); }
    for (int tile = 0; tile < TILES; tile++) {
        for (int i = 0; i < 4; i++) {  // sums[0], [1]: an output of two neighbouring rows; [2], [3]: that 8 below
            of_warps[warp][8 * tile + lane % 4 * 2 + i % 2][group + i / 2 * 8] = sums[tile][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_rows * FEW_OUTPUTS; i += FEW_THREADS) {
        const int s = i / FEW_OUTPUTS, oc = i % FEW_OUTPUTS;
        if (first + oc >= OC) { continue; }
        float total = of_warps[0][s][oc];
        for (int other = 1; other < FEW_WARPS; other++) { total += of_warps[other][s][oc]; }
        if (bias) { total += to_float(bias[first + oc]); }
        out[(size_t)s * OC + first + oc] = from_float<Out>(total);
    }
}

// are these rows few, and whole packs?
static inline int few_rows_fit(const bf16* x, const bf16* weight, int n_rows, int C) {
    return n_rows <= FEW_ROWS && pack_fits(x, C) && pack_fits(weight, C);
}

// ... and is the weight one of codes? A bf16 is none
static inline int few_codes_fit(const bf16* x, const StoredMatrix* weight, int n_rows) {
    const int is_code = weight->kind == STORED_FP8 || weight->kind == STORED_FP4;
    return is_code && n_rows <= FEW_ROWS && pack_fits(x, weight->columns) && widen_in_packs(x, weight);
}

// launch(FewCodes of its kind)
template <typename Launch>
static inline void few_codes_launch(const StoredMatrix* weight, Launch launch) {
    if (weight->kind == STORED_FP8) { launch(FewCodes<STORED_FP8>{*weight, 0}); }
    else { launch(FewCodes<STORED_FP4>{*weight, 0}); }
}
#endif  // __CUDACC__, not EXACT
#endif  // LLMC_FEW_ROWS_H
