/*
The tokens of a batch as a pass over them has them: on the device, with what their positions see.
    token_batch_positions  of a pass
    token_batch_open, token_batch_close   room for B rows of T positions
    token_batches_open, token_batches_close, token_batch_turn   the same of several, of which one is at hand (--pp);
                        token_batch_carry: at hand it stays
    token_batch_inputs    tokens (B, T-t0) on the host come to the device; the segments of the batch are found, by its
                          tokens or by marks in its targets (conversations, text/pack.h), which else may be NULL
    token_batch_targets   targets likewise; the stretches of positions that count are found
    token_batch_texts     in generation: the new tokens of several texts, one text after the other
    token_batch_mark_starts   from now on the device has marks where documents and texts begin, for layers that carry a
                          state from position to position: token_batch_starts
    token_batch_place     from now on the device has places of positions, and of entries (entry_places.h)
With --cp tokens and targets come of whole rows, and the device has those of this rank's positions (context_ranks.h);
segments are those of whole rows.
Segments: one of all rows; with `segments.document_start`, a token (--doc-reset) or a mark, one for each piece of a
document.
*/
#ifndef LLMC_TOKEN_BATCH_H
#define LLMC_TOKEN_BATCH_H
#include "../core/device.h"      // device_alloc, device_upload
#include "../ops/cached_text.h"  // CachedText
#include "../ops/documents.h"    // Segments, segments_init, segments_find_marked
#include "../ranks/context_ranks.h"  // CpRows, cp_rows, cp_take
#include "entry_places.h"          // EntryPlaces, entry_places_take

typedef struct { int first, n; } Stretch;  // of positions

enum { STRETCH_GAP = 16 };  // so many positions without a target that counts part two stretches

typedef struct {
    int *tokens, *targets;  // (B, T) on the device; with --cp of the positions of this rank
    Stretch* counted;       // positions whose targets count, ascending, with shorter gaps
    int n_counted;
    int least_gap;          // STRETCH_GAP
    int counts_all;         // 1: one stretch of all, whatever their targets. A graph repeats what it has recorded
    Segments segments;      // what attention and positions see as one sequence
    DocumentBounds *bounds, *bounds_made;  // (B, T) of whole rows, on the device, and on the host on the way there
    int *places, *places_made;  // (B, T) likewise; with --cp of the positions of this rank. NULL: as bounds
    const CachedText* texts;  // in generation in place of segments;
    int n_texts;            // 0: there are segments
    size_t n_bytes;         // of each
    unsigned char *starts, *marks;  // (B, T) on the device, and on the host on the way there: 1 where a document
                            // begins, or in generation a text of which nothing was there. NULL: nobody asks
    int has_starts;         // somewhere but at the beginning of a row
    const RankGroup* cp;    // NULL: this rank has whole rows
    CpRows rows;            // what it has of those of the batch,
    int n;                  // positions in all
    int* own;               // with cp, on the host: on the way to the device
    EntryPlaces entries;    // device NULL: nobody asks
    int room;               // of these, in generation: positions of a row of the cache
} TokenBatch;

// Of a pass over B rows of T positions. In generation rows are those of the cache, and a pass has what is new: a piece
// of one text alone (CACHED_TEXT_PIECE), or a position of each
static inline int token_batch_positions(int B, int T, int generates) {
    const int piece = T < CACHED_TEXT_PIECE ? T : CACHED_TEXT_PIECE;
    return !generates ? B * T : B > piece ? B : piece;
}

// Bounds and places of documents are for GPUs, where calls for one after the other would be as many launches
#ifdef __CUDACC__
enum { TOKEN_BATCH_BOUNDS = 1 };
#else
enum { TOKEN_BATCH_BOUNDS = 0 };
#endif

static inline size_t token_batch_bounds_bytes_(size_t n_bytes) {
    return TOKEN_BATCH_BOUNDS * sizeof(DocumentBounds) * (n_bytes / sizeof(int));
}
static inline size_t token_batch_places_bytes_(size_t n_bytes) { return TOKEN_BATCH_BOUNDS * n_bytes; }

static inline double token_batch_bytes(int B, int T) {
    const size_t n_bytes = sizeof(int) * (size_t)B * (size_t)T;
    return 2.0 * (double)n_bytes + (double)(token_batch_bounds_bytes_(n_bytes) + token_batch_places_bytes_(n_bytes));
}

