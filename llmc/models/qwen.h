/*
Qwen2.5, Qwen3, Qwen3-MoE, Mistral and Llama: what makes one model different from another, one line for each parameter,
and the files that hold them. Everything train_qwen3.cu computes loops over these tables.
    Config           the sizes; from a preset, from config.json, and back into one
    config_fit       what only the files say: whether a head that should be tied is another matrix, and whether the
                     experts of a layer are one tensor
    parameter_table  one line for each parameter: name, shape, start values, decay
Names and config.json are those of Hugging Face (doc/qwen.md). Where a key is absent the value is that of
transformers' class, not that of the published models: head_dim of qwen3 is 128, weights of experts do not add up to 1.
Rows of q_proj and k_proj lie as in the files, the two halves of a head apart: RoPE turns row i with row i + HS/2.
Errors: fail_input names file, key, expected and found.
Source: Yang et al. 2024, arXiv:2412.15115 (Qwen2.5), 2025, arXiv:2505.09388 (Qwen3); Jiang et al. 2023,
        arXiv:2310.06825 (Mistral); huggingface/transformers 5.23, models/{qwen2,qwen3,qwen3_moe,mistral,llama}
*/
#ifndef LLMC_QWEN_H
#define LLMC_QWEN_H
#include "../core/choice.h"      // choice_name
#include "../core/jsonfile.h"    // json_read, json_ints, json_number, json_refuse_value
#include "../core/tensor.h"      // Tensor: the table of parameters
#include "../files/hf_folder.h"  // HF_WRITTEN_BY
#include "../files/tensorfile.h" // SafeSet
#include "../ops/router.h"       // ROUTER_MOST_EXPERTS, ROUTER_MOST_CHOSEN
#include "config_parts.h"        // config_padded, config_parse_kinds, config_parse_balance, config_part_keys
#include "rope_theta.h"          // rope_theta_parse
#include "tied_head.h"           // tied_head_fit

// ---- 1. Config ----

#define MODEL_TYPES "qwen2|qwen3|qwen3_moe|mistral|llama"
typedef enum { QWEN2, QWEN3, QWEN3_MOE, MISTRAL, LLAMA } ModelType;
enum { CONFIG_MAX_T = 1 << 24, CONFIG_MAX_LAYERS = 1024 };
enum { FULL_ATTENTION = 'F', SLIDING_ATTENTION = 'S' };  // Config.slides

typedef struct {
    int type;             // ModelType
    int max_T;            // longest sequence, 40960
    int V, Vp;            // vocabulary, 151936; the same, padded to a multiple of 128
    int L, D;             // layers, 28; channels of the residual stream, 1024
    int NH, NKV, HS;      // heads of queries, 16; of keys and values, 8; channels of a head, 128
    int F;                // width of an MLP, 3072
    int E, k, FE;         // experts of a layer that has some, 0: none has; of which a token takes k; width of each
    int renormalize;      // do the weights of a token's experts add up to 1?
    int fused;            // the files have the experts of a layer as one tensor
    int qkv_bias, o_bias; // q, k and v have biases; o has one
    int qk_norm;          // each head of q and k is normalised before it turns
    int tied;             // the embedding is the output matrix
    int window;           // keys that a position sees in the layers that slide, itself included; 0: none does
    float eps;            // RMSNorm's, 1e-6
    double theta;         // RoPE's base, 1e6
    float balance;        // weight of the balance loss (router_aux_loss_coef); 0: it is not in the loss
    char kinds[CONFIG_MAX_LAYERS + 1];   // of each layer: MLP_LAYER or EXPERT_LAYER
    char slides[CONFIG_MAX_LAYERS + 1];  // FULL_ATTENTION or SLIDING_ATTENTION, which sees a window
} Config;

static inline int config_expert_layers(const Config* c) { return tensor_kinds(c->kinds, 0, c->L, EXPERT_LAYER); }
static inline int config_has_mlps(const Config* c) { return config_expert_layers(c) < c->L; }

// what one of `ranks` ranks has of heads, MLPs and the padded vocabulary, with --tp
static inline Config config_part(const Config* c, int ranks) {
    Config part = *c;
    part.NH /= ranks, part.NKV = config_part_keys(c->NKV, ranks), part.F /= ranks, part.Vp /= ranks;
    return part;
}

// the window of a layer, 0: none
static inline int config_window(const Config* c, int l) { return c->slides[l] == SLIDING_ATTENTION ? c->window : 0; }

