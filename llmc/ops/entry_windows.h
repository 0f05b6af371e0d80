/*
Where the positions of a pass stand in their documents, and the entries that stand for several tokens each, as attention
over entries (DeepSeek V4) wants to know it.
    Places         of each position its document, and where the document's keys lie
    EntryWindows   which entries there are, of which tokens, and which of them a position sees
An entry is made of r tokens, a window that begins at its document's first token or r, 2r, ... behind it; a document's
last tokens, if they are fewer, have none. With overlap an entry also has the window before it, where its document has
one. Position t of a document sees its entries 0 .. (t + 1) / r - 1, whose last token is not after it.
    BatchPiece         which positions of a batch a pass has
    places_of_batch    of segments (documents.h): the places of its positions
    tokens_of_batch    t and behind of all rows of keys and tokens: behind is another of these, or of rows before the
                       pass's own positions BATCH_FAR
    entry_windows_of_batch   entries whose last token is one of the pass's positions. A row of T has room for T / r: the
                       one that ends with token t is number (t - T % r) / r, so that those of a document are neighbours
                       and pieces of a multiple of r have those that end in them; -1 where none ends
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
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    int N;                 // positions of the pass: queries
    const int *t;          // (N) position in its document, from 0
    const int *first_key;  // (N) where the key of its document's first position lies, so that its own is t behind
    const int *behind;     // (N) number of the position behind its document's last; in training alone
} Places;

// positions first .. end - 1 alone
static inline Places places_between(const Places* x, int first, int end) {
    const Places part = {end - first, x->t + first, x->first_key + first, x->behind ? x->behind + first : NULL};
    return part;
}

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

// What a pass has of B rows of T positions: of each row the n from `begin` on. Keys and tokens lie row by row, those of
// the `before` positions before these, and then theirs
typedef struct { int B, T, begin, n, before; } BatchPiece;

enum { BATCH_FAR = INT_MAX / 2 };

static inline BatchPiece batch_whole(int B, int T) {
    const BatchPiece x = {B, T, 0, T, 0};
    return x;
}

static inline int batch_keys(const BatchPiece* x) { return x->B * (x->before + x->n); }

// where the key of position t of row b lies, or would lie: a document may begin before all that are there
static inline int batch_key(const BatchPiece* x, int b, int t) {
    return b * (x->before + x->n) + x->before + t - x->begin;
}

// positions first .. end - 1 of row b, of which the pass has from .. to - 1
typedef struct { int b, first, end, from, to; } RowDocument;

// row k of a segment
static inline RowDocument row_document(const Segment* s, int k, const BatchPiece* x) {
    const int at = (int)s->first + k * s->T, first = at % x->T, end = first + s->T, last = x->begin + x->n;
    const RowDocument d = {at / x->T, first, end, first > x->begin ? first : x->begin, end < last ? end : last};
    return d;
}

// t, first_key, behind, is_last (B*n) on the host; is_last: of its document, on whatever rank that is
static inline void places_of_batch(int* t, int* first_key, int* behind, int* is_last, const Segments* segments,
                                   const BatchPiece* x) {
    for (int i = 0; i < segments->n; i++) {
        for (int k = 0; k < segments->at[i].rows; k++) {
            const RowDocument d = row_document(&segments->at[i], k, x);
            const int row = d.b * x->n - x->begin;
            for (int p = d.from; p < d.to; p++) {
                t[row + p] = p - d.first;
                first_key[row + p] = batch_key(x, d.b, d.first);
                behind[row + p] = row + d.to;
                is_last[row + p] = p + 1 == d.end;
            }
        }
    }
}

// t, behind (batch_keys) on the host
static inline void tokens_of_batch(int* t, int* behind, const Segments* segments, const BatchPiece* x) {
    for (int i = 0; i < batch_keys(x); i++) { t[i] = 0, behind[i] = BATCH_FAR; }
    for (int i = 0; i < segments->n; i++) {
        for (int k = 0; k < segments->at[i].rows; k++) {
            const RowDocument d = row_document(&segments->at[i], k, x);
            const int first = x->begin - x->before;
            for (int p = d.first > first ? d.first : first; p < d.to; p++) {
                t[batch_key(x, d.b, p)] = p - d.first;
                if (p >= x->begin) { behind[batch_key(x, d.b, p)] = batch_key(x, d.b, d.to); }
            }
        }
    }
}

// token, number (B * (n / r)), first_entry (B*n) on the host
static inline void entry_windows_of_batch(int* token, int* number, int* first_entry, int r, const Segments* segments,
                                          const BatchPiece* x) {
    const int room = x->T / r, own = x->n / r;
    for (int i = 0; i < x->B * own; i++) { token[i] = -1, number[i] = 0; }
    for (int i = 0; i < segments->n; i++) {
        for (int k = 0; k < segments->at[i].rows; k++) {
            const RowDocument d = row_document(&segments->at[i], k, x);
            const int first = (d.first + r - 1 - x->T % r) / r;  // its first entry among those of the row
            for (int p = d.from; p < d.to; p++) { first_entry[d.b * x->n + p - x->begin] = d.b * room + first; }
            for (int w = 0; w < (d.end - d.first) / r; w++) {
                const int begin = d.first + w * r, last = begin + r - 1, at = d.b * own + first + w - x->begin / r;
                if (last < d.from || last >= d.to) { continue; }
                token[at] = batch_key(x, d.b, begin);
                number[at] = w;
            }
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
