/*
Documents in a batch: where attention and positions start anew (--doc-reset).
A row of T tokens is cut from a stream of documents, each of which begins with end of text (dataloader.h), so a row
holds the tail of one document, whole ones, and the head of another. With the reset no position sees another document,
and each piece of one counts its positions from 0: a packed row gives the very bits that its pieces give as sequences
of their own.
    documents_segments   cuts a batch into Segments; the trainer calls embedding and attention once for each
    documents_bounds     of Segments: where the piece of a document that a position lies in begins and ends
    documents_places     ... and its number in it
    segments_find        the same into the room of a trainer
    Segments             room for those of a batch, and the token with which documents begin
    Segment              rows of T positions, from position `first` of the flattened (B*T) batch on: the op is called
                         with B = rows and T, and every tensor (B*T, n) starts at first * n. That holds for attention's
                         statistics too: a segment of one row keeps its (NH, T) at first * NH
On a GPU, where a call is a launch, attention takes the whole batch and the bounds of every position (AttentionShape),
RoPE and embedding of positions their places.
All other ops look at one position at a time and are called for the whole batch as ever.
    no reset   one segment {0, B, T}
    reset      {first, 1, length} for each piece of a document, in order; none crosses the end of a row
Where no token begins a document, as with conversations of ChatML, the targets say it (pack.h): then `inputs` is the
targets of the batch, and the token with which documents begin is their mark, -2.
A piece that begins with a row, in the middle of a document, starts at position 0 as well: what stood before is not
there.
Cost:   one pass over the inputs. Attention costs the sum of the squares of the lengths instead of B*T*T.
Order:  gradients of embeddings are added segment by segment, ascending, which is the order of the positions.
*/
#ifndef LLMC_DOCUMENTS_H
#define LLMC_DOCUMENTS_H
#include "../core/fail.h"  // malloc_check
#include <stddef.h>

typedef struct {
    size_t first;  // position in the flattened (B*T) batch
    int rows;
    int T;         // positions in each
} Segment;

// of a position: the piece of a document that it lies in, positions begin .. end-1 of its row
typedef struct { int begin, end; } DocumentBounds;

enum { NO_RESET = -1 };

// The segments of inputs (B, T), into room for B*T of them; returns their number. eot: the token with which documents
// begin, or the mark if `inputs` is targets, or NO_RESET.
static inline int documents_segments(Segment* segments, const int* inputs, int B, int T, int eot) {
    int n = 0;
    if (eot == NO_RESET) {
        segments[n].first = 0;
        segments[n].rows = B;
        segments[n++].T = T;
        return n;
    }
    for (int i = 0; i < B * T; i++) {
        if (i % T == 0 || inputs[i] == eot) {
            segments[n].first = (size_t)i;
            segments[n].rows = 1;
            segments[n++].T = 0;
        }
        segments[n - 1].T++;
    }
    return n;
}

typedef struct {
    int document_start;  // token with which documents begin, or the mark of targets, or NO_RESET
    int n;
    Segment* at;         // (n), room for every position of a batch
    // on the device, where ops are called for all segments at once; NULL: for one after the other
    const DocumentBounds* bounds;  // (B, T) of every position
    const int* places;             // of those that this rank has: number in its segment
} Segments;

static inline void segments_init(Segments* s, int B, int T) {
    s->document_start = NO_RESET;
    s->bounds = NULL;
    s->places = NULL;
    s->at = (Segment*)malloc_check(sizeof(Segment) * (size_t)B * (size_t)T, "segments");
}

static inline void segments_find(Segments* s, const int* inputs, int B, int T) {
    s->n = documents_segments(s->at, inputs, B, T, s->document_start);
}

// of the positions of rows of T
static inline void documents_bounds(DocumentBounds* bounds, const Segments* s, int T) {
    for (int i = 0; i < s->n; i++) {
        const Segment x = s->at[i];
        for (int k = 0; k < x.rows * x.T; k++) {
            const int begin = (int)(x.first % (size_t)T);
            const DocumentBounds here = {begin, begin + x.T};
            bounds[x.first + (size_t)k] = here;
        }
    }
}

static inline void documents_places(int* places, const Segments* s) {
    for (int i = 0; i < s->n; i++) {
        for (int k = 0; k < s->at[i].rows * s->at[i].T; k++) { places[s->at[i].first + (size_t)k] = k % s->at[i].T; }
    }
}

// ... where the targets may have the marks. NULL: there are none, and no document begins inside a row
static inline void segments_find_marked(Segments* s, const int* inputs, const int* targets, int B, int T) {
    segments_find(s, s->document_start < NO_RESET && targets ? targets : inputs, B, T);
}
#endif  // LLMC_DOCUMENTS_H
