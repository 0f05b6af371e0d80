/*
Promises of llmc/ops/widen.h and of the products that read what does not learn (..._stored of matmul.h, block_matmul.h,
grouped_matmul.h and embedding.h): a matrix stored as bf16, fp8 or fp4 gives the bits of the same numbers stored as X,
float or bf16, in every build; and the memory that this takes is what a run is told.
*/
#define WIDEN_ROOM ((size_t)64 << 10)  // so that experts go a few at a time
#if defined(SIMT) && !defined(EXACT)
#define WGMMA  // dev/simt models it
#endif
#if defined(WGMMA) && !defined(EXACT)
static int grouped_hopper;  // 1 takes the kernels of grouped_hopper.h, 0 those of other cards
#define GROUPED_HOPPER grouped_hopper
#endif
#include "llmc/ops/block_matmul.h"
#include "llmc/ops/embedding.h"
#include "llmc/ops/grouped_matmul.h"
#include "llmc/ops/matmul.h"
#include "llmc/test/op.h"

// E matrices below each other
typedef struct {
    const char* name;
    Stored kind;
    int E, rows, columns, part_rows, block_rows, block_columns;
} Shape;

static const Shape shapes[] = {
    {"bf16", STORED_BF16, 5, 24, 40, 24, 128, 128},
    {"bf16, odd", STORED_BF16, 5, 9, 33, 9, 128, 128},
    {"fp8", STORED_FP8, 5, 96, 160, 96, 128, 128},
    {"fp8, blocks of rows", STORED_FP8, 2, 264, 136, 264, 128, 128},
    {"fp8, gate and up", STORED_FP8, 5, 300, 40, 150, 128, 128},
    {"fp8, whole blocks", STORED_FP8, 3, 384, 144, 192, 128, 128},
    {"fp8, cut blocks", STORED_FP8, 4, 128, 272, 64, 64, 64},
    {"fp8, odd", STORED_FP8, 5, 21, 133, 21, 128, 128},
    {"fp8, small blocks", STORED_FP8, 3, 24, 48, 12, 4, 16},
    {"fp8, blocks below a pack", STORED_FP8, 3, 24, 40, 24, 8, 4},
    {"fp4", STORED_FP4, 5, 96, 160, 96, 128, 128},
    {"fp4, odd", STORED_FP4, 5, 7, 32, 7, 128, 128},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

// a shape's matrices on the host, and on the device; values (E, rows, columns) are the same numbers
typedef struct {
    StoredMatrix host, device;
    size_t n_bytes, n_scale_bytes;  // of all
    float* values;
} Matrices;

static void* bytes_to_device(const void* x, size_t n_bytes, const Device* dev) {
    void* d = device_alloc(n_bytes, "test array");
    device_upload(d, x, n_bytes, dev);
    device_sync(dev);
    return d;
}

static size_t scale_bytes(const StoredMatrix* m) {
    if (m->kind == STORED_FP4) { return stored_exponents(m->rows, m->columns); }
    return m->kind == STORED_FP8 ? sizeof(float) * stored_scales(m) : 0;
}

// any codes but NaN; scales of fp8 that are powers of two, and others
static Matrices matrices(const Shape* s, const Device* dev) {
    Matrices x;
    x.host = stored_matrix(NULL, s->kind, s->rows, s->columns, s->part_rows, NULL);
    x.host.block_rows = s->block_rows, x.host.block_columns = s->block_columns;
    const size_t each = (size_t)s->rows * (size_t)s->columns, E = (size_t)s->E;
    x.n_bytes = stored_bytes(s->kind, each) * E, x.n_scale_bytes = scale_bytes(&x.host) * E;
    uint8_t *bytes = (uint8_t*)new_array(x.n_bytes, 1), *scales = (uint8_t*)new_array(x.n_scale_bytes + 1, 1);
    float *numbers = random_array(each * E, 1.0f, 1), *of_blocks = (float*)(void*)scales;
    for (size_t i = 0; i < x.n_bytes && s->kind != STORED_BF16; i++) { bytes[i] = (uint8_t)splitmix64(2, i); }
    for (size_t i = 0; i < x.n_bytes && s->kind == STORED_FP8; i++) { bytes[i] ^= (bytes[i] & 127) == 127; }
    for (size_t i = 0; i < each * E && s->kind == STORED_BF16; i++) {
        ((uint16_t*)(void*)bytes)[i] = bf16_nearest(numbers[i]);
    }
    for (size_t i = 0; i < x.n_scale_bytes && s->kind == STORED_FP4; i++) {
        scales[i] = (uint8_t)(110 + splitmix64(3, i) % 20);
    }
    for (size_t i = 0; i < x.n_scale_bytes / sizeof(float) && s->kind == STORED_FP8; i++) {
        of_blocks[i] = ldexpf(i % 3 ? 1.0f : 0.7f, (int)(splitmix64(3, i) % 12) - 12);
    }
    x.host.data = bytes, x.host.scales = x.n_scale_bytes > 0 ? scales : NULL;
    x.device = x.host;
    x.device.data = bytes_to_device(bytes, x.n_bytes, dev);
    if (x.n_scale_bytes > 0) { x.device.scales = bytes_to_device(scales, x.n_scale_bytes, dev); }
    x.values = numbers;
    StoredMatrix m = x.host;
    for (size_t e = 0; e < E; e++, m = stored_next(m)) {
        for (int r = 0; r < s->rows; r++) { stored_row(x.values + e * each + (size_t)r * s->columns, &m, r); }
    }
    if (x.n_scale_bytes == 0) { free(scales); }
    return x;
}

static void matrices_free(Matrices* x) {
    device_release((void*)x->device.data, x->n_bytes);
    device_release((void*)x->device.scales, x->n_scale_bytes);
    free((void*)x->host.data), free((void*)x->host.scales), free(x->values);
}

// arrays of X on the device; of `type` below the type alone counts
#ifdef __CUDACC__
#define TO_DEVICE(x, n) to_device_as<X>(x, n, dev)
#define FROM_DEVICE(x, d, n) from_device_as<X>(x, d, n, dev)
#else
#define TO_DEVICE(x, n) to_device(x, n, dev)
#define FROM_DEVICE(x, d, n) from_device(x, d, n, dev)
#endif

OP_STORED(X)
static void check_alike(Test* t, const char* what, const Shape* s, X* got, X* want, size_t n, const Device* dev) {
    float *a = filled_array(n, NAN), *b = filled_array(n, NAN);
    char where[96];
    snprintf(where, sizeof where, "%s, %zu bytes, %s", s->name, sizeof(X), what);
    FROM_DEVICE(a, got, n), FROM_DEVICE(b, want, n);
    check_bits(t, where, a, b, n);
    for (size_t i = 0; i < n; i++) { check(t, !isnan(a[i]), "%s: number %zu is NaN", where, i); }
    free(a), free(b);
}

// the first matrix: rows that few_rows.h takes, and more; forward from a bias, dinp from 0 or from what it holds
OP_STORED(X)
static void check_linear(Test* t, const Shape* s, const Matrices* m, int N, X* type, const Device* dev) {
    const int C = s->columns, OC = s->rows;
    const size_t n_inp = (size_t)N * C, n_out = (size_t)N * OC;
    float *inp = random_array(n_inp, 1.0f, 4), *dout = random_array(n_out, 1.0f, 5), *bias = random_array(OC, 1.0f, 6);
    X *x = TO_DEVICE(inp, n_inp), *dy = TO_DEVICE(dout, n_out), *b = TO_DEVICE(bias, (size_t)OC);
    X* weight = TO_DEVICE(m->values, (size_t)OC * C);
    for (int k = 0; k < 2; k++) {
        X *want = TO_DEVICE(dout, n_out), *got = TO_DEVICE(dout, n_out);
        X *dwant = TO_DEVICE(inp, n_inp), *dgot = TO_DEVICE(inp, n_inp);
        matmul_forward(want, x, weight, k ? b : NULL, N, C, OC, dev);
        matmul_forward_stored(got, x, m->device, k ? b : NULL, N, dev);
        check_alike(t, "out", s, got, want, n_out, dev);
        matmul_backward_input(dwant, dy, weight, k, N, C, OC, dev);
        matmul_backward_input_stored(dgot, dy, m->device, k, N, dev);
        check_alike(t, "dinp", s, dgot, dwant, n_inp, dev);
    }
    device_drop(x), device_drop(dy), device_drop(b), device_drop(weight);
    free(inp), free(dout), free(bias);
}

// ... in groups
OP_STORED(X)
static void check_groups(Test* t, const Shape* s, const Matrices* m, int G, int N, X* type, const Device* dev) {
    const int C = s->columns * G, OC = s->rows;
    const size_t n_inp = (size_t)N * C, n_out = (size_t)N * OC;
    float *inp = random_array(n_inp, 1.0f, 4), *dout = random_array(n_out, 1.0f, 5);
    X *x = TO_DEVICE(inp, n_inp), *dy = TO_DEVICE(dout, n_out), *weight = TO_DEVICE(m->values, (size_t)OC * s->columns);
    X *want = TO_DEVICE(dout, n_out), *got = TO_DEVICE(dout, n_out);
    X *dwant = TO_DEVICE(inp, n_inp), *dgot = TO_DEVICE(inp, n_inp);
    block_matmul_forward(want, x, weight, N, C, OC, G, dev);
    block_matmul_forward_stored(got, x, m->device, N, G, dev);
    check_alike(t, "out of groups", s, got, want, n_out, dev);
    block_matmul_backward_input(dwant, dy, weight, N, C, OC, G, dev);
    block_matmul_backward_input_stored(dgot, dy, m->device, N, G, dev);
    check_alike(t, "dinp of groups", s, dgot, dwant, n_inp, dev);
    device_drop(x), device_drop(dy), device_drop(weight);
    free(inp), free(dout);
}

// all of them as experts, of which some have no rows. few: as many as few_rows.h takes; else a few times as many
OP_STORED(X)
static void check_experts(Test* t, const Shape* s, const Matrices* m, int few, X* type, const Device* dev) {
    const int C = s->columns, OC = s->rows, E = s->E, of_some[] = {3, 0, 1, 5, 2}, index[] = {4, 1, 1, 0, 3, 2};
    int offsets[6] = {0, 0, 0, 0, 0, 0};
    for (int e = 0; e < E; e++) { offsets[e + 1] = offsets[e] + of_some[e] * (few ? 1 : 20); }
    const int R = offsets[E];
    const size_t n_inp = (size_t)R * C, n_out = (size_t)R * OC, n = (size_t)E * OC * C;
    int* rows = (int*)new_array((size_t)R, sizeof(int));
    for (int i = 0; i < R; i++) { rows[i] = index[i % 6]; }
    float *inp = random_array(n_inp, 1.0f, 4), *dout = random_array(n_out, 1.0f, 5);
    X *x = TO_DEVICE(inp, n_inp), *dy = TO_DEVICE(dout, n_out), *weight = TO_DEVICE(m->values, n);
    X *want = TO_DEVICE(dout, n_out), *got = TO_DEVICE(dout, n_out);
    X *dwant = TO_DEVICE(inp, n_inp), *dgot = TO_DEVICE(inp, n_inp);
    int *begins = ints_to_device(offsets, (size_t)E + 1, dev), *from = ints_to_device(rows, (size_t)R, dev);
    grouped_matmul_forward(want, x, R > 5 ? from : NULL, weight, begins, E, R, C, OC, dev);
    grouped_matmul_forward_stored(got, x, R > 5 ? from : NULL, m->device, begins, E, R, dev);
    check_alike(t, "out of experts", s, got, want, n_out, dev);
    grouped_matmul_backward_input(dwant, dy, NULL, weight, begins, E, R, C, OC, dev);
    grouped_matmul_backward_input_stored(dgot, dy, NULL, m->device, begins, E, R, dev);
    check_alike(t, "dinp of experts", s, dgot, dwant, n_inp, dev);
    device_drop(x), device_drop(dy), device_drop(weight), device_drop(begins), device_drop(from);
    free(inp), free(dout), free(rows);
}

// as a table; a token that is none leaves what is there
OP_STORED(X)
static void check_rows(Test* t, const Shape* s, const Matrices* m, X* type, const Device* dev) {
    const int tokens[] = {s->rows - 1, 0, -1, 3, 3}, N = 5, C = s->columns;
    const size_t n = (size_t)N * C;
    float* before = random_array(n, 1.0f, 7);
    X *table = TO_DEVICE(m->values, (size_t)s->rows * C), *want = TO_DEVICE(before, n), *got = TO_DEVICE(before, n);
    int* which = ints_to_device(tokens, (size_t)N, dev);
    token_embedding_forward(want, which, table, N, C, dev);
    token_embedding_forward_stored(got, which, m->device, N, dev);
    check_alike(t, "rows", s, got, want, n, dev);
    device_drop(table), device_drop(which);
    free(before);
}

#ifdef __CUDACC__
template <typename X>
static void check_room(Test* t, const Shape* s, const Matrices* m, X* type, const Device* dev) {
    const size_t told = widen_bytes<X>(&m->device, s->E), found = dev->widened->n_bytes;
    const int is_X = s->kind == STORED_BF16 && sizeof(X) == sizeof(bf16);
#if defined(WGMMA) && !defined(EXACT)
    if (grouped_hopper && sizeof(X) == sizeof(bf16) && grouped_hopper_reads_codes(&m->device)) {
        check(t, found == 0, "%s: %zu are taken for codes that tiles are made of", s->name, found);
        return;
    }
#endif
    check(t, told == found, "%s, %zu bytes: told %zu, found %zu", s->name, sizeof(X), told, found);
    check(t, (told == 0) == is_X, "%s, %zu bytes: %zu are taken", s->name, sizeof(X), told);
}
#endif

typedef enum { LINEAR, GROUPS, EXPERTS, ROWS_OF_TABLE } What;

OP_STORED(X)
static void check_all(Test* t, const Shape* s, What what, X* type) {
    const Device dev = test_device(2);
    Matrices m = matrices(s, &dev);
    for (int few = 0; few < 2; few++) {
        if (what == LINEAR) { check_linear(t, s, &m, few ? 5 : 40, type, &dev); }
        if (what == GROUPS) { check_groups(t, s, &m, s->rows % 2 ? 1 : 2, few ? 5 : 40, type, &dev); }
        if (what == EXPERTS) { check_experts(t, s, &m, few, type, &dev); }
    }
    if (what == ROWS_OF_TABLE) { check_rows(t, s, &m, type, &dev); }
#ifdef __CUDACC__
    if (what == EXPERTS) { check_room(t, s, &m, type, &dev); }
#endif
    matrices_free(&m);
    device_free((Device*)&dev);
}

static void check_shapes(Test* t, What what) {
    for (int i = 0; i < N_SHAPES; i++) {
        check_all(t, &shapes[i], what, (float*)NULL);
#if defined(__CUDACC__) && !defined(EXACT)
        check_all(t, &shapes[i], what, (bf16*)NULL);
#endif
    }
}

static void test_linear(Test* t) { check_shapes(t, LINEAR); }
static void test_groups(Test* t) { check_shapes(t, GROUPS); }
static void test_experts(Test* t) { check_shapes(t, EXPERTS); }
static void test_rows(Test* t) { check_shapes(t, ROWS_OF_TABLE); }

#if defined(__CUDACC__) && !defined(EXACT)
#ifdef WGMMA
static void test_hopper(Test* t) {
    int n_codes = 0;  // shapes whose codes go into tiles as they are
    grouped_hopper = 1;
    for (int i = 0; i < N_SHAPES; i++) {
        const Shape* s = &shapes[i];
        StoredMatrix m = stored_matrix(NULL, s->kind, s->rows, s->columns, s->part_rows, NULL);
        m.block_rows = s->block_rows, m.block_columns = s->block_columns;
        n_codes += grouped_hopper_reads_codes(&m);
        check_all(t, s, EXPERTS, (bf16*)NULL);
    }
    grouped_hopper = 0;
    check(t, n_codes == 2, "%d shapes, expected 2", n_codes);
}
#else
static void test_hopper(Test* t) { skip(t, "not built for sm_90a"); }
#endif
#endif

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"linear", "a linear layer: the bits of the same numbers, for few rows and many", test_linear},
        {"groups", "a layer in groups: the same", test_groups},
        {"experts", "experts, a few at a time, some without rows: the same, in the room that is told", test_experts},
#if defined(__CUDACC__) && !defined(EXACT)
        {"hopper", "experts by wgmma: the same, of fp8 without room where blocks are whole", test_hopper},
#endif
        {"rows", "rows of a table are its numbers", test_rows},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof *promises);
}
