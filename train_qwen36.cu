/*
Qwen3.6: most layers carry a state from position to position (gated delta rule), every fourth has attention with an
output gate, and all have experts, one of which every token takes. From a Hugging Face folder to a Hugging Face folder.
Read train_moe.cu first: experts, and what a run does beside the model, are explained there; attention in gqa_layer.h.

The model (doc/qwen36.md): token embedding, L blocks of
    r = r + mixer(norm(r))     linear: delta_layer.h    full: o_proj(attention(q, k, v) o sigmoid(gate)), of which RoPE
                               turns the first channels of each head of q and k, behind a norm of that head
    r = r + experts(norm(r))   k of E, weighed, and the shared one with a weight of its own, sigmoid(x . w)
a last norm, and the output matrix. Gains of all these norms are 1 + weight. A module behind the last norm may learn to
predict the token after the next (MTP). A tower over the patches of images gives rows that stand in the text
(vision_tower.h).

One file for both kinds of machine: a C compiler builds it for CPUs, exact; nvcc for GPUs.
    make run-qwen36                    trains a small one on this repository's own text
    make run-shapes                    a small one with eyes learns to name shapes
    make train_qwen36                  for what this machine has; CPU=1 and CUDA=1 say it
    ./train_qwen36 --from Qwen3.6-35B-A3B/ --generate 'The sky is'
    ./train_qwen36 --model tiny --train book.txt

What the first one prints, for example (the numbers change with the text):
    step 0 | val loss 5.4554 | 7.871 bits/byte | best
    step 100/2000 | loss 2.5867 | norm 1.46 | lr 3.0e-03 | 84 ms | 6.1k tok/s | 23% peak | eta 2m54s | load 3.98
*/
#include "llmc/core/floatx.h"         // floatX: float or bf16
#include "llmc/models/activations.h"  // Activations, Tradeoffs: what a pass has beside the parameters
#include "llmc/models/decoder_passes.h"  // DecoderPasses: the way through the layers
#include "llmc/models/delta_layer.h"  // DeltaPass, delta_layer_forward: the linear mixer
#include "llmc/models/expert_layer.h" // ExpertPass: router and experts of a layer; experts on other ranks
#include "llmc/models/gathered.h"     // heads_sends, swiglu_backward_gathered: sums over what ranks of --tp share
#include "llmc/models/gqa_layer.h"    // GqaPass, gqa_layer_forward: attention of a full layer
#include "llmc/models/image_splice.h" // image_splice_take, image_splice_forward: images in the text
#include "llmc/models/layer.h"        // layer_linear, layer_rmsnorm_forward: operands of a layer of a pass
#include "llmc/models/linear.h"       // Linear, linear_forward, linear_backward
#include "llmc/models/lm_head.h"      // LmHead: the output matrix and cross entropy
#include "llmc/models/mtp_module.h"   // MtpModule, mtp_module_leaf: the token after the next
#include "llmc/models/other_losses.h"  // other_losses_layout, mtp_loss
#include "llmc/models/pooled_routers.h"  // pooled_balance, pooled_loss: one balance of the routers of all layers
#include "llmc/models/qwen36.h"       // Config, Parameters, parameter_table
#include "llmc/models/stream.h"       // Stream: the residual stream, where backward asks for it
#include "llmc/models/text_sight.h"   // TextSight: what a text that is generated has seen
#include "llmc/models/vocabulary.h"   // vocabulary_rows, vocabulary_embedding_backward
#include "llmc/ops/residual.h"        // residual_forward
#include "llmc/ops/row_gate.h"        // row_gate_forward, row_gate_add: the weight of the shared expert
#include "llmc/ops/swiglu.h"          // swiglu_forward
#include "llmc/ranks/model_gradients.h"  // Model: parameters, gradients, moments
#ifndef TESTING                       // a test includes this file for the model alone
#include "llmc/models/adapted_run.h"  // Adapted, adapted_trainer: an adapter or all of the model learns
#include "llmc/models/decoder_run.h"  // decoder_options, decoder_begin_ranks, decoder_check, decoder_flops
#include "llmc/models/experts_run.h"  // experts_options, experts_box: --ep
#include "llmc/models/mtp_run.h"      // mtp_options, mtp_choose: the module for the token after the next
#include "llmc/models/router_log.h"   // what routers have counted, for the log
#include "llmc/models/vision_run.h"   // VisionRun, vision_run_rows: image files become patches
#include "llmc/run/main.h"            // run_main: options, data, steps, checkpoints, ranks (llmc/run/)
#endif

// ---------------------------------------------------------------------------------------------------------------------
// 1. Tensors. Sizes and parameters are in llmc/models/qwen36.h; here is one line for each activation.

// what a pass leaves behind; from `dresidual` on the gradients on their way back, one buffer each for all layers
typedef struct {
    floatX *encoded, *norm1, *norm2, *shared_logit, *shared_gate_up, *shared_hidden, *shared_out, *norm, *logits,
        *branch;
    Stream residual2, residual3;
    GqaTensors attention;  // of full layers
    DeltaTensors delta;    // of linear ones
    ExpertTensors experts;
    MtpTensors mtp;
    floatX *dresidual, *dbranch, *dshared_hidden, *dshared_logit;
} ActivationTensors;

// what must not lose digits, always float
typedef struct {
    float *norm1_rstd, *norm2_rstd, *shared_weight, *dshared_weight,
        *norm_rstd, *losses;
    MtpStatistics mtp;
    GqaStatistics attention;
    DeltaStatistics delta;
    ExpertStatistics experts;
} Statistics;

// with --pp, of a micro-batch whose backward pass is still to come
typedef struct {
    ImageSplice images;
    VisionTower tower;  // with activations of its own, where it learns
} WaitingImages;

typedef struct {
    Model model;    // the first member: a run finds its tensors here
    Config config;  // with --tp heads, channels of the shared expert and rows of the vocabulary that this rank has
    Config whole;   // of all ranks
    Adapters adapters;  // LoRA: their tensors stand in front of the model's, which then do not learn; no places: none
    VisionTower tower;  // of a model that reads images
    ImageSplice images; // of the batches that come; N 0: they have none
    WaitingImages* waiting;  // with --pp, (n_waiting) of the micro-batches that are under way, but for number `at_hand`
    int n_waiting, at_hand;
    TextSight* sights;  // in generation, of each row of the cache
    int n_sights;
    CarriedLine line;   // with --cp: the ranks that have the positions before and behind
} Qwen36;

static RouterShape router_shape(const Config* c) {
    const RouterShape s = {c->E, c->k, ROUTER_SOFTMAX, 1, 1.0f, 1, 1};
    return s;
}

static ExpertSizes expert_sizes(const Qwen36* qwen, Purpose purpose, const Tradeoffs* how) {
    const Config* c = &qwen->config;
    ExpertSizes s = activations_experts(how, c->D, c->FE, router_shape(c), mtp_layers(&qwen->model, c->L, purpose));
    s.adapter = adapters_widest_expert(&qwen->adapters);
    return s;
}

// of layers with attention, the MTP module's too
static GqaSizes attention_sizes(const Config* c) {
    const GqaSizes s = {c->NH, c->NKV, c->HS, c->rotated, 1, 1, c->kinds, "F"};
    return s;
}

static DeltaSizes delta_sizes(const Config* c, const RankGroup* cp) {
    const DeltaSizes s = {c->Hk, c->Hv, c->DK, c->DV, c->K, c->eps, c->L, c->kinds, cp};
    return s;
}

// of rows of T positions those of this rank
static int own_T(const Tradeoffs* how, int T) { return T / (how->cp ? how->cp->size : 1); }

