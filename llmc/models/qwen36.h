/*
Qwen3.6 (Hugging Face's qwen3_5_moe): its sizes, a line for each parameter, and the files that hold them.
Everything train_qwen36.cu computes loops over these tables.
    Config           the sizes; from a preset, from config.json, and back into one
    config_leave_rest  tensors that a model does not have: of a vision tower or an MTP module that is left out
    config_fit       what only the files say: under which prefix their names stand, whether the experts of a layer are
                     one tensor, and whether there are an MTP module and a vision tower
    config_axis      the axis by whose positions a pair of channels turns, where there are images
    config_part      with --tp: heads, width of the shared expert and rows of the vocabulary that each of T ranks has
    parameter_table  one line for each parameter: name, shape, start values, decay
The MTP module (models/mtp.h) has a layer of its own, with attention: number L, behind all others of the text. Blocks of
the vision tower (vision_tower.h) are layers behind these.
Names and config.json are those of Hugging Face (doc/qwen36.md "Files"); where a key is absent the value is that of
transformers' class. A config.json with vision has the keys of the text in "text_config".
Rows of q_proj lie as in the files: of each head the rows of its query, then those of its gate. Rows of in_proj_qkv and
of conv1d are queries of all heads, then keys, then values.
Norms are zero-centred: their gain is 1 + weight, so their start values are 0 (rmsnorm_gain); but the norm of the delta
rule's output is not.
Errors: fail_input names file, key, expected and found.
Source: Qwen Team 2025, "Qwen3-Next"; huggingface/transformers 5.23, models/qwen3_5_moe; doc/qwen36.md
*/
#ifndef LLMC_QWEN36_H
#define LLMC_QWEN36_H
#include "../core/jsonfile.h"    // json_read, json_ints, json_number, json_refuse_value
#include "../core/tensor.h"      // Tensor: the table of parameters
#include "../files/hf_folder.h"  // HF_WRITTEN_BY, SafeSet, safeset_has_some
#include "../files/tensorfile.h" // SafeSet
#include "../ops/causal_conv1d.h"  // CONV1D_MOST_TAPS
#include "../ops/router.h"       // ROUTER_MOST_EXPERTS, ROUTER_MOST_CHOSEN
#include "config_parts.h"        // config_padded, config_parse_kinds, config_parse_balance, config_part_keys
#include "rope_theta.h"          // rope_theta_parse
#include "tied_head.h"           // tied_head_fit
#include "vision_tower.h"        // VisionConfig, vision_rows

// ---- 1. Config ----

enum { CONFIG_MAX_T = 1 << 24, CONFIG_MAX_LAYERS = 1024, CONFIG_MOST_HEAD = 1024, CONFIG_MOST_STATE = 1 << 30 };
enum { LINEAR_LAYER = 'L', FULL_LAYER = 'F' };  // Config.kinds

typedef struct {
    int max_T;            // longest sequence, 262144
    int V, Vp;            // vocabulary, 248320; the same, padded to a multiple of 128
    int L, D;             // layers, 40; channels of the residual stream, 2048
    int NH, NKV, HS;      // full layers: heads of queries, 16; of keys and values, 2; channels of a head, 256
    int rotated;          // channels of a head that RoPE turns, 64
    int section[3];       // of the pairs: so many turn with time, height and width, 11, 11, 10; in text all three are
                          // the same. section[0] -1: config.json does not say it
    int Hk, Hv, DK, DV;   // linear layers: heads of queries and keys, 16; of values, 32; channels of each, 128 and 128
    int K;                // taps of their convolution, 4
    int E, k, FE;         // experts of a layer, 256; of which a token takes 8; width of each, 512
    int FS;               // width of the shared expert, 512
    int tied;             // the embedding is the output matrix
    int fused;            // the files have the experts of a layer as one tensor
    int is_nested;        // names of the files begin with model.language_model., as those of a model with vision
    float eps;            // of all RMSNorms, 1e-6
    double theta;         // RoPE's base, 1e7
    float balance;        // weight of the balance loss (router_aux_loss_coef); 0: it is not in the loss
    int mtp;              // there is a module that predicts the token after the next (MTP)
    int mtp_fused;        // the files have its experts as one tensor
    float mtp_weight;     // of its loss
    int has_vision;       // there is a tower that reads images
    VisionConfig vision;
    int image_token, video_token, vision_start, vision_end;  // of a tower
    char kinds[CONFIG_MAX_LAYERS + 2];  // of each layer: LINEAR_LAYER or FULL_LAYER; then of MTP's
} Config;

