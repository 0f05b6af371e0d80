/*
Attention over the segments of a batch (documents.h): each sees itself alone, and in it every position itself and those
before it, or a window of them.
    segment_attention_forward   out, max and inv as attention.h has them
    segment_attention_backward  dq, dk and dv, written
    segment_room_elements       of --cp: scratch
q, out, dq (N, NH*HS), k, v, dk, dv (N, NKV*HS), max, inv of each position and head; q, k and v, and so their gradients,
may be parts of longer rows. Spans of segments and SegmentAttention: segment_spans.h.
With --cp N are this rank's positions, in the order of context_ranks.h, and queries meet keys of other ranks in one of
these ways (--cp-by):
    gather   keys and values of all are gathered, forward and again on the way back; each rank's queries have a share in
             the gradients of all keys, and shares are added
    ring     keys and values go round, and each rank meets one other's at a time: segment_ring.h
    heads    each rank gets all positions of some heads, and gives back their outputs: segment_heads.h
Where ranks of --tp share a head of keys the way back is that of all of their query heads, on each: shared_keys.h.
Order:  segment by segment, ascending; in each as attention.h says. With --cp forward has the bits of one rank, but for
        ring. gather: dk and dv of a key are sums over the chunks of queries: of each rank its early one and then its
        late one, then the ranks in the order of their places; each sum is rounded to floatX.
*/
#ifndef LLMC_SEGMENT_ATTENTION_H
#define LLMC_SEGMENT_ATTENTION_H
#include "segment_heads.h"  // segment_heads_forward, segment_heads_backward
#include "segment_ring.h"   // segment_ring_forward, segment_ring_backward
#include "segment_spans.h"  // SegmentAttention, segment_each_forward, segment_each_backward
#include "shared_keys.h"    // SharedQueries, shared_queries_gather, shared_queries_take

// ---- gather ----

enum { SEGMENT_ROOMS = 6 };  // as large as the keys of all: keys, values; of either chunk shares of dk and dv

// n_positions of all ranks; trains: backward will come, of NH heads, those of all ranks that share their keys
static inline size_t segment_room_elements(int n_positions, int NH, int NKV, int HS, int trains, const RankGroup* cp) {
    if (!cp) { return 0; }
    if (cp->by == CP_BY_RING) { return segment_ring_elements(n_positions, NH, NKV, HS, trains, cp); }
    if (cp->by == CP_BY_HEADS) { return segment_heads_elements(n_positions, NH, NKV, HS, trains, cp); }
    return (trains ? (size_t)SEGMENT_ROOMS : 3) * segment_room((size_t)n_positions * (size_t)(NKV * HS));
}

// keys of all positions, elements
static inline size_t segment_keys_(const SegmentAttention* x, const CpRows* rows) {
    return (size_t)rows->B * (size_t)rows->T * (size_t)(x->NKV * x->HS);
}

static inline floatX* segment_room_at_(const SegmentAttention* x, const CpRows* rows, int i) {
    return x->room + (size_t)i * segment_room(segment_keys_(x, rows));
}

// x with the keys and values of all positions
static inline SegmentAttention segment_whole_(const SegmentAttention* x, const CpRows* rows, const Device* dev) {
    SegmentAttention whole = *x;
    const size_t width = sizeof(floatX) * (size_t)(x->NKV * x->HS), stride = sizeof(floatX) * x->kv_row;
    if (!x->cp) { return whole; }
    floatX* landing = segment_room_at_(x, rows, 2);
    whole.k = segment_room_at_(x, rows, 0);
    whole.v = segment_room_at_(x, rows, 1);
    whole.kv_row = (size_t)(x->NKV * x->HS);
    cp_gather(whole.k, x->k, stride, landing, width, rows->B, rows->T, x->cp, dev);
    cp_gather(whole.v, x->v, stride, landing, width, rows->B, rows->T, x->cp, dev);
    return whole;
}