static inline Config config_make(int type, int max_T, int V, int L, int D, int NH, int NKV, int HS, int F) {
    Config c;
    memset(&c, 0, sizeof c);
    c.type = type;
    c.max_T = max_T;
    c.V = V, c.Vp = config_padded(V);
    c.L = L, c.D = D, c.NH = NH, c.NKV = NKV, c.HS = HS, c.F = F;
    c.qkv_bias = type == QWEN2;
    c.qk_norm = type == QWEN3 || type == QWEN3_MOE;
    c.eps = 1e-6f;
    c.theta = 1e4;
    memset(c.kinds, MLP_LAYER, (size_t)L);
    memset(c.slides, FULL_ATTENTION, (size_t)L);
    return c;
}

static inline void config_slide_all_(Config* c, int window) {
    c->window = window;
    if (window > 0) { memset(c->slides, SLIDING_ATTENTION, (size_t)c->L); }
}

#define QWEN_PRESETS "tiny, small, qwen2.5-0.5b, qwen3-0.6b, qwen3-8b, qwen3-30b-a3b or mistral-7b"

static inline Config config_preset(const char* name, int V) {
    static const struct { const char* name; int type, max_T, L, D, NH, NKV, HS, F, tied; double theta; } presets[] = {
        {"tiny", QWEN3, 256, 2, 64, 4, 2, 32, 192, 1, 1e4},
        {"small", QWEN3, 1024, 6, 256, 8, 4, 64, 768, 1, 1e5},
        {"qwen2.5-0.5b", QWEN2, 32768, 24, 896, 14, 2, 64, 4864, 1, 1e6},
        {"qwen3-0.6b", QWEN3, 40960, 28, 1024, 16, 8, 128, 3072, 1, 1e6},
        {"qwen3-8b", QWEN3, 40960, 36, 4096, 32, 8, 128, 12288, 0, 1e6},
        {"qwen3-30b-a3b", QWEN3_MOE, 40960, 48, 2048, 32, 4, 128, 6144, 0, 1e6},
        {"mistral-7b", MISTRAL, 32768, 32, 4096, 32, 8, 128, 14336, 0, 1e4},
    };
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(name, presets[i].name) != 0) { continue; }
        Config c = config_make(presets[i].type, presets[i].max_T, V, presets[i].L, presets[i].D, presets[i].NH,
                               presets[i].NKV, presets[i].HS, presets[i].F);
        c.tied = presets[i].tied;
        c.theta = presets[i].theta;
        if (c.type == MISTRAL) {
            c.eps = 1e-5f;
            config_slide_all_(&c, 4096);
        }
        if (c.type == QWEN3_MOE) {
            c.E = 128, c.k = 8, c.FE = 768, c.renormalize = 1;
            memset(c.kinds, EXPERT_LAYER, (size_t)c.L);
        }
        return c;
    }
    fail_input("--model: expected " QWEN_PRESETS ", found \"%s\"", name);
}

// ---- config.json, read ----

#define LAYER_TYPES "full_attention|sliding_attention"

// "layer_types" of qwen2 and qwen3
static inline int config_parse_layer_types_(Config* c, const json_t* json, ErrorText* error) {
    return config_parse_kinds(c->slides, c->L, json, "layer_types", LAYER_TYPES, "FS", error) &&
           (c->window > 0 || !strchr(c->slides, SLIDING_ATTENTION) ||
            error_set(error, "\"layer_types\": sliding_attention: expected \"use_sliding_window\" true and a "
                      "\"sliding_window\" beside it"));
}

// Which layers see a window: in Mistral and Qwen3-MoE all or none; in Qwen2 and Qwen3 those of layer_types or, without
// such a list, those from max_window_layers on. A sliding_window that use_sliding_window does not turn on is inert
static inline int config_parse_windows_(Config* c, const json_t* json, ErrorText* error) {
    int uses = c->type == MISTRAL, W = 4096, from = 0;
    const JsonInt window[] = {{"sliding_window", &W, 1, CONFIG_MAX_T}};
    const JsonInt full[] = {{"max_window_layers", &from, 0, CONFIG_MAX_LAYERS}};
    const json_t* found = json_object_get(json, "sliding_window");
    if (c->type == LLAMA || (c->type != MISTRAL && !json_switch(&uses, json, "use_sliding_window", error))) {
        return c->type == LLAMA;
    }
    if (json_is_null(found) || !uses) { W = 0; }
    else if ((found || c->type != MISTRAL) && !json_ints(json, window, 1, error)) { return 0; }
    if (c->type == MISTRAL || c->type == QWEN3_MOE) {
        config_slide_all_(c, W);
        return 1;
    }
    c->window = W;
    if (!config_is_absent(json, "layer_types")) { return config_parse_layer_types_(c, json, error); }
    if (W == 0) { return 1; }
    if (!json_ints(json, full, 1, error)) { return 0; }
    for (int l = from; l < c->L; l++) { c->slides[l] = SLIDING_ATTENTION; }
    return 1;
}

