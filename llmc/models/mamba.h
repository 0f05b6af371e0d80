/*
Mamba with a choice of head: what makes one model different from another, one line for each parameter, and the files
that hold them. Everything train_mamba_hpn.c computes loops over these tables.
    Config              the sizes and kinds; from a preset, from config.json, and back into one
    parameter_table     one line for each parameter that this model has: name, shape, start values, decay
    mamba_start_values  the start values that no distribution of the table describes
    mamba_load          parameters from safetensors, with layers left out that the file does not have
Names are Hugging Face's for Mamba ("model_type": "mamba"); the heads with prototypes add hpn.prototypes and
hpn.proj.weight, a classifier its own classifier.weight, and config.json says so under "head", which transformers
ignores.
Errors: fail_input names file, key, expected and found.
Source: Gu & Dao 2023, arXiv:2312.00752; start values as in github.com/state-spaces/mamba
*/
#ifndef LLMC_MAMBA_H
#define LLMC_MAMBA_H
#include "../core/fmath.h"        // fm_exp, fm_expm1, fm_log: start values
#include "../files/hf_folder.h"   // HF_WRITTEN_BY, SafeSet
#include "../core/jsonfile.h"     // json_read, json_ints
#include "../core/tensor.h"       // Tensor: the table of parameters
#include "../files/tensorfile.h"  // tensors_load_layers
#include "config_parts.h"         // config_warn_of_near
#include "head.h"                 // HeadConfig

// ---- 1. Config ----

typedef struct {
    int V;               // vocabulary, 50280
    int L;               // layers, 24
    int M;               // d_model, width of the residual stream, 768
    int E;               // d_inner, channels inside a layer, 1536
    int NS;              // d_state, states of a channel, 16
    int K;               // d_conv, taps of the convolution, 4
    int R;               // dt_rank, 48
    int use_bias;        // in_proj and out_proj have one
    int use_conv_bias;
    float eps;           // RMSNorm's
    HeadConfig head;     // what is done with the last hidden state, head.h
} Config;

// columns of x_proj: dt, ssm_B, ssm_C
static inline int config_dbc(const Config* c) { return c->R + 2 * c->NS; }
static inline int mamba_dt_rank(int M) { return (M + 15) / 16; }

static inline Config config_make(int V, int L, int M) {
    Config c;
    memset(&c, 0, sizeof c);
    c.V = V;
    c.L = L;
    c.M = M;
    c.E = 2 * M;
    c.NS = 16;
    c.K = 4;
    c.R = mamba_dt_rank(M);
    c.use_conv_bias = 1;
    c.eps = 1e-5f;
    c.head = head_config(M, V);
    return c;
}

static inline Config config_preset(const char* name, int V) {
    static const struct { const char* name; int L, M; } presets[] = {
        {"tiny", 4, 128},   {"130m", 24, 768},  {"370m", 48, 1024},
        {"790m", 48, 1536}, {"1.4b", 48, 2048}, {"2.8b", 64, 2560},
    };
    const char* size = strncmp(name, "mamba:", 6) == 0 ? name + 6 : name;
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(size, presets[i].name) == 0) { return config_make(V, presets[i].L, presets[i].M); }
    }
    fail_input("--model: expected tiny, 130m, 370m, 790m, 1.4b or 2.8b, found \"%s\"", name);
}

