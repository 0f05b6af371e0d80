/*
Promises of llmc/files/safetensors.h and llmc/core/mapfile.h: what it writes it reads, what others write it reads, and
what is broken it refuses with one line, whichever byte is wrong.
    cc -O2 test_safetensors.c -o build/test_safetensors -ljansson -lm && build/test_safetensors
*/
#include "llmc/files/safetensors.h"
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"

// ---- files in memory, each in a heap block of exactly its size, so that a sanitizer sees the first byte too far ----

typedef struct {
    unsigned char* bytes;
    size_t n_bytes;
} Bytes;

static Bytes bytes_copy(const void* bytes, size_t n_bytes) {
    Bytes b = {heap_copy(bytes, n_bytes), n_bytes};
    return b;
}

// length, header, and n_data bytes 0, 1, 2, ...
static Bytes make_file(const char* header, size_t n_header, size_t n_data) {
    Bytes b = {(unsigned char*)malloc_check(8 + n_header + n_data, "file of a test"), 8 + n_header + n_data};
    uint64_t length = n_header;
    memcpy(b.bytes, &length, 8);
    memcpy(b.bytes + 8, header, n_header);
    for (size_t i = 0; i < n_data; i++) { b.bytes[8 + n_header + i] = (unsigned char)i; }
    return b;
}

// everything an accepted file promises, so that a mutant may be accepted only if it still holds
static int file_is_sound(const SafeFile* f, const Bytes* b) {
    const unsigned char* at = f->n_tensors > 0 ? (const unsigned char*)f->tensors[0].data : NULL;
    for (int i = 0; i < f->n_tensors; i++) {
        const SafeTensor* t = &f->tensors[i];
        if (t->data != at || safetensors_find(f, t->name) != t) { return 0; }
        if (dtype_size(t->dtype) > 0 && t->n_bytes != t->n * dtype_size(t->dtype)) { return 0; }
        at += t->n_bytes;
    }
    return f->n_tensors == 0 || at == b->bytes + b->n_bytes;
}

// parse; 1 when accepted (and sound), 0 when refused, in both cases without anything left on the heap
static int parse_once(Test* t, const Bytes* b, ErrorText* error) {
    SafeFile f;
    if (!safetensors_parse_(&f, b->bytes, b->n_bytes, error)) {
        int one_line = strlen(error->text) > 10 && !strchr(error->text, '\n');
        check(t, one_line, "a refusal needs one line, found \"%s\"", error->text);
        return 0;
    }
    check(t, file_is_sound(&f, b), "accepted, but its tensors do not cover the data");
    safetensors_free_(&f);
    return 1;
}

// ---- round trips ----

static const int64_t shape_2x3[2] = {2, 3};

