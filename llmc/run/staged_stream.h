/*
What is stored as fp8 or fp4 on its way to a GPU: a slice waits in host memory until all of it is there, and goes to its
place in one piece. In front of the sink of model_stream_open, which writes such slices where they stay.
    staged_open     that sink; where the host and the device share memory, the one that was given
    staged_close    frees what it has taken
    staged_copy     all parameters as they are stored, on the host, where those of a GPU cannot be read slice by slice;
                    NULL: they can. staged_copy_free
Bits:   floats that become fp8 are rounded by bands of 128 rows, and what a table stores as bf16 goes to the nearest: as
        in C. A GPU's own bf16, which nobody has asked for, is rounded by ranks/model.h.
Cost:   host memory for the largest such slice, one copy more of each byte.
*/
#ifndef LLMC_STAGED_STREAM_H
#define LLMC_STAGED_STREAM_H
#include "../core/bf16.h"    // bf16_widen, bf16_nearest
#include "../ranks/model_stream.h"  // model_stream_bands

typedef struct {
    SliceSink sink;        // that of model_stream_open
    const Model* m;
    const Device* dev;
    uint8_t* bytes;        // of the slice that is under way, with its scales
    void *to, *to_scales;  // where that stays; NULL: it goes through `room`
    float* room;           // the sink's own; what ranks compare
    int is_in_room;        // floats are
} StagedStream;

// bytes of a slice of row i, as this rank stores it, and of its scales
static inline size_t staged_bytes_(const Model* m, int i) {
    return tensor_stored_size(&m->held[i], model_part_elements(m, i));
}
static inline size_t staged_scales_at_(const Model* m, int i) { return (staged_bytes_(m, i) + 15) / 16 * 16; }
static inline size_t staged_size_(const Model* m, int i) {
    return staged_scales_at_(m, i) + tensor_scale_bytes(&m->held[i], m->held[i].stored);
}

static inline int staged_row_(const StagedStream* s, const Tensor* t) { return (int)(t - s->m->table); }

static inline float* staged_room_(void* stream, const Tensor* t, int k) {
    StagedStream* s = (StagedStream*)stream;
    s->to = NULL;
    s->is_in_room = 1;
    return s->room = s->sink.room(s->sink.to, t, k);
}

// the sink takes the slice for one that is written where it stays
static inline uint8_t* staged_begin_(StagedStream* s, const Tensor* t, int k, Stored kind) {
    s->room = s->sink.room(s->sink.to, t, k);
    s->is_in_room = 0;
    s->to = s->sink.scaled(s->sink.to, t, k, kind, &s->to_scales);
    return s->to ? s->bytes : NULL;
}

static inline uint8_t* staged_scaled_(void* stream, const Tensor* t, int k, Stored kind, void** scales) {
    StagedStream* s = (StagedStream*)stream;
    *scales = s->bytes + staged_scales_at_(s->m, staged_row_(s, t));
    return staged_begin_(s, t, k, kind);
}

static inline int staged_takes_bands_(void* stream, const Tensor* t, int k) {
    return staged_begin_((StagedStream*)stream, t, k, STORED_FP8) != NULL;
}

static inline void staged_bands_(void* stream, const Tensor* t, int k, int band, int n, const float* x) {
    const StagedStream* s = (const StagedStream*)stream;
    const TensorPart part = slice_sink_part(&s->sink, t, k);
    float* scales = (float*)(void*)(s->bytes + staged_scales_at_(s->m, staged_row_(s, t)));
    model_stream_bands(s->bytes, scales, t, &part, band, n, x);
}

static inline uint16_t* staged_halves_(void* stream, const Tensor* t, int k, int is_exact) {
    StagedStream* s = (StagedStream*)stream;
    s->to = NULL;
    s->is_in_room = 0;
    return s->sink.halves(s->sink.to, t, k, is_exact);
}

static inline int staged_needs_(void* stream, const Tensor* t, int k) {
    const StagedStream* s = (const StagedStream*)stream;
    return slice_sink_needs(&s->sink, t, k);
}

static inline TensorPart staged_part_(void* stream, const Tensor* t, int k) {
    const StagedStream* s = (const StagedStream*)stream;
    return slice_sink_part(&s->sink, t, k);
}

static inline void staged_send_(const StagedStream* s, const Tensor* t) {
    const int i = staged_row_(s, t);
    const Tensor* held = &s->m->held[i];
    const size_t n_floats = sizeof(float) * model_part_elements(s->m, i), n = staged_size_(s->m, i);
    const size_t n_bytes = staged_bytes_(s->m, i), scales_at = staged_scales_at_(s->m, i);
    memset(s->bytes + n_bytes, 0, scales_at - n_bytes);  // ranks compare it, too
    memcpy(s->room, s->bytes, n < n_floats ? n : n_floats);
    device_upload(s->to, s->bytes, n_bytes, s->dev);
    device_upload(s->to_scales, s->bytes + scales_at, tensor_scale_bytes(held, held->stored), s->dev);
}

static inline void staged_done_(void* stream, const Tensor* t, int k) {
    StagedStream* s = (StagedStream*)stream;
    const int i = staged_row_(s, t);
    const Stored stored = s->m->held[i].stored;
    const size_t n = tensor_slice_elements(t);
    if (s->is_in_room && stored == STORED_FP8 && model_held_slice(s->m, i, k) >= 0) {
        staged_bands_(s, t, k, 0, tensor_bands(t), s->room);
        staged_begin_(s, t, k, STORED_FP8);
    }
    for (size_t j = 0; s->is_in_room && stored == STORED_BF16 && j < n; j++) {
        s->room[j] = bf16_widen(bf16_nearest(s->room[j]));
    }
    if (s->to) { staged_send_(s, t); }
    slice_sink_done(&s->sink, t, k);
}

static inline SliceSink staged_open(StagedStream* s, const Model* m, SliceSink sink, const Device* dev) {
    const SliceSink staged = {staged_room_,  staged_done_,  s,              staged_halves_, staged_takes_bands_,
                              staged_bands_, staged_needs_, staged_scaled_, staged_part_};
    const StagedStream opened = {sink, m, dev, NULL, NULL, NULL, NULL, 0};
    size_t most = 0;
    *s = opened;
    if (DEVICE_IS_SHARED) { return sink; }
    for (int i = 0; i < m->n_table; i++) {
        const size_t n = tensor_has_scales(&m->held[i]) ? staged_size_(m, i) : 0;
        most = n > most ? n : most;
    }
    s->bytes = (uint8_t*)malloc_check(most + 1, "a tensor on its way to the device");
    return staged;
}

static inline void staged_close(StagedStream* s) { free(s->bytes); }

static inline void* staged_copy(const Model* m, const Device* dev) {
    int has_scales = 0;
    for (int i = 0; i < m->n_table; i++) { has_scales |= tensor_has_scales(&m->held[i]); }
    if (DEVICE_IS_SHARED || !has_scales) { return NULL; }
    void* copy = arena_alloc(m->stored_bytes, "parameters on the host");
    device_download(copy, m->w.stored, m->stored_bytes, dev);
    return copy;
}
static inline void staged_copy_free(const Model* m, void* copy) { arena_free(copy, m->stored_bytes); }
#endif  // LLMC_STAGED_STREAM_H
