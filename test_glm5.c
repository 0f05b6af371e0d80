/*
train_glm5.cu against the files that dev/ref/glm5.py, an independent NumPy program, has written: activations, choices of
the routers and indexers, losses, norms, gradients, and the parameters after 1 and 10 updates, as C and as exact CUDA to
the last bit. What must change no bit. And llmc/models/glm5.h: names, numbers and places of the tensors, from presets and
from config.json.
*/
#define TESTING
#include "train_glm5.cu"
#include "llmc/test/decoder_subject.h"  // DecoderSubject, subject_check_training, ...
#include "llmc/test/testfiles.h"        // temp_folder, temp_path

static const char* const TEXT = "dev/golden/glm5_text.safetensors";
// groups of experts, a second layer without an indexer, MTP, indexers that learn, balance of sequences, biases that move
static const char* const MTP_FILE = "dev/golden/glm5_mtp.safetensors";
enum { LONG_V = 40 };  // vocabulary of the model for long texts

typedef struct {
    DecoderSubject d;  // first
    Glm5 glm;
} GlmSubject;

static GlmSubject* of(Subject* s) { return (GlmSubject*)s; }

static Model* layout(Subject* s) {
    Config c;
    ErrorText error;
    if (!config_parse(&c, s->file.config, &error)) { fail_run("%s: %s", s->file.set.path, error.text); }
    glm5_layout(&of(s)->glm, &c, NULL, c.aux.mtp, c.aux.indexer != INDEXER_OFF);
    return &of(s)->glm.model;
}

// fewer positions are chosen than there are; a token takes all experts, so that no rounding chooses others
static Model* layout_long(Subject* s) {
    Config c = config_preset("tiny", LONG_V);
    c.D = 24, c.H = 2, c.rq = 10, c.r = 9, c.dn = 5, c.dr = 4, c.dv = 7, c.nI = 4, c.dI = 8;
    c.topk = FAST_KERNELS ? 64 : 6;
    c.FD = 20, c.E = c.k = 3, c.F = c.FS = 12;
    memcpy(c.indexers, "FSFSF", 6);
    glm5_layout(&of(s)->glm, &c, NULL, 0, 0);
    return &of(s)->glm.model;
}

// what the MTP module says behind a forward pass
static void evaluate_mtp(GlmSubject* x, const int* inputs, const int* targets, int B) {
    const int T = x->d.s.file.T;
    mtp_batch_take(&x->d.acts.mtp, &x->d.acts.batch, inputs, targets, B, T, &x->d.s.dev);
    const MtpModule module = mtp_module(&x->glm.model, &x->d.acts);
    const LmHead head = mtp_head(module.head, module.a.norm, module.dbranch, module.s.losses);
    mtp_module_forward(&module, &PASSES, &x->d.acts, B * T, &x->d.s.dev);
    lm_head_losses(&head, &x->d.acts.mtp.batch, 0, NULL, 0.0f, B * T, &x->d.s.dev);
}

static const float* losses(Subject* s, const int* inputs, const int* targets, int B) {
    GlmSubject* x = of(s);
    x->d.acts.numbers = dp_numbers(&s->model->dp);  // then indexers have losses, too
    decoder_subject_batch(s, inputs, targets, B);
    if (x->d.acts.has_mtp) { evaluate_mtp(x, inputs, targets, B); }
    x->d.acts.numbers = NULL;
    return decoder_subject_evaluate(s, targets, B);
}

// of the update to which these targets belong, what the losses beside that of the next token are divided by
static void count_others(GlmSubject* x, const int* targets) {
    const Golden* g = &x->d.s.file;
    const ptrdiff_t n = g->n_leaves * g->B * g->T;
    const int step = (int)((targets - golden_batch(g, "targets", 0, 0)) / n), rows = g->n_leaves * g->B;
    const int *inputs = golden_batch(g, "inputs", step, 0), *all = golden_batch(g, "targets", step, 0);
    Model* m = &x->glm.model;
    m->mtp_counted = fmaxf(1.0f, (float)mtp_counted(inputs, all, NO_RESET, rows, g->T));
    m->index_counted = (float)entries_counted(inputs, all, NO_RESET, 1, rows, g->T);
    m->mtp_index_counted = (float)entries_counted(inputs, all, NO_RESET, 2, rows, g->T);
}

