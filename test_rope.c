/*
Promises of llmc/ops/rope.h, which follow from the tables (llmc/test/op.h), and others: of powers, cosines and sines
against decimal arithmetic, of values computed apart, of generation.
*/
#include "llmc/ops/rope.h"
#include "llmc/test/op_promises.h"  // Op, op_main

// ---- rotations: heads of R channels, D apart; rows W, sequences S elements apart; positions F..T-1 ----

enum { INP, COSINES, SINES, OUT, DOUT, DINP, PLACES };

// interleaved pairs are the last R channels of a head, and all sequences have one table (DeepSeek V4)
static RopeShape shape_of(const int* d, int pairs) {
    RopeShape s = rope_shape(d['B'], d['T'], d['F'], d['H'], d['R'], pairs);
    s.head = (size_t)d['D'], s.row = (size_t)d['W'], s.seq = (size_t)d['S'];
    return s;
}

// halves are the first, and a sequence has a table of its own, where one position is two rows from the next
static RopeShape own_shape_of(const int* d) {
    RopeShape s = shape_of(d, ROPE_HALVES);
    s.table_row = (size_t)d['R'], s.table_seq = d['T'] * s.table_row;
    return s;
}

static void interleaved_ref(float* const* a, const int* d) {
    RopeShape s = shape_of(d, ROPE_INTERLEAVED);
    rope_forward_ref(a[OUT] + d['D'] - d['R'], a[COSINES], a[SINES], &s);
}

OP_STORED(X)
static void interleaved_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    RopeShape s = shape_of(d, ROPE_INTERLEAVED);
    rope_forward(x[OUT] + d['D'] - d['R'], a[COSINES], a[SINES], &s, dev);
}

static void interleaved_back_ref(float* const* a, const int* d) {
    RopeShape s = shape_of(d, ROPE_INTERLEAVED);
    rope_backward_ref(a[DINP] + d['D'] - d['R'], a[COSINES], a[SINES], &s);
}

OP_STORED(X)
static void interleaved_back(X* const* x, float* const* a, const int* d, const Device* dev) {
    RopeShape s = shape_of(d, ROPE_INTERLEAVED);
    rope_backward(x[DINP] + d['D'] - d['R'], a[COSINES], a[SINES], &s, dev);
}

static void halves_ref(float* const* a, const int* d) {
    RopeShape s = own_shape_of(d);
    rope_forward_ref(a[OUT], a[COSINES], a[SINES], &s);
}

OP_STORED(X)
static void halves_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    RopeShape s = own_shape_of(d);
    rope_forward(x[OUT], a[COSINES], a[SINES], &s, dev);
}

static void halves_back_ref(float* const* a, const int* d) {
    RopeShape s = own_shape_of(d);
    rope_backward_ref(a[DINP], a[COSINES], a[SINES], &s);
}

OP_STORED(X)
static void halves_back(X* const* x, float* const* a, const int* d, const Device* dev) {
    RopeShape s = own_shape_of(d);
    rope_backward(x[DINP], a[COSINES], a[SINES], &s, dev);
}

// interleaved, and positions have any rows of the table, or none
static RopeShape placed_shape_of(float* const* a, const int* d) {
    RopeShape s = shape_of(d, ROPE_INTERLEAVED);
    s.places = (const int*)a[PLACES];
    return s;
}

static void placed_ref(float* const* a, const int* d) {
    RopeShape s = placed_shape_of(a, d);
    rope_forward_ref(a[OUT] + d['D'] - d['R'], a[COSINES], a[SINES], &s);
}

OP_STORED(X)
static void placed_fast(X* const* x, float* const* a, const int* d, const Device* dev) {
    RopeShape s = placed_shape_of(a, d);
    rope_forward(x[OUT] + d['D'] - d['R'], a[COSINES], a[SINES], &s, dev);
}

static void placed_back_ref(float* const* a, const int* d) {
    RopeShape s = placed_shape_of(a, d);
    rope_backward_ref(a[DINP] + d['D'] - d['R'], a[COSINES], a[SINES], &s);
}

OP_STORED(X)
static void placed_back(X* const* x, float* const* a, const int* d, const Device* dev) {
    RopeShape s = placed_shape_of(a, d);
    rope_backward(x[DINP] + d['D'] - d['R'], a[COSINES], a[SINES], &s, dev);
}