// of queries and keys, each, and of values, in a linear layer; of its convolution
static inline int config_keys(const Config* c) { return c->Hk * c->DK; }
static inline int config_values(const Config* c) { return c->Hv * c->DV; }
static inline int config_channels(const Config* c) { return 2 * config_keys(c) + config_values(c); }

static inline int config_layers(const Config* c, char kind) { return tensor_kinds(c->kinds, 0, c->L, kind); }

// every interval-th layer is full
static inline void config_place_kinds_(Config* c, int interval) {
    for (int l = 0; l < c->L; l++) { c->kinds[l] = (l + 1) % interval == 0 ? FULL_LAYER : LINEAR_LAYER; }
}

// the layer that is the first block of the vision tower
static inline int config_vision_layer(const Config* c) { return c->L + c->mtp; }

// pair i turns by the position in time, 0, or by row or column of an image, 1 or 2: interleaved
static inline int config_axis(const Config* c, int i) {
    const int usual[3] = {11, 11, 10}, *section = c->section[0] < 0 ? usual : c->section, axis = i % 3;
    return axis > 0 && i < 3 * section[axis] ? axis : 0;
}

static inline Config config_part(const Config* c, int ranks) {
    Config part = *c;
    part.NH /= ranks, part.NKV = config_part_keys(c->NKV, ranks), part.Hk /= ranks, part.Hv /= ranks;
    part.FS /= ranks, part.Vp /= ranks;
    return part;
}

static inline void config_set_vocabulary_(Config* c, int V) { c->V = V, c->Vp = config_padded(V); }

#define NO_VISION {0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, -1, -1, -1, -1
#define QWEN36_PRESETS "tiny, small or qwen3.6-35b-a3b"

static inline Config config_preset(const char* name, int V) {
    static const struct { const char* name; Config c; } presets[] = {
        {"tiny", {256, 0, 0, 4, 64, 4, 2, 32, 8, {2, 1, 1}, 2, 4, 16, 32, 4, 8, 2, 32, 48, 1, 0, 0, 1e-6f, 1e4, 0.01f,
                  0, 0, MTP_WEIGHT, 0, NO_VISION, ""}},
        {"small", {1024, 0, 0, 8, 512, 8, 2, 64, 16, {4, 2, 2}, 4, 8, 64, 64, 4, 16, 4, 256, 256, 1, 0, 0, 1e-6f, 1e5,
                   0.001f, 0, 0, MTP_WEIGHT, 0, NO_VISION, ""}},
        {"qwen3.6-35b-a3b", {262144, 0, 0, 40, 2048, 16, 2, 256, 64, {11, 11, 10}, 16, 32, 128, 128, 4, 256, 8, 512,
                             512, 0, 0, 0, 1e-6f, 1e7, 0.0f, 1, 0, MTP_WEIGHT, 0, NO_VISION, ""}},
    };
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(name, presets[i].name) != 0) { continue; }
        Config c = presets[i].c;
        config_set_vocabulary_(&c, V);
        config_place_kinds_(&c, 4);
        c.kinds[c.L] = FULL_LAYER;
        return c;
    }
    fail_input("--model: expected " QWEN36_PRESETS ", found \"%s\"", name);
}

// ---- config.json, read ----

#define LAYER_TYPES "linear_attention|full_attention"
#define LAYER_LETTERS "LF"

static inline int config_parse_layer_types_(Config* c, const json_t* json, ErrorText* error) {
    int interval = 4;
    const JsonInt every[] = {{"full_attention_interval", &interval, 1, CONFIG_MAX_LAYERS}};
    if (!config_is_absent(json, "layer_types")) {
        return config_parse_kinds(c->kinds, c->L, json, "layer_types", LAYER_TYPES, LAYER_LETTERS, error);
    }
    if (!config_is_absent(json, "full_attention_interval") && !json_ints(json, every, 1, error)) { return 0; }
    config_place_kinds_(c, interval);
    return 1;
}

