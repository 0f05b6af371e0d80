/*
LoRA: which weights of a model have adapters, in which order these lie in memory, and their names in PEFT's files.
    y = W x + s B A x    W (out, in) is frozen; A (r, in) and B (out, r) learn; s = alpha / r, of rslora alpha / sqrt(r)
    adapter_settings   the members of an adapter_config.json, checked
    adapter_choose     places for a new adapter, and the table of its tensors; adapter_files.h: those of one in a file
    adapter_find       the adapter of a weight: of a row of the base's table, a layer, and a part of the outputs
    adapters_place     the table's rows in front of the base's, in a model; it takes the adapters over
    adapter_set_dropout               another dropout than that of its settings
    adapters_widest_expert            elements of the largest A or B of an expert
    adapter_merge, adapter_merge_slice   W + s B A; adapter_changes_slice: of which slices
A place is a linear layer of one layer of the model, or a part of its outputs that is a tensor of its own in files: gate
and up are one weight of 2F outputs in memory, and two places. All experts of a layer are one place, with an A (E, r,
in) and a B (E, out, r). tensor_adaptable in the base's table says what may have an adapter, by PEFT's path of a module
or of a parameter: experts and routers are no linear modules of transformers.
Table   a row for the A's of all layers and one for their B's; where layers differ in rank, or in names, so for each.
        Order, which is the gradient norm's: rows of the base; parts; ranks, by the first layer that has them; A, then
        B; in each its layers. These rows stand in front of the base's, which are all frozen, and so the offsets that
        they have by themselves stay.
Ranks   of --tp share an adapter with its weight (tensor_split): where each has some of its rows, these are B's rows,
        too, and A is whole; where each has some of its columns, these are A's, and B is whole.
Names   base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight: the path of a module. A parameter's adapter has
        the path of its module; of two parameters of one module the first is inside: gate_up_proj's A is
        "...mlp.experts.base_layer.lora_A.weight", down_proj's "...mlp.experts.lora_A.weight". One alone is the latter.
        Older files have modules for each expert, "...mlp.experts.7.up_proj.lora_A.weight", and are continued so.
Layers that take none (tensor_closed) may be called as others are, and PEFT would find them by the same names: where it
would, the config that is written has an expression without them (adapter_files.h).
Paths are matched as PEFT does it: an item of a list is the end of a path, after a dot; a regular expression is that of
all of it; so is a key K of rank_pattern and alpha_pattern, as (.*\.)?(K), and the first that matches counts.
        PEFT 0.21 takes every module that is called as an expert's for one: where some layers have experts, the MLPs of
        the others (gate_proj, up_proj, down_proj) have no adapters there, nor has of some models the shared expert
        (tensor_called_as_experts). all-linear leaves them out, then; where they are named, adapter_warn_of_peft says
        so. The same of matrices in several blocks (tensor_blocks), whose adapters it loads and cannot run.
Start:  A uniform in +-1 / sqrt(in), B zeros: at first the model computes what its base does.
Order:  W + s B A: for each element one chain over j from 0, one product by s, one sum.
Errors: fail_input names the option, or the file and its key, what was expected and what was found.
Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732 (rslora); huggingface/peft 0.21
*/
#ifndef LLMC_ADAPTERS_H
#define LLMC_ADAPTERS_H
#include "../core/jsonfile.h"  // json_t, json_ints, json_number, json_switch, ErrorText
#include "../core/madd.h"      // madd
#include "../core/print.h"     // format_text
#include "../core/tensor.h"    // Tensor, tensor_split, tensor_slice_name, TENSOR_NO_FIELD
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

enum { ADAPTER_MOST_RANK = 1 << 16, ADAPTER_MOST_EXPRESSION = 4096, ADAPTER_MOST_STEPS = 1000000 };
enum { ADAPTER_NAME_BYTES = 256 };
#define ADAPTER_PREFIX "base_model.model."

// ---- 1. Settings ----

typedef struct {
    json_t* json;                                // the adapter_config.json, to which all below points
    char* where;                                 // its path; NULL: options say it
    int rank;                                    // r, 8
    double alpha;                                // lora_alpha, 16
    int rslora;                                  // use_rslora
    float dropout;                               // lora_dropout
    const json_t *targets;                       // target_modules: a list of ends, an expression, "all-linear"; or NULL
    const json_t *parameters;                    // target_parameters: a list of ends; or NULL
    const json_t *rank_pattern, *alpha_pattern;  // {expression: number}; or NULL
} AdapterSettings;

// the option that says what a key of adapter_config.json says
static inline const char* adapter_option_of(const char* key) {
    const char* const names[][2] = {
        {"r", "lora-rank"}, {"lora_alpha", "lora-alpha"}, {"use_rslora", "lora-rslora"},
        {"lora_dropout", "lora-dropout"}, {"target_modules", "lora-targets"}, {"target_parameters", "lora-parameters"},
        {"rank_pattern", "lora-rank-pattern"}, {"alpha_pattern", "lora-alpha-pattern"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(names[i][0], key) == 0) { return names[i][1]; }
    }
    return key;
}

