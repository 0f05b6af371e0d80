/*
GPT-2 and GPT-3 on GPUs: the model of train_gpt2.c, which is the file to read first, with bf16 weights and activations,
fused kernels, and ranks that share the work over NCCL. Same options, log, run folder and checkpoints: what one of the
two trainers has begun, the other continues.

What is different here, and why:
    weights       are stored as floatX, bf16 by default; AdamW updates float masters, from which they are rounded
    activations   are kept for all layers, or computed again in backward: --recompute trades time for memory
    the head      takes --head-rows positions at a time, so that the logits of a batch never exist as a whole
    products      are those of models/linear.h: of matrices that are whole here, or shared by ranks (--tp)
    host          it only launches: inside an update nothing waits for the GPU until the norm is read
There are no kernels here. Every op's are in its header in llmc/ops/, behind the loop that defines them.

    make train_gpt2cu                    with nvcc, bf16 (PRECISION=fp32, PRECISION=exact: the bits of train_gpt2.c)
    make train_gpt2cu CPU=1              the same file with a C compiler, exact
    ./train_gpt2cu --model d12 --train 'shards/train_*.bin' --batch-size 64 --batch-tokens 524288 --steps 20000
    ./launch -n 8 ./train_gpt2cu ...     eight GPUs, the same result to the last bit
*/
#include "llmc/core/floatx.h"        // floatX: float or bf16
#include "llmc/core/graph.h"         // graph_begin, graph_end: a leaf as one launch (--graph)
#include "llmc/models/activations.h" // Activations, Tradeoffs: what a pass has beside the parameters
#include "llmc/models/gpt2.h"        // GPT2, Config, Parameters: sizes and parameters, shared with train_gpt2.c
#include "llmc/models/layer.h"       // layer_linear, layer_stream: operands of a layer of a pass
#include "llmc/models/linear.h"      // Linear, linear_forward, linear_backward
#include "llmc/models/lm_head.h"     // LmHead, lm_head_losses: the output matrix and cross entropy
#include "llmc/models/segment_attention.h"  // segment_attention_forward, segment_attention_backward
#include "llmc/models/stream.h"      // Stream: the residual stream, where backward asks for it
#include "llmc/models/token_batch.h" // TokenBatch: tokens and targets on the device, segments for attention
#include "llmc/ops/attention.h"      // attention_forward, in generation
#include "llmc/ops/crossentropy.h"   // crossentropy_losses_sum
#include "llmc/ops/dropout.h"        // Dropout, dropout: a part of the elements is left out (--dropout)
#include "llmc/ops/embedding.h"      // embedding_forward, embedding_backward
#include "llmc/ops/gelu.h"           // gelu_forward
#include "llmc/ops/layernorm.h"      // layernorm_forward, residual_layernorm_forward, residual_layernorm_backward
#include "llmc/ops/matmul.h"         // matmul_gelu_forward
#ifndef TESTING                     // a test includes this file for the model alone
#include "llmc/models/gpt2_run.h"  // run_main: options, data, steps, checkpoints, ranks (llmc/run/)
#include "llmc/models/sent_run.h"  // sent_parts, sent_keys: what ranks send each other, of all layers
#include "llmc/run/cp_option.h"  // cp_option, cp_begin, cp_check, cp_box
#include "llmc/run/graph_option.h"  // graph_option, graph_check
#include "llmc/run/tp_option.h"  // tp_option, tp_begin, tp_box
#endif

// ---------------------------------------------------------------------------------------------------------------------
// 1. Tensors. Sizes and parameters are those of train_gpt2.c, in llmc/models/gpt2.h; here is one line for each
// activation.

// weights as forward and backward read them; Parameters (llmc/models/gpt2.h) are floats: gradients
typedef struct {
    floatX *wte, *wpe, *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb, *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb,
        *lnfw, *lnfb;
} StoredParameters;  // the fields of Parameters, in the same order: one table serves both

// what a pass leaves behind; then the gradients on their way back, one buffer each for all layers
typedef struct {
    floatX *encoded, *ln1, *qkv, *atty, *ln2, *fch, *fch_gelu, *lnf, *logits, *branch, *dresidual, *dbranch, *dwide;
    Stream residual2, residual3;
} ActivationTensors;

// what must not lose digits, always float
typedef struct {
    float *ln1_mean, *ln1_rstd, *att_max, *att_inv, *ln2_mean, *ln2_rstd, *lnf_mean, *lnf_rstd, *losses, *dstream;
} Statistics;

