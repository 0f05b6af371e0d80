/*
Files of a run: the model that it starts from, checkpoints, exports.
    save_find_model        what --resume, --from and --config mean; save_find_again: of a run that goes on meanwhile
    save_find_companions   files that go along with the model and its tokenizer, read while they are there
    save_open_model        the parameters onto the device, the same on all ranks; for training gradients and moments
    save_resume            with --resume: moments of the checkpoint, counts of updates, what else the trainer keeps
    save_checkpoint        parameters, moments and state, written beside training
                            --ema: the averaged weights too, in ema.safetensors under the names of model.safetensors
    save_check_replicas    asked before: ranks that hold the same parameters hold the same bits, or nothing is saved
    save_check_data        asked before: nothing is saved that was learnt from data which somebody wrote to meanwhile
    save_exports           --export-hf, and what else the trainer writes
*/
#ifndef LLMC_SAVE_H
#define LLMC_SAVE_H
#include "../core/jsonfile.h"     // json_read, json_write_doubles
#include "../files/companions.h"  // companions_read_model, companions_save
#include "../files/hf_folder.h"   // model_find, hf_export_begin
#include "../files/tensorfile.h"  // tensors_save, tensors_save_slices, tensors_load_into
#include "../ranks/model_collect.h" // model_whole, model_whole_average, model_download
#include "../ranks/model_slices.h" // model_slices_open, model_slices_source
#include "../ranks/model_stream.h" // model_stream_open
#include "../ranks/moments.h"     // moments_save, moments_load_layers
#include "../ranks/replicas.h"    // replicas_find
#include "checkpoints.h"          // run_save_begin, run_save_end
#include "staged_stream.h"        // staged_open, staged_copy
#include "trainer.h"              // Run

#define EMA_WEIGHTS "ema.safetensors"

// ---- to start from ----

// --ema-weights: the file of the averaged weights that lies beside this one
static inline void save_find_average(char weights[PATH_BYTES]) {
    char folder[PATH_BYTES], path[PATH_BYTES];
    if (!path_exists(path_join(path, path_parent(folder, weights), EMA_WEIGHTS))) {
        options_fail("ema-weights", "%s has no averaged weights (%s), which a run with --ema saves", folder,
                     EMA_WEIGHTS);
    }
    snprintf(weights, PATH_BYTES, "%s", path);
}

// Is the checkpoint an adapter's? The model beside which it learns is that of --from again
static inline int save_find_adapter_(Run* r) {
    char path[PATH_BYTES];
    if (!path_exists(checkpoint_path(path, r->o.run, r->state.step, HF_ADAPTER_CONFIG))) { return 0; }
    checkpoint_folder(r->adapter, r->o.run, r->state.step);
    return 1;
}

// does --lora of a trainer that has it name an adapter? Then the averaged weights are that one's
static inline int save_adds_(const Run* r) {
    const Option* lora = options_at(r->table, r->n_options, "lora");
    return lora && **(const char**)lora->value != '\0';
}

// --run goes on with an adapter, whose checkpoint does not hold the model
static inline void save_check_base_(const char* from) {
    if (path_exists(from)) { return; }
    fail_input("--resume: %s, the model beside which the adapter learns, is not there: put it back, or name it by "
               "--resume --from DIR", from);
}

// --export-dtype as-read of a run that goes on: a checkpoint holds floats, the types are those of what it began with
static inline int save_reads_began_(const Run* r) {
    return r->o.resume && !*r->adapter && r->o.export_dtype == EXPORT_AS_READ && *r->o.export_hf;
}

static inline void save_find_began_(Run* r) {
    if (!save_reads_began_(r) || !*r->o.from) { return; }
    if (!path_exists(r->o.from)) {
        options_fail("export-dtype", "as-read takes what has not learnt from %s, with which the run began, and that is "
                     "not there: put it back, or give --export-dtype bf16", r->o.from);
    }
    model_find(r->began_weights, r->began_config, r->o.from);
}

// where the model comes from: the file of its parameters (or the index of several), its config.json, its tokenizer
static inline void save_find_model(Run* r) {
    const RunOptions* o = &r->o;
    const int has_own = o->ema > 0.0f && run_will_train(r);
    char path[PATH_BYTES];
    const int is_adapter = o->resume && save_find_adapter_(r);
    run_check_sources(r->table, r->n_options, o, is_adapter);
    snprintf(r->config, PATH_BYTES, "%s", o->config);
    if (o->resume && !is_adapter) {
        checkpoint_path(r->weights, o->run, r->state.step, HF_WEIGHTS);
        checkpoint_path(r->config, o->run, r->state.step, "config.json");
        save_find_began_(r);
    } else if (*o->from) {
        if (is_adapter) { save_check_base_(o->from); }
        model_find(r->weights, r->config, o->from);
    }
    if (*r->weights && run_takes_average(r) && !has_own && !(o->resume && run_will_train(r)) && !save_adds_(r)) {
        save_find_average(r->weights);
    }
    run_choose_tokenizer(r->table, r->n_options, o, model_tokenizer(path, r->config));
}

// A template that was typed, now or when the adapter was trained, or the one that lies with the adapter: whoever chats
// elsewhere with what is saved should find that one, not another that the folder of the tokenizer has. folder: that one
static inline void save_keep_template_(Run* r, const char* folder) {
    const char* name = r->chat.chat_template;
    char beside[PATH_BYTES] = "";
    if (!r->trainer->takes_conversations) { return; }
    const int is_named = strcmp(name, CHAT_AUTO) != 0;
    if (*r->adapter_weights) { path_parent(beside, r->adapter_weights); }
    if (is_named && chat_template_is_of(folder, chat_kind_named(name))) { return; }
    const char* own = is_named ? chat_template_jinja(chat_kind_named(name)) : NULL;
    const int is_beside = !is_named || chat_template_is_of(beside, chat_kind_named(name));
    char* jinja = own ? string_copy(own) : is_beside ? chat_template_text(beside) : NULL;
    char* usual = chat_template_text(folder);
    if (jinja && !(usual && strcmp(jinja, usual) == 0)) {
        companions_put(&r->companions, "chat_template.jinja", jinja);
    }
    if (!jinja && is_named && r->comm->rank == 0) {
        warn_line("--chat-template %s: exports do not say so: who chats with one, by this program or another, has to "
                  "give it that template", name);
    }
    free(usual);
    free(jinja);
}

