/*
Mamba with hyperspherical prototypes, trained on the CPU in plain C. Read train_gpt2.c first: runs, files and ranks are
the same here, and stand in llmc/; what is new is the layer, the head, and what can be done with the gradients of two
tasks.

The model (Gu & Dao 2023): token embedding, L layers of
    x, z = in_proj(rmsnorm(r));  u = silu(causal_conv(x));  dt, B, C = x_proj(u);  delta = softplus(dt_proj(dt))
    r = r + out_proj(selective_scan(u, delta, B, C) * silu(z))
a last RMSNorm, and a head: ce, the embedding again as output matrix; hpn (Mettes et al. 2019), where every class has a
fixed place on the unit sphere and the loss is (1 - cosine to it)^2; or hpn-softmax, cross entropy of scaled cosines.
The scan keeps a state of fixed size per channel, so generation costs the same at any length. Left out: Mamba-2, GPUs, a
scan that is parallel in time (doc/selective_scan.md says why), gradients through a state that is carried from row to
row.

    make run-mamba                                                  trains a small one on this repository's own text
    make run-digits                                                 two classifiers of handwritten digits
    make train_mamba_hpn && ./train_mamba_hpn --help                every option
    ./train_mamba_hpn --model tiny --train book.txt --steps 1000    your text, byte by byte
    ./train_mamba_hpn --from mamba-130m/ --generate "The"           a Hugging Face folder

What the first one prints, for example (the numbers change with the text):
    step 0 | val loss 5.4955 | 7.929 bits/byte | best
    step 0 | accuracy 7.30% | top 5 8.94% | perplexity 244
    step 50/1800 | loss 2.5572 | norm 0.86 | lr 3.0e-03 | 76 ms | 13.5k tok/s | 34% peak | eta 2m12s
*/
#include "llmc/core/carried.h"          // Carried: what a pass hands to the next
#include "llmc/core/tensor_arena.h"     // TensorArena: activations, laid out by a table
#include "llmc/files/embeddings.h"      // Embeddings: where inputs and classes stand, for pictures
#include "llmc/models/head.h"           // Head, HeadPass: from the last hidden state to losses, and back
#include "llmc/models/mamba.h"          // Config, Parameters, parameter_table, mamba_load
#include "llmc/models/mamba_options.h"  // MambaOptions: what this trainer takes beside run_options.h
#include "llmc/models/prototypes.h"     // prototypes_init, prototypes_check_fit: where the classes stand
#include "llmc/ops/causal_conv1d.h"     // conv1d_forward, conv1d_backward, conv1d_history
#include "llmc/ops/crossentropy.h"      // crossentropy_losses_sum
#include "llmc/ops/embedding.h"         // token_embedding_forward, token_embedding_backward
#include "llmc/ops/forward_forward.h"   // ff_corrupt, ff_goodness
#include "llmc/ops/hpn.h"               // unit_forward, hpn_readout
#include "llmc/ops/matmul.h"            // matmul_forward, matmul_backward
#include "llmc/ops/residual.h"          // residual_forward
#include "llmc/ops/rmsnorm.h"           // rmsnorm_forward, rmsnorm_backward
#include "llmc/ops/selective_scan.h"    // scan_forward, scan_backward
#include "llmc/ops/silu.h"              // gate_forward, gate_backward
#include "llmc/ops/softplus.h"          // softplus_forward, softplus_backward
#include "llmc/ranks/carried_line.h"    // CarriedLine, carried_take, carried_pass: --cp
#include "llmc/ranks/model.h"           // Model: parameters, gradients, moments
#include "llmc/ranks/second_loss.h"     // SecondLoss: gradients of Forward-Forward, and how two become one
#ifndef TESTING                         // a test includes this file for the model alone
#include "llmc/models/mamba_log.h"  // Quality, step_keys: what this trainer prints and records beside log.h
#include "llmc/run/cp_option.h"     // cp_option, cp_begin, cp_check, cp_line_box
#include "llmc/run/main.h"          // run_main: options, data, steps, checkpoints, ranks
#endif

// ---------------------------------------------------------------------------------------------------------------------
// 1. Tensors. Sizes and one line for each parameter are in llmc/models/mamba.h; here is one line for each activation.

// what a pass leaves behind; those from dresidual on, and the head's last two, are the gradients on their way back, one
// buffer each for all layers
typedef struct {
    float *encoded, *norm, *norm_rstd, *xz, *conv, *u, *dbc, *delta, *states, *y, *gated, *residual, *out,
        *normf, *normf_rstd, *dresidual, *dnorm, *dxz, *dy, *du, *ddelta, *ddbc;
    HeadActivations head;
} ActivationTensors;

// How much of a pass is kept: --recompute layer keeps only the stream between layers, none the states of every position
typedef struct {
    int B, T;
    Purpose purpose;
    MambaRecompute recompute;
    int chunk;  // positions of the scan from one kept state to the next
} Room;

