/*
train_gpt2.c against the files that dev/ref/gpt2.py, an independent NumPy program, has written: every activation, loss, norm,
gradient, and the parameters after 1 and 10 updates, to the last bit, with 1, 2, 3 and 7 threads.
*/
#define TESTING
#include "train_gpt2.c"
#undef main
#include "llmc/test/test.h"

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

static const SafeTensor* golden_tensor(const Golden* g, const char* name) {
    const SafeTensor* t = safetensors_find(g->set.files, name);
    if (!t) { fail_run("%s: tensor %s is missing: make golden", g->set.path, name); }
    return t;
}

static const int* golden_batch(const Golden* g, const char* name, int step, int leaf) {
    return (const int*)golden_tensor(g, name)->data + ((size_t)step * g->n_leaves + leaf) * g->B * g->T;
}

// the whole tensor as floats on the heap
static float* golden_floats(const Golden* g, const char* name) {
    const SafeTensor* t = golden_tensor(g, name);
    float* x = (float*)malloc_check(t->n_bytes, name);
    memcpy(x, t->data, t->n_bytes);
    return x;
}

static void golden_open(Golden* g, const char* path, int n_threads) {
    memset(g, 0, sizeof *g);
    safeset_open(&g->set, path);
    g->config = json_loads(safetensors_meta(g->set.files, "config"), 0, NULL);
    Config c = config_make(golden_int(g, "n_positions"), golden_int(g, "vocab_size"), golden_int(g, "n_layer"), golden_int(g, "n_head"),
                           golden_int(g, "n_embd"));
    g->B = golden_int(g, "batch");
    g->T = golden_int(g, "seq_len");
    g->n_leaves = golden_int(g, "leaves");
    gpt2_init(&g->model, c);
    gpt2_init_training(&g->model, NULL, g->n_leaves, 0);
    tensors_load(&g->set, g->model.table, N_PARAMETERS, "param.", g->model.params);
    activations_init(&g->acts, c, g->B, g->T, TO_TRAIN);
    device_init(&g->dev, n_threads);
}

static void golden_close(Golden* g) {
    gpt2_free(&g->model);
    activations_free(&g->acts);
    device_free(&g->dev);
    json_decref(g->config);
    safeset_close(&g->set);
}

// every parameter-shaped tensor with this prefix equals the arena
static void check_arena(Test* t, Golden* g, const char* prefix, const float* arena) {
    float* expected = (float*)arena_alloc(sizeof(float) * g->model.n, prefix);
    tensors_load(&g->set, g->model.table, N_PARAMETERS, prefix, expected);
    for (int i = 0; i < N_PARAMETERS; i++) {
        const Tensor* p = &g->model.table[i];
        char what[NAME_BYTES];
        snprintf(what, sizeof what, "%s: %s%s, %d threads", g->set.path, prefix, p->name, g->dev.n_threads);
        check_bits(t, what, arena + p->offset, expected + p->offset, tensor_elements(p));
    }
    arena_free(expected, sizeof(float) * g->model.n);
}

// columns first..V-1 of the padded rows
static void check_rows(Test* t, const Golden* g, const char* name, const float* rows) {
    const Config c = g->model.config;
    float* expected = golden_floats(g, name);
    for (size_t n = 0; n < (size_t)g->B * g->T; n++) { check_bits(t, name, rows + n * c.Vp, expected + n * c.V, (size_t)c.V); }
    free(expected);
}

// those the trainer keeps, by the names of its own table
static void check_activations(Test* t, const Golden* g) {
    int n_found = 0;
    for (int i = 0; i < N_ACTIVATIONS; i++) {
        const Tensor* a = &g->acts.table[i];
        char name[NAME_BYTES];
        snprintf(name, sizeof name, "act.%s", a->name);
        if (!safetensors_find(g->set.files, name) || strcmp(a->name, "logits") == 0) { continue; }
        float* expected = golden_floats(g, name);
        check(t, golden_tensor(g, name)->n == tensor_elements(a), "%s: another shape", name);
        check_bits(t, name, g->acts.arena + a->offset, expected, tensor_elements(a));
        free(expected);
        n_found++;
    }
    check(t, n_found == 17, "expected 17 activations in %s, found %d", g->set.path, n_found);
}