static void test_round_trip(Test* t) {
    float f32[6] = {1.0f, -2.5f, 0.0f, -0.0f, 1e-45f, 3e38f};
    uint16_t bf16[6] = {0x3f80, 0xc020, 0, 0x8000, 1, 0x7f80};
    int64_t i64[1] = {INT64_MIN}, empty[3] = {4, 0, 2};
    TempPath folder = temp_folder(), path = temp_path(&folder, "model.safetensors");
    SafeWriter w;
    safewriter_init(&w);
    safewriter_declare(&w, "h.0.weight", DTYPE_F32, 2, shape_2x3);
    safewriter_meta(&w, "format", "pt");
    safewriter_meta(&w, "quotes", "\"\\\n\xc3\xa4");
    safewriter_declare(&w, "step", DTYPE_I64, 0, NULL);
    safewriter_declare(&w, "empty", DTYPE_F64, 3, empty);
    safewriter_declare(&w, "half", DTYPE_BF16, 2, shape_2x3);
    safewriter_open(&w, path.s);
    for (size_t i = 0; i < sizeof f32; i++) { safewriter_put(&w, (char*)f32 + i, 1); }  // any portions
    safewriter_put(&w, i64, 8);
    safewriter_put(&w, bf16, 0);
    safewriter_put(&w, bf16, 12);
    safewriter_close(&w);

    SafeFile f;
    safetensors_open(&f, path.s);
    const SafeTensor *a = safetensors_find(&f, "h.0.weight"), *h = safetensors_find(&f, "half");
    const SafeTensor *s = safetensors_find(&f, "step"), *e = safetensors_find(&f, "empty");
    if (check(t, f.n_tensors == 4 && a && h && s && e, "expected 4 tensors, found %d", f.n_tensors)) {
        float back[6], want[6] = {1.0f, -2.5f, 0.0f, -0.0f, float_from_bits(0x10000), INFINITY};
        check(t, a->dtype == DTYPE_F32 && a->n_dims == 2 && a->shape[0] == 2 && a->shape[1] == 3 && a->n == 6, "F32");
        safetensors_to_f32(back, a, 0, 6);
        check_bits(t, "F32", back, f32, 6);
        safetensors_to_f32(back, h, 0, 6);
        check_bits(t, "BF16", back, want, 6);
        safetensors_to_f32(back, h, 4, 2);
        check_bits(t, "part of BF16", back, want + 4, 2);
        check(t, s->n_dims == 0 && s->n == 1 && memcmp(s->data, i64, 8) == 0, "a number has no dimensions");
        check(t, e->n == 0 && e->n_bytes == 0 && e->n_dims == 3 && e->shape[0] == 4, "an empty tensor keeps its shape");
        check(t, (uintptr_t)a->data % 8 == 0 && (uintptr_t)h->data % 2 == 0, "data is aligned to its element");
    }
    check(t, safetensors_meta(&f, "format") && strcmp(safetensors_meta(&f, "format"), "pt") == 0, "metadata");
    const char* quotes = safetensors_meta(&f, "quotes");
    check(t, quotes && strcmp(quotes, "\"\\\n\xc3\xa4") == 0, "escapes");
    check(t, !safetensors_meta(&f, "none") && !safetensors_find(&f, "none") && !safetensors_find(&f, ""), "unknown");
    const void* mapping = f.file.bytes;
    TempPath mapped;
    file_at_address_(mapped.s, sizeof mapped.s, mapping);
    check(t, strcmp(mapped.s, path.s) == 0, "expected %s in memory, found \"%s\"", path.s, mapped.s);
    safetensors_close(&f);
    file_at_address_(mapped.s, sizeof mapped.s, mapping);
    check(t, strcmp(mapped.s, path.s) != 0, "still in memory after it was closed");
    temp_remove(&folder);
}

// the bytes that Python's safetensors 0.8 writes for {"w": float32, "h": float16, "e": empty int64} with metadata
static void test_from_python(Test* t) {
    static const char header[] =
        "{\"__metadata__\":{\"k\xc3\xa4y\":\"a\\\"b\\n\",\"format\":\"pt\"},\"e\":{\"dtype\":\"I64\",\"shape\":[0,3],"
        "\"data_offsets\":[0,0]},\"w\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
        "\"h\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[8,14]}}    ";
    static const char data[] = "\x00\x00\xc0\x3f\x00\x00\x00\xc0\x00\x3c\xff\x7b\x01\x00";
    Bytes b = make_file(header, sizeof header - 1, sizeof data - 1);
    memcpy(b.bytes + 8 + sizeof header - 1, data, sizeof data - 1);
    SafeFile f;
    ErrorText error;
    if (check(t, safetensors_parse_(&f, b.bytes, b.n_bytes, &error), "refused: %s", error.text)) {
        float w[2], h[3], want_w[2] = {1.5f, -2.0f}, want_h[3] = {1.0f, 65504.0f, 5.9604644775390625e-08f};
        safetensors_to_f32(w, safetensors_find(&f, "w"), 0, 2);
        safetensors_to_f32(h, safetensors_find(&f, "h"), 0, 3);
        check_bits(t, "w", w, want_w, 2);
        check_bits(t, "h", h, want_h, 3);
        check(t, f.n_tensors == 3 && safetensors_find(&f, "e")->n == 0, "the empty tensor");
        check(t, strcmp(safetensors_meta(&f, "k\xc3\xa4y"), "a\"b\n") == 0, "metadata");
        safetensors_free_(&f);
    }
    free(b.bytes);
}

