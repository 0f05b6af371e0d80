/*
llm.c's GPT-2 checkpoint, in and out: all parameters in table order, each tensor with all its layers.
    offset   size   meaning, little-endian
    0        4      magic 20240326
    4        4      version 3: float32, 5: bfloat16
    8        24     maxT, V, L, NH, C, Vp
    32       992    0
    1024     rest   the tensors, rows of wte padded to Vp; the file ends with the last
Errors: fail_input for a file that breaks a rule; older versions are named with the way out.
Source: the format of karpathy/llm.c; spec gpt2.md section 10
*/
#ifndef LLMC_BIN_H
#define LLMC_BIN_H
#include "mapfile.h"  // MappedFile, file_map
#include "outfile.h"  // OutFile
#include "tensor.h"   // Tensor

enum { BIN_MAGIC = 20240326, BIN_HEADER_BYTES = 1024 };

typedef struct {
    int magic, version, max_T, V, L, NH, C, Vp;
} BinHeader;

static inline int is_llmc_bin(const MappedFile* f) {
    int magic = 0;
    if (f->n_bytes >= 4) { memcpy(&magic, f->bytes, 4); }
    return magic == BIN_MAGIC;
}

static inline BinHeader llmc_bin_header(const MappedFile* f) {
    BinHeader h;
    if (f->n_bytes < BIN_HEADER_BYTES) { fail_input("%s: expected a header of %d bytes, found %zu", f->path, BIN_HEADER_BYTES, f->n_bytes); }
    memcpy(&h, f->bytes, sizeof h);
    if (h.version != 3 && h.version != 5) {
        fail_input("%s: expected version 3 (float32) or 5 (bfloat16), found %d: write it anew with llm.c's train_gpt2.py", f->path, h.version);
    }
    return h;
}

// the file's length is that of its header's sizes: asked before memory is taken for them
static inline void llmc_bin_check(const MappedFile* f, BinHeader h, const Tensor* table, int n) {
    size_t expected = BIN_HEADER_BYTES + (h.version == 3 ? 4 : 2) * tensors_count(table, n);
    if (f->n_bytes != expected) {
        fail_input("%s: expected %zu bytes for the sizes in its header, found %zu: copy or download it again", f->path, expected, f->n_bytes);
    }
}

static inline void llmc_bin_load(const MappedFile* f, const Tensor* table, int n, float* arena) {
    BinHeader h = llmc_bin_header(f);
    size_t width = h.version == 3 ? 4 : 2;
    llmc_bin_check(f, h, table, n);
    const unsigned char* from = f->bytes + BIN_HEADER_BYTES;
    for (int i = 0; i < n; i++) {
        float* to = arena + table[i].offset;
        for (size_t j = 0; j < tensor_elements(&table[i]); j++, from += width) {
            uint32_t bits = 0;
            memcpy((char*)&bits + (4 - width), from, width);  // bfloat16 is the upper half of a float
            memcpy(&to[j], &bits, 4);
        }
    }
}

static inline void llmc_bin_save(const char* path, BinHeader h, const Tensor* table, int n, const float* arena) {
    char header[BIN_HEADER_BYTES] = {0};
    h.magic = BIN_MAGIC;
    h.version = 3;
    memcpy(header, &h, sizeof h);
    OutFile file;
    outfile_open(&file, path);
    outfile_write(&file, header, sizeof header);
    for (int i = 0; i < n; i++) { outfile_write(&file, arena + table[i].offset, sizeof(float) * tensor_elements(&table[i])); }
    outfile_close(&file);
}
#endif  // LLMC_BIN_H
