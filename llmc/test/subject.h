/*
A trainer for GPUs (.cu) as the subject of tests: what every such trainer promises of golden files and of itself stands
here once. A test includes its trainer, has a struct that begins with a Subject, and says in SubjectCalls what is its
own:
    typedef struct {
        Subject s;                   // first
        GPT2 gpt2;
        Activations acts, cache;
    } GPT2Subject;
    static const SubjectCalls GPT2CU = {.n_bytes = sizeof(GPT2Subject), .layout = layout, ..., .leaf = leaf, ...};
    subject_open               a model with the parameters of a golden file, on a device, computing in a Way
    subject_draw               a model of random parameters, of sizes that the test gives
    subject_check_forward      activations and choices of the first leaf of a file
    subject_check_training     losses, norms, gradients, parameters after 1 and 10 updates
    subject_check_same         other ways: the same gradients to the last bit, in every build
    subject_check_cache        logits position by position, and piece by piece, equal those of the whole sequence
    subject_check_texts        and of several texts side by side, each with a length of its own
    subject_check_documents    a packed row gives each document what it gets alone
    subject_trained            what a few updates leave behind
    subject_check_graph        --graph: losses and parameters to the last bit, and each leaf is one launch
An exact build has to have every bit; a fast one, which rounds otherwise, stays within the trainer's tolerances.
*/
#ifndef LLMC_SUBJECT_H
#define LLMC_SUBJECT_H
#include "../core/floatx.h"        // floatX, FLOATX_IS_FLOAT
#include "../core/graph.h"         // Graph
#include "../core/tensor_arena.h"  // TensorArena
#include "../ops/cached_text.h"    // CachedText
#include "../ops/documents.h"      // Segments
#include "../ranks/model_stream.h" // Model, Purpose, model_stream_open
#include "golden.h"                // Golden, GoldenRun, golden_check_training

// ---- 1. A trainer, and a way of computing ----

// what changes no bit of an exact build
typedef struct {
    int n_threads, recompute, head_rows;
    int gelu_fusion, graph;  // of trainers that have it; --graph
    int counts_all;          // logits of positions whose targets do not count, too, as --graph has them
} Way;

enum { SUBJECT_HEAD_ROWS = 8192 };  // all positions of a test

static inline Way subject_way(int n_threads, int recompute) {
    const Way w = {n_threads, recompute, SUBJECT_HEAD_ROWS, 0, 0, 0};
    return w;
}

// relative distances; in an exact build all are GOLDEN_BITS
typedef struct {
    double numbers, gradients, parameters, logits;  // numbers: loss and norm
} Tolerances;

typedef struct Subject Subject;

// A Subject* is the first member of the test's struct. What a trainer does not have is NULL
typedef struct {
    size_t n_bytes;                                             // of the test's struct
    Model* (*layout)(Subject* s);                               // sizes of the model, from s->file
    void (*updated)(void* s);                                   // what follows an update
    float (*more_loss)(void* s);                                // what is added to the loss
    Tolerances (*tolerances)(const Subject* s);                 // of a fast build
    int steps;                                                  // generation rounds otherwise than a whole text: it is
                                                                // held against itself, one position at a time
    const void* passes;                                         // of decoder_subject.h
    void (*open)(Subject* s, Purpose purpose, int B, int T);    // activations; sets what is of them in s, when TO_TRAIN
    void (*close)(Subject* s);                                  // activations, those that were never opened too
    // of B rows as long as the file's, forward alone; on the device
    const float* (*losses)(Subject* s, const int* inputs, const int* targets, int B);
    void (*leaf)(void* s, const int* inputs, const int* targets, float dloss);
    void (*forward)(Subject* s, Purpose purpose, const int* tokens, int T, int t0);  // one row
    void (*forward_texts)(Subject* s, const CachedText* texts, int n);  // TO_GENERATE
    const floatX* (*logits)(Subject* s, Purpose purpose, int n);  // of position n of that forward, on the device
} SubjectCalls;

struct Subject {
    const SubjectCalls* calls;
    Golden file;            // all zero: random parameters
    Way way;
    Device dev;
    Model* model;
    Graph* graph;           // of its leaves
    Segments* segments;     // of its batch
    const TensorArena *tensors, *statistics, *choices;  // choices: of experts (layers, N, k); NULL: there are none
    int64_t n_leaves;       // so far
    char how[96];           // `way` in words
};

