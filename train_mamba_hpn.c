/*
Mamba with hyperspherical prototypes, trained on the CPU in plain C. Read train_gpt2.c first: runs, files and ranks are the same
here, and stand in llmc/; what is new is the layer, the head, and what can be done with the gradients of two tasks.

The model (Gu & Dao 2023): token embedding, L layers of
    x, z = in_proj(rmsnorm(r));  u = silu(causal_conv(x));  dt, B, C = x_proj(u);  delta = softplus(dt_proj(dt))
    r = r + out_proj(selective_scan(u, delta, B, C) * silu(z))
a last RMSNorm, and a head: ce, the embedding again as output matrix; hpn (Mettes et al. 2019), where every class has a fixed
place on the unit sphere and the loss is (1 - cosine to it)^2; or hpn-softmax, cross entropy of scaled cosines.
The scan keeps a state of fixed size per channel, so generation costs the same at any length. Left out: Mamba-2, GPUs, a scan
that is parallel in time (doc/selective_scan.md says why), gradients through a state that is carried from row to row.

    make run-mamba                                                  trains a small one on the headers of llmc/, two minutes
    make run-digits                                                 two classifiers of handwritten digits, read pixel by pixel
    make train_mamba_hpn && ./train_mamba_hpn --help                every option
    ./train_mamba_hpn --model tiny --train book.txt --steps 1000    your text, byte by byte
    ./train_mamba_hpn --from mamba-130m/ --generate "The"           a Hugging Face folder

What the first one prints, after its settings, the sizes of the model and the memory that it needs:
    step 0 | val loss 5.4855 | 7.915 bits/byte | best
    step 0 | accuracy 7.67% | top 5 9.68% | perplexity 241
    step 50/2800 | loss 2.5618 | norm 0.96 | lr 3.0e-03 | 44 ms | 23.2k tok/s | 33% peak | eta 2m02s
*/
#include "llmc/ops/causal_conv1d.h"     // conv1d_forward, conv1d_backward, conv1d_history
#include "llmc/files/checkpoint.h"      // SavedFiles, checkpoint_find, checkpoint_path
#include "llmc/ranks/comm.h"            // Comm, comm_watch: several ranks train together
#include "llmc/ops/crossentropy.h"      // crossentropy_forward, crossentropy_backward
#include "llmc/ops/embedding.h"         // token_embedding_forward, token_embedding_backward
#include "llmc/files/embeddings.h"      // Embeddings: where inputs and classes stand, for pictures
#include "llmc/run/evaluate.h"          // Evaluator, evaluate_loss
#include "llmc/files/extras.h"          // Extra, extras_save: what this trainer keeps beside parameters and moments
#include "llmc/ops/forward_forward.h"   // ff_corrupt, ff_goodness, rt_ff
#include "llmc/run/generate.h"          // Generator, generate_sample, generate_texts
#include "llmc/ops/gradient_surgery.h"  // Surgery, surgery_apply
#include "llmc/files/hf_folder.h"       // model_find, hf_export_begin, tokenizer_save
#include "llmc/ops/hpn.h"               // unit_forward, unit_backward, hpn_forward, hpn_backward
#include "llmc/ops/layernorm.h"         // layernorm_forward, layernorm_backward: of the rt layer
#include "llmc/core/layers.h"           // freeze_slices, placement_map
#include "llmc/run/log.h"               // Log, log_step, log_validation, box_row, seconds_now
#include "llmc/models/mamba.h"          // Config, Parameters, parameter_table, mamba_load
#include "llmc/models/mamba_options.h"  // MambaOptions: what this trainer takes beside run.h; the model that they ask for
#include "llmc/models/mamba_log.h"      // Quality, step_keys: what this trainer prints and records beside log.h
#include "llmc/ops/matmul.h"            // matmul_forward, matmul_backward
#include "llmc/run/peak.h"              // matmul_peak, memory_available, check_memory
#include "llmc/text/prefetch.h"         // Prefetch: rows are read while a step is computed
#include "llmc/run/probe.h"             // ProbeBatch, probe_read
#include "llmc/models/prototypes.h"     // prototypes_init, prototypes_separation: where the classes stand
#include "llmc/run/ranks.h"             // ranks_open, ranks_compare
#include "llmc/ops/residual.h"          // residual_forward
#include "llmc/ops/rmsnorm.h"           // rmsnorm_forward, rmsnorm_backward
#include "llmc/run/run.h"               // RunOptions, RunState, run_save_begin: what all trainers share
#include "llmc/run/rundata.h"           // RunData: training and validation rows
#include "llmc/ops/selective_scan.h"    // scan_forward, scan_backward
#include "llmc/ranks/moments.h"         // moments_save, moments_load
#include "llmc/ops/silu.h"              // gate_forward, gate_backward
#include "llmc/run/snapshot.h"          // Snapshot, snapshot_save: a checkpoint is written while training goes on
#include "llmc/ops/softplus.h"          // softplus_forward, softplus_backward
#include "llmc/core/tensor.h"           // Tensor: the table of parameters and activations
#include "llmc/run/tensorboard.h"       // TensorBoard, tensorboard_step, tensorboard_validation
#include "llmc/files/tensorfile.h"      // tensors_save_folder
#include "llmc/ranks/verify.h"          // Verify: a step computed twice
#include "llmc/ranks/data_parallel.h"   // DataParallel, Optimizer: gradients, norm and AdamW, dealt out over ranks

// ---------------------------------------------------------------------------------------------------------------------
// 1. Tensors. The sizes and one line for each parameter are in llmc/models/mamba.h; here is one line for each activation.

// what a pass leaves behind; those from dresidual on are the gradients on their way back, one buffer each for all layers
typedef struct {
    float *encoded, *norm, *norm_rstd, *xz, *conv, *u, *dbc, *delta, *states, *y, *gated, *residual, *out,
        *normf, *normf_mean, *normf_rstd, *z, *z_norm, *z_unit, *cosines, *logits, *losses,
        *dresidual, *dnorm, *dxz, *dy, *du, *ddelta, *ddbc, *dz, *dz_unit;
} ActivationTensors;

enum { N_ACTIVATIONS = 31 };
enum { LOGIT_ROWS = 256 };  // hpn and rt, whose loss needs no logits, compute them for so many positions at a time
typedef enum { TO_GENERATE, TO_EVALUATE, TO_TRAIN } Purpose;
typedef enum { RECOMPUTE_NONE, RECOMPUTE_SCAN, RECOMPUTE_LAYER } Recompute;

// How much of a pass is kept: --recompute layer keeps only the stream between layers, none the states of every position
typedef struct {
    int B, T;
    Purpose purpose;
    Recompute recompute;
    int chunk;  // positions of the scan from one kept state to the next
} Room;

static int logit_rows(const Config* c, const Room* room) {
    const int N = room->B * room->T;
    return room->purpose == TO_GENERATE ? 1 : !head_reads_out(c->head) || N < LOGIT_ROWS ? N : LOGIT_ROWS;
}

