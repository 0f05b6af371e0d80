/*
Promises of llmc/files/hf_folder.h and of the shards of llmc/files/tensorfile.h: a model in many files is the model in
one, what an index claims is checked, --from names what it was given, and an export is whole and never in the way of
something else.
*/
#include "llmc/core/device.h"
#include "llmc/files/companions.h"
#include "llmc/files/tensorfile.h"
#include "llmc/text/tokenizer.h"
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"

enum { N_TABLE = 3, N_SLICES = 7, N_ON_DISK = 40 + 3 * (80 + 20) };

// three layers of a turned matrix and of a vector, and a matrix with padding rows
typedef struct {
    Tensor table[N_TABLE];
    size_t n;
    float *params, *back;
    TempPath folder;
} Small;

static Small small_init(void) {
    Small s;
    memset(&s, 0, sizeof s);
    s.table[0] = tensor("base.wte.weight", 0, 0, 16, 4, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    s.table[0].disk_rows = 10;
    s.table[1] = tensor("base.h.%d.mlp.weight", 0, 3, 20, 4, INIT_NORMAL, 1.0f, DECAY, TRANSPOSED);
    s.table[2] = tensor("base.h.%d.ln.bias", 0, 3, 1, 20, INIT_NORMAL, 1.0f, NO_DECAY, VECTOR);
    s.n = tensors_layout(s.table, N_TABLE);
    s.params = filled_array(s.n, 0.0f);
    s.back = filled_array(s.n, 0.0f);
    tensors_init(s.table, N_TABLE, s.params, 7);
    s.folder = temp_folder();
    return s;
}

static void small_free(Small* s) {
    free(s->params);
    free(s->back);
    temp_remove(&s->folder);
}

static TempPath text_file(const TempPath* folder, const char* name, const char* text) {
    return temp_file(folder, name, text, strlen(text));
}

// the model in shards of at most shard_bytes, with a config.json, in folder/name
static TempPath small_save(const Small* s, const char* name, size_t shard_bytes, SavedFiles* files) {
    char config[64];
    snprintf(config, sizeof config, "%s/config.json", name);
    text_file(&s->folder, config, "{\"written_by\": \"llmc\"}");
    TempPath folder = temp_path(&s->folder, name);
    files->n = 0;
    tensors_save_folder(folder.s, s->table, N_TABLE, s->params, DTYPE_F32, shard_bytes, files);
    return folder;
}

static void check_loads(Test* t, Small* s, const char* from) {
    char weights[PATH_BYTES], config[PATH_BYTES];
    SafeSet set;
    model_find(weights, config, from);
    safeset_open(&set, weights);
    memset(s->back, 0, sizeof(float) * s->n);
    tensors_load(&set, s->table, N_TABLE, "", s->back);
    check_bits(t, from, s->back, s->params, s->n);
    safeset_close(&set);
}

// ---- shards ----

static void test_shards(Test* t) {
    Small s = small_init();
    const struct { size_t shard_bytes; int n_files; } cases[] = {
        {1, 8}, {320, 8}, {400, 5}, {1000, 3}, {4 * N_ON_DISK - 1, 3}, {4 * N_ON_DISK, 1}, {SIZE_MAX, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[32];
        SavedFiles files;
        snprintf(name, sizeof name, "shards%zu", i);
        TempPath folder = small_save(&s, name, cases[i].shard_bytes, &files);
        check(t, files.n == cases[i].n_files, "%zu bytes: expected %d files, found %d", cases[i].shard_bytes,
              cases[i].n_files, files.n);
        const char* last = files.file[files.n - 1].name;
        check(t, strcmp(last, files.n > 1 ? HF_INDEX : HF_WEIGHTS) == 0, "%s was written last", last);
        for (int f = 0; f + 1 < files.n; f++) {
            // 2048: header
            int fits = files.file[f].n_bytes <= cases[i].shard_bytes + 2048 || cases[i].shard_bytes < 320;
            check(t, fits && hf_export_is_shard_(files.file[f].name), "%s: %zu bytes", files.file[f].name,
                  files.file[f].n_bytes);
        }
        check_loads(t, &s, folder.s);
    }
    small_free(&s);
}

static void save_too_many(void* folder) {
    Tensor table[1] = {tensor("t.%d.bias", 0, 1100, 1, 1, INIT_ZEROS, 0.0f, NO_DECAY, VECTOR)};
    size_t n = tensors_layout(table, 1);
    SavedFiles files;
    files.n = 0;
    tensors_save_folder((const char*)folder, table, 1, filled_array(n, 0.0f), DTYPE_F32, 1, &files);
}

static void test_too_many(Test* t) {
    TempPath folder = temp_folder();
    check_exit(t, "1100 shards", save_too_many, folder.s, 2, "would be 1100 shards: at most 1008, give a larger limit");
    check(t, rmdir(folder.s) == 0, "something was written first");
}

// the index of six tensors to a file: Hugging Face's sums, the names sorted
static void test_index(Test* t) {
    Small s = small_init();
    SavedFiles files;
    TempPath folder = small_save(&s, "model", 1000, &files);
    char path[PATH_BYTES];
    json_t* index = json_read(path_join(path, folder.s, HF_INDEX));
    json_t* metadata = json_object_get(index, "metadata");
    const char *key, *before = "";
    json_t* value;
    check(t, json_integer_value(json_object_get(metadata, "total_size")) == 4 * N_ON_DISK, "total_size");
    check(t, json_integer_value(json_object_get(metadata, "total_parameters")) == N_ON_DISK, "total_parameters");
    json_object_foreach(json_object_get(index, "weight_map"), key, value) {
        check(t, strcmp(before, key) < 0, "%s comes after %s", key, before);
        before = key;
    }
    json_decref(index);
    small_free(&s);
}

// the header that Hugging Face's writer makes: F32 by name, metadata first, blanks up to a multiple of 8
static void test_order(Test* t) {
    Small s = small_init();
    SavedFiles files;
    TempPath folder = small_save(&s, "model", SIZE_MAX, &files), path = temp_path(&folder, HF_WEIGHTS);
    static const char start[] =
        "{\"__metadata__\":{\"format\":\"pt\"},\"base.h.0.ln.bias\":{\"dtype\":\"F32\",\"shape\":[20],"
        "\"data_offsets\":[0,80]},\"base.h.0.mlp.weight\":{\"dtype\":\"F32\",\"shape\":[4,20],";
    MappedFile file;
    file_map(&file, path.s);
    check(t, memcmp(file.bytes + 8, start, sizeof start - 1) == 0, "found %.200s", (const char*)file.bytes + 8);
    check(t, file.bytes[0] % 8 == 0 && files.file[0].n_bytes == file.n_bytes, "sizes");
    file_unmap(&file);
    small_free(&s);
}

// ---- bf16 ----

// in the files of a folder: is each number the nearest bf16, and those of ln.bias, which stay floats, what they were?
static void check_halves(Test* t, const Small* s, const char* weights) {
    SafeSet set;
    safeset_open(&set, weights);
    TensorSlices all = tensors_sorted(s->table, N_TABLE);
    for (int i = 0; i < all.n; i++) {
        const TensorSlice* slice = &all.slice[i];
        const Tensor* x = slice->tensor;
        const SafeTensor* found = safeset_find(&set, slice->name);
        const int is_float = x->stored == STORED_F32;
        check(t, found && found->dtype == (is_float ? DTYPE_F32 : DTYPE_BF16), "%s: another type", slice->name);
        for (size_t j = 0; found && j < found->n; j++) {
            const size_t n_rows = 20, from = x->on_disk == TRANSPOSED ? j % n_rows * 4 + j / n_rows : j;
            const float want = s->params[x->offset + (size_t)slice->k * tensor_slice_elements(x) + from];
            float got;
            safetensors_to_f32(&got, found, j, 1);
            check(t, got == (is_float ? want : bf16_widen(bf16_nearest(want))), "%s[%zu]: %a became %a", slice->name,
                  j, (double)want, (double)got);
        }
    }
    for (int f = 0; f < set.n_files; f++) {
        const SafeTensor* x = set.files[f].tensors;
        for (int i = 1; i < set.files[f].n_tensors; i++) {
            check(t, dtype_size(x[i].dtype) <= dtype_size(x[i - 1].dtype), "%s: floats come first", x[i].name);
        }
    }
    free(all.slice);
    safeset_close(&set);
}

static int64_t index_total_size(const char* folder) {
    char path[PATH_BYTES];
    json_t* index = json_read(path_join(path, folder, HF_INDEX));
    const int64_t total = json_integer_value(json_object_get(json_object_get(index, "metadata"), "total_size"));
    json_decref(index);
    return total;
}

static void save_beyond(void* of) {
    const Small* s = (const Small*)of;
    SavedFiles files;
    files.n = 0;
    tensors_save_folder(s->folder.s, s->table, N_TABLE, s->params, DTYPE_BF16, SIZE_MAX, &files);
    fflush(stderr);
    _exit(3);  // it has warned
}

// the largest float that rounds to a finite bf16, and the smallest that does not; infinity was so before
static void test_beyond_bf16(Test* t) {
    Small s = small_init();
    char weights[PATH_BYTES];
    const float some[5] = {0x1.fefffep127f, 0x1.ffp127f, -FLT_MAX, INFINITY, NAN};
    memcpy(s.params, some, sizeof some);
    check_exit(t, "two of one tensor", save_beyond, &s, 3,
               "2 finite numbers of base.wte.weight became infinite: beyond bf16's largest, 3.39e38; ");
    s.params[s.table[1].offset] = FLT_MAX;
    check_exit(t, "one of another, before it in the file", save_beyond, &s, 3,
               "1 finite number of base.h.0.mlp.weight became infinite, 2 of other tensors: beyond bf16's largest");
    path_join(weights, s.folder.s, HF_WEIGHTS);
    SafeSet set;
    safeset_open(&set, weights);
    tensors_load(&set, s.table, N_TABLE, "", s.params);
    safeset_close(&set);
    check(t, s.params[0] == 0x1.fep127f && s.params[1] == INFINITY && s.params[2] == -INFINITY &&
          s.params[3] == INFINITY && isnan(s.params[4]), "%a %a %a %a %a", (double)s.params[0], (double)s.params[1],
          (double)s.params[2], (double)s.params[3], (double)s.params[4]);
    small_free(&s);
}

// Numbers that are no bf16, ties among them, in one file and in shards; and a folder of bf16 that is read and written
// again is what it was
static void test_bf16(Test* t) {
    enum { BYTES = 2 * (40 + 3 * 80) + 4 * (3 * 20), SHARD = 2 * 80 + 4 * 20 };  // a layer of both
    Small s = small_init();
    const float ties[4] = {0x1.01p0f, 0x1.03p0f, -0x1.01p0f, 0x1.010002p0f};  // to even: 1, 0x1.04p0, -1; not a tie
    SavedFiles whole, shards, again;
    char weights[PATH_BYTES], config[PATH_BYTES];
    tensor_stored(&s.table[2], STORED_F32);
    memcpy(s.params, ties, sizeof ties);
    TempPath one = temp_path(&s.folder, "one"), many = temp_path(&s.folder, "many"), back = temp_path(&s.folder, "b");
    whole.n = shards.n = again.n = 0;
    text_file(&s.folder, "one/config.json", "{}"), text_file(&s.folder, "many/config.json", "{}");
    text_file(&s.folder, "b/config.json", "{}");
    tensors_save_folder(one.s, s.table, N_TABLE, s.params, DTYPE_BF16, BYTES, &whole);
    tensors_save_folder(many.s, s.table, N_TABLE, s.params, DTYPE_BF16, SHARD, &shards);
    check(t, whole.n == 1 && shards.n == 5, "a limit of all bytes: %d files, of a layer's: %d", whole.n, shards.n);
    check(t, index_total_size(many.s) == BYTES, "total_size %lld", (long long)index_total_size(many.s));
    model_find(weights, config, one.s);
    check_halves(t, &s, weights);
    model_find(weights, config, many.s);
    check_halves(t, &s, weights);
    SafeSet set;
    safeset_open(&set, weights);
    tensors_load(&set, s.table, N_TABLE, "", s.params);
    safeset_close(&set);
    check(t, s.params[0] == 1.0f && s.params[1] == 0x1.04p0f && s.params[2] == -1.0f && s.params[3] == 0x1.02p0f,
          "ties go to even: %a %a %a %a", (double)s.params[0], (double)s.params[1], (double)s.params[2],
          (double)s.params[3]);
    tensors_save_folder(back.s, s.table, N_TABLE, s.params, DTYPE_BF16, SHARD, &again);
    for (int i = 0; i < shards.n; i++) {
        check(t, again.file[i].xxh3 == shards.file[i].xxh3, "%s: read and written again it is another",
              shards.file[i].name);
    }
    small_free(&s);
}

// ---- reading ----

enum { READ_ROWS = 3000, READ_COLUMNS = 1024, READ_DISK_ROWS = 2990 };  // 5.8 MiB of bf16: several blocks, and a part

// where slices go: floats, or what is stored as bf16; and bytes of the file that are memory when one is done
typedef struct {
    float* floats;
    uint16_t* halves;
    int takes_inexact;
    size_t most;
    int n_calls;  // with bands that follow those before, up to element `next`
    size_t next;
} ReadTo;

static float* read_room(void* to, const Tensor* t, int k) {
    (void)t, (void)k;
    return ((ReadTo*)to)->floats;
}

static uint16_t* read_halves(void* to, const Tensor* t, int k, int is_exact) {
    const ReadTo* r = (const ReadTo*)to;
    (void)t, (void)k;
    return is_exact || r->takes_inexact ? r->halves : NULL;
}

// (of the mapping: VmRSS of a process is only about right)
static size_t file_pages_in_memory(const char* name) {
    char line[PATH_BYTES];
    unsigned long kib = 0;
    int is_ours = 0, n_found = 0;
    FILE* maps = fopen("/proc/self/smaps", "r");
    while (maps && n_found == 0 && fgets(line, sizeof line, maps)) {
        is_ours |= strstr(line, name) != NULL;
        n_found = is_ours && sscanf(line, "Rss: %lu", &kib) == 1;
    }
    if (maps) { fclose(maps); }
    return n_found ? (size_t)kib << 10 : SIZE_MAX;
}

static void read_done(void* to, const Tensor* t, int k) {
    ReadTo* r = (ReadTo*)to;
    (void)t, (void)k;
    r->most = file_pages_in_memory(HF_WEIGHTS);
}

// one matrix with padding rows, in `dtype`
static TempPath read_write(const TempPath* folder, Tensor* t, const float* x, Dtype dtype) {
    SavedFiles files;
    files.n = 0;
    *t = tensor("w.weight", 0, 0, READ_ROWS, READ_COLUMNS, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    t->disk_rows = READ_DISK_ROWS;
    tensors_layout(t, 1);
    tensors_save_folder(folder->s, t, 1, x, dtype, SIZE_MAX, &files);
    return temp_path(folder, HF_WEIGHTS);
}

static void read_into(const TempPath* path, const Tensor* t, ReadTo* to) {
    const SliceSink sink = {read_room, read_done, to, read_halves, NULL, NULL};
    SafeSet set;
    safeset_open(&set, path->s);
    tensors_load_into(&sink, &set, t, 1, "", NULL);
    safeset_close(&set);
}

// as floats and as bf16, by any number of threads, straight or through floats; the file is in memory at no time
static void test_reading(Test* t) {
    const size_t n = (size_t)READ_ROWS * READ_COLUMNS, n_disk = (size_t)READ_DISK_ROWS * READ_COLUMNS;
    TempPath folder = temp_folder();
    float *x = random_array(n, 1.0f, 5), *floats = filled_array(n, 0.0f);
    uint16_t *want = (uint16_t*)new_array(n, 2), *halves = (uint16_t*)new_array(n, 2);
    memset(x + n_disk, 0, sizeof(float) * (n - n_disk));
    for (size_t i = 0; i < n; i++) { want[i] = bf16_nearest(x[i]); }
    for (int i = 0; i < 8; i++) {
        const Dtype dtype = i / 4 ? DTYPE_BF16 : DTYPE_F32;
        ReadTo to = {floats, i % 2 ? halves : NULL, i % 4 == 3, 0, 0, 0};
        Tensor row;
        const TempPath path = read_write(&folder, &row, x, dtype);
        Device dev;
        device_init(&dev, test_threads(i % 4));
        memset(floats, 0, sizeof(float) * n);
        memset(halves, 0, sizeof *halves * n);
        read_into(&path, &row, &to);
        const int is_straight = to.halves && (dtype == DTYPE_BF16 || to.takes_inexact);
        for (size_t j = 0; j < n; j++) {
            const float value = dtype == DTYPE_BF16 ? bf16_widen(want[j]) : x[j];
            const int same = is_straight ? halves[j] == want[j] : floats[j] == value;
            if (!check(t, same, "%s, element %zu: another", is_straight ? "bf16" : "floats", j)) { break; }
        }
        check(t, to.most == 0, "%zu bytes of the file are in memory", to.most);
        device_free(&dev);
    }
    free(x), free(floats), free(want), free(halves);
    temp_remove(&folder);
}

// Three experts of (130, 129), 2 x 2 blocks each, as one tensor or each as its own; or one matrix of 300 rows, of which
// the file has 130. Odd slices go through floats
enum { FP8_E = 3, FP8_R = 130, FP8_C = 129, FP8_MOST = 300 };

typedef struct {
    uint8_t bytes[FP8_E][FP8_MOST * FP8_C];
    float scales[FP8_E][6], floats[FP8_E][FP8_MOST * FP8_C];
    int takes;
    size_t most;  // bytes of the file that are memory when a slice is done
} Fp8To;

static void fp8_done(void* to, const Tensor* t, int k) {
    (void)t, (void)k;
    ((Fp8To*)to)->most = file_pages_in_memory(HF_WEIGHTS);
}

static float* fp8_room(void* to, const Tensor* t, int k) {
    (void)t;
    return ((Fp8To*)to)->floats[k];
}

static uint8_t* fp8_bytes(void* to, const Tensor* t, int k, Stored kind, void** scales) {
    Fp8To* x = (Fp8To*)to;
    (void)t;
    if (kind != STORED_FP8) { return NULL; }
    *scales = x->scales[k];
    return x->takes && k % 2 == 0 ? x->bytes[k] : NULL;
}

typedef struct {
    uint8_t codes[FP8_E][FP8_R * FP8_C];
    float scales[FP8_E][4];
} Fp8File;

static TempPath fp8_write(const TempPath* folder, const Fp8File* x, ExpertsOnDisk how, int n) {
    const TempPath path = temp_path(folder, HF_WEIGHTS);
    const int is_fused = how == FUSED, n_dims = is_fused ? 3 : 2, first = is_fused ? 0 : 1;
    const int64_t shape[] = {n, FP8_R, FP8_C}, blocks[] = {n, 2, 2};
    char name[64];
    SafeWriter w;
    safewriter_init(&w);
    for (int k = 0; k < 2 * n; k += is_fused ? n : 1) {
        const int is_codes = k >= n;
        snprintf(name, sizeof name, "0.w");
        if (!is_fused) { snprintf(name, sizeof name, "0.w.%d", k % n); }
        if (!is_codes) { snprintf(name + strlen(name), sizeof name - strlen(name), "_scale_inv"); }
        safewriter_declare(&w, name, is_codes ? DTYPE_F8_E4M3 : DTYPE_F32, n_dims, (is_codes ? shape : blocks) + first);
    }
    safewriter_open(&w, path.s);
    safewriter_put(&w, x->scales, sizeof x->scales[0] * (size_t)n);
    safewriter_put(&w, x->codes, sizeof x->codes[0] * (size_t)n);
    safewriter_close(&w);
    return path;
}

static void fp8_load(const TempPath* path, const Tensor* row, Fp8To* to) {
    const SliceSink sink = {fp8_room, fp8_done, to, NULL, NULL, NULL, NULL, fp8_bytes};
    SafeSet set;
    safeset_open(&set, path->s);
    tensors_load_into(&sink, &set, row, 1, "", NULL);
    safeset_close(&set);
}

static void fp8_check(Test* t, const Fp8File* x, const Fp8To* to, int k) {
    const int is_straight = to->takes && k % 2 == 0;
    int n_wrong = 0;
    for (int i = 0; i < FP8_R * FP8_C; i++) {
        const float want = fp8_widen(x->codes[k][i]) * x->scales[k][i / FP8_C / 128 * 2 + i % FP8_C / 128];
        n_wrong += is_straight ? to->bytes[k][i] != x->codes[k][i] : to->floats[k][i] != want;
    }
    check(t, n_wrong == 0, "slice %d, %s: %d others", k, is_straight ? "bytes" : "floats", n_wrong);
    const int same = !is_straight || memcmp(to->scales[k], x->scales[k], sizeof x->scales[k]) == 0;
    check(t, same, "slice %d: other scales", k);
}

static const TempPath* fp8_bad;  // for a process that ends

static void read_bad_fp8(void* of) {
    static Fp8To to;
    fp8_load(fp8_bad, (const Tensor*)of, &to);
}

static void test_fp8(Test* t) {
    static Fp8File x;
    static Fp8To to;
    TempPath folder = temp_folder(), path;
    for (int k = 0; k < FP8_E; k++) {
        for (int i = 0; i < FP8_R * FP8_C; i++) {
            x.codes[k][i] = (uint8_t)((i + k) * 7 % 127 + i % 2 * 128);  // no NaN
        }
        for (int i = 0; i < 4; i++) { x.scales[k][i] = 0.001f * (float)(4 * k + i + 1); }
    }
    for (int i = 0; i < 4; i++) {
        const ExpertsOnDisk how = i % 2 ? FUSED : APART;
        const char* name = how == FUSED ? "%d.w" : "%d.w.%d";
        Tensor row = tensor(name, 0, 1, FP8_R, FP8_C, INIT_NONE, 0.0f, DECAY, AS_IS);
        tensor_experts(&row, FP8_E, how);
        tensors_layout(&row, 1);
        path = fp8_write(&folder, &x, how, FP8_E);
        memset(&to, 0xee, sizeof to);
        to.takes = i / 2;
        fp8_load(&path, &row, &to);
        for (int k = 0; k < FP8_E; k++) { fp8_check(t, &x, &to, k); }
        check(t, to.most == 0, "%zu bytes of the file are in memory", to.most);
    }
    Tensor row = tensor("0.w.0", 0, 0, FP8_MOST, FP8_C, INIT_NONE, 0.0f, DECAY, AS_IS);
    row.disk_rows = FP8_R;
    path = fp8_write(&folder, &x, APART, 1);
    memset(&to, 0xee, sizeof to);
    to.takes = 1;
    fp8_load(&path, &row, &to);
    fp8_check(t, &x, &to, 0);
    int n_wrong = to.scales[0][4] != 0.0f || to.scales[0][5] != 0.0f;
    for (int i = FP8_R * FP8_C; i < FP8_MOST * FP8_C; i++) { n_wrong += to.bytes[0][i] != 0; }
    check(t, n_wrong == 0, "%d bytes of padding rows are not zero", n_wrong);
    x.codes[0][FP8_R * FP8_C - 1] = 0xff;
    path = fp8_write(&folder, &x, APART, 1);
    fp8_bad = &path;
    check_exit(t, "NaN", read_bad_fp8, &row, 2,
               "tensor \"0.w.0\": expected numbers of e4m3, found 1 bytes that are NaN");
    temp_remove(&folder);
}

// ---- fp4: three experts of (3, 64), as one tensor or each as its own; scales of each 32 columns ----

enum { FP4_E = 3, FP4_R = 3, FP4_C = 64 };

typedef struct {
    uint8_t codes[FP4_E][FP4_R * FP4_C / 2], exponents[FP4_E][FP4_R * FP4_C / 32];
} Fp4File;

typedef struct {
    Fp4File stored;
    float floats[FP4_E][FP4_R * FP4_C];
    int takes;
} Fp4To;

static float* fp4_room(void* to, const Tensor* t, int k) {
    (void)t;
    return ((Fp4To*)to)->floats[k];
}

static uint8_t* fp4_bytes(void* to, const Tensor* t, int k, Stored kind, void** scales) {
    Fp4To* x = (Fp4To*)to;
    (void)t;
    *scales = x->stored.exponents[k];
    return kind == STORED_FP4 && x->takes ? x->stored.codes[k] : NULL;
}

// what of a file a test changes
typedef struct {
    const char* scale_end;  // of the names of scales: behind "0.w.%d", or "0.w" of fused ones
    int n_codes, n_scales;  // experts that have codes, and scales
    Dtype scale_dtype, code_dtype;
    int columns, groups;
} Fp4How;

static const Fp4How fp4_usual = {".scale", FP4_E, FP4_E, DTYPE_F8_E8M0, DTYPE_I8, FP4_C / 2, FP4_C / 32};

static TempPath fp4_write(const TempPath* folder, const Fp4File* x, ExpertsOnDisk on_disk, const Fp4How* how) {
    static const char zeros[4 * FP4_E * FP4_R * FP4_C] = {0};
    const TempPath path = temp_path(folder, HF_WEIGHTS);
    const int is_fused = on_disk == FUSED, first = is_fused ? 0 : 1;
    const int64_t shape[] = {FP4_E, FP4_R, how->columns}, groups[] = {FP4_E, FP4_R, how->groups};
    const int is_usual = how->columns == FP4_C / 2 && how->groups == FP4_C / 32 && how->scale_dtype == DTYPE_F8_E8M0;
    char name[64];
    SafeWriter w;
    safewriter_init(&w);
    for (int part = 0; part < 2; part++) {
        for (int k = 0, n = part ? how->n_codes : how->n_scales; k < (is_fused && n > 0 ? 1 : n); k++) {
            const char* end = part ? ".weight" : how->scale_end;
            if (is_fused) { snprintf(name, sizeof name, "0.w%s", end); }
            else { snprintf(name, sizeof name, "0.w.%d%s", k, end); }
            safewriter_declare(&w, name, part ? how->code_dtype : how->scale_dtype, 3 - first,
                               (part ? shape : groups) + first);
        }
    }
    safewriter_open(&w, path.s);
    const size_t n_scales = (size_t)(how->n_scales * FP4_R * how->groups), n_codes = (size_t)(how->n_codes * FP4_R * how->columns);
    safewriter_put(&w, is_usual ? (const void*)x->exponents : zeros, dtype_size(how->scale_dtype) * n_scales);
    safewriter_put(&w, is_usual ? (const void*)x->codes : zeros, dtype_size(how->code_dtype) * n_codes);
    safewriter_close(&w);
    return path;
}

static Tensor fp4_row(ExpertsOnDisk on_disk) {
    Tensor row = tensor(on_disk == FUSED ? "%d.w.weight" : "%d.w.%d.weight", 0, 1, FP4_R, FP4_C, INIT_NONE, 0.0f, DECAY,
                        AS_IS);
    tensor_experts(&row, FP4_E, on_disk);
    tensors_layout(&row, 1);
    return row;
}

static void fp4_load(const TempPath* path, const Tensor* row, Fp4To* to) {
    const SliceSink sink = {fp4_room, NULL, to, NULL, NULL, NULL, NULL, fp4_bytes};
    SafeSet set;
    safeset_open(&set, path->s);
    tensors_load_into(&sink, &set, row, 1, "", NULL);
    safeset_close(&set);
}

static const TempPath* fp4_bad;  // for a process that ends

static void read_bad_fp4(void* of) {
    static Fp4To to;
    fp4_load(fp4_bad, (const Tensor*)of, &to);
}

static void fp4_check(Test* t, const Fp4File* x, const Fp4To* to) {
    const float sizes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    if (to->takes) { check(t, memcmp(&to->stored, x, sizeof *x) == 0, "other bytes"); }
    for (int k = 0; k < FP4_E && !to->takes; k++) {
        for (int i = 0; i < FP4_R * FP4_C; i++) {
            const int code = i % 2 ? x->codes[k][i / 2] / 16 : x->codes[k][i / 2] % 16;
            const float size = sizes[code & 7] * ldexpf(1.0f, x->exponents[k][i / 32] - 127);
            const float want = code & 8 ? -size : size;
            check(t, float_bits(to->floats[k][i]) == float_bits(want), "(%d, %d): %g, expected %g", k, i,
                  (double)to->floats[k][i], (double)want);
        }
    }
}

static void test_fp4(Test* t) {
    static Fp4File x;
    static Fp4To to;
    TempPath folder = temp_folder(), path;
    for (size_t i = 0; i < sizeof x; i++) { ((uint8_t*)&x)[i] = (uint8_t)(i * 31); }
    for (size_t i = 0; i < sizeof x.exponents; i++) { ((uint8_t*)x.exponents)[i] = (uint8_t)(i * 59 % 253); }
    for (int i = 0; i < 8; i++) {
        const ExpertsOnDisk on_disk = i % 2 ? FUSED : APART;
        const Tensor row = fp4_row(on_disk);
        Fp4How how = fp4_usual;
        how.scale_end = i / 4 ? ".weight_scale_inv" : ".scale";
        path = fp4_write(&folder, &x, on_disk, &how);
        memset(&to, 0xee, sizeof to);
        to.takes = i / 2 % 2;
        fp4_load(&path, &row, &to);
        fp4_check(t, &x, &to);
        SafeSet set;
        safeset_open(&set, path.s);
        check(t, tensor_stored_in(&set, &row, "") == STORED_FP4, "it can lie in memory as it is");
        safeset_close(&set);
    }
    Tensor row = fp4_row(APART);
    const struct { const char* text; Fp4How how; } bad[] = {
        {"tensor \"0.w.2.weight\" is I8 and has no scales \"0.w.2.weight_scale_inv\" or \"0.w.2.scale\"",
         {".scale", 3, 2, DTYPE_F8_E8M0, DTYPE_I8, 32, 2}},
        {"tensor \"0.w.2.scale\" has the scales of \"0.w.2.weight\", which is missing",
         {".scale", 2, 3, DTYPE_F8_E8M0, DTYPE_I8, 32, 2}},
        {"tensor \"0.w.2.weight_scale_inv\" has the scales of \"0.w.2.weight\", which is missing",
         {".weight_scale_inv", 2, 3, DTYPE_F8_E8M0, DTYPE_I8, 32, 2}},
        {"tensor \"0.w.0.scale\": expected scales of 32 columns of a row, F8_E8M0 (3, 2), found F8_E8M0 (3, 4)",
         {".scale", 3, 3, DTYPE_F8_E8M0, DTYPE_I8, 32, 4}},
        {"tensor \"0.w.0.scale\": expected scales of 32 columns of a row, F8_E8M0 (3, 2), found F32 (3, 2)",
         {".scale", 3, 3, DTYPE_F32, DTYPE_I8, 32, 2}},
        {"tensor \"0.w.0.weight\": expected 2 dimensions (3, 32), found 2 (3, 64)",
         {".scale", 3, 3, DTYPE_F8_E8M0, DTYPE_I8, 64, 4}},
        {"tensor \"0.w.0.weight\": expected F8_E4M3 or I8, for \"0.w.0.scale\" has scales of it, found U8",
         {".scale", 3, 3, DTYPE_F8_E8M0, DTYPE_U8, 32, 2}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        path = fp4_write(&folder, &x, APART, &bad[i].how);
        fp4_bad = &path;
        check_exit(t, bad[i].text, read_bad_fp4, &row, 2, bad[i].text);
    }
    x.exponents[1][5] = 253;
    path = fp4_write(&folder, &x, APART, &fp4_usual);
    check_exit(t, "a large scale", read_bad_fp4, &row, 2,
               "tensor \"0.w.1.scale\": expected scales of at most 2^125, with which all fp4 are floats, found 8.5");
    row = tensor("%d.w.%d.weight", 0, 1, FP4_R, 80, INIT_NONE, 0.0f, DECAY, AS_IS);
    tensor_experts(&row, FP4_E, APART);
    tensors_layout(&row, 1);
    check_exit(t, "80 columns", read_bad_fp4, &row, 2, "tensor \"0.w.0.weight\" is I8, two fp4 in a byte: expected columns "
               "in groups of 32, config.json says 80");
    temp_remove(&folder);
}

// a tensor that is stored as fp8 comes by bands, in order and some at a time, its padding rows as zeros
static int takes_bands(void* to, const Tensor* t, int k) {
    (void)to, (void)k;
    return t->stored == STORED_FP8;
}

static void read_bands(void* to, const Tensor* t, int k, int band, int n, const float* x) {
    ReadTo* r = (ReadTo*)to;
    int n_rows;
    const size_t first = tensor_band(t, band, &n_rows), last = tensor_band(t, band + n - 1, &n_rows);
    const size_t at = (size_t)k * tensor_slice_elements(t) + first * READ_COLUMNS;
    memcpy(r->floats + at, x, sizeof(float) * (last + (size_t)n_rows - first) * READ_COLUMNS);
    r->n_calls += at == r->next;
    r->next = at + (last + (size_t)n_rows - first) * READ_COLUMNS;
}

static void test_bands(Test* t) {
    const size_t n = (size_t)READ_ROWS * READ_COLUMNS, n_disk = (size_t)READ_DISK_ROWS * READ_COLUMNS;
    TempPath folder = temp_folder();
    float *x = random_array(n, 1.0f, 5), *floats = filled_array(n, NAN);
    memset(x + n_disk, 0, sizeof(float) * (n - n_disk));
    for (int i = 0; i < 4; i++) {
        ReadTo to = {floats, NULL, 0, 0, 0, 0};
        const SliceSink sink = {read_room, read_done, &to, NULL, takes_bands, read_bands};
        Tensor row;
        const TempPath path = read_write(&folder, &row, x, i / 2 ? DTYPE_BF16 : DTYPE_F32);
        SafeSet set;
        if (i % 2) {  // two slices of one matrix: of 1,500 rows each, the last band has 92
            row = tensor("w.{a,b}", 0, 0, READ_ROWS, READ_COLUMNS, INIT_NORMAL, 1.0f, DECAY, AS_IS);
            SavedFiles files;
            files.n = 0;
            tensors_layout(&row, 1);
            tensors_save_folder(folder.s, &row, 1, x, i / 2 ? DTYPE_BF16 : DTYPE_F32, SIZE_MAX, &files);
        }
        tensor_stored(&row, STORED_FP8);
        for (size_t j = 0; j < n; j++) { floats[j] = NAN; }
        safeset_open(&set, path.s);
        tensors_load_into(&sink, &set, &row, 1, "", NULL);
        safeset_close(&set);
        for (size_t j = 0; j < n; j++) {
            const float value = i / 2 ? bf16_widen(bf16_nearest(x[j])) : x[j];
            if (!check(t, floats[j] == value, "element %zu: another", j)) { break; }
        }
        check(t, to.next == n && to.n_calls == 2, "%d calls in order, up to element %zu", to.n_calls, to.next);
        check(t, to.most == 0, "%zu bytes of the file are in memory", to.most);
    }
    free(x), free(floats);
    temp_remove(&folder);
}

// ---- parts of a matrix that ranks share: some rows of three sections, columns, or rows of a padded vocabulary ----

enum { PART_ROWS = 216, PART_DISK_ROWS = 200, PART_COLUMNS = 192, PART_ALL = PART_ROWS * PART_COLUMNS };

// as a file has it and as a rank stores its part
typedef struct {
    Stored kind;
    uint8_t whole[2 * PART_ALL], whole_scales[PART_ALL / 32];
    TensorPart part;
    uint8_t bytes[2 * PART_ALL], scales[4 * PART_ALL];
} Parts;

static TensorPart parts_part(void* to, const Tensor* t, int k) {
    (void)t, (void)k;
    return ((Parts*)to)->part;
}

static float* parts_room(void* to, const Tensor* t, int k) {
    (void)to, (void)t, (void)k;
    return NULL;  // nothing of it comes as floats
}

static uint16_t* parts_halves(void* to, const Tensor* t, int k, int is_exact) {
    (void)t, (void)k, (void)is_exact;
    return (uint16_t*)(void*)((Parts*)to)->bytes;
}

static uint8_t* parts_scaled(void* to, const Tensor* t, int k, Stored kind, void** scales) {
    Parts* x = (Parts*)to;
    (void)t, (void)k;
    *scales = x->scales;
    return kind == x->kind ? x->bytes : NULL;
}

// any numbers but NaN, in a file; padding is zeros
static TempPath parts_write(const TempPath* folder, Parts* x, Stored kind, int rows) {
    const TempPath path = temp_path(folder, HF_WEIGHTS);
    const Dtype dtypes[] = {DTYPE_BF16, DTYPE_F8_E4M3, DTYPE_I8}, dtype = dtypes[kind - STORED_BF16];
    const int is_fp4 = kind == STORED_FP4;
    const int64_t shape[] = {rows, is_fp4 ? PART_COLUMNS / 2 : PART_COLUMNS};
    const int64_t of_scales[] = {is_fp4 ? rows : fp8_blocks(rows), PART_COLUMNS / (is_fp4 ? 32 : 96)};
    const size_t n = stored_bytes(kind, (size_t)rows * PART_COLUMNS), n_scales = (size_t)(of_scales[0] * of_scales[1]);
    SafeWriter w;
    memset(x, 0, sizeof *x);
    x->kind = kind;
    for (size_t i = 0; i < n; i++) { x->whole[i] = (uint8_t)(i * 7 % 127 + i / 19 % 2 * 128); }
    for (size_t i = 0; i < n_scales; i++) {
        if (is_fp4) { x->whole_scales[i] = (uint8_t)(100 + i % 41); }
        else { ((float*)(void*)x->whole_scales)[i] = 0.001f * (float)(i + 1); }
    }
    safewriter_init(&w);
    safewriter_declare(&w, "w.weight", dtype, 2, shape);
    if (kind != STORED_BF16) { safewriter_declare(&w, "w.scale", is_fp4 ? DTYPE_F8_E8M0 : DTYPE_F32, 2, of_scales); }
    safewriter_open(&w, path.s);
    safewriter_put(&w, x->whole, n);
    if (kind != STORED_BF16) { safewriter_put(&w, x->whole_scales, (is_fp4 ? 1 : sizeof(float)) * n_scales); }
    safewriter_close(&w);
    return path;
}

// fp8 that is taken from a whole one band by band is the same
static int parts_by_bands(const Parts* x, const StoredMatrix* own) {
    const size_t n = (size_t)own->rows * (size_t)own->columns, n_scales = sizeof(float) * stored_scales(own);
    uint8_t* bytes = (uint8_t*)new_array(n, 1);
    float* scales = (float*)new_array(n_scales, 1);
    for (int first = 0; first < PART_ROWS; first += FP8_BLOCK) {
        const int rows = PART_ROWS - first < FP8_BLOCK ? PART_ROWS - first : FP8_BLOCK;
        if (!tensor_part_meets(&x->part, first, rows)) { continue; }
        tensor_take_rows(bytes, x->whole + first * PART_COLUMNS, &x->part, PART_COLUMNS, 1, 1, first, rows);
        tensor_take_scales(scales, (const float*)(const void*)x->whole_scales + 2 * (first / FP8_BLOCK), &x->part,
                           PART_COLUMNS, first, rows);
    }
    const int same = memcmp(bytes, x->bytes, n) == 0 && memcmp(scales, x->scales, n_scales) == 0;
    free(bytes), free(scales);
    return same;
}

// what lies in memory are the numbers of the whole, and of rows nothing else was read
static void parts_check(Test* t, const Parts* x, const Tensor* row, int rank, int size, size_t n_read) {
    const TensorPart* p = &x->part;
    StoredMatrix whole = stored_matrix(x->whole, x->kind, PART_ROWS, PART_COLUMNS, PART_ROWS, x->whole_scales), own = whole;
    int n_wrong = 0, at = 0, there = 0;
    own.data = x->bytes, own.scales = x->scales, own.columns = p->of[0].n_columns;
    own.block_rows = p->block_rows, own.block_columns = p->block_columns;
    for (int k = 0; k < p->n; k++) {
        const int left = row->disk_rows - p->of[k].row;
        there += left < p->of[k].n_rows ? left : p->of[k].n_rows;
    }
    own.rows = own.part_rows = (int)(tensor_elements(row) / (size_t)size) / own.columns;
    for (int k = 0; k < p->n; k++) {
        const TensorWindow* w = &p->of[k];
        for (int r = 0; r < w->n_rows; r++, at++) {
            for (int c = 0; c < w->n_columns; c++) {
                const float want = stored_value(&whole, w->row + r, w->column + c), is = stored_value(&own, at, c);
                n_wrong += float_bits(want) != float_bits(is);
            }
        }
    }
    check(t, n_wrong == 0, "kind %d, split %d, rank %d of %d: %d others", x->kind, row->split, rank, size, n_wrong);
    check(t, x->kind != STORED_FP8 || parts_by_bands(x, &own), "... by bands: other bytes or scales");
    const size_t most = stored_bytes(x->kind, (size_t)there * PART_COLUMNS), of_scales = (size_t)PART_ROWS * 6;
    check(t, n_read <= most + of_scales, "kind %d, split %d: %zu bytes read of %d rows", x->kind, row->split, n_read, there);
}

static void test_parts(Test* t) {
    static Parts x;
    const Split splits[] = {SPLIT_ROWS, SPLIT_COLUMNS, SPLIT_VOCABULARY};
    TempPath folder = temp_folder();
    size_t header = 0;  // of the file, which is not counted
    for (int i = 0; i < 9; i++) {
        Tensor row = tensor("w.weight", 0, 0, PART_ROWS, PART_COLUMNS, INIT_NONE, 0.0f, DECAY, AS_IS);
        tensor_split(&row, splits[i / 3], 0);
        if (row.split == SPLIT_ROWS) { tensor_sections(&row, 72, 36, 108, 0); }
        if (row.split == SPLIT_VOCABULARY) { row.disk_rows = PART_DISK_ROWS; }
        tensors_layout(&row, 1);
        const Stored kind = (Stored)(STORED_BF16 + i % 3);
        const TempPath path = parts_write(&folder, &x, kind, row.disk_rows);
        for (int rank = 0, size = 1; size <= 3; rank + 1 < size ? rank++ : (rank = 0, size++)) {
            const SliceSink sink = {parts_room, NULL, &x, kind == STORED_BF16 ? parts_halves : NULL, NULL, NULL, NULL,
                                    parts_scaled, parts_part};
            SafeSet set;
            x.part = tensor_part(&row, rank, size);
            memset(x.bytes, kind == STORED_BF16 ? 0 : 0xee, sizeof x.bytes), memset(x.scales, 0xee, sizeof x.scales);
            safeset_open(&set, path.s);
            tensors_load_into(&sink, &set, &row, 1, "", NULL);
            header = size == 1 ? set.n_bytes - set.n_read : header;
            check(t, set.n_bytes - set.n_read == header, "%zu bytes read of %zu", set.n_read, set.n_bytes);
            parts_check(t, &x, &row, rank, size, set.n_read);
            safeset_close(&set);
        }
    }
    temp_remove(&folder);
}

// what standard error shows, if it is a terminal, while a file is loaded that was opened so many seconds ago
static size_t read_on_terminal(Test* t, char* shown, size_t n_bytes, const TempPath* path, const Tensor* row,
                               double seconds) {
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY), before = dup(STDERR_FILENO);
    check(t, terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0, "no terminal: %s", strerror(errno));
    const int other_end = open(ptsname(terminal), O_RDWR | O_NOCTTY);
    float* floats = filled_array((size_t)READ_ROWS * READ_COLUMNS, 0.0f);
    SafeSet set;
    safeset_open(&set, path->s);
    set.opened -= seconds;
    dup2(other_end, STDERR_FILENO);
    tensors_load(&set, row, 1, "", floats);
    safeset_close(&set);
    dup2(before, STDERR_FILENO);
    check(t, write(other_end, "$", 1) == 1, "no terminal: %s", strerror(errno));
    size_t n = 0;  // what a terminal shows comes in pieces
    for (ssize_t got = 1; got > 0 && n < n_bytes && !(n > 0 && shown[n - 1] == '$'); n += got > 0 ? (size_t)got : 0) {
        got = read(terminal, shown + n, n_bytes - n);
    }
    close(terminal), close(other_end), close(before);
    free(floats);
    if (!check(t, n > 0 && shown[n - 1] == '$', "%zu bytes have no end", n)) { n = 1; }
    shown[--n] = '\0';
    return n;
}

static void test_bar(Test* t) {
    char shown[4096];
    TempPath folder = temp_folder();
    Tensor row;
    float* x = filled_array((size_t)READ_ROWS * READ_COLUMNS, 1.0f);
    const TempPath path = read_write(&folder, &row, x, DTYPE_F32);
    check(t, read_on_terminal(t, shown, sizeof shown, &path, &row, -100.0) == 0, "soon read, it showed %s", shown);
    const size_t n = read_on_terminal(t, shown, sizeof shown, &path, &row, 100.0);
    check(t, strncmp(shown, "loading ", 8) == 0, "a long time: it showed \"%.40s\"", shown);
    check(t, n > 20 && strspn(shown + n - 20, " ") == 19 && shown[n - 1] == '\r', "the bar has stayed");
    free(x);
    temp_remove(&folder);
}

// ---- indices and shards that lie ----

static void open_found(void* from) {
    char weights[PATH_BYTES], config[PATH_BYTES];
    SafeSet set;
    model_find(weights, config, (const char*)from);
    safeset_open(&set, weights);
    safeset_close(&set);
}

// a safetensors file with one byte for each name
static void tiny_file(const char* path, const char* const* names, int n) {
    SafeWriter w;
    int64_t one = 1;
    safewriter_init(&w);
    for (int i = 0; i < n; i++) { safewriter_declare(&w, names[i], DTYPE_U8, 1, &one); }
    safewriter_open(&w, path);
    for (int i = 0; i < n; i++) { safewriter_put(&w, "x", 1); }
    safewriter_close(&w);
}

static void test_false_index(Test* t) {
    TempPath folder = temp_folder(), outside = temp_folder(), model = temp_path(&folder, "model");
    const char *names_a[] = {"a", "b"}, *names_b[] = {"c", "b"}, *names_c[] = {"c", "d"};
    text_file(&folder, "model/config.json", "{}");
    TempPath a = temp_path(&folder, "model/a.safetensors"), b = temp_path(&folder, "model/b.safetensors");
    TempPath far = temp_path(&outside, "b.safetensors");
    tiny_file(a.s, names_a, 2);
    text_file(&folder, "model/" HF_INDEX, "{\"weight_map\": {\"a\": \"a.safetensors\", \"c\": \"b.safetensors\"}}");
    check_exit(t, "missing shard", open_found, model.s, 2, "b.safetensors: is missing, but");
    tiny_file(b.s, names_b, 2);
    check_exit(t, "in two shards", open_found, model.s, 2, "tensor \"b\" is in two shards");
    tiny_file(b.s, names_c, 2);
    check_exit(t, "d is not in the map", open_found, model.s, 0, "");
    tiny_file(b.s, names_c + 1, 1);
    check_exit(t, "in no shard", open_found, model.s, 2, "expected tensor \"c\" in b.safetensors, found none");
    tiny_file(far.s, names_c, 2);
    unlink(b.s);
    check(t, symlink(far.s, b.s) == 0, "no link");
    check_exit(t, "a link out of the folder", open_found, model.s, 2,
               "b.safetensors: expected a file of this folder, found a link to");
    text_file(&folder, "model/" HF_INDEX, "{\"weight_map\": {\"a\": \"../a.safetensors\"}}");
    check_exit(t, "a path", open_found, model.s, 2,
               "expected a file of this folder that ends in .safetensors, found \"../a.safetensors\"");
    text_file(&folder, "model/" HF_INDEX, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n");
    check_exit(t, "a pointer", open_found, model.s, 2, HF_INDEX ": expected JSON, found a Git LFS pointer");
    temp_remove(&folder);
    temp_remove(&outside);
}

// Hugging Face's cache: snapshots/<commit>/<name> are links to blobs/<hash>
static void test_cache(Test* t) {
    TempPath cache = temp_folder(), blob_a = temp_path(&cache, "blobs/0a"), blob_b = temp_path(&cache, "blobs/0b");
    TempPath folder = temp_path(&cache, "snapshots/c0"), a = temp_path(&cache, "snapshots/c0/a.safetensors");
    TempPath b = temp_path(&cache, "snapshots/c0/b.safetensors");
    const char* names[] = {"a", "b"};
    tiny_file(blob_a.s, names, 1);
    tiny_file(blob_b.s, names + 1, 1);
    check(t, symlink("../../blobs/0a", a.s) == 0 && symlink("../../blobs/0b", b.s) == 0, "no link");
    text_file(&folder, HF_INDEX,
              "{\"metadata\": {}, \"weight_map\": {\"a\": \"a.safetensors\", \"b\": \"b.safetensors\"}}");
    check_exit(t, "links into blobs/", open_found, folder.s, 0, "");
    TempPath blobs = temp_path(&cache, "blobs"), away = temp_path(&cache, "away");
    check(t, rename(blobs.s, away.s) == 0 && symlink("away", blobs.s) == 0, "no link");
    check_exit(t, "blobs/ itself is a link", open_found, folder.s, 2,
               "a.safetensors: expected a file of this folder, found a link to");
    unlink(blobs.s);
    check(t, rename(away.s, blobs.s) == 0, "no folder");
    TempPath one = temp_path(&cache, "snapshots/c0/" HF_WEIGHTS);
    check(t, symlink("../../blobs/0a", one.s) == 0, "no link");
    check_exit(t, "the only file, in blobs/", open_found, folder.s, 0, "");
    unlink(one.s);
    TempPath far = temp_path(&cache, "far.safetensors");
    tiny_file(far.s, names, 1);
    check(t, symlink(far.s, one.s) == 0, "no link");
    check_exit(t, "the only file, elsewhere", open_found, folder.s, 2,
               HF_WEIGHTS ": expected a file of this folder, found a link to");
    check_exit(t, "the same, named itself", open_found, one.s, 0, "");
    temp_remove(&cache);
}

static void report_unused(void* path) {
    SafeSet set;
    safeset_open(&set, (const char*)path);
    safeset_find(&set, "a");
    safeset_report_unused(&set);
    _exit(3);
}

static void report_nothing(void* path) {
    SafeSet set;
    safeset_open(&set, (const char*)path);
    safeset_find(&set, "a");
    safeset_report_unused(&set);
    fail_input("the only line");
}

static void check_tied(void* path) {
    SafeSet set;
    safeset_open(&set, (const char*)path);
    tensors_check_tied(&set, "lm_head.weight", "base.wte.weight");
    safeset_close(&set);
}

static void write_tied(const char* path, const char* copy) {
    SafeWriter w;
    int64_t four = 4;
    safewriter_init(&w);
    safewriter_declare(&w, "lm_head.weight", DTYPE_U8, 1, &four);
    safewriter_declare(&w, "wte.weight", DTYPE_U8, 1, &four);
    safewriter_open(&w, path);
    safewriter_put(&w, copy, 4);
    safewriter_put(&w, "same", 4);
    safewriter_close(&w);
}

static void test_left_over(Test* t) {
    TempPath folder = temp_folder(), file = temp_path(&folder, "x.safetensors");
    const char* names[] = {"a", "h.0.attn.bias", "b", "c", "d", "e", "f"};
    tiny_file(file.s, names, 7);
    check_exit(t, "seven tensors, one used", report_unused, file.s, 3,
               "5 tensors are not used, the model has none of that name: b c d e ...");
    tiny_file(file.s, names, 2);
    check_exit(t, "only a constant is left", report_nothing, file.s, 2, "the only line");
    write_tied(file.s, "same");
    check_exit(t, "a second copy", check_tied, file.s, 0, "");
    write_tied(file.s, "Same");
    check_exit(t, "another output matrix", check_tied, file.s, 2,
               "tensor \"lm_head.weight\" differs from \"wte.weight\"");
    temp_remove(&folder);
}

// ---- what --from means ----

static void find_only(void* from) {
    char weights[PATH_BYTES], config[PATH_BYTES];
    model_find(weights, config, (const char*)from);
}

static void check_found(Test* t, const char* from, const char* weights_end, const char* config_end) {
    char weights[PATH_BYTES], config[PATH_BYTES];
    model_find(weights, config, from);
    check(t, ends_with(weights, weights_end) && ends_with(config, config_end), "%s: found %s and %s", from, weights,
          config);
}

static void test_from(Test* t) {
    Small s = small_init();
    SavedFiles files;
    TempPath one = small_save(&s, "one", SIZE_MAX, &files), many = small_save(&s, "many", 400, &files);
    TempPath file = temp_path(&one, HF_WEIGHTS), index = temp_path(&many, HF_INDEX), run = temp_path(&s.folder, "run");
    small_save(&s, "run/step_000010", SIZE_MAX, &files);
    TempPath manifest = temp_path(&run, "step_000010/manifest.json");
    manifest_write(manifest.s, json_pack("{s:{s:i}}", "state", "step", 10), &files);
    int magic[300] = {BIN_MAGIC};
    TempPath bin = temp_file(&s.folder, "model.bin", magic, sizeof magic);
    check_found(t, one.s, "one/model.safetensors", "one/config.json");
    check_found(t, many.s, "many/model.safetensors.index.json", "many/config.json");
    check_found(t, file.s, "one/model.safetensors", "one/config.json");
    check_found(t, index.s, "many/model.safetensors.index.json", "many/config.json");
    check_found(t, run.s, "run/step_000010/model.safetensors", "run/step_000010/config.json");
    check_found(t, bin.s, "model.bin", "");
    // a header of 640 bytes begins as a pickle does
    TempPath trap = temp_file(&one, "trap.safetensors", "\x80\2\0\0\0\0\0\0{", 9);
    check_found(t, trap.s, "one/trap.safetensors", "one/config.json");
    check(t, chdir(one.s) == 0, "chdir");
    check_found(t, HF_WEIGHTS, HF_WEIGHTS, "./config.json");
    check_found(t, ".", "./model.safetensors", "./config.json");
    check(t, chdir("/") == 0, "chdir");
    small_free(&s);
}

static const struct { const char *name, *bytes, *expected; } other_models[] = {
    {"a/pytorch_model.bin", "x", "a: expected model.safetensors, found pytorch_model.bin, PyTorch's pickle"},
    {"b/model.Q4.gguf", "GGUF....", "b: expected model.safetensors, found model.Q4.gguf, llama.cpp's format"},
    {"c/adapter_model.safetensors", "x",
     "c: expected model.safetensors, found adapter_model.safetensors, a LoRA adapter"},
    {"d/tf_model.h5", "x", "d: expected model.safetensors, found tf_model.h5, a Keras file"},
    {"e/config.json", "{}",
     "e: expected model.safetensors or model.safetensors.index.json beside config.json, found neither"},
    {"f/notes.txt", "x",
     "f: expected a run with a checkpoint, or a Hugging Face folder, found neither step_* nor config.json in it"},
};

static const struct { const char *name, *bytes; size_t n; const char* expected; } other_files[] = {
    {"model.gguf", "GGUF\3\0\0\0{}", 10,
     "model.gguf: expected a folder, a .safetensors file or llm.c's .bin, found llama.cpp's format"},
    {"model.pt", "PK\3\4\0\0\0\0\0\0", 10, "found PyTorch's pickle: load it with torch"},
    {"old.pt", "\x80\2\x8a\nabcdefgh", 12, "found PyTorch's pickle: load it with torch"},
    {"page.safetensors", "<!DOCTYPE html>", 15, "found an HTML page"},
    {"empty", "", 0, "found something else"},
    {"zeros", "\0\0\0\0\0\0\0\0\0\0\0\0", 12, "found something else"},
};

static void test_other_formats(Test* t) {
    TempPath folder = temp_folder(), none = temp_path(&folder, "none");
    for (size_t i = 0; i < sizeof other_models / sizeof other_models[0]; i++) {
        TempPath path = text_file(&folder, other_models[i].name, other_models[i].bytes);
        *strrchr(path.s, '/') = '\0';
        check_exit(t, other_models[i].name, find_only, path.s, 2, other_models[i].expected);
    }
    for (size_t i = 0; i < sizeof other_files / sizeof other_files[0]; i++) {
        TempPath path = temp_file(&folder, other_files[i].name, other_files[i].bytes, other_files[i].n);
        check_exit(t, other_files[i].name, find_only, path.s, 2, other_files[i].expected);
    }
    TempPath adapter = text_file(&folder, "h/adapter_model.safetensors", "x");
    TempPath pipe = temp_path(&folder, "h/adapter_config.json");
    *strrchr(adapter.s, '/') = '\0';
    if (mkfifo(pipe.s, 0600) == 0) {
        check_exit(t, "a pipe", find_only, adapter.s, 2,
                   "h: expected model.safetensors, found adapter_model.safetensors");
    }
    check_exit(t, "nothing there", find_only, none.s, 2,
               "none: No such file or directory (a preset's name goes to --model)");
    temp_remove(&folder);
}

// ---- exports ----

static void export_to(const Small* s, const char* folder, size_t shard_bytes) {
    char temporary[PATH_BYTES], path[PATH_BYTES];
    SavedFiles files;
    files.n = 0;
    const int lock = hf_export_begin(temporary, "export-hf", folder, 4096.0);
    json_write(path_join(path, temporary, "config.json"), json_pack("{s:s}", "written_by", HF_WRITTEN_BY));
    tensors_save_folder(temporary, s->table, N_TABLE, s->params, DTYPE_F32, shard_bytes, &files);
    Tokenizer tokenizer;
    tokenizer_bytes_init(&tokenizer);
    tokenizer.json = string_copy("{}\n");
    tokenizer.n_json = 3;
    tokenizer_save(temporary, &tokenizer, &files);
    tokenizer_free(&tokenizer);
    hf_export_end(lock, temporary, "export-hf", folder);
}

static int count_files(const char* folder) {
    int n = 0;
    DIR* entries = opendir(folder);
    for (struct dirent* entry; entries && (entry = readdir(entries));) { n += entry->d_name[0] != '.'; }
    if (entries) { closedir(entries); }
    return n;
}

static void test_export(Test* t) {
    Small s = small_init();
    TempPath out = temp_path(&s.folder, "deep/out"), left = temp_path(&s.folder, "deep/out.tmp"),
             slash = temp_path(&s.folder, "new/");
    export_to(&s, out.s, 400);
    check(t, count_files(out.s) == 7, "5 files of tensors, config.json and tokenizer.json, found %d",
          count_files(out.s));
    check_loads(t, &s, out.s);
    s.params[0] += 1.0f;
    text_file(&s.folder, "deep/out.tmp/config.json", "{\"model_type\": \"gp");  // an export that was interrupted
    export_to(&s, out.s, SIZE_MAX);
    check(t, count_files(out.s) == 3 && !path_exists(left.s), "the earlier export left something: %d files",
          count_files(out.s));
    check_loads(t, &s, out.s);
    text_file(&s.folder, "new.tmp/config.json", "");  // ... before its first byte
    export_to(&s, slash.s, SIZE_MAX);
    check(t, count_files(slash.s) == 3, "an empty folder, named with a slash: %d files", count_files(slash.s));
    check_loads(t, &s, slash.s);
    small_free(&s);
}

static void begin_export(void* folder) {
    char temporary[PATH_BYTES];
    hf_export_begin(temporary, "export-hf", (const char*)folder, 4096.0);
}

static void begin_huge_export(void* folder) {
    char temporary[PATH_BYTES];
    hf_export_begin(temporary, "export-hf", (const char*)folder, 1e18);
}

// what is there stays, to the last file
static void test_refused_export(Test* t) {
    TempPath folder = temp_folder(), a = temp_path(&folder, "a"), b = temp_path(&folder, "b"),
             c = temp_path(&folder, "c");
    TempPath d = temp_path(&folder, "d"), e = text_file(&folder, "e", "text"), g = temp_path(&folder, "g");
    TempPath h = temp_path(&folder, "h"), i = temp_path(&folder, "i"), j = temp_path(&folder, "j");
    text_file(&folder, "a/thesis.txt", "x");
    text_file(&folder, "b/config.json", "{\"model_type\": \"gpt2\"}");
    text_file(&folder, "b/model.safetensors", "downloaded");
    text_file(&folder, "c/config.json", "{\"written_by\": \"llmc\"}");
    text_file(&folder, "c/manifest.json", "a checkpoint");
    text_file(&folder, "d.tmp/thesis.txt", "x");
    text_file(&folder, "h/config.json", "{\"model_type\": \"gpt2\",}");
    text_file(&folder, "i/config.json", "{\"model_type\": \"gpt2\"");
    text_file(&folder, "j.tmp/config.json", "{\"model_type\": \"gpt2\",}");
    check_exit(t, "a config.json by hand, with a comma too many", begin_export, h.s, 2, "h: holds a model that this");
    check_exit(t, "one that ends too soon", begin_export, i.s, 2, "i: holds a model that this program did not write");
    check_exit(t, "one by hand in the temporary folder", begin_export, j.s, 2,
               "j.tmp: needed as a temporary folder, but holds a model that this program did not write");
    check_exit(t, "other files", begin_export, a.s, 2,
               "a: holds thesis.txt, which no export writes: choose another folder");
    check_exit(t, "a download", begin_export, b.s, 2, "b: holds a model that this program did not write");
    check_exit(t, "a checkpoint", begin_export, c.s, 2, "c: holds manifest.json, which no export writes");
    check_exit(t, "files in the temporary folder", begin_export, d.s, 2,
               "d.tmp: needed as a temporary folder, but holds thesis.txt");
    check_exit(t, "a file", begin_export, e.s, 2, "e: expected a folder, found a file");
    check_exit(t, "no room on the disk", begin_huge_export, g.s, 1, "g: the model takes 909494.70 TiB, the disk has");
    int n = count_files(a.s) + count_files(b.s) + count_files(c.s) + count_files(h.s) + count_files(i.s);
    check(t, n == 7 && !path_exists(d.s) && !path_exists(g.s) && count_files(folder.s) == 8,
          "something was touched: %d files", n);
    temp_remove(&folder);
}

// ---- files that go along ----

static void read_companions(void* folder) {
    Companions c;
    memset(&c, 0, sizeof c);
    companions_read_model(&c, (const char*)folder);
    companions_read_tokenizer(&c, (const char*)folder);
    companions_free(&c);
}

// as they are, whatever they hold, and nothing else that lies beside them
static void test_companions(Test* t) {
    TempPath folder = temp_folder(), model = temp_path(&folder, "hf"), out = temp_path(&folder, "out");
    const char jinja[64] = "{% for m in messages %}\r\n{{ m }}\0\xff";
    Companions c;
    SavedFiles files;
    files.n = 0;
    memset(&c, 0, sizeof c);
    for (int i = 0; i < N_COMPANIONS; i++) {
        char name[64];
        snprintf(name, sizeof name, "hf/%s", companion_name(i));
        temp_file(&folder, name, jinja, (size_t)(30 + i));
    }
    text_file(&folder, "hf/README.md", "x");
    text_file(&folder, "hf/config.json", "{}");
    check(t, mkdir(out.s, 0777) == 0, "%s", out.s);
    companions_read_model(&c, model.s);
    check(t, companions_have(&c, "generation_config.json") && !companions_have(&c, "vocab.json"), "the model's alone");
    companions_read_tokenizer(&c, model.s);
    temp_remove(&model);
    companions_save(&c, out.s, &files);
    check(t, count_files(out.s) == N_COMPANIONS && files.n == N_COMPANIONS, "%d files, %d listed", count_files(out.s),
          files.n);
    for (int i = 0; i < files.n; i++) {
        check(t, files.file[i].n_bytes == (size_t)(30 + i) &&
              files.file[i].xxh3 == XXH3_64bits(jinja, (size_t)(30 + i)), "%s: other bytes", files.file[i].name);
        check(t, hf_export_is_file_(files.file[i].name), "%s: an export writes it", files.file[i].name);
    }
    check(t, !companions_have(&c, "README.md") && !companions_have(&c, "config.json"), "what is read or nobody needs");
    companions_free(&c);
    temp_remove(&folder);
}

static void test_refused_companions(Test* t) {
    TempPath folder = temp_folder(), a = temp_path(&folder, "a/vocab.json"), b = temp_path(&folder, "b/merges.txt");
    TempPath c = text_file(&folder, "c/chat_template.jinja", "x"), d = temp_path(&folder, "d/added_tokens.json");
    TempPath e = temp_path(&folder, "snapshots/e/tokenizer_config.json"), g = temp_path(&folder, "g/added_tokens.json");
    text_file(&folder, "secret", "x");
    text_file(&folder, "blobs/0a", "x");
    int made = mkdir(a.s, 0777) == 0 && mkfifo(b.s, 0666) == 0 && symlink("../secret", d.s) == 0 &&
               symlink("../../blobs/0a", e.s) == 0 && symlink("nowhere", g.s) == 0 &&
               truncate(c.s, COMPANION_MAX_BYTES + 1) == 0;
    check(t, made, "cannot be made: %s", strerror(errno));
    *strrchr(a.s, '/') = *strrchr(b.s, '/') = *strrchr(c.s, '/') = *strrchr(d.s, '/') = '\0';
    *strrchr(e.s, '/') = *strrchr(g.s, '/') = '\0';
    check_exit(t, "a folder", read_companions, a.s, 2, "a/vocab.json: expected a file, found a folder");
    check_exit(t, "a pipe", read_companions, b.s, 2, "b/merges.txt: expected a file, found a pipe or device");
    check_exit(t, "too large", read_companions, c.s, 2,
               "c/chat_template.jinja: 16777217 bytes, expected at most 16777216 in a file that goes along");
    check_exit(t, "a link that leads out", read_companions, d.s, 2,
               "d/added_tokens.json: expected a file of this folder, found a link to ");
    check_exit(t, "a link into blobs/", read_companions, e.s, 0, "");
    check_exit(t, "a link to nothing", read_companions, g.s, 0, "");
    temp_remove(&folder);
}

// ---- a convolution's shape, more layers than the file has, tensors that may be missing ----

static void load_other_shape(void* path) {
    Tensor table[1] = {tensor("h.%d.conv.weight", 0, 2, 3, 5, INIT_ZEROS, 0.0f, DECAY, CONV)};
    SafeSet set;
    safeset_open(&set, (const char*)path);
    tensors_load(&set, table, 1, "", filled_array(tensors_layout(table, 1), 0.0f));
}

static void test_layers(Test* t) {
    const int old_layer[4] = {-1, 1, -1, 0}, back_layer[2] = {3, 1};
    Tensor table[3] = {
        tensor("h.%d.conv.weight", 0, 2, 3, 4, INIT_NORMAL, 1.0f, DECAY, CONV),
        tensor("h.%d.proj.weight", 0, 2, 3, 4, INIT_NORMAL, 1.0f, DECAY, TRANSPOSED),
        tensor("head.weight", 0, 0, 2, 4, INIT_NORMAL, 1.0f, DECAY, AS_IS),
    }, other = tensor("proto.weight", 0, 0, 2, 4, INIT_NORMAL, 1.0f, DECAY, AS_IS);
    TempPath folder = temp_folder(), path = temp_path(&folder, HF_WEIGHTS);
    const size_t n = tensors_layout(table, 3);
    SavedFiles files;
    SafeSet set;
    files.n = 0;
    float *params = filled_array(n, 0.0f), *back = filled_array(n, 0.0f);
    tensors_init(table, 3, params, 3);
    tensors_save_folder(folder.s, table, 3, params, DTYPE_F32, SIZE_MAX, &files);
    safeset_open(&set, path.s);
    const SafeTensor* conv = safeset_find(&set, "h.1.conv.weight");
    check(t, conv && conv->n_dims == 3 && conv->shape[0] == 3 && conv->shape[1] == 1 && conv->shape[2] == 4,
          "a convolution is (3, 1, 4)");
    check(t, conv && memcmp(conv->data, params + 12, 48) == 0, "its elements are those of (3, 4)");
    check(t, tensor_is_in(&set, &table[1], "") && tensor_is_in(&set, &table[2], "") && !tensor_is_in(&set, &other, ""),
          "what the file has");
    tensors_load(&set, table, 3, "", back);
    check_bits(t, "the same layers", back, params, n);
    for (int i = 0; i < 2; i++) { table[i].layers = 4; }
    const size_t n_large = tensors_layout(table, 3);
    float* large = filled_array(n_large, 7.0f);
    tensors_load_layers(&set, table, 3, "", large, old_layer);
    for (int i = 0; i < 2; i++) {
        for (int l = 0; l < 4; l++) {
            float* got = large + table[i].offset + 12 * l;
            const float sevens[12] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
            check_bits(t, table[i].name, got, old_layer[l] < 0 ? sevens : params + 32 * i + 12 * old_layer[l], 12);
        }
    }
    check_bits(t, "head", large + table[2].offset, params + 64, 8);
    safeset_close(&set);
    // and back, as if two layers were taken out
    tensors_save_folder(folder.s, table, 3, large, DTYPE_F32, SIZE_MAX, &files);
    for (int i = 0; i < 2; i++) { table[i].layers = 2; }
    tensors_layout(table, 3);
    safeset_open(&set, path.s);
    tensors_load_layers(&set, table, 3, "", back, back_layer);
    check_bits(t, "there and back", back, params, n);
    safeset_close(&set);
    check_exit(t, "another shape", load_other_shape, path.s, 2,
               "tensor \"h.0.conv.weight\": expected 3 dimensions (3, 1, 5), found 3 (3, 1, 4): another model than "
               "config.json says");
    free(params), free(back), free(large);
    temp_remove(&folder);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"shards", "at any limit: the same bits come back, no shard is too large, the index is last", test_shards},
        {"too many shards", "are refused before the first is written", test_too_many},
        {"index", "sums and names as Hugging Face writes them", test_index},
        {"order", "tensors stand in the order of their names", test_order},
        {"bf16", "the nearest, but where the table says floats; sizes are real; read and written again: the same bytes",
         test_bf16},
        {"beyond bf16", "a finite number that is infinite as bf16: a line says how many, and of which tensor",
         test_beyond_bf16},
        {"reading", "as floats or bf16, by any number of threads; pages that were read are no memory of the process",
         test_reading},
        {"fp8", "what a file has in fp8 is its bytes and scales where a sink takes them, else floats", test_fp8},
        {"fp4", "... in fp4, under both names of scales; what does not fit is refused", test_fp4},
        {"parts", "a rank reads its rows or columns of a matrix in bf16, fp8 or fp4, with scales that are its own", test_parts},
        {"bands", "what is stored as fp8 comes by bands of 128 rows, in order, padded with zeros", test_bands},
        {"bar", "of a file that takes long, on a terminal; it goes when all is read", test_bar},
        {"false index", "each lie of an index is refused with its own message", test_false_index},
        {"cache", "the links of Hugging Face's cache are no lie", test_cache},
        {"left over", "unused tensors are named, constants are not, a second copy must be equal", test_left_over},
        {"layers", "a convolution's shape; a model with more layers than the file takes each from where it was",
         test_layers},
        {"--from", "finds runs, folders, shards, single files and llm.c's .bin", test_from},
        {"other formats", "PyTorch, GGUF, adapters and pages are named with the way out", test_other_formats},
        {"export", "new, over an empty folder and over an earlier export; nothing is left behind", test_export},
        {"companions", "of a model are read at once and written as they were", test_companions},
        {"refused companions", "folders, pipes, links that lead out, and what is too large", test_refused_companions},
        {"refused export", "a folder of something else is not touched", test_refused_export},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
