/*
Folders of Hugging Face's: finding a model, opening its tensors, and writing such a folder that is whole or not there.
    model_find       what --from means, told apart by content: a run (its newest checkpoint), a folder, a .safetensors
                     file with config.json beside it, or llm.c's .bin
    SafeSet          the tensors of a model, in one file or in many:
                         model.safetensors                  one file, or
                         model.safetensors.index.json       {"weight_map": {"tensor": "name of its shard"}}
                         model-00001-of-00003.safetensors   a shard: a safetensors file in the same folder
    hf_export_begin  a temporary folder next to the target; the caller writes its files into it; option: the one that
                     asks for it, --export-hf of a model or --export-lora of an adapter
    hf_export_end    the temporary folder takes the target's name, durably
An index is believed as little as the files: shards are plain names that end in .safetensors, no link leads out of the
folder (but into blobs/ of Hugging Face's cache, whose folders are made of links), every tensor of the map is in its
shard, and no tensor is in two shards. Tensors that the map leaves out are still found.
Exports: the target may be missing, empty, or an earlier export: config.json, or an adapter's README.md, says that llmc
wrote it, and every file is one that an export writes. The new folder then takes its place in one exchange. Anything
else is refused and not touched.
Errors:  fail_input with the path, what was expected and what was found; fail_run when writing fails.
Source:  huggingface/transformers, save_pretrained and its sharded checkpoints
*/
#ifndef LLMC_HF_FOLDER_H
#define LLMC_HF_FOLDER_H
#include "checkpoint.h"   // checkpoint_find, checkpoint_exchange_, companion_find
#include "llmc_bin.h"     // is_llmc_bin
#include "safetensors.h"  // SafeFile, safetensors_open, safetensors_find

#define HF_WEIGHTS "model.safetensors"
#define HF_INDEX "model.safetensors.index.json"
#define HF_WRITTEN_BY "llmc"  // "written_by" in config.json marks a folder of ours
#define HF_ADAPTER_CONFIG "adapter_config.json"
#define HF_ADAPTER_WEIGHTS "adapter_model.safetensors"
#define HF_ADAPTER_CARD "README.md"  // of ours it says the same, where Hugging Face's readers look for properties
#define HF_CARD_WRITTEN_BY "\nwritten_by: " HF_WRITTEN_BY "\n"

// ---- model.safetensors.index.json ----

enum { HF_MAX_SHARDS = 4096 };

typedef struct {
    json_t* json;         // owns the names
    json_t* weight_map;   // tensor -> shard
    const char** shards;  // each once, sorted
    int n_shards;
} ShardIndex;

