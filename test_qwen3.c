/*
train_qwen3.cu against the files that dev/ref/qwen.py, an independent NumPy program, has written: activations, choices of
the routers, losses, norms, gradients, and the parameters after 1 and 10 updates. As C and as exact CUDA to the last
bit, as bf16 CUDA within a tolerance.
*/
#define TESTING
#include "train_qwen3.cu"
#include "llmc/test/decoder_subject.h"  // DecoderSubject, subject_check_training, ...
#include "llmc/test/subject_chat.h"  // subject_check_conversations
#include "llmc/test/testfiles.h"     // temp_folder

static const char* const DENSE = "dev/golden/qwen_dense.safetensors";    // qwen3: norms of heads, one key/value head
static const char* const WINDOW = "dev/golden/qwen_window.safetensors";  // qwen2: biases, tied, layers with a window
static const char* const LORA = "dev/golden/qwen_lora.safetensors";  // all seven linear layers, several ranks, scales
static const char* const LORA_MOE = "dev/golden/qwen_lora_moe.safetensors";  // experts and router, rslora
static const char* const MOE = "dev/golden/qwen_moe.safetensors";  // layers with and without experts, balance, 3 leaves

enum { LONG_V = 40 };  // vocabulary of the model for long texts

typedef struct {
    DecoderSubject d;  // first
    Qwen qwen;
} QwenSubject;

static QwenSubject* of(Subject* s) { return (QwenSubject*)s; }

static Config golden_config(const Golden* g) {
    Config c;
    ErrorText error;
    if (!config_parse(&c, g->config, &error)) { fail_run("%s: %s", g->set.path, error.text); }
    return c;
}

static void golden_adapters(Adapters* x, const Config* c, json_t* settings) {
    Tensor base[MAX_PARAMETERS];
    const AdapterSettings s = adapter_settings(json_incref(settings), NULL);
    adapter_choose(x, &s, base, parameter_table(base, c));
}

static Model* layout(Subject* s) {
    const Config c = golden_config(&s->file);
    json_t* settings = json_object_get(s->file.config, "lora");
    Adapters adapters;
    if (settings) { golden_adapters(&adapters, &c, settings); }
    qwen_layout(&of(s)->qwen, &c, settings ? &adapters : NULL);
    return &of(s)->qwen.model;
}

// Norms of heads, layers with and without a window, with and without experts, of which a token takes all, so that no
// rounding chooses others
static Model* layout_long(Subject* s) {
    Config c = config_make(QWEN3_MOE, 256, LONG_V, 3, 32, 4, 2, 16, 48);
    c.E = c.k = 3, c.FE = 24, c.renormalize = 1;
    c.window = 20;
    memcpy(c.kinds, "EME", 3);
    memcpy(c.slides, "SFS", 3);
    qwen_layout(&of(s)->qwen, &c, NULL);
    return &of(s)->qwen.model;
}

// whatever does not count parts stretches
static void open_parted(Subject* s, Purpose purpose, int B, int T) {
    decoder_subject_open(s, purpose, B, T);
    decoder_subject_activations(s, purpose)->batch.least_gap = 1;
}

static void close_all(Subject* s) {
    adapter_free(&of(s)->qwen.adapters);
    decoder_subject_close(s);
}

static float more_loss(void* subject) { return routing_loss(&((QwenSubject*)subject)->qwen); }

// bf16 rounds every weight and activation to 2^-9. Rounding nothing but the weights of `window` to the nearest bf16 moves
// gradients of its biases by up to 0.030, those of `dense` by 0.023; they are rounded with noise, whose error is sqrt(2)
// times as wide, and then activations and gradients are rounded too, in three layers and in two
static Tolerances tolerances(const Subject* s) {
    const double sensitivity = s->file.config && strcmp(s->file.set.path, WINDOW) == 0 ? 2.0 : 1.0;
    const Tolerances fp32 = {1e-5, 1e-4, 1e-2, 1e-5}, bf16 = {3e-2 * sensitivity, 6e-2 * sensitivity, 0.3, 3e-2};
    return FLOATX_IS_FLOAT ? fp32 : bf16;
}

static const SubjectCalls QWEN = {
    .n_bytes = sizeof(QwenSubject), .layout = layout, .more_loss = more_loss, .tolerances = tolerances,
    DECODER_SUBJECT(&PASSES, close_all, decoder_subject_losses, decoder_subject_leaf),
};

