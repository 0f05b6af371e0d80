/*
train_gpt2.cu against the files that dev/ref/gpt2.py, an independent NumPy program, has written: the same promises for the file
as C, as exact CUDA (bit for bit) and as bf16 CUDA (within a tolerance), on a GPU or under dev/simt.
*/
#define TESTING
#include "train_gpt2.cu"
#include "llmc/test/golden.h"  // Golden, golden_check_training
#include "llmc/test/test.h"

static const char* const BASE = "dev/golden/gpt2_base.safetensors";
static const char* const DROPOUT = "dev/golden/gpt2_dropout.safetensors";
static const char* const ODD = "dev/golden/gpt2_odd.safetensors";  // 3 leaves, clip, cosine, masked targets, head size 11

typedef struct {
    Golden file;
    GPT2 gpt2;
    Activations acts;
    Device dev;
    int n_done;  // leaves
} Subject;

static void subject_open(Subject* s, const char* path, Tradeoffs how) {
    const Golden* g = &s->file;
    ModelStream stream;
    golden_open(&s->file, path);
    s->n_done = 0;
    const Config c = config_make(golden_int(g, "n_positions"), golden_int(g, "vocab_size"), golden_int(g, "n_layer"),
                                 golden_int(g, "n_head"), golden_int(g, "n_embd"));
    device_choose(0);
    device_init(&s->dev, 2);
    gpt2_init(&s->gpt2, c, sizeof(floatX));
    model_init_training(&s->gpt2.model, NULL, g->n_leaves, 0, !FLOATX_IS_FLOAT);
    const SliceSink sink = model_stream_open(&stream, &s->gpt2.model, NULL, 0, &s->dev);
    tensors_load_into(&sink, &s->file.set, s->gpt2.model.table, N_PARAMETERS, "param.", NULL);
    model_stream_close(&stream);
    activations_init(&s->acts, c, g->B, g->T, TO_TRAIN, how);
}

static void subject_close(Subject* s) {
    model_free(&s->gpt2.model);
    activations_free(&s->acts);
    device_free(&s->dev);
    golden_close(&s->file);
}

static void subject_leaf(void* subject, const int* inputs, const int* targets, float dloss) {
    Subject* s = (Subject*)subject;
    s->acts.dropout = golden_dropout(&s->file, s->n_done++, s->gpt2.config.C);
    gpt2_leaf(&s->gpt2, &s->acts, inputs, targets, dloss, s->file.B, s->file.T, &s->dev);
}

// Exact builds: every bit. bf16 rounds every weight and activation to 2^-9, about ten in a row and some of them under sums
// that cancel. Odd's attention is far from uniform: rounding nothing but its weights to the nearest bf16 moves gradients by up
// to 0.028, and they are rounded with noise, whose error is sqrt(2) times as wide. Parameters: AdamW divides by the size of the
// gradient, and the bias of k, whose gradient is nothing but rounding since softmax does not see it, moves at full speed in
// directions of its own
static GoldenRun subject_run(Subject* s) {
    GoldenRun run = {s->gpt2.model.table, N_PARAMETERS, s->gpt2.model.n, &s->gpt2.model.dp, s->gpt2.model.w, &s->dev,
                     s, subject_leaf, NULL, NULL, "trained", GOLDEN_BITS, GOLDEN_BITS, GOLDEN_BITS};
    if (FAST_KERNELS) {
        const double sensitivity = strcmp(s->file.set.path, ODD) == 0 ? 4.0 : 1.0;
        run.numbers = FLOATX_IS_FLOAT ? 1e-5 : 1e-2 * sensitivity;
        run.gradients = FLOATX_IS_FLOAT ? 1e-4 : 3e-2 * sensitivity;
        run.parameters = 0.1;
    }
    return run;
}

static void check_training(Test* t, const char* path, Tradeoffs how, int graph) {
    Subject s;
    subject_open(&s, path, how);
    s.acts.graph.is_on = graph;
    const GoldenRun run = subject_run(&s);
    golden_check_training(t, &s.file, &run);
    subject_close(&s);
}

