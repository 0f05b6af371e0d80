/*
DeepSeek V4: its sizes, a line for each parameter, and the files that hold them. Everything train_deepseek_v4.cu
computes loops over these tables.
    Config           the sizes; from a preset, from config.json, and back into one
    config_fit       what only the files say: which of three families of names they have, whether the experts of a layer
                     are one tensor, and whether there is an MTP module
    config_leave_rest  tensors that a model does not have: of an MTP module that is left out, of drafts for decoding
    parameter_table  one line for each parameter: name, shape, start values, decay
A layer has one of three kinds of attention (Config.kinds) and one of two kinds of router (Config.routers):
    WINDOW_LAYER     a window of keys alone
    CSA_LAYER        and entries of few tokens each, of which an indexer chooses some
    HCA_LAYER        and entries of many tokens each, all of them
    HASH_LAYER       the token says which experts it takes, by a table of the file
    CHOICE_LAYER     the experts of the largest score and bias
Names   official, layers.3.attn.wq_a.weight; those that transformers writes, model.layers.3.attn.wq_a.weight; those that
        it has in memory, model.layers.3.self_attn.q_a_proj.weight. A model keeps those it came with; a new one has the
        official ones, which transformers reads, too. The MTP module, mtp.0., has official names in all of them.
The MTP module has a layer of its own, number L, behind all others: a WINDOW_LAYER and CHOICE_LAYER.
config.json is read in the form of the published models and in transformers' own; it is written in the latter. What it
says in both it has to say alike. Keys of our own: mtp_weight, indexer_train, seq_balance_coef, bias_update_rate.
Errors: fail_input names file, key, expected and found.
Source: DeepSeek-AI 2026, arXiv:2606.19348; huggingface/transformers 5.23, models/deepseek_v4; doc/deepseek_v4.md
*/
#ifndef LLMC_DEEPSEEK_V4_H
#define LLMC_DEEPSEEK_V4_H
#include "../core/choice.h"      // choice_name
#include "../core/jsonfile.h"    // json_read, json_ints, json_choice, json_refuse_value
#include "../core/tensor.h"      // Tensor: the table of parameters
#include "../files/hf_folder.h"  // HF_WRITTEN_BY, SafeSet, safeset_has_some
#include "../files/tensorfile.h" // SafeSet
#include "../ops/hyper_connections.h"  // HYPER_STREAMS
#include "../ops/rope.h"         // RopeYarn
#include "../ops/router.h"       // ROUTER_MOST_EXPERTS, ROUTER_MOST_CHOSEN
#include "auxiliary.h"           // Auxiliary
#include "config_parts.h"        // config_padded, config_parse_kinds, config_check_quantized
#include "entry_attention.h"     // WINDOW_LAYER, CSA_LAYER, HCA_LAYER

// ---- 1. Config ----

enum { CONFIG_MAX_T = 1 << 24, CONFIG_MAX_LAYERS = 1024, CONFIG_MOST_HEAD = 1024, CONFIG_MOST_WINDOW = 1 << 16 };
// of G R, rows of a matrix. By their own bounds H d and nI dI are no more, hc D and 2 F no more than twice that: what
// two numbers of config.json give, an int holds
enum { CONFIG_MOST_WIDE = 1 << 22 };
enum { HASH_LAYER = 'T', CHOICE_LAYER = 'R' };                  // Config.routers
typedef enum { NAMES_OFFICIAL, NAMES_WRITTEN, NAMES_IN_MEMORY } NameFamily;

typedef struct {
    int max_T;            // longest sequence, 1048576
    int V, Vp;            // vocabulary, 129280; the same, padded to a multiple of 128
    int L, D;             // layers, 43; channels of a residual stream, 4096
    int H, d, rotated;    // heads, 64; channels of each, 512, of which RoPE turns the last 64
    int qr;               // channels between the two matrices of queries (q_lora_rank), 1024
    int G, R;             // groups of heads, 8, and outputs of each between the two output matrices, 1024
    int window;           // keys that a position sees, itself among them, 128
    int csa, hca;         // tokens of an entry, 4 and 128
    int nI, dI, topk;     // the indexer's heads, 64, channels of each, 128, entries that it chooses, 512
    int hc, iters;        // residual streams, 4; iterations of Sinkhorn, 20
    int E, k, F;          // experts, 256, of which a token takes 6; width of each and of the shared one, 2048
    int names, fused;     // NameFamily; the files have the experts of a layer as one tensor
    int plain_scorer;     // NAMES_IN_MEMORY of transformers 5.8: indexer.weights_proj, not indexer.scorer.weights_proj
    int has_yarn;
    float hc_eps, eps;    // of the mixing of streams, of all norms, 1e-6 both
    float factor;         // of the weights that experts have, 1.5
    float limit;          // of gates and ups of experts, 10
    double theta, entry_theta;  // RoPE's base of WINDOW_LAYERs, 1e4; of all others, 1.6e5, with
    RopeYarn yarn;
    Auxiliary aux;        // what is learnt beside the next token
    char kinds[CONFIG_MAX_LAYERS + 2], routers[CONFIG_MAX_LAYERS + 2];  // of each layer; then of MTP's
} Config;

static inline int config_layers(const Config* c, char kind) { return tensor_kinds(c->kinds, 0, c->L, kind); }
static inline int config_hash_layers(const Config* c) { return tensor_kinds(c->routers, 0, c->L, HASH_LAYER); }

// tokens of an entry of layer l; 0: it has none
static inline int config_ratio(const Config* c, int l) {
    return c->kinds[l] == CSA_LAYER ? c->csa : c->kinds[l] == HCA_LAYER ? c->hca : 0;
}

// numbers that say how a position's streams mix
static inline int config_mixes(const Config* c) { return (2 + c->hc) * c->hc; }

// with --tp, which shares the shared expert's channels besides
static inline Config config_part(const Config* c, int ranks) {
    Config part = *c;
    part.H /= ranks, part.G /= ranks, part.Vp /= ranks;
    return part;
}

static inline void config_set_vocabulary_(Config* c, int V) { c->V = V, c->Vp = config_padded(V); }

static inline void config_end_kinds_(Config* c) {
    c->kinds[c->L] = WINDOW_LAYER, c->kinds[c->L + 1] = '\0';
    c->routers[c->L] = CHOICE_LAYER, c->routers[c->L + 1] = '\0';
}

// the first two layers have `first`, then CSA and HCA take turns; hash: so many layers go by tables
static inline void config_place_kinds_(Config* c, char first, int hash) {
    for (int l = 0; l < c->L; l++) {
        c->kinds[l] = l < 2 ? first : (char)(l % 2 == 0 ? CSA_LAYER : HCA_LAYER);
        c->routers[l] = l < hash ? HASH_LAYER : CHOICE_LAYER;
    }
    config_end_kinds_(c);
}