static inline int config_parse(Config* c, const json_t* json, ErrorText* error) {
    int V, L, M;
    const json_t *eps = json_object_get(json, "layer_norm_epsilon"), *rank = json_object_get(json, "time_step_rank");
    const JsonInt sizes[] = {{"vocab_size", &V, 1, 1 << 24}, {"num_hidden_layers", &L, 1, 1024},
                             {"hidden_size", &M, 1, 1 << 20}};
    if (!json_agrees(json, json_pack("{s:s}", "model_type", "mamba"), error) || !json_ints(json, sizes, 3, error)) {
        return 0;
    }
    *c = config_make(V, L, M);
    const JsonInt inner[] = {{"state_size", &c->NS, 1, 256}, {"conv_kernel", &c->K, 1, 16},
                             {"expand", &c->E, 1, 1 << 10}, {"intermediate_size", &c->E, 1, 1 << 22},
                             {"time_step_rank", &c->R, 1, 1 << 20}};
    if (!json_ints(json, inner, 2, error)) { return 0; }
    if (json_object_get(json, "expand")) {
        if (!json_ints(json, inner + 2, 1, error)) { return 0; }
        c->E *= M;
    }
    if (json_object_get(json, "intermediate_size") && !json_ints(json, inner + 3, 1, error)) { return 0; }
    if (c->E > 1 << 22) {
        return error_set(error, "\"expand\": expected at most %d channels, found %d", 1 << 22, c->E);
    }
    const char* auto_rank = json_string_value(rank);
    if (rank && !(auto_rank && strcmp(auto_rank, "auto") == 0) && !json_ints(json, inner + 4, 1, error)) { return 0; }
    if (eps) { c->eps = (float)json_number_value(eps); }  // 0 of what is no number
    if (!(c->eps > 0.0f && c->eps < 1.0f)) {
        return error_set(error, "\"layer_norm_epsilon\": expected a number between 0 and 1");
    }
    if (!json_switch(&c->use_bias, json, "use_bias", error) ||
        !json_switch(&c->use_conv_bias, json, "use_conv_bias", error) ||
        !json_switch(&c->head.tied, json, "tie_word_embeddings", error)) {
        return 0;
    }
    int layer = 0;
    return head_parse(&c->head, json, error) && json_choice(&layer, json, "layer", "mamba1", error) &&
           json_agrees(json, json_pack("{s:s}", "hidden_act", "silu"), error);
}

// keys that may be left out
#define CONFIG_OPTIONAL \
    "model_type|layer_norm_epsilon|time_step_rank|expand|intermediate_size|use_bias|use_conv_bias" \
    "|tie_word_embeddings|hidden_act|head|proto|num_classes|is_classifier|proto_dim|hpn_scale"

static inline Config config_load(const char* path) {
    Config c;
    ErrorText error;
    json_t* json = json_read(path);
    if (!config_parse(&c, json, &error)) { fail_input("%s: %s", path, error.text); }
    config_warn_of_near(path, json, CONFIG_OPTIONAL);
    json_decref(json);
    return c;
}

static inline json_t* config_json(const Config* c, int eot, const char* dtype) {
    const int is_language_model = head_is_language_model(&c->head);
    const char* architecture = is_language_model ? "MambaForCausalLM" : "MambaModel";
    json_t* json = json_pack("{s:s, s:[s], s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:b, s:b, s:b, "
                             "s:b, s:i, s:i, s:i}",
        "written_by", HF_WRITTEN_BY, "architectures", architecture, "model_type", "mamba",
        "torch_dtype", dtype, "hidden_act", "silu",
        "vocab_size", c->V, "num_hidden_layers", c->L, "hidden_size", c->M,
        "expand", c->E % c->M == 0 ? c->E / c->M : 1, "intermediate_size", c->E, "state_size", c->NS,
        "conv_kernel", c->K, "time_step_rank", c->R, "layer_norm_epsilon", shortest_double(c->eps),
        "use_bias", c->use_bias, "use_conv_bias", c->use_conv_bias, "residual_in_fp32", 1,
        "tie_word_embeddings", c->head.tied, "bos_token_id", eot, "eos_token_id", eot, "pad_token_id", eot);
    if (!is_language_model) { json_object_set_new(json, "layer", json_string("mamba1")); }
    head_to_json(json, &c->head);
    return json;
}

// ---- 2. Parameters: one line for each ----

