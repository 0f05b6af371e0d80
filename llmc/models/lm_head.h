/*
The output matrix of a language model and its cross entropy, a few positions at a time: logits of all of them would be
larger than anything else. Where no target counts for a while, as in the questions of conversations, nothing is
computed: losses and gradients are 0 there.
    lm_head_losses   losses (N) of norm (N, C), what the last norm gives; with `backward` also the gradients of the
                     output matrix, dweight, written (NULL: frozen), and of its input, dnorm (N, C), written
    lm_head_evaluate   targets on the host are uploaded; then losses (N) alone, with --cp of this rank's positions
    lm_head_logits     (n, Vp) of positions first, first + 1, ..., for which logits has room
logits (rows, Vp) is room for so many positions; of the Vp columns V are tokens. dloss = 1 / targets counted in the
whole update; a target below 0 does not count. With --tp a rank has logits (rows, Vp / T) of its own tokens
(vocabulary.h), and lm_head_logits brings those of all together.
Order:  dweight chains over the positions, from 0 or on from what is there, through all pieces, so their number changes
        no bit; nor does what is left out, whose terms are 0.
*/
#ifndef LLMC_LM_HEAD_H
#define LLMC_LM_HEAD_H
#include "token_batch.h"  // TokenBatch, Stretch
#include "vocabulary.h"   // vocabulary_crossentropy, vocabulary_backward

typedef struct {
    Linear weight;           // (Vp, C), or with --tp this rank's rows of it
    floatX *norm, *dnorm, *logits;
    float* losses;
    int rows, V;
    int goes_on;             // dweight has what other positions have written (MTP)
    size_t field;            // of the weight in the trainer's table
} LmHead;

// positions first .. first + n - 1, of which there is room for; goes_on: dweight has those before
static inline void lm_head_piece_(const LmHead* h, const int* targets, int backward, float* dweight, int goes_on,
                                  float dloss, int first, int n, const Device* dev) {
    const Linear* w = &h->weight;
    const size_t at = (size_t)first * (size_t)w->C;
    linear_forward(h->logits, h->norm + at, *w, n, dev);
    vocabulary_crossentropy(h->losses + first, h->logits, targets + first, dloss, backward, w, h->V, n, dev);
    if (backward) { vocabulary_backward(h->dnorm + at, dweight, h->logits, h->norm + at, w, goes_on, n, dev); }
}

// N positions of a batch whose targets have been uploaded
static inline void lm_head_losses(const LmHead* h, const TokenBatch* batch, int backward, float* dweight, float dloss,
                                  int N, const Device* dev) {
    const size_t C = (size_t)h->weight.C;
    const int counts_all = batch->n_counted == 1 && batch->counted[0].n == N;
    int goes_on = h->goes_on;
    if (!counts_all) { device_zero(h->losses, sizeof(float) * (size_t)N, dev); }
    if (!counts_all && backward) { device_zero(h->dnorm, sizeof(floatX) * (size_t)N * C, dev); }
    for (int i = 0; i < batch->n_counted; i++) {
        const Stretch s = batch->counted[i];
        for (int first = s.first, end = s.first + s.n; first < end; first += h->rows) {
            const int n = end - first < h->rows ? end - first : h->rows;
            lm_head_piece_(h, batch->targets, backward, dweight, goes_on, dloss, first, n, dev);
            goes_on = 1;
        }
    }
    if (!goes_on && backward && dweight) {
        device_zero(dweight, sizeof(float) * (size_t)h->weight.OC * (size_t)h->weight.C, dev);
    }
}

static inline const float* lm_head_evaluate(const LmHead* h, TokenBatch* batch, const int* targets, int N,
                                            const Device* dev) {
    token_batch_targets(batch, targets, N, dev);
    lm_head_losses(h, batch, 0, NULL, 0.0f, batch->n, dev);
    return h->losses;
}

static inline const floatX* lm_head_logits(const LmHead* h, int first, int n, const Device* dev) {
    linear_forward(h->logits, h->norm + (size_t)first * (size_t)h->weight.C, h->weight, n, dev);
    return vocabulary_whole(h->logits, &h->weight, n, dev);
}
#endif  // LLMC_LM_HEAD_H
