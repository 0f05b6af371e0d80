/*
train_gpt2.cu against the files that dev/ref/gpt2.py, an independent NumPy program, has written: the same promises for the file
as C, as exact CUDA (bit for bit) and as bf16 CUDA (within a tolerance), on a GPU or under dev/simt.
*/
#define TESTING
#include "train_gpt2.cu"
#undef main
#include "llmc/test/test.h"

static const char* const BASE = "dev/golden/gpt2_base.safetensors";
static const char* const ODD = "dev/golden/gpt2_odd.safetensors";  // 3 leaves, clip, cosine, masked targets, head size 11

typedef struct {
    SafeSet set;
    json_t* config;
    GPT2 model;
    Activations acts;
    Device dev;
    int B, T, n_leaves;
} Golden;

static int golden_int(const Golden* g, const char* key) { return (int)json_need_int(g->config, g->set.path, key, 0, 1 << 24); }
static float golden_float(const Golden* g, const char* key) { return (float)json_number_value(json_object_get(g->config, key)); }

static const void* golden_data(const Golden* g, const char* name) {
    const SafeTensor* t = safetensors_find(g->set.files, name);
    if (!t) { fail_run("%s: tensor %s is missing: make golden", g->set.path, name); }
    return t->data;
}

static const int* golden_batch(const Golden* g, const char* name, int step, int leaf) {
    return (const int*)golden_data(g, name) + ((size_t)step * g->n_leaves + leaf) * g->B * g->T;
}

// the tensors with this prefix as an arena on the host
static float* golden_arena(Golden* g, const char* prefix) {
    float* arena = (float*)arena_alloc(sizeof(float) * g->model.n, prefix);
    tensors_load(&g->set, g->model.table, N_PARAMETERS, prefix, arena);
    return arena;
}

static void golden_open(Golden* g, const char* path, Tradeoffs how) {
    memset(g, 0, sizeof *g);
    safeset_open(&g->set, path);
    g->config = json_loads(safetensors_meta(g->set.files, "config"), 0, NULL);
    Config c = config_make(golden_int(g, "n_positions"), golden_int(g, "vocab_size"), golden_int(g, "n_layer"), golden_int(g, "n_head"),
                           golden_int(g, "n_embd"));
    g->B = golden_int(g, "batch");
    g->T = golden_int(g, "seq_len");
    g->n_leaves = golden_int(g, "leaves");
    device_choose(0);
    device_init(&g->dev, 2);
    gpt2_init(&g->model, c);
    float* params = golden_arena(g, "param.");
    gpt2_store(&g->model, params, 0, &g->dev);
    gpt2_init_training(&g->model, NULL, g->n_leaves, 0, 1, params, &g->dev);
    activations_init(&g->acts, c, g->B, g->T, TO_TRAIN, how);
    arena_free(params, sizeof(float) * g->model.n);
}

static void golden_close(Golden* g) {
    gpt2_free(&g->model);
    activations_free(&g->acts);
    device_free(&g->dev);
    json_decref(g->config);
    safeset_close(&g->set);
}

// |a - b| / |b|
static double relative_distance(const float* a, const float* b, size_t n) {
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return size > 0.0 ? sqrt(difference / size) : difference > 0.0;
}

// exact: every bit. Else the relative distance of each tensor
static void check_arena(Test* t, Golden* g, const char* prefix, const float* found, double tolerance) {
    float* expected = golden_arena(g, prefix);
    for (int i = 0; i < N_PARAMETERS; i++) {
        const Tensor* p = &g->model.table[i];
        const float *a = found + p->offset, *b = expected + p->offset;
        char what[NAME_BYTES];
        snprintf(what, sizeof what, "%s: %s%s", g->set.path, prefix, p->name);
        if (!FAST_KERNELS) { check_bits(t, what, a, b, tensor_elements(p)); continue; }
        double distance = relative_distance(a, b, tensor_elements(p));
        check(t, distance < tolerance, "%s: relative distance %.2g, expected below %g", what, distance, tolerance);
    }
    arena_free(expected, sizeof(float) * g->model.n);
}

