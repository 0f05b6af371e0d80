/*
Data parallel training whose bits do not depend on the number of ranks: which micro-batches ("leaves") a rank computes,
where their gradients go, and what happens until the next step. Chunks of 4096 elements of all tensors that learn, in
table order, are dealt out: of K chunks rank r owns r*K/P .. (r+1)*K/P - 1.
    dp_init, dp_open   who has what; memory for the gradients
    dp_n_leaves, dp_leaf   how many leaves of an update are this rank's, and which is the k-th
    dp_point, dp_loss  where backward writes the gradients of a layer, and forward the sum of the losses of this leaf
    dp_numbers         where a leaf writes its loss and, behind it, what else of it is to be summed: dp_want_numbers
                       says how many, dp_sums has the sums over the leaves of all ranks once dp_reduce is back
    dp_layer_done, dp_leaf_done   told by backward: all gradients of this layer; of this leaf
    dp_divide, dp_turn_to   layers in chunks, each of which has its own leaf at any time: that of the chunk whose turn
                it is, is told, sent and added up. The last chunk has the leaves' numbers
    dp_leaf_arena      what the addresses of a leaf depend on, for those who keep its launches (core/graph.h)
    dp_reduce   the sum over the leaves of all ranks, each part at its owner, added along the tree of leaf_tree.h
    dp_leaf_squares   of each leaf the square of its gradient's norm, where dp_measure asked for it
    dp_norm     owners add the squares of what they own, whole numbers (global_norm.h), and all add these; dp_norms of
                several such owners together
    dp_update   AdamW, or Muon for matrices (muon.h): with --zero 0 each rank on everything, else each on the part it
                owns. Slices of a tensor (its layers) may have had fewer updates than the run. Muon needs --zero 0 or 1,
                and whole matrices: with --zero 1 what directions are made of is gathered, a gradient more to send
    dp_average  the average of the parameters over updates takes in those of now
    dp_exchange_average   parameters and their average change places, and back
    dp_gather   each part from its owner to all: with --zero 0 the reduced gradient, else the new parameters
    dp_slice    a slice of a tensor on rank 0, for a checkpoint; one slice is in memory at a time
What is kept once instead of on every rank: --zero 1: moments and masters; 2: the sums of gradients too.
Frozen: what does not learn has no gradient, no moments and no master. Arenas of these hold the *stretches* of tensors:
        neighbouring layers in each of which something learns. The field for the gradient of a frozen layer is NULL. Of
        the experts of a layer, which lie together, all or none have gradients; of frozen ones among them they are 0.
        The bits of what learns are those of a run in which the gradients of the rest are 0.
Where:  arenas are device memory. `kept` says which part of each stretch the arenas of moments and masters hold,
        `reduced` the same for the arena that dp_reduce returns; every rank of `comm` has the same parameters.
Leaves: --zero 0, 1: each rank a run of leaves; it joins what it can and sends only the few nodes that are left, layer
        by layer during backward of its last leaf. --zero 2: rank r computes leaf k*P + r in its k-th micro-batch and
        sends each layer of each leaf; owners join the P leaves of this round and the nodes of earlier rounds, in the
        order of leaves. Squares of leaves (dp_leaf_squares) are those of their slices that learn, each a sum of its
        own, added in table order: a layer's are computed before it is sent. What a layer has to send is on its way
        while backward computes the layer below.
Chunks: of layers that are told together, with those of other chunks between them, as a rank of interleaved stages has
        them. A stretch is of one chunk, and its part of an arena is written by the leaf of this chunk alone: so one set
        of arenas has the trees of all, and a chunk needs to know no more than how far its own has come.
Memory, per parameter that learns, beside itself: gradients 4 bytes for each arena of the tree (leaf_tree.h), with
        --zero 2 4/P for each and two layers, and tensors of no layer, whole; moments 8, with --zero 1 and 2 8/P.
        Received nodes: DP_BUFFER.
Bytes:  each rank sends n(P-1)/P floats for each node it ends with (--zero 2: each leaf it computes) and n(P-1)/P in
        dp_gather: for one node as much as a ring all-reduce. S leaves on P ranks make one node each when S/P is a power
        of two.
Order:  independent of P: the tree's for gradients and losses; the norm has none; AdamW works element by element.
        P = 1: no copy, no exchange, and --zero is 0.
Source: doc/ranks.md; Rajbhandari et al. 2019, ZeRO, arXiv:1910.02054
*/
#ifndef LLMC_DATA_PARALLEL_H
#define LLMC_DATA_PARALLEL_H
#include "../ops/global_norm.h"  // NormSum, norm_see, norm_add, norm_try
#include "../core/tensor.h"      // Tensor
#include "../ops/weights.h"      // Weights, weights_update
#include "comm.h"                // Comm, comm_all_gather_v
#include "comm_nccl.h"           // comm_exchange_device
#include "leaf_tree.h"           // LeafTree
#include "part.h"                // Part
#include "verify.h"              // Verify, verify_adamw
#include <assert.h>

#ifdef __CUDACC__
enum { DP_BUFFER = 64 << 20 };  // floats for received nodes, two halves; large, for the links between GPUs are fast
#else
enum { DP_BUFFER = 8 << 20 };
#endif
enum { DP_CHUNK = 4096 };  // elements that have one owner

// a node of the tree as one rank ends its leaves with it; with --zero 2 a leaf
typedef struct {
    int rank, k;   // the k-th of that rank
    int n_joins;   // nodes that it joins, one by one, once it lies on the stack
} DpNode;

// Neighbouring layers of a tensor in each of which something learns, or a tensor of no layer that does
typedef struct {
    Part whole;              // as it lies in an arena of everything
    int tensor;
    int slice, n_slices;     // its slices: number `slice` in table order, and those that follow
    int64_t chunk, end;      // its chunks, cut as those of the tensor: chunk .. end - 1
} DpStretch;

// A step through the elements begin .. end - 1 of one stretch, counted in its tensor: of each rank's part of them, the
// elements offset .. offset + length - 1.
typedef struct {
    int stretch;
    size_t begin, end, offset, length;
    float* received;  // node j of those that other ranks have begins at received + j * n, of the n elements that this
                      // rank owns
    float* half;      // of the buffer, in which they lie
    CommTicket ticket;
} DpRound;

// how far the leaves of a chunk have come
typedef struct {
    int next, n_nodes, size[LEAF_TREE_MAX];  // as LeafTree has them
    int n_joined, n_open;                    // as DataParallel does
} DpProgress;

typedef struct {
    Comm* comm;             // NULL: alone
    int rank, size, zero;
    int n_leaves;           // of an update
    const Tensor* table;
    int n_tensors, n_layers;
    int first_before;       // layers from this number on are of a stack before layer 0 (tensor_before)
    const int* frozen;      // of every slice in table order, the trainer's: 1 for what does not learn. NULL: all learn
    Part* whole;            // of each tensor, in an arena of everything
    DpStretch* stretches;
    int n_stretches;
    Part *kept, *reduced;   // of each stretch: see `Where`
    size_t n_kept, n_reduced;  // elements of such arenas
    NormSum* norm;          // on the device
    uint32_t largest;       // of the last norm: what the next one expects (norm_try)
    int measures;           // the leaves of this update are measured
    NormSum* leaf_norms;    // on the device: of each slice of a leaf. NULL until one is measured
    double* leaf_squares;   // of the own leaves
    DpNode* nodes;       // of all ranks, in the order of leaves
    int n_nodes, n_round;   // all of them; that are joined at once: all, with --zero 2 the next leaf of each rank
    int most_nodes;         // of the rank that has most in a round
    int* first_node;        // of each rank in a round, and the end: size + 1
    int n_arenas;           // of the tree
    LeafTree tree;
    int n_numbers;          // of a leaf; the first is its loss
    float* sums;            // (n_numbers) of the last update, on the host
    int n_joined, n_open;   // nodes of the rounds before; what they have left on the stack
    int n_chunks, chunk;    // of layers, 0: all are one; whose turn it is
    int* layer_chunk;       // of each layer
    int rest_chunk;         // of the tensors of no layer
    DpProgress* progress;   // (n_chunks), of those whose turn it is not
    Part* leaf;             // --zero 2: of each stretch two layers, of the leaf that is computed
    float* leaf_grads;
    size_t n_leaf_grads;
    DpRound* pending;    // under way
    int n_pending, room;    // and places for so many
    CommPiece* piece;       // one for each rank
    float* buffer;          // nodes of other ranks, in two halves
    size_t n_buffer;
    float* half;            // the one that is being filled
    size_t* n_used;         // of it, by each rank
} DataParallel;

