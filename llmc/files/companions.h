/*
Companions: files of a Hugging Face folder that nothing here reads and transformers needs: how a text is tokenised there
(tokenizer_config.json, the chat template, ...), how a model generates (generation_config.json), and how images become
patches (preprocessor_config.json, ...). They are read when a run begins, for the folder may be gone when it ends, and
go along as they are into every checkpoint and export.
    companions_read_model, companions_read_tokenizer   those of a folder: how the model generates; of its tokenizer
    companions_save    into the folder of a model
    companions_have    did this one come along? Else somebody has to write it
    companions_put     this one has other bytes from now on
Errors: fail_input for one that is no regular file, above COMPANION_MAX_BYTES, or a link out of the folder: what it
        leads to would be published with the model. fail_run when writing fails.
Source: huggingface/transformers 5.23, the names in tokenization_utils_base.py and utils/__init__.py
*/
#ifndef LLMC_COMPANIONS_H
#define LLMC_COMPANIONS_H
#include "hf_folder.h"  // safeset_check_link_; checkpoint.h: companion_name, SavedFiles

enum { COMPANION_MAX_BYTES = 16 << 20 };

typedef struct {
    char* bytes[N_COMPANIONS];  // NULL: the model has none of this name
    size_t n_bytes[N_COMPANIONS];
} Companions;

static inline void companion_read_(Companions* c, int i, const char* folder) {
    MappedFile file;
    char path[PATH_BYTES];
    if (!path_exists(path_join(path, folder, companion_name(i)))) { return; }
    safeset_check_link_(path, folder);
    file_map(&file, path);
    if (file.n_bytes > COMPANION_MAX_BYTES) {
        fail_input("%s: %zu bytes, expected at most %d in a file that goes along with the model: take it out of the "
                   "folder",
                   path, file.n_bytes, COMPANION_MAX_BYTES);
    }
    free(c->bytes[i]);
    c->bytes[i] = (char*)malloc_check(file.n_bytes + 1, companion_name(i));
    memcpy(c->bytes[i], file.bytes, file.n_bytes);
    c->n_bytes[i] = file.n_bytes;
    file_unmap(&file);
}

// how the model generates, and what it makes of images
static inline void companions_read_model(Companions* c, const char* folder) {
    for (int i = 0; i < N_MODEL_COMPANIONS; i++) { companion_read_(c, i, folder); }
}

// what belongs to its tokenizer
static inline void companions_read_tokenizer(Companions* c, const char* folder) {
    for (int i = N_MODEL_COMPANIONS; i < N_COMPANIONS; i++) { companion_read_(c, i, folder); }
}

static inline int companions_have(const Companions* c, const char* name) {
    int i = companion_find(name);
    return i >= 0 && c->bytes[i];
}

static inline void companions_put(Companions* c, const char* name, const char* text) {
    const int i = companion_find(name);
    assert(i >= 0);
    free(c->bytes[i]);
    c->bytes[i] = string_copy(text);
    c->n_bytes[i] = strlen(text);
}

static inline double companions_bytes(const Companions* c) {
    double sum = 0.0;
    for (int i = 0; i < N_COMPANIONS; i++) { sum += (double)c->n_bytes[i]; }
    return sum;
}

static inline void companions_save(const Companions* c, const char* folder, SavedFiles* files) {
    char path[PATH_BYTES];
    OutFile copy;
    for (int i = 0; i < N_COMPANIONS; i++) {
        if (!c->bytes[i]) { continue; }
        outfile_open(&copy, path_join(path, folder, companion_name(i)));
        outfile_write(&copy, c->bytes[i], c->n_bytes[i]);
        saved_files_add(files, outfile_close(&copy));
    }
}

static inline void companions_free(Companions* c) {
    for (int i = 0; i < N_COMPANIONS; i++) { free(c->bytes[i]); }
    memset(c, 0, sizeof *c);
}
#endif  // LLMC_COMPANIONS_H
