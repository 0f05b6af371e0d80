/*
train_moe.cu against the files that dev/ref/moe.py, an independent NumPy program, has written: activations, choices of the
routers, losses, norms, gradients, and the parameters after 1 and 10 updates. As C and as exact CUDA to the last bit, as
bf16 CUDA within a tolerance.
*/
#define TESTING
#include "train_moe.cu"
#include "llmc/test/golden.h"  // Golden, golden_check_training
#include "llmc/test/test.h"

static const char* const BASE = "dev/golden/moe_base.safetensors";  // one key/value head, ties, an expert without rows
static const char* const ODD = "dev/golden/moe_odd.safetensors";    // 3 of 5 experts, NTK, tied head, z-loss, 3 leaves
static const char* const BIAS = "dev/golden/moe_bias.safetensors";  // one expert a token, balanced by biases

typedef struct {
    Golden file;
    Moe moe;
    Activations acts;
    Device dev;
    char how[32];
} Subject;

static Config golden_config(const Golden* g) {
    Config c = config_make(golden_int(g, "max_position_embeddings"), golden_int(g, "vocab_size"),
                           golden_int(g, "num_hidden_layers"), golden_int(g, "hidden_size"),
                           golden_int(g, "num_attention_heads"), golden_int(g, "num_key_value_heads"),
                           golden_int(g, "head_dim"), golden_int(g, "num_local_experts"),
                           golden_int(g, "num_experts_per_tok"), golden_int(g, "intermediate_size"));
    c.tied = json_is_true(json_object_get(g->config, "tie_word_embeddings"));
    c.eps = golden_float(g, "rms_norm_eps");
    c.rope_base = (double)golden_float(g, "rope_base");
    c.rope_alpha = (double)golden_float(g, "rope_alpha");
    c.balance = choice_find(BALANCE_NAMES, json_string_value(json_object_get(g->config, "balance")));
    c.aux_alpha = golden_float(g, "aux_alpha");
    c.z_lambda = golden_float(g, "z_lambda");
    return c;
}

static void subject_open(Subject* s, const char* path, int n_threads, Tradeoffs how) {
    const Golden* g = &s->file;
    ModelStream stream;
    memset(s, 0, sizeof *s);
    golden_open(&s->file, path);
    device_choose(0);
    device_init(&s->dev, n_threads);
    moe_layout(&s->moe, golden_config(g));
    Model* m = &s->moe.model;
    model_init(m, sizeof(floatX));
    model_init_training(m, NULL, g->n_leaves, 0, !FLOATX_IS_FLOAT);
    const SliceSink sink = model_stream_open(&stream, m, NULL, 0, &s->dev);
    tensors_load_into(&sink, &s->file.set, m->table, m->n_table, "param.", NULL);
    model_stream_close(&stream);
    activations_init(&s->acts, s->moe.config, &m->ranks, g->B, g->T, TO_TRAIN, how, &s->dev);
    snprintf(s->how, sizeof s->how, "%d threads, recompute %d", n_threads, how.recompute);
}

static void subject_close(Subject* s) {
    model_free(&s->moe.model);
    activations_free(&s->acts);
    device_free(&s->dev);
    golden_close(&s->file);
}

static void subject_leaf(void* subject, const int* inputs, const int* targets, float dloss) {
    Subject* s = (Subject*)subject;
    moe_leaf(&s->moe, &s->acts, inputs, targets, dloss, s->file.B, s->file.T, &s->dev);
}

static void subject_updated(void* subject) {
    Subject* s = (Subject*)subject;
    if (s->moe.config.balance == BALANCE_BIAS) {
        moe_balance_biases(&s->moe, golden_float(&s->file, "bias_rate"), &s->dev);
    }
}

static float subject_more_loss(void* subject) {
    const Moe* moe = &((Subject*)subject)->moe;
    const Routing now = moe_routing(moe);
    return routing_loss(&moe->config, &now);
}

// Exact builds: every bit. bf16 rounds every weight and activation to 2^-9, and where two experts are nearly as good the
// rounding decides: that token's gradient then goes through another expert, and gradients are no longer near. Only odd,
// whose tokens take three of five, has so few such tokens that gradients can be compared
static GoldenRun subject_run(Subject* s) {
    const Model* m = &s->moe.model;
    GoldenRun run = {m->table, m->n_table, m->n, &s->moe.model.dp, m->w, &s->dev, s, subject_leaf, subject_updated,
                     subject_more_loss, s->how, GOLDEN_BITS, GOLDEN_BITS, GOLDEN_BITS};
    if (FAST_KERNELS) {
        run.numbers = FLOATX_IS_FLOAT ? 1e-5 : 3e-2;
        run.gradients = FLOATX_IS_FLOAT ? 1e-4 : 6e-2;
        run.parameters = FLOATX_IS_FLOAT ? 1e-2 : 0.3;
    }
    return run;
}

