/*
libFuzzer on what train_qwen3 reads of a model and of its adapter: config.json, adapter_config.json and
adapter_model.safetensors. Any bytes are refused with one line, or become tables of tensors that fit together: every adapter
stands beside a matrix that the model has, and its A and B have that matrix's shape and are in the file.
    make build/fuzz/fuzz_qwen
    mkdir -p build/fuzz/corpus_qwen && build/fuzz/fuzz_qwen -max_total_time=60 -max_len=2048 -close_fd_mask=3 \
        -dict=dev/fuzz/qwen.dict build/fuzz/corpus_qwen dev/fuzz/corpus/qwen
An input is config.json, a byte 0, adapter_config.json, a byte 0, and the header of the file. Without the first, a model of
our own with experts and without; without the second, the first alone. Behind the header come the zeros that it asks for, and
its length is put right. adapter_open stops the process where it refuses: whatever is on the heap then goes when the next
input begins. The files lie in memory.
*/
#include <jansson.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include "no_exit.h"
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// ---- the heap: a block stands behind what says where the others are ----

typedef struct Kept {
    struct Kept *before, *after;
    size_t n_bytes, unused;
} Kept;

static Kept* kept_first(void) {
    static Kept ring;
    if (!ring.after) { ring.before = ring.after = &ring; }
    return &ring;
}

static void* fuzz_malloc(size_t n_bytes) {
    Kept *ring = kept_first(), *x = (Kept*)malloc(sizeof *x + n_bytes);
    if (!x) { return NULL; }
    x->n_bytes = n_bytes;
    x->before = ring, x->after = ring->after;
    ring->after->before = x, ring->after = x;
    return x + 1;
}

static void fuzz_free(void* p) {
    if (!p) { return; }
    Kept* x = (Kept*)p - 1;
    x->before->after = x->after, x->after->before = x->before;
    free(x);
}

static void* fuzz_realloc(void* p, size_t n_bytes) {
    char* x = (char*)fuzz_malloc(n_bytes);
    const size_t n_old = p ? ((Kept*)p - 1)->n_bytes : 0;
    if (x && p) { memcpy(x, p, n_old < n_bytes ? n_old : n_bytes); }
    fuzz_free(p);
    return x;
}

static void* fuzz_calloc(size_t n, size_t n_bytes) {
    void* x = fuzz_malloc(n * n_bytes);
    return x ? memset(x, 0, n * n_bytes) : NULL;
}

static void kept_free_all(void) {
    while (kept_first()->after != kept_first()) { fuzz_free(kept_first()->after + 1); }
}

// a mapped file is a block of the heap, so that the sanitizer sees where it ends
static void* fuzz_mmap(void* at, size_t n_bytes, int protection, int flags, int fd, off_t offset) {
    char* x = (char*)fuzz_malloc(n_bytes);
    (void)at, (void)protection, (void)flags;
    return x && pread(fd, x, n_bytes, offset) == (ssize_t)n_bytes ? x : MAP_FAILED;
}

static int fuzz_munmap(void* x, size_t n_bytes) {
    (void)n_bytes;
    fuzz_free(x);
    return 0;
}

#undef fopen
#undef fclose
#define malloc(n_bytes) fuzz_malloc(n_bytes)
#define calloc(n, n_bytes) fuzz_calloc(n, n_bytes)
#define realloc(p, n_bytes) fuzz_realloc(p, n_bytes)
#define free(p) fuzz_free(p)
#define mmap(at, n_bytes, protection, flags, fd, offset) fuzz_mmap(at, n_bytes, protection, flags, fd, offset)
#define munmap(x, n_bytes) fuzz_munmap(x, n_bytes)
#define madvise(x, n_bytes, advice) 0
#include "llmc/models/adapter_files.h"  // adapter_open
#include "llmc/models/qwen.h"           // config_parse, parameter_table

enum { MOST_DATA = 1 << 16, MOST_ELEMENTS = 1 << 20 };

static const char* const OWN_CONFIG =
    "{\"model_type\":\"qwen3_moe\",\"max_position_embeddings\":9,\"vocab_size\":9,\"num_hidden_layers\":2,\"hidden_size\":4,"
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":2,\"intermediate_size\":3,\"num_experts\":2,"
    "\"num_experts_per_tok\":1,\"moe_intermediate_size\":2,\"mlp_only_layers\":[0]}";

// ---- config.json ----

static int read_config(Config* c, const char* text, size_t n_bytes) {
    json_error_t json_error;
    ErrorText error = {""};
    json_t* json = json_parse_bounded(text, n_bytes, JSON_MAX_DEPTH, &json_error);
    const int is_good = json && config_parse(c, json, &error);
    if (json && !is_good && (error.text[0] == '\0' || strchr(error.text, '\n'))) { __builtin_trap(); }
    json_decref(json);
    return is_good;
}

