/*
Tensor cores and asynchronous copies, by what the PTX manual documents of them (PTX ISA 9.7.14 and 9.7.9.25). llmc/core/mma.h calls
these instead of the instructions. A warp collective each, except the copies, which a thread does for itself.

The manual gives where each element of a fragment lies, not in which order a tensor core adds, nor how it rounds in between.
This is therefore a model: the product of two bf16 is exact in a float, and the 16 of them are added to c as a chain, k ascending,
each sum rounded. Expect the bits of a GPU to differ in the last places, and test against a tolerance.

An asynchronous copy may happen at any time between its issue and its wait. Here it happens as late as it may, at the wait, and
its destination holds garbage from the issue on: so both a missing wait and a buffer overwritten while others read it are found.
*/
#ifndef SIMT_MMA_H
#define SIMT_MMA_H
#include "cuda_bf16.h"

// ---- d (16, 8) = a (16, 16) * b (16, 8) + c (16, 8); llmc/core/mma.h draws the fragments ----

struct SimtMma {
    float* d;
    const unsigned *a, *b;
    const float* c;
};

typedef float SimtRow __attribute__((vector_size(32)));  // 8 columns of b, c or d

SIMT_TRUSTED static inline float simt_half_(unsigned pair, int upper) {
    unsigned u = upper ? pair & 0xffff0000 : pair << 16;
    float x;
    __builtin_memcpy(&x, &u, sizeof x);
    return x;
}

// fragments of 32 lanes to plain matrices and back
SIMT_TRUSTED static inline void simt_complete_mma_(void** parts, int n) {
    float a[16][16];
    SimtRow b[16], c[16];
    for (int lane = 0; lane < n; lane++) {
        const SimtMma* m = (const SimtMma*)parts[lane];
        int group = lane / 4, t = lane % 4;
        for (int i = 0; i < 8; i++) { a[group + (i / 2 % 2) * 8][t * 2 + i % 2 + (i / 4) * 8] = simt_half_(m->a[i / 2], i % 2); }
        for (int i = 0; i < 4; i++) { b[t * 2 + i % 2 + (i / 2) * 8][group] = simt_half_(m->b[i / 2], i % 2); }
        for (int i = 0; i < 4; i++) { c[group + (i / 2) * 8][t * 2 + i % 2] = m->c[i]; }
    }
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) { c[row] += a[row][k] * b[k]; }
    }
    for (int lane = 0; lane < n; lane++) {
        float* d = ((const SimtMma*)parts[lane])->d;
        for (int i = 0; i < 4; i++) { d[i] = c[lane / 4 + (i / 2) * 8][lane % 4 * 2 + i % 2]; }
    }
}

static inline void simt_mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b, const float* c, SIMT_SITE) {
    SimtMma m = {d, a, b, c};
    simt_collective("mma", 0xffffffff, &m, simt_complete_mma_, file, line);
}

// ---- ldmatrix: n_matrices matrices of 8x8 elements of 16 bits from shared memory; lane 8 * j + r gives the address of row r of matrix j ----

struct SimtLoadMatrix {
    unsigned* r;
    const unsigned short* row;
    int n_matrices, transposed;
};

SIMT_TRUSTED static inline void simt_complete_load_matrix_(void** parts, int n) {
    for (int lane = 0; lane < n; lane++) {
        const SimtLoadMatrix* m = (const SimtLoadMatrix*)parts[lane];
        for (int j = 0; j < m->n_matrices; j++) {
            unsigned pair[2];
            for (int i = 0; i < 2; i++) {
                int row = m->transposed ? lane % 4 * 2 + i : lane / 4, col = m->transposed ? lane / 4 : lane % 4 * 2 + i;
                pair[i] = ((const SimtLoadMatrix*)parts[8 * j + row])->row[col];
            }
            m->r[j] = pair[0] | pair[1] << 16;
        }
    }
}

// is p .. p + n_bytes shared memory of this block?
static inline int simt_is_shared(const void* p, size_t n_bytes) {
    const char* c = (const char*)p;
    SimtBlock& b = simt_block;
    for (SimtShared& s : b.shared) {
        if (c >= s.memory && c + n_bytes <= s.memory + s.n_bytes) { return 1; }
    }
    return b.dynamic_shared && c >= b.dynamic_shared && c + n_bytes <= b.dynamic_shared + b.dynamic_shared_bytes;
}

