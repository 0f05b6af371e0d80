// Shows what a file or folder is and what is in it, and compares two of them; `inspect --help` and doc/tools.md tell more.
// Build: make tools. It reads with the parsers of llmc/, so a broken file gets the message a trainer would give.
#define TESTING  // train_gpt2.c without its main, for the tensor table of llm.c's .bin
#include "train_gpt2.c"
#undef main
#include "dev/tools/report.h"  // report_facts, report_table
#include "llmc/hellaswag.h"    // hellaswag_parse_
#include "llmc/test.h"         // float_ulps

static const char* const usage = "usage: inspect PATH [PATH2] [--stats] [--json]";
static const char* const help =
    "Shows what is in a file or folder, told apart by its content, or how two of them differ:\n"
    "    a run                  its checkpoints, each read and verified, and where training stands\n"
    "    a checkpoint           state, options, checksums, tensors\n"
    "    a Hugging Face folder  config and tensors, also of several shards; an adapter of PEFT's\n"
    "    a file                 .safetensors; llm.c's .bin (model, state, tokenizer, tokens, evaluation); tokenizer.json,\n"
    "                           metrics.jsonl, config.json\n"
    "Of two, the tensors of one name are compared, and config, state and options; a run stands for its newest checkpoint.\n"
    "    --stats  smallest, largest, mean and standard deviation of every tensor, and how many NaN and infinities\n"
    "    --json   one JSON object with the same content\n"
    "Exit status: 0 sound, or equal; 1 two that differ; 2 broken, or nothing that is known.\n";

// ---- 1. what is looked at: a report as JSON, and the tensors behind it ----

typedef struct {
    SafeTensor t;       // its data is NULL for llm.c's .bin: there a slice is turned to its shape on disk when it is read
    const char* file;   // which file of a folder
    int is_listed;      // parameters; not AdamW's moments, nor the data of files that hold no tensors
    const Tensor* row;  // of the .bin's tensor table,
    int layer;          // and the slice
} Item;

typedef struct {
    const char* path;
    json_t* report;     // "path", "kind", "bytes", "facts", and what there is of "config", "state", "options", ...
    Item* items;
    int n_items;
    SafeFile** files;
    int n_files;
    MappedFile file;    // when it is one file
    Tensor table[N_PARAMETERS];
    char** bin_names;   // its tensors' names
    int n_bin_names;
    float* columns;     // of metrics.jsonl
    char problem[600];  // the first thing that is broken; "" for none
} Source;

static json_t* facts_of(Source* s) { return json_object_get(s->report, "facts"); }

static void fact(Source* s, const char* key, json_t* value) { json_object_set_new(facts_of(s), key, value ? value : json_null()); }

__attribute__((format(printf, 2, 3)))
static void problem(Source* s, const char* format, ...) {
    va_list args;
    if (*s->problem) { return; }
    va_start(args, format);
    vsnprintf(s->problem, sizeof s->problem, format, args);
    va_end(args);
}

static Item* add_item(Source* s, const SafeTensor* t, const char* file, int is_listed) {
    if ((s->n_items & (s->n_items - 1)) == 0) {  // a power of two: full
        size_t n_grown = s->n_items ? 2 * (size_t)s->n_items : 1;
        s->items = (Item*)realloc_check(s->items, n_grown * sizeof(Item), "list of tensors");
    }
    Item item = {*t, file, is_listed, NULL, 0};
    s->items[s->n_items] = item;
    return &s->items[s->n_items++];
}

static void add_data(Source* s, const char* name, Dtype dtype, const void* data, size_t n) {
    SafeTensor t;
    memset(&t, 0, sizeof t);
    t.name = name;
    t.dtype = dtype;
    t.n_dims = 1;
    t.shape[0] = (int64_t)n;
    t.data = data;
    t.n = n;
    t.n_bytes = n * dtype_size(dtype);
    add_item(s, &t, "", 0);
}

// the tensors of one .safetensors file; 0: the reason
static int add_safetensors(Source* s, const char* path, int is_listed, ErrorText* error) {
    MappedFile mapped;
    if (!file_map_or_not(&mapped, path, error)) { return 0; }
    SafeFile* f = (SafeFile*)malloc_check(sizeof(SafeFile), "file");
    if (!safetensors_parse_(f, mapped.bytes, mapped.n_bytes, error)) {
        file_unmap(&mapped);
        free(f);
        return 0;
    }
    f->file = mapped;
    f->path = mapped.path;
    s->files = (SafeFile**)realloc_check(s->files, (size_t)(s->n_files + 1) * sizeof(SafeFile*), "list of files");
    s->files[s->n_files++] = f;
    const char* slash = strrchr(f->path, '/');
    for (int i = 0; i < f->n_tensors; i++) { add_item(s, &f->tensors[i], slash ? slash + 1 : f->path, is_listed); }
    if (is_listed && json_object_size(f->metadata) > 0) { json_object_set(s->report, "metadata", f->metadata); }
    return 1;
}

// a JSON object of a folder, NULL without a message when there is none or it is broken
static json_t* read_quietly(const char* folder, const char* name) {
    char path[PATH_BYTES];
    json_t* json = json_load_file(path_join(path, folder, name), JSON_REJECT_DUPLICATES, NULL);
    if (json_is_object(json)) { return json; }
    json_decref(json);
    return NULL;
}

static void take_section(Source* s, const json_t* from, const char* key) {
    json_t* section = json_object_get(from, key);
    if (json_is_object(section)) { json_object_set(s->report, key, section); }
}

static int holds(const char* folder, const char* name) {
    char path[PATH_BYTES];
    return path_exists(path_join(path, folder, name));
}

// config.json of a folder; what it must say is the trainer's concern
static void take_config(Source* s, const char* folder, const char* name) {
    char path[PATH_BYTES];
    json_t* config = read_quietly(folder, name);
    if (config) { json_object_set_new(s->report, "config", config); }
    else if (path_exists(path_join(path, folder, name))) { problem(s, "%s: expected a JSON object", name); }
}

// bytes of the regular files right in a folder, with their names when `list` is an array
static json_int_t folder_bytes(const char* folder, json_t* list) {
    json_int_t sum = 0;
    struct dirent** entries;
    int n = scandir(folder, &entries, NULL, compare_entries_);
    for (int i = 0; i < n; i++) {
        char path[PATH_BYTES];
        struct stat status;
        if (stat(path_join(path, folder, entries[i]->d_name), &status) == 0 && S_ISREG(status.st_mode)) {
            sum += status.st_size;
            json_array_append_new(list, json_pack("{s:s, s:I}", "name", entries[i]->d_name, "bytes", (json_int_t)status.st_size));
        }
        free(entries[i]);
    }
    if (n >= 0) { free(entries); }
    return sum;
}

