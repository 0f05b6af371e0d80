/*
What a rank sends in an update, for the box and --plan: a trainer says it of one layer and one micro-batch
(Trainer.layer_parts_sent, layer_keys_sent), and here that is summed over the layers of a stage, with what stands before
and behind them. All of it in bytes.
    sent_layers  of a micro-batch, of all layers that training goes through, the MTP module's among them
    sent_parts   for Trainer.parts_sent: to ranks that share matrices (--tp)
    sent_keys    for Trainer.keys_sent: to ranks that share positions (--cp)
Of each layer two things are asked: does backward go through it (is_back), and does that bring or compute once more what
it needs (again)? Not of the last layer where the way back begins at once: there all is still in place.
*/
#ifndef LLMC_SENT_RUN_H
#define LLMC_SENT_RUN_H
#include "../run/pipeline.h"  // pp_own_batches
#include "../run/trainer.h"   // Run
#include "mtp.h"              // mtp_trunk_end, mtp_on_stage
#include "stream.h"           // stream_sends
#include "vocabulary.h"       // vocabulary_sends

typedef double (*SentOfLayer)(const Run* r, int l, int is_back, int again);

// Backward asks for the stream before each layer and, where it is not computed again (recomputes), for that between its
// halves: `stream` bytes each
static inline double sent_layers_and_streams_(const Run* r, SentOfLayer of_layer, int recomputes, double stream) {
    const Model* m = r->model;
    const int first = model_first_layer(m), end = mtp_trunk_end(m) + mtp_on_stage(m, TO_TRAIN);
    double n = 0.0;
    for (int l = first; l < end; l++) {
        const int is_back = l >= m->lowest, again = is_back && !(model_turns_back(m) && l + 1 == end);
        n += of_layer(r, l, is_back, again) + ((is_back && l > first) + (again && !recomputes)) * stream;
    }
    return n;
}

static inline double sent_layers(const Run* r, SentOfLayer of_layer) {
    return sent_layers_and_streams_(r, of_layer, 0, 0.0);
}

// recomputes: whole blocks are computed again on the way back. C: channels of the stream, D of the vocabulary's rows
static inline double sent_parts(const Run* r, int recomputes, int C, int D) {
    const Model* m = r->model;
    const int N = run_positions(r);
    if (!model_has_tp(m)) { return 0.0; }
    const double stream = stream_sends(N, C, &m->tp);
    return (sent_layers_and_streams_(r, r->trainer->layer_parts_sent, recomputes, stream) + vocabulary_sends(m, D, N)) *
           pp_own_batches(r);
}

static inline double sent_keys(const Run* r) {
    return model_has_cp(r->model) ? sent_layers(r, r->trainer->layer_keys_sent) * pp_own_batches(r) : 0.0;
}
#endif  // LLMC_SENT_RUN_H
