/*
llm.c's GPT-2 checkpoint, in and out: all parameters in table order, each tensor with all its layers.
    offset   size   meaning, little-endian
    0        4      magic 20240326
    4        4      version 3: float32, 5: bfloat16
    8        24     maxT, V, L, NH, C, Vp
    32       976    0
    1008     16     "llmc", then 0: written by --export-bin, which may replace it; 0 in llm.c's own
    1024     rest   the tensors, rows of wte padded to Vp; the file ends with the last
Errors: fail_input for a file that breaks a rule; older versions are named with the way out.
Source: the format of karpathy/llm.c
*/
#ifndef LLMC_BIN_H
#define LLMC_BIN_H
#include "../core/mapfile.h"  // MappedFile, ErrorText
#include "../core/outfile.h"  // OutFile
#include "../core/tensor.h"   // Tensor

enum { BIN_MAGIC = 20240326, BIN_HEADER_BYTES = 1024, BIN_MARK_AT = 1008 };
#define BIN_MARK "llmc"

typedef struct {
    int magic, version, max_T, V, L, NH, C, Vp;
} BinHeader;

static inline int is_llmc_bin(const MappedFile* f) {
    int magic = 0;
    if (f->n_bytes >= 4) { memcpy(&magic, f->bytes, 4); }
    return magic == BIN_MAGIC;
}

// The header from bytes in memory, without an exit: 1, or 0 with the reason. Its sizes are those of some GPT-2.
static inline int llmc_bin_parse_(BinHeader* h, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    if (n_bytes < BIN_HEADER_BYTES) {
        return error_set(error, "expected a header of %d bytes, found %zu", BIN_HEADER_BYTES, n_bytes);
    }
    memcpy(h, bytes, sizeof *h);
    if (h->magic != BIN_MAGIC) {
        return error_set(error, "expected the magic number %d, found %d", BIN_MAGIC, h->magic);
    }
    if (h->version != 3 && h->version != 5) {
        return error_set(
            error, "expected version 3 (float32) or 5 (bfloat16), found %d: write it anew with llm.c's train_gpt2.py",
            h->version);
    }
    int in_range = h->max_T >= 1 && h->max_T <= 1 << 24 && h->V >= 1 && h->V <= 1 << 24 && h->L >= 1 && h->L <= 1024 &&
                   h->NH >= 1 && h->C >= 1 && h->C <= 1 << 20;
    if (!in_range || h->C % h->NH != 0 || h->Vp != (h->V + 127) / 128 * 128) {
        return error_set(error, "expected the sizes of a GPT-2, found maxT %d, V %d, L %d, NH %d, C %d, Vp %d",
                         h->max_T, h->V, h->L, h->NH, h->C, h->Vp);
    }
    return 1;
}

// the file's length is that of its header's sizes: asked before memory is taken for them
static inline int llmc_bin_fits_(size_t n_bytes, BinHeader h, const Tensor* table, int n, ErrorText* error) {
    size_t expected = BIN_HEADER_BYTES + (h.version == 3 ? 4 : 2) * tensors_count(table, n);
    if (n_bytes == expected) { return 1; }
    return error_set(error, "expected %zu bytes for the sizes in its header, found %zu: copy or download it again",
                     expected, n_bytes);
}

static inline void llmc_bin_load_into(const SliceSink* sink, const MappedFile* f, const Tensor* table, int n) {
    BinHeader h;
    ErrorText error;
    if (!llmc_bin_parse_(&h, f->bytes, f->n_bytes, &error)) { fail_input("%s: %s", f->path, error.text); }
    if (!llmc_bin_fits_(f->n_bytes, h, table, n, &error)) { fail_input("%s: %s", f->path, error.text); }
    size_t width = h.version == 3 ? 4 : 2;
    const unsigned char* from = f->bytes + BIN_HEADER_BYTES;
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < tensor_slices(&table[i]); k++) {
            const unsigned char* begin = from;
            if (!slice_sink_needs(sink, &table[i], k)) {
                from += width * tensor_slice_elements(&table[i]);
                continue;
            }
            float* to = sink->room(sink->to, &table[i], k);
            for (size_t j = 0; j < tensor_slice_elements(&table[i]); j++, from += width) {
                uint32_t bits = 0;
                memcpy((char*)&bits + (4 - width), from, width);  // bfloat16 is the upper half of a float
                memcpy(&to[j], &bits, 4);
            }
            file_behind(f, begin, (size_t)(from - begin));
            slice_sink_done(sink, &table[i], k);
        }
    }
}

static inline void llmc_bin_load(const MappedFile* f, const Tensor* table, int n, float* arena) {
    const SliceSink sink = slice_sink(arena);
    llmc_bin_load_into(&sink, f, table, n);
}

// may a file be written here (outfile_check)? One of ours gives way, a model of another program does not
static inline void llmc_bin_check_out(const char* option, const char* path) {
    MappedFile file;
    ErrorText error;
    outfile_check(option, path, "llm.c's model file");
    if (!path_exists(path) || !file_map_or_not(&file, path, &error)) { return; }
    const int has_mark = file.n_bytes >= BIN_HEADER_BYTES &&
                         memcmp((const char*)file.bytes + BIN_MARK_AT, BIN_MARK, sizeof BIN_MARK) == 0;
    if (file.n_bytes > 0 && !has_mark) {
        fail_input("--%s: %s: is a model that this program did not write: give another name, or remove it", option,
                   path);
    }
    file_unmap(&file);
}

static inline void llmc_bin_save(const char* path, BinHeader h, const Tensor* table, int n, const float* arena) {
    char header[BIN_HEADER_BYTES] = {0};
    h.magic = BIN_MAGIC;
    h.version = 3;
    memcpy(header, &h, sizeof h);
    memcpy(header + BIN_MARK_AT, BIN_MARK, sizeof BIN_MARK);
    OutFile file;
    outfile_open_temporary(&file, path);
    outfile_write(&file, header, sizeof header);
    for (int i = 0; i < n; i++) {
        outfile_write(&file, arena + table[i].offset, sizeof(float) * tensor_elements(&table[i]));
    }
    outfile_close(&file);
    printf("wrote %s\n", path);
}
#endif  // LLMC_BIN_H
