/*
Images in a text: rows that a vision tower has made stand at placeholders in place of their embeddings, and positions
have three axes there, time, row and column, by which RoPE turns interleaved pairs.
    image_splice_take       a batch and the grids of its images come to the device; 0 with the reason
    image_splice_place      positions that somebody knows already (text_sight.h)
    image_splice_forward    encoded (N, D), the embeddings, gets the images' rows
    image_splice_backward   dimages, the images' rows of dencoded
    image_splice_next, image_splice_next_backward   the same at the position before each image row, where an MTP module
                            reads it as the next one (mtp.h); what is asked of the rows there joins dimages
    image_splice_free
Images stand in the order of their placeholders, one run of them each: of frames x h x w patches, merged, frames * (h /
merge) * (w / merge). Frames of videos have a placeholder of their own, and each is an image by itself. Of a text token
all axes are alike, `now`, which is 0 where a segment (documents.h) begins and grows by 1; token (t, r, c) of an image
has (now + t, now + r, now + c), and behind it now grows by its larger side.
tokens (N): those of the text, -1 at placeholders, so that no embedding learns there.
Source: huggingface/transformers, get_rope_index; doc/qwen36.md "Images"
*/
#ifndef LLMC_IMAGE_SPLICE_H
#define LLMC_IMAGE_SPLICE_H
#include "../core/floatx.h"    // floatX
#include "../ops/documents.h"  // Segments
#include "../ops/embedding.h"  // token_embedding_forward: rows by their numbers
#include "../ops/residual.h"   // residual_forward
#include "../ops/rope.h"       // RopeTable, rope_table_at
#include "vision_tower.h"      // ImageRows

typedef struct {
    int N, n;        // positions of the batch, 0: there are no images; placeholders among them
    int *tokens;     // (N), on the device, as all of these
    int *to;         // (N): the image row that stands here, -1: none
    int *from;       // (n): where each image row stands
    RopeTable rope;  // (N, rotated / 2)
    size_t n_bytes;  // of tokens, of to and of from
    int *next, *next_tokens, *next_from;  // as to, tokens and from, of the next positions; NULL: nobody reads ahead
    floatX *dnext, *rows;  // (n, D), of these; rows: the images' where another rank has their tower (--pp), else NULL
    size_t dnext_bytes;
} ImageSplice;

// how a text has images: its placeholders, of images and of frames of videos; patches of the side of a token's block;
// channels of a head that RoPE turns, slowest by `theta`, and the axis of each pair
typedef struct {
    int placeholders[2], merge, rotated;
    double theta;
    const int* axis;
    int ahead;  // channels of a row where an MTP module reads it too; 0: there is none
    int is_far; // it reads what another rank has made
} ImageText;

static inline void image_splice_free(ImageSplice* s) {
    if (s->N == 0) { return; }
    device_release(s->tokens, 3 * s->n_bytes);
    rope_table_free(&s->rope);
    if (s->next) {
        device_release(s->next, 3 * s->n_bytes);
        device_release(s->dnext, s->dnext_bytes);
        if (s->rows) { device_release(s->rows, s->dnext_bytes); }
    }
    memset(s, 0, sizeof *s);
}

// images, or frames of videos, that wait for their placeholders: the next, the end, and its first row of the tower's
typedef struct { int next, end, row; } ImageQueue_;

static inline int image_tokens_(const int* grid, int merge) { return grid[0] * (grid[1] / merge) * (grid[2] / merge); }

// The next image of a queue stands from position i on, of a row that ends before `end`; now: its position in the text.
// Returns its tokens, 0 with the reason
static inline int image_place_(int* positions, int* to, int* from, ImageQueue_* queue, const int* inputs, int N, int i,
                               int end, int now, const ImageRows* x, int merge, ErrorText* error) {
    const int *g = x->grids + 3 * queue->next, h = g[1] / merge, w = g[2] / merge, n = image_tokens_(g, merge);
    for (int k = 0; k < n; k++) {
        if (i + k == end || inputs[i + k] != inputs[i]) {
            return error_set(error, "position %d: expected %d placeholders for an image of %d x %d tokens%s, found %d",
                             i, n, h, w, g[0] > 1 ? " in several frames" : "", k);
        }
        positions[i + k] = now + k / (h * w);
        positions[N + i + k] = now + k % (h * w) / w;
        positions[2 * N + i + k] = now + k % w;
        from[queue->row] = i + k;
        to[i + k] = queue->row++;
    }
    queue->next++;
    return n;
}

// positions (3, N) on the host; to (N), from (tokens of all images)
static inline int image_positions_(int* positions, int* to, int* from, const int* inputs, int N,
                                   const Segments* segments, const ImageRows* x, const ImageText* text,
                                   ErrorText* error) {
    ImageQueue_ queues[2] = {{0, x->n - x->n_frames, 0}, {x->n - x->n_frames, x->n, 0}};
    for (int k = 0; k < queues[0].end; k++) { queues[1].row += image_tokens_(x->grids + 3 * k, text->merge); }
    for (int j = 0; j < segments->n; j++) {
        const Segment* s = &segments->at[j];
        for (int b = 0; b < s->rows; b++) {
            const int first = (int)s->first + b * s->T, end = first + s->T;
            for (int i = first, now = 0; i < end;) {
                const int is_video = inputs[i] == text->placeholders[1];
                ImageQueue_* queue = &queues[is_video];
                to[i] = -1;
                if (!is_video && inputs[i] != text->placeholders[0]) {
                    for (int axis = 0; axis < 3; axis++) { positions[axis * N + i] = now; }
                    i++, now++;
                    continue;
                }
                if (queue->next == queue->end) {
                    return error_set(error, "position %d: expected no more placeholders than the %s have tokens, found "
                                     "one", i, is_video ? "videos" : "images");
                }
                const int* g = x->grids + 3 * queue->next;
                const int n = image_place_(positions, to, from, queue, inputs, N, i, end, now, x, text->merge, error);
                if (n == 0) { return 0; }
                i += n;
                now += (g[1] > g[2] ? g[1] : g[2]) / text->merge;
            }
        }
    }
    for (int k = 0; k < 2; k++) {
        if (queues[k].next == queues[k].end) { continue; }
        return error_set(error, "expected placeholders for all %s, found none for the last %d of them",
                         k ? "frames of videos" : "images", queues[k].end - queues[k].next);
    }
    return 1;
}

