/*
Forward and backward through a decoder, for runs (decoder_run.h) and tests (test/decoder_subject.h). A trainer has the
mathematics of its block; the way through the layers is the same for all, and stands here:
    embed_forward                              tokens become the stream that comes into the first layer
    block_forward     layer by layer           the stream behind a layer
    end_forward, head                          the last norm, then logits
    losses; end_backward                       from the head's gradient to that of the stream behind the last layer
    recompute_block, block_backward            layers upside down, as far as something learns
    embed_backward
With --pp a stage has some of the layers, and of the rest the first stage what comes before, the last what comes behind.
A module behind all layers (mtp.h) is the affair of end_backward.
    Recompute       what forward leaves out, for backward to compute it again
    DecoderPasses   the trainer's own functions, as a table
    DecoderStreams  where the stream is, what the ranks of two stages hand on: decoder_passes_streams
    decoder_passes_forward, decoder_passes_backward
    decoder_leaf    a micro-batch: forward and backward, one leaf of the tree of ranks/data_parallel.h
*/
#ifndef LLMC_DECODER_PASSES_H
#define LLMC_DECODER_PASSES_H
#include "../ops/crossentropy.h"       // crossentropy_losses_sum
#include "../ranks/model_gradients.h"  // Model, model_layer_done, model_leaf_done
#include "../ranks/pipeline_link.h"    // PpStreams
#include "activations.h"               // Activations, Tradeoffs, activations_take
#include "layer.h"                     // layer_stream
#include "lm_head.h"                   // LmHead, lm_head_losses

// what --recompute (Tradeoffs) leaves out in forward: each level what those before leave out, too. RECOMPUTE_MLPS: the
// first products of MLPs, and of experts
typedef enum { KEEP_ALL, RECOMPUTE_NORMS, RECOMPUTE_MLPS, RECOMPUTE_BLOCKS } Recompute;

// at layer l; residual or however many streams a model has, C channels in all
typedef struct {
    floatX* in;        // (N, C), before the first layer of a stage
    Stream behind;     // of layer l
    floatX* gradient;  // (N, C), of the stream behind a layer, then before it: one buffer for all
    int C;
} DecoderStreams;

// m: the first member of the trainer's struct, which each function finds by it. N positions of the batch of acts.
// residual: the stream that comes into layer l, or behind all
typedef struct DecoderPasses {
    // the sizes of acts; returns the bytes that activations_open will take
    double (*layout)(const Model* m, Activations* acts, int B, int T, Purpose purpose, Tradeoffs how);
    DecoderStreams (*streams)(const Model* m, const Activations* acts, int l);
    void (*embed_forward)(const Model* m, Activations* acts, int N, const Device* dev);
    void (*block_forward)(const Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev);
    void (*end_forward)(const Model* m, Activations* acts, const floatX* residual, int N, const Device* dev);
    LmHead (*head)(const Model* m, const Activations* acts);
    // passes: this table, by which such a module goes through a layer more
    void (*end_backward)(const struct DecoderPasses* passes, Model* m, Activations* acts, int N, const Device* dev);
    // what --recompute has left out of layer l
    void (*recompute_block)(const Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev);
    // the gradient of the stream goes from behind layer l to before it
    void (*block_backward)(Model* m, Activations* acts, int l, const floatX* residual, int N, const Device* dev);
    void (*embed_backward)(Model* m, Activations* acts, int N, const Device* dev);
} DecoderPasses;

// with --pp, of N positions: where they come into the layers of this stage, and out of them
static inline PpStreams decoder_passes_streams(const DecoderPasses* passes, const Model* m, const Activations* acts,
                                               int N) {
    const DecoderStreams x = passes->streams(m, acts, mtp_trunk_end(m) - 1);
    return pp_streams(x.in, x.behind.x, x.gradient, sizeof(floatX) * (size_t)N * (size_t)x.C);
}

// up to the last norm; with --pp through the layers of this stage
static inline void decoder_passes_forward(const DecoderPasses* passes, const Model* m, Activations* acts, int N,
                                          const Device* dev) {
    const int first = model_first_layer(m), end = mtp_trunk_end(m);
    if (model_has_embedding(m)) { passes->embed_forward(m, acts, N, dev); }
    const floatX* residual = passes->streams(m, acts, first).in;
    for (int l = first; l < end; l++) {
        passes->block_forward(m, acts, l, residual, N, dev);
        residual = passes->streams(m, acts, l).behind.x;
    }
    if (model_has_head(m)) { passes->end_forward(m, acts, residual, N, dev); }
}

// what has come into layer l of this stage
static inline const floatX* decoder_residual_(const DecoderPasses* passes, const Model* m, const Activations* acts,
                                              int l, int N, const Device* dev) {
    if (l == model_first_layer(m)) { return passes->streams(m, acts, l).in; }
    const DecoderStreams x = passes->streams(m, acts, l - 1);
    return layer_stream(acts, x.behind, l - 1, N, x.C, dev);
}

// From the stream behind the last layer of this stage to losses, and back to all gradients. Every parameter's gradient
// is written, but for what is frozen, whose pointer is NULL: one micro-batch is one leaf
static inline void decoder_passes_backward(const DecoderPasses* passes, Model* m, Activations* acts, float dloss, int N,
                                           const Device* dev) {
    const int first = model_first_layer(m), end = mtp_trunk_end(m);
    if (model_has_head(m)) {
        const LmHead head = passes->head(m, acts);
        lm_head_losses(&head, &acts->batch, 1, model_vector_gradient(m, head.field, 0), dloss, N, dev);
        crossentropy_losses_sum(dp_loss(&m->dp), head.losses, N, dev);
        passes->end_backward(passes, m, acts, N, dev);
    }
    for (int l = end - 1; l >= first && l >= m->lowest; l--) {
        const floatX* residual = decoder_residual_(passes, m, acts, l, N, dev);
        passes->recompute_block(m, acts, l, residual, N, dev);
        passes->block_backward(m, acts, l, residual, N, dev);
        model_layer_done(m, l, dev);
    }
    if (model_has_embedding(m)) { passes->embed_backward(m, acts, N, dev); }
}

// One micro-batch, B rows of T tokens on the host, forward and backward; dloss is what each of its losses counts in
// that of the update. The sum of its losses, the numbers that the model counts (n_numbers) and its gradient join the
// tree. What stands between graph_begin and graph_end may be one launch
static inline void decoder_leaf(const DecoderPasses* passes, Model* m, Activations* acts, const int* inputs,
                                const int* targets, float dloss, int B, int T, const Device* dev) {
    DataParallel* dp = &m->dp;
    activations_take(acts, inputs, targets, m->n_numbers > 0 ? dp_numbers(dp) : NULL, B, T, dev);
    if (graph_begin(&acts->graph, dp_leaf_arena(dp), dloss, B, T, dev)) {
        decoder_passes_forward(passes, m, acts, acts->batch.n, dev);
        decoder_passes_backward(passes, m, acts, dloss, acts->batch.n, dev);
        graph_end(&acts->graph, dev);
    }
    acts->numbers = NULL;
    model_leaf_done(m, dev);
}
#endif  // LLMC_DECODER_PASSES_H