// the pairs that turn with each axis: "mrope_section", whose sum is all of them
static inline int config_parse_sections_(Config* c, const json_t* turn, ErrorText* error) {
    const json_t* sections = json_object_get(turn, "mrope_section");
    int sum = 0;
    c->section[0] = -1;
    if (!sections || json_is_null(sections)) { return 1; }
    for (size_t i = 0; i < 3; i++) {
        const json_t* n = json_array_get(sections, i);
        if (!json_is_integer(n) || json_array_size(sections) != 3 || json_integer_value(n) < 0 ||
            json_integer_value(n) > c->rotated) {
            return json_refuse_value(error, "mrope_section", "three numbers of pairs of those that turn", sections);
        }
        sum += c->section[i] = (int)json_integer_value(n);
    }
    return sum == c->rotated / 2 ||
           error_set(error, "\"mrope_section\": expected numbers whose sum is %d, the pairs that turn, found %d",
                     c->rotated / 2, sum);
}

static inline int config_parse_turn_(Config* c, const json_t* json, ErrorText* error) {
    const json_t* turn = json_object_get(json, "rope_parameters");
    double factor = 0.25;
    c->theta = 0.0;
    if (!rope_theta_parse(&c->theta, json, "other kinds of RoPE, as YaRN, are not computed here", error) ||
        !json_number(&factor, json, "partial_rotary_factor", 0.0, 1.0, error) ||
        !json_number(&factor, turn, "partial_rotary_factor", 0.0, 1.0, error)) {
        return 0;
    }
    c->theta = c->theta > 0.0 ? c->theta : 1e4;
    c->rotated = (int)(c->HS * factor);
    if (c->rotated < 2 || c->rotated % 2 != 0) {
        return error_set(error, "\"partial_rotary_factor\" %g of %d channels: expected an even number above 0, found "
                         "%d", factor, c->HS, c->rotated);
    }
    return config_parse_sections_(c, turn, error);
}

static inline int config_divides_(const char* key, int n, const char* by, int divisor, ErrorText* error) {
    return n % divisor == 0 || error_set(error, "\"%s\" %d: expected a multiple of \"%s\" %d", key, n, by, divisor);
}

// "mtp_num_hidden_layers", with the weight under a key of our own
static inline int config_parse_mtp_(Config* c, const json_t* json, ErrorText* error) {
    double weight = (double)MTP_WEIGHT;
    const JsonInt modules[] = {{"mtp_num_hidden_layers", &c->mtp, 0, 1}};
    if (!config_is_absent(json, "mtp_num_hidden_layers") && !json_ints(json, modules, 1, error)) { return 0; }
    if (!json_number(&weight, json, "mtp_weight", 0.0, 1e3, error)) { return 0; }
    c->mtp_weight = (float)weight;
    return json_agrees(json, json_pack("{s:b}", "mtp_use_dedicated_embeddings", 0), error);
}

// the keys of a text
static inline int config_parse_text_(Config* c, const json_t* json, ErrorText* error) {
    double eps = 1e-6;
    const JsonInt sizes[] = {
        {"max_position_embeddings", &c->max_T, 1, CONFIG_MAX_T}, {"vocab_size", &c->V, 1, 1 << 24},
        {"num_hidden_layers", &c->L, 1, CONFIG_MAX_LAYERS}, {"hidden_size", &c->D, 1, 1 << 20},
        {"num_attention_heads", &c->NH, 1, 1 << 14}, {"num_key_value_heads", &c->NKV, 1, 1 << 14},
        {"head_dim", &c->HS, 2, CONFIG_MOST_HEAD}, {"linear_num_key_heads", &c->Hk, 1, 1 << 14},
        {"linear_num_value_heads", &c->Hv, 1, 1 << 14}, {"linear_key_head_dim", &c->DK, 1, 1024},
        {"linear_value_head_dim", &c->DV, 1, 1024}, {"linear_conv_kernel_dim", &c->K, 1, CONV1D_MOST_TAPS},
        {"num_experts", &c->E, 1, ROUTER_MOST_EXPERTS}, {"num_experts_per_tok", &c->k, 1, ROUTER_MOST_CHOSEN},
        {"moe_intermediate_size", &c->FE, 1, 1 << 22}, {"shared_expert_intermediate_size", &c->FS, 1, 1 << 22}};
    if (!config_check_quantized(json, error) || !json_ints(json, sizes, sizeof sizes / sizeof sizes[0], error)) {
        return 0;
    }
    config_set_vocabulary_(c, c->V);
    if (!config_divides_("num_attention_heads", c->NH, "num_key_value_heads", c->NKV, error) ||
        !config_divides_("linear_num_value_heads", c->Hv, "linear_num_key_heads", c->Hk, error) ||
        !json_number(&eps, json, "rms_norm_eps", 1e-12, 0.1, error) || !config_parse_layer_types_(c, json, error) ||
        !config_parse_turn_(c, json, error) || !config_parse_balance(&c->balance, json, error) ||
        !config_parse_mtp_(c, json, error)) {
        return 0;
    }
    c->kinds[c->L] = FULL_LAYER;
    if ((double)c->Hv * c->DK * c->DV > (double)CONFIG_MOST_STATE) {
        return error_set(error, "\"linear_num_value_heads\", \"linear_key_head_dim\", \"linear_value_head_dim\": "
                         "expected states of at most %d numbers, found %.0f", CONFIG_MOST_STATE,
                         (double)c->Hv * c->DK * c->DV);
    }
    if (c->k > c->E) { return error_set(error, "\"num_experts_per_tok\": expected at most %d, found %d", c->E, c->k); }
    c->eps = (float)eps;
    return json_agrees(json, json_pack("{s:s, s:f, s:b, s:b, s:b}", "hidden_act", "silu", "attention_dropout", 0.0,
                                       "attention_bias", 0, "norm_topk_prob", 1, "is_causal", 1), error);
}

