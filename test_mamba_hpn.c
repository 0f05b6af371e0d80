/*
train_mamba_hpn.c against the files that dev/ref/mamba_hpn.py, an independent NumPy program, has written: every activation, loss,
norm, gradient, and the parameters after 1 and 10 updates, to the last bit, with 1, 2, 3 and 7 threads. And what must change no
bit: chunks of the scan, recomputing, documents, states that are carried on, generation step by step.
*/
#define TESTING
#include "train_mamba_hpn.c"
#undef main
#include "llmc/test/test.h"

typedef struct {
    SafeSet set;
    json_t* config;
    Mamba model;
    Activations acts;
    Device dev;
    int B, T, n_leaves;
} Golden;

static const char* const golden_paths[] = {"dev/golden/mamba_ce.safetensors", "dev/golden/mamba_hpn.safetensors",
                                           "dev/golden/mamba_softmax.safetensors", "dev/golden/mamba_rt.safetensors"};
enum { N_GOLDEN = 4 };

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

// how a pass is computed, which must not show in its result
typedef struct { int n_threads, chunk; Recompute recompute; } How;

static void golden_open(Golden* g, const char* path, How how) {
    Config c;
    ErrorText error;
    memset(g, 0, sizeof *g);
    safeset_open(&g->set, path);
    g->config = json_loads(safetensors_meta(g->set.files, "config"), 0, NULL);
    if (!config_parse(&c, g->config, &error)) { fail_run("%s: %s", path, error.text); }
    g->B = golden_int(g, "batch");
    g->T = golden_int(g, "seq_len");
    g->n_leaves = golden_int(g, "leaves");
    device_init(&g->dev, how.n_threads);
    mamba_init(&g->model, &c);
    mamba_init_training(&g->model, NULL, g->n_leaves, 0, 0);
    tensors_load(&g->set, g->model.table, g->model.n_table, "param.", g->model.params);
    update_prototypes(&g->model, &g->dev);
    const Room room = {g->B, g->T, TO_TRAIN, how.recompute, how.chunk};
    activations_init(&g->acts, &c, &room);
}

static void golden_close(Golden* g) {
    mamba_free(&g->model);
    activations_free(&g->acts);
    device_free(&g->dev);
    json_decref(g->config);
    safeset_close(&g->set);
}

// every parameter-shaped tensor with this prefix equals the arena
static void check_arena(Test* t, Golden* g, const char* prefix, const float* arena) {
    const Mamba* model = &g->model;
    float* expected = (float*)arena_alloc(sizeof(float) * model->n, prefix);
    tensors_load(&g->set, model->table, model->n_table, prefix, expected);
    for (int i = 0; i < model->n_table; i++) {
        const Tensor* p = &model->table[i];
        char what[NAME_BYTES];
        snprintf(what, sizeof what, "%s: %s%s, %d threads, chunk %d, recompute %d", g->set.path, prefix, p->name, g->dev.n_threads,
                 g->acts.room.chunk, g->acts.room.recompute);
        check_bits(t, what, arena + p->offset, expected + p->offset, tensor_elements(p));
    }
    arena_free(expected, sizeof(float) * model->n);
}

static void check_one(Test* t, const Golden* g, const char* name, const float* found, size_t n) {
    float* expected = golden_floats(g, name);
    if (check(t, golden_tensor(g, name)->n == n, "%s: %s: another shape", g->set.path, name)) { check_bits(t, name, found, expected, n); }
    free(expected);
}

// those the trainer keeps, by the names of its own table; `out` is one buffer for all layers, whose last is in it
static void check_activations(Test* t, const Golden* g) {
    const int L = g->model.config.L;
    int n_found = 0, n_expected = g->model.config.layer == RT ? 12 : 15;
    for (int i = 0; i < N_ACTIVATIONS; i++) {
        const Tensor* a = &g->acts.table[i];
        char name[NAME_BYTES];
        snprintf(name, sizeof name, "act.%s", a->name);
        if (!safetensors_find(g->set.files, name) || strcmp(a->name, "logits") == 0) { continue; }
        n_found++;
        if (strcmp(a->name, "out") != 0) {
            check_one(t, g, name, g->acts.arena + a->offset, tensor_elements(a));
            continue;
        }
        float* expected = golden_floats(g, name);
        check_bits(t, name, g->acts.arena + a->offset, expected + (size_t)(L - 1) * tensor_elements(a), tensor_elements(a));
        free(expected);
    }
    check(t, n_found >= n_expected, "expected %d activations in %s, found %d", n_expected, g->set.path, n_found);
}

