/*
One malformed file for each way in which readers of model files have failed, and each format, with the message expected:
sizes that wrap, lengths beyond the file, strings without an end, allocation before the check, nesting, negative and
zero sizes, division by them, duplicates, unknown types, other JSON types, paths.
safetensors has its own table in test_safetensors.c, token shards and text in test_dataloader.c.
    index.json, config.json, manifest.json, llm.c's .bin: by their parsers, from a heap block of exactly the file's size
    the probe's safetensors: by probe_read, which stops
*/
#include "llmc/models/gpt2.h"
#include "llmc/run/probe.h"
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"

typedef struct {
    const char *bug, *text, *expected;
} Malformed;

// the parser of a format: 1 when it accepts, else the reason
typedef int (*TryBytes)(const unsigned char* bytes, size_t n_bytes, ErrorText* error);

static int try_index(const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    ShardIndex index;
    int good = safeset_index_parse_(&index, bytes, n_bytes, error);
    if (good) { safeset_index_free_(&index); }
    return good;
}

static int try_config(const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    Config c;
    json_error_t json_error;
    json_t* json = json_parse_bounded((const char*)bytes, n_bytes, JSON_MAX_DEPTH, &json_error);
    int good = json && config_parse(&c, json, error);
    if (!json) { error_set(error, "%d: found: %s", json_error.line, json_error.text); }
    json_decref(json);
    return good;
}

static int try_manifest(const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    SavedFiles files;
    json_t* manifest = manifest_parse_((const char*)bytes, n_bytes, &files, error);
    json_decref(manifest);
    return manifest != NULL;
}

static int try_bin(const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    Config c;
    return config_parse_bin(&c, bytes, n_bytes, error);
}

// refused with this reason, on one line
static void check_bytes(Test* t, TryBytes try_bytes, const char* bug, const void* bytes, size_t n_bytes,
                        const char* expected) {
    ErrorText error = {""};
    unsigned char* exact = heap_copy(bytes, n_bytes);
    int accepted = try_bytes(exact, n_bytes, &error);
    check(t, !accepted && strstr(error.text, expected) && !strchr(error.text, '\n'),
          "%s: expected \"%s\", found \"%s\"", bug, expected, accepted ? "accepted" : error.text);
    free(exact);
}

static void check_table(Test* t, TryBytes try_bytes, const Malformed* table, size_t n) {
    for (size_t i = 0; i < n; i++) {
        check_bytes(t, try_bytes, table[i].bug, table[i].text, strlen(table[i].text), table[i].expected);
    }
}

#define COUNT(table) (sizeof table / sizeof table[0])

// ---- model.safetensors.index.json ----

#define MAP(entries) "{\"metadata\": {\"total_size\": 8}, \"weight_map\": {" entries "}}"
#define SHARD "expected a file of this folder that ends in .safetensors, found "

static const Malformed indices[] = {
    {"empty", "", "line 1: expected JSON, found: '[' or '{' expected near end of file"},
    {"another file", "<!DOCTYPE html>", "expected JSON, found an HTML page"},
    {"an archive", "PK\3\4abc", "expected JSON, found a zip archive"},
    {"no map", "{\"metadata\": {}}", "expected \"weight_map\""},
    {"an empty map", MAP(""), "expected \"weight_map\""},
    {"a list for a map", "{\"weight_map\": [\"a\"]}", "expected \"weight_map\""},
    {"a list for an object", "[{\"weight_map\": {}}]", "a list instead of an object"},
    {"a number for a name", MAP("\"a\": 1"), "tensor \"a\": expected the name of a file"},
    {"an object for a name", MAP("\"a\": {\"file\": \"a.safetensors\"}"), "tensor \"a\": expected the name of a file"},
    {"a path upwards", MAP("\"a\": \"../a.safetensors\""), SHARD "\"../a.safetensors\""},
    {"a path inwards", MAP("\"a\": \"x/a.safetensors\""), SHARD "\"x/a.safetensors\""},
    {"an absolute path", MAP("\"a\": \"/etc/a.safetensors\""), SHARD "\"/etc/a.safetensors\""},
    {"a path of another system", MAP("\"a\": \"..\\\\a.safetensors\""), SHARD "\"..\\a.safetensors\""},
    {"a hidden file", MAP("\"a\": \".safetensors\""), SHARD "\".safetensors\""},
    {"another suffix", MAP("\"a\": \"a.bin\""), SHARD "\"a.bin\""},
    {"no name", MAP("\"a\": \"\""), SHARD "\"\""},
    {"a control character", MAP("\"a\": \"a\\u001b[2J.safetensors\""), SHARD "\"a?[2J.safetensors\""},
    {"a NUL", MAP("\"a\": \"a.bin\\u0000.safetensors\""), "expected JSON, found: \\u0000 is not allowed"},
    {"a name twice", MAP("\"a\": \"a.safetensors\", \"a\": \"b.safetensors\""), "found: duplicate object key"},
    {"a key twice", "{\"weight_map\": {}, \"weight_map\": {\"a\": \"a.safetensors\"}}", "found: duplicate object key"},
    {"a string without an end", "{\"weight_map\": {\"a", "line 1: expected JSON, found: premature end of input"},
    {"something behind it", MAP("\"a\": \"a.safetensors\"") "\n{}",
     "line 2: expected JSON, found: end of file expected"},
    {"no UTF-8", MAP("\"a\xff\": \"a.safetensors\""), "unable to decode byte 0xff"},
};

