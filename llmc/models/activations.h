/*
What a pass of a transformer has beside its parameters, with RoPE or not, with experts or not: two tables of
activations, whose lines the trainer fills in, and what stands around them. One of these is of a batch, one of the
texts that are generated. Operands of a layer: layer.h.
    Tradeoffs            time against memory, as options say it
    Scratch              room that all layers share
    activations_kept     layers that keep a tensor of their own for backward
    activations_experts  sizes of experts as a pass has them
    activations_positions, activations_head_rows   of a pass those of this rank; of them those that have logits at once
    cached_activation    a row of the table for what generation keeps of each position of each text
    state_activation     ... of each text as a whole: a text goes on from where it ended, not from a shorter one
    activations_begin    an empty one; then the trainer fills in both tables, its adapters, how much scratch, and what
                         else its passes have; and
    activations_measure  knows how many bytes activations_open will take on the device
    activations_open, activations_free   the memory, zeroed
    activations_take     a micro-batch: tokens and targets from the host
    activations_turn     to the slot of another micro-batch: with --pp the forward passes of several are over before the
                         backward pass of the first, and each keeps what backward will need. A pass without gradients
                         goes by activations_turn_to_chunk
    activations_share_text   of generation: one text begins as another does
*/
#ifndef LLMC_ACTIVATIONS_H
#define LLMC_ACTIVATIONS_H
#include "../core/graph.h"         // Graph
#include "../core/tensor_arena.h"  // TensorArena
#include "../ops/dropout.h"        // Dropout
#include "../ops/rope.h"           // RopeTable, rope_table_open
#include "../ranks/model.h"        // Model, Purpose
#include "adapters.h"              // Adapters
#include "expert_layer.h"          // ExpertLayers, ExpertSizes
#include "mtp.h"                   // MtpBatch
#include "token_batch.h"           // TokenBatch

typedef struct {
    int recompute;         // what backward computes again, a level of the trainer; it never changes a bit
    int head_rows;         // positions whose logits exist at once
    EpOptions ep;          // which ranks have which experts
    ArenaSlots slots;      // with --pp: the layers of this rank, and micro-batches that wait for their backward pass
    int numbers;           // that the routers of all layers count in each of them
    const RankGroup* cp;   // with --cp: who has which positions of a batch; NULL: this rank has all
    int gelu_fusion;       // GELU inside the product beside it, unrounded: 0 nowhere, 1 forward, 2 backward too
} Tradeoffs;

typedef struct {
    size_t n;    // elements; 0: no pass needs any
    floatX* at;  // once it is open
} Scratch;

typedef struct {
    Tradeoffs how;
    Model* model;            // whose pass this is, once it is open
    const Adapters* adapters;  // of its linear layers; NULL: it can have none
    int T, N;                // room: positions of a row, and of a pass those of this rank
    int texts;               // rows: of a batch, of the cache
    Purpose purpose;
    TensorArena tensors;     // floatX
    TensorArena statistics;  // what must not lose digits, always float
    Scratch adapter;         // of adapters beside matrices: adapter_scratch_elements
    Scratch parallel;        // of --tp: linear_room_elements, vocabulary_room_elements, what else ranks gather
    Scratch keys;            // of attention with --cp: segment_room_elements
    Scratch rounded;         // of --act-fp8: linear_rounded_elements
    ExpertLayers experts;    // of layers that have some; size.L 0: none has
    float eps;               // of norms by RMS (layer.h),
    int centred;             // whose gain is 1 + their weight, of so many channels at most; 0: it is their weight
    float* gain;             // (centred), of the norm that is computed now
    int rotated;             // channels of a head that turn (rotary_attention.h), 0: none do,
    double theta;            // the slowest by this base
    RopeTable rope;
    int has_states;          // layers carry a state from position to position: the batch marks where documents begin
    int has_mtp;             // a module predicts the token after the next, too
    int entry_ratio[ENTRY_KINDS];  // layers attend to entries of so many tokens (entry_attention.h); 0: none do
    double entry_theta;      // there RoPE has another base,
    const RopeYarn* yarn;    // and these frequencies; NULL: its own
    int has_places;          // attention goes by the places of positions, in all layers
    int entry_before;        // with --cp: rows of keys before those of a chunk (entry_ranks.h)
    EntryPlaces entries;     // sizes: of the rooms that batches have
    RopeTable entry_rope;
    TokenBatch batch;        // of the slot that it is the turn of
    MtpBatch mtp;            // of the same, where there is such a module
    TokenBatch* waiting;     // (slots), of the others
    int slot, n_slots;
    int fresh;               // what layers share is still that of this one, the last that forward went through; -1: of
                             // none, another pass has come in between (layer.h)
    Dropout dropout;         // of this leaf in training, where the trainer has some; all zero: nothing is left out
    float* numbers;          // of a leaf, what routers count, on the device; NULL: nobody asks
    float *counted, *returned;  // with --pp, (slots, how.numbers), before all layers have counted; and when they have
    Graph graph;             // of leaves
} Activations;

