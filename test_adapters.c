/*
Promises of llmc/models/adapters.h, adapter_files.h and adapter_options.h: an adapter goes where PEFT would put it and is found
there again, its tensors have PEFT's names and the order of dev/ref/lora.py, W + s B A has its bits, and what would mean
another model is refused. Files that PEFT itself has made are read if dev/ref/peft_adapters.py was run.
*/
#include "llmc/models/adapter_files.h"
#include "llmc/models/adapter_options.h"
#include "llmc/ops/global_norm.h"
#include "llmc/test/golden.h"
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"

// ---- models: Qwen's names, sizes out of a config.json ----

enum { MOST_ROWS = 20, MOST_LAYERS = 8, EXPERT_GATE_UP = 11, EXPERT_DOWN = 12 };  // rows of `small`

typedef struct {
    Tensor rows[MOST_ROWS];
    int n;
    char kinds[MOST_LAYERS + 1];  // of layers: D without experts, E with
} Base;

static int size_of(const json_t* config, const char* key) {
    return (int)json_integer_value(json_object_get(config, key));
}

// E of a layer; fused: the base's file has all experts in one tensor
static void base_add(Base* b, const char* name, const char* of_kinds, int rows, int columns, const char* module,
                     const char* parameter) {
    const int L = (int)strlen(b->kinds);
    Tensor* t = &b->rows[b->n++];
    *t = tensor(name, 0, L, rows, columns, INIT_NORMAL, 0.02f, DECAY, columns > 1 ? AS_IS : VECTOR);
    if (columns == 1) { *t = tensor(name, 0, L, 1, rows, INIT_ONES, 0.0f, NO_DECAY, VECTOR); }
    tensor_under(t, "model.layers.%d.");
    tensor_in_kinds(t, b->kinds, of_kinds);
    if (module || parameter) { tensor_adaptable(t, module, parameter); }
}

static void base_add_experts(Base* b, const json_t* config, int is_fused) {
    const int D = size_of(config, "hidden_size"), F = size_of(config, "moe_intermediate_size");
    const int E = size_of(config, "num_experts");
    base_add(b, "mlp.gate.weight", "E", E, D, NULL, "mlp.gate.weight");
    base_add(b, is_fused ? "mlp.experts.gate_up_proj" : "mlp.experts.%d.{gate,up}_proj.weight", "E", 2 * F, D,
             "mlp.experts.%d.{gate,up}_proj", "mlp.experts.gate_up_proj");
    tensor_experts(&b->rows[b->n - 1], E, is_fused ? FUSED : APART);
    base_add(b, is_fused ? "mlp.experts.down_proj" : "mlp.experts.%d.down_proj.weight", "E", D, F,
             "mlp.experts.%d.down_proj", "mlp.experts.down_proj");
    tensor_experts(&b->rows[b->n - 1], E, is_fused ? FUSED : APART);
}

static void base_make(Base* b, const json_t* config, int is_fused) {
    const int L = size_of(config, "num_hidden_layers"), D = size_of(config, "hidden_size");
    const int HS = size_of(config, "head_dim"), F = size_of(config, "intermediate_size");
    const int H = size_of(config, "num_attention_heads") * HS, KV = size_of(config, "num_key_value_heads") * HS;
    const json_t *dense = json_object_get(config, "mlp_only_layers"), *layer;
    const int E = size_of(config, "num_experts");
    size_t i;
    memset(b, 0, sizeof *b);
    memset(b->kinds, E > 0 ? 'E' : 'D', (size_t)L);
    json_array_foreach(dense, i, layer) { b->kinds[json_integer_value(layer)] = 'D'; }
    b->rows[b->n++] = tensor("model.embed_tokens.weight", 0, 0, 8, D, INIT_NORMAL, 0.02f, DECAY, AS_IS);
    base_add(b, "input_layernorm.weight", "DE", D, 1, NULL, NULL);
    base_add(b, "self_attn.q_proj.weight", "DE", H, D, "self_attn.q_proj", NULL);
    base_add(b, "self_attn.q_proj.bias", "DE", H, 1, NULL, NULL);
    base_add(b, "self_attn.k_proj.weight", "DE", KV, D, "self_attn.k_proj", NULL);
    base_add(b, "self_attn.v_proj.weight", "DE", KV, D, "self_attn.v_proj", NULL);
    base_add(b, "self_attn.o_proj.weight", "DE", D, H, "self_attn.o_proj", NULL);
    base_add(b, "post_attention_layernorm.weight", "DE", D, 1, NULL, NULL);
    base_add(b, "mlp.{gate,up}_proj.weight", "D", 2 * F, D, "mlp.{gate,up}_proj", NULL);
    base_add(b, "mlp.down_proj.weight", "D", D, F, "mlp.down_proj", NULL);
    if (E > 0) { base_add_experts(b, config, is_fused); }
    b->rows[b->n++] = tensor("lm_head.weight", 0, 0, 8, D, INIT_NORMAL, 0.02f, DECAY, AS_IS);
}

static json_t* json_of(const char* text) {
    json_error_t error;
    json_t* json = json_loads(text, 0, &error);
    if (!json) { fail_run("%s: %s", text, error.text); }
    return json;
}

// three layers, of which the first has no experts
static void base_small(Base* b) {
    json_t* config = json_of("{\"num_hidden_layers\": 3, \"hidden_size\": 6, \"head_dim\": 2, "
                             "\"intermediate_size\": 5, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
                             "\"num_experts\": 3, \"moe_intermediate_size\": 4, \"mlp_only_layers\": [0]}");
    base_make(b, config, 0);
    json_decref(config);
}

// members of an adapter_config.json beside those that all need
static json_t* settings_json(const char* members) {
    json_t *json = json_of("{\"peft_type\": \"LORA\", \"task_type\": \"CAUSAL_LM\", \"r\": 2, \"lora_alpha\": 3}");
    json_t* more = json_of(members);
    json_object_update(json, more);
    json_decref(more);
    return json;
}

static Adapters chosen(const Base* b, const char* members) {
    Adapters adapters;
    const AdapterSettings settings = adapter_settings(settings_json(members), "config");
    adapter_choose(&adapters, &settings, b->rows, b->n);
    return adapters;
}

// ---- against dev/ref/lora.py ----

typedef struct {
    Golden g;
    Base base;
    Adapters adapters;
    size_t n;
    float* values;
} GoldenLora;

static const char* const golden_names[] = {"dev/golden/qwen_lora.safetensors", "dev/golden/qwen_lora_moe.safetensors"};

static void golden_lora_open(GoldenLora* x, const char* name) {
    golden_open(&x->g, name);
    base_make(&x->base, x->g.config, 0);
    const json_t* settings_of = json_object_get(x->g.config, "lora");
    const AdapterSettings settings = adapter_settings(json_deep_copy(settings_of), NULL);
    adapter_choose(&x->adapters, &settings, x->base.rows, x->base.n);
    const Tensor* last = &x->adapters.table[x->adapters.n_table - 1];
    x->n = last->offset + (tensor_elements(last) + 15) / 16 * 16;
    x->values = filled_array(x->n, 0.0f);
    tensors_load(&x->g.set, x->adapters.table, x->adapters.n_table, "param.", x->values);
}

static void golden_lora_close(GoldenLora* x) {
    free(x->values);
    adapter_free(&x->adapters);
    golden_close(&x->g);
}

