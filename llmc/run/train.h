/*
Training: train() is the loop over steps, train_step() one step. A step is the leaves of this rank forward and
backward, the sum of all ranks' gradients along one tree, its norm, and AdamW; a trainer that steps in another way
gives Trainer.step, which may be made of the same pieces.
*/
#ifndef LLMC_TRAIN_H
#define LLMC_TRAIN_H
#include "../ops/entry_windows.h"  // entries_counted
#include "../ops/mtp_tokens.h"  // mtp_counted
#include "folder.h"   // run_summary
#include "pipeline.h" // pp_leaves
#include "save.h"     // save_checkpoint
#include "signals.h"  // stop_on_signals
#include "slow_ranks.h"  // slow_ranks_step
#include "tasks.h"    // task_evaluate
#include "trainer.h"  // Run, Step

// the first row of micro-batch number k of this rank, counted on from the start of this process
static inline int64_t train_row(void* run, int64_t k) {
    const Run* r = (const Run*)run;
    const int own = model_batches(r->model);
    const int64_t update = r->o.overfit ? 0 : k / own;
    return r->first_row + (update * r->n_leaves + model_batch(r->model, (int)(k % own))) * r->o.batch_size;
}

// the number of micro-batch k of the update that goes on
static inline int64_t train_batch_number(const Run* r, int k) {
    return (int64_t)(r->state.step - r->first_step) * model_batches(r->model) + k;
}

// targets that count in the whole update, on all ranks; of sparse examples there may be none
static inline int64_t train_counted(const Run* r) {
    const int64_t n_rows = (int64_t)r->n_leaves * r->o.batch_size;
    const int64_t n = dataloader_counted(&r->data.train_rows, run_first_row(&r->o, &r->state), n_rows);
    return n > 0 ? n : 1;
}

// of all rows of the update the sum of what one counts, given where documents begin; `whole` in a row without any
static inline int64_t train_counted_in_rows_(const Run* r, int64_t whole,
                                             int64_t (*count)(const Run* r, const int* row, int document_start)) {
    const int64_t n_rows = (int64_t)r->n_leaves * r->o.batch_size, first = run_first_row(&r->o, &r->state);
    const int T = r->T, document_start = run_document_start(r, TO_TRAIN);
    if (r->data.train.examples_T == 0 && document_start == NO_RESET) { return n_rows * whole; }
    int* row = (int*)malloc_check(2 * sizeof(int) * (size_t)T, "a row");
    int64_t n = 0;
    for (int64_t i = first; i < first + n_rows; i++) {
        dataloader_row(&r->data.train_rows, i, row, row + T);
        n += count(r, row, document_start);
    }
    free(row);
    return n;
}

// targets of the tokens after the next (mtp_tokens.h)
static inline int64_t train_count_mtp_(const Run* r, const int* row, int document_start) {
    return mtp_counted(row, row + r->T, document_start, 1, r->T);
}

// positions with a loss of the indexer
static inline int64_t train_count_index_(const Run* r, const int* row, int document_start) {
    return entries_counted(row, row + r->T, document_start, r->model->index_ratio, 1, r->T);
}

// ... of that of a module for the token after the next: all but the last ones of documents
static inline int64_t train_count_mtp_index_(const Run* r, const int* row, int document_start) {
    return entries_counted(row, row + r->T, document_start, 2, 1, r->T);
}

// what losses besides that of the next token are divided by
static inline void train_count_others_(const Run* r) {
    Model* m = r->model;
    const int ratio = m->index_ratio, seen = r->T >= ratio ? r->T - ratio + 1 : 0;
    if (m->learns_mtp) { m->mtp_counted = model_counted(train_counted_in_rows_(r, r->T - 1, train_count_mtp_)); }
    if (!m->learns_index) { return; }
    m->index_counted = model_counted(train_counted_in_rows_(r, seen, train_count_index_));
    if (ratio == 1 && m->learns_mtp) {
        m->mtp_index_counted = model_counted(train_counted_in_rows_(r, r->T - 1, train_count_mtp_index_));
    }
}

// does --noise-scale ask for this step?
static inline int train_measures_noise_(const Run* r) {
    return r->o.noise_scale > 0 && (r->state.step + 1) % r->o.noise_scale == 0;
}

