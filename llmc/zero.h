/*
Data parallel training whose bits do not depend on the number of ranks: what happens between the gradients of the leaves and
the next step. Chunks of 4096 elements (those of global_norm.h) of all trained tensors, in table order, are dealt out: of K
chunks rank r owns r*K/P .. (r+1)*K/P - 1.
    shards_reduce   every rank ends its leaves with a few nodes of the tree (leaf_tree.h). Each sends, of each node, to every
                    owner the part that it owns; the owner finishes the tree there, in the order of leaves
    shards_norm     owners compute the sums of their chunks; all get them and add them in order
    shards_update   AdamW: with --zero 1 each rank on the part it owns, with 0 on everything
    shards_gather   with --zero 1 the new parameters, with 0 the reduced gradient: each part from its owner to all
    shards_slice    a slice of a tensor on rank 0, for a checkpoint; one slice is in memory at a time
Memory, per parameter, beside 4 bytes for itself and 4 for each arena of the tree: 8 for the moments, with --zero 1 8/P;
their arenas are whole, but pages that a rank never touches cost nothing. Received nodes: 32 MiB at most.
Bytes:  with one node per rank each sends n(P-1)/P floats in shards_reduce and as many in shards_gather, as a ring all-reduce.
        S leaves on P ranks make one node each when S/P is a power of two, a few otherwise.
Order:  independent of P: the tree's for gradients and losses, table order for the norm; AdamW works element by element.
        P = 1: no copy, no exchange.
--zero 2 is not offered: it would keep only the owned part of a gradient, but backward fills whole arenas leaf by leaf, so
nothing would be saved; it needs a backward that hands over each layer's gradient when it is done.
Source: spec/parallel.md 3.3, 3.4, 4; Rajbhandari et al. 2019, ZeRO, arXiv:1910.02054
*/
#ifndef LLMC_ZERO_H
#define LLMC_ZERO_H
#include "adamw.h"        // adamw_step, adamw_update
#include "comm.h"         // Comm, comm_exchange
#include "global_norm.h"  // chunk_sums_of_squares, NORM_CHUNK
#include "leaf_tree.h"    // LeafTree
#include "tensor.h"       // Tensor
#include "verify.h"       // Verify, verify_adamw
#include <assert.h>

enum { SHARDS_BUFFER = 8 << 20 };  // floats for received nodes, two halves

// a node of the tree as one rank ends its leaves with it
typedef struct {
    int rank, k;   // the k-th of that rank
    int n_joins;   // nodes that it joins, one by one, once it lies on the stack
} ShardNode;

typedef struct {
    Comm* comm;             // NULL: alone
    int rank, size, zero;
    CommShare own_leaves;   // of this rank
    ShardNode* nodes;       // of all ranks, in the order of leaves
    int n_nodes, most_nodes;  // in all; of the rank that has most
    int* first_node;        // of each rank, and the end: size + 1
    const Tensor* table;
    int n_tensors;
    int64_t* first_chunk;   // of each tensor, and the end: n_tensors + 1
    double* chunk_sums;     // all of them
    CommPiece* piece;       // one for each rank
    float* buffer;          // nodes of other ranks
    size_t n_buffer;
} Shards;

typedef struct {
    float lr, beta1, beta2, eps, weight_decay, clip;
    int decay_all;   // biases and LayerNorms too
    Verify* verify;  // NULL: the update is computed once
} Optimizer;

// ---- 1. Who owns what ----

static inline int64_t shards_chunks_(const Shards* s) { return s->first_chunk[s->n_tensors]; }
static inline int64_t shards_cut_(const Shards* s, int rank) { return comm_share(shards_chunks_(s), rank, s->size); }