__attribute__((noreturn, format(printf, 3, 4)))
static inline void adapter_fail_(const AdapterSettings* s, const char* key, const char* format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (s->where) { fail_input("%s: \"%s\": %s", s->where, key, text); }
    fail_input("--%s: %s", adapter_option_of(key), text);
}

// Does an expression match all of a path? That is Python's re.fullmatch, in PCRE2's grammar
static inline int adapter_full_match_(const AdapterSettings* s, const char* key, const char* expression,
                                      const char* path) {
    int error = 0;
    size_t at = 0;
    unsigned char why[160] = "";
    if (strlen(expression) > ADAPTER_MOST_EXPRESSION) {
        adapter_fail_(s, key, "an expression of %zu bytes, more than %d", strlen(expression), ADAPTER_MOST_EXPRESSION);
    }
    pcre2_code* code = pcre2_compile((PCRE2_SPTR)expression, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_ANCHORED | PCRE2_ENDANCHORED, &error, &at, NULL);
    if (!code) {
        pcre2_get_error_message(error, why, sizeof why);
        adapter_fail_(s, key, "%s at byte %zu of the regular expression \"%s\"", (char*)why, at,
                      format_text(expression).s);
    }
    pcre2_match_data* found = pcre2_match_data_create(1, NULL);
    pcre2_match_context* limits = pcre2_match_context_create(NULL);
    if (!found || !limits) { fail_run("regular expression: no memory"); }
    pcre2_set_match_limit(limits, ADAPTER_MOST_STEPS);
    const int status = pcre2_match(code, (PCRE2_SPTR)path, strlen(path), 0, 0, found, limits);
    pcre2_match_context_free(limits);
    pcre2_match_data_free(found);
    pcre2_code_free(code);
    if (status < 0 && status != PCRE2_ERROR_NOMATCH) {
        pcre2_get_error_message(status, why, sizeof why);
        adapter_fail_(s, key, "%s: \"%s\" against %s", (char*)why, format_text(expression).s, path);
    }
    return status >= 0;
}

// null, false, nothing in it, or "none": it asks for nothing
static inline int adapter_is_empty_(const json_t* value) {
    if (json_is_string(value)) { return strcmp(json_string_value(value), "none") == 0; }
    if (json_is_array(value)) { return json_array_size(value) == 0; }
    if (json_is_object(value)) { return json_object_size(value) == 0; }
    return json_is_null(value) || json_is_false(value);
}

__attribute__((noreturn))
static inline void adapter_refuse_(const AdapterSettings* s, const char* key, const char* expected,
                                   const json_t* found) {
    char* text = found ? json_dumps(found, JSON_ENCODE_ANY) : NULL;
    adapter_fail_(s, key, "expected %s, found %.100s", expected, text ? text : "nothing");
}

// other methods, and whatever changes what A and B mean: a key that nobody knows here and that asks for something
static inline void adapter_refuse_others_(const AdapterSettings* s) {
    static const char* const known[] = {
        "peft_type", "task_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "inference_mode",
        "init_lora_weights", "use_rslora", "target_modules", "target_parameters", "layers_to_transform",
        "layers_pattern", "rank_pattern", "alpha_pattern", "auto_mapping", "exclude_modules", "megatron_core",
        "peft_version", "qalora_group_size", "lora_dropout"};
    const json_t* type = json_object_get(s->json, "peft_type");
    const json_t* start = json_object_get(s->json, "init_lora_weights");
    const char *key, *start_name = json_is_string(start) ? json_string_value(start) : "gaussian";
    json_t* value;
    if (!json_is_string(type) || strcmp(json_string_value(type), "LORA") != 0) {
        adapter_refuse_(s, "peft_type", "\"LORA\"", type);
    }
    if (strcmp(start_name, "gaussian") != 0 && strcmp(start_name, "orthogonal") != 0) {
        adapter_refuse_(s, "init_lora_weights",
                        "true, false, \"gaussian\" or \"orthogonal\", which leave the base as it "
                        "is", start);
    }
    json_object_foreach(s->json, key, value) {
        int is_known = 0;
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) { is_known |= strcmp(key, known[i]) == 0; }
        if (!is_known && !adapter_is_empty_(value)) {
            adapter_refuse_(s, key, "nothing, null or false: this trainer has LoRA without it", value);
        }
    }
}