static Tradeoffs tradeoffs(int recompute, int head_rows) {
    Tradeoffs how = {recompute, head_rows, {1, 0.0f}};
    return how;
}

// ---- activations and choices of the first leaf ----

// kernels that round otherwise may choose otherwise for a few tokens
static void check_experts(Test* t, const Subject* s) {
    const Config* c = &s->moe.config;
    const size_t n = (size_t)s->file.B * s->file.T * c->k;
    int* found = (int*)new_array(n, sizeof(int));
    const int* expected = (const int*)golden_tensor(&s->file, "act.experts", DTYPE_I32)->data;
    for (int l = 0; l < c->L; l++) {
        size_t n_others = 0;
        device_download(found, layer_experts(&s->acts, l), sizeof(int) * n, &s->dev);
        for (size_t i = 0; i < n; i++) { n_others += found[i] != expected[n * (size_t)l + i]; }
        check(t, n_others <= (FAST_KERNELS ? n / 6 : 0), "layer %d: %zu of %zu chosen experts are others, %s", l, n_others,
              n, s->how);
    }
    free(found);
}

static float* on_host(const TensorArena* arena, const Device* dev) {
    float* host = (float*)new_array(arena->n, sizeof(float));
    device_download(host, arena->memory, sizeof(float) * arena->n, dev);
    return host;
}

static void check_forward(Test* t, const char* path, int n_threads) {
    Subject s;
    subject_open(&s, path, n_threads, tradeoffs(KEEP_ALL, 8192));
    moe_forward(&s.moe, &s.acts, golden_batch(&s.file, "inputs", 0, 0), s.file.B, s.file.T, 0, &s.dev);
    moe_head(&s.moe, &s.acts, 0, NULL, golden_batch(&s.file, "targets", 0, 0), 0.0f, s.file.B * s.file.T, &s.dev);
    check_experts(t, &s);
    if (!FAST_KERNELS) {
        float *tensors = on_host(&s.acts.tensors, &s.dev), *statistics = on_host(&s.acts.statistics, &s.dev);
        golden_check_activations(t, &s.file, s.acts.tensors.table, s.acts.tensors.n_table, tensors, 13);
        golden_check_activations(t, &s.file, s.acts.statistics.table, s.acts.statistics.n_table, statistics,
                                 10);
        free(tensors), free(statistics);
    }
    subject_close(&s);
}

static void check_training(Test* t, const char* path, int n_threads, Tradeoffs how, int graph) {
    Subject s;
    subject_open(&s, path, n_threads, how);
    s.acts.graph.is_on = graph;
    const GoldenRun run = subject_run(&s);
    golden_check_training(t, &s.file, &run);
    subject_close(&s);
}

// every number of threads; kernels, which take their time on a CPU, once
// of base even the ties are gone: parameters are rounded with noise
static void check_golden(Test* t, const char* path, int trains) {
    const int is_bf16 = FAST_KERNELS && !FLOATX_IS_FLOAT;
    if (is_bf16 && (strcmp(path, BASE) == 0 || (trains && strcmp(path, BIAS) == 0))) {
        skip(t, "bf16: choices that hang on its rounding");
        return;
    }
    for (int i = 0; i < N_TEST_THREADS; i++) {
        if (trains) { check_training(t, path, test_threads(i), tradeoffs(RECOMPUTE_NORMS, 8192), 0); }
        else { check_forward(t, path, test_threads(i)); }
    }
}

static void test_base_forward(Test* t) { check_golden(t, BASE, 0); }
static void test_odd_forward(Test* t) { check_golden(t, ODD, 0); }
static void test_bias_forward(Test* t) { check_golden(t, BIAS, 0); }
static void test_base(Test* t) { check_golden(t, BASE, 1); }
static void test_odd(Test* t) { check_golden(t, ODD, 1); }
static void test_bias(Test* t) { check_golden(t, BIAS, 1); }

// ---- what must change no bit ----

// losses and gradients of the second update
static float* gradients_with(const char* path, Tradeoffs how, size_t* n, float* loss) {
    Subject s;
    subject_open(&s, path, 2, how);
    const GoldenRun run = subject_run(&s);
    float norm, *grads = NULL;
    for (int step = 0; step < 2; step++) {
        grads = golden_gradients(&s.file, &run, step, loss, &norm);
        if (step < 1) { golden_update(&s.file, &run, step, grads, norm); }
    }
    *n = s.moe.model.n;
    float* host = (float*)new_array(*n, sizeof(float));
    device_download(host, grads, sizeof(float) * *n, &s.dev);
    subject_close(&s);
    return host;
}

