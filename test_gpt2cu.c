/*
train_gpt2.cu against the files that dev/ref/gpt2.py, an independent NumPy program, has written: the same promises for the file
as C, as exact CUDA (bit for bit) and as bf16 CUDA (within a tolerance), on a GPU or under dev/simt.
*/
#define TESTING
#include "train_gpt2.cu"
#include "llmc/test/subject.h"  // Subject, subject_check_training, ...

static const char* const BASE = "dev/golden/gpt2_base.safetensors";
static const char* const DROPOUT = "dev/golden/gpt2_dropout.safetensors";
static const char* const ODD = "dev/golden/gpt2_odd.safetensors";  // 3 leaves, clip, cosine, masked targets, head size 11

typedef struct {
    Subject s;  // first
    GPT2 gpt2;
    Activations acts, cache;
} GPT2Subject;

static GPT2Subject* of(Subject* s) { return (GPT2Subject*)s; }
static Activations* activations_of(Subject* s, Purpose purpose) {
    return purpose == TO_TRAIN ? &of(s)->acts : &of(s)->cache;
}

static Model* layout(Subject* s) {
    const Golden* g = &s->file;
    gpt2_layout(&of(s)->gpt2, config_make(golden_int(g, "n_positions"), golden_int(g, "vocab_size"),
                                          golden_int(g, "n_layer"), golden_int(g, "n_head"), golden_int(g, "n_embd")));
    return &of(s)->gpt2.model;
}

static void open_activations(Subject* s, Purpose purpose, int B, int T) {
    Tradeoffs how = {s->way.recompute, s->way.head_rows, {1, 0.0f}};
    Activations* acts = activations_of(s, purpose);
    how.gelu_fusion = s->way.gelu_fusion;
    activations_layout(acts, &of(s)->gpt2, B, T, purpose, how);
    activations_open(acts, s->model, &s->dev);
    if (purpose != TO_TRAIN) { return; }
    acts->graph.is_on = s->way.graph;
    acts->batch.counts_all = s->way.graph || s->way.counts_all;
    s->graph = &acts->graph, s->segments = &acts->batch.segments;
}

static void close_activations(Subject* s) {
    activations_free(&of(s)->acts);
    if (of(s)->cache.tensors.memory) { activations_free(&of(s)->cache); }
}

static void leaf(void* subject, const int* inputs, const int* targets, float dloss) {
    GPT2Subject* x = (GPT2Subject*)subject;
    x->acts.dropout = golden_dropout(&x->s.file, (int)x->s.n_leaves - 1, x->gpt2.config.C);
    gpt2_leaf(&x->gpt2, &x->acts, inputs, targets, dloss, x->s.file.B, x->s.file.T, &x->s.dev);
}

static void forward(Subject* s, Purpose purpose, const int* tokens, int T, int t0) {
    gpt2_forward(&of(s)->gpt2, activations_of(s, purpose), tokens, 1, T, t0, &s->dev);
}

static const floatX* logits(Subject* s, Purpose purpose, int n) {
    const Config c = of(s)->gpt2.config;
    const ActivationTensors a = layer_activations(activations_of(s, purpose), 0);
    matmul_forward(a.logits, a.lnf + (size_t)n * c.C, layer_weights(&of(s)->gpt2, 0).wte, (const floatX*)NULL, 1, c.C,
                   c.Vp, &s->dev);
    return a.logits;
}

// bf16 rounds every weight and activation to 2^-9, about ten in a row and some of them under sums that cancel. Odd's
// attention is far from uniform: rounding nothing but its weights to the nearest bf16 moves gradients by up to 0.028,
// and they are rounded with noise, whose error is sqrt(2) times as wide. Parameters: AdamW divides by the size of the
// gradient, and the bias of k, whose gradient is nothing but rounding since softmax does not see it, moves at full speed
// in directions of its own
static Tolerances tolerances(const Subject* s) {
    const double sensitivity = strcmp(s->file.set.path, ODD) == 0 ? 4.0 : 1.0;
    const Tolerances fp32 = {1e-5, 1e-4, 0.1, 1e-5}, bf16 = {1e-2 * sensitivity, 3e-2 * sensitivity, 0.1, 2e-2};
    return FLOATX_IS_FLOAT ? fp32 : bf16;
}

static const SubjectCalls GPT2CU = {
    .n_bytes = sizeof(GPT2Subject), .layout = layout, .tolerances = tolerances, .open = open_activations,
    .close = close_activations, .leaf = leaf, .forward = forward, .logits = logits,
};

