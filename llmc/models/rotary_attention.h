/*
Attention whose queries and keys turn with their position (RoPE), in all channels of a head or in its first ones, over
the segments of a batch: each counts its positions from 0 and sees itself alone (segment_attention.h).
    rotary_attention_forward    turns q and k where they lie; out, max and inv as attention.h has them
    rotary_attention_backward   dq, dk and dv of what q, k and v were before they turned
    rotary_attention_cached     in generation, of several texts (cached_text.h), each with a length of its own: new keys
                                and values go to the text's row of the cache and turn there
    rotary_attention_pass       one of these two: of the batch, or of the texts that it has in place of one
q, out (N, NH*HS), k, v (N, NKV*HS), max, inv of each position and head. Cached: k and v of RotaryAttention are the
cache, (rows, room, NKV*HS), whose keys have turned; all others are the N new positions, one text after the other.
Order:  segment by segment, or text by text, ascending; in each as rope.h and attention.h say. A text has the bits that
        it has alone: nothing here sees two of them.
*/
#ifndef LLMC_ROTARY_ATTENTION_H
#define LLMC_ROTARY_ATTENTION_H
#include "../ops/cached_text.h"  // CachedText
#include "../ops/rope.h"         // RopeTable, rope_forward, rope_backward
#include "segment_attention.h"   // SegmentAttention, segment_attention_forward, segment_attention_backward
#include "token_batch.h"         // TokenBatch

typedef struct {
    SegmentAttention of;
    int rotated;      // channels of a head that turn
    const RopeTable* rope;
    int by_position;  // rope has a row for each position of the batch, in generation for each new one (image_splice.h);
                      // 0: of a segment, from 0 on
} RotaryAttention;

// NH heads of HS channels, of which NH / NKV read the same keys; q (N, NH*HS), k, v (N, NKV*HS). A position sees all
// before it, or a window that the caller sets. keys, shared_room: SegmentAttention's
static inline RotaryAttention rotary_attention_init(int NH, int NKV, int HS, int rotated, const RopeTable* rope,
                                                    const RankGroup* cp, floatX* room, const RankGroup* keys,
                                                    floatX* shared_room) {
    RotaryAttention x;
    memset(&x, 0, sizeof x);
    x.of.NH = NH, x.of.NKV = NKV, x.of.HS = HS;
    x.of.q_row = (size_t)(NH * HS), x.of.kv_row = (size_t)(NKV * HS);
    x.of.cp = cp, x.of.room = room;
    x.of.keys = keys, x.of.shared_room = shared_room;
    x.rotated = rotated;
    x.rope = rope;
    return x;
}

// `heads` heads of the positions of a span, where they lie. places: NULL, or of each position
static inline void rotary_turn_(floatX* x, const RotaryAttention* a, const SegmentSpan* s, const int* places, int heads,
                                int back, const Device* dev) {
    RopeShape shape = rope_shape(s->of.rows, s->T, s->t0, heads, a->of.HS, ROPE_HALVES);
    shape.rotated = a->rotated, shape.table_row = (size_t)a->rotated / 2;
    if (a->by_position) { shape.table_seq = (size_t)s->T * shape.table_row; }
    else { shape.places = places; }
    const size_t first = a->by_position ? s->first * shape.table_row : 0;
    if (back) { rope_backward(x, a->rope->cosines + first, a->rope->sines + first, &shape, dev); }
    else { rope_forward(x, a->rope->cosines + first, a->rope->sines + first, &shape, dev); }
}

// all of q and k that this rank has, or back. Where each position has its place, one call for all of them
static inline void rotary_turn_all_(floatX* q, floatX* k, const RotaryAttention* x, const Segments* segments,
                                    const CpRows* rows, int back, const Device* dev) {
    if (segments->places) {
        const SegmentSpan all = {{0, 1, cp_positions(rows)}, 0, cp_positions(rows), 0, 0, 0};
        rotary_turn_(q, x, &all, segments->places, x->of.NH, back, dev);
        rotary_turn_(k, x, &all, segments->places, x->of.NKV, back, dev);
        return;
    }
    for (SegmentSpan s = segment_none(); segment_next(&s, segments, rows);) {
        rotary_turn_(q + s.first * x->of.q_row, x, &s, NULL, x->of.NH, back, dev);
        rotary_turn_(k + s.first * x->of.kv_row, x, &s, NULL, x->of.NKV, back, dev);
    }
}

// rows: what this rank has of those of the batch
static inline void rotary_attention_forward(const RotaryAttention* x, const Segments* segments, const CpRows* rows,
                                            const Device* dev) {
    rotary_turn_all_(x->of.q, x->of.k, x, segments, rows, 0, dev);
    segment_attention_forward(&x->of, segments, rows, dev);
}

static inline void rotary_attention_backward(floatX* dq, floatX* dk, floatX* dv, const floatX* dout,
                                             const RotaryAttention* x, const Segments* segments, const CpRows* rows,
                                             const Device* dev) {
    segment_attention_backward(dq, dk, dv, dout, &x->of, segments, rows, dev);
    rotary_turn_all_(dq, dk, x, segments, rows, 1, dev);
}

// q or k of the new positions t0 .. T - 1 of a text, the first of which is number `first` of the pass
static inline void rotary_turn_new_(floatX* x, const RotaryAttention* a, int t0, int T, size_t first, int heads,
                                    const Device* dev) {
    const SegmentSpan whole = {{0, 1, T}, t0, T, 0, 0, 0}, alone = {{0, 1, T - t0}, 0, T - t0, first, 0, 0};
    rotary_turn_(x, a, a->by_position ? &alone : &whole, NULL, heads, 0, dev);
}

// k, v (N, NKV*HS): of the new positions, not turned; room: positions of a row of the cache
static inline void rotary_attention_cached(const RotaryAttention* x, const floatX* k, const floatX* v,
                                           const CachedText* texts, int n_texts, int room, const Device* dev) {
    const size_t HK = x->of.kv_row;
    size_t first = 0;
    for (int i = 0; i < n_texts; i++) {
        const int t0 = texts[i].n_cached, n_new = texts[i].n - t0;
        const SegmentAttention at = segment_from(&x->of, first, (size_t)texts[i].row * (size_t)room);
        const SegmentSpan span = {{0, 1, texts[i].n}, t0, texts[i].n, 0, 0, 0};
        const AttentionShape shape = segment_shape(&x->of, &span, HK);
        device_copy(at.k + t0 * HK, k + first * HK, sizeof(floatX) * n_new * HK, dev);
        device_copy(at.v + t0 * HK, v + first * HK, sizeof(floatX) * n_new * HK, dev);
        rotary_turn_new_(at.q, x, t0, texts[i].n, first, x->of.NH, dev);
        rotary_turn_new_(at.k + t0 * HK, x, t0, texts[i].n, first, x->of.NKV, dev);
        grouped_attention_forward(at.out, at.max, at.inv, at.q, at.k, at.v, &shape, dev);
        first += (size_t)n_new;
    }
}

// k, v, room: for texts
static inline void rotary_attention_pass(const RotaryAttention* x, const floatX* k, const floatX* v,
                                         const TokenBatch* batch, int room, const Device* dev) {
    if (batch->n_texts > 0) { rotary_attention_cached(x, k, v, batch->texts, batch->n_texts, room, dev); }
    else { rotary_attention_forward(x, &batch->segments, &batch->rows, dev); }
}
#endif  // LLMC_ROTARY_ATTENTION_H
