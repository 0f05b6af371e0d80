/*
An image file as RGB, 8 bits a channel, upright: the bytes that transformers' load_image gives, which is Pillow's open,
ImageOps.exif_transpose and convert("RGB").
    image_parse    bytes of a PNG or JPEG; 1, or 0 with the reason
    image_read     a file; 1, or 0 with the reason: for readers that can go on without it
    image_load     a file; fail_input with path and reason
    image_free     (pixels.h)
What a file is its first bytes say, not its name. What becomes of each kind of PNG and JPEG stands in image_png.h and
image_jpeg.h; how images are turned in orientation.h.
Cost:   one core of an AMD EPYC, a noisy picture of 4032 x 3024: 5.0 ns a pixel as JPEG of quality 85, 16.7 as a
        progressive one of quality 95, 27.2 as PNG; Pillow takes 8.4, 20.2 and 33.0. Memory: 3 bytes a pixel, 6 while
        it is turned; a progressive JPEG has 6 more until it is read. So pixels are bounded: IMAGE_MOST_PIXELS.
Errors: what, where, expected, found and what to do, on one line; fail_run where memory is not enough.
*/
#ifndef LLMC_IMAGE_H
#define LLMC_IMAGE_H
#include "../core/mapfile.h"  // MappedFile, file_map_or_not, file_looks_like, ErrorText
#include "image_jpeg.h"       // image_jpeg_is, image_jpeg_decode
#include "image_png.h"        // image_png_is, image_png_decode
#include "orientation.h"      // orientation_apply
#include "pixels.h"           // Image, image_free

enum { IMAGE_PIXEL_BYTES = 9 };  // at most, while a file is decoded or turned

// an image file of another kind, by its first bytes; NULL: none that is known
static inline const char* image_other_kind_(const unsigned char* bytes, size_t n_bytes) {
    static const struct { size_t at; const char *begin, *name; } kinds[] = {
        {0, "GIF8", "a GIF image"}, {0, "BM", "a BMP image"}, {8, "WEBP", "a WebP image"}, {0, "II*", "a TIFF image"},
        {0, "MM", "a TIFF image"}, {4, "ftypavif", "an AVIF image"}, {4, "ftyphe", "a HEIC image"},
        {4, "ftypmif1", "a HEIC image"}, {0, "\xff\x0a", "a JPEG XL image"}, {4, "JXL ", "a JPEG XL image"},
        {4, "jP  ", "a JPEG 2000 image"}, {0, "%PDF", "a PDF document"}, {0, "<svg", "an SVG drawing"},
        {4, "ftyp", "a video"}, {0, "RIFF", "a sound or a video"}, {0, "\x1a\x45\xdf\xa3", "a video"}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        const size_t n = strlen(kinds[i].begin);
        if (n_bytes >= kinds[i].at + n && memcmp(bytes + kinds[i].at, kinds[i].begin, n) == 0) { return kinds[i].name; }
    }
    return NULL;
}

static inline int image_refuse_kind_(const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    const char *kind = image_other_kind_(bytes, n_bytes), *other = file_looks_like(bytes, n_bytes);
    if (n_bytes == 0) { return error_set(error, "expected a PNG or JPEG image, found an empty file"); }
    if (kind) { return error_set(error, "expected a PNG or JPEG image, found %s: convert it", kind); }
    return error_set(error, "expected a PNG or JPEG image, found %s", other ? other : "neither by its first bytes");
}

// the image that was decoded, turned upright
static inline void image_turn_(Image* image, int orientation) {
    if (orientation <= 1) { return; }
    const int is_turned = orientation_is_turned(orientation);
    Image upright = *image;
    upright.height = is_turned ? image->width : image->height;
    upright.width = is_turned ? image->height : image->width;
    upright.rgb = (unsigned char*)malloc_check(3 * (size_t)image->height * image->width, "pixels of an image");
    orientation_apply(upright.rgb, image->rgb, image->height, image->width, orientation);
    image_free(image);
    *image = upright;
}

// of at most so many pixels
static inline int image_parse_within(Image* image, const unsigned char* bytes, size_t n_bytes, size_t most_pixels,
                                     ErrorText* error) {
    int orientation = 0, ok;
    memset(image, 0, sizeof *image);
    if (image_png_is(bytes, n_bytes)) {
        ok = image_png_decode(image, &orientation, bytes, n_bytes, most_pixels, error);
    } else if (image_jpeg_is(bytes, n_bytes)) {
        ok = image_jpeg_decode(image, &orientation, bytes, n_bytes, most_pixels, error);
    } else {
        ok = image_refuse_kind_(bytes, n_bytes, error);
    }
    if (ok) { image_turn_(image, orientation); }
    return ok;
}

static inline int image_parse(Image* image, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    return image_parse_within(image, bytes, n_bytes, IMAGE_MOST_PIXELS, error);
}

static inline int image_read(Image* image, const char* path, ErrorText* error) {
    MappedFile file;
    memset(image, 0, sizeof *image);
    if (!file_map_or_not(&file, path, error)) { return 0; }
    const int ok = image_parse(image, file.bytes, file.n_bytes, error);
    file_unmap(&file);
    return ok;
}

static inline Image image_load(const char* path) {
    Image image;
    ErrorText error;
    if (!image_read(&image, path, &error)) { fail_input("%s: %s", path, error.text); }
    return image;
}
#endif  // LLMC_IMAGE_H