#define DEEPSEEK_V4_PRESETS "tiny, small, deepseek-v4-flash or deepseek-v4-pro"

typedef struct { const char* name; int hash; char first; Config c; } Preset;

static inline Config config_preset(const char* name, int V) {
    static const Preset presets[] = {
        {"tiny", 1, WINDOW_LAYER, {1024, 0, 0, 4, 64, 4, 32, 8, 32, 2, 16, 32, 4, 16, 8, 16, 16, 4, 20, 8, 2, 32,
          NAMES_OFFICIAL, 0, 0, 0, 1e-6f, 1e-6f, 1.5f, 10.0f, 1e4, 1.6e5, {1.0f, 0, 0.0f, 0.0f},
          {0, MTP_WEIGHT, INDEXER_OFF, 0.0f, 1e-3f}, "", ""}},
        {"small", 2, WINDOW_LAYER, {4096, 0, 0, 8, 512, 8, 64, 16, 192, 2, 192, 128, 4, 32, 8, 32, 32, 4, 20, 16, 4,
          256, NAMES_OFFICIAL, 0, 0, 0, 1e-6f, 1e-6f, 1.5f, 10.0f, 1e4, 1.6e5, {1.0f, 0, 0.0f, 0.0f},
          {0, MTP_WEIGHT, INDEXER_OFF, 0.0f, 1e-3f}, "", ""}},
        {"deepseek-v4-flash", 3, WINDOW_LAYER, {1 << 20, 0, 0, 43, 4096, 64, 512, 64, 1024, 8, 1024, 128, 4, 128, 64,
          128, 512, 4, 20, 256, 6, 2048, NAMES_OFFICIAL, 0, 0, 1, 1e-6f, 1e-6f, 1.5f, 10.0f, 1e4, 1.6e5,
          {16.0f, 65536, 32.0f, 1.0f}, {1, MTP_WEIGHT, INDEXER_OFF, 0.0f, 0.0f}, "", ""}},
        {"deepseek-v4-pro", 3, HCA_LAYER, {1 << 20, 0, 0, 61, 7168, 128, 512, 64, 1536, 16, 1024, 128, 4, 128, 64, 128,
          1024, 4, 20, 384, 6, 3072, NAMES_OFFICIAL, 0, 0, 1, 1e-6f, 1e-6f, 2.5f, 10.0f, 1e4, 1.6e5,
          {16.0f, 65536, 32.0f, 1.0f}, {1, MTP_WEIGHT, INDEXER_OFF, 0.0f, 0.0f}, "", ""}},
    };
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(name, presets[i].name) != 0) { continue; }
        Config c = presets[i].c;
        config_set_vocabulary_(&c, V);
        config_place_kinds_(&c, presets[i].first, presets[i].hash);
        return c;
    }
    fail_input("--model: expected " DEEPSEEK_V4_PRESETS ", found \"%s\"", name);
}

// ---- config.json, read ----

#define KIND_NAMES "sliding_attention|compressed_sparse_attention|heavily_compressed_attention"
#define KIND_LETTERS "WCH"
#define ROUTER_NAMES "hash_moe|moe"
#define ROUTER_LETTERS "TR"

// The published form: a number for each layer, which is a label; it may have more entries than layers
static inline int config_parse_ratios_(char* kinds, int L, const json_t* json, ErrorText* error) {
    const json_t* list = json_object_get(json, "compress_ratios");
    if (config_is_absent(json, "compress_ratios")) {
        return error_set(error, "expected \"layer_types\" or \"compress_ratios\", a list of %d, one for each layer", L);
    }
    if (!json_is_array(list) || (int)json_array_size(list) < L) {
        return error_set(error, "\"compress_ratios\": expected a list of %d or more, one for each layer", L);
    }
    for (int l = 0; l < L; l++) {
        const json_t* found = json_array_get(list, (size_t)l);
        const json_int_t label = json_is_integer(found) ? json_integer_value(found) : -1;
        if (label != 0 && label != 4 && label != 128) {
            return json_refuse_value(error, "compress_ratios", "0, 4 or 128 for each layer", found);
        }
        kinds[l] = label == 0 ? WINDOW_LAYER : label == 4 ? CSA_LAYER : HCA_LAYER;
    }
    return 1;
}

// What each layer is by a list of names, `key`, or else as it is in `published`; where the key of that is there, too,
// both must agree
static inline int config_parse_both_(char* kinds, const char* published, const char* published_key, int L,
                                     const json_t* json, const char* key, const char* names, const char* letters,
                                     ErrorText* error) {
    if (config_is_absent(json, key)) {
        memcpy(kinds, published, (size_t)L);
        return 1;
    }
    if (!config_parse_kinds(kinds, L, json, key, names, letters, error)) { return 0; }
    for (int l = 0; l < L && !config_is_absent(json, published_key); l++) {
        if (kinds[l] == published[l]) { continue; }
        return error_set(error, "\"%s\": expected %s of layer %d, as \"%s\" says, found %s: leave one of them out",
                         published_key, choice_name(names, (int)(strchr(letters, kinds[l]) - letters)).s, l, key,
                         choice_name(names, (int)(strchr(letters, published[l]) - letters)).s);
    }
    return 1;
}

static inline int config_parse_layers_(Config* c, const json_t* json, ErrorText* error) {
    char published[CONFIG_MAX_LAYERS];
    int hash = 3;
    const JsonInt counts[] = {{"num_hash_layers", &hash, 0, 1 << 20}};
    if (!config_is_absent(json, counts[0].key) && !json_ints(json, counts, 1, error)) { return 0; }
    for (int l = 0; l < c->L; l++) { published[l] = l < hash ? HASH_LAYER : CHOICE_LAYER; }
    if (!config_parse_both_(c->routers, published, counts[0].key, c->L, json, "mlp_layer_types", ROUTER_NAMES,
                            ROUTER_LETTERS, error)) {
        return 0;
    }
    if ((config_is_absent(json, "layer_types") || !config_is_absent(json, "compress_ratios")) &&
        !config_parse_ratios_(published, c->L, json, error)) {
        return 0;
    }
    const int good = config_parse_both_(c->kinds, published, "compress_ratios", c->L, json, "layer_types", KIND_NAMES,
                                        KIND_LETTERS, error);
    config_end_kinds_(c);
    return good;
}

// of layers with an indexer; where none has one they are not needed, and as transformers has them
static inline int config_parse_index_(Config* c, const json_t* json, ErrorText* error) {
    const JsonInt sizes[] = {{"index_n_heads", &c->nI, 1, 1 << 12}, {"index_head_dim", &c->dI, 2, CONFIG_MOST_HEAD},
                             {"index_topk", &c->topk, 1, CONFIG_MAX_T}};
    const int is_needed = config_layers(c, CSA_LAYER) > 0;
    c->nI = 64, c->dI = 128, c->topk = 512;
    for (int i = 0; i < 3; i++) {
        const int is_asked = is_needed || !config_is_absent(json, sizes[i].key);
        if (is_asked && !json_ints(json, &sizes[i], 1, error)) { return 0; }
    }
    return 1;
}

