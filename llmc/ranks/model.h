/*
Model: the tensors of a model and all that is kept of them. A trainer's own struct begins with it.
    model_layout          sizes only: what a run will need is known before anything is allocated
    model_init            the stored parameters, zero
    model_stream_open     parameters from floats, slice by slice, rounded as the last update rounded them
    model_init_training   gradients, masters and moments, for updates of so many micro-batches
    model_point           the fields of a struct of pointers point to the parameters of a layer (dp_point: to its
                          gradients)
    model_whole_average   their average over updates in the same way (ema.h)
    model_whole           the parameters as a checkpoint has them: floats on the host of rank 0
Where:  everything is device memory. Stored parameters are whole on every rank; of masters and moments a rank has the
        parts dp.kept. Without masters the stored parameters are all there is.
*/
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H
#include "../core/layers.h"  // learning_from
#include "data_parallel.h"   // DataParallel, dp_init, dp_open
#include "moments.h"         // dp_collect

enum { MAX_TENSORS = 128 };
typedef enum { TO_GENERATE, TO_EVALUATE, TO_TRAIN } Purpose;  // what activations are for

typedef struct {
    Tensor table[MAX_TENSORS];
    int n_table, n_slices;
    size_t n;         // elements of an arena of whole tensors
    Weights w;        // stored, master, moments
    float* average;   // of the parameters over updates, the parts that moments have; NULL: none is kept
    int* frozen;      // of every slice in table order: does it stay as it is? NULL: none does
    int n_numbers;    // of a leaf that are summed, besides its loss: dp_numbers
    int lowest;       // the layer at which backward may stop: nothing learns below it. The number of layers: in none
    DataParallel dp;  // gradients of micro-batches, and which part of all this belongs to this rank
} Model;

static inline void model_layout(Model* m, int n_table) {
    assert(n_table <= MAX_TENSORS);
    m->n_table = n_table;
    m->n = tensors_layout(m->table, n_table);
    m->n_slices = tensors_slices(m->table, n_table);
}

// ---- what learns ----

// nothing of tensor t learns
static inline void model_freeze(Model* m, const Tensor* t) {
    const int slice = tensors_slices(m->table, (int)(t - m->table));
    for (int k = 0; k < tensor_slices(t); k++) { m->frozen[slice + k] = 1; }
}

// does anything of layer l learn?
static inline int model_layer_learns(const Model* m, int l) {
    for (int i = 0, slice = 0; i < m->n_table; slice += tensor_slices(&m->table[i++])) {
        const Tensor* t = &m->table[i];
        const int first = t->layers > 0 ? tensor_slice(t, l) : -1;
        if (first >= 0 && slices_learn(m->frozen, slice + first, tensor_layer_slices(t))) { return 1; }
    }
    return 0;
}

static inline int model_layers_learning(const Model* m) {
    int n = 0;
    for (int l = 0; l < tensors_layers(m->table, m->n_table); l++) { n += model_layer_learns(m, l); }
    return n;
}

static inline int model_learns(const Model* m) { return slices_learn(m->frozen, 0, m->n_slices); }

// once it is known what is frozen
static inline void model_find_lowest(Model* m) {
    int below;
    m->lowest = learning_from(m->table, m->n_table, m->frozen, &below);
    m->lowest = below ? 0 : m->lowest;
}

// flops of the products of one position with tensor i: forward 2 for each element, 2 for the gradient of what goes in,
// as far down as backward comes, and 2 for its own, where it learns
static inline double model_flops(const Model* m, int i) {
    const Tensor* t = &m->table[i];
    const int slice = tensors_slices(m->table, i);
    double n = 0.0;
    for (int k = 0; k < tensor_slices(t); k++) {
        const int reached = t->layers == 0 || tensor_slice_layer(t, k) >= m->lowest;
        n += 2.0 * (1 + reached + !slice_is_frozen(m->frozen, slice + k));
    }
    return n * (double)tensor_slice_elements(t);
}

// ---- memory ----

// stored_bytes: of one parameter as the ops read it
static inline void model_init(Model* m, size_t stored_bytes) {
    m->w = weights_of(device_alloc(stored_bytes * m->n, "parameters"), stored_bytes, NULL, NULL, NULL);
}

