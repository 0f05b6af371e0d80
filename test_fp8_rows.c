/*
Promises of llmc/ops/fp8_rows.h, which follow from a table (llmc/test/op.h), and of fp8_matmul.h. Then: a number is the
nearest of a group's grid, found by a search that shares no arithmetic; scales at their limits; what NumPy has made,
with a product behind it, in dev/golden/fp8_rows.safetensors; the product's plain loop, or near it; and of a CUDA build
the codes, and which products cuBLASLt takes.
*/
#include "llmc/ops/fp8_matmul.h"
#include "llmc/ops/fp8_rows.h"
#include "llmc/test/golden.h"       // golden_open, golden_floats, golden_check
#include "llmc/test/op_promises.h"  // Op, op_main

enum { INP, OUT };

static void forward_ref(float* const* a, const int* d) { fp8_rows_forward_ref(a[OUT], a[INP], NULL, d['N'], d['C']); }

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    fp8_rows_forward(x[OUT], x[INP], NULL, d['N'], d['C'], dev);
}

static const int shapes[][OP_DIMS] = {{1, 1}, {7, 33}, {3, 127}, {5, 128}, {4, 129}, {9, 256}, {2, 388}, {33, 260},
                                      {130, 300}, {0}};

static const Op rows = {
    .name = "rows", .dims = "NC",
    .arrays = {
        {INP, "inp", "NC", GIVEN, 3.0f},
        {OUT, "out", "NC", MADE, 0.0f, NULL, "inp"},
    },
    .shapes = shapes, .traits = ANYWHERE | ROWS | SPECIAL_KERNELS,
    .forward_ref = forward_ref, .forward = OP_FAST(forward),
};

// all numbers that are not negative, in order: the number of a code is its place
static double number_of(int code) {
    const int exponent = code >> 3, mantissa = code & 7;
    return exponent > 0 ? (8 + mantissa) * pow(2.0, exponent - 10) : mantissa * pow(2.0, -9);
}

// the nearest of the grid that has this scale; of two as near the one whose code is even
static double nearest_on_grid(double x, double scale) {
    int best = 0;
    for (int code = 1; code < 127; code++) {
        const double apart = fabs(number_of(code) * scale - fabs(x)), before = fabs(number_of(best) * scale - fabs(x));
        if (apart < before || (apart == before && code % 2 == 0)) { best = code; }
    }
    return copysign(number_of(best) * scale, x);
}

// a row of two groups, of which the second is short, and magnitudes lie far apart; every number is a bf16
static void test_nearest(Test* t) {
    enum { C = 200, TRIES = 55 };
    for (int k = 0; k < TRIES; k++) {
        float *x = random_array(C, 1.0f, (uint64_t)k), out[C];
        for (int c = 0; c < C; c++) {
            x[c] = ldexpf(x[c], (int)(splitmix64((uint64_t)k, (uint64_t)c) % 24) + 4 * k - 126);
        }
        fp8_row_ref(out, x, C);
        for (int first = 0; first < C; first += FP8_BLOCK) {
            const int end = first + FP8_BLOCK < C ? first + FP8_BLOCK : C;
            double largest = 1e-4f, scale = 0x1p-40;
            for (int c = first; c < end; c++) { largest = fmax(largest, fabs((double)x[c])); }
            while (448.0 * scale < largest) { scale *= 2.0; }
            for (int c = first; c < end; c++) {
                const double want = nearest_on_grid((double)x[c], scale);
                const int is_it = (double)out[c] == want && signbit(out[c]) == signbit(x[c]);
                check(t, is_it, "%a of scale %a becomes %a, expected %a", (double)x[c], scale, (double)out[c], want);
                check(t, bf16_widen(bf16_nearest(out[c])) == out[c], "%a is no bf16", (double)out[c]);
            }
        }
        free(x);
    }
}