// tokens of an entry
static inline int config_parse_rates_(Config* c, const json_t* json, ErrorText* error) {
    static const char of_csa[] = "compressed_sparse_attention", of_hca[] = "heavily_compressed_attention";
    json_t* rates = json_object_get(json, "compress_rates");
    if (!config_is_absent(json, "compress_rates") && !json_is_object(rates)) {
        return json_refuse_value(error, "compress_rates", "an object", rates);
    }
    for (void* at = json_object_iter(rates); at; at = json_object_iter_next(rates, at)) {
        const char* key = json_object_iter_key(at);
        if (strcmp(key, of_csa) == 0 || strcmp(key, of_hca) == 0) { continue; }
        return error_set(error, "\"compress_rates\": expected %s and %s, found \"%.60s\"", of_csa, of_hca, key);
    }
    c->csa = 4, c->hca = 128;
    return config_parse_either(&c->csa, CONFIG_MOST_WINDOW, rates, of_csa, json, "compress_rate_csa", error) &&
           config_parse_either(&c->hca, CONFIG_MOST_WINDOW, rates, of_hca, json, "compress_rate_hca", error);
}

// ---- config.json, read: RoPE ----
// Files of transformers have "rope_parameters": {"main": a set, "compress": a set}, of layers without and with entries.
// Published ones have a set for those with entries alone, "rope_scaling", which may be "rope_parameters" itself, too.

// what a set says; has_type, theta, share 0: nothing
typedef struct {
    int has_type, has_yarn;
    RopeYarn yarn;
    double theta, share;  // RoPE's base; of the channels of a head that turn
} TurnSet;

static inline int config_parse_yarn_(RopeYarn* yarn, const json_t* set, ErrorText* error) {
    double factor = 1.0, fast = 32.0, slow = 1.0;
    const JsonInt original[] = {{"original_max_position_embeddings", &yarn->original, 1, CONFIG_MAX_T}};
    if (!json_number(&factor, set, "factor", 1.0, 1e6, error) || !json_ints(set, original, 1, error) ||
        !json_number(&fast, set, "beta_fast", 1e-3, 1e6, error) ||
        !json_number(&slow, set, "beta_slow", 1e-3, 1e6, error)) {
        return 0;
    }
    yarn->factor = (float)factor, yarn->beta_fast = (float)fast, yarn->beta_slow = (float)slow;
    return 1;
}

// "rope_type" or, in published files, "type"; without one nothing of YaRN may be there. where: the key of the set
static inline int config_parse_type_(TurnSet* t, const json_t* set, const char* where, const char* types,
                                     ErrorText* error) {
    static const char* const of_yarn[] = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"};
    int type = -1, older = -1;
    if ((!config_is_absent(set, "rope_type") && !json_choice(&type, set, "rope_type", types, error)) ||
        (!config_is_absent(set, "type") && !json_choice(&older, set, "type", types, error))) {
        return 0;
    }
    if (type >= 0 && older >= 0 && type != older) {
        return error_set(error, "\"type\": expected %s, as \"rope_type\" says, found %s: leave one of them out",
                         choice_name(types, type).s, choice_name(types, older).s);
    }
    t->has_type = type >= 0 || older >= 0, t->has_yarn = type > 0 || older > 0;
    for (int i = 0; i < 4 && !t->has_type; i++) {
        if (config_is_absent(set, of_yarn[i])) { continue; }
        return error_set(error, "\"%s\": expected \"rope_type\" beside \"%s\", found none", where, of_yarn[i]);
    }
    return 1;
}

// is_main: of layers without entries, which have no YaRN
static inline int config_parse_set_(TurnSet* t, const json_t* set, const char* where, int is_main, ErrorText* error) {
    memset(t, 0, sizeof *t);
    if (!set || json_is_null(set)) { return 1; }
    if (!json_is_object(set)) { return json_refuse_value(error, where, "an object or null", set); }
    json_t* same = json_pack("{s:f, s:f, s:b}", "attention_factor", 1.0, "mscale", 1.0, "truncate", 1);
    return json_agrees(set, same, error) &&
           config_parse_type_(t, set, where, is_main ? "default" : "default|yarn", error) &&
           (!t->has_yarn || config_parse_yarn_(&t->yarn, set, error)) &&
           json_number(&t->theta, set, "rope_theta", 1.0, 1e12, error) &&
           json_number(&t->share, set, "partial_rotary_factor", 1e-6, 1.0, error);
}

// channels of a head that RoPE turns; so many of an index head turn, too, where a layer has one. key: what says it
static inline int config_check_turn_(const Config* c, const char* key, ErrorText* error) {
    const int has_index = config_layers(c, CSA_LAYER) > 0, by_index = has_index && c->dI < c->d;
    const int most = by_index ? c->dI : c->d;
    return (c->rotated >= 2 && c->rotated % 2 == 0 && c->rotated <= most) ||
           error_set(error, "%s: expected an even number of channels 2..%d, at most \"%s\", found %d", key, most,
                     by_index ? "index_head_dim" : "head_dim", c->rotated);
}

enum { TURN_MAIN, TURN_ENTRIES, TURN_SCALING, TURN_FLAT, TURN_SETS };

// "qk_rope_head_dim" or shares of "head_dim"; all that are there must agree
static inline int config_parse_rotated_(Config* c, const json_t* json, const TurnSet sets[TURN_SETS],
                                        ErrorText* error) {
    static const char* const names[] = {
        "\"partial_rotary_factor\" of \"main\"", "\"partial_rotary_factor\" of \"compress\"",
        "\"partial_rotary_factor\" of \"rope_scaling\"", "\"partial_rotary_factor\" of \"rope_parameters\"",
        "\"partial_rotary_factor\" of \"head_dim\""};
    const JsonInt rotated[] = {{"qk_rope_head_dim", &c->rotated, 2, CONFIG_MOST_HEAD}};
    const char* said = NULL;  // what has said it
    double top = 0.0;
    if (!json_number(&top, json, "partial_rotary_factor", 1e-6, 1.0, error)) { return 0; }
    if (!config_is_absent(json, rotated[0].key)) {
        if (!json_ints(json, rotated, 1, error)) { return 0; }
        said = "\"qk_rope_head_dim\"";
    }
    for (int i = TURN_SETS; i >= 0; i--) {
        const double share = i == TURN_SETS ? top : sets[i].share;
        const int n = (int)(c->d * share + 1e-6);  // 98 * (6 / 98) is below 6
        if (share == 0.0) { continue; }
        if (said && n != c->rotated) {
            return error_set(error, "%s: expected %d channels of %d, as %s says, found %g, which is %d", names[i],
                             c->rotated, c->d, said, share, n);
        }
        c->rotated = n;
        said = said ? said : names[i];
    }
    if (!said) {
        return error_set(error, "expected \"qk_rope_head_dim\", channels of a head that turn, or "
                         "\"partial_rotary_factor\", their share, found neither");
    }
    return config_check_turn_(c, said, error);
}

