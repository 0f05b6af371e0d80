/*
train_mamba_hpn.c against the files that dev/ref/mamba_hpn.py, an independent NumPy program, has written: every
activation, loss, norm, gradient, and the parameters after 1 and 10 updates, to the last bit, with 1, 2, 3 and 7
threads. And what must change no bit: chunks of the scan, recomputing, documents, states that are carried on, generation
step by step. Whole runs of the trainer are in test_mamba_run.c.
*/
#define TESTING
#include "train_mamba_hpn.c"
#include "llmc/test/golden.h"     // Golden, golden_check_training
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"  // temp_folder

// how a pass is computed, which must not show in its result
typedef struct { int n_threads, chunk; MambaRecompute recompute; } How;

static const How plainly = {2, 4, RECOMPUTE_SCAN};

typedef struct {
    Golden file;
    Mamba mamba;
    Activations acts;
    Device dev;
    char how[64];
} Subject;

static const struct {
    const char* path;
    int n_activations;  // that the trainer keeps, under names of its table
} golden_files[] = {
    {"dev/golden/mamba_ce.safetensors", 15},
    {"dev/golden/mamba_hpn.safetensors", 17},
    {"dev/golden/mamba_softmax.safetensors", 16},
};
enum { N_GOLDEN = 3 };

// a model without a run; parameters are zero
static void mamba_init(Mamba* mamba, const Config* c) {
    memset(mamba, 0, sizeof *mamba);
    mamba_layout(mamba, c);
    model_init(&mamba->model, sizeof(float));
    head_init(&mamba->head, &c->head);
}

static void mamba_free(Mamba* mamba) {
    head_free(&mamba->head);
    second_loss_free(&mamba->ff);
    model_free(&mamba->model);
}

static void subject_open(Subject* s, int number, How how) {
    Config c;
    ErrorText error;
    const char* path = golden_files[number].path;
    Golden* g = &s->file;
    Model* model = &s->mamba.model;
    golden_open(g, path);
    if (!config_parse(&c, g->config, &error)) { fail_run("%s: %s", path, error.text); }
    device_init(&s->dev, how.n_threads);
    mamba_init(&s->mamba, &c);
    model_init_training(model, NULL, g->n_leaves, 0, 0);
    golden_load(g, "param.", model->table, model->n_table, model_floats(model));
    update_prototypes(&s->mamba, &s->dev);
    const Room room = {g->B, g->T, TO_TRAIN, how.recompute, how.chunk};
    activations_init(&s->acts, &c, &room);
    snprintf(s->how, sizeof s->how, "%d threads, chunk %d, recompute %d", how.n_threads, how.chunk, (int)how.recompute);
}

static void subject_close(Subject* s) {
    mamba_free(&s->mamba);
    activations_free(&s->acts);
    device_free(&s->dev);
    golden_close(&s->file);
}

static void subject_leaf(void* subject, const int* inputs, const int* targets, float dloss) {
    Subject* s = (Subject*)subject;
    mamba_leaf(&s->mamba, &s->acts, inputs, targets, dloss, s->file.B, s->file.T, &s->dev);
}

static void subject_updated(void* subject) {
    Subject* s = (Subject*)subject;
    update_prototypes(&s->mamba, &s->dev);
}

static void check_forward(Test* t, Subject* s, int number) {
    const Golden* g = &s->file;
    const Config* c = &s->mamba.config;
    const int N = g->B * g->T, has_softmax = !head_reads_out(c->head.kind);
    const size_t n = (size_t)N * (size_t)c->head.classes;
    mamba_forward(&s->mamba, &s->acts, golden_batch(g, "inputs", 0, 0), g->B, g->T, &s->dev);
    const float* logits = mamba_logits(&s->mamba, &s->acts, 0, N, &s->dev);
    if (has_softmax) { golden_check(t, g, "act.logits", logits, n); }
    const HeadPass pass = head_pass(&s->mamba, &s->acts);
    head_losses(&pass, golden_batch(g, "targets", 0, 0), N, &s->dev);
    if (has_softmax) { golden_check(t, g, "act.probs", logits, n); }
    const TensorArena* kept = &s->acts.tensors;
    golden_check_activations(t, g, kept->table, kept->n_table, (const float*)kept->memory,
                             golden_files[number].n_activations);
}

