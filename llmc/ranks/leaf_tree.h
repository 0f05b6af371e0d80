/*
Gradient accumulation whose result does not depend on how many micro-batches or ranks made it.
Every micro-batch is a leaf: its gradient starts from zero. Leaves are added along the binary tree
    node(lo, size) = node(lo, size/2) + node(lo + size/2, size/2)      an absent right child is skipped
with a binary counter: a new leaf is pushed; while the two topmost nodes are the two halves of a larger one they become
it. A rank has leaves first..last-1 and ends with the largest nodes that lie inside them: one when that range is a node
itself, fewer than 2 log2(last) always. The nodes of all ranks, pushed in order, give the root (data_parallel.h);
alone, first is 0 and leaf_tree_finish has it.
    leaf_tree_next, leaf_tree_numbers   where the next leaf's gradient (n) and its numbers (n_numbers floats, of which
                                     the first is the sum of its losses) are to be written, both on the device: the host
                                     need not wait for a leaf. Of the numbers this is one place for all leaves
    leaf_tree_push                   both have been written: the leaf joins the tree, and its numbers go to their row.
                                     The same in parts, as they are written: leaf_tree_add for each,
                                     leaf_tree_keep_numbers, leaf_tree_added
    leaf_tree_finish                 the root, and with it the one download of all numbers
    leaf_tree_root, leaf_tree_sums   the same sum over one number for each leaf, over several, on the host
Memory: leaf_tree_depth(0, S) arenas for S leaves: 1 for one leaf, 2 for two, 3 for four, ... on the device.
Order:  left + right, element by element; the leaves' numbers are added along the same tree.
Explained in doc/ranks.md
*/
#ifndef LLMC_LEAF_TREE_H
#define LLMC_LEAF_TREE_H
#include "../ops/residual.h"  // residual_forward: out = left + right

enum { LEAF_TREE_MAX = 64 };  // nodes on the stack, for up to 2^31 leaves

