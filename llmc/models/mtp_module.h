/*
The module for the token after the next (mtp.h) as Qwen3.6 and GLM-5 have it: the embedding of the next token and what
the model's last norm gives, each behind a norm, side by side through one matrix; then a layer as the model's last one,
a norm, and the model's own output matrix.
    MtpFields, MtpTensors, MtpStatistics, mtp_tensor_rows, mtp_statistic_rows   its parameters, activations and
                       statistics, and their lines of the tables
    MtpModule          these, and what else it reads and writes, of N positions
    mtp_module_leaf    forward and back, in a trainer's end_backward, once the head has begun the gradient of what the
                       last norm gives, which goes on; that of the embedding begins, or goes on from a tied head's
    mtp_module_forward   of that the first part, for tests: up to what the head reads
    mtp_module_sends   bytes that a rank sends for it with --tp, beside its layer: the next tokens twice, and the head
    mtp_head, mtp_losses   of other modules, too: the model's output matrix behind theirs, whose losses join what the
                       leaf counts
Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2
*/
#ifndef LLMC_MTP_MODULE_H
#define LLMC_MTP_MODULE_H
#include "../ops/crossentropy.h"  // crossentropy_losses_sum
#include "decoder_passes.h"       // DecoderPasses
#include "image_splice.h"         // ImageSplice, image_splice_next
#include "layer.h"                // layer_linear, layer_rmsnorm_forward
#include "lm_head.h"              // LmHead, lm_head_losses
#include "mtp.h"                  // mtp_join, mtp_part

// members of a trainer's ActivationTensors and Statistics
typedef struct {
    floatX *joined, *encoded, *norm;  // (N, 2C), (N, C): what the matrix reads, and gives to the layer; the last norm
    floatX* dhidden;                  // (N, C), of what the model's last norm gives
} MtpTensors;

typedef struct { float *embedding_rstd, *hidden_rstd, *norm_rstd, *losses; } MtpStatistics;  // (N)

// of the table of parameters; embedding: the model's
typedef struct { size_t embedding, embedding_norm, hidden_norm, proj, norm; } MtpFields;

typedef struct {
    MtpFields fields;
    MtpTensors a;
    MtpStatistics s;
    LmHead head;                // the model's
    floatX* behind;             // (N, C), the stream behind the module's layer
    floatX *room, *dbranch, *dresidual;  // (N, C): free in between; the last two are the gradients of a layer
    const ImageSplice* images;  // that stand in place of embeddings; NULL: none do
    const floatX* image_rows;   // of these
    float weight;               // of its losses
    int is_tied;                // the output matrix is the embedding
    int is_apart;               // neither the embedding nor the model's layers nor the output matrix learn of it
    int C;
} MtpModule;

// ---- its lines of the tables, on ranks that have it (mtp_on_rank). at: the offset of the member ----

static inline Tensor* mtp_tensor_rows(Tensor* t, size_t at, int N, int C) {
#define FIELD(name) "mtp_" #name, at + offsetof(MtpTensors, name)
    *t++ = activation(FIELD(joined),  0, N, 2 * C);
    *t++ = activation(FIELD(encoded), 0, N, C);
    *t++ = activation(FIELD(norm),    0, N, C);
    *t++ = activation(FIELD(dhidden), 0, N, C);
#undef FIELD
    return t;
}

static inline Tensor* mtp_statistic_rows(Tensor* t, size_t at, int N) {
#define FIELD(name) "mtp_" #name, at + offsetof(MtpStatistics, name)
    *t++ = activation(FIELD(embedding_rstd), 0, N, 1);
    *t++ = activation(FIELD(hidden_rstd),    0, N, 1);
    *t++ = activation(FIELD(norm_rstd),      0, N, 1);
    *t++ = activation(FIELD(losses),         0, N, 1);
#undef FIELD
    return t;
}

// ---- forward and back ----

// of_model: the same matrix, whose gradient goes on
static inline LmHead mtp_head(LmHead of_model, floatX* norm, floatX* dnorm, float* losses) {
    LmHead head = of_model;
    head.norm = norm, head.dnorm = dnorm, head.losses = losses;
    head.goes_on = 1;
    return head;
}

// learns: the matrix does
static inline void mtp_losses(const LmHead* head, const Activations* acts, float weight, int learns, int N,
                              const Device* dev) {
    Model* m = acts->model;
    float* dweight = learns ? layer_vector_gradient(acts, head->field, 0) : NULL;
    lm_head_losses(head, &acts->mtp.batch, 1, dweight, weight * (1.0f / m->mtp_counted), N, dev);
    crossentropy_losses_sum(dp_numbers(&m->dp) + m->mtp_number, head->losses, N, dev);
}

