/*
What a path is, told by its content, and what is in it: a report as JSON, and the tensors behind it. All reading is done by
the parsers of llmc/, so a broken file gets the message that a trainer would give.
    source_open     fail_input for what is not there, not known, or a broken file. In a folder a broken file does not hide
                    the others: the first of them is in `problem`, and what can be read is in the report
    report          "path", "kind", "bytes", "facts"; where they apply "config", "state", "options", "metadata", "files",
                    "checkpoints", "runs" (doc/tools.md)
    items           tensors, in the order of their data; of files that hold none the data as series, to compare it
*/
#ifndef TOOLS_SOURCE_H
#define TOOLS_SOURCE_H
#include "llmc/models/gpt2.h"      // the tensor table of llm.c's .bin
#include "llmc/text/dataloader.h"  // TokenShard
#include "llmc/text/hellaswag.h"   // hellaswag_parse_

typedef struct {
    SafeTensor t;       // its data is NULL for llm.c's .bin: there a slice is turned to its shape on disk when it is read
    const char* file;   // which file of a folder
    int is_listed;      // parameters; not what else a checkpoint has, nor the data of files that hold no tensors
    const Tensor* row;  // of the .bin's tensor table,
    int slice;          // and which of its slices
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
    char** names;       // of tensors that go by another name here than in their file, or have none there
    int n_names;
    float* columns;     // of metrics.jsonl
    char problem[600];  // the first thing that is broken; "" for none
} Source;

static inline json_t* facts_of(Source* s) { return json_object_get(s->report, "facts"); }

// takes the reference; NULL is kept as null
static inline void fact(Source* s, const char* key, json_t* value) {
    json_object_set_new(facts_of(s), key, value ? value : json_null());
}

__attribute__((format(printf, 2, 3)))
static inline void problem(Source* s, const char* format, ...) {
    va_list args;
    if (*s->problem) { return; }
    va_start(args, format);
    vsnprintf(s->problem, sizeof s->problem, format, args);
    va_end(args);
}

static inline Item* add_item(Source* s, const SafeTensor* t, const char* file, int is_listed) {
    if ((s->n_items & (s->n_items - 1)) == 0) {  // a power of two: full
        size_t n_grown = s->n_items ? 2 * (size_t)s->n_items : 1;
        s->items = (Item*)realloc_check(s->items, n_grown * sizeof(Item), "list of tensors");
    }
    Item item = {*t, file, is_listed, NULL, 0};
    s->items[s->n_items] = item;
    return &s->items[s->n_items++];
}