static inline int safeset_by_name_(const void* a, const void* b) {
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

static inline void safeset_index_free_(ShardIndex* index) {
    json_decref(index->json);
    free(index->shards);
    memset(index, 0, sizeof *index);
}

// a file's name that cannot lead anywhere else
static inline int safeset_is_shard_name_(const char* name) {
    int plain = *name != '.' && !strpbrk(name, "/\\") && strlen(name) < NAME_MAX && ends_with(name, ".safetensors");
    for (const char* c = name; plain && *c; c++) { plain = (unsigned char)*c >= ' ' && *c != 127; }
    return plain;
}

static inline int safeset_index_shards_(ShardIndex* index, ErrorText* error) {
    const char* tensor;
    json_t* value;
    int n = 0;
    index->shards = (const char**)malloc((json_object_size(index->weight_map) + 1) * sizeof(char*));
    if (!index->shards) { return error_set(error, "no memory for %zu names", json_object_size(index->weight_map)); }
    json_object_foreach(index->weight_map, tensor, value) {
        const char* shard = json_string_value(value);
        if (!shard) {
            return error_set(error, "\"weight_map\": tensor \"%.80s\": expected the name of a file", tensor);
        }
        if (!safeset_is_shard_name_(shard)) {
            return error_set(error,
                             "\"weight_map\": tensor \"%.80s\": expected a file of this folder that ends in "
                             ".safetensors, found \"%.120s\"", tensor, shard);
        }
        index->shards[n++] = shard;
    }
    qsort(index->shards, (size_t)n, sizeof(char*), safeset_by_name_);
    for (int i = 0; i < n; i++) {
        int again = i > 0 && strcmp(index->shards[i], index->shards[i - 1]) == 0;
        if (!again) { index->shards[index->n_shards++] = index->shards[i]; }
    }
    if (index->n_shards > HF_MAX_SHARDS) {
        return error_set(error, "expected at most %d shards, found %d", HF_MAX_SHARDS, index->n_shards);
    }
    return 1;
}

// The index from bytes in memory, without an exit: 1, or 0 with the reason and nothing left to free.
static inline int safeset_index_parse_(ShardIndex* index, const unsigned char* bytes, size_t n_bytes,
                                       ErrorText* error) {
    json_error_t json_error;
    const char* other = file_looks_like(bytes, n_bytes);
    memset(index, 0, sizeof *index);
    index->json = json_parse_bounded((const char*)bytes, n_bytes, JSON_MAX_DEPTH, &json_error);
    index->weight_map = json_object_get(index->json, "weight_map");
    if (!index->json && other) { return error_set(error, "expected JSON, found %s", other); }
    if (!index->json) {
        return error_set(error, "line %d: expected JSON, found: %s", json_error.line, json_error.text);
    }
    int has_map = json_is_object(index->weight_map) && json_object_size(index->weight_map) > 0;
    if (!has_map) {
        error_set(error, "expected \"weight_map\", an object of tensor names and their files, found no such");
    }
    if (has_map && safeset_index_shards_(index, error)) { return 1; }
    safeset_index_free_(index);
    return 0;
}

// ---- the tensors of a model ----

typedef struct {
    char* path;                   // as opened, for messages
    SafeFile* files;
    int n_files;
    const SafeTensor** by_name;   // of all files, sorted
    unsigned char* used;          // marked by who reads them; what is left over can be listed
    int n_tensors;
    size_t n_bytes, n_read;       // of all tensors; so far
    double opened;                // when, by CLOCK_MONOTONIC
} SafeSet;

// a link out of the folder could make any file of this machine part of a model; Hugging Face's cache keeps
// snapshots/<commit>/<name> as links to ../../blobs/<hash>, where blobs is no link itself
static inline void safeset_check_link_(const char* path, const char* folder) {
    char real[PATH_MAX], inside[PATH_MAX], real_parent[PATH_BYTES], snapshots[PATH_BYTES], root[PATH_BYTES];
    char cache[PATH_BYTES];
    struct stat status;
    if (!realpath(path, real) || !realpath(folder, inside)) { return; }  // opening it says why
    path_parent(real_parent, real);
    path_join(cache, path_parent(root, path_parent(snapshots, inside)), "blobs");
    const int in_cache = lstat(cache, &status) == 0 && S_ISDIR(status.st_mode) && strcmp(real_parent, cache) == 0;
    if (strcmp(real_parent, inside) != 0 && !in_cache) {
        fail_input("%s: expected a file of this folder, found a link to %s: put a copy in its place", path, real);
    }
}

static inline void safeset_open_shards_(SafeSet* set, const char* path) {
    MappedFile file;
    ShardIndex index;
    ErrorText error;
    char folder[PATH_BYTES], shard[PATH_BYTES];
    const char* tensor;
    json_t* value;
    file_map(&file, path);
    if (!safeset_index_parse_(&index, file.bytes, file.n_bytes, &error)) { fail_input("%s: %s", path, error.text); }
    path_parent(folder, path);
    set->n_files = index.n_shards;
    set->files = (SafeFile*)malloc_check(sizeof(SafeFile) * (size_t)index.n_shards, "shards");
    for (int i = 0; i < index.n_shards; i++) {
        path_join(shard, folder, index.shards[i]);
        if (!path_exists(shard)) { fail_input("%s: is missing, but %s names it: download it too", shard, path); }
        safeset_check_link_(shard, folder);
        safetensors_open(&set->files[i], shard);
    }
    json_object_foreach(index.weight_map, tensor, value) {
        const char* name = json_string_value(value);
        const char** found = (const char**)bsearch(&name, index.shards, (size_t)index.n_shards, sizeof(char*),
                                                   safeset_by_name_);
        const SafeFile* holder = &set->files[found - index.shards];
        if (!safetensors_find(holder, tensor)) {
            fail_input("%s: expected tensor \"%.80s\" in %s, found none", path, tensor, name);
        }
    }
    safeset_index_free_(&index);
    file_unmap(&file);
}

// `path` is a .safetensors file or the index of a folder of shards
static inline void safeset_open(SafeSet* set, const char* path) {
    memset(set, 0, sizeof *set);
    set->path = string_copy(path);
    if (ends_with(path, ".index.json")) {
        safeset_open_shards_(set, path);
    } else {
        set->n_files = 1;
        set->files = (SafeFile*)malloc_check(sizeof(SafeFile), "file");
        safetensors_open(set->files, path);
    }
    for (int i = 0; i < set->n_files; i++) {
        set->n_tensors += set->files[i].n_tensors;
        set->n_bytes += set->files[i].file.n_bytes;
    }
    set->opened = seconds_now(CLOCK_MONOTONIC);
    set->by_name = (const SafeTensor**)malloc_check(sizeof(SafeTensor*) * (size_t)set->n_tensors, "names of tensors");
    set->used = (unsigned char*)memset(malloc_check((size_t)set->n_tensors, "names of tensors"), 0,
                                       (size_t)set->n_tensors);
    for (int i = 0, n = 0; i < set->n_files; n += set->files[i++].n_tensors) {
        memcpy(set->by_name + n, set->files[i].by_name, sizeof(SafeTensor*) * (size_t)set->files[i].n_tensors);
    }
    qsort(set->by_name, (size_t)set->n_tensors, sizeof(SafeTensor*), safetensors_by_name_);
    for (int i = 1; i < set->n_tensors; i++) {
        if (strcmp(set->by_name[i]->name, set->by_name[i - 1]->name) == 0) {
            fail_input("%s: tensor \"%.80s\" is in two shards: nobody can say which one counts", path,
                       set->by_name[i]->name);
        }
    }
}

// its place in by_name; NULL when no file has it
static inline const SafeTensor** safeset_place_(const SafeSet* set, const char* name) {
    SafeTensor wanted = {name, DTYPE_BOOL, 0, {0}, NULL, 0, 0};
    const SafeTensor* key = &wanted;
    return (const SafeTensor**)bsearch(&key, set->by_name, (size_t)set->n_tensors, sizeof(SafeTensor*),
                                       safetensors_by_name_);
}

// who only looks has not used it
static inline const SafeTensor* safeset_look(const SafeSet* set, const char* name) {
    const SafeTensor** found = safeset_place_(set, name);
    return found ? *found : NULL;
}

// NULL when no file has it; a tensor that is asked for counts as used
static inline const SafeTensor* safeset_find(SafeSet* set, const char* name) {
    const SafeTensor** found = safeset_place_(set, name);
    if (found) { set->used[found - set->by_name] = 1; }
    return found ? *found : NULL;
}

// does the name of any tensor begin so? It is not used by that
static inline int safeset_has_some(const SafeSet* set, const char* begin) {
    for (int i = 0; i < set->n_tensors; i++) {
        if (strncmp(set->by_name[i]->name, begin, strlen(begin)) == 0) { return 1; }
    }
    return 0;
}

// the file in which the tensor is
static inline const MappedFile* safeset_file(const SafeSet* set, const SafeTensor* t) {
    const unsigned char* data = (const unsigned char*)t->data;
    for (int i = 0; i < set->n_files; i++) {
        const MappedFile* f = &set->files[i].file;
        if (data >= f->bytes && data <= f->bytes + f->n_bytes) { return f; }
    }
    assert(0);  // it is of another set
    return NULL;
}

// So many bytes from here on were read: they are no longer memory of this process
static inline void safeset_was_read(SafeSet* set, const MappedFile* file, const void* from, size_t n_bytes) {
    file_behind(file, from, n_bytes);
    set->n_read += n_bytes;
    progress_since(set->opened, "loading", (int64_t)set->n_read, (int64_t)set->n_bytes);
}

// nobody will read so many bytes
static inline void safeset_passes_over(SafeSet* set, size_t n_bytes) { set->n_bytes -= n_bytes; }

// A sum by which another model is told from this one: names, types, shapes, and so many pieces of each tensor and its
// end. Training changes every piece; who changes single numbers by hand is not noticed
static inline uint64_t safeset_sum(const SafeSet* set, size_t n_pieces) {
    const size_t piece = 64;
    XXH3_state_t* sum = XXH3_createState();
    if (!sum) { fail_run("%s: no memory", set->path); }
    XXH3_64bits_reset(sum);
    for (int i = 0; i < set->n_tensors; i++) {
        const SafeTensor* t = set->by_name[i];
        const size_t n_piece = t->n_bytes < piece ? t->n_bytes : piece;
        const size_t step = (t->n_bytes - n_piece) / n_pieces;
        XXH3_64bits_update(sum, t->name, strlen(t->name) + 1);
        XXH3_64bits_update(sum, &t->dtype, sizeof t->dtype);
        XXH3_64bits_update(sum, t->shape, sizeof t->shape[0] * (size_t)t->n_dims);
        for (size_t k = 0; k <= n_pieces; k++) {
            XXH3_64bits_update(sum, (const unsigned char*)t->data + k * step, n_piece);
        }
    }
    const uint64_t digest = XXH3_64bits_digest(sum);
    XXH3_freeState(sum);
    return digest;
}

// is every matrix in bf16?
static inline int safeset_is_bf16(const SafeSet* set) {
    int is_bf16 = 1;
    for (int i = 0; i < set->n_tensors; i++) {
        is_bf16 &= set->by_name[i]->n_dims < 2 || set->by_name[i]->dtype == DTYPE_BF16;
    }
    return is_bf16;
}

// is any tensor of this type?
static inline int safeset_has(const SafeSet* set, Dtype dtype) {
    int found = 0;
    for (int i = 0; i < set->n_tensors && !found; i++) { found = set->by_name[i]->dtype == dtype; }
    return found;
}

// Constants that some versions of transformers kept in their files; models compute them.
static inline int safeset_is_constant_(const char* name) {
    const char* ends[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"};
    int is_constant = 0;
    for (int i = 0; i < 3; i++) { is_constant |= ends_with(name, ends[i]); }
    return is_constant;
}

// one line on stderr with the tensors that nobody asked for: they belong to another model, or to a part that is left
// out
static inline void safeset_report_unused(const SafeSet* set) {
    char names[400] = "";
    int n = 0;
    size_t length = 0;
    for (int i = 0; i < set->n_tensors; i++) {
        if (set->used[i] || safeset_is_constant_(set->by_name[i]->name)) { continue; }
        if (n++ < 4) {
            length += (size_t)snprintf(names + length, sizeof names - length, " %.80s", set->by_name[i]->name);
        }
    }
    if (n > 0) {
        warn_alike("%s: %d tensor%s not used, the model has none of that name:%s%s", set->path, n,
                  n > 1 ? "s are" : " is", names, n > 4 ? " ..." : "");
    }
}

static inline void safeset_close(SafeSet* set) {
    progress_since(set->opened, "loading", 1, 1);  // the bar goes, where there is one
    for (int i = 0; i < set->n_files; i++) { safetensors_close(&set->files[i]); }
    free(set->files);
    free(set->by_name);
    free(set->used);
    free(set->path);
    memset(set, 0, sizeof *set);
}

// ---- what --from means ----

// formats that others read and we do not, by a name's end, with the way out
static inline const char* model_other_format_(const char* name) {
    const struct { const char *end, *what; } formats[] = {
        {"adapter_model.safetensors", "a LoRA adapter: --from takes the model that it was trained on, --lora this "
                                      "folder (where a trainer has it)"},
        {".gguf", "llama.cpp's format, usually quantised: take the Hugging Face folder that it was made from"},
        {".bin", "PyTorch's pickle, which can run any code when it is read: convert it with transformers, "
                 "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"},
        {".pt", "PyTorch's pickle: load it with torch and write it with safetensors.torch.save_file"},
        {".pth", "PyTorch's pickle: load it with torch and write it with safetensors.torch.save_file"},
        {".ckpt", "a checkpoint of PyTorch Lightning or TensorFlow: load it there and write it with "
                  "safetensors.torch.save_file"},
        {".h5", "a Keras file: take the PyTorch or safetensors version of the model"},
        {".msgpack", "a Flax file: take the PyTorch or safetensors version of the model"},
        {".onnx", "an ONNX graph: take the Hugging Face folder that it was made from"},
    };
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        if (ends_with(name, formats[i].end)) { return formats[i].what; }
    }
    return NULL;
}

// an adapter alone: its config may name the model that it needs
__attribute__((noreturn))
static inline void model_fail_adapter_(const char* folder) {
    char path[PATH_BYTES], base[PATH_BYTES] = "DIR";
    ErrorText reason;
    json_t* config = json_read_or_not(path_join(path, folder, HF_ADAPTER_CONFIG), &reason);
    const char* name = json_string_value(json_object_get(config, "base_model_name_or_path"));
    if (name && *name) { snprintf(base, sizeof base, "%s", name); }
    plain_text(base);
    json_decref(config);
    fail_input("%s: expected " HF_WEIGHTS ", found " HF_ADAPTER_WEIGHTS ", a LoRA adapter: --from takes the model "
               "that it was trained on, --lora this folder (where a trainer has it): --from %s --lora %s%s", folder,
               base, folder,
               strcmp(base, "DIR") == 0 ? ", where DIR is that model: " HF_ADAPTER_CONFIG " names none" : "");
}

// a folder with neither model.safetensors nor an index: say what it holds instead
__attribute__((noreturn))
static inline void model_fail_no_weights_(const char* folder) {
    char path[PATH_BYTES], name[NAME_MAX + 1] = "";
    DIR* entries = opendir(folder);
    for (struct dirent* entry; entries && (entry = readdir(entries));) {  // the first by name: readdir has no order
        int earlier = !*name || strcmp(entry->d_name, name) < 0;
        // or llm.c's model
        int is_shard = ends_with(entry->d_name, ".bin") && strncmp(entry->d_name, "pytorch_model", 13) != 0;
        if (model_other_format_(entry->d_name) && !is_shard && earlier) {
            snprintf(name, sizeof name, "%s", entry->d_name);
        }
    }
    if (entries) { closedir(entries); }
    if (strcmp(name, HF_ADAPTER_WEIGHTS) == 0) { model_fail_adapter_(folder); }
    if (*name) { fail_input("%s: expected " HF_WEIGHTS ", found %s, %s", folder, name, model_other_format_(name)); }
    if (!path_exists(path_join(path, folder, "config.json"))) {
        fail_input("%s: expected a run with a checkpoint, or a Hugging Face folder, found neither step_* nor "
                   "config.json in it", folder);
    }
    fail_input("%s: expected " HF_WEIGHTS " or " HF_INDEX " beside config.json, found neither", folder);
}

// status 2 unless it is a file that a model can be in
static inline void model_check_file_(const char* path, int* is_bin) {
    MappedFile file;
    file_map(&file, path);
    const unsigned char* bytes = file.bytes;
    const char* other = file_looks_like(bytes, file.n_bytes);
    int is_gguf = file.n_bytes >= 4 && memcmp(bytes, "GGUF", 4) == 0;
    int is_pickle = file.n_bytes >= 2 && bytes[0] == 0x80 && bytes[1] >= 2 && bytes[1] <= 5;
    // PyTorch's are zip archives
    int is_zip = file.n_bytes >= 4 && memcmp(bytes, "PK\3\4", 4) == 0 && model_other_format_(path);
    if (is_gguf) { other = model_other_format_(".gguf"); }
    if (is_pickle || is_zip) { other = model_other_format_(".pt"); }
    *is_bin = is_llmc_bin(&file);
    uint64_t n_header = 0;  // also of a file that is cut short: opening it says so
    if (file.n_bytes > 8) { memcpy(&n_header, bytes, 8); }
    int is_safetensors = ends_with(path, ".index.json") ||
                         (n_header > 0 && n_header <= SAFETENSORS_MAX_HEADER && bytes[8] == '{');
    if (!*is_bin && !is_safetensors) {
        fail_input("%s: expected a folder, a .safetensors file or llm.c's .bin, found %s", path,
                   other ? other : "something else");
    }
    file_unmap(&file);
}

// `weights`: a .safetensors file, an index or llm.c's .bin; `config`: the config.json that belongs to it, "" for a .bin
static inline void model_find(char weights[PATH_BYTES], char config[PATH_BYTES], const char* from) {
    char folder[PATH_BYTES];
    struct stat status;
    if (stat(from, &status) != 0) {
        fail_input("--from: %s: %s (a preset's name goes to --model)", from, strerror(errno));
    }
    if (!S_ISDIR(status.st_mode)) {
        int is_bin;
        model_check_file_(from, &is_bin);
        snprintf(weights, PATH_BYTES, "%s", from);
        path_join(config, path_parent(folder, from), "config.json");
        if (is_bin) { config[0] = '\0'; }
        return;
    }
    checkpoint_find(folder, from);  // the newest good one of a run, else `from` itself
    path_join(config, folder, "config.json");
    if (path_exists(path_join(weights, folder, HF_WEIGHTS))) {
        safeset_check_link_(weights, folder);
        return;
    }
    if (!path_exists(path_join(weights, folder, HF_INDEX))) { model_fail_no_weights_(folder); }
}

// the tokenizer.json beside a config.json, "" where there is none
static inline const char* model_tokenizer(char path[PATH_BYTES], const char* config) {
    char folder[PATH_BYTES];
    int found = *config && path_exists(path_join(path, path_parent(folder, config), "tokenizer.json"));
    return found ? path : "";
}

// ---- writing a folder ----

// model-00003-of-00012.safetensors
static inline int hf_export_is_shard_(const char* name) {
    int n = 0, of = 0, end = 0;
    return sscanf(name, "model-%5d-of-%5d.safetensors%n", &n, &of, &end) == 2 && end > 0 && name[end] == '\0';
}

static inline int hf_export_is_file_(const char* name) {
    const char* names[] = {".", "..", "config.json", "tokenizer.json", HF_WEIGHTS, HF_INDEX, HF_ADAPTER_CONFIG,
                           HF_ADAPTER_WEIGHTS, HF_ADAPTER_CARD};
    int known = hf_export_is_shard_(name) || companion_find(name) >= 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) { known |= strcmp(name, names[i]) == 0; }
    return known;
}

