/*
PEFT's files of an adapter, in a folder:
    adapter_config.json        rank, alpha, targets (adapters.h)
    adapter_model.safetensors  A and B of each place, F32, F16 or BF16
    README.md                  the card of an adapter that we wrote
    adapter_open   settings, places and table of a folder's adapter, and its file: tensors_load takes the values of it
    adapter_save   the same three; adapter_config_json: the first of them
Where a file has adapters its keys say, and of two parameters of a module, where only one has, target_parameters. Every
A and B of a place must be there, in the shape that config and base ask for; a tensor that belongs to no place is
refused, for without it this would be another model. target_modules, layers_to_transform and what else is in the config
and changes nothing here goes along into the config that is written; but where PEFT would find layers that take no
adapter here (tensor_closed) by its target_modules, an expression without them takes their place.
What PEFT 0.21 does otherwise: of older files, with matrices for each expert, it doubles the rank of gate and up, and so
with rslora it scales them by sqrt 2 more.
Errors: fail_input names folder or file, key or tensor, what was expected and what was found; fail_run when writing
        fails.
Source: huggingface/peft 0.21, utils/save_and_load.py, tuners/lora/layer.py (ParamWrapper)
*/
#ifndef LLMC_ADAPTER_FILES_H
#define LLMC_ADAPTER_FILES_H
#include "../files/tensorfile.h"  // SafeSet, tensors_save, tensor_disk_shape
#include "adapters.h"             // Adapters, AdapterPlace

#define ADAPTER_CONFIG HF_ADAPTER_CONFIG
#define ADAPTER_WEIGHTS HF_ADAPTER_WEIGHTS

// ---- reading ----

typedef struct {
    SafeSet* set;
    const Tensor* base;
    int n;
} AdapterFile;

// has the file the A of this path?
static inline int adapter_file_has_(const AdapterFile* f, const char* path) {
    char name[2 * ADAPTER_NAME_BYTES];
    snprintf(name, sizeof name, ADAPTER_PREFIX "%s.lora_A.weight", path);
    return safeset_find(f->set, name) != NULL;
}

// how many adapters a file has around the module of this parameter
static inline int adapter_file_depth_(const AdapterFile* f, const char* parameter) {
    char path[ADAPTER_NAME_BYTES];
    int depth = 0;
    snprintf(path, sizeof path, "%.*s", adapter_module_length_(parameter), parameter);
    while (adapter_file_has_(f, path) && strlen(path) + 12 < sizeof path) {
        strcat(path, ".base_layer");
        depth++;
    }
    return depth;
}

// a parameter has one if all of its module have, or if it is the one that is named
static inline int adapter_file_has_parameter_(const AdapterFile* f, const AdapterSettings* s, const AdapterPlace* p) {
    char path[ADAPTER_NAME_BYTES], other_path[ADAPTER_NAME_BYTES];
    const Tensor* t = &f->base[p->row];
    const int depth = adapter_file_depth_(f, adapter_path(path, f->base, p, 0));
    int n = 0, n_named = 0;
    for (int row = 0; row < f->n; row++) {
        AdapterPlace other = *p;
        other.row = row;
        if (!f->base[row].parameter || !tensor_has_layer(&f->base[row], p->layer)) { continue; }
        if (!adapter_same_module_(&f->base[row], t)) { continue; }
        n++;
        n_named += adapter_is_in_list_(s->parameters, adapter_path(other_path, f->base, &other, 0));
    }
    if (depth == 0 || depth == n) { return depth > 0; }
    if (n_named != depth) {
        adapter_fail_(s, "target_parameters", "expected which %d of the %d parameters of %.*s have adapters in the "
                      "file, found %d of them", depth, n, adapter_module_length_(path), path, n_named);
    }
    return adapter_is_in_list_(s->parameters, path);
}

static inline int adapter_has_file_(const void* context, const AdapterSettings* s, const Tensor* base,
                                    const AdapterPlace* p) {
    const AdapterFile* f = (const AdapterFile*)context;
    const int E = base[p->row].experts > 0 ? base[p->row].experts : 1;
    char path[ADAPTER_NAME_BYTES];
    if (p->is_parameter) { return adapter_file_has_parameter_(f, s, p); }
    for (int e = 0; e < E; e++) {
        if (adapter_file_has_(f, adapter_path(path, base, p, e))) { return 1; }
    }
    return 0;
}