typedef struct {
    float *embedding, *norm, *in_proj, *in_bias, *conv, *conv_bias, *x_proj, *dt_proj, *dt_bias, *A_log, *D, *out_proj,
        *out_bias, *norm_f, *lm_head, *prototypes, *projection;
} Parameters;

enum { MAX_PARAMETERS = 17 };

// returns their number: what a model does not have is left out, and its pointer stays NULL
static inline int parameter_table(Tensor* table, const Config* c) {
    Tensor* t = table;
    const int L = c->L, M = c->M, E = c->E, NS = c->NS, K = c->K, R = c->R, P = config_dbc(c);
    const int V = c->head.classes, Dp = c->head.Dp;
    const float of_M = 1.0f / sqrtf((float)M), of_E = 1.0f / sqrtf((float)E);
    const float of_K = 1.0f / sqrtf((float)K), of_R = 1.0f / sqrtf((float)R);
    const float small = of_E / sqrtf((float)L);  // of out_proj, which writes to the residual stream
#define AT(name) offsetof(Parameters, name)
#define LAYER "backbone.layers.%d."
#define MIXER LAYER "mixer."
    // name on disk (Hugging Face's)            in memory    layers rows columns start values         decayed   on disk
    *t++ = tensor("backbone.embeddings.weight", AT(embedding),  0, c->V,  M,     INIT_NORMAL,  0.02f, DECAY,    AS_IS);
    *t++ = tensor(LAYER "norm.weight",          AT(norm),       L, 1,     M,     INIT_ONES,    0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor(MIXER "in_proj.weight",       AT(in_proj),    L, 2 * E, M,     INIT_UNIFORM, of_M,  DECAY,    AS_IS);
    if (c->use_bias) {
        *t++ = tensor(MIXER "in_proj.bias",     AT(in_bias),    L, 1,     2 * E, INIT_ZEROS,   0.0f,  NO_DECAY, VECTOR);
    }
    *t++ = tensor(MIXER "conv1d.weight",        AT(conv),       L, E,     K,     INIT_UNIFORM, of_K,  DECAY,    CONV);
    if (c->use_conv_bias) {
        *t++ = tensor(MIXER "conv1d.bias",      AT(conv_bias),  L, 1,     E,     INIT_UNIFORM, of_K,  NO_DECAY, VECTOR);
    }
    *t++ = tensor(MIXER "x_proj.weight",        AT(x_proj),     L, P,     E,     INIT_UNIFORM, of_E,  DECAY,    AS_IS);
    *t++ = tensor(MIXER "dt_proj.weight",       AT(dt_proj),    L, E,     R,     INIT_UNIFORM, of_R,  DECAY,    AS_IS);
    *t++ = tensor(MIXER "dt_proj.bias",         AT(dt_bias),    L, 1,     E,     INIT_UNIFORM, 1.0f,  NO_DECAY, VECTOR);
    *t++ = tensor(MIXER "A_log",                AT(A_log),      L, E,     NS,    INIT_ZEROS,   0.0f,  NO_DECAY, AS_IS);
    *t++ = tensor(MIXER "D",                    AT(D),          L, 1,     E,     INIT_ONES,    0.0f,  NO_DECAY, VECTOR);
    *t++ = tensor(MIXER "out_proj.weight",      AT(out_proj),   L, M,     E,     INIT_UNIFORM, small, DECAY,    AS_IS);
    if (c->use_bias) {
        *t++ = tensor(MIXER "out_proj.bias",    AT(out_bias),   L, 1,     M,     INIT_ZEROS,   0.0f,  NO_DECAY, VECTOR);
    }
    *t++ = tensor("backbone.norm_f.weight",     AT(norm_f),     0, 1,     M,     INIT_ONES,    0.0f,  NO_DECAY, VECTOR);
    if (head_has_projection(&c->head)) {
        *t++ = tensor("hpn.proj.weight",        AT(projection), 0, Dp,    M,     INIT_UNIFORM, of_M,  DECAY,    AS_IS);
    }
    if (head_has_prototypes(&c->head)) {
        *t++ = tensor("hpn.prototypes",         AT(prototypes), 0, V,     Dp,    INIT_ZEROS,   0.0f,  NO_DECAY, AS_IS);
    } else if (!c->head.tied) {
        const char* name = c->head.is_classifier ? "classifier.weight" : "lm_head.weight";
        *t++ = tensor(name,                     AT(lm_head),    0, V,     M,     INIT_NORMAL,  0.02f, DECAY,    AS_IS);
    }
#undef MIXER
#undef LAYER
#undef AT
    return (int)(t - table);
}

// the line of the table behind a field of Parameters, NULL if this model has none
#define PARAMETER(table, n, name) mamba_parameter_line_(table, n, offsetof(Parameters, name))
static inline Tensor* mamba_parameter_line_(Tensor* table, int n, size_t field) {
    for (int i = 0; i < n; i++) {
        if (table[i].field == field) { return &table[i]; }
    }
    return NULL;
}

// ---- 3. Start values ----

// softplus of dt's bias begins between 1e-3 and 1e-1, log-uniform: u in -1..1 becomes such a bias
static inline float mamba_dt_bias_start_(float u) {
    const float low = fm_log(0.001f), high = fm_log(0.1f);
    float v = fm_exp(low + (0.5f * u + 0.5f) * (high - low));
    v = v > 1e-4f ? v : 1e-4f;
    return v + fm_log(-fm_expm1(-v));  // softplus of this is v
}

// After tensors_init, and before old layers are loaded, if there is a file to load them from: A_log[e][n] = log(n + 1),
// and the biases of dt. Layers whose `old` is -1 (NULL: none) join others
static inline void mamba_start_values(Tensor* table, int n, const Config* c, float* params, const int* old) {
    const Tensor *A_log = PARAMETER(table, n, A_log), *dt_bias = PARAMETER(table, n, dt_bias),
        *out_proj = PARAMETER(table, n, out_proj);
    for (int l = 0; l < c->L; l++) {
        float* a = params + A_log->offset + (size_t)l * tensor_slice_elements(A_log);
        float* b = params + dt_bias->offset + (size_t)l * (size_t)c->E;
        for (int i = 0; i < c->E * c->NS; i++) { a[i] = fm_log((float)(i % c->NS + 1)); }
        for (int e = 0; e < c->E; e++) { b[e] = mamba_dt_bias_start_(b[e]); }
        // a layer that joins a trained model leaves its function as it is, and learns at once, out_proj first
        const size_t n_out = tensor_slice_elements(out_proj);
        if (old && old[l] < 0) { memset(params + out_proj->offset + (size_t)l * n_out, 0, sizeof(float) * n_out); }
    }
}

// ---- 4. Files ----

// path: a .safetensors file or the index of several. Layer l of the model is layer old[l] of the file, -1: not there,
// NULL: the same. The head may be another than the file's: then its tensors are not looked for
static inline void mamba_load(const char* path, const Tensor* table, int n, const int* old, int with_head,
                              float* params) {
    SafeSet set;
    Tensor found[MAX_PARAMETERS];
    int n_found = 0;
    memset(found, 0, sizeof found);
    safeset_open(&set, path);
    for (int i = 0; i < n; i++) {
        const int is_head = strncmp(table[i].name, "hpn.", 4) == 0 || table[i].field == offsetof(Parameters, lm_head);
        if (with_head || !is_head) { found[n_found++] = table[i]; }
    }
    const char* first_name = "backbone.embedding.weight";  // what the first files call it
    if (safeset_find(&set, first_name)) { found[0].name = first_name; }
    tensors_load_layers(&set, found, n_found, "", params, old);
    if (with_head && !PARAMETER(found, n_found, lm_head)) { tensors_check_tied(&set, "lm_head.weight", found[0].name); }
    safeset_report_unused(&set);
    safeset_close(&set);
}
#endif  // LLMC_MAMBA_H