static void leaf(void* subject, const int* inputs, const int* targets, float dloss) {
    count_others((GlmSubject*)subject, targets);
    decoder_subject_leaf(subject, inputs, targets, dloss);
}

static float loss_beside(void* subject) { return more_loss(&((GlmSubject*)subject)->glm); }

static void updated(void* subject) {
    GlmSubject* x = (GlmSubject*)subject;
    const Config* c = &x->glm.config;
    levelled_biases(&x->glm.model, AT(router), AT(router_bias), c->aux.bias_rate, 0, NULL, c->E, &x->d.s.dev);
}

static Tolerances tolerances(const Subject* s) {
    const Tolerances fp32 = {1e-5, 1e-3, 1e-2, 1e-5}, bf16 = {3e-2, 0.2, 0.3, 3e-2};
    (void)s;
    return FLOATX_IS_FLOAT ? fp32 : bf16;
}

static const SubjectCalls GLM = {
    .n_bytes = sizeof(GlmSubject), .layout = layout, .updated = updated, .more_loss = loss_beside, .tolerances = tolerances,
    DECODER_SUBJECT(&PASSES, decoder_subject_close, losses, leaf),
};

// ---- golden files: every number of threads; kernels, which take their time on a CPU, once ----

static void check_forward(Test* t, const char* path, int n_tensors, int n_statistics) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_forward(t, &GLM, path, subject_way(test_threads(i), KEEP_ALL), n_tensors, n_statistics);
    }
}

static void check_training(Test* t, const char* path) {
    for (int i = 0; i < N_TEST_THREADS && !subject_skips_choices(t); i++) {
        subject_check_training(t, &GLM, path, subject_way(test_threads(i), RECOMPUTE_NORMS));
    }
}

static void test_text_forward(Test* t) { check_forward(t, TEXT, 26, 13); }
static void test_text(Test* t) { check_training(t, TEXT); }
static void test_mtp_forward(Test* t) { check_forward(t, MTP_FILE, 27, 19); }
static void test_mtp(Test* t) { check_training(t, MTP_FILE); }

// who is on the lists of the first leaf
static void test_chosen(Test* t) {
    const char* const paths[] = {TEXT, MTP_FILE};
    for (int f = 0; f < 2 && !subject_skips_choices(t); f++) {
        Subject* s = subject_open(&GLM, paths[f], subject_way(2, KEEP_ALL));
        const GlmSubject* x = of(s);
        const SafeTensor* expected = golden_tensor(&s->file, "act.index_chosen", DTYPE_I32);
        const size_t T = (size_t)s->file.T, K = (size_t)x->glm.config.topk < T ? (size_t)x->glm.config.topk : T;
        const size_t n = (size_t)s->file.B * T * K;
        int* found = (int*)new_array(n, sizeof(int));
        losses(s, golden_batch(&s->file, "inputs", 0, 0), golden_batch(&s->file, "targets", 0, 0), s->file.B);
        for (int l = 0, i = 0; l < x->glm.config.L; l++) {
            if (x->glm.config.indexers[l] != FULL_INDEXER) { continue; }
            device_download(found, layer_statistics(&x->d.acts, l).attention.chosen, sizeof(int) * n, &s->dev);
            for (size_t k = 0; k < n; k++) { found[k] -= found[k] < 0 ? 0 : (int)(k / (T * K) * T); }  // positions in a row
            check(t, memcmp(found, (const int*)expected->data + n * (size_t)i++, sizeof(int) * n) == 0,
                  "%s: layer %d has chosen others", paths[f], l);
        }
        free(found);
        subject_close(s);
    }
}