// of L layers those that keep what --recompute `level` and above compute again; 0: one buffer serves all
static inline int activations_kept(const Tradeoffs* how, int L, Purpose purpose, int level) {
    return purpose == TO_TRAIN && how->recompute < level ? L : 0;
}

// Of L layers, F wide; the kinds of these, what adapters need, a limit, sequences with a balance: the caller's
static inline ExpertSizes activations_experts(const Tradeoffs* how, int D, int F, RouterShape router, int L) {
    ExpertSizes s;
    memset(&s, 0, sizeof s);
    s.D = D, s.F = F;
    s.router = router;
    s.ep = how->ep, s.cp = how->cp;
    s.L = L;
    return s;
}

// of a pass over B rows of T those of this rank
static inline int activations_positions(const Tradeoffs* how, int B, int T, Purpose purpose) {
    return token_batch_positions(B, T, purpose == TO_GENERATE) / (how->cp ? how->cp->size : 1);
}

// of N positions
static inline int activations_head_rows(const Tradeoffs* how, int B, int N, Purpose purpose) {
    return purpose == TO_GENERATE ? B : N < how->head_rows ? N : how->head_rows;  // the last one of each text
}

// of a pass those of all ranks that share them
static inline int activations_all_(const Activations* acts) {
    return acts->N * (acts->how.cp ? acts->how.cp->size : 1);
}

static inline void activations_begin(Activations* acts, int B, int T, Purpose purpose, Tradeoffs how) {
    memset(acts, 0, sizeof *acts);
    acts->how = how;
    acts->T = T;
    acts->texts = B;
    acts->N = activations_positions(&how, B, T, purpose);
    acts->purpose = purpose;
    acts->n_slots = arena_slots(&how.slots);
    acts->fresh = -1;
}

// the cache of T positions of B texts; in training and evaluation a tensor as others
static inline Tensor cached_activation(const char* name, size_t field, int layers, int rows, int columns) {
    Tensor t = activation(name, field, layers, rows, columns);
    t.is_cache = 1;
    return t;
}

// of states of all texts, each of which has its share of the rows
static inline Tensor state_activation(const char* name, size_t field, int layers, int rows, int columns) {
    Tensor t = activation(name, field, layers, rows, columns);
    t.is_state = 1;
    return t;
}

// of what routers count in all slots, and of what comes back
static inline size_t activations_number_bytes_(const Activations* acts) {
    return sizeof(float) * (size_t)acts->how.numbers * (size_t)(acts->n_slots + 1);
}

static inline size_t activations_gain_bytes_(const Activations* acts) {
    return sizeof(float) * (size_t)acts->centred;
}

// whole packs, as rows of the tables
static inline size_t activations_scratch_elements_(const Scratch* x) {
    return 64 * (size_t)ceil_div((int64_t)x->n, 64);
}

static inline size_t activations_scratch_bytes_(const Activations* acts) {
    return sizeof(floatX) * (activations_scratch_elements_(&acts->adapter) +
                             activations_scratch_elements_(&acts->parallel) +
                             activations_scratch_elements_(&acts->keys) +
                             activations_scratch_elements_(&acts->rounded));
}

// B: rows of the cache, in generation
static inline int activations_texts_(const Activations* acts) {
    return acts->purpose == TO_GENERATE ? acts->texts : 0;
}

static inline double activations_places_bytes_(Activations* acts) {
    if (!acts->has_places) { return 0.0; }
    const double each = entry_places_measure(&acts->entries, acts->entry_ratio, acts->N, activations_texts_(acts),
                                             acts->texts, acts->entry_before);
    return acts->n_slots * each + (acts->entry_theta > 0.0 ? (double)rope_table_bytes(acts->T, acts->rotated) : 0.0);
}