static inline Subject* subject_new_(const SubjectCalls* calls, Way w) {
    Subject* s = (Subject*)new_array(1, calls->n_bytes);
    s->calls = calls;
    s->way = w;
    snprintf(s->how, sizeof s->how, "%d threads, recompute %d, head rows %d%s%s", w.n_threads, w.recompute, w.head_rows,
             w.gelu_fusion ? ", GELU fused" : "", w.graph ? ", graph" : "");
    device_choose(0);
    device_init(&s->dev, w.n_threads);
    return s;
}

static inline Subject* subject_open(const SubjectCalls* calls, const char* path, Way w) {
    Subject* s = subject_new_(calls, w);
    Golden* g = &s->file;
    ModelStream stream;
    golden_open(g, path);
    Model* m = s->model = calls->layout(s);
    model_init(m, sizeof(floatX));
    model_freeze_base(m);
    model_init_training(m, NULL, g->n_leaves, 0, !FLOATX_IS_FLOAT);
    const SliceSink sink = model_stream_open(&stream, m, NULL, 0, &s->dev);
    tensors_load_into(&sink, &g->set, m->table, m->n_saved, "param.", NULL);
    tensors_load_into(&sink, &g->set, m->table + m->n_saved, m->n_table - m->n_saved, "base.", NULL);  // of an adapter
    model_stream_close(&stream);
    calls->open(s, TO_TRAIN, g->B, g->T);
    return s;
}

// For forward alone, of one row of T positions. Matrices are ten times as large as they would start, so that all parts
// of the model weigh
static inline Subject* subject_draw(const SubjectCalls* calls, Model* (*layout)(Subject* s), int T, Way w) {
    Subject* s = subject_new_(calls, w);
    ModelStream stream;
    Model* m = s->model = layout(s);
    model_init(m, sizeof(floatX));
    const SliceSink sink = model_stream_open(&stream, m, NULL, 0, &s->dev);
    for (int i = 0; i < m->n_table; i++) { m->table[i].std *= 10.0f; }
    tensors_init_into(&sink, m->table, m->n_table, 7);
    model_stream_close(&stream);
    calls->open(s, TO_TRAIN, 1, T);
    return s;
}

static inline void subject_close(Subject* s) {
    s->calls->close(s);
    model_free(s->model);
    device_free(&s->dev);
    if (s->file.config) { golden_close(&s->file); }
    free(s);
}

static inline void subject_leaf_(void* subject, const int* inputs, const int* targets, float dloss) {
    Subject* s = (Subject*)subject;
    s->n_leaves++;
    s->calls->leaf(s, inputs, targets, dloss);
}

static inline Tolerances subject_tolerances_(const Subject* s) {
    const Tolerances bits = {GOLDEN_BITS, GOLDEN_BITS, GOLDEN_BITS, GOLDEN_BITS};
    return FAST_KERNELS ? s->calls->tolerances(s) : bits;
}

static inline GoldenRun subject_run(Subject* s) {
    const Model* m = s->model;
    const Tolerances x = subject_tolerances_(s);
    const GoldenRun run = {m->table, m->n_saved, m->n, &s->model->dp, m->w, &s->dev, s, subject_leaf_,
                           s->calls->updated, s->calls->more_loss, s->how, x.numbers, x.gradients, x.parameters};
    return run;
}

// ---- 2. Against golden files ----

// kernels that round otherwise may choose other experts for a few tokens: a sixth, where scores are near each other
static inline void subject_check_choices_(Test* t, const Subject* s) {
    const size_t n = tensor_elements(&s->choices->table[0]);
    const SafeTensor* expected = golden_tensor(&s->file, "act.experts", DTYPE_I32);
    const SafeTensor* mtp = safetensors_find(s->file.set.files, "act.mtp_experts");  // of the layer behind all others
    const size_t n_mtp = mtp ? mtp->n : 0;
    int* found = (int*)new_array(n, sizeof(int));
    size_t n_others = 0;
    device_download(found, s->choices->memory, sizeof(int) * n, &s->dev);
    if (check(t, expected->n + n_mtp == n, "%zu choices of experts, expected %zu", n, expected->n + n_mtp)) {
        for (size_t i = 0; i < n - n_mtp; i++) { n_others += found[i] != ((const int*)expected->data)[i]; }
        for (size_t i = 0; i < n_mtp; i++) {
            n_others += found[n - n_mtp + i] != ((const int*)mtp->data)[i];
        }
        check(t, n_others <= (FAST_KERNELS ? n / 6 : 0), "%s: %zu of %zu chosen experts are others, %s",
              s->file.set.path, n_others, n, s->how);
    }
    free(found);
}