// a list of names under this key, NULL where there is none
static inline const json_t* adapter_list_(const AdapterSettings* s, const char* key, int may_be_text) {
    const json_t *list = json_object_get(s->json, key), *item;
    size_t i;
    if (!list || json_is_null(list)) { return NULL; }
    if (json_is_string(list) && may_be_text) { return list; }
    if (!json_is_array(list)) {
        adapter_refuse_(s, key, may_be_text ? "a list of names, or a text" : "a list of names", list);
    }
    json_array_foreach(list, i, item) {
        if (!json_is_string(item) || !*json_string_value(item)) { adapter_refuse_(s, key, "names in the list", item); }
    }
    return list;
}

static inline const json_t* adapter_pattern_(const AdapterSettings* s, const char* key, int of_ranks) {
    json_t *pattern = json_object_get(s->json, key), *value;
    const char* expression;
    if (!pattern || json_is_null(pattern)) { return NULL; }
    if (!json_is_object(pattern)) { adapter_refuse_(s, key, "an object {expression: number}", pattern); }
    json_object_foreach(pattern, expression, value) {
        const double x = json_number_value(value);
        adapter_full_match_(s, key, expression, "");  // is it an expression?
        if (of_ranks && (!json_is_integer(value) || x < 1 || x > (double)ADAPTER_MOST_RANK)) {
            adapter_refuse_(s, key, "ranks, integers from 1 on", value);
        }
        if (!(x > 0.0 && x < 1e9)) { adapter_refuse_(s, key, "numbers above 0", value); }
    }
    return pattern;
}

// takes the reference; where: the file that it was read from, NULL: options
static inline AdapterSettings adapter_settings(json_t* json, const char* where) {
    AdapterSettings s;
    ErrorText error;
    double dropout = 0.0;
    memset(&s, 0, sizeof s);
    s.json = json;
    s.where = where ? string_copy(where) : NULL;
    adapter_refuse_others_(&s);
    const JsonInt rank[] = {{"r", &s.rank, 1, ADAPTER_MOST_RANK}};
    const json_t* alpha = json_object_get(json, "lora_alpha");
    s.alpha = json_number_value(alpha);
    if (!(s.alpha > 0.0 && s.alpha < 1e9)) { adapter_refuse_(&s, "lora_alpha", "a number above 0", alpha); }
    if (!json_ints(json, rank, 1, &error) || !json_switch(&s.rslora, json, "use_rslora", &error) ||
        !json_number(&dropout, json, "lora_dropout", 0.0, 0.999, &error)) {
        fail_input("%s: %s", where ? where : "options", error.text);
    }
    s.dropout = (float)dropout;
    s.targets = adapter_list_(&s, "target_modules", 1);
    s.parameters = adapter_list_(&s, "target_parameters", 0);
    s.rank_pattern = adapter_pattern_(&s, "rank_pattern", 1);
    s.alpha_pattern = adapter_pattern_(&s, "alpha_pattern", 0);
    if (s.dropout > 0.0f && json_array_size(s.parameters) > 0) {
        adapter_fail_(&s, "lora_dropout",
                      "expected 0 with adapters of experts or routers (target_parameters), for which "
                      "PEFT has none, found %g", dropout);
    }
    return s;
}

static inline void adapter_settings_free(AdapterSettings* s) {
    json_decref(s->json);
    free(s->where);
    memset(s, 0, sizeof *s);
}

static inline int adapter_is_all_linear(const AdapterSettings* s) {
    return json_is_string(s->targets) && strcasecmp(json_string_value(s->targets), "all-linear") == 0;
}

// ---- 2. Places, and the table of their A's and B's ----

typedef struct {
    int row, layer, part;  // of the base's table, numbers from 0; the part among those in {} of its name
    int is_parameter;      // for PEFT; else it is a module, or of experts one for each
    int depth;             // of a parameter: how many others of its module are wrapped around it
    int rank;
    float scale;           // s
    float dropout;         // of the inputs of A; 0 of experts and of parameters, as in PEFT
    int first, n;          // outputs of the weight, of experts those of each
    int a, b;              // rows of the adapter's table
} AdapterPlace;

typedef struct {
    AdapterSettings settings;
    AdapterPlace* places;     // by row, part and layer
    int n_places;
    Tensor* table;         // A's and B's: to stand in front of the base's rows
    int n_table;
    char** texts;          // names and kinds of the rows
    int n_texts;
} Adapters;

// the adapter of a weight, or of a part of its outputs; NULL: it has none. A parameter's is that of part 0, and of all
// outputs
static inline const AdapterPlace* adapter_find(const Adapters* x, int row, int layer, int part) {
    for (int i = 0; i < x->n_places; i++) {
        const AdapterPlace* p = &x->places[i];
        if (p->row == row && p->layer == layer && p->part == part) { return p; }
    }
    return NULL;
}

// ---- 3. Paths ----