static void test_index(Test* t) {
    check_table(t, try_index, indices, COUNT(indices));
    ErrorText error;
    const char* good = MAP("\"a\": \"a.safetensors\", \"b\": \"b.safetensors\", \"c\": \"a.safetensors\"");
    check(t, try_index((const unsigned char*)good, strlen(good), &error), "a good one is refused: %s", error.text);
}

// more shards than anybody has: each would be a mapping
static void test_many_shards(Test* t) {
    size_t n = 0;
    char* text = (char*)malloc_check(64 * 10000, "text");
    n += (size_t)sprintf(text, "{\"weight_map\": {\"t\": \"t.safetensors\"");
    for (int i = 0; i < 9999; i++) { n += (size_t)sprintf(text + n, ", \"t%d\": \"s%d.safetensors\"", i, i); }
    n += (size_t)sprintf(text + n, "}}");
    check_bytes(t, try_index, "10,000 shards", text, n, "expected at most 4096 shards, found 10000");
    free(text);
}

// ---- config.json ----

#define CONFIG(more) "{\"model_type\": \"gpt2\", \"n_positions\": 8, \"vocab_size\": 9, \"n_layer\": 1, " more "}"
#define HEADS(more) CONFIG("\"n_head\": 2, \"n_embd\": 4, " more)

static const Malformed configs[] = {
    {"empty", "", "1: found: '[' or '{' expected"},
    {"cut short", "{\"n_layer\": 1", "1: found: '}' expected"},
    {"a list", "[1]", "a list instead of an object {...}"},
    {"a key twice", "{\"n_layer\": 1,\n\"n_layer\": 2}", "2: found: duplicate object key"},
    {"NaN", "{\n\"layer_norm_epsilon\": NaN}", "2: found: invalid token near 'NaN'"},
    {"Infinity", "{\"initializer_range\": Infinity}", "found: invalid token near 'Infinity'"},
    {"-Infinity", "{\"initializer_range\": -Infinity}", "found: invalid token near '-'"},
    {"a real beyond double", "{\"initializer_range\": 1e999}", "found: real number overflow"},
    {"an integer beyond 63 bits", "{\"n_layer\": 9223372036854775808}", "found: too big integer"},
    {"a comment", "{\"n_layer\": 1 // layers\n}", "found: '}' expected near '/'"},
    {"a string without an end", "{\"n_layer", "found: premature end of input"},
    {"no UTF-8", "{\"n_l\xc0\x80yer\": 1}", "found: unable to decode byte 0xc0"},
    {"nothing in it", "{}", "\"n_positions\": expected an integer 1..16777216, found nothing"},
    {"zero", CONFIG("\"n_head\": 0, \"n_embd\": 4"), "\"n_head\": expected an integer 1..1048576, found 0"},
    {"negative", CONFIG("\"n_head\": -2, \"n_embd\": 4"), "\"n_head\": expected an integer 1..1048576, found -2"},
    {"beyond int", CONFIG("\"n_head\": 2, \"n_embd\": 4294967300"),
     "\"n_embd\": expected an integer 1..1048576, found 4294967300"},
    {"a real", CONFIG("\"n_head\": 2.0, \"n_embd\": 4"), "\"n_head\": expected an integer 1..1048576, found 2.0"},
    {"a text", CONFIG("\"n_head\": \"2\", \"n_embd\": 4"), "\"n_head\": expected an integer 1..1048576, found \"2\""},
    {"a list for a number", CONFIG("\"n_head\": [2], \"n_embd\": 4"),
     "\"n_head\": expected an integer 1..1048576, found [2]"},
    {"null", CONFIG("\"n_head\": null, \"n_embd\": 4"), "\"n_head\": expected an integer 1..1048576, found null"},
    {"heads that do not divide", CONFIG("\"n_head\": 3, \"n_embd\": 4"),
     "\"n_embd\" 4: expected a multiple of \"n_head\" 3"},
    {"another model", "{\"model_type\": \"mamba\", \"n_layer\": []}",
     "\"model_type\": this trainer computes \"gpt2\", found \"mamba\""},
    {"another type of text", HEADS("\"activation_function\": [\"gelu_new\"]"),
     "\"activation_function\": this trainer computes \"gelu_new\""},
    {"another epsilon", HEADS("\"layer_norm_epsilon\": 1e-6"), "\"layer_norm_epsilon\": this trainer computes"},
    {"another width", HEADS("\"n_inner\": 17"), "\"n_inner\": this trainer computes 16, found 17"},
    {"a number for a switch", HEADS("\"tie_word_embeddings\": 0"),
     "\"tie_word_embeddings\": this trainer computes true, found 0"},
};

