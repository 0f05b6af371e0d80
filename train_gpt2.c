/*
GPT-2 and GPT-3, trained in plain C: forward, backward, AdamW, data, checkpoints, text. Read it from top to bottom in an
evening; then open llmc/, where every op has a file of its own whose plain loop defines its result to the last bit.

The model (Radford et al. 2019; Brown et al. 2020): token + position embedding, L blocks of
    r = r + attention(layernorm(r))
    r = r + gelu(layernorm(r) * fc) * fcproj
a last LayerNorm, and the token embedding again as output matrix. Left out: dropout, GPT-3's banded attention.

    make run                                                  trains a small one on this repository's own text
    make train_gpt2 && ./train_gpt2 --help                    every option
    ./train_gpt2 --model tiny --train book.txt --steps 1000   your text, byte by byte
    ./train_gpt2 --from gpt2/ --train 'shards/train_*.bin'    fine-tunes a Hugging Face folder on token shards
*/
#include "llmc/ops/attention.h"        // attention_forward, attention_backward
#include "llmc/files/checkpoint.h"     // SavedFiles, checkpoint_find, checkpoint_path
#include "llmc/ranks/comm.h"           // Comm, comm_watch: several ranks train together
#include "llmc/ops/crossentropy.h"     // crossentropy_forward, crossentropy_backward
#include "llmc/ops/documents.h"        // Segment, documents_segments: where attention and positions start anew
#include "llmc/ops/embedding.h"        // embedding_forward, embedding_backward
#include "llmc/run/evaluate.h"         // Evaluator, evaluate_loss, evaluate_answers
#include "llmc/ops/gelu.h"             // gelu_forward, gelu_backward
#include "llmc/run/generate.h"         // Generator, generate_sample, generate_texts
#include "llmc/models/gpt2.h"          // Config, Parameters, parameter_table, gpt2_load: shared with train_gpt2.cu
#include "llmc/files/hf_folder.h"      // model_find, hf_export_begin, tokenizer_save
#include "llmc/ops/layernorm.h"        // layernorm_forward, layernorm_backward
#include "llmc/core/layers.h"          // freeze_slices
#include "llmc/files/llmc_bin.h"       // llmc_bin_save: llm.c's checkpoint format
#include "llmc/run/log.h"              // Log, log_step, log_validation, box_row, seconds_now
#include "llmc/ops/matmul.h"           // matmul_forward, matmul_backward
#include "llmc/run/peak.h"             // matmul_peak, memory_available, check_memory
#include "llmc/run/probe.h"            // ProbeBatch, probe_read
#include "llmc/run/ranks.h"            // ranks_open, ranks_compare
#include "llmc/ops/residual.h"         // residual_forward
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
// 1. Tensors. What makes one GPT-2 different from another, and one line for each parameter, is in llmc/models/gpt2.h, because
// train_gpt2.cu needs the same; here is one line for each activation. Everything else loops over these tables.

// what a pass leaves behind; the last three are the gradients on their way back, one buffer each for all layers
typedef struct {
    float *encoded, *ln1, *ln1_mean, *ln1_rstd, *qkv, *atty, *att_max, *att_inv, *residual2, *ln2, *ln2_mean, *ln2_rstd,
        *fch, *fch_gelu, *residual3, *lnf, *lnf_mean, *lnf_rstd, *logits, *losses, *branch,
        *dresidual, *dbranch, *dwide;
} ActivationTensors;

enum { N_ACTIVATIONS = 24 };
typedef enum { TO_GENERATE, TO_EVALUATE, TO_TRAIN } Purpose;