// those it does not keep: scores and weights of attention, and the two projections before they join the stream
static void check_attention(Test* t, const Golden* g) {
    const Config c = g->model.config;
    const int N = g->B * g->T, T = g->T;
    size_t n_weights = (size_t)N * c.NH * T;
    float *preatt = golden_floats(g, "act.preatt"), *att = golden_floats(g, "act.att"), *attproj = golden_floats(g, "act.attproj"),
          *fcproj = golden_floats(g, "act.fcproj"), *found = (float*)malloc_check(sizeof(float) * (2 * n_weights + 3 * (size_t)N * c.C), "found");
    float *found_att = found + n_weights, *out = found_att + n_weights, *statistics = out + (size_t)N * c.C;
    for (int l = 0; l < c.L; l++) {
        ActivationTensors a = layer_activations(&g->acts, l);
        Parameters p = layer_parameters(&g->model, g->model.params, l);
        attention_forward_ref(out, found, found_att, statistics, statistics + (size_t)N * c.NH, a.qkv, g->B, T, c.C, c.NH);
        check_bits(t, "act.preatt", found, preatt + l * n_weights, n_weights);
        check_bits(t, "act.att", found_att, att + l * n_weights, n_weights);
        matmul_forward(out, a.atty, p.attprojw, p.attprojb, N, c.C, c.C, &g->dev);
        check_bits(t, "act.attproj", out, attproj + (size_t)l * N * c.C, (size_t)N * c.C);
        matmul_forward(out, a.fch_gelu, p.fcprojw, p.fcprojb, N, 4 * c.C, c.C, &g->dev);
        check_bits(t, "act.fcproj", out, fcproj + (size_t)l * N * c.C, (size_t)N * c.C);
    }
    free(found);
    free(preatt);
    free(att);
    free(attproj);
    free(fcproj);
}

static void check_forward(Test* t, Golden* g) {
    const int *inputs = golden_batch(g, "inputs", 0, 0), *targets = golden_batch(g, "targets", 0, 0);
    gpt2_forward(&g->model, &g->acts, inputs, g->B, g->T, 0, &g->dev);
    check_rows(t, g, "act.logits", gpt2_logits(&g->model, &g->acts, 0, g->B * g->T, &g->dev));
    gpt2_loss(&g->model, &g->acts, targets, g->B, g->T, &g->dev);
    check_rows(t, g, "act.probs", layer_activations(&g->acts, 0).logits);
    check_activations(t, g);
    check_attention(t, g);
}

static void check_training(Test* t, Golden* g) {
    float *losses = golden_floats(g, "loss"), *norms = golden_floats(g, "norm"), *rates = golden_floats(g, "lr");
    const int n_steps = golden_int(g, "steps"), N = g->B * g->T;
    Schedule schedule = (Schedule)choice_find(SCHEDULE_NAMES, json_string_value(json_object_get(g->config, "schedule")));
    for (int step = 0; step < n_steps; step++) {
        int counted = 0;
        const int* targets = golden_batch(g, "targets", step, 0);
        for (int n = 0; n < g->n_leaves * N; n++) { counted += targets[n] >= 0; }
        for (int leaf = 0; leaf < g->n_leaves; leaf++) {
            gpt2_leaf(&g->model, &g->acts, golden_batch(g, "inputs", step, leaf), targets + (size_t)leaf * N, 1.0f / (float)counted, g->B, g->T, &g->dev);
        }
        float loss_sum, *grads = dp_reduce(&g->model.dp, &loss_sum, &g->dev);
        float loss = loss_sum / (float)counted, norm = dp_norm(&g->model.dp, grads, &g->dev);
        float lr = schedule_lr(schedule, step, n_steps, golden_int(g, "warmup"), (double)golden_float(g, "lr"), (double)golden_float(g, "final_lr"));
        check_bits(t, "loss", &loss, &losses[step], 1);
        check_bits(t, "norm", &norm, &norms[step], 1);
        check_bits(t, "lr", &lr, &rates[step], 1);
        if (step == 0) { check_arena(t, g, "grad.", grads); }
        Optimizer o = {lr, golden_float(g, "beta1"), golden_float(g, "beta2"), golden_float(g, "eps"), golden_float(g, "weight_decay"),
                       golden_float(g, "clip"), 0, NULL, NULL};
        const Weights w = gpt2_weights(&g->model);
        dp_update(&g->model.dp, &w, grads, norm, &o, step + 1, &g->dev);
        if (step == 0) { check_arena(t, g, "step1.", g->model.params); }
    }
    check_arena(t, g, "step10.", g->model.params);
    free(losses);
    free(norms);
    free(rates);
}

