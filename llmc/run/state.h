/*
RunState: counters and generators. With parameters and moments, all that training goes on from after a checkpoint.
    run_state_start                 of a new run
    run_state_to_json, _from_json   in the manifest of a checkpoint; every number is checked as it comes back
    run_state_skips, run_state_validated   what a step and a validation change of it
    run_state_forget_best           when validation goes on with other data
*/
#ifndef LLMC_STATE_H
#define LLMC_STATE_H
#include "../core/jsonfile.h"  // json_need_int
#include "noise_scale.h"       // NoiseScale
#include "outliers.h"          // OutlierWindow
#include "run_options.h"       // RunOptions

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
    s.averaged = is_older ? 0 : (int)json_need_int(json, path, "averaged", 0, s.step);
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

// its checkpoint is one like others from now on
static inline void run_state_forget_best(RunState* s) {
    s->best_val = INFINITY;
    s->best_step = s->evals_since_best = 0;
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
#endif  // LLMC_STATE_H
