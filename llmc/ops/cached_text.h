/*
Texts that are generated side by side, as a pass sees them: each has a row of the cache, which holds its keys and values
(or whatever a model keeps of each position), and some new positions behind those that are there.
    CachedText         one text of a pass: tokens n_cached .. n-1 are new
    TextImages         images in it, each of which has some of its tokens as placeholders
    text_images_alike  up to which token two texts have the same ones; text_images_copy, text_images_free
    cached_texts_new   the new positions of several texts: a pass has them one text after the other
    CACHED_TEXT_PIECE  positions that a pass has at most, where texts are no more: a longer prompt comes in pieces
    cached_text_copy   one row of the cache begins as another does
Cache (rows, room, width): position t of row r begins at (r * room + t) * width.
Cost:   a copy moves n * width elements, in the order of ops.
*/
#ifndef LLMC_CACHED_TEXT_H
#define LLMC_CACHED_TEXT_H
#include "../core/device.h"  // Device, device_copy
#include "../core/fail.h"    // malloc_check, string_copy

enum { CACHED_TEXT_PIECE = 1024 };

// a file, and a number that is another when it is; tokens at .. at + n - 1 stand for it
typedef struct { int at, n; char* path; uint64_t stamp; } TextImage;
typedef struct { TextImage* of; int n; } TextImages;    // ascending

typedef struct {
    const int* tokens;  // (n) on the host
    int row;            // of the cache
    int n_cached, n;    // positions that the cache has; and with the new ones
    const TextImages* images;  // NULL: none
} CachedText;

// a token up to which both have the same images, at most n
static inline int text_images_alike(const TextImages* a, const TextImages* b, int n) {
    for (int i = 0; i < a->n || i < b->n; i++) {
        const TextImage *x = i < a->n ? &a->of[i] : NULL, *y = i < b->n ? &b->of[i] : NULL;
        const int same_place = x && y && x->at == y->at && x->n == y->n;
        if (same_place && x->stamp == y->stamp && strcmp(x->path, y->path) == 0) { continue; }
        const int at = !y || (x && x->at < y->at) ? x->at : y->at;
        return at < n ? at : n;
    }
    return n;
}

static inline void text_images_free(TextImages* images) {
    for (int i = 0; i < images->n; i++) { free(images->of[i].path); }
    free(images->of);
    images->of = NULL, images->n = 0;
}

// of what `to` held nothing is left
static inline void text_images_copy(TextImages* to, const TextImages* from) {
    text_images_free(to);
    if (from->n == 0) { return; }
    to->of = (TextImage*)malloc_check(sizeof(TextImage) * (size_t)from->n, "images of a text");
    for (; to->n < from->n; to->n++) {
        to->of[to->n] = from->of[to->n];
        to->of[to->n].path = string_copy(from->of[to->n].path);
    }
}

static inline int cached_texts_new(const CachedText* texts, int n_texts) {
    int n = 0;
    for (int i = 0; i < n_texts; i++) { n += texts[i].n - texts[i].n_cached; }
    return n;
}

// the first n positions, of `width` bytes each, of row `from` go to another row
static inline void cached_text_copy(void* cache, size_t width, int room, int to, int from, int n, const Device* dev) {
    const size_t row = width * (size_t)room;
    device_copy((char*)cache + (size_t)to * row, (const char*)cache + (size_t)from * row, width * (size_t)n, dev);
}
#endif  // LLMC_CACHED_TEXT_H