// the nodes of all ranks, and what each joins: pushed in this order they make the root of leaf_tree_finish
static inline void shards_plan_(Shards* s, int n_leaves) {
    int size[LEAF_TREE_MAX], n = 0;
    s->first_node = (int*)malloc_check(sizeof(int) * ((size_t)s->size + 1), "plan of the tree");
    for (int rank = 0; rank < s->size; rank++) {
        const int last = (int)comm_share(n_leaves, rank + 1, s->size);
        s->first_node[rank] = s->n_nodes;
        for (int lo = (int)comm_share(n_leaves, rank, s->size), k = 0; lo < last; k++) {
            size[n++] = leaf_node_size(lo, last);
            lo += size[n - 1];
            ShardNode node = {rank, k, 0};
            for (; n > 1 && (lo == n_leaves || leaf_nodes_join(size[n - 2], size[n - 1], lo)); n--) {
                size[n - 2] += size[n - 1];
                node.n_joins++;
            }
            s->nodes = (ShardNode*)realloc_check(s->nodes, sizeof(ShardNode) * ((size_t)s->n_nodes + 1), "plan of the tree");
            s->nodes[s->n_nodes++] = node;
            s->most_nodes = k + 1 > s->most_nodes ? k + 1 : s->most_nodes;
        }
    }
    s->first_node[s->size] = s->n_nodes;
}

// frozen tensors have no chunks; the table must not change afterwards
static inline void shards_init(Shards* s, Comm* comm, const Tensor* table, int n_tensors, int n_leaves, int zero) {
    memset(s, 0, sizeof *s);
    s->comm = comm;
    s->rank = comm ? comm->rank : 0;
    s->size = comm ? comm->size : 1;
    s->zero = zero;
    s->table = table;
    s->n_tensors = n_tensors;
    s->first_chunk = (int64_t*)malloc_check(sizeof(int64_t) * ((size_t)n_tensors + 1), "table of shards");
    s->first_chunk[0] = 0;
    for (int i = 0; i < n_tensors; i++) {
        int64_t n_chunks = table[i].frozen ? 0 : ceil_div((int64_t)tensor_elements(&table[i]), NORM_CHUNK);
        s->first_chunk[i + 1] = s->first_chunk[i] + n_chunks;
    }
    s->chunk_sums = (double*)malloc_check(sizeof(double) * (size_t)shards_chunks_(s), "chunk sums");
    s->piece = (CommPiece*)malloc_check(sizeof(CommPiece) * (size_t)s->size, "table of shards");
    s->own_leaves.first = (int)comm_share(n_leaves, s->rank, s->size);
    s->own_leaves.end = (int)comm_share(n_leaves, s->rank + 1, s->size);
    shards_plan_(s, n_leaves);
}

static inline void shards_free(Shards* s) {
    free(s->first_chunk);
    free(s->chunk_sums);
    free(s->piece);
    free(s->nodes);
    free(s->first_node);
    arena_free(s->buffer, sizeof(float) * s->n_buffer);
    memset(s, 0, sizeof *s);
}

typedef struct {
    size_t first, n;  // elements of a tensor
} Part;

// what `rank` owns of tensor i
static inline Part shards_part(const Shards* s, int rank, int i) {
    const int64_t begin = s->first_chunk[i], end = s->first_chunk[i + 1];
    int64_t from = shards_cut_(s, rank), to = shards_cut_(s, rank + 1);
    from = from < begin ? begin : from > end ? end : from;
    to = to < begin ? begin : to > end ? end : to;
    const size_t n_elements = tensor_elements(&s->table[i]);
    Part part = {(size_t)(from - begin) * NORM_CHUNK, 0};
    size_t last = (size_t)(to - begin) * NORM_CHUNK;
    if (from < to) { part.n = (last < n_elements ? last : n_elements) - part.first; }
    return part;
}

// what this rank keeps of the moments of tensor i; those of a frozen one, if there are any, wait on rank 0
static inline Part shards_kept(const Shards* s, int i) {
    const Part all = {0, tensor_elements(&s->table[i])}, none = {0, 0};
    if (s->zero == 0 || s->size == 1) { return all; }
    return !s->table[i].frozen ? shards_part(s, s->rank, i) : s->rank == 0 ? all : none;
}

