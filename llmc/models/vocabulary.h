/*
A vocabulary that ranks share (--tp): each of T has 1/T of the rows of the embedding and of the output matrix, as they
lie in the table (SPLIT_VOCABULARY), computes the logits of these tokens alone, and their part of cross entropy and of
all gradients. The bits are those of one rank: sums over the vocabulary stay chains (tensor_parallel.h). Alone, or where
nothing is split, every call is that of the op.
    vocabulary_rows            out (N, C): the rows of tokens (N), as an embedding has them
    vocabulary_own, vocabulary_gather   the same in two halves, between which the caller writes the rows of the tokens
                               that are this rank's: of others vocabulary_own has -1
    vocabulary_rows_backward   its gradient, which goes on from what it holds; vocabulary_embedding_backward: where it
                               begins, too, for what comes behind the layers may have a share in it;
                               vocabulary_embedding_share: such a share
    vocabulary_crossentropy    losses (N) on all ranks from this rank's logits (N, Vp / T), which become their gradient
                               or, without it, anything
    vocabulary_backward        ... and from there to dnorm (N, C), whole on all, and to this rank's rows of dweight
    vocabulary_whole           logits of all tokens, (N, Vp); vocabulary_padded, Vp
    vocabulary_room_elements, vocabulary_sends   scratch, and what travels
Cost:   rows: a rank sends 2 (T-1)/T of N C floatX, to those that have a position first and from there to all. The head:
        (T-1) CrossEntropyRows of N, of 3 floats, for the largest logit; where the sum is a chain as many as 2 (T-1)/T N
        more; for dnorm 2 (T-1)/T of N C floatX. No matrix travels, and no logits. In 4 T - 1 exchanges for each
        head_rows positions, 2 T where sums are joined; while dnorm goes from rank to rank, those that wait compute
        dweight.
Error:  a bf16 build stores dnorm at each of T - 1 passes: 2^-9 of what is summed so far each time. Its sums of
        exponentials are joined, not chained.
*/
#ifndef LLMC_VOCABULARY_H
#define LLMC_VOCABULARY_H
#include "../ops/crossentropy.h"  // crossentropy_fused, crossentropy_part_begin, CrossEntropyRow
#include "linear.h"               // Linear, linear_rows, linear_backward_input

static inline int vocabulary_is_shared_(const Linear* w) { return w->split == SPLIT_VOCABULARY; }

// of a table of a vocabulary: rows in all
static inline int vocabulary_padded(const Linear* w) { return vocabulary_is_shared_(w) ? w->OC * w->tp->size : w->OC; }

// ---- scratch: tokens or statistics of positions, then what comes from others ----

static inline size_t vocabulary_aligned_(size_t n_bytes) { return (n_bytes + 255) / 256 * 256; }

static inline void* vocabulary_behind_(const Linear* w, size_t n_bytes) {
    return (char*)w->room + vocabulary_aligned_(n_bytes);
}

// of N positions, of which so many have logits at once, and so many logits of all tokens
static inline size_t vocabulary_room_elements(const Model* m, int N, int head_rows, int whole_rows) {
    const size_t T = (size_t)m->tp.size, share = ((size_t)N + T - 1) / T, row = sizeof(CrossEntropyRow);
    size_t most = 0;
    for (int i = 0; i < m->n_table && model_has_tp(m); i++) {
        const Tensor* t = &m->table[i];
        if (t->split != SPLIT_VOCABULARY) { continue; }
        const size_t logits = 2 * (size_t)whole_rows * (size_t)t->rows;
        most = tp_larger(most, sizeof(int) * (size_t)N + sizeof(floatX) * T * share * (size_t)t->columns);
        most = tp_larger(most, row * (T + 1) * (size_t)head_rows);
        most = tp_larger(most, sizeof(floatX) * logits);
    }
    return most > 0 ? (most + 2 * 256) / sizeof(floatX) : 0;
}

// ---- what a rank sends for N positions, bytes ----

// as an embedding
static inline double vocabulary_sends_rows(const Model* m, int C, int N) {
    return sizeof(floatX) * ((double)N + (m->tp.size - 2.0) * tp_own_rows(N, &m->tp)) * C;
}

