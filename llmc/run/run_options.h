/*
The options that all trainers have, and what follows from them alone.
    run_options        the rows of the options table; a trainer adds rows of its own
    run_plan_steps, run_leaves   --steps from --epochs; micro-batches in an update
    run_lr             the learning rate of a step: --lr, --schedule, --warmup, --final-lr, --lr-horizon
    run_prompt         the text that --generate goes on from
    run_note_grid, run_grid_to_json   how ranks were asked to share, for the starts to come
Errors: fail_input, with the option's name.
*/
#ifndef LLMC_RUN_OPTIONS_H
#define LLMC_RUN_OPTIONS_H
#include "../core/jsonfile.h"  // json_never_null
#include "../core/options.h"   // Option, options_fail, options_set
#include "../files/checkpoint.h"  // checkpoint_newest
#include "../ops/sampler.h"    // Sampling
#include "../ranks/comm_launch.h"  // RANKS_MAX
#include "schedule.h"          // schedule_lr, SCHEDULE_NAMES

#define EXPORT_DTYPE_NAMES "fp32|bf16|as-read"
typedef enum { EXPORT_FP32, EXPORT_BF16, EXPORT_AS_READ } ExportDtype;

#define OPTIMIZER_NAMES "adamw|muon"  // what --optimizer takes
typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON } OptimizerKind;

// how ranks share a model, a row or its experts: options of some trainers (pipeline.h, tp_option.h, cp_option.h,
// models/experts_run.h)
enum { GRID_OPTIONS = 5 };
static inline const char* grid_name(int i) {
    static const char* const names[GRID_OPTIONS] = {"pp", "pp-chunks", "tp", "cp", "ep"};
    return names[i];
}

typedef struct {
    const char *from, *config, *model;                                                    // model
    int seed;
    const char *train, *val, *tokenizer, *hellaswag;                                      // data
    int batch_size, seq_len, batch_tokens, grad_accum, shuffle, overfit, doc_reset, eval_examples;
    float val_fraction;
    const char* freeze;                                                                   // optimizer
    int optimizer, schedule, steps, lr_horizon;                     // an OptimizerKind, a Schedule
    Amount warmup;                                                                        // of the steps
    float epochs, lr, final_lr, weight_decay, beta1, beta2, eps, momentum, clip, skip_loss_z, skip_norm_z;
    int noise_scale, ema_weights;
    float ema;
    const char* run;                                                                      // run
    int resume, go_on, save_every, async_save, keep, keep_every, eval_every, eval_batches, sample_every, log_every,
        early_stop,
        tensorboard, max_skips, verify_every;
    float save_minutes, early_stop_delta;
    const char *export_hf, *generate, *probe, *probe_out;                                 // out
    int eval_only, export_dtype;                                                          // an ExportDtype
    float shard_gb;
    const char *sample_prompts, *stop;                                                    // sampling
    int max_new_tokens, top_k, samples, generate_batch, prompt_eot;
    float temperature, top_p, min_p, repetition_penalty;
    const char* rank;                                                                     // machine
    int threads, dry_run, zero, comm_timeout, init_timeout, plan;
    const char* plan_card;
    float plan_rate;
    int grid[GRID_OPTIONS];  // of each grid_name what was asked for, now or by an earlier start; its own option has
                             // what is in use, less where the ranks of now cannot
} RunOptions;

