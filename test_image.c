/*
Promises of llmc/files/image.h, llmc/ops/image_resize.h and llmc/models/image_processor.h: every kind of PNG and JPEG
becomes the RGB that it stands for, upright; what is broken is refused with one line, wherever it is cut; bytes of
resized images are Pillow's; sizes, the order of patches and their values are transformers'. dev/ref/check_images.py
compares with both at random.
    cc -O2 test_image.c -o build/test_image -ljansson -lxxhash -lpng -ljpeg -lz -lm && build/test_image
*/
#include "llmc/files/image.h"
#include "llmc/models/image_patches.h"
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"

// ---- files in memory, in heap blocks of exactly their size ----

typedef struct {
    unsigned char* bytes;
    size_t n_bytes;
} Bytes;

static unsigned char* random_bytes(size_t n, uint64_t seed) {
    unsigned char* bytes = (unsigned char*)new_array(n, 1);
    uint64_t s = seeded_stream(seed);
    for (size_t i = 0; i < n; i++) { bytes[i] = (unsigned char)(xorshift_u32(&s) >> 24); }
    return bytes;
}

// `piece` put into `b` before byte `at`; takes b
static Bytes inserted(Bytes b, size_t at, const void* piece, size_t n_piece) {
    Bytes out = {(unsigned char*)new_array(b.n_bytes + n_piece, 1), b.n_bytes + n_piece};
    memcpy(out.bytes, b.bytes, at);
    memcpy(out.bytes + at, piece, n_piece);
    memcpy(out.bytes + at + n_piece, b.bytes + at, b.n_bytes - at);
    free(b.bytes);
    return out;
}

static void put_big_endian(unsigned char* out, size_t x, int n_bytes) {
    for (int i = 0; i < n_bytes; i++) { out[i] = (unsigned char)(x >> 8 * (n_bytes - 1 - i)); }
}

// a PNG with a chunk more: before the pixels, or behind them
enum { BEFORE = 33, BEHIND = -12 };
static Bytes with_chunk(Bytes png, int at, const char* type, const void* data, size_t n) {
    unsigned char* chunk = (unsigned char*)new_array(n + 12, 1);
    put_big_endian(chunk, n, 4);
    memcpy(chunk + 4, type, 4);
    memcpy(chunk + 8, data, n);
    put_big_endian(chunk + 8 + n, crc32(0, chunk + 4, (uInt)n + 4), 4);
    png = inserted(png, at > 0 ? (size_t)at : png.n_bytes + at, chunk, n + 12);
    free(chunk);
    return png;
}

static Bytes with_marker(Bytes jpeg, const void* data, size_t n) {
    unsigned char* marker = (unsigned char*)new_array(n + 4, 1);
    marker[0] = 0xff, marker[1] = 0xe1;
    put_big_endian(marker + 2, n + 2, 2);
    memcpy(marker + 4, data, n);
    jpeg = inserted(jpeg, 2, marker, n + 4);
    free(marker);
    return jpeg;
}

// ---- PNG and JPEG, written ----

enum { PALETTE_COLORS = 3 };  // so that indices of 2 bits and more go beyond it
static const png_color palette[PALETTE_COLORS] = {{10, 20, 30}, {255, 0, 128}, {7, 200, 90}};

static int png_channels(int kind) {
    return kind == PNG_COLOR_TYPE_RGB ? 3 : kind == PNG_COLOR_TYPE_RGB_ALPHA ? 4
         : kind == PNG_COLOR_TYPE_GRAY_ALPHA ? 2 : 1;
}

static size_t png_row_bytes(int kind, int bits, int width) {
    return ((size_t)png_channels(kind) * bits * width + 7) / 8;
}

// the samples lie as in the file: the first in the highest bits, 16 bits with the high byte first
static Bytes png_file(const unsigned char* rows, int height, int width, int kind, int bits, int interlace) {
    char* bytes = NULL;
    size_t n_bytes = 0;
    FILE* file = open_memstream(&bytes, &n_bytes);
    png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, NULL, NULL, NULL);
    png_infop info = png_create_info_struct(png);
    png_init_io(png, file);
    png_set_IHDR(png, info, (png_uint_32)width, (png_uint_32)height, bits, kind, interlace,
                 PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    if (kind == PNG_COLOR_TYPE_PALETTE) { png_set_PLTE(png, info, palette, bits == 1 ? 2 : PALETTE_COLORS); }
    png_set_check_for_invalid_index(png, -1);
    png_write_info(png, info);
    for (int pass = 0, n = png_set_interlace_handling(png); pass < n; pass++) {
        for (int y = 0; y < height; y++) { png_write_row(png, rows + png_row_bytes(kind, bits, width) * y); }
    }
    png_write_end(png, NULL);
    png_destroy_write_struct(&png, &info);
    fclose(file);
    Bytes b = {heap_copy(bytes, n_bytes), n_bytes};
    free(bytes);
    return b;
}

static Bytes png_of_rgb(const unsigned char* rgb, int height, int width) {
    return png_file(rgb, height, width, PNG_COLOR_TYPE_RGB, 8, PNG_INTERLACE_NONE);
}

typedef struct {
    J_COLOR_SPACE space, stored;  // of the pixels, of the file
    int channels, progressive, restart;
    int scans;                    // > 0: a scan of its own for each of so many coefficients
} JpegKind;

static Bytes jpeg_file(const unsigned char* pixels, int height, int width, JpegKind kind) {
    struct jpeg_compress_struct jpeg;
    struct jpeg_error_mgr errors;
    jpeg_scan_info scans[64 * 3 + 1];
    unsigned char* bytes = NULL;
    unsigned long n_bytes = 0;
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_compress(&jpeg);
    jpeg_mem_dest(&jpeg, &bytes, &n_bytes);
    jpeg.image_width = (JDIMENSION)width, jpeg.image_height = (JDIMENSION)height;
    jpeg.input_components = kind.channels, jpeg.in_color_space = kind.space;
    jpeg_set_defaults(&jpeg);
    jpeg_set_colorspace(&jpeg, kind.stored);
    jpeg_set_quality(&jpeg, 100, TRUE);
    jpeg.restart_interval = (unsigned)kind.restart;
    if (kind.progressive) { jpeg_simple_progression(&jpeg); }
    if (kind.scans) {
        memset(scans, 0, sizeof scans);
        scans[0].comps_in_scan = kind.channels;
        for (int c = 0; c < kind.channels; c++) { scans[0].component_index[c] = c; }
        for (int i = 1; i < kind.scans; i++) {
            scans[i].comps_in_scan = 1;
            scans[i].component_index[0] = (i - 1) / 63;
            scans[i].Ss = scans[i].Se = 1 + (i - 1) % 63;
        }
        jpeg.scan_info = scans, jpeg.num_scans = kind.scans;
    }
    jpeg_start_compress(&jpeg, TRUE);
    while (jpeg.next_scanline < jpeg.image_height) {
        JSAMPROW row = (unsigned char*)pixels + (size_t)kind.channels * width * jpeg.next_scanline;
        jpeg_write_scanlines(&jpeg, &row, 1);
    }
    jpeg_finish_compress(&jpeg);
    jpeg_destroy_compress(&jpeg);
    Bytes b = {heap_copy(bytes, n_bytes), n_bytes};
    free(bytes);
    return b;
}

