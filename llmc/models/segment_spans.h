/*
What attention over segments (segment_attention.h) walks along: of each segment (documents.h) what lies in each chunk of
this rank, and how attention.h is asked for it.
    SegmentAttention             q, k, v and the rest, and their sizes
    segment_span                 what of a segment lies in a chunk of this rank
    segment_none, segment_next   one after the other, of all segments and chunks
    segment_room                 n elements of scratch, so that the next ones begin at a multiple of 16
    segment_shape                of it, queries against keys of which one row has kv_row elements
    segment_from                 SegmentAttention from some position on
    segment_each_forward, segment_each_backward   attention of all of them, where this rank has the keys that they read
On a GPU attention of a chunk of all rows is one launch, however many segments they have (Segments.bounds).
Order:  chunk by chunk, in each segment by segment, ascending; in each as attention.h says.
*/
#ifndef LLMC_SEGMENT_SPANS_H
#define LLMC_SEGMENT_SPANS_H
#include "../core/floatx.h"             // floatX
#include "../ops/attention.h"           // AttentionShape, grouped_attention_forward, grouped_attention_backward
#include "../ops/documents.h"           // Segments, Segment
#include "../ranks/context_parallel.h"  // CpRows, RankGroup

typedef struct {
    int NH, NKV, HS;       // heads of queries; of keys and values; channels of a head
    int window;            // so many keys a query sees, itself included; 0: all before it
    size_t q_row, kv_row;  // elements from one position to the next, of q, of k and v
    floatX *q, *k, *v, *out;
    float *max, *inv;
    const RankGroup* cp;   // NULL: this rank has whole rows
    floatX* room;          // with cp: segment_room_elements
    const RankGroup* keys; // ranks that share a head of keys with this one, with --tp (shared_keys.h); NULL: none do
    floatX* shared_room;   // with such: shared_keys_elements
} SegmentAttention;

static inline size_t segment_room(size_t n) { return (n + 15) / 16 * 16; }

// queries t0 .. T-1 of a segment, which this rank has from position `first` of its own on
typedef struct {
    Segment of;
    int t0, T;
    size_t first;
    int chunk, segment;  // their numbers
} SegmentSpan;

// what of x->segment lies in x->chunk; 0: nothing
static inline int segment_span(SegmentSpan* x, Segment s, const CpRows* rows) {
    const int row = (int)(s.first / (size_t)rows->T), from = (int)(s.first % (size_t)rows->T);
    const int chunk = rows->begin[x->chunk], chunk_end = chunk + rows->n;
    const int begin = chunk > from ? chunk : from, end = chunk_end < from + s.T ? chunk_end : from + s.T;
    x->of = s;
    x->t0 = begin - from, x->T = end - from;
    x->first = cp_own_at(rows, x->chunk, row) + (size_t)(begin - chunk);
    return begin < end;
}

// before the first
static inline SegmentSpan segment_none(void) {
    SegmentSpan x;
    memset(&x, 0, sizeof x);
    x.segment = -1;
    return x;
}

// to the next one; 0: there is none
static inline int segment_next(SegmentSpan* x, const Segments* segments, const CpRows* rows) {
    for (;;) {
        if (++x->segment == segments->n) { x->segment = 0, x->chunk++; }
        if (x->chunk == rows->n_chunks) { return 0; }
        if (segment_span(x, segments->at[x->segment], rows)) { return 1; }
    }
}

// kv_row: of the keys that are read, this rank's or those of all
static inline AttentionShape segment_shape(const SegmentAttention* x, const SegmentSpan* s, size_t kv_row) {
    AttentionShape a;
    a.B = s->of.rows, a.T = a.keys = s->T, a.t0 = s->t0;
    a.NH = x->NH, a.NKV = x->NKV, a.HS = x->HS;
    a.window = x->window < s->T ? x->window : 0, a.scale = 1.0f / sqrtf((float)x->HS);
    a.q_row = x->q_row, a.q_seq = (s->T - s->t0) * a.q_row;
    a.out_row = (size_t)x->NH * x->HS, a.out_seq = (s->T - s->t0) * a.out_row;
    a.kv_row = kv_row, a.kv_seq = s->of.T * a.kv_row;
    a.documents = NULL, a.documents_T = 0;
    return a;
}

// x from position `first` of its queries and position `first_key` of its keys on
static inline SegmentAttention segment_from(const SegmentAttention* x, size_t first, size_t first_key) {
    SegmentAttention from = *x;
    from.q += first * x->q_row, from.out += first * x->NH * x->HS;
    from.k += first_key * x->kv_row, from.v += first_key * x->kv_row;
    from.max += first * x->NH, from.inv += first * x->NH;
    return from;
}

// where the bounds of positions are known, all rows are called for at once
static inline Segments segment_calls_(const Segments* segments, Segment* whole, const CpRows* rows) {
    Segments calls = *segments;
    whole->first = 0, whole->rows = rows->B, whole->T = rows->T;
    if (segments->bounds) { calls.n = 1, calls.at = whole; }
    return calls;
}

static inline AttentionShape segment_call_shape_(const SegmentAttention* x, const SegmentSpan* s,
                                                 const Segments* segments, const CpRows* rows) {
    AttentionShape shape = segment_shape(x, s, x->kv_row);
    shape.documents = segments->bounds, shape.documents_T = rows->T;
    return shape;
}

// rows: those of q, k and v; dk, dv: where the gradients of keys go, from the queries in each chunk
static inline void segment_each_forward(const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                        const Device* dev) {
    Segment whole;
    const Segments calls = segment_calls_(segments, &whole, rows);
    for (SegmentSpan s = segment_none(); segment_next(&s, &calls, rows);) {
        const SegmentAttention at = segment_from(x, s.first, s.of.first);
        const AttentionShape shape = segment_call_shape_(x, &s, segments, rows);
        grouped_attention_forward(at.out, at.max, at.inv, at.q, at.k, at.v, &shape, dev);
    }
}

static inline void segment_each_backward(floatX* dq, floatX* const* dk, floatX* const* dv, const floatX* dout,
                                         const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                         const Device* dev) {
    Segment whole;
    const Segments calls = segment_calls_(segments, &whole, rows);
    for (SegmentSpan s = segment_none(); segment_next(&s, &calls, rows);) {
        const size_t k = s.of.first * x->kv_row;
        const SegmentAttention at = segment_from(x, s.first, s.of.first);
        const AttentionShape shape = segment_call_shape_(x, &s, segments, rows);
        grouped_attention_backward(dq + s.first * x->q_row, dk[s.chunk] + k, dv[s.chunk] + k,
                                   dout + s.first * x->NH * x->HS, at.out, at.max, at.inv, at.q, at.k, at.v, &shape,
                                   dev);
    }
}
#endif  // LLMC_SEGMENT_SPANS_H
