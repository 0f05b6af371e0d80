/*
How good a model is: the loss on validation rows, and the share of right answers to examples (HellaSwag). The model is
one function:
    batch_losses(model, inputs, targets, B, T)   forward only; the loss of each position (B, T), 0 where nothing counts.
                                                 The mean is over targets from 0 on: a trainer, whose arrays they are,
                                                 may set others below 0
    batch_images(model, rows, first, inputs, targets, B, T)   optional, asked before batch_losses: of a model that reads
                                                 images, those of these rows of the data; rows NULL: there are none
    batch_scores(model, targets, B, T, scores)   optional, asked after batch_losses: n_scores numbers about the same
                                                 batch, such as counts of right predictions, whose sums over the batches
                                                 evaluate_loss leaves in Evaluator.scores
Ranks share the batches. Sums of batches are added in their order, so the result
depends on no rank count.
Order:  a batch's losses chain over its positions in float; batches chain in double.
*/
#ifndef LLMC_EVALUATE_H
#define LLMC_EVALUATE_H
#include "../core/device.h"      // ceil_div
#include "../ranks/comm.h"       // comm_own, comm_all_gather_shares, comm_all_reduce
#include "../text/dataloader.h"  // dataloader_batch
#include "../text/hellaswag.h"   // HellaSwag
#include "run_options.h"         // RunOptions

typedef const float* (*BatchLosses)(void* model, const int* inputs, const int* targets, int B, int T);
typedef void (*BatchImages)(void* model, const DataLoader* rows, int64_t first, const int* inputs, const int* targets,
                            int B, int T);
typedef void (*BatchScores)(void* model, const int* targets, int B, int T, double* scores);

typedef struct {
    const RunOptions* o;         // batch_size, eval_batches, eval_examples
    Comm* comm;
    const Tokenizer* tokenizer;  // NULL: bits per byte are not known
    int T;
    int *inputs, *targets;       // (batch_size, T), for the batches of an evaluation
    BatchLosses batch_losses;
    void* model;
    BatchImages batch_images;    // NULL: the model reads none
    BatchScores batch_scores;    // NULL: none
    int n_scores;
    double* scores;              // (n_scores)
    int multiple;                // of so many positions every row must be
    int most_rows;               // of a batch; 0: as many as have its positions
    int together;                // a pass needs all ranks: who has no batch left goes through one again
    int shows;                   // the bar of its share
} Evaluator;

static inline float evaluate_batch_(const Evaluator* e, int B) {
    const float* losses = e->batch_losses(e->model, e->inputs, e->targets, B, e->T);
    float sum = 0.0f;
    for (int n = 0; n < B * e->T; n++) { sum += losses[n]; }
    return sum;
}

// of n_batches those of this rank. together: ranks without one in the last round go through number 0 once more, for
// nothing; returns the number of passes
static inline int evaluate_passes_(const Evaluator* e, int n_batches, CommShare* own) {
    *own = comm_own(e->comm, n_batches);
    return e->together ? (int)ceil_div(n_batches, e->comm->size) : own->end - own->first;
}

// the sums of the batches' scores (n_batches, n_scores), of which this rank has its own and 0 for the others
static inline void evaluate_sum_scores_(const Evaluator* e, double* scores, int n_batches) {
    comm_all_reduce(e->comm, scores, (size_t)n_batches * (size_t)e->n_scores, DT_F64, OP_SUM, HERE);
    for (int k = 0; k < e->n_scores; k++) {
        e->scores[k] = 0.0;
        for (int i = 0; i < n_batches; i++) { e->scores[k] += scores[i * e->n_scores + k]; }
    }
}

