/*
GPT-2 and GPT-3, trained in plain C: this file has the model, forward and backward. Read it from top to bottom, then
the loop that trains it, llmc/run/train.h, then any op: each is a file of llmc/ops/ whose plain loop defines its result
to the last bit.

The model (Radford et al. 2019; Brown et al. 2020): token + position embedding, L blocks of
    r = r + attention(layernorm(r))
    r = r + gelu(layernorm(r) * fc) * fcproj
a last LayerNorm, and the token embedding again as output matrix. Left out: dropout of attention's weights, and GPT-3's
banded attention.

    make run                                                  trains a small one on this repository's own text
    make train_gpt2 && ./train_gpt2 --help                    every option
    ./train_gpt2 --model tiny --train book.txt --steps 1000   your text, byte by byte
    ./train_gpt2 --from gpt2/ --train 'shards/train_*.bin'    fine-tunes a Hugging Face folder on token shards

What the first one prints, for example (the numbers change with the text):
    step 0 | val loss 5.4560 | 7.871 bits/byte | best
    step 100/2800 | loss 2.9669 | norm 1.13 | lr 4.0e-03 | 61 ms | 8.4k tok/s | 60% peak | eta 2m37s
*/
#include "llmc/core/tensor_arena.h"  // TensorArena: activations, laid out by a table
#include "llmc/models/gpt2.h"        // GPT2, Config, Parameters: sizes and parameters, shared with train_gpt2.cu
#include "llmc/ops/attention.h"      // attention_forward, attention_backward
#include "llmc/ops/crossentropy.h"   // crossentropy_forward, crossentropy_backward, crossentropy_losses_sum
#include "llmc/ops/documents.h"      // Segments, segments_find: where attention and positions start anew
#include "llmc/ops/dropout.h"        // Dropout, dropout: a part of the elements is left out (--dropout)
#include "llmc/ops/embedding.h"      // embedding_forward, embedding_backward
#include "llmc/ops/gelu.h"           // gelu_forward, gelu_backward
#include "llmc/ops/layernorm.h"      // layernorm_forward, layernorm_backward
#include "llmc/ops/matmul.h"         // matmul_forward, matmul_backward
#include "llmc/ops/residual.h"       // residual_forward
#ifndef TESTING                     // a test includes this file for the model alone
#include "llmc/models/gpt2_run.h"  // run_main: options, data, steps, checkpoints, ranks (llmc/run/)
#endif

// ---------------------------------------------------------------------------------------------------------------------
// 1. Tensors. What makes one GPT-2 different from another, and one line for each parameter, is in llmc/models/gpt2.h,
// because train_gpt2.cu needs the same; here is one line for each activation. Everything else loops over these tables.

// what a pass leaves behind; the last three are the gradients on their way back, one buffer each for all layers
typedef struct {
    float *encoded, *ln1, *ln1_mean, *ln1_rstd, *qkv, *atty, *att_max, *att_inv, *residual2, *ln2, *ln2_mean, *ln2_rstd,
        *fch, *fch_gelu, *residual3, *lnf, *lnf_mean, *lnf_rstd, *logits, *losses, *branch,
        *dresidual, *dbranch, *dwide;
} ActivationTensors;

