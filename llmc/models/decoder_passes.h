/*
What a trainer of a decoder computes of its own model, as a table of functions: a run calls them (decoder_run.h), and so
do tests (test/decoder_subject.h).
    DecoderPasses   the table
    decoder_leaf    a micro-batch: forward and backward, one leaf of the tree of ranks/data_parallel.h
*/
#ifndef LLMC_DECODER_PASSES_H
#define LLMC_DECODER_PASSES_H
#include "../ranks/model_gradients.h"  // Model, model_leaf_done
#include "../ranks/pipeline_link.h"    // PpStreams
#include "activations.h"               // Activations, Tradeoffs, activations_take
#include "lm_head.h"                   // LmHead

// m: the first member of the trainer's struct, which each function finds by it
typedef struct {
    // sizes only, returning what activations_open will take
    double (*bytes)(const Model* m, Activations* acts, int B, int T, Purpose purpose, Tradeoffs how);
    // the N positions of the batch of acts, up to the last norm; with --pp through the layers of this stage
    void (*forward)(const Model* m, Activations* acts, int N, const Device* dev);
    LmHead (*head)(const Model* m, const Activations* acts);  // and from there to logits
    // behind forward: losses, and back to all gradients
    void (*backward)(Model* m, Activations* acts, float dloss, int N, const Device* dev);
    // where a stream of N positions comes in and goes out, with --pp
    PpStreams (*streams)(const Model* m, const Activations* acts, int N);
} DecoderPasses;

// One micro-batch, B rows of T tokens on the host, forward and backward; dloss is what each of its losses counts in
// that of the update. The sum of its losses, the numbers that the model counts (n_numbers) and its gradient join the
// tree. What stands between graph_begin and graph_end may be one launch
static inline void decoder_leaf(const DecoderPasses* passes, Model* m, Activations* acts, const int* inputs,
                                const int* targets, float dloss, int B, int T, const Device* dev) {
    DataParallel* dp = &m->dp;
    activations_take(acts, inputs, targets, m->n_numbers > 0 ? dp_numbers(dp) : NULL, B, T, dev);
    if (graph_begin(&acts->graph, dp_leaf_arena(dp), dloss, B, T, dev)) {
        passes->forward(m, acts, acts->batch.n, dev);
        passes->backward(m, acts, dloss, acts->batch.n, dev);
        graph_end(&acts->graph, dev);
    }
    acts->numbers = NULL;
    model_leaf_done(m, dev);
}
#endif  // LLMC_DECODER_PASSES_H
