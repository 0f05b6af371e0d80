/*
GLM-5, GLM-5.1 and GLM-5.2: its sizes, a line for each parameter, and the files that hold them. Everything
train_glm5.cu computes loops over these tables.
    Config           the sizes; from a preset, from config.json, and back into one
    config_fit       what only the files say: whether the experts of a layer are one tensor, and whether there is an MTP
                     module
    config_leave_rest  tensors that a model does not have: of an MTP module that is left out
    parameter_table  one line for each parameter: name, shape, start values, decay
A layer has an indexer of its own or takes the choice of the last one before it that has (Config.indexers), and an MLP
or experts (Config.mlps):
    FULL_INDEXER     chooses keys
    SHARED_INDEXER   sees what the last full one has chosen
    MLP_LAYER, EXPERT_LAYER
Where config.json has no list of indexers, a pattern or a rule says them (config_place_indexers_). The MTP module has a
layer of its own, number L, behind all others: a FULL_INDEXER and EXPERT_LAYER, on disk one more layer of the model.
config.json is that of transformers and of the published models. Keys of our own: latent_norm_eps, mtp_weight,
mtp_detach, indexer_train, indexer_kl_coeff, indexer_kl_target, seq_balance_coef, bias_update_rate.
Errors: fail_input names file, key, expected and found.
Source: zai-org/GLM-5; huggingface/transformers 5.23, models/glm_moe_dsa; DeepSeek-AI 2025, arXiv:2512.02556
*/
#ifndef LLMC_GLM5_H
#define LLMC_GLM5_H
#include "../core/choice.h"      // choice_name
#include "../core/jsonfile.h"    // json_read, json_ints, json_choice
#include "../core/tensor.h"      // Tensor: the table of parameters
#include "../files/hf_folder.h"  // HF_WRITTEN_BY, SafeSet, safeset_has_some
#include "../files/tensorfile.h" // SafeSet
#include "../ops/router.h"       // ROUTER_MOST_EXPERTS, ROUTER_MOST_CHOSEN
#include "auxiliary.h"           // Auxiliary
#include "config_parts.h"        // config_padded, config_parse_kinds, config_check_quantized
#include "latent_layer.h"        // FULL_INDEXER, SHARED_INDEXER
#include "rope_theta.h"          // rope_theta_parse

// ---- 1. Config ----

enum { CONFIG_MAX_T = 1 << 24, CONFIG_MAX_LAYERS = 1024, CONFIG_MOST_HEAD = 1024 };
#define TARGET_NAMES "group_average|source_layer"   // of what a choice that several layers see is taught by
typedef enum { TARGET_GROUP, TARGET_SOURCE } IndexerTarget;

typedef struct {
    int max_T;            // longest sequence, 1048576
    int V, Vp;            // vocabulary, 154880; the same, padded to a multiple of 128
    int L, D;             // layers, 78; channels of the residual stream, 6144
    int H;                // heads, 64
    int rq, r;            // channels of the vectors that queries are made of, and keys and values, 2048 and 512
    int dn, dr, dv;       // channels of a head's query and key that do not turn, 192; that do, 64; of its value, 256
    int nI, dI, topk;     // the indexer's heads, 32, channels of each, 128, keys that it chooses, 2048
    int FD;               // width of an MLP, 12288
    int E, k, F;          // experts, 256, of which a token takes 8; width of each, 2048
    int FS;               // width of the shared one, n_shared_experts times F
    int groups, top_groups;  // of experts, of which so many stay; 1: no groups
    int renormalize;      // weights of the chosen experts add up to the factor
    int biased;           // what makes both vectors, and the outputs, have a bias
    int halves;           // pairs of the indexer's channels that turn are x[i] and x[i + dr / 2], not neighbours
    int pad;              // the token that fills, whose row of the embedding does not learn; -1: none
    int fused;            // the files have the experts of a layer as one tensor
    int mtp_detach;       // the loss of the token after the next reaches parameters of its module alone
    int target;           // IndexerTarget
    float eps, latent_eps;  // of all norms, 1e-5, but for those of both vectors
    float factor;         // of the weights that experts have, 2.5
    float index_weight;   // of the indexers' loss in their gradient
    Auxiliary aux;        // what is learnt beside the next token
    double theta;         // RoPE's base, 8e6
    char indexers[CONFIG_MAX_LAYERS + 2], mlps[CONFIG_MAX_LAYERS + 2];  // of each layer; then of MTP's
    char mtp_prefix[32];  // what names of MTP's tensors begin with
} Config;