// fills the table with the common rows; `presets` is what --model can name. Returns the number of rows.
static inline int run_options(Option* t, RunOptions* o, const char* presets) {
    const Option rows[] = {
        // group, name, other spellings (llm.c's and rust_trainer's), type, where, default, range, what it takes,
        // meaning, what it names outside the program (options.h)
        {"model", "from", "-e --base-ckpt --init-hf", OPTION_TEXT, &o->from, "", 0, 0, "PATH",
         "parameters to start from: a run folder or checkpoint, a Hugging Face folder, a .safetensors file with "
         "config.json beside it, or llm.c's .bin, told apart by content", OPTION_READS},
        {"model", "config", "", OPTION_TEXT, &o->config, "", 0, 0, "FILE",
         "random start from Hugging Face's config.json", OPTION_READS},
        {"model", "model", "", OPTION_TEXT, &o->model, "", 0, 0, "NAME", presets, 0},
        {"model", "seed", "", OPTION_INT, &o->seed, "42", 0, INT_MAX, "N",
         "random seed: start values, order of the data, samples", 0},
        {"data", "train", "-i", OPTION_TEXT, &o->train, "", 0, 0, "PATH,...",
         "token shards (a pattern), a text file, JSON Lines or a folder of text; several: books.txt,code/, or with the "
         "share of each in the rows: books.txt:3,code/:1", OPTION_READS | OPTION_LIST | OPTION_TRAINS},
        {"data", "val", "-j", OPTION_TEXT, &o->val, "", 0, 0, "PATH,...", "the same for validation, without shares",
         OPTION_READS | OPTION_LIST | OPTION_VALIDATES},
        {"data", "val-fraction", "--val-ratio", OPTION_FLOAT, &o->val_fraction, "0", 0, 0.9, "F",
         "without --val: keep this last part of --train for validation", 0},
        {"data", "tokenizer", "", OPTION_TEXT, &o->tokenizer, "", 0, 0, "bytes|PATH",
         "bytes, a tokenizer.json or its folder, or llm.c's gpt2_tokenizer.bin to show tokens as text; empty: the "
         "model's own, else bytes", OPTION_READS},
        {"data", "batch-size", "-b", OPTION_INT, &o->batch_size, "4", 1, 65536, "N", "rows in a micro-batch", 0},
        {"data", "seq-len", "-t", OPTION_INT, &o->seq_len, "0", 0, 1 << 24, "N",
         "positions in a row; 0: as many as the model has, at most 1024", 0},
        {"data", "batch-tokens", "-d", OPTION_INT, &o->batch_tokens, "0", 0, INT_MAX, "N",
         "tokens in an update, a multiple of batch-size x seq-len; 0: one micro-batch", 0},
        {"data", "grad-accum", "", OPTION_INT, &o->grad_accum, "0", 0, 1 << 20, "N",
         "micro-batches in an update, instead of --batch-tokens", 0},
        {"data", "shuffle", "", OPTION_SWITCH, &o->shuffle, "1", 0, 0, "0|1",
         "rows in random order, another in each epoch; 0: file order", 0},
        {"data", "overfit", "-a", OPTION_SWITCH, &o->overfit, "0", 0, 0, "0|1",
         "train on the rows of the first update again and again: a sound model soon knows them by heart", 0},
        {"data", "doc-reset", "", OPTION_SWITCH, &o->doc_reset, "0", 0, 0, "0|1",
         "attention and positions start anew at each document of a row", 0},
        {"data", "hellaswag", "", OPTION_TEXT, &o->hellaswag, "", 0, 0, "FILE",
         "answer these examples (dev/data/hellaswag.py, mmlu.py) with each validation", OPTION_READS},
        {"data", "eval-examples", "", OPTION_INT, &o->eval_examples, "0", 0, INT_MAX, "N",
         "answer only the first N of them; 0: all", 0},
        {"optimizer", "steps", "-x", OPTION_INT, &o->steps, "0", 0, INT_MAX, "N",
         "updates; 0: as many as --epochs need", 0},
        {"optimizer", "epochs", "", OPTION_FLOAT, &o->epochs, "1", 1e-6, 1e6, "F",
         "passes over the training data, when --steps is 0", 0},
        {"optimizer", "lr", "-l", OPTION_FLOAT, &o->lr, "3e-4", 0, 10, "F", "peak learning rate", 0},
        {"optimizer", "optimizer", "", OPTION_CHOICE, &o->optimizer, "adamw", 0, 0, OPTIMIZER_NAMES,
         "muon: matrices of layers learn by Muon, with the same learning rate, the rest by AdamW", 0},
        {"optimizer", "schedule", "-k", OPTION_CHOICE, &o->schedule, "cosine", 0, 0, SCHEDULE_NAMES,
         "how the learning rate falls after warm-up", 0},
        {"optimizer", "warmup", "-u --lr-warmup-steps", OPTION_AMOUNT, &o->warmup, "5%", 0, INT_MAX, "N|F%",
         "steps in which the learning rate rises to its peak: a number, or a share of --steps (or of --lr-horizon)", 0},
        {"optimizer", "final-lr", "-q --lr-min-scale", OPTION_FLOAT, &o->final_lr, "0.1", 0, 1, "F",
         "learning rate at the end, as a fraction of the peak", 0},
        {"optimizer", "lr-horizon", "", OPTION_INT, &o->lr_horizon, "0", 0, INT_MAX, "N",
         "steps over which the learning rate falls, then it stays; 0: all of --steps", 0},
        {"optimizer", "weight-decay", "-c", OPTION_FLOAT, &o->weight_decay, "0.1", 0, 10, "F",
         "AdamW's weight decay, on matrices and embeddings", 0},
        {"optimizer", "beta1", "", OPTION_FLOAT, &o->beta1, "0.9", 0, 0.99999, "F", "decay of AdamW's first moment", 0},
        {"optimizer", "beta2", "", OPTION_FLOAT, &o->beta2, "0.95", 0, 0.9999999, "F",
         "decay of AdamW's second moment", 0},
        {"optimizer", "eps", "--adam-eps", OPTION_FLOAT, &o->eps, "1e-8", 1e-30, 1, "F", "AdamW's epsilon", 0},
        {"optimizer", "momentum", "", OPTION_FLOAT, &o->momentum, "0.95", 0, 0.99999, "F", "decay of Muon's moment", 0},
        {"optimizer", "clip", "--grad-clip-norm", OPTION_FLOAT, &o->clip, "1", 0, 1e30, "F",
         "largest gradient norm; 0: no limit", 0},
        {"optimizer", "skip-loss-z", "-sl", OPTION_FLOAT, &o->skip_loss_z, "0", 0, 1e30, "F",
         "skip an update whose loss lies this many standard deviations above the last 128; 0: never", 0},
        {"optimizer", "skip-norm-z", "-sg", OPTION_FLOAT, &o->skip_norm_z, "0", 0, 1e30, "F",
         "the same for the gradient norm", 0},
        {"optimizer", "noise-scale", "", OPTION_INT, &o->noise_scale, "0", 0, INT_MAX, "N",
         "every N steps measure the gradient noise scale, about how many targets an update should have; needs several "
         "micro-batches in an update; 0: never", 0},
        {"optimizer", "ema", "", OPTION_FLOAT, &o->ema, "0", 0, 0.9999999, "F",
         "keep an average of the weights too, over about the last 1 / (1 - F) updates: 0.999; it is validated beside "
         "them and saved in checkpoints; 0: none", 0},
        {"optimizer", "freeze", "", OPTION_TEXT, &o->freeze, "", 0, 0, "PATTERN,...",
         "no updates of tensors with such names, of all layers or of one: 'transformer.w?e.*,*.h.0.*'; first:N: of"
         " the first N layers; indices:A,B,..: of these layers, from 0", 0},
        {"run", "run", "-o --out-dir --output-dir", OPTION_TEXT, &o->run, "", 0, 0, "DIR",
         "folder for checkpoints, log and samples; empty: runs/<trainer>-<date-time>", 0},
        {"run", "resume", "-y", OPTION_SWITCH, &o->resume, "0", 0, 0, "0|1",
         "go on from the newest checkpoint in --run, with its options; those typed now win", 0},
        {"run", "continue", "", OPTION_SWITCH, &o->go_on, "0", 0, 0, "0|1",
         "--resume if --run has a checkpoint, else begin: one command for both, as job schedulers want it", 0},
        {"run", "save-every", "-n", OPTION_INT, &o->save_every, "0", 0, INT_MAX, "N",
         "checkpoint every N steps; 0: as --save-minutes says, and at the end", 0},
        {"run", "save-minutes", "", OPTION_FLOAT, &o->save_minutes, "5", 0, 1e6, "F",
         "checkpoint also when the last is F minutes old, and 20 times as old as writing it took; 0: not by time", 0},
        {"run", "async-save", "", OPTION_SWITCH, &o->async_save, "1", 0, 0, "0|1",
         "with --save-every: go on training while a copy of the state is written; 0: wait, and do without the copy's "
         "memory", 0},
        {"run", "keep", "-nk", OPTION_INT, &o->keep, "2", 1, INT_MAX, "N",
         "newest checkpoints to keep, besides the best", 0},
        {"run", "keep-every", "-nm", OPTION_INT, &o->keep_every, "0", 0, INT_MAX, "M",
         "keep every checkpoint whose step is a multiple of M too; 0: none", 0},
        {"run", "eval-every", "-v --val-every", OPTION_INT, &o->eval_every, "100", 0, INT_MAX, "N",
         "validation every N steps, with --val or --val-fraction; 0: never", 0},
        {"run", "eval-batches", "-m", OPTION_INT, &o->eval_batches, "20", 1, INT_MAX, "N",
         "micro-batches in a validation", 0},
        {"run", "sample-every", "-s", OPTION_INT, &o->sample_every, "0", 0, INT_MAX, "N",
         "generate a sample every N steps, or one of each --sample-prompts; 0: never", 0},
        {"run", "log-every", "", OPTION_INT, &o->log_every, "1", 1, INT_MAX, "N",
         "print every N-th step; metrics.jsonl has all", 0},
        {"run", "tensorboard", "", OPTION_SWITCH, &o->tensorboard, "0", 0, 0, "0|1",
         "TensorBoard's event files in the run folder too: tensorboard --logdir runs", 0},
        {"run", "early-stop", "--early-stopping-patience", OPTION_INT, &o->early_stop, "0", 0, INT_MAX, "N",
         "stop after N validations without a new best; 0: never", 0},
        {"run", "early-stop-delta", "", OPTION_FLOAT, &o->early_stop_delta, "0", 0, 1e30, "F",
         "a validation is a new best only when its loss is lower by more than this", 0},
        {"run", "max-skips", "", OPTION_INT, &o->max_skips, "10", 0, INT_MAX, "M",
         "skip at most M non-finite updates in a row, then stop", 0},
        {"run", "verify-every", "", OPTION_INT, &o->verify_every, "0", 0, INT_MAX, "K",
         "compute every K-th step twice and stop if a bit differs; 0: never", 0},
        {"out", "export-hf", "", OPTION_TEXT, &o->export_hf, "", 0, 0, "DIR",
         "write the model as a Hugging Face folder, with its tokenizer, for transformers; an earlier export there, of "
         "a model of the same model_type, is replaced",
         OPTION_WRITES | OPTION_FOLDER | OPTION_WORK},
        {"out", "export-dtype", "", OPTION_CHOICE, &o->export_dtype, "fp32", 0, 0, EXPORT_DTYPE_NAMES,
         "how --export-hf stores numbers: bf16 rounds to the nearest and takes half the disk; a model that was bf16 "
         "loses nothing by it. as-read: what has not learnt has the very bytes that --from has, fp8 and fp4 with their "
         "scales too; what has learnt is bf16, or fp32 where it was", 0},
        {"out", "shard-gb", "", OPTION_FLOAT, &o->shard_gb, "5", 1e-6, 1e6, "F",
         "largest file of --export-hf, in 10^9 bytes; a larger model becomes shards", 0},
        {"out", "ema-weights", "", OPTION_SWITCH, &o->ema_weights, "0", 0, 0, "0|1",
         "take the averaged weights of --ema: of a checkpoint (--from), and for exports when a run ends", 0},
        {"out", "generate", "", OPTION_TEXT, &o->generate, "", 0, 0, "TEXT|-",
         "continue TEXT, or standard input; no training", OPTION_WORK},
        {"sampling", "sample-prompts", "", OPTION_TEXT, &o->sample_prompts, "", 0, 0, "FILE",
         "--sample-every continues each line of this file (\\n in it is a newline); empty: begins with end of text",
         OPTION_READS},
        {"sampling", "prompt-eot", "", OPTION_SWITCH, &o->prompt_eot, "1", 0, 0, "0|1",
         "a prompt is the beginning of a document: end of text stands in front of it", 0},
        {"sampling", "max-new-tokens", "-g", OPTION_INT, &o->max_new_tokens, "256", 1, 1 << 24, "N",
         "most tokens to generate; end of text stops earlier", 0},
        {"sampling", "stop", "", OPTION_TEXT, &o->stop, "", 0, 0, "TEXT",
         "end before this text, wherever it begins; several have \\| between them: 'User:\\|\\n\\n' (\\n newline, \\t "
         "tab, \\\\ backslash)", 0},
        {"sampling", "temperature", "", OPTION_FLOAT, &o->temperature, "0.8", 0, 100, "F",
         "sampling temperature; 0: always the likeliest token", 0},
        {"sampling", "top-k", "", OPTION_INT, &o->top_k, "0", 0, INT_MAX, "N",
         "sample from the N likeliest tokens; 0: from all", 0},
        {"sampling", "top-p", "", OPTION_FLOAT, &o->top_p, "1", 0, 1, "F",
         "sample from the likeliest tokens that hold this probability", 0},
        {"sampling", "min-p", "", OPTION_FLOAT, &o->min_p, "0", 0, 1, "F",
         "sample from the tokens at least F times as likely as the likeliest; 0: from all", 0},
        {"sampling", "repetition-penalty", "", OPTION_FLOAT, &o->repetition_penalty, "1", 0.01, 100, "F",
         "above 1: tokens that the text has, prompt included, come less often (a positive logit / F, a negative one "
         "x F)", 0},
        {"sampling", "samples", "", OPTION_INT, &o->samples, "1", 1, 1 << 20, "N", "texts for --generate to write", 0},
        {"out", "eval-only", "", OPTION_SWITCH, &o->eval_only, "0", 0, 0, "0|1", "validate once and stop", OPTION_WORK},
        {"out", "probe", "", OPTION_TEXT, &o->probe, "", 0, 0, "IN",
         "safetensors with inputs and targets, I32 (B, T): one forward and backward pass, no update",
         OPTION_READS | OPTION_WORK},
        {"out", "probe-out", "", OPTION_TEXT, &o->probe_out, "probe.safetensors", 0, 0, "OUT",
         "where --probe writes logits, loss and gradients", OPTION_WRITES},
        {"machine", "threads", "", OPTION_INT, &o->threads, "0", 0, 4096, "N",
         "0: OMP_NUM_THREADS, else one per core. The result does not depend on it", 0},
        {"machine", "zero", "", OPTION_INT, &o->zero, "0", 0, 2, "0|1|2",
         "with several ranks: 1 keeps each moment on one rank only, 2 sums of gradients too. The result does not "
         "depend on it", 0},
        {"machine", "rank", "", OPTION_TEXT, &o->rank, "", 0, 0, "R/P@HOST:PORT",
         "this process is rank R of P, rank 0 listens at HOST:PORT; R/P@PATH: it says where in a file that all "
         "machines see (with a slash: ./meet); else the variables of launch, torchrun, mpirun or srun say so. "
         "LLMC_SECRET in the environment, the same on all ranks, keeps strangers out", 0},
        {"machine", "comm-timeout", "", OPTION_INT, &o->comm_timeout, "600", 1, INT_MAX, "N",
         "seconds until a rank that does not answer is given up; more than a checkpoint takes", 0},
        {"machine", "init-timeout", "", OPTION_INT, &o->init_timeout, "300", 1, INT_MAX, "N",
         "seconds within which all ranks must have been started", 0},
        {"machine", "dry-run", "", OPTION_SWITCH, &o->dry_run, "0", 0, 0, "0|1",
         "print memory, work and estimated time, then stop; status 1 if it does not fit", 0},
        {"machine", "plan", "", OPTION_INT, &o->plan, "0", 0, RANKS_MAX, "W",
         "a dry run for W ranks by this one process: memory of each, what they send, how long stages wait", 0},
        {"machine", "plan-card", "", OPTION_TEXT, &o->plan_card, "", 0, 0, "NAME",
         "with --plan, in a build for GPUs in bf16: a GPU for each rank, such as H200: does it fit, and how long does "
         "an update take?", 0},
        {"machine", "plan-rate", "", OPTION_FLOAT, &o->plan_rate, "0.4", 0.01, 1, "F",
         "with --plan-card: the share of its peak that products reach, as you have measured it", 0},
    };
    json_never_null();  // before the first JSON of the program
    return options_append(t, 0, rows, (int)(sizeof rows / sizeof rows[0]));
}