// What goes along with a tokenizer is in its folder; how to generate is in the model's, and is no longer true when its
// tokens get another meaning. A model trained on shards may have a tokenizer that only others can read.
static inline void save_find_companions(Run* r) {
    char model[PATH_BYTES] = "", tokenizer[PATH_BYTES];
    const int is_typed = run_is_typed(r, "tokenizer");
    if (!run_is_training(r) && !run_exports(r)) { return; }
    if (*r->weights && *r->config) { path_parent(model, r->config); }
    tokenizer_folder(tokenizer, r->o.tokenizer);
    const int is_same = !is_typed || r->o.resume || (*tokenizer && path_is_same(model, tokenizer));
    if (*model && is_same) { companions_read_model(&r->companions, model); }
    if (run_has_text(r) && *tokenizer) { companions_read_tokenizer(&r->companions, tokenizer); }
    if (!run_has_text(r) && *model && !is_typed && !*tokenizer) { companions_read_tokenizer(&r->companions, model); }
    save_keep_template_(r, tokenizer);
}

// --from names a run that another process goes on with: between finding its newest checkpoint and reading it, while
// data was read perhaps, that one may have been pruned. There is a newer one then, of the same model
static inline void save_find_again(Run* r) {
    char was[PATH_BYTES];
    if ((r->o.resume && !*r->adapter) || !*r->o.from || path_exists(r->weights)) { return; }
    snprintf(was, sizeof was, "%s", r->weights);
    model_find(r->weights, r->config, r->o.from);
    if (strcmp(was, r->weights) != 0 && r->comm->rank == 0) {
        warn_line("%s was removed meanwhile: the model is read from %s", was, r->weights);
    }
}

// A typed tokenizer that is not the model's own gives its tokens another meaning; somebody may want that
static inline void save_check_tokenizer(const Run* r) {
    char path[PATH_BYTES];
    const char* own = *r->weights ? model_tokenizer(path, r->config) : "";
    MappedFile file;
    ErrorText reason;
    if (!run_is_typed(r, "tokenizer") || !*own || !r->data.train.text || r->comm->rank > 0) { return; }
    if (!file_map_or_not(&file, own, &reason)) { return; }
    if (!tokenizer_is(&r->tokenizer, file.bytes, file.n_bytes)) {
        warn_line("--tokenizer %s: is not the model's own (%s): what its tokens mean changes", r->o.tokenizer, own);
    }
    file_unmap(&file);
}

// start values as the table says, or every tensor of the table from safetensors
static inline void save_read_table_(Run* r, const SliceSink* sink) {
    SafeSet set;
    if (!*r->weights) {
        tensors_init_into(sink, r->model->table, r->model->n_table, (uint32_t)r->o.seed);
        return;
    }
    safeset_open(&set, r->weights);
    tensors_load_into(sink, &set, r->model->table, r->model->n_table, "", NULL);
    safeset_report_unused(&set);
    safeset_close(&set);
}

// ---- numbers that are not finite ----

// NaN and infinity in what was loaded: in a row that no batch reads, or in a frozen tensor, they show in no loss
typedef struct {
    size_t n, n_first;       // in all tensors, in the first that has some
    char first[NAME_BYTES];  // its name on disk
    const Tensor* tensor;    // of which it is slice k
    int k;
} NotFinite;

// all ranks call, each with what it has counted of tensors that no other counts: then each has it of all
static inline void not_finite_gather_(NotFinite* x, const Model* m, Comm* c) {
    enum { ROW, K, N_FIRST, N, N_NUMBERS };
    const int64_t own[N_NUMBERS] = {x->tensor ? x->tensor - m->table : INT_MAX, x->k, (int64_t)x->n_first,
                                    (int64_t)x->n};
    int64_t* all = (int64_t*)malloc_check(sizeof own * (size_t)c->size, "counts");
    const int64_t* first = own;
    comm_wait(c, comm_all_gather(c, own, all, N_NUMBERS, DT_I64, HERE));
    x->n = 0;
    for (int i = 0; i < c->size; i++) {
        const int64_t* rank = all + N_NUMBERS * i;
        x->n += (size_t)rank[N];
        if (rank[ROW] < first[ROW] || (rank[ROW] == first[ROW] && rank[K] < first[K])) { first = rank; }
    }
    x->n_first = 0;
    for (int i = 0; i < c->size; i++) {  // each may have a part of that slice
        const int64_t* rank = all + N_NUMBERS * i;
        if (rank[ROW] == first[ROW] && rank[K] == first[K]) { x->n_first += (size_t)rank[N_FIRST]; }
    }
    if (x->n > 0) {
        x->tensor = m->table + first[ROW];
        x->k = (int)first[K];
        tensor_slice_name(x->first, sizeof x->first, x->tensor, x->k);
    }
    free(all);
}

static inline size_t not_finite_floats_(const float* values, size_t n) {
    size_t n_bad = 0;
    #pragma omp parallel for reduction(+ : n_bad)
    for (size_t i = 0; i < n; i++) { n_bad += !isfinite(values[i]); }
    return n_bad;
}

// of what is stored as fp8, which has no number larger than its limit either
static inline size_t not_fp8_(const float* values, size_t n) {
    size_t n_bad = 0;
    #pragma omp parallel for reduction(+ : n_bad)
    for (size_t i = 0; i < n; i++) { n_bad += !(fabsf(values[i]) <= FP8_LARGEST_WEIGHT); }
    return n_bad;
}

static inline size_t not_finite_halves_(const uint16_t* values, size_t n) {
    size_t n_bad = 0;
    #pragma omp parallel for reduction(+ : n_bad)
    for (size_t i = 0; i < n; i++) { n_bad += (values[i] & 0x7f80) == 0x7f80; }  // all bits of the exponent
    return n_bad;
}