// a set that no kind of layer has to itself may repeat the base of one of them, as files of transformers do
static inline int config_check_theta_(const Config* c, const TurnSet* t, const char* where, ErrorText* error) {
    return t->theta == 0.0 || t->theta == c->theta || t->theta == c->entry_theta ||
           error_set(error, "\"rope_theta\" of \"%s\": expected %.9g or %.9g, as \"rope_theta\" and "
                     "\"compress_rope_theta\" say, found %.9g: set these instead", where, c->theta, c->entry_theta,
                     t->theta);
}

// of layers with entries
static inline int config_choose_yarn_(Config* c, const TurnSet sets[TURN_SETS], int is_nested, ErrorText* error) {
    static const char* const names[] = {"main", "compress", "rope_scaling", "rope_parameters"};
    const TurnSet* taken = is_nested ? &sets[TURN_ENTRIES] : NULL;
    for (int i = TURN_SCALING; i <= TURN_FLAT; i++) {
        const TurnSet* t = &sets[i];
        const int says = i == TURN_FLAT && is_nested ? t->has_yarn : t->has_type;  // "default" may be left over there
        if (says && taken && (t->has_yarn != taken->has_yarn || memcmp(&t->yarn, &taken->yarn, sizeof t->yarn) != 0)) {
            return error_set(error, "\"%s\": expected the same RoPE as in \"%s\", found another: leave one of them out",
                             names[i], names[taken - sets]);
        }
        if (says && !taken) { taken = t; }
    }
    if (taken && taken->has_yarn) { c->has_yarn = 1, c->yarn = taken->yarn; }
    return 1;
}

static inline int config_parse_turn_(Config* c, const json_t* json, ErrorText* error) {
    const json_t *turn = json_object_get(json, "rope_parameters"), *scaling = json_object_get(json, "rope_scaling");
    const int is_nested = !config_is_absent(turn, "main");
    TurnSet sets[TURN_SETS];
    c->theta = 1e4, c->entry_theta = 1.6e5;
    if (!config_parse_set_(&sets[TURN_MAIN], json_object_get(turn, "main"), "main", 1, error) ||
        !config_parse_set_(&sets[TURN_ENTRIES], json_object_get(turn, "compress"), "compress", 0, error) ||
        !config_parse_set_(&sets[TURN_SCALING], scaling, "rope_scaling", 0, error) ||
        !config_parse_set_(&sets[TURN_FLAT], turn, "rope_parameters", 0, error) ||
        !json_number(&c->theta, json, "rope_theta", 1.0, 1e12, error) ||
        !json_number(&c->entry_theta, json, "compress_rope_theta", 1.0, 1e12, error)) {
        return 0;
    }
    if (!config_is_absent(scaling, "main") || !config_is_absent(scaling, "compress")) {
        return json_refuse_value(error, "rope_scaling", "one set, that of layers with entries", scaling);
    }
    if (is_nested == config_is_absent(turn, "compress")) {
        return json_refuse_value(error, "rope_parameters", "both \"main\" and \"compress\", or neither", turn);
    }
    if (sets[TURN_MAIN].theta > 0.0) { c->theta = sets[TURN_MAIN].theta; }
    if (sets[TURN_ENTRIES].theta > 0.0) { c->entry_theta = sets[TURN_ENTRIES].theta; }
    return config_check_theta_(c, &sets[TURN_SCALING], "rope_scaling", error) &&
           config_check_theta_(c, &sets[TURN_FLAT], "rope_parameters", error) &&
           config_choose_yarn_(c, sets, is_nested, error) && config_parse_rotated_(c, json, sets, error);
}

static inline int config_parse_numbers_(Config* c, const json_t* json, ErrorText* error) {
    double hc_eps = 1e-6, eps = 1e-6, factor = 1.5, limit = 10.0;
    if (!json_number(&hc_eps, json, "hc_eps", 0.0, 0.1, error) ||
        !json_number(&eps, json, "rms_norm_eps", 1e-12, 0.1, error) ||
        !json_number(&factor, json, "routed_scaling_factor", 1e-6, 1e6, error) ||
        !json_number(&limit, json, "swiglu_limit", 1e-6, 1e6, error)) {
        return 0;
    }
    c->hc_eps = (float)hc_eps, c->eps = (float)eps, c->factor = (float)factor, c->limit = (float)limit;
    return 1;
}

static inline int config_check_sizes_(const Config* c, ErrorText* error) {
    if (c->H % c->G != 0) {
        return error_set(error, "\"num_attention_heads\" %d: expected a multiple of \"o_groups\" %d", c->H, c->G);
    }
    if ((int64_t)c->G * c->R > CONFIG_MOST_WIDE) {
        return error_set(error, "\"o_lora_rank\": expected at most %d of each of the %d \"o_groups\", found %d",
                         CONFIG_MOST_WIDE / c->G, c->G, c->R);
    }
    return c->k <= c->E || error_set(error, "\"num_experts_per_tok\": expected at most %d, found %d", c->E, c->k);
}

