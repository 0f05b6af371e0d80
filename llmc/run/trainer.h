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
#include "../core/floatx.h"   // floatX
#include "../core/jsonfile.h"  // json_t
#include "../files/companions.h"  // Companions
#include "../files/extras.h"   // Extra
#include "../files/hf_folder.h"  // SafeSet
#include "../ops/documents.h"  // NO_RESET
#include "../ranks/model_gradients.h"  // Model, Purpose; model_reduce for the loop
#include "../ranks/pipeline_link.h"    // PpStreams
#include "../text/prefetch.h"  // Prefetch
#include "choices.h"           // Choice
#include "evaluate.h"          // BatchScores
#include "generate.h"          // Generator
#include "probe.h"             // ProbeBatch
#include "questions.h"         // Asker, Questions
#include "ranks.h"             // RankPlace
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
    const char* on_gpus;                 // or NULL, for CPUs alone: what make builds of it for GPUs
    const char* sparing;                 // or NULL: the option that saves most memory in training, as it is typed
    size_t stored_bytes;                 // of a parameter as the ops read it
    int usual_T, usual_V;                // positions of a row where nobody says; vocabulary of a new model for token
                                         // shards, 0: theirs
    int more_data;                       // takes the options of RunDataOptions too
    int takes_conversations;             // its attention sees each document of a row alone: run_document_start
    int counts_updates;                  // AdamW counts each slice's updates by itself: a layer may join later
    size_t decoder;                      // where in that struct decoder_run.h finds its own

    // ---- before anything is computed ----
    void (*options)(Run* r);                       // or NULL: run_add_options for its own rows
    void (*parsed)(Run* r);                        // or NULL: what follows from them
    void (*choose)(Run* r);                        // the sizes: r->model's table (model_layout), r->V, classes, max_T
    // or NULL: conversations have no images. Asked when they are read, after `choose`: how many placeholders an
    // image has, which then stand in TokenData.images (dataloader_images). It stays until the run is closed
    const ImageMeasure* (*image_measure)(Run* r);
    void (*freeze)(Run* r);                        // or NULL: what stays as it is beside --freeze
    void (*check)(Run* r);                         // or NULL: options that exclude each other
    void (*check_device)(const Run* r);            // or NULL: sizes that a GPU's kernels have no room for
    void (*box)(const Run* r);                     // rows of the box: the model's sizes
    double (*flops_per_token)(const Run* r);       // forward and backward
    // sparing: for training with that option
    double (*activation_bytes)(const Run* r, Purpose purpose, int B, int T, int sparing);
    double (*workspace_bytes)(const Run* r, int B);  // or NULL: the largest scratch that an op asks for (run_purpose)
    double (*more_bytes)(const Run* r);            // or NULL: what else it takes
    // bytes in an update, by the stage whose turn it is (pp_sum)
    double (*rows_sent)(const Run* r);             // or NULL: to ranks that share experts
    double (*parts_sent)(const Run* r);            // or NULL: to ranks that share matrices
    double (*keys_sent)(const Run* r);             // or NULL: to ranks that share positions
    // ... those of layer l in a micro-batch, out of which models/sent_run.h makes them
    double (*layer_parts_sent)(const Run* r, int l, int is_back, int again);
    double (*layer_keys_sent)(const Run* r, int l, int is_back, int again);

    // ---- the model ----
    // or NULL, the table says all: parameters from r->weights or start values, slice by slice; where the stored ones
    // are floats in host memory they may also be written whole, to model_floats
    void (*load)(Run* r, const SliceSink* sink);
    void (*open)(Run* r, Purpose purpose, int B, int T);  // activations; TO_TRAIN: and what else training needs
    // or NULL, both, the model reads none: what images the batch has that comes next. The probe's
    void (*images)(Run* r, const ProbeBatch* batch);
    // ... and those of rows first .. first + B - 1 of the data; rows NULL: it has none. All ranks of a line (--pp) ask
    void (*images_of_rows)(Run* r, const DataLoader* rows, int64_t first, const int* inputs, const int* targets, int B,
                           int T);
    // forward, loss (dp_loss), backward
    void (*leaf)(Run* r, int k, const int* inputs, const int* targets, float dloss, int B, int T);
    void (*step)(Run* r, Step* s);                 // or NULL: train_adamw, one loss and one update
    void (*stepped)(Run* r, const Step* s);        // or NULL: after a step, what follows from new parameters; log_extra
    // or NULL: a loss of the parameters alone, whose gradient it adds; or one whose gradients the leaves have, from
    // dp_sums
    float (*more_loss)(Run* r, float* grads);
    const char* without_more;                      // or NULL: a name for the loss without it, which --probe writes too
    int (*other_losses)(const Run* r, OtherLoss* others);  // or NULL: which others it writes, at most MAX_OTHER_LOSSES;
                                                           // returns how many
    // or NULL: what layers choose, which --probe writes, too; on the heap, once its batch has been read. Returns how
    // many; `open` says where they are
    int (*choices)(const Run* r, Choice** list);
    BatchScores scores;                            // or NULL: what else a validation counts, behind `losses`
    int n_scores;
    // or NULL: log_extra, a line more
    void (*validated)(Run* r, float loss, const double* scores, double* bits_per_byte, char line[256]);

    // ---- or NULL, all: --pp, for which a pass is cut between two layers (pipeline.h) ----
    void (*turn)(Run* r, int slot);                // to the activations of one of those that are under way, pp_slots;
                                                   // the layers are those of the stage whose turn it is
    // or NULL: to what images_of_rows has left of the micro-batch with this number of pp_kept; asked before it, too
    void (*turn_images)(Run* r, int kept);
    // or NULL, where pp.row_bytes are 0: rows of this micro-batch, which the first stage has made, go to the last one;
    // back: their gradients. Both ask
    void (*swap_rows)(Run* r, int kept, int back);
    PpStreams (*streams)(const Run* r, int N);     // where its stream of N positions comes in and goes out
    // leaf in two parts, with the layers of this stage; the last one's loss is part of backward
    void (*forward_leaf)(Run* r, int k, const int* inputs, const int* targets, int B, int T);
    void (*backward_leaf)(Run* r, int k, const int* inputs, const int* targets, float dloss, int B, int T);

    // ---- a pass without gradients: validation, --probe, text. What it leaves behind is on the device ----
    // tokens (B, T) up to what the head reads, without dropout. TO_GENERATE: B is 1, what an earlier pass has left of
    // the first t0 tokens is still there, and of the logits only the last position's will be asked for; else t0 is 0.
    // targets: where conversations have their marks (run_document_start), or NULL
    void (*forward)(Run* r, Purpose purpose, const int* tokens, const int* targets, int B, int T, int t0);
    const floatX* (*logits)(Run* r, Purpose purpose, int n);       // then (classes) of the n-th position that is new
    const float* (*losses)(Run* r, const int* targets, int N);     // or, TO_EVALUATE, the loss of each position
    // or NULL, both: texts are made one by one. TO_GENERATE of several texts, each in its row of the cache: the logits
    // of the last position of each, rows `*row` elements apart; NULL where another stage has them
    const floatX* (*next_of_each)(Run* r, const CachedText* texts, int n_texts, size_t* row);
    void (*share_text)(Run* r, int to, int from, int n);           // row `to` takes n positions from another
    int has_states;                                                // all that it has, or none (generate.h)

    // ---- files ----
    // what config.json says; dtype: of the parameters beside it, as it names it: "float32", "bfloat16"
    json_t* (*config_json)(const Run* r, int eot, const char* dtype);
    // or NULL: an adapter's files (model_save_rows), which a checkpoint and --export-lora have in place of a model's;
    // params: what learns. And what it adds to slice k of row i of the table, which is in `slice`; whether it does
    void (*write_adapter)(const Run* r, const float* params, const char* folder, SavedFiles* files);
    void (*merge_adapter)(const Run* r, const float* params, int i, int k, float* slice);
    int (*adapter_changes)(const Run* r, int i, int k);
    // or NULL: what it keeps in a checkpoint beside parameters and moments; returns how many, at most MAX_EXTRAS
    int (*extras)(const Run* r, Extra* extras);
    void (*load_extras)(Run* r, const char* path); // and reads again, where there are any
    json_t* (*summary)(const Run* r);              // or NULL: its keys of summary.json
    void (*write_more)(Run* r, const float* params);  // or NULL: other exports, on rank 0
    void (*close)(Run* r);
} Trainer;