static inline void subject_check_arena_(Test* t, const Subject* s, const TensorArena* arena, int n_expected) {
    float* found = (float*)new_array(arena->n_bytes / sizeof(float), sizeof(float));
    device_download(found, arena->memory, arena->n_bytes, &s->dev);
    golden_check_activations(t, &s->file, arena->table, arena->n_table, found, n_expected);
    free(found);
}

// n_tensors, n_statistics: how many of each the file has. Fast kernels: choices alone, for what is stored is rounded
static inline void subject_check_forward(Test* t, const SubjectCalls* calls, const char* path, Way w, int n_tensors,
                                         int n_statistics) {
    Subject* s = subject_open(calls, path, w);
    calls->losses(s, golden_batch(&s->file, "inputs", 0, 0), golden_batch(&s->file, "targets", 0, 0),
                  s->file.B);
    if (s->choices) { subject_check_choices_(t, s); }
    if (!FAST_KERNELS) {
        subject_check_arena_(t, s, s->tensors, n_tensors);
        subject_check_arena_(t, s, s->statistics, n_statistics);
    }
    subject_close(s);
}

static inline void subject_check_training(Test* t, const SubjectCalls* calls, const char* path, Way w) {
    Subject* s = subject_open(calls, path, w);
    const GoldenRun run = subject_run(s);
    golden_check_training(t, &s->file, &run);
    subject_close(s);
}

// ---- 3. What must change no bit ----

// the gradients of the second update, n elements on the host, and its loss
static inline float* subject_gradients_(const SubjectCalls* calls, const char* path, Way w, size_t* n, float* loss) {
    Subject* s = subject_open(calls, path, w);
    const GoldenRun run = subject_run(s);
    float norm, *grads = golden_gradients(&s->file, &run, 0, loss, &norm);
    golden_update(&s->file, &run, 0, grads, norm);
    grads = golden_gradients(&s->file, &run, 1, loss, &norm);
    *n = run.n;
    float* host = (float*)new_array(*n, sizeof(float));
    device_download(host, grads, sizeof(float) * *n, &s->dev);
    subject_close(s);
    return host;
}

static inline void subject_check_same(Test* t, const SubjectCalls* calls, const char* path, Way first,
                                      const Way* others, int n_others) {
    size_t n;
    float loss, other_loss, *grads = subject_gradients_(calls, path, first, &n, &loss);
    for (int i = 0; i < n_others; i++) {
        char what[160];
        float* other = subject_gradients_(calls, path, others[i], &n, &other_loss);
        snprintf(what, sizeof what, "%s: recompute %d, head rows %d, fusion %d", path, others[i].recompute,
                 others[i].head_rows, others[i].gelu_fusion);
        check_bits(t, what, other, grads, n);
        check_bits(t, what, &other_loss, &loss, 1);
        free(other);
    }
    free(grads);
}

// of a model that chooses: does this build round so that it chooses others?
static inline int subject_skips_choices(Test* t) {
    const int skips = FAST_KERNELS && !FLOATX_IS_FLOAT;
    if (skips) { skip(t, "bf16: choices that hang on its rounding"); }
    return skips;
}

static inline float* subject_logits_(Subject* s, Purpose purpose, int n, int V) {
    float* logits = filled_array((size_t)V, NAN);
    floatx_download(logits, s->calls->logits(s, purpose, n), (size_t)V, &s->dev);
    return logits;
}

// The first `prompt` of T tokens together, then pieces of 1, 2, .. most, 1, ..; V: logits of a position
static inline void subject_check_pieces_(Test* t, Subject* s, const int* tokens, int T, int prompt, int most, int V) {
    for (int t0 = 0, n = prompt, next = 1; t0 < T; t0 += n, n = next < T - t0 ? next : T - t0, next = next % most + 1) {
        s->calls->forward(s, TO_GENERATE, tokens + t0, t0 + n, t0);
        float *found = subject_logits_(s, TO_GENERATE, n - 1, V), *whole = subject_logits_(s, TO_TRAIN, t0 + n - 1, V);
        golden_compare(t, "logits", found, whole, (size_t)V, subject_tolerances_(s).logits);
        free(found), free(whole);
    }
}

