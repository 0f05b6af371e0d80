/*
--cp-by ring: the keys and values of each rank that shares positions go round, from each to the next. At any time a rank
has those of one rank at hand, and the next ones are on their way while it computes.
    segment_ring_elements   of scratch
    segment_ring_forward, segment_ring_backward   as segment_attention.h has them
In turn s the rank of place p has the keys of place p - s. Its two chunks of queries (context_ranks.h) meet the two
chunks of keys: an earlier chunk is seen whole, its own up to each query, a later one not at all. With C = 2:
    place 0 has chunks 0, 3    turn 0  0 x 0, 3 x 0, 3 x 3    turn 1, keys 1, 2    3 x 1, 3 x 2
    place 1 has chunks 1, 2    turn 0  1 x 1, 2 x 1, 2 x 2    turn 1, keys 0, 3    1 x 0, 2 x 0
Ranks with one chunk of each row (models with layers that go along it) have these turns with that one alone.
Forward merges what the blocks give (attention_merge.h). On the way back keys and values go round once more, and behind
them the sums of their gradients, to which each rank adds its share; one more hop brings them home.
Order:  of a query, blocks are merged in the order of turns, in a turn the early chunk of keys before the late one; dq
        is the sum of what the blocks give in the same order. dk and dv of a key begin with the share of their own rank,
        then come the shares of the next places; a share is its early queries' and then its late queries'. Each result
        of a block and each sum is rounded to floatX. The order depends on C and on nothing else.
Error:  forward of n = 2C blocks is off from one rank's by attention_merge.h's bound of as many, in bf16 n * 2^-8 / 2.
Source: Liu et al. 2023, arXiv:2310.01889; both ends of a row on one rank: Brandon et al. 2023, arXiv:2311.09431
*/
#ifndef LLMC_SEGMENT_RING_H
#define LLMC_SEGMENT_RING_H
#include "../ops/attention_merge.h"  // attention_merge, attention_products
#include "segment_spans.h"           // SegmentAttention, SegmentSpan, segment_next

// keys and values, or their gradients, of the positions of one rank
enum { RING_HERE, RING_NEXT, RING_SUMS, RING_NEXT_SUMS, RING_EARLY, RING_LATE, RING_KEYS };
// of a block: out or dq; then those of backward: q and dq of all blocks
enum { RING_BLOCK, RING_Q, RING_DQ, RING_QUERIES };

static inline size_t segment_ring_statistics_(size_t n) {
    return segment_room((n * sizeof(float) + sizeof(floatX) - 1) / sizeof(floatX));
}

// n_positions of all ranks
static inline size_t segment_ring_elements(int n_positions, int NH, int NKV, int HS, int trains, const RankGroup* cp) {
    const size_t n = (size_t)(n_positions / cp->size);
    return (trains ? RING_KEYS : RING_SUMS) * segment_room(2 * n * (size_t)(NKV * HS)) +
           (trains ? RING_QUERIES : RING_Q) * segment_room(n * (size_t)(NH * HS)) +
           2 * segment_ring_statistics_(n * (size_t)NH);
}

typedef struct {
    const SegmentAttention* x;
    const CpRows* rows;
    size_t n, HQ, HK;         // positions of a rank; channels of all heads of queries, of keys
    float *max, *inv;         // of a block; backward: D of all keys is in `max`
    floatX *keys[RING_KEYS], *queries[RING_QUERIES];
} SegmentRing;

static inline SegmentRing segment_ring_(const SegmentAttention* x, const CpRows* rows) {
    SegmentRing r;
    r.x = x, r.rows = rows;
    r.n = (size_t)cp_positions(rows), r.HQ = (size_t)(x->NH * x->HS), r.HK = (size_t)(x->NKV * x->HS);
    const size_t n_statistics = segment_ring_statistics_(r.n * (size_t)x->NH);
    r.max = (float*)x->room, r.inv = (float*)(x->room + n_statistics);
    floatX* at = x->room + 2 * n_statistics;
    // what forward needs comes first: alone it has no room for the rest
    for (int i = 0; i < RING_SUMS; i++) { r.keys[i] = at, at += segment_room(2 * r.n * r.HK); }
    for (int i = 0; i < RING_QUERIES; i++) { r.queries[i] = at, at += segment_room(r.n * r.HQ); }
    for (int i = RING_SUMS; i < RING_KEYS; i++) { r.keys[i] = at, at += segment_room(2 * r.n * r.HK); }
    return r;
}

// the next rank gets what lies `here`, and what the one before had comes to `next`
static inline CommTicket segment_ring_pass_(const SegmentRing* r, int here, int next, const Device* dev) {
    return rank_group_pass(r->keys[next], r->keys[here], sizeof(floatX) * 2 * r->n * r->HK, r->x->cp, dev);
}