// B rows of T positions; generation keeps logits of the last position only
static void activation_table(Tensor* t, Config c, int B, int T, Purpose purpose) {
    const int L = c.L, C = c.C, N = B * T;
    const int N_logits = purpose == TO_GENERATE ? 1 : N, N_train = purpose == TO_TRAIN ? N : 0;
#define FIELD(name) #name, offsetof(ActivationTensors, name)
    *t++ = activation(FIELD(encoded),   0, N, C);         // wte + wpe
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
    *t++ = activation(FIELD(branch),    0, N, C);         // a block's output before it joins the stream
    *t++ = activation(FIELD(dresidual), 0, N_train, C);
    *t++ = activation(FIELD(dbranch),   0, N_train, C);      // gradient of a LayerNorm's or attention's output
    *t++ = activation(FIELD(dwide),     0, N_train, 4 * C);  // gradient of fch, later of qkv
#undef FIELD
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. The model: create, forward, backward, update.

typedef struct {
    Config config;
    Tensor table[N_PARAMETERS];
    size_t n;                     // elements of an arena: parameters, each gradient, each moment
    float *params, *adam_m, *adam_v;
    int* frozen;                  // of every slice in table order: --freeze. NULL: none
    DataParallel dp;                    // gradients of micro-batches, and which part of all this belongs to this rank
} GPT2;

typedef struct {
    int B, T;                     // room
    Tensor table[N_ACTIVATIONS];
    size_t n;
    float* arena;
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
    model->params = (float*)arena_alloc(sizeof(float) * model->n, "parameters");
}

// Gradients and moments, for updates of n_leaves micro-batches in all. comm NULL: alone. zero 1: moments are kept once,
// not on every rank; 2: sums of gradients too
static void gpt2_init_training(GPT2* model, Comm* comm, int n_leaves, int zero) {
    dp_init(&model->dp, comm, model->table, N_PARAMETERS, model->frozen, n_leaves, zero);
    dp_open(&model->dp);
    model->adam_m = (float*)device_alloc(sizeof(float) * model->dp.n_kept, "first moments");
    model->adam_v = (float*)device_alloc(sizeof(float) * model->dp.n_kept, "second moments");
}

// what an update changes
static Weights gpt2_weights(const GPT2* model) {
    return weights_of(model->params, sizeof(float), NULL, model->adam_m, model->adam_v);
}

static void gpt2_free(GPT2* model) {
    device_release(model->adam_m, sizeof(float) * model->dp.n_kept);
    device_release(model->adam_v, sizeof(float) * model->dp.n_kept);
    arena_free(model->params, sizeof(float) * model->n);
    dp_free(&model->dp);
    free(model->frozen);
}

static size_t activations_layout(Activations* a, Config c, int B, int T, Purpose purpose) {
    memset(a, 0, sizeof *a);
    a->B = B;
    a->T = T;
    a->document_start = NO_RESET;
    activation_table(a->table, c, B, T, purpose);
    return a->n = tensors_layout(a->table, N_ACTIVATIONS);
}

static void activations_init(Activations* a, Config c, int B, int T, Purpose purpose) {
    activations_layout(a, c, B, T, purpose);
    a->arena = (float*)arena_alloc(sizeof(float) * a->n, "activations");
    a->segments = (Segment*)malloc_check(sizeof(Segment) * (size_t)B * (size_t)T, "segments");
}

static void activations_free(Activations* a) {
    arena_free(a->arena, sizeof(float) * a->n);
    free(a->segments);
}

static Parameters layer_parameters(const GPT2* model, float* arena, int l) {
    Parameters p;
    tensors_point(&p, model->table, N_PARAMETERS, arena, l);
    return p;
}

static ActivationTensors layer_activations(const Activations* acts, int l) {
    ActivationTensors a;
    tensors_point(&a, acts->table, N_ACTIVATIONS, acts->arena, l);
    return a;
}

// tokens (B, T-t0) at positions t0..T-1, up to the last LayerNorm. t0 > 0, with B = 1, goes on from an earlier call on
// the same activations: qkv still holds keys and values of the positions before, and only the new ones are computed.
static void gpt2_forward(const GPT2* model, Activations* acts, const int* tokens, int B, int T, int t0,
                         const Device* dev) {
    const int C = model->config.C, NH = model->config.NH, N = B * (T - t0);
    ActivationTensors a = layer_activations(acts, 0);
    Parameters p = layer_parameters(model, model->params, 0);
    acts->n_segments = documents_segments(acts->segments, tokens, B, T, acts->document_start);
    for (int i = 0; i < acts->n_segments; i++) {
        Segment s = acts->segments[i];
        embedding_forward(a.encoded + s.first * C, tokens + s.first, p.wte, p.wpe, s.rows, s.T - t0, C, t0, dev);
    }
    const float* residual = a.encoded;
    for (int l = 0; l < model->config.L; l++) {
        a = layer_activations(acts, l);
        p = layer_parameters(model, model->params, l);
        layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, p.ln1w, p.ln1b, N, C, dev);
        matmul_forward(a.qkv + (size_t)t0 * 3 * C, a.ln1, p.qkvw, p.qkvb, N, C, 3 * C, dev);
        for (int i = 0; i < acts->n_segments; i++) {
            Segment s = acts->segments[i];
            attention_forward(a.atty + s.first * C, a.att_max + s.first * NH, a.att_inv + s.first * NH,
                              a.qkv + s.first * 3 * C, s.rows, s.T, C, NH, t0, dev);
        }
        matmul_forward(a.branch, a.atty, p.attprojw, p.attprojb, N, C, C, dev);
        residual_forward(a.residual2, residual, a.branch, (size_t)N * C, dev);
        layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, p.ln2w, p.ln2b, N, C, dev);
        matmul_forward(a.fch, a.ln2, p.fcw, p.fcb, N, C, 4 * C, dev);
        gelu_forward(a.fch_gelu, a.fch, (size_t)N * 4 * C, dev);
        matmul_forward(a.branch, a.fch_gelu, p.fcprojw, p.fcprojb, N, 4 * C, C, dev);
        residual_forward(a.residual3, a.residual2, a.branch, (size_t)N * C, dev);
        residual = a.residual3;
    }
    layernorm_forward(a.lnf, a.lnf_mean, a.lnf_rstd, residual, p.lnfw, p.lnfb, N, C, dev);
}