static void test_scale(Test* t) {
    const float largest[][2] = {{448.0f, 1.0f}, {nextafterf(448.0f, 1e9f), 2.0f}, {224.0f, 0.5f}, {1.0f, 0x1p-8f},
                                {1.75f, 0x1p-8f}, {nextafterf(1.75f, 2.0f), 0x1p-7f}, {0.0f, 0x1p-22f},
                                {1e-4f, 0x1p-22f}, {1e-45f, 0x1p-22f}, {448 * 0x1p-22f, 0x1p-22f},
                                {nextafterf(448 * 0x1p-22f, 1.0f), 0x1p-21f}, {FLT_MAX, 0x1p120f}};
    for (size_t i = 0; i < sizeof largest / sizeof *largest; i++) {
        const float found = fp8_row_scale(largest[i][0]);
        check(t, found == largest[i][1], "%a has the scale %a, expected %a", (double)largest[i][0], (double)found,
              (double)largest[i][1]);
    }
    check(t, isnan(fp8_row_scale(INFINITY)) && isinf(fp8_magnitude(NAN)), "there is no scale");
    check(t, fp8_magnitude(-FLT_MAX) == FLT_MAX, "the largest is finite");
}

// what is not finite spoils its group, and no other
static void test_not_finite(Test* t) {
    enum { C = 3 * FP8_BLOCK };
    const float bad[] = {INFINITY, -INFINITY, NAN, 0x1.fp127f};
    for (int k = 0; k < 4; k++) {
        float *x = random_array(C, 1.0f, 5), out[C];
        x[FP8_BLOCK + 77] = bad[k];
        fp8_row_ref(out, x, C);
        for (int c = 0; c < C; c++) {
            const int is_here = c / FP8_BLOCK == 1, is_it = c == FP8_BLOCK + 77;
            const int is_large = k == 3 && (is_it ? isinf(out[c]) : out[c] == 0.0f), is_bad = k < 3 && isnan(out[c]);
            check(t, is_here ? is_large || is_bad : isfinite(out[c]), "%g beside %g: %d became %g", (double)x[c],
                  (double)bad[k], c, (double)out[c]);
        }
        free(x);
    }
}

// rows that an index chooses, some twice, are those rows
static void test_gathered(Test* t) {
    enum { C = 260 };
    const int index[] = {2, 0, 2, 1};
    float* x = random_array(3 * C, 3.0f, 1);
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        float *got = filled_array(4 * C, NAN), *want = filled_array(3 * C, NAN);
        float *inp = to_device(x, 3 * C, &dev), *out = to_device(got, 4 * C, &dev);
        int* rows_of = ints_to_device(index, 4, &dev);
        fp8_rows_forward(out, inp, rows_of, 4, C, &dev);
        from_device(got, out, 4 * C, &dev);
        fp8_rows_forward_ref(want, x, NULL, 3, C);
        for (int n = 0; n < 4; n++) { check_bits(t, "a row", got + n * C, want + index[n] * C, C); }
        device_drop(inp), device_drop(rows_of);
        free(got), free(want);
        device_free(&dev);
    }
    free(x);
}