static Tradeoffs tradeoffs(int recompute, int gelu_fusion, int head_rows) {
    Tradeoffs how = {recompute, gelu_fusion, head_rows};
    return how;
}

static void test_base(Test* t) { check_training(t, BASE, tradeoffs(KEEP_ALL, 0, 8192), 0); }
static void test_dropout(Test* t) { check_training(t, DROPOUT, tradeoffs(KEEP_ALL, 0, 8192), 0); }
static void test_odd(Test* t) { check_training(t, ODD, tradeoffs(KEEP_ALL, 0, 8192), 0); }

// one update; what is left are the gradients of the second
static float* gradients_with(const char* path, Tradeoffs how, size_t* n, float* loss) {
    Subject s;
    subject_open(&s, path, how);
    const GoldenRun run = subject_run(&s);
    float norm, *grads = NULL;
    for (int step = 0; step < 2; step++) {
        grads = golden_gradients(&s.file, &run, step, loss, &norm);
        if (step < 1) { golden_update(&s.file, &run, step, grads, norm); }
    }
    *n = s.gpt2.model.n;
    float* host = (float*)malloc_check(sizeof(float) * *n, "gradients");
    device_download(host, grads, sizeof(float) * *n, &s.dev);
    subject_close(&s);
    return host;
}

// no level of --recompute and no --head-rows changes a bit, in any build
static void check_same(Test* t, const char* path, const Tradeoffs* first, const Tradeoffs* others, int n_others) {
    size_t n;
    float loss, other_loss, *grads = gradients_with(path, *first, &n, &loss);
    for (int i = 0; i < n_others; i++) {
        char what[64];
        float* other = gradients_with(path, others[i], &n, &other_loss);
        snprintf(what, sizeof what, "recompute %d, fusion %d, head rows %d", others[i].recompute, others[i].gelu_fusion, others[i].head_rows);
        check_bits(t, what, other, grads, n);
        check_bits(t, what, &other_loss, &loss, 1);
        free(other);
    }
    free(grads);
}

static void test_recompute(Test* t) {
    const Tradeoffs first = tradeoffs(KEEP_ALL, 0, 8192), fused = tradeoffs(KEEP_ALL, 1, 8192), fused_blocks = tradeoffs(RECOMPUTE_BLOCKS, 1, 8192);
    Tradeoffs others[3];
    for (int level = 1; level <= 3; level++) { others[level - 1] = tradeoffs(level, 0, 8192); }
    check_same(t, BASE, &first, others, 3);
    check_same(t, BASE, &fused, &fused_blocks, 1);
    check_same(t, DROPOUT, &first, others, 3);
}

// pieces change the order of bf16's sums over positions inside a tile, not the sums of the law
static void test_head_rows(Test* t) {
    const Tradeoffs first = tradeoffs(KEEP_ALL, 0, 8192), others[2] = {tradeoffs(KEEP_ALL, 0, 5), tradeoffs(KEEP_ALL, 0, 16)};
    if (FAST_KERNELS) { skip(t, "a promise of exact builds"); return; }
    check_same(t, ODD, &first, others, 2);
}

// the logits of one position, as generation reads them
static void position_logits(Subject* s, Activations* acts, int n, float* out) {
    const Config c = s->gpt2.config;
    ActivationTensors a = layer_activations(acts, 0);
    matmul_forward(a.logits, a.lnf + (size_t)n * c.C, layer_weights(&s->gpt2, 0).wte, (const floatX*)NULL, 1, c.C, c.Vp, &s->dev);
    floatx_download(out, a.logits, (size_t)c.Vp, &s->dev);
}