static const JpegKind JPEG_GREY = {JCS_GRAYSCALE, JCS_GRAYSCALE, 1}, JPEG_YCBCR = {JCS_RGB, JCS_YCbCr, 3};
static const JpegKind JPEG_PROGRESSIVE = {JCS_RGB, JCS_YCbCr, 3, 1};

// an image that must be accepted; takes the bytes
static Image accepted(Test* t, const char* what, Bytes b) {
    Image image;
    ErrorText error = {""};
    check(t, image_parse(&image, b.bytes, b.n_bytes, &error), "%s: refused: %s", what, error.text);
    free(b.bytes);
    return image;
}

static void check_pixels(Test* t, const char* what, const Image* image, const unsigned char* rgb, int height, int width,
                         int tolerance) {
    if (!check(t, image->height == height && image->width == width, "%s: expected %d x %d, found %d x %d", what, height,
               width, image->height, image->width)) {
        return;
    }
    for (int i = 0; i < 3 * height * width; i++) {
        if (!check(t, abs(image->rgb[i] - rgb[i]) <= tolerance, "%s: byte %d: expected %d, found %d", what, i, rgb[i],
                   image->rgb[i])) {
            return;
        }
    }
}

// one line with `text`, which says what was expected and what was found; takes the bytes
static void check_refused(Test* t, const char* what, Bytes b, const char* text) {
    Image image;
    ErrorText error = {""};
    const int ok = image_parse(&image, b.bytes, b.n_bytes, &error);
    const int says_both = strncmp(error.text, "expected ", 9) == 0 && strstr(error.text, ", found ");
    check(t, !ok && !image.rgb && says_both && strstr(error.text, text) && !strchr(error.text, '\n'),
          "%s: expected \"%s\", found %s", what, text, ok ? "an image" : error.text);
    image_free(&image);
    free(b.bytes);
}

// ---- PNG ----

// sample i of a row
static int sample_of(const unsigned char* row, int bits, int i) {
    if (bits == 16) { return row[2 * i] << 8 | row[2 * i + 1]; }
    return row[i * bits / 8] >> (8 - bits - i * bits % 8) & ((1 << bits) - 1);
}

static void expected_of_png(unsigned char* rgb, const unsigned char* rows, int height, int width, int kind, int bits) {
    const int channels = png_channels(kind);
    for (int i = 0; i < height * width; i++, rgb += 3) {
        const unsigned char* row = rows + png_row_bytes(kind, bits, width) * (i / width);
        for (int c = 0; c < 3; c++) {
            const int s = sample_of(row, bits, i % width * channels + (channels >= 3 ? c : 0));
            rgb[c] = (unsigned char)(bits == 16 ? s >> 8 : s * 255 / ((1 << bits) - 1));
            if (kind != PNG_COLOR_TYPE_PALETTE) { continue; }
            const png_color color = s < PALETTE_COLORS ? palette[s] : (png_color){0, 0, 0};
            rgb[c] = c == 0 ? color.red : c == 1 ? color.green : color.blue;
        }
    }
}

static void test_png_kinds(Test* t) {
    static const int kinds[][2] = {
        {PNG_COLOR_TYPE_GRAY, 1}, {PNG_COLOR_TYPE_GRAY, 2}, {PNG_COLOR_TYPE_GRAY, 4}, {PNG_COLOR_TYPE_GRAY, 8},
        {PNG_COLOR_TYPE_PALETTE, 1}, {PNG_COLOR_TYPE_PALETTE, 2}, {PNG_COLOR_TYPE_PALETTE, 4},
        {PNG_COLOR_TYPE_PALETTE, 8}, {PNG_COLOR_TYPE_RGB, 8}, {PNG_COLOR_TYPE_RGB, 16}, {PNG_COLOR_TYPE_GRAY_ALPHA, 8},
        {PNG_COLOR_TYPE_GRAY_ALPHA, 16}, {PNG_COLOR_TYPE_RGB_ALPHA, 8}, {PNG_COLOR_TYPE_RGB_ALPHA, 16}};
    static const int sizes[][2] = {{1, 1}, {5, 7}, {33, 13}};
    static const unsigned char opaque[6] = {0, 1, 0, 2, 0, 3}, gamma[4] = {0, 1, 0, 0};
    for (int i = 0; i < 14 * 3 * 2 * 2; i++) {
        const int kind = kinds[i % 14][0], bits = kinds[i % 14][1], interlace = i / 14 % 2, more = i / 28 % 2;
        const int height = sizes[i / 56][0], width = sizes[i / 56][1];
        unsigned char *rows = random_bytes(png_row_bytes(kind, bits, width) * height, (uint64_t)i), rgb[3 * 33 * 13];
        char what[80];
        snprintf(what, sizeof what, "kind %d, %d bits, %d x %d, interlace %d", kind, bits, height, width, interlace);
        Bytes png = png_file(rows, height, width, kind, bits, interlace);
        if (more) { png = with_chunk(png, BEFORE, "gAMA", gamma, 4); }
        // behind the palette, which is the first chunk
        const int n_before = (more ? 16 : 0) + 12 + 3 * (bits == 1 ? 2 : 3);
        const int place = kind == PNG_COLOR_TYPE_PALETTE ? BEFORE + n_before : BEFORE;
        const int n_opaque = kind == PNG_COLOR_TYPE_RGB ? 6 : 2;
        if (more && kind < PNG_COLOR_MASK_ALPHA) { png = with_chunk(png, place, "tRNS", opaque, (size_t)n_opaque); }
        Image image = accepted(t, what, png);
        expected_of_png(rgb, rows, height, width, kind, bits);
        check_pixels(t, what, &image, rgb, height, width, 0);
        image_free(&image);
        free(rows);
    }
}

// ---- JPEG ----

// an image of one colour, whose only coefficients are exact where no colours are converted
static void check_flat(Test* t, const char* what, JpegKind kind, const unsigned char* color, int r, int g, int b,
                       int tolerance) {
    unsigned char pixels[17 * 11 * 4], rgb[17 * 11 * 3];
    for (int i = 0; i < 17 * 11; i++) {
        memcpy(pixels + i * kind.channels, color, (size_t)kind.channels);
        rgb[3 * i] = (unsigned char)r, rgb[3 * i + 1] = (unsigned char)g, rgb[3 * i + 2] = (unsigned char)b;
    }
    Image image = accepted(t, what, jpeg_file(pixels, 17, 11, kind));
    check_pixels(t, what, &image, rgb, 17, 11, tolerance);
    image_free(&image);
}

