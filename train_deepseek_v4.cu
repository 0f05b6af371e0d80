/*
DeepSeek V4: several residual streams instead of one, which every half of a layer mixes anew; attention over a window of
keys that are values as well, and over entries that stand for several tokens; experts, which in the first layers the
token itself decides on. From a folder of its weights to such a folder. Read train_moe.cu first: experts, and what a run
does beside the model, are explained there.

The model (doc/deepseek_v4.md): hc streams X_j, all of them the token's embedding; L blocks of
    X = mix(X, attention(norm(y)))   y = sum of pre_j X_j; X'_k = post_k f + sum of comb_jk X_j, with pre, post and comb
    X = mix(X, experts(norm(y)))     of the position's streams (hyper_connections.h)
a last sum over streams, a norm, and the output matrix. Attention (entry_attention.h) has three kinds of layers: a
window alone; with entries of few tokens, of which an indexer chooses some (CSA); with entries of many tokens, all of
them (HCA). Of the experts one is for every position. A module behind the last layer may learn to predict the token
after the next (MTP). Not here: drafts of several tokens.

One file for both kinds of machine: a C compiler builds it for CPUs, exact; nvcc for GPUs.
    make run-deepseek-v4               trains a small one on this repository's own text
    make train_deepseek_v4             for what this machine has; CPU=1 and CUDA=1 say it
    ./train_deepseek_v4 --from DeepSeek-V4-Flash/ --lora-rank 16 --train book.txt
    ./train_deepseek_v4 --model tiny --train book.txt

What the first one prints, for example (the numbers change with the text):
    step 0 | val loss 5.5547 | 8.014 bits/byte | best
    step 100/1800 | loss 3.1635 | norm 0.79 | lr 3.0e-03 | 111 ms | 4.6k tok/s | 40% peak | eta 3m30s | load 3.03
                  | mtp 2.9238 | index 0.0226
*/
#include "llmc/core/floatx.h"         // floatX: float or bf16
#include "llmc/models/activations.h"  // Activations, Tradeoffs: what a pass has beside the parameters
#include "llmc/models/auxiliary.h"    // auxiliary_loss: what is learnt beside the next token
#include "llmc/models/decoder_passes.h"  // DecoderPasses: the way through the layers
#include "llmc/models/deepseek_v4.h"  // Config, Parameters, parameter_table
#include "llmc/models/entry_attention.h"  // EntryPass, entry_attention_forward: attention of a layer
#include "llmc/models/expert_layer.h" // ExpertPass: router and experts of a layer; experts on other ranks
#include "llmc/models/layer.h"        // layer_linear, layer_rmsnorm_forward: operands of a layer of a pass
#include "llmc/models/levelled_routers.h"  // levelled_bias, levelled_weight: routers kept busy, each by itself
#include "llmc/models/linear.h"       // Linear, linear_forward, linear_backward
#include "llmc/models/lm_head.h"      // LmHead: the output matrix and cross entropy
#include "llmc/models/mlp.h"          // MlpPass, mlp_up, mlp_down, mlp_backward
#include "llmc/models/mtp_module.h"   // mtp_head, mtp_losses: the token after the next
#include "llmc/models/other_losses.h"  // other_losses_layout
#include "llmc/models/stream.h"       // Stream: streams, where backward asks for them
#include "llmc/models/vocabulary.h"   // vocabulary_rows, vocabulary_embedding_backward
#include "llmc/ops/hyper_connections.h"  // hyper_site_forward, hyper_expand_forward
#include "llmc/ops/residual.h"        // residual_forward
#include "llmc/ops/token_choice.h"    // token_choice: experts that the token decides on
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
// 1. Tensors. Sizes and parameters are in llmc/models/deepseek_v4.h; here is one line for each activation.

// how a position's streams mix before a half of a layer: always float, kept for backward
typedef struct { float *r, *z, *pre, *post, *comb; } SiteNumbers;

// what a pass leaves behind; from `dstreams` on the gradients on their way back, one buffer each for all layers
typedef struct {
    floatX *encoded, *streams0, *hc_attn_y, *norm1, *hc_ffn_y, *norm2, *attention_out, *moe, *shared_gate_up,
        *shared_hidden, *shared_out, *hc_head_y, *norm, *logits;
    Stream streams1, streams2;
    EntryTensors attention;
    ExpertTensors experts;
    floatX *mtp_encoded, *mtp_embedding_norm, *mtp_hidden_norm, *mtp_streams0, *mtp_hc_head_y, *mtp_norm, *dstart,
        *dhidden;
    floatX *dstreams, *dbranch, *dnorm, *dy, *droom, *dshared_hidden;
} ActivationTensors;

// what must not lose digits, always float
typedef struct {
    SiteNumbers site1, site2, head, mtp_head;
    float *norm1_rstd, *norm2_rstd, *norm_rstd, *losses, *dpost, *dcomb, *mtp_embedding_rstd, *mtp_hidden_rstd,
        *mtp_norm_rstd, *mtp_losses;
    int* given;  // (N, k): experts that tokens decide on
    EntryStatistics attention;
    ExpertStatistics experts;
} Statistics;

typedef struct {
    Model model;    // the first member: a run finds its tensors here
    Config config;  // with --tp heads, groups of these and rows of the vocabulary that this rank has
    Config whole;   // of all ranks
    Adapters adapters;  // LoRA: their tensors stand in front of the model's, which then do not learn; no places: none
    int indexer;        // how indexers learn in a pass: as config says, but off in validations (indexer_forward)
} DeepseekV4;

static RouterShape router_shape(const Config* c) {
    const RouterShape s = {c->E, c->k, ROUTER_SQRT_SOFTPLUS, 1, c->factor, 1, 1};
    return s;
}

static HyperShape hyper_shape(const Config* c, int N) {
    const HyperShape s = {N, c->hc, c->D, c->iters, c->hc_eps, c->eps};
    return s;
}

// of the shared expert; with --tp this rank's channels
static int shared_width(const DeepseekV4* v4) { return v4->config.F / v4->model.tp.size; }

// B: rows of a micro-batch, each of which has a balance of its own where the loss has that
static ExpertSizes expert_sizes(const DeepseekV4* v4, int B, Purpose purpose, const Tradeoffs* how) {
    const Config* c = &v4->config;
    ExpertSizes s = activations_experts(how, c->D, c->F, router_shape(c), mtp_layers(&v4->model, c->L, purpose));
    s.adapter = adapters_widest_expert(&v4->adapters);
    s.limit = c->limit;
    s.sequences = c->aux.balance > 0.0f ? B : 0;
    return s;
}

static EntrySizes entry_sizes(const DeepseekV4* v4, Purpose purpose, const RankGroup* cp) {
    const Config* c = &v4->config;
    const int indexer = v4->model.learns_index && purpose == TO_TRAIN ? v4->indexer : INDEXER_OFF;
    EntrySizes s;
    memset(&s, 0, sizeof s);
    s.D = c->D, s.H = c->H, s.d = c->d, s.rotated = c->rotated;
    s.qr = c->qr, s.G = c->G, s.R = c->R;
    s.window = c->window, s.csa = c->csa, s.hca = c->hca;
    s.nI = c->nI, s.dI = c->dI, s.topk = c->topk, s.indexer = indexer;
    s.eps = c->eps;
    s.L = mtp_layers(&v4->model, c->L, purpose), s.kinds = c->kinds;
    s.cp = cp;
    return s;
}

// lines of a site's numbers at offset `at`, whose logits are M
#define SITE_NAMES(site) {site "_r", site "_z", site "_pre", site "_post", site "_comb"}
static Tensor* site_rows(Tensor* t, const char* const names[5], size_t at, int layers, int N, int M, int hc,
                         int is_head) {
    *t++ = activation(names[0], at + offsetof(SiteNumbers, r),    layers, N, 1);
    *t++ = activation(names[1], at + offsetof(SiteNumbers, z),    layers, N, M);
    *t++ = activation(names[2], at + offsetof(SiteNumbers, pre),  layers, N, hc);
    *t++ = activation(names[3], at + offsetof(SiteNumbers, post), layers, is_head ? 0 : N, hc);
    *t++ = activation(names[4], at + offsetof(SiteNumbers, comb), layers, is_head ? 0 : N, hc * hc);
    return t;
}

