/*
Model: the tensors of a model and all that is kept of them. A trainer's own struct begins with it.
    model_layout          sizes only: what a run will need is known before anything is allocated
    model_save_rows       an adapter's tensors stand in front: of the rest, its base, nothing learns, and no file has it
    model_begin_ep        --ep: this rank holds some of the experts of each layer, others the rest (expert_ranks.h)
    model_begin_pp        --pp: this rank holds some of the layers, others the rest (pipeline_ranks.h); model_turn_to:
                          what is computed from now on is this chunk of them
    model_begin_tp        --tp: of matrices that are split this rank holds a part, others the rest (rank_group.h)
    model_shares_keys     ... with more ranks than heads of keys: neighbours share one (models/shared_keys.h);
                          model_key_heads: those that have different ones
    model_begin_cp        --cp: of the rows of a micro-batch this rank has some positions, others the rest
                          (context_ranks.h)
    model_batches, model_batch   so many micro-batches of an update this rank computes, or its share of them; which
    model_init            the stored parameters, zero
    model_store_frozen    matrices that do not learn as bf16 or fp8; with --tp a rank's part of them so
    model_init_training   gradients, masters and moments, for updates of so many micro-batches
    model_init_muon       scratch of Muon (ops/muon.h), whose moment is the first one; the second stays 0
    model_point           the fields of a struct of pointers point to the parameters of a layer; to its gradients:
                          dp_point, or model_point_gradients
    model_row, model_pointer, model_matrix, model_vector   one of them: its row of the table, where it is stored, as a
                          matrix; the place of a field at a layer. model_field_learns: does it learn?
Into it: model_stream.h. Out of it: model_collect.h.
Where:  everything is device memory. Stored parameters are whole on every rank, but for experts with --ep and layers
        with --pp; of masters and moments a rank has the parts `kept`. Without masters the stored ones are all there is.
With --ep experts have gradients of their own (`dp_experts`): their leaves are those of a whole group, which the group's
        ranks have computed together, and only holders of the same experts exchange them. A table of what a rank holds
        (`held`) lays out its memory; everything that has to do with names and files goes by the whole table.
With --tp `held` has parts of matrices (tensor_hold_part), and a slice is put together from those of all places.
With --pp the table is the same on all ranks, and says which layers are in memory (tensor_hold_layers). Gradients and
        moments are those of a model of which the layers of other stages are frozen; the ranks of a stage share them.
*/
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H
#include "../core/layers.h"  // learning_from
#include "data_parallel.h"   // DataParallel, dp_init, dp_open
#include "expert_ranks.h"    // ExpertRanks
#include "pipeline_ranks.h"  // PpRanks
#include "pipeline_schedule.h"  // pp_tie_rooms
#include "rank_group.h"      // RankGroup

enum { MAX_TENSORS = 128 };
typedef enum { TO_GENERATE, TO_EVALUATE, TO_TRAIN } Purpose;  // what activations are for