// which layers of a Qwen3-MoE have experts: every "decoder_sparse_step"th but those of "mlp_only_layers"
static inline int config_parse_kinds_(Config* c, const json_t* json, ErrorText* error) {
    int step = 1;
    const JsonInt steps[] = {{"decoder_sparse_step", &step, 1, CONFIG_MAX_LAYERS}};
    const json_t *mlps = json_object_get(json, "mlp_only_layers"), *number;
    size_t i;
    if (!config_is_absent(json, "decoder_sparse_step") && !json_ints(json, steps, 1, error)) { return 0; }
    for (int l = 0; l < c->L; l++) { c->kinds[l] = (l + 1) % step == 0 ? EXPERT_LAYER : MLP_LAYER; }
    if (!config_is_absent(json, "mlp_only_layers") && !json_is_array(mlps)) {
        return json_refuse_value(error, "mlp_only_layers", "a list", mlps);
    }
    json_array_foreach((json_t*)mlps, i, number) {
        const json_int_t l = json_integer_value(number);
        if (!json_is_integer(number) || l < 0 || l >= c->L) {
            return error_set(error, "\"mlp_only_layers\": expected numbers of layers, 0..%d", c->L - 1);
        }
        c->kinds[l] = MLP_LAYER;
    }
    return 1;
}

// Experts of a Qwen3-MoE. E stays 0 where no layer has some
static inline int config_parse_experts_(Config* c, const json_t* json, ErrorText* error) {
    int E = 0;
    const json_t *found = json_object_get(json, "num_experts"), *local = json_object_get(json, "num_local_experts");
    const JsonInt count[] = {{found ? "num_experts" : "num_local_experts", &E, 0, ROUTER_MOST_EXPERTS}};
    const JsonInt sizes[] = {{"num_experts_per_tok", &c->k, 1, ROUTER_MOST_CHOSEN},
                             {"moe_intermediate_size", &c->FE, 1, 1 << 22}};
    if (found && local && !json_equal(found, local)) {
        return json_refuse_value(error, "num_local_experts", "the number of \"num_experts\", or nothing", local);
    }
    if (!json_ints(json, count, 1, error) || !config_parse_kinds_(c, json, error)) { return 0; }
    if (E == 0) { memset(c->kinds, MLP_LAYER, (size_t)c->L); }
    if (config_expert_layers(c) == 0) { return 1; }
    if (!json_ints(json, sizes, 2, error) || !json_switch(&c->renormalize, json, "norm_topk_prob", error) ||
        !config_parse_balance(&c->balance, json, error)) {
        return 0;
    }
    if (c->k > E) { return error_set(error, "\"num_experts_per_tok\": expected at most %d, found %d", E, c->k); }
    c->E = E;
    return 1;
}

static inline int config_parse_heads_(Config* c, const json_t* json, ErrorText* error) {
    const JsonInt head[] = {{"head_dim", &c->HS, 2, 1024}};
    c->HS = c->type == QWEN3 ? 128 : c->D / c->NH;
    if (!config_is_absent(json, "head_dim") && !json_ints(json, head, 1, error)) { return 0; }
    if (c->NH % c->NKV != 0) {
        return error_set(error, "\"num_attention_heads\" %d: expected a multiple of \"num_key_value_heads\" %d", c->NH,
                         c->NKV);
    }
    if (c->HS % 2 != 0 || c->HS < 2) {
        return error_set(error, "\"head_dim\": expected an even number, found %d", c->HS);
    }
    if (c->type == LLAMA && c->D % c->NH != 0) {
        return error_set(error, "\"hidden_size\" %d: expected a multiple of \"num_attention_heads\" %d, which "
                         "transformers demands of a Llama", c->D, c->NH);
    }
    if (c->type == QWEN2 || c->type == MISTRAL) { return 1; }
    if (!json_switch(&c->o_bias, json, "attention_bias", error)) { return 0; }
    c->qkv_bias = c->o_bias;
    return 1;
}