// every F16 against its definition in real numbers, every BF16 against the upper half of a float; at an odd address
static void test_halves(Test* t) {
    enum { N = 65536 };
    unsigned char* data = (unsigned char*)malloc_check(2 * N + 1, "halves");
    float* out = (float*)malloc_check(N * sizeof(float), "halves");
    float* want = (float*)malloc_check(N * sizeof(float), "halves");
    for (uint32_t i = 0; i < N; i++) {
        uint16_t half = (uint16_t)i;
        memcpy(data + 1 + 2 * i, &half, 2);
    }
    SafeTensor halves = {"halves", DTYPE_BF16, 1, {N}, data + 1, 2 * N, N};
    for (uint32_t i = 0; i < N; i++) { want[i] = float_from_bits(i << 16); }
    safetensors_to_f32(out, &halves, 0, N);
    check_bits(t, "BF16", out, want, N);
    for (int i = 0; i < N; i++) {
        int exponent = i >> 10 & 31, mantissa = i & 1023;
        double magnitude = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
        if (exponent == 31) { magnitude = mantissa ? NAN : INFINITY; }
        want[i] = (float)(i >> 15 ? -magnitude : magnitude);
    }
    halves.dtype = DTYPE_F16;
    safetensors_to_f32(out, &halves, 0, N);
    check_bits(t, "F16", out, want, N);
    check(t, signbit(out[0x8000]) && out[0x8000] == 0.0f, "-0");
    free(data);
    free(out);
    free(want);
}

// an odd header length, tensors out of order in the header, unknown keys, a name full of brackets, all dtypes
static void test_unusual(Test* t) {
    static const char odd[] = "{ \"b\\\"[[[[\" : {\"data_offsets\":[4,12],\"shape\":[2],\"dtype\":\"F32\",\"x\":[1]},\n"
                              "\"a\":{\"dtype\":\"U8\",\"shape\":[2,2,1,1,1,1,1,1],\"data_offsets\":[0,4]} }\t ";
    Bytes b = make_file(odd, sizeof odd - 1, 12);
    SafeFile f;
    ErrorText error;
    if (check(t, safetensors_parse_(&f, b.bytes, b.n_bytes, &error), "refused: %s", error.text)) {
        float got[2], want[2] = {float_from_bits(0x07060504), float_from_bits(0x0b0a0908)};
        int in_order = strcmp(f.tensors[0].name, "a") == 0 && strcmp(f.tensors[1].name, "b\"[[[[") == 0;
        check(t, in_order, "tensors come in the order of their data");
        safetensors_to_f32(got, safetensors_find(&f, "b\"[[[["), 0, 2);
        check_bits(t, "unaligned F32", got, want, 2);
        safetensors_free_(&f);
    }
    free(b.bytes);
    const char* sizes = "BOOL:1 F4:0 F6_E2M3:0 F6_E3M2:0 U8:1 I8:1 F8_E5M2:1 F8_E4M3:1 F8_E8M0:1 F8_E4M3FNUZ:1 "
                        "F8_E5M2FNUZ:1 I16:2 U16:2 F16:2 BF16:2 I32:4 U32:4 F32:4 C64:8 F64:8 I64:8 U64:8 ";
    for (int i = 0; i < N_DTYPES; i++) {
        char one[40], header[128];
        Dtype dtype = (Dtype)i;
        size_t n_bytes = 4 * (size_t)dtype_info_(dtype).bits / 8;
        snprintf(one, sizeof one, "%s:%zu ", dtype_name(dtype), dtype_size(dtype));
        check(t, strncmp(sizes, one, strlen(one)) == 0, "%s has another name or size than the format's", one);
        sizes += strlen(one);
        snprintf(header, sizeof header, "{\"x\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[0,%zu]}}",
                 dtype_name(dtype), n_bytes);
        Bytes file = make_file(header, strlen(header), n_bytes);
        check(t, parse_once(t, &file, &error), "%s: %s", dtype_name(dtype), error.text);
        free(file.bytes);
    }
    check(t, *sizes == '\0', "a dtype is missing: %s", sizes);
}

// ---- broken files ----

#define T(dtype, shape, offsets) "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

typedef struct {
    const char* header;
    size_t n_data;
    const char* expected;  // part of the message
} Broken;