static inline void segment_ring_swap_(SegmentRing* r, int i, int k) {
    floatX* was = r->keys[i];
    r->keys[i] = r->keys[k], r->keys[k] = was;
}

// this rank's keys, then its values, to where they begin to go round
static inline void segment_ring_take_(const SegmentRing* r, const Device* dev) {
    const size_t width = sizeof(floatX) * r->HK, stride = sizeof(floatX) * r->x->kv_row;
    device_copy_strips(r->keys[RING_HERE], width, r->x->k, stride, width, (int)r->n, dev);
    device_copy_strips(r->keys[RING_HERE] + r->n * r->HK, width, r->x->v, stride, width, (int)r->n, dev);
}

// some queries and some of the keys that they see
typedef struct {
    SegmentSpan s;         // the queries
    AttentionShape shape;  // positions counted from the first of these keys on
    size_t first_key;      // position among those of the rank whose keys they are
} RingBlock;

// of the queries s with keys of a segment in a chunk of `of`; 0: they see none
static inline int segment_ring_block_(RingBlock* b, const SegmentRing* r, const SegmentSpan* s, int chunk,
                                      const CpRows* of) {
    const SegmentAttention* x = r->x;
    SegmentSpan keys;
    memset(&keys, 0, sizeof keys);
    keys.chunk = chunk;
    if (!segment_span(&keys, s->of, of) || keys.t0 >= s->T) { return 0; }
    const int n_keys = keys.T - keys.t0;
    if (x->window > 0 && s->t0 - x->window >= keys.T - 1) { return 0; }
    b->s = *s;
    b->shape = segment_shape(x, s, r->HK);
    b->shape.T -= keys.t0, b->shape.t0 -= keys.t0, b->shape.keys = n_keys;
    b->shape.window = x->window < b->shape.T ? x->window : 0;
    b->shape.kv_seq = (size_t)n_keys * r->HK;
    b->first_key = keys.first;
    return 1;
}

// keys: those of turn s
static inline CpRows segment_ring_rows_(const SegmentRing* r, int turn) {
    const RankGroup* cp = r->x->cp;
    return cp_rows_of(r->rows->B, r->rows->T, cp, (cp->place - turn + cp->size) % cp->size);
}

static inline void segment_ring_forward_turn_(const SegmentRing* r, int turn, const Segments* segments,
                                              const Device* dev) {
    const SegmentAttention* x = r->x;
    const CpRows of = segment_ring_rows_(r, turn);
    const floatX *k = r->keys[RING_HERE], *v = k + r->n * r->HK;
    RingBlock b;
    for (SegmentSpan s = segment_none(); segment_next(&s, segments, r->rows);) {
        const SegmentAttention at = segment_from(x, s.first, 0);
        for (int chunk = 0; chunk < of.n_chunks; chunk++) {
            if (!segment_ring_block_(&b, r, &s, chunk, &of)) { continue; }
            grouped_attention_forward(r->queries[RING_BLOCK], r->max, r->inv, at.q, k + b.first_key * r->HK,
                                      v + b.first_key * r->HK, &b.shape, dev);
            attention_merge(at.out, at.max, at.inv, (const floatX*)r->queries[RING_BLOCK], r->max, r->inv, s.of.rows,
                            s.T - s.t0, x->NH, x->HS, dev);
        }
    }
}

static inline void segment_ring_forward(const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                        const Device* dev) {
    SegmentRing r = segment_ring_(x, rows);
    device_zero(x->out, sizeof(floatX) * r.n * r.HQ, dev);
    device_zero(x->max, sizeof(float) * r.n * (size_t)x->NH, dev);
    device_zero(x->inv, sizeof(float) * r.n * (size_t)x->NH, dev);  // no key is seen yet
    segment_ring_take_(&r, dev);
    for (int turn = 0; turn < x->cp->size; turn++) {
        const int is_last = turn + 1 == x->cp->size;
        CommTicket keys = {0};
        if (!is_last) { keys = segment_ring_pass_(&r, RING_HERE, RING_NEXT, dev); }
        segment_ring_forward_turn_(&r, turn, segments, dev);
        if (is_last) { break; }
        comm_wait_device(x->cp->group, keys, dev);
        segment_ring_swap_(&r, RING_HERE, RING_NEXT);
    }
}