// ---- golden files: every number of threads; kernels, which take their time on a CPU, once ----

// tensors, statistics: how many of each the file has
static void check_forward(Test* t, const char* path, int n_tensors, int n_statistics) {
    for (int i = 0; i < N_TEST_THREADS; i++) {
        subject_check_forward(t, &QWEN, path, subject_way(test_threads(i), KEEP_ALL), n_tensors, n_statistics);
    }
}

static void check_golden(Test* t, const char* path) {
    for (int i = 0; i < N_TEST_THREADS; i++) {
        subject_check_training(t, &QWEN, path, subject_way(test_threads(i), RECOMPUTE_NORMS));
    }
}

static void check_dense_forward(Test* t, const char* path, int n_tensors, int n_statistics) {
    if (FAST_KERNELS) { skip(t, "fast kernels round what is stored: losses are compared in training"); }
    else { check_forward(t, path, n_tensors, n_statistics); }
}

static void test_dense_forward(Test* t) { check_dense_forward(t, DENSE, 14, 8); }
static void test_window_forward(Test* t) { check_dense_forward(t, WINDOW, 12, 6); }
static void test_moe_forward(Test* t) {
    if (FAST_KERNELS && !FLOATX_IS_FLOAT) { skip(t, "bf16: choices that hang on its rounding"); }
    else { check_forward(t, MOE, 17, 11); }
}
static void test_dense(Test* t) { check_golden(t, DENSE); }
static void test_window(Test* t) { check_golden(t, WINDOW); }
static void test_moe(Test* t) {
    if (FAST_KERNELS && !FLOATX_IS_FLOAT) { skip(t, "bf16: choices that hang on its rounding"); }
    else { check_golden(t, MOE); }
}

static void test_lora(Test* t) { check_golden(t, LORA); }
static void test_lora_moe(Test* t) {
    if (FAST_KERNELS && !FLOATX_IS_FLOAT) { skip(t, "bf16: a router's adapter is for floats"); }
    else { check_golden(t, LORA_MOE); }
}

// ---- what must change no bit ----

static void test_recompute(Test* t) {
    const char* const paths[] = {DENSE, WINDOW, MOE, LORA, LORA_MOE};
    const int is_bf16 = FAST_KERNELS && !FLOATX_IS_FLOAT;
    Way others[4] = {subject_way(2, RECOMPUTE_NORMS), subject_way(2, RECOMPUTE_MLPS), subject_way(2, RECOMPUTE_BLOCKS),
                     subject_way(2, RECOMPUTE_BLOCKS)};
    others[3].head_rows = 5;  // other roundings of bf16
    for (int f = 0; f < (is_bf16 ? 4 : 5); f++) {
        subject_check_same(t, &QWEN, paths[f], subject_way(2, KEEP_ALL), others, is_bf16 ? 3 : 4);
    }
}

static void test_cache(Test* t) {
    subject_check_file_cache(t, &QWEN, DENSE, subject_way(2, KEEP_ALL));
    subject_check_file_cache(t, &QWEN, WINDOW, subject_way(2, KEEP_ALL));  // 8 positions, of which a window has 3
    if (!FAST_KERNELS) { subject_check_file_cache(t, &QWEN, MOE, subject_way(2, KEEP_ALL)); }
}

static void test_long_cache(Test* t) { subject_check_long_cache(t, &QWEN, layout_long, LONG_V); }
static void test_texts(Test* t) { subject_check_texts(t, &QWEN, layout_long, LONG_V); }

static void test_documents(Test* t) {
    subject_check_documents(t, &QWEN, DENSE, subject_way(3, KEEP_ALL));
    subject_check_documents(t, &QWEN, WINDOW, subject_way(3, KEEP_ALL));  // the last is longer than the window
    if (!FAST_KERNELS) { subject_check_documents(t, &QWEN, MOE, subject_way(3, KEEP_ALL)); }
}

static void test_conversations(Test* t) {
    subject_check_conversations(t, &QWEN, DENSE, subject_way(3, KEEP_ALL));
    subject_check_conversations(t, &QWEN, WINDOW, subject_way(3, KEEP_ALL));
}