static Way fused(Way w, int gelu_fusion) {
    w.gelu_fusion = gelu_fusion;
    return w;
}

static Way in_pieces(Way w, int head_rows) {
    w.head_rows = head_rows;
    return w;
}

static void test_base(Test* t) { subject_check_training(t, &GPT2CU, BASE, subject_way(2, KEEP_ALL)); }
static void test_dropout(Test* t) { subject_check_training(t, &GPT2CU, DROPOUT, subject_way(2, KEEP_ALL)); }
static void test_odd(Test* t) { subject_check_training(t, &GPT2CU, ODD, subject_way(2, KEEP_ALL)); }

static void test_fusion(Test* t) {
    const Way with = fused(subject_way(2, KEEP_ALL), 2);
    subject_check_training(t, &GPT2CU, BASE, with);
    subject_check_training(t, &GPT2CU, ODD, with);
}

static void test_recompute(Test* t) {
    const Way first = subject_way(2, KEEP_ALL), blocks = subject_way(2, RECOMPUTE_BLOCKS);
    Way others[3];
    for (int level = 1; level <= 3; level++) { others[level - 1] = subject_way(2, level); }
    subject_check_same(t, &GPT2CU, BASE, first, others, 3);
    for (int fusion = 1; fusion <= 2; fusion++) {
        const Way fused_blocks = fused(blocks, fusion);
        subject_check_same(t, &GPT2CU, BASE, fused(first, fusion), &fused_blocks, 1);
    }
    const Way fused_norms = fused(subject_way(2, RECOMPUTE_NORMS), 2);  // both: backward alone
    subject_check_same(t, &GPT2CU, BASE, fused(subject_way(2, RECOMPUTE_GELU), 2), &fused_norms, 1);
    subject_check_same(t, &GPT2CU, DROPOUT, first, others, 3);
}

// pieces change the order of bf16's sums over positions inside a tile, not the sums of the law
static void test_head_rows(Test* t) {
    const Way first = subject_way(2, KEEP_ALL), others[2] = {in_pieces(first, 5), in_pieces(first, 16)};
    if (FAST_KERNELS) { skip(t, "a promise of exact builds"); return; }
    subject_check_same(t, &GPT2CU, ODD, first, others, 2);
}

static void test_cache(Test* t) { subject_check_file_cache(t, &GPT2CU, ODD, subject_way(2, KEEP_ALL)); }
static void test_documents(Test* t) { subject_check_documents(t, &GPT2CU, ODD, subject_way(2, KEEP_ALL)); }

// the same run twice
static void test_repeat(Test* t) {
    const Way how = subject_way(2, KEEP_ALL);
    subject_check_same(t, &GPT2CU, BASE, how, &how, 1);
}

// after the first update, as generation or a validation may
static void outgrow_workspace(void* subject) {
    Subject* s = (Subject*)subject;
    if (s->n_leaves == s->file.n_leaves) { device_workspace(&s->dev, 2 * s->dev.workspace->n_bytes + 1); }
}

static void test_graph(Test* t) {
    SubjectCalls outgrowing = GPT2CU;
    Way recorded = subject_way(2, RECOMPUTE_BLOCKS);
    recorded.graph = 1;
    outgrowing.updated = outgrow_workspace;
    subject_check_graph(t, &GPT2CU, BASE, subject_way(2, KEEP_ALL), 3);  // one leaf an update
    subject_check_graph(t, &outgrowing, BASE, subject_way(2, KEEP_ALL), 2);
    // three in two places; updates of 91, 106, 104 and 104 targets are three scales
    subject_check_graph(t, &GPT2CU, ODD, subject_way(2, KEEP_ALL), 6);
    subject_check_training(t, &GPT2CU, BASE, recorded);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden base", "gradients, loss, norm, parameters after 1 and 10 updates", test_base},
        {"golden odd", "three leaves, clipped, cosine schedule, a leaf without targets, head size 11", test_odd},
        {"golden dropout", "the same with 30% of the elements left out, others in each leaf", test_dropout},
        {"fusion", "GELU inside the products beside it: as near to the golden files", test_fusion},
        {"recompute", "levels 0 to 3 give the same bits", test_recompute},
        {"head rows", "logits in pieces give the same bits", test_head_rows},
        {"key-value cache", "cached logits equal those of the whole sequence", test_cache},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"graph", "--graph 1: losses and parameters to the last bit, and each leaf is one launch", test_graph},
        {"repeat", "the same inputs give the same bits again", test_repeat},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