static void test_jpeg_colors(Test* t) {
    const JpegKind rgb = {JCS_RGB, JCS_RGB, 3}, cmyk = {JCS_CMYK, JCS_CMYK, 4}, ycck = {JCS_CMYK, JCS_YCCK, 4};
    const unsigned char grey[1] = {77}, color[3] = {200, 100, 50}, inks[4] = {250, 128, 3, 100};
    check_flat(t, "grey", JPEG_GREY, grey, 77, 77, 77, 0);
    check_flat(t, "RGB", rgb, color, 200, 100, 50, 0);
    check_flat(t, "YCbCr", JPEG_YCBCR, color, 200, 100, 50, 2);
    check_flat(t, "CMYK", cmyk, inks, 98, 50, 1, 0);  // 250 * 100 / 255, 128 * 100 / 255, 3 * 100 / 255
    check_flat(t, "YCCK", ycck, inks, 98, 50, 1, 2);
}

static void test_jpeg_ways(Test* t) {
    unsigned char* pixels = random_bytes(3 * 37 * 29, 5);
    const JpegKind ways[] = {JPEG_PROGRESSIVE, {JCS_RGB, JCS_YCbCr, 3, 0, 2}, {JCS_RGB, JCS_YCbCr, 3, 0, 0, 64}};
    Image plain = accepted(t, "baseline", jpeg_file(pixels, 37, 29, JPEG_YCBCR));
    for (int i = 0; i < 2; i++) {
        Image other = accepted(t, "another way", jpeg_file(pixels, 37, 29, ways[i]));
        check_pixels(t, i ? "restart markers" : "progressive", &other, plain.rgb, 37, 29, 0);
        image_free(&other);
    }
    Image many = accepted(t, "64 scans", jpeg_file(pixels, 37, 29, ways[2]));
    image_free(&many);
    image_free(&plain);
    free(pixels);
}

// ---- orientation ----

// a TIFF block that says it, in 26 bytes
static void exif_block(unsigned char out[26], int orientation, int is_big) {
    static const unsigned char little[26] = {'I', 'I', '*', 0, 8, 0, 0, 0, 1, 0, 0x12, 1, 3, 0, 1, 0, 0, 0};
    static const unsigned char big[26] = {'M', 'M', 0, '*', 0, 0, 0, 8, 0, 1, 1, 0x12, 0, 3, 0, 0, 0, 1};
    memcpy(out, is_big ? big : little, 26);
    out[is_big ? 19 : 18] = (unsigned char)orientation;
}

// two frames, the second of which is all white; behind it an Exif block that says 8. Says that there are n_frames
static Bytes animated_png(const unsigned char rgb[18], int n_frames) {
    const unsigned char control[8] = {0, 0, 0, (unsigned char)n_frames};
    unsigned char frame[26] = {0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2}, white[2 * (1 + 9)], data[100] = {0, 0, 0, 2};
    unsigned char block[26];
    uLongf n_data = sizeof data - 4;
    memset(white, 255, sizeof white);
    white[0] = white[10] = 0;  // the filter of a row
    compress(data + 4, &n_data, white, sizeof white);
    Bytes png = with_chunk(png_of_rgb(rgb, 2, 3), BEFORE, "fcTL", frame, 26);
    png = with_chunk(png, BEFORE, "acTL", control, 8);
    frame[3] = 1;
    png = with_chunk(png, BEHIND, "fcTL", frame, 26);
    png = with_chunk(png, BEHIND, "fdAT", data, n_data + 4);
    exif_block(block, 8, 0);
    return with_chunk(png, BEHIND, "eXIf", block, 26);
}

static void test_png_animated(Test* t) {
    unsigned char* rgb = random_bytes(18, 3);
    Image two = accepted(t, "two frames", animated_png(rgb, 2)), one = accepted(t, "one frame", animated_png(rgb, 1));
    check_pixels(t, "two frames", &two, rgb, 2, 3, 0);
    check(t, one.height == 3 && one.width == 2, "one frame: expected 3 x 2, found %d x %d", one.height, one.width);
    image_free(&two), image_free(&one);
    free(rgb);
}

// rows of "abc" and "def", upright; from each letter on a block of so many pixels
static const char* const upright[9] = {"abc/def", "abc/def", "cba/fed", "fed/cba", "def/abc", "ad/be/cf", "da/eb/fc",
                                       "fc/eb/da", "cf/be/ad"};

static void check_upright(Test* t, const char* what, const Image* image, int orientation, int block) {
    const char* letter = upright[orientation];
    const int columns = orientation >= 5 ? 2 : 3;
    check(t, image->width == columns * block && image->height == (5 - columns) * block, "%s %d: %d x %d", what,
          orientation, image->height, image->width);
    for (int y = 0; y < 5 - columns; y++, letter++) {
        for (int x = 0; x < columns; x++, letter++) {
            const int found = image->rgb[3 * ((y * block + block / 2) * image->width + x * block + block / 2)];
            check(t, found == *letter, "%s %d: at row %d, column %d expected %c, found %c", what, orientation, y, x,
                  *letter, found);
        }
    }
}

static Bytes letters_png(void) {
    unsigned char rgb[18];
    for (int i = 0; i < 18; i++) { rgb[i] = (unsigned char)("abcdef"[i / 3]); }
    return png_of_rgb(rgb, 2, 3);
}

static Bytes letters_jpeg(void) {
    unsigned char pixels[16 * 24];
    for (int i = 0; i < 16 * 24; i++) { pixels[i] = (unsigned char)("abcdef"[i / 24 / 8 * 3 + i % 24 / 8]); }
    return jpeg_file(pixels, 16, 24, JPEG_GREY);
}

static Bytes with_profile(Bytes png, const unsigned char block[26], int is_packed) {
    char text[200] = "Raw profile type exif";
    unsigned char chunk[400];
    size_t n = strlen(text) + 1;
    memcpy(chunk, text, n);
    int at = snprintf(text, sizeof text, "\nexif\n      32\n457869660000");
    for (int i = 0; i < 26; i++) {
        at += snprintf(text + at, sizeof text - at, "%02x%s", block[i], i == 20 ? "\n" : "");
    }
    uLongf n_text = sizeof chunk - n - 1;
    chunk[n] = 0;
    if (is_packed) { compress(chunk + n + 1, &n_text, (const unsigned char*)text, (uLong)at); }
    else { memcpy(chunk + n, text, (size_t)at); }
    return with_chunk(png, BEFORE, is_packed ? "zTXt" : "tEXt", chunk, is_packed ? n + 1 + n_text : n + at);
}

// Exif in two blocks, which count as one, beside an XMP that says something else
static Bytes letters_split(const unsigned char block[26]) {
    static const char xmp[] = "http://ns.adobe.com/xap/1.0/\0tiff:Orientation=\"5\"";
    unsigned char piece[32] = "Exif\0";
    const size_t cut = 10;
    Bytes jpeg = with_marker(letters_jpeg(), xmp, sizeof xmp - 1);
    memcpy(piece + 6, block + cut, 26 - cut);
    jpeg = with_marker(jpeg, piece, 6 + 26 - cut);  // before what is there
    memcpy(piece + 6, block, cut);
    return with_marker(jpeg, piece, 6 + cut);
}