// The tables have so many lines. experts NULL: the model has none; rotated, theta: channels that RoPE turns, its base
static inline double activations_measure(Activations* acts, int n_tensors, int n_statistics, const ExpertSizes* experts,
                                         int rotated, double theta) {
    acts->rotated = rotated;
    acts->theta = theta;
    tensor_arena_layout(&acts->tensors, n_tensors, sizeof(floatX));
    tensor_arena_layout(&acts->statistics, n_statistics, sizeof(float));
    return tensor_arena_divide(&acts->tensors, &acts->how.slots) +
           tensor_arena_divide(&acts->statistics, &acts->how.slots) +
           (!experts ? 0.0 : expert_layers_layout(&acts->experts, experts, acts->N, acts->purpose, &acts->how.slots)) +
           (double)rope_table_bytes(acts->T, rotated) + acts->n_slots * token_batch_bytes(1, activations_all_(acts)) +
           (acts->has_states ? (double)acts->n_slots * activations_all_(acts) : 0.0) +
           (acts->has_mtp ? mtp_batch_bytes(1, activations_all_(acts)) : 0.0) + activations_places_bytes_(acts) +
           (double)activations_gain_bytes_(acts) +
           (double)activations_number_bytes_(acts) + (double)activations_scratch_bytes_(acts);
}

static inline void activations_open_scratch_(Activations* acts) {
    const size_t n_bytes = activations_scratch_bytes_(acts);
    if (n_bytes == 0) { return; }
    acts->adapter.at = (floatX*)device_alloc(n_bytes, "scratch of layers");
    acts->parallel.at = acts->adapter.at + activations_scratch_elements_(&acts->adapter);
    acts->keys.at = acts->parallel.at + activations_scratch_elements_(&acts->parallel);
    acts->rounded.at = acts->keys.at + activations_scratch_elements_(&acts->keys);
}

// RoPE of layers with entries
static inline void activations_open_turns_(Activations* acts, const Device* dev) {
    if (!acts->has_places || acts->entry_theta == 0.0) { return; }
    const size_t n_bytes = sizeof(float) * (size_t)acts->rotated;
    float* frequencies = (float*)malloc_check(n_bytes, "frequencies of RoPE");
    if (acts->yarn) { rope_yarn_frequencies(frequencies, acts->entry_theta, acts->rotated, acts->yarn); }
    else { rope_frequencies(frequencies, acts->entry_theta, acts->rotated); }
    rope_table_init(&acts->entry_rope, frequencies, acts->T, acts->rotated, dev);
    free(frequencies);
}

// m: whose bytes they were, which must outlive them
static inline void activations_open(Activations* acts, Model* m, const Device* dev) {
    acts->model = m;
    tensor_arena_open(&acts->tensors, "activations");
    tensor_arena_open(&acts->statistics, "statistics");
    activations_open_scratch_(acts);
    if (acts->centred > 0) { acts->gain = (float*)device_alloc(activations_gain_bytes_(acts), "gains of norms"); }
    if (acts->experts.size.L > 0) { expert_layers_open(&acts->experts, &m->ranks, acts->N, acts->purpose); }
    if (acts->rotated > 0) { rope_table_open(&acts->rope, acts->theta, acts->T, acts->rotated, dev); }
    activations_open_turns_(acts, dev);
    acts->waiting = token_batches_open(acts->n_slots, 1, activations_all_(acts), acts->how.cp);
    for (int k = 0; k < acts->n_slots && acts->has_places; k++) {
        token_batch_place(&acts->waiting[k], &acts->entries, acts->T);
    }
    for (int k = 0; k < acts->n_slots && acts->has_states; k++) { token_batch_mark_starts(&acts->waiting[k]); }
    if (acts->has_mtp) { mtp_batch_open(&acts->mtp, 1, activations_all_(acts), acts->how.cp); }
    acts->batch = acts->waiting[0];
    if (acts->how.numbers > 0) {
        acts->counted = (float*)device_alloc(activations_number_bytes_(acts), "what routers count");
        acts->returned = acts->counted + (size_t)acts->n_slots * (size_t)acts->how.numbers;
    }
}

