/*
Texts that are generated side by side, as a pass sees them: each has a row of the cache, which holds its keys and values
(or whatever a model keeps of each position), and some new positions behind those that are there.
    CachedText         one text of a pass: tokens n_cached .. n-1 are new
    cached_texts_new   the new positions of several texts: a pass has them one text after the other
    cached_text_copy   one row of the cache begins as another does
Cache (rows, room, width): position t of row r begins at (r * room + t) * width.
Cost:   a copy moves n * width elements, in the order of ops.
*/
#ifndef LLMC_CACHED_TEXT_H
#define LLMC_CACHED_TEXT_H
#include "../core/device.h"  // Device, device_copy

typedef struct {
    const int* tokens;  // (n) on the host
    int row;            // of the cache
    int n_cached, n;    // positions that the cache has; and with the new ones
} CachedText;

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
