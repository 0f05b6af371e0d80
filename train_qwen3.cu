/*
Qwen2.5, Qwen3, Qwen3-MoE, Mistral and Llama: the transformers that most people fine-tune, from a Hugging Face folder to
a Hugging Face folder. Read train_gpt2.c first: what a run does beside the model is the same, and so are these chapters.

The model (doc/qwen.md): token embedding, L blocks of
    r = r + attention(rmsnorm(r))   queries and keys turned by RoPE; several query heads read one key/value head
    r = r + mlp(rmsnorm(r))         (silu(m Wgate^T) o (m Wup^T)) Wdown^T; in layers of a Qwen3-MoE k of E experts
a last RMSNorm, and the output matrix, which may be the embedding. What differs from model to model stands in
config.json (llmc/models/qwen.h): biases of q, k and v (Qwen2.5), a norm of each head of q and k before it turns
(Qwen3), a window of keys that a position sees (Mistral), experts.

One file for both kinds of machine: a C compiler builds it for CPUs, exact; nvcc for GPUs.
    make run-lora                      a small one learns this repository's own text, then to answer by an adapter
    make train_qwen3                   for what this machine has; CPU=1 and CUDA=1 say it
    ./train_qwen3 --from Qwen3-0.6B/ --generate 'The sky is'
    ./train_qwen3 --from Qwen3-0.6B/ --train book.txt --lr 1e-5 --export-hf mine/

What the first one prints, for example (the numbers change with the text):
    step 0 | val loss 5.4708 | 7.893 bits/byte | best
    step 100/1500 | loss 2.8087 | norm 1.25 | lr 3.0e-03 | 63 ms | 8.1k tok/s | eta 1m30s
*/
#include "llmc/core/floatx.h"         // floatX: float or bf16
#include "llmc/models/activations.h"  // Activations, Tradeoffs: what a pass has beside the parameters
#include "llmc/models/decoder_passes.h"  // DecoderPasses: the way through the layers
#include "llmc/models/expert_layer.h" // ExpertPass: router and experts of a layer; experts on other ranks
#include "llmc/models/gqa_layer.h"    // GqaPass, gqa_layer_forward: attention of a layer
#include "llmc/models/layer.h"        // layer_linear, layer_rmsnorm_forward: operands of a layer of a pass
#include "llmc/models/linear.h"       // linear_room_elements, linear_layer_sends: scratch, what ranks send
#include "llmc/models/lm_head.h"      // LmHead: the output matrix and cross entropy
#include "llmc/models/mlp.h"          // MlpPass, mlp_up, mlp_down, mlp_backward
#include "llmc/models/other_losses.h"  // other_losses_layout
#include "llmc/models/pooled_routers.h"  // pooled_balance, pooled_loss: one balance of the routers of all layers
#include "llmc/models/qwen.h"         // Config, Parameters, parameter_table
#include "llmc/models/stream.h"       // Stream: the residual stream, where backward asks for it
#include "llmc/ops/residual.h"        // residual_forward
#include "llmc/ranks/model_gradients.h"  // Model: parameters, gradients, moments
#ifndef TESTING                       // a test includes this file for the model alone
#include "llmc/models/adapted_run.h"  // Adapted, adapted_trainer: an adapter or all of the model learns
#include "llmc/models/decoder_run.h"  // decoder_options, decoder_begin_ranks, decoder_check, decoder_flops
#include "llmc/models/experts_run.h"  // experts_options, experts_box: --ep
#include "llmc/models/router_log.h"   // what routers have counted, for the log
#include "llmc/run/main.h"            // run_main: options, data, steps, checkpoints, ranks (llmc/run/)
#endif

// ---------------------------------------------------------------------------------------------------------------------
// 1. Tensors. Sizes and parameters are in llmc/models/qwen.h; here is one line for each activation.

// what a pass leaves behind; from `dresidual` on the gradients on their way back, one buffer each for all layers
typedef struct {
    floatX *encoded, *norm1, *norm2, *gate_up, *hidden, *norm, *logits, *branch, *dresidual, *dbranch, *dhidden;
    Stream residual2, residual3;
    GqaTensors attention;
    ExpertTensors experts;
} ActivationTensors;

