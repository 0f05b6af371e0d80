/*
libFuzzer on the safetensors reader: any bytes are refused with a reason or become tensors that can be read to the last
element.
    make build/fuzz/fuzz_safetensors
    mkdir -p build/fuzz/corpus_safetensors && build/fuzz/fuzz_safetensors -max_total_time=60 -max_len=1024 \
        -dict=dev/fuzz/safetensors.dict build/fuzz/corpus_safetensors dev/fuzz/corpus/safetensors
It tries the bytes as a whole file, and once more as the JSON header of a file whose length it puts right, because a
mutation hardly ever repairs the length. 10,000,000 inputs found nothing; planted faults take seconds.
*/
#include "../../llmc/files/safetensors.h"

// what an accepted file promises; trap() shows up as a crash
static void read_everything(const SafeFile* f, const unsigned char* end) {
    const unsigned char* at = f->n_tensors > 0 ? (const unsigned char*)f->tensors[0].data : end;
    for (int i = 0; i < f->n_tensors; i++) {
        const SafeTensor* t = &f->tensors[i];
        if (t->data != at || t->n_bytes > (size_t)(end - at) || safetensors_find(f, t->name) != t) { __builtin_trap(); }
        if (t->dtype == DTYPE_F32 || t->dtype == DTYPE_F16 || t->dtype == DTYPE_BF16) {
            float* out = (float*)malloc_check(t->n * sizeof(float), "elements");
            safetensors_to_f32(out, t, 0, t->n);
            free(out);
        }
        at += t->n_bytes;
    }
    if (at != end) { __builtin_trap(); }  // a byte that belongs to nothing
    safetensors_meta(f, "format");
}

static void try_file(const unsigned char* bytes, size_t n_bytes) {
    SafeFile f;
    ErrorText error = {""};
    if (safetensors_parse_(&f, bytes, n_bytes, &error)) {
        read_everything(&f, bytes + n_bytes);
        safetensors_free_(&f);
    } else if (error.text[0] == '\0' || strchr(error.text, '\n')) {
        __builtin_trap();
    }
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    try_file(bytes, n_bytes);
    if (n_bytes < 2) { return 0; }
    size_t n_data = bytes[0] % 64;  // first byte: how much data; the rest: the header
    uint64_t n_header = n_bytes - 1;
    unsigned char* file = (unsigned char*)malloc_check(8 + n_header + n_data, "file");
    memcpy(file, &n_header, 8);
    memcpy(file + 8, bytes + 1, n_header);
    memset(file + 8 + n_header, 0x7f, n_data);
    try_file(file, 8 + n_header + n_data);
    free(file);
    return 0;
}