// logits of the n positions that follow `first`, into the first n rows of logits
static float* gpt2_logits(const GPT2* model, Activations* acts, int first, int n, const Device* dev) {
    const int C = model->config.C;
    ActivationTensors a = layer_activations(acts, 0);
    Parameters p = layer_parameters(model, model->params, 0);
    matmul_forward(a.logits, a.lnf + (size_t)first * C, p.wte, NULL, n, C, model->config.Vp, dev);
    return a.logits;
}

// logits become probabilities; the sum of the losses of all counted targets comes back, chained over positions
static float gpt2_loss(const GPT2* model, Activations* acts, const int* targets, int B, int T, const Device* dev) {
    ActivationTensors a = layer_activations(acts, 0);
    crossentropy_forward(a.losses, a.logits, a.logits, targets, B * T, model->config.V, model->config.Vp, dev);
    float sum = 0.0f;
    for (int n = 0; n < B * T; n++) { sum += a.losses[n]; }
    return sum;
}

// Forward's calls upside down. Every parameter's gradient is written: one micro-batch is one leaf, which joins the tree
// of llmc/ranks/data_parallel.h.
static void gpt2_backward(GPT2* model, Activations* acts, const int* tokens, const int* targets, float dloss, int B,
                          int T, const Device* dev) {
    const Config c = model->config;
    const int L = c.L, C = c.C, N = B * T;
    ActivationTensors a = layer_activations(acts, L - 1);
    Parameters p = layer_parameters(model, model->params, L - 1), d;
    dp_point(&model->dp, &d, L - 1);
    crossentropy_backward(a.logits, a.logits, targets, dloss, N, c.V, c.Vp, dev);
    matmul_backward(a.dbranch, d.wte, NULL, a.logits, a.lnf, p.wte, N, C, c.Vp, dev);
    memset(a.dresidual, 0, sizeof(float) * N * C);
    layernorm_backward(a.dresidual, d.lnfw, d.lnfb, a.dbranch, a.residual3, p.lnfw, a.lnf_mean, a.lnf_rstd, N, C, dev);
    for (int l = L - 1; l >= 0; l--) {
        const float* residual = l > 0 ? layer_activations(acts, l - 1).residual3 : a.encoded;
        a = layer_activations(acts, l);
        p = layer_parameters(model, model->params, l);
        dp_point(&model->dp, &d, l);
        matmul_backward(a.dwide, d.fcprojw, d.fcprojb, a.dresidual, a.fch_gelu, p.fcprojw, N, 4 * C, C, dev);
        gelu_backward(a.dwide, a.fch, a.dwide, (size_t)N * 4 * C, dev);
        matmul_backward(a.dbranch, d.fcw, d.fcb, a.dwide, a.ln2, p.fcw, N, C, 4 * C, dev);
        layernorm_backward(a.dresidual, d.ln2w, d.ln2b, a.dbranch, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd, N, C,
                           dev);
        matmul_backward(a.dbranch, d.attprojw, d.attprojb, a.dresidual, a.atty, p.attprojw, N, C, C, dev);
        for (int i = 0; i < acts->n_segments; i++) {
            Segment s = acts->segments[i];
            attention_backward(a.dwide + s.first * 3 * C, a.dbranch + s.first * C, a.atty + s.first * C,
                               a.att_max + s.first * c.NH, a.att_inv + s.first * c.NH, a.qkv + s.first * 3 * C, s.rows,
                               s.T, C, c.NH, dev);
        }
        matmul_backward(a.dbranch, d.qkvw, d.qkvb, a.dwide, a.ln1, p.qkvw, N, C, 3 * C, dev);
        layernorm_backward(a.dresidual, d.ln1w, d.ln1b, a.dbranch, residual, p.ln1w, a.ln1_mean, a.ln1_rstd, N, C, dev);
        dp_layer_done(&model->dp, l, dev);
    }
    if (d.wpe) { memset(d.wpe, 0, sizeof(float) * (size_t)c.max_T * C); }  // positions beyond T get no gradient
    for (int i = 0; i < acts->n_segments; i++) {
        Segment s = acts->segments[i];
        embedding_backward(d.wte, d.wpe, a.dresidual + s.first * C, tokens + s.first, s.rows, s.T, C, dev);
    }
    dp_leaf_done(&model->dp, dev);
}