// as text is generated, and as a prompt that is longer than a piece comes
static inline void subject_check_cache(Test* t, Subject* s, const int* tokens, int T, int prompt, int V) {
    s->calls->open(s, TO_GENERATE, 1, T);
    s->calls->forward(s, TO_TRAIN, tokens, T, 0);
    subject_check_pieces_(t, s, tokens, T, prompt, 1, V);
    subject_check_pieces_(t, s, tokens, T, 1, 5, V);
}

// of a golden file's first row
static inline void subject_check_file_cache(Test* t, const SubjectCalls* calls, const char* path, Way w) {
    Subject* s = subject_open(calls, path, w);
    subject_check_cache(t, s, golden_batch(&s->file, "inputs", 0, 0), s->file.T, 3, golden_int(&s->file, "vocab_size"));
    subject_close(s);
}

// Longer than a tile of keys, of a drawn model; the last four positions each alone
static inline void subject_check_long_cache(Test* t, const SubjectCalls* calls, Model* (*layout)(Subject* s), int V) {
    enum { T = 70, PROMPT = 66 };
    int tokens[T];
    Subject* s = subject_draw(calls, layout, T, subject_way(2, 0));
    for (int i = 0; i < T; i++) { tokens[i] = (int)(splitmix64(3, (uint64_t)i) % (uint64_t)V); }
    subject_check_cache(t, s, tokens, T, PROMPT, V);
    subject_close(s);
}

// logits (T, V) of a text that is computed whole, or with `steps` position by position in the first row of the cache
static inline float* subject_whole_logits_(Subject* s, const int* tokens, int T, int V) {
    float* whole = (float*)new_array((size_t)T * (size_t)V, sizeof(float));
    const int steps = s->calls->steps;
    if (!steps) { s->calls->forward(s, TO_TRAIN, tokens, T, 0); }
    for (int i = 0; i < T; i++) {
        if (steps) { s->calls->forward(s, TO_GENERATE, tokens + i, i + 1, i); }
        float* one = subject_logits_(s, steps ? TO_GENERATE : TO_TRAIN, steps ? 0 : i, V);
        memcpy(whole + (size_t)i * (size_t)V, one, sizeof(float) * (size_t)V);
        free(one);
    }
    return whole;
}

// of a pass over texts, each with its whole logits: the last position of each
static inline void subject_check_pass_(Test* t, Subject* s, const CachedText* texts, float* const* whole, int n,
                                       int V) {
    s->calls->forward_texts(s, texts, n);
    for (int i = 0; i < n; i++) {
        float* found = subject_logits_(s, TO_GENERATE, cached_texts_new(texts, i + 1) - 1, V);
        golden_compare(t, "logits", found, whole[i] + (size_t)(texts[i].n - 1) * (size_t)V, (size_t)V,
                       subject_tolerances_(s).logits);
        free(found);
    }
}

// Five texts in three rows of the cache, of a drawn model: prompts alone, then a position of each. A row whose text has
// ended takes the next
static inline void subject_check_texts(Test* t, const SubjectCalls* calls, Model* (*layout)(Subject* s), int V) {
    enum { T = 70, TEXTS = 5, SLOTS = 3 };
    static const int prompts[TEXTS] = {66, 1, 30, 7, 65}, lengths[TEXTS] = {70, 40, 33, 20, 69};
    int tokens[TEXTS][T], text_of[SLOTS] = {-1, -1, -1}, n_begun = 0, n_live;
    float *whole[TEXTS], *whole_of[SLOTS];
    CachedText row[SLOTS], pass[SLOTS];
    Subject* s = subject_draw(calls, layout, T, subject_way(2, 0));
    calls->open(s, TO_GENERATE, SLOTS, T);
    for (int i = 0; i < TEXTS; i++) {
        for (int j = 0; j < T; j++) { tokens[i][j] = (int)(splitmix64((uint64_t)i, (uint64_t)j) % (uint64_t)V); }
        whole[i] = subject_whole_logits_(s, tokens[i], lengths[i], V);
    }
    do {
        n_live = 0;
        for (int r = 0; r < SLOTS; r++) {
            if (text_of[r] < 0 && n_begun < TEXTS) {
                const CachedText begins = {tokens[n_begun], r, 0, prompts[n_begun], NULL};
                text_of[r] = n_begun++;
                row[r] = begins;
                subject_check_pass_(t, s, &row[r], &whole[text_of[r]], 1, V);
            }
            if (text_of[r] >= 0 && row[r].n == lengths[text_of[r]]) { text_of[r] = -1; }
            if (text_of[r] < 0) { continue; }
            row[r].n_cached = row[r].n++;
            whole_of[n_live] = whole[text_of[r]];
            pass[n_live++] = row[r];
        }
        if (n_live > 0) { subject_check_pass_(t, s, pass, whole_of, n_live, V); }
    } while (n_live > 0 || n_begun < TEXTS);
    for (int i = 0; i < TEXTS; i++) { free(whole[i]); }
    subject_close(s);
}