// the row under PEFT's name for it: a slice for each module
static inline Tensor adapter_named_(const Tensor* row, int is_parameter) {
    Tensor named = *row;
    named.name = is_parameter ? row->parameter : row->module;
    named.prefix = row->modules_under ? row->modules_under : row->prefix;
    named.experts_on_disk = is_parameter ? FUSED : APART;
    return named;
}

// "model.layers.3.self_attn.q_proj"; of experts that are modules, that of one of them
static inline const char* adapter_path(char path[ADAPTER_NAME_BYTES], const Tensor* base, const AdapterPlace* p,
                                       int expert) {
    const Tensor named = adapter_named_(&base[p->row], p->is_parameter);
    const int slice = tensor_slice(&named, p->layer) + tensor_names(&named) * expert + p->part;
    return tensor_slice_name(path, ADAPTER_NAME_BYTES, &named, slice);
}

// of a linear layer that takes no adapter
static inline const char* adapter_closed_path(char path[ADAPTER_NAME_BYTES], const Tensor* row, int layer) {
    Tensor named = *row;
    named.module = row->closed;
    named = adapter_named_(&named, 0);
    return tensor_slice_name(path, ADAPTER_NAME_BYTES, &named, tensor_slice(&named, layer));
}

// does a path end with these names?
static inline int adapter_is_end_(const char* path, const char* end) {
    const size_t n = strlen(path), n_end = strlen(end);
    return n >= n_end && strcmp(path + n - n_end, end) == 0 && (n == n_end || path[n - n_end - 1] == '.');
}

static inline int adapter_is_in_list_(const json_t* list, const char* path) {
    const json_t* end;
    size_t i;
    json_array_foreach(list, i, end) {
        if (adapter_is_end_(path, json_string_value(end))) { return 1; }
    }
    return 0;
}

// does a new adapter want this place? Of experts the parameter, never a module for each
static inline int adapter_is_wanted_(const AdapterSettings* s, const Tensor* base, const AdapterPlace* p) {
    char path[ADAPTER_NAME_BYTES];
    adapter_path(path, base, p, 0);
    if (p->is_parameter) { return adapter_is_in_list_(s->parameters, path); }
    if (base[p->row].experts > 0) { return 0; }
    if (adapter_is_all_linear(s)) { return 1; }  // adapter_wants_ knows exceptions
    if (!json_is_string(s->targets)) { return adapter_is_in_list_(s->targets, path); }
    return adapter_full_match_(s, "target_modules", json_string_value(s->targets), path);
}

// the number of the first pattern that a path matches, else `other`
static inline double adapter_by_pattern_(const AdapterSettings* s, const char* key, const json_t* pattern,
                                         const char* path, double other) {
    const char* expression;
    json_t* value;
    json_object_foreach((json_t*)pattern, expression, value) {
        char whole[ADAPTER_MOST_EXPRESSION + 16];
        snprintf(whole, sizeof whole, "(.*\\.)?(%.*s)", ADAPTER_MOST_EXPRESSION - 16, expression);
        if (adapter_full_match_(s, key, whole, path)) { return json_number_value(value); }
    }
    return other;
}

// ---- 4. From places to the table ----

typedef int (*AdapterHas)(const void* context, const AdapterSettings* s, const Tensor* base, const AdapterPlace* p);

static inline void adapter_add_place_(Adapters* x, const AdapterPlace* p) {
    const size_t n_bytes = sizeof *p * (size_t)(x->n_places + 1);
    x->places = (AdapterPlace*)realloc_check(x->places, n_bytes, "places of adapters");
    x->places[x->n_places++] = *p;
}

// every place of the n rows of a base that `has` an adapter, by row, part and layer
static inline void adapter_collect_(Adapters* x, const Tensor* base, int n, AdapterHas has, const void* context) {
    for (int row = 0; row < n; row++) {
        const Tensor *t = &base[row], modules = adapter_named_(t, 0);
        const int n_parts = t->module ? tensor_names(&modules) : t->parameter != NULL;
        assert(t->all_experts == 0);  // of all ranks
        for (int part = 0; part < n_parts; part++) {
            for (int slot = 0; slot < 2 * t->layers; slot++) {
                AdapterPlace p;
                memset(&p, 0, sizeof p);
                p.row = row, p.part = part, p.layer = slot / 2, p.is_parameter = slot % 2;
                const int has_name = p.is_parameter ? t->parameter && part == 0 : t->module != NULL;
                if (has_name && tensor_has_layer(t, p.layer) && has(context, &x->settings, base, &p)) {
                    adapter_add_place_(x, &p);
                }
            }
        }
    }
}

// n bytes up to the module of a parameter: "mlp.experts" of "mlp.experts.gate_up_proj"
static inline int adapter_module_length_(const char* parameter) { return (int)(strrchr(parameter, '.') - parameter); }