// what must not lose digits, always float
typedef struct {
    float *norm1_rstd, *norm2_rstd, *norm_rstd, *losses;
    GqaStatistics attention;
    ExpertStatistics experts;
} Statistics;

typedef struct {
    Model model;    // the first member: a run finds its tensors here
    Config config;  // with --tp heads, channels of MLPs and rows of the vocabulary that this rank has
    Config whole;   // of all ranks
    Adapters adapters;  // LoRA: their tensors stand in front of the model's, which then do not learn; no places: none
} Qwen;

static RouterShape router_shape(const Config* c) {
    const RouterShape s = {c->E, c->k, ROUTER_SOFTMAX, c->renormalize, 1.0f, 1, 1};
    return s;
}

static GqaSizes attention_sizes(const Config* c) {
    const GqaSizes s = {c->NH, c->NKV, c->HS, c->HS, c->qk_norm, 0, NULL, NULL};  // all channels turn, in all layers
    return s;
}

static ExpertSizes expert_sizes(const Qwen* qwen, const Tradeoffs* how) {
    const Config* c = &qwen->config;
    ExpertSizes s = activations_experts(how, c->D, c->FE, router_shape(c), c->L);
    s.kinds = c->kinds;
    s.adapter = adapters_widest_expert(&qwen->adapters);
    return s;
}

// scratch that all layers share
static void size_scratch(Activations* acts, const Qwen* qwen, int B, int T) {
    const Config* c = &qwen->config;
    const Model* m = &qwen->model;
    const int N = acts->N, N_head = activations_head_rows(&acts->how, B, N, acts->purpose);
    const int trains = acts->purpose == TO_TRAIN, N_last = acts->purpose == TO_GENERATE ? N_head : 1;
    const GqaSizes attention = attention_sizes(c);
    const size_t products = tp_larger(linear_room_elements(m, N), gqa_room_elements(&attention, m, N, trains));
    acts->adapter.n = adapter_scratch_elements(&qwen->adapters, m, N, N * c->k);
    acts->rounded.n = linear_rounded_elements(m, N, N * c->k);
    acts->parallel.n = tp_larger(products, vocabulary_room_elements(m, N, N_head, N_last));
    acts->keys.n = gqa_keys_elements(&attention, m, B * T, trains, acts->how.cp);
}

// B rows of T positions; generation keeps logits of the last position of each. qwen must outlive the table
static int activation_table(Tensor* table, const Qwen* qwen, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const Config* c = &qwen->config;
    const int D = c->D, HQ = c->NH * c->HS, F = config_has_mlps(c) ? c->F : 0;
    const int N = activations_positions(how, B, T, purpose), N_train = purpose == TO_TRAIN ? N : 0;
    const int L_norms = activations_kept(how, c->L, purpose, RECOMPUTE_NORMS);
    const int L_mlps = activations_kept(how, c->L, purpose, RECOMPUTE_MLPS);
    const int L_block = activations_kept(how, c->L, purpose, RECOMPUTE_BLOCKS), L_out = purpose == TO_TRAIN ? c->L : 0;
    const int N_head = activations_head_rows(how, B, N, purpose);
    const RankGroup* tp = &qwen->model.tp;
    const GqaSizes attention = attention_sizes(c);
    const ExpertSizes experts = expert_sizes(qwen, how);
    Tensor* t = table;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = input_activation(FIELD(encoded), N, D);         // of a later stage: the stream of the one before
    *t++ = activation(FIELD(norm1),      L_norms, N, D);
    t = gqa_tensor_rows(t, offsetof(ActivationTensors, attention), &attention, &qwen->model, B, T, N, c->L, L_block,
                        purpose);
    t = stream_rows(t, FIELD(residual2), L_block, N, D, purpose, tp);  // after attention
    *t++ = activation(FIELD(norm2),      L_norms, N, D);       // what MLP, router and experts read
    *t++ = kind_activation(c->kinds, "M", FIELD(gate_up), L_mlps, N, 2 * F);  // then its gradient
    *t++ = activation(FIELD(hidden),     0, N, F);             // silu(gate) o up
    if (c->E > 0) { t = expert_tensor_rows(t, offsetof(ActivationTensors, experts), &experts, N, L_mlps, purpose); }
    t = stream_rows(t, FIELD(residual3), L_out, N, D, purpose, tp);    // after the MLP
    *t++ = activation(FIELD(norm),       0, N, D);             // the last one's output
    *t++ = activation(FIELD(logits),     0, N_head, c->Vp);    // then their gradient
    *t++ = activation(FIELD(branch),     0, N, D);             // a block's output before it joins the stream
    *t++ = activation(FIELD(dresidual),  0, N_train, D);
    *t++ = activation(FIELD(dbranch),    0, N_train, D > HQ ? D : HQ);  // gradient of a norm's or attention's output
    *t++ = activation(FIELD(dhidden),    0, N_train, F);
#undef FIELD
    return (int)(t - table);
}

