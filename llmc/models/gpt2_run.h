/*
What both GPT-2 trainers tell a run (trainer.h) in the same words: their options, the sizes, the files. gpt2_trainer
fills in that part of a Trainer; the passes through the model are the trainer's.
*/
#ifndef LLMC_GPT2_RUN_H
#define LLMC_GPT2_RUN_H
#include "../ops/attention.h"  // attention_bytes
#include "../ops/dropout.h"    // Dropout, dropout_key
#include "../ops/gemm.h"       // gemm_workspace_bytes
#include "../run/main.h"       // Run, Trainer; run_main for the trainers
#include "../run/pipeline.h"   // pp_option, pp_begin
#include "gpt2.h"              // GPT2, Config, config_load, gpt2_layout, gpt2_load

static inline GPT2* gpt2_of(const Run* r) { return (GPT2*)r->model; }

static inline void gpt2_options(Run* r) {
    const Option own[] = {
        {"GPT-2", "decay-all", "", OPTION_SWITCH, &r->decay_all, "0", 0, 0, "0|1",
         "decay biases and LayerNorms too, as llm.c's CPU trainer does", 0},
        {"GPT-2", "dropout", "", OPTION_FLOAT, &gpt2_of(r)->dropout, "0", 0, 0.99, "F",
         "in training leave out this share of the embeddings and of what each half of a block adds to the stream, for "
         "data that is seen many times; attention's weights stay whole", 0},
        pp_option(&gpt2_of(r)->pp),
        pp_chunks_option(&gpt2_of(r)->pp_chunks),
        {"out", "export-bin", "", OPTION_TEXT, &gpt2_of(r)->export_bin, "", 0, 0, "FILE",
         "write the model as llm.c's .bin; an earlier one is replaced", OPTION_WRITES | OPTION_WORK},
    };
    run_add_options(r, own, sizeof own);
}

static inline void gpt2_choose(Run* r) {
    GPT2* g = gpt2_of(r);
    gpt2_layout(g, *r->config ? config_load(r->config) : *r->weights ? config_load_bin(r->weights)
                   : config_preset(r->o.model, run_new_vocabulary(r)));
    r->V = r->classes = g->config.V;
    r->max_T = g->config.max_T;
    const Config* c = &g->config;
    pp_begin(r, &g->pp, &g->pp_chunks, (double)c->Vp * c->C, c->C, 1.0, offsetof(Parameters, wte));
}

static inline void gpt2_check(Run* r) {
    pp_check_batches(r);
    r->exports_more = *gpt2_of(r)->export_bin != '\0';
    options_refuse(r->exports_more && model_is_divided(r->model), "export-bin", "is not for --pp and --tp: export the "
                   "checkpoint, by one process");
    if (r->exports_more) { llmc_bin_check_out("export-bin", gpt2_of(r)->export_bin); }
}

// of the k-th leaf of this rank; of a probe nothing is left out
static inline Dropout gpt2_dropout(const Run* r, int k) {
    const int64_t row = (int64_t)model_batch(r->model, k) * r->o.batch_size;  // of the update
    const Dropout d = {run_is_training(r) ? gpt2_of(r)->dropout : 0.0f,
                       dropout_key((uint64_t)r->o.seed, (uint64_t)r->state.step),
                       (uint64_t)row * (uint64_t)r->T * (uint64_t)gpt2_of(r)->config.C};
    return d;
}

static inline void gpt2_box(const Run* r) {
    const Config c = gpt2_of(r)->whole;
    box_row("model", "%d layer%s, %d head%s, %d channels, %d positions", c.L, c.L > 1 ? "s" : "", c.NH,
            c.NH > 1 ? "s" : "", c.C, c.max_T);
    box_row("vocabulary", "%d, padded to %d", c.V, c.Vp);
    pp_box(r);
}

static inline double gpt2_flops_per_token(const Run* r) {
    const Config c = gpt2_of(r)->config;
    double n = 6.0 * c.L * c.C * (double)r->T;  // attention
    for (int i = 0; i < N_PARAMETERS; i++) { n += model_flops(r->model, i); }
    return n;
}

// the largest scratch that an op asks for: products (of head_rows positions' logits at once) or attention
static inline double gpt2_workspace_bytes(const Run* r, int B, int head_rows) {
    const Config c = gpt2_of(r)->config;
    const int N = B * r->T, n_head = N < head_rows ? N : head_rows, n = r->dev.n_threads;
    const double head = (double)gemm_workspace_bytes(n_head, c.Vp, n),
                 dwte = (double)gemm_workspace_bytes(c.Vp, n_head, n);
    const double products = run_purpose(r) == TO_TRAIN ? fmax(head, dwte) : (double)gemm_workspace_bytes(N, 4 * c.C, n);
    return fmax(products, (double)attention_bytes(r->trainer->stored_bytes, B, r->T, c.HC, c.NH, &r->dev));
}

static inline void gpt2_load_parameters(Run* r, const SliceSink* sink) {
    if (*r->weights) { gpt2_load(sink, r->weights, r->model->table); }
    else { tensors_init_into(sink, r->model->table, N_PARAMETERS, (uint32_t)r->o.seed); }
}

static inline json_t* gpt2_config_json(const Run* r, int eot, const char* dtype) {
    return config_json(gpt2_of(r)->whole, eot, dtype);
}

static inline void gpt2_write_bin(Run* r, const float* params) {
    const Config c = gpt2_of(r)->whole;
    const BinHeader h = {0, 0, c.max_T, c.V, c.L, c.NH, c.C, c.Vp};
    llmc_bin_save(gpt2_of(r)->export_bin, h, r->model->table, N_PARAMETERS, params);
}

static inline Trainer gpt2_trainer(const char* name, const char* about) {
    Trainer t;
    memset(&t, 0, sizeof t);
    t.name = name;
    t.about = about;
    t.presets = "random start from a preset: tiny, d6 d12 d24 d36 d48 (GPT-2), gpt3:c384 gpt3:c768 ...";
    t.on_gpus = "train_gpt2cu";
    t.usual_T = 1024;
    t.usual_V = 50257;
    t.options = gpt2_options;
    t.choose = gpt2_choose;
    t.check = gpt2_check;
    t.box = gpt2_box;
    t.flops_per_token = gpt2_flops_per_token;
    t.load = gpt2_load_parameters;
    t.config_json = gpt2_config_json;
    t.write_more = gpt2_write_bin;
    return t;
}
#endif  // LLMC_GPT2_RUN_H