static inline int adapter_same_module_(const Tensor* a, const Tensor* b) {
    const int n = adapter_module_length_(a->parameter);
    const char *under_a = a->prefix ? a->prefix : "", *under_b = b->prefix ? b->prefix : "";
    return n == adapter_module_length_(b->parameter) && strncmp(a->parameter, b->parameter, (size_t)n) == 0 &&
           strcmp(under_a, under_b) == 0;
}

// PEFT wraps the parameters of a module in their order: the later ones are outside
static inline int adapter_depth_(const Adapters* x, const Tensor* base, const AdapterPlace* p) {
    int depth = 0;
    for (int i = 0; p->is_parameter && i < x->n_places; i++) {
        const AdapterPlace* other = &x->places[i];
        const int is_later = other->is_parameter && other->layer == p->layer && other->row > p->row;
        depth += is_later && adapter_same_module_(&base[other->row], &base[p->row]);
    }
    return depth;
}

// rank, scale and outputs of a place that is settled
static inline void adapter_set_place_(const Adapters* x, const Tensor* base, AdapterPlace* p) {
    const AdapterSettings* s = &x->settings;
    const Tensor *t = &base[p->row], modules = adapter_named_(t, p->is_parameter);
    char path[ADAPTER_NAME_BYTES];
    adapter_path(path, base, p, 0);
    p->rank = (int)adapter_by_pattern_(s, "rank_pattern", s->rank_pattern, path, s->rank);
    const double alpha = adapter_by_pattern_(s, "alpha_pattern", s->alpha_pattern, path, s->alpha);
    p->scale = (float)(alpha / (s->rslora ? sqrt(p->rank) : p->rank));
    p->n = t->rows / tensor_names(&modules);
    p->first = p->part * p->n;
    p->depth = adapter_depth_(x, base, p);
}

static inline char* adapter_text_(Adapters* x, const char* text) {
    x->texts = (char**)realloc_check(x->texts, sizeof(char*) * (size_t)(x->n_texts + 1), "names of adapters");
    return x->texts[x->n_texts++] = string_copy(text);
}

// the name of the A's or the B's (`end`) of such places: "base_model.model.model.layers.%d.mlp.up_proj.lora_A.weight"
static inline const char* adapter_row_name_(Adapters* x, const Tensor* base, const AdapterPlace* p, const char* end) {
    char path[ADAPTER_NAME_BYTES], name[2 * ADAPTER_NAME_BYTES];
    const Tensor named = adapter_named_(&base[p->row], p->is_parameter);
    tensor_name_of(path, sizeof path, &named, p->part);
    if (p->is_parameter) { path[adapter_module_length_(path)] = '\0'; }
    size_t used = (size_t)snprintf(name, sizeof name, ADAPTER_PREFIX "%s", path);
    for (int k = 0; k < p->depth; k++) { used += (size_t)snprintf(name + used, sizeof name - used, ".base_layer"); }
    snprintf(name + used, sizeof name - used, ".%s.weight", end);
    return adapter_text_(x, name);
}

// As ranks of --tp share the base: its rows are B's, its columns are A's. Of the other all ranks have all
static inline void adapter_split_(Tensor* row, const Tensor* t, const AdapterPlace* p, int is_B) {
    int sections[SECTIONS_MAX] = {0}, n = 0, begin = 0;
    if (t->split != (is_B ? SPLIT_ROWS : SPLIT_COLUMNS)) { return; }
    tensor_split(row, t->split, t->units);
    row->cuts_units = t->cuts_units;
    for (int k = 0; is_B && tensor_section(t, k) > 0; begin += tensor_section(t, k++)) {
        if (begin >= p->first && begin < p->first + p->n) { sections[n++] = tensor_section(t, k); }
    }
    if (n > 1) { tensor_sections(row, sections[0], sections[1], sections[2], sections[3]); }
}

// appends a row for the A's or the B's of the layers that `kinds` marks
static inline void adapter_add_row_(Adapters* x, const Tensor* base, const AdapterPlace* p, int is_B,
                                    const char* kinds) {
    const Tensor* t = &base[p->row];
    const char* name = adapter_row_name_(x, base, p, is_B ? "lora_B" : "lora_A");
    const int rows = is_B ? p->n : p->rank, columns = is_B ? p->rank : t->columns;
    const float bound = is_B ? 0.0f : 1.0f / sqrtf((float)t->columns);
    Tensor row = tensor(name, TENSOR_NO_FIELD, t->layers, rows, columns, is_B ? INIT_ZEROS : INIT_UNIFORM, bound, DECAY,
                        AS_IS);
    tensor_in_kinds(&row, kinds, "+");
    tensor_named_from(&row, t->named_from);
    adapter_split_(&row, t, p, is_B);
    if (t->experts > 0) { tensor_experts(&row, t->experts, !p->is_parameter ? APART : is_B ? WOVEN : STACKED); }
    x->table = (Tensor*)realloc_check(x->table, sizeof row * (size_t)(x->n_table + 1), "table of adapters");
    x->table[x->n_table++] = row;
}

