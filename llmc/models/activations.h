/*
What a pass of a transformer with RoPE has beside its parameters, whether its MLPs are experts or not: two tables of
activations, whose lines the trainer fills in, and what stands around them. One of these is of a batch, one of the
texts that are generated.
    Tradeoffs            time against memory, as options say it
    activations_kept     layers that keep a tensor of their own for backward
    cached_activation    a row of the table for what generation keeps of each position of each text
    activations_begin    an empty one; then the trainer fills in both tables, and
    activations_measure  knows how many bytes activations_open will take on the device
    activations_open, activations_free   the memory, zeroed
    activations_share_text   of generation: one text begins as another does
*/
#ifndef LLMC_ACTIVATIONS_H
#define LLMC_ACTIVATIONS_H
#include "../core/graph.h"         // Graph
#include "../core/tensor_arena.h"  // TensorArena
#include "../ops/dropout.h"        // Dropout
#include "../ops/rope.h"           // RopeTable, rope_table_open
#include "expert_layer.h"          // ExpertLayers, ExpertSizes
#include "token_batch.h"           // TokenBatch

typedef struct {
    int recompute;         // what backward computes again, a level of the trainer; it never changes a bit
    int head_rows;         // positions whose logits exist at once
    EpOptions ep;          // which ranks have which experts
} Tradeoffs;

typedef struct {
    Tradeoffs how;
    int T, N;                // room: positions of a row, and of a pass
    Purpose purpose;
    TensorArena tensors;     // floatX
    TensorArena statistics;  // what must not lose digits, always float
    ExpertLayers experts;    // of layers that have some; size.L 0: none has
    int HS;                  // channels of a head: all of them turn (rotary_attention.h),
    double theta;            // the slowest by this base
    RopeTable rope;
    TokenBatch batch;
    Dropout dropout;         // of this leaf in training, where the trainer has some; all zero: nothing is left out
    float* numbers;          // of a leaf, what routers count, on the device; NULL: nobody asks
    Graph graph;             // of leaves
} Activations;

// of L layers those that keep what --recompute `level` and above compute again; 0: one buffer serves all
static inline int activations_kept(const Tradeoffs* how, int L, Purpose purpose, int level) {
    return purpose == TO_TRAIN && how->recompute < level ? L : 0;
}

static inline void activations_begin(Activations* acts, int B, int T, Purpose purpose, Tradeoffs how) {
    memset(acts, 0, sizeof *acts);
    acts->how = how;
    acts->T = T;
    acts->N = token_batch_positions(B, T, purpose == TO_GENERATE);
    acts->purpose = purpose;
}

// the cache of T positions of B texts; in training and evaluation a tensor as others
static inline Tensor cached_activation(const char* name, size_t field, int layers, int rows, int columns) {
    Tensor t = activation(name, field, layers, rows, columns);
    t.is_cache = 1;
    return t;
}

// The tables have so many lines. experts NULL: the model has none; theta: the base of RoPE
static inline double activations_measure(Activations* acts, int n_tensors, int n_statistics, const ExpertSizes* experts,
                                         int HS, double theta) {
    acts->HS = HS;
    acts->theta = theta;
    return tensor_arena_layout(&acts->tensors, n_tensors, sizeof(floatX)) +
           tensor_arena_layout(&acts->statistics, n_statistics, sizeof(float)) +
           (experts ? expert_layers_layout(&acts->experts, experts, acts->N, acts->purpose) : 0.0) +
           (double)rope_table_bytes(acts->T, HS) + token_batch_bytes(1, acts->N);
}

// ranks: those that share the experts of the model
static inline void activations_open(Activations* acts, const ExpertRanks* ranks, const Device* dev) {
    tensor_arena_open(&acts->tensors, "activations");
    tensor_arena_open(&acts->statistics, "statistics");
    if (acts->experts.size.L > 0) { expert_layers_open(&acts->experts, ranks, acts->N, acts->purpose); }
    rope_table_open(&acts->rope, acts->theta, acts->T, acts->HS, dev);
    token_batch_open(&acts->batch, 1, acts->N);
}

// the first n positions of row `from` of the cache go to another row, in all layers
static inline void activations_share_text(const Activations* acts, int to, int from, int n, const Device* dev) {
    for (int i = 0; i < acts->tensors.n_table; i++) {
        const Tensor* t = &acts->tensors.table[i];
        const size_t width = sizeof(floatX) * (size_t)t->columns;
        for (int l = 0; t->is_cache && l < t->layers; l++) {
            if (!tensor_has_layer(t, l)) { continue; }
            cached_text_copy(tensor_arena_at(&acts->tensors, t, l), width, acts->T, to, from, n, dev);
        }
    }
}

static inline void activations_free(Activations* acts) {
    tensor_arena_close(&acts->tensors);
    tensor_arena_close(&acts->statistics);
    if (acts->experts.size.L > 0) { expert_layers_close(&acts->experts); }
    rope_table_free(&acts->rope);
    token_batch_close(&acts->batch);
    graph_free(&acts->graph);
}
#endif  // LLMC_ACTIVATIONS_H