// positions whose targets do not count have no logits
static void test_uncounted(Test* t) {
    const char* const paths[] = {DENSE, MOE};
    for (int f = 0; f < 2; f++) {
        Trained together = subject_trained(&QWEN, paths[f], subject_way(2, RECOMPUTE_NORMS));
        SubjectCalls parted = QWEN;
        parted.open = open_parted;
        Trained apart = subject_trained(&parted, paths[f], subject_way(2, RECOMPUTE_NORMS));
        check_bits(t, "losses", apart.losses, together.losses, SUBJECT_STEPS);
        check_bits(t, "parameters", apart.params, together.params, together.n);
        free(together.params), free(apart.params);
    }
}

// every other leaf counts fewer of its targets than the golden file says: the recording must serve both
static void leaf_uneven(void* subject, const int* inputs, const int* targets, float dloss) {
    QwenSubject* x = (QwenSubject*)subject;
    const int N = x->d.s.file.B * x->d.s.file.T, first = x->d.acts.graph.n_leaves % 2 ? N / 2 : 0;
    int* fewer = (int*)new_array((size_t)N, sizeof(int));
    for (int i = 0; i < N; i++) { fewer[i] = i < first ? -1 : targets[i]; }
    decoder_subject_leaf(subject, inputs, fewer, dloss);
    free(fewer);
}

static void test_graph(Test* t) {
    SubjectCalls uneven = QWEN;
    uneven.leaf = leaf_uneven;
    Way recorded = subject_way(2, RECOMPUTE_MLPS);
    recorded.graph = 1;
    subject_check_graph(t, &QWEN, WINDOW, subject_way(2, RECOMPUTE_NORMS), 3);  // one leaf an update, of one scale
    subject_check_graph(t, &uneven, WINDOW, subject_way(2, RECOMPUTE_NORMS), 3);
    subject_check_graph(t, &QWEN, MOE, subject_way(2, RECOMPUTE_NORMS), 4);     // three leaves in two places, 4 scales
    subject_check_training(t, &QWEN, WINDOW, recorded);
}

// ---- sizes, and how files have experts ----

static Model* layout_fused(Subject* s) {
    Config c = golden_config(&s->file);
    c.fused = 1;
    qwen_layout(&of(s)->qwen, &c, NULL);
    return &of(s)->qwen.model;
}

static void declare_like(SafeWriter* w, const SafeTensor* x) {
    safewriter_declare(w, x->name, x->dtype, x->n_dims, x->shape);
}

// a golden file's first batches and parameters, the experts of a layer in one tensor
static TempPath fused_file(const TempPath* folder, const char* path, const SubjectCalls* fused) {
    const TempPath file = temp_path(folder, "fused.safetensors");
    Subject* s = subject_open(&QWEN, path, subject_way(1, KEEP_ALL));
    const Model* m = s->model;
    static QwenSubject other;
    SafeWriter w;
    memset(&other, 0, sizeof other);
    other.d.s.file = s->file;
    const Model* m_fused = fused->layout(&other.d.s);
    float* params = (float*)new_array(m->n, sizeof(float));
    golden_load(&s->file, "param.", m->table, m->n_table, params);
    safewriter_init(&w);
    safewriter_meta(&w, "config", safetensors_meta(s->file.set.files, "config"));
    const SafeTensor* batches[] = {golden_tensor(&s->file, "inputs", DTYPE_I32),
                                   golden_tensor(&s->file, "targets", DTYPE_I32)};
    for (int i = 0; i < 2; i++) { declare_like(&w, batches[i]); }
    tensors_declare(&w, m_fused->table, m_fused->n_table, "param.");
    safewriter_open(&w, file.s);
    for (int i = 0; i < 2; i++) { safewriter_put(&w, batches[i]->data, batches[i]->n * sizeof(int32_t)); }
    tensors_put(&w, m_fused->table, m_fused->n_table, params);
    safewriter_close(&w);
    free(params);
    subject_close(s);
    return file;
}

// the tensor of all experts of layer l is those of each, one behind the other
static void check_fused(Test* t, const char* apart, const char* fused, int l) {
    static const char* const parts[2][2] = {{"gate_proj", "up_proj"}, {"down_proj", NULL}};
    Golden a, f;
    golden_open(&a, apart), golden_open(&f, fused);
    for (int i = 0; i < 2; i++) {
        char name[NAME_BYTES];
        snprintf(name, sizeof name, "param.model.layers.%d.mlp.experts.%s", l, i == 0 ? "gate_up_proj" : "down_proj");
        const SafeTensor* whole = golden_tensor(&f, name, DTYPE_F32);
        const float* next = (const float*)whole->data;
        for (int e = 0; e < golden_int(&a, "num_experts"); e++) {
            for (int j = 0; j < 2 && parts[i][j]; j++) {
                snprintf(name, sizeof name, "param.model.layers.%d.mlp.experts.%d.%s.weight", l, e, parts[i][j]);
                const SafeTensor* part = golden_tensor(&a, name, DTYPE_F32);
                check_bits(t, name, next, (const float*)part->data, part->n);
                next += part->n;
            }
        }
        check(t, next == (const float*)whole->data + whole->n, "%s has %zu elements", whole->name, whole->n);
    }
    golden_close(&a), golden_close(&f);
}