// B rows of T positions; generation keeps logits of the last position only
static int activation_table(Tensor* table, Config c, int B, int T, Purpose purpose) {
    const int L = c.L, C = c.C, N = B * T;
    const int N_logits = purpose == TO_GENERATE ? 1 : N, N_train = purpose == TO_TRAIN ? N : 0;
    Tensor* t = table;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = input_activation(FIELD(encoded), N, C);        // wte + wpe; of a later stage (--pp) the stream that comes in
    *t++ = activation(FIELD(ln1),       L, N, C);
    *t++ = activation(FIELD(ln1_mean),  L, N, 1);
    *t++ = activation(FIELD(ln1_rstd),  L, N, 1);
    *t++ = activation(FIELD(qkv),       L, N, 3 * C);     // in generation: the key-value cache
    *t++ = activation(FIELD(atty),      L, N, C);         // attention's output before its projection
    *t++ = activation(FIELD(att_max),   L, N, c.NH);      // (B, NH, T)
    *t++ = activation(FIELD(att_inv),   L, N, c.NH);      // (B, NH, T)
    *t++ = activation(FIELD(residual2), L, N, C);         // residual stream after attention
    *t++ = activation(FIELD(ln2),       L, N, C);
    *t++ = activation(FIELD(ln2_mean),  L, N, 1);
    *t++ = activation(FIELD(ln2_rstd),  L, N, 1);
    *t++ = activation(FIELD(fch),       L, N, 4 * C);
    *t++ = activation(FIELD(fch_gelu),  L, N, 4 * C);
    *t++ = activation(FIELD(residual3), L, N, C);         // residual stream after the MLP
    *t++ = activation(FIELD(lnf),       0, N, C);
    *t++ = activation(FIELD(lnf_mean),  0, N, 1);
    *t++ = activation(FIELD(lnf_rstd),  0, N, 1);
    *t++ = activation(FIELD(logits),    0, N_logits, c.Vp);  // then probabilities, then their gradient
    *t++ = activation(FIELD(losses),    0, N, 1);
    *t++ = activation(FIELD(branch),    0, N, C);         // a block's output before it joins the stream; its gradient
    *t++ = activation(FIELD(dresidual), 0, N_train, C);
    *t++ = activation(FIELD(dbranch),   0, N_train, C);      // gradient of a LayerNorm's or attention's output
    *t++ = activation(FIELD(dwide),     0, N_train, 4 * C);  // gradient of fch, later of qkv
#undef FIELD
    return (int)(t - table);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: forward and backward. AdamW needs no word about GPT-2: it is in llmc/run/train.h.

typedef struct {
    TensorArena tensors;
    Segments segments;  // of the batch: what attention and positions see as one sequence (--doc-reset)
    Dropout dropout;    // of this leaf in training; else all zero: nothing is left out
} Activations;

// Sizes only; returns the bytes that activations_init will take. With --pp: of the layers of this rank, for as many
// micro-batches as wait for their backward pass
static double activations_layout(Activations* acts, Config c, int B, int T, Purpose purpose, const ArenaSlots* slots) {
    memset(acts, 0, sizeof *acts);
    tensor_arena_layout(&acts->tensors, activation_table(acts->tensors.table, c, B, T, purpose), sizeof(float));
    return tensor_arena_divide(&acts->tensors, slots);
}

static void activations_init(Activations* acts, Config c, int B, int T, Purpose purpose, const ArenaSlots* slots) {
    activations_layout(acts, c, B, T, purpose, slots);
    tensor_arena_open(&acts->tensors, "activations");
    segments_init(&acts->segments, B, T);
}

static void activations_free(Activations* acts) {
    tensor_arena_close(&acts->tensors);
    free(acts->segments.at);
}

static Parameters layer_parameters(const GPT2* gpt2, int l) {
    Parameters p;
    model_point(&gpt2->model, &p, l);
    return p;
}

static ActivationTensors layer_activations(const Activations* acts, int l) {
    ActivationTensors a;
    tensor_arena_point(&acts->tensors, &a, l);
    return a;
}

// tokens (B, T-t0) at positions t0..T-1, up to the last LayerNorm. t0 > 0, with B = 1, goes on from an earlier call on
// the same activations: qkv still holds keys and values of the positions before, and only the new ones are computed.
// Layers: those that this rank has. With --pp only the first stage embeds tokens, and only the last one has the head.
static void gpt2_forward(const GPT2* gpt2, Activations* acts, const int* tokens, int B, int T, int t0,
                         const Device* dev) {
    const int C = gpt2->config.C, NH = gpt2->config.NH, N = B * (T - t0);
    const Model* m = &gpt2->model;
    ActivationTensors a = layer_activations(acts, 0);
    Parameters p = layer_parameters(gpt2, 0);
    segments_find(&acts->segments, tokens, B, T);
    for (int i = 0; i < acts->segments.n && model_has_embedding(m); i++) {
        Segment s = acts->segments.at[i];
        embedding_forward(a.encoded + s.first * C, tokens + s.first, p.wte, p.wpe, s.rows, s.T - t0, C, t0, dev);
    }
    if (model_has_embedding(m)) { dropout(a.encoded, a.encoded, &acts->dropout, SITE_EMBEDDING, (size_t)N * C, dev); }
    const float* residual = a.encoded;
    for (int l = model_first_layer(m); l < model_end_layer(m); l++) {
        a = layer_activations(acts, l);
        p = layer_parameters(gpt2, l);
        layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, LAYERNORM_EPS, N, C, dev);
        matmul_forward(a.qkv + (size_t)t0 * 3 * C, a.ln1, p.qkvw, p.qkvb, N, C, 3 * C, dev);
        for (int i = 0; i < acts->segments.n; i++) {
            Segment s = acts->segments.at[i];
            attention_forward(a.atty + s.first * C, a.att_max + s.first * NH, a.att_inv + s.first * NH,
                              a.qkv + s.first * 3 * C, s.rows, s.T, C, NH, t0, dev);
        }
        matmul_forward(a.branch, a.atty, p.attprojw, p.attprojb, N, C, C, dev);
        dropout(a.branch, a.branch, &acts->dropout, site_attention(l), (size_t)N * C, dev);
        residual_forward(a.residual2, residual, a.branch, (size_t)N * C, dev);
        layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, LAYERNORM_EPS, N, C, dev);
        matmul_forward(a.fch, a.ln2, p.fcw, p.fcb, N, C, 4 * C, dev);
        gelu_forward(a.fch_gelu, a.fch, (size_t)N * 4 * C, dev);
        matmul_forward(a.branch, a.fch_gelu, p.fcprojw, p.fcprojb, N, 4 * C, C, dev);
        dropout(a.branch, a.branch, &acts->dropout, site_mlp(l), (size_t)N * C, dev);
        residual_forward(a.residual3, a.residual2, a.branch, (size_t)N * C, dev);
        residual = a.residual3;
    }
    if (!model_has_head(m)) { return; }
    layernorm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, residual, p.lnfw, p.lnfb, LAYERNORM_EPS, N, C, dev);
}