// elements; files are read and written slice by slice
static inline size_t model_largest_slice(const Model* m) {
    size_t most = 0;
    for (int i = 0; i < m->n_table; i++) {
        const size_t n = tensor_slice_elements(&m->table[i]);
        most = n > most ? n : most;
    }
    return most;
}

// comm NULL: alone. zero 1: masters and moments are kept once, not on every rank; 2: sums of gradients too. Before
// parameters are stored: masters get theirs, too
static inline void model_init_training(Model* m, Comm* comm, int n_leaves, int zero, int has_masters) {
    DataParallel* dp = &m->dp;
    dp_init(dp, comm, m->table, m->n_table, m->frozen, n_leaves, zero);
    dp_want_numbers(dp, m->n_numbers);
    dp_open(dp);
    model_find_lowest(m);
    m->w.m = (float*)device_alloc(sizeof(float) * dp->n_kept, "first moments");
    m->w.v = (float*)device_alloc(sizeof(float) * dp->n_kept, "second moments");
    if (has_masters) { m->w.master = (float*)device_alloc(sizeof(float) * dp->n_kept, "master weights"); }
}

// once training is opened: an average, which has taken in nothing yet
static inline void model_init_average(Model* m, const Device* dev) {
    m->average = (float*)device_alloc(sizeof(float) * m->dp.n_kept, "averaged weights");
    device_zero(m->average, sizeof(float) * m->dp.n_kept, dev);
}

// ---- parameters from floats on the host, slice by slice ----

// A checkpoint after so many updates: bf16 is rounded with the noise of the last of them, so that a resumed run has
// the same bits. What is a bf16 already stays what it is.
typedef struct {
    Model* m;
    int updates;
    const Device* dev;
    float *room, *staged;  // of a slice, on the host and on the device
    float* whole;          // all of them on the host, or NULL
    XXH3_state_t* sum;
} ModelStream;

static inline float* model_stream_room_(void* stream, const Tensor* t, int k) {
    ModelStream* s = (ModelStream*)stream;
    (void)k;
    return (float*)memset(s->room, 0, sizeof(float) * tensor_slice_elements(t));
}

static inline void model_stream_done_(void* stream, const Tensor* t, int k) {
    ModelStream* s = (ModelStream*)stream;
    Model* m = s->m;
    const int row = (int)(t - m->table), j = m->w.master ? dp_stretch(&m->dp, row, k) : -1;
    const size_t n = tensor_slice_elements(t), begin = n * (size_t)k, first = t->offset + begin;
    const Weights to = {(char*)m->w.stored + first * m->w.stored_bytes, m->w.stored_bytes, s->staged, NULL, NULL};
    const int is_frozen = slice_is_frozen(m->frozen, tensors_slices(m->table, row) + k);
    XXH3_64bits_update(s->sum, s->room, sizeof(float) * n);
    if (s->whole) { memcpy(s->whole + first, s->room, sizeof(float) * n); }
    device_upload(s->staged, s->room, sizeof(float) * n, s->dev);
    weights_round(&to, n, is_frozen ? 0 : (uint32_t)s->updates, first, s->dev);
    if (j >= 0) {
        const Part own = part_within(m->dp.kept[j], begin, begin + n);
        device_upload(m->w.master + own.at, s->room + (own.first - begin), sizeof(float) * own.n, s->dev);
    }
    device_sync(s->dev);
}

static inline SliceSink model_stream_open(ModelStream* s, Model* m, float* whole, int updates, const Device* dev) {
    const size_t n_bytes = sizeof(float) * model_largest_slice(m);
    const SliceSink sink = {model_stream_room_, model_stream_done_, s};
    ModelStream opened = {m, updates, dev, NULL, NULL, whole, XXH3_createState()};
    *s = opened;
    if (!s->sum) { fail_run("parameters: no memory"); }
    XXH3_64bits_reset(s->sum);
    s->room = (float*)device_pinned(n_bytes, "a tensor on its way to the device");
    s->staged = (float*)device_alloc(n_bytes, "a tensor on its way to the device");
    return sink;
}

// a sum of all that went by
static inline uint64_t model_stream_close(ModelStream* s) {
    const uint64_t sum = XXH3_64bits_digest(s->sum);
    XXH3_freeState(s->sum);
    device_pinned_free(s->room);
    device_release(s->staged, sizeof(float) * model_largest_slice(s->m));
    return sum;
}

