/*
Attention over the segments of a batch (documents.h): each sees itself alone, and in it every position itself and those
before it, or a window of them.
    segment_none, segment_next  one after the other, what of each segment lies in a chunk of this rank
    segment_attention_forward   out, max and inv as attention.h has them
    segment_attention_backward  dq, dk and dv, written
    segment_room_elements       of --cp: scratch
q, out, dq (N, NH*HS), k, v, dk, dv (N, NKV*HS), max, inv (N, NH); q, k and v, and so their gradients, may be parts of
longer rows.
With --cp N are this rank's positions, in the order of context_ranks.h. Keys and values of all are gathered, forward and
again on the way back; each rank's queries have a share in the gradients of all keys, and shares are added.
Order:  segment by segment, ascending; in each as attention.h says. With --cp forward has the bits of one rank. dk and
        dv of a key are sums over the chunks of queries: of each rank its early one and then its late one, then the
        ranks in the order of their places; each sum is rounded to floatX.
*/
#ifndef LLMC_SEGMENT_ATTENTION_H
#define LLMC_SEGMENT_ATTENTION_H
#include "../core/floatx.h"             // floatX
#include "../ops/attention.h"           // AttentionShape, grouped_attention_forward, grouped_attention_backward
#include "../ops/documents.h"           // Segments, Segment
#include "../ranks/context_parallel.h"  // CpRows, cp_gather, cp_sum

typedef struct {
    int NH, NKV, HS;       // heads of queries; of keys and values; channels of a head
    int window;            // so many keys a query sees, itself included; 0: all before it
    size_t q_row, kv_row;  // elements from one position to the next, of q, of k and v
    floatX *q, *k, *v, *out;
    float *max, *inv;
    const RankGroup* cp;   // NULL: this rank has whole rows
    floatX* room;          // with cp: segment_room_elements
} SegmentAttention;

// queries t0 .. T-1 of a segment, which this rank has from position `first` of its own on
typedef struct {
    Segment of;
    int t0, T;
    size_t first;
    int chunk, segment;  // their numbers
} SegmentSpan;

// what of x->segment lies in x->chunk; 0: nothing
static inline int segment_span_(SegmentSpan* x, Segment s, const CpRows* rows) {
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
        if (segment_span_(x, segments->at[x->segment], rows)) { return 1; }
    }
}

// kv_row: of the keys that are read, this rank's or those of all
static inline AttentionShape segment_shape(const SegmentAttention* x, const SegmentSpan* s, size_t kv_row) {
    AttentionShape a;
    a.B = s->of.rows, a.T = s->T, a.t0 = s->t0;
    a.NH = x->NH, a.NKV = x->NKV, a.HS = x->HS;
    a.window = x->window < s->T ? x->window : 0, a.scale = 1.0f / sqrtf((float)x->HS);
    a.q_row = x->q_row, a.q_seq = (s->T - s->t0) * a.q_row;
    a.out_row = (size_t)x->NH * x->HS, a.out_seq = (s->T - s->t0) * a.out_row;
    a.kv_row = kv_row, a.kv_seq = s->of.T * a.kv_row;
    return a;
}

// ---- with --cp ----

enum { SEGMENT_ROOMS = 6 };  // as large as the keys of all: keys, values; of either chunk shares of dk and dv

static inline size_t segment_room_(size_t n) { return (n + 15) / 16 * 16; }

// n_positions of all ranks, HK channels of keys; trains: backward will come
static inline size_t segment_room_elements(int n_positions, int HK, int trains, const RankGroup* cp) {
    return cp ? (trains ? (size_t)SEGMENT_ROOMS : 3) * segment_room_((size_t)n_positions * (size_t)HK) : 0;
}

// keys of all positions, elements
static inline size_t segment_keys_(const SegmentAttention* x, const CpRows* rows) {
    return (size_t)rows->B * (size_t)rows->T * (size_t)(x->NKV * x->HS);
}

static inline floatX* segment_room_at_(const SegmentAttention* x, const CpRows* rows, int i) {
    return x->room + (size_t)i * segment_room_(segment_keys_(x, rows));
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

// x from position `first` of its queries and position `first_key` of its keys on
static inline SegmentAttention segment_from(const SegmentAttention* x, size_t first, size_t first_key) {
    SegmentAttention from = *x;
    from.q += first * x->q_row, from.out += first * x->NH * x->HS;
    from.k += first_key * x->kv_row, from.v += first_key * x->kv_row;
    from.max += first * x->NH, from.inv += first * x->NH;
    return from;
}

static inline void segment_attention_forward(const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                             const Device* dev) {
    const SegmentAttention whole = segment_whole_(x, rows, dev);
    for (SegmentSpan s = segment_none(); segment_next(&s, segments, rows);) {
        const SegmentAttention at = segment_from(&whole, s.first, s.of.first);
        const AttentionShape shape = segment_shape(x, &s, whole.kv_row);
        grouped_attention_forward(at.out, at.max, at.inv, at.q, at.k, at.v, &shape, dev);
    }
}

static inline void segment_attention_backward(floatX* dq, floatX* dk, floatX* dv, const floatX* dout,
                                              const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                              const Device* dev) {
    const SegmentAttention whole = segment_whole_(x, rows, dev);
    const SegmentShares shares = segment_shares_(dk, dv, x, rows, dev);
    for (SegmentSpan s = segment_none(); segment_next(&s, segments, rows);) {
        const size_t k = s.of.first * whole.kv_row;
        const SegmentAttention at = segment_from(&whole, s.first, s.of.first);
        const AttentionShape shape = segment_shape(x, &s, whole.kv_row);
        grouped_attention_backward(dq + s.first * x->q_row, shares.dk[s.chunk] + k, shares.dv[s.chunk] + k,
                                   dout + s.first * x->NH * x->HS, at.out, at.max, at.inv, at.q, at.k, at.v, &shape,
                                   dev);
    }
    segment_sum_shares_(dk, shares.dk, x, rows, dev);
    segment_sum_shares_(dv, shares.dv, x, rows, dev);
}
#endif  // LLMC_SEGMENT_ATTENTION_H