static void test_orientation(Test* t) {
    for (int o = 1; o <= 8; o++) {
        unsigned char block[26], marker[32] = "Exif\0", xmp[100];
        char key[] = "XML:com.adobe.xmp\0\0\0\0";
        exif_block(block, o, o % 2);
        memcpy(marker + 6, block, 26);
        memcpy(xmp, key, 22);
        const char* form = o % 2 ? "<a tiff:Orientation=\"%d\"/>" : "<tiff:Orientation>%d</";
        const int n_xmp = 22 + snprintf((char*)xmp + 22, sizeof xmp - 22, form, o);
        Image images[] = {accepted(t, "eXIf", with_chunk(letters_png(), BEFORE, "eXIf", block, 26)),
                          accepted(t, "eXIf behind", with_chunk(letters_png(), BEHIND, "eXIf", block, 26)),
                          accepted(t, "tEXt", with_profile(letters_png(), block, 0)),
                          accepted(t, "zTXt", with_profile(letters_png(), block, 1)),
                          accepted(t, "XMP", with_chunk(letters_png(), BEFORE, "iTXt", xmp, (size_t)n_xmp)),
                          accepted(t, "APP1", with_marker(letters_jpeg(), marker, 32)),
                          accepted(t, "APP1 in two", letters_split(block))};
        for (int i = 0; i < 7; i++) {
            if (images[i].rgb) { check_upright(t, "orientation", &images[i], o, i < 5 ? 1 : 8); }
            image_free(&images[i]);
        }
    }
}

// an entry of a directory: tag, type, how many, and 4 bytes
static void put_entry(unsigned char* out, int tag, int type, size_t n, size_t place) {
    put_big_endian(out, (size_t)tag, 2);
    put_big_endian(out + 2, (size_t)type, 2);
    put_big_endian(out + 4, n, 4);
    put_big_endian(out + 8, place, 4);
}

// what stands before the orientation 6, in a block of 50 bytes, and the types that it may have itself
static void test_orientation_odd(Test* t) {
    enum { N = 50, OUTSIDE = 8 + 2 + 2 * 12 + 4 };  // 12 bytes behind the directory: 6 / 1 as a rational, then zeros
    static const struct { const char* what; int type; size_t n, place; int want; } befores[] = {
        {"a text", 2, 4, 0, 6}, {"no value", 2, 0, 0, 6}, {"an unknown type", 14, 1, 0, 6},
        {"values outside", 2, 12, 38, 6}, {"values beyond the end", 2, 13, 38, 0},
        {"an offset beyond the end", 2, 5, 50, 0},
        {"more values than the block has", 2, 51, 38, 6}, {"2^32 - 1 doubles", 12, 0xffffffff, 38, 6}};
    static const struct { int type; size_t n, place; int want; } orientations[] = {
        {3, 1, 6 << 16, 6}, {4, 1, 6, 6}, {5, 1, OUTSIDE, 6}, {10, 1, OUTSIDE, 6}, {6, 1, 6 << 24, 6},
        {11, 1, 0x40c00000, 6}, {8, 2, 6 << 16 | 3, 6}, {9, 1, 0xfffffffa, 1}, {1, 1, 6 << 24, 1}, {2, 2, '6' << 24, 1},
        {7, 1, 6 << 24, 1},
        {5, 1, OUTSIDE + 4, 1}, {11, 1, 0x40c00001, 1}, {16, 1, OUTSIDE, 1}, {12, 1, OUTSIDE, 1}, {13, 1, 6, 6}};
    for (size_t i = 0; i < 8 + 16; i++) {
        unsigned char block[N] = "MM\0*\0\0\0\x08\0\x02";
        block[OUTSIDE + 3] = 6, block[OUTSIDE + 7] = 1;
        put_entry(block + 10, 0x010f, 2, 4, 0);
        put_entry(block + 22, 0x0112, 3, 1, 6 << 16);
        const size_t k = i - 8;
        if (i < 8) { put_entry(block + 10, 0x010f, befores[i].type, befores[i].n, befores[i].place); }
        else { put_entry(block + 22, 0x0112, orientations[k].type, orientations[k].n, orientations[k].place); }
        unsigned char* exact = heap_copy(block, N);
        const int found = orientation_of_exif(exact, N), want = i < 8 ? befores[i].want : orientations[k].want;
        check(t, found == want, "%s, row %zu: expected %d, found %d", i < 8 ? befores[i].what : "orientation", i, want,
              found);
        free(exact);
    }
}

static void test_orientation_broken(Test* t) {
    for (int i = 0; i < 8 * 26 + 26; i++) {  // bits that are turned, and blocks that are cut short
        unsigned char block[26];
        exif_block(block, 6, i % 2);
        const size_t n = i < 8 * 26 ? 26 : (size_t)i - 8 * 26;
        if (i < 8 * 26) { block[i / 8] ^= (unsigned char)(1 << i % 8); }
        unsigned char* exact = heap_copy(block, n);
        const int orientation = orientation_of_exif(exact, n);
        check(t, orientation >= 0 && orientation <= 8, "bit %d: found %d", i, orientation);
        free(exact);
    }
    unsigned char zero[26], nine[26];
    exif_block(zero, 0, 0);
    exif_block(nine, 9, 1);
    check(t, orientation_of_exif(zero, 26) == 1 && orientation_of_exif(nine, 26) == 1, "0 and 9 are 1");
    check(t, orientation_of_exif((const unsigned char*)"garbage!", 8) == 1, "what is no TIFF leaves it as it is");
    check(t, orientation_of_exif((const unsigned char*)"Exif\0\0", 6) == 0, "an empty block says nothing");
    const unsigned char xmp[] = "tiff:Orientation= tiff:Orientation>7";
    check(t, orientation_of_xmp(xmp, sizeof xmp - 1) == 7, "the first that has a number");
    Image image = accepted(t, "no TIFF", with_chunk(letters_png(), BEFORE, "eXIf", "garbage!", 8));
    check_upright(t, "no TIFF", &image, 1, 1);
    image_free(&image);
}

// ---- what is refused ----

static Bytes bytes_of(const void* bytes, size_t n_bytes) {
    Bytes b = {heap_copy(bytes, n_bytes), n_bytes};
    return b;
}

// a PNG's header says another size; its checksum is right
static Bytes png_resized(size_t width, size_t height) {
    Bytes b = letters_png();
    put_big_endian(b.bytes + 16, width, 4);
    put_big_endian(b.bytes + 20, height, 4);
    put_big_endian(b.bytes + 29, crc32(0, b.bytes + 12, 17), 4);
    return b;
}

static Bytes jpeg_resized(size_t width, size_t height) {
    static const unsigned char marker[] = {0xff, 0xc0, 0, 11, 8};  // the frame: its length, 8 bits, then both
    Bytes b = letters_jpeg();
    unsigned char* frame = (unsigned char*)memmem(b.bytes, b.n_bytes, marker, sizeof marker);
    put_big_endian(frame + 5, height, 2);
    put_big_endian(frame + 7, width, 2);
    return b;
}