// layers 0: one buffer that all layers use in turn; rows 0: this model or pass has none
static void activation_table(Tensor* t, const Config* c, const Room* room) {
    const int M = c->M, E = c->E, N = room->B * room->T, N_train = room->purpose == TO_TRAIN ? N : 0;
    const int stream = room->purpose == TO_TRAIN ? c->L : 0;         // layers of which the stream is kept,
    const int L = room->recompute == RECOMPUTE_LAYER ? 0 : stream;   // and everything else
    const int has_z = config_has_prototypes(c) ? N : 0, dz = config_has_prototypes(c) ? N_train : 0;
    const int projects = config_has_projection(c) ? N : 0;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = activation(FIELD(encoded),     0, N, M);
    *t++ = activation(FIELD(norm),        L, N, M);
    *t++ = activation(FIELD(norm_rstd),   L, N, 1);
    *t++ = activation(FIELD(xz),          L, N, 2 * E);          // x, what is convolved, and the gate z
    *t++ = activation(FIELD(conv),        L, N, E);
    *t++ = activation(FIELD(u),           L, N, E);              // silu(conv)
    *t++ = activation(FIELD(dbc),         L, N, config_dbc(c));  // dt, ssm_B, ssm_C
    *t++ = activation(FIELD(delta),       L, N, E);
    *t++ = activation(FIELD(states),      L, room->B * (int)ceil_div(room->T, room->chunk), (int)scan_states_floats(1, 1, E, c->NS, 1));
    *t++ = activation(FIELD(y),           L, N, E);              // of the scan
    *t++ = activation(FIELD(gated),       L, N, E);
    *t++ = activation(FIELD(residual),    stream, N, M);         // the stream after the layer
    *t++ = activation(FIELD(out),         0, N, M);              // a layer's output before it joins the stream
    *t++ = activation(FIELD(normf),       0, N, M);
    *t++ = activation(FIELD(normf_mean),  0, c->layer == RT ? N : 0, 1);
    *t++ = activation(FIELD(normf_rstd),  0, N, 1);
    *t++ = activation(FIELD(z),           0, projects, c->Dp);
    *t++ = activation(FIELD(z_norm),      0, has_z, 1);
    *t++ = activation(FIELD(z_unit),      0, has_z, c->Dp);
    *t++ = activation(FIELD(cosines),     0, has_z, 1);          // to the target's prototype
    *t++ = activation(FIELD(logits),      0, logit_rows(c, room), c->classes);  // then probabilities, then their gradient
    *t++ = activation(FIELD(losses),      0, N, 1);
    *t++ = activation(FIELD(dresidual),   0, N_train, M);
    *t++ = activation(FIELD(dnorm),       0, N_train, M);
    *t++ = activation(FIELD(dxz),         0, N_train, 2 * E);
    *t++ = activation(FIELD(dy),          0, N_train, E);
    *t++ = activation(FIELD(du),          0, N_train, E);
    *t++ = activation(FIELD(ddelta),      0, N_train, E);
    *t++ = activation(FIELD(ddbc),        0, N_train, config_dbc(c));
    *t++ = activation(FIELD(dz),          0, dz, c->Dp);
    *t++ = activation(FIELD(dz_unit),     0, dz, c->Dp);
#undef FIELD
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: create, free, one layer forward and backward, the head, a whole pass.

typedef struct {
    Config config;
    Tensor table[MAX_PARAMETERS];
    int n_table;
    size_t n;                      // elements of an arena: parameters, each gradient, each moment
    float *params, *adam_m, *adam_v;
    float *unit_prototypes, *prototype_norms, *dunit_prototypes;  // (classes, Dp), (classes)
    float *ones, *zeros;           // (M), of the rt layer's LayerNorm; its gradients go to a third and fourth M
    DataParallel dp, ff_dp;          // gradients of the head's loss; of Forward-Forward's
    int* frozen;                   // of each slice in the order of the table: does it stay as it is? NULL: none does
    int* updates;                  // of each slice: AdamW's updates so far
    int n_slices;
} Mamba;

// what one pass hands to the next: the last K-1 inputs of each convolution, the states of each scan. It reads `now`, writes `next`
typedef struct {
    size_t n_history, n_state;     // floats of a layer
    float *now, *next;             // all histories, then all states; NULL: every pass starts from nothing
} Carried;

typedef struct {
    Room room;
    Tensor table[N_ACTIVATIONS];
    size_t n;
    float* arena;
    int document_start;            // token with which the state starts anew, or -1
    unsigned char* starts;         // (B, T) 1 where a document begins
    Carried carried;
} Activations;

// sizes only: what a run will need is known before anything is allocated
static void mamba_layout(Mamba* model, const Config* c) {
    memset(model, 0, sizeof *model);
    model->config = *c;
    model->n_table = parameter_table(model->table, c);
    model->n = tensors_layout(model->table, model->n_table);
    for (int i = 0; i < model->n_table; i++) { model->n_slices += tensor_slices(&model->table[i]); }
}

static void mamba_init(Mamba* model, const Config* c) {
    mamba_layout(model, c);
    const size_t M = (size_t)c->M, classes = config_has_prototypes(c) ? (size_t)c->classes : 0;
    model->params = (float*)arena_alloc(sizeof(float) * model->n, "parameters");
    model->unit_prototypes = (float*)arena_alloc(sizeof(float) * classes * (size_t)c->Dp, "unit prototypes");
    model->prototype_norms = (float*)arena_alloc(sizeof(float) * classes, "norms of prototypes");
    model->ones = (float*)malloc_check(sizeof(float) * 4 * M, "constants");
    model->zeros = model->ones + M;
    for (size_t i = 0; i < M; i++) { model->ones[i] = 1.0f, model->zeros[i] = 0.0f; }
    model->updates = (int*)malloc_check(sizeof(int) * (size_t)model->n_slices, "counts of updates");
    memset(model->updates, 0, sizeof(int) * (size_t)model->n_slices);
}

// Gradients and moments, for updates of n_leaves micro-batches in all; ff: Forward-Forward's gradients too, whose leaves are
// the real batches and their corrupted twins in turn
static void mamba_init_training(Mamba* model, Comm* comm, int n_leaves, int zero, int ff) {
    const Config* c = &model->config;
    dp_init(&model->dp, comm, model->table, model->n_table, model->frozen, n_leaves, zero);
    dp_open(&model->dp);
    if (ff) {
        dp_init(&model->ff_dp, comm, model->table, model->n_table, model->frozen, 2 * n_leaves, 0);
        dp_open(&model->ff_dp);
    }
    model->adam_m = (float*)arena_alloc(sizeof(float) * model->dp.n_kept, "first moments");
    model->adam_v = (float*)arena_alloc(sizeof(float) * model->dp.n_kept, "second moments");
    if (config_has_prototypes(c) && c->learns_prototypes) {
        model->dunit_prototypes = (float*)arena_alloc(sizeof(float) * (size_t)c->classes * (size_t)c->Dp, "gradient of prototypes");
    }
}

// what an update changes
static Weights mamba_weights(const Mamba* model) {
    return weights_of(model->params, sizeof(float), NULL, model->adam_m, model->adam_v);
}

static void mamba_free(Mamba* model) {
    const Config* c = &model->config;
    const size_t classes = config_has_prototypes(c) ? (size_t)c->classes : 0, prototypes = sizeof(float) * classes * (size_t)c->Dp;
    arena_free(model->adam_m, sizeof(float) * model->dp.n_kept);
    arena_free(model->adam_v, sizeof(float) * model->dp.n_kept);
    arena_free(model->params, sizeof(float) * model->n);
    arena_free(model->unit_prototypes, prototypes);
    arena_free(model->dunit_prototypes, prototypes);
    arena_free(model->prototype_norms, sizeof(float) * classes);
    free(model->ones);
    free(model->updates);
    free(model->frozen);
    dp_free(&model->dp);
    dp_free(&model->ff_dp);
}

static size_t history_floats(const Config* c, int B) { return (size_t)B * (size_t)(c->K - 1) * (size_t)c->E; }
static size_t state_floats(const Config* c, int B) { return (size_t)B * (size_t)c->E * (size_t)c->NS; }
static size_t carried_floats(const Config* c, int B) { return (size_t)c->L * (history_floats(c, B) + state_floats(c, B)); }

static void carried_point(Carried* s, const Config* c, int B, float* now, float* next) {
    s->n_history = history_floats(c, B);
    s->n_state = state_floats(c, B);
    s->now = now;
    s->next = next;
}

// layer l's part of `states`, which are s->now or s->next: its history, its state. NULL where nothing is carried
static float* carried_history(const Carried* s, float* states, int l) { return states ? states + (size_t)l * s->n_history : NULL; }
static float* carried_state(const Carried* s, const Config* c, float* states, int l) {
    return states ? states + (size_t)c->L * s->n_history + (size_t)l * s->n_state : NULL;
}

// what layer l hands on begins as what it was given; convolution and scan then move it to the end of the pass
static void carried_begin(const Carried* s, const Config* c, int l) {
    if (!s->now) { return; }
    memcpy(carried_history(s, s->next, l), carried_history(s, s->now, l), sizeof(float) * s->n_history);
    memcpy(carried_state(s, c, s->next, l), carried_state(s, c, s->now, l), sizeof(float) * s->n_state);
}

// rows first..end-1 of B start from nothing: no inputs before, states 0
static void carried_clear(const Carried* s, const Config* c, int first, int end, int B) {
    const size_t row_history = s->n_history / (size_t)B, row_state = s->n_state / (size_t)B, n_rows = (size_t)(end - first);
    for (int l = 0; l < c->L; l++) {
        conv1d_history_clear(carried_history(s, s->now, l) + (size_t)first * row_history, end - first, c->E, c->K);
        memset(carried_state(s, c, s->now, l) + (size_t)first * row_state, 0, sizeof(float) * n_rows * row_state);
    }
}

static void carry_nothing(Activations* acts) { memset(&acts->carried, 0, sizeof acts->carried); }

static void carried_swap(Carried* s) {
    float* was = s->now;
    s->now = s->next;
    s->next = was;
}

static size_t activations_layout(Activations* a, const Config* c, const Room* room) {
    memset(a, 0, sizeof *a);
    a->room = *room;
    a->document_start = -1;
    activation_table(a->table, c, room);
    return a->n = tensors_layout(a->table, N_ACTIVATIONS);
}

static void activations_init(Activations* a, const Config* c, const Room* room) {
    activations_layout(a, c, room);
    a->arena = (float*)arena_alloc(sizeof(float) * a->n, "activations");
    a->starts = (unsigned char*)malloc_check((size_t)room->B * (size_t)room->T, "starts of documents");
}

static void activations_free(Activations* a) {
    arena_free(a->arena, sizeof(float) * a->n);
    free(a->starts);
}

static Parameters layer_parameters(const Mamba* model, float* arena, int l) {
    Parameters p;
    memset(&p, 0, sizeof p);
    tensors_point(&p, model->table, model->n_table, arena, l);
    return p;
}

static ActivationTensors layer_activations(const Activations* acts, int l) {
    ActivationTensors a;
    tensors_point(&a, acts->table, N_ACTIVATIONS, acts->arena, l);
    return a;
}

// the slices of layer l in the order of the table: frozen[first + l] of each tensor with layers
static int layer_is_frozen(const Mamba* model, int l) {
    int all = model->frozen != NULL;
    for (int i = 0, first = 0; i < model->n_table; first += tensor_slices(&model->table[i++])) {
        if (all && model->table[i].layers > 0) { all = model->frozen[first + l]; }
    }
    return all;
}

// the lowest layer below which nothing learns; 0 where the embedding does
static int lowest_learning(const Mamba* model) {
    int l = 0;
    while (l < model->config.L && model->frozen && model->frozen[0] && layer_is_frozen(model, l)) { l++; }
    return l;
}

// (B, T) 1 where a document begins, NULL where none does
static const unsigned char* document_starts(const Activations* acts) { return acts->document_start >= 0 ? acts->starts : NULL; }

// the input of the convolution: x of xz, or with the rt layer the stream itself
typedef struct { const float* data; size_t stride; } Rows;
static Rows conv_input(const Config* c, const float* xz, const float* residual) {
    const Rows mamba = {xz, 2 * (size_t)c->E}, rt = {residual, (size_t)c->M};
    return c->layer == RT ? rt : mamba;
}

// one layer: from the stream `inp` to the stream a.residual. What it hands on to the next pass goes to carried.next
static void layer_forward(const Mamba* model, Activations* acts, int l, const float* inp, int B, int T, const Device* dev) {
    const Config* c = &model->config;
    const int N = B * T, M = c->M, E = c->E, NS = c->NS, R = c->R, P = config_dbc(c);
    const unsigned char* starts = document_starts(acts);
    ActivationTensors a = layer_activations(acts, l);
    Parameters p = layer_parameters(model, model->params, l);
    const Carried* s = &acts->carried;
    const float* history = carried_history(s, s->now, l);
    float *next_history = carried_history(s, s->next, l), *next_state = carried_state(s, c, s->next, l);
    carried_begin(s, c, l);
    if (c->layer == MAMBA1) {
        rmsnorm_forward(a.norm, a.norm_rstd, inp, p.norm, c->eps, N, M, dev);
        matmul_forward(a.xz, a.norm, p.in_proj, p.in_bias, N, M, 2 * E, dev);
    }
    const Rows x = conv_input(c, a.xz, inp);
    conv1d_forward(a.conv, a.u, x.data, x.stride, p.conv, p.conv_bias, history, starts, B, T, E, c->K, dev);
    if (s->now) { conv1d_history(next_history, x.data, x.stride, starts, B, T, E, c->K); }
    matmul_forward(a.dbc, a.u, p.x_proj, NULL, N, E, P, dev);
    gemm(a.delta, E, p.dt_bias, 0, matrix(a.dbc, P), transposed(p.dt_proj, R), N, E, R, dev);
    softplus_forward(a.delta, a.delta, (size_t)N * E, dev);
    scan_forward(a.y, acts->room.purpose == TO_TRAIN ? a.states : NULL, next_state, a.u, a.delta, p.A_log, a.dbc + R, a.dbc + R + NS, P,
                 p.D, starts, B, T, E, NS, acts->room.chunk, dev);
    if (c->layer == MAMBA1) { gate_forward(a.gated, a.y, a.xz + E, 2 * E, N, E, dev); }
    matmul_forward(a.out, c->layer == MAMBA1 ? a.gated : a.y, p.out_proj, p.out_bias, N, E, M, dev);
    residual_forward(a.residual, inp, a.out, (size_t)N * M, dev);
}

// a linear layer's gradients; of one that stays as it is only that of its input
static void linear_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp, const float* weight, int N,
                            int C, int OC, const Device* dev) {
    matmul_backward_input(dinp, dout, weight, N, C, OC, dev);
    if (dweight) { matmul_backward_weight(dweight, dout, inp, 0, N, C, OC, dev); }
    if (dbias) { column_sums(dbias, dout, N, OC, dev); }
}

// the same upside down: the gradient of the stream in dresidual is that after the layer, and becomes that before it.
// d: where the gradients of this layer's parameters are written
static void layer_backward(const Mamba* model, Activations* acts, int l, const float* inp, Parameters d, int B, int T, const Device* dev) {
    const Config* c = &model->config;
    const int N = B * T, M = c->M, E = c->E, NS = c->NS, R = c->R, P = config_dbc(c), is_rt = c->layer == RT;
    const unsigned char* starts = document_starts(acts);
    const float* history = carried_history(&acts->carried, acts->carried.now, l);
    if (acts->room.recompute == RECOMPUTE_LAYER) { layer_forward(model, acts, l, inp, B, T, dev); }
    ActivationTensors a = layer_activations(acts, l);
    Parameters p = layer_parameters(model, model->params, l);
    const Rows x = conv_input(c, a.xz, inp);
    linear_backward(a.dy, d.out_proj, d.out_bias, a.dresidual, is_rt ? a.y : a.gated, p.out_proj, N, E, M, dev);
    if (!is_rt) { gate_backward(a.dy, a.dxz + E, 2 * E, a.dy, a.y, a.xz + E, 2 * E, N, E, dev); }
    scan_backward(a.du, a.ddelta, d.A_log, a.ddbc + R, a.ddbc + R + NS, P, d.D, a.dy, a.states, a.u, a.delta, p.A_log, a.dbc + R,
                  a.dbc + R + NS, P, p.D, starts, B, T, E, NS, acts->room.chunk, dev);
    softplus_backward(a.ddelta, a.ddelta, a.delta, (size_t)N * E, dev);
    gemm(a.ddbc, P, NULL, 0, matrix(a.ddelta, E), matrix(p.dt_proj, R), N, R, E, dev);
    if (d.dt_proj) { gemm(d.dt_proj, R, NULL, 0, transposed(a.ddelta, E), matrix(a.dbc, P), E, R, N, dev); }
    if (d.dt_bias) { column_sums(d.dt_bias, a.ddelta, N, E, dev); }
    if (d.x_proj) { matmul_backward_weight(d.x_proj, a.ddbc, a.u, 0, N, E, P, dev); }
    gemm(a.du, E, a.du, E, matrix(a.ddbc, P), matrix(p.x_proj, E), N, E, P, dev);  // a chain that goes on from the scan's part
    // the gradient of the convolution's input has the layout of that input: with rt (N, M), else the left half of (N, 2E)
    conv1d_backward(is_rt ? a.dnorm : a.dxz, x.stride, d.conv, d.conv_bias, a.du, a.conv, x.data, x.stride, p.conv, history, starts, B, T,
                    E, c->K, dev);
    if (is_rt) {
        residual_forward(a.dresidual, a.dresidual, a.dnorm, (size_t)N * M, dev);
        return;
    }
    linear_backward(a.dnorm, d.in_proj, d.in_bias, a.dxz, a.norm, p.in_proj, N, M, 2 * E, dev);
    rmsnorm_backward(a.dresidual, d.norm, a.dnorm, inp, p.norm, a.norm_rstd, N, M, dev);
}