// the layer that has chosen what layer l sees
static inline int config_source(const Config* c, int l) {
    while (c->indexers[l] != FULL_INDEXER) { l--; }
    return l;
}

// what a rank has with --tp
static inline Config config_part(const Config* c, int ranks) {
    Config part = *c;
    part.H /= ranks, part.FD /= ranks, part.FS /= ranks, part.Vp /= ranks;
    return part;
}

static inline void config_set_vocabulary_(Config* c, int V) { c->V = V, c->Vp = config_padded(V); }

static inline void config_end_kinds_(Config* c) {
    c->indexers[c->L] = FULL_INDEXER, c->indexers[c->L + 1] = '\0';
    c->mlps[c->L] = EXPERT_LAYER, c->mlps[c->L + 1] = '\0';
    snprintf(c->mtp_prefix, sizeof c->mtp_prefix, "model.layers.%d.", c->L);
}

// which layers have an indexer: each up to number `offset`, and from there on every freq-th
static inline void config_place_indexers_(Config* c, int freq, int offset) {
    for (int l = 0; l < c->L; l++) {
        const int from = l - offset + 1;
        c->indexers[l] = from <= 0 || from % freq == 0 ? FULL_INDEXER : SHARED_INDEXER;
    }
}

// the first n_dense layers have MLPs
static inline void config_place_mlps_(Config* c, int n_dense) {
    for (int l = 0; l < c->L; l++) { c->mlps[l] = l < n_dense ? MLP_LAYER : EXPERT_LAYER; }
}

#define GLM5_PRESETS "tiny, small, glm-5 or glm-5.2"

typedef struct { const char* name; int freq, offset, n_dense; Config c; } Preset;

static inline Config config_preset(const char* name, int V) {
    static const Preset presets[] = {
        {"tiny", 4, 2, 1, {.max_T = 1024, .L = 4, .D = 64, .H = 4, .rq = 48, .r = 32, .dn = 16, .dr = 8, .dv = 24,
          .nI = 8, .dI = 16, .topk = 32, .FD = 128, .E = 8, .k = 2, .F = 32, .FS = 32, .aux = {.bias_rate = 1e-3f},
          .theta = 1e4}},
        {"small", 4, 3, 2, {.max_T = 4096, .L = 8, .D = 512, .H = 8, .rq = 256, .r = 128, .dn = 48, .dr = 16, .dv = 64,
          .nI = 16, .dI = 32, .topk = 256, .FD = 1024, .E = 16, .k = 4, .F = 256, .FS = 256,
          .aux = {.bias_rate = 1e-3f}, .theta = 1e4}},
        {"glm-5", 1, 3, 3, {.max_T = 202752, .L = 78, .D = 6144, .H = 64, .rq = 2048, .r = 512, .dn = 192, .dr = 64,
          .dv = 256, .nI = 32, .dI = 128, .topk = 2048, .FD = 12288, .E = 256, .k = 8, .F = 2048, .FS = 2048,
          .aux = {.mtp = 1}, .theta = 1e6}},
        {"glm-5.2", 4, 3, 3, {.max_T = 1 << 20, .L = 78, .D = 6144, .H = 64, .rq = 2048, .r = 512, .dn = 192, .dr = 64,
          .dv = 256, .nI = 32, .dI = 128, .topk = 2048, .FD = 12288, .E = 256, .k = 8, .F = 2048, .FS = 2048,
          .aux = {.mtp = 1}, .theta = 8e6}},
    };
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(name, presets[i].name) != 0) { continue; }
        Config c = presets[i].c;
        c.groups = c.top_groups = c.renormalize = 1, c.pad = -1, c.factor = 2.5f;
        c.eps = c.latent_eps = 1e-5f, c.index_weight = 1.0f, c.aux.mtp_weight = MTP_WEIGHT;
        config_set_vocabulary_(&c, V);
        config_place_indexers_(&c, presets[i].freq, presets[i].offset);
        config_place_mlps_(&c, presets[i].n_dense);
        config_end_kinds_(&c);
        return c;
    }
    fail_input("--model: expected " GLM5_PRESETS ", found \"%s\"", name);
}

// ---- config.json, read ----

#define INDEXER_TYPES "full|shared"
#define INDEXER_LETTERS "FS"
#define MLP_TYPES "dense|sparse"
#define MLP_LETTERS "ME"