static void set_kind(Source* s, const char* kind, json_int_t n_bytes) {
    json_object_set_new(s->report, "kind", json_string(kind));
    json_object_set_new(s->report, "bytes", json_integer(n_bytes));
}

// ---- 2. metrics.jsonl ----

enum { N_COLUMNS = 4 };

typedef struct {
    json_int_t n, first_step, last_step, skipped, tokens;
    double loss, val_loss, best, begin, end;  // NAN: none yet
    json_int_t best_step;
} Metrics;

static double number_of(const json_t* record, const char* key) {
    const json_t* value = json_object_get(record, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void metrics_add(Metrics* m, const json_t* record, json_int_t step) {
    double tokens = number_of(record, "tokens"), val_loss = number_of(record, "val_loss"), time_now = number_of(record, "time");
    m->first_step = m->n == 0 ? step : m->first_step;
    m->last_step = step > m->last_step ? step : m->last_step;
    m->skipped += json_is_true(json_object_get(record, "skipped"));
    m->n++;
    if (!isnan(tokens)) {
        m->tokens = (json_int_t)tokens;
        m->loss = number_of(record, "loss");
    }
    if (!isnan(val_loss)) { m->val_loss = val_loss; }
    if (!isnan(val_loss) && !(val_loss >= m->best)) {
        m->best = val_loss;
        m->best_step = step;
    }
    m->begin = isnan(m->begin) ? time_now : m->begin;
    m->end = time_now;
}

// Facts of a run's records, and for comparing the columns that don't depend on time; a last line without its end is left out.
static int metrics_parse(Source* s, const char* text, size_t n_bytes, ErrorText* error) {
    static const char* const names[N_COLUMNS] = {"loss", "norm", "lr", "val_loss"};
    Metrics m = {0, 0, 0, 0, 0, NAN, NAN, NAN, NAN, NAN, 0};
    size_t n_lines = 0;
    for (size_t i = 0; i < n_bytes; i++) { n_lines += text[i] == '\n'; }
    s->columns = (float*)malloc_check(N_COLUMNS * n_lines * sizeof(float), "records");
    const char* line = text;
    for (size_t number = 1; number <= n_lines; number++) {
        const char* end = (const char*)memchr(line, '\n', (size_t)(text + n_bytes - line));
        json_t* record = json_loadb(line, (size_t)(end - line), JSON_REJECT_DUPLICATES, NULL);
        const json_t* step = json_object_get(record, "step");
        line = end + 1;
        if (json_is_integer(step)) {
            for (size_t c = 0; c < N_COLUMNS; c++) { s->columns[c * n_lines + (size_t)m.n] = (float)number_of(record, names[c]); }
            metrics_add(&m, record, json_integer_value(step));
        } else if (!json_object_get(record, "schema")) {
            json_decref(record);
            return error_set(error, "line %zu: expected a record of metrics.jsonl, an object with a \"step\"", number);
        }
        json_decref(record);
    }
    for (size_t c = 0; c < N_COLUMNS; c++) { add_data(s, names[c], DTYPE_F32, s->columns + c * n_lines, (size_t)m.n); }
    fact(s, "records", json_integer(m.n));
    fact(s, "first_step", json_integer(m.first_step));
    fact(s, "last_step", json_integer(m.last_step));
    fact(s, "tokens", json_integer(m.tokens));
    fact(s, "skipped_updates", json_integer(m.skipped));
    fact(s, "last_loss", json_real(m.loss));
    fact(s, "last_val_loss", json_real(m.val_loss));
    fact(s, "best_val_loss", json_real(m.best));
    fact(s, "best_step", isnan(m.best) ? NULL : json_integer(m.best_step));
    fact(s, "seconds", json_real(m.end - m.begin));
    if (text + n_bytes > line) { fact(s, "note", json_string("the last line is not complete: a run was stopped, or still writes")); }
    return 1;
}

// ---- 3. folders ----

static void describe_checkpoint(Source* s, const char* folder) {
    char path[PATH_BYTES], text[64];
    ErrorText error;
    json_t *files = json_array(), *manifest = read_quietly(folder, "manifest.json");
    set_kind(s, "checkpoint", folder_bytes(folder, files));
    snprintf(text, sizeof text, "verified, %zu files", json_array_size(json_object_get(manifest, "files")));
    int verified = checkpoint_verify(folder, &error);
    if (!verified) { problem(s, "%s", error.text); }
    fact(s, "manifest", json_string(verified ? text : error.text));
    take_section(s, manifest, "state");
    take_section(s, manifest, "options");
    take_config(s, folder, "config.json");
    if (!add_safetensors(s, path_join(path, folder, "model.safetensors"), 1, &error)) { problem(s, "model.safetensors: %s", error.text); }
    int n_parameters = s->n_items;
    if (!add_safetensors(s, path_join(path, folder, "optimizer.safetensors"), 0, &error)) { problem(s, "optimizer.safetensors: %s", error.text); }
    fact(s, "optimizer", json_sprintf("%d tensors, AdamW's moments", s->n_items - n_parameters));
    json_object_set_new(s->report, "files", files);
    json_decref(manifest);
}

// one row of the table of a run's checkpoints; NULL: its manifest is gone, so a trainer removes it, or was stopped at that
static json_t* checkpoint_row(Source* s, const char* run, const char* name, int step, int newest, json_int_t best) {
    char folder[PATH_BYTES];
    ErrorText error;
    path_join(folder, run, name);
    int verified = checkpoint_verify(folder, &error);
    if (!verified && !holds(folder, "manifest.json")) { return NULL; }
    if (!verified) { problem(s, "%s: %s", name, error.text); }
    const char* marks = step == newest && step == best ? "newest, best" : step == newest ? "newest" : step == best ? "best" : "";
    return json_pack("{s:s, s:i, s:I, s:s, s:s}", "name", name, "step", step, "bytes", folder_bytes(folder, NULL), "mark", marks,
                     "state", verified ? "verified" : error.text);
}

static void describe_settings(Source* s, const json_t* settings) {
    char* command = string_copy("");
    size_t i, used = 0;
    json_t* word;
    json_array_foreach(json_object_get(settings, "command"), i, word) {
        const char* text = json_is_string(word) ? json_string_value(word) : "?";
        size_t n = strlen(text);
        command = (char*)realloc_check(command, used + n + 2, "command line");
        used += (size_t)sprintf(command + used, "%s%s", i ? " " : "", text);
    }
    fact(s, "command", json_string(command));
    free(command);
    const char* keys[] = {"commit", "build", "compiler", "threads"};
    for (int k = 0; k < 4; k++) { fact(s, keys[k], json_incref(json_object_get(settings, keys[k]))); }
    fact(s, "training_data", json_incref(json_object_get(json_object_get(settings, "train"), "path")));
}

static void describe_run(Source* s, const char* run) {
    char path[PATH_BYTES];
    ErrorText error;
    struct dirent** entries;
    json_t *settings = read_quietly(run, "settings.json"), *rows = json_array();
    if (settings) { describe_settings(s, settings); }
    if (file_map_or_not(&s->file, path_join(path, run, "metrics.jsonl"), &error)) {
        if (!metrics_parse(s, (const char*)s->file.bytes, s->file.n_bytes, &error)) { problem(s, "metrics.jsonl: %s", error.text); }
    }
    int newest = checkpoint_newest(run, -1), n = scandir(run, &entries, NULL, compare_entries_);
    json_int_t best = -1, n_bytes = folder_bytes(run, NULL);
    if (newest >= 0) {
        json_t* manifest = read_quietly(checkpoint_folder(path, run, newest), "manifest.json");
        json_t* step = json_object_get(json_object_get(manifest, "state"), "best_step");
        best = json_is_integer(step) && json_integer_value(step) > 0 ? json_integer_value(step) : -1;
        json_decref(manifest);
    }
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name, *rest = "";
        int step = checkpoint_step_(name, &rest);
        json_t* row = step >= 0 && !*rest ? checkpoint_row(s, run, name, step, newest, best) : NULL;
        n_bytes += json_integer_value(json_object_get(row, "bytes"));
        if (row) { json_array_append_new(rows, row); }
        else if (step >= 0) { fact(s, "unfinished", json_string(name)); }  // step_000200.tmp: being written
        free(entries[i]);
    }
    if (n >= 0) { free(entries); }
    set_kind(s, "run", n_bytes);
    json_object_set_new(s->report, "checkpoints", rows);
    json_decref(settings);
}

// the shards that an index names: every file in this folder, every tensor where the index says
static void add_shards(Source* s, const char* folder, const json_t* index) {
    json_t *places = json_object_get(index, "weight_map"), *found = json_object(), *value;
    const char* name;
    char path[PATH_BYTES];
    ErrorText error;
    json_object_foreach(places, name, value) {
        const char* file = json_string_value(value);
        if (!file || !*file || *file == '.' || strchr(file, '/')) {
            problem(s, "model.safetensors.index.json: \"%.80s\": expected the name of a file in this folder", name);
        } else if (!json_object_get(found, file)) {
            json_object_set_new(found, file, json_true());
            if (!add_safetensors(s, path_join(path, folder, file), 1, &error)) { problem(s, "%s: %s", file, error.text); }
        }
    }
    fact(s, "shards", json_integer((json_int_t)json_object_size(found)));
    json_decref(found);
    json_t* read = json_object();
    for (int i = 0; i < s->n_items; i++) { json_object_set_new(read, s->items[i].t.name, json_string(s->items[i].file)); }
    json_object_foreach(places, name, value) {
        if (!json_equal(value, json_object_get(read, name))) {
            problem(s, "model.safetensors.index.json: tensor \"%.80s\" is not in \"%.80s\"", name, json_string_value(value));
        }
    }
    json_decref(read);
}

static void describe_model_folder(Source* s, const char* folder) {
    char path[PATH_BYTES];
    ErrorText error;
    const char* const names[] = {"model.safetensors", "adapter_model.safetensors"};
    json_t *files = json_array(), *index = read_quietly(folder, "model.safetensors.index.json");
    set_kind(s, "Hugging Face folder", folder_bytes(folder, files));
    take_config(s, folder, holds(folder, "config.json") ? "config.json" : "adapter_config.json");
    if (json_is_object(json_object_get(index, "weight_map"))) { add_shards(s, folder, index); }
    else if (path_exists(path_join(path, folder, "model.safetensors.index.json"))) {
        problem(s, "model.safetensors.index.json: expected a JSON object with a \"weight_map\"");
    }
    for (int i = 0; i < 2 && !index; i++) {
        if (!path_exists(path_join(path, folder, names[i]))) { continue; }
        if (!add_safetensors(s, path, 1, &error)) { problem(s, "%s: %s", names[i], error.text); }
    }
    json_object_set_new(s->report, "files", files);
    json_decref(index);
}

static void describe_folder(Source* s, const char* folder) {
    if (holds(folder, "manifest.json")) { describe_checkpoint(s, folder); }
    else if (holds(folder, "metrics.jsonl") || checkpoint_newest(folder, -1) >= 0) { describe_run(s, folder); }
    else if (holds(folder, "model.safetensors") || holds(folder, "model.safetensors.index.json") || holds(folder, "adapter_model.safetensors")) {
        describe_model_folder(s, folder);
    } else {
        fail_input("%s: expected a run (metrics.jsonl, step_*), a checkpoint (manifest.json) or a Hugging Face model (model.safetensors "
                   "or its index), found none of them in this folder", folder);
    }
}

// ---- 4. files ----

static void describe_bin_model(Source* s) {
    Config c = config_bin(&s->file);
    BinHeader h = llmc_bin_header(&s->file);
    set_kind(s, "llm.c model", (json_int_t)s->file.n_bytes);
    fact(s, "version", json_integer(h.version));
    json_object_set_new(s->report, "config", json_pack("{s:i, s:i, s:i, s:i, s:i, s:i}", "n_positions", c.max_T, "vocab_size", c.V,
                        "padded_vocab_size", c.Vp, "n_layer", c.L, "n_head", c.NH, "n_embd", c.C));
    parameter_table(s->table, c);
    tensors_layout(s->table, N_PARAMETERS);
    for (int i = 0; i < N_PARAMETERS; i++) {
        for (int l = 0; l < tensor_slices(&s->table[i]); l++) {
            char name[NAME_BYTES];
            SafeTensor t;
            memset(&t, 0, sizeof t);
            s->bin_names = (char**)realloc_check(s->bin_names, (size_t)(s->n_bin_names + 1) * sizeof(char*), "names");
            t.name = s->bin_names[s->n_bin_names++] = string_copy(tensor_slice_name(name, sizeof name, &s->table[i], l));
            t.dtype = h.version == 3 ? DTYPE_F32 : DTYPE_BF16;
            t.n_dims = tensor_disk_shape(&s->table[i], t.shape);
            t.n = tensor_disk_elements(&s->table[i]);
            t.n_bytes = t.n * dtype_size(t.dtype);
            Item* item = add_item(s, &t, "", 1);
            item->row = &s->table[i];
            item->layer = l;
        }
    }
}

// llm.c's optimizer state of one rank: header, moments, and the order of the data when it is shuffled
static void describe_bin_state(Source* s) {
    int32_t h[256];
    if (s->file.n_bytes < sizeof h) { fail_input("%s: expected a header of 1024 bytes, found %zu", s->path, s->file.n_bytes); }
    memcpy(h, s->file.bytes, sizeof h);
    if (h[1] != 1) { fail_input("%s: expected version 1 of an optimizer state, found %d", s->path, h[1]); }
    set_kind(s, "llm.c optimizer state", (json_int_t)s->file.n_bytes);
    json_object_set_new(s->report, "state", json_pack("{s:i, s:i, s:i, s:b, s:b}", "step", h[10], "rank", h[3], "ranks", h[2],
                        "master_weights", h[4], "shuffle", h[5]));
    const char* const names[] = {"m", "v", "master_weights"};
    size_t n_arrays = h[4] ? 3 : 2, n = (s->file.n_bytes - sizeof h) / 4 / n_arrays;
    if (h[5]) { return; }  // how long the data's order is stands behind the moments, whose length stands nowhere
    if (n == 0 || s->file.n_bytes != sizeof h + 4 * n_arrays * n) { fail_input("%s: its length is not that of %zu float arrays", s->path, n_arrays); }
    for (size_t i = 0; i < n_arrays; i++) {
        add_data(s, names[i], DTYPE_F32, s->file.bytes + sizeof h + 4 * i * n, n);
        s->items[s->n_items - 1].is_listed = 1;
    }
}

static void describe_tokens(Source* s) {
    TokenShard shard;
    int token_bytes, vocab_size;
    ErrorText error;
    if (!shard_parse_(&shard, &token_bytes, &vocab_size, s->file.bytes, s->file.n_bytes, &error)) { fail_input("%s: %s", s->path, error.text); }
    set_kind(s, "token shard", (json_int_t)s->file.n_bytes);
    fact(s, "tokens", json_integer(shard.n_tokens));
    fact(s, "token_bytes", json_integer(token_bytes));
    fact(s, "largest_token", json_integer(vocab_size - 1));
    add_data(s, "tokens", token_bytes == 2 ? DTYPE_U16 : DTYPE_U32, shard.tokens, (size_t)shard.n_tokens);
}

static void describe_tokenizer_bin(Source* s) {
    Tokenizer t;
    ErrorText error;
    int longest = 0;
    if (!tokenizer_parse_bin_(&t, s->file.bytes, s->file.n_bytes, &error)) { fail_input("%s: %s", s->path, error.text); }
    for (int i = 0; i < t.n_tokens; i++) {
        int n_bytes;
        tokenizer_bytes_of(&t, i, &n_bytes);
        longest = n_bytes > longest ? n_bytes : longest;
    }
    set_kind(s, "llm.c tokenizer", (json_int_t)s->file.n_bytes);
    fact(s, "tokens", json_integer(t.n_tokens));
    fact(s, "end_of_text", json_integer(t.eot));
    fact(s, "longest_token_bytes", json_integer(longest));
    tokenizer_free(&t);
}

static void describe_eval(Source* s) {
    HellaSwag h;
    ErrorText error;
    if (!hellaswag_parse_(&h, s->file.bytes, s->file.n_bytes, &error)) { fail_input("%s: %s", s->path, error.text); }
    set_kind(s, "llm.c evaluation", (json_int_t)s->file.n_bytes);
    fact(s, "examples", json_integer(h.n));
    fact(s, "longest_row", json_integer(h.longest));
    fact(s, "largest_token", json_integer(h.vocab_size_needed - 1));
    hellaswag_free_(&h);
}

static void describe_tokenizer_json(Source* s, const json_t* json) {
    const json_t* model = json_object_get(json, "model");
    const char* const parts[] = {"normalizer", "pre_tokenizer", "post_processor", "decoder"};
    const json_t* vocab = json_object_get(model, "vocab");  // an object for BPE and WordPiece, a list for Unigram
    set_kind(s, "tokenizer.json", (json_int_t)s->file.n_bytes);
    fact(s, "model", json_incref(json_object_get(model, "type")));
    fact(s, "vocabulary", json_integer((json_int_t)(json_is_array(vocab) ? json_array_size(vocab) : json_object_size(vocab))));
    fact(s, "merges", json_integer((json_int_t)json_array_size(json_object_get(model, "merges"))));
    fact(s, "added_tokens", json_integer((json_int_t)json_array_size(json_object_get(json, "added_tokens"))));
    for (int i = 0; i < 4; i++) { fact(s, parts[i], json_incref(json_object_get(json_object_get(json, parts[i]), "type"))); }
}

// of a path in our own hands: its last part is cut off; "." when it has no other
static const char* parent_folder(char* path) {
    char* slash = strrchr(path, '/');
    if (!slash) { return "."; }
    *slash = '\0';
    return path;
}

static void describe_json(Source* s) {
    const char* text = (const char*)s->file.bytes;
    const char* end = (const char*)memchr(text, '\n', s->file.n_bytes);
    json_error_t json_error;
    ErrorText error;
    json_t* line = end ? json_loadb(text, (size_t)(end - text), 0, NULL) : NULL;
    int is_metrics = json_object_get(line, "schema") || (json_object_get(line, "step") && json_object_get(line, "val_loss"));
    json_decref(line);
    if (is_metrics) {
        set_kind(s, "metrics.jsonl", (json_int_t)s->file.n_bytes);
        if (!metrics_parse(s, text, s->file.n_bytes, &error)) { fail_input("%s: %s", s->path, error.text); }
        return;
    }
    json_t* json = json_loadb(text, s->file.n_bytes, JSON_REJECT_DUPLICATES, &json_error);
    if (!json) { fail_input("%s:%d: expected JSON, found: %s", s->path, json_error.line, json_error.text); }
    if (json_object_get(json_object_get(json, "model"), "vocab")) { describe_tokenizer_json(s, json); }
    else if (json_object_get(json, "weight_map")) {  // an index stands for its folder
        char folder[PATH_BYTES];
        snprintf(folder, sizeof folder, "%s", s->path);
        describe_model_folder(s, parent_folder(folder));
    }
    else {
        set_kind(s, "JSON", (json_int_t)s->file.n_bytes);
        json_object_set(s->report, "config", json);
    }
    json_decref(json);
}

static void describe_file(Source* s) {
    int32_t magic = 0;
    ErrorText error;
    file_map(&s->file, s->path);
    if (s->file.n_bytes >= 4) { memcpy(&magic, s->file.bytes, 4); }
    switch (magic) {
        case BIN_MAGIC: describe_bin_model(s); break;
        case 20240328: describe_tokenizer_bin(s); break;
        case 20240520: case 20240801: describe_tokens(s); break;
        case 20240522: describe_eval(s); break;
        case 20240527: describe_bin_state(s); break;
        default:
            if (s->file.n_bytes > 0 && s->file.bytes[0] == '{') { describe_json(s); break; }
            if (!name_ends_in_(s->path, ".safetensors") && (s->file.n_bytes < 9 || s->file.bytes[8] != '{')) {
                const char* other = file_looks_like(s->file.bytes, s->file.n_bytes);
                fail_input("%s: expected safetensors, one of llm.c's .bin files, tokenizer.json or metrics.jsonl, found %s", s->path,
                           other ? other : "something else");
            }
            set_kind(s, "safetensors", (json_int_t)s->file.n_bytes);
            if (!add_safetensors(s, s->path, 1, &error)) { fail_input("%s: %s", s->path, error.text); }
    }
    if (s->n_items == 0) { add_data(s, "bytes", DTYPE_U8, s->file.bytes, s->file.n_bytes); }  // to compare it by
}

// ---- 5. numbers in tensors ----

// an element as a double; exact but for 64-bit integers past 2^53
static double element(Dtype dtype, const unsigned char* from) {
    union { float f; double d; int8_t i8; int16_t i16; uint16_t u16; int32_t i32; uint32_t u32; int64_t i64; uint64_t u64; } x;
    memcpy(&x, from, dtype_size(dtype));
    switch (dtype) {
        case DTYPE_F32: return (double)x.f;
        case DTYPE_F64: return x.d;
        case DTYPE_F16: return (double)safetensors_f16_(x.u16);
        case DTYPE_BF16: return (double)float_from_bits((uint32_t)x.u16 << 16);
        case DTYPE_I8: return x.i8;
        case DTYPE_I16: return x.i16;
        case DTYPE_U16: return x.u16;
        case DTYPE_I32: return x.i32;
        case DTYPE_U32: return x.u32;
        case DTYPE_I64: return (double)x.i64;
        case DTYPE_U64: return (double)x.u64;
        default: return from[0];  // bytes and truth values
    }
}

// FP8, FP4 and complex numbers are compared as bytes
static int has_numbers(Dtype dtype) {
    return dtype >= DTYPE_I16 ? dtype != DTYPE_C64 : dtype == DTYPE_BOOL || dtype == DTYPE_U8 || dtype == DTYPE_I8;
}

// the tensor's bytes as on disk; what has to be turned first is made in *owned, for the caller to free
static const unsigned char* item_bytes(const Source* s, const Item* item, unsigned char** owned) {
    *owned = NULL;
    if (!item->row) { return (const unsigned char*)item->t.data; }
    const Tensor* row = item->row;
    size_t width = dtype_size(item->t.dtype), rows = (size_t)row->disk_rows, columns = (size_t)row->columns, first = 0;
    for (const Tensor* t = s->table; t < row; t++) { first += tensor_elements(t); }
    const unsigned char* from = s->file.bytes + BIN_HEADER_BYTES + width * (first + (size_t)item->layer * tensor_slice_elements(row));
    if (row->on_disk != TRANSPOSED) { return from; }
    *owned = (unsigned char*)malloc_check(item->t.n_bytes, "buffer of a tensor");
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < columns; c++) { memcpy(*owned + (c * rows + r) * width, from + (r * columns + c) * width, width); }
    }
    return *owned;
}