// the noise scale as far as this update has shown; grads: the sum of its leaves
static inline void train_measure_noise_(Run* r, const float* grads) {
    DataParallel* dp = &r->model->dp;
    double* squares = (double*)malloc_check(sizeof(double) * (size_t)r->n_leaves, "squares of leaves");
    int64_t* counted = (int64_t*)malloc_check(sizeof(int64_t) * (size_t)r->n_leaves, "targets of leaves");
    const int64_t first = run_first_row(&r->o, &r->state), B = r->o.batch_size;
    for (int k = 0; k < r->n_leaves; k++) { counted[k] = dataloader_counted(&r->data.train_rows, first + k * B, B); }
    dp_leaf_squares(dp, squares);
    const double norm = (double)model_norm(r->model, grads, &r->dev);
    r->noise = r->state.noise;
    r->noise_targets = train_counted(r);
    noise_scale_add(&r->noise, squares, counted, r->n_leaves, norm * norm);
    free(squares);
    free(counted);
}

// micro-batch k of this rank, of the update that goes on, with its images
static inline void train_batch_(Run* r, int k, const int** inputs, const int** targets) {
    const double start = seconds_now(CLOCK_MONOTONIC);
    prefetch_batch(&r->prefetch, train_batch_number(r, k), inputs, targets);
    r->seconds_waited += seconds_now(CLOCK_MONOTONIC) - start;
    if (r->trainer->images_of_rows) {
        const int64_t first = train_row(r, train_batch_number(r, k));
        r->trainer->images_of_rows(r, &r->data.train_rows, first, *inputs, *targets, r->o.batch_size, r->T);
    }
}

static inline void train_leaves_(Run* r, float dloss) {
    for (int k = 0; k < model_batches(r->model); k++) {
        const int *inputs, *targets;
        train_batch_(r, k, &inputs, &targets);
        r->trainer->leaf(r, k, inputs, targets, dloss, r->o.batch_size, r->T);
        comm_watch(r->comm, HERE);
    }
}

// the leaves of this rank forward and backward, and the sum of all ranks' gradients; with the mean loss and their norm
static inline float* train_gradients(Run* r, float* loss, float* norm) {
    const float counted = (float)train_counted(r), dloss = 1.0f / counted;
    train_count_others_(r);
    dp_measure(&r->model->dp, train_measures_noise_(r), &r->dev);
    if (model_has_pp(r->model)) { pp_leaves(r, dloss, train_batch_); } else { train_leaves_(r, dloss); }
    float loss_sum, *grads = model_reduce(r->model, &loss_sum, &r->dev);
    *loss = loss_sum / counted;
    if (train_measures_noise_(r)) { train_measure_noise_(r, grads); }
    r->targets_loss = *loss;
    if (r->trainer->more_loss) { *loss += r->trainer->more_loss(r, grads); }
    *norm = model_norm(r->model, grads, &r->dev);
    return grads;
}

static inline int train_verifies(const Run* r) {
    return r->o.verify_every > 0 && (r->state.step + 1) % r->o.verify_every == 0;
}

// the same, and in every --verify-every-th step a second time
static inline float* train_verified_gradients(Run* r, float* loss, float* norm) {
    float* grads = train_gradients(r, loss, norm);
    if (!train_verifies(r)) { return grads; }
    const Part* reduced = r->model->dp.reduced;
    verify_first(&r->verify, r->state.step + 1, *loss, *norm, grads, reduced, &r->dev);
    grads = train_gradients(r, loss, norm);
    verify_second(&r->verify, *loss, *norm, grads, reduced, &r->dev);
    return grads;
}

// clip to the norm, then AdamW, or Muon
static inline void train_update(Run* r, const float* grads, float norm, float lr) {
    const RunOptions* o = &r->o;
    for (int i = 0; i < r->model->n_slices && r->slice_updates; i++) {
        r->slice_updates[i] += !slice_is_frozen(r->model->frozen, i);
    }
    const Optimizer optimizer = {lr, o->beta1, o->beta2, o->eps, o->weight_decay, o->clip, r->decay_all,
                                 train_verifies(r) ? &r->verify : NULL, r->slice_updates, o->momentum,
                                 r->model->muon_room};
    model_update(r->model, grads, norm, &optimizer, ++r->state.updates, &r->dev);
}