// --doc-reset: a row of three documents, the second of one token, against each of them alone
static inline void subject_check_documents(Test* t, const SubjectCalls* calls, const char* path, Way w) {
    Subject* s = subject_open(calls, path, w);
    const int T = s->file.T, V = golden_int(&s->file, "vocab_size"), starts[] = {0, 2, 3, T};
    int* tokens = (int*)new_array((size_t)T, sizeof(int));
    float* packed[3];
    memcpy(tokens, golden_batch(&s->file, "inputs", 0, 0), sizeof(int) * (size_t)T);
    for (int i = 0; i < T; i++) { tokens[i] = i == starts[1] || i == starts[2] ? V - 1 : tokens[i] % (V - 1); }
    s->segments->document_start = V - 1;
    s->calls->forward(s, TO_TRAIN, tokens, T, 0);
    check(t, s->segments->n == 3, "expected 3 documents, found %d", s->segments->n);
    for (int i = 0; i < 3; i++) { packed[i] = subject_logits_(s, TO_TRAIN, starts[i + 1] - 1, V); }
    for (int i = 0; i < 3; i++) {
        const int n = starts[i + 1] - starts[i];
        s->calls->forward(s, TO_TRAIN, tokens + starts[i], n, 0);
        float* alone = subject_logits_(s, TO_TRAIN, n - 1, V);
        golden_compare(t, "logits", packed[i], alone, (size_t)V, subject_tolerances_(s).logits);
        free(alone), free(packed[i]);
    }
    free(tokens);
    subject_close(s);
}

// ---- 4. What a few updates leave behind, and --graph ----

enum { SUBJECT_STEPS = 4 };

typedef struct {
    float losses[SUBJECT_STEPS], *params;
    size_t n, n_nodes;
    int64_t n_launched;    // leaves that were a graph
    uint64_t n_submitted;  // under dev/simt: what the host gave the device to do in all
} Trained;

static inline uint64_t subject_submitted_(void) {
#ifdef SIMT
    return simt_n_submitted;
#else
    return 0;
#endif
}

static inline Trained subject_trained(const SubjectCalls* calls, const char* path, Way w) {
    Trained x;
    Subject* s = subject_open(calls, path, w);
    const GoldenRun run = subject_run(s);
    const uint64_t before = subject_submitted_();
    x.params = golden_trained(&s->file, &run, SUBJECT_STEPS, x.losses);
    x.n_submitted = subject_submitted_() - before;
    x.n = run.n, x.n_nodes = s->graph->n_nodes, x.n_launched = s->graph->n_launched;
    subject_close(s);
    return x;
}

// n_launched: of the leaves in SUBJECT_STEPS updates, so many are not the first of their kind
static inline void subject_check_graph(Test* t, const SubjectCalls* calls, const char* path, Way w,
                                       int64_t n_launched) {
    Way recorded = w;
    w.counts_all = recorded.graph = 1;
    Trained plain = subject_trained(calls, path, w), graph = subject_trained(calls, path, recorded);
    check_bits(t, "losses", graph.losses, plain.losses, SUBJECT_STEPS);
    check_bits(t, "parameters", graph.params, plain.params, plain.n);
    check(t, plain.n_launched == 0, "without --graph: %lld graphs", (long long)plain.n_launched);
#ifdef __CUDACC__
    check(t, graph.n_launched == n_launched, "%s: %lld leaves were graphs, expected %lld", path,
          (long long)graph.n_launched, (long long)n_launched);
#else
    check(t, graph.n_launched == 0 && n_launched > 0, "a C build has launched a graph");
#endif
#ifdef SIMT
    const uint64_t saved = plain.n_submitted - graph.n_submitted, expected = (uint64_t)n_launched * (graph.n_nodes - 1);
    check(t, graph.n_nodes > 40 && saved == expected, "%s: %llu submissions became %llu, a graph has %zu nodes", path,
          (unsigned long long)plain.n_submitted, (unsigned long long)graph.n_submitted, graph.n_nodes);
#endif
    free(plain.params), free(graph.params);
}
#endif  // LLMC_SUBJECT_H
