/*
Promises of llmc/models/glm5.h: names, numbers and places of the tensors of GLM-5, from presets and from config.json; what
train_glm5.cu computes will be held against dev/ref/glm5.py here.
*/
#include "llmc/models/glm5.h"
#include "llmc/test/test.h"       // check, test_main
#include "llmc/test/testfiles.h"  // temp_folder, temp_path

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
    c.mtp = 0;
    const Counted trunk = counted(&c);
    check(t, trunk.elements == 743377000704u + 19200u, "without MTP: %zu", trunk.elements);
    ErrorText error;
    if (!check(t, parse(&c, "", &error), "%s", error.text)) { return; }
    const Counted tiny = counted(&c);
    check(t, tiny.tensors == 232 && tiny.elements == 841324u + 40u, "the tiny one: %d tensors, %zu elements", tiny.tensors, tiny.elements);
}

// who has an indexer: by the rule, by a pattern, by a list
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
    check(t, config_layers(before.indexers, before.L, FULL_INDEXER) == 78, "all layers of GLM-5 have one");
    Config c;
    ErrorText error;
    check(t, parse(&c, "", &error) && strcmp(c.indexers, "FFSSSFSF") == 0 && strcmp(c.mlps, "MMEEEEEE") == 0, "the rule: %s %s", c.indexers, c.mlps);
    check(t, parse(&c, ",\"index_topk_pattern\":\"FSFSFSS\"", &error) && strcmp(c.indexers, "FSFSFSSF") == 0, "a pattern: %s", c.indexers);
    check(t, parse(&c, ",\"index_topk_pattern\":\"FFFFFFF\",\"indexer_types\":[\"full\",\"shared\",\"shared\",\"shared\",\"full\",\"shared\","
                       "\"shared\"]", &error) && strcmp(c.indexers, "FSSSFSSF") == 0, "a list: %s", c.indexers);
}

static void test_refused(Test* t) {
    const struct { const char *more, *says; } cases[] = {
        {",\"index_topk_pattern\":\"SFFFFFF\"", "expected full of layer 0"},
        {",\"index_topk_pattern\":\"FFF\"", "expected 7 letters F or S"},
        {",\"n_group\":3", "expected groups of two experts or more"},
        {",\"n_group\":4,\"topk_group\":1", "\"num_experts_per_tok\": expected at most 2, found 3"},
        {",\"num_experts\":2", "\"num_experts_per_tok\": expected at most 2, found 3"},
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
        config_save(file.s, &c, 2, "float32");
        again = config_load(file.s);
        check(t, memcmp(&c, &again, sizeof c) == 0, "case %d: config.json does not come back", i);
    }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"counts", "tensors and parameters of the published models, and of a tiny one in transformers", test_counts},
        {"indexers", "which layers have one, by rule, pattern and list", test_indexers},
        {"refused", "config.json that contradicts itself, with the key", test_refused},
        {"saved", "config.json comes back", test_saved},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