// one loss, one update
static inline void train_adamw(Run* r, Step* s) {
    s->grads = train_verified_gradients(r, &s->loss, &s->norm);
    s->skipped = run_state_skips(&r->state, &r->o, s->loss, s->norm);
    if (!s->skipped) { train_update(r, s->grads, s->norm, s->lr); }
}

// what this step has measured becomes part of the run; for its record
static inline void train_keep_noise_(Run* r) {
    r->state.noise = r->noise;
    const double scale = noise_scale_of(&r->noise);
    log_extra(&r->log, json_pack("{s:o}", "noise_scale", json_finite(scale)));
}

static inline void train_print_noise_(const Run* r) {
    const double scale = noise_scale_of(&r->noise);
    printf("step %d | noise scale ", r->state.step);
    if (isnan(scale)) { printf("not known yet: noise outweighs the gradient\n"); }
    else { printf("%s targets, an update has %s\n", format_count(scale).s, format_count((double)r->noise_targets).s); }
    fflush(stdout);
}

__attribute__((noreturn))
static inline void train_fail_(Run* r, const Step* s) {
    char name[NAME_BYTES];
    const char* bad = model_first_bad(r->model, s->dp, name, sizeof name, s->grads, &r->dev);
    if (r->comm->rank > 0) { comm_barrier(r->comm, HERE); }  // rank 0 says it
    background_wait(&r->snapshot.writer);
    const int finite = run_newest_finite(&r->o, r->state.step);
    char folder[PATH_BYTES], before[PATH_BYTES + 32] = "";
    if (finite >= 0) { snprintf(before, sizeof before, ", --from %s", checkpoint_folder(folder, r->o.run, finite)); }
    fail_run("step %d: %d updates in a row were not finite (loss %g, norm %g, first bad gradient: %s): "
             "try a smaller --lr or --clip%s",
             r->state.step, r->state.skips, (double)s->loss, (double)s->norm, bad, before);
}

// The step's share of the machine's matmul rate, -1: not known. A step that is faster than that rate says that other
// programs were busy when it was measured: it is measured again, at most once in 20 s
static inline double train_peak_share_(Run* r, double tokens_per_second) {
    const double flops = tokens_per_second * r->trainer->flops_per_token(r), now = seconds_now(CLOCK_MONOTONIC);
    if (r->peak > 0.0 && flops > r->peak && r->comm->size == 1 && now - r->peak_measured > 20.0) {
        r->peak = fmax(r->peak, matmul_peak(&r->dev, INFINITY));
        r->peak_measured = now;
    }
    return r->peak > 0.0 && flops <= r->peak ? flops / r->peak : -1.0;
}

static inline void train_step(Run* r) {
    const RunOptions* o = &r->o;
    RunState* s = &r->state;
    const int64_t n_tokens = (int64_t)r->n_leaves * o->batch_size * r->T;
    double start = seconds_now(CLOCK_MONOTONIC);
    Step step = {NAN, 0.0f, run_lr(o, s->step), 0, &r->model->dp, NULL};
    r->seconds_waited = 0.0;
    r->noise_targets = 0;
    (r->trainer->step ? r->trainer->step : train_adamw)(r, &step);
    if (r->trainer->stepped) { r->trainer->stepped(r, &step); }
    if (r->model->average && !step.skipped) {
        const float weight = ema_weight(o->ema, ++s->averaged);
        model_average_now(r->model, weight, &r->dev);
    }
    s->step++;
    s->rows += (int64_t)r->n_leaves * o->batch_size;
    s->tokens += n_tokens;
    double seconds = seconds_now(CLOCK_MONOTONIC) - start, rate = (double)n_tokens / seconds;
    const double peak = train_peak_share_(r, rate);
    StepRecord record = {s->step,          o->steps,  step.loss, step.norm, step.lr,
                         1000.0 * seconds, s->tokens, rate,      peak,      step.skipped};
    const int has_noise = r->noise_targets > 0 && !step.skipped;
    if (has_noise) { train_keep_noise_(r); }
    tensorboard_step(&r->board, &record);
    tensorboard_extra(&r->board, s->step, r->log.extra);
    log_step(&r->log, &record, s->step % o->log_every == 0 || s->step == o->steps || step.skipped);
    if (has_noise && !r->log.json_lines) { train_print_noise_(r); }
    if (s->skips > o->max_skips) { train_fail_(r, &step); }
}

