/*
AttentionShape: which query sees which key, and where the rows of q, k, v and out lie: what attention.h and
flash_attention.h share.
    q    queries t0..T-1 of B sequences, NH heads of HS channels each: its pointer is at query t0 of the first sequence
    k, v keys 0..keys-1 of B sequences, NKV heads: query head h reads head h / (NH / NKV); those that read one form a
         group
    out  as q; max, inv (B, NH, T-t0)
    rows may be parts of longer ones: a packed row (q, k, v), or a cache with room for more positions than T
A gradient lies as what it belongs to: dq as q, dk and dv as k and v, dout as out.
documents: a row holds several, each of which sees itself alone (documents.h); for the kernels of a GPU, which take all
of them in one launch. max and inv then lie as those of calls for each one after the other: of what a row has of a
document in t0..T-1, n queries, (NH, n), from NH times the queries before on.
*/
#ifndef LLMC_ATTENTION_SHAPE_H
#define LLMC_ATTENTION_SHAPE_H
#include "../core/device.h"  // in a CUDA build, what __host__ means
#include "../core/fmath.h"   // FM_FUNCTION: for the host and, in a CUDA build, for kernels
#include "documents.h"       // DocumentBounds

typedef struct {
    int B, T, t0;             // sequences; positions of each; first query, 0 in training
    int keys;                 // that exist: T, or fewer in a block of them that ends before the queries
    int NH, NKV, HS;          // heads of q; heads of k and v, a divisor of NH; channels of a head
    int window;               // query t sees the keys u with t - window < u <= t; 0: all u <= t
    float scale;              // of the scores, above 0
    size_t q_row, q_seq;      // elements from one position to the next and from one sequence to the next, of q
    size_t kv_row, kv_seq;    // of k and v
    size_t out_row, out_seq;  // of out
    const DocumentBounds* documents;  // (B, documents_T) of each position; NULL: a row is one document
    int documents_T;
} AttentionShape;

// GPT-2's: qkv (B, T, 3C) holds q, k and v side by side, out is (B, T-t0, C)
FM_FUNCTION AttentionShape attention_packed_shape(int B, int T, int C, int NH, int t0) {
    AttentionShape s;
    s.B = B, s.T = s.keys = T, s.t0 = t0;
    s.NH = s.NKV = NH, s.HS = C / NH;
    s.window = 0, s.scale = 1.0f / sqrtf((float)s.HS);
    s.q_row = s.kv_row = 3 * (size_t)C, s.q_seq = s.kv_seq = T * s.q_row;
    s.out_row = (size_t)C, s.out_seq = (T - t0) * s.out_row;
    s.documents = NULL, s.documents_T = 0;
    return s;
}

FM_FUNCTION int attention_queries(const AttentionShape* s) { return s->T - s->t0; }

// In a row that is one document, query t sees the keys first_key..last_key, key u is seen by the queries
// first_query..last_query: by none, or none, if they are the wrong way round
FM_FUNCTION int attention_first_key(const AttentionShape* s, int t) {
    return s->window > 0 && t >= s->window ? t - s->window + 1 : 0;
}
FM_FUNCTION int attention_last_key(const AttentionShape* s, int t) { return t < s->keys ? t : s->keys - 1; }
FM_FUNCTION int attention_first_query(const AttentionShape* s, int u) { return u > s->t0 ? u : s->t0; }
FM_FUNCTION int attention_last_query(const AttentionShape* s, int u) {
    return s->window > 0 && s->window < s->T - u ? u + s->window - 1 : s->T - 1;
}
// the same in any row: query t of sequence b sees the keys sees_from..last_key, key u is seen by the queries
// first_query..seen_until. Neither falls when t or u grows
FM_FUNCTION int attention_sees_from(const AttentionShape* s, int b, int t) {
    const int first = attention_first_key(s, t);
    const int begin = s->documents ? s->documents[(size_t)b * s->documents_T + t].begin : 0;
    return begin > first ? begin : first;
}
FM_FUNCTION int attention_seen_until(const AttentionShape* s, int b, int u) {
    const int last = attention_last_query(s, u);
    const int end = s->documents ? s->documents[(size_t)b * s->documents_T + u].end : s->T;
    return end <= last ? end - 1 : last;
}

// where head h (of q and out, or of k and v) of position t in sequence b begins
FM_FUNCTION size_t attention_at_q(const AttentionShape* s, int b, int h, int t) {
    return b * s->q_seq + (t - s->t0) * s->q_row + (size_t)h * s->HS;
}
FM_FUNCTION size_t attention_at_kv(const AttentionShape* s, int b, int h, int u) {
    return b * s->kv_seq + u * s->kv_row + (size_t)h * s->HS;
}
FM_FUNCTION size_t attention_at_out(const AttentionShape* s, int b, int h, int t) {
    return b * s->out_seq + (t - s->t0) * s->out_row + (size_t)h * s->HS;
}
// where max and inv have query t of head h
FM_FUNCTION size_t attention_at_row(const AttentionShape* s, int b, int h, int t) {
    if (!s->documents) { return ((size_t)b * s->NH + h) * attention_queries(s) + (t - s->t0); }
    const DocumentBounds x = s->documents[(size_t)b * s->documents_T + t];
    const int begin = x.begin > s->t0 ? x.begin : s->t0, end = x.end < s->T ? x.end : s->T;
    return ((size_t)b * attention_queries(s) + (begin - s->t0)) * s->NH + (size_t)h * (end - begin) + (t - begin);
}
#endif  // LLMC_ATTENTION_SHAPE_H