static inline void not_finite_note_(NotFinite* found, size_t n_bad, const Tensor* t, int k) {
    if (n_bad > 0 && found->n == 0) {
        tensor_slice_name(found->first, sizeof found->first, t, k);
        found->tensor = t;
        found->k = k;
    }
    if (found->tensor == t && found->k == k) { found->n_first += n_bad; }
    found->n += n_bad;
}

// an adapter and its model come from two files, and are counted one by one
typedef enum { OF_MODEL, OF_ADAPTER, N_SOURCES } Source;

static inline Source not_finite_source_(const Model* m, const Tensor* t) {
    return model_is_adapter(m) && model_is_saved_(m, t) ? OF_ADAPTER : OF_MODEL;
}

// of all tensors, where they lie
static inline void not_finite_count_all_(NotFinite found[N_SOURCES], const Model* m) {
    for (int i = 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        const float* values = model_floats(m) + t->offset;
        for (int k = 0; k < tensor_slices(t); k++, values += tensor_slice_elements(t)) {
            const size_t n_bad = not_finite_floats_(values, tensor_slice_elements(t));
            not_finite_note_(&found[not_finite_source_(m, t)], n_bad, t, k);
        }
    }
}

// a stream to the device, on whose way they are counted
typedef struct {
    SliceSink sink;
    float* room;
    uint16_t* halves;  // the slice that is under way as bf16; NULL: it is in `room`
    int is_banded;     // it is stored as fp8 or fp4 as it comes
    const Model* m;
    int rank;
    NotFinite *found, *beyond;  // (N_SOURCES); beyond: in tensors that are stored as fp8, what that cannot be either
} CountingStream;

// Of the ranks that have a slice one counts; where each has a part of it alone, as halves, one of those that have this
static inline int counting_is_ours_(const CountingStream* s, const Tensor* t, int k) {
    const int row = (int)(t - s->m->table), place = s->rank - model_source_rank(s->m, row, k);
    return place >= 0 && place < (s->halves ? model_parts(s->m, row) : 1);
}

static inline float* counting_room_(void* stream, const Tensor* t, int k) {
    CountingStream* s = (CountingStream*)stream;
    s->halves = NULL;
    s->is_banded = 0;
    return s->room = s->sink.room(s->sink.to, t, k);
}

static inline uint16_t* counting_halves_(void* stream, const Tensor* t, int k, int is_exact) {
    CountingStream* s = (CountingStream*)stream;
    return s->halves = s->sink.halves(s->sink.to, t, k, is_exact);
}

// of what a file has in fp8 or fp4 the reader has refused what is no number
static inline uint8_t* counting_scaled_(void* stream, const Tensor* t, int k, Stored kind, void** scales) {
    CountingStream* s = (CountingStream*)stream;
    uint8_t* bytes = s->sink.scaled(s->sink.to, t, k, kind, scales);
    s->halves = NULL;
    s->is_banded = bytes != NULL;
    return bytes;
}

static inline int counting_takes_bands_(void* stream, const Tensor* t, int k) {
    CountingStream* s = (CountingStream*)stream;
    return s->is_banded = s->sink.takes_bands(s->sink.to, t, k);
}

static inline void counting_bands_(void* stream, const Tensor* t, int k, int band, int n, const float* x) {
    const CountingStream* s = (const CountingStream*)stream;
    int n_rows;
    const size_t first = tensor_band(t, band, &n_rows), last = tensor_band(t, band + n - 1, &n_rows);
    if (counting_is_ours_(s, t, k)) {
        not_finite_note_(s->beyond, not_fp8_(x, (last + (size_t)n_rows - first) * (size_t)t->columns), t, k);
    }
    s->sink.bands(s->sink.to, t, k, band, n, x);
}

static inline TensorPart counting_part_(void* stream, const Tensor* t, int k) {
    const CountingStream* s = (const CountingStream*)stream;
    return slice_sink_part(&s->sink, t, k);
}

static inline int counting_needs_(void* stream, const Tensor* t, int k) {
    const CountingStream* s = (const CountingStream*)stream;
    return slice_sink_needs(&s->sink, t, k);
}

static inline void counting_count_(const CountingStream* s, const Tensor* t, int k) {
    const size_t n = tensor_slice_elements(t), n_own = model_part_elements(s->m, (int)(t - s->m->table));
    NotFinite* found = &s->found[not_finite_source_(s->m, t)];
    if (s->halves) { not_finite_note_(found, not_finite_halves_(s->halves, n_own), t, k); }
    else if (s->is_banded) { return; }
    else if (t->stored != STORED_FP8) { not_finite_note_(found, not_finite_floats_(s->room, n), t, k); }
    else { not_finite_note_(s->beyond, not_fp8_(s->room, n), t, k); }
}

static inline void counting_done_(void* stream, const Tensor* t, int k) {
    const CountingStream* s = (const CountingStream*)stream;
    if (counting_is_ours_(s, t, k)) { counting_count_(s, t, k); }
    slice_sink_done(&s->sink, t, k);
}

// in fp8 they would become others, silently
static inline void save_check_fp8_(const Run* r, const NotFinite* beyond) {
    char others[64] = "";
    const size_t n_more = beyond->n - beyond->n_first;
    if (beyond->n == 0) { return; }
    if (n_more > 0) { snprintf(others, sizeof others, ", and %zu of other tensors", n_more); }
    fail_input("%s: --weights fp8: expected finite numbers of at most %g, found %zu of %s that are not%s: "
               "--weights bf16 keeps larger ones", r->weights, (double)FP8_LARGEST_WEIGHT, beyond->n_first,
               beyond->first, others);
}

// A run that would learn from them is refused: whatever they touch becomes NaN, no update mends it, and what they do
// not touch goes into every checkpoint. To go on, evaluate, generate or convert changes no number: a warning.
static inline void save_check_finite_(const Run* r, const NotFinite* found, const char* file) {
    char others[64] = "";
    if (!*file || found->n == 0) { return; }  // start values are finite
    const size_t n_others = found->n - found->n_first;
    if (n_others > 0) { snprintf(others, sizeof others, ", %zu of other tensors", n_others); }
    if (run_is_training(r) && !r->o.resume) {
        fail_input("%s: expected finite numbers, found %zu of %s that are NaN or infinite%s: training cannot mend "
                   "them, take a sound file", file, found->n_first, found->first, others);
    }
    if (r->comm->rank > 0) { return; }
    warn_line("%s: %zu numbers of %s are NaN or infinite%s", file, found->n_first, found->first, others);
}