static void fill_places(float* const* a, const int* d) {
    int* places = (int*)a[PLACES];
    for (int i = 3; i < d['B'] * d['T']; i += 4) { places[i] = -1; }
}

// pair i of `rotated` channels as a complex number, times cos + i sin
static void turn_double(double* y, const double* x, const double* c, const double* n, int pairs, int rotated) {
    for (int i = 0; i < rotated / 2; i++) {
        int first = pairs == ROPE_HALVES ? i : 2 * i, second = pairs == ROPE_HALVES ? i + rotated / 2 : 2 * i + 1;
        y[first] = x[first] * c[i] - x[second] * n[i];
        y[second] = x[first] * n[i] + x[second] * c[i];
    }
}

// places: as the shape's, NULL or not
static void in_double_of(double* const* a, RopeShape s, size_t first, const double* places) {
    memcpy(a[OUT], a[INP], sizeof(double) * s.B * s.seq);
    for (int b = 0; b < s.B; b++) {
        for (int t = 0; t < s.T - s.t0; t++) {
            const int place = places ? (int)places[b * (s.T - s.t0) + t] : s.t0 + t;
            for (int h = 0; h < s.heads && place >= 0; h++) {
                size_t at = b * s.seq + t * s.row + h * s.head + first;
                size_t row = b * s.table_seq + place * s.table_row;
                turn_double(a[OUT] + at, a[INP] + at, a[COSINES] + row, a[SINES] + row, s.pairs, s.rotated);
            }
        }
    }
}

static void interleaved_double(double* const* a, const int* d) {
    in_double_of(a, shape_of(d, ROPE_INTERLEAVED), (size_t)(d['D'] - d['R']), NULL);
}
static void halves_double(double* const* a, const int* d) { in_double_of(a, own_shape_of(d), 0, NULL); }
static void placed_double(double* const* a, const int* d) {
    in_double_of(a, shape_of(d, ROPE_INTERLEAVED), (size_t)(d['D'] - d['R']), a[PLACES]);
}

static double error(int array, const int* d) { return 3 * 0x1p-24 * 4.0; }  // two products below 2 and their sum

static double apart(const OpProblem* p, int array, size_t i) { return 2 * error(array, p->d); }

static const int shapes[][OP_DIMS] = {  // B, T, F, H, R, D, W, S
    {1, 1, 0, 1, 2, 2, 2, 2}, {1, 3, 0, 1, 6, 7, 9, 30}, {2, 5, 4, 3, 4, 4, 12, 12}, {2, 3, 1, 2, 66, 66, 132, 300},
    {3, 7, 0, 2, 16, 24, 48, 336}, {1, 2, 0, 1, 70, 71, 71, 142}, {2, 9, 3, 4, 32, 48, 200, 1400},
    {1, 5, 2, 9, 64, 64, 576, 1728}, {2, 2, 0, 40, 16, 16, 640, 1280},
#ifndef __CUDACC__
    {1, 33, 0, 3, 34, 64, 192, 6336}, {5, 17, 3, 2, 128, 128, 256, 3584}, {1, 7, 0, 2, 192, 200, 400, 2800},
#endif
    {0},
};

