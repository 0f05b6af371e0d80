/*
Products of a warpgroup by wgmma, by what the PTX manual documents of them (PTX ISA 9.7.15) and a card confirmed: how descriptors,
the swizzle and registers place the elements. llmc/core/wgmma.h calls these instead of the instructions. A warp collective each:
a warp of the four computes its own 16 rows, so a warp that does not take part is noticed when the block ends.

A product may run at any time between its issue and its wait. Here it runs as late as it may, at the wait: it reads shared memory
then, and until then its sums hold a NaN of their own. So what reads sums too soon gets NaN, what writes them or the registers of a
is refused at the wait, and a tile that is overwritten too soon gives other sums.

Tensor cores read shared memory by another way (the "async proxy"): what a thread has copied there by cp.async they see only after
its fence.proxy.async. A product that reads such a copy without is refused. Plain stores are not tracked.
*/
#ifndef SIMT_WGMMA_H
#define SIMT_WGMMA_H
#include "simt_mma.h"  // simt_half_, SimtRow, simt_is_shared
#include <algorithm>

// addresses of shared memory as a descriptor has them: the first KiB belongs to the system, as on a card
enum { SIMT_SHARED_BEGINS = 1024, SIMT_SUMS_IN_FLIGHT = 0x7fc5a5a5 };

static inline unsigned simt_shared_address(const void* x, SIMT_SITE) {
    if (!simt_block.dynamic_shared || !simt_is_shared(x, 16)) { simt_fail("descriptor at %s:%d: %p is no dynamic shared memory", file, line, x); }
    return (unsigned)((const char*)x - simt_block.dynamic_shared) + SIMT_SHARED_BEGINS;
}

// ---- a matrix in shared memory ----

typedef struct {
    unsigned address, leading, stride;  // bytes: of the first element; from 64 columns to the next (transposed); from 8 rows to the next
    int transposed;
} SimtMatrix;

SIMT_TRUSTED static inline SimtMatrix simt_matrix_(uint64_t descriptor, int transposed) {
    SimtMatrix m = {(unsigned)(descriptor & 0x3fff) << 4, (unsigned)(descriptor >> 16 & 0x3fff) << 4, (unsigned)(descriptor >> 32 & 0x3fff) << 4, transposed};
    return m;
}

// where element k of row r of a, or of column r of b, lies: the swizzle moves 16-byte chunks within 128 bytes
SIMT_TRUSTED static inline unsigned simt_element_(SimtMatrix m, int r, int k) {
    unsigned at = m.address;
    if (m.transposed) {
        at += (unsigned)r / 64 * m.leading + (unsigned)k / 8 * m.stride + (unsigned)k % 8 * 128 + (unsigned)r % 64 * 2;
    } else {
        at += (unsigned)r / 8 * m.stride + (unsigned)r % 8 * 128 + (unsigned)k * 2;
    }
    return at ^ (at >> 7 & 7) << 4;
}

// of the 2 * rows chunks of 16 bytes that a product with `rows` rows of a, or columns of b, reads
SIMT_TRUSTED static inline unsigned simt_chunk_(SimtMatrix m, int i) {
    return m.transposed ? simt_element_(m, i / 16 * 8, i % 16) : simt_element_(m, i / 2, i % 2 * 8);
}

// all of it: x[k][r]
SIMT_TRUSTED static inline void simt_read_matrix_(float (*x)[256], SimtMatrix m, int rows) {
    for (int i = 0; i < 2 * rows; i++) {
        unsigned short chunk[8];
        __builtin_memcpy(chunk, simt_block.dynamic_shared + (simt_chunk_(m, i) - SIMT_SHARED_BEGINS), sizeof chunk);
        for (int j = 0; j < 8; j++) {
            float& to = m.transposed ? x[i % 16][i / 16 * 8 + j] : x[i % 2 * 8 + j][i / 2];
            to = simt_half_(chunk[j], 0);
        }
    }
}

// does a product that reads m read this copy?
SIMT_TRUSTED static inline int simt_reads_(SimtMatrix m, int rows, const SimtCopy& c) {
    const long at = c.to - simt_block.dynamic_shared + SIMT_SHARED_BEGINS;
    for (int i = 0; i < 2 * rows; i++) {
        const long chunk = (long)simt_chunk_(m, i);
        if (chunk >= at && chunk < at + c.n_bytes) { return 1; }
    }
    return 0;
}

