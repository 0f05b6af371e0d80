/*
JPEG: the bytes of a file to rows of RGB, 8 bits a channel. A program calls image.h.
    image_jpeg_is       does it begin as a JPEG does?
    image_jpeg_decode   1 with pixels as they are stored and their orientation, or 0 with the reason
Baseline and progressive, Huffman or arithmetic codes, 8 bits. The bytes are Pillow's, which stands on the same library:
the accurate inverse transform (JDCT_ISLOW), chroma interpolated between its samples, blocks of unfinished progressive
images smoothed (which libjpeg-turbo 2.1 and Pillow's 3.2 do differently: by up to 11 of 255 where it was seen).
    1 channel    three equal ones
    3            as libjpeg takes them: YCbCr, or RGB where Adobe's marker or the names of the channels say so
    4            CMYK, or YCCK, always taken for Adobe's, who store 255 - ink: a colour is what its ink leaves of light
                 times what black leaves of it, / 255
Colour profiles (ICC) have no say. Of several images in a file (MPO) the first is read.
Where libjpeg would go on with what it makes up (data that are cut short, codes that do not exist, a restart marker that
is lost) the image is refused: Pillow takes some of these, with grey or repeated blocks in them. So is an image without
its end marker, or with bytes between the markers before its pixels, by Pillow too. What only looks odd, such as bytes
too many behind them, is taken.
Orientation: the first Exif blocks together, else XMP, both APP1.
A file of a few bytes may have any number of scans, each of which costs a pass over all pixels: at most JPEG_MOST_SCANS.
Errors: 0 with the reason; fail_run where memory is not enough.
Source: ITU-T T.81 (JPEG), T.872 (Adobe's marker); libjpeg-turbo 2.1
*/
#ifndef LLMC_IMAGE_JPEG_H
#define LLMC_IMAGE_JPEG_H
#include "../core/mapfile.h"  // ErrorText, error_set
#include "orientation.h"      // orientation_of_exif, orientation_of_xmp
#include "pixels.h"           // Image, image_room_
#include <setjmp.h>
#include <stdio.h>
#include <jpeglib.h>  // behind stdio.h
#include <jerror.h>

enum { JPEG_MOST_SCANS = 100 };  // progressive images have about ten

static inline int image_jpeg_is(const unsigned char* bytes, size_t n_bytes) {
    return n_bytes >= 3 && memcmp(bytes, "\xff\xd8\xff", 3) == 0;
}

typedef struct {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    struct jpeg_progress_mgr progress;
    jmp_buf on_error;
    ErrorText* error;
    Image* image;
    size_t n_bytes;      // of the file
    unsigned char* row;  // of the file's channels, where they are not RGB
    unsigned char* exif; // all Exif blocks of the file
    int orientation;
    int is_header;       // nothing but markers was read yet
} JpegReader_;

static inline void image_jpeg_leave_(JpegReader_* r) { longjmp(r->on_error, 1); }

// the error or warning that libjpeg has just met
static inline void image_jpeg_refuse_(j_common_ptr jpeg) {
    JpegReader_* r = (JpegReader_*)jpeg->client_data;
    const int code = jpeg->err->msg_code;
    const size_t n_left = r->jpeg.src ? r->jpeg.src->bytes_in_buffer : 0;
    char message[JMSG_LENGTH_MAX];
    jpeg->err->format_message(jpeg, message);
    if (code == JERR_OUT_OF_MEMORY) { fail_run("JPEG image: no memory: %s", message); }
    if (code == JWRN_JPEG_EOF || code == JERR_INPUT_EOF || code == JERR_INPUT_EMPTY) {
        error_set(r->error, "expected the end of a JPEG image, found the end of the file at byte %zu: it is cut short, "
                            "copy or download it again", r->n_bytes);
    } else if (code == JERR_SOF_UNSUPPORTED || code == JERR_BAD_PRECISION || code == JERR_CONVERSION_NOTIMPL ||
               code == JERR_ARITH_NOTIMPL || code == JERR_NOT_COMPILED) {
        error_set(r->error, "expected a baseline or progressive JPEG image of 8 bits and 1, 3 or 4 channels, found "
                            "another one (%.200s): convert it", message);
    } else {
        error_set(r->error, "expected a JPEG image, found a damaged one (%.200s, near byte %zu): copy or download it "
                            "again", message, r->n_bytes - n_left);
    }
    image_jpeg_leave_(r);
}

// Level -1 is a warning, after which libjpeg goes on
static inline void image_jpeg_on_message_(j_common_ptr jpeg, int level) {
    const int code = jpeg->err->msg_code;
    const int is_garbage = code == JWRN_EXTRANEOUS_DATA && ((JpegReader_*)jpeg->client_data)->is_header;
    const int is_made_up = code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER || code == JWRN_HUFF_BAD_CODE ||
                           code == JWRN_ARITH_BAD_CODE || code == JWRN_MUST_RESYNC;
    if (level < 0 && (is_made_up || is_garbage)) { image_jpeg_refuse_(jpeg); }
}

static inline void image_jpeg_no_output_(j_common_ptr jpeg) { (void)jpeg; }

static inline void image_jpeg_on_progress_(j_common_ptr jpeg) {
    JpegReader_* r = (JpegReader_*)jpeg->client_data;
    if (r->jpeg.input_scan_number <= JPEG_MOST_SCANS) { return; }
    error_set(r->error, "expected a JPEG image of at most %d scans, found more: store it again", JPEG_MOST_SCANS);
    image_jpeg_leave_(r);
}