static void test_fused(Test* t) {
    SubjectCalls fused = QWEN;
    fused.layout = layout_fused;
    const TempPath folder = temp_folder(), file = fused_file(&folder, MOE, &fused);
    check_fused(t, MOE, file.s, 0);
    check_fused(t, MOE, file.s, 2);
    Trained a = subject_trained(&QWEN, MOE, subject_way(2, RECOMPUTE_NORMS)),
            f = subject_trained(&fused, file.s, subject_way(2, RECOMPUTE_NORMS));
    check_bits(t, "losses", f.losses, a.losses, SUBJECT_STEPS);
    check_bits(t, "parameters", f.params, a.params, a.n);
    free(a.params), free(f.params);
    temp_remove(&folder);
}

// doc/qwen.md. n_tensors: of a file; published ones of tied models may have the head again
static void test_counts(Test* t) {
    const struct { const char* name; int V, tied, n_tensors; size_t n, n_active; } models[] = {
        {"qwen2.5-0.5b", 151936, 1, 290, 494032768, 494032768},
        {"qwen3-0.6b", 151936, 1, 310, 596049920, 596049920},
        {"qwen3-0.6b", 151936, 0, 311, 751632384, 751632384},
        {"qwen3-8b", 151936, 0, 399, 8190735360, 8190735360},
        {"qwen3-30b-a3b", 151936, 0, 18867, 30532122624, 3353032704},
        {"mistral-7b", 32000, 0, 291, 7241732096, 7241732096},
    };
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        static Qwen qwen;
        Config c = config_preset(models[i].name, models[i].V);
        size_t n = 0, n_active = 0;
        c.tied = models[i].tied;
        memset(&qwen, 0, sizeof qwen);
        qwen_layout(&qwen, &c, NULL);
        for (int k = 0; k < qwen.model.n_table; k++) {
            const Tensor* x = &qwen.model.table[k];
            const size_t disk = tensors_disk_count(x, 1);
            n += disk;
            n_active += x->experts > 0 ? disk / (size_t)x->experts * (size_t)c.k : disk;
        }
        check(t, n == models[i].n && n_active == models[i].n_active, "%s: %zu parameters, %zu active",
              models[i].name, n, n_active);
        check(t, qwen.model.n_slices == models[i].n_tensors, "%s: %d tensors, expected %d", models[i].name,
              qwen.model.n_slices, models[i].n_tensors);
    }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden dense, forward", "activations: norms of heads, one key/value head, head size 10", test_dense_forward},
        {"golden window, forward", "biases, a window in some layers, a tied head", test_window_forward},
        {"golden experts, forward", "layers with experts and without, ties", test_moe_forward},
        {"golden dense", "gradients, losses, norms, parameters after 1 and 10 updates", test_dense},
        {"golden window", "three rows, every gradient of a bias", test_window},
        {"golden experts", "three leaves, the balance of all routers in the loss", test_moe},
        {"golden adapters", "LoRA of all linear layers, ranks and scales by patterns", test_lora},
        {"golden adapters of experts", "and of the router, with rslora", test_lora_moe},
        {"recompute", "no level and no --head-rows changes a bit", test_recompute},
        {"key-value cache", "cached logits equal those of the whole sequence, beyond the window too", test_cache},
        {"long cache", "the same of 70 positions, the last ones each alone", test_long_cache},
        {"texts", "several side by side have the logits that each has alone", test_texts},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"conversations", "several in a row: each position's loss is that of a row of its own", test_conversations},
        {"uncounted targets", "logits of their positions are left out, which changes no bit", test_uncounted},
        {"graph", "--graph 1: losses and parameters to the last bit, and each leaf is one launch", test_graph},
        {"fused", "experts of a layer in one tensor, or each in its own: the same bits", test_fused},
        {"counts", "parameters and tensors of the published models", test_counts},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