// the stream before layer l
static const float* layer_input(const Activations* acts, int l) {
    return l > 0 ? layer_activations(acts, l - 1).residual : layer_activations(acts, 0).encoded;
}

// the stream before the first layer, and where documents begin
static void embed(const Mamba* model, Activations* acts, const int* tokens, int N, const Device* dev) {
    const float* embedding = layer_parameters(model, model->params, 0).embedding;
    for (int n = 0; n < N && acts->document_start >= 0; n++) { acts->starts[n] = tokens[n] == acts->document_start; }
    token_embedding_forward(layer_activations(acts, 0).encoded, tokens, embedding, N, model->config.M, dev);
}

// tokens (B, T) through all layers, up to the last norm and, for a head with prototypes, the unit vectors
static void mamba_forward(const Mamba* model, Activations* acts, const int* tokens, int B, int T, const Device* dev) {
    const Config* c = &model->config;
    const int N = B * T, M = c->M;
    ActivationTensors a = layer_activations(acts, 0);
    Parameters p = layer_parameters(model, model->params, 0);
    embed(model, acts, tokens, N, dev);
    for (int l = 0; l < c->L; l++) { layer_forward(model, acts, l, layer_input(acts, l), B, T, dev); }
    const float* last = layer_input(acts, c->L);
    if (c->layer == RT) { layernorm_forward(a.normf, a.normf_mean, a.normf_rstd, last, model->ones, model->zeros, N, M, dev); }
    else { rmsnorm_forward(a.normf, a.normf_rstd, last, p.norm_f, c->eps, N, M, dev); }
    if (!config_has_prototypes(c)) { return; }
    if (p.projection) { matmul_forward(a.z, a.normf, p.projection, NULL, N, M, c->Dp, dev); }
    unit_forward(a.z_unit, a.z_norm, p.projection ? a.z : a.normf, N, c->Dp, dev);
}

// The prototypes as the head uses them. Called when they have changed
static void update_prototypes(Mamba* model, const Device* dev) {
    const Config* c = &model->config;
    Parameters p = layer_parameters(model, model->params, 0);
    if (config_has_prototypes(c)) { unit_forward(model->unit_prototypes, model->prototype_norms, p.prototypes, c->classes, c->Dp, dev); }
    if (c->head == HEAD_RT) { memcpy(model->unit_prototypes, p.prototypes, sizeof(float) * (size_t)c->classes * (size_t)c->Dp); }
}

// logits of the n positions that follow `first`, into the first n rows: scores or, of the hpn head, cosines
static float* mamba_logits(const Mamba* model, Activations* acts, int first, int n, const Device* dev) {
    const Config* c = &model->config;
    ActivationTensors a = layer_activations(acts, 0);
    Parameters p = layer_parameters(model, model->params, 0);
    if (c->head == HEAD_CE) {
        matmul_forward(a.logits, a.normf + (size_t)first * c->M, c->tied ? p.embedding : p.lm_head, NULL, n, c->M, c->classes, dev);
        return a.logits;
    }
    matmul_forward(a.logits, a.z_unit + (size_t)first * c->Dp, model->unit_prototypes, NULL, n, c->Dp, c->classes, dev);
    if (c->head == HEAD_HPN_SOFTMAX) { scale_array(a.logits, c->scale, (size_t)n * c->classes, dev); }
    return a.logits;
}

// The losses of all positions, and their sum, chained. ce and hpn-softmax need mamba_logits before: they become probabilities
static float mamba_loss(const Mamba* model, Activations* acts, const int* targets, int N, const Device* dev) {
    const Config* c = &model->config;
    ActivationTensors a = layer_activations(acts, 0);
    if (head_reads_out(c->head)) {
        hpn_forward(a.losses, a.cosines, a.z_unit, model->unit_prototypes, targets, N, c->Dp, dev);
    } else {
        crossentropy_forward(a.losses, a.logits, a.logits, targets, N, c->classes, c->classes, dev);
    }
    float sum = 0.0f;
    for (int n = 0; n < N; n++) { sum += a.losses[n]; }
    return sum;
}

// Backward through the head to the gradient of norm_f, in dnorm. Gradients of prototypes are those of the vectors as stored
static void head_backward(const Mamba* model, Activations* acts, Parameters d, const int* targets, float dloss, int N, const Device* dev) {
    const Config* c = &model->config;
    const int M = c->M, Dp = c->Dp, classes = c->classes;
    ActivationTensors a = layer_activations(acts, 0);
    Parameters p = layer_parameters(model, model->params, 0);
    if (c->head == HEAD_CE) {
        crossentropy_backward(a.logits, a.logits, targets, dloss, N, classes, classes, dev);
        matmul_backward(a.dnorm, c->tied ? d.embedding : d.lm_head, NULL, a.logits, a.normf, c->tied ? p.embedding : p.lm_head, N, M,
                        classes, dev);
        return;
    }
    // of fixed ones nothing is written: their gradient is the 0 with which the arena began
    float* dprototypes = !c->learns_prototypes ? NULL : c->head == HEAD_RT ? d.prototypes : model->dunit_prototypes;
    if (dprototypes) { memset(dprototypes, 0, sizeof(float) * (size_t)classes * (size_t)Dp); }
    if (c->head == HEAD_HPN_SOFTMAX) {
        crossentropy_backward(a.logits, a.logits, targets, dloss, N, classes, classes, dev);
        scale_array(a.logits, c->scale, (size_t)N * classes, dev);
        matmul_backward_input(a.dz_unit, a.logits, model->unit_prototypes, N, Dp, classes, dev);
        if (dprototypes) { matmul_backward_weight(dprototypes, a.logits, a.z_unit, 0, N, Dp, classes, dev); }
    } else {
        hpn_backward(a.dz_unit, dprototypes, a.z_unit, model->unit_prototypes, a.cosines, targets, dloss, N, Dp, classes, dev);
    }
    if (dprototypes && d.prototypes && c->head != HEAD_RT) {
        unit_backward(d.prototypes, dprototypes, model->unit_prototypes, model->prototype_norms, classes, Dp, dev);
    }
    unit_backward(p.projection ? a.dz : a.dnorm, a.dz_unit, a.z_unit, a.z_norm, N, Dp, dev);
    if (p.projection) { matmul_backward(a.dnorm, d.projection, NULL, a.dz, a.normf, p.projection, N, M, Dp, dev); }
}

// Forward's calls upside down. Every parameter's gradient is written: one micro-batch is one leaf, which joins the tree of
// llmc/ranks/data_parallel.h. Below the lowest layer that learns nothing is computed.
static void mamba_backward(Mamba* model, Activations* acts, const int* tokens, const int* targets, float dloss, int B, int T,
                           const Device* dev) {
    const Config* c = &model->config;
    const int N = B * T, M = c->M, lowest = lowest_learning(model);
    ActivationTensors a = layer_activations(acts, 0);
    Parameters p = layer_parameters(model, model->params, 0), d;
    memset(&d, 0, sizeof d);
    dp_point(&model->dp, &d, 0);
    const int is_tied = c->head == HEAD_CE && c->tied;
    if (d.embedding && !is_tied) { memset(d.embedding, 0, sizeof(float) * (size_t)c->V * (size_t)M); }
    head_backward(model, acts, d, targets, dloss, N, dev);
    memset(a.dresidual, 0, sizeof(float) * (size_t)N * (size_t)M);
    const float* last = layer_input(acts, c->L);
    if (c->layer == RT) {  // the gradients of ones and zeros go nowhere
        layernorm_backward(a.dresidual, model->zeros + M, model->zeros + 2 * M, a.dnorm, last, model->ones, a.normf_mean,
                           a.normf_rstd, N, M, dev);
    } else {
        rmsnorm_backward(a.dresidual, d.norm_f, a.dnorm, last, p.norm_f, a.normf_rstd, N, M, dev);
    }
    for (int l = c->L - 1; l >= 0; l--) {
        dp_point(&model->dp, &d, l);
        if (l >= lowest) { layer_backward(model, acts, l, layer_input(acts, l), d, B, T, dev); }
        dp_layer_done(&model->dp, l, dev);
    }
    if (lowest == 0) { token_embedding_backward(d.embedding, a.dresidual, tokens, N, M, dev); }
    dp_leaf_done(&model->dp, dev);
}

// one micro-batch, forward and backward; its loss and gradient join the tree. dloss = 1 / targets counted in the whole update
static void mamba_leaf(Mamba* model, Activations* acts, const int* tokens, const int* targets, float dloss, int B, int T,
                       const Device* dev) {
    mamba_forward(model, acts, tokens, B, T, dev);
    if (!head_reads_out(model->config.head)) { mamba_logits(model, acts, 0, B * T, dev); }
    *dp_loss(&model->dp) = mamba_loss(model, acts, targets, B * T, dev);
    mamba_backward(model, acts, tokens, targets, dloss, B, T, dev);
}

// its loss, and all its gradients: other ranks expect the last layer first
static void ff_leaf_done(Mamba* model, float loss, const Device* dev) {
    *dp_loss(&model->ff_dp) = loss;
    for (int l = model->config.L - 1; l >= 0; l--) { dp_layer_done(&model->ff_dp, l, dev); }
    dp_leaf_done(&model->ff_dp, dev);
}

// Forward-Forward (Hinton 2022): the loss of a layer is its own, of the output with which it joins the stream: large for real
// text, small for corrupted. One leaf of ff_dp; dloss = 1 / (layers x positions of the whole update, real and corrupted)
static void ff_leaf(Mamba* model, Activations* acts, const int* tokens, float threshold, int is_real, float dloss, int B, int T,
                    const Device* dev) {
    const Config* c = &model->config;
    const int N = B * T;
    ActivationTensors a = layer_activations(acts, 0);
    Parameters d;
    memset(&d, 0, sizeof d);
    float sum = 0.0f;
    embed(model, acts, tokens, N, dev);
    for (int l = 0; l < c->L; l++) {
        dp_point(&model->ff_dp, &d, l);
        layer_forward(model, acts, l, layer_input(acts, l), B, T, dev);
        if (layer_is_frozen(model, l)) { continue; }
        ff_goodness(a.losses, a.dresidual, a.out, threshold, is_real, dloss, N, c->M, dev);
        for (int n = 0; n < N; n++) { sum += a.losses[n]; }
        layer_backward(model, acts, l, layer_input(acts, l), d, B, T, dev);
    }
    ff_leaf_done(model, sum, dev);
}

