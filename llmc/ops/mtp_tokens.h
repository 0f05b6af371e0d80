/*
Multi-token prediction (MTP) on the host: what a module that predicts the token after the next reads and is asked at
each position of a batch. inputs, targets, next, after (B, T):
    mtp_tokens    next[i] = inputs[i+1], the next token; of the last position of a row its own token
                  after[i] = targets[i+1], the token after that; -1: it does not count
    mtp_counted   how many count
It does not count where targets[i+1] does not, at the last position of a row, and where a document begins at i+1 or i+2:
a guess from one document about another teaches nothing. Of one that begins behind the row, where i+2 = T, the last
target tells.
Cost:   one pass over the tokens.
Source: Gloeckle et al. 2024, arXiv:2404.19737; DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; doc/qwen36.md "The
        token after the next"
*/
#ifndef LLMC_MTP_TOKENS_H
#define LLMC_MTP_TOKENS_H
#include "documents.h"  // Segments, segments_init, segments_find_marked
#include <stdint.h>
#include <stdlib.h>

// s: the segments of the batch
static inline void mtp_tokens(int* next, int* after, const int* inputs, const int* targets, const Segments* s,
                              int B, int T) {
    for (int i = 0; i < B * T; i++) {
        const int is_last = i % T == T - 1;
        next[i] = inputs[is_last ? i : i + 1];
        const int is_other = !is_last && targets[i + 1] == s->document_start;  // the first token of another document
        after[i] = is_last || is_other || targets[i + 1] < 0 ? -1 : targets[i + 1];
    }
    for (int k = 0; k < s->n; k++) {
        const size_t first = s->at[k].first;
        if (first % (size_t)T == 0) { continue; }  // it begins with its row
        after[first - 1] = -1;
        if (first % (size_t)T >= 2) { after[first - 2] = -1; }
    }
}

// document_start: what documents begin with (documents.h)
static inline int64_t mtp_counted(const int* inputs, const int* targets, int document_start, int B, int T) {
    const size_t N = (size_t)B * (size_t)T;
    int* room = (int*)malloc_check(2 * sizeof(int) * N, "targets after the next");
    int64_t n_counted = 0;
    Segments s;
    segments_init(&s, B, T);
    s.document_start = document_start;
    segments_find_marked(&s, inputs, targets, B, T);
    mtp_tokens(room, room + N, inputs, targets, &s, B, T);
    for (size_t i = 0; i < N; i++) { n_counted += room[N + i] >= 0; }
    free(s.at);
    free(room);
    return n_counted;
}
#endif  // LLMC_MTP_TOKENS_H