typedef struct {
    float lr, beta1, beta2, eps, weight_decay, clip;
    int decay_all;   // biases and LayerNorms too
    Verify* verify;  // NULL: the update is computed once
    const int* slice_updates;  // of every slice in table order: its updates with this one, AdamW's t; 0: it stays as
                               // it is, its moments too. NULL: as many as the run
    float momentum;  // of Muon
    void* muon_room; // Muon updates the matrices that it takes (tensor_takes_muon), with this scratch. NULL: AdamW all
} Optimizer;

// ---- 1. Who owns what ----

// chunks of all that learns
static inline int64_t dp_chunks(const DataParallel* s) {
    return s->n_stretches > 0 ? s->stretches[s->n_stretches - 1].end : 0;
}

static inline int64_t dp_cut_(const DataParallel* s, int rank) { return comm_share(dp_chunks(s), rank, s->size); }

// what `rank` owns of stretch i, as it lies in an arena of everything
static inline Part dp_part(const DataParallel* s, int rank, int i) {
    const DpStretch* x = &s->stretches[i];
    const size_t grid = x->whole.first / DP_CHUNK * DP_CHUNK;  // where its first chunk begins
    int64_t from = dp_cut_(s, rank), to = dp_cut_(s, rank + 1);
    from = from < x->chunk ? x->chunk : from > x->end ? x->end : from;
    to = to < x->chunk ? x->chunk : to > x->end ? x->end : to;
    return part_within(x->whole, grid + (size_t)(from - x->chunk) * DP_CHUNK,
                       grid + (size_t)(to - x->chunk) * DP_CHUNK);
}

// of n leaves those of one of `size` ranks
static inline int dp_share_of_leaves(int n, int rank, int size, int zero) {
    if (zero == 2) { return (n - rank + size - 1) / size; }
    return (int)(comm_share(n, rank + 1, size) - comm_share(n, rank, size));
}

static inline int dp_n_leaves_of_(const DataParallel* s, int rank) {
    return dp_share_of_leaves(s->n_leaves, rank, s->size, s->zero);
}

// the k-th leaf of a rank
static inline int dp_leaf_of_(const DataParallel* s, int rank, int k) {
    return s->zero == 2 ? k * s->size + rank : (int)comm_share(s->n_leaves, rank, s->size) + k;
}

static inline int dp_n_leaves(const DataParallel* s) { return dp_n_leaves_of_(s, s->rank); }
static inline int dp_leaf(const DataParallel* s, int k) { return dp_leaf_of_(s, s->rank, k); }

static inline void dp_add_node_(DataParallel* s, int rank, int k, int n_joins) {
    const DpNode node = {rank, k, n_joins};
    s->nodes = (DpNode*)realloc_check(s->nodes, sizeof node * ((size_t)s->n_nodes + 1), "plan of the tree");
    s->nodes[s->n_nodes++] = node;
    s->most_nodes = k + 1 > s->most_nodes ? k + 1 : s->most_nodes;
}

// the nodes of all ranks, and what each joins: pushed in this order they make the root of leaf_tree_finish
static inline void dp_plan_(DataParallel* s) {
    int size[LEAF_TREE_MAX], n = 0;
    for (int rank = 0; rank < s->size; rank++) {
        const int last = (int)comm_share(s->n_leaves, rank + 1, s->size);
        s->first_node[rank] = s->n_nodes;
        for (int lo = (int)comm_share(s->n_leaves, rank, s->size), k = 0; lo < last; k++) {
            int n_joins = 0;
            size[n++] = leaf_node_size(lo, last);
            lo += size[n - 1];
            for (; n > 1 && (lo == s->n_leaves || leaf_nodes_join(size[n - 2], size[n - 1], lo)); n--, n_joins++) {
                size[n - 2] += size[n - 1];
            }
            dp_add_node_(s, rank, k, n_joins);
        }
    }
    s->first_node[s->size] = s->n_round = s->n_nodes;
    s->n_arenas = leaf_tree_depth(dp_leaf(s, 0), dp_leaf(s, 0) + dp_n_leaves(s));
}

// --zero 2: every leaf is a node; between rounds of one leaf per rank the owners keep those that wait for a right half
static inline void dp_plan_rounds_(DataParallel* s) {
    int size[LEAF_TREE_MAX], n = 0;
    s->n_arenas = 1;
    for (int leaf = 0; leaf < s->n_leaves; leaf++) {
        int n_joins = 0, is_last = leaf == s->n_leaves - 1;
        size[n++] = 1;
        for (; n > 1 && (is_last || leaf_nodes_join(size[n - 2], size[n - 1], leaf + 1)); n--, n_joins++) {
            size[n - 2] += size[n - 1];
        }
        dp_add_node_(s, leaf % s->size, 0, n_joins);
        if (leaf % s->size == s->size - 1) { s->n_arenas = n > s->n_arenas ? n : s->n_arenas; }
    }
    s->n_round = s->size;
    for (int rank = 0; rank <= s->size; rank++) { s->first_node[rank] = rank; }
}

static inline size_t dp_leaf_norms_bytes_(const DataParallel* s) {
    return sizeof(NormSum) * (size_t)tensors_slices(s->table, s->n_tensors);
}

// slices k .. end - 1 of tensor i, whose first slice has number `slice` in table order
static inline void dp_add_stretch_(DataParallel* s, int i, int slice, int k, int end) {
    const size_t n = tensor_slice_elements(&s->table[i]);
    const DpStretch* before = s->n_stretches > 0 ? &s->stretches[s->n_stretches - 1] : NULL;
    DpStretch x;
    x.whole = part_within(s->whole[i], n * (size_t)k, n * (size_t)end);
    x.tensor = i;
    x.slice = slice + k;
    x.n_slices = end - k;
    const size_t first = x.whole.first / DP_CHUNK, last = (x.whole.first + x.whole.n - 1) / DP_CHUNK;
    x.chunk = before ? before->end : 0;
    x.end = x.chunk + (int64_t)(last - first) + 1;
    s->stretches = (DpStretch*)realloc_check(s->stretches, sizeof x * ((size_t)s->n_stretches + 1), "table of parts");
    s->stretches[s->n_stretches++] = x;
}

static inline void dp_find_stretches_(DataParallel* s) {
    for (int i = 0, slice = 0; i < s->n_tensors; slice += tensor_slices(&s->table[i++])) {
        const int n_slices = tensor_slices(&s->table[i]), n = tensor_layer_slices(&s->table[i]);
        for (int k = 0, end; k < n_slices; k = end) {
            const int learns = slices_learn(s->frozen, slice + k, n);
            for (end = k + n; end < n_slices && slices_learn(s->frozen, slice + end, n) == learns; end += n) {}
            if (learns) { dp_add_stretch_(s, i, slice, k, end); }
        }
    }
}