// floats for the nodes that come from others: two rounds of the largest part, or what the limit allows
static inline size_t shards_buffer(const Shards* s) {
    size_t most = 0;
    for (int i = 0; i < s->n_tensors * s->size; i++) {
        size_t n = shards_part(s, i % s->size, i / s->size).n;
        most = n > most ? n : most;
    }
    most = most * 2 * (size_t)s->n_nodes;
    return s->size == 1 ? 0 : most < SHARDS_BUFFER ? most : (size_t)SHARDS_BUFFER;
}

// ---- 2. From each owner to all ----

static inline void shards_gather(Shards* s, float* arena) {
    CommTicket last = {0};
    for (int i = 0; i < s->n_tensors && s->size > 1; i++) {
        float* tensor = arena + s->table[i].offset;
        const Part own = shards_part(s, s->rank, i);
        if (s->table[i].frozen) { continue; }
        for (int rank = 0; rank < s->size; rank++) {
            Part part = shards_part(s, rank, i);
            CommPiece piece = {tensor + own.first, tensor + part.first, sizeof(float) * own.n, sizeof(float) * part.n};
            s->piece[rank] = piece;
        }
        last = comm_exchange(s->comm, s->piece, HERE);
    }
    if (s->size > 1) { comm_wait(s->comm, last); }
}

// ---- 3. Gradients: along the tree ----

// a step through the parts of one tensor: of each part the elements offset .. offset + length - 1
typedef struct {
    int tensor;
    size_t offset, length;
    float* received;  // node j of those that other ranks have begins at received + j * length
    CommTicket ticket;
} ShardRound;

static inline size_t shards_overlap_(const ShardRound* round, size_t n) {
    size_t rest = n > round->offset ? n - round->offset : 0;
    return rest < round->length ? rest : round->length;
}

// the first trained tensor from i on
static inline int shards_trained_(const Shards* s, int i) {
    while (i < s->n_tensors && s->table[i].frozen) { i++; }
    return i;
}

// the round after this one; its tensor is n_tensors when there is none
static inline ShardRound shards_next_round_(const Shards* s, ShardRound round) {
    size_t most = 0;
    for (int rank = 0; rank < s->size; rank++) {
        size_t n = shards_part(s, rank, round.tensor).n;
        most = n > most ? n : most;
    }
    round.received = round.received == s->buffer ? s->buffer + s->n_buffer / 2 : s->buffer;
    round.offset += round.length;
    if (round.offset >= most) {
        round.offset = 0;
        round.tensor = shards_trained_(s, round.tensor + 1);
    }
    return round;
}

// where node number j lies for this rank: in its own arena, or among those it receives
static inline float* shards_node_(const Shards* s, const LeafTree* tree, const ShardRound* round, int j) {
    const ShardNode* node = &s->nodes[j];
    const size_t own = s->table[round->tensor].offset + shards_part(s, s->rank, round->tensor).first + round->offset;
    if (node->rank == s->rank) { return tree->arena[node->k] + own; }
    int n_before = node->rank < s->rank ? j : j - (s->first_node[s->rank + 1] - s->first_node[s->rank]);
    return round->received + (size_t)n_before * round->length;
}

// every node of this rank goes to the owners, every node of the others comes for the part that is ours
static inline void shards_send_round_(Shards* s, const LeafTree* tree, ShardRound* round) {
    const size_t base = s->table[round->tensor].offset + round->offset;
    const size_t n_own = shards_overlap_(round, shards_part(s, s->rank, round->tensor).n);
    for (int k = 0; k < s->most_nodes; k++) {
        memset(s->piece, 0, sizeof(CommPiece) * (size_t)s->size);
        for (int rank = 0; rank < s->size; rank++) {
            const Part part = shards_part(s, rank, round->tensor);
            CommPiece* p = &s->piece[rank];
            if (rank != s->rank && k < tree->n_nodes) {
                p->send = tree->arena[k] + base + part.first;
                p->n_send = sizeof(float) * shards_overlap_(round, part.n);
            }
            if (rank != s->rank && s->first_node[rank] + k < s->first_node[rank + 1]) {
                p->recv = shards_node_(s, tree, round, s->first_node[rank] + k);
                p->n_recv = sizeof(float) * n_own;
            }
        }
        round->ticket = comm_exchange(s->comm, s->piece, HERE);
    }
}

