/*
--tp with more ranks than heads of keys: `keys` (Model.keys) is the group of neighbours that share one. Of its keys and
values each computes some channels, which are gathered: from there on all have the whole head, and do with it alike what
one rank does. Each has query heads of its own.
    keys_forward   linear_forward of keys, or of values, of N positions, in whole heads
    keys_own       of a gradient of these the channels whose rows of the matrix this rank has
    keys_part      elements of a position that a rank computes, or hands back; 0: it has whole heads
    shared_queries_gather   attention on the way back, of all query heads that read the head of keys
    shared_queries_take     ... and from their gradient to that of this rank's own
    shared_keys_elements    scratch
    shared_keys_repeats     does that need forward of them again?
    shared_keys_sends       bytes that a rank sends for N positions of a layer, forward and back
part: (N, keys_part) where heads are shared, else nothing.
Order:  dk and dv of a head are one chain through all of its query heads (attention.h). So that nothing is added across
        ranks, queries, outputs and their gradient are gathered in the group, and all of it computes the gradients of
        all of its heads: the bits are those of one rank.
Cost:   with g ranks in a group attention on the way back takes g times what a rank's own heads would, as long as with
        as many ranks as heads of keys; all else is divided by all ranks. A rank sends (g-1)/g of a head's keys and
        values forward, and g-1 times its own q, out and dout back.
*/
#ifndef LLMC_SHARED_KEYS_H
#define LLMC_SHARED_KEYS_H
#include "linear.h"         // Linear, linear_forward
#include "segment_spans.h"  // SegmentAttention, SegmentSpan

static inline int keys_part(const Model* m, int HS) { return model_shares_keys(m) ? HS / m->keys.size : 0; }

static inline void keys_forward(floatX* keys, floatX* part, const floatX* inp, Linear w, const Model* m, int N,
                                const Device* dev) {
    if (!model_shares_keys(m)) {
        linear_forward(keys, inp, w, N, dev);
        return;
    }
    linear_forward(part, inp, w, N, dev);
    tp_gather(keys, part, w.room, N, tp_one(w.OC * m->keys.size), &m->keys, dev);
}

// HK: channels of the heads that this rank has
static inline const floatX* keys_own(floatX* part, const floatX* dkeys, const Model* m, int HK, int N,
                                     const Device* dev) {
    if (!model_shares_keys(m)) { return dkeys; }
    tp_take(part, dkeys, N, tp_one(HK), &m->keys, dev);
    return part;
}

// ---- attention on the way back ----

// of all heads of a group; q, out and landing are in its room, too
typedef struct {
    SegmentAttention of;
    floatX *dout, *dq;
} SharedQueries;

static inline size_t shared_align_(size_t n) { return (n + 15) / 16 * 16; }

// a float may be two floatX. NH: query heads of a rank
static inline size_t shared_keys_elements(const Model* m, int NH, int HS, int N, int trains) {
    const size_t heads = (size_t)N * (size_t)(NH * m->keys.size), size = (size_t)HS;
    if (!model_shares_keys(m)) { return 0; }
    return trains ? 5 * shared_align_(heads * size) + 3 * 2 * shared_align_(heads) : shared_align_((size_t)N * size);
}

// With --cp-by heads a rank has max and inv of other heads than its own: they are computed again
static inline int shared_keys_repeats(const RankGroup* cp) { return cp && cp->size > 1 && cp->by == CP_BY_HEADS; }

static inline double shared_keys_sends(const Model* m, int NH, int HS, int N, int forward, int is_back) {
    const double g = m->keys.size, head = sizeof(floatX) * (double)HS;
    const double of_rows = shared_keys_repeats(&m->cp) ? 0.0 : 2.0 * sizeof(float);
    return forward * 2.0 * (g - 1.0) / g * N * head + is_back * (g - 1.0) * N * NH * (3.0 * head + of_rows);
}

// max or inv, whose heads stand beside each other in every span of a segment (attention_shape.h)
static inline void shared_rows_gather_(float* all, const float* own, float* landing, const SegmentAttention* x,
                                       const Segments* segments, const CpRows* rows, const Device* dev) {
    const RankGroup* keys = x->keys;
    const size_t n = (size_t)cp_positions(rows) * (size_t)x->NH;
    rank_group_exchange(landing, own, 0, sizeof(float) * n, keys, dev);
    for (SegmentSpan s = segment_none(); segment_next(&s, segments, rows);) {
        const size_t first = s.first * (size_t)x->NH, each = (size_t)x->NH * (size_t)(s.T - s.t0);
        const size_t width = sizeof(float) * each, row = width * (size_t)keys->size;
        for (int p = 0; p < keys->size; p++) {
            const float* from = (p == keys->place ? own : landing + n * (size_t)p) + first;
            device_copy_strips(all + first * (size_t)keys->size + each * (size_t)p, row, from, width, width,
                               s.of.rows, dev);
        }
    }
}

static inline SharedQueries shared_queries_gather(const floatX* dout, const SegmentAttention* x,
                                                  const Segments* segments, const CpRows* rows, const Device* dev) {
    const RankGroup* keys = x->keys;
    const int N = cp_positions(rows), NH = x->NH * keys->size, L = NH * x->HS;
    const size_t n = shared_align_((size_t)N * (size_t)L), n_rows = shared_align_((size_t)N * (size_t)NH);
    SharedQueries all = {*x, x->shared_room, x->shared_room + n};
    floatX *q = x->shared_room + 2 * n, *out = q + n, *landing = out + n;
    float *max = (float*)(landing + n), *inv = max + n_rows, *rows_landing = inv + n_rows;
    assert(x->NKV == 1 && x->q_row == (size_t)(x->NH * x->HS));
    tp_gather(q, x->q, landing, N, tp_one(L), keys, dev);
    tp_gather(out, x->out, landing, N, tp_one(L), keys, dev);
    tp_gather(all.dout, dout, landing, N, tp_one(L), keys, dev);
    if (!shared_keys_repeats(x->cp)) {
        shared_rows_gather_(max, x->max, rows_landing, x, segments, rows, dev);
        shared_rows_gather_(inv, x->inv, rows_landing, x, segments, rows, dev);
    }
    all.of.NH = NH, all.of.q_row = (size_t)L, all.of.keys = NULL;
    all.of.q = q, all.of.out = out, all.of.max = max, all.of.inv = inv;
    return all;
}

static inline void shared_queries_take(floatX* dq, const SharedQueries* all, const SegmentAttention* x,
                                       const CpRows* rows, const Device* dev) {
    tp_take(dq, all->dq, cp_positions(rows), tp_one(all->of.NH * x->HS), x->keys, dev);
}
#endif  // LLMC_SHARED_KEYS_H