// what this rank keeps of each stretch, and with --zero 2 of the gradients of one leaf: of layers two, whose places the
// next ones take in turn
static inline void dp_keep_(DataParallel* s) {
    for (int i = 0; i < s->n_stretches; i++) {
        const Part whole = s->stretches[i].whole;
        const size_t two = 2 * tensor_layer_elements(whole.tensor);
        s->kept[i] = s->zero == 0 ? whole : dp_part(s, s->rank, i);
        s->reduced[i] = s->zero < 2 ? whole : s->kept[i];
        const size_t n_leaf = whole.tensor->layers > 0 && two < whole.n ? two : whole.n;
        s->leaf[i] = part_within(whole, whole.first, whole.first + n_leaf);
    }
    s->n_kept = parts_pack(s->kept, s->n_stretches);
    s->n_reduced = parts_pack(s->reduced, s->n_stretches);
    s->n_leaf_grads = parts_pack(s->leaf, s->n_stretches);
}

// Sizes only: nothing large is allocated. frozen: of every slice in table order, 1 for what does not learn; NULL: all
// learn. The table and this must not change afterwards.
static inline void dp_init(DataParallel* s, Comm* comm, const Tensor* table, int n_tensors, const int* frozen,
                           int n_leaves, int zero) {
    memset(s, 0, sizeof *s);
    s->comm = comm;
    s->rank = comm ? comm->rank : 0;
    s->size = comm ? comm->size : 1;
    s->zero = s->size > 1 ? zero : 0;
    s->n_leaves = n_leaves;
    s->n_numbers = 1;
    s->table = table;
    s->n_tensors = n_tensors;
    s->n_layers = s->first_before = tensors_layers(table, n_tensors);
    for (int i = 0; i < n_tensors; i++) {
        const int first = table[i].is_before && table[i].layers > 0 ? table[i].first_layer : s->n_layers;
        s->first_before = first < s->first_before ? first : s->first_before;
    }
    s->frozen = frozen;
    s->whole = (Part*)malloc_check(sizeof(Part) * (size_t)n_tensors, "table of parts");
    for (int i = 0; i < n_tensors; i++) { s->whole[i] = part_whole(&table[i]); }
    dp_find_stretches_(s);
    s->piece = (CommPiece*)malloc_check(sizeof(CommPiece) * (size_t)s->size, "table of parts");
    s->kept = (Part*)malloc_check(sizeof(Part) * 3 * (size_t)s->n_stretches, "table of parts");
    s->reduced = s->kept + s->n_stretches;
    s->leaf = s->reduced + s->n_stretches;
    s->n_used = (size_t*)malloc_check(sizeof(size_t) * (size_t)s->size, "table of parts");
    s->first_node = (int*)malloc_check(sizeof(int) * ((size_t)s->size + 1), "plan of the tree");
    dp_keep_(s);
    if (s->zero == 2) { dp_plan_rounds_(s); } else { dp_plan_(s); }
}

// After dp_init: layers in n chunks, with layers that do not learn between any two. layer_chunk: of each layer; rest:
// of the tensors of no layer. Each rank has as many leaves as all others
static inline void dp_divide(DataParallel* s, int n, const int* layer_chunk, int rest) {
    const size_t n_bytes = sizeof(int) * (size_t)s->n_layers;
    s->n_chunks = n;
    s->rest_chunk = rest;
    s->layer_chunk = (int*)memcpy(malloc_check(n_bytes, "chunks of layers"), layer_chunk, n_bytes);
    s->progress = (DpProgress*)malloc_check(sizeof(DpProgress) * (size_t)n, "chunks of layers");
    memset(s->progress, 0, sizeof(DpProgress) * (size_t)n);
}

static inline int dp_stretch_chunk_(const DataParallel* s, int i) {
    const Tensor* t = s->stretches[i].whole.tensor;
    const int k = (int)(s->stretches[i].whole.first / tensor_slice_elements(t));
    return t->layers == 0 ? s->rest_chunk : s->layer_chunk[tensor_slice_layer(t, k)];
}

// n numbers of a leaf besides its loss, before dp_open
static inline void dp_want_numbers(DataParallel* s, int n) { s->n_numbers = 1 + n; }

// The elements *begin .. *end - 1 of a tensor belong to this layer, or with -1 to none, and lie in stretch i; returns 0
// where there are none such
static inline int dp_layer_range_(const DataParallel* s, int i, int layer, size_t* begin, size_t* end) {
    const Part whole = s->stretches[i].whole;
    const Tensor* t = whole.tensor;
    const int slice = (t->layers == 0) == (layer < 0) ? tensor_slice(t, layer) : -1;
    *begin = tensor_slice_elements(t) * (size_t)(slice < 0 ? 0 : slice);
    *end = *begin + tensor_layer_elements(t);
    return slice >= 0 && *begin >= whole.first && *end <= whole.first + whole.n;
}

// what `rank` owns of a layer, or with -1 of the tensors that belong to none
static inline size_t dp_layer_part_(const DataParallel* s, int rank, int layer) {
    size_t sum = 0, begin, end;
    for (int i = 0; i < s->n_stretches; i++) {
        if (dp_layer_range_(s, i, layer, &begin, &end)) { sum += part_within(dp_part(s, rank, i), begin, end).n; }
    }
    return sum;
}

// floats for the nodes that come from others: two halves, each for all of a layer, or what the limit allows
static inline size_t dp_buffer(const DataParallel* s) {
    size_t most = 0;
    for (int layer = -1; layer < s->n_layers; layer++) {
        for (int rank = 0; rank < s->size; rank++) {
            const size_t n = dp_layer_part_(s, rank, layer);
            most = n > most ? n : most;
        }
    }
    most = most * 2 * (size_t)s->n_round;
    return s->size == 1 ? 0 : most < DP_BUFFER ? most : (size_t)DP_BUFFER;
}

// bytes of device memory that gradients take, and what the ranks exchange of them
static inline double dp_gradient_bytes(const DataParallel* s) {
    const double of_leaf = s->zero == 2 ? (double)s->n_leaf_grads : 0.0;
    return sizeof(float) * ((double)s->n_arenas * (double)s->n_reduced + (double)dp_buffer(s) + of_leaf);
}

// Bytes of the numbers that leaves count, when they are summed: of the own leaves where they are written and on the
// host, and of several ranks those of all leaves, as they come and in order
static inline double dp_numbers_bytes(const DataParallel* s) {
    const double n = 2.0 * dp_n_leaves(s) + (s->size > 1 ? 2.0 * s->n_leaves : 0.0);
    return sizeof(float) * n * s->n_numbers;
}

// memory for gradients; a GPU's connection to the other ranks
static inline void dp_open(DataParallel* s) {
    leaf_tree_alloc_(&s->tree, s->n_reduced, s->n_arenas, dp_leaf(s, 0), dp_n_leaves(s), s->n_numbers);
    for (int c = 0; c < s->n_chunks; c++) { s->progress[c].next = s->tree.first; }
    s->sums = (float*)malloc_check(sizeof(float) * (size_t)s->n_numbers, "sums of leaves");
    s->norm = (NormSum*)device_alloc(sizeof(NormSum), "the norm");
    if (s->size == 1) { return; }
    s->n_buffer = dp_buffer(s);
    s->buffer = s->half = (float*)device_alloc(sizeof(float) * s->n_buffer, "received gradients");
    if (s->zero == 2) { s->leaf_grads = (float*)device_alloc(sizeof(float) * s->n_leaf_grads, "gradients of a leaf"); }
    comm_device_open(s->comm);
}