// all nodes as the plan joins them; the root replaces our part in arena 0
static inline void shards_finish_round_(Shards* s, LeafTree* tree, const ShardRound* round, const Device* dev) {
    const Part part = shards_part(s, s->rank, round->tensor);
    const size_t n = shards_overlap_(round, part.n);
    float *stack[LEAF_TREE_MAX], *root = tree->arena[0] + s->table[round->tensor].offset + part.first + round->offset;
    int top = -1;
    comm_wait(s->comm, round->ticket);
    for (int j = 0; j < s->n_nodes && n > 0; j++) {
        stack[++top] = shards_node_(s, tree, round, j);
        for (int i = 0; i < s->nodes[j].n_joins; i++, top--) { residual_forward(stack[top - 1], stack[top - 1], stack[top], n, dev); }
    }
    if (n > 0 && stack[0] != root) { memcpy(root, stack[0], sizeof(float) * n); }
}

// the loss sums of all nodes, joined in the same way
static inline float shards_loss_(Shards* s, const LeafTree* tree) {
    float *all = (float*)malloc_check(sizeof(float) * (size_t)s->n_nodes, "losses"), stack[LEAF_TREE_MAX];
    size_t* counts = (size_t*)malloc_check(sizeof(size_t) * (size_t)s->size, "losses");
    int top = -1;
    for (int rank = 0; rank < s->size; rank++) { counts[rank] = (size_t)(s->first_node[rank + 1] - s->first_node[rank]); }
    memcpy(all + s->first_node[s->rank], tree->loss, sizeof(float) * counts[s->rank]);
    comm_wait(s->comm, comm_all_gather_v(s->comm, all, counts, DT_F32, HERE));
    for (int j = 0; j < s->n_nodes; j++) {
        stack[++top] = all[j];
        for (int i = 0; i < s->nodes[j].n_joins; i++, top--) { stack[top - 1] = stack[top - 1] + stack[top]; }
    }
    free(counts);
    free(all);
    return stack[0];
}

// The sum over the leaves of all ranks: in the arena that comes back the part that this rank owns is right, with --zero 0 all
// of it. The tree is empty again.
static inline float* shards_reduce(Shards* s, LeafTree* tree, float* loss, const Device* dev) {
    if (s->size == 1) { return leaf_tree_finish(tree, loss, dev); }
    assert(tree->n_nodes == s->first_node[s->rank + 1] - s->first_node[s->rank]);
    *loss = shards_loss_(s, tree);
    if (!s->buffer) {
        s->n_buffer = shards_buffer(s);
        s->buffer = (float*)arena_alloc(sizeof(float) * s->n_buffer, "received gradients");
    }
    ShardRound now = {shards_trained_(s, 0), 0, s->n_buffer / 2 / (size_t)s->n_nodes, s->buffer, {0}};
    if (now.tensor < s->n_tensors) { shards_send_round_(s, tree, &now); }
    while (now.tensor < s->n_tensors) {  // while one round is added up, the next is on its way
        ShardRound next = shards_next_round_(s, now);
        if (next.tensor < s->n_tensors) { shards_send_round_(s, tree, &next); }
        shards_finish_round_(s, tree, &now, dev);
        now = next;
    }
    leaf_tree_clear(tree);
    if (s->zero == 0) { shards_gather(s, tree->arena[0]); }
    return tree->arena[0];
}

// ---- 4. Norm and update ----