static inline int config_parse(Config* c, const json_t* json, ErrorText* error) {
    int type = -1, max_T, V, L, D, NH, NKV, F;
    double eps = 1e-6, theta = 0.0;
    const JsonInt sizes[] = {{"max_position_embeddings", &max_T, 1, CONFIG_MAX_T}, {"vocab_size", &V, 1, 1 << 24},
                             {"num_hidden_layers", &L, 1, CONFIG_MAX_LAYERS},      {"hidden_size", &D, 1, 1 << 20},
                             {"num_attention_heads", &NH, 1, 1 << 14}, {"num_key_value_heads", &NKV, 1, 1 << 14},
                             {"intermediate_size", &F, 1, 1 << 22}};
    if (!json_choice(&type, json, "model_type", MODEL_TYPES, error)) { return 0; }
    if (type < 0) { return error_set(error, "\"model_type\": expected one of %s, found nothing", MODEL_TYPES); }
    if (!config_check_quantized(json, error) || !json_ints(json, sizes, 7, error)) { return 0; }
    *c = config_make(type, max_T, V, L, D, NH, NKV, 0, F);
    if (!json_number(&eps, json, "rms_norm_eps", 1e-12, 0.1, error) ||
        !rope_theta_parse(&theta, json, "other kinds of RoPE, as YaRN, are not computed here", error) ||
        !json_switch(&c->tied, json, "tie_word_embeddings", error) || !config_parse_heads_(c, json, error) ||
        !config_parse_windows_(c, json, error)) {
        return 0;
    }
    c->eps = (float)eps;
    c->theta = theta > 0.0 ? theta : 1e4;
    if (type == QWEN3_MOE && !config_parse_experts_(c, json, error)) { return 0; }
    return json_agrees(json, json_pack("{s:s, s:f, s:b, s:b}", "hidden_act", "silu", "attention_dropout", 0.0,
                                       "mlp_bias", 0, "is_causal", 1), error);
}

// keys that may be left out
#define CONFIG_OPTIONAL \
    "rms_norm_eps|rope_theta|rope_parameters|rope_scaling|tie_word_embeddings|head_dim" \
    "|attention_bias|sliding_window|use_sliding_window|layer_types|max_window_layers" \
    "|decoder_sparse_step|mlp_only_layers|num_experts|num_local_experts|norm_topk_prob" \
    "|output_router_logits|router_aux_loss_coef|quantization_config|hidden_act|attention_dropout" \
    "|mlp_bias|is_causal"

static inline Config config_load(const char* path) {
    Config c;
    ErrorText error;
    json_t* json = json_read(path);
    if (!config_parse(&c, json, &error)) { fail_input("%s: %s", path, error.text); }
    config_warn_of_near(path, json, CONFIG_OPTIONAL);
    json_decref(json);
    return c;
}

#define EMBEDDING_NAME "model.embed_tokens.weight"

// 1: of tied_head_fit
static inline int config_fit(Config* c, SafeSet* set) {
    c->fused = 0;
    for (int l = 0; l < c->L && !c->fused; l++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.gate_up_proj", l);
        c->fused = safeset_find(set, name) != NULL;
    }
    return tied_head_fit(&c->tied, set, EMBEDDING_NAME);
}

// ---- config.json, written ----

static inline void config_put_experts_(const Config* c, json_t* json) {
    if (c->E == 0) {  // transformers takes that for MLPs everywhere
        json_object_set_new(json, "num_experts", json_integer(0));
        return;
    }
    json_t* mlps = json_array();
    for (int l = 0; l < c->L; l++) {
        if (c->kinds[l] == MLP_LAYER) { json_array_append_new(mlps, json_integer(l)); }
    }
    json_t* more = json_pack("{s:i, s:i, s:i, s:b, s:i, s:o}", "num_experts", c->E, "num_experts_per_tok", c->k,
                             "moe_intermediate_size", c->FE, "norm_topk_prob", c->renormalize, "decoder_sparse_step", 1,
                             "mlp_only_layers", mlps);
    config_put_balance(more, c->balance);
    json_object_update(json, more);
    json_decref(more);
}