static inline void dp_free(DataParallel* s) {
    leaf_tree_free(&s->tree);
    free(s->sums);
    if (s->leaf_norms) { device_release(s->leaf_norms, dp_leaf_norms_bytes_(s)); }
    free(s->leaf_squares);
    if (s->norm) { device_release(s->norm, sizeof(NormSum)); }
    device_release(s->leaf_grads, sizeof(float) * s->n_leaf_grads);
    device_release(s->buffer, sizeof(float) * s->n_buffer);
    free(s->stretches);
    free(s->kept);
    free(s->piece);
    free(s->pending);
    free(s->n_used);
    free(s->whole);
    free(s->nodes);
    free(s->first_node);
    free(s->layer_chunk);
    free(s->progress);
    memset(s, 0, sizeof *s);
}

// ---- 2. From each owner to all ----

// An arena of floats: parts is what it holds of each stretch. NULL: it is that of the stored parameters
static inline void dp_gather(DataParallel* s, void* arena, const Part* parts, const Device* dev) {
    CommTicket last = {0};
    for (int i = 0; i < s->n_stretches && s->size > 1; i++) {
        const Tensor* t = s->stretches[i].whole.tensor;
        const Part own = dp_part(s, s->rank, i);
        const size_t n_bytes = parts ? sizeof(float) : t->stored_bytes;
        // of element 0 of the tensor, if the arena had it
        const size_t first = parts ? parts[i].first : s->stretches[i].whole.first;
        const size_t origin = (parts ? n_bytes * parts[i].at : tensor_stored_place(t, first)) - n_bytes * first;
        for (int rank = 0; rank < s->size; rank++) {
            const Part part = dp_part(s, rank, i);
            CommPiece piece = {(char*)arena + origin + n_bytes * own.first,
                               (char*)arena + origin + n_bytes * part.first, n_bytes * own.n, n_bytes * part.n};
            s->piece[rank] = piece;
        }
        last = comm_exchange_device(s->comm, s->piece, dev, HERE);
    }
    if (s->size > 1) { comm_wait_device(s->comm, last, dev); }
}

// ---- 3. Gradients: along the tree ----

// what `rank` owns of the elements that a round is about
static inline Part dp_reach_(const DataParallel* s, const DpRound* round, int rank) {
    const Part part = part_within(dp_part(s, rank, round->stretch), round->begin, round->end);
    const size_t first = part.first + round->offset;
    return part_within(part, first, first + round->length);
}

// where this rank has element `first` of the tensor of a stretch in its k-th node
static inline float* dp_own_(const DataParallel* s, int k, int stretch, size_t first) {
    const Part leaf = s->leaf[stretch];
    if (s->zero < 2) { return s->tree.arena[k] + part_at(s->reduced[stretch], first); }
    return s->leaf_grads + leaf.at + (first - leaf.first) % leaf.n;
}

// where node number j of a round lies for this rank: with its own gradients, or among those it receives
static inline float* dp_node_(const DataParallel* s, const DpRound* round, int j, Part own) {
    const DpNode* node = &s->nodes[s->n_joined + j];
    const int n_own = s->first_node[s->rank + 1] - s->first_node[s->rank];
    if (node->rank == s->rank) { return dp_own_(s, node->k, round->stretch, own.first); }
    return round->received + (size_t)(node->rank < s->rank ? j : j - n_own) * own.n;
}

// does `rank` have a k-th node in this round? In the last one of --zero 2 some have none
static inline int dp_has_node_(const DataParallel* s, int rank, int k) {
    const int j = s->first_node[rank] + k;
    return j < s->first_node[rank + 1] && s->n_joined + j < s->n_nodes;
}

// every node of this rank goes to the owners, every node of the others comes for the part that is ours
static inline void dp_send_round_(DataParallel* s, DpRound* round, const Device* dev) {
    const Part own = dp_reach_(s, round, s->rank);
    for (int k = 0; k < s->most_nodes; k++) {
        memset(s->piece, 0, sizeof(CommPiece) * (size_t)s->size);
        for (int rank = 0; rank < s->size; rank++) {
            const Part part = dp_reach_(s, round, rank);
            CommPiece* p = &s->piece[rank];
            if (rank == s->rank) { continue; }
            if (dp_has_node_(s, s->rank, k) && part.n > 0) {
                p->send = dp_own_(s, k, round->stretch, part.first);
                p->n_send = sizeof(float) * part.n;
            }
            if (dp_has_node_(s, rank, k) && own.n > 0) {
                p->recv = dp_node_(s, round, s->first_node[rank] + k, own);
                p->n_recv = sizeof(float) * own.n;
            }
        }
        round->ticket = comm_exchange_device(s->comm, s->piece, dev, HERE);
    }
}

// all nodes of the round join those on the stack as the plan says; what is left lies in the arenas of the tree
// afterwards
static inline void dp_finish_round_(DataParallel* s, const DpRound* round, const Device* dev) {
    const Part own = dp_reach_(s, round, s->rank);
    const size_t at = part_at(s->reduced[round->stretch], own.first);
    float* stack[LEAF_TREE_MAX];
    int top = -1;
    comm_wait_device(s->comm, round->ticket, dev);
    while (top + 1 < s->n_open) { top++, stack[top] = s->tree.arena[top] + at; }
    for (int j = 0; j < s->n_round && s->n_joined + j < s->n_nodes && own.n > 0; j++) {
        stack[++top] = dp_node_(s, round, j, own);
        for (int i = 0; i < s->nodes[s->n_joined + j].n_joins; i++, top--) {
            residual_forward(stack[top - 1], stack[top - 1], stack[top], own.n, dev);
        }
    }
    for (int i = 0; i <= top && own.n > 0; i++) {
        if (stack[i] != s->tree.arena[i] + at) {
            device_copy(s->tree.arena[i] + at, stack[i], sizeof(float) * own.n, dev);
        }
    }
}

static inline float* dp_other_half_(const DataParallel* s) {
    return s->half == s->buffer ? s->buffer + s->n_buffer / 2 : s->buffer;
}

// the rounds that lie in this half
static inline void dp_finish_half_(DataParallel* s, const float* half, const Device* dev) {
    int n = 0;
    for (int i = 0; i < s->n_pending; i++) {
        if (s->pending[i].half == half) {
            dp_finish_round_(s, &s->pending[i], dev);
        } else {
            s->pending[n++] = s->pending[i];
        }
    }
    s->n_pending = n;
}

// go on in the other half, which is then free
static inline void dp_turn_(DataParallel* s, const Device* dev) {
    s->half = dp_other_half_(s);
    dp_finish_half_(s, s->half, dev);
    memset(s->n_used, 0, sizeof(size_t) * (size_t)s->size);
}

// is there room on all ranks?
static inline int dp_round_fits_(const DataParallel* s, const DpRound* round) {
    int fits = 1;
    for (int rank = 0; rank < s->size; rank++) {
        fits &= s->n_used[rank] + (size_t)s->n_round * dp_reach_(s, round, rank).n <= s->n_buffer / 2;
    }
    return fits;
}

// elements begin .. end - 1 of a stretch go to their owners, in one round or, where there is no room, in several; they
// are on their way when this returns
static inline void dp_exchange_(DataParallel* s, int stretch, size_t begin, size_t end, const Device* dev) {
    const size_t longest = s->n_buffer / 2 / (size_t)s->n_round;
    size_t most = 0;
    for (int rank = 0; rank < s->size; rank++) {
        size_t n = part_within(dp_part(s, rank, stretch), begin, end).n;
        most = n > most ? n : most;
    }
    for (size_t offset = 0; offset < most; offset += longest) {
        DpRound round = {stretch, begin, end, offset, longest, NULL, NULL, {0}};
        if (!dp_round_fits_(s, &round)) { dp_turn_(s, dev); }
        round.half = s->half;
        round.received = s->half + s->n_used[s->rank];
        for (int rank = 0; rank < s->size; rank++) {
            s->n_used[rank] += (size_t)s->n_round * dp_reach_(s, &round, rank).n;
        }
        dp_send_round_(s, &round, dev);
        if (s->n_pending == s->room) {
            s->room = 2 * s->room + 16;
            s->pending = (DpRound*)realloc_check(s->pending, sizeof round * (size_t)s->room, "rounds");
        }
        s->pending[s->n_pending++] = round;
    }
}