typedef struct {
    Tensor table[MAX_TENSORS];   // of the whole model, as its files have it
    int n_table, n_slices;
    int n_saved;          // rows at the front that the files of a run hold: all, or an adapter's
    size_t n;             // elements of an arena of these as whole tensors
    const Tensor* held;   // what of it is in this rank's memory: with --ep the same rows with fewer experts, with --tp
                          // with parts of matrices; else `table`, whose rows know with --pp which layers are here
    Tensor local[MAX_TENSORS];  // with --ep and --tp: these
    size_t stored_bytes;  // of them all
    int is_float;         // all are stored as floats, where tensors_layout has put them
    int saved_is_float;   // those that the files hold are
    Stored frozen_as;     // as what matrices are stored, none of which learns; STORED_BY_BUILD: nobody has asked
    int rounds_inputs;    // of matrices in fp8 or fp4, to fp8: --act-fp8
    Comm* world;          // all ranks, where they divide the model; NULL: they do not
    ExpertRanks ranks;    // of --ep
    PpRanks pp;           // of --pp
    RankGroup tp;         // of --tp
    RankGroup keys;       // those of tp that have the same head of keys; alone: each has whole ones
    RankGroup cp;         // of --cp
    char* held_layers;    // with --pp, of each layer: is it in memory? (tensor_hold_layers)
    char* chunk_layers[PP_CHUNKS_MAX];  // the same of each chunk
    int shared;           // with --pp, the row that the first and the last stage have: the embedding that is the output
                          // matrix, too, or that a module behind the head reads; -1: there is none
    float* shared_grads;  // of the last stage: its share of the gradient, of pp.tie_rooms micro-batches
    Weights w;            // stored, master, moments
    void* muon_room;      // scratch of --optimizer muon, model_muon_bytes; NULL: AdamW updates everything
    float* average;       // of the parameters over updates, the parts that moments have; NULL: none is kept
    int* frozen;          // of every slice in table order: does it stay as it is? NULL: none does
    int* frozen_held[2];  // of every slice of `held`, with --ep: for dp, for dp_experts
    int n_numbers;        // of a leaf that are summed, besides its loss: dp_numbers
    int index_number, n_indexers, mtp_number;  // which of these are other losses (models/other_losses.h)
    int learns_mtp;       // a module learns to predict the token after the next (ops/mtp_tokens.h): of its targets
    float mtp_counted;    // so many count in the update whose leaves are computed (model_counted),
    int learns_index;     // indexers learn to choose (ops/indexer.h)
    int index_ratio;      // ... among entries of so many tokens
    float index_counted;  // so many positions with their loss,
    float mtp_index_counted;  // ... with that of the indexer of the module, if that has one: who knows a next token
    int lowest;           // the layer at which backward may stop, for nothing learns below it; n layers: in none
    size_t n_kept;        // elements of masters, and of each moment
    DataParallel dp;      // gradients of micro-batches, and which part of all this belongs to this rank
    DataParallel dp_experts;  // the same of experts, with --ep
} Model;

// What the mean of n losses divides by: infinity where there is none, so that the loss and its gradient are 0
static inline float model_counted(int64_t n) { return n > 0 ? (float)n : INFINITY; }

static inline void model_layout(Model* m, int n_table) {
    assert(n_table <= MAX_TENSORS);
    m->n_table = m->n_saved = n_table;
    m->n = tensors_layout(m->table, n_table);
    m->n_slices = tensors_slices(m->table, n_table);
    m->held = m->table;
    m->ranks = expert_ranks_init(NULL, 1, NULL);
    m->pp = pp_ranks_init(NULL, 1, 1, NULL);
    m->tp = m->keys = rank_group_init(NULL, 1);
    m->cp = rank_group_init(NULL, 1);
    m->shared = -1;
}

// after model_layout: the first n rows are those of an adapter
static inline void model_save_rows(Model* m, int n) {
    m->n_saved = n;
    m->n = m->table[n].offset;
}

static inline int model_is_adapter(const Model* m) { return m->n_saved < m->n_table; }
static inline int model_is_saved_(const Model* m, const Tensor* t) { return t - m->table < m->n_saved; }

static inline int model_has_ep(const Model* m) { return m->ranks.ep.size > 1; }
static inline int model_has_pp(const Model* m) { return m->pp.size > 1; }
static inline int model_has_tp(const Model* m) { return m->tp.size > 1; }
static inline int model_has_cp(const Model* m) { return m->cp.size > 1; }

// does this rank lack some of the model?
static inline int model_is_divided(const Model* m) { return model_has_ep(m) || model_has_pp(m) || model_has_tp(m); }
static inline int model_row_has_tp(const Model* m, int i) {
    return model_has_tp(m) && m->table[i].split != SPLIT_NONE;
}
static inline int model_row_has_ep(const Model* m, int i) { return model_has_ep(m) && m->table[i].experts > 0; }

// after model_layout: matrices as bf16 or fp8, for nothing of them learns; of an adapter those of its base
static inline void model_store_frozen(Model* m, Stored stored) {
    m->frozen_as = stored;
    for (int i = model_is_adapter(m) ? m->n_saved : 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        if (tensor_is_matrix(t) && t->stored != STORED_F32) { tensor_stored(&m->table[i], stored); }
    }
}

// A model whose matrices are fp8 leaves as it is stored, slice by slice; one of floats or bf16 as it has come in
static inline int model_exports_stored(const Model* m) { return m->frozen_as == STORED_FP8 && !model_is_adapter(m); }

