/*
GPT-2 and GPT-3 on GPUs: the model of train_gpt2.c, which is the file to read first, with bf16 weights and activations,
fused kernels, and ranks that share the work over NCCL. Same options, log, run folder and checkpoints: what one of the
two trainers has begun, the other continues.

What is different here, and why:
    weights       are stored as floatX, bf16 by default; AdamW updates float masters, from which they are rounded
    activations   are kept for all layers, or computed again in backward: --recompute trades time for memory
    the head      takes --head-rows positions at a time, so that the logits of a batch never exist as a whole
    host          it only launches: inside an update nothing waits for the GPU until the norm is read
There are no kernels here. Every op's are in its header in llmc/, behind the loop that defines them.

    make train_gpt2cu                    with nvcc, bf16 (PRECISION=fp32, PRECISION=exact: the bits of train_gpt2.c)
    make train_gpt2cu CPU=1              the same file with a C compiler, exact
    ./train_gpt2cu --model d12 --train 'shards/train_*.bin' --batch-size 64 --batch-tokens 524288 --steps 20000
    ./launch -n 8 ./train_gpt2cu ...     eight GPUs, the same result to the last bit
*/
#include "llmc/ops/attention.h"        // attention_forward, attention_backward
#include "llmc/files/checkpoint.h"     // SavedFiles, checkpoint_find, checkpoint_path
#include "llmc/ranks/comm.h"           // Comm, comm_watch: several ranks train together
#include "llmc/ops/crossentropy.h"     // crossentropy_fused, losses_sum
#include "llmc/core/device.h"          // Device, device_alloc, device_upload
#include "llmc/ops/documents.h"        // Segment, documents_segments: where attention and positions start anew
#include "llmc/ops/embedding.h"        // embedding_forward, embedding_backward
#include "llmc/run/evaluate.h"         // Evaluator, evaluate_loss, evaluate_answers
#include "llmc/core/floatx.h"          // floatX: float or bf16; floatx_download
#include "llmc/ops/gelu.h"             // gelu_forward, gelu_backward
#include "llmc/run/generate.h"         // Generator, generate_sample, generate_texts
#include "llmc/models/gpt2.h"          // Config, Parameters, parameter_table, gpt2_load: shared with train_gpt2.c
#include "llmc/files/hf_folder.h"      // model_find, hf_export_begin, tokenizer_save
#include "llmc/ops/layernorm.h"        // layernorm_forward, residual_layernorm_forward, layernorm_backward
#include "llmc/core/layers.h"          // freeze_slices
#include "llmc/files/llmc_bin.h"       // llmc_bin_save: llm.c's checkpoint format
#include "llmc/run/log.h"              // Log, log_step, log_validation, box_row, seconds_now
#include "llmc/ops/matmul.h"           // matmul_forward, matmul_gelu_forward, matmul_backward
#include "llmc/run/peak.h"             // matmul_peak, memory_available, check_memory
#include "llmc/run/probe.h"            // ProbeBatch, probe_read
#include "llmc/run/ranks.h"            // ranks_open, ranks_compare
#include "llmc/run/run.h"              // RunOptions, RunState, run_save_begin: what all trainers share
#include "llmc/run/rundata.h"          // RunData: training and validation rows, examples
#include "llmc/ranks/moments.h"        // moments_save, moments_load
#include "llmc/run/snapshot.h"         // Snapshot, snapshot_save: a checkpoint is written while training goes on
#include "llmc/core/tensor.h"          // Tensor: the table of parameters and activations
#include "llmc/run/tensorboard.h"      // TensorBoard, tensorboard_step, tensorboard_validation
#include "llmc/files/tensorfile.h"     // tensors_save_folder
#include "llmc/ranks/verify.h"         // Verify: a step computed twice
#include "llmc/ranks/data_parallel.h"  // DataParallel, Optimizer: gradients, norm and AdamW, dealt out over ranks

// ---------------------------------------------------------------------------------------------------------------------
// 1. Tensors. Sizes and parameters are those of train_gpt2.c, in llmc/models/gpt2.h; here is one line for each activation.

// weights as forward and backward read them; Parameters (llmc/models/gpt2.h) are floats: gradients
typedef struct {
    floatX *wte, *wpe, *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb, *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb,
        *lnfw, *lnfb;
} StoredParameters;  // the fields of Parameters, in the same order: one table serves both

// what a pass leaves behind; the last three are the gradients on their way back, one buffer each for all layers
typedef struct {
    floatX *encoded, *ln1, *qkv, *atty, *residual2, *ln2, *fch, *fch_gelu, *residual3, *lnf, *logits, *branch,
        *dresidual, *dbranch, *dwide;
} ActivationTensors;

// what must not lose digits, always float
typedef struct {
    float *ln1_mean, *ln1_rstd, *att_max, *att_inv, *ln2_mean, *ln2_rstd, *lnf_mean, *lnf_rstd, *losses;
} Statistics;

enum { N_ACTIVATIONS = 15, N_STATISTICS = 9 };
typedef enum { TO_GENERATE, TO_EVALUATE, TO_TRAIN } Purpose;
typedef enum { KEEP_ALL, RECOMPUTE_GELU, RECOMPUTE_NORMS, RECOMPUTE_BLOCKS } Recompute;  // each includes those before

// Time against memory. recompute never changes a bit; in fast builds the other two change how sums are rounded
typedef struct {
    int recompute;    // Recompute
    int gelu_fusion;  // GELU inside the matmul, from unrounded sums
    int head_rows;    // positions whose logits exist at once
} Tradeoffs;

// layers that keep a tensor of their own which --recompute `level` and above compute again; 0: one buffer serves all
static int layers_kept(Config c, Purpose purpose, const Tradeoffs* how, Recompute level) {
    return purpose == TO_TRAIN && how->recompute < (int)level ? c.L : 0;
}

// B rows of T positions; generation keeps logits of the last position only
static void activation_table(Tensor* t, Config c, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const int C = c.C, N = B * T, N_train = purpose == TO_TRAIN ? N : 0, L_out = purpose == TO_TRAIN ? c.L : 0;
    const int L_gelu = layers_kept(c, purpose, how, RECOMPUTE_GELU);
    const int L_norms = layers_kept(c, purpose, how, RECOMPUTE_NORMS);
    const int L_block = layers_kept(c, purpose, how, RECOMPUTE_BLOCKS);
    const int L_cache = purpose == TO_GENERATE ? c.L : L_block;
    const int N_head = purpose == TO_GENERATE ? 1 : N < how->head_rows ? N : how->head_rows;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = activation(FIELD(encoded),   0, N, C);         // wte + wpe
    *t++ = activation(FIELD(ln1),       L_norms, N, C);
    *t++ = activation(FIELD(qkv),       L_cache, N, 3 * C);  // in generation: the key-value cache
    *t++ = activation(FIELD(atty),      L_block, N, C);   // attention's output before its projection
    *t++ = activation(FIELD(residual2), L_block, N, C);   // residual stream after attention
    *t++ = activation(FIELD(ln2),       L_norms, N, C);
    *t++ = activation(FIELD(fch),       L_block, N, 4 * C);
    *t++ = activation(FIELD(fch_gelu),  L_gelu, N, 4 * C);
    *t++ = activation(FIELD(residual3), L_out, N, C);     // residual stream after the MLP
    *t++ = activation(FIELD(lnf),       0, N, C);
    *t++ = activation(FIELD(logits),    0, N_head, c.Vp); // then their gradient
    *t++ = activation(FIELD(branch),    0, N, C);         // a block's output before it joins the stream
    *t++ = activation(FIELD(dresidual), 0, N_train, C);
    *t++ = activation(FIELD(dbranch),   0, N_train, C);      // gradient of a LayerNorm's or attention's output
    *t++ = activation(FIELD(dwide),     0, N_train, 4 * C);  // gradient of fch, later of qkv
#undef FIELD
}