typedef struct {
    size_t n;                     // elements of an arena
    int first, next;              // leaves of this rank begin here; the one that is pushed next
    int n_nodes;                  // on the stack
    int size[LEAF_TREE_MAX];      // leaves under each node
    float* arena[LEAF_TREE_MAX];  // device memory, as are the numbers
    float* numbers;               // (n_leaves + 1, n_numbers): of the leaves first, first + 1, ...; the next one writes
                                  // to the last row
    int n_leaves, n_numbers;
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

static inline size_t leaf_tree_numbers_bytes_(const LeafTree* tree) {
    return sizeof(float) * ((size_t)tree->n_leaves + 1) * (size_t)tree->n_numbers;
}

static inline void leaf_tree_alloc_(LeafTree* tree, size_t n, int n_arenas, int first, int n_leaves, int n_numbers) {
    memset(tree, 0, sizeof *tree);
    tree->n = n;
    tree->first = tree->next = first;
    tree->n_leaves = n_leaves;
    tree->n_numbers = n_numbers;
    for (int i = 0; i < n_arenas; i++) { tree->arena[i] = (float*)device_alloc(sizeof(float) * n, "gradients"); }
    tree->numbers = (float*)device_alloc(leaf_tree_numbers_bytes_(tree), "losses");
}

static inline void leaf_tree_init(LeafTree* tree, size_t n, int first, int last, int n_numbers) {
    leaf_tree_alloc_(tree, n, leaf_tree_depth(first, last), first, last - first, n_numbers);
}

static inline void leaf_tree_free(LeafTree* tree) {
    for (int i = 0; i < LEAF_TREE_MAX; i++) { device_release(tree->arena[i], sizeof(float) * tree->n); }
    device_release(tree->numbers, leaf_tree_numbers_bytes_(tree));
}

static inline float* leaf_tree_next(LeafTree* tree) { return tree->arena[tree->n_nodes]; }
static inline float* leaf_tree_numbers(LeafTree* tree) {
    return tree->numbers + (size_t)tree->n_leaves * (size_t)tree->n_numbers;
}

// the additions with which the leaf that has been written joins the tree, for elements at .. at + n - 1
static inline void leaf_tree_add(const LeafTree* tree, size_t at, size_t n, const Device* dev) {
    int size = 1;
    for (int top = tree->n_nodes; top > 0 && leaf_nodes_join(tree->size[top - 1], size, tree->next + 1); top--) {
        residual_forward(tree->arena[top - 1] + at, tree->arena[top - 1] + at, tree->arena[top] + at, n, dev);
        size += tree->size[top - 1];
    }
}

// the numbers that the leaf has written go to their row
static inline void leaf_tree_keep_numbers(LeafTree* tree, const Device* dev) {
    float* row = tree->numbers + (size_t)(tree->next - tree->first) * (size_t)tree->n_numbers;
    device_copy(row, leaf_tree_numbers(tree), sizeof(float) * (size_t)tree->n_numbers, dev);
}

// all of them are done: the leaf is a node, or part of one
static inline void leaf_tree_added(LeafTree* tree) {
    int size = 1;
    tree->next++;
    while (tree->n_nodes > 0 && leaf_nodes_join(tree->size[tree->n_nodes - 1], size, tree->next)) {
        size += tree->size[--tree->n_nodes];
    }
    tree->size[tree->n_nodes++] = size;
}

static inline void leaf_tree_push(LeafTree* tree, const Device* dev) {
    if (tree->n > 0) { leaf_tree_add(tree, 0, tree->n, dev); }
    leaf_tree_keep_numbers(tree, dev);
    leaf_tree_added(tree);
}

// the tree is empty again, for the next update
static inline void leaf_tree_clear(LeafTree* tree) {
    tree->n_nodes = 0;
    tree->next = tree->first;
}

// x: one number for each of the leaves 0..n-1, in order; it is overwritten
static inline float leaf_tree_root(float* x, int n) {
    int size[LEAF_TREE_MAX], top = -1;
    for (int leaf = 0; leaf < n; leaf++) {
        size[++top] = 1;
        x[top] = x[leaf];
        for (; top > 0 && (leaf == n - 1 || leaf_nodes_join(size[top - 1], size[top], leaf + 1)); top--) {
            x[top - 1] = x[top - 1] + x[top];
            size[top - 1] += size[top];
        }
    }
    return x[0];
}

// sums (n_numbers) of numbers (n_leaves, n_numbers)
static inline void leaf_tree_sums(float* sums, const float* numbers, int n_leaves, int n_numbers) {
    float* x = (float*)malloc_check(sizeof(float) * (size_t)n_leaves, "losses");
    for (int i = 0; i < n_numbers; i++) {
        for (int leaf = 0; leaf < n_leaves; leaf++) { x[leaf] = numbers[(size_t)leaf * (size_t)n_numbers + i]; }
        sums[i] = leaf_tree_root(x, n_leaves);
    }
    free(x);
}

// the sums over all leaves of one rank that has them all, those of their numbers in sums; the tree is empty afterwards
static inline float* leaf_tree_finish(LeafTree* tree, float* sums, const Device* dev) {
    const int n = tree->next - tree->first;
    float* numbers = (float*)malloc_check(leaf_tree_numbers_bytes_(tree), "losses");
    for (int right = tree->n_nodes - 1; right > 0 && tree->n > 0; right--) {
        residual_forward(tree->arena[right - 1], tree->arena[right - 1], tree->arena[right], tree->n, dev);
    }
    device_download(numbers, tree->numbers, sizeof(float) * (size_t)n * (size_t)tree->n_numbers, dev);
    leaf_tree_sums(sums, numbers, n, tree->n_numbers);
    leaf_tree_clear(tree);
    free(numbers);
    return tree->arena[0];
}
#endif  // LLMC_LEAF_TREE_H
