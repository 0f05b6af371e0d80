/*
The two structs that a run is made of.
    Trainer   what only one architecture knows, as functions: its sizes, its parameters, forward and backward. A
              trainer fills one in
    Run       everything that a run hands around: options, data, ranks, counters, log. The same for all; run_main has
              one
and the questions about a run that everybody asks. The way of a run: start.h (options, data, plan, box), train.h
(steps), save.h (checkpoints, exports), tasks.h (validation, text, probe); main.h has them in order.
*/
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H
#include "../files/companions.h"  // Companions
#include "../files/extras.h"   // Extra
#include "../ranks/model_gradients.h"  // Model, Purpose, model_reduce
#include "../text/prefetch.h"  // Prefetch
#include "evaluate.h"          // BatchLosses, BatchScores
#include "generate.h"          // Generator, NextLogits
#include "probe.h"             // ProbeBatch
#include "ranks.h"             // RankPlace, ranks_open
#include "rundata.h"           // RunData
#include "snapshot.h"          // Snapshot
#include "tensorboard.h"       // TensorBoard

typedef struct Run Run;

// a checkpoint has one vector more than those of the trainer, for counts_updates
enum { MAX_EXTRAS = SNAPSHOT_ARENAS_MAX - SNAPSHOT_ARENAS - 1, MAX_SCORES = 16 };

// what one step has computed
typedef struct {
    float loss, norm, lr;   // of the whole update; norm: before clipping
    int skipped;            // nothing was updated
    DataParallel* dp;       // whose gradients
    const float* grads;     // these are, of the last part of the step
} Step;

// r->model is the trainer's own struct, which begins with a Model. `or NULL` where a trainer may have none
typedef struct {
    const char *name, *about, *presets;  // of the program, for --help; what --model can name
    const char* sparing;                 // or NULL: the option that saves most memory in training, as it is typed
    size_t stored_bytes;                 // of a parameter as the ops read it
    int usual_T, usual_V;                // positions of a row where nobody says; vocabulary of a new model for token
                                         // shards, 0: theirs
    int more_data;                       // takes the options of RunDataOptions too
    int counts_updates;                  // AdamW counts each slice's updates by itself: a layer may join later

    // ---- before anything is computed ----
    void (*options)(Run* r);                       // or NULL: run_add_options for its own rows
    void (*parsed)(Run* r);                        // or NULL: what follows from them
    void (*choose)(Run* r);                        // the sizes: r->model's table (model_layout), r->V, classes, max_T
    void (*freeze)(Run* r);                        // or NULL: what stays as it is beside --freeze
    void (*check)(Run* r);                         // or NULL: options that exclude each other
    void (*box)(const Run* r);                     // rows of the box: the model's sizes
    double (*flops_per_token)(const Run* r);       // forward and backward
    double (*activation_bytes)(const Run* r, Purpose purpose, int B, int T);
    double (*sparing_bytes)(const Run* r, int B, int T);  // or NULL: activations for training with that option
    double (*workspace_bytes)(const Run* r, int B);  // or NULL: the largest scratch that an op asks for
    double (*more_bytes)(const Run* r);            // or NULL: what else it takes

    // ---- the model ----
    // or NULL, the table says all: parameters from r->weights or start values, slice by slice; where the stored ones
    // are floats in host memory they may also be written whole, to model_floats
    void (*load)(Run* r, const SliceSink* sink);
    void (*open)(Run* r, Purpose purpose, int B, int T);  // activations; TO_TRAIN: and what else training needs
    // forward, loss (dp_loss), backward
    void (*leaf)(Run* r, int k, const int* inputs, const int* targets, float dloss, int B, int T);
    void (*step)(Run* r, Step* s);                 // or NULL: train_adamw, one loss and one update
    void (*stepped)(Run* r, const Step* s);        // or NULL: after a step, what follows from new parameters; log_extra
    // or NULL: a loss of the parameters alone, whose gradient it adds; or one whose gradients the leaves have, from
    // dp_sums
    float (*more_loss)(Run* r, float* grads);
    const char* without_more;                      // or NULL: a name for the loss without it, which --probe writes too
    BatchLosses losses;                            // forward and the loss of each position
    BatchScores scores;                            // or NULL: what else a validation counts
    int n_scores;
    // or NULL: log_extra, a line more
    void (*validated)(Run* r, float loss, const double* scores, double* bits_per_byte, char line[256]);
    void (*forward)(Run* r, const int* inputs, int B, int T);  // for --probe;
    void (*logits)(Run* r, float* out, int first, int n);      // then the logits (n, classes) of positions first,
                                                               // first + 1, ...
    NextLogits next_logits;                        // for generation

    // ---- files ----
    FileSum (*write_config)(const Run* r, const char* path, int eot);
    // or NULL: what it keeps in a checkpoint beside parameters and moments; returns how many, at most MAX_EXTRAS
    int (*extras)(const Run* r, Extra* extras);
    void (*load_extras)(Run* r, const char* path); // and reads again, where there are any
    json_t* (*summary)(const Run* r);              // or NULL: its keys of summary.json
    void (*write_more)(Run* r, const float* params);  // or NULL: other exports, on rank 0
    void (*close)(Run* r);
} Trainer;