// "vision_config" and the tokens that stand for what it sees, which are the class's where they are absent
static inline int config_parse_vision_(Config* c, const json_t* json, ErrorText* error) {
    const json_t* vision = json_object_get(json, "vision_config");
    const struct { const char* key; int* value; int usual; } tokens[] = {
        {"image_token_id", &c->image_token, 248056}, {"video_token_id", &c->video_token, 248057},
        {"vision_start_token_id", &c->vision_start, 248053}, {"vision_end_token_id", &c->vision_end, 248054}};
    c->has_vision = vision && !json_is_null(vision);
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
        const JsonInt token[] = {{tokens[i].key, tokens[i].value, 0, 1 << 24}};
        const int is_absent = config_is_absent(json, tokens[i].key);
        *tokens[i].value = tokens[i].usual;
        if (c->has_vision && !is_absent && !json_ints(json, token, 1, error)) { return 0; }
        if (c->has_vision && !is_absent && *tokens[i].value >= c->V) {
            return error_set(error, "\"%s\": expected one of the %d tokens of \"vocab_size\", found %d", tokens[i].key,
                             c->V, *tokens[i].value);
        }
    }
    if (c->has_vision && c->image_token == c->video_token) {
        return error_set(error, "\"image_token_id\" and \"video_token_id\": expected two tokens, found %d for both",
                         c->image_token);
    }
    c->is_nested = c->has_vision;
    return !c->has_vision || vision_config_parse(&c->vision, vision, c->D, error);
}

static inline int config_parse(Config* c, const json_t* json, ErrorText* error) {
    int type = -1;
    const json_t* text = json_object_get(json, "text_config");
    memset(c, 0, sizeof *c);
    if (!json_choice(&type, json, "model_type", "qwen3_5_moe_text|qwen3_5_moe", error)) { return 0; }
    if (type < 0) { return error_set(error, "\"model_type\": expected qwen3_5_moe_text, found nothing"); }
    if (text && !json_is_object(text)) { return json_refuse_value(error, "text_config", "an object", text); }
    return config_check_quantized(json, error) && json_switch(&c->tied, json, "tie_word_embeddings", error) &&
           config_parse_text_(c, text ? text : json, error) && config_parse_vision_(c, json, error);
}

// keys that may be left out
#define CONFIG_OPTIONAL \
    "text_config|vision_config|tie_word_embeddings|rms_norm_eps|layer_types|full_attention_interval" \
    "|rope_theta|rope_parameters|rope_scaling|partial_rotary_factor|mtp_num_hidden_layers|mtp_weight" \
    "|mtp_use_dedicated_embeddings|output_router_logits|router_aux_loss_coef|image_token_id" \
    "|video_token_id|vision_start_token_id|vision_end_token_id|quantization_config|hidden_act" \
    "|attention_dropout|attention_bias|norm_topk_prob|is_causal"

static inline Config config_load(const char* path) {
    Config c;
    ErrorText error;
    json_t* json = json_read(path);
    if (!config_parse(&c, json, &error)) { fail_input("%s: %s", path, error.text); }
    config_warn_of_near(path, json, CONFIG_OPTIONAL);
    config_warn_of_near(path, json_object_get(json, "text_config"), CONFIG_OPTIONAL);
    json_decref(json);
    return c;
}