static inline void add_data(Source* s, const char* name, Dtype dtype, const void* data, size_t n) {
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

// takes the text, to be a tensor's name
static inline const char* keep_name(Source* s, char* name) {
    s->names = (char**)realloc_check(s->names, (size_t)(s->n_names + 1) * sizeof(char*), "names");
    return s->names[s->n_names++] = name;
}

static inline void source_close(Source* s) {
    for (int i = 0; i < s->n_files; i++) {
        safetensors_close(s->files[i]);
        free(s->files[i]);
    }
    for (int i = 0; i < s->n_names; i++) { free(s->names[i]); }
    if (s->file.path) { file_unmap(&s->file); }
    free(s->names);
    free(s->files);
    free(s->items);
    free(s->columns);
    free((char*)s->path);
    json_decref(s->report);
}

// the tensors of one .safetensors file; 0: the reason
static inline int add_safetensors(Source* s, const char* path, int is_listed, ErrorText* error) {
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

// the same of a folder, whose problem it is when that fails
static inline void add_tensors_of(Source* s, const char* folder, const char* name, int is_listed) {
    char path[PATH_BYTES];
    ErrorText error;
    if (!add_safetensors(s, path_join(path, folder, name), is_listed, &error)) { problem(s, "%s: %s", name, error.text); }
}

// a JSON object of a folder, NULL without a message when there is none or it is broken
static inline json_t* read_quietly(const char* folder, const char* name) {
    char path[PATH_BYTES];
    ErrorText reason;
    return json_read_or_not(path_join(path, folder, name), &reason);
}

// the same, but what is wrong with one is a problem
static inline json_t* read_object(Source* s, const char* folder, const char* name) {
    char path[PATH_BYTES];
    ErrorText reason;
    if (!path_exists(path_join(path, folder, name))) { return NULL; }
    json_t* json = json_read_or_not(path, &reason);
    if (!json) { problem(s, "%s: %s", name, reason.text); }
    return json;
}

static inline void take_section(Source* s, const json_t* from, const char* key) {
    json_t* section = json_object_get(from, key);
    if (json_is_object(section)) { json_object_set(s->report, key, section); }
}

static inline int holds(const char* folder, const char* name) {
    char path[PATH_BYTES];
    return path_exists(path_join(path, folder, name));
}

// config.json of a folder; what it must say is the trainer's concern
static inline void take_config(Source* s, const char* folder, const char* name) {
    json_t* config = read_object(s, folder, name);
    if (config) { json_object_set_new(s->report, "config", config); }
}

// bytes of the regular files right in a folder, with their names when `list` is an array
static inline json_int_t folder_bytes(const char* folder, json_t* list) {
    json_int_t sum = 0;
    struct dirent** entries;
    int n = scandir(folder, &entries, NULL, file_list_compare_);
    for (int i = 0; i < n; i++) {
        char path[PATH_BYTES];
        struct stat status;
        if (stat(path_join(path, folder, entries[i]->d_name), &status) == 0 && S_ISREG(status.st_mode)) {
            sum += status.st_size;
            json_array_append_new(list, json_pack("{s:s, s:I}", "name", entries[i]->d_name, "bytes",
                                                  (json_int_t)status.st_size));
        }
        free(entries[i]);
    }
    if (n >= 0) { free(entries); }
    return sum;
}

// bytes of a run: its own files and those of its checkpoints
static inline json_int_t run_bytes(const char* run) {
    struct dirent** entries;
    json_int_t sum = folder_bytes(run, NULL);
    const int n = scandir(run, &entries, NULL, file_list_compare_);
    for (int i = 0; i < n; i++) {
        char path[PATH_BYTES];
        const char* rest = "";
        const int is_checkpoint = checkpoint_step_(entries[i]->d_name, &rest) >= 0 && !*rest;
        if (is_checkpoint) { sum += folder_bytes(path_join(path, run, entries[i]->d_name), NULL); }
        free(entries[i]);
    }
    if (n >= 0) { free(entries); }
    return sum;
}

static inline void set_kind(Source* s, const char* kind, json_int_t n_bytes) {
    json_object_set_new(s->report, "kind", json_string(kind));
    json_object_set_new(s->report, "bytes", json_integer(n_bytes));
}

// ---- 1. metrics.jsonl ----

enum { N_COLUMNS = 4 };

typedef struct {
    json_int_t n, first_step, last_step, skipped, tokens;
    double loss, val_loss, best, begin, end;  // NAN: none yet
    json_int_t best_step;
} Metrics;

static inline double number_of(const json_t* record, const char* key) {
    const json_t* value = json_object_get(record, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static inline void metrics_add(Metrics* m, const json_t* record, json_int_t step) {
    const json_t* tokens = json_object_get(record, "tokens");
    double val_loss = number_of(record, "val_loss");
    m->first_step = m->n == 0 ? step : m->first_step;
    m->last_step = step > m->last_step ? step : m->last_step;
    m->skipped += json_is_true(json_object_get(record, "skipped"));
    m->n++;
    if (json_is_integer(tokens)) {  // an update, not a validation
        m->tokens = json_integer_value(tokens);
        m->loss = number_of(record, "loss");
    }
    if (!isnan(val_loss)) { m->val_loss = val_loss; }
    if (!isnan(val_loss) && !(val_loss >= m->best)) {
        m->best = val_loss;
        m->best_step = step;
    }
    m->end = number_of(record, "time");
    m->begin = isnan(m->begin) ? m->end : m->begin;
}

// Facts of a run's records, and the columns that don't depend on time, to compare them; a last line without its end is
// left out.
static inline int metrics_parse(Source* s, const char* text, size_t n_bytes, ErrorText* error) {
    static const char* const names[N_COLUMNS] = {"loss", "norm", "lr", "val_loss"};
    Metrics m = {0, 0, 0, 0, 0, NAN, NAN, NAN, NAN, NAN, 0};
    size_t n_lines = 0;
    for (size_t i = 0; i < n_bytes; i++) { n_lines += text[i] == '\n'; }
    s->columns = (float*)malloc_check(N_COLUMNS * n_lines * sizeof(float), "records");
    const char* line = text;
    json_error_t json_error;
    for (size_t number = 1; number <= n_lines; number++) {
        const char* end = (const char*)memchr(line, '\n', (size_t)(text + n_bytes - line));
        json_t* record = json_parse_bounded(line, (size_t)(end - line), JSON_MAX_DEPTH, &json_error);
        const json_t* step = json_object_get(record, "step");
        line = end + 1;
        if (json_is_integer(step)) {
            for (size_t c = 0; c < N_COLUMNS; c++) {
                s->columns[c * n_lines + (size_t)m.n] = (float)number_of(record, names[c]);
            }
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
    if (text + n_bytes > line) {
        fact(s, "note", json_string("the last line is not complete: a run was stopped, or still writes"));
    }
    return 1;
}

// ---- 2. folders ----

// What a checkpoint has beside parameters and moments, as its manifest lists it: ema.safetensors (llmc/run/save.h) and
// trainer.safetensors (llmc/files/extras.h). Averages have the names of what they are averages of, so "ema." is put
// before them, and so for every other file.
static inline void add_other_tensors(Source* s, const char* folder, const json_t* manifest) {
    size_t k;
    json_t* entry;
    json_array_foreach(json_object_get(manifest, "files"), k, entry) {
        const char* file = json_string_value(json_object_get(entry, "name"));
        if (!file || !safeset_is_shard_name_(file)) { continue; }
        if (strcmp(file, HF_WEIGHTS) == 0 || strcmp(file, "optimizer.safetensors") == 0) { continue; }
        const int n_before = s->n_items;
        char* stem = string_copy(file);
        *strrchr(stem, '.') = '\0';
        add_tensors_of(s, folder, file, 0);
        for (int i = n_before; i < s->n_items; i++) {
            SafeTensor* t = &s->items[i].t;
            const size_t room = strlen(stem) + strlen(t->name) + 2;
            char* name = (char*)malloc_check(room, "name");
            snprintf(name, room, "%s.%s", stem, t->name);
            t->name = keep_name(s, name);
        }
        const int is_ema = strcmp(stem, "ema") == 0, n = s->n_items - n_before;
        char key[NAME_BYTES];
        snprintf(key, sizeof key, "%s_tensors", stem);
        if (is_ema) { fact(s, "averages", json_sprintf("%d tensor%s, of the weights (--ema)", n, n == 1 ? "" : "s")); }
        else { fact(s, key, json_integer(n)); }
        free(stem);
    }
}

static inline void describe_checkpoint(Source* s, const char* folder) {
    char text[64];
    ErrorText error;
    json_t *files = json_array(), *manifest = read_quietly(folder, "manifest.json");
    set_kind(s, "checkpoint", folder_bytes(folder, files));
    const size_t n = json_array_size(json_object_get(manifest, "files"));
    snprintf(text, sizeof text, "verified, %zu file%s", n, n == 1 ? "" : "s");
    int verified = checkpoint_verify(folder, &error);
    if (!verified) { problem(s, "%s", error.text); }
    fact(s, "manifest", json_string(verified ? text : error.text));
    take_section(s, manifest, "state");
    take_section(s, manifest, "options");
    take_config(s, folder, "config.json");
    add_tensors_of(s, folder, HF_WEIGHTS, 1);
    int n_parameters = s->n_items;
    add_tensors_of(s, folder, "optimizer.safetensors", 0);
    fact(s, "optimizer", json_sprintf("%d tensors, AdamW's moments", s->n_items - n_parameters));
    add_other_tensors(s, folder, manifest);
    json_object_set_new(s->report, "files", files);
    json_decref(manifest);
}

// one row of the table of a run's checkpoints; NULL: its manifest is gone, so a trainer removes it, or was stopped at that
static inline json_t* checkpoint_row(Source* s, const char* run, const char* name, int step, int newest, json_int_t best) {
    char folder[PATH_BYTES];
    ErrorText error;
    path_join(folder, run, name);
    int verified = checkpoint_verify(folder, &error);
    if (!verified && !holds(folder, "manifest.json")) { return NULL; }
    if (!verified) { problem(s, "%s: %s", name, error.text); }
    const char* mark = step == newest ? "newest" : "";
    if (step == best) { mark = step == newest ? "newest, best" : "best"; }
    return json_pack("{s:s, s:i, s:I, s:s, s:s}", "name", name, "step", step, "bytes", folder_bytes(folder, NULL),
                     "state", verified ? "verified" : error.text, "mark", mark);
}

static inline void describe_settings(Source* s, const json_t* settings) {
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

static inline void describe_run(Source* s, const char* run) {
    char path[PATH_BYTES];
    ErrorText error;
    struct dirent** entries;
    json_t *settings = read_object(s, run, "settings.json"), *rows = json_array();
    if (settings) { describe_settings(s, settings); }
    int has_metrics = file_map_or_not(&s->file, path_join(path, run, "metrics.jsonl"), &error);
    if (has_metrics && !metrics_parse(s, (const char*)s->file.bytes, s->file.n_bytes, &error)) {
        problem(s, "metrics.jsonl: %s", error.text);
    }
    int newest = checkpoint_newest(run, -1), n = scandir(run, &entries, NULL, file_list_compare_);
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
    if (json_array_size(rows) == 0) { fact(s, "checkpoints", json_string("none yet")); }
    json_object_set_new(s->report, "checkpoints", rows);
    json_decref(settings);
}

// the shards that an index names: every file in this folder, every tensor where the index says
static inline void add_shards(Source* s, const char* folder, const json_t* index) {
    json_t *places = json_object_get(index, "weight_map"), *found = json_object(), *value;
    const char* name;
    json_object_foreach(places, name, value) {
        const char* file = json_string_value(value);
        if (!file || !safeset_is_shard_name_(file)) {
            problem(s, HF_INDEX ": \"%.80s\": expected the name of a file in this folder", name);
        } else if (!json_object_get(found, file)) {
            json_object_set_new(found, file, json_true());
            add_tensors_of(s, folder, file, 1);
        }
    }
    fact(s, "shards", json_integer((json_int_t)json_object_size(found)));
    json_decref(found);
    json_t* read = json_object();
    for (int i = 0; i < s->n_items; i++) { json_object_set_new(read, s->items[i].t.name, json_string(s->items[i].file)); }
    json_object_foreach(places, name, value) {
        if (!json_equal(value, json_object_get(read, name))) {
            problem(s, HF_INDEX ": tensor \"%.80s\" is not in \"%.80s\"", name,
                    json_string_value(value));
        }
    }
    json_decref(read);
}

static inline void describe_model_folder(Source* s, const char* folder) {
    const char* const names[] = {HF_WEIGHTS, "adapter_model.safetensors"};
    json_t *files = json_array(), *index = read_object(s, folder, HF_INDEX);
    set_kind(s, "Hugging Face folder", folder_bytes(folder, files));
    take_config(s, folder, holds(folder, "config.json") ? "config.json" : "adapter_config.json");
    if (json_is_object(json_object_get(index, "weight_map"))) { add_shards(s, folder, index); }
    else if (holds(folder, HF_INDEX)) {
        problem(s, HF_INDEX ": expected a JSON object with a \"weight_map\"");
    }
    for (int i = 0; i < 2 && !index; i++) {
        if (holds(folder, names[i])) { add_tensors_of(s, folder, names[i], 1); }
    }
    json_object_set_new(s->report, "files", files);
    json_decref(index);
}

static inline int is_run(const char* folder) { return holds(folder, "metrics.jsonl") || checkpoint_newest(folder, -1) >= 0; }

// one row of the table of a folder's runs. Checkpoints are not read: `inspect RUN` does that
static inline json_t* run_row(Source* s, const char* name, const char* run) {
    char path[PATH_BYTES];
    ErrorText error;
    Source one;
    memset(&one, 0, sizeof one);
    one.report = json_pack("{s:{}}", "facts");
    const int newest = checkpoint_newest(run, -1), has_metrics = holds(run, "metrics.jsonl");
    const int good = !has_metrics || (file_map_or_not(&one.file, path_join(path, run, "metrics.jsonl"), &error) &&
                                      metrics_parse(&one, (const char*)one.file.bytes, one.file.n_bytes, &error));
    if (!good) { problem(s, "%s: metrics.jsonl: %s", name, error.text); }
    json_t* row = json_pack("{s:s, s:s}", "name", name, "checkpoint",
                            newest >= 0 ? strrchr(checkpoint_folder(path, run, newest), '/') + 1 : "none yet");
    const char* const keys[] = {"last_step", "tokens", "last_loss", "last_val_loss", "best_val_loss"};
    for (int k = 0; k < 5; k++) { json_object_set(row, keys[k], json_object_get(facts_of(&one), keys[k])); }
    source_close(&one);
    return row;
}

// a folder with runs right in it, runs/ of a trainer's default --run; 0: there are none
static inline int describe_runs(Source* s, const char* folder) {
    struct dirent** entries;
    json_t* rows = json_array();
    const int n = scandir(folder, &entries, NULL, file_list_compare_);
    json_int_t n_bytes = 0;
    for (int i = 0; i < n; i++) {
        char path[PATH_BYTES];
        const char* name = entries[i]->d_name;
        char* run = string_copy(path_join(path, folder, name));
        if (*name != '.' && is_run(run)) {
            json_array_append_new(rows, run_row(s, name, run));
            n_bytes += run_bytes(run);
        }
        free(run);
        free(entries[i]);
    }
    if (n >= 0) { free(entries); }
    const int n_runs = (int)json_array_size(rows);
    set_kind(s, "folder of runs", n_bytes);
    if (n_runs > 0) { json_object_set(s->report, "runs", rows); }
    json_decref(rows);
    return n_runs;
}

// a tokenizer's folder: its tokenizer.json and no model
static inline int is_tokenizer_folder(const char* folder) {
    const char* const others[] = {"manifest.json", HF_WEIGHTS, HF_INDEX, "adapter_model.safetensors"};
    for (int i = 0; i < 4; i++) {
        if (holds(folder, others[i])) { return 0; }
    }
    return holds(folder, "tokenizer.json") && !is_run(folder);
}

static inline void describe_folder(Source* s, const char* folder) {
    if (holds(folder, "manifest.json")) { describe_checkpoint(s, folder); }
    else if (is_run(folder)) { describe_run(s, folder); }
    else if (holds(folder, HF_WEIGHTS) || holds(folder, HF_INDEX) ||
             holds(folder, "adapter_model.safetensors")) {
        describe_model_folder(s, folder);
    } else if (!describe_runs(s, folder)) {
        fail_input("%s: expected a run (metrics.jsonl, step_*) or a folder of runs, a checkpoint (manifest.json), a Hugging "
                   "Face model (model.safetensors or its index) or tokenizer.json, found none of them in this folder",
                   folder);
    }
}

// ---- 3. files ----

static inline void describe_bin_model(Source* s) {
    Config c;
    BinHeader h;
    ErrorText error;
    int good = config_parse_bin(&c, s->file.bytes, s->file.n_bytes, &error) && llmc_bin_parse_(&h, s->file.bytes, s->file.n_bytes, &error);
    if (!good) { fail_input("%s: %s", s->path, error.text); }
    set_kind(s, "llm.c model", (json_int_t)s->file.n_bytes);
    fact(s, "version", json_integer(h.version));
    json_t* config = json_pack("{s:i, s:i, s:i, s:i, s:i, s:i}", "n_positions", c.max_T, "vocab_size", c.V,
                               "padded_vocab_size", c.Vp, "n_layer", c.L, "n_head", c.NH, "n_embd", c.C);
    json_object_set_new(s->report, "config", config);
    parameter_table(s->table, c);
    tensors_layout(s->table, N_PARAMETERS);
    for (int i = 0; i < N_PARAMETERS; i++) {
        for (int l = 0; l < tensor_slices(&s->table[i]); l++) {
            char name[NAME_BYTES];
            SafeTensor t;
            memset(&t, 0, sizeof t);
            t.name = keep_name(s, string_copy(tensor_slice_name(name, sizeof name, &s->table[i], l)));
            t.dtype = h.version == 3 ? DTYPE_F32 : DTYPE_BF16;
            t.n_dims = tensor_disk_shape(&s->table[i], t.shape);
            t.n = tensor_disk_elements(&s->table[i]);
            t.n_bytes = t.n * dtype_size(t.dtype);
            Item* item = add_item(s, &t, "", 1);
            item->row = &s->table[i];
            item->slice = l;
        }
    }
}

// llm.c's optimizer state of one rank: header, moments, and the order of the data when it is shuffled
static inline void describe_bin_state(Source* s) {
    int32_t h[256];
    if (s->file.n_bytes < sizeof h) {
        fail_input("%s: expected a header of 1024 bytes, found %zu", s->path, s->file.n_bytes);
    }
    memcpy(h, s->file.bytes, sizeof h);
    if (h[1] != 1) { fail_input("%s: expected version 1 of an optimizer state, found %d", s->path, h[1]); }
    set_kind(s, "llm.c optimizer state", (json_int_t)s->file.n_bytes);
    json_t* state = json_pack("{s:i, s:i, s:i, s:b, s:b}", "step", h[10], "rank", h[3], "ranks", h[2], "master_weights", h[4],
                              "shuffle", h[5]);
    json_object_set_new(s->report, "state", state);
    const char* const names[] = {"m", "v", "master_weights"};
    size_t n_arrays = h[4] ? 3 : 2, n = (s->file.n_bytes - sizeof h) / 4 / n_arrays;
    if (h[5]) { return; }  // how long the data's order is stands behind the moments, whose length stands nowhere
    if (n == 0 || s->file.n_bytes != sizeof h + 4 * n_arrays * n) {
        fail_input("%s: expected %zu arrays of float32 of the same length, found %zu bytes", s->path, n_arrays,
                   s->file.n_bytes - sizeof h);
    }
    for (size_t i = 0; i < n_arrays; i++) {
        add_data(s, names[i], DTYPE_F32, s->file.bytes + sizeof h + 4 * i * n, n);
        s->items[s->n_items - 1].is_listed = 1;
    }
}

static inline void describe_tokens(Source* s) {
    TokenShard shard;
    int token_bytes = 0, vocab_size = 0;
    ErrorText error;
    memset(&shard, 0, sizeof shard);
    if (!tokens_parse_shard_(&shard, &token_bytes, &vocab_size, s->file.bytes, s->file.n_bytes, &error)) {
        fail_input("%s: %s", s->path, error.text);
    }
    set_kind(s, "token shard", (json_int_t)s->file.n_bytes);
    fact(s, "tokens", json_integer(shard.n_tokens));
    fact(s, "token_bytes", json_integer(token_bytes));
    fact(s, "largest_token", json_integer(vocab_size - 1));
    add_data(s, "tokens", token_bytes == 2 ? DTYPE_U16 : DTYPE_U32, shard.tokens, (size_t)shard.n_tokens);
}

static inline void describe_tokenizer_bin(Source* s) {
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

static inline void describe_eval(Source* s) {
    HellaSwag h;
    ErrorText error;
    if (!hellaswag_parse_(&h, s->file.bytes, s->file.n_bytes, &error)) { fail_input("%s: %s", s->path, error.text); }
    set_kind(s, "llm.c evaluation", (json_int_t)s->file.n_bytes);
    fact(s, "examples", json_integer(h.n));
    fact(s, "longest_row", json_integer(h.longest));
    fact(s, "largest_token", json_integer(h.vocab_size_needed - 1));
    hellaswag_free_(&h);
}

static inline void describe_tokenizer_json(Source* s, const json_t* json) {
    const json_t* model = json_object_get(json, "model");
    const char* const parts[] = {"normalizer", "pre_tokenizer", "post_processor", "decoder"};
    const json_t* vocab = json_object_get(model, "vocab");  // an object for BPE and WordPiece, a list for Unigram
    set_kind(s, "tokenizer.json", (json_int_t)s->file.n_bytes);
    const json_t* type = json_object_get(model, "type");
    fact(s, "model", json_is_string(type) ? json_incref((json_t*)type) : json_string("BPE"));  // GPT-2's own file does not say it
    size_t n_vocab = json_is_array(vocab) ? json_array_size(vocab) : json_object_size(vocab);
    fact(s, "vocabulary", json_integer((json_int_t)n_vocab));
    fact(s, "merges", json_integer((json_int_t)json_array_size(json_object_get(model, "merges"))));
    fact(s, "added_tokens", json_integer((json_int_t)json_array_size(json_object_get(json, "added_tokens"))));
    for (int i = 0; i < 4; i++) {
        fact(s, parts[i], json_incref(json_object_get(json_object_get(json, parts[i]), "type")));
    }
}

// of a path in our own hands: its last part is cut off; "." when it has no other
static inline const char* parent_folder(char* path) {
    char* slash = strrchr(path, '/');
    if (!slash) { return "."; }
    *slash = '\0';
    return path;
}

static inline void describe_json(Source* s) {
    const char* text = (const char*)s->file.bytes;
    const char* end = (const char*)memchr(text, '\n', s->file.n_bytes);
    json_error_t json_error;
    ErrorText error;
    json_t* line = end ? json_parse_bounded(text, (size_t)(end - text), JSON_MAX_DEPTH, &json_error) : NULL;
    int is_record = json_object_get(line, "step") && json_object_get(line, "val_loss");
    int is_metrics = is_record || json_object_get(line, "schema");
    json_decref(line);
    if (is_metrics) {
        set_kind(s, "metrics.jsonl", (json_int_t)s->file.n_bytes);
        if (!metrics_parse(s, text, s->file.n_bytes, &error)) { fail_input("%s: %s", s->path, error.text); }
        return;
    }
    json_t* json = json_parse_bounded(text, s->file.n_bytes, MAX_NESTING, &json_error);
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

static inline void describe_file(Source* s) {
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
            if (!ends_with(s->path, ".safetensors") && (s->file.n_bytes < 9 || s->file.bytes[8] != '{')) {
                const char* other = file_looks_like(s->file.bytes, s->file.n_bytes);
                fail_input("%s: expected safetensors, one of llm.c's .bin files, tokenizer.json or metrics.jsonl, found %s",
                           s->path, other ? other : "something else");
            }
            set_kind(s, "safetensors", (json_int_t)s->file.n_bytes);
            if (!add_safetensors(s, s->path, 1, &error)) { fail_input("%s: %s", s->path, error.text); }
    }
    if (s->n_items == 0) { add_data(s, "bytes", DTYPE_U8, s->file.bytes, s->file.n_bytes); }  // to compare it by
}

// ---- 4. any of them ----

static inline void source_open(Source* s, const char* path) {
    struct stat status;
    char* plain = string_copy(path);
    for (size_t n = strlen(plain); n > 1 && plain[n - 1] == '/'; n--) { plain[n - 1] = '\0'; }
    if (is_tokenizer_folder(plain)) {
        char file[PATH_BYTES];
        path_join(file, plain, "tokenizer.json");
        free(plain);
        plain = string_copy(file);
    }
    memset(s, 0, sizeof *s);
    s->path = plain;
    s->report = json_pack("{s:s, s:s, s:i, s:{}}", "path", plain, "kind", "", "bytes", 0, "facts");
    if (!s->report) { fail_input("%s: expected a path in UTF-8", plain); }
    if (stat(plain, &status) != 0) { fail_input("%s: cannot be examined: %s", plain, strerror(errno)); }
    if (S_ISDIR(status.st_mode)) { describe_folder(s, plain); } else { describe_file(s); }
}

#endif  // TOOLS_SOURCE_H
