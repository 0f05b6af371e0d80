/*
GLM-5, GLM-5.1 and GLM-5.2: attention whose keys and values are made of one short vector for each token (MLA), over the
tokens that an indexer chooses (DSA), and experts. From a Hugging Face folder to a Hugging Face folder. Read
train_moe.cu first: experts, and what a run does beside the model, are explained there.

The model (doc/glm5.md): token embedding, L blocks of
    r = r + attention(norm(r))   latent_layer.h; layers without an indexer see what the last one before them that has
                                 one has chosen (IndexShare)
    r = r + mlp(norm(r))         in the first layers one MLP; then k of E experts, weighed, and the shared one
a last norm, and the output matrix. A module behind the last norm may learn to predict the token after the next (MTP).

One file for both kinds of machine: a C compiler builds it for CPUs, exact; nvcc for GPUs.
    make run-glm5                trains a small one on this repository's own text
    make train_glm5              for what this machine has; CPU=1 and CUDA=1 say it
    ./train_glm5 --from GLM-5/ --lora-rank 16 --train book.txt
    ./train_glm5 --model tiny --train book.txt

What the first one prints, for example (the numbers change with the text):
    step 0 | val loss 5.5849 | 8.058 bits/byte | best
    step 100/1500 | loss 3.1015 | norm 1.13 | lr 3.0e-03 | 179 ms | 2.9k tok/s | 20% peak | eta 3m19s | load 3.84
                  | mtp 2.7696 | index 0.0230
*/
#include "llmc/core/floatx.h"         // floatX: float or bf16
#include "llmc/models/activations.h"  // Activations, Tradeoffs: what a pass has beside the parameters
#include "llmc/models/auxiliary.h"    // auxiliary_loss: what is learnt beside the next token
#include "llmc/models/decoder_passes.h"  // DecoderPasses: the way through the layers
#include "llmc/models/expert_layer.h" // ExpertPass: router and experts of a layer; experts on other ranks
#include "llmc/models/glm5.h"         // Config, Parameters, parameter_table
#include "llmc/models/latent_layer.h" // LatentPass, latent_layer_forward: attention of a layer
#include "llmc/models/layer.h"        // layer_linear, layer_rmsnorm_forward: operands of a layer of a pass
#include "llmc/models/levelled_routers.h"  // levelled_bias, levelled_weight: routers kept busy, each by itself
#include "llmc/models/linear.h"       // linear_room_elements, linear_sends: scratch, what ranks send
#include "llmc/models/lm_head.h"      // LmHead: the output matrix and cross entropy
#include "llmc/models/mlp.h"          // MlpPass, mlp_up, mlp_down, mlp_backward
#include "llmc/models/mtp_module.h"   // MtpModule, mtp_module_leaf: the token after the next
#include "llmc/models/other_losses.h"  // other_losses_layout
#include "llmc/models/stream.h"       // Stream: the residual stream, where backward asks for it
#include "llmc/models/vocabulary.h"   // vocabulary_rows, vocabulary_embedding_backward
#include "llmc/ops/residual.h"        // residual_forward
#include "llmc/ranks/model_gradients.h"  // Model: parameters, gradients, moments
#ifndef TESTING                       // a test includes this file for the model alone
#include "llmc/models/adapted_run.h"  // Adapted, adapted_trainer: an adapter or all of the model learns
#include "llmc/models/auxiliary_run.h"  // auxiliary_options, auxiliary_choose: what is learnt beside the next token
#include "llmc/models/decoder_run.h"  // decoder_options, decoder_begin_ranks, decoder_check, decoder_flops
#include "llmc/models/experts_run.h"  // experts_options, experts_box: --ep
#include "llmc/models/router_log.h"   // router_log_levelled_keys, router_log_summary: what routers have counted
#include "llmc/run/main.h"            // run_main: options, data, steps, checkpoints, ranks (llmc/run/)
#endif

// ---------------------------------------------------------------------------------------------------------------------
// 1. Tensors. Sizes and parameters are in llmc/models/glm5.h; here is one line for each activation.

// what a pass leaves behind; from `dresidual` on the gradients on their way back, one buffer each for all layers
typedef struct {
    floatX *encoded, *norm1, *attention_out, *norm2, *gate_up, *hidden, *shared_gate_up, *shared_hidden, *shared_out,
        *branch, *norm, *logits;
    Stream residual2, residual3;
    LatentTensors attention;
    ExpertTensors experts;
    MtpTensors mtp;
    floatX *dresidual, *dbranch, *droom, *dmlp_hidden, *dshared_hidden;
} ActivationTensors;

// what must not lose digits, always float
typedef struct {
    float *norm1_rstd, *norm2_rstd, *norm_rstd, *losses;
    MtpStatistics mtp;
    LatentStatistics attention;
    ExpertStatistics experts;
} Statistics;

typedef struct {
    Model model;    // the first member: a run finds its tensors here
    Config config;  // with --tp heads, widths of MLPs and rows of the vocabulary that this rank has
    Config whole;   // of all ranks
    Adapters adapters;  // LoRA: their tensors stand in front of the model's, which then do not learn; no places: none
    int indexer;        // how indexers learn: config.indexer, but in a validation off
    int absorbs;        // texts are generated from a cache of short vectors
    struct { int *keys, *experts; } given[CONFIG_MAX_LAYERS + 1];  // of each layer: --inject; NULL: it chooses itself
} Glm5;

static RouterShape router_shape(const Config* c) {
    const RouterShape s = {c->E, c->k, ROUTER_SIGMOID, c->renormalize, c->factor, c->groups, c->top_groups};
    return s;
}

// layers with experts, MTP's too
static int routers_of(const Glm5* glm) {
    return tensor_kinds(glm->config.mlps, 0, glm->config.L, EXPERT_LAYER) + glm->model.learns_mtp;
}

static int has_experts(const Config* c, int l) { return c->mlps[l] == EXPERT_LAYER; }

// B: rows of a micro-batch, each of which has a balance of its own where the loss has that
static ExpertSizes expert_sizes(const Glm5* glm, int B, Purpose purpose, const Tradeoffs* how) {
    const Config* c = &glm->config;
    ExpertSizes s = activations_experts(how, c->D, c->F, router_shape(c), mtp_layers(&glm->model, c->L, purpose));
    s.kinds = c->mlps;
    s.adapter = adapters_widest_expert(&glm->adapters);
    s.sequences = c->aux.balance > 0.0f ? B : 0;
    return s;
}