#define EMBEDDING "embed_tokens.weight"
#define NESTED "model.language_model."

// the name of the embedding in files
static inline const char* config_embedding(const Config* c) {
    return c->is_nested ? NESTED EMBEDDING : "model." EMBEDDING;
}

#define MTP "mtp."

// 1: of tied_head_fit. The config.json that transformers writes speaks of an MTP module that it has left behind
static inline int config_fit(Config* c, SafeSet* set) {
    char name[96];
    c->mtp = safeset_has_some(set, MTP);
    c->mtp_fused = safeset_find(set, MTP "layers.0.mlp.experts.gate_up_proj") != NULL;
    if (c->has_vision && !safeset_has_some(set, VISION_NAMES)) {
        c->has_vision = 0;
        warn_alike("%s: no tensors of the tower of which config.json speaks: this model reads no images", set->path);
    }
    c->is_nested = safeset_find(set, NESTED EMBEDDING) != NULL;
    snprintf(name, sizeof name, "%slayers.0.mlp.experts.gate_up_proj", c->is_nested ? NESTED : "model.");
    c->fused = safeset_find(set, name) != NULL;
    return tied_head_fit(&c->tied, set, config_embedding(c));
}

// what a file has beside this model: a warning says that it stays behind
static inline void config_leave_rest(const Config* c, SafeSet* set) {
    int n_vision = 0, n_mtp = 0;
    for (int i = 0; i < set->n_tensors; i++) {
        const char* name = set->by_name[i]->name;
        const int is_vision = !c->has_vision && strncmp(name, VISION_NAMES, sizeof VISION_NAMES - 1) == 0;
        const int is_mtp = !c->mtp && strncmp(name, MTP, 4) == 0;
        n_vision += is_vision, n_mtp += is_mtp;
        if (is_vision || is_mtp) { set->used[i] = 1; }
    }
    if (n_vision > 0) {
        warn_alike("%s: %d tensors of the tower that reads images are left out, as config.json without vision_config "
                   "or --vision 0 says: keep this folder", set->path, n_vision);
    }
    if (n_mtp > 0) {
        warn_alike("%s: %d tensors of the module that predicts the token after the next are left out, as --mtp 0 says: "
                   "keep this folder", set->path, n_mtp);
    }
}

// ---- config.json, written ----

// the factor that gives as many channels when it is read: the quotient itself, or a number just above
static inline double config_turn_factor_(const Config* c) {
    double factor = (double)c->rotated / c->HS;
    while ((int)(c->HS * factor) < c->rotated) { factor = nextafter(factor, 1.0); }
    return factor;
}

// of a model with vision: `text` is its text_config; takes the reference. A token beyond the vocabulary is the class's,
// and as absent as it was in the file
static inline json_t* config_nest_(const Config* c, json_t* text) {
    json_t* json = json_pack("{s:s, s:[s], s:s, s:s, s:b, s:o}", "written_by", HF_WRITTEN_BY, "architectures",
                             "Qwen3_5MoeForConditionalGeneration", "model_type", "qwen3_5_moe", "dtype",
                             json_string_value(json_object_get(text, "dtype")), "tie_word_embeddings", c->tied,
                             "vision_config", vision_config_json(&c->vision));
    const struct { const char* key; int token; } tokens[] = {
        {"image_token_id", c->image_token}, {"video_token_id", c->video_token},
        {"vision_start_token_id", c->vision_start}, {"vision_end_token_id", c->vision_end}};
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
        if (tokens[i].token < c->V) { json_object_set_new(json, tokens[i].key, json_integer(tokens[i].token)); }
    }
    json_object_del(text, "written_by");
    json_object_del(text, "architectures");
    json_object_set_new(json, "text_config", text);
    return json;
}

