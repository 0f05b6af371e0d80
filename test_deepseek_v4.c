/*
train_deepseek_v4.cu against files that dev/ref/deepseek_v4.py, an independent NumPy program, has written: activations,
choices of routers and indexers, losses, norms, gradients, and the parameters after 1 and 10 updates. As C and as exact
CUDA to the last bit. And what must change no bit.
*/
#define TESTING
#include "train_deepseek_v4.cu"
#include "llmc/test/decoder_subject.h"  // DecoderSubject, subject_check_training, ...

// a window alone, CSA, HCA, CSA; tails behind the last entry, more entries than are chosen, YaRN, a table of choices
static const char* const TEXT = "dev/golden/deepseek_v4_text.safetensors";
// HCA, CSA, MTP; the indexer learns, balance of sequences, biases that move, two leaves of an update
static const char* const MTP_FILE = "dev/golden/deepseek_v4_mtp.safetensors";

enum { LONG_V = 40 };  // vocabulary of the model for long texts

typedef struct {
    DecoderSubject d;  // first
    DeepseekV4 v4;
} V4Subject;

static V4Subject* of(Subject* s) { return (V4Subject*)s; }

static Model* layout(Subject* s) {
    Config c;
    ErrorText error;
    if (!config_parse(&c, s->file.config, &error)) { fail_run("%s: %s", s->file.set.path, error.text); }
    deepseek_v4_layout(&of(s)->v4, &c, NULL, c.aux.mtp, c.aux.indexer != INDEXER_OFF);
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

// what the MTP module says behind a forward pass
static void evaluate_mtp(V4Subject* x, const int* inputs, const int* targets, int B) {
    const int T = x->d.s.file.T, last = x->v4.config.L - 1;
    mtp_batch_take(&x->d.acts.mtp, &x->d.acts.batch, inputs, targets, B, T, &x->d.s.dev);
    mtp_forward(&x->v4, &x->d.acts, layer_activations(&x->d.acts, last).streams2.x, B * T, &x->d.s.dev);
    const LmHead head = mtp_lm_head(&x->v4.model, &x->d.acts);
    lm_head_losses(&head, &x->d.acts.mtp.batch, 0, NULL, 0.0f, B * T, &x->d.s.dev);
}

static const float* losses(Subject* s, const int* inputs, const int* targets, int B) {
    V4Subject* x = of(s);
    x->d.acts.numbers = dp_numbers(&s->model->dp);  // then indexers have losses, too
    decoder_subject_batch(s, inputs, targets, B);
    if (x->d.acts.has_mtp) { evaluate_mtp(x, inputs, targets, B); }
    x->d.acts.numbers = NULL;
    return decoder_subject_evaluate(s, targets, B);
}

// of the update to which these targets belong, what the losses beside that of the next token are divided by
static void count_others(V4Subject* x, const int* targets) {
    const Golden* g = &x->d.s.file;
    const ptrdiff_t n = g->n_leaves * g->B * g->T;
    const int step = (int)((targets - golden_batch(g, "targets", 0, 0)) / n), rows = g->n_leaves * g->B;
    const int *inputs = golden_batch(g, "inputs", step, 0), *all = golden_batch(g, "targets", step, 0);
    Model* m = &x->v4.model;
    m->mtp_counted = (float)mtp_counted(inputs, all, NO_RESET, rows, g->T);
    if (m->learns_index) {
        m->index_counted = (float)entries_counted(inputs, all, NO_RESET, m->index_ratio, rows, g->T);
    }
}

static void leaf(void* subject, const int* inputs, const int* targets, float dloss) {
    count_others((V4Subject*)subject, targets);
    decoder_subject_leaf(subject, inputs, targets, dloss);
}

static float loss_beside(void* subject) { return more_loss(&((V4Subject*)subject)->v4); }

static void updated(void* subject) {
    V4Subject* x = (V4Subject*)subject;
    const Config* c = &x->v4.config;
    levelled_biases(&x->v4.model, AT(router), AT(router_bias), c->aux.bias_rate, 0, NULL, c->E, &x->d.s.dev);
}

static Tolerances tolerances(const Subject* s) {
    const Tolerances fp32 = {1e-5, 1e-3, 1e-2, 1e-5}, bf16 = {3e-2, 0.2, 0.3, 3e-2};
    (void)s;
    return FLOATX_IS_FLOAT ? fp32 : bf16;
}

static const SubjectCalls V4 = {
    .n_bytes = sizeof(V4Subject), .layout = layout, .updated = updated, .more_loss = loss_beside, .tolerances = tolerances,
    DECODER_SUBJECT(&PASSES, decoder_subject_close, losses, leaf),
};

// ---- golden files: every number of threads; kernels, which take their time on a CPU, once ----

static void test_text_forward(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_forward(t, &V4, TEXT, subject_way(test_threads(i), KEEP_ALL), 38, 28);
    }
}