static void test_cache(Test* t) {
    Subject s;
    Activations cached;
    subject_open(&s, ODD, tradeoffs(KEEP_ALL, 0, 8192));
    const int T = s.file.T, V = s.gpt2.config.V, *tokens = golden_batch(&s.file, "inputs", 0, 0);
    float *found = filled_array((size_t)s.gpt2.config.Vp, NAN), *expected = filled_array((size_t)s.gpt2.config.Vp, NAN);
    activations_init(&cached, s.gpt2.config, 1, T, TO_GENERATE, s.acts.how);
    gpt2_forward(&s.gpt2, &s.acts, tokens, 1, T, 0, &s.dev);
    for (int t0 = 0, n = 3; t0 < T; t0 += n, n = 1) {  // three positions first, then one at a time
        gpt2_forward(&s.gpt2, &cached, tokens + t0, 1, t0 + n, t0, &s.dev);
        position_logits(&s, &cached, n - 1, found);
        position_logits(&s, &s.acts, t0 + n - 1, expected);
        const double tolerance = !FAST_KERNELS ? GOLDEN_BITS : FLOATX_IS_FLOAT ? 1e-5 : 2e-2;
        golden_compare(t, "logits", found, expected, (size_t)V, tolerance);
    }
    free(found);
    free(expected);
    activations_free(&cached);
    subject_close(&s);
}

// the same run twice
static void test_repeat(Test* t) {
    const Tradeoffs how = tradeoffs(KEEP_ALL, 0, 8192);
    check_same(t, BASE, &how, &how, 1);
}

// ---- --graph ----

enum { GRAPH_STEPS = 4 };

// what training leaves behind, and how it got there
typedef struct {
    float losses[GRAPH_STEPS], *params;
    size_t n, n_nodes;
    int64_t n_launched;   // leaves that were a graph
    uint64_t n_submitted; // under dev/simt: what the host gave the device to do in all
} Trained;

// after the first update, as generation or a validation may
static void outgrow_workspace(void* subject) {
    Subject* s = (Subject*)subject;
    if (s->n_done == s->file.n_leaves) { device_workspace(&s->dev, 2 * s->dev.workspace->n_bytes + 1); }
}

static Trained trained_with(const char* path, int graph, void (*updated)(void* subject)) {
    Subject s;
    Trained x;
    subject_open(&s, path, tradeoffs(KEEP_ALL, 0, 8192));
    s.acts.graph.is_on = graph;
    GoldenRun run = subject_run(&s);
    run.updated = updated;
#ifdef SIMT
    x.n_submitted = simt_n_submitted;
#endif
    x.params = golden_trained(&s.file, &run, GRAPH_STEPS, x.losses);
#ifdef SIMT
    x.n_submitted = simt_n_submitted - x.n_submitted;
#endif
    x.n = run.n, x.n_nodes = s.acts.graph.n_nodes, x.n_launched = s.acts.graph.n_launched;
    subject_close(&s);
    return x;
}

// n_launched: of the leaves in GRAPH_STEPS updates, so many are not the first of their kind
static void check_graph(Test* t, const char* path, void (*updated)(void* subject), int64_t n_launched) {
    Trained plain = trained_with(path, 0, updated), graph = trained_with(path, 1, updated);
    check_bits(t, "losses", graph.losses, plain.losses, GRAPH_STEPS);
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

static void test_graph(Test* t) {
    check_graph(t, BASE, NULL, 3);  // one leaf an update
    check_graph(t, BASE, outgrow_workspace, 2);
    check_graph(t, ODD, NULL, 6);   // three in two places; updates of 91, 106, 104 and 104 targets are three scales
    check_training(t, BASE, tradeoffs(RECOMPUTE_BLOCKS, 0, 8192), 1);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden base", "gradients, loss, norm, parameters after 1 and 10 updates", test_base},
        {"golden odd", "three leaves, clipped, cosine schedule, a leaf without targets, head size 11", test_odd},
        {"golden dropout", "the same with 30% of the elements left out, others in each leaf", test_dropout},
        {"recompute", "levels 0 to 3 give the same bits", test_recompute},
        {"head rows", "logits in pieces give the same bits", test_head_rows},
        {"key-value cache", "cached logits equal those of the whole sequence", test_cache},
        {"graph", "--graph 1: losses and parameters to the last bit, and each leaf is one launch", test_graph},
        {"repeat", "the same inputs give the same bits again", test_repeat},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