static const Broken broken_headers[] = {
    // arithmetic that would wrap
    {"{\"a\":" T("F32", "[4294967296,4294967296,4]", "[0,0]") "}", 0, "shape x F32 is not a whole number"},
    {"{\"a\":" T("F32", "[4611686018427387904]", "[0,0]") "}", 0, "shape x F32 is not a whole number"},
    {"{\"a\":" T("F32", "[1]", "[18446744073709551612,18446744073709551616]") "}", 4, "not valid JSON"},
    {"{\"a\":" T("F32", "[1]", "[9223372036854775807,9223372036854775807]") "}", 4, "data ends at 9223372036854775807"},
    {"{\"a\":" T("F32", "[99999999999999999999]", "[0,4]") "}", 4, "not valid JSON"},
    {"{\"a\":" T("F32", "[1e400]", "[0,4]") "}", 4, "not valid JSON"},
    // shapes
    {"{\"a\":" T("F32", "[-1]", "[0,4]") "}", 4, "shape[0] is not an integer of at least 0"},
    {"{\"a\":" T("F32", "[-2,-2]", "[0,16]") "}", 16, "shape[0] is not an integer of at least 0"},
    {"{\"a\":" T("F32", "[1,1.0]", "[0,4]") "}", 4, "shape[1] is not an integer of at least 0"},
    {"{\"a\":" T("F32", "[\"1\"]", "[0,4]") "}", 4, "shape[0] is not an integer of at least 0"},
    {"{\"a\":" T("F32", "[true]", "[0,4]") "}", 4, "shape[0] is not an integer of at least 0"},
    {"{\"a\":" T("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "expected at most 8 dimensions, found 9"},
    {"{\"a\":" T("F32", "{}", "[0,4]") "}", 4, "expected a list \"shape\""},
    {"{\"a\":" T("F32", "1", "[0,4]") "}", 4, "expected a list \"shape\""},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "expected a list \"shape\""},
    {"{\"a\":" T("F4", "[3]", "[0,2]") "}", 2, "shape x F4 is not a whole number of bytes"},
    // dtypes
    {"{\"a\":" T("F33", "[1]", "[0,4]") "}", 4, "unknown dtype \"F33\""},
    {"{\"a\":" T("f32", "[1]", "[0,4]") "}", 4, "unknown dtype \"f32\""},
    {"{\"a\":" T("", "[1]", "[0,4]") "}", 4, "unknown dtype \"\""},
    {"{\"a\":{\"dtype\":11,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "expected a string \"dtype\""},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "expected a string \"dtype\""},
    // offsets
    {"{\"a\":" T("F32", "[1]", "[-4,0]") "}", 4, "expected data_offsets 0 <= begin <= end, found [-4, 0]"},
    {"{\"a\":" T("F32", "[1]", "[4,0]") "}", 4, "expected data_offsets 0 <= begin <= end, found [4, 0]"},
    {"{\"a\":" T("F32", "[1]", "[0,8]") "}", 8, "shape x dtype is 4 bytes, data_offsets [0, 8] hold 8"},
    {"{\"a\":" T("F32", "[2]", "[0,4]") "}", 4, "shape x dtype is 8 bytes, data_offsets [0, 4] hold 4"},
    {"{\"a\":" T("F32", "[2]", "[0,8]") "}", 4, "data ends at 8, but the file holds 4 bytes of data"},
    {"{\"a\":" T("F32", "[1]", "[0,4,8]") "}", 8, "found no list of two integers"},
    {"{\"a\":" T("F32", "[1]", "[0]") "}", 4, "found no list of two integers"},
    {"{\"a\":" T("F32", "[1]", "[0.0,4.0]") "}", 4, "found no list of two integers"},
    {"{\"a\":" T("F32", "[1]", "{\"0\":0,\"1\":4}") "}", 4, "found no list of two integers"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "found no list of two integers"},
    // what the tensors cover
    {"{\"a\":" T("F32", "[1]", "[0,4]") ",\"b\":" T("F32", "[1]", "[0,4]") "}", 4, "it overlaps the tensor before it"},
    {"{\"a\":" T("F32", "[2]", "[0,8]") ",\"b\":" T("F32", "[2]", "[4,12]") "}", 12,
     "it overlaps the tensor before it"},
    {"{\"a\":" T("F32", "[1]", "[0,4]") ",\"b\":" T("F32", "[1]", "[8,12]") "}", 12, "there is a hole before it"},
    {"{\"a\":" T("F32", "[1]", "[4,8]") "}", 8, "there is a hole before it"},
    {"{\"a\":" T("F32", "[0]", "[4,4]") "}", 4, "there is a hole before it"},
    {"{\"a\":" T("F32", "[1]", "[0,4]") "}", 5, "1 bytes follow the last tensor"},
    {"{}", 3, "3 bytes follow the last tensor"},
    // duplicates
    {"{\"a\":" T("F32", "[1]", "[0,4]") ",\"a\":" T("F32", "[1]", "[4,8]") "}", 8, "duplicate object key"},
    {"{\"a\":" T("F32", "[1]", "[0,4]") ",\"\\u0061\":" T("F32", "[1]", "[4,8]") "}", 8, "duplicate object key"},
    {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "duplicate object key"},
    // other JSON types
    {"{\"a\":[]}", 0, "expected an object, found another JSON type"},
    {"{\"a\":null}", 0, "expected an object, found another JSON type"},
    {"{\"__metadata__\":[]}", 0, "__metadata__: expected an object of strings"},
    {"{\"__metadata__\":{\"k\":1}}", 0, "__metadata__ \"k\": expected a string"},
    {"{\"__metadata__\":{\"k\":{}}}", 0, "__metadata__ \"k\": expected a string"},
    // JSON
    {"[1]", 0, "a header that starts with '{', found byte 0x5b"},
    {" {}", 0, "a header that starts with '{', found byte 0x20"},
    {"\xef\xbb\xbf{}", 0, "a header that starts with '{', found byte 0xef"},
    {"{", 0, "not valid JSON"},
    {"{\"a", 0, "not valid JSON"},
    {"{\"a\\", 0, "not valid JSON"},
    {"{\"a\\u12", 0, "not valid JSON"},
    {"{\"a\xff\":1}", 0, "not valid JSON"},
    {"{\"a\xc0\x80\":1}", 0, "not valid JSON"},
    {"{\"a\\u0000\":" T("F32", "[1]", "[0,4]") "}", 4, "not valid JSON"},
    {"{\"a\\ud800\":" T("F32", "[1]", "[0,4]") "}", 4, "not valid JSON"},
    {"{} {}", 0, "not valid JSON"},
    {"{'a':1}", 0, "not valid JSON"},
    {"{\"a\":NaN}", 0, "not valid JSON"},
    {"{\"a\":{\"b\":[[1]]}}", 0, "at offset 19: found more than 3 nested brackets"},
    // names that would break the message
    {"{\"line\\nbreak\\u001b[2J\":" T("F32", "[1]", "[0,4]") "}", 4,
     "tensor \"line?break?[2J\": expected a name of 1..512"},
    {"{\"\\u007f\":" T("F32", "[1]", "[0,4]") "}", 4, "tensor \"?\": expected a name of 1..512"},
    {"{\"\":" T("F32", "[1]", "[0,4]") "}", 4, "tensor \"\": expected a name of 1..512"},
};

