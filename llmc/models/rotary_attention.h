/*
Attention whose queries and keys turn with their position (RoPE), over the segments of a batch (documents.h): each
counts its positions from 0 and sees itself alone.
    rotary_attention_forward    turns q and k where they lie; out, max and inv as attention.h has them
    rotary_attention_backward   dq, dk and dv of what q, k and v were before they turned
    rotary_attention_cached     in generation, of several texts (cached_text.h), each with a length of its own: new keys
                                and values go to the text's row of the cache and turn there
q, out (N, NH*HS), k, v (N, NKV*HS), max, inv (N, NH). Cached: k and v of RotaryAttention are the cache, (rows, room,
NKV*HS), whose keys have turned; all others are the N new positions, one text after the other.
Order:  segment by segment, or text by text, ascending; in each as rope.h and attention.h say. A text has the bits that
        it has alone: nothing here sees two of them.
*/
#ifndef LLMC_ROTARY_ATTENTION_H
#define LLMC_ROTARY_ATTENTION_H
#include "../core/floatx.h"     // floatX
#include "../ops/attention.h"   // AttentionShape, grouped_attention_forward, grouped_attention_backward
#include "../ops/cached_text.h" // CachedText
#include "../ops/documents.h"   // Segments, Segment
#include "../ops/rope.h"        // RopeTable, rope_forward, rope_backward

typedef struct {
    int NH, NKV, HS;  // heads of queries; of keys and values; channels of a head
    int window;       // so many keys a query sees, itself included; 0: all before it
    const RopeTable* rope;
    floatX *q, *k, *v, *out;  // of the whole batch
    float *max, *inv;
} RotaryAttention;

// queries of positions t0..T-1 of a segment against its keys 0..T-1
static inline AttentionShape rotary_shape_(const RotaryAttention* x, Segment s, int t0) {
    AttentionShape a;
    a.B = s.rows, a.T = s.T, a.t0 = t0;
    a.NH = x->NH, a.NKV = x->NKV, a.HS = x->HS;
    a.window = x->window < s.T ? x->window : 0, a.scale = 1.0f / sqrtf((float)x->HS);
    a.q_row = a.out_row = (size_t)x->NH * x->HS, a.q_seq = a.out_seq = (s.T - t0) * a.q_row;
    a.kv_row = (size_t)x->NKV * x->HS, a.kv_seq = s.T * a.kv_row;
    return a;
}

// q, k and v begin with the segment: k and v at its position 0, the others at t0
static inline void rotary_segment_forward_(const RotaryAttention* x, Segment s, int t0, const Device* dev) {
    const float *cosines = x->rope->cosines, *sines = x->rope->sines;
    const RopeShape q_shape = rope_shape(s.rows, s.T, t0, x->NH, x->HS, ROPE_HALVES);
    const RopeShape k_shape = rope_shape(s.rows, s.T, t0, x->NKV, x->HS, ROPE_HALVES);
    const AttentionShape shape = rotary_shape_(x, s, t0);
    rope_forward(x->q, cosines, sines, &q_shape, dev);
    rope_forward(x->k + (size_t)t0 * shape.kv_row, cosines, sines, &k_shape, dev);
    grouped_attention_forward(x->out, x->max, x->inv, x->q, x->k, x->v, &shape, dev);
}

// x from position `first` of its queries and position `first_key` of its keys on
static inline RotaryAttention rotary_from_(const RotaryAttention* x, size_t first, size_t first_key) {
    const size_t q = first * x->NH * x->HS, k = first_key * x->NKV * x->HS, row = first * x->NH;
    const RotaryAttention from = {x->NH, x->NKV, x->HS, x->window, x->rope, x->q + q, x->k + k, x->v + k, x->out + q,
                                  x->max + row, x->inv + row};
    return from;
}

static inline void rotary_attention_forward(const RotaryAttention* x, const Segments* segments, const Device* dev) {
    for (int i = 0; i < segments->n; i++) {
        const RotaryAttention at = rotary_from_(x, segments->at[i].first, segments->at[i].first);
        rotary_segment_forward_(&at, segments->at[i], 0, dev);
    }
}

// k, v (N, NKV*HS): of the new positions, not turned; room: positions of a row of the cache
static inline void rotary_attention_cached(const RotaryAttention* x, const floatX* k, const floatX* v,
                                           const CachedText* texts, int n_texts, int room, const Device* dev) {
    const size_t HK = (size_t)x->NKV * x->HS;
    size_t first = 0;
    for (int i = 0; i < n_texts; i++) {
        const int t0 = texts[i].n_cached, n_new = texts[i].n - t0;
        const RotaryAttention at = rotary_from_(x, first, (size_t)texts[i].row * (size_t)room);
        const Segment all = {0, 1, texts[i].n};
        device_copy(at.k + t0 * HK, k + first * HK, sizeof(floatX) * n_new * HK, dev);
        device_copy(at.v + t0 * HK, v + first * HK, sizeof(floatX) * n_new * HK, dev);
        rotary_segment_forward_(&at, all, t0, dev);
        first += (size_t)n_new;
    }
}

static inline void rotary_attention_backward(floatX* dq, floatX* dk, floatX* dv, const floatX* dout,
                                             const RotaryAttention* x, const Segments* segments, const Device* dev) {
    const float *cosines = x->rope->cosines, *sines = x->rope->sines;
    for (int i = 0; i < segments->n; i++) {
        const Segment s = segments->at[i];
        const size_t q = s.first * x->NH * x->HS, k = s.first * x->NKV * x->HS, row = s.first * x->NH;
        const RopeShape q_shape = rope_shape(s.rows, s.T, 0, x->NH, x->HS, ROPE_HALVES);
        const RopeShape k_shape = rope_shape(s.rows, s.T, 0, x->NKV, x->HS, ROPE_HALVES);
        const AttentionShape shape = rotary_shape_(x, s, 0);
        grouped_attention_backward(dq + q, dk + k, dv + k, dout + q, x->out + q, x->max + row, x->inv + row, x->q + q,
                                   x->k + k, x->v + k, &shape, dev);
        rope_backward(dq + q, cosines, sines, &q_shape, dev);
        rope_backward(dk + k, cosines, sines, &k_shape, dev);
    }
}
#endif  // LLMC_ROTARY_ATTENTION_H
