/*
PNG: the bytes of a file to rows of RGB, 8 bits a channel. A program calls image.h.
    image_png_is       does it begin as a PNG does?
    image_png_decode   1 with pixels as they are stored and their orientation, or 0 with the reason
What becomes of the kinds of PNG, as Pillow has it:
    grey 1, 2, 4, 8 bits      three equal channels, the largest value is 255
    palette 1 to 8 bits       the colour; black where the palette has no such entry
    colour, or alpha, 16 bits the high byte of each channel
    grey of 16 bits           refused: Pillow takes every value above 255 for white
    alpha, tRNS, gAMA, iCCP   have no say: alpha is dropped, not blended
    animated (APNG)           the image that every reader of PNG sees, which is Pillow's first frame
Orientation: eXIf; else an Exif block in hexadecimal, which ImageMagick wrote as the text "Raw profile type exif" until
2018; else XMP. It may stand behind the pixels, but in an animation not behind the second frame, where Pillow stops.
Every checksum is compared, and the end of the image must be there; what follows it is not looked at.
Errors: 0 with the reason; fail_run where memory is not enough.
Source: PNG third edition (W3C 2025); libpng 1.6
*/
#ifndef LLMC_IMAGE_PNG_H
#define LLMC_IMAGE_PNG_H
#include "../core/mapfile.h"  // ErrorText, error_set
#include "orientation.h"      // orientation_of_exif, orientation_of_xmp
#include "pixels.h"           // Image, image_room_
#include <setjmp.h>
#include <png.h>
#include <zlib.h>

static inline int image_png_is(const unsigned char* bytes, size_t n_bytes) {
    return n_bytes >= 8 && memcmp(bytes, "\x89PNG\r\n\x1a\n", 8) == 0;
}

// ---- pixels ----

typedef struct {
    png_structp png;
    png_infop info;
    const unsigned char* bytes;
    size_t n_bytes, at;
    Image* image;
    jmp_buf on_error;
    ErrorText* error;
} PngReader_;

static inline void image_png_on_error_(png_structp png, png_const_charp message) {
    PngReader_* r = (PngReader_*)png_get_error_ptr(png);
    if (message) {
        error_set(r->error, "expected a PNG image, found a damaged one (%.200s, at byte %zu): copy or download it "
                            "again", message, r->at);
    }
    longjmp(r->on_error, 1);
}

static inline void image_png_on_warning_(png_structp png, png_const_charp message) { (void)png, (void)message; }

// leaves the reader with a reason that is set already
static inline void image_png_leave_(PngReader_* r) { image_png_on_error_(r->png, NULL); }

static inline void image_png_take_(png_structp png, png_bytep out, size_t n) {
    PngReader_* r = (PngReader_*)png_get_io_ptr(png);
    if (n > r->n_bytes - r->at) {
        error_set(r->error, "expected the end of a PNG image, found the end of the file at byte %zu: it is cut short, "
                            "copy or download it again", r->n_bytes);
        image_png_leave_(r);
    }
    memcpy(out, r->bytes + r->at, n);
    r->at += n;
}

static inline png_voidp image_png_room_(png_structp png, png_alloc_size_t n) {
    (void)png;
    return malloc_check(n, "PNG image");
}

static inline void image_png_room_free_(png_structp png, png_voidp room) {
    (void)png;
    free(room);
}

// what libpng is to make of the pixels
static inline void image_png_ask_for_rgb_(PngReader_* r) {
    const int kind = png_get_color_type(r->png, r->info), bits = png_get_bit_depth(r->png, r->info);
    if (kind == PNG_COLOR_TYPE_GRAY && bits == 16) {
        error_set(r->error, "expected a PNG image of 8 bits a channel, or 16 in colour, found grey of 16 bits: what of "
                            "them is black and white only its maker knows, so scale it to 8 bits");
        image_png_leave_(r);
    }
    png_set_expand_gray_1_2_4_to_8(r->png);
    png_set_palette_to_rgb(r->png);
    png_set_gray_to_rgb(r->png);
    png_set_strip_16(r->png);
    png_set_strip_alpha(r->png);
}

static inline void image_png_read_pixels_(PngReader_* r, size_t most_pixels) {
    const png_uint_32 width = png_get_image_width(r->png, r->info), height = png_get_image_height(r->png, r->info);
    if (!image_room_(r->image, height, width, most_pixels, r->error)) { image_png_leave_(r); }
    image_png_ask_for_rgb_(r);
    const int n_passes = png_set_interlace_handling(r->png);
    png_read_update_info(r->png, r->info);
    const size_t row = png_get_rowbytes(r->png, r->info);
    if (row != 3 * (size_t)width) { png_error(r->png, "a row has another length"); }
    for (int pass = 0; pass < n_passes; pass++) {
        for (size_t y = 0; y < height; y++) { png_read_row(r->png, r->image->rgb + y * row, NULL); }
    }
    png_read_end(r->png, NULL);
}

