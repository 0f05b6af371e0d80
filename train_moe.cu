/*
A transformer whose MLPs are mixtures of experts, with one or a few heads for keys and values: Mixtral's architecture,
from sizes that learn on a laptop to 6.9 billion parameters of which a token uses 1.8. Read train_gpt2.c first: what a
run does beside the model is the same, and so are these chapters.

The model (doc/moe.md): token embedding, L blocks of
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

What the first one prints, for example (the numbers change with the text):
    step 0 | val loss 5.5673 | 8.032 bits/byte | best
    step 200/5000 | loss 2.5705 | norm 1.02 | lr 2.0e-03 | 40 ms | 6.5k tok/s | 24% peak | eta 3m08s | load 2.19
*/
#include "llmc/core/floatx.h"         // floatX: float or bf16
#include "llmc/models/activations.h"  // Activations, Tradeoffs: what a pass has beside the parameters
#include "llmc/models/decoder_passes.h"  // DecoderPasses: the way through the layers
#include "llmc/models/expert_layer.h" // ExpertPass: router and experts of a layer; experts on other ranks
#include "llmc/models/gqa_layer.h"    // GqaPass, gqa_layer_forward: attention of a layer
#include "llmc/models/layer.h"        // layer_linear, layer_rmsnorm_forward: operands of a layer of a pass
#include "llmc/models/levelled_routers.h"  // levelled_biases, levelled_weight: routers kept busy, each by itself
#include "llmc/models/linear.h"       // linear_room_elements, linear_layer_sends: scratch, what ranks send
#include "llmc/models/lm_head.h"      // LmHead: the output matrix and cross entropy
#include "llmc/models/moe.h"          // Config, Parameters, parameter_table
#include "llmc/models/other_losses.h"  // other_losses_layout
#include "llmc/models/stream.h"       // Stream: the residual stream, where backward asks for it
#include "llmc/ops/residual.h"        // residual_forward
#include "llmc/ranks/model_gradients.h"  // Model: parameters, gradients, moments
#ifndef TESTING                       // a test includes this file for the model alone
#include "llmc/models/decoder_run.h"  // decoder_options, decoder_begin_ranks, decoder_check, decoder_flops
#include "llmc/models/experts_run.h"  // experts_options, experts_box: --ep
#include "llmc/models/levelled_run.h"  // levelled_check_moves
#include "llmc/models/router_log.h"   // what routers have counted, for the log
#include "llmc/run/main.h"            // run_main: options, data, steps, checkpoints, ranks (llmc/run/)
#endif

// ---------------------------------------------------------------------------------------------------------------------
// 1. Tensors. Sizes and parameters are in llmc/models/moe.h; here is one line for each activation.