// slice k of a row is in the file, and has its shape
static inline void adapter_check_tensor_(SafeSet* set, const Tensor* t, int k) {
    char name[NAME_BYTES];
    int64_t shape[SAFETENSORS_MAX_DIMS];
    const int n_dims = tensor_disk_shape(t, shape), rank = ends_with(t->name, "lora_A.weight") ? t->rows : t->columns;
    const SafeTensor* found = safeset_find(set, tensor_slice_name(name, sizeof name, t, k));
    if (!found) {
        fail_input("%s: tensor \"%s\" is missing: the rest of this adapter is there", set->path, name);
    }
    if (found->n_dims == n_dims && memcmp(found->shape, shape, sizeof shape[0] * (size_t)n_dims) == 0) { return; }
    fail_input("%s: tensor \"%s\": expected %s, as " ADAPTER_CONFIG " says rank %d, found %s: another base model, or "
               "another config", set->path, name, shape_text_(shape, n_dims).s, rank,
               shape_text_(found->shape, found->n_dims).s);
}

// is that a tensor of one of the layers that take no adapter?
static inline int adapter_is_closed_(const char* name, const Tensor* base, int n) {
    for (int row = 0; row < n; row++) {
        for (int layer = 0; layer < base[row].layers && base[row].closed; layer++) {
            char path[ADAPTER_NAME_BYTES], begin[2 * ADAPTER_NAME_BYTES];
            if (!tensor_has_layer(&base[row], layer)) { continue; }
            snprintf(begin, sizeof begin, ADAPTER_PREFIX "%s.lora_", adapter_closed_path(path, &base[row], layer));
            if (strncmp(name, begin, strlen(begin)) == 0) { return 1; }
        }
    }
    return 0;
}

// do these names, a list of ends or an expression, find what takes no adapter, in any layer that has it?
static inline int adapter_finds_closed_(const AdapterSettings* s, const json_t* names, const Tensor* row) {
    for (int layer = 0; layer < row->layers && row->closed; layer++) {
        char path[ADAPTER_NAME_BYTES];
        if (!tensor_has_layer(row, layer)) { continue; }
        adapter_closed_path(path, row, layer);
        if (json_is_array(names) ? adapter_is_in_list_(names, path)
                                 : adapter_full_match_(s, "target_modules", json_string_value(names), path)) {
            return 1;
        }
    }
    return 0;
}

static inline void adapter_print_escaped_(FILE* out, const char* text) {
    for (; *text; text++) { fprintf(out, strchr(".\\*+?^$()[]{}|", *text) ? "\\%c" : "%c", *text); }
}

// These names as an expression without what takes no adapter, on the heap, such as
//     (?!.*\.compressor\.indexer\.kv_proj$)(.*\.)?(kv_proj)
// NULL: they find nothing of it; or layers_to_transform stands beside them, which PEFT has for a list alone
static inline char* adapter_open_targets_(const AdapterSettings* s, const json_t* names, const Tensor* base, int n) {
    const json_t *layers = json_object_get(s->json, "layers_to_transform"), *name;
    const int is_list = json_is_array(names);
    char* text = NULL;
    size_t n_bytes, i;
    int n_left_out = 0;
    if (json_is_integer(layers) || json_array_size(layers) > 0) { return NULL; }
    FILE* out = open_memstream(&text, &n_bytes);
    if (!out) { fail_run("target_modules: no memory"); }
    for (int row = 0; row < n; row++) {
        if (!adapter_finds_closed_(s, names, &base[row])) { continue; }
        fputs("(?!.*\\.", out);
        adapter_print_escaped_(out, base[row].closed);
        fputs("$)", out);
        n_left_out++;
    }
    fputs(is_list ? "(.*\\.)?(" : "(", out);
    json_array_foreach(names, i, name) {
        fputs(i > 0 ? "|" : "", out);
        adapter_print_escaped_(out, json_string_value(name));
    }
    fprintf(out, "%s)", is_list ? "" : json_string_value(names));
    fclose(out);
    if (n_left_out > 0) { return text; }
    free(text);
    return NULL;
}

// tensors of other methods, of layers that take no adapter, of another model
static inline void adapter_refuse_tensors_(const SafeSet* set, const AdapterSettings* s, const Tensor* base, int n) {
    for (int i = 0; i < set->n_tensors; i++) {
        const char* name = set->by_name[i]->name;
        const char* why = "this model has no such layer, or it takes no adapter (embeddings and the head take none)";
        if (set->used[i]) { continue; }
        if (adapter_is_closed_(name, base, n)) {
            char* open = s->targets ? adapter_open_targets_(s, s->targets, base, n) : NULL;
            fail_input("%s: tensor \"%.160s\": this layer takes no adapter here: train one without it%s%s", set->path,
                       name, open ? ", by target_modules=" : "", open ? open : "");
        }
        if (strncmp(name, ADAPTER_PREFIX, strlen(ADAPTER_PREFIX)) != 0) {
            why = "expected names that begin with " ADAPTER_PREFIX;
        } else if (!ends_with(name, ".lora_A.weight") && !ends_with(name, ".lora_B.weight")) {
            why = "expected lora_A and lora_B of linear layers alone";
        }
        fail_input("%s: tensor \"%.160s\": %s", set->path, name, why);
    }
}

