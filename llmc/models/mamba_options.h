/*
What train_mamba_hpn takes beside the options of every trainer (run_options.h), and the model that these ask for.
    mamba_options         its rows of the table; mamba_reword_options: what rows of run_options.h mean here
    mamba_config_new      the sizes of a random start: a preset's, and what the options say
    mamba_check_shape     refuses options that say sizes where the model comes from a file, which has them
    mamba_choose_head     the head: what the options say, else what the model has
    mamba_placement       where prototypes stand: what --proto-init says, or the first placement that fits
Errors: options_fail, one line.
*/
#ifndef LLMC_MAMBA_OPTIONS_H
#define LLMC_MAMBA_OPTIONS_H
#include "../core/options.h"          // Option, options_append, options_given, options_fail
#include "../ops/gradient_surgery.h"  // SURGERY_NAMES
#include "mamba.h"                    // Config, config_preset, HEAD_NAMES, PROTO_NAMES
#include "prototypes.h"               // PROTO_INIT_NAMES

#define TASK_NAMES "lm|cls"
typedef enum { TASK_LM, TASK_CLS } Task;
#define RECOMPUTE_NAMES "none|scan|layer"
typedef enum { RECOMPUTE_NONE, RECOMPUTE_SCAN, RECOMPUTE_LAYER } MambaRecompute;

typedef struct {
    const char *proto_init, *embeddings_out;  // head
    int head, proto;                          // a HeadKind or -1, the model's own; a Proto
    int classes, proto_dim;
    float hpn_scale, proto_separation;
    const char* placement;                    // model
    int base_layers, target_layers, d_model, d_state, d_conv, expand, dt_rank, vocab_size, freeze_embedding;
    int task;                                 // data: a Task
    int recompute, scan_chunk, cp;            // machine: a MambaRecompute; ranks that share the positions of a row
    int surgery, bp_cadence;                  // Forward-Forward: a SurgeryMethod
    float ff_lr, ff_threshold, ff_corrupt, surgery_epsilon, gradnorm_alpha, cagrad_lambda;
    int fail_on_non_finite, human_log;        // run
} MambaOptions;