static void check_golden(Test* t, const char* path, void (*part)(Test*, Golden*)) {
#ifdef SYSTEM_LIBM
    (void)path, (void)part;
    skip(t, "this build follows the C library and llm.c");
#else
    const int n_threads[] = {1, 2, 3, 7};
    for (int i = 0; i < 4; i++) {
        Golden g;
        golden_open(&g, path, n_threads[i]);
        part(t, &g);
        golden_close(&g);
    }
#endif
}

static void test_base_forward(Test* t) { check_golden(t, "dev/golden/gpt2_base.safetensors", check_forward); }
static void test_base_training(Test* t) { check_golden(t, "dev/golden/gpt2_base.safetensors", check_training); }
static void test_odd_forward(Test* t) { check_golden(t, "dev/golden/gpt2_odd.safetensors", check_forward); }
static void test_odd_training(Test* t) { check_golden(t, "dev/golden/gpt2_odd.safetensors", check_training); }

static void test_schedules(Test* t) {
    const char* names[] = {"constant", "linear", "cosine", "wsd"};  // in the order of Schedule
    SafeFile file;
    safetensors_open(&file, "dev/golden/schedules.safetensors");
    json_t* config = json_loads(safetensors_meta(&file, "config"), 0, NULL);
    const int n_steps = (int)json_integer_value(json_object_get(config, "steps")), warmup = (int)json_integer_value(json_object_get(config, "warmup"));
    const double peak = (double)(float)json_number_value(json_object_get(config, "lr")), final_lr = (double)(float)json_number_value(json_object_get(config, "final_lr"));
    for (int i = 0; i < 4; i++) {
        const SafeTensor* expected = safetensors_find(&file, names[i]);
        check(t, expected && expected->n == (size_t)n_steps, "%s: expected %d values", names[i], n_steps);
        for (int step = 0; expected && step < n_steps; step++) {
            float lr = schedule_lr((Schedule)i, step, n_steps, warmup, peak, final_lr), want;
            safetensors_to_f32(&want, expected, (size_t)step, 1);
            check_bits(t, names[i], &lr, &want, 1);
        }
    }
    json_decref(config);
    safetensors_close(&file);
}

// position by position with the key-value cache, as text is generated, against the whole sequence at once
static void test_cache(Test* t) {
    Golden g;
    Activations cached;
    golden_open(&g, "dev/golden/gpt2_odd.safetensors", 2);
    const int T = g.T, V = g.model.config.V, *tokens = golden_batch(&g, "inputs", 0, 0);
    activations_init(&cached, g.model.config, 1, T, TO_GENERATE);
    gpt2_forward(&g.model, &g.acts, tokens, 1, T, 0, &g.dev);
    const float* whole = gpt2_logits(&g.model, &g.acts, 0, T, &g.dev);
    for (int t0 = 0, n = 3; t0 < T; t0 += n, n = 1) {  // three positions first, then one at a time
        gpt2_forward(&g.model, &cached, tokens + t0, 1, t0 + n, t0, &g.dev);
        const float* logits = gpt2_logits(&g.model, &cached, n - 1, 1, &g.dev);
        check_bits(t, "logits", logits, whole + (size_t)(t0 + n - 1) * g.model.config.Vp, (size_t)V);
    }
    activations_free(&cached);
    golden_close(&g);
}