// smallest, largest, mean and standard deviation of the finite elements; how many are not finite
static void add_stats(json_t* entry, Dtype dtype, const unsigned char* bytes, size_t n) {
    double low = INFINITY, high = -INFINITY, sum = 0.0, squares = 0.0;
    json_int_t n_nan = 0, n_inf = 0;
    size_t width = dtype_size(dtype);
    for (size_t i = 0; i < n; i++) {
        double x = element(dtype, bytes + i * width);
        n_nan += isnan(x);
        n_inf += isinf(x);
        if (!isfinite(x)) { continue; }
        low = x < low ? x : low;
        high = x > high ? x : high;
        sum += x;
    }
    double n_finite = (double)n - (double)(n_nan + n_inf), mean = sum / n_finite;
    for (size_t i = 0; i < n; i++) {
        double d = element(dtype, bytes + i * width) - mean;
        squares += isfinite(d) ? d * d : 0.0;
    }
    json_object_set_new(entry, "min", n_finite > 0 ? json_real(low) : json_null());
    json_object_set_new(entry, "max", n_finite > 0 ? json_real(high) : json_null());
    json_object_set_new(entry, "mean", n_finite > 0 ? json_real(mean) : json_null());
    json_object_set_new(entry, "std", n_finite > 0 ? json_real(sqrt(squares / n_finite)) : json_null());
    json_object_set_new(entry, "nan", json_integer(n_nan));
    json_object_set_new(entry, "inf", json_integer(n_inf));
}