static const Op interleaved = {
    .name = "interleaved", .dims = "BTFHRDWS",
    .arrays = {
        {INP, "inp", "BS", GIVEN, 2.0f},
        {COSINES, "cosines", "TR", GIVEN | FLOAT, 1.0f},
        {SINES, "sines", "TR", GIVEN | FLOAT, 1.0f},
        {OUT, "out", "BS", MADE | PARTLY, 0.0f, NULL, "inp"},
        {DOUT, "dout", "BS", GIVEN, 1.0f},
        {DINP, "dinp", "BS", GRADIENT | PARTLY, 0.0f, NULL, "dout"},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = interleaved_ref, .forward = OP_FAST(interleaved_fast),
    .backward_ref = interleaved_back_ref, .backward = OP_FAST(interleaved_back),
    .in_double = interleaved_double, .error = error, .judged = {{2, 5, 1, 2, 6, 7, 15, 70}}, .apart = apart,
};

static const Op halves = {
    .name = "halves", .dims = "BTFHRDWS",
    .arrays = {
        {INP, "inp", "BS", GIVEN, 2.0f},
        {COSINES, "cosines", "BTR", GIVEN | FLOAT, 1.0f},
        {SINES, "sines", "BTR", GIVEN | FLOAT, 1.0f},
        {OUT, "out", "BS", MADE | PARTLY, 0.0f, NULL, "inp"},
        {DOUT, "dout", "BS", GIVEN, 1.0f},
        {DINP, "dinp", "BS", GRADIENT | PARTLY, 0.0f, NULL, "dout"},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE,
    .forward_ref = halves_ref, .forward = OP_FAST(halves_fast),
    .backward_ref = halves_back_ref, .backward = OP_FAST(halves_back),
    .in_double = halves_double, .error = error, .judged = {{2, 5, 1, 2, 6, 7, 15, 70}}, .apart = apart,
};

static const Op placed = {
    .name = "placed", .dims = "BTFHRDWS",
    .arrays = {
        {INP, "inp", "BS", GIVEN, 2.0f},
        {COSINES, "cosines", "TR", GIVEN | FLOAT, 1.0f},
        {SINES, "sines", "TR", GIVEN | FLOAT, 1.0f},
        {OUT, "out", "BS", MADE | PARTLY, 0.0f, NULL, "inp"},
        {DOUT, "dout", "BS", GIVEN, 1.0f},
        {DINP, "dinp", "BS", GRADIENT | PARTLY, 0.0f, NULL, "dout"},
        {PLACES, "places", "BT", GIVEN | INDEX, 0.0f, NULL, NULL, 'T'},
    },
    .shapes = shapes, .traits = ROWS | ANYWHERE, .fill = fill_places,
    .forward_ref = placed_ref, .forward = OP_FAST(placed_fast),
    .backward_ref = placed_back_ref, .backward = OP_FAST(placed_back),
    .in_double = placed_double, .error = error, .judged = {{2, 5, 1, 2, 6, 7, 15, 70}}, .apart = apart,
};

// ---- powers and angles against decimal arithmetic ----

// Written by Python: decimal with 80 digits, base^e = exp(e ln base) with e the float nearest 2i/HS, rounded to float
// by comparing fractions, then FNV-1a over the bits of i = 0, 1, ... The bases are published ones; those in
// hexadecimal are 10000 scaled by alpha = 8. Of the 5100 powers of these bases, 10^5, 10^9 and 2.5, HS also 36, 40, 72,
// 80, rope_power_ was within 2^-101 of the decimals, and none is nearer than 1.1e-10, relative, to the middle between
// two floats: a double, with its 1.1e-16, is enough to tell the sides
static const struct {
    int HS;
    double base;
    uint64_t hash;
} powers[] = {
    {8, 10000, 0xa0a0ed55144813f5u}, {8, 0x1.387ffffffffffp+17, 0xa09e7e52b54813f5u},
    {8, 160000, 0xa09e7e52b54813f5u}, {8, 500000, 0x13194e4493583cf9u}, {8, 1000000, 0xce133348e8d85d41u},
    {8, 8000000, 0x131f3b9c48583cf9u}, {8, 10000000, 0x1384e5d0ec6172f8u}, {16, 10000, 0x1b599a1c38f4211bu},
    {16, 0x1.a49803f1f2c58p+16, 0x39df5f6350c6cb80u}, {16, 160000, 0x1eec459fde315c95u},
    {16, 500000, 0x1098d9d712c86032u}, {16, 1000000, 0x120d0d4677272d2fu}, {16, 8000000, 0xf82aaa3fc7a873abu},
    {16, 10000000, 0x452c807828135424u}, {32, 10000, 0x4f5d2b5250e8f78bu},
    {32, 0x1.66f7de4f72651p+16, 0xf7a48060baa824e7u}, {32, 160000, 0x70a36d109a27b16eu},
    {32, 500000, 0x7dc606046ee7b51fu}, {32, 1000000, 0x70a9b0357a80c063u}, {32, 8000000, 0x9a5147201f801bb9u},
    {32, 10000000, 0xdb72271a215085c4u}, {64, 10000, 0x4bfe78dbc865c161u},
    {64, 0x1.4e2e603a0b55bp+16, 0x1ba52428fac43d65u}, {64, 160000, 0x443ab032d78c4fcfu},
    {64, 500000, 0x35785b1767f34056u}, {64, 1000000, 0x9b450a304103df70u}, {64, 8000000, 0x3ce41f33694cd358u},
    {64, 10000000, 0xf997ab9bebdd75bbu}, {96, 10000, 0x80cb835beb279a0bu},
    {96, 0x1.46a2f11de9eebp+16, 0x59e7219138f11d61u}, {96, 160000, 0xeeb7db32aa492197u},
    {96, 500000, 0x87d5192c06c2cd07u}, {96, 1000000, 0xf0504b12fbbd14ccu}, {96, 8000000, 0xbbc4860fecf94af4u},
    {96, 10000000, 0x04b613ad93bfce08u}, {128, 10000, 0x60359e44115d60ecu},
    {128, 0x1.42fc9f655f33ep+16, 0x0aac93188b216168u}, {128, 160000, 0xe23711768026c6ffu},
    {128, 500000, 0xd4545faae8296a82u}, {128, 1000000, 0xecd4ee670af96eaeu}, {128, 8000000, 0x17ec40b4486fd745u},
    {128, 10000000, 0x588645dcad2c8aa9u}, {192, 10000, 0xc02b9e5addf4667bu},
    {192, 0x1.3f6a6a05e5a37p+16, 0x07df88b6f84e7d13u}, {192, 160000, 0xa8e6eb996d1e211bu},
    {192, 500000, 0xe3f836e6e82f2395u}, {192, 1000000, 0x187590b538c405c4u}, {192, 8000000, 0x03a752b76ebc692bu},
    {192, 10000000, 0xfe86ed0f5d91b130u}, {256, 10000, 0x586fb61a265b98ffu},
    {256, 0x1.3da8aabc67b0fp+16, 0xe3a9a1685f4dcc7bu}, {256, 160000, 0xec6c4f363a1865c2u},
    {256, 500000, 0xc07555a13cb12f42u}, {256, 1000000, 0xda598811f5565400u}, {256, 8000000, 0xc3716bf6093f92aeu},
    {256, 10000000, 0x0edad8ec97c04b0eu},
};

static void test_powers(Test* t) {
    for (size_t k = 0; k < sizeof powers / sizeof *powers; k++) {
        uint64_t hash = 0xcbf29ce484222325u;
        float frequencies[128];
        const int HS = powers[k].HS;
        rope_frequencies(frequencies, powers[k].base, HS);
        for (int i = 0; i < HS / 2; i++) {
            float x = rope_float_(rope_power_(powers[k].base, (double)((float)(2 * i) / (float)HS)));
            hash = (hash ^ float_bits(x)) * 0x100000001b3u;
            check(t, frequencies[i] == 1.0f / x, "HS %d, base %g, pair %d: %a is not 1 / %a", HS, powers[k].base, i,
                  (double)frequencies[i], (double)x);
        }
        check(t, hash == powers[k].hash, "HS %d, base %a: hash 0x%016llx, expected 0x%016llx", HS, powers[k].base,
              (unsigned long long)hash, (unsigned long long)powers[k].hash);
        if (powers[k].base != floor(powers[k].base) || HS == 8) { continue; }
        check(t, rope_scaled_base(powers[k].base, 1.0, HS) == powers[k].base, "alpha 1 leaves the base as it is");
    }
    for (size_t k = 1; k < sizeof powers / sizeof *powers; k += 7) {
        double base = rope_scaled_base(10000.0, 8.0, powers[k].HS);
        check(t, base == powers[k].base, "HS %d, alpha 8: base %a, expected %a", powers[k].HS, base, powers[k].base);
    }
}

// a middle between two floats, and what lies beside it by less than a double can say
static void test_middles(Test* t) {
    const double middle = 1.0 + 0x1p-24, above = 1.0 + 0x1.8p-23;
    const RopeDouble x[] = {{middle, 0.0}, {middle, 0x1p-90}, {middle, -0x1p-90}, {above, 0.0}, {above, -0x1p-90}};
    const float want[] = {1.0f, 1.0f + 0x1p-23f, 1.0f, 1.0f + 0x1p-22f, 1.0f + 0x1p-23f};
    for (int i = 0; i < 5; i++) {
        check(t, rope_float_(x[i]) == want[i], "%a + %a: found %a", x[i].high, x[i].low, (double)rope_float_(x[i]));
    }
    RopeDouble third = rope_power_(27.0, 1.0 / 3.0);  // 27^(1/3 - 2^-54 / 3) = 3 (1 - ln(27) 2^-54 / 3)
    double rest = (third.high - 3.0) + third.low, expected = -3.0 * log(27.0) * 0x1p-54 / 3.0;
    check(t, fabs(rest - expected) < 1e-15 * 0x1p-40, "27^(1/3): found 3 + %a, expected 3 + %a", rest, expected);
}

// the same decimals: frequency, then cos and sin of the float nearest t * frequency, rounded to float
static const struct {
    double base;
    int HS, t, i;
    float frequency, cosine, sine;
} angles[] = {
    {10000, 64, 0, 5, 0x1.e5a846p-3f, 0x1p+0f, 0x0.p+0f},
    {10000, 64, 300, 1, 0x1.7ff222p-1f, 0x1.59b8fcp-2f, -0x1.e1efcap-1f},
    {0x1.4e2e603a0b55bp+16, 64, 262143, 0, 0x1p+0f, -0x1.37e404p-1f, 0x1.960a26p-1f},
    {0x1.4e2e603a0b55bp+16, 64, 262143, 1, 0x1.670938p-1f, 0x1.37647ep-3f, -0x1.fa0c0ep-1f},
    {0x1.4e2e603a0b55bp+16, 64, 262143, 31, 0x1.17a8e4p-16f, -0x1.581e2p-2f, -0x1.e23948p-1f},
    {1000000, 128, 40959, 7, 0x1.c3f06ap-3f, -0x1.f5d95ap-1f, -0x1.95c9fap-3f},
    {8000000, 64, 1048575, 0, 0x1p+0f, 0x1.937a46p-1f, -0x1.3b32b2p-1f},
    {8000000, 64, 1048575, 1, 0x1.379098p-1f, 0x1.7ca3f8p-5f, 0x1.ff726ep-1f},
    {8000000, 64, 1048575, 17, 0x1.c331acp-13f, 0x1.a72fd6p-1f, -0x1.203228p-1f},
    {8000000, 64, 999999, 31, 0x1.b91ff2p-23f, 0x1.f53c68p-1f, 0x1.a1bc98p-3f},
    {10000000, 64, 262143, 3, 0x1.c3f06ap-3f, 0x1.130faep-2f, -0x1.ed2edp-1f},
    {10000, 8, 1000000, 0, 0x1p+0f, 0x1.df9dfap-1f, -0x1.6664b2p-2f},
    {10000, 8, 1000000, 1, 0x1.99999ap-4f, -0x1.ffac38p-1f, 0x1.24daaap-5f},
};

static void test_angles(Test* t) {
#ifdef SYSTEM_LIBM
    (void)angles;
    skip(t, "the parity build takes cosf and sinf from the C library");
#else
    for (size_t k = 0; k < sizeof angles / sizeof *angles; k++) {
        float frequencies[128];
        rope_frequencies(frequencies, angles[k].base, angles[k].HS);
        float angle = (float)angles[k].t * frequencies[angles[k].i];
        float got[3] = {frequencies[angles[k].i], fm_cos(angle), fm_sin(angle)};
        const float want[3] = {angles[k].frequency, angles[k].cosine, angles[k].sine};
        check_bits(t, "frequency, cos, sin", got, want, 3);
    }
#endif
}

static void test_table(Test* t) {
    enum { T = 1003, HS = 74, n = T * HS / 2 };
    float frequencies[HS / 2], *want = filled_array(2 * n, NAN), *got = filled_array(2 * n, NAN);
    rope_frequencies(frequencies, 1e6, HS);
    rope_table_ref(want, want + n, frequencies, T, HS);
    for (int j = 0; j < N_TEST_THREADS; j++) {
        Device dev = test_device(test_threads(j));
        RopeTable table;
        rope_table_init(&table, frequencies, T, HS, &dev);
        check(t, table.n_bytes == sizeof(float) * 2 * n && table.sines == table.cosines + n, "%zu bytes, expected %zu",
              table.n_bytes, sizeof(float) * 2 * n);
        device_download(got, table.cosines, table.n_bytes, &dev);
        check_bits(t, "cos, then sin", got, want, 2 * n);
        rope_table_free(&table);
        device_free(&dev);
    }
    for (int i = 0; i < HS / 2; i++) { check(t, want[i] == 1.0f && want[n + i] == 0.0f, "position 0 does not turn"); }
    free(want), free(got);
}

// ---- values computed apart ----

static void test_known(Test* t) {
    enum { T = 4, HS = 4 };
    const float want[HS] = {-1.27223251f, -1.83886499f, 2.87866810f, 4.08818664f};
    float frequencies[32], cosines[T * 2], sines[T * 2], x[HS] = {1, 2, 3, 4}, y[HS] = {1, 3, 2, 4};
    RopeShape s = rope_shape(1, T, 3, 1, HS, ROPE_INTERLEAVED), split = rope_shape(1, T, 3, 1, HS, ROPE_HALVES);
    rope_frequencies(frequencies, 10000.0, HS);
    rope_table_ref(cosines, sines, frequencies, T, HS);
    rope_forward_ref(x, cosines, sines, &s);
    rope_forward_ref(y, cosines, sines, &split);
    for (int i = 0; i < HS; i++) {
        check(t, fabsf(x[i] - want[i]) < 1e-6f, "(1,2,3,4) at 3: [%d] is %.9g", i, (double)x[i]);
        check(t, y[i % 2 * 2 + i / 2] == x[i], "halves: the pairs are those of neighbours, [%d]: %.9g", i,
              (double)y[i]);
    }
    rope_backward_ref(x, cosines, sines, &s);
    for (int i = 0; i < HS; i++) { check(t, fabsf(x[i] - (float)(i + 1)) < 1e-6f, "and back: %.9g", (double)x[i]); }
    rope_frequencies(frequencies, rope_scaled_base(10000.0, 8.0, 64), 64);
    const int at[] = {0, 1, 16, 31};
    const double expected[] = {1, 0.701242234, 3.41892079e-3, 1.66690179e-5};
    for (int i = 0; i < 4; i++) {
        double f = (double)frequencies[at[i]];
        check(t, fabs(f - expected[i]) < 2e-7 * expected[i], "alpha 8, pair %d: %.9g", at[i], f);
    }
}

// ---- YaRN: dev/ref/deepseek_v4.py gave these bits ----

static const struct {
    double base;
    int rotated;
    RopeYarn yarn;
    float want[32];
} yarns[] = {
    {160000.0, 64, {16.0f, 65536, 32.0f, 1.0f},  // DeepSeek V4 Flash: pairs 15 to 25 are in between
     {0x1p+0f, 0x1.601474p-1f, 0x1.e4383ep-2f, 0x1.4cfa02p-2f, 0x1.c9f25cp-3f, 0x1.3ae8eap-3f, 0x1.b11968p-4f,
      0x1.29d2c6p-4f, 0x1.99999ap-5f, 0x1.19a9f6p-5f, 0x1.836032p-6f, 0x1.0a619cp-6f, 0x1.6e5b7ep-7f, 0x1.f7db1p-8f,
      0x1.5a7abcp-8f, 0x1.dc846ep-9f, 0x1.28f5c2p-9f, 0x1.6e29cp-10f, 0x1.bd7b6cp-11f, 0x1.0a619cp-11f,
      0x1.37675ep-12f, 0x1.60b2fp-13f, 0x1.7d209ap-14f, 0x1.7d36bep-15f, 0x1.47ae18p-16f, 0x1.6887ap-18f,
      0x1.efd74cp-19f, 0x1.54f7dp-19f, 0x1.d4effep-20f, 0x1.4277b8p-20f, 0x1.bb7e6p-21f, 0x1.30f89ap-21f}},
    {160000.0, 8, {4.0f, 64, 32.0f, 1.0f}, {0x1p+0f, 0x1.99999ap-7f, 0x1.47ae14p-11f, 0x1.0624dep-15f}},
    {100.0, 6, {4.0f, 64, 8.0f, 1.0f}, {0x1p+0f, 0x1.13c482p-3f, 0x1.7c3d2ap-7f}},
    {10000.0, 16, {3.0f, 100, 7.5f, 0.5f},
     {0x1p+0f, 0x1.0dd902p-2f, 0x1.111112p-4f, 0x1.030dc6p-6f, 0x1.b4e81ap-9f, 0x1.1452f6p-10f, 0x1.5d867ep-12f,
      0x1.ba1e56p-14f}},
    {10000.0, 8, {7.0f, 100, 2.0f, 1.5f}, {0x1p+0f, 0x1.d41d42p-5f, 0x1.767dcep-10f, 0x1.2b97dap-13f}},
    {10000.0, 8, {3.0f, 6, 1.0f, 0.96875f}, {0x1p+0f, 0x1.111112p-5f, 0x1.b4e81ap-9f, 0x1.5d867ep-12f}},  // low is high
};

// numbers of the published model, then of a small one, both computed apart in double; where they lie
static const struct {
    int yarn, pair;
    double frequency;
} known_yarns[] = {
    {0, 0, 1.0}, {0, 1, 6.876560219e-01}, {0, 15, 3.635538584e-03}, {0, 16, 2.265625000e-03}, {0, 20, 2.969777783e-04},
    {0, 24, 1.953125000e-05}, {0, 25, 5.372312671e-06}, {0, 31, 5.680529037e-07}, {1, 0, 1.0}, {1, 1, 1.25e-2},
    {1, 2, 6.25e-4}, {1, 3, 3.125e-5},
};

static void test_yarn(Test* t) {
    float got[32];
    for (size_t k = 0; k < sizeof yarns / sizeof *yarns; k++) {
        rope_yarn_frequencies(got, yarns[k].base, yarns[k].rotated, &yarns[k].yarn);
        check_bits(t, "frequencies", got, yarns[k].want, (size_t)yarns[k].rotated / 2);
    }
    for (size_t k = 0; k < sizeof known_yarns / sizeof *known_yarns; k++) {
        const int yarn = known_yarns[k].yarn, pair = known_yarns[k].pair;
        rope_yarn_frequencies(got, yarns[yarn].base, yarns[yarn].rotated, &yarns[yarn].yarn);
        // a mixture of two frequencies, each of a few roundings
        check(t, fabs((double)got[pair] - known_yarns[k].frequency) < 4e-7 * known_yarns[k].frequency,
              "YaRN %d, pair %d: %.10g, expected %.10g", yarn, pair, (double)got[pair], known_yarns[k].frequency);
    }
    RopeYarn none = {1.0f, 65536, 32.0f, 1.0f};  // a factor of 1 slows nothing: f r + f (1 - r), three roundings
    float plain[32];
    rope_frequencies(plain, 160000.0, 64), rope_yarn_frequencies(got, 160000.0, 64, &none);
    for (int i = 0; i < 32; i++) { check(t, float_ulps(got[i], plain[i]) <= 2, "factor 1, pair %d", i); }
}

// a pair is as it was where its place is negative, and turned by the table's row 2 where the place is 2
static void test_places(Test* t) {
    enum { T = 3, HS = 2 };
    const float cosines[T] = {1, 0, -1}, sines[T] = {0, 1, 0}, want[] = {-2, 1, 1, 2, -1, -2, 1, 2};
    const int places[] = {1, -1, 2, 0};
    float x[4 * HS] = {1, 2, 1, 2, 1, 2, 1, 2};
    for (int pairs = 0; pairs < 2; pairs++) {
        Device dev = test_device(2);
        RopeShape s = rope_shape(2, 2, 0, 1, HS, pairs);
        check(t, s.places == NULL, "rope_shape: positions have the rows of their numbers");
        int* d_places = ints_to_device(places, 4, &dev);
        float *dx = to_device(x, 4 * HS, &dev), *c = to_device(cosines, T, &dev), *n = to_device(sines, T, &dev);
        float got[4 * HS];
        s.places = d_places;
        rope_forward(dx, c, n, &s, &dev);
        from_device(got, dx, 4 * HS, &dev);
        check_bits(t, "turned", got, want, 4 * HS);
        device_sync(&dev);
        device_drop(c), device_drop(n), device_drop(d_places);
        device_free(&dev);
    }
}

// two products that round to the same float: their difference is 0 unless one of them was fused with it
static void test_rounding(Test* t) {
    const float a = 1.0f + 0x1p-12f, z = 1.0f + 0x1p-11f;  // a * a rounds to z
    const float cosine[2] = {a, a}, sine[2] = {1.0f, 1.0f}, back[2] = {-1.0f, -1.0f};
    if (FAST_KERNELS) {
        skip(t, "fast builds for GPUs fuse");
        return;
    }
    for (int pairs = 0; pairs < 2; pairs++) {
        float forward[4] = {a, z, z, 0.0f}, backward[4] = {a, z, z, 0.0f};
        RopeShape s = rope_shape(1, 1, 0, 1, 4, pairs);
        rope_forward_ref(forward, cosine, sine, &s);
        rope_backward_ref(backward, cosine, back, &s);
        check(t, forward[0] == 0.0f && backward[0] == 0.0f, "found %a and %a, expected 0", (double)forward[0],
              (double)backward[0]);
    }
}

// product of a query at `at` and a key at `at` - 5
static double product_at(int at, const float* cosines, const float* sines, int pairs) {
    float q[8] = {1, -2, 3, 0.5f, -1, 2, 0.25f, 1}, k[8] = {2, 1, -1, 3, 0.5f, -0.5f, 1, 1};
    RopeShape s = rope_shape(1, at + 1, at, 1, 8, pairs);
    double sum = 0.0;
    rope_forward_ref(q, cosines, sines, &s);
    s.T = at - 4, s.t0 = at - 5;
    rope_forward_ref(k, cosines, sines, &s);
    for (int i = 0; i < 8; i++) { sum += (double)q[i] * (double)k[i]; }
    return sum;
}

static void test_relative(Test* t) {
    enum { T = 1000 };
    float frequencies[4], *cosines = filled_array(T * 4, NAN), *sines = filled_array(T * 4, NAN);
    rope_frequencies(frequencies, 10000.0, 8);
    rope_table_ref(cosines, sines, frequencies, T, 8);
    for (int pairs = 0; pairs < 2; pairs++) {
        double first = product_at(5, cosines, sines, pairs);
        for (int at = 6; at < T; at += 31) {  // terms below 6; angles below 1000 are within 2^-14
            double product = product_at(at, cosines, sines, pairs);
            check(t, fabs(product - first) < 8 * 12 * 0x1p-14, "at %d: %.9g, at 5: %.9g", at, product, first);
        }
    }
    free(cosines), free(sines);
}

// positions that come one by one, or in two calls, and queries and keys in one row: the bits of one call
static void test_generation(Test* t) {
    enum { B = 2, T = 7, HEADS = 3, HS = 10, n = B * T * HEADS * HS };
    for (int pairs = 0; pairs < 2; pairs++) {
        Device dev = test_device(2);
        float frequencies[HS / 2], *start = random_array(n, 2.0f, 3);
        float *want = copied_array(start, n), *got = copied_array(start, n);
        RopeTable table;
        rope_frequencies(frequencies, 10000.0, HS);
        rope_table_init(&table, frequencies, T, HS, &dev);
        RopeShape all = rope_shape(B, T, 0, HEADS, HS, pairs);
        float *whole = to_device(start, n, &dev), *steps = to_device(start, n, &dev);
        rope_forward(whole, table.cosines, table.sines, &all, &dev);
        for (int at = 0; at < T; at++) {
            RopeShape one = all;
            one.t0 = at, one.T = at + 1, one.heads = 2;
            rope_forward(steps + at * one.row, table.cosines, table.sines, &one, &dev);
            one.heads = 1;
            rope_forward(steps + at * one.row + 2 * one.head, table.cosines, table.sines, &one, &dev);
        }
        from_device(want, whole, n, &dev), from_device(got, steps, n, &dev);
        check_bits(t, pairs ? "halves" : "interleaved", got, want, n);
        check(t, memcmp(got, start, sizeof(float) * n) != 0, "nothing has turned");
        rope_table_free(&table);
        free(start), free(want), free(got);
        device_free(&dev);
    }
}

int main(int argc, char** argv) {
    const Op* ops[] = {&interleaved, &halves, &placed};
    const Promise promises[] = {
        {"powers", "base^(2i/HS) is the float that decimal arithmetic gives, for published bases", test_powers},
        {"middles", "a power in the middle between two floats rounds to the side where it lies", test_middles},
        {"angles", "cos and sin are those of decimal arithmetic, at positions up to a million", test_angles},
        {"table", "the table on the device has the plain loop's bits", test_table},
        {"known", "vector and frequencies of the specification; halves are the same pairs elsewhere", test_known},
        {"rounding", "both products round before they are added", test_rounding},
        {"relative", "the product of a turned query and key depends on their distance alone", test_relative},
        {"generation", "positions one by one, heads in two calls: the bits of one call", test_generation},
        {"yarn", "frequencies have the bits of the NumPy reference, and are what the specification gives", test_yarn},
        {"places", "a place says the row of the table; what has a negative one does not turn", test_places},
    };
    return op_main(argc, argv, ops, 3, promises, 10);
}