// build_bytes: of an element of floatX; rows may say otherwise (tensor_stored)
static inline void model_layout_stored(Model* m, size_t build_bytes) {
    m->stored_bytes = tensors_store(m->table, m->n_table, build_bytes);
    if (m->held == m->local) { m->stored_bytes = tensors_store(m->local, m->n_table, build_bytes); }
    m->is_float = m->saved_is_float = 1;
    for (int i = 0; i < m->n_table; i++) {
        const int is_float = m->held[i].stored_bytes == sizeof(float);
        m->is_float &= is_float;
        m->saved_is_float &= is_float || i >= m->n_saved;
    }
}

// of what the files hold, as it is stored
static inline size_t model_saved_bytes(const Model* m) {
    return model_is_adapter(m) ? m->held[m->n_saved].stored_at : m->stored_bytes;
}

// ---- expert parallel ----

// a table of what this rank holds; of a row where it holds less than all, the caller says so before model_lay_local_
static inline void model_begin_local_(Model* m) {
    if (m->held == m->table) { memcpy(m->local, m->table, sizeof m->table); }
    m->held = m->local;
}

static inline void model_lay_local_(Model* m) {
    tensors_layout(m->local, m->n_table);
    for (int i = 0; i < m->n_table; i++) { m->local[i].number = m->table[i].offset; }
}

// After model_layout, model_begin_pp and model_begin_tp, all ranks call; world: those of a stage. size: of a group; it
// divides the experts of every row, and ranks that share matrices are in one group
static inline void model_begin_ep(Model* m, Comm* world, int size) {
    m->ranks = expert_ranks_init(world, size, &m->tp);
    if (size == 1) { return; }
    m->world = m->world ? m->world : world;
    model_begin_local_(m);
    for (int i = 0; i < m->n_table; i++) {
        const int n = m->table[i].experts / size;
        if (n == 0) { continue; }
        tensor_hold_experts(&m->local[i], m->ranks.ep.place * n, n);
        m->local[i].is_copy = 0;
    }
    model_lay_local_(m);
}

// and back, for what was asked does not fit: this rank has all experts. All ranks call
static inline void model_hold_all(Model* m, size_t build_bytes) {
    expert_ranks_free(&m->ranks);
    m->ranks = expert_ranks_init(NULL, 1, NULL);
    m->held = m->table;
    model_layout_stored(m, build_bytes);
}

// ---- pipeline parallel ----

// the stage that has slice k of row i, and in training its gradient. What belongs to no layer is the first stage's
// where it stands in the table before the layers or belongs to a stack before them, else the last one's
static inline int model_stage_of(const Model* m, int i, int k) {
    if (!model_has_pp(m)) { return 0; }
    const int layer = tensor_slice_layer(&m->table[i], k);
    int first = model_is_adapter(m) ? m->n_saved : 0;
    if (layer >= 0) { return pp_stage_of(&m->pp, layer); }
    while (first < m->n_table && m->table[first].layers == 0) { first++; }
    return i < first || m->table[i].is_before ? 0 : m->pp.n_stages - 1;
}

// has a stage of this rank it?
static inline int model_has_stage_of(const Model* m, int i, int k) {
    return !model_has_pp(m) || pp_place_of(&m->pp, model_stage_of(m, i, k)) == m->pp.place;
}

static inline void model_turn_to(Model* m, int chunk) {
    pp_turn_to(&m->pp, chunk);
    dp_turn_to(&m->dp, chunk);
    dp_turn_to(&m->dp_experts, chunk);
}

// of each of L layers: is it of a chunk of this rank, with -1 of any of them? On the heap
static inline char* model_mark_layers_(const PpRanks* x, int L, int chunk) {
    char* marks = (char*)malloc_check((size_t)L + 1, "stages");
    for (int l = 0; l < L; l++) {
        const int stage = pp_stage_of(x, l);
        const int is_own = pp_place_of(x, stage) == x->place && (chunk < 0 || stage / x->size == chunk);
        marks[l] = is_own ? LAYER_HELD : '.';
    }
    marks[L] = '\0';
    return marks;
}