static json_t* shape_of(const SafeTensor* t) {
    json_t* shape = json_array();
    for (int i = 0; i < t->n_dims; i++) { json_array_append_new(shape, json_integer((json_int_t)t->shape[i])); }
    return shape;
}

static void add_to(json_t* object, const char* key, json_int_t n) {
    json_object_set_new(object, key, json_integer(json_integer_value(json_object_get(object, key)) + n));
}

static void count_tensor(json_t* totals, const SafeTensor* t) {
    add_to(totals, "tensors", 1);
    add_to(totals, "elements", (json_int_t)t->n);
    add_to(totals, "bytes", (json_int_t)t->n_bytes);
}

// "tensors" and "totals" of the report; what is not listed only with --stats, and then alone
static void describe_tensors(Source* s, int stats) {
    json_t *rows = json_array(), *totals = json_object(), *by_dtype = json_object();
    for (int i = 0; i < s->n_items; i++) {
        const Item* item = &s->items[i];
        const SafeTensor* t = &item->t;
        unsigned char* owned = NULL;
        if (!item->is_listed) { continue; }
        json_t* row = json_pack("{s:s, s:s, s:o, s:I, s:I}", "name", t->name, "dtype", dtype_name(t->dtype), "shape", shape_of(t),
                                "elements", (json_int_t)t->n, "bytes", (json_int_t)t->n_bytes);
        if (json_object_get(facts_of(s), "shards")) { json_object_set_new(row, "file", json_string(item->file)); }
        if (stats && has_numbers(t->dtype)) { add_stats(row, t->dtype, item_bytes(s, item, &owned), t->n); }
        free(owned);
        json_array_append_new(rows, row);
        if (!json_object_get(by_dtype, dtype_name(t->dtype))) { json_object_set_new(by_dtype, dtype_name(t->dtype), json_object()); }
        count_tensor(json_object_get(by_dtype, dtype_name(t->dtype)), t);
        count_tensor(totals, t);
    }
    json_object_set_new(totals, "by_dtype", by_dtype);
    if (json_array_size(rows) > 0) {
        json_object_set(s->report, "tensors", rows);
        json_object_set(s->report, "totals", totals);
    }
    json_decref(rows);
    json_decref(totals);
}