// --doc-reset: a row of three documents against each of them alone
static void test_documents(Test* t) {
    Golden g;
    golden_open(&g, "dev/golden/gpt2_odd.safetensors", 3);
    const int T = g.T, V = g.model.config.V, Vp = g.model.config.Vp, starts[] = {0, 4, 9, T};
    int* tokens = (int*)memcpy(new_array((size_t)T, sizeof(int)), golden_batch(&g, "inputs", 0, 0), sizeof(int) * (size_t)T);
    for (int i = 0; i < T; i++) { tokens[i] = i == 4 || i == 9 ? V - 1 : tokens[i] % (V - 1); }
    g.acts.document_start = V - 1;
    gpt2_forward(&g.model, &g.acts, tokens, 1, T, 0, &g.dev);
    float* packed = copied_array(gpt2_logits(&g.model, &g.acts, 0, T, &g.dev), (size_t)T * Vp);
    check(t, g.acts.n_segments == 3, "expected 3 documents, found %d", g.acts.n_segments);
    for (int i = 0; i < 3; i++) {
        int n = starts[i + 1] - starts[i];
        gpt2_forward(&g.model, &g.acts, tokens + starts[i], 1, n, 0, &g.dev);
        check_bits(t, "logits", packed + (size_t)starts[i] * Vp, gpt2_logits(&g.model, &g.acts, 0, n, &g.dev), (size_t)n * Vp);
    }
    free(tokens);
    free(packed);
    golden_close(&g);
}

// llm.c's format keeps every bit, padding included
static void test_llmc_bin(Test* t) {
    Golden g;
    GPT2 copy;
    MappedFile file;
    const char* path = "build/test_gpt2.bin";
    golden_open(&g, "dev/golden/gpt2_base.safetensors", 1);
    const Config c = g.model.config;
    BinHeader h = {0, 0, c.max_T, c.V, c.L, c.NH, c.C, c.Vp};
    llmc_bin_save(path, h, g.model.table, N_PARAMETERS, g.model.params);
    file_map(&file, path);
    Config read;
    ErrorText error;
    check(t, config_parse_bin(&read, file.bytes, file.n_bytes, &error), "refused: %s", error.text);
    check(t, memcmp(&read, &c, sizeof c) == 0, "the sizes changed");
    gpt2_init(&copy, read);
    llmc_bin_load(&file, copy.table, N_PARAMETERS, copy.params);
    check_bits(t, "parameters", copy.params, g.model.params, copy.n);
    file_unmap(&file);
    unlink(path);
    gpt2_free(&copy);
    golden_close(&g);
}

// start values: the draws of PyTorch for the same network, layer by layer (spec gpt2.md section 8)
static void test_init(Test* t) {
    GPT2 model;
    gpt2_init(&model, config_make(16, 20, 2, 2, 8));
    tensors_init(model.table, N_PARAMETERS, model.params, 42);
    Mt19937 mt;
    float expected[3 * 8 * 8];
    mt19937_init(&mt, 42);
    Parameters p = layer_parameters(&model, model.params, 0), p1 = layer_parameters(&model, model.params, 1);
    const struct { const float* found; int n; float std; } draws[] = {
        {p.wte, 20 * 8, 0.02f}, {p.wpe, 16 * 8, 0.02f},
        {p.qkvw, 192, 0.02f}, {p.attprojw, 64, 0.01f}, {p.fcw, 192, 0.02f}, {p.fcw + 192, 64, 0.02f},
    };
    for (int i = 0; i < 4; i++) {
        normal_fill(&mt, expected, (size_t)draws[i].n, 0.0f, draws[i].std);
        check_bits(t, "draw", draws[i].found, expected, (size_t)draws[i].n);
    }
    for (int i = 20 * 8; i < 128 * 8; i++) { check(t, p.wte[i] == 0.0f, "padding of wte at %d is not 0", i); }
    for (int i = 0; i < 8; i++) { check(t, p.ln1w[i] == 1.0f && p1.ln1w[i] == 1.0f && p.ln1b[i] == 0.0f, "LayerNorm does not start at 1, 0"); }
    check(t, tensors_count(model.table, N_PARAMETERS) == 128 * 8 + 16 * 8 + 2 * (12 * 64 + 13 * 8) + 16, "another number of parameters");
    gpt2_free(&model);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden base, forward", "every activation, bit for bit, 1, 2, 3 and 7 threads", test_base_forward},
        {"golden base, training", "gradients, loss, norm, parameters after 1 and 10 updates", test_base_training},
        {"golden odd, forward", "head size 11, 33 channels, targets that do not count", test_odd_forward},
        {"golden odd, training", "three leaves, clipped, cosine schedule, a leaf without targets", test_odd_training},
        {"golden schedules", "all four learning rate tables", test_schedules},
        {"key-value cache", "cached logits equal those of the whole sequence", test_cache},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"llm.c .bin", "written and read back, every bit", test_llmc_bin},
        {"start values", "drawn in the order of PyTorch's construction", test_init},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