// byte `offset` behind the first marker of this kind becomes `value`
static Bytes jpeg_changed(int marker, size_t offset, int value) {
    Bytes b = letters_jpeg();
    for (size_t i = 0; i + offset + 1 < b.n_bytes; i++) {
        if (b.bytes[i] == 0xff && b.bytes[i + 1] == marker) {
            b.bytes[i + offset] = (unsigned char)value;
            break;
        }
    }
    return b;
}

static void test_refused(Test* t) {
    static const struct { const char* begin; size_t n; const char* text; } others[] = {
        {"", 0, "an empty file"}, {"GIF89a", 6, "a GIF image: convert it"}, {"RIFFabcdWEBPVP8 ", 16, "a WebP image"},
        {"BM123456", 8, "a BMP image"}, {"II*\0", 4, "a TIFF image"}, {"\0\0\0\x1c" "ftypavif", 12, "an AVIF image"},
        {"\0\0\0\x1c" "ftypheic", 12, "a HEIC image"}, {"\0\0\0\x1c" "ftypisom", 12, "a video"},
        {"<html>", 6, "an HTML page"},
        {"version https://git-lfs.github.com", 34, "a Git LFS pointer"}, {"hello", 5, "neither by its first bytes"},
        {"\x89PNG", 4, "neither"}, {"\xff\xd8", 2, "neither"}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        check_refused(t, others[i].text, bytes_of(others[i].begin, others[i].n), others[i].text);
    }
    const unsigned char grey16[4] = {1, 2, 3, 4};
    check_refused(t, "grey of 16 bits", png_file(grey16, 1, 2, PNG_COLOR_TYPE_GRAY, 16, 0), "found grey of 16 bits");
    check_refused(t, "width 0", png_resized(0, 2), "at least one pixel");
    check_refused(t, "height 0", png_resized(2, 0), "at least one pixel");
    check_refused(t, "a bomb", png_resized(60000, 60000), "at most 178956970 pixels, found width 60000, height 60000");
    check_refused(t, "a bomb of one row", png_resized(0x7fffffff, 1), "at most 178956970 pixels");
    check_refused(t, "more rows than there are", png_resized(3, 4), "a damaged one");
    Bytes crc = letters_png();
    crc.bytes[crc.n_bytes - 20] ^= 1;
    check_refused(t, "a wrong checksum", crc, "a damaged one");
    check_refused(t, "12 bits", jpeg_changed(0xc0, 4, 12), "another one (Unsupported JPEG data precision 12)");
    check_refused(t, "lossless", jpeg_changed(0xc0, 1, 0xc3), "another one (Unsupported JPEG process");
    check_refused(t, "height 0", jpeg_changed(0xc0, 6, 0), "a damaged one (Empty JPEG image");
    check_refused(t, "more rows than there are", inserted(jpeg_changed(0xc0, 5, 0x10), 2, "\xff\xfe\0\2", 4),
                  "a damaged one");
    check_refused(t, "bytes between markers", inserted(letters_jpeg(), 20, "ab", 2),
                  "a damaged one (Corrupt JPEG data");
    check_refused(t, "a bomb", jpeg_resized(65500, 65500), "at most 178956970 pixels, found width 65500, height 65500");
    unsigned char* pixels = random_bytes(3 * 16 * 16, 1);
    const JpegKind two = {JCS_UNKNOWN, JCS_UNKNOWN, 2}, scans = {JCS_RGB, JCS_YCbCr, 3, 0, 0, 150};
    check_refused(t, "two channels", jpeg_file(pixels, 16, 16, two), "1, 3 or 4 channels, found 2");
    check_refused(t, "150 scans", jpeg_file(pixels, 16, 16, scans), "at most 100 scans");
    free(pixels);
}

// a few files, small ones: 0 and 1 are PNG
static Bytes sample_file(int i) {
    unsigned char* pixels = random_bytes(3 * 9 * 9, (uint64_t)i);
    Bytes b = i == 0 ? png_of_rgb(pixels, 9, 9)
            : i == 1 ? png_file(pixels, 9, 9, PNG_COLOR_TYPE_PALETTE, 2, PNG_INTERLACE_ADAM7)
            : jpeg_file(pixels, 9, 9, i == 2 ? JPEG_YCBCR : i == 3 ? JPEG_PROGRESSIVE : JPEG_GREY);
    free(pixels);
    return b;
}

static void test_cut(Test* t) {
    for (int i = 0; i < 5; i++) {
        Bytes whole = sample_file(i);
        for (size_t cut = 0; cut < whole.n_bytes; cut++) {
            check_refused(t, "cut short", bytes_of(whole.bytes, cut), "expected");
        }
        check_refused(t, "cut in the middle", bytes_of(whole.bytes, whole.n_bytes / 2), "cut short");
        whole.bytes[whole.n_bytes - 1] = 0xc8;  // another marker where a JPEG's end belongs; in a PNG, a wrong checksum
        check_refused(t, "no end marker", bytes_of(whole.bytes, whole.n_bytes), "expected");
        free(whole.bytes);
    }
}

// whatever bit is turned, a reader neither crashes nor reads beyond the file nor makes an image without a pixel; in a
// PNG no turned bit goes unseen
static void test_bits(Test* t) {
    for (int i = 0; i < 5; i++) {
        Bytes whole = sample_file(i);
        Image good;
        ErrorText error;
        image_parse(&good, whole.bytes, whole.n_bytes, &error);
        for (size_t bit = 0; bit < 8 * whole.n_bytes; bit += i < 2 ? 1 : 3) {
            Image image;
            Bytes b = bytes_of(whole.bytes, whole.n_bytes);
            b.bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
            error.text[0] = '\0';
            const int ok = image_parse_within(&image, b.bytes, b.n_bytes, 1 << 16, &error);
            check(t, ok ? image.height > 0 && image.width > 0 : error.text[0] && !image.rgb, "file %d, bit %zu", i,
                  bit);
            if (ok && i < 2) { check_pixels(t, "PNG, a bit turned", &image, good.rgb, 9, 9, 0); }
            image_free(&image);
            free(b.bytes);
        }
        image_free(&good);
        free(whole.bytes);
    }
}

static void load(void* path) {
    Image image = image_load((const char*)path);
    image_free(&image);
}

static void test_files(Test* t) {
    TempPath folder = temp_folder();
    TempPath nothing = temp_path(&folder, "none.png"), fifo = temp_path(&folder, "fifo.png");
    Bytes png = letters_png();
    TempPath good = temp_file(&folder, "named.jpg", png.bytes, png.n_bytes);
    TempPath empty = temp_file(&folder, "empty.png", "", 0);
    TempPath cut = temp_file(&folder, "cut.png", png.bytes, 60);
    check(t, mkfifo(fifo.s, 0600) == 0, "mkfifo: %s", strerror(errno));
    check_exit(t, "a folder", load, folder.s, 2, "expected a file, found a folder");
    check_exit(t, "a pipe", load, fifo.s, 2, "expected a file, found a pipe");
    check_exit(t, "no file", load, nothing.s, 2, "none.png: cannot be opened");
    check_exit(t, "an empty file", load, empty.s, 2, "empty.png: expected a PNG or JPEG image, found an empty file");
    check_exit(t, "cut short", load, cut.s, 2, "cut.png: expected the end of a PNG image");
    Image image = image_load(good.s);
    check_upright(t, "a PNG named .jpg", &image, 1, 1);
    image_free(&image);
    free(png.bytes);
    temp_remove(&folder);
}