static void test_text(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_training(t, &V4, TEXT, subject_way(test_threads(i), RECOMPUTE_NORMS));
    }
}

static void test_mtp_forward(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_forward(t, &V4, MTP_FILE, subject_way(test_threads(i), KEEP_ALL), 43, 36);
    }
}

static void test_mtp(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_training(t, &V4, MTP_FILE, subject_way(test_threads(i), RECOMPUTE_NORMS));
    }
}

// ---- what backward of attention reads on tensor cores ----

// RoPE turns out back in its place, and backward turns it again: each number is rounded twice more
static void check_out(Test* t, const EntryPass* p, int l, const Device* dev) {
    const SparseShape shape = entry_attention_shape_(p);
    const size_t d = (size_t)p->size.d, n = (size_t)p->N * (size_t)p->size.H * d;
    const double allowed = FLOATX_IS_FLOAT ? 0x1p-20 : 0x1p-7;  // of the largest number of a head
    float *read = filled_array(n, NAN), *wrote = filled_array(n, NAN);
    sparse_attention_forward(p->a.dheads, p->s.att_max, p->s.att_inv, p->a.q, p->a.kv, entry_pass_entries_(p), p->sinks,
                             entry_pass_scores_(p) ? p->s.chosen : NULL, &shape, &p->batch->entries.places,
                             entry_pass_windows_(p), dev);
    floatx_download(read, p->a.attention, n, dev);
    floatx_download(wrote, p->a.dheads, n, dev);
    for (size_t i = 0; i < n; i += d) {
        double largest = 0.0, off = 0.0;
        for (size_t c = i; c < i + d; c++) {
            largest = fmax(largest, fabs((double)wrote[c]));
            off = fmax(off, fabs((double)read[c] - wrote[c]));
        }
        check(t, off <= allowed * largest, "layer %d, row %zu: off by %.3g of %.3g", l, i / d, off, largest);
    }
    free(read), free(wrote);
}

static void test_out(Test* t) {
    if (DEVICE_IS_SHARED) {
        skip(t, "CPUs do not read it");
        return;
    }
    Subject* s = subject_open(&V4, TEXT, subject_way(1, KEEP_ALL));
    const GoldenRun run = subject_run(s);
    float loss, norm;
    golden_gradients(&s->file, &run, 0, &loss, &norm);
    for (int l = 0; l < of(s)->v4.config.L; l++) {
        const EntryPass p = entry_pass(&of(s)->v4, &of(s)->d.acts, l, s->file.B * s->file.T);
        check_out(t, &p, l, &s->dev);
    }
    subject_close(s);
}

// ---- what must change no bit ----

static void test_recompute(Test* t) {
    Way others[4] = {subject_way(2, RECOMPUTE_NORMS), subject_way(2, RECOMPUTE_MLPS),
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
    if (!subject_skips_choices(t)) { subject_check_documents(t, &V4, TEXT, subject_way(3, KEEP_ALL)); }
}

static void test_cache(Test* t) {
    if (!subject_skips_choices(t)) { subject_check_file_cache(t, &V4, TEXT, subject_way(2, KEEP_ALL)); }
    subject_check_long_cache(t, &V4, layout_long, LONG_V);
}

// rows that end before an entry of 3 or of 5 tokens does
static void test_short(Test* t) {
    const int tokens[] = {7, 31, 7, 0};
    for (int T = 1; T <= 4; T++) {
        Subject* s = subject_draw(&V4, layout_long, T, subject_way(2, KEEP_ALL));
        subject_check_cache(t, s, tokens, T, 1, LONG_V);
        subject_close(s);
    }
}

static void test_graph(Test* t) {
    if (!subject_skips_choices(t)) { subject_check_graph(t, &V4, TEXT, subject_way(2, RECOMPUTE_NORMS), 1); }
}

static void test_texts(Test* t) { subject_check_texts(t, &V4, layout_long, LONG_V); }

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden text, forward", "activations of all kinds of layers", test_text_forward},
        {"golden text", "gradients, losses, norms, parameters after 1 and 10 updates", test_text},
        {"golden MTP, forward", "activations of the module that predicts the token after the next", test_mtp_forward},
        {"golden MTP", "the same numbers with it, an indexer that learns, balance, and biases that move", test_mtp},
        {"out", "backward has the out that attention wrote, not what RoPE made of it", test_out},
        {"recompute", "no level and no --head-rows changes a bit", test_recompute},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"cache", "a text position by position has the bits of the whole text", test_cache},
        {"short", "rows that end before their first entry", test_short},
        {"graph", "--graph: losses and parameters to the last bit, each leaf one launch", test_graph},
        {"texts", "several side by side have the logits that each has alone", test_texts},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