static inline void config_put_windows_(const Config* c, json_t* json) {
    json_object_set_new(json, "sliding_window", c->window > 0 ? json_integer(c->window) : json_null());
    if (c->type == MISTRAL) { return; }
    json_object_set_new(json, "use_sliding_window", json_boolean(c->window > 0));
    if (c->type == QWEN3_MOE) { return; }
    json_object_set_new(json, "layer_types", config_kinds_json(c->slides, c->L, LAYER_TYPES, "FS"));
    json_object_set_new(json, "max_window_layers", json_integer(c->L));
}

// eot: the token that ends a text
static inline json_t* config_json(const Config* c, int eot, const char* dtype) {
    static const char* const classes[] = {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
                                          "MistralForCausalLM", "LlamaForCausalLM"};
    json_t* json = json_pack(
        "{s:s, s:[s], s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:{s:s, s:f}, s:b, s:f, s:i, "
        "s:i}",
        "written_by", HF_WRITTEN_BY, "architectures", classes[c->type], "model_type",
        choice_name(MODEL_TYPES, c->type).s, "torch_dtype", dtype, "hidden_act", "silu", "max_position_embeddings",
        c->max_T, "vocab_size", c->V, "num_hidden_layers", c->L, "hidden_size", c->D, "num_attention_heads", c->NH,
        "num_key_value_heads", c->NKV, "head_dim", c->HS, "intermediate_size", c->F, "rms_norm_eps",
        shortest_double(c->eps), "rope_theta", c->theta, "rope_parameters", "rope_type", "default", "rope_theta",
        c->theta, "tie_word_embeddings", c->tied, "attention_dropout", 0.0,
        "bos_token_id", eot, "eos_token_id", eot);
    if (c->type != QWEN2 && c->type != MISTRAL) {
        json_object_set_new(json, "attention_bias", json_boolean(c->o_bias));
    }
    if (c->type != LLAMA) { config_put_windows_(c, json); }
    if (c->type == QWEN3_MOE) { config_put_experts_(c, json); }
    return json;
}

// ---- 2. Parameters: one line for each ----

// what a field of the table is called; all are floats where a build stores floats
typedef struct {
    float *embedding, *norm1, *wq, *bq, *wk, *bk, *wv, *bv, *q_norm, *k_norm, *wo, *bo, *norm2, *gate_up, *down,
        *router, *expert_gate_up, *expert_down, *norm, *head;
} Parameters;

enum { MAX_PARAMETERS = 20 };