// is README.md the card of an adapter that we wrote?
static inline int hf_export_is_our_adapter_(const char* folder) {
    char path[PATH_BYTES];
    MappedFile file;
    ErrorText reason;
    if (!file_map_or_not(&file, path_join(path, folder, HF_ADAPTER_CARD), &reason)) { return 0; }
    const int is_ours = memmem(file.bytes, file.n_bytes, HF_CARD_WRITTEN_BY, strlen(HF_CARD_WRITTEN_BY)) != NULL;
    file_unmap(&file);
    return is_ours;
}

// the first file in `folder` that no export writes, or "" when there is none; *n counts those that it writes
static inline const char* hf_export_foreign_file_(char name[NAME_MAX + 1], const char* folder, int* n) {
    DIR* entries = opendir(folder);
    *name = '\0';
    *n = 0;
    if (!entries) { fail_input("%s: cannot be opened: %s", folder, strerror(errno)); }
    for (struct dirent* entry; (entry = readdir(entries));) {
        const int is_card = strcmp(entry->d_name, HF_ADAPTER_CARD) == 0;
        const int known = hf_export_is_file_(entry->d_name) && (!is_card || hf_export_is_our_adapter_(folder));
        if (!known) { snprintf(name, NAME_MAX + 1, "%s", entry->d_name); }
        *n += known && entry->d_name[0] != '.';
    }
    closedir(entries);
    return name;
}

