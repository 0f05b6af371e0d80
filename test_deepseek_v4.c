/*
train_deepseek_v4.cu against files that dev/ref/deepseek_v4.py, an independent NumPy program, has written: activations,
choices of routers and indexers, losses, norms, gradients, and the parameters after 1 and 10 updates. As C and as exact
CUDA to the last bit. And what must change no bit.
*/
#define TESTING
#include "train_deepseek_v4.cu"
#include "llmc/test/subject.h"       // Subject, subject_check_training, ...

// a window alone, CSA, HCA, CSA; tails behind the last entry, more entries than are chosen, YaRN, a table of choices
static const char* const TEXT = "dev/golden/deepseek_v4_text.safetensors";
// HCA, CSA, MTP; the indexer learns, balance of sequences, biases that move, two leaves of an update
static const char* const MTP_FILE = "dev/golden/deepseek_v4_mtp.safetensors";

enum { LONG_V = 40 };  // vocabulary of the model for long texts

typedef struct {
    Subject s;  // first
    DeepseekV4 v4;
    Activations acts, cache;
} V4Subject;

static V4Subject* of(Subject* s) { return (V4Subject*)s; }
static Activations* activations_of(Subject* s, Purpose purpose) {
    return purpose == TO_TRAIN ? &of(s)->acts : &of(s)->cache;
}

static Model* layout(Subject* s) {
    Config c;
    ErrorText error;
    if (!config_parse(&c, s->file.config, &error)) { fail_run("%s: %s", s->file.set.path, error.text); }
    deepseek_v4_layout(&of(s)->v4, &c, NULL, c.mtp, c.indexer != INDEXER_OFF);
    return &of(s)->v4.model;  // what does not learn has no gradient and no decay, and so stays
}

// more entries than are chosen; a token takes all experts, so that no rounding chooses others
static Model* layout_long(Subject* s) {
    Config c = config_preset("tiny", LONG_V);
    c.L = 4, c.D = 24, c.H = 2, c.d = 12, c.rotated = 4, c.qr = 10, c.R = 6, c.window = 7, c.csa = 3, c.hca = 5;
    c.nI = 4, c.dI = 8, c.topk = FAST_KERNELS ? 64 : 4, c.E = c.k = 3, c.F = 12, c.iters = 4;
    memcpy(c.kinds, "WCHCW", 6);
    memcpy(c.routers, "TRRRR", 6);
    deepseek_v4_layout(&of(s)->v4, &c, NULL, 0, 0);
    return &of(s)->v4.model;
}

static void open_activations(Subject* s, Purpose purpose, int B, int T) {
    const Tradeoffs how = {s->way.recompute, s->way.head_rows, {1, 0.0f}};
    Activations* acts = activations_of(s, purpose);
    activations_layout(acts, &of(s)->v4, B, T, purpose, how);
    activations_open(acts, &s->model->ranks, &s->dev);
    if (purpose != TO_TRAIN) { return; }
    acts->graph.is_on = s->way.graph;
    acts->batch.counts_all = s->way.graph || s->way.counts_all;
    s->graph = &acts->graph, s->segments = &acts->batch.segments;
    s->tensors = &acts->tensors, s->statistics = &acts->statistics;
    s->choices = &acts->experts.choices;
}

static void close_activations(Subject* s) {
    activations_free(&of(s)->acts);
    if (of(s)->cache.tensors.memory) { activations_free(&of(s)->cache); }
}

// what the MTP module says behind a forward pass
static void mtp_losses(V4Subject* x, const int* inputs, const int* targets, int B) {
    const int T = x->s.file.T, last = x->v4.config.L - 1;
    mtp_batch_take(&x->acts.mtp, &x->acts.batch, inputs, targets, B, T, &x->s.dev);
    mtp_forward(&x->v4, &x->acts, layer_activations(&x->acts, last).streams2.x, B * T, &x->s.dev);
    const LmHead head = mtp_head(&x->v4, &x->acts);
    lm_head_losses(&head, &x->acts.mtp.batch, 0, NULL, 0.0f, B * T, &x->s.dev);
}

static const float* losses(Subject* s, const int* inputs, const int* targets, int B) {
    V4Subject* x = of(s);
    token_batch_inputs(&x->acts.batch, inputs, targets, B, s->file.T, 0, &s->dev);
    x->acts.numbers = dp_numbers(&s->model->dp);  // then indexers have losses, too
    deepseek_v4_forward(&x->v4, &x->acts, B * s->file.T, &s->dev);
    if (x->acts.has_mtp) { mtp_losses(x, inputs, targets, B); }
    x->acts.numbers = NULL;
    const LmHead head = lm_head(&x->v4, &x->acts);
    return lm_head_evaluate(&head, &x->acts.batch, targets, B * s->file.T, &s->dev);
}

// of the update to which these targets belong, what the losses beside that of the next token are divided by
static void count_others(V4Subject* x, const int* targets) {
    const Golden* g = &x->s.file;
    const ptrdiff_t n = g->n_leaves * g->B * g->T;
    const int step = (int)((targets - golden_batch(g, "targets", 0, 0)) / n), rows = g->n_leaves * g->B;
    const int *inputs = golden_batch(g, "inputs", step, 0), *all = golden_batch(g, "targets", step, 0);
    Model* m = &x->v4.model;
    m->mtp_counted = (float)mtp_counted(inputs, all, NO_RESET, rows, g->T);
    if (m->index_ratio > 0) {
        m->index_counted = (float)entries_counted(inputs, all, NO_RESET, m->index_ratio, rows, g->T);
    }
}

