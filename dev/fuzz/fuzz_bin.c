/*
libFuzzer on llm.c's GPT-2 .bin: any bytes are refused with a reason, or are a model whose every parameter can be read.
    make build/fuzz/fuzz_bin
    mkdir -p build/fuzz/corpus_bin && build/fuzz/fuzz_bin -max_total_time=60 -max_len=64 build/fuzz/corpus_bin dev/fuzz/corpus/bin
The input is the used part of the header and the length of the body. It is tried as it is, and once more with the body
that its sizes call for, when that is small, because a mutation hardly ever finds that length.
*/
#include "llmc/models/gpt2.h"

enum { LARGEST_BODY = 1 << 16 };

// a file of n_bytes whose first bytes are these and whose rest is one pattern
static unsigned char* file_of(const unsigned char* start, size_t n_start, size_t n_bytes) {
    unsigned char* file = (unsigned char*)malloc_check(n_bytes, "file");
    memset(file, 0x3f, n_bytes);
    memset(file, 0, n_bytes < BIN_HEADER_BYTES ? n_bytes : BIN_HEADER_BYTES);
    memcpy(file, start, n_start < n_bytes ? n_start : n_bytes);
    return file;
}

// returns the length that the header calls for, 0 when it is refused for another reason
static size_t try_file(const unsigned char* bytes, size_t n_bytes) {
    ErrorText error = {""};
    Config c;
    BinHeader h;
    GPT2 model;
    if (config_parse_bin(&c, bytes, n_bytes, &error)) {
        MappedFile file;
        memset(&file, 0, sizeof file);
        file.bytes = bytes;
        file.n_bytes = n_bytes;
        gpt2_layout(&model, c);
        float* params = (float*)malloc_check(sizeof(float) * model.model.n, "parameters");
        llmc_bin_load(&file, model.model.table, N_PARAMETERS, params);
        free(params);
        return n_bytes;
    }
    if (error.text[0] == '\0' || strchr(error.text, '\n')) { __builtin_trap(); }
    if (!llmc_bin_parse_(&h, bytes, n_bytes, &error)) { return 0; }
    gpt2_layout(&model, config_make(h.max_T, h.V, h.L, h.NH, h.C));
    return BIN_HEADER_BYTES + (h.version == 3 ? 4 : 2) * tensors_count(model.model.table, N_PARAMETERS);
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    if (n_bytes < 2) { return 0; }
    uint16_t length;
    memcpy(&length, bytes, 2);
    unsigned char* file = file_of(bytes + 2, n_bytes - 2, length);
    size_t wanted = try_file(file, length);
    free(file);
    if (wanted == 0 && length >= BIN_HEADER_BYTES) { return 0; }
    if (wanted == 0) { wanted = BIN_HEADER_BYTES; }
    if (wanted > LARGEST_BODY) { return 0; }
    file = file_of(bytes + 2, n_bytes - 2, wanted);
    wanted = try_file(file, wanted);
    free(file);
    if (wanted == 0 || wanted > LARGEST_BODY) { return 0; }
    file = file_of(bytes + 2, n_bytes - 2, wanted);
    if (try_file(file, wanted) != wanted) { __builtin_trap(); }
    free(file);
    return 0;
}
