/*
train_moe.cu against the files that dev/ref/moe.py, an independent NumPy program, has written: activations, choices of the
routers, losses, norms, gradients, and the parameters after 1 and 10 updates. As C and as exact CUDA to the last bit, as
bf16 CUDA within a tolerance.
*/
#define TESTING
#include "train_moe.cu"
#include "llmc/test/decoder_subject.h"  // DecoderSubject, subject_check_training, ...
#include "llmc/test/subject_chat.h"  // subject_check_conversations

static const char* const BASE = "dev/golden/moe_base.safetensors";  // one key/value head, ties, an expert without rows
static const char* const ODD = "dev/golden/moe_odd.safetensors";    // 3 of 5 experts, NTK, tied head, z-loss, 3 leaves
static const char* const BIAS = "dev/golden/moe_bias.safetensors";  // one expert a token, balanced by biases
enum { LONG_V = 40 };  // vocabulary of the model for long texts

typedef struct {
    DecoderSubject d;  // first
    Moe moe;
} MoeSubject;

static MoeSubject* of(Subject* s) { return (MoeSubject*)s; }

static Config golden_config(const Golden* g) {
    Config c = config_make(golden_int(g, "max_position_embeddings"), golden_int(g, "vocab_size"),
                           golden_int(g, "num_hidden_layers"), golden_int(g, "hidden_size"),
                           golden_int(g, "num_attention_heads"), golden_int(g, "num_key_value_heads"),
                           golden_int(g, "head_dim"), golden_int(g, "num_local_experts"),
                           golden_int(g, "num_experts_per_tok"), golden_int(g, "intermediate_size"));
    c.tied = json_is_true(json_object_get(g->config, "tie_word_embeddings"));
    c.eps = golden_float(g, "rms_norm_eps");
    c.rope_base = (double)golden_float(g, "rope_base");
    c.rope_alpha = (double)golden_float(g, "rope_alpha");
    c.balance = choice_find(BALANCE_NAMES, json_string_value(json_object_get(g->config, "balance")));
    c.aux_alpha = golden_float(g, "aux_alpha");
    c.z_lambda = golden_float(g, "z_lambda");
    return c;
}

static Model* layout(Subject* s) {
    moe_layout(&of(s)->moe, golden_config(&s->file));
    return &of(s)->moe.model;
}

// A token takes all experts, so no rounding chooses others
static Model* layout_long(Subject* s) {
    moe_layout(&of(s)->moe, config_make(256, LONG_V, 2, 32, 4, 1, 16, 3, 3, 24));
    return &of(s)->moe.model;
}

static void updated(void* subject) {
    MoeSubject* x = (MoeSubject*)subject;
    if (x->moe.config.balance == BALANCE_BIAS) {
        level_biases(&x->moe, golden_float(&x->d.s.file, "bias_rate"), NULL, &x->d.s.dev);
    }
}

static float more_loss(void* subject) {
    const Moe* moe = &((MoeSubject*)subject)->moe;
    const Routing now = routing_read(&moe->model, moe->config.L, moe->config.E);
    return routing_loss(&moe->config, &now);
}

// bf16 rounds every weight and activation to 2^-9, and where two experts are nearly as good the rounding decides: that
// token's gradient then goes through another expert, and gradients are no longer near. Only odd, whose tokens take
// three of five, has so few such tokens that gradients can be compared
static Tolerances tolerances(const Subject* s) {
    const Tolerances fp32 = {1e-5, 1e-4, 1e-2, 3e-2}, bf16 = {3e-2, 6e-2, 0.3, 3e-2};
    (void)s;
    return FLOATX_IS_FLOAT ? fp32 : bf16;
}

static const SubjectCalls MOE = {
    .n_bytes = sizeof(MoeSubject), .layout = layout, .updated = updated, .more_loss = more_loss, .tolerances = tolerances,
    DECODER_SUBJECT(&PASSES, decoder_subject_close, decoder_subject_losses, decoder_subject_leaf),
};

// every number of threads; kernels, which take their time on a CPU, once
// of base even the ties are gone: parameters are rounded with noise
static void check_golden(Test* t, const char* path, int trains) {
    const int is_bf16 = FAST_KERNELS && !FLOATX_IS_FLOAT;
    if (is_bf16 && (strcmp(path, BASE) == 0 || (trains && strcmp(path, BIAS) == 0))) {
        skip(t, "bf16: choices that hang on its rounding");
        return;
    }
    for (int i = 0; i < N_TEST_THREADS; i++) {
        if (trains) { subject_check_training(t, &MOE, path, subject_way(test_threads(i), RECOMPUTE_NORMS)); }
        else { subject_check_forward(t, &MOE, path, subject_way(test_threads(i), KEEP_ALL), 13, 10); }
    }
}

