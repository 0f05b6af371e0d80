/*
A transformer whose MLPs are mixtures of experts, with one or a few heads for keys and values: Mixtral's architecture,
from sizes that learn on a laptop to 6.9 billion parameters of which a token uses 1.8. Read train_gpt2.c first: what a
run does beside the model is the same, and so are these chapters.

The model (spec: doc/moe.md): token embedding, L blocks of
    r = r + attention(rmsnorm(r))         queries and keys turned by RoPE; several query heads read one key/value head
    r = r + experts(rmsnorm(r))           of E experts, each an MLP of its own, a router chooses k for every token
a last RMSNorm, and the output matrix. No biases. Every token goes to all the experts it chose, however many others
chose them too: nothing is dropped, and no expert computes a row that is not there.
    router   p = softmax(m Wr^T); the k largest; their shares, which add up to 1, weigh what the experts say
    expert   (silu(m Wgate^T) o (m Wup^T)) Wdown^T

One file for both kinds of machine: a C compiler builds it for CPUs, exact; nvcc for GPUs.
    make run-moe                       trains a small one on this repository's own text
    make train_moe                     for what this machine has; CPU=1 and CUDA=1 say it
    ./train_moe --model small --train 'shards/train_*.bin' --steps 2000 --lr 1e-3
    ./train_moe --from mixtral/ --train book.txt
*/
#include "llmc/core/floatx.h"         // floatX: float or bf16; floatx_download
#include "llmc/core/graph.h"          // Graph, graph_begin, graph_end: a leaf as one launch (--graph)
#include "llmc/core/tensor_arena.h"   // TensorArena: activations, laid out by a table
#include "llmc/models/experts.h"      // experts_forward, experts_backward_input, experts_backward_weight
#include "llmc/models/linear.h"       // Linear, linear_forward, linear_backward_input, linear_rows
#include "llmc/models/moe.h"          // Config, Parameters, parameter_table
#include "llmc/ops/attention.h"       // grouped_attention_forward, grouped_attention_backward
#include "llmc/ops/cast.h"            // cast: floats to what is stored, and back
#include "llmc/ops/crossentropy.h"    // crossentropy_fused, crossentropy_losses_sum
#include "llmc/ops/documents.h"       // Segments, segments_find: where attention and positions start anew
#include "llmc/ops/embedding.h"       // token_embedding_backward
#include "llmc/ops/expert_rows.h"     // ExpertRows: which rows each expert computes; expert_rows_combine
#include "llmc/ops/matmul.h"          // matmul_backward_weight
#include "llmc/ops/residual.h"        // residual_forward
#include "llmc/ops/rmsnorm.h"         // rmsnorm_forward, rmsnorm_backward
#include "llmc/ops/rope.h"            // RopeTable, rope_forward, rope_backward
#include "llmc/ops/router.h"          // router_forward, router_statistics, router_backward
#include "llmc/ops/swiglu.h"          // swiglu_forward, swiglu_backward
#include "llmc/ranks/expert_parallel.h"  // ExpertParallel, ep_find, ep_send, ep_return: experts on other ranks
#include "llmc/ranks/model_gradients.h"  // Model: parameters, gradients, moments; model_point_gradients
#ifndef TESTING                       // a test includes this file for the model alone
#include "llmc/models/experts_run.h"  // experts_options, experts_share, experts_check: --ep
#include "llmc/run/graph_option.h"    // graph_option, graph_check
#include "llmc/run/main.h"            // run_main: options, data, steps, checkpoints, ranks (llmc/run/)
#endif

// ---------------------------------------------------------------------------------------------------------------------
// 1. Tensors. Sizes and parameters are in llmc/models/moe.h; here is one line for each activation. A token with
// one of its k experts is a *pair*; sorted by expert the R = N*k pairs are the rows of experts (expert_rows.h).

// weights as forward and backward read them; Parameters (llmc/models/moe.h) are floats: gradients
typedef struct {
    floatX *embedding, *norm1, *wq, *wk, *wv, *wo, *norm2, *router;
    float* bias;
    floatX *gate_up, *down, *norm, *head;
} StoredParameters;  // the fields of Parameters, in the same order: one table serves both

// what a pass leaves behind; from `dresidual` on the gradients on their way back, one buffer each for all layers
typedef struct {
    floatX *encoded, *norm1, *q, *k, *v, *attention, *residual2, *norm2, *received, *gate_up, *hidden, *computed,
        *expert_out, *residual3, *norm, *logits, *branch, *dresidual, *dbranch, *dq, *dk, *dv, *drows, *dreceived,
        *dhidden, *drouter;
} ActivationTensors;

// what must not lose digits, always float
typedef struct {
    float *norm1_rstd, *att_max, *att_inv, *norm2_rstd, *router_logits, *scores, *lse, *weights, *norm_rstd, *losses,
        *row_weights, *drow_weights, *received_weights, *dreceived_weights, *dweights, *drouter_logits;
} Statistics;

// what is chosen, and must not be chosen anew
typedef struct {
    int* experts;  // (L, N, k) ascending
} Choices;

typedef enum { KEEP_ALL, RECOMPUTE_NORMS, RECOMPUTE_EXPERTS, RECOMPUTE_BLOCKS } Recompute;  // includes those before

// time against memory; recompute never changes a bit
typedef struct {
    int recompute;  // Recompute
    int head_rows;  // positions whose logits exist at once
    ExpertsShared shared;  // by which ranks
} Tradeoffs;

// layers that keep a tensor of their own which --recompute `level` and above compute again; 0: one buffer serves all
static int layers_kept(Config c, Purpose purpose, const Tradeoffs* how, Recompute level) {
    return purpose == TO_TRAIN && how->recompute < (int)level ? c.L : 0;
}

// in generation all ranks have the same positions
static int rows_here(const Config* c, int N, Purpose purpose, const Tradeoffs* how) {
    return purpose == TO_GENERATE ? N * c->k : experts_rows_most(&how->shared, c->E, c->k, N);
}

// B rows of T positions; generation keeps logits of the last position only
static int activation_table(Tensor* table, Config c, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const int D = c.D, N = B * T, R = N * c.k, HQ = c.NH * c.HS, HK = c.NKV * c.HS;
    const int L_norms = layers_kept(c, purpose, how, RECOMPUTE_NORMS);
    const int L_experts = layers_kept(c, purpose, how, RECOMPUTE_EXPERTS);
    const int L_block = layers_kept(c, purpose, how, RECOMPUTE_BLOCKS), L_out = purpose == TO_TRAIN ? c.L : 0;
    const int L_cache = purpose == TO_GENERATE ? c.L : L_block;
    const int N_head = purpose == TO_GENERATE ? 1 : N < how->head_rows ? N : how->head_rows;
    const int N_train = purpose == TO_TRAIN ? N : 0, R_train = purpose == TO_TRAIN ? R : 0;
    const int R_here = rows_here(&c, N, purpose, how), R_here_train = purpose == TO_TRAIN ? R_here : 0;
    const int travels = how->shared.ep > 1, R_sent = purpose == TO_GENERATE ? 0 : R_here;  // rows do
    Tensor* t = table;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = activation(FIELD(encoded),    0, N, D);
    *t++ = activation(FIELD(norm1),      L_norms, N, D);
    *t++ = activation(FIELD(q),          L_block, N, HQ);      // turned by RoPE, as k
    *t++ = activation(FIELD(k),          L_cache, N, HK);      // in generation k and v are the cache
    *t++ = activation(FIELD(v),          L_cache, N, HK);
    *t++ = activation(FIELD(attention),  L_block, N, HQ);      // its output before the projection
    *t++ = activation(FIELD(residual2),  L_block, N, D);       // residual stream after attention
    *t++ = activation(FIELD(norm2),      L_norms, N, D);       // what router and experts read
    *t++ = activation(FIELD(received),   0, travels * R_sent, D);  // rows of it, for the experts of this rank
    *t++ = activation(FIELD(gate_up),    L_experts, R_here, 2 * c.F);  // then its gradient
    *t++ = activation(FIELD(hidden),     0, R_here, c.F);      // silu(gate) o up
    *t++ = activation(FIELD(computed),   0, travels * R_here, D);  // what goes back to other ranks
    *t++ = activation(FIELD(expert_out), 0, R, D);
    *t++ = activation(FIELD(residual3),  L_out, N, D);         // residual stream after the experts
    *t++ = activation(FIELD(norm),       0, N, D);             // the last one's output
    *t++ = activation(FIELD(logits),     0, N_head, c.Vp);     // then their gradient
    *t++ = activation(FIELD(branch),     0, N, D);             // a block's output before it joins the stream
    *t++ = activation(FIELD(dresidual),  0, N_train, D);
    *t++ = activation(FIELD(dbranch),    0, N_train, D > HQ ? D : HQ);  // gradient of a norm's or attention's output
    *t++ = activation(FIELD(dq),         0, N_train, HQ);
    *t++ = activation(FIELD(dk),         0, N_train, HK);
    *t++ = activation(FIELD(dv),         0, N_train, HK);
    *t++ = activation(FIELD(drows),      0, R_train, D);       // gradient of norm2's output, in rows of experts
    *t++ = activation(FIELD(dreceived),  0, travels * R_here_train, D);
    *t++ = activation(FIELD(dhidden),    0, R_here_train, c.F);  // its gradient where the weight is 1: t of swiglu.h
    *t++ = activation(FIELD(drouter),    0, N_train, c.E);     // gradient of the router's logits, as products read it
#undef FIELD
    return (int)(t - table);
}