// ---- resizing ----

// the inputs of tables: byte i is (37 i^2 + 11 i) mod 256
static void made_bytes(unsigned char* out, int n) {
    for (int i = 0; i < n; i++) { out[i] = (unsigned char)((i * i * 37 + i * 11) % 256); }
}

static void test_resize_pillow(Test* t) {
    // Image.fromarray(x).resize((w, h), BICUBIC) of Pillow 13.0.0
    static const struct { int height, width, h, w; unsigned char rgb[60]; } cases[] = {
        {5, 7, 3, 4, {83, 118, 178, 99, 124, 187, 110, 182, 177, 134, 211, 149, 150, 143, 126, 54, 68, 122, 125, 94,
                      123, 158, 140, 107, 123, 155, 131, 85, 98, 118, 65, 43, 103, 139, 141, 138}},
        // columns first
        {9, 4, 2, 3, {91, 130, 165, 119, 133, 153, 130, 168, 144, 111, 95, 118, 126, 121, 118, 112, 110, 111}},
        {2, 3, 4, 5, {0, 26, 160, 37, 62, 182, 112, 113, 210, 125, 103, 176, 126, 89, 149, 4, 80, 184, 40, 110, 200,
                      105, 151, 217, 107, 130, 173, 102, 111, 141, 15, 186, 230, 45, 205, 235, 89, 225, 233, 72, 185,
                      168, 56, 155, 126, 21, 240, 254, 48, 253, 253, 82, 255, 240, 54, 212, 165, 32, 177, 118}}};
    for (int i = 0; i < 3; i++) {
        unsigned char inp[3 * 36], out[60];
        made_bytes(inp, 3 * cases[i].height * cases[i].width);
        image_resize(out, cases[i].h, cases[i].w, inp, cases[i].height, cases[i].width);
        check(t, memcmp(out, cases[i].rgb, 3 * (size_t)cases[i].h * cases[i].w) == 0, "%d x %d to %d x %d",
              cases[i].height, cases[i].width, cases[i].h, cases[i].w);
    }
    check(t, image_resize_columns_first(2, 3, 9, 4), "9 x 4 to 2 x 3: expected columns first");
    check(t, !image_resize_columns_first(3, 4, 5, 7), "5 x 7 to 3 x 4: expected rows first");
}

// by the plain loop, in the order that image_resize has
static void resize_ref(unsigned char* out, int h, int w, const unsigned char* inp, int height, int width) {
    const int columns_first = image_resize_columns_first(h, w, height, width);
    ResizeWeights of_height = image_resize_weights(height, h), of_width = image_resize_weights(width, w);
    const size_t n_between = 3 * (size_t)(height > h ? height : h) * (width > w ? width : w);
    unsigned char* between = (unsigned char*)new_array(n_between, 1);
    if (height == h && width == w) { memcpy(out, inp, 3 * (size_t)h * w); }
    else if (height == h) { image_resize_pass_ref(out, inp, &of_width, h, width, 3); }
    else if (width == w) { image_resize_pass_ref(out, inp, &of_height, 1, height, 3 * (size_t)w); }
    else if (columns_first) {
        image_resize_pass_ref(between, inp, &of_height, 1, height, 3 * (size_t)width);
        image_resize_pass_ref(out, between, &of_width, h, width, 3);
    } else {
        image_resize_pass_ref(between, inp, &of_width, height, width, 3);
        image_resize_pass_ref(out, between, &of_height, 1, height, 3 * (size_t)w);
    }
    free(between);
    image_resize_weights_free(&of_height);
    image_resize_weights_free(&of_width);
}

static void test_resize_loop(Test* t) {
    static const int sides[] = {1, 2, 7, 32, 33, 64, 350};
    for (int i = 0; i < 7 * 7 * 7; i++) {
        const int height = sides[i % 7], width = sides[i / 7 % 7], h = sides[i / 49], w = sides[(i + i / 49) % 7];
        unsigned char* inp = random_bytes(3 * (size_t)height * width, (uint64_t)i);
        for (int k = 0; k < 3 * height * width && i % 2; k++) { inp[k] = inp[k] < 128 ? 0 : 255; }  // overshoots
        unsigned char* want = (unsigned char*)new_array(3 * (size_t)h * w, 1);
        unsigned char* found = (unsigned char*)new_array(3 * (size_t)h * w, 1);
        resize_ref(want, h, w, inp, height, width);
        Device dev = test_device(test_threads(i % 4));
        image_resize(found, h, w, inp, height, width);
        device_free(&dev);
        check(t, memcmp(want, found, 3 * (size_t)h * w) == 0, "%d x %d to %d x %d", height, width, h, w);
        free(inp), free(want), free(found);
    }
}

static void test_resize_flat(Test* t) {
    unsigned char inp[3 * 13 * 9], out[3 * 40 * 31];
    for (int value = 0; value < 256; value += 51) {
        memset(inp, value, sizeof inp);
        image_resize(out, 40, 31, inp, 13, 9);
        for (size_t i = 0; i < sizeof out; i++) {
            check(t, out[i] == value, "byte %zu: %d became %d", i, value, out[i]);
        }
    }
}

// the sum of a window's weights, as whole numbers, times 255 and the half stay within 32 bits, whatever the sizes are
static void test_resize_sums(Test* t) {
    double worst = 0.0;
    for (int n_inp = 1; n_inp < 400; n_inp += n_inp < 60 ? 1 : 7) {
        for (int n_out = 1; n_out < 400; n_out += n_out < 60 ? 1 : 7) {
            ResizeWeights w = image_resize_weights(n_inp, n_out);
            for (size_t i = 0; i < (size_t)n_out; i++) {
                double sum = 0.0;
                for (int j = 0; j < w.n[i]; j++) { sum += abs(w.weight[i * w.most + j]); }
                worst = sum > worst ? sum : worst;
            }
            image_resize_weights_free(&w);
        }
    }
    check(t, worst < 1.6 * (1 << RESIZE_BITS), "a window's weights add up to %g", worst / (1 << RESIZE_BITS));
}

// ---- sizes ----

