/*
What a run of train_mamba_hpn prints and records beside what every trainer does (log.h): how good the answers of a head
are, and what happened in a step. Names of the keys are those that rust_trainer's users know.
    quality_of        what follows from a validation's scores (head.h); quality_line, quality_keys: as a line, as keys
    step_keys         the record of a step
    mamba_log_schema  what all keys mean, for the first line of metrics.jsonl
*/
#ifndef LLMC_MAMBA_LOG_H
#define LLMC_MAMBA_LOG_H
#include "../core/fail.h"             // warn_line
#include "../core/jsonfile.h"         // json_finite
#include "../ops/gradient_surgery.h"  // SurgeryMethod, surgery_name
#include "head.h"                     // HeadKind, head_reads_out, SCORE_TOP1, ...
#include <sys/resource.h>

static inline json_t* mamba_log_schema(void) {
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s}",
        "kind", "train or val", "ce_loss", "cross entropy", "hpn_loss", "the loss of a head with prototypes",
        "acc1", "share of targets with the highest score", "acc5", "share of targets among the five highest",
        "perplexity", "exp of the loss, of hpn of the probabilities read out",
        "label_cosine", "mean cosine to the target's prototype",
        "collapse", "mean cosine of pairs of states, 1: all are one", "ff_loss_mean", "Forward-Forward's loss",
        "bp_applied", "was there back-propagation?", "ff_updates_applied", "layers that Forward-Forward changed",
        "bp_updates_applied", "slices of tensors that AdamW changed",
        "conflict_layers", "layers in which both losses pull apart",
        "surgery_method", "how both gradients became one", "clipped", "was the gradient longer than --clip?",
        "data_wait_ms", "milliseconds spent waiting for batches", "epoch", "passes over the training data",
        "rss_mb", "memory of the process, 10^6 bytes");
}

// ---- a validation ----

// NAN: the head has no such number
typedef struct { double top1, top5, perplexity, label_cosine, collapse; } Quality;

static inline Quality quality_of(HeadKind head, float loss, const double* scores) {
    const double n = scores[SCORE_COUNTED], nats = head_reads_out(head) ? scores[SCORE_LOG_LOSS] / n : (double)loss;
    const int has_cosines = head != HEAD_CE;
    const Quality q = {scores[SCORE_TOP1] / n, scores[SCORE_TOP5] / n, exp(nats),
                       has_cosines ? scores[SCORE_COSINE] / n : NAN,
                       has_cosines ? scores[SCORE_PAIRS] / scores[SCORE_BATCHES] : NAN};
    return q;
}

// the line: step 120 | accuracy 54.30% | top 5 83.91% | perplexity 4.81
static inline void quality_line(char* line, size_t n_bytes, HeadKind head, int step, Quality q) {
    char cosines[80] = "";
    if (head != HEAD_CE) {
        snprintf(cosines, sizeof cosines, " | cosine to target %.3f, among states %.3f", q.label_cosine, q.collapse);
    }
    snprintf(line, n_bytes, "step %d | accuracy %.2f%% | top 5 %.2f%% | %sperplexity %.3g%s\n", step, 100.0 * q.top1,
             100.0 * q.top5, head_reads_out(head) ? "read-out " : "", q.perplexity, cosines);
    if (q.collapse > 0.95) {
        warn_line("step %d: all states point the same way (mean cosine %.3f): they say little about the input", step,
                  q.collapse);
    }
}

static inline json_t* quality_keys(HeadKind head, float loss, Quality q) {
    return json_pack("{s:s, s:o, s:f, s:f, s:o, s:o, s:o}", "kind", "val", head == HEAD_CE ? "ce_loss" : "hpn_loss",
                     json_finite((double)loss), "acc1", q.top1, "acc5", q.top5, "perplexity", json_finite(q.perplexity),
                     "label_cosine", json_finite(q.label_cosine), "collapse", json_finite(q.collapse));
}

// ---- a step ----

typedef struct {
    float loss, ff_loss;           // NAN: not computed
    int bp_applied, clipped;
    int ff_updates, bp_updates, conflict_layers;
    SurgeryMethod surgery_method;
    double data_wait_ms, epoch;
} StepNotes;

static inline json_t* step_keys(HeadKind head, const StepNotes* s) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return json_pack("{s:s, s:o, s:o, s:b, s:i, s:i, s:i, s:s, s:b, s:f, s:f, s:f}",
        "kind", "train", head == HEAD_CE ? "ce_loss" : "hpn_loss", json_finite((double)s->loss),
        "ff_loss_mean", json_finite((double)s->ff_loss), "bp_applied", s->bp_applied,
        "ff_updates_applied", s->ff_updates, "bp_updates_applied", s->bp_updates,
        "conflict_layers", s->conflict_layers, "surgery_method", surgery_name(s->surgery_method).s,
        "clipped", s->clipped, "data_wait_ms", s->data_wait_ms, "epoch", s->epoch,
        "rss_mb", (double)usage.ru_maxrss * 1024e-6);
}
#endif  // LLMC_MAMBA_LOG_H