// logits of the n positions that follow `first`, into the first n rows of logits
static float* gpt2_logits(const GPT2* gpt2, Activations* acts, int first, int n, const Device* dev) {
    const int C = gpt2->config.C;
    ActivationTensors a = layer_activations(acts, 0);
    Parameters p = layer_parameters(gpt2, 0);
    matmul_forward(a.logits, a.lnf + (size_t)first * C, p.wte, NULL, n, C, gpt2->config.Vp, dev);
    return a.logits;
}

// logits become probabilities; the loss of each position
static const float* gpt2_losses(const GPT2* gpt2, Activations* acts, const int* targets, int N, const Device* dev) {
    ActivationTensors a = layer_activations(acts, 0);
    crossentropy_forward(a.losses, a.logits, a.logits, targets, N, gpt2->config.V, gpt2->config.Vp, dev);
    return a.losses;
}

// the head: from logits, which are probabilities now, to the gradient of the stream, dresidual
static void gpt2_head_backward(GPT2* gpt2, Activations* acts, const int* targets, float dloss, int N,
                               const Device* dev) {
    const Config c = gpt2->config;
    ActivationTensors a = layer_activations(acts, c.L - 1);
    Parameters p = layer_parameters(gpt2, c.L - 1), d = gpt2_gradients(gpt2, c.L - 1);
    crossentropy_backward(a.logits, a.logits, targets, dloss, N, c.V, c.Vp, dev);
    matmul_backward(a.dbranch, d.wte, NULL, a.logits, a.lnf, p.wte, N, c.C, c.Vp, dev);
    memset(a.dresidual, 0, sizeof(float) * N * c.C);
    layernorm_backward(a.dresidual, d.lnfw, d.lnfb, a.dbranch, a.residual3, p.lnfw, a.lnf_mean, a.lnf_rstd, N, c.C,
                       dev);
}