static void test_config(Test* t) {
    check_table(t, try_config, configs, COUNT(configs));
    ErrorText error = {""};
    const char* good = HEADS("\"n_inner\": null, \"layer_norm_epsilon\": 0.00001, \"task\": {\"x\": [1, {\"y\": 2}]}");
    check(t, try_config((const unsigned char*)good, strlen(good), &error), "a good one is refused: %s", error.text);
}

// nested deeper, or longer, than any file of ours needs: refused before the parser's stack or heap grows
static void test_json_bounds(Test* t) {
    const size_t n = 2000000;
    json_error_t error;
    char* text = (char*)malloc_check(n, "brackets");
    memset(text, '[', n);
    memcpy(text, "{\n\"a\":", 6);
    check_bytes(t, try_config, "brackets", text, n, "2: found: more than 32 nested brackets");
    check_bytes(t, try_index, "brackets", text, n, "line 2: expected JSON, found: more than 32 nested brackets");
    check(t,
          !json_parse_bounded(text, (size_t)JSON_MAX_BYTES + 1, 32, &error) &&
              strstr(error.text, "100000001 bytes, more than"),
          "the length is asked first, found \"%s\"", error.text);
    for (size_t i = 8; i + 3 <= n; i += 3) { memcpy(text + i, "{},", 3); }
    memcpy(text, "{\n\"a\": [", 8);
    const JsonBudget most = {n, 32, 1000, 0};
    const int refused = !json_parse_within(text, n, &most, &error);
    check(t, refused && strstr(error.text, "more than 1000 commas") && error.line == 2,
          "many small objects, each of 224 bytes, found \"%s\"", error.text);
    free(text);
}

// ---- manifest.json: the sums are right, so that what is behind them is reached ----

#define MANIFEST(files, format) "{\n  \"format\": " format ",\n  \"files\": " files ",\n" MANIFEST_END
#define FILE_OF(name, bytes, xxh3) "[{\"name\": " name ", \"bytes\": " bytes ", \"xxh3\": " xxh3 "}]"
#define SUM16 "\"0123456789abcdef\""

static const Malformed manifests[] = {
    {"another format", MANIFEST("[]", "1"), "expected format 2 with a list"},
    {"a text for a format", MANIFEST("[]", "\"2\""), "expected format 2 with a list"},
    {"an object for the list", MANIFEST("{}", "2"), "expected format 2 with a list \"files\""},
    {"a number for a file", MANIFEST("[1]", "2"), "\"files\": expected plain file names"},
    {"a path upwards", MANIFEST(FILE_OF("\"../x\"", "1", SUM16), "2"), "\"files\": expected plain file names"},
    {"an absolute path", MANIFEST(FILE_OF("\"/etc/passwd\"", "1", SUM16), "2"), "\"files\": expected plain file names"},
    {"a folder", MANIFEST(FILE_OF("\"..\"", "1", SUM16), "2"), "\"files\": expected plain file names"},
    {"negative bytes", MANIFEST(FILE_OF("\"x\"", "-1", SUM16), "2"), "x: expected \"bytes\" and 16"},
    {"a text for bytes", MANIFEST(FILE_OF("\"x\"", "\"1\"", SUM16), "2"), "x: expected \"bytes\" and 16"},
    {"a short sum", MANIFEST(FILE_OF("\"x\"", "1", "\"0123\""), "2"), "16 hexadecimal digits"},
    {"a long sum", MANIFEST(FILE_OF("\"x\"", "1", "\"0123456789abcdef0\""), "2"), "16 hexadecimal digits"},
    {"no hexadecimal sum", MANIFEST(FILE_OF("\"x\"", "1", "\"0123456789abcdeg\""), "2"), "16 hexadecimal digits"},
    {"a key twice", MANIFEST("[], \"files\": []", "2"), "expected format 2 with a list"},
};

