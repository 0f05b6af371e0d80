/*
What ranks that share the positions of rows (context_ranks.h) exchange of them on the device: keys and values, which the
queries of one rank read from all.
    cp_gather   each rank has `width` bytes for each of its own positions, every `stride` bytes: all get those of all,
                (B, T, width)
    cp_gather_floats  each rank has n floats about its own: all get those of all, in the order of places
    cp_sum      each rank has a share of a sum for all positions (B, T, L): each gets the sums of its own, L of every
                `row` elements
    cp_sends    floatX that a rank sends for either, of L channels
landing, pack: room as large as all positions together.
Order:  cp_sum adds shares one to the next in the order of places, each sum rounded to floatX.
*/
#ifndef LLMC_CONTEXT_PARALLEL_H
#define LLMC_CONTEXT_PARALLEL_H
#include "../core/floatx.h"   // floatX
#include "../ops/residual.h"  // residual_forward
#include "context_ranks.h"    // CpRows, RankGroup, rank_group_exchange

// the positions of `place`, n bytes of each: from all to own (or back), which lies one chunk behind the other
static inline void cp_strips_(char* own, char* all, int to_all, size_t width, int B, int T, const RankGroup* x,
                              int place, const Device* dev) {
    const CpRows r = cp_rows_of(B, T, x, place);
    const size_t strip = width * (size_t)r.n, row = width * (size_t)T;
    for (int i = 0; i < r.n_chunks; i++) {
        char *here = own + width * cp_own_at(&r, i, 0), *there = all + width * cp_at(&r, 0, r.begin[i]);
        if (to_all) { device_copy_strips(there, row, here, strip, strip, B, dev); }
        else { device_copy_strips(here, strip, there, row, strip, B, dev); }
    }
}

static inline void cp_gather(void* all, const void* own, size_t stride, void* landing, size_t width, int B, int T,
                             const RankGroup* x, const Device* dev) {
    const CpRows mine = cp_rows(B, T, x);
    const int n_own = cp_positions(&mine);
    const size_t n = width * (size_t)n_own;
    char* packed = (char*)landing + n * (size_t)x->place;
    device_copy_strips(packed, width, own, stride, width, n_own, dev);
    rank_group_exchange(landing, packed, 0, n, x, dev);
    for (int p = 0; p < x->size; p++) {
        cp_strips_((char*)landing + n * (size_t)p, (char*)all, 1, width, B, T, x, p, dev);
    }
}

// all (size, n)
static inline void cp_gather_floats(float* all, const float* own, size_t n, const RankGroup* x, const Device* dev) {
    rank_group_exchange(all, own, 0, sizeof(float) * n, x, dev);
    device_copy(all + n * (size_t)x->place, own, sizeof(float) * n, dev);
}

static inline void cp_sum(floatX* own, size_t row, floatX* all, floatX* pack, floatX* landing, int L, int B, int T,
                          const RankGroup* x, const Device* dev) {
    const CpRows mine = cp_rows(B, T, x);
    const int n_own = cp_positions(&mine);
    const size_t n = (size_t)L * (size_t)n_own, width = sizeof(floatX) * (size_t)L;
    for (int p = 0; p < x->size; p++) {
        floatX* to = (p == x->place ? landing : pack) + n * (size_t)p;
        cp_strips_((char*)to, (char*)all, 0, width, B, T, x, p, dev);
    }
    rank_group_exchange(landing, pack, sizeof(floatX) * n, sizeof(floatX) * n, x, dev);
    for (int p = 1; p < x->size; p++) { residual_forward(landing, landing, landing + n * (size_t)p, n, dev); }
    device_copy_strips(own, sizeof(floatX) * row, landing, width, width, n_own, dev);
}

static inline double cp_sends(const RankGroup* x, int B, int T, int L) {
    return (x->size - 1.0) / x->size * (double)B * T * L;
}
#endif  // LLMC_CONTEXT_PARALLEL_H