// ---- 6. two of them ----

typedef struct {
    size_t n_differ, first;
    double max_abs, max_rel;  // a NaN against a number makes them NaN
    int64_t max_ulp;          // of F32 against F32
} Difference;

static int both_f32(const SafeTensor* a, const SafeTensor* b) { return a->dtype == DTYPE_F32 && b->dtype == DTYPE_F32; }

static void difference_add(Difference* d, size_t i, double a, double b, int64_t ulp) {
    double apart = fabs(a - b), larger = fabs(a) > fabs(b) ? fabs(a) : fabs(b), relative = apart == 0.0 ? 0.0 : apart / larger;
    if (d->n_differ++ == 0) { d->first = i; }
    if (!(apart <= d->max_abs) && !isnan(d->max_abs)) { d->max_abs = apart; }
    if (!(relative <= d->max_rel) && !isnan(d->max_rel)) { d->max_rel = relative; }
    d->max_ulp = ulp > d->max_ulp ? ulp : d->max_ulp;
}

// Tensors of the same shape; of one dtype they are equal when their bytes are, of two when their values are.
static Difference compare_tensors(const SafeTensor* a, const unsigned char* bytes_a, const SafeTensor* b, const unsigned char* bytes_b) {
    Difference d = {0, 0, 0.0, 0.0, 0};
    int same_dtype = a->dtype == b->dtype, numbers = has_numbers(a->dtype) && has_numbers(b->dtype);
    if (same_dtype && (a->n_bytes == 0 || memcmp(bytes_a, bytes_b, a->n_bytes) == 0)) { return d; }
    if (!numbers) {  // the bytes differ, or their meaning does
        d.n_differ = a->n;
        d.max_abs = d.max_rel = NAN;
        return d;
    }
    size_t width_a = dtype_size(a->dtype), width_b = dtype_size(b->dtype);
    for (size_t i = 0; i < a->n; i++) {
        const unsigned char *at_a = bytes_a + i * width_a, *at_b = bytes_b + i * width_b;
        if (same_dtype && memcmp(at_a, at_b, width_a) == 0) { continue; }
        double x = element(a->dtype, at_a), y = element(b->dtype, at_b);
        int equal = !same_dtype && (x == y || (isnan(x) && isnan(y)));
        int has_ulp = both_f32(a, b) && !isnan(x) && !isnan(y);
        if (!equal) { difference_add(&d, i, x, y, has_ulp ? float_ulps((float)x, (float)y) : 0); }
    }
    return d;
}

