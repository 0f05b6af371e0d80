/*
Pieces of Hugging Face's config.json that more than one model has.
    config_is_absent     a key that is not there, or null
    config_warn_of_near  a key that nobody reads, but for a letter one that may be left out and is: a mistake of typing.
                         Also in what is nested: RoPE's sets, quantization_config
    config_parse_either  a number that stands under one key or another
    config_parse_kinds, config_kinds_json   a list with a name for each layer, such as "layer_types", as letters and
                         back; config_kinds_agree: with what another key says of each layer
    config_check_quantized   weights in fp8 with a scale for each block of 128 x 128 are read, no other quantized ones
    config_padded        of V tokens the rows that embedding and output matrix have
    MLP_LAYER, EXPERT_LAYER   letters of layers
    MTP_WEIGHT           of the loss of the token after the next, where nobody says another one
    config_part_keys     heads of keys of one of so many ranks, with --tp: of fewer than ranks, one
    config_parse_balance, config_put_balance   the weight of the routers' balance in the loss (pooled_routers.h)
Errors: 0 with the reason.
*/
#ifndef LLMC_CONFIG_PARTS_H
#define LLMC_CONFIG_PARTS_H
#include "../core/choice.h"    // choice_find, choice_name
#include "../core/fp8.h"       // FP8_BLOCK
#include "../core/jsonfile.h"  // json_switch, json_number, error_set
#include "../core/print.h"     // shortest_double

#define MTP_WEIGHT 0.1f

// of models that have both
enum { MLP_LAYER = 'M', EXPERT_LAYER = 'E' };

// a multiple of 128, as in llm.c
static inline int config_padded(int V) { return (V + 127) / 128 * 128; }

static inline int config_part_keys(int NKV, int ranks) { return NKV > ranks ? NKV / ranks : 1; }

static inline int config_is_absent(const json_t* json, const char* key) {
    const json_t* value = json_object_get(json, key);
    return !value || json_is_null(value);
}

// one letter more, less or another, two that have changed places, or capitals
static inline int config_are_near_(const char* a, const char* b) {
    const size_t n_a = strlen(a), n_b = strlen(b);
    if (strcasecmp(a, b) == 0) { return 1; }
    for (; *a && *a == *b; a++, b++) {}
    if (n_a != n_b) { return n_a == n_b + 1 ? strcmp(a + 1, b) == 0 : n_b == n_a + 1 && strcmp(a, b + 1) == 0; }
    return strcmp(a + 1, b + 1) == 0 || (a[1] && a[0] == b[1] && a[1] == b[0] && strcmp(a + 2, b + 2) == 0);
}

// inside: " in \"rope_parameters\"", or ""
static inline void config_warn_of_near_(const char* path, json_t* json, const char* optional, const char* inside) {
    for (void* i = json_object_iter(json); i; i = json_object_iter_next(json, i)) {
        const char* key = json_object_iter_key(i);
        char name[64];
        for (const char* at = optional; *at; at += *at == '|') {
            const size_t n = strcspn(at, "|");
            assert(n < sizeof name);
            snprintf(name, sizeof name, "%.*s", (int)n, at);
            at += n;
            if (strcmp(key, name) == 0) { break; }
            if (!config_is_absent(json, name) || !config_are_near_(key, name)) { continue; }
            warn_alike("%s: \"%s\"%s means nothing here, is it \"%s\"?", path, key, inside, name);
        }
    }
}

// what may be left out of objects that more than one model has; of a set of RoPE what any of them reads
#define CONFIG_OPTIONAL_ROPE \
    "rope_type|type|rope_theta|partial_rotary_factor|mrope_section|factor" \
    "|original_max_position_embeddings|beta_fast|beta_slow|attention_factor|mscale|truncate|main|compress"
#define CONFIG_OPTIONAL_FP8 "quant_method|fmt|activation_scheme|weight_block_size"

// sets of RoPE, of which "rope_parameters" may hold two, and blocks of fp8
static inline void config_warn_of_near_inside_(const char* path, const json_t* json) {
    static const char* const known[][2] = {
        {"rope_parameters", CONFIG_OPTIONAL_ROPE}, {"rope_scaling", CONFIG_OPTIONAL_ROPE},
        {"main", CONFIG_OPTIONAL_ROPE}, {"compress", CONFIG_OPTIONAL_ROPE},
        {"quantization_config", CONFIG_OPTIONAL_FP8}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        json_t* nested = json_object_get(json, known[i][0]);
        char inside[64];
        if (!json_is_object(nested)) { continue; }
        snprintf(inside, sizeof inside, " in \"%s\"", known[i][0]);
        config_warn_of_near_(path, nested, known[i][1], inside);
        config_warn_of_near_inside_(path, nested);
    }
}

// optional: names of keys that may be left out, with | between them. Of others that are missing the reader says so, and
// published files have many that mean nothing here. Where the near one is there, too, both are meant
static inline void config_warn_of_near(const char* path, json_t* json, const char* optional) {
    config_warn_of_near_(path, json, optional, "");
    config_warn_of_near_inside_(path, json);
}