// a command that goes on with the run by as many ranks as now: with fewer, what they share may be given up
static inline void train_say_resume_(const Run* r) {
    const char* launch = getenv("LLMC_LAUNCH");  // by dev/tools/launch, on one machine
    const int P = r->comm->size;
    const char* program = program_invocation_name;
    if (P == 1) { printf("to go on later: %s --run %s --resume\n", program, r->o.run); }
    else if (launch) { printf("to go on later: %s -n %d %s --run %s --resume\n", launch, P, program, r->o.run); }
    else { printf("to go on later, on %d ranks: %s --run %s --resume\n", P, program, r->o.run); }
}

// evaluate, sample, save, step, until --steps, a signal or --early-stop
static inline void train(Run* r) {
    const RunOptions* o = &r->o;
    RunState* s = &r->state;
    const int saved = o->resume ? s->step : -1, first = s->step;
    const double began = seconds_now(CLOCK_MONOTONIC), wait = 60.0 * (double)o->save_minutes;
    Comm* stage = model_stage_ranks(r->model, r->comm);
    const CommLink* link = r->comm->link;
    SlowRanks slow = slow_ranks_init(stage->size);
    uint64_t bytes_sent = 0;  // in updates: validations, samples and checkpoints send, too
    int stop;
    ranks_print_cost(r->comm, 0, 0);
    stop_on_signals();
    for (;;) {
        int due_by_time = r->comm->rank == 0 && wait > 0.0 && snapshot_is_old(&r->snapshot, began, wait);
        ranks_agree(r->comm, o, s->step, snapshot_newest(&r->snapshot, saved), &stop, &due_by_time);
        int last = stop || s->step >= o->steps, unsaved = s->step > saved || s->interrupted, due = !stop && unsaved;
        if (due && o->eval_every > 0 && (s->step % o->eval_every == 0 || last)) { task_evaluate(r, 1); }
        if (o->early_stop > 0 && s->evals_since_best >= o->early_stop) { last = 1; }
        int samples = due && o->sample_every > 0 && s->step > 0 && (s->step % o->sample_every == 0 || last);
        if (samples && run_samples(r)) { task_sample(r); }
        const int validates = due && o->eval_every > 0 && (s->step % o->eval_every == 0 || last);
        const int answers = run_answers(r) && (o->sample_every > 0 ? samples : validates);
        if (answers && run_samples(r)) { task_answer(r); }
        s->interrupted = stop != 0;
        int save = last || due_by_time || (o->save_every > 0 && s->step > 0 && s->step % o->save_every == 0);
        if (unsaved && save) {
            save_check_data(r);
            save_check_replicas(r);
            save_checkpoint(r, last);
        }
        if (last) { break; }
        const uint64_t sent = link->bytes_sent;
        const double start = seconds_now(CLOCK_MONOTONIC), waited = link->seconds_waited;
        train_step(r);
        bytes_sent += link->bytes_sent - sent;
        const double own = seconds_now(CLOCK_MONOTONIC) - start - (link->seconds_waited - waited);
        slow_ranks_step(&slow, stage, own, model_batches(r->model), s->step);
    }
    slow_ranks_free(&slow);
    ranks_print_cost(r->comm, s->step - first, bytes_sent);
    snapshot_print(&r->snapshot, run_checkpoint_bytes(r->model->table, r->model->n_saved, r->model->frozen,
                                                       r->model->average != NULL));
    const char* outcome = s->step >= o->steps ? "done" : stop ? "stopped" : "stopped early";
    if (r->comm->rank == 0) {
        run_summary(o, s, strcmp(outcome, "stopped early") == 0, r->trainer->summary ? r->trainer->summary(r) : NULL);
    }
    if (stop && s->step < o->steps) { train_say_resume_(r); }
    printf("%s after step %d, checkpoint in %s/step_%06d\n", outcome, s->step, o->run, s->step);
}
#endif  // LLMC_TRAIN_H
