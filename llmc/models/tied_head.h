/*
A head that config.json ties to the embedding, in the files: what they have of it, and reading it. Published files have
the embedding alone; others have the head too, with the same bytes or with others, or the head alone.
    tied_head_fit    before the layout: a head with other bytes is a matrix of its own, as transformers takes it, which
                     a warning says; 1: the file has the matrix under the name of the head alone
    tied_head_load   all n rows of a table; `embedding` is the row that may be under the name of the head
Errors: those of tensors_load_into.
*/
#ifndef LLMC_TIED_HEAD_H
#define LLMC_TIED_HEAD_H
#include "../files/tensorfile.h"  // SafeSet, tensors_match, tensors_load_into

#define HEAD_NAME "lm_head.weight"

// tied: what config.json says, then what holds; embedding: its name
static inline int tied_head_fit(int* tied, SafeSet* set, const char* embedding) {
    const int has_embedding = safeset_find(set, embedding) != NULL;
    if (!*tied || !safeset_find(set, HEAD_NAME)) { return 0; }
    if (has_embedding && !tensors_match(set, HEAD_NAME, embedding)) {
        warn_alike("%s: \"%s\" is not \"%s\", to which config.json ties it: not tied, as in transformers", set->path,
                   HEAD_NAME, embedding);
        *tied = 0;
    }
    return !has_embedding;
}

static inline void tied_head_load(const SliceSink* sink, SafeSet* set, Tensor* table, int n, Tensor* embedding,
                                  int tied, int head_alone) {
    const Tensor named = *embedding;
    if (head_alone) { embedding->name = HEAD_NAME, embedding->prefix = NULL; }
    tensors_load_into(sink, set, table, n, "", NULL);
    embedding->name = named.name, embedding->prefix = named.prefix;
    if (tied) { safeset_find(set, HEAD_NAME); }  // a copy, and not unused
}
#endif  // LLMC_TIED_HEAD_H
