/*
train_qwen36.cu against a file that dev/ref/qwen36.py, an independent NumPy program, has written: activations, choices
of the routers, losses, norms, gradients, and the parameters after 1 and 10 updates. As C and as exact CUDA to the last
bit. And what must change no bit.
*/
#define TESTING
#include "train_qwen36.cu"
#include "llmc/test/decoder_subject.h"  // DecoderSubject, subject_check_training, ...

static const char* const TEXT = "dev/golden/qwen36_text.safetensors";  // linear, full, linear; a row of 67: two chunks
static const char* const MTP_FILE = "dev/golden/qwen36_mtp.safetensors";  // linear, full, MTP; tied head
static const char* const VISION_FILE = "dev/golden/qwen36_vision.safetensors";  // images of three shapes in two rows

enum { LONG_V = 40 };  // vocabulary of the model for long texts

typedef struct {
    DecoderSubject d;  // first
    Qwen36 qwen;
} Qwen36Subject;

static Qwen36Subject* of(Subject* s) { return (Qwen36Subject*)s; }

static Model* layout(Subject* s) {
    Config c;
    ErrorText error;
    if (!config_parse(&c, s->file.config, &error)) { fail_run("%s: %s", s->file.set.path, error.text); }
    c.fused = c.mtp_fused = 1;
    qwen36_layout(&of(s)->qwen, &c, NULL, c.mtp);
    return &of(s)->qwen.model;
}

// a token takes all experts, so that no rounding chooses others
static Model* layout_long(Subject* s) {
    Config c = config_preset("tiny", LONG_V);
    c.L = 3, c.D = 24, c.NH = 2, c.NKV = 1, c.HS = 12, c.rotated = 4, c.Hk = 1, c.Hv = 2, c.DK = c.DV = 8;
    c.E = c.k = 3, c.FE = c.FS = 12;
    memcpy(c.kinds, "LFL", 4);
    qwen36_layout(&of(s)->qwen, &c, NULL, 0);
    return &of(s)->qwen.model;
}

static void close_all(Subject* s) {
    vision_tower_free(&of(s)->qwen.tower);
    image_splice_free(&of(s)->qwen.images);
    decoder_subject_close(s);
}

// what the MTP module says behind a forward pass
static void evaluate_mtp(Qwen36Subject* x, const int* inputs, const int* targets, int B) {
    const int T = x->d.s.file.T;
    mtp_batch_take(&x->d.acts.mtp, &x->d.acts.batch, inputs, targets, B, T, &x->d.s.dev);
    const MtpModule module = mtp_module(&x->qwen.model, &x->d.acts);
    const LmHead head = mtp_head(module.head, module.a.norm, module.dbranch, module.s.losses);
    mtp_module_forward(&module, &PASSES, &x->d.acts, B * T, &x->d.s.dev);
    lm_head_losses(&head, &x->d.acts.mtp.batch, 0, NULL, 0.0f, B * T, &x->d.s.dev);
}

// the images of the leaf to which these targets belong
static void take_images(Qwen36Subject* x, const int* inputs, const int* targets) {
    const Golden* g = &x->d.s.file;
    const size_t k = (size_t)(targets - golden_batch(g, "targets", 0, 0)) / (size_t)(g->B * g->T);
    const SafeTensor *pixels = golden_tensor(g, "pixel_values", DTYPE_F32);
    const SafeTensor *grids = golden_tensor(g, "image_grid_thw", DTYPE_I32);
    const int n = (int)grids->shape[2], P = (int)pixels->shape[2];
    const ImageRows images = {n, (const int*)grids->data + 3 * (size_t)n * k,
                              golden_floats(g, "pixel_values") + (size_t)(P * pixels->shape[3]) * k, P, 0};
    ErrorText error;
    if (!qwen36_images(&x->qwen, &images, inputs, targets, NO_RESET, g->B, g->T, &x->d.s.dev, &error)) {
        fail_run("%s", error.text);
    }
}

static const float* losses(Subject* s, const int* inputs, const int* targets, int B) {
    Qwen36Subject* x = of(s);
    if (x->qwen.config.has_vision) { take_images(x, inputs, targets); }
    decoder_subject_batch(s, inputs, targets, B);
    if (x->d.acts.has_mtp) { evaluate_mtp(x, inputs, targets, B); }
    return decoder_subject_evaluate(s, targets, B);
}