static inline void token_batch_open_bounds_(TokenBatch* x) {
    const size_t n_bounds = token_batch_bounds_bytes_(x->n_bytes), n_places = token_batch_places_bytes_(x->n_bytes);
    x->bounds = x->bounds_made = NULL;
    x->places = x->places_made = NULL;
    if (!TOKEN_BATCH_BOUNDS) { return; }
    x->bounds = (DocumentBounds*)device_alloc(n_bounds, "bounds of documents");
    x->bounds_made = (DocumentBounds*)malloc_check(n_bounds, "bounds of documents");
    x->places = (int*)device_alloc(n_places, "places in documents");
    x->places_made = (int*)malloc_check(n_places, "places in documents");
}

static inline void token_batch_close_bounds_(TokenBatch* x) {
    if (x->bounds) { device_release(x->bounds, token_batch_bounds_bytes_(x->n_bytes)); }
    if (x->places) { device_release(x->places, token_batch_places_bytes_(x->n_bytes)); }
    free(x->bounds_made);
    free(x->places_made);
}

// cp NULL: whole rows
static inline void token_batch_open(TokenBatch* x, int B, int T, const RankGroup* cp) {
    x->cp = cp;
    x->own = cp ? (int*)malloc_check(sizeof(int) * (size_t)B * (size_t)T, "tokens") : NULL;
    x->n_bytes = sizeof(int) * (size_t)B * (size_t)T;
    x->tokens = (int*)device_alloc(x->n_bytes, "tokens");
    x->targets = (int*)device_alloc(x->n_bytes, "targets");
    x->counted = (Stretch*)malloc_check(sizeof(Stretch) * (size_t)B * (size_t)T, "stretches of targets");
    x->least_gap = STRETCH_GAP;
    token_batch_open_bounds_(x);
    segments_init(&x->segments, B, T);
}

static inline void token_batch_close(TokenBatch* x) {
    device_release(x->tokens, x->n_bytes);
    device_release(x->targets, x->n_bytes);
    token_batch_close_bounds_(x);
    free(x->counted);
    if (x->starts) { device_release(x->starts, x->n_bytes / sizeof(int)); }
    free(x->marks);
    entry_places_close(&x->entries);
    free(x->segments.at);
    free(x->own);
}

// room for marks, once x is open
static inline void token_batch_mark_starts(TokenBatch* x) {
    const size_t n = x->n_bytes / sizeof(int);
    x->starts = (unsigned char*)device_alloc(n, "where documents begin");
    x->marks = (unsigned char*)malloc_check(n, "where documents begin");
}

// as measured (entry_places_measure), once x is open; room: positions of a row of the cache
static inline void token_batch_place(TokenBatch* x, const EntryPlaces* entries, int room) {
    x->entries = *entries;
    x->room = room;
    entry_places_open(&x->entries);
}

// of the batch that is at hand, or of position `first` of its texts; NULL: rows alone begin documents
static inline const unsigned char* token_batch_starts(const TokenBatch* x, size_t first) {
    return x->has_starts ? x->starts + first : NULL;
}

// on the heap
static inline TokenBatch* token_batches_open(int n, int B, int T, const RankGroup* cp) {
    const size_t n_bytes = sizeof(TokenBatch) * (size_t)n;
    TokenBatch* all = (TokenBatch*)memset(malloc_check(n_bytes, "batches"), 0, n_bytes);
    for (int k = 0; k < n; k++) { token_batch_open(&all[k], B, T, cp); }
    return all;
}

// x: number k of them, which is at hand
static inline void token_batches_close(TokenBatch* all, int n, TokenBatch* x, int k) {
    for (int i = 0; i < n && all; i++) { token_batch_close(i == k ? x : &all[i]); }
    free(all);
}

// x, at hand, goes back as number `from`, and number `to` comes; documents begin there as here
static inline void token_batch_turn(TokenBatch* x, TokenBatch* all, int from, int to) {
    const int document_start = x->segments.document_start;
    all[from] = *x;
    *x = all[to];
    x->segments.document_start = document_start;
}

// x goes along, and changes its number with that one
static inline void token_batch_carry(TokenBatch* all, int from, int to) { all[from] = all[to]; }

