/*
A transformer whose MLPs are mixtures of experts: what makes one model different from another, one line for each
parameter, and the files that hold them. Everything train_moe.cu computes loops over these tables.
    Config           the sizes; from a preset, from config.json, and back into one
    parameter_table  one line for each parameter: name, shape, start values, decay
Names and config.json are those of Hugging Face's Mixtral (doc/moe.md). Keys of our own, which transformers
ignores: rope_base and rope_alpha, of which rope_theta is made, and rope_base_positions, how many positions there are
without alpha; balance, aux_alpha and z_lambda, the losses of the routers. With balance "bias" each router has a bias
that only chooses, under DeepSeek's name e_score_correction_bias; transformers has no place for it, nor for one of
several experts a token: it weighs that by 1, we by its score.
Rows of q_proj and k_proj lie as in the files, the two halves of a head apart: RoPE turns row i with row i + HS/2.
Errors: fail_input names file, key, expected and found.
Source: Jiang et al. 2024, arXiv:2401.04088 (Mixtral); Shazeer 2019, arXiv:1911.02150 (one key/value head);
        bloc97 2023, NTK-aware RoPE
*/
#ifndef LLMC_MOE_H
#define LLMC_MOE_H
#include "../core/choice.h"      // choice_name
#include "../core/jsonfile.h"    // json_read, json_ints, json_number
#include "../core/tensor.h"      // Tensor: the table of parameters
#include "../files/hf_folder.h"  // HF_WRITTEN_BY
#include "../ops/rope.h"         // rope_scaled_base
#include "../ops/router.h"       // ROUTER_MOST_EXPERTS, ROUTER_MOST_CHOSEN
#include "config_parts.h"         // config_padded, config_part_keys, config_warn_of_near
#include "rope_theta.h"          // rope_theta_parse

// ---- 1. Config ----

#define BALANCE_NAMES "none|loss|bias"
typedef enum { BALANCE_NONE, BALANCE_LOSS, BALANCE_BIAS } Balance;
enum { CONFIG_MAX_T = 1 << 24, CONFIG_MAX_LAYERS = 1024 };

typedef struct {
    int max_T;            // longest sequence, 32768
    int V, Vp;            // vocabulary, 32000; the same, padded to a multiple of 128
    int L, D;             // layers, 30; channels of the residual stream, 768
    int NH, NKV, HS;      // heads of queries, 12; of keys and values, 1; channels of a head, 64
    int E, k, F;          // experts of a layer, 16; of which a token takes 4; width of each, 6144
    int tied;             // the embedding is the output matrix
    float eps;            // RMSNorm's, 1e-6
    double rope_base, rope_alpha;  // 10000; NTK's factor, 1
    int base_T;           // positions without that factor, which makes max_T of them
    int balance;          // Balance: how experts are kept equally busy
    float aux_alpha;      // weight of the balance loss, 0.01
    float z_lambda;       // weight of the z-loss, 0
} Config;

// what one of `ranks` ranks has of heads and the padded vocabulary, with --tp
static inline Config config_part(const Config* c, int ranks) {
    Config part = *c;
    part.NH /= ranks, part.NKV = config_part_keys(c->NKV, ranks), part.Vp /= ranks;
    return part;
}

// what RoPE's frequencies are powers of: with alpha the slowest turns alpha times slower, the fastest as before
static inline double config_rope_theta(const Config* c) { return rope_scaled_base(c->rope_base, c->rope_alpha, c->HS); }

// a trained model takes texts alpha times as long: that is what the factor is for
static inline int config_positions(int base_T, double alpha) {
    return alpha > 1.0 ? (int)fmin(base_T * alpha, CONFIG_MAX_T) : base_T;
}

// of a model that was trained with alpha: how many there would be without
static inline int config_base_positions(int max_T, double alpha) {
    return alpha > 1.0 ? (int)ceil(max_T / alpha) : max_T;
}

// 0: base and alpha make a theta that no config.json may have
static inline int config_check_rope(const Config* c, ErrorText* error) {
    const double theta = config_rope_theta(c);
    if (theta >= ROPE_THETA_LEAST && theta <= ROPE_THETA_MOST) { return 1; }
    return error_set(error, "theta of RoPE: expected %g..%g, found %g, which alpha %g makes of base %g in heads of %d",
                     ROPE_THETA_LEAST, ROPE_THETA_MOST, theta, c->rope_alpha, c->rope_base, c->HS);
}