// as an output matrix, forward and back
static inline double vocabulary_sends_head(const Model* m, int C, int N) {
    const double rows = sizeof(CrossEntropyRow), of_rows = CROSSENTROPY_CHAINS ? tp_chain_sends(N, rows, &m->tp) : 0.0;
    return (m->tp.size - 1.0) * N * rows + of_rows + tp_chain_sends(N, sizeof(floatX) * (double)C, &m->tp);
}

// of the stage whose turn it is
static inline double vocabulary_sends(const Model* m, int C, int N) {
    return (model_has_embedding(m) ? vocabulary_sends_rows(m, C, N) : 0.0) +
           (model_has_head(m) ? vocabulary_sends_head(m, C, N) : 0.0);
}

// ---- an embedding ----

// tokens (N) as numbers of this rank's rows
static inline const int* vocabulary_own(const Linear* w, const int* tokens, int N, const Device* dev) {
    if (!vocabulary_is_shared_(w)) { return tokens; }
    embedding_own((int*)w->room, tokens, w->tp->place * w->OC, w->OC, N, dev);
    return (const int*)w->room;
}

// out (N, C), in which each rank has written the rows of its tokens
static inline void vocabulary_gather(floatX* out, const Linear* w, const int* tokens, int N, const Device* dev) {
    if (!vocabulary_is_shared_(w)) { return; }
    const RankGroup* x = w->tp;
    const int first = (int)comm_share(N, x->place, x->size), n = (int)comm_share(N, x->place + 1, x->size) - first;
    const size_t width = sizeof(floatX) * (size_t)w->C;
    floatX* landing = (floatX*)vocabulary_behind_(w, sizeof(int) * (size_t)N);
    tp_scatter_rows(landing, out, N, width, x, dev);
    embedding_owned(out + (size_t)first * (size_t)w->C, landing, tokens + first, w->OC, n, w->C, dev);
    tp_gather_rows(out, N, width, x, dev);
}

static inline void vocabulary_rows(floatX* out, const int* tokens, Linear w, int N, const Device* dev) {
    linear_rows(out, vocabulary_own(&w, tokens, N, dev), &w, N, dev);
    vocabulary_gather(out, &w, tokens, N, dev);
}

static inline void vocabulary_rows_backward(float* dweight, const floatX* dout, const int* tokens, Linear w, int N,
                                            const Device* dev) {
    if (!dweight) { return; }
    token_embedding_backward(dweight, dout, vocabulary_own(&w, tokens, N, dev), N, w.C, dev);
}

// Of an embedding whose weight is that of a field of the table, what is asked of its rows, maybe on the last stage
// (mtp.h): its gradient, which goes on from what a tied head has written, or begins at 0
static inline void vocabulary_embedding_share(Model* m, size_t field, int tied, const floatX* dout, const int* tokens,
                                              Linear embedding, int N, const Device* dev) {
    float* dweight = model_vector_gradient(m, field, 0);
    if (!tied && dweight) { device_zero(dweight, sizeof(float) * (size_t)embedding.OC * (size_t)embedding.C, dev); }
    vocabulary_rows_backward(dweight, dout, tokens, embedding, N, dev);
}

// The end of a backward pass, on the stage that has the embedding. goes_on: from what the last stage has written
static inline void vocabulary_embedding_backward(Model* m, size_t field, int goes_on, const floatX* dout,
                                                 const int* tokens, Linear embedding, int N, const Device* dev) {
    if (goes_on) { model_receive_shared(m, dev); }
    vocabulary_embedding_share(m, field, goes_on, dout, tokens, embedding, N, dev);
}

// ---- an output matrix ----

typedef struct { int first, n; } VocabularyPiece;  // of positions

static inline VocabularyPiece vocabulary_piece_(int p, int N, const RankGroup* x) {
    const int first = (int)comm_share(N, p, x->size);
    const VocabularyPiece piece = {first, (int)comm_share(N, p + 1, x->size) - first};
    return piece;
}