struct Run {
    const Trainer* trainer;
    Model* model;
    RunOptions o;              // the common options, run_options.h
    RunDataOptions d;          // what else can be said of the data, rundata.h
    Option table[MAX_OPTIONS];
    int n_options;
    Device dev;
    RankPlace place;
    Comm* comm;
    Tokenizer tokenizer;
    Companions companions;     // files that go along with model and tokenizer
    int has_no_text;           // the model's tokens are no text at all
    RunData data;
    json_t* recorded;          // what it is, on rank 0 while training: for settings.json and each manifest.json
    char weights[PATH_BYTES];  // file to start from, "": random
    char config[PATH_BYTES];   // config.json, "": from --model, or in the header of `weights`
    int V, classes, max_T;     // tokens, what targets may be, the longest row
    const int* old_layers;     // of each layer its number in `weights`, -1: new. NULL: the same layers
    int T, n_leaves;           // positions in a row, micro-batches in an update
    int has_masters;           // float parameters are kept beside bf16 ones
    float* loaded;             // the parameters as read, on the host of rank 0, for an export without training; or NULL
    int exports_more;          // Trainer.write_more has something to write
    int decay_all;             // weight decay on biases and norms too
    int* slice_updates;        // of each slice: its updates so far. NULL: as many as the run
    int *inputs, *targets;     // (B, T), for validation
    Prefetch prefetch;         // rows to train on
    int64_t first_row;         // with which this process began,
    int first_step;            // and after which step
    double seconds_waited;     // for rows, in this step
    float targets_loss;        // in this step: the mean over targets, before more_loss is added
    ProbeBatch probe;
    StopTexts stop;            // --stop
    Prompts prompts;           // --sample-prompts
    Generator generator;
    RunState state;
    NoiseScale noise;          // with what this step has measured,
    int64_t noise_targets;     // of so many; 0: it has not
    Snapshot snapshot;         // what is being saved, or was last
    Verify verify;             // of --verify-every
    TensorBoard board;
    double peak;               // flop/s of matrix products of all ranks, 0: not known
    double peak_measured;      // when, by CLOCK_MONOTONIC
    Log log;
};

// rows of the trainer's own behind the common ones
static inline void run_add_options(Run* r, const Option* rows, size_t n_bytes) {
    r->n_options = options_append(r->table, r->n_options, rows, (int)(n_bytes / sizeof *rows));
}

// what the trainer keeps beside parameters and moments; returns how many
static inline int run_extras(const Run* r, Extra extras[MAX_EXTRAS]) {
    const int n = r->trainer->extras ? r->trainer->extras(r, extras) : 0;
    assert(n <= MAX_EXTRAS);
    return n;
}

static inline int run_is_typed(const Run* r, const char* option) {
    return options_given(r->table, r->n_options, option) == 1;
}

// also with an empty TEXT; a resumed run does not repeat it
static inline int run_is_generating(const Run* r) { return run_is_typed(r, "generate"); }

// --dry-run without data asks for the memory of training
static inline int run_is_training(const Run* r) {
    return !run_is_generating(r) && !*r->o.probe && !r->o.eval_only && (has_data(&r->data.train) || r->o.dry_run);
}

// the same, as far as one can say before the data is open
static inline int run_will_train(const Run* r) {
    int n = 0;
    for (int i = 0; i < r->n_options; i++) { n += *option_path(&r->table[i], OPTION_TRAINS) != '\0'; }
    return n > 0 && !run_is_generating(r) && !*r->o.probe && !r->o.eval_only;
}

// --ema-weights, which is asked for each time: of a run that trains with --ema its own average, when it ends; else that
// of the checkpoint which is read
static inline int run_takes_average(const Run* r) { return r->o.ema_weights && run_is_typed(r, "ema-weights"); }

// the tokenizer is the model's: it shows every token, and encodes none that the model lacks
static inline int run_has_text(const Run* r) {
    return !r->has_no_text && data_tokenizer_fits(&r->data, &r->tokenizer, r->V, r->table, r->n_options);
}

static inline int run_end_of_text(const Run* r) {
    return run_has_text(r) ? tokenizer_need_eot(&r->tokenizer) : r->V - 1;
}

// Is a checkpoint written while training goes on? Not with --zero 1 or 2: then all ranks send rank 0 what they keep.
// And not where --save-minutes alone asks for one: the copy's memory is for those who want checkpoints often
static inline int run_saves_beside(const Run* r) {
    return r->o.async_save && r->o.save_every > 0 && (r->comm->size == 1 || r->o.zero == 0);
}

// does this rank generate samples while training? Rank 0 alone, or all together where a pass needs all
static inline int run_samples(const Run* r) { return r->comm->rank == 0 || model_is_shared(r->model); }

// vocabulary of a new model: the tokenizer's for text or when it was named, else the usual one; never less than the
// data needs
static inline int run_new_vocabulary(const Run* r) {
    const TokenData* d = &r->data.train;
    const int usual = r->trainer->usual_V, needed = data_vocabulary(&r->data);
    const int is_example = !has_data(d) && (usual == 0 || strcmp(r->o.model, "tiny") == 0);
    const int is_text = d->text != NULL || run_is_typed(r, "tokenizer") || is_example;
    const int V = is_text ? r->tokenizer.n_tokens : usual;
    return needed > V ? needed : V;
}
#endif  // LLMC_TRAINER_H