// appends the rows to the n of a table; returns how many there are now
static inline int mamba_options(Option* t, int n, MambaOptions* m) {
    const Option rows[] = {
        {"model", "d-model", "", OPTION_INT, &m->d_model, "0", 0, 1 << 20, "N",
         "width of the stream; 0: the preset's. This and the next six are for a random start", 0},
        {"model", "d-state", "", OPTION_INT, &m->d_state, "16", 1, 256, "N",
         "states of a channel: what the scan remembers of the text so far", 0},
        {"model", "d-conv", "", OPTION_INT, &m->d_conv, "4", 1, 16, "N",
         "positions that the convolution sees: its own and those just before", 0},
        {"model", "expand", "", OPTION_INT, &m->expand, "2", 1, 64, "N",
         "channels inside a layer, as a multiple of d-model", 0},
        {"model", "dt-rank", "", OPTION_INT, &m->dt_rank, "0", 0, 1 << 16, "N",
         "rank of the projection that makes the step sizes; 0: d-model / 16, rounded up", 0},
        {"model", "base-layers", "--layers", OPTION_INT, &m->base_layers, "0", 0, 1024, "N",
         "layers; 0: the preset's", 0},
        {"model", "vocab-size", "", OPTION_INT, &m->vocab_size, "0", 0, 1 << 24, "N",
         "tokens of the model; 0: the tokenizer's for text, else 1 + the largest in the data", 0},
        {"model", "target-layers", "", OPTION_INT, &m->target_layers, "0", 0, 1024, "N",
         "grow the model to so many layers: new ones do nothing at first, and learn from the first step on; 0: no "
         "new ones", 0},
        {"model", "placement", "", OPTION_TEXT, &m->placement, "append", 0, 0, "WHERE",
         "where the new layers stand: append, prepend, insert:N, or specific:A,B,.. for their numbers", 0},
        {"model", "freeze-embedding", "", OPTION_SWITCH, &m->freeze_embedding, "0", 0, 0, "0|1",
         "no updates of the embedding", 0},
        {"head", "head", "", OPTION_CHOICE, &m->head, "", 0, 0, HEAD_NAMES,
         "cross entropy, (1 - cosine)^2 to fixed prototypes, or cross entropy of scaled cosines. Empty: the "
         "model's own, else ce", 0},
        {"head", "proto", "", OPTION_CHOICE, &m->proto, "fixed", 0, 0, PROTO_NAMES,
         "fixed: prototypes stay where they are placed; learn: they are trained too, those of hpn kept apart by "
         "--proto-separation", 0},
        {"head", "proto-init", "", OPTION_TEXT, &m->proto_init, "", 0, 0, PROTO_INIT_NAMES "|FILE",
         "how prototypes are placed, or a safetensors file that has them; empty: the first of these that fits",
         OPTION_READS},
        {"head", "proto-dim", "", OPTION_INT, &m->proto_dim, "0", 0, 1 << 16, "N",
         "dimensions of a prototype; 0: d-model. Any other number adds a projection, which is learnt", 0},
        {"head", "proto-separation", "", OPTION_FLOAT, &m->proto_separation, "10", 0, 1000, "F",
         "weight of the loss that keeps learnt prototypes of hpn apart", 0},
        {"head", "hpn-scale", "", OPTION_FLOAT, &m->hpn_scale, "16", 1e-3, 1e6, "F",
         "factor of the cosines in hpn-softmax", 0},
        {"head", "classes", "", OPTION_INT, &m->classes, "0", 0, 1 << 24, "N",
         "of --task cls; 0: 1 + the largest target in the data", 0},
        {"data", "task", "", OPTION_CHOICE, &m->task, "lm", 0, 0, TASK_NAMES,
         "lm: the next token; cls: the targets in a file of examples, such as dev/data/digits.py writes", 0},
        {"Forward-Forward", "ff-lr", "", OPTION_FLOAT, &m->ff_lr, "0", 0, 10, "F",
         "its learning rate: each layer also learns by itself to tell real rows from corrupted ones; 0: without "
         "Forward-Forward", 0},
        {"Forward-Forward", "bp-cadence-steps", "", OPTION_INT, &m->bp_cadence, "1", 1, INT_MAX, "N",
         "back-propagate in every N-th step; between them layers learn by Forward-Forward alone", 0},
        {"Forward-Forward", "ff-threshold", "", OPTION_FLOAT, &m->ff_threshold, "0.1", 0, 1e6, "F",
         "mean square of a layer's output above which a position counts as real", 0},
        {"Forward-Forward", "ff-corrupt", "", OPTION_FLOAT, &m->ff_corrupt, "0.5", 0, 1, "F",
         "share of tokens that are replaced in corrupted rows", 0},
        {"Forward-Forward", "gradient-surgery-method", "", OPTION_CHOICE, &m->surgery, "pcgrad", 0, 0, SURGERY_NAMES,
         "how both gradients become one (doc/gradient_surgery.md)", 0},
        {"Forward-Forward", "gradient-surgery-epsilon", "", OPTION_FLOAT, &m->surgery_epsilon, "1e-8", 0, 1e30, "F",
         "added to the divisor of a projection", 0},
        {"Forward-Forward", "gradnorm-alpha", "", OPTION_FLOAT, &m->gradnorm_alpha, "0.2", 0, 100, "F",
         "gradnorm: how strongly the slower task is favoured", 0},
        {"Forward-Forward", "cagrad-lambda", "", OPTION_FLOAT, &m->cagrad_lambda, "0.4", 0, 0.99999, "F",
         "cagrad: how far from the mean, below 1", 0},
        {"run", "fail-on-non-finite", "", OPTION_SWITCH, &m->fail_on_non_finite, "0", 0, 0, "0|1",
         "stop at the first update that is not finite, as --max-skips 0", 0},
        {"run", "human-log", "", OPTION_SWITCH, &m->human_log, "1", 0, 0, "0|1",
         "0: print the records of metrics.jsonl instead of lines for people", 0},
        {"out", "embeddings-out", "", OPTION_TEXT, &m->embeddings_out, "", 0, 0, "FILE",
         "in the end, of the validation data: unit vectors, labels and prototypes, for "
         "dev/tools/plot_embeddings.py", OPTION_WRITES},
        {"machine", "scan-chunk", "", OPTION_INT, &m->scan_chunk, "0", 0, 1 << 20, "N",
         "positions from one kept state to the next; 0: a good number. The result does not depend on it", 0},
        {"machine", "recompute", "", OPTION_CHOICE, &m->recompute, "scan", 0, 0, RECOMPUTE_NAMES,
         "backward: keep the states of all positions, of every scan-chunk-th, or only the stream between layers. "
         "The result does not depend on it", 0},
    };
    return options_append(t, n, rows, (int)(sizeof rows / sizeof rows[0]));
}