// refused at its issue: a descriptor of another layout, or beyond the block's shared memory, or of copies that were not fenced
static inline void simt_check_matrix_(uint64_t descriptor, int transposed, int rows, const char* file, int line) {
    SimtBlock& b = simt_block;
    const SimtMatrix m = simt_matrix_(descriptor, transposed);
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) {
        simt_fail("wgmma at %s:%d: descriptor %016llx: expected 128-byte swizzle", file, line, (unsigned long long)descriptor);
    }
    if (m.stride != 1024) { simt_fail("wgmma at %s:%d: eight rows are %u bytes, expected 1024", file, line, m.stride); }
    if (m.address % 1024 >= (transposed ? 16 : 128)) {
        simt_fail("wgmma at %s:%d: the matrix begins at byte %u, which is no first row of eight", file, line, m.address);
    }
    unsigned last = 0;
    for (int i = 0; i < 2 * rows; i++) { last = std::max(last, simt_chunk_(m, i)); }
    if (m.address < SIMT_SHARED_BEGINS || last + 16 > SIMT_SHARED_BEGINS + b.dynamic_shared_bytes) {
        simt_fail("wgmma at %s:%d: reads bytes %u..%u, the block has %d..%zu", file, line, m.address, last + 15, SIMT_SHARED_BEGINS,
                  SIMT_SHARED_BEGINS + b.dynamic_shared_bytes - 1);
    }
    for (int i = 0; i < b.n_threads; i++) {
        for (const SimtCopy& c : b.threads[i].unfenced) {
            if (simt_reads_(m, rows, c)) { simt_fail("wgmma at %s:%d: reads what thread %d copied without fence.proxy.async", file, line, i); }
        }
    }
}

// ---- products ----

SIMT_TRUSTED static inline int simt_in_flight_(const SimtWgmma& p) {  // does anyone else hold what sums hold?
    for (int i = 0; i < 4 * p.n; i++) {
        unsigned bits;
        memcpy(&bits, p.sums + i, sizeof bits);
        if (bits != SIMT_SUMS_IN_FLIGHT) { return 0; }
    }
    return 1;
}

static inline void simt_wgmma(float* sums, int n, const unsigned* a, uint64_t a_matrix, uint64_t b_matrix, int a_transposed, int b_transposed,
                              int add, SIMT_SITE) {
    SimtThread& t = simt_self();
    simt_collective("wgmma", 0xffffffff, &simt_self(), NULL, file, line);
    if (simt_block.n_threads % 128 != 0) { simt_fail("wgmma at %s:%d: %d threads are no warpgroups of 128", file, line, simt_block.n_threads); }
    if (!t.wgmma_fenced) { simt_fail("wgmma at %s:%d: no wgmma.fence since the last wait", file, line); }
    if (simt_lane() == 0) {
        if (!a) { simt_check_matrix_(a_matrix, a_transposed, 64, file, line); }
        simt_check_matrix_(b_matrix, b_transposed, 8 * n, file, line);
    }
    SimtWgmma p = {sums, n, NULL, a, {0, 0, 0, 0}, a_matrix, b_matrix, a_transposed, b_transposed, add, t.n_product_groups, file, line};
    for (int i = 0; i < 4 && a; i++) { p.a_at_issue[i] = a[i]; }
    for (const SimtWgmma& other : t.products) {
        if (other.sums == sums) { p.value = other.value; }
    }
    if (!p.value) {  // the first of its sums under way
        p.value = new float[4 * n];
        memcpy(p.value, sums, sizeof(float) * 4 * (size_t)n);
        const unsigned bits = SIMT_SUMS_IN_FLIGHT;
        for (int i = 0; i < 4 * n; i++) { memcpy(sums + i, &bits, sizeof bits); }
    }
    t.products.push_back(p);
    t.n_products++;
}