static void test_broken(Test* t) {
    for (size_t i = 0; i < sizeof broken_headers / sizeof broken_headers[0]; i++) {
        const Broken* c = &broken_headers[i];
        Bytes b = make_file(c->header, strlen(c->header), c->n_data);
        ErrorText error = {""};
        int refused = !parse_once(t, &b, &error) && strstr(error.text, c->expected);
        check(t, refused, "%s: expected \"%s\", found \"%s\"", c->header, c->expected, error.text);
        free(b.bytes);
    }
}

static void test_too_long(Test* t) {
    size_t n = 5000000;
    char* header = (char*)malloc_check(n, "header");
    memset(header, '[', n);
    memcpy(header, "{\"a\":", 5);
    ErrorText error = {""};
    Bytes deep = make_file(header, n, 0);
    check(t, !parse_once(t, &deep, &error) && strstr(error.text, "nested brackets"), "brackets: \"%s\"", error.text);
    memset(header, 'x', n);
    memcpy(header, "{\"", 2);
    memcpy(header + n - 4, "\":1}", 4);
    Bytes name = make_file(header, n, 0);
    check(t, !parse_once(t, &name, &error) && strlen(error.text) < 200, "a name of 5 MB: \"%s\"", error.text);
    free(deep.bytes);
    free(name.bytes);
    free(header);
}