// ---- 4. Micro-batches ----

// from now on the leaf that is computed is that of this chunk
static inline void dp_turn_to(DataParallel* s, int chunk) {
    if (s->n_chunks < 2 || chunk == s->chunk) { return; }
    DpProgress* was = &s->progress[s->chunk];
    const DpProgress* now = &s->progress[chunk];
    LeafTree* tree = &s->tree;
    was->next = tree->next, was->n_nodes = tree->n_nodes, was->n_joined = s->n_joined, was->n_open = s->n_open;
    memcpy(was->size, tree->size, sizeof was->size);
    tree->next = now->next, tree->n_nodes = now->n_nodes, s->n_joined = now->n_joined, s->n_open = now->n_open;
    memcpy(tree->size, now->size, sizeof now->size);
    s->chunk = chunk;
}

// the fields of what learns, as dp_point sets them; the others keep what they hold
static inline void dp_point_learning(DataParallel* s, void* pointers, int layer) {
    size_t begin, end;
    for (int i = 0; i < s->n_stretches; i++) {
        const Tensor* t = s->stretches[i].whole.tensor;
        if (!dp_layer_range_(s, i, t->layers == 0 ? -1 : layer, &begin, &end)) { continue; }
        tensor_set_field_(pointers, t, dp_own_(s, s->tree.n_nodes, i, begin));
    }
}

// Let the fields of `pointers` point to where backward is to write the gradients of the leaf that is computed now: at
// layer `layer` of tensors that have layers. NULL, where nobody asks: nothing of it learns, or the layer lacks it
static inline void dp_point(DataParallel* s, void* pointers, int layer) {
    for (int i = 0; i < s->n_tensors; i++) { tensor_set_field_(pointers, &s->table[i], NULL); }
    dp_point_learning(s, pointers, layer);
}

// the same of tensor i alone
static inline float* dp_gradient_of(DataParallel* s, int i, int layer) {
    size_t begin, end;
    for (int j = 0; j < s->n_stretches; j++) {
        if (s->stretches[j].tensor != i) { continue; }
        if (!dp_layer_range_(s, j, s->table[i].layers == 0 ? -1 : layer, &begin, &end)) { continue; }
        return dp_own_(s, s->tree.n_nodes, j, begin);
    }
    return NULL;
}

// where the sum of this leaf's losses is to be written, on the device; the other numbers that are wanted
static inline float* dp_loss(DataParallel* s) { return leaf_tree_numbers(&s->tree); }
static inline float* dp_numbers(DataParallel* s) { return leaf_tree_numbers(&s->tree) + 1; }

// those of the last update, summed over all leaves, on the host of every rank
static inline const float* dp_sums(const DataParallel* s) { return s->sums + 1; }

// are the gradients of the leaf that is computed now sent as soon as they are there?
static inline int dp_sends_now_(const DataParallel* s) {
    return s->size > 1 && (s->zero == 2 || s->tree.next - s->tree.first == dp_n_leaves(s) - 1);
}

// Leaves for which this is the same write to the same addresses. NULL: layers of this leaf are sent or measured while
// it is computed, and that is more than launches
static inline const float* dp_leaf_arena(const DataParallel* s) {
    return s->measures || dp_sends_now_(s) ? NULL : s->tree.arena[s->tree.n_nodes];
}

// elements begin .. end - 1 of stretch i are there. With --zero 0 and 1 the nodes that this leaf completes are sent
static inline void dp_send_(DataParallel* s, int i, size_t begin, size_t end, const Device* dev) {
    const int has_leaf = dp_n_leaves(s) > 0;
    if (s->zero < 2 && has_leaf) { leaf_tree_add(&s->tree, part_at(s->reduced[i], begin), end - begin, dev); }
    dp_exchange_(s, i, begin, end, dev);
}

// this layer goes while the next is computed; the one before is added up, for with --zero 2 backward needs its place
static inline void dp_send_layer_(DataParallel* s, int layer, const Device* dev) {
    dp_turn_(s, dev);
    for (int i = 0; i < s->n_stretches; i++) {
        size_t begin, end;
        if (dp_layer_range_(s, i, layer, &begin, &end)) { dp_send_(s, i, begin, end, dev); }
    }
    dp_finish_half_(s, dp_other_half_(s), dev);
}

// tensors of no layer, and the end of a round
static inline void dp_send_rest_(DataParallel* s, const Device* dev) {
    dp_turn_(s, dev);
    for (int i = 0; i < s->n_stretches && (s->n_chunks < 2 || s->rest_chunk == s->chunk); i++) {
        size_t begin, end;
        if (dp_layer_range_(s, i, -1, &begin, &end)) { dp_send_(s, i, begin, end, dev); }
    }
    dp_finish_half_(s, dp_other_half_(s), dev);
    dp_finish_half_(s, s->half, dev);
    for (int j = 0; j < s->n_round && s->n_joined < s->n_nodes; j++) {
        s->n_open += 1 - s->nodes[s->n_joined++].n_joins;
    }
}

// from now on until this is called with 0: dp_leaf_squares will be asked for. Before the first leaf of an update
static inline void dp_measure(DataParallel* s, int measures, const Device* dev) {
    s->measures = measures && s->n_stretches > 0;
    if (!s->measures || s->leaf_norms) { return; }
    s->leaf_norms = (NormSum*)device_alloc(dp_leaf_norms_bytes_(s), "norms of a leaf");
    device_zero(s->leaf_norms, dp_leaf_norms_bytes_(s), dev);  // those of what is frozen stay so
    s->leaf_squares = (double*)malloc_check(sizeof(double) * (size_t)dp_n_leaves(s), "squares of leaves");
}

// the norms of a layer of the leaf that is computed, or with -1 of the tensors that belong to none
static inline void dp_measure_layer_(DataParallel* s, int layer, const Device* dev) {
    size_t begin, end;
    for (int i = 0; i < s->n_stretches; i++) {
        const DpStretch* x = &s->stretches[i];
        const size_t n = tensor_slice_elements(x->whole.tensor);
        if (!dp_layer_range_(s, i, layer, &begin, &end)) { continue; }
        for (; begin < end; begin += n) {
            const int slice = x->slice + (int)((begin - x->whole.first) / n);
            const float* g = dp_own_(s, s->tree.n_nodes, i, begin);
            if (slice_is_frozen(s->frozen, slice)) { continue; }
            device_zero(&s->leaf_norms[slice], sizeof(NormSum), dev);
            norm_see(&s->leaf_norms[slice], g, n, dev);
            norm_add(&s->leaf_norms[slice], g, n, dev);
        }
    }
}

// all layers are measured: the square of this leaf
static inline void dp_measure_leaf_(DataParallel* s, const Device* dev) {
    const size_t n_bytes = dp_leaf_norms_bytes_(s);
    double sum = 0.0;
    NormSum* norms = (NormSum*)malloc_check(n_bytes, "norms of a leaf");
    comm_sync_device(s->comm, dev, HERE);
    device_download(norms, s->leaf_norms, n_bytes, dev);
    for (size_t slice = 0; slice < n_bytes / sizeof(NormSum); slice++) { sum += norm_value(&norms[slice]); }
    s->leaf_squares[s->tree.next - s->tree.first] = sum;
    free(norms);
}