static void check_forward(Test* t, Golden* g) {
    const int *inputs = golden_batch(g, "inputs", 0, 0), *targets = golden_batch(g, "targets", 0, 0), N = g->B * g->T;
    const size_t n = (size_t)N * g->model.config.classes;
    const int has_softmax = !head_reads_out(g->model.config.head);
    mamba_forward(&g->model, &g->acts, inputs, g->B, g->T, &g->dev);
    const float* logits = mamba_logits(&g->model, &g->acts, 0, N, &g->dev);
    if (has_softmax) { check_one(t, g, "act.logits", logits, n); }
    mamba_loss(&g->model, &g->acts, targets, N, &g->dev);
    if (has_softmax) { check_one(t, g, "act.probs", logits, n); }
    check_activations(t, g);
}

static void check_training(Test* t, Golden* g) {
    float *losses = golden_floats(g, "loss"), *norms = golden_floats(g, "norm"), *rates = golden_floats(g, "lr");
    const int n_steps = golden_int(g, "steps"), N = g->B * g->T;
    Schedule schedule = schedule_from_name(json_string_value(json_object_get(g->config, "schedule")));
    for (int step = 0; step < n_steps; step++) {
        int counted = 0;
        const int* targets = golden_batch(g, "targets", step, 0);
        for (int n = 0; n < g->n_leaves * N; n++) { counted += targets[n] >= 0; }
        for (int leaf = 0; leaf < g->n_leaves; leaf++) {
            mamba_leaf(&g->model, &g->acts, golden_batch(g, "inputs", step, leaf), targets + (size_t)leaf * N, 1.0f / (float)counted,
                       g->B, g->T, &g->dev);
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
        const Weights w = mamba_weights(&g->model);
        dp_update(&g->model.dp, &w, grads, norm, &o, step + 1, &g->dev);
        update_prototypes(&g->model, &g->dev);
        if (step == 0) { check_arena(t, g, "step1.", g->model.params); }
    }
    check_arena(t, g, "step10.", g->model.params);
    free(losses);
    free(norms);
    free(rates);
}

static void check_golden(Test* t, How how, void (*part)(Test*, Golden*)) {
#if defined(SYSTEM_LIBM) || defined(FAST)
    (void)how, (void)part;
    skip(t, "a build with other bits");
#else
    for (int i = 0; i < N_GOLDEN; i++) {
        Golden g;
        golden_open(&g, golden_paths[i], how);
        part(t, &g);
        golden_close(&g);
    }
#endif
}

static void test_forward(Test* t) {
    const int n_threads[] = {1, 2, 3, 7};
    for (int i = 0; i < 4; i++) {
        const How how = {n_threads[i], 4, RECOMPUTE_SCAN};
        check_golden(t, how, check_forward);
    }
}

static void test_training(Test* t) {
    const int n_threads[] = {1, 2, 3, 7};
    for (int i = 0; i < 4; i++) {
        const How how = {n_threads[i], 4, RECOMPUTE_SCAN};
        check_golden(t, how, check_training);
    }
}

static void test_recompute(Test* t) {
    const How how[] = {{2, 1, RECOMPUTE_SCAN}, {2, 3, RECOMPUTE_LAYER}, {2, 5, RECOMPUTE_SCAN}, {2, 64, RECOMPUTE_LAYER}};
    for (int i = 0; i < 4; i++) { check_golden(t, how[i], check_training); }
}

static const How plainly = {2, 4, RECOMPUTE_SCAN};

// state by state, as text is generated, in pieces of one and more positions, against the whole sequence at once
static void test_generation(Test* t) {
    const int pieces[] = {1, 3, 1, 2, 5, 1, 1, 1, 4};
    for (int i = 0; i < N_GOLDEN; i++) {
        Golden g;
        golden_open(&g, golden_paths[i], plainly);
        const Config* c = &g.model.config;
        const int T = g.T, *tokens = golden_batch(&g, "inputs", 0, 0);
        const size_t n_carried = carried_floats(c, 1);
        Activations pass;
        const Room room = {1, 5, TO_GENERATE, RECOMPUTE_SCAN, 4};
        activations_init(&pass, c, &room);
        float* states = new_array(2 * n_carried, sizeof(float));
        carried_point(&pass.carried, c, 1, states, states + n_carried);
        carried_clear(&pass.carried, c, 0, 1, 1);
        mamba_forward(&g.model, &g.acts, tokens, 1, T, &g.dev);
        float* whole = copied_array(mamba_logits(&g.model, &g.acts, 0, T, &g.dev), (size_t)T * c->classes);
        for (int n = 0, k = 0; n < T; k++) {
            const int n_new = pieces[k] < T - n ? pieces[k] : T - n;
            mamba_forward(&g.model, &pass, tokens + n, 1, n_new, &g.dev);
            n += n_new;
            check_bits(t, g.set.path, mamba_logits(&g.model, &pass, n_new - 1, 1, &g.dev), whole + (size_t)(n - 1) * c->classes, (size_t)c->classes);
            carried_swap(&pass.carried);
        }
        free(states);
        free(whole);
        activations_free(&pass);
        golden_close(&g);
    }
}

// a row of three documents against each of them alone
static void test_documents(Test* t) {
    Golden g;
    golden_open(&g, golden_paths[0], plainly);
    const Config* c = &g.model.config;
    const int T = g.T, starts[] = {0, 4, 9, T}, separator = c->V - 1;
    int* tokens = (int*)memcpy(new_array((size_t)T, sizeof(int)), golden_batch(&g, "inputs", 0, 0), sizeof(int) * (size_t)T);
    for (int i = 0; i < T; i++) { tokens[i] = i == 4 || i == 9 ? separator : tokens[i] % separator; }
    g.acts.document_start = separator;
    mamba_forward(&g.model, &g.acts, tokens, 1, T, &g.dev);
    float* packed = copied_array(mamba_logits(&g.model, &g.acts, 0, T, &g.dev), (size_t)T * c->V);
    for (int i = 0; i < 3; i++) {
        const int n = starts[i + 1] - starts[i];
        mamba_forward(&g.model, &g.acts, tokens + starts[i], 1, n, &g.dev);
        check_bits(t, "logits", packed + (size_t)starts[i] * c->V, mamba_logits(&g.model, &g.acts, 0, n, &g.dev), (size_t)n * c->V);
    }
    free(tokens);
    free(packed);
    golden_close(&g);
}

// the gradient of the loss of the later part of a row, whose earlier part only left its state: equal with any chunk and recompute
static void test_carried(Test* t) {
    const How ways[] = {{1, 64, RECOMPUTE_SCAN}, {2, 2, RECOMPUTE_SCAN}, {3, 3, RECOMPUTE_LAYER}};
    float* expected = NULL;
    for (int i = 0; i < 3; i++) {
        Golden g;
        golden_open(&g, golden_paths[0], ways[i]);
        const Config* c = &g.model.config;
        const int *tokens = golden_batch(&g, "inputs", 0, 0), *targets = golden_batch(&g, "targets", 0, 0);
        const size_t n_carried = carried_floats(c, 1);
        float* states = new_array(2 * n_carried, sizeof(float));
        carried_point(&g.acts.carried, c, 1, states, states + n_carried);
        carried_clear(&g.acts.carried, c, 0, 1, 1);
        mamba_forward(&g.model, &g.acts, tokens, 1, 5, &g.dev);
        carried_swap(&g.acts.carried);
        mamba_leaf(&g.model, &g.acts, tokens + 5, targets + 5, 0.25f, 1, g.T - 5, &g.dev);
        for (int leaf = 1; leaf < g.n_leaves; leaf++) { mamba_leaf(&g.model, &g.acts, tokens + 5, targets + 5, 0.25f, 1, g.T - 5, &g.dev); }
        float loss, *grads = dp_reduce(&g.model.dp, &loss, &g.dev);
        if (i == 0) { expected = copied_array(grads, g.model.n); }
        check_bits(t, "gradients", grads, expected, g.model.n);
        free(states);
        golden_close(&g);
    }
    free(expected);
}

// a layer that joins changes no logit, and its out_proj has a gradient at once
static void test_expansion(Test* t) {
    Golden g;
    Mamba larger;
    Activations acts;
    golden_open(&g, golden_paths[0], plainly);
    Config c = g.model.config;
    const int old[] = {-1, 0, -1, 1, -1}, N = g.B * g.T, *inputs = golden_batch(&g, "inputs", 0, 0), *targets = golden_batch(&g, "targets", 0, 0);
    mamba_forward(&g.model, &g.acts, inputs, g.B, g.T, &g.dev);
    float* before = copied_array(mamba_logits(&g.model, &g.acts, 0, N, &g.dev), (size_t)N * c.V);
    c.L = 5;
    mamba_init(&larger, &c);
    mamba_init_training(&larger, NULL, 1, 0, 0);
    tensors_init(larger.table, larger.n_table, larger.params, 42);
    mamba_start_values(larger.table, larger.n_table, &c, larger.params, old);
    tensors_load_layers(&g.set, larger.table, larger.n_table, "param.", larger.params, old);
    const Room room = {g.B, g.T, TO_TRAIN, RECOMPUTE_SCAN, 4};
    activations_init(&acts, &c, &room);
    mamba_forward(&larger, &acts, inputs, g.B, g.T, &g.dev);
    check_bits(t, "logits", mamba_logits(&larger, &acts, 0, N, &g.dev), before, (size_t)N * c.V);
    mamba_leaf(&larger, &acts, inputs, targets, 1.0f / (float)N, g.B, g.T, &g.dev);
    float loss, *grads = dp_reduce(&larger.dp, &loss, &g.dev);
    for (int l = 0; l < 5; l++) {
        const Parameters d = layer_parameters(&larger, grads, l);
        double sum = 0.0;
        for (int i = 0; i < c.M * c.E; i++) { sum += fabs((double)d.out_proj[i]); }
        check(t, sum > 0.0, "out_proj of layer %d has no gradient", l);
    }
    free(before);
    activations_free(&acts);
    mamba_free(&larger);
    golden_close(&g);
}

// what the start values must be, those of github.com/state-spaces/mamba. old: as in mamba_load, of a model that grows
static void check_start_values(Test* t, const int* old) {
    Mamba model;
    Config c = config_make(300, 3, 32);
    mamba_init(&model, &c);
    tensors_init(model.table, model.n_table, model.params, 7);
    mamba_start_values(model.table, model.n_table, &c, model.params, old);
    for (int l = 0; l < c.L; l++) {
        const Parameters p = layer_parameters(&model, model.params, l);
        double largest_in = 0.0, largest_out = 0.0;
        for (int i = 0; i < 2 * c.E * c.M; i++) { largest_in = fmax(largest_in, fabs((double)p.in_proj[i])); }
        for (int i = 0; i < c.M * c.E; i++) { largest_out = fmax(largest_out, fabs((double)p.out_proj[i])); }
        check(t, largest_in > 0.17 && largest_in <= 1.0 / sqrt(32.0), "in_proj reaches %g", largest_in);
        const int joins = old && old[l] < 0;
        check(t, joins ? largest_out == 0.0 : largest_out > 0.069 && largest_out <= 1.0 / sqrt(64.0 * 3.0) + 1e-7, "out_proj reaches %g",
              largest_out);
        for (int e = 0; e < c.E; e++) {
            const double step = log1p(exp((double)p.dt_bias[e]));
            check(t, step > 0.99e-3 && step < 1.01e-1, "step size %g", step);
            for (int n = 0; n < c.NS; n++) { check(t, fabs((double)p.A_log[e * c.NS + n] - log(n + 1.0)) < 1e-6, "A_log of state %d", n); }
        }
    }
    mamba_free(&model);
}

static void test_start_values(Test* t) {
    const int grown[] = {0, -1, 1};
    check_start_values(t, NULL);
    check_start_values(t, grown);
}

// carried states that have become NaN are as if nothing had gone before, in all micro-batches
static void test_forgotten(Test* t) {
    static Run r;
    Golden g;
    golden_open(&g, golden_paths[0], plainly);
    const Config* c = &g.model.config;
    const size_t n_logits = (size_t)g.B * g.T * c->classes, n = carried_floats(c, g.B);
    const int* tokens = golden_batch(&g, "inputs", 0, 0);
    mamba_forward(&g.model, &g.acts, tokens, g.B, g.T, &g.dev);
    float* expected = copied_array(mamba_logits(&g.model, &g.acts, 0, g.B * g.T, &g.dev), n_logits);
    memset(&r, 0, sizeof r);
    r.model = g.model;
    r.o.batch_size = g.B;
    r.d.carry_state = 1;
    r.n_leaves = 3;
    r.carried.now = filled_array(3 * n, NAN);
    forget_states(&r);
    for (int k = 0; k < r.n_leaves; k++) {
        float* next = new_array(n, sizeof(float));
        carried_point(&g.acts.carried, c, g.B, r.carried.now + n * (size_t)k, next);
        mamba_forward(&g.model, &g.acts, tokens, g.B, g.T, &g.dev);
        check_bits(t, "logits", mamba_logits(&g.model, &g.acts, 0, g.B * g.T, &g.dev), expected, n_logits);
        free(next);
    }
    free(r.carried.now);
    free(expected);
    golden_close(&g);
}

// what is written as config.json is read back
static void test_config(Test* t) {
    const char* path = "build/test_mamba_config.json";
    for (int i = 0; i < N_GOLDEN; i++) {
        Golden g;
        golden_open(&g, golden_paths[i], plainly);
        Config c = g.model.config;
        for (int is_classifier = 0; is_classifier < 2; is_classifier++) {  // with as many classes as there are tokens
            c.is_classifier = is_classifier;
            c.tied = c.tied && !is_classifier;
            config_save(path, &c, 0);
            const Config read = config_load(path);
            check(t, memcmp(&read, &c, sizeof c) == 0, "%s: other sizes came back", g.set.path);
            unlink(path);
        }
        golden_close(&g);
    }
}

// what a config.json with this at its end is refused for
static void check_refused_config(Test* t, const char* end, const char* reason) {
    char text[1024];
    Config c;
    ErrorText error = {""};
    snprintf(text, sizeof text, "{\"model_type\": \"mamba\", \"vocab_size\": 7, \"num_hidden_layers\": 1, \"hidden_size\": 8, "
             "\"state_size\": 4, \"conv_kernel\": 4, %s}", end);
    json_t* json = json_loads(text, 0, NULL);
    check(t, json && !config_parse(&c, json, &error) && strstr(error.text, reason), "%s: expected \"%s\", found \"%s\"", end, reason, error.text);
    json_decref(json);
}

static void test_refused_config(Test* t) {
    check_refused_config(t, "\"head\": 3", "\"head\": expected ce, hpn");
    check_refused_config(t, "\"head\": \"hpn\", \"layer\": \"rtt\"", "\"layer\": expected mamba1 or rt");
    check_refused_config(t, "\"head\": \"hpn\", \"layer\": \"rt\", \"expand\": 2", "as many channels as its width");
    check_refused_config(t, "\"head\": \"hpn\", \"proto\": true", "\"proto\": expected fixed or learn");
    check_refused_config(t, "\"head\": \"hpn-softmax\", \"hpn_scale\": \"x\"", "\"hpn_scale\": expected a number above 0");
    check_refused_config(t, "\"head\": \"ce\", \"num_classes\": 0", "\"num_classes\": expected an integer 1..");
    check_refused_config(t, "\"intermediate_size\": 0", "\"intermediate_size\": expected an integer 1..");
}

// ---- whole runs, each in a process of its own ----

static char work[64] = "build/test_mamba_XXXXXX";

// main with these options, separated by blanks, W/ being the test's folder; one thread, for a child has no others
static void run_trainer(void* options) {
    char text[2048] = "", *argv[64] = {(char*)"train_mamba_hpn"}, *rest = text;
    int argc = 1;
    for (const char *from = (const char*)options; *from && strlen(text) < sizeof text - 64; from++) {
        if (strncmp(from, "W/", 2) == 0) { strcat(text, work); } else { strncat(text, from, 1); }
    }
    for (char* word; (word = strsep(&rest, " "));) { argv[argc++] = word; }
    if (!freopen("/dev/null", "w", stdout)) { fail_run("/dev/null: %s", strerror(errno)); }
    trainer_main(argc, argv);
}

#define START "--threads 1 --model tiny --d-model 8 --d-state 2 --base-layers 2 --batch-size 2 "
static void check_trains(Test* t, const char* options) { check_exit(t, options, run_trainer, (void*)options, 0, ""); }
static void check_refused(Test* t, const char* options, const char* text) { check_exit(t, options, run_trainer, (void*)options, 2, text); }

// W/tokens: numbers 0..6; W/rows: 12 examples of 5 positions, tokens 0..256 and a class 0..2 at the last position
static void write_data(void) {
    char path[PATH_BYTES];
    int inputs[12][5], targets[12][5];
    const int64_t shape[] = {12, 5};
    uint64_t random = 7;
    SafeWriter rows;
    if (!mkdtemp(work)) { fail_run("%s: %s", work, strerror(errno)); }
    FILE* tokens = fopen(path_join(path, work, "tokens"), "w");
    for (int i = 0; i < 600; i++) { fprintf(tokens, "%u ", xorshift_u32(&random) % 7); }
    fclose(tokens);
    for (int i = 0; i < 60; i++) {
        inputs[i / 5][i % 5] = i == 0 ? 256 : (int)(xorshift_u32(&random) % 256);
        targets[i / 5][i % 5] = i % 5 < 4 ? -1 : i / 5 % 3;
    }
    safewriter_init(&rows);
    safewriter_declare(&rows, "inputs", DTYPE_I32, 2, shape);
    safewriter_declare(&rows, "targets", DTYPE_I32, 2, shape);
    safewriter_open(&rows, path_join(path, work, "rows"));
    safewriter_put(&rows, inputs, sizeof inputs);
    safewriter_put(&rows, targets, sizeof targets);
    safewriter_close(&rows);
}

static int same_file(const char* a, const char* b) {
    char command[256];
    snprintf(command, sizeof command, "cmp -s %s/%s %s/%s", work, a, work, b);
    return system(command) == 0;
}

static void test_runs(Test* t) {
    char command[128];
    write_data();
    check_trains(t, START "--seq-len 8 --token-file W/tokens --val-token-file W/tokens --eval-every 0 --head hpn --carry-state --grad-accum 4 --steps 2 "
                 "--run W/carried --embeddings-out W/after");
    check_trains(t, "--threads 1 --from W/carried --eval-only --val-token-file W/tokens --seq-len 8 --batch-size 2 --embeddings-out W/later");
    check(t, same_file("after", "later"), "embeddings behind a state that training has carried");
    check_refused(t, "--resume --run W/carried --steps 3 --batch-size 4 --grad-accum 2", "expected the 2 rows whose states the checkpoint carries, found 4");
    check_refused(t, "--resume --run W/carried --steps 3 --head ce", "a run that goes on keeps it");
    check_trains(t, START "--task cls --train W/rows --steps 1 --run W/classes");
    check_refused(t, "--from W/classes --generate x", "--generate: a classifier has no text");
    check_refused(t, "--from W/classes --token-file W/tokens --seq-len 8", "the model chooses from 3 classes");
    check_refused(t, START "--task cls --train W/rows --steps 1 --sample-every 1", "--sample-every: a classifier has no text");
    check_refused(t, START "--token-file W/tokens --seq-len 8 --grad-accum 1048576 --batch-size 65536", "are more than 2147483647 rows");
    check_refused(t, START "--token-file W/tokens --seq-len 16384 --grad-accum 1 --batch-size 65536", "are more than");
    snprintf(command, sizeof command, "rm -rf %s", work);
    check(t, system(command) == 0, "%s: is still there", work);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden forward", "every activation of all heads and both layers, bit for bit, 1, 2, 3 and 7 threads", test_forward},
        {"golden training", "gradients, loss, norm, parameters after 1 and 10 updates", test_training},
        {"chunks and recomputing", "the same bits with states kept at every position, few or none, and layers computed again", test_recompute},
        {"generation", "logits from carried states, in pieces, equal those of the whole sequence", test_generation},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"carried states", "gradients behind a carried state do not depend on chunks, recomputing and threads", test_carried},
        {"expansion", "new layers change no logit and learn from the first step on", test_expansion},
        {"start values", "are those of the reference implementation", test_start_values},
        {"forgotten states", "after a loss that is not finite every stream begins anew", test_forgotten},
        {"config.json", "comes back as it was written", test_config},
        {"config.json refused", "a head, layer or size that makes no sense is named", test_refused_config},
        {"runs", "states and heads that do not fit a checkpoint are refused, classifiers have no text", test_runs},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