// what a rank takes: bytes of memory, of what it sends in an update; the share of all products that its stage computes
typedef struct {
    double parameters, gradients, moments, activations, rest, memory;
    double batch, spared;  // activations and scratch of a micro-batch: as it is; with Trainer.sparing
    double data, streams, rows, parts, keys;  // gradients and parameters; from stage to stage; of experts; of matrices;
                                              // of attention
    double share;
    int largest, largest_spared;  // --batch-size that has room; with Trainer.sparing; -1: nobody knows
    char layers[8 * PP_CHUNKS_MAX];  // "0-3,8-11"
} Planned;

struct Run {
    const Trainer* trainer;
    Model* model;
    RunOptions o;              // the common options, run_options.h
    RunDataOptions d;          // what else can be said of the data, rundata.h
    ChatOptions chat;          // and of conversations, chat_options.h
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
    char adapter[PATH_BYTES];  // folder of the adapter to go on with, "": a new one, or none
    char adapter_weights[PATH_BYTES];  // file of its values, or of those of --lora; "": a new one, or none
    const char* export_adapter;  // --export-lora of a trainer that has it; NULL or "": nowhere
    char config[PATH_BYTES];   // config.json, "": from --model, or in the header of `weights`
    char began_weights[PATH_BYTES];  // of a run that goes on, with --export-dtype as-read: the file that it began with,
    char began_config[PATH_BYTES];   // and its config.json. "": there is none, or it is not asked for
    int V, classes, max_T;     // tokens, what targets may be, the longest row
    const int* old_layers;     // of each layer its number in `weights`, -1: new. NULL: the same layers
    int T, n_leaves;           // positions in a row, micro-batches in an update
    int has_masters;           // float parameters are kept beside bf16 ones
    SafeSet read;              // of rank 0, with --export-dtype as-read: the files of the parameters, still open
    unsigned char* moved;      // ... of each slice, where the run goes on: does it differ in them? Or NULL
    float* loaded;             // the parameters as read, on the host of rank 0, for an export without training; or NULL
    int exports_more;          // Trainer.write_more has something to write
    int decay_all;             // weight decay on biases and norms too
    int* slice_updates;        // of each slice: its updates so far. NULL: as many as the run
    int *inputs, *targets;     // (B, T), for validation
    Prefetch prefetch;         // rows to train on
    char* returned;            // --pp-chunks: where gradients of streams wait for their backward pass
    int64_t first_row;         // with which this process began,
    int first_step;            // and after which step
    double seconds_waited;     // for rows, in this step
    float targets_loss;        // in this step: the mean over targets, before more_loss is added
    ProbeBatch probe;
    Choice* choices;           // of a probe,
    int n_choices;             // so many
    StopTexts stop;            // --stop
    Prompts prompts;           // --sample-prompts
    Asker asker;               // of conversations that the model goes on with
    Questions questions;       // --eval-generate, --generate-file
    int n_rows;                // texts that are made side by side
    Generator generator;
    float* host;               // what was asked of the last pass,
    size_t n_host;             // in room for so many floats
    RunState state;
    NoiseScale noise;          // with what this step has measured,
    int64_t noise_targets;     // of so many; 0: it has not
    Snapshot snapshot;         // what is being saved, or was last
    Verify verify;             // of --verify-every
    TensorBoard board;
    double peak;               // flop/s of matrix products of all ranks, 0: not known
    double peak_measured;      // when, by CLOCK_MONOTONIC
    Log log;
    Planned planned;
    int plan_in[PP_MAX];       // --plan: where the processes of later stages say theirs,
    FILE* plan_said[PP_MAX];   // and why they do not
    int plan_out;              // such a process: where to
};