static void check_training(Test* t, Subject* s, int number) {
    (void)number;
    Model* model = &s->mamba.model;
    const GoldenRun run = {model->table, model->n_table, model->n, &model->dp, model->w, &s->dev, s, subject_leaf,
                           subject_updated, NULL, s->how, GOLDEN_BITS, GOLDEN_BITS, GOLDEN_BITS};
    golden_check_training(t, &s->file, &run);
}

static void check_golden(Test* t, How how, void (*part)(Test*, Subject*, int)) {
#ifdef SYSTEM_LIBM
    (void)how, (void)part;
    skip(t, "a build with other bits");
#else
    for (int i = 0; i < N_GOLDEN; i++) {
        Subject s;
        subject_open(&s, i, how);
        part(t, &s, i);
        subject_close(&s);
    }
#endif
}

static void test_forward(Test* t) {
    for (int i = 0; i < 4; i++) {
        const How how = {test_threads(i), 4, RECOMPUTE_SCAN};
        check_golden(t, how, check_forward);
    }
}

static void test_training(Test* t) {
    for (int i = 0; i < 4; i++) {
        const How how = {test_threads(i), 4, RECOMPUTE_SCAN};
        check_golden(t, how, check_training);
    }
}

static void test_recompute(Test* t) {
    const How how[] = {{2, 1, RECOMPUTE_SCAN}, {2, 3, RECOMPUTE_LAYER}, {2, 5, RECOMPUTE_SCAN},
                       {2, 64, RECOMPUTE_LAYER}};
    for (int i = 0; i < 4; i++) { check_golden(t, how[i], check_training); }
}

// state by state, as text is generated, in pieces of one and more positions, against the whole sequence at once
static void check_generation(Test* t, Subject* s) {
    const int pieces[] = {1, 3, 1, 2, 5, 1, 1, 1, 4};
    const Config* c = &s->mamba.config;
    const int T = s->file.T, *tokens = golden_batch(&s->file, "inputs", 0, 0);
    const size_t n_classes = (size_t)c->head.classes;
    const Room room = {1, 5, TO_GENERATE, RECOMPUTE_SCAN, 4};
    Activations pass;
    activations_init(&pass, c, &room);
    pass.carried = mamba_carried(c, c->L, 1);
    carried_open(&pass.carried, 1);
    carried_clear(&pass.carried, 0, 1, &s->dev);
    mamba_forward(&s->mamba, &s->acts, tokens, 1, T, &s->dev);
    float* whole = copied_array(mamba_logits(&s->mamba, &s->acts, 0, T, &s->dev), (size_t)T * n_classes);
    for (int n = 0, k = 0; n < T; k++) {
        const int n_new = pieces[k] < T - n ? pieces[k] : T - n;
        mamba_forward(&s->mamba, &pass, tokens + n, 1, n_new, &s->dev);
        n += n_new;
        const float* logits = mamba_logits(&s->mamba, &pass, n_new - 1, 1, &s->dev);
        check_bits(t, s->file.set.path, logits, whole + (size_t)(n - 1) * n_classes, n_classes);
        carried_swap(&pass.carried);
    }
    carried_close(&pass.carried);
    free(whole);
    activations_free(&pass);
}

static void test_generation(Test* t) {
    for (int i = 0; i < N_GOLDEN; i++) {
        Subject s;
        subject_open(&s, i, plainly);
        check_generation(t, &s);
        subject_close(&s);
    }
}

