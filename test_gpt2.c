/*
train_gpt2.c against the files that dev/ref/gpt2.py, an independent NumPy program, has written: every activation, loss, norm,
gradient, and the parameters after 1 and 10 updates, to the last bit, with 1, 2, 3 and 7 threads.
*/
#define TESTING
#include "train_gpt2.c"
#include "llmc/test/golden.h"  // Golden, golden_check_training
#include "llmc/test/test.h"

typedef struct {
    Golden file;
    GPT2 gpt2;
    Activations acts;
    Device dev;
    int n_done;  // leaves
    char how[32];
} Subject;

static void subject_open(Subject* s, const char* path, int n_threads) {
    const Golden* g = &s->file;
    golden_open(&s->file, path);
    s->n_done = 0;
    const Config c = config_make(golden_int(g, "n_positions"), golden_int(g, "vocab_size"), golden_int(g, "n_layer"),
                                 golden_int(g, "n_head"), golden_int(g, "n_embd"));
    device_init(&s->dev, n_threads);
    gpt2_init(&s->gpt2, c, sizeof(float));
    model_init_training(&s->gpt2.model, NULL, g->n_leaves, 0, 0);
    golden_load(&s->file, "param.", s->gpt2.model.table, N_PARAMETERS, model_floats(&s->gpt2.model));
    activations_init(&s->acts, c, g->B, g->T, TO_TRAIN, &(ArenaSlots){0});
    snprintf(s->how, sizeof s->how, "%d threads", n_threads);
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

// what the trainer does not keep: scores and weights of attention, and two projections before they join the stream
static void check_attention(Test* t, Subject* s) {
    const Golden* g = &s->file;
    const Config c = s->gpt2.config;
    const int N = g->B * g->T, T = g->T;
    const size_t n_weights = (size_t)N * c.NH * T, n_out = (size_t)N * c.C;
    const float *preatt = golden_floats(g, "act.preatt"), *att = golden_floats(g, "act.att"),
                *attproj = golden_floats(g, "act.attproj"), *fcproj = golden_floats(g, "act.fcproj");
    float* found = (float*)malloc_check(sizeof(float) * (2 * n_weights + 3 * n_out), "found");
    float *found_att = found + n_weights, *out = found_att + n_weights, *statistics = out + n_out;
    for (int l = 0; l < c.L; l++) {
        ActivationTensors a = layer_activations(&s->acts, l);
        Parameters p = layer_parameters(&s->gpt2, l);
        attention_forward_ref(out, found, found_att, statistics, statistics + (size_t)N * c.NH, a.qkv, g->B, T, c.C, c.NH);
        check_bits(t, "act.preatt", found, preatt + l * n_weights, n_weights);
        check_bits(t, "act.att", found_att, att + l * n_weights, n_weights);
        matmul_forward(out, a.atty, p.attprojw, p.attprojb, N, c.C, c.C, &s->dev);
        check_bits(t, "act.attproj", out, attproj + l * n_out, n_out);
        matmul_forward(out, a.fch_gelu, p.fcprojw, p.fcprojb, N, 4 * c.C, c.C, &s->dev);
        check_bits(t, "act.fcproj", out, fcproj + l * n_out, n_out);
    }
    free(found);
}

static void check_forward(Test* t, Subject* s) {
    const Golden* g = &s->file;
    const Config c = s->gpt2.config;
    const int N = g->B * g->T;
    s->acts.dropout = golden_dropout(g, 0, c.C);
    gpt2_forward(&s->gpt2, &s->acts, golden_batch(g, "inputs", 0, 0), g->B, g->T, 0, &s->dev);
    const float* logits = gpt2_logits(&s->gpt2, &s->acts, 0, N, &s->dev);
    golden_check_rows(t, g, "act.logits", logits, (size_t)N, (size_t)c.V, (size_t)c.Vp);
    gpt2_losses(&s->gpt2, &s->acts, golden_batch(g, "targets", 0, 0), N, &s->dev);
    golden_check_rows(t, g, "act.probs", logits, (size_t)N, (size_t)c.V, (size_t)c.Vp);
    golden_check_activations(t, g, s->acts.tensors.table, s->acts.tensors.n_table, (const float*)s->acts.tensors.memory, 17);
    check_attention(t, s);
}

static void check_training(Test* t, Subject* s) {
    const GoldenRun run = {s->gpt2.model.table, N_PARAMETERS, s->gpt2.model.n, &s->gpt2.model.dp, s->gpt2.model.w, &s->dev,
                           s, subject_leaf, NULL, NULL, s->how, GOLDEN_BITS, GOLDEN_BITS, GOLDEN_BITS};
    golden_check_training(t, &s->file, &run);
}

static void check_golden(Test* t, const char* path, void (*part)(Test*, Subject*)) {
#ifdef SYSTEM_LIBM
    (void)path, (void)part;
    skip(t, "this build follows the C library and llm.c");
#else
    const int n_threads[] = {1, 2, 3, 7};
    for (int i = 0; i < 4; i++) {
        Subject s;
        subject_open(&s, path, n_threads[i]);
        part(t, &s);
        subject_close(&s);
    }
#endif
}

static void test_base_forward(Test* t) { check_golden(t, "dev/golden/gpt2_base.safetensors", check_forward); }
static void test_base_training(Test* t) { check_golden(t, "dev/golden/gpt2_base.safetensors", check_training); }
static void test_odd_forward(Test* t) { check_golden(t, "dev/golden/gpt2_odd.safetensors", check_forward); }
static void test_odd_training(Test* t) { check_golden(t, "dev/golden/gpt2_odd.safetensors", check_training); }

static void test_dropout_forward(Test* t) { check_golden(t, "dev/golden/gpt2_dropout.safetensors", check_forward); }
static void test_dropout_training(Test* t) { check_golden(t, "dev/golden/gpt2_dropout.safetensors", check_training); }

static void test_schedules(Test* t) {
    const char* names[] = {"constant", "linear", "cosine", "wsd"};
    Golden g;
    golden_open(&g, "dev/golden/schedules.safetensors");
    const int n_steps = golden_int(&g, "steps");
    for (int i = 0; i < 4; i++) {
        float* rates = (float*)new_array((size_t)n_steps, sizeof(float));
        for (int step = 0; step < n_steps; step++) { rates[step] = golden_lr(&g, (Schedule)i, step); }
        golden_check(t, &g, names[i], rates, (size_t)n_steps);
        free(rates);
    }
    golden_close(&g);
}

// position by position with the key-value cache, as text is generated, against the whole sequence at once
static void test_cache(Test* t) {
    Subject s;
    Activations cached;
    subject_open(&s, "dev/golden/gpt2_odd.safetensors", 2);
    const int T = s.file.T, V = s.gpt2.config.V, *tokens = golden_batch(&s.file, "inputs", 0, 0);
    activations_init(&cached, s.gpt2.config, 1, T, TO_GENERATE, &(ArenaSlots){0});
    gpt2_forward(&s.gpt2, &s.acts, tokens, 1, T, 0, &s.dev);
    const float* whole = gpt2_logits(&s.gpt2, &s.acts, 0, T, &s.dev);
    for (int t0 = 0, n = 3; t0 < T; t0 += n, n = 1) {  // three positions first, then one at a time
        gpt2_forward(&s.gpt2, &cached, tokens + t0, 1, t0 + n, t0, &s.dev);
        const float* logits = gpt2_logits(&s.gpt2, &cached, n - 1, 1, &s.dev);
        check_bits(t, "logits", logits, whole + (size_t)(t0 + n - 1) * s.gpt2.config.Vp, (size_t)V);
    }
    activations_free(&cached);
    subject_close(&s);
}

// --doc-reset: a row of three documents against each of them alone
static void test_documents(Test* t) {
    Subject s;
    subject_open(&s, "dev/golden/gpt2_odd.safetensors", 3);
    const int T = s.file.T, V = s.gpt2.config.V, Vp = s.gpt2.config.Vp, starts[] = {0, 4, 9, T};
    int* tokens = (int*)memcpy(new_array((size_t)T, sizeof(int)), golden_batch(&s.file, "inputs", 0, 0), sizeof(int) * (size_t)T);
    for (int i = 0; i < T; i++) { tokens[i] = i == 4 || i == 9 ? V - 1 : tokens[i] % (V - 1); }
    s.acts.segments.document_start = V - 1;
    gpt2_forward(&s.gpt2, &s.acts, tokens, 1, T, 0, &s.dev);
    float* packed = copied_array(gpt2_logits(&s.gpt2, &s.acts, 0, T, &s.dev), (size_t)T * Vp);
    check(t, s.acts.segments.n == 3, "expected 3 documents, found %d", s.acts.segments.n);
    for (int i = 0; i < 3; i++) {
        int n = starts[i + 1] - starts[i];
        gpt2_forward(&s.gpt2, &s.acts, tokens + starts[i], 1, n, 0, &s.dev);
        check_bits(t, "logits", packed + (size_t)starts[i] * Vp, gpt2_logits(&s.gpt2, &s.acts, 0, n, &s.dev), (size_t)n * Vp);
    }
    free(tokens);
    free(packed);
    subject_close(&s);
}

// llm.c's format keeps every bit, padding included
static void test_llmc_bin(Test* t) {
    Subject s;
    GPT2 copy;
    MappedFile file;
    const char* path = "build/test_gpt2.bin";
    subject_open(&s, "dev/golden/gpt2_base.safetensors", 1);
    const Config c = s.gpt2.config;
    BinHeader h = {0, 0, c.max_T, c.V, c.L, c.NH, c.C, c.Vp};
    llmc_bin_save(path, h, s.gpt2.model.table, N_PARAMETERS, model_floats(&s.gpt2.model));
    file_map(&file, path);
    Config read;
    ErrorText error;
    check(t, config_parse_bin(&read, file.bytes, file.n_bytes, &error), "refused: %s", error.text);
    check(t, memcmp(&read, &c, sizeof c) == 0, "the sizes changed");
    gpt2_init(&copy, read, sizeof(float));
    llmc_bin_load(&file, copy.model.table, N_PARAMETERS, model_floats(&copy.model));
    check_bits(t, "parameters", model_floats(&copy.model), model_floats(&s.gpt2.model), copy.model.n);
    file_unmap(&file);
    unlink(path);
    model_free(&copy.model);
    subject_close(&s);
}

// start values: the draws of PyTorch for the same network, layer by layer
static void test_init(Test* t) {
    GPT2 model;
    gpt2_init(&model, config_make(16, 20, 2, 2, 8), sizeof(float));
    tensors_init(model.model.table, N_PARAMETERS, model_floats(&model.model), 42);
    Mt19937 mt;
    float expected[3 * 8 * 8];
    mt19937_init(&mt, 42);
    Parameters p = layer_parameters(&model, 0), p1 = layer_parameters(&model, 1);
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
    check(t, tensors_count(model.model.table, N_PARAMETERS) == 128 * 8 + 16 * 8 + 2 * (12 * 64 + 13 * 8) + 16, "another number of parameters");
    model_free(&model.model);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden base, forward", "every activation, bit for bit, 1, 2, 3 and 7 threads", test_base_forward},
        {"golden base, training", "gradients, loss, norm, parameters after 1 and 10 updates", test_base_training},
        {"golden odd, forward", "head size 11, 33 channels, targets that do not count", test_odd_forward},
        {"golden odd, training", "three leaves, clipped, cosine schedule, a leaf without targets", test_odd_training},
        {"golden dropout, forward", "three elements in ten are left out", test_dropout_forward},
        {"golden dropout, training", "others in each leaf of each update", test_dropout_training},
        {"golden schedules", "all four learning rate tables", test_schedules},
        {"key-value cache", "cached logits equal those of the whole sequence", test_cache},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"llm.c .bin", "written and read back, every bit", test_llmc_bin},
        {"start values", "drawn in the order of PyTorch's construction", test_init},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