// scratch that all layers share
static void size_scratch(Activations* acts, const DeepseekV4* v4, int B) {
    const Model* m = &v4->model;
    const int N = acts->N, N_head = activations_head_rows(&acts->how, B, N, acts->purpose);
    const size_t head = vocabulary_room_elements(m, N, N_head, acts->purpose == TO_GENERATE ? N_head : 1);
    const size_t products = tp_larger(linear_room_elements(m, N), linear_blocks_room(m, &v4->adapters, N));
    acts->adapter.n = adapter_scratch_elements(&v4->adapters, m, N, N * v4->config.k);
    acts->rounded.n = linear_rounded_elements(m, N, N * v4->config.k);
    acts->parallel.n = tp_larger(head, products);
}

// B rows of T positions; generation keeps logits of the last position of each. v4 must outlive the table
static int activation_table(Tensor* table, const DeepseekV4* v4, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const Config* c = &v4->config;
    const int D = c->D, S = c->hc * D, F = shared_width(v4), N = activations_positions(how, B, T, purpose);
    const int N_train = purpose == TO_TRAIN ? N : 0, mtp = mtp_on_rank(&v4->model, purpose);
    const int L = mtp_layers(&v4->model, c->L, purpose);
    const int L_norms = activations_kept(how, L, purpose, RECOMPUTE_NORMS);
    const int L_experts = activations_kept(how, L, purpose, RECOMPUTE_MLPS);
    const int L_block = activations_kept(how, L, purpose, RECOMPUTE_BLOCKS), L_out = purpose == TO_TRAIN ? L : 0;
    const int N_head = activations_head_rows(how, B, N, purpose);
    const int widest = c->qr > D ? c->qr : D, room = widest > c->d ? widest : c->d;
    const RankGroup* tp = &v4->model.tp;
    const ExpertSizes experts = expert_sizes(v4, B, purpose, how);
    const EntrySizes entries = entry_sizes(v4, purpose, how->cp);
    const EntryRows rows = {B, T, N, L_norms, L_block, purpose};
    Tensor* t = table;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = activation(FIELD(encoded),        0, N, D);
    *t++ = input_activation(FIELD(streams0), N, S);            // of a later stage: the streams of the one before
    *t++ = activation(FIELD(hc_attn_y),      L_norms, N, D);   // the sum over streams that attention's norm reads
    *t++ = activation(FIELD(norm1),          L_norms, N, D);   // what attention reads
    t = entry_tensor_rows(t, offsetof(ActivationTensors, attention), &entries, &rows);
    *t++ = activation(FIELD(attention_out),  L_block, N, D);   // what it says
    t = stream_rows(t, FIELD(streams1),      L_block, N, S, purpose, tp);  // after attention
    *t++ = activation(FIELD(hc_ffn_y),       L_norms, N, D);   // the sum that the experts' norm reads
    *t++ = activation(FIELD(norm2),          L_norms, N, D);   // what router and experts read
    t = expert_tensor_rows(t, offsetof(ActivationTensors, experts), &experts, N, L_experts, purpose);
    *t++ = activation(FIELD(shared_gate_up), L_experts, N, 2 * F);  // then its gradient
    *t++ = activation(FIELD(shared_hidden),  0, N, F);         // silu(gate) o up
    *t++ = activation(FIELD(shared_out),     0, N, D);
    *t++ = activation(FIELD(moe),            L_block, N, D);   // what all experts say
    t = stream_rows(t, FIELD(streams2),      L_out, N, S, purpose, tp);    // after the experts
    *t++ = activation(FIELD(hc_head_y),      0, N, D);         // the last sum over streams
    *t++ = activation(FIELD(norm),           0, N, D);         // the last norm's output
    *t++ = activation(FIELD(logits),         0, N_head, c->Vp);  // then their gradient
    if (mtp) {
        *t++ = activation(FIELD(mtp_encoded),     0, N, D);    // embeddings of the next tokens
        *t++ = activation(FIELD(mtp_embedding_norm), 0, N, D);
        *t++ = activation(FIELD(mtp_hidden_norm), 0, N, S);    // of the streams behind the last layer
        *t++ = activation(FIELD(mtp_streams0),    0, N, S);    // that come into the module's layer
        *t++ = activation(FIELD(mtp_hc_head_y),   0, N, D);
        *t++ = activation(FIELD(mtp_norm),        0, N, D);
        *t++ = activation(FIELD(dstart),          0, N, D);    // of what the next token brings
        *t++ = activation(FIELD(dhidden),         0, N, S);    // of the streams, while the module's are on their way
    }
    *t++ = activation(FIELD(dstreams),       0, N_train, S);
    *t++ = activation(FIELD(dbranch),        0, N_train, D);   // of what a half of a layer says
    *t++ = activation(FIELD(dnorm),          0, N_train, D);   // of what it reads
    *t++ = activation(FIELD(dy),             0, N_train, D);   // of the sum over streams
    *t++ = activation(FIELD(droom),          0, N_train, room);
    *t++ = activation(FIELD(dshared_hidden), 0, N_train, F);
#undef FIELD
    return (int)(t - table);
}

