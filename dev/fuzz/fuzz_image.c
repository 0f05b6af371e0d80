/*
libFuzzer on image files and preprocessor_config.json: any bytes are refused with a reason, or every pixel of the image
that they are can be read; a processor that was accepted gives every image a size of whole squares, and its patches are
finite.
    make build/fuzz/fuzz_image
    mkdir -p build/fuzz/corpus_image && build/fuzz/fuzz_image -max_total_time=60 -max_len=2048 \
        -dict=dev/fuzz/image.dict build/fuzz/corpus_image dev/fuzz/corpus/image
An input that begins with `{` is a config; any other is a PNG or JPEG. A PNG is tried as it is, and once more with its
checksums put right, for a mutation hardly ever finds those. Images have at most 2^16 pixels here.
*/
#include "llmc/models/image_patches.h"

enum { MOST_PIXELS = 1 << 16 };

static void require_reason(const ErrorText* error) {
    if (error->text[0] == '\0' || strchr(error->text, '\n')) { __builtin_trap(); }
}

static void try_image(const unsigned char* bytes, size_t n_bytes) {
    Image image;
    ErrorText error = {""};
    unsigned sum = 0;
    if (!image_parse_within(&image, bytes, n_bytes, MOST_PIXELS, &error)) {
        require_reason(&error);
        if (image.rgb) { __builtin_trap(); }
        return;
    }
    if (image.height < 1 || image.width < 1 || image.height > MOST_PIXELS / image.width) { __builtin_trap(); }
    const size_t n = 3 * (size_t)image.height * image.width;
    for (size_t i = 0; i < n; i++) { sum += image.rgb[i]; }
    if (sum > 255 * n) { __builtin_trap(); }
    image_free(&image);
}

static void repair_checksums(unsigned char* bytes, size_t n_bytes) {
    for (size_t at = 8; n_bytes - at >= 12;) {
        const unsigned char* b = bytes + at;
        const size_t n = (size_t)b[0] << 24 | (size_t)b[1] << 16 | (size_t)b[2] << 8 | b[3];
        if (n > n_bytes - at - 12) { return; }
        const uLong crc = crc32(0, bytes + at + 4, (uInt)n + 4);
        for (int i = 0; i < 4; i++) { bytes[at + 8 + n + i] = (unsigned char)(crc >> (24 - 8 * i)); }
        at += n + 12;
    }
}

static void try_patches(const ImageProcessor* p) {
    unsigned char rgb[3 * 5 * 7];
    Image frames[3];
    Patches patches;
    ErrorText error = {""};
    for (int i = 0; i < 3; i++) { frames[i].height = 5, frames[i].width = 7, frames[i].rgb = rgb; }
    for (int i = 0; i < 3 * 5 * 7; i++) { rgb[i] = (unsigned char)(i * 77); }
    if (p->max_pixels > MOST_PIXELS || p->temporal > 4 || p->patch * p->merge > 64) { return; }  // memory
    if (!image_processor_patches(&patches, p, frames, p->is_video ? 3 : 1, &error)) {
        require_reason(&error);
        return;
    }
    for (size_t i = 0; i < patches.rows * patches.columns; i++) {
        if (!isfinite(patches.values[i])) { __builtin_trap(); }
    }
    patches_free(&patches);
}

static void try_config(const unsigned char* bytes, size_t n_bytes, int is_video) {
    ImageProcessor p;
    ErrorText error = {""};
    json_error_t json_error;
    json_t* json = json_parse_bounded((const char*)bytes, n_bytes, JSON_MAX_DEPTH, &json_error);
    if (json && !image_processor_parse(&p, json, is_video, &error)) {
        require_reason(&error);
    } else if (json) {
        int h, w;
        for (int side = 1; side < 70000; side = 3 * side + 1) {
            if (!image_processor_resized(&h, &w, &p, side, 1000, &error)) { require_reason(&error); continue; }
            if (h < 1 || w < 1 || h % (p.patch * p.merge) || w % (p.patch * p.merge)) { __builtin_trap(); }
        }
        try_patches(&p);
    }
    json_decref(json);
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    unsigned char* exact = (unsigned char*)malloc_check(n_bytes, "input");
    if (n_bytes > 0) { memcpy(exact, bytes, n_bytes); }
    if (n_bytes > 0 && bytes[0] == '{') {
        try_config(exact, n_bytes, 0);
        try_config(exact, n_bytes, 1);
    } else {
        try_image(exact, n_bytes);
    }
    if (image_png_is(exact, n_bytes)) {
        repair_checksums(exact, n_bytes);
        try_image(exact, n_bytes);
    }
    free(exact);
    return 0;
}