// of a file of parameters: of llm.c's all bytes; of safetensors names, shapes and the ends of each tensor
static inline uint64_t save_file_sum_(const char* path) {
    MappedFile file;
    SafeSet set;
    file_map(&file, path);
    const int is_bin = is_llmc_bin(&file);
    uint64_t sum = is_bin ? XXH3_64bits(file.bytes, file.n_bytes) : 0;
    file_unmap(&file);
    if (is_bin) { return sum; }
    safeset_open(&set, path);
    sum = safeset_sum(&set, 1);
    safeset_close(&set);
    return sum;
}

// Ranks that have the same must have read the same. Who has another part is told by what its files look like
static inline void save_check_same_(Run* r, const ModelStream* stream) {
    const Model* m = r->model;
    const char* const files[N_SOURCES] = {r->weights, r->adapter_weights};
    if (r->comm->size == 1) { return; }
    for (int i = 0; i < N_SOURCES && model_is_divided(m); i++) {
        if (*files[i]) { ranks_same(r->comm, "parameters", save_file_sum_(files[i])); }
    }
    const uint64_t stage = (uint64_t)m->pp.place, first = stage * RANK_GROUP_MAX;
    ranks_same_of(r->comm, "parameters", stream->sum, stage);
    ranks_same_of(r->comm, "parameters", stream->sum_of_experts, first + (uint64_t)m->ranks.ep.place);
    ranks_same_of(r->comm, "parameters", stream->sum_of_parts, first + (uint64_t)m->tp.place);
}

// ---- what leaves as it was read ----

// Does slice k leave otherwise than it came? Of an adapter's base what it is merged into; of a model that learns all
// but what is frozen, of which biases of routers move without a gradient, and tables of whole numbers, which never do
static inline int save_has_learnt_(const void* run, const Tensor* t, int k) {
    const Run* r = (const Run*)run;
    const Model* m = r->model;
    const int i = (int)(t - m->table);
    if (model_is_adapter(m)) { return r->trainer->adapter_changes(r, i, k); }
    const int slice = tensors_slices(m->table, i) + k;
    if (r->moved && r->moved[slice]) { return 1; }
    return run_is_training(r) && t->whole_below == 0 && (t->is_counted || !slice_is_frozen(m->frozen, slice));
}

// what a build that stores bf16 has only read, and rounded, has not moved
static inline int save_differs_(const float* now, const float* began, size_t n) {
    size_t n_moved = 0;
    #pragma omp parallel for reduction(+ : n_moved)
    for (size_t i = 0; i < n; i++) {
        n_moved += now[i] != began[i] && now[i] != bf16_widen(bf16_nearest(began[i]));
    }
    return n_moved > 0;
}

// Of a run that goes on: an earlier start may have trained what is frozen now, or other files have the name of those
// that it began with. What differs from them has learnt
static inline void save_find_moved_(Run* r) {
    const Model* m = r->model;
    const size_t n_bytes = sizeof(float) * model_largest_slice(m, m->n_table);
    float *now = (float*)malloc_check(n_bytes, "a tensor"), *began = (float*)malloc_check(n_bytes, "a tensor");
    float* turned = tensors_turning_room(m->table, m->n_table);
    char name[NAME_BYTES];
    SafeSet checkpoint;
    safeset_open(&checkpoint, r->weights);
    unsigned char* moved = (unsigned char*)memset(malloc_check((size_t)m->n_slices, "marks of tensors"), 0,
                                                  (size_t)m->n_slices);
    for (int i = 0, slice = 0; i < m->n_table; i++) {
        const Tensor* t = &m->table[i];
        const size_t n = tensor_slice_elements(t);
        for (int k = 0; k < tensor_slices(t); k++, slice++) {
            const int is_there = find_tensor_(&r->read, "", tensor_slice_name(name, sizeof name, t, k)) != NULL;
            if (!is_there || save_has_learnt_(r, t, k)) { continue; }
            memset(now, 0, sizeof *now * n);  // padding rows are not read
            memset(began, 0, sizeof *began * n);
            tensor_load_slice(&checkpoint, t, k, "", now, turned);
            tensor_load_slice(&r->read, t, k, "", began, turned);
            moved[slice] = (unsigned char)save_differs_(now, began, n);
        }
    }
    r->moved = moved;
    safeset_close(&checkpoint);
    free(turned);
    free(now);
    free(began);
}

// with --export-dtype as-read, on rank 0: whoever replaces or removes the files meanwhile
static inline void save_keep_files_(Run* r) {
    if (r->o.export_dtype != EXPORT_AS_READ || !*r->o.export_hf || r->comm->rank > 0) { return; }
    safeset_open(&r->read, *r->began_weights ? r->began_weights : r->weights);
    if (*r->began_weights) { save_find_moved_(r); }
}

