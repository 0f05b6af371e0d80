/*
Conversations in rows of T positions, several in a row, as examples that the data loader serves (examples.h).
    pack_rows    samples of a Conversations (conversations.h) become a TokenData: inputs and targets (n, T), and the
                 images among them (row_images.h)
A sample of n tokens takes n - 1 positions: its tokens but the last are inputs, its tokens but the first targets where
they are learned. Samples stand one behind the other, none is cut, and the rest of a row is filled up:
    inputs    a b c d | e f g | p p p            targets   -2 -1 d e' | -2 g h | -2 -1 -1
    a, e      first token of a sample            -2        PACK_BEGINS: a document begins here, and nothing is learned
    p         padding                            -1        nothing is learned here
The first target of a sample is never learned (conversations.h), and so the mark has room. documents.h cuts segments by
it, for there is no token with which conversations begin: each sample counts its positions from 0 and sees itself alone,
as if it had a row of its own.
Which row: samples are taken in the order permute_index(key, 0, i, n), and each goes into the first row that has room,
a row behind the last if none has (first-fit). The rows are a pure function of (samples, T, key). First-fit gives the
later rows the longer samples: for validation take samples, not rows. Where samples are not to share rows, sample i has
row i.
Cost:   O(log rows) a sample; 8 bytes a position.
Errors: fail_input for a sample of more than T + 1 tokens: conversations_init was told a larger limit.
Source: first-fit needs at most 1.7 times the fewest rows: Dosa & Sgall 2013, First Fit bin packing: a tight analysis.
*/
#ifndef LLMC_PACK_H
#define LLMC_PACK_H
#include "conversations.h"  // Conversations, conversations_sample
#include "dataloader.h"     // TokenData, permute_index

enum { PACK_BEGINS = -2 };  // a target: a document begins at this position, where nothing is learned

// The room of each row, as a tree: room[1] is the most that any row has, the rows are the leaves from n_leaves on.
typedef struct {
    int* room;
    int64_t n_leaves;  // a power of two
    int64_t n_rows;    // that hold something
} PackTree;

static inline void pack_tree_init_(PackTree* tree, int64_t n_samples, int T) {
    tree->n_leaves = 1;
    tree->n_rows = 0;
    while (tree->n_leaves < n_samples) { tree->n_leaves *= 2; }
    tree->room = (int*)malloc_check((size_t)(2 * tree->n_leaves) * sizeof(int), "rows of conversations");
    for (int64_t i = 0; i < 2 * tree->n_leaves; i++) { tree->room[i] = T; }
}

// the first row with room for n positions, which are taken
static inline int64_t pack_tree_take_(PackTree* tree, int n) {
    int64_t i = 1;
    while (i < tree->n_leaves) { i = 2 * i + (tree->room[2 * i] < n); }
    const int64_t row = i - tree->n_leaves;
    tree->room[i] -= n;
    while ((i /= 2) > 0) {
        const int left = tree->room[2 * i], right = tree->room[2 * i + 1];
        tree->room[i] = left > right ? left : right;
    }
    tree->n_rows = row >= tree->n_rows ? row + 1 : tree->n_rows;
    return row;
}

// one sample from position `at` of the row on
static inline void pack_put_(int* inputs, int* targets, const int* tokens, int n) {
    for (int i = 0; i + 1 < n; i++) {
        inputs[i] = conversations_id(tokens[i]);
        targets[i] = tokens[i + 1] >= 0 ? tokens[i + 1] : -1;
    }
}

// Where n samples from `first` on go: places[i] is the first position of sample first + i, the rows laid one behind the
// other. Returns the number of rows. shares: several samples may have one row
static inline int64_t pack_places_(int64_t* places, const Conversations* c, int64_t first, int64_t n,
                                   const char* path, int T, uint64_t key, int shares) {
    PackTree tree;
    pack_tree_init_(&tree, n, T);
    for (int64_t k = 0; k < n; k++) {
        int n_tokens;
        const int64_t i = shares ? permute_index(key, 0, k, n) : k;
        conversations_sample(c, first + i, &n_tokens);
        if (n_tokens - 1 > T) {
            fail_input("%s: a sample has %d tokens, expected at most %d for rows of %d positions: give --max-length %d "
                       "or a larger --seq-len", path, n_tokens, T + 1, T, T + 1);
        }
        if (!shares) {
            places[i] = k * T;
            continue;
        }
        const int64_t row = pack_tree_take_(&tree, n_tokens - 1);
        const int n_taken = T - tree.room[tree.n_leaves + row];
        places[i] = row * T + n_taken - (n_tokens - 1);
    }
    const int64_t n_rows = shares ? tree.n_rows : n;
    free(tree.room);
    return n_rows;
}

