// float8 of llmc/core/fp8.h against the format as it is written down, by a search through all its numbers: nothing of
// the arithmetic is shared. And scales, blocks, and what a matrix of them gives.
#include "llmc/core/stored.h"
#include "llmc/test/test.h"

// all numbers that are not negative, in order: the number of a byte is its place
static double number_of(int byte) {
    const int exponent = byte >> 3, mantissa = byte & 7;
    return exponent > 0 ? (8 + mantissa) * pow(2.0, exponent - 10) : mantissa * pow(2.0, -9);
}

static void test_widen(Test* t) {
    for (int byte = 0; byte < 256; byte++) {
        const float found = fp8_widen((uint8_t)byte);
        const double want = number_of(byte & 127) * (byte & 128 ? -1.0 : 1.0);
        if ((byte & 127) == 127) { check(t, isnan(found), "byte %02x is NaN", byte); }
        else { check(t, (double)found == want && !!signbit(found) == byte >> 7, "byte %02x is %g", byte, (double)found); }
    }
    check(t, fp8_widen(0x7e) == 448.0f && fp8_widen(0x01) == 0x1p-9f && fp8_widen(0x08) == 0x1p-6f, "the ends");
}

// the nearest of all numbers; of two as near the even byte; beyond the largest the largest
static int nearest_by_search(double x) {
    const double size = fabs(x);
    int best = 0;
    for (int byte = 1; byte < 127; byte++) {
        const double apart = fabs(number_of(byte) - size), before = fabs(number_of(best) - size);
        if (apart < before || (apart == before && byte % 2 == 0)) { best = byte; }
    }
    return best | (signbit(x) ? 128 : 0);
}

static void check_nearest(Test* t, float x) {
    const int found = fp8_nearest(x), want = nearest_by_search((double)x);
    check(t, found == want, "%a becomes %02x, expected %02x", (double)x, found, want);
}

static void test_nearest(Test* t) {
    for (int half = 0; half < 1 << 16; half++) {  // every bf16
        const float x = bf16_widen((uint16_t)half);
        if (isfinite(x)) { check_nearest(t, x); }
    }
    for (int byte = 0; byte < 126; byte++) {  // between two numbers, and on either side of it
        const float middle = (float)(0.5 * (number_of(byte) + number_of(byte + 1)));
        const float near[] = {middle, nextafterf(middle, 0.0f), nextafterf(middle, 1e9f)};
        for (int i = 0; i < 6; i++) { check_nearest(t, i % 2 ? -near[i / 2] : near[i / 2]); }
    }
    uint64_t state = 5;
    for (int i = 0; i < 200000; i++) {
        const float x = float_from_bits((uint32_t)(state = splitmix64(state, 1)));
        if (isfinite(x)) { check_nearest(t, x); }
    }
    check_nearest(t, INFINITY), check_nearest(t, -INFINITY), check_nearest(t, FLT_MAX);
    for (int byte = 0; byte < 256; byte++) {
        if ((byte & 127) < 127) { check(t, fp8_nearest(fp8_widen((uint8_t)byte)) == byte, "%02x stays", byte); }
    }
}

static void test_scale(Test* t) {
    const float largest[][2] = {{448.0f, 1.0f}, {nextafterf(448.0f, 1e9f), 2.0f}, {224.0f, 0.5f}, {1.0f, 0x1p-8f},
                                {nextafterf(1.75f, 0.0f), 0x1p-8f}, {1.75f, 0x1p-8f}, {nextafterf(1.75f, 2.0f), 0x1p-7f},
                                {0.0f, 0x1p-120f}, {1e-45f, 0x1p-120f}, {FP8_LARGEST_WEIGHT, 0x1p7f}};
    for (size_t i = 0; i < sizeof largest / sizeof *largest; i++) {
        const float found = fp8_scale(largest[i][0]);
        check(t, found == largest[i][1], "%a has the scale %a, expected %a", (double)largest[i][0], (double)found,
              (double)largest[i][1]);
    }
}

// rows of a matrix in two parts, whose blocks begin anew; every weight is a bf16, and near what it was
static void test_rows(Test* t) {
    enum { ROWS = 402, PART = 201, C = 150, BLOCKS = 2 };
    float *x = random_array(ROWS * C, 3.0f, 1), scales[4 * BLOCKS];
    uint8_t* bytes = (uint8_t*)new_array(ROWS * C, 1);
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < C; c++) { x[r * C + c] *= r < PART ? 1.0f : ldexpf(1.0f, c - 140); }
    }
    const int first[] = {0, 128, 201, 329, 402};
    for (int b = 0; b < 4; b++) {
        fp8_quantize_rows(bytes + first[b] * C, scales + b * BLOCKS, x + first[b] * C, first[b + 1] - first[b], C);
    }
    const StoredMatrix m = stored_matrix(bytes, STORED_FP8, ROWS, C, PART, scales);
    check(t, stored_scales(&m) == 8, "scales of two parts: found %zu", stored_scales(&m));
    float row[C];
    for (int r = 0; r < ROWS; r++) {
        stored_row(row, &m, r);
        for (int c = 0; c < C; c++) {
            const int b = r < 128 ? 0 : r < 201 ? 1 : r < 329 ? 2 : 3;
            const double scale = (double)scales[b * BLOCKS + c / 128], was = (double)x[r * C + c];
            const double found = (double)row[c], bound = fmax(fabs(was) / 16.0, scale / 1024.0);
            check(t, found == (double)stored_value(&m, r, c), "(%d, %d): row and value differ", r, c);
            check(t, fabs(found - was) <= bound, "(%d, %d): %g became %g", r, c, was, found);
            check(t, found == number_of(nearest_by_search(was / scale) & 127) * scale * (was < 0.0 ? -1.0 : 1.0),
                  "(%d, %d): %g is not the nearest of %g", r, c, found, was);
            check(t, bf16_widen(bf16_nearest(row[c])) == row[c], "(%d, %d): %a is no bf16", r, c, found);
        }
    }
    free(x), free(bytes);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"widen", "all 256 bytes", test_widen},
        {"nearest", "every bf16, all ties, random floats: the nearest of all numbers, ties to even, at most 448",
         test_nearest},
        {"scale", "the smallest power of two that a block needs", test_scale},
        {"rows", "short blocks, parts with blocks of their own: the nearest numbers, which bf16 holds", test_rows},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof *promises);
}