// rows, and their product with a weight in fp8 whose blocks are ragged and whose scales are no powers of two
static void test_golden(Test* t) {
    Golden g;
    golden_open(&g, "dev/golden/fp8_rows.safetensors");
    const int N = golden_int(&g, "N"), C = golden_int(&g, "C"), OC = golden_int(&g, "OC");
    const int* codes = (const int*)golden_tensor(&g, "codes", DTYPE_I32)->data;
    const size_t n_codes = (size_t)OC * C;
    uint8_t* bytes = (uint8_t*)new_array(n_codes, 1);
    for (size_t i = 0; i < n_codes; i++) { bytes[i] = (uint8_t)codes[i]; }
    StoredMatrix weight = stored_matrix(NULL, STORED_FP8, OC, C, OC, NULL);
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        float* got = filled_array((size_t)N * (C + OC), NAN);
        float* inp = to_device(golden_floats(&g, "inp"), (size_t)N * C, &dev);
        float *rounded = to_device(got, (size_t)N * C, &dev), *out = to_device(got, (size_t)N * OC, &dev);
        float* scales = to_device(golden_floats(&g, "scales"), stored_scales(&weight), &dev);
        void* data = device_alloc(n_codes, "codes");
        device_upload(data, bytes, n_codes, &dev);
        weight.data = data, weight.scales = scales;
        fp8_matmul_forward(out, inp, weight, NULL, rounded, N, &dev);
        fp8_rows_forward(rounded, inp, NULL, N, C, &dev);
        from_device(got, rounded, (size_t)N * C, &dev);
        golden_check(t, &g, "rounded", got, (size_t)N * C);
#if !defined(__CUDACC__) || defined(EXACT)  // sums of other builds have another order
        from_device(got, out, (size_t)N * OC, &dev);
        golden_check(t, &g, "out", got, (size_t)N * OC);
#else
        device_drop(out);
#endif
        device_drop(inp), device_drop(scales);
        device_release(data, n_codes);
        free(got);
        device_free(&dev);
    }
    free(bytes);
    golden_close(&g);
}

// ---- the product ----

// of N rows with a weight of parts, in blocks of so many rows and columns
typedef struct {
    int N, C, OC, part_rows, block, is_taken;  // by cuBLASLt, in a fast build of bf16
} Product;

static const Product products[] = {
    {32, 512, 136, 136, 128, 1}, {20, 640, 264, 264, 128, 1},   // rows of 4 and of 5 scales
    {36, 144, 256, 128, 128, 1}, {132, 48, 8, 8, 128, 1},       // gate and up; a block alone
    {33, 256, 64, 64, 128, 0}, {32, 200, 64, 64, 128, 0},       // rows no multiple of 4, columns none of 16
    {32, 256, 36, 36, 128, 0}, {32, 256, 80, 40, 128, 0},       // outputs none of 8, a part that ends in a block
    {32, 256, 128, 128, 64, 0}, {7, 133, 9, 9, 128, 0},         // blocks that ranks have cut; odd
};
enum { N_PRODUCTS = sizeof products / sizeof *products };

// codes of all kinds but NaN; scales of which neighbours differ much, and that are no powers of two
static StoredMatrix random_weight(const Product* p) {
    StoredMatrix w = stored_matrix(NULL, STORED_FP8, p->OC, p->C, p->part_rows, NULL);
    w.block_rows = w.block_columns = p->block;
    const size_t n = (size_t)p->OC * p->C, n_scales = stored_scales(&w);
    uint8_t* codes = (uint8_t*)new_array(n, 1);
    float* scales = (float*)new_array(n_scales, sizeof *scales);
    for (size_t i = 0; i < n; i++) { codes[i] = (uint8_t)splitmix64(2, i), codes[i] ^= (codes[i] & 127) == 127; }
    for (size_t i = 0; i < n_scales; i++) { scales[i] = ldexpf(0.7f, -(int)(splitmix64(3, i) % 6)); }
    w.data = codes, w.scales = scales;
    return w;
}