// Gradients, moments and parameters: drawn by every rank alike, or read as far as it has them. A device gets them
// slice by slice
static inline void save_open_model(Run* r) {
    Model* m = r->model;
    const int in_place = DEVICE_IS_SHARED && m->is_float && !model_is_divided(m);
    const int trains = run_is_training(r), exports = !trains && run_exports(r) && !model_exports_stored(m);
    ModelStream stream;
    StagedStream staged;
    model_init(m, r->trainer->stored_bytes);
    if (trains) { model_init_training(m, r->comm, r->n_leaves, r->o.zero, r->has_masters); }
    if (trains && r->o.optimizer == OPTIMIZER_MUON) { model_init_muon(m); }
    if (trains && r->o.ema > 0.0f) { model_init_average(m, &r->dev); }
    if (trains && r->trainer->counts_updates) {
        const size_t n_bytes = sizeof(int) * (size_t)m->n_slices;
        r->slice_updates = (int*)memset(malloc_check(n_bytes, "counts of updates"), 0, n_bytes);
    }
    if (!in_place && exports && r->comm->rank == 0) {
        r->loaded = (float*)arena_alloc(sizeof(float) * m->n, "parameters on the host");
    }
    NotFinite found[N_SOURCES] = {{0, 0, "", NULL, 0}, {0, 0, "", NULL, 0}}, beyond = found[0];
    CountingStream counting = {slice_sink(NULL), NULL, NULL, 0, m, r->comm->rank, found, &beyond};
    if (!in_place) {
        const SliceSink to_device = model_stream_open(&stream, m, r->loaded, r->state.updates, &r->dev);
        counting.sink = staged_open(&staged, m, to_device, &r->dev);
    }
    if (!in_place && r->comm->size > 1) { model_stream_sum(&stream); }
    const SliceSink counted = {counting_room_,  counting_done_,        &counting,
                               counting_halves_, counting_takes_bands_, counting_bands_, counting_needs_,
                               counting_scaled_, counting_part_};
    const SliceSink sink = in_place ? slice_sink(model_floats(m)) : counted;
    save_find_again(r);
    (r->trainer->load ? r->trainer->load : save_read_table_)(r, &sink);
    save_keep_files_(r);
    if (in_place && (*r->weights || *r->adapter_weights)) { not_finite_count_all_(found, m); }
    for (int i = 0; !in_place && i < N_SOURCES; i++) { not_finite_gather_(&found[i], m, r->comm); }
    if (!in_place) { not_finite_gather_(&beyond, m, r->comm); }
    save_check_fp8_(r, &beyond);
    save_check_finite_(r, &found[OF_MODEL], r->weights);
    save_check_finite_(r, &found[OF_ADAPTER], r->adapter_weights);
    if (!in_place) {
        save_check_same_(r, &stream);
        staged_close(&staged);
        model_stream_close(&stream);
    } else if (r->comm->size > 1) {
        ranks_same(r->comm, "parameters", XXH3_64bits(model_floats(m), m->stored_bytes));
    }
    if (trains && r->o.verify_every > 0) { dp_verify(&m->dp, &r->verify, &m->w); }
}

// what a checkpoint holds beside model, moments and state; returns how many
static inline int save_extras_(const Run* r, Extra extras[MAX_EXTRAS + 1]) {
    int n = 0;
    if (r->slice_updates) {
        const Extra updates = {"updates", DTYPE_I32, r->slice_updates, (size_t)r->model->n_slices};
        extras[n++] = updates;
    }
    return n + run_extras(r, extras + n);
}

// the counts of a model that may have grown since: a new slice has had no updates
static inline void save_load_updates_(Run* r, const char* path) {
    const Model* m = r->model;
    int n_old = 0, slice = 0;
    int* from = (int*)malloc_check(sizeof(int) * (size_t)m->n_slices, "counts of updates");
    for (int i = 0, first = 0; i < m->n_table; i++, first = n_old) {
        for (int k = 0; k < tensor_slices(&m->table[i]); k++) {
            const int old = tensor_old_slice(&m->table[i], r->old_layers, k);
            from[slice++] = old < 0 ? -1 : first + old;
            n_old += old >= 0;
        }
    }
    int* counts = (int*)malloc_check(sizeof(int) * (size_t)n_old, "counts of updates");
    const Extra updates = {"updates", DTYPE_I32, counts, (size_t)n_old};
    extras_load(path, &updates, 1);
    for (int i = 0; i < n_old; i++) {
        if (counts[i] < 0 || counts[i] > r->state.updates) {
            fail_input("%s: \"updates\": expected counts of 0 to %d, found %d", path, r->state.updates, counts[i]);
        }
    }
    for (int i = 0; i < m->n_slices; i++) { r->slice_updates[i] = from[i] < 0 ? 0 : counts[from[i]]; }
    free(counts);
    free(from);
}

// The average of the checkpoint; where it has none, or the model has grown since, a new one begins
static inline void save_load_average_(Run* r) {
    char path[PATH_BYTES];
    checkpoint_path(path, r->o.run, r->state.step, EMA_WEIGHTS);
    if (r->state.averaged > 0 && !r->old_layers && path_exists(path)) {
        moments_load_average(path, r->model, r->model->average, &r->dev);
        return;
    }
    r->state.averaged = 0;
    if (r->comm->rank > 0) { return; }
    warn_line("--ema: %s: the average begins now",
              r->old_layers ? "the model has new layers" : "the checkpoint has none");
}

// Moments mean something else to another optimizer. A checkpoint that names none is AdamW's
static inline void save_check_optimizer_(const Run* r) {
    char folder[PATH_BYTES];
    char* name = checkpoint_option(checkpoint_folder(folder, r->o.run, r->state.step), "optimizer");
    const int old = name ? choice_find(OPTIMIZER_NAMES, name) : OPTIMIZER_ADAMW;
    free(name);
    if (old == r->o.optimizer) { return; }
    options_fail("optimizer", "the moments of %s are those of %s: begin with --from %s", folder,
                 choice_name(OPTIMIZER_NAMES, old).s, folder);
}

// moments, and what else is kept, of the checkpoint that --resume goes on from
static inline void save_resume(Run* r) {
    Model* m = r->model;
    char path[PATH_BYTES];
    Extra extras[MAX_EXTRAS];
    if (!r->o.resume) { return; }
    save_check_optimizer_(r);
    checkpoint_path(path, r->o.run, r->state.step, "optimizer.safetensors");
    moments_load_layers(path, m, m->w.m, m->w.v, r->old_layers, &r->dev);
    if (m->average) { save_load_average_(r); }
    checkpoint_path(path, r->o.run, r->state.step, "trainer.safetensors");
    if (r->slice_updates) { save_load_updates_(r, path); }
    if (run_extras(r, extras) > 0) { r->trainer->load_extras(r, path); }
}

// ---- checkpoints ----

// what tokenizer and companions take on a disk
static inline double save_text_bytes_(const Run* r) {
    return (double)r->tokenizer.n_json + companions_bytes(&r->companions) + 8192.0;
}

// a config.json says what scales its matrices have as the one does from which they are
static inline void save_quantized_(const Run* r, json_t* config) {
    json_t* source = json_read(*r->began_config ? r->began_config : r->config);
    json_t* q = json_object_get(source, "quantization_config");
    q = q ? q : json_object_get(json_object_get(source, "text_config"), "quantization_config");
    if (q) { json_object_set(config, "quantization_config", q); }
    json_decref(source);
}