static inline int config_parse(Config* c, const json_t* json, ErrorText* error) {
    int type = -1;
    memset(c, 0, sizeof *c);
    c->hc = 4, c->iters = 20;
    const JsonInt sizes[] = {
        {"max_position_embeddings", &c->max_T, 1, CONFIG_MAX_T}, {"vocab_size", &c->V, 1, 1 << 24},
        {"num_hidden_layers", &c->L, 1, CONFIG_MAX_LAYERS}, {"hidden_size", &c->D, 1, 1 << 20},
        {"num_attention_heads", &c->H, 1, 1 << 12}, {"head_dim", &c->d, 2, CONFIG_MOST_HEAD},
        {"q_lora_rank", &c->qr, 1, 1 << 20}, {"o_groups", &c->G, 1, 1 << 12}, {"o_lora_rank", &c->R, 1, 1 << 20},
        {"sliding_window", &c->window, 1, CONFIG_MAX_T}, {"num_experts_per_tok", &c->k, 1, ROUTER_MOST_CHOSEN}};
    const JsonInt streams[] = {{"hc_mult", &c->hc, 1, HYPER_STREAMS}};
    const JsonInt iters[] = {{"hc_sinkhorn_iters", &c->iters, 1, 1000}};
    if (!json_choice(&type, json, "model_type", "deepseek_v4", error)) { return 0; }
    if (type < 0) { return error_set(error, "\"model_type\": expected deepseek_v4, found nothing"); }
    if (!config_check_quantized(json, error) || !json_ints(json, sizes, sizeof sizes / sizeof sizes[0], error) ||
        !config_parse_either(&c->E, ROUTER_MOST_EXPERTS, json, "n_routed_experts", json, "num_local_experts", error) ||
        !config_parse_either(&c->F, 1 << 22, json, "moe_intermediate_size", json, "intermediate_size", error) ||
        (!config_is_absent(json, streams[0].key) && !json_ints(json, streams, 1, error)) ||
        (!config_is_absent(json, iters[0].key) && !json_ints(json, iters, 1, error))) {
        return 0;
    }
    config_set_vocabulary_(c, c->V);
    if (!config_check_sizes_(c, error) || !config_parse_layers_(c, json, error) ||
        !config_parse_index_(c, json, error) || !config_parse_rates_(c, json, error) ||
        !config_parse_turn_(c, json, error) || !config_parse_numbers_(c, json, error) ||
        !auxiliary_parse(&c->aux, 16, json, error)) {
        return 0;
    }
    json_t* same = json_pack("{s:s, s:s, s:i, s:i, s:b, s:b, s:b, s:b, s:b, s:f}", "scoring_func", "sqrtsoftplus",
                             "hidden_act", "silu", "num_key_value_heads", 1, "n_shared_experts", 1, "attention_bias", 0,
                             "mlp_bias", 0, "tie_word_embeddings", 0, "output_router_logits", 0, "norm_topk_prob", 1,
                             "attention_dropout", 0.0);
    return json_agrees(json, same, error);
}

// keys that may be left out
#define CONFIG_OPTIONAL \
    "hc_mult|hc_sinkhorn_iters|hc_eps|n_routed_experts|num_local_experts|moe_intermediate_size" \
    "|intermediate_size|num_hash_layers|mlp_layer_types|layer_types|compress_ratios|compress_rates" \
    "|compress_rate_csa|compress_rate_hca|rope_theta|compress_rope_theta|rope_parameters" \
    "|rope_scaling|qk_rope_head_dim|partial_rotary_factor|rms_norm_eps|routed_scaling_factor" \
    "|swiglu_limit|index_topk|index_n_heads|index_head_dim|quantization_config|scoring_func" \
    "|hidden_act|num_key_value_heads|n_shared_experts|attention_bias|mlp_bias|tie_word_embeddings" \
    "|output_router_logits|norm_topk_prob|attention_dropout" AUXILIARY_KEYS

// is_drawn: start values are, so that no files say how many modules there are, and such a model has one at most
static inline Config config_load(const char* path, int is_drawn) {
    Config c;
    ErrorText error;
    json_t* json = json_read(path);
    if (!config_parse(&c, json, &error)) { fail_input("%s: %s", path, error.text); }
    config_warn_of_near(path, json, CONFIG_OPTIONAL);
    const json_int_t modules = json_integer_value(json_object_get(json, "num_nextn_predict_layers"));
    if (is_drawn && modules > 1) {
        fail_input("%s: \"num_nextn_predict_layers\": expected 0 or 1 of a new model, which predicts one token further "
                   "at most, found %lld: write 1, or give --mtp 0 or 1", path, (long long)modules);
    }
    json_decref(json);
    return c;
}

// ---- what the files say ----

#define MTP "mtp.0."

// how the names of this family begin: of layers, of what stands beside them
static inline const char* config_layer_prefix(const Config* c) {
    return c->names == NAMES_OFFICIAL ? "layers.%d." : "model.layers.%d.";
}

static inline const char* config_top_prefix(const Config* c) { return c->names == NAMES_OFFICIAL ? "" : "model."; }

// the name of this family; `written` NULL: the official one
static inline const char* config_name(const Config* c, const char* official, const char* written,
                                      const char* in_memory) {
    return c->names == NAMES_IN_MEMORY ? in_memory : c->names == NAMES_WRITTEN && written ? written : official;
}

static inline void config_fit(Config* c, SafeSet* set) {
    // by what there are many of: of a file that lacks a tensor, messages name that one
    c->names = safeset_has_some(set, "model.layers.0.attn.") ? NAMES_WRITTEN
             : safeset_has_some(set, "model.layers.0.") ? NAMES_IN_MEMORY : NAMES_OFFICIAL;
    c->fused = safeset_find(set, "model.layers.0.mlp.experts.gate_up_proj") != NULL;
    c->aux.mtp = safeset_has_some(set, MTP);
    for (int l = 0; l < c->L; l++) {
        char name[128];
        snprintf(name, sizeof name, "model.layers.%d.self_attn.compressor.indexer.weights_proj.weight", l);
        c->plain_scorer |= safeset_find(set, name) != NULL;
    }
}

// Of what a file has beside this model: the MTP module, where --mtp 0 leaves it out, and more modules of later
// releases, for drafts of several tokens. The module has no embedding and no output matrix of its own, though files may
// have them once more
static inline void config_leave_rest(const Config* c, SafeSet* set) {
    int n_first = 0, n_later = 0;
    for (int i = 0; i < set->n_tensors; i++) {
        const char* name = set->by_name[i]->name;
        const int is_mtp = strncmp(name, "mtp.", 4) == 0, is_first = strncmp(name, MTP, sizeof MTP - 1) == 0;
        const int is_again = is_mtp && (strstr(name, "emb") || ends_with(name, "head.weight"));
        if (!is_mtp || (is_first && c->aux.mtp && !is_again)) { continue; }
        set->used[i] = 1;
        n_first += is_first && !is_again;
        n_later += !is_first && !is_again;
    }
    if (n_first > 0) {
        warn_alike("%s: %d tensors of the module that predicts the token after the next are left out, as --mtp 0 says: "
                   "keep this folder", set->path, n_first);
    }
    if (n_later > 0) {
        warn_alike("%s: %d tensors of modules that predict tokens further ahead are left out: keep this folder",
                   set->path, n_later);
    }
}

// ---- config.json, written ----

static inline json_t* config_turn_json_(const Config* c) {
    json_t* entries = json_pack("{s:s, s:f, s:f}", "rope_type", c->has_yarn ? "yarn" : "default", "rope_theta",
                                c->entry_theta, "partial_rotary_factor", (double)c->rotated / c->d);
    if (c->has_yarn) {
        json_t* yarn = json_pack("{s:f, s:i, s:f, s:f, s:f}", "factor", shortest_double(c->yarn.factor),
                                 "original_max_position_embeddings", c->yarn.original, "beta_fast",
                                 shortest_double(c->yarn.beta_fast), "beta_slow", shortest_double(c->yarn.beta_slow),
                                 "attention_factor", 1.0);
        json_object_update(entries, yarn);
        json_decref(yarn);
    }
    return json_pack("{s:{s:s, s:f, s:f}, s:o}", "main", "rope_type", "default", "rope_theta", c->theta,
                     "partial_rotary_factor", (double)c->rotated / c->d, "compress", entries);
}