static inline void image_splice_angles_(ImageSplice* s, const int* positions, const ImageText* text,
                                        const Device* dev) {
    float* frequencies = (float*)malloc_check(sizeof(float) * (size_t)text->rotated, "frequencies of RoPE");
    rope_frequencies(frequencies, text->theta, text->rotated);
    rope_table_room(&s->rope, s->N, text->rotated);
    rope_table_at(&s->rope, frequencies, positions, text->axis, s->N, text->rotated, dev);
    free(frequencies);
}

// of N positions on the host: which (3, N), and which rows of images (N) stand there. tokens (N), from (N): of backward
static inline void image_splice_place(ImageSplice* s, const int* positions, const int* tokens, const int* to,
                                      const int* from, int N, int n, const ImageText* text, const Device* dev) {
    image_splice_free(s);
    s->N = N, s->n = n, s->n_bytes = sizeof(int) * (size_t)N;
    s->tokens = (int*)device_alloc(3 * s->n_bytes, "placeholders");
    s->to = s->tokens + N, s->from = s->to + N;
    device_upload(s->tokens, tokens, s->n_bytes, dev);
    device_upload(s->to, to, s->n_bytes, dev);
    device_upload(s->from, from, s->n_bytes, dev);
    device_sync(dev);
    image_splice_angles_(s, positions, text, dev);
}

// The same one position further: of rows of T positions, the last of which has its own row. What is asked of that is 0,
// for nothing is predicted there. In place
static inline void image_splice_ahead_(ImageSplice* s, int* tokens, int* to, int* from, int T, int D, int is_far,
                                       const Device* dev) {
    for (int i = 0; i < s->N; i++) {
        if (i % T == T - 1) { continue; }
        tokens[i] = tokens[i + 1];
        to[i] = to[i + 1];
    }
    for (int k = 0; k < s->n; k++) { from[k] = from[k] % T > 0 ? from[k] - 1 : -1; }
    s->next = (int*)device_alloc(3 * s->n_bytes, "placeholders");
    s->next_tokens = s->next + s->N, s->next_from = s->next_tokens + s->N;
    s->dnext_bytes = sizeof(floatX) * (size_t)s->n * (size_t)D;
    s->dnext = (floatX*)device_alloc(s->dnext_bytes, "gradients of images");
    if (is_far) { s->rows = (floatX*)device_alloc(s->dnext_bytes, "rows of images"); }
    device_upload(s->next, to, s->n_bytes, dev);
    device_upload(s->next_tokens, tokens, s->n_bytes, dev);
    device_upload(s->next_from, from, s->n_bytes, dev);
    device_sync(dev);
}

// Of a batch (B, T) with its segments
static inline int image_splice_take(ImageSplice* s, const int* inputs, const Segments* segments, int B, int T,
                                    const ImageRows* x, const ImageText* text, const Device* dev, ErrorText* error) {
    const size_t N = (size_t)B * (size_t)T;
    const size_t n = (size_t)x->P / (size_t)(text->merge * text->merge), room = n > N ? n : N;
    int* host = (int*)malloc_check(sizeof(int) * (5 * N + room), "placeholders");
    int *tokens = host, *to = host + N, *from = host + 2 * N, *positions = host + 2 * N + room;
    memset(from, 0, sizeof(int) * room);
    const int good = image_positions_(positions, to, from, inputs, (int)N, segments, x, text, error);
    for (size_t i = 0; i < N && good; i++) { tokens[i] = to[i] < 0 ? inputs[i] : -1; }
    if (good) { image_splice_place(s, positions, tokens, to, from, (int)N, (int)n, text, dev); }
    if (good && text->ahead > 0) { image_splice_ahead_(s, tokens, to, from, T, text->ahead, text->is_far, dev); }
    free(host);
    return good;
}

static inline void image_splice_forward(floatX* encoded, const floatX* images, const ImageSplice* s, int D,
                                        const Device* dev) {
    token_embedding_forward(encoded, s->to, images, s->N, D, dev);
}

static inline void image_splice_backward(floatX* dimages, const floatX* dencoded, const ImageSplice* s, int D,
                                         const Device* dev) {
    token_embedding_forward(dimages, s->from, dencoded, s->n, D, dev);
    if (s->next) { residual_forward(dimages, dimages, s->dnext, (size_t)s->n * (size_t)D, dev); }
}

// next (N, D), the embeddings of the next tokens, gets the images' rows
static inline void image_splice_next(floatX* next, const floatX* images, const ImageSplice* s, int D,
                                     const Device* dev) {
    token_embedding_forward(next, s->next, images, s->N, D, dev);
}

// before image_splice_backward
static inline void image_splice_next_backward(const ImageSplice* s, const floatX* dnext, int D, const Device* dev) {
    device_zero(s->dnext, s->dnext_bytes, dev);
    token_embedding_forward(s->dnext, s->next_from, dnext, s->n, D, dev);
}
#endif  // LLMC_IMAGE_SPLICE_H