static void test_sizes(Test* t) {
    // smart_resize of transformers 5.24, factor 32: height, width, then h, w
    static const int images[][4] = {{480, 640, 480, 640}, {1, 1, 256, 256}, {16, 16, 256, 256}, {48, 80, 224, 352},
                                    {80, 48, 352, 224}, {240, 1000, 256, 992}, {4032, 3024, 4032, 3008},
                                    {6000, 8000, 3520, 4704}, {200, 1, 3648, 32}, {1000, 37, 1344, 64},
                                    {31, 6000, 32, 6016}, {400, 640, 384, 640}, {640, 400, 640, 384}};
    static const int videos[][5] = {{2, 480, 640, 480, 640}, {3, 480, 640, 480, 640}, {5, 1080, 1920, 1088, 1920},
                                    {30, 1080, 1920, 672, 1216}, {768, 720, 1280, 128, 224}, {2, 10, 20, 32, 64},
                                    {7, 48, 80, 64, 64}, {2, 1, 200, 32, 6400}};
    const ImageProcessor p = image_processor_qwen36(0), of_videos = image_processor_qwen36(1);
    ErrorText error;
    int h = 0, w = 0;
    for (size_t i = 0; i < sizeof images / sizeof images[0]; i++) {
        const int* x = images[i];
        check(t, image_processor_resized(&h, &w, &p, x[0], x[1], &error) && h == x[2] && w == x[3],
              "%d x %d: found %d x %d", x[0], x[1], h, w);
    }
    for (size_t i = 0; i < sizeof videos / sizeof videos[0]; i++) {
        const int* x = videos[i];
        check(t, image_processor_resized_video(&h, &w, &of_videos, x[0], x[1], x[2], &error) && h == x[3] && w == x[4],
              "%d frames %d x %d: found %d x %d", x[0], x[1], x[2], h, w);
    }
    check(t, !image_processor_resized(&h, &w, &p, 1, 201, &error) && strstr(error.text, "200 times as long"),
          "1 x 201: %s", error.text);
    check(t, !image_processor_resized_video(&h, &w, &of_videos, 1, 50, 50, &error) &&
          strstr(error.text, "at least 2 frames, found 1"), "a video of one frame: %s", error.text);
}

// ---- patches ----

// images whose sizes need no resizing: multiples of 6
static ImageProcessor small_processor(int is_video) {
    ImageProcessor p = image_processor_default(is_video);
    p.patch = 3, p.temporal = 2, p.merge = 2, p.min_pixels = 1, p.max_pixels = 100000;
    return p;
}

static Image made_image(int height, int width, uint64_t seed) {
    Image image = {height, width, random_bytes(3 * (size_t)height * width, seed)};
    return image;
}

static float value_of(const ImageProcessor* p, int byte, int c) {
    const float x = (float)(byte * p->rescale), mean = (float)p->mean[c], std = (float)p->std[c];
    return (x - mean) / std;
}

// every value where the definition has it: six loops, each over what its letter says
static void check_patches(Test* t, const Patches* patches, const ImageProcessor* p, const Image* frames, int n) {
    const PatchGrid g = patches->grid;
    const int P = p->patch, M = p->merge, rows = g.h / M, columns = g.w / M;
    size_t at = 0;
    for (int i = 0; i < g.t * rows * columns * M * M; i++) {
        const int mx = i % M, my = i / M % M, bx = i / (M * M) % columns, by = i / (M * M * columns) % rows;
        const int time = i / (M * M * columns * rows);
        for (int k = 0; k < 3 * p->temporal * P * P; k++, at++) {
            const int x = k % P, y = k / P % P, c = k / (P * P * p->temporal);
            int frame = time * p->temporal + k / (P * P) % p->temporal;
            frame = frame < n ? frame : n - 1;
            const int row = (by * M + my) * P + y, column = (bx * M + mx) * P + x;
            const int byte = frames[frame].rgb[3 * (row * frames[frame].width + column) + c];
            const float want = value_of(p, byte, c);
            if (!check(t, float_bits(patches->values[at]) == float_bits(want), "value %zu: expected %g, found %g", at,
                       (double)want, (double)patches->values[at])) {
                return;
            }
        }
    }
    const size_t n_values = patches->rows * patches->columns;
    check(t, at == n_values, "expected %zu values, found %zu", at, n_values);
}

static void test_patches(Test* t) {
    const ImageProcessor p = small_processor(0);
    Image image = made_image(12, 30, 1);
    Patches patches;
    ErrorText error;
    check(t, image_processor_patches(&patches, &p, &image, 1, &error), "refused: %s", error.text);
    check(t, patches.grid.t == 1 && patches.grid.h == 4 && patches.grid.w == 10, "another grid");
    check(t, image_processor_tokens(&p, patches.grid) == 10, "expected 10 tokens");
    check_patches(t, &patches, &p, &image, 1);
    patches_free(&patches);
    image_free(&image);
}

// of a file: upright first, then patches; what is no image leaves nothing to free
static void test_patches_of_file(Test* t) {
    const ImageProcessor p = small_processor(0);
    TempPath folder = temp_folder(), nothing = temp_path(&folder, "none.png");
    Image image = made_image(12, 6, 2), turned = {6, 12, random_bytes(3 * 12 * 6, 0)};
    for (int i = 0; i < 12 * 6; i++) {  // upright row y, column x is the stored row 5 - x, column y
        memcpy(turned.rgb + 3 * ((5 - i % 6) * 12 + i / 6), image.rgb + 3 * i, 3);
    }
    unsigned char block[26];
    exif_block(block, 6, 1);
    Bytes png = with_chunk(png_of_rgb(turned.rgb, 6, 12), BEHIND, "eXIf", block, 26);
    TempPath file = temp_file(&folder, "held.png", png.bytes, png.n_bytes);
    Patches patches;
    ErrorText error = {""};
    if (check(t, image_patches_read(&patches, &p, file.s, &error), "refused: %s", error.text)) {
        check(t, patches.grid.h == 4 && patches.grid.w == 2, "found a grid of %d x %d", patches.grid.h, patches.grid.w);
        check_patches(t, &patches, &p, &image, 1);
    }
    patches_free(&patches);
    check(t, !image_patches_read(&patches, &p, nothing.s, &error) && !patches.values &&
          strstr(error.text, "cannot be opened"), "no file: found %s", error.text);
    image_free(&image), image_free(&turned);
    free(png.bytes);
    temp_remove(&folder);
}

static void test_patches_values(Test* t) {
    // of bytes 0, 1, 127, 128, 254, 255 by transformers: mean and std 0.5; those of Qwen2-VL's first channel
    static const int bytes[] = {0, 1, 127, 128, 254, 255};
    static const uint32_t half[] = {0xbf800000, 0xbf7dfdfe, 0xbb808080, 0x3b808100, 0x3f7dfdfe, 0x3f800000};
    static const uint32_t clip[] = {0xbfe568dc, 0xbfe38a7f, 0x3d7ce092, 0x3d9c5620, 0x3ff536e5, 0x3ff71541};
    const ImageProcessor ours = image_processor_qwen36(0), of_clip = image_processor_default(0);
    const PixelValues_ a = image_processor_values_(&ours), b = image_processor_values_(&of_clip);
    for (int i = 0; i < 6; i++) {
        const uint32_t of_half = float_bits(a.value[2][bytes[i]]), clips = float_bits(b.value[0][bytes[i]]);
        check(t, of_half == half[i] && clips == clip[i], "byte %d: found %08x and %08x", bytes[i], of_half, clips);
    }
}