// param.* are the tensors of the table, no more and no fewer, in its order; the norm of grad.* is the file's
static void check_golden_table(Test* t, const char* name) {
    GoldenLora x;
    NormSum sum = norm_sum_init();
    int n_params = 0;
    golden_lora_open(&x, name);
    for (int i = 0; i < x.g.set.n_tensors; i++) {
        n_params += strncmp(x.g.set.by_name[i]->name, "param.", 6) == 0;
    }
    check(t, tensors_slices(x.adapters.table, x.adapters.n_table) == n_params, "%s: %d tensors, expected %d", name,
          tensors_slices(x.adapters.table, x.adapters.n_table), n_params);
    const void* before = NULL;
    for (int i = 0; i < x.adapters.n_table; i++) {
        for (int k = 0; k < tensor_slices(&x.adapters.table[i]); k++) {
            char slice[NAME_BYTES], param[NAME_BYTES + 8];
            snprintf(param, sizeof param, "param.%s", tensor_slice_name(slice, sizeof slice, &x.adapters.table[i], k));
            const float* here = golden_floats(&x.g, param);
            check(t, (const void*)here > before, "%s stands earlier in the file than what is before it", param);
            before = here;
        }
    }
    tensors_load(&x.g.set, x.adapters.table, x.adapters.n_table, "grad.", x.values);
    for (int i = 0; i < x.adapters.n_table; i++) {
        const Tensor* row = &x.adapters.table[i];
        norm_see_ref(&sum, x.values + row->offset, tensor_elements(row));
    }
    for (int i = 0; i < x.adapters.n_table; i++) {
        const Tensor* row = &x.adapters.table[i];
        norm_add_ref(&sum, x.values + row->offset, tensor_elements(row));
    }
    const float norm = (float)sqrt(norm_value(&sum));
    check_bits(t, "norm", &norm, golden_floats(&x.g, "norm"), 1);
    golden_lora_close(&x);
}

static void test_golden_table(Test* t) {
    for (int i = 0; i < 2; i++) { check_golden_table(t, golden_names[i]); }
}

// every slice of the base, merged, is merged.<name>, or base.<name> where it has no adapter
static void check_golden_merge(Test* t, const char* name, int is_fused) {
    GoldenLora x;
    Base in_memory;
    int n_merged = 0, n_expected = 0;
    golden_lora_open(&x, name);
    base_make(&in_memory, x.g.config, is_fused);
    for (int i = 0; i < x.g.set.n_tensors; i++) {
        n_expected += strncmp(x.g.set.by_name[i]->name, "merged.", 7) == 0;
    }
    for (int row = 0; row < x.base.n; row++) {
        const Tensor *disk = &x.base.rows[row], *own = &in_memory.rows[row];
        if (disk->layers == 0) { continue; }
        const size_t n = tensor_elements(disk), n_slice = tensor_slice_elements(disk);
        float *w = filled_array(n, 0.0f), *room = filled_array(n_slice, 0.0f), *want = filled_array(n_slice, 0.0f);
        for (int k = 0; k < tensor_slices(disk); k++) {
            if (tensor_is_in(&x.g.set, disk, "base.")) {
                tensor_load_slice(&x.g.set, disk, k, "base.", w + (size_t)k * n_slice, room);
            }
        }
        for (int k = 0; k < tensor_slices(own); k++) {
            adapter_merge_slice(&x.adapters, x.values, in_memory.rows, row, k, w + (size_t)k * tensor_slice_elements(own));
        }
        for (int k = 0; k < tensor_slices(disk) && tensor_is_in(&x.g.set, disk, "base."); k++) {
            char slice[NAME_BYTES], merged[NAME_BYTES + 8];
            snprintf(merged, sizeof merged, "merged.%s", tensor_slice_name(slice, sizeof slice, disk, k));
            const int is_merged = safeset_find(&x.g.set, merged) != NULL;
            tensor_load_slice(&x.g.set, disk, k, is_merged ? "merged." : "base.", want, room);
            check_bits(t, slice, w + (size_t)k * n_slice, want, n_slice);
            n_merged += is_merged;
        }
        free(w), free(room), free(want);
    }
    check(t, n_merged == n_expected && n_merged > 10, "%s: %d merged, expected %d", name, n_merged, n_expected);
    golden_lora_close(&x);
}

static void test_golden_merge(Test* t) {
#ifdef SYSTEM_LIBM
    skip(t, "this build does not fuse multiply and add");
    return;
#endif
    check_golden_merge(t, golden_names[0], 0);
    check_golden_merge(t, golden_names[1], 0);
    check_golden_merge(t, golden_names[1], 1);
}

static void check_same_places(Test* t, const Adapters* a, const Adapters* b) {
    if (!check(t, a->n_places == b->n_places, "%d places, expected %d", a->n_places, b->n_places)) { return; }
    for (int i = 0; i < a->n_places; i++) {
        check(t, memcmp(&a->places[i], &b->places[i], sizeof a->places[i]) == 0, "place %d", i);
    }
    check(t, a->n_table == b->n_table, "%d rows, expected %d", a->n_table, b->n_table);
    for (int i = 0; i < a->n_table && i < b->n_table; i++) {
        check(t, strcmp(a->table[i].name, b->table[i].name) == 0, "row %s, expected %s", a->table[i].name,
              b->table[i].name);
    }
}

// saved and found again: places, values; the names and shapes of what is in the golden file
static void check_golden_files(Test* t, const char* name) {
    GoldenLora x;
    SavedFiles files;
    TempPath folder = temp_folder(), weights = temp_path(&folder, ADAPTER_WEIGHTS);
    Adapters again;
    SafeSet set;
    golden_lora_open(&x, name);
    files.n = 0;
    adapter_save(folder.s, &x.adapters, x.base.rows, x.base.n, "base/", x.values, &files);
    check(t, files.n == 3, "%d files", files.n);
    adapter_open(&again, &set, folder.s, x.base.rows, x.base.n);
    check_same_places(t, &again, &x.adapters);
    float* back = filled_array(x.n, 0.0f);
    tensors_load(&set, again.table, again.n_table, "", back);
    check_bits(t, "values", back, x.values, x.n);
    for (int i = 0; i < set.n_tensors; i++) {
        char param[NAME_BYTES];
        snprintf(param, sizeof param, "param.%s", set.by_name[i]->name);
        const SafeTensor* want = safeset_find(&x.g.set, param);
        const int same = want && want->n_bytes == set.by_name[i]->n_bytes &&
                         memcmp(want->shape, set.by_name[i]->shape, sizeof want->shape) == 0 &&
                         memcmp(want->data, set.by_name[i]->data, want->n_bytes) == 0;
        check(t, same, "%s differs from the golden file's", param);
    }
    const json_t* base_name = json_object_get(again.settings.json, "base_model_name_or_path");
    check(t, strcmp(json_string_value(base_name), "base/") == 0, "base_model_name_or_path");
    free(back);
    safeset_close(&set);
    adapter_free(&again);
    golden_lora_close(&x);
    (void)weights;
    temp_remove(&folder);
}

static void test_golden_files(Test* t) {
    for (int i = 0; i < 2; i++) { check_golden_files(t, golden_names[i]); }
}

// ---- targets ----

// the places as "0.self_attn.q_proj 1.mlp.gate.weight"
static void places_text(char* text, size_t n_bytes, const Adapters* adapters, const Base* b) {
    *text = '\0';
    for (int i = 0; i < adapters->n_places; i++) {
        char path[ADAPTER_NAME_BYTES];
        const size_t used = strlen(text);
        snprintf(text + used, n_bytes - used, "%s%s", i > 0 ? " " : "",
                 adapter_path(path, b->rows, &adapters->places[i], 0) + strlen("model.layers."));
    }
}