// After model_layout, all ranks call. begin (size * n_chunks + 1): where the stages begin, and the end of what the last
// one has. shared: the field of the first stage that the last one reads, too; or TENSOR_NO_FIELD. channels: of the
// residual stream
static inline void model_begin_pp(Model* m, Comm* world, int size, int n_chunks, const int* begin, size_t shared,
                                  int channels) {
    m->pp = pp_ranks_init(world, size, n_chunks, begin);
    m->pp.channels = channels;
    m->shared = -1;
    if (size == 1) { return; }
    m->world = world;
    const int L = tensors_layers(m->table, m->n_table);
    m->held_layers = model_mark_layers_(&m->pp, L, -1);
    for (int c = 0; c < n_chunks; c++) { m->chunk_layers[c] = model_mark_layers_(&m->pp, L, c); }
    for (int i = 0; i < m->n_table; i++) {
        Tensor* t = &m->table[i];
        const int is_shared = t->field == shared && shared != TENSOR_NO_FIELD;
        const int is_copy = is_shared && pp_has_last(&m->pp);
        if (is_shared) { m->shared = i; }
        if (t->layers > 0) { tensor_hold_layers(t, m->held_layers); }
        else if (!model_has_stage_of(m, i, 0) && !is_copy) { tensor_hold_none(t); }
    }
}

// layers of the stage whose turn it is: first .. end - 1
static inline int model_first_layer(const Model* m) { return model_has_pp(m) ? pp_first_layer(&m->pp) : 0; }
static inline int model_end_layer(const Model* m) {
    return model_has_pp(m) ? pp_end_layer(&m->pp) : tensors_layers(m->table, m->n_table);
}

// does it have what comes before all layers, and behind?
static inline int model_has_embedding(const Model* m) { return !model_has_pp(m) || pp_is_first(&m->pp); }
static inline int model_has_head(const Model* m) { return !model_has_pp(m) || pp_is_last(&m->pp); }

// Does the way back begin where forward has just ended? Then what this rank's last layer has computed is still there.
// On the last stage, and on all where no other micro-batch comes in between
static inline int model_turns_back(const Model* m) { return model_has_head(m) || m->pp.is_alone; }

// ---- who has what ----

// the ranks that share the leaves of an update: all, or those of a stage, and with --tp of a place
static inline Comm* model_sharing(const Model* m, Comm* world) {
    return model_has_tp(m) ? m->tp.alike : model_has_pp(m) ? m->pp.place_ranks : world;
}

// and the ranks of which each has other micro-batches: of those, with --cp, one of each group
static inline Comm* model_dealing(const Model* m, Comm* world) {
    return model_has_cp(m) ? m->cp.alike : model_sharing(m, world);
}

// all ranks, or those of a stage
static inline Comm* model_stage_ranks(const Model* m, Comm* world) {
    return model_has_pp(m) ? m->pp.place_ranks : world;
}

// the number of this rank among all
static inline int model_rank(const Model* m) { return m->world ? m->world->rank : m->dp.rank; }

// ---- tensor parallel ----

// heads of keys, which more ranks than they are share; 0: none are
static inline int model_cut_units_(const Model* m, int size) {
    for (int i = 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        if (t->cuts_units && t->units % size != 0) { return t->units; }
    }
    return 0;
}

// After model_layout and model_begin_pp, all ranks call. size: of a group; it divides the ranks of a stage, and every
// row can be shared so
static inline void model_begin_tp(Model* m, Comm* world, int size) {
    if (size == 1) { return; }
    m->tp = rank_group_init(model_sharing(m, world), size);
    m->world = world;
    model_begin_local_(m);
    for (int i = 0; i < m->n_table; i++) { tensor_hold_part(&m->local[i], m->tp.place, size); }
    model_lay_local_(m);
    const int n_heads = model_cut_units_(m, size);
    if (n_heads > 0) { m->keys = rank_group_init(m->tp.group, size / n_heads); }
}

static inline int model_shares_keys(const Model* m) { return m->keys.size > 1; }

// the ranks that have all heads of keys together, each once; with whole heads all of --tp
static inline RankGroup model_key_heads(const Model* m) {
    RankGroup x = m->tp;
    if (!model_shares_keys(m)) { return x; }
    x.size = m->tp.size / m->keys.size, x.place = m->tp.place / m->keys.size;
    x.group = m->keys.alike, x.alike = NULL;
    return x;
}