static inline void pack_fill_(int* inputs, int* targets, int64_t n, int padding) {
    for (int64_t i = 0; i < n; i++) {
        inputs[i] = padding;
        targets[i] = -1;
    }
}

// what the data loader needs beside the rows themselves
static inline void pack_open_(TokenData* d, const char* path, int* rows, int64_t n_rows, int T) {
    const int64_t n = n_rows * T;
    memset(d, 0, sizeof *d);
    d->path = string_copy(path);
    d->token_bytes = 4;
    d->examples_T = T;
    d->text = rows;
    d->n_text = d->text_capacity = 2 * n;
    d->n_tokens = n;
    TokenSource* source = tokens_add_source_(d, path, 0.0);
    TokenShard shard = {source->path, rows, n, 0, rows + n};
    tokens_add_shard_(d, &shard);
    tokens_end_source_(d);
    for (int64_t i = 0; i < n; i++) {
        if (rows[i] >= d->vocab_size_needed) { d->vocab_size_needed = rows[i] + 1; }
        if (rows[n + i] >= d->classes_needed) { d->classes_needed = rows[n + i] + 1; }
    }
}

// the images of the samples, which stand at these places
static inline void pack_images_(TokenImages* images, const Conversations* c, int64_t first, int64_t n_samples,
                                const int64_t* places) {
    const int64_t begin = c->starts[first], end = c->starts[first + n_samples];
    int64_t n = 0, sample = first;
    RowImage* of = (RowImage*)malloc_check((size_t)(c->n_images + 1) * sizeof(RowImage), "images of conversations");
    for (int64_t i = 0; i < c->n_images; i++) {
        const SampleImage* image = &c->images[i];
        if (image->at < begin || image->at >= end) { continue; }
        while (c->starts[sample + 1] <= image->at) { sample++; }
        const ImageFile* file = &c->files.of[image->file];
        const RowImage one = {places[sample - first] + image->at - c->starts[sample], file->n_tokens, file->path};
        of[n++] = one;
    }
    token_images_init(images, of, n, &c->files);
}

// n_samples of c from `first` on. d: to be closed by tokens_close; path: for messages; padding: the token that fills up
// rows; shares: several samples may have one row. Returns the share of positions that are filled up.
static inline double pack_rows(TokenData* d, const Conversations* c, int64_t first, int64_t n_samples, const char* path,
                               int T, int padding, uint64_t key, int shares) {
    assert(T > 0 && n_samples > 0 && first >= 0 && first + n_samples <= c->n);
    int64_t* places = (int64_t*)malloc_check((size_t)n_samples * sizeof(int64_t), "places of conversations");
    const int64_t n_rows = pack_places_(places, c, first, n_samples, path, T, key, shares), n = n_rows * T;
    memory_need((size_t)n * 2 * sizeof(int), "rows of conversations");
    int* inputs = (int*)malloc_check((size_t)n * 2 * sizeof(int), "rows of conversations");
    int* targets = inputs + n;
    int64_t n_used = 0;
    pack_fill_(inputs, targets, n, padding);
    for (int64_t i = 0; i < n_samples; i++) {
        int n_tokens;
        const int* tokens = conversations_sample(c, first + i, &n_tokens);
        const int64_t at = places[i], end = at + n_tokens - 1;
        pack_put_(inputs + at, targets + at, tokens, n_tokens);
        targets[at] = PACK_BEGINS;
        if (end % T > 0) { targets[end] = PACK_BEGINS; }  // of the padding, or of the next sample
        n_used += n_tokens - 1;
    }
    pack_open_(d, path, inputs, n_rows, T);
    pack_images_(&d->images, c, first, n_samples, places);
    free(places);
    return 1.0 - (double)n_used / (double)n;
}
#endif  // LLMC_PACK_H