// returns their number: what a model does not have is left out. c must outlive the table
static inline int parameter_table(Tensor* table, const Config* c) {
    Tensor *t = table, *first;
    const int L = c->L, D = c->D, F = c->F, FE = c->FE, HS = c->HS, HQ = c->NH * HS, HK = c->NKV * HS;
    const float scaled = 0.02f / sqrtf(2.0f * (float)L);  // what writes to the residual stream starts smaller
#define AT(name) offsetof(Parameters, name)
#define ATTENTION "self_attn."
    // name on disk (Hugging Face's)                 in memory  layers rows columns start values    decayed   on disk
    *t++ = tensor(EMBEDDING_NAME,                    AT(embedding), 0, c->Vp, D, INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    t[-1].disk_rows = c->V;  // the padding is ours alone
    tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    first = t;
    *t++ = tensor("input_layernorm.weight",          AT(norm1),  L, 1,     D,  INIT_ONES,   0.0f,   NO_DECAY, VECTOR);
    *t++ = tensor(ATTENTION "q_proj.weight",         AT(wq),     L, HQ,    D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], ATTENTION "q_proj", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, c->NH);
    if (c->qkv_bias) {
        *t++ = tensor(ATTENTION "q_proj.bias",       AT(bq),     L, 1,     HQ, INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
        tensor_split(&t[-1], SPLIT_ROWS, c->NH);
    }
    *t++ = tensor(ATTENTION "k_proj.weight",         AT(wk),     L, HK,    D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], ATTENTION "k_proj", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, c->NKV);
    tensor_cut_units(&t[-1]);
    if (c->qkv_bias) {
        *t++ = tensor(ATTENTION "k_proj.bias",       AT(bk),     L, 1,     HK, INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
        tensor_split(&t[-1], SPLIT_ROWS, c->NKV);
        tensor_cut_units(&t[-1]);
    }
    *t++ = tensor(ATTENTION "v_proj.weight",         AT(wv),     L, HK,    D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_adaptable(&t[-1], ATTENTION "v_proj", NULL);
    tensor_split(&t[-1], SPLIT_ROWS, c->NKV);
    tensor_cut_units(&t[-1]);
    if (c->qkv_bias) {
        *t++ = tensor(ATTENTION "v_proj.bias",       AT(bv),     L, 1,     HK, INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
        tensor_split(&t[-1], SPLIT_ROWS, c->NKV);
        tensor_cut_units(&t[-1]);
    }
    if (c->qk_norm) {
        *t++ = tensor(ATTENTION "q_norm.weight",     AT(q_norm), L, 1,     HS, INIT_ONES,   0.0f,   NO_DECAY, VECTOR);
        *t++ = tensor(ATTENTION "k_norm.weight",     AT(k_norm), L, 1,     HS, INIT_ONES,   0.0f,   NO_DECAY, VECTOR);
    }
    *t++ = tensor(ATTENTION "o_proj.weight",         AT(wo),     L, D,     HQ, INIT_NORMAL, scaled, DECAY,    AS_IS);
    tensor_adaptable(&t[-1], ATTENTION "o_proj", NULL);
    tensor_split(&t[-1], SPLIT_COLUMNS, c->NH);
    if (c->o_bias) {
        *t++ = tensor(ATTENTION "o_proj.bias",       AT(bo),     L, 1,     D,  INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
    }
    *t++ = tensor("post_attention_layernorm.weight", AT(norm2),  L, 1,     D,  INIT_ONES,   0.0f,   NO_DECAY, VECTOR);
    if (config_has_mlps(c)) {
        *t++ = tensor("mlp.{gate,up}_proj.weight",   AT(gate_up), L, 2 * F, D, INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
        tensor_in_kinds(&t[-1], c->kinds, "M");
        tensor_adaptable(&t[-1], "mlp.{gate,up}_proj", NULL);
        tensor_split(&t[-1], SPLIT_ROWS, 0);
        *t++ = tensor("mlp.down_proj.weight",        AT(down),   L, D,     F,  INIT_NORMAL, scaled, DECAY,    AS_IS);
        tensor_in_kinds(&t[-1], c->kinds, "M");
        tensor_adaptable(&t[-1], "mlp.down_proj", NULL);
        tensor_split(&t[-1], SPLIT_COLUMNS, 0);
    }
    if (config_expert_layers(c) > 0) {
        const char* gate_up = c->fused ? "mlp.experts.gate_up_proj" : "mlp.experts.%d.{gate,up}_proj.weight";
        const char* down = c->fused ? "mlp.experts.down_proj" : "mlp.experts.%d.down_proj.weight";
        *t++ = tensor("mlp.gate.weight",             AT(router), L, c->E,  D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
        tensor_in_kinds(&t[-1], c->kinds, "E");
        tensor_adaptable(&t[-1], NULL, "mlp.gate.weight");
        *t++ = tensor(gate_up,                AT(expert_gate_up), L, 2 * FE, D, INIT_NORMAL, 0.02f, DECAY,    AS_IS);
        tensor_in_kinds(&t[-1], c->kinds, "E");
        tensor_experts(&t[-1], c->E, c->fused ? FUSED : APART);
        tensor_adaptable(&t[-1], "mlp.experts.%d.{gate,up}_proj", "mlp.experts.gate_up_proj");
        *t++ = tensor(down,                      AT(expert_down), L, D,    FE, INIT_NORMAL, scaled, DECAY,    AS_IS);
        tensor_in_kinds(&t[-1], c->kinds, "E");
        tensor_experts(&t[-1], c->E, c->fused ? FUSED : APART);
        tensor_adaptable(&t[-1], "mlp.experts.%d.down_proj", "mlp.experts.down_proj");
    }
    for (Tensor* x = first; x < t; x++) { tensor_under(x, "model.layers.%d."); }
    *t++ = tensor("model.norm.weight",               AT(norm),   0, 1,     D,  INIT_ONES,   0.0f,   NO_DECAY, VECTOR);
    if (!c->tied) {
        *t++ = tensor(HEAD_NAME,                     AT(head),   0, c->Vp, D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
        t[-1].disk_rows = c->V;
        tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    }
#undef ATTENTION
#undef AT
    return (int)(t - table);
}
#endif  // LLMC_QWEN_H