// a text with a letter for each layer, or a list
static inline int config_parse_pattern_(Config* c, const json_t* json, ErrorText* error) {
    static const char key[] = "index_topk_pattern";
    const char* text = json_string_value(json_object_get(json, key));
    if (!text) { return config_parse_kinds(c->indexers, c->L, json, key, "full,F|shared,S", INDEXER_LETTERS, error); }
    if ((int)strlen(text) != c->L || (int)strspn(text, INDEXER_LETTERS) != c->L) {
        return error_set(error, "\"%s\": expected %d letters F or S, one for each layer, found \"%.60s\"", key, c->L,
                         text);
    }
    memcpy(c->indexers, text, (size_t)c->L);
    return 1;
}

// A pattern wins over the rule. Beside "indexer_types" either says the same
static inline int config_parse_indexers_(Config* c, const json_t* json, ErrorText* error) {
    const char *key = "index_skip_topk_offset", *other = NULL;  // that says it beside "indexer_types"
    char expected[CONFIG_MAX_LAYERS];
    int freq = 1, offset = 2;
    const JsonInt rule[] = {{"index_topk_freq", &freq, 1, CONFIG_MAX_LAYERS},
                            {"index_skip_topk_offset", &offset, 0, CONFIG_MAX_LAYERS}};
    for (int i = 0; i < 2; i++) {
        if (!config_is_absent(json, rule[i].key) && !json_ints(json, &rule[i], 1, error)) { return 0; }
    }
    config_place_indexers_(c, freq, offset);
    if (!config_is_absent(json, rule[0].key)) { other = rule[0].key; }
    if (!config_is_absent(json, "index_topk_pattern")) {
        if (!config_parse_pattern_(c, json, error)) { return 0; }
        key = other = "index_topk_pattern";
    }
    if (!config_is_absent(json, "indexer_types")) {
        memcpy(expected, c->indexers, (size_t)c->L);
        key = "indexer_types";
        if (!config_parse_kinds(c->indexers, c->L, json, key, INDEXER_TYPES, INDEXER_LETTERS, error) ||
            (other && !config_kinds_agree(c->indexers, expected, c->L, key, other, INDEXER_TYPES, INDEXER_LETTERS,
                                          error))) {
            return 0;
        }
    }
    return c->indexers[0] == FULL_INDEXER ||
           error_set(error, "\"%s\": expected full of layer 0, before which there is none, found shared", key);
}

// "mlp_layer_types" wins over a number of layers that have MLPs of 3, which transformers writes beside any list; beside
// another number it says the same
static inline int config_parse_mlps_(Config* c, const json_t* json, ErrorText* error) {
    enum { USUAL_DENSE = 3 };
    static const char key[] = "mlp_layer_types";
    char expected[CONFIG_MAX_LAYERS];
    int n_dense = USUAL_DENSE;
    const JsonInt dense[] = {{"first_k_dense_replace", &n_dense, 0, 1 << 20}};
    if (!config_is_absent(json, dense[0].key) && !json_ints(json, dense, 1, error)) { return 0; }
    config_place_mlps_(c, n_dense);
    memcpy(expected, c->mlps, (size_t)c->L);
    return config_is_absent(json, key) ||
           (config_parse_kinds(c->mlps, c->L, json, key, MLP_TYPES, MLP_LETTERS, error) &&
            (n_dense == USUAL_DENSE ||
             config_kinds_agree(c->mlps, expected, c->L, key, dense[0].key, MLP_TYPES, MLP_LETTERS, error)));
}

// experts: their number under one of three keys, or the same under several, groups, and how wide the shared one is
static inline int config_parse_experts_(Config* c, const json_t* json, ErrorText* error) {
    static const char* const keys[] = {"num_experts", "n_routed_experts", "num_local_experts"};
    int n_shared = 1;
    const char* key = keys[1];
    c->groups = c->top_groups = c->renormalize = 1;
    for (int i = 2; i >= 0; i--) { key = config_is_absent(json, keys[i]) ? key : keys[i]; }
    const JsonInt more[] = {{"n_shared_experts", &n_shared, 1, 1 << 12}, {"n_group", &c->groups, 1, 1 << 12},
                            {"topk_group", &c->top_groups, 1, 1 << 12}};
    for (int i = 0; i < 3; i++) {
        if (!config_parse_either(&c->E, ROUTER_MOST_EXPERTS, json, key, json, keys[i], error)) { return 0; }
    }
    for (int i = 0; i < 3; i++) {
        if (!config_is_absent(json, more[i].key) && !json_ints(json, &more[i], 1, error)) { return 0; }
    }
    if (!json_switch(&c->renormalize, json, "norm_topk_prob", error)) { return 0; }
    if ((int64_t)n_shared * c->F > 1 << 22) {
        return error_set(error, "\"n_shared_experts\": expected at most %d, each %d wide, found %d", (1 << 22) / c->F,
                         c->F, n_shared);
    }
    c->FS = n_shared * c->F;
    if (c->groups > 1 && (c->E % c->groups != 0 || c->E / c->groups < 2 || c->top_groups > c->groups)) {
        return error_set(error, "\"n_group\": expected groups of two experts or more, all alike, of which "
                         "\"topk_group\" %d stay, found %d of %d experts", c->top_groups, c->groups, c->E);
    }
    const int most = c->groups > 1 ? c->E / c->groups * c->top_groups : c->E;
    return c->k <= most || error_set(error, "\"num_experts_per_tok\": expected at most %d, found %d", most, c->k);
}