// libpng would only say that the header is invalid
static inline void image_png_refuse_no_pixels_(PngReader_* r) {
    static const unsigned char zeros[4] = {0};
    const size_t of_width = 16, of_height = 20;
    if (r->n_bytes < of_height + 4) { return; }
    const int is_empty = memcmp(r->bytes + of_width, zeros, 4) == 0 || memcmp(r->bytes + of_height, zeros, 4) == 0;
    if (memcmp(r->bytes + 12, "IHDR", 4) == 0 && is_empty) {
        error_set(r->error, "expected an image of at least one pixel, found a PNG image of width or height 0");
        image_png_leave_(r);
    }
}

// all that libpng may leave by longjmp, which keeps no local variable
static inline int image_png_read_(PngReader_* r, size_t most_pixels) {
    if (setjmp(r->on_error)) { return 0; }
    image_png_refuse_no_pixels_(r);
    png_set_read_fn(r->png, r, image_png_take_);
    png_set_crc_action(r->png, PNG_CRC_ERROR_QUIT, PNG_CRC_ERROR_QUIT);
    png_set_user_limits(r->png, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
    png_set_keep_unknown_chunks(r->png, PNG_HANDLE_CHUNK_NEVER, NULL, -1);  // nothing but the pixels is looked at
    png_set_option(r->png, PNG_MAXIMUM_INFLATE_WINDOW, PNG_OPTION_ON);      // some writers say a window too small
    png_read_info(r->png, r->info);
    image_png_read_pixels_(r, most_pixels);
    return 1;
}

// ---- chunks beside them ----

typedef struct {
    const char* type;  // four letters
    const unsigned char* data;
    size_t n_bytes;
} PngChunk;

static inline uint32_t image_png_number_(const unsigned char* b) {
    return (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
}

static inline int image_png_chunk_is_(const PngChunk* c, const char* type) { return memcmp(c->type, type, 4) == 0; }

// the chunk at *at, which goes behind it; 0: there is none
static inline int image_png_chunk_next_(PngChunk* c, const unsigned char* bytes, size_t n_bytes, size_t* at) {
    if (n_bytes - *at < 12) { return 0; }
    const unsigned char* b = bytes + *at;
    c->n_bytes = image_png_number_(b);
    c->type = (const char*)b + 4;
    c->data = b + 8;
    if (c->n_bytes > n_bytes - *at - 12 || image_png_chunk_is_(c, "IEND")) { return 0; }
    *at += c->n_bytes + 12;
    return 1;
}

// what the chunks so far say of an animation
typedef struct {
    uint32_t n;      // frames; 0: it is none
    int is_first;    // an fcTL stands before the pixels, which are then the first frame, else none
    int is_behind;   // the pixels have begun
} PngFrames_;

// does another frame begin with this chunk?
static inline int image_png_next_frame_(PngFrames_* f, const PngChunk* c) {
    const int is_frame = image_png_chunk_is_(c, "fcTL");
    if (f->is_behind) { return is_frame && f->n > 0 && (f->n > 1 || !f->is_first); }
    f->is_first = f->is_first || is_frame;
    f->is_behind = image_png_chunk_is_(c, "IDAT");
    if (image_png_chunk_is_(c, "acTL") && c->n_bytes >= 8) {
        const uint32_t n = image_png_number_(c->data);
        f->n = f->n > 0 ? 0 : n <= 0x80000000u ? n : 0;  // said twice, or too many: an image like any other
    }
    return 0;
}

// What follows `key` and its 0; NULL: a text of another key
static inline const unsigned char* image_png_text_of_(const PngChunk* c, const char* key, size_t* n_left) {
    const size_t n_key = strlen(key) + 1;
    if (c->n_bytes < n_key || memcmp(c->data, key, n_key) != 0) { return NULL; }
    *n_left = c->n_bytes - n_key;
    return c->data + n_key;
}

enum { PNG_TEXT_BYTES = 1 << 20 };  // of an unpacked text: Pillow's limit

// a text on the heap of *n bytes, unpacked if zlib packed it; NULL: it is damaged or too long
static inline unsigned char* image_png_unpacked_(const unsigned char* text, size_t* n, int is_packed) {
    const size_t n_room = is_packed ? (size_t)PNG_TEXT_BYTES : *n;
    uLongf n_out = n_room;
    unsigned char* out = (unsigned char*)malloc_check(n_room, "text of a PNG image");
    if (is_packed && uncompress(out, &n_out, text, *n) != Z_OK) {
        free(out);
        return NULL;
    }
    if (!is_packed && *n > 0) { memcpy(out, text, *n); }
    *n = n_out;
    return out;
}

static inline int image_png_hex_digit_(unsigned char c) {
    const char* digits = "0123456789abcdef0123456789ABCDEF";
    const char* found = c ? strchr(digits, c) : NULL;
    return found ? (int)(found - digits) % 16 : -1;
}

// "\nexif\n      42\n4578696600..." in place: three newlines, then the bytes in hexadecimal, in lines
static inline int image_png_orientation_of_profile_(unsigned char* text, size_t n_bytes) {
    size_t i = 0, n = 0;
    int high = -1;
    for (int n_lines = 0; i < n_bytes && n_lines < 3; i++) { n_lines += text[i] == '\n'; }
    for (; i < n_bytes; i++) {
        const int digit = image_png_hex_digit_(text[i]);
        if (digit < 0) { continue; }
        if (high >= 0) { text[n++] = (unsigned char)(16 * high + digit); }
        high = high >= 0 ? -1 : digit;
    }
    return orientation_of_exif(text, n);
}

// of a tEXt or zTXt; 0: not of a profile
static inline int image_png_profile_(const PngChunk* c) {
    size_t n = 0;
    const int is_packed = image_png_chunk_is_(c, "zTXt");
    const unsigned char* text = image_png_text_of_(c, "Raw profile type exif", &n);
    if (!text || n < 1) { return 0; }
    n -= is_packed;  // its first byte names the only method
    unsigned char* plain = image_png_unpacked_(text + is_packed, &n, is_packed);
    const int orientation = plain ? image_png_orientation_of_profile_(plain, n) : 0;
    free(plain);
    return orientation;
}

// of an iTXt: key, 0, is it packed?, method, language, 0, translated key, 0, text
static inline int image_png_xmp_(const PngChunk* c) {
    size_t n = 0;
    const unsigned char* text = image_png_text_of_(c, "XML:com.adobe.xmp", &n);
    if (!text || n < 2) { return 0; }
    const int is_packed = text[0] != 0;
    text += 2, n -= 2;
    for (int skip = 0; skip < 2; skip++) {
        const unsigned char* end = (const unsigned char*)memchr(text, 0, n);
        if (!end) { return 0; }
        n -= (size_t)(end + 1 - text);
        text = end + 1;
    }
    unsigned char* plain = image_png_unpacked_(text, &n, is_packed);
    const int orientation = plain ? orientation_of_xmp(plain, n) : 0;
    free(plain);
    return orientation;
}

// of a whole file, which libpng has read to its end
static inline int image_png_orientation_(const unsigned char* bytes, size_t n_bytes) {
    int of_exif = -1, of_profile = 0, of_xmp = 0;  // -1: there is no eXIf
    PngFrames_ frames = {0, 0, 0};
    PngChunk c;
    for (size_t at = 8; image_png_chunk_next_(&c, bytes, n_bytes, &at) && !image_png_next_frame_(&frames, &c);) {
        if (image_png_chunk_is_(&c, "eXIf")) { of_exif = orientation_of_exif(c.data, c.n_bytes); }
        if (image_png_chunk_is_(&c, "tEXt") || image_png_chunk_is_(&c, "zTXt")) {
            const int found = image_png_profile_(&c);
            of_profile = found ? found : of_profile;
        }
        if (image_png_chunk_is_(&c, "iTXt")) {
            const int found = image_png_xmp_(&c);
            of_xmp = found ? found : of_xmp;
        }
    }
    const int orientation = of_exif >= 0 ? of_exif : of_profile;
    return orientation ? orientation : of_xmp;
}

// image: of image_room_ where 1, empty where 0
static inline int image_png_decode(Image* image, int* orientation, const unsigned char* bytes, size_t n_bytes,
                             size_t most_pixels, ErrorText* error) {
    PngReader_ r;
    memset(&r, 0, sizeof r);
    memset(image, 0, sizeof *image);
    r.bytes = bytes, r.n_bytes = n_bytes, r.image = image, r.error = error;
    r.png = png_create_read_struct_2(PNG_LIBPNG_VER_STRING, &r, image_png_on_error_, image_png_on_warning_, NULL,
                                     image_png_room_, image_png_room_free_);
    r.info = r.png ? png_create_info_struct(r.png) : NULL;
    if (!r.info) { fail_run("libpng %s cannot be started: it is another version than this program was built with",
                            png_get_libpng_ver(NULL)); }
    const int ok = image_png_read_(&r, most_pixels);
    png_destroy_read_struct(&r.png, &r.info, NULL);
    if (!ok) { image_free(image); }
    if (ok) { *orientation = image_png_orientation_(bytes, n_bytes); }
    return ok;
}
#endif  // LLMC_IMAGE_PNG_H