// gives rows of run_options.h the meaning that they have here
static inline void mamba_reword_options(Option* t, int n) {
    options_reword(t, n, "from", "parameters to start from: a run folder or checkpoint, a Hugging Face folder, or a "
                   ".safetensors file with config.json beside it");
    options_reword(t, n, "seq-len", "positions in a row; 0: 256, of examples all they have");
    options_reword(t, n, "doc-reset", "the state starts anew at each document of a row");
    options_reword(t, n, "freeze", "no updates of tensors with such names, of all layers or of one: "
                   "'backbone.embeddings.*,*.layers.0.*'; first:N: of the first N layers; indices:A,B,..: of these "
                   "layers, from 0");
}

// ---- the model ----

static inline Config mamba_config_new(const MambaOptions* m, const char* preset, int V) {
    Config c = config_preset(preset, V);
    c.M = c.head.C = m->d_model > 0 ? m->d_model : c.M;
    c.L = m->base_layers > 0 ? m->base_layers : c.L;
    c.NS = m->d_state;
    c.K = m->d_conv;
    c.E = c.M * m->expand;
    if (c.E > 1 << 22) {
        options_fail("expand", "expected at most %d channels, found %d x --d-model %d", 1 << 22, m->expand, c.M);
    }
    c.R = m->dt_rank > 0 ? m->dt_rank : mamba_dt_rank(c.M);
    return c;
}

// c comes from a file: what is typed of its shape, as by --continue, must be what it is; 0 means any. The layers of one
// that has grown are those that it should have in the end
static inline void mamba_check_shape(const Option* table, int n, const MambaOptions* m, const Config* c,
                                     const char* path) {
    const int base = m->target_layers == c->L ? m->base_layers : c->L;
    const struct {
        const char* name;
        int typed, found;
    } shape[] = {{"d-model", m->d_model, c->M},         {"d-state", m->d_state, c->NS}, {"d-conv", m->d_conv, c->K},
                 {"expand", m->expand, c->E / c->M},    {"dt-rank", m->dt_rank, c->R},
                 {"base-layers", m->base_layers, base}, {"vocab-size", m->vocab_size, c->V}};
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++) {
        if (options_given(table, n, shape[i].name) != 1 || shape[i].typed == 0) { continue; }
        if (shape[i].typed == shape[i].found) { continue; }
        options_fail(shape[i].name, "is for a random start (--model): here %s says %d, found %d", path, shape[i].found,
                     shape[i].typed);
    }
}

// is_old: c comes from a file; what is not typed then stays. classes: those of a classifier, 0: a language model
static inline void mamba_choose_head(HeadConfig* h, const MambaOptions* m, const Option* table, int n, int is_old,
                                     int classes) {
    const HeadKind was = h->kind;
    const int stays = is_old && h->is_classifier && options_given(table, n, "classes") != 1;
    const int is_new_classifier = classes > 0 && !stays;
    if (m->head >= 0) { h->kind = (HeadKind)m->head; }
    if (is_new_classifier) {
        h->is_classifier = 1;
        h->classes = classes;
        h->tied = 0;
    }
    if (!is_old || h->kind != was || options_given(table, n, "proto-dim") == 1) {
        h->Dp = m->proto_dim > 0 ? m->proto_dim : h->C;
    }
    if (!is_old || options_given(table, n, "hpn-scale") == 1) { h->scale = m->hpn_scale; }
    if (!is_old || options_given(table, n, "proto") == 1) { h->learns_prototypes = m->proto == PROTO_LEARN; }
}

// what --proto-init says, else the placement that is as far apart as can be, where one is known
static inline const char* mamba_placement(const HeadConfig* h, const char* chosen) {
    return *chosen ? chosen : h->classes <= h->Dp + 1 ? "simplex" : h->classes <= 2 * h->Dp ? "orthoplex" : "random";
}
#endif  // LLMC_MAMBA_OPTIONS_H
