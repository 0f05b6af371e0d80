/*
Promises of llmc/ops/fp8_rows.h, which follow from a table (llmc/test/op.h). Then: a number is the nearest of a group's
grid, found by a search that shares no arithmetic; scales at their limits; what NumPy has made, with a product behind
it, in dev/golden/fp8_rows.safetensors; and of a CUDA build the codes.
*/
#include "llmc/ops/fp8_rows.h"
#include "llmc/ops/matmul.h"
#include "llmc/test/golden.h"       // golden_open, golden_floats, golden_check
#include "llmc/test/op_promises.h"  // Op, op_problem, op_check, op_main

enum { INP, OUT };

static void forward_ref(float* const* a, const int* d) { fp8_rows_forward_ref(a[OUT], a[INP], d['N'], d['C']); }

OP_STORED(X)
static void forward(X* const* x, float* const* a, const int* d, const Device* dev) {
    fp8_rows_forward(x[OUT], x[INP], d['N'], d['C'], dev);
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
        for (int c = 0; c < C; c++) { x[c] = ldexpf(x[c], (int)(splitmix64((uint64_t)k, (uint64_t)c) % 24) + 4 * k - 126); }
        fp8_rows_forward_ref(out, x, 1, C);
        for (int first = 0; first < C; first += FP8_BLOCK) {
            const int end = first + FP8_BLOCK < C ? first + FP8_BLOCK : C;
            double largest = 1e-4f, scale = 0x1p-40;
            for (int c = first; c < end; c++) { largest = fmax(largest, fabs((double)x[c])); }
            while (448.0 * scale < largest) { scale *= 2.0; }
            for (int c = first; c < end; c++) {
                const double want = nearest_on_grid((double)x[c], scale);
                check(t, (double)out[c] == want && signbit(out[c]) == signbit(x[c]), "%a of scale %a becomes %a, expected %a",
                      (double)x[c], scale, (double)out[c], want);
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
    check(t, isnan(fp8_row_scale(INFINITY)) && isinf(fp8_magnitude(NAN)) && fp8_magnitude(-FLT_MAX) == FLT_MAX, "no scale");
}

// what is not finite spoils its group, and no other
static void test_not_finite(Test* t) {
    enum { C = 3 * FP8_BLOCK };
    const float bad[] = {INFINITY, -INFINITY, NAN, 0x1.fp127f};
    for (int k = 0; k < 4; k++) {
        float *x = random_array(C, 1.0f, 5), out[C];
        x[FP8_BLOCK + 77] = bad[k];
        fp8_rows_forward_ref(out, x, 1, C);
        for (int c = 0; c < C; c++) {
            const int is_here = c / FP8_BLOCK == 1, is_it = c == FP8_BLOCK + 77;
            const int fits = !is_here ? isfinite(out[c]) : k == 3 ? (is_it ? isinf(out[c]) : out[c] == 0.0f) : isnan(out[c]);
            check(t, fits, "%g beside %g: %d became %g", (double)x[c], (double)bad[k], c, (double)out[c]);
        }
        free(x);
    }
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
        float *inp = to_device(golden_floats(&g, "inp"), (size_t)N * C, &dev), *got = filled_array((size_t)N * (C + OC), NAN);
        float *rounded = to_device(got, (size_t)N * C, &dev), *out = to_device(got, (size_t)N * OC, &dev);
        float* scales = to_device(golden_floats(&g, "scales"), stored_scales(&weight), &dev);
        void* data = device_alloc(n_codes, "codes");
        device_upload(data, bytes, n_codes, &dev);
        weight.data = data, weight.scales = scales;
        fp8_rows_forward(rounded, inp, N, C, &dev);
        matmul_forward_stored(out, rounded, weight, NULL, N, &dev);
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
    fp8_rows_forward(out, inp, N, C, &dev);
    fp8_rows_codes(d, s, inp, N, C, &dev);
    from_device_as<X>(numbers, out, n, &dev), from_device(scales, s, n_scales, &dev);
    device_download(codes, d, n, &dev);
    for (size_t i = 0; i < n; i++) {
        const float scale = scales[i % (size_t)C / FP8_BLOCK * (size_t)N + i / (size_t)C], found = fp8_widen(codes[i]) * scale;
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
        {"golden", "NumPy's rows, and their product with a weight in fp8", test_golden},
#ifdef __CUDACC__
        {"codes", "codes times scales are the same numbers", test_codes},
#endif
    };
    return op_main(argc, argv, ops, sizeof ops / sizeof *ops, own, sizeof own / sizeof *own);
}