// eot: the token that ends a text
static inline json_t* config_json(const Config* c, int eot, const char* dtype) {
    json_t* json = json_pack(
        "{s:s, s:[s], s:s, s:s, s:s, s:f, s:b, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:b, s:i, s:i}", "written_by",
        HF_WRITTEN_BY, "architectures", "Qwen3_5MoeForCausalLM", "model_type", "qwen3_5_moe_text", "dtype", dtype,
        "hidden_act", "silu", "attention_dropout", 0.0, "attention_bias", 0, "max_position_embeddings", c->max_T,
        "vocab_size", c->V, "num_hidden_layers", c->L, "hidden_size", c->D, "num_attention_heads", c->NH,
        "num_key_value_heads", c->NKV, "head_dim", c->HS, "rms_norm_eps", shortest_double(c->eps),
        "tie_word_embeddings", c->tied, "bos_token_id", eot, "eos_token_id", eot);
    json_t* linear = json_pack("{s:o, s:i, s:i, s:i, s:i, s:i}", "layer_types",
                               config_kinds_json(c->kinds, c->L, LAYER_TYPES, LAYER_LETTERS), "linear_num_key_heads",
                               c->Hk, "linear_num_value_heads", c->Hv, "linear_key_head_dim", c->DK,
                               "linear_value_head_dim", c->DV, "linear_conv_kernel_dim", c->K);
    json_t* turn = json_pack("{s:{s:s, s:f, s:f, s:b}}", "rope_parameters", "rope_type", "default", "rope_theta",
                             c->theta, "partial_rotary_factor", config_turn_factor_(c), "mrope_interleaved", 1);
    if (c->section[0] >= 0) {
        json_object_set_new(json_object_get(turn, "rope_parameters"), "mrope_section",
                            json_pack("[i, i, i]", c->section[0], c->section[1], c->section[2]));
    }
    json_t* experts = json_pack("{s:i, s:i, s:i, s:i}", "num_experts", c->E, "num_experts_per_tok", c->k,
                                "moe_intermediate_size", c->FE, "shared_expert_intermediate_size", c->FS);
    config_put_balance(experts, c->balance);
    json_t* mtp = json_pack("{s:i}", "mtp_num_hidden_layers", c->mtp);
    if (c->mtp) { json_object_set_new(mtp, "mtp_weight", json_real(shortest_double(c->mtp_weight))); }
    json_t* const more[] = {linear, turn, experts, mtp};
    for (int i = 0; i < 4; i++) {
        json_object_update(json, more[i]);
        json_decref(more[i]);
    }
    return c->has_vision ? config_nest_(c, json) : json;
}

// ---- 2. Parameters: one line for each ----

// what a field of the table is called; all are floats where a build stores floats
typedef struct {
    float *embedding, *norm1, *qkv, *z, *b, *a, *conv, *A_log, *dt_bias, *o_norm, *out, *wq, *wk, *wv, *q_norm, *k_norm,
        *wo, *norm2, *router, *expert_gate_up, *expert_down, *shared_gate, *shared_gate_up, *shared_down, *norm, *head,
        *mtp_fc, *mtp_next_norm, *mtp_hidden_norm, *mtp_norm;
    VisionParameters vision;
} Parameters;

enum { MAX_LAYER_ROWS = 24, MAX_PARAMETERS = 46 + VISION_ROWS };

// lines of the linear layers behind t; returns the end
static inline Tensor* linear_rows_of_table_(Tensor* t, const Config* c) {
    const int L = c->L, D = c->D, keys = config_keys(c), values = config_values(c), channels = config_channels(c);
    const float scaled = 0.02f / sqrtf(2.0f * (float)L);
    Tensor* first = t;
#define AT(name) offsetof(Parameters, name)
#define MIXER "linear_attn."
    *t++ = tensor(MIXER "in_proj_qkv.weight",   AT(qkv),     L, channels, D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_sections(&t[-1], keys, keys, values, 0);
    tensor_adaptable(&t[-1], MIXER "in_proj_qkv", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, c->Hk);
    *t++ = tensor(MIXER "in_proj_z.weight",     AT(z),       L, values,   D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], MIXER "in_proj_z", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, c->Hk);
    *t++ = tensor(MIXER "in_proj_b.weight",     AT(b),       L, c->Hv,    D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], MIXER "in_proj_b", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, c->Hk);
    *t++ = tensor(MIXER "in_proj_a.weight",     AT(a),       L, c->Hv,    D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], MIXER "in_proj_a", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, c->Hk);
    *t++ = tensor(MIXER "conv1d.weight",        AT(conv),    L, channels, c->K,   INIT_NORMAL, 0.02f,  DECAY,    CONV);
    tensor_sections(&t[-1], keys, keys, values, 0);
    tensor_split(&t[-1], SPLIT_ROWS, c->Hk);
    *t++ = tensor(MIXER "A_log",                AT(A_log),   L, 1,        c->Hv,  INIT_LOG_UNIFORM, 16.0f, NO_DECAY,
                  VECTOR);
    tensor_split(&t[-1], SPLIT_ROWS, c->Hk);
    *t++ = tensor(MIXER "dt_bias",              AT(dt_bias), L, 1,        c->Hv,  INIT_ONES,   0.0f, NO_DECAY, VECTOR);
    tensor_split(&t[-1], SPLIT_ROWS, c->Hk);
    *t++ = tensor(MIXER "norm.weight",          AT(o_norm),  L, 1,        c->DV,  INIT_ONES,   0.0f, NO_DECAY, VECTOR);
    *t++ = tensor(MIXER "out_proj.weight",      AT(out),     L, D,        values, INIT_NORMAL, scaled, DECAY,    AS_IS);
    tensor_adaptable(&t[-1], MIXER "out_proj", NULL);
    tensor_split(&t[-1], SPLIT_COLUMNS, c->Hk);