// scratch that all layers share; with --tp of products, and of what sums over heads or channels of all ranks
static void size_scratch(Activations* acts, const Qwen36* qwen, int B, int T) {
    const Config *c = &qwen->config, *whole = &qwen->whole;
    const Model* m = &qwen->model;
    const int N = acts->N, N_head = activations_head_rows(&acts->how, B, N, acts->purpose);
    const GqaSizes attention = attention_sizes(c);
    const int trains = acts->purpose == TO_TRAIN, N_last = acts->purpose == TO_GENERATE ? N_head : 1;
    const int N_train = trains ? N : 0, has_full = config_layers(c, FULL_LAYER) + acts->has_mtp > 0;
    const size_t norms = tp_larger(gqa_room_elements(&attention, m, N, trains),
                                   delta_room_elements(N_train, whole->Hv, c->DV, &m->tp));
    const size_t back = tp_larger(norms, swiglu_room_elements(N_train, whole->FS, &m->tp));
    const size_t head = vocabulary_room_elements(m, N, N_head, N_last);
    acts->adapter.n = adapter_scratch_elements(&qwen->adapters, m, N, N * c->k);
    acts->rounded.n = linear_rounded_elements(m, N, N * c->k);
    acts->parallel.n = tp_larger(back, tp_larger(head, linear_room_elements(m, N)));
    acts->keys.n = has_full ? gqa_keys_elements(&attention, m, B * T, trains, acts->how.cp) : 0;
}

// B rows of T positions; generation keeps logits of the last position of each. qwen must outlive the table
static int activation_table(Tensor* table, const Qwen36* qwen, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const Config* c = &qwen->config;
    const int D = c->D, HQ = c->NH * c->HS;
    const int N = activations_positions(how, B, T, purpose), N_train = purpose == TO_TRAIN ? N : 0;
    const int L = mtp_layers(&qwen->model, c->L, purpose), mtp = mtp_on_rank(&qwen->model, purpose);
    const int L_norms = activations_kept(how, L, purpose, RECOMPUTE_NORMS);
    const int L_experts = activations_kept(how, L, purpose, RECOMPUTE_MLPS);
    const int L_block = activations_kept(how, L, purpose, RECOMPUTE_BLOCKS), L_out = purpose == TO_TRAIN ? L : 0;
    const int N_head = activations_head_rows(how, B, N, purpose);
    const RankGroup* tp = &qwen->model.tp;
    const ExpertSizes experts = expert_sizes(qwen, purpose, how);
    const GqaSizes attention = attention_sizes(c);
    const DeltaSizes delta = delta_sizes(c, how->cp);
    Tensor* t = table;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = input_activation(FIELD(encoded), N, D);             // of a later stage: the stream of the one before
    *t++ = activation(FIELD(norm1),          L_norms, N, D);   // what a mixer reads
    if (config_layers(c, FULL_LAYER) + mtp > 0) {
        t = gqa_tensor_rows(t, offsetof(ActivationTensors, attention), &attention, &qwen->model, B, T, N, c->L, L_block,
                            purpose);
    }
    if (config_layers(c, LINEAR_LAYER) > 0) {
        t = delta_tensor_rows(t, offsetof(ActivationTensors, delta), &delta, B, N, L_block, purpose);
    }
    t = stream_rows(t, FIELD(residual2),     L_block, N, D, purpose, tp);  // after the mixer
    *t++ = activation(FIELD(norm2),          L_norms, N, D);   // what router and experts read
    t = expert_tensor_rows(t, offsetof(ActivationTensors, experts), &experts, N, L_experts, purpose);
    *t++ = activation(FIELD(shared_logit),   0, N, 1);
    *t++ = activation(FIELD(shared_gate_up), L_experts, N, 2 * c->FS);  // then its gradient
    *t++ = activation(FIELD(shared_hidden),  0, N, c->FS);     // silu(gate) o up
    *t++ = activation(FIELD(shared_out),     0, N, D);
    t = stream_rows(t, FIELD(residual3),     L_out, N, D, purpose, tp);    // after the experts
    *t++ = activation(FIELD(norm),           0, N, D);         // the last one's output
    *t++ = activation(FIELD(logits),         0, N_head, c->Vp);  // then their gradient
    *t++ = activation(FIELD(branch),         0, N, D);         // a block's output before it joins the stream
    if (mtp) { t = mtp_tensor_rows(t, offsetof(ActivationTensors, mtp), N, D); }
    *t++ = activation(FIELD(dresidual),      0, N_train, D);
    *t++ = activation(FIELD(dbranch),        0, N_train, D > HQ ? D : HQ);  // of what a norm or attention gives
    *t++ = activation(FIELD(dshared_hidden), 0, N_train, c->FS);  // where its weight is 1
    *t++ = activation(FIELD(dshared_logit),  0, N_train, 1);
#undef FIELD
    return (int)(t - table);
}