// eot: the token that ends a text
static inline json_t* config_json(const Config* c, int eot, const char* dtype) {
    json_t* json = json_pack(
        "{s:s, s:[s], s:s, s:s, s:s, s:f, s:b, s:b, s:b, s:b, s:s, s:i, s:i, s:i, s:i}", "written_by", HF_WRITTEN_BY,
        "architectures", "DeepseekV4ForCausalLM", "model_type", "deepseek_v4", "dtype", dtype, "hidden_act", "silu",
        "attention_dropout", 0.0, "attention_bias", 0, "mlp_bias", 0, "tie_word_embeddings", 0, "norm_topk_prob", 1,
        "scoring_func", "sqrtsoftplus", "n_shared_experts", 1, "num_key_value_heads", 1, "bos_token_id", eot,
        "eos_token_id", eot);
    json_t* sizes = json_pack(
        "{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i}",
        "max_position_embeddings", c->max_T, "vocab_size", c->V, "num_hidden_layers", c->L, "hidden_size", c->D,
        "num_attention_heads", c->H, "head_dim", c->d, "qk_rope_head_dim", c->rotated, "q_lora_rank", c->qr,
        "o_groups", c->G, "o_lora_rank", c->R, "sliding_window", c->window, "index_n_heads", c->nI, "index_head_dim",
        c->dI, "index_topk", c->topk, "hc_mult", c->hc, "hc_sinkhorn_iters", c->iters, "n_routed_experts", c->E,
        "num_experts_per_tok", c->k, "moe_intermediate_size", c->F);
    json_t* numbers = json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "hc_eps", shortest_double(c->hc_eps),
                                "rms_norm_eps", shortest_double(c->eps), "routed_scaling_factor",
                                shortest_double(c->factor), "swiglu_limit", shortest_double(c->limit), "rope_theta",
                                c->theta, "compress_rope_theta", c->entry_theta, "partial_rotary_factor",
                                (double)c->rotated / c->d);
    json_t* layers = json_pack("{s:o, s:o, s:{s:i, s:i}, s:o}", "layer_types",
                               config_kinds_json(c->kinds, c->L, KIND_NAMES, KIND_LETTERS), "mlp_layer_types",
                               config_kinds_json(c->routers, c->L, ROUTER_NAMES, ROUTER_LETTERS), "compress_rates",
                               "compressed_sparse_attention", c->csa, "heavily_compressed_attention", c->hca,
                               "rope_parameters", config_turn_json_(c));
    json_t* const more[] = {sizes, numbers, layers, auxiliary_json(&c->aux)};
    for (int i = 0; i < 4; i++) {
        json_object_update(json, more[i]);
        json_decref(more[i]);
    }
    return json;
}

// ---- 2. Parameters: one line for each ----

// how streams mix, before a half of a layer or before the last norm (hyper_connections.h); all float in every build
typedef struct { float *fn, *base, *scale; } SiteParameters;
// of entries of several tokens (entry_attention.h)
typedef struct { float *wkv, *wgate, *ape, *norm; } CompressorParameters;

// what a field of the table is called; all are floats where a build stores floats
typedef struct {
    float *embedding, *attn_norm, *wq_a, *q_norm, *wq_b, *wkv, *kv_norm, *sinks, *wo_a, *wo_b, *index_wq_b, *index_proj,
        *ffn_norm, *router, *router_bias, *tid2eid, *expert_gate_up, *expert_down, *shared_gate_up, *shared_down, *norm,
        *head, *mtp_e_proj, *mtp_h_proj, *mtp_enorm, *mtp_hnorm, *mtp_norm;
    SiteParameters hc_attn, hc_ffn, hc_head, mtp_hc_head;
    CompressorParameters csa, hca, index;
} Parameters;

enum { MAX_LAYER_ROWS = 40, MAX_PARAMETERS = 80 };
#define AT(name) offsetof(Parameters, name)
#define MODULES "model.layers.%d."  // under which PEFT knows them, whatever the files' names

