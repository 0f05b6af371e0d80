/*
Which way up an image is: cameras store rows as the sensor has them and write beside them how the camera was held.
    orientation_of_exif   1..8 out of an Exif block (JPEG's APP1, PNG's eXIf); 0 where it does not say; 1 of another one
    orientation_of_xmp    the same out of an XMP text, which counts where Exif does not say
    orientation_is_turned   do rows become columns?
    orientation_apply     the image upright
An orientation says how the upright image is read from the stored one:
    1 as it is    2 mirrored left to right    3 turned by 180 degrees    4 mirrored top to bottom
    5 rows are columns    6 turned by 90 degrees clockwise    7 as 5, then by 180 degrees    8 turned the other way
An Exif block is a TIFF file without an image; what is read of it:
    offset  size  meaning
    0       4     "II*\0": numbers are little-endian, "MM\0*": big-endian
    4       4     offset of the first directory: a number of entries (2 bytes), then 12 bytes for each
    entry   2     tag, 0x0112 is the orientation
    +2      2     type: 3 has 2 bytes, 4 has 4; any other kind of number is read as well
    +4      4     how many values; the first one counts
    +8      4     the values themselves where they fit into 4 bytes, else their offset
Of entries with one tag the first counts. An entry without a value or of an unknown type is passed over, and so is one
whose values would make those outside of entries more than the whole block has. An entry whose values lie beyond the
block ends the directory. What is written beside an image is no reason to refuse it: a block that is no TIFF file leaves
the image as it is stored, whatever XMP says. Numbers beyond 1..8 mean 1.
Source: TIFF 6.0, CIPA DC-008 (Exif) 4.6.2; python-pillow/Pillow 13, ImageFileDirectory_v2.load for what is odd, and
        Image.getexif for the order of Exif and XMP
*/
#ifndef LLMC_ORIENTATION_H
#define LLMC_ORIENTATION_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// bytes of a TIFF file; reading beyond them clears `ok`
typedef struct {
    const unsigned char* bytes;
    size_t n_bytes;
    int is_big;  // the highest byte of a number stands first
    int ok;
} TiffBytes_;

static inline uint32_t tiff_number_(TiffBytes_* t, size_t at, int n_bytes) {
    uint32_t x = 0;
    t->ok = t->ok && at <= t->n_bytes && t->n_bytes - at >= (size_t)n_bytes;
    for (int i = 0; i < n_bytes && t->ok; i++) {
        x |= (uint32_t)t->bytes[at + i] << 8 * (t->is_big ? n_bytes - 1 - i : i);
    }
    return x;
}

// bytes of a value of this type; 0: a type that nobody knows
static inline size_t tiff_size_(uint32_t type) {
    static const unsigned char sizes[17] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8};
    return type < sizeof sizes ? sizes[type] : 0;
}

// one value; bytes and texts (1, 2, 7) are no number: 0. Negative ones come out too large, which says the same
static inline double tiff_value_(TiffBytes_* t, size_t at, uint32_t type) {
    const size_t size = tiff_size_(type);
    const uint32_t a = tiff_number_(t, at, size < 4 ? (int)size : 4), b = size < 8 ? 0 : tiff_number_(t, at + 4, 4);
    const uint64_t both = t->is_big ? (uint64_t)a << 32 | b : (uint64_t)b << 32 | a;
    float of_float;
    double of_double;
    memcpy(&of_float, &a, 4);
    memcpy(&of_double, &both, 8);
    if (type == 1 || type == 2 || type == 7) { return 0.0; }
    if (type == 5) { return b == 0 ? 0.0 : (double)a / b; }
    if (type == 10) { return b == 0 ? 0.0 : (double)(int32_t)a / (int32_t)b; }
    return type == 11 ? (double)of_float : type == 12 ? of_double : type == 16 ? (double)both : (double)a;
}