static inline Config config_make(int max_T, int V, int L, int D, int NH, int NKV, int HS, int E, int k, int F) {
    const Config c = {max_T, V, config_padded(V), L, D, NH, NKV, HS, E, k, F, 0, 1e-6f, 10000.0, 1.0,
                      max_T, BALANCE_LOSS, 0.01f, 0.0f};
    return c;
}

static inline Config config_preset(const char* name, int V) {
    static const struct { const char* name; int max_T, L, D, NH, NKV, HS, E, k, F; } presets[] = {
        {"tiny", 256, 2, 64, 4, 1, 16, 4, 2, 256},
        {"small", 2048, 6, 256, 4, 1, 64, 8, 2, 1024},
        {"6.9b", 32768, 30, 768, 12, 1, 64, 16, 4, 6144},
    };
    const char* size = strncmp(name, "moe:", 4) == 0 ? name + 4 : name;
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(size, presets[i].name) != 0) { continue; }
        return config_make(presets[i].max_T, V, presets[i].L, presets[i].D, presets[i].NH, presets[i].NKV,
                           presets[i].HS, presets[i].E, presets[i].k, presets[i].F);
    }
    fail_input("--model: expected tiny, small or 6.9b, found \"%s\"", name);
}

// ours say what theta was made of
static inline int config_parse_rope_(Config* c, const json_t* json, ErrorText* error) {
    double theta = 0.0;
    if (!rope_theta_parse(&theta, json, "NTK's factor is \"rope_alpha\"", error)) { return 0; }
    c->rope_base = theta > 0.0 ? theta : 1e6;  // what transformers takes where nothing is said
    c->rope_alpha = 1.0;
    if (!json_number(&c->rope_base, json, "rope_base", ROPE_THETA_LEAST, ROPE_THETA_MOST, error) ||
        !json_number(&c->rope_alpha, json, "rope_alpha", 1e-3, 1e6, error)) {
        return 0;
    }
    c->base_T = config_base_positions(c->max_T, c->rope_alpha);
    const JsonInt positions[] = {{"rope_base_positions", &c->base_T, 1, CONFIG_MAX_T}};
    if (json_object_get(json, positions[0].key) && !json_ints(json, positions, 1, error)) { return 0; }
    if (theta > 0.0 && fabs(config_rope_theta(c) / theta - 1.0) > 1e-6) {  // as somebody types it: 85550.376
        return error_set(error, "\"rope_theta\" %.9g: expected %.9g, which \"rope_base\" and \"rope_alpha\" make",
                         theta, config_rope_theta(c));
    }
    return config_check_rope(c, error);
}

// where nothing is said the routers have no losses: transformers adds "router_aux_loss_coef" only where it is asked to
static inline int config_parse_losses_(Config* c, const json_t* json, ErrorText* error) {
    double aux_alpha = 0.0, z_lambda = 0.0;
    if (!json_number(&aux_alpha, json, "aux_alpha", 0.0, 1e3, error) ||
        !json_number(&z_lambda, json, "z_lambda", 0.0, 1e3, error)) {
        return 0;
    }
    c->aux_alpha = (float)aux_alpha;
    c->z_lambda = (float)z_lambda;
    c->balance = aux_alpha > 0.0 ? BALANCE_LOSS : BALANCE_NONE;
    return json_choice(&c->balance, json, "balance", BALANCE_NAMES, error);
}