// mean loss over the first rows of `rows`, always the same ones; *bits_per_byte is negative where unknown
static inline float evaluate_loss(const Evaluator* e, const DataLoader* rows, double* bits_per_byte) {
    double sum = 0.0;
    // targets; bytes of text behind them
    int64_t n_rows = (int64_t)e->o->eval_batches * e->o->batch_size, n_counted[2] = {0, 0};
    if (n_rows > rows->n_rows) { n_rows = rows->n_rows; }
    const int n_batches = (int)ceil_div(n_rows, e->o->batch_size);
    CommShare own;
    const int n_passes = evaluate_passes_(e, n_batches, &own);
    float* losses = (float*)malloc_check(sizeof(float) * (size_t)n_batches, "losses");
    const size_t n_scores = e->batch_scores ? (size_t)n_batches * (size_t)e->n_scores : 0;
    double* scores = (double*)memset(malloc_check(sizeof(double) * n_scores, "scores"), 0, sizeof(double) * n_scores);
    for (int pass = 0; pass < n_passes; pass++) {
        const int is_own = own.first + pass < own.end, i = is_own ? own.first + pass : 0;
        int64_t first = (int64_t)i * e->o->batch_size;
        int B = n_rows - first < e->o->batch_size ? (int)(n_rows - first) : e->o->batch_size;
        dataloader_batch(rows, first, B, e->inputs, e->targets);
        if (e->batch_images) { e->batch_images(e->model, rows, first, e->inputs, e->targets, B, e->T); }
        const float loss = evaluate_batch_(e, B);
        if (!is_own) { continue; }
        losses[i] = loss;
        if (e->batch_scores) {
            e->batch_scores(e->model, e->targets, B, e->T, scores + (size_t)i * (size_t)e->n_scores);
        }
        for (int n = 0; n < B * e->T; n++) { n_counted[0] += e->targets[n] >= 0; }
        n_counted[1] += e->tokenizer ? tokenizer_count_bytes(e->tokenizer, e->targets, B * e->T) : 0;
        if (e->shows) { progress("validation", i + 1, own.end); }
    }
    comm_all_gather_shares(e->comm, losses, n_batches, DT_F32, HERE);
    comm_all_reduce(e->comm, n_counted, 2, DT_I64, OP_SUM, HERE);
    if (e->batch_scores) { evaluate_sum_scores_(e, scores, n_batches); }
    for (int i = 0; i < n_batches; i++) { sum += (double)losses[i]; }
    free(losses);
    free(scores);
    *bits_per_byte = n_counted[1] > 0 ? sum / log(2.0) / (double)n_counted[1] : -1.0;
    return (float)(sum / (double)n_counted[0]);
}

// examples that --eval-examples asks for
static inline int evaluate_examples_(const Evaluator* e, const HellaSwag* h) {
    return e->o->eval_examples > 0 && e->o->eval_examples < h->n ? e->o->eval_examples : h->n;
}

// right answers among the first *n examples; each score comes from one rank
static inline int evaluate_answers(const Evaluator* e, HellaSwag* h, int* n) {
    // short rows: more of them fit
    const int longest = (int)ceil_div(h->longest, e->multiple) * e->multiple;
    const int T = longest < e->T ? longest : e->T, fit = e->o->batch_size * e->T / T;
    const int B = e->most_rows > 0 && e->most_rows < fit ? e->most_rows : fit;
    *n = evaluate_examples_(e, h);
    const int n_rows = N_CHOICES * *n, n_batches = (int)ceil_div(n_rows, B);
    CommShare own;
    const int n_passes = evaluate_passes_(e, n_batches, &own);
    memset(h->scores, 0, sizeof h->scores[0] * (size_t)n_rows);
    for (int pass = 0; pass < n_passes; pass++) {
        const int is_own = own.first + pass < own.end, i = is_own ? own.first + pass : 0;
        int rows = n_rows - i * B < B ? n_rows - i * B : B;
        hellaswag_batch(h, i * B, rows, T, e->inputs, e->targets);
        if (e->batch_images) { e->batch_images(e->model, NULL, 0, e->inputs, e->targets, rows, T); }
        const float* losses = e->batch_losses(e->model, e->inputs, e->targets, rows, T);
        if (!is_own) { continue; }
        hellaswag_losses(h, i * B, rows, T, e->targets, losses);
        if (e->shows) { progress("examples", i + 1, own.end); }
    }
    comm_all_reduce(e->comm, h->scores, (size_t)n_rows, DT_F64, OP_SUM, HERE);
    return hellaswag_correct(h, 0, *n);
}
#endif  // LLMC_EVALUATE_H