#undef MIXER
    for (; first < t; first++) { tensor_in_kinds(first, c->kinds, "L"); }
    return t;
}

// of the full ones
static inline Tensor* full_rows_of_table_(Tensor* t, const Config* c) {
    const int L = c->L, D = c->D, HS = c->HS, HQ = c->NH * HS, HK = c->NKV * HS;
    const float scaled = 0.02f / sqrtf(2.0f * (float)L);
    Tensor* first = t;
#define MIXER "self_attn."
    *t++ = tensor(MIXER "q_proj.weight",        AT(wq),      L, 2 * HQ,   D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], MIXER "q_proj", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, c->NH);
    *t++ = tensor(MIXER "k_proj.weight",        AT(wk),      L, HK,       D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], MIXER "k_proj", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, c->NKV);
    tensor_cut_units(&t[-1]);
    *t++ = tensor(MIXER "v_proj.weight",        AT(wv),      L, HK,       D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], MIXER "v_proj", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, c->NKV);
    tensor_cut_units(&t[-1]);
    *t++ = tensor(MIXER "q_norm.weight",        AT(q_norm),  L, 1,        HS,     INIT_ZEROS,  0.0f, NO_DECAY, VECTOR);
    *t++ = tensor(MIXER "k_norm.weight",        AT(k_norm),  L, 1,        HS,     INIT_ZEROS,  0.0f, NO_DECAY, VECTOR);
    *t++ = tensor(MIXER "o_proj.weight",        AT(wo),      L, D,        HQ,     INIT_NORMAL, scaled, DECAY,    AS_IS);
    tensor_adaptable(&t[-1], MIXER "o_proj", NULL);
    tensor_split(&t[-1], SPLIT_COLUMNS, c->NH);
#undef MIXER
    for (; first < t; first++) { tensor_in_kinds(first, c->kinds, "F"); }
    return t;
}

// of what every layer has behind its mixer; fused: the experts are one tensor
static inline Tensor* expert_rows_of_table_(Tensor* t, const Config* c, int fused) {
    const int L = c->L, D = c->D, FE = c->FE, FS = c->FS;
    const float scaled = 0.02f / sqrtf(2.0f * (float)L);
    const char* gate_up = fused ? "mlp.experts.gate_up_proj" : "mlp.experts.%d.{gate,up}_proj.weight";
    const char* down = fused ? "mlp.experts.down_proj" : "mlp.experts.%d.down_proj.weight";
#define MLP "mlp."
    *t++ = tensor("post_attention_layernorm.weight", AT(norm2), L, 1,     D,      INIT_ZEROS,  0.0f, NO_DECAY, VECTOR);
    *t++ = tensor(MLP "gate.weight",            AT(router),  L, c->E,     D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], NULL, MLP "gate.weight");
    *t++ = tensor(gate_up,               AT(expert_gate_up), L, 2 * FE,   D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_experts(&t[-1], c->E, fused ? FUSED : APART);
    tensor_adaptable(&t[-1], MLP "experts.%d.{gate,up}_proj", MLP "experts.gate_up_proj");
    *t++ = tensor(down,                     AT(expert_down), L, D,        FE,     INIT_NORMAL, scaled, DECAY,    AS_IS);
    tensor_experts(&t[-1], c->E, fused ? FUSED : APART);
    tensor_adaptable(&t[-1], MLP "experts.%d.down_proj", MLP "experts.down_proj");
    *t++ = tensor(MLP "shared_expert_gate.weight", AT(shared_gate), L, 1, D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], MLP "shared_expert_gate", NULL);
    *t++ = tensor(MLP "shared_expert.{gate,up}_proj.weight", AT(shared_gate_up), L, 2 * FS, D, INIT_NORMAL, 0.02f,
                  DECAY, AS_IS);
    tensor_adaptable(&t[-1], MLP "shared_expert.{gate,up}_proj", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, 0);
    *t++ = tensor(MLP "shared_expert.down_proj.weight", AT(shared_down), L, D, FS, INIT_NORMAL, scaled, DECAY,   AS_IS);
    tensor_adaptable(&t[-1], MLP "shared_expert.down_proj", NULL);
    tensor_split(&t[-1], SPLIT_COLUMNS, 0);
