/*
A trainer of a decoder as the subject of tests (subject.h): all that its table of passes (models/decoder_passes.h) can
do for it. A test has a struct that begins with a DecoderSubject, behind which the trainer's own stands:
    typedef struct {
        DecoderSubject d;  // first
        Qwen qwen;
    } QwenSubject;
    static const SubjectCalls QWEN = {
        .n_bytes = sizeof(QwenSubject), .layout = layout, ...
        DECODER_SUBJECT(&PASSES, decoder_subject_close, decoder_subject_losses, decoder_subject_leaf),
    };
    DECODER_SUBJECT            the last members of SubjectCalls; close, losses and leaf may be the test's own, which
                               call these
    decoder_subject_batch      forward of a batch of B rows as long as the file's
    decoder_subject_evaluate   ... and its losses
*/
#ifndef LLMC_DECODER_SUBJECT_H
#define LLMC_DECODER_SUBJECT_H
#include "../models/decoder_passes.h"  // DecoderPasses, decoder_passes_forward, decoder_leaf
#include "subject.h"                   // Subject

typedef struct {
    Subject s;                // first
    Activations acts, cache;  // of a batch; of the texts that are generated
} DecoderSubject;

static inline DecoderSubject* decoder_subject(Subject* s) { return (DecoderSubject*)s; }

static inline const DecoderPasses* decoder_subject_passes_(const Subject* s) {
    return (const DecoderPasses*)s->calls->passes;
}

static inline Activations* decoder_subject_activations(Subject* s, Purpose purpose) {
    return purpose == TO_TRAIN ? &decoder_subject(s)->acts : &decoder_subject(s)->cache;
}

static inline void decoder_subject_open(Subject* s, Purpose purpose, int B, int T) {
    const Tradeoffs how = {s->way.recompute, s->way.head_rows, {1, 0.0f}};
    Activations* acts = decoder_subject_activations(s, purpose);
    decoder_subject_passes_(s)->layout(s->model, acts, B, T, purpose, how);
    activations_open(acts, s->model, &s->dev);
    if (purpose != TO_TRAIN) { return; }
    acts->graph.is_on = s->way.graph;
    acts->batch.counts_all = s->way.graph || s->way.counts_all;
    s->graph = &acts->graph, s->segments = &acts->batch.segments;
    s->tensors = &acts->tensors, s->statistics = &acts->statistics;
    s->choices = acts->experts.size.L > 0 ? &acts->experts.choices : NULL;
}

static inline void decoder_subject_close(Subject* s) {
    activations_free(&decoder_subject(s)->acts);
    if (decoder_subject(s)->cache.tensors.memory) { activations_free(&decoder_subject(s)->cache); }
}

static inline void decoder_subject_batch(Subject* s, const int* inputs, const int* targets, int B) {
    Activations* acts = &decoder_subject(s)->acts;
    token_batch_inputs(&acts->batch, inputs, targets, B, s->file.T, 0, &s->dev);
    decoder_passes_forward(decoder_subject_passes_(s), s->model, acts, B * s->file.T, &s->dev);
}

static inline const float* decoder_subject_evaluate(Subject* s, const int* targets, int B) {
    const LmHead head = decoder_subject_passes_(s)->head(s->model, &decoder_subject(s)->acts);
    return lm_head_evaluate(&head, &decoder_subject(s)->acts.batch, targets, B * s->file.T, &s->dev);
}

static inline const float* decoder_subject_losses(Subject* s, const int* inputs, const int* targets, int B) {
    decoder_subject_batch(s, inputs, targets, B);
    return decoder_subject_evaluate(s, targets, B);
}

static inline void decoder_subject_leaf(void* subject, const int* inputs, const int* targets, float dloss) {
    Subject* s = (Subject*)subject;
    decoder_leaf(decoder_subject_passes_(s), s->model, &decoder_subject(s)->acts, inputs, targets, dloss, s->file.B,
                 s->file.T, &s->dev);
}

static inline void decoder_subject_texts(Subject* s, const CachedText* texts, int n) {
    Activations* cache = &decoder_subject(s)->cache;
    const int N = token_batch_texts(&cache->batch, texts, n, &s->dev);
    decoder_passes_forward(decoder_subject_passes_(s), s->model, cache, N, &s->dev);
}

static inline void decoder_subject_forward(Subject* s, Purpose purpose, const int* tokens, int T, int t0) {
    const CachedText text = {tokens - t0, 0, t0, T, NULL};
    Activations* acts = &decoder_subject(s)->acts;
    if (purpose == TO_GENERATE) {
        decoder_subject_texts(s, &text, 1);
        return;
    }
    token_batch_inputs(&acts->batch, tokens, NULL, 1, T, 0, &s->dev);
    decoder_passes_forward(decoder_subject_passes_(s), s->model, acts, T, &s->dev);
}

static inline const floatX* decoder_subject_logits(Subject* s, Purpose purpose, int n) {
    const LmHead head = decoder_subject_passes_(s)->head(s->model, decoder_subject_activations(s, purpose));
    return lm_head_logits(&head, n, 1, &s->dev);
}

#define DECODER_SUBJECT(passes_, close_, losses_, leaf_)                                                              \
    .passes = (passes_), .open = decoder_subject_open, .close = (close_), .losses = (losses_), .leaf = (leaf_),       \
    .forward = decoder_subject_forward, .forward_texts = decoder_subject_texts, .logits = decoder_subject_logits
#endif  // LLMC_DECODER_SUBJECT_H