static void statistic_table(Tensor* t, Config c, int B, int T, Purpose purpose, const Tradeoffs* how) {
    const int N = B * T, L_block = layers_kept(c, purpose, how, RECOMPUTE_BLOCKS);
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
#undef FIELD
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: create, forward, head, backward, update.

typedef struct {
    Config config;
    Tensor table[N_PARAMETERS];
    size_t n;                     // elements of an arena of whole tensors
    floatX* weights;              // whole, on every rank
    float *master, *adam_m, *adam_v;  // the parts that this rank keeps; master NULL: the weights are all there is
    int* frozen;                  // of every slice in table order: --freeze. NULL: none
    DataParallel dp;                    // gradients of micro-batches, and which part of all this belongs to this rank
} GPT2;

typedef struct {
    int B, T;                     // room
    Tradeoffs how;
    Tensor table[N_ACTIVATIONS], statistic_table[N_STATISTICS];
    size_t n, n_statistics;
    floatX* arena;
    float* statistics;
    int *tokens, *targets;        // (B, T) on the device
    int document_start;           // token with which attention and positions start anew, or NO_RESET
    Segment* segments;            // of the batch: what attention and positions see as one sequence
    int n_segments;
} Activations;

// sizes only: what a run will need is known before anything is allocated
static void gpt2_layout(GPT2* model, Config c) {
    memset(model, 0, sizeof *model);
    model->config = c;
    parameter_table(model->table, c);
    model->n = tensors_layout(model->table, N_PARAMETERS);
}

static void gpt2_init(GPT2* model, Config c) {
    gpt2_layout(model, c);
    model->weights = (floatX*)device_alloc(sizeof(floatX) * model->n, "weights");
}

// Weights from the floats of a checkpoint after so many updates, rounded with the noise of the last of them as
// dp_update does, so that a resumed run has the same ones. What is a bf16 already stays what it is.
static void gpt2_store(GPT2* model, const float* params, int updates, const Device* dev) {
    size_t most = 0;
    for (int i = 0; i < N_PARAMETERS; i++) {
        const size_t n = tensor_slice_elements(&model->table[i]);
        most = n > most ? n : most;
    }
    float* staged = (float*)device_alloc(sizeof(float) * most, "a tensor on its way to the device");
    for (int i = 0, slice = 0; i < N_PARAMETERS; i++) {
        const Tensor* t = &model->table[i];
        const size_t n = tensor_slice_elements(t);
        for (int l = 0; l < tensor_slices(t); l++, slice++) {
            const size_t first = t->offset + n * (size_t)l;
            const uint32_t noise_key = model->frozen && model->frozen[slice] ? 0 : (uint32_t)updates;
            device_upload(staged, params + first, sizeof(float) * n, dev);
            round_stored(model->weights + first, staged, n, noise_key, first, dev);
        }
    }
    device_sync(dev);
    device_release(staged, sizeof(float) * most);
}

// Gradients, masters and moments, for updates of n_leaves micro-batches in all. comm NULL: alone. zero: llmc/ranks/data_parallel.h
static void gpt2_init_training(GPT2* model, Comm* comm, int n_leaves, int zero, int with_master, const float* params,
                               const Device* dev) {
    DataParallel* s = &model->dp;
    dp_init(s, comm, model->table, N_PARAMETERS, model->frozen, n_leaves, zero);
    dp_open(s);
    model->adam_m = (float*)device_alloc(sizeof(float) * s->n_kept, "first moments");
    model->adam_v = (float*)device_alloc(sizeof(float) * s->n_kept, "second moments");
    if (FLOATX_IS_FLOAT || !with_master) { return; }
    model->master = (float*)device_alloc(sizeof(float) * s->n_kept, "master weights");
    dp_deal(s, model->master, params, dev);
}

// what an update changes
static Weights gpt2_weights(const GPT2* model) {
    return weights_of(model->weights, sizeof(floatX), model->master, model->adam_m, model->adam_v);
}

static void gpt2_free(GPT2* model) {
    device_release(model->weights, sizeof(floatX) * model->n);
    device_release(model->master, sizeof(float) * model->dp.n_kept);
    device_release(model->adam_m, sizeof(float) * model->dp.n_kept);
    device_release(model->adam_v, sizeof(float) * model->dp.n_kept);
    dp_free(&model->dp);
    free(model->frozen);
}

// sizes only; returns the bytes that activations_init will take on the device
static double activations_layout(Activations* a, Config c, int B, int T, Purpose purpose, Tradeoffs how) {
    memset(a, 0, sizeof *a);
    a->B = B;
    a->T = T;
    a->how = how;
    a->document_start = NO_RESET;
    activation_table(a->table, c, B, T, purpose, &a->how);
    statistic_table(a->statistic_table, c, B, T, purpose, &a->how);
    a->n = tensors_layout(a->table, N_ACTIVATIONS);
    a->n_statistics = tensors_layout(a->statistic_table, N_STATISTICS);
    return (double)sizeof(floatX) * (double)a->n + 4.0 * (double)a->n_statistics + 8.0 * B * T;
}

static void activations_init(Activations* a, Config c, int B, int T, Purpose purpose, Tradeoffs how) {
    activations_layout(a, c, B, T, purpose, how);
    const size_t n = (size_t)B * (size_t)T;
    a->arena = (floatX*)device_alloc(sizeof(floatX) * a->n, "activations");
    a->statistics = (float*)device_alloc(sizeof(float) * a->n_statistics, "statistics");
    a->tokens = (int*)device_alloc(sizeof(int) * n, "tokens");
    a->targets = (int*)device_alloc(sizeof(int) * n, "targets");
    a->segments = (Segment*)malloc_check(sizeof(Segment) * n, "segments");
}

static void activations_free(Activations* a) {
    const size_t n = (size_t)a->B * (size_t)a->T;
    device_release(a->arena, sizeof(floatX) * a->n);
    device_release(a->statistics, sizeof(float) * a->n_statistics);
    device_release(a->tokens, sizeof(int) * n);
    device_release(a->targets, sizeof(int) * n);
    free(a->segments);
}

static StoredParameters layer_weights(const GPT2* model, int l) {
    StoredParameters p;
    tensors_point_sized(&p, model->table, N_PARAMETERS, model->weights, sizeof(floatX), l);
    return p;
}

// where the gradients of the micro-batch that is computed now are to be written
static Parameters layer_gradients(GPT2* model, int l) {
    Parameters d;
    dp_point(&model->dp, &d, l);
    return d;
}

static ActivationTensors layer_activations(const Activations* acts, int l) {
    ActivationTensors a;
    tensors_point_sized(&a, acts->table, N_ACTIVATIONS, acts->arena, sizeof(floatX), l);
    return a;
}

static Statistics layer_statistics(const Activations* acts, int l) {
    Statistics s;
    tensors_point(&s, acts->statistic_table, N_STATISTICS, acts->statistics, l);
    return s;
}

// layer l from its first LayerNorm's output to GELU's: with N positions from t0 on, whose stream comes in as `residual`
static void block_forward(const GPT2* model, Activations* acts, int l, const floatX* residual, int N, int t0,
                          const Device* dev) {
    const int C = model->config.C, NH = model->config.NH;
    ActivationTensors a = layer_activations(acts, l);
    Statistics s = layer_statistics(acts, l);
    StoredParameters p = layer_weights(model, l);
    matmul_forward(a.qkv + (size_t)t0 * 3 * C, a.ln1, p.qkvw, p.qkvb, N, C, 3 * C, dev);
    for (int i = 0; i < acts->n_segments; i++) {
        Segment x = acts->segments[i];
        attention_forward(a.atty + x.first * C, s.att_max + x.first * NH, s.att_inv + x.first * NH,
                          a.qkv + x.first * 3 * C, x.rows, x.T, C, NH, t0, dev);
    }
    matmul_forward(a.branch, a.atty, p.attprojw, p.attprojb, N, C, C, dev);
    residual_layernorm_forward(a.residual2, a.ln2, s.ln2_mean, s.ln2_rstd, residual, a.branch, p.ln2w, p.ln2b, N, C,
                               dev);
    matmul_gelu_forward(a.fch_gelu, a.fch, a.ln2, p.fcw, p.fcb, acts->how.gelu_fusion, N, C, 4 * C, dev);
}

// tokens (B, T-t0), on the host, at positions t0..T-1, up to the last LayerNorm. t0 > 0, with B = 1, goes on from an
// earlier call on the same activations: qkv still holds the keys and values of the positions before, and only the new
// ones are computed.
static void gpt2_forward(const GPT2* model, Activations* acts, const int* tokens, int B, int T, int t0,
                         const Device* dev) {
    const int L = model->config.L, C = model->config.C, N = B * (T - t0);
    ActivationTensors a = layer_activations(acts, 0);
    Statistics s = layer_statistics(acts, 0);
    StoredParameters p = layer_weights(model, 0);
    device_upload(acts->tokens, tokens, sizeof(int) * (size_t)N, dev);
    acts->n_segments = documents_segments(acts->segments, tokens, B, T, acts->document_start);
    for (int i = 0; i < acts->n_segments; i++) {
        Segment x = acts->segments[i];
        embedding_forward(a.encoded + x.first * C, acts->tokens + x.first, p.wte, p.wpe, x.rows, x.T - t0, C, t0, dev);
    }
    const floatX* residual = a.encoded;
    layernorm_forward(a.ln1, s.ln1_mean, s.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, dev);
    for (int l = 0; l < L; l++) {
        block_forward(model, acts, l, residual, N, t0, dev);
        a = layer_activations(acts, l);
        p = layer_weights(model, l);
        matmul_forward(a.branch, a.fch_gelu, p.fcprojw, p.fcprojb, N, 4 * C, C, dev);
        if (l + 1 < L) {  // the stream goes on, and into the next layer's LayerNorm at once
            ActivationTensors next = layer_activations(acts, l + 1);
            s = layer_statistics(acts, l + 1);
            p = layer_weights(model, l + 1);
            residual_layernorm_forward(a.residual3, next.ln1, s.ln1_mean, s.ln1_rstd, a.residual2, a.branch, p.ln1w,
                                       p.ln1b, N, C, dev);
        } else {
            residual_layernorm_forward(a.residual3, a.lnf, s.lnf_mean, s.lnf_rstd, a.residual2, a.branch, p.lnfw,
                                       p.lnfb, N, C, dev);
        }
        residual = a.residual3;
    }
}

// Logits of N positions, head_rows at a time, and their losses. dwte not NULL: also the gradients of wte (written) and,
// in dbranch, of lnf. targets are on the host; dloss = 1 / targets counted in the whole update
static void gpt2_head(const GPT2* model, Activations* acts, float* dwte, const int* targets, float dloss, int N,
                      const Device* dev) {
    const int C = model->config.C, V = model->config.V, Vp = model->config.Vp;
    ActivationTensors a = layer_activations(acts, 0);
    Statistics s = layer_statistics(acts, 0);
    StoredParameters p = layer_weights(model, 0);
    device_upload(acts->targets, targets, sizeof(int) * (size_t)N, dev);
    for (int first = 0; first < N; first += acts->how.head_rows) {
        const int n = N - first < acts->how.head_rows ? N - first : acts->how.head_rows;
        const size_t at = (size_t)first * (size_t)C;
        matmul_forward(a.logits, a.lnf + at, p.wte, (const floatX*)NULL, n, C, Vp, dev);
        crossentropy_fused(s.losses + first, a.logits, acts->targets + first, dloss, dwte != NULL, n, V, Vp, dev);
        if (!dwte) { continue; }
        matmul_backward_input(a.dbranch + at, a.logits, p.wte, n, C, Vp, dev);
        matmul_backward_weight(dwte, a.logits, a.lnf + at, first > 0, n, C, Vp, dev);
    }
}

// what --recompute left out of layer l; the last layer's is still there
static void recompute_block(const GPT2* model, Activations* acts, int l, const floatX* residual, int N,
                            const Device* dev) {
    const int C = model->config.C, level = l + 1 < model->config.L ? acts->how.recompute : KEEP_ALL;
    ActivationTensors a = layer_activations(acts, l);
    Statistics s = layer_statistics(acts, l);
    StoredParameters p = layer_weights(model, l);
    if (level >= RECOMPUTE_NORMS) {
        layernorm_forward(a.ln1, s.ln1_mean, s.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, dev);
    }
    if (level == RECOMPUTE_NORMS) {
        layernorm_forward(a.ln2, s.ln2_mean, s.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, dev);
    }
    if (level == RECOMPUTE_BLOCKS) { block_forward(model, acts, l, residual, N, 0, dev); }
    else if (level >= RECOMPUTE_GELU) { gelu_forward(a.fch_gelu, a.fch, (size_t)N * 4 * C, dev); }
}

// Forward's calls upside down, after gpt2_head. Every parameter's gradient is written: one micro-batch is one leaf,
// which joins the tree of llmc/ranks/data_parallel.h.
static void gpt2_backward(GPT2* model, Activations* acts, int B, int T, const Device* dev) {
    const int L = model->config.L, C = model->config.C, NH = model->config.NH, N = B * T;
    ActivationTensors a = layer_activations(acts, L - 1);
    Statistics s = layer_statistics(acts, L - 1);
    StoredParameters p = layer_weights(model, L - 1);
    Parameters d = layer_gradients(model, L - 1);
    device_zero(a.dresidual, sizeof(floatX) * (size_t)N * C, dev);
    layernorm_backward(a.dresidual, d.lnfw, d.lnfb, a.dbranch, a.residual3, p.lnfw, s.lnf_mean, s.lnf_rstd, N, C, dev);
    for (int l = L - 1; l >= 0; l--) {
        const floatX* residual = l > 0 ? layer_activations(acts, l - 1).residual3 : a.encoded;
        a = layer_activations(acts, l);
        s = layer_statistics(acts, l);
        p = layer_weights(model, l);
        d = layer_gradients(model, l);
        recompute_block(model, acts, l, residual, N, dev);
        matmul_backward(a.dwide, d.fcprojw, d.fcprojb, a.dresidual, a.fch_gelu, p.fcprojw, N, 4 * C, C, dev);
        gelu_backward(a.dwide, a.fch, a.dwide, (size_t)N * 4 * C, dev);
        matmul_backward(a.dbranch, d.fcw, d.fcb, a.dwide, a.ln2, p.fcw, N, C, 4 * C, dev);
        layernorm_backward(a.dresidual, d.ln2w, d.ln2b, a.dbranch, a.residual2, p.ln2w, s.ln2_mean, s.ln2_rstd, N, C,
                           dev);
        matmul_backward(a.dbranch, d.attprojw, d.attprojb, a.dresidual, a.atty, p.attprojw, N, C, C, dev);
        for (int i = 0; i < acts->n_segments; i++) {
            Segment x = acts->segments[i];
            attention_backward(a.dwide + x.first * 3 * C, a.dbranch + x.first * C, a.atty + x.first * C,
                               s.att_max + x.first * NH, s.att_inv + x.first * NH, a.qkv + x.first * 3 * C, x.rows, x.T,
                               C, NH, dev);
        }
        matmul_backward(a.dbranch, d.qkvw, d.qkvb, a.dwide, a.ln1, p.qkvw, N, C, 3 * C, dev);
        layernorm_backward(a.dresidual, d.ln1w, d.ln1b, a.dbranch, residual, p.ln1w, s.ln1_mean, s.ln1_rstd, N, C, dev);
        dp_layer_done(&model->dp, l, dev);
    }
    if (d.wpe) { device_zero(d.wpe, sizeof(float) * (size_t)model->config.max_T * C, dev); }  // positions beyond T get no gradient
    for (int i = 0; i < acts->n_segments; i++) {
        Segment x = acts->segments[i];
        embedding_backward(d.wte, d.wpe, a.dresidual + x.first * C, acts->tokens + x.first, x.rows, x.T, C, dev);
    }
    dp_leaf_done(&model->dp, dev);
}

// one micro-batch, forward and backward; its loss and gradient join the tree. Nothing here waits for the GPU
static void gpt2_leaf(GPT2* model, Activations* acts, const int* tokens, const int* targets, float dloss, int B, int T,
                      const Device* dev) {
    gpt2_forward(model, acts, tokens, B, T, 0, dev);
    gpt2_head(model, acts, layer_gradients(model, 0).wte, targets, dloss, B * T, dev);
    losses_sum(dp_loss(&model->dp), layer_statistics(acts, 0).losses, B * T, dev);
    gpt2_backward(model, acts, B, T, dev);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. A run: everything that main hands around.

typedef struct {
    RunOptions o;             // the common options, llmc/run/run.h
    const char* export_bin;   // and those of this trainer
    int decay_all;
    Tradeoffs how;
    int master_weights;
    Option table[MAX_OPTIONS];
    int n_options;
    Device dev;
    RankPlace place;
    Comm* comm;
    Tokenizer tokenizer;
    RunData data;
    ProbeBatch probe;
    GPT2 model;
    Activations acts, cache;  // of a batch; of the text that is being generated
    Generator generator;
    char weights[PATH_BYTES]; // file to start from, "": random
    char config[PATH_BYTES];  // config.json, "": from --model, or in the header of `weights`
    int T, n_leaves;          // positions in a row, micro-batches in an update
    int *inputs, *targets;    // (own leaves, B, T), pinned: the GPU fetches a micro-batch while the host makes the next
    float* loaded;            // parameters on the host, until the run has begun
    float* host;              // losses of a batch, logits of a position
    RunState state;
    Snapshot snapshot;        // what is being saved, or was last
    Verify verify;            // of --verify-every
    TensorBoard board;
    double peak;              // flop/s of matrix products, 0: not known
    Log log;
} Run;

static void parse_options(Run* r, int argc, char** argv) {
    const Option own[] = {
        {"GPT-2", "decay-all", "", OPTION_SWITCH, &r->decay_all, "0", 0, 0, "0|1",
         "decay biases and LayerNorms too, as llm.c's CPU trainer does", 0},
        {"GPT-2", "export-bin", "", OPTION_TEXT, &r->export_bin, "", 0, 0, "FILE",
         "write the model as llm.c's .bin", 0},
        {"GPU", "recompute", "-r", OPTION_INT, &r->how.recompute, "0", 0, 3, "0|1|2|3",
         "compute again in backward instead of keeping: 1 GELU, 2 LayerNorms too, 3 whole blocks. Saves memory, "
         "changes no bit", 0},
        {"GPU", "gelu-fusion", "-ge", OPTION_SWITCH, &r->how.gelu_fusion, "0", 0, 0, "0|1",
         "GELU inside the matmul before it, from unrounded sums", 0},
        {"GPU", "master-weights", "-w", OPTION_SWITCH, &r->master_weights, "1", 0, 0, "0|1",
         "keep float parameters beside bf16 ones; 0: less memory, and small updates live by the noise of the "
         "rounding", 0},
        {"GPU", "head-rows", "", OPTION_INT, &r->how.head_rows, "8192", 1, INT_MAX, "N",
         "positions whose logits are in memory at once", 0},
    };
    r->n_options = run_options(r->table, &r->o,
                               "random start from a preset: tiny, d6 d12 d24 d36 d48 (GPT-2), gpt3:c384 gpt3:c768 ...");
    memcpy(r->table + r->n_options, own, sizeof own);
    r->n_options += (int)(sizeof own / sizeof own[0]);
    options_parse(r->table, r->n_options, argc, argv,
                  "Trains GPT-2 and GPT-3 on GPUs. The CPU trainer is train_gpt2; first steps: make run.");
    r->place = rank_place(options_given(r->table, r->n_options, "rank") == 1 ? r->o.rank : "");
    r->comm = ranks_open(&r->place, &r->o);
    r->state = r->o.resume ? ranks_restore(r->comm, r->table, r->n_options, &r->o) : run_state_start(r->o.seed);
}

// also with an empty TEXT; a resumed run does not repeat it
static int is_generating(const Run* r) { return options_given(r->table, r->n_options, "generate") == 1; }

// --dry-run without data asks for the memory of training
static int is_training(const Run* r) {
    return !is_generating(r) && !*r->o.probe && !r->o.eval_only && (has_data(&r->data.train) || r->o.dry_run);
}

// the tokenizer is the model's: it shows every token, and encodes none that the model lacks
static int has_text(const Run* r) {
    return data_tokenizer_fits(&r->data, &r->tokenizer, r->model.config.V, r->table, r->n_options);
}

static int end_of_text(const Run* r) { return has_text(r) ? tokenizer_need_eot(&r->tokenizer) : r->model.config.V - 1; }

// is a checkpoint written while training goes on? Not with --zero 1 or 2: then all ranks send rank 0 what they keep
static int saves_beside(const Run* r) { return r->o.async_save && (r->comm->size == 1 || r->o.zero == 0); }

static double flops_per_token(const Run* r) {
    const Config c = r->model.config;
    return 6.0 * (double)tensors_count(r->model.table, N_PARAMETERS) + 6.0 * c.L * c.C * (double)r->T;
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Files: checkpoints and models of others, in and out.

static void save_model(const Run* r, const float* params, const char* folder, size_t shard_bytes, SavedFiles* files) {
    char path[PATH_BYTES];
    saved_files_add(files, config_save(path_join(path, folder, "config.json"), r->model.config, end_of_text(r)));
    tensors_save_folder(folder, r->model.table, N_PARAMETERS, params, shard_bytes, files);
    if (has_text(r)) { tokenizer_save(folder, &r->tokenizer, files); }
}

// are the masters, like the moments, dealt out over the ranks? The weights are whole everywhere
static int masters_in_parts(const GPT2* model) { return model->master && model->dp.zero > 0; }

// The parameters as a checkpoint has them, from a copy of the masters or, without masters, of the weights: on the host,
// to be freed; NULL on ranks above 0. Masters are collected, for which all ranks call when they are in parts; copy_dev
// NULL: the copy is in host memory. What is frozen has no master, and its weights stay as they are: they come from dev
static float* whole_parameters(GPT2* model, const void* copy, const Device* copy_dev, const Device* dev) {
    const size_t n_bytes = sizeof(float) * model->n;
    float* whole = model->dp.rank > 0 ? NULL : (float*)arena_alloc(n_bytes, "parameters on the host");
    if (model->master && (whole || masters_in_parts(model))) {
        dp_collect(&model->dp, (const float*)copy, whole, copy_dev);
        if (whole) { dp_collect_frozen(&model->dp, model->weights, sizeof(floatX), whole, dev); }
    } else if (whole) {
        floatx_widen(whole, copy, model->n);
    }
    return whole;
}

// the parameters as a checkpoint has them, now: on rank 0, to be freed; NULL on the others, which only send. All ranks
// call
static float* download_parameters(GPT2* model, const Device* dev) {
    const size_t n_bytes = model->master ? sizeof(float) * model->dp.n_kept : sizeof(floatX) * model->n;
    if (masters_in_parts(model)) { return whole_parameters(model, model->master, dev, dev); }
    void* copy = malloc_check(n_bytes, "parameters on the host");
    device_download(copy, model->master ? (const void*)model->master : model->weights, n_bytes, dev);
    float* whole = whole_parameters(model, copy, NULL, dev);
    free(copy);
    return whole;
}

// the files of a checkpoint, from the snapshot: training may be further on by now
static void write_checkpoint(void* run) {
    Run* r = (Run*)run;
    Snapshot* s = &r->snapshot;
    char temporary[PATH_BYTES], path[PATH_BYTES];
    SavedFiles files;
    files.n = 0;
    run_save_begin(temporary, &r->o, &s->state, run_checkpoint_bytes(r->model.table, N_PARAMETERS));
    float* params = whole_parameters(&r->model, s->arena[0], NULL, &r->dev);
    save_model(r, params, temporary, SIZE_MAX, &files);
    arena_free(params, sizeof(float) * r->model.n);
    path_join(path, temporary, "optimizer.safetensors");
    const float *m = (const float*)s->arena[1], *v = (const float*)s->arena[2];
    saved_files_add(&files, moments_save(path, &r->model.dp, m, v, NULL));
    run_save_end(temporary, &files, r->table, r->n_options, &r->o, &s->state);
}

// rank 0 writes, in the background unless the run is over; with --zero 1 or 2 the others send it their parts
static void save_checkpoint(Run* r, int last) {
    GPT2* model = &r->model;
    const size_t kept = sizeof(float) * model->dp.n_kept;
    const void* parameters = model->master ? (const void*)model->master : model->weights;
    const void* arenas[SNAPSHOT_ARENAS] = {parameters, model->adam_m, model->adam_v};
    const size_t n_bytes[SNAPSHOT_ARENAS] = {model->master ? kept : sizeof(floatX) * model->n, kept, kept};
    r->state.n_sample_bytes = run_sample_bytes(&r->o);
    if (r->comm->rank == 0) {
        snapshot_save(&r->snapshot, arenas, n_bytes, SNAPSHOT_ARENAS, &r->state, saves_beside(r), last,
                      write_checkpoint, r, &r->dev);
    } else if (r->o.zero > 0) {
        if (masters_in_parts(model)) { whole_parameters(model, model->master, &r->dev, &r->dev); }
        moments_save(NULL, &model->dp, model->adam_m, model->adam_v, &r->dev);
    }
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
    }
    run_choose_tokenizer(r->table, r->n_options, o, model_tokenizer(path, r->config));
}

// vocabulary of a new model: the tokenizer's for text or when it was named, else GPT-2's for shards
static int new_vocabulary(const Run* r) {
    const TokenData* d = &r->data.train;
    int is_chosen = options_given(r->table, r->n_options, "tokenizer") == 1;
    int is_tiny = !has_data(d) && strcmp(r->o.model, "tiny") == 0;
    int needed = data_vocabulary(&r->data), usual = d->text || is_chosen || is_tiny ? r->tokenizer.n_tokens : 50257;
    return needed > usual ? needed : usual;
}

static void choose_model(Run* r) {
    gpt2_layout(&r->model, *r->config ? config_load(r->config) : *r->weights ? config_load_bin(r->weights)
                         : config_preset(r->o.model, new_vocabulary(r)));
}

// read or drawn on the host, as train_gpt2.c does, then sent to the device
static void load_parameters(Run* r) {
    GPT2* model = &r->model;
    gpt2_init(model, model->config);
    model->frozen = freeze_slices(r->o.freeze, model->table, N_PARAMETERS);
    r->loaded = (float*)arena_alloc(sizeof(float) * model->n, "parameters on the host");
    if (*r->weights) { gpt2_load(r->weights, model->table, r->loaded); }
    else { tensors_init(model->table, N_PARAMETERS, r->loaded, (uint32_t)r->o.seed); }
    ranks_same_bytes(r->comm, "parameters", r->loaded, sizeof(float) * model->n);
    gpt2_store(model, r->loaded, r->state.updates, &r->dev);
}

static void free_loaded(Run* r) {
    arena_free(r->loaded, sizeof(float) * r->model.n);
    r->loaded = NULL;
}

// a folder that transformers and this trainer load
static void export_folder(const Run* r, const float* params, const char* folder) {
    char temporary[PATH_BYTES], path[PATH_BYTES];
    const int eot = end_of_text(r);
    SavedFiles files;
    files.n = 0;
    hf_export_begin(temporary, folder, 4.0 * (double)r->model.n);
    save_model(r, params, temporary, (size_t)(1e9 * (double)r->o.shard_gb), &files);
    json_write(path_join(path, temporary, "generation_config.json"),
               json_pack("{s:i, s:i}", "bos_token_id", eot, "eos_token_id", eot));
    hf_export_end(temporary, folder);
}

// all ranks call, rank 0 writes: what was loaded, or what training has made of it
static void export_model(Run* r) {
    const Config c = r->model.config;
    const size_t n_bytes = sizeof(float) * r->model.n;
    BinHeader h = {0, 0, c.max_T, c.V, c.L, c.NH, c.C, c.Vp};
    if (!*r->o.export_hf && !*r->export_bin) { return; }
    float* params = r->loaded ? r->loaded : download_parameters(&r->model, &r->dev);
    if (r->comm->rank == 0 && *r->o.export_hf) { export_folder(r, params, r->o.export_hf); }
    if (r->comm->rank == 0 && *r->export_bin) { llmc_bin_save(r->export_bin, h, r->model.table, N_PARAMETERS, params); }
    if (params != r->loaded) { arena_free(params, n_bytes); }
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Evaluation, sampling, probe.

// the model behind llmc/run/evaluate.h
static const float* batch_losses(void* run, const int* inputs, const int* targets, int B, int T) {
    Run* r = (Run*)run;
    gpt2_forward(&r->model, &r->acts, inputs, B, T, 0, &r->dev);
    gpt2_head(&r->model, &r->acts, NULL, targets, 0.0f, B * T, &r->dev);
    device_download(r->host, layer_statistics(&r->acts, 0).losses, sizeof(float) * (size_t)B * (size_t)T, &r->dev);
    return r->host;
}

// loss on the validation data and answers to the examples of --hellaswag; while training, is it the best so far?
static void evaluate(Run* r, int training) {
    const Tokenizer* tokenizer = has_text(r) ? &r->tokenizer : NULL;
    const Evaluator e = {&r->o, r->comm, tokenizer, r->T, r->inputs, r->targets, batch_losses, r, NULL, 0, NULL};
    const int step = r->state.step;
    if (has_data(&r->data.val)) {
        double bits_per_byte;
        float loss = evaluate_loss(&e, &r->data.val_rows, &bits_per_byte);
        tensorboard_validation(&r->board, step, loss, bits_per_byte);
        log_validation(&r->log, step, loss, bits_per_byte, training && run_state_validated(&r->state, &r->o, loss));
    }
    if (*r->o.hellaswag) {
        int n, correct = evaluate_answers(&e, &r->data.examples, &n);
        log_accuracy(&r->log, step, "HellaSwag", correct, n, hellaswag_standard_error(correct, n));
    }
}

// the logits of one position come back, as floats on the host
static const float* host_logits(Run* r, Activations* acts, int n) {
    const Config c = r->model.config;
    ActivationTensors a = layer_activations(acts, 0);
    StoredParameters p = layer_weights(&r->model, 0);
    matmul_forward(a.logits, a.lnf + (size_t)n * c.C, p.wte, (const floatX*)NULL, 1, c.C, c.Vp, &r->dev);
    floatx_download(r->host, a.logits, (size_t)c.Vp, &r->dev);
    return r->host;
}

// the model behind llmc/run/generate.h: keys and values of earlier positions are kept in cache.qkv
static const float* next_logits(void* run, const int* tokens, int n_cached, int n) {
    Run* r = (Run*)run;
    gpt2_forward(&r->model, &r->cache, tokens + n_cached, 1, n, n_cached, &r->dev);
    return host_logits(r, &r->cache, n - n_cached - 1);
}

static void open_generator(Run* r, int n_prompt) {
    const Config c = r->model.config;
    const int room = generator_room(&r->o, n_prompt, c.max_T);
    activations_init(&r->cache, c, 1, room, TO_GENERATE, r->how);
    generator_init(&r->generator, &r->o, has_text(r) ? &r->tokenizer : NULL, c.V, room, end_of_text(r), next_logits, r);
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
    const Config c = r->model.config;
    const ProbeBatch x = r->probe;
    const size_t n_bytes = sizeof(float) * r->model.n;
    activations_init(&r->acts, c, x.B, x.T, TO_TRAIN, r->how);
    dp_init(&r->model.dp, NULL, r->model.table, N_PARAMETERS, NULL, 1, 0);
    dp_open(&r->model.dp);
    gpt2_forward(&r->model, &r->acts, x.inputs, x.B, x.T, 0, &r->dev);

    SafeWriter out;
    probe_open(&out, r->o.probe_out, &x, c.V, r->model.table, N_PARAMETERS);
    for (int n = 0; n < x.B * x.T; n++) {
        safewriter_put(&out, host_logits(r, &r->acts, n), sizeof(float) * (size_t)c.V);
    }
    gpt2_leaf(&r->model, &r->acts, x.inputs, x.targets, 1.0f / (float)x.counted, x.B, x.T, &r->dev);
    float loss, *grads = dp_reduce(&r->model.dp, &loss, &r->dev);
    float* host = (float*)arena_alloc(n_bytes, "gradients on the host");
    loss = loss / (float)x.counted;
    device_download(host, grads, n_bytes, &r->dev);
    safewriter_put(&out, &loss, sizeof loss);
    tensors_put(&out, r->model.table, N_PARAMETERS, host);
    safewriter_close(&out);
    probe_print(&x, loss, r->o.probe_out);
    arena_free(host, n_bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. Training.

// the leaves of this rank forward and backward, and the sum of all ranks' gradients; with the mean loss and their norm
static float* step_gradients(Run* r, float* loss, float* norm) {
    const int B = r->o.batch_size, T = r->T;
    const int64_t n_tokens = (int64_t)r->n_leaves * B * T, row = run_first_row(&r->o, &r->state);
    const DataParallel* s = &r->model.dp;
    const int n = dp_n_leaves(s);
    for (int k = 0; k < n; k++) {
        const int64_t leaf = dp_leaf(s, k);
        const int64_t next = k + 1 < n ? dp_leaf(s, k + 1) : r->n_leaves + dp_leaf(s, 0);  // of the next update
        int *inputs = r->inputs + (size_t)k * B * T, *targets = r->targets + (size_t)k * B * T;
        dataloader_batch(&r->data.train_rows, row + leaf * B, B, inputs, targets);
        dataloader_prefetch(&r->data.train_rows, row + next * B, B);
        gpt2_leaf(&r->model, &r->acts, inputs, targets, 1.0f / (float)n_tokens, B, T, &r->dev);
        comm_watch(r->comm, HERE);
    }
    float loss_sum, *grads = dp_reduce(&r->model.dp, &loss_sum, &r->dev);
    *loss = loss_sum / (float)n_tokens;
    *norm = dp_norm(&r->model.dp, grads, &r->dev);
    return grads;
}

// one update: gradients, clip, AdamW
static void train_step(Run* r) {
    const RunOptions* o = &r->o;
    RunState* s = &r->state;
    GPT2* model = &r->model;
    const int64_t n_tokens = (int64_t)r->n_leaves * o->batch_size * r->T;
    double start = seconds_now(CLOCK_MONOTONIC);
    float loss, norm, *grads = step_gradients(r, &loss, &norm);
    const int verifying = o->verify_every > 0 && (s->step + 1) % o->verify_every == 0;
    if (verifying) {
        verify_first(&r->verify, s->step + 1, loss, norm, grads, model->dp.reduced, &r->dev);
        grads = step_gradients(r, &loss, &norm);
        verify_second(&r->verify, loss, norm, grads, model->dp.reduced, &r->dev);
    }
    const float lr = run_lr(o, s->step);
    int skipped = run_state_skips(s, o, loss, norm);
    Optimizer optimizer = {lr, o->beta1, o->beta2, o->eps, o->weight_decay, o->clip, r->decay_all,
                           verifying ? &r->verify : NULL, NULL};
    const Weights w = gpt2_weights(model);
    if (!skipped) { dp_update(&model->dp, &w, grads, norm, &optimizer, ++s->updates, &r->dev); }
    s->step++;
    s->rows += (int64_t)r->n_leaves * o->batch_size;
    s->tokens += n_tokens;
    double seconds = seconds_now(CLOCK_MONOTONIC) - start, rate = (double)n_tokens / seconds;
    StepRecord record = {s->step, o->steps, loss, norm, lr, 1000.0 * seconds, s->tokens, rate,
                         r->peak > 0.0 ? rate * flops_per_token(r) / r->peak : -1.0, skipped};
    tensorboard_step(&r->board, &record);
    log_step(&r->log, &record, s->step % o->log_every == 0 || s->step == o->steps || skipped);
    if (s->skips > o->max_skips) {
        char name[NAME_BYTES];
        const char* bad = dp_first_bad(&model->dp, name, sizeof name, grads, &r->dev);
        if (r->comm->rank > 0) { comm_barrier(r->comm, HERE); }  // rank 0 says it
        fail_run("step %d: %d updates in a row were not finite (loss %g, norm %g, first bad gradient: %s): try a "
                 "smaller --lr or --clip", s->step, s->skips, (double)loss, (double)norm, bad);
    }
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
    snapshot_print(&r->snapshot, run_checkpoint_bytes(r->model.table, N_PARAMETERS));
    const char* outcome = s->step >= o->steps ? "done" : stop ? "stopped" : "stopped early";
    printf("%s after step %d, checkpoint in %s/step_%06d\n", outcome, s->step, o->run, s->step);
}

// ---------------------------------------------------------------------------------------------------------------------
// 7. Setting up, and main.

// sizes that follow from the model and the data; conflicts end here, before anything is computed
static void plan(Run* r) {
    RunOptions* o = &r->o;
    const Config c = r->model.config;
    r->T = o->seq_len > 0 ? o->seq_len : c.max_T < 1024 ? c.max_T : 1024;
    if (r->T > c.max_T) {
        options_fail("seq-len", "expected at most the model's %d positions, found %d", c.max_T, r->T);
    }
    r->n_leaves = run_leaves(o, r->T);
    if (!options_given(r->table, r->n_options, "tokenizer")) { data_check_tokenizer(&r->data, o, c.V, has_text(r)); }
    if (!is_training(r) && !o->eval_only && !is_generating(r) && !*o->probe && !*o->export_hf && !*r->export_bin) {
        fail_input("nothing to do: expected --train, --eval-only, --generate, --probe, --export-hf, --export-bin or "
                   "--dry-run");
    }
    if (is_training(r) || *o->export_hf || o->doc_reset) { data_check_documents(&r->data, o, end_of_text(r)); }
    if (r->comm->size > 1 && !is_training(r) && !o->eval_only) {
        ranks_fail_input(r->comm, "%d ranks are for training and --eval-only: start one", r->comm->size);
    }
    if (*o->probe) {  // it brings its own sizes
        probe_read(&r->probe, o->probe, c.V, c.V, c.max_T);
        o->batch_size = r->probe.B;
        r->T = r->probe.T;
        r->n_leaves = 1;
    }
    if (is_training(r) || *o->export_hf) { end_of_text(r); }  // config.json names it: refuse now, not at a checkpoint
    if (*o->export_hf) { hf_export_check(o->export_hf); }
    if (*r->export_bin) { outfile_check("export-bin", r->export_bin); }
    if (r->how.gelu_fusion && (r->how.recompute == RECOMPUTE_GELU || r->how.recompute == RECOMPUTE_NORMS)) {
        options_fail("gelu-fusion", "with --recompute %d GELU is computed again from rounded sums, and gradients would "
                     "differ: expected --recompute 0 or 3", r->how.recompute);
    }
    data_plan(&r->data, o, r->T, c.V, c.V, r->n_leaves);
}

// the largest scratch that an op asks for with B rows: products or attention
static double workspace_bytes(const Run* r, int B) {
    const Config c = r->model.config;
    const int N = B * r->T, n_head = N < r->how.head_rows ? N : r->how.head_rows, n = r->dev.n_threads;
    const double head = (double)gemm_workspace_bytes(n_head, c.Vp, n);
    const double dwte = (double)gemm_workspace_bytes(c.Vp, n_head, n);
    const double products = is_training(r) ? fmax(head, dwte) : (double)gemm_workspace_bytes(N, 4 * c.C, n);
    return fmax(products, (double)attention_bytes(sizeof(floatX), B, r->T, c.C, c.NH, &r->dev));
}

static double batch_activation_bytes(const Run* r, int B, Tradeoffs how) {
    Activations acts;
    const Purpose purpose = is_training(r) || *r->o.probe ? TO_TRAIN : TO_EVALUATE;
    return activations_layout(&acts, r->model.config, B, r->T, purpose, how);
}

// the largest --batch-size whose activations and scratch fit in n_bytes
static int largest_batch(const Run* r, double n_bytes, Tradeoffs how) {
    int B = 0;
    for (int more = 1 << 20; more > 0; more /= 2) {
        if ((int64_t)(B + more) * r->T > INT_MAX / 4) { continue; }  // as run_leaves refuses
        if (batch_activation_bytes(r, B + more, how) + workspace_bytes(r, B + more) <= n_bytes) { B += more; }
    }
    return B;
}

// n_bytes are free for activations and scratch of a micro-batch
static void box_largest_batch(const Run* r, double n_bytes) {
    Tradeoffs least = r->how;
    least.recompute = RECOMPUTE_BLOCKS;
    const int B = largest_batch(r, n_bytes, r->how), with_recompute = largest_batch(r, n_bytes, least);
    if (with_recompute > B) { box_row("  largest batch-size", "%d; with --recompute 3: %d", B, with_recompute); }
    else { box_row("  largest batch-size", "%d", B); }
}

// Memory of the device by class, in the order of allocation; returns the bytes that have still to be taken of what this
// rank can see: a GPU of its own, or the machine's memory, which it shares with other ranks and in which text and
// copies are, too
static double print_memory(const Run* r) {
    Activations cache;
    const RunOptions* o = &r->o;
    const int backward = is_training(r) || *o->probe, has_batch = backward || o->eval_only;
    const int samples = is_generating(r) || (is_training(r) && o->sample_every > 0);
    const int room = generator_room(o, 1, r->model.config.max_T);
    const double weights = (double)sizeof(floatX) * (double)r->model.n, workspace = workspace_bytes(r, o->batch_size);
    const double batch = has_batch ? batch_activation_bytes(r, o->batch_size, r->how) : 0.0;
    const double sampling = samples ? activations_layout(&cache, r->model.config, 1, room, TO_GENERATE, r->how) : 0.0;
    const double text = DEVICE_IS_SHARED ? data_memory(&r->data) : 0.0, available = memory_available();
    const double verify = is_training(r) && o->verify_every > 0 ? verify_bytes(r->model.n) : 0.0;
    const double rest = text + verify + 8e6;
    const int copies = DEVICE_IS_SHARED && is_training(r) && o->save_every > 0 && saves_beside(r);
    double kept = 0.0, copy = copies ? SNAPSHOT_ARENAS * weights : 0.0;
    double gradients = backward ? ranks_box(r->comm, r->model.table, N_PARAMETERS, r->model.frozen, r->n_leaves, o->zero, &kept) : 0.0;
    double moments = !is_training(r) ? 0.0 : FLOATX_IS_FLOAT || !r->master_weights ? 2.0 * kept : 3.0 * kept;
    box_row("memory: weights", "%s", format_bytes(weights).s);
    if (backward) { box_row("  gradients, AdamW", "%s, %s", format_bytes(gradients).s, format_bytes(moments).s); }
    if (has_batch || samples) { box_row("  activations", "%s", format_bytes(batch + sampling).s); }
    box_row("  workspace, rest", "%s, %s", format_bytes(workspace).s, format_bytes(rest + copy).s);
    const double each = weights + gradients + moments + batch + workspace + rest, of_rank_0 = sampling + copy;
    const double n_ranks = DEVICE_IS_SHARED ? fmax(1.0, r->place.local_size) : 1.0;  // that take from the same memory
    const double needed = n_ranks * (each - text) + of_rank_0;                       // the text is in memory already
    box_row("memory", "%s of %s free", format_bytes(each + of_rank_0).s, format_bytes(available).s);
    if (has_batch && !*o->probe && available > 0.0) {
        box_largest_batch(r, (available - needed) / n_ranks + batch + workspace);
    }
    return needed;
}

static double memory_to_generate(const Run* r) {
    Activations acts;
    const Config c = r->model.config;
    const double weights = (double)sizeof(floatX) * (double)r->model.n;
    return weights + activations_layout(&acts, c, 1, c.max_T, TO_GENERATE, r->how);
}

// what helps where memory is short
static const char* memory_remedy(const Run* r) {
    if (r->o.eval_only) { return "a smaller --batch-size or --seq-len"; }
    if (!is_training(r)) { return "a smaller model"; }
    return r->how.recompute < RECOMPUTE_BLOCKS
               ? "--recompute 3, a smaller --batch-size or --seq-len, or --zero 2 with several GPUs"
               : "a smaller --batch-size or --seq-len, or --zero 2 with several GPUs";
}

// returns the bytes that are still to be taken
static double print_start(const Run* r) {
    const Config c = r->model.config;
    printf("train_gpt2cu: %s (%s, %s)\n", build_name(), FLOATX_NAME, processor_name().s);
    options_print(r->table, r->n_options);
    box_line();
    box_row("model", "%d layer%s, %d head%s, %d channels, %d positions", c.L, c.L > 1 ? "s" : "", c.NH,
            c.NH > 1 ? "s" : "", c.C, c.max_T);
    box_row("vocabulary", "%d, padded to %d", c.V, c.Vp);
    size_t n_parameters = tensors_count(r->model.table, N_PARAMETERS);
    box_row("parameters", "%s = %zu", format_count((double)n_parameters).s, n_parameters);
    data_box(&r->data);
    if (is_training(r)) {
        box_update(&r->o, r->n_leaves, r->T);
        box_checkpoints(&r->o, &r->state, run_checkpoint_bytes(r->model.table, N_PARAMETERS));
    }
    double n_bytes = print_memory(r), flops = flops_per_token(r);
    const int n_steps = r->o.steps - r->state.step;
    double seconds = flops * (double)n_steps * r->n_leaves * r->o.batch_size * r->T / r->peak;
    box_row("matmul rate", "%s, %s FLOP per token", r->peak > 0.0 ? format_rate(r->peak).s : "unknown for this GPU",
            format_count(flops).s);
    if (is_training(r) && n_steps > 0 && r->peak > 0.0) {
        box_row("time", "at least %s for %d step%s", format_duration(seconds).s, n_steps, n_steps > 1 ? "s" : "");
    }
    box_line();
    return n_bytes;
}

// room for the batches of one update of this rank, for one batch to evaluate
static void open_batch(Run* r, Purpose purpose) {
    const size_t n_leaves = purpose == TO_TRAIN ? (size_t)ceil_div(r->n_leaves, r->comm->size) : 1;
    const size_t n_bytes = sizeof(int) * n_leaves * (size_t)r->o.batch_size * (size_t)r->T;
    activations_init(&r->acts, r->model.config, r->o.batch_size, r->T, purpose, r->how);
    if (r->o.doc_reset) { r->acts.document_start = end_of_text(r); }
    r->inputs = (int*)device_pinned(n_bytes, "inputs");
    r->targets = (int*)device_pinned(n_bytes, "targets");
}

static void open_training(Run* r, int argc, char** argv) {
    char path[PATH_BYTES];
    GPT2* model = &r->model;
    open_batch(r, TO_TRAIN);
    if (r->o.sample_every > 0 && r->comm->rank == 0) { open_generator(r, 1); }
    gpt2_init_training(model, r->comm, r->n_leaves, r->o.zero, r->master_weights, r->loaded, &r->dev);
    free_loaded(r);
    const Weights w = gpt2_weights(model);
    if (r->o.verify_every > 0) { dp_verify(&model->dp, &r->verify, &w); }
    if (r->o.resume) {
        checkpoint_path(path, r->o.run, r->state.step, "optimizer.safetensors");
        moments_load(path, &model->dp, model->adam_m, model->adam_v, &r->dev);
    }
    if (r->comm->rank == 0) {
        run_open(&r->log, r->table, r->n_options, &r->o, &r->state, &r->dev, r->comm->size, &r->data.train,
                 &r->data.val, argc, argv);
    }
    ranks_run_name(r->comm, r->table, r->n_options, &r->o);
    tensorboard_open(&r->board, r->o.tensorboard && r->comm->rank == 0 ? r->o.run : NULL,
                     r->o.resume ? r->state.step : -1);
}

static void close_all(Run* r) {
    log_close(&r->log);
    tensorboard_close(&r->board);
    data_close(&r->data);
    tokenizer_free(&r->tokenizer);
    probe_free(&r->probe);
    activations_free(&r->acts);
    activations_free(&r->cache);
    generator_free(&r->generator);
    gpt2_free(&r->model);
    verify_free(&r->verify);
    snapshot_free(&r->snapshot);
    device_free(&r->dev);
    comm_free(r->comm);
    device_pinned_free(r->inputs);
    device_pinned_free(r->targets);
    free(r->host);
    free_loaded(r);
    options_free(r->table, r->n_options);
}

// floats for the losses of a batch or the logits of a position
static float* host_room(const Run* r) {
    const size_t n_losses = (size_t)r->o.batch_size * (size_t)r->T, n_logits = (size_t)r->model.config.Vp;
    return (float*)malloc_check(sizeof(float) * (n_losses > n_logits ? n_losses : n_logits), "losses");
}

// what the user asked for: nothing is computed or written yet
static void open_run(Run* r, int argc, char** argv) {
    parse_options(r, argc, argv);
    find_model(r);
    tokenizer_open(&r->tokenizer, r->o.tokenizer);
    data_open(&r->data, &r->o, &r->tokenizer);
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
    device_choose(r->place.local_rank > 0 ? r->place.local_rank : 0);
    device_init(&r->dev, ranks_threads(&r->place, r->o.threads));
    if (!is_generating(r) || r->o.dry_run) {
        r->peak = matmul_peak(&r->dev);
        comm_all_reduce(r->comm, &r->peak, 1, DT_F64, OP_SUM, HERE);
        check_memory(print_start(r), memory_remedy(r));
        if (r->o.dry_run) { return 0; }
    } else {
        check_memory(memory_to_generate(r), memory_remedy(r));
    }
    load_parameters(r);
    r->host = host_room(r);
    if (is_generating(r)) { generate_text(r); }
    else if (*r->o.probe) { probe(r); }
    else if (r->o.eval_only) { open_batch(r, TO_EVALUATE); evaluate(r, 0); }
    else if (has_data(&r->data.train)) { open_training(r, argc, argv); train(r); }
    export_model(r);
    close_all(r);
    if (fflush(stdout) != 0 || ferror(stdout)) { fail_run("standard output: cannot be written: %s", strerror(errno)); }
    return 0;
}