// ---- what must change no bit ----

static void test_recompute(Test* t) {
    Way others[4] = {subject_way(2, RECOMPUTE_NORMS), subject_way(2, RECOMPUTE_MLPS), subject_way(2, RECOMPUTE_BLOCKS),
                     subject_way(2, RECOMPUTE_BLOCKS)};
    others[3].head_rows = 5;
#ifdef __CUDACC__  // the level that computes most again, of the model that has most
    subject_check_same(t, &GLM, MTP_FILE, subject_way(2, KEEP_ALL), &others[2], 1);
#else
    subject_check_same(t, &GLM, TEXT, subject_way(2, KEEP_ALL), others, 4);
    subject_check_same(t, &GLM, MTP_FILE, subject_way(2, KEEP_ALL), others, 4);
#endif
}

static void test_documents(Test* t) {
    if (!subject_skips_choices(t)) { subject_check_documents(t, &GLM, TEXT, subject_way(3, KEEP_ALL)); }
}

static void test_graph(Test* t) {
    if (!subject_skips_choices(t)) { subject_check_graph(t, &GLM, TEXT, subject_way(2, RECOMPUTE_NORMS), 2); }
}

static void test_cache(Test* t) {
    if (!subject_skips_choices(t)) { subject_check_file_cache(t, &GLM, TEXT, subject_way(2, KEEP_ALL)); }
    subject_check_long_cache(t, &GLM, layout_long, LONG_V);
}

// logits of a text position by position from short vectors, and those of the whole text: how far they are apart, of the
// largest. The likeliest token is the same, but in bf16, where two may be rounded to one number
static void check_absorbed(Test* t, Subject* s, const int* tokens, int T, int prompt, int V) {
    const double allowed = sizeof(floatX) < sizeof(float) ? 0.05 : 2e-5;
    double most = 0.0;
    of(s)->glm.absorbs = 1;
    s->calls->open(s, TO_GENERATE, 1, T);
    s->calls->forward(s, TO_TRAIN, tokens, T, 0);
    for (int t0 = 0, n = prompt; t0 < T; t0 += n, n = 1) {
        int best_found = 0, best = 0;
        double apart = 0.0;
        s->calls->forward(s, TO_GENERATE, tokens + t0, t0 + n, t0);
        float *found = subject_logits_(s, TO_GENERATE, n - 1, V), *whole = subject_logits_(s, TO_TRAIN, t0 + n - 1, V);
        for (int v = 0; v < V; v++) {
            best_found = found[v] > found[best_found] ? v : best_found, best = whole[v] > whole[best] ? v : best;
            apart = fmax(apart, fabs((double)found[v] - (double)whole[v]));
        }
        apart /= fabs((double)whole[best]);
        most = fmax(most, apart);
        check(t, apart <= allowed && (best_found == best || !FLOATX_IS_FLOAT), "%d positions: %.3g apart, the likeliest token is %d and was %d",
              t0 + n, apart, best_found, best);
        free(found), free(whole);
    }
    check(t, most > 0.0, "all logits are the same: was anything absorbed?");
}

static void test_absorbed(Test* t) {
    enum { T = 70 };
    int tokens[T];
    Subject *s = subject_open(&GLM, TEXT, subject_way(2, KEEP_ALL)), *drawn = subject_draw(&GLM, layout_long, T, subject_way(2, 0));
    for (int i = 0; i < T; i++) { tokens[i] = (int)(splitmix64(5, (uint64_t)i) % LONG_V); }
    if (!subject_skips_choices(t)) {
        check_absorbed(t, s, golden_batch(&s->file, "inputs", 0, 0), s->file.T, 3, golden_int(&s->file, "vocab_size"));
    }
    check_absorbed(t, drawn, tokens, T, 30, LONG_V);
    subject_close(s), subject_close(drawn);
}