static void test_recompute(Test* t) {
    const char* const paths[] = {BASE, ODD, BIAS};
    const Tradeoffs others[] = {tradeoffs(RECOMPUTE_NORMS, 8192), tradeoffs(RECOMPUTE_EXPERTS, 8192),
                                tradeoffs(RECOMPUTE_BLOCKS, 8192), tradeoffs(RECOMPUTE_BLOCKS, 5)};
    for (int f = 0; f < 3; f++) {
        size_t n;
        float loss, other_loss, *grads = gradients_with(paths[f], tradeoffs(KEEP_ALL, 8192), &n, &loss);
        for (int i = 0; i < (FAST_KERNELS && !FLOATX_IS_FLOAT ? 3 : 4); i++) {  // head rows: other roundings of bf16
            char what[64];
            float* other = gradients_with(paths[f], others[i], &n, &other_loss);
            snprintf(what, sizeof what, "recompute %d, head rows %d", others[i].recompute, others[i].head_rows);
            check_bits(t, what, other, grads, n);
            check_bits(t, what, &other_loss, &loss, 1);
            free(other);
        }
        free(grads);
    }
}

// the logits of position n, on the host
static float* position_logits(const Subject* s, Activations* acts, int n) {
    const Config* c = &s->moe.config;
    ActivationTensors a = layer_activations(acts, 0);
    float* host = (float*)new_array((size_t)c->Vp, sizeof(float));
    linear_forward(a.logits, a.norm + (size_t)n * c->D, output_weight(&s->moe), NULL, 1, c->D, c->Vp, &s->dev);
    floatx_download(host, a.logits, (size_t)c->Vp, &s->dev);
    return host;
}

// position by position, as text is generated, against the whole sequence at once
static void test_cache(Test* t) {
    Subject s;
    Activations cached;
    subject_open(&s, ODD, 2, tradeoffs(KEEP_ALL, 8192));
    const int T = s.file.T, *tokens = golden_batch(&s.file, "inputs", 0, 0);
    activations_init(&cached, s.moe.config, &s.moe.model.ranks, 1, T, TO_GENERATE, tradeoffs(KEEP_ALL, 8192), &s.dev);
    moe_forward(&s.moe, &s.acts, tokens, 1, T, 0, &s.dev);
    for (int t0 = 0, n = 3; t0 < T; t0 += n, n = 1) {  // three positions first, then one at a time
        moe_forward(&s.moe, &cached, tokens + t0, 1, t0 + n, t0, &s.dev);
        float *found = position_logits(&s, &cached, n - 1), *whole = position_logits(&s, &s.acts, t0 + n - 1);
        golden_compare(t, "logits", found, whole, (size_t)s.moe.config.V, FAST_KERNELS ? 3e-2 : GOLDEN_BITS);
        free(found), free(whole);
    }
    activations_free(&cached);
    subject_close(&s);
}

// The same beyond one tile of keys, with sizes that few_rows.h and split_attention.h take. Of random weights; a token
// takes all experts, so no rounding chooses others
static void test_long_cache(Test* t) {
    enum { T = 70, PROMPT = 66, V = 40 };
    Subject s;
    Activations cached;
    ModelStream stream;
    int tokens[T];
    memset(&s, 0, sizeof s);
    device_choose(0);
    device_init(&s.dev, 2);
    moe_layout(&s.moe, config_make(256, V, 2, 32, 4, 1, 16, 3, 3, 24));
    model_init(&s.moe.model, sizeof(floatX));
    const SliceSink sink = model_stream_open(&stream, &s.moe.model, NULL, 0, &s.dev);
    for (int i = 0; i < s.moe.model.n_table; i++) { s.moe.model.table[i].std *= 10.0f; }  // so that all parts weigh
    tensors_init_into(&sink, s.moe.model.table, s.moe.model.n_table, 7);
    model_stream_close(&stream);
    activations_init(&s.acts, s.moe.config, &s.moe.model.ranks, 1, T, TO_GENERATE, tradeoffs(KEEP_ALL, 8192), &s.dev);
    activations_init(&cached, s.moe.config, &s.moe.model.ranks, 1, T, TO_GENERATE, tradeoffs(KEEP_ALL, 8192), &s.dev);
    for (int i = 0; i < T; i++) { tokens[i] = (int)(splitmix64(3, (uint64_t)i) % V); }
    moe_forward(&s.moe, &s.acts, tokens, 1, T, 0, &s.dev);
    for (int t0 = 0, n = PROMPT; t0 < T; t0 += n, n = 1) {
        moe_forward(&s.moe, &cached, tokens + t0, 1, t0 + n, t0, &s.dev);
        float *found = position_logits(&s, &cached, n - 1), *whole = position_logits(&s, &s.acts, t0 + n - 1);
        golden_compare(t, "logits", found, whole, V, FAST_KERNELS ? 3e-2 : GOLDEN_BITS);
        free(found), free(whole);
    }
    activations_free(&cached), activations_free(&s.acts);
    model_free(&s.moe.model);
    device_free(&s.dev);
}

