/*
What a trainer of a decoder computes of its own model, as a table of functions: a run calls them (decoder_run.h), and so
do tests (test/decoder_subject.h).
*/
#ifndef LLMC_DECODER_PASSES_H
#define LLMC_DECODER_PASSES_H
#include "../ranks/pipeline_link.h"  // PpStreams
#include "activations.h"             // Activations, Tradeoffs
#include "lm_head.h"                 // LmHead

// m: the first member of the trainer's struct
typedef struct {
    // sizes only, returning what activations_open will take
    double (*bytes)(const Model* m, Activations* acts, int B, int T, Purpose purpose, Tradeoffs how);
    void (*forward)(const Model* m, Activations* acts, int N, const Device* dev);  // N positions of the batch of acts,
                                                                                   // up to the last norm
    LmHead (*head)(const Model* m, const Activations* acts);                       // and from there to logits
    // a micro-batch, forward and backward
    void (*leaf)(Model* m, Activations* acts, const int* inputs, const int* targets, float dloss, int B, int T,
                 const Device* dev);
    // ... from behind its forward pass: losses, back to all gradients
    void (*backward)(Model* m, Activations* acts, float dloss, int N, const Device* dev);
    PpStreams (*streams)(const Model* m, const Activations* acts, int N);  // where a stream of N positions comes in and
                                                                           // goes out, with --pp
} DecoderPasses;
#endif  // LLMC_DECODER_PASSES_H