// adapters of an expert's matrices beside one of all experts would be added to it: no file of PEFT's has that
static inline void adapter_refuse_both_(const Adapters* x, const Tensor* base) {
    for (int i = 1; i < x->n_places; i++) {
        const AdapterPlace *p = &x->places[i], *q = adapter_find(x, p->row, p->layer, 0);
        char path[ADAPTER_NAME_BYTES], other[ADAPTER_NAME_BYTES];
        if (!q || q == p || p->is_parameter == q->is_parameter) { continue; }
        fail_input("%s: expected one adapter of a weight, found those of %s and of %s", x->settings.where,
                   adapter_path(path, base, q, 0), adapter_path(other, base, p, 0));
    }
}

// "layers_to_transform": a number or a list of them; null: all layers
static inline int adapter_names_layer_(const AdapterSettings* s, int layer) {
    const json_t *layers = json_object_get(s->json, "layers_to_transform"), *item;
    size_t i;
    json_array_foreach(layers, i, item) {
        if (json_integer_value(item) == layer) { return 1; }
    }
    return json_is_integer(layers) ? json_integer_value(layers) == layer : json_array_size(layers) == 0;
}

// PEFT leaves out what the config does not name. Of experts, and where it names nothing, the file decides
static inline void adapter_check_targets_(const Adapters* x, const Tensor* base, const char* weights) {
    const AdapterSettings* s = &x->settings;
    for (int i = 0; i < x->n_places && s->targets && !adapter_is_empty_(s->targets); i++) {
        const AdapterPlace* p = &x->places[i];
        char path[ADAPTER_NAME_BYTES];
        if (p->is_parameter || base[p->row].experts > 0) { continue; }
        const int is_named = adapter_is_wanted_(s, base, p);
        if (is_named && adapter_names_layer_(s, p->layer)) { continue; }
        fail_input("%s: expected what " ADAPTER_CONFIG " names, found an adapter of %s, which its \"%s\" leaves out",
                   weights, adapter_path(path, base, p, 0), is_named ? "layers_to_transform" : "target_modules");
    }
}

// what a folder without a config is
__attribute__((noreturn))
static inline void adapter_fail_folder_(const char* folder) {
    char path[PATH_BYTES];
    struct stat status;
    if (stat(folder, &status) != 0) { fail_input("--lora: %s: %s", folder, strerror(errno)); }
    if (!S_ISDIR(status.st_mode)) { fail_input("--lora: %s: expected a folder, found a file", folder); }
    fail_input("--lora: %s: expected an adapter, " ADAPTER_CONFIG " and " ADAPTER_WEIGHTS ", found neither%s", folder,
               path_exists(path_join(path, folder, "config.json")) ? " but a model: --from takes it" : "");
}

// are there adapters of each expert's gate and up, and rslora?
static inline int adapter_is_old_rslora_(const Adapters* x, const Tensor* base) {
    int found = 0;
    for (int i = 0; i < x->n_places; i++) {
        const AdapterPlace* p = &x->places[i];
        found |= !p->is_parameter && base[p->row].experts > 0 && p->n < base[p->row].rows;
    }
    return found && x->settings.rslora;
}

// The adapter in a folder, or in a run's newest checkpoint, for a model whose table has these n rows. Its values come
// out of `set`: tensors_load(set, x->table, x->n_table, "", arena)
static inline void adapter_open(Adapters* x, SafeSet* set, const char* path, const Tensor* base, int n) {
    char folder[PATH_BYTES], config[PATH_BYTES], weights[PATH_BYTES];
    memset(x, 0, sizeof *x);
    checkpoint_find(folder, path);
    if (!path_exists(path_join(config, folder, ADAPTER_CONFIG))) { adapter_fail_folder_(folder); }
    if (!path_exists(path_join(weights, folder, ADAPTER_WEIGHTS))) {
        fail_input("--lora: %s: expected " ADAPTER_WEIGHTS " beside " ADAPTER_CONFIG ", found none", folder);
    }
    x->settings = adapter_settings(json_read(config), config);
    safeset_open(set, weights);
    const AdapterFile file = {set, base, n};
    adapter_collect_(x, base, n, adapter_has_file_, &file);
    adapter_refuse_both_(x, base);
    adapter_finish_(x, base);
    for (int i = 0; i < x->n_table; i++) {
        for (int k = 0, n_slices = tensor_slices(&x->table[i]); k < n_slices; k++) {
            adapter_check_tensor_(set, &x->table[i], k);
        }
    }
    adapter_refuse_tensors_(set, &x->settings, base, n);
    if (x->n_places == 0) { fail_input("%s: expected an adapter, found no tensor", weights); }
    adapter_check_targets_(x, base, weights);
    if (adapter_is_old_rslora_(x, base)) {
        warn_alike("%s: adapters of each expert, with rslora: PEFT 0.21 scales gate's and up's by sqrt 2 more",
                   weights);
    }
}