// "(3, 5)" of the element with this number, in a tensor's shape
static json_t* index_of(const SafeTensor* t, size_t i) {
    json_t* index = json_array();
    for (int k = t->n_dims - 1; k >= 0; k--) {
        json_array_insert_new(index, 0, json_integer((json_int_t)(i % (size_t)t->shape[k])));
        i /= (size_t)t->shape[k];
    }
    return index;
}

// base models leave "transformer." out of their names
static const char* short_name(const char* name) { return strncmp(name, "transformer.", 12) == 0 ? name + 12 : name; }

// AdamW's, which only checkpoints have
static int is_moment(const Item* item) { return !item->is_listed && *item->file; }

// tokens, records, bytes: one after the other, so two of different lengths can be compared as far as both go
static int is_series(const Item* item) { return !item->is_listed && !*item->file; }

typedef struct {
    json_t *only_a, *only_b, *shapes, *differing, *settings;
    int n_both;
    double max_abs;
    int64_t max_ulp;
    const char* where;  // of max_abs
} Comparison;

static void compare_items(Comparison* c, const Source* a, const Item* x, const Source* b, const Item* y) {
    SafeTensor copy_a = x->t, copy_b = y->t, *t = &copy_a, *u = &copy_b;
    int same_shape = t->n_dims == u->n_dims && memcmp(t->shape, u->shape, sizeof(int64_t) * (size_t)t->n_dims) == 0;
    if (!same_shape || t->dtype != u->dtype) {
        json_array_append_new(c->shapes, json_pack("{s:s, s:s, s:o, s:s, s:o}", "name", t->name, "a_dtype", dtype_name(t->dtype),
                              "a_shape", shape_of(t), "b_dtype", dtype_name(u->dtype), "b_shape", shape_of(u)));
    }
    if (!same_shape && !is_series(x)) { return; }
    t->n = u->n = t->n < u->n ? t->n : u->n;
    t->n_bytes = t->dtype == u->dtype && is_series(x) ? t->n * dtype_size(t->dtype) : t->n_bytes;
    unsigned char *owned_a, *owned_b;
    const unsigned char *bytes_a = item_bytes(a, x, &owned_a), *bytes_b = item_bytes(b, y, &owned_b);
    Difference d = compare_tensors(t, bytes_a, u, bytes_b);
    free(owned_a);
    free(owned_b);
    if (d.n_differ == 0) { return; }
    json_array_append_new(c->differing, json_pack("{s:s, s:I, s:I, s:o, s:o, s:o, s:o}", "name", t->name, "elements", (json_int_t)t->n,
        "differ", (json_int_t)d.n_differ, "max_abs", report_number(d.max_abs), "max_rel", report_number(d.max_rel), "max_ulp",
        both_f32(t, u) ? json_integer(d.max_ulp) : json_null(), "first", index_of(t, d.first)));
    if (!(d.max_abs <= c->max_abs) && !isnan(c->max_abs)) {
        c->max_abs = d.max_abs;
        c->where = t->name;
    }
    c->max_ulp = d.max_ulp > c->max_ulp ? d.max_ulp : c->max_ulp;
}