#if !defined(__CUDACC__) || defined(EXACT)
static void check_out(Test* t, const Product* p, const float* x, const StoredMatrix* w, const float* got,
                      const float* want) {
    (void)x, (void)w;
    check_bits(t, "out", got, want, (size_t)p->N * p->OC);
}
#else
// bf16 rounds the result and, where it is widened, the weight, 2^-9 each; then fp8_matmul.h's bound for cuBLASLt, of
// the sum of |products|, and of a chain. At random they nearly cancel, and 2^-8 of the result is left
static void check_out(Test* t, const Product* p, const float* x, const StoredMatrix* w, const float* got,
                      const float* want) {
    const size_t n_inp = (size_t)p->N * p->C, n_codes = (size_t)p->OC * p->C, n_out = (size_t)p->N * p->OC;
    float *sizes = filled_array(n_out, NAN), *rounded = filled_array(n_inp, NAN), *positive = copied_array(x, n_inp);
    uint8_t* magnitudes = (uint8_t*)new_array(n_codes, 1);
    StoredMatrix of = *w;
    for (size_t i = 0; i < n_codes; i++) { magnitudes[i] = ((const uint8_t*)w->data)[i] & 127; }
    for (size_t i = 0; i < n_inp; i++) { positive[i] = fabsf(x[i]); }
    of.data = magnitudes;
    fp8_matmul_forward_ref(sizes, rounded, positive, &of, NULL, p->N);
    double off2 = 0.0, want2 = 0.0;
    for (size_t i = 0; i < n_out; i++) {
        const double off = fabs((double)got[i] - (double)want[i]);
        const double of_sum = 0x1p-8 + 132 * 0x1p-13 + p->C * 0x1p-23;
        const double bound = 0x1p-8 * fabs((double)want[i]) + of_sum * (double)sizes[i];
        check(t, off <= bound, "(%d, %d, %d): number %zu is %g, expected %g +- %g", p->N, p->C, p->OC, i,
              (double)got[i], (double)want[i], bound);
        off2 += off * off, want2 += (double)want[i] * (double)want[i];
    }
    check(t, sqrt(off2) <= 0x1p-8 * sqrt(want2), "(%d, %d, %d): off by %g of the whole", p->N, p->C, p->OC,
          sqrt(off2 / want2));
    free(sizes), free(rounded), free(positive), free(magnitudes);
}
#endif

OP_STORED(X)
static void check_product(Test* t, const Product* p, int with_bias, X* type, const Device* dev) {
    const size_t n_inp = (size_t)p->N * p->C, n_out = (size_t)p->N * p->OC, n_codes = (size_t)p->OC * p->C;
    const StoredMatrix host = random_weight(p);
    StoredMatrix w = host;
    float *x = random_array(n_inp, 2.0f, 4), *bias = random_array((size_t)p->OC, 1.0f, 6);
    float *rounded = filled_array(n_inp, NAN), *want = filled_array(n_out, NAN), *got = filled_array(n_out, NAN);
    if (sizeof(X) < sizeof(float)) { op_store_bf16(x, n_inp), op_store_bf16(bias, (size_t)p->OC); }
    fp8_matmul_forward_ref(want, rounded, x, &host, with_bias ? bias : NULL, p->N);
    void* data = device_alloc(n_codes, "codes");
    device_upload(data, host.data, n_codes, dev);
    float* scales = to_device((const float*)host.scales, stored_scales(&host), dev);
    w.data = data, w.scales = scales;
    X *inp = op_up_(type, x, n_inp, dev), *out = op_up_(type, got, n_out, dev), *b = op_up_(type, bias, p->OC, dev);
    void* room = device_alloc(fp8_matmul_bytes(sizeof(X), p->N, p->C, p->OC), "room");
    fp8_matmul_forward(out, inp, w, with_bias ? b : NULL, (X*)room, p->N, dev);
    op_down_(got, out, n_out, dev);
    check_out(t, p, x, &host, got, want);
    device_drop(inp), device_drop(b), device_drop(scales);
    device_release(data, n_codes), device_release(room, fp8_matmul_bytes(sizeof(X), p->N, p->C, p->OC));
    free((void*)host.data), free((void*)host.scales), free(x), free(bias), free(rounded), free(want), free(got);
}

static void test_product(Test* t) {
    for (int i = 0; i < N_PRODUCTS * N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i % N_TEST_THREADS));
        for (int with_bias = 0; with_bias < 2; with_bias++) {
            check_product(t, &products[i / N_TEST_THREADS], with_bias, (float*)NULL, &dev);
#if defined(__CUDACC__) && !defined(EXACT)
            check_product(t, &products[i / N_TEST_THREADS], with_bias, (bf16*)NULL, &dev);
#endif
        }
        device_free(&dev);
    }
}