static inline int config_parse_training_(Config* c, const json_t* json, ErrorText* error) {
    double index = 1.0;
    if (!auxiliary_parse(&c->aux, 1, json, error) || !json_switch(&c->mtp_detach, json, "mtp_detach", error) ||
        !json_number(&index, json, "indexer_kl_coeff", 0.0, 1e3, error) ||
        !json_choice(&c->target, json, "indexer_kl_target", TARGET_NAMES, error)) {
        return 0;
    }
    c->index_weight = (float)index;
    return 1;
}

static inline int config_parse_numbers_(Config* c, const json_t* json, ErrorText* error) {
    double eps = 1e-5, latent_eps = 0.0, factor = 2.5;
    int neighbours = 1;
    const JsonInt pad[] = {{"pad_token_id", &c->pad, 0, c->V - 1}};
    c->pad = -1;
    if (!json_number(&eps, json, "rms_norm_eps", 1e-12, 0.1, error) ||
        !json_number(&latent_eps, json, "latent_norm_eps", 1e-12, 0.1, error) ||
        !json_number(&factor, json, "routed_scaling_factor", 1e-6, 1e6, error) ||
        !json_switch(&neighbours, json, "indexer_rope_interleave", error) ||
        !json_switch(&c->biased, json, "attention_bias", error) ||
        (!config_is_absent(json, pad[0].key) && !json_ints(json, pad, 1, error))) {
        return 0;
    }
    c->eps = (float)eps, c->latent_eps = latent_eps > 0.0 ? (float)latent_eps : c->eps, c->factor = (float)factor;
    c->halves = !neighbours;
    return 1;
}

static inline int config_check_sizes_(const Config* c, ErrorText* error) {
    if (c->dr % 2 != 0 || c->dr > c->dI) {
        return error_set(error, "\"qk_rope_head_dim\": expected an even number up to \"index_head_dim\" %d, found %d",
                         c->dI, c->dr);
    }
    if (c->dn + c->dr > CONFIG_MOST_HEAD) {
        return error_set(error, "\"qk_nope_head_dim\": expected at most %d beside \"qk_rope_head_dim\" %d, found %d",
                         CONFIG_MOST_HEAD - c->dr, c->dr, c->dn);
    }
    return 1;
}

static inline int config_parse(Config* c, const json_t* json, ErrorText* error) {
    int type = -1;
    memset(c, 0, sizeof *c);
    const JsonInt sizes[] = {
        {"max_position_embeddings", &c->max_T, 1, CONFIG_MAX_T}, {"vocab_size", &c->V, 1, 1 << 24},
        {"num_hidden_layers", &c->L, 1, CONFIG_MAX_LAYERS}, {"hidden_size", &c->D, 1, 1 << 20},
        {"num_attention_heads", &c->H, 1, 1 << 12}, {"q_lora_rank", &c->rq, 1, 1 << 20},
        {"kv_lora_rank", &c->r, 1, 1 << 20}, {"qk_nope_head_dim", &c->dn, 1, CONFIG_MOST_HEAD},
        {"qk_rope_head_dim", &c->dr, 2, CONFIG_MOST_HEAD}, {"v_head_dim", &c->dv, 1, CONFIG_MOST_HEAD},
        {"index_n_heads", &c->nI, 1, 1 << 12}, {"index_head_dim", &c->dI, 2, CONFIG_MOST_HEAD},
        {"index_topk", &c->topk, 1, CONFIG_MAX_T}, {"intermediate_size", &c->FD, 1, 1 << 22},
        {"moe_intermediate_size", &c->F, 1, 1 << 22}, {"num_experts_per_tok", &c->k, 1, ROUTER_MOST_CHOSEN}};
    if (!json_choice(&type, json, "model_type", "glm_moe_dsa", error)) { return 0; }
    if (type < 0) { return error_set(error, "\"model_type\": expected glm_moe_dsa, found nothing"); }
    if (!config_check_quantized(json, error) || !json_ints(json, sizes, sizeof sizes / sizeof sizes[0], error)) {
        return 0;
    }
    config_set_vocabulary_(c, c->V);
    if (!config_check_sizes_(c, error) || !config_parse_experts_(c, json, error) ||
        !config_parse_indexers_(c, json, error) || !config_parse_mlps_(c, json, error) ||
        !rope_theta_parse(&c->theta, json, "only RoPE of rope_type default is read here", error) ||
        !config_parse_numbers_(c, json, error) || !config_parse_training_(c, json, error)) {
        return 0;
    }
    config_end_kinds_(c);
    if (c->theta == 0.0) { return error_set(error, "expected \"rope_theta\" in \"rope_parameters\", found none"); }
    json_t* same = json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:b, s:b, s:b, s:b, s:f}", "scoring_func", "sigmoid",
                             "topk_method", "noaux_tc", "hidden_act", "silu", "num_key_value_heads", c->H,
                             "qk_head_dim", c->dn + c->dr, "moe_layer_freq", 1, "rope_interleave", 1, "mlp_bias", 0,
                             "tie_word_embeddings", 0, "output_router_logits", 0, "attention_dropout", 0.0);
    return json_agrees(json, same, error);
}