static const struct {
    const char* start;
    size_t n_start, n_bytes;  // zeros follow
    const char* expected;
} broken_starts[] = {
    {"", 0, 0, "found a file of 0 bytes"},
    {"{}", 2, 7, "found a file of 7 bytes"},
    {"", 0, 64, "a header length of 1..100000000 in the first 8 bytes, found 0"},
    {"\x02\0\0\0\0\0\0\0{", 9, 9, "header of 2 bytes, but only 1 follow its length: the file is cut short"},
    {"\x02\0\0\0\0\0\0\0", 8, 8, "header of 2 bytes, but only 0 follow"},
    {"\xff\xff\xff\xff\xff\xff\xff\xff{}", 10, 10, "found 18446744073709551615"},
    {"\xf8\xff\xff\xff\xff\xff\xff\xff{}", 10, 64, "found 18446744073709551608"},
    {"\x01\xe1\xf5\x05\0\0\0\0{}", 10, 64, "found 100000001"},
    {"\0\xe1\xf5\x05\0\0\0\0{}", 10, 64, "header of 100000000 bytes, but only 56 follow"},
    {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", 63, 63,
     "found a Git LFS pointer instead of the file (run `git lfs pull`)"},
    {"version", 7, 7, "found a file of 7 bytes"},
    {"\n<!DOCTYPE html><html>", 22, 22, "found an HTML page"},
    {"<html", 5, 5, "found an HTML page"},
    {"<?xml version='1.0'?><Error>", 28, 28, "found an XML page"},
    {"PK\3\4\x14\0\0\0\0\0", 10, 64, "found a zip archive"},
    {"\x1f\x8b\x08\0\0\0\0\0", 8, 64, "found a gzip archive"},
};

static void test_other_kinds(Test* t) {
    for (size_t i = 0; i < sizeof broken_starts / sizeof broken_starts[0]; i++) {
        Bytes b = {(unsigned char*)calloc(broken_starts[i].n_bytes + 1, 1), broken_starts[i].n_bytes};
        memcpy(b.bytes, broken_starts[i].start, broken_starts[i].n_start);
        Bytes exact = bytes_copy(b.bytes, b.n_bytes);
        ErrorText error = {""};
        int refused = !parse_once(t, &exact, &error) && strstr(error.text, broken_starts[i].expected);
        check(t, refused, "start %zu: expected \"%s\", found \"%s\"", i, broken_starts[i].expected, error.text);
        free(b.bytes);
        free(exact.bytes);
    }
}

// a small file with every feature; the tests below damage it
static const char small_header[] =
    "{\"__metadata__\":{\"format\":\"pt\"},\"w\":" T("F32", "[2,2]", "[0,16]") ",\"h\":" T("BF16", "[3]", "[16,22]")
    ",\"\xc3\xa4\\\"\":" T("I8", "[]", "[22,23]") ",\"e\":" T("F64", "[0,2]", "[23,23]") "}   ";

static void test_truncated(Test* t) {
    Bytes whole = make_file(small_header, sizeof small_header - 1, 23);
    ErrorText error;
    check(t, parse_once(t, &whole, &error), "the whole file: %s", error.text);
    for (size_t n = 0; n < whole.n_bytes; n++) {
        Bytes cut = bytes_copy(whole.bytes, n);
        check(t, !parse_once(t, &cut, &error), "accepted when cut to %zu of %zu bytes", n, whole.n_bytes);
        free(cut.bytes);
    }
    free(whole.bytes);
}

static void test_flipped(Test* t) {
    Bytes b = make_file(small_header, sizeof small_header - 1, 23);
    int n_accepted = 0, n_refused = 0;
    for (size_t at = 0; at < 8 + sizeof small_header - 1; at++) {
        unsigned char kept = b.bytes[at];
        for (int value = 0; value < 256; value++) {
            ErrorText error;
            b.bytes[at] = (unsigned char)value;
            int accepted = parse_once(t, &b, &error);
            n_accepted += accepted;
            n_refused += !accepted;
            check(t, accepted || value != kept, "the file as it was is refused: %s", error.text);
        }
        b.bytes[at] = kept;
    }
    // accepted: other letters in names and metadata, other blanks, I8 for U8 and the like
    check(t, n_refused > 10 * n_accepted, "%d refused and %d accepted: the rules are too weak", n_refused, n_accepted);
    free(b.bytes);
}