// a row more, of trainers that make several texts side by side
static inline int run_batch_option(Option* t, int n, RunOptions* o) {
    const Option row = {"sampling", "generate-batch", "", OPTION_INT, &o->generate_batch, "8", 1, 1024, "N",
                        "make so many texts side by side, of --samples or of a file of prompts, and read the weights "
                        "once for all; changes no text. Where it is not typed, fewer if memory is short", 0};
    return options_append(t, n, &row, 1);
}

// was this process started with --continue, which may come with all the options of the start?
static inline int run_continues(const Option* table, int n, const RunOptions* o) {
    return o->go_on && options_given(table, n, "continue") == 1;
}

// Parameters come from one place: what a checkpoint brought back (given 2) does not count, nor what --continue began
// with. A resumed adapter may be told where its base is now
static inline void run_check_sources(const Option* table, int n, const RunOptions* o, int is_adapter) {
    const struct {
        const char *name, *value;
    } sources[] = {{"from", o->from}, {"config", o->config}, {"model", o->model}};
    char found[64] = "";
    int n_sources = 0;
    if (o->resume && run_continues(table, n, o)) { return; }
    for (int i = 0; i < 4; i++) {
        const char* name = i < 3 ? sources[i].name : "resume";
        if (i < 3 ? !*sources[i].value || options_given(table, n, name) != 1 : !o->resume) { continue; }
        if (i == 0 && o->resume && is_adapter) { continue; }
        strcat(strcat(found, n_sources++ > 0 ? " and --" : " --"), name);
    }
    const Option* lora = options_at(table, n, "lora");
    if (n_sources == 0 && lora && **(const char**)lora->value) {
        options_fail("lora", "needs the model that it belongs to: --from DIR");
    }
    if (n_sources == 0 && *o->run && checkpoint_newest(o->run, -1) >= 0) {
        options_fail("model", "expected one of --model, --from, --config and --resume, found none: --from %s takes the "
                     "model of that run, --resume goes on with it", o->run);
    }
    if (n_sources != 1) {
        options_fail("model", "expected one of --model, --from, --config and --resume, found%s",
                     n_sources ? found : " none (to begin: --model tiny)");
    }
}