// dq of the blocks of this turn is added; the shares of dk and dv are in RING_EARLY, those of both chunks of queries
static inline void segment_ring_backward_turn_(const SegmentRing* r, int turn, const floatX* dout,
                                               const Segments* segments, const Device* dev) {
    const SegmentAttention* x = r->x;
    const CpRows of = segment_ring_rows_(r, turn);
    const size_t v = r->n * r->HK;
    const floatX* keys = r->keys[RING_HERE];
    RingBlock b;
    device_zero(r->keys[RING_EARLY], sizeof(floatX) * 2 * v, dev);
    device_zero(r->keys[RING_LATE], sizeof(floatX) * 2 * v, dev);
    for (SegmentSpan s = segment_none(); segment_next(&s, segments, r->rows);) {
        const SegmentAttention at = segment_from(x, s.first, 0);
        const size_t first = s.first * r->HQ, n = (size_t)s.of.rows * (size_t)(s.T - s.t0) * r->HQ;
        floatX *shares = r->keys[s.chunk == 0 ? RING_EARLY : RING_LATE], *dq = r->queries[RING_DQ] + first;
        for (int chunk = 0; chunk < of.n_chunks; chunk++) {
            if (!segment_ring_block_(&b, r, &s, chunk, &of)) { continue; }
            const size_t k = b.first_key * r->HK;
            b.shape.q_row = b.shape.out_row, b.shape.q_seq = b.shape.out_seq;
            block_attention_backward(r->queries[RING_BLOCK], shares + k, shares + v + k, dout + first,
                                     (const floatX*)at.out, (const float*)r->max + s.first * (size_t)x->NH,
                                     (const float*)at.max, (const float*)at.inv,
                                     (const floatX*)r->queries[RING_Q] + first, keys + k, keys + v + k, &b.shape, dev);
            residual_forward(dq, (const floatX*)dq, (const floatX*)r->queries[RING_BLOCK], n, dev);
        }
    }
    residual_forward(r->keys[RING_EARLY], (const floatX*)r->keys[RING_EARLY], (const floatX*)r->keys[RING_LATE], 2 * v,
                     dev);
}

static inline void segment_ring_backward(floatX* dq, floatX* dk, floatX* dv, const floatX* dout,
                                         const SegmentAttention* x, const Segments* segments, const CpRows* rows,
                                         const Device* dev) {
    SegmentRing r = segment_ring_(x, rows);
    const size_t q_width = sizeof(floatX) * r.HQ, k_width = sizeof(floatX) * r.HK;
    CommTicket keys = {0}, sums = {0};
    segment_ring_take_(&r, dev);
    device_copy_strips(r.queries[RING_Q], q_width, x->q, sizeof(floatX) * x->q_row, q_width, (int)r.n, dev);
    device_zero(r.queries[RING_DQ], q_width * r.n, dev);
    for (SegmentSpan s = segment_none(); segment_next(&s, segments, rows);) {
        attention_products(r.max + s.first * (size_t)x->NH, dout + s.first * r.HQ,
                           (const floatX*)x->out + s.first * r.HQ, s.of.rows, s.T - s.t0, x->NH, x->HS, dev);
    }
    for (int turn = 0; turn < x->cp->size; turn++) {
        const int is_last = turn + 1 == x->cp->size;
        if (!is_last) { keys = segment_ring_pass_(&r, RING_HERE, RING_NEXT, dev); }
        segment_ring_backward_turn_(&r, turn, dout, segments, dev);
        if (turn > 0) {
            comm_wait_device(x->cp->group, sums, dev);
            segment_ring_swap_(&r, RING_SUMS, RING_NEXT_SUMS);
            residual_forward(r.keys[RING_SUMS], (const floatX*)r.keys[RING_SUMS], (const floatX*)r.keys[RING_EARLY],
                             2 * r.n * r.HK, dev);
        } else {
            segment_ring_swap_(&r, RING_SUMS, RING_EARLY);
        }
        if (!is_last) {
            comm_wait_device(x->cp->group, keys, dev);
            segment_ring_swap_(&r, RING_HERE, RING_NEXT);
        }
        sums = segment_ring_pass_(&r, RING_SUMS, RING_NEXT_SUMS, dev);
    }
    comm_wait_device(x->cp->group, sums, dev);  // this rank's own come home
    const floatX* home = r.keys[RING_NEXT_SUMS];
    device_copy_strips(dq, sizeof(floatX) * x->q_row, r.queries[RING_DQ], q_width, q_width, (int)r.n, dev);
    device_copy_strips(dk, sizeof(floatX) * x->kv_row, home, k_width, k_width, (int)r.n, dev);
    device_copy_strips(dv, sizeof(floatX) * x->kv_row, home + r.n * r.HK, k_width, k_width, (int)r.n, dev);
}
#endif  // LLMC_SEGMENT_RING_H