static void test_videos(Test* t) {
    for (int n = 2; n <= 5; n++) {
        ImageProcessor p = small_processor(1);
        Image frames[5];
        Patches patches;
        ErrorText error;
        p.temporal = n == 4 ? 3 : 2;  // 4 frames of 3: two are repeated
        for (int i = 0; i < n; i++) { frames[i] = made_image(6, 18, (uint64_t)i); }
        check(t, image_processor_patches(&patches, &p, frames, n, &error), "refused: %s", error.text);
        check(t, patches.grid.t == (n + p.temporal - 1) / p.temporal, "%d frames: grid of %d", n, patches.grid.t);
        check_patches(t, &patches, &p, frames, n);
        patches_free(&patches);
        frames[1].width--;
        check(t, !image_processor_patches(&patches, &p, frames, n, &error) &&
              strstr(error.text, "frame 1: expected width 18"), "another size: found %s", error.text);
        for (int i = 0; i < n; i++) { image_free(&frames[i]); }
    }
}

// ---- preprocessor_config.json ----

static int parsed(ImageProcessor* p, const char* text, int is_video, ErrorText* error) {
    json_t* json = json_loads(text, 0, NULL);
    error->text[0] = '\0';
    const int ok = json && image_processor_parse(p, json, is_video, error);
    json_decref(json);
    return ok;
}

static void test_config(Test* t) {
    static const struct { const char* text; int is_video, patch, least, most; } cases[] = {
        {"{}", 0, 14, 3136, 1003520}, {"{}", 1, 16, 131072, 786432},
        {"{\"size\":{\"shortest_edge\":65536,\"longest_edge\":16777216},\"patch_size\":16}", 0, 16, 65536, 16777216},
        {"{\"size\":{\"min_pixels\":100,\"max_pixels\":200}}", 0, 14, 100, 200},
        {"{\"size\":{\"shortest_edge\":1,\"longest_edge\":2},\"min_pixels\":100,\"max_pixels\":200}", 0, 14, 100, 200},
        {"{\"max_pixels\":12845056,\"size\":null,\"image_processor_type\":\"Qwen2VLImageProcessorFast\"}", 0, 14, 3136,
         12845056}};
    ImageProcessor p;
    ErrorText error;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int ok = parsed(&p, cases[i].text, cases[i].is_video, &error);
        check(t, ok && p.patch == cases[i].patch && p.min_pixels == cases[i].least && p.max_pixels == cases[i].most,
              "%s: %s", cases[i].text, ok ? "other sizes" : error.text);
    }
    const int ok = parsed(&p, "{\"image_mean\":[0.1,0.2,0.3],\"image_std\":0.5}", 0, &error);
    check(t, ok && p.mean[2] == 0.3 && p.std[1] == 0.5, "a list, and one for all: %s", error.text);
}

static void test_config_refused(Test* t) {
    static const char* const cases[][2] = {
        {"{\"patch_size\":0}", "\"patch_size\": expected an integer 1..256"},
        {"{\"merge_size\":2.5}", "\"merge_size\""},
        {"{\"size\":[1,2]}", "\"size\": expected an object"}, {"{\"min_pixels\":-1}", "\"min_pixels\""},
        {"{\"size\":{\"shortest_edge\":9,\"longest_edge\":8}}", "expected at least \"shortest_edge\""},
        {"{\"image_mean\":[1,2]}", "\"image_mean\": expected a number -1000..1000 for each of three channels"},
        {"{\"image_std\":[1,0,1]}", "\"image_std\": expected a number 0.001..1000 for each of three channels, found"},
        {"{\"do_resize\":false}", "\"do_resize\""},
        {"{\"resample\":2}", "\"resample\""}, {"{\"do_rescale\":false}", "\"do_rescale\""},
        {"{\"image_processor_type\":\"CLIPImageProcessor\"}",
         "\"image_processor_type\": expected Qwen2VLImageProcessor"}};
    ImageProcessor p;
    ErrorText error;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check(t, !parsed(&p, cases[i][0], 0, &error) && strstr(error.text, cases[i][1]),
              "%s: expected \"%s\", found %s", cases[i][0], cases[i][1], error.text);
    }
}

static void test_config_written(Test* t) {
    TempPath folder = temp_folder(), path = temp_path(&folder, "preprocessor_config.json");
    for (int is_video = 0; is_video < 2; is_video++) {
        ImageProcessor p = image_processor_default(is_video), q;
        p.mean[1] = 1.0 / 3.0;
        json_write_doubles(path.s, image_processor_json(&p));
        q = image_processor_load(path.s, is_video);
        check(t, memcmp(&p, &q, sizeof p) == 0, "another processor came back");
    }
    static const char both[] = "{\"image_processor\":{\"patch_size\":5},\"video_processor\":{\"patch_size\":6}}";
    path = temp_file(&folder, "processor_config.json", both, sizeof both - 1);
    check(t, image_processor_load(path.s, 0).patch == 5 && image_processor_load(path.s, 1).patch == 6,
          "parts of processor_config.json");
    temp_remove(&folder);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"png kinds", "each colour, depth and interlacing is the RGB that it stands for; tRNS and gamma change nothing",
         test_png_kinds},
        {"png animated", "of an animation the first frame, and nothing behind it", test_png_animated},
        {"jpeg colours", "grey, YCbCr, RGB, CMYK and YCCK", test_jpeg_colors},
        {"jpeg ways", "progressive and with restart markers are the bytes of baseline", test_jpeg_ways},
        {"orientation", "1 to 8 from eXIf, APP1, a text of ImageMagick's, XMP: upright", test_orientation},
        {"orientation odd", "entries of any kind before it, numbers of any type: what Pillow makes of them",
         test_orientation_odd},
        {"orientation broken", "any bit turned, cut anywhere: a way up, or none", test_orientation_broken},
        {"image refused", "other files, grey of 16 bits, no pixel, too many, 12 bits, two channels, 150 scans",
         test_refused},
        {"image cut", "cut anywhere, or without its end, it is refused with one line", test_cut},
        {"image bits", "any bit turned: refused, or an image; of a PNG the same one", test_bits},
        {"image files", "a folder, a pipe, no file, an empty one: status 2, one line; the name does not matter",
         test_files},
        {"resize Pillow", "its bytes, in both orders of passes", test_resize_pillow},
        {"resize loop", "equals the plain loop at odd sizes, with any number of threads", test_resize_loop},
        {"resize flat", "one colour stays one colour", test_resize_flat},
        {"resize sums", "weights add up to less than 1.6: sums stay within 32 bits", test_resize_sums},
        {"sizes", "of images and videos are those of smart_resize", test_sizes},
        {"patches order", "every value is where the definition has it", test_patches},
        {"patches file", "are those of the upright image; or a reason", test_patches_of_file},
        {"patches values", "are transformers' bits", test_patches_values},
        {"videos", "the last frame fills up the last patches; frames of another size are refused", test_videos},
        {"config", "both names of bounds; what is absent is the class's", test_config},
        {"config refused", "sizes out of bounds, what another class computes", test_config_refused},
        {"config written", "and read again: the same; parts of processor_config.json", test_config_written},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