// does config.json in this folder of n files say that we wrote it? One that ends too soon is what an export has begun
// with that was killed, when it is alone in a temporary folder
static inline int hf_export_is_ours_(const char* folder, int n, int is_temporary) {
    const JsonBudget most = {JSON_READ_BYTES, JSON_MAX_DEPTH, JSON_READ_MARKS, 0};
    char path[PATH_BYTES];
    MappedFile file;
    ErrorText reason;
    json_error_t error;
    if (!file_map_or_not(&file, path_join(path, folder, "config.json"), &reason)) {
        return hf_export_is_our_adapter_(folder);
    }
    json_t* config = json_parse_within((const char*)file.bytes, file.n_bytes, &most, &error);
    const char* writer = json_string_value(json_object_get(config, "written_by"));
    const int is_begun = is_temporary && n == 1 && json_error_code(&error) == json_error_premature_end_of_input;
    const int is_ours = config ? writer && strcmp(writer, HF_WRITTEN_BY) == 0 : is_begun;
    json_decref(config);
    file_unmap(&file);
    return is_ours;
}

// may what stands at this name give way to an export? Nothing, an empty folder, or what an export has left.
// role: of a temporary folder, why it has to, for messages; else ""
static inline void hf_export_check_(const char* option, const char* folder, const char* role) {
    char foreign[NAME_MAX + 1];
    struct stat status;
    int n;
    if (lstat(folder, &status) != 0) {
        if (errno != ENOENT) { fail_input("--%s: %s: %s", option, folder, strerror(errno)); }
        return;
    }
    if (S_ISLNK(status.st_mode)) {
        fail_input("--%s: %s: expected a folder, found a link: name the folder that it leads to", option, folder);
    }
    if (!S_ISDIR(status.st_mode)) { fail_input("--%s: %s: expected a folder, found a file", option, folder); }
    if (*hf_export_foreign_file_(foreign, folder, &n)) {
        fail_input("--%s: %s: %sholds %s, which no export writes: choose another folder", option, folder, role,
                   foreign);
    }
    if (n > 0 && !hf_export_is_ours_(folder, n, *role != '\0')) {
        fail_input("--%s: %s: %sholds a model that this program did not write: choose another folder", option, folder,
                   role);
    }
}