// one micro-batch, forward and backward; its loss and gradient join the tree. dloss = 1 / targets counted in the whole
// update
static void gpt2_leaf(GPT2* model, Activations* acts, const int* tokens, const int* targets, float dloss, int B, int T,
                      const Device* dev) {
    gpt2_forward(model, acts, tokens, B, T, 0, dev);
    gpt2_logits(model, acts, 0, B * T, dev);
    *dp_loss(&model->dp) = gpt2_loss(model, acts, targets, B, T, dev);
    gpt2_backward(model, acts, tokens, targets, dloss, B, T, dev);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. A run: everything that main hands around.

typedef struct {
    RunOptions o;             // the common options, llmc/run/run.h
    const char* export_bin;   // and those of this trainer
    int decay_all;
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
    int *inputs, *targets;    // (B, T)
    RunState state;
    Snapshot snapshot;        // what is being saved, or was last
    Verify verify;            // of --verify-every
    TensorBoard board;
    double peak;              // flop/s of the matmul on this machine
    Log log;
} Run;

static void parse_options(Run* r, int argc, char** argv) {
    const Option own[] = {
        {"GPT-2", "decay-all", "", OPTION_SWITCH, &r->decay_all, "0", 0, 0, "0|1",
         "decay biases and LayerNorms too, as llm.c's CPU trainer does", 0},
        {"GPT-2", "export-bin", "", OPTION_TEXT, &r->export_bin, "", 0, 0, "FILE",
         "write the model as llm.c's .bin", 0},
    };
    r->n_options = run_options(r->table, &r->o,
                               "random start from a preset: tiny, d6 d12 d24 d36 d48 (GPT-2), gpt3:c384 gpt3:c768 ...");
    memcpy(r->table + r->n_options, own, sizeof own);
    r->n_options += (int)(sizeof own / sizeof own[0]);
    options_parse(r->table, r->n_options, argc, argv, "Trains GPT-2 and GPT-3 on the CPU. First steps: make run.");
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

// the files of a checkpoint, from the snapshot: training may be further on by now
static void write_checkpoint(void* run) {
    Run* r = (Run*)run;
    Snapshot* s = &r->snapshot;
    char temporary[PATH_BYTES], path[PATH_BYTES];
    SavedFiles files;
    files.n = 0;
    run_save_begin(temporary, &r->o, &s->state, run_checkpoint_bytes(r->model.table, N_PARAMETERS));
    save_model(r, (const float*)s->arena[0], temporary, SIZE_MAX, &files);
    path_join(path, temporary, "optimizer.safetensors");
    const float *m = (const float*)s->arena[1], *v = (const float*)s->arena[2];
    saved_files_add(&files, moments_save(path, &r->model.dp, m, v, NULL));
    run_save_end(temporary, &files, r->table, r->n_options, &r->o, &s->state);
}

// rank 0 writes, in the background unless the run is over; with --zero 1 or 2 the others send it their parts
static void save_checkpoint(Run* r, int last) {
    GPT2* model = &r->model;
    const void* arenas[SNAPSHOT_ARENAS] = {model->params, model->adam_m, model->adam_v};
    const size_t kept = sizeof(float) * model->dp.n_kept;
    const size_t n_bytes[SNAPSHOT_ARENAS] = {sizeof(float) * model->n, kept, kept};
    r->state.n_sample_bytes = run_sample_bytes(&r->o);
    if (r->comm->rank == 0) {
        snapshot_save(&r->snapshot, arenas, n_bytes, SNAPSHOT_ARENAS, &r->state, saves_beside(r), last,
                      write_checkpoint, r, &r->dev);
    } else if (r->o.zero > 0) {
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

static void load_parameters(Run* r) {
    gpt2_init(&r->model, r->model.config);
    r->model.frozen = freeze_slices(r->o.freeze, r->model.table, N_PARAMETERS);
    if (*r->weights) { gpt2_load(r->weights, r->model.table, r->model.params); }
    else { tensors_init(r->model.table, N_PARAMETERS, r->model.params, (uint32_t)r->o.seed); }
}

// a folder that transformers and this trainer load
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

static void export_model(const Run* r) {
    const Config c = r->model.config;
    BinHeader h = {0, 0, c.max_T, c.V, c.L, c.NH, c.C, c.Vp};
    if (*r->o.export_hf) { export_folder(r, r->o.export_hf); }
    if (*r->export_bin) { llmc_bin_save(r->export_bin, h, r->model.table, N_PARAMETERS, r->model.params); }
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Evaluation, sampling, probe.

// the model behind llmc/run/evaluate.h
static const float* batch_losses(void* run, const int* inputs, const int* targets, int B, int T) {
    Run* r = (Run*)run;
    gpt2_forward(&r->model, &r->acts, inputs, B, T, 0, &r->dev);
    gpt2_logits(&r->model, &r->acts, 0, B * T, &r->dev);
    gpt2_loss(&r->model, &r->acts, targets, B, T, &r->dev);
    return layer_activations(&r->acts, 0).losses;
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

// the model behind llmc/run/generate.h: keys and values of earlier positions are kept in cache.qkv
static const float* next_logits(void* run, const int* tokens, int n_cached, int n) {
    Run* r = (Run*)run;
    gpt2_forward(&r->model, &r->cache, tokens + n_cached, 1, n, n_cached, &r->dev);
    return gpt2_logits(&r->model, &r->cache, n - n_cached - 1, 1, &r->dev);
}

static void open_generator(Run* r, int n_prompt) {
    const Config c = r->model.config;
    const int room = generator_room(&r->o, n_prompt, c.max_T);
    activations_init(&r->cache, c, 1, room, TO_GENERATE);
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
    activations_init(&r->acts, c, x.B, x.T, TO_TRAIN);
    free(r->model.frozen);
    r->model.frozen = NULL;
    gpt2_init_training(&r->model, NULL, 1, 0);
    gpt2_forward(&r->model, &r->acts, x.inputs, x.B, x.T, 0, &r->dev);
    const float* logits = gpt2_logits(&r->model, &r->acts, 0, x.B * x.T, &r->dev);

    SafeWriter out;
    probe_open(&out, r->o.probe_out, &x, c.V, r->model.table, N_PARAMETERS);
    for (int n = 0; n < x.B * x.T; n++) {
        safewriter_put(&out, logits + (size_t)n * c.Vp, sizeof(float) * (size_t)c.V);
    }
    *dp_loss(&r->model.dp) = gpt2_loss(&r->model, &r->acts, x.targets, x.B, x.T, &r->dev);
    gpt2_backward(&r->model, &r->acts, x.inputs, x.targets, 1.0f / (float)x.counted, x.B, x.T, &r->dev);
    float loss_sum, *grads = dp_reduce(&r->model.dp, &loss_sum, &r->dev), loss = loss_sum / (float)x.counted;
    safewriter_put(&out, &loss, sizeof loss);
    tensors_put(&out, r->model.table, N_PARAMETERS, grads);
    safewriter_close(&out);
    probe_print(&x, loss, r->o.probe_out);
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. Training.

// the leaves of this rank forward and backward, and the sum of all ranks' gradients; with the mean loss and their norm
static float* step_gradients(Run* r, float* loss, float* norm) {
    const int B = r->o.batch_size, T = r->T;
    const int64_t n_tokens = (int64_t)r->n_leaves * B * T, row = run_first_row(&r->o, &r->state);
    const DataParallel* s = &r->model.dp;
    for (int k = 0; k < dp_n_leaves(s); k++) {
        int64_t leaf = dp_leaf(s, k), next = dp_next_leaf(s, k);
        dataloader_batch(&r->data.train_rows, row + leaf * B, B, r->inputs, r->targets);
        dataloader_prefetch(&r->data.train_rows, row + next * B, B);
        gpt2_leaf(&r->model, &r->acts, r->inputs, r->targets, 1.0f / (float)n_tokens, B, T, &r->dev);
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
                         rate * flops_per_token(r) / r->peak, skipped};
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
    data_plan(&r->data, o, r->T, c.V, c.V, r->n_leaves);
}

// the largest scratch that an op asks for: the head's gradients or attention
static double workspace_bytes(const Run* r) {
    const Config c = r->model.config;
    const int N = r->o.batch_size * r->T, n = r->dev.n_threads;
    double head = (double)gemm_workspace_bytes(N, c.Vp, n), weights = (double)gemm_workspace_bytes(c.Vp, N, n);
    double attention = (double)attention_workspace_bytes(r->T, c.C / c.NH, n);
    return fmax(attention, is_training(r) ? fmax(head, weights) : (double)gemm_workspace_bytes(N, 4 * c.C, n));
}

// memory by class, in the order of allocation; returns the bytes that the ranks of this machine have still to take
static double print_memory(const Run* r) {
    Activations acts;
    const Config c = r->model.config;
    double arena = 4.0 * (double)r->model.n, workspace = workspace_bytes(r), moment = 0.0, gradients = 0.0;
    const int backward = is_training(r) || *r->o.probe;
    const int samples = is_generating(r) || (is_training(r) && r->o.sample_every > 0);
    const Purpose purpose = backward ? TO_TRAIN : TO_EVALUATE;
    double activations = 4.0 * (double)activations_layout(&acts, c, r->o.batch_size, r->T, purpose);
    double sampling = 4.0 * (double)activations_layout(&acts, c, 1, generator_room(&r->o, 1, c.max_T), TO_GENERATE);
    double text = data_memory(&r->data), rest = text + 8e6, copy = 0.0;
    if (is_training(r) && r->o.verify_every > 0) { rest += verify_bytes(r->model.n); }
    if (is_training(r) && r->o.save_every > 0 && saves_beside(r)) { copy = SNAPSHOT_ARENAS * arena; }
    if (backward) {
        gradients = ranks_box(r->comm, r->model.table, N_PARAMETERS, r->model.frozen, r->n_leaves, r->o.zero, &moment);
    }
    double moments = is_training(r) ? 2.0 * moment : 0.0;
    if (!samples) { sampling = 0.0; }
    if (!backward && !r->o.eval_only) { activations = 0.0; }
    box_row("memory: parameters", "%s", format_bytes(arena).s);
    if (backward) { box_row("  gradients, moments", "%s, %s", format_bytes(gradients).s, format_bytes(moments).s); }
    box_row("  activations", "%s", format_bytes(activations + sampling).s);
    box_row("  workspace, rest", "%s, %s", format_bytes(workspace).s, format_bytes(rest + copy).s);
    double each = arena + gradients + moments + activations + workspace + rest, of_rank_0 = sampling + copy;
    box_row("memory", "%s of %s free", format_bytes(each + of_rank_0).s, format_bytes(memory_available()).s);
    return fmax(1.0, r->place.local_size) * (each - text) + of_rank_0;  // the text is in memory already
}

static double memory_to_generate(const Run* r) {
    Activations acts;
    const Config c = r->model.config;
    return 4.0 * ((double)r->model.n + (double)activations_layout(&acts, c, 1, c.max_T, TO_GENERATE));
}

// returns the bytes that are still to be taken
static double print_start(const Run* r) {
    const Config c = r->model.config;
    printf("train_gpt2: %s (%s, %d lanes, %d threads)\n", build_name(), __VERSION__, VLANES, r->dev.n_threads);
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
    box_row("matmul rate", "%.1f GFLOP/s, %s FLOP per token", 1e-9 * r->peak, format_count(flops).s);
    if (is_training(r) && n_steps > 0) {
        box_row("time", "at least %s for %d step%s", format_duration(seconds).s, n_steps, n_steps > 1 ? "s" : "");
    }
    box_line();
    return n_bytes;
}

static void open_batch(Run* r, Purpose purpose) {
    size_t n_bytes = sizeof(int) * (size_t)r->o.batch_size * (size_t)r->T;
    activations_init(&r->acts, r->model.config, r->o.batch_size, r->T, purpose);
    if (r->o.doc_reset) { r->acts.document_start = end_of_text(r); }
    r->inputs = (int*)malloc_check(n_bytes, "inputs");
    r->targets = (int*)malloc_check(n_bytes, "targets");
}

static void open_training(Run* r, int argc, char** argv) {
    char path[PATH_BYTES];
    GPT2* model = &r->model;
    open_batch(r, TO_TRAIN);
    if (r->o.sample_every > 0 && r->comm->rank == 0) { open_generator(r, 1); }
    gpt2_init_training(model, r->comm, r->n_leaves, r->o.zero);
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
    free(r->inputs);
    free(r->targets);
    options_free(r->table, r->n_options);
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
    device_init(&r->dev, ranks_threads(&r->place, r->o.threads));
    if (!is_generating(r) || r->o.dry_run) {
        r->peak = matmul_peak(&r->dev);
        comm_all_reduce(r->comm, &r->peak, 1, DT_F64, OP_SUM, HERE);
        check_memory(print_start(r), "a smaller --batch-size, --seq-len or --model");
        if (r->o.dry_run) { return 0; }
    } else {
        check_memory(memory_to_generate(r), "a smaller model");
    }
    load_parameters(r);
    ranks_same_bytes(r->comm, "parameters", r->model.params, sizeof(float) * r->model.n);
    if (is_generating(r)) { generate_text(r); }
    else if (*r->o.probe) { probe(r); }
    else if (r->o.eval_only) { open_batch(r, TO_EVALUATE); evaluate(r, 0); }
    else if (has_data(&r->data.train)) { open_training(r, argc, argv); train(r); }
    if (r->comm->rank == 0) { export_model(r); }
    close_all(r);
    if (fflush(stdout) != 0 || ferror(stdout)) { fail_run("standard output: cannot be written: %s", strerror(errno)); }
    return 0;
}
