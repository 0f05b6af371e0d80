/*
libFuzzer on the JSON files of a model: model.safetensors.index.json, config.json of GPT-2 and of Mamba, and a checkpoint's
manifest.json. Any bytes are refused with a reason, or every name that was accepted is a plain one and every size within its bounds.
    make build/fuzz/fuzz_json_files
    mkdir -p build/fuzz/corpus_json_files && build/fuzz/fuzz_json_files -max_total_time=60 -max_len=1024 \
        -dict=dev/fuzz/json_files.dict build/fuzz/corpus_json_files dev/fuzz/corpus/json_files
The first byte picks the reader. A manifest is tried as it is, and once more with the right checksum.
*/
#include "llmc/models/gpt2.h"
// the other trainer's names are the same
#define Config MambaConfig
#define Parameters MambaParameters
#define config_make mamba_config_make
#define config_preset mamba_config_preset
#define config_parse mamba_config_parse
#define config_load mamba_config_load
#define config_json mamba_config_json
#define parameter_table mamba_parameter_table
#include "llmc/models/mamba.h"
#undef Config
#undef config_parse

static void require_reason(const ErrorText* error) {
    if (error->text[0] == '\0' || strchr(error->text, '\n')) { __builtin_trap(); }
}

static void require_plain(const char* name) {
    if (!*name || strpbrk(name, "/\\") || strcmp(name, "..") == 0 || strlen(name) > 255) { __builtin_trap(); }
}

static void try_index(const unsigned char* bytes, size_t n_bytes) {
    ShardIndex index;
    ErrorText error = {""};
    if (!safeset_index_parse_(&index, bytes, n_bytes, &error)) {
        require_reason(&error);
        return;
    }
    if (index.n_shards < 1) { __builtin_trap(); }
    for (int i = 0; i < index.n_shards; i++) {
        require_plain(index.shards[i]);
        if (i > 0 && strcmp(index.shards[i - 1], index.shards[i]) >= 0) { __builtin_trap(); }
    }
    safeset_index_free_(&index);
}

static void try_config(const unsigned char* bytes, size_t n_bytes) {
    json_error_t json_error;
    ErrorText error = {""};
    GPT2 model;
    Config c;
    json_t* json = json_parse_bounded((const char*)bytes, n_bytes, JSON_MAX_DEPTH, &json_error);
    if (!json && (json_error.text[0] == '\0' || json_error.line < 0 || (size_t)json_error.position > n_bytes)) { __builtin_trap(); }
    if (json && !config_parse(&c, json, &error)) {
        require_reason(&error);
    } else if (json) {
        gpt2_layout(&model, c);
        if (model.model.n == 0 || c.Vp < c.V || c.C % c.NH != 0) { __builtin_trap(); }
    }
    json_decref(json);
}

// every size fits, and the tensors take less than an address can say
static void try_mamba_config(const unsigned char* bytes, size_t n_bytes) {
    json_error_t json_error;
    ErrorText error = {""};
    MambaConfig c;
    Tensor table[MAX_PARAMETERS];
    json_t* json = json_parse_bounded((const char*)bytes, n_bytes, JSON_MAX_DEPTH, &json_error);
    if (json && !mamba_config_parse(&c, json, &error)) {
        require_reason(&error);
    } else if (json) {
        const int n = mamba_parameter_table(table, &c);
        const size_t elements = tensors_layout(table, n);
        if (n < 11 || n > MAX_PARAMETERS || elements == 0 || elements > (size_t)1 << 58) { __builtin_trap(); }
    }
    json_decref(json);
}

static void try_manifest(const char* text, size_t n_bytes) {
    static SavedFiles files;
    ErrorText error = {""};
    json_t* manifest = manifest_parse_(text, n_bytes, &files, &error);
    if (!manifest) { require_reason(&error); }
    for (int i = 0; manifest && i < files.n; i++) { require_plain(files.file[i].name); }
    json_decref(manifest);
}

// the text of an input with the end of a manifest and its sum
static void try_sealed_manifest(const unsigned char* bytes, size_t n_bytes) {
    size_t n = n_bytes + MANIFEST_END_BYTES;
    char* text = (char*)malloc_check(n + 1, "manifest");
    memcpy(text, bytes, n_bytes);
    memcpy(text + n_bytes, MANIFEST_END, MANIFEST_END_BYTES + 1);
    memcpy(text + n_bytes + MANIFEST_HASH_AT, hex_text(manifest_sum_(text, n)).s, 16);
    try_manifest(text, n);
    free(text);
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    if (n_bytes < 2) { return 0; }
    int kind = *bytes++ % 4;
    n_bytes--;
    unsigned char* exact = (unsigned char*)memcpy(malloc_check(n_bytes, "input"), bytes, n_bytes);
    if (kind == 0) { try_index(exact, n_bytes); }
    if (kind == 1) { try_config(exact, n_bytes); }
    if (kind == 3) { try_mamba_config(exact, n_bytes); }
    if (kind == 2) { try_manifest((const char*)exact, n_bytes); }
    if (kind == 2) { try_sealed_manifest(exact, n_bytes); }
    free(exact);
    return 0;
}