// Forward's calls upside down, after the head. Every parameter's gradient is written, but for what is frozen, whose
// pointer is NULL: one micro-batch is one leaf, which joins the tree of llmc/ranks/data_parallel.h.
static void gpt2_backward(GPT2* gpt2, Activations* acts, const int* tokens, int B, int T, const Device* dev) {
    const Config c = gpt2->config;
    const Model* m = &gpt2->model;
    const int C = c.C, N = B * T, first = model_first_layer(m);
    ActivationTensors a = layer_activations(acts, first);
    Parameters p, d;
    for (int l = model_end_layer(m) - 1; l >= first && l >= m->lowest; l--) {
        const float* residual = l > first ? layer_activations(acts, l - 1).residual3 : a.encoded;
        a = layer_activations(acts, l);
        p = layer_parameters(gpt2, l);
        d = gpt2_gradients(gpt2, l);
        const float* dout = dropout(a.branch, a.dresidual, &acts->dropout, site_mlp(l), (size_t)N * C, dev);
        matmul_backward(a.dwide, d.fcprojw, d.fcprojb, dout, a.fch_gelu, p.fcprojw, N, 4 * C, C, dev);
        gelu_backward(a.dwide, a.fch, a.dwide, (size_t)N * 4 * C, dev);
        matmul_backward(a.dbranch, d.fcw, d.fcb, a.dwide, a.ln2, p.fcw, N, C, 4 * C, dev);
        layernorm_backward(a.dresidual, d.ln2w, d.ln2b, a.dbranch, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd, N, C,
                           dev);
        dout = dropout(a.branch, a.dresidual, &acts->dropout, site_attention(l), (size_t)N * C, dev);
        matmul_backward(a.dbranch, d.attprojw, d.attprojb, dout, a.atty, p.attprojw, N, C, C, dev);
        for (int i = 0; i < acts->segments.n; i++) {
            Segment s = acts->segments.at[i];
            attention_backward(a.dwide + s.first * 3 * C, a.dbranch + s.first * C, a.atty + s.first * C,
                               a.att_max + s.first * c.NH, a.att_inv + s.first * c.NH, a.qkv + s.first * 3 * C, s.rows,
                               s.T, C, c.NH, dev);
        }
        matmul_backward(a.dbranch, d.qkvw, d.qkvb, a.dwide, a.ln1, p.qkvw, N, C, 3 * C, dev);
        layernorm_backward(a.dresidual, d.ln1w, d.ln1b, a.dbranch, residual, p.ln1w, a.ln1_mean, a.ln1_rstd, N, C, dev);
        model_layer_done(&gpt2->model, l, dev);
    }
    if (!model_has_embedding(m)) { return; }
    model_receive_shared(&gpt2->model, dev);  // what the head has written, with --pp on another rank
    d = gpt2_gradients(gpt2, 0);
    dropout(a.dresidual, a.dresidual, &acts->dropout, SITE_EMBEDDING, (size_t)N * C, dev);
    if (d.wpe) { memset(d.wpe, 0, sizeof(float) * (size_t)c.max_T * C); }  // positions beyond T get no gradient
    for (int i = 0; i < acts->segments.n; i++) {
        Segment s = acts->segments.at[i];
        embedding_backward(d.wte, d.wpe, a.dresidual + s.first * C, tokens + s.first, s.rows, s.T, C, dev);
    }
}

// The second half of a micro-batch: head, loss and backward; its loss and gradient join the tree. dloss = 1 / targets
// counted in the whole update
static void gpt2_leaf_backward(GPT2* gpt2, Activations* acts, const int* tokens, const int* targets, float dloss, int B,
                               int T, const Device* dev) {
    DataParallel* dp = &gpt2->model.dp;
    const int N = B * T;
    if (model_has_head(&gpt2->model)) {
        gpt2_logits(gpt2, acts, 0, N, dev);
        crossentropy_losses_sum(dp_loss(dp), gpt2_losses(gpt2, acts, targets, N, dev), N, dev);
        gpt2_head_backward(gpt2, acts, targets, dloss, N, dev);
    }
    gpt2_backward(gpt2, acts, tokens, B, T, dev);
    model_leaf_done(&gpt2->model, dev);
}