typedef enum { KEEP_ALL, RECOMPUTE_GELU, RECOMPUTE_NORMS, RECOMPUTE_BLOCKS } Recompute;  // each includes those before

// A GELU that backward computes again, from what has been rounded, is not fused with the product before it
static int fuses_forward(const Tradeoffs* how) {
    return how->gelu_fusion > 0 && how->recompute != RECOMPUTE_GELU && how->recompute != RECOMPUTE_NORMS;
}

// of a pass over B rows of T those of this rank: in generation, too, all of a text
static int own_positions(const Tradeoffs* how, int B, int T) { return B * T / (how->cp ? how->cp->size : 1); }

// B rows of T positions; generation keeps logits of the last position only
static int activation_table(Tensor* table, const GPT2* gpt2, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const Config c = gpt2->config;
    const int C = c.C, HC = c.HC, F = c.F, wide = F > 3 * HC ? F : 3 * HC;
    const int N = own_positions(how, B, T), N_train = purpose == TO_TRAIN ? N : 0;
    const int L_out = purpose == TO_TRAIN ? c.L : 0;
    const int L_gelu = activations_kept(how, c.L, purpose, RECOMPUTE_GELU);
    const int L_norms = activations_kept(how, c.L, purpose, RECOMPUTE_NORMS);
    const int L_block = activations_kept(how, c.L, purpose, RECOMPUTE_BLOCKS);
    const int L_cache = purpose == TO_GENERATE ? c.L : L_block, N_head = activations_head_rows(how, 1, N, purpose);
    const RankGroup* tp = &gpt2->model.tp;
    Tensor* t = table;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = input_activation(FIELD(encoded), N, C);        // wte + wpe; of a later stage (--pp) the stream that comes in
    *t++ = activation(FIELD(ln1),       L_norms, N, C);
    *t++ = activation(FIELD(qkv),       L_cache, N, 3 * HC);  // in generation: the key-value cache
    *t++ = activation(FIELD(atty),      L_block, N, HC);  // attention's output before its projection
    t = stream_rows(t, FIELD(residual2), L_block, N, C, purpose, tp);  // after attention
    *t++ = activation(FIELD(ln2),       L_norms, N, C);
    *t++ = activation(FIELD(fch),       L_block, N, F);
    *t++ = activation(FIELD(fch_gelu),  L_gelu, N, F);
    t = stream_rows(t, FIELD(residual3), L_out, N, C, purpose, tp);    // after the MLP
    *t++ = activation(FIELD(lnf),       0, N, C);
    *t++ = activation(FIELD(logits),    0, N_head, c.Vp); // then their gradient
    *t++ = activation(FIELD(branch),    0, N, C);         // a block's output before it joins the stream
    *t++ = activation(FIELD(dresidual), 0, N_train, C);
    *t++ = activation(FIELD(dbranch),   0, N_train, C);      // gradient of a LayerNorm's or attention's output
    *t++ = activation(FIELD(dwide),     0, N_train, wide);   // gradient of fch, later of qkv
#undef FIELD
    return (int)(t - table);
}