static int statistic_table(Tensor* table, const DeepseekV4* v4, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const Config* c = &v4->config;
    const int N = activations_positions(how, B, T, purpose), N_train = purpose == TO_TRAIN ? N : 0, M = config_mixes(c);
    const int L = mtp_layers(&v4->model, c->L, purpose), L_norms = activations_kept(how, L, purpose, RECOMPUTE_NORMS);
    const int L_block = activations_kept(how, L, purpose, RECOMPUTE_BLOCKS);
    const ExpertSizes experts = expert_sizes(v4, B, purpose, how);
    const EntrySizes entries = entry_sizes(v4, purpose, how->cp);
    const EntryRows rows = {B, T, N, L_norms, L_block, purpose};
    static const char* const site1[] = SITE_NAMES("hc_attn");
    static const char* const site2[] = SITE_NAMES("hc_ffn");
    static const char* const head[] = SITE_NAMES("hc_head");
    static const char* const mtp_head[] = SITE_NAMES("mtp_hc_head");
    Tensor* t = table;
#define FIELD(name) #name, offsetof(Statistics, name)
    t = site_rows(t, site1, offsetof(Statistics, site1), L_block, N, M, c->hc, 0);
    *t++ = activation(FIELD(norm1_rstd), L_block, N, 1);
    t = entry_statistic_rows(t, offsetof(Statistics, attention), &entries, &rows);
    t = site_rows(t, site2, offsetof(Statistics, site2), L_block, N, M, c->hc, 0);
    *t++ = activation(FIELD(norm2_rstd), L_block, N, 1);
    if (config_hash_layers(c) > 0) { *t++ = activation(FIELD(given), 0, N, c->k); }
    t = expert_statistic_rows(t, offsetof(Statistics, experts), &experts, N, L_block, purpose);
    t = site_rows(t, head, offsetof(Statistics, head), 0, N, c->hc, c->hc, 1);
    *t++ = activation(FIELD(norm_rstd),  0, N, 1);
    *t++ = activation(FIELD(losses),     0, N, 1);
    *t++ = activation(FIELD(dpost),      0, N_train, c->hc);
    *t++ = activation(FIELD(dcomb),      0, N_train, c->hc * c->hc);
    if (mtp_on_rank(&v4->model, purpose)) {
        t = site_rows(t, mtp_head, offsetof(Statistics, mtp_head), 0, N, c->hc, c->hc, 1);
        *t++ = activation(FIELD(mtp_embedding_rstd),   0, N, 1);
        *t++ = activation(FIELD(mtp_hidden_rstd), 0, N, c->hc);
        *t++ = activation(FIELD(mtp_norm_rstd),   0, N, 1);
        *t++ = activation(FIELD(mtp_losses),      0, N, 1);
    }
#undef FIELD
    return (int)(t - table);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: forward, head, backward. AdamW is in llmc/run/train.h and needs no word about any of it.

#define AT(name) offsetof(Parameters, name)  // a field of the table

static const ExpertFields EXPERTS = {AT(router), AT(expert_gate_up), AT(expert_down)};

// Sizes only: what a run will need is known before anything is allocated. Takes the adapters; NULL: there are none.
// learns_mtp: of a model that has the module; trains_index: its indexers learn
static void deepseek_v4_layout(DeepseekV4* v4, const Config* c, const Adapters* adapters, int learns_mtp,
                               int trains_index) {
    Model* m = &v4->model;
    const int n = adapters_place(&v4->adapters, m->table, MAX_TENSORS - MAX_PARAMETERS, adapters);
    v4->config = v4->whole = *c;
    v4->indexer = c->aux.indexer;
    m->learns_mtp = learns_mtp;
    m->learns_index = trains_index, m->index_ratio = c->csa;
    model_layout(m, n + parameter_table(m->table + n, &v4->whole));
    if (n > 0) { model_save_rows(m, n); }
    other_losses_layout(m, (c->L + learns_mtp) * (int)router_statistics_length(c->E), config_layers(c, CSA_LAYER), 0);
}

// Sizes only; returns the bytes that activations_open will take on the device, infinite for more positions than can be
static double activations_layout(const Model* m, Activations* acts, int B, int T, Purpose purpose, Tradeoffs how) {
    const DeepseekV4* v4 = (const DeepseekV4*)m;
    const Config* c = &v4->config;
    const ExpertSizes experts = expert_sizes(v4, B, purpose, &how);
    const EntrySizes entries = entry_sizes(v4, purpose, how.cp);
    activations_begin(acts, B, T, purpose, how);
    acts->eps = c->eps;
    acts->has_places = 1;
    acts->entry_ratio[CSA_ENTRIES] = config_layers(c, CSA_LAYER) > 0 ? c->csa : 0;
    acts->entry_ratio[HCA_ENTRIES] = config_layers(c, HCA_LAYER) > 0 ? c->hca : 0;
    acts->entry_before = entry_attention_before(&entries, T);
    acts->entry_theta = c->entry_theta;
    acts->yarn = c->has_yarn ? &c->yarn : NULL;
    acts->has_mtp = mtp_on_rank(m, purpose);
    acts->adapters = &v4->adapters;
    if ((double)B * T > expert_most_positions(c->k)) { return INFINITY; }
    if (acts->N > INT_MAX / (c->H > c->hc ? c->H : c->hc)) { return INFINITY; }  // rows of norms: heads, streams
    size_scratch(acts, v4, B);
    const int n_tensors = activation_table(acts->tensors.table, v4, B, T, purpose, &how);
    const int n_statistics = statistic_table(acts->statistics.table, v4, B, T, purpose, &how);
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

// A place where the streams mix: before a half of layer l, or behind all layers (hyper_connections.h)
typedef struct {
    size_t field, norm_field;  // a SiteParameters of the table; the gain of the norm behind it
    int l;
    SiteNumbers n;
    floatX *y, *norm;          // (N, D): the sum over streams, and its norm
    float* rstd;
} Site;

static Site attention_site(const Activations* acts, int l) {
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const Site x = {AT(hc_attn), AT(attn_norm), l, s.site1, a.hc_attn_y, a.norm1, s.norm1_rstd};
    return x;
}

static Site experts_site(const Activations* acts, int l) {
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const Site x = {AT(hc_ffn), AT(ffn_norm), l, s.site2, a.hc_ffn_y, a.norm2, s.norm2_rstd};
    return x;
}

static Site head_site(const Activations* acts) {
    const ActivationTensors a = layer_activations(acts, 0);
    const Statistics s = layer_statistics(acts, 0);
    const Site x = {AT(hc_head), AT(norm), 0, s.head, a.hc_head_y, a.norm, s.norm_rstd};
    return x;
}

static Site mtp_head_site(const Activations* acts) {
    const ActivationTensors a = layer_activations(acts, 0);
    const Statistics s = layer_statistics(acts, 0);
    const Site x = {AT(mtp_hc_head), AT(mtp_norm), 0, s.mtp_head, a.mtp_hc_head_y, a.mtp_norm, s.mtp_norm_rstd};
    return x;
}

static SiteParameters site_parameters(const Activations* acts, const Site* x) {
    const SiteParameters p = {layer_floats(acts, x->field + offsetof(SiteParameters, fn), x->l),
                              layer_floats(acts, x->field + offsetof(SiteParameters, base), x->l),
                              layer_floats(acts, x->field + offsetof(SiteParameters, scale), x->l)};
    return p;
}

// where their gradients go
static SiteParameters site_gradients(const Activations* acts, const Site* x) {
    const SiteParameters d = {layer_vector_gradient(acts, x->field + offsetof(SiteParameters, fn), x->l),
                              layer_vector_gradient(acts, x->field + offsetof(SiteParameters, base), x->l),
                              layer_vector_gradient(acts, x->field + offsetof(SiteParameters, scale), x->l)};
    return d;
}

static Compressor compressor(const Activations* acts, size_t field, int l) {
    Compressor x;
    memset(&x, 0, sizeof x);
    x.wkv = layer_linear(acts, field + offsetof(CompressorParameters, wkv), l);
    x.wgate = layer_linear(acts, field + offsetof(CompressorParameters, wgate), l);
    x.ape = layer_floats(acts, field + offsetof(CompressorParameters, ape), l);
    x.norm = layer_vector(acts, field + offsetof(CompressorParameters, norm), l);
    return x;
}

static void compressor_gradients(Compressor* x, const Activations* acts, size_t field, int l) {
    x->dwkv = layer_gradients(acts, field + offsetof(CompressorParameters, wkv), l);
    x->dwgate = layer_gradients(acts, field + offsetof(CompressorParameters, wgate), l);
    x->dape = layer_vector_gradient(acts, field + offsetof(CompressorParameters, ape), l);
    x->dnorm = layer_vector_gradient(acts, field + offsetof(CompressorParameters, norm), l);
}

// attention of layer l, without gradients
static EntryPass entry_pass(const DeepseekV4* v4, const Activations* acts, int l, int N) {
    const Config* c = &v4->config;
    const ActivationTensors a = layer_activations(acts, l);
    EntryPass p;
    memset(&p, 0, sizeof p);
    p.size = entry_sizes(v4, acts->purpose, acts->how.cp);
    p.kind = c->kinds[l];
    p.a = a.attention, p.s = layer_statistics(acts, l).attention;
    p.inp = a.norm1;
    p.wq_a = layer_linear(acts, AT(wq_a), l), p.wq_b = layer_linear(acts, AT(wq_b), l);
    p.wkv = layer_linear(acts, AT(wkv), l);
    p.wo_a = layer_linear(acts, AT(wo_a), l), p.wo_b = layer_linear(acts, AT(wo_b), l);
    p.q_norm = layer_vector(acts, AT(q_norm), l), p.kv_norm = layer_vector(acts, AT(kv_norm), l);
    p.sinks = layer_floats(acts, AT(sinks), l);
    p.turn = p.kind == WINDOW_LAYER ? &acts->rope : &acts->entry_rope;
    p.batch = &acts->batch;
    p.tp = &v4->model.tp;
    p.T = acts->T, p.N = N, p.purpose = acts->purpose;
    if (p.kind == HCA_LAYER) { p.entries = compressor(acts, AT(hca), l); }
    if (p.kind != CSA_LAYER) { return p; }
    p.entries = compressor(acts, AT(csa), l), p.index = compressor(acts, AT(index), l);
    p.index_wq_b = layer_linear(acts, AT(index_wq_b), l), p.index_proj = layer_linear(acts, AT(index_proj), l);
    if (v4->model.learns_index && acts->numbers) {
        p.index_number = acts->numbers + v4->model.index_number + tensor_kinds(c->kinds, 0, l, CSA_LAYER);
    }
    return p;
}

static EntryPass entry_pass_back(DeepseekV4* v4, const Activations* acts, int l, int N) {
    EntryPass p = entry_pass(v4, acts, l, N);
    p.dwq_a = layer_gradients(acts, AT(wq_a), l), p.dwq_b = layer_gradients(acts, AT(wq_b), l);
    p.dwkv = layer_gradients(acts, AT(wkv), l);
    p.dwo_a = layer_gradients(acts, AT(wo_a), l), p.dwo_b = layer_gradients(acts, AT(wo_b), l);
    p.dq_norm = layer_vector_gradient(acts, AT(q_norm), l), p.dkv_norm = layer_vector_gradient(acts, AT(kv_norm), l);
    p.dsinks = layer_vector_gradient(acts, AT(sinks), l);
    if (p.kind == HCA_LAYER) { compressor_gradients(&p.entries, acts, AT(hca), l); }
    if (p.kind != CSA_LAYER) { return p; }
    compressor_gradients(&p.entries, acts, AT(csa), l);
    compressor_gradients(&p.index, acts, AT(index), l);
    p.dindex_wq_b = layer_gradients(acts, AT(index_wq_b), l), p.dindex_proj = layer_gradients(acts, AT(index_proj), l);
    p.index_dloss = v4->model.learns_index ? 1.0f / v4->model.index_counted : 0.0f;
    return p;
}

// router and experts of layer l, without gradients
static ExpertPass expert_pass(const DeepseekV4* v4, Activations* acts, int l, int N) {
    const int is_hash = v4->config.routers[l] == HASH_LAYER;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    ExpertPass p = layer_experts(acts, EXPERTS, &a.experts, &s.experts, a.norm2, l, N);
    p.numbers = layer_numbers(acts, l, v4->config.E);
    if (is_hash) { p.given = s.given; }
    else { p.bias = levelled_bias(&v4->model, AT(router_bias), l); }
    return p;
}

// ---- forward ----

// of streams X what a half of a layer reads: their sum, and its norm
static void site_forward(const DeepseekV4* v4, const Activations* acts, const Site* x, const floatX* X, int N,
                         const Device* dev) {
    const HyperShape shape = hyper_shape(&v4->config, N);
    const SiteParameters p = site_parameters(acts, x);
    hyper_site_forward(x->y, x->n.r, x->n.z, x->n.pre, x->n.post, x->n.comb, X, p.fn, p.base, p.scale, &shape, dev);
    layer_rmsnorm_forward(acts, x->norm, x->rstd, x->y, x->norm_field, x->l, N, dev);
}

// the same once more, where the site's numbers are still there
static void site_again(const DeepseekV4* v4, const Activations* acts, const Site* x, const floatX* X, int N,
                       const Device* dev) {
    const HyperShape shape = hyper_shape(&v4->config, N);
    hyper_collapse_forward(x->y, X, x->n.pre, &shape, dev);
    layer_rmsnorm_forward(acts, x->norm, x->rstd, x->y, x->norm_field, x->l, N, dev);
}

// The first half of layer l: N positions, whose streams come in as X. replay: they have been here before, and have
// chosen their entries
static void attend_forward(const DeepseekV4* v4, Activations* acts, int l, const floatX* X, int replay, int N,
                           const Device* dev) {
    const HyperShape shape = hyper_shape(&v4->config, N);
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const Site site = attention_site(acts, l);
    const EntryPass p = entry_pass(v4, acts, l, N);
    site_forward(v4, acts, &site, X, N, dev);
    entry_attention_forward(&p, a.attention_out, replay, dev);
    hyper_expand_forward(a.streams1.x, X, a.attention_out, s.site1.post, s.site1.comb, &shape, dev);
}

// the expert of layer l that all tokens share
static MlpPass shared_pass(const DeepseekV4* v4, const Activations* acts, int l, int N) {
    const ActivationTensors a = layer_activations(acts, l);
    MlpPass p = layer_mlp(acts, AT(shared_gate_up), AT(shared_down), shared_width(v4), l, N);
    p.gate_up = a.shared_gate_up, p.hidden = a.shared_hidden, p.dhidden = a.dshared_hidden;
    p.limit = v4->config.limit;
    return p;
}

// the first products of the experts, once their rows are found, and of the shared one
static void gate_up_forward(const DeepseekV4* v4, Activations* acts, int l, int N, const Device* dev) {
    const ExpertPass p = expert_pass(v4, acts, l, N);
    const MlpPass shared = shared_pass(v4, acts, l, N);
    expert_gate_up(&p, dev);
    mlp_up(&shared, layer_activations(acts, l).norm2, dev);
}

// the second half up to the products that are kept for backward. replay: these positions have chosen their experts
static void experts_up(const DeepseekV4* v4, Activations* acts, int l, int replay, int N, const Device* dev) {
    const Config* c = &v4->config;
    const Site site = experts_site(acts, l);
    const ExpertPass p = expert_pass(v4, acts, l, N);
    site_forward(v4, acts, &site, layer_activations(acts, l).streams1.x, N, dev);
    if (p.given && !replay) {
        int* given = layer_statistics(acts, l).given;
        token_choice(given, acts->batch.tokens, layer_floats(acts, AT(tid2eid), l), N, c->k, dev);
    }
    expert_choose(&p, replay, dev);
    expert_gather(&p, dev);
    gate_up_forward(v4, acts, l, N, dev);
}

// ... and what the experts of a token say, weighed, the shared one last
static void experts_down(const DeepseekV4* v4, Activations* acts, int l, int N, const Device* dev) {
    const Config* c = &v4->config;
    const ActivationTensors a = layer_activations(acts, l);
    const ExpertPass p = expert_pass(v4, acts, l, N);
    const MlpPass shared = shared_pass(v4, acts, l, N);
    expert_down(&p, a.moe, dev);
    mlp_down(&shared, a.shared_out, dev);
    residual_forward(a.moe, a.moe, a.shared_out, (size_t)N * c->D, dev);
}

// from streams X to what the output matrix reads
static void collapse_forward(const DeepseekV4* v4, const Activations* acts, const Site* x, const floatX* X, int N,
                             const Device* dev) {
    const HyperShape shape = hyper_shape(&v4->config, N);
    const SiteParameters p = site_parameters(acts, x);
    hyper_head_forward(x->y, x->n.r, x->n.z, x->n.pre, X, p.fn, p.base, p.scale, &shape, dev);
    layer_rmsnorm_forward(acts, x->norm, x->rstd, x->y, x->norm_field, x->l, N, dev);
}

// ---- the parts of a pass, which decoder_passes.h puts together ----

// where the streams of layer l are
static DecoderStreams streams(const Model* m, const Activations* acts, int l) {
    const Config* c = &((const DeepseekV4*)m)->config;
    const ActivationTensors a = layer_activations(acts, l);
    const DecoderStreams x = {a.streams0, a.streams2, a.dstreams, c->hc * c->D};
    return x;
}

static void embed_forward(const Model* m, Activations* acts, int N, const Device* dev) {
    const Config* c = &((const DeepseekV4*)m)->config;
    const ActivationTensors a = layer_activations(acts, 0);
    vocabulary_rows(a.encoded, acts->batch.tokens, layer_linear(acts, AT(embedding), 0), N, dev);
    hyper_spread_forward(a.streams0, a.encoded, N, c->hc, c->D, dev);
}

static void block_forward(const Model* m, Activations* acts, int l, const floatX* X, int N, const Device* dev) {
    const DeepseekV4* v4 = (const DeepseekV4*)m;
    const int S = v4->config.hc * v4->config.D;
    const HyperShape shape = hyper_shape(&v4->config, N);
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    attend_forward(v4, acts, l, X, 0, N, dev);
    experts_up(v4, acts, l, 0, N, dev);
    experts_down(v4, acts, l, N, dev);
    hyper_expand_forward(a.streams2.x, a.streams1.x, a.moe, s.site2.post, s.site2.comb, &shape, dev);
    layer_keep(acts, l, a.streams1, a.streams2, N, S, dev);
}

// the last sum over streams, and its norm
static void end_forward(const Model* m, Activations* acts, const floatX* X, int N, const Device* dev) {
    const Site site = head_site(acts);
    collapse_forward((const DeepseekV4*)m, acts, &site, X, N, dev);
}

// from the last norm's output to logits and losses, head_rows positions at a time, and back to its gradient
static LmHead lm_head(const Model* m, const Activations* acts) {
    const ActivationTensors a = layer_activations(acts, 0);
    return layer_head(acts, AT(head), a.norm, a.dnorm, a.logits, layer_statistics(acts, 0).losses,
                      ((const DeepseekV4*)m)->config.V);
}

// ---- backward: forward's calls upside down. A gradient whose pointer is NULL is of something frozen ----

// What --recompute left out of layer l, what is never kept, and which rows its experts have: of the last layer all is
// still there
static void recompute_block(const Model* m, Activations* acts, int l, const floatX* X, int N, const Device* dev) {
    const DeepseekV4* v4 = (const DeepseekV4*)m;
    const int level = acts->how.recompute;
    const ActivationTensors a = layer_activations(acts, l);
    const Site before_attention = attention_site(acts, l), before_experts = experts_site(acts, l);
    const EntryPass attention = entry_pass(v4, acts, l, N);
    const ExpertPass experts = expert_pass(v4, acts, l, N);
    if (layer_is_fresh(acts, l)) { return; }
    if (level == RECOMPUTE_BLOCKS) {
        attend_forward(v4, acts, l, X, 1, N, dev);
        experts_up(v4, acts, l, 1, N, dev);
        experts_down(v4, acts, l, N, dev);
        return;
    }
    layer_stream(acts, a.streams1, l, N, v4->config.hc * v4->config.D, dev);
    if (level >= RECOMPUTE_NORMS) {
        site_again(v4, acts, &before_attention, X, N, dev);
        site_again(v4, acts, &before_experts, a.streams1.x, N, dev);
        entry_attention_again(&attention, dev);
    }
    entry_attention_bring(&attention, dev);
    expert_gather(&experts, dev);
    if (level >= RECOMPUTE_MLPS) { gate_up_forward(v4, acts, l, N, dev); }
}

// from dnorm, the gradient of what a half of a layer reads, to that of streams X, which goes on from what comes past it
static void site_backward(const DeepseekV4* v4, Activations* acts, const Site* x, const floatX* X, int N,
                          const Device* dev) {
    const HyperShape shape = hyper_shape(&v4->config, N);
    const ActivationTensors a = layer_activations(acts, 0);
    const Statistics s = layer_statistics(acts, 0);
    const SiteParameters p = site_parameters(acts, x), d = site_gradients(acts, x);
    layer_rmsnorm_backward(acts, a.dy, a.dnorm, x->y, x->rstd, x->norm_field, x->l, 0, N, dev);
    hyper_site_backward(a.dstreams, d.fn, d.base, d.scale, a.dy, s.dpost, s.dcomb, X, x->n.r, x->n.z, x->n.pre,
                        x->n.post, p.fn, p.base, p.scale, &shape, dev);
}

// from dbranch, the gradient of what the experts of layer l say, to that of norm2, dnorm: by way of the router, then of
// the shared expert, then of rows
static void experts_backward(DeepseekV4* v4, Activations* acts, int l, int N, const Device* dev) {
    const ActivationTensors a = layer_activations(acts, l);
    const MlpPass shared = shared_pass(v4, acts, l, N);
    ExpertPass p = expert_pass(v4, acts, l, N);
    layer_experts_back(&p, acts, EXPERTS, l);
    const int is_balanced = v4->config.routers[l] == CHOICE_LAYER && l < v4->config.L;  // not that of the MTP module
    const float balance = levelled_weight(&v4->model, v4->config.aux.balance, acts->experts.size.sequences);
    expert_backward_router(&p, a.dnorm, a.dbranch, NULL, is_balanced ? balance : 0.0f, 0.0f, dev);
    mlp_backward(&shared, a.dnorm, a.dbranch, a.norm2, 1, dev);
    expert_backward_rows(&p, a.dnorm, dev);
}

// from dstreams, the gradient of the streams behind layer l, to that of X, which came into it
static void block_backward(Model* m, Activations* acts, int l, const floatX* X, int N, const Device* dev) {
    DeepseekV4* v4 = (DeepseekV4*)m;
    const HyperShape shape = hyper_shape(&v4->config, N);
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const Site before_attention = attention_site(acts, l), before_experts = experts_site(acts, l);
    hyper_expand_backward(a.dbranch, a.dstreams, s.dpost, s.dcomb, a.dstreams, a.streams1.x, a.moe,
                          s.site2.post, s.site2.comb, &shape, dev);
    experts_backward(v4, acts, l, N, dev);
    site_backward(v4, acts, &before_experts, a.streams1.x, N, dev);
    hyper_expand_backward(a.dbranch, a.dstreams, s.dpost, s.dcomb, a.dstreams, X, a.attention_out, s.site1.post,
                          s.site1.comb, &shape, dev);
    const EntryPass p = entry_pass_back(v4, acts, l, N);
    entry_attention_backward(&p, a.dnorm, a.dbranch, a.droom, dev);
    site_backward(v4, acts, &before_attention, X, N, dev);
}

// from dnorm, the gradient of what the output matrix reads, to that of the streams, dstreams, written
static void collapse_backward(const DeepseekV4* v4, Activations* acts, const Site* x, const floatX* X, int N,
                              const Device* dev) {
    const HyperShape shape = hyper_shape(&v4->config, N);
    const ActivationTensors a = layer_activations(acts, 0);
    const SiteParameters p = site_parameters(acts, x), d = site_gradients(acts, x);
    layer_rmsnorm_backward(acts, a.dy, a.dnorm, x->y, x->rstd, x->norm_field, x->l, 0, N, dev);
    hyper_head_backward(a.dstreams, d.fn, d.base, d.scale, a.dy, X, x->n.r, x->n.z, x->n.pre, p.fn, p.base, p.scale,
                        &shape, dev);
}

// from dstreams to the gradient of the embedding
static void embed_backward(Model* m, Activations* acts, int N, const Device* dev) {
    const Config* c = &((DeepseekV4*)m)->config;
    const ActivationTensors a = layer_activations(acts, 0);
    hyper_spread_backward(a.dbranch, a.dstreams, N, c->hc, c->D, dev);
    vocabulary_embedding_backward(m, AT(embedding), m->learns_mtp, a.dbranch, acts->batch.tokens,
                                  layer_linear(acts, AT(embedding), 0), N, dev);
}

// ---- the module that predicts the token after the next ----

// after forward: from the streams X behind the last layer and the next tokens up to the module's own last norm
static void mtp_forward(const DeepseekV4* v4, Activations* acts, const floatX* X, int N, const Device* dev) {
    const Config* c = &v4->config;
    const int l = c->L, D = c->D, rows = N * c->hc;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const Site site = mtp_head_site(acts);
    vocabulary_rows(a.mtp_encoded, acts->mtp.batch.tokens, layer_linear(acts, AT(embedding), 0), N, dev);
    layer_rmsnorm_forward(acts, a.mtp_embedding_norm, s.mtp_embedding_rstd, a.mtp_encoded, AT(mtp_enorm), 0, N, dev);
    layer_rmsnorm_forward(acts, a.mtp_hidden_norm, s.mtp_hidden_rstd, X, AT(mtp_hnorm), 0, rows, dev);
    linear_forward(a.dstart, a.mtp_embedding_norm, layer_linear(acts, AT(mtp_e_proj), 0), N, dev);
    hyper_spread_forward(a.mtp_streams0, a.dstart, N, c->hc, D, dev);
    linear_forward_on(a.mtp_streams0, a.mtp_hidden_norm, layer_linear(acts, AT(mtp_h_proj), 0), rows, dev);
    block_forward(&v4->model, acts, l, a.mtp_streams0, N, dev);
    collapse_forward(v4, acts, &site, a.streams2.x, N, dev);
}

static LmHead mtp_lm_head(const Model* m, const Activations* acts) {
    const ActivationTensors a = layer_activations(acts, 0);
    return mtp_head(lm_head(m, acts), a.mtp_norm, a.dnorm, layer_statistics(acts, 0).mtp_losses);
}

// From dnorm, the gradient of the module's last norm, to what it adds to that of the embedding and to dhidden, that of
// the streams behind the last layer
static void mtp_backward(DeepseekV4* v4, Activations* acts, int N, const Device* dev) {
    const Config* c = &v4->config;
    const int l = c->L, D = c->D, rows = N * c->hc;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const Site site = mtp_head_site(acts);
    const Linear e_proj = layer_linear(acts, AT(mtp_e_proj), 0), h_proj = layer_linear(acts, AT(mtp_h_proj), 0);
    collapse_backward(v4, acts, &site, a.streams2.x, N, dev);
    recompute_block(&v4->model, acts, l, a.mtp_streams0, N, dev);
    block_backward(&v4->model, acts, l, a.mtp_streams0, N, dev);
    model_layer_done(&v4->model, l, dev);
    hyper_spread_backward(a.dstart, a.dstreams, N, c->hc, D, dev);
    linear_backward(a.dnorm, a.dstart, a.mtp_embedding_norm, e_proj, layer_gradients(acts, AT(mtp_e_proj), 0), 0, N,
                    dev);
    layer_rmsnorm_backward(acts, a.dy, a.dnorm, a.mtp_encoded, s.mtp_embedding_rstd, AT(mtp_enorm), 0, 0, N, dev);
    vocabulary_embedding_share(&v4->model, AT(embedding), 0, a.dy, acts->mtp.batch.tokens,
                               layer_linear(acts, AT(embedding), 0), N, dev);
    linear_backward_weight(a.dstreams, a.mtp_hidden_norm, h_proj, layer_gradients(acts, AT(mtp_h_proj), 0), rows, dev);
    linear_backward_input(a.mtp_hidden_norm, a.dstreams, h_proj, 0, rows, dev);
    const floatX* X = layer_stream(acts, layer_activations(acts, l - 1).streams2, l - 1, N, c->hc * D, dev);
    layer_rmsnorm_backward(acts, a.dhidden, a.mtp_hidden_norm, X, s.mtp_hidden_rstd, AT(mtp_hnorm), 0, 1, rows, dev);
}

// forward and backward, once the head has written the gradient of the streams to dstreams; the sum of its losses joins
// what the leaf counts
static void mtp_leaf(DeepseekV4* v4, Activations* acts, const floatX* X, int N, const Device* dev) {
    const ActivationTensors a = layer_activations(acts, 0);
    const size_t n_bytes = sizeof(floatX) * (size_t)N * (size_t)(v4->config.hc * v4->config.D);
    const LmHead head = mtp_lm_head(&v4->model, acts);
    float* counted = acts->numbers;
    device_copy(a.dhidden, a.dstreams, n_bytes, dev);
    acts->numbers = dp_numbers(&v4->model.dp);  // with --pp what all other layers have counted is there already
    mtp_forward(v4, acts, X, N, dev);
    mtp_losses(&head, acts, v4->config.aux.mtp_weight, 1, N, dev);
    mtp_backward(v4, acts, N, dev);
    acts->numbers = counted;
    device_copy(a.dstreams, a.dhidden, n_bytes, dev);
}

// from the head's gradient to that of the streams behind the last layer
static void end_backward(const DecoderPasses* passes, Model* m, Activations* acts, int N, const Device* dev) {
    DeepseekV4* v4 = (DeepseekV4*)m;
    const int last = mtp_trunk_end(m) - 1;
    const Site site = head_site(acts);
    const Stream streams = layer_activations(acts, last).streams2;
    const floatX* X = layer_stream(acts, streams, last, N, v4->config.hc * v4->config.D, dev);
    (void)passes;
    collapse_backward(v4, acts, &site, X, N, dev);
    if (mtp_on_stage(m, acts->purpose)) { mtp_leaf(v4, acts, X, N, dev); }
}

// for runs and tests
static const DecoderPasses PASSES = {activations_layout, streams,      embed_forward,   block_forward,  end_forward,
                                     lm_head,            end_backward, recompute_block, block_backward, embed_backward};

// ---- of an update, once model_reduce is back ----

// what is added to the loss
static float more_loss(const DeepseekV4* v4) {
    const Config* c = &v4->config;
    return auxiliary_loss(&v4->model, &c->aux, AT(router), AT(router_bias), c->E);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. What a run asks of this model (llmc/run/trainer.h), and main.

#ifndef TESTING
typedef struct {
    DeepseekV4 v4;            // first
    Adapted adapted;          // activations, adapters, and options of both
    AuxiliaryOptions aux;
} Workplace;

static Workplace* workplace(const Run* r) { return (Workplace*)r->model; }
static const Config* config_of(const Run* r) { return &workplace(r)->v4.whole; }

static const AuxiliaryRows AUXILIARY = {AT(router), AT(router_bias), parameter_is_index, parameter_is_mtp};

// the linear layers of attention, but for those that make entries. PEFT runs an adapter of o_a_proj in one group alone
#define LORA_TARGETS(o_a) ".*\\.self_attn\\.(q_a_proj|q_b_proj|kv_proj|" o_a "o_b_proj)"

static void deepseek_v4_options(Run* r) {
    Workplace* w = workplace(r);
    decoder_options(r, DECODER_RECOMPUTE("the experts' first products too"), "1024", 1, 0);
    auxiliary_options(r, &w->aux);
    options_reword(r->table, r->n_options, "cp", "share the positions of every row among groups of C ranks, for rows "
                   "that are too long for one: each has a chunk, and all entries. Needs a multiple of C ranks, and "
                   "rows of a multiple of C times as many positions as make whole entries of both kinds of layers: "
                   "128C of deepseek-v4-flash. Brings --zero 2. Sums over positions are made of C parts: with "
                   "another C the last digits differ");
    experts_options(r, &w->adapted.decoder.how.ep);
    adapted_options(r, &w->adapted);
    options_reword(r->table, r->n_options, "mtp", "a module that predicts the token after the next (MTP): 1 gives one "
                   "to a model that has none, 0 leaves it out. Where it is not typed, as the files or the preset have "
                   "it: 1 of deepseek-v4-flash and -pro");
    options_reword(r->table, r->n_options, "tp", "share each matrix among groups of T ranks, which compute every "
                   "micro-batch together: needs a multiple of T ranks, in one machine, and T, a power of two, divides "
                   "the groups of heads (o_groups). The result does not depend on it, but for last digits in bf16");
    options_reword(r->table, r->n_options, "lora-targets", "linear layers that get one: a regular expression of the "
                   "whole name, '.*\\.self_attn\\.(q_a_proj|q_b_proj)', or ends of names, 'q_a_proj,o_b_proj', but "
                   "never indexers; all-linear; empty: those of attention, without compressors and, in several groups, "
                   "without o_a_proj, which PEFT cannot run; none with --lora-parameters");
    options_reword(r->table, r->n_options, "lora-rank-pattern", "another rank where a name ends with this: "
                   "'layers\\.0\\..*=4,kv_proj=16'; the first that matches counts");
    options_reword(r->table, r->n_options, "freeze", "no updates of tensors with such names, of all layers, of one or "
                   "of an expert: 'embed.weight,layers.0.*,*.experts.3.*', as the files have them; first:N: of the "
                   "first N layers; indices:A,B,..: of these layers, from 0");
    options_reword(r->table, r->n_options, "config", "random start from a config.json of DeepSeek V4, with sizes of "
                   "your own: doc/deepseek_v4.md lists its keys");
}

// a chunk of a row has whole entries of every layer. What is too much for an int fits no row
static int chunk_unit(const Config* c, int n_ranks) {
    const int csa = config_layers(c, CSA_LAYER) > 0 ? c->csa : 1, hca = config_layers(c, HCA_LAYER) > 0 ? c->hca : 1;
    int both = csa;
    while (both % hca != 0 && both < INT_MAX / n_ranks - csa) { both += csa; }
    return both;
}

static void deepseek_v4_choose(Run* r) {
    Workplace* w = workplace(r);
    const int from_preset = !*r->config;
    const size_t not_fp8[] = {AT(embedding), AT(router), AT(index_proj)};
    Adapters adapters;
    Tensor base[MAX_PARAMETERS];
    SafeSet set;
    if (*r->weights && from_preset) { fail_input("%s: expected a model with its config.json", r->o.from); }
    Config c = from_preset ? config_preset(r->o.model, run_new_vocabulary(r))
                           : config_load(r->config, !*r->weights && !run_is_chosen(r, "mtp"));
    if (*r->weights) {
        safeset_open(&set, r->weights);
        config_fit(&c, &set);
        adapted_base(r, &set);
        safeset_close(&set);
    }
    auxiliary_typed(r, &w->aux, &c.aux);
    if (c.G == 1) { w->adapted.targets = LORA_TARGETS("o_a_proj|"); }
    const int is_adapter = adapted_choose(r, &adapters, base, parameter_table(base, &c));
    const int chooses = config_hash_layers(&c) < c.L;
    const int has_indexers = config_layers(&c, CSA_LAYER) > 0;
    const AuxiliaryLearns learns = auxiliary_choose(r, &w->aux, &c.aux, has_indexers, chooses, is_adapter);
    deepseek_v4_layout(&w->v4, &c, is_adapter ? &adapters : NULL, learns.mtp, learns.index);
    adapted_store(r, not_fp8, 3);
    r->V = r->classes = c.V;
    r->max_T = c.max_T;
    DecoderSizes sizes = decoder_sizes(c.Vp, c.D, AT(embedding), 0, c.E, c.k);
    sizes.C = c.hc * c.D;
    sizes.says_again = 1;
    sizes.by_documents = 1;  // entries end with them
    sizes.cp_unit = chunk_unit(&c, w->adapted.decoder.cp);
    decoder_begin_ranks(r, &sizes);
    w->v4.config = config_part(&c, r->model->tp.size);
}

// tables of choices do not learn
static void deepseek_v4_freeze(Run* r) {
    Model* m = r->model;
    auxiliary_freeze(r, &workplace(r)->aux, &AUXILIARY);
    for (int i = 0; i < m->n_table && !model_is_adapter(m); i++) {
        if (m->table[i].whole_below > 0) { model_freeze(m, &m->table[i]); }
    }
}

// indexers learn from entries of a row, and what they have learnt shows where they leave some out
static void check_indexers(const Run* r) {
    const Config* c = config_of(r);
    const int entries = r->T / c->csa;
    if (!r->model->learns_index || !run_is_training(r)) { return; }
    if (entries == 0) {
        options_fail("seq-len", "expected at least the %d tokens of an entry, among which indexers learn to choose, "
                     "found %d: give more, or --indexer off", c->csa, r->T);
    }
    if (workplace(r)->aux.indexer.alone && r->o.early_stop > 0 && entries <= c->topk) {
        options_fail("early-stop", "with --indexer-alone no validation gets better in rows of %d positions: all of "
                     "their %d entries are chosen (index_topk is %d): leave it out, or give more --seq-len", r->T,
                     entries, c->topk);
    }
}

static void deepseek_v4_check(Run* r) {
    check_indexers(r);
    adapted_check(r);
    mtp_check(r);
    decoder_check(r, adapted_varies(r), 0, 0);
}

// of the model's rows those before the MTP module's
static int trunk_rows(const Run* r) {
    return mtp_rows_before(r->model, workplace(r)->v4.adapters.n_table, parameter_is_mtp);
}

static void box_attention(const Run* r, const Config* c) {
    const int n_csa = config_layers(c, CSA_LAYER), n_hca = config_layers(c, HCA_LAYER);
    const char* learns = c->aux.indexer == INDEXER_DENSE ? ", now all, and learns" : " and learns";
    box_row("  attention", "%d head%s of %d, one of keys, %d channels turn, a window of %d", c->H, c->H > 1 ? "s" : "",
            c->d, c->rotated, c->window);
    if (n_csa > 0) {
        box_row("  entries", "of %d tokens in %d layer%s, of which an indexer chooses %d%s", c->csa, n_csa,
                n_csa > 1 ? "s" : "", c->topk, indexer_learns(r) ? learns : "");
    }
    if (n_hca > 0) {
        box_row(n_csa > 0 ? "" : "  entries", "of %d tokens in %d layer%s", c->hca, n_hca, n_hca > 1 ? "s" : "");
    }
}

static void deepseek_v4_box(const Run* r) {
    const Config* c = config_of(r);
    const int n_hash = config_hash_layers(c);
    box_row("model", "%d layer%s, %d stream%s of %d channels, %d positions", c->L, c->L > 1 ? "s" : "", c->hc,
            c->hc > 1 ? "s" : "", c->D, c->max_T);
    box_attention(r, c);
    box_row("experts", "%d in a layer, %d wide, a token takes %d and one for all", c->E, c->F, c->k);
    if (n_hash > 0) { box_row("  by token", "in %d layer%s", n_hash, n_hash > 1 ? "s" : ""); }
    experts_box(r, c->E);
    mtp_box(r, &workplace(r)->aux.mtp, parameter_is_mtp);
    levelled_box(r, &workplace(r)->aux.balance, c->aux.bias_rate, c->aux.balance);
    decoder_active_box(r, workplace(r)->v4.adapters.n_table + trunk_rows(r));
    box_row("vocabulary", "%d, padded to %d", c->V, c->Vp);
    adapted_box(r, 0);
    decoder_ranks_box(r);
}

static void leave_rest(const Run* r, SafeSet* set) { config_leave_rest(config_of(r), set); }

static void deepseek_v4_load(Run* r, const SliceSink* sink) {
    const Workplace* w = workplace(r);
    adapted_load(r, sink);
    mtp_load_model(r, &w->aux.mtp, sink, w->v4.adapters.n_table, parameter_is_mtp, leave_rest);
}

// with --tp: what layer l needs of other ranks; the MTP module the next tokens, and the head
static double layer_parts_sent(const Run* r, int l, int is_back, int again) {
    const DeepseekV4* v4 = &workplace(r)->v4;
    const Model* m = r->model;
    const EntrySizes entries = entry_sizes(v4, TO_TRAIN, &m->cp);
    const size_t once_more[] = {AT(wo_b), AT(shared_down)};
    const int D = v4->config.D, N = run_positions(r), replays = again && decoder_recomputes(r);
    const double once = linear_layer_sends(m, &v4->adapters, l, TENSOR_NO_FIELD, 1, D, N);
    const double mtp = l < v4->config.L ? 0.0 : vocabulary_sends_head(m, D, N) + vocabulary_sends_rows(m, D, N);
    double n = once;
    for (int i = 0; i < 2 && replays; i++) {
        n += linear_layer_sends(m, &v4->adapters, l, once_more[i], 1, D, N) - once;
    }
    return n + mtp + entry_attention_sends(&entries, v4->config.kinds[l], is_back, r->o.batch_size, r->T, &m->tp);
}

// With --cp, bytes that the first rank sends of layer l before attention: keys for the window of the next rank, and
// what its first entries overlap with. index: of the indexer's entries too
static double layer_halos_sent(const Run* r, int l, int index) {
    const Config* c = config_of(r);
    const int B = r->o.batch_size, T = r->T, ratio = config_ratio(c, l), overlap = c->kinds[l] == CSA_LAYER;
    const RankGroup* cp = &r->model->cp;
    const int channels = c->d + (overlap && index ? c->dI : 0), before = entry_tokens_before(ratio, overlap);
    const double keys = entry_ranks_halo_sent(B, T, c->window - 1, c->d, cp);
    return ratio == 0 ? keys : keys + entry_ranks_halo_sent(B, T, before, 2 * (1 + overlap) * channels, cp);
}

// ... of entries of all ranks, or of their gradients
static double layer_entries_sent(const Run* r, int l, int index) {
    const Config* c = config_of(r);
    const int ratio = config_ratio(c, l), channels = c->d + (c->kinds[l] == CSA_LAYER && index ? c->dI : 0);
    return ratio == 0 ? 0.0 : entry_ranks_entries_sent(r->o.batch_size, r->T, ratio, channels, &r->model->cp);
}

// ... and of all, with what its router counts. Back, halos come to this rank alone; entries are gathered once more
static double layer_keys_sent(const Run* r, int l, int is_back, int again) {
    const Config* c = config_of(r);
    const EntrySizes s = entry_sizes(&workplace(r)->v4, TO_TRAIN, &r->model->cp);
    const int scores = entry_scores(&s, r->T, TO_TRAIN), learns = entry_learns(&s, r->T, TO_TRAIN);
    const int replays = again && decoder_recomputes(r), sequences = c->aux.balance > 0.0f ? r->o.batch_size : 0;
    double n = layer_halos_sent(r, l, scores) + layer_entries_sent(r, l, scores);
    n += replays * layer_halos_sent(r, l, learns) + (again + is_back) * layer_entries_sent(r, l, learns);
    return n + experts_count_sent(r, c->E, sequences);
}

// entries of r tokens that stand before a position of a row of T, on average
static double entries_before(int r, int T) { return T < r ? 0.0 : 0.5 * (T + 1.0 - r) / r; }

// ... and those that it sees in layer l; of what an indexer chooses all of them while that learns so
static double entries_seen(const Run* r, int l) {
    const Config* c = config_of(r);
    const int ratio = config_ratio(c, l), is_dense = c->aux.indexer == INDEXER_DENSE && r->model->learns_index;
    const double all = ratio == 0 ? 0.0 : entries_before(ratio, r->T), full = (double)c->topk * ratio;
    if (c->kinds[l] != CSA_LAYER || is_dense || r->T <= full) { return all; }
    return c->topk * (1.0 - 0.5 * full / r->T);
}

// do indexers compute scores?
static int has_scores(const Run* r) {
    const Config* c = config_of(r);
    return r->model->learns_index || r->T / c->csa > c->topk;
}

// of a token in layer l, forward and backward; of the indexer's scores forward alone, and both where it learns
static double attention_flops(const Run* r, int l) {
    const Config* c = config_of(r);
    const double of_window = decoder_attention_flops(c->H * c->d, c->window, r->T);
    const double seen = entries_seen(r, l), n = of_window + 12.0 * c->H * c->d * seen;
    const double scored = 2.0 * entries_before(c->csa, r->T) + (r->model->learns_index ? 4.0 * seen : 0.0);
    return c->kinds[l] == CSA_LAYER && has_scores(r) ? n + scored * c->nI * (c->dI + 1.0) : n;
}

// of what model_flops counts for row i: ape is added, not multiplied; indexers send nothing back to what they read, and
// without scores nothing goes through them
static double flops_not_done(const Run* r, int i) {
    const Model* m = r->model;
    const Tensor* t = &m->table[i];
    const size_t of_ape = offsetof(CompressorParameters, ape);
    const int is_ape = t->field == AT(csa) + of_ape || t->field == AT(hca) + of_ape || t->field == AT(index) + of_ape;
    const int reached = tensor_layers_below(t, t->layers) - tensor_layers_below(t, m->lowest);
    if (is_ape) { return model_flops(m, i); }
    if (!parameter_is_index(t) || t->on_disk == VECTOR) { return 0.0; }
    return has_scores(r) ? 2.0 * reached * (double)tensor_slice_elements(t) : model_flops(m, i);
}

static double deepseek_v4_flops_per_token(const Run* r) {
    const Config* c = config_of(r);
    const int learns_mtp = r->model->learns_mtp;
    const int n = learns_mtp ? r->model->n_table : workplace(r)->v4.adapters.n_table + trunk_rows(r);
    double sum = 0.0;
    for (int l = 0; l < c->L + learns_mtp; l++) { sum += attention_flops(r, l); }
    if (learns_mtp) {  // the output matrix a second time, and h_proj for hc - 1 streams more than the table counts
        sum += model_flops(r->model, model_row(r->model, AT(head), 0));
        sum += (c->hc - 1.0) * model_flops(r->model, model_row(r->model, AT(mtp_h_proj), 0));
    }
    for (int i = 0; i < n; i++) { sum -= flops_not_done(r, i); }
    return sum + decoder_flops(r, n);
}

static double workspace_bytes(const Run* r, int B) {
    const Purpose purpose = run_purpose(r);
    const EntrySizes entries = entry_sizes(&workplace(r)->v4, purpose, NULL);
    const int N = B * r->T / r->model->cp.size;
    return fmax(entry_workspace_bytes(&entries, N, B, r->T, purpose, &r->dev), decoder_workspace_bytes(r, B));
}

static float losses_beside(Run* r, float* grads) {
    (void)grads;
    return more_loss(&workplace(r)->v4);
}

static void deepseek_v4_stepped(Run* r, const Step* s) {
    const Config* c = config_of(r);
    auxiliary_stepped(r, s, &workplace(r)->aux, &c->aux, &AUXILIARY, c->L, c->L - config_hash_layers(c), c->E);
}

static json_t* deepseek_v4_summary(const Run* r) {
    return router_log_summary(r, NULL, 0, config_of(r)->L, config_of(r)->E);
}

static json_t* config_to_save(const Run* r, int eot, const char* dtype) {
    return config_json(config_of(r), eot, dtype);
}

static void deepseek_v4_forward(Run* r, Purpose purpose, const int* tokens, const int* targets, int B, int T, int t0) {
    indexer_forward(r, &workplace(r)->v4.indexer, purpose, tokens, targets, B, T, t0);
}

static Trainer deepseek_v4_trainer(void) {
    Trainer t = adapted_trainer(offsetof(Workplace, adapted));
    t.name = "train_deepseek_v4";
    t.on_gpus = "train_deepseek_v4 CUDA=1";
    t.about = "Trains DeepSeek V4, streams that mix, attention over entries and experts, from and to folders of it. "
              "First steps: make run-deepseek-v4.";
    t.presets = "random start from a preset: " DEEPSEEK_V4_PRESETS;
    t.usual_V = 129280;
    t.has_states = 1;
    t.options = deepseek_v4_options;
    t.parsed = router_log_levelled_keys;
    t.choose = deepseek_v4_choose;
    t.freeze = deepseek_v4_freeze;
    t.check = deepseek_v4_check;
    t.box = deepseek_v4_box;
    t.layer_parts_sent = layer_parts_sent;
    t.layer_keys_sent = layer_keys_sent;
    t.flops_per_token = deepseek_v4_flops_per_token;
    t.workspace_bytes = workspace_bytes;
    t.load = deepseek_v4_load;
    t.forward = deepseek_v4_forward;
    t.stepped = deepseek_v4_stepped;
    t.more_loss = losses_beside;
    t.config_json = config_to_save;
    t.summary = deepseek_v4_summary;
    return t;
}

int main(int argc, char** argv) {
    static Workplace place;  // all zero
    const Trainer trainer = deepseek_v4_trainer();
    adapted_init(&place.adapted, &PASSES, &place.v4.adapters, LORA_TARGETS(""));
    return run_main(&trainer, &place.v4.model, argc, argv);
}
#endif
