/*
Places and entry windows (ops/entry_windows.h) of a batch, or of texts that are generated, on the device: what attention
over entries asks of every layer alike.
    EntryPlaces         the positions; and for two kinds of entries, of ratio[0] and ratio[1] tokens, their windows
    entry_places_open, entry_places_close   room for passes of N positions, in generation of so many texts
    entry_places_take   of the segments of a batch, of which this pass has `rows`
    entry_places_texts  of new positions of texts whose caches have `room` positions a row
Caches in generation: keys (rows, room), entries (rows, room / r). Tokens whose entry is still to come wait with those
of the entry before it, from entry_first_token on; a pass has them and its new ones, text by text, in one buffer
(EntryTokens): entry windows count by its rows.
With --cp a pass has a chunk of each row, and `before` rows of keys and tokens before it (entry_ranks.h).
Ratio 0: the model has no such entries.
*/
#ifndef LLMC_ENTRY_PLACES_H
#define LLMC_ENTRY_PLACES_H
#include "../core/device.h"       // device_alloc, device_upload, device_pinned
#include "../ops/cached_text.h"   // CachedText
#include "../ops/entry_windows.h" // Places, EntryWindows
#include "../ranks/context_ranks.h"  // CpRows

enum { ENTRY_KINDS = 2 };

typedef struct {
    int ratio[ENTRY_KINDS], overlap[ENTRY_KINDS];
    int most_N, most_texts;    // room
    int before, most_tokens;   // rows before those of a chunk; room for rows of keys and tokens, if there are such
    Places places;
    const int* is_last;        // (N) of its document; in training alone
    Places tokens;             // of the rows of keys and tokens: t and behind alone
    EntryWindows windows[ENTRY_KINDS];
    const int* turns[ENTRY_KINDS];  // (W) the position at which an entry turns: of its first token; -1: there is none
    int *device, *host;        // of all arrays; host: on its way
    size_t n;                  // ints
} EntryPlaces;

// entries that a pass may make
static inline int entry_places_most_(const EntryPlaces* x, int i) {
    return x->ratio[i] > 0 ? x->most_N / x->ratio[i] + x->most_texts : 0;
}

static inline size_t entry_places_ints_(const EntryPlaces* x) {
    size_t n = 4 * (size_t)x->most_N + 2 * (size_t)x->most_tokens;
    for (int i = 0; i < ENTRY_KINDS; i++) {
        if (x->ratio[i] > 0) { n += (size_t)x->most_N + 3 * (size_t)entry_places_most_(x, i); }
    }
    return n;
}

// Sizes only. The first kind has overlapping windows. B rows of a chunk have `before` rows before them. Returns the
// bytes on the device
static inline double entry_places_measure(EntryPlaces* x, const int ratio[ENTRY_KINDS], int N, int n_texts, int B,
                                          int before) {
    memset(x, 0, sizeof *x);
    for (int i = 0; i < ENTRY_KINDS; i++) { x->ratio[i] = ratio[i], x->overlap[i] = i == 0; }
    x->most_N = N, x->most_texts = n_texts;
    x->before = before, x->most_tokens = before > 0 ? N + B * before : 0;
    x->n = entry_places_ints_(x);
    return (double)sizeof(int) * (double)x->n;
}

static inline void entry_places_open(EntryPlaces* x) {
    x->device = (int*)device_alloc(sizeof(int) * x->n, "where positions stand");
    x->host = (int*)device_pinned(sizeof(int) * x->n, "where positions stand");
}

static inline void entry_places_close(EntryPlaces* x) {
    if (!x->device) { return; }
    device_release(x->device, sizeof(int) * x->n);
    device_pinned_free(x->host);
    x->device = x->host = NULL;
}

// the arrays on the host, and where they will be
typedef struct {
    int *t, *first_key, *behind, *is_last, *token_t, *token_behind;
    int *token[ENTRY_KINDS], *number[ENTRY_KINDS], *turn[ENTRY_KINDS], *first_entry[ENTRY_KINDS];
} EntryArrays;

static inline int* entry_array_(EntryPlaces* x, const int** on_device, int** at, int n) {
    int* host = *at;
    *on_device = x->device + (host - x->host);
    *at += n;
    return host;
}