static inline void simt_load_matrix_(unsigned* r, const void* row, int n_matrices, int transposed, const char* file, int line) {
    SimtLoadMatrix m = {r, (const unsigned short*)row, n_matrices, transposed};
    if (simt_lane() < 8 * n_matrices && (!simt_is_shared(row, 16) || (uintptr_t)row % 16 != 0)) {
        simt_fail("ldmatrix at %s:%d: lane %d: %p is no 16 bytes of shared memory at a multiple of 16", file, line, simt_lane(), row);
    }
    simt_collective("ldmatrix", 0xffffffff, &m, simt_complete_load_matrix_, file, line);
}
static inline void simt_ldmatrix_x4(unsigned* r, const void* row, int transposed, SIMT_SITE) { simt_load_matrix_(r, row, 4, transposed, file, line); }
static inline void simt_ldmatrix_x2(unsigned* r, const void* row, int transposed, SIMT_SITE) { simt_load_matrix_(r, row, 2, transposed, file, line); }

// ---- stmatrix: the way back: row r of matrix j goes to the address that lane 8 * j + r gives ----

struct SimtStoreMatrix {
    const unsigned* r;
    unsigned short* row;
    int transposed;
};

SIMT_TRUSTED static inline void simt_complete_store_matrix_(void** parts, int n) {
    for (int lane = 0; lane < n; lane++) {
        const SimtStoreMatrix* m = (const SimtStoreMatrix*)parts[lane];
        for (int j = 0; j < 4; j++) {
            for (int i = 0; i < 2; i++) {
                int row = m->transposed ? lane % 4 * 2 + i : lane / 4, col = m->transposed ? lane / 4 : lane % 4 * 2 + i;
                ((const SimtStoreMatrix*)parts[8 * j + row])->row[col] = (unsigned short)(m->r[j] >> 16 * i);
            }
        }
    }
}

static inline void simt_stmatrix_x4(void* row, const unsigned* r, int transposed, SIMT_SITE) {
    SimtStoreMatrix m = {r, (unsigned short*)row, transposed};
    if (!simt_is_shared(row, 16) || (uintptr_t)row % 16 != 0) {
        simt_fail("stmatrix at %s:%d: lane %d: %p is no 16 bytes of shared memory at a multiple of 16", file, line, simt_lane(), row);
    }
    simt_collective("stmatrix", 0xffffffff, &m, simt_complete_store_matrix_, file, line);
}

// ---- cp.async: n_bytes from global to shared memory, the first n_valid of them read and the rest zeros ----

static inline void simt_cp_async(void* shared, const void* global, int n_bytes, int n_valid, SIMT_SITE) {
    if (!simt_is_shared(shared, (size_t)n_bytes)) { simt_fail("cp.async at %s:%d: %p is no shared memory", file, line, shared); }
    if ((uintptr_t)shared % (uintptr_t)n_bytes != 0 || (uintptr_t)global % (uintptr_t)n_bytes != 0) {
        simt_fail("cp.async at %s:%d: %p or %p is no multiple of %d", file, line, shared, global, n_bytes);
    }
    if (n_valid < 0 || n_valid > n_bytes) { simt_fail("cp.async at %s:%d: %d of %d bytes are valid", file, line, n_valid, n_bytes); }
    char seen[16];
    memcpy(seen, global, (size_t)n_valid);  // the sanitizer reports a bad source here, where it was given
    memset(shared, simt_garbage(), (size_t)n_bytes);
    simt_self().copies.push_back(SimtCopy{(char*)shared, (const char*)global, n_bytes, n_valid, simt_self().n_groups});
}
static inline void simt_cp_async_16(void* shared, const void* global, int n_valid, SIMT_SITE) {
    simt_cp_async(shared, global, 16, n_valid, file, line);
}
static inline void simt_cp_async_commit() { simt_self().n_groups++; }

// until at most n of this thread's committed groups are on their way
static inline void simt_cp_async_wait(int n) {
    SimtThread& t = simt_self();
    size_t done = 0;
    while (done < t.copies.size() && t.copies[done].group < t.n_groups - n) {
        SimtCopy& c = t.copies[done++];
        memcpy(c.to, c.from, (size_t)c.n_valid);
        memset(c.to + c.n_valid, 0, (size_t)(c.n_bytes - c.n_valid));
        t.unfenced.push_back(c);
    }
    t.copies.erase(t.copies.begin(), t.copies.begin() + (long)done);
}
#endif  // SIMT_MMA_H