static int statistic_table(Tensor* table, Config c, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const int N = B * T, R = N * c.k, L_block = layers_kept(c, purpose, how, RECOMPUTE_BLOCKS);
    const int N_train = purpose == TO_TRAIN ? N : 0, R_train = purpose == TO_TRAIN ? R : 0;
    const int R_received = purpose == TO_TRAIN && how->shared.ep > 1 ? rows_here(&c, N, purpose, how) : 0;
    Tensor* t = table;
#define FIELD(name) #name, offsetof(Statistics, name)
    *t++ = activation(FIELD(norm1_rstd),     L_block, N, 1);
    *t++ = activation(FIELD(att_max),        L_block, N, c.NH);  // (B, NH, T)
    *t++ = activation(FIELD(att_inv),        L_block, N, c.NH);  // (B, NH, T)
    *t++ = activation(FIELD(norm2_rstd),     L_block, N, 1);
    *t++ = activation(FIELD(router_logits),  0, N, c.E);
    *t++ = activation(FIELD(scores),         L_block, N, c.E);   // softmax of the router's logits
    *t++ = activation(FIELD(lse),            L_block, N, 1);     // log of the sum of their exponentials
    *t++ = activation(FIELD(weights),        L_block, N, c.k);   // of the chosen experts
    *t++ = activation(FIELD(norm_rstd),      0, N, 1);
    *t++ = activation(FIELD(losses),         0, N, 1);
    *t++ = activation(FIELD(row_weights),    0, R_train, 1);     // weights, of rows of experts
    *t++ = activation(FIELD(drow_weights),   0, R_train, 1);
    *t++ = activation(FIELD(received_weights),  0, R_received, 1);
    *t++ = activation(FIELD(dreceived_weights), 0, R_received, 1);
    *t++ = activation(FIELD(dweights),       0, N_train, c.k);
    *t++ = activation(FIELD(drouter_logits), 0, N_train, c.E);
#undef FIELD
    return (int)(t - table);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: forward, head, backward. AdamW is in llmc/run/train.h and needs no word about experts.

typedef struct {
    Model model;  // the first member: a run finds its tensors here
    Config config;
    char bias_stays[CONFIG_MAX_LAYERS];  // of each router: --freeze keeps it as it is
} Moe;

// sizes only: what a run will need is known before anything is allocated
static void moe_layout(Moe* moe, Config c) {
    assert(sizeof(StoredParameters) == sizeof(Parameters));  // one table fills both
    moe->config = c;
    model_layout(&moe->model, parameter_table(moe->model.table, &c));
    moe->model.n_numbers = c.L * (int)router_statistics_length(c.E);
}

typedef struct {
    int B, T;               // room
    Tradeoffs how;
    TensorArena tensors;    // floatX
    TensorArena statistics;
    TensorArena choices;
    ExpertRows rows;        // of the layer that is computed now
    ExpertParallel ep;      // those that the experts of this rank compute
    float* scratch;         // of experts_backward_weight
    size_t n_scratch;
    RopeTable rope;
    int *tokens, *targets;  // (B, T) on the device
    Segments segments;      // of the batch: what attention and positions see as one sequence (--doc-reset)
    float* numbers;         // (L, router_statistics_length) of routers in a leaf, on the device; NULL: nobody asks
    Graph graph;            // of leaves
} Activations;

static RouterShape router_shape(const Config* c) {
    const RouterShape s = {c->E, c->k, ROUTER_SOFTMAX, c->k > 1, 1.0f, 1, 1};  // one expert's share would always be 1
    return s;
}

// positions whose slots an int can count
static int most_positions(const Config* c) { return INT_MAX / c->k; }

// Sizes only; returns the bytes that activations_init will take on the device, infinite for more positions than can be
static double activations_layout(Activations* acts, Config c, int B, int T, Purpose purpose, Tradeoffs how) {
    memset(acts, 0, sizeof *acts);
    if ((double)B * T > most_positions(&c)) { return INFINITY; }
    acts->B = B;
    acts->T = T;
    acts->how = how;
    const int N = B * T, n_activations = activation_table(acts->tensors.table, c, B, T, purpose, &how);
    const int n_statistics = statistic_table(acts->statistics.table, c, B, T, purpose, &how);
    const size_t widest = 2 * (size_t)c.F * (size_t)c.D;
    acts->n_scratch = purpose == TO_TRAIN ? experts_scratch_floats(how.shared.ep, c.E, widest) : 0;
    acts->choices.table[0] = activation("experts", offsetof(Choices, experts), c.L, N, c.k);
    return tensor_arena_layout(&acts->tensors, n_activations, sizeof(floatX)) +
           tensor_arena_layout(&acts->statistics, n_statistics, sizeof(float)) +
           tensor_arena_layout(&acts->choices, 1, sizeof(int)) + (double)expert_rows_bytes(N, c.k, c.E) +
           (double)rope_table_bytes(T, c.HS) + sizeof(float) * (double)acts->n_scratch + 8.0 * N;
}

static void activations_open_rope(Activations* acts, const Config* c, int T, const Device* dev) {
    float* frequencies = (float*)malloc_check(sizeof(float) * (size_t)c->HS, "frequencies of RoPE");
    rope_frequencies(frequencies, config_rope_theta(c), c->HS);
    rope_table_init(&acts->rope, frequencies, T, c->HS, dev);
    free(frequencies);
}

// ranks: those that share the experts of this model
static void activations_init(Activations* acts, Config c, const ExpertRanks* ranks, int B, int T, Purpose purpose,
                             Tradeoffs how, const Device* dev) {
    const size_t n_bytes = sizeof(int) * (size_t)B * (size_t)T;
    activations_layout(acts, c, B, T, purpose, how);
    tensor_arena_open(&acts->tensors, "activations");
    tensor_arena_open(&acts->statistics, "statistics");
    tensor_arena_open(&acts->choices, "chosen experts");
    expert_rows_init(&acts->rows, B * T, c.k, c.E);
    ep_open(&acts->ep, ranks, c.E, rows_here(&c, B * T, purpose, &how), purpose == TO_GENERATE);
    if (acts->n_scratch > 0) {
        acts->scratch = (float*)device_alloc(sizeof(float) * acts->n_scratch, "gradients of experts");
    }
    activations_open_rope(acts, &c, T, dev);
    acts->tokens = (int*)device_alloc(n_bytes, "tokens");
    acts->targets = (int*)device_alloc(n_bytes, "targets");
    segments_init(&acts->segments, B, T);
}

static void activations_free(Activations* acts) {
    const size_t n_bytes = sizeof(int) * (size_t)acts->B * (size_t)acts->T;
    tensor_arena_close(&acts->tensors);
    tensor_arena_close(&acts->statistics);
    tensor_arena_close(&acts->choices);
    expert_rows_free(&acts->rows);
    if (acts->ep.ranks) { ep_close(&acts->ep); }
    device_release(acts->scratch, sizeof(float) * acts->n_scratch);
    rope_table_free(&acts->rope);
    device_release(acts->tokens, n_bytes);
    device_release(acts->targets, n_bytes);
    graph_free(&acts->graph);
    free(acts->segments.at);
}

static StoredParameters layer_weights(const Moe* moe, int l) {
    StoredParameters p;
    memset(&p, 0, sizeof p);  // what a model does not have
    model_point(&moe->model, &p, l);
    return p;
}

// a matrix of these
static Linear linear(const Moe* moe, const floatX* weight) { return linear_of(weight, moe->model.is_bf16); }

// where the gradients of the micro-batch that is computed now are to be written
static Parameters layer_gradients(Moe* moe, int l) {
    Parameters d;
    memset(&d, 0, sizeof d);
    model_point_gradients(&moe->model, &d, l);
    return d;
}

static ActivationTensors layer_activations(const Activations* acts, int l) {
    ActivationTensors a;
    tensor_arena_point(&acts->tensors, &a, l);
    return a;
}

static Statistics layer_statistics(const Activations* acts, int l) {
    Statistics s;
    tensor_arena_point(&acts->statistics, &s, l);
    return s;
}

static int* layer_experts(const Activations* acts, int l) {
    Choices choices;
    tensor_arena_point(&acts->choices, &choices, l);
    return choices.experts;
}

// what the router of layer l counts in this leaf
static float* layer_numbers(const Activations* acts, const Config* c, int l) {
    return acts->numbers ? acts->numbers + (size_t)l * router_statistics_length(c->E) : NULL;
}

// queries of positions t0..T-1 of a segment against its keys 0..T-1
static AttentionShape attention_shape(const Config* c, Segment x, int t0) {
    AttentionShape s;
    s.B = x.rows, s.T = x.T, s.t0 = t0;
    s.NH = c->NH, s.NKV = c->NKV, s.HS = c->HS;
    s.window = 0, s.scale = 1.0f / sqrtf((float)c->HS);
    s.q_row = s.out_row = (size_t)c->NH * c->HS, s.q_seq = s.out_seq = (x.T - t0) * s.q_row;
    s.kv_row = (size_t)c->NKV * c->HS, s.kv_seq = x.T * s.kv_row;
    return s;
}

// the first half of layer l: N positions from t0 on, whose stream comes in as `residual`
static void attention_block_forward(const Moe* moe, Activations* acts, int l, const floatX* residual, int N, int t0,
                                    const Device* dev) {
    const Config* c = &moe->config;
    const int D = c->D, HQ = c->NH * c->HS, HK = c->NKV * c->HS;
    ActivationTensors a = layer_activations(acts, l);
    Statistics s = layer_statistics(acts, l);
    StoredParameters p = layer_weights(moe, l);
    floatX *k = a.k + (size_t)t0 * HK, *v = a.v + (size_t)t0 * HK;
    rmsnorm_forward(a.norm1, s.norm1_rstd, residual, p.norm1, c->eps, N, D, dev);
    linear_forward(a.q, a.norm1, linear(moe, p.wq), NULL, N, D, HQ, dev);
    linear_forward(k, a.norm1, linear(moe, p.wk), NULL, N, D, HK, dev);
    linear_forward(v, a.norm1, linear(moe, p.wv), NULL, N, D, HK, dev);
    for (int i = 0; i < acts->segments.n; i++) {
        const Segment x = acts->segments.at[i];
        const RopeShape q_shape = rope_shape(x.rows, x.T, t0, c->NH, c->HS, ROPE_HALVES);
        const RopeShape k_shape = rope_shape(x.rows, x.T, t0, c->NKV, c->HS, ROPE_HALVES);
        const AttentionShape shape = attention_shape(c, x, t0);
        rope_forward(a.q + x.first * HQ, acts->rope.cosines, acts->rope.sines, &q_shape, dev);
        rope_forward(k + x.first * HK, acts->rope.cosines, acts->rope.sines, &k_shape, dev);
        grouped_attention_forward(a.attention + x.first * HQ, s.att_max + x.first * c->NH,
                                  s.att_inv + x.first * c->NH, a.q + x.first * HQ, a.k + x.first * HK,
                                  a.v + x.first * HK, &shape, dev);
    }
    linear_forward(a.branch, a.attention, linear(moe, p.wo), NULL, N, HQ, D, dev);
    residual_forward(a.residual2, residual, a.branch, (size_t)N * D, dev);
}

// Which rows the experts of this rank compute, and their inputs there, if they come from other ranks. norm2 is there
static void experts_gather(Activations* acts, const Config* c, int l, int N, const Device* dev) {
    ActivationTensors a = layer_activations(acts, l);
    expert_rows_find(&acts->rows, layer_experts(acts, l), N, dev);
    ep_find(&acts->ep, &acts->rows, dev);
    if (!ep_sends(&acts->ep)) { return; }
    expert_rows_copy(a.expert_out, a.norm2, &acts->rows, c->D, dev);
    ep_send(&acts->ep, a.received, a.expert_out, sizeof(floatX) * (size_t)c->D, dev);
}

// the experts' first product
static void experts_gate_up(const Moe* moe, Activations* acts, int l, const Device* dev) {
    ActivationTensors a = layer_activations(acts, l);
    const floatX* inp = ep_sends(&acts->ep) ? a.received : a.norm2;
    experts_forward(&acts->ep, a.gate_up, inp, BY_TOKEN, linear(moe, layer_weights(moe, l).gate_up), moe->config.D,
                    2 * moe->config.F, dev);
}

// the second half up to the products that are kept for backward. replay: these positions have chosen their experts
static void experts_up(const Moe* moe, Activations* acts, int l, int replay, int N, const Device* dev) {
    const Config* c = &moe->config;
    const int D = c->D, E = c->E;
    const RouterShape router = router_shape(c);
    ActivationTensors a = layer_activations(acts, l);
    Statistics s = layer_statistics(acts, l);
    StoredParameters p = layer_weights(moe, l);
    int* experts = layer_experts(acts, l);
    float* numbers = replay ? NULL : layer_numbers(acts, c, l);
    rmsnorm_forward(a.norm2, s.norm2_rstd, a.residual2, p.norm2, c->eps, N, D, dev);
    linear_forward(s.router_logits, a.norm2, linear(moe, p.router), NULL, N, D, E, dev);
    router_forward(experts, s.weights, s.scores, s.lse, s.router_logits, p.bias, replay ? experts : NULL, &router, N,
                   dev);
    if (numbers) { router_statistics(numbers, experts, s.weights, s.scores, s.lse, &router, N, dev); }
    experts_gather(acts, c, l, N, dev);
    experts_gate_up(moe, acts, l, dev);
}

// ... and from there on: what the experts of a token say, weighed and added to the stream
static void experts_down(const Moe* moe, Activations* acts, int l, int N, const Device* dev) {
    const Config* c = &moe->config;
    const ExpertParallel* ep = &acts->ep;
    const int D = c->D, is_alone = ep->ranks->size == 1;
    ActivationTensors a = layer_activations(acts, l);
    Statistics s = layer_statistics(acts, l);
    StoredParameters p = layer_weights(moe, l);
    swiglu_forward(a.hidden, a.gate_up, 0.0f, ep->n_rows, c->F, dev);
    experts_forward(ep, is_alone ? a.expert_out : a.computed, a.hidden, ROW_BY_ROW, linear(moe, p.down), c->F, D, dev);
    if (!is_alone) { ep_return(ep, a.expert_out, a.computed, sizeof(floatX) * (size_t)D, dev); }
    expert_rows_combine(a.branch, a.expert_out, s.weights, &acts->rows, D, dev);
    residual_forward(a.residual3, a.residual2, a.branch, (size_t)N * D, dev);
}

// tokens (B, T-t0), on the host, come to the device
static void upload_tokens(Activations* acts, const int* tokens, int B, int T, int t0, const Device* dev) {
    device_upload(acts->tokens, tokens, sizeof(int) * (size_t)(B * (T - t0)), dev);
    segments_find(&acts->segments, tokens, B, T);
}

// the targets of N positions likewise
static void upload_targets(Activations* acts, const int* targets, int N, const Device* dev) {
    device_upload(acts->targets, targets, sizeof(int) * (size_t)N, dev);
}

// tokens (B, T-t0), on the host or NULL: uploaded, at positions t0..T-1, up to the last norm. t0 > 0, with B = 1, goes
// on from an earlier call on the same activations: k and v still hold the positions before, and only the new ones are
// computed.
static void moe_forward(const Moe* moe, Activations* acts, const int* tokens, int B, int T, int t0, const Device* dev) {
    const int L = moe->config.L, D = moe->config.D, N = B * (T - t0);
    ActivationTensors a = layer_activations(acts, 0);
    StoredParameters p = layer_weights(moe, 0);
    if (tokens) { upload_tokens(acts, tokens, B, T, t0, dev); }
    linear_rows(a.encoded, acts->tokens, linear(moe, p.embedding), N, D, dev);
    const floatX* residual = a.encoded;
    for (int l = 0; l < L; l++) {
        attention_block_forward(moe, acts, l, residual, N, t0, dev);
        experts_up(moe, acts, l, 0, N, dev);
        experts_down(moe, acts, l, N, dev);
        residual = layer_activations(acts, l).residual3;
    }
    rmsnorm_forward(a.norm, layer_statistics(acts, 0).norm_rstd, residual, p.norm, moe->config.eps, N, D, dev);
}

// the output matrix: the embedding where it is tied
static Linear output_weight(const Moe* moe) {
    const StoredParameters p = layer_weights(moe, 0);
    return linear(moe, moe->config.tied ? p.embedding : p.head);
}

// Logits of N positions, head_rows at a time, and their losses. backward: also the gradients of the output matrix
// (dweight, written; NULL where it is frozen) and, in dbranch, of the last norm's output. targets are on the host,
// or NULL: uploaded; dloss = 1 / targets counted in the whole update
static void moe_head(const Moe* moe, Activations* acts, int backward, float* dweight, const int* targets, float dloss,
                     int N, const Device* dev) {
    const int D = moe->config.D, V = moe->config.V, Vp = moe->config.Vp;
    ActivationTensors a = layer_activations(acts, 0);
    Statistics s = layer_statistics(acts, 0);
    const Linear weight = output_weight(moe);
    if (targets) { upload_targets(acts, targets, N, dev); }
    for (int first = 0; first < N; first += acts->how.head_rows) {
        const int n = N - first < acts->how.head_rows ? N - first : acts->how.head_rows;
        const size_t at = (size_t)first * (size_t)D;
        linear_forward(a.logits, a.norm + at, weight, NULL, n, D, Vp, dev);
        crossentropy_fused(s.losses + first, a.logits, acts->targets + first, dloss, backward, n, V, Vp, dev);
        if (!backward) { continue; }
        linear_backward_input(a.dbranch + at, a.logits, weight, 0, n, D, Vp, dev);
        matmul_backward_weight(dweight, a.logits, a.norm + at, first > 0, n, D, Vp, dev);
    }
}

// what --recompute left out of layer l, and which rows its experts have; the last layer's is still there
static void recompute_block(const Moe* moe, Activations* acts, int l, const floatX* residual, int N,
                            const Device* dev) {
    const Config* c = &moe->config;
    const int level = acts->how.recompute;
    ActivationTensors a = layer_activations(acts, l);
    Statistics s = layer_statistics(acts, l);
    StoredParameters p = layer_weights(moe, l);
    if (l + 1 == c->L) { return; }
    if (level == RECOMPUTE_BLOCKS) {
        attention_block_forward(moe, acts, l, residual, N, 0, dev);
        experts_up(moe, acts, l, 1, N, dev);
        return;
    }
    if (level >= RECOMPUTE_NORMS) {
        rmsnorm_forward(a.norm1, s.norm1_rstd, residual, p.norm1, c->eps, N, c->D, dev);
        rmsnorm_forward(a.norm2, s.norm2_rstd, a.residual2, p.norm2, c->eps, N, c->D, dev);
    }
    experts_gather(acts, c, l, N, dev);
    if (level >= RECOMPUTE_EXPERTS) { experts_gate_up(moe, acts, l, dev); }
}

// The experts of this rank, for all rows that they compute: from dresidual to the gradients of their inputs, drows, and
// of the weight that each has in its token, drow_weights. The latter needs no output of the expert: it is
// (dout Wdown) . hidden (doc/moe.md).
static void experts_products_backward(Moe* moe, Activations* acts, int l, const Device* dev) {
    const Config* c = &moe->config;
    const ExpertParallel* ep = &acts->ep;
    const int D = c->D, F = c->F, sends = ep_sends(ep);
    const size_t width = sizeof(floatX) * (size_t)D;
    ActivationTensors a = layer_activations(acts, l);
    Statistics s = layer_statistics(acts, l);
    StoredParameters p = layer_weights(moe, l);
    Parameters d = layer_gradients(moe, l);
    const floatX *inp = sends ? a.received : a.norm2, *dout = sends ? a.dreceived : a.dresidual;
    float* dweights = sends ? s.dreceived_weights : s.drow_weights;
    floatX* drows = sends ? a.computed : a.drows;
    expert_rows_weights(s.row_weights, s.weights, &acts->rows, dev);
    if (sends) {
        expert_rows_copy(a.drows, a.dresidual, &acts->rows, D, dev);
        ep_send(ep, a.dreceived, a.drows, width, dev);
        ep_send(ep, s.received_weights, s.row_weights, sizeof(float), dev);
    }
    experts_backward_input(ep, a.dhidden, dout, BY_TOKEN, linear(moe, p.down), F, D, dev);
    swiglu_backward(a.gate_up, a.hidden, dweights, a.dhidden, a.gate_up, sends ? s.received_weights : s.row_weights,
                    0.0f, ep->n_rows, F, dev);
    experts_backward_weight(ep, d.down, dout, BY_TOKEN, a.hidden, ROW_BY_ROW, acts->scratch, F, D, dev);
    experts_backward_weight(ep, d.gate_up, a.gate_up, ROW_BY_ROW, inp, BY_TOKEN, acts->scratch, D, 2 * F, dev);
    experts_backward_input(ep, drows, a.gate_up, ROW_BY_ROW, linear(moe, p.gate_up), D, 2 * F, dev);
    if (sends) {
        ep_return(ep, a.drows, drows, width, dev);
        ep_return(ep, s.drow_weights, dweights, sizeof(float), dev);
    }
}

// dresidual is the gradient of the stream behind layer l, and becomes that behind its attention
static void experts_backward(Moe* moe, Activations* acts, int l, int N, const Device* dev) {
    const Config* c = &moe->config;
    const int D = c->D, E = c->E;
    const RouterShape router = router_shape(c);
    const float per_leaf = 1.0f / (float)moe->model.dp.n_leaves;  // the losses of routers are means over leaves
    const float balance = c->balance == BALANCE_LOSS ? c->aux_alpha * per_leaf : 0.0f, z = c->z_lambda * per_leaf;
    const ExpertRows* rows = &acts->rows;
    ActivationTensors a = layer_activations(acts, l);
    Statistics s = layer_statistics(acts, l);
    StoredParameters p = layer_weights(moe, l);
    Parameters d = layer_gradients(moe, l);
    experts_products_backward(moe, acts, l, dev);
    expert_rows_dweights(s.dweights, s.drow_weights, rows, dev);
    router_backward(s.drouter_logits, s.dweights, layer_experts(acts, l), s.weights, s.scores, s.lse, s.router_logits,
                    layer_numbers(acts, c, l), balance, z, &router, N, dev);
    cast(a.drouter, (const float*)s.drouter_logits, (size_t)N * E, dev);
    linear_backward_input(a.dbranch, a.drouter, linear(moe, p.router), 0, N, D, E, dev);
    matmul_backward_weight(d.router, a.drouter, a.norm2, 0, N, D, E, dev);
    if (d.bias) { device_zero(d.bias, sizeof(float) * (size_t)E, dev); }  // it learns otherwise: balance_biases
    expert_rows_add(a.dbranch, a.drows, rows, D, dev);
    rmsnorm_backward(a.dresidual, d.norm2, a.dbranch, a.residual2, p.norm2, s.norm2_rstd, N, D, dev);
}

// ... and then that before the layer, whose stream came in as `residual`
static void attention_block_backward(Moe* moe, Activations* acts, int l, const floatX* residual, int N,
                                     const Device* dev) {
    const Config* c = &moe->config;
    const int D = c->D, HQ = c->NH * c->HS, HK = c->NKV * c->HS;
    ActivationTensors a = layer_activations(acts, l);
    Statistics s = layer_statistics(acts, l);
    StoredParameters p = layer_weights(moe, l);
    Parameters d = layer_gradients(moe, l);
    linear_backward_input(a.dbranch, a.dresidual, linear(moe, p.wo), 0, N, HQ, D, dev);
    matmul_backward_weight(d.wo, a.dresidual, a.attention, 0, N, HQ, D, dev);
    for (int i = 0; i < acts->segments.n; i++) {
        const Segment x = acts->segments.at[i];
        const size_t q = x.first * HQ, k = x.first * HK;
        const RopeShape q_shape = rope_shape(x.rows, x.T, 0, c->NH, c->HS, ROPE_HALVES);
        const RopeShape k_shape = rope_shape(x.rows, x.T, 0, c->NKV, c->HS, ROPE_HALVES);
        const AttentionShape shape = attention_shape(c, x, 0);
        grouped_attention_backward(a.dq + q, a.dk + k, a.dv + k, a.dbranch + q, a.attention + q,
                                   s.att_max + x.first * c->NH, s.att_inv + x.first * c->NH, a.q + q, a.k + k, a.v + k,
                                   &shape, dev);
        rope_backward(a.dq + q, acts->rope.cosines, acts->rope.sines, &q_shape, dev);
        rope_backward(a.dk + k, acts->rope.cosines, acts->rope.sines, &k_shape, dev);
    }
    matmul_backward_weight(d.wq, a.dq, a.norm1, 0, N, D, HQ, dev);
    matmul_backward_weight(d.wk, a.dk, a.norm1, 0, N, D, HK, dev);
    matmul_backward_weight(d.wv, a.dv, a.norm1, 0, N, D, HK, dev);
    linear_backward_input(a.dbranch, a.dq, linear(moe, p.wq), 0, N, D, HQ, dev);  // one chain through all three
    linear_backward_input(a.dbranch, a.dk, linear(moe, p.wk), 1, N, D, HK, dev);
    linear_backward_input(a.dbranch, a.dv, linear(moe, p.wv), 1, N, D, HK, dev);
    rmsnorm_backward(a.dresidual, d.norm1, a.dbranch, residual, p.norm1, s.norm1_rstd, N, D, dev);
}

// Forward's calls upside down, after moe_head. Every parameter's gradient is written, but for what is frozen, whose
// pointer is NULL: one micro-batch is one leaf.
static void moe_backward(Moe* moe, Activations* acts, int B, int T, const Device* dev) {
    const int L = moe->config.L, D = moe->config.D, N = B * T;
    ActivationTensors a = layer_activations(acts, L - 1);
    StoredParameters p = layer_weights(moe, 0);
    Parameters d = layer_gradients(moe, 0);
    device_zero(a.dresidual, sizeof(floatX) * (size_t)N * D, dev);
    rmsnorm_backward(a.dresidual, d.norm, a.dbranch, a.residual3, p.norm, layer_statistics(acts, 0).norm_rstd, N, D,
                     dev);
    for (int l = L - 1; l >= moe->model.lowest; l--) {
        const floatX* residual = l > 0 ? layer_activations(acts, l - 1).residual3 : a.encoded;
        recompute_block(moe, acts, l, residual, N, dev);
        experts_backward(moe, acts, l, N, dev);
        attention_block_backward(moe, acts, l, residual, N, dev);
        model_layer_done(&moe->model, l, dev);
    }
    if (d.embedding && !moe->config.tied) {  // else moe_head has written it
        device_zero(d.embedding, sizeof(float) * (size_t)moe->config.Vp * D, dev);
    }
    token_embedding_backward(d.embedding, a.dresidual, acts->tokens, N, D, dev);
}

// One micro-batch, forward and backward; its losses, what its routers count and its gradient join the tree of
// llmc/ranks/data_parallel.h. What stands between graph_begin and graph_end may be one launch
static void moe_leaf(Moe* moe, Activations* acts, const int* tokens, const int* targets, float dloss, int B, int T,
                     const Device* dev) {
    DataParallel* dp = &moe->model.dp;
    const Parameters d = layer_gradients(moe, 0);
    acts->numbers = dp_numbers(dp);
    upload_tokens(acts, tokens, B, T, 0, dev);
    upload_targets(acts, targets, B * T, dev);
    if (graph_begin(&acts->graph, dp_leaf_arena(dp), dloss, B, T, dev)) {
        moe_forward(moe, acts, NULL, B, T, 0, dev);
        moe_head(moe, acts, 1, moe->config.tied ? d.embedding : d.head, NULL, dloss, B * T, dev);
        crossentropy_losses_sum(dp_loss(dp), layer_statistics(acts, 0).losses, B * T, dev);
        moe_backward(moe, acts, B, T, dev);
        graph_end(&acts->graph, dev);
    }
    acts->numbers = NULL;
    model_leaf_done(&moe->model, dev);
}

// ---- what routers have counted in an update, once dp_reduce is back ----

typedef struct {
    float balance, z;  // sums over layers of the means over leaves; balance is 1 a layer where experts are equally busy
    float load;        // of the busiest expert of all layers, as a multiple of its layer's mean
    int idle;          // experts of all layers that no token took
} Routing;

static Routing moe_routing(const Moe* moe) {
    const int E = moe->config.E;
    const float* numbers = dp_sums(&moe->model.dp);
    const float n_leaves = (float)moe->model.dp.n_leaves;
    Routing sum = {0.0f, 0.0f, 0.0f, 0};
    for (int l = 0; l < moe->config.L; l++, numbers += router_statistics_length(E)) {
        const RouterLoad load = router_load(numbers, E);
        sum.balance += numbers[2 * E + ROUTER_BALANCE] / n_leaves;
        sum.z += numbers[2 * E + ROUTER_Z] / n_leaves;
        sum.load = load.busiest > sum.load ? load.busiest : sum.load;
        sum.idle += load.dead;
    }
    return sum;
}

// What the routers add to the loss; the leaves have its gradients. A z-loss that is switched off may be infinite
static float routing_loss(const Config* c, const Routing* now) {
    const float balance = c->balance == BALANCE_LOSS ? c->aux_alpha * now->balance : 0.0f;
    return balance + (c->z_lambda > 0.0f ? c->z_lambda * now->z : 0.0f);
}

// after an update with balance "bias": an expert that has had more than its share becomes harder to choose
static void moe_balance_biases(Moe* moe, float rate, const Device* dev) {
    const Config* c = &moe->config;
    if (c->balance != BALANCE_BIAS) { return; }
    float* bias = (float*)malloc_check(sizeof(float) * (size_t)c->E, "biases of a router");
    for (int l = 0; l < c->L; l++) {
        float* stored = layer_weights(moe, l).bias;
        if (moe->bias_stays[l]) { continue; }
        device_download(bias, stored, sizeof(float) * (size_t)c->E, dev);
        router_bias_update(bias, dp_sums(&moe->model.dp) + (size_t)l * router_statistics_length(c->E), rate, c->E);
        for (int e = 0; e < c->E; e++) {  // neither the loss nor a gradient would show it
            if (!isfinite(bias[e])) { fail_run("layer %d: the bias of expert %d is %g", l, e, (double)bias[e]); }
        }
        device_upload(stored, bias, sizeof(float) * (size_t)c->E, dev);
    }
    free(bias);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. What a run asks of this model (llmc/run/trainer.h), and main.

#ifndef TESTING
typedef struct {
    Moe moe;                  // first
    Activations acts, cache;  // of a batch; of the text that is being generated
    Tradeoffs how;            // options
    ConfigFile file;          // of the model; all zero: there is none
    int balance, tied, weights, graph;
    float aux_alpha, z_lambda, bias_rate, rope_alpha;
    float* host;              // losses of a batch, logits of a position
} Workplace;

static Workplace* workplace(const Run* r) { return (Workplace*)r->model; }
static const Config* config_of(const Run* r) { return &workplace(r)->moe.config; }

// gives rows of run_options.h the meaning that they have here
static void moe_reword_options(Option* t, int n) {
    options_reword(t, n, "from", "parameters to start from: a run folder or checkpoint, a Hugging Face folder, or a "
                   ".safetensors file with config.json beside it");
    options_reword(t, n, "config", "random start from a config.json as Mixtral's, with sizes of your own: doc/moe.md "
                   "lists its keys, dev/hello_moe.json is one");
    options_reword(t, n, "freeze", "no updates of tensors with such names, of all layers, of one or of an expert: "
                   "'model.embed_tokens.*,*.layers.0.*,*.experts.3.*'; first:N: of the first N layers; indices:A,B,..: "
                   "of these layers, from 0");
}

static void moe_options(Run* r) {
    Workplace* w = workplace(r);
    const Option own[] = {
        {"experts", "balance", "", OPTION_CHOICE, &w->balance, "loss", 0, 0, BALANCE_NAMES,
         "how experts are kept equally busy: by a loss, or by a bias that only chooses and follows the counts. Where "
         "config.json says nothing of it, as Mixtral's, --config takes the default and --from none", 0},
        {"experts", "aux-alpha", "", OPTION_FLOAT, &w->aux_alpha, "0.01", 0, 1e3, "F",
         "weight of the balance loss of each layer, which is 1 where all experts are equally busy", 0},
        {"experts", "z-lambda", "", OPTION_FLOAT, &w->z_lambda, "0", 0, 1e3, "F",
         "weight of the z-loss, the mean square of the log of the sum of a router's exponentials", 0},
        {"experts", "bias-rate", "", OPTION_FLOAT, &w->bias_rate, "1e-3", 0, 1, "F",
         "with --balance bias: how far a bias moves in an update", 0},
        {"model", "rope-alpha", "", OPTION_FLOAT, &w->rope_alpha, "1", 1e-3, 1e6, "F",
         "NTK's factor: the slowest frequency of RoPE turns so many times slower, for texts so many times longer than "
         "were trained on. A trained model then has so many times the positions, and 1 takes them back", 0},
#ifndef __CUDACC__
        {"model", "weights", "", OPTION_CHOICE, &w->weights, "fp32", 0, 0, "fp32|bf16",
         "where nothing learns (--generate, --eval-only): bf16 keeps matrices in half the memory; files in bf16 lose "
         "nothing by it", 0},
#endif
        {"model", "tied", "", OPTION_SWITCH, &w->tied, "0", 0, 0, "0|1",
         "with --model: the embedding is the output matrix too; config.json says it as tie_word_embeddings", 0},
        {"machine", "recompute", "", OPTION_INT, &w->how.recompute, "1", 0, 3, "0|1|2|3",
         "compute again in backward instead of keeping: 1 norms, 2 the experts' first products too, 3 whole blocks. "
         "Saves memory, changes no bit", 0},
        {"machine", "head-rows", "", OPTION_INT, &w->how.head_rows, "8192", 1, INT_MAX, "N",
         "positions whose logits are in memory at once", 0},
        graph_option(&w->graph),
    };
    run_add_options(r, own, sizeof own);
    experts_options(r, &w->how.shared);
    moe_reword_options(r->table, r->n_options);
}

// What is typed goes before what config.json says, and the default is for new models that say nothing. What holds in
// the end is what settings.json has
static void moe_choose_balance(Run* r, Config* c) {
    const Workplace* w = workplace(r);
    const int is_open = !*r->weights && !w->file.says_balance;
    if (is_open || run_is_typed(r, "balance")) { c->balance = w->balance; }
    const int needs_alpha = c->balance == BALANCE_LOSS && c->aux_alpha == 0.0f &&
                            (is_open || run_is_typed(r, "balance"));
    if (needs_alpha || run_is_typed(r, "aux-alpha")) { c->aux_alpha = w->aux_alpha; }
    if (run_is_typed(r, "z-lambda")) { c->z_lambda = w->z_lambda; }
    const ShortText balance = choice_name(BALANCE_NAMES, c->balance);
    if (run_is_typed(r, "aux-alpha") && c->balance != BALANCE_LOSS) {
        options_fail("aux-alpha", "is for --balance loss, here it is %s", balance.s);
    }
    if (run_is_typed(r, "bias-rate") && c->balance != BALANCE_BIAS) {
        options_fail("bias-rate", "is for --balance bias, here it is %s", balance.s);
    }
    options_set(r->table, r->n_options, "balance", balance.s);
    options_set(r->table, r->n_options, "z-lambda", format_float(c->z_lambda).s);
    if (c->balance == BALANCE_LOSS) { options_set(r->table, r->n_options, "aux-alpha", format_float(c->aux_alpha).s); }
}

// A trained model gets more positions or loses those it got, which is said. Rows of a run that goes on stay as long as
// they were: an update stays as large
static void moe_choose_rope(Run* r, Config* c, double alpha) {
    const int was = c->max_T;
    ErrorText error;
    ShortText rows = {""};
    if (!*r->weights) { c->base_T = config_base_positions(c->max_T, alpha); }
    else if (alpha != c->rope_alpha) { c->max_T = config_positions(c->base_T, alpha); }
    c->rope_alpha = alpha;
    if (!config_check_rope(c, &error)) { options_fail("rope-alpha", "%s", error.text); }
    if (c->max_T == was) { return; }
    if (r->o.resume && run_will_train(r) && r->o.seq_len == 0 && was < c->max_T) {
        snprintf(rows.s, sizeof rows.s, "%d", was < r->trainer->usual_T ? was : r->trainer->usual_T);
        options_set(r->table, r->n_options, "seq-len", rows.s);
        snprintf(rows.s, sizeof rows.s, "; rows stay %d long, --seq-len chooses", r->o.seq_len);
    }
    if (r->comm->rank == 0) {
        warn_line("--rope-alpha %g: the model has %d positions now, not %d%s", alpha, c->max_T, was, rows.s);
    }
}

static void moe_choose(Run* r) {
    Workplace* w = workplace(r);
    Config* c = &w->moe.config;
    const int is_new = !*r->config;
    if (*r->weights && is_new) { fail_input("%s: expected a Mixtral model with its config.json", r->o.from); }
    *c = is_new ? config_preset(r->o.model, run_new_vocabulary(r)) : config_load(r->config, &w->file);
    if (is_new) { c->tied = w->tied; }
    options_refuse(!is_new && run_is_typed(r, "tied") && w->tied != c->tied, "tied",
                   "is for --model; config.json says it as tie_word_embeddings");
    moe_choose_balance(r, c);
    if (run_is_typed(r, "rope-alpha")) { moe_choose_rope(r, c, shortest_double(w->rope_alpha)); }
    options_set(r->table, r->n_options, "rope-alpha", format_float((float)c->rope_alpha).s);
    options_set(r->table, r->n_options, "tied", c->tied ? "1" : "0");
    moe_layout(&w->moe, *c);
    if (w->weights) { model_use_bf16(&w->moe.model); }
    r->V = r->classes = c->V;
    r->max_T = c->max_T;
    experts_share(r, &w->how.shared, c->E, c->F, c->D);
}

// the biases of routers learn by counting, not by gradients, and not at all where --freeze says so
static void moe_freeze(Run* r) {
    Moe* moe = &workplace(r)->moe;
    Model* m = r->model;
    for (int i = 0; i < m->n_table; i++) {
        if (m->table[i].field != offsetof(Parameters, bias)) { continue; }
        const int first = tensors_slices(m->table, i);
        for (int l = 0; l < moe->config.L; l++) { moe->bias_stays[l] = slice_is_frozen(m->frozen, first + l) != 0; }
        model_freeze(m, &m->table[i]);
    }
}

static void moe_check(Run* r) {
    const Config* c = config_of(r);
    r->has_masters = !FLOATX_IS_FLOAT;
    if ((double)r->o.batch_size * r->T > most_positions(c)) {
        options_fail("batch-size", "expected at most %d rows of %d positions, each with %d experts, found %d",
                     most_positions(c) / r->T, r->T, c->k, r->o.batch_size);
    }
    const int learns = run_is_training(r) || *r->o.probe;
    options_refuse(learns && r->model->is_bf16, "weights", "bf16 is for --generate, --eval-only and --export-hf");
    experts_check(r, &workplace(r)->how.shared);
    graph_check(r, &workplace(r)->graph, model_is_shared(r->model)
                    ? "is not for --ep: in every layer the host has to know how many rows other ranks send" : NULL);
    const int weighs_otherwise = c->k == 1 && c->E > 1;  // the share of the only expert is 1
    const char* lacking = c->balance == BALANCE_BIAS ? "biases of routers" : weighs_otherwise ? "single expert a token"
                        : NULL;
    if (r->comm->rank > 0) { return; }
    if (weighs_otherwise && *r->weights && !workplace(r)->file.is_ours) {
        warn_line("--from %s: one expert of %d a token: transformers weighs it by 1, here its score does, and the "
                  "model is another", r->o.from, c->E);
    }
    if (!lacking || !*r->o.export_hf) { return; }
    warn_line("--export-hf: Mixtral in transformers has no %s: from this folder it computes something else", lacking);
}

// the table says all, but for biases that a model from elsewhere does not have: they start at 0
static void moe_load(Run* r, const SliceSink* sink) {
    Model* m = r->model;
    SafeSet set;
    const char* embedding = NULL;
    if (!*r->weights) {
        tensors_init_into(sink, m->table, m->n_table, (uint32_t)r->o.seed);
        return;
    }
    safeset_open(&set, r->weights);
    for (int i = 0; i < m->n_table; i++) {
        Tensor* t = &m->table[i];
        const int is_bias = t->field == offsetof(Parameters, bias);
        if (t->field == offsetof(Parameters, embedding)) { embedding = t->name; }
        if (is_bias && !tensor_is_in(&set, t, "")) {
            tensors_init_into(sink, t, 1, 0);
        } else {
            tensors_load_into(sink, &set, t, 1, "", NULL);
        }
    }
    if (config_of(r)->tied && embedding) { tensors_check_tied(&set, "lm_head.weight", embedding); }
    safeset_report_unused(&set);
    safeset_close(&set);
}

// how experts are kept equally busy, and who says so
static void moe_box_balance(const Run* r) {
    const Config* c = config_of(r);
    const Workplace* w = workplace(r);
    const float numbers[] = {0.0f, c->aux_alpha, w->bias_rate};  // BALANCE_NONE has none
    const char* who = run_is_typed(r, "balance") ? "" : w->file.says_balance ? " (config.json)"
                    : *r->weights ? " (config.json says nothing)" : "";
    box_row("balance", "%s%s%s%s", choice_name(BALANCE_NAMES, c->balance).s, c->balance == BALANCE_NONE ? "" : " ",
            c->balance == BALANCE_NONE ? "" : format_float(numbers[c->balance]).s, who);
    if (c->z_lambda > 0.0f) { box_row("  z-loss", "%s", format_float(c->z_lambda).s); }
}

static void moe_box(const Run* r) {
    const Config* c = config_of(r);
    size_t active = 0;
    for (int i = 0; i < r->model->n_table; i++) {
        const Tensor* t = &r->model->table[i];
        const size_t n = tensors_disk_count(t, 1);
        active += t->experts > 0 ? n / (size_t)t->experts * (size_t)c->k : n;
    }
    box_row("model", "%d layer%s of %d channels, %d head%s of %d for %d of keys and values, %d positions", c->L,
            c->L > 1 ? "s" : "", c->D, c->NH, c->NH > 1 ? "s" : "", c->HS, c->NKV, c->max_T);
    const int ranks = r->model->ranks.size;
    box_row("experts", "%d in a layer, %d wide, a token takes %d", c->E, c->F, c->k);
    if (ranks > 1) {
        box_row("  of them", "%d on each of %d ranks", c->E / ranks, ranks);
        const double sent = run_is_training(r) ? experts_sent_bytes(r, c->L, c->D, c->k) : 0.0;
        if (sent > 0.0) { box_row("  rows sent", "%s per update by each", format_bytes(sent).s); }
    }
    if (run_is_training(r) || *r->o.probe) { moe_box_balance(r); }
    box_row("active", "%s = %zu parameters of a token", format_count((double)active).s, active);
    box_row("vocabulary", "%d, padded to %d", c->V, c->Vp);
}

// a token computes k of E experts, and looks up a row of the embedding where that is not the output matrix
static double moe_flops_per_token(const Run* r) {
    const Config* c = config_of(r);
    double n = 6.0 * c->L * c->NH * c->HS * (double)r->T;  // attention
    for (int i = 0; i < r->model->n_table; i++) {
        const Tensor* t = &r->model->table[i];
        const int looks_up = t->field == offsetof(Parameters, embedding) && !c->tied;
        if (t->rows > 1 && !looks_up) { n += model_flops(r->model, i) * (t->experts > 0 ? (double)c->k / c->E : 1.0); }
    }
    return n;
}

// Memory of a CPU is taken where it is written: rows that do not come cost nothing, and as many are expected as when
// all experts are equally busy
static Tradeoffs expected_tradeoffs(const Run* r) {
    Tradeoffs how = workplace(r)->how;
    if (DEVICE_IS_SHARED && how.shared.room == 0.0f) { how.shared.room = 1.0f; }
    return how;
}

static double activation_bytes(const Run* r, Purpose purpose, int B, int T) {
    Activations acts;
    return activations_layout(&acts, *config_of(r), B, T, purpose, expected_tradeoffs(r));
}

static double sparing_bytes(const Run* r, int B, int T) {
    Activations acts;
    Tradeoffs how = expected_tradeoffs(r);
    how.recompute = RECOMPUTE_BLOCKS;
    return activations_layout(&acts, *config_of(r), B, T, TO_TRAIN, how);
}

// the largest scratch that an op asks for: products of the head, of the experts, or attention
static double workspace_bytes(const Run* r, int B) {
    const Config* c = config_of(r);
    const int n = r->dev.n_threads, head_rows = workplace(r)->how.head_rows;
    if ((double)B * r->T > most_positions(c)) { return INFINITY; }
    const int N = B * r->T, R = N * c->k;
    const int n_head = N < head_rows ? N : head_rows, wide = c->D > c->NH * c->HS ? c->D : c->NH * c->HS;
    double most = fmax((double)gemm_workspace_bytes(n_head, c->Vp, n), (double)gemm_workspace_bytes(c->Vp, n_head, n));
    most = fmax(most, (double)gemm_workspace_bytes(N, wide, n));
    most = fmax(most, (double)gemm_workspace_bytes(wide, N, n));
    most = fmax(most, (double)grouped_matmul_workspace_bytes(c->E, R, c->D, 2 * c->F, n));
    return fmax(most, (double)attention_bytes(r->trainer->stored_bytes, B, r->T, c->NH * c->HS, c->NH, &r->dev));
}

static void open_activations(Run* r, Purpose purpose, int B, int T) {
    Workplace* w = workplace(r);
    Activations* acts = purpose == TO_GENERATE ? &w->cache : &w->acts;
    const size_t n_losses = (size_t)B * (size_t)T, n_logits = (size_t)w->moe.config.Vp;
    activations_init(acts, w->moe.config, &r->model->ranks, B, T, purpose, w->how, &r->dev);
    acts->graph.is_on = w->graph;
    if (r->o.doc_reset && purpose != TO_GENERATE && !*r->o.probe) {
        acts->segments.document_start = run_end_of_text(r);
    }
    if (!w->host) {
        w->host = (float*)malloc_check(sizeof(float) * (n_losses > n_logits ? n_losses : n_logits), "losses");
    }
}

static void train_leaf(Run* r, int k, const int* inputs, const int* targets, float dloss, int B, int T) {
    Workplace* w = workplace(r);
    (void)k;
    moe_leaf(&w->moe, &w->acts, inputs, targets, dloss, B, T, &r->dev);
}

static float routers_loss(Run* r, float* grads) {
    const Routing now = moe_routing(&workplace(r)->moe);
    (void)grads;
    return routing_loss(config_of(r), &now);
}

static void moe_stepped(Run* r, const Step* s) {
    Workplace* w = workplace(r);
    const int L = w->moe.config.L;
    const Routing now = moe_routing(&w->moe);
    const double cross_entropy = (double)r->targets_loss;
    if (!s->skipped) { moe_balance_biases(&w->moe, w->bias_rate, &r->dev); }
    log_note(&r->log, "load %.2f", (double)now.load);
    log_extra(&r->log, json_pack("{s:o, s:o, s:o, s:o, s:i}", "cross_entropy", json_finite(cross_entropy), "balance",
                                 json_finite((double)now.balance / L), "z", json_finite((double)now.z / L), "load",
                                 json_finite((double)now.load), "idle_experts", now.idle));
}

// loads: of the experts of layer l, as many as the line has room for, below each other from layer to layer
static void moe_print_loads(int l, int L, const RouterLoad* all, const json_t* loads) {
    const int terminal = terminal_columns(), end = terminal > 0 ? terminal : 80, E = (int)json_array_size(loads);
    const int of_layer = snprintf(NULL, 0, "%d", L - 1), of_idle = snprintf(NULL, 0, "%d", E - 1);
    int e = 0, column = printf("layer %*d | load %.2f | %*d idle |", of_layer, l, (double)all->busiest, of_idle,
                               all->dead);
    for (; e < E; e++) {
        const double load = json_real_value(json_array_get(loads, (size_t)e));
        const int dots = e + 1 < E ? 4 : 0;
        if (column + snprintf(NULL, 0, " %.2f", load) + dots > end) { break; }
        column += printf(" %.2f", load);
    }
    printf("%s\n", e < E ? " ..." : "");
}

// When training has ended: how often the last update took each expert, as a multiple of its layer's mean. A line for
// each layer, and "loads" of summary.json, which a run without an update has not
static json_t* moe_summary(const Run* r) {
    const int L = config_of(r)->L, E = config_of(r)->E;
    if (r->state.step <= r->first_step) { return json_object(); }
    json_t* layers = json_array();
    for (int l = 0; l < L; l++) {
        const float* counts = dp_sums(&r->model->dp) + (size_t)l * router_statistics_length(E);
        const RouterLoad all = router_load(counts, E);
        json_t* loads = json_array();
        float sum = 0.0f;
        for (int e = 0; e < E; e++) { sum += counts[e]; }
        for (int e = 0; e < E; e++) {
            json_array_append_new(loads, json_finite((double)(counts[e] / (sum / (float)E))));
        }
        if (!r->log.json_lines) { moe_print_loads(l, L, &all, loads); }
        json_array_append_new(layers, loads);
    }
    return json_pack("{s:o}", "loads", layers);
}

static void forward(Run* r, const int* inputs, int B, int T) {
    moe_forward(&workplace(r)->moe, &workplace(r)->acts, inputs, B, T, 0, &r->dev);
}

// the logits of one position, as floats on the host
static const float* host_logits(const Run* r, Activations* acts, int n) {
    const Config* c = config_of(r);
    ActivationTensors a = layer_activations(acts, 0);
    float* host = workplace(r)->host;
    linear_forward(a.logits, a.norm + (size_t)n * c->D, output_weight(&workplace(r)->moe), NULL, 1, c->D, c->Vp,
                   &r->dev);
    floatx_download(host, a.logits, (size_t)c->Vp, &r->dev);
    return host;
}

static void logits(Run* r, float* out, int first, int n) {
    const size_t V = (size_t)config_of(r)->V;
    for (int i = 0; i < n; i++) {
        memcpy(out + V * (size_t)i, host_logits(r, &workplace(r)->acts, first + i), sizeof(float) * V);
    }
}

// cross entropy alone: what the routers add is of no interest for a text
static const float* batch_losses(void* run, const int* inputs, const int* targets, int B, int T) {
    Run* r = (Run*)run;
    Workplace* w = workplace(r);
    moe_forward(&w->moe, &w->acts, inputs, B, T, 0, &r->dev);
    moe_head(&w->moe, &w->acts, 0, NULL, targets, 0.0f, B * T, &r->dev);
    device_download(w->host, layer_statistics(&w->acts, 0).losses, sizeof(float) * (size_t)B * (size_t)T, &r->dev);
    return w->host;
}

// keys and values of earlier positions are kept in cache
static const float* next_logits(void* run, const int* tokens, int n_cached, int n) {
    Run* r = (Run*)run;
    Workplace* w = workplace(r);
    moe_forward(&w->moe, &w->cache, tokens + n_cached, 1, n, n_cached, &r->dev);
    return host_logits(r, &w->cache, n - n_cached - 1);
}

static FileSum write_config(const Run* r, const char* path, int eot) { return config_save(path, config_of(r), eot); }

static void close_activations(Run* r) {
    activations_free(&workplace(r)->acts);
    activations_free(&workplace(r)->cache);
    free(workplace(r)->host);
}

// what metrics.jsonl has beside the common keys
static void moe_parsed(Run* r) {
    log_add_key(&r->log, "cross_entropy", "training loss without that of the routers");
    log_add_key(&r->log, "balance", "mean over layers of the balance loss before its weight, 1: equally busy experts");
    log_add_key(&r->log, "z", "mean over layers of the z-loss before its weight");
    log_add_key(&r->log, "load", "busiest expert of all layers, as a multiple of its layer's mean");
    log_add_key(&r->log, "idle_experts", "experts that no token took");
}

static Trainer moe_trainer(void) {
    Trainer t;
    memset(&t, 0, sizeof t);
    t.name = "train_moe";
    t.about = "Trains a transformer of experts: each token computes k of E MLPs. First steps: make run-moe.";
    t.presets = "random start from a preset: tiny, small (39M parameters with bytes, 55M with 32,000 tokens), 6.9b";
    t.sparing = "--recompute 3";
    t.stored_bytes = sizeof(floatX);
    t.usual_T = 1024;
    t.usual_V = 32000;
    t.options = moe_options;
    t.parsed = moe_parsed;
    t.choose = moe_choose;
    t.freeze = moe_freeze;
    t.check = moe_check;
    t.box = moe_box;
    t.flops_per_token = moe_flops_per_token;
    t.activation_bytes = activation_bytes;
    t.sparing_bytes = sparing_bytes;
    t.workspace_bytes = workspace_bytes;
    t.load = moe_load;
    t.open = open_activations;
    t.leaf = train_leaf;
    t.stepped = moe_stepped;
    t.more_loss = routers_loss;
    t.without_more = "cross_entropy";
    t.losses = batch_losses;
    t.forward = forward;
    t.logits = logits;
    t.next_logits = next_logits;
    t.write_config = write_config;
    t.summary = moe_summary;
    t.close = close_activations;
    return t;
}

int main(int argc, char** argv) {
    static Workplace place;  // all zero
    const Trainer trainer = moe_trainer();
    return run_main(&trainer, &place.moe.model, argc, argv);
}
#endif