#undef MLP
    return t;
}

// of what every layer has before its mixer
static inline Tensor* norm_row_of_table_(Tensor* t, const Config* c) {
    *t++ = tensor("input_layernorm.weight",     AT(norm1), c->L, 1,    c->D,      INIT_ZEROS,  0.0f, NO_DECAY, VECTOR);
    return t;
}

// of the MTP module: what it has beside its layer, and a full layer, whose adapters nothing would train
static inline Tensor* mtp_rows_of_table_(Tensor* t, const Config* c) {
    Tensor rows[MAX_LAYER_ROWS];
    const int D = c->D;
    Tensor* end = expert_rows_of_table_(full_rows_of_table_(norm_row_of_table_(rows, c), c), c, c->mtp_fused);
    *t++ = tensor(MTP "fc.weight",              AT(mtp_fc),          0, D, 2 * D, INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    *t++ = tensor(MTP "pre_fc_norm_embedding.weight", AT(mtp_next_norm), 0, 1, D, INIT_ZEROS,  0.0f, NO_DECAY, VECTOR);
    *t++ = tensor(MTP "pre_fc_norm_hidden.weight", AT(mtp_hidden_norm), 0, 1, D,  INIT_ZEROS,  0.0f, NO_DECAY, VECTOR);
    for (const Tensor* row = rows; row < end; row++) {
        *t++ = tensor_again(row, c->L, MTP "layers.%d.");
        t[-1].module = t[-1].parameter = NULL;
    }
    *t++ = tensor(MTP "norm.weight",            AT(mtp_norm),        0, 1, D,     INIT_ZEROS,  0.0f, NO_DECAY, VECTOR);
    return t;
}

// returns their number: what a model does not have is left out. c must outlive the table
static inline int parameter_table(Tensor* table, const Config* c) {
    Tensor *t = table, *first;
    const int D = c->D, has_linear = config_layers(c, LINEAR_LAYER) > 0, has_full = config_layers(c, FULL_LAYER) > 0;
    // name on disk (Hugging Face's)            in memory layers rows columns    start values          decayed   on disk
    *t++ = tensor(EMBEDDING,                    AT(embedding), 0, c->Vp,  D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    t[-1].disk_rows = c->V;  // the padding is ours alone
    tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    first = t;
    t = norm_row_of_table_(t, c);
    if (has_linear) { t = linear_rows_of_table_(t, c); }
    if (has_full) { t = full_rows_of_table_(t, c); }
    t = expert_rows_of_table_(t, c, c->fused);
    for (; first < t; first++) { tensor_under(first, c->is_nested ? NESTED "layers.%d." : "model.layers.%d."); }
    *t++ = tensor("norm.weight",                AT(norm),   0, 1,         D,      INIT_ZEROS,  0.0f, NO_DECAY, VECTOR);
    tensor_under(table, c->is_nested ? NESTED : "model.");
    tensor_under(&t[-1], c->is_nested ? NESTED : "model.");
    if (!c->tied) {
        *t++ = tensor(HEAD_NAME,                AT(head),   0, c->Vp,     D,      INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
        t[-1].disk_rows = c->V;
        tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    }
    if (c->mtp) { t = mtp_rows_of_table_(t, c); }
    if (c->has_vision) { t = vision_rows(t, AT(vision), &c->vision, config_vision_layer(c)); }
#undef AT
    return (int)(t - table);
}

static inline int parameter_begins_(const Tensor* t, const char* text) {
    return strncmp(t->prefix ? t->prefix : t->name, text, strlen(text)) == 0;
}

// does row t belong to the MTP module, to the vision tower?
static inline int parameter_is_mtp(const Tensor* t) { return parameter_begins_(t, MTP); }
static inline int parameter_is_vision(const Tensor* t) { return parameter_begins_(t, VISION_NAMES); }
#endif  // LLMC_QWEN36_H