// embeddings of the next tokens, or what stands in their place
static inline void mtp_module_next_(const MtpModule* x, const Activations* acts, int N, const Device* dev) {
    vocabulary_rows(x->room, acts->mtp.batch.tokens, layer_linear(acts, x->fields.embedding, 0), N, dev);
    if (x->images) { image_splice_next(x->room, x->image_rows, x->images, x->C, dev); }
}

static inline void mtp_module_join_(const MtpModule* x, const Activations* acts, int N, const Device* dev) {
    floatX *next = x->dbranch, *hidden = x->dresidual;
    mtp_module_next_(x, acts, N, dev);
    layer_rmsnorm_forward(acts, next, x->s.embedding_rstd, x->room, x->fields.embedding_norm, 0, N, dev);
    layer_rmsnorm_forward(acts, hidden, x->s.hidden_rstd, x->head.norm, x->fields.hidden_norm, 0, N, dev);
    mtp_join(x->a.joined, next, hidden, N, x->C, dev);
    linear_forward(x->a.encoded, x->a.joined, layer_linear(acts, x->fields.proj, 0), N, dev);
}

// the module's layer stands behind all others
static inline void mtp_module_forward(const MtpModule* x, const DecoderPasses* passes, Activations* acts, int N,
                                      const Device* dev) {
    const Model* m = acts->model;
    mtp_module_join_(x, acts, N, dev);
    passes->block_forward(m, acts, tensors_layers_between(m->table, m->n_table, 0), x->a.encoded, N, dev);
    layer_rmsnorm_forward(acts, x->a.norm, x->s.norm_rstd, x->behind, x->fields.norm, 0, N, dev);
}

// what is asked of the embedding, from the gradient of the next tokens' norm, dbranch
static inline void mtp_module_share_(const MtpModule* x, const Activations* acts, int N, const Device* dev) {
    const int* tokens = x->images ? x->images->next_tokens : acts->mtp.batch.tokens;
    vocabulary_embedding_share(acts->model, x->fields.embedding, x->is_tied, x->dresidual, tokens,
                               layer_linear(acts, x->fields.embedding, 0), N, dev);
    if (x->images) { image_splice_next_backward(x->images, x->dresidual, x->C, dev); }
}

// from the gradient of the stream before its layer to those of what the module reads
static inline void mtp_module_part_(const MtpModule* x, const Activations* acts, int N, const Device* dev) {
    const Linear proj = layer_linear(acts, x->fields.proj, 0);
    linear_backward_weight(x->dresidual, x->a.joined, proj, layer_gradients(acts, x->fields.proj, 0), N, dev);
    linear_backward_input(x->a.joined, x->dresidual, proj, 0, N, dev);
    mtp_part(x->dbranch, x->a.joined, MTP_NEXT, N, x->C, dev);
    mtp_module_next_(x, acts, N, dev);
    layer_rmsnorm_backward(acts, x->dresidual, x->dbranch, x->room, x->s.embedding_rstd, x->fields.embedding_norm, 0, 0,
                           N, dev);
    if (!x->is_apart) { mtp_module_share_(x, acts, N, dev); }
    mtp_part(x->dbranch, x->a.joined, MTP_HIDDEN, N, x->C, dev);
    layer_rmsnorm_backward(acts, x->is_apart ? x->dresidual : x->head.dnorm, x->dbranch, x->head.norm, x->s.hidden_rstd,
                           x->fields.hidden_norm, 0, !x->is_apart, N, dev);
}

static inline void mtp_module_backward_(const MtpModule* x, const DecoderPasses* passes, Activations* acts, int N,
                                        const Device* dev) {
    Model* m = acts->model;
    const int l = tensors_layers_between(m->table, m->n_table, 0);
    layer_rmsnorm_backward(acts, x->dresidual, x->dbranch, x->behind, x->s.norm_rstd, x->fields.norm, 0, 0, N, dev);
    passes->recompute_block(m, acts, l, x->a.encoded, N, dev);
    passes->block_backward(m, acts, l, x->a.encoded, N, dev);
    model_layer_done(m, l, dev);
    mtp_module_part_(x, acts, N, dev);
}

// with --pp all that other layers have counted is in the leaf's numbers already
static inline void mtp_module_leaf(const MtpModule* x, const DecoderPasses* passes, Activations* acts, int N,
                                   const Device* dev) {
    const LmHead head = mtp_head(x->head, x->a.norm, x->dbranch, x->s.losses);
    float* counted = acts->numbers;
    acts->numbers = dp_numbers(&acts->model->dp);
    mtp_module_forward(x, passes, acts, N, dev);
    mtp_losses(&head, acts, x->weight, !x->is_apart, N, dev);
    mtp_module_backward_(x, passes, acts, N, dev);
    acts->numbers = counted;
}

static inline double mtp_module_sends(const Model* m, int C, int N) {
    return vocabulary_sends_head(m, C, N) + 2.0 * vocabulary_sends_rows(m, C, N);
}
#endif  // LLMC_MTP_MODULE_H