// dtype: DTYPE_F32 or DTYPE_BF16, of what is not as it was read; as_read NULL: of all
static inline void save_model_(const Run* r, const Tensor* table, int n, SliceSource params, const char* folder,
                               Dtype dtype, const AsRead* as_read, size_t shard_bytes, SavedFiles* files) {
    char path[PATH_BYTES];
    const int eot = run_end_of_text(r), has_bf16 = as_read && safeset_has(as_read->set, DTYPE_BF16);
    const char* dtype_of_torch = dtype == DTYPE_BF16 || has_bf16 ? "bfloat16" : "float32";
    json_t* config = r->trainer->config_json(r, eot, dtype_of_torch);
    if (as_read) { save_quantized_(r, config); }
    saved_files_add(files, json_write_doubles(path_join(path, folder, "config.json"), config));
    tensors_save_slices(folder, table, n, params, dtype, as_read, shard_bytes, files);
    if (!companions_have(&r->companions, "generation_config.json")) {
        json_t* ids = json_pack("{s:i, s:i, s:i}", "bos_token_id", eot, "eos_token_id", eot, "pad_token_id", eot);
        saved_files_add(files, json_write(path_join(path, folder, "generation_config.json"), ids));
    }
}

// tokenizer and companions
static inline void save_text_(const Run* r, const char* folder, SavedFiles* files) {
    const int has_tokenizer = run_has_text(r) && tokenizer_save(folder, &r->tokenizer, files);
    if (has_tokenizer && !companions_have(&r->companions, "tokenizer_config.json")) {
        tokenizer_save_config(folder, &r->tokenizer, r->max_T, files);
    }
    companions_save(&r->companions, folder, files);
}

// Where ranks have parts of a model, none collects it: rank 0 writes as slices come. An adapter is small
static inline int save_by_slices_(const Model* m) { return model_is_divided(m) && !model_is_adapter(m); }

// model or adapter, from a copy of its parameters on the host
static inline void save_parameters_(Run* r, const void* copy, const char* folder, SavedFiles* files) {
    Model* m = r->model;
    if (save_by_slices_(m)) {
        ModelSlices slices = model_slices_open(m, model_source_of(m, copy, NULL, &r->dev));
        const SliceSource source = model_slices_source(&slices);
        save_model_(r, m->table, m->n_table, source, folder, DTYPE_F32, NULL, SIZE_MAX, files);
        model_slices_close(&slices);
        return;
    }
    const float* params = model_whole(m, copy, NULL, &r->dev);
    if (model_is_adapter(m)) { r->trainer->write_adapter(r, params, folder, files); }
    else { save_model_(r, m->table, m->n_table, slice_source(params), folder, DTYPE_F32, NULL, SIZE_MAX, files); }
    model_whole_free(m, params, copy);
}

// average and copy: of the average and of the parameters, on the host
static inline FileSum save_average_(Run* r, const float* average, const void* copy, const char* path) {
    Model* m = r->model;
    FileSum sum;
    if (save_by_slices_(m)) {
        ModelSlices slices = model_slices_open(m, model_source_of_average(m, average, copy, NULL, &r->dev));
        sum = tensors_save_from(path, m->table, m->n_saved, model_slices_source(&slices));
        model_slices_close(&slices);
        return sum;
    }
    float* whole = model_whole_average(m, average, copy, NULL, &r->dev);
    sum = tensors_save(path, m->table, m->n_saved, whole);
    arena_free(whole, sizeof(float) * m->n);
    return sum;
}

// what a rank above 0 does meanwhile
static inline void save_answer_(Run* r, ModelSource from) {
    ModelSlices slices = model_slices_open(r->model, from);
    model_slices_answer(&slices);
    model_slices_close(&slices);
}

static inline void save_help_(Run* r) {
    Model* m = r->model;
    const int by_slices = save_by_slices_(m);
    if (by_slices) { save_answer_(r, model_source_of(m, model_source(m), &r->dev, &r->dev)); }
    else if (model_is_in_parts(m)) { model_whole(m, model_source(m), &r->dev, &r->dev); }
    moments_save(NULL, m, m->w.m, m->w.v, &r->dev);
    if (!m->average) { return; }
    if (by_slices) { save_answer_(r, model_source_of_average(m, m->average, model_source(m), &r->dev, &r->dev)); }
    else { model_whole_average(m, m->average, model_source(m), &r->dev, &r->dev); }
}

// the files of a checkpoint, from the snapshot: training may be further on by now
static inline void save_write_(void* run) {
    Run* r = (Run*)run;
    Snapshot* s = &r->snapshot;
    char temporary[PATH_BYTES], path[PATH_BYTES];
    SavedFiles* files = saved_files_new();
    const Model* model = r->model;
    const double n_bytes = run_checkpoint_bytes(model->table, model->n_saved, model->frozen, model->average != NULL);
    run_save_begin(temporary, &r->o, &s->state, n_bytes + save_text_bytes_(r));
    save_parameters_(r, s->arena[0], temporary, files);
    save_text_(r, temporary, files);
    path_join(path, temporary, "optimizer.safetensors");
    const float *m = (const float*)s->arena[1], *v = (const float*)s->arena[2];
    saved_files_add(files, moments_save(path, r->model, m, v, NULL));
    if (r->model->average) {
        path_join(path, temporary, EMA_WEIGHTS);
        saved_files_add(files, save_average_(r, (const float*)s->arena[3], s->arena[0], path));
    }
    Extra extras[MAX_EXTRAS + 1];
    const int n_extras = save_extras_(r, extras);
    for (int i = 0; i < n_extras; i++) { extras[i].values = (void*)s->arena[SNAPSHOT_ARENAS + i]; }
    if (n_extras > 0) { extras_save(path_join(path, temporary, "trainer.safetensors"), extras, n_extras, files); }
    run_save_end(temporary, files, r->table, r->n_options, &r->o, &s->state, r->recorded);
    free(files);
}