static int statistic_table(Tensor* table, const Qwen* qwen, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const Config* c = &qwen->config;
    const int N = activations_positions(how, B, T, purpose);
    const int L_block = activations_kept(how, c->L, purpose, RECOMPUTE_BLOCKS);
    const GqaSizes attention = attention_sizes(c);
    const ExpertSizes experts = expert_sizes(qwen, how);
    Tensor* t = table;
#define FIELD(name) #name, offsetof(Statistics, name)
    *t++ = activation(FIELD(norm1_rstd), L_block, N, 1);
    t = gqa_statistic_rows(t, offsetof(Statistics, attention), &attention, N, L_block);
    *t++ = activation(FIELD(norm2_rstd), L_block, N, 1);
    if (c->E > 0) { t = expert_statistic_rows(t, offsetof(Statistics, experts), &experts, N, L_block, purpose); }
    *t++ = activation(FIELD(norm_rstd),  0, N, 1);
    *t++ = activation(FIELD(losses),     0, N, 1);
#undef FIELD
    return (int)(t - table);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: forward, head, backward. AdamW is in llmc/run/train.h and needs no word about any of it.

// Sizes only: what a run will need is known before anything is allocated. Takes the adapters; NULL: there are none
static void qwen_layout(Qwen* qwen, const Config* c, const Adapters* adapters) {
    Model* m = &qwen->model;
    const int n = adapters_place(&qwen->adapters, m->table, MAX_TENSORS - MAX_PARAMETERS, adapters);
    qwen->config = qwen->whole = *c;
    model_layout(m, n + parameter_table(m->table + n, &qwen->whole));
    if (n > 0) { model_save_rows(m, n); }
    other_losses_layout(m, pooled_numbers(config_expert_layers(c), c->E), 0, 0);
}

// Sizes only; returns the bytes that activations_open will take on the device, infinite for more positions than can be
static double activations_layout(const Model* m, Activations* acts, int B, int T, Purpose purpose, Tradeoffs how) {
    const Qwen* qwen = (const Qwen*)m;
    const Config* c = &qwen->config;
    const ExpertSizes experts = expert_sizes(qwen, &how);
    activations_begin(acts, B, T, purpose, how);
    acts->eps = c->eps;
    acts->adapters = &qwen->adapters;
    if ((double)B * T > expert_most_positions(c->k)) { return INFINITY; }
    size_scratch(acts, qwen, B, T);
    const int n_tensors = activation_table(acts->tensors.table, qwen, B, T, purpose, &how);
    const int n_statistics = statistic_table(acts->statistics.table, qwen, B, T, purpose, &how);
    return activations_measure(acts, n_tensors, n_statistics, c->E > 0 ? &experts : NULL, c->HS, c->theta);
}

// ---- what stands where: parameters by their field of the table, at layer l ----

#define AT(name) offsetof(Parameters, name)

static const GqaFields ATTENTION = {AT(wq), AT(bq), AT(wk), AT(bk), AT(wv), AT(bv), AT(wo), AT(bo), AT(q_norm),
                                    AT(k_norm)};
static const ExpertFields EXPERTS = {AT(router), AT(expert_gate_up), AT(expert_down)};

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

static GqaPass attention_pass(const Qwen* qwen, const Activations* acts, int l, int N) {
    const GqaSizes size = attention_sizes(&qwen->config);
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    GqaPass p = layer_gqa(acts, ATTENTION, &size, &a.attention, &s.attention, a.norm1, l, N);
    p.attention.of.window = config_window(&qwen->config, l);
    return p;
}

// router and experts of layer l, without gradients
static ExpertPass expert_pass(const Qwen* qwen, Activations* acts, int l, int N) {
    const Config* c = &qwen->config;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    ExpertPass p = layer_experts(acts, EXPERTS, &a.experts, &s.experts, a.norm2, l, N);
    p.numbers = layer_numbers(acts, tensor_kinds(c->kinds, 0, l, EXPERT_LAYER), c->E);
    return p;
}

// the MLP of layer l
static MlpPass mlp_pass(const Qwen* qwen, const Activations* acts, int l, int N) {
    const ActivationTensors a = layer_activations(acts, l);
    MlpPass p = layer_mlp(acts, AT(gate_up), AT(down), qwen->config.F, l, N);
    p.gate_up = a.gate_up, p.hidden = a.hidden, p.dhidden = a.dhidden;
    return p;
}

// ---- forward ----

// the first half of layer l, and the norm behind it: N positions, whose stream comes in as `residual`
static void attention_block_forward(const Qwen* qwen, Activations* acts, int l, const floatX* residual, int N,
                                    const Device* dev) {
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const GqaPass attention = attention_pass(qwen, acts, l, N);
    layer_rmsnorm_forward(acts, a.norm1, s.norm1_rstd, residual, AT(norm1), l, N, dev);
    gqa_layer_forward(&attention, a.branch, dev);
    layer_residual_rmsnorm_forward(acts, a.residual2.x, a.norm2, s.norm2_rstd, residual, a.branch, AT(norm2), l, N,
                                   dev);
}

// the first product of the MLP of layer l, or of its experts, once their rows are found
static void gate_up_forward(const Qwen* qwen, Activations* acts, int l, int N, const Device* dev) {
    if (qwen->config.kinds[l] == MLP_LAYER) {
        const MlpPass p = mlp_pass(qwen, acts, l, N);
        mlp_up(&p, layer_activations(acts, l).norm2, dev);
    } else {
        const ExpertPass p = expert_pass(qwen, acts, l, N);
        expert_gate_up(&p, dev);
    }
}

// the second half up to the products that are kept for backward. replay: these positions have chosen their experts
static void branch_up(const Qwen* qwen, Activations* acts, int l, int replay, int N, const Device* dev) {
    if (qwen->config.kinds[l] == EXPERT_LAYER) {
        const ExpertPass p = expert_pass(qwen, acts, l, N);
        expert_choose(&p, replay, dev);
        expert_gather(&p, dev);
    }
    gate_up_forward(qwen, acts, l, N, dev);
}

// ... and from there on: its output is added to the stream
static void branch_down(const Qwen* qwen, Activations* acts, int l, int N, const Device* dev) {
    const Config* c = &qwen->config;
    const ActivationTensors a = layer_activations(acts, l);
    if (c->kinds[l] == MLP_LAYER) {
        const MlpPass p = mlp_pass(qwen, acts, l, N);
        mlp_down(&p, a.branch, dev);
    } else {
        const ExpertPass p = expert_pass(qwen, acts, l, N);
        expert_down(&p, a.branch, dev);
    }
    residual_forward(a.residual3.x, a.residual2.x, a.branch, (size_t)N * c->D, dev);
    layer_keep(acts, l, a.residual2, a.residual3, N, c->D, dev);
}

// ---- the parts of a pass, which decoder_passes.h puts together ----

// where the stream of layer l is
static DecoderStreams streams(const Model* m, const Activations* acts, int l) {
    const ActivationTensors a = layer_activations(acts, l);
    const DecoderStreams x = {a.encoded, a.residual3, a.dresidual, ((const Qwen*)m)->config.D};
    return x;
}

static void embed_forward(const Model* m, Activations* acts, int N, const Device* dev) {
    floatX* encoded = layer_activations(acts, 0).encoded;
    (void)m;
    vocabulary_rows(encoded, acts->batch.tokens, layer_linear(acts, AT(embedding), 0), N, dev);
}

static void block_forward(const Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev) {
    const Qwen* qwen = (const Qwen*)m;
    attention_block_forward(qwen, acts, l, residual, N, dev);
    branch_up(qwen, acts, l, 0, N, dev);
    branch_down(qwen, acts, l, N, dev);
}

// the last norm; the routers of all layers have counted
static void end_forward(const Model* m, Activations* acts, const floatX* residual, int N, const Device* dev) {
    const Qwen* qwen = (const Qwen*)m;
    const Config* c = &qwen->config;
    const RouterShape router = router_shape(c);
    const int n = config_expert_layers(c);
    if (acts->numbers) { router_pool(layer_numbers(acts, n, c->E), acts->numbers, n, &router, N, dev); }
    layer_rmsnorm_forward(acts, layer_activations(acts, 0).norm, layer_statistics(acts, 0).norm_rstd, residual,
                          AT(norm), 0, N, dev);
}

// the field of the output matrix: the embedding where it is tied
static size_t output_field(const Config* c) { return c->tied ? AT(embedding) : AT(head); }

// from the last norm's output to logits and losses, head_rows positions at a time, and back to its gradient
static LmHead lm_head(const Model* m, const Activations* acts) {
    const Config* c = &((const Qwen*)m)->config;
    const ActivationTensors a = layer_activations(acts, 0);
    return layer_head(acts, output_field(c), a.norm, a.dbranch, a.logits, layer_statistics(acts, 0).losses, c->V);
}

// ---- backward: forward's calls upside down. A gradient whose pointer is NULL is of something frozen ----

// from the head's gradient to that of the stream behind the last layer
static void end_backward(const DecoderPasses* passes, Model* m, Activations* acts, int N, const Device* dev) {
    (void)passes;
    Qwen* qwen = (Qwen*)m;
    const int last = model_end_layer(m) - 1, D = qwen->config.D;
    const ActivationTensors a = layer_activations(acts, last);
    const floatX* residual = layer_stream(acts, a.residual3, last, N, D, dev);
    layer_rmsnorm_backward(acts, a.dresidual, a.dbranch, residual, layer_statistics(acts, 0).norm_rstd, AT(norm), 0, 0,
                           N, dev);
}

// What --recompute left out of layer l, and which rows its experts have: of the last layer all is still there, and of
// the last that has experts their rows
static void recompute_block(const Model* m, Activations* acts, int l, const floatX* residual, int N,
                            const Device* dev) {
    const Qwen* qwen = (const Qwen*)m;
    const Config* c = &qwen->config;
    const int level = acts->how.recompute;
    const int is_last = tensor_kinds(c->kinds, l + 1, model_end_layer(m), EXPERT_LAYER) == 0;
    const int has_rows = c->kinds[l] == MLP_LAYER || (acts->fresh >= 0 && is_last);
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    if (layer_is_fresh(acts, l)) { return; }
    if (level == RECOMPUTE_BLOCKS) {
        attention_block_forward(qwen, acts, l, residual, N, dev);
        branch_up(qwen, acts, l, 1, N, dev);
        return;
    }
    layer_stream(acts, a.residual2, l, N, c->D, dev);
    if (level >= RECOMPUTE_NORMS) {
        layer_rmsnorm_forward(acts, a.norm1, s.norm1_rstd, residual, AT(norm1), l, N, dev);
        layer_rmsnorm_forward(acts, a.norm2, s.norm2_rstd, a.residual2.x, AT(norm2), l, N, dev);
    }
    if (!has_rows) {
        const ExpertPass p = expert_pass(qwen, acts, l, N);
        expert_gather(&p, dev);
    }
    if (level >= RECOMPUTE_MLPS) { gate_up_forward(qwen, acts, l, N, dev); }
}

// From dresidual, the gradient of the stream behind layer l, to that of what its experts read, dbranch. The balance of
// all routers together pulls on each of them alike
static void experts_backward(Qwen* qwen, Activations* acts, int l, int N, const Device* dev) {
    const Config* c = &qwen->config;
    const float balance = pooled_weight(&qwen->model, c->balance, c->k, config_expert_layers(c));
    const ActivationTensors a = layer_activations(acts, l);
    ExpertPass p = expert_pass(qwen, acts, l, N);
    layer_experts_back(&p, acts, EXPERTS, l);
    expert_backward(&p, a.dbranch, a.dresidual, layer_numbers(acts, config_expert_layers(c), c->E), balance, 0.0f, dev);
}

// dresidual goes from the stream behind layer l to the one before it, which came in as `residual`
static void block_backward(Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev) {
    Qwen* qwen = (Qwen*)m;
    const Config* c = &qwen->config;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const GqaPass attention = attention_pass(qwen, acts, l, N);
    if (c->kinds[l] == MLP_LAYER) {
        const MlpPass p = mlp_pass(qwen, acts, l, N);
        mlp_backward(&p, a.dbranch, a.dresidual, a.norm2, 0, dev);
    } else {
        experts_backward(qwen, acts, l, N, dev);
    }
    layer_rmsnorm_backward(acts, a.dresidual, a.dbranch, a.residual2.x, s.norm2_rstd, AT(norm2), l, 1, N, dev);
    gqa_layer_backward(&attention, a.dbranch, a.dresidual, dev);
    layer_rmsnorm_backward(acts, a.dresidual, a.dbranch, residual, s.norm1_rstd, AT(norm1), l, 1, N, dev);
}

// from dresidual to the gradient of the embedding
static void embed_backward(Model* m, Activations* acts, int N, const Device* dev) {
    vocabulary_embedding_backward(m, AT(embedding), ((Qwen*)m)->config.tied, layer_activations(acts, 0).dresidual,
                                  acts->batch.tokens, layer_linear(acts, AT(embedding), 0), N, dev);
}

// for runs and tests
static const DecoderPasses PASSES = {activations_layout, streams,      embed_forward,   block_forward,  end_forward,
                                     lm_head,            end_backward, recompute_block, block_backward, embed_backward};

// ---- what routers have counted in an update, once model_reduce is back ----

static float routing_loss(const Qwen* qwen) {
    const Config* c = &qwen->config;
    return pooled_loss(&qwen->model, c->balance, c->k, config_expert_layers(c), c->E);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. What a run asks of this model (llmc/run/trainer.h), and main.

#ifndef TESTING
typedef struct {
    Qwen qwen;                // first
    Adapted adapted;          // activations, adapters, and options of both
    int tied, head_alone;     // head_alone: the file has a tied matrix under the name of the head
    float aux_alpha;
} Workplace;

static Workplace* workplace(const Run* r) { return (Workplace*)r->model; }
static const Config* config_of(const Run* r) { return &workplace(r)->qwen.whole; }

static void qwen_options(Run* r) {
    Workplace* w = workplace(r);
    const Option own[] = {
        decoder_tied_option(&w->tied, "1"),
        decoder_balance_option(&w->aux_alpha),
    };
    run_add_options(r, own, sizeof own);
    decoder_options(r, DECODER_RECOMPUTE("the first products of MLPs too"), "1024", CP_CHUNKS, 1);
    experts_options(r, &w->adapted.decoder.how.ep);
    adapted_options(r, &w->adapted);
    options_reword(r->table, r->n_options, "config", "random start from a config.json of Qwen2, Qwen3, Qwen3-MoE, "
                   "Mistral or Llama, with sizes of your own");
}

// what only the files say
static void qwen_fit(Run* r, Config* c) {
    Workplace* w = workplace(r);
    SafeSet set;
    if (!*r->weights) { return; }
    safeset_open(&set, r->weights);
    w->head_alone = config_fit(c, &set);
    adapted_base(r, &set);
    safeset_close(&set);
}

static void qwen_choose(Run* r) {
    Workplace* w = workplace(r);
    const int from_preset = !*r->config;
    if (*r->weights && from_preset) { fail_input("%s: expected a model with its config.json", r->o.from); }
    Config c = from_preset ? config_preset(r->o.model, run_new_vocabulary(r)) : config_load(r->config);
    decoder_choose_tied(r, w->tied, &c.tied);
    qwen_fit(r, &c);
    options_refuse(run_is_typed(r, "aux-alpha") && c.E == 0, "aux-alpha", "is for models with experts");
    if (run_is_chosen(r, "aux-alpha")) { c.balance = w->aux_alpha; }
    options_set(r->table, r->n_options, "aux-alpha", format_float(c.balance).s);
    options_set(r->table, r->n_options, "tied", c.tied ? "1" : "0");
    Adapters adapters;
    Tensor base[MAX_PARAMETERS];
    const size_t not_fp8[] = {AT(embedding), AT(router)};
    const int n_base = parameter_table(base, &c);
    const int is_adapter = adapted_choose(r, &adapters, base, n_base);
    qwen_layout(&w->qwen, &c, is_adapter ? &adapters : NULL);
    adapted_store(r, not_fp8, 2);
    r->V = r->classes = c.V;
    r->max_T = c.max_T;
    if (config_expert_layers(&c) > 0) { router_log_keys(r); }
    const DecoderSizes sizes = decoder_sizes(c.Vp, c.D, AT(embedding), c.tied, c.E, c.k);
    decoder_begin_ranks(r, &sizes);
    w->qwen.config = config_part(&c, r->model->tp.size);
}

static void qwen_check(Run* r) {
    const Config* own = &workplace(r)->qwen.config;  // of this rank
    adapted_check(r);
    decoder_check(r, adapted_varies(r), own->NH, own->NKV);
}

static void qwen_load(Run* r, const SliceSink* sink) {
    Model* m = r->model;
    Tensor* base = m->table + workplace(r)->qwen.adapters.n_table;
    const int n_base = (int)(m->table + m->n_table - base);
    SafeSet set;
    adapted_load(r, sink);
    if (!*r->weights) {
        tensors_init_into(sink, base, n_base, (uint32_t)r->o.seed);
        return;
    }
    safeset_open(&set, r->weights);
    tied_head_load(sink, &set, base, n_base, &m->table[model_row(m, AT(embedding), 0)], config_of(r)->tied,
                   workplace(r)->head_alone);
    safeset_report_unused(&set);
    safeset_close(&set);
}

static void qwen_box(const Run* r) {
    const Config* c = config_of(r);
    const int n_experts = config_expert_layers(c);
    box_row("model", "%s, %d layer%s of %d channels, %d head%s of %d for %d of keys and values, %d positions",
            choice_name(MODEL_TYPES, c->type).s, c->L, c->L > 1 ? "s" : "", c->D, c->NH, c->NH > 1 ? "s" : "", c->HS,
            c->NKV, c->max_T);
    if (c->window > 0) {
        const int slide = tensor_kinds(c->slides, 0, c->L, SLIDING_ATTENTION);
        box_row("  window", "%d positions, in %d layer%s", c->window, slide, slide == 1 ? "" : "s");
    }
    if (config_has_mlps(c)) { box_row("mlp", "%d wide", c->F); }
    if (n_experts > 0) {
        box_row("experts", "%d in %d layer%s, %d wide, a token takes %d", c->E, n_experts, n_experts > 1 ? "s" : "",
                c->FE, c->k);
        experts_box(r, c->E);
        if (run_is_training(r) || *r->o.probe) { experts_balance_box("none", c->balance, "", ""); }
        decoder_active_box(r, r->model->n_table);
    }
    box_row("vocabulary", "%d, padded to %d%s", c->V, c->Vp, c->tied ? ", tied" : "");
    adapted_box(r, c->tied);
    decoder_ranks_box(r);
}

// with --tp: what the products of layer l and the norms of its heads need of other ranks
static double layer_parts_sent(const Run* r, int l, int is_back, int again) {
    const Qwen* qwen = &workplace(r)->qwen;
    const Model* m = r->model;
    const GqaSizes attention = attention_sizes(&qwen->config);
    const int N = run_positions(r), replays = again && decoder_recomputes(r);
    return linear_layer_sends(m, &qwen->adapters, l, replays ? AT(wo) : TENSOR_NO_FIELD, 3, qwen->config.D, N) +
           gqa_layer_sends(&attention, ATTENTION, m, l, 1 + replays, is_back, N);
}

// with --cp: what its attention and its router do
static double layer_keys_sent(const Run* r, int l, int is_back, int again) {
    const Config* c = &workplace(r)->qwen.config;
    return cp_layer_sent(r, c->NH, c->NKV, c->HS, is_back, again && decoder_recomputes(r)) +
           (c->kinds[l] == EXPERT_LAYER ? experts_count_sent(r, c->E, 0) : 0.0);
}

static double qwen_flops_per_token(const Run* r) {
    const Config* c = config_of(r);
    double attention = 0.0;
    for (int l = 0; l < c->L; l++) {
        attention += decoder_attention_flops(c->NH * c->HS, config_window(c, l), r->T);
    }
    return attention + decoder_flops(r, r->model->n_table);
}

static double workspace_bytes(const Run* r, int B) {
    const Config* c = config_of(r);
    return fmax(decoder_attention_bytes(r, B, c->NH * c->HS, c->NH), decoder_workspace_bytes(r, B));
}

static float losses_beside(Run* r, float* grads) {
    (void)grads;
    return routing_loss(&workplace(r)->qwen);
}

static void qwen_stepped(Run* r, const Step* s) {
    const Qwen* qwen = &workplace(r)->qwen;
    const Config* c = &qwen->config;
    const int n = config_expert_layers(c);
    (void)s;
    if (n == 0) { return; }
    const Routing now = routing_read(&qwen->model, n, c->E);
    const float z = now.z / (float)n;
    router_log_step(r, pooled_balance(&qwen->model, n, c->E), &z, now.load, now.idle);
}

static json_t* qwen_summary(const Run* r) {
    const Config* c = config_of(r);
    return router_log_summary(r, c->kinds, EXPERT_LAYER, c->L, c->E);
}

static json_t* config_to_save(const Run* r, int eot, const char* dtype) {
    return config_json(config_of(r), eot, dtype);
}

static Trainer qwen_trainer(void) {
    Trainer t = adapted_trainer(offsetof(Workplace, adapted));
    t.name = "train_qwen3";
    t.on_gpus = "train_qwen3 CUDA=1";
    t.about = "Trains Qwen2.5, Qwen3, Qwen3-MoE, Mistral and Llama models, from and to Hugging Face folders. "
              "First steps: make run-lora.";
    t.presets = "random start from a preset: " QWEN_PRESETS;
    t.usual_V = 151936;
    t.options = qwen_options;
    t.choose = qwen_choose;
    t.check = qwen_check;
    t.box = qwen_box;
    t.layer_parts_sent = layer_parts_sent;
    t.layer_keys_sent = layer_keys_sent;
    t.flops_per_token = qwen_flops_per_token;
    t.workspace_bytes = workspace_bytes;
    t.load = qwen_load;
    t.stepped = qwen_stepped;
    t.more_loss = losses_beside;
    t.config_json = config_to_save;
    t.summary = qwen_summary;
    return t;
}

int main(int argc, char** argv) {
    static Workplace place;  // all zero
    const Trainer trainer = qwen_trainer();
    adapted_init(&place.adapted, &PASSES, &place.qwen.adapters, NULL);
    return run_main(&trainer, &place.qwen.model, argc, argv);
}
#endif