// How much wider bounds for bf16 are. Odd's attention is far from uniform: rounding nothing but its weights to the nearest bf16
// moves gradients by up to 0.028, and they are rounded with noise, whose error is sqrt(2) times as wide
static double sensitivity(const Golden* g) { return strcmp(g->set.path, ODD) == 0 ? 4.0 : 1.0; }

// bf16 rounds every weight and activation to 2^-9, about ten in a row and some of them under sums that cancel
static void check_gradients(Test* t, Golden* g, const char* prefix, const float* grads) {
    float* found = (float*)arena_alloc(sizeof(float) * g->model.n, "found");
    device_download(found, grads, sizeof(float) * g->model.n, &g->dev);
    check_arena(t, g, prefix, found, FLOATX_IS_FLOAT ? 1e-4 : 3e-2 * sensitivity(g));
    arena_free(found, sizeof(float) * g->model.n);
}

// The masters where there are some. AdamW divides by the size of the gradient: the bias of k, whose gradient is nothing but
// rounding since softmax does not see it, moves at full speed in directions of its own
static void check_parameters(Test* t, Golden* g, const char* prefix) {
    float* found = download_parameters(&g->model, &g->dev);
    check_arena(t, g, prefix, found, 0.1);
    arena_free(found, sizeof(float) * g->model.n);
}

static void check_number(Test* t, const Golden* g, const char* what, float found, float expected) {
    if (!FAST_KERNELS) { check_bits(t, what, &found, &expected, 1); return; }
    double tolerance = FLOATX_IS_FLOAT ? 1e-5 : 1e-2 * sensitivity(g);
    check(t, fabs((double)found / (double)expected - 1.0) < tolerance, "%s: found %.6g, expected %.6g", what, (double)found, (double)expected);
}

static float* golden_gradients(Golden* g, int step, float* loss, float* norm) {
    const int* targets = golden_batch(g, "targets", step, 0);
    const int N = g->B * g->T;
    int counted = 0;
    for (int n = 0; n < g->n_leaves * N; n++) { counted += targets[n] >= 0; }
    for (int leaf = 0; leaf < g->n_leaves; leaf++) {
        gpt2_leaf(&g->model, &g->acts, golden_batch(g, "inputs", step, leaf), targets + (size_t)leaf * N, 1.0f / (float)counted, g->B, g->T, &g->dev);
    }
    float loss_sum, *grads = dp_reduce(&g->model.dp, &loss_sum, &g->dev);
    *loss = loss_sum / (float)counted;
    *norm = dp_norm(&g->model.dp, grads, &g->dev);
    return grads;
}

static void golden_update(Golden* g, int step, const float* grads, float norm) {
    Schedule schedule = (Schedule)choice_find(SCHEDULE_NAMES, json_string_value(json_object_get(g->config, "schedule")));
    const int n_steps = golden_int(g, "steps");
    float lr = schedule_lr(schedule, step, n_steps, golden_int(g, "warmup"), (double)golden_float(g, "lr"), (double)golden_float(g, "final_lr"));
    Optimizer o = {lr, golden_float(g, "beta1"), golden_float(g, "beta2"), golden_float(g, "eps"), golden_float(g, "weight_decay"),
                   golden_float(g, "clip"), 0, NULL, NULL};
    const Weights w = gpt2_weights(&g->model);
    dp_update(&g->model.dp, &w, grads, norm, &o, step + 1, &g->dev);
}

static void check_training(Test* t, const char* path, Tradeoffs how) {
    Golden g;
    golden_open(&g, path, how);
    const float *losses = (const float*)golden_data(&g, "loss"), *norms = (const float*)golden_data(&g, "norm");
    const int n_steps = golden_int(&g, "steps");
    for (int step = 0; step < n_steps; step++) {
        float loss, norm, *grads = golden_gradients(&g, step, &loss, &norm);
        check_number(t, &g, "loss", loss, losses[step]);
        check_number(t, &g, "norm", norm, norms[step]);
        if (step == 0) { check_gradients(t, &g, "grad.", grads); }
        golden_update(&g, step, grads, norm);
        if (step == 0) { check_parameters(t, &g, "step1."); }
    }
    check_parameters(t, &g, "step10.");
    golden_close(&g);
}