static inline int adapter_is_alike_(const AdapterPlace* p, const AdapterPlace* q) {
    return p->row == q->row && p->part == q->part && p->is_parameter == q->is_parameter && p->rank == q->rank &&
           p->depth == q->depth;
}

// two rows of the table for places that differ in their layers alone
static inline void adapter_make_table_(Adapters* x, const Tensor* base) {
    for (int i = 0; i < x->n_places; i++) { x->places[i].a = x->places[i].b = -1; }
    for (int i = 0; i < x->n_places; i++) {
        AdapterPlace* p = &x->places[i];
        if (p->a >= 0) { continue; }
        const size_t n_layers = (size_t)base[p->row].layers;
        char* marks = (char*)memset(malloc_check(n_layers + 1, "layers of adapters"), '-', n_layers);
        marks[n_layers] = '\0';
        for (int k = i; k < x->n_places; k++) {
            AdapterPlace* q = &x->places[k];
            if (!adapter_is_alike_(p, q)) { continue; }
            marks[q->layer] = '+';
            q->a = x->n_table;
            q->b = x->n_table + 1;
        }
        const char* kinds = adapter_text_(x, marks);
        free(marks);
        for (int is_B = 0; is_B < 2; is_B++) { adapter_add_row_(x, base, p, is_B, kinds); }
    }
    tensors_layout(x->table, x->n_table);
}

// of all places but those of experts and of parameters
static inline void adapter_set_dropout(Adapters* x, float dropout) {
    x->settings.dropout = dropout;
    for (int i = 0; i < x->n_places; i++) {
        AdapterPlace* p = &x->places[i];
        p->dropout = p->is_parameter || x->table[p->a].experts > 0 ? 0.0f : dropout;
    }
}

// 0: none stands beside experts
static inline size_t adapters_widest_expert(const Adapters* x) {
    size_t most = 0;
    for (int i = 0; i < x->n_table; i++) {
        const size_t n = x->table[i].experts > 0 ? tensor_matrix_elements(&x->table[i]) : 0;
        most = n > most ? n : most;
    }
    return most;
}

// The rows of A's and B's into the front of a model's table, which has room for so many; returns how many they are.
// own: where the model has its adapters. x NULL: there are none
static inline int adapters_place(Adapters* own, Tensor* table, int room, const Adapters* x) {
    if (!x || x->n_table == 0) { return 0; }
    if (x->n_table > room) {
        adapter_fail_(&x->settings, "rank_pattern", "expected at most %d different pairs of a kind of linear layer and "
                      "a rank, found %d: layers of a kind that share a rank share a place", room / 2, x->n_table / 2);
    }
    *own = *x;
    memcpy(table, x->table, sizeof *table * (size_t)x->n_table);
    return x->n_table;
}

// all that follows from places and settings
static inline void adapter_finish_(Adapters* x, const Tensor* base) {
    for (int i = 0; i < x->n_places; i++) { adapter_set_place_(x, base, &x->places[i]); }
    adapter_make_table_(x, base);
    adapter_set_dropout(x, x->settings.dropout);
}

static inline void adapter_free(Adapters* x) {
    for (int i = 0; i < x->n_texts; i++) { free(x->texts[i]); }
    free(x->texts);
    free(x->places);
    free(x->table);
    adapter_settings_free(&x->settings);
    memset(x, 0, sizeof *x);
}

// ---- 5. A new adapter ----

// is this module, in a layer without experts, called as one of an expert's is? Or beside them, where PEFT minds
static inline int adapter_is_called_as_experts_(const Tensor* base, int n, const AdapterPlace* p) {
    char path[ADAPTER_NAME_BYTES], other[ADAPTER_NAME_BYTES];
    if (base[p->row].called_as_experts) { return 1; }
    const char* last = strrchr(adapter_path(path, base, p, 0), '.');
    for (int row = 0; row < n && last && !p->is_parameter; row++) {
        const Tensor modules = adapter_named_(&base[row], 0);
        if (modules.experts > 0 && tensor_has_layer(&base[row], p->layer)) { return 0; }  // a shared expert
        for (int part = 0; modules.name && modules.experts > 0 && part < tensor_names(&modules); part++) {
            const char* of_expert = strrchr(tensor_name_of(other, sizeof other, &modules, part), '.');
            if (of_expert && strcmp(of_expert, last) == 0) { return 1; }
        }
    }
    return 0;
}

// the first place beside a matrix in several blocks, which PEFT takes for a whole one, whose B A does not fit, or NULL
static inline const AdapterPlace* adapter_in_blocks(const Adapters* x, const Tensor* base) {
    for (int i = 0; i < x->n_places; i++) {
        if (base[x->places[i].row].blocks > 1) { return &x->places[i]; }
    }
    return NULL;
}