// --tokenizer, when it is not typed now: `own`, the model's tokenizer.json, or bytes where the model has none
static inline void run_choose_tokenizer(Option* table, int n, const RunOptions* o, const char* own) {
    if (options_given(table, n, "tokenizer") == 1 && *o->tokenizer) { return; }
    if (*own) { options_set(table, n, "tokenizer", own); }
    else if (!*o->tokenizer) { options_set(table, n, "tokenizer", "bytes"); }
}

// micro-batches in an update of --grad-accum or --batch-tokens; tokens that do not divide are refused with their
// neighbours. What is typed now replaces the other, which a run that goes on may have
static inline int run_leaves(Option* table, int n, const RunOptions* o, int T) {
    const int64_t micro = (int64_t)o->batch_size * T;
    if (micro > INT_MAX / 4) {
        options_fail("batch-size", "%d rows of %d positions are more than %d tokens", o->batch_size, T, INT_MAX / 4);
    }
    if (o->grad_accum > 0) {
        const int typed = options_given(table, n, "grad-accum") == 1;
        const int also = options_given(table, n, "batch-tokens") == 1;
        options_refuse(typed == also && o->batch_tokens > 0, "grad-accum",
                       "says the same as --batch-tokens: give one of them");
        options_set(table, n, also ? "grad-accum" : "batch-tokens", "0");
    }
    const int64_t below = o->batch_tokens / micro * micro;
    if (o->batch_tokens != below) {
        options_fail(
            "batch-tokens",
            "expected a multiple of batch-size %d x seq-len %d = %lld, found %d: the nearest are %lld and %lld",
            o->batch_size, T, (long long)micro, o->batch_tokens, (long long)(below ? below : micro),
            (long long)((below ? below : micro) + micro));
    }
    if (o->grad_accum > INT_MAX / o->batch_size) {
        options_fail("grad-accum", "%d micro-batches of %d rows are more than %d rows", o->grad_accum, o->batch_size,
                     INT_MAX);
    }
    return o->grad_accum > 0 ? o->grad_accum : o->batch_tokens > 0 ? (int)(o->batch_tokens / micro) : 1;
}