static void test_targets(Test* t) {
    const struct { const char *members, *places; } cases[] = {
        {"{\"target_modules\": [\"v_proj\", \"self_attn.k_proj\"]}",
         "0.self_attn.k_proj 1.self_attn.k_proj 2.self_attn.k_proj "
         "0.self_attn.v_proj 1.self_attn.v_proj 2.self_attn.v_proj"},
        {"{\"target_modules\": [\"layers.1.self_attn.o_proj\", \"gate_proj\"]}", "1.self_attn.o_proj 0.mlp.gate_proj"},
        {"{\"target_modules\": [\"model.layers.0.mlp.up_proj\"]}", "0.mlp.up_proj"},
        {"{\"target_modules\": \".*\\\\.[02]\\\\.self_attn\\\\.(q|v)_proj\"}",
         "0.self_attn.q_proj 2.self_attn.q_proj 0.self_attn.v_proj 2.self_attn.v_proj"},
        {"{\"target_modules\": \"^model\\\\.layers\\\\.\\\\d+\\\\.mlp\\\\.(gate|up)_proj$\"}",
         "0.mlp.gate_proj 0.mlp.up_proj"},
        {"{\"target_modules\": \"model.layers.0.self_attn.q|.*2.self_attn.q_proj\"}", "2.self_attn.q_proj"},
        {"{\"target_modules\": \"All-Linear\"}",
         "0.self_attn.q_proj 1.self_attn.q_proj 2.self_attn.q_proj 0.self_attn.k_proj 1.self_attn.k_proj "
         "2.self_attn.k_proj 0.self_attn.v_proj 1.self_attn.v_proj 2.self_attn.v_proj 0.self_attn.o_proj "
         "1.self_attn.o_proj 2.self_attn.o_proj"},  // not 0.mlp.gate_proj, which PEFT would take for an expert's
        {"{\"target_modules\": [], \"target_parameters\": [\"mlp.gate.weight\", \"experts.down_proj\"]}",
         "1.mlp.gate.weight 2.mlp.gate.weight 1.mlp.experts.down_proj 2.mlp.experts.down_proj"},
        {"{\"target_modules\": [\"mlp.down_proj\"], \"target_parameters\": [\"layers.2.mlp.experts.gate_up_proj\"]}",
         "0.mlp.down_proj 2.mlp.experts.gate_up_proj"},
    };
    Base b;
    base_small(&b);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[2048];
        Adapters adapters = chosen(&b, cases[i].members);
        places_text(text, sizeof text, &adapters, &b);
        check(t, strcmp(text, cases[i].places) == 0, "%s: found %s", cases[i].members, text);
        adapter_free(&adapters);
    }
}

typedef struct {
    const char *members, *message;
} Refusal;

static void choose_refused(void* members) {
    Base b;
    base_small(&b);
    chosen(&b, (const char*)members);
}

static void check_refusals(Test* t, const Refusal* cases, size_t n, void (*f)(void*)) {
    for (size_t i = 0; i < n; i++) {
        check_exit(t, cases[i].members, f, (void*)cases[i].members, 2, cases[i].message);
    }
}

static void test_wrong_targets(Test* t) {
    const Refusal cases[] = {
        {"{\"target_modules\": [\"q_proj\", \"q_prj\"]}",
         "config: \"target_modules\": expected ends of the names of this model's linear layers that may have adapters, "
         "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, found \"q_prj\""},
        {"{\"target_modules\": [\"roj\"]}", "found \"roj\""},
        {"{\"target_modules\": [\"lm_head\"]}", "found \"lm_head\""},
        {"{\"target_modules\": [\"embed_tokens\"]}", "found \"embed_tokens\""},
        {"{\"target_modules\": [\"input_layernorm\"]}", "found \"input_layernorm\""},
        {"{\"target_modules\": [\"mlp.gate.weight\"]}", "found \"mlp.gate.weight\""},
        {"{\"target_modules\": [\"q_proj\"], \"target_parameters\": [\"q_proj.weight\"]}",
         "this model's parameters that may have adapters, mlp.gate.weight, mlp.experts.gate_up_proj, "
         "mlp.experts.down_proj, found \"q_proj.weight\""},
        {"{\"target_modules\": \"q_proj\"}", "expected what this model's linear layers match"},
        {"{\"target_modules\": []}", "found an empty list"},
        {"{\"target_modules\": \"(q_proj\"}", "missing closing parenthesis at byte 7 of the regular expression"},
        {"{\"target_modules\": \"(([a-z._0-9]+)+)+[XY]\"}", "match limit exceeded"},
        {"{\"target_modules\": [\"q_proj\"], \"r\": 7}",
         "\"r\": expected at most 6 for model.layers.0.self_attn.q_proj, which is 8 x 6, found 7"},
        {"{\"target_modules\": [\"q_proj\", \"k_proj\"], \"rank_pattern\": {\"1.*k_proj\": 5}}",
         "\"rank_pattern\": expected at most 4 for model.layers.1.self_attn.k_proj, which is 4 x 6, found 5"},
    };
    check_refusals(t, cases, sizeof cases / sizeof cases[0], choose_refused);
}

// status 2 after a warning, for check_exit to read its line
static void warn_of_peft(void* members) {
    Base b;
    base_small(&b);
    const Adapters adapters = chosen(&b, (const char*)members);
    adapter_warn_of_peft(&adapters, b.rows, b.n);
    exit(2);
}

// a layer without experts beside others may have an adapter in its MLP, but PEFT does not find it: that is said

static void test_lost(Test* t) {
    Base b;
    json_t* config = json_of("{\"num_hidden_layers\": 1, \"hidden_size\": 6, \"head_dim\": 2, "
                             "\"intermediate_size\": 5, \"num_attention_heads\": 4, \"num_key_value_heads\": 2}");
    base_make(&b, config, 0);
    json_decref(config);
    Adapters adapters = chosen(&b, "{\"target_modules\": \"all-linear\"}");
    check(t, adapters.n_places == 7, "all seven without experts: %d", adapters.n_places);
    adapter_free(&adapters);
    check_exit(t, "beside experts", warn_of_peft, (void*)"{\"target_modules\": [\"up_proj\"]}", 2,
               "model.layers.0.mlp.up_proj and its like are called as experts' modules are: PEFT 0.21 cannot load");
}

// ---- the table ----

static void check_row(Test* t, const Adapters* adapters, int i, const char* name, int rows, int columns, const char* kinds) {
    if (!check(t, i < adapters->n_table, "%s: no row %d", name, i)) { return; }
    const Tensor* row = &adapters->table[i];
    check(t, strcmp(row->name, name) == 0, "row %d: %s, expected %s", i, row->name, name);
    check(t, row->rows == rows && row->columns == columns, "%s: %d x %d", name, row->rows, row->columns);
    check(t, strcmp(row->kinds, kinds) == 0, "%s: layers %s, expected %s", name, row->kinds, kinds);
    check(t, row->field == TENSOR_NO_FIELD && row->decay == DECAY, "%s: no field, decayed", name);
}