static inline void model_point(const Model* m, void* pointers, int layer) {
    tensors_point_sized(pointers, m->table, m->n_table, m->w.stored, m->w.stored_bytes, layer);
}

// the parameters of a CPU build
static inline float* model_floats(const Model* m) { return (float*)m->w.stored; }

static inline void model_free(Model* m) {
    const size_t kept = sizeof(float) * m->dp.n_kept;
    device_release(m->w.stored, m->w.stored_bytes * m->n);
    device_release(m->w.master, kept);
    device_release(m->w.m, kept);
    device_release(m->w.v, kept);
    device_release(m->average, kept);
    dp_free(&m->dp);
    free(m->frozen);
}

// ---- for checkpoints ----

// are the masters, like the moments, dealt out over the ranks?
static inline int model_masters_in_parts(const Model* m) { return m->w.master && m->dp.zero > 0; }

// what of the parameters a checkpoint is made from, and its bytes: masters or, without them, what is stored
static inline const void* model_source(const Model* m) { return m->w.master ? (const void*)m->w.master : m->w.stored; }
static inline size_t model_source_bytes(const Model* m) {
    return m->w.master ? sizeof(float) * m->dp.n_kept : m->w.stored_bytes * m->n;
}

// n stored values, in host memory, as floats
static inline void model_widen_(float* out, const Model* m, const void* stored, size_t n) {
#ifdef __CUDACC__
    if (m->w.stored_bytes == sizeof(__nv_bfloat16)) {
        for (size_t i = 0; i < n; i++) { out[i] = (float)((const __nv_bfloat16*)stored)[i]; }
        return;
    }
#endif
    memcpy(out, stored, m->w.stored_bytes * n);
}

// The parameters from a copy of model_source: floats on the host of rank 0, NULL on the others. Where the copy is just
// that, it comes back itself. Masters in parts are collected, for which all ranks call; what is frozen has none, its
// stored weights stay as they are on dev. copy_dev NULL: the copy is in host memory
static inline const float* model_whole(Model* m, const void* copy, const Device* copy_dev, const Device* dev) {
    if (m->dp.rank > 0 && !model_masters_in_parts(m)) { return NULL; }
    if (!m->w.master && m->w.stored_bytes == sizeof(float)) { return (const float*)copy; }
    float* whole = m->dp.rank > 0 ? NULL : (float*)arena_alloc(sizeof(float) * m->n, "parameters on the host");
    if (m->w.master) { dp_collect(&m->dp, (const float*)copy, whole, copy_dev); }
    else { model_widen_(whole, m, copy, m->n); }
    if (m->w.master && whole) { dp_collect_frozen(&m->dp, m->w.stored, m->w.stored_bytes, whole, dev); }
    return whole;
}

// The average from a copy of it, with what is frozen as it is stored: floats on the host of rank 0, which arena_free
// frees; NULL on the others. All ranks call
static inline float* model_whole_average(Model* m, const float* copy, const Device* copy_dev, const Device* dev) {
    float* whole = m->dp.rank > 0 ? NULL : (float*)arena_alloc(sizeof(float) * m->n, "averaged weights on the host");
    dp_collect(&m->dp, copy, whole, copy_dev);
    if (whole) { dp_collect_frozen(&m->dp, m->w.stored, m->w.stored_bytes, whole, dev); }
    return whole;
}

static inline void model_whole_free(const Model* m, const float* whole, const void* copy) {
    if (whole != copy) { arena_free((void*)whole, sizeof(float) * m->n); }
}

// The same, of now, which model_whole_free(m, whole, model_source(m)) frees; all ranks call
static inline const float* model_download(Model* m, const Device* dev) {
    if (DEVICE_IS_SHARED || model_masters_in_parts(m)) { return model_whole(m, model_source(m), dev, dev); }
    const size_t n_bytes = model_source_bytes(m);
    void* copy = arena_alloc(n_bytes, "parameters on the host");
    device_download(copy, model_source(m), n_bytes, dev);
    const float* whole = model_whole(m, copy, NULL, dev);
    if (whole != copy) { arena_free(copy, n_bytes); }
    return whole;
}
#endif  // LLMC_MODEL_H