static void test_texts(Test* t) { subject_check_texts(t, &GLM, layout_long, LONG_V); }

// ---- sizes and names ----

// tensors on disk, and their elements
typedef struct { int tensors; size_t elements; } Counted;

static Counted counted(const Config* c) {
    Tensor table[MAX_PARAMETERS];
    const int n = parameter_table(table, c);
    Counted x = {0, 0};
    for (int i = 0; i < n; i++) {
        char name[NAME_BYTES];
        x.elements += tensors_disk_count(&table[i], 1);
        for (int k = 0; k < tensor_slices(&table[i]); k++) {
            const int parts = (tensor_slice_name(name, sizeof name, &table[i], k), strchr(name, '{') != NULL);
            x.tensors += 1 + parts;
        }
    }
    return x;
}

// the tiny model of the specification's section 5.1: 232 tensors of transformers 5.23, and 40 numbers of biases
static const char* const TINY =
    "{\"model_type\":\"glm_moe_dsa\",\"vocab_size\":320,\"hidden_size\":64,\"intermediate_size\":96,\"moe_intermediate_size\":52,"
    "\"num_hidden_layers\":7,\"num_attention_heads\":4,\"q_lora_rank\":48,\"kv_lora_rank\":44,\"qk_nope_head_dim\":24,"
    "\"qk_rope_head_dim\":16,\"v_head_dim\":32,\"n_routed_experts\":8,\"num_experts_per_tok\":3,\"first_k_dense_replace\":2,"
    "\"index_topk\":20,\"index_head_dim\":28,\"index_n_heads\":18,\"index_topk_freq\":4,\"index_skip_topk_offset\":2,"
    "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":10000.0},\"max_position_embeddings\":512,\"rms_norm_eps\":1e-5%s}";

// 0 with the reason
static int parse(Config* c, const char* more, ErrorText* error) {
    char text[2048];
    json_error_t at;
    snprintf(text, sizeof text, TINY, more);
    json_t* json = json_parse_bounded(text, strlen(text), JSON_MAX_DEPTH, &at);
    const int good = json && config_parse(c, json, error);
    json_decref(json);
    return good;
}

static void test_counts(Test* t) {
    Config c = config_preset("glm-5.2", 154880);
    const Counted all = counted(&c);
    check(t, all.tensors == 59585 && all.elements == 753329940480u, "GLM-5.2: %d tensors, %zu elements", all.tensors, all.elements);
    c.aux.mtp = 0;
    const Counted trunk = counted(&c);
    check(t, trunk.elements == 743377000704u + 19200u, "without MTP: %zu", trunk.elements);
    ErrorText error;
    if (!check(t, parse(&c, "", &error), "%s", error.text)) { return; }
    const Counted tiny = counted(&c);
    check(t, tiny.tensors == 232 && tiny.elements == 841324u + 40u, "the tiny one: %d tensors, %zu elements", tiny.tensors, tiny.elements);
}

// who has an indexer: by the rule, by a pattern, by a list that says the same
static void test_indexers(Test* t) {
    static const int full[] = {0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74};
    const Config published = config_preset("glm-5.2", 154880), before = config_preset("glm-5", 154880);
    int n = 0;
    for (int l = 0; l < published.L; l++) {
        if (published.indexers[l] != FULL_INDEXER) { continue; }
        check(t, n < 21 && full[n] == l, "GLM-5.2: layer %d has an indexer", l);
        n++;
    }
    check(t, n == 21 && config_source(&published, 77) == 74 && config_source(&published, 6) == 6, "%d have one", n);
    check(t, tensor_kinds(before.indexers, 0, before.L, FULL_INDEXER) == 78, "all layers of GLM-5 have one");
    Config c;
    ErrorText error;
    check(t, parse(&c, "", &error) && strcmp(c.indexers, "FFSSSFSF") == 0 && strcmp(c.mlps, "MMEEEEEE") == 0, "the rule: %s %s", c.indexers, c.mlps);
    check(t, parse(&c, ",\"index_topk_pattern\":\"FSFSFSS\"", &error) && strcmp(c.indexers, "FSFSFSSF") == 0, "a pattern: %s", c.indexers);
    check(t, parse(&c, ",\"index_topk_pattern\":\"FSSSFSS\",\"indexer_types\":[\"full\",\"shared\",\"shared\",\"shared\",\"full\",\"shared\","
                       "\"shared\"]", &error) && strcmp(c.indexers, "FSSSFSSF") == 0, "a list: %s", c.indexers);
}