static int statistic_table(Tensor* table, Config c, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const int N = own_positions(how, B, T), L_block = activations_kept(how, c.L, purpose, RECOMPUTE_BLOCKS);
    Tensor* t = table;
#define FIELD(name) #name, offsetof(Statistics, name)
    *t++ = activation(FIELD(ln1_mean), L_block, N, 1);
    *t++ = activation(FIELD(ln1_rstd), L_block, N, 1);
    *t++ = activation(FIELD(att_max),  L_block, N, c.NH);  // (B, NH, T)
    *t++ = activation(FIELD(att_inv),  L_block, N, c.NH);  // (B, NH, T)
    *t++ = activation(FIELD(ln2_mean), L_block, N, 1);
    *t++ = activation(FIELD(ln2_rstd), L_block, N, 1);
    *t++ = activation(FIELD(lnf_mean), 0, N, 1);
    *t++ = activation(FIELD(lnf_rstd), 0, N, 1);
    *t++ = activation(FIELD(losses),   0, N, 1);
    *t++ = activation(FIELD(dstream),  0, 1, c.C);  // dresidual's sum over positions, above a layer
#undef FIELD
    return (int)(t - table);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: forward, head, backward. AdamW, with its float masters, is in llmc/run/train.h and needs no word about
// GPT-2.

// Sizes only; returns the bytes that activations_open will take on the device
static double activations_layout(Activations* acts, const GPT2* gpt2, int B, int T, Purpose purpose, Tradeoffs how) {
    const Config* c = &gpt2->config;
    const Model* m = &gpt2->model;
    activations_begin(acts, B, T, purpose, how);
    acts->N = own_positions(&how, B, T);
    const int N_head = activations_head_rows(&how, 1, acts->N, purpose);
    acts->parallel.n = tp_larger(linear_room_elements(m, acts->N), vocabulary_room_elements(m, acts->N, N_head, 1));
    acts->keys.n = segment_room_elements(B * T, c->NH, c->NH, c->HC / c->NH, purpose == TO_TRAIN, how.cp);
    const int n_tensors = activation_table(acts->tensors.table, gpt2, B, T, purpose, &how);
    const int n_statistics = statistic_table(acts->statistics.table, *c, B, T, purpose, &how);
    return activations_measure(acts, n_tensors, n_statistics, NULL, 0, 0.0);  // no experts, no RoPE
}

static StoredParameters layer_weights(const GPT2* gpt2, int l) {
    StoredParameters p;
    model_point(&gpt2->model, &p, l);
    return p;
}

static ActivationTensors layer_activations(const Activations* acts, int l) {
    ActivationTensors a;
    tensor_arena_point(&acts->tensors, &a, l);
    return a;
}

#define AT(name) offsetof(Parameters, name)

static Statistics layer_statistics(const Activations* acts, int l) {
    Statistics s;
    tensor_arena_point(&acts->statistics, &s, l);
    return s;
}

// in training; in generation attention_forward reads the cache
static SegmentAttention attention(const GPT2* gpt2, const Activations* acts, int l) {
    const int NH = gpt2->config.NH, HC = gpt2->config.HC;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const size_t row = 3 * (size_t)HC;
    const SegmentAttention x = {NH, NH, HC / NH, 0, row, row, a.qkv, a.qkv + HC, a.qkv + 2 * HC, a.atty, s.att_max,
                                s.att_inv, acts->how.cp, acts->keys.at, NULL, NULL};
    return x;
}

// layer l from its first LayerNorm's output to GELU's: with N positions from t0 on, whose stream comes in as `residual`
static void block_forward(const GPT2* gpt2, Activations* acts, int l, const floatX* residual, int N, int t0,
                          const Device* dev) {
    const int C = gpt2->config.C, HC = gpt2->config.HC;
    ActivationTensors a = layer_activations(acts, l);
    Statistics s = layer_statistics(acts, l);
    StoredParameters p = layer_weights(gpt2, l);
    linear_forward(a.qkv + (size_t)t0 * 3 * HC, a.ln1, layer_linear_biased(acts, AT(qkvw), AT(qkvb), l), N, dev);
    if (acts->purpose == TO_GENERATE) {
        attention_forward(a.atty, s.att_max, s.att_inv, a.qkv, 1, t0 + N, HC, gpt2->config.NH, t0, dev);
    } else {
        const SegmentAttention x = attention(gpt2, acts, l);
        segment_attention_forward(&x, &acts->batch.segments, &acts->batch.rows, dev);
    }
    linear_forward(a.branch, a.atty, layer_linear_biased(acts, AT(attprojw), AT(attprojb), l), N, dev);
    dropout(a.branch, a.branch, &acts->dropout, site_attention(l), (size_t)N * C, dev);
    residual_layernorm_forward(a.residual2.x, a.ln2, s.ln2_mean, s.ln2_rstd, residual, a.branch, p.ln2w, p.ln2b,
                               LAYERNORM_EPS, N, C, dev);
    matmul_gelu_forward(a.fch_gelu, a.fch, a.ln2, p.fcw, p.fcb, fuses_forward(&acts->how), N, C, gpt2->config.F, dev);
}

// each segment counts its positions from 0
static void embed_segments(floatX* out, const int* tokens, const StoredParameters* p, int C, const TokenBatch* x,
                           const Device* dev) {
    if (x->segments.places) {
        placed_embedding_forward(out, tokens, x->segments.places, p->wte, p->wpe, x->n, C, dev);
        return;
    }
    for (SegmentSpan s = segment_none(); segment_next(&s, &x->segments, &x->rows);) {
        embedding_forward(out + s.first * C, tokens + s.first, p->wte, p->wpe, s.of.rows, s.T - s.t0, C, s.t0, dev);
    }
}

// tokens and positions of the batch, from t0 on
static void embed(const GPT2* gpt2, Activations* acts, int N, int t0, const Device* dev) {
    const StoredParameters p = layer_weights(gpt2, 0);
    const Linear wte = layer_linear(acts, AT(wte), 0);
    const int *tokens = acts->batch.tokens, *own = vocabulary_own(&wte, tokens, N, dev);
    floatX* encoded = layer_activations(acts, 0).encoded;
    if (acts->purpose == TO_GENERATE) {
        embedding_forward(encoded, own, p.wte, p.wpe, 1, N, wte.C, t0, dev);
    } else {
        embed_segments(encoded, own, &p, wte.C, &acts->batch, dev);
    }
    vocabulary_gather(encoded, &wte, tokens, N, dev);
    dropout(encoded, encoded, &acts->dropout, SITE_EMBEDDING, (size_t)N * gpt2->config.C, dev);
}

// tokens (B, T-t0), on the host or NULL: uploaded, at positions t0..T-1, up to the last LayerNorm. t0 > 0, with B = 1,
// goes on from an earlier call on the same activations: qkv still holds the keys and values of the positions before,
// and only the new ones are computed. Layers: those that this rank has. With --pp only the first stage embeds tokens,
// and only the last one has the head.
static void gpt2_forward(const GPT2* gpt2, Activations* acts, const int* tokens, int B, int T, int t0,
                         const Device* dev) {
    const Model* m = &gpt2->model;
    const int C = gpt2->config.C, first = model_first_layer(m), end = model_end_layer(m);
    ActivationTensors a = layer_activations(acts, first);
    Statistics s = layer_statistics(acts, first);
    StoredParameters p = layer_weights(gpt2, first);
    if (tokens) { token_batch_inputs(&acts->batch, tokens, NULL, B, T, t0, dev); }
    const int N = acts->batch.n;
    if (model_has_embedding(m)) { embed(gpt2, acts, N, t0, dev); }
    const floatX* residual = a.encoded;
    layernorm_forward(a.ln1, s.ln1_mean, s.ln1_rstd, residual, p.ln1w, p.ln1b, LAYERNORM_EPS, N, C, dev);
    for (int l = first; l < end; l++) {
        block_forward(gpt2, acts, l, residual, N, t0, dev);
        a = layer_activations(acts, l);
        p = layer_weights(gpt2, l);
        linear_forward(a.branch, a.fch_gelu, layer_linear_biased(acts, AT(fcprojw), AT(fcprojb), l), N, dev);
        dropout(a.branch, a.branch, &acts->dropout, site_mlp(l), (size_t)N * C, dev);
        if (l + 1 < end) {  // the stream goes on, and into the next layer's LayerNorm at once
            ActivationTensors next = layer_activations(acts, l + 1);
            s = layer_statistics(acts, l + 1);
            p = layer_weights(gpt2, l + 1);
            residual_layernorm_forward(a.residual3.x, next.ln1, s.ln1_mean, s.ln1_rstd, a.residual2.x, a.branch, p.ln1w,
                                       p.ln1b, LAYERNORM_EPS, N, C, dev);
        } else if (!model_has_head(m)) {
            residual_forward(a.residual3.x, a.residual2.x, a.branch, (size_t)N * C, dev);
        } else {
            residual_layernorm_forward(a.residual3.x, a.lnf, s.lnf_mean, s.lnf_rstd, a.residual2.x, a.branch, p.lnfw,
                                       p.lnfb, LAYERNORM_EPS, N, C, dev);
        }
        layer_keep(acts, l, a.residual2, a.residual3, N, C, dev);
        residual = a.residual3.x;
    }
}

// from the last norm's output to logits and losses, head_rows positions at a time, and back to its gradient. Its matrix
// is the embedding again
static LmHead lm_head(const GPT2* gpt2, const Activations* acts) {
    const ActivationTensors a = layer_activations(acts, 0);
    return layer_head(acts, AT(wte), a.lnf, a.dbranch, a.logits, layer_statistics(acts, 0).losses, gpt2->config.V);
}

// what --recompute left out of layer l; the last layer's is still there
static void recompute_block(const GPT2* gpt2, Activations* acts, int l, const floatX* residual, int N,
                            const Device* dev) {
    const int C = gpt2->config.C, level = acts->how.recompute;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const StoredParameters p = layer_weights(gpt2, l);
    if (layer_is_fresh(acts, l)) { return; }
    if (level >= RECOMPUTE_NORMS) {
        layernorm_forward(a.ln1, s.ln1_mean, s.ln1_rstd, residual, p.ln1w, p.ln1b, LAYERNORM_EPS, N, C, dev);
    }
    if (level == RECOMPUTE_BLOCKS) {
        block_forward(gpt2, acts, l, residual, N, 0, dev);
        return;
    }
    layer_stream(acts, a.residual2, l, N, C, dev);
    if (level >= RECOMPUTE_NORMS) {
        layernorm_forward(a.ln2, s.ln2_mean, s.ln2_rstd, a.residual2.x, p.ln2w, p.ln2b, LAYERNORM_EPS, N, C, dev);
    }
    if (level >= RECOMPUTE_GELU) { gelu_forward(a.fch_gelu, a.fch, (size_t)N * gpt2->config.F, dev); }
}

// from the gradient of the stream, dresidual, to those of both tables of vectors
static void embed_backward(GPT2* gpt2, Activations* acts, int N, const Device* dev) {
    const Parameters d = gpt2_gradients(gpt2, 0);
    const Linear wte = layer_linear(acts, AT(wte), 0);
    floatX* dencoded = layer_activations(acts, 0).dresidual;
    dropout(dencoded, dencoded, &acts->dropout, SITE_EMBEDDING, (size_t)N * gpt2->config.C, dev);
    // positions beyond T get none
    if (d.wpe) { device_zero(d.wpe, sizeof(float) * (size_t)gpt2->config.max_T * wte.C, dev); }
    const TokenBatch* x = &acts->batch;
    const int* own = vocabulary_own(&wte, x->tokens, N, dev);
    if (x->segments.places) {
        placed_embedding_backward(d.wte, d.wpe, dencoded, own, x->segments.places, N, wte.C, dev);
        return;
    }
    for (SegmentSpan s = segment_none(); segment_next(&s, &x->segments, &x->rows);) {
        embedding_backward(d.wte, d.wpe ? d.wpe + s.t0 * wte.C : NULL, dencoded + s.first * wte.C,
                           own + s.first, s.of.rows, s.T - s.t0, wte.C, dev);
    }
}

// Forward's calls upside down, after the head. Every parameter's gradient is written, but for what is frozen, whose
// pointer is NULL: one micro-batch is one leaf.
static void gpt2_backward(GPT2* gpt2, Activations* acts, int N, const Device* dev) {
    const Model* m = &gpt2->model;
    const int C = gpt2->config.C, HC = gpt2->config.HC;
    const int first = model_first_layer(m), end = model_end_layer(m);
    ActivationTensors a = layer_activations(acts, end - 1);
    Statistics s = layer_statistics(acts, end - 1);
    StoredParameters p = layer_weights(gpt2, end - 1);
    Parameters d = gpt2_gradients(gpt2, end - 1);
    // Where nothing is left out, a bias that joins the stream has the sum of dresidual as its gradient, and LayerNorm's
    // backward pass has every row of that at hand
    const int joins = acts->dropout.p == 0.0f;
    int has_sum = joins && model_has_head(m);  // is it that of this layer's end?
    if (model_has_head(m)) {
        device_zero(a.dresidual, sizeof(floatX) * (size_t)N * C, dev);
        residual_layernorm_backward(a.dresidual, d.lnfw, d.lnfb, joins ? s.dstream : NULL, a.dbranch,
                                    layer_stream(acts, a.residual3, end - 1, N, C, dev), p.lnfw, s.lnf_mean, s.lnf_rstd,
                                    N, C, dev);
    }
    for (int l = end - 1; l >= first && l >= m->lowest; l--) {
        const floatX* residual =
            l > first ? layer_stream(acts, layer_activations(acts, l - 1).residual3, l - 1, N, C, dev) : a.encoded;
        a = layer_activations(acts, l);
        s = layer_statistics(acts, l);
        p = layer_weights(gpt2, l);
        d = gpt2_gradients(gpt2, l);
        recompute_block(gpt2, acts, l, residual, N, dev);
        LinearGradients d_fcproj = layer_gradients_biased(acts, AT(fcprojw), AT(fcprojb), l);
        LinearGradients d_attproj = layer_gradients_biased(acts, AT(attprojw), AT(attprojb), l);
        float* d_attprojb = joins ? d_attproj.bias : NULL;
        if (joins) { d_attproj.bias = NULL; }
        if (has_sum && d_fcproj.bias) {
            device_copy(d_fcproj.bias, s.dstream, sizeof(float) * (size_t)C, dev);
            d_fcproj.bias = NULL;
        }
        const floatX* dout = dropout(a.branch, a.dresidual, &acts->dropout, site_mlp(l), (size_t)N * C, dev);
        linear_gelu_backward(a.dwide, dout, a.fch_gelu, a.fch, layer_linear_biased(acts, AT(fcprojw), AT(fcprojb), l),
                             d_fcproj, acts->how.gelu_fusion > 1, N, dev);
        linear_backward(a.dbranch, a.dwide, a.ln2, layer_linear_biased(acts, AT(fcw), AT(fcb), l),
                        layer_gradients_biased(acts, AT(fcw), AT(fcb), l), 0, N, dev);
        residual_layernorm_backward(a.dresidual, d.ln2w, d.ln2b, d_attprojb, a.dbranch, a.residual2.x, p.ln2w,
                                    s.ln2_mean, s.ln2_rstd, N, C, dev);
        dout = dropout(a.branch, a.dresidual, &acts->dropout, site_attention(l), (size_t)N * C, dev);
        linear_backward(a.dbranch, dout, a.atty, layer_linear_biased(acts, AT(attprojw), AT(attprojb), l), d_attproj, 0,
                        N, dev);
        const SegmentAttention x = attention(gpt2, acts, l);
        segment_attention_backward(a.dwide, a.dwide + HC, a.dwide + 2 * HC, a.dbranch, &x, &acts->batch.segments,
                                   &acts->batch.rows, dev);
        linear_backward(a.dbranch, a.dwide, a.ln1, layer_linear_biased(acts, AT(qkvw), AT(qkvb), l),
                        layer_gradients_biased(acts, AT(qkvw), AT(qkvb), l), 0, N, dev);
        residual_layernorm_backward(a.dresidual, d.ln1w, d.ln1b, joins ? s.dstream : NULL, a.dbranch, residual, p.ln1w,
                                    s.ln1_mean, s.ln1_rstd, N, C, dev);
        has_sum = joins;
        model_layer_done(&gpt2->model, l, dev);
    }
    if (!model_has_embedding(m)) { return; }
    model_receive_shared(&gpt2->model, dev);  // what the head has written, with --pp on another rank
    embed_backward(gpt2, acts, N, dev);
}

static void leaf_begin(Activations* acts, const int* tokens, const int* targets, int B, int T, const Device* dev) {
    token_batch_inputs(&acts->batch, tokens, NULL, B, T, 0, dev);
    token_batch_targets(&acts->batch, targets, B * T, dev);
}

// from the stream behind the last layer of this stage to losses, and back to all gradients
static void leaf_backward(GPT2* gpt2, Activations* acts, float dloss, const Device* dev) {
    const int N = acts->batch.n;
    if (model_has_head(&gpt2->model)) {
        const LmHead head = lm_head(gpt2, acts);
        lm_head_losses(&head, &acts->batch, 1, gpt2_gradients(gpt2, 0).wte, dloss, N, dev);
        crossentropy_losses_sum(dp_loss(&gpt2->model.dp), head.losses, N, dev);
    }
    gpt2_backward(gpt2, acts, N, dev);
}

// One micro-batch, forward and backward; its loss and gradient join the tree of llmc/ranks/data_parallel.h. Nothing
// here waits for the GPU. What stands between graph_begin and graph_end may be one launch
static void gpt2_leaf(GPT2* gpt2, Activations* acts, const int* tokens, const int* targets, float dloss, int B, int T,
                      const Device* dev) {
    DataParallel* dp = &gpt2->model.dp;
    leaf_begin(acts, tokens, targets, B, T, dev);
    if (graph_begin(&acts->graph, dp_leaf_arena(dp), dloss, B, T, dev)) {
        gpt2_forward(gpt2, acts, NULL, B, T, 0, dev);
        leaf_backward(gpt2, acts, dloss, dev);
        graph_end(&acts->graph, dev);
    }
    model_leaf_done(&gpt2->model, dev);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. What a run asks of this model (llmc/run/trainer.h), and main.

#ifndef TESTING
typedef struct {
    GPT2 gpt2;                // first
    Activations acts, cache;  // of a batch; of the text that is being generated
    Tradeoffs how;            // options
    int master_weights, graph, cp, cp_by;
} Workplace;

static Workplace* workplace(const Run* r) { return (Workplace*)r->model; }
static Activations* activations_of(const Run* r, Purpose purpose) {
    return purpose == TO_GENERATE ? &workplace(r)->cache : &workplace(r)->acts;
}

static void gpu_options(Run* r) {
    Workplace* w = workplace(r);
    const Option own[] = {
        {"GPU", "recompute", "-r", OPTION_INT, &w->how.recompute, "0", 0, 3, "0|1|2|3",
         "compute again in backward instead of keeping: 1 GELU, 2 LayerNorms too, 3 whole blocks. Saves memory, "
         "changes no bit, but that 1 and 2 leave out forward's part of --gelu-fusion", 0},
        {"GPU", "gelu-fusion", "-ge", OPTION_INT, &w->how.gelu_fusion, "2", 0, 2, "0|1|2",
         "GELU inside the product beside it, from sums that are not rounded to bf16: 1 forward, 2 backward too; an "
         "exact build has none", 0},
        {"GPU", "master-weights", "-w", OPTION_SWITCH, &w->master_weights, "1", 0, 0, "0|1",
         "keep float parameters beside bf16 ones; 0: less memory, and small updates live by the noise of the "
         "rounding", 0},
        {"GPU", "head-rows", "", OPTION_INT, &w->how.head_rows, "8192", 1, INT_MAX, "N",
         "positions whose logits are in memory at once", 0},
        graph_option(&w->graph),
        tp_option(&w->gpt2.tp),
        cp_option(&w->cp, CP_CHUNKS),
        cp_by_option(&w->cp_by),
    };
    gpt2_options(r);
    run_add_options(r, own, sizeof own);
}

static void choose(Run* r) {
    GPT2* g = gpt2_of(r);
    gpt2_choose(r);
    tp_begin(r, &g->tp);
    cp_begin(r, &workplace(r)->cp, CP_CHUNKS);
    g->config = config_part(&g->whole, g->model.tp.size);
}

static void check_options(Run* r) {
    const Tradeoffs* how = &workplace(r)->how;
    gpt2_check(r);
    r->has_masters = !FLOATX_IS_FLOAT && workplace(r)->master_weights;
    if (how->gelu_fusion == 1 && !fuses_forward(how)) {
        options_fail("gelu-fusion", "with --recompute %d GELU is computed again from rounded sums, and gradients would "
                     "differ: expected --recompute 0 or 3, or --gelu-fusion 2 for backward", how->recompute);
    }
    cp_check(r, &workplace(r)->cp, gpt2_of(r)->dropout);
    cp_check_by(r, workplace(r)->cp_by, gpt2_of(r)->config.NH, gpt2_of(r)->config.NH);
    const char* const drops = "is not for --dropout: each micro-batch leaves out other elements";
    graph_check(r, &workplace(r)->graph, gpt2_of(r)->dropout > 0.0f ? drops : NULL, 0);
}

static Tradeoffs how_of(const Run* r, Purpose purpose) {
    Tradeoffs how = workplace(r)->how;
    how.slots = pp_slots(r, purpose);
    how.cp = model_has_cp(r->model) && purpose != TO_GENERATE ? &r->model->cp : NULL;
    return how;
}

static double activation_bytes(const Run* r, Purpose purpose, int B, int T, int sparing) {
    Activations acts;
    Tradeoffs how = how_of(r, purpose);
    if (sparing) { how.recompute = RECOMPUTE_BLOCKS; }
    return activations_layout(&acts, gpt2_of(r), B, T, purpose, how);
}

static void box(const Run* r) {
    gpt2_box(r);
    tp_box(r);
    cp_box(r);
}

static int recomputes(const Run* r) { return workplace(r)->how.recompute == RECOMPUTE_BLOCKS; }

// with --tp: what the products of layer l need of other ranks
static double layer_parts_sent(const Run* r, int l, int is_back, int again) {
    const size_t once_more = again && recomputes(r) ? AT(attprojw) : TENSOR_NO_FIELD;
    (void)is_back;
    return linear_layer_sends(r->model, NULL, l, once_more, 1, gpt2_of(r)->config.C, run_positions(r));
}

static double parts_sent(const Run* r) {
    const int C = gpt2_of(r)->config.C;
    return sent_parts(r, recomputes(r), C, C);
}

// with --cp: what its attention does
static double layer_keys_sent(const Run* r, int l, int is_back, int again) {
    const Config* c = &gpt2_of(r)->config;  // of --tp own heads
    (void)l;
    return cp_layer_sent(r, c->NH, c->NH, c->HC / c->NH, is_back, again && recomputes(r));
}

static double workspace_bytes(const Run* r, int B) { return gpt2_workspace_bytes(r, B, workplace(r)->how.head_rows); }

static void open_activations(Run* r, Purpose purpose, int B, int T) {
    const Workplace* w = workplace(r);
    Activations* acts = activations_of(r, purpose);
    activations_layout(acts, &w->gpt2, B, T, purpose, how_of(r, purpose));
    activations_open(acts, r->model, &r->dev);
    acts->batch.segments.document_start = run_document_start(r, purpose);
    acts->graph.is_on = acts->batch.counts_all = w->graph;
}

static void train_leaf(Run* r, int k, const int* inputs, const int* targets, float dloss, int B, int T) {
    Activations* acts = &workplace(r)->acts;
    const Dropout none = {0.0f, 0, 0};
    acts->dropout = gpt2_dropout(r, k);
    gpt2_leaf(gpt2_of(r), acts, inputs, targets, dloss, B, T, &r->dev);
    acts->dropout = none;  // validation leaves nothing out
}

// ---- the same in two parts, between which other micro-batches are computed (--pp, llmc/run/pipeline.h) ----

static void turn(Run* r, int slot) { activations_turn(&workplace(r)->acts, slot); }

static PpStreams streams_of(const Run* r, const Activations* acts, int N) {
    const ActivationTensors a = layer_activations(acts, model_end_layer(r->model) - 1);
    return pp_streams(a.encoded, a.residual3.x, a.dresidual, sizeof(floatX) * (size_t)N * gpt2_of(r)->config.C);
}

static PpStreams streams(const Run* r, int N) { return streams_of(r, &workplace(r)->acts, N); }

static void forward_leaf(Run* r, int k, const int* inputs, const int* targets, int B, int T) {
    Activations* acts = &workplace(r)->acts;
    const Dropout none = {0.0f, 0, 0};
    leaf_begin(acts, inputs, targets, B, T, &r->dev);
    acts->dropout = gpt2_dropout(r, k);
    gpt2_forward(gpt2_of(r), acts, NULL, B, T, 0, &r->dev);
    acts->dropout = none;
}

static void backward_leaf(Run* r, int k, const int* inputs, const int* targets, float dloss, int B, int T) {
    Activations* acts = &workplace(r)->acts;
    const Dropout none = {0.0f, 0, 0};
    (void)inputs, (void)targets, (void)B, (void)T;  // they are on the device
    acts->dropout = gpt2_dropout(r, k);
    leaf_backward(gpt2_of(r), acts, dloss, &r->dev);
    model_leaf_done(r->model, &r->dev);
    acts->dropout = none;
}

// ---- a pass without gradients ----

static void forward(Run* r, Purpose purpose, const int* tokens, const int* targets, int B, int T, int t0) {
    Activations* acts = activations_of(r, purpose);
    (void)targets;
    token_batch_inputs(&acts->batch, tokens + t0, NULL, B, T, t0, &r->dev);
    for (int c = 0; c < r->model->pp.n_chunks; c++) {
        model_turn_to(r->model, c);
        activations_turn_to_chunk(acts, c);
        const PpStreams e = streams_of(r, acts, own_positions(&acts->how, B, T - t0));
        pp_receive(&r->model->pp, &e, &r->dev);
        gpt2_forward(gpt2_of(r), acts, NULL, B, T, t0, &r->dev);
        pp_send(&r->model->pp, &e, &r->dev);
    }
}

static const floatX* logits(Run* r, Purpose purpose, int n) {
    const LmHead head = lm_head(gpt2_of(r), activations_of(r, purpose));
    return lm_head_logits(&head, n, 1, &r->dev);
}

static const float* losses(Run* r, const int* targets, int N) {
    Activations* acts = activations_of(r, TO_EVALUATE);
    const LmHead head = lm_head(gpt2_of(r), acts);
    return lm_head_evaluate(&head, &acts->batch, targets, N, &r->dev);
}

static void close_activations(Run* r) {
    activations_free(&workplace(r)->acts);
    activations_free(&workplace(r)->cache);
}

static Trainer gpu_trainer(void) {
    Trainer t = gpt2_trainer("train_gpt2cu",
                             "Trains GPT-2 and GPT-3 on GPUs. The CPU trainer is train_gpt2; first steps: make run.");
    t.stored_bytes = sizeof(floatX);
    t.sparing = "--recompute 3";
    t.options = gpu_options;
    t.choose = choose;
    t.check = check_options;
    t.box = box;
    t.parts_sent = parts_sent;
    t.keys_sent = sent_keys;
    t.layer_parts_sent = layer_parts_sent;
    t.layer_keys_sent = layer_keys_sent;
    t.activation_bytes = activation_bytes;
    t.workspace_bytes = workspace_bytes;
    t.open = open_activations;
    t.leaf = train_leaf;
    t.turn = turn;
    t.streams = streams;
    t.forward_leaf = forward_leaf;
    t.backward_leaf = backward_leaf;
    t.forward = forward;
    t.logits = logits;
    t.losses = losses;
    t.close = close_activations;
    return t;
}

int main(int argc, char** argv) {
    static Workplace place;  // all zero
    const Trainer trainer = gpu_trainer();
    return run_main(&trainer, &place.gpt2.model, argc, argv);
}
#endif
