/*
What every trainer's run has in common (spec/cli.md): the options, the state a checkpoint brings back, and the run
folder.
    run_options        the common rows of the options table; a trainer adds rows of its own
    RunState           counters and generators: with parameters and moments, all that training goes on from
    run_find_checkpoint, run_restore   the newest good checkpoint of --run; options and state of it
    run_open           makes the folder of the run, settings.json and the log
    run_save_begin/end a checkpoint: between them save.h writes its files into the temporary folder
    stop_on_signals    SIGTERM, SIGINT, SIGUSR1 and SIGHUP end a run after the step, with a checkpoint
    run_lr             the learning rate of a step: --lr, --schedule, --warmup, --final-lr, --lr-horizon
    run_summary        summary.json: how a run ended
    settings.json      command lines, options, build, data with checksums: enough to make the same run again
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H
#include "../files/checkpoint.h"  // json_read, manifest_write, checkpoint_newest_good, checkpoint_publish
#include "../text/dataloader.h"   // DataLoader, tokens_checksum
#include "../core/device.h"       // Device
#include "../core/options.h"      // Option, options_to_json
#include "../core/tensor.h"       // Tensor
#include "../core/vec.h"          // VLANES
#include "../ops/sampler.h"       // Sampling
#include "log.h"                  // Log, log_open
#include "noise_scale.h"          // NoiseScale
#include "outliers.h"             // OutlierWindow
#include "peak.h"                 // processor_name
#include "schedule.h"             // schedule_lr, SCHEDULE_NAMES

// ---- options ----

typedef struct {
    const char *from, *config, *model;                                                    // model
    int seed;
    const char *train, *val, *tokenizer, *hellaswag;                                      // data
    int batch_size, seq_len, batch_tokens, grad_accum, shuffle, overfit, doc_reset, eval_examples;
    float val_fraction;
    const char* freeze;                                                                   // optimizer
    int schedule, steps, lr_horizon;                                                      // schedule: a Schedule
    Amount warmup;                                                                        // of the steps
    float epochs, lr, final_lr, weight_decay, beta1, beta2, eps, clip, skip_loss_z, skip_norm_z;
    int noise_scale, ema_weights;
    float ema;
    const char* run;                                                                      // run
    int resume, go_on, save_every, async_save, keep, keep_every, eval_every, eval_batches, sample_every, log_every,
        early_stop,
        tensorboard, max_skips, verify_every;
    float save_minutes, early_stop_delta;
    const char *export_hf, *generate, *probe, *probe_out;                                 // out
    int eval_only;
    float shard_gb;
    const char *sample_prompts, *stop;                                                    // sampling
    int max_new_tokens, top_k, samples, prompt_eot;
    float temperature, top_p, min_p, repetition_penalty;
    const char* rank;                                                                     // machine
    int threads, dry_run, zero, comm_timeout, init_timeout;
} RunOptions;

// fills the table with the common rows; `presets` is what --model can name. Returns the number of rows.
static inline int run_options(Option* t, RunOptions* o, const char* presets) {
    const Option rows[] = {
        // group, name, other spellings (llm.c's and rust_trainer's), type, where, default, range, what it takes,
        // meaning
        {"model", "from", "-e --base-ckpt --init-hf", OPTION_TEXT, &o->from, "", 0, 0, "PATH",
         "parameters to start from: a run folder or checkpoint, a Hugging Face folder, a .safetensors file with "
         "config.json beside it, or llm.c's .bin, told apart by content", 0},
        {"model", "config", "", OPTION_TEXT, &o->config, "", 0, 0, "FILE",
         "random start from Hugging Face's config.json", 0},
        {"model", "model", "", OPTION_TEXT, &o->model, "", 0, 0, "NAME", presets, 0},
        {"model", "seed", "", OPTION_INT, &o->seed, "42", 0, INT_MAX, "N",
         "random seed: start values, order of the data, samples", 0},
        {"data", "train", "-i", OPTION_TEXT, &o->train, "", 0, 0, "PATH,...",
         "token shards (a pattern), a text file, JSON Lines or a folder of text; several: books.txt,code/, or with the "
         "share of each in the rows: books.txt:3,code/:1", 0},
        {"data", "val", "-j", OPTION_TEXT, &o->val, "", 0, 0, "PATH,...", "the same for validation, without shares", 0},
        {"data", "val-fraction", "--val-ratio", OPTION_FLOAT, &o->val_fraction, "0", 0, 0.9, "F",
         "without --val: keep this last part of --train for validation", 0},
        {"data", "tokenizer", "", OPTION_TEXT, &o->tokenizer, "", 0, 0, "bytes|PATH",
         "bytes, a tokenizer.json or its folder, or llm.c's gpt2_tokenizer.bin to show tokens as text; empty: the "
         "model's own, else bytes", 0},
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
         "answer these examples (dev/data/hellaswag.py, mmlu.py) with each validation", 0},
        {"data", "eval-examples", "", OPTION_INT, &o->eval_examples, "0", 0, INT_MAX, "N",
         "answer only the first N of them; 0: all", 0},
        {"optimizer", "steps", "-x", OPTION_INT, &o->steps, "0", 0, INT_MAX, "N",
         "updates; 0: as many as --epochs need", 0},
        {"optimizer", "epochs", "", OPTION_FLOAT, &o->epochs, "1", 1e-6, 1e6, "F",
         "passes over the training data, when --steps is 0", 0},
        {"optimizer", "lr", "-l", OPTION_FLOAT, &o->lr, "3e-4", 0, 10, "F", "peak learning rate", 0},
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
         "write the model as a Hugging Face folder, with its tokenizer, for transformers", 0},
        {"out", "shard-gb", "", OPTION_FLOAT, &o->shard_gb, "5", 1e-6, 1e6, "F",
         "largest file of --export-hf, in 10^9 bytes; a larger model becomes shards", 0},
        {"out", "ema-weights", "", OPTION_SWITCH, &o->ema_weights, "0", 0, 0, "0|1",
         "take the averaged weights of --ema: of a checkpoint (--from), and for exports when a run ends", 0},
        {"out", "generate", "", OPTION_TEXT, &o->generate, "", 0, 0, "TEXT|-",
         "continue TEXT, or standard input; no training", 0},
        {"sampling", "sample-prompts", "", OPTION_TEXT, &o->sample_prompts, "", 0, 0, "FILE",
         "--sample-every continues each line of this file (\\n in it is a newline); empty: begins with end of text", 0},
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
        {"out", "eval-only", "", OPTION_SWITCH, &o->eval_only, "0", 0, 0, "0|1", "validate once and stop", 0},
        {"out", "probe", "", OPTION_TEXT, &o->probe, "", 0, 0, "IN",
         "safetensors with inputs and targets, I32 (B, T): one forward and backward pass, no update", 0},
        {"out", "probe-out", "", OPTION_TEXT, &o->probe_out, "probe.safetensors", 0, 0, "OUT",
         "where --probe writes logits, loss and gradients", 0},
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
    };
    json_never_null();  // before the first JSON of the program
    return options_append(t, 0, rows, (int)(sizeof rows / sizeof rows[0]));
}

// was this process started with --continue, which may come with all the options of the start?
static inline int run_continues(const Option* table, int n, const RunOptions* o) {
    return o->go_on && options_given(table, n, "continue") == 1;
}

// parameters come from one place: what a checkpoint brought back (given 2) does not count, nor what --continue began
// with
static inline void run_check_sources(const Option* table, int n, const RunOptions* o) {
    const struct {
        const char *name, *value;
    } sources[] = {{"from", o->from}, {"config", o->config}, {"model", o->model}};
    char found[64] = "";
    int n_sources = 0;
    if (o->resume && run_continues(table, n, o)) { return; }
    for (int i = 0; i < 4; i++) {
        const char* name = i < 3 ? sources[i].name : "resume";
        if (i < 3 ? !*sources[i].value || options_given(table, n, name) != 1 : !o->resume) { continue; }
        strcat(strcat(found, n_sources++ > 0 ? " and --" : " --"), name);
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
        double steps = ceil((double)o->epochs * (double)n_rows / ((double)n_leaves * o->batch_size));
        o->steps = steps < INT_MAX ? (int)steps : INT_MAX;
    }
    const int warmup = run_warmup_(o);
    if (warmup >= o->steps) {
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

// ---- state ----

typedef struct {
    int step;                // steps done
    int updates;             // of them not skipped: AdamW's t
    int skips;               // not finite, in a row
    int64_t rows, tokens;    // read so far
    uint64_t sampler;        // generator of the samples
    float best_val;          // lowest validation loss, INFINITY before the first
    int best_step, evals_since_best;
    int interrupted;         // saved at a signal: this step's validation and sample are still to come
    int64_t n_sample_bytes;  // of samples.txt that a resumed run keeps; counted when a checkpoint is saved
    OutlierWindow losses, norms;
    NoiseScale noise;
    int averaged;            // updates that the average of --ema has taken in
} RunState;

// the row with which the next update begins
static inline int64_t run_first_row(const RunOptions* o, const RunState* s) { return o->overfit ? 0 : s->rows; }

static inline json_t* run_state_to_json(const RunState* s) {
    json_t* json = json_pack(
        "{s:i, s:i, s:i, s:I, s:I, s:I, s:o, s:i, s:i, s:i, s:I, s:o, s:o}", "step", s->step, "updates", s->updates,
        "skips", s->skips, "rows", (json_int_t)s->rows, "tokens", (json_int_t)s->tokens, "sampler",
        (json_int_t)s->sampler, "best_val", isfinite(s->best_val) ? json_real((double)s->best_val) : json_null(),
        "best_step", s->best_step, "evals_since_best", s->evals_since_best, "interrupted", s->interrupted,
        "samples_bytes", (json_int_t)s->n_sample_bytes, "losses", outliers_to_json(&s->losses), "norms",
        outliers_to_json(&s->norms));
    json_object_set_new(json, "noise", json_pack("[f, f]", (double)s->noise.gradient, (double)s->noise.noise));
    json_object_set_new(json, "averaged", json_integer(s->averaged));
    return json;
}

static inline RunState run_state_from_json(const json_t* json, const char* path) {
    const json_t* best = json_object_get(json, "best_val");
    const int64_t most = (int64_t)1 << 56;  // no run is so long; a few more can be added
    RunState s;
    s.step = (int)json_need_int(json, path, "step", 0, INT_MAX);
    s.updates = (int)json_need_int(json, path, "updates", 0, s.step);
    s.skips = (int)json_need_int(json, path, "skips", 0, s.step);
    s.rows = json_need_int(json, path, "rows", 0, most);
    s.tokens = json_need_int(json, path, "tokens", 0, most);
    s.sampler = (uint64_t)json_need_int(json, path, "sampler", INT64_MIN, INT64_MAX);
    s.best_val = json_is_number(best) ? (float)json_number_value(best) : INFINITY;
    s.best_step = (int)json_need_int(json, path, "best_step", 0, s.step);
    s.evals_since_best = (int)json_need_int(json, path, "evals_since_best", 0, INT_MAX);
    s.interrupted = (int)json_need_int(json, path, "interrupted", 0, 1);
    s.n_sample_bytes = json_need_int(json, path, "samples_bytes", 0, INT64_MAX);
    if (!outliers_from_json(&s.losses, json_object_get(json, "losses")) ||
        !outliers_from_json(&s.norms, json_object_get(json, "norms"))) {
        fail_input("%s: \"losses\" and \"norms\": expected lists of at most %d numbers", path, OUTLIER_WINDOW);
    }
    s.noise = noise_scale_from_json(json_object_get(json, "noise"), path);
    const int is_older = json_object_get(json, "averaged") == NULL;  // from before there was --ema
    s.averaged = is_older ? 0 : (int)json_need_int(json, path, "averaged", 0, s.updates);
    return s;
}

// a new run: nothing done yet
static inline RunState run_state_start(int seed) {
    RunState s;
    memset(&s, 0, sizeof s);
    s.sampler = 1337 + (uint64_t)seed;
    s.best_val = INFINITY;
    return s;
}

// Is the update of this step to be left out? Also records what the next steps are judged by.
static inline int run_state_skips(RunState* s, const RunOptions* o, float loss, float norm) {
    int finite = isfinite(loss) && isfinite(norm);
    // both are recorded
    int outlier = is_outlier(&s->losses, loss, o->skip_loss_z) | is_outlier(&s->norms, norm, o->skip_norm_z);
    s->skips = finite ? 0 : s->skips + 1;
    return !finite || outlier;
}

// a validation's loss: is it the best so far?
static inline int run_state_validated(RunState* s, const RunOptions* o, float loss) {
    int best = loss < s->best_val - o->early_stop_delta;
    s->evals_since_best = best ? 0 : s->evals_since_best + 1;
    if (best) {
        s->best_val = loss;
        s->best_step = s->step;
    }
    return best;
}

// Is there one to go on from? Asked for --continue, by the only writer: another may just be saving the first
static inline int run_has_checkpoint(const RunOptions* o) {
    if (!*o->run) { options_fail("continue", "needs the --run to begin or to go on with"); }
    if (!path_exists(o->run)) { return 0; }
    run_lock(o->run);
    checkpoint_clean(o->run);
    return checkpoint_newest(o->run, -1) >= 0;
}

// The newest good checkpoint of --run. From here on this process is the only one that writes to the run.
static inline int run_find_checkpoint(const RunOptions* o) {
    if (!*o->run) { options_fail("resume", "needs the --run to go on with"); }
    if (checkpoint_newest(o->run, -1) < 0) {
        options_fail(
            "resume",
            "%s holds no complete checkpoint: name the folder of the run itself, or begin one without --resume",
            o->run);
    }
    run_lock(o->run);
    checkpoint_clean(o->run);
    int step = checkpoint_newest_good(o->run);
    if (step < 0) { options_fail("resume", "%s: none of its checkpoints is whole", o->run); }
    return step;
}

// does the option name something that a run reads?
static inline int run_is_input(const Option* row) {
    const char *written[] = {"export-bin", "probe-out", "embeddings-out", "export-hf", "run"};
    const char* takes[] = {"PATH", "PATH,...", "FILE", "DIR", "IN", "WHERE", "bytes|PATH"};
    int is_path = 0, is_written = 0;
    for (size_t i = 0; i < sizeof takes / sizeof *takes; i++) { is_path |= strcmp(row->takes, takes[i]) == 0; }
    for (size_t i = 0; i < sizeof written / sizeof *written; i++) { is_written |= strcmp(row->name, written[i]) == 0; }
    return row->type == OPTION_TEXT && is_path && !is_written;
}

// the folder in which the process was started; null where its name is no UTF-8
static inline json_t* run_folder_json_(void) {
    char here[PATH_BYTES];
    json_t* folder = json_string(getcwd(here, sizeof here) ? here : "");
    return folder ? folder : json_null();
}

// Paths that a checkpoint has brought back were meant from the folder in which its run was started. From another one they
// are looked for there first, so that going on does not depend on where one stands
static inline void run_restore_paths_(Option* table, int n, const char* folder) {
    char here[PATH_BYTES];
    if (!folder || !*folder || !getcwd(here, sizeof here) || strcmp(here, folder) == 0) { return; }
    for (int i = 0; i < n; i++) {
        const Option* row = &table[i];
        if (row->given != 2 || !run_is_input(row)) { continue; }
        const int is_list = strcmp(row->name, "train") == 0 || strcmp(row->name, "val") == 0;
        char* path = (is_list ? path_list_from : path_from)(folder, *(const char**)row->value);
        options_set(table, n, row->name, path);
        free(path);
    }
}

// state and options of that checkpoint; options typed now win
static inline RunState run_restore(Option* table, int n, const RunOptions* o, int step) {
    char folder[PATH_BYTES], path[PATH_BYTES];
    json_t* manifest = json_read(path_join(path, checkpoint_folder(folder, o->run, step), "manifest.json"));
    options_from_json(table, n, json_object_get(manifest, "options"));
    run_restore_paths_(table, n, json_string_value(json_object_get(manifest, "folder")));
    if (options_given(table, n, "epochs") == 1 && options_given(table, n, "steps") != 1) {
        options_set(table, n, "steps", "0");
    }
    RunState s = run_state_from_json(json_object_get(manifest, "state"), path);
    json_decref(manifest);
    return s;
}

// ---- checkpoints ----

// bytes of a checkpoint: parameters, their average where one is kept and, of what learns, both moments; about 300 for
// each tensor's entry, and the rest. frozen: of every slice in table order, NULL: none
static inline double run_checkpoint_bytes(const Tensor* table, int n, const int* frozen, int has_average) {
    double n_bytes = 8192.0;
    for (int i = 0, slice = 0; i < n; i++) {
        const double each = 300.0 + 4.0 * (double)tensor_disk_elements(&table[i]);
        for (int k = 0; k < tensor_slices(&table[i]); k++, slice++) {
            n_bytes += ((slice_is_frozen(frozen, slice) ? 1.0 : 3.0) + (has_average ? 1.0 : 0.0)) * each;
        }
    }
    return n_bytes;
}

// the temporary folder into which save.h writes config.json, model.safetensors and optimizer.safetensors
static inline const char* run_save_begin(char temporary[PATH_BYTES], const RunOptions* o, const RunState* s,
                                         double n_bytes) {
    run_check_lock(o->run);
    checkpoint_begin(temporary, o->run, s->step, n_bytes);
    return temporary;
}

// bytes of samples.txt, which belong to the state that is saved
static inline int64_t run_sample_bytes(const RunOptions* o) {
    char path[PATH_BYTES];
    struct stat status;
    return stat(path_join(path, o->run, "samples.txt"), &status) == 0 ? (int64_t)status.st_size : 0;
}

// samples.txt and metrics.jsonl belong to a checkpoint as far as they are written
static inline void run_sync_records_(const RunOptions* o) {
    const char* names[2] = {"metrics.jsonl", "samples.txt"};
    for (int i = 0; i < 2; i++) {
        char path[PATH_BYTES];
        if (path_exists(path_join(path, o->run, names[i]))) { path_sync(path); }
    }
}

// Of the checkpoints up to this step stay the newest --keep, the best one and each --keep-every-th. Later ones are
// damaged, or this run would have gone on from them: they give way when a checkpoint of their step is saved.
static inline void run_prune_(const RunOptions* o, const RunState* s) {
    char folder[PATH_BYTES];
    int kept = 1;  // this one
    if (s->skips > 0) { return; }  // what was saved before the updates that were not finite may be needed
    for (int step = checkpoint_newest(o->run, s->step); step >= 0; step = checkpoint_newest(o->run, step)) {
        int forever = step == s->best_step || (o->keep_every > 0 && step % o->keep_every == 0);
        if (kept++ >= o->keep && !forever) { checkpoint_remove(checkpoint_folder(folder, o->run, step)); }
    }
}

// the manifest, the final name, and room
static inline void run_save_end(const char* temporary, const SavedFiles* files, const Option* table, int n,
                                const RunOptions* o, const RunState* s) {
    char folder[PATH_BYTES], path[PATH_BYTES];
    run_sync_records_(o);
    manifest_write(path_join(path, temporary, "manifest.json"),
                   json_pack("{s:o, s:o, s:o}", "state", run_state_to_json(s), "options", options_to_json(table, n),
                             "folder", run_folder_json_()), files);
    checkpoint_publish(temporary, checkpoint_folder(folder, o->run, s->step));
    run_prune_(o, s);
}

// ---- the folder of the run ----

// clang's __VERSION__ begins with its name
#if defined(__clang__) || defined(__CUDACC__)
#define COMPILER __VERSION__
#else
#define COMPILER "gcc " __VERSION__
#endif

static inline const char* build_name(void) {
#if defined(SYSTEM_LIBM)
    return "parity build: the C library's functions, llm.c's order, no fused multiply-add";
#elif defined(__CUDACC__) && !defined(EXACT)
    return "fast build: the same bits only on one kind of GPU";
#else
    return MADD_IS_FAST ? "exact build: the same bits on any machine and number of threads"
                        : "exact build, slow: for a CPU without fused multiply-add (ARCH=native has this one's)";
#endif
}

static inline json_t* checksum_to_json_(uint64_t xxh3) {
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)xxh3);
    return json_string(text);
}

// of several sources each, and how many of its rows an epoch has
static inline json_t* sources_to_json_(const DataLoader* rows) {
    const TokenData* d = rows->data;
    json_t* sources = json_array();
    for (int s = 0; s < d->n_sources; s++) {
        const TokenSource* source = &d->sources[s];
        const RowSource* of = &rows->sources[s];
        json_array_append_new(
            sources, json_pack("{s:s, s:o, s:I, s:I, s:I, s:I, s:o}", "path", source->path, "weight",
                               rows->is_weighted ? json_real(source->weight) : json_null(), "tokens",
                               (json_int_t)source->n_tokens, "documents", (json_int_t)source->n_documents, "rows",
                               (json_int_t)of->n_rows, "rows_per_epoch",
                               (json_int_t)(rows->is_weighted ? of->n_places : of->n_rows), "xxh3",
                               checksum_to_json_(tokens_checksum_source(d, source))));
    }
    return sources;
}

// rows of data that is not there are all zero
static inline json_t* data_to_json_(const DataLoader* rows) {
    const TokenData* d = rows->data;
    if (!d) { return json_null(); }
    json_t* json = json_pack("{s:s, s:I, s:I, s:o}", "path", d->path, "tokens", (json_int_t)d->n_tokens, "documents",
                             (json_int_t)d->n_documents, "xxh3", checksum_to_json_(tokens_checksum(d)));
    if (d->n_sources > 1 || rows->is_weighted) { json_object_set_new(json, "sources", sources_to_json_(rows)); }
    return json;
}

// the first source that is another one than before; NULL: all are the same, or there were fewer or more of them
static inline const char* data_changed_source_(const json_t* before, const json_t* now, const char* key) {
    const json_t *old = json_object_get(before, "sources"), *current = json_object_get(now, "sources");
    const size_t n = json_array_size(old) == json_array_size(current) ? json_array_size(old) : 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *a = json_array_get(old, i), *b = json_array_get(current, i);
        if (!json_equal(json_object_get(a, key), json_object_get(b, key))) {
            return json_string_value(json_object_get(b, "path"));
        }
    }
    return NULL;
}

// Going on with other data would be another run under the old name: the order of the rows depends on their number.
// Data that --train names anew is what the user wants, but for --continue, which comes with all options of the start.
static inline void run_check_data_(const char* settings_path, const Option* table, int n, const RunOptions* o,
                                   const json_t* train) {
    for (int i = 0; i < n; i++) {
        // token-file, token-dir
        const int names_data = strcmp(table[i].name, "train") == 0 || strncmp(table[i].name, "token-", 6) == 0;
        if (names_data && table[i].given == 1 && !run_continues(table, n, o)) { return; }
    }
    if (!path_exists(settings_path)) { return; }
    json_t* settings = json_read(settings_path);
    const json_t *before = json_object_get(settings, "train"), *sum = json_object_get(before, "xxh3");
    if (sum && !json_equal(sum, json_object_get(train, "xxh3"))) {
        const char* source = data_changed_source_(before, train, "xxh3");
        fail_input("%s: the training data has changed since the run began: give the old data back, or name the new "
                   "with --train",
                   source ? source : json_string_value(json_object_get(train, "path")));
    }
    const char* source = data_changed_source_(before, train, "weight");
    if (source) {
        fail_input("%s: its weight has changed since the run began: give the old one, or --resume with the new --train",
                   source);
    }
    json_decref(settings);
}

// the same of the prompts of --sample-prompts: samples of others would not be those of this run
static inline void run_check_prompts_(const char* settings_path, const Option* table, int n, const RunOptions* o,
                                      const json_t* prompts) {
    const int are_new = options_given(table, n, "sample-prompts") == 1 && !run_continues(table, n, o);
    if (are_new || !json_is_object(prompts) || !path_exists(settings_path)) { return; }
    json_t* settings = json_read(settings_path);
    const json_t* before = json_object_get(json_object_get(settings, "sample_prompts"), "xxh3");
    if (before && !json_equal(before, json_object_get(prompts, "xxh3"))) {
        fail_input("%s: the prompts have changed since the run began: give the old file back, or name the new with "
                   "--sample-prompts", o->sample_prompts);
    }
    json_decref(settings);
}

// samples after the checkpoint come again
static inline void run_cut_samples_(const RunOptions* o, const RunState* s) {
    char path[PATH_BYTES];
    struct stat status;
    if (lstat(path_join(path, o->run, "samples.txt"), &status) != 0) { return; }
    const int fd = file_append(path);
    const int cut = status.st_size <= s->n_sample_bytes || ftruncate(fd, s->n_sample_bytes) == 0;
    if (!cut) { fail_run("%s: cannot be cut: %s", path, strerror(errno)); }
    close(fd);
}

// a new run stands beside no other's checkpoints
static inline void run_check_unused(const RunOptions* o) {
    struct stat status;
    if (stat(o->run, &status) == 0 && !S_ISDIR(status.st_mode)) {
        options_fail("run", "%s: expected a folder, or a name for a new one; found a file", o->run);
    }
    if (o->resume || checkpoint_newest(o->run, -1) < 0) { return; }
    fail_input("%s: there are checkpoints in this folder: choose another --run, or go on with them by --resume",
               o->run);
}

enum { N_RUN_FILES = 4 };

// the files that a run writes beside checkpoints
static inline const char* const* run_file_names(void) {
    static const char* const names[N_RUN_FILES] = {"metrics.jsonl", "samples.txt", "settings.json", "summary.json"};
    return names;
}

// metrics.jsonl as metrics.old-2.jsonl
static inline const char* run_old_name_(char path[PATH_BYTES], const RunOptions* o, const char* name, int number) {
    char aside[64];
    const char* dot = strchr(name, '.');
    snprintf(aside, sizeof aside, "%.*s.old-%d%s", (int)(dot - name), name, number, dot);
    return path_join(path, o->run, aside);
}

// What an earlier start has left that ended before its first checkpoint, or somebody else under these names: the run
// begins anew, its records are set aside
static inline void run_set_aside_(const RunOptions* o) {
    const char* const* names = run_file_names();
    char path[PATH_BYTES], aside[PATH_BYTES], moved[128] = "";
    int number = 1;
    for (int i = 0; i < N_RUN_FILES; i++) {
        while (path_exists(run_old_name_(aside, o, names[i], number))) { number++; }
    }
    for (int i = 0; i < N_RUN_FILES; i++) {
        if (!path_exists(path_join(path, o->run, names[i]))) { continue; }
        run_old_name_(aside, o, names[i], number);
        if (rename(path, aside) != 0) { fail_run("%s: cannot be renamed to %s: %s", path, aside, strerror(errno)); }
        const size_t used = strlen(moved);
        snprintf(moved + used, sizeof moved - used, "%s%s", used > 0 ? ", " : "", names[i]);
    }
    if (*moved) {
        printf("%s: holds no checkpoint, so the run begins anew: %s of before have .old-%d in their names now\n",
               o->run, moved, number);
    }
}

// runs/<trainer>-<date-time> for a run without a name, with -2, -3, ... where others began in the same second
static inline void run_name_(Option* table, int n) {
    char name[128];
    const time_t now = time(NULL);
    int used = snprintf(name, sizeof name, "runs/%.60s-", program_invocation_short_name);
    used += (int)strftime(name + used, sizeof name - (size_t)used, "%Y%m%d-%H%M%S", localtime(&now));
    make_folder("runs");
    for (int k = 2; mkdir(name, 0777) != 0; k++) {
        if (errno != EEXIST) { fail_run("%s: this folder cannot be made: %s", name, strerror(errno)); }
        snprintf(name + used, sizeof name - (size_t)used, "-%d", k);
    }
    options_set(table, n, "run", name);
}

static inline json_t* run_command_(int argc, char** argv) {
    json_t* command = json_array();
    for (int i = 0; i < argc; i++) { json_array_append_new(command, json_string(argv[i])); }
    return command;
}

// settings.json of the starts before this one, or NULL
static inline json_t* run_old_settings_(const char* path, int resumes) {
    return resumes && path_exists(path) ? json_read(path) : NULL;
}

// "command" is the one that began the run; "starts" has them all, each with the step after which it went on
static inline void run_add_starts_(json_t* settings, json_t* before, const RunState* s, int argc, char** argv) {
    json_t *starts = json_incref(json_object_get(before, "starts")), *command = run_command_(argc, argv);
    if (!json_is_array(starts)) { starts = json_array(); }
    json_t* first = json_object_get(before, "command");
    json_object_set(settings, "command", json_is_array(first) ? first : command);
    json_array_append_new(
        starts, json_pack("{s:o, s:i, s:o, s:s, s:I}", "command", command, "after_step", s->step, "folder",
                          run_folder_json_(), "commit", COMMIT, "time",
                          (json_int_t)seconds_now(CLOCK_REALTIME)));
    json_object_set_new(settings, "starts", starts);
    json_decref(before);
}

static inline void run_open(Log* log, Option* table, int n, const RunOptions* o, const RunState* s, const Device* dev,
                            int n_ranks, const DataLoader* train, const DataLoader* val, json_t* prompts, int argc,
                            char** argv) {
    const int resume_step = o->resume ? s->step : -1;
    char path[PATH_BYTES];
    if (!*o->run) { run_name_(table, n); }
    run_check_unused(o);
    json_t* train_json = data_to_json_(train);
    make_folder(o->run);
    if (resume_step < 0) {
        run_lock(o->run);
        checkpoint_clean(o->run);
        run_check_unused(o);  // again: by now nobody else writes
        run_set_aside_(o);
    } else {
        path_join(path, o->run, "settings.json");
        run_check_data_(path, table, n, o, train_json);
        run_check_prompts_(path, table, n, o, prompts);
        run_cut_samples_(o, s);
    }
    log_open(log, o->run, resume_step, !s->interrupted);
    path_join(path, o->run, "settings.json");
    json_t* settings = json_pack("{s:s, s:n, s:o, s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:o, s:o, s:o}", "trainer",
                                 program_invocation_short_name, "command", "options", options_to_json(table, n),
                                 "build", build_name(), "compiler", COMPILER, "flags", FLAGS, "commit", COMMIT, "cpu",
                                 processor_name().s, "lanes", VLANES, "threads", dev->n_threads, "ranks", n_ranks,
                                 "train", train_json, "val", data_to_json_(val), "sample_prompts", prompts);
    run_add_starts_(settings, run_old_settings_(path, resume_step >= 0), s, argc, argv);
    json_replace(path, settings);
}

// a sample made while training, to the terminal and to samples.txt; which: "" or ", prompt 1 of 2: ..."
static inline void run_show_sample(const RunOptions* o, int step, const char* which, const char* text) {
    char path[PATH_BYTES];
    FILE* file = fdopen(file_append(path_join(path, o->run, "samples.txt")), "a");
    if (!file) { fail_run("%s: %s", path, strerror(errno)); }
    printf("--- sample after step %d%s\n%s---\n", step, which, text);
    fprintf(file, "--- sample after step %d%s\n%s---\n", step, which, text);
    if (fclose(file) != 0) { fail_run("%s: %s", path, strerror(errno)); }
}

// the checkpoint of that step, if there is one, or null
static inline json_t* run_checkpoint_json_(const RunOptions* o, int step) {
    char folder[PATH_BYTES], manifest[PATH_BYTES];
    const int exists =
        step >= 0 && path_exists(path_join(manifest, checkpoint_folder(folder, o->run, step), "manifest.json"));
    return exists ? json_string(folder) : json_null();
}

// the newest checkpoint up to `last` that is whole and whose last update was finite, -1 when there is none
static inline int run_newest_finite(const RunOptions* o, int last) {
    int step = checkpoint_newest(o->run, last + 1);
    for (; step >= 0; step = checkpoint_newest(o->run, step)) {
        char path[PATH_BYTES];
        ErrorText error;
        if (!checkpoint_verify(checkpoint_folder(path, o->run, step), &error)) { continue; }
        json_t* manifest = json_read(checkpoint_path(path, o->run, step, "manifest.json"));
        const int finite = json_integer_value(json_object_get(json_object_get(manifest, "state"), "skips")) == 0;
        json_decref(manifest);
        if (finite) { break; }
    }
    return step;
}

// summary.json at the end of a run, for programs that start many. best: of the validations, null without one; its
// checkpoint may be missing, where none was saved at that step. extra: the trainer's own keys, or NULL; takes the
// reference
static inline void run_summary(const RunOptions* o, const RunState* s, int stopped_early, json_t* extra) {
    char path[PATH_BYTES], metrics[PATH_BYTES];
    const int best_step = isfinite(s->best_val) ? s->best_step : -1;
    json_t* summary =
        json_pack("{s:i, s:b, s:o, s:o, s:i, s:I, s:o, s:o, s:s}", "final_step", s->step, "stopped_early",
                  stopped_early, "best_val_loss", json_finite((double)s->best_val), "best_step",
                  best_step >= 0 ? json_integer(best_step) : json_null(), "updates", s->updates, "tokens",
                  (json_int_t)s->tokens, "checkpoint", run_checkpoint_json_(o, s->step), "best_checkpoint",
                  run_checkpoint_json_(o, best_step), "metrics", path_join(metrics, o->run, "metrics.jsonl"));
    if (extra) { json_object_update(summary, extra); }
    json_decref(extra);
    json_replace(path_join(path, o->run, "summary.json"), summary);
}

// rows of the box at the start
static inline void box_update(const RunOptions* o, int n_leaves, int T) {
    int64_t n_tokens = (int64_t)n_leaves * o->batch_size * T;
    box_row("update", "%lld tokens = %d x %d x %d", (long long)n_tokens, n_leaves, o->batch_size, T);
}

// what the checkpoints of the run will take; a disk that is too small for them is no error yet, but said
static inline void box_checkpoints(const RunOptions* o, const RunState* s, double n_bytes) {
    double n_free = disk_free(*o->run ? o->run : ".");
    if (o->resume) { box_row("resumed", "after step %d", s->step); }
    const double n_left = o->steps > 0 ? fmax(0.0, (double)o->steps - s->step) : 1.0;  // 0: a dry run without data
    double n_saved = o->save_every > 0 ? ceil(n_left / o->save_every) : fmin(1.0, n_left);
    if (o->save_minutes > 0.0f) { n_saved = n_left; }
    const int saves_often = o->save_every > 0 || o->save_minutes > 0.0f;
    double n_forever = o->keep_every > 0 && saves_often ? floor(n_left / o->keep_every) : 0.0;
    double n_kept = fmin(n_saved, o->keep + 2.0 + n_forever);  // the newest, the best, and the one that is being
                                                               // written
    if (n_free < 0.0) { return; }
    box_row("checkpoints", "%.0f at most, of %s; %s free", n_kept, format_bytes(n_bytes).s, format_bytes(n_free).s);
    if (n_kept * n_bytes > n_free) {
        warn_line("the run keeps up to %.0f checkpoint%s of %s, the disk has %s free", n_kept, n_kept > 1.0 ? "s" : "",
                  format_bytes(n_bytes).s, format_bytes(n_free).s);
    }
}

// ---- stopping ----

// the signal, of SIGTERM, SIGINT, SIGUSR1 and SIGHUP: the step is finished, a checkpoint saved; a second one, SIGHUP
// excepted, ends the process at once
static inline volatile sig_atomic_t* stop_flag(void) {
    static volatile sig_atomic_t requested;  // state of the process, as its signal handlers are
    return &requested;
}

static inline void stop_handler_(int signal_number) {
    *stop_flag() = signal_number;
    signal(SIGTERM, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    signal(SIGUSR1, SIG_DFL);
    signal(SIGHUP, SIG_IGN);  // of a terminal that is gone come several
}

static inline void stop_on_signals(void) {
    signal(SIGTERM, stop_handler_);
    signal(SIGINT, stop_handler_);
    signal(SIGUSR1, stop_handler_);  // Slurm's warning before the time is up
    if (signal(SIGHUP, stop_handler_) == SIG_IGN) { signal(SIGHUP, SIG_IGN); }  // nohup's wish
}
#endif  // LLMC_RUN_H