// A number that stands under one of two keys, or under both, which must agree. Where neither is there *to stays as it
// is; 0: one of them is needed
static inline int config_parse_either(int* to, int most, const json_t* json, const char* key, const json_t* other_json,
                                      const char* other, ErrorText* error) {
    const int has_one = !config_is_absent(json, key), has_other = !config_is_absent(other_json, other);
    int one = *to, second = 0;
    const JsonInt first[] = {{key, &one, 1, most}}, last[] = {{other, &second, 1, most}};
    if ((has_one || (!has_other && *to == 0)) && !json_ints(json, first, 1, error)) { return 0; }
    if (has_other && !json_ints(other_json, last, 1, error)) { return 0; }
    if (has_one && has_other && one != second) {
        return error_set(error, "\"%s\": expected %d, as \"%s\" says, found %d: leave one of them out", other, one, key,
                         second);
    }
    *to = has_other ? second : one;
    return 1;
}

// L letters: of each layer that of its name. names: "one|another", of which letters[] has one each
static inline int config_parse_kinds(char* kinds, int L, const json_t* json, const char* key, const char* names,
                                     const char* letters, ErrorText* error) {
    const json_t* list = json_object_get(json, key);
    if (!json_is_array(list)) { return error_set(error, "\"%s\": expected a list of %d, one for each layer", key, L); }
    if ((int)json_array_size(list) != L) {
        return error_set(error, "\"%s\": expected a list of %d, one for each layer, found %zu", key, L,
                         json_array_size(list));
    }
    for (int l = 0; l < L; l++) {
        const char* name = json_string_value(json_array_get(list, (size_t)l));
        const int position = name ? choice_find(names, name) : -1;
        if (position < 0) {
            return error_set(error, "\"%s\": expected %s, found %.60s", key, choice_or(names).s,
                             name ? name : "another type");
        }
        kinds[l] = letters[position];
    }
    return 1;
}

static inline ShortText config_kind_name_(char kind, const char* names, const char* letters) {
    return choice_name(names, (int)(strchr(letters, kind) - letters));
}

// kinds: of `key`; expected: of `other`
static inline int config_kinds_agree(const char* kinds, const char* expected, int L, const char* key,
                                     const char* other, const char* names, const char* letters, ErrorText* error) {
    for (int l = 0; l < L; l++) {
        if (kinds[l] == expected[l]) { continue; }
        return error_set(error, "\"%s\": expected %s of layer %d, as \"%s\" says, found %s: leave one of them out", key,
                         config_kind_name_(expected[l], names, letters).s, l, other,
                         config_kind_name_(kinds[l], names, letters).s);
    }
    return 1;
}

static inline json_t* config_kinds_json(const char* kinds, int L, const char* names, const char* letters) {
    json_t* list = json_array();
    for (int l = 0; l < L; l++) {
        json_array_append_new(list, json_string(config_kind_name_(kinds[l], names, letters).s));
    }
    return list;
}

static inline int config_says_(const json_t* json, const char* key, const char* text) {
    const char* found = json_string_value(json_object_get(json, key));
    return found && strcmp(found, text) == 0;
}

// which matrices are in fp8, their files say; exports are floats or bf16, and have no such key
static inline int config_check_quantized(const json_t* json, ErrorText* error) {
    const json_t* q = json_object_get(json, "quantization_config");
    const json_t* block = json_object_get(q, "weight_block_size");
    int fits = config_says_(q, "quant_method", "fp8") && json_array_size(block) == 2;
    fits &= config_is_absent(q, "fmt") || config_says_(q, "fmt", "e4m3");
    fits &= config_is_absent(q, "activation_scheme") || config_says_(q, "activation_scheme", "dynamic");
    for (size_t i = 0; i < 2; i++) { fits &= json_integer_value(json_array_get(block, i)) == FP8_BLOCK; }
    return config_is_absent(json, "quantization_config") || fits ||
           error_set(error, "\"quantization_config\": expected null, or quant_method fp8 with fmt e4m3, "
                     "activation_scheme dynamic and weight_block_size [128, 128]; other quantized weights are not read "
                     "here: take the model's folder in bf16 or float");
}

// 0 where "output_router_logits" is not true
static inline int config_parse_balance(float* balance, const json_t* json, ErrorText* error) {
    int in_loss = 0;
    double coefficient = 0.001;
    if (!json_switch(&in_loss, json, "output_router_logits", error) ||
        !json_number(&coefficient, json, "router_aux_loss_coef", 0.0, 1e3, error)) {
        return 0;
    }
    *balance = in_loss ? (float)coefficient : 0.0f;
    return 1;
}

static inline void config_put_balance(json_t* json, float balance) {
    json_object_set_new(json, "output_router_logits", json_boolean(balance > 0.0f));
    json_object_set_new(json, "router_aux_loss_coef", json_real(balance > 0.0f ? shortest_double(balance) : 0.001));
}
#endif  // LLMC_CONFIG_PARTS_H