// numbers: where its routers count, or NULL
static inline void activations_take(Activations* acts, const int* tokens, const int* targets, float* numbers, int B,
                                    int T, const Device* dev) {
    acts->numbers = numbers;
    token_batch_inputs(&acts->batch, tokens, targets, B, T, 0, dev);
    token_batch_targets(&acts->batch, targets, B * T, dev);
    if (acts->has_mtp) { mtp_batch_take(&acts->mtp, &acts->batch, tokens, targets, B, T, dev); }
}

// of the slot that it is the turn of
static inline float* activations_counted(const Activations* acts) {
    return acts->counted ? acts->counted + (size_t)acts->slot * (size_t)acts->how.numbers : NULL;
}

// What all layers have counted, where backward reads it. has_all: on the last stage, whose layers complete it, and
// from which it goes to the leaf and back to the other stages
static inline float* activations_returned(const Activations* acts, float* of_leaf, int has_all, const Device* dev) {
    const size_t n_bytes = sizeof(float) * (size_t)acts->how.numbers;
    if (n_bytes > 0 && has_all) {
        device_copy(acts->returned, activations_counted(acts), n_bytes, dev);
        device_copy(of_leaf, acts->returned, n_bytes, dev);
    }
    return acts->returned;
}

static inline void activations_turn_tensors_(Activations* acts, int k) {
    acts->slot = k;
    tensor_arena_turn(&acts->tensors, k);
    tensor_arena_turn(&acts->statistics, k);
    tensor_arena_turn(&acts->experts.choices, k);
    acts->fresh = -1;
}

// to slot k
static inline void activations_turn(Activations* acts, int k) {
    if (k == acts->slot) { return; }
    token_batch_turn(&acts->batch, acts->waiting, acts->slot, k);
    activations_turn_tensors_(acts, k);
}

// to the layers of a chunk, for the batch that is at hand; no micro-batch waits
static inline void activations_turn_to_chunk(Activations* acts, int chunk) {
    const int k = arena_chunk_slot(&acts->how.slots, chunk);
    if (k == acts->slot) { return; }
    token_batch_carry(acts->waiting, acts->slot, k);
    activations_turn_tensors_(acts, k);
}

// what an arena keeps of texts
static inline void activations_share_in_(const TensorArena* a, int texts, int room, int to, int from, int n,
                                         const Device* dev) {
    for (int i = 0; i < a->n_table; i++) {
        const Tensor* t = &a->table[i];
        const size_t width = t->stored_bytes * (size_t)t->columns;
        const int each = t->rows / texts;  // of a state
        const int is_kept = (t->is_cache || t->is_state) && t->rows > 0;  // no rows: this pass does without
        for (int l = 0; is_kept && l < t->layers; l++) {
            if (!tensor_has_layer(t, l) || !tensor_is_held(t, l)) { continue; }
            void* x = tensor_arena_at(a, t, l);
            if (t->is_state) { cached_text_copy(x, width, each, to, from, each, dev); }
            else { cached_text_copy(x, width, room, to, from, n, dev); }
        }
    }
}

// the first n positions of row `from` of the cache go to another row, in all layers; states: that row has n
static inline void activations_share_text(const Activations* acts, int to, int from, int n, const Device* dev) {
    activations_share_in_(&acts->tensors, acts->texts, acts->T, to, from, n, dev);
    activations_share_in_(&acts->statistics, acts->texts, acts->T, to, from, n, dev);
}

static inline void activations_free(Activations* acts) {
    tensor_arena_close(&acts->tensors);
    tensor_arena_close(&acts->statistics);
    if (acts->adapter.at) { device_release(acts->adapter.at, activations_scratch_bytes_(acts)); }
    if (acts->gain) { device_release(acts->gain, activations_gain_bytes_(acts)); }
    if (acts->experts.size.L > 0) { expert_layers_close(&acts->experts); }
    rope_table_free(&acts->rope);
    rope_table_free(&acts->entry_rope);
    token_batches_close(acts->waiting, acts->n_slots, &acts->batch, acts->slot);
    if (acts->mtp.next) { mtp_batch_close(&acts->mtp); }
    if (acts->counted) { device_release(acts->counted, activations_number_bytes_(acts)); }
    graph_free(&acts->graph);
}
#endif  // LLMC_ACTIVATIONS_H
