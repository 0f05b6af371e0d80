/*
Gradient accumulation whose result does not depend on how many micro-batches or ranks made it.
Every micro-batch is a leaf: its gradient starts from zero. Leaves are added along the binary tree
    node(lo, size) = node(lo, size/2) + node(lo + size/2, size/2)      an absent right child is skipped
with a binary counter: a new leaf is pushed; while the two topmost nodes are the two halves of a larger one they become it.
A rank has leaves first..last-1 and ends with the largest nodes that lie inside them: one when that range is a node itself,
fewer than 2 log2(last) always. The nodes of all ranks, pushed in order, give the root (zero.h); alone, first is 0 and
leaf_tree_finish has it.
Memory: leaf_tree_depth(0, S) arenas for S leaves: 1 for one leaf, 2 for two, 3 for four, ...
Order:  left + right, element by element; the leaves' loss sums travel along the same tree.
Source: spec/parallel.md 3.4
*/
#ifndef LLMC_LEAF_TREE_H
#define LLMC_LEAF_TREE_H
#include "residual.h"  // residual_forward: out = left + right

enum { LEAF_TREE_MAX = 64 };  // nodes on the stack, for up to 2^31 leaves

typedef struct {
    size_t n;                     // elements of an arena
    int first, next;              // leaves of this rank begin here; the one that is pushed next
    int n_nodes;                  // on the stack
    int size[LEAF_TREE_MAX];      // leaves under each node
    float loss[LEAF_TREE_MAX];
    float* arena[LEAF_TREE_MAX];
} LeafTree;

// leaves of the largest node that begins at leaf `lo` and ends at `last` or before
static inline int leaf_node_size(int lo, int last) {
    int size = 1;
    while (lo % (2 * (int64_t)size) == 0 && size <= (last - lo) / 2) { size *= 2; }
    return size;
}

// are the two topmost nodes, of which the right one ends at leaf `end`, the halves of one?
static inline int leaf_nodes_join(int left_size, int right_size, int end) {
    return left_size == right_size && (end - left_size - right_size) % (2 * (int64_t)left_size) == 0;
}

// most nodes that are alive at once while leaves first..last-1 are pushed; 1 for no leaves
static inline int leaf_tree_depth(int first, int last) {
    int size[LEAF_TREE_MAX], n = 0, depth = 1;
    for (int leaf = first; leaf < last; leaf++) {
        size[n++] = 1;
        depth = n > depth ? n : depth;
        for (; n > 1 && leaf_nodes_join(size[n - 2], size[n - 1], leaf + 1); n--) { size[n - 2] += size[n - 1]; }
    }
    return depth;
}

static inline void leaf_tree_init(LeafTree* tree, size_t n, int first, int last) {
    memset(tree, 0, sizeof *tree);
    tree->n = n;
    tree->first = tree->next = first;
    for (int i = 0; i < leaf_tree_depth(first, last); i++) { tree->arena[i] = (float*)arena_alloc(sizeof(float) * n, "gradients"); }
}

static inline void leaf_tree_free(LeafTree* tree) {
    for (int i = 0; i < LEAF_TREE_MAX; i++) { arena_free(tree->arena[i], sizeof(float) * tree->n); }
}

// the arena into which the next leaf's gradient is to be written
static inline float* leaf_tree_next(LeafTree* tree) { return tree->arena[tree->n_nodes]; }

static inline void leaf_tree_merge_(LeafTree* tree, const Device* dev) {
    int right = --tree->n_nodes, left = right - 1;
    residual_forward(tree->arena[left], tree->arena[left], tree->arena[right], tree->n, dev);
    tree->loss[left] = tree->loss[left] + tree->loss[right];
    tree->size[left] += tree->size[right];
}

static inline void leaf_tree_push(LeafTree* tree, float loss, const Device* dev) {
    tree->size[tree->n_nodes] = 1;
    tree->loss[tree->n_nodes++] = loss;
    tree->next++;
    while (tree->n_nodes > 1 && leaf_nodes_join(tree->size[tree->n_nodes - 2], tree->size[tree->n_nodes - 1], tree->next)) {
        leaf_tree_merge_(tree, dev);
    }
}

// the tree is empty again, for the next update
static inline void leaf_tree_clear(LeafTree* tree) {
    tree->n_nodes = 0;
    tree->next = tree->first;
}

// the sum over all leaves of one rank that has them all; the tree is empty afterwards
static inline float* leaf_tree_finish(LeafTree* tree, float* loss, const Device* dev) {
    while (tree->n_nodes > 1) { leaf_tree_merge_(tree, dev); }
    *loss = tree->loss[0];
    leaf_tree_clear(tree);
    return tree->arena[0];
}
#endif  // LLMC_LEAF_TREE_H