// ---- orientation ----

static inline int image_jpeg_marker_is_(const struct jpeg_marker_struct* m, const char* begin, size_t n) {
    return m->marker == JPEG_APP0 + 1 && m->data_length >= n && memcmp(m->data, begin, n) == 0;
}

static inline int image_jpeg_orientation_(JpegReader_* r) {
    static const char of_exif[] = "Exif\0", of_xmp[] = "http://ns.adobe.com/xap/1.0/";  // each with a 0 more
    const size_t n_begin = sizeof of_exif, n_xmp = sizeof of_xmp;
    const struct jpeg_marker_struct* xmp = NULL;
    size_t n = 0;
    for (const struct jpeg_marker_struct* m = r->jpeg.marker_list; m; m = m->next) { n += m->data_length; }
    r->exif = (unsigned char*)malloc_check(n, "Exif of a JPEG image");
    n = 0;
    for (const struct jpeg_marker_struct* m = r->jpeg.marker_list; m; m = m->next) {
        if (image_jpeg_marker_is_(m, of_exif, n_begin)) {
            memcpy(r->exif + n, m->data + n_begin, m->data_length - n_begin);
            n += m->data_length - n_begin;
        } else if (image_jpeg_marker_is_(m, of_xmp, n_xmp)) {
            xmp = m;  // the last one counts
        }
    }
    const int orientation = orientation_of_exif(r->exif, n);
    return orientation || !xmp ? orientation : orientation_of_xmp(xmp->data + n_xmp, xmp->data_length - n_xmp);
}

// ---- pixels ----

// a * b / 255, to the nearest
static inline unsigned char image_jpeg_product_(int a, int b) { return (unsigned char)((2 * a * b + 255) / 510); }

static inline void image_jpeg_row_to_rgb_(unsigned char* rgb, const unsigned char* row, size_t width, int n_channels) {
    for (size_t x = 0; x < width; x++, rgb += 3, row += n_channels) {
        if (n_channels == 1) { memset(rgb, *row, 3); }
        for (int c = 0; n_channels == 4 && c < 3; c++) { rgb[c] = image_jpeg_product_(row[c], row[3]); }
    }
}

static inline void image_jpeg_read_pixels_(JpegReader_* r, size_t most_pixels) {
    struct jpeg_decompress_struct* jpeg = &r->jpeg;
    const int n = jpeg->num_components;
    if (n != 1 && n != 3 && n != 4) {
        error_set(r->error, "expected a JPEG image of 1, 3 or 4 channels, found %d: convert it", n);
        image_jpeg_leave_(r);
    }
    if (!image_room_(r->image, jpeg->image_height, jpeg->image_width, most_pixels, r->error)) { image_jpeg_leave_(r); }
    jpeg->out_color_space = n == 1 ? JCS_GRAYSCALE : n == 3 ? JCS_RGB : JCS_CMYK;
    jpeg->progress = &r->progress;
    jpeg_start_decompress(jpeg);
    const size_t width = jpeg->output_width;
    r->row = (unsigned char*)malloc_check(4 * width, "row of a JPEG image");
    while (jpeg->output_scanline < jpeg->output_height) {
        unsigned char* rgb = r->image->rgb + 3 * width * jpeg->output_scanline;
        JSAMPROW row = n == 3 ? rgb : r->row;
        jpeg_read_scanlines(jpeg, &row, 1);
        if (n != 3) { image_jpeg_row_to_rgb_(rgb, row, width, n); }
    }
    jpeg_finish_decompress(jpeg);  // up to the end marker, which must be there
}

// all that libjpeg may leave by longjmp, which keeps no local variable
static inline int image_jpeg_read_(JpegReader_* r, const unsigned char* bytes, size_t n_bytes, size_t most_pixels) {
    if (setjmp(r->on_error)) { return 0; }
    jpeg_create_decompress(&r->jpeg);
    jpeg_mem_src(&r->jpeg, (unsigned char*)bytes, (unsigned long)n_bytes);  // which does not write there
    jpeg_save_markers(&r->jpeg, JPEG_APP0 + 1, 0xffff);
    r->is_header = 1;
    jpeg_read_header(&r->jpeg, TRUE);
    r->is_header = 0;
    r->orientation = image_jpeg_orientation_(r);
    image_jpeg_read_pixels_(r, most_pixels);
    return 1;
}

// image: of image_room_ where 1, empty where 0
static inline int image_jpeg_decode(Image* image, int* orientation, const unsigned char* bytes, size_t n_bytes,
                              size_t most_pixels, ErrorText* error) {
    JpegReader_ r;
    memset(&r, 0, sizeof r);
    memset(image, 0, sizeof *image);
    r.image = image, r.error = error, r.n_bytes = n_bytes;
    r.jpeg.err = jpeg_std_error(&r.errors);
    r.jpeg.client_data = &r;
    r.errors.error_exit = image_jpeg_refuse_;
    r.errors.emit_message = image_jpeg_on_message_;
    r.errors.output_message = image_jpeg_no_output_;
    r.progress.progress_monitor = image_jpeg_on_progress_;
    const int ok = image_jpeg_read_(&r, bytes, n_bytes, most_pixels);
    jpeg_destroy_decompress(&r.jpeg);
    free(r.row);
    free(r.exif);
    if (!ok) { image_free(image); }
    *orientation = r.orientation;
    return ok;
}
#endif  // LLMC_IMAGE_JPEG_H