// all ranks call; the first that sees it says so. Checkpoints of before were checked when they were saved
static inline void save_check_data(Run* r) {
    const char* path = data_changed(&r->data);
    const int ours = path ? r->comm->size - r->comm->rank : 0;  // the lowest rank has the largest
    int largest = ours;
    comm_all_reduce(r->comm, &largest, 1, DT_I32, OP_MAX, HERE);
    if (largest == 0) { return; }
    if (ours != largest) { comm_barrier(r->comm, HERE); }  // another rank says it
    background_wait(&r->snapshot.writer);
    fail_run("%s: another program has written to it since it was opened, or has taken it away: nothing is saved of "
             "what was learnt since the last checkpoint%s", path,
             *r->o.run ? "; give the file back and --resume, which compares its bytes" : "");
}

// all ranks call; rank 0 says it. What the ranks go on with would no longer be what one rank computes
static inline void save_check_replicas(Run* r) {
    Comm* c = r->comm;
    Replicas found = replicas_find(r->model, c, &r->dev);
    char name[NAME_BYTES];
    int n = 0;
    if (found.row < 0) { return; }
    for (int i = 0; i < c->size; i++) { n += found.others[i]; }
    if (c->rank > 0) {
        failure_()->silent = 1;
        comm_barrier(c, HERE);
    }
    background_wait(&r->snapshot.writer);
    fail_run("step %d: rank%s %s: other bits of %s than rank %d, which has the same: memory or a link of one of them, "
             "or a bug; not saved. Go on from the checkpoint before, by --continue%s", r->state.step, n > 1 ? "s" : "",
             ranks_list(found.others, c->size).s,
             tensor_slice_name(name, sizeof name, &r->model->table[found.row], found.slice), found.like,
             c->size > 2 ? "; if it comes again, without that machine" : "");
}

// rank 0 writes, in the background unless the run is over; with --zero 1 or 2 or stages the others send it their parts
static inline void save_checkpoint(Run* r, int last) {
    Model* model = r->model;
    const size_t kept = sizeof(float) * model->n_kept;
    const void* arenas[SNAPSHOT_ARENAS_MAX] = {model_source(model), model->w.m, model->w.v, model->average};
    size_t n_bytes[SNAPSHOT_ARENAS_MAX] = {model_source_bytes(model), kept, kept, model->average ? kept : 0};
    Extra extras[MAX_EXTRAS + 1];
    const int n_extras = save_extras_(r, extras);
    for (int i = 0; i < n_extras; i++) {
        arenas[SNAPSHOT_ARENAS + i] = extras[i].values;
        n_bytes[SNAPSHOT_ARENAS + i] = dtype_size(extras[i].dtype) * extras[i].n;
    }
    r->state.n_sample_bytes = run_sample_bytes(&r->o);
    if (r->comm->rank == 0) {
        snapshot_save(&r->snapshot, arenas, n_bytes, SNAPSHOT_ARENAS + n_extras, &r->state, run_saves_beside(r), last,
                      save_write_, r, &r->dev);
    } else if (r->o.zero > 0 || model_is_divided(model)) {
        save_help_(r);
    }
}

// before numbers change that do not learn, as biases of routers do: with masters a writer at work still reads them
static inline void save_let_change(Run* r) {
    if (r->model->w.master) { background_wait(&r->snapshot.writer); }
}

// ---- exports ----

// what the files of an export may take
static inline double save_export_bytes_(const Run* r, const Tensor* table, int n, Dtype dtype) {
    double n_bytes = (double)dtype_size(dtype) * (double)tensors_disk_count(table, n);
    if (r->o.export_dtype != EXPORT_AS_READ) { return n_bytes; }
    n_bytes = (double)r->read.n_bytes;
    for (int i = 0; i < n; i++) {
        int n_learnt = 0;
        for (int k = 0; k < tensor_slices(&table[i]); k++) { n_learnt += save_has_learnt_(r, &table[i], k); }
        n_bytes += (double)n_learnt * (double)(sizeof(float) * tensor_disk_elements(&table[i]));
    }
    return n_bytes;
}

// a folder that this trainer loads, and transformers too where it has such a model
static inline void save_export_folder_(const Run* r, const Tensor* table, int n, SliceSource params,
                                       const char* folder) {
    char temporary[PATH_BYTES];
    SavedFiles* files = saved_files_new();
    const Dtype dtype = r->o.export_dtype == EXPORT_BF16 ? DTYPE_BF16 : DTYPE_F32;
    const double n_bytes = save_export_bytes_(r, table, n, dtype);
    const int lock = hf_export_begin(temporary, "export-hf", folder, n_bytes + save_text_bytes_(r));
    const AsRead as_read = {(SafeSet*)&r->read, save_has_learnt_, r};
    save_model_(r, table, n, params, temporary, dtype, r->o.export_dtype == EXPORT_AS_READ ? &as_read : NULL,
                (size_t)(1e9 * (double)r->o.shard_gb), files);
    save_text_(r, temporary, files);
    hf_export_end(lock, temporary, "export-hf", folder);
    free(files);
}

static inline void save_export_adapter_(const Run* r, const float* params, const char* folder) {
    char temporary[PATH_BYTES];
    SavedFiles* files = saved_files_new();
    const int lock = hf_export_begin(temporary, "export-lora", folder, sizeof(float) * (double)r->model->n);
    r->trainer->write_adapter(r, params, temporary, files);
    save_text_(r, temporary, files);
    hf_export_end(lock, temporary, "export-lora", folder);
    free(files);
}

// a model as it is stored, an adapter's base with what it adds, slice by slice
typedef struct {
    const Run* r;
    const float* params;  // of the adapter; NULL: there is none
    float* room;          // for a slice,
    float* before;        // ... as the base has it; NULL: what is merged is not rounded
    ModelSlices* parts;   // of ranks that have the model in parts; NULL: this one has all of it,
    ModelSource stored;   // here
    int n_rounded;        // slices that were merged and leave as bf16: the most that a number
    double rounding, change;  // was rounded by, and the adapter has changed one by;
    char where[NAME_BYTES];   // of the former
} MergedSlices;