// context: the number of rows
static inline int adapter_wants_(const void* context, const AdapterSettings* s, const Tensor* base,
                                 const AdapterPlace* p) {
    const int n = *(const int*)context;
    if (!adapter_is_wanted_(s, base, p)) { return 0; }
    if (p->is_parameter || !adapter_is_all_linear(s)) { return 1; }
    return base[p->row].blocks <= 1 && !adapter_is_called_as_experts_(base, n, p);
}

// one line on stderr where an adapter has places that PEFT cannot load or run
static inline void adapter_warn_of_peft(const Adapters* x, const Tensor* base, int n) {
    const char* where = x->settings.where ? x->settings.where : "--lora-targets";
    const AdapterPlace* in_blocks = adapter_in_blocks(x, base);
    char path[ADAPTER_NAME_BYTES];
    for (int i = 0; i < x->n_places; i++) {
        if (!adapter_is_called_as_experts_(base, n, &x->places[i])) { continue; }
        warn_line("%s: %s and its like are called as experts' modules are: PEFT 0.21 cannot load their adapters", where,
                  adapter_path(path, base, &x->places[i], 0));
        return;
    }
    if (in_blocks) {
        warn_line("%s: %s and its like, in %d groups: PEFT 0.21 cannot run this adapter; --merge makes a model of it",
                  where, adapter_path(path, base, in_blocks, 0), base[in_blocks->row].blocks);
    }
}

typedef struct { char s[512]; } AdapterChoices;

// "q_proj, k_proj, ..., mlp.gate.weight": what may be asked for
static inline AdapterChoices adapter_choices_(const Tensor* base, int n, int of_parameters) {
    AdapterChoices out = {""};
    for (int i = 0; i < n; i++) {
        const char* name = of_parameters ? base[i].parameter : base[i].experts > 0 ? NULL : base[i].module;
        const Tensor named = adapter_named_(&base[i], of_parameters);
        for (int part = 0; name && part < tensor_names(&named); part++) {
            char path[ADAPTER_NAME_BYTES];
            tensor_name_of(path, sizeof path, &named, part);
            const char *under = named.prefix ? named.prefix : "", *last = strrchr(path, '.');
            const char* shown = of_parameters || !last ? path + strlen(under) : last + 1;
            const size_t used = strlen(out.s);
            if (used + strlen(shown) + 3 < sizeof out.s && !strstr(out.s, shown)) {
                snprintf(out.s + used, sizeof out.s - used, "%s%s", used > 0 ? ", " : "", shown);
            }
        }
    }
    return out;
}

// every item of a list is the end of a place's path
static inline void adapter_check_list_(const Adapters* x, const Tensor* base, int n, const char* key,
                                       const json_t* list) {
    const int of_parameters = strcmp(key, "target_parameters") == 0;
    const json_t* end;
    size_t i;
    json_array_foreach(list, i, end) {
        int n_found = 0;
        for (int k = 0; k < x->n_places; k++) {
            char path[ADAPTER_NAME_BYTES];
            adapter_path(path, base, &x->places[k], 0);
            n_found += x->places[k].is_parameter == of_parameters && adapter_is_end_(path, json_string_value(end));
        }
        if (n_found > 0) { continue; }
        const AdapterChoices choices = adapter_choices_(base, n, of_parameters);
        adapter_fail_(&x->settings, key, "expected ends of the names of this model's %s that may have adapters, %s, "
                      "found \"%s\"", of_parameters ? "parameters" : "linear layers", *choices.s ? choices.s : "none",
                      format_text(json_string_value(end)).s);
    }
}

// every expression of a pattern is that of a place
static inline void adapter_check_pattern_(const Adapters* x, const Tensor* base, const char* key,
                                          const json_t* pattern) {
    const char* expression;
    json_t* value;
    json_object_foreach((json_t*)pattern, expression, value) {
        json_t* one = json_pack("{s:O}", expression, value);
        int n_found = 0;
        for (int i = 0; i < x->n_places && n_found == 0; i++) {
            char path[ADAPTER_NAME_BYTES];
            adapter_path(path, base, &x->places[i], 0);
            n_found += adapter_by_pattern_(&x->settings, key, one, path, 0.0) > 0.0;
        }
        json_decref(one);
        if (n_found == 0) {
            adapter_fail_(&x->settings, key, "expected what the name of a layer with an adapter ends with, found "
                          "\"%s\"", format_text(expression).s);
        }
    }
}