// ranks by the first layer that has them, gate's before up's, A before B; nested names where both have one
static void test_rows(Test* t) {
    Base b;
    base_small(&b);
    Adapters adapters = chosen(&b, "{\"target_modules\": [\"q_proj\", \"up_proj\", \"gate_proj\"], \"target_parameters\": "
                       "[\"layers.1.mlp.experts.down_proj\", \"mlp.experts.gate_up_proj\"], "
                       "\"rank_pattern\": {\"layers.1.self_attn.*\": 3}}");
    const char *base = "base_model.model.model.layers.%d.", *names[] = {
        "self_attn.q_proj.lora_A.weight", "self_attn.q_proj.lora_B.weight", "self_attn.q_proj.lora_A.weight",
        "self_attn.q_proj.lora_B.weight", "mlp.gate_proj.lora_A.weight", "mlp.gate_proj.lora_B.weight",
        "mlp.up_proj.lora_A.weight", "mlp.up_proj.lora_B.weight", "mlp.experts.base_layer.lora_A.weight",
        "mlp.experts.base_layer.lora_B.weight", "mlp.experts.lora_A.weight", "mlp.experts.lora_B.weight",
        "mlp.experts.lora_A.weight", "mlp.experts.lora_B.weight"};
    const struct { int rows, columns; const char* kinds; } want[] = {
        {2, 6, "+-+"}, {8, 2, "+-+"}, {3, 6, "-+-"}, {8, 3, "-+-"}, {2, 6, "+--"}, {5, 2, "+--"}, {2, 6, "+--"},
        {5, 2, "+--"}, {2, 6, "-+-"}, {8, 2, "-+-"}, {2, 6, "--+"}, {8, 2, "--+"}, {2, 4, "-+-"}, {6, 2, "-+-"}};
    check(t, adapters.n_table == 14, "%d rows", adapters.n_table);
    for (int i = 0; i < 14; i++) {
        char name[ADAPTER_NAME_BYTES];
        snprintf(name, sizeof name, "%s%s", base, names[i]);
        check_row(t, &adapters, i, name, want[i].rows, want[i].columns, want[i].kinds);
    }
    check(t, adapters.table[8].experts == 3 && adapters.table[8].experts_on_disk == STACKED, "A of experts");
    check(t, adapters.table[9].experts == 3 && adapters.table[9].experts_on_disk == WOVEN, "B of experts");
    adapter_free(&adapters);
}

static void test_find(Test* t) {
    Base b;
    base_small(&b);
    Adapters adapters = chosen(&b, "{\"target_modules\": [\"q_proj\", \"up_proj\"], \"lora_dropout\": 0.25, "
                       "\"alpha_pattern\": {\"up_proj\": 1, \".*\": 5}, "
                       "\"rank_pattern\": {\"layers.1.self_attn.*\": 4}}");
    const AdapterPlace *q = adapter_find(&adapters, 2, 1, 0), *up = adapter_find(&adapters, 8, 0, 1);
    if (check(t, q && up, "two places")) {
        check(t, q->rank == 4 && q->scale == 1.25f && q->first == 0 && q->n == 8, "q of layer 1");
        check(t, q->a == 2 && q->b == 3, "its rows of the table");
        check(t, q->dropout == 0.25f && !q->is_parameter, "its dropout");
        check(t, up->rank == 2 && up->scale == 0.5f && up->first == 5 && up->n == 5 && up->a == 4, "up");
    }
    adapter_set_dropout(&adapters, 0.5f);
    check(t, q && q->dropout == 0.5f && adapters.settings.dropout == 0.5f, "another dropout");
    check(t, !adapter_find(&adapters, 8, 0, 0) && !adapter_find(&adapters, 8, 1, 1) && !adapter_find(&adapters, 4, 0, 0), "and no others");
    adapter_free(&adapters);
    adapters = chosen(&b, "{\"target_modules\": [], \"target_parameters\": [\"gate_up_proj\"], \"use_rslora\": true}");
    const AdapterPlace* experts = adapter_find(&adapters, EXPERT_GATE_UP, 2, 0);
    if (check(t, experts != NULL, "experts")) {
        check(t, experts->scale == (float)(3.0 / sqrt(2.0)) && experts->n == 8 && experts->depth == 0, "rslora, alone");
    }
    adapter_free(&adapters);
}

static void test_start(Test* t) {
    Base b;
    base_small(&b);
    Adapters adapters = chosen(&b, "{\"target_modules\": [\"o_proj\"], \"target_parameters\": [\"down_proj\"]}");
    const Tensor* last = &adapters.table[adapters.n_table - 1];
    const size_t n = last->offset + tensor_elements(last);
    float* x = filled_array(n, NAN);
    tensors_init(adapters.table, adapters.n_table, x, 1);
    for (int i = 0; i < adapters.n_table; i++) {
        const Tensor* row = &adapters.table[i];
        const int n_in = i < 2 ? 8 : 4;
        float largest = 0.0f;
        for (size_t k = 0; k < tensor_elements(row); k++) { largest = fmaxf(largest, fabsf(x[row->offset + k])); }
        const float bound = i % 2 == 0 ? 1.0f / sqrtf((float)n_in) : 0.0f;
        check(t, largest <= bound && largest >= 0.8f * bound, "%s: up to %g of %g", row->name, (double)largest,
              (double)bound);
    }
    free(x);
    adapter_free(&adapters);
}

// ---- adapter_config.json ----

static void settings_refused(void* members) { adapter_settings(settings_json((const char*)members), "config"); }

static void test_wrong_settings(Test* t) {
    const Refusal cases[] = {
        {"{\"peft_type\": \"IA3\"}", "config: \"peft_type\": expected \"LORA\", found \"IA3\""},
        {"{\"peft_type\": null}", "found null"},
        {"{\"bias\": \"all\"}", "config: \"bias\": expected nothing, null or false: this trainer has LoRA without it"},
        {"{\"lora_bias\": true}", "\"lora_bias\""}, {"{\"use_dora\": true}", "\"use_dora\""},
        {"{\"use_qalora\": true}", "\"use_qalora\""}, {"{\"fan_in_fan_out\": true}", "\"fan_in_fan_out\""},
        {"{\"modules_to_save\": [\"lm_head\"]}", "\"modules_to_save\""},
        {"{\"layer_replication\": [[0, 2]]}", "\"layer_replication\""},
        {"{\"trainable_token_indices\": [1]}", "\"trainable_token_indices\""},
        {"{\"alora_invocation_tokens\": [1]}", "\"alora_invocation_tokens\""},
        {"{\"eva_config\": {\"rho\": 2.0}}", "\"eva_config\""}, {"{\"something_new\": 1}", "\"something_new\""},
        {"{\"init_lora_weights\": \"pissa_niter_4\"}", "which leave the base as it is, found \"pissa_niter_4\""},
        {"{\"r\": 0}", "config: \"r\": expected an integer 1..65536, found 0"}, {"{\"r\": 2.0}", "found 2.0"},
        {"{\"lora_alpha\": 0}", "\"lora_alpha\": expected a number above 0, found 0"},
        {"{\"lora_alpha\": null}", "\"lora_alpha\": expected a number above 0, found null"},
        {"{\"lora_dropout\": 1}", "\"lora_dropout\": expected a number 0..0.999"},
        {"{\"use_rslora\": 1}", "\"use_rslora\": expected true or false"},
        {"{\"target_modules\": 3}", "\"target_modules\": expected a list of names, or a text, found 3"},
        {"{\"target_modules\": [\"q_proj\", \"\"]}", "expected names in the list, found \"\""},
        {"{\"target_parameters\": \"mlp.gate.weight\"}", "\"target_parameters\": expected a list of names"},
        {"{\"rank_pattern\": [1]}", "\"rank_pattern\": expected an object {expression: number}"},
        {"{\"rank_pattern\": {\"q\": 0}}", "\"rank_pattern\": expected ranks, integers from 1 on, found 0"},
        {"{\"rank_pattern\": {\"[q\": 1}}", "of the regular expression \"[q\""},
        {"{\"alpha_pattern\": {\"q\": -1}}", "\"alpha_pattern\": expected numbers above 0, found -1"},
        {"{\"lora_dropout\": 0.1, \"target_parameters\": [\"down_proj\"]}",
         "\"lora_dropout\": expected 0 with adapters of experts or routers"},
    };
    check_refusals(t, cases, sizeof cases / sizeof cases[0], settings_refused);
}

