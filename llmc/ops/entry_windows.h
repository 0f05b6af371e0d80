/*
Where the positions of a pass stand in their documents, and the entries that stand for several tokens each, as attention
over entries (DeepSeek V4) wants to know it.
    Places         of each position its document, and where the document's keys lie
    EntryWindows   which entries there are, of which tokens, and which of them a position sees
An entry is made of r tokens, a window that begins at its document's first token or r, 2r, ... behind it; a document's
last tokens, if they are fewer, have none. With overlap an entry also has the window before it, where its document has
one. Position t of a document sees its entries 0 .. (t + 1) / r - 1, whose last token is not after it.
    places_of_batch    of segments (documents.h) of B rows of T positions: the key of position n is n; a row has room
                       for T / r entries, those of its documents one after the other, and those too many are nobody's
    entry_windows_of_batch   likewise
    entries_counted    how many positions of a batch see an entry
All arrays are ints on the device. Their lengths depend on B and T alone, so that a graph may repeat what was recorded.
In generation (cached_text.h) `first_key` and `first_entry` point into caches, `token` into the tokens that a pass has
at hand.
Cost:   made on the host, a pass over N positions for each kind of window.
Source: doc/deepseek_v4.md "Entries", "Order of sums"
*/
#ifndef LLMC_ENTRY_WINDOWS_H
#define LLMC_ENTRY_WINDOWS_H
#include "documents.h"  // Segments, segments_init, segments_find_marked
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    int N;                 // positions of the pass: queries
    const int *t;          // (N) position in its document, from 0
    const int *first_key;  // (N) where the key of its document's first position lies
    const int *behind;     // (N) number of the position behind its document's last; in training alone
} Places;

typedef struct {
    int r;                   // tokens of an entry
    int overlap;             // an entry has the window before it, too
    int W;                   // room for entries that this pass makes
    const int *token;        // (W) where the first token of the entry's own window lies among the rows of tokens; -1:
                             // there is no such entry
    const int *number;       // (W) which entry of its document it is; 0: there is no window before it
    const int *first_entry;  // (N) which row is the first entry of the position's document
} EntryWindows;

// how many entries a position sees that is number t of its document
#define ENTRIES_SEEN(t, r) (((t) + 1) / (r))

// t, first_key, behind (B*T) on the host
static inline void places_of_batch(int* t, int* first_key, int* behind, const Segments* segments) {
    for (int i = 0; i < segments->n; i++) {
        const Segment* s = &segments->at[i];
        for (int n = 0; n < s->rows * s->T; n++) {
            const int at = (int)s->first + n, first = at - n % s->T;
            t[at] = n % s->T;
            first_key[at] = first;
            behind[at] = first + s->T;
        }
    }
}

// token, number (B * (T / r)), first_entry (B*T) on the host
static inline void entry_windows_of_batch(int* token, int* number, int* first_entry, int r, const Segments* segments,
                                          int B, int T) {
    const int room = T / r;
    int row = -1, used = 0;  // of the row of the batch where the last segment ended
    for (int i = 0; i < B * room; i++) { token[i] = -1, number[i] = 0; }
    for (int i = 0; i < segments->n; i++) {
        const Segment* s = &segments->at[i];
        for (int b = 0; b < s->rows; b++) {
            const int first = (int)s->first + b * s->T, of_row = first / T;
            if (of_row != row) { row = of_row, used = 0; }
            for (int n = 0; n < s->T; n++) { first_entry[first + n] = of_row * room + used; }
            for (int w = 0; w < s->T / r; w++) {
                token[of_row * room + used + w] = first + w * r;
                number[of_row * room + used + w] = w;
            }
            used += s->T / r;
        }
    }
}

// inputs, targets (B, T) on the host; document_start: what documents begin with (documents.h)
static inline int64_t entries_counted(const int* inputs, const int* targets, int document_start, int r, int B, int T) {
    int64_t n = 0;
    Segments s;
    segments_init(&s, B, T);
    s.document_start = document_start;
    segments_find_marked(&s, inputs, targets, B, T);
    for (int i = 0; i < s.n; i++) { n += s.at[i].T >= r ? (int64_t)s.at[i].rows * (s.at[i].T - r + 1) : 0; }
    free(s.at);
    return n;
}
#endif  // LLMC_ENTRY_WINDOWS_H