// Layers come from the last to the first, and behind layer 0 those of a stack before it, from its last to its first; so
// do they where a rank has no leaf (dp_idle_round_). With --zero 2 the memory of this one is written again two layers
// below
static inline void dp_layer_done(DataParallel* s, int layer, const Device* dev) {
    if (s->measures) { dp_measure_layer_(s, layer, dev); }
    if (dp_sends_now_(s)) { dp_send_layer_(s, layer, dev); }
}

// the leaf of a chunk of layers joins the tree, and nothing of it is sent
static inline void dp_add_chunk_(const DataParallel* s, const Device* dev) {
    for (int i = 0; i < s->n_stretches; i++) {
        const Part part = s->reduced[i];
        if (dp_stretch_chunk_(s, i) == s->chunk) { leaf_tree_add(&s->tree, part.at, part.n, dev); }
    }
}

// all layers of the chunk and, where it has them, the tensors that belong to none
static inline void dp_leaf_done(DataParallel* s, const Device* dev) {
    if (s->measures) {
        dp_measure_layer_(s, -1, dev);
        dp_measure_leaf_(s, dev);
    }
    if (!dp_sends_now_(s) && s->n_chunks < 2) {
        leaf_tree_push(&s->tree, dev);
        return;
    }
    if (dp_sends_now_(s)) { dp_send_rest_(s, dev); } else { dp_add_chunk_(s, dev); }
    if (s->n_chunks < 2 || s->chunk == s->n_chunks - 1) { leaf_tree_keep_numbers(&s->tree, dev); }
    leaf_tree_added(&s->tree);
}

// n numbers of each own leaf become (n_leaves, n) those of each, in the order of leaves
static inline void dp_gather_leaves_(DataParallel* s, void* sorted, const void* own, int n, CommType type) {
    const size_t size = comm_type_bytes(type) * (size_t)n;
    char* all = (char*)malloc_check(size * (size_t)s->n_leaves, "numbers of leaves");
    size_t* counts = (size_t*)malloc_check(sizeof(size_t) * (size_t)s->size, "numbers of leaves");
    size_t before = 0;
    for (int rank = 0; rank < s->size; rank++) {
        counts[rank] = (size_t)dp_n_leaves_of_(s, rank) * (size_t)n;
        before += rank < s->rank ? (size_t)dp_n_leaves_of_(s, rank) : 0;
    }
    memcpy(all + size * before, own, size * (size_t)dp_n_leaves(s));
    if (s->size > 1) { comm_wait(s->comm, comm_all_gather_v(s->comm, all, counts, type, HERE)); }
    const char* next = all;
    for (int rank = 0; rank < s->size; rank++) {
        for (int k = 0; k < dp_n_leaves_of_(s, rank); k++, next += size) {
            memcpy((char*)sorted + size * (size_t)dp_leaf_of_(s, rank, k), next, size);
        }
    }
    free(counts);
    free(all);
}

// the numbers of all leaves, added along the tree
static inline void dp_sum_numbers_(DataParallel* s, const Device* dev) {
    const size_t of_each = sizeof(float) * (size_t)s->n_numbers;
    float* own = (float*)malloc_check(of_each * (size_t)dp_n_leaves(s), "losses");
    float* all = (float*)malloc_check(of_each * (size_t)s->n_leaves, "losses");
    comm_sync_device(s->comm, dev, HERE);
    device_download(own, s->tree.numbers, of_each * (size_t)dp_n_leaves(s), dev);
    dp_gather_leaves_(s, all, own, s->n_numbers, DT_F32);
    leaf_tree_sums(s->sums, all, s->n_leaves, s->n_numbers);
    free(own);
    free(all);
}

// squares (n_leaves) of the norms of the gradients of all leaves of this update, for which dp_measure asked. All ranks
// call, after dp_reduce
static inline void dp_leaf_squares(DataParallel* s, double* squares) {
    dp_gather_leaves_(s, squares, s->leaf_squares, 1, DT_F64);
}

// a rank without a leaf (in the last round, with --zero 2) still owns a part of what the others have
static inline void dp_idle_round_(DataParallel* s, const Device* dev) {
    for (int layer = s->first_before - 1; layer >= 0; layer--) { dp_send_layer_(s, layer, dev); }
    for (int layer = s->n_layers - 1; layer >= s->first_before; layer--) { dp_send_layer_(s, layer, dev); }
    dp_send_rest_(s, dev);
}

// the gradients of frozen slices beside others that learn, which count neither in the norm nor as not finite
static inline void dp_clear_frozen_(const DataParallel* s, float* grads, const Device* dev) {
    for (int i = 0; i < s->n_stretches; i++) {
        const DpStretch* x = &s->stretches[i];
        for (int k = 0; k < x->n_slices; k++) {
            const size_t n = tensor_slice_elements(x->whole.tensor), first = x->whole.first + n * (size_t)k;
            const Part part = part_within(s->reduced[i], first, first + n);
            if (part.n == 0 || !slice_is_frozen(s->frozen, x->slice + k)) { continue; }
            device_zero(grads + part.at, sizeof(float) * part.n, dev);
        }
    }
}

// of a rank among others
static inline float* dp_join_(DataParallel* s, const Device* dev) {
    if (s->n_joined < s->n_nodes) { dp_idle_round_(s, dev); }
    assert(s->n_joined == s->n_nodes && s->n_open == 1);
    leaf_tree_clear(&s->tree);
    if (s->zero == 0) { dp_gather(s, s->tree.arena[0], s->reduced, dev); }
    dp_sum_numbers_(s, dev);
    return s->tree.arena[0];
}

static inline void dp_check_done_(const DataParallel* s) {
    const int n_done = s->tree.next - s->tree.first;
    if (n_done != dp_n_leaves(s)) {
        fail_run("backward: %d leaves were begun, dp_leaf_done was called %d times", dp_n_leaves(s), n_done);
    }
}

// The sum over the leaves of all ranks, of numbers and gradient: an arena of the parts `reduced`, of which those that
// this rank owns are right. The tree is empty again.
static inline float* dp_reduce(DataParallel* s, float* loss, const Device* dev) {
    for (int c = 0; c < s->n_chunks; c++) {
        dp_turn_to(s, c);
        dp_check_done_(s);
    }
    dp_check_done_(s);  // all chunks have come as far now, and have nodes of the same sizes
    float* grads = s->size == 1 ? leaf_tree_finish(&s->tree, s->sums, dev) : dp_join_(s, dev);
    *loss = s->sums[0];
    s->n_joined = s->n_open = 0;
    for (int c = 0; c < s->n_chunks; c++) {
        DpProgress* x = &s->progress[c];
        x->next = s->tree.next, x->n_nodes = x->n_joined = x->n_open = 0;
    }
    dp_clear_frozen_(s, grads, dev);
    return grads;
}

// the name of the first slice whose gradient holds a NaN or an infinity, for messages; all ranks call
static inline const char* dp_first_bad(DataParallel* s, char* name, size_t n_bytes, const float* grads,
                                       const Device* dev) {
    enum { PIECE = 1 << 20 };
    int64_t first = INT64_MAX;  // stretch << 40 | element of its tensor
    float* room = (float*)malloc_check(sizeof(float) * PIECE, "gradients");
    for (int i = 0; i < s->n_stretches && first == INT64_MAX; i++) {
        const Part own = dp_part(s, s->rank, i);
        for (size_t from = 0; from < own.n && first == INT64_MAX; from += PIECE) {
            const size_t n = own.n - from < PIECE ? own.n - from : (size_t)PIECE;
            size_t j = 0;
            device_download(room, grads + part_at(s->reduced[i], own.first + from), sizeof(float) * n, dev);
            while (j < n && isfinite(room[j])) { j++; }
            if (j < n) { first = (int64_t)i << 40 | (int64_t)(own.first + from + j); }
        }
    }
    if (s->size > 1) { comm_all_reduce(s->comm, &first, 1, DT_I64, OP_MIN, HERE); }
    free(room);
    if (first == INT64_MAX) { return "none"; }
    const Tensor* t = s->stretches[first >> 40].whole.tensor;
    const int64_t element = first & (((int64_t)1 << 40) - 1);
    return tensor_slice_name(name, n_bytes, t, (int)(element / (int64_t)tensor_slice_elements(t)));
}