static inline EntryArrays entry_arrays_(EntryPlaces* x, int N) {
    EntryArrays a;
    int* at = x->host;
    memset(&a, 0, sizeof a);
    x->places.N = N;
    a.t = entry_array_(x, &x->places.t, &at, x->most_N);
    a.first_key = entry_array_(x, &x->places.first_key, &at, x->most_N);
    a.behind = entry_array_(x, &x->places.behind, &at, x->most_N);
    a.is_last = entry_array_(x, &x->is_last, &at, x->most_N);
    x->tokens = x->places;
    if (x->before > 0) {
        a.token_t = entry_array_(x, &x->tokens.t, &at, x->most_tokens);
        a.token_behind = entry_array_(x, &x->tokens.behind, &at, x->most_tokens);
    }
    for (int i = 0; i < ENTRY_KINDS; i++) {
        EntryWindows* w = &x->windows[i];
        if (x->ratio[i] == 0) { continue; }
        w->r = x->ratio[i], w->overlap = x->overlap[i];
        a.token[i] = entry_array_(x, &w->token, &at, entry_places_most_(x, i));
        a.number[i] = entry_array_(x, &w->number, &at, entry_places_most_(x, i));
        a.turn[i] = entry_array_(x, &x->turns[i], &at, entry_places_most_(x, i));
        a.first_entry[i] = entry_array_(x, &w->first_entry, &at, x->most_N);
    }
    return a;
}

static inline void entry_places_upload_(EntryPlaces* x, const EntryArrays* a, const Device* dev) {
    for (int i = 0; i < ENTRY_KINDS; i++) {
        for (int w = 0; w < x->windows[i].W && x->ratio[i] > 0; w++) {
            a->turn[i][w] = a->token[i][w] < 0 ? -1 : a->number[i][w] * x->ratio[i];
        }
    }
    device_upload(x->device, x->host, sizeof(int) * x->n, dev);
    device_sync(dev);  // the next batch writes where this one still is
}

static inline void entry_places_take(EntryPlaces* x, const Segments* segments, const CpRows* rows, const Device* dev) {
    const BatchPiece piece = {rows->B, rows->T, rows->begin[0], rows->n, x->before};
    const EntryArrays a = entry_arrays_(x, rows->B * rows->n);
    places_of_batch(a.t, a.first_key, a.behind, a.is_last, segments, &piece);
    if (x->before > 0) {
        x->tokens.N = batch_keys(&piece);
        tokens_of_batch(a.token_t, a.token_behind, segments, &piece);
    }
    for (int i = 0; i < ENTRY_KINDS; i++) {
        if (x->ratio[i] == 0) { continue; }
        x->windows[i].W = rows->B * (rows->n / x->ratio[i]);
        entry_windows_of_batch(a.token[i], a.number[i], a.first_entry[i], x->ratio[i], segments, &piece);
    }
    entry_places_upload_(x, &a, dev);
}

// ---- generation ----

// the first token that an entry needs which is still to come when a text has n: with overlap one window earlier
static inline int entry_first_token(int n, int r, int overlap) {
    const int first = (n / r - overlap) * r;
    return first > 0 ? first : 0;
}

// most tokens that wait so
static inline int entry_most_tokens(int r, int overlap) { return (1 + overlap) * r; }

static inline void entry_places_texts(EntryPlaces* x, const CachedText* texts, int n_texts, int room,
                                      const Device* dev) {
    const EntryArrays a = entry_arrays_(x, cached_texts_new(texts, n_texts));
    for (int i = 0, at = 0; i < n_texts; i++) {
        for (int t = texts[i].n_cached; t < texts[i].n; t++, at++) {
            a.t[at] = t, a.first_key[at] = texts[i].row * room, a.behind[at] = a.is_last[at] = 0;
            for (int k = 0; k < ENTRY_KINDS; k++) {
                if (x->ratio[k] > 0) { a.first_entry[k][at] = texts[i].row * (room / x->ratio[k]); }
            }
        }
    }
    for (int k = 0; k < ENTRY_KINDS; k++) {
        const int r = x->ratio[k];
        int W = 0;
        for (int i = 0, rows = 0; i < n_texts && r > 0; i++) {
            const int first = entry_first_token(texts[i].n_cached, r, x->overlap[k]);
            for (int w = texts[i].n_cached / r; w < texts[i].n / r; w++, W++) {
                a.token[k][W] = rows + w * r - first;
                a.number[k][W] = w;
            }
            rows += texts[i].n - first;
        }
        x->windows[k].W = W;
    }
    entry_places_upload_(x, &a, dev);
}
#endif  // LLMC_ENTRY_PLACES_H