// a rank above a matrix's own would only add what is there
static inline void adapter_check_rank_(const Adapters* x, const Tensor* base, const AdapterPlace* p) {
    const int most = p->n < base[p->row].columns ? p->n : base[p->row].columns;
    char path[ADAPTER_NAME_BYTES];
    if (p->rank <= most) { return; }
    adapter_fail_(&x->settings, p->rank == x->settings.rank ? "r" : "rank_pattern",
                  "expected at most %d for %s, which is %d x %d, found %d (a rank of its own: --lora-rank-pattern)",
                  most, adapter_path(path, base, p, 0), p->n, base[p->row].columns, p->rank);
}

// places and table of a new adapter for a model, of whose table the n rows are; takes the settings
static inline void adapter_choose(Adapters* x, const AdapterSettings* settings, const Tensor* base, int n) {
    memset(x, 0, sizeof *x);
    x->settings = *settings;
    adapter_collect_(x, base, n, adapter_wants_, &n);
    if (!json_is_string(settings->targets)) {
        adapter_check_list_(x, base, n, "target_modules", settings->targets);
    }
    adapter_check_list_(x, base, n, "target_parameters", settings->parameters);
    if (x->n_places == 0) {
        const char* wanted = json_is_string(settings->targets) ? json_string_value(settings->targets) : "an empty list";
        adapter_fail_(settings, "target_modules", "expected what this model's linear layers match, %s, found %s",
                      adapter_choices_(base, n, 0).s, format_text(wanted).s);
    }
    adapter_check_pattern_(x, base, "rank_pattern", settings->rank_pattern);
    adapter_check_pattern_(x, base, "alpha_pattern", settings->alpha_pattern);
    adapter_finish_(x, base);
    for (int i = 0; i < x->n_places; i++) { adapter_check_rank_(x, base, &x->places[i]); }
}

// ---- 6. W + s B A ----

// weight (n, C) += scale * B (n, r) A (r, C)
static inline void adapter_merge(float* weight, const float* A, const float* B, float scale, int n, int r, int C) {
    enum { BLOCK = 512 };
    #pragma omp parallel for schedule(static)
    for (int o = 0; o < n; o++) {
        for (int first = 0; first < C; first += BLOCK) {
            const int width = C - first < BLOCK ? C - first : BLOCK;
            float *w = weight + (size_t)o * C + first, sum[BLOCK] = {0.0f};
            for (int j = 0; j < r; j++) {
                const float b = B[(size_t)o * r + j], *a = A + (size_t)j * C + first;
                for (int i = 0; i < width; i++) { sum[i] = madd(b, a[i], sum[i]); }
            }
            for (int i = 0; i < width; i++) { w[i] = w[i] + scale * sum[i]; }
        }
    }
}

// the A or the B of a layer, of experts that of one, in an arena that begins with the adapter's rows
static inline const float* adapter_values(const Adapters* x, const float* arena, int row, int layer,
                                          int expert) {
    const Tensor* t = &x->table[row];
    const size_t element = (size_t)tensor_slice(t, layer) * tensor_slice_elements(t);
    return arena + t->offset + element + (size_t)expert * tensor_matrix_elements(t);
}

// rows low .. high - 1 of the matrix of slice k of a row, of which this place is some; 0: none
static inline int adapter_reach_(const AdapterPlace* p, const Tensor* t, int row, int k, int* low, int* high) {
    const int names = tensor_names(t), n_rows = t->rows / names, first = k % names * n_rows;
    *low = p->first > first ? p->first : first;
    *high = p->first + p->n < first + n_rows ? p->first + p->n : first + n_rows;
    return p->row == row && p->layer == tensor_slice_layer(t, k) && *low < *high;
}

// has slice k of this row of the base a place?
static inline int adapter_changes_slice(const Adapters* x, const Tensor* base, int row, int k) {
    int changes = 0, low, high;
    for (int i = 0; i < x->n_places && !changes; i++) {
        changes = adapter_reach_(&x->places[i], &base[row], row, k, &low, &high);
    }
    return changes;
}

// slice k of row `row` of the base, which is in `weight`, with what its adapters add to it
static inline void adapter_merge_slice(const Adapters* x, const float* arena, const Tensor* base, int row, int k,
                                       float* weight) {
    const Tensor* t = &base[row];
    const int names = tensor_names(t), layer = tensor_slice_layer(t, k);
    const int first = k % names * (t->rows / names), e = t->experts > 0 ? k / names % t->experts : 0;
    for (int i = 0; i < x->n_places; i++) {
        const AdapterPlace* p = &x->places[i];
        int low, high;
        if (!adapter_reach_(p, t, row, k, &low, &high)) { continue; }
        const float* A = adapter_values(x, arena, p->a, layer, e);
        const float* B = adapter_values(x, arena, p->b, layer, e) + (size_t)(low - p->first) * p->rank;
        adapter_merge(weight + (size_t)(low - first) * t->columns, A, B, p->scale, high - low, p->rank, t->columns);
    }
}
#endif  // LLMC_ADAPTERS_H