// ---- context parallel ----

// After model_layout, model_begin_pp and model_begin_tp, all ranks call. size: of a group; it divides the ranks that
// share micro-batches. chunks: of a row on each rank (context_ranks.h)
static inline void model_begin_cp(Model* m, Comm* world, int size, int chunks) {
    if (size == 1) { return; }
    m->cp = rank_group_init(model_sharing(m, world), size);
    m->cp.chunks = chunks;
}

// of an update of so many micro-batches: each rank of a group has a leaf of each
static inline int model_leaves(const Model* m, int n_batches) { return n_batches * m->cp.size; }

// once training is planned: micro-batches that this rank computes, or its positions of them; and the number of the k-th
static inline int model_batches(const Model* m) { return dp_n_leaves(&m->dp); }
static inline int model_batch(const Model* m, int k) { return dp_leaf(&m->dp, k) / m->cp.size; }

// a slice of row i is that of all experts, which ranks share: an adapter's, in its file
static inline int model_shares_slices_(const Model* m, int i) {
    return model_row_has_ep(m, i) && !tensor_experts_are_slices(&m->table[i]);
}

// ranks that have parts of row i, and elements of a slice of it that this one has
static inline int model_parts(const Model* m, int i) {
    return model_row_has_tp(m, i) ? m->tp.size : model_shares_slices_(m, i) ? m->ranks.ep.size : 1;
}
static inline size_t model_part_elements(const Model* m, int i) { return tensor_slice_elements(&m->held[i]); }

static inline TensorPart model_part(const Model* m, int i) {
    return tensor_part(&m->table[i], m->tp.place, m->tp.size);
}

// of a slice of row i the part of this rank, which may be where the whole is; or a part to its place in the whole
static inline void model_take_part(const Model* m, int i, float* part, float* whole) {
    const size_t n = model_part_elements(m, i);
    if (model_row_has_tp(m, i)) { tensor_take_part(part, whole, &m->table[i], m->tp.place, m->tp.size); }
    else if (model_parts(m, i) > 1) { memmove(part, whole + n * (size_t)m->ranks.ep.place, sizeof(float) * n); }
}
static inline void model_put_part_(const Model* m, int i, float* whole, float* part, int place) {
    const size_t n = model_part_elements(m, i);
    if (model_row_has_tp(m, i)) { tensor_put_part(whole, part, &m->table[i], place, m->tp.size); }
    else { memcpy(whole + n * (size_t)place, part, sizeof(float) * n); }
}

// who of a group holds slice k of row i; of what is no expert's, or all experts', every rank has its own
static inline int model_place(const Model* m, int i, int k) {
    const Tensor* t = &m->table[i];
    if (!model_row_has_ep(m, i) || model_shares_slices_(m, i)) { return m->ranks.ep.place; }
    return k % tensor_layer_slices(t) / tensor_names(t) / m->held[i].experts;
}

// the number that this slice has among those held; -1: it is elsewhere
static inline int model_held_slice(const Model* m, int i, int k) {
    const Tensor *t = &m->table[i], *held = &m->held[i];
    const int each = tensor_layer_slices(t), each_held = tensor_layer_slices(held);
    if (model_place(m, i, k) != m->ranks.ep.place || !tensor_is_held(t, tensor_slice_layer(t, k))) { return -1; }
    return k / each * each_held + k % each % each_held;
}

// the rank that has slice k of row i once the ranks that share it have put it together
static inline int model_source_rank(const Model* m, int i, int k) {
    const int first = model_has_pp(m) ? pp_first_rank(&m->pp, model_stage_of(m, i, k)) : 0;
    return first + (model_row_has_ep(m, i) && !model_shares_slices_(m, i) ? model_place(m, i, k) : 0);
}

// what has the gradients of row i
static inline DataParallel* model_dp(Model* m, int i) { return model_row_has_ep(m, i) ? &m->dp_experts : &m->dp; }

