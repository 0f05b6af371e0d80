/*
What both GPT-2 trainers, train_gpt2.c and train_gpt2.cu, agree on: the sizes of a model, the table of its parameters
and the files that hold them. So a checkpoint of one continues in the other.
    Config          the sizes; from a preset, a config.json or the header of llm.c's .bin, and back into a config.json
    parameter_table one line for each of the 16 parameters: name, shape, start values, decay
    GPT2            the model: sizes, parameters and what is kept of them
    gpt2_load       parameters from safetensors, one file or several, or llm.c's .bin
Errors: fail_input names file, key, expected and found.
Source: Radford et al. 2019 (GPT-2); Brown et al. 2020, arXiv:2005.14165 (GPT-3)
*/
#ifndef LLMC_GPT2_H
#define LLMC_GPT2_H
#include "../files/hf_folder.h"   // HF_WRITTEN_BY, SafeSet
#include "../core/jsonfile.h"     // json_read, json_ints
#include "../files/llmc_bin.h"    // llm.c's checkpoint format
#include "../files/tensorfile.h"  // tensors_load_into, tensors_check_tied
#include "../ranks/model_gradients.h"  // Model, model_point_gradients
#include "config_parts.h"         // config_padded, config_warn_of_near

// ---- 1. Config: what makes one GPT-2 different from another ----

typedef struct {
    int max_T;  // longest sequence, 1024
    int V;      // vocabulary, 50257
    int Vp;     // the same, padded to a multiple of 128: 50304
    int L;      // layers, 12
    int NH;     // heads, 12
    int C;      // channels, 768
    int HC;     // of all heads together: C, or with --tp what a rank has of them
    int F;      // of the MLP: 4 C, or what a rank has of them
} Config;

static inline Config config_make(int max_T, int V, int L, int NH, int C) {
    Config c = {max_T, V, config_padded(V), L, NH, C, C, 4 * C};
    return c;
}

// what one of `ranks` ranks has of heads, MLPs and the padded vocabulary, with --tp
static inline Config config_part(const Config* c, int ranks) {
    Config part = *c;
    part.NH /= ranks, part.HC /= ranks, part.F /= ranks, part.Vp /= ranks;
    return part;
}

static inline Config config_preset(const char* name, int V) {
    static const struct {
        const char* name;
        int L, C, NH, max_T;
    } presets[] = {
        {"tiny", 4, 128, 4, 256},
        {"gpt2:d6", 6, 384, 6, 1024},        {"gpt2:d12", 12, 768, 12, 1024},     {"gpt2:d24", 24, 1024, 16, 1024},
        {"gpt2:d36", 36, 1280, 20, 1024},    {"gpt2:d48", 48, 1600, 25, 1024},    {"gpt2:d60", 60, 1920, 30, 1024},
        {"gpt2:d72", 72, 2880, 30, 1024},    {"gpt2:d84", 84, 3456, 36, 1024},    {"gpt3:c384", 6, 384, 6, 2048},
        {"gpt3:c768", 12, 768, 12, 2048},    {"gpt3:c1024", 24, 1024, 16, 2048},  {"gpt3:c1536", 24, 1536, 16, 2048},
        {"gpt3:c2048", 24, 2048, 16, 2048},  {"gpt3:c2560", 32, 2560, 32, 2048},  {"gpt3:c4096", 32, 4096, 32, 2048},
        {"gpt3:c5120", 40, 5120, 40, 2048},  {"gpt3:c12288", 96, 12288, 96, 2048},
    };
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        const char* after = strchr(presets[i].name, ':');  // "d12" is short for "gpt2:d12"
        if (strcmp(name, presets[i].name) == 0 || (name[0] == 'd' && after && strcmp(name, after + 1) == 0)) {
            return config_make(presets[i].max_T, V, presets[i].L, presets[i].NH, presets[i].C);
        }
    }
    fail_input(
        "--model: expected tiny, d6 d12 d24 d36 d48 d60 d72 d84, or gpt3: with c384 c768 c1024 c1536 c2048 c2560 "
        "c4096 c5120 c12288, found \"%s\"",
        name);
}