static void test_manifest(Test* t) {
    for (size_t i = 0; i < COUNT(manifests); i++) {
        char text[1024];
        size_t n = (size_t)snprintf(text, sizeof text, "%s", manifests[i].text);
        memcpy(text + n - MANIFEST_END_BYTES + MANIFEST_HASH_AT, hex_text(manifest_sum_(text, n)).s, 16);
        check_bytes(t, try_manifest, manifests[i].bug, text, n, manifests[i].expected);
    }
    check_bytes(t, try_manifest, "empty", "", 0, "does not end with its checksum");
    check_bytes(t, try_manifest, "only an end", MANIFEST_END, MANIFEST_END_BYTES, "does not end with its checksum");
    check_bytes(t, try_manifest, "another sum", "{\n" MANIFEST_END, MANIFEST_END_BYTES + 2, "its checksum differs");
}

// ---- llm.c's .bin ----

static const struct {
    const char* bug;
    int header[8];   // magic, version, maxT, V, L, NH, C, Vp
    size_t n_bytes;  // of the file
    const char* expected;
} bins[] = {
    {"empty", {BIN_MAGIC}, 0, "expected a header of 1024 bytes, found 0"},
    {"cut in the header", {BIN_MAGIC, 3, 8, 9, 1, 2, 4, 128}, 1023, "expected a header of 1024 bytes, found 1023"},
    {"another magic number", {20240327, 3, 8, 9, 1, 2, 4, 128}, 1024,
     "expected the magic number 20240326, found 20240327"},
    {"an older version", {BIN_MAGIC, 1, 8, 9, 1, 2, 4, 128}, 1024,
     "expected version 3 (float32) or 5 (bfloat16), found 1"},
    {"no version", {BIN_MAGIC, -3, 8, 9, 1, 2, 4, 128}, 1024, "expected version 3 (float32) or 5 (bfloat16), found -3"},
    {"zero heads", {BIN_MAGIC, 3, 8, 9, 1, 0, 4, 128}, 1024,
     "expected the sizes of a GPT-2, found maxT 8, V 9, L 1, NH 0"},
    {"zero layers", {BIN_MAGIC, 3, 8, 9, 0, 2, 4, 128}, 1024, "expected the sizes of a GPT-2"},
    {"negative channels", {BIN_MAGIC, 3, 8, 9, 1, 2, -4, 128}, 1024, "expected the sizes of a GPT-2"},
    {"most negative heads", {BIN_MAGIC, 3, 8, 9, 1, INT_MIN, 4, 128}, 1024, "expected the sizes of a GPT-2"},
    {"heads that do not divide", {BIN_MAGIC, 3, 8, 9, 1, 3, 4, 128}, 1024, "expected the sizes of a GPT-2"},
    {"padding below the vocabulary", {BIN_MAGIC, 3, 8, 129, 1, 2, 4, 128}, 1024, "expected the sizes of a GPT-2"},
    {"no padding", {BIN_MAGIC, 3, 8, 9, 1, 2, 4, 9}, 1024, "expected the sizes of a GPT-2"},
    {"largest integers", {BIN_MAGIC, 3, INT_MAX, INT_MAX, INT_MAX, 1, INT_MAX, INT_MAX}, 1024,
     "expected the sizes of a GPT-2"},
    {"channels beyond 2^20", {BIN_MAGIC, 3, 8, 9, 1, 1, (1 << 20) + 1, 128}, 1024, "expected the sizes of a GPT-2"},
    {"layers beyond 1024", {BIN_MAGIC, 3, 8, 9, 1025, 1, 4, 128}, 1024, "expected the sizes of a GPT-2"},
    {"positions beyond 2^24", {BIN_MAGIC, 3, (1 << 24) + 1, 9, 1, 1, 4, 128}, 1024, "expected the sizes of a GPT-2"},
    {"a vocabulary beyond 2^24", {BIN_MAGIC, 3, 8, (1 << 24) + 1, 1, 1, 4, (1 << 24) + 128}, 1024,
     "expected the sizes of a GPT-2"},
    {"petabytes", {BIN_MAGIC, 3, 1 << 24, 1 << 24, 1024, 1, 1 << 20, 1 << 24}, 1024,
     "bytes for the sizes in its header, found 1024"},
    {"no body", {BIN_MAGIC, 3, 8, 9, 1, 2, 4, 128}, 1024,
     "expected 4208 bytes for the sizes in its header, found 1024"},
    {"one byte short", {BIN_MAGIC, 3, 8, 9, 1, 2, 4, 128}, 4207,
     "expected 4208 bytes for the sizes in its header, found 4207"},
    {"one byte appended", {BIN_MAGIC, 3, 8, 9, 1, 2, 4, 128}, 4209,
     "expected 4208 bytes for the sizes in its header, found 4209"},
    {"the body of float32 for bfloat16", {BIN_MAGIC, 5, 8, 9, 1, 2, 4, 128}, 4208, "expected 2616 bytes"},
};