// does slice k leave as bf16, and otherwise than it came?
static inline int merged_rounds_(const MergedSlices* x, const Tensor* t, int k) {
    const Run* r = x->r;
    char name[NAME_BYTES];
    if (!x->before || !r->trainer->adapter_changes(r, (int)(t - r->model->table), k)) { return 0; }
    if (r->o.export_dtype == EXPORT_BF16) { return t->stored != STORED_F32; }
    const SafeTensor* was = safeset_look(&r->read, tensor_slice_name(name, sizeof name, t, k));
    return was && was->dtype != DTYPE_F32;
}

static inline void merged_measure_(MergedSlices* x, const Tensor* t, int k) {
    x->n_rounded++;
    for (size_t i = 0, n = tensor_slice_elements(t); i < n; i++) {
        const double merged = (double)x->room[i], by = fabs(merged - (double)bf16_widen(bf16_nearest(x->room[i])));
        const double change = fabs(merged - (double)x->before[i]);
        if (by > x->rounding) {
            x->rounding = by;
            tensor_slice_name(x->where, sizeof x->where, t, k);
        }
        x->change = change > x->change ? change : x->change;
    }
}

static inline void merged_say_(const MergedSlices* x) {
    if (x->n_rounded == 0) { return; }
    printf("merged: %d matri%s rounded to bf16, numbers by at most %.2g%s%s; the adapter had changed them by up to "
           "%.2g\n", x->n_rounded, x->n_rounded > 1 ? "ces" : "x", x->rounding, *x->where ? " in " : "", x->where,
           x->change);
}

static inline const float* merged_slice_(void* from, const Tensor* t, int k) {
    MergedSlices* x = (MergedSlices*)from;
    Model* m = x->r->model;
    const int i = (int)(t - m->table);
    if (x->parts) {
        const float* slice = model_slices_source(x->parts).slice(x->parts, t, k);
        memcpy(x->room, slice, sizeof(float) * tensor_slice_elements(t));
    } else {
        model_stored_slice_(m, x->stored.stored, i, k, x->room, x->stored.stored_dev);
    }
    const int rounds = x->params && merged_rounds_(x, t, k);
    if (rounds) { memcpy(x->before, x->room, sizeof(float) * tensor_slice_elements(t)); }
    if (x->params) { x->r->trainer->merge_adapter(x->r, x->params, i, k, x->room); }
    if (rounds) { merged_measure_(x, t, k); }
    return x->room;
}

// parts, stored: see MergedSlices
static inline void save_export_merged_(const Run* r, const float* params, ModelSlices* parts, ModelSource stored,
                                       const char* folder) {
    const Model* m = r->model;
    const size_t n_bytes = sizeof(float) * model_largest_slice(m, m->n_table);
    MergedSlices merged;
    memset(&merged, 0, sizeof merged);
    merged.r = r, merged.params = params, merged.parts = parts, merged.stored = stored;
    merged.room = (float*)malloc_check(n_bytes, "a tensor that is merged");
    if (params && r->o.export_dtype != EXPORT_FP32) { merged.before = (float*)malloc_check(n_bytes, "its base"); }
    const SliceSource source = {merged_slice_, &merged};
    const int first = model_is_adapter(m) ? m->n_saved : 0;
    save_export_folder_(r, m->table + first, m->n_table - first, source, folder);
    merged_say_(&merged);
    free(merged.before);
    free(merged.room);
}

// What is stored, with what the adapter adds (params NULL: there is none), whole on rank 0; where ranks have parts of
// it, all call and bring them
static inline void save_export_stored_(Run* r, const float* params) {
    Model* m = r->model;
    const int brings = run_is_training(r) && model_is_divided(m);
    if (!brings && r->comm->rank > 0) { return; }
    void* copy = staged_copy(m, &r->dev);
    const ModelSource stored = {NULL, NULL, copy ? copy : m->w.stored, copy ? NULL : &r->dev};
    if (!brings) {
        save_export_merged_(r, params, NULL, stored, r->o.export_hf);
    } else if (r->comm->rank > 0) {
        save_answer_(r, stored);
    } else {
        ModelSlices slices = model_slices_open(m, stored);
        save_export_merged_(r, params, &slices, stored, r->o.export_hf);
        model_slices_close(&slices);
    }
    staged_copy_free(m, copy);
}

// all ranks call, rank 0 writes: what was loaded, or what training has made of it
static inline void save_exports(Run* r) {
    Model* m = r->model;
    const int exports_adapter = r->export_adapter && *r->export_adapter;
    if (!run_exports(r)) { return; }
    if (r->comm->rank > 0 && !run_is_training(r)) { return; }  // rank 0 has kept what it has read
    if (model_exports_stored(m)) {
        save_export_stored_(r, NULL);
        return;
    }
    const int averaged = run_takes_average(r) && m->average && r->state.averaged > 0;
    if (run_is_training(r) && save_by_slices_(m)) {
        const ModelSource from =
            averaged ? model_source_of_average(m, m->average, model_source(m), &r->dev, &r->dev)
                     : model_source_of(m, model_source(m), &r->dev, &r->dev);
        if (r->comm->rank > 0) {
            save_answer_(r, from);
            return;
        }
        ModelSlices slices = model_slices_open(m, from);
        save_export_folder_(r, m->table, m->n_table, model_slices_source(&slices), r->o.export_hf);
        model_slices_close(&slices);
        return;
    }
    const float* params = r->loaded ? r->loaded
                        : averaged ? model_whole_average(m, m->average, model_source(m), &r->dev, &r->dev)
                                   : model_download(m, &r->dev);
    if (r->comm->rank == 0 && exports_adapter) { save_export_adapter_(r, params, r->export_adapter); }
    if (*r->o.export_hf && model_is_adapter(m)) { save_export_stored_(r, params); }
    else if (*r->o.export_hf && r->comm->rank == 0) {
        save_export_folder_(r, m->table, m->n_table, slice_source(params), r->o.export_hf);
    }
    if (r->comm->rank == 0 && r->exports_more) { r->trainer->write_more(r, params); }
    if (averaged) { arena_free((void*)params, sizeof(float) * m->n); }
    else if (params != r->loaded) { model_whole_free(m, params, model_source(m)); }
}
#endif  // LLMC_SAVE_H
