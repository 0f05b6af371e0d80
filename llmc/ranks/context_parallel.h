/*
What ranks that share the positions of rows (context_ranks.h) exchange of them on the device: keys and values, which the
queries of one rank read from all.
    cp_gather   each rank has `width` bytes for each of its own positions, every `stride` bytes: all get those of all,
                (B, T, width)
    cp_gather_floats  each rank has n floats about its own: all get those of all, in the order of places
    cp_sum      each rank has a share of a sum for all positions (B, T, L): each gets the sums of its own, L of every
                `row` elements
    cp_to_heads      each rank has all heads of its own positions: each gets its own heads (cp_heads) of all positions,
                     (B, T, L)
    cp_to_positions  and back. Of a head that several ranks have each has a share, and shares are added
    cp_sends    bytes that a rank sends for each of these, of rows of `width` bytes: all, or one rank's heads
    cp_attention_sends  of attention of a micro-batch, forward or back, by cp.by
    cp_heads_obstacle   why heads cannot be shared by so many ranks; NULL: they can
landing, pack: room as large as all positions together, of the channels that go to one rank.
Order:  cp_sum and cp_to_positions add shares one to the next in the order of places, each sum rounded to floatX.
*/
#ifndef LLMC_CONTEXT_PARALLEL_H
#define LLMC_CONTEXT_PARALLEL_H
#include "../core/floatx.h"   // floatX
#include "../ops/residual.h"  // residual_forward
#include "context_ranks.h"    // CpRows, RankGroup, rank_group_exchange

// how the queries of a rank meet the keys of others (models/segment_attention.h)
typedef enum { CP_BY_GATHER, CP_BY_RING, CP_BY_HEADS } CpBy;
static const char* const CP_BY_NAMES = "gather|ring|heads";

// of n heads of HS channels each rank has `each`: those of place p begin at head p * n / size. If there are fewer heads
// than ranks, neighbours have the same one
typedef struct { int n, each, HS; } CpHeads;

static inline CpHeads cp_heads(int n, int HS, const RankGroup* x) {
    const CpHeads h = {n, n > x->size ? n / x->size : 1, HS};
    return h;
}

static inline int cp_heads_first(const CpHeads* h, const RankGroup* x, int place) { return place * h->n / x->size; }

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

static inline void cp_to_heads(floatX* all, const floatX* own, size_t row, floatX* pack, floatX* landing,
                               const CpHeads* h, int B, int T, const RankGroup* x, const Device* dev) {
    const CpRows mine = cp_rows(B, T, x);
    const int n_own = cp_positions(&mine);
    const size_t width = sizeof(floatX) * (size_t)(h->each * h->HS), n_bytes = width * (size_t)n_own;
    for (int p = 0; p < x->size; p++) {
        char* to = (char*)(p == x->place ? landing : pack) + n_bytes * (size_t)p;
        device_copy_strips(to, width, own + cp_heads_first(h, x, p) * h->HS, sizeof(floatX) * row, width, n_own, dev);
    }
    rank_group_exchange(landing, pack, n_bytes, n_bytes, x, dev);
    for (int p = 0; p < x->size; p++) {
        cp_strips_((char*)landing + n_bytes * (size_t)p, (char*)all, 1, width, B, T, x, p, dev);
    }
}

static inline void cp_to_positions(floatX* own, size_t row, floatX* all, floatX* pack, floatX* landing,
                                   const CpHeads* h, int B, int T, const RankGroup* x, const Device* dev) {
    const CpRows mine = cp_rows(B, T, x);
    const int n_own = cp_positions(&mine);
    const size_t L = (size_t)(h->each * h->HS), n = L * (size_t)n_own, width = sizeof(floatX) * L;
    for (int p = 0; p < x->size; p++) {
        floatX* to = (p == x->place ? landing : pack) + n * (size_t)p;
        cp_strips_((char*)to, (char*)all, 0, width, B, T, x, p, dev);
    }
    rank_group_exchange(landing, pack, sizeof(floatX) * n, sizeof(floatX) * n, x, dev);
    for (int p = 0, end; p < x->size; p = end) {  // p .. end-1 have the same heads
        floatX* sum = landing + n * (size_t)p;
        const int first = cp_heads_first(h, x, p);
        for (end = p + 1; end < x->size && cp_heads_first(h, x, end) == first; end++) {
            residual_forward(sum, sum, landing + n * (size_t)end, n, dev);
        }
        device_copy_strips(own + first * h->HS, sizeof(floatX) * row, sum, width, width, n_own, dev);
    }
}

static inline double cp_sends(const RankGroup* x, int B, int T, double width) {
    return (x->size - 1.0) / x->size * (double)B * T * width;
}

// gather: keys and values, on the way back again, and their gradients. ring: the same, but that gradients make a hop
// more. heads: what goes to own heads and what comes back, q k v | out; on the way back q k v out dout | dq dk dv
static inline double cp_attention_sends(const RankGroup* x, int NH, int NKV, int HS, int is_back, int B, int T) {
    if (x->by == CP_BY_HEADS) {
        const int each = cp_heads(NH, HS, x).each + cp_heads(NKV, HS, x).each;
        return (is_back ? 4.0 : 2.0) * each * cp_sends(x, B, T, sizeof(floatX) * (double)HS);
    }
    const double hop = sizeof(floatX) * 2.0 / x->size * (double)B * T * (NKV * HS);
    const double sums = x->by == CP_BY_RING ? x->size : x->size - 1.0;
    return hop * (x->size - 1.0) + (is_back ? hop * sums : 0.0);
}

static inline const char* cp_heads_obstacle(int NH, int NKV, int size) {
    if (NH % size != 0) { return "heads of queries"; }
    return NKV % size == 0 || size % NKV == 0 ? NULL : "heads of keys, or a multiple of these";
}
#endif  // LLMC_CONTEXT_PARALLEL_H
