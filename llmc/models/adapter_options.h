/*
The options of adapters, of every trainer whose model may have them.
    adapter_options          rows of the table
    adapter_options_check    what may not stand together; called once all options are read
    adapter_is_asked         does the run train or use an adapter? Else it trains the model itself
    adapter_settings_new     what the options say of a new adapter, as the adapter_config.json that it will have
An adapter is new with --lora-rank; with --lora it is one that there is, and its adapter_config.json says all but the
dropout, where that is typed (adapter_set_dropout).
Errors: fail_input, with the option's name.
*/
#ifndef LLMC_ADAPTER_OPTIONS_H
#define LLMC_ADAPTER_OPTIONS_H
#include "../core/options.h"  // Option, options_append, options_given, options_fail
#include "adapters.h"             // AdapterSettings, adapter_settings

typedef struct {
    const char *lora, *targets, *parameters, *rank_pattern, *alpha_pattern, *export_lora;
    int rank, rslora, merge;
    float alpha, dropout;
} AdapterOptions;

// appends them to the n rows of a table; returns how many there are now
static inline int adapter_options(Option* table, int n, AdapterOptions* o) {
    const int begins = OPTION_BEGINS;
    const Option rows[] = {
        {"adapter", "lora", "", OPTION_TEXT, &o->lora, "", 0, 0, "DIR",
         "the adapter in this folder of PEFT's, or in a run's newest checkpoint, beside the model of --from: to go on "
         "training it, to generate with it, to merge it", OPTION_READS | OPTION_FOLDER | begins},
        {"adapter", "lora-rank", "", OPTION_INT, &o->rank, "0", 0, ADAPTER_MOST_RANK, "N",
         "train a new adapter (LoRA) of this rank, and leave the model as it is; 0: none, train the model", begins},
        {"adapter", "lora-alpha", "", OPTION_FLOAT, &o->alpha, "0", 0, 1e6, "F",
         "what it adds is multiplied by F / rank; 0: twice the rank", begins},
        {"adapter", "lora-rslora", "", OPTION_SWITCH, &o->rslora, "0", 0, 0, "0|1", "by F / sqrt(rank) instead",
         begins},
        {"adapter", "lora-dropout", "", OPTION_FLOAT, &o->dropout, "0", 0, 0.99, "F",
         "leave out this part of an adapter's inputs in training; with --lora, what its config says unless typed", 0},
        {"adapter", "lora-targets", "", OPTION_TEXT, &o->targets, "", 0, 0, "NAME,...|REGEX|all-linear",
         "linear layers that get one: ends of their names, 'q_proj,v_proj', or a regular expression of the whole name, "
         "'model\\.layers\\.[0-9]\\..*_proj'; empty: all-linear, but none with --lora-parameters", begins},
        {"adapter", "lora-parameters", "", OPTION_TEXT, &o->parameters, "", 0, 0, "NAME,...",
         "experts and routers that get one: 'mlp.experts.gate_up_proj,mlp.experts.down_proj,mlp.gate.weight'", begins},
        {"adapter", "lora-rank-pattern", "", OPTION_TEXT, &o->rank_pattern, "", 0, 0, "REGEX=N,...",
         "another rank where a name ends with this: 'layers\\.0\\..*=4,v_proj=16'; the first that matches counts",
         begins},
        {"adapter", "lora-alpha-pattern", "", OPTION_TEXT, &o->alpha_pattern, "", 0, 0, "REGEX=F,...",
         "the same for alpha", begins},
        {"out", "export-lora", "", OPTION_TEXT, &o->export_lora, "", 0, 0, "DIR",
         "write the adapter as a folder of PEFT's", OPTION_WRITES | OPTION_FOLDER | OPTION_WORK},
        {"out", "merge", "", OPTION_SWITCH, &o->merge, "0", 0, 0, "0|1",
         "--export-hf with the adapter added to the weights: a model without adapters", 0},
    };
    return options_append(table, n, rows, (int)(sizeof rows / sizeof rows[0]));
}

static inline int adapter_is_asked(const AdapterOptions* o) { return *o->lora || o->rank > 0; }