static void test_refused(Test* t) {
    const struct { const char *more, *says; } cases[] = {
        {",\"index_topk_pattern\":\"SFFFFFF\"", "expected full of layer 0"},
        {",\"index_topk_pattern\":\"FFF\"", "expected 7 letters F or S"},
        {",\"n_group\":3", "expected groups of two experts or more"},
        {",\"n_group\":4,\"topk_group\":1", "\"num_experts_per_tok\": expected at most 2, found 3"},
        {",\"num_experts\":2", "\"n_routed_experts\": expected 2, as \"num_experts\" says, found 8"},
        {",\"index_topk_pattern\":\"FFFFFFF\",\"indexer_types\":[\"full\",\"shared\",\"full\",\"full\",\"full\",\"full\",\"full\"]",
         "\"indexer_types\": expected full of layer 1, as \"index_topk_pattern\" says, found shared"},
        {",\"indexer_types\":[\"full\",\"full\",\"full\",\"shared\",\"shared\",\"full\",\"shared\"]",
         "\"indexer_types\": expected shared of layer 2, as \"index_topk_freq\" says, found full"},
        {",\"qk_head_dim\":48", "\"qk_head_dim\""}, {",\"num_key_value_heads\":2", "\"num_key_value_heads\""},
        {",\"scoring_func\":\"softmax\"", "\"scoring_func\""}, {",\"moe_layer_freq\":2", "\"moe_layer_freq\""},
        {",\"tie_word_embeddings\":true", "\"tie_word_embeddings\""}, {",\"pad_token_id\":320", "\"pad_token_id\""},
        {",\"n_shared_experts\":2000000", "\"n_shared_experts\""}, {",\"rope_scaling\":{\"type\":\"yarn\"}", "\"rope_scaling\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Config c;
        ErrorText error = {""};
        check(t, !parse(&c, cases[i].more, &error) && strstr(error.text, cases[i].says), "%s: \"%s\"", cases[i].more, error.text);
    }
}

// A key that somebody has mistyped is named; the list that they are looked up in has none that nobody reads
static void near_miss(void* path) {
    config_load((const char*)path);
    exit(40);
}

static void no_miss(void* path) {
    config_load((const char*)path);
    warn_line("nothing was said");  // the one line
    exit(40);
}

// more: keys more, or the one of TINY that begins with another letter
static void test_near_miss(Test* t) {
#define FP8 ",\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]"
    const struct { const char *more, *says; } cases[] = {
        {",\"indexer_type\":1", "\"indexer_type\" means nothing here, is it \"indexer_types\"?"},
        {",\"ntopk_group\":1", "is it \"topk_group\"?"}, {",\"mtp_wieght\":1", "is it \"mtp_weight\"?"},
        {",\"Attention_Bias\":true", "is it \"attention_bias\"?"}, {",\"m_group\":1", "is it \"n_group\"?"},
        {",\"m_group\":1,\"n_group\":null", "is it \"n_group\"?"}, {",\"m_group\":1,\"n_group\":1", ""},
        {",\"architectures\":[],\"use_cache\":true,\"ep_size\":1,\"topk\":1", ""},
        {FP8 ",\"fmts\":\"e4m3\"}", "\"fmts\" in \"quantization_config\" means nothing here, is it \"fmt\"?"},
        {FP8 ",\"fmt\":\"e4m3\",\"fmts\":1,\"modules_to_not_convert\":[]}", ""},
        {"rope_type", "\"Xope_type\" in \"rope_parameters\" means nothing here, is it \"rope_type\"?"}};
    TempPath folder = temp_folder();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[2048];
        const int is_more = *cases[i].more == ',', n = snprintf(text, sizeof text, TINY, is_more ? cases[i].more : "");
        if (!is_more) { *strstr(text, cases[i].more) = 'X'; }
        TempPath file = temp_file(&folder, "config.json", text, (size_t)n);
        const int is_said = *cases[i].says != '\0';
        check_exit(t, cases[i].more, is_said ? near_miss : no_miss, file.s, 40, is_said ? cases[i].says : "nothing was said");
    }
#undef FP8
    temp_remove(&folder);
    for (const char* at = CONFIG_OPTIONAL; *at; at += *at == '|') {
        char more[128];
        Config c;
        ErrorText error = {""};
        const int n = (int)strcspn(at, "|");
        snprintf(more, sizeof more, ",\"%.*s\":{\"a\":{}}", n, at);
        at += n;
        if (strstr(more, "\"num_local_experts\"")) { continue; }  // the last of three names that are looked for
        check(t, !parse(&c, more, &error), "%s means nothing", more);
    }
}