// What is odd in a directory is passed over as Pillow does, so that the same entries are left
static inline int orientation_of_directory_(TiffBytes_ t, size_t directory) {
    unsigned char seen[0x10000 / 8] = {0};  // a bit for each tag
    const size_t n = tiff_number_(&t, directory, 2);
    uint64_t n_outside = 0;  // bytes of values so far that did not fit into their entry
    for (size_t i = 0; i < n; i++) {
        const size_t entry = directory + 2 + 12 * i;
        const uint32_t tag = tiff_number_(&t, entry, 2), type = tiff_number_(&t, entry + 2, 2);
        const uint64_t n_bytes = (uint64_t)tiff_number_(&t, entry + 4, 4) * tiff_size_(type);
        const size_t place = tiff_number_(&t, entry + 8, 4), at = n_bytes > 4 ? place : entry + 8;
        if (!t.ok) { return 0; }
        if (n_bytes == 0 || (seen[tag / 8] >> tag % 8 & 1)) { continue; }
        n_outside += n_bytes > 4 ? n_bytes : 0;
        if (n_bytes > 4 && n_outside > t.n_bytes) { continue; }
        if (at > t.n_bytes || t.n_bytes - at < n_bytes) { return 0; }
        seen[tag / 8] |= (unsigned char)(1 << tag % 8);
        if (tag != 0x0112) { continue; }
        const double value = tiff_value_(&t, at, type);
        return value >= 1.0 && value <= 8.0 && value == (int)value ? (int)value : 1;
    }
    return 0;
}

static inline int orientation_of_exif(const unsigned char* bytes, size_t n_bytes) {
    for (int i = 0; i < 2 && n_bytes >= 6 && memcmp(bytes, "Exif\0\0", 6) == 0; i++) { bytes += 6, n_bytes -= 6; }
    TiffBytes_ t = {bytes, n_bytes, 0, 1};
    if (n_bytes == 0) { return 0; }
    if (n_bytes < 8) { return 1; }
    // Pillow takes a star on either side, and BigTIFF's plus where it does not see that it is one
    static const char heads[5][5] = {"II*\0", "II\0*", "MM\0*", "MM*\0", "MM\0+"};
    int kind = 0;
    while (kind < 5 && memcmp(bytes, heads[kind], 4) != 0) { kind++; }
    if (kind == 5) { return 1; }
    t.is_big = kind >= 2;
    return orientation_of_directory_(t, tiff_number_(&t, 4, 4));
}

// tiff:Orientation="6", an attribute, or <tiff:Orientation>6<, an element; the first one counts
static inline int orientation_of_xmp(const unsigned char* text, size_t n_bytes) {
    const size_t n_name = 16;
    for (size_t i = 0; i + n_name + 2 <= n_bytes; i++) {
        if (memcmp(text + i, "tiff:Orientation", n_name) != 0) { continue; }
        const size_t n_mark = text[i + n_name] == '>' ? 1 : 2, digit = i + n_name + n_mark;
        if (digit >= n_bytes || (n_mark == 2 && memcmp(text + i + n_name, "=\"", 2) != 0)) { continue; }
        if (text[digit] < '0' || text[digit] > '9') { continue; }
        return text[digit] >= '1' && text[digit] <= '8' ? text[digit] - '0' : 1;
    }
    return 0;
}

static inline int orientation_is_turned(int orientation) { return orientation >= 5; }

// out, upright, of inp (height, width, 3) as it is stored; out is (width, height, 3) where it is turned
static inline void orientation_apply(unsigned char* out, const unsigned char* inp, int height, int width,
                                     int orientation) {
    const int is_turned = orientation_is_turned(orientation);
    const int from_below = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
    const int from_right = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
    const int rows = is_turned ? width : height, columns = is_turned ? height : width;
    for (int y = 0; y < rows; y++) {
        for (int x = 0; x < columns; x++, out += 3) {
            const int row = is_turned ? x : y, column = is_turned ? y : x;
            const size_t r = (size_t)(from_below ? height - 1 - row : row);
            const size_t c = (size_t)(from_right ? width - 1 - column : column);
            memcpy(out, inp + 3 * (r * width + c), 3);
        }
    }
}
#endif  // LLMC_ORIENTATION_H