// of the update to which these targets belong, those that count for the MTP module
static void count_mtp(Qwen36Subject* x, const int* targets) {
    const Golden* g = &x->d.s.file;
    const ptrdiff_t n = g->n_leaves * g->B * g->T;
    const int step = (int)((targets - golden_batch(g, "targets", 0, 0)) / n);
    const int *inputs = golden_batch(g, "inputs", step, 0), *all = golden_batch(g, "targets", step, 0);
    x->qwen.model.mtp_counted = (float)mtp_counted(inputs, all, NO_RESET, g->n_leaves * g->B, g->T);
}

static void leaf(void* subject, const int* inputs, const int* targets, float dloss) {
    Qwen36Subject* x = (Qwen36Subject*)subject;
    if (x->d.acts.has_mtp) { count_mtp(x, targets); }
    if (x->qwen.config.has_vision) { take_images(x, inputs, targets); }
    decoder_subject_leaf(subject, inputs, targets, dloss);
}

static float loss_beside(void* subject) { return more_loss(&((Qwen36Subject*)subject)->qwen); }

static Tolerances tolerances(const Subject* s) {
    const Tolerances fp32 = {1e-5, 1e-4, 1e-2, 1e-5}, bf16 = {3e-2, 6e-2, 0.3, 3e-2};
    (void)s;
    return FLOATX_IS_FLOAT ? fp32 : bf16;
}

static const SubjectCalls QWEN36 = {
    .n_bytes = sizeof(Qwen36Subject), .layout = layout, .more_loss = loss_beside, .tolerances = tolerances, .steps = 1,
    DECODER_SUBJECT(&PASSES, close_all, losses, leaf),
};

// ---- golden files: every number of threads; kernels, which take their time on a CPU, once ----

static void test_text_forward(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_forward(t, &QWEN36, TEXT, subject_way(test_threads(i), KEEP_ALL), 30, 16);
    }
}

static void test_text(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_training(t, &QWEN36, TEXT, subject_way(test_threads(i), RECOMPUTE_NORMS));
    }
}

static void test_mtp_forward(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_forward(t, &QWEN36, MTP_FILE, subject_way(test_threads(i), KEEP_ALL), 33, 20);
    }
}

static void test_mtp(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_training(t, &QWEN36, MTP_FILE, subject_way(test_threads(i), RECOMPUTE_NORMS));
    }
}

// of the text, then of the tower
static void test_vision_forward(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        Subject* s = subject_open(&QWEN36, VISION_FILE, subject_way(test_threads(i), KEEP_ALL));
        const VisionTower* tower = &of(s)->qwen.tower;
        s->calls->losses(s, golden_batch(&s->file, "inputs", 0, 0), golden_batch(&s->file, "targets", 0, 0), s->file.B);
        subject_check_choices_(t, s);
        if (!FAST_KERNELS) {
            subject_check_arena_(t, s, s->tensors, 33);
            subject_check_arena_(t, s, &tower->tensors, 12);
            subject_check_arena_(t, s, &tower->statistics, 6);
        }
        subject_close(s);
    }
}

static void test_vision(Test* t) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_training(t, &QWEN36, VISION_FILE, subject_way(test_threads(i), RECOMPUTE_NORMS));
    }
}

// ---- what must change no bit ----

static void test_recompute(Test* t) {
    Way others[4] = {subject_way(2, RECOMPUTE_NORMS), subject_way(2, RECOMPUTE_MLPS),
                     subject_way(2, RECOMPUTE_BLOCKS), subject_way(2, RECOMPUTE_BLOCKS)};
    others[3].head_rows = 5;  // other roundings of bf16
    const int n = FAST_KERNELS && !FLOATX_IS_FLOAT ? 3 : 4;
    subject_check_same(t, &QWEN36, TEXT, subject_way(2, KEEP_ALL), others, n);
    subject_check_same(t, &QWEN36, MTP_FILE, subject_way(2, KEEP_ALL), others, n);
}

static void test_documents(Test* t) {
    if (!subject_skips_choices(t)) { subject_check_documents(t, &QWEN36, TEXT, subject_way(3, KEEP_ALL)); }
}