// of n positions, or of whole rows what is this rank's; returns how many
static inline int token_batch_upload_(TokenBatch* x, int* to, const int* from, int n, const Device* dev) {
    if (x->cp) {
        cp_take(x->own, from, &x->rows);
        from = x->own;
        n = cp_positions(&x->rows);
    }
    device_upload(to, from, sizeof(int) * (size_t)n, dev);
    return n;
}

// of n positions, or of whole rows what is this rank's
static inline void token_batch_upload_marks_(TokenBatch* x, int n, const Device* dev) {
    if (!x->has_starts) { return; }
    if (x->cp) {
        cp_take_bytes(x->own, x->marks, 1, &x->rows);
        n = cp_positions(&x->rows);
    }
    device_upload(x->starts, x->cp ? (const unsigned char*)x->own : x->marks, (size_t)n, dev);
}

// N positions, where segments begin inside a row
static inline void token_batch_mark_(TokenBatch* x, int N, const Device* dev) {
    x->has_starts = x->starts != NULL && x->segments.document_start != NO_RESET;
    if (!x->has_starts) { return; }
    memset(x->marks, 0, (size_t)N);
    for (int i = 0; i < x->segments.n; i++) { x->marks[x->segments.at[i].first] = 1; }
    token_batch_upload_marks_(x, N, dev);
}

// of B rows of T positions, whose segments have been found
static inline void token_batch_bound_(TokenBatch* x, int B, int T, const Device* dev) {
    x->segments.bounds = NULL, x->segments.places = NULL;
    if (!x->bounds || x->segments.document_start == NO_RESET) { return; }
    documents_bounds(x->bounds_made, &x->segments, T);
    device_upload(x->bounds, x->bounds_made, sizeof(DocumentBounds) * (size_t)B * (size_t)T, dev);
    documents_places(x->places_made, &x->segments);
    token_batch_upload_(x, x->places, x->places_made, B * T, dev);
    x->segments.bounds = x->bounds, x->segments.places = x->places;
}

static inline void token_batch_inputs(TokenBatch* x, const int* tokens, const int* targets, int B, int T, int t0,
                                      const Device* dev) {
    const RankGroup alone = {1, 0, 1, 1, 0, NULL, NULL};
    x->rows = cp_rows(B, T, x->cp ? x->cp : &alone);
    x->n = token_batch_upload_(x, x->tokens, tokens, B * (T - t0), dev);
    segments_find_marked(&x->segments, tokens, targets, B, T);
    token_batch_bound_(x, B, T, dev);
    token_batch_mark_(x, B * T, dev);
    if (x->entries.device) { entry_places_take(&x->entries, &x->segments, &x->rows, dev); }
    x->n_texts = 0;
}

// texts stay as they are until the pass is over; returns the positions that it has
static inline int token_batch_texts(TokenBatch* x, const CachedText* texts, int n_texts, const Device* dev) {
    int first = 0;
    for (int i = 0; i < n_texts; i++) {
        const int n_new = texts[i].n - texts[i].n_cached;
        device_upload(x->tokens + first, texts[i].tokens + texts[i].n_cached, sizeof(int) * (size_t)n_new, dev);
        if (x->starts) {
            memset(x->marks + first, 0, (size_t)n_new);
            x->marks[first] = texts[i].n_cached == 0;
        }
        first += n_new;
    }
    x->has_starts = x->starts != NULL;
    token_batch_upload_marks_(x, first, dev);
    if (x->entries.device) { entry_places_texts(&x->entries, texts, n_texts, x->room, dev); }
    x->texts = texts;
    x->n_texts = n_texts;
    return first;
}

// of the N positions of the batch, after token_batch_inputs
static inline void token_batch_targets(TokenBatch* x, const int* targets, int N, const Device* dev) {
    N = token_batch_upload_(x, x->targets, targets, N, dev);
    targets = x->cp ? x->own : targets;
    x->n_counted = x->counts_all;
    x->counted[0].first = 0, x->counted[0].n = N;
    for (int i = 0; i < N && !x->counts_all; i++) {
        if (targets[i] < 0) { continue; }
        Stretch* last = x->n_counted > 0 ? &x->counted[x->n_counted - 1] : NULL;
        if (!last || i - (last->first + last->n) >= x->least_gap) {
            last = &x->counted[x->n_counted++];
            last->first = i;
        }
        last->n = i + 1 - last->first;
    }
}
#endif  // LLMC_TOKEN_BATCH_H