static inline int config_parse(Config* c, const json_t* json, ErrorText* error) {
    int max_T, V, L, D, NH, NKV, E, k, F;
    double eps = 1e-5;
    const JsonInt sizes[] = {{"max_position_embeddings", &max_T, 1, CONFIG_MAX_T}, {"vocab_size", &V, 1, 1 << 24},
                             {"num_hidden_layers", &L, 1, CONFIG_MAX_LAYERS},      {"hidden_size", &D, 1, 1 << 20},
                             {"num_attention_heads", &NH, 1, 1 << 14}, {"num_key_value_heads", &NKV, 1, 1 << 14},
                             {"num_local_experts", &E, 1, ROUTER_MOST_EXPERTS},
                             {"num_experts_per_tok", &k, 1, ROUTER_MOST_CHOSEN},
                             {"intermediate_size", &F, 1, 1 << 22}};
    if (!json_agrees(json, json_pack("{s:s}", "model_type", "mixtral"), error) || !json_ints(json, sizes, 9, error)) {
        return 0;
    }
    *c = config_make(max_T, V, L, D, NH, NKV, D / NH, E, k, F);
    const JsonInt head[] = {{"head_dim", &c->HS, 2, 1024}};
    const json_t* head_dim = json_object_get(json, "head_dim");
    if (head_dim && !json_is_null(head_dim) && !json_ints(json, head, 1, error)) { return 0; }
    if (NH % NKV != 0) {
        return error_set(error, "\"num_attention_heads\" %d: expected a multiple of \"num_key_value_heads\" %d", NH,
                         NKV);
    }
    if (c->HS % 2 != 0 || c->HS < 2) {
        return error_set(error, "\"head_dim\": expected an even number, found %d", c->HS);
    }
    if (k > E) { return error_set(error, "\"num_experts_per_tok\": expected at most %d experts, found %d", E, k); }
    if (!json_number(&eps, json, "rms_norm_eps", 1e-12, 0.1, error) || !config_parse_rope_(c, json, error) ||
        !config_parse_losses_(c, json, error) || !json_switch(&c->tied, json, "tie_word_embeddings", error)) {
        return 0;
    }
    c->eps = (float)eps;
    const json_t* window = json_object_get(json, "sliding_window");
    if (window && !json_is_null(window)) {
        return error_set(error, "\"sliding_window\": expected null, attention without one");
    }
    return json_agrees(json, json_pack("{s:s, s:f}", "hidden_act", "silu", "attention_dropout", 0.0), error);
}

// what a config.json is, beside the sizes in it
typedef struct {
    int says_balance;  // how experts are kept equally busy
    int is_ours;       // llmc wrote it
} ConfigFile;

// keys that may be left out
#define CONFIG_OPTIONAL \
    "model_type|head_dim|rms_norm_eps|rope_theta|rope_parameters|rope_scaling|rope_base|rope_alpha" \
    "|rope_base_positions|aux_alpha|z_lambda|balance|tie_word_embeddings|sliding_window|hidden_act" \
    "|attention_dropout"

static inline Config config_load(const char* path, ConfigFile* file) {
    Config c;
    ErrorText error;
    json_t* json = json_read(path);
    if (!config_parse(&c, json, &error)) { fail_input("%s: %s", path, error.text); }
    config_warn_of_near(path, json, CONFIG_OPTIONAL);
    const char* writer = json_string_value(json_object_get(json, "written_by"));
    file->is_ours = writer && strcmp(writer, HF_WRITTEN_BY) == 0;
    file->says_balance = json_object_get(json, "balance") || json_object_get(json, "aux_alpha");
    json_decref(json);
    return c;
}

static inline json_t* config_json(const Config* c, int eot, const char* dtype) {
    const double theta = config_rope_theta(c);
    json_t* json = json_pack(
        "{s:s, s:[s], s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:{s:s, s:f}}",
        "written_by", HF_WRITTEN_BY, "architectures", "MixtralForCausalLM", "model_type", "mixtral", "torch_dtype",
        dtype, "hidden_act", "silu", "max_position_embeddings", c->max_T, "vocab_size", c->V, "num_hidden_layers",
        c->L, "hidden_size", c->D, "num_attention_heads", c->NH, "num_key_value_heads", c->NKV, "head_dim", c->HS,
        "num_local_experts", c->E, "num_experts_per_tok", c->k, "intermediate_size", c->F, "rms_norm_eps",
        shortest_double(c->eps), "rope_theta", theta, "rope_parameters", "rope_type", "default", "rope_theta", theta);
    json_t* more = json_pack(
        "{s:b, s:n, s:f, s:f, s:b, s:f, s:f, s:i, s:s, s:f, s:f, s:i, s:i}", "tie_word_embeddings", c->tied,
        "sliding_window", "attention_dropout", 0.0, "router_aux_loss_coef", 0.0, "output_router_logits", 0,
        "rope_base", c->rope_base, "rope_alpha", c->rope_alpha, "rope_base_positions", c->base_T, "balance",
        choice_name(BALANCE_NAMES, c->balance).s, "aux_alpha", shortest_double(c->aux_alpha), "z_lambda",
        shortest_double(c->z_lambda), "bos_token_id", eot, "eos_token_id", eot);
    json_object_update(json, more);
    json_decref(more);
    return json;
}