static inline int config_parse(Config* c, const json_t* json, ErrorText* error) {
    int max_T = 0, V = 0, L = 0, NH = 0, C = 0;
    memset(c, 0, sizeof *c);
    const JsonInt sizes[] = {{"n_positions", &max_T, 1, 1 << 24},
                             {"vocab_size", &V, 1, 1 << 24},
                             {"n_layer", &L, 1, 1024},
                             {"n_head", &NH, 1, 1 << 20},
                             {"n_embd", &C, 1, 1 << 20}};
    if (!json_agrees(json, json_pack("{s:s}", "model_type", "gpt2"), error) || !json_ints(json, sizes, 5, error)) {
        return 0;
    }
    if (C % NH != 0) { return error_set(error, "\"n_embd\" %d: expected a multiple of \"n_head\" %d", C, NH); }
    *c = config_make(max_T, V, L, NH, C);
    return json_agrees(json,
                       json_pack("{s:s, s:i, s:f, s:b, s:b, s:b, s:b}", "activation_function", "gelu_new", "n_inner",
                                 4 * C, "layer_norm_epsilon", 1e-5, "tie_word_embeddings", 1, "scale_attn_weights", 1,
                                 "scale_attn_by_inverse_layer_idx", 0, "add_cross_attention", 0),
                       error);
}

// keys that may be left out
#define CONFIG_OPTIONAL \
    "model_type|activation_function|n_inner|layer_norm_epsilon|tie_word_embeddings" \
    "|scale_attn_weights|scale_attn_by_inverse_layer_idx|add_cross_attention"

static inline Config config_load(const char* path) {
    Config c;
    ErrorText error;
    json_t* json = json_read(path);
    if (!config_parse(&c, json, &error)) { fail_input("%s: %s", path, error.text); }
    config_warn_of_near(path, json, CONFIG_OPTIONAL);
    json_decref(json);
    return c;
}

static inline json_t* config_json(Config c, int eot, const char* dtype) {
    return json_pack("{s:s, s:[s], s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:f, s:i, s:i, s:b, s:f, s:f, s:f}",
                     "written_by", HF_WRITTEN_BY, "architectures", "GPT2LMHeadModel", "model_type", "gpt2",
                     "torch_dtype", dtype, "activation_function", "gelu_new", "n_positions", c.max_T, "vocab_size",
                     c.V, "n_layer", c.L, "n_head", c.NH, "n_embd", c.C, "layer_norm_epsilon", 1e-5, "bos_token_id",
                     eot, "eos_token_id", eot, "tie_word_embeddings", 1, "resid_pdrop", 0.0, "embd_pdrop", 0.0,
                     "attn_pdrop", 0.0);
}

// where --dropout leaves out elements (dropout.h): of the embeddings, and of what each half of block l
// adds to the stream
enum { SITE_EMBEDDING = 0 };
static inline int site_attention(int l) { return 1 + 2 * l; }
static inline int site_mlp(int l) { return 2 + 2 * l; }

// ---- 2. Parameters: one line for each; everything else loops over this table ----

typedef struct {
    float *wte, *wpe, *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb, *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb,
        *lnfw, *lnfb;
} Parameters;

enum { N_PARAMETERS = 16 };