// keys that may be left out
#define CONFIG_OPTIONAL \
    "rms_norm_eps|latent_norm_eps|rope_theta|rope_parameters|rope_scaling|attention_bias" \
    "|pad_token_id|indexer_types|index_topk_pattern|index_topk_freq|index_skip_topk_offset" \
    "|indexer_rope_interleave|mlp_layer_types|first_k_dense_replace|n_routed_experts|num_experts" \
    "|num_local_experts|n_shared_experts|n_group|topk_group|norm_topk_prob|routed_scaling_factor" \
    "|mtp_detach|indexer_kl_coeff|indexer_kl_target|quantization_config|scoring_func" \
    "|topk_method|hidden_act|num_key_value_heads|qk_head_dim|moe_layer_freq|rope_interleave|mlp_bias" \
    "|tie_word_embeddings|output_router_logits|attention_dropout" AUXILIARY_KEYS

static inline Config config_load(const char* path) {
    Config c;
    ErrorText error;
    json_t* json = json_read(path);
    if (!config_parse(&c, json, &error)) { fail_input("%s: %s", path, error.text); }
    config_warn_of_near(path, json, CONFIG_OPTIONAL);
    json_decref(json);
    return c;
}

// ---- what the files say ----

// published configs count an MTP module that files of transformers leave out
static inline void config_fit(Config* c, const SafeSet* set) {
    c->aux.mtp = safeset_has_some(set, c->mtp_prefix);
    c->fused = 0;
    for (int i = 0; i < set->n_tensors; i++) {
        c->fused |= strstr(set->by_name[i]->name, ".mlp.experts.gate_up_proj") != NULL;
    }
}

// Of what a file has beside this model: the MTP module, where --mtp 0 leaves it out. The module has no embedding and no
// output matrix of its own, though files may have them once more
static inline void config_leave_rest(const Config* c, SafeSet* set) {
    const size_t n_prefix = strlen(c->mtp_prefix);
    int n = 0;
    for (int i = 0; i < set->n_tensors; i++) {
        const char* name = set->by_name[i]->name;
        if (strncmp(name, c->mtp_prefix, n_prefix) != 0) { continue; }
        const int is_again = strcmp(name + n_prefix, "embed_tokens.weight") == 0 ||
                             strcmp(name + n_prefix, "shared_head.head.weight") == 0;
        if (c->aux.mtp && !is_again) { continue; }
        set->used[i] = 1;
        n += !is_again;
    }
    if (n > 0) {
        warn_alike("%s: %d tensors of the module that predicts the token after the next are left out, as --mtp 0 says: "
                   "keep this folder", set->path, n);
    }
}

// ---- config.json, written ----