// ---- 5. Norm and update ----

// an owner of gradients, and the arena that dp_reduce has returned
typedef struct {
    DataParallel* dp;
    const float* grads;
} DpGradients;

// the NormSum of each rank: all of them, joined
static inline NormSum dp_norm_join_(Comm* world, NormSum own) {
    NormSum* all = (NormSum*)malloc_check(sizeof own * (size_t)world->size, "norms of ranks");
    comm_wait(world, comm_all_gather(world, &own, all, sizeof own, DT_U8, HERE));
    NormSum sum = all[0];
    for (int rank = 1; rank < world->size; rank++) { norm_join(&sum, &all[rank]); }
    free(all);
    return sum;
}

// `pass`, norm_try or norm_add, goes over what this rank owns and adds to `own`. What all ranks have found
static inline NormSum dp_norm_pass_(Comm* world, NormSum own,
                                    void (*pass)(NormSum*, const float*, size_t, const Device*),
                                    const DpGradients* of, int n, const Device* dev) {
    NormSum* room = of[0].dp->norm;
    device_upload(room, &own, sizeof own, dev);
    for (int k = 0; k < n; k++) {
        const DataParallel* s = of[k].dp;
        const float *begin = NULL, *end = NULL;  // neighbours in memory make one pass: few tensors fill a GPU
        for (int i = 0; i < s->n_stretches; i++) {
            const Part part = dp_part(s, s->rank, i);
            if (part.n == 0 || part.tensor->is_copy) { continue; }
            const float* g = of[k].grads + part_at(s->reduced[i], part.first);
            if (g != end) {
                pass(room, begin, (size_t)(end - begin), dev);
                begin = g;
            }
            end = g + part.n;
        }
        pass(room, begin, (size_t)(end - begin), dev);
    }
    comm_sync_device(world, dev, HERE);
    device_download(&own, room, sizeof own, dev);
    return world ? dp_norm_join_(world, own) : own;
}

// Euclidean norm over the gradients of n owners, each element being owned by one rank of `world`, whose ranks all call,
// but for those of copies (tensor_hold_part). NULL: alone
static inline float dp_norms(Comm* world, const DpGradients* of, int n, const Device* dev) {
    NormSum sum = dp_norm_pass_(world, norm_sum_expecting(of[0].dp->largest), norm_try, of, n, dev);
    of[0].dp->largest = sum.largest;
    if (!norm_is_done(&sum)) {
        norm_restart(&sum);
        sum = dp_norm_pass_(world, sum, norm_add, of, n, dev);
    }
    return (float)sqrt(norm_value(&sum));
}

static inline float dp_norm(DataParallel* s, const float* grads, const Device* dev) {
    const DpGradients one = {s, grads};
    return dp_norms(s->comm, &one, 1, dev);
}

// what dp_norms sends, in bytes; twice as much where the largest gradient has another exponent than the last one's
static inline double dp_norm_bytes(const Comm* world) {
    return world ? sizeof(NormSum) * (world->size - 1.0) : 0.0;
}

// updates of a slice with this one, number t of the run; 0: none now
static inline int dp_count_(const DataParallel* s, const Optimizer* o, int slice, int t) {
    return slice_is_frozen(s->frozen, slice) ? 0 : o->slice_updates ? o->slice_updates[slice] : t;
}

// AdamW on a part of stretch i; `key` is that of the noise
static inline void dp_update_part_(const DataParallel* s, const Weights* w, const float* grads, int i, Part part,
                                   const Optimizer* o, const AdamW* step, uint32_t key, const Device* dev) {
    const Tensor* tensor = part.tensor;
    const float decay = tensor->decay == DECAY || o->decay_all ? o->weight_decay : 0.0f;
    const float* g = grads + part_at(s->reduced[i], part.first);
    const ElementNumbers numbers = tensor_numbers(tensor, part.first);
    const Weights own = weights_from(w, tensor, part.first, part.at);
    if (o->verify) { verify_adamw(o->verify, tensor, part.first, part.n, &own, g, decay, step, key, dev); }
    else { weights_update(&own, g, part.n, decay, step, key, numbers, dev); }
}

// slices k .. end - 1 of stretch i, counted from its first, as far as this rank keeps them
static inline Part dp_kept_slices_(const DataParallel* s, int i, int k, int end) {
    const Part whole = s->stretches[i].whole;
    const size_t n = tensor_slice_elements(whole.tensor);
    return part_within(s->kept[i], whole.first + n * (size_t)k, whole.first + n * (size_t)end);
}

// a stretch, of which neighbours with the same count go together
static inline void dp_update_stretch_(const DataParallel* s, const Weights* w, const float* grads, int i,
                                      const Optimizer* o, float scale, int t, const Device* dev) {
    const int slice = s->stretches[i].slice, n_slices = s->stretches[i].n_slices;
    for (int k = 0, end; k < n_slices; k = end) {
        const int count = dp_count_(s, o, slice + k, t);
        for (end = k + 1; end < n_slices && dp_count_(s, o, slice + end, t) == count; end++) {}
        const Part part = dp_kept_slices_(s, i, k, end);
        if (part.n == 0 || count == 0) { continue; }
        const AdamW step = adamw_step(o->lr, o->beta1, o->beta2, o->eps, scale, count);
        dp_update_part_(s, w, grads, i, part, o, &step, (uint32_t)t, dev);
    }
}

// ---- Muon: with --zero 0 every rank computes all directions, with --zero 1 those of which it keeps something ----

static inline int dp_has_muon_(const DataParallel* s, const Optimizer* o, int i) {
    return o->muon_room && tensor_takes_muon(s->stretches[i].whole.tensor);
}

// the moments that this rank keeps of stretch i; in the place of its gradient comes what directions are made of
static inline void dp_muon_moments_(const DataParallel* s, const Weights* w, float* grads, int i, const Optimizer* o,
                                    const Muon* u, int t, const Device* dev) {
    for (int k = 0; k < s->stretches[i].n_slices; k++) {
        const Part part = dp_kept_slices_(s, i, k, k + 1);
        if (part.n == 0 || dp_count_(s, o, s->stretches[i].slice + k, t) == 0) { continue; }
        float* g = grads + part_at(s->reduced[i], part.first);
        muon_momentum(g, w->m + part.at, g, part.n, u, dev);
    }
}

// matrix by matrix, once that is whole
static inline void dp_muon_stretch_(const DataParallel* s, const Weights* w, const float* grads, int i,
                                    const Optimizer* o, const Muon* u, int t, const Device* dev) {
    const Part whole = s->stretches[i].whole;
    const Tensor* tensor = whole.tensor;
    const int rows = tensor_muon_rows(tensor);
    const size_t n = (size_t)rows * (size_t)tensor->columns;
    for (size_t first = whole.first; first < whole.first + whole.n; first += n) {
        const Part part = part_within(s->kept[i], first, first + n);
        const int slice = s->stretches[i].slice + (int)((first - whole.first) / tensor_slice_elements(tensor));
        if (part.n == 0 || dp_count_(s, o, slice, t) == 0) { continue; }
        const Weights own = weights_from(w, tensor, part.first, part.at);
        weights_muon(&own, grads + part_at(s->reduced[i], first), part.first - first, part.n, rows, tensor->columns,
                     o->weight_decay, u, (uint32_t)t, tensor_numbers(tensor, part.first), o->muon_room, dev);
    }
}