// where the shares of dk and dv go of the queries in each chunk
typedef struct { floatX *dk[CP_CHUNKS], *dv[CP_CHUNKS]; } SegmentShares;

// they are 0 for other keys; alone they are the gradients
static inline SegmentShares segment_shares_(floatX* dk, floatX* dv, const SegmentAttention* x, const CpRows* rows,
                                            const Device* dev) {
    const size_t n_bytes = sizeof(floatX) * segment_keys_(x, rows);
    SegmentShares s = {{dk, dk}, {dv, dv}};
    for (int i = 0; i < rows->n_chunks && x->cp; i++) {
        s.dk[i] = segment_room_at_(x, rows, 2 + 2 * i);
        s.dv[i] = segment_room_at_(x, rows, 3 + 2 * i);
        device_zero(s.dk[i], n_bytes, dev);
        device_zero(s.dv[i], n_bytes, dev);
    }
    return s;
}

// the gradients of this rank's keys and values from the shares of all; the keys of all are no longer needed
static inline void segment_sum_shares_(floatX* to, floatX* const shares[CP_CHUNKS], const SegmentAttention* x,
                                       const CpRows* rows, const Device* dev) {
    if (!x->cp) { return; }
    floatX *pack = segment_room_at_(x, rows, 0), *landing = segment_room_at_(x, rows, 1);
    for (int i = 1; i < rows->n_chunks; i++) {
        residual_forward(shares[0], shares[0], shares[i], segment_keys_(x, rows), dev);
    }
    cp_sum(to, x->kv_row, shares[0], pack, landing, x->NKV * x->HS, rows->B, rows->T, x->cp, dev);
}

// ---- both passes; rows: what this rank has of those of the batch ----

static inline void segment_attention_forward(const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                             const Device* dev) {
    if (x->cp && x->cp->by == CP_BY_RING) {
        segment_ring_forward(x, segments, rows, dev);
        return;
    }
    if (x->cp && x->cp->by == CP_BY_HEADS) {
        segment_heads_forward(x, segments, rows, dev);
        return;
    }
    const SegmentAttention whole = segment_whole_(x, rows, dev);
    segment_each_forward(&whole, segments, rows, dev);
}

// of query heads of which this rank has all that read its keys
static inline void segment_whole_backward_(floatX* dq, floatX* dk, floatX* dv, const floatX* dout,
                                           const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                           const Device* dev) {
    if (x->cp && x->cp->by == CP_BY_RING) {
        segment_ring_backward(dq, dk, dv, dout, x, segments, rows, dev);
        return;
    }
    if (x->cp && x->cp->by == CP_BY_HEADS) {
        segment_heads_backward(dq, dk, dv, dout, x, segments, rows, dev);
        return;
    }
    const SegmentAttention whole = segment_whole_(x, rows, dev);
    const SegmentShares shares = segment_shares_(dk, dv, x, rows, dev);
    segment_each_backward(dq, shares.dk, shares.dv, dout, &whole, segments, rows, dev);
    segment_sum_shares_(dk, shares.dk, x, rows, dev);
    segment_sum_shares_(dv, shares.dv, x, rows, dev);
}

static inline void segment_attention_backward(floatX* dq, floatX* dk, floatX* dv, const floatX* dout,
                                              const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                              const Device* dev) {
    if (!x->keys || x->keys->size == 1) {
        segment_whole_backward_(dq, dk, dv, dout, x, segments, rows, dev);
        return;
    }
    const SharedQueries all = shared_queries_gather(dout, x, segments, rows, dev);
    if (shared_keys_repeats(x->cp)) { segment_heads_forward(&all.of, segments, rows, dev); }
    segment_whole_backward_(all.dq, dk, dv, all.dout, &all.of, segments, rows, dev);
    shared_queries_take(dq, &all, x, rows, dev);
}
#endif  // LLMC_SEGMENT_ATTENTION_H