// eot: the token that ends a text
static inline json_t* config_json(const Config* c, int eot, const char* dtype) {
    json_t* json = json_pack(
        "{s:s, s:[s], s:s, s:s, s:s, s:f, s:b, s:b, s:b, s:b, s:s, s:s, s:i, s:i, s:i}", "written_by", HF_WRITTEN_BY,
        "architectures", "GlmMoeDsaForCausalLM", "model_type", "glm_moe_dsa", "dtype", dtype, "hidden_act", "silu",
        "attention_dropout", 0.0, "attention_bias", c->biased, "mlp_bias", 0, "tie_word_embeddings", 0,
        "rope_interleave", 1, "scoring_func", "sigmoid", "topk_method", "noaux_tc", "bos_token_id", eot, "eos_token_id",
        eot, "moe_layer_freq", 1);
    json_t* sizes = json_pack(
        "{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i}",
        "max_position_embeddings", c->max_T, "vocab_size", c->V, "num_hidden_layers", c->L, "hidden_size", c->D,
        "num_attention_heads", c->H, "num_key_value_heads", c->H, "q_lora_rank", c->rq, "kv_lora_rank", c->r,
        "qk_nope_head_dim", c->dn, "qk_rope_head_dim", c->dr, "qk_head_dim", c->dn + c->dr, "head_dim", c->dr,
        "v_head_dim", c->dv, "index_n_heads", c->nI, "index_head_dim", c->dI, "index_topk", c->topk,
        "intermediate_size", c->FD, "moe_intermediate_size", c->F, "num_experts_per_tok", c->k);
    json_t* experts = json_pack("{s:i, s:i, s:i, s:i, s:b, s:b, s:f}", "n_routed_experts", c->E, "n_shared_experts",
                                c->FS / c->F, "n_group", c->groups, "topk_group", c->top_groups, "norm_topk_prob",
                                c->renormalize, "indexer_rope_interleave", !c->halves, "routed_scaling_factor",
                                shortest_double(c->factor));
    json_t* numbers = json_pack("{s:f, s:f, s:{s:s, s:f}, s:o}", "rms_norm_eps", shortest_double(c->eps),
                                "latent_norm_eps", shortest_double(c->latent_eps), "rope_parameters", "rope_type",
                                "default", "rope_theta", c->theta, "pad_token_id",
                                c->pad < 0 ? json_null() : json_integer(c->pad));
    json_t* layers = json_pack("{s:o, s:o}", "indexer_types",
                               config_kinds_json(c->indexers, c->L, INDEXER_TYPES, INDEXER_LETTERS), "mlp_layer_types",
                               config_kinds_json(c->mlps, c->L, MLP_TYPES, MLP_LETTERS));
    json_t* training = json_pack("{s:f, s:s}", "indexer_kl_coeff", shortest_double(c->index_weight),
                                 "indexer_kl_target", choice_name(TARGET_NAMES, c->target).s);
    if (c->aux.mtp) { json_object_set_new(training, "mtp_detach", json_boolean(c->mtp_detach)); }
    json_t* const more[] = {sizes, experts, numbers, layers, auxiliary_json(&c->aux), training};
    for (int i = 0; i < 6; i++) {
        json_object_update(json, more[i]);
        json_decref(more[i]);
    }
    return json;
}

// ---- 2. Parameters: one line for each ----

// what a field of the table is called; router_bias is floats in every build
typedef struct {
    float *embedding, *norm1, *q_a, *q_a_bias, *q_norm, *q_b, *kv_a, *kv_a_bias, *kv_norm, *kv_b, *o, *o_bias,
        *index_q, *index_k, *index_norm, *index_norm_bias, *index_proj, *norm2, *gate_up, *down, *router, *router_bias,
        *expert_gate_up, *expert_down, *shared_gate_up, *shared_down, *norm, *head, *mtp_enorm, *mtp_hnorm,
        *mtp_eh_proj, *mtp_norm;
} Parameters;

enum { MAX_LAYER_ROWS = 28, MAX_PARAMETERS = 64 };
#define AT(name) offsetof(Parameters, name)

// module: as adapters know it; NULL: the caller says
static inline Tensor* matrix_row_(Tensor* t, const Config* c, const char* name, size_t at, int rows, int columns,
                                  float std, const char* module) {
    *t = tensor(name, at, c->L, rows, columns, INIT_NORMAL, std, DECAY, AS_IS);
    if (module) { tensor_adaptable(t, module, NULL); }
    return t + 1;
}

static inline Tensor* vector_row_(Tensor* t, const Config* c, const char* name, size_t at, int columns, Init init) {
    *t = tensor(name, at, c->L, 1, columns, init, 0.0f, NO_DECAY, VECTOR);
    return t + 1;
}

#define ON "self_attn."