// what PEFT 0.21 writes where nothing is asked for changes nothing, and goes along
static void test_inert(Test* t) {
    Base b;
    base_small(&b);
    Adapters adapters = chosen(&b, "{\"target_modules\": \"all-linear\", \"arrow_config\": null, \"auto_mapping\": null, "
                       "\"ensure_weight_tying\": false, \"loftq_config\": {}, \"megatron_core\": \"megatron.core\", "
                       "\"peft_version\": \"0.21.2\", \"qalora_group_size\": 16, \"bias\": \"none\", "
                       "\"use_bdlora\": null, \"layers_to_transform\": [1], \"exclude_modules\": null, "
                       "\"base_model_name_or_path\": \"x\"}");
    json_t *json = adapter_config_json(&adapters, b.rows, b.n, "new"), *wanted = json_deep_copy(adapters.settings.json);
    json_object_set_new(wanted, "base_model_name_or_path", json_string("new"));
    json_object_set_new(wanted, "inference_mode", json_true());
    json_object_set_new(wanted, "lora_dropout", json_real(0.0));
    json_object_set_new(wanted, "target_modules",
                        json_of("[\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\"]"));
    check(t, json_equal(json, wanted), "the config that is written");
    json_decref(json), json_decref(wanted);
    adapter_free(&adapters);
}

// ---- files ----

// an adapter's two files, of random values, in a folder
static float* save_adapter(const TempPath* folder, const Adapters* adapters, const Base* b) {
    const Tensor* last = &adapters->table[adapters->n_table - 1];
    const size_t n = last->offset + tensor_elements(last);
    float* x = random_array(n, 1.0f, 3);
    SavedFiles files;
    files.n = 0;
    adapter_save(folder->s, adapters, b->rows, b->n, "", x, &files);
    return x;
}

static void write_config(const TempPath* folder, const char* members) {
    TempPath path = temp_path(folder, ADAPTER_CONFIG);
    json_write(path.s, settings_json(members));
}

// one of the two parameters of experts: target_parameters says which
static void test_one_of_two(Test* t) {
    const char* const names[] = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"};
    Base b;
    base_small(&b);
    for (int i = 0; i < 2; i++) {
        char members[256];
        TempPath folder = temp_folder();
        Adapters again;
        SafeSet set;
        snprintf(members, sizeof members, "{\"target_modules\": [\"v_proj\"], \"target_parameters\": [\"%s\"]}",
                 names[i]);
        Adapters adapters = chosen(&b, members);
        free(save_adapter(&folder, &adapters, &b));
        adapter_open(&again, &set, folder.s, b.rows, b.n);
        check_same_places(t, &again, &adapters);
        check(t, adapter_find(&again, EXPERT_GATE_UP + i, 1, 0) != NULL, "%s", names[i]);
        check(t, safeset_find(&set, "base_model.model.model.layers.1.mlp.experts.lora_A.weight") != NULL, "not inside");
        safeset_close(&set);
        adapter_free(&again), adapter_free(&adapters);
        temp_remove(&folder);
    }
}

// both of them need no name: their keys say it
static void test_both(Test* t) {
    Base b;
    TempPath folder = temp_folder();
    Adapters again;
    SafeSet set;
    base_small(&b);
    Adapters adapters = chosen(&b, "{\"target_parameters\": [\"gate_up_proj\", \"down_proj\"]}");
    free(save_adapter(&folder, &adapters, &b));
    write_config(&folder, "{}");
    adapter_open(&again, &set, folder.s, b.rows, b.n);
    check_same_places(t, &again, &adapters);
    check(t, again.n_places == 4, "%d places", again.n_places);
    safeset_close(&set);
    adapter_free(&again), adapter_free(&adapters);
    temp_remove(&folder);
}

// a second stack of layers has numbers of its own in names
static void test_second_stack(Test* t) {
    char name[NAME_BYTES], path[ADAPTER_NAME_BYTES];
    Base b;
    base_small(&b);
    tensor_in_layers(&b.rows[6], 1, 1);  // o_proj
    tensor_named_from(&b.rows[6], 1);
    Adapters adapters = chosen(&b, "{\"target_modules\": [\"o_proj\"]}");
    check(t, adapters.n_places == 2, "%d places", adapters.n_places);
    adapter_path(path, b.rows, &adapters.places[1], 0);
    check(t, strcmp(path, "model.layers.1.self_attn.o_proj") == 0, "layer 2 is called %s", path);
    tensor_slice_name(name, sizeof name, &adapters.table[0], 1);
    check(t, strcmp(name, "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight") == 0, "its A %s", name);
    adapter_free(&adapters);
}

// the layers that an adapter has are those of its file, whatever the config says of others
static void test_layers(Test* t) {
    Base b;
    TempPath folder = temp_folder();
    Adapters again;
    SafeSet set;
    base_small(&b);
    Adapters adapters = chosen(&b, "{\"target_modules\": \".*layers.1.*[qo]_proj\"}");
    free(save_adapter(&folder, &adapters, &b));
    write_config(&folder, "{\"target_modules\": [\"q_proj\", \"o_proj\"], \"layers_to_transform\": [1]}");
    adapter_open(&again, &set, folder.s, b.rows, b.n);
    check_same_places(t, &again, &adapters);
    check(t, again.n_places == 2, "%d places", again.n_places);
    json_t *json = adapter_config_json(&again, b.rows, b.n, ""), *one = json_of("[1]");
    check(t, json_equal(json_object_get(json, "layers_to_transform"), one), "layers_to_transform goes along");
    json_decref(json), json_decref(one);
    safeset_close(&set);
    adapter_free(&again), adapter_free(&adapters);
    temp_remove(&folder);
}

// with a layer that takes no adapter and is called as another is
static void base_closed(Base* b) {
    base_small(b);
    base_add(b, "self_attn.indexer.q_proj.weight", "E", 4, 6, NULL, NULL);
    tensor_closed(&b->rows[b->n - 1], "self_attn.indexer.q_proj");
}