// What two JSON values say differently, members by their path "options.lr"; two kinds of file need not have the same members.
static void compare_json(json_t* rows, const char* name, const json_t* a, const json_t* b, int same_kind) {
    const char* key;
    json_t* value;
    if (!json_is_object(a) || !json_is_object(b)) {
        int missing = !a || !b, differ = missing ? same_kind : !json_equal((json_t*)a, (json_t*)b);
        if (differ) {
            json_array_append_new(rows, json_pack("{s:s, s:O?, s:O?}", "name", name, "a", (json_t*)a, "b", (json_t*)b));
        }
        return;
    }
    json_t* keys = json_copy((json_t*)a);
    json_object_update_missing(keys, (json_t*)b);
    json_object_foreach(keys, key, value) {
        char inner[512];
        snprintf(inner, sizeof inner, "%s.%s", name, key);
        compare_json(rows, inner, json_object_get(a, key), json_object_get(b, key), same_kind);
    }
    json_decref(keys);
}

static void compare(Comparison* c, const Source* a, const Source* b) {
    json_t* places = json_object();  // name -> number in b
    int same_kind = json_equal(json_object_get(a->report, "kind"), json_object_get(b->report, "kind"));
    for (int i = 0; i < b->n_items; i++) {
        if (same_kind || !is_moment(&b->items[i])) { json_object_set_new(places, short_name(b->items[i].t.name), json_integer(i)); }
    }
    for (int i = 0; i < a->n_items; i++) {
        if (!same_kind && is_moment(&a->items[i])) { continue; }
        const char* name = short_name(a->items[i].t.name);
        json_t* place = json_object_get(places, name);
        if (!place) {
            json_array_append_new(c->only_a, json_string(a->items[i].t.name));
            continue;
        }
        compare_items(c, a, &a->items[i], b, &b->items[json_integer_value(place)]);
        c->n_both++;
        json_object_del(places, name);
    }
    const char* name;
    json_t* place;
    json_object_foreach(places, name, place) {
        json_array_append_new(c->only_b, json_string(b->items[json_integer_value(place)].t.name));
    }
    json_decref(places);
    const char* const sections[] = {"config", "state", "options"};
    for (int i = 0; i < 3; i++) {
        const json_t *x = json_object_get(a->report, sections[i]), *y = json_object_get(b->report, sections[i]);
        if (x && y) { compare_json(c->settings, sections[i], x, y, same_kind); }
    }
}

// ---- 7. printing ----

static void print_json(json_t* json) {
    if (json_dumpf(json, stdout, JSON_INDENT(2)) != 0 || printf("\n") < 0) { fail_run("standard output: %s", strerror(errno)); }
}

static const char* text_of(const json_t* json, const char* key) { return json_string_value(json_object_get(json, key)); }

static void print_title(const char* before, const json_t* report) {
    char* path = report_text("", json_object_get(report, "path"));
    printf("%s%s: %s, %s\n", before, path, text_of(report, "kind"), format_bytes((double)json_integer_value(json_object_get(report, "bytes"))).s);
    free(path);
}

// 148 tensors, 124,439,808 parameters, 474.70 MiB, all F32
static void print_totals(const json_t* totals) {
    const char *dtype, *comma = ":";
    json_t *of_dtype, *by_dtype = json_object_get(totals, "by_dtype");
    char* n = report_text("elements", json_object_get(totals, "elements"));
    printf("\n  %lld tensors, %s parameters, %s", (long long)json_integer_value(json_object_get(totals, "tensors")), n,
           format_bytes((double)json_integer_value(json_object_get(totals, "bytes"))).s);
    json_object_foreach(by_dtype, dtype, of_dtype) {
        double n_bytes = (double)json_integer_value(json_object_get(of_dtype, "bytes"));
        if (json_object_size(by_dtype) == 1) { printf(", all %s", dtype); }
        else { printf("%s %s of %s", comma, format_bytes(n_bytes).s, dtype); }
        comma = ",";
    }
    printf("\n");
    free(n);
}

static void print_tensors(const json_t* report) {
    const json_t *rows = json_object_get(report, "tensors"), *first = json_array_get(rows, 0);
    ReportColumn columns[REPORT_COLUMNS_MAX] = {{"name", "tensor", 0}, {"dtype", "dtype", 0}, {"shape", "shape", 0},
                                                {"elements", "elements", 1}, {"bytes", "size", 1}};
    const ReportColumn stats[] = {{"min", "min", 1}, {"max", "max", 1}, {"mean", "mean", 1}, {"std", "std", 1}, {"nan", "nan", 1}, {"inf", "inf", 1}};
    const ReportColumn file = {"file", "file", 0};
    int with_stats = json_object_get(first, "nan") != NULL, n = with_stats ? 3 : 5;  // then the shape has to stand for the size
    for (int i = 0; i < 6 && with_stats; i++) { columns[n++] = stats[i]; }
    if (json_object_get(first, "file")) { columns[n++] = file; }
    if (!rows) { return; }
    printf("\n");
    report_table(rows, columns, n);
    print_totals(json_object_get(report, "totals"));
}

static void print_report(const json_t* report) {
    const char* const sections[] = {"config", "state", "options", "metadata"};
    const ReportColumn checkpoints[] = {{"name", "checkpoint", 0}, {"step", "step", 1}, {"bytes", "size", 1}, {"state", "state", 0}, {"mark", "mark", 0}};
    const ReportColumn files[] = {{"name", "file", 0}, {"bytes", "size", 1}};
    print_title("", report);
    report_facts(json_object_get(report, "facts"));
    for (int i = 0; i < 4; i++) {
        json_t* section = json_object_get(report, sections[i]);
        json_t* fact_of_it = section ? json_pack("{s:O}", sections[i], section) : NULL;
        if (section) { report_facts(fact_of_it); }
        json_decref(fact_of_it);
    }
    if (json_object_get(report, "checkpoints")) { printf("\n"); report_table(json_object_get(report, "checkpoints"), checkpoints, 5); }
    if (json_object_get(report, "files")) { printf("\n"); report_table(json_object_get(report, "files"), files, 2); }
    print_tensors(report);
}