// a row of three documents against each of them alone
static void test_documents(Test* t) {
    Subject s;
    subject_open(&s, 0, plainly);
    const int T = s.file.T, V = s.mamba.config.V, starts[] = {0, 4, 9, T}, separator = V - 1;
    int* tokens = (int*)memcpy(new_array((size_t)T, sizeof(int)), golden_batch(&s.file, "inputs", 0, 0),
                               sizeof(int) * (size_t)T);
    for (int i = 0; i < T; i++) { tokens[i] = i == 4 || i == 9 ? separator : tokens[i] % separator; }
    s.acts.document_start = separator;
    mamba_forward(&s.mamba, &s.acts, tokens, 1, T, &s.dev);
    float* packed = copied_array(mamba_logits(&s.mamba, &s.acts, 0, T, &s.dev), (size_t)T * V);
    for (int i = 0; i < 3; i++) {
        const int n = starts[i + 1] - starts[i];
        mamba_forward(&s.mamba, &s.acts, tokens + starts[i], 1, n, &s.dev);
        const float* logits = mamba_logits(&s.mamba, &s.acts, 0, n, &s.dev);
        check_bits(t, "logits", packed + (size_t)starts[i] * V, logits, (size_t)n * V);
    }
    free(tokens);
    free(packed);
    subject_close(&s);
}

// the gradient of the loss of the later part of a row, whose earlier part only left its state; all leaves are alike
static float* carried_gradients(Subject* s) {
    const Config* c = &s->mamba.config;
    const int *tokens = golden_batch(&s->file, "inputs", 0, 0), *targets = golden_batch(&s->file, "targets", 0, 0);
    float loss;
    s->acts.carried = mamba_carried(c, c->L, 1);
    carried_open(&s->acts.carried, 1);
    carried_clear(&s->acts.carried, 0, 1, &s->dev);
    mamba_forward(&s->mamba, &s->acts, tokens, 1, 5, &s->dev);
    carried_swap(&s->acts.carried);
    for (int leaf = 0; leaf < s->file.n_leaves; leaf++) {
        mamba_leaf(&s->mamba, &s->acts, tokens + 5, targets + 5, 0.25f, 1, s->file.T - 5, &s->dev);
    }
    carried_close(&s->acts.carried);
    return dp_reduce(&s->mamba.model.dp, &loss, &s->dev);
}

// equal with any chunk and recompute
static void test_carried(Test* t) {
    const How ways[] = {{1, 64, RECOMPUTE_SCAN}, {2, 2, RECOMPUTE_SCAN}, {3, 3, RECOMPUTE_LAYER}};
    float* expected = NULL;
    for (int i = 0; i < 3; i++) {
        Subject s;
        subject_open(&s, 0, ways[i]);
        const float* grads = carried_gradients(&s);
        if (i == 0) { expected = copied_array(grads, s.mamba.model.n); }
        check_bits(t, "gradients", grads, expected, s.mamba.model.n);
        subject_close(&s);
    }
    free(expected);
}

// ---- Forward-Forward ----

// everything but layer l stays as it is
static void freeze_all_but(Model* model, int l) {
    model->frozen = (int*)new_array((size_t)model->n_slices, sizeof(int));
    for (int i = 0, slice = 0; i < model->n_table; i++) {
        for (int k = 0; k < tensor_slices(&model->table[i]); k++) {
            model->frozen[slice++] = model->table[i].layers == 0 || k != l;
        }
    }
}

// of a batch and of the next, as if that were its corrupted twin: so many of the two are real text
static float* ff_gradients(Subject* s, float threshold, int n_real, float* loss) {
    const Golden* g = &s->file;
    for (int leaf = 0; leaf < 2; leaf++) {
        const int* tokens = golden_batch(g, "inputs", 0, leaf);
        ff_leaf(&s->mamba, &s->acts, tokens, threshold, leaf < n_real, 1.0f, g->B, g->T, &s->dev);
    }
    return dp_reduce(&s->mamba.ff.dp, loss, &s->dev);
}

// where the parameters are, and 0 where none is asked for
static float* ff_gradients_whole(Subject* s, float* loss) {
    const Model* model = &s->mamba.model;
    const float* grads = ff_gradients(s, 1.0f, 1, loss);
    float* whole = new_array(model->n, sizeof(float));
    for (int i = 0; i < model->n_table; i++) {
        const size_t n = tensor_slice_elements(&model->table[i]);
        for (int k = 0; k < tensor_slices(&model->table[i]); k++) {
            if (dp_stretch(&s->mamba.ff.dp, i, k) < 0) { continue; }
            const float* from = grads + dp_gradient_at(&s->mamba.ff.dp, i, k);
            memcpy(whole + model->table[i].offset + n * (size_t)k, from, sizeof(float) * n);
        }
    }
    return whole;
}