static LatentSizes latent_sizes(const Glm5* glm, Purpose purpose, const RankGroup* cp) {
    const Config* c = &glm->config;
    const int indexer = glm->model.learns_index && purpose == TO_TRAIN ? glm->indexer : INDEXER_OFF;
    LatentSizes s;
    memset(&s, 0, sizeof s);
    s.D = c->D, s.H = c->H, s.rq = c->rq, s.r = c->r;
    s.dn = c->dn, s.dr = c->dr, s.dv = c->dv;
    s.nI = c->nI, s.dI = c->dI, s.topk = c->topk, s.halves = c->halves;
    s.eps = c->latent_eps;
    s.indexer = indexer, s.by_source = c->target == TARGET_SOURCE;
    s.absorbs = glm->absorbs && purpose == TO_GENERATE;
    s.L = mtp_layers(&glm->model, c->L, purpose), s.indexers = c->indexers;
    s.cp = cp;
    return s;
}

// scratch that all layers share. With --cp keys are made of the short vectors of whole rows
static void size_scratch(Activations* acts, const Glm5* glm, int B, int T) {
    const Model* m = &glm->model;
    const int N = acts->N, N_keys = acts->how.cp ? B * T : N;
    const int N_head = activations_head_rows(&acts->how, B, N, acts->purpose);
    const size_t head = vocabulary_room_elements(m, N_keys, N_head, acts->purpose == TO_GENERATE ? N_head : 1);
    acts->adapter.n = adapter_scratch_elements(&glm->adapters, m, N_keys, N * glm->config.k);
    acts->rounded.n = linear_rounded_elements(m, N_keys, N * glm->config.k);
    acts->parallel.n = tp_larger(head, linear_room_elements(m, N_keys));
}

// B rows of T positions; generation keeps logits of the last position of each. glm must outlive the table
static int activation_table(Tensor* table, const Glm5* glm, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const Config* c = &glm->config;
    const int D = c->D, N = activations_positions(how, B, T, purpose), N_train = purpose == TO_TRAIN ? N : 0;
    const int L = mtp_layers(&glm->model, c->L, purpose), L_norms = activations_kept(how, L, purpose, RECOMPUTE_NORMS);
    const int L_mlps = activations_kept(how, L, purpose, RECOMPUTE_MLPS), L_out = purpose == TO_TRAIN ? L : 0;
    const int L_block = activations_kept(how, L, purpose, RECOMPUTE_BLOCKS);
    const int N_head = activations_head_rows(how, B, N, purpose);
    const int FD = tensor_kinds(c->mlps, 0, c->L, MLP_LAYER) > 0 ? c->FD : 0, room = c->rq > c->r ? c->rq : c->r;
    const int FS = routers_of(glm) > 0 ? c->FS : 0, N_shared = FS > 0 ? N : 0;
    const RankGroup* tp = &glm->model.tp;
    const ExpertSizes experts = expert_sizes(glm, B, purpose, how);
    const LatentSizes latent = latent_sizes(glm, purpose, how->cp);
    const LatentRows rows = {B, T, N, L_norms, L_block, purpose};
    Tensor* t = table;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = input_activation(FIELD(encoded), N, D);             // of a later stage: the stream of the one before
    *t++ = activation(FIELD(norm1),          L_norms, N, D);   // what attention reads
    t = latent_tensor_rows(t, offsetof(ActivationTensors, attention), &latent, &rows);
    *t++ = activation(FIELD(attention_out),  0, N, D);
    t = stream_rows(t, FIELD(residual2),     L_block, N, D, purpose, tp);  // after attention
    *t++ = activation(FIELD(norm2),          L_norms, N, D);   // what MLP, router and experts read
    *t++ = kind_activation(c->mlps, "M", FIELD(gate_up), L_mlps, N, 2 * FD);  // then its gradient
    *t++ = activation(FIELD(hidden),         0, N, FD);        // silu(gate) o up
    if (FS > 0) { t = expert_tensor_rows(t, offsetof(ActivationTensors, experts), &experts, N, L_mlps, purpose); }
    *t++ = kind_activation(c->mlps, "E", FIELD(shared_gate_up), L_mlps, N_shared, 2 * FS);
    *t++ = activation(FIELD(shared_hidden),  0, N, FS);
    *t++ = activation(FIELD(shared_out),     0, N_shared, D);
    *t++ = activation(FIELD(branch),         0, N, D);         // what a half of a block says
    t = stream_rows(t, FIELD(residual3),     L_out, N, D, purpose, tp);    // after the MLP
    *t++ = activation(FIELD(norm),           0, N, D);         // the last one's output
    *t++ = activation(FIELD(logits),         0, N_head, c->Vp);  // then their gradient
    if (mtp_on_rank(&glm->model, purpose)) { t = mtp_tensor_rows(t, offsetof(ActivationTensors, mtp), N, D); }
    *t++ = activation(FIELD(dresidual),      0, N_train, D);
    *t++ = activation(FIELD(dbranch),        0, N_train, D);   // of what a norm gives
    *t++ = activation(FIELD(droom),          0, N_train, room);
    *t++ = activation(FIELD(dmlp_hidden),    0, N_train, FD);
    *t++ = activation(FIELD(dshared_hidden), 0, N_train, FS);
#undef FIELD
    return (int)(t - table);
}