// PEFT finds that layer, too, by what a config says: it is told otherwise
static void test_closed(Test* t) {
#define WITHOUT "(?!.*\\.self_attn\\.indexer\\.q_proj$)"
    static const struct { const char *asked, *written; } cases[] = {
        {"\"target_modules\": [\"q_proj\", \"o_proj\"]", WITHOUT "(.*\\.)?(q_proj|o_proj)"},
        {"\"target_modules\": \".*q_proj\"", WITHOUT "(.*q_proj)"},
        {"\"target_modules\": \"all-linear\"", WITHOUT "(.*\\.)?(q_proj|k_proj|v_proj|o_proj)"},
        {"\"target_modules\": [\"self_attn.q_proj\"]", NULL},
        {"\"target_modules\": [\"o_proj\"]", NULL},
        {"\"target_modules\": \".*self_attn.q_proj\"", NULL},
        {"\"target_modules\": [\"q_proj\"], \"layers_to_transform\": [0, 1, 2]", NULL}};
    Base b;
    base_closed(&b);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char members[256];
        TempPath folder = temp_folder();
        Adapters again;
        SafeSet set;
        snprintf(members, sizeof members, "{%s}", cases[i].asked);
        Adapters adapters = chosen(&b, members);
        free(save_adapter(&folder, &adapters, &b));
        adapter_open(&again, &set, folder.s, b.rows, b.n);
        check_same_places(t, &again, &adapters);
        json_t *json = adapter_config_json(&again, b.rows, b.n, ""), *written = json_string(cases[i].written);
        const json_t* wanted = written ? written : adapters.settings.targets;
        check(t, json_equal(again.settings.targets, wanted), "%s: the config that is written", cases[i].asked);
        check(t, json_equal(json_object_get(json, "target_modules"), wanted), "%s: and again", cases[i].asked);
        json_decref(json), json_decref(written);
        safeset_close(&set);
        adapter_free(&again), adapter_free(&adapters);
        temp_remove(&folder);
    }
}

// safetensors of these tensors, all F32, values 0, 1, 2, ...; "name rows columns" each
typedef struct {
    char name[96];
    int rows, columns;
} FileTensor;

static int by_name(const void* a, const void* b) {
    return strcmp(((const FileTensor*)a)->name, ((const FileTensor*)b)->name);
}

static void write_tensors(const TempPath* folder, FileTensor* tensors, int n) {
    TempPath path = temp_path(folder, ADAPTER_WEIGHTS);
    SafeWriter w;
    float values[512];
    qsort(tensors, (size_t)n, sizeof *tensors, by_name);
    for (int i = 0; i < 512; i++) { values[i] = (float)i; }
    safewriter_init(&w);
    for (int i = 0; i < n; i++) {
        char name[160];
        const int64_t shape[2] = {tensors[i].rows, tensors[i].columns};
        const char* prefix = strncmp(tensors[i].name, "=", 1) == 0 ? "" : "base_model.model.model.layers.";
        snprintf(name, sizeof name, "%s%s", prefix, tensors[i].name + (*prefix == '\0'));
        safewriter_declare(&w, name, DTYPE_F32, 2, shape);
    }
    safewriter_open(&w, path.s);
    for (int i = 0; i < n; i++) {
        const size_t n_elements = (size_t)(tensors[i].rows * tensors[i].columns);
        safewriter_put(&w, values + tensors[i].name[0] % 7, sizeof(float) * n_elements);
    }
    safewriter_close(&w);
}

static int expert_tensors(FileTensor* out, int layer, const char* name, int n_out, int n_in, int r) {
    for (int e = 0; e < 3; e++) {
        snprintf(out[2 * e].name, sizeof out->name, "%d.mlp.experts.%d.%s.lora_A.weight", layer, e, name);
        snprintf(out[2 * e + 1].name, sizeof out->name, "%d.mlp.experts.%d.%s.lora_B.weight", layer, e, name);
        out[2 * e].rows = out[2 * e + 1].columns = r;
        out[2 * e].columns = n_in;
        out[2 * e + 1].rows = n_out;
    }
    return 6;
}

// older files: an A and a B for each expert become those of all; gate's and up's stay two
static void test_old_experts(Test* t) {
    Base b;
    TempPath folder = temp_folder();
    FileTensor tensors[32];
    Adapters adapters, again;
    SafeSet set;
    base_small(&b);
    int n = expert_tensors(tensors, 2, "up_proj", 4, 6, 2);
    n += expert_tensors(tensors + n, 2, "gate_proj", 4, 6, 2);
    n += expert_tensors(tensors + n, 1, "down_proj", 6, 4, 3);
    write_tensors(&folder, tensors, n);
    write_config(&folder, "{\"target_modules\": [\"up_proj\"], \"lora_dropout\": 0.1, "
                 "\"rank_pattern\": {\"down_proj\": 3}}");
    adapter_open(&adapters, &set, folder.s, b.rows, b.n);
    const AdapterPlace *gate = adapter_find(&adapters, EXPERT_GATE_UP, 2, 0), *up = adapter_find(&adapters, EXPERT_GATE_UP, 2, 1);
    const AdapterPlace* down = adapter_find(&adapters, EXPERT_DOWN, 1, 0);
    if (check(t, adapters.n_places == 3 && gate && up && down, "%d places", adapters.n_places)) {
        check(t, gate->dropout == 0.0f && down->dropout == 0.0f, "no dropout: PEFT has none for experts");
        check(t, gate->first == 0 && up->first == 4 && up->n == 4 && !up->is_parameter, "parts of an expert's outputs");
        check(t, adapters.table[up->a].experts == 3 && adapters.table[up->a].rows == 2 && down->rank == 3, "A (E, r, in)");
        float* values = filled_array(1024, 0.0f);
        tensors_load(&set, adapters.table, adapters.n_table, "", values);
        const SafeTensor* A = safeset_find(&set, "base_model.model.model.layers.2.mlp.experts.1.up_proj.lora_A.weight");
        check_bits(t, "A of expert 1", adapter_values(&adapters, values, up->a, 2, 1), (const float*)A->data, 12);
        TempPath out = temp_folder();
        SavedFiles files;
        SafeSet set_again;
        files.n = 0;
        adapter_save(out.s, &adapters, b.rows, b.n, "", values, &files);
        adapter_open(&again, &set_again, out.s, b.rows, b.n);
        check_same_places(t, &again, &adapters);
        float w[24] = {0.0f}, want[24] = {0.0f};  // expert 2's down
        adapter_merge_slice(&adapters, values, b.rows, EXPERT_DOWN, 2, w);
        const float *A_2 = adapter_values(&adapters, values, down->a, 1, 2), *B_2 = adapter_values(&adapters, values, down->b, 1, 2);
        for (int i = 0; i < 72; i++) { want[i / 3] += B_2[i / 12 * 3 + i % 3] * A_2[i % 3 * 4 + i / 3 % 4]; }  // s = 1
        check_bits(t, "merged", w, want, 24);
        safeset_close(&set_again);
        adapter_free(&again);
        temp_remove(&out);
        free(values);
    }
    safeset_close(&set);
    adapter_free(&adapters);
    temp_remove(&folder);
}

typedef struct {
    const char* config;
    FileTensor tensors[4];
    int n;
    const char* message;
} FileRefusal;

static void open_refused(void* folder) {
    Base b;
    Adapters adapters;
    SafeSet set;
    base_closed(&b);
    adapter_open(&adapters, &set, (const char*)folder, b.rows, b.n);
}

#define Q_A {"0.self_attn.q_proj.lora_A.weight", 2, 6}
#define Q_B {"0.self_attn.q_proj.lora_B.weight", 8, 2}