// steps over which the learning rate changes
static inline int run_horizon_(const RunOptions* o) { return o->lr_horizon > 0 ? o->lr_horizon : o->steps; }

// steps of --warmup. A share is one of the steps that the run has now: one that goes on may have more
static inline int run_warmup_(const RunOptions* o) { return amount_of(o->warmup, run_horizon_(o)); }

// --steps from --epochs where it is not given, and what must be below it
static inline void run_plan_steps(RunOptions* o, int64_t n_rows, int n_leaves) {
    if (o->steps == 0) {
        const double exact = shortest_double(o->epochs) * (double)n_rows / ((double)n_leaves * o->batch_size);
        const double steps = ceil(exact * (1.0 - 1e-12));  // 0.1 of 1600 rows are 160, not 160.00000000000003
        o->steps = steps < INT_MAX ? (int)steps : INT_MAX;
    }
    const int warmup = run_warmup_(o);
    if (warmup >= o->steps && o->lr_horizon == 0) {
        options_fail("warmup", "expected less than the %d steps of the run, found %d", o->steps, warmup);
    }
    if (o->lr_horizon > 0 && warmup >= o->lr_horizon) {
        options_fail("warmup", "expected less than the %d steps of --lr-horizon, found %d", o->lr_horizon, warmup);
    }
}