// what arenas of kept parts have of slice k of row i, its elements counted from the slice's first; none: n 0
static inline Part model_kept(Model* m, int i, int k) {
    const DataParallel* dp = model_dp(m, i);
    const int held = model_held_slice(m, i, k), j = held < 0 ? -1 : dp_stretch(dp, i, held);
    const size_t n = model_part_elements(m, i), begin = n * (size_t)(held < 0 ? 0 : held);
    Part part = {&m->held[i], 0, 0, 0};
    if (j < 0) { return part; }
    part = part_within(dp->kept[j], begin, begin + n);
    part.first -= begin;
    return part;
}

// ---- what learns ----

// nothing of tensor t learns
static inline void model_freeze(Model* m, const Tensor* t) {
    const int slice = tensors_slices(m->table, (int)(t - m->table));
    for (int k = 0; k < tensor_slices(t); k++) { m->frozen[slice + k] = 1; }
}

// nothing of an adapter's base learns. Its own slices are in m->frozen, or all of them learn (NULL)
static inline void model_freeze_base(Model* m) {
    if (!model_is_adapter(m)) { return; }
    const size_t n_bytes = sizeof(int) * (size_t)m->n_slices;
    if (m->frozen) { m->frozen = (int*)realloc_check(m->frozen, n_bytes, "slices that learn"); }
    else { m->frozen = (int*)memset(malloc_check(n_bytes, "slices that learn"), 0, n_bytes); }
    for (int i = m->n_saved; i < m->n_table; i++) { model_freeze(m, &m->table[i]); }
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

// build_bytes: of an element of floatX
static inline void model_init(Model* m, size_t build_bytes) {
    if (m->world) { comm_device_open(m->world); }
    model_layout_stored(m, build_bytes);
    m->w = weights_of(device_alloc(m->stored_bytes, "parameters"), build_bytes, NULL, NULL, NULL);
}

// elements, of the first rows; files are read and written slice by slice
static inline size_t model_largest_slice(const Model* m, int n_rows) {
    size_t most = 0;
    for (int i = 0; i < n_rows; i++) {
        const size_t n = tensor_slice_elements(&m->table[i]);
        most = n > most ? n : most;
    }
    return most;
}

// of every slice of `held`: does it stay as it is, or has the other DataParallel or another stage its gradients?
static inline int* model_frozen_held_(const Model* m, int experts) {
    const int n = tensors_slices(m->held, m->n_table);
    int *frozen = (int*)malloc_check(sizeof(int) * (size_t)n, "slices that learn"), *next = frozen;
    for (int i = 0, slice = 0, n_slices; i < m->n_table; i++, slice += n_slices) {
        const int is_other = model_has_ep(m) && (m->table[i].experts > 0) != experts;
        n_slices = tensor_slices(&m->table[i]);
        for (int k = 0; k < n_slices; k++) {
            if (model_place(m, i, k) != m->ranks.ep.place) { continue; }
            *next++ = slice_is_frozen(m->frozen, slice + k) || is_other || !model_has_stage_of(m, i, k);
        }
    }
    return frozen;
}

// chunks of this rank's layers, whose leaves are told by turns
static inline void model_plan_chunks_(Model* m, DataParallel* dp) {
    const PpRanks* x = &m->pp;
    int* chunks = (int*)malloc_check(sizeof(int) * (size_t)dp->n_layers, "stages");
    for (int l = 0; l < dp->n_layers; l++) { chunks[l] = pp_stage_of(x, l) / x->size; }
    dp_divide(dp, x->n_chunks, chunks, pp_has_last(x) ? x->n_chunks - 1 : 0);
    dp_turn_to(dp, pp_chunk(x));
    free(chunks);
}

// with --pp; n_batches: of an update
static inline void model_plan_stages_(Model* m, Comm* world, int n_batches) {
    const PpShape shape = {m->pp.size, m->pp.n_chunks, (int)ceil_div(n_batches, model_dealing(m, world)->size)};
    PpSchedule schedule;
    pp_open(&schedule, shape);
    m->pp.tie_rooms = pp_tie_rooms(&schedule);
    pp_free(&schedule);
    if (m->pp.n_chunks == 1) { return; }
    model_plan_chunks_(m, &m->dp);
    if (model_has_ep(m)) { model_plan_chunks_(m, &m->dp_experts); }
}

// Sizes only: who keeps what, and how many numbers a leaf has. Arguments as those of model_init_training
static inline void model_plan(Model* m, Comm* world, int n_batches, int zero) {
    const int n_leaves = model_leaves(m, n_batches);
    Comm* comm = world;
    assert(!model_has_cp(m) || zero == 2);  // the leaves of a micro-batch are computed at once, in one round
    if (model_has_pp(m) || model_has_tp(m)) {
        comm = model_sharing(m, comm)->size > 1 ? model_sharing(m, comm) : NULL;
    }
    if (model_has_pp(m)) { m->frozen_held[0] = model_frozen_held_(m, 0); }
    if (!model_has_ep(m)) {
        dp_init(&m->dp, comm, m->held, m->n_table, model_has_pp(m) ? m->frozen_held[0] : m->frozen, n_leaves, zero);
        dp_want_numbers(&m->dp, m->n_numbers);
        m->n_kept = m->dp.n_kept;
        if (model_has_pp(m)) { model_plan_stages_(m, world, n_batches); }
        return;
    }
    Comm* holders = m->ranks.ep.alike->size > 1 ? m->ranks.ep.alike : NULL;
    const int of_group = m->ranks.ep.size / expert_ranks_parts(&m->ranks);  // leaves that it computes at once
    assert(n_leaves % (comm ? comm->size : 1) == 0 && zero == 2);
    if (!m->frozen_held[0]) { m->frozen_held[0] = model_frozen_held_(m, 0); }
    m->frozen_held[1] = model_frozen_held_(m, 1);
    dp_init(&m->dp, comm, m->held, m->n_table, m->frozen_held[0], n_leaves, zero);
    dp_want_numbers(&m->dp, m->n_numbers);
    dp_init(&m->dp_experts, holders, m->held, m->n_table, m->frozen_held[1], n_leaves / of_group, zero);
    // they lie behind the rest
    for (int i = 0; i < m->dp_experts.n_stretches; i++) { m->dp_experts.kept[i].at += m->dp.n_kept; }
    m->n_kept = m->dp.n_kept + m->dp_experts.n_kept;
    if (model_has_pp(m)) { model_plan_stages_(m, world, n_batches); }
}

static inline void model_plan_free(Model* m) {
    dp_free(&m->dp);
    dp_free(&m->dp_experts);
    free(m->frozen_held[0]);
    free(m->frozen_held[1]);
    m->frozen_held[0] = m->frozen_held[1] = NULL;
}

// has this rank, with the last stage, a share of a gradient that the first stage keeps?
static inline int model_sends_shared(const Model* m) {
    return model_has_pp(m) && m->shared >= 0 && pp_has_last(&m->pp) &&
           !slice_is_frozen(m->frozen, tensors_slices(m->table, m->shared));
}

static inline int model_receives_shared(const Model* m) {
    return model_has_pp(m) && m->shared >= 0 && pp_has_first(&m->pp) &&
           !slice_is_frozen(m->frozen, tensors_slices(m->table, m->shared));
}

static inline double model_shared_bytes(const Model* m) {
    return model_sends_shared(m)
               ? sizeof(float) * (double)tensor_elements(&m->held[m->shared]) * m->pp.tie_rooms : 0.0;
}

// comm NULL: alone. zero 1: masters and moments are kept once, not on every rank; 2: sums of gradients too, which
// --ep asks for. Before parameters are stored: masters get theirs, too
static inline void model_init_training(Model* m, Comm* comm, int n_batches, int zero, int has_masters) {
    model_plan(m, comm, n_batches, zero);
    if (model_sends_shared(m)) {
        m->shared_grads = (float*)device_alloc((size_t)model_shared_bytes(m), "gradients of the embedding");
    }
    const size_t kept = sizeof(float) * m->n_kept;
    dp_open(&m->dp);
    if (model_has_ep(m)) { dp_open(&m->dp_experts); }
    model_find_lowest(m);
    m->w.m = (float*)device_alloc(kept, "first moments");
    m->w.v = (float*)device_alloc(kept, "second moments");
    if (has_masters) { m->w.master = (float*)device_alloc(kept, "master weights"); }
}

// scratch of the largest matrix of which something learns
static inline size_t model_muon_bytes(const Model* m) {
    size_t most = 0;
    for (int i = 0, slice = 0; i < m->n_table; slice += tensor_slices(&m->table[i++])) {
        const Tensor* t = &m->table[i];
        if (!tensor_takes_muon(t) || !slices_learn(m->frozen, slice, tensor_slices(t))) { continue; }
        const size_t n_bytes = muon_room_bytes(tensor_muon_rows(t), t->columns);
        most = n_bytes > most ? n_bytes : most;
    }
    return most;
}

// once training is opened, of a model whose ranks have whole matrices
static inline void model_init_muon(Model* m) {
    const size_t n_bytes = model_muon_bytes(m);
    assert(!model_has_tp(m) && !model_has_ep(m));
    m->muon_room = n_bytes > 0 ? device_alloc(n_bytes, "scratch of Muon") : NULL;
}

// once training is opened: an average, which has taken in nothing yet
static inline void model_init_average(Model* m, const Device* dev) {
    m->average = (float*)device_alloc(sizeof(float) * m->n_kept, "averaged weights");
    device_zero(m->average, sizeof(float) * m->n_kept, dev);
}

// ---- one of them ----

static inline void model_point(const Model* m, void* pointers, int layer) {
    tensors_point(pointers, m->held, m->n_table, m->w.stored, layer);
}

// the row of `field` that this layer has; -1: there is none
static inline int model_row(const Model* m, size_t field, int layer) {
    for (int i = 0; i < m->n_table; i++) {
        if (m->table[i].field == field && tensor_slice(&m->table[i], layer) >= 0) { return i; }
    }
    return -1;
}

// does what a field has at a layer learn? A layer that lacks it has nothing to learn
static inline int model_field_learns(const Model* m, size_t field, int layer) {
    const int i = model_row(m, field, layer), k = i < 0 ? -1 : tensor_slice(&m->table[i], layer);
    return k >= 0 && !slice_is_frozen(m->frozen, tensors_slices(m->table, i) + k);
}

// where what is stored of row i at a layer begins
static inline const void* model_pointer(const Model* m, int i, int layer) {
    const Tensor* t = &m->held[i];
    const size_t element = (size_t)tensor_slice(t, layer) * tensor_slice_elements(t);
    return (const char*)m->w.stored + tensor_stored_place(t, element);
}

// of a field of the table that is read as the build has it, such as the gain of a norm
static inline const void* model_vector(const Model* m, size_t field, int layer) {
    const int i = model_row(m, field, layer);
    assert(m->held[i].stored == STORED_BY_BUILD);
    return model_pointer(m, i, layer);
}

// the same of a matrix, as products read it. In a CUDA build F32 are floatX
static inline StoredMatrix model_matrix(const Model* m, int i, int layer) {
    const Tensor* t = &m->held[i];
    StoredMatrix w = tensor_as_stored(t);
    w.data = model_pointer(m, i, layer);
    if (t->stored == STORED_BY_BUILD) { w.kind = STORED_F32; }
    if (tensor_has_scales(t)) {
        w.scales = (const char*)m->w.stored + tensor_scales_place(t, tensor_slice(t, layer));
    }
    return w;
}

// the parameters of a CPU build that stores all as floats
static inline float* model_floats(const Model* m) { return (float*)m->w.stored; }

static inline void model_free(Model* m) {
    const size_t kept = sizeof(float) * m->n_kept;
    device_release(m->w.stored, m->stored_bytes);
    device_release(m->w.master, kept);
    device_release(m->w.m, kept);
    device_release(m->w.v, kept);
    device_release(m->average, kept);
    if (m->muon_room) { device_release(m->muon_room, model_muon_bytes(m)); }
    if (m->shared_grads) { device_release(m->shared_grads, (size_t)model_shared_bytes(m)); }
    model_plan_free(m);
    expert_ranks_free(&m->ranks);
    pp_ranks_free(&m->pp);
    rank_group_free(&m->keys);
    rank_group_free(&m->tp);
    rank_group_free(&m->cp);
    free(m->held_layers);
    for (int c = 0; c < PP_CHUNKS_MAX; c++) { free(m->chunk_layers[c]); }
    free(m->frozen);
}
#endif  // LLMC_MODEL_H