static void test_wrong_files(Test* t) {
    const FileRefusal cases[] = {
        {"{}", {Q_A}, 1, "layers.0.self_attn.q_proj.lora_B.weight\" is missing"},
        {"{}", {Q_A, {"0.self_attn.q_proj.lora_B.weight", 8, 3}}, 2,
         "lora_B.weight\": expected (8, 2), as adapter_config.json says rank 2, found (8, 3): another base model, or"},
        {"{\"rank_pattern\": {\"q_proj\": 4}}", {Q_A, Q_B}, 2, "expected (4, 6), as adapter_config.json says rank 4"},
        {"{}", {Q_A, Q_B, {"=base_model.model.lm_head.lora_A.weight", 2, 6}}, 3,
         "tensor \"base_model.model.lm_head.lora_A.weight\": this model has no such layer, or it takes no adapter"},
        {"{}", {Q_A, Q_B, {"3.self_attn.q_proj.lora_A.weight", 2, 6}}, 3, "this model has no such layer"},
        {"{}", {Q_A, Q_B, {"1.self_attn.indexer.q_proj.lora_A.weight", 2, 6}}, 3,
         "q_proj.lora_A.weight\": this layer takes no adapter here: train one without it"},
        {"{\"target_modules\": [\"q_proj\"]}", {Q_A, Q_B, {"1.self_attn.indexer.q_proj.lora_A.weight", 2, 6}}, 3,
         "without it, by target_modules=" WITHOUT "(.*\\.)?(q_proj)"},
        {"{}", {Q_A, Q_B, {"0.self_attn.indexer.q_proj.lora_A.weight", 2, 6}}, 3, "this model has no such layer"},
        {"{}", {Q_A, Q_B, {"0.self_attn.q_proj.lora_magnitude_vector", 8, 1}}, 3, "expected lora_A and lora_B of"},
        {"{}", {{"0.self_attn.q_proj.lora_B.weight", 8, 2}}, 1, "this model has no such layer, or"},
        {"{}", {{"=model.layers.0.self_attn.q_proj.lora_A.weight", 2, 6}}, 1, "expected names that begin with base_"},
        {"{}", {{"1.mlp.experts.lora_A.weight", 6, 6}, {"1.mlp.experts.lora_B.weight", 8, 6}}, 2,
         "\"target_parameters\": expected which 1 of the 2 parameters of model.layers.1.mlp.experts have adapters"},
        {"{\"target_parameters\": [\"mlp.experts.down_proj\"]}",
         {{"1.mlp.experts.lora_A.weight", 6, 6}, {"1.mlp.experts.lora_B.weight", 8, 6}}, 2, "expected (6, 4)"},
        {"{}", {{"1.mlp.experts.0.up_proj.lora_A.weight", 2, 6}, {"1.mlp.experts.0.up_proj.lora_B.weight", 4, 2}}, 2,
         "experts.1.up_proj.lora_A.weight\" is missing"},
        {"{}", {{"1.mlp.experts.1.up_proj.lora_A.weight", 2, 6}, {"1.mlp.experts.1.up_proj.lora_B.weight", 4, 2}}, 2,
         "experts.0.up_proj.lora_A.weight\" is missing"},
        {"{\"target_parameters\": [\"gate_up_proj\"]}",
         {{"1.mlp.experts.lora_A.weight", 6, 6}, {"1.mlp.experts.0.up_proj.lora_A.weight", 2, 6}}, 2,
         "expected one adapter of a weight, found those of model.layers.1.mlp.experts.gate_up_proj and of"},
        {"{\"use_dora\": true}", {Q_A, Q_B}, 2, "adapter_config.json: \"use_dora\""},
        {"{\"target_modules\": [\"v_proj\"]}", {Q_A, Q_B}, 2, "q_proj, which its \"target_modules\" leaves out"},
        {"{\"target_modules\": [\"q_proj\"], \"layers_to_transform\": [1]}", {Q_A, Q_B}, 2,
         "q_proj, which its \"layers_to_transform\" leaves out"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        TempPath folder = temp_folder();
        FileRefusal c = cases[i];
        write_config(&folder, c.config);
        write_tensors(&folder, c.tensors, c.n);
        check_exit(t, c.tensors[0].name, open_refused, folder.s, 2, c.message);
        temp_remove(&folder);
    }
}

static void test_wrong_folders(Test* t) {
    TempPath folder = temp_folder(), missing = temp_path(&folder, "none");
    check_exit(t, "no folder", open_refused, missing.s, 2, "No such file or directory");
    check_exit(t, "an empty one", open_refused, folder.s, 2, "expected an adapter, adapter_config.json and");
    TempPath config = temp_file(&folder, "config.json", "{}", 2);
    check_exit(t, "a model's", open_refused, folder.s, 2, "found neither but a model: --from takes it");
    check_exit(t, "a file", open_refused, config.s, 2, "expected a folder, found a file");
    write_config(&folder, "{}");
    check_exit(t, "a config alone", open_refused, folder.s, 2, "expected adapter_model.safetensors beside");
    temp_remove(&folder);
}

// ---- options ----

typedef struct {
    Option table[MAX_OPTIONS];
    int n;
    AdapterOptions o;
    const char* export_hf;
} Options;

static void options_read(Options* x, const char* line) {
    const Option hf[] = {{"out", "export-hf", "", OPTION_TEXT, &x->export_hf, "", 0, 0, "DIR", "", OPTION_WRITES}};
    char words[512], *argv[32], *rest = words;
    int argc = 0;
    memset(x, 0, sizeof *x);
    x->n = adapter_options(x->table, options_append(x->table, 0, hf, 1), &x->o);
    snprintf(words, sizeof words, "trainer %s", line);
    for (char* word; (word = strsep(&rest, " ")) && argc < 31;) {
        if (*word) { argv[argc++] = word; }
    }
    argv[argc] = NULL;
    options_parse(x->table, x->n, argc, argv, "");
    adapter_options_check(&x->o, x->table, x->n, x->export_hf);
}

static void test_options(Test* t) {
    const struct { const char *line, *settings; } cases[] = {
        {"--lora-rank 8",
         "{\"r\": 8, \"lora_alpha\": 16, \"target_modules\": \"all-linear\", \"target_parameters\": null}"},
        {"--lora-rank 8 --lora-alpha 4.5 --lora-rslora --lora-dropout 0.05 --lora-targets q_proj,mlp.down_proj",
         "{\"r\": 8, \"lora_alpha\": 4.5, \"use_rslora\": true, \"lora_dropout\": 0.05, "
         "\"target_modules\": [\"q_proj\", \"mlp.down_proj\"]}"},
        {"--lora-rank 8 --lora-targets .*[qv]_proj --lora-rank-pattern a{1,2}=3,(?=b)v,x=4 --lora-alpha-pattern q=1.5",
         "{\"target_modules\": \".*[qv]_proj\", \"rank_pattern\": {\"a{1,2}\": 3, \"(?=b)v,x\": 4}, "
         "\"alpha_pattern\": {\"q\": 1.5}}"},
        {"--lora-rank 2 --lora-parameters mlp.gate.weight,experts.down_proj",
         "{\"target_modules\": [], \"target_parameters\": [\"mlp.gate.weight\", \"experts.down_proj\"]}"},
        {"--lora-rank 2 --lora-parameters mlp.gate.weight --lora-targets all-linear",
         "{\"target_modules\": \"all-linear\", \"target_parameters\": [\"mlp.gate.weight\"], \"peft_type\": \"LORA\", "
         "\"task_type\": \"CAUSAL_LM\", \"bias\": \"none\", \"use_dora\": false, \"inference_mode\": true}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options x;
        const char* key;
        json_t *value, *want = json_of(cases[i].settings);
        options_read(&x, cases[i].line);
        AdapterSettings s = adapter_settings_new(&x.o);
        json_object_foreach(want, key, value) {
            char* found = json_dumps(json_object_get(s.json, key), JSON_ENCODE_ANY);
            check(t, json_equal(json_object_get(s.json, key), value), "%s: \"%s\": %s", cases[i].line, key, found);
            free(found);
        }
        json_decref(want);
        adapter_settings_free(&s);
        options_free(x.table, x.n);
    }
    Options x;
    options_read(&x, "");
    check(t, !adapter_is_asked(&x.o), "without these options the model itself is trained");
    options_free(x.table, x.n);
}

static void options_refused(void* line) {
    Options x;
    Base b;
    Adapters adapters;
    options_read(&x, (const char*)line);
    const AdapterSettings s = adapter_settings_new(&x.o);
    base_small(&b);
    adapter_choose(&adapters, &s, b.rows, b.n);
}

static void test_wrong_options(Test* t) {
    const Refusal cases[] = {
        {"--lora-alpha 3", "--lora-alpha: is for a new adapter: --lora-rank N"},
        {"--lora-targets q_proj", "--lora-targets: is for a new adapter: --lora-rank N"},
        {"--lora-dropout 0.1", "--lora-dropout: is for an adapter"},
        {"--lora d --lora-rank 4", "--lora-rank: the adapter of --lora brings its own"},
        {"--lora d --lora-parameters x", "--lora-parameters: the adapter of --lora brings its own"},
        {"--export-lora d", "--export-lora: expected an adapter"}, {"--merge", "--merge: expected an adapter"},
        {"--lora-rank 2 --merge", "--merge: is for --export-hf DIR"},
        {"--lora-rank 2 --lora-targets q_proj,,v_proj", "--lora-targets: expected names between commas"},
        {"--lora-rank 2 --lora-targets q_prj", "--lora-targets: expected ends of the names of this model's"},
        {"--lora-rank 2 --lora-targets (q", "--lora-targets: missing closing parenthesis"},
        {"--lora-rank 2 --lora-parameters x", "--lora-parameters: expected ends of the names"},
        {"--lora-rank 2 --lora-rank-pattern q_proj", "--lora-rank-pattern: expected REGEX=N, found \"q_proj\""},
        {"--lora-rank 2 --lora-rank-pattern q=1,v", "--lora-rank-pattern: expected REGEX=N, found \"v\""},
        {"--lora-rank 2 --lora-rank-pattern q=1.5", "--lora-rank-pattern: expected whole ranks, found 1.5"},
        {"--lora-rank 2 --lora-rank-pattern q=1,q=2", "--lora-rank-pattern: \"q\" is there twice"},
        {"--lora-rank 2 --lora-rank-pattern q=0", "--lora-rank-pattern: expected ranks, integers from 1 on, found 0"},
        {"--lora-rank 2 --lora-alpha-pattern (=2", "--lora-alpha-pattern: missing closing parenthesis"},
        {"--lora-rank 7", "--lora-rank: expected at most 6 for model.layers.0.self_attn.q_proj"},
        {"--lora-rank 2 --lora-parameters down_proj --lora-dropout 0.1", "--lora-dropout: expected 0 with adapters"},
    };
    check_refusals(t, cases, sizeof cases / sizeof cases[0], options_refused);
}

// ---- files that PEFT has made ----

#define PEFT_FOLDER "build/peft"

// the adapter of one folder: merged it is what PEFT has merged; written again for PEFT to read
static void check_peft(Test* t, const char* folder) {
    char path[PATH_BYTES];
    Base b;
    Adapters adapters;
    SafeSet set, base, merged;
    json_t* config = json_read(path_join(path, folder, "base/config.json"));
    base_make(&b, config, 1);
    adapter_open(&adapters, &set, folder, b.rows, b.n);
    safeset_open(&base, path_join(path, folder, "base.safetensors"));
    safeset_open(&merged, path_join(path, folder, "merged.safetensors"));
    const Tensor* last = &adapters.table[adapters.n_table - 1];
    float* values = filled_array(last->offset + tensor_elements(last), 0.0f);
    tensors_load(&set, adapters.table, adapters.n_table, "", values);
    for (int row = 0; row < b.n; row++) {
        const Tensor* x = &b.rows[row];
        const size_t n = tensor_slice_elements(x);
        float *w = filled_array(n, 0.0f), *want = filled_array(n, 0.0f), *room = filled_array(n, 0.0f);
        const int is_there = x->layers > 0 && tensor_is_in(&base, x, "");
        for (int k = 0; k < tensor_slices(x) && is_there; k++) {
            char name[NAME_BYTES];
            double largest = 0.0;
            tensor_load_slice(&base, x, k, "", w, room);
            tensor_load_slice(&merged, x, k, "", want, room);
            adapter_merge_slice(&adapters, values, b.rows, row, k, w);
            for (size_t i = 0; i < n; i++) { largest = fmax(largest, fabs((double)w[i] - (double)want[i])); }
            // sums of at most 10 products below 2, in PyTorch's order
            tensor_slice_name(name, sizeof name, x, k);
            check(t, largest <= 1e-6, "%s: %s: differs by %g", folder, name, largest);
        }
        free(w), free(want), free(room);
    }
    SavedFiles files;
    files.n = 0;
    make_folder(path_join(path, folder, "ours"));
    adapter_save(path, &adapters, b.rows, b.n, "base", values, &files);
    safeset_close(&set), safeset_close(&base), safeset_close(&merged);
    adapter_free(&adapters);
    free(values);
    json_decref(config);
}

static void test_peft(Test* t) {
    DIR* entries = opendir(PEFT_FOLDER);
    int n = 0;
    if (!entries) {
        skip(t, "python dev/ref/peft_adapters.py makes them, with PEFT");
        return;
    }
    for (struct dirent* entry; (entry = readdir(entries));) {
        char folder[PATH_BYTES];
        if (entry->d_name[0] == '.') { continue; }
        check_peft(t, path_join(folder, PEFT_FOLDER, entry->d_name));
        n++;
    }
    closedir(entries);
    check(t, n > 5, "%d folders", n);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"golden table", "the names and the order of dev/ref/lora.py, the norm of its gradients", test_golden_table},
        {"golden merge", "W + s B A to the bit, of slices apart and of experts in one", test_golden_merge},
        {"golden files", "saved and found again: the golden files' tensors, the same places", test_golden_files},
        {"targets", "lists, expressions, all-linear, parameters: the places that PEFT would choose", test_targets},
        {"wrong targets", "what matches nothing, and ranks beyond a matrix, are refused", test_wrong_targets},
        {"beside experts", "an MLP without experts: all-linear leaves it out, a warning says why", test_lost},
        {"rows", "parts, ranks by their first layer, A before B; names of PEFT, also nested", test_rows},
        {"find", "rank, scale, outputs and dropout of a weight's adapter", test_find},
        {"start", "A uniform in +-1 / sqrt(in), B zeros", test_start},
        {"wrong settings", "other methods, and what changes A and B, are refused with the key", test_wrong_settings},
        {"inert settings", "are passed over and written again; all-linear becomes a list", test_inert},
        {"one of two", "parameters of a module: target_parameters says which", test_one_of_two},
        {"both", "parameters of a module are found by their keys alone", test_both},
        {"second stack", "names with numbers of their own", test_second_stack},
        {"layers", "an adapter has the layers that its file has", test_layers},
        {"closed layers", "take none, which the config says that PEFT reads", test_closed},
        {"old experts", "an A and a B for each expert: found, loaded, merged, written", test_old_experts},
        {"wrong files", "missing, foreign, contradicting tensors are refused by name", test_wrong_files},
        {"wrong folders", "what is no adapter is said to be what it is", test_wrong_folders},
        {"options", "become an adapter_config.json", test_options},
        {"wrong options", "are refused with the option's name", test_wrong_options},
        {"PEFT's files", "adapters that PEFT made, merged as PEFT merges them", test_peft},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
