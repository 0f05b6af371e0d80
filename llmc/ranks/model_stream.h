/*
Parameters on their way from a file, or from where they begin, to where a model stores them (model.h), slice by slice.
    model_stream_open    where slices go (SliceSink of tensorfile.h): floats are rounded as the last update rounded
                         them; from a file of bf16, fp8 or fp4 straight to where they are stored so, of a part that
                         alone; else to fp8 by bands of 128 rows
    model_stream_sum     of what comes, the sums by which ranks compare what they have read
    model_stream_close
*/
#ifndef LLMC_MODEL_STREAM_H
#define LLMC_MODEL_STREAM_H
#include "model.h"  // Model, model_part, model_take_part

// A checkpoint after so many updates: bf16 is rounded with the noise of the last of them, so that a resumed run has
// the same bits. What is a bf16 already stays what it is.
typedef struct {
    Model* m;
    int updates;
    const Device* dev;
    float *room, *staged;  // of a slice, on the host and on the device
    float* whole;          // all of them on the host, or NULL
    int sums;              // does somebody want the sums?
    uint64_t sum_of_experts, sum_of_parts, sum;  // of what this rank has: of experts and of matrices that it shares,
                                                 // and of all else
    uint16_t* halves;      // the slice that is under way as bf16; NULL: it is in `room`
    int is_banded;         // it is stored as fp8 or fp4 as it comes, and nothing of it is in `room`
} ModelStream;

static inline float* model_stream_room_(void* stream, const Tensor* t, int k) {
    ModelStream* s = (ModelStream*)stream;
    (void)k;
    s->halves = NULL;
    s->is_banded = 0;
    return (float*)memset(s->room, 0, sizeof(float) * tensor_slice_elements(t));
}

// where slice k of t is stored; NULL: on another rank
static inline char* model_stream_place_(const ModelStream* s, const Tensor* t, int k) {
    const Model* m = s->m;
    const int row = (int)(t - m->table), held = model_held_slice(m, row, k);
    if (held < 0) { return NULL; }
    return (char*)m->w.stored + tensor_stored_place(&m->held[row], model_part_elements(m, row) * (size_t)held);
}

// ---- fp8 and fp4 as a file has it, and fp8 straight from bands of floats ----

static inline void* model_stream_scales_(const ModelStream* s, const Tensor* t, int k) {
    const int row = (int)(t - s->m->table);
    return (char*)s->m->w.stored + tensor_scales_place(&s->m->held[row], model_held_slice(s->m, row, k));
}

static inline uint8_t* model_stream_scaled_(void* stream, const Tensor* t, int k, Stored kind, void** scales) {
    ModelStream* s = (ModelStream*)stream;
    const int row = (int)(t - s->m->table), is_wanted = s->whole && model_is_saved_(s->m, t);
    char* place = model_stream_place_(s, t, k);
    s->halves = NULL;
    s->is_banded = place && s->m->held[row].stored == kind && !is_wanted;
    if (!s->is_banded) { return NULL; }
    *scales = model_stream_scales_(s, t, k);
    return (uint8_t*)place;
}

static inline TensorPart model_stream_part_(void* stream, const Tensor* t, int k) {
    const ModelStream* s = (const ModelStream*)stream;
    (void)k;
    return model_part(s->m, (int)(t - s->m->table));
}

// Of a slice that is there: what ranks compare. What the host has is as it is stored, else floats
static inline void model_stream_sum_(ModelStream* s, const Tensor* t, int k) {
    const int row = (int)(t - s->m->table);
    const Tensor* held = &s->m->held[row];
    const uint64_t slice = (uint64_t)(tensors_slices(s->m->table, row) + k);
    const size_t n = tensor_slice_elements(held);
    uint64_t* sum = model_row_has_ep(s->m, row) ? &s->sum_of_experts
                  : model_row_has_tp(s->m, row) ? &s->sum_of_parts : &s->sum;
    if (!DEVICE_IS_SHARED) {
        *sum += XXH3_64bits_withSeed(s->room, sizeof(float) * n, slice);
        return;
    }
    *sum += XXH3_64bits_withSeed(model_stream_place_(s, t, k), tensor_stored_size(held, n), slice);
    if (!tensor_has_scales(held)) { return; }
    *sum += XXH3_64bits_withSeed(model_stream_scales_(s, t, k), tensor_scale_bytes(held, held->stored), slice);
}

// Of a whole matrix `rows` from row `first` on, whose floats are x: this rank's own, rounded as all of them are
static inline void model_stream_band_(uint8_t* bytes, float* scales, const float* x, const TensorPart* part, int first,
                                      int rows, int C) {
    if (!tensor_part_meets(part, first, rows)) { return; }
    uint8_t* whole = (uint8_t*)malloc_check((size_t)rows * (size_t)C, "a band of fp8");
    float* of_blocks = (float*)malloc_check(sizeof(float) * (size_t)fp8_blocks(C), "scales of fp8");
    fp8_quantize_rows(whole, of_blocks, x, rows, C);
    tensor_take_rows(bytes, whole, part, C, 1, 1, first, rows);
    tensor_take_scales(scales, of_blocks, part, C, first, rows);
    free(whole);
    free(of_blocks);
}

// n bands from number `band` on, of which x has the floats, to a slice of fp8 and its scales
static inline void model_stream_bands(uint8_t* bytes, float* scales, const Tensor* t, const TensorPart* part, int band,
                                      int n, const float* x) {
    int n_rows;
    const size_t origin = tensor_band(t, band, &n_rows);
    #pragma omp parallel for
    for (int b = band; b < band + n; b++) {
        int rows;
        const size_t first = tensor_band(t, b, &rows), C = (size_t)t->columns;
        model_stream_band_(bytes, scales, x + C * (first - origin), part, (int)first, rows, t->columns);
    }
}