// of N positions, from own logits: what all ranks' logits say
static inline const CrossEntropyRow* vocabulary_softmax_(floatX* logits, const int* targets, const Linear* w, int first,
                                                         int own, int N, const Device* dev) {
    const RankGroup* x = w->tp;
    const size_t n_bytes = sizeof(CrossEntropyRow) * (size_t)N;
    CrossEntropyRow *rows = (CrossEntropyRow*)w->room, *parts = (CrossEntropyRow*)vocabulary_behind_(w, n_bytes);
    CrossEntropyRow* mine = parts + (size_t)x->place * (size_t)N;
    crossentropy_part_begin(mine, logits, targets, first, N, own, w->OC, dev);
    rank_group_exchange(parts, mine, 0, n_bytes, x, dev);
    crossentropy_part_join(rows, parts, x->size, N, dev);
#if CROSSENTROPY_CHAINS
    for (int step = 0; step < tp_chain_steps(x); step++) {
        const int p = tp_chain_piece(step, x);
        if (p >= 0) {
            const VocabularyPiece turn = vocabulary_piece_(p, N, x);
            crossentropy_part_add(rows + turn.first, logits + (size_t)turn.first * (size_t)w->OC, turn.n, own, w->OC,
                                  dev);
        }
        tp_chain_pass(rows, N, sizeof(CrossEntropyRow), step, x, dev);
    }
    tp_chain_end(rows, N, sizeof(CrossEntropyRow), x, dev);
#endif
    return rows;
}

// V: tokens of the vocabulary, of which this rank may have fewer than rows, or none
static inline void vocabulary_crossentropy(float* losses, floatX* logits, const int* targets, float dloss,
                                           int with_gradient, const Linear* w, int V, int N, const Device* dev) {
    if (!vocabulary_is_shared_(w)) {
        crossentropy_fused(losses, logits, targets, dloss, with_gradient, N, V, w->OC, dev);
        return;
    }
    const int first = w->tp->place * w->OC, left = V > first ? V - first : 0, own = left < w->OC ? left : w->OC;
    const CrossEntropyRow* rows = vocabulary_softmax_(logits, targets, w, first, own, N, dev);
    crossentropy_part_end(losses, logits, rows, targets, first, dloss, with_gradient, N, own, w->OC, dev);
}

// goes_on: dweight has positions before these; NULL: nobody asks for it
static inline void vocabulary_backward(floatX* dnorm, float* dweight, const floatX* dlogits, const floatX* norm,
                                       const Linear* w, int goes_on, int N, const Device* dev) {
    const RankGroup* x = w->tp;
    const size_t C = (size_t)w->C, width = (size_t)w->OC;
    if (!vocabulary_is_shared_(w)) {
        linear_backward_input(dnorm, dlogits, *w, 0, N, dev);
        matmul_backward_weight(dweight, dlogits, norm, goes_on, N, w->C, w->OC, dev);
        return;
    }
    for (int step = 0, next = 0; step <= tp_chain_steps(x); step++) {  // one more, for the last piece of dweight
        const int p = tp_chain_piece(step, x), is_turn = p >= 0;
        const VocabularyPiece piece = vocabulary_piece_(is_turn ? p : next++, N, x);
        const floatX *d = dlogits + (size_t)piece.first * width, *inp = norm + (size_t)piece.first * C;
        if (is_turn && piece.n > 0) {
            linear_backward_input(dnorm + (size_t)piece.first * C, d, *w, x->place > 0, piece.n, dev);
        }
        if (!is_turn && piece.n > 0) {
            matmul_backward_weight(dweight, d, inp, goes_on, piece.n, w->C, w->OC, dev);
            goes_on = 1;
        }
        if (step < tp_chain_steps(x)) { tp_chain_pass(dnorm, N, sizeof(floatX) * C, step, x, dev); }
    }
    tp_chain_end(dnorm, N, sizeof(floatX) * C, x, dev);
}

static inline const floatX* vocabulary_whole(const floatX* logits, const Linear* w, int N, const Device* dev) {
    if (!vocabulary_is_shared_(w)) { return logits; }
    const int Vp = vocabulary_padded(w);
    floatX* landing = (floatX*)vocabulary_behind_(w, sizeof(floatX) * (size_t)N * (size_t)Vp);
    tp_gather(w->room, logits, landing, N, tp_one(Vp), w->tp, dev);
    return w->room;
}
#endif  // LLMC_VOCABULARY_H