// layers 0: one buffer that all layers use in turn; rows 0: this model or pass has none
static int activation_table(Tensor* table, const Config* c, const Room* room) {
    const int M = c->M, E = c->E, N = room->B * room->T, N_train = room->purpose == TO_TRAIN ? N : 0;
    const int stream = room->purpose == TO_TRAIN ? c->L : 0;         // layers of which the stream is kept,
    const int L = room->recompute == RECOMPUTE_LAYER ? 0 : stream;   // and those of which everything else is
    const int n_chunks = (int)ceil_div(room->T, room->chunk);
    Tensor* t = table;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = activation(FIELD(encoded),     0, N, M);
    *t++ = activation(FIELD(norm),        L, N, M);
    *t++ = activation(FIELD(norm_rstd),   L, N, 1);
    *t++ = activation(FIELD(xz),          L, N, 2 * E);          // x, what is convolved, and the gate z
    *t++ = activation(FIELD(conv),        L, N, E);
    *t++ = activation(FIELD(u),           L, N, E);              // silu(conv)
    *t++ = activation(FIELD(dbc),         L, N, config_dbc(c));  // dt, ssm_B, ssm_C
    *t++ = activation(FIELD(delta),       L, N, E);
    *t++ = activation(FIELD(states),      L, room->B * n_chunks, (int)scan_states_floats(1, 1, E, c->NS, 1));
    *t++ = activation(FIELD(y),           L, N, E);              // of the scan
    *t++ = activation(FIELD(gated),       L, N, E);
    *t++ = activation(FIELD(residual),    stream, N, M);         // the stream after the layer
    *t++ = activation(FIELD(out),         0, N, M);              // a layer's output before it joins the stream
    *t++ = activation(FIELD(normf),       0, N, M);
    *t++ = activation(FIELD(normf_rstd),  0, N, 1);
    *t++ = activation(FIELD(dresidual),   0, N_train, M);
    *t++ = activation(FIELD(dnorm),       0, N_train, M);
    *t++ = activation(FIELD(dxz),         0, N_train, 2 * E);
    *t++ = activation(FIELD(dy),          0, N_train, E);
    *t++ = activation(FIELD(du),          0, N_train, E);
    *t++ = activation(FIELD(ddelta),      0, N_train, E);
    *t++ = activation(FIELD(ddbc),        0, N_train, config_dbc(c));
#undef FIELD
    t += head_activations(t, offsetof(ActivationTensors, head), &c->head, N, room->purpose);
    return (int)(t - table);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: create, free, one layer forward and backward, the head, a whole pass.

typedef struct {
    Model model;    // the first member: a run finds its tensors here
    Config config;
    Head head;
    SecondLoss ff;  // Forward-Forward's
} Mamba;

typedef struct {
    Room room;
    TensorArena tensors;
    int document_start;            // token with which the state starts anew, or -1
    unsigned char* starts;         // (B, T) 1 where a document begins
    int keeps_states;              // of the scan: backward follows
    Carried carried;               // what the pass before hands on, or with --cp the rank before
    CarriedLine line;              // with --cp: the ranks that have the positions before and behind
    Carried asked;                 // ... and what those behind ask of what a layer carries there
} Activations;

// sizes only: what a run will need is known before anything is allocated
static void mamba_layout(Mamba* mamba, const Config* c) {
    mamba->config = *c;
    model_layout(&mamba->model, parameter_table(mamba->model.table, c));
}

// what one pass hands to the next: the last K-1 inputs of each convolution, the states of each scan
enum { CARRIED_HISTORY, CARRIED_STATE };

static Carried mamba_carried(const Config* c, int L, int B) {
    Carried s = carried_none(L, B);
    carried_add(&s, (size_t)(c->K - 1) * (size_t)c->E, conv1d_nothing());
    carried_add(&s, (size_t)c->E * (size_t)c->NS, 0.0f);
    return s;
}

// sizes only; returns the bytes that activations_init will take
static double activations_layout(Activations* acts, const Config* c, const Room* room) {
    memset(acts, 0, sizeof *acts);
    acts->room = *room;
    acts->document_start = -1;
    return tensor_arena_layout(&acts->tensors, activation_table(acts->tensors.table, c, room), sizeof(float));
}

static void activations_init(Activations* acts, const Config* c, const Room* room) {
    activations_layout(acts, c, room);
    tensor_arena_open(&acts->tensors, "activations");
    acts->starts = (unsigned char*)malloc_check((size_t)room->B * (size_t)room->T, "starts of documents");
}

static void activations_free(Activations* acts) {
    tensor_arena_close(&acts->tensors);
    free(acts->starts);
}

static Parameters layer_parameters(const Mamba* mamba, int l) {
    Parameters p;
    memset(&p, 0, sizeof p);
    model_point(&mamba->model, &p, l);
    return p;
}

// where the gradients of the micro-batch that is computed now are to be written
static Parameters layer_gradients(DataParallel* dp, int l) {
    Parameters d;
    memset(&d, 0, sizeof d);
    dp_point(dp, &d, l);
    return d;
}

static ActivationTensors layer_activations(const Activations* acts, int l) {
    ActivationTensors a;
    tensor_arena_point(&acts->tensors, &a, l);
    return a;
}

// (B, T) 1 where a document begins, NULL where none does
static const unsigned char* document_starts(const Activations* acts) {
    return acts->document_start >= 0 ? acts->starts : NULL;
}

// one layer: from the stream `inp` to the stream a.residual. What it hands on to the next pass goes to carried.next
static void layer_forward(const Mamba* mamba, Activations* acts, int l, const float* inp, int B, int T,
                          const Device* dev) {
    const Config* c = &mamba->config;
    const int N = B * T, M = c->M, E = c->E, NS = c->NS, R = c->R, P = config_dbc(c);
    const unsigned char* starts = document_starts(acts);
    ActivationTensors a = layer_activations(acts, l);
    Parameters p = layer_parameters(mamba, l);
    const Carried* s = &acts->carried;
    const float* history = carried_part(s, s->now, CARRIED_HISTORY, l);
    float* next_history = carried_part(s, s->next, CARRIED_HISTORY, l);
    float* next_state = carried_part(s, s->next, CARRIED_STATE, l);
    carried_begin(s, l, dev);
    rmsnorm_forward(a.norm, a.norm_rstd, inp, p.norm, c->eps, N, M, dev);
    matmul_forward(a.xz, a.norm, p.in_proj, p.in_bias, N, M, 2 * E, dev);
    conv1d_forward(a.conv, a.u, a.xz, 2 * E, p.conv, p.conv_bias, history, starts, B, T, E, c->K, dev);
    if (s->now) { conv1d_history(next_history, a.xz, 2 * E, starts, B, T, E, c->K, dev); }
    matmul_forward(a.dbc, a.u, p.x_proj, NULL, N, E, P, dev);
    gemm(a.delta, E, p.dt_bias, 0, gemm_matrix(a.dbc, P), gemm_transposed(p.dt_proj, R), N, E, R, dev);
    softplus_forward(a.delta, a.delta, (size_t)N * E, dev);
    scan_forward(a.y, acts->keeps_states ? a.states : NULL, next_state, a.u, a.delta, p.A_log, a.dbc + R,
                 a.dbc + R + NS, P, p.D, starts, B, T, E, NS, acts->room.chunk, dev);
    gate_forward(a.gated, a.y, a.xz + E, 2 * E, N, E, dev);
    matmul_forward(a.out, a.gated, p.out_proj, p.out_bias, N, E, M, dev);
    residual_forward(a.residual, inp, a.out, (size_t)N * M, dev);
}

// the same upside down: the gradient of the stream in dresidual is that after the layer, and becomes that before it.
// d: where the gradients of this layer's parameters are written
static void layer_backward(const Mamba* mamba, Activations* acts, int l, const float* inp, Parameters d, int B, int T,
                           const Device* dev) {
    const Config* c = &mamba->config;
    const int N = B * T, M = c->M, E = c->E, NS = c->NS, R = c->R, P = config_dbc(c);
    const unsigned char* starts = document_starts(acts);
    const float* history = carried_part(&acts->carried, acts->carried.now, CARRIED_HISTORY, l);
    const Carried* s = &acts->asked;  // by the positions behind; next: of those before
    const float* ahead = carried_part(s, s->now, CARRIED_HISTORY, 0);
    float *next_ahead = carried_part(s, s->next, CARRIED_HISTORY, 0),
          *dstate = carried_part(s, s->next, CARRIED_STATE, 0);
    carried_begin(s, 0, dev);
    if (acts->room.recompute == RECOMPUTE_LAYER) { layer_forward(mamba, acts, l, inp, B, T, dev); }
    ActivationTensors a = layer_activations(acts, l);
    Parameters p = layer_parameters(mamba, l);
    matmul_backward(a.dy, d.out_proj, d.out_bias, a.dresidual, a.gated, p.out_proj, N, E, M, dev);
    gate_backward(a.dy, a.dxz + E, 2 * E, a.dy, a.y, a.xz + E, 2 * E, N, E, dev);
    scan_backward(a.du, a.ddelta, d.A_log, a.ddbc + R, a.ddbc + R + NS, P, d.D, dstate, a.dy, a.states, a.u, a.delta,
                  p.A_log, a.dbc + R, a.dbc + R + NS, P, p.D, starts, B, T, E, NS, acts->room.chunk, dev);
    softplus_backward(a.ddelta, a.ddelta, a.delta, (size_t)N * E, dev);
    gemm(a.ddbc, P, NULL, 0, gemm_matrix(a.ddelta, E), gemm_matrix(p.dt_proj, R), N, R, E, dev);
    if (d.dt_proj) { gemm(d.dt_proj, R, NULL, 0, gemm_transposed(a.ddelta, E), gemm_matrix(a.dbc, P), E, R, N, dev); }
    matmul_backward_bias(d.dt_bias, a.ddelta, N, E, dev);
    matmul_backward_weight(d.x_proj, a.ddbc, a.u, 0, N, E, P, dev);
    // a chain that goes on from the scan's part
    gemm(a.du, E, a.du, E, gemm_matrix(a.ddbc, P), gemm_matrix(p.x_proj, E), N, E, P, dev);
    conv1d_backward(a.dxz, 2 * E, d.conv, d.conv_bias, a.du, a.conv, a.xz, 2 * E, p.conv, history, ahead, starts, B, T,
                    E, c->K, dev);
    if (next_ahead) { conv1d_ahead(next_ahead, a.du, a.conv, starts, B, T, E, c->K, dev); }
    matmul_backward(a.dnorm, d.in_proj, d.in_bias, a.dxz, a.norm, p.in_proj, N, M, 2 * E, dev);
    rmsnorm_backward(a.dresidual, d.norm, a.dnorm, inp, p.norm, a.norm_rstd, 1, N, M, dev);
}

// the stream before layer l
static const float* layer_input(const Activations* acts, int l) {
    return l > 0 ? layer_activations(acts, l - 1).residual : layer_activations(acts, 0).encoded;
}

// the stream before the first layer, and where documents begin
static void embed(const Mamba* mamba, Activations* acts, const int* tokens, int N, const Device* dev) {
    const float* embedding = layer_parameters(mamba, 0).embedding;
    for (int n = 0; n < N && acts->document_start >= 0; n++) { acts->starts[n] = tokens[n] == acts->document_start; }
    token_embedding_forward(layer_activations(acts, 0).encoded, tokens, embedding, N, mamba->config.M, dev);
}

// what the head reads of the parameters, or writes of their gradients
static HeadTensors head_tensors(const Config* c, Parameters p) {
    const HeadTensors h = {head_is_tied(&c->head) ? p.embedding : p.lm_head, p.prototypes, p.projection};
    return h;
}

static HeadPass head_pass(const Mamba* mamba, const Activations* acts) {
    const ActivationTensors a = layer_activations(acts, 0);
    const HeadPass pass = {&mamba->head, a.head, head_tensors(&mamba->config, layer_parameters(mamba, 0)), a.normf};
    return pass;
}

// tokens (B, T) through all layers, up to the last norm and, for a head with prototypes, the unit vectors
static void mamba_forward(const Mamba* mamba, Activations* acts, const int* tokens, int B, int T, const Device* dev) {
    const Config* c = &mamba->config;
    const int N = B * T, M = c->M;
    ActivationTensors a = layer_activations(acts, 0);
    Parameters p = layer_parameters(mamba, 0);
    embed(mamba, acts, tokens, N, dev);
    for (int l = 0; l < c->L; l++) {
        carried_take(&acts->carried, acts->line.before, l, B, dev);
        layer_forward(mamba, acts, l, layer_input(acts, l), B, T, dev);
        carried_pass(&acts->carried, acts->line.behind, l, B, dev);
    }
    rmsnorm_forward(a.normf, a.normf_rstd, layer_input(acts, c->L), p.norm_f, c->eps, N, M, dev);
    const HeadPass pass = head_pass(mamba, acts);
    head_forward(&pass, N, dev);
}

// called when they have changed
static void update_prototypes(Mamba* mamba, const Device* dev) {
    head_update_prototypes(&mamba->head, layer_parameters(mamba, 0).prototypes, dev);
}

// logits of the n positions that follow `first`, into the first n rows: scores or, of the hpn head, cosines
static float* mamba_logits(const Mamba* mamba, Activations* acts, int first, int n, const Device* dev) {
    const HeadPass pass = head_pass(mamba, acts);
    return head_logits(&pass, first, n, dev);
}

// Forward's calls upside down. Every parameter's gradient is written: one micro-batch is one leaf, which joins the tree
// of llmc/ranks/data_parallel.h. Below the lowest layer that learns nothing is computed.
static void mamba_backward(Mamba* mamba, Activations* acts, const int* tokens, const int* targets, float dloss, int B,
                           int T, const Device* dev) {
    const Config* c = &mamba->config;
    const int N = B * T, M = c->M, is_tied = head_is_tied(&c->head);
    ActivationTensors a = layer_activations(acts, 0);
    Parameters p = layer_parameters(mamba, 0), d = layer_gradients(&mamba->model.dp, 0);
    if (d.embedding && !is_tied) { memset(d.embedding, 0, sizeof(float) * (size_t)c->V * (size_t)M); }
    const HeadPass pass = head_pass(mamba, acts);
    head_backward(&pass, a.dnorm, head_tensors(c, d), targets, dloss, N, dev);
    rmsnorm_backward(a.dresidual, d.norm_f, a.dnorm, layer_input(acts, c->L), p.norm_f, a.normf_rstd, 0, N, M, dev);
    for (int l = c->L - 1; l >= mamba->model.lowest; l--) {
        d = layer_gradients(&mamba->model.dp, l);
        carried_take(&acts->asked, acts->line.behind, 0, B, dev);
        layer_backward(mamba, acts, l, layer_input(acts, l), d, B, T, dev);
        carried_pass(&acts->asked, acts->line.before, 0, B, dev);
        dp_layer_done(&mamba->model.dp, l, dev);
    }
    token_embedding_backward(d.embedding, a.dresidual, tokens, N, M, dev);
    dp_leaf_done(&mamba->model.dp, dev);
}

// one micro-batch, forward and backward; its loss and gradient join the tree. dloss = 1 /
// targets counted in the whole update
static void mamba_leaf(Mamba* mamba, Activations* acts, const int* tokens, const int* targets, float dloss, int B,
                       int T, const Device* dev) {
    const HeadPass pass = head_pass(mamba, acts);
    const int N = B * T;
    acts->keeps_states = 1;
    mamba_forward(mamba, acts, tokens, B, T, dev);
    if (!head_reads_out(mamba->config.head.kind)) { head_logits(&pass, 0, N, dev); }
    crossentropy_losses_sum(dp_loss(&mamba->model.dp), head_losses(&pass, targets, N, dev), N, dev);
    mamba_backward(mamba, acts, tokens, targets, dloss, B, T, dev);
    acts->keeps_states = 0;
}

// Forward-Forward (Hinton 2022): the loss of a layer is its own, of the output with which it joins the
// stream: large for real text, small for corrupted. One leaf of ff.dp; dloss = 1 / (layers x positions of the
// whole update, real and corrupted)
static void ff_leaf(Mamba* mamba, Activations* acts, const int* tokens, float threshold, int is_real, float dloss,
                    int B, int T, const Device* dev) {
    const Config* c = &mamba->config;
    const int N = B * T;
    ActivationTensors a = layer_activations(acts, 0);
    float sum = 0.0f;
    acts->keeps_states = 1;
    embed(mamba, acts, tokens, N, dev);
    for (int l = 0; l < c->L; l++) {
        const Parameters d = layer_gradients(&mamba->ff.dp, l);
        layer_forward(mamba, acts, l, layer_input(acts, l), B, T, dev);
        if (!model_layer_learns(&mamba->model, l)) { continue; }
        ff_goodness(a.head.losses, a.dresidual, a.out, threshold, is_real, dloss, N, c->M, dev);
        for (int n = 0; n < N; n++) { sum += a.head.losses[n]; }
        layer_backward(mamba, acts, l, layer_input(acts, l), d, B, T, dev);
    }
    acts->keeps_states = 0;
    *dp_loss(&mamba->ff.dp) = sum;
    // other ranks expect the last layer first
    for (int l = c->L - 1; l >= 0; l--) { dp_layer_done(&mamba->ff.dp, l, dev); }
    dp_leaf_done(&mamba->ff.dp, dev);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. What a run asks of this model (llmc/run/trainer.h): sizes, parameters, passes.

#ifndef TESTING
typedef struct {
    Mamba mamba;              // first
    MambaOptions m;
    Activations acts, cache;  // of a batch; of the text that is being generated
    int n_generated, last;    // positions that it has seen; which of the last piece of them is the last
    Carried carried;          // --carry-state: of all micro-batches of an update, one after the other
    int64_t carried_of[4];    // micro-batches, rows of each, positions of a row; the data's checksum
    HeadScores scores;        // of the batch that is being validated
    int has_head;             // does the model in r->weights have the head that is trained?
    int* old_layers;          // of each layer its number there, -1: new; NULL: the same layers
    int n_old_layers;         // layers there
    CpRows rows;              // of the batch that is computed now, what this rank has, and
    int *inputs, *targets;    // (B, T / C) with --cp its tokens
    int* corrupted;           // (B, T)
    float ff_loss;            // of this step; NAN: it has none
    int backpropagates;       // does it?
} Workplace;

static Workplace* workplace(const Run* r) { return (Workplace*)r->model; }
static const Config* config_of(const Run* r) { return &workplace(r)->mamba.config; }
static int is_classifier(const Run* r) { return workplace(r)->m.task == TASK_CLS; }
static int has_ff(const Run* r) { return workplace(r)->m.ff_lr > 0.0f; }

static void mamba_add_options(Run* r) {
    const Option cp = cp_option(&workplace(r)->m.cp, 1);
    r->n_options = mamba_options(r->table, r->n_options, &workplace(r)->m);
    run_add_options(r, &cp, sizeof cp);
    mamba_reword_options(r->table, r->n_options);
}

static void mamba_parsed(Run* r) {
    const MambaOptions* m = &workplace(r)->m;
    if (m->fail_on_non_finite) { r->o.max_skips = 0; }
    r->has_no_text = is_classifier(r);
    r->log.extra_schema = mamba_log_schema();
    r->log.json_lines = !m->human_log;
}

// vocabulary of a new model: --vocab-size; the tokenizer's for text or when it was named; else what the data needs
static int new_vocabulary(const Run* r) {
    return workplace(r)->m.vocab_size > 0 ? workplace(r)->m.vocab_size : run_new_vocabulary(r);
}

// the model's sizes and its head, with the layers that are to be added
static void mamba_choose(Run* r) {
    Workplace* w = workplace(r);
    const MambaOptions* m = &w->m;
    if (*r->weights && !*r->config) { fail_input("%s: expected a Mamba model with its config.json", r->o.from); }
    Config c = *r->config ? config_load(r->config) : mamba_config_new(m, r->o.model, new_vocabulary(r)), was = c;
    if (*r->config) { mamba_check_shape(r->table, r->n_options, m, &c, r->config); }
    const int classes = m->classes > 0 ? m->classes : data_classes(&r->data);
    mamba_choose_head(&c.head, m, r->table, r->n_options, *r->config != '\0', is_classifier(r) ? classes : 0);
    w->has_head = *r->config && head_is_same(&c.head, &was.head);
    if (r->o.resume && !w->has_head) {
        options_fail("head",
                     "%s has head %s with %d classes, a run that goes on keeps it: begin another with --from %s",
                     r->o.run, head_name(was.head.kind).s, was.head.classes, r->o.run);
    }
    w->n_old_layers = c.L;
    if (m->target_layers > 0 && m->target_layers < c.L) {
        options_fail("target-layers", "expected at least the %d layers that there are, found %d", c.L,
                     m->target_layers);
    }
    if (m->target_layers > c.L) {
        w->old_layers = (int*)malloc_check(sizeof(int) * (size_t)m->target_layers, "layers");
        placement_map(w->old_layers, m->placement, c.L, m->target_layers);
        c.L = m->target_layers;
    }
    mamba_layout(&w->mamba, &c);
    cp_begin(r, &w->m.cp, 1);
    r->old_layers = w->old_layers;
    r->V = c.V;
    r->classes = c.head.classes;
    r->max_T = 1 << 24;  // a text may be as long as it likes: the state has always the same size
}

// --freeze-embedding; prototypes that are fixed
static void mamba_freeze(Run* r) {
    Model* model = r->model;
    Tensor* prototypes = PARAMETER(model->table, model->n_table, prototypes);
    if (workplace(r)->m.freeze_embedding) { model_freeze(model, PARAMETER(model->table, model->n_table, embedding)); }
    if (prototypes && !config_of(r)->head.learns_prototypes) { model_freeze(model, prototypes); }
}

// do the prototypes of this model come from no file?
static int places_prototypes(const Run* r) {
    return head_has_prototypes(&config_of(r)->head) && !(*r->weights && workplace(r)->has_head);
}

// options that exclude each other
static void mamba_check(Run* r) {
    const MambaOptions* m = &workplace(r)->m;
    const HeadConfig* h = &config_of(r)->head;
    const int has_examples = data_examples_T(&r->data) > 0, trains_cls = is_classifier(r);
    const int has_tokens = (has_data(&r->data.train) || has_data(&r->data.val)) && !has_examples;
    const int learns = h->learns_prototypes && h->kind == HEAD_HPN, is_cls = trains_cls || h->is_classifier;
    options_refuse(m->cp > 1 && has_ff(r), "cp", "is not for Forward-Forward (--ff-lr)");
    options_refuse(m->cp > 1 && r->d.carry_state, "cp", "is not for --carry-state: a row goes on from the rank before");
    options_refuse(m->cp > 1 && learns, "cp", "brings --zero 2, and learnt prototypes of hpn need --zero 0");
    options_refuse(m->cp > 1 && *m->embeddings_out, "cp", "is not for --embeddings-out");
    cp_check(r, &workplace(r)->m.cp, 0.0f);
    options_refuse(m->bp_cadence > 1 && !has_ff(r), "bp-cadence-steps",
                   "the steps without back-propagation need --ff-lr above 0, or they do nothing");
    options_refuse(has_ff(r) && (r->o.zero > 0 || r->d.carry_state), "ff-lr",
                   "Forward-Forward goes with neither --zero nor --carry-state");
    options_refuse(has_ff(r) && r->V < 2, "ff-lr",
                   "Forward-Forward needs two tokens, so that one can replace the other");
    options_refuse(has_ff(r) && model_layers_learning(r->model) == 0, "ff-lr",
                   "every layer is frozen: none learns by Forward-Forward");
    options_refuse(r->d.carry_state && r->comm->size > 1, "carry-state",
                   "is for one rank: states are not sent around");
    options_refuse(learns && m->proto_separation == 0.0f, "proto",
                   "learnt prototypes of hpn all become one without --proto-separation");
    options_refuse(learns && r->o.zero > 0, "proto", "learnt prototypes of hpn need --zero 0");
    options_refuse(trains_cls && has_tokens, "task",
                   "cls needs examples (a safetensors file with inputs and targets), found tokens");
    options_refuse(!trains_cls && has_examples, "task", "found examples with targets of their own: --task cls");
    options_refuse(is_cls && run_is_generating(r), "generate", "a classifier has no text to go on with");
    options_refuse(is_cls && r->o.sample_every > 0, "sample-every", "a classifier has no text to go on with");
    options_refuse(is_cls && *r->o.hellaswag, "hellaswag", "a classifier has no text to answer with");
    options_refuse(h->kind == HEAD_HPN && *r->o.hellaswag, "hellaswag",
                   "the head gives tokens no probabilities: ce and hpn-softmax do");
    options_refuse(run_is_typed(r, "placement") && m->target_layers == 0, "placement",
                   "says where new layers stand: --target-layers says how many");
    options_refuse(*m->embeddings_out && !has_data(&r->data.val), "embeddings-out", "needs --val or --val-fraction");
    if (h->is_classifier && !trains_cls && has_tokens) {
        options_fail("task", "the model chooses from %d classes, not from its %d tokens: --task cls", h->classes, r->V);
    }
    r->exports_more = *m->embeddings_out && (run_is_training(r) || r->o.eval_only);
    if (r->exports_more) { embeddings_check_out(m->embeddings_out); }
    if (run_is_typed(r, "proto-init") && *m->proto_init) { prototypes_check_name(m->proto_init); }
    if (places_prototypes(r)) { prototypes_check_fit(mamba_placement(h, m->proto_init), h->classes, h->Dp); }
}

static void mamba_box(const Run* r) {
    const Workplace* w = workplace(r);
    const Config* c = &w->mamba.config;
    box_row("model", "%d layer%s, width %d, %d channels", c->L, c->L > 1 ? "s" : "", c->M, c->E);
    box_row("  scan, convolution", "%d states a channel, dt rank %d, %d taps", c->NS, c->R, c->K);
    if (w->old_layers) { box_row("  new layers", "%d beside %d old ones", c->L - w->n_old_layers, w->n_old_layers); }
    const char *kind = c->head.is_classifier ? "classes" : "tokens", *age = *r->weights && !w->has_head ? ", new" : "";
    box_row("head", "%s, %d %s%s", head_name(c->head.kind).s, c->head.classes, kind, age);
    if (head_has_prototypes(&c->head)) {
        box_row("  prototypes", "in %d dimensions, %s", c->head.Dp, c->head.learns_prototypes ? "learnt" : "fixed");
    }
    cp_line_box(r);
}

// with --cp: what layers carry to the next positions. Rank 0 has the first ones, of which nobody asks back
static double mamba_states_sent(const Run* r) {
    const Carried one = mamba_carried(config_of(r), 1, r->o.batch_size);
    return model_has_cp(r->model) ? config_of(r)->L * carried_line_sends(&one) * pp_own_batches(r) : 0.0;
}

// products of every matrix, forward and twice backward; of the scan, 9 flops for each state
static double mamba_flops(const Run* r) {
    const Config* c = config_of(r);
    double n = 0.0;
    for (int i = 0; i < r->model->n_table; i++) {
        const Tensor* t = &r->model->table[i];
        const int is_embedding = t->field == offsetof(Parameters, embedding);
        const int looks_up = (is_embedding && !head_is_tied(&c->head)) ||
                             (t->field == offsetof(Parameters, prototypes) && c->head.kind == HEAD_HPN);
        if (t->rows > 1 && t->on_disk != CONV && !looks_up && t->field != offsetof(Parameters, A_log)) {
            n += model_flops(r->model, i);
        }
    }
    return n + 27.0 * c->L * c->E * c->NS;
}

static Room room_of(const Run* r, int B, int T, Purpose purpose, MambaRecompute recompute) {
    const MambaOptions* m = &workplace(r)->m;
    const int chunk = m->scan_chunk > 0 ? m->scan_chunk : SCAN_CHUNK;
    const Room room = {B, T, purpose, recompute, recompute == RECOMPUTE_NONE ? 1 : chunk < T ? chunk : T};
    return room;
}

enum { PROMPT_PIECE = 128 };  // positions of a prompt that are computed at once

static double mamba_bytes(const Run* r, Purpose purpose, int B, int T, int sparing) {
    Activations acts;
    const MambaRecompute recompute = sparing ? RECOMPUTE_LAYER : (MambaRecompute)workplace(r)->m.recompute;
    const Room batch = room_of(r, B, T / r->model->cp.size, purpose, recompute),
               piece = room_of(r, 1, PROMPT_PIECE, TO_GENERATE, recompute);
    const Carried states = mamba_carried(config_of(r), config_of(r)->L, 1);
    if (purpose != TO_GENERATE) { return activations_layout(&acts, config_of(r), &batch); }
    return 2.0 * (double)carried_bytes(&states, 1) + activations_layout(&acts, config_of(r), &piece);
}

// the largest scratch that an op asks for: the head's gradients, a layer's, or the scan
static double mamba_workspace_bytes(const Run* r, int B) {
    const Config* c = config_of(r);
    const int T = r->T / r->model->cp.size, N = B * T, n = r->dev.n_threads, train = run_is_training(r) || *r->o.probe;
    const int classes = c->head.classes, rows = train ? classes : N;
    const Room room = room_of(r, B, T, TO_TRAIN, (MambaRecompute)workplace(r)->m.recompute);
    double head =
        fmax((double)gemm_workspace_bytes(N, classes, n), (double)gemm_workspace_bytes(rows, train ? N : c->M, n));
    double layer =
        fmax((double)gemm_workspace_bytes(N, 2 * c->E, n), (double)gemm_workspace_bytes(2 * c->E, train ? N : c->M, n));
    double scan = (double)scan_workspace_bytes(B, T, c->E, c->NS, room.chunk, n);
    return fmax(scan, fmax(head, layer));
}

// what --carry-state keeps between updates
static size_t stream_bytes(const Run* r) {
    const Carried one = mamba_carried(config_of(r), config_of(r)->L, r->o.batch_size);
    return r->d.carry_state ? carried_bytes(&one, r->n_leaves) : 0;
}

enum { EMBEDDINGS_MOST = 1 << 16 };  // positions of --embeddings-out: enough for a picture

// --embeddings-out: so many positions, at most those of the validation rows, and the classes with their lengths
static double mamba_embeddings_bytes(const Run* r) {
    const Config* c = config_of(r);
    const double n_val = (double)r->data.val_rows.n_rows * r->T, n = fmin(EMBEDDINGS_MOST, n_val);
    const double D = head_has_prototypes(&c->head) ? c->head.Dp : c->M;
    return *workplace(r)->m.embeddings_out ? sizeof(float) * (D + 1) * (n + c->head.classes) : 0.0;
}

// what --cp carries from rank to rank, and back
static double line_bytes(const Run* r) {
    const Carried one = mamba_carried(config_of(r), config_of(r)->L + 1, r->o.batch_size);
    return model_has_cp(r->model) ? 2.0 * (double)carried_bytes(&one, 1) : 0.0;
}

// prototypes as the head uses them, and their gradient; states; Forward-Forward's gradients; --embeddings-out
static double mamba_more_bytes(const Run* r) {
    const Config* c = config_of(r);
    const int trains = run_is_training(r), backward = trains || *r->o.probe;
    double n_bytes = head_bytes(&c->head, backward) + 2.0 * (double)stream_bytes(r) + mamba_embeddings_bytes(r);
    n_bytes += line_bytes(r);
    if (trains && has_ff(r)) {
        SecondLoss ff = {0};
        second_loss_layout(&ff, r->model, r->comm, 2 * r->n_leaves);
        n_bytes += dp_gradient_bytes(&ff.dp);
        second_loss_free(&ff);
    }
    return n_bytes;
}

static void mamba_load_parameters(Run* r, const SliceSink* sink) {
    (void)sink;
    float* params = model_floats(r->model);
    Workplace* w = workplace(r);
    Mamba* mamba = &w->mamba;
    Model* model = r->model;
    const Config* c = &mamba->config;
    const int loads_head = *r->weights && w->has_head;
    if (!loads_head || w->old_layers) {  // start values, some of which may be replaced by what is loaded
        tensors_init(model->table, model->n_table, params, (uint32_t)r->o.seed);
        mamba_start_values(model->table, model->n_table, c, params, w->old_layers);
    }
    if (places_prototypes(r)) {
        float* prototypes = layer_parameters(mamba, 0).prototypes;
        prototypes_init(prototypes, mamba_placement(&c->head, w->m.proto_init), c->head.classes, c->head.Dp,
                        (uint32_t)r->o.seed, &r->dev);
    }
    if (*r->weights) { mamba_load(r->weights, model->table, model->n_table, w->old_layers, w->has_head, params); }
    head_init(&mamba->head, &c->head);
    update_prototypes(mamba, &r->dev);
}

// what training has beside one loss: Forward-Forward, states that are carried
static void open_more(Run* r) {
    Workplace* w = workplace(r);
    const MambaOptions* m = &w->m;
    SurgeryConfig config = {(SurgeryMethod)m->surgery, m->surgery_epsilon, m->cagrad_lambda, m->gradnorm_alpha, {0, 0},
                            (uint64_t)r->o.seed};
    if (has_ff(r)) {  // real batches and their corrupted twins in turn
        second_loss_open(&w->mamba.ff, r->model, r->comm, 2 * r->n_leaves);
        second_loss_join(&w->mamba.ff, r->model, w->mamba.config.L, &config,
                         PARAMETER(r->model->table, r->model->n_table, out_proj));
        w->corrupted = (int*)malloc_check(sizeof(int) * (size_t)r->o.batch_size * (size_t)r->T, "corrupted inputs");
    } else {
        surgery_init(&w->mamba.ff.surgery, &config, NULL, 0, 1);
    }
    if (!r->d.carry_state) { return; }
    w->carried = mamba_carried(&w->mamba.config, w->mamba.config.L, r->o.batch_size);
    carried_open(&w->carried, r->n_leaves);
    const int64_t of[] = {r->n_leaves, r->o.batch_size, r->T, (int64_t)r->data.train_sum};
    memcpy(w->carried_of, of, sizeof of);
}

// the state starts anew where a prompt is read in pieces: they go on from each other
static void open_cache(Run* r) {
    Workplace* w = workplace(r);
    const Config* c = &w->mamba.config;
    const Room room = room_of(r, 1, PROMPT_PIECE, TO_GENERATE, (MambaRecompute)w->m.recompute);
    activations_init(&w->cache, c, &room);
    w->cache.document_start = data_separator(&r->data, &r->o, run_end_of_text(r));
    w->cache.carried = mamba_carried(c, c->L, 1);
    carried_open(&w->cache.carried, 1);
}

// With --cp: what this rank is given and hands on, layer by layer, and what is asked of it, of one layer. A rank that
// nobody precedes, or follows, goes on from nothing
static void activations_join(Activations* acts, const Config* c, CarriedLine line, int B, const Device* dev) {
    acts->line = line;
    acts->carried = mamba_carried(c, c->L, B);
    acts->asked = mamba_carried(c, 1, B);
    carried_open(&acts->carried, 1);
    carried_open(&acts->asked, 1);
    carried_clear(&acts->carried, 0, B, dev);
    carried_clear(&acts->asked, 0, B, dev);
}

static void mamba_open(Run* r, Purpose purpose, int B, int T) {
    Workplace* w = workplace(r);
    if (purpose == TO_GENERATE) { open_cache(r); return; }
    const RankGroup* cp = &r->model->cp;
    const int own = T / cp->size;
    const Room room = room_of(r, B, own, purpose, (MambaRecompute)w->m.recompute);
    activations_init(&w->acts, &w->mamba.config, &room);
    head_scores_init(&w->scores, B * own);
    if (model_has_cp(r->model)) {
        activations_join(&w->acts, &w->mamba.config, carried_line_init(model_sharing(r->model, r->comm), cp), B,
                         &r->dev);
        w->inputs = (int*)malloc_check(2 * sizeof(int) * (size_t)B * (size_t)own, "tokens of this rank");
        w->targets = w->inputs + (size_t)B * (size_t)own;
    }
    if (*r->o.probe) { return; }
    w->acts.document_start = data_separator(&r->data, &r->o, r->o.doc_reset ? run_end_of_text(r) : -1);
    if (purpose == TO_TRAIN) { open_more(r); }
}

// the next pass stands alone, or with --cp goes on from the rank before
static void carry_nothing(Activations* acts) {
    if (!acts->asked.now) { memset(&acts->carried, 0, sizeof acts->carried); }
}

// of tokens (B, T) those that this rank computes, at `own` or where they are
static const int* own_tokens(const Run* r, int* own, const int* tokens) {
    if (!model_has_cp(r->model) || !tokens) { return tokens; }
    cp_take(own, tokens, &workplace(r)->rows);
    return own;
}

static void mamba_train_leaf(Run* r, int k, const int* inputs, const int* targets, float dloss, int B, int T) {
    Workplace* w = workplace(r);
    w->rows = cp_rows(B, T, &r->model->cp);
    if (!model_has_cp(r->model)) { w->acts.carried = carried_batch(&w->carried, k); }  // what the row before left
    for (int b = 0; b < B && w->carried.now; b++) {
        const int64_t row = train_row(r, train_batch_number(r, k)) + b;
        if (dataloader_stream_begins(&r->data.train_rows, row)) { carried_clear(&w->acts.carried, b, b + 1, &r->dev); }
    }
    inputs = own_tokens(r, w->inputs, inputs);
    targets = own_tokens(r, w->targets, targets);
    mamba_leaf(&w->mamba, &w->acts, inputs, targets, dloss, B, w->rows.n, &r->dev);
}

// States of the first t0 tokens are in cache, or everything is computed anew; a prompt is read in pieces
static void read_text(Workplace* w, const int* tokens, int T, int t0, const Device* dev) {
    Carried* carried = &w->cache.carried;
    if (t0 != w->n_generated) { w->n_generated = 0; }
    if (w->n_generated == 0) { carried_clear(carried, 0, 1, dev); }
    for (int n_new; w->n_generated < T; w->n_generated += n_new) {
        n_new = T - w->n_generated < PROMPT_PIECE ? T - w->n_generated : PROMPT_PIECE;
        mamba_forward(&w->mamba, &w->cache, tokens + w->n_generated, 1, n_new, dev);
        carried_swap(carried);
        w->last = n_new - 1;
    }
}

static void mamba_pass(Run* r, Purpose purpose, const int* tokens, const int* targets, int B, int T, int t0) {
    Workplace* w = workplace(r);
    (void)targets;
    if (purpose == TO_GENERATE) { read_text(w, tokens, T, t0, &r->dev); return; }
    carry_nothing(&w->acts);
    w->rows = cp_rows(B, T, &r->model->cp);
    mamba_forward(&w->mamba, &w->acts, own_tokens(r, w->inputs, tokens), B, w->rows.n, &r->dev);
}

// of a text those of the last position, by which a token is chosen
static const float* mamba_pass_logits(Run* r, Purpose purpose, int n) {
    Workplace* w = workplace(r);
    const HeadConfig* h = &w->mamba.config.head;
    if (purpose != TO_GENERATE) { return mamba_logits(&w->mamba, &w->acts, n, 1, &r->dev); }
    float* out = mamba_logits(&w->mamba, &w->cache, w->last, 1, &r->dev);
    if (head_reads_out(h->kind)) { hpn_readout(out, out, 1, h->classes, &r->dev); }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Validation: how good the answers of the head are, and where inputs and classes stand.

static const float* mamba_losses(Run* r, const int* targets, int N) {
    Workplace* w = workplace(r);
    const HeadPass pass = head_pass(&w->mamba, &w->acts);
    targets = own_tokens(r, w->targets, targets);
    return head_scores_losses(&w->scores, &pass, targets, N / r->model->cp.size, &r->dev);
}

// Of the ranks that have rows together. The mean over pairs is one of those ranks whose positions have targets
static void add_scores(const RankGroup* cp, double* scores) {
    const int has_targets = scores[SCORE_COUNTED] > 0.0;
    scores[SCORE_PAIRS] *= has_targets;
    scores[SCORE_BATCHES] = has_targets;
    comm_all_reduce(cp->group, scores, N_SCORES, DT_F64, OP_SUM, HERE);
    scores[SCORE_BATCHES] = fmax(scores[SCORE_BATCHES], 1.0);
}

// of the same batch
static void mamba_batch_scores(void* run, const int* targets, int B, int T, double* scores) {
    Run* r = (Run*)run;
    Workplace* w = workplace(r);
    const HeadPass pass = head_pass(&w->mamba, &w->acts);
    head_scores_rest(&w->scores, &pass, own_tokens(r, w->targets, targets), B * T / r->model->cp.size, &r->dev);
    memcpy(scores, w->scores.sums, sizeof w->scores.sums);
    if (model_has_cp(r->model)) { add_scores(&r->model->cp, scores); }
}

static void mamba_validated(Run* r, float loss, const double* scores, double* bits_per_byte, char line[256]) {
    const HeadKind head = config_of(r)->head.kind;
    const Quality quality = quality_of(head, loss, scores);
    if (head_reads_out(head)) { *bits_per_byte = -1.0; }  // its loss is no likelihood
    log_extra(&r->log, quality_keys(head, loss, quality));
    quality_line(line, 256, head, r->state.step, quality);
}

// unit vectors, labels and prototypes of the validation rows, as dev/tools/plot_embeddings.py draws them
static void mamba_write_embeddings(Run* r, const float* params) {
    (void)params;
    Workplace* w = workplace(r);
    const Config* c = &w->mamba.config;
    const DataLoader* rows = &r->data.val_rows;
    const int T = r->T, has_prototypes = head_has_prototypes(&c->head);
    Parameters p = layer_parameters(&w->mamba, 0);
    ActivationTensors a = layer_activations(&w->acts, 0);
    Embeddings e;
    embeddings_init(&e, EMBEDDINGS_MOST, has_prototypes ? c->head.Dp : c->M);
    carry_nothing(&w->acts);
    for (int64_t first = 0; first < rows->n_rows && e.n < e.room; first += r->o.batch_size) {
        const int B = rows->n_rows - first < r->o.batch_size ? (int)(rows->n_rows - first) : r->o.batch_size;
        dataloader_batch(rows, first, B, r->inputs, r->targets);
        mamba_forward(&w->mamba, &w->acts, r->inputs, B, T, &r->dev);
        if (!has_prototypes) { unit_forward(a.normf, a.head.losses, a.normf, B * T, c->M, &r->dev); }
        embeddings_add(&e, has_prototypes ? a.head.z_unit : a.normf, r->targets, B * T);
    }
    float* prototypes = (float*)malloc_check(sizeof(float) * (size_t)c->head.classes * ((size_t)e.D + 1), "prototypes");
    const float* of_classes = has_prototypes ? p.prototypes : head_tensors(c, p).matrix;
    unit_forward(prototypes, prototypes + (size_t)c->head.classes * e.D, of_classes, c->head.classes, e.D, &r->dev);
    embeddings_write(w->m.embeddings_out, &e, prototypes, c->head.classes);
    printf("embeddings of %d positions written to %s\n", e.n, w->m.embeddings_out);
    free(prototypes);
    embeddings_free(&e);
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. A step: the head's loss, Forward-Forward's, or both.

// prototypes of hpn that learn must also keep apart, or all become one (doc/hpn.md)
static float separate_prototypes(Run* r, float* grads) {
    Workplace* w = workplace(r);
    const DataParallel* dp = &r->model->dp;
    const HeadConfig* h = &w->mamba.config.head;
    const int row = (int)(PARAMETER(r->model->table, r->model->n_table, prototypes) - r->model->table);
    if (!h->learns_prototypes || h->kind != HEAD_HPN || dp_stretch(dp, row, 0) < 0) { return 0.0f; }
    return head_separate(&w->mamba.head, grads + dp_gradient_at(dp, row, 0), w->m.proto_separation, &r->dev);
}

// Forward-Forward's gradients: each batch, then its corrupted twin
static float* ff_gradients(Run* r, float* loss, float* norm) {
    Workplace* w = workplace(r);
    DataParallel* dp = &w->mamba.ff.dp;
    const Config* c = &w->mamba.config;
    const int B = r->o.batch_size, T = r->T;
    const double n_losses = 2.0 * B * T * r->n_leaves * c->L;
    const uint64_t key = splitmix64((uint64_t)r->o.seed, (uint64_t)r->state.step);
    for (int k = 0; k < dp_n_leaves(dp); k++) {
        const int leaf = dp_leaf(dp, k), is_real = leaf % 2 == 0;
        const int64_t row = run_first_row(&r->o, &r->state) + (int64_t)(leaf / 2) * B;
        dataloader_batch(&r->data.train_rows, row, B, r->inputs, r->targets);
        if (!is_real) {
            ff_corrupt(w->corrupted, r->inputs, B, T, w->m.ff_corrupt, c->V, splitmix64(key, (uint64_t)leaf));
        }
        const int* inputs = is_real ? r->inputs : w->corrupted;
        ff_leaf(&w->mamba, &w->acts, inputs, w->m.ff_threshold, is_real, (float)(1.0 / n_losses), B, T, &r->dev);
        comm_watch(r->comm, HERE);
    }
    float loss_sum, *grads = dp_reduce(dp, &loss_sum, &r->dev);
    *loss = loss_sum / (float)n_losses;
    *norm = dp_norm(dp, grads, &r->dev);
    return grads;
}

// the states after an update whose loss is not finite would spoil all that follow: every stream begins anew
static void forget_states(Run* r) {
    for (int k = 0; k < r->n_leaves; k++) {
        const Carried one = carried_batch(&workplace(r)->carried, k);
        carried_clear(&one, 0, one.B, &r->dev);
    }
}

// the trainer's keys in the record of a step
static void note_step(Run* r, const Step* s) {
    const Workplace* w = workplace(r);
    int learning = 0, bp = w->backpropagates;
    for (int i = 0; i < r->model->n_slices; i++) { learning += !slice_is_frozen(r->model->frozen, i); }
    const double rows = (double)(r->state.rows + (int64_t)r->n_leaves * r->o.batch_size);
    const StepNotes notes = {s->loss,
                             w->ff_loss,
                             bp && !s->skipped,
                             r->o.clip > 0.0f && s->norm > r->o.clip,
                             has_ff(r) && !s->skipped ? model_layers_learning(r->model) : 0,
                             bp && !s->skipped ? learning : 0,
                             bp ? second_loss_conflicts(&w->mamba.ff) : 0,
                             w->mamba.ff.surgery.config.method,
                             1000.0 * r->seconds_waited,
                             rows / (double)r->data.train_rows.n_rows};
    log_extra(&r->log, step_keys(w->mamba.config.head.kind, &notes));
}

// with Forward-Forward: gradients of both losses, or of its own, clip, AdamW or plain descent
static void mamba_step(Run* r, Step* s) {
    Workplace* w = workplace(r);
    RunState* state = &r->state;
    const int bp = w->backpropagates = (state->step + 1) % w->m.bp_cadence == 0;
    float ff_norm = 0.0f, *ff_grads;
    w->ff_loss = NAN;
    if (!has_ff(r)) { train_adamw(r, s); return; }
    ff_grads = ff_gradients(r, &w->ff_loss, &ff_norm);
    const int ff_fails = !(isfinite(w->ff_loss) && isfinite(ff_norm));
    if (bp) {
        float* grads = train_verified_gradients(r, &s->loss, &s->norm);
        // ff_lr / lr is how much Forward-Forward's counts: AdamW does not see the size of a sum
        const float losses[] = {s->loss, w->ff_loss}, scale = s->lr > 1e-12f ? w->m.ff_lr / s->lr : 1.0f;
        s->norm = second_loss_combine(&w->mamba.ff, r->model, grads, ff_grads, losses, scale, (uint64_t)state->step,
                                      &r->dev);
        s->grads = grads;
        s->skipped = run_state_skips(state, &r->o, s->loss, s->norm);
        if (!s->skipped) { train_update(r, grads, s->norm, s->lr); }
        return;
    }
    s->skipped = ff_fails;
    state->skips = ff_fails ? state->skips + 1 : 0;
    s->dp = &w->mamba.ff.dp;
    s->grads = ff_grads;
    s->norm = ff_norm;
    const float clip = r->o.clip > 0.0f && ff_norm > r->o.clip ? r->o.clip / ff_norm : 1.0f;
    if (!s->skipped) { second_loss_descend(&w->mamba.ff, r->model, ff_grads, w->m.ff_lr * clip); }
}

static void mamba_stepped(Run* r, const Step* s) {
    Workplace* w = workplace(r);
    if (!s->skipped && w->mamba.config.head.learns_prototypes) { update_prototypes(&w->mamba, &r->dev); }
    carried_swap(&w->carried);
    if (!isfinite(s->loss)) { forget_states(r); }
    note_step(r, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. Files, and main.

static json_t* config_to_save(const Run* r, int eot, const char* dtype) {
    return config_json(config_of(r), eot, dtype);
}

// what a checkpoint holds beside what every trainer keeps
static int mamba_extras(const Run* r, Extra* extras) {
    const Workplace* w = workplace(r);
    const GradNorm* gradnorm = &w->mamba.ff.surgery.gradnorm;
    const Extra all[] = {{"gradnorm", DTYPE_F32, (void*)gradnorm, sizeof *gradnorm / sizeof(float)},
                         {"carried", DTYPE_F32, w->carried.now, stream_bytes(r) / sizeof(float)},
                         {"carried_of", DTYPE_I64, (void*)w->carried_of, 4}};
    memcpy(extras, all, sizeof all);
    return r->d.carry_state ? 3 : 1;
}

static void mamba_load_extras(Run* r, const char* path) {
    Extra wanted[MAX_EXTRAS];
    const int n = mamba_extras(r, wanted);
    if (r->d.carry_state) {  // with other rows the states would be as many, perhaps, in another order
        static const char* const options[] = {"grad-accum", "batch-size", "seq-len"};
        static const char* const what[] = {"micro-batches of an update", "rows of a micro-batch", "positions of a row"};
        const int64_t* now = workplace(r)->carried_of;
        int64_t then[4];
        const Extra carried_of = {"carried_of", DTYPE_I64, then, 4};
        extras_load(path, &carried_of, 1);
        for (int i = 0; i < 3; i++) {
            if (then[i] == now[i]) { continue; }
            options_fail(options[i], "the checkpoint carries states of %lld %s, found %lld", (long long)then[i],
                         what[i], (long long)now[i]);
        }
        options_refuse(then[3] != now[3], "train", "the states that the checkpoint carries are of other data");
    }
    extras_load(path, wanted, n);
}

// what summary.json says of this trainer's part
static json_t* mamba_summary(const Run* r) {
    const Workplace* w = workplace(r);
    const int frozen = w->mamba.config.L - model_layers_learning(r->model);
    return json_pack("{s:i, s:i, s:s, s:f, s:i, s:s}", "layers", w->mamba.config.L, "frozen", frozen, "head",
                     head_name(w->mamba.config.head.kind).s, "ff_lr", shortest_double(w->m.ff_lr), "bp_cadence_steps",
                     w->m.bp_cadence, "gradient_surgery_method",
                     surgery_name(w->mamba.ff.surgery.config.method).s);
}

static void mamba_close(Run* r) {
    Workplace* w = workplace(r);
    activations_free(&w->acts);
    activations_free(&w->cache);
    carried_close(&w->cache.carried);
    carried_close(&w->carried);
    second_loss_free(&w->mamba.ff);
    head_free(&w->mamba.head);
    if (w->acts.asked.now) {
        carried_close(&w->acts.carried);
        carried_close(&w->acts.asked);
        carried_line_free(&w->acts.line);
    }
    free(w->inputs);
    free(w->corrupted);
    head_scores_free(&w->scores);
    free(w->old_layers);
}

static Trainer mamba_trainer(void) {
    Trainer t;
    memset(&t, 0, sizeof t);
    t.name = "train_mamba_hpn";
    t.about = "Trains Mamba, with or without hyperspherical prototypes, on the CPU. First steps: make run-mamba.";
    t.presets = "random start from a preset: tiny, 130m, 370m, 790m, 1.4b, 2.8b";
    t.sparing = "--recompute layer";
    t.stored_bytes = sizeof(float);
    t.usual_T = 256;
    t.more_data = 1;
    t.counts_updates = 1;
    t.options = mamba_add_options;
    t.parsed = mamba_parsed;
    t.choose = mamba_choose;
    t.freeze = mamba_freeze;
    t.check = mamba_check;
    t.box = mamba_box;
    t.flops_per_token = mamba_flops;
    t.activation_bytes = mamba_bytes;
    t.workspace_bytes = mamba_workspace_bytes;
    t.keys_sent = mamba_states_sent;
    t.more_bytes = mamba_more_bytes;
    t.load = mamba_load_parameters;
    t.open = mamba_open;
    t.leaf = mamba_train_leaf;
    t.step = mamba_step;
    t.stepped = mamba_stepped;
    t.more_loss = separate_prototypes;
    t.scores = mamba_batch_scores;
    t.n_scores = N_SCORES;
    t.validated = mamba_validated;
    t.forward = mamba_pass;
    t.logits = mamba_pass_logits;
    t.losses = mamba_losses;
    t.config_json = config_to_save;
    t.extras = mamba_extras;
    t.load_extras = mamba_load_extras;
    t.summary = mamba_summary;
    t.write_more = mamba_write_embeddings;
    t.close = mamba_close;
    return t;
}

int main(int argc, char** argv) {
    static Workplace place;  // all zero
    const Trainer trainer = mamba_trainer();
    return run_main(&trainer, &place.mamba.model, argc, argv);
}
#endif
