/*
Multi-token prediction (MTP): behind the last norm a module of its own predicts, at each position, the token after the
next, from what the model knows there and from the embedding of the next token. Its loss is that of a harder task, and
when text is generated its guesses can be checked several at a time. What does not depend on the module's layer:
    mtp_on_rank, mtp_on_stage, mtp_layers, mtp_trunk_end   who has the module, whose layer stands behind all others
    MtpBatch, mtp_batch_open, mtp_batch_take, mtp_batch_close   a batch's next tokens, and its targets, the tokens after
                      those (ops/mtp_tokens.h), on the device: with --cp those of this rank's positions, of which the
                      last one's next token may be another rank's
    mtp_join          joined (N, 2C): of each position the C channels of `next`, then those of `hidden`
    mtp_part          one half of joined, MTP_NEXT or MTP_HIDDEN, as (N, C)
Cost:   a layer more, and the output matrix a second time.
Source: Gloeckle et al. 2024, arXiv:2404.19737; DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; doc/qwen36.md "The
        token after the next"
*/
#ifndef LLMC_MTP_H
#define LLMC_MTP_H
#include "../core/floatx.h"  // floatX
#include "../ops/mtp_tokens.h"  // mtp_tokens
#include "../ranks/model.h"  // Model, Purpose
#include "token_batch.h"     // TokenBatch

// ---- where it is ----

// do passes of this rank go through the module? Where it does not learn none does
static inline int mtp_on_rank(const Model* m, Purpose purpose) {
    return m->learns_mtp && purpose == TO_TRAIN && (!model_has_pp(m) || pp_has_last(&m->pp));
}

// ... those of the stage whose turn it is?
static inline int mtp_on_stage(const Model* m, Purpose purpose) {
    return mtp_on_rank(m, purpose) && model_has_head(m);
}

// layers that a pass goes through, on whatever ranks. L: of the model without the module
static inline int mtp_layers(const Model* m, int L, Purpose purpose) { return L + mtp_on_rank(m, purpose); }

// behind the last layer of this stage, before that of the module
static inline int mtp_trunk_end(const Model* m) {
    const int end = model_end_layer(m), L = tensors_layers_between(m->table, m->n_table, 0);
    return end < L ? end : L;
}

// ---- tokens ----

typedef struct {
    TokenBatch batch;     // tokens: the next ones; targets: those after
    int *next, *targets;  // on the host
} MtpBatch;

static inline double mtp_batch_bytes(int B, int T) { return token_batch_bytes(B, T); }

// cp NULL: whole rows
static inline void mtp_batch_open(MtpBatch* x, int B, int T, const RankGroup* cp) {
    const size_t n_bytes = sizeof(int) * (size_t)B * (size_t)T;
    token_batch_open(&x->batch, B, T, cp);
    x->next = (int*)malloc_check(n_bytes, "next tokens");
    x->targets = (int*)malloc_check(n_bytes, "targets after the next");
}

static inline void mtp_batch_close(MtpBatch* x) {
    token_batch_close(&x->batch);
    free(x->next);
    free(x->targets);
}

// of a batch whose segments have been found
static inline void mtp_batch_take(MtpBatch* x, const TokenBatch* of, const int* inputs, const int* targets, int B,
                                  int T, const Device* dev) {
    mtp_tokens(x->next, x->targets, inputs, targets, &of->segments, B, T);
    x->batch.counts_all = of->counts_all;
    token_batch_inputs(&x->batch, x->next, NULL, B, T, 0, dev);
    token_batch_targets(&x->batch, x->targets, B * T, dev);
}

// ---- two streams side by side ----

typedef enum { MTP_NEXT, MTP_HIDDEN } MtpPart;

static inline void mtp_join(floatX* joined, const floatX* next, const floatX* hidden, int N, int C, const Device* dev) {
    const size_t width = sizeof(floatX) * (size_t)C;
    device_copy_strips(joined, 2 * width, next, width, width, N, dev);
    device_copy_strips(joined + C, 2 * width, hidden, width, width, N, dev);
}

static inline void mtp_part(floatX* out, const floatX* joined, MtpPart part, int N, int C, const Device* dev) {
    const size_t width = sizeof(floatX) * (size_t)C;
    device_copy_strips(out, width, joined + (part == MTP_HIDDEN ? C : 0), 2 * width, width, N, dev);
}
#endif  // LLMC_MTP_H