static void gpt2_leaf(GPT2* gpt2, Activations* acts, const int* tokens, const int* targets, float dloss, int B, int T,
                      const Device* dev) {
    gpt2_forward(gpt2, acts, tokens, B, T, 0, dev);
    gpt2_leaf_backward(gpt2, acts, tokens, targets, dloss, B, T, dev);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. What a run asks of this model (llmc/run/trainer.h), and main.

#ifndef TESTING
typedef struct {
    GPT2 gpt2;                // first
    Activations acts, cache;  // of a batch; of the text that is being generated
} Workplace;

static Workplace* workplace(const Run* r) { return (Workplace*)r->model; }
static Activations* activations_of(const Run* r, Purpose purpose) {
    return purpose == TO_GENERATE ? &workplace(r)->cache : &workplace(r)->acts;
}

static double activation_bytes(const Run* r, Purpose purpose, int B, int T, int sparing) {
    const ArenaSlots slots = pp_slots(r, purpose);
    Activations acts;
    (void)sparing;
    return activations_layout(&acts, gpt2_of(r)->config, B, T, purpose, &slots);
}

static double workspace_bytes(const Run* r, int B) { return gpt2_workspace_bytes(r, B, INT_MAX); }

static void open_activations(Run* r, Purpose purpose, int B, int T) {
    Activations* acts = activations_of(r, purpose);
    const ArenaSlots slots = pp_slots(r, purpose);
    activations_init(acts, gpt2_of(r)->config, B, T, purpose, &slots);
    acts->segments.document_start = run_document_start(r, purpose);
}

static void train_leaf(Run* r, int k, const int* inputs, const int* targets, float dloss, int B, int T) {
    Activations* acts = &workplace(r)->acts;
    const Dropout none = {0.0f, 0, 0};
    acts->dropout = gpt2_dropout(r, k);
    gpt2_leaf(gpt2_of(r), acts, inputs, targets, dloss, B, T, &r->dev);
    acts->dropout = none;  // validation leaves nothing out
}

// ---- the same in two parts, between which other micro-batches are computed (--pp, llmc/run/pipeline.h) ----

// from now on activations are those of this slot
static void turn(Run* r, int slot) { tensor_arena_turn(&workplace(r)->acts.tensors, slot); }

static PpStreams streams_of(const Run* r, const Activations* acts, int N) {
    const ActivationTensors a = layer_activations(acts, model_end_layer(r->model) - 1);
    return pp_streams(a.encoded, a.residual3, a.dresidual, sizeof(float) * (size_t)N * gpt2_of(r)->config.C);
}

static PpStreams streams(const Run* r, int N) { return streams_of(r, &workplace(r)->acts, N); }

static void forward_leaf(Run* r, int k, const int* inputs, const int* targets, int B, int T) {
    Activations* acts = &workplace(r)->acts;
    const Dropout none = {0.0f, 0, 0};
    (void)targets;
    acts->dropout = gpt2_dropout(r, k);
    gpt2_forward(gpt2_of(r), acts, inputs, B, T, 0, &r->dev);
    acts->dropout = none;
}

static void backward_leaf(Run* r, int k, const int* inputs, const int* targets, float dloss, int B, int T) {
    Activations* acts = &workplace(r)->acts;
    const Dropout none = {0.0f, 0, 0};
    segments_find(&acts->segments, inputs, B, T);
    acts->dropout = gpt2_dropout(r, k);
    gpt2_leaf_backward(gpt2_of(r), acts, inputs, targets, dloss, B, T, &r->dev);
    acts->dropout = none;
}

// ---- a pass without gradients ----

// of a batch the logits of all positions, of a text those of the last
static void forward(Run* r, Purpose purpose, const int* tokens, const int* targets, int B, int T, int t0) {
    Activations* acts = activations_of(r, purpose);
    const int N = B * (T - t0), is_text = purpose == TO_GENERATE;
    (void)targets;
    for (int c = 0; c < r->model->pp.n_chunks; c++) {
        model_turn_to(r->model, c);
        tensor_arena_turn(&acts->tensors, arena_chunk_slot(&acts->tensors.slots, c));
        const PpStreams e = streams_of(r, acts, N);
        pp_receive(&r->model->pp, &e, &r->dev);
        gpt2_forward(gpt2_of(r), acts, tokens + t0, B, T, t0, &r->dev);
        pp_send(&r->model->pp, &e, &r->dev);
    }
    if (!model_has_head(r->model)) { return; }
    gpt2_logits(gpt2_of(r), acts, is_text ? N - 1 : 0, is_text ? 1 : N, &r->dev);
}

static const float* logits(Run* r, Purpose purpose, int n) {
    const float* first = layer_activations(activations_of(r, purpose), 0).logits;
    return purpose == TO_GENERATE ? first : first + (size_t)n * gpt2_of(r)->config.Vp;
}

static const float* losses(Run* r, const int* targets, int N) {
    return gpt2_losses(gpt2_of(r), &workplace(r)->acts, targets, N, &r->dev);
}

static void close_activations(Run* r) {
    activations_free(&workplace(r)->acts);
    activations_free(&workplace(r)->cache);
}

static Trainer cpu_trainer(void) {
    Trainer t = gpt2_trainer("train_gpt2", "Trains GPT-2 and GPT-3 on the CPU. First steps: make run.");
    t.stored_bytes = sizeof(float);
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
    const Trainer trainer = cpu_trainer();
    return run_main(&trainer, &place.gpt2.model, argc, argv);
}
#endif
