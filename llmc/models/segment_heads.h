/*
--cp-by heads: ranks that share positions swap "own positions, all heads" for "all positions, own heads" before
attention and back behind it. Each then has whole rows, some of the heads, and does what one rank does.
    segment_heads_elements   of scratch
    segment_heads_forward, segment_heads_backward   as segment_attention.h has them
max, inv: of this rank's heads at all positions, which are as many as of all heads at its own.
Order:  out, dq, dk and dv have the bits of one rank, each sum being one chain on one rank. But where there are fewer
        heads of keys than ranks, neighbours share one: its dk and dv are sums of their shares, in the order of places,
        each sum rounded to floatX.
Source: Jacobs et al. 2023, arXiv:2309.14509
*/
#ifndef LLMC_SEGMENT_HEADS_H
#define LLMC_SEGMENT_HEADS_H
#include "segment_spans.h"  // SegmentAttention, segment_each_forward, segment_each_backward
#include <assert.h>

// as large as one rank's heads of all positions: of q out landing | dout dq, and of k v | dk dv; behind | with backward
enum { HEADS_Q, HEADS_OUT, HEADS_LANDING, HEADS_DOUT, HEADS_DQ, HEADS_QUERIES };
enum { HEADS_K, HEADS_V, HEADS_DK, HEADS_DV, HEADS_KEYS };

static inline size_t segment_heads_room_(int n_positions, const CpHeads* h) {
    return segment_room((size_t)n_positions * (size_t)(h->each * h->HS));
}

static inline size_t segment_heads_elements(int n_positions, int NH, int NKV, int HS, int trains, const RankGroup* cp) {
    const CpHeads q = cp_heads(NH, HS, cp), k = cp_heads(NKV, HS, cp);
    return (trains ? HEADS_QUERIES : HEADS_DOUT) * segment_heads_room_(n_positions, &q) +
           (trains ? HEADS_KEYS : HEADS_DK) * segment_heads_room_(n_positions, &k);
}

// one rank's heads: of queries and of keys, and its attention of whole rows
typedef struct {
    CpHeads q, k;
    CpRows rows;
    SegmentAttention of;
    floatX *queries[HEADS_QUERIES], *keys[HEADS_KEYS];
} SegmentHeads;

static inline SegmentHeads segment_heads_(const SegmentAttention* x, const CpRows* rows) {
    SegmentHeads h;
    const int N = rows->B * rows->T;
    floatX* at = x->room;
    assert(!cp_heads_obstacle(x->NH, x->NKV, x->cp->size));
    h.q = cp_heads(x->NH, x->HS, x->cp);
    h.k = cp_heads(x->NKV, x->HS, x->cp);
    h.rows = cp_rows_whole(rows->B, rows->T);
    for (int i = 0; i < HEADS_QUERIES; i++) {  // those of backward come last: forward alone has no room for them
        if (i == HEADS_DOUT) { at += (size_t)HEADS_DK * segment_heads_room_(N, &h.k); }
        h.queries[i] = at, at += segment_heads_room_(N, &h.q);
    }
    at = x->room + (size_t)HEADS_DOUT * segment_heads_room_(N, &h.q);
    for (int i = 0; i < HEADS_KEYS; i++) {
        if (i == HEADS_DK) { at += (size_t)(HEADS_QUERIES - HEADS_DOUT) * segment_heads_room_(N, &h.q); }
        h.keys[i] = at, at += segment_heads_room_(N, &h.k);
    }
    h.of = *x;
    h.of.NH = h.q.each, h.of.NKV = h.k.each;
    h.of.q_row = (size_t)(h.q.each * x->HS), h.of.kv_row = (size_t)(h.k.each * x->HS);
    h.of.q = h.queries[HEADS_Q], h.of.out = h.queries[HEADS_OUT];
    h.of.k = h.keys[HEADS_K], h.of.v = h.keys[HEADS_V];
    return h;
}

// pack: of HEADS_QUERIES, one that holds nothing now
static inline void segment_heads_take_(floatX* all, const floatX* own, size_t row, int pack, const CpHeads* heads,
                                       const SegmentHeads* h, const Device* dev) {
    cp_to_heads(all, own, row, h->queries[pack], h->queries[HEADS_LANDING], heads, h->rows.B, h->rows.T, h->of.cp, dev);
}

static inline void segment_heads_return_(floatX* own, size_t row, floatX* all, const CpHeads* heads,
                                         const SegmentHeads* h, const Device* dev) {
    cp_to_positions(own, row, all, h->queries[HEADS_Q], h->queries[HEADS_LANDING], heads, h->rows.B, h->rows.T,
                    h->of.cp, dev);
}

static inline void segment_heads_take_all_(const SegmentAttention* x, int pack, const SegmentHeads* h,
                                           const Device* dev) {
    segment_heads_take_(h->of.q, x->q, x->q_row, pack, &h->q, h, dev);
    segment_heads_take_(h->of.k, x->k, x->kv_row, pack, &h->k, h, dev);
    segment_heads_take_(h->of.v, x->v, x->kv_row, pack, &h->k, h, dev);
}

static inline void segment_heads_forward(const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                         const Device* dev) {
    const SegmentHeads h = segment_heads_(x, rows);
    segment_heads_take_all_(x, HEADS_OUT, &h, dev);
    segment_each_forward(&h.of, segments, &h.rows, dev);
    segment_heads_return_(x->out, (size_t)(x->NH * x->HS), h.of.out, &h.q, &h, dev);
}

static inline void segment_heads_backward(floatX* dq, floatX* dk, floatX* dv, const floatX* dout,
                                          const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                          const Device* dev) {
    const SegmentHeads h = segment_heads_(x, rows);
    const size_t row = (size_t)(x->NH * x->HS);
    floatX *ddq = h.queries[HEADS_DQ], *ddk = h.keys[HEADS_DK], *ddv = h.keys[HEADS_DV];
    segment_heads_take_all_(x, HEADS_DQ, &h, dev);
    segment_heads_take_(h.of.out, x->out, row, HEADS_DQ, &h.q, &h, dev);
    segment_heads_take_(h.queries[HEADS_DOUT], dout, row, HEADS_DQ, &h.q, &h, dev);
    segment_each_backward(ddq, &ddk, &ddv, h.queries[HEADS_DOUT], &h.of, segments, &h.rows, dev);
    segment_heads_return_(dq, x->q_row, ddq, &h.q, &h, dev);
    segment_heads_return_(dk, x->kv_row, ddk, &h.k, &h, dev);
    segment_heads_return_(dv, x->kv_row, ddv, &h.k, &h, dev);
}
#endif  // LLMC_SEGMENT_HEADS_H