// the two forms of the delta rule differ by rounding (gated_delta.h), which three linear layers let grow
static void test_steps(Test* t) {
    enum { T = 70 };
    int tokens[T];
    SubjectCalls chunks = QWEN36;
    chunks.steps = 0;
    Subject* s = subject_draw(&chunks, layout_long, T, subject_way(2, KEEP_ALL));
    s->calls->open(s, TO_GENERATE, 1, T);
    for (int i = 0; i < T; i++) { tokens[i] = (int)(splitmix64(3, (uint64_t)i) % LONG_V); }
    float* whole = subject_whole_logits_(s, tokens, T, LONG_V);
    s->calls = &QWEN36;
    float* steps = subject_whole_logits_(s, tokens, T, LONG_V);
    for (int i = 0; i < T; i++) {
        const double limit = FLOATX_IS_FLOAT ? 2e-4 : 0.2;
        golden_compare(t, "logits", steps + i * LONG_V, whole + i * LONG_V, LONG_V, limit);
    }
    free(whole), free(steps);
    subject_close(s);
}

// what row 0 of a batch has seen, from the rows that the tower has just made
static void see(Qwen36Subject* x, TextSight* sight, const int* inputs) {
    const int T = x->d.s.file.T, D = x->qwen.config.D, merge = x->qwen.config.vision.merge;
    const int* grids = (const int*)golden_tensor(&x->d.s.file, "image_grid_thw", DTYPE_I32)->data;
    const floatX* rows = vision_tensors_(&x->qwen.tower, 0).out;
    TextImage list[4];
    TextImages images = {list, 0};
    for (int i = 0; i < T; i++) {
        if (inputs[i] != x->qwen.config.image_token) { continue; }
        const int *g = grids + 3 * images.n, h = g[1] / merge, w = g[2] / merge;
        const TextImage one = {i, h * w, NULL, 0};
        text_sight_add(sight, rows, h, w, D, &x->d.s.dev);
        list[images.n++] = one;
        rows += h * w * D, i += h * w - 1;
    }
    text_sight_place(sight, &images);
}

// A text with two images, piece by piece, has the logits of the whole batch but for rounding, and so has one that begins
// as it does
static void test_sights(Test* t) {
    if (subject_skips_choices(t)) { return; }
    Subject* s = subject_open(&QWEN36, VISION_FILE, subject_way(2, KEEP_ALL));
    Qwen36* qwen = &of(s)->qwen;
    const int T = s->file.T, V = qwen->config.V, D = qwen->config.D, pieces[] = {4, 5, 3, 1};
    const int* inputs = golden_batch(&s->file, "inputs", 0, 0);
    TextSight sights[2];
    float* whole[13];
    memset(sights, 0, sizeof sights);
    s->calls->losses(s, inputs, golden_batch(&s->file, "targets", 0, 0), s->file.B);
    for (int i = 0; i < T; i++) { whole[i] = subject_logits_(s, TO_TRAIN, i, V); }
    qwen->sights = sights;
    see(of(s), &sights[0], inputs);
    text_sight_share(&sights[1], &sights[0], D, &s->dev);
    s->calls->open(s, TO_GENERATE, 2, T);
    for (int row = 0; row < 2; row++) {
        for (int k = 0, t0 = 0; t0 < T; t0 += pieces[k++]) {
            const CachedText text = {inputs, row, t0, t0 + pieces[k], NULL};
            qwen36_place_texts(qwen, &text, 1, &s->dev);
            s->calls->forward_texts(s, &text, 1);
            float* found = subject_logits_(s, TO_GENERATE, pieces[k] - 1, V);
            golden_compare(t, "logits", found, whole[text.n - 1], (size_t)V, FLOATX_IS_FLOAT ? 1e-5 : 0.2);
            free(found);
        }
    }
    for (int i = 0; i < T; i++) { free(whole[i]); }
    for (int i = 0; i < 2; i++) { text_sight_clear(&sights[i], D); }
    qwen->sights = NULL;
    subject_close(s);
}

static void test_texts(Test* t) { subject_check_texts(t, &QWEN36, layout_long, LONG_V); }

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden text, forward", "activations of both kinds of layers", test_text_forward},
        {"golden text", "gradients, losses, norms, parameters after 1 and 10 updates", test_text},
        {"golden MTP, forward", "activations of the module that predicts the token after the next", test_mtp_forward},
        {"golden MTP", "the same numbers with it, with a balance of routers, and two leaves of an update", test_mtp},
        {"golden vision, forward", "activations of the tower, and of a text with images", test_vision_forward},
        {"golden vision", "the same numbers of the whole", test_vision},
        {"recompute", "no level and no --head-rows changes a bit", test_recompute},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"steps", "a text position by position: within rounding of the whole text", test_steps},
        {"sights", "a text with images piece by piece: within rounding of the batch", test_sights},
        {"texts", "several side by side have the logits that each has alone", test_texts},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
