/*
What a text that is generated has seen: the rows that a vision tower made of its images, and where they and all behind
them stand. It is kept beside the text's row of the cache (cached_text.h), for positions behind an image are not those
of the tokens: an image of h x w tokens moves the text on by the larger of both.
    text_sight_add     one image more, whose rows the tower has just made
    text_sight_place   where its images stand, once all are there
    text_sight_fill    of tokens first .. end - 1 the positions on three axes, and the rows that stand there
    text_sight_share   one text begins as another does
    text_sight_clear
Positions are those of image_splice.h.
Source: huggingface/transformers, get_rope_index; doc/qwen36.md "Images"
*/
#ifndef LLMC_TEXT_SIGHT_H
#define LLMC_TEXT_SIGHT_H
#include "../core/device.h"      // Device, device_alloc, device_copy
#include "../core/floatx.h"      // floatX
#include "../ops/cached_text.h"  // TextImages
#include <assert.h>

typedef struct {
    int n_images, n_rows;    // seen so far; their rows
    int* grids;              // (n_images, 2): rows and columns, in tokens
    floatX* rows;            // (n_rows, D), on the device
    int n;                   // tokens up to behind the last image
    int *positions, *to;     // (3, n), (n): of each of these, and the row that stands there, -1: none
    int next;                // the position behind
} TextSight;

static inline size_t text_sight_bytes_(const TextSight* s, int D) {
    return sizeof(floatX) * (size_t)s->n_rows * (size_t)D;
}

static inline void text_sight_clear(TextSight* s, int D) {
    if (s->n_rows > 0) { device_release(s->rows, text_sight_bytes_(s, D)); }
    free(s->grids);
    free(s->positions);
    memset(s, 0, sizeof *s);
}

// rows (h * w, D) on the device; NULL: this rank puts none into texts (--pp), and only asks where they stand
static inline void text_sight_add(TextSight* s, const floatX* rows, int h, int w, int D, const Device* dev) {
    const size_t before = text_sight_bytes_(s, D), more = sizeof(floatX) * (size_t)(h * w) * (size_t)D;
    floatX* all = rows ? (floatX*)device_alloc(before + more, "rows of images") : NULL;
    if (rows && before > 0) {
        device_copy(all, s->rows, before, dev);
        device_sync(dev);
        device_release(s->rows, before);
    }
    if (rows) { device_copy((char*)all + before, rows, more, dev); }
    s->rows = all;
    s->n_rows += rows ? h * w : 0;
    s->grids = (int*)realloc_check(s->grids, 2 * sizeof(int) * ((size_t)s->n_images + 1), "grids of images");
    s->grids[2 * s->n_images] = h, s->grids[2 * s->n_images + 1] = w;
    s->n_images++;
}

// images: the ones that were added, and where they stand
static inline void text_sight_place(TextSight* s, const TextImages* images) {
    const TextImage* last = &images->of[images->n - 1];
    int i = 0, row = 0, now = 0;
    assert(images->n == s->n_images);
    free(s->positions);
    s->n = last->at + last->n;
    s->positions = (int*)malloc_check(4 * sizeof(int) * (size_t)s->n, "positions of a text");
    s->to = s->positions + 3 * (size_t)s->n;
    for (int k = 0; k < images->n; k++) {
        const int h = s->grids[2 * k], w = s->grids[2 * k + 1], at = images->of[k].at;
        assert(images->of[k].n == h * w && at >= i);
        for (; i < at; i++, now++) {
            for (int axis = 0; axis < 3; axis++) { s->positions[axis * s->n + i] = now; }
            s->to[i] = -1;
        }
        for (int j = 0; j < h * w; j++, i++) {
            s->positions[i] = now;
            s->positions[s->n + i] = now + j / w;
            s->positions[2 * s->n + i] = now + j % w;
            s->to[i] = row++;
        }
        now += h > w ? h : w;
    }
    s->next = now;
}

// positions (3, N) and to (N) from place `at` on
static inline void text_sight_fill(const TextSight* s, int* positions, int* to, int N, int at, int first, int end) {
    for (int i = first; i < end; i++, at++) {
        for (int axis = 0; axis < 3; axis++) {
            positions[axis * N + at] = i < s->n ? s->positions[axis * s->n + i] : s->next + i - s->n;
        }
        to[at] = i < s->n ? s->to[i] : -1;
    }
}

// of what `to` held nothing is left
static inline void text_sight_share(TextSight* to, const TextSight* from, int D, const Device* dev) {
    text_sight_clear(to, D);
    if (from->n_images == 0) { return; }
    *to = *from;
    if (from->n_rows > 0) {
        to->rows = (floatX*)device_alloc(text_sight_bytes_(from, D), "rows of images");
        device_copy(to->rows, from->rows, text_sight_bytes_(from, D), dev);
    }
    to->grids = (int*)memcpy(malloc_check(2 * sizeof(int) * (size_t)from->n_images, "grids of images"), from->grids,
                             2 * sizeof(int) * (size_t)from->n_images);
    to->positions = (int*)memcpy(malloc_check(4 * sizeof(int) * (size_t)from->n, "positions of a text"),
                                 from->positions, 4 * sizeof(int) * (size_t)from->n);
    to->to = to->positions + 3 * (size_t)from->n;
}
#endif  // LLMC_TEXT_SIGHT_H