static int statistic_table(Tensor* table, const Qwen36* qwen, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const Config* c = &qwen->config;
    const int N = activations_positions(how, B, T, purpose), N_train = purpose == TO_TRAIN ? N : 0;
    const int mtp = mtp_on_rank(&qwen->model, purpose);
    const int L_block = activations_kept(how, mtp_layers(&qwen->model, c->L, purpose), purpose, RECOMPUTE_BLOCKS);
    const ExpertSizes experts = expert_sizes(qwen, purpose, how);
    const GqaSizes attention = attention_sizes(c);
    const DeltaSizes delta = delta_sizes(c, how->cp);
    Tensor* t = table;
#define FIELD(name) #name, offsetof(Statistics, name)
    *t++ = activation(FIELD(norm1_rstd), L_block, N, 1);
    if (config_layers(c, FULL_LAYER) + mtp > 0) {
        t = gqa_statistic_rows(t, offsetof(Statistics, attention), &attention, N, L_block);
    }
    if (config_layers(c, LINEAR_LAYER) > 0) {
        t = delta_statistic_rows(t, offsetof(Statistics, delta), &delta, B, own_T(how, T), N, L_block, purpose);
    }
    *t++ = activation(FIELD(norm2_rstd), L_block, N, 1);
    t = expert_statistic_rows(t, offsetof(Statistics, experts), &experts, N, L_block, purpose);
    *t++ = activation(FIELD(shared_weight),  L_block, N, 1);   // sigmoid of its logit
    *t++ = activation(FIELD(dshared_weight), 0, N_train, 1);
    *t++ = activation(FIELD(norm_rstd),  0, N, 1);
    *t++ = activation(FIELD(losses),     0, N, 1);
    if (mtp) { t = mtp_statistic_rows(t, offsetof(Statistics, mtp), N); }
#undef FIELD
    return (int)(t - table);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: forward, head, backward. AdamW is in llmc/run/train.h and needs no word about any of it.

#define AT(name) offsetof(Parameters, name)  // a field of the table

static const GqaFields ATTENTION = {AT(wq), NO_BIAS, AT(wk), NO_BIAS, AT(wv), NO_BIAS, AT(wo), NO_BIAS, AT(q_norm),
                                    AT(k_norm)};
static const ExpertFields EXPERTS = {AT(router), AT(expert_gate_up), AT(expert_down)};

// Sizes only: what a run will need is known before anything is allocated. Takes the adapters; NULL: there are none.
// learns_mtp: of a model that has the module
static void qwen36_layout(Qwen36* qwen, const Config* c, const Adapters* adapters, int learns_mtp) {
    Model* m = &qwen->model;
    const int n = adapters_place(&qwen->adapters, m->table, MAX_TENSORS - MAX_PARAMETERS, adapters);
    qwen->config = qwen->whole = *c;
    m->learns_mtp = learns_mtp;
    model_layout(m, n + parameter_table(m->table + n, &qwen->whole));
    if (c->has_vision) { vision_tower_init(&qwen->tower, &c->vision, m, AT(vision), config_vision_layer(c)); }
    if (n > 0) { model_save_rows(m, n); }
    other_losses_layout(m, pooled_numbers(c->L, c->E), 0, 0);
}

// Sizes only; returns the bytes that activations_open will take on the device, infinite for more positions than can be
static double activations_layout(const Model* m, Activations* acts, int B, int T, Purpose purpose, Tradeoffs how) {
    const Qwen36* qwen = (const Qwen36*)m;
    const Config* c = &qwen->config;
    const ExpertSizes experts = expert_sizes(qwen, purpose, &how);
    activations_begin(acts, B, T, purpose, how);
    acts->eps = c->eps;
    acts->centred = c->D > c->HS ? c->D : c->HS;
    acts->has_states = config_layers(c, LINEAR_LAYER) > 0;
    acts->has_mtp = mtp_on_rank(m, purpose);
    acts->adapters = &qwen->adapters;
    if ((double)B * T > expert_most_positions(c->k)) { return INFINITY; }
    size_scratch(acts, qwen, B, T);
    const int n_tensors = activation_table(acts->tensors.table, qwen, B, T, purpose, &how);
    const int n_statistics = statistic_table(acts->statistics.table, qwen, B, T, purpose, &how);
    return activations_measure(acts, n_tensors, n_statistics, &experts, c->rotated, c->theta);
}

// ---- what stands where: parameters by their field of the table, at layer l ----

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

// has the batch at hand, or one of the texts that are generated, images?
static int has_images(const Qwen36* qwen) { return qwen->images.N > 0; }

static GqaPass attention_pass(const Qwen36* qwen, const Activations* acts, int l, int N) {
    const GqaSizes size = attention_sizes(&qwen->config);
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    GqaPass p = layer_gqa(acts, ATTENTION, &size, &a.attention, &s.attention, a.norm1, l, N);
    if (has_images(qwen)) { p.attention.rope = &qwen->images.rope, p.attention.by_position = 1; }
    return p;
}

// the linear mixer of layer l, without gradients
static DeltaPass delta_pass(const Qwen36* qwen, const Activations* acts, int l, int N) {
    const ActivationTensors a = layer_activations(acts, l);
    DeltaPass p;
    memset(&p, 0, sizeof p);
    p.size = delta_sizes(&qwen->config, acts->how.cp);
    p.a = a.delta, p.s = layer_statistics(acts, l).delta;
    p.inp = a.norm1;
    p.qkv = layer_linear(acts, AT(qkv), l), p.z = layer_linear(acts, AT(z), l), p.b = layer_linear(acts, AT(b), l);
    p.alpha = layer_linear(acts, AT(a), l), p.out = layer_linear(acts, AT(out), l);
    p.conv = layer_vector(acts, AT(conv), l), p.A_log = layer_vector(acts, AT(A_log), l);
    p.dt_bias = layer_vector(acts, AT(dt_bias), l), p.o_norm = layer_vector(acts, AT(o_norm), l);
    p.tp = &qwen->model.tp, p.room = acts->parallel.at;
    p.batch = &acts->batch;
    p.line = qwen->line;
    p.most_chunks = delta_most_chunks(acts->N / own_T(&acts->how, acts->T), own_T(&acts->how, acts->T), acts->purpose);
    p.N = N;
    return p;
}

static DeltaPass delta_pass_back(Qwen36* qwen, const Activations* acts, int l, int N) {
    DeltaPass p = delta_pass(qwen, acts, l, N);
    p.dqkv = layer_gradients(acts, AT(qkv), l), p.dz = layer_gradients(acts, AT(z), l);
    p.db = layer_gradients(acts, AT(b), l);
    p.dalpha = layer_gradients(acts, AT(a), l), p.dout = layer_gradients(acts, AT(out), l);
    p.dconv = layer_vector_gradient(acts, AT(conv), l), p.dA_log = layer_vector_gradient(acts, AT(A_log), l);
    p.ddt_bias = layer_vector_gradient(acts, AT(dt_bias), l), p.do_norm = layer_vector_gradient(acts, AT(o_norm), l);
    return p;
}

// router and experts of layer l, without gradients. The router of the MTP module has no say in the balance
static ExpertPass expert_pass(const Qwen36* qwen, Activations* acts, int l, int N) {
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    ExpertPass p = layer_experts(acts, EXPERTS, &a.experts, &s.experts, a.norm2, l, N);
    p.numbers = l < qwen->config.L ? layer_numbers(acts, l, qwen->config.E) : NULL;
    return p;
}

// ---- forward ----

// The first half of layer l: N positions, whose stream comes in as `residual`. replay: they have been here before, and
// what goes along rows is there
static void mixer_forward(const Qwen36* qwen, Activations* acts, int l, const floatX* residual, int replay, int N,
                          const Device* dev) {
    const Config* c = &qwen->config;
    const ActivationTensors a = layer_activations(acts, l);
    layer_rmsnorm_forward(acts, a.norm1, layer_statistics(acts, l).norm1_rstd, residual, AT(norm1), l, N, dev);
    if (c->kinds[l] == LINEAR_LAYER) {
        DeltaPass p = delta_pass(qwen, acts, l, N);
        if (replay) { p.line.before = p.line.behind = NULL; }
        delta_layer_forward(&p, a.branch, dev);
    } else {
        const GqaPass p = attention_pass(qwen, acts, l, N);
        gqa_layer_forward(&p, a.branch, dev);
    }
    residual_forward(a.residual2.x, residual, a.branch, (size_t)N * c->D, dev);
}

// the first products of the experts, once their rows are found, and of the shared one
static void gate_up_forward(const Qwen36* qwen, Activations* acts, int l, int N, const Device* dev) {
    const ActivationTensors a = layer_activations(acts, l);
    const ExpertPass p = expert_pass(qwen, acts, l, N);
    expert_gate_up(&p, dev);
    linear_forward(a.shared_gate_up, a.norm2, layer_linear(acts, AT(shared_gate_up), l), N, dev);
}

// the second half up to the products that are kept for backward. replay: these positions have chosen their experts
static void experts_up(const Qwen36* qwen, Activations* acts, int l, int replay, int N, const Device* dev) {
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const ExpertPass p = expert_pass(qwen, acts, l, N);
    layer_rmsnorm_forward(acts, a.norm2, s.norm2_rstd, a.residual2.x, AT(norm2), l, N, dev);
    expert_choose(&p, replay, dev);
    expert_gather(&p, dev);
    linear_forward(a.shared_logit, a.norm2, layer_linear(acts, AT(shared_gate), l), N, dev);
    row_gate_forward(s.shared_weight, a.shared_logit, N, dev);
    gate_up_forward(qwen, acts, l, N, dev);
}

// ... and from there on: what the experts of a token say, weighed, the shared one last, is added to the stream
static void experts_down(const Qwen36* qwen, Activations* acts, int l, int N, const Device* dev) {
    const Config* c = &qwen->config;
    const ActivationTensors a = layer_activations(acts, l);
    const ExpertPass p = expert_pass(qwen, acts, l, N);
    expert_down(&p, a.branch, dev);
    swiglu_forward(a.shared_hidden, a.shared_gate_up, 0.0f, N, c->FS, dev);
    linear_forward(a.shared_out, a.shared_hidden, layer_linear(acts, AT(shared_down), l), N, dev);
    row_gate_add(a.branch, a.shared_out, layer_statistics(acts, l).shared_weight, N, c->D, dev);
    residual_forward(a.residual3.x, a.residual2.x, a.branch, (size_t)N * c->D, dev);
    layer_keep(acts, l, a.residual2, a.residual3, N, c->D, dev);
}

// what texts have seen stands in place of their placeholders
static void sights_forward(const Qwen36* qwen, const Activations* acts, floatX* encoded, const Device* dev) {
    const int D = qwen->config.D;
    int first = 0;
    for (int i = 0; i < acts->batch.n_texts; i++) {
        const CachedText* text = &acts->batch.texts[i];
        const TextSight* sight = &qwen->sights[text->row];
        const int n = text->n - text->n_cached;
        floatX* to = encoded + (size_t)first * (size_t)D;
        if (sight->n > text->n_cached) {
            token_embedding_forward(to, qwen->images.to + first, sight->rows, n, D, dev);
        }
        first += n;
    }
}

// ---- the parts of a pass, which decoder_passes.h puts together ----

// where the stream of layer l is
static DecoderStreams streams(const Model* m, const Activations* acts, int l) {
    const ActivationTensors a = layer_activations(acts, l);
    const DecoderStreams x = {a.encoded, a.residual3, a.dresidual, ((const Qwen36*)m)->config.D};
    return x;
}

// the rows of the embedding, and of images in place of their placeholders
static void embed_forward(const Model* m, Activations* acts, int N, const Device* dev) {
    const Qwen36* qwen = (const Qwen36*)m;
    floatX* encoded = layer_activations(acts, 0).encoded;
    vocabulary_rows(encoded, acts->batch.tokens, layer_linear(acts, AT(embedding), 0), N, dev);
    if (!has_images(qwen)) { return; }
    if (acts->batch.n_texts > 0) { sights_forward(qwen, acts, encoded, dev); }
    else { image_splice_forward(encoded, vision_tower_forward(&qwen->tower, dev), &qwen->images, qwen->config.D, dev); }
}

static void block_forward(const Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev) {
    const Qwen36* qwen = (const Qwen36*)m;
    mixer_forward(qwen, acts, l, residual, 0, N, dev);
    experts_up(qwen, acts, l, 0, N, dev);
    experts_down(qwen, acts, l, N, dev);
}

// the last norm; the routers of all layers have counted
static void end_forward(const Model* m, Activations* acts, const floatX* residual, int N, const Device* dev) {
    const Qwen36* qwen = (const Qwen36*)m;
    const Config* c = &qwen->config;
    const ActivationTensors a = layer_activations(acts, 0);
    const RouterShape router = router_shape(c);
    if (acts->numbers) { router_pool(layer_numbers(acts, c->L, c->E), acts->numbers, c->L, &router, N, dev); }
    layer_rmsnorm_forward(acts, a.norm, layer_statistics(acts, 0).norm_rstd, residual, AT(norm), 0, N, dev);
}

// the field of the output matrix: the embedding where it is tied
static size_t output_field(const Config* c) { return c->tied ? AT(embedding) : AT(head); }

// from the last norm's output to logits and losses, head_rows positions at a time, and back to its gradient
static LmHead lm_head(const Model* m, const Activations* acts) {
    const Config* c = &((const Qwen36*)m)->config;
    const ActivationTensors a = layer_activations(acts, 0);
    floatX* dhidden = mtp_on_stage(m, acts->purpose) ? a.mtp.dhidden : a.dbranch;
    return layer_head(acts, output_field(c), a.norm, dhidden, a.logits, layer_statistics(acts, 0).losses, c->V);
}

// ---- backward: forward's calls upside down. A gradient whose pointer is NULL is of something frozen ----

// what the mixer of layer l never keeps
static void mixer_again(const Qwen36* qwen, const Activations* acts, int l, int N, const Device* dev) {
    if (qwen->config.kinds[l] == LINEAR_LAYER) {
        const DeltaPass p = delta_pass(qwen, acts, l, N);
        delta_layer_again(&p, dev);
    } else {
        const GqaPass p = attention_pass(qwen, acts, l, N);
        gqa_layer_again(&p, dev);
    }
}

// What --recompute left out of layer l, what is never kept, and which rows its experts have: of the last layer all is
// still there
static void recompute_block(const Model* m, Activations* acts, int l, const floatX* residual, int N,
                            const Device* dev) {
    const Qwen36* qwen = (const Qwen36*)m;
    const Config* c = &qwen->config;
    const int level = acts->how.recompute;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const ExpertPass experts = expert_pass(qwen, acts, l, N);
    if (layer_is_fresh(acts, l)) { return; }
    if (level == RECOMPUTE_BLOCKS) {
        mixer_forward(qwen, acts, l, residual, 1, N, dev);
        experts_up(qwen, acts, l, 1, N, dev);
        return;
    }
    layer_stream(acts, a.residual2, l, N, c->D, dev);
    if (level >= RECOMPUTE_NORMS) {
        layer_rmsnorm_forward(acts, a.norm1, s.norm1_rstd, residual, AT(norm1), l, N, dev);
        layer_rmsnorm_forward(acts, a.norm2, s.norm2_rstd, a.residual2.x, AT(norm2), l, N, dev);
    }
    mixer_again(qwen, acts, l, N, dev);
    expert_gather(&experts, dev);
    if (level >= RECOMPUTE_MLPS) { gate_up_forward(qwen, acts, l, N, dev); }
}

// The shared expert: dnorm2, which has what comes by way of the router, goes on
static void shared_backward(Qwen36* qwen, Activations* acts, int l, floatX* dnorm2, int N, const Device* dev) {
    const int FS = qwen->config.FS;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const Linear down = layer_linear(acts, AT(shared_down), l);
    linear_backward_input(a.dshared_hidden, a.dresidual, down, 0, N, dev);
    swiglu_backward_gathered(a.shared_gate_up, a.shared_hidden, s.dshared_weight, a.dshared_hidden, a.shared_gate_up,
                             s.shared_weight, N, FS, acts->parallel.at, &qwen->model.tp, dev);
    linear_backward_weight(a.dresidual, a.shared_hidden, down, layer_gradients(acts, AT(shared_down), l), N, dev);
    row_gate_backward(a.dshared_logit, s.dshared_weight, s.shared_weight, N, dev);
    linear_backward(dnorm2, a.dshared_logit, a.norm2, layer_linear(acts, AT(shared_gate), l),
                    layer_gradients(acts, AT(shared_gate), l), 1, N, dev);
    linear_backward(dnorm2, a.shared_gate_up, a.norm2, layer_linear(acts, AT(shared_gate_up), l),
                    layer_gradients(acts, AT(shared_gate_up), l), 1, N, dev);
}

// From dresidual, the gradient of the stream behind layer l, to that of norm2, dbranch. The balance of all routers
// together pulls on each of them alike
static void experts_backward(Qwen36* qwen, Activations* acts, int l, int N, const Device* dev) {
    const Config* c = &qwen->config;
    const ActivationTensors a = layer_activations(acts, l);
    ExpertPass p = expert_pass(qwen, acts, l, N);
    layer_experts_back(&p, acts, EXPERTS, l);
    const int is_balanced = l < c->L;  // not the router of the MTP module
    expert_backward_router(&p, a.dbranch, a.dresidual, is_balanced ? layer_numbers(acts, c->L, c->E) : NULL,
                           is_balanced ? pooled_weight(&qwen->model, c->balance, c->k, c->L) : 0.0f, 0.0f, dev);
    shared_backward(qwen, acts, l, a.dbranch, N, dev);
    expert_backward_rows(&p, a.dbranch, dev);
}

// from dresidual, the gradient of the stream behind the mixer of layer l, to that of norm1, dbranch
static void mixer_backward(Qwen36* qwen, Activations* acts, int l, int N, const Device* dev) {
    const ActivationTensors a = layer_activations(acts, l);
    if (qwen->config.kinds[l] == LINEAR_LAYER) {
        const DeltaPass p = delta_pass_back(qwen, acts, l, N);
        delta_layer_backward(&p, a.dbranch, a.dresidual, dev);
    } else {
        const GqaPass p = attention_pass(qwen, acts, l, N);
        gqa_layer_backward(&p, a.dbranch, a.dresidual, dev);
    }
}

// dresidual goes from the stream behind layer l to the one before it, which came in as `residual`
static void block_backward(Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev) {
    Qwen36* qwen = (Qwen36*)m;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    experts_backward(qwen, acts, l, N, dev);
    layer_rmsnorm_backward(acts, a.dresidual, a.dbranch, a.residual2.x, s.norm2_rstd, AT(norm2), l, 1, N, dev);
    mixer_backward(qwen, acts, l, N, dev);
    layer_rmsnorm_backward(acts, a.dresidual, a.dbranch, residual, s.norm1_rstd, AT(norm1), l, 1, N, dev);
}

// From the gradient of the first layer's stream to those of the tower, if any of it learns; without images they are 0
static void images_backward(Qwen36* qwen, Activations* acts, const Device* dev) {
    const ActivationTensors a = layer_activations(acts, 0);
    if (!qwen->config.has_vision || !vision_tower_learns(&qwen->tower)) { return; }
    if (has_images(qwen)) {
        image_splice_backward(a.branch, a.dresidual, &qwen->images, qwen->config.D, dev);
        vision_tower_backward(&qwen->tower, a.branch, dev);
    } else {
        vision_tower_nothing(&qwen->tower, dev);
    }
}

// from dresidual to the gradients of the embedding and of the tower
static void embed_backward(Model* m, Activations* acts, int N, const Device* dev) {
    Qwen36* qwen = (Qwen36*)m;
    const int* tokens = has_images(qwen) ? qwen->images.tokens : acts->batch.tokens;
    vocabulary_embedding_backward(m, AT(embedding), qwen->config.tied || m->learns_mtp,
                                  layer_activations(acts, 0).dresidual, tokens, layer_linear(acts, AT(embedding), 0), N,
                                  dev);
    images_backward(qwen, acts, dev);
}

// ---- the module that predicts the token after the next ----

// where it is; its layer stands behind all others
static MtpModule mtp_module(const Model* m, const Activations* acts) {
    static const MtpFields fields = {AT(embedding), AT(mtp_next_norm), AT(mtp_hidden_norm), AT(mtp_fc), AT(mtp_norm)};
    const Qwen36* qwen = (const Qwen36*)m;
    const Config* c = &qwen->config;
    const ActivationTensors a = layer_activations(acts, c->L);
    MtpModule x;
    memset(&x, 0, sizeof x);
    x.fields = fields, x.a = a.mtp, x.s = layer_statistics(acts, c->L).mtp;
    x.head = lm_head(m, acts);
    x.behind = a.residual3.x;
    x.room = a.branch, x.dbranch = a.dbranch, x.dresidual = a.dresidual;
    x.images = has_images(qwen) ? &qwen->images : NULL;
    if (x.images) { x.image_rows = qwen->images.rows ? qwen->images.rows : vision_tower_out(&qwen->tower); }
    x.weight = c->mtp_weight, x.is_tied = c->tied;
    x.C = c->D;
    return x;
}

// from the head's gradient to that of the stream behind the last layer
static void end_backward(const DecoderPasses* passes, Model* m, Activations* acts, int N, const Device* dev) {
    const int last = mtp_trunk_end(m) - 1;
    const ActivationTensors a = layer_activations(acts, last);
    if (mtp_on_stage(m, acts->purpose)) {
        const MtpModule x = mtp_module(m, acts);
        mtp_module_leaf(&x, passes, acts, N, dev);
    }
    const floatX* residual = layer_stream(acts, a.residual3, last, N, ((Qwen36*)m)->config.D, dev);
    layer_rmsnorm_backward(acts, a.dresidual, lm_head(m, acts).dnorm, residual, layer_statistics(acts, 0).norm_rstd,
                           AT(norm), 0, 0, N, dev);
}

// for runs and tests
static const DecoderPasses PASSES = {activations_layout, streams,      embed_forward,   block_forward,  end_forward,
                                     lm_head,            end_backward, recompute_block, block_backward, embed_backward};

// ---- images of a batch, of texts ----

// how its texts have images; axis has room for that of each pair
static ImageText image_text(const Config* c, int* axis) {
    const ImageText text = {{c->image_token, c->video_token}, c->vision.merge, c->rotated, c->theta, axis, 0, 0};
    for (int i = 0; i < c->rotated / 2; i++) { axis[i] = config_axis(c, i); }
    return text;
}

// What images the batch (B, T) has that comes next, and those after it, until this is called again; NULL: none. Without
// pixels: this rank has no tower. document_start: documents.h. 0 with the reason
static int qwen36_images(Qwen36* qwen, const ImageRows* x, const int* inputs, const int* targets, int document_start,
                         int B, int T, const Device* dev, ErrorText* error) {
    const Config* c = &qwen->config;
    int axis[CONFIG_MOST_HEAD / 2];
    Segments segments;
    if (!x) {
        image_splice_free(&qwen->images);
        return 1;
    }
    ImageText text = image_text(c, axis);
    if (x->n_frames == 0) { text.placeholders[1] = -1; }  // what stands for videos is a token as others
    text.ahead = qwen->model.learns_mtp ? c->D : 0;
    text.is_far = !x->pixels;
    if (!image_rows_check(x, &c->vision, error)) { return 0; }
    segments_init(&segments, B, T);
    segments.document_start = document_start;
    segments_find_marked(&segments, inputs, targets, B, T);
    const int good = image_splice_take(&qwen->images, inputs, &segments, B, T, x, &text, dev, error);
    free(segments.at);
    if (good && x->pixels) { vision_tower_take(&qwen->tower, x, dev); }
    return good;
}

// where the new positions of texts are, if any of these has seen images
static void qwen36_place_texts(Qwen36* qwen, const CachedText* texts, int n_texts, const Device* dev) {
    const Config* c = &qwen->config;
    const int N = cached_texts_new(texts, n_texts);
    int axis[CONFIG_MOST_HEAD / 2], seen = 0;
    const ImageText text = image_text(c, axis);
    for (int i = 0; i < n_texts; i++) { seen |= qwen->sights[texts[i].row].n_images; }
    image_splice_free(&qwen->images);
    if (!seen) { return; }
    int *positions = (int*)malloc_check(4 * sizeof(int) * (size_t)N, "positions of texts"), *to = positions + 3 * N;
    for (int i = 0, first = 0; i < n_texts; i++) {
        text_sight_fill(&qwen->sights[texts[i].row], positions, to, N, first, texts[i].n_cached, texts[i].n);
        first += texts[i].n - texts[i].n_cached;
    }
    image_splice_place(&qwen->images, positions, to, to, to, N, 0, &text, dev);
    free(positions);
}

// ---- of an update, once model_reduce is back ----

// what is added to the loss: the MTP module's, and that of the routers
static float more_loss(const Qwen36* qwen) {
    const Config* c = &qwen->config;
    const float balance = pooled_loss(&qwen->model, c->balance, c->k, c->L, c->E);
    return qwen->model.learns_mtp ? c->mtp_weight * mtp_loss(&qwen->model) + balance : balance;
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. What a run asks of this model (llmc/run/trainer.h), and main.

#ifndef TESTING
typedef struct {
    Qwen36 qwen;              // first
    Adapted adapted;          // activations, adapters, and options of both
    int tied, head_alone;     // head_alone: the file has a tied matrix under the name of the head
    MtpOptions mtp;
    int vision;
    VisionRun images;         // of conversations
    float aux_alpha;
} Workplace;

static Workplace* workplace(const Run* r) { return (Workplace*)r->model; }
static const Config* config_of(const Run* r) { return &workplace(r)->qwen.whole; }

// all linear layers but in_proj_a and in_proj_b, which have an output a head, and shared_expert_gate, which has one
#define LORA_TARGETS "q_proj,k_proj,v_proj,o_proj,in_proj_qkv,in_proj_z,out_proj,gate_proj,up_proj,down_proj"

static void qwen36_options(Run* r) {
    Workplace* w = workplace(r);
    const Option own[] = {
        decoder_tied_option(&w->tied, "1"),
        decoder_balance_option(&w->aux_alpha),
        {"model", "vision", "", OPTION_SWITCH, &w->vision, "0", 0, 0, "0|1",
         "the tower that reads images: 0 leaves it out. Where it is not typed, as the files have it", OPTION_BEGINS},
    };
    run_add_options(r, own, sizeof own);
    decoder_options(r, DECODER_RECOMPUTE("the experts' first products too"), "1024", 1, 1);
    mtp_options(r, &w->mtp);
    vision_options(r, &w->images);
    options_reword(r->table, r->n_options, "cp", "share the positions of every row among groups of C ranks, for rows "
                   "that are too long for one: each hands the states at its end to the next. Needs a multiple of C "
                   "ranks, and rows of a multiple of 64C positions. Brings --zero 2. Sums over positions are made of "
                   "C parts: with another C the last digits differ");
    experts_options(r, &w->adapted.decoder.how.ep);
    adapted_options(r, &w->adapted);
    options_reword(r->table, r->n_options, "lora-targets", "linear layers that get one: ends of their names, "
                   "'q_proj,v_proj', or a regular expression of the whole name; all-linear; empty: all but gates "
                   "of a head or less, in_proj_a, in_proj_b, shared_expert_gate; none with --lora-parameters");
    options_reword(r->table, r->n_options, "config", "random start from a config.json of Qwen3.6, with sizes of your "
                   "own: doc/qwen36.md lists its keys");
}

static void qwen36_choose(Run* r) {
    Workplace* w = workplace(r);
    const int from_preset = !*r->config;
    const size_t not_fp8[] = {AT(embedding), AT(router), AT(shared_gate), AT(a), AT(b)};
    Adapters adapters;
    Tensor base[MAX_PARAMETERS];
    SafeSet set;
    if (*r->weights && from_preset) { fail_input("%s: expected a model with its config.json", r->o.from); }
    Config c = from_preset ? config_preset(r->o.model, run_new_vocabulary(r)) : config_load(r->config);
    decoder_choose_tied(r, w->tied, &c.tied);
    if (*r->weights) {
        safeset_open(&set, r->weights);
        w->head_alone = config_fit(&c, &set);
        adapted_base(r, &set);
        safeset_close(&set);
    }
    mtp_typed(r, &w->mtp, &c.mtp, &c.mtp_weight);
    if (w->mtp.is_new) { c.mtp_fused = c.fused; }
    options_refuse(run_is_typed(r, "vision") && w->vision && !c.has_vision, "vision",
                   "1 is for a config.json with vision_config and, of a folder, its tensors");
    if (run_is_chosen(r, "vision")) { c.has_vision = w->vision; }
    options_refuse(!c.has_vision && w->images.max_pixels > 0, "image-max-pixels", "is for a model that reads images");
    if (!*r->weights) { c.is_nested = c.has_vision; }
    options_set(r->table, r->n_options, "vision", c.has_vision ? "1" : "0");
    if (run_is_chosen(r, "aux-alpha")) { c.balance = w->aux_alpha; }
    options_set(r->table, r->n_options, "aux-alpha", format_float(c.balance).s);
    options_set(r->table, r->n_options, "tied", c.tied ? "1" : "0");
    const int is_adapter = adapted_choose(r, &adapters, base, parameter_table(base, &c));
    const int learns_mtp = mtp_choose(r, &w->mtp, c.mtp, c.mtp_weight, is_adapter);
    qwen36_layout(&w->qwen, &c, is_adapter ? &adapters : NULL, learns_mtp);
    adapted_store(r, not_fp8, 5);
    if (c.has_vision) { vision_tower_store(&w->qwen.tower); }
    r->V = r->classes = c.V;
    r->max_T = c.max_T;
    DecoderSizes sizes = decoder_sizes(c.Vp, c.D, AT(embedding), c.tied, c.E, c.k);
    if (config_layers(&c, LINEAR_LAYER) > 0) { sizes.cp_unit = DELTA_CHUNK; }
    decoder_begin_ranks(r, &sizes);
    w->qwen.config = config_part(&c, r->model->tp.size);
}

static int has_image_data(const Run* r) { return r->data.train.images.n + r->data.val.images.n > 0; }

// has this rank the tower of a model that reads images? With --pp the first stage's have
static int has_tower(const Run* r) {
    return config_of(r)->has_vision && (!model_has_pp(r->model) || pp_has_first(&r->model->pp));
}

// Of a model with a tower
static const ImageMeasure* qwen36_image_measure(Run* r) {
    VisionRun* v = &workplace(r)->images;
    const Config* c = config_of(r);
    if (!c->has_vision) { return NULL; }
    vision_run_init(v, r, &c->vision, c->image_token);
    v->grids_alone = !has_tower(r);
    return &v->measure;
}

// the data are known now
static void qwen36_check_images(Run* r) {
    const Config* c = config_of(r);
    Model* m = r->model;
    options_refuse(has_image_data(r) && workplace(r)->adapted.decoder.graph, "graph", "is not for images");
    options_refuse(has_image_data(r) && model_has_cp(m), "cp", "is not for conversations with images: leave it out");
    if (!c->has_vision || r->data.train.images.n > 0) { return; }
    for (int i = 0; i < m->n_table; i++) {
        if (parameter_is_vision(&m->table[i])) { model_freeze(m, &m->table[i]); }
    }
    model_find_lowest(m);
}

static double qwen36_flops_per_token(const Run* r);

// of a position, on average over the training data
static double qwen36_image_flops(const Run* r) {
    const TokenImages* images = &r->data.train.images;
    const VisionTower* tower = &workplace(r)->qwen.tower;
    if (images->n == 0) { return 0.0; }
    const int block = vision_block(&tower->c);
    const double patches = (double)block * (double)token_images_placeholders(images) / (double)images->n;
    return block * vision_run_share(r) * vision_tower_flops(tower, patches);
}

// With --pp the tower is the first stage's work. MTP reads its rows on the last one; what it asks of them comes back
static void qwen36_share_images(Run* r) {
    PpRanks* pp = &r->model->pp;
    const double share = model_has_pp(r->model) ? qwen36_image_flops(r) / qwen36_flops_per_token(r) : 0.0;
    pp->work = pp->work * (1.0 - share) + (pp_has_first(pp) ? share : 0.0);
    if (!r->model->learns_mtp || r->data.train.images.n == 0) { return; }
    const double rows = vision_run_share(r) * run_positions(r) * config_of(r)->D;
    pp->row_bytes[0] = sizeof(floatX) * rows;
    pp->row_bytes[1] = vision_tower_learns(&workplace(r)->qwen.tower) ? pp->row_bytes[0] : 0.0;
}

static void qwen36_check(Run* r) {
    const Config* own = &workplace(r)->qwen.config;  // of this rank
    qwen36_check_images(r);
    adapted_check(r);
    mtp_check(r);
    decoder_check(r, adapted_varies(r), own->NH, own->NKV);
    qwen36_share_images(r);
}

// does a row of the table belong to what stands beside the model of the text?
static int is_beside(const Tensor* t) { return parameter_is_mtp(t) || parameter_is_vision(t); }

// of the model's rows those before the MTP module's and the tower's
static int trunk_rows(const Run* r) {
    return mtp_rows_before(r->model, workplace(r)->qwen.adapters.n_table, is_beside);
}

// those behind them that are the MTP module's
static int mtp_rows(const Run* r) {
    int n = 0;
    for (int i = 0; i < r->model->n_table; i++) { n += parameter_is_mtp(&r->model->table[i]); }
    return n;
}

static void qwen36_freeze(Run* r) { mtp_freeze(r->model, parameter_is_mtp); }

static void qwen36_take_images(Run* r, const ProbeBatch* x) {
    const ImageRows images = {x->n_images, x->grids, x->pixels, x->P, x->n_frames};
    const Config* c = config_of(r);
    ErrorText error;
    if (x->n_images > 0 && !c->has_vision) { fail_input("%s: this model reads no images", r->o.probe); }
    for (int i = 0; i < x->B * x->T && c->has_vision; i++) {
        const int is_image = x->inputs[i] == c->image_token, is_video = x->inputs[i] == c->video_token;
        if (!(is_image && x->n_images == x->n_frames) && !(is_video && x->n_frames == 0)) { continue; }
        fail_input("%s: inputs[%d] stands for %s: expected %s, found none", r->o.probe, i,
                   is_image ? "an image" : "a video", is_image ? "pixel_values and image_grid_thw"
                                                               : "pixel_values_videos and video_grid_thw");
    }
    if (x->n_images > 0 && x->columns != vision_columns(&c->vision)) {
        fail_input("%s: expected pixel values of %d numbers for each patch, found %d", r->o.probe,
                   vision_columns(&c->vision), x->columns);
    }
    if (!qwen36_images(&workplace(r)->qwen, x->n_images > 0 ? &images : NULL, x->inputs, x->targets, NO_RESET, x->B,
                       x->T, &r->dev, &error)) {
        fail_input("%s: %s", r->o.probe, error.text);
    }
}

static void qwen36_images_of_rows(Run* r, const DataLoader* rows, int64_t first, const int* inputs, const int* targets,
                                  int B, int T) {
    Workplace* w = workplace(r);
    ImageRows x;
    ErrorText error;
    if (!config_of(r)->has_vision) { return; }
    const int n = rows ? vision_run_rows(&w->images, &x, rows, first, B) : 0;
    if (!qwen36_images(&w->qwen, n > 0 ? &x : NULL, inputs, targets, run_document_start(r, TO_TRAIN), B, T, &r->dev,
                       &error)) {
        fail_run("%s", error.text);
    }
}

// With --pp each micro-batch whose backward pass is still to come has images. A tower that does not learn is done with
// them when its rows stand in the text, if no MTP module asks for these
static int waiting_towers(const Run* r) {
    const int waits = vision_tower_learns(&workplace(r)->qwen.tower) || r->model->pp.row_bytes[0] > 0.0;
    return has_tower(r) && waits ? pp_kept(r) : 1;
}

static void open_waiting_images(Run* r, int most) {
    Qwen36* qwen = &workplace(r)->qwen;
    const size_t n_bytes = sizeof(WaitingImages) * (size_t)pp_kept(r);
    qwen->n_waiting = pp_kept(r);
    qwen->waiting = (WaitingImages*)memset(malloc_check(n_bytes, "images under way"), 0, n_bytes);
    for (int i = 1; i < waiting_towers(r); i++) {
        qwen->waiting[i].tower = qwen->tower;
        vision_tower_room(&qwen->waiting[i].tower, most);
    }
}

static void qwen36_turn_images(Run* r, int kept) {
    Qwen36* qwen = &workplace(r)->qwen;
    if (!qwen->waiting || kept == qwen->at_hand) { return; }
    WaitingImages *was = &qwen->waiting[qwen->at_hand], *now = &qwen->waiting[kept];
    was->images = qwen->images, qwen->images = now->images;
    if (waiting_towers(r) > 1) { was->tower = qwen->tower, qwen->tower = now->tower; }
    qwen->at_hand = kept;
}

// for the MTP module, rows that the tower of the first stage has made; back: what is asked of them, if it learns
static void qwen36_swap_rows(Run* r, int kept, int back) {
    const Qwen36* qwen = &workplace(r)->qwen;
    const PpRanks* pp = &r->model->pp;
    const int is_at_hand = kept == qwen->at_hand;
    const ImageSplice* s = is_at_hand ? &qwen->images : &qwen->waiting[kept].images;
    const VisionTower* tower = is_at_hand ? &qwen->tower : &qwen->waiting[kept].tower;
    if (s->N == 0 || (back && !vision_tower_learns(&qwen->tower))) { return; }
    floatX* rows = back ? s->dnext : s->rows ? s->rows : (floatX*)vision_tower_out(tower);
    pp_swap_rows(pp, rows, pp_has_first(pp) != back, s->dnext_bytes, &r->dev);
}

// activations, with room for the images of as many rows as are computed at once; those of texts find their room when
// they come
static void qwen36_open(Run* r, Purpose purpose, int B, int T) {
    Qwen36* qwen = &workplace(r)->qwen;
    VisionTower* tower = &qwen->tower;
    if (model_has_cp(r->model) && purpose != TO_GENERATE) {
        qwen->line = carried_line_init(model_sharing(r->model, r->comm), &r->model->cp);
    }
    decoder_open(r, purpose, B, T);
    if (!config_of(r)->has_vision || *r->o.probe) { return; }
    tower->evaluates = !run_is_training(r);
    if (purpose == TO_GENERATE) {
        const size_t n_bytes = sizeof(TextSight) * (size_t)B;
        qwen->sights = (TextSight*)memset(malloc_check(n_bytes, "images of texts"), 0, n_bytes);
        qwen->n_sights = B;
        return;
    }
    const int most = (int)vision_run_patches(r, &config_of(r)->vision, B);
    if (model_has_pp(r->model) && most > 0) { open_waiting_images(r, most); }
    if (has_tower(r)) { vision_tower_room(tower, most); }
}

// the images of a text that it has not seen yet
static void qwen36_see(Run* r, TextSight* sight, const TextImages* images) {
    Workplace* w = workplace(r);
    VisionTower* tower = &w->qwen.tower;
    const int merge = config_of(r)->vision.merge, D = config_of(r)->D;
    ImageRows x;
    while (sight->n_images < images->n) {
        vision_run_file(&w->images, &x, &images->of[sight->n_images]);
        if (x.pixels) { vision_tower_take(tower, &x, &r->dev); }
        text_sight_add(sight, x.pixels ? vision_tower_forward(tower, &r->dev) : NULL, x.grids[1] / merge,
                       x.grids[2] / merge, D, &r->dev);
    }
    text_sight_place(sight, images);
}

static const floatX* qwen36_next_of_each(Run* r, const CachedText* texts, int n_texts, size_t* row) {
    Qwen36* qwen = &workplace(r)->qwen;
    for (int i = 0; i < n_texts && qwen->sights; i++) {
        TextSight* sight = &qwen->sights[texts[i].row];
        const TextImages* images = texts[i].images;
        if (texts[i].n_cached == 0) { text_sight_clear(sight, config_of(r)->D); }
        if (images && images->n > sight->n_images) { qwen36_see(r, sight, images); }
    }
    if (qwen->sights) { qwen36_place_texts(qwen, texts, n_texts, &r->dev); }
    return decoder_next_of_each(r, texts, n_texts, row);
}

static void qwen36_share_text(Run* r, int to, int from, int n) {
    Qwen36* qwen = &workplace(r)->qwen;
    decoder_share_text(r, to, from, n);
    if (qwen->sights) { text_sight_share(&qwen->sights[to], &qwen->sights[from], config_of(r)->D, &r->dev); }
}

static double qwen36_activation_bytes(const Run* r, Purpose purpose, int B, int T, int sparing) {
    VisionTower tower = workplace(r)->qwen.tower;
    const double text = decoder_activation_bytes(r, purpose, B, T, sparing);
    if (!config_of(r)->has_vision || purpose == TO_GENERATE || *r->o.probe) { return text; }
    tower.evaluates = !run_is_training(r);
    const double patches = vision_run_patches(r, &config_of(r)->vision, B);
    const double n_towers = !has_tower(r) ? 0.0 : purpose == TO_TRAIN && run_is_training(r) ? waiting_towers(r) : 1.0;
    return text + n_towers * vision_tower_bytes(&tower, patches) +
           vision_run_bytes(&workplace(r)->images, &config_of(r)->vision, patches);
}

// with --cp, of rank 0, which has the first positions: what a linear layer hands on
static double layer_states_sent(const Run* r, int l, int is_back, int again) {
    const Config* c = &workplace(r)->qwen.config;
    const DeltaSizes delta = delta_sizes(c, &r->model->cp);
    (void)is_back, (void)again;
    return c->kinds[l] == LINEAR_LAYER ? delta_layer_hands_on(&delta, r->o.batch_size, 0) : 0.0;
}

static double states_sent(const Run* r) { return sent_layers(r, layer_states_sent) * pp_own_batches(r); }

// ... and what attention and the router do besides, but for the MTP module's
static double layer_keys_sent(const Run* r, int l, int is_back, int again) {
    const Config* c = &workplace(r)->qwen.config;
    const double counts = l < c->L ? experts_count_sent(r, c->E, 0) : 0.0;
    if (c->kinds[l] == LINEAR_LAYER) { return counts + layer_states_sent(r, l, is_back, again); }
    return counts + cp_layer_sent(r, c->NH, c->NKV, c->HS, is_back, again && decoder_recomputes(r));
}

static void qwen36_box(const Run* r) {
    const Config* c = config_of(r);
    const int n_linear = config_layers(c, LINEAR_LAYER), n_full = c->L - n_linear;
    box_row("model", "%d layer%s of %d channels, %d positions", c->L, c->L > 1 ? "s" : "", c->D, c->max_T);
    if (n_linear > 0) {
        box_row("  linear", "%d, %d head%s of %d for %d of keys of %d, %d taps", n_linear, c->Hv,
                c->Hv > 1 ? "s" : "", c->DV, c->Hk, c->DK, c->K);
    }
    if (n_full > 0) {
        box_row("  attention", "%d, %d head%s of %d for %d of keys and values, %d channels turn", n_full, c->NH,
                c->NH > 1 ? "s" : "", c->HS, c->NKV, c->rotated);
    }
    box_row("experts", "%d in a layer, %d wide, a token takes %d and one for all, %d wide", c->E, c->FE, c->k, c->FS);
    experts_box(r, c->E);
    mtp_box(r, &workplace(r)->mtp, parameter_is_mtp);
    if (c->has_vision) {
        const int is_frozen = run_is_training(r) && !vision_tower_learns(&workplace(r)->qwen.tower);
        box_row("vision", "%d blocks of %d channels, %s parameters%s", c->vision.depth, c->vision.C,
                format_count(decoder_count(r->model, parameter_is_vision)).s,
                is_frozen ? ", which stay as they are" : "");
    }
    if (run_is_training(r) || *r->o.probe) { experts_balance_box("none", c->balance, "", ""); }
    decoder_active_box(r, workplace(r)->qwen.adapters.n_table + trunk_rows(r));
    box_row("vocabulary", "%d, padded to %d%s", c->V, c->Vp, c->tied ? ", tied" : "");
    adapted_box(r, c->tied);
    decoder_ranks_box(r);
    if (model_has_cp(r->model) && run_is_training(r) && n_linear > 0) {
        box_row("  states among them", "%s by all but the last, as much back by all but the first",
                format_bytes(pp_sum(r, states_sent)).s);
    }
}

// what stands beside the text is drawn by itself: the rest begins as it does without
static void qwen36_load(Run* r, const SliceSink* sink) {
    const Workplace* w = workplace(r);
    Model* m = r->model;
    Tensor *base = m->table + w->qwen.adapters.n_table, *mtp = base + trunk_rows(r), *end = m->table + m->n_table;
    Tensor* vision = mtp + mtp_rows(r);
    SafeSet set;
    adapted_load(r, sink);
    if (config_of(r)->has_vision) { vision_run_save(r, &config_of(r)->vision); }
    if (!*r->weights) {
        tensors_init_into(sink, base, (int)(mtp - base), (uint32_t)r->o.seed);
        mtp_load(r, &w->mtp, sink, NULL, mtp, (int)(vision - mtp));
        tensors_init_into(sink, vision, (int)(end - vision), (uint32_t)splitmix64((uint64_t)r->o.seed, 1));
        return;
    }
    safeset_open(&set, r->weights);
    tied_head_load(sink, &set, base, (int)(mtp - base), &m->table[model_row(m, AT(embedding), 0)], config_of(r)->tied,
                   w->head_alone);
    mtp_load(r, &w->mtp, sink, &set, mtp, (int)(vision - mtp));
    tensors_load_into(sink, &set, vision, (int)(end - vision), "", NULL);
    config_leave_rest(config_of(r), &set);
    safeset_report_unused(&set);
    safeset_close(&set);
}

static void qwen36_close(Run* r) {
    Qwen36* qwen = &workplace(r)->qwen;
    carried_line_free(&qwen->line);
    vision_tower_free(&qwen->tower);
    for (int i = 0; i < qwen->n_waiting; i++) {
        if (i == qwen->at_hand) { continue; }
        image_splice_free(&qwen->waiting[i].images);
        vision_tower_free(&qwen->waiting[i].tower);
    }
    free(qwen->waiting);
    vision_run_free(&workplace(r)->images);
    image_splice_free(&qwen->images);
    for (int i = 0; i < qwen->n_sights; i++) { text_sight_clear(&qwen->sights[i], qwen->config.D); }
    free(qwen->sights);
    decoder_close(r);
}

// with --tp: what layer l needs of other ranks
static double layer_parts_sent(const Run* r, int l, int is_back, int again) {
    const Qwen36* qwen = &workplace(r)->qwen;
    const Model* m = r->model;
    const Config* c = config_of(r);
    const GqaSizes attention = attention_sizes(&qwen->config);
    const int N = run_positions(r), is_linear = c->kinds[l] == LINEAR_LAYER, replays = again && decoder_recomputes(r);
    const size_t once_more = !replays ? TENSOR_NO_FIELD : is_linear ? AT(out) : AT(wo);
    double n = linear_layer_sends(m, &qwen->adapters, l, once_more, is_linear ? 4 : 3, c->D, N);
    if (!is_linear) { n += gqa_layer_sends(&attention, ATTENTION, m, l, 1 + replays, is_back, N); }
    if (is_back) {
        n += swiglu_sends(N, c->FS, &m->tp);
        n += heads_sends(m, AT(o_norm), l, c->Hv, c->DV, &m->tp, N);
    }
    return l < c->L ? n : n + mtp_module_sends(m, c->D, N);
}

static double qwen36_flops_per_token(const Run* r) {
    const Config* c = config_of(r);
    const int n_full = config_layers(c, FULL_LAYER) + r->model->learns_mtp;
    const double attention = n_full * decoder_attention_flops(c->NH * c->HS, 0, r->T);
    const double rule = config_layers(c, LINEAR_LAYER) * delta_layer_flops(c->Hv, c->DK, c->DV);
    const int n_mtp = r->model->learns_mtp ? mtp_rows(r) : 0;
    const int n = workplace(r)->qwen.adapters.n_table + trunk_rows(r) + n_mtp;
    double head = 0.0;  // a second time
    if (r->model->learns_mtp) { head = model_flops(r->model, model_row(r->model, output_field(c), 0)); }
    return attention + rule + head + decoder_flops(r, n) + qwen36_image_flops(r);
}

static double workspace_bytes(const Run* r, int B) {
    const Config* c = config_of(r);
    const DeltaShape rule = {B, r->T / r->model->cp.size, c->Hk, c->Hv, c->DK, c->DV, NULL};
    const double attention = decoder_attention_bytes(r, B, c->NH * c->HS, c->NH);
    return fmax(fmax(decoder_workspace_bytes(r, B), attention), (double)delta_workspace_bytes(&rule, r->dev.n_threads));
}

static float losses_beside(Run* r, float* grads) {
    (void)grads;
    return more_loss(&workplace(r)->qwen);
}

static void qwen36_stepped(Run* r, const Step* s) {
    const Model* m = r->model;
    const Config* c = config_of(r);
    const Routing now = routing_read(m, c->L, c->E);
    const float z = now.z / (float)c->L;
    (void)s;
    router_log_step(r, pooled_balance(m, c->L, c->E), &z, now.load, now.idle);
    mtp_log(r);
}

static json_t* qwen36_summary(const Run* r) {
    return router_log_summary(r, NULL, 0, config_of(r)->L, config_of(r)->E);
}

static json_t* config_to_save(const Run* r, int eot, const char* dtype) {
    return config_json(config_of(r), eot, dtype);
}

static Trainer qwen36_trainer(void) {
    Trainer t = adapted_trainer(offsetof(Workplace, adapted));
    t.name = "train_qwen36";
    t.on_gpus = "train_qwen36 CUDA=1";
    t.about = "Trains Qwen3.6, linear attention, attention and experts, from and to Hugging Face folders. "
              "First steps: make run-qwen36.";
    t.presets = "random start from a preset: " QWEN36_PRESETS;
    t.usual_V = 248320;
    t.has_states = 1;
    t.options = qwen36_options;
    t.parsed = router_log_keys;
    t.choose = qwen36_choose;
    t.freeze = qwen36_freeze;
    t.image_measure = qwen36_image_measure;
    t.images = qwen36_take_images;
    t.images_of_rows = qwen36_images_of_rows;
    t.turn_images = qwen36_turn_images;
    t.swap_rows = qwen36_swap_rows;
    t.open = qwen36_open;
    t.next_of_each = qwen36_next_of_each;
    t.share_text = qwen36_share_text;
    t.activation_bytes = qwen36_activation_bytes;
    t.close = qwen36_close;
    t.check = qwen36_check;
    t.box = qwen36_box;
    t.layer_parts_sent = layer_parts_sent;
    t.layer_keys_sent = layer_keys_sent;
    t.flops_per_token = qwen36_flops_per_token;
    t.workspace_bytes = workspace_bytes;
    t.load = qwen36_load;
    t.stepped = qwen36_stepped;
    t.more_loss = losses_beside;
    t.config_json = config_to_save;
    t.summary = qwen36_summary;
    return t;
}

int main(int argc, char** argv) {
    static Workplace place;  // all zero
    const Trainer trainer = qwen36_trainer();
    adapted_init(&place.adapted, &PASSES, &place.qwen.adapters, LORA_TARGETS);
    return run_main(&trainer, &place.qwen.model, argc, argv);
}
#endif