// three lines of a site at offset `at`; layers 0: it belongs to none. Its logits start at `base`, whatever the streams:
// scale is 1, fn small
static inline Tensor* site_rows_(Tensor* t, const char* fn, const char* base, const char* scale, size_t at, int layers,
                                 int rows, int columns, int scales) {
    *t++ = tensor(fn,    at + offsetof(SiteParameters, fn),    layers, rows, columns, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    *t++ = tensor(base,  at + offsetof(SiteParameters, base),  layers, 1,    rows,  INIT_ZEROS, 0.0f, NO_DECAY, VECTOR);
    *t++ = tensor(scale, at + offsetof(SiteParameters, scale), layers, 1,    scales, INIT_ONES, 0.0f, NO_DECAY, VECTOR);
    for (int i = 1; i <= 3; i++) { tensor_stored(&t[-i], STORED_F32); }
    return t;
}

static inline Tensor* linear_row_(Tensor* t, const Config* c, const char* official, const char* in_memory, size_t at,
                                  int rows, int columns, float std) {
    *t = tensor(config_name(c, official, NULL, in_memory), at, c->L, rows, columns, INIT_NORMAL, std, DECAY, AS_IS);
    return t + 1;
}

static inline Tensor* vector_row_(Tensor* t, const char* name, size_t at, int layers, int columns, Init init) {
    *t = tensor(name, at, layers, 1, columns, init, 0.0f, NO_DECAY, VECTOR);
    return t + 1;
}

// what makes entries of tokens, in layers of these kinds: r tokens, C channels of its layers, d of an entry
static inline Tensor* compressor_rows_(Tensor* t, const Config* c, const char* const names[4], size_t at, int r, int C,
                                       int d, const char* of_kinds) {
    Tensor* first = t;
    *t++ = tensor(names[0], at + offsetof(CompressorParameters, wkv), c->L, C, c->D, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    *t++ = tensor(names[1], at + offsetof(CompressorParameters, wgate), c->L, C, c->D, INIT_NORMAL, 0.02f, DECAY,
                  AS_IS);
    *t++ = tensor(names[2], at + offsetof(CompressorParameters, ape), c->L, r, C, INIT_ZEROS, 0.0f, NO_DECAY, AS_IS);
    tensor_stored(&t[-1], STORED_F32);
    t = vector_row_(t, names[3], at + offsetof(CompressorParameters, norm), c->L, d, INIT_ONES);
    for (; first < t; first++) { tensor_in_kinds(first, c->kinds, of_kinds); }
    return t;
}

static inline Tensor* attention_rows_(Tensor* t, const Config* c) {
    const float scaled = 0.02f / sqrtf(2.0f * (float)c->L);
#define ON "attn."
#define IN "self_attn."
    t = linear_row_(t, c, ON "wq_a.weight", IN "q_a_proj.weight", AT(wq_a), c->qr, c->D, 0.02f);
    tensor_adaptable(&t[-1], IN "q_a_proj", NULL);
    t = vector_row_(t, config_name(c, ON "q_norm.weight", NULL, IN "q_a_norm.weight"), AT(q_norm), c->L, c->qr,
                    INIT_ONES);
    t = linear_row_(t, c, ON "wq_b.weight", IN "q_b_proj.weight", AT(wq_b), c->H * c->d, c->qr, 0.02f);
    tensor_split(&t[-1], SPLIT_ROWS, c->H);
    tensor_adaptable(&t[-1], IN "q_b_proj", NULL);
    t = linear_row_(t, c, ON "wkv.weight", IN "kv_proj.weight", AT(wkv), c->d, c->D, 0.02f);
    tensor_adaptable(&t[-1], IN "kv_proj", NULL);
    t = vector_row_(t, config_name(c, ON "kv_norm.weight", ON "norm.weight", IN "kv_norm.weight"), AT(kv_norm), c->L,
                    c->d, INIT_ONES);
    t = vector_row_(t, config_name(c, ON "attn_sink", NULL, IN "sinks"), AT(sinks), c->L, c->H, INIT_ZEROS);
    tensor_stored(&t[-1], STORED_F32);
    tensor_split(&t[-1], SPLIT_ROWS, c->H);
    t = linear_row_(t, c, ON "wo_a.weight", IN "o_a_proj.weight", AT(wo_a), c->G * c->R, c->H * c->d / c->G, 0.02f);
    tensor_blocks(&t[-1], c->G);
    tensor_split(&t[-1], SPLIT_ROWS, c->G);
    tensor_adaptable(&t[-1], IN "o_a_proj", NULL);
    t = linear_row_(t, c, ON "wo_b.weight", IN "o_b_proj.weight", AT(wo_b), c->D, c->G * c->R, scaled);
    tensor_split(&t[-1], SPLIT_COLUMNS, c->G);
    tensor_adaptable(&t[-1], IN "o_b_proj", NULL);
    return t;
}

// of layers that have entries
static inline Tensor* entry_rows_(Tensor* t, const Config* c) {
    static const char* const official[] = {ON "compressor.wkv.weight", ON "compressor.wgate.weight",
                                           ON "compressor.ape", ON "compressor.norm.weight"};
    static const char* const in_memory[] = {IN "compressor.kv_proj.weight", IN "compressor.gate_proj.weight",
                                            IN "compressor.position_bias", IN "compressor.kv_norm.weight"};
    static const char* const index_official[] = {
        ON "indexer.compressor.wkv.weight", ON "indexer.compressor.wgate.weight", ON "indexer.compressor.ape",
        ON "indexer.compressor.norm.weight"};
    static const char* const index_in_memory[] = {
        IN "compressor.indexer.kv_proj.weight", IN "compressor.indexer.gate_proj.weight",
        IN "compressor.indexer.position_bias", IN "compressor.indexer.kv_norm.weight"};
    const int is_in_memory = c->names == NAMES_IN_MEMORY;
    const char* const* names = is_in_memory ? in_memory : official;
    Tensor* first = t;
    if (config_layers(c, HCA_LAYER) > 0) { t = compressor_rows_(t, c, names, AT(hca), c->hca, c->d, c->d, "H"); }
    if (config_layers(c, CSA_LAYER) > 0) { t = compressor_rows_(t, c, names, AT(csa), c->csa, 2 * c->d, c->d, "C"); }
    for (; first < t; first += 4) {  // of each kind four lines
        tensor_adaptable(first, IN "compressor.kv_proj", NULL);
        tensor_adaptable(first + 1, IN "compressor.gate_proj", NULL);
    }
    if (config_layers(c, CSA_LAYER) == 0) { return t; }
    Tensor* indexer = t;
    t = compressor_rows_(t, c, is_in_memory ? index_in_memory : index_official, AT(index), c->csa, 2 * c->dI, c->dI,
                         "C");
    tensor_closed(indexer, IN "compressor.indexer.kv_proj");
    tensor_closed(indexer + 1, IN "compressor.indexer.gate_proj");
    t = linear_row_(t, c, ON "indexer.wq_b.weight", IN "compressor.indexer.q_b_proj.weight", AT(index_wq_b),
                    c->nI * c->dI, c->qr, 0.02f);
    tensor_in_kinds(&t[-1], c->kinds, "C");
    tensor_closed(&t[-1], IN "compressor.indexer.q_b_proj");
    t = linear_row_(t, c, ON "indexer.weights_proj.weight",
                    c->plain_scorer ? IN "compressor.indexer.weights_proj.weight"
                                    : IN "compressor.indexer.scorer.weights_proj.weight", AT(index_proj), c->nI, c->D,
                    0.02f);
    tensor_in_kinds(&t[-1], c->kinds, "C");
    tensor_closed(&t[-1], IN "compressor.indexer.scorer.weights_proj");
    // off: nothing trains them
    for (; indexer < t && c->aux.indexer == INDEXER_OFF; indexer++) { indexer->decay = NO_DECAY; }
#undef ON
#undef IN
    return t;
}

// lines of a layer's router and experts; the shared one is as wide as the others
static inline Tensor* expert_rows_of_table_(Tensor* t, const Config* c) {
    const float scaled = 0.02f / sqrtf(2.0f * (float)c->L);
    const int D = c->D, F = c->F;
#define ON "ffn."
#define IN "mlp."
    t = linear_row_(t, c, ON "gate.weight", IN "gate.weight", AT(router), c->E, D, 0.02f);
    tensor_adaptable(&t[-1], NULL, IN "gate.weight");
    t = vector_row_(t, config_name(c, ON "gate.bias", NULL, IN "gate.e_score_correction_bias"), AT(router_bias), c->L,
                    c->E, INIT_ZEROS);
    tensor_stored(&t[-1], STORED_F32);
    tensor_counted(&t[-1]);
    tensor_in_kinds(&t[-1], c->routers, "R");
    if (config_hash_layers(c) > 0) {
        *t++ = tensor(config_name(c, ON "gate.tid2eid", NULL, IN "gate.tid2eid"), AT(tid2eid), c->L, c->V, c->k,
                      INIT_CHOICES, 0.0f, NO_DECAY, AS_IS);
        tensor_whole_numbers(&t[-1], c->E);
        tensor_in_kinds(&t[-1], c->routers, "T");
    }
    *t++ = tensor(c->fused ? IN "experts.gate_up_proj" : ON "experts.%d.{w1,w3}.weight", AT(expert_gate_up), c->L,
                  2 * F, D, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    tensor_experts(&t[-1], c->E, c->fused ? FUSED : APART);
    tensor_adaptable(&t[-1], IN "experts.%d.{gate,up}_proj", IN "experts.gate_up_proj");
    *t++ = tensor(c->fused ? IN "experts.down_proj" : ON "experts.%d.w2.weight", AT(expert_down), c->L, D, F,
                  INIT_NORMAL, scaled, DECAY, AS_IS);
    tensor_experts(&t[-1], c->E, c->fused ? FUSED : APART);
    tensor_adaptable(&t[-1], IN "experts.%d.down_proj", IN "experts.down_proj");
    t = linear_row_(t, c, ON "shared_experts.{w1,w3}.weight", IN "shared_experts.{gate,up}_proj.weight",
                    AT(shared_gate_up), 2 * F, D, 0.02f);
    tensor_split(&t[-1], SPLIT_ROWS, 0);
    tensor_adaptable(&t[-1], IN "shared_experts.{gate,up}_proj", NULL);
    t = linear_row_(t, c, ON "shared_experts.w2.weight", IN "shared_experts.down_proj.weight", AT(shared_down), D, F,
                    scaled);
    tensor_split(&t[-1], SPLIT_COLUMNS, 0);
    tensor_adaptable(&t[-1], IN "shared_experts.down_proj", NULL);
#undef ON
#undef IN
    return t;
}

// of what every layer has; what some have comes between, in the order of the forward pass
static inline Tensor* layer_rows_(Tensor* t, const Config* c, int has_entries) {
    const int M = config_mixes(c), n = c->hc * c->D, is_in_memory = c->names == NAMES_IN_MEMORY;
    t = is_in_memory ? site_rows_(t, "attn_hc.fn", "attn_hc.base", "attn_hc.scale", AT(hc_attn), c->L, M, n, 3)
                     : site_rows_(t, "hc_attn_fn", "hc_attn_base", "hc_attn_scale", AT(hc_attn), c->L, M, n, 3);
    t = vector_row_(t, config_name(c, "attn_norm.weight", NULL, "input_layernorm.weight"), AT(attn_norm), c->L, c->D,
                    INIT_ONES);
    t = attention_rows_(t, c);
    if (has_entries) { t = entry_rows_(t, c); }
    t = is_in_memory ? site_rows_(t, "ffn_hc.fn", "ffn_hc.base", "ffn_hc.scale", AT(hc_ffn), c->L, M, n, 3)
                     : site_rows_(t, "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale", AT(hc_ffn), c->L, M, n, 3);
    t = vector_row_(t, config_name(c, "ffn_norm.weight", NULL, "post_attention_layernorm.weight"), AT(ffn_norm), c->L,
                    c->D, INIT_ONES);
    return expert_rows_of_table_(t, c);
}

// Of the MTP module: what it has beside its layer, under official names, and that layer, whose adapters nothing would
// train
static inline Tensor* mtp_rows_(Tensor* t, const Config* c) {
    Tensor rows[MAX_LAYER_ROWS];
    Config official = *c;
    official.names = NAMES_OFFICIAL, official.fused = 0;
    const Tensor* end = layer_rows_(rows, &official, 0);
    const int D = c->D;
    *t++ = tensor(MTP "e_proj.weight", AT(mtp_e_proj), 0, D, D, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    *t++ = tensor(MTP "h_proj.weight", AT(mtp_h_proj), 0, D, D, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    t = vector_row_(t, MTP "enorm.weight", AT(mtp_enorm), 0, D, INIT_ONES);
    t = vector_row_(t, MTP "hnorm.weight", AT(mtp_hnorm), 0, D, INIT_ONES);
    for (const Tensor* row = rows; row < end; row++) {
        if (row->field == AT(tid2eid)) { continue; }
        *t++ = tensor_again(row, c->L, "mtp.%d.");
        t[-1].module = t[-1].parameter = NULL;
    }
    t = site_rows_(t, MTP "hc_head_fn", MTP "hc_head_base", MTP "hc_head_scale", AT(mtp_hc_head), 0, c->hc, c->hc * D,
                   1);
    return vector_row_(t, MTP "norm.weight", AT(mtp_norm), 0, D, INIT_ONES);
}

// returns their number: what a model does not have is left out. c must outlive the table
static inline int parameter_table(Tensor* table, const Config* c) {
    Tensor *t = table, *first;
    const int D = c->D, hc = c->hc, is_official = c->names == NAMES_OFFICIAL;
    *t++ = tensor(is_official ? "embed.weight" : "embed_tokens.weight", AT(embedding), 0, c->Vp, D, INIT_NORMAL, 0.02f,
                  DECAY, AS_IS);
    t[-1].disk_rows = c->V;  // the padding is ours alone
    tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    first = t;
    t = layer_rows_(t, c, 1);
    for (; first < t; first++) {
        tensor_under(first, config_layer_prefix(c));
        if (first->module || first->parameter || first->closed) { tensor_modules_under(first, MODULES); }
    }
    t = is_official ? site_rows_(t, "hc_head_fn", "hc_head_base", "hc_head_scale", AT(hc_head), 0, hc, hc * D, 1)
                    : site_rows_(t, "hc_head.hc_fn", "hc_head.hc_base", "hc_head.hc_scale", AT(hc_head), 0, hc, hc * D,
                                 1);
    t = vector_row_(t, "norm.weight", AT(norm), 0, D, INIT_ONES);
    for (int i = 1; i <= 4; i++) { tensor_under(&t[-i], config_top_prefix(c)); }
    tensor_under(table, config_top_prefix(c));
    *t++ = tensor(config_name(c, "head.weight", NULL, "lm_head.weight"), AT(head), 0, c->Vp, D, INIT_NORMAL, 0.02f,
                  DECAY, AS_IS);
    t[-1].disk_rows = c->V;
    tensor_split(&t[-1], SPLIT_VOCABULARY, 0);
    if (c->aux.mtp) { t = mtp_rows_(t, c); }
    return (int)(t - table);
}

// does row t belong to the MTP module?
static inline int parameter_is_mtp(const Tensor* t) {
    return strncmp(t->prefix ? t->prefix : t->name, "mtp.", 4) == 0;
}

// ... to the indexers, which nothing but their own loss trains?
static inline int parameter_is_index(const Tensor* t) {
    return t->field == AT(index_wq_b) || t->field == AT(index_proj) ||
           (t->field >= AT(index) && t->field < AT(index) + sizeof(CompressorParameters));
}
#undef AT
#endif  // LLMC_DEEPSEEK_V4_H