static void leaf(void* subject, const int* inputs, const int* targets, float dloss) {
    V4Subject* x = (V4Subject*)subject;
    count_others(x, targets);
    deepseek_v4_leaf(&x->v4, &x->acts, inputs, targets, dloss, x->s.file.B, x->s.file.T, &x->s.dev);
}

static float loss_beside(void* subject) { return more_loss(&((V4Subject*)subject)->v4); }

static void updated(void* subject) {
    V4Subject* x = (V4Subject*)subject;
    level_biases(&x->v4, NULL, &x->s.dev);
}

static void forward_texts(Subject* s, const CachedText* texts, int n) {
    Activations* cache = &of(s)->cache;
    deepseek_v4_forward(&of(s)->v4, cache, token_batch_texts(&cache->batch, texts, n, &s->dev), &s->dev);
}

static void forward(Subject* s, Purpose purpose, const int* tokens, int T, int t0) {
    const CachedText text = {tokens - t0, 0, t0, T, NULL};
    if (purpose == TO_GENERATE) {
        forward_texts(s, &text, 1);
        return;
    }
    token_batch_inputs(&of(s)->acts.batch, tokens, NULL, 1, T, 0, &s->dev);
    deepseek_v4_forward(&of(s)->v4, &of(s)->acts, T, &s->dev);
}

static const floatX* logits(Subject* s, Purpose purpose, int n) {
    const LmHead head = lm_head(&of(s)->v4, activations_of(s, purpose));
    return lm_head_logits(&head, n, 1, &s->dev);
}

static Tolerances tolerances(const Subject* s) {
    const Tolerances fp32 = {1e-5, 1e-3, 1e-2, 1e-5}, bf16 = {3e-2, 0.2, 0.3, 3e-2};
    (void)s;
    return FLOATX_IS_FLOAT ? fp32 : bf16;
}

static const SubjectCalls V4 = {
    .n_bytes = sizeof(V4Subject), .layout = layout, .open = open_activations, .close = close_activations,
    .losses = losses, .leaf = leaf, .updated = updated, .more_loss = loss_beside, .forward = forward,
    .forward_texts = forward_texts, .logits = logits, .tolerances = tolerances, .steps = 0,
};

// ---- golden files: every number of threads; kernels, which take their time on a CPU, once ----

static int skips(Test* t) {
    if (FAST_KERNELS && !FLOATX_IS_FLOAT) { skip(t, "bf16: choices that hang on its rounding"); }
    return FAST_KERNELS && !FLOATX_IS_FLOAT;
}

static void test_text_forward(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !skips(t); i++) {
        subject_check_forward(t, &V4, TEXT, subject_way(test_threads(i), KEEP_ALL), 38, 28);
    }
}

static void test_text(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !skips(t); i++) {
        subject_check_training(t, &V4, TEXT, subject_way(test_threads(i), RECOMPUTE_NORMS));
    }
}

static void test_mtp_forward(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !skips(t); i++) {
        subject_check_forward(t, &V4, MTP_FILE, subject_way(test_threads(i), KEEP_ALL), 43, 36);
    }
}

static void test_mtp(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !skips(t); i++) {
        subject_check_training(t, &V4, MTP_FILE, subject_way(test_threads(i), RECOMPUTE_NORMS));
    }
}

// ---- what must change no bit ----

static void test_recompute(Test* t) {
    Way others[4] = {subject_way(2, RECOMPUTE_NORMS), subject_way(2, RECOMPUTE_EXPERTS),
                     subject_way(2, RECOMPUTE_BLOCKS), subject_way(2, RECOMPUTE_BLOCKS)};
    others[3].head_rows = 5;
#ifdef __CUDACC__  // kernels take their time on a CPU: the level that computes most again, of the model that has most
    subject_check_same(t, &V4, MTP_FILE, subject_way(2, KEEP_ALL), &others[2], 1);
#else
    subject_check_same(t, &V4, TEXT, subject_way(2, KEEP_ALL), others, 4);
    subject_check_same(t, &V4, MTP_FILE, subject_way(2, KEEP_ALL), others, 4);
#endif
}

static void test_documents(Test* t) {
    if (!skips(t)) { subject_check_documents(t, &V4, TEXT, subject_way(3, KEEP_ALL)); }
}

static void test_cache(Test* t) {
    if (!skips(t)) { subject_check_file_cache(t, &V4, TEXT, subject_way(2, KEEP_ALL)); }
    subject_check_long_cache(t, &V4, layout_long, LONG_V);
}

static void test_texts(Test* t) { subject_check_texts(t, &V4, layout_long, LONG_V); }

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden text, forward", "activations of all kinds of layers", test_text_forward},
        {"golden text", "gradients, losses, norms, parameters after 1 and 10 updates", test_text},
        {"golden MTP, forward", "activations of the module that predicts the token after the next", test_mtp_forward},
        {"golden MTP", "the same numbers with it, an indexer that learns, balance, and biases that move", test_mtp},
        {"recompute", "no level and no --head-rows changes a bit", test_recompute},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"cache", "a text position by position has the bits of the whole text", test_cache},
        {"texts", "several side by side have the logits that each has alone", test_texts},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