static inline void parameter_table(Tensor* t, Config c) {
    const int L = c.L, C = c.C;
    const float scaled = 0.02f / sqrtf(2.0f * (float)L);  // layers that write to the residual stream start smaller
#define FIELD(name) offsetof(Parameters, name)
    // name on disk (Hugging Face's), in memory, layers, rows, columns, start values, decayed?, how it lies on disk
    *t++ = tensor("transformer.wte.weight", FIELD(wte), 0, c.Vp,    C, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    t[-1].disk_rows = c.V;  // the padding is ours alone
    tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    *t++ = tensor("transformer.wpe.weight", FIELD(wpe), 0, c.max_T, C, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    Tensor* first = t;
    *t++ = tensor("ln_1.weight",        FIELD(ln1w),     L, 1,     C,     INIT_ONES,   0.0f,   NO_DECAY, VECTOR);
    *t++ = tensor("ln_1.bias",          FIELD(ln1b),     L, 1,     C,     INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
    *t++ = tensor("attn.c_attn.weight", FIELD(qkvw),     L, 3 * C, C,     INIT_NORMAL, 0.02f,  DECAY,    TRANSPOSED);
    tensor_sections(&t[-1], C, C, C, 0);  // of q, k and v
    tensor_split(&t[-1], SPLIT_ROWS, c.NH);
    *t++ = tensor("attn.c_attn.bias",   FIELD(qkvb),     L, 1,     3 * C, INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
    tensor_sections(&t[-1], C, C, C, 0);
    tensor_split(&t[-1], SPLIT_ROWS, c.NH);
    *t++ = tensor("attn.c_proj.weight", FIELD(attprojw), L, C,     C,     INIT_NORMAL, scaled, DECAY,    TRANSPOSED);
    tensor_split(&t[-1], SPLIT_COLUMNS, c.NH);
    *t++ = tensor("attn.c_proj.bias",   FIELD(attprojb), L, 1,     C,     INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
    *t++ = tensor("ln_2.weight",        FIELD(ln2w),     L, 1,     C,     INIT_ONES,   0.0f,   NO_DECAY, VECTOR);
    *t++ = tensor("ln_2.bias",          FIELD(ln2b),     L, 1,     C,     INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
    *t++ = tensor("mlp.c_fc.weight",    FIELD(fcw),      L, 4 * C, C,     INIT_NORMAL, 0.02f,  DECAY,    TRANSPOSED);
    tensor_split(&t[-1], SPLIT_ROWS, 0);
    *t++ = tensor("mlp.c_fc.bias",      FIELD(fcb),      L, 1,     4 * C, INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
    tensor_split(&t[-1], SPLIT_ROWS, 0);
    *t++ = tensor("mlp.c_proj.weight",  FIELD(fcprojw),  L, C,     4 * C, INIT_NORMAL, scaled, DECAY,    TRANSPOSED);
    tensor_split(&t[-1], SPLIT_COLUMNS, 0);
    *t++ = tensor("mlp.c_proj.bias",    FIELD(fcprojb),  L, 1,     C,     INIT_ZEROS,  0.0f,   NO_DECAY, VECTOR);
    for (Tensor* x = first; x < t; x++) { tensor_under(x, "transformer.h.%d."); }
    *t++ = tensor("transformer.ln_f.weight", FIELD(lnfw), 0, 1, C, INIT_ONES,  0.0f, NO_DECAY, VECTOR);
    *t++ = tensor("transformer.ln_f.bias",   FIELD(lnfb), 0, 1, C, INIT_ZEROS, 0.0f, NO_DECAY, VECTOR);
#undef FIELD
}

typedef struct {
    Model model;             // the first member: a run finds its tensors here
    Config config;           // with --tp heads, channels of the MLP and rows of wte that this rank has
    Config whole;            // of all ranks
    const char* export_bin;  // options
    float dropout;
    int pp, pp_chunks, tp;   // --pp, --pp-chunks, --tp
} GPT2;

// sizes only: what a run will need is known before anything is allocated
static inline void gpt2_layout(GPT2* gpt2, Config c) {
    gpt2->config = gpt2->whole = c;
    parameter_table(gpt2->model.table, c);
    model_layout(&gpt2->model, N_PARAMETERS);
}

// a model of a program that has no run; parameters are zero
static inline void gpt2_init(GPT2* gpt2, Config c, size_t stored_bytes) {
    memset(gpt2, 0, sizeof *gpt2);
    gpt2_layout(gpt2, c);
    model_init(&gpt2->model, stored_bytes);
}

// where the gradients of the micro-batch that is computed now are to be written
static inline Parameters gpt2_gradients(GPT2* gpt2, int l) {
    Parameters d;
    model_point_gradients(&gpt2->model, &d, l);
    return d;
}

// ---- 3. Files ----

// the sizes in the header of llm.c's .bin, which the file's length bears out
static inline int config_parse_bin(Config* c, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    BinHeader h;
    Tensor table[N_PARAMETERS];
    memset(table, 0, sizeof table);
    if (!llmc_bin_parse_(&h, bytes, n_bytes, error)) { return 0; }
    *c = config_make(h.max_T, h.V, h.L, h.NH, h.C);
    parameter_table(table, *c);
    return llmc_bin_fits_(n_bytes, h, table, N_PARAMETERS, error);
}

static inline Config config_load_bin(const char* path) {
    MappedFile file;
    ErrorText error;
    Config c;
    file_map(&file, path);
    if (!config_parse_bin(&c, file.bytes, file.n_bytes, &error)) { fail_input("%s: %s", path, error.text); }
    file_unmap(&file);
    return c;
}

static inline void gpt2_load_tensors_(const SliceSink* sink, const char* path, const Tensor* table) {
    SafeSet set;
    safeset_open(&set, path);
    tensors_load_into(sink, &set, table, N_PARAMETERS, "", NULL);
    tensors_check_tied(&set, "lm_head.weight", "transformer.wte.weight");
    safeset_report_unused(&set);
    safeset_close(&set);
}

// path: a .safetensors file, the index of several, or llm.c's .bin
static inline void gpt2_load(const SliceSink* sink, const char* path, const Tensor* table) {
    MappedFile file;
    file_map(&file, path);
    if (is_llmc_bin(&file)) { llmc_bin_load_into(sink, &file, table, N_PARAMETERS); }
    else { gpt2_load_tensors_(sink, path, table); }
    file_unmap(&file);
}
#endif  // LLMC_GPT2_H