// what is written is read again
static void test_saved(Test* t) {
    static const char* const more[] = {
        ",\"num_nextn_predict_layers\":1,\"mtp_weight\":0.25,\"mtp_detach\":true,\"indexer_train\":\"kl\",\"indexer_kl_target\":"
        "\"source_layer\",\"indexer_kl_coeff\":0.5,\"pad_token_id\":7,\"attention_bias\":true,\"indexer_rope_interleave\":false",
        ",\"n_group\":4,\"topk_group\":2,\"norm_topk_prob\":false,\"n_shared_experts\":2,\"latent_norm_eps\":1e-6,"
        "\"seq_balance_coef\":1e-4,\"bias_update_rate\":1e-3,\"routed_scaling_factor\":1.5"};
    TempPath folder = temp_folder(), file = temp_path(&folder, "config.json");
    for (int i = 0; i < 2; i++) {
        Config c, again;
        ErrorText error;
        if (!check(t, parse(&c, more[i], &error), "%s", error.text)) { continue; }
        remove(file.s);
        json_write_doubles(file.s, config_json(&c, 2, "float32"));
        again = config_load(file.s);
        check(t, memcmp(&c, &again, sizeof c) == 0, "case %d: config.json does not come back", i);
    }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden text, forward", "activations", test_text_forward},
        {"golden text", "gradients, losses, norms, parameters after 1 and 10 updates", test_text},
        {"golden MTP, forward", "activations of the module that predicts the token after the next", test_mtp_forward},
        {"golden MTP", "the same numbers with it, indexers that several layers teach, balance, biases that move", test_mtp},
        {"golden, chosen", "who is on the lists of all layers with an indexer", test_chosen},
        {"recompute", "no level and no --head-rows changes a bit", test_recompute},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"cache", "a text position by position has the bits of the whole text", test_cache},
        {"graph", "--graph: losses and parameters to the last bit, each leaf one launch", test_graph},
        {"absorbed", "texts from a cache of short vectors have the same logits but for the last bits", test_absorbed},
        {"texts", "several side by side have the logits that each has alone", test_texts},
        {"counts", "tensors and parameters of the published models, and of a tiny one in transformers", test_counts},
        {"indexers", "which layers have one, by rule, pattern and list", test_indexers},
        {"refused", "config.json that contradicts itself, with the key", test_refused},
        {"near miss", "a key that somebody has mistyped is named", test_near_miss},
        {"saved", "config.json comes back", test_saved},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