// the loss with the parameters moved by so many times the gradient
static float ff_loss_at(Subject* s, const float* grads, float distance) {
    float loss, *params = model_floats(&s->mamba.model);
    float* before = copied_array(params, s->mamba.model.n);
    for (size_t i = 0; i < s->mamba.model.n; i++) { params[i] += distance * grads[i]; }
    ff_gradients(s, 1.0f, 1, &loss);
    memcpy(params, before, sizeof(float) * s->mamba.model.n);
    free(before);
    return loss;
}

// layer l learning alone: its gradient is that of its loss, and the same as when all layers learn
static void check_ff_layer(Test* t, const float* all, int l, How how) {
    Subject s;
    float loss;
    double slope = 0.0;
    subject_open(&s, 0, how);
    const Model* model = &s.mamba.model;
    freeze_all_but(&s.mamba.model, l);
    second_loss_open(&s.mamba.ff, &s.mamba.model, NULL, 2);
    float* grads = ff_gradients_whole(&s, &loss);
    for (size_t i = 0; i < model->n; i++) { slope += (double)grads[i] * (double)grads[i]; }
    const float distance = (float)(5e-4 * (double)loss / slope);  // the loss changes by so much of it
    const double expected = 2.0 * (double)distance * slope;
    const double found = (double)ff_loss_at(&s, grads, distance) - (double)ff_loss_at(&s, grads, -distance);
    // 2e-3: the third derivative's part is 6e-4, and four times that at twice the distance; rounding 2^-24 / 5e-4
    check(t, fabs(found / expected - 1.0) < 2e-3,
          "layer %d: expected the loss to change by %g, found %g", l, expected, found);
    for (int i = 0; i < model->n_table; i++) {
        const Tensor* p = &model->table[i];
        const size_t n = tensor_slice_elements(p), first = p->offset + n * (size_t)l;
        if (p->layers > 0) { check_bits(t, p->name, grads + first, all + first, n); }
    }
    free(grads);
    subject_close(&s);
}

static void test_forward_forward(Test* t) {
    const How ways[] = {{1, 64, RECOMPUTE_SCAN}, {2, 2, RECOMPUTE_SCAN}, {3, 3, RECOMPUTE_LAYER}};
    Subject s;
    float loss;
    subject_open(&s, 0, plainly);
    second_loss_open(&s.mamba.ff, &s.mamba.model, NULL, 2);
    const int L = s.mamba.config.L;
    float* all = copied_array(ff_gradients(&s, 1.0f, 1, &loss), s.mamba.model.n);
    // goodness is far below a threshold of 100: that is what a real position loses, and a corrupted one nothing
    for (int n_real = 0; n_real <= 2; n_real++) {
        ff_gradients(&s, 100.0f, n_real, &loss);
        const double each = (double)loss / (L * s.file.B * s.file.T);
        check(t, fabs(each - 100.0 * n_real) < 10.0, "expected a loss of about %d, found %g", 100 * n_real, each);
    }
    subject_close(&s);  // one Device at a time
    for (int i = 0; i < 3; i++) {
        for (int l = 0; l < L; l++) { check_ff_layer(t, all, l, ways[i]); }
    }
    free(all);
}

// ---- models that grow; start values ----