// ---- writing ----

// the last names of all modules that have an adapter: what PEFT makes of all-linear
static inline json_t* adapter_module_names_(const Adapters* x, const Tensor* base) {
    json_t *names = json_array(), *name;
    for (int i = 0; i < x->n_places; i++) {
        char path[ADAPTER_NAME_BYTES];
        size_t k;
        int is_there = x->places[i].is_parameter;
        const char* last = strrchr(adapter_path(path, base, &x->places[i], 0), '.');
        last = last ? last + 1 : path;
        json_array_foreach(names, k, name) { is_there |= strcmp(json_string_value(name), last) == 0; }
        if (!is_there) { json_array_append_new(names, json_string(last)); }
    }
    return names;
}

// adapter_config.json for an adapter of the model `from`, as --from names it, whose table has n rows. A new reference
static inline json_t* adapter_config_json(const Adapters* x, const Tensor* base, int n, const char* from) {
    const AdapterSettings* s = &x->settings;
    json_t* json = json_deep_copy(s->json);
    json_object_set_new(json, "base_model_name_or_path", *from ? json_string(from) : json_null());
    json_object_set_new(json, "lora_dropout", json_real(shortest_double(s->dropout)));
    json_object_set_new(json, "inference_mode", json_true());
    json_t* last_names = adapter_is_all_linear(s) ? adapter_module_names_(x, base) : NULL;
    const json_t* targets = last_names ? last_names : s->targets;
    char* open = targets ? adapter_open_targets_(s, targets, base, n) : NULL;
    if (last_names) { json_object_set_new(json, "target_modules", last_names); }
    if (open) { json_object_set_new(json, "target_modules", json_string(open)); }
    free(open);
    return json;
}

// what Hugging Face's readers show of an adapter; it also says who wrote the folder (hf_folder.h)
static inline FileSum adapter_write_card_(const char* path, const Adapters* x, const Tensor* base, const char* from) {
    const AdapterPlace* in_blocks = adapter_in_blocks(x, base);
    json_t* model = json_string(from);
    char* quoted = model ? json_dumps(model, JSON_ENCODE_ANY) : NULL;
    char* text = NULL;
    size_t n_bytes;
    OutFile out;
    FILE* memory = open_memstream(&text, &n_bytes);
    if (!memory) { fail_run("%s: no memory", path); }
    fprintf(memory, "---\nlibrary_name: peft\nbase_model: %s" HF_CARD_WRITTEN_BY "tags:\n- lora\n---\n\n"
            "An adapter (LoRA) of rank %d beside %d matrices of its base model. ", quoted ? quoted : "\"\"",
            x->settings.rank, x->n_places);
    if (in_blocks) {
        char name[ADAPTER_NAME_BYTES];
        fprintf(memory, "PEFT 0.21 loads it and cannot run it, for\n%s and its like are in %d groups. The trainer that "
                "wrote it can, and makes a model of both:\n\n"
                "    --from BASE_MODEL --lora THIS_FOLDER --merge 1 --export-hf NEW_FOLDER\n",
                adapter_path(name, base, in_blocks, 0), base[in_blocks->row].blocks);
    } else {
        fprintf(memory, "With PEFT:\n\n    model = PeftModel.from_pretrained(base_model, \"THIS_FOLDER\")\n");
    }
    fclose(memory);
    outfile_open(&out, path);
    outfile_write(&out, text, n_bytes);
    free(text);
    free(quoted);
    json_decref(model);
    return outfile_close(&out);
}

// the files, into a folder that is there; n: rows of the base; arena begins with the adapter's
static inline void adapter_save(const char* folder, const Adapters* x, const Tensor* base, int n, const char* from,
                                const float* arena, SavedFiles* files) {
    char path[PATH_BYTES];
    // first: by it the next export knows what one has left that was killed
    saved_files_add(files, adapter_write_card_(path_join(path, folder, HF_ADAPTER_CARD), x, base, from));
    path_join(path, folder, ADAPTER_WEIGHTS);
    saved_files_add(files, tensors_save(path, x->table, x->n_table, arena));
    json_t* config = adapter_config_json(x, base, n, from);
    saved_files_add(files, json_write_doubles(path_join(path, folder, ADAPTER_CONFIG), config));
}
#endif  // LLMC_ADAPTER_FILES_H