// export_hf: that option's value
static inline void adapter_options_check(const AdapterOptions* o, const Option* table, int n, const char* export_hf) {
    const char* const of_new[] = {"lora-rank", "lora-alpha", "lora-rslora", "lora-targets", "lora-parameters",
                                  "lora-rank-pattern", "lora-alpha-pattern"};
    for (size_t i = 0; i < sizeof of_new / sizeof of_new[0]; i++) {
        const int is_typed = options_given(table, n, of_new[i]) == 1;
        options_refuse(*o->lora && is_typed, of_new[i], "the adapter of --lora brings its own");
        options_refuse(!adapter_is_asked(o) && is_typed && i > 0, of_new[i], "is for a new adapter: --lora-rank N");
    }
    options_refuse(!adapter_is_asked(o) && options_given(table, n, "lora-dropout") == 1, "lora-dropout",
                   "is for an adapter: --lora-rank N or --lora DIR");
    const char* const need = "expected an adapter: --lora DIR, or --lora-rank N in training";
    options_refuse(!adapter_is_asked(o) && *o->export_lora, "export-lora", need);
    options_refuse(!adapter_is_asked(o) && o->merge, "merge", need);
    // a run that began with --merge goes on without it
    options_refuse(options_given(table, n, "merge") == 1 && o->merge && !*export_hf, "merge",
                   "is for --export-hf DIR, where the merged model goes");
}

// "a,b" as ["a", "b"]
static inline json_t* adapter_options_list_(const char* option, const char* text) {
    json_t* list = json_array();
    char *copy = string_copy(text), *rest = copy;
    for (char* item; *text && (item = strsep(&rest, ","));) {
        if (!*item) { options_fail(option, "expected names between commas, found \"%s\"", format_text(text).s); }
        json_array_append_new(list, json_string(item));
    }
    free(copy);
    return list;
}

// names are letters, digits, _ . and -; anything else makes a regular expression of it
static inline json_t* adapter_options_targets_(const AdapterOptions* o) {
    const char* targets = !*o->targets && !*o->parameters ? "all-linear" : o->targets;
    const int is_expression = targets[strcspn(targets, "\\*+?^$()[]{}|")] != '\0';
    if (is_expression || strcasecmp(targets, "all-linear") == 0) { return json_string(targets); }
    return adapter_options_list_("lora-targets", targets);
}

// the number behind the "=" at `at`, and where it ends, which is the end of an item; NULL: there is none
static inline char* adapter_options_number_(char* at, double* x) {
    char* end = at;
    if (*at == '=' && strspn(at + 1, "0123456789.") > 0) { *x = strtod(at + 1, &end); }
    return end > at && (*end == ',' || *end == '\0') ? end : NULL;
}

// "REGEX=N,REGEX=N" as {REGEX: N}; an expression may have commas and "=", but not in front of such a number
static inline json_t* adapter_options_pattern_(const char* option, const char* text, int of_ranks) {
    json_t* pattern = json_object();
    char *copy = string_copy(text), *item = copy;
    for (char* at = copy; *at;) {
        double x = 0.0;
        char* end = adapter_options_number_(at, &x);
        if (!end) {
            at++;
            continue;
        }
        *at = '\0';
        if (of_ranks && x != floor(x)) { options_fail(option, "expected whole ranks, found %g", x); }
        if (json_object_get(pattern, item)) { options_fail(option, "\"%s\" is there twice", format_text(item).s); }
        json_object_set_new(pattern, item, of_ranks ? json_integer((json_int_t)x) : json_real(x));
        at = item = end + (*end == ',');
    }
    if (*item) {
        options_fail(option, "expected REGEX=%s, found \"%s\"", of_ranks ? "N" : "F", format_text(item).s);
    }
    free(copy);
    return pattern;
}

static inline AdapterSettings adapter_settings_new(const AdapterOptions* o) {
    const double alpha = o->alpha > 0.0f ? shortest_double(o->alpha) : 2.0 * o->rank;
    json_t *list = adapter_options_list_("lora-parameters", o->parameters), *none = json_null();
    json_t* json = json_pack(
        "{s:s, s:s, s:n, s:n, s:i, s:o, s:f, s:s, s:b, s:b, s:b, s:b, s:b}", "peft_type", "LORA", "task_type",
        "CAUSAL_LM", "base_model_name_or_path", "revision", "r", o->rank, "lora_alpha",
        alpha == floor(alpha) ? json_integer((json_int_t)alpha) : json_real(alpha), "lora_dropout",
        shortest_double(o->dropout), "bias", "none", "fan_in_fan_out", 0, "inference_mode", 1, "init_lora_weights", 1,
        "use_rslora", o->rslora, "use_dora", 0);
    json_object_set_new(json, "target_modules", adapter_options_targets_(o));
    json_object_set(json, "target_parameters", json_array_size(list) > 0 ? list : none);
    json_object_set(json, "layers_to_transform", none);
    json_object_set(json, "layers_pattern", none);
    json_object_set_new(json, "rank_pattern", adapter_options_pattern_("lora-rank-pattern", o->rank_pattern, 1));
    json_object_set_new(json, "alpha_pattern", adapter_options_pattern_("lora-alpha-pattern", o->alpha_pattern, 0));
    json_object_set_new(json, "modules_to_save", none);
    json_decref(list);
    return adapter_settings(json, NULL);
}
#endif  // LLMC_ADAPTER_OPTIONS_H