static void test_bin(Test* t) {
    for (size_t i = 0; i < COUNT(bins); i++) {
        unsigned char* bytes = (unsigned char*)calloc(8192, 1);
        memcpy(bytes, bins[i].header, sizeof bins[i].header);
        check_bytes(t, try_bin, bins[i].bug, bytes, bins[i].n_bytes, bins[i].expected);
        free(bytes);
    }
}

// ---- the probe ----

static const struct { const char *bug, *inputs, *targets; size_t n_data; const char* expected; } probes[] = {
    {"no inputs", "\"x\":{\"dtype\":\"I32\",\"shape\":[1,2],\"data_offsets\":[0,8]}", "[8,16]", 16,
     "expected a tensor \"inputs\", I32 of shape (B, T), found none of that name: the file has targets, x"},
    {"reals", "\"inputs\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]}", "[8,16]", 16,
     "expected a tensor \"inputs\", I32 of shape (B, T), found F32 of shape (1, 2)"},
    {"one dimension", "\"inputs\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[0,8]}", "[8,16]", 16,
     "expected a tensor \"inputs\", I32 of shape (B, T), found I32 of shape (2)"},
    {"no elements", "\"inputs\":{\"dtype\":\"I32\",\"shape\":[0,2],\"data_offsets\":[0,0]}", "[0,8]", 8,
     "expected a tensor \"inputs\", I32 of shape (B, T), found I32 of shape (0, 2)"},
    {"another shape", "\"inputs\":{\"dtype\":\"I32\",\"shape\":[2,1],\"data_offsets\":[0,8]}", "[8,16]", 16,
     "expected targets of the shape of inputs, (2, 1), found (1, 2)"},
    {"targets that overlap", "\"inputs\":{\"dtype\":\"I32\",\"shape\":[1,2],\"data_offsets\":[0,8]}", "[4,12]", 12,
     "it overlaps the tensor before it"},
    {"too long", "\"inputs\":{\"dtype\":\"I32\",\"shape\":[1,2],\"data_offsets\":[0,8]}", "[8,16]", 16,
     "expected at most the model's 1 positions, found 2"},
};

static void read_probe(void* path) {
    ProbeBatch batch;
    probe_read(&batch, (const char*)path, 9, 9, 1);
}

static void test_probe(Test* t) {
    TempPath folder = temp_folder();
    for (size_t i = 0; i < COUNT(probes); i++) {
        unsigned char file[1024] = {0};
        int n = snprintf((char*)file + 8, sizeof file - 64,
                         "{%s,\"targets\":{\"dtype\":\"I32\",\"shape\":[1,2],\"data_offsets\":%s}}", probes[i].inputs,
                         probes[i].targets);
        file[0] = (unsigned char)n;
        TempPath path = temp_file(&folder, "in.safetensors", file, 8 + (size_t)n + probes[i].n_data);
        check_exit(t, probes[i].bug, read_probe, path.s, 2, probes[i].expected);
    }
    temp_remove(&folder);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"index.json", "each bug class is refused with its own message", test_index},
        {"index.json, shards", "ten thousand of them are refused before one is opened", test_many_shards},
        {"config.json", "each bug class is refused with key, bounds and value", test_config},
        {"JSON, bounds", "a million brackets and 100 MB are refused before parsing", test_json_bounds},
        {"manifest.json", "each bug class is refused, also when its checksum is right", test_manifest},
        {"llm.c .bin", "each bug class is refused before memory is taken", test_bin},
        {"probe", "each bug class is refused with status 2", test_probe},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