// positions of a micro-batch that this rank computes: with --cp its share
static inline int run_positions(const Run* r) { return r->o.batch_size * r->T / r->model->cp.size; }

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

// the number of an option, --pp or --cp, where it divides P ranks; else, and where this trainer has none such, 1
static inline int run_divisor(const Run* r, const char* option, int P) {
    const Option* row = options_at(r->table, r->n_options, option);
    const int n = row ? *(const int*)row->value : 1;
    return P % n == 0 ? n : 1;
}

// Of P ranks those that share the positions of rows, where as many can. Sums depend on them, so that stages and shared
// matrices, which change no bit, give way when a run goes on with other ranks
static inline int run_kept_cp(const Run* r, int P) { return run_divisor(r, "cp", P); }

// where these ranks cannot share in the ways that are typed: "launch -n 4, or leave out --tp or --cp", by the next
// larger number of ranks, which can. What an earlier start asked for gives way by itself
static inline ShortText run_ranks_remedy(const Run* r) {
    static const char* const names[] = {"pp", "tp", "cp", "ep"};
    const char* on[4];
    int size[4], n = r->comm->size, n_on = 0;
    ShortText out;
    for (int i = 0; i < 4; i++) {
        const Option* row = options_at(r->table, r->n_options, names[i]);
        size[i] = row && (row->flags & OPTION_TYPED) ? *(const int*)row->value : 1;
        if (size[i] > 1) { on[n_on++] = names[i]; }
    }
    while (n % (size[0] * size[1] * size[2]) != 0 || n / size[0] % size[3] != 0) { n++; }
    const char* id = getenv("TORCHELASTIC_RUN_ID");  // launch, too, sets RANK
    const int by_launch = r->comm->size == 1 || (id && strncmp(id, "launch-", 7) == 0);
    const char* start = comm_is_plan(r->comm) ? "--plan %d, or leave out"
                        : by_launch ? "launch -n %d, or leave out" : "%d ranks, or leave out";
    size_t used = (size_t)snprintf(out.s, sizeof out.s, start, n);
    for (int i = 0; i < n_on; i++) {
        used += (size_t)snprintf(out.s + used, sizeof out.s - used, "%s --%s",
                                 i == 0 ? "" : i + 1 < n_on ? "," : " or", on[i]);
    }
    return out;
}