static inline Tensor* attention_rows_(Tensor* t, const Config* c) {
    const int D = c->D, H = c->H;
    const float scaled = 0.02f / sqrtf(2.0f * (float)c->L);
    t = vector_row_(t, c, "input_layernorm.weight", AT(norm1), D, INIT_ONES);
    t = matrix_row_(t, c, ON "q_a_proj.weight", AT(q_a), c->rq, D, 0.02f, ON "q_a_proj");
    if (c->biased) { t = vector_row_(t, c, ON "q_a_proj.bias", AT(q_a_bias), c->rq, INIT_ZEROS); }
    t = vector_row_(t, c, ON "q_a_layernorm.weight", AT(q_norm), c->rq, INIT_ONES);
    t = matrix_row_(t, c, ON "q_b_proj.weight", AT(q_b), H * (c->dn + c->dr), c->rq, 0.02f, ON "q_b_proj");
    tensor_split(&t[-1], SPLIT_ROWS, H);
    t = matrix_row_(t, c, ON "kv_a_proj_with_mqa.weight", AT(kv_a), c->r + c->dr, D, 0.02f, ON "kv_a_proj_with_mqa");
    if (c->biased) { t = vector_row_(t, c, ON "kv_a_proj_with_mqa.bias", AT(kv_a_bias), c->r + c->dr, INIT_ZEROS); }
    t = vector_row_(t, c, ON "kv_a_layernorm.weight", AT(kv_norm), c->r, INIT_ONES);
    t = matrix_row_(t, c, ON "kv_b_proj.weight", AT(kv_b), H * (c->dn + c->dv), c->r, 0.02f, ON "kv_b_proj");
    tensor_split(&t[-1], SPLIT_ROWS, H);
    t = matrix_row_(t, c, ON "o_proj.weight", AT(o), D, H * c->dv, scaled, ON "o_proj");
    tensor_split(&t[-1], SPLIT_COLUMNS, H);
    if (c->biased) { t = vector_row_(t, c, ON "o_proj.bias", AT(o_bias), D, INIT_ZEROS); }
    return t;
}

// of layers with an indexer of their own
static inline Tensor* indexer_rows_(Tensor* t, const Config* c) {
    Tensor* first = t;
    t = matrix_row_(t, c, ON "indexer.wq_b.weight", AT(index_q), c->nI * c->dI, c->rq, 0.02f, NULL);
    tensor_closed(&t[-1], ON "indexer.wq_b");
    t = matrix_row_(t, c, ON "indexer.wk.weight", AT(index_k), c->dI, c->D, 0.02f, NULL);
    tensor_closed(&t[-1], ON "indexer.wk");
    t = vector_row_(t, c, ON "indexer.k_norm.weight", AT(index_norm), c->dI, INIT_ONES);
    t = vector_row_(t, c, ON "indexer.k_norm.bias", AT(index_norm_bias), c->dI, INIT_ZEROS);
    t = matrix_row_(t, c, ON "indexer.weights_proj.weight", AT(index_proj), c->nI, c->D, 0.02f, NULL);
    tensor_closed(&t[-1], ON "indexer.weights_proj");
    for (; first < t; first++) {
        tensor_in_kinds(first, c->indexers, "F");
        if (c->aux.indexer == INDEXER_OFF) { first->decay = NO_DECAY; }  // nothing trains them
    }
    return t;
}
#undef ON
#define ON "mlp."

static inline Tensor* mlp_rows_(Tensor* t, const Config* c) {
    const float scaled = 0.02f / sqrtf(2.0f * (float)c->L);
    t = matrix_row_(t, c, ON "{gate,up}_proj.weight", AT(gate_up), 2 * c->FD, c->D, 0.02f, ON "{gate,up}_proj");
    tensor_split(&t[-1], SPLIT_ROWS, 0);
    t = matrix_row_(t, c, ON "down_proj.weight", AT(down), c->D, c->FD, scaled, ON "down_proj");
    tensor_split(&t[-1], SPLIT_COLUMNS, 0);
    for (int i = 1; i <= 2; i++) { tensor_in_kinds(&t[-i], c->mlps, "M"); }
    return t;
}