// --doc-reset: a row of three documents against each of them alone
static void test_documents(Test* t) {
    Subject s;
    subject_open(&s, BASE, 3, tradeoffs(KEEP_ALL, 8192));
    const int T = s.file.T, V = s.moe.config.V, starts[] = {0, 3, 5, T};
    int* tokens = (int*)memcpy(new_array((size_t)T, sizeof(int)), golden_batch(&s.file, "inputs", 0, 0),
                               sizeof(int) * (size_t)T);
    float* packed[3];
    for (int i = 0; i < T; i++) { tokens[i] = i == 3 || i == 5 ? V - 1 : tokens[i] % (V - 1); }
    s.acts.segments.document_start = V - 1;
    moe_forward(&s.moe, &s.acts, tokens, 1, T, 0, &s.dev);
    check(t, s.acts.segments.n == 3, "expected 3 documents, found %d", s.acts.segments.n);
    for (int i = 0; i < 3; i++) { packed[i] = position_logits(&s, &s.acts, starts[i + 1] - 1); }
    for (int i = 0; i < 3; i++) {
        const int n = starts[i + 1] - starts[i];
        moe_forward(&s.moe, &s.acts, tokens + starts[i], 1, n, 0, &s.dev);
        float* alone = position_logits(&s, &s.acts, n - 1);
        golden_compare(t, "logits", packed[i], alone, (size_t)V, FAST_KERNELS ? 3e-2 : GOLDEN_BITS);
        free(alone), free(packed[i]);
    }
    free(tokens);
    subject_close(&s);
}

// routers with huge logits, whose squares overflow
static void test_switched_off(Test* t) {
    Config c = config_preset("tiny", 257);
    const Routing now = {2.0f, INFINITY, 1.0f, 0};
    c.aux_alpha = 0.25f;
    check(t, routing_loss(&c, &now) == 0.5f, "without z-loss the routers add %g", (double)routing_loss(&c, &now));
    c.z_lambda = 0.5f;
    check(t, isinf(routing_loss(&c, &now)), "with it they add %g", (double)routing_loss(&c, &now));
}

// spec 2: the parameters of the large model, all and those that a token uses
static void test_counts(Test* t) {
    Moe moe;
    memset(&moe, 0, sizeof moe);
    moe_layout(&moe, config_preset("6.9b", 32000));
    size_t all = 0, active = 0;
    for (int i = 0; i < moe.model.n_table; i++) {
        const Tensor* x = &moe.model.table[i];
        const size_t n = tensors_disk_count(x, 1);
        all += n;
        active += x->experts > 0 ? n / (size_t)x->experts * (size_t)moe.config.k : n;
    }
    check(t, all == 6882678528ull && active == 1786599168ull, "%zu parameters, %zu active", all, active);
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

static Trained trained_with(const char* path, int graph) {
    Subject s;
    Trained x;
    subject_open(&s, path, 2, tradeoffs(RECOMPUTE_NORMS, 8192));
    s.acts.graph.is_on = graph;
    const GoldenRun run = subject_run(&s);
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
static void check_graph(Test* t, const char* path, int64_t n_launched) {
    Trained plain = trained_with(path, 0), graph = trained_with(path, 1);
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
    check_graph(t, ODD, 4);   // three leaves an update in two places; as many scales as updates
    check_graph(t, BIAS, 6);  // two leaves in two places
    if (!FAST_KERNELS) { check_training(t, BIAS, 2, tradeoffs(RECOMPUTE_EXPERTS, 8192), 1); }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden base, forward", "activations and chosen experts: MQA, two of four experts, ties", test_base_forward},
        {"golden odd, forward", "three of five experts, NTK, head size 10, tied head", test_odd_forward},
        {"golden bias, forward", "one expert a token, chosen with a bias", test_bias_forward},
        {"golden base", "gradients, losses, norms, parameters after 1 and 10 updates", test_base},
        {"golden odd", "three leaves, z-loss, targets that do not count", test_odd},
        {"golden bias", "biases follow the counts of all leaves", test_bias},
        {"recompute", "no level and no --head-rows changes a bit", test_recompute},
        {"key-value cache", "cached logits equal those of the whole sequence", test_cache},
        {"long cache", "the same of 70 positions, the last ones each alone", test_long_cache},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"losses switched off", "a z-loss whose weight is 0 adds nothing, though it is infinite", test_switched_off},
        {"graph", "--graph 1: losses and parameters to the last bit, and each leaf is one launch", test_graph},
        {"counts", "6.9 billion parameters, 1.8 billion active", test_counts},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