// grads: what dp_reduce has returned
static inline void dp_update_muon_(DataParallel* s, const Weights* w, const float* grads, const Optimizer* o,
                                   float scale, int t, const Device* dev) {
    const Muon u = {o->lr, o->momentum, scale};
    float* x = s->tree.arena[0];
    assert(x == grads && s->zero < 2);
    for (int i = 0; i < s->n_stretches; i++) {
        if (dp_has_muon_(s, o, i)) { dp_muon_moments_(s, w, x, i, o, &u, t, dev); }
    }
    if (s->zero == 1) { dp_gather(s, x, s->reduced, dev); }
    for (int i = 0; i < s->n_stretches; i++) {
        if (dp_has_muon_(s, o, i)) { dp_muon_stretch_(s, w, x, i, o, &u, t, dev); }
    }
}

// clip to the norm, then AdamW, or Muon, which writes over the gradients; t counts updates from 1 and is the key of the
// noise with which bf16 is rounded. Afterwards the stored parameters are those of one rank, on every rank.
static inline void dp_update(DataParallel* s, const Weights* w, const float* grads, float norm, const Optimizer* o,
                             int t, const Device* dev) {
    float scale = o->clip > 0.0f && norm > o->clip ? o->clip / norm : 1.0f;
    for (int i = 0; i < s->n_stretches; i++) {
        if (!dp_has_muon_(s, o, i)) { dp_update_stretch_(s, w, grads, i, o, scale, t, dev); }
    }
    if (o->muon_room) { dp_update_muon_(s, w, grads, o, scale, t, dev); }
    if (s->zero > 0) { dp_gather(s, w->stored, NULL, dev); }
}

// Slice k of stretch i, counted from its first, as far as this rank keeps it, and the weights from there on; an empty
// part where it does not learn
static inline Part dp_kept_weights_(const DataParallel* s, const Weights* w, int i, int k, Weights* own) {
    Part part = dp_kept_slices_(s, i, k, k + 1);
    if (slice_is_frozen(s->frozen, s->stretches[i].slice + k)) { part.n = 0; }
    *own = weights_from(w, part.tensor, part.first, part.at);
    return part;
}

// average: an arena of kept parts, as moments are; weight: of what the parameters are now (ema.h)
static inline void dp_average(const DataParallel* s, const Weights* w, float* average, float weight,
                              const Device* dev) {
    for (int i = 0; i < s->n_stretches; i++) {
        for (int k = 0; k < s->stretches[i].n_slices; k++) {
            Weights own;
            const Part part = dp_kept_weights_(s, w, i, k, &own);
            if (part.n > 0) { weights_average(&own, average + part.at, part.n, weight, dev); }
        }
    }
}

// The stored parameters become the average, or with `back` what they were after update t. Floats change places with it;
// what is rounded from masters is rounded from the average as from them, and anew
static inline void dp_exchange_average(DataParallel* s, const Weights* w, float* average, int back, int t,
                                       const Device* dev) {
    for (int i = 0; i < s->n_stretches; i++) {
        for (int k = 0; k < s->stretches[i].n_slices; k++) {
            Weights own;
            const Part part = dp_kept_weights_(s, w, i, k, &own);
            const ElementNumbers numbers = tensor_numbers(part.tensor, part.first);
            if (part.n == 0) { continue; }
            if (!w->master) { ema_exchange(average + part.at, (float*)own.stored, part.n, dev); continue; }
            if (!back) { own.master = average + part.at; }
            weights_round(&own, part.n, (uint32_t)t, numbers, dev);
        }
    }
    if (s->zero > 0) { dp_gather(s, w->stored, NULL, dev); }
}

// what --verify-every looks at
static inline void dp_verify(const DataParallel* s, Verify* v, const Weights* w) {
    verify_init(v);
    verify_watch(v, VERIFY_PARAMETERS, w->stored, s->whole, s->n_tensors);
    verify_watch(v, VERIFY_MASTERS, w->master, s->kept, s->n_stretches);
    verify_watch(v, VERIFY_MOMENTS_1, w->m, s->kept, s->n_stretches);
    verify_watch(v, VERIFY_MOMENTS_2, w->v, s->kept, s->n_stretches);
    verify_watch(v, VERIFY_GRADIENTS, NULL, s->reduced, s->n_stretches);
}

// ---- 6. For checkpoints and for the box at the start ----

// the stretch that has slice k of tensor i; -1: it does not learn
static inline int dp_stretch(const DataParallel* s, int i, int k) {
    const size_t first = tensor_slice_elements(&s->table[i]) * (size_t)k;
    for (int j = 0; j < s->n_stretches; j++) {
        const DpStretch* x = &s->stretches[j];
        if (x->tensor != i || first < x->whole.first || first >= x->whole.first + x->whole.n) { continue; }
        const int from = (int)(x->whole.first / tensor_slice_elements(&s->table[i]));
        return slice_is_frozen(s->frozen, x->slice + (k - from)) ? -1 : j;
    }
    return -1;
}

// where the gradient of a slice that learns lies in the arena that dp_reduce returns, with --zero 0 and 1
static inline size_t dp_gradient_at(const DataParallel* s, int i, int k) {
    const int j = dp_stretch(s, i, k);
    assert(j >= 0 && s->zero < 2);
    return part_at(s->reduced[j], tensor_slice_elements(&s->table[i]) * (size_t)k);
}

// Slice k of tensor i, which learns, of an arena of kept parts: on rank 0 the whole slice comes back, in the arena or
// in `slice`; the others send theirs and get NULL. All ranks call, with room for a slice on the host. dev NULL: the
// arena is host memory.
static inline const float* dp_slice(DataParallel* s, const float* arena, int i, int k, float* slice,
                                    const Device* dev) {
    const size_t n = tensor_slice_elements(&s->table[i]), first = n * (size_t)k;
    const int j = dp_stretch(s, i, k);
    assert(j >= 0);
    const Part own = part_within(s->kept[j], first, first + n);
    const float* from = arena + own.at;
    if (dev && own.n > 0) {
        device_download(slice + (own.first - first), from, sizeof(float) * own.n, dev);
        from = slice + (own.first - first);
    }
    if (s->zero == 0) { return s->rank == 0 ? from : NULL; }
    memset(s->piece, 0, sizeof(CommPiece) * (size_t)s->size);
    s->piece[0].send = from;
    s->piece[0].n_send = sizeof(float) * own.n;
    for (int rank = 0; rank < s->size && s->rank == 0; rank++) {
        const Part part = part_within(dp_part(s, rank, j), first, first + n);
        s->piece[rank].recv = slice + (part.first - first);
        s->piece[rank].n_recv = sizeof(float) * part.n;
    }
    comm_wait(s->comm, comm_exchange(s->comm, s->piece, HERE));
    return s->rank == 0 ? slice : NULL;
}

// what this rank sends in one update, in bytes, besides the norm
static inline double dp_bytes(const DataParallel* s) {
    const double n_leaves = dp_n_leaves(s), n_ends = s->first_node[s->rank + 1] - s->first_node[s->rank];
    const double n_nodes = s->zero == 2 ? n_leaves : n_ends;
    double n = 0.0, own = 0.0;
    for (int i = 0; i < s->n_stretches; i++) {
        n += (double)s->stretches[i].whole.n;
        own += (double)dp_part(s, s->rank, i).n;
    }
    return n_nodes * 4.0 * (n - own) + (s->size - 1.0) * (4.0 * own + 4.0 * s->n_numbers * n_leaves);
}
#endif  // LLMC_DATA_PARALLEL_H