static void print_only(const char* in, const json_t* names) {
    size_t i;
    json_t* name;
    json_array_foreach(names, i, name) {
        char* text = report_text("", name);
        printf("  only in %s: %s\n", in, text);
        free(text);
    }
}

// which of two, how they differ, and last the line that sums it up
static void print_comparison(const Comparison* c, const Source* a, const Source* b) {
    const ReportColumn shapes[] = {{"name", "tensor", 0}, {"a_dtype", "a", 0}, {"a_shape", "shape", 0}, {"b_dtype", "b", 0}, {"b_shape", "shape", 0}};
    const ReportColumn settings[] = {{"name", "setting", 0}, {"a", "a", 0}, {"b", "b", 0}};
    const ReportColumn differing[] = {{"name", "tensor", 0}, {"differ", "differ", 1}, {"elements", "of", 1}, {"max_abs", "max |a-b|", 1},
                                      {"max_rel", "relative", 1}, {"max_ulp", "ulp", 1}, {"first", "first at", 1}};
    print_title("a  ", a->report);
    print_title("b  ", b->report);
    print_only("a", c->only_a);
    print_only("b", c->only_b);
    if (json_array_size(c->settings) > 0) { printf("\n"); report_table(c->settings, settings, 3); }
    if (json_array_size(c->shapes) > 0) { printf("\n"); report_table(c->shapes, shapes, 5); }
    if (json_array_size(c->differing) > 0) { printf("\n"); report_table(c->differing, differing, 7); }
    size_t n_shapes = json_array_size(c->shapes), n_settings = json_array_size(c->settings);
    printf("\n  %d %s", c->n_both, a->n_items > 0 && is_series(a->items) ? "series" : "tensors");
    if (n_shapes > 0) { printf(", %zu of another shape or dtype", n_shapes); }
    if (c->where) { printf(", %zu differ, max |a-b| %.2g in %s", json_array_size(c->differing), c->max_abs, format_text(c->where).s); }
    else if (n_shapes == 0) { printf(", all equal"); }
    if (c->max_ulp > 0) { printf(", %lld ulp", (long long)c->max_ulp); }
    printf(n_settings > 0 ? ", %zu settings differ\n" : "\n", n_settings);
}

// ---- 8. main ----

static void source_open(Source* s, const char* path) {
    struct stat status;
    char* plain = string_copy(path);
    for (size_t n = strlen(plain); n > 1 && plain[n - 1] == '/'; n--) { plain[n - 1] = '\0'; }
    memset(s, 0, sizeof *s);
    s->path = plain;
    s->report = json_pack("{s:s, s:s, s:i, s:{}}", "path", plain, "kind", "", "bytes", 0, "facts");
    if (!s->report) { fail_input("%s: expected a path in UTF-8", plain); }
    if (stat(plain, &status) != 0) { fail_input("%s: cannot be examined: %s", plain, strerror(errno)); }
    if (S_ISDIR(status.st_mode)) { describe_folder(s, plain); } else { describe_file(s); }
}

static void source_close(Source* s) {
    for (int i = 0; i < s->n_files; i++) {
        safetensors_close(s->files[i]);
        free(s->files[i]);
    }
    for (int i = 0; i < s->n_bin_names; i++) { free(s->bin_names[i]); }
    if (s->file.path) { file_unmap(&s->file); }
    free(s->bin_names);
    free(s->files);
    free(s->items);
    free(s->columns);
    free((char*)s->path);
    json_decref(s->report);
}

static int inspect_one(const char* path, int stats, int as_json) {
    Source s;
    source_open(&s, path);
    describe_tensors(&s, stats);
    json_object_set_new(s.report, "problem", *s.problem ? json_string(s.problem) : json_null());
    if (as_json) { print_json(s.report); } else { print_report(s.report); }
    if (*s.problem) { fail_input("%s: %s", s.path, s.problem); }
    source_close(&s);
    return 0;
}

// a run stands for its newest good checkpoint
static void open_to_compare(Source* s, const char* path) {
    char folder[PATH_BYTES];
    source_open(s, checkpoint_find(folder, path) ? folder : path);
    if (*s->problem) { fail_input("%s: %s", s->path, s->problem); }
}

static int inspect_two(const char* path_a, const char* path_b, int as_json) {
    Source a, b;
    Comparison c = {json_array(), json_array(), json_array(), json_array(), json_array(), 0, 0.0, 0, NULL};
    open_to_compare(&a, path_a);
    open_to_compare(&b, path_b);
    compare(&c, &a, &b);
    int equal = json_array_size(c.only_a) + json_array_size(c.only_b) + json_array_size(c.shapes) + json_array_size(c.differing) +
                json_array_size(c.settings) == 0;
    if (as_json) {
        json_t* report = json_pack("{s:s, s:s, s:b, s:i, s:O, s:O, s:O, s:O, s:O}", "a", a.path, "b", b.path, "equal", equal, "in_both",
                                   c.n_both, "only_in_a", c.only_a, "only_in_b", c.only_b, "shapes", c.shapes, "settings", c.settings,
                                   "differing", c.differing);
        print_json(report);
        json_decref(report);
    } else {
        print_comparison(&c, &a, &b);
    }
    json_t* parts[] = {c.only_a, c.only_b, c.shapes, c.differing, c.settings};
    for (int i = 0; i < 5; i++) { json_decref(parts[i]); }
    source_close(&a);
    source_close(&b);
    return !equal;
}

int main(int argc, char** argv) {
    const char* paths[2] = {NULL, NULL};
    int n_paths = 0, stats = 0, as_json = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--stats") == 0) { stats = 1; }
        else if (strcmp(argv[i], "--json") == 0) { as_json = 1; }
        else if (strcmp(argv[i], "--help") == 0) { printf("%s\n%s", usage, help); return 0; }
        else if (strncmp(argv[i], "--", 2) == 0) { fail_input("%s: unknown option: %s", format_text(argv[i]).s, usage); }
        else if (n_paths == 2) { fail_input("expected one path or two: %s", usage); }
        else { paths[n_paths++] = argv[i]; }
    }
    if (n_paths == 0) { fail_input("expected one path or two: %s", usage); }
    int status = n_paths == 1 ? inspect_one(paths[0], stats, as_json) : inspect_two(paths[0], paths[1], as_json);
    if (fflush(stdout) != 0) { fail_run("standard output: %s", strerror(errno)); }
    return status;
}