// what a pass leaves behind; from `dresidual` on the gradients on their way back, one buffer each for all layers
typedef struct {
    floatX *encoded, *norm1, *norm2, *norm, *logits, *branch, *dresidual, *dbranch;
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

static RouterShape router_shape(const Config* c) {
    const RouterShape s = {c->E, c->k, ROUTER_SOFTMAX, c->k > 1, 1.0f, 1, 1};  // one expert's share would always be 1
    return s;
}

static GqaSizes attention_sizes(const Config* c) {
    const GqaSizes s = {c->NH, c->NKV, c->HS, c->HS, 0, 0, NULL, NULL};  // all channels turn, in all layers
    return s;
}

static ExpertSizes expert_sizes(const Config* c, const Tradeoffs* how) {
    return activations_experts(how, c->D, c->F, router_shape(c), c->L);
}

typedef struct {
    Model model;    // the first member: a run finds its tensors here
    Config config;  // with --tp heads and rows of the vocabulary that this rank has
    Config whole;   // of all ranks
} Moe;

// scratch that all layers share
static void size_scratch(Activations* acts, const Moe* moe, int B, int T) {
    const Model* m = &moe->model;
    const int N = acts->N, N_head = activations_head_rows(&acts->how, B, N, acts->purpose);
    const int trains = acts->purpose == TO_TRAIN, N_last = acts->purpose == TO_GENERATE ? N_head : 1;
    const GqaSizes attention = attention_sizes(&moe->config);
    const size_t products = tp_larger(linear_room_elements(m, N), gqa_room_elements(&attention, m, N, trains));
    acts->parallel.n = tp_larger(products, vocabulary_room_elements(m, N, N_head, N_last));
    acts->keys.n = gqa_keys_elements(&attention, m, B * T, trains, acts->how.cp);
}

// B rows of T positions; generation keeps logits of the last position of each
static int activation_table(Tensor* table, const Moe* moe, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const Config c = moe->config;
    const int D = c.D, HQ = c.NH * c.HS;
    const int N = activations_positions(how, B, T, purpose), N_train = purpose == TO_TRAIN ? N : 0;
    const int L_norms = activations_kept(how, c.L, purpose, RECOMPUTE_NORMS);
    const int L_experts = activations_kept(how, c.L, purpose, RECOMPUTE_MLPS);
    const int L_block = activations_kept(how, c.L, purpose, RECOMPUTE_BLOCKS), L_out = purpose == TO_TRAIN ? c.L : 0;
    const int N_head = activations_head_rows(how, B, N, purpose);
    const RankGroup* tp = &moe->model.tp;
    const GqaSizes attention = attention_sizes(&c);
    const ExpertSizes experts = expert_sizes(&c, how);
    Tensor* t = table;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = input_activation(FIELD(encoded), N, D);         // of a later stage: the stream of the one before
    *t++ = activation(FIELD(norm1),      L_norms, N, D);
    t = gqa_tensor_rows(t, offsetof(ActivationTensors, attention), &attention, &moe->model, B, T, N, c.L, L_block,
                        purpose);
    t = stream_rows(t, FIELD(residual2), L_block, N, D, purpose, tp);  // after attention
    *t++ = activation(FIELD(norm2),      L_norms, N, D);       // what router and experts read
    t = expert_tensor_rows(t, offsetof(ActivationTensors, experts), &experts, N, L_experts, purpose);
    t = stream_rows(t, FIELD(residual3), L_out, N, D, purpose, tp);    // after the MLP
    *t++ = activation(FIELD(norm),       0, N, D);             // the last one's output
    *t++ = activation(FIELD(logits),     0, N_head, c.Vp);     // then their gradient
    *t++ = activation(FIELD(branch),     0, N, D);             // a block's output before it joins the stream
    *t++ = activation(FIELD(dresidual),  0, N_train, D);
    *t++ = activation(FIELD(dbranch),    0, N_train, D > HQ ? D : HQ);  // gradient of a norm's or attention's output
#undef FIELD
    return (int)(t - table);
}

static int statistic_table(Tensor* table, Config c, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const int N = activations_positions(how, B, T, purpose);
    const int L_block = activations_kept(how, c.L, purpose, RECOMPUTE_BLOCKS);
    const GqaSizes attention = attention_sizes(&c);
    const ExpertSizes experts = expert_sizes(&c, how);
    Tensor* t = table;
#define FIELD(name) #name, offsetof(Statistics, name)
    *t++ = activation(FIELD(norm1_rstd), L_block, N, 1);
    t = gqa_statistic_rows(t, offsetof(Statistics, attention), &attention, N, L_block);
    *t++ = activation(FIELD(norm2_rstd), L_block, N, 1);
    t = expert_statistic_rows(t, offsetof(Statistics, experts), &experts, N, L_block, purpose);
    *t++ = activation(FIELD(norm_rstd),  0, N, 1);
    *t++ = activation(FIELD(losses),     0, N, 1);
#undef FIELD
    return (int)(t - table);
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: forward, head, backward. AdamW is in llmc/run/train.h and needs no word about experts.

// sizes only: what a run will need is known before anything is allocated
static void moe_layout(Moe* moe, Config c) {
    moe->config = moe->whole = c;
    model_layout(&moe->model, parameter_table(moe->model.table, &c));
    other_losses_layout(&moe->model, c.L * (int)router_statistics_length(c.E), 0, 0);
}

// Sizes only; returns the bytes that activations_open will take on the device, infinite for more positions than can be
static double activations_layout(const Model* m, Activations* acts, int B, int T, Purpose purpose, Tradeoffs how) {
    const Moe* moe = (const Moe*)m;
    const Config* c = &moe->config;
    const ExpertSizes experts = expert_sizes(c, &how);
    activations_begin(acts, B, T, purpose, how);
    acts->eps = c->eps;
    if ((double)B * T > expert_most_positions(c->k)) { return INFINITY; }
    size_scratch(acts, moe, B, T);
    const int n_tensors = activation_table(acts->tensors.table, moe, B, T, purpose, &how);
    const int n_statistics = statistic_table(acts->statistics.table, *c, B, T, purpose, &how);
    return activations_measure(acts, n_tensors, n_statistics, &experts, c->HS, config_rope_theta(c));
}

// ---- what stands where: parameters by their field of the table, at layer l ----

#define AT(name) offsetof(Parameters, name)

static const GqaFields ATTENTION = {AT(wq), NO_BIAS, AT(wk), NO_BIAS, AT(wv), NO_BIAS, AT(wo), NO_BIAS, 0, 0};
static const ExpertFields EXPERTS = {AT(router), AT(gate_up), AT(down)};

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

static GqaPass attention_pass(const Moe* moe, const Activations* acts, int l, int N) {
    const GqaSizes size = attention_sizes(&moe->config);
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    return layer_gqa(acts, ATTENTION, &size, &a.attention, &s.attention, a.norm1, l, N);
}

// router and experts of layer l, without gradients
static ExpertPass expert_pass(const Moe* moe, Activations* acts, int l, int N) {
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    ExpertPass p = layer_experts(acts, EXPERTS, &a.experts, &s.experts, a.norm2, l, N);
    p.bias = levelled_bias(&moe->model, AT(bias), l);
    p.numbers = layer_numbers(acts, l, moe->config.E);
    return p;
}

// the first half of layer l, and the norm behind it: N positions, whose stream comes in as `residual`
static void attention_block_forward(const Moe* moe, Activations* acts, int l, const floatX* residual, int N,
                                    const Device* dev) {
    const ActivationTensors a = layer_activations(acts, l);
    const GqaPass attention = attention_pass(moe, acts, l, N);
    layer_rmsnorm_forward(acts, a.norm1, layer_statistics(acts, l).norm1_rstd, residual, AT(norm1), l, N, dev);
    gqa_layer_forward(&attention, a.branch, dev);
    layer_residual_rmsnorm_forward(acts, a.residual2.x, a.norm2, layer_statistics(acts, l).norm2_rstd, residual,
                                   a.branch, AT(norm2), l, N, dev);
}

// the second half up to the products that are kept for backward. replay: these positions have chosen their experts
static void experts_up(const Moe* moe, Activations* acts, int l, int replay, int N, const Device* dev) {
    const ExpertPass p = expert_pass(moe, acts, l, N);
    expert_choose(&p, replay, dev);
    expert_gather(&p, dev);
    expert_gate_up(&p, dev);
}

// ... and from there on: what the experts of a token say, weighed and added to the stream
static void experts_down(const Moe* moe, Activations* acts, int l, int N, const Device* dev) {
    const ActivationTensors a = layer_activations(acts, l);
    const ExpertPass p = expert_pass(moe, acts, l, N);
    expert_down(&p, a.branch, dev);
    residual_forward(a.residual3.x, a.residual2.x, a.branch, (size_t)N * moe->config.D, dev);
    layer_keep(acts, l, a.residual2, a.residual3, N, moe->config.D, dev);
}

// ---- the parts of a pass, which decoder_passes.h puts together ----

// where the stream of layer l is
static DecoderStreams streams(const Model* m, const Activations* acts, int l) {
    const ActivationTensors a = layer_activations(acts, l);
    const DecoderStreams x = {a.encoded, a.residual3, a.dresidual, ((const Moe*)m)->config.D};
    return x;
}

static void embed_forward(const Model* m, Activations* acts, int N, const Device* dev) {
    floatX* encoded = layer_activations(acts, 0).encoded;
    (void)m;
    vocabulary_rows(encoded, acts->batch.tokens, layer_linear(acts, AT(embedding), 0), N, dev);
}

static void block_forward(const Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev) {
    const Moe* moe = (const Moe*)m;
    attention_block_forward(moe, acts, l, residual, N, dev);
    experts_up(moe, acts, l, 0, N, dev);
    experts_down(moe, acts, l, N, dev);
}

// the last norm
static void end_forward(const Model* m, Activations* acts, const floatX* residual, int N, const Device* dev) {
    (void)m;
    layer_rmsnorm_forward(acts, layer_activations(acts, 0).norm, layer_statistics(acts, 0).norm_rstd, residual,
                          AT(norm), 0, N, dev);
}

// the field of the output matrix: the embedding where it is tied
static size_t output_field(const Config* c) { return c->tied ? AT(embedding) : AT(head); }

// from the last norm's output to logits and losses, head_rows positions at a time, and back to its gradient
static LmHead lm_head(const Model* m, const Activations* acts) {
    const Config* c = &((const Moe*)m)->config;
    const ActivationTensors a = layer_activations(acts, 0);
    return layer_head(acts, output_field(c), a.norm, a.dbranch, a.logits, layer_statistics(acts, 0).losses, c->V);
}

// ---- backward: forward's calls upside down. A gradient whose pointer is NULL is of something frozen ----

// from the head's gradient to that of the stream behind the last layer
static void end_backward(const DecoderPasses* passes, Model* m, Activations* acts, int N, const Device* dev) {
    (void)passes;
    Moe* moe = (Moe*)m;
    const int last = model_end_layer(m) - 1, D = moe->config.D;
    const ActivationTensors a = layer_activations(acts, last);
    const floatX* residual = layer_stream(acts, a.residual3, last, N, D, dev);
    layer_rmsnorm_backward(acts, a.dresidual, a.dbranch, residual, layer_statistics(acts, 0).norm_rstd, AT(norm), 0, 0,
                           N, dev);
}

// What --recompute left out of layer l, and which rows its experts have: of the last layer all is still there
static void recompute_block(const Model* m, Activations* acts, int l, const floatX* residual, int N,
                            const Device* dev) {
    const Moe* moe = (const Moe*)m;
    const Config* c = &moe->config;
    const int level = acts->how.recompute;
    const ActivationTensors a = layer_activations(acts, l);
    const Statistics s = layer_statistics(acts, l);
    const ExpertPass experts = expert_pass(moe, acts, l, N);
    if (layer_is_fresh(acts, l)) { return; }
    if (level == RECOMPUTE_BLOCKS) {
        attention_block_forward(moe, acts, l, residual, N, dev);
        experts_up(moe, acts, l, 1, N, dev);
        return;
    }
    layer_stream(acts, a.residual2, l, N, c->D, dev);
    if (level >= RECOMPUTE_NORMS) {
        layer_rmsnorm_forward(acts, a.norm1, s.norm1_rstd, residual, AT(norm1), l, N, dev);
        layer_rmsnorm_forward(acts, a.norm2, s.norm2_rstd, a.residual2.x, AT(norm2), l, N, dev);
    }
    expert_gather(&experts, dev);
    if (level >= RECOMPUTE_MLPS) { expert_gate_up(&experts, dev); }
}

// dresidual is the gradient of the stream behind layer l, and becomes that behind its attention
static void experts_backward(Moe* moe, Activations* acts, int l, int N, const Device* dev) {
    const Config* c = &moe->config;
    const float balance = c->balance == BALANCE_LOSS ? levelled_weight(&moe->model, c->aux_alpha, 1) : 0.0f;
    const float z = levelled_weight(&moe->model, c->z_lambda, 1);
    const ActivationTensors a = layer_activations(acts, l);
    float* dbias = c->balance == BALANCE_BIAS ? layer_vector_gradient(acts, AT(bias), l) : NULL;
    ExpertPass p = expert_pass(moe, acts, l, N);
    layer_experts_back(&p, acts, EXPERTS, l);
    if (dbias) { device_zero(dbias, sizeof(float) * (size_t)c->E, dev); }  // it learns otherwise: level_biases
    expert_backward(&p, a.dbranch, a.dresidual, p.numbers, balance, z, dev);
    layer_rmsnorm_backward(acts, a.dresidual, a.dbranch, a.residual2.x, layer_statistics(acts, l).norm2_rstd, AT(norm2),
                           l, 1, N, dev);
}

// ... and then that before the layer, whose stream came in as `residual`
static void attention_block_backward(Moe* moe, Activations* acts, int l, const floatX* residual, int N,
                                     const Device* dev) {
    const ActivationTensors a = layer_activations(acts, l);
    const GqaPass attention = attention_pass(moe, acts, l, N);
    gqa_layer_backward(&attention, a.dbranch, a.dresidual, dev);
    layer_rmsnorm_backward(acts, a.dresidual, a.dbranch, residual, layer_statistics(acts, l).norm1_rstd, AT(norm1), l,
                           1, N, dev);
}

// dresidual goes from the stream behind layer l to the one before it, which came in as `residual`
static void block_backward(Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev) {
    experts_backward((Moe*)m, acts, l, N, dev);
    attention_block_backward((Moe*)m, acts, l, residual, N, dev);
}

// from dresidual to the gradient of the embedding
static void embed_backward(Model* m, Activations* acts, int N, const Device* dev) {
    vocabulary_embedding_backward(m, AT(embedding), ((Moe*)m)->config.tied, layer_activations(acts, 0).dresidual,
                                  acts->batch.tokens, layer_linear(acts, AT(embedding), 0), N, dev);
}

// for runs and tests
static const DecoderPasses PASSES = {activations_layout, streams,      embed_forward,   block_forward,  end_forward,
                                     lm_head,            end_backward, recompute_block, block_backward, embed_backward};

// ---- what routers have counted in an update, once model_reduce is back ----

// What the routers add to the loss; the leaves have its gradients. A z-loss that is switched off may be infinite
static float routing_loss(const Config* c, const Routing* now) {
    const float balance = c->balance == BALANCE_LOSS ? c->aux_alpha * now->balance : 0.0f;
    return balance + (c->z_lambda > 0.0f ? c->z_lambda * now->z : 0.0f);
}

// with balance "bias"; stays (layers): those that --freeze keeps
static void level_biases(Moe* moe, float rate, const char* stays, const Device* dev) {
    levelled_biases(&moe->model, AT(router), AT(bias), rate, 1, stays, moe->config.E, dev);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. What a run asks of this model (llmc/run/trainer.h), and main.

#ifndef TESTING
typedef struct {
    Moe moe;                  // first
    Decoder decoder;          // activations, and some options
    ConfigFile file;          // of the model; all zero: there is none
    int balance, tied, weights;
    float aux_alpha, z_lambda, bias_rate, rope_alpha;
    char stays[CONFIG_MAX_LAYERS];  // of the router of each layer: --freeze keeps its bias
} Workplace;

static Workplace* workplace(const Run* r) { return (Workplace*)r->model; }
static const Config* config_of(const Run* r) { return &workplace(r)->moe.whole; }

// gives rows of run_options.h the meaning that they have here
static void moe_reword_options(Option* t, int n) {
    options_reword(t, n, "from", "parameters to start from: a run folder or checkpoint, a Hugging Face folder, or a "
                   ".safetensors file with config.json beside it");
    options_reword(t, n, "config", "random start from a config.json as Mixtral's, with sizes of your own: doc/moe.md "
                   "lists its keys, dev/hello_moe.json is one");
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
        decoder_tied_option(&w->tied, "0"),
    };
    run_add_options(r, own, sizeof own);
    decoder_options(r, DECODER_RECOMPUTE("the experts' first products too"), "8192", CP_CHUNKS, 1);
    experts_options(r, &w->decoder.how.ep);
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
    const int from_preset = !*r->config;
    Config config, *c = &config;
    if (*r->weights && from_preset) { fail_input("%s: expected a Mixtral model with its config.json", r->o.from); }
    *c = from_preset ? config_preset(r->o.model, run_new_vocabulary(r)) : config_load(r->config, &w->file);
    decoder_choose_tied(r, w->tied, &c->tied);
    moe_choose_balance(r, c);
    if (run_is_typed(r, "rope-alpha")) { moe_choose_rope(r, c, shortest_double(w->rope_alpha)); }
    options_set(r->table, r->n_options, "rope-alpha", format_float((float)c->rope_alpha).s);
    options_set(r->table, r->n_options, "tied", c->tied ? "1" : "0");
    moe_layout(&w->moe, *c);
    if (w->weights) { model_store_frozen(&w->moe.model, STORED_BF16); }
    r->V = r->classes = c->V;
    r->max_T = c->max_T;
    const DecoderSizes sizes = decoder_sizes(c->Vp, c->D, AT(embedding), c->tied, c->E, c->k);
    decoder_begin_ranks(r, &sizes);
    w->moe.config = config_part(c, r->model->tp.size);
}

static void moe_freeze(Run* r) {
    Workplace* w = workplace(r);
    const int is_moved = config_of(r)->balance == BALANCE_BIAS && model_learns(r->model);
    const int moves = levelled_keep(r->model, AT(bias), 0, w->stays);
    levelled_check_moves(is_moved ? w->bias_rate : 0.0f, moves);
}

static void moe_check(Run* r) {
    const Config* c = config_of(r);
    const int learns = run_is_training(r) || *r->o.probe;
    options_refuse(learns && workplace(r)->weights, "weights", "bf16 is for --generate, --eval-only and --export-hf");
    decoder_check(r, NULL, workplace(r)->moe.config.NH, workplace(r)->moe.config.NKV);
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
        const int is_bias = t->field == AT(bias);
        if (t->field == AT(embedding)) { embedding = t->name; }
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
    const char* who = run_is_typed(r, "balance") ? "" : w->file.says_balance ? " (config.json)"
                    : *r->weights ? " (config.json says nothing)" : "";
    experts_balance_box(c->balance == BALANCE_BIAS ? format_float(w->bias_rate).s : "none",
                        c->balance == BALANCE_LOSS ? c->aux_alpha : 0.0f, "", who);
    if (c->z_lambda > 0.0f) { box_row("  z-loss", "%s", format_float(c->z_lambda).s); }
}

static void moe_box(const Run* r) {
    const Config* c = config_of(r);
    box_row("model", "%d layer%s of %d channels, %d head%s of %d for %d of keys and values, %d positions", c->L,
            c->L > 1 ? "s" : "", c->D, c->NH, c->NH > 1 ? "s" : "", c->HS, c->NKV, c->max_T);
    box_row("experts", "%d in a layer, %d wide, a token takes %d", c->E, c->F, c->k);
    experts_box(r, c->E);
    if (run_is_training(r) || *r->o.probe) { moe_box_balance(r); }
    decoder_active_box(r, r->model->n_table);
    box_row("vocabulary", "%d, padded to %d", c->V, c->Vp);
    decoder_ranks_box(r);
}

// with --tp: what the products of layer l need of other ranks
static double layer_parts_sent(const Run* r, int l, int is_back, int again) {
    const Config* c = &workplace(r)->moe.config;
    const GqaSizes attention = attention_sizes(c);
    const int N = run_positions(r), replays = again && decoder_recomputes(r);
    return linear_layer_sends(r->model, NULL, l, replays ? AT(wo) : TENSOR_NO_FIELD, 3, c->D, N) +
           gqa_layer_sends(&attention, ATTENTION, r->model, l, 1 + replays, is_back, N);
}

// with --cp: what its attention and its router do
static double layer_keys_sent(const Run* r, int l, int is_back, int again) {
    const Config* c = &workplace(r)->moe.config;
    (void)l;
    return cp_layer_sent(r, c->NH, c->NKV, c->HS, is_back, again && decoder_recomputes(r)) +
           experts_count_sent(r, c->E, 0);
}

static double moe_flops_per_token(const Run* r) {
    const Config* c = config_of(r);
    const double attention = c->L * decoder_attention_flops(c->NH * c->HS, 0, r->T);
    return attention + decoder_flops(r, r->model->n_table);
}

static double workspace_bytes(const Run* r, int B) {
    const Config* c = config_of(r);
    return fmax(decoder_attention_bytes(r, B, c->NH * c->HS, c->NH), decoder_workspace_bytes(r, B));
}

static float losses_beside(Run* r, float* grads) {
    const Routing now = routing_read(r->model, config_of(r)->L, config_of(r)->E);
    (void)grads;
    return routing_loss(config_of(r), &now);
}

static void moe_stepped(Run* r, const Step* s) {
    Workplace* w = workplace(r);
    const int L = w->moe.config.L;
    const Routing now = routing_read(r->model, L, w->moe.config.E);
    const float z = now.z / (float)L;
    if (!s->skipped) {
        save_let_change(r);
        level_biases(&w->moe, w->bias_rate, w->stays, &r->dev);
    }
    router_log_step(r, now.balance / (float)L, &z, now.load, now.idle);
}

static json_t* moe_summary(const Run* r) {
    return router_log_summary(r, NULL, 0, config_of(r)->L, config_of(r)->E);
}

static json_t* config_to_save(const Run* r, int eot, const char* dtype) {
    return config_json(config_of(r), eot, dtype);
}

static Trainer moe_trainer(void) {
    Trainer t = decoder_trainer(offsetof(Workplace, decoder));
    t.name = "train_moe";
    t.on_gpus = "train_moe CUDA=1";
    t.about = "Trains a transformer of experts: each token computes k of E MLPs. First steps: make run-moe.";
    t.presets = "random start from a preset: tiny, small (39M parameters with bytes, 55M with 32,000 tokens), 6.9b";
    t.usual_V = 32000;
    t.options = moe_options;
    t.parsed = router_log_keys;
    t.choose = moe_choose;
    t.freeze = moe_freeze;
    t.check = moe_check;
    t.box = moe_box;
    t.layer_parts_sent = layer_parts_sent;
    t.layer_keys_sent = layer_keys_sent;
    t.flops_per_token = moe_flops_per_token;
    t.workspace_bytes = workspace_bytes;
    t.load = moe_load;
    t.stepped = moe_stepped;
    t.more_loss = losses_beside;
    t.config_json = config_to_save;
    t.summary = moe_summary;
    return t;
}

int main(int argc, char** argv) {
    static Workplace place;  // all zero
    const Trainer trainer = moe_trainer();
    place.decoder.passes = &PASSES;
    return run_main(&trainer, &place.moe.model, argc, argv);
}
#endif