// positions of a row, once the model is known
static inline int run_row(const Run* r) {
    const int usual = r->trainer->usual_T < r->max_T ? r->trainer->usual_T : r->max_T;
    return data_seq_len(&r->data, &r->o, r->table, r->n_options, usual);
}

static inline int run_is_typed(const Run* r, const char* option) {
    return options_given(r->table, r->n_options, option) == 1;
}

// typed, or brought back by a run with an adapter: its checkpoints have no config.json that says how the model was made
// and what it was trained for; their settings do
static inline int run_is_chosen(const Run* r, const char* option) {
    return run_is_typed(r, option) || (*r->adapter && options_given(r->table, r->n_options, option) == 2);
}

// --chat and --generate-file, of a trainer that takes conversations
static inline int run_is_chatting(const Run* r) { return r->trainer->takes_conversations && r->chat.chat; }
static inline int run_answers_file(const Run* r) {
    return r->trainer->takes_conversations && *r->chat.generate_file != '\0';
}

// also with an empty TEXT; a resumed run does not repeat it
static inline int run_is_generating(const Run* r) {
    return run_is_typed(r, "generate") || run_is_chatting(r) || run_answers_file(r);
}

// --dry-run without data asks for the memory of training
static inline int run_is_training(const Run* r) {
    return !run_is_generating(r) && !*r->o.probe && !r->o.eval_only && (has_data(&r->data.train) || r->o.dry_run);
}

// of a batch: does a backward pass follow?
static inline Purpose run_purpose(const Run* r) {
    return run_is_training(r) || *r->o.probe ? TO_TRAIN : TO_EVALUATE;
}

// does it train, as far as one can say before the data is open?
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

// With what a document begins in a batch (documents.h): end of text with --doc-reset, or the mark that conversations
// have in the targets. Not in a text that is generated, nor in a probe, which brings its own
static inline int run_document_start(const Run* r, Purpose purpose) {
    if (purpose == TO_GENERATE || *r->o.probe) { return NO_RESET; }
    if (data_is_chat(&r->data)) { return PACK_BEGINS; }
    return r->o.doc_reset ? run_end_of_text(r) : NO_RESET;
}

// Is a checkpoint written while training goes on? Not with --zero 1 or 2, or where ranks have parts of the model: then
// all of them send rank 0 what they keep. And not where --save-minutes alone asks for one: the copy's memory is for
// those who want checkpoints often
static inline int run_saves_beside(const Run* r) {
    const int has_all = r->comm->size == 1 || (r->o.zero == 0 && !model_is_divided(r->model));
    return r->o.async_save && r->o.save_every > 0 && has_all;
}

// does --eval-generate ask for answers while training?
static inline int run_answers(const Run* r) {
    return r->trainer->takes_conversations && *r->chat.eval_generate && run_is_training(r);
}

// texts that a run generates: tokens of the longest prompt; positions in which there is room for it and its text
static inline int run_longest_prompt(const Run* r) {
    return r->questions.longest > r->prompts.longest ? r->questions.longest : r->prompts.longest;
}
static inline int run_chat_room(const Run* r) {
    const int most = run_is_typed(r, "seq-len") ? r->T : 4096;
    return most < r->max_T ? most : r->max_T;
}

// does it write the model, or an adapter, beside checkpoints?
static inline int run_exports(const Run* r) {
    return *r->o.export_hf || r->exports_more || (r->export_adapter && *r->export_adapter);
}

// does this rank generate samples while training? Rank 0 alone, or all together where a pass needs all
static inline int run_samples(const Run* r) { return r->comm->rank == 0 || model_is_divided(r->model); }

// did a run with an adapter, which goes on, begin with a tokenizer? Its settings name none beside numbers alone
static inline int run_began_with_text_(const Run* r) {
    char* name = checkpoint_option(r->adapter, "tokenizer");
    const int is_text = name && *name;
    free(name);
    return is_text;
}

// vocabulary of a new model: the tokenizer's for text or when it was named, else the usual one; never less than the
// data needs
static inline int run_new_vocabulary(const Run* r) {
    const TokenData* d = &r->data.train;
    const int usual = r->trainer->usual_V, needed = data_vocabulary(&r->data);
    const int is_example = !has_data(d) && (usual == 0 || strcmp(r->o.model, "tiny") == 0);
    const int is_text = *r->adapter ? run_began_with_text_(r)
        : d->text != NULL || data_is_chat(&r->data) || run_is_typed(r, "tokenizer") || is_example;
    const int V = is_text ? r->tokenizer.n_tokens : usual;
    return needed > V ? needed : V;
}
#endif  // LLMC_TRAINER_H
