/*
Gradient accumulation whose result does not depend on how many micro-batches or ranks made it.
Every micro-batch is a leaf: its gradient starts from zero. Leaves are added along the binary tree
    node(lo, size) = node(lo, size/2) + node(lo + size/2, size/2)      an absent right child is skipped
with a binary counter: a new leaf is pushed; while the two topmost nodes have the same size they become one.
Memory: leaf_tree_depth(S) arenas for S leaves: 1 for one leaf, 2 for two, 3 for four, ...
Order:  left + right, element by element; the leaves' loss sums travel along the same tree.
Source: spec/parallel.md 3.4
*/
#ifndef LLMC_LEAF_TREE_H
#define LLMC_LEAF_TREE_H
#include "residual.h"  // residual_forward: out = left + right

enum { LEAF_TREE_MAX = 32 };

typedef struct {
    size_t n;                     // elements of an arena
    int n_nodes;                  // on the stack
    int size[LEAF_TREE_MAX];      // leaves under each node
    float loss[LEAF_TREE_MAX];
    float* arena[LEAF_TREE_MAX];
} LeafTree;

// most nodes that are alive at once while S leaves are pushed
static inline int leaf_tree_depth(int n_leaves) {
    int depth = 1;
    for (int size = n_leaves; size > 1; size /= 2) { depth++; }
    return depth;
}

static inline void leaf_tree_init(LeafTree* tree, size_t n, int n_leaves) {
    memset(tree, 0, sizeof *tree);
    tree->n = n;
    for (int i = 0; i < leaf_tree_depth(n_leaves); i++) { tree->arena[i] = (float*)arena_alloc(sizeof(float) * n, "gradients"); }
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
    while (tree->n_nodes > 1 && tree->size[tree->n_nodes - 1] == tree->size[tree->n_nodes - 2]) { leaf_tree_merge_(tree, dev); }
}

// the sum over all leaves; the tree is empty afterwards
static inline float* leaf_tree_finish(LeafTree* tree, float* loss, const Device* dev) {
    while (tree->n_nodes > 1) { leaf_tree_merge_(tree, dev); }
    tree->n_nodes = 0;
    *loss = tree->loss[0];
    return tree->arena[0];
}
#endif  // LLMC_LEAF_TREE_H