static inline void model_stream_bands_(void* stream, const Tensor* t, int k, int band, int n, const float* x) {
    const ModelStream* s = (const ModelStream*)stream;
    const TensorPart part = model_part(s->m, (int)(t - s->m->table));
    uint8_t* bytes = (uint8_t*)model_stream_place_(s, t, k);
    if (bytes) { model_stream_bands(bytes, (float*)model_stream_scales_(s, t, k), t, &part, band, n, x); }
}

static inline int model_stream_takes_bands_(void* stream, const Tensor* t, int k) {
    ModelStream* s = (ModelStream*)stream;
    const int is_wanted = s->whole && model_is_saved_(s->m, t);
    (void)k;
    s->is_banded = s->m->held[t - s->m->table].stored == STORED_FP8 && !is_wanted;
    s->halves = NULL;
    return s->is_banded;
}

// Where nobody asks for floats. What is no bf16 yet is rounded by an update's noise on a GPU, to the nearest on a CPU
static inline uint16_t* model_stream_halves_(void* stream, const Tensor* t, int k, int is_exact) {
    ModelStream* s = (ModelStream*)stream;
    const int row = (int)(t - s->m->table);
    const int is_bf16 = s->m->held[row].stored_bytes == sizeof(uint16_t) && !model_shares_slices_(s->m, row);
    char* place = model_stream_place_(s, t, k);
    s->halves = NULL;
    const int is_wanted = s->whole && model_is_saved_(s->m, t);
    if (!is_bf16 || !place || s->m->w.master || is_wanted || !(DEVICE_IS_SHARED || (is_exact && !s->sums))) {
        return NULL;
    }
    const size_t n_bytes = sizeof(uint16_t) * model_part_elements(s->m, row);
    s->halves = DEVICE_IS_SHARED ? (uint16_t*)place : (uint16_t*)memset(s->room, 0, n_bytes);
    return s->halves;
}

// slice k, which is in `room`, to where it is stored
static inline void model_stream_store_(ModelStream* s, const Tensor* t, int k) {
    Model* m = s->m;
    const int row = (int)(t - m->table), held = model_held_slice(m, row, k);
    const size_t n = model_part_elements(m, row);
    char* stored = model_stream_place_(s, t, k);
    const Tensor* h = &m->held[row];
    assert(h->stored != STORED_FP4);  // that nothing is rounded to
    if (h->stored == STORED_FP8) {
        model_stream_bands_(s, t, k, 0, tensor_bands(t), s->room);
        return;
    }
    model_take_part(m, row, s->room, s->room);
    const ElementNumbers numbers = tensor_numbers(h, n * (size_t)held);
    const Weights to = weights_of(stored, h->stored_bytes, s->staged, NULL, NULL);
    const int is_frozen = slice_is_frozen(m->frozen, tensors_slices(m->table, row) + k);
    if (!DEVICE_IS_SHARED) { device_upload(s->staged, s->room, sizeof(float) * n, s->dev); }
    weights_round(&to, n, is_frozen ? 0 : (uint32_t)s->updates, numbers, s->dev);
    if (m->w.master) {
        const Part own = model_kept(m, row, k);
        device_upload(m->w.master + own.at, s->room + own.first, sizeof(float) * own.n, s->dev);
    }
}

static inline void model_stream_done_(void* stream, const Tensor* t, int k) {
    ModelStream* s = (ModelStream*)stream;
    const Model* m = s->m;
    const size_t whole = tensor_slice_elements(t);
    char* stored = model_stream_place_(s, t, k);
    const int is_in_room = !s->is_banded && !s->halves;
    if (is_in_room && s->whole && model_is_saved_(m, t)) {
        memcpy(s->whole + t->offset + whole * (size_t)k, s->room, sizeof(float) * whole);
    }
    if (is_in_room && stored) { model_stream_store_(s, t, k); }
    if (s->halves && !DEVICE_IS_SHARED) {
        const size_t n = model_part_elements(m, (int)(t - m->table));
        device_upload(stored, s->halves, sizeof *s->halves * n, s->dev);
    }
    device_sync(s->dev);
    if (stored && s->sums) { model_stream_sum_(s, t, k); }
}

static inline int model_stream_needs_(void* stream, const Tensor* t, int k) {
    const ModelStream* s = (const ModelStream*)stream;
    const int row = (int)(t - s->m->table);
    return model_held_slice(s->m, row, k) >= 0 || (s->whole && model_is_saved_(s->m, t));
}

static inline SliceSink model_stream_open(ModelStream* s, Model* m, float* whole, int updates, const Device* dev) {
    const size_t n_bytes = sizeof(float) * model_largest_slice(m, m->n_table);
    const SliceSink sink = {model_stream_room_, model_stream_done_, s, model_stream_halves_, model_stream_takes_bands_,
                            model_stream_bands_, model_stream_needs_, model_stream_scaled_, model_stream_part_};
    ModelStream opened = {m, updates, dev, NULL, NULL, whole, 0, 0, 0, 0, NULL, 0};
    *s = opened;
    s->room = (float*)device_pinned(n_bytes, "a tensor on its way to the device");
    s->staged = DEVICE_IS_SHARED ? s->room : (float*)device_alloc(n_bytes, "a tensor on its way to the device");
    return sink;
}

// before the first slice: ranks will compare what they have, as floats
static inline void model_stream_sum(ModelStream* s) { s->sums = 1; }

static inline void model_stream_close(ModelStream* s) {
    if (!DEVICE_IS_SHARED) { device_release(s->staged, sizeof(float) * model_largest_slice(s->m, s->m->n_table)); }
    device_pinned_free(s->room);
}
#endif  // LLMC_MODEL_STREAM_H