// Euclidean norm over the gradients of all trained tensors, of which the part that this rank owns is looked at
static inline float shards_norm(Shards* s, const float* grads, const Device* dev) {
    double sum = 0.0;
    for (int i = 0; i < s->n_tensors; i++) {
        const Part own = shards_part(s, s->rank, i);
        double* sums = s->chunk_sums + s->first_chunk[i] + (int64_t)(own.first / NORM_CHUNK);
        if (own.n > 0) { chunk_sums_of_squares(sums, grads + s->table[i].offset + own.first, own.n, dev); }
    }
    if (s->size > 1) { comm_all_gather_shares(s->comm, s->chunk_sums, shards_chunks_(s), DT_F64, HERE); }
    for (int64_t chunk = 0; chunk < shards_chunks_(s); chunk++) { sum += s->chunk_sums[chunk]; }
    return (float)sqrt(sum);
}

// clip to the norm, then AdamW; t counts updates from 1. Afterwards the parameters are those of one rank, on every rank.
static inline void shards_update(Shards* s, float* params, float* m, float* v, const float* grads, float norm, const Optimizer* o, int t,
                                 const Device* dev) {
    float scale = o->clip > 0.0f && norm > o->clip ? o->clip / norm : 1.0f;
    AdamW step = adamw_step(o->lr, o->beta1, o->beta2, o->eps, scale, t);
    for (int i = 0; i < s->n_tensors; i++) {
        const Tensor* tensor = &s->table[i];
        const Part part = shards_kept(s, i);
        const size_t at = tensor->offset + part.first;
        const float decay = tensor->decay == DECAY || o->decay_all ? o->weight_decay : 0.0f;
        float *p_part = params + at, *m_part = m + at, *v_part = v + at;
        if (part.n == 0 || tensor->frozen) { continue; }
        if (o->verify) { verify_adamw(o->verify, tensor, part.first, part.n, p_part, m_part, v_part, grads + at, decay, &step, dev); }
        else { adamw_update(p_part, m_part, v_part, grads + at, part.n, decay, &step, dev); }
    }
    if (s->zero == 1) { shards_gather(s, params); }
}

// ---- 5. For checkpoints and for the box at the start ----

// Slice l of tensor i of an arena of which each rank keeps its part: on rank 0 the whole slice comes back, in the arena or in
// `slice`; the others send theirs and get NULL. All ranks call.
static inline const float* shards_slice(Shards* s, const float* arena, int i, int l, float* slice) {
    const size_t n = tensor_slice_elements(&s->table[i]), first = n * (size_t)l;
    const float* whole = arena + s->table[i].offset + first;
    if (s->size == 1 || s->zero == 0 || s->table[i].frozen) { return s->rank == 0 ? whole : NULL; }
    memset(s->piece, 0, sizeof(CommPiece) * (size_t)s->size);
    for (int rank = 0; rank < s->size; rank++) {
        const Part part = shards_part(s, rank, i);
        size_t from = part.first > first ? part.first : first;
        size_t to = part.first + part.n < first + n ? part.first + part.n : first + n;
        size_t n_bytes = from < to ? sizeof(float) * (to - from) : 0;
        if (n_bytes == 0) { continue; }
        if (rank == s->rank) {
            s->piece[0].send = whole + (from - first);
            s->piece[0].n_send = n_bytes;
        }
        if (s->rank == 0) {
            s->piece[rank].recv = slice + (from - first);
            s->piece[rank].n_recv = n_bytes;
        }
    }
    comm_wait(s->comm, comm_exchange(s->comm, s->piece, HERE));
    return s->rank == 0 ? slice : NULL;
}

// what this rank sends in one update, in bytes
static inline double shards_bytes(const Shards* s) {
    double n = 0.0, own = 0.0, n_nodes = s->first_node[s->rank + 1] - s->first_node[s->rank];
    double n_chunks = (double)(shards_cut_(s, s->rank + 1) - shards_cut_(s, s->rank));
    for (int i = 0; i < s->n_tensors; i++) {
        n += s->table[i].frozen ? 0.0 : (double)tensor_elements(&s->table[i]);
        own += (double)shards_part(s, s->rank, i).n;
    }
    return n_nodes * 4.0 * (n - own) + (s->size - 1.0) * (4.0 * own + 8.0 * n_chunks + 4.0 * n_nodes);
}
#endif  // LLMC_ZERO_H