// 100,000 tensors: sorting, overlap check and look-up must not be quadratic, or this promise takes minutes
static void test_many(Test* t) {
    enum { N = 100000 };
    TempPath folder = temp_folder(), path = temp_path(&folder, "many.safetensors");
    SafeWriter w;
    SafeFile f;
    char name[32];
    int n_found = 0;
    int64_t one = 1;
    safewriter_init(&w);
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "tensor.%d", i * 7919 % N);
        safewriter_declare(&w, name, DTYPE_U8, 1, &one);
    }
    safewriter_open(&w, path.s);
    for (int i = 0; i < N; i++) { safewriter_put(&w, &i, 1); }
    safewriter_close(&w);
    safetensors_open(&f, path.s);
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "tensor.%d", i * 7919 % N);
        const SafeTensor* s = safetensors_find(&f, name);
        n_found += s && *(const unsigned char*)s->data == (unsigned char)i;
    }
    check(t, n_found == N && f.n_tensors == N, "found %d of %d tensors with their data", n_found, N);
    safetensors_close(&f);
    temp_remove(&folder);
}

// ---- memory that runs out inside the JSON parser ----

static int allocations_left = -1;  // -1: no limit

static void* limited_malloc(size_t n_bytes) {
    if (allocations_left == 0) { return NULL; }
    if (allocations_left > 0) { allocations_left--; }
    return malloc(n_bytes);
}

static void test_no_memory(Test* t) {
    Bytes b = make_file(small_header, sizeof small_header - 1, 23);
    ErrorText error;
    int n = 0, accepted = 0;
    json_set_alloc_funcs(limited_malloc, free);
    while (!accepted && n < 10000) {
        allocations_left = n++;
        accepted = parse_once(t, &b, &error);
    }
    allocations_left = -1;
    check(t, accepted && n > 20, "accepted with %d allocations", n - 1);
    json_set_alloc_funcs(malloc, free);
    free(b.bytes);
}

// ---- stops: status and line ----

static void open_path(void* path) {
    SafeFile f;
    safetensors_open(&f, (const char*)path);
}

static void test_stops(Test* t) {
    TempPath folder = temp_folder(), missing = temp_path(&folder, "none.safetensors"),
             pipe = temp_path(&folder, "pipe");
    TempPath short_file = temp_file(&folder, "short.safetensors", "\x10\0\0\0\0\0\0\0{", 9);
    check_exit(t, "missing", open_path, missing.s, 2, "none.safetensors: cannot be opened: No such file or directory");
    check_exit(t, "folder", open_path, folder.s, 2, "expected a file, found a folder");
    check_exit(t, "cut short", open_path, short_file.s, 2, "short.safetensors: header of 16 bytes, but only 1 follow");
    if (mkfifo(pipe.s, 0600) == 0) { check_exit(t, "pipe", open_path, pipe.s, 2, "expected a file, found a pipe"); }
    temp_remove(&folder);
}

static void write_floats(const char* path, int64_t n) {
    float* x = (float*)calloc((size_t)n, sizeof(float));
    SafeWriter w;
    safewriter_init(&w);
    safewriter_declare(&w, "x", DTYPE_F32, 1, &n);
    safewriter_open(&w, path);
    safewriter_put(&w, x, (size_t)n * sizeof(float));
    safewriter_close(&w);
    free(x);
}

static void write_little(void* path) { write_floats((const char*)path, 4); }  // stays in the buffer until it is closed
static void write_much(void* path) { write_floats((const char*)path, 100000); }

static void write_wrong_count(void* arg) {
    const char* which = (const char*)arg;
    int64_t n = 2, huge[2] = {INT64_MAX, 4};
    float x[3] = {0};
    SafeWriter w;
    safewriter_init(&w);
    safewriter_declare(&w, "x", DTYPE_F32, 1, &n);
    if (strcmp(which, "twice") == 0) { safewriter_declare(&w, "x", DTYPE_F32, 1, &n); }
    if (strcmp(which, "huge") == 0) { safewriter_declare(&w, "y", DTYPE_F32, 2, huge); }
    if (strcmp(which, "name") == 0) { safewriter_declare(&w, "\xff", DTYPE_F32, 1, &n); }
    if (strcmp(which, "meta") == 0) { safewriter_meta(&w, "path", "\xff"); }
    safewriter_open(&w, "/dev/null");
    safewriter_put(&w, x, strcmp(which, "more") == 0 ? 12 : 4);
    safewriter_close(&w);
}