// what rust_trainer calls Forward-Forward, with the rt layer: a hinge on the stream before each layer, in which only D learns, here
// by the complete gradient (doc/gradient_surgery.md)
static void rt_ff_leaf(Mamba* model, Activations* acts, const int* tokens, int is_real, float dloss, int B, int T, const Device* dev) {
    const Config* c = &model->config;
    Parameters d;
    memset(&d, 0, sizeof d);
    float sum = 0.0f;
    if (is_real) { mamba_forward(model, acts, tokens, B, T, dev); }
    for (int l = 0; l < c->L; l++) {
        float loss = 0.0f;
        dp_point(&model->ff_dp, &d, l);
        float* dD = d.D ? d.D : layer_activations(acts, 0).dresidual;  // nobody asks: it goes nowhere
        memset(dD, 0, sizeof(float) * (size_t)c->E);
        if (!is_real || layer_is_frozen(model, l)) { continue; }
        rt_ff(dD, &loss, layer_input(acts, l), layer_parameters(model, model->params, l).D, 1, B, T, c->M, dev);
        for (int i = 0; i < c->E; i++) { dD[i] *= dloss; }
        sum += loss;
    }
    ff_leaf_done(model, sum, dev);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. A run: everything that main hands around.

typedef struct {
    RunOptions o;             // the common options, llmc/run/run.h
    RunDataOptions d;         // what else can be said of the data, llmc/run/rundata.h
    MambaOptions m;           // those of this trainer
    Option table[MAX_OPTIONS];
    int n_options;
    Device dev;
    RankPlace place;
    Comm* comm;
    Tokenizer tokenizer;
    RunData data;
    ProbeBatch probe;
    Mamba model;
    Activations acts, cache;  // of a batch; of the text that is being generated
    Carried carried;          // --carry-state: of all micro-batches of an update, one after the other
    Generator generator;
    float* generated_state;   // of cache: before and after a piece of text
    int n_generated;          // positions that it has seen
    Prefetch prefetch;
    int64_t first_row;        // with which this process began,
    int first_step;           // and after which step
    double batch_scores[N_SCORES];  // of the batch that is being validated
    int* ranks;               // (B, T) of each target among all classes
    float* readout;           // (B, T)
    char weights[PATH_BYTES]; // file to start from, "": random
    char config[PATH_BYTES];  // config.json, "": from --model
    int has_head;             // does that model have the head that is trained?
    int* old_layers;          // of each layer its number there, -1: new; NULL: the same layers
    int n_old_layers;         // layers there
    int T, n_leaves;          // positions in a row, micro-batches in an update
    int *inputs, *targets, *corrupted;  // (B, T)
    Surgery surgeon;          // how the gradients of two tasks become one
    size_t* surgeon_params;   // of each of its ranges: where it begins among the parameters
    int* surgeon_ends;        // of each layer: where its ranges end in those of the surgeon
    double seconds_waited;    // for batches, in this step
    RunState state;
    Snapshot snapshot;        // what is being saved, or was last
    Verify verify;            // of --verify-every
    TensorBoard board;
    double peak;              // flop/s of the matmul on this machine
    Log log;
} Run;

static void parse_options(Run* r, int argc, char** argv) {
    r->n_options = run_options(r->table, &r->o, "random start from a preset: tiny, 130m, 370m, 790m, 1.4b, 2.8b");
    r->n_options += data_options(r->table + r->n_options, &r->d);
    r->n_options += mamba_options(r->table + r->n_options, &r->m);
    reword_options(r->table, r->n_options);
    assert(r->n_options <= MAX_OPTIONS);
    options_parse(r->table, r->n_options, argc, argv,
                  "Trains Mamba, with or without hyperspherical prototypes, on the CPU. First steps: make run-mamba.");
    r->place = rank_place(options_given(r->table, r->n_options, "rank") == 1 ? r->o.rank : "");
    r->comm = ranks_open(&r->place, &r->o);
    r->state = r->o.resume ? ranks_restore(r->comm, r->table, r->n_options, &r->o) : run_state_start(r->o.seed);
    if (r->m.fail_on_non_finite) { r->o.max_skips = 0; }
    r->log.extra_schema = mamba_log_schema();
    r->log.json_lines = !r->m.human_log;
}

static int is_typed(const Run* r, const char* option) { return options_given(r->table, r->n_options, option) == 1; }

// also with an empty TEXT; a resumed run does not repeat it
static int is_generating(const Run* r) { return is_typed(r, "generate"); }

// --dry-run without data asks for the memory of training
static int is_training(const Run* r) {
    return !is_generating(r) && !*r->o.probe && !r->o.eval_only && (has_data(&r->data.train) || r->o.dry_run);
}

static int is_classifier(const Run* r) { return strcmp(r->m.task, "cls") == 0; }

// the tokenizer is the model's: it shows every token, and encodes none that the model lacks
static int has_text(const Run* r) {
    return !is_classifier(r) && data_tokenizer_fits(&r->data, &r->tokenizer, r->model.config.V, r->table, r->n_options);
}

static int end_of_text(const Run* r) { return has_text(r) ? tokenizer_need_eot(&r->tokenizer) : r->model.config.V - 1; }

// is a checkpoint written while training goes on? Not with --zero 1 or 2: then all ranks send rank 0 what they keep
static int saves_beside(const Run* r) { return r->o.async_save && (r->comm->size == 1 || r->o.zero == 0); }

static int has_ff(const Run* r) { return r->m.ff_lr > 0.0f; }

// floats of what --carry-state keeps between updates
static size_t run_carried_floats(const Run* r) {
    return r->d.carry_state ? (size_t)r->n_leaves * carried_floats(&r->model.config, r->o.batch_size) : 0;
}

// products of every matrix, forward and twice backward; of the scan, 9 flops for each state
static double flops_per_token(const Run* r) {
    const Config* c = &r->model.config;
    double n = 0.0;
    for (int i = 0; i < r->model.n_table; i++) {
        const Tensor* t = &r->model.table[i];
        const int looks_up = t->field == offsetof(Parameters, embedding) && !(c->head == HEAD_CE && c->tied);
        if (t->rows > 1 && t->on_disk != CONV && !looks_up && t->field != offsetof(Parameters, A_log)) { n += (double)tensor_elements(t); }
    }
    return 6.0 * n + 27.0 * c->L * c->E * c->NS;
}

static Recompute recompute_of(const Run* r) {
    return r->m.recompute[0] == 'n' ? RECOMPUTE_NONE : r->m.recompute[0] == 'l' ? RECOMPUTE_LAYER : RECOMPUTE_SCAN;
}

static Room room_of(const Run* r, int B, int T, Purpose purpose) {
    const int chunk = r->m.scan_chunk > 0 ? r->m.scan_chunk : SCAN_CHUNK, none = recompute_of(r) == RECOMPUTE_NONE;
    const Room room = {B, T, purpose, recompute_of(r), none ? 1 : chunk < T ? chunk : T};
    return room;
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Files: checkpoints and models of others, in and out.

static void save_model(const Run* r, const float* params, const char* folder, size_t shard_bytes, SavedFiles* files) {
    char path[PATH_BYTES];
    saved_files_add(files, config_save(path_join(path, folder, "config.json"), &r->model.config, end_of_text(r)));
    tensors_save_folder(folder, r->model.table, r->model.n_table, params, shard_bytes, files);
    if (has_text(r)) { tokenizer_save(folder, &r->tokenizer, files); }
}

// what a checkpoint holds beside model, moments and the state all trainers have: from the run itself or a snapshot of it
enum { N_ARENAS = SNAPSHOT_ARENAS + 3, MAX_EXTRAS = 4 };
static int trainer_extras(const Run* r, Extra* extras, const void* updates, const void* gradnorm, const void* carried) {
    const Extra all[] = {{"updates", DTYPE_I32, (void*)updates, (size_t)r->model.n_slices},
                         {"gradnorm", DTYPE_F32, (void*)gradnorm, sizeof(GradNorm) / sizeof(float)},
                         {"carried", DTYPE_F32, (void*)carried, run_carried_floats(r)},
                         {"carried_rows", DTYPE_I32, (void*)&r->o.batch_size, 1}};  // of a micro-batch
    memcpy(extras, all, sizeof all);
    return r->d.carry_state ? MAX_EXTRAS : 2;
}

// the files of a checkpoint, from the snapshot: training may be further on by now
static void write_checkpoint(void* run) {
    Run* r = (Run*)run;
    Snapshot* s = &r->snapshot;
    Extra extras[MAX_EXTRAS];
    char temporary[PATH_BYTES], path[PATH_BYTES];
    SavedFiles files;
    files.n = 0;
    run_save_begin(temporary, &r->o, &s->state, run_checkpoint_bytes(r->model.table, r->model.n_table));
    save_model(r, (const float*)s->arena[0], temporary, SIZE_MAX, &files);
    path_join(path, temporary, "optimizer.safetensors");
    const float *m = (const float*)s->arena[1], *v = (const float*)s->arena[2];
    saved_files_add(&files, moments_save(path, &r->model.dp, m, v, NULL));
    const int n_extras = trainer_extras(r, extras, s->arena[3], s->arena[4], s->arena[5]);
    extras_save(path_join(path, temporary, "trainer.safetensors"), extras, n_extras, &files);
    run_save_end(temporary, &files, r->table, r->n_options, &r->o, &s->state);
}

// rank 0 writes, in the background unless the run is over; with --zero 1 or 2 the others send it their parts
static void save_checkpoint(Run* r, int last) {
    Mamba* model = &r->model;
    const size_t kept = sizeof(float) * model->dp.n_kept, carried = sizeof(float) * run_carried_floats(r);
    const void* arenas[N_ARENAS] = {model->params, model->adam_m, model->adam_v, model->updates, &r->surgeon.gradnorm, r->carried.now};
    const size_t n_bytes[N_ARENAS] = {sizeof(float) * model->n, kept, kept, sizeof(int) * (size_t)model->n_slices, sizeof(GradNorm),
                                      carried};
    r->state.n_sample_bytes = run_sample_bytes(&r->o);
    if (r->comm->rank == 0) {
        snapshot_save(&r->snapshot, arenas, n_bytes, N_ARENAS, &r->state, saves_beside(r), last, write_checkpoint, r, &r->dev);
    } else if (r->o.zero > 0) {
        moments_save(NULL, &model->dp, model->adam_m, model->adam_v, &r->dev);
    }
}

// moments, counts and states of the checkpoint that --resume goes on from; new layers have none
static void load_training(Run* r) {
    char path[PATH_BYTES];
    Extra extras[MAX_EXTRAS];
    Mamba *model = &r->model, before;
    checkpoint_path(path, r->o.run, r->state.step, "optimizer.safetensors");
    moments_load_layers(path, &model->dp, model->adam_m, model->adam_v, r->old_layers, &r->dev);
    Config old = model->config;
    old.L = r->old_layers ? r->n_old_layers : old.L;
    mamba_layout(&before, &old);
    int* updates = (int*)malloc_check(sizeof(int) * (size_t)before.n_slices, "counts of updates");
    int n_extras = trainer_extras(r, extras, updates, &r->surgeon.gradnorm, r->carried.now), carried_rows = r->o.batch_size;
    extras[0].n = (size_t)before.n_slices;
    extras[MAX_EXTRAS - 1].values = &carried_rows;
    checkpoint_path(path, r->o.run, r->state.step, "trainer.safetensors");
    extras_load(path, extras, n_extras);
    if (carried_rows != r->o.batch_size) {  // with as many rows in an update the states would be as many, in another order
        options_fail("batch-size", "expected the %d rows whose states the checkpoint carries, found %d", carried_rows, r->o.batch_size);
    }
    for (int i = 0, slice = 0, first = 0; i < model->n_table; first += tensor_slices(&before.table[i++])) {
        for (int l = 0; l < tensor_slices(&model->table[i]); l++) {
            const int from = tensor_old_slice(&model->table[i], r->old_layers, l);
            model->updates[slice++] = from < 0 ? 0 : updates[first + from];
        }
    }
    free(updates);
}

// where the model comes from: the file of its parameters (or the index of their shards), its config.json, its tokenizer
static void find_model(Run* r) {
    const RunOptions* o = &r->o;
    char path[PATH_BYTES];
    run_check_sources(r->table, r->n_options, o);
    snprintf(r->config, PATH_BYTES, "%s", o->config);
    if (o->resume) {
        checkpoint_path(r->weights, o->run, r->state.step, HF_WEIGHTS);
        checkpoint_path(r->config, o->run, r->state.step, "config.json");
    } else if (*o->from) {
        model_find(r->weights, r->config, o->from);
        if (!*r->config) { fail_input("%s: expected a Mamba model with its config.json", o->from); }
    }
    run_choose_tokenizer(r->table, r->n_options, o, model_tokenizer(path, r->config));
}

// vocabulary of a new model: --vocab-size; the tokenizer's for text or when it was named; else what the data needs
static int new_vocabulary(const Run* r) {
    const TokenData* d = &r->data.train;
    const int is_text = d->text != NULL || is_typed(r, "tokenizer") || !has_data(d), needed = data_vocabulary(&r->data);
    if (r->m.vocab_size > 0) { return r->m.vocab_size; }
    return is_text && r->tokenizer.n_tokens > needed ? r->tokenizer.n_tokens : needed;
}

// the model's sizes and its head, with the layers that are to be added
static void choose_model(Run* r) {
    const MambaOptions* m = &r->m;
    Config c = *r->config ? config_load(r->config) : config_new(m, r->o.model, new_vocabulary(r)), was = c;
    if (*r->config) { mamba_check_shape(r->table, r->n_options, r->config); }
    const int classes = m->classes > 0 ? m->classes : data_classes(&r->data);
    choose_head(&c, m, r->table, r->n_options, *r->config != '\0', is_classifier(r) ? classes : 0);
    const int same_classes = c.is_classifier == was.is_classifier && c.classes == was.classes && c.tied == was.tied;
    r->has_head = *r->config && c.head == was.head && same_classes && (!config_has_prototypes(&c) || c.Dp == was.Dp);
    if (r->o.resume && !r->has_head) {
        options_fail("head", "%s has head %s with %d classes, a run that goes on keeps it: begin another with --from %s", r->o.run,
                     head_names()[was.head], was.classes, r->o.run);
    }
    r->n_old_layers = c.L;
    if (m->target_layers > 0 && m->target_layers < c.L) {
        options_fail("target-layers", "expected at least the %d layers that there are, found %d", c.L, m->target_layers);
    }
    if (m->target_layers > c.L) {
        r->old_layers = (int*)malloc_check(sizeof(int) * (size_t)m->target_layers, "layers");
        placement_map(r->old_layers, m->placement, c.L, m->target_layers);
        c.L = m->target_layers;
    }
    mamba_layout(&r->model, &c);
}

// --freeze and --freeze-embedding; prototypes that are fixed
static void freeze(Run* r) {
    Mamba* model = &r->model;
    Tensor* prototypes = PARAMETER(model->table, model->n_table, prototypes);
    model->frozen = freeze_slices(r->o.freeze, model->table, model->n_table);
    if (r->m.freeze_embedding) { model->frozen[0] = model->table[0].frozen = 1; }
    if (!prototypes || model->config.learns_prototypes) { return; }
    prototypes->frozen = 1;
    for (int i = 0, slice = 0; i < model->n_table; slice += tensor_slices(&model->table[i++])) {
        if (&model->table[i] == prototypes) { model->frozen[slice] = 1; }
    }
}

static void load_parameters(Run* r) {
    const Config c = r->model.config;
    Mamba* model = &r->model;
    mamba_init(model, &c);
    freeze(r);
    const int loads_head = *r->weights && r->has_head;
    if (!loads_head || r->old_layers) {  // start values, some of which may be replaced by what is loaded
        tensors_init(model->table, model->n_table, model->params, (uint32_t)r->o.seed);
        mamba_start_values(model->table, model->n_table, &c, model->params, r->old_layers);
    }
    if (config_has_prototypes(&c) && !loads_head) {
        float* prototypes = layer_parameters(model, model->params, 0).prototypes;
        prototypes_init(prototypes, prototype_placement(&c, r->m.proto_init), c.classes, c.Dp, (uint32_t)r->o.seed, &r->dev);
    }
    if (*r->weights) { mamba_load(r->weights, model->table, model->n_table, r->old_layers, r->has_head, model->params); }
    update_prototypes(model, &r->dev);
}

// a folder that this trainer loads, and transformers too where it has such a model
static void export_folder(const Run* r, const char* folder) {
    char temporary[PATH_BYTES], path[PATH_BYTES];
    const int eot = end_of_text(r);
    SavedFiles files;
    files.n = 0;
    hf_export_begin(temporary, folder, 4.0 * (double)r->model.n);
    save_model(r, r->model.params, temporary, (size_t)(1e9 * (double)r->o.shard_gb), &files);
    json_write(path_join(path, temporary, "generation_config.json"),
               json_pack("{s:i, s:i}", "bos_token_id", eot, "eos_token_id", eot));
    hf_export_end(temporary, folder);
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Evaluation, sampling, probe.

// n positions from `first` on, whose logits are in the first rows; -log of the probability that a head without a softmax reads out
static void add_scores(Run* r, const int* targets, int first, int n, double* scores) {
    const Config* c = &r->model.config;
    ActivationTensors a = layer_activations(&r->acts, 0);
    for (int i = 0; i < n; i++) { scores[SCORE_COUNTED] += targets[first + i] >= 0; }
    target_ranks(r->ranks, a.logits, targets + first, n, c->classes, &r->dev);
    scores[SCORE_TOP1] += (double)count_hits(r->ranks, n, 1);
    scores[SCORE_TOP5] += (double)count_hits(r->ranks, n, 5);
    if (!config_has_prototypes(c)) { return; }
    for (int i = 0; i < n; i++) {
        const float cosine = targets[first + i] < 0 ? 0.0f : a.logits[(size_t)i * c->classes + targets[first + i]];
        scores[SCORE_COSINE] += (double)(c->head == HEAD_HPN_SOFTMAX ? cosine / c->scale : cosine);
    }
    if (c->head == HEAD_HPN_SOFTMAX) { return; }
    hpn_readout(a.logits, a.logits, n, c->classes, &r->dev);
    crossentropy_forward(r->readout, a.logits, a.logits, targets + first, n, c->classes, c->classes, &r->dev);
    for (int i = 0; i < n; i++) { scores[SCORE_LOG_LOSS] += (double)r->readout[i]; }
}

// the model behind llmc/run/evaluate.h
static const float* batch_losses(void* run, const int* inputs, const int* targets, int B, int T) {
    Run* r = (Run*)run;
    mamba_forward(&r->model, &r->acts, inputs, B, T, &r->dev);
    memset(r->batch_scores, 0, sizeof r->batch_scores);
    if (!head_reads_out(r->model.config.head)) {  // before the loss makes probabilities of the logits
        mamba_logits(&r->model, &r->acts, 0, B * T, &r->dev);
        add_scores(r, targets, 0, B * T, r->batch_scores);
    }
    mamba_loss(&r->model, &r->acts, targets, B * T, &r->dev);
    return layer_activations(&r->acts, 0).losses;
}

// rows (N, D) of counted targets move to the front, at most so many; returns their number
static int gather_counted(float* rows, const int* targets, int N, int D, int most) {
    int n = 0;
    for (int i = 0; i < N && n < most; i++) {
        if (targets[i] >= 0) { memmove(rows + (size_t)n++ * D, rows + (size_t)i * D, sizeof(float) * (size_t)D); }
    }
    return n;
}

// of the same batch: scores that need the cosines to all prototypes, some positions at a time
static void batch_scores(void* run, const int* targets, int B, int T, double* scores) {
    Run* r = (Run*)run;
    const Config* c = &r->model.config;
    const int N = B * T, rows = logit_rows(c, &r->acts.room);
    float* z_unit = layer_activations(&r->acts, 0).z_unit;
    for (int first = 0; first < N && head_reads_out(c->head); first += rows) {
        const int n = N - first < rows ? N - first : rows;
        mamba_logits(&r->model, &r->acts, first, n, &r->dev);
        add_scores(r, targets, first, n, r->batch_scores);
    }
    if (config_has_prototypes(c)) {
        const int n = gather_counted(z_unit, targets, N, c->Dp, PAIRS_SAMPLE);
        r->batch_scores[SCORE_PAIRS] = mean_pairwise_cosine(z_unit, n, c->Dp);
    }
    r->batch_scores[SCORE_BATCHES] = 1.0;
    memcpy(scores, r->batch_scores, sizeof r->batch_scores);
}

enum { EMBEDDINGS_MOST = 1 << 16 };  // positions: enough for a picture

// unit vectors, labels and prototypes of the validation rows, as dev/tools/plot_embeddings.py draws them
static void write_embeddings(Run* r) {
    const Config* c = &r->model.config;
    const DataLoader* rows = &r->data.val_rows;
    const int T = r->T, has_prototypes = config_has_prototypes(c);
    Parameters p = layer_parameters(&r->model, r->model.params, 0);
    ActivationTensors a = layer_activations(&r->acts, 0);
    Embeddings e;
    embeddings_init(&e, EMBEDDINGS_MOST, has_prototypes ? c->Dp : c->M);
    carry_nothing(&r->acts);
    for (int64_t first = 0; first < rows->n_rows && e.n < e.room; first += r->o.batch_size) {
        const int B = rows->n_rows - first < r->o.batch_size ? (int)(rows->n_rows - first) : r->o.batch_size;
        dataloader_batch(rows, first, B, r->inputs, r->targets);
        mamba_forward(&r->model, &r->acts, r->inputs, B, T, &r->dev);
        if (!has_prototypes) { unit_forward(a.normf, a.losses, a.normf, B * T, c->M, &r->dev); }
        embeddings_add(&e, has_prototypes ? a.z_unit : a.normf, r->targets, B * T);
    }
    float* prototypes = (float*)malloc_check(sizeof(float) * (size_t)c->classes * ((size_t)e.D + 1), "prototypes");
    const float* of_classes = has_prototypes ? p.prototypes : c->tied ? p.embedding : p.lm_head;
    unit_forward(prototypes, prototypes + (size_t)c->classes * e.D, of_classes, c->classes, e.D, &r->dev);
    embeddings_write(r->m.embeddings_out, &e, prototypes, c->classes);
    printf("embeddings of %d positions written to %s\n", e.n, r->m.embeddings_out);
    free(prototypes);
    embeddings_free(&e);
}

// loss on the validation data; while training, is it the best so far?
static void evaluate(Run* r, int training) {
    double bits_per_byte, scores[N_SCORES];
    const Tokenizer* tokenizer = has_text(r) ? &r->tokenizer : NULL;
    const Evaluator e = {&r->o, r->comm, tokenizer, r->T, r->inputs, r->targets, batch_losses, r, batch_scores, N_SCORES, scores};
    const int step = r->state.step;
    if (!has_data(&r->data.val)) { return; }
    carry_nothing(&r->acts);
    float loss = evaluate_loss(&e, &r->data.val_rows, &bits_per_byte);
    const HeadKind head = r->model.config.head;
    const Quality quality = quality_of(head, loss, scores);
    if (head_reads_out(head)) { bits_per_byte = -1.0; }
    log_extra(&r->log, quality_keys(head, loss, quality));
    tensorboard_validation(&r->board, step, loss, bits_per_byte);
    log_validation(&r->log, step, loss, bits_per_byte, training && run_state_validated(&r->state, &r->o, loss));
    if (r->m.human_log) { quality_print(head, step, quality); }
}

// The model behind llmc/run/generate.h. States of the first n_cached tokens are in cache, or everything is computed anew
static const float* next_logits(void* run, const int* tokens, int n_cached, int n) {
    Run* r = (Run*)run;
    const Config* c = &r->model.config;
    const int room = r->cache.room.T;
    Carried* carried = &r->cache.carried;
    if (n_cached != r->n_generated) { r->n_generated = 0; }
    if (r->n_generated == 0) { carried_clear(carried, c, 0, 1, 1); }
    int last = 0;
    for (int n_new; r->n_generated < n; r->n_generated += n_new) {
        n_new = n - r->n_generated < room ? n - r->n_generated : room;
        mamba_forward(&r->model, &r->cache, tokens + r->n_generated, 1, n_new, &r->dev);
        carried_swap(carried);
        last = n_new - 1;
    }
    float* logits = mamba_logits(&r->model, &r->cache, last, 1, &r->dev);
    if (head_reads_out(c->head)) { hpn_readout(logits, logits, 1, c->classes, &r->dev); }
    return logits;
}

enum { PROMPT_PIECE = 128 };  // positions of a prompt that are computed at once

// a text may be as long as it likes: the state has always the same size; a prompt is read in pieces
static void open_generator(Run* r, int n_prompt) {
    const Config* c = &r->model.config;
    const Room room = room_of(r, 1, PROMPT_PIECE, TO_GENERATE);
    activations_init(&r->cache, c, &room);
    r->cache.document_start = data_separator(&r->data, &r->o, end_of_text(r));
    r->generated_state = (float*)arena_alloc(sizeof(float) * 2 * carried_floats(c, 1), "states");
    carried_point(&r->cache.carried, c, 1, r->generated_state, r->generated_state + carried_floats(c, 1));
    const int longest = generator_room(&r->o, n_prompt, 1 << 24);
    generator_init(&r->generator, &r->o, has_text(r) ? &r->tokenizer : NULL, c->V, longest, end_of_text(r), next_logits, r);
}

static void generate_text(Run* r) {
    if (!has_text(r)) {
        options_fail("generate", "the model has %d tokens, --tokenizer %s has %d: give the model's tokenizer",
                     r->model.config.V, r->o.tokenizer, r->tokenizer.n_tokens);
    }
    Prompt prompt = prompt_read(&r->o, &r->tokenizer);
    open_generator(r, prompt.n);
    generate_texts(&r->generator, &r->state.sampler, &prompt);
    prompt_free(&prompt);
}

// one batch, everything visible: logits, loss and the gradient of every tensor, under its name and shape on disk
static void probe(Run* r) {
    const Config* c = &r->model.config;
    const ProbeBatch x = r->probe;
    const int N = x.B * x.T;
    const Room room = room_of(r, x.B, x.T, TO_TRAIN);
    activations_init(&r->acts, c, &room);
    free(r->model.frozen);
    r->model.frozen = NULL;
    mamba_init_training(&r->model, NULL, 1, 0, 0);
    mamba_forward(&r->model, &r->acts, x.inputs, x.B, x.T, &r->dev);

    SafeWriter out;
    const int rows = logit_rows(c, &room);
    probe_open(&out, r->o.probe_out, &x, c->classes, r->model.table, r->model.n_table);
    for (int first = 0; first < N; first += rows) {
        const int n = N - first < rows ? N - first : rows;
        safewriter_put(&out, mamba_logits(&r->model, &r->acts, first, n, &r->dev), sizeof(float) * (size_t)n * c->classes);
    }
    *dp_loss(&r->model.dp) = mamba_loss(&r->model, &r->acts, x.targets, N, &r->dev);
    mamba_backward(&r->model, &r->acts, x.inputs, x.targets, 1.0f / (float)x.counted, x.B, x.T, &r->dev);
    float loss_sum, *grads = dp_reduce(&r->model.dp, &loss_sum, &r->dev), loss = loss_sum / (float)x.counted;
    safewriter_put(&out, &loss, sizeof loss);
    tensors_put(&out, r->model.table, r->model.n_table, grads);
    safewriter_close(&out);
    probe_print(&x, loss, r->o.probe_out);
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. Training.

// the first row of micro-batch number k of this rank, counted on from the start of this process
static int64_t batch_row(void* run, int64_t k) {
    const Run* r = (const Run*)run;
    const int own = dp_n_leaves(&r->model.dp);
    const int64_t update = r->o.overfit ? 0 : k / own;
    return r->first_row + (update * r->n_leaves + dp_leaf(&r->model.dp, (int)(k % own))) * r->o.batch_size;
}

// micro-batch k of the update that goes on: its tokens, and what the rows before left behind
static void open_leaf(Run* r, int k, const int** inputs, const int** targets) {
    const Config* c = &r->model.config;
    const int B = r->o.batch_size, own = dp_n_leaves(&r->model.dp);
    const int64_t number = (int64_t)(r->state.step - r->first_step) * own + k;
    double start = seconds_now(CLOCK_MONOTONIC);
    prefetch_batch(&r->prefetch, number, inputs, targets);
    r->seconds_waited += seconds_now(CLOCK_MONOTONIC) - start;
    if (!r->d.carry_state) { return; }
    const size_t n = carried_floats(c, B) * (size_t)k;
    carried_point(&r->acts.carried, c, B, r->carried.now + n, r->carried.next + n);
    for (int b = 0; b < B; b++) {
        if (dataloader_stream_begins(&r->data.train_rows, batch_row(r, number) + b)) { carried_clear(&r->acts.carried, c, b, b + 1, B); }
    }
}

// targets that count in the whole update, on all ranks; of sparse examples there may be none
static int64_t counted_targets(const Run* r) {
    const int64_t n_rows = (int64_t)r->n_leaves * r->o.batch_size;
    const int64_t n = dataloader_counted(&r->data.train_rows, run_first_row(&r->o, &r->state), n_rows);
    return n > 0 ? n : 1;
}

// Prototypes of hpn that learn must also keep apart, or all become one (doc/hpn.md): adds to their gradient, returns the loss
static float separate_prototypes(Run* r, float* grads) {
    Mamba* model = &r->model;
    const Config* c = &model->config;
    const size_t n = (size_t)c->classes * (size_t)c->Dp;
    const int row = (int)(PARAMETER(model->table, model->n_table, prototypes) - model->table);
    float* d = grads + dp_gradient_at(&model->dp, row, 0);
    memset(model->dunit_prototypes, 0, sizeof(float) * n);
    double loss = prototypes_separation(model->dunit_prototypes, model->unit_prototypes, r->m.proto_separation, c->classes, c->Dp, &r->dev);
    unit_backward(model->dunit_prototypes, model->dunit_prototypes, model->unit_prototypes, model->prototype_norms, c->classes, c->Dp,
                  &r->dev);
    residual_forward(d, d, model->dunit_prototypes, n, &r->dev);
    return (float)loss;
}

// the leaves of this rank forward and backward, and the sum of all ranks' gradients; with the mean loss and their norm
static float* step_gradients(Run* r, float* loss, float* norm) {
    DataParallel* s = &r->model.dp;
    const float counted = (float)counted_targets(r);
    const int *inputs, *targets;
    for (int k = 0; k < dp_n_leaves(s); k++) {
        open_leaf(r, k, &inputs, &targets);
        mamba_leaf(&r->model, &r->acts, inputs, targets, 1.0f / counted, r->o.batch_size, r->T, &r->dev);
        comm_watch(r->comm, HERE);
    }
    float loss_sum, *grads = dp_reduce(s, &loss_sum, &r->dev);
    *loss = loss_sum / counted;
    const Tensor* prototypes = PARAMETER(r->model.table, r->model.n_table, prototypes);
    const int learn = r->model.config.learns_prototypes && dp_stretch(s, (int)(prototypes - r->model.table), 0) >= 0;
    if (learn && r->model.config.head == HEAD_HPN) { *loss += separate_prototypes(r, grads); }
    *norm = dp_norm(s, grads, &r->dev);
    return grads;
}

// the same for Forward-Forward: each batch, then its corrupted twin
static float* step_ff_gradients(Run* r, float* loss, float* norm) {
    DataParallel* s = &r->model.ff_dp;
    const Config* c = &r->model.config;
    const int B = r->o.batch_size, T = r->T, is_rt = c->layer == RT;
    const double n_losses = (is_rt ? 1.0 : 2.0 * B * T) * r->n_leaves * c->L;
    const uint64_t key = splitmix64((uint64_t)r->o.seed, (uint64_t)r->state.step);
    for (int k = 0; k < dp_n_leaves(s); k++) {
        const int leaf = dp_leaf(s, k), is_real = leaf % 2 == 0;
        const int64_t row = run_first_row(&r->o, &r->state) + (int64_t)(leaf / 2) * B;
        dataloader_batch(&r->data.train_rows, row, B, r->inputs, r->targets);
        if (!is_real) { ff_corrupt(r->corrupted, r->inputs, B, T, r->m.ff_corrupt, c->V, splitmix64(key, (uint64_t)leaf)); }
        const int* inputs = is_real ? r->inputs : r->corrupted;
        if (is_rt) { rt_ff_leaf(&r->model, &r->acts, inputs, is_real, (float)(1.0 / n_losses), B, T, &r->dev); }
        else { ff_leaf(&r->model, &r->acts, inputs, r->m.ff_threshold, is_real, (float)(1.0 / n_losses), B, T, &r->dev); }
        comm_watch(r->comm, HERE);
    }
    float loss_sum, *grads = dp_reduce(s, &loss_sum, &r->dev);
    *loss = loss_sum / (float)n_losses;
    *norm = dp_norm(s, grads, &r->dev);
    return grads;
}

// the parameters that both losses share, layer by layer: all that learn there, or with the rt layer D alone. Returns their
// number; params: where each is among the parameters; ends (L): how many they are up to each layer
static int shared_ranges(const Mamba* model, SurgeryRange* ranges, size_t* params, int* ends) {
    int n = 0;
    for (int l = 0; l < model->config.L; l++) {
        for (int i = 0, first = 0; i < model->n_table; first += tensor_slices(&model->table[i++])) {
            const Tensor* t = &model->table[i];
            const int is_shared = t->layers > 0 && (model->config.layer == MAMBA1 || t->field == offsetof(Parameters, D));
            if (!is_shared || model->frozen[first + l]) { continue; }
            const SurgeryRange range = {dp_gradient_at(&model->dp, i, l), tensor_slice_elements(t)};
            params[n] = t->offset + (size_t)l * tensor_slice_elements(t);
            ranges[n++] = range;
        }
        ends[l] = n;
    }
    return n;
}

static void open_surgery(Run* r) {
    const MambaOptions* m = &r->m;
    const Mamba* model = &r->model;
    const Config* c = &model->config;
    const Tensor* out = PARAMETER(r->model.table, model->n_table, out_proj);
    const SurgeryMethod named = surgery_method(m->surgery);
    int last = c->L - 1;  // the last layer that learns: gradnorm compares its gradients
    while (last > 0 && layer_is_frozen(model, last)) { last--; }
    SurgeryRange* ranges = (SurgeryRange*)malloc_check(sizeof(SurgeryRange) * (size_t)model->n_slices, "ranges");
    r->surgeon_ends = (int*)malloc_check(sizeof(int) * (size_t)c->L, "ranges");
    const int row = (int)(out - model->table), learns = dp_stretch(&model->dp, row, last) >= 0;
    const size_t at = learns ? dp_gradient_at(&model->dp, row, last) : 0;
    const SurgeryRange compared = {at, learns ? tensor_slice_elements(out) : 0};
    r->surgeon_params = (size_t*)malloc_check(sizeof(size_t) * (size_t)model->n_slices, "ranges");
    const SurgeryConfig config = {c->layer == RT ? surgery_rt_method(named) : named, m->surgery_epsilon, m->cagrad_lambda, 0,
                                  m->gradnorm_alpha, compared,
                                  (uint64_t)r->o.seed};
    const int n_ranges = shared_ranges(model, ranges, r->surgeon_params, r->surgeon_ends);
    surgery_init(&r->surgeon, &config, ranges, n_ranges, has_ff(r) ? 2 : 1);
    free(ranges);
}

// Both gradients become one, in grads. ff_lr / lr is how much Forward-Forward's counts, since AdamW does not see the size of a
// sum; gradnorm finds that by itself
static void combine_gradients(Run* r, float* grads, float* ff_grads, float loss, float ff_loss, float lr, float* norm) {
    const float scale = lr > 1e-12f ? r->m.ff_lr / lr : 1.0f, losses[SURGERY_MAX_TASKS] = {loss, ff_loss};
    float* g[] = {grads, ff_grads};
    const Surgery* s = &r->surgeon;
    for (int i = 0; i < s->n_ranges && s->config.method < SURGERY_RT_NONE && s->config.method != SURGERY_GRADNORM; i++) {
        scale_array(ff_grads + s->ranges[i].first, scale, s->ranges[i].n, &r->dev);
    }
    SurgeryReport report;
    surgery_apply(&report, g, &r->surgeon, (uint64_t)r->state.step, scale, losses, &r->dev);
    *norm = dp_norm(&r->model.dp, grads, &r->dev);
}

// a step without back-propagation: plain descent on Forward-Forward's loss
static void ff_descend(Run* r, const float* ff_grads, float norm) {
    const float rate = r->m.ff_lr * (r->o.clip > 0.0f && norm > r->o.clip ? r->o.clip / norm : 1.0f);
    for (int k = 0; k < r->surgeon.n_ranges; k++) {
        const SurgeryRange range = r->surgeon.ranges[k];
        float* params = r->model.params + r->surgeon_params[k];
        #pragma omp parallel for simd
        for (size_t i = 0; i < range.n; i++) { params[i] -= rate * ff_grads[range.first + i]; }
    }
}

// AdamW on what is not frozen, each slice with a count of its own: a layer that joined later is at its beginning
static void update(Run* r, const float* grads, float norm, float lr, Verify* verify) {
    Mamba* model = &r->model;
    const RunOptions* o = &r->o;
    for (int i = 0; i < model->n_slices; i++) { model->updates[i] += !model->frozen[i]; }
    Optimizer optimizer = {lr, o->beta1, o->beta2, o->eps, o->weight_decay, o->clip, 0, verify, model->updates};
    const Weights w = mamba_weights(model);
    dp_update(&model->dp, &w, grads, norm, &optimizer, ++r->state.updates, &r->dev);
    if (model->config.learns_prototypes) { update_prototypes(model, &r->dev); }
}

__attribute__((noreturn))
static void fail_not_finite(Run* r, DataParallel* dp, const float* grads, float loss, float norm) {
    char name[NAME_BYTES];
    const char* bad = dp_first_bad(dp, name, sizeof name, grads, &r->dev);
    if (r->comm->rank > 0) { comm_barrier(r->comm, HERE); }  // rank 0 says it
    fail_run("step %d: %d updates in a row were not finite (loss %g, norm %g, first bad gradient: %s): try a smaller --lr or --clip",
             r->state.step, r->state.skips, (double)loss, (double)norm, bad);
}

// the states after an update whose loss is not finite would spoil all that follow: every stream begins anew
static void forget_states(Run* r) {
    const Config* c = &r->model.config;
    const int B = r->o.batch_size;
    for (int k = 0; k < r->n_leaves && r->d.carry_state; k++) {
        Carried s;
        carried_point(&s, c, B, r->carried.now + carried_floats(c, B) * (size_t)k, NULL);
        carried_clear(&s, c, 0, B, B);
    }
}

// layers in which both losses pull apart
static int conflict_layers(const Run* r) {
    const Mamba* model = &r->model;
    int n = 0, k = 0;
    for (int l = 0; l < model->config.L && r->surgeon.n_tasks == 2; l++) {
        double dot = 0.0;
        for (; k < r->surgeon_ends[l]; k++) { dot += r->surgeon.range_dots[4 * k + 1]; }  // (2, 2) of each range: f.b
        n += dot < 0.0;
    }
    return n;
}

static StepNotes step_notes(const Run* r, float loss, float norm, float ff_loss, int bp, int skipped) {
    int learning = 0, layers = 0;
    for (int i = 0; i < r->model.n_slices; i++) { learning += !r->model.frozen[i]; }
    for (int l = 0; l < r->model.config.L; l++) { layers += !layer_is_frozen(&r->model, l); }
    const StepNotes notes = {loss, ff_loss, bp && !skipped, r->o.clip > 0.0f && norm > r->o.clip, has_ff(r) && !skipped ? layers : 0,
                             bp && !skipped ? learning : 0, bp ? conflict_layers(r) : 0, surgery_name(r->surgeon.config.method),
                             1000.0 * r->seconds_waited, (double)r->state.rows / (double)r->data.train_rows.n_rows};
    return notes;
}

// one step: gradients of one loss or both, clip, AdamW or plain descent
static void train_step(Run* r) {
    const RunOptions* o = &r->o;
    RunState* s = &r->state;
    const int bp = (s->step + 1) % r->m.bp_cadence == 0, verifying = o->verify_every > 0 && (s->step + 1) % o->verify_every == 0 && bp;
    const float lr = run_lr(o, s->step);
    const int64_t n_tokens = (int64_t)r->n_leaves * o->batch_size * r->T;
    float loss = NAN, norm = 0.0f, ff_loss = NAN, ff_norm = 0.0f, *grads = NULL, *ff_grads = NULL;
    double start = seconds_now(CLOCK_MONOTONIC);
    r->seconds_waited = 0.0;
    if (has_ff(r)) { ff_grads = step_ff_gradients(r, &ff_loss, &ff_norm); }
    if (bp) { grads = step_gradients(r, &loss, &norm); }
    if (verifying) {
        verify_first(&r->verify, s->step + 1, loss, norm, grads, r->model.dp.reduced, &r->dev);
        grads = step_gradients(r, &loss, &norm);
        verify_second(&r->verify, loss, norm, grads, r->model.dp.reduced, &r->dev);
    }
    if (bp && ff_grads) { combine_gradients(r, grads, ff_grads, loss, ff_loss, lr, &norm); }
    const int ff_fails = has_ff(r) && !(isfinite(ff_loss) && isfinite(ff_norm));
    const int skipped = bp ? run_state_skips(s, o, loss, norm) : ff_fails;
    if (!bp) { s->skips = ff_fails ? s->skips + 1 : 0; }
    if (!skipped && bp) { update(r, grads, norm, lr, verifying ? &r->verify : NULL); }
    if (!skipped && !bp) { ff_descend(r, ff_grads, ff_norm); }
    carried_swap(&r->carried);
    if (bp && !isfinite(loss)) { forget_states(r); }
    s->step++;
    s->rows += (int64_t)r->n_leaves * o->batch_size;
    s->tokens += n_tokens;
    double seconds = seconds_now(CLOCK_MONOTONIC) - start, rate = (double)n_tokens / seconds;
    StepRecord record = {s->step, o->steps, loss, bp ? norm : ff_norm, lr, 1000.0 * seconds, s->tokens, rate,
                         rate * flops_per_token(r) / r->peak, skipped};
    tensorboard_step(&r->board, &record);
    const StepNotes notes = step_notes(r, loss, record.norm, ff_loss, bp, skipped);
    log_extra(&r->log, step_keys(r->model.config.head, &notes));
    log_step(&r->log, &record, s->step % o->log_every == 0 || s->step == o->steps || skipped);
    if (s->skips > o->max_skips) {
        fail_not_finite(r, bp ? &r->model.dp : &r->model.ff_dp, bp ? grads : ff_grads, bp ? loss : ff_loss, record.norm);
    }
}

// what summary.json says of this trainer's part
static json_t* summary_keys(const Run* r) {
    int frozen = 0;
    for (int l = 0; l < r->model.config.L; l++) { frozen += layer_is_frozen(&r->model, l); }
    return json_pack("{s:i, s:i, s:s, s:f, s:i, s:s}", "layers", r->model.config.L, "frozen", frozen, "head",
                     head_names()[r->model.config.head], "ff_lr", (double)r->m.ff_lr, "bp_cadence_steps", r->m.bp_cadence,
                     "gradient_surgery_method", surgery_name(r->surgeon.config.method));
}

static void train(Run* r) {
    const RunOptions* o = &r->o;
    RunState* s = &r->state;
    const int saved = o->resume ? s->step : -1, first = s->step;
    int stop;
    ranks_print_cost(r->comm, 0);
    stop_on_signals();
    for (;;) {
        stop = ranks_stop(r->comm, o, s->step, snapshot_newest(&r->snapshot, saved));
        int last = stop || s->step >= o->steps, unsaved = s->step > saved || s->interrupted, due = !stop && unsaved;
        if (due && o->eval_every > 0 && (s->step % o->eval_every == 0 || last)) { evaluate(r, 1); }
        if (o->early_stop > 0 && s->evals_since_best >= o->early_stop) { last = 1; }
        int samples = due && o->sample_every > 0 && s->step > 0 && (s->step % o->sample_every == 0 || last);
        if (samples && r->comm->rank == 0) { generate_sample(&r->generator, s); }
        s->interrupted = stop;
        int save = last || (o->save_every > 0 && s->step > 0 && s->step % o->save_every == 0);
        if (unsaved && save) { save_checkpoint(r, last); }
        if (last) { break; }
        train_step(r);
    }
    ranks_print_cost(r->comm, s->step - first);
    snapshot_print(&r->snapshot, run_checkpoint_bytes(r->model.table, r->model.n_table));
    const char* outcome = s->step >= o->steps ? "done" : stop ? "stopped" : "stopped early";
    if (*r->m.embeddings_out && r->comm->rank == 0) { write_embeddings(r); }
    if (r->comm->rank == 0) { run_summary(o, s, strcmp(outcome, "stopped early") == 0, summary_keys(r)); }
    printf("%s after step %d, checkpoint in %s/step_%06d\n", outcome, s->step, o->run, s->step);
}

// ---------------------------------------------------------------------------------------------------------------------
// 7. Setting up, and main.

// options that exclude each other; they end here, before anything is computed
static void check_conflicts(const Run* r) {
    const MambaOptions* m = &r->m;
    const Config* c = &r->model.config;
    if (m->bp_cadence > 1 && !has_ff(r)) {
        options_fail("bp-cadence-steps", "the steps without back-propagation need --ff-lr above 0, or they do nothing");
    }
    if (has_ff(r) && (r->o.zero > 0 || r->d.carry_state)) {
        options_fail("ff-lr", "Forward-Forward goes with neither --zero nor --carry-state");
    }
    if (r->d.carry_state && r->comm->size > 1) { options_fail("carry-state", "is for one rank: states are not sent around"); }
    if (c->learns_prototypes && c->head == HEAD_HPN && (m->proto_separation == 0.0f || r->o.zero > 0)) {
        options_fail("proto", m->proto_separation == 0.0f ? "learnt prototypes of hpn all become one without --proto-separation"
                     : "learnt prototypes of hpn need --zero 0");
    }
    if (is_classifier(r) != (data_examples_T(&r->data) > 0) && (has_data(&r->data.train) || has_data(&r->data.val))) {
        options_fail("task", is_classifier(r) ? "cls needs examples (a safetensors file with inputs and targets), found tokens"
                     : "found examples with targets of their own: --task cls");
    }
    if (is_typed(r, "placement") && m->target_layers == 0) { options_fail("placement", "says where new layers stand: --target-layers says how many"); }
    if (m->grad_accum > 0 && r->o.batch_tokens > 0) { options_fail("grad-accum", "says the same as --batch-tokens: give one of them"); }
    const int has_classes = is_classifier(r) || c->is_classifier;
    if (has_classes && (is_generating(r) || r->o.sample_every > 0)) {
        options_fail(is_generating(r) ? "generate" : "sample-every", "a classifier has no text to go on with");
    }
    if (has_classes && !is_classifier(r) && (has_data(&r->data.train) || has_data(&r->data.val))) {
        options_fail("task", "the model chooses from %d classes, not from its %d tokens: --task cls", c->classes, c->V);
    }
    if (has_ff(r) && c->V < 2) { options_fail("ff-lr", "Forward-Forward needs two tokens, so that one can replace the other"); }
    if (*m->embeddings_out && !has_data(&r->data.val)) { options_fail("embeddings-out", "needs --val or --val-fraction"); }
    if (r->o.hellaswag[0]) { options_fail("hellaswag", "this trainer answers no examples"); }
}

// sizes that follow from the model and the data
static void plan(Run* r) {
    RunOptions* o = &r->o;
    const Config* c = &r->model.config;
    check_conflicts(r);
    r->T = data_seq_len(&r->data, o, r->table, r->n_options, 256);
    const int n_leaves = run_leaves(o, r->T);
    r->n_leaves = r->m.grad_accum > 0 ? r->m.grad_accum : n_leaves;
    if (r->n_leaves > INT_MAX / o->batch_size) {
        options_fail("grad-accum", "%d micro-batches of %d rows are more than %d rows", r->n_leaves, o->batch_size, INT_MAX);
    }
    if (!options_given(r->table, r->n_options, "tokenizer")) { data_check_tokenizer(&r->data, o, c->V, has_text(r)); }
    if (!is_training(r) && !o->eval_only && !is_generating(r) && !*o->probe && !*o->export_hf) {
        fail_input("nothing to do: expected --train, --token-file, --token-dir, --eval-only, --generate, --probe, --export-hf or "
                   "--dry-run");
    }
    if (is_training(r) || *o->export_hf || o->doc_reset) { data_check_documents(&r->data, o, end_of_text(r)); }
    if (r->comm->size > 1 && !is_training(r) && !o->eval_only) {
        ranks_fail_input(r->comm, "%d ranks are for training and --eval-only: start one", r->comm->size);
    }
    if (*o->probe) {  // it brings its own sizes
        probe_read(&r->probe, o->probe, c->V, c->classes, INT_MAX);
        o->batch_size = r->probe.B;
        r->T = r->probe.T;
        r->n_leaves = 1;
    }
    if (*o->export_hf) { hf_export_check(o->export_hf); }
    if (*r->m.embeddings_out) { outfile_check("embeddings-out", r->m.embeddings_out); }
    data_plan(&r->data, o, r->T, c->V, c->classes, r->n_leaves);
}

// the largest scratch that an op asks for: the head's gradients, a layer's, or the scan
static double workspace_bytes(const Run* r) {
    const Config* c = &r->model.config;
    const int N = r->o.batch_size * r->T, n = r->dev.n_threads, train = is_training(r) || *r->o.probe;
    const Room room = room_of(r, r->o.batch_size, r->T, TO_TRAIN);
    const int rows = train ? c->classes : N;
    double head = fmax((double)gemm_workspace_bytes(N, c->classes, n), (double)gemm_workspace_bytes(rows, train ? N : c->M, n));
    double layer = fmax((double)gemm_workspace_bytes(N, 2 * c->E, n), (double)gemm_workspace_bytes(2 * c->E, train ? N : c->M, n));
    double scan = (double)scan_workspace_bytes(r->o.batch_size, r->T, c->E, c->NS, room.chunk, n);
    return fmax(scan, fmax(head, layer));
}

static double activation_bytes(const Run* r, Purpose purpose) {
    Activations acts;
    const Config* c = &r->model.config;
    const Room batch = room_of(r, r->o.batch_size, r->T, purpose), piece = room_of(r, 1, PROMPT_PIECE, TO_GENERATE);
    const double states = purpose == TO_GENERATE ? 2.0 * (double)carried_floats(c, 1) : 0.0;
    return 4.0 * (states + (double)activations_layout(&acts, c, purpose == TO_GENERATE ? &piece : &batch));
}

// memory by class, in the order of allocation; returns the bytes that the ranks of this machine have still to take
static double print_memory(const Run* r) {
    const Config* c = &r->model.config;
    const double prototypes = config_has_prototypes(c) ? 4.0 * c->classes * (c->Dp + 1.0) : 0.0;
    double arena = 4.0 * (double)r->model.n, workspace = workspace_bytes(r), moment = 0.0, ff_moment, gradients = 0.0;
    const int train = is_training(r), backward = train || *r->o.probe;
    double text = data_memory(&r->data), rest = text + 8e6 + (backward && c->learns_prototypes ? 2.0 : 1.0) * prototypes, copy = 0.0;
    double activations = backward || r->o.eval_only ? activation_bytes(r, backward ? TO_TRAIN : TO_EVALUATE) : 0.0;
    const double sampling = is_generating(r) || (train && r->o.sample_every > 0) ? activation_bytes(r, TO_GENERATE) : 0.0;
    if (train && r->o.verify_every > 0) { rest += verify_bytes(r->model.n); }
    if (train && r->o.save_every > 0 && saves_beside(r)) { copy = SNAPSHOT_ARENAS * arena; }
    rest += 8.0 * (double)run_carried_floats(r);
    if (train) { rest += prefetch_bytes(r->d.prefetch_workers, r->d.prefetch_buffer, r->o.batch_size, r->T); }
    const Mamba* model = &r->model;
    const int n_table = model->n_table, n_leaves = r->n_leaves, zero = r->o.zero;
    if (backward) { gradients = ranks_box(r->comm, model->table, n_table, model->frozen, n_leaves, zero, &moment); }
    if (train && has_ff(r)) {
        gradients += ranks_box(r->comm, model->table, n_table, model->frozen, 2 * n_leaves, 0, &ff_moment);
    }
    double moments = train ? 2.0 * moment : 0.0;
    box_row("memory: parameters", "%s", format_bytes(arena).s);
    if (backward) { box_row("  gradients, moments", "%s, %s", format_bytes(gradients).s, format_bytes(moments).s); }
    box_row("  activations", "%s", format_bytes(activations + sampling).s);
    box_row("  workspace, rest", "%s, %s", format_bytes(workspace).s, format_bytes(rest + copy).s);
    double each = arena + gradients + moments + activations + workspace + rest, of_rank_0 = sampling + copy;
    box_row("memory", "%s of %s free", format_bytes(each + of_rank_0).s, format_bytes(memory_available()).s);
    return fmax(1.0, r->place.local_size) * (each - text) + of_rank_0;  // the text is in memory already
}

static double memory_to_generate(const Run* r) { return 4.0 * (double)r->model.n + activation_bytes(r, TO_GENERATE); }

static void print_model(const Run* r) {
    const Config* c = &r->model.config;
    box_row("model", "%d layer%s%s, width %d, %d channels", c->L, c->L > 1 ? "s" : "", c->layer == RT ? " (rt)" : "", c->M, c->E);
    box_row("  scan, convolution", "%d states a channel, dt rank %d, %d taps", c->NS, c->R, c->K);
    if (r->old_layers) { box_row("  new layers", "%d beside %d old ones", c->L - r->n_old_layers, r->n_old_layers); }
    const char *kind = c->is_classifier ? "classes" : "tokens", *age = *r->weights && !r->has_head ? ", new" : "";
    box_row("head", "%s, %d %s%s", head_names()[c->head], c->classes, kind, age);
    if (config_has_prototypes(c)) { box_row("  prototypes", "in %d dimensions, %s", c->Dp, c->learns_prototypes ? "learnt" : "fixed"); }
    size_t n_parameters = tensors_count(r->model.table, r->model.n_table);
    box_row("parameters", "%s = %zu", format_count((double)n_parameters).s, n_parameters);
}

// returns the bytes that are still to be taken
static double print_start(const Run* r) {
    printf("train_mamba_hpn: %s (%s, %d lanes, %d threads)\n", build_name(), __VERSION__, VLANES, r->dev.n_threads);
    options_print(r->table, r->n_options);
    box_line();
    print_model(r);
    data_box(&r->data);
    if (is_training(r)) {
        box_update(&r->o, r->n_leaves, r->T);
        box_checkpoints(&r->o, &r->state, run_checkpoint_bytes(r->model.table, r->model.n_table));
    }
    double n_bytes = print_memory(r), flops = flops_per_token(r);
    const int n_steps = r->o.steps - r->state.step;
    double seconds = flops * (double)n_steps * r->n_leaves * r->o.batch_size * r->T / r->peak;
    box_row("matmul rate", "%.1f GFLOP/s, %s FLOP per token", 1e-9 * r->peak, format_count(flops).s);
    if (is_training(r) && n_steps > 0) {
        box_row("time", "at least %s for %d step%s", format_duration(seconds).s, n_steps, n_steps > 1 ? "s" : "");
    }
    box_line();
    return n_bytes;
}

static void open_batch(Run* r, Purpose purpose) {
    const size_t n_bytes = sizeof(int) * (size_t)r->o.batch_size * (size_t)r->T;
    const Room room = room_of(r, r->o.batch_size, r->T, purpose);
    activations_init(&r->acts, &r->model.config, &room);
    r->acts.document_start = data_separator(&r->data, &r->o, r->o.doc_reset ? end_of_text(r) : -1);
    r->inputs = (int*)malloc_check(n_bytes, "inputs");
    r->targets = (int*)malloc_check(n_bytes, "targets");
    r->corrupted = (int*)malloc_check(n_bytes, "corrupted inputs");
    r->ranks = (int*)malloc_check(n_bytes, "ranks of targets");
    r->readout = (float*)malloc_check(n_bytes, "read-out");
}

static void evaluate_only(Run* r) {
    open_batch(r, TO_EVALUATE);
    evaluate(r, 0);
    if (*r->m.embeddings_out && r->comm->rank == 0) { write_embeddings(r); }
}

static void open_training(Run* r, int argc, char** argv) {
    Mamba* model = &r->model;
    const size_t carried = sizeof(float) * run_carried_floats(r);
    open_batch(r, TO_TRAIN);
    if (r->o.sample_every > 0 && r->comm->rank == 0) { open_generator(r, 1); }
    mamba_init_training(model, r->comm, r->n_leaves, r->o.zero, has_ff(r));
    open_surgery(r);
    r->carried.now = (float*)arena_alloc(carried, "carried states");
    r->carried.next = (float*)arena_alloc(carried, "carried states");
    const Weights w = mamba_weights(model);
    if (r->o.verify_every > 0) { dp_verify(&model->dp, &r->verify, &w); }
    if (r->o.resume) { load_training(r); }
    r->first_row = run_first_row(&r->o, &r->state);
    r->first_step = r->state.step;
    prefetch_start(&r->prefetch, &r->data.train_rows, r->o.batch_size, r->d.prefetch_workers, r->d.prefetch_buffer, batch_row, r);
    if (r->comm->rank == 0) {
        run_open(&r->log, r->table, r->n_options, &r->o, &r->state, &r->dev, r->comm->size, &r->data.train, &r->data.val, argc, argv);
    }
    ranks_run_name(r->comm, r->table, r->n_options, &r->o);
    tensorboard_open(&r->board, r->o.tensorboard && r->comm->rank == 0 ? r->o.run : NULL, r->o.resume ? r->state.step : -1);
}

static void close_all(Run* r) {
    log_close(&r->log);
    tensorboard_close(&r->board);
    prefetch_stop(&r->prefetch);
    data_close(&r->data);
    tokenizer_free(&r->tokenizer);
    probe_free(&r->probe);
    activations_free(&r->acts);
    activations_free(&r->cache);
    generator_free(&r->generator);
    surgery_free(&r->surgeon);
    snapshot_free(&r->snapshot);
    const size_t carried = sizeof(float) * run_carried_floats(r);
    arena_free(r->carried.now, carried);
    arena_free(r->carried.next, carried);
    arena_free(r->generated_state, sizeof(float) * 2 * carried_floats(&r->model.config, 1));
    mamba_free(&r->model);
    verify_free(&r->verify);
    device_free(&r->dev);
    comm_free(r->comm);
    free(r->inputs);
    free(r->targets);
    free(r->corrupted);
    free(r->ranks);
    free(r->readout);
    free(r->old_layers);
    free(r->surgeon_params);
    free(r->surgeon_ends);
    options_free(r->table, r->n_options);
}

// what the user asked for: nothing is computed or written yet
static void open_run(Run* r, int argc, char** argv) {
    parse_options(r, argc, argv);
    find_model(r);
    tokenizer_open(&r->tokenizer, r->o.tokenizer);
    data_open_more(&r->data, &r->o, &r->d, r->table, r->n_options, &r->tokenizer);
    choose_model(r);
    plan(r);
}

#ifdef TESTING
#define main trainer_main  // a test that includes this file has a main of its own
#endif
int main(int argc, char** argv) {
    static Run run;  // all zero
    Run* r = &run;
    open_run(r, argc, argv);
    ranks_compare(r->comm, r->table, r->n_options, &r->state, &r->data.train, &r->data.val);
    device_init(&r->dev, ranks_threads(&r->place, r->o.threads));
    if (!is_generating(r) || r->o.dry_run) {
        r->peak = matmul_peak(&r->dev);
        comm_all_reduce(r->comm, &r->peak, 1, DT_F64, OP_SUM, HERE);
        check_memory(print_start(r), "a smaller --batch-size, --seq-len or --model, or --recompute layer");
        if (r->o.dry_run) { return 0; }
    } else {
        check_memory(memory_to_generate(r), "a smaller model");
    }
    load_parameters(r);
    ranks_same_bytes(r->comm, "parameters", r->model.params, sizeof(float) * r->model.n);
    if (is_generating(r)) { generate_text(r); }
    else if (*r->o.probe) { probe(r); }
    else if (r->o.eval_only) { evaluate_only(r); }
    else if (has_data(&r->data.train)) { open_training(r, argc, argv); train(r); }
    if (*r->o.export_hf && r->comm->rank == 0) { export_folder(r, r->o.export_hf); }
    close_all(r);
    if (fflush(stdout) != 0 || ferror(stdout)) { fail_run("standard output: cannot be written: %s", strerror(errno)); }
    return 0;
}