// learning rate of step 0, 1, ...
static inline float run_lr(const RunOptions* o, int step) {
    const int horizon = run_horizon_(o);
    return schedule_lr((Schedule)o->schedule, step < horizon ? step : horizon, horizon, run_warmup_(o), (double)o->lr,
                       (double)o->final_lr);
}

static inline Sampling run_sampling(const RunOptions* o) {
    const Sampling s = {o->repetition_penalty, o->temperature, o->top_p, o->min_p, o->top_k};
    return s;
}

// the text of --generate, from standard input for "-"; on the heap, not terminated
static inline char* run_prompt(const RunOptions* o, size_t* n_bytes) {
    char* text = string_copy(o->generate);
    *n_bytes = strlen(text);
    if (strcmp(o->generate, "-") != 0) { return text; }
    *n_bytes = 0;
    for (size_t n = 1; n > 0; *n_bytes += n) {
        text = (char*)realloc_check(text, *n_bytes + 65536, "prompt");
        n = fread(text + *n_bytes, 1, 65536, stdin);
    }
    if (ferror(stdin)) { fail_run("--generate: standard input: cannot be read: %s", strerror(errno)); }
    return text;
}

// before ranks are looked at, which may use less
static inline void run_note_grid(const Option* table, int n, RunOptions* o) {
    for (int i = 0; i < GRID_OPTIONS; i++) {
        const Option* row = options_at(table, n, grid_name(i));
        o->grid[i] = row ? *(const int*)row->value : 1;
    }
}

// of the options that this trainer has
static inline json_t* run_grid_to_json(const Option* table, int n, const RunOptions* o) {
    json_t* grid = json_object();
    for (int i = 0; i < GRID_OPTIONS; i++) {
        if (options_at(table, n, grid_name(i))) { json_object_set_new(grid, grid_name(i), json_integer(o->grid[i])); }
    }
    return grid;
}

// a row of the box at the start
static inline void box_update(const RunOptions* o, int n_leaves, int T) {
    int64_t n_tokens = (int64_t)n_leaves * o->batch_size * T;
    box_row("update", "%lld tokens = %d x %d x %d", (long long)n_tokens, n_leaves, o->batch_size, T);
}
#endif  // LLMC_RUN_OPTIONS_H