// sizes of a model that was accepted; returns the rows of its table
static int check_model(const Config* c, Tensor* table) {
    const int n = parameter_table(table, c);
    size_t n_elements = 0;
    if (n < 9 || n > MAX_PARAMETERS) { __builtin_trap(); }
    if (c->Vp < c->V || c->NH % c->NKV != 0 || c->HS % 2 != 0) { __builtin_trap(); }
    if (config_expert_layers(c) > 0 && (c->k < 1 || c->k > c->E || c->FE < 1)) { __builtin_trap(); }
    for (int l = 0; l < c->L; l++) {
        if (!strchr("EM", c->kinds[l]) || !strchr("SF", c->slides[l])) { __builtin_trap(); }
        if (config_window(c, l) > 0 && c->window < 1) { __builtin_trap(); }
    }
    n_elements = tensors_layout(table, n);
    if (n_elements == 0 || n_elements > (size_t)1 << 62) { __builtin_trap(); }
    return n;
}

// ---- an adapter ----

// where the data of a header ends, at most MOST_DATA
static size_t data_bytes(const char* header, size_t n_bytes) {
    json_error_t error;
    const char* name;
    json_t *json = json_parse_bounded(header, n_bytes, JSON_MAX_DEPTH, &error), *tensor;
    size_t most = 0;
    json_object_foreach(json, name, tensor) {
        const json_int_t end = json_integer_value(json_array_get(json_object_get(tensor, "data_offsets"), 1));
        if (end > (json_int_t)most && end <= MOST_DATA) { most = (size_t)end; }
    }
    json_decref(json);
    return most;
}

static void write_piece(const char* path, const void* first, size_t n_first, const void* bytes, size_t n_bytes, size_t n_zeros) {
    static const char zeros[MOST_DATA];
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, first, n_first) != (ssize_t)n_first || write(fd, bytes, n_bytes) != (ssize_t)n_bytes ||
        write(fd, zeros, n_zeros) != (ssize_t)n_zeros) {
        __builtin_trap();
    }
    close(fd);
}

static char* folder(void) {
    static char path[] = "/dev/shm/fuzz_qwen_XXXXXX";
    return path;
}

static void remove_folder(void) {
    char path[PATH_BYTES];
    unlink(path_join(path, folder(), ADAPTER_CONFIG));
    unlink(path_join(path, folder(), ADAPTER_WEIGHTS));
    rmdir(folder());
}

int LLVMFuzzerInitialize(int* argc, char*** argv) {
    (void)argc, (void)argv;
    json_set_alloc_funcs(fuzz_malloc, fuzz_free);
    return mkdtemp(folder()) && atexit(remove_folder) == 0 ? 0 : 1;
}

// each place is one of the base's, and A and B are what it asks for
static void check_adapter(const Adapters* x, const SafeSet* set, const Tensor* base, int n) {
    for (int i = 0; i < x->n_places; i++) {
        const AdapterPlace* p = &x->places[i];
        if (p->row < 0 || p->row >= n || !tensor_has_layer(&base[p->row], p->layer)) { __builtin_trap(); }
        if (p->first < 0 || p->n < 1 || p->first + p->n > base[p->row].rows) { __builtin_trap(); }
        if (p->rank < 1 || !(p->scale > 0.0f) || p->a < 0 || p->b != p->a + 1 || p->b >= x->n_table) { __builtin_trap(); }
        const Tensor *A = &x->table[p->a], *B = &x->table[p->b];
        if (A->columns != base[p->row].columns || B->rows != p->n) { __builtin_trap(); }
        if (A->rows % p->rank != 0 || B->columns % p->rank != 0) { __builtin_trap(); }
    }
    for (int i = 0; i < set->n_tensors; i++) {
        if (!set->used[i]) { __builtin_trap(); }
    }
}

static void try_adapter(const Tensor* base, int n, const char* config, size_t n_config, const char* header, size_t n_header) {
    char path[PATH_BYTES];
    Adapters x;
    SafeSet set;
    const uint64_t n_bytes = n_header;
    write_piece(path_join(path, folder(), ADAPTER_CONFIG), config, n_config, "", 0, 0);
    write_piece(path_join(path, folder(), ADAPTER_WEIGHTS), &n_bytes, 8, header, n_header, data_bytes(header, n_header));
    failure_()->status = 0;  // nothing has failed yet: the first message of each input is made
    if (setjmp(*fuzz_return()) != 0) { return; }
    adapter_open(&x, &set, folder(), base, n);
    check_adapter(&x, &set, base, n);
    safeset_close(&set);
    adapter_free(&x);
    if (kept_first()->after != kept_first()) { __builtin_trap(); }  // what was accepted leaves nothing behind
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    static Tensor base[MAX_PARAMETERS];
    static Config c;  // the table points to it
    const char *at = (const char*)bytes, *end = at + n_bytes;
    kept_free_all();
    const char* first = (const char*)memchr(at, 0, n_bytes);
    const size_t n_config = (size_t)((first ? first : end) - at);
    char* exact = (char*)memcpy(fuzz_malloc(n_config), at, n_config);
    const int is_good = n_config > 0 ? read_config(&c, exact, n_config) : read_config(&c, OWN_CONFIG, strlen(OWN_CONFIG));
    fuzz_free(exact);
    if (!is_good) { return 0; }
    const int n = check_model(&c, base);
    if (!first || tensors_layout(base, n) > MOST_ELEMENTS) { return 0; }
    const char* second = (const char*)memchr(first + 1, 0, (size_t)(end - first - 1));
    if (second) { try_adapter(base, n, first + 1, (size_t)(second - first - 1), second + 1, (size_t)(end - second - 1)); }
    return 0;
}