// ---- 2. Parameters: one line for each ----

// floats: gradients, and parameters where a build stores floats; weights as the ops read them are StoredParameters of
// the trainer, the same fields in the same order
typedef struct {
    float *embedding, *norm1, *wq, *wk, *wv, *wo, *norm2, *router, *bias, *gate_up, *down, *norm, *head;
} Parameters;

enum { MAX_PARAMETERS = 13 };

// returns their number: what a model does not have is left out, and its pointer stays NULL
static inline int parameter_table(Tensor* table, const Config* c) {
    Tensor* t = table;
    const int L = c->L, D = c->D, E = c->E, F = c->F, HQ = c->NH * c->HS, HK = c->NKV * c->HS;
    const float scaled = 0.02f / sqrtf(2.0f * (float)L);  // what writes to the residual stream starts smaller
#define AT(name) offsetof(Parameters, name)
#define ATTENTION "self_attn."
#define MOE "block_sparse_moe."
    // name on disk (Hugging Face's)                 in memory layers rows columns start values     decayed    on disk
    *t++ = tensor("model.embed_tokens.weight",       AT(embedding), 0, c->Vp, D, INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    t[-1].disk_rows = c->V;  // the padding is ours alone
    tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    Tensor* first = t;
    *t++ = tensor("input_layernorm.weight",          AT(norm1),   L, 1,     D,  INIT_ONES,   0.0f,   NO_DECAY, VECTOR);
    *t++ = tensor(ATTENTION "q_proj.weight",         AT(wq),      L, HQ,    D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_split(&t[-1], SPLIT_ROWS, c->NH);
    *t++ = tensor(ATTENTION "k_proj.weight",         AT(wk),      L, HK,    D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_split(&t[-1], SPLIT_ROWS, c->NKV);
    tensor_cut_units(&t[-1]);
    *t++ = tensor(ATTENTION "v_proj.weight",         AT(wv),      L, HK,    D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_split(&t[-1], SPLIT_ROWS, c->NKV);
    tensor_cut_units(&t[-1]);
    *t++ = tensor(ATTENTION "o_proj.weight",         AT(wo),      L, D,     HQ, INIT_NORMAL, scaled, DECAY,    AS_IS);
    tensor_split(&t[-1], SPLIT_COLUMNS, c->NH);
    *t++ = tensor("post_attention_layernorm.weight", AT(norm2),   L, 1,     D,  INIT_ONES,   0.0f,   NO_DECAY, VECTOR);
    *t++ = tensor(MOE "gate.weight",                 AT(router),  L, E,     D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    if (c->balance == BALANCE_BIAS) {
        *t++ = tensor(MOE "gate.e_score_correction_bias", AT(bias), L, 1,   E,  INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
        tensor_stored(&t[-1], STORED_F32);  // steps of 1e-3 would be lost in a bf16
        tensor_counted(&t[-1]);
    }
    *t++ = tensor(MOE "experts.%d.{w1,w3}.weight",   AT(gate_up), L, 2 * F, D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
    tensor_experts(&t[-1], E, APART);
    *t++ = tensor(MOE "experts.%d.w2.weight",        AT(down),    L, D,     F,  INIT_NORMAL, scaled, DECAY,    AS_IS);
    tensor_experts(&t[-1], E, APART);
    for (Tensor* x = first; x < t; x++) { tensor_under(x, "model.layers.%d."); }
    *t++ = tensor("model.norm.weight",               AT(norm),    0, 1,     D,  INIT_ONES,   0.0f,   NO_DECAY, VECTOR);
    if (!c->tied) {
        *t++ = tensor("lm_head.weight",              AT(head),    0, c->Vp, D,  INIT_NORMAL, 0.02f,  DECAY,    AS_IS);
        t[-1].disk_rows = c->V;
        tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    }
#undef MOE
#undef ATTENTION
#undef AT
    return (int)(t - table);
}
#endif  // LLMC_MOE_H
