// float4 of llmc/core/fp4.h and its scales against the formats as they are written down: nothing of the arithmetic is
// shared. Packing, groups, and what a matrix of them gives; and as blocks of fp8.
#include "llmc/core/stored.h"
#include "llmc/core/vec.h"
#include "llmc/test/test.h"

static const double sizes[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
static double number_of(int code) { return code & 8 ? -sizes[code & 7] : sizes[code & 7]; }
static double scale_of(int exponent) { return pow(2.0, exponent - 127); }

static void test_codes(Test* t) {
    for (int code = 0; code < 16; code++) {
        const float x = fp4_widen(code);
        check(t, (double)x == number_of(code) && (signbit(x) != 0) == (code >> 3 != 0), "code %d is %g", code, (double)x);
    }
    const uint8_t byte = 0xa3;  // deepseek_v4.md 5.2
    check(t, fp4_widen(fp4_code(&byte, 0)) == 1.5f && fp4_widen(fp4_code(&byte, 1)) == -1.0f, "0xa3 is 1.5, -1");
    for (int i = 0; i < 256; i++) {
        const uint8_t pair = (uint8_t)i;
        check(t, fp4_code(&pair, 0) == i % 16 && fp4_code(&pair, 1) == i / 16, "the halves of %02x", i);
    }
}

static void test_scales(Test* t) {
    for (int e = 0; e < 255; e++) { check(t, (double)e8m0_widen((uint8_t)e) == scale_of(e), "scale %d", e); }
    check(t, isnan(e8m0_widen(255)), "255 is NaN");
    check(t, e8m0_widen(127) == 1.0f && e8m0_widen(0) == 0x1p-127f && e8m0_widen(254) == 0x1p127f, "the ends");
}

// Every code under every scale: as a float, which is the number itself or, beyond floats, infinite; and in vectors
static void test_weights(Test* t) {
    uint8_t bytes[16], exponent;
    const StoredMatrix m = stored_matrix(bytes, STORED_FP4, 1, 32, 1, &exponent);
    float row[32], lanes[VLANES];
    for (int i = 0; i < 16; i++) { bytes[i] = (uint8_t)(i | (15 - i) << 4); }
    for (int e = 0; e < 256; e++) {
        exponent = (uint8_t)e;
        stored_row(row, &m, 0);
        for (int c = 0; c < 32; c++) {
            const int code = c % 2 ? 15 - c / 2 : c / 2;
            const float want = e == 255 ? NAN : (float)(number_of(code) * scale_of(e));
            const int same = e == 255 ? isnan(row[c]) : float_bits(row[c]) == float_bits(want);
            check(t, same, "code %d, scale %d: %a, expected %a", code, e, (double)row[c], (double)want);
            check(t, float_bits(stored_value(&m, 0, c)) == float_bits(row[c]), "row and value differ");
            const int fits = e > FP4_LARGEST_SCALE || bf16_widen(bf16_nearest(row[c])) == row[c];
            check(t, fits && (e > FP4_LARGEST_SCALE || isfinite(row[c])), "%a is no bf16", (double)row[c]);
        }
        const vfloat words = (vfloat)((vuint){0} + (uint32_t)e * 0x01010101u);
        for (int i = 0; i < 4 && e < 255; i++) {
            v_store(lanes, v_part_e8m0(words, i));
            check(t, lanes[VLANES - 1] == e8m0_widen(exponent), "scale %d in vectors is %a", e, (double)lanes[0]);
        }
    }
    for (int first = 0; first < 32; first += VLANES) {
        v_store(lanes, v_load_fp4(bytes + first / 2));
        for (int i = 0; i < VLANES; i++) {
            const float want = fp4_widen(fp4_code(bytes, first + i));
            check(t, float_bits(lanes[i]) == float_bits(want), "lane %d is %g", i, (double)lanes[i]);
        }
    }
    for (int i = 0; i < 8; i++) {
        v_store(lanes, v_part_fp4((vfloat)((vuint){0} + 0xfb62d940u), i));
        check(t, float_bits(lanes[1]) == float_bits(fp4_widen((int)(0xfb62d940u >> 4 * i & 15))), "part %d", i);
    }
}

// the nearest of all numbers; of two as near the even code; beyond the largest the largest
static int nearest_by_search(double x) {
    const double size = fmin(fabs(x), 6.0);
    int best = 0;
    for (int code = 1; code < 8; code++) {
        const double apart = fabs(sizes[code] - size), before = fabs(sizes[best] - size);
        if (apart < before || (apart == before && code % 2 == 0)) { best = code; }
    }
    return best | (signbit(x) ? 8 : 0);
}

static void check_nearest(Test* t, float x) {
    const int found = fp4_nearest(x), want = nearest_by_search((double)x);
    check(t, found == want, "%a becomes %d, expected %d", (double)x, found, want);
}

static void test_nearest(Test* t) {
    for (int half = 0; half < 1 << 16; half++) {  // every bf16
        const float x = bf16_widen((uint16_t)half);
        if (isfinite(x)) { check_nearest(t, x); }
    }
    for (int code = 0; code < 7; code++) {  // between two numbers, and on either side of it
        const float middle = (float)(0.5 * (sizes[code] + sizes[code + 1]));
        const float near[] = {middle, nextafterf(middle, 0.0f), nextafterf(middle, 1e9f)};
        for (int i = 0; i < 6; i++) { check_nearest(t, i % 2 ? -near[i / 2] : near[i / 2]); }
    }
    check_nearest(t, FLT_MAX), check_nearest(t, -0.0f), check_nearest(t, 1e-45f);
    check(t, fp4_nearest(INFINITY) == 7 && fp4_nearest(-INFINITY) == 15, "infinity is 6");
    for (int code = 0; code < 16; code++) { check(t, fp4_nearest(fp4_widen(code)) == code, "%d stays", code); }
}

static void test_groups(Test* t) {
    const float largest[][2] = {{6.0f, 0}, {nextafterf(6.0f, 9.0f), 1}, {3.0f, -1}, {nextafterf(3.0f, 9.0f), 0},
                                {1.0f, -2}, {0.0f, -126}, {1e-45f, -126}, {6 * 0x1p-126f, -126},
                                {nextafterf(6 * 0x1p-126f, 1.0f), -125}, {6 * 0x1p125f, 125}, {FLT_MAX, 125}};
    for (size_t i = 0; i < sizeof largest / sizeof *largest; i++) {
        const int found = fp4_scale(largest[i][0]) - 127;
        check(t, found == (int)largest[i][1], "%a has the scale 2^%d, expected 2^%g", (double)largest[i][0], found,
              (double)largest[i][1]);
    }
    enum { C = 96 };
    float *x = random_array(C, 3.0f, 1), row[C];
    uint8_t bytes[C / 2], exponents[C / 32];
    for (int c = 32; c < C; c++) { x[c] *= ldexpf(1.0f, c < 64 ? -40 : c - 80); }
    fp4_quantize_row(bytes, exponents, x, C);
    const StoredMatrix m = stored_matrix(bytes, STORED_FP4, 1, C, 1, exponents);
    stored_row(row, &m, 0);
    for (int c = 0; c < C; c++) {
        const double scale = scale_of(exponents[c / 32]), want = number_of(nearest_by_search((double)x[c] / scale)) * scale;
        check(t, (double)row[c] == want, "column %d: %g became %g, expected %g", c, (double)x[c], (double)row[c], want);
    }
    float again[C];
    uint8_t bytes_again[C / 2], exponents_again[C / 32];
    fp4_quantize_row(bytes_again, exponents_again, row, C);  // a scale may become smaller, no number another
    const StoredMatrix second = stored_matrix(bytes_again, STORED_FP4, 1, C, 1, exponents_again);
    stored_row(again, &second, 0);
    check_bits(t, "quantized again", again, row, C);
    free(x);
}

// a matrix of experts: where the next one begins
static void test_matrix(Test* t) {
    static const uint8_t bytes[2 * 64 * 16] = {0}, exponents[2 * 64] = {0};
    const StoredMatrix first = {bytes, STORED_FP4, 64, 32, 32, exponents}, next = stored_next(first);
    check(t, next.data == bytes + 64 * 16 && next.scales == exponents + 64, "the next expert");
    check(t, stored_row_exponents(&next, 63) == exponents + 127, "its last row");
    check(t, stored_bytes(STORED_FP4, 6) == 3 && stored_bytes(STORED_F32, 6) == 24, "bytes");
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"codes", "all 16; the lower half of a byte is the even column", test_codes},
        {"scales", "all 256 bytes of e8m0", test_scales},
        {"weights", "all codes under all scales, one by one and in vectors; bf16 holds them", test_weights},
        {"nearest", "every bf16 and all ties: the nearest of all numbers, ties to even, at most 6", test_nearest},
        {"groups", "the smallest power of two that a group needs, the nearest numbers, which stay when done again",
         test_groups},
        {"matrix", "an expert after the other", test_matrix},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof *promises);
}