// a layer that joins changes no logit, and its out_proj has a gradient at once
static void test_expansion(Test* t) {
    Subject s;
    Mamba larger;
    Activations acts;
    subject_open(&s, 0, plainly);
    Golden* g = &s.file;
    Config c = s.mamba.config;
    const int old[] = {-1, 0, -1, 1, -1}, N = g->B * g->T, *inputs = golden_batch(g, "inputs", 0, 0),
        *targets = golden_batch(g, "targets", 0, 0);
    mamba_forward(&s.mamba, &s.acts, inputs, g->B, g->T, &s.dev);
    float* before = copied_array(mamba_logits(&s.mamba, &s.acts, 0, N, &s.dev), (size_t)N * c.V);
    c.L = 5;
    mamba_init(&larger, &c);
    Model* model = &larger.model;
    float* params = model_floats(model);
    model_init_training(model, NULL, 1, 0, 0);
    tensors_init(model->table, model->n_table, params, 42);
    mamba_start_values(model->table, model->n_table, &c, params, old);
    tensors_load_layers(&g->set, model->table, model->n_table, "param.", params, old);
    const Room room = {g->B, g->T, TO_TRAIN, RECOMPUTE_SCAN, 4};
    activations_init(&acts, &c, &room);
    mamba_forward(&larger, &acts, inputs, g->B, g->T, &s.dev);
    check_bits(t, "logits", mamba_logits(&larger, &acts, 0, N, &s.dev), before, (size_t)N * c.V);
    mamba_leaf(&larger, &acts, inputs, targets, 1.0f / (float)N, g->B, g->T, &s.dev);
    float loss, *grads = dp_reduce(&model->dp, &loss, &s.dev);
    const Tensor* out_proj = PARAMETER(model->table, model->n_table, out_proj);
    for (int l = 0; l < 5; l++) {
        const size_t n = tensor_slice_elements(out_proj);
        const float* d = grads + out_proj->offset + n * (size_t)l;
        double sum = 0.0;
        for (size_t i = 0; i < n; i++) { sum += fabs((double)d[i]); }
        check(t, sum > 0.0, "out_proj of layer %d has no gradient", l);
    }
    free(before);
    activations_free(&acts);
    mamba_free(&larger);
    subject_close(&s);
}

static double largest(const float* x, int n) {
    double most = 0.0;
    for (int i = 0; i < n; i++) { most = fmax(most, fabs((double)x[i])); }
    return most;
}

// what the start values must be, those of github.com/state-spaces/mamba. old: as in mamba_load, of a model that grows
static void check_start_values(Test* t, const int* old) {
    Mamba mamba;
    const Config c = config_make(300, 3, 32);
    mamba_init(&mamba, &c);
    tensors_init(mamba.model.table, mamba.model.n_table, model_floats(&mamba.model), 7);
    mamba_start_values(mamba.model.table, mamba.model.n_table, &c, model_floats(&mamba.model), old);
    for (int l = 0; l < c.L; l++) {
        const Parameters p = layer_parameters(&mamba, l);
        const double largest_in = largest(p.in_proj, 2 * c.E * c.M), largest_out = largest(p.out_proj, c.M * c.E);
        check(t, largest_in > 0.17 && largest_in <= 1.0 / sqrt(32.0), "in_proj reaches %g", largest_in);
        const int joins = old && old[l] < 0;
        check(t, joins ? largest_out == 0.0 : largest_out > 0.069 && largest_out <= 1.0 / sqrt(64.0 * 3.0) + 1e-7,
              "out_proj reaches %g", largest_out);
        for (int e = 0; e < c.E; e++) {
            const double step = log1p(exp((double)p.dt_bias[e]));
            check(t, step > 0.99e-3 && step < 1.01e-1, "step size %g", step);
            for (int n = 0; n < c.NS; n++) {
                check(t, fabs((double)p.A_log[e * c.NS + n] - log(n + 1.0)) < 1e-6, "A_log of state %d", n);
            }
        }
    }
    mamba_free(&mamba);
}

static void test_start_values(Test* t) {
    const int grown[] = {0, -1, 1};
    check_start_values(t, NULL);
    check_start_values(t, grown);
}

// ---- names and config.json ----

// what is written as config.json is read back
static void test_config(Test* t) {
    TempPath folder = temp_folder(), path = temp_path(&folder, "config.json");
    for (int i = 0; i < N_GOLDEN; i++) {
        Subject s;
        subject_open(&s, i, plainly);
        Config c = s.mamba.config;
        for (int is_classifier = 0; is_classifier < 2; is_classifier++) {  // with as many classes as there are tokens
            c.head.is_classifier = is_classifier;
            c.head.tied = c.head.tied && !is_classifier;
            json_write_doubles(path.s, config_json(&c, 0, "float32"));
            const Config read = config_load(path.s);
            check(t, memcmp(&read, &c, sizeof c) == 0, "%s: other sizes came back", s.file.set.path);
            unlink(path.s);
        }
        subject_close(&s);
    }
    temp_remove(&folder);
}