#if defined(__CUDACC__) && !defined(EXACT)
// what cuBLASLt does not take is counted, but for a few rows. Hopper alone has these products
static void test_taken(Test* t) {
    int64_t n = 0;
    Device dev = test_device(1);
    for (int i = 0; i < N_PRODUCTS; i++) {
        const Product* p = &products[i];
        check_product(t, p, 0, (bf16*)NULL, &dev);
        const int64_t found = dev.fallbacks[FALLBACK_FP8].n;
        if (i == 0 && found > 0) {
            skip(t, "this GPU's cuBLASLt takes none");
            break;
        }
        n += p->N > FEW_ROWS && !p->is_taken;
        check(t, found == n, "(%d, %d, %d): %lld are counted, expected %lld", p->N, p->C, p->OC, (long long)found,
              (long long)n);
    }
    device_free(&dev);
}
#endif

#ifdef __CUDACC__
// code times scale is what fp8_rows_forward makes
template <typename X>
static void check_codes(Test* t, int N, int C, X* type) {
    Device dev = test_device(1);
    const size_t n = (size_t)N * C, n_scales = (size_t)fp8_blocks(C) * N;
    float *x = hard_array(n, 3), *numbers = filled_array(n, NAN), *scales = filled_array(n_scales, NAN);
    uint8_t *d = (uint8_t*)device_alloc(n, "codes"), *codes = (uint8_t*)new_array(n, 1);
    X *inp = to_device_as<X>(x, n, &dev), *out = to_device_as<X>(x, n, &dev);
    float* s = to_device(scales, n_scales, &dev);
    fp8_rows_forward(out, inp, NULL, N, C, &dev);
    fp8_rows_codes(d, s, inp, N, C, &dev);
    from_device_as<X>(numbers, out, n, &dev), from_device(scales, s, n_scales, &dev);
    device_download(codes, d, n, &dev);
    for (size_t i = 0; i < n; i++) {
        const size_t row = i / (size_t)C, group = i % (size_t)C / FP8_BLOCK;
        const float found = fp8_widen(codes[i]) * scales[group * (size_t)N + row];
        check(t, float_bits(found) == float_bits(numbers[i]), "(%d, %d): number %zu is %a, expected %a", N, C, i,
              (double)found, (double)numbers[i]);
    }
    device_drop(inp);
    device_release(d, n);
    free(x), free(numbers), free(scales), free(codes);
    device_free(&dev);
}

static void test_codes(Test* t) {
    const int of[][2] = {{1, 1}, {7, 130}, {16, 256}, {33, 388}};
    for (int i = 0; i < 4; i++) {
        check_codes(t, of[i][0], of[i][1], (float*)NULL);
#ifndef EXACT
        check_codes(t, of[i][0], of[i][1], (bf16*)NULL);
#endif
    }
}
#endif

int main(int argc, char** argv) {
    const Op* ops[] = {&rows};
    const Promise own[] = {
        {"nearest", "every number is the nearest of its group's grid, by a search; bf16 holds it", test_nearest},
        {"scale", "the smallest power of two that a group needs, and its limits", test_scale},
        {"not finite", "Inf and NaN spoil their group alone; what is near 2^128 becomes infinite", test_not_finite},
        {"gathered", "rows that an index chooses are those rows", test_gathered},
        {"golden", "NumPy's rows, and their product with a weight in fp8", test_golden},
        {"product", "the plain loop's bits; in a fast build near it", test_product},
#if defined(__CUDACC__) && !defined(EXACT)
        {"taken", "cuBLASLt takes products of fp8 whose shapes it can; the others are counted", test_taken},
#endif
#ifdef __CUDACC__
        {"codes", "codes times scales are the same numbers", test_codes},
#endif
    };
    return op_main(argc, argv, ops, sizeof ops / sizeof *ops, own, sizeof own / sizeof *own);
}