static void test_writer_stops(Test* t) {
    char full[] = "/dev/full", nowhere[] = "/nonexistent/x.safetensors";
    char less[] = "less", more[] = "more", twice[] = "twice", huge[] = "huge", name[] = "name", meta[] = "meta";
    check_exit(t, "full at the end", write_little, full, 1, "/dev/full: cannot be written: No space left on device");
    check_exit(t, "full at once", write_much, full, 1, "/dev/full: cannot be written: No space left on device");
    check_exit(t, "no folder", write_little, nowhere, 1, "x.safetensors: cannot be created: No such file or directory");
    check_exit(t, "too few", write_wrong_count, less, 1, "closed after 4 of the 8 declared bytes");
    check_exit(t, "too many", write_wrong_count, more, 1, "12 bytes after the first 0, but the declared tensors hold");
    check_exit(t, "twice", write_wrong_count, twice, 1, "tensor \"x\": declared twice");
    check_exit(t, "huge", write_wrong_count, huge, 1, "tensor \"y\": its size, or that of all tensors");
    check_exit(t, "name", write_wrong_count, name, 1, "or its name is not UTF-8");
    check_exit(t, "metadata", write_wrong_count, meta, 1, "safetensors metadata \"path\": no memory, or not UTF-8");
}

static void read_other_dtype(void* arg) {
    SafeTensor ids = {"ids", DTYPE_I64, 1, {1}, "12345678", 8, 1};
    safetensors_to_f32((float*)arg, &ids, 0, 1);
}

// ---- a file that changes while it is open ----

static void cut_while_mapped(void* path) {
    MappedFile f;
    file_map(&f, (const char*)path);
    if (truncate((const char*)path, 0) != 0) { fail_run("truncate: %s", strerror(errno)); }
    volatile unsigned char first = f.bytes[0];
    (void)first;
}

static void write_while_open(void* path) {
    SafeFile f;
    safetensors_open(&f, (const char*)path);
    FILE* file = fopen((const char*)path, "ab");
    fputc('x', file);
    fclose(file);
    safetensors_close(&f);
}

static void replace_while_open(void* path) {
    SafeFile f;
    char other[600];
    snprintf(other, sizeof other, "%s.new", (const char*)path);
    write_little(other);
    safetensors_open(&f, (const char*)path);
    rename(other, (const char*)path);
    safetensors_close(&f);
}

static void test_changed(Test* t) {
    TempPath folder = temp_folder(), path = temp_path(&folder, "moving.safetensors");
    float x;
    check_exit(t, "I64 as float", read_other_dtype, &x, 2, "tensor \"ids\": expected F32, F16 or BF16, found I64");
    write_little(path.s);
    check_exit(t, "written to", write_while_open, path.s, 1, "moving.safetensors: changed while it was being read");
    write_little(path.s);
    check_exit(t, "replaced", replace_while_open, path.s, 0, "");
    check_exit(t, "cut", cut_while_mapped, path.s, 1, "moving.safetensors: cut short by another program");
    temp_remove(&folder);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"round trip", "reads back what it wrote, to the bit, in any portions", test_round_trip},
        {"from Python", "reads the bytes that Python's safetensors writes", test_from_python},
        {"half floats", "all 65,536 F16 and BF16 become the right float, unaligned", test_halves},
        {"unusual", "reads any order of tensors, odd header lengths, all 22 dtypes", test_unusual},
        {"broken headers", "refuses each class of malformed header with its own message", test_broken},
        {"long headers", "refuses a million brackets and names of megabytes", test_too_long},
        {"other files", "says when it is a Git LFS pointer, an HTML page or an archive", test_other_kinds},
        {"truncation", "refuses a file cut at any byte", test_truncated},
        {"damage", "a header with any byte changed to any other is refused or still sound", test_flipped},
        {"many tensors", "100,000 tensors take seconds, not hours", test_many},
        {"out of memory", "the n-th allocation of the parser may fail, for every n", test_no_memory},
        {"reading stops", "status 2 and one line with the path", test_stops},
        {"writing stops", "status 1 and one line with path and reason", test_writer_stops},
        {"changes", "a file cut or rewritten while it is open is noticed", test_changed},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