// the lists of names and their enums
static void test_names(Test* t) {
    const struct { const char *names, *name; int value; } choices[] = {
        {HEAD_NAMES, "ce", HEAD_CE}, {HEAD_NAMES, "hpn", HEAD_HPN}, {HEAD_NAMES, "hpn-softmax", HEAD_HPN_SOFTMAX},
        {PROTO_NAMES, "fixed", PROTO_FIXED}, {PROTO_NAMES, "learn", PROTO_LEARN},
        {TASK_NAMES, "lm", TASK_LM}, {TASK_NAMES, "cls", TASK_CLS},
        {RECOMPUTE_NAMES, "none", RECOMPUTE_NONE}, {RECOMPUTE_NAMES, "scan", RECOMPUTE_SCAN},
        {RECOMPUTE_NAMES, "layer", RECOMPUTE_LAYER},
        {PROTO_INIT_NAMES, "simplex", PROTO_INIT_SIMPLEX}, {PROTO_INIT_NAMES, "orthoplex", PROTO_INIT_ORTHOPLEX},
        {PROTO_INIT_NAMES, "random", PROTO_INIT_RANDOM}, {PROTO_INIT_NAMES, "optimize", PROTO_INIT_OPTIMIZE},
        {PROTO_INIT_NAMES, "a.safetensors", PROTO_INIT_FILE},
    };
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        const int found = choice_find(choices[i].names, choices[i].name);
        check(t, found == choices[i].value, "%s of %s: expected %d, found %d", choices[i].name, choices[i].names,
              choices[i].value, found);
    }
}

// what a config.json with this at its end is refused for
static void check_refused_config(Test* t, const char* end, const char* reason) {
    char text[1024];
    Config c;
    ErrorText error = {""};
    snprintf(text, sizeof text,
             "{\"model_type\": \"mamba\", \"vocab_size\": 7, \"num_hidden_layers\": 1, \"hidden_size\": 8, "
             "\"state_size\": 4, \"conv_kernel\": 4, %s}", end);
    json_t* json = json_loads(text, 0, NULL);
    check(t, json && !config_parse(&c, json, &error) && strstr(error.text, reason), "%s: expected \"%s\", found \"%s\"",
          end, reason, error.text);
    json_decref(json);
}

static void test_refused_config(Test* t) {
    check_refused_config(t, "\"head\": 3", "\"head\": expected ce|hpn");
    check_refused_config(t, "\"head\": \"rt\"", "\"head\": expected ce|hpn|hpn-softmax, found \"rt\"");
    check_refused_config(t, "\"head\": \"hpn\", \"layer\": \"rt\"", "\"layer\": expected mamba1, found \"rt\"");
    check_refused_config(t, "\"head\": \"hpn\", \"proto\": true", "\"proto\": expected fixed|learn");
    check_refused_config(t, "\"head\": \"hpn-softmax\", \"hpn_scale\": \"x\"",
                         "\"hpn_scale\": expected a number above 0");
    check_refused_config(t, "\"head\": \"ce\", \"num_classes\": 0", "\"num_classes\": expected an integer 1..");
    check_refused_config(t, "\"intermediate_size\": 0", "\"intermediate_size\": expected an integer 1..");
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden forward", "every activation of all heads, bit for bit, 1, 2, 3 and 7 threads", test_forward},
        {"golden training", "gradients, loss, norm, parameters after 1 and 10 updates", test_training},
        {"chunks and recomputing", "the same bits with states kept at each position, few or none, layers twice",
         test_recompute},
        {"generation", "logits from carried states, in pieces, equal those of the whole sequence", test_generation},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"carried states", "gradients behind a carried state do not depend on chunks, recomputing and threads",
         test_carried},
        {"Forward-Forward", "a layer's gradient is that of its own loss alone, in any chunks, recomputing and threads",
         test_forward_forward},
        {"expansion", "new layers change no logit and learn from the first step on", test_expansion},
        {"start values", "are those of the reference implementation", test_start_values},
        {"names", "of heads, tasks and what else is chosen stand in the order of their enums", test_names},
        {"config.json", "comes back as it was written", test_config},
        {"config.json refused", "a head, layer or size that makes no sense is named", test_refused_config},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