static Tradeoffs tradeoffs(int recompute, int gelu_fusion, int head_rows) {
    Tradeoffs how = {recompute, gelu_fusion, head_rows};
    return how;
}

static void test_base(Test* t) { check_training(t, BASE, tradeoffs(KEEP_ALL, 0, 8192)); }
static void test_odd(Test* t) { check_training(t, ODD, tradeoffs(KEEP_ALL, 0, 8192)); }

// one update; what is left are the gradients of the second
static float* gradients_with(const char* path, Tradeoffs how, size_t* n, float* loss) {
    Golden g;
    golden_open(&g, path, how);
    float norm, *grads = NULL;
    for (int step = 0; step < 2; step++) {
        grads = golden_gradients(&g, step, loss, &norm);
        if (step < 1) { golden_update(&g, step, grads, norm); }
    }
    *n = g.model.n;
    float* host = (float*)malloc_check(sizeof(float) * *n, "gradients");
    device_download(host, grads, sizeof(float) * *n, &g.dev);
    golden_close(&g);
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
}

// pieces change the order of bf16's sums over positions inside a tile, not the sums of the law
static void test_head_rows(Test* t) {
    const Tradeoffs first = tradeoffs(KEEP_ALL, 0, 8192), others[2] = {tradeoffs(KEEP_ALL, 0, 5), tradeoffs(KEEP_ALL, 0, 16)};
    if (FAST_KERNELS) { skip(t, "a promise of exact builds"); return; }
    check_same(t, ODD, &first, others, 2);
}

// the logits of one position, as generation reads them
static void position_logits(Golden* g, Activations* acts, int n, float* out) {
    const Config c = g->model.config;
    ActivationTensors a = layer_activations(acts, 0);
    matmul_forward(a.logits, a.lnf + (size_t)n * c.C, layer_weights(&g->model, 0).wte, (const floatX*)NULL, 1, c.C, c.Vp, &g->dev);
    floatx_download(out, a.logits, (size_t)c.Vp, &g->dev);
}

static void test_cache(Test* t) {
    Golden g;
    Activations cached;
    golden_open(&g, ODD, tradeoffs(KEEP_ALL, 0, 8192));
    const int T = g.T, V = g.model.config.V, *tokens = golden_batch(&g, "inputs", 0, 0);
    float *found = filled_array((size_t)g.model.config.Vp, NAN), *expected = filled_array((size_t)g.model.config.Vp, NAN);
    activations_init(&cached, g.model.config, 1, T, TO_GENERATE, g.acts.how);
    gpt2_forward(&g.model, &g.acts, tokens, 1, T, 0, &g.dev);
    for (int t0 = 0, n = 3; t0 < T; t0 += n, n = 1) {  // three positions first, then one at a time
        gpt2_forward(&g.model, &cached, tokens + t0, 1, t0 + n, t0, &g.dev);
        position_logits(&g, &cached, n - 1, found);
        position_logits(&g, &g.acts, t0 + n - 1, expected);
        if (!FAST_KERNELS) { check_bits(t, "logits", found, expected, (size_t)V); continue; }
        double distance = relative_distance(found, expected, (size_t)V), tolerance = FLOATX_IS_FLOAT ? 1e-5 : 2e-2;
        check(t, distance < tolerance, "logits at %d: relative distance %.2g", t0 + n - 1, distance);
    }
    free(found);
    free(expected);
    activations_free(&cached);
    golden_close(&g);
}

// the same run twice
static void test_repeat(Test* t) {
    const Tradeoffs how = tradeoffs(KEEP_ALL, 0, 8192);
    check_same(t, BASE, &how, &how, 1);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden base", "gradients, loss, norm, parameters after 1 and 10 updates", test_base},
        {"golden odd", "three leaves, clipped, cosine schedule, a leaf without targets, head size 11", test_odd},
        {"recompute", "levels 0 to 3 give the same bits", test_recompute},
        {"head rows", "logits in pieces give the same bits", test_head_rows},
        {"key-value cache", "cached logits equal those of the whole sequence", test_cache},
        {"repeat", "the same inputs give the same bits again", test_repeat},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