static int statistic_table(Tensor* table, const Glm5* glm, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const int N = activations_positions(how, B, T, purpose), L = mtp_layers(&glm->model, glm->config.L, purpose);
    const int L_norms = activations_kept(how, L, purpose, RECOMPUTE_NORMS);
    const int L_block = activations_kept(how, L, purpose, RECOMPUTE_BLOCKS);
    const ExpertSizes experts = expert_sizes(glm, B, purpose, how);
    const LatentSizes latent = latent_sizes(glm, purpose, how->cp);
    const LatentRows rows = {B, T, N, L_norms, L_block, purpose};
    Tensor* t = table;
#define FIELD(name) #name, offsetof(Statistics, name)
    *t++ = activation(FIELD(norm1_rstd), L_block, N, 1);
    t = latent_statistic_rows(t, offsetof(Statistics, attention), &latent, &rows);
    *t++ = activation(FIELD(norm2_rstd), L_block, N, 1);
    if (routers_of(glm) > 0) {
        t = expert_statistic_rows(t, offsetof(Statistics, experts), &experts, N, L_block, purpose);
    }
    *t++ = activation(FIELD(norm_rstd),  0, N, 1);
    *t++ = activation(FIELD(losses),     0, N, 1);
    if (mtp_on_rank(&glm->model, purpose)) { t = mtp_statistic_rows(t, offsetof(Statistics, mtp), N); }
#undef FIELD
    return (int)(t - table);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: forward, head, backward. AdamW is in llmc/run/train.h and needs no word about any of it.

#define AT(name) offsetof(Parameters, name)  // a field of the table

static const ExpertFields EXPERTS = {AT(router), AT(expert_gate_up), AT(expert_down)};

// Sizes only: what a run will need is known before anything is allocated. Takes the adapters; NULL: there are none.
// learns_mtp: of a model that has the module; trains_index: its indexers learn
static void glm5_layout(Glm5* glm, const Config* c, const Adapters* adapters, int learns_mtp, int trains_index) {
    Model* m = &glm->model;
    const int n = adapters_place(&glm->adapters, m->table, MAX_TENSORS - MAX_PARAMETERS, adapters);
    glm->config = glm->whole = *c;
    glm->indexer = c->aux.indexer;
    memset(glm->given, 0, sizeof glm->given);
    m->learns_mtp = learns_mtp;
    m->learns_index = trains_index, m->index_ratio = 1;  // every position is an entry
    model_layout(m, n + parameter_table(m->table + n, &glm->whole));
    if (n > 0) { model_save_rows(m, n); }
    other_losses_layout(m, routers_of(glm) * (int)router_statistics_length(c->E),
                        tensor_kinds(c->indexers, 0, c->L, FULL_INDEXER), learns_mtp);
}

// Sizes only; returns the bytes that activations_open will take on the device, infinite for more positions than can be
static double activations_layout(const Model* m, Activations* acts, int B, int T, Purpose purpose, Tradeoffs how) {
    const Glm5* glm = (const Glm5*)m;
    const Config* c = &glm->config;
    const ExpertSizes experts = expert_sizes(glm, B, purpose, &how);
    activations_begin(acts, B, T, purpose, how);
    acts->eps = c->eps;
    acts->has_places = 1;
    acts->entry_ratio[LATENT_PLACES] = 1;
    acts->has_mtp = mtp_on_rank(m, purpose);
    acts->adapters = &glm->adapters;
    if ((double)B * T > expert_most_positions(c->k)) { return INFINITY; }
    size_scratch(acts, glm, B, T);
    const int n_tensors = activation_table(acts->tensors.table, glm, B, T, purpose, &how);
    const int n_statistics = statistic_table(acts->statistics.table, glm, B, T, purpose, &how);
    const int has = routers_of(glm) > 0;
    return activations_measure(acts, n_tensors, n_statistics, has ? &experts : NULL, c->dr, c->theta);
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

// attention of layer l, without gradients
static LatentPass latent_pass(const Glm5* glm, const Activations* acts, int l, int N) {
    const Config* c = &glm->config;
    const ActivationTensors a = layer_activations(acts, l);
    const int source = config_source(c, l);
    LatentPass p;
    memset(&p, 0, sizeof p);
    p.size = latent_sizes(glm, acts->purpose, acts->how.cp);
    p.is_full = source == l, p.is_mtp = l == c->L;
    p.given = glm->given[l].keys;
    p.a = a.attention, p.s = layer_statistics(acts, l).attention;
    p.chosen = layer_statistics(acts, source).attention.chosen;
    p.mass = layer_statistics(acts, source).attention.index_mass;
    p.inp = a.norm1;
    p.q_a = layer_linear_biased(acts, AT(q_a), AT(q_a_bias), l), p.q_b = layer_linear(acts, AT(q_b), l);
    p.kv_a = layer_linear_biased(acts, AT(kv_a), AT(kv_a_bias), l), p.kv_b = layer_linear(acts, AT(kv_b), l);
    p.o = layer_linear_biased(acts, AT(o), AT(o_bias), l);
    p.q_norm = layer_vector(acts, AT(q_norm), l), p.kv_norm = layer_vector(acts, AT(kv_norm), l);
    p.turn = &acts->rope;
    p.batch = &acts->batch;
    p.tp = &glm->model.tp;
    p.T = acts->T, p.N = N, p.purpose = acts->purpose;
    if (!p.is_full) { return p; }
    p.index_q = layer_linear(acts, AT(index_q), l), p.index_k = layer_linear(acts, AT(index_k), l);
    p.index_proj = layer_linear(acts, AT(index_proj), l);
    p.index_norm = layer_vector(acts, AT(index_norm), l);
    p.index_norm_bias = layer_vector(acts, AT(index_norm_bias), l);
    if (glm->model.learns_index && acts->numbers) {
        p.index_number = acts->numbers + glm->model.index_number + tensor_kinds(c->indexers, 0, l, FULL_INDEXER);
    }
    return p;
}

static LatentPass latent_pass_back(Glm5* glm, const Activations* acts, int l, int N) {
    LatentPass p = latent_pass(glm, acts, l, N);
    p.dq_a = layer_gradients_biased(acts, AT(q_a), AT(q_a_bias), l), p.dq_b = layer_gradients(acts, AT(q_b), l);
    p.dkv_a = layer_gradients_biased(acts, AT(kv_a), AT(kv_a_bias), l), p.dkv_b = layer_gradients(acts, AT(kv_b), l);
    p.d_o = layer_gradients_biased(acts, AT(o), AT(o_bias), l);
    p.dq_norm = layer_vector_gradient(acts, AT(q_norm), l), p.dkv_norm = layer_vector_gradient(acts, AT(kv_norm), l);
    if (!p.is_full || !glm->model.learns_index) { return p; }
    p.dindex_q = layer_gradients(acts, AT(index_q), l), p.dindex_k = layer_gradients(acts, AT(index_k), l);
    p.dindex_proj = layer_gradients(acts, AT(index_proj), l);
    p.dindex_norm = layer_vector_gradient(acts, AT(index_norm), l);
    p.dindex_norm_bias = layer_vector_gradient(acts, AT(index_norm_bias), l);
    const float counted = p.is_mtp ? glm->model.mtp_index_counted : glm->model.index_counted;
    p.index_dloss = glm->config.index_weight * (1.0f / counted);
    return p;
}

// router and experts of layer l, without gradients
static ExpertPass expert_pass(const Glm5* glm, Activations* acts, int l, int N) {
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    ExpertPass p = layer_experts(acts, EXPERTS, &a.experts, &s.experts, a.norm2, l, N);
    p.bias = levelled_bias(&glm->model, AT(router_bias), l);
    p.numbers = layer_numbers(acts, tensor_kinds(glm->config.mlps, 0, l, EXPERT_LAYER), glm->config.E);
    p.given = glm->given[l].experts;
    return p;
}

// ---- forward ----

// The first half of layer l, and the norm behind it: N positions, whose stream comes in as `residual`. replay: they
// have been here before, and have chosen whom they see
static void attend_forward(const Glm5* glm, Activations* acts, int l, const floatX* residual, int replay, int N,
                           const Device* dev) {
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const LatentPass p = latent_pass(glm, acts, l, N);
    layer_rmsnorm_forward(acts, a.norm1, s.norm1_rstd, residual, AT(norm1), l, N, dev);
    latent_layer_forward(&p, a.attention_out, replay, dev);
    layer_residual_rmsnorm_forward(acts, a.residual2.x, a.norm2, s.norm2_rstd, residual, a.attention_out, AT(norm2), l,
                                   N, dev);
}

// the MLP of layer l: the only one, or the expert that all tokens share
static MlpPass mlp_pass(const Glm5* glm, const Activations* acts, int l, int N) {
    const Config* c = &glm->config;
    const ActivationTensors a = layer_activations(acts, l);
    if (has_experts(c, l)) {
        MlpPass p = layer_mlp(acts, AT(shared_gate_up), AT(shared_down), c->FS, l, N);
        p.gate_up = a.shared_gate_up, p.hidden = a.shared_hidden, p.dhidden = a.dshared_hidden;
        return p;
    }
    MlpPass p = layer_mlp(acts, AT(gate_up), AT(down), c->FD, l, N);
    p.gate_up = a.gate_up, p.hidden = a.hidden, p.dhidden = a.dmlp_hidden;
    return p;
}

// the first product of an MLP; of experts, once their rows are found, and of the shared one
static void gate_up_forward(const Glm5* glm, Activations* acts, int l, int N, const Device* dev) {
    const MlpPass mlp = mlp_pass(glm, acts, l, N);
    if (has_experts(&glm->config, l)) {
        const ExpertPass p = expert_pass(glm, acts, l, N);
        expert_gate_up(&p, dev);
    }
    mlp_up(&mlp, layer_activations(acts, l).norm2, dev);
}

// the second half up to the products that are kept for backward. replay: these positions have chosen their experts
static void branch_up(const Glm5* glm, Activations* acts, int l, int replay, int N, const Device* dev) {
    if (has_experts(&glm->config, l)) {
        const ExpertPass p = expert_pass(glm, acts, l, N);
        expert_choose(&p, replay, dev);
        expert_gather(&p, dev);
    }
    gate_up_forward(glm, acts, l, N, dev);
}

// ... and from there on: what the MLP says, or the experts of a token, weighed, the shared one last
static void branch_down(const Glm5* glm, Activations* acts, int l, int N, const Device* dev) {
    const Config* c = &glm->config;
    const ActivationTensors a = layer_activations(acts, l);
    const MlpPass mlp = mlp_pass(glm, acts, l, N);
    if (has_experts(c, l)) {
        const ExpertPass p = expert_pass(glm, acts, l, N);
        expert_down(&p, a.branch, dev);
        mlp_down(&mlp, a.shared_out, dev);
        residual_forward(a.branch, a.branch, a.shared_out, (size_t)N * c->D, dev);
    } else {
        mlp_down(&mlp, a.branch, dev);
    }
    residual_forward(a.residual3.x, a.residual2.x, a.branch, (size_t)N * c->D, dev);
    layer_keep(acts, l, a.residual2, a.residual3, N, c->D, dev);
}

// what the indexer loses whose choice layer l is the last to see
static void choice_loss(const Glm5* glm, Activations* acts, int l, int N, const Device* dev) {
    const Config* c = &glm->config;
    const LatentPass p = latent_pass(glm, acts, config_source(c, l), N);
    if (latent_learns(&p.size, p.purpose) && c->indexers[l + 1] != SHARED_INDEXER) { latent_index_loss(&p, dev); }
}

// ---- the parts of a pass, which decoder_passes.h puts together ----

// where the stream of layer l is
static DecoderStreams streams(const Model* m, const Activations* acts, int l) {
    const ActivationTensors a = layer_activations(acts, l);
    const DecoderStreams x = {a.encoded, a.residual3, a.dresidual, ((const Glm5*)m)->config.D};
    return x;
}

static void embed_forward(const Model* m, Activations* acts, int N, const Device* dev) {
    floatX* encoded = layer_activations(acts, 0).encoded;
    (void)m;
    vocabulary_rows(encoded, acts->batch.tokens, layer_linear(acts, AT(embedding), 0), N, dev);
}

static void block_forward(const Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev) {
    const Glm5* glm = (const Glm5*)m;
    attend_forward(glm, acts, l, residual, 0, N, dev);
    branch_up(glm, acts, l, 0, N, dev);
    branch_down(glm, acts, l, N, dev);
    choice_loss(glm, acts, l, N, dev);
}

// the last norm
static void end_forward(const Model* m, Activations* acts, const floatX* residual, int N, const Device* dev) {
    (void)m;
    const ActivationTensors a = layer_activations(acts, 0);
    layer_rmsnorm_forward(acts, a.norm, layer_statistics(acts, 0).norm_rstd, residual, AT(norm), 0, N, dev);
}

// from the last norm's output to logits and losses, head_rows positions at a time, and back to its gradient
static LmHead lm_head(const Model* m, const Activations* acts) {
    const ActivationTensors a = layer_activations(acts, 0);
    floatX* dhidden = mtp_on_stage(m, acts->purpose) ? a.mtp.dhidden : a.dbranch;
    return layer_head(acts, AT(head), a.norm, dhidden, a.logits, layer_statistics(acts, 0).losses,
                      ((const Glm5*)m)->config.V);
}

// ---- backward: forward's calls upside down. A gradient whose pointer is NULL is of something frozen ----

// What --recompute left out of layer l, what is never kept, and which rows its experts have: of the last layer all is
// still there
static void recompute_block(const Model* m, Activations* acts, int l, const floatX* residual, int N,
                            const Device* dev) {
    const Glm5* glm = (const Glm5*)m;
    const int level = acts->how.recompute;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const LatentPass attention = latent_pass(glm, acts, l, N);
    if (layer_is_fresh(acts, l)) { return; }
    if (level == RECOMPUTE_BLOCKS) {
        attend_forward(glm, acts, l, residual, 1, N, dev);
        branch_up(glm, acts, l, 1, N, dev);
        return;
    }
    layer_stream(acts, a.residual2, l, N, glm->config.D, dev);
    if (level >= RECOMPUTE_NORMS) {
        layer_rmsnorm_forward(acts, a.norm1, s.norm1_rstd, residual, AT(norm1), l, N, dev);
        layer_rmsnorm_forward(acts, a.norm2, s.norm2_rstd, a.residual2.x, AT(norm2), l, N, dev);
        latent_layer_again(&attention, dev);
    }
    latent_layer_bring(&attention, dev);
    if (has_experts(&glm->config, l)) {
        const ExpertPass p = expert_pass(glm, acts, l, N);
        expert_gather(&p, dev);
    }
    if (level >= RECOMPUTE_MLPS) { gate_up_forward(glm, acts, l, N, dev); }
}

// from dresidual, the gradient of the stream behind layer l, to that of norm2, dbranch: by way of the router, then
// of the shared expert, then of rows
static void experts_backward(Glm5* glm, Activations* acts, int l, int N, const Device* dev) {
    const ActivationTensors a = layer_activations(acts, l);
    const MlpPass shared = mlp_pass(glm, acts, l, N);
    ExpertPass p = expert_pass(glm, acts, l, N);
    layer_experts_back(&p, acts, EXPERTS, l);
    const int is_balanced = l < glm->config.L;  // not the router of the MTP module
    const float balance = levelled_weight(&glm->model, glm->config.aux.balance, acts->experts.size.sequences);
    expert_backward_router(&p, a.dbranch, a.dresidual, NULL, is_balanced ? balance : 0.0f, 0.0f, dev);
    mlp_backward(&shared, a.dbranch, a.dresidual, a.norm2, 1, dev);
    expert_backward_rows(&p, a.dbranch, dev);
}

// dresidual goes from the stream behind layer l to the one before it, which came in as `residual`
static void block_backward(Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev) {
    Glm5* glm = (Glm5*)m;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const LatentPass p = latent_pass_back(glm, acts, l, N);
    if (has_experts(&glm->config, l)) {
        experts_backward(glm, acts, l, N, dev);
    } else {
        const MlpPass mlp = mlp_pass(glm, acts, l, N);
        mlp_backward(&mlp, a.dbranch, a.dresidual, a.norm2, 0, dev);
    }
    layer_rmsnorm_backward(acts, a.dresidual, a.dbranch, a.residual2.x, s.norm2_rstd, AT(norm2), l, 1, N, dev);
    latent_layer_backward(&p, a.dbranch, a.dresidual, a.droom, dev);
    layer_rmsnorm_backward(acts, a.dresidual, a.dbranch, residual, s.norm1_rstd, AT(norm1), l, 1, N, dev);
}

// the row of the embedding that fills does not learn; with --tp one rank has it
static void forget_padding(const Glm5* glm, const Activations* acts, const Device* dev) {
    const Config* c = &glm->config;
    const int row = c->pad - glm->model.tp.place * c->Vp;
    float* d = layer_vector_gradient(acts, AT(embedding), 0);
    if (d && c->pad >= 0 && row >= 0 && row < c->Vp) {
        device_zero(d + (size_t)row * (size_t)c->D, sizeof(float) * (size_t)c->D, dev);
    }
}

// from dresidual to the gradient of the embedding
static void embed_backward(Model* m, Activations* acts, int N, const Device* dev) {
    Glm5* glm = (Glm5*)m;
    const int reaches = m->learns_mtp && !glm->config.mtp_detach;
    if (m->learns_mtp && !reaches) { model_receive_shared(m, dev); }  // it comes, and counts for nothing
    vocabulary_embedding_backward(m, AT(embedding), reaches, layer_activations(acts, 0).dresidual, acts->batch.tokens,
                                  layer_linear(acts, AT(embedding), 0), N, dev);
    forget_padding(glm, acts, dev);
}

// ---- the module that predicts the token after the next ----

// where it is; its layer stands behind all others
static MtpModule mtp_module(const Model* m, const Activations* acts) {
    static const MtpFields fields = {AT(embedding), AT(mtp_enorm), AT(mtp_hnorm), AT(mtp_eh_proj), AT(mtp_norm)};
    const Config* c = &((const Glm5*)m)->config;
    const ActivationTensors a = layer_activations(acts, c->L);
    MtpModule x;
    memset(&x, 0, sizeof x);
    x.fields = fields, x.a = a.mtp, x.s = layer_statistics(acts, c->L).mtp;
    x.head = lm_head(m, acts);
    x.behind = a.residual3.x;
    x.room = a.branch, x.dbranch = a.dbranch, x.dresidual = a.dresidual;
    x.weight = c->aux.mtp_weight, x.is_apart = c->mtp_detach;
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
    const floatX* residual = layer_stream(acts, a.residual3, last, N, ((Glm5*)m)->config.D, dev);
    layer_rmsnorm_backward(acts, a.dresidual, lm_head(m, acts).dnorm, residual, layer_statistics(acts, 0).norm_rstd,
                           AT(norm), 0, 0, N, dev);
}

// for runs and tests
static const DecoderPasses PASSES = {activations_layout, streams,      embed_forward,   block_forward,  end_forward,
                                     lm_head,            end_backward, recompute_block, block_backward, embed_backward};

// ---- of an update, once model_reduce is back ----

// what is added to the loss
static float more_loss(const Glm5* glm) {
    const Config* c = &glm->config;
    return auxiliary_loss(&glm->model, &c->aux, AT(router), AT(router_bias), c->E);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. What a run asks of this model (llmc/run/trainer.h), and main.

#ifndef TESTING
typedef struct {
    Glm5 glm;                 // first
    Adapted adapted;          // activations, adapters, and options of both
    AuxiliaryOptions aux;
    const char* inject;
} Workplace;

static Workplace* workplace(const Run* r) { return (Workplace*)r->model; }
static const Config* config_of(const Run* r) { return &workplace(r)->glm.whole; }

static const AuxiliaryRows AUXILIARY = {AT(router), AT(router_bias), parameter_is_index, parameter_is_mtp};

#define LORA_TARGETS ".*\\.self_attn\\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"

static void glm5_options(Run* r) {
    Workplace* w = workplace(r);
    const Option own[] = {
        {"out", "inject", "", OPTION_TEXT, &w->inject, "", 0, 0, "FILE",
         "of --probe: the file of another probe, of this or another program: what indexers and routers have chosen "
         "there, choice.<module>, they choose here, too", OPTION_READS},
        {"sampling", "absorb", "", OPTION_SWITCH, &w->glm.absorbs, "0", 0, 0, "0|1",
         "texts are made with the short vector of each token in the cache, not the keys and values of all heads: of "
         "GLM-5.2 1/50 of the cache. The same numbers but for their last bits", 0},
    };
    run_add_options(r, own, sizeof own);
    decoder_options(r, DECODER_RECOMPUTE("the first products of MLPs and experts too"), "1024", 1, 0);
    auxiliary_options(r, &w->aux);
    options_reword(r->table, r->n_options, "pp", "cut the layers into P stages, each on ranks of its own, through "
                   "which micro-batches go one after the other: needs a multiple of P ranks, P layers with an indexer, "
                   "for a stage begins with one, and --grad-accum of a few times the ranks to keep them busy. The "
                   "result does not depend on it");
    options_reword(r->table, r->n_options, "cp", "share the positions of every row among groups of C ranks, for rows "
                   "that are too long for one: each has a chunk, and the short vectors of all tokens. Needs a multiple "
                   "of C ranks, and rows of a multiple of C positions. Brings --zero 2. Sums over positions are made "
                   "of C parts: with another C the last digits differ");
    options_reword(r->table, r->n_options, "tp", "share each matrix among groups of T ranks, which compute every "
                   "micro-batch together: needs a multiple of T ranks, in one machine, and T divides the heads. The "
                   "result does not depend on it, but for last digits in bf16");
    experts_options(r, &w->adapted.decoder.how.ep);
    adapted_options(r, &w->adapted);
    options_reword(r->table, r->n_options, "lora-targets", "linear layers that get one: a regular expression of the "
                   "whole name, or ends of names, 'q_a_proj,o_proj', but never indexers; all-linear; empty: those of "
                   "attention; none with --lora-parameters");
    options_reword(r->table, r->n_options, "lora-rank-pattern", "another rank where a name ends with this: "
                   "'layers\\.0\\..*=4,kv_b_proj=16'; the first that matches counts");
    options_reword(r->table, r->n_options, "mtp", "a module that predicts the token after the next (MTP): 1 gives one "
                   "to a model that has none, 0 leaves it out. Where it is not typed, as the files or the preset have "
                   "it: 1 of glm-5 and glm-5.2");
    options_reword(r->table, r->n_options, "config", "random start from a config.json of GLM-5, with sizes of your "
                   "own: doc/glm5.md lists its keys");
}

// a stage has the layers that see a choice, and the one that makes it
static void begin_ranks(Run* r, const Config* c) {
    Glm5* glm = &workplace(r)->glm;
    char starts[CONFIG_MAX_LAYERS];
    DecoderSizes sizes = decoder_sizes(c->Vp, c->D, AT(embedding), 0, routers_of(glm) > 0 ? c->E : 0, c->k);
    for (int l = 0; l < c->L; l++) { starts[l] = c->indexers[l] == FULL_INDEXER; }
    sizes.starts = starts;
    sizes.by_documents = 1;  // an indexer goes from one to the next
    decoder_begin_ranks(r, &sizes);
    glm->config = config_part(c, r->model->tp.size);
}

static void glm5_choose(Run* r) {
    Workplace* w = workplace(r);
    const int from_preset = !*r->config;
    const size_t not_fp8[] = {AT(embedding), AT(router), AT(index_proj)};
    Adapters adapters;
    Tensor base[MAX_PARAMETERS];
    SafeSet set;
    if (*r->weights && from_preset) { fail_input("%s: expected a model with its config.json", r->o.from); }
    Config c = from_preset ? config_preset(r->o.model, run_new_vocabulary(r)) : config_load(r->config);
    if (*r->weights) {
        safeset_open(&set, r->weights);
        config_fit(&c, &set);
        adapted_base(r, &set);
        safeset_close(&set);
    }
    auxiliary_typed(r, &w->aux, &c.aux);
    const int is_adapter = adapted_choose(r, &adapters, base, parameter_table(base, &c));
    const int chooses = tensor_kinds(c.mlps, 0, c.L, EXPERT_LAYER) > 0;
    const AuxiliaryLearns learns = auxiliary_choose(r, &w->aux, &c.aux, 1, chooses, is_adapter);
    glm5_layout(&w->glm, &c, is_adapter ? &adapters : NULL, learns.mtp, learns.index);
    adapted_store(r, not_fp8, 3);
    r->V = r->classes = c.V;
    r->max_T = c.max_T;
    if (routers_of(&w->glm) > 0) { router_log_levelled_keys(r); }
    begin_ranks(r, &c);
}

static void glm5_freeze(Run* r) { auxiliary_freeze(r, &workplace(r)->aux, &AUXILIARY); }

static void glm5_check(Run* r) {
    Workplace* w = workplace(r);
    const Config* c = config_of(r);
    options_refuse(*w->inject && !*r->o.probe, "inject", "is for --probe");
    options_refuse(w->aux.indexer.alone && r->o.early_stop > 0 && r->T <= c->topk, "early-stop",
                   "with --indexer-alone no validation gets better in rows of which all positions are chosen: leave it "
                   "out, or give more --seq-len");
    adapted_check(r);
    mtp_check(r);
    decoder_check(r, adapted_varies(r), 0, 0);
}

// a CPU computes whatever config.json may say
static void check_device(const Run* r) {
    const Config* c = config_of(r);
    const int head = latent_most_channels(&r->dev), key = sparse_most_channels(&r->dev);
    if (run_purpose(r) == TO_TRAIN && c->dn + c->dr + c->dv > head) {
        fail_input("%s: \"v_head_dim\": expected at most %d beside keys of %d channels, which backward has room for on "
                   "this GPU, found %d: train it on a CPU (make train_glm5 CPU=1)", r->config, head - c->dn - c->dr,
                   c->dn + c->dr, c->dv);
    }
    options_refuse(workplace(r)->glm.absorbs && c->r + c->dr > key, "absorb",
                   "is for fewer channels of \"kv_lora_rank\" and \"qk_rope_head_dim\" on this GPU: leave it out");
}

// of the model's rows those before the MTP module's
static int trunk_rows(const Run* r) {
    return mtp_rows_before(r->model, workplace(r)->glm.adapters.n_table, parameter_is_mtp);
}

static void glm5_box(const Run* r) {
    const Config* c = config_of(r);
    const int n_full = tensor_kinds(c->indexers, 0, c->L, FULL_INDEXER);
    const int n_experts = tensor_kinds(c->mlps, 0, c->L, EXPERT_LAYER);
    box_row("model", "%d layer%s of %d channels, %d positions", c->L, c->L > 1 ? "s" : "", c->D, c->max_T);
    box_row("  attention", "%d head%s, keys of %d of which %d turn, values of %d, all of %d for a token", c->H,
            c->H > 1 ? "s" : "", c->dn + c->dr, c->dr, c->dv, c->r);
    box_row("  indexers", "in %d layer%s, of %d head%s, choose %d positions%s", n_full, n_full > 1 ? "s" : "", c->nI,
            c->nI > 1 ? "s" : "", c->topk,
            !indexer_learns(r) ? "" : c->aux.indexer == INDEXER_DENSE ? ", now all, and learn" : " and learn");
    if (n_experts < c->L) {
        box_row("mlp", "%d wide, in %d layer%s", c->FD, c->L - n_experts, c->L - n_experts > 1 ? "s" : "");
    }
    if (n_experts > 0) {
        box_row("experts", "%d in a layer, %d wide, a token takes %d and one for all, %d wide", c->E, c->F, c->k,
                c->FS);
        experts_box(r, c->E);
    }
    mtp_box(r, &workplace(r)->aux.mtp, parameter_is_mtp);
    if (n_experts > 0) { levelled_box(r, &workplace(r)->aux.balance, c->aux.bias_rate, c->aux.balance); }
    decoder_active_box(r, workplace(r)->glm.adapters.n_table + trunk_rows(r));
    box_row("vocabulary", "%d, padded to %d", c->V, c->Vp);
    adapted_box(r, 0);
    decoder_ranks_box(r);
}

static void leave_rest(const Run* r, SafeSet* set) { config_leave_rest(config_of(r), set); }

static void glm5_load(Run* r, const SliceSink* sink) {
    const Workplace* w = workplace(r);
    adapted_load(r, sink);
    mtp_load_model(r, &w->aux.mtp, sink, w->glm.adapters.n_table, parameter_is_mtp, leave_rest);
}

// with --tp: what layer l needs of other ranks
static double layer_parts_sent(const Run* r, int l, int is_back, int again) {
    const Glm5* glm = &workplace(r)->glm;
    const Model* m = r->model;
    const LatentSizes latent = latent_sizes(glm, TO_TRAIN, model_has_cp(m) ? &m->cp : NULL);
    const size_t once_more = again && decoder_recomputes(r) ? AT(o) : TENSOR_NO_FIELD;
    const int D = glm->config.D, N = run_positions(r), kv_b = model_row(m, AT(kv_b), l);
    const double of_keys = linear_sends(m, kv_b, N * m->cp.size) - linear_sends(m, kv_b, N);  // of whole rows
    const double n = linear_layer_sends(m, &glm->adapters, l, once_more, 1, D, N) + is_back * of_keys +
                     latent_layer_sends(&latent, l, is_back, N, r->T, &m->tp);
    return l < glm->config.L ? n : n + mtp_module_sends(m, D, N);
}

// with --cp: what its attention and its router do
static double layer_keys_sent(const Run* r, int l, int is_back, int again) {
    const Config* c = config_of(r);
    const LatentSizes s = latent_sizes(&workplace(r)->glm, TO_TRAIN, &r->model->cp);
    const int sequences = c->aux.balance > 0.0f ? r->o.batch_size : 0;
    return latent_keys_sent(&s, l, is_back, again, r->o.batch_size, r->T) +
           (has_experts(c, l) ? experts_count_sent(r, c->E, sequences) : 0.0);
}

// positions that one sees, on average; of what an indexer chooses all of them while that learns so
static double positions_seen(const Run* r) {
    const Config* c = config_of(r);
    const int is_dense = c->aux.indexer == INDEXER_DENSE && r->model->learns_index;
    const double T = r->T, K = c->topk;
    return is_dense || T <= K ? 0.5 * (T + 1.0) : K - 0.5 * K * (K - 1.0) / T;
}

// of a token in layer l, forward and backward; of the indexer's scores forward alone, and both where it learns
static double attention_flops(const Run* r, int l) {
    const Config* c = config_of(r);
    const double seen = positions_seen(r), n = 6.0 * c->H * (c->dn + c->dr + c->dv) * seen;
    const int learns = r->model->learns_index, scores = learns || r->T > c->topk;
    const double scored = (r->T + 1.0) + (learns ? 4.0 * seen : 0.0);
    return c->indexers[l] == FULL_INDEXER && scores ? n + scored * c->nI * (c->dI + 1.0) : n;
}

// of what model_flops counts for row i: indexers send nothing back to what they read, and without scores nothing goes
// through them
static double flops_not_done(const Run* r, int i) {
    const Model* m = r->model;
    const Tensor* t = &m->table[i];
    const int reached = tensor_layers_below(t, t->layers) - tensor_layers_below(t, m->lowest);
    if (!parameter_is_index(t) || t->on_disk == VECTOR) { return 0.0; }
    return m->learns_index || r->T > config_of(r)->topk ? 2.0 * reached * (double)tensor_slice_elements(t)
                                                           : model_flops(m, i);
}

static double glm5_flops_per_token(const Run* r) {
    const Config* c = config_of(r);
    const int learns_mtp = r->model->learns_mtp;
    const int n = learns_mtp ? r->model->n_table : workplace(r)->glm.adapters.n_table + trunk_rows(r);
    double sum = learns_mtp ? model_flops(r->model, model_row(r->model, AT(head), 0)) : 0.0;  // a second time
    for (int l = 0; l < c->L + learns_mtp; l++) { sum += attention_flops(r, l); }
    for (int i = 0; i < n; i++) { sum -= flops_not_done(r, i); }
    return sum + decoder_flops(r, n);
}

static double workspace_bytes(const Run* r, int B) {
    const RankGroup* cp = &r->model->cp;
    const Purpose purpose = run_purpose(r);
    const LatentSizes latent = latent_sizes(&workplace(r)->glm, purpose, cp->size > 1 ? cp : NULL);
    const int n_keys = B * r->T;
    return fmax(latent_layer_workspace_bytes(&latent, n_keys / cp->size, n_keys, r->T, purpose, &r->dev),
                decoder_workspace_bytes(r, B));
}

static float losses_beside(Run* r, float* grads) {
    (void)grads;
    return more_loss(&workplace(r)->glm);
}

// ---- what layers choose in a probe, MTP's last ----

static Choice choice_of(const Glm5* glm, int l, int of_experts, int T) {
    const Config* c = &glm->config;
    const LatentSizes s = latent_sizes(glm, TO_TRAIN, NULL);
    Choice x = {"", l, of_experts ? c->k : latent_chosen(&s, T), of_experts ? c->E : 0, NULL, NULL, NULL};
    snprintf(x.name, sizeof x.name, CHOICE_PREFIX "model.layers.%d.%s", l,
             of_experts ? "mlp.gate" : "self_attn.indexer");
    return x;
}

static int glm5_choices(const Run* r, Choice** list) {
    const Workplace* w = workplace(r);
    const Config* c = config_of(r);
    const int L = mtp_layers(r->model, w->glm.config.L, TO_TRAIN), B = r->probe.B, T = r->probe.T;
    int n = 0;
    *list = (Choice*)malloc_check(sizeof(Choice) * 2 * (size_t)L, "choices");
    for (int l = 0; l < L; l++) {
        if (c->indexers[l] == FULL_INDEXER) { (*list)[n++] = choice_of(&w->glm, l, 0, T); }
        if (has_experts(c, l)) { (*list)[n++] = choice_of(&w->glm, l, 1, T); }
    }
    if (*w->inject) { choices_read(*list, n, w->inject, B, T); }
    return n;
}

// where a pass leaves them; what it is told to choose
static void open_choices(Run* r) {
    Workplace* w = workplace(r);
    Activations* acts = decoder_activations(r, TO_TRAIN);
    const LatentSizes s = latent_sizes(&w->glm, TO_TRAIN, NULL);
    const int has_lists = latent_has_lists(&s, r->probe.T, TO_TRAIN);
    for (int i = 0; i < r->n_choices; i++) {
        Choice* x = &r->choices[i];
        const int of_experts = x->n_experts > 0;
        int** given = of_experts ? &w->glm.given[x->layer].experts : &w->glm.given[x->layer].keys;
        if (of_experts) { x->chosen = expert_choices(&acts->experts, x->layer); }
        else if (has_lists) { x->chosen = layer_statistics(acts, x->layer).attention.chosen; }
        *given = choice_upload(x, r->probe.B, r->probe.T, &r->dev);
    }
}

static void glm5_open(Run* r, Purpose purpose, int B, int T) {
    decoder_open(r, purpose, B, T);
    if (*r->o.probe) { open_choices(r); }
}

static void glm5_stepped(Run* r, const Step* s) {
    const Config* c = config_of(r);
    const int n = tensor_kinds(c->mlps, 0, c->L, EXPERT_LAYER);
    auxiliary_stepped(r, s, &workplace(r)->aux, &c->aux, &AUXILIARY, n, n, c->E);
}

static json_t* glm5_summary(const Run* r) {
    const Config* c = config_of(r);
    return router_log_summary(r, c->mlps, EXPERT_LAYER, c->L, c->E);
}

static json_t* config_to_save(const Run* r, int eot, const char* dtype) {
    return config_json(config_of(r), eot, dtype);
}

static void glm5_forward(Run* r, Purpose purpose, const int* tokens, const int* targets, int B, int T, int t0) {
    indexer_forward(r, &workplace(r)->glm.indexer, purpose, tokens, targets, B, T, t0);
}

static Trainer glm5_trainer(void) {
    Trainer t = adapted_trainer(offsetof(Workplace, adapted));
    t.name = "train_glm5";
    t.on_gpus = "train_glm5 CUDA=1";
    t.about = "Trains GLM-5, attention over chosen tokens by short vectors, and experts, from and to folders of it. "
              "First steps: make run-glm5.";
    t.presets = "random start from a preset: " GLM5_PRESETS;
    t.usual_V = 154880;
    t.options = glm5_options;
    t.choose = glm5_choose;
    t.freeze = glm5_freeze;
    t.check = glm5_check;
    t.check_device = check_device;
    t.box = glm5_box;
    t.layer_parts_sent = layer_parts_sent;
    t.layer_keys_sent = layer_keys_sent;
    t.flops_per_token = glm5_flops_per_token;
    t.workspace_bytes = workspace_bytes;
    t.load = glm5_load;
    t.forward = glm5_forward;
    t.stepped = glm5_stepped;
    t.more_loss = losses_beside;
    t.choices = glm5_choices;
    t.open = glm5_open;
    t.config_json = config_to_save;
    t.summary = glm5_summary;
    return t;
}

int main(int argc, char** argv) {
    static Workplace place;  // all zero
    const Trainer trainer = glm5_trainer();
    adapted_init(&place.adapted, &PASSES, &place.glm.adapters, LORA_TARGETS);
    return run_main(&trainer, &place.glm.model, argc, argv);
}
#endif