static inline Tensor* expert_rows_of_table_(Tensor* t, const Config* c) {
    const float scaled = 0.02f / sqrtf(2.0f * (float)c->L);
    Tensor* first = t;
    t = matrix_row_(t, c, ON "gate.weight", AT(router), c->E, c->D, 0.02f, NULL);
    tensor_adaptable(&t[-1], NULL, ON "gate.weight");
    t = vector_row_(t, c, ON "gate.e_score_correction_bias", AT(router_bias), c->E, INIT_ZEROS);
    tensor_stored(&t[-1], STORED_F32);
    tensor_counted(&t[-1]);
    t = matrix_row_(t, c, c->fused ? ON "experts.gate_up_proj" : ON "experts.%d.{gate,up}_proj.weight",
                    AT(expert_gate_up), 2 * c->F, c->D, 0.02f, NULL);
    tensor_experts(&t[-1], c->E, c->fused ? FUSED : APART);
    tensor_adaptable(&t[-1], ON "experts.%d.{gate,up}_proj", ON "experts.gate_up_proj");
    t = matrix_row_(t, c, c->fused ? ON "experts.down_proj" : ON "experts.%d.down_proj.weight", AT(expert_down), c->D,
                    c->F, scaled, NULL);
    tensor_experts(&t[-1], c->E, c->fused ? FUSED : APART);
    tensor_adaptable(&t[-1], ON "experts.%d.down_proj", ON "experts.down_proj");
    t = matrix_row_(t, c, ON "shared_experts.{gate,up}_proj.weight", AT(shared_gate_up), 2 * c->FS, c->D, 0.02f,
                    ON "shared_experts.{gate,up}_proj");
    tensor_split(&t[-1], SPLIT_ROWS, 0);
    t = matrix_row_(t, c, ON "shared_experts.down_proj.weight", AT(shared_down), c->D, c->FS, scaled,
                    ON "shared_experts.down_proj");
    tensor_split(&t[-1], SPLIT_COLUMNS, 0);
    for (int i = 1; i <= 2; i++) { tensor_called_as_experts(&t[-i]); }
    for (; first < t; first++) { tensor_in_kinds(first, c->mlps, "E"); }
    return t;
}
#undef ON

// of all layers, or of MTP's, which has an indexer and experts
static inline Tensor* layer_rows_(Tensor* t, const Config* c, int is_mtp) {
    t = indexer_rows_(attention_rows_(t, c), c);
    t = vector_row_(t, c, "post_attention_layernorm.weight", AT(norm2), c->D, INIT_ONES);
    if (!is_mtp && tensor_kinds(c->mlps, 0, c->L, MLP_LAYER) > 0) { t = mlp_rows_(t, c); }
    return is_mtp || tensor_kinds(c->mlps, 0, c->L, EXPERT_LAYER) > 0 ? expert_rows_of_table_(t, c) : t;
}

// Of the MTP module: what it has beside its layer, and that layer, whose adapters nothing would train
static inline Tensor* mtp_rows_(Tensor* t, const Config* c) {
    Tensor rows[MAX_LAYER_ROWS];
    const Tensor* end = layer_rows_(rows, c, 1);
    Tensor* first = t;
    const int D = c->D;
    *t++ = tensor("enorm.weight", AT(mtp_enorm), 0, 1, D, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
    *t++ = tensor("hnorm.weight", AT(mtp_hnorm), 0, 1, D, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
    *t++ = tensor("eh_proj.weight", AT(mtp_eh_proj), 0, D, 2 * D, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    *t++ = tensor("shared_head.norm.weight", AT(mtp_norm), 0, 1, D, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
    for (; first < t; first++) { tensor_under(first, c->mtp_prefix); }
    for (const Tensor* row = rows; row < end; row++) {
        *t++ = tensor_again(row, c->L, "model.layers.%d.");
        tensor_named_from(&t[-1], 0);  // on disk it is one more layer
        t[-1].module = t[-1].parameter = NULL;
    }
    return t;
}

// returns their number: what a model does not have is left out. c must outlive the table
static inline int parameter_table(Tensor* table, const Config* c) {
    Tensor *t = table, *first;
    const int D = c->D;
    *t++ = tensor("model.embed_tokens.weight", AT(embedding), 0, c->Vp, D, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    t[-1].disk_rows = c->V;  // the padding is ours alone
    tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    first = t;
    t = layer_rows_(t, c, 0);
    for (; first < t; first++) { tensor_under(first, "model.layers.%d."); }
    *t++ = tensor("model.norm.weight", AT(norm), 0, 1, D, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
    *t++ = tensor("lm_head.weight", AT(head), 0, c->Vp, D, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    t[-1].disk_rows = c->V;
    tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    return (int)((c->aux.mtp ? mtp_rows_(t, c) : t) - table);
}

// does row t belong to the MTP module? Rows of adapters have no field
static inline int parameter_is_mtp(const Tensor* t) {
    return t->is_behind || (t->field != TENSOR_NO_FIELD && t->field >= AT(mtp_enorm));
}

// ... to the indexers, which nothing but their own loss trains?
static inline int parameter_is_index(const Tensor* t) { return t->field >= AT(index_q) && t->field <= AT(index_proj); }
#undef AT
#endif  // LLMC_GLM5_H