// where an export is written before it is whole: `folder`.tmp
static inline const char* hf_export_temporary(char temporary[PATH_BYTES], const char* folder) {
    char name[PATH_BYTES];
    snprintf(name, sizeof name, "%s", folder);
    for (size_t length = strlen(name); length > 1 && name[length - 1] == '/'; length--) { name[length - 1] = '\0'; }
    return temporary_path(temporary, name);
}

// May an export take this name? Called before the work begins, and again before it ends.
static inline void hf_export_check(const char* option, const char* folder) {
    char temporary[PATH_BYTES];
    hf_export_check_(option, folder, "");
    hf_export_check_(option, hf_export_temporary(temporary, folder), "needed as a temporary folder, but ");
}

// empty a folder that hf_export_check has let pass
static inline void hf_export_empty_(const char* folder) {
    char path[PATH_BYTES];
    DIR* entries = opendir(folder);
    for (struct dirent* entry; entries && (entry = readdir(entries));) {
        if (entry->d_name[0] != '.' && hf_export_is_file_(entry->d_name)) {
            unlink(path_join(path, folder, entry->d_name));
        }
    }
    if (entries) { closedir(entries); }
}

static inline void hf_export_remove_(const char* folder) {
    hf_export_empty_(folder);
    if (rmdir(folder) != 0) { fail_run("%s: cannot be removed: %s", folder, strerror(errno)); }
}