static void test_base_forward(Test* t) { check_golden(t, BASE, 0); }
static void test_odd_forward(Test* t) { check_golden(t, ODD, 0); }
static void test_bias_forward(Test* t) { check_golden(t, BIAS, 0); }
static void test_base(Test* t) { check_golden(t, BASE, 1); }
static void test_odd(Test* t) { check_golden(t, ODD, 1); }
static void test_bias(Test* t) { check_golden(t, BIAS, 1); }

// ---- what must change no bit ----

static void test_recompute(Test* t) {
    const char* const paths[] = {BASE, ODD, BIAS};
    const int is_bf16 = FAST_KERNELS && !FLOATX_IS_FLOAT;
    Way others[4] = {subject_way(2, RECOMPUTE_NORMS), subject_way(2, RECOMPUTE_MLPS),
                     subject_way(2, RECOMPUTE_BLOCKS), subject_way(2, RECOMPUTE_BLOCKS)};
    others[3].head_rows = 5;  // other roundings of bf16
    for (int f = 0; f < 3; f++) {
        subject_check_same(t, &MOE, paths[f], subject_way(2, KEEP_ALL), others, is_bf16 ? 3 : 4);
    }
}

static void test_cache(Test* t) { subject_check_file_cache(t, &MOE, ODD, subject_way(2, KEEP_ALL)); }
static void test_long_cache(Test* t) { subject_check_long_cache(t, &MOE, layout_long, LONG_V); }
static void test_texts(Test* t) { subject_check_texts(t, &MOE, layout_long, LONG_V); }
static void test_documents(Test* t) { subject_check_documents(t, &MOE, BASE, subject_way(3, KEEP_ALL)); }
static void test_conversations(Test* t) { subject_check_conversations(t, &MOE, BASE, subject_way(3, KEEP_ALL)); }

// routers with huge logits, whose squares overflow
static void test_switched_off(Test* t) {
    Config c = config_preset("tiny", 257);
    const Routing now = {2.0f, INFINITY, 1.0f, 0};
    c.aux_alpha = 0.25f;
    check(t, routing_loss(&c, &now) == 0.5f, "without z-loss the routers add %g", (double)routing_loss(&c, &now));
    c.z_lambda = 0.5f;
    check(t, isinf(routing_loss(&c, &now)), "with it they add %g", (double)routing_loss(&c, &now));
}

// doc/moe.md "Counts and memory": the parameters of the large model, all and those that a token uses
static void test_counts(Test* t) {
    Moe moe;
    memset(&moe, 0, sizeof moe);
    moe_layout(&moe, config_preset("6.9b", 32000));
    size_t all = 0, active = 0;
    for (int i = 0; i < moe.model.n_table; i++) {
        const Tensor* x = &moe.model.table[i];
        const size_t n = tensors_disk_count(x, 1);
        all += n;
        active += x->experts > 0 ? n / (size_t)x->experts * (size_t)moe.config.k : n;
    }
    check(t, all == 6882678528ull && active == 1786599168ull, "%zu parameters, %zu active", all, active);
}

static void test_graph(Test* t) {
    Way recorded = subject_way(2, RECOMPUTE_MLPS);
    recorded.graph = 1;
    subject_check_graph(t, &MOE, ODD, subject_way(2, RECOMPUTE_NORMS), 4);   // three leaves in two places, 4 scales
    subject_check_graph(t, &MOE, BIAS, subject_way(2, RECOMPUTE_NORMS), 6);  // two leaves in two places
    if (!FAST_KERNELS) { subject_check_training(t, &MOE, BIAS, recorded); }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden base, forward", "activations and chosen experts: MQA, two of four experts, ties", test_base_forward},
        {"golden odd, forward", "three of five experts, NTK, head size 10, tied head", test_odd_forward},
        {"golden bias, forward", "one expert a token, chosen with a bias", test_bias_forward},
        {"golden base", "gradients, losses, norms, parameters after 1 and 10 updates", test_base},
        {"golden odd", "three leaves, z-loss, targets that do not count", test_odd},
        {"golden bias", "biases follow the counts of all leaves", test_bias},
        {"recompute", "no level and no --head-rows changes a bit", test_recompute},
        {"key-value cache", "cached logits equal those of the whole sequence", test_cache},
        {"long cache", "the same of 70 positions, the last ones each alone", test_long_cache},
        {"texts", "several side by side have the logits that each has alone", test_texts},
        {"documents", "a packed row gives each document the bits it gets alone", test_documents},
        {"conversations", "several in a row: each position's loss is that of a row of its own", test_conversations},
        {"losses switched off", "a z-loss whose weight is 0 adds nothing, though it is infinite", test_switched_off},
        {"graph", "--graph 1: losses and parameters to the last bit, and each leaf is one launch", test_graph},
        {"counts", "6.9 billion parameters, 1.8 billion active", test_counts},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