// the 16 rows of a warp: a from shared memory, or from the registers of its lanes
SIMT_TRUSTED static inline void simt_rows_of_a_(float (*a)[16], SimtThread** lanes, size_t product, int warp) {
    static float x[16][256];
    const SimtWgmma& p = lanes[0]->products[product];
    if (!p.a) {
        simt_read_matrix_(x, simt_matrix_(p.a_matrix, p.a_transposed), 64);
        for (int row = 0; row < 16; row++) {
            for (int k = 0; k < 16; k++) { a[row][k] = x[k][16 * warp + row]; }
        }
        return;
    }
    for (int lane = 0; lane < SIMT_WARP; lane++) {
        const unsigned* r = lanes[lane]->products[product].a;
        for (int i = 0; i < 8; i++) { a[lane / 4 + (i / 2 % 2) * 8][lane % 4 * 2 + i % 2 + (i / 4) * 8] = simt_half_(r[i / 2], i % 2); }
    }
}

// sums are a chain, k ascending, as in simt_mma.h
SIMT_TRUSTED static inline void simt_multiply_(SimtThread** lanes, size_t product, int warp) {
    static float b[16][256];
    float a[16][16];
    const SimtWgmma& first = lanes[0]->products[product];
    simt_rows_of_a_(a, lanes, product, warp);
    simt_read_matrix_(b, simt_matrix_(first.b_matrix, first.b_transposed), 8 * first.n);
    float* value[SIMT_WARP];
    for (int lane = 0; lane < SIMT_WARP; lane++) { value[lane] = lanes[lane]->products[product].value; }
    for (int n = 0; n < first.n; n++) {
        SimtRow b_n[16], c[16];
        for (int k = 0; k < 16; k++) { __builtin_memcpy(&b_n[k], &b[k][8 * n], sizeof b_n[k]); }
        for (int lane = 0; lane < SIMT_WARP; lane++) {
            for (int i = 0; i < 4; i++) { c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = first.add ? value[lane][4 * n + i] : 0.0f; }
        }
        for (int row = 0; row < 16; row++) {
            for (int k = 0; k < 16; k++) { c[row] += a[row][k] * b_n[k]; }
        }
        for (int lane = 0; lane < SIMT_WARP; lane++) {
            for (int i = 0; i < 4; i++) { value[lane][4 * n + i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]; }
        }
    }
}

// the lanes of a warp give themselves; their oldest products, all but those of the newest groups, run
SIMT_TRUSTED static inline void simt_complete_wgmma_(void** parts, int) {
    SimtThread** lanes = (SimtThread**)parts;
    int warp = (int)(lanes[0] - simt_block.threads) / SIMT_WARP % 4;
    for (size_t i = 0; i < lanes[0]->products.size() && lanes[0]->products[i].group < lanes[0]->wait_until; i++) { simt_multiply_(lanes, i, warp); }
}

static inline void simt_wgmma_fence(SIMT_SITE) {
    simt_collective("wgmma.fence", 0xffffffff, &simt_self(), NULL, file, line);
    simt_self().wgmma_fenced = 1;
}
static inline void simt_wgmma_commit(SIMT_SITE) {
    simt_collective("wgmma.commit_group", 0xffffffff, &simt_self(), NULL, file, line);
    simt_self().n_product_groups++;
}

static inline void simt_wgmma_wait(int n, SIMT_SITE) {
    SimtThread& t = simt_self();
    t.wait_until = t.n_product_groups - n;
    for (const SimtWgmma& p : t.products) {
        if (p.group >= t.wait_until) { break; }
        if (!simt_in_flight_(p)) { simt_fail("wgmma at %s:%d: its sums were written before the wait at %s:%d", p.file, p.line, file, line); }
        if (p.a && memcmp(p.a, p.a_at_issue, sizeof p.a_at_issue) != 0) {
            simt_fail("wgmma at %s:%d: its operand a was written before the wait at %s:%d", p.file, p.line, file, line);
        }
    }
    simt_collective("wgmma.wait_group", 0xffffffff, &t, simt_complete_wgmma_, file, line);
    size_t done = 0;
    while (done < t.products.size() && t.products[done].group < t.wait_until) {
        const SimtWgmma& p = t.products[done++];
        int more = 0;  // products of the same sums behind it
        for (size_t i = done; i < t.products.size(); i++) { more |= t.products[i].value == p.value; }
        if (more) { continue; }
        memcpy(p.sums, p.value, sizeof(float) * 4 * (size_t)p.n);
        delete[] p.value;
    }
    t.products.erase(t.products.begin(), t.products.begin() + (long)done);
    t.wgmma_fenced = 0;  // what has arrived may be changed from here on
}

static inline void simt_fence_proxy_async() { simt_self().unfenced.clear(); }
#endif  // SIMT_WGMMA_H