// The folder to write n_bytes into: `folder`.tmp, empty; what an interrupted export left there is removed. Returns its
// descriptor, which hf_export_end takes: as long as it is open no other process exports under this name
static inline int hf_export_begin(char temporary[PATH_BYTES], const char* option, const char* folder,
                                  double n_bytes) {
    hf_export_check(option, folder);
    make_folder(hf_export_temporary(temporary, folder));
    const int lock = temporary_take(temporary, folder, O_RDONLY | O_DIRECTORY);
    if (lock < 0) { fail_run("%s: cannot be opened: %s", temporary, strerror(errno)); }
    hf_export_check(option, folder);  // what was there a moment ago may have been another's
    hf_export_empty_(temporary);
    const double n_free = disk_free(folder);
    if (n_free >= 0.0 && n_free < n_bytes) {
        rmdir(temporary);
        fail_run("--%s: %s: the model takes %s, the disk has %s free", option, folder, format_bytes(n_bytes).s,
                 format_bytes(n_free).s);
    }
    return lock;
}

static inline void hf_export_end(int lock, const char* temporary, const char* option, const char* folder) {
    path_sync(temporary);
    hf_export_check_(option, folder, "");  // somebody may have put something there meanwhile
    int exists = path_exists(folder);
    // the earlier folder will have the temporary name until it is removed: nobody may begin in it
    const int earlier = exists ? temporary_take(folder, folder, O_RDONLY | O_DIRECTORY) : -1;
    if (!file_has_name(lock, temporary)) {
        fail_run("%s: another process has removed or replaced it: %s is not written", temporary, folder);
    }
    int done = exists ? checkpoint_exchange_(temporary, folder) : rename(temporary, folder) == 0;
    if (!done) { fail_run("%s: cannot be renamed to %s: %s", temporary, folder, strerror(errno)); }
    parent_sync(folder);
    if (exists) { hf_export_remove_(temporary); }  // the earlier folder has this name now
    if (earlier >= 0) { close(earlier); }
    close(lock);
    printf("wrote %s\n", folder);
}
#endif  // LLMC_HF_FOLDER_H
